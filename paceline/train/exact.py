"""
Two steps of a plan, traced without a device: `paceline plan --exact`, which runs this module as a process of its own.

The worker's own model, optimizer and order of work run on tensors that hold nothing, and every tensor storage is seen as it is made
and as it dies. On the CPU's fake tensors the sums are those of PyTorch's own profiler, to some bytes in a gigabyte. For a GPU the
model is traced on the meta device, with the attention kernel that the GPU would take: PyTorch's own meta kernels show what it
keeps. What a kernel allocates for itself while it runs is not seen, and a compiled model is traced as an eager one. Tests hold the
closed form of plan/memory.py against this trace. The method: torch.distributed._tools.mem_tracker, in a tenth of its time.

The sequence of allocations then goes through PyTorch's CUDA caching allocator as arithmetic, for what it reserves from the driver:
one stream, one pool each for small and large blocks, best fit, splitting and joining, as c10/cuda/CUDACachingAllocator.cpp (torch
2.13) does it with the expandable segments that the launcher sets: a pool is one arena that grows at its end. Memory that a full
card would get back by freeing cached segments is not taken into account: the sum is what a card with room to spare would show.
"""

import functools
import itertools
import json
import sys
import weakref
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.nn.parallel.distributed as ddp
from torch import Tensor
from torch._C._distributed_c10d import GradBucket, Logger, Reducer
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from paceline.config import ModelConfig
from paceline.model.gpt import DTYPES, GPT
from paceline.model.layers import sum_by_row
from paceline.plan.activations import MemorySetup
from paceline.plan.algorithms import GroupSettings, algorithm_of
from paceline.plan.memory import peak_phase
from paceline.plan.precision import LowPrecision
from paceline.plan.shapes import param_shapes
from paceline.train import offload, optim
from paceline.train.optim import ShardedOptimizer, make_optimizer
from paceline.train.setup import hollow_out

ROUND_BYTES = 512
SMALL_BYTES = 1 << 20  # up to here from the small pool
SMALL_SEGMENT, LARGE_SEGMENT = 2 << 20, 20 << 20
NUM_STEPS = 2  # the first has no gradients and states of an earlier one
MICRO_STEPS = 2  # at most: a third is as the second


