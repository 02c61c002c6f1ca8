"""
Measures how fast collectives are at each size, called as the trainer calls them. The median of several timed blocks counts.

A block is as many operations as take some milliseconds, so that neither the clock nor the heartbeats between blocks matter. The
first rank of a measure decides how many and sends the number through the store: different numbers would hang. No verdicts here.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, count
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

Operation = Callable[[], object]
Make = Callable[[int], tuple[Operation, int]]  # bytes -> the operation, its true bytes


@dataclass(frozen=True)
class Measure:
    """One collective at one size. ranks: those that take part; the others wait for them to finish."""

    number: int
    collective: str
    num_bytes: int
    ranks: tuple[int, ...]
    rank: int
    device: torch.device
    make: Make

    def run(self, heartbeat: OperationHeartbeat, store: Store, *, budget_s: float) -> dict[str, Any] | None:
        """Returns None on ranks that take no part. Collective: every rank must call it, those included."""
        pair = f" between ranks {self.ranks[0]} and {self.ranks[1]}" if self.collective == "p2p" else ""
        heartbeat.begin(f"{self.collective} of {format_bytes(self.num_bytes)}{pair}")
        result = self.measure(heartbeat, store, budget_s=budget_s) if self.rank in self.ranks else None
        if self.rank == self.ranks[0]:
            store.set(f"comm/finished/{self.number}", "1")
        store.get(f"comm/finished/{self.number}")
        return result

    def measure(self, heartbeat: OperationHeartbeat, store: Store, *, budget_s: float) -> dict[str, Any]:
        operation, num_bytes = self.make(self.num_bytes)
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

    def agree(self, name: str, count: int, store: Store) -> int:
        """Returns the first rank's count on every rank."""
        key = f"comm/{name}/{self.number}"
        if self.rank == self.ranks[0]:
            store.set(key, str(count))
        return int(store.get(key))


def block_seconds(operation: Operation, count: int, device: torch.device) -> float:
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


def measures(rank: int, world_size: int, device: torch.device, *, sizes: Sequence[int]) -> list[Measure]:
    """The same list on every rank: every collective at all sizes, then messages between every two ranks."""
    everyone = tuple(range(world_size))
    plan = [(name, everyone, make, sizes) for name, make in collectives(rank, world_size, device).items()]
    few_sizes = spread(sizes, PAIR_SIZES)
    plan += [("p2p", pair, ping_pong(rank, pair, device), few_sizes) for pair in combinations(everyone, 2)]
    numbers = count()
    return [
        Measure(next(numbers), name, size, ranks, rank, device, make)
        for name, ranks, make, plan_sizes in plan
        for size in plan_sizes
    ]


def collectives(rank: int, world_size: int, device: torch.device) -> dict[str, Make]:
    """Called as the trainer calls them. The bytes of reduce_scatter and all_gather are those of all segments together."""

    def of_one_buffer(call: Callable[[Tensor], object]) -> Make:
        def make(num_bytes: int) -> tuple[Operation, int]:
            x = buffer(num_bytes, device)
            return lambda: call(x), 4 * x.numel()

        return make

    def reduce_scatter(num_bytes: int) -> tuple[Operation, int]:
        flat = buffer(num_bytes // world_size, device).repeat(world_size)
        segment_sum = SegmentSum(flat, rank=rank, world_size=world_size, tag=0)

        def operation() -> None:
            segment_sum.start()
            segment_sum.wait()

        return operation, 4 * flat.numel()

    def all_gather(num_bytes: int) -> tuple[Operation, int]:
        flat = buffer(num_bytes // world_size, device).repeat(world_size)
        return lambda: wait_all(start_all_gather(flat, rank=rank, world_size=world_size, tag=0)), 4 * flat.numel()

    return {
        "all_reduce": of_one_buffer(dist.all_reduce),
        "reduce_scatter": reduce_scatter,
        "all_gather": all_gather,
        "broadcast": of_one_buffer(lambda x: dist.broadcast(x, 0)),
    }


def ping_pong(rank: int, pair: tuple[int, int], device: torch.device) -> Make:
    """Makes a message to the peer and one back."""

    def make(num_bytes: int) -> tuple[Operation, int]:
        x, first, peer = buffer(num_bytes, device), rank == pair[0], sum(pair) - rank

        def operation() -> None:
            wait_all([dist.isend(x, peer) if first else dist.irecv(x, peer)])
            wait_all([dist.irecv(x, peer) if first else dist.isend(x, peer)])

        return operation, 4 * x.numel()

    return make


def buffer(num_bytes: int, device: torch.device) -> Tensor:
    """(numel,) fp32; zeros stay finite however often they are summed."""
    return torch.zeros(max(1, num_bytes // 4), device=device)


def spread(sizes: Sequence[int], count: int) -> list[int]:
    """Returns `count` of the sizes at even distances, with the first and the last."""
    if len(sizes) <= count:
        return list(sizes)
    return [sizes[i * (len(sizes) - 1) // (count - 1)] for i in range(count)]


def wait_all(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        assert work is not None, "this process is not in the process group"
        work.wait()
