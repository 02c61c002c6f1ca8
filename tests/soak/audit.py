"""
Judges a run of the fault loop by its files: each fault's cause, time and lost steps; the weights; the run folder.

A problem is a sentence; a sound run has none.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from soak.drive import Injection
from soak.faults import Fault
from train.runs import final_bits

from paceline.errors import PacelineError
from paceline.model.manifest import list_checkpoints, verify
from paceline.rundir import RunDir, read_json_lines
from paceline.units import parse_time

# how soon a fault must be noticed; where silence shows it, --hang-after comes on top
NOTICE_S = 10.0
POLL_S = 2.0

CAUSES: Mapping[str, tuple[str, ...]] = {
    "sigkill": ("killed-from-outside",),
    "sigstop": ("hang",),
    "sigsegv": ("sigsegv",),
    "exception": ("user-code-exception",),
    "exit0": ("exited-early",),
    "memory": ("host-oom-killed", "host-oom"),
    "checkpoint": ("killed-from-outside",),
    "port": ("port-in-use",),
    "agent": ("killed-from-outside",),
    "supervisor": ("supervisor-lost",),
}
RANKLESS = ("port", "agent", "supervisor")  # no rank is to blame


@dataclass(frozen=True)
class FaultResult:
    """The result of one fault. None: it does not apply."""

    fault: Fault
    nproc: int
    run: str
    cause: str  # as paceline reports it
    cause_right: bool
    notice_s: float | None
    lost_steps: int | None
    resume_s: float | None  # from the fault to the end of the first step after it
    problems: tuple[str, ...]


@dataclass(frozen=True)
class RunRecord:
    """A run's files, read once."""

    run: RunDir
    events: Sequence[dict]
    metrics: Sequence[dict]

    def of(self, kind: str, attempt: int) -> list[dict]:
        return [event for event in self.events if event["event"] == kind and event.get("attempt") == attempt]

    def after(self, attempt: int) -> list[dict]:
        """Events from the start of the next attempt on."""
        numbers = [n for n, e in enumerate(self.events) if e["event"] == "attempt" and e["attempt"] > attempt]
        return list(self.events[numbers[0] :]) if numbers else []


def read_record(run: RunDir) -> RunRecord:
    return RunRecord(run, list(read_json_lines(run.events)), list(read_json_lines(run.metrics)))


def unix_time(record: Mapping[str, str]) -> float:
    return parse_time(record["time"])


def judge(record: RunRecord, injection: Injection, following: Injection | None, *, hang_after_s: float) -> FaultResult:
    """Returns what became of a fault. following: the next one of the run."""
    fault = injection.fault
    until = following.time if following else math.inf
    cause, right = cause_of(record, injection, until=until)
    notice_s = notice_of(record, injection)
    lost, resume_s = lost_steps(record, injection), None
    if fault.restarts and not (following is not None and following.fault.phase == "start"):
        resume_s = resume_of(record, injection)
    problems = list(injection.problems)
    if not right:
        problems.append(f"the reported cause is {cause}")
    allowed_s = NOTICE_S if fault.kind != "sigstop" else hang_after_s + POLL_S
    if fault.kind == "supervisor":
        allowed_s = 25.0  # the agent's own grace for a save, and the kill after it
    if notice_s is not None and notice_s > allowed_s:
        problems.append(f"noticed after {notice_s:.1f} s")
    damaged = fault.kind == "checkpoint" or (following is not None and strikes_what_is_read(following.fault))
    if lost is not None and lost > allowed_loss(record, injection, damaged=damaged):
        problems.append(f"{lost} steps lost")
    return FaultResult(fault, injection.nproc, record.run.name, cause, right, notice_s, lost, resume_s, tuple(problems))


