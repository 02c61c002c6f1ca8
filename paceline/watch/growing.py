"""
A file that grows: its new whole lines, in blocks, and the word when what was read before no longer holds.

Knows nothing of what stands in the lines. A half-written last line is read when it is whole. A file that vanishes, shrinks or is
written anew, as metrics.jsonl by a resume, is read again from its beginning.
"""

import os
from collections.abc import Iterator
from pathlib import Path

BLOCK_BYTES = 1 << 20
LINES, STATES = b"\n", b"\n\r"  # what a program ends its lines with; those of a progress bar too
REMEMBERED_BYTES = 64  # before the place we have come to: other bytes there mean another file


class GrowingFile:
    """`is_other` first, then `blocks`."""

    def __init__(self, path: Path, *, ends: bytes = LINES):
        """ends: STATES where a line that a progress bar overwrites is not to be waited for."""
        self.path = path
        self.ends = ends
        self.offset = 0
        self._inode = 0
        self._before = b""  # the last bytes that were read

    def is_other(self) -> bool:
        """Whether the file is not a continuation of what was read; it then counts as not read."""
        try:
            found = self.path.stat()
            grown = self._inode in (0, found.st_ino) and found.st_size >= self.offset
            same = grown and (found.st_size == self.offset or self._remembers())
        except OSError:
            found, same = None, self.offset == 0
        self._inode = found.st_ino if found else 0
        if not same:
            self.offset, self._before = 0, b""
        return not same

    def blocks(self, *, block_bytes: int = BLOCK_BYTES) -> Iterator[bytes]:
        """Whole lines, each with its end. A line longer than a block comes in pieces."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                rest = b""
                while chunk := file.read(block_bytes):
                    block = rest + chunk
                    end = last_end(block, self.ends) or (len(block) if len(block) > 2 * block_bytes else 0)
                    block, rest = block[:end], block[end:]
                    if block:
                        self.skip_to(self.offset + len(block), before=block)
                        yield block
        except OSError:
            return  # it has vanished, or is not there yet

    def skip_to(self, offset: int, *, before: bytes) -> None:
        """What stands before the offset counts as read; `before` ends there."""
        self.offset, self._before = offset, before[-REMEMBERED_BYTES:]

    def _remembers(self) -> bool:
        fd = os.open(self.path, os.O_RDONLY)
        try:
            return os.pread(fd, len(self._before), self.offset - len(self._before)) == self._before
        finally:
            os.close(fd)


def last_end(block: bytes, ends: bytes) -> int:
    """Where the last whole line of a block ends; 0 where there is none."""
    return max(map(block.rfind, ends)) + 1
