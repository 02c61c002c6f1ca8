"""Faults that these tests must find. Each is a context in which one function of the package has the fault."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from gpu_proof.streams import CardStream
from torch import Tensor

from paceline.model import gpt, layers
from paceline.plan import sharding
from paceline.train import buckets, evaluate, loop, optim, setup
from paceline.train.process import BusyClock


def replaced(owner: Any, name: str, change: Callable[[Any], Any]) -> Callable[[], AbstractContextManager[Any]]:
    """Returns a context in which owner.name is change(owner.name)."""
    return lambda: patch.object(owner, name, change(getattr(owner, name)))


def graph_break(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def attend_and_break(*args: Any, **options: Any) -> Tensor:
        torch._dynamo.graph_break()
        return attend(*args, **options)

    return attend_and_break


def late(start_sums: Callable[..., None]) -> Callable[..., None]:
    def start_all_at_the_end(self: optim.ShardedOptimizer, end: int) -> None:
        if end == len(self._buckets):
            start_sums(self, end)

    return start_all_at_the_end


def item(micro_steps: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def micro_steps_and_loss(self: loop.Loop, step: int) -> Tensor:
        nats_sum = micro_steps(self, step)
        self.first_loss = nats_sum.item()  # type: ignore[attr-defined]
        return nats_sum

    return micro_steps_and_loss


def cpu_tables(rotary: Callable[..., gpt.Pair]) -> Callable[..., gpt.Pair]:
    def rotary_on_cpu(self: gpt.GPT, start: int, end: int, device: torch.device) -> gpt.Pair:
        return rotary(self, start, end, torch.device("cpu"))

    return rotary_on_cpu


def blocking_copy(to_device: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda array, device: torch.from_numpy(array).to(device)


def fp32_product(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda self, x: F.linear(x.float(), self.weight.float()).to(x.dtype)


def other_order(shard_plan: Callable[..., sharding.ShardPlan]) -> Callable[..., sharding.ShardPlan]:
    """The last rank sends its buckets in another order than the others."""

    def shard_plan_of_rank(self: optim.ShardedOptimizer, shapes: Any) -> sharding.ShardPlan:
        plan = shard_plan(self, shapes)
        if self._rank < self._world_size - 1:
            return plan
        return sharding.ShardPlan(plan.world_size, plan.buckets[::-1], plan.replicated)

    return shard_plan_of_rank


def gathered_late(gather_schedule: Callable[..., tuple[sharding.Moment, ...]]) -> Callable[..., Any]:
    """Every part gathers its own weights, and none of the next."""

    def late_schedule(*args: Any, **options: Any) -> tuple[sharding.Moment, ...]:
        moments, live = [], set[int]()
        for moment in gather_schedule(*args, **options):
            free, need = live - set(moment.need), set(moment.need)
            moments.append(replace(moment, free=tuple(sorted(free)), gather=tuple(sorted(need - live))))
            live = need
        return tuple(moments)

    return late_schedule


def bf16_master(post_init: Callable[[buckets.Owned], None]) -> Callable[[buckets.Owned], None]:
    def post_init_bf16(self: buckets.Owned) -> None:
        self.master = self.master.bfloat16()
        post_init(self)

    return post_init_bf16


def wide_gradients(init: Callable[..., None]) -> Callable[..., None]:
    def init_fp32(self: buckets.BucketBuffers, *args: Any, **options: Any) -> None:
        init(self, *args, **options | {"grad_dtype": torch.float32})

    return init_fp32


def copied_logits(capped_nats_: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Writes at an index, as an eager function may: compiled it is a kernel of its own, behind a copy."""

    def capped_nats_and_write(
        z: Tensor, targets: Tensor, vocab_size: int, with_grad: bool, grad_scale: Tensor | None
    ) -> Tensor:
        nats = capped_nats_(z, targets, vocab_size, with_grad, grad_scale)
        if with_grad:
            at = targets.clamp_min(0).unsqueeze(-1)
            z.scatter_(-1, at, z.gather(-1, at) - 1)
        return nats

    return capped_nats_and_write


def forgotten_tables(rotary: Callable[..., gpt.Pair]) -> Callable[..., gpt.Pair]:
    def rotary_again(self: gpt.GPT, start: int, end: int, device: torch.device) -> gpt.Pair:
        self.rotary_tables = {}
        return rotary(self, start, end, device)

    return rotary_again


