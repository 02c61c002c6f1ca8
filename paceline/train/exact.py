"""
Two steps of a plan, traced without a device: `paceline plan --exact`, which runs this module as a process of its own.

The worker's own model, optimizer and order of work run on tensors that hold nothing, and every tensor storage is seen as it is made
and as it dies. On the CPU's fake tensors the sums are those of PyTorch's own profiler, to some bytes in a gigabyte. For a GPU the
model is traced on the meta device, with the attention kernel that the GPU would take: PyTorch's own meta kernels show what it
keeps. What a kernel allocates for itself while it runs is not seen, and a compiled model is traced as an eager one. Tests hold the
closed form of plan/memory.py against this trace. The method: torch.distributed._tools.mem_tracker, in a tenth of its time.

The sequence of allocations then goes through PyTorch's CUDA caching allocator as arithmetic, for what it reserves from the driver:
one stream, one pool each for small and large blocks, best fit, splitting and joining, as c10/cuda/CUDACachingAllocator.cpp (torch
2.13) does it. With expandable segments a pool is one arena that grows at its end. Memory that a full card would get back by freeing
cached segments is not taken into account: the sum is what a card with room to spare would show.
"""

import functools
import json
import sys
import weakref
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.config import ModelConfig
from paceline.errors import PlanError
from paceline.model.gpt import DTYPES, GPT
from paceline.plan.activations import MemorySetup
from paceline.plan.algorithms import GroupSettings, algorithm_of
from paceline.plan.memory import peak_phase
from paceline.plan.shapes import param_shapes
from paceline.train.optim import ReplicatedOptimizer, ShardedOptimizer

ROUND_BYTES = 512
SMALL_BYTES = 1 << 20  # up to here from the small pool
SMALL_SEGMENT, LARGE_SEGMENT = 2 << 20, 20 << 20
OWN_SEGMENT = 10 << 20  # from here on a segment is made to measure, in multiples of SMALL_SEGMENT
NUM_STEPS = 2  # the first has no gradients and states of an earlier one
MICRO_STEPS = 2  # at most: a third is as the second

