"""
Loss trouble: a step whose loss or gradient is no number, or whose loss leaps. How it is seen, what is kept of it, the way past it.

It is seen before the update, from what the step's collective has brought to the host anyway: every rank judges alike and no step
waits longer for it. Evidence goes to RUN/trouble/. A rollback is a line in RUN/skipped.json and the end of the attempt: the next
one goes on from the last checkpoint and passes over the batch, that is the rows of the step (data/order.py). The file belongs to
the run as its seed does: whoever resumes it, on any number of ranks, passes over the same rows.
"""

# T tokens in a row

import json
import logging
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from paceline.data.order import batch_of_step
from paceline.errors import TrainingFailed
from paceline.model.checkpoint import list_checkpoints
from paceline.model.gpt import GPT
from paceline.rundir import RunDir, append_event, utc_now, write_atomic
from paceline.train.dist import broadcast_object
from paceline.train.loader import TrainLoader
from paceline.train.optim import ReplicatedAdamW, ShardedOptimizer

log = logging.getLogger("paceline")

MAX_ROLLBACKS = 3  # in the whole life of a run: more is no accident of the text
MEAN_STEPS = 20  # about so many steps make the mean that a spike stands out from

Cause = Literal["loss-nan", "gradient-nan", "loss-spike"]


@dataclass(frozen=True)
class Trouble:
    """What one step met, the same on every rank; no weight has been touched by it."""

    cause: Cause
    step: int  # counted from 1, as on the screen
    message: str
    loss: float | None  # of all ranks; None: no number
    bad_ranks: tuple[int, ...] = ()

    def explained(self, run: RunDir, *, rank_nats: float) -> "LossTrouble":
        fix = (
            f"see {run.trouble(self.step)}; then lower --matrix-lr or --embedding-lr, or --on-nan rollback to go past the rows"
            f" of this step: paceline resume {run.path}"
        )
        return LossTrouble(self.message, fix=fix, trouble=self, rank_nats=rank_nats)


class LossTrouble(TrainingFailed):
    """Ends the attempt. rank_nats: the loss of this rank's tokens, summed. rollback: the next attempt goes past it."""

    def __init__(self, message: str, *, fix: str, trouble: Trouble, rank_nats: float = 0.0, rollback: bool = False):
        super().__init__(message, fix=fix)
        self.trouble, self.rank_nats, self.rollback = trouble, rank_nats, rollback

    @property
    def record(self) -> dict[str, Any]:
        """For the rank's error file, beside what every error has."""
        return {"cause": self.trouble.cause, "step": self.trouble.step, "rollback": self.rollback}


@dataclass
class LossGuard:
    """Holds each step's loss against the mean of those before it; the mean is part of the checkpoint."""

    max_spike: float | None = None  # nats
    mean: float | None = None

    def check(self, loss: float) -> float | None:
        """By how much a loss exceeds the mean, where that is too much; else it counts towards the mean."""
        rise = 0.0 if self.mean is None else loss - self.mean
        if self.max_spike is not None and rise > self.max_spike:
            return rise
        self.mean = loss if self.mean is None else self.mean + (loss - self.mean) / MEAN_STEPS
        return None

    def state_dict(self) -> dict[str, float | None]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]


def find_trouble(
    guard: LossGuard, step: int, *, loss: float, bad_ranks: tuple[int, ...], gradient_bad: bool
) -> Trouble | None:
    """step: counted from 1. loss: the mean over all ranks' tokens, where none of bad_ranks spoils it."""
    if bad_ranks:
        ranks = f"rank{'s' if len(bad_ranks) > 1 else ''} {', '.join(map(str, bad_ranks))}"
        message = f"the loss is not finite at step {step} on {ranks}"
        return Trouble("loss-nan", step, message, None, bad_ranks)
    if gradient_bad:
        message = f"the gradient is not finite at step {step}, the loss still is"
        return Trouble("gradient-nan", step, message, loss)
    rise = guard.check(loss)
    if rise is None:
        return None
    message = (
        f"the loss leaps to {loss:.4f} at step {step}, {rise:.4f} above its recent mean"
        f" (--max-loss-spike {guard.max_spike:g})"
    )
    return Trouble("loss-spike", step, message, loss)


def load_skipped(run: RunDir) -> list[dict[str, Any]]:
    """The batches that the run passes over, in the order in which they were found."""
    if not run.skipped_json.exists():
        return []
    skipped: list[dict[str, Any]] = json.loads(run.skipped_json.read_text(encoding="utf-8"))["batches"]
    return skipped


