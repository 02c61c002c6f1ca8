"""
Where a run's time went: steps whose work is in the weights, and everything else. Pure, from events.jsonl and metrics.jsonl.

Every second from the first command to the last word is of one kind. What an attempt did after the checkpoint that the next one
went on from is lost, whatever it was. What only a broken attempt makes necessary is recovery: explanation, wait, start-up.
Steps are counted by the step_ms of metrics.jsonl; what else passes between two of its lines is an evaluation where the line has
one, a checkpoint where one was begun, and of the steps else.
"""

import json
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.rundir import RunDir, is_locked, read_json_lines
from paceline.units import format_duration, format_energy
from paceline.watch.hosts import Host

Record = dict[str, Any]

KINDS = {
    "steps": "steps that counted",
    "start_up": "start-up",
    "checks": "text, plan and checks",
    "compile": "compiling and warm-up",
    "checkpoint": "checkpoints",
    "evaluation": "evaluations and samples",
    "lost": "work lost",
    "recovery": "recovery",
    "idle": "idle",
}


@dataclass(frozen=True)
class Goodput:
    """seconds: by kind, in the order of KINDS. tok_per_sec: of all time but idle; None where there is no such number.

    energy_j: of the GPUs in all attempts, lost work included; None where no card tells.
    """

    seconds: dict[str, float]
    num_steps: int  # that counted
    tok_per_sec: float | None
    energy_j: int | None = None

    @property
    def busy_s(self) -> float:
        return sum(self.seconds.values()) - self.seconds["idle"]

    @property
    def share(self) -> float | None:
        """Of the time in steps that counted, 0 to 1."""
        return self.seconds["steps"] / self.busy_s if self.busy_s else None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "share": self.share}


@dataclass(frozen=True)
class StepLines:
    """Lines of metrics.jsonl as columns; val_bpb is NaN where a line has none."""

    step: NDArray[np.float64]
    time: NDArray[np.float64]  # Unix seconds
    step_ms: NDArray[np.float64]
    val_bpb: NDArray[np.float64]

    @staticmethod
    def of(records: Iterable[Record]) -> "StepLines":
        rows = [
            (line["step"], unix_time(line), line["step_ms"], line.get("val_bpb"))
            for line in records
            if "time" in line and "step_ms" in line
        ]
        return StepLines(*np.array(rows, dtype=float).reshape(-1, 4).T)

    def __len__(self) -> int:
        return len(self.step)

    def where(self, chosen: NDArray[np.bool_]) -> "StepLines":
        return StepLines(self.step[chosen], self.time[chosen], self.step_ms[chosen], self.val_bpb[chosen])


NO_LINES = StepLines.of([])


@dataclass
class Attempt:
    """One attempt as the events tell it; times are Unix seconds."""

    start: float
    session: int  # which command's it is
    end: float
    state: str | None = None  # None: its supervisor did not live to say
    resumed: int = 0  # the step it went on from
    saved: list[int] = field(default_factory=list)  # steps of its checkpoints
    samples: list[int] = field(default_factory=list)
    lines: StepLines = NO_LINES


def goodput_of(run: RunDir) -> Goodput:
    tokens = None
    with suppress(OSError, ValueError, KeyError):  # a script's run has no plan
        tokens = int(json.loads(run.plan_json.read_text(encoding="utf-8"))["total_batch_size"])
    events, metrics = list(read_json_lines(run.events)), StepLines.of(read_json_lines(run.metrics))
    hosts = [Host(path) for path in sorted(run.health_dir.glob("*.jsonl"))]
    for host in hosts:
        host.read()
    energy_j = energy_of(host.energy_j for host in hosts)
    return goodput(events, metrics, tokens_per_step=tokens, running=is_locked(run), energy_j=energy_j)


def energy_of(hosts: Iterable[int | None]) -> int | None:
    told = [joules for joules in hosts if joules is not None]
    return sum(told) if told else None


