"""
Loss trouble: a step whose loss or gradient is NaN or infinite, or whose loss spikes; its evidence, and the rollback.

Trouble is detected before the update, from the values that the step's collective has brought to the host anyway: every rank judges
alike and no step waits longer for it. Evidence goes to RUN/trouble/. A rollback is a line in RUN/skipped.json and the end of the
attempt: the next one resumes from the last checkpoint and skips the batch, which is the rows of the step (data/dataset.py). The
file belongs to the run as its seed does: whoever resumes it, on any number of ranks, skips the same rows.
"""

import json
from dataclasses import dataclass
from typing import Any, Literal

from paceline.data.dataset import batch_of_step
from paceline.errors import TrainingFailed
from paceline.model.checkpoint import resume_before
from paceline.model.manifest import list_checkpoints
from paceline.rundir import RunDir, append_event, resume_command, utc_now, write_atomic
from paceline.train.process import broadcast_object
from paceline.units import format_number_of

MAX_ROLLBACKS = 3  # in the whole life of a run: more are not caused by the text alone
MEAN_STEPS = 20  # steps whose mean loss a spike is measured against, about

Cause = Literal["loss-nan", "gradient-nan", "loss-spike"]


@dataclass(frozen=True)
class Trouble:
    """What is wrong with one step, the same on every rank; it has not changed any weight."""

    cause: Cause
    step: int  # counted from 1, as on the screen
    message: str
    loss: float | None  # of all ranks; None: not finite
    bad_ranks: tuple[int, ...] = ()


class LossTrouble(TrainingFailed):
    """Ends the attempt. rank_nats: the summed loss of this rank's tokens. rollback: the next attempt skips the batch."""

    def __init__(self, message: str, *, fix: str, trouble: Trouble, rank_nats: float = 0.0, rollback: bool = False):
        super().__init__(message, fix=fix)
        self.trouble, self.rank_nats, self.rollback = trouble, rank_nats, rollback

    @property
    def record(self) -> dict[str, Any]:
        """Returns fields for the rank's error file, in addition to those of every error."""
        return {"cause": self.trouble.cause, "step": self.trouble.step, "rollback": self.rollback}


@dataclass
class LossGuard:
    """Compares each step's loss with the mean of those before it; the mean is part of the checkpoint."""

    max_spike: float | None = None  # nats
    mean: float | None = None

    def check(self, loss: float) -> float | None:
        """Returns by how much a loss exceeds the mean, where that is too much; otherwise adds it to the mean and returns None."""
        rise = 0.0 if self.mean is None else loss - self.mean
        if self.max_spike is not None and rise > self.max_spike:
            return rise
        self.mean = loss if self.mean is None else self.mean + (loss - self.mean) / MEAN_STEPS
        return None

    def state_dict(self) -> dict[str, float | None]:
        """Returns the state for a checkpoint."""
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what state_dict returned."""
        self.mean = state["mean"]


def find_trouble(
    guard: LossGuard, step: int, *, loss: float, bad_ranks: tuple[int, ...], gradient_bad: bool, skipped_steps: int = 0
) -> Trouble | None:
    """Returns what is wrong with a step, or None. step: counted from 1. loss: the mean over all ranks but bad_ranks.

    skipped_steps: in fp16, those just before whose gradients were not finite either.
    """
    if bad_ranks:
        ranks = f"rank{'s' if len(bad_ranks) > 1 else ''} {', '.join(map(str, bad_ranks))}"
        message = f"the loss is not finite at step {step} on {ranks}"
        return Trouble("loss-nan", step, message, None, bad_ranks)
    if gradient_bad:
        message = f"the gradient is not finite at step {step}, the loss still is"
        if skipped_steps:
            skipped = format_number_of(skipped_steps, "step before it was", "steps before it were")
            message += f"; {skipped} skipped for that, each with half the loss scale"
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
    """Returns the batches that the run skips, in the order in which they were detected."""
    if not run.skipped_json.exists():
        return []
    skipped: list[dict[str, Any]] = json.loads(run.skipped_json.read_text(encoding="utf-8"))["batches"]
    return skipped


def answer_trouble(run: RunDir, error: LossTrouble, *, on_nan: str, rank: int, bad_weight: str | None) -> LossTrouble:
    """Records the trouble on rank 0, which decides; returns the error that ends the attempt, the same on all ranks. Collective.

    bad_weight: a parameter that already held NaN or infinity before the step.
    """
    trouble, answer = error.trouble, (error.message, error.fix, False)
    if rank == 0:
        fields = {"loss": trouble.loss, "ranks": list(trouble.bad_ranks), "evidence": str(run.trouble(trouble.step))}
        append_event(run, "trouble", step=trouble.step, cause=trouble.cause, message=trouble.message, **fields)
        if bad_weight is not None:  # no batch is to blame
            answer = explain_bad_weight(run, error, bad_weight)
        elif on_nan == "rollback":
            answer = plan_rollback(run, error)
    message, fix, rollback = broadcast_object(answer)
    return LossTrouble(message, fix=fix, trouble=trouble, rollback=rollback)


def explain_bad_weight(run: RunDir, error: LossTrouble, name: str) -> tuple[str, str, bool]:
    """Returns message and fix where the weights of a step are NaN or infinite, and that no batch is skipped."""
    saved = list_checkpoints(run.checkpoints, skip_unreadable=True)
    has_them = saved and saved[0][1].step == error.trouble.step - 1
    message = f"{error.message}: the weights held NaN or infinity before it, first in {name}"
    return message, resume_before(saved[0][0]) if has_them else lower_rates(run), False


def lower_rates(run: RunDir) -> str:
    """Returns the fix for a training that its learning rates may have broken."""
    return f"{resume_command(run)} with a lower --matrix-lr or --embedding-lr"


def plan_rollback(run: RunDir, error: LossTrouble) -> tuple[str, str, bool]:
    """Adds the batch of the troubled step to skipped.json, on rank 0; returns message and fix, and whether it is skipped."""
    trouble, skipped = error.trouble, load_skipped(run)
    number = len(skipped) + 1
    if number > MAX_ROLLBACKS:
        steps = ", ".join(f"{batch['step']:,}" for batch in skipped)
        message = f"{error.message}; {len(skipped)} batches were skipped already, at steps {steps}"
        return message, lower_rates(run), False
    saved = list_checkpoints(run.checkpoints)
    last_saved = saved[0][1].step if saved else 0
    batch = batch_of_step(trouble.step - 1, [batch["batch"] for batch in skipped])
    record = {"batch": batch, "step": trouble.step, "cause": trouble.cause, "loss": trouble.loss, "time": utc_now()}
    write_atomic(run.skipped_json, json.dumps({"batches": [*skipped, record]}, indent=1) + "\n")
    counted = {"number": number, "at_most": MAX_ROLLBACKS}
    append_event(run, "rollback", step=trouble.step, to_step=last_saved, batch=batch, cause=trouble.cause, **counted)
    back = f"step {last_saved:,}" if last_saved else "the start"
    message = f"{error.message}; rollback {number} of at most {MAX_ROLLBACKS}: back to {back}, skipping the batch of this step"
    return message, f"{resume_command(run)} goes on without this batch", True
