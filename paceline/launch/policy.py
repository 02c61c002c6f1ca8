"""
What happened, and before -> what is done now: again, again with less memory, on fewer devices, or an end. Pure.

The first rule that applies decides; docs/recovery.md is made of them: `python -m paceline.launch.policy > docs/recovery.md`. What
an attempt ended of is for paceline.explain, whose catalogue says of each cause whether trying again can help.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Literal

Retry = Literal["never", "same", "smaller", "other-port", "other-checkpoint", "later"]
Action = Literal["stop", "retry", "smaller", "other-port", "older-checkpoint", "fewer-ranks"]

MAX_ATTEMPTS = 10
MAX_WITHOUT_PROGRESS = 3
WAITS_S = (0.0, 1.0, 5.0, 30.0, 60.0)  # before an attempt, after so many in a row without progress
LATER_WAIT_S = 30.0  # at least: what is away does not come back within a second

# a crash below Python: the machine's, or a bug, which shows by coming again
CRASHES = frozenset({
    "sigsegv", "native-abort", "illegal-instruction", "floating-point-exception", "illegal-memory-access", "cuda-error",
    "nccl-cuda-failure", "nccl-internal-error", "nccl-p2p-failure", "nccl-p2p-hang", "gloo-connect-failure", "gpu-kernel-timeout",
    "cufft-failure",
})  # fmt: skip
# in a script the user's to mend; in our own trainer, where no code of the user's runs, a crash like those
OURS_ONCE_MORE = CRASHES | {"unknown", "user-code-exception", "cuda-driver-broken", "collective-bad-tensor"}
HOST_MEMORY = "host-oom-killed"


@dataclass(frozen=True)
class Ended:
    """What an attempt came to."""

    cause: str  # of the catalogue, or "hang", "refused"
    retry: Retry  # whether trying again can help, as the catalogue has it
    rank: int | None
    step: int | None
    new_checkpoint: bool  # it got further than the attempt before
    seconds: float
    error: str  # what a program said of itself; empty where something from outside ended it
    rolled_back: bool = False  # it ended itself to go on from before a bad step, without that step's rows


@dataclass(frozen=True)
class Abilities:
    """What could be changed for another attempt."""

    own_trainer: bool = False  # paceline's; else it is a script of the user's
    rows_on_host: bool = True  # fewer of them at once need less of the host's memory: the ranks run on its processors
    smaller: str | None = None  # the next that needs less memory, in words
    ranks_left: int | None = None  # where devices are gone: how many the run can go on with; None where all are there


@dataclass(frozen=True)
class Decision:
    action: Action
    wait_s: float
    why: str  # one line, for the screen and events.jsonl


@dataclass(frozen=True)
class Situation:
    """All that a rule may look at."""

    history: Sequence[Ended]
    max_attempts: int
    recover: bool
    can: Abilities

    @property
    def last(self) -> Ended:
        return self.history[-1]

    @property
    def retry(self) -> Retry:
        """As the catalogue says, but for what only a script can be blamed for, and what nobody can."""
        ended = self.last
        if ended.retry == "never" and ended.cause in (OURS_ONCE_MORE if self.can.own_trainer else CRASHES):
            return "same"
        if self.can.own_trainer and ended.cause == HOST_MEMORY and not self.can.rows_on_host:
            return "same"
        if self.can.own_trainer and ended.cause == "disk-full":
            return "later"
        if not self.can.own_trainer and ended.retry == "other-checkpoint":
            return "never"  # which of its files a script reads is its own business
        return ended.retry

    @property
    def without_progress(self) -> int:
        """Attempts in a row, up to the last, that left no new checkpoint; what the next one does otherwise is not counted."""
        count = 0
        for ended in reversed(self.history):
            if ended.new_checkpoint:
                break
            smaller = ended.retry == "smaller" and (self.can.rows_on_host or ended.cause != HOST_MEMORY)
            count += not smaller and not ended.rolled_back
        return count

    @property
    def same_error_before(self) -> bool:
        """Of what does not come and go by itself, as a taken port or a service that is away does."""
        last = self.last
        if not last.error or self.retry not in ("same", "other-checkpoint"):
            return False
        return any((each.error, each.step) == (last.error, last.step) for each in self.history[:-1])


@dataclass(frozen=True)
class Rule:
    """One row of the table."""

    id: str
    when: str  # for the docs
    applies: Callable[[Situation], bool]
    action: Action
    why: Callable[[Situation], str]
    wait: Literal["none", "back-off", "later"] = "none"


def at_step(ended: Ended) -> str:
    return "" if ended.step is None else f" at step {ended.step:,}"


RULES = (
    Rule(
        "no-recover",
        "`--no-recover` was given",
        lambda now: not now.recover,
        "stop",
        lambda now: "--no-recover was given",
    ),
    Rule(
        "mistake",
        "the cause is one that stays until somebody mends it (`retry` is `never` in `paceline explain --list`)",
        lambda now: now.retry == "never" and now.can.ranks_left is None,
        "stop",
        lambda now: "another attempt would end the same",
    ),
    Rule(
        "max-attempts",
        f"as many attempts as `--max-attempts` allows ({MAX_ATTEMPTS}, unless said)",
        lambda now: len(now.history) >= now.max_attempts,
        "stop",
        lambda now: f"{len(now.history)} attempts were made, --max-attempts allows no more",
    ),
    Rule(
        "rollback",
        "the loss was no number or leapt, and `--on-nan rollback` passes over the rows of that step",
        lambda now: now.last.rolled_back,
        "retry",
        lambda now: f"past the rows{at_step(now.last)}",
    ),
    Rule(
        "no-device",
        "a GPU is gone, and those left cannot hold or divide the steps",
        lambda now: now.can.ranks_left == 0,
        "stop",
        lambda now: "a GPU is gone, and those left cannot hold or share the run's steps",
    ),
    Rule(
        "device-gone",
        "a GPU is gone, and others are left: the same steps on fewer of them",
        lambda now: now.can.ranks_left is not None,
        "fewer-ranks",
        lambda now: f"a GPU is gone: on with {now.can.ranks_left}",
        "back-off",
    ),
    Rule(
        "out-of-memory",
        "memory ran out, of a GPU or of the host: fewer rows at once and more micro-steps, then activation checkpointing",
        lambda now: now.retry == "smaller" and now.can.smaller is not None,
        "smaller",
        lambda now: f"memory ran out: {now.can.smaller}",
        "back-off",
    ),
    Rule(
        "nothing-smaller",
        "memory ran out, and nothing smaller is left; or it is a script's own",
        lambda now: now.retry == "smaller",
        "stop",
        lambda now: "memory ran out, and " + ("nothing smaller is left" if now.can.own_trainer else "its size is the script's own"),
    ),
    Rule(
        "same-error",
        "the program ended with the same words at the same step as in an attempt before",
        lambda now: now.same_error_before,
        "stop",
        lambda now: f"the same error{at_step(now.last)} as before: it does not come from outside",
    ),
    Rule(
        "no-progress",
        f"{MAX_WITHOUT_PROGRESS} attempts in a row without a new checkpoint; of a script, none that lasted ten minutes",
        lambda now: now.without_progress >= MAX_WITHOUT_PROGRESS,
        "stop",
        lambda now: f"{MAX_WITHOUT_PROGRESS} attempts in a row came no further",
    ),
    Rule(
        "port-taken",
        "a port is taken: the next attempt takes another",
        lambda now: now.retry == "other-port",
        "other-port",
        lambda now: "the port is taken: with another one",
        "back-off",
    ),
    Rule(
        "checkpoint-damaged",
        "a checkpoint is damaged: the one before it",
        lambda now: now.retry == "other-checkpoint",
        "older-checkpoint",
        lambda now: "from the newest checkpoint that is whole",
        "back-off",
    ),
    Rule(
        "disk-full",
        "there was no room for the last checkpoint, or for anything at all: somebody may make some",
        lambda now: now.retry == "later" and now.last.cause == "disk-full",
        "retry",
        lambda now: "there may be room by then",
        "later",
    ),
    Rule(
        "away",
        "something is away that comes back by itself: a service, a disk, a network",
        lambda now: now.retry == "later",
        "retry",
        lambda now: "what is away may be back by then",
        "later",
    ),
    Rule(
        "transient",
        "anything else that passes: a killed or hung rank, a lost connection; in paceline's own trainer any crash, once",
        lambda now: True,
        "retry",
        lambda now: "it may pass",
        "back-off",
    ),
)  # fmt: skip


def decide(history: Sequence[Ended], *, max_attempts: int, recover: bool, can: Abilities) -> Decision:
    """history: every attempt of this command, the last one last."""
    now = Situation(history, max_attempts, recover, can)
    rule = rule_for(now)
    return Decision(rule.action, wait_s(rule, now), rule.why(now))


def rule_for(now: Situation) -> Rule:
    return next(rule for rule in RULES if rule.applies(now))


def wait_s(rule: Rule, now: Situation) -> float:
    if rule.wait == "none":
        return 0.0
    back_off = WAITS_S[min(now.without_progress, len(WAITS_S) - 1)]
    return max(back_off, LATER_WAIT_S) if rule.wait == "later" else back_off


INTRO = """\
# When paceline goes on by itself

