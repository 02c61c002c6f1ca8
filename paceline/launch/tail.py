"""
The rank logs on the terminal, as they grow: whole lines, each with its rank before it.

Reads the files that launch/rank.py has the ranks write; knows nothing of what stands in them. What it shows is made
for eyes, the files keep every byte: of a line that a progress bar overwrites only its last state is shown, at most
every PROGRESS_S; a line that does not go on is shown after HALF_LINE_S; a very long one is cut; bytes that would move
the cursor or are no text are left out. It holds one line of each rank in memory, never more.
"""

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

CHUNK_BYTES = 1 << 18
TICK_BYTES = 1 << 23  # of one rank before the others have their turn, and before a Ctrl-C is looked at
LINE_BYTES = 4096  # shown of one line
HALF_LINE_S = 1.0
PROGRESS_S = 10.0
COLOURS = (36, 33, 32, 35, 34, 31)  # of ranks 0, 1, ... on a terminal: cyan, yellow, green, magenta, blue, red

UNSEEN = bytes({*range(32), 127} - {*b"\t\n\r\x1b"})
SPECIAL = UNSEEN + b"\r\x1b"  # a line without them is shown as it stands
ESCAPE = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*([@-~])|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])?")
COLOUR_END = b"\x1b[0m"


class Tail:
    """Call poll() some times a second; with nothing new it costs one stat() for each rank."""

    def __init__(
        self,
        paths: dict[int, Path],
        *,
        stream: TextIO,
        colour: bool,
        clock: Callable[[], float] = time.monotonic,
    ):
        width = max(map(len, map(str, paths)))
        self.stream = stream
        self.logs = [
            RankLog(path, prefix=prefix_of(rank, width, colour=colour) if len(paths) > 1 else b"", colour=colour)
            for rank, path in paths.items()
        ]
        self.clock = clock

    def poll(self) -> None:
        for log in self.logs:
            start = log.offset
            while log.offset - start < TICK_BYTES and (chunk := log.read()):
                self.show(log.take(chunk, now=self.clock()))
            self.show(log.take(b"", now=self.clock()))

    def close(self) -> None:
        """All that is in the files now, the unfinished last lines included."""
        for log in self.logs:
            while chunk := log.read():
                self.show(log.take(chunk, now=self.clock()))
            self.show(log.rest())

    def show(self, lines: bytes) -> None:
        if not lines:
            return
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        self.stream.write(lines.decode(errors="replace").encode(encoding, "replace").decode(encoding))
        self.stream.flush()


class RankLog:
    """One rank's file, and the line in it that is not finished yet."""

    def __init__(self, path: Path, *, prefix: bytes, colour: bool):
        self.path = path
        self.prefix = prefix
        self.colour = colour
        self.offset = 0
        self._part = b""  # of the last line, what can still be seen of it: LINE_BYTES and no more
        self._cut = 0  # bytes of that line that were dropped
        self._grown_at = 0.0
        self._progress_at = float("-inf")
        self._progress_shown = b""

    def read(self) -> bytes:
        try:
            if self.path.stat().st_size <= self.offset:
                return b""
            with self.path.open("rb") as file:
                file.seek(self.offset)
                chunk = file.read(CHUNK_BYTES)
        except OSError:
            return b""  # the rank has not started yet
        self.offset += len(chunk)
        return chunk

    def take(self, chunk: bytes, *, now: float) -> bytes:
        """What is to be shown of it now."""
        *whole, last = chunk.split(b"\n")
        shown = []
        if whole:
            self._extend(whole[0])
            shown = [self._finish(), self._lines(whole[1:])]
        if last:
            self._extend(last)
            self._grown_at = now
        return b"".join([*shown, self._unfinished(now=now)])

    def _lines(self, lines: list[bytes]) -> bytes:
        text = b"\n".join(lines)
        if lines and len(text.translate(None, SPECIAL)) == len(text) and max(map(len, lines)) <= LINE_BYTES:
            return b"%s%s\n" % (self.prefix, text.replace(b"\n", b"\n" + self.prefix))  # five times as fast
        return b"".join(map(self._line, lines))

    def rest(self) -> bytes:
        return self._finish() if self._part else b""

    def _extend(self, piece: bytes) -> None:
        line = self._part + piece
        if b"\r" in line:
            self._cut *= b"\r" not in piece  # what was cut is overwritten
            kept = line.rstrip(b"\r")
            ended = b"\r" * (len(line) > len(kept))  # "\r\n" may be halved, and a bar may write its "\r" last
            line = b"\r" * (b"\r" in kept) + kept.rpartition(b"\r")[2] + ended
        self._part, cut = line[: LINE_BYTES + 1], len(line) - LINE_BYTES - 1
        self._cut += max(0, cut)

    def _finish(self) -> bytes:
        line, cut, shown_before = self._part, self._cut, self._progress_shown
        self._part, self._cut, self._progress_shown = b"", 0, b""
        if shown_before and line.strip(b"\r") == shown_before:
            return b""  # the bar's last state stands there already
        if line.startswith(b"\r") and not line.strip():
            return b""  # a bar that wiped itself out
        return self._line(line, cut=cut)

    def _unfinished(self, *, now: float) -> bytes:
        """A progress bar's state now and then, and a line that has not gone on for a moment."""
        state = self._part.strip(b"\r")
        if self._part.startswith(b"\r") or self._part.endswith(b"\r"):
            if not state.strip() or state == self._progress_shown or now - self._progress_at < PROGRESS_S:
                return b""
            self._progress_at, self._progress_shown = now, state
            return self._line(state)
        if not state or now - self._grown_at < HALF_LINE_S:
            return b""
        return self._finish()

    def _line(self, line: bytes, *, cut: int = 0) -> bytes:
        line = line.rstrip(b"\r")
        if b"\r" in line:
            line = line.rpartition(b"\r")[2]
        if len(line) > LINE_BYTES:
            cut += len(line) - LINE_BYTES
            line = line[:LINE_BYTES]
        if b"\x1b" in line:
            line = ESCAPE.sub(self._kept_escape, line) + COLOUR_END * self.colour
        line = line.translate(None, UNSEEN)
        more = f" … {cut:,} more bytes: {self.path}".encode() if cut else b""
        return b"%s%s%s\n" % (self.prefix, line, more)

    def _kept_escape(self, match: re.Match[bytes]) -> bytes:
        return match[0] if self.colour and match[1] == b"m" else b""


def prefix_of(rank: int, width: int, *, colour: bool) -> bytes:
    text = f"[{rank}]".ljust(width + 2)
    return f"\x1b[{COLOURS[rank % len(COLOURS)]}m{text}\x1b[0m ".encode() if colour else f"{text} ".encode()


def wants_colour(stream: TextIO) -> bool:
    """A terminal, unless NO_COLOR (no-color.org) says otherwise."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("NO_COLOR")