def sorted_first(relu_squared: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: relu_squared(x.sort(-1).values)


def scaled_over_tokens(relu_squared: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Needs the MLP's activations of all tokens before it can go on: what were one kernel are several."""

    def relu_squared_and_scale(x: Tensor) -> Tensor:
        y = relu_squared(x)
        return y / y.amax(dim=1, keepdim=True)

    return relu_squared_and_scale


def one_by_one(make_batches: Callable[..., Any]) -> Callable[..., Any]:
    return lambda shares, *, whole, together: make_batches(shares, whole=whole, together=False)


def every_micro_step(micro_step: Any) -> Any:
    @contextmanager
    def micro_step_with_sums(self: optim.ReplicatedOptimizer, *, last: bool) -> Iterator[None]:
        yield

    return micro_step_with_sums


def synchronize(micro_steps: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def micro_steps_to_the_end(self: loop.Loop, step: int) -> Tensor:
        nats_sum = micro_steps(self, step)
        torch.cuda.synchronize()
        return nats_sum

    return micro_steps_to_the_end


def side_stream(to_device: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Copies beside the current stream, which does not wait for it."""

    def to_device_beside(array: np.ndarray, device: torch.device) -> Tensor:
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            return to_device(array, device)

    return to_device_beside


def waited_side_stream(to_device: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def to_device_beside(array: np.ndarray, device: torch.device) -> Tensor:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            tensor = to_device(array, device)
        torch.cuda.current_stream().wait_stream(stream)
        return tensor

    return to_device_beside


def read_at_once(stop: Callable[[BusyClock], None]) -> Callable[[BusyClock], None]:
    def stop_and_read(self: BusyClock) -> None:
        stop(self)
        start, end = self._events[-1]
        self._add(start.elapsed_time(end))

    return stop_and_read


def without_wait(wait: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def wait_for_nothing(self: buckets.SegmentSum, *, add: bool = False) -> Tensor:
        self._works = []
        return wait(self, add=add)

    return wait_for_nothing


def unwaited_weights(wait_weights: Callable[..., None]) -> Callable[..., None]:
    def wait_for_nothing(self: buckets.GatheredBucket) -> None:
        self._works = []

    return wait_for_nothing


def waiting_start(start: Callable[[buckets.SegmentSum], None]) -> Callable[[buckets.SegmentSum], None]:
    def start_and_wait(self: buckets.SegmentSum) -> None:
        start(self)
        for work in self._works:
            work.wait()
        self._works = []

    return start_and_wait


def forgetful_loader(micro_batch: Callable[..., Any]) -> Callable[..., Any]:
    def micro_batch_now(self: loop.TrainLoader, step: int, micro_step: int) -> Any:
        self._next = None
        return micro_batch(self, step, micro_step)

    return micro_batch_now


def dropped(relu_squared: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: F.dropout(relu_squared(x), 0.1)


def noisy(relu_squared: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: relu_squared(x) * torch.rand(()).item()


def undirected(next_tokens: Callable[..., list[int]]) -> Callable[..., list[int]]:
    return lambda logits, *, generator, **options: next_tokens(logits, generator=None, **options)


def only_cpu(rng_pieces: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    return lambda rank, device: rng_pieces(rank, torch.device("cpu"))


def in_order_of_reading(rows_of: Callable[..., Any]) -> Callable[..., Any]:
    def next_rows(self: loop.TrainLoader, step: int, micro_step: int) -> Any:
        self.count = getattr(self, "count", 0) + 1  # type: ignore[attr-defined]
        return rows_of(self, self.count, 0)  # type: ignore[attr-defined]

    return next_rows


BROKEN = {
    "a graph break": replaced(gpt, "attend", graph_break),
    "gradients sent at the end": replaced(optim.ShardedOptimizer, "_start_sums", late),
    "a short last batch": replaced(np, "pad", lambda pad: lambda rows, *args, **options: rows),
    "gradients in an evaluation": replaced(gpt.GPT, "zero_grad", lambda zero_grad: lambda self: None),
    "an .item() in the step": replaced(loop.Loop, "_micro_steps", item),
    "a CPU tensor in a CUDA expression": replaced(gpt.GPT, "rotary", cpu_tables),
    "a blocking copy": replaced(loop, "to_device", blocking_copy),
    "a reduction over all tokens in a layer": replaced(gpt, "relu_squared", scaled_over_tokens),
    "matrices updated one by one": replaced(optim, "make_batches", one_by_one),
    "an fp32 product": replaced(gpt.Linear, "forward", fp32_product),
    "collectives in another order": replaced(optim.ShardedOptimizer, "_shard_plan", other_order),
    "gradients sent in fp32": replaced(buckets.BucketBuffers, "__init__", wide_gradients),
    "weights gathered late": replaced(optim, "gather_schedule", gathered_late),
    "a copy of the logits": replaced(layers, "capped_nats_", copied_logits),
    "rotary tables in the graph": replaced(gpt.GPT, "rotary", forgotten_tables),
    "an op without a kernel": replaced(gpt, "relu_squared", sorted_first),
    "a bf16 master": replaced(buckets.Owned, "__post_init__", bf16_master),
    "gradients sent in every micro-step": replaced(optim.ReplicatedOptimizer, "micro_step", every_micro_step),
    "gradients in one bucket": replaced(
        optim, "DistributedDataParallel", lambda ddp: partial(ddp, bucket_cap_mb=10_000)
    ),
    "a synchronize in the step": replaced(loop.Loop, "_micro_steps", synchronize),
    "a copy on a stream of its own": replaced(loop, "to_device", side_stream),
    "a stream of its own that the step waits for": replaced(loop, "to_device", waited_side_stream),
    "a clock that is read at once": replaced(BusyClock, "stop", read_at_once),
    "a sum that nobody waits for": replaced(buckets.SegmentSum, "wait", without_wait),
    "weights that nobody waits for": replaced(buckets.GatheredBucket, "wait_weights", unwaited_weights),
    "weights that are never freed": replaced(buckets.GatheredBucket, "free", lambda free: lambda self: None),
    "a wait in the backward": replaced(buckets.SegmentSum, "start", waiting_start),
    "rows read when they are needed": replaced(loop.TrainLoader, "micro_batch", forgetful_loader),
    "dropout in the forward": replaced(gpt, "relu_squared", dropped),
    "noise from the CPU in the forward": replaced(gpt, "relu_squared", noisy),
    "a sample from the default generator": replaced(evaluate, "next_tokens", undirected),
    "a checkpoint that nobody waits for": replaced(CardStream, "synchronize", lambda wait: lambda self: None),
    "a checkpoint without the card's generator": replaced(setup, "rng_pieces", only_cpu),
    "rows in the order of reading": replaced(loop.TrainLoader, "rows_of", in_order_of_reading),
}