Made from the code: `python -m paceline.launch.policy > docs/recovery.md`.

An attempt of `train`, `resume` or `run` that ends before its work is done is explained (`paceline explain RUN`); what follows is
decided by the first row that applies. Explanation and decision stand in `events.jsonl` (`verdict`, `decision`) and on the screen,
one line each. `--no-recover` ends with the first attempt, `--max-attempts N` with the Nth. Ctrl-C ends a wait at once.
"""

NOTES = """\
Waits are {waits} s, after none, one, two, ... attempts in a row that came no further; {later:.0f} s at least where something
is away.

The next attempt goes on from the newest checkpoint that is whole, so that a broken run and an unbroken one end with the same
weights. The two that change how steps are cut, `smaller` and `fewer-ranks`, keep the rows of each step, total_batch_size and the
learning rates; `plan.json` then has what is used, `config.toml` what was asked. Sizes that did not fit are kept for this machine
and model (`too_large.jsonl` in the cache folder), and no plan chooses them again while the device has no more memory.

A script is started again with the same words. It finds the number of the attempt in PACELINE_ATTEMPT, from 1, and the run folder,
a place for checkpoints of its own, in PACELINE_RUN. What its author has to mend is never tried again; a crash below Python is,
once:
{crashes}.

In paceline's own trainer no code of the user's runs, so these are tried once more as well: {ours}.
Where it trains on GPUs and the host's memory ran out, fewer rows would not help: the next attempt is the same.
"""


def format_docs() -> str:
    return "\n".join([INTRO, *_table(), "", notes()])


def notes() -> str:
    waits = ", ".join(f"{seconds:.0f}" for seconds in WAITS_S)
    crashes = fill(", ".join(sorted(CRASHES)), width=120, break_on_hyphens=False)
    ours = ", ".join(sorted(OURS_ONCE_MORE - CRASHES))
    return NOTES.format(waits=waits, later=LATER_WAIT_S, crashes=crashes, ours=ours)


def _table() -> Iterator[str]:
    waits = {"none": "", "back-off": "0 to 60 s", "later": "30 to 60 s"}
    yield "| rule | when | what is done | wait |"
    yield "|---|---|---|---|"
    for rule in RULES:
        yield f"| {rule.id} | {rule.when} | {rule.action} | {waits[rule.wait]} |"


if __name__ == "__main__":
    print(format_docs(), end="")
