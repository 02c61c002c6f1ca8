"""
Which run of a log an explanation is about, and the sentences on the log's other runs.

A log may hold several runs: restarts that append to it, the programs of a script, the steps of a Slurm job. Each is explained
alone. The answer is that of the last one that did any work or failed, or of an earlier one that made it fail.
The logs of several jobs in one folder are several runs too, as are files of which one was written long after the others had
ended: the answer is that of the newest.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from paceline.explain.catalogue import load_catalogue
from paceline.explain.explanation import HEALTHY, UNKNOWN, Explanation
from paceline.explain.log import Log
from paceline.explain.matches import MIN_STEPS
from paceline.explain.roots import JOB_ENDS, LEFT_OVER_CAUSES, LEFT_OVER_TEXT, agent_reports
from paceline.explain.run_bounds import BUFFERED_LINES
from paceline.explain.signs_of_trouble import ends_well
from paceline.explain.survival import NOT_FOUND
from paceline.explain.verdict import explain_one_run
from paceline.units import format_number_of

# that an earlier program of a script may not have written
MISSING_FILES = {"checkpoint-missing-or-perm", "dataset-missing"}
FEW_LINES = 3  # like the log's first ones, behind an exception: what its program had in a buffer
MAX_TOLD = 3  # causes of other runs in one sentence
JOB_NAME = re.compile(  # with the number of a job: slurm-100.out, train-100.err, train.o100, 100.out, 100_0_log.out
    r"(?:slurm-(?P<slurm>\d+)|(?!.*(?i:20\d\d[-_]?[01]\d|nccl|rank|worker|proc|task|pid|host|node|gpu|part|step|epoch))"
    r"(?:.*[-_.][oe]?)?(?P<job>[1-9]\d*))(?:[-_.]\d{1,4})?(?:_log)?(?:\.(?:out|err|log|txt|gz|bz2|xz))*"
)
MIN_JOB = 100  # smaller numbers may be those of ranks, but for Slurm's own names
RANK_NAME = re.compile(
    r"(?:^|[^a-z])(?:rank|worker(?:log)?|process|proc|task)[-_.]?(?P<rank>\d{1,6})(?!\d)", re.IGNORECASE
)
RANK_FILE = re.compile(
    r"(?:^|/)(?P<rank>\d{1,5})(?:/(?:stdout|stderr)\.log|\.(?:log|out|err|txt|error\.json)|/error\.json)$"
)
APART_S, FINISHED_APART_S = 3600.0, 600.0  # no rank works on for so long without another; nor ends well, if it does
ONE_RUN_APART_S = 60.0  # the logs of one run's hosts end together, nearly always
INTERRUPTED = "keyboard-interrupt"
ENDS_FROM_OUTSIDE = {"host-oom-killed", "killed-from-outside", "preempted-sigterm", INTERRUPTED, "terminal-hangup"}
OTHER_STREAM = {"out": "err", "err": "out", "o": "e", "e": "o"}
STREAM_END = re.compile(r"(?:out|err)(?=(?:\.(?:log|txt))?$)|(?<=\.)[oe](?=\d+$)")  # train.out, stderr.log, train.o103
STREAM = re.compile(r"(?:std)?(?:out|err)|\.[oe](?=\d)")  # in the name of a file, of which one run has two
ONE_RUN = "these files are read as the logs of one run; where they are of several, explain each alone"


@dataclass(frozen=True)
class Run:
    """One of the runs in a log, and its explanation."""

    log: Log
    explanation: Explanation

    @property
    def state(self) -> Literal["failed", "worked", "silent"]:
        progress = self.explanation.progress
        if self.explanation.shows_failure:
            return "failed"
        # not of what cleans up behind a program, nor a few lines of it that were in a buffer
        is_new = self.log.is_later or self.log.by_command or self.num_lines > FEW_LINES
        is_restart = self.log.is_restart and ends_well(self.log) and is_new
        # a job's script also says "done" behind commands that failed
        lacks_command = any(NOT_FOUND.search(record.text) for record in self.log.records)
        is_done = progress.finished and (progress.steps > 0 or not lacks_command)
        shows_work = is_done or progress.steps >= MIN_STEPS or is_restart or self.log.is_serving
        return "worked" if self.explanation.cause == HEALTHY and shows_work else "silent"

    @property
    def num_lines(self) -> int:
        return max(0, self.log.last_line - self.log.first_line + 1)

    @property
    def counts(self) -> bool:
        """Whether it did any work, failed, or printed more than what a program leaves behind that another one has ended."""
        return self.state != "silent" or self.num_lines > BUFFERED_LINES + 1


@dataclass(frozen=True)
class Chosen:
    """The runs that are asked about, one of each log, and sentences on the other runs."""

    logs: tuple[Log, ...]
    notes: tuple[str, ...]


def reach_verdict(logs: Sequence[Log], *, values: Mapping[str, str] | None = None) -> Explanation:
    """The explanation of the runs that are asked about, and a note on failures of other runs in the same files.

    values: those that the logs do not contain, such as the batch size.
    """
    return explain_chosen(choose_runs(logs), values or {})


def choose_runs(logs: Sequence[Log]) -> Chosen:
    """The run that is asked about of each log, and sentences on the others."""
    chosen, notes = [], []
    for log in logs:
        notes += [log.note] if log.note else []
        if not log.earlier:
            chosen.append(log)
            continue
        runs = [Run(part, explain_one_run([part], {})) for part in (*log.earlier, log)]  # each explained alone
        place = judge_runs(runs)
        chosen.append(runs[place].log)
        notes += describe_others(runs, place)
    return Chosen(tuple(chosen), tuple(dict.fromkeys(notes)))


def explain_chosen(runs: Chosen, values: Mapping[str, str]) -> Explanation:
    explanation = explain_one_run(runs.logs, values)
    return replace(explanation, notes=(*explanation.notes, *runs.notes))


def newest_job(files: Sequence[Path]) -> tuple[list[Path], str]:
    """The files of the newest job and those of none, where names have the numbers of several; a sentence on the other jobs."""
    matches = {path: match for path in files if (match := JOB_NAME.fullmatch(path.name))}
    jobs = {path: int(match["slurm"] or match["job"]) for path, match in matches.items()}
    newest, *others = sorted(set(jobs.values()), reverse=True) or [0]
    if not others or any(match["job"] and jobs[path] < MIN_JOB for path, match in matches.items()):
        return list(files), ""
    logs = [[path for path in jobs if jobs[path] == job] for job in others]
    return [path for path in files if jobs.get(path, newest) == newest], name_others(
        "jobs", f"{newest}, the newest", logs
    )


def other_stream(log: Path) -> Path | None:
    """The file beside a log that holds the other one of stdout and stderr; None if there is none, or nothing in it."""
    other = log.with_name(STREAM_END.sub(lambda end: OTHER_STREAM[end[0]], log.name))
    return other if other != log and other.is_file() and other.stat().st_size else None


def ranks_of(files: Sequence[Path]) -> list[int | None]:
    """The ranks in the names, if the files have different ones; one file alone may hold the output of many ranks."""
    names = ["/".join(path.parts[-2:]) for path in files]
    matches = [RANK_NAME.search(name) or RANK_FILE.search(name) for name in names]
    ranks = [int(match["rank"]) if match else None for match in matches]
    is_one = len(files) == 1 and not files[0].stem.isdecimal()  # a number alone can be that of a job
    return ranks if is_one or len(set(ranks) - {None}) > 1 else [None] * len(files)


def newest_run(files: Sequence[Path], logs: Sequence[Log]) -> tuple[list[Path], str]:
    """The files of the run that was written last, where others had failed long before; a sentence on the others."""
    are_numbers = all(path.stem.isdecimal() and int(path.stem) for path in files)  # of runs, or of ranks but 0
    if not len(logs) == len(files) > 1 or not (are_numbers or set(ranks_of(files)) == {None}):
        return list(files), ""
    runs: dict[Path, list[Run]] = {}
    paths: dict[Path, list[Path]] = {}  # the streams of one run
    for path, log in zip(files, choose_runs(logs).logs, strict=True):
        name = path.parent / STREAM.sub("", path.name)
        runs.setdefault(name, []).append(Run(log, explain_one_run([log], {})))
        paths.setdefault(name, []).append(path)
    written = {name: max(path.stat().st_mtime for path in streams) for name, streams in paths.items()}
    *others, newest = sorted(written, key=lambda name: written[name])
    is_finished = any(run.explanation.progress.finished for run in runs[newest])
    states = {name: {run.state for run in streams} for name, streams in runs.items()}
    failed = [name for name in reversed(others) if "failed" in states[name]]
    apart = FINISHED_APART_S if is_finished else APART_S
    older = [name for name in failed if written[newest] - written[name] > apart]
    failures = [run for run in runs[newest] if run.state == "failed"]
    if older and states[newest] != {"silent"} and not any(may_follow(run) or is_from_outside(run) for run in failures):
        last = " ".join(map(str, paths[newest]))
        note = name_others("runs", f"{last}, written last", [paths[name] for name in older])
        return [path for path in files if not any(path in paths[name] for name in older)], note
    is_apart = any(written[newest] - written[name] > ONE_RUN_APART_S for name in failed)
    return list(files), ONE_RUN if is_apart and "worked" in states[newest] else ""


def name_others(kind: str, newest: str, others: Sequence[Sequence[Path]]) -> str:
    """The sentence on the logs that are not explained, the newest first."""
    commands = (f"`{shlex.join(['paceline', 'explain', *map(str, files)])}`" for files in others[:MAX_TOLD])
    more = f" and {len(others) - MAX_TOLD} older" if len(others) > MAX_TOLD else ""
    return f"these are the logs of {len(others) + 1} {kind}, and {newest}, is explained; the others: {', '.join(commands)}{more}"


def judge_runs(runs: Sequence[Run]) -> int:
    """The place of the run that is asked about."""
    shown = [at for at, run in enumerate(runs) if run.counts]
    last = len(runs) - 1
    before = runs[last - 1]
    was_ended = before.log.has_end or is_from_outside(before)
    just_began = runs[last].log.is_later or (runs[last].log.is_restart and not was_ended)
    # by the user, who started the next one
    was_stopped = (
        before.explanation.cause == INTERRUPTED and runs[last].log.by_command and runs[last].num_lines > FEW_LINES
    )
    if not shown or ((just_began or was_stopped) and runs[last].state == "silent"):
        return last
    at = shown[-1]
    while at > 0 and runs[at - 1].state == "failed" and is_consequence(runs[at], runs[at - 1]):
        at -= 1
    return at


def is_consequence(run: Run, before: Run) -> bool:
    """Whether a run failed because the run before it did, or is what was left of it."""
    cause, evidence = run.explanation.cause, run.explanation.evidence
    agents, agents_before = ({pid for _, pid in agent_reports(one.log)} for one in (run, before))
    if agents & agents_before and (
        cause in LEFT_OVER_CAUSES or any(LEFT_OVER_TEXT.search(item.text) for item in evidence[:1])
    ):
        return True  # torchrun's agent restarted the workers, which met what those before them had left
    if run.state != "failed" or run.log.is_later or cause == before.explanation.cause:
        return False
    if cause != UNKNOWN and run.explanation.progress.steps:
        return False
    is_script = run.log.by_command and before.log.by_command
    return may_follow(run) or (is_script and cause in MISSING_FILES)


def may_follow(run: Run) -> bool:
    """Whether a failure may be the consequence of one that its log does not show."""
    cause = run.explanation.cause
    if cause == UNKNOWN:  # how a launcher reports the end of what failed before
        return all(record.kind != "exception" for record in run.log.records)
    return cause in load_catalogue().causes and load_catalogue().causes[cause].follows is True


def is_from_outside(run: Run) -> bool:
    """Whether a run was ended from outside, as one that hangs is because another rank failed."""
    return run.explanation.cause in ENDS_FROM_OUTSIDE | JOB_ENDS


def is_other_rank(run: Run, chosen: Run) -> bool:
    """Whether two ranks of one launch failed of the same, so that the launcher reports both behind the second one."""
    reported, other_reported = (
        any(record.kind in ("banner", "exit") for record in one.log.records) for one in (run, chosen)
    )
    texts, other_texts = ({item.text for item in one.explanation.evidence} for one in (run, chosen))
    return other_reported and not reported and bool(texts & other_texts)


def describe_others(runs: Sequence[Run], place: int) -> list[str]:
    """A sentence about the runs before the one at `place` that failed, and one about those behind it."""
    sentences = []
    for word, others in (("earlier", runs[:place]), ("later", runs[place + 1 :])):
        failed = [run.explanation for run in others if run.state == "failed" and not is_other_rank(run, runs[place])]
        causes = [f"{explanation.cause} (line {explanation.line:,})" for explanation in failed if explanation.line]
        if failed:
            file = next((record.source for run in runs for record in run.log.records if record.source), "this file")
            subject = f"{format_number_of(len(failed), f'{word} run')} in {file} failed"
            more = f" and {len(causes) - MAX_TOLD} more" if len(causes) > MAX_TOLD else ""
            sentences.append(f"{subject}: {', '.join(causes[-MAX_TOLD:])}{more}")
    return sentences
