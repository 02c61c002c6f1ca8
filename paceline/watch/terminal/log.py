"""
The page with the log of one rank: its end, as it grows, or the lines that hold a text.

Which log and what is looked for is a LogChoice; reading is bounded by paceline.watch.logs, whatever the size of the file.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.units import format_bytes
from paceline.watch.logs import read_tail, search
from paceline.watch.snapshot import LogView, Snapshot
from paceline.watch.terminal.head import BROKEN
from paceline.watch.terminal.line import Line, Piece, clean, cut, fit, heading, wrap

TAIL_BYTES = 128 << 10
FOUND_AT_MOST = 1000
TROUBLE = re.compile(r"\b(error|exception|traceback|failed|fatal|killed)\b|Error:", re.IGNORECASE)
WARNING = re.compile(r"\bwarn(ing)?\b", re.IGNORECASE)


@dataclass(frozen=True)
class LogChoice:
    """attempt None: nothing is chosen yet. rank None: the launch's own. wanted: what is looked for, "" for the end of the log."""

    attempt: int | None = None
    rank: int | None = None
    wanted: str = ""
    wrapped: bool = False


@dataclass(frozen=True)
class LogText:
    """What was read: lines, each with its number where they were looked for."""

    log: LogView | None
    wanted: str
    lines: list[tuple[int | None, str]]


def chosen_log(snapshot: Snapshot, choice: LogChoice) -> LogView | None:
    """The log that is meant. Without a choice, the last attempt's: of the rank that broke it, else of the first."""
    logs = snapshot.logs
    if not logs:
        return None
    attempt = choice.attempt if choice.attempt is not None else max(log.attempt for log in logs)
    of_it = [log for log in logs if log.attempt == attempt] or list(logs)
    broke = snapshot.explanation.get("rank") if snapshot.explanation and snapshot.state in BROKEN else None
    rank = broke if choice.attempt is None else choice.rank
    ranks = [log for log in of_it if log.rank is not None] or of_it
    wanted = [log for log in of_it if log.rank == rank and (rank is not None or choice.attempt is not None)]
    return (wanted or ranks)[0]


def other_rank(snapshot: Snapshot, choice: LogChoice, by: int) -> LogChoice:
    """The log beside it, of the same attempt, round and round."""
    now = chosen_log(snapshot, choice)
    if now is None:
        return choice
    of_it = [log for log in snapshot.logs if log.attempt == now.attempt]
    beside = of_it[(of_it.index(now) + by) % len(of_it)]
    return replace(choice, attempt=now.attempt, rank=beside.rank, wanted="")


def other_attempt(snapshot: Snapshot, choice: LogChoice) -> LogChoice:
    now = chosen_log(snapshot, choice)
    if now is None:
        return choice
    numbers = sorted({log.attempt for log in snapshot.logs})
    return replace(choice, attempt=numbers[numbers.index(now.attempt) - 1], rank=now.rank, wanted="")


def read_log(snapshot: Snapshot, choice: LogChoice) -> LogText:
    log = chosen_log(snapshot, choice)
    if log is None:
        return LogText(None, choice.wanted, [])
    path = Path(log.path)
    if choice.wanted:
        return LogText(log, choice.wanted, list(search(path, choice.wanted, limit=FOUND_AT_MOST)))
    return LogText(log, "", [(None, line) for line in read_tail(path, max_bytes=TAIL_BYTES).splitlines()])


def log_heading(read: LogText, *, width: int) -> Line:
    if read.log is None:
        return heading("log", width)
    whose = "log" if read.log.rank is None else f"log of rank {read.log.rank}"
    name, attempt = Path(read.log.path).name, "" if read.log.rank is None else f"attempt {read.log.attempt}  "
    about: list[Piece] = [(f"{attempt}{cut(clean(name), 24)}  {format_bytes(read.log.bytes)}", "faint")]
    if read.wanted:
        count = f"{len(read.lines)}{' or more' if len(read.lines) == FOUND_AT_MOST else ''}"
        about = [(f"{count} lines with ", "faint"), (cut(clean(read.wanted), 24), "match")]
    return heading(whose, width, right=about)


def log_lines(read: LogText, *, width: int, wrapped: bool = False) -> list[Line]:
    """The body, without the heading."""
    if read.log is None:
        return [((" no log yet", "faint"),)]
    if not read.lines:
        return [((" no such line" if read.wanted else " nothing yet", "faint"),)]
    lines: list[Line] = []
    for number, text in read.lines:
        before: Line = ((f" {number:>8,}  " if number is not None else " ", "faint"),)
        room = width - len(before[0][0]) - 1
        shown = clean(text)
        style = "error" if TROUBLE.search(shown) else "warning" if WARNING.search(shown) else ""
        for i, row in enumerate(wrap(shown, room) if wrapped else [cut(shown, room)]):
            start = before if i == 0 else ((" " * len(before[0][0]), ""),)
            lines.append(
                fit(
                    (*start, *marked(row, read.wanted, style.replace("warning", "orange").replace("error", "red"))),
                    width,
                )
            )
    return lines


def marked(text: str, wanted: str, style: str) -> Line:
    """The text with what was looked for standing out."""
    if not wanted:
        return ((text, style),)
    pieces: list[Piece] = []
    rest = text
    while (at := rest.lower().find(wanted.lower())) >= 0:
        pieces += [(rest[:at], style), (rest[at : at + len(wanted)], "match")]
        rest = rest[at + len(wanted) :]
    return (*pieces, (rest, style))