def goodput(
    events: Sequence[Record],
    metrics: StepLines,
    *,
    tokens_per_step: int | None,
    running: bool = False,
    energy_j: int | None = None,
) -> Goodput:
    """tokens_per_step None: a script's run, whose steps are not known; the time of its attempts counts as steps."""
    attempts, launches = read_attempts(events, metrics)
    seconds, num_steps = dict.fromkeys(KINDS, 0.0), 0
    for index, attempt in enumerate(attempts):
        before = attempts[index - 1] if index else None
        again = before is not None and before.session == attempt.session
        if again and before is not None:
            seconds["recovery"] += attempt.start - before.end
        elif attempt.session < len(launches):
            add_launch(seconds, launches[attempt.session], attempt, since=before.end if before else None)
        spent = {"steps": attempt.end - attempt.start}
        if tokens_per_step is not None:
            kept = kept_step(attempts, index, running=running)
            spent, num_steps = time_of_attempt(attempt, kept=kept), num_steps + steps_that_counted(attempt, kept=kept)
        for kind, value in spent.items():
            seconds["recovery" if again and kind == "start_up" else kind] += value
    found = Goodput({kind: round(max(0.0, value), 3) for kind, value in seconds.items()}, num_steps, None, energy_j)
    if not tokens_per_step or not found.busy_s:
        return found
    return replace(found, tok_per_sec=round(num_steps * tokens_per_step / found.busy_s, 1))


def read_attempts(events: Sequence[Record], metrics: StepLines) -> tuple[list[Attempt], list[Record]]:
    """The attempts, each with its lines of metrics, and the events `launch` or `script`, one for each command."""
    attempts: list[Attempt] = []
    launches: list[Record] = []
    for event in events:
        kind = event.get("event")
        if kind in ("launch", "script"):
            launches.append(event)
        elif kind == "attempt":
            time = unix_time(event)
            attempts.append(Attempt(start=time, session=max(0, len(launches) - 1), end=time))
        elif attempts and attempts[-1].state is None:
            note_event(attempts[-1], event)
    for index, attempt in enumerate(attempts):
        until = attempts[index + 1].start if index + 1 < len(attempts) else math.inf
        attempt.lines = metrics.where((attempt.start <= metrics.time) & (metrics.time < until))
        if attempt.state is None and len(attempt.lines):
            attempt.end = max(attempt.end, float(attempt.lines.time[-1]))
    return attempts, launches


def note_event(attempt: Attempt, event: Record) -> None:
    attempt.end = unix_time(event)
    match event.get("event"):
        case "attempt_ended":
            attempt.state = event.get("state", "failed")
        case "resumed":
            attempt.resumed = event["step"]
        case "checkpoint":
            attempt.saved.append(event["step"])
        case "sample":
            attempt.samples.append(event["step"])


def add_launch(seconds: dict[str, float], launch: Record, attempt: Attempt, *, since: float | None) -> None:
    """What passed before the first attempt of a command. since: the end of the attempt before it."""
    launched, prepared_s = unix_time(launch), launch.get("prepared_s", 0.0)
    seconds["start_up"] += attempt.start - launched
    seconds["checks"] += prepared_s
    if since is not None:
        seconds["idle"] += max(0.0, launched - prepared_s - since)


def kept_step(attempts: Sequence[Attempt], index: int, *, running: bool) -> float:
    """Up to which step an attempt's work is in the weights: infinity where all of it is."""
    later = [each.resumed for each in attempts[index + 1 :] if each.resumed or len(each.lines)]
    if later:
        return min(later)
    if attempts[index].state == "finished" or running:
        return math.inf
    return max((step for attempt in attempts for step in attempt.saved), default=0)


def steps_that_counted(attempt: Attempt, *, kept: float) -> int:
    last = int(attempt.lines.step[-1]) if len(attempt.lines) else attempt.resumed
    return max(0, (last if kept == math.inf else int(kept)) - attempt.resumed)


