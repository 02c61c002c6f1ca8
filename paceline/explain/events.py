"""
What the records of a log may mean: each match of the catalogue, with how surely it ended the run.

A text counts less where it is a warning, where a launcher only passes it on, and where the work went on after it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import dataclass

from paceline.explain.catalogue import Catalogue, Cause, Match
from paceline.explain.reader import Log
from paceline.explain.record import Record

STEPS_AFTER = 3  # different steps after an error: it did not end the work
SURVIVED, PASSED_ON, MILD, LOOSE_LINE = 0.45, 0.5, 0.55, 0.93  # factors of a score
OTHERWISE = "user-code-exception"  # what an exception is if nothing more is known of it
MAX_EVENTS = 400  # of one log, from either end
ENDED = re.compile(r"(?:Sending process|Unable to shutdown process) (?P<pid>\d+)\b")
PID = re.compile(r"\b(?:pid:|PID) (?P<pid>\d+)\b")
ENDS = re.compile(r"-(?:2|9|15)\b|SIG(?:INT|KILL|TERM)\b")
MILD_LINE = re.compile(
    r"^\W*(?:W|I|D|INFO|WARN|WARNING|DEBUG|NOTE)\b(?!.*\b(?:ERROR|FATAL|Error:))|\bWarning: |\[(?:WARNING|INFO"
    r"|DEBUG)\]|NCCL INFO|^\s*warnings\.warn"
    r"|(?<!NCCL )\b(?:WARNING|WARN|INFO|DEBUG)\b[ :|\]-]"
)


@dataclass(frozen=True)
class Event:
    """One record with one thing that it may mean."""

    record: Record
    match: Match
    score: float  # 0 to 1
    survived: bool
    place: tuple[int, int]  # number of the log, line
    by_launcher: bool = False  # the end of a process that its launcher ended, because of another

    @property
    def cause(self) -> Cause:
        return self.match.cause


def events_of(log: Log, catalogue: Catalogue, *, number: int = 0) -> list[Event]:
    """All that the catalogue knows of a log. number: of the log among those read together."""
    found = []
    ended = {match["pid"] for record in log.records for match in ENDED.finditer(record.text)}
    for record in log.records:
        survived = is_survived(record, log)
        factor = (SURVIVED if survived else 1.0) * weight_of(record)
        best: dict[str, Match] = {}
        for match in catalogue.match(record.text, record.kind):
            before = best.get(match.cause.id)
            if before is None or match.weight > before.weight:
                best[match.cause.id] = match
        if len(best) > 1:
            best.pop(OTHERWISE, None)
        for match in best.values():
            by_launcher = is_by_launcher(record, ended)
            place = (number, record.line)
            found.append(Event(record, match, match.weight * factor, survived, place, by_launcher))
    return found if len(found) <= 2 * MAX_EVENTS else [*found[:MAX_EVENTS], *found[-MAX_EVENTS:]]


def is_by_launcher(record: Record, ended: Set[str]) -> bool:
    """ended: process ids that a launcher says it ended."""
    if record.kind == "banner" or ENDED.search(record.text):
        return True
    pid = PID.search(record.text) if record.kind in ("exit", "signal") else None
    return pid is not None and pid["pid"] in ended and bool(ENDS.search(record.text))


def weight_of(record: Record) -> float:
    """How much what this record says can be the end of a run."""
    if record.kind == "banner":
        return PASSED_ON
    if record.kind == "exception":
        return 1.0
    mild = record.kind == "line" and MILD_LINE.search(record.text)  # a launcher tells of signals and exits as of news
    return MILD if mild else LOOSE_LINE


def is_survived(record: Record, log: Log) -> bool:
    """Whether the work went on: further steps by the same rank, or the word that all is done."""
    if log.progress.done_line is not None and log.progress.done_line > record.line:
        return True
    after = {
        mark.step if mark.step is not None else -mark.line
        for mark in log.last_marks
        if mark.line > record.line and (record.rank is None or mark.rank in (None, record.rank))
    }
    return len(after) >= STEPS_AFTER


def untold(log: Log, events: Sequence[Event]) -> list[Record]:
    """Records that tell of a failure, whatever it was, and that the catalogue does not know."""
    told = {id(event.record) for event in events}
    return [
        record
        for record in log.records
        if id(record) not in told
        and record.kind in ("exception", "exit", "signal", "banner")
        and not is_survived(record, log)
        and tells_failure(record)
    ]


WRAPPED = re.compile(
    r"(?:ChildFailed|CalledProcess|RayTask|WorkerCrashed)Error|ProcessRaised|ProcessExited|SystemExit: [1-9]"
)
LOUD = re.compile(r"^(?:\S{1,40}:? )?(?:\[?(?:ERROR|FATAL|CRITICAL)\b|(?:[Ff]atal|[Ee]rror)(?: error)?: )")
NO_FAILURE = re.compile(
    r"exit(?:ed|ing|s)? (?:\w+ )?(?:with )?(?:exit )?(?:status|code)[ :=]*0\b|exit ?code[ :=]+0\b"
    r"|return code[ :=]+0\b|ExitCode 0:0|handler",
    re.IGNORECASE,
)


def loud_lines(log: Log) -> list[Record]:
    """Of a log that tells of no step and no exception: lines that say themselves that they are errors."""
    if log.progress.steps or log.progress.finished:
        return []
    return [record for record in log.records if record.kind == "line" and LOUD.search(record.text)]


def tells_failure(record: Record) -> bool:
    if record.kind == "exception":
        return (
            not record.text.startswith(("SystemExit: 0", "SystemExit\n")) and "Warning" not in record.text.split(":")[0]
        )
    if record.kind == "banner":
        return bool(WRAPPED.search(record.text))
    return not NO_FAILURE.search(record.text) and not MILD_LINE.search(record.text)
