"""
Puts exceptions together from lines: a traceback's frames, its message, and the exception that it was chained from.

Several processes may write into one log, so each stream (LogLine.stream) has its own unfinished error. A traceback may
lack its first line, its last line or both; whatever is there becomes a record.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from paceline.explain.explanation import Record
from paceline.explain.lines import LogLine

MAX_FRAMES = 60  # innermost
MAX_MESSAGE_LINES = 16
MAX_MESSAGE_CHARS = 6000
MAX_NOISE = 40  # other lines within one traceback before it counts as incomplete
MAX_STREAMS = 4096
MAX_CHAIN = 4  # a retry loop may chain thousands of exceptions

HEADER = re.compile(r"Traceback \(most recent call last\)|^Original Traceback|Exception in thread ")
FRAME = re.compile(
    r"^\s*(?P<frame>File \"[^\"]*\", line \d+(?:,? in .*)?)"
    r"|^(?P<ipython>(?:[~/.]|[A-Za-z]:)\S*\.py[xc]? in \S+\(.*\))"
    r"|^(?P<rich>(?:[~/.]|[A-Za-z]:)?[\w./\\~-]+\.py:\d+ in \S+)$"
    r"|^(?P<cell><ipython-input-\S+> in )"
)
TYPE_END = (
    r"(?:Error|Exception|Interrupt|ExceptionGroup|Exit|Failure|Timeout|TimeoutExpired|Killed|Empty|Full|StopIteration"
    r"|Warning|Abort)"
)
EXCEPTION = re.compile(
    rf"^(?:uncaught exception: )?(?P<type>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*{TYPE_END})(?:\(\w+\))?(?:: |:$|$)"
)
IN_TRACEBACK = re.compile(r"^(?P<type>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)(?:: |:$|$)")
BARE_EXCEPTION = re.compile(  # without a traceback above it; stricter, because prose contains such names too
    r"^(?P<type>(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*|_?[a-z]\w*\.[A-Z]\w*)?(?:Error|Exception|KeyboardInterrupt|ExceptionGroup))"
    r"(?:\(\w+\))?(?:: |:$|$)"
)
# a stack dump shows where a process is, not an error
STACK = re.compile(r"\(most recent call first\)|^Stack \(most recent call|^Fatal Python error: ")
CHAIN = re.compile(r"During handling of the above exception|direct cause of the following exception")
IGNORED = re.compile(r"^Exception ignored (?:in|on)|^Error in atexit|^Error in sys.excepthook|^Exception in Tkinter")
SPAWNED = re.compile(r"-- Process (?P<rank>\d+) terminated with the following error")
WRAPPER = re.compile(
    r"ChildFailedError|ProcessRaisedException|ProcessExitedException|CalledProcessError|SpawnException"
    r"|^(?:\w+\.)*\w+: Caught \w+ in (?:DataLoader worker|replica|pin memory|\w+) |ray\.exceptions\.RayTaskError"
    r"|WorkerCrashedError$"
    r"|^SystemExit: \d|^Exception: *$|^torch\.distributed\.elastic\S*SignalException"
)
NOT_MESSAGE = re.compile(  # a new log line, not a further line of the message
    r"^\[|^\d{4}-\d\d|^(?:INFO|WARNING|ERROR|DEBUG|CRITICAL|FATAL)\b|^(?:wandb|srun|slurmstepd|INFO|W|E|I) ?[:\[]"
    r"|^Traceback|^During handling"
    r"|^The above exception|^Exception ignored|^-- Process|^\$ |^>>> |^[=*#_-]{8,}|^Process \S+:$|^\s*File \""
    r"|^real\s|^NCCL |^terminate called"
    r"|^Exception raised from|^frame #\d+|^Killed|^Aborted|^make: |^In \[\d|^[WEIFC] \S+\.(?:py|cpp|cc|cu|h"
    r"|hpp):\d+\]|^(?:Current )?[Tt]hread 0x|^Fatal Python error"
)


@dataclass
class Unfinished:
    """An error whose lines are still being read."""

    line: int
    start: LogLine
    step: int | None
    frames: list[str] = field(default_factory=list)
    message: list[str] = field(default_factory=list)
    indent: int = 0  # of the last frame
    noise: int = 0
    ignored: bool = False
    chained_from: Record | None = None
    rank: int | None = None


class TracebackReader:
    """Takes the lines of a log in order and returns each exception as a record when it is complete."""

    def __init__(self) -> None:
        self._open: dict[str, Unfinished] = {}
        self._last: dict[str, Record] = {}  # the last exception of each stream, for chains
        self._chained: set[str] = set()  # streams whose next exception was raised from their last one
        self._ignored: set[str] = set()
        self._stacks: set[str] = set()  # streams that are printing a stack dump
        self._spawned: dict[str, int] = {}  # by stream: the rank whose traceback follows

    def feed(self, number: int, line: LogLine, step: int | None) -> tuple[list[Record], bool]:
        """Returns the records that this line completes, and whether the line is part of an error."""
        key, text = line.stream, line.text
        done: list[Record] = []
        error = self._open.get(key)
        if error and error.message:
            if self._continues(error, text):
                error.message.append(text)
                return done, True
            done += self._finish(key)
            error = None
        if STACK.search(text):
            self._stacks.add(key)
            self._open.pop(key, None)
            return done, False
        self._stacks -= {key} if text.strip() and not FRAME.match(text) else set()
        if CHAIN.search(text):
            self._chained.add(key)
            self._open.pop(key, None)
            return done, True
        if IGNORED.match(text):
            self._ignored.add(key)
            return done, True
        if match := SPAWNED.search(text):
            self._spawned[key] = int(match["rank"])
            return done, True
        if HEADER.search(text):
            self._open.pop(key, None)
            self._start(key, number, line, step)
            return done, True
        if match := FRAME.match(text):
            if error is None and key in self._stacks:
                return done, True
            error = error or self._start(key, number, line, step)
            error.indent = len(text) - len(text.lstrip())
            error.frames = [*error.frames[-MAX_FRAMES:], match[match.lastgroup or 0].strip()]
            return done, True
        return done, self._is_part(key, number, line, step)

    def flush(self) -> list[Record]:
        """Completes every unfinished error, at a gap in the log or at its end."""
        return [record for key in list(self._open) for record in self._finish(key) if record.text]

    def _start(self, key: str, number: int, line: LogLine, step: int | None) -> Unfinished:
        """Opens an error on a stream; with too many open ones the oldest is dropped."""
        if len(self._open) >= MAX_STREAMS:
            self._open.pop(next(iter(self._open)))
        error = Unfinished(number, line, step, ignored=key in self._ignored, rank=self._spawned.pop(key, None))
        error.chained_from = self._last.get(key) if key in self._chained else None
        self._chained.discard(key)
        self._ignored.discard(key)
        self._open[key] = error
        return error

    def _is_part(self, key: str, number: int, line: LogLine, step: int | None) -> bool:
        """Whether the line belongs to an error: the exception itself, or a source line of the traceback above it."""
        error, text = self._open.get(key), line.text
        if error is None:
            if not BARE_EXCEPTION.match(text):
                return False
            self._start(key, number, line, step).message.append(text)
            return True
        indented = text.lstrip()
        if error.frames and 0 < len(text) - len(indented) < error.indent and EXCEPTION.match(indented):
            text = indented
        if EXCEPTION.match(text) or (error.frames and IN_TRACEBACK.match(text) and not NOT_MESSAGE.match(text)):
            error.message.append(text)
            return True
        if text.startswith((" ", "\t", "-->", "│", "^")) or not text or text[:1].isdigit():
            return True  # source lines
        error.noise += 1
        if error.noise > MAX_NOISE:
            self._open.pop(key)
        return False

    def _continues(self, error: Unfinished, text: str) -> bool:
        """Whether the line is a further line of the error's message."""
        if not text.strip() or "%|" in text or len(error.message) >= MAX_MESSAGE_LINES:
            return False
        if NOT_MESSAGE.match(text) or WRAPPER.search(text):
            return False
        return not (BARE_EXCEPTION.match(text) and len(error.message) > 1 and error.frames)

    def _finish(self, key: str) -> list[Record]:
        """Closes the error as a record; none for an exception that Python ignored, because it ends no run."""
        error = self._open.pop(key)
        if error.ignored:
            return []
        text = "\n".join(error.message)[:MAX_MESSAGE_CHARS].rstrip()
        record = Record(
            kind="banner" if WRAPPER.search(text) else "exception",
            text=text,
            line=error.line,
            rank=error.start.rank if error.rank is None else error.rank,
            host=error.start.host,
            time=error.start.time,
            step=error.step,
            frames=tuple(error.frames[-MAX_FRAMES:]),
            chained_from=cut_chain(error.chained_from),
        )
        self._last[key] = record
        return [record]


def cut_chain(record: Record | None, depth: int = MAX_CHAIN) -> Record | None:
    """The record with its chain of causes cut after a few links."""
    if record is None or depth == 0:
        return None
    return replace(record, chained_from=cut_chain(record.chained_from, depth - 1))