@dataclass
class _Arena:
    """An expandable segment. free: (bytes, start) of its holes, sorted; the two tables find a hole by its start and by its end."""

    segment_bytes: int
    reserved: int = 0
    free: list[tuple[int, int]] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)  # start -> bytes
    starts: dict[int, int] = field(default_factory=dict)  # end -> start

    def take(self, size: int) -> int:
        """Returns the start of a new block: in the smallest hole that holds it, or at the end, which grows by what is missing."""
        at = bisect_left(self.free, (size, -1))
        if at + 1 < len(self.free) and sum(self.free[at]) == self.reserved:
            at += 1  # the arena's end counts as large as it may become: a larger hole fits better
        if at < len(self.free):
            start = self.free[at][1]
            end = start + self._remove(start)
        else:
            start = self.starts.get(self.reserved, self.reserved)
            if start < self.reserved:  # the arena's end is free but too short
                self._remove(start)
            self.reserved += -(-(start + size - self.reserved) // self.segment_bytes) * self.segment_bytes
            end = self.reserved
        self._add(start + size, end)
        return start

    def give_back(self, start: int, size: int) -> None:
        """Frees a block; neighbouring holes and it become one."""
        end = start + size
        if end in self.sizes:
            end += self._remove(end)
        if start in self.starts:
            start = self.starts[start]
            self._remove(start)
        self._add(start, end)

    def _add(self, start: int, end: int) -> None:
        if start < end:
            insort(self.free, (end - start, start))
            self.sizes[start], self.starts[end] = end - start, start

    def _remove(self, start: int) -> int:
        size = self.sizes.pop(start)
        del self.starts[start + size]
        self.free.remove((size, start))
        return size


def replay(events: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Replays allocations and frees in order; returns the peaks that torch calls max_memory_allocated and max_memory_reserved.

    events: (name, bytes), bytes negative where that name is freed.
    """
    small, large = _Arena(SMALL_SEGMENT), _Arena(LARGE_SEGMENT)
    blocks: dict[int, tuple[_Arena, int, int]] = {}
    allocated = peak = 0
    for name, size in events:
        if size > 0:
            rounded = -(-size // ROUND_BYTES) * ROUND_BYTES
            arena = small if rounded <= SMALL_BYTES else large
            blocks[name] = (arena, arena.take(rounded), rounded)
            allocated += rounded
            peak = max(peak, allocated)
        elif name in blocks:
            arena, start, rounded = blocks.pop(name)
            arena.give_back(start, rounded)
            allocated -= rounded
    return peak, small.reserved + large.reserved


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active, `now` counts the bytes of all storages that ops have made and that still live.

    peaks: the most in each phase: setup, forward, backward, optimizer, evaluation. events: (storage, bytes) in order, bytes
    negative where it dies, for replay.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now, self.phase = 0, "start"
        self.peaks: dict[str, int] = {}
        self.events: list[tuple[int, int]] = []
        self._alive: dict[int, tuple[int, int]] = {}  # storage -> number, bytes
        self._numbers = itertools.count(1)
        self._on_host: set[int] = set()

    def leave_out(self, tensor: Tensor) -> Tensor:
        """Returns the tensor, which stands for memory of the host and is not counted; call it before any op has it."""
        self._on_host.add(tensor.untyped_storage()._cdata)
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.paceline.embedding_gradient.default:  # a custom op hides what it makes within
            with self:
                return sum_by_row(*args)
        if func is torch.ops.aten.addmm.dtype_out:  # it makes nothing, and torch 2.11 has no meta kernel for it
            return (kwargs or {})["out"]
        outputs = func(*args, **(kwargs or {}))
        if func is torch.ops.inductor.resize_storage_bytes_.default:
            self._resize(args[0].untyped_storage())
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, Tensor):
                self._add(leaf.untyped_storage())
        if torch.Tag.pointwise in func.tags:
            size = _cast_bytes([leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)])
            if size:  # they live only while the op runs
                number = next(self._numbers)
                self._note(number, size)
                self._note(number, -size)
        return outputs

    def _add(self, storage: torch.UntypedStorage) -> None:
        if (key := storage._cdata) not in self._alive and key not in self._on_host:
            self._alive[key] = (next(self._numbers), storage.nbytes())
            self._note(*self._alive[key])
            weakref.finalize(storage, self._remove, key)

    def _resize(self, storage: torch.UntypedStorage) -> None:
        number, size = self._alive[storage._cdata]
        self._note(number, -size)
        self._alive[storage._cdata] = (next(self._numbers), storage.nbytes())
        self._note(*self._alive[storage._cdata])

    def _remove(self, key: int) -> None:
        number, size = self._alive.pop(key)
        self._note(number, -size)

    def _note(self, number: int, size: int) -> None:
        self.events.append((number, size))
        self.now += size
        if size >= 0:
            self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.now)


def _cast_bytes(operands: list[Tensor]) -> int:
    """Returns what a CPU's kernel copies first where dtypes differ; a GPU's kernel casts as it reads."""
    operands = [operand for operand in operands if operand.ndim]
    # the dtypes first: to ask a fake tensor for its device is an op
    if len({operand.dtype for operand in operands}) < 2 or operands[0].device.type != "cpu":
        return 0
    common = functools.reduce(torch.promote_types, (operand.dtype for operand in operands))
    return sum(operand.numel() * common.itemsize for operand in operands if operand.dtype != common)


@contextmanager
def replaced(owner: Any, **functions: Any) -> Iterator[None]:
    """Gives the owner other functions of these names."""
    before = {name: getattr(owner, name) for name in functions}
    for name, function in functions.items():
        setattr(owner, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(owner, name, function)


@contextmanager
def attention_kernel(name: str) -> Iterator[None]:
    """Makes scaled_dot_product_attention take the kernel `name` ("flash", "efficient"); "math" is what meta tensors take anyway."""
    aten = torch.ops.aten

    def kernel(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, **options: Any) -> Any:
        if name == "flash":
            return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]
        return aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, is_causal)[0]

    with replaced(F, scaled_dot_product_attention=kernel) if name in ("flash", "efficient") else nullcontext():
        yield


@contextmanager
def host_memory_left_out(live: LiveBytes) -> Iterator[None]:
    """Makes offloaded masters and states tensors of their device that `live` does not count."""
    before = offload.host_zeros

    def host_zeros(num_bytes: int, device: torch.device) -> Tensor:
        with _disable_current_modes():
            return live.leave_out(before(num_bytes, device))

    with replaced(offload, host_zeros=host_zeros):
        yield


class LoneDDP(ddp.DistributedDataParallel):
    """DDP on tensors without values: gradients are in its buckets, which it sends to nobody."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.register_comm_hook(None, unsent)


def unsent(state: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Returns a bucket's own gradients in place of their mean over the ranks."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@contextmanager
def lone_ddp() -> Iterator[None]:
    """Keeps DDP from reading values: of other ranks' shapes, of the card's clock, and of the order in which rank 0 had gradients.

    By that order DDP rebuilds its buckets after the first step, with as many bytes in all.
    """
    with (
        replaced(optim, DistributedDataParallel=LoneDDP),
        replaced(ddp, _verify_param_shape_across_processes=lambda *args: None),
        replaced(Reducer, _rebuild_buckets=lambda reducer: False),
        replaced(Logger, set_runtime_stats_and_log=lambda logger: None),
    ):
        yield


def main() -> None:
    """Reads a MemorySetup as JSON from stdin, and prints what `plan --exact --json` holds."""
    values = json.load(sys.stdin)
    low = values["low_precision"]
    values["low_precision"] = low and LowPrecision(**low)
    setup = MemorySetup(**{**values, "model": ModelConfig(**values["model"])})
    live = trace_steps(setup)
    planned, traced = peak_phase(setup).bytes, max(live.peaks.values())
    allocated, reserved = replay(live.events)
    facts = {
        "traced_bytes": traced,
        "planned_bytes": planned,
        "difference": planned / traced - 1,
        "phases": live.peaks,
        "allocated_bytes": allocated,
        "reserved_bytes": reserved,
        "compiled": setup.compiled,
    }
    print(json.dumps(facts))


def trace_steps(setup: MemorySetup) -> LiveBytes:
    """Traces rank 0 of a world that does not exist: sums and gathers take their buffers and send nothing."""
    live = LiveBytes()

    def at(phase: str) -> None:
        live.phase = phase

    if setup.world_size > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=setup.world_size)
    try:
        on_cpu = setup.device == "cpu"
        kernel = FakeTensorMode() if on_cpu else attention_kernel(setup.attention)
        with host_memory_left_out(live), lone_ddp(), kernel, live:
            run_steps(setup, rank=0, device="cpu" if on_cpu else "meta", at=at)
    finally:
        if setup.world_size > 1:
            dist.destroy_process_group()
    return live


def run_steps(setup: MemorySetup, *, rank: int, device: str, at: Callable[[str], None]) -> None:
    """Runs two steps and an evaluation on `device`, with fake or real tensors. Calls at(phase) where a phase begins."""
    at("setup")
    model = build_model(setup, device)
    optimizer = build_optimizer(model, setup, rank)
    shape = (setup.device_batch_size, setup.model.sequence_len)
    micro_steps = min(setup.grad_accum_steps, MICRO_STEPS)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        sums = torch.zeros((), device=device)
        for micro_step in range(micro_steps):
            at("forward")
            idx, targets = (torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(2))
            if low := model.low_products:
                low.begin(seed=0, step=0, micro_step=micro_step, micro_batch=micro_step)
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


def build_model(setup: MemorySetup, device: str) -> GPT:
    """Builds the worker's model on `device`, with hollow weights where ranks share them."""
    hollow = setup.shards_weights
    # what hollow_out replaces is on the meta device in a run too, so it is not counted
    with _disable_current_modes() if hollow else nullcontext(), torch.device("meta" if hollow else device):
        model = GPT(
            setup.model,
            compute_dtype=DTYPES[setup.precision],
            logits_budget_bytes=setup.logits_budget_bytes,
            activation_checkpointing=setup.activation_checkpointing,
            attention="flash" if setup.attention == "flash" and device != "cpu" else "sdpa",
        )
    if hollow:
        hollow_out(model, torch.device(device), lambda name, shape: torch.empty(shape, device=device))
    model.fused_loss = device != "cpu"
    if low := setup.low_precision:
        model.low_products = model.use_low_products(
            low.name, low.num_layers, native=not low.emulated, keeps_codes=not hollow, device=torch.device(device)
        )
    return model


def build_optimizer(model: GPT, setup: MemorySetup, rank: int) -> ShardedOptimizer:
    """Builds the worker's optimizer; learning rates of 0 change no bytes."""
    names = {shape.group: algorithm_of(setup.optimizer, shape.group).name for shape in param_shapes(setup.model)}
    groups = {group: GroupSettings(name, 0.0, (0.9, 0.95), 1e-10, 0.0) for group, name in names.items()}
    return make_optimizer(model, setup, groups, rank=rank)


if __name__ == "__main__":
    main()
