"""
The training loop: micro-steps, one collective for what ranks must agree on, update, metrics, evaluation, checkpoint, stop.

Seeds: what must agree (initial weights, order of rows) comes from `seed` alone; what must differ between ranks (torch's global
generators) is seeded with (seed, rank) and kept in the checkpoint. Only rank 0 writes shared files. The only waits between ranks
are the optimizer's own collectives and the evaluation's sum; nothing else needs a barrier.
"""

# B rows in a micro-batch, T tokens in a row

import gc
import logging
import math
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.config import Config
from paceline.plan.cost import mfu
from paceline.plan.planner import Plan
from paceline.rundir import LineFile, RunDir, utc_now
from paceline.train import schedule
from paceline.train.busy import BusyClock
from paceline.train.optim import ReplicatedAdamW, ShardedOptimizer
from paceline.train.progress import Progress
from paceline.train.trouble import LossGuard, find_trouble
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


class Agreed(NamedTuple):
    """What some rank asked for before a step, and all do after it."""

    stop: bool
    save: bool


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
    guard: LossGuard = field(default_factory=LossGuard)
    save_again: Callable[[], bool] = lambda: False  # the last save found no space, and now there is some

    def __post_init__(self) -> None:
        self.metrics = LineFile(self.run.metrics)
        self.busy = BusyClock(self.device)

    def train(self, start_step: int) -> tuple[int, float | None, bool]:
        """From start_step to the end of the plan. Returns steps done, the last val_bpb, and whether it was stopped early."""
        plan, clock = self.plan, StepClock()
        bpb: float | None = None
        self.stop.training = True
        self.progress.mark(start_step, "train")
        for step in range(start_step, plan.num_steps):
            clock.start()
            values, agreed = self.one_step(step)
            clock.stop()
            done = step + 1
            last, stopping = done == plan.num_steps, agreed.stop
            if done == start_step + 1:
                gc.collect()
                gc.freeze()  # model and optimizer objects live to the end: later collections need not walk them
                gc.disable()  # a collection in the step costs up to half a second; it is done at evaluations instead
            due = last or _due(done, self.config.eval_every)
            bpb = self._evaluate(done) if due and not stopping else None
            if last or stopping or due or done == start_step + 1 or done % self.config.log_every == 0:
                self._log(done, values, bpb=bpb, step_ms=clock.take_step_ms())
                self.busy.forget()
            if last or stopping or agreed.save or _due(done, self.config.save_every):
                self.progress.mark(done, "save")
                self.save(done, bpb)
            if not stopping and (last or _due(done, self.config.sample_every)):
                self.progress.mark(done, "sample")
                self.sample(done)
            if done == start_step + MEMORY_STEPS:
                self.note_memory(done)
            if stopping:
                return done, bpb, not last
        return plan.num_steps, bpb, False

    def one_step(self, step: int) -> tuple[dict[str, Any], Agreed]:
        """Forward, backward, agree, update. Returns metrics of the step, and what the ranks have agreed to do after it."""
        plan, optimizer = self.plan, self.optimizer
        optimizer.zero_grad()
        self.busy.start()
        nats_sum = self._micro_steps(step)
        self.busy.stop()
        # by each rank: its busy time, or -1 where its loss is no number
        told = torch.zeros(plan.world_size, device=self.device)
        told[self.rank] = torch.where(nats_sum.isfinite(), self.busy.mean_ms, -1.0)
        # two counts in one number, so that the message keeps its length
        asks = self.stop.asked + (plan.world_size + 1) * self.save_again()
        asked = torch.full((1,), float(asks), device=self.device)
        self.progress.mark(step, "reduce", plan.grad_accum_steps - 1)
        # the step's one wait for the device: loss, stop flags and gradient norm decide what comes next on every rank alike
        loss_sum, asked_sum, *rank_ms, squares = optimizer.reduce(
            torch.cat([nats_sum.nan_to_num(0, 0, 0)[None], asked, told])
        ).tolist()
        save_count, stop_count = divmod(int(asked_sum), plan.world_size + 1)
        loss = loss_sum / plan.total_batch_size
        grad_norm = math.sqrt(squares) * self.grad_scale if math.isfinite(squares) else math.inf
        overflow = not math.isfinite(grad_norm)
        bad_ranks = tuple(rank for rank, ms in enumerate(rank_ms) if ms < 0)
        trouble = find_trouble(
            self.guard, step + 1, loss=loss, bad_ranks=bad_ranks, gradient_bad=overflow and not self.scale.dynamic
        )
        if trouble is not None:
            raise trouble.explained(self.run, rank_nats=float(nats_sum))
        self.progress.mark(step, "update", plan.grad_accum_steps - 1)
        mult = self._update(step, grad_norm=grad_norm)
        if self.scale.dynamic:
            self.scale.update(overflow=overflow)
        self.progress.mark(step + 1, "train")
        values = {"loss": loss, "lr_mult": mult, "grad_norm": grad_norm, "rank_ms": rank_ms}
        return values, Agreed(stop_count > 0, save_count > 0)

    @property
    def grad_scale(self) -> float:
        """Makes the summed gradient that of the mean loss."""
        return 1 / (self.plan.total_batch_size * self.scale.value)

    def _micro_steps(self, step: int) -> Tensor:
        """The step's gradients; returns this rank's loss, the sum over its tokens, () fp32."""
        nats_sum = torch.zeros((), device=self.device)
        for micro_step in range(self.plan.grad_accum_steps):
            self.progress.mark(step, "load", micro_step)
            idx, targets = self.loader.micro_batch(step, micro_step)  # (B, T) int64
            with self.optimizer.micro_step(last=micro_step == self.plan.grad_accum_steps - 1):
                self.progress.mark(step, "forward", micro_step)
                nats = self.forward(idx, targets)  # () fp32
                self.progress.mark(step, "backward", micro_step)
                (nats if self.scale.value == 1 else nats * self.scale.value).backward()  # type: ignore[no-untyped-call]
            nats_sum += nats.detach()
        return nats_sum

    def _update(self, step: int, *, grad_norm: float) -> float:
        """The optimizer's step, unless fp16 has overflowed; returns the learning rate's multiplier."""
        plan, config = self.plan, self.config
        mult = schedule.lr_mult(
            step,
            plan.num_steps,
            warmup_steps=config.warmup_steps,
            warmdown_ratio=config.warmdown_ratio,
            final_lr_frac=config.final_lr_frac,
        )
        if math.isfinite(grad_norm):
            clip = 1.0 if config.grad_clip is None else min(1.0, config.grad_clip / (grad_norm + 1e-6))
            self.optimizer.step(
                lr_mult=mult,
                momentum=schedule.muon_momentum(step, plan.num_steps, warmdown_ratio=config.warmdown_ratio),
                weight_decay_mult=schedule.weight_decay_mult(step, plan.num_steps),
                grad_scale=self.grad_scale * clip,
            )
        return mult

    def _evaluate(self, done: int) -> float:
        self.progress.mark(done, "eval")
        gc.collect()
        return self.evaluate()

    def _log(self, done: int, values: dict[str, Any], *, bpb: float | None, step_ms: float) -> None:
        if self.rank != 0:
            return
        plan = self.plan
        speed = plan.total_batch_size / (step_ms / 1000)
        share = mfu(speed / plan.world_size, plan.flops_per_token, plan.peak_flops)
        peak = peak_bytes(self.device)
        record: dict[str, Any] = {"step": done, "loss": values["loss"]}
        if bpb is not None:
            record["val_bpb"] = bpb
        if all(values["rank_ms"]) and not self.optimizer.waits_in_backward:
            record["rank_ms"] = [round(ms, 2) for ms in values["rank_ms"]]
        finite_norm = values["grad_norm"] if math.isfinite(values["grad_norm"]) else None
        self.metrics.append(
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
