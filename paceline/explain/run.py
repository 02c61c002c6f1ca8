"""
A run folder of ours, explained: its rank logs, with what a log alone lacks.

Exit codes and who ended whom stand in events.jsonl, errors in `<rank>.error.json`, how far each rank got in progress/, the batch
size in config.toml, how the hosts were in health/, and what the kernel did to the run's processes in the kernel log, where it may
be read.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from paceline.errors import PacelineError, TrainingFailed, UsageError
from paceline.explain.catalogue import Catalogue, load_catalogue
from paceline.explain.error_file import read_own_error
from paceline.explain.explain import chunks_from, explain, read_files
from paceline.explain.fill import fill, known
from paceline.explain.flight import late_rank
from paceline.explain.kernel_log import kernel_lines, killed_for_memory
from paceline.explain.reader import Log, read_log
from paceline.explain.record import SUPERVISED, Evidence, Explanation, Progress, Record
from paceline.explain.samples import (
    END_BYTES,
    Samples,
    count_lines,
    held_down,
    read_samples,
    short_of_disk,
    short_of_memory,
    xids_of,
)
from paceline.explain.verdict import UNKNOWN, reach_verdict
from paceline.marks import read_mark
from paceline.rundir import RunDir, read_end, read_json_lines

NO_LINES = Log(records=(), progress=Progress(), last_marks=(), last_lines=(), num_lines=0, num_bytes=0)
SURE = 0.8
HANG_LINES = {"mark": ("mark:",), "state": ("State:",), "frame": ("File ",)}  # of hangs/<attempt>/<rank>.txt
FOR_MEMORY, FROM_OUTSIDE = "host-oom-killed", "killed-from-outside"  # of the catalogue
TELLING = (  # samples, and the causes that they say something of
    (short_of_memory, {FOR_MEMORY, FROM_OUTSIDE, "dataloader-worker-killed", UNKNOWN}),
    (short_of_disk, {"disk-full", "checkpoint-corrupt", UNKNOWN}),
    (held_down, {"hang", "collective-timeout-desync", "gpu-throttled", UNKNOWN}),
)


def explain_run(run: RunDir, *, attempt: int | None = None) -> Explanation:
    """attempt: the last one, unless said."""
    catalogue = load_catalogue()
    attempt = attempt or last_attempt(run)
    events = [event for event in read_json_lines(run.events) if event.get("attempt") in (None, attempt)]
    files = sorted(run.logs(attempt).glob("*.log")) + sorted(run.logs(attempt).glob("*.error.json"))
    logs = [*read_files(files, catalogue), exits_of(events), steps_of(run), *kernel_logs(events, catalogue)]
    samples = samples_of(run, events)
    logs += xid_logs(samples, events, catalogue)
    logs += late_of(run, attempt, events)
    values = values_of(run)
    said = by_whose_hand(reach_verdict(logs, catalogue, values=values), events, catalogue, values)
    return with_samples(as_supervised(with_own_words(said, run, attempt), run, events, attempt), samples)


def last_attempt(run: RunDir) -> int:
    attempts = [int(path.name) for path in run.path.glob("logs/*") if path.name.isdecimal()]
    if not attempts:
        raise PacelineError(f"{run.name} has no logs: nothing was started", fix=f"paceline resume {run.path}")
    return max(attempts)


def exits_of(events: Sequence[Mapping[str, Any]]) -> Log:
    """How each rank ended, in the words of a launcher; what only followed counts as passed on."""
    records = []
    for event in events:
        if event.get("event") == "rank_failed":
            code, signal = event.get("exit_code"), event.get("signal")
            text = f"exitcode: {code}" if signal is None else f"terminated by signal {signal}"
            kind = "banner" if event.get("consequence") else "exit" if signal is None else "signal"
            records.append(Record(kind, text, 1, rank=event.get("rank"), source="events.jsonl"))  # type: ignore[arg-type]
        elif event.get("event") == "stopping" and event.get("signal"):
            records.append(Record("signal", f"Received signal {event['signal']}", 1, source="events.jsonl"))
    return replace(NO_LINES, records=tuple(records))


def steps_of(run: RunDir) -> Log:
    """How far each rank got, by progress/ and metrics.jsonl."""
    steps: dict[int, int] = {}
    for path in run.path.glob("progress/*"):
        if path.name.isdecimal() and (mark := read_mark(path)):
            steps[int(path.name)] = mark.step
    progress = Progress(last_step=max(steps.values(), default=None))
    first = next((each for each in read_json_lines(run.metrics) if isinstance(each.get("step"), int)), None)
    if first is not None:
        last = dict(first)
        for line in read_end(run.metrics, END_BYTES)[0].splitlines():
            with suppress(ValueError, AttributeError):  # a crash has cut it
                record = json.loads(line)
                last |= record if isinstance(record.get("step"), int) else {}
        progress = Progress(count_lines(run.metrics), first["step"], last["step"], last.get("loss"))
    return replace(NO_LINES, progress=progress, last_steps=steps, ranks=frozenset(steps))


def kernel_logs(events: Sequence[Mapping[str, Any]], catalogue: Catalogue) -> list[Log]:
    """What the kernel log says of the run's processes, each line with the rank of its process."""
    pids: list[Any] = next(
        (event["pids"] for event in reversed(events) if event.get("event") == "attempt" and event.get("pids")), []
    )
    found = kernel_lines({pid: rank for rank, pid in enumerate(pids) if isinstance(pid, int)})
    return [
        read_log([line.encode()], literals=catalogue.literals, rank=rank, source="kernel log") for rank, line in found
    ]


