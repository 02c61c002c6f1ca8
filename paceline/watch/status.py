"""
The one way to what a run or a log is: `open_reader` for one in full, again and again; `list_runs` for all at a glance.

Reads files only. A run is `running` while some process holds its lock; what else it can be stands in its last event.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import PacelineError
from paceline.rundir import RunDir, is_locked, read_end, read_json_lines
from paceline.units import format_count
from paceline.watch.attempts import end_of
from paceline.watch.lines import parse_lines
from paceline.watch.snapshot import Snapshot

LAST_BYTES = 64 << 10  # read of metrics.jsonl for a list of runs, unless a field is further back
LOOKED_BACK_BYTES = 4 << 20


class Reader(Protocol):
    """`update` as often as you like: it reads only what is new, and survives whatever happens to the files."""

    def update(self) -> Snapshot: ...


def open_reader(path: Path) -> Reader:
    """A run folder, or any log file. Reads nothing yet."""
    from paceline.watch.log_reading import LogReader  # here: numpy is for who reads a run in full
    from paceline.watch.reading import RunReader

    if (path / "config.toml").is_file():
        return RunReader(RunDir(path))
    if path.is_file():
        return LogReader(path)
    if path.is_dir():
        raise PacelineError(
            f"{path} is no run: no config.toml is in it", fix="paceline runs lists them; or name a log file"
        )
    raise PacelineError(f"no such file: {path}", fix="a run's folder, or the log of a training")


@dataclass(frozen=True)
class RunStatus:
    """One run at a glance. What is not known yet is None."""

    name: str
    path: str
    state: str  # running, finished, stopped, failed, or broken: it ended without a word
    step: int
    num_steps: int | None
    loss: float | None
    val_bpb: float | None
    tok_per_sec: float | None
    attempts: int
    time: str | None  # of the last event
    command: list[str] | None = None  # of `paceline run`; such a run has no steps and no metrics of ours

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def run_status(run: RunDir) -> RunStatus:
    """From the ends of its files: a hundred long runs are listed at once."""
    events = list(read_json_lines(run.events))
    values = last_values(run.metrics, ("step", "loss", "val_bpb", "tok_per_sec"))
    return RunStatus(
        name=run.name,
        path=str(run.path),
        state="running" if is_locked(run) else end_of(events),
        step=values.get("step", 0),
        num_steps=_num_steps(run),
        loss=values.get("loss"),
        val_bpb=values.get("val_bpb"),
        tok_per_sec=values.get("tok_per_sec"),
        attempts=sum(event.get("event") == "attempt" for event in events),
        time=next((event["time"] for event in reversed(events) if "time" in event), None),
        command=next((event.get("command") for event in reversed(events) if event.get("event") == "script"), None),
    )


def last_values(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """The last value of each field in a file of JSON lines; what stands only further from its end than LOOKED_BACK_BYTES is
    not found."""
    values: dict[str, Any] = {}
    for length in (LAST_BYTES, 16 * LAST_BYTES, LOOKED_BACK_BYTES):
        found, is_whole = read_end(path, length)
        for record in parse_lines(found):
            values |= {name: record[name] for name in names if record.get(name) is not None}
        if is_whole or len(values) == len(names):
            break
    return values


def list_runs(runs_dir: Path) -> list[RunStatus]:
    """All runs of a folder, the latest first."""
    return RunList(runs_dir).read()


class RunList:
    """The runs of a folder at a glance, again and again: only those whose files are others than before are read."""

    def __init__(self, runs_dir: Path):
        self.runs_dir = runs_dir
        self._known: dict[Path, tuple[Any, RunStatus]] = {}

    def read(self) -> list[RunStatus]:
        """The latest first."""
        known: dict[Path, tuple[Any, RunStatus]] = {}
        for path in run_folders(self.runs_dir):
            with suppress(OSError):  # it has gone, or is another user's
                run = RunDir(path)
                key = (is_locked(run), *map(stamp_of, (run.events, run.metrics, run.plan_json)))
                before = self._known.get(path)
                known[path] = before if before and before[0] == key else (key, run_status(run))
        self._known = known
        return sorted((status for _, status in known.values()), key=lambda status: status.time or "", reverse=True)


def run_folders(runs_dir: Path) -> list[Path]:
    """Those that can be read: a folder of another user, or of the file system itself, is passed over."""
    if not runs_dir.is_dir():
        return []
    found = []
    for path in runs_dir.iterdir():
        with suppress(OSError):
            if (path / "config.toml").is_file():
                found.append(path)
    return found


def stamp_of(path: Path) -> tuple[int, int] | None:
    """What tells that a file is another than before; None where there is none."""
    with suppress(FileNotFoundError):
        stat = path.stat()
        return stat.st_mtime_ns, stat.st_size
    return None


def format_runs(runs: list[RunStatus]) -> str:
    """A table for the screen."""
    head = ("run", "state", "step", "loss", "val_bpb", "tok/s", "last event (UTC)")
    rows = [
        (
            status.name,
            status.state,
            format_steps(status),
            "n/a" if status.loss is None else f"{status.loss:.4f}",
            "n/a" if status.val_bpb is None else f"{status.val_bpb:.4f}",
            "n/a" if status.tok_per_sec is None else format_count(status.tok_per_sec),
            (status.time or "n/a")[:19].replace("T", " "),
        )
        for status in runs
    ]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in [head, *rows]
    ]
    return "\n".join(line.rstrip() for line in lines)


def format_steps(status: RunStatus) -> str:
    if status.command is not None:
        return "n/a"
    return f"{status.step:,}/{status.num_steps:,}" if status.num_steps else f"{status.step:,}"


def _num_steps(run: RunDir) -> int | None:
    try:
        return int(json.loads(run.plan_json.read_text())["num_steps"])
    except (OSError, ValueError, KeyError):
        return None
