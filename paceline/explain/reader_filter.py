"""
Which lines of a log are worth a closer look.

Most lines of a training log have been seen before but for their digits. Only line shapes that are new are looked at;
those that tell nothing are remembered and passed over from then on, at the speed of bytes.translate and a set.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

SHAPE_DROPS = (
    b" \t0123456789.,-+:\xe2\x96\x88\x89\x8a\x8b\x8c\x8d\x8e\x8f"  # digits, what they shift, the blocks of bars
)
MAX_SHAPES = 50_000  # remembered; beyond it the memory starts afresh
MAX_REPEATS = 200  # times that one telling shape is looked at
LINE_BYTES = 65_536  # looked at in one line
BEFORE, AFTER = 3, 24  # lines kept around a telling one: what leads to it, and the rest of its message

TELLING = re.compile(
    rb"error|exception|traceback|fatal|fail|abort|assert|kill|signal|sig[a-z]{3,4}\b|core dumped|terminat|interrupt|cancel"
    rb"|cannot|can't|unable|not found|no such|denied|refused|timed? ?out|exceed|exhaust|out of|overflow|corrupt|invalid"
    rb"|unexpected|mismatch|panic|crash|undefined symbol|nccl warn|xid|file \"|broken|unreachable|\bexit|exited|preempt"
    rb"|\.py[:(]\d|in <module>|\bnan\b|\binf\b|rank +:|host +:|time +:"
)


class LineFilter:
    """Remembers the shapes of lines; literals are lower-case words that make a line telling, whatever else it says."""

    def __init__(self, literals: Iterable[str]):
        lowered = {literal.lower().encode() for literal in literals if literal}
        self._literals = sorted(literal for literal in lowered if not TELLING.search(literal))
        self._dull: set[bytes] = set()
        self._repeats: dict[bytes, int] = {}

    def kept(self, lines: list[bytes], block: bytes) -> list[int]:
        """Indices of the telling lines and of those around them. block: the same lines, joined by newlines."""
        shapes = block.translate(None, SHAPE_DROPS).split(b"\n")
        fresh = set(shapes) - self._dull
        if not fresh:
            return []
        found = [at for at, shape in enumerate(shapes) if shape in fresh]
        first = {shapes[at]: at for at in reversed(found)}
        telling = self._telling(first, lines)
        self._remember(fresh - telling)
        keep: set[int] = set()
        for at in found:
            if (shape := shapes[at]) in telling:
                repeats = self._repeats[shape] = self._repeats.get(shape, 0) + 1
                if repeats > MAX_REPEATS:
                    self._dull.add(shape)
                else:
                    keep.update(range(max(0, at - BEFORE), min(len(lines), at + AFTER + 1)))
        return sorted(keep)

    def _telling(self, first: dict[bytes, int], lines: list[bytes]) -> set[bytes]:
        lowered = {shape: lines[at][:LINE_BYTES].lower() for shape, at in first.items()}
        telling = {shape for shape, line in lowered.items() if TELLING.search(line)}
        others = {shape: line for shape, line in lowered.items() if shape not in telling}
        everything = b"\n".join(others.values())
        literals = [literal for literal in self._literals if literal in everything]
        return telling | {shape for shape, line in others.items() if any(literal in line for literal in literals)}

    def _remember(self, dull: set[bytes]) -> None:
        if len(self._dull) + len(dull) > MAX_SHAPES:
            self._dull.clear()
        if len(self._repeats) > MAX_SHAPES:
            self._repeats.clear()
        self._dull |= {shape for shape in dull if len(shape) < LINE_BYTES}
