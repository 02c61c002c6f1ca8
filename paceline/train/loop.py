"""
The training loop: micro-steps, one collective for what ranks must agree on, update, metrics, evaluation, checkpoint, stop.

Seeds: what must agree (initial weights, order of rows) comes from `seed` alone; what must differ between ranks (torch's global
generators) is seeded with (seed, rank) and kept in the checkpoint. Only rank 0 writes shared files. The only waits between ranks
are the optimizer's own collectives and the evaluation's sum; nothing else needs a barrier.
"""

# B rows in a micro-batch, T tokens in a row

import gc
import json
import logging
import math
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.config import Config
from paceline.errors import TrainingFailed
from paceline.plan.cost import mfu
from paceline.plan.planner import Plan
from paceline.rundir import RunDir, append_json_line, utc_now
from paceline.train import schedule
from paceline.train.optim import ReplicatedAdamW, ShardedOptimizer
from paceline.units import format_bytes, format_duration, format_mfu

log = logging.getLogger("paceline")

MEMORY_STEPS = 20  # of an attempt: what is taken by then was taken in every step so far
SCALE_GROWTH_STEPS = 2000  # fp16: so many good steps double the loss scale, as torch.amp.GradScaler does


@dataclass
class LossScale:
    """fp16's loss scale; stays 1 in other precisions. A step whose gradients overflow is skipped and halves it."""

    value: float = 1.0
    good_steps: int = 0
    dynamic: bool = False

    def update(self, *, overflow: bool) -> None:
        if overflow:
            self.value, self.good_steps = self.value / 2, 0
            return
        self.good_steps += 1
        if self.dynamic and self.good_steps % SCALE_GROWTH_STEPS == 0:
            self.value *= 2

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.good_steps = float(state["value"]), int(state["good_steps"])


@dataclass
class StopRequest:
    """Set by a signal handler at any moment; ranks agree on it in the step's own collective."""

    asked: bool = False
    training: bool = False  # before the first step there is nothing to save

    def ask(self, signum: int, frame: FrameType | None) -> None:
        if not self.training:
            os._exit(0)
        self.asked = True


class Progress:
    """progress/<rank>: a few bytes overwritten in place, so that others see where this rank is."""

    WIDTH = 96

    def __init__(self, run: RunDir, rank: int):
        run.progress(rank).parent.mkdir(parents=True, exist_ok=True)
        self.fd = os.open(run.progress(rank), os.O_WRONLY | os.O_CREAT, 0o644)

    def mark(self, step: int, phase: str) -> None:
        line = json.dumps({"step": step, "phase": phase, "time": round(time.time(), 3)})
        os.pwrite(self.fd, line.ljust(self.WIDTH - 1).encode() + b"\n", 0)


@dataclass
class StepClock:
    """Seconds spent in steps since the last line of metrics; evaluations and samples are not in it."""

    steps: int = 0
    seconds: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    def start(self) -> None:
        self.started = time.perf_counter()

    def stop(self) -> None:
        self.seconds += time.perf_counter() - self.started
        self.steps += 1

    def take_step_ms(self) -> float:
        step_ms = 1000 * self.seconds / self.steps
        self.steps, self.seconds = 0, 0.0
        return step_ms


class Loader(Protocol):
    """train/loader.py's TrainLoader, or the probe's of made-up tokens."""

    def micro_batch(self, step: int, micro_step: int) -> tuple[Tensor, Tensor]:
        """idx, targets: (B, T) int64 on the device."""


