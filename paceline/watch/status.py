"""
The one reading of a run folder: what state a run is in, how far it got, how fast it is.

Reads files only. A run is `running` while some process holds its lock; what else it can be stands in its last event.
"""

import fcntl
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.rundir import RunDir, read_json_lines
from paceline.units import format_count

ENDS = {"finished": "finished", "stopped": "stopped", "failed": "failed", "interrupted": "stopped"}
PASSING = {
    "checkpoint",
    "sample",
    "note",
    "memory",
    "step_time",
    "finding",
    "attempt_ended",
    "verdict",
    "decision",
    "save_failed",
}  # say nothing of the state


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
    state, attempts, step, time, val_bpb = "broken", 0, 0, None, None
    command: list[str] | None = None
    for event in read_json_lines(run.events):
        kind, time = event.get("event"), event.get("time", time)
        state = ENDS.get(str(kind), state if kind in PASSING else "broken")
        attempts += kind == "attempt"
        command = event.get("command", command) if kind == "script" else command
    loss = tok_per_sec = None
    for record in read_json_lines(run.metrics):
        step = record.get("step", step)
        loss, tok_per_sec = record.get("loss", loss), record.get("tok_per_sec", tok_per_sec)
        val_bpb = record.get("val_bpb", val_bpb)
    return RunStatus(
        name=run.name,
        path=str(run.path),
        state="running" if is_locked(run) else state,
        step=step,
        num_steps=_num_steps(run),
        loss=loss,
        val_bpb=val_bpb,
        tok_per_sec=tok_per_sec,
        attempts=attempts,
        time=time,
        command=command,
    )


def list_runs(runs_dir: Path) -> list[RunStatus]:
    """All runs of a folder, the latest first."""
    if not runs_dir.is_dir():
        return []
    found = [run_status(RunDir(path)) for path in runs_dir.iterdir() if (path / "config.toml").is_file()]
    return sorted(found, key=lambda status: status.time or "", reverse=True)


def is_locked(run: RunDir) -> bool:
    if not run.lock.exists():
        return False
    fd = os.open(run.lock, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


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
