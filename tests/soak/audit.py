"""
What a run of the fault loop has left, judged: each fault's cause, time and lost steps; the weights; the run folder.

Reads files only. A problem is a sentence; a sound run has none.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from soak.drive import Struck
from soak.faults import Fault
from train.runs import final_bits

from paceline.errors import PacelineError
from paceline.model.checkpoint import list_checkpoints, verify
from paceline.rundir import RunDir, read_json_lines

# how soon a fault must be known, beside --hang-after where it is silence that tells
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
class Judged:
    """One fault. None: it does not apply."""

    fault: Fault
    nproc: int
    run: str
    cause: str  # as the product says it
    cause_right: bool
    notice_s: float | None
    lost_steps: int | None
    again_s: float | None  # from the fault to the end of the first step after it
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Story:
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


def read_story(run: RunDir) -> Story:
    return Story(run, list(read_json_lines(run.events)), list(read_json_lines(run.metrics)))


def seconds(record: Mapping[str, str]) -> float:
    return datetime.fromisoformat(record["time"]).timestamp()


def judge(story: Story, each: Struck, following: Struck | None, *, hang_after_s: float) -> Judged:
    fault = each.fault
    until = following.struck if following else math.inf
    cause, right = cause_of(story, each, until=until)
    notice_s = notice_of(story, each)
    lost, again_s = lost_steps(story, each), None
    if fault.restarts and not (following is not None and following.fault.phase == "start"):
        again_s = again_of(story, each)
    problems = list(each.problems)
    if not right:
        problems.append(f"the cause is called {cause}")
    allowed_s = NOTICE_S if fault.kind != "sigstop" else hang_after_s + POLL_S
    if fault.kind == "supervisor":
        allowed_s = 25.0  # the agent's own grace for a save, and the kill after it
    if notice_s is not None and notice_s > allowed_s:
        problems.append(f"noticed after {notice_s:.1f} s")
    damaged = fault.kind == "checkpoint" or (following is not None and strikes_what_is_read(following.fault))
    if lost is not None and lost > may_lose(story, each, damaged=damaged):
        problems.append(f"{lost} steps lost")
    return Judged(fault, each.nproc, story.run.name, cause, right, notice_s, lost, again_s, tuple(problems))


def cause_of(story: Story, each: Struck, *, until: float) -> tuple[str, bool]:
    """What the product calls it, and whether that is true, of the right rank. until: when the next fault strikes."""
    fault = each.fault
    verdicts = story.of("verdict", each.attempt)
    if not fault.restarts:
        verdicts = [event for event in verdicts if each.struck <= seconds(event) < until]
    verdict = verdicts[-1] if verdicts else {}
    said, rank = verdict.get("cause"), verdict.get("rank")
    if fault.kind == "disk":
        failed = any(event["event"] == "save_failed" and seconds(event) >= each.struck for event in story.events)
        return ("save_failed" if failed else "nothing"), failed and said is None
    if fault.kind == "slow":
        return said or "nothing", said is None
    if fault.kind == "checkpoint":
        noted = any(e["event"] == "note" and "damaged" in e["text"] for e in story.events if seconds(e) >= each.struck)
        if not fault.restarts:
            return ("note: damaged" if noted else "nothing"), noted and said is None
        return f"{said}, note: damaged" if noted else str(said), noted and said in CAUSES[
            "checkpoint"
        ] and rank == each.rank
    right = said in CAUSES[fault.kind] and rank == (None if fault.kind in RANKLESS else each.rank)
    return f"{said}" + ("" if rank is None else f" of rank {rank}") + (f", was {each.rank}" if not right else ""), right


def notice_of(story: Story, each: Struck) -> float | None:
    if not each.fault.restarts:
        return None
    if each.noticed is not None:
        return each.noticed - each.struck
    kinds = ("hang", "rank_failed", "attempt_ended")
    times = [seconds(event) for kind in kinds for event in story.of(kind, each.attempt)]
    return min(times) - each.struck if times else None


def lost_steps(story: Story, each: Struck) -> int | None:
    """Done before, and done again."""
    if not each.fault.restarts:
        return None
    resumed = [event["step"] for event in story.after(each.attempt) if event["event"] == "resumed"]
    return max(0, each.step - (resumed[0] if resumed else 0))


def strikes_what_is_read(fault: Fault) -> bool:
    """It damages the checkpoint that the attempt after the fault before it goes on from."""
    return fault.kind == "checkpoint" and fault.phase == "start"


def may_lose(story: Story, each: Struck, *, damaged: bool) -> int:
    """What was done since the newest checkpoint, which one interval covers but where its save was still under way."""
    saves = [e["step"] for e in story.events if e["event"] == "checkpoint" and seconds(e) < each.struck]
    if damaged:
        saves = sorted(set(saves))[:-1]
    return max(0, each.step - (saves[-1] if saves else 0))


def again_of(story: Story, each: Struck) -> float | None:
    starts = [seconds(event) for event in story.after(each.attempt) if event["event"] == "attempt"]
    times = [seconds(line) for line in story.metrics]
    return next((time - each.struck for time in times if starts and time > starts[0]), None)


def problems_of_run(
    story: Story, *, num_steps: int, exit_code: int, left: Sequence[int], unbroken: Mapping[str, str]
) -> list[str]:
    """Of the whole run."""
    found = []
    if exit_code:
        found.append(f"it ended with {exit_code}")
    if left:
        found.append(f"processes were left: {', '.join(map(str, left))}")
    steps = [line["step"] for line in story.metrics]
    if steps != list(range(1, num_steps + 1)):
        found.append(f"metrics.jsonl has the steps {steps}")
    found += problems_of_files(story.run)
    if not exit_code and final_bits(story.run.path) != unbroken:
        found.append("the weights differ from those of the undisturbed run")
    return found


def problems_of_files(run: RunDir) -> list[str]:
    """Every checkpoint is whole, nothing half-written lies about, and every line of events is one."""
    found = []
    for each in list_checkpoints(run.checkpoints):
        try:
            verify(each.path)
        except PacelineError as error:
            found.append(error.message)
    names = {path.name for path in run.checkpoints.iterdir()}
    found += [f"{name} lies in checkpoints" for name in sorted(names) if name.startswith(".") or name.endswith(".part")]
    for line in run.events.read_bytes().splitlines():
        try:
            json.loads(line)
        except ValueError:
            found.append(f"events.jsonl has the line {line[:60]!r}")
    found += [
        f"{path.relative_to(run.path)} is empty" for path in (run.config_toml, run.plan_json) if not path.stat().st_size
    ]
    return found


def with_problem(judged: Judged, *texts: str) -> Judged:
    return replace(judged, problems=(*judged.problems, *texts))


def screen_of(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
