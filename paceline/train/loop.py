"""
The training loop: micro-steps, one collective for what ranks must agree on, update, metrics, evaluation, checkpoint, stop.

Seeds: what must be equal on all ranks (initial weights, order of rows) comes from `seed` alone; what must differ between ranks
(torch's global generators) is seeded with (seed, rank) and saved in the checkpoint. Only rank 0 writes shared files. Ranks wait for
each other only in the optimizer's own collectives, in and after an evaluation and at the end; nothing else needs a barrier.
"""

import gc
import logging
import math
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from statistics import fmean
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from paceline.config import Config
from paceline.data.dataset import Int64s, TokenSplit, batch_of_step, rows_of_step
from paceline.heartbeat import HeartbeatWriter
from paceline.model.linear import LowProducts
from paceline.plan.cost import mfu
from paceline.plan.planner import Plan
from paceline.rundir import RunDir, append_event, append_json_line, resume_command, utc_now
from paceline.train.optim import ShardedOptimizer
from paceline.train.process import BusyClock, StopRequest, any_rank, peak_bytes
from paceline.train.trouble import LossGuard, LossTrouble, find_trouble
from paceline.train.updates import lr_mult, momentum_of_step, weight_decay_mult
from paceline.units import format_bytes, format_duration, format_mfu

# B device_batch_size, the rows of a micro-batch; T tokens in a row

log = logging.getLogger("paceline")

Rows = tuple[Int64s, Int64s]  # idx and targets, (B, T)
# step and micro-step -> idx and targets, (B, T) int64 on the device
MicroBatch = Callable[[int, int], tuple[Tensor, Tensor]]
MEMORY_STEPS = 20  # steps of an attempt before its memory is recorded: the peak no longer grows
SCALE_GROWTH_STEPS = 2000  # fp16: so many good steps double the loss scale, as in torch.amp.GradScaler
# in a row: a million times smaller, the gradient still overflows, so the scale is not the reason
MAX_SKIPPED_STEPS = 20


