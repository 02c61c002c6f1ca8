"""
What to do after an attempt has failed: retry, retry with less memory, continue on fewer devices, or stop. Pure.

The first rule that applies decides. dev/recovery_page.py writes docs/recovery.md from the rules. Why an attempt ended is
paceline.explain's question; its catalogue says for each cause whether a retry can help.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.explain.explanation import UNKNOWN
from paceline.explain.recorded_end import HANG, HOST_MEMORY
from paceline.options import Recovery
from paceline.units import format_number_of

Retry = Literal["never", "same", "smaller", "other-port", "other-checkpoint", "later"]
Action = Literal["stop", "retry", "smaller", "other-port", "older-checkpoint", "fewer-ranks", "await-hosts"]

MAX_WITHOUT_PROGRESS = 3
WAITS_S = (0.0, 1.0, 5.0, 30.0, 60.0)  # before an attempt, by the number of attempts in a row without progress
AWAIT_S = 1800.0  # for lost hosts without which a run cannot go on, while this machine is awake
UNAVAILABLE_WAIT_S = 30.0  # at least: a service or a full disk does not recover within a second

# A crash below Python comes from the machine or from a bug; a bug shows itself by crashing a second time.
CRASHES = frozenset({
    "sigsegv", "native-abort", "illegal-instruction", "floating-point-exception", "illegal-memory-access", "cuda-error",
    "nccl-cuda-failure", "nccl-internal-error", "nccl-p2p-failure", "nccl-p2p-hang", "gloo-connect-failure", "gpu-kernel-timeout",
    "cufft-failure", "sigbus",
})  # fmt: skip
# In a script these are the author's to fix. The trainer runs no code of the user's, so there they count as crashes.
TRAINER_CRASHES = CRASHES | {UNKNOWN, "user-code-exception", "cuda-driver-broken", "collective-bad-tensor"}


@dataclass(frozen=True)
class AttemptEnd:
    """How and why an attempt ended."""

    cause: str  # a cause of the catalogue, or one that only the supervisor knows: "hang", "refused", ...
    retry: Retry  # whether a retry can help, as the catalogue has it
    rank: int | None
    step: int | None
    new_checkpoint: bool  # the attempt made progress
    error: str  # the program's own error message; empty where something from outside ended it
    rolled_back: bool = False  # it ended itself to resume before a bad step and to skip that step's batch


@dataclass(frozen=True)
class Abilities:
    """What can be changed for the next attempt."""

    own_trainer: bool = False  # paceline's trainer; otherwise a script of the user's
    rows_on_host: bool = True  # ranks run on CPUs, so a smaller micro-batch needs less of the host's memory
    smaller: str | None = None  # the next configuration that needs less memory, as text
    ranks_left: int | None = None  # ranks that the remaining devices can run; None: no device is missing
    lost_hosts: tuple[str, ...] = ()  # that took part in the attempt
    hosts_left: tuple[str, ...] = ()  # with ranks_left ranks together, or those that cannot go on
    awaited_hosts: tuple[str, ...] = ()  # of the lost ones those that are tried again
    min_hosts: int = 1  # --min-hosts
    is_job_over: bool = False  # the Slurm job that this process is in, with its nodes
    is_folder_moved: bool = False  # the run folder was renamed during the attempt, which failed at its old place

    @property
    def too_few_hosts(self) -> str | None:
        """Says that fewer hosts are left than --min-hosts asks for; None where they are enough."""
        count = len(self.hosts_left)
        remaining = f"{format_number_of(count, 'host')} remain{'s' * (count == 1)}"
        return f"{remaining}, fewer than --min-hosts {self.min_hosts}" if 0 < count < self.min_hosts else None


@dataclass(frozen=True)
class Decision:
    """What to do next, and the reason in one line for the screen and events.jsonl."""

    action: Action
    wait_s: float
    why: str


@dataclass(frozen=True)
class Situation:
    """Everything that a rule may depend on."""

    history: Sequence[AttemptEnd]  # every attempt of this command, the last one last
    recovery: Recovery
    abilities: Abilities

    @property
    def last(self) -> AttemptEnd:
        """The attempt that has just ended."""
        return self.history[-1]

    @property
    def retry(self) -> Retry:
        """The catalogue's retry class, overridden where it depends on whose code ran."""
        own_trainer = self.abilities.own_trainer
        if self.last.retry == "never" and self.last.cause in (TRAINER_CRASHES if own_trainer else CRASHES):
            return "same"
        if own_trainer and self.last.cause == HOST_MEMORY and not self.abilities.rows_on_host:
            return "same"
        if own_trainer and self.last.cause == "disk-full":
            return "later"
        if not own_trainer and self.last.retry == "other-checkpoint":
            return "never"  # a script chooses the files that it reads
        return self.last.retry

    @property
    def is_changed_around_it(self) -> bool:
        """Whether a device or a host was lost or the run folder renamed, so that an error may be none of the program's own."""
        return (
            self.abilities.ranks_left is not None or bool(self.abilities.lost_hosts) or self.abilities.is_folder_moved
        )

    @property
    def num_without_progress(self) -> int:
        """Attempts in a row without a new checkpoint; those whose successor changes something are not counted."""
        count = 0
        for end in reversed(self.history):
            if end.new_checkpoint:
                break
            gets_smaller = end.retry == "smaller" and (self.abilities.rows_on_host or end.cause != HOST_MEMORY)
            count += not gets_smaller and not end.rolled_back
        return count

    @property
    def is_repeated_error(self) -> bool:
        """Whether an earlier attempt had the same error, or hung in the same place, at the same step.

        Only for errors that are not transient by nature. Of a hang in a script that shows no steps: without progress before it.
        """
        if not self.last.error or self.retry not in ("same", "other-checkpoint"):
            return False
        if self.last.cause == HANG and self.last.step is None and self.last.new_checkpoint:
            return False
        return any((end.error, end.step) == (self.last.error, self.last.step) for end in self.history[:-1])


