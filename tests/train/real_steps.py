"""
The two steps of train/exact.py on real CPU tensors: bytes as PyTorch's profiler counts them, and as Linux does.

Run as a program it prints by how much the process grows at its highest: a fresh process for each setup.
"""

import os
import pickle
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from optim_ranks import join_group
from torch.profiler import ProfilerActivity, profile, record_function

from paceline.config import ModelConfig
from paceline.plan.activations import MemorySetup
from paceline.train.exact import run_steps
from paceline.train.process import shutdown

PHASES = ("setup", "forward", "backward", "optimizer", "evaluation")
KIB, MIB = 1 << 10, 1 << 20
MATMULS = {f"aten::{name}" for name in ("mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_")}


def setup_of(
    *, depth: int, device: str = "cpu", n_embd: int | None = None, head_dim: int = 64, n_kv_head: int | None = None,
    sequence_len: int = 128, vocab_size: int = 2048, window_pattern: str = "SSSL", **keys: object,
) -> MemorySetup:  # fmt: skip
    """A model of `depth` layers; keys: any of MemorySetup's."""
    width = n_embd or -(-64 * depth // head_dim) * head_dim
    heads = width // head_dim
    model = ModelConfig(depth, width, heads, n_kv_head or heads, head_dim, sequence_len, vocab_size, window_pattern)
    usual = {
        "world_size": 1, "optimizer": "muon", "shard": "optimizer", "precision": "fp32", "device_batch_size": 4,
        "grad_accum_steps": 1, "logits_budget_bytes": 256 * MIB, "activation_checkpointing": False,
        "attention": "cpu" if device == "cpu" else "flash", "compiled": False,
    }  # fmt: skip
    return MemorySetup(model=model, device=device, **{**usual, **keys})


def profiled_peaks(setup: MemorySetup, *, rank: int = 0) -> dict[str, int]:
    """Of each phase, the most bytes that live at once, from the profiler's record of allocations and frees.

    The scratch memory of matmuls is not counted: how much a library takes within an op depends on the CPU.
    """
    import torch._dynamo  # activation checkpointing brings it in at its first call: it counts as code, not as tensors

    torch.set_num_threads(1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, ExitStack() as marks:

        def at(phase: str) -> None:
            marks.pop_all().close()
            marks.enter_context(record_function(f"phase {phase}"))

        run_steps(setup, rank=rank, device="cpu", at=at)
    live, phase, peaks = 0, "setup", dict.fromkeys(PHASES, 0)
    for event in without_scratch(sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())):
        if event.name().startswith("phase "):
            phase = event.name().removeprefix("phase ")
        elif event.name() == "[memory]":
            live += event.nbytes()
            peaks[phase] = max(peaks[phase], live)
    return peaks


def without_scratch(events: list[Any]) -> list[Any]:
    """The profiler's events in order, without memory that is allocated and freed again within one matmul."""
    scratch, allocated, end_ns = set(), {}, 0
    for position, event in enumerate(events):
        if event.name() in MATMULS:
            allocated, end_ns = {}, event.start_ns() + event.duration_ns()
        elif event.name() == "[memory]" and event.start_ns() <= end_ns:
            if event.nbytes() > 0:
                allocated.setdefault(event.nbytes(), []).append(position)
            elif positions := allocated.get(-event.nbytes()):
                scratch |= {positions.pop(), position}
    return [event for position, event in enumerate(events) if position not in scratch]


def profile_as_rank(rank: int, world_size: int, port: int, setup: MemorySetup, folder: Path) -> None:
    """One real process of several, over gloo."""
    join_group(rank, world_size, port)
    torch.save(profiled_peaks(setup, rank=rank), folder / f"{rank}.pt")
    dist.barrier()
    shutdown()
    os._exit(0)  # as the worker ends: gloo's threads under DDP abort in the interpreter's own exit, now and then


def resident_growth(setup: MemorySetup) -> int:
    """By how much these steps raise the most that this process ever had in memory."""
    import torch._dynamo  # as above

    torch.set_num_threads(1)
    torch.ones(64, 64) @ torch.ones(64, 64)  # libraries load and make their buffers
    before = resident_bytes("VmRSS")
    run_steps(setup, rank=0, device="cpu", at=lambda phase: None)
    return resident_bytes("VmHWM") - before


def resident_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    print(resident_growth(pickle.loads(bytes.fromhex(sys.argv[1]))))
