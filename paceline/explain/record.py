"""
What a log is taken apart into, and what is said about it in the end.

Only data: the reader makes records, the catalogue matches their text, the verdict orders them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RecordKind = Literal["exception", "line", "signal", "exit", "banner"]


@dataclass(frozen=True)
class Record:
    """One event of one rank: an exception with its traceback, a line that tells of an error, a signal, an exit."""

    kind: RecordKind
    text: str  # without prefix, colours and bars; of an exception "Type: message", the whole message
    line: int  # number in the log, from 1: the first line that shows it
    rank: int | None = None
    host: str | None = None
    time: float | None = None  # seconds, comparable within one log
    step: int | None = None  # the last progress mark before it
    frames: tuple[str, ...] = ()  # 'File "x", line 3, in f' lines of a traceback, innermost last
    chained_from: Record | None = None
    source: str | None = None  # which file, where several were read


@dataclass(frozen=True)
class Progress:
    """How far a log got: what its progress marks say."""

    steps: int = 0  # number of progress marks
    first_step: int | None = None
    last_step: int | None = None
    last_loss: float | None = None
    nan_line: int | None = None  # since when every loss is NaN or infinite
    nan_step: int | None = None
    done_line: int | None = None  # where it says that the work is done
    finished: bool = False  # it says itself that the work is done
    silent_end: bool = False  # it ends on a progress mark, without a word of an end


SUPERVISED = frozenset({"hang", "exited-early", "supervisor-lost"})  # causes that no log tells and no catalogue has


@dataclass(frozen=True)
class Evidence:
    """A line of the log that a verdict rests on."""

    line: int
    text: str
    rank: int | None = None
    source: str | None = None  # which file, where several were read


@dataclass(frozen=True)
class Explanation:
    """What broke, where, and what mends it; cause is an id of the catalogue, "healthy" or "unknown"."""

    cause: str
    also: tuple[str, ...]
    confidence: float
    rank: int | None
    step: int | None
    host: str | None
    line: int | None
    summary: str
    fix: str
    evidence: tuple[Evidence, ...] = ()
    consequences: tuple[Evidence, ...] = ()
    progress: Progress = Progress()
    victims: tuple[int, ...] = ()  # ranks that only followed
