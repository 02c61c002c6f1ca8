"""
PyTorch's CUDA caching allocator as arithmetic: what it reserves from the driver for a sequence of allocations and frees.

One stream, one pool each for small and large blocks, best fit, splitting and joining, as c10/cuda/CUDACachingAllocator.cpp
(torch 2.13) does it; with expandable segments a pool is one arena that grows at its end. Memory that a full card would get back
by freeing cached segments is not taken into account: the sum is what a card with room to spare would show.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

ROUND_BYTES = 512
SMALL_BYTES = 1 << 20  # up to here from the small pool
SMALL_SEGMENT, LARGE_SEGMENT = 2 << 20, 20 << 20
OWN_SEGMENT = 10 << 20  # from here on a segment is made to measure, in multiples of SMALL_SEGMENT


@dataclass
class _Block:
    start: int
    size: int
    segment: int
    free: bool


@dataclass
class _Pool:
    expandable: bool
    segment_bytes: int
    splits_below: int  # a rest smaller than this stays with its block
    blocks: dict[tuple[int, int], _Block] = field(default_factory=dict)  # by segment and start
    ends: dict[tuple[int, int], _Block] = field(default_factory=dict)  # by segment and end
    free: list[tuple[int, int, int]] = field(default_factory=list)  # size, segment, start; sorted
    reserved: int = 0
    segments: int = 0

    def take(self, size: int) -> _Block:
        at = bisect_left(self.free, (size, -1, -1))
        if at < len(self.free):
            if self.expandable and at + 1 < len(self.free) and self._is_last(self.free[at]):
                at += 1  # the arena's end counts as large as it may become: a larger hole fits better
            _, segment, start = self.free.pop(at)
            block = self.blocks[segment, start]
        else:
            block = self._grow(size)
        rest = block.size - size
        if rest >= self.splits_below:
            self._drop(block)
            self._put(_Block(block.start + size, rest, block.segment, free=True))
            block = _Block(block.start, size, block.segment, free=False)
            self._put(block)
        block.free = False
        return block

    def give_back(self, block: _Block) -> None:
        start, end = block.start, block.start + block.size
        self._drop(block)
        for neighbour in (self.ends.get((block.segment, start)), self.blocks.get((block.segment, end))):
            if neighbour is not None and neighbour.free:
                self.free.remove((neighbour.size, neighbour.segment, neighbour.start))
                self._drop(neighbour)
                start, end = min(start, neighbour.start), max(end, neighbour.start + neighbour.size)
        self._put(_Block(start, end - start, block.segment, free=True))

    def _is_last(self, free: tuple[int, int, int]) -> bool:
        size, _, start = free
        return start + size == self.reserved

    def _grow(self, size: int) -> _Block:
        if not self.expandable:
            wanted = self.segment_bytes if size < OWN_SEGMENT else -(-size // SMALL_SEGMENT) * SMALL_SEGMENT
            self.segments += 1
            self.reserved += wanted
            block = _Block(0, wanted, self.segments, free=False)
            self._put(block)
            return block
        last = self.ends.get((0, self.reserved))
        start = self.reserved
        if last is not None and last.free:  # the arena's end is free but too short
            self.free.remove((last.size, last.segment, last.start))
            self._drop(last)
            start = last.start
        more = -(-(start + size - self.reserved) // self.segment_bytes) * self.segment_bytes
        self.reserved += more
        block = _Block(start, self.reserved - start, 0, free=False)
        self._put(block)
        return block

    def _put(self, block: _Block) -> None:
        self.blocks[block.segment, block.start] = block
        self.ends[block.segment, block.start + block.size] = block
        if block.free:
            insort(self.free, (block.size, block.segment, block.start))

    def _drop(self, block: _Block) -> None:
        del self.blocks[block.segment, block.start]
        del self.ends[block.segment, block.start + block.size]


@dataclass(frozen=True)
class Replay:
    """Peaks. requested: as asked for. allocated: rounded up, torch's max_memory_allocated. reserved: max_memory_reserved."""

    requested: int
    allocated: int
    reserved: int


def replay(events: Iterable[tuple[int, int]], *, expandable: bool) -> Replay:
    """events: (name, bytes), bytes negative where that name is freed."""
    small = _Pool(expandable, SMALL_SEGMENT, splits_below=ROUND_BYTES)
    large = _Pool(expandable, LARGE_SEGMENT, splits_below=ROUND_BYTES if expandable else SMALL_BYTES + 1)
    held: dict[int, tuple[_Pool, _Block]] = {}
    requested = allocated = 0
    peak_requested = peak_allocated = 0
    for name, size in events:
        if size > 0:
            rounded = -(-size // ROUND_BYTES) * ROUND_BYTES
            pool = small if rounded <= SMALL_BYTES else large
            block = pool.take(rounded)
            held[name] = (pool, block)
            requested, allocated = requested + size, allocated + block.size
            peak_requested, peak_allocated = max(peak_requested, requested), max(peak_allocated, allocated)
        elif name in held:
            pool, block = held.pop(name)
            requested, allocated = requested + size, allocated - block.size
            pool.give_back(block)
    return Replay(peak_requested, peak_allocated, small.reserved + large.reserved)