@dataclass(frozen=True)
class Rule:
    """One row of the table."""

    id: str
    when: str  # for the docs
    applies: Callable[[Situation], bool]
    action: Action
    why: Callable[[Situation], str]
    wait: Literal["none", "back-off", "long"] = "none"


RULES = (
    Rule(
        "no-recover", "`--no-recover` was given",
        lambda state: not state.recovery.recover, "stop", lambda state: "--no-recover was given",
    ),
    Rule(
        "job-over", "the Slurm job that gave the nodes was cancelled or has ended",
        lambda state: state.abilities.is_job_over, "stop", lambda state: "the Slurm job that gave the nodes is over",
    ),
    Rule(
        "mistake", "the cause stays until somebody fixes it (`retry` is `never` in `paceline explain --list`)",
        lambda state: state.retry == "never" and not state.is_changed_around_it, "stop",
        lambda state: "another attempt would fail the same way",
    ),
    Rule(
        "max-attempts", f"`--max-attempts` attempts were made ({Recovery.max_attempts} by default)",
        lambda state: len(state.history) >= state.recovery.max_attempts, "stop",
        lambda state: f"{format_number_of(len(state.history), 'attempt was', 'attempts were')} made, --max-attempts allows no more",
    ),
    Rule(
        "rollback", "the loss was NaN or infinite or spiked, and `--on-nan rollback` skips the batch of that step",
        lambda state: state.last.rolled_back, "retry",
        lambda state: "skipping the bad batch" if state.last.step is None else f"skipping the batch of step {state.last.step:,}",
    ),
    Rule(
        "host-awaited",
        "a host was lost without which the run cannot go on, or all of them at once, as where this machine was offline or asleep:"
        f" the attempt is repeated once they answer again, within {AWAIT_S / 60:.0f} minutes (not with `--no-rejoin`)",
        lambda state: bool(state.abilities.awaited_hosts) and not state.abilities.ranks_left, "await-hosts",
        lambda state: f"lost {', '.join(state.abilities.lost_hosts)}"
        + (f": {few}" if (few := state.abilities.too_few_hosts) else ""),
    ),
    Rule(
        "no-host", "a host was lost, and fewer than `--min-hosts` remain, or they cannot hold the model or divide the batch",
        lambda state: bool(state.abilities.lost_hosts) and not state.abilities.ranks_left, "stop",
        lambda state: f"lost {', '.join(state.abilities.lost_hosts)}"
        + (f": {few}" if (few := state.abilities.too_few_hosts) else ", and the remaining hosts cannot go on"),
    ),
    Rule(
        "host-gone", "a host was lost, and others remain: the same steps on fewer hosts",
        lambda state: bool(state.abilities.lost_hosts), "fewer-ranks",
        lambda state: f"lost {', '.join(state.abilities.lost_hosts)}: continuing on {', '.join(state.abilities.hosts_left)}",
    ),
    Rule(
        "no-device", "a GPU was lost, and the remaining ones cannot hold the model or divide the batch",
        lambda state: state.abilities.ranks_left == 0, "stop",
        lambda state: "lost a GPU, and the remaining ones cannot hold the model or divide the batch",
    ),
    Rule(
        "device-gone", "a GPU was lost, and others remain: the same steps on fewer GPUs",
        lambda state: state.abilities.ranks_left is not None, "fewer-ranks",
        lambda state: f"lost a GPU: continuing on {state.abilities.ranks_left}", "back-off",
    ),
    Rule(
        "out-of-memory",
        "a GPU or the host ran out of memory: a smaller micro-batch with more micro-steps, then activation checkpointing",
        lambda state: state.retry == "smaller" and state.abilities.smaller is not None, "smaller",
        lambda state: f"memory ran out: {state.abilities.smaller}", "back-off",
    ),
    Rule(
        "nothing-smaller", "memory ran out, and no smaller configuration exists, or a script chooses its own sizes",
        lambda state: state.retry == "smaller", "stop",
        lambda state: "memory ran out, and "
        + ("no smaller configuration exists" if state.abilities.own_trainer else "the script chooses its own sizes"),
    ),
    Rule(
        "same-error",
        "the program ended with the same message, or hung in the same place, at the same step as in an earlier attempt, and the"
        " cause is none that passes by itself: a port in use, or a service, a disk or a network that is unavailable",
        lambda state: state.is_repeated_error, "stop",
        lambda state: "the same " + ("hang" if state.last.cause == HANG else "error")
        + ("" if state.last.step is None else f" at step {state.last.step:,}")
        + " as in an earlier attempt: it is not transient",
    ),
    Rule(
        "no-progress",
        f"{MAX_WITHOUT_PROGRESS} attempts in a row made no progress: no new checkpoint, or for a script less than ten minutes",
        lambda state: state.num_without_progress >= MAX_WITHOUT_PROGRESS, "stop",
        lambda state: f"{MAX_WITHOUT_PROGRESS} attempts in a row made no progress",
    ),
    Rule(
        "folder-moved", "the run folder was renamed during the attempt, which failed at its old place",
        lambda state: state.abilities.is_folder_moved, "retry", lambda state: "continuing in the renamed folder",
    ),
    Rule(
        "port-taken", "a port is in use: the next attempt uses another one",
        lambda state: state.retry == "other-port", "other-port", lambda state: "port in use: retrying on another port", "back-off",
    ),
    Rule(
        "checkpoint-damaged", "a checkpoint is damaged: the next attempt uses the one before it",
        lambda state: state.retry == "other-checkpoint", "older-checkpoint",
        lambda state: "using the newest intact checkpoint", "back-off",
    ),
    Rule(
        "disk-full", "in a training, the disk had no room for the last checkpoint, or for anything at all: somebody may make room",
        lambda state: state.retry == "later" and state.last.cause == "disk-full", "retry",
        lambda state: "the disk was full and may have room by then", "long",
    ),
    Rule(
        "away", "a service, a disk or a network is unavailable and usually comes back by itself",
        lambda state: state.retry == "later", "retry", lambda state: "what was unavailable may be back by then", "long",
    ),
    Rule(
        "transient",
        "anything else, usually transient: a killed or hung rank, a lost connection; in paceline's own trainer any crash, once",
        lambda state: True, "retry",
        lambda state: "the port may be free then" if state.last.cause == "port-in-use" else "this is usually transient", "back-off",
    ),
)  # fmt: skip


def decide(state: Situation) -> Decision:
    """Returns what to do next. The first rule that applies decides; the last one always does."""
    rule = next(rule for rule in RULES if rule.applies(state))
    wait_s = 0.0 if rule.wait == "none" else WAITS_S[min(state.num_without_progress, len(WAITS_S) - 1)]
    if rule.wait == "long":
        wait_s = max(wait_s, UNAVAILABLE_WAIT_S)
    return Decision(rule.action, wait_s, rule.why(state))
