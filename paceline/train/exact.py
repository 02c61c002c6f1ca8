"""
Two steps of a plan, traced: the worker's own model, optimizer and order of work on tensors that hold nothing.

`paceline plan --exact`. What is seen is PyTorch's ops in eager mode; a compiled model fuses them, so its plan keeps to the closed
form of plan/memory.py, which tests hold against this trace.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from paceline.errors import PlanError
from paceline.model.gpt import GPT
from paceline.model.trace import LiveBytes, Peak, attention_kernel
from paceline.plan.activations import MemorySetup
from paceline.plan.allocator import Replay, replay
from paceline.plan.scaling import GroupSettings
from paceline.plan.shapes import param_shapes
from paceline.train.optim import ReplicatedAdamW, ShardedOptimizer

NUM_STEPS = 2  # the first has no gradients and states of an earlier one
MICRO_STEPS = 2  # at most: a third is as the second
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Trace:
    """peaks: of each phase: setup, forward, backward, optimizer, evaluation."""

    peaks: dict[str, Peak]
    replay: Replay  # expandable segments, which the launcher sets

    @property
    def peak_bytes(self) -> int:
        return max(peak.bytes for peak in self.peaks.values())


def trace_steps(setup: MemorySetup, *, rank: int = 0) -> Trace:
    """As rank `rank` of a world that is not there: sums and gathers take their buffers and send nothing."""
    if setup.shard == "none" and setup.world_size > 1:
        raise PlanError(
            "DDP (shard none on several ranks) cannot be traced: it reads the values of what its ranks send",
            fix="without --exact: the closed form counts it too; or --shard optimizer",
        )
    live = LiveBytes()

    def at(phase: str) -> None:
        live.phase = phase

    with fake_world(setup.world_size, rank):
        if setup.device == "cpu":
            with FakeTensorMode(), live:
                run_steps(setup, rank=rank, device="cpu", at=at)
        else:
            with attention_kernel(setup.attention), live:
                run_steps(setup, rank=rank, device="meta", at=at)
    return Trace(live.peaks, replay(live.events, expandable=True))


@contextmanager
def fake_world(world_size: int, rank: int) -> Iterator[None]:
    if world_size == 1:
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_steps(setup: MemorySetup, *, rank: int, device: str, at: Callable[[str], None]) -> None:
    """Two steps and an evaluation, fake or real as `device` is here. Calls at(phase) where a phase begins."""
    at("setup")
    optimizer = _build(setup, rank, device)
    shape = (setup.device_batch_size, setup.model.sequence_len)
    micro_steps = min(setup.grad_accum_steps, MICRO_STEPS)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        sums = torch.zeros((), device=device)
        for micro_step in range(micro_steps):
            at("forward")
            idx, targets = (torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(2))
            with optimizer.micro_step(last=micro_step == micro_steps - 1):
                nats = optimizer.module(idx, targets)
                at("backward")
                torch.autograd.backward(nats)
            sums += nats.detach()
        at("optimizer")
        optimizer.reduce(torch.zeros(3, device=device))
        optimizer.step(lr_mult=1.0, momentum=0.95, weight_decay_mult=1.0, grad_scale=1.0)
    at("evaluation")
    with torch.no_grad():
        optimizer.module(idx, targets, reduction="none")


def _build(setup: MemorySetup, rank: int, device: str) -> ShardedOptimizer | ReplicatedAdamW:
    with torch.device(device):
        model = GPT(
            setup.model,
            compute_dtype=DTYPES[setup.precision],
            logits_budget_bytes=setup.logits_budget_bytes,
            activation_checkpointing=setup.activation_checkpointing,
        )
    muon, adamw = (GroupSettings(name, 0.0, (0.9, 0.95), 1e-10, 0.0) for name in ("muon", "adamw"))
    shapes = param_shapes(setup.model)
    matrix = muon if setup.optimizer == "muon" else adamw
    groups = {shape.group: matrix if shape.group == "matrix" else adamw for shape in shapes}
    kind = ReplicatedAdamW if setup.shard == "none" else ShardedOptimizer
    return kind(
        model,
        shapes,
        groups,
        rank=rank,
        world_size=setup.world_size,
        compute_dtype=DTYPES[setup.precision],
        grad_accum_steps=setup.grad_accum_steps,
    )
