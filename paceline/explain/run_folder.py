"""
Explains a run folder, or logs alone: a file, several, a folder of them, or a stream; compressed files are read directly.

The logs of a run's ranks are read together with what the run recorded beside them: events.jsonl has exit codes and the supervisor's
own verdict, `<rank>.error.json` errors, progress/ how far each rank got, config.toml the batch size, health/ the state of the
hosts, and the kernel log, if it can be read, kills. One file may hold the output of all ranks, or each rank has its own file,
whose name or folder contains the rank; a failed process may also have written torch's error.json.
"""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from paceline.errors import PacelineError, TrainingFailed, UsageError
from paceline.explain import several_runs
from paceline.explain.catalogue import load_catalogue
from paceline.explain.collectives import RAS_NAME, companion_logs, flight_recorder_logs
from paceline.explain.curve_verdict import add_findings, explain_curves, judge_curves
from paceline.explain.evidence import (
    DISK_FIELDS,
    MEMORY_FIELDS,
    clock_texts,
    exit_log,
    fill_texts,
    has_oom_kill,
    judge_run,
    progress_log,
    read_host_log,
    read_samples,
    slurm_logs,
    system_logs,
)
from paceline.explain.explanation import HEALTHY, RECORDED, UNKNOWN, Evidence, Explanation, Record, name_host
from paceline.explain.line_filter import Shapes
from paceline.explain.log import Log
from paceline.explain.log_curves import judge_progress
from paceline.explain.log_text import START_BYTES, chunks_from, count_lines, read_chunks
from paceline.explain.reader import read_log
from paceline.explain.recorded_end import (
    DISK_FULL,
    HANG,
    HOST_MEMORY,
    KILLED,
    WORKER_KILLED,
    apply_recorded_end,
    earlier_failures,
    events_of,
    explain_unstarted,
    find_last,
    note_good_end,
    note_recoveries,
    read_error_file,
)
from paceline.explain.sentences import clean_values, fill_template
from paceline.explain.series import (
    LOSS,
    STEP_NAMES,
    MetricSeries,
    is_metric_file,
    kind_of,
    read_series,
    training_series,
    written_metrics,
)
from paceline.rundir import (
    RunDir,
    check_readable,
    is_preparing,
    is_queued,
    is_script_run,
    json_records,
    open_file,
    read_config,
    read_json_lines,
    resume_command,
)
from paceline.slurm import unstarted_job
from paceline.typed_fields import damaged_files, typed_content, well_typed
from paceline.units import format_number_of, parse_time, unix_time

SURE = 0.8
SAMPLE_EVIDENCE = (  # evidence in the hosts' samples, and the causes that it supports
    (partial(fill_texts, MEMORY_FIELDS), {HOST_MEMORY, KILLED, WORKER_KILLED, UNKNOWN}),
    (partial(fill_texts, DISK_FIELDS), {DISK_FULL, "checkpoint-corrupt", UNKNOWN}),
    (clock_texts, {HANG, "collective-timeout-desync", "gpu-throttled", UNKNOWN}),
)
MAX_FILES = 20_000
LOG_NAMES = re.compile(
    r"(?:\.(?:log|txt|out|err|output|stdout|stderr)(?:\.\d+)?(?:\.(?:gz|bz2|xz))?|(?:^|/)(?:stdout|stderr|slurm-\S+|log)|\.[oe]\d+)$"
)
SCRIPT_NAMES = re.compile(r"\.(?:py|sh|bash|slurm|sbatch|pbs)$")
NO_LOG = re.compile(
    r"/(?:vocab|merges|added_tokens|requirements|special_tokens)\.txt$|\.(?:ya?ml|toml|ini|cfg|md)$"
    r"|(?:^|/)debug-(?:internal|core|cli)[\w.-]*\.log$|wandb/debug\.log$"
)
WHAT_TO_PASS = "paceline explain LOG, a run's name, or - for standard input"
ERROR_NAMES = re.compile(r"(?:^|[._-])error\.json$")


def explain_run(run: RunDir, *, attempt: int | None = None) -> Explanation:
    """Explains an attempt of a run, by default the last one."""
    check_readable(run)
    with typed_content(run):
        explanation: Explanation = well_typed(explain_attempt(run, attempt), Explanation)
    return explanation


