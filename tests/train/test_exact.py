"""
plan/memory.py's closed form against the trace of train/exact.py, and the trace against real steps on the CPU: PyTorch's profiler,
and the memory that Linux counts.
"""

import multiprocessing
import os
import pickle
import platform
import random
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from real_steps import PHASES, profile_as_rank, profiled_peaks, setup_of
from rows import mostly_soak
from test_optim_dist import start

from paceline.plan.activations import MemorySetup, chunk_sizes
from paceline.plan.memory import fullest_state, peak_phase, phases, state_bytes
from paceline.plan.shapes import num_params
from paceline.train.exact import trace_steps

MIB = 1 << 20
PROFILED = {
    "depth 2, checkpointed, two micro-steps": setup_of(depth=2, activation_checkpointing=True, grad_accum_steps=2),
    "depth 3, bf16, replicated AdamW": setup_of(depth=3, precision="bf16", optimizer="adamw", shard="none"),
    "depth 4, bf16, chunks, shared keys": setup_of(depth=4, precision="bf16", logits_budget_bytes=MIB, n_kv_head=1),
    "depth 2": setup_of(depth=2),
    "depth 4, long rows": setup_of(depth=4, sequence_len=640, device_batch_size=1),
    "depth 2, bf16": setup_of(depth=2, precision="bf16"),
    "depth 4, bf16, checkpointed": setup_of(depth=4, precision="bf16", activation_checkpointing=True),
    "depth 4, loss in chunks of 1 MiB": setup_of(depth=4, logits_budget_bytes=MIB, vocab_size=4096),
    "depth 6, AdamW": setup_of(depth=6, optimizer="adamw", window_pattern="L"),
    "depth 8, bf16, checkpointed, chunks": setup_of(
        depth=8, precision="bf16", activation_checkpointing=True, logits_budget_bytes=2 * MIB, head_dim=128
    ),
}


@pytest.mark.soak
@pytest.mark.parametrize("setup", PROFILED.values(), ids=PROFILED)
def test_traced_bytes_are_those_that_the_profiler_counts(setup: MemorySetup):
    check_against_profiler(setup, profiled_peaks(setup))


def traced_bytes(setup: MemorySetup) -> int:
    return max(trace_steps(setup).peaks.values())


def check_against_profiler(setup: MemorySetup, profiled: dict[str, int]) -> None:
    peaks = trace_steps(setup).peaks
    assert {phase: peaks[phase] for phase in PHASES} == pytest.approx(profiled, rel=0.001)
    assert max(peaks.values()) == pytest.approx(max(profiled.values()), rel=0.001)


RANKS = {
    "two ranks, checkpointed": setup_of(depth=3, world_size=2, activation_checkpointing=True),
    "two ranks, bf16, chunks": setup_of(depth=4, world_size=2, precision="bf16", logits_budget_bytes=MIB),
    "two ranks, weights sharded": setup_of(depth=3, world_size=2, precision="bf16", shard="full"),
    "two ranks, DDP": setup_of(depth=4, world_size=2, optimizer="adamw", shard="none"),
    "two ranks, DDP, bf16, two micro-steps": setup_of(
        depth=4, world_size=2, optimizer="adamw", shard="none", precision="bf16", grad_accum_steps=2
    ),
    "three ranks, bf16, two micro-steps": setup_of(depth=4, world_size=3, precision="bf16", grad_accum_steps=2),
}


@pytest.mark.dist
@pytest.mark.parametrize("name", mostly_soak(RANKS, short={"two ranks, weights sharded"}))
def test_traced_bytes_of_a_rank_are_those_that_it_has_beside_real_others(name: str, tmp_path: Path):
    check_against_profiler(RANKS[name], profiled_rank_0(RANKS[name], tmp_path))


def profiled_rank_0(setup: MemorySetup, folder: Path) -> dict[str, int]:
    context = multiprocessing.get_context("forkserver")
    # torch and its compiler, which DDP and checkpointing bring in, are imported once, not by every rank
    context.set_forkserver_preload(["paceline.train.exact", "torch._dynamo"])
    start(context, setup.world_size, setup, folder, run=profile_as_rank)
    return torch.load(folder / "0.pt")