Sdpa = Callable[..., Tensor]


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
    splits_below: int  # a remainder smaller than this stays with its block
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
            block.free = False
        else:
            block = self._grow(size)
        remainder = block.size - size
        if remainder >= self.splits_below:
            self._drop(block)
            self._put(_Block(block.start + size, remainder, block.segment, free=True))
            block = _Block(block.start, size, block.segment, free=False)
            self._put(block)
        return block

    def give_back(self, block: _Block) -> None:
        start, end = block.start, block.start + block.size
        self._drop(block)
        for neighbour in (self.ends.get((block.segment, start)), self.blocks.get((block.segment, end))):
            if neighbour is not None and neighbour.free:
                self._drop(neighbour)
                start, end = min(start, neighbour.start), max(end, neighbour.start + neighbour.size)
        self._put(_Block(start, end - start, block.segment, free=True))

    def _is_last(self, free: tuple[int, int, int]) -> bool:
        size, _, start = free
        return start + size == self.reserved

    def _grow(self, size: int) -> _Block:
        if self.expandable:
            last = self.ends.get((0, self.reserved))
            start = self.reserved
            if last is not None and last.free:  # the arena's end is free but too short
                self._drop(last)
                start = last.start
            self.reserved += -(-(start + size - self.reserved) // self.segment_bytes) * self.segment_bytes
            block = _Block(start, self.reserved - start, 0, free=False)
        else:
            segment = self.segment_bytes if size < OWN_SEGMENT else -(-size // SMALL_SEGMENT) * SMALL_SEGMENT
            self.segments += 1
            self.reserved += segment
            block = _Block(0, segment, self.segments, free=False)
        self._put(block)
        return block

    def _put(self, block: _Block) -> None:
        self.blocks[block.segment, block.start] = block
        self.ends[block.segment, block.start + block.size] = block
        if block.free:
            insort(self.free, (block.size, block.segment, block.start))

    def _drop(self, block: _Block) -> None:
        if block.free:
            self.free.remove((block.size, block.segment, block.start))
        del self.blocks[block.segment, block.start]
        del self.ends[block.segment, block.start + block.size]


@dataclass(frozen=True)
class Replay:
    """Peaks. requested: before rounding. allocated: rounded up, torch's max_memory_allocated. reserved: max_memory_reserved."""

    requested: int
    allocated: int
    reserved: int


def replay(events: Iterable[tuple[int, int]], *, expandable: bool) -> Replay:
    """Replays allocations and frees in order. events: (name, bytes), bytes negative where that name is freed."""
    small = _Pool(expandable, SMALL_SEGMENT, splits_below=ROUND_BYTES)
    large = _Pool(expandable, LARGE_SEGMENT, splits_below=ROUND_BYTES if expandable else SMALL_BYTES + 1)
    blocks: dict[int, tuple[_Pool, _Block]] = {}
    requested = allocated = 0
    peak_requested = peak_allocated = 0
    for name, size in events:
        if size > 0:
            rounded = -(-size // ROUND_BYTES) * ROUND_BYTES
            pool = small if rounded <= SMALL_BYTES else large
            block = pool.take(rounded)
            blocks[name] = (pool, block)
            requested, allocated = requested + size, allocated + block.size
            peak_requested, peak_allocated = max(peak_requested, requested), max(peak_allocated, allocated)
        elif name in blocks:
            pool, block = blocks.pop(name)
            requested, allocated = requested + size, allocated - block.size
            pool.give_back(block)
    return Replay(peak_requested, peak_allocated, small.reserved + large.reserved)


@dataclass
class Peak:
    """The fullest moment of a phase. made_in: its bytes by the phase in which they were made."""

    bytes: int = 0
    made_in: dict[str, int] = field(default_factory=dict)


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active, `now` counts the bytes of all storages that ops have made and that still live.

    events: (storage, bytes) in order, bytes negative where it dies, for replay.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now, self.phase = 0, "start"
        self.peaks: dict[str, Peak] = {}
        self.events: list[tuple[int, int]] = []
        self._alive: dict[int, tuple[int, int, str]] = {}  # storage -> its number, bytes, phase in which it was made
        self._made_in: dict[str, int] = {}
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.paceline.embedding_gradient.default:  # a custom op hides what it makes within
            dy, idx, num_rows = args
            with self:
                return torch.ops.aten.embedding_dense_backward(dy.float(), idx, num_rows, -1, False)
        outputs = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, Tensor):
                self._add(leaf.untyped_storage())
        if torch.Tag.pointwise in func.tags:
            self._add_transient(_cast_bytes([leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]))
        return outputs

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._alive:
            return
        self._count += 1
        size = storage.nbytes()
        self._alive[key] = (self._count, size, self.phase)
        self._made_in[self.phase] = self._made_in.get(self.phase, 0) + size
        self.events.append((self._count, size))
        self.now += size
        self._note_peak()
        weakref.finalize(storage, self._remove, key)

    def _add_transient(self, size: int) -> None:
        """Counts bytes that live only while one op runs."""
        if size:
            self._count += 1
            self.events += [(self._count, size), (self._count, -size)]
            self.now += size
            self._made_in[self.phase] = self._made_in.get(self.phase, 0) + size
            self._note_peak()
            self.now -= size
            self._made_in[self.phase] -= size

    def _note_peak(self) -> None:
        peak = self.peaks.setdefault(self.phase, Peak())
        if self.now > peak.bytes:
            peak.bytes, peak.made_in = self.now, dict(self._made_in)

    def _remove(self, key: int) -> None:
        number, size, phase = self._alive.pop(key)
        self._made_in[phase] -= size
        self.now -= size
        self.events.append((number, -size))


def _cast_bytes(operands: list[Tensor]) -> int:
    """Returns what a CPU's kernel copies first where dtypes differ; a GPU's kernel casts as it reads."""
    operands = [operand for operand in operands if operand.ndim and operand.device.type == "cpu"]
    if len({operand.dtype for operand in operands}) < 2:
        return 0
    common = functools.reduce(torch.promote_types, (operand.dtype for operand in operands))
    return sum(operand.numel() * common.itemsize for operand in operands if operand.dtype != common)


@contextmanager
def attention_kernel(name: str) -> Iterator[None]:
    """Makes scaled_dot_product_attention take the kernel `name` ("flash", "efficient"); "math" is what meta tensors take anyway."""
    before = F.scaled_dot_product_attention
    kernels: dict[str, Sdpa] = {"flash": _flash, "efficient": _efficient}
    F.scaled_dot_product_attention = kernels.get(name, before)
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before


def _flash(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, **options: Any) -> Tensor:
    y: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]
    return y


def _efficient(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, **options: Any) -> Tensor:
    y: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, is_causal)[0]
    return y


