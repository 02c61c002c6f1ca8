"""
Does a plan fit this device: `python -m paceline.train.probe PLAN_JSON OUT_DIR`, one process per rank, started as the worker is.

The worker's own model, optimizer and step on made-up tokens: two steps, an evaluation, and on a CPU the checkpoint's copies. What
was taken goes to OUT_DIR/probe/<rank>.json. Memory that runs out is an error like any other: launch/confirm.py reads it.
"""

import argparse
import json
import os
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.config import Config
from paceline.errors import PacelineError
from paceline.model.gpt import GPT
from paceline.plan.planner import Plan
from paceline.rundir import RunDir, utc_now, write_atomic
from paceline.train.dist import shutdown
from paceline.train.footprint import footprint, forget_peaks
from paceline.train.loop import Loop, LossScale, StopRequest
from paceline.train.progress import Progress
from paceline.train.worker import initial_scale, make_model, make_optimizer, start_ranks, write_error

NUM_STEPS = 2  # the first has no states and gradients of an earlier one
MICRO_STEPS = 2  # at most: a third is as the second
SEED = 0
SPARE_BYTES = {"cuda": 256 << 20, "cpu": 64 << 20}  # a run's tokenizer, text, samples and fragments come on top


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("plan_json", type=Path)
    parser.add_argument("out_dir", type=Path)
    args = parser.parse_args()
    run, rank = RunDir(args.out_dir), int(os.environ.get("RANK", "0"))
    try:
        probe(run, Plan.from_json(args.plan_json.read_text()))
    except BaseException as error:
        write_error(run, attempt=1, rank=rank, error=error)
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(error.exit_code if isinstance(error, PacelineError) else 1)
    shutdown()
    sys.stdout.flush()
    os._exit(0)  # as the worker: gloo's threads abort in the interpreter's own exit, now and then


def probe(run: RunDir, plan: Plan) -> None:
    """Where the plan leaves compiling to a trial, eager and compiled, as that trial does it."""
    torch.set_num_threads(plan.threads)
    device, rank = start_ranks(plan)
    plan = shortened(plan)
    spare = torch.ones(
        SPARE_BYTES[device.type], dtype=torch.uint8, device=device
    )  # written, so that it is really there
    model = make_model(plan, seed=SEED, device=device)
    optimizer = make_optimizer(model, plan, rank=rank)
    loop = Loop(
        run=run,
        config=Config(),
        plan=plan,
        optimizer=optimizer,
        forward=optimizer.module,
        loader=MadeUpTokens(plan, device),
        rank=rank,
        device=device,
        stop=StopRequest(),
        evaluate=lambda: 0.0,
        save=lambda step, bpb: None,
        sample=lambda step: None,
        note_memory=lambda step: None,
        progress=Progress(run, rank),
        scale=LossScale(initial_scale(plan), dynamic=plan.precision == "fp16"),
    )
    stages = []
    for compiled in (False, True) if plan.compile is None else (plan.compile,):
        if compiled:
            forget_peaks(device)
            model.compile(dynamic=False)
        copies_bytes = train_and_evaluate(loop, model)
        tried = compiled and plan.compile is None
        stages.append(
            {
                "time": utc_now(),
                "compiled": compiled,
                "compile_tried": tried,
                "torch": torch.__version__,
                "copies_bytes": copies_bytes,
                **without(footprint(device), spare.nbytes),
            }
        )
    write_stages(run, rank, stages)
    loop.progress.mark(NUM_STEPS, "done")


def without(figures: dict[str, int | None], spare_bytes: int) -> dict[str, int | None]:
    return {name: None if size is None else size - spare_bytes for name, size in figures.items()}


def shortened(plan: Plan) -> Plan:
    """The same memory with at most MICRO_STEPS micro-steps in a step."""
    micro_steps = min(MICRO_STEPS, plan.grad_accum_steps)
    tokens = plan.total_batch_size // plan.grad_accum_steps * micro_steps
    return replace(plan, grad_accum_steps=micro_steps, total_batch_size=tokens)


def train_and_evaluate(loop: Loop, model: GPT) -> int:
    """Returns the bytes of the copies that a checkpoint would make in this process's memory; on a GPU they are not on the card."""
    copies: list[Tensor] = []
    for step in range(NUM_STEPS):
        loop.one_step(step)
        if loop.device.type == "cpu" and not copies:
            copies = [piece.tensor.clone() for piece in loop.optimizer.pieces()]
    with torch.no_grad():
        idx, targets = loop.loader.micro_batch(0, 0)
        model(idx, targets, reduction="none")
    return sum(copy.nbytes for copy in copies)


class MadeUpTokens:
    """Micro-batches that need no text; the same on every rank, for memory does not care."""

    def __init__(self, plan: Plan, device: torch.device):
        self.shape = (plan.device_batch_size, plan.model.sequence_len)
        self.vocab_size, self.device = plan.model.vocab_size, device
        self.generator = torch.Generator().manual_seed(SEED)

    def micro_batch(self, step: int, micro_step: int) -> tuple[Tensor, Tensor]:
        idx, targets = (torch.randint(self.vocab_size, self.shape, generator=self.generator) for _ in range(2))
        return idx.to(self.device), targets.to(self.device)


def write_stages(run: RunDir, rank: int, stages: list[dict[str, Any]]) -> None:
    path = run.path / "probe" / f"{rank}.json"
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, json.dumps(stages))


if __name__ == "__main__":
    main()
