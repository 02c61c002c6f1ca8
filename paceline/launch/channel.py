"""
The way to an agent, here or on another host: lines of JSON both ways, with files behind them.

A frame is a line of JSON; where it has `bytes`, so many bytes follow the line. Lines overtake files, which travel in pieces, so a
large checkpoint delays no order and no report. Nothing here waits: a network that stands still must not stop the process that has
to notice it. Whatever arrives is proof of life.
"""

import json
import os
import select
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

# of a line that says nothing else: longer than a packet of any Ethernet, so that a path which loses long packets falls silent
LONG_PACKET_BYTES = 9000
PIECE_BYTES = 1 << 16  # of a file in one frame: at 1 Mbit/s a line waits half a second behind it
ALIVE_S = 1.0  # each side sends a line at least so often
READ_BYTES = 1 << 18
MAX_LINE_BYTES = 64 << 20  # of what is not a frame, but has no end either

Line = dict[str, Any]


def frame(line: Mapping[str, Any], data: bytes = b"") -> bytes:
    """Returns a frame as it is sent."""
    head = {**line, "bytes": len(data)} if data else line
    return json.dumps(head, default=str).encode() + b"\n" + data


class Channel:
    """Frames from one pipe and to another. fd_in and fd_out must be this process's alone."""

    def __init__(self, fd_in: int, fd_out: int):
        for fd in (fd_in, fd_out):
            os.set_blocking(fd, False)
        self.fd_in, self.fd_out = fd_in, fd_out
        self.ended = False  # the other end has gone
        self.heard_at = time.monotonic()
        self._received = bytearray()
        self._lines, self._files = deque[bytes](), deque[Iterator[bytes]]()
        self._leaving = memoryview(b"")

    def send(self, line: Mapping[str, Any], data: bytes = b"") -> None:
        """Sends a frame before all files that wait."""
        self._lines.append(frame(line, data))
        self.write()

    def send_behind(self, frames: Iterable[bytes]) -> None:
        """Sends frames after all that wait, files too; they are made only when it is their turn."""
        self._files.append(iter(frames))
        self.write()

    def send_alive(self, line: Mapping[str, Any]) -> None:
        """Sends a line that is heard only where long packets arrive too."""
        self.send(line, os.urandom(LONG_PACKET_BYTES))  # ssh may compress

    @property
    def has_more(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._leaving or self._lines or self._files) and not self.ended

    def write(self) -> None:
        """Sends what the pipe takes at once."""
        while not self.ended and (self._leaving or self._next_frame()):
            try:
                self._leaving = self._leaving[os.write(self.fd_out, self._leaving) :]
            except BlockingIOError:
                return
            except OSError:  # the other end has gone; what it sent before may still be read
                self._lines.clear()
                self._files.clear()
                self._leaving = memoryview(b"")

    def _next_frame(self) -> bool:
        while not self._lines and self._files:
            piece = next(self._files[0], None)
            if piece is not None:
                self._leaving = memoryview(piece)
                return True
            self._files.popleft()
        if self._lines:
            self._leaving = memoryview(self._lines.popleft())
        return bool(self._leaving)

    def read(self) -> list[tuple[Line, bytes]]:
        """Returns the frames that have arrived whole."""
        try:
            piece = os.read(self.fd_in, READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            piece = b""
        self.ended = not piece
        if piece:
            self.heard_at = time.monotonic()
            self._received += piece
        return list(self._frames())

    def _frames(self) -> Iterator[tuple[Line, bytes]]:
        received, start = self._received, 0
        try:
            while (end := received.find(b"\n", start)) >= 0:
                if received[start : start + 1] == b"{":  # torch may print to stdout as well
                    line = json.loads(received[start:end])
                    size = line.get("bytes", 0)
                    if len(received) < end + 1 + size:
                        return
                    data = bytes(received[end + 1 : end + 1 + size])
                    start = end + 1 + size
                    yield line, data
                else:
                    start = end + 1
            if len(received) - start > MAX_LINE_BYTES:
                start = len(received)
        finally:
            del received[:start]


def wait(channels: Sequence[Channel], timeout_s: float) -> None:
    """Waits until a channel can be read, or written where something waits, and writes it."""
    open_ones = [channel for channel in channels if not channel.ended]
    reading = {channel.fd_in: channel for channel in open_ones}
    writing = {channel.fd_out: channel for channel in open_ones if channel.has_more}
    _, ready, _ = select.select(list(reading), list(writing), [], timeout_s)
    for fd in ready:
        writing[fd].write()


class Lines:
    """JSON lines from a pipe. It never waits for the end of a line."""

    def __init__(self, fd: int):
        self.fd = fd
        self.ended = False
        self._part = b""

    def read(self) -> list[Line]:
        """Returns the whole lines that have arrived."""
        chunk = os.read(self.fd, 1 << 16)
        self.ended = not chunk
        *whole, self._part = (self._part + chunk).split(b"\n")
        return [json.loads(line) for line in whole if line.startswith(b"{")]  # torch may print to stdout as well
