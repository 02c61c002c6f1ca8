"""
How an attempt ended by what its run recorded, where that says more than the logs do.

A stop that somebody asked for is no failure. A supervisor that was killed records no end, and a disk without room keeps even the
verdict from being written.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.config import CACHE_SPACE
from paceline.errors import PacelineError
from paceline.explain.collectives import hang_evidence, hang_fix
from paceline.explain.curve_verdict import DIVERGED, STANDS_STILL
from paceline.explain.explanation import (
    HEALTHY,
    KERNEL_LOG,
    RECORDED,
    SUPERVISOR_CAUSES,
    UNKNOWN,
    Explanation,
    format_failures,
    format_summary,
)
from paceline.explain.log_text import count_lines
from paceline.explain.matches import PEER_DIED
from paceline.explain.verdict import NAN, explain_health
from paceline.file_systems import free_space
from paceline.rundir import RunDir, is_locked, is_queued, is_script_run, job_facts, read_text, resume_command
from paceline.slurm import JobReader, format_job, parse_job_id
from paceline.units import unix_time

DISK_FULL, STOPPED, SUPERVISOR_LOST = "disk-full", "keyboard-interrupt", "supervisor-lost"
PREEMPTED, KILLED, HANG = "preempted-sigterm", "killed-from-outside", "hang"
HOST_MEMORY, WORKER_KILLED = "host-oom-killed", "dataloader-worker-killed"
MAX_ERROR_FILE_BYTES = 1 << 20
KILL_CONFIDENCE = 0.8
LAST_LINE = "last line: "
FIRST_WORDS = re.compile(r"[A-Za-z]+(?: [A-Za-z]+){1,2}")  # of a text: later ones are often values of the program
HANGUP = "terminal-hangup"
AFTERMATH = {PREEMPTED, PEER_DIED, HANGUP}  # what workers and their launcher write when the supervisor is gone
OUTSIDE_SIGNALS = {"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGPIPE", "SIGXCPU"}
CURVE_CAUSES = (NAN, DIVERGED, STANDS_STILL)
LINES_BEHIND = 40  # a failure
EVEN_BATCHES = (
    "if it had fewer batches than the others, give all ranks as many (DistributedSampler, drop_last=True), and let none of them"
    " `continue` or `break` alone"
)
FULL_DISK_BYTES = 1 << 16  # with less free space a process may end without any output
DAMAGE_FIX = (
    "check the disk (smartctl -a DEVICE, dmesg), and the copy if the run was copied: files do not change by themselves"
)


def explain_unstarted(run: RunDir) -> Explanation:
    """Where a run without an attempt waits. Raises PacelineError where nothing is going to start it."""
    if is_locked(run):
        return Explanation(HEALTHY, summary=f"{run.name} has no attempt yet: its command is preparing it")
    if not is_queued(run):
        raise PacelineError(f"{run.name} has no logs: nothing was started", fix=resume_command(run))
    job = JobReader().read(parse_job_id(job_facts(run).get("job_id")))
    if job and job.is_over:
        raise PacelineError(f"{run.name} has not started: {format_job(job)}", fix=f"paceline watch {run.quoted}")
    place = format_job(job) or "its queue is not known here"
    return Explanation(HEALTHY, summary=f"{run.name} waits, Slurm has not started it yet: {place}")


@dataclass(frozen=True)
class RankError:
    """What a rank of the trainer, or torch's @record in a script, wrote about the error that ended it."""

    message: str
    type: str | None = None  # None: the message begins with it
    traceback: str = ""
    time: float | None = None  # Unix seconds
    step: int | None = None
    fix: str | None = None  # of a mistake that the user can fix
    exit_code: int | None = None  # of the command
    cause: str | None = None
    rollback: bool = False  # the step is repeated from the last checkpoint without its batch

    @property
    def text(self) -> str:
        return f"{self.type}: {self.message}" if self.type else self.message


