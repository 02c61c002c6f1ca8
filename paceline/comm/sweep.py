"""
Measures how fast collectives are at each size, called as the trainer calls them. The median of several timed blocks counts.

A block is as many operations as take some milliseconds, so that neither the clock nor the heartbeats between blocks matter. The
first rank of a measure decides how many and sends the number through the store: different numbers would hang. No verdicts here.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from paceline.heartbeat import OperationHeartbeat
from paceline.train.buckets import SegmentSum, start_all_gather
from paceline.units import format_bytes

TRIAL = 3
BLOCK_S = 0.005
MIN_BLOCKS, MAX_BLOCKS = 5, 50
PAIR_SIZES = 4  # enough for latency and bandwidth: the number of pairs grows with the square of the ranks


@dataclass(frozen=True)
class Measure:
    """One collective at one size. ranks: those that take part; the others wait for them to finish."""

    number: int
    collective: str
    num_bytes: int
    ranks: tuple[int, ...]
    rank: int
    device: torch.device

    def run(self, heartbeat: OperationHeartbeat, store: Store, *, budget_s: float) -> dict[str, Any] | None:
        """Returns None on ranks that take no part. Collective: every rank must call it, those included."""
        pair = f" between ranks {self.ranks[0]} and {self.ranks[1]}" if self.collective == "p2p" else ""
        heartbeat.begin(f"{self.collective} of {format_bytes(self.num_bytes)}{pair}")
        result = self.measure(heartbeat, store, budget_s=budget_s) if self.rank in self.ranks else None
        self.agree("finished", 1, store)
        return result

    def measure(self, heartbeat: OperationHeartbeat, store: Store, *, budget_s: float) -> dict[str, Any]:
        operation, num_bytes = self.make_operation()
        operation()  # connects, touches the memory
        one_s = block_seconds(operation, TRIAL, self.device) / TRIAL
        per_block = self.agree("per_block", max(1, int(BLOCK_S / one_s)), store)
        block_s = block_seconds(operation, per_block, self.device)
        heartbeat.advance()
        blocks = self.agree("blocks", min(MAX_BLOCKS, max(MIN_BLOCKS, int(budget_s / block_s))), store)
        seconds, messages = [], 2 if self.collective == "p2p" else 1  # a message to the peer and one back
        for _ in range(blocks):
            seconds.append(block_seconds(operation, per_block, self.device) / per_block / messages)
            heartbeat.advance()
        return {
            "collective": self.collective,
            "ranks": list(self.ranks),
            "bytes": num_bytes,
            "seconds": statistics.median(seconds),
        }

    def make_operation(self) -> tuple[Callable[[], object], int]:
        """Returns the operation, as the trainer calls it, and its true bytes: those of all segments, where it has segments."""
        num_segments = len(self.ranks) if self.collective in ("reduce_scatter", "all_gather") else 1
        # fp32 zeros stay finite however often they are summed
        x = torch.zeros(num_segments * max(1, self.num_bytes // num_segments // 4), device=self.device)
        operation: Callable[[], object]
        match self.collective:
            case "all_reduce":
                operation = partial(dist.all_reduce, x)
            case "broadcast":
                operation = partial(dist.broadcast, x, 0)
            case "reduce_scatter":
                operation = partial(sum_segments, SegmentSum(x, rank=self.rank, world_size=num_segments, tag=0))
            case "all_gather":
                operation = partial(gather_segments, x, rank=self.rank, world_size=num_segments)
            case _:
                is_first = self.rank == self.ranks[0]
                operation = partial(send_there_and_back, x, sum(self.ranks) - self.rank, is_first=is_first)
        return operation, 4 * x.numel()

    def agree(self, name: str, count: int, store: Store) -> int:
        """Returns the first rank's count on every rank, which waits for it."""
        key = f"comm/{name}/{self.number}"
        if self.rank == self.ranks[0]:
            store.set(key, str(count))
        return int(store.get(key))


def block_seconds(operation: Callable[[], object], count: int, device: torch.device) -> float:
    """Returns the seconds of `count` operations in a row; on a GPU, between two events of its stream."""
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(count):
            operation()
        return time.perf_counter() - started
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    before.record()
    for _ in range(count):
        operation()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after)) / 1000


def sum_segments(segment_sum: SegmentSum) -> None:
    segment_sum.start()
    segment_sum.wait()


def gather_segments(x: Tensor, *, rank: int, world_size: int) -> None:
    wait_all(start_all_gather(x, rank=rank, world_size=world_size, tag=0))


def send_there_and_back(x: Tensor, peer: int, *, is_first: bool) -> None:
    wait_all([dist.isend(x, peer) if is_first else dist.irecv(x, peer)])
    wait_all([dist.irecv(x, peer) if is_first else dist.isend(x, peer)])


def measures(rank: int, world_size: int, device: torch.device, *, sizes: Sequence[int]) -> list[Measure]:
    """The same list on every rank: every collective at all sizes, then messages between every two ranks."""
    everyone = tuple(range(world_size))
    names = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
    rows = [*product(names, [everyone], sizes), *product(["p2p"], combinations(everyone, 2), spread(sizes, PAIR_SIZES))]
    return [Measure(number, name, size, ranks, rank, device) for number, (name, ranks, size) in enumerate(rows)]


def spread(sizes: Sequence[int], count: int) -> list[int]:
    """Returns `count` of the sizes at even distances, with the first and the last."""
    if len(sizes) <= count:
        return list(sizes)
    return [sizes[i * (len(sizes) - 1) // (count - 1)] for i in range(count)]


def wait_all(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        assert work is not None, "this process is not in the process group"
        work.wait()