def late_of(run: RunDir, attempt: int, events: Sequence[Mapping[str, Any]]) -> list[Log]:
    """By what every rank recorded: a rank that did not is late itself, and then those that wait for it stand apart too."""
    recorded = run.recorded(attempt)
    started = next((event.get("world_size") for event in events if event.get("event") == "attempt"), None)
    late = late_rank(recorded) if len(recorded) == started else None
    return [late] if late else []


def samples_of(run: RunDir, events: Sequence[Mapping[str, Any]]) -> list[Samples]:
    """Each host's, of this attempt."""
    began = next((event["time"] for event in events if event.get("event") == "attempt"), None)
    return [read_samples(path, since=began) for path in sorted(run.health_dir.glob("*.jsonl"))] if began else []


def xid_logs(samples: Sequence[Samples], events: Sequence[Mapping[str, Any]], catalogue: Catalogue) -> list[Log]:
    """Xid errors that the samples have, in the words of the kernel."""
    pids: Sequence[Any] = next((event.get("pids") or () for event in events if event.get("event") == "attempt"), ())
    ranks = {pid: rank for rank, pid in enumerate(pids)}
    return [
        read_log(
            [each.line.encode()], literals=catalogue.literals, rank=ranks.get(each.pid), source=f"health/{each.host}"
        )
        for host in samples
        for each in xids_of(host)
    ]


def with_samples(said: Explanation, samples: Sequence[Samples]) -> Explanation:
    """The verdict stands; what the hosts were like at its end is shown beside it, where it bears on such a cause."""
    seen = [each for tell, causes in TELLING if said.cause in causes for host in samples for each in tell(host)]
    return replace(said, evidence=(*said.evidence, *seen))


def by_whose_hand(
    said: Explanation, events: Sequence[Mapping[str, Any]], catalogue: Catalogue, values: Mapping[str, str]
) -> Explanation:
    """A bare SIGKILL mostly means memory. Where the kernel log knows of no such kill, somebody sent it."""
    if said.cause != FOR_MEMORY or any(each.source != "events.jsonl" for each in said.evidence):
        return said
    times = [datetime.fromisoformat(event["time"]).timestamp() for event in events if "time" in event]
    if not times or killed_for_memory(times[0], times[-1]) is not False:
        return said
    cause = catalogue.causes[FROM_OUTSIDE]
    filled = {**values, **known({"rank": said.rank, "host": said.host})}
    summary, fix = fill(cause.summary, filled), fill(cause.fix, filled)
    return replace(said, cause=cause.id, also=(FOR_MEMORY,), summary=summary, fix=fix)


def as_supervised(said: Explanation, run: RunDir, events: Sequence[Mapping[str, Any]], attempt: int) -> Explanation:
    """What no log tells, and the supervisor has found: it stands in its verdict, and of a hang in hangs/<attempt>/ too."""
    verdict = next((event for event in reversed(events) if event.get("event") == "verdict"), None)
    if verdict is None or verdict.get("cause") not in SUPERVISED:
        return said
    told: dict[str, Any] = {
        name: verdict.get(name) for name in ("cause", "rank", "step", "summary", "fix", "confidence")
    }
    seen = hang_evidence(run, attempt, told["rank"]) if told["cause"] == "hang" else ()
    return replace(said, **told, also=(), evidence=(*seen, *said.evidence))


def hang_evidence(run: RunDir, attempt: int, rank: int | None) -> tuple[Evidence, ...]:
    """Of the rank that held up the others: its last mark, its state, and where its stack stood."""
    path = run.hang(attempt) / f"{rank}.txt"
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    found: dict[str, Evidence] = {}
    for number, line in enumerate(lines, 1):
        kind = next((kind for kind, start in HANG_LINES.items() if line.lstrip().startswith(start)), None)
        if kind and kind not in found:
            found[kind] = Evidence(number, line.strip(), rank, str(path.relative_to(run.path)))
    return tuple(found.values())


def values_of(run: RunDir) -> dict[str, str]:
    """What the run's own config adds to the sentences of the catalogue."""
    try:
        config = tomllib.loads(run.config_toml.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    size = config.get("device_batch_size")
    half = {"half_batch": str(size // 2)} if isinstance(size, int) and size > 1 else {}
    return {"run": str(run.path), **half}


def with_own_words(said: Explanation, run: RunDir, attempt: int) -> Explanation:
    """Where a rank has named its mistake and the fix itself, these words stand."""
    for path in sorted(run.logs(attempt).glob("*.error.json")):
        error = read_own_error(path)
        if error is None:
            continue
        rank = int(path.name.split(".")[0])
        cause = said.cause
        if cause == UNKNOWN or said.confidence < SURE:
            cause = UNKNOWN if error.exit_code == TrainingFailed.exit_code else "config-error"
        return replace(
            said, cause=cause, rank=rank, summary=error.message, fix=error.fix, confidence=max(said.confidence, SURE)
        )
    return said


def is_run(path: Path) -> bool:
    return (path / "config.toml").is_file() and (path / "events.jsonl").is_file()


def explain_words(words: Sequence[str], *, runs_dir: str | None, stdin: BinaryIO) -> Explanation:
    """What the words of the command line mean: files and folders, a run, or - for standard input."""
    if not words:
        raise UsageError("nothing to explain", fix="paceline explain LOG, a run's name, or - for standard input")
    if list(words) == ["-"]:
        return explain(chunks_from(stdin))
    paths = [Path(word) for word in words]
    if len(paths) == 1:
        named = Path(runs_dir or "runs") / words[0]
        found = next((path for path in (paths[0], named) if is_run(path)), None)
        if found:
            return explain_run(RunDir(found))
    return explain(paths)