def time_of_attempt(attempt: Attempt, *, kept: float) -> dict[str, float]:
    """Its seconds by kind. kept: see kept_step."""
    lines = attempt.lines.where(attempt.lines.step <= kept)
    whole = attempt.end - attempt.start
    if not len(lines):
        return {"start_up" if attempt.state == "finished" else "lost": whole}
    seconds = dict.fromkeys(("steps", "start_up", "compile", "checkpoint", "evaluation", "lost"), 0.0)
    first_s = float(lines.step_ms[0]) / 1000
    usual_s = float(np.median(lines.step_ms[1:] if len(lines) > 1 else lines.step_ms)) / 1000
    seconds["start_up"] = max(0.0, float(lines.time[0]) - attempt.start - first_s)
    seconds["compile"] = max(0.0, first_s - usual_s)
    wall = np.diff(lines.time)
    steps_s = np.minimum(wall, np.diff(lines.step) * lines.step_ms[1:] / 1000)
    seconds["steps"] = first_s - seconds["compile"] + float(steps_s.sum())
    for kind, chosen in kinds_of_rest(attempt, lines).items():
        seconds[kind] += float((wall - steps_s)[chosen].sum())
    rest = max(0.0, attempt.end - float(lines.time[-1]))
    if kept == math.inf or attempt.state == "interrupted":
        seconds["checkpoint"] += rest  # its last weights were saved
    else:
        redone_s = min(rest, (kept - float(lines.step[-1])) * float(lines.step_ms[-1]) / 1000)
        seconds["steps"] += redone_s
        seconds["lost"] += rest - redone_s
    return seconds


def kinds_of_rest(attempt: Attempt, lines: StepLines) -> dict[str, NDArray[np.bool_]]:
    """Of each pair of neighbouring lines, what passed between them beside steps."""

    def holds(steps: Sequence[int]) -> NDArray[np.bool_]:
        """Whether one of the steps lies in the pair's, from its first up to but without its last."""
        before = np.searchsorted(np.sort(np.array(steps, dtype=float)), lines.step)
        return np.asarray(np.diff(before) > 0)

    evaluation = ~np.isnan(lines.val_bpb[1:]) | holds(attempt.samples)
    checkpoint = ~evaluation & holds(attempt.saved)
    return {"evaluation": evaluation, "checkpoint": checkpoint, "steps": ~evaluation & ~checkpoint}


def unix_time(record: Record) -> float:
    return datetime.fromisoformat(record["time"]).timestamp()


def format_goodput(found: Goodput) -> list[str]:
    """A table for `paceline runs show`."""
    lines = []
    for kind, words in KINDS.items():
        value = found.seconds[kind]
        share = f"{100 * value / found.busy_s:5.1f} %" if found.busy_s and kind != "idle" else ""
        if value:
            lines.append(f"  {words:<26}{format_duration(value):>9}  {share}".rstrip())
    if found.energy_j is not None:
        lines.append(f"  {'energy of the GPUs':<26}{format_energy(found.energy_j):>9}")
    return lines


def format_line(found: Goodput) -> str:
    """64 % of 29s in steps that counted, 21 % work lost, 10 % recovery; 1,042 tok/s overall; 2.91 Wh"""
    parts = sorted(found.seconds.items(), key=lambda item: -item[1])
    others = [
        f"{100 * value / found.busy_s:.0f} % {KINDS[kind]}"
        for kind, value in parts
        if kind not in ("steps", "idle") and value and value >= 0.05 * found.busy_s
    ]
    share = "n/a" if found.share is None else f"{100 * found.share:.0f} %"
    speed = "" if found.tok_per_sec is None else f"; {found.tok_per_sec:,.0f} tok/s overall"
    energy = "" if found.energy_j is None else f"; {format_energy(found.energy_j)}"
    return f"{share} of {format_duration(found.busy_s)} in {', '.join([KINDS['steps'], *others])}{speed}{energy}"
