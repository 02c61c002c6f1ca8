"""
Ranks: how they find each other, and the collectives that training uses. NCCL on CUDA, gloo on the CPU.

gloo's own reduce-scatter is an all-reduce inside and its all-gather copies twice, so on the CPU segments go from rank to rank
directly: the fewest bytes, no copy but the one on the wire (dev/LOG.md has the measurements). Only `Work.wait()` is used: on
NCCL it orders streams and does not block, and gloo has no futures.
"""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import PacelineError

TIMEOUT_S = 1800.0  # a collective that takes longer has lost a rank; the supervisor sees most deaths within a second
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def init_distributed(device: str, *, timeout_s: float = TIMEOUT_S) -> tuple[int, int, int]:
    """Joins the ranks that torchrun's environment names. Returns rank, world_size, local_rank.

    One process without a launcher is a world of its own and needs no process group.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        if device == "cuda":
            torch.cuda.set_device(0)
        return 0, 1, 0
    missing = [name for name in LAUNCHER_VARIABLES if name not in os.environ]
    if missing:
        raise PacelineError(
            f"WORLD_SIZE is {world_size}, but {', '.join(missing)} not set: each process would train alone",
            fix="start it through paceline train or torchrun, or unset WORLD_SIZE",
        )
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    timeout = timedelta(seconds=timeout_s)
    if device == "cuda":
        torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl", timeout=timeout, device_id=torch.device("cuda", local_rank))
    else:
        dist.init_process_group("gloo", timeout=timeout)
    assert dist.get_world_size() == world_size, (dist.get_world_size(), world_size)
    return rank, world_size, local_rank


def shutdown() -> None:
    """At a clean end, on every rank."""
    if dist.is_initialized():
        dist.barrier()  # a rank that leaves early resets connections from which others still read
        dist.destroy_process_group()


def all_reduce_sum(tensor: Tensor) -> None:
    """Sum over ranks, in place. Collective."""
    if dist.is_initialized():
        dist.all_reduce(tensor)


def broadcast_object(value: Any) -> Any:
    """Rank 0's value, on every rank. Collective."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


class SegmentSum:
    """Sums a flat buffer of world_size equal segments over ranks, for this rank's segment alone.

    flat: (world_size * segment,) fp32, bf16 or fp16. The result is fp32, and so is gloo's summing, in a fixed order: a repeat
    has the same bits. All ranks start the same buckets in the same order; `tag` tells apart those that are under way at once.
    """

    def __init__(self, flat: Tensor, *, rank: int, world_size: int, tag: int):
        self._flat, self._rank, self._world_size, self._tag = flat, rank, world_size, tag
        self._segments = flat.view(world_size, -1)  # (world_size, segment)
        self._works: list[dist.Work] = []
        own = self._segments[rank]
        if flat.device.type != "cpu":
            self._received = torch.empty_like(own)
            self._total = self._received if flat.dtype == torch.float32 else torch.empty_like(own, dtype=torch.float32)
        else:
            self._received = flat.new_empty(world_size - 1, own.numel())
            self._total = own if flat.dtype == torch.float32 else torch.empty_like(own, dtype=torch.float32)

    def start(self) -> None:
        if self._flat.device.type != "cpu":
            self._works = [_reduce_scatter(self._received, self._flat)]
            return
        for distance in range(1, self._world_size):
            sender, receiver = (self._rank - distance) % self._world_size, (self._rank + distance) % self._world_size
            self._works += [
                _work(dist.irecv(self._received[distance - 1], sender, tag=self._tag)),
                _work(dist.isend(self._segments[receiver], receiver, tag=self._tag)),
            ]

    def wait(self) -> Tensor:
        """(segment,) fp32; valid until the next start."""
        for work in self._works:
            work.wait()
        self._works = []
        if self._flat.device.type != "cpu":
            if self._total is not self._received:
                self._total.copy_(self._received)
            return self._total
        if self._flat.dtype != torch.float32:
            self._total.copy_(self._segments[self._rank])
        for received in self._received:
            self._total += received
        return self._total


def start_all_gather(flat: Tensor, *, rank: int, world_size: int, tag: int) -> list[dist.Work]:
    """Every rank's segment of `flat` to all others, in place; `flat` may be touched when the works are done."""
    segments = flat.view(world_size, -1)  # (world_size, segment)
    if flat.device.type != "cpu":
        return [_all_gather(flat, segments[rank])]
    works = []
    for distance in range(1, world_size):
        sender, receiver = (rank - distance) % world_size, (rank + distance) % world_size
        works += [
            _work(dist.irecv(segments[sender], sender, tag=tag)),
            _work(dist.isend(segments[rank], receiver, tag=tag)),
        ]
    return works


def _reduce_scatter(output: Tensor, flat: Tensor) -> dist.Work:
    name = (
        "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    )  # torch < 2.13
    return _work(getattr(dist, name)(output, flat, async_op=True))


def _all_gather(flat: Tensor, own: Tensor) -> dist.Work:
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # torch < 2.13
    return _work(getattr(dist, name)(flat, own, async_op=True))


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this process is not in the process group"
    return work
