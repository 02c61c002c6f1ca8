"""
The optimizers of a run: gradients, states and update split over ranks, weights too if need be; or nothing split, over DDP.

All take a model whose weights are fp32 and initialised alike on all ranks, and have one interface: zero_grad, micro_step around
each forward and backward, reduce, step, pieces and load. A sharded step communicates in three phases:

1. Backward of the last micro-step: as soon as the gradients of a bucket are complete, their sum over ranks starts, each rank
   receiving its own segment alone (a reduce-scatter). It runs under what is left of the backward.
2. reduce: waits for the segments' sums, then one small all-reduce carries everything that each rank needs whole: the loss, the
   stop requests, the gradients of the small replicated tensors and the sum of squares for the gradient norm.
3. step: each rank updates the fp32 rows that it owns, rounds them into its segment of the weights, and an all-gather sends the
   segment to the others. A bucket's gather runs under the update of the next bucket.

DDP's one all-reduce sends as many bytes as 1 and 3 together, but each rank then keeps all states and computes the whole update.

Which algorithm updates which parameter: plan/algorithms.py. Who owns what: plan/sharding.py. What is updated together:
update_batches.py. Where masters and states are when they are not on the device: offload.py. The classes do not depend on learning
rate schedules, precision of activations or files; make_optimizer alone knows a plan.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.model.checkpoint import Piece
from paceline.model.gpt import DTYPES
from paceline.plan.algorithms import ALGORITHMS, GroupSettings, with_states
from paceline.plan.cost import RunSetup
from paceline.plan.shapes import MATRIX, ParamShape, param_shapes
from paceline.plan.sharding import Moment, ShardPlan, gather_schedule, sends_narrow, shard_plan
from paceline.train import updates
from paceline.train.buckets import (
    NO_GRADIENT,
    BucketBuffers,
    GatheredBucket,
    Owned,
    Passage,
    Read,
    assert_shapes,
    grad_or_zeros,
    norm_of,
    sum_of_squares,
)
from paceline.train.offload import HostMemory, Staging
from paceline.train.process import all_reduce_sum
from paceline.train.update_batches import StepSettings, UpdateBatch, make_batches


class ShardedOptimizer:
    """Updates each parameter by its group's algorithm; each state lives on one rank alone.

    Gradients are fp32, or bf16 where they are sent after a single bf16 micro-step. The update is fp32 in any case, and so is the
    sum over ranks except NCCL's of bf16. Parameters become views of flat buffers in compute_dtype; those with fewer elements than
    plan/sharding.py's SMALL stay fp32.
    """

    shard = "optimizer"
    bucket_type = BucketBuffers
    waits_in_backward = False  # whether backward waits for other ranks, so that its time is not this rank's own

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
        first_value: Callable[[str], Tensor] | None = None,
        offload: bool = False,
        optimizer_states: str = "fp32",
    ):
        """first_value: of a parameter by its name, fp32; None: the parameters have it. offload, optimizer_states: the config's."""
        self.module, self.step_count = model, 0
        self._groups, self._rank, self._world_size = groups, rank, world_size
        self._mean_over = 1  # the ranks over which reduced gradients are a mean instead of a sum
        params = dict(model.named_parameters())
        assert_shapes(params, shapes)
        self._device = next(iter(params.values())).device
        self._newton_schulz_dtype = updates.newton_schulz_dtype(self._device)
        plan = self._shard_plan(shapes)
        bf16 = compute_dtype == torch.bfloat16
        narrow = sends_narrow(bf16=bf16, grad_accum_steps=grad_accum_steps, world_size=world_size, shard=self.shard)
        first_value = first_value or (lambda name: params[name].data)
        algorithms = {name: with_states(group.algorithm, optimizer_states) for name, group in groups.items()}
        host: Mapping[str, Mapping[str, Tensor]] = {}
        if offload:
            host = HostMemory(plan, algorithms, rank=rank, dtype=compute_dtype, device=self._device).tensors
        make_bucket = partial(
            self.bucket_type,
            rank=rank,
            world_size=world_size,
            compute_dtype=compute_dtype,
            grad_dtype=torch.bfloat16 if narrow else torch.float32,
            first_value=first_value,
            host=host,
        )
        self._buckets = [make_bucket(bucket, params, algorithms, tag=tag) for tag, bucket in enumerate(plan.buckets)]
        self._params = list(params.values())
        self._sharded = [share for bucket in self._buckets for share in bucket.owned]  # this rank's
        self._replicated = []
        for shape in plan.replicated:  # all rows of an fp32 parameter, which is its own master
            param = params[shape.name]
            weight = param.data = first_value(shape.name)
            share = Owned(param, shape, 0, shape.shape[0], weight, weight, algorithms[shape.group])
            self._replicated.append(share)
        self._replicated_batches = list(make_batches(self._replicated, whole=False, together=False))
        self._in_update_order = sorted(self._buckets, key=lambda bucket: bucket.whole)
        self._batches, self._staging = self._make_batches(offload=offload)
        self._is_last = False  # in the step's last micro-step, whose backward starts the sums over ranks
        self._next_bucket = 0  # the one to send next
        if world_size > 1:
            self._register_grad_hooks()

    def _register_grad_hooks(self) -> None:
        for bucket in self._buckets:
            for number, param in enumerate(bucket.params):
                param.register_post_accumulate_grad_hook(self._grad_hook(bucket, number))  # type: ignore[no-untyped-call]

    def _make_batches(self, *, offload: bool) -> tuple[dict[int, list[UpdateBatch]], Staging | None]:
        """Returns what is updated together in each bucket, and the buffers through which it passes where it is offloaded."""
        together = self._device.type != "cpu"
        batches = {b.tag: list(make_batches(b.owned, whole=b.whole, together=together)) for b in self._buckets}
        in_order = [batch for bucket in self._in_update_order for batch in batches[bucket.tag]]
        return batches, Staging(in_order, self._device) if offload else None

    def _shard_plan(self, shapes: tuple[ParamShape, ...]) -> ShardPlan:
        optimizer = self._groups[MATRIX].algorithm
        return shard_plan(shapes, world_size=self._world_size, optimizer=optimizer, shard=self.shard)

    def zero_grad(self) -> None:
        """Drops the gradients, which costs nothing: the first micro-step then writes them instead of adding to zeros."""
        for param in self._params:
            param.grad = None
        for share in self._sharded + self._replicated:
            share.grad = NO_GRADIENT  # otherwise one rank would hold the last step's through the next step's backward

    @contextmanager
    def micro_step(self, *, last: bool) -> Iterator[None]:
        """Surrounds a forward and backward; in a step's last one, sums over ranks start as soon as backward has filled a bucket."""
        self._is_last, self._next_bucket = last and self._world_size > 1, 0
        for bucket in self._buckets:
            bucket.waiting_for = len(bucket.params)
        yield
        if self._is_last:
            self._start_sums(len(self._buckets))  # those that wait for a parameter without gradient
        self._is_last = False

    def _grad_hook(self, bucket: BucketBuffers, number: int) -> Callable[[Tensor], None]:
        view = bucket.grad_views[number]

        def hook(param: Tensor) -> None:
            """Runs after backward has added to param.grad."""
            if param.grad is not view:  # in the step's first micro-step autograd made a tensor of its own
                assert param.grad is not None
                view.copy_(param.grad)
                param.grad = view
            if self._is_last:
                bucket.waiting_for -= 1
                ready = self._next_bucket
                while ready < len(self._buckets) and not self._buckets[ready].waiting_for:
                    ready += 1
                self._start_sums(ready)

        return hook

    def _start_sums(self, end: int) -> None:
        """Starts the sums in the plan's order, not in the order of completion: ranks cannot disagree about it."""
        while self._next_bucket < end:
            self._next_bucket += 1
            self._buckets[self._next_bucket - 1].start_sum()

    @torch.no_grad()
    def reduce(self, extras: Tensor) -> Tensor:
        """Ends the sums over ranks after the last micro-step. extras: (k,) fp32. Collective: one all-reduce of all small tensors.

        Returns (k + 1,) fp32: the extras' sums over ranks, then the sum of squares of the summed gradient.
        """
        for bucket in self._buckets:
            bucket.wait_sum()
        own_squares = sum_of_squares([share.grad for share in self._sharded], self._device)
        small = [grad_or_zeros(share.param).flatten() for share in self._replicated]
        message = torch.cat([extras, own_squares[None], *small])
        if self._world_size > 1:
            all_reduce_sum(message)
        summed_extras, squares, *parts = torch.split(message, [extras.numel(), 1, *map(len, small)])
        for share, part in zip(self._replicated, parts, strict=True):
            share.grad = part.view_as(share.master)
        return torch.cat([summed_extras, squares + sum_of_squares(parts, self._device)])

    @torch.no_grad()
    def step(self, *, lr_mult: float, momentum: float, weight_decay_mult: float, grad_scale: float) -> None:
        """Updates the weights after reduce, and sends them to all ranks. Collective.

        grad_scale multiplies the summed gradient. momentum and weight_decay_mult are for algorithms on whole matrices. Elementwise
        algorithms come first: their gathers, the largest, then run under the matrices' update, the longest.
        """
        self.step_count += 1
        scale, dtype, works = grad_scale * self._mean_over, self._newton_schulz_dtype, list[dist.Work]()
        settings = StepSettings(self.step_count, lr_mult, momentum, weight_decay_mult, scale, dtype)
        for batch in self._replicated_batches:
            batch.update(self._groups, settings, batch.tensors)
        for bucket in self._in_update_order:
            for batch in self._batches[bucket.tag]:
                with self._staging.on_device(batch) if self._staging else nullcontext(batch.tensors) as tensors:
                    batch.update(self._groups, settings, tensors)
            works += bucket.send_weights()
        for work in works:
            work.wait()

    def pieces(self) -> list[Piece]:
        """Returns what this rank saves: fp32 weights and states, every row on exactly one rank."""
        return [piece for share in self._saved() for piece in share.pieces()]

    def norms(self, *, grad_scale: float) -> dict[str, dict[str, Any]]:
        """Returns norms and counts of non-finite elements of what this rank saves and of its summed gradient, after reduce.

        They are of each parameter's rows; None for a norm that is not finite.
        """
        return {
            share.shape.name: {
                "rows": [share.lo, share.hi],
                **norm_of("weight", share.master),
                **norm_of("grad", share.grad, scale=grad_scale * self._mean_over),
            }
            for share in self._saved()
            if share.lo < share.hi
        }

    def _saved(self) -> list[Owned]:
        if self._staging:
            self._staging.synchronize()
        return self._sharded + (self._replicated if self._rank == 0 else [])

    @torch.no_grad()
    def load(self, read: Read, *, with_states: bool = True) -> None:
        """Loads weights and states that any number of ranks saved, or the weights alone. Collective."""
        if self._staging:
            self._staging.synchronize()
        for share in self._sharded + self._replicated:
            share.load(read, with_states=with_states)
        for work in [work for bucket in self._buckets for work in bucket.send_weights()]:
            work.wait()

    def state_dict(self) -> dict[str, Any]:
        """Returns what is not in pieces; it is the same on all ranks."""
        return {"step_count": self.step_count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what state_dict returned."""
        self.step_count = int(state["step_count"])


class FullyShardedOptimizer(ShardedOptimizer):
    """Shards the weights too: each bucket is gathered before a part of the model uses it, and freed behind it. For `--shard full`.

    Owners, formulas and checkpoints are the same. Every micro-step sends its gradients, which the owner adds up: no rank holds
    those of more than some layers. What is sent when follows from the plan alone (plan/sharding.py: gather_schedule).
    """

    shard = "full"
    bucket_type = GatheredBucket
    waits_in_backward = True

    def __init__(self, model: nn.Module, shapes: tuple[ParamShape, ...], *args: Any, **options: Any):
        """Makes the model call this optimizer wherever its forward enters a part."""
        super().__init__(model, shapes, *args, **options)
        plan, rung = self._shard_plan(shapes), cast(bool | str, model.activation_checkpointing)
        self._micro_step = gather_schedule(plan, shapes, checkpointing=rung)
        self._forward = gather_schedule(plan, shapes, checkpointing=rung, backward=False)
        self._gathered = cast(list[GatheredBucket], self._buckets)
        self._summing: tuple[int, ...] = ()  # buckets whose sums are under way
        model.passage = self._enter  # type: ignore[assignment]

    def zero_grad(self) -> None:
        """Drops the gradients."""
        super().zero_grad()
        for bucket in self._gathered:
            bucket.is_first = True

    @contextmanager
    def micro_step(self, *, last: bool) -> Iterator[None]:
        """Surrounds a forward and backward, whose gradients are sent whether it is the step's last or not."""
        yield
        self._follow(self._micro_step[-1])

    def _grad_hook(self, bucket: BucketBuffers, number: int) -> Callable[[Tensor], None]:
        return lambda param: cast(GatheredBucket, bucket).take_gradient(number)

    def _enter(self, part: int, x: Tensor) -> Tensor:
        """Gathers the part's weights, and returns x; its backward gathers those of the part before it."""
        schedule = self._micro_step if torch.is_grad_enabled() else self._forward
        self._follow(schedule[part], wait=part > 0)  # the last sums run under the next micro-step's first part
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        return cast(Tensor, Passage.apply(x, lambda: self._follow(schedule[-1 - part])))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _follow(self, moment: Moment, *, wait: bool = True) -> None:
        if wait:
            self._end_sums()
        for number in moment.complete:
            self._gathered[number].start_sum()
        self._summing += moment.complete
        for number in moment.free:
            self._gathered[number].free()
        for number in moment.gather:
            self._gathered[number].gather()
        for number in moment.need:
            self._gathered[number].wait_weights()

    def _end_sums(self) -> None:
        for number in self._summing:
            self._gathered[number].end_sum()
        self._summing = ()

    def reduce(self, extras: Tensor) -> Tensor:
        """Returns what ShardedOptimizer.reduce does. Collective."""
        self._end_sums()
        return super().reduce(extras)


class ReplicatedOptimizer(ShardedOptimizer):
    """Shards nothing: elementwise algorithms whose states every rank holds, over DDP's averaged gradients. For `--shard none`."""

    shard = "none"

    def __init__(
        self,
        model: nn.Module,
        shapes: tuple[ParamShape, ...],
        groups: dict[str, GroupSettings],
        *,
        rank: int,
        world_size: int,
        **sharding: Any,
    ):
        """Wraps the model in DDP. sharding: of no effect: weights and gradients are fp32."""
        assert not sharding.get("offload"), "--shard none has nothing to offload"
        whole = any(ALGORITHMS[group.algorithm].whole for group in groups.values())
        assert not whole, "whole matrices need --shard optimizer"
        super().__init__(model, shapes, groups, rank=rank, world_size=world_size, **sharding)
        self.waits_in_backward = world_size > 1  # DDP waits for its last bucket
        self._mean_over = world_size
        self._ddp: DistributedDataParallel | None = None
        if world_size > 1:
            device_ids = [self._device.index] if self._device.type == "cuda" else None
            self._ddp = DistributedDataParallel(
                model, device_ids=device_ids, gradient_as_bucket_view=True, broadcast_buffers=False
            )
            self.module = self._ddp

    def _shard_plan(self, shapes: tuple[ParamShape, ...]) -> ShardPlan:
        return ShardPlan(self._world_size, buckets=(), replicated=shapes)

    @contextmanager
    def micro_step(self, *, last: bool) -> Iterator[None]:
        """Surrounds a forward and backward; DDP averages the gradients under the last backward of a step."""
        with nullcontext() if last or self._ddp is None else self._ddp.no_sync():
            yield

    @torch.no_grad()
    def reduce(self, extras: Tensor) -> Tensor:
        """Returns what ShardedOptimizer.reduce does. Collective."""
        for share in self._replicated:
            share.grad = grad_or_zeros(share.param)
        message = extras.clone()
        all_reduce_sum(message)
        squares = sum_of_squares([share.grad for share in self._replicated], self._device) * self._mean_over**2
        return torch.cat([message, squares[None]])


def make_optimizer(
    model: nn.Module, setup: RunSetup, groups: Mapping[str, GroupSettings], *, rank: int
) -> ShardedOptimizer:
    """Returns the setup's optimizer; the sharded ones move the model's parameters into their buffers."""
    kind = ReplicatedOptimizer if setup.shard == "none" else ShardedOptimizer
    if setup.shards_weights:
        kind = FullyShardedOptimizer
    return kind(
        model,
        param_shapes(setup.model),
        dict(groups),
        rank=rank,
        world_size=setup.world_size,
        compute_dtype=DTYPES[setup.precision],
        grad_accum_steps=setup.grad_accum_steps,
        first_value=getattr(model, "first_value", None),
        offload=setup.offload == "optimizer",
        optimizer_states=setup.optimizer_states,
    )
