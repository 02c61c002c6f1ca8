"""
A run's attempts, one after the other: each that fails is explained, and the policy decides what follows. No torch.

The same for training runs and for scripts; what differs is a Job's. Explanation and decision stand in events.jsonl and on the
screen. Ctrl-C and SIGTERM end an attempt (launch/supervisor.py) or the wait before the next.
"""

import time
from dataclasses import dataclass, replace
from typing import Protocol

from paceline.errors import Interrupted, PacelineError, UsageError
from paceline.explain.format import with_place
from paceline.explain.record import Explanation
from paceline.explain.run import explain_run
from paceline.launch.ending import ended_of
from paceline.launch.policy import MAX_ATTEMPTS, Abilities, Decision, Ended, decide
from paceline.launch.supervisor import Caught, Outcome, caught_signals
from paceline.plan.cgroup import oom_kills
from paceline.rundir import NO_SPACE, RunDir, append_event, read_json_lines

POLL_S = 0.05
CUT_OFF = "supervisor-lost"


@dataclass(frozen=True)
class Recovery:
    """What the command line says of attempts."""

    max_attempts: int = MAX_ATTEMPTS
    recover: bool = True
    hang_after_s: float | None = None  # of silence; None: the watchdog's default


def recovery_of(*, max_attempts: int | None, no_recover: bool, hang_after_s: float | None) -> Recovery:
    """Of the options' values; None: not given."""
    if hang_after_s is not None and not hang_after_s > 0:
        raise UsageError(f"--hang-after {hang_after_s:g}: not a time", fix="--hang-after 60, in seconds")
    if max_attempts is not None and max_attempts < 1:
        raise UsageError(
            f"--max-attempts {max_attempts}: at least one is made", fix="--max-attempts 1, or --no-recover"
        )
    return Recovery(max_attempts or MAX_ATTEMPTS, not no_recover, hang_after_s)


class Job(Protocol):
    """What is attempted."""

    @property
    def run(self) -> RunDir: ...

    def attempt(self, number: int, caught: Caught) -> Outcome:
        """caught: signals since the first attempt began; those of this one go there too."""

    def came_further(self, ended: Ended) -> bool:
        """Beside what its checkpoints tell."""

    def abilities(self, ended: Ended) -> Abilities:
        """What could be changed after such an end."""

    def change(self, decision: Decision) -> None:
        """For the next attempt, as `abilities` has promised."""

    def say(self, lines: list[str]) -> None: ...


@dataclass(frozen=True)
class Ending:
    """What came of all attempts. explanation: of the last, where it failed. waiting: it was stopped between two."""

    outcome: Outcome
    explanation: Explanation | None = None
    waiting: bool = False


def run_attempts(job: Job, recovery: Recovery) -> Ending:
    """Until one is done, or no further one would help, or somebody stops it; call it from the main thread."""
    number, history = next_attempt(job.run), list[Ended]()
    note_cut_off(job)
    with caught_signals() as caught:
        while True:
            started, kills_before = time.monotonic(), oom_kills()
            outcome = attempted(job, number, caught)
            if outcome.state != "failed":
                return Ending(outcome)
            kills = oom_kills()
            found = explained(job, number)
            if found is None:
                return Ending(outcome)
            memory_ran_out = None if kills is None or kills_before is None else kills > kills_before
            ended, found = ended_of(
                job.run, outcome, found, seconds=time.monotonic() - started, memory_ran_out=memory_ran_out
            )
            if job.came_further(ended):
                ended = replace(ended, new_checkpoint=True)
            history.append(ended)
            note_verdict(job, number, found)
            if asked_to_stop(job.run, number) or caught.first:
                return Ending(outcome, found)
            decision = decide(
                history, max_attempts=recovery.max_attempts, recover=recovery.recover, can=job.abilities(ended)
            )
            note_decision(job, ended, decision, outcome, found)
            if decision.action == "stop":
                return Ending(outcome, found)
            job.change(decision)
            if not wait(decision.wait_s, caught):
                stopped = replace(outcome, state="interrupted", exit_code=Interrupted.exit_code)
                return Ending(stopped, waiting=True)
            number += 1