def explain_attempt(run: RunDir, attempt: int | None) -> Explanation:
    """Explains an attempt of a run, by default the last one; its fields are as the files have them."""
    all_events = list(read_json_lines(run.events))
    job = unstarted_job(all_events)
    if attempt is None:
        numbers = [int(path.name) for path in run.path.glob("logs/*") if path.name.isdecimal()]
        attempt = max(numbers, default=None)
        if (job or attempt is None) and (ended := explain_job(run, all_events, job, has_attempt=attempt is not None)):
            return ended
    if attempt is None:
        return explain_unstarted(run)
    events = events_of([event for event in all_events if event is not job], attempt)
    starts = {event.get("attempt"): event.get("time") for event in all_events if event.get("event") == "attempt"}
    start = find_last(events, "attempt")
    paths = run.health_dir.glob("*.jsonl") if start.get("time") else ()
    samples = {path.stem: read_samples(path, since=start["time"]) for path in sorted(paths)}
    hosts: dict[str, list[int]] = start.get("hosts") or {}  # the ranks on each of several
    far_hosts = [host for host in hosts if host != start.get("head")]  # all but the supervisor's
    far_logs = {path(attempt, host): host for path in (run.launch_log, run.kernel_log) for host in far_hosts}
    logs_here = sorted(run.logs(attempt).glob("*.log"))
    values = run_values(run)
    error_files = sorted(run.logs(attempt).glob("*.error.json"))
    logs = [
        *read_files([*(path for path in logs_here if path not in far_logs), *error_files]),
        *(log for path, host in far_logs.items() if path.exists() for log in [read_host_log(path, host)]),
        exit_log(all_events, attempt),
        progress_log(run, events),
        *system_logs(samples, events, far_hosts),
        *flight_recorder_logs(run, attempt, events),
        *slurm_logs(run, events),
    ]
    explanation = several_runs.reach_verdict(logs, values=values)
    if not any(explanation.rank in hosts[host] for host in far_hosts):  # its kernel log cannot be read from here
        explanation = correct_kill(explanation, events, values)
    explanation = apply_reported_error(explanation, error_files)
    explanation = apply_recorded_end(explanation, run, events, attempt)
    explanation = name_host(explanation, hosts)
    state = [  # of the hosts at the end of the attempt
        Evidence(count_lines(run.health(host)), text, None, f"health/{host}.jsonl")
        for find_texts, causes in SAMPLE_EVIDENCE
        if explanation.cause in causes
        for host, lines in samples.items()
        for text in find_texts(host, lines)
    ]
    since, until = (unix_time(starts.get(number)) for number in (attempt, attempt + 1))
    explanation = replace(explanation, evidence=(*explanation.evidence, *state))
    explanation = add_findings(explanation, judge_run(run, since=since, until=until))
    if is_script_run(run):
        metrics = written_metrics(run, [unix_time(time) for time in starts.values()]).get(attempt, ())
        explanation = judge_script(explanation, logs, *training_series(metrics))
    explanation = note_good_end(explanation, run, events)
    explanation = replace(explanation, notes=(*explanation.notes, *damaged_files(run)))
    return note_recoveries(explanation, run, all_events, attempt)


def judge_script(
    explanation: Explanation, logs: Sequence[Log], curves: Sequence[MetricSeries], notes: Sequence[str]
) -> Explanation:
    """The explanation of a script's attempt with the curves of its files of metrics, or without any those of its lines.

    What the curves show is a failure only where the log shows none, and they make no failure healthy.
    """
    findings = judge_curves(curves)
    if not findings:
        explanation = judge_progress(explanation, logs)
    if explanation.cause == HEALTHY and explanation.progress.last_step is None and not findings:
        alone = explain_curves(curves, explanation.notes, names="metrics")
        explanation = alone if alone.cause == HEALTHY else explanation
    explanation = add_findings(explanation, findings) if findings else explanation
    return replace(explanation, notes=(*explanation.notes, *notes))


def explain_job(
    run: RunDir, events: Sequence[Mapping[str, Any]], job: Mapping[str, Any] | None, *, has_attempt: bool
) -> Explanation | None:
    """Explains the end of a Slurm job before the run began or was continued; None where only its attempts show a failure."""
    logs = slurm_logs(run, events, has_attempt=False)
    explanation = several_runs.reach_verdict(logs, values=run_values(run)) if logs else None
    if explanation is None or (has_attempt and not explanation.shows_failure):
        return None
    point = "it continued the run" if has_attempt else "its run began"
    begin = f"Slurm's job {job.get('job_id')} ended before {point}: " if job else ""
    notes = (*explanation.notes, *earlier_failures(events))
    return replace(explanation, summary=f"{begin}{explanation.summary}", notes=notes)


