"""
plan/activations.py's closed form against what torch.compile does with the model: what the partitioner keeps for backward, on meta
tensors as on a GPU; and the bytes that a compiled step allocates on the CPU, as PyTorch's profiler counts them.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from real_steps import setup_of
from torch import Tensor, fx
from torch.profiler import ProfilerActivity, profile, record_function

from paceline.model import gpt
from paceline.plan.activations import (
    FP32,
    INT64,
    MemorySetup,
    backward_parts,
    head_bytes,
    loss_bytes,
    saved_bytes,
    stem_bytes,
)
from paceline.plan.sharding import GatheredBytes, compiles_by_block
from paceline.train.exact import attention_kernel, build_model, build_optimizer

pytestmark = [pytest.mark.slow]
KIB, MIB = 1 << 10, 1 << 20
VIEWS = {"view", "permute", "reshape", "unsqueeze", "squeeze", "expand", "slice", "alias", "as_strided", "select"}


def compiled_setup(**keys: Any) -> MemorySetup:
    return setup_of(**{"compiled": True, "device": "cuda", **keys})


GRAPHS = {  # with the bytes that graph_bytes measured with torch 2.13
    "bf16, shared keys": (compiled_setup(depth=2, precision="bf16", n_kv_head=1), 4_192_120),
    "bf16, checkpointed": (compiled_setup(depth=3, precision="bf16", activation_checkpointing=True), 1_027_408),
    "the CPU's attention, bf16": (
        compiled_setup(depth=2, device="cpu", precision="bf16", sequence_len=256),
        11_648_888,
    ),
    "fp32, a layer without a value embedding between two": (compiled_setup(depth=3), 19_435_216),
    "bf16, shared keys, replicated weights": (
        compiled_setup(depth=2, precision="bf16", n_kv_head=1, optimizer="adamw", shard="none"),
        4_913_016,
    ),
    "bf16": (compiled_setup(depth=2, precision="bf16"), 4_522_872),
    "bf16, replicated weights": (compiled_setup(depth=2, precision="bf16", optimizer="adamw", shard="none"), 5_309_352),
    "bf16, depth 8": (compiled_setup(depth=8, precision="bf16"), 66_415_672),
    "fp32, depth 4, shared keys": (compiled_setup(depth=4, n_kv_head=2), 31_127_280),
    "bf16, MLPs checkpointed": (compiled_setup(depth=3, precision="bf16", activation_checkpointing="mlp"), 5_008_280),
    "bf16, depth 4, ReLU checkpointed": (
        compiled_setup(depth=4, precision="bf16", activation_checkpointing="relu"),
        12_708_792,
    ),
    "bf16, depth 6, checkpointed": (
        compiled_setup(depth=6, precision="bf16", activation_checkpointing=True),
        3_190_120,
    ),
    "bf16, depth 4, wide heads": (
        compiled_setup(depth=4, head_dim=128, precision="bf16", sequence_len=512),
        67_530_680,
    ),
    "the CPU's attention, long rows": (
        compiled_setup(depth=2, device="cpu", sequence_len=640, device_batch_size=1),
        14_884_364,
    ),
    "the CPU's attention, depth 4": (compiled_setup(depth=4, device="cpu"), 42_129_040),
}


@pytest.mark.parametrize("setup, measured", GRAPHS.values(), ids=GRAPHS)
def test_kept_bytes_are_those_that_the_partitioner_kept(setup: MemorySetup, measured: int):
    tokens = 2 * INT64 * setup.num_tokens  # the caller's
    planned = stem_bytes(setup, compiled=True) - tokens + sum(kept_by_layer(setup)) + head_bytes(setup)
    assert planned == pytest.approx(measured, rel=0.05 if setup.attention == "cpu" else 0.01)


@pytest.mark.soak
@pytest.mark.parametrize("setup, measured", GRAPHS.values(), ids=GRAPHS)
def test_the_installed_partitioner_keeps_the_bytes_that_were_measured(setup: MemorySetup, measured: int, monkeypatch):
    leave_kernels_out(monkeypatch)
    assert graph_bytes(setup) == pytest.approx(measured, rel=0.01)


def kept_by_layer(setup: MemorySetup) -> list[int]:
    return [saved_bytes(setup, layer) for layer in range(setup.model.n_layer)]


def graph_bytes(setup: MemorySetup) -> int:
    """Bytes that the forward graph hands to the backward graph, weights and tokens not counted."""
    graphs: list[fx.Graph] = []

    def keep_graph(module: fx.GraphModule, inputs: Any, **options: Any) -> Callable[..., Any]:
        graphs.append(module.graph)
        made = [node.meta["val"] if isinstance(node, fx.Node) else None for node in module.graph.output_node().args[0]]
        return boxed(lambda args: [unfaked(x) if isinstance(x, Tensor) else x for x in made])

    from torch._inductor.compile_fx import compile_fx

    torch._dynamo.reset()
    device = "cpu" if setup.device == "cpu" else "meta"
    optimizer = build_optimizer(build_model(setup, device), setup, 0)
    optimizer.module.compile(dynamic=False, backend=lambda gm, x: compile_fx(gm, x, inner_compile=keep_graph))
    idx = torch.zeros(setup.device_batch_size, setup.model.sequence_len, dtype=torch.int64, device=device)
    with (
        without_caches(joint_graph_constant_folding=False),  # it cannot fold on the meta device
        attention_kernel("flash") if device == "meta" else contextlib.nullcontext(),
        optimizer.micro_step(last=True),
    ):
        optimizer.module(idx, idx).backward()
    forward, backward = (max(group, key=lambda graph: len(graph.nodes)) for group in by_direction(graphs))
    made = {node.name: node for node in forward.nodes}
    kept = {base(made[node.name]) for node in backward.nodes if node.op == "placeholder" and node.name in made}
    return sum(node_bytes(node) for node in kept if node.op != "placeholder")


@contextlib.contextmanager
def without_caches(**settings: Any) -> Iterator[None]:
    """The compiler is imported here: every test process imports this file."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config

    with (
        inductor_config.patch(force_disable_caches=True, **settings),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield


@contextlib.contextmanager
def flushed_denormals() -> Iterator[None]:
    """What kernels that do nothing leave in memory may take minutes to multiply."""
    torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)  # for the whole process


