"""Faults that these tests must find. Each is a context in which one function of the package has the fault."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.model import gpt, layers
from paceline.plan import sharding
from paceline.train import buckets, loop, optim


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


BROKEN = {
    "a graph break": replaced(gpt, "attend", graph_break),
    "gradients sent at the end": replaced(optim.ShardedOptimizer, "_start_sums", late),
    "a short last batch": replaced(np, "pad", lambda pad: lambda rows, *args, **options: rows),
    "gradients in an evaluation": replaced(gpt.GPT, "zero_grad", lambda zero_grad: lambda self: None),
    "an .item() in the step": replaced(loop.Loop, "_micro_steps", item),
    "a CPU tensor in a CUDA expression": replaced(gpt.GPT, "rotary", cpu_tables),
    "a blocking copy": replaced(loop, "to_device", blocking_copy),
    "an fp32 product": replaced(gpt.Linear, "forward", fp32_product),
    "collectives in another order": replaced(optim.ShardedOptimizer, "_shard_plan", other_order),
    "gradients sent in fp32": replaced(buckets.BucketBuffers, "__init__", wide_gradients),
    "weights gathered late": replaced(optim, "gather_schedule", gathered_late),
    "a copy of the logits": replaced(layers, "capped_nats_", copied_logits),
    "rotary tables in the graph": replaced(gpt.GPT, "rotary", forgotten_tables),
    "an op without a kernel": replaced(gpt, "relu_squared", sorted_first),
    "a bf16 master": replaced(buckets.Owned, "__post_init__", bf16_master),
}