@dataclass
class LossScale:
    """fp16's loss scale: it lifts small gradients above fp16's smallest number, and stays 1 in other precisions.

    A step whose gradients overflow is skipped and halves it.
    """

    value: float = 1.0
    good_steps: int = 0
    skipped_steps: int = 0  # in a row, up to now
    dynamic: bool = False

    @property
    def may_skip(self) -> bool:
        """Whether a step whose gradient is not finite may be skipped, so that the next one has a smaller scale."""
        return self.dynamic and self.skipped_steps < MAX_SKIPPED_STEPS

    def update(self, *, overflow: bool) -> None:
        """Adjusts the scale after a step."""
        if overflow:
            self.value, self.good_steps = self.value / 2, 0
            self.skipped_steps += 1
            return
        self.good_steps, self.skipped_steps = self.good_steps + 1, 0
        if self.dynamic and self.good_steps % SCALE_GROWTH_STEPS == 0:
            self.value *= 2

    def state_dict(self) -> dict[str, float]:
        """Returns the state for a checkpoint."""
        return {"value": self.value, "good_steps": self.good_steps, "skipped_steps": self.skipped_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what state_dict returned; a scale that changes stays where another precision's was saved, which does not."""
        fresh = LossScale().state_dict()
        state = {**fresh, **state}  # checkpoints of earlier versions have no skipped_steps
        if self.dynamic and state != fresh:
            self.value, self.good_steps = float(state["value"]), int(state["good_steps"])
            self.skipped_steps = int(state["skipped_steps"])


def loss_scale(plan: Plan) -> LossScale:
    """Returns the first scale: fp16's is 2**16 on the mean loss, as in torch.amp.GradScaler, but our loss is a sum over tokens."""
    if plan.precision != "fp16":
        return LossScale()
    tokens = plan.device_batch_size * plan.model.sequence_len
    return LossScale(float(2 ** max(0, 16 - (tokens - 1).bit_length())), dynamic=True)


@dataclass
class TrainLoader:
    """Loads the micro-batches of one rank; a thread reads the next one from disk while the device works on this one.

    A micro-batch depends on its step and number alone, and on the batches that the run skips: nothing is to be saved or restored.
    """

    split: TokenSplit
    plan: Plan
    seed: int
    rank: int
    device: torch.device
    skipped_batches: Collection[int]

    def __post_init__(self) -> None:
        self._reader = ThreadPoolExecutor(1, "loader")
        self._next: tuple[tuple[int, int], Future[Rows]] | None = None  # step and micro-step, and what the thread reads

    def rows_of(self, step: int, micro_step: int) -> Int64s:
        """Returns this rank's rows of a micro-step, (B,) int64; all of them together are the step's rows, once each."""
        plan, num_rows = self.plan, self.split.num_rows(self.plan.model.sequence_len)
        batch = batch_of_step(step, self.skipped_batches)
        step_rows = rows_of_step(batch, rows_per_step=plan.rows_per_step, num_rows=num_rows, seed=self.seed)
        start = (micro_step * plan.world_size + self.rank) * plan.device_batch_size
        assert start + plan.device_batch_size <= len(step_rows), (
            f"no rows for rank {self.rank} in micro-step {micro_step}"
        )
        return step_rows[start : start + plan.device_batch_size]

    def files_of(self, step: int) -> list[str]:
        """Returns the names of the shards that hold this rank's rows of a step."""
        rows = [self.rows_of(step, micro_step) for micro_step in range(self.plan.grad_accum_steps)]
        return self.split.files_of(np.concatenate(rows), self.plan.model.sequence_len)

    def micro_batch(self, step: int, micro_step: int) -> tuple[Tensor, Tensor]:
        """Returns idx and targets, (B, T) int64 on the device; targets of -1 do not count. The thread's errors are raised here."""
        if self._next and self._next[0] == (step, micro_step):
            idx, targets = self._next[1].result()
        else:
            idx, targets = self._read(step, micro_step)
        last = micro_step + 1 == self.plan.grad_accum_steps
        following = (step + 1, 0) if last else (step, micro_step + 1)
        within = following[0] < self.plan.num_steps
        self._next = (following, self._reader.submit(self._read, *following)) if within else None
        return to_device(idx, self.device), to_device(targets, self.device)

    def _read(self, step: int, micro_step: int) -> Rows:
        return self.split.rows(self.rows_of(step, micro_step), self.plan.model.sequence_len)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Returns the array as a tensor on the device; through pinned memory to a GPU, so that the CPU does not wait for the copy."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@dataclass
class Loop:
    """One rank's training. The worker passes the functions for an evaluation, a checkpoint and a sample."""

    run: RunDir
    config: Config
    plan: Plan
    optimizer: ShardedOptimizer
    micro_batch: MicroBatch
    rank: int
    device: torch.device
    progress: HeartbeatWriter
    stop: StopRequest
    low_products: LowProducts | None = None
    evaluate: Callable[[], float] = lambda: 0.0  # set by the worker; train/probe.py takes single steps and needs none
    save: Callable[[int, float | None], None] = lambda step, bpb: None
    sample: Callable[[int], None] = lambda step: None
    record_memory: Callable[[int], None] = lambda step: None
    can_save_again: Callable[[], bool] = lambda: False  # whether the last save found no space and now there is some

    def __post_init__(self) -> None:
        self.busy = BusyClock(self.device)
        self.scale, self.guard = loss_scale(self.plan), LossGuard(self.config.max_loss_spike)

    def train(self, start_step: int) -> tuple[int, float | None, bool]:
        """Trains from start_step to the end of the plan; returns the steps done, the last val_bpb, and whether it stopped early."""
        plan = self.plan
        if start_step == 0 and self.config.eval_every:
            self._evaluate_first()
        seconds: list[float] = []  # of the steps since the last line of metrics, without evaluations and samples
        bpb: float | None = None
        self.progress.beat(start_step, "train")
        for step in range(start_step, plan.num_steps):
            started = time.perf_counter()
            values, stopping, saving = self.one_step(step)
            self.stop.training = True
            seconds.append(time.perf_counter() - started)
            done = step + 1
            last = done == plan.num_steps
            if done == start_step + 1:
                freeze_objects()
            due, bpb = last or _due(done, self.config.eval_every), None
            if due and not stopping:
                self.progress.beat(done, "eval")
                gc.collect()
                bpb = self._finite_bpb(done)
                stopping = any_rank(self.stop.is_set, self.device)  # all ranks then stop before the next step
            if last or stopping or due or done == start_step + 1 or done % self.config.log_every == 0:
                self._log(done, values, bpb=bpb, step_ms=1000 * fmean(seconds))
                seconds.clear()
                self.busy.forget()
            if last or stopping or saving or _due(done, self.config.save_every):
                self.progress.beat(done, "save")
                self.save(done, bpb)
            if not stopping and (last or _due(done, self.config.sample_every)):
                self.progress.beat(done, "sample")
                self.sample(done)
            if done == start_step + MEMORY_STEPS:
                self.record_memory(done)
            if stopping:
                return done, bpb, not last
        return plan.num_steps, bpb, False

    def _evaluate_first(self) -> None:
        """Evaluates the first weights, so that the curve of val_bpb begins where the training does. Collective."""
        self.progress.beat(0, "eval")
        bpb = self._finite_bpb(0)
        if self.rank == 0 and bpb is not None:
            append_json_line(self.run.metrics, {"step": 0, "val_bpb": bpb, "time": utc_now()}, quiet=True)
            log.info(f"step {0:0{len(str(self.plan.num_steps))}d}/{self.plan.num_steps} | val_bpb {bpb:.4f}")

    def _finite_bpb(self, step: int) -> float | None:
        """Evaluates. A val_bpb that is not finite is reported and left out: the next step's loss decides what to do. Collective."""
        bpb = self.evaluate()
        if math.isfinite(bpb):
            return bpb
        if self.rank == 0:
            append_event(
                self.run, "note", text=f"the evaluation at step {step:,} gave {bpb} as val_bpb, which is left out"
            )
        return None

    def one_step(self, step: int) -> tuple[dict[str, Any], bool, bool]:
        """Does forward, backward, agreement and update. Collective.

        Returns the step's metrics, and whether at least one rank requested a stop, and a save: all ranks then do it.
        """
        plan, optimizer = self.plan, self.optimizer
        optimizer.zero_grad()
        self.busy.start()
        nats_sum = self._micro_steps(step)
        self.busy.stop()
        # a slot for each rank: its busy time, or -1 where its loss is NaN or infinite; the sum over ranks shows all slots to all
        busy_ms = torch.zeros(plan.world_size, device=self.device)
        busy_ms[self.rank] = torch.where(nats_sum.isfinite(), self.busy.mean_ms, -1.0)
        # the ranks that request a stop, and those that request a save, counted in one number to the base world_size + 1
        request = self.stop.is_set + (plan.world_size + 1) * self.can_save_again()
        requests = torch.full((1,), float(request), device=self.device)
        self.progress.beat(step, "reduce", plan.grad_accum_steps - 1)
        # the step's one wait for the device: loss, requests and gradient norm decide what comes next on every rank alike. A NaN of
        # one rank must not spoil the sum that says which rank it was, so it is sent as 0.
        loss_sum, requests_sum, *rank_ms, squares = optimizer.reduce(
            torch.cat([nats_sum.nan_to_num(0, 0, 0)[None], requests, busy_ms])
        ).tolist()
        save_count, stop_count = divmod(int(requests_sum), plan.world_size + 1)
        loss = loss_sum / plan.total_batch_size
        grad_norm = math.sqrt(squares) * self.grad_scale if math.isfinite(squares) else math.inf
        overflow = not math.isfinite(grad_norm)
        bad_ranks = tuple(rank for rank, ms in enumerate(rank_ms) if ms < 0)
        trouble = find_trouble(
            self.guard,
            step + 1,
            loss=loss,
            bad_ranks=bad_ranks,
            gradient_bad=overflow and not self.scale.may_skip,
            skipped_steps=self.scale.skipped_steps,
        )
        if trouble is not None:
            fix = (
                f"see {self.run.trouble(step + 1)}; then {resume_command(self.run)} with a lower --matrix-lr or"
                " --embedding-lr, or with --on-nan rollback, which skips the batch of this step"
            )
            raise LossTrouble(trouble.message, fix=fix, trouble=trouble, rank_nats=float(nats_sum))
        self.progress.beat(step, "update", plan.grad_accum_steps - 1)
        mult = self._update(step, grad_norm=grad_norm)
        if self.scale.dynamic:
            self.scale.update(overflow=overflow)
        self.progress.beat(step + 1, "train")
        values = {"loss": loss, "lr_mult": mult, "grad_norm": grad_norm, "rank_ms": rank_ms}
        return values, stop_count > 0, save_count > 0

    @property
    def grad_scale(self) -> float:
        """Returns the factor that turns the summed gradient into that of the mean loss."""
        return 1 / (self.plan.total_batch_size * self.scale.value)

    def _micro_steps(self, step: int) -> Tensor:
        """Computes the step's gradients; returns this rank's loss, the sum over its tokens, () fp32."""
        # stays on the device: an .item() here would stall the next micro-step
        nats_sum = torch.zeros((), device=self.device)
        for micro_step in range(self.plan.grad_accum_steps):
            self.progress.beat(step, "load", micro_step)
            idx, targets = self.micro_batch(step, micro_step)  # (B, T) int64
            self.begin(step, micro_step)
            # the loss is a sum over tokens, so gradients add up over micro-steps and ranks, and grad_scale divides once at the end
            with self.optimizer.micro_step(last=micro_step == self.plan.grad_accum_steps - 1):
                self.progress.beat(step, "forward", micro_step)
                nats = self.forward(idx, targets)
                self.progress.beat(step, "backward", micro_step)
                nats.backward()  # type: ignore[no-untyped-call]
            nats_sum += nats.detach()
        return nats_sum

    def begin(self, step: int, micro_step: int) -> None:
        """Prepares products in a low precision for a micro-step, or ends them where the run's last steps are in 16 bits."""
        low, plan = self.low_products, self.plan
        if low is None:
            return
        if step >= (1 - self.config.bf16_finish) * plan.num_steps:
            low.end()
            return
        # of all ranks: random bits are of a batch, whichever rank has it
        number = micro_step * plan.world_size + self.rank
        low.begin(seed=self.config.seed, step=step, micro_step=micro_step, micro_batch=number)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        """Returns a micro-step's loss, () fp32, whose gradient comes times the loss scale: lm_head's is made in forward already."""
        scale = torch.full((), self.scale.value, device=self.device) if self.scale.dynamic else None
        return cast(Tensor, self.optimizer.module(idx, targets, grad_scale=scale))

    def _update(self, step: int, *, grad_norm: float) -> float:
        """Takes the optimizer's step, unless fp16 has overflowed; returns the learning rate's multiplier."""
        plan, config = self.plan, self.config
        multiplier = lr_mult(
            step,
            plan.num_steps,
            warmup_steps=config.warmup_steps,
            warmdown_ratio=config.warmdown_ratio,
            final_lr_frac=config.final_lr_frac,
        )
        if math.isfinite(grad_norm):
            clip = 1.0 if config.grad_clip is None else min(1.0, config.grad_clip / (grad_norm + 1e-6))
            self.optimizer.step(
                lr_mult=multiplier,
                momentum=momentum_of_step(step, plan.num_steps, warmdown_ratio=config.warmdown_ratio),
                weight_decay_mult=weight_decay_mult(step, plan.num_steps),
                grad_scale=self.grad_scale * clip,
            )
        return multiplier

    def _log(self, done: int, values: dict[str, Any], *, bpb: float | None, step_ms: float) -> None:
        if self.rank != 0:
            return
        plan = self.plan
        speed = plan.total_batch_size / (step_ms / 1000)
        utilization = mfu(speed / plan.world_size, plan.flops_per_token, plan.peak_flops)
        peak = peak_bytes(self.device)
        record: dict[str, Any] = {"step": done, "loss": values["loss"]}
        if bpb is not None:
            record["val_bpb"] = bpb
        if all(values["rank_ms"]) and not self.optimizer.waits_in_backward:
            record["rank_ms"] = [round(ms, 2) for ms in values["rank_ms"]]
        record |= {
            "lr_mult": round(values["lr_mult"], 6),
            "grad_norm": values["grad_norm"] if math.isfinite(values["grad_norm"]) else None,
            "step_ms": round(step_ms, 2),
            "tok_per_sec": round(speed, 1),
            "mfu": utilization,
            "peak_bytes": peak,
            "time": utc_now(),
        }
        append_json_line(self.run.metrics, record, quiet=True)
        width = len(str(plan.num_steps))
        eta = format_duration((plan.num_steps - done) * step_ms / 1000)
        val = f" | val_bpb {bpb:.4f}" if bpb is not None else ""
        log.info(
            f"step {done:0{width}d}/{plan.num_steps} | loss {values['loss']:.4f}{val} | {step_ms:,.0f} ms | {speed:,.0f} tok/s"
            f" | mfu {format_mfu(utilization)} | {format_bytes(peak)} | eta {eta}"
        )


def freeze_objects() -> None:
    """Ends automatic garbage collection: one in a step costs up to half a second, evaluations do it instead."""
    gc.collect()
    gc.freeze()  # model and optimizer objects live to the end: later collections need not visit them
    gc.disable()


def _due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0
