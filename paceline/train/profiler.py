"""
Steps of a plan under torch.profiler: `python -m paceline.train.profiler FOLDER --steps N`, one process per rank.

The model, the optimizer, the text and the step are the worker's own; the weights are fresh, since time does not depend on them. As
many steps are first timed without the profiler. FOLDER/trace_<rank>.json.gz is the Chrome trace, FOLDER/memory_<rank>.json.gz that
of one more step with its allocations, and FOLDER/<rank>.json what they show (plan/breakdown.py). The phases of a step come from the
heartbeats that the loop writes anyway, so the loop has no line for this.
"""

import argparse
import gzip
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function, schedule

from paceline.config import Config
from paceline.data.prepare import dataset_of
from paceline.heartbeat import HeartbeatWriter
from paceline.plan.breakdown import PHASES, RANGE, break_down, memory_by_kind
from paceline.rundir import RunDir, write_atomic
from paceline.train.loop import Loop, TrainLoader, freeze_objects
from paceline.train.optim import make_optimizer
from paceline.train.process import StopRequest, run_rank
from paceline.train.setup import choose_compile, make_model, start_ranks

WARMUP_STEPS = 3  # files, kernels and memory are used for the first time, and compiled
SEED = 0


class PhaseRanges(HeartbeatWriter):
    """A heartbeat whose phases within a step are ranges of the trace too."""

    _range: record_function | None = None

    def beat(self, step: int, phase: str, micro_step: int = 0) -> None:
        """Writes the heartbeat, ends the range of the phase before and begins the next one's."""
        super().beat(step, phase, micro_step)
        if self._range is not None:
            self._range.__exit__(None, None, None)
        self._range = record_function(RANGE + phase) if phase in PHASES else None
        if self._range is not None:
            self._range.__enter__()  # type: ignore[no-untyped-call]


def main() -> None:
    """Profiles the plan, and ends the process with the error's exit code, or 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--deterministic", action="store_true")
    args = parser.parse_args()
    run, rank = RunDir(args.folder), int(os.environ.get("RANK", "0"))
    progress = PhaseRanges(run, rank)
    progress.beat(0, "start")
    run_rank(
        lambda: profile_rank(run, progress, steps=args.steps, deterministic=args.deterministic),
        run,
        attempt=1,
        rank=rank,
    )


def profile_rank(run: RunDir, progress: PhaseRanges, *, steps: int, deterministic: bool) -> None:
    """Times the steps, traces as many, and writes the trace and its summary. Collective."""
    plan, device, rank = start_ranks(run, deterministic=deterministic)
    dataset = dataset_of(run)
    model = make_model(plan, seed=SEED, device=device)
    optimizer = make_optimizer(model, plan, plan.groups, rank=rank)
    loader = TrainLoader(dataset.split("train", "stream"), plan, SEED, rank, device, skipped_batches=())
    loop = Loop(
        run, Config(), plan, optimizer, loader.micro_batch, rank, device, progress, StopRequest(), model.low_products
    )
    progress.beat(0, "compile")
    choose_compile(loop, model)
    for step in range(WARMUP_STEPS):
        loop.one_step(step % plan.num_steps)
    freeze_objects()
    first = WARMUP_STEPS + steps
    unprofiled = [timed_step(loop, step) for step in range(WARMUP_STEPS, first)]
    events, profiled = trace_steps(loop, range(first, first + steps + 1), run.path / f"trace_{rank}.json.gz")
    memory_trace = run.path / f"memory_{rank}.json.gz"
    memory_events, _ = trace_steps(loop, range(first + steps + 1, first + steps + 3), memory_trace, memory=True)
    medians = {"unprofiled": median_times(unprofiled), "profiled": median_times(profiled)}
    summary = {**medians, **break_down(events), "memory": memory_by_kind(memory_events)}
    write_atomic(run.path / f"{rank}.json", json.dumps(summary))
    progress.beat(steps, "done")


def timed_step(loop: Loop, step: int) -> tuple[float, float]:
    """Takes a step; returns its milliseconds by the clock, and those of processor time of all threads. Collective."""
    started, started_cpu = time.perf_counter(), time.process_time()
    loop.one_step(step % loop.plan.num_steps)
    return 1000 * (time.perf_counter() - started), 1000 * (time.process_time() - started_cpu)


def median_times(steps: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Returns the medians: a step that other processes delayed does not count."""
    clock_ms, cpu_ms = (median(times) for times in zip(*steps, strict=True))
    return {"ms": clock_ms, "cpu_ms": cpu_ms}


def trace_steps(
    loop: Loop, steps: range, path: Path, *, memory: bool = False
) -> tuple[list[dict[str, Any]], list[tuple[float, float]]]:
    """Returns the events, which it also writes to a file, and the times of the steps but the first, in which the profiler starts.

    memory: records allocations too, each of which takes time. Collective.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if loop.device.type == "cuda" else [])]
    cycle = schedule(wait=0, warmup=1, active=len(steps) - 1, repeat=1)
    with profile(activities=activities, schedule=cycle, profile_memory=memory) as profiler:
        times = []
        for step in steps:
            times.append(timed_step(loop, step))
            if step == steps[-1]:
                loop.progress.beat(step, "ending")  # the profiler now collects what it has recorded
            profiler.step()
    plain = path.with_suffix("")
    try:
        profiler.export_chrome_trace(str(plain))  # which compresses line by line, in seconds
        content = plain.read_bytes()
        path.write_bytes(gzip.compress(content, compresslevel=6))
    finally:
        plain.unlink(missing_ok=True)
    events: list[dict[str, Any]] = json.loads(content)["traceEvents"]
    return events, times[1:]


if __name__ == "__main__":
    main()