def unfaked(x: Tensor) -> Tensor:
    shape, stride = [int(n) for n in x.shape], [int(n) for n in x.stride()]
    return torch.empty_strided(
        shape, stride, dtype=x.dtype, device=x.device
    ).zero_()  # the loss, which runs, indexes with some


def by_direction(graphs: list[fx.Graph]) -> tuple[list[fx.Graph], list[fx.Graph]]:
    backward = [graph for graph in graphs if any(node.name.startswith("tangents") for node in graph.nodes)]
    return [graph for graph in graphs if graph not in backward], backward


def boxed(function: Callable[..., Any]) -> Callable[..., Any]:
    function._boxed_call = True  # type: ignore[attr-defined]  # AOT autograd hands such a one a list, and lets go of it
    return function


def base(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and getattr(node.target, "_opname", "") in VIEWS:
        node = node.args[0]  # type: ignore[assignment]
    return node


def node_bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


STEPS = {
    "bf16": compiled_setup(depth=1, precision="bf16", sequence_len=256, logits_budget_bytes=MIB),
    "fp32": compiled_setup(depth=4, sequence_len=256, logits_budget_bytes=MIB),
    "bf16, gradients outweigh activations": compiled_setup(
        depth=4, precision="bf16", device_batch_size=1, vocab_size=16384, logits_budget_bytes=MIB
    ),
    "bf16, depth 4, checkpointed": compiled_setup(
        depth=4, precision="bf16", sequence_len=256, device_batch_size=16, logits_budget_bytes=MIB,
        activation_checkpointing=True,
    ),
    "bf16, depth 4, MLPs checkpointed": compiled_setup(
        depth=4, precision="bf16", sequence_len=256, device_batch_size=16, logits_budget_bytes=MIB,
        activation_checkpointing="mlp",
    ),
}  # fmt: skip


def block_setup(**keys: Any) -> MemorySetup:
    """A graph for each layer; few words, since lm_head's gradient is a matter of the loss."""
    usual = {"depth": 4, "precision": "bf16", "sequence_len": 256, "vocab_size": 128, "logits_budget_bytes": MIB}
    return compiled_setup(**{**usual, "world_size": 2, **keys})


NARROW_ROWS = {"sequence_len": 128, "device_batch_size": 1}
STEPS |= {
    "by block, bf16, two micro-steps, gradients outweigh activations": block_setup(**NARROW_ROWS, grad_accum_steps=2),
    "by block, fp32": block_setup(precision="fp32"),
    "by block, bf16, gradients outweigh activations": block_setup(**NARROW_ROWS),
    "by block, bf16, depth 5, checkpointed": block_setup(depth=5, activation_checkpointing=True),
    "by block, bf16, ReLU checkpointed": block_setup(activation_checkpointing="relu"),
    "by block, bf16, MLPs checkpointed": block_setup(activation_checkpointing="mlp"),
    "by block, bf16, shared keys": block_setup(n_kv_head=1),
}


@pytest.mark.soak
@pytest.mark.parametrize("setup", STEPS.values(), ids=STEPS)
def test_a_compiled_step_allocates_what_is_planned(setup: MemorySetup, monkeypatch):
    leave_kernels_out(monkeypatch)
    check_step(setup, monkeypatch)


@pytest.mark.soak
def test_a_compiled_step_with_its_kernels_allocates_what_is_planned(monkeypatch):
    check_step(STEPS["bf16"], monkeypatch)


def check_step(setup: MemorySetup, monkeypatch) -> None:
    """As on a GPU: the flash kernel's like on the CPU."""
    monkeypatch.setattr(gpt, "attend", flash_on_cpu)
    before_backward, fullest = step_bytes(setup)
    tokens = 2 * INT64 * setup.num_tokens
    kept = kept_by_layer(setup)
    planned = stem_bytes(setup, compiled=True) - tokens + sum(kept) + head_bytes(setup) + loss_bytes(setup)[0]
    assert planned == pytest.approx(before_backward, rel=0.02)
    nothing = [GatheredBytes()] * (setup.model.n_layer + 2)
    backward = backward_parts(setup, kept, before=0, added=FP32 if setup.world_size == 1 else 0, gathered=nothing)
    tolerance = 0.1 if setup.activation_checkpointing else 0.05
    assert sum(backward.values()) - tokens == pytest.approx(fullest, rel=tolerance)


def flash_on_cpu(q: Tensor, k: Tensor, v: Tensor, mask: object, *, window: int, way: str) -> Tensor:
    y: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0]
    return y.transpose(1, 2)