def cause_of(record: RunRecord, injection: Injection, *, until: float) -> tuple[str, bool]:
    """Returns the reported cause, and whether cause and rank are right. until: when the next fault strikes."""
    fault = injection.fault
    verdicts = record.of("verdict", injection.attempt)
    if not fault.restarts:
        verdicts = [event for event in verdicts if injection.time <= unix_time(event) < until]
    verdict = verdicts[-1] if verdicts else {}
    cause, rank = verdict.get("cause"), verdict.get("rank")
    if fault.kind == "disk":
        failed = any(event["event"] == "save_failed" and unix_time(event) >= injection.time for event in record.events)
        return ("save_failed" if failed else "nothing"), failed and cause is None
    if fault.kind == "slow":
        return cause or "nothing", cause is None
    if fault.kind == "checkpoint":
        seen = any(event["event"] == "damaged" and unix_time(event) >= injection.time for event in record.events)
        if not fault.restarts:
            return ("damaged" if seen else "nothing"), seen and cause is None
        right = seen and cause in CAUSES["checkpoint"] and rank == injection.rank
        return f"{cause}, damaged" if seen else str(cause), right
    right = cause in CAUSES[fault.kind] and rank == (None if fault.kind in RANKLESS else injection.rank)
    return f"{cause}" + ("" if rank is None else f" of rank {rank}") + (
        f", was {injection.rank}" if not right else ""
    ), right


def notice_of(record: RunRecord, injection: Injection) -> float | None:
    if not injection.fault.restarts:
        return None
    if injection.notice_time is not None:
        return injection.notice_time - injection.time
    kinds = ("hang", "rank_failed", "attempt_ended")
    times = [unix_time(event) for kind in kinds for event in record.of(kind, injection.attempt)]
    return min(times) - injection.time if times else None


def lost_steps(record: RunRecord, injection: Injection) -> int | None:
    """Returns the steps that were done before the fault and repeated after it."""
    if not injection.fault.restarts:
        return None
    resumed = [event["step"] for event in record.after(injection.attempt) if event["event"] == "resumed"]
    return max(0, injection.step - (resumed[0] if resumed else 0))


def strikes_what_is_read(fault: Fault) -> bool:
    """Whether it damages the checkpoint that the next attempt resumes from."""
    return fault.kind == "checkpoint" and fault.phase == "start"


def allowed_loss(record: RunRecord, injection: Injection, *, damaged: bool) -> int:
    """Steps since the newest checkpoint: one interval, or more where its save was still in progress."""
    saves = [e["step"] for e in record.events if e["event"] == "checkpoint" and unix_time(e) < injection.time]
    if damaged:
        saves = sorted(set(saves))[:-1]
    return max(0, injection.step - (saves[-1] if saves else 0))


def resume_of(record: RunRecord, injection: Injection) -> float | None:
    starts = [unix_time(event) for event in record.after(injection.attempt) if event["event"] == "attempt"]
    times = [unix_time(line) for line in record.metrics]
    return next((time - injection.time for time in times if starts and time > starts[0]), None)


def problems_of_run(
    record: RunRecord, *, num_steps: int, exit_code: int, left: Sequence[int], unbroken: Mapping[str, str]
) -> list[str]:
    """Returns the problems of the whole run."""
    problems = []
    if exit_code:
        problems.append(f"it ended with {exit_code}")
    if left:
        problems.append(f"processes were left: {', '.join(map(str, left))}")
    steps = [line["step"] for line in record.metrics if "loss" in line]  # an evaluation before the first step has none
    if steps != list(range(1, num_steps + 1)):
        problems.append(f"metrics.jsonl has the steps {steps}")
    problems += problems_of_files(record.run)
    if not exit_code and final_bits(record.run.path) != unbroken:
        problems.append("the weights differ from those of the undisturbed run")
    return problems


def problems_of_files(run: RunDir) -> list[str]:
    """Returns a problem for each damaged checkpoint, half-written file and broken line of events."""
    problems = []
    for path, _ in list_checkpoints(run.checkpoints):
        try:
            verify(path)
        except PacelineError as error:
            problems.append(error.message)
    names = {path.name for path in run.checkpoints.iterdir()}
    problems += [
        f"{name} lies in checkpoints" for name in sorted(names) if name.startswith(".") or name.endswith(".part")
    ]
    for line in run.events.read_bytes().splitlines():
        try:
            json.loads(line)
        except ValueError:
            problems.append(f"events.jsonl has the line {line[:60]!r}")
    problems += [
        f"{path.relative_to(run.path)} is empty" for path in (run.config_toml, run.plan_json) if not path.stat().st_size
    ]
    return problems
