"""
The flat buffers behind the parameters on one rank, as plan/sharding.py lays them out, and the batches in which Muon updates them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.plan.sharding import Bucket
from paceline.train.dist import SegmentSum, start_all_gather
from paceline.train.owned import Owned, owned


class BucketBuffers:
    """One bucket on one rank: flat weights, flat gradients, the sum over ranks, and what this rank owns of it."""

    def __init__(
        self,
        bucket: Bucket,
        params: Mapping[str, nn.Parameter],
        *,
        rank: int,
        world_size: int,
        tag: int,
        compute_dtype: torch.dtype,
        grad_dtype: torch.dtype,
    ):
        self.whole, self.rank, self.world_size, self.tag = bucket.whole, rank, world_size, tag
        device = next(iter(params.values())).device
        self.weights = torch.zeros(bucket.segment * world_size, dtype=compute_dtype, device=device)
        self.params = [params[placement.param.name] for placement in bucket.placements]
        initial = {placement.param.name: params[placement.param.name].data for placement in bucket.placements}  # fp32
        for placement, param in zip(bucket.placements, self.params, strict=True):
            view = self.weights[placement.offset : placement.offset + placement.param.numel].view(placement.param.shape)
            param.data = view.copy_(param.data)
            if grad_dtype != compute_dtype:
                param.grad_dtype = grad_dtype  # else autograd would keep gradients in the weight's dtype
        self.shares = []
        for share in bucket.shares(rank):
            param, name = params[share.param.name], share.param.name
            weight = param.data[share.lo : share.hi]
            if compute_dtype == torch.float32:
                master = weight
            else:
                rows = initial[name][share.lo : share.hi]
                master = rows if len(rows) == len(param) else rows.clone()  # else the others' rows would stay in memory
            self.shares.append(
                owned(param, share.param, rows=(share.lo, share.hi), weight=weight, master=master, muon=bucket.whole)
            )
        self.grad_views: list[Tensor] = []
        self.sum: SegmentSum | None = None
        if world_size > 1:
            grads = torch.zeros(bucket.segment * world_size, dtype=grad_dtype, device=device)
            self.grad_views = [
                grads[placement.offset : placement.offset + placement.param.numel].view(placement.param.shape)
                for placement in bucket.placements
            ]
            self.sum = SegmentSum(grads, rank=rank, world_size=world_size, tag=tag)
            self.starts = [share.start for share in bucket.shares(rank)]
        self.waiting_for = 0  # parameters whose gradient of the last micro-step is not there yet

    def start_sum(self) -> None:
        """Collective. A parameter that took no part in the step counts as a gradient of zero."""
        assert self.sum is not None
        for param, view in zip(self.params, self.grad_views, strict=True):
            if param.grad is None:
                view.zero_()
        self.sum.start()

    def wait_sum(self) -> None:
        """Gives each share its gradient."""
        if self.sum is None:  # one rank: the gradients are where autograd left them
            for share in self.shares:
                grad = share.param.grad
                share.grad = torch.zeros_like(share.master) if grad is None else grad.detach()
            return
        total = self.sum.wait()  # (segment,) fp32
        for share, start in zip(self.shares, self.starts, strict=True):
            share.grad = total[start : start + share.master.numel()].view_as(share.master)

    def start_gather(self) -> list[dist.Work]:
        """Collective, after an update."""
        for share in self.shares:
            share.publish()
        if self.world_size == 1:
            return []
        return start_all_gather(self.weights, rank=self.rank, world_size=self.world_size, tag=self.tag)


@dataclass(frozen=True)
class MatrixBatch:
    """Matrices of one shape that Muon updates together."""

    shares: list[Owned]
    momentum_buffer: Tensor
    second_momentum_buffer: Tensor


def matrix_batches(shares: Sequence[Owned], *, together: bool) -> list[MatrixBatch]:
    """together: neighbours of one shape in one batch, for a GPU, which single small products leave idle.

    A CPU takes each by itself: it stays in the cache, and its bits cannot depend on how many this rank owns.
    """
    batches: list[list[Owned]] = []
    for share in shares:
        if together and batches and batches[-1][0].shape.shape == share.shape.shape:
            batches[-1].append(share)
        else:
            batches.append([share])
    return [_matrix_batch(batch) for batch in batches]


def _matrix_batch(shares: list[Owned]) -> MatrixBatch:
    if len(shares) == 1:
        return MatrixBatch(shares, *shares[0].states.values())
    buffers = {name: torch.stack([share.states[name] for share in shares]) for name in shares[0].states}
    for i, share in enumerate(shares):
        share.states = {name: buffer[i] for name, buffer in buffers.items()}
    return MatrixBatch(shares, *buffers.values())