def attempted(job: Job, number: int, caught: Caught) -> Outcome:
    try:
        return job.attempt(number, caught)
    except OSError as error:  # logs/ and plan.json; what the ranks write has its own ways
        if error.errno not in NO_SPACE:
            raise
        raise PacelineError(
            f"attempt {number} could not start: no space in {job.run.path}",
            fix=f"make room in its file system (df -h), then: paceline resume {job.run.path}",
        ) from error


def next_attempt(run: RunDir) -> int:
    return 1 + max((e["attempt"] for e in read_json_lines(run.events) if e.get("event") == "attempt"), default=0)


def note_cut_off(job: Job) -> None:
    """Of an attempt whose supervisor was itself ended: nobody was left to say so, and its workers have saved and ended."""
    attempts = [e for e in read_json_lines(job.run.events) if e.get("event") in ("attempt", "attempt_ended")]
    if not attempts or attempts[-1]["event"] == "attempt_ended":
        return
    attempt = attempts[-1]["attempt"]
    summary = (
        f"the command that ran attempt {attempt} was itself ended, and could not say why; its workers ended with it"
    )
    fix = "look for who ended it: a closed session without nohup or tmux, a batch system, the kernel for want of memory"
    note_verdict(job, attempt, Explanation(CUT_OFF, (), 1.0, None, None, None, None, summary, fix))
    job.say([f"attempt {attempt}: {summary}"])


def explained(job: Job, attempt: int) -> Explanation | None:
    """None, and one line about it, where the explanation itself breaks: what the run died of is then shown as it is."""
    try:
        return explain_run(job.run, attempt=attempt)
    except PacelineError as error:  # logs that cannot be read
        return Explanation("unknown", (), 0.0, None, None, None, None, error.message, error.fix)
    except Exception as error:  # a bug of ours must not hide theirs
        text = f"what it died of could not be explained ({type(error).__name__}: {error})"
        append_event(job.run, "note", text=f"attempt {attempt}: {text}")
        job.say([f"no further attempt: {text}"])
        return None


def asked_to_stop(run: RunDir, attempt: int) -> bool:
    return any(e.get("event") == "stopping" and e.get("attempt") == attempt for e in read_json_lines(run.events))


def note_verdict(job: Job, attempt: int, found: Explanation) -> None:
    facts = {"cause": found.cause, "rank": found.rank, "step": found.step, "confidence": found.confidence}
    append_event(job.run, "verdict", attempt=attempt, **facts, summary=found.summary, fix=found.fix)


def note_decision(job: Job, ended: Ended, decision: Decision, outcome: Outcome, found: Explanation) -> None:
    """In events.jsonl and, but for an end that was ordered, on the screen; what comes last there, the closing lines say."""
    facts = {"action": decision.action, "why": decision.why, "wait_s": decision.wait_s}
    append_event(job.run, "decision", attempt=outcome.attempt, **facts, cause=ended.cause, rank=ended.rank)
    if decision.action == "stop":
        job.say([f"no further attempt: {decision.why}"])
    else:
        job.say(
            [
                f"attempt {outcome.attempt} failed: {with_place(found)}",
                format_next(job.run, decision, outcome.attempt + 1),
            ]
        )


def format_next(run: RunDir, decision: Decision, number: int) -> str:
    saved = [e["step"] for e in read_json_lines(run.events) if e.get("event") == "checkpoint"]
    start = f" from step {saved[-1]:,}" if saved else ""
    wait = f" in {decision.wait_s:.0f} s" if decision.wait_s else " now"
    return f"attempt {number}{wait}{start}: {decision.why}"


def wait(seconds: float, caught: Caught) -> bool:
    """False as soon as somebody asks to stop."""
    until = time.monotonic() + seconds
    while caught.first is None and (left := until - time.monotonic()) > 0:
        time.sleep(min(POLL_S, left))
    return caught.first is None
