"""
The optimizers of a run: Muon and AdamW with gradients, states and update split over ranks; and AdamW on every rank, over DDP.

Both take a model whose weights are fp32 and initialised alike on all ranks, and have one interface: zero_grad, micro_step
around each forward and backward, reduce, step, pieces and load. Formulas: updates.py. Who owns what: plan/sharding.py.
Learning rate schedules, precision of activations and files are not known here.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.model.checkpoint import Piece
from paceline.plan.scaling import GroupSettings
from paceline.plan.shapes import ParamShape
from paceline.plan.sharding import shard_plan
from paceline.train.buckets import BucketBuffers, MatrixBatch, matrix_batches
from paceline.train.dist import all_reduce_sum
from paceline.train.owned import (
    NO_GRADIENT,
    Owned,
    Read,
    check_shapes,
    grad_or_zeros,
    norms_of,
    step_adamw,
    sum_of_squares,
    whole_tensor,
)
from paceline.train.updates import muon_update, newton_schulz_dtype


class ShardedOptimizer:
    """Muon for the matrices and AdamW for the rest, or AdamW for all, as `groups` says; each state on one rank alone.

    Gradients are fp32; bf16 where they are sent after a single bf16 micro-step. The update is fp32 in any case, and so is the sum
    over ranks but for NCCL's of bf16. Parameters become views of flat buffers in compute_dtype; those under plan/sharding.py's
    SMALL elements stay fp32.
    """

    waits_in_backward = False  # for other ranks

    def __init__(
        self,
        model: nn.Module,
        shapes: tuple[ParamShape, ...],
        groups: dict[str, GroupSettings],
        *,
        rank: int,
        world_size: int,
        compute_dtype: torch.dtype,
        grad_accum_steps: int,
    ):
        self.module, self.step_count = model, 0
        self._groups, self._world_size = groups, world_size
        params = dict(model.named_parameters())
        check_shapes(params, shapes)
        self._device = next(iter(params.values())).device
        self._newton_schulz_dtype = newton_schulz_dtype(self._device)
        muon = any(group.algorithm == "muon" for group in groups.values())
        plan = shard_plan(shapes, world_size=world_size, optimizer="muon" if muon else "adamw")
        narrow = compute_dtype == torch.bfloat16 and grad_accum_steps == 1 and world_size > 1
        self._buckets = [
            BucketBuffers(
                bucket,
                params,
                rank=rank,
                world_size=world_size,
                tag=tag,
                compute_dtype=compute_dtype,
                grad_dtype=torch.bfloat16 if narrow else torch.float32,
            )
            for tag, bucket in enumerate(plan.buckets)
        ]
        self._params = list(params.values())
        self._replicated = [whole_tensor(params[shape.name], shape) for shape in plan.replicated]
        self._rank = rank
        together = self._device.type != "cpu"
        self._batches = {b.tag: matrix_batches(b.shares, together=together) for b in self._buckets if b.whole}
        self._last = False  # in the micro-step after whose backward the ranks meet
        self._next = 0  # bucket that is to be sent next
        if world_size > 1:
            for bucket in self._buckets:
                for param, view in zip(bucket.params, bucket.grad_views, strict=True):
                    param.register_post_accumulate_grad_hook(self._grad_hook(bucket, view))  # type: ignore[no-untyped-call]

    def zero_grad(self) -> None:
        """Costs nothing: the first micro-step's gradients are then written, not added."""
        for param in self._params:
            param.grad = None
        for share in (share for bucket in self._buckets for share in bucket.shares):
            share.grad = NO_GRADIENT  # else one rank would hold the last step's through the next step's backward

    @contextmanager
    def micro_step(self, *, last: bool) -> Iterator[None]:
        """Forward and backward go inside. In a step's last, sums over ranks start as soon as backward has filled a bucket."""
        self._last, self._next = last and self._world_size > 1, 0
        for bucket in self._buckets:
            bucket.waiting_for = len(bucket.params)
        yield
        if self._last:
            self._start_sums(len(self._buckets))  # those that wait for a parameter without gradient
        self._last = False

    def _grad_hook(self, bucket: BucketBuffers, view: Tensor) -> Callable[[Tensor], None]:
        def hook(param: Tensor) -> None:
            """After backward has added to param.grad."""
            if param.grad is not view:  # the step's first: autograd made a tensor of its own
                assert param.grad is not None
                view.copy_(param.grad)
                param.grad = view
            if self._last:
                bucket.waiting_for -= 1
                ready = self._next
                while ready < len(self._buckets) and not self._buckets[ready].waiting_for:
                    ready += 1
                self._start_sums(ready)

        return hook

    def _start_sums(self, end: int) -> None:
        """In the plan's order, not in the order of completion: ranks cannot disagree about it."""
        while self._next < end:
            self._next += 1
            self._buckets[self._next - 1].start_sum()

    @torch.no_grad()
    def reduce(self, extras: Tensor) -> Tensor:
        """After the last micro-step. extras: (k,) fp32. Collective: one all-reduce for all that is small.

        Returns (k + 1,) fp32: the extras' sums over ranks, then the sum of squares of the summed gradient.
        """
        for bucket in self._buckets:
            bucket.wait_sum()
        own = [share.grad for bucket in self._buckets for share in bucket.shares]
        small = [grad_or_zeros(share.param) for share in self._replicated]
        sizes = [extras.numel(), 1, *(grad.numel() for grad in small)]
        message = torch.cat([extras, sum_of_squares(own, self._device)[None], *(grad.flatten() for grad in small)])
        if self._world_size > 1:
            all_reduce_sum(message)
        summed_extras, squares, *parts = torch.split(message, sizes)
        for share, part in zip(self._replicated, parts, strict=True):
            share.grad = part.view_as(share.master)
        return torch.cat([summed_extras, squares + sum_of_squares(parts, self._device)])

    @torch.no_grad()
    def step(self, *, lr_mult: float, momentum: float, weight_decay_mult: float, grad_scale: float) -> None:
        """After reduce. grad_scale multiplies the summed gradient. weight_decay_mult is for Muon's groups. Collective.

        AdamW first: its gathers, the largest, then go on under Newton-Schulz.
        """
        self.step_count += 1
        works: list[dist.Work] = []
        step_adamw(self._replicated, self._groups, step=self.step_count, lr_mult=lr_mult, grad_scale=grad_scale)
        for bucket in sorted(self._buckets, key=lambda bucket: bucket.whole):
            if bucket.whole:
                for batch in self._batches[bucket.tag]:
                    self._step_muon(
                        batch,
                        lr_mult=lr_mult,
                        momentum=momentum,
                        weight_decay_mult=weight_decay_mult,
                        grad_scale=grad_scale,
                    )
            else:
                step_adamw(bucket.shares, self._groups, step=self.step_count, lr_mult=lr_mult, grad_scale=grad_scale)
            works += bucket.start_gather()
        for work in works:
            work.wait()

    def _step_muon(
        self, batch: MatrixBatch, *, lr_mult: float, momentum: float, weight_decay_mult: float, grad_scale: float
    ) -> None:
        group = self._groups[batch.shares[0].shape.group]
        masters, grads = [share.master for share in batch.shares], [share.grad for share in batch.shares]
        alone = len(masters) == 1
        weight = masters[0] if alone else torch.stack(masters)  # (m, n) or (k, m, n)
        muon_update(
            weight,
            grads[0] if alone else torch.stack(grads),
            batch.momentum_buffer,
            batch.second_momentum_buffer,
            lr=group.lr * lr_mult,
            momentum=momentum,
            beta2=group.betas[1],
            weight_decay=group.weight_decay * weight_decay_mult,
            grad_scale=grad_scale,
            dtype=self._newton_schulz_dtype,
        )
        if not alone:
            torch._foreach_copy_(masters, list(weight.unbind()))

    def pieces(self) -> list[Piece]:
        """What this rank saves: fp32 weights and states, every row on exactly one rank."""
        return [piece for share in self._own() for piece in share.pieces()]

    def norms(self, *, grad_scale: float) -> dict[str, dict[str, Any]]:
        """Of weights and summed gradients, of what this rank saves; after reduce."""
        return norms_of(self._own(), grad_scale=grad_scale)

    def _own(self) -> list[Owned]:
        shares = [share for bucket in self._buckets for share in bucket.shares]
        return shares + (self._replicated if self._rank == 0 else [])

    @torch.no_grad()
    def load(self, read: Read) -> None:
        """From what any number of ranks saved. Collective."""
        for share in self._replicated:
            share.load(read)
        works = []
        for bucket in self._buckets:
            for share in bucket.shares:
                share.load(read)
            works += bucket.start_gather()
        for work in works:
            work.wait()

    def state_dict(self) -> dict[str, Any]:
        """What is not in pieces; the same on all ranks."""
        return {"step_count": self.step_count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step_count = int(state["step_count"])


class ReplicatedAdamW:
    """AdamW whose states every rank holds, over DDP's all-reduced gradients; fp32 weights. For `--shard none`."""

    def __init__(
        self,
        model: nn.Module,
        shapes: tuple[ParamShape, ...],
        groups: dict[str, GroupSettings],
        *,
        rank: int,
        world_size: int,
        compute_dtype: torch.dtype,
        grad_accum_steps: int,
    ):
        """compute_dtype and grad_accum_steps change nothing here: weights and gradients are fp32."""
        assert all(group.algorithm == "adamw" for group in groups.values()), "Muon needs --shard optimizer"
        params = dict(model.named_parameters())
        check_shapes(params, shapes)
        self.step_count = 0
        self._groups, self._rank, self._world_size = groups, rank, world_size
        self._device = next(iter(params.values())).device
        self._shares = [whole_tensor(params[shape.name], shape) for shape in shapes]
        self.waits_in_backward = world_size > 1  # DDP, for its last bucket
        self._ddp: DistributedDataParallel | None = None
        if world_size > 1:
            device_ids = [self._device.index] if self._device.type == "cuda" else None
            self._ddp = DistributedDataParallel(
                model, device_ids=device_ids, gradient_as_bucket_view=True, broadcast_buffers=False
            )
        self.module: nn.Module = self._ddp or model

    def zero_grad(self) -> None:
        for share in self._shares:
            share.param.grad, share.grad = None, NO_GRADIENT

    def micro_step(self, *, last: bool) -> AbstractContextManager[None]:
        """Forward and backward go inside; DDP averages the gradients under the last backward of a step."""
        return nullcontext() if last or self._ddp is None else self._ddp.no_sync()

    @torch.no_grad()
    def reduce(self, extras: Tensor) -> Tensor:
        """As ShardedOptimizer's. Collective."""
        for share in self._shares:
            share.grad = grad_or_zeros(share.param)
        message = extras.clone()
        if self._world_size > 1:
            all_reduce_sum(message)
        # DDP's gradients are the mean over ranks
        squares = sum_of_squares([share.grad for share in self._shares], self._device) * self._world_size**2
        return torch.cat([message, squares[None]])

    @torch.no_grad()
    def step(self, *, lr_mult: float, momentum: float, weight_decay_mult: float, grad_scale: float) -> None:
        """After reduce; no communication. momentum and weight_decay_mult are Muon's."""
        self.step_count += 1
        step_adamw(
            self._shares, self._groups, step=self.step_count, lr_mult=lr_mult, grad_scale=grad_scale * self._world_size
        )

    def pieces(self) -> list[Piece]:
        """Everything, on rank 0."""
        return [piece for share in self._shares for piece in share.pieces()] if self._rank == 0 else []

    def norms(self, *, grad_scale: float) -> dict[str, dict[str, Any]]:
        """As ShardedOptimizer's."""
        return norms_of(self._shares if self._rank == 0 else [], grad_scale=grad_scale * self._world_size)

    @torch.no_grad()
    def load(self, read: Read) -> None:
        """Every rank reads everything."""
        for share in self._shares:
            share.load(read)

    def state_dict(self) -> dict[str, Any]:
        return {"step_count": self.step_count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step_count = int(state["step_count"])