@dataclass(frozen=True)
class Trace:
    """Two traced steps. peaks: by phase: setup, forward, backward, optimizer, evaluation."""

    peaks: dict[str, Peak]
    replay: Replay  # expandable segments, which the launcher sets

    @property
    def peak_bytes(self) -> int:
        return max(peak.bytes for peak in self.peaks.values())


def main() -> None:
    """Reads a MemorySetup as JSON from stdin, and prints the trace, or the message and fix of what cannot be traced, as JSON."""
    values = json.load(sys.stdin)
    setup = MemorySetup(**{**values, "model": ModelConfig(**values["model"])})
    try:
        facts = facts_of(trace_steps(setup), setup)
    except PlanError as error:
        facts = {"error": error.message, "fix": error.fix}
    print(json.dumps(facts))


def facts_of(trace: Trace, setup: MemorySetup) -> dict[str, Any]:
    """Returns what `plan --exact --json` holds: the trace beside the closed form."""
    planned = peak_phase(setup).bytes
    return {
        "traced_bytes": trace.peak_bytes,
        "planned_bytes": planned,
        "difference": planned / trace.peak_bytes - 1,
        "phases": {name: peak.bytes for name, peak in trace.peaks.items()},
        "allocated_bytes": trace.replay.allocated,
        "reserved_bytes": trace.replay.reserved,
        "compiled": setup.compiled,
    }


def trace_steps(setup: MemorySetup, *, rank: int = 0) -> Trace:
    """Traces one rank of a world that does not exist: sums and gathers take their buffers and send nothing."""
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
    """Makes collectives work for one rank of a world that does not exist."""
    if world_size == 1:
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_steps(setup: MemorySetup, *, rank: int, device: str, at: Callable[[str], None]) -> None:
    """Runs two steps and an evaluation on `device`, with fake or real tensors. Calls at(phase) where a phase begins."""
    at("setup")
    optimizer = build_optimizer(setup, rank, device)
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


def build_optimizer(setup: MemorySetup, rank: int, device: str) -> ShardedOptimizer | ReplicatedOptimizer:
    """Builds the worker's model and optimizer; learning rates of 0 change no bytes."""
    with torch.device(device):
        model = GPT(
            setup.model,
            compute_dtype=DTYPES[setup.precision],
            logits_budget_bytes=setup.logits_budget_bytes,
            activation_checkpointing=setup.activation_checkpointing,
        )
    shapes = param_shapes(setup.model)
    names = {shape.group: algorithm_of(setup.optimizer, shape.group).name for shape in shapes}
    groups = {group: GroupSettings(name, 0.0, (0.9, 0.95), 1e-10, 0.0) for group, name in names.items()}
    kind = ReplicatedOptimizer if setup.shard == "none" else ShardedOptimizer
    return kind(
        model,
        shapes,
        groups,
        rank=rank,
        world_size=setup.world_size,
        compute_dtype=DTYPES[setup.precision],
        grad_accum_steps=setup.grad_accum_steps,
    )


if __name__ == "__main__":
    main()