def grid(count: int, *, seed: int, most_ops: int) -> list[MemorySetup]:
    """Setups of all kinds, the same every time; most_ops: about a hundred of the ops that tracing takes its time for."""
    draw, setups = random.Random(seed), []
    while len(setups) < count:
        setup = drawn_setup(draw)
        layers_and_blocks = setup.model.n_layer + setup.num_tokens // chunk_sizes(setup)[1]
        if layers_and_blocks * min(2, setup.grad_accum_steps) <= most_ops:
            setups.append(setup)
    return setups


def drawn_setup(draw: random.Random) -> MemorySetup:
    """On a CPU with windows; on a GPU with each attention kernel. Widths, vocabularies and rows are odd at times."""
    on_cpu = draw.random() < 0.5
    depth = draw.choice([2, 3, 4, 6, 8, 12] if on_cpu else [2, 4, 6, 8, 12, 16, 20, 24, 32])
    head_dim = draw.choice([64, 64, 128])
    n_head = draw.choice([-(-64 * depth // head_dim)] * 3 + [3, 5, 10])
    kernel = "cpu" if on_cpu else draw.choice(["flash", "flash", "efficient", "math"])
    shared_keys = [heads for heads in (1, 2) if n_head % heads == 0]  # the efficient kernel knows none
    optimizer, shard = draw.choice(
        [("muon", "optimizer"), ("muon", "optimizer"), ("adamw", "optimizer"), ("adamw", "none")]
    )
    return setup_of(
        depth=depth,
        device="cpu" if on_cpu else "cuda",
        n_embd=n_head * head_dim,
        head_dim=head_dim,
        n_kv_head=draw.choice([n_head, n_head, *([] if kernel == "efficient" else shared_keys)]),
        sequence_len=draw.choice([64, 256, 512, 1000, 1024] if on_cpu else [512, 1000, 1024, 2048, 4096]),
        vocab_size=draw.choice([300, 512, 4096, 10_000, 32_768, 50_257, 65_536]),
        window_pattern=draw.choice(["L", "SSSL", "SL"]) if on_cpu else "L",
        world_size=draw.choice([1, 1, 2, 3, 8]) if shard == "optimizer" else 1,
        optimizer=optimizer,
        shard=shard,
        precision=draw.choice(["fp32", "bf16", "fp16"] if on_cpu else ["fp32", "bf16", "bf16", "bf16", "fp16"]),
        device_batch_size=draw.choice([1, 2, 4, 8, 16, 32]),
        grad_accum_steps=draw.choice([1, 2, 5]),
        logits_budget_bytes=draw.choice([32, 128, 512, 2048]) * MIB,
        activation_checkpointing=draw_rung(draw.random()),
        attention=kernel,
    )


def draw_rung(number: float) -> bool | str:
    return True if number < 0.3 else "mlp" if number < 0.45 else "relu" if number < 0.6 else False


def sharded_grid(count: int, *, seed: int, most_ops: int) -> list[MemorySetup]:
    """The same with sharded weights, where a model is deep enough for them to matter."""
    draw = random.Random(seed)
    setups = grid(4 * count, seed=seed, most_ops=most_ops)
    deep = [setup for setup in setups if setup.model.n_layer > 2]
    return [replace(setup, shard="full", world_size=draw.choice([2, 2, 3, 4, 8])) for setup in deep][:count]


def ddp_grid(count: int, *, seed: int, most_ops: int) -> list[MemorySetup]:
    """The same by DDP."""
    draw = random.Random(seed)
    replicated = [setup for setup in grid(8 * count, seed=seed, most_ops=most_ops) if setup.shard == "none"]
    return [replace(setup, world_size=draw.choice([2, 3, 8])) for setup in replicated][:count]


def peak_of_first_rank(setup: MemorySetup) -> int:
    """The peak of the rank that is traced; the plan's is that of the fullest one, which may own a matrix more."""
    return peak_phase(setup).bytes - fullest_state(setup).total + state_bytes(setup, rank=0).total


def short_name(setup: MemorySetup) -> str:
    words = (setup.attention, setup.precision, setup.optimizer, f"d{setup.model.n_layer}", f"{setup.world_size} ranks")
    return " ".join(words)


@pytest.mark.slow
@pytest.mark.parametrize(
    "setup",
    [
        *grid(1, seed=1, most_ops=10),
        *sharded_grid(1, seed=3, most_ops=8),
        *(pytest.param(setup, marks=pytest.mark.soak) for setup in ddp_grid(1, seed=4, most_ops=8)),
    ],
    ids=short_name,
)
def test_the_closed_form_is_the_trace_within_three_per_cent(setup: MemorySetup):
    assert peak_of_first_rank(setup) == pytest.approx(traced_bytes(setup), rel=0.03)


@pytest.mark.slow
def test_a_model_that_is_built_without_memory_takes_none():
    """A rank of eight never holds the whole model in fp32."""
    setup = setup_of(
        depth=8, device="cuda", world_size=8, shard="full", precision="bf16", vocab_size=65_536, device_batch_size=1
    )
    assert traced_bytes(setup) < 4 * num_params(setup.model)


ONE_SIDED = {  # activations, or tables, outweigh all else
    "a checkpointed layer runs again": setup_of(
        depth=2, world_size=2, optimizer="adamw", activation_checkpointing=True, sequence_len=256, vocab_size=512,
        device_batch_size=32, n_kv_head=1,
    ),
    "gradients go into DDP's buckets": setup_of(
        depth=2, world_size=2, optimizer="adamw", shard="none", grad_accum_steps=2, activation_checkpointing=True,
        n_embd=640, sequence_len=512, vocab_size=10_000,
    ),
    "a table's gradient is there in two dtypes": setup_of(
        depth=4, device="cuda", n_embd=512, world_size=8, shard="full", precision="bf16", vocab_size=65_536,
        device_batch_size=1,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_soak(ONE_SIDED, short={*ONE_SIDED} - {"gradients go into DDP's buckets"}))
def test_the_closed_form_of_a_backward_is_the_trace_within_half_a_per_cent(name: str):
    setup = ONE_SIDED[name]
    planned = next(phase.bytes for phase in phases(setup) if phase.name == "backward")
    assert planned == pytest.approx(trace_steps(setup).peaks["backward"], rel=0.005)


@pytest.mark.soak
@pytest.mark.parametrize(
    "setup",
    grid(40, seed=1, most_ops=20)
    + grid(200, seed=2, most_ops=150)
    + sharded_grid(60, seed=3, most_ops=100)
    + ddp_grid(20, seed=4, most_ops=60),
    ids=short_name,
)
def test_the_closed_form_is_the_trace_on_a_grid_of_300(setup: MemorySetup):
    assert peak_of_first_rank(setup) == pytest.approx(traced_bytes(setup), rel=0.03)


GLIBC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}  # gives back all freed
SMALL = [setup_of(depth=2), setup_of(depth=4, sequence_len=256)]
RESIDENT = {
    "0.3 GB": setup_of(
        depth=4, sequence_len=256, device_batch_size=10, activation_checkpointing=True, vocab_size=16_384
    ),
    "0.5 GB, bf16": setup_of(depth=6, sequence_len=256, device_batch_size=4, precision="bf16", vocab_size=12_288),
    "0.7 GB": setup_of(depth=6, sequence_len=256, device_batch_size=9, vocab_size=8192),
    "1.0 GB, AdamW": setup_of(depth=6, sequence_len=256, device_batch_size=16, optimizer="adamw", vocab_size=10_000),
    "1.5 GB": setup_of(depth=8, sequence_len=256, device_batch_size=14, vocab_size=12_288),
}


def resident_growth(setup: MemorySetup) -> int:
    """Of a fresh process that does the steps of `setup`."""
    program = [sys.executable, str(Path(__file__).parent / "real_steps.py"), pickle.dumps(setup).hex()]
    done = subprocess.run(program, env={**os.environ, **GLIBC}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.fixture(scope="module")
def beside_bytes() -> float:
    """What a process grows by beside its tensors: code of libraries, autograd's threads; from setups that are not tested."""
    return statistics.fmean(resident_growth(setup) - traced_bytes(setup) for setup in SMALL)


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="needs Linux with glibc: its malloc is told to keep nothing"
)
@pytest.mark.parametrize(
    "setup", [pytest.param(setup, id=name, marks=pytest.mark.soak) for name, setup in RESIDENT.items()]
)
def test_a_process_grows_by_the_traced_bytes(setup: MemorySetup, beside_bytes: float):
    assert resident_growth(setup) - beside_bytes == pytest.approx(traced_bytes(setup), rel=0.05)
