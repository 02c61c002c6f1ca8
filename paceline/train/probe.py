"""
A plan tried on this device before the run: `python -m paceline.train.probe DIR`, one process per rank.

The processes are started as the worker is; DIR holds the plan. Each runs the worker's own model, optimizer and step on made-up
tokens: two steps, an evaluation, and on a CPU the checkpoint's copies. Where the run's length is a time, it then measures how long
steps and evaluations take. The memory and the seconds go to DIR/probe/<rank>.json. An error that memory runs out is written like
any other: launch/trial.py reads it.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from paceline.config import Config
from paceline.heartbeat import HeartbeatWriter
from paceline.model.gpt import GPT
from paceline.plan.planner import Plan
from paceline.rundir import RunDir, utc_now, write_atomic
from paceline.train.loop import Loop, MicroBatch
from paceline.train.optim import make_optimizer
from paceline.train.process import StopRequest, broadcast_object, finish_work, footprint, forget_peaks, run_rank
from paceline.train.setup import compile_model, make_model, start_ranks, trial_ms

NUM_STEPS = 2  # the first has no states and gradients of an earlier one
MICRO_STEPS = 2  # at most: a third takes no more memory than the second
SEED = 0
TIMED_S = 2.0  # of each measurement, where one repeat is not longer
TIMED_REPEATS = (2, 10)  # at least and at most
SPARE_BYTES = {"cuda": 256 << 20, "cpu": 64 << 20}  # a run's tokenizer, text, samples and fragments come on top


def main() -> None:
    """Tries the plan, and ends the process with the error's exit code, or 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    run, rank = RunDir(parser.parse_args().folder), int(os.environ.get("RANK", "0"))
    run_rank(lambda: probe(run), run, attempt=1, rank=rank)


def probe(run: RunDir) -> None:
    """Tries the plan, eager and compiled where it leaves that to a trial, and writes what each stage took. Collective."""
    plan, device, rank = start_ranks(run)
    full_micro_steps, plan = plan.grad_accum_steps, shortened(plan)
    # ones, not empty: the memory is written, so that it is really there
    spare = torch.ones(SPARE_BYTES[device.type], dtype=torch.uint8, device=device)
    model = make_model(plan, seed=SEED, device=device)
    optimizer = make_optimizer(model, plan, plan.groups, rank=rank)
    progress = HeartbeatWriter(run, rank)
    loop = Loop(
        run,
        Config(),
        plan,
        optimizer,
        made_up_tokens(plan, device),
        rank,
        device,
        progress,
        StopRequest(),
        model.low_products,
    )
    stages, ready_time = [], time.time()
    for compiled in (False, True) if plan.compile is None else (plan.compile,):
        if compiled:
            forget_peaks(device)
            compile_model(model, plan)
        copies_bytes = train_and_evaluate(loop, model)
        stage: dict[str, Any] = {
            "time": utc_now(),
            "compiled": compiled,
            "compile_tried": compiled and plan.compile is None,
            "torch": torch.__version__,
            "copies_bytes": copies_bytes,
            **{name: None if size is None else size - spare.nbytes for name, size in footprint(device).items()},
        }
        if plan.time is not None:
            stage |= {"ready_time": ready_time, **measure_speed(loop, model, micro_steps=full_micro_steps)}
        stages.append(stage)
    path = run.path / "probe" / f"{rank}.json"
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, json.dumps(stages))
    progress.beat(NUM_STEPS, "done")


def shortened(plan: Plan) -> Plan:
    """Returns a plan that takes the same memory, with at most MICRO_STEPS micro-steps in a step."""
    micro_steps = min(MICRO_STEPS, plan.grad_accum_steps)
    tokens = plan.total_batch_size // plan.grad_accum_steps * micro_steps
    return replace(plan, grad_accum_steps=micro_steps, total_batch_size=tokens)


def train_and_evaluate(loop: Loop, model: GPT) -> int:
    """Does NUM_STEPS steps and an evaluation; returns the bytes of a checkpoint's copies in this process, 0 for a GPU."""
    copies: list[Tensor] = []
    for step in range(NUM_STEPS):
        loop.one_step(step)
        if loop.device.type == "cpu" and not copies:
            copies = [piece.tensor.clone() for piece in loop.optimizer.pieces()]
    with torch.no_grad():
        idx, targets = loop.micro_batch(0, 0)
        model(idx, targets, reduction="none")
    return sum(copy.nbytes for copy in copies)


def measure_speed(loop: Loop, model: GPT, *, micro_steps: int) -> dict[str, float]:
    """Seconds of a whole step of so many micro-steps, and of evaluating one token. Collective."""
    step_s = median_s(lambda: loop.one_step(NUM_STEPS), loop.device)
    more = micro_steps - loop.plan.grad_accum_steps
    step_s += more * trial_ms(loop) / 1000 if more else 0.0
    idx, targets = loop.micro_batch(0, 0)
    with torch.no_grad():
        eval_s = median_s(lambda: model(idx, targets, reduction="none"), loop.device)
    return {"step_s": step_s, "eval_s_per_token": eval_s / (idx.numel() * loop.plan.world_size)}


def median_s(work: Callable[[], object], device: torch.device) -> float:
    """Median seconds of `work`, repeated for about TIMED_S. Collective: rank 0's clock decides how often, for all."""

    def seconds() -> float:
        started = time.perf_counter()
        work()
        finish_work(device)
        return time.perf_counter() - started

    least, most = TIMED_REPEATS
    repeats = broadcast_object(min(most, max(least, int(TIMED_S / seconds()))))
    return float(median(seconds() for _ in range(repeats)))


def made_up_tokens(plan: Plan, device: torch.device) -> MicroBatch:
    """Returns micro-batches of random tokens, the same on every rank: memory and time do not depend on their values."""
    shape, generator = (plan.device_batch_size, plan.model.sequence_len), torch.Generator().manual_seed(SEED)

    def micro_batch(step: int, micro_step: int) -> tuple[Tensor, Tensor]:
        idx, targets = (torch.randint(plan.model.vocab_size, shape, generator=generator) for _ in range(2))
        return idx.to(device), targets.to(device)

    return micro_batch


if __name__ == "__main__":
    main()