@dataclass
class Loop:
    """One rank's training. The hooks are given by the worker: what to do at an evaluation, a checkpoint, a sample."""

    run: RunDir
    config: Config
    plan: Plan
    optimizer: ShardedOptimizer | ReplicatedAdamW
    forward: Callable[..., Tensor]
    loader: Loader
    rank: int
    device: torch.device
    stop: StopRequest
    evaluate: Callable[[], float]
    save: Callable[[int, float | None], None]
    sample: Callable[[int], None]
    note_memory: Callable[[int], None]
    progress: Progress
    scale: LossScale

    def train(self, start_step: int) -> tuple[int, float | None, bool]:
        """From start_step to the end of the plan. Returns steps done, the last val_bpb, and whether it was stopped early."""
        plan, clock = self.plan, StepClock()
        bpb: float | None = None
        self.stop.training = True
        self.progress.mark(start_step, "train")
        for step in range(start_step, plan.num_steps):
            clock.start()
            values, stopping = self.one_step(step)
            clock.stop()
            done = step + 1
            last = done == plan.num_steps
            if done == start_step + 1:
                gc.collect()
                gc.freeze()  # model and optimizer objects live to the end: later collections need not walk them
                gc.disable()  # a collection in the step costs up to half a second; it is done at evaluations instead
            due = last or _due(done, self.config.eval_every)
            bpb = self._evaluate(done) if due and not stopping else None
            if last or stopping or due or done == start_step + 1 or done % self.config.log_every == 0:
                self._log(done, values, bpb=bpb, step_ms=clock.take_step_ms())
            if last or stopping or _due(done, self.config.save_every):
                self.progress.mark(done, "save")
                self.save(done, bpb)
            if not stopping and (last or _due(done, self.config.sample_every)):
                self.sample(done)
            if done == start_step + MEMORY_STEPS:
                self.note_memory(done)
            self.progress.mark(done, "train")
            if stopping:
                return done, bpb, not last
        return plan.num_steps, bpb, False

    def one_step(self, step: int) -> tuple[dict[str, float], bool]:
        """Forward, backward, agree, update. Returns metrics of the step, and whether some rank was asked to stop."""
        plan, config, optimizer = self.plan, self.config, self.optimizer
        optimizer.zero_grad()
        nats_sum = torch.zeros((), device=self.device)
        for micro_step in range(plan.grad_accum_steps):
            idx, targets = self.loader.micro_batch(step, micro_step)  # (B, T) int64
            with optimizer.micro_step(last=micro_step == plan.grad_accum_steps - 1):
                nats = self.forward(idx, targets)  # () fp32
                (nats if self.scale.value == 1 else nats * self.scale.value).backward()  # type: ignore[no-untyped-call]
            nats_sum += nats.detach()
        bad = torch.zeros(plan.world_size, device=self.device)
        bad[self.rank] = ~nats_sum.isfinite()
        asked = torch.full((1,), float(self.stop.asked), device=self.device)
        # the step's one wait for the device: loss, stop flags and gradient norm decide what comes next on every rank alike
        loss_sum, stop_count, *rest = optimizer.reduce(
            torch.cat([nats_sum.nan_to_num(0, 0, 0)[None], asked, bad])
        ).tolist()
        bad_ranks = [rank for rank, flag in enumerate(rest[:-1]) if flag]
        if bad_ranks:
            raise TrainingFailed(
                f"the loss is not finite at step {step + 1} on rank{'s' if len(bad_ranks) > 1 else ''}"
                f" {', '.join(map(str, bad_ranks))}",
                fix=f"lower --matrix-lr or --embedding-lr and go on from the last checkpoint: paceline resume {self.run.path}",
            )
        grad_scale = 1 / (plan.total_batch_size * self.scale.value)
        grad_norm = math.sqrt(rest[-1]) * grad_scale if math.isfinite(rest[-1]) else math.inf
        overflow = not math.isfinite(grad_norm)
        if overflow and not self.scale.dynamic:
            raise TrainingFailed(
                f"the gradient is not finite at step {step + 1}, the loss still is",
                fix=f"--precision fp32 tells whether it is the number format: paceline resume {self.run.path} --precision fp32",
            )
        mult = schedule.lr_mult(
            step,
            plan.num_steps,
            warmup_steps=config.warmup_steps,
            warmdown_ratio=config.warmdown_ratio,
            final_lr_frac=config.final_lr_frac,
        )
        if not overflow:
            clip = 1.0 if config.grad_clip is None else min(1.0, config.grad_clip / (grad_norm + 1e-6))
            optimizer.step(
                lr_mult=mult,
                momentum=schedule.muon_momentum(step, plan.num_steps, warmdown_ratio=config.warmdown_ratio),
                weight_decay_mult=schedule.weight_decay_mult(step, plan.num_steps),
                grad_scale=grad_scale * clip,
            )
        if self.scale.dynamic:
            self.scale.update(overflow=overflow)
        self.progress.mark(step + 1, "train")
        return {"loss": loss_sum / plan.total_batch_size, "lr_mult": mult, "grad_norm": grad_norm}, stop_count > 0

    def _evaluate(self, done: int) -> float:
        self.progress.mark(done, "eval")
        gc.collect()
        return self.evaluate()

    def _log(self, done: int, values: dict[str, float], *, bpb: float | None, step_ms: float) -> None:
        if self.rank != 0:
            return
        plan = self.plan
        speed = plan.total_batch_size / (step_ms / 1000)
        share = mfu(speed / plan.world_size, plan.flops_per_token, plan.peak_flops)
        peak = peak_bytes(self.device)
        record = {"step": done, "loss": values["loss"]}
        if bpb is not None:
            record["val_bpb"] = bpb
        finite_norm = values["grad_norm"] if math.isfinite(values["grad_norm"]) else None
        append_json_line(
            self.run.metrics,
            {
                **record,
                "lr_mult": round(values["lr_mult"], 6),
                "grad_norm": finite_norm,
                "step_ms": round(step_ms, 2),
                "tok_per_sec": round(speed, 1),
                "mfu": share,
                "peak_bytes": peak,
                "time": utc_now(),
            },
        )
        width = len(str(plan.num_steps))
        eta = format_duration((plan.num_steps - done) * step_ms / 1000)
        val = f" | val_bpb {bpb:.4f}" if bpb is not None else ""
        log.info(
            f"step {done:0{width}d}/{plan.num_steps} | loss {values['loss']:.4f}{val} | {step_ms:,.0f} ms | {speed:,.0f} tok/s"
            f" | mfu {format_mfu(share)} | {format_bytes(peak)} | eta {eta}"
        )


def _due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0


def peak_bytes(device: torch.device) -> int:
    """Most memory held so far: torch's allocator on a GPU, the process's resident set on the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