def run_values(run: RunDir) -> dict[str, str]:
    """Values from the run's config for the sentences of the catalogue."""
    size = read_config(run).get("device_batch_size")
    half = {"half_batch": str(size // 2)} if isinstance(size, int) and size > 1 else {}
    return {**half, "resume": resume_command(run)}


def correct_kill(
    explanation: Explanation, events: Sequence[Mapping[str, Any]], values: Mapping[str, str]
) -> Explanation:
    """A bare SIGKILL usually means that memory ran out; if the kernel log has no such kill, it came from outside the run."""
    if explanation.cause != HOST_MEMORY or any(item.source != RECORDED for item in explanation.evidence):
        return explanation
    times = [parse_time(event["time"]) for event in events if "time" in event]
    if not times or has_oom_kill(times[0], times[-1]) is not False:
        return explanation
    cause = load_catalogue().causes[KILLED]
    values = {**values, **clean_values({"rank": explanation.rank, "host": explanation.host})}
    summary, fix = fill_template(cause.summary, values), fill_template(cause.fix, values)
    return replace(explanation, cause=cause.id, also=(), summary=summary, fix=fix)


def apply_reported_error(explanation: Explanation, error_files: Sequence[Path]) -> Explanation:
    """If a rank reported its error with a fix, its message, fix and step replace those of the catalogue and of the log."""
    for path in error_files:
        error, rank = read_error_file(path), path.name.split(".")[0]
        if error is None or not error.fix or not rank.isdecimal():
            continue
        cause, confidence = explanation.cause, max(explanation.confidence, SURE)
        if cause == UNKNOWN or explanation.confidence < SURE:
            cause = UNKNOWN if error.exit_code == TrainingFailed.exit_code else "config-error"
        if error.cause and error.cause in load_catalogue().causes:
            cause = error.cause
        step = explanation.step if error.step is None else error.step  # a step that fails has no line in the log
        return replace(
            explanation,
            cause=cause, rank=int(rank), step=step, summary=error.message, fix=error.fix, confidence=confidence,
        )  # fmt: skip
    return explanation


def explain_logs(names: Sequence[str], *, runs_dir: str, stdin: BinaryIO) -> Explanation:
    """Explains files and folders, a run's folder or name, or - for standard input."""
    if not names:
        raise UsageError("nothing to explain", fix=WHAT_TO_PASS)
    if list(names) == ["-"]:
        return explain(chunks_from(stdin))
    if "-" in names:
        raise UsageError("- is given with other logs", fix="paceline explain - alone, or the files alone")
    runs = [run for name in names for run in find_runs(name, runs_dir=runs_dir)]
    if len(runs) == 1 and len(names) == 1:
        return explain_run(runs[0])
    if runs:
        newest = max(runs, key=lambda run: run.events.stat().st_mtime if run.events.exists() else 0.0)
        text = f"explain takes one run at a time, without further logs: {format_number_of(len(runs), 'run')} given"
        runs_dir = shlex.quote(str(newest.path.parent))
        fix = f"paceline explain {newest.quoted} explains the newest; `paceline runs {runs_dir}` lists them"
        raise UsageError(text, fix=fix)
    files = find_files([Path(name) for name in names])
    explanation = explain_files(files)
    if len(files) == 1 and explanation.cause in (HEALTHY, UNKNOWN) and (other := several_runs.other_stream(files[0])):
        explanation = explain_files([*files, other])
        return replace(explanation, notes=(f"{other}, which lies beside it, is read too", *explanation.notes))
    return explanation


def find_runs(name: str, *, runs_dir: str) -> list[RunDir]:
    """The run that a folder or a name means, or all runs in a folder; none for a log."""
    for run in (RunDir(Path(name)), RunDir(Path(runs_dir) / name)):
        has_begun = run.config_toml.is_file() and (run.events.is_file() or run.plan_json.is_file())
        if has_begun or is_queued(run) or is_preparing(run):
            return [run]
    folders = (RunDir(path.parent) for path in Path(name).rglob("events.jsonl"))
    return [run for run in folders if run.config_toml.is_file()]


def explain(source: Iterable[bytes] | Path) -> Explanation:
    """Explains the chunks of one log, a file, or a folder of files."""
    if isinstance(source, Path):
        return explain_files(find_files([source]))
    runs = several_runs.choose_runs([read_log(source)])
    return judge_progress(several_runs.explain_chosen(runs, {}), runs.logs)


def explain_files(files: Sequence[Path]) -> Explanation:
    """Explains logs with what lies beside them, files with metrics, or both; what a log shows stays the cause."""
    job_files, other_jobs = several_runs.newest_job(files)
    if other_jobs:
        explanation = explain_files(job_files)
        return replace(explanation, notes=(*explanation.notes, other_jobs))
    metrics = {path for path in files if is_metric_file(path)}
    texts = [path for path in files if path not in metrics and not RAS_NAME.search(path.name)]
    metrics = metrics or set(filter(has_json_metrics, texts))  # which may be logs as well
    logs = read_files(texts)
    newest, note = several_runs.newest_run(texts, logs)
    if len(newest) < len(texts):
        explanation = explain_files([path for path in files if path not in texts or path in newest])
        return replace(explanation, notes=(*explanation.notes, note))
    runs = several_runs.choose_runs([*logs, *companion_logs(files)])
    runs = replace(runs, notes=(*runs.notes, note)) if note else runs
    explanation = several_runs.explain_chosen(runs, {})
    if not metrics:
        return judge_progress(explanation, runs.logs)
    curves, notes = read_series(metrics)
    findings = judge_curves(curves)
    if not findings and metrics <= set(texts):
        return judge_progress(explanation, runs.logs)
    if not (explanation.shows_failure or explanation.progress.steps):
        alone = explain_curves(curves, notes, names=", ".join(sorted(path.name for path in metrics)[:3]))
        if alone.cause != UNKNOWN or explanation.cause == UNKNOWN:
            return alone
    return replace(add_findings(explanation, findings), notes=(*explanation.notes, *notes))


def has_json_metrics(path: Path) -> bool:
    """Whether a file of any name begins with JSON lines that have a step and a loss."""
    with suppress(OSError), open_file(path) as file:
        lines = file.read(START_BYTES).rpartition(b"\n")[0].splitlines()
        records = list(json_records(lines))
        steps = [any(name in record for name in STEP_NAMES) for record in records]
        return len(records) == len(lines) and all(steps) and any(kind_of(name) == LOSS for name in chain(*records))
    return False


def read_files(files: Sequence[Path]) -> list[Log]:
    """Parses each file as a log; if there are several, records have the file's name as their source.

    Of several, one that cannot be read becomes a note.
    """
    logs = []
    shapes, errors = Shapes(), []
    for path, rank in zip(files, several_runs.ranks_of(files), strict=True):
        if ERROR_NAMES.search(path.name):
            logs += error_log(path, rank=rank)
        else:
            source = str(path) if len(files) > 1 else None
            try:
                log = read_log(read_chunks(path), rank=rank, source=source, shapes=shapes)
                others = {record.rank for record in log.records if record.frames} - {None, rank}
                is_mixed = source is None and rank is not None and others  # its name is not that of a rank
                logs.append(read_log(read_chunks(path)) if is_mixed else log)
            except PacelineError as error:
                logs.append(Log(note=error.message))
                errors.append(error)
    if errors and len(errors) == len(logs):
        raise errors[0]
    return logs


def find_files(paths: Sequence[Path]) -> list[Path]:
    """The paths with each folder replaced by its log files, or by all its text files if none looks like a log."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.is_file())[:MAX_FILES]
            named = [file for file in inside if LOG_NAMES.search(file.as_posix()) or ERROR_NAMES.search(file.name)]
            metrics = [file for file in inside if is_metric_file(file, in_folder=True)]
            logs = [file for file in named if not (file in metrics or is_no_log(file))] + metrics
            logs = logs or named or [file for file in inside if is_text(file) and not is_no_log(file)]
            if not logs:
                raise PacelineError(f"no log in {path}", fix="pass the files: paceline explain FILE ...")
            files += logs
        elif SCRIPT_NAMES.search(path.name) and is_script(path):
            fix = "pass what it printed; of a batch job that is the file behind #SBATCH --output, or slurm-JOB.out"
            raise UsageError(f"{path} is a script, not its output", fix=fix)
        elif path.exists():
            files.append(path)
        else:
            raise PacelineError(f"no such file: {path}", fix=WHAT_TO_PASS)
    return list(dict.fromkeys(files))


def is_no_log(path: Path) -> bool:
    """Whether a text file is no log: a tokenizer's, a list of packages, what wandb says about itself, settings."""
    is_of_wandb = path.name == "debug.log" and path.with_name("debug-internal.log").is_file()
    return is_of_wandb or NO_LOG.search(path.as_posix()) is not None


def is_script(path: Path) -> bool:
    with suppress(OSError), open_file(path) as file:
        return path.suffix == ".py" or file.read(2) == b"#!"
    return False


def is_text(path: Path) -> bool:
    with suppress(OSError), open_file(path) as file:
        return b"\0" not in file.read(4096)
    return False


def error_log(path: Path, *, rank: int | None) -> list[Log]:
    """A log of one record; none if the file is not an error file or is incomplete."""
    error = read_error_file(path)
    if error is None:
        return []
    records = read_log([error.traceback.encode()], rank=rank, source=str(path)).records
    frames = records[-1].frames if records else ()
    return [Log(records=(Record("exception", error.text, 1, rank, None, error.time, error.step, frames, str(path)),))]