def answer_trouble(
    run: RunDir, error: LossTrouble, skipped: list[dict[str, Any]], *, on_nan: str, rank: int
) -> LossTrouble:
    """Rank 0 notes what the step met, and decides; the error that ends the attempt is the same on all. Collective."""
    trouble, ending = error.trouble, error
    if rank == 0:
        fields = {"loss": trouble.loss, "ranks": list(trouble.bad_ranks), "evidence": str(run.trouble(trouble.step))}
        append_event(run, "trouble", step=trouble.step, cause=trouble.cause, message=trouble.message, **fields)
        if on_nan == "rollback":
            saved = list_checkpoints(run.checkpoints)
            ending = plan_rollback(run, error, skipped, last_saved=saved[0].step if saved else 0)
    message, fix, rollback = broadcast_object((ending.message, ending.fix, ending.rollback))
    return LossTrouble(message, fix=fix, trouble=trouble, rollback=rollback)


def plan_rollback(run: RunDir, error: LossTrouble, skipped: list[dict[str, Any]], *, last_saved: int) -> LossTrouble:
    """By rank 0: the batch of the troubled step goes to skipped.json. Returns the error that ends this attempt."""
    trouble, number = error.trouble, len(skipped) + 1
    if number > MAX_ROLLBACKS:
        steps = ", ".join(f"{each['step']:,}" for each in skipped)
        message = f"{error.message}; the rows of {len(skipped)} steps ({steps}) have been passed over already"
        fix = f"lower --matrix-lr or --embedding-lr and go on from the last checkpoint: paceline resume {run.path}"
        return LossTrouble(message, fix=fix, trouble=trouble)
    batch = batch_of_step(trouble.step - 1, [each["batch"] for each in skipped])
    record = {"batch": batch, "step": trouble.step, "cause": trouble.cause, "loss": trouble.loss, "time": utc_now()}
    write_atomic(run.skipped_json, json.dumps({"batches": [*skipped, record]}, indent=1) + "\n")
    counted = {"number": number, "at_most": MAX_ROLLBACKS}
    append_event(run, "rollback", step=trouble.step, to_step=last_saved, batch=batch, cause=trouble.cause, **counted)
    back = f"step {last_saved:,}" if last_saved else "the start"
    return LossTrouble(
        f"{error.message}; rollback {number} of at most {MAX_ROLLBACKS}: back to {back}, past the rows of this step",
        fix=f"paceline resume {run.path} goes on without these rows",
        trouble=trouble,
        rollback=True,
    )


@torch.no_grad()
def keep_evidence(
    run: RunDir,
    error: LossTrouble,
    *,
    attempt: int,
    rank: int,
    model: GPT,
    optimizer: ShardedOptimizer | ReplicatedAdamW,
    loader: TrainLoader,
    grad_scale: float,
) -> None:
    """This rank's rows of the step, the loss of each from a second forward, and norms per parameter, to RUN/trouble/.

    A second forward that finds all well where the first did not speaks against the machine, not against the rows.
    """
    trouble, step = error.trouble, error.trouble.step - 1
    rows = [loader.rows_of(step, micro_step).tolist() for micro_step in range(loader.plan.grad_accum_steps)]
    row_loss: list[float | None] = []
    for micro_step in range(loader.plan.grad_accum_steps):
        idx, targets = loader.micro_batch(step, micro_step)
        row_loss += numbers(row_means(model(idx, targets, reduction="none"), targets))
    num_tokens = loader.plan.total_batch_size // loader.plan.world_size
    evidence = {
        "time": utc_now(),
        "step": trouble.step,
        "cause": trouble.cause,
        "message": trouble.message,
        "rank": rank,
        "attempt": attempt,
        "loss": finite(error.rank_nats / num_tokens),
        "loss_of_all_ranks": trouble.loss,
        "bad_ranks": list(trouble.bad_ranks),
        "batch": batch_of_step(step, loader.passed_over),
        "rows": [row for micro_batch in rows for row in micro_batch],
        "row_loss": row_loss,
        "parameters": optimizer.norms(grad_scale=grad_scale),
    }
    path = run.trouble(trouble.step) / f"attempt_{attempt}_rank_{rank}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(evidence, indent=1, allow_nan=False) + "\n")
    except OSError as problem:  # the trouble itself matters more
        log.warning(f"{path} cannot be written: {problem.strerror}")


def row_means(nats: Tensor, targets: Tensor) -> Tensor:
    """nats, targets: (B, T) -> (B,): each row's loss per token that counts."""
    return nats.sum(1) / (targets >= 0).sum(1).clamp_min(1)


def numbers(values: Tensor) -> list[float | None]:
    return [finite(value) for value in values.tolist()]


def finite(value: float) -> float | None:
    """JSON knows no infinity and no NaN."""
    return value if math.isfinite(value) else None
