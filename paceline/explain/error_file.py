"""
What a failed process has left in a file of its own: torch's error.json, and `<rank>.error.json` of our runs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from paceline.explain.reader import Log, read_log
from paceline.explain.record import Progress, Record

MAX_BYTES = 1 << 20


def read_error_file(path: Path, *, rank: int | None) -> Log | None:
    """A log of one record; None for a file that is no error file, or is half-written."""
    try:
        if path.stat().st_size > MAX_BYTES:
            return None
        error = json.loads(path.read_text(encoding="utf-8"))
        text, traceback, time, step = parts_of(error)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    inner = read_log([(traceback or "").encode()], rank=rank, source=str(path)).records
    frames = inner[-1].frames if inner else ()
    record = Record("exception", text, 1, rank=rank, time=time, step=step, frames=frames, source=str(path))
    return Log(records=(record,), progress=Progress(), last_marks=(), last_lines=(), num_lines=1, num_bytes=0)


@dataclass(frozen=True)
class OwnError:
    """A mistake that the user can mend, as the worker has named it."""

    message: str
    fix: str
    exit_code: int


def read_own_error(path: Path) -> OwnError | None:
    """None where the file is not there, half-written, or without a fix."""
    try:
        error = json.loads(path.read_text(encoding="utf-8"))
        return (
            OwnError(str(error["message"]), error["fix"], int(error.get("exit_code", 1))) if error.get("fix") else None
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def parts_of(error: dict[str, Any]) -> tuple[str, str | None, float | None, int | None]:
    """Text, traceback, time and step; torch nests them, ours are flat."""
    if isinstance(error["message"], dict):
        extra = error["message"]["extraInfo"]
        return str(error["message"]["message"]), extra.get("py_callstack"), float(extra["timestamp"]), None
    text = f"{error['type']}: {error['message']}" if error.get("type") else str(error["message"])
    time = datetime.fromisoformat(error["time"]).timestamp() if error.get("time") else None
    step = error.get("step")
    return text, error.get("traceback"), time, step if isinstance(step, int) else None