def read_error_file(path: Path) -> RankError | None:
    """Returns the error in `<rank>.error.json` or torch's error.json; None where it is missing, incomplete or of another form.

    torch writes {"message": {"message": ..., "extraInfo": {"py_callstack": ..., "timestamp": ...}}}.
    """
    try:
        if path.stat().st_size > MAX_ERROR_FILE_BYTES:
            return None
        error = json.loads(read_text(path))
        if isinstance(message := error["message"], dict):
            extra = message["extraInfo"]
            return RankError(
                str(message["message"]), traceback=str(extra.get("py_callstack") or ""), time=float(extra["timestamp"])
            )
        moment = unix_time(error.get("time"))
        texts = {name: text for name in ("type", "fix", "cause") if isinstance(text := error.get(name), str)}
        return RankError(
            message=str(message),
            traceback=str(error.get("traceback") or ""),
            time=None if math.isnan(moment) else moment,
            step=error["step"] if isinstance(error.get("step"), int) else None,
            exit_code=error["exit_code"] if isinstance(error.get("exit_code"), int) else None,
            rollback=error.get("rollback") is True,
            **texts,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def events_of(all_events: Iterable[Mapping[str, Any]], attempt: int) -> list[Mapping[str, Any]]:
    """Returns the events of an attempt and those of none; that the training finished counts for the attempt that did it."""
    events, current = [], None
    for event in all_events:
        if event.get("event") == "attempt":
            current = event.get("attempt")
        is_of_another = event.get("event") == "finished" and current not in (None, attempt)
        if event.get("attempt") in (None, attempt) and not is_of_another:
            events.append(event)
    return events


def apply_recorded_end(
    explanation: Explanation, run: RunDir, events: Sequence[Mapping[str, Any]], attempt: int
) -> Explanation:
    """Replaces what the logs show by what the events of the attempt say about its end. events: its own and those of no attempt."""
    verdict = find_last(events, "verdict")
    has_cause = verdict.get("cause") not in (HEALTHY, None)
    by_kernel = any((item.source or "").startswith(KERNEL_LOG) for item in explanation.evidence)
    causes = {verdict.get("cause"), explanation.cause}
    # the supervisor knows how many the kernel killed
    is_kill = not by_kernel and causes <= {KILLED, HOST_MEMORY, WORKER_KILLED}
    shows_less = not explanation.shows_failure or (explanation.cause == UNKNOWN and verdict.get("cause") != UNKNOWN)
    adds = len(causes) == 1 and str(verdict.get("summary")).startswith(f"{explanation.summary}, ")
    if has_cause and (verdict["cause"] in SUPERVISOR_CAUSES or shows_less or is_kill or adds):  # no log shows it
        names = ("cause", "rank", "step", "host", "summary", "fix", "confidence")
        fields: dict[str, Any] = {name: verdict.get(name) for name in names}
        evidence = hang_evidence(run, attempt, fields["rank"]) if fields["cause"] == HANG else ()
        return replace(explanation, **fields, also=(), evidence=(*evidence, *explanation.evidence))
    if stop := find_stop(run, events):
        cause, summary, fix = stop
        if message := find_last(events, "attempt_ended").get("message"):
            summary = f"{summary}; {message}"
        evidence = [item for item in explanation.evidence if item.source == RECORDED]
        stopped = Explanation(
            cause, confidence=1.0, step=explanation.progress.last_step, summary=summary, fix=fix,
            evidence=tuple(evidence), progress=explanation.progress, notes=explanation.notes,
        )  # fmt: skip
        return explain_silence(stopped, run, attempt, find_last(events, "silence"))
    save = find_last(events, "save_failed", "checkpoint", "attempt", "attempt_ended")
    if save.get("event") == "save_failed" and not explanation.shows_failure and is_locked(run):
        summary = (
            f"the run is still running, and what it did since its last checkpoint is not saved: {save.get('message')}"
        )
        room = f"make room ({show_space(run, save.get('host'))}): it then saves within seconds"
        fix = f"{room}; watch it: `paceline watch {run.quoted}`"
        return replace(explanation, cause=DISK_FULL, confidence=1.0, step=save.get("step"), summary=summary, fix=fix)
    start, ended = find_last(events, "attempt"), find_last(events, "attempt_ended")
    shows_failure = explanation.shows_failure and explanation.cause not in AFTERMATH
    shows_end = ended or find_last(events, "finished") or shows_failure or explanation.progress.finished
    if not shows_end and run.lock.exists() and not is_locked(run):  # nobody runs it any more
        explanation = explain_full_disk(explanation, run, events)
        if explanation.cause != DISK_FULL:
            summary, fix = lost_supervisor_texts(attempt, start.get("head"))
            fix = f"{fix}; {next_command(run)}"
            facts: dict[str, Any] = {"host": start.get("head"), "confidence": 0.9, "summary": summary, "fix": fix}
            explanation = replace(explanation, cause=SUPERVISOR_LOST, also=(), **facts)
        return explanation
    if not shows_end and not explanation.shows_failure and is_locked(run):
        progress = replace(explanation.progress, silent_end=False)
        summary = f"the run is still running; {explain_health(progress).summary}"
        return replace(explanation, summary=summary, fix=f"watch it: `paceline watch {run.quoted}`", progress=progress)
    return explain_own_exit(explanation, run, events, attempt)


def note_recoveries(
    explanation: Explanation, run: RunDir, all_events: Sequence[Mapping[str, Any]], attempt: int
) -> Explanation:
    """Adds checkpoints whose files had changed, and to an attempt that is healthy or was stopped why those before it failed.

    Of a script: that its progress is not that of the whole run.
    """
    damage = [f"{event.get('message')}; {DAMAGE_FIX}" for event in all_events if event.get("event") == "damaged"]
    notes = [*explanation.notes, *damage[-1:]]
    verdicts = [
        event for event in all_events if event.get("event") == "verdict" and event.get("attempt", attempt) < attempt
    ]
    ends = [e for e in all_events if e.get("event") == "attempt_ended" and e.get("attempt") == attempt]
    notes += [text for e in ends[-1:] if (text := e.get("message")) and text not in explanation.summary]
    if explanation.cause in (PREEMPTED, STOPPED, HANGUP, SUPERVISOR_LOST):
        notes += earlier_failures(verdicts)
    if explanation.cause != HEALTHY:
        return replace(explanation, notes=tuple(notes))
    if attempt > 1 and is_script_run(run):
        notes.append(f"this is the progress of attempt {attempt} alone; paceline watch {run.quoted} has all attempts")
    if verdicts:
        causes = ", ".join(str(event.get("cause")) for event in verdicts)
        notes.append(f"earlier attempts failed and the run recovered: {causes}; paceline runs show {run.quoted}")
    return replace(explanation, notes=tuple(notes))


def earlier_failures(events: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns why attempts of a run failed, as its events have it."""
    verdicts = (event for event in events if event.get("event") == "verdict")
    return format_failures((int(v["attempt"]), str(v.get("cause")), format_summary(v)) for v in verdicts)


def note_good_end(explanation: Explanation, run: RunDir, events: Sequence[Mapping[str, Any]]) -> Explanation:
    """Adds to a failure in a script's output that the script itself reported none."""
    is_finished = find_last(events, "attempt_ended").get("state") == "finished"
    if not (is_finished and explanation.shows_failure and is_script_run(run)):
        return explanation
    text = "the script ended with exit code 0: it went on behind this, or does not report it"
    return replace(explanation, notes=(*explanation.notes, text))


def went_on(explanation: Explanation) -> bool:
    """Whether the log has many lines behind the failure that it shows: a script may catch an error and mean to."""
    if explanation.cause in CURVE_CAUSES:
        return False
    shown = [
        (Path(item.source), item.line) for item in explanation.evidence if item.source and item.source.endswith(".log")
    ]
    return any(path.is_file() and count_lines(path) > line + LINES_BEHIND for path, line in shown)


def find_stop(run: RunDir, events: Sequence[Mapping[str, Any]]) -> tuple[str, str, str] | None:
    """Returns cause, summary and fix of an attempt that was stopped for a reason that is recorded; None for another end."""
    ended, stopping = find_last(events, "attempt_ended"), find_last(events, "stopping")
    if ended.get("state") != "interrupted":
        return None
    next_events = [
        event for event in events[events.index(ended) :] if event.get("event") in ("requeued", "launch", "slurm_job")
    ]
    fix, signal = next_command(run), stopping.get("signal")
    is_requeued = bool(next_events) and next_events[0]["event"] == "requeued"
    if is_requeued and len(next_events) == 1:
        fix = f"job {next_events[0].get('job_id')} continues the run when Slurm starts it again"
    fix = fix if ended.get("message") else f"nothing is broken: {fix}"  # with one, ranks were killed while they saved
    if is_requeued:
        return PREEMPTED, f"the run was stopped and its Slurm job requeued: {next_events[0].get('why')}", fix
    if reason := stopping.get("reason"):
        return PREEMPTED, f"the run was stopped because its time was over: {reason}", fix
    if signal == "SIGUSR1":
        return PREEMPTED, "the run was stopped by SIGUSR1, a batch system's warning that the time is nearly over", fix
    if signal == "SIGHUP":
        detach = "; --detach keeps a run when its terminal is closed"
        return HANGUP, "the run was stopped because its terminal or its ssh session was closed (SIGHUP)", fix + detach
    if signal == "SIGINT":
        sent = str(stopping.get("sent")) if find_last(events, "script") else ""
        how = {"SIGTERM": "paceline stop (SIGTERM to its ranks)", "SIGINT": "Ctrl-C (SIGINT)"}.get(
            sent, "Ctrl-C or paceline stop (SIGINT)"
        )
        return STOPPED, f"the run was stopped on request, with {how}", fix
    return None


def explain_silence(explanation: Explanation, run: RunDir, attempt: int, silence: Mapping[str, Any]) -> Explanation:
    """Explains a stop by the silence before it, where there was one: the ranks hung, as far as their stacks show it."""
    if not silence:
        return explanation
    text = str(silence.get("text"))
    if not silence.get("is_seen"):
        otherwise = explanation.fix.removeprefix("nothing is broken: ")
        fix = f"if it hung, {hang_fix(run, silence)}; if not, {otherwise}"
        return replace(explanation, summary=f"{explanation.summary}; before that {text}", fix=fix)
    step, rank = silence.get("step"), silence.get("rank")
    evidence = (*hang_evidence(run, attempt, rank), *explanation.evidence)
    return replace(
        explanation, cause=HANG, also=(explanation.cause,), confidence=0.7, rank=rank, evidence=evidence,
        step=explanation.step if step is None else step,
        summary=f"{text}; then {explanation.summary}",
        fix=f"{hang_fix(run, silence)}; if it was only slow, {next_command(run)}",
    )  # fmt: skip


def find_last(events: Sequence[Mapping[str, Any]], *kinds: str) -> Mapping[str, Any]:
    """The last event of these kinds; empty where there is none."""
    return next((event for event in reversed(events) if event.get("event") in kinds), {})


def next_command(run: RunDir) -> str:
    """How the run goes on: a script starts again in the run's folder, and reads its own checkpoints."""
    effect = "starts the script again in its folder" if is_script_run(run) else "goes on from the last checkpoint"
    return f"`{resume_command(run)}` {effect}"


def explain_full_disk(
    explanation: Explanation,
    run: RunDir,
    events: Sequence[Mapping[str, Any]],
    free_bytes: int | None = None,
    *,
    host: str | None = None,
) -> Explanation:
    """Explains an end without any output by a full disk: there is one, or the last save had no room.

    free_bytes: of another host's disk, host.
    """
    where = f"the disk of {host}"
    if free_bytes is None:
        where, host, free_bytes = "the disk of the run folder", None, free_space(run.path)
    fix = f"make room on it ({show_space(run, host)}); then {next_command(run)}"
    if free_bytes is not None and free_bytes < FULL_DISK_BYTES:
        summary = f"{where} is full: nothing could be written"
        return replace(explanation, cause=DISK_FULL, summary=summary, fix=fix, confidence=0.9)
    save = find_last(events, "save_failed", "checkpoint")
    is_silent = all(item.source == RECORDED for item in explanation.evidence[:1])
    if save.get("event") == "save_failed" and is_silent:
        where = f"the disk of {save['host']}" if save.get("host") else "the disk of the run folder"
        fix = f"make room on it ({show_space(run, save.get('host'))}); then {next_command(run)}"
        summary = f"{where} had no room for the checkpoint of step {save.get('step')}"
        return replace(explanation, cause=DISK_FULL, summary=summary, fix=fix, confidence=0.8)
    return explanation


def show_space(run: RunDir, host: str | None) -> str:
    """Returns the command that shows the room on the disk of a run. host: another one, with its own copy of the run folder."""
    return f"ssh {host} {CACHE_SPACE}" if host else f"df -h {run.quoted}"


def lost_supervisor_texts(attempt: int, head: str | None) -> tuple[str, str]:
    """Summary and fix of a supervisor that was killed. head: its host, where there are several."""
    if head:
        return (
            f"the command that ran attempt {attempt} on {head} ended without a report, or {head} was lost;"
            " its workers end within half a minute",
            f"see that {head} is on and who killed the command there: --detach keeps it from the end of a session",
        )
    return (
        f"the command that ran attempt {attempt} was itself killed, or its machine went down, before it could report why;"
        " its workers end with it, on other hosts within half a minute",
        "find out who killed it: a closed session without nohup or tmux, a batch system, or the kernel when memory ran out",
    )


def explain_own_exit(
    explanation: Explanation, run: RunDir, events: Sequence[Mapping[str, Any]], attempt: int
) -> Explanation:
    """Explains the first rank that a signal ended of which no log tells, or that ended itself without an error."""
    ends = [event for event in events if event.get("event") == "rank_failed" and not event.get("consequence")]
    first = ends[0] if ends else {}
    rank, signal, code = first.get("rank"), first.get("signal"), first.get("exit_code")
    if rank is None or find_last(events, "stopping"):
        return explanation
    log = run.rank_log(attempt, rank)
    if signal in OUTSIDE_SIGNALS and explanation.cause in {UNKNOWN, STOPPED, *AFTERMATH}:
        num_alike = sum(event.get("signal") == signal for event in ends[1:])
        others = f", as were {num_alike} others" if num_alike else ", which was sent to it alone"
        summary = f"rank {rank} was ended by {signal}{others}"
        place = f" on {first['host']}" if first.get("host") else ""
        senders = f"a script that ends processes by name, another user, a batch system (`journalctl -e`{place})"
        fix = f"find out who sent it: {senders}, or the program itself (the end of {log}); {next_command(run)}"
        step = explanation.progress.last_step if explanation.step is None else explanation.step
        explanation = replace(explanation, step=step, confidence=max(explanation.confidence, KILL_CONFIDENCE))
        return replace(explanation, cause=KILLED, also=(), rank=rank, summary=summary, fix=fix)
    quoted = next((item.source for item in explanation.evidence), None) or ""
    if (
        code is None
        or explanation.cause not in (UNKNOWN, PEER_DIED, STOPPED)  # nobody asked this run to stop
        or quoted not in (RECORDED, str(run.launch_log(attempt)))
    ):
        return explanation
    if not find_last(events, "verdict"):  # a full disk keeps even that from being written
        explanation = explain_full_disk(explanation, run, events)
        if explanation.cause == DISK_FULL:
            return explanation
    message = str(first.get("message") or "").removeprefix(f"exit code {code}").lstrip(", ")
    summary = f"rank {rank} ended itself with exit code {code}, and its log shows no error that is known"
    search = f"find where the program exits with {code}: `grep -rnE 'exit\\({code}\\)' --include='*.py' .`"
    fix = search if message == "no output" else f"read the end of its log, {log}, and {search}"
    if code == 1 and message.startswith(LAST_LINE):
        words = FIRST_WORDS.match(message.removeprefix(LAST_LINE))
        fix = f"find what prints it: `grep -rnF '{words[0]}' --include='*.py' .`" if words else fix
        fix = f"its last line may be its own reason, as sys.exit(TEXT) prints one and ends with 1; {fix}"
    return replace(
        explanation, cause=UNKNOWN, rank=rank, summary=f"{summary}; {message}" if message else summary, fix=fix
    )