def leave_kernels_out(monkeypatch) -> None:
    """A graph allocates and frees all the same, and C++ takes most of the time to compile."""
    from torch._inductor.async_compile import AsyncCompile

    for name in ("cpp", "cpp_pybinding"):
        monkeypatch.setattr(AsyncCompile, name, lambda *args, **options: lambda *tensors: None)


def step_bytes(setup: MemorySetup) -> tuple[int, int]:
    """Beyond what lives between steps: between forward and backward, and at the fullest of backward."""
    torch._dynamo.reset()
    torch.set_num_threads(1)
    optimizer = build_optimizer(build_model(setup, "cpu"), setup, 0)
    by_block = compiles_by_block(world_size=setup.world_size, shard=setup.shard)
    optimizer.module.compile(dynamic=False, by_block=by_block)
    idx = torch.zeros(setup.device_batch_size, setup.model.sequence_len, dtype=torch.int64)

    def step(at: Callable[[str], contextlib.AbstractContextManager[Any]]) -> None:
        optimizer.zero_grad()
        with optimizer.micro_step(last=setup.world_size == 1):  # nothing is sent
            with at("phase forward"):
                nats = optimizer.module(idx, idx)
            with at("phase backward"):
                nats.backward()

    with without_caches(), flushed_denormals():
        step(lambda name: contextlib.nullcontext())
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            step(record_function)
    live = between = fullest = 0
    phase = ""
    for name, size in without_scratch(profiler):
        if name.startswith("phase "):
            live, phase = (0 if name == "phase forward" else live), name
            between = live
        else:
            live += size
            fullest = max(fullest, live) if phase == "phase backward" else fullest
    return between, fullest


def without_scratch(profiler: profile) -> Iterator[tuple[str, int]]:
    """Marks and allocations; not what an op takes and gives back at once, such as oneDNN's matmuls on some CPUs."""
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    names = [event.name() for event in events if event.name() == "[memory]" or event.name().startswith("phase ")]
    sizes = [event.nbytes() for event in events if event.name() == "[memory]" or event.name().startswith("phase ")]
    at = 0
    while at < len(names):
        if names[at : at + 2] == ["[memory]"] * 2 and sizes[at] == -sizes[at + 1] > 0:
            at += 2
            continue
        yield names[at], sizes[at]
        at += 1
