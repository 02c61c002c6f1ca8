"""
Where a run's time went: steps whose work is in the weights, and everything else; from events.jsonl and metrics.jsonl.

Every second from the first command to the last event is of one kind. A script's attempt whose supervisor was killed has no last
event: it ends when a rank last wrote to its log. Everything that an attempt did after the checkpoint from which the next resumed
is lost, and in a script the silence of a hang and, by the steps in its logs, those that a later attempt repeats. What only a
broken attempt makes necessary is recovery: explanation, wait, start-up. Steps take the step_ms of metrics.jsonl. Other time
between two of its lines is an evaluation where the second line has one, a checkpoint where one began between them, and belongs
to the steps otherwise.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.rundir import RunDir
from paceline.units import parse_time, unix_time
from paceline.watch.growing_file import JsonRecord
from paceline.watch.snapshot import TIME_KINDS, Goodput

StepLines = NDArray[Any]  # one record of LINE_FIELDS for each line of metrics.jsonl

LINE_FIELDS = ("step", "time", "step_ms", "val_bpb")
MAX_LATE_S = 60.0  # of a file behind its last event: a later one is a copy, or its disk has another clock


def step_lines(columns: Iterable[ArrayLike]) -> StepLines:
    """Returns the lines of metrics.jsonl that report steps. columns: LINE_FIELDS as float64; val_bpb is NaN where a line has none.

    The line of step 0, an evaluation before the first step, has no step_ms: that time belongs to the start-up.
    """
    lines = np.rec.fromarrays(list(columns), dtype=[(name, float) for name in LINE_FIELDS])
    steps: StepLines = lines[~np.isnan(lines["step_ms"])]
    return steps


@dataclass
class Attempt:
    """One attempt by its events; times are Unix seconds."""

    start: float
    session: int  # index of the command that ran it
    end: float
    lines: StepLines
    number: int | None = None
    state: str | None = None  # None: its supervisor was killed before it could report one
    resumed: int = 0  # the step that it resumed from
    saved: list[int] = field(default_factory=list)  # steps of its checkpoints
    samples: list[int] = field(default_factory=list)
    saved_at: float = 0.0  # the last checkpoint and the last sample
    sampled_at: float = 0.0
    hung_at: float = math.inf  # when the silence of its hang began


def last_writes(run: RunDir, events: Sequence[JsonRecord]) -> dict[int, float]:
    """Returns when a rank of each attempt last wrote to its log, by attempt; empty where the files have other times."""
    times: dict[int, float] = {}
    with suppress(OSError, ValueError):  # without files, or in a folder that is changed meanwhile, nothing is known
        if not events or abs(run.events.stat().st_mtime - unix_time(events[-1]["time"])) > MAX_LATE_S:
            return {}
        for path in run.logs(0).parent.glob("*/*.log"):
            if path.stem.isdecimal() and (stat := path.stat()).st_size:
                number = int(path.parent.name)
                times[number] = max(times.get(number, 0.0), stat.st_mtime)
    return times


def goodput(
    events: Sequence[JsonRecord],
    metrics: StepLines,
    *,
    tokens_per_step: int | None,
    now: float | None = None,
    written: Mapping[int, float] | None = None,
    spans: Mapping[int, tuple[int, int]] | None = None,
) -> Goodput:
    """Sorts a run's time into kinds. tokens_per_step None: a script's run, whose attempts count as steps but for repeated ones.

    now: the time, in seconds since 1970, of a run that a process holds; None where none does. written: see last_writes.
    spans: the first and the last step of a script's attempts, where their logs show them.
    """
    attempts, launches = read_attempts(events, metrics, written=written if written and tokens_per_step is None else {})
    if now is not None and tokens_per_step is None and attempts and attempts[-1].state is None:
        attempts[-1].end = max(attempts[-1].end, now)  # a script's steps leave no line that shows how long it works
    seconds, num_steps = dict.fromkeys(TIME_KINDS, 0.0), 0
    for index, attempt in enumerate(attempts):
        before = attempts[index - 1] if index else None
        is_retry = before is not None and before.session == attempt.session
        # saved and ended for more hosts: nothing failed
        is_regrouped = before is not None and before.state == "regrouped"
        if before is not None and is_retry:
            seconds["start_up" if is_regrouped else "recovery"] += attempt.start - before.end
        elif attempt.session < len(launches):  # the first attempt of its command
            launch = launches[attempt.session]
            launched, prepared_s = parse_time(launch["time"]), launch.get("prepared_s", 0.0)
            seconds["start_up"] += attempt.start - launched
            seconds["checks"] += prepared_s
            if before is not None:
                seconds["idle"] += max(0.0, launched - prepared_s - before.end)
        hung_s = max(0.0, attempt.end - max(attempt.start, attempt.hung_at))
        repeated_s = repeated_share(attempts, index, spans or {}) * (attempt.end - attempt.start - hung_s)
        spent = {"steps": attempt.end - attempt.start - hung_s - repeated_s, "lost": hung_s + repeated_s}
        if tokens_per_step is not None:
            last_step = last_counted_step(attempts, index, running=now is not None)
            logged = int(attempt.lines["step"][-1]) if len(attempt.lines) else attempt.resumed
            num_steps += max(0, (logged if last_step == math.inf else int(last_step)) - attempt.resumed)
            spent = attempt_seconds(attempt, last_step=last_step)
        for kind, value in spent.items():
            seconds["recovery" if is_retry and not is_regrouped and kind == "start_up" else kind] += value
    result = Goodput({kind: round(max(0.0, value), 3) for kind, value in seconds.items()}, num_steps, None)
    if not tokens_per_step or not result.busy_s:
        return result
    return replace(result, tok_per_sec=round(num_steps * tokens_per_step / result.busy_s, 1))


def read_attempts(
    events: Sequence[JsonRecord], metrics: StepLines, *, written: Mapping[int, float]
) -> tuple[list[Attempt], list[JsonRecord]]:
    """Returns the attempts, each with its lines of metrics, and the `launch` or `script` events, one for each command."""
    attempts: list[Attempt] = []
    launches: list[JsonRecord] = []
    for event in events:
        kind, time = event.get("event"), parse_time(event["time"])
        if kind in ("launch", "script"):
            launches.append(event)
        elif kind == "attempt":
            session = max(0, len(launches) - 1)
            attempts.append(Attempt(time, session, end=time, lines=metrics[:0], number=event.get("attempt")))
        elif attempts and attempts[-1].state is None and attempts[-1].session == max(0, len(launches) - 1):
            attempt = attempts[-1]  # of a killed supervisor too, whose verdict the next command writes
            attempt.end = time
            match kind:
                case "attempt_ended":
                    attempt.state = event.get("state", "failed")
                case "hang":
                    attempt.hung_at = time - event.get("silent_s", 0.0)
                case "resumed":
                    attempt.resumed = event["step"]
                case "checkpoint":
                    attempt.saved.append(event["step"])
                    attempt.saved_at = time
                case "sample":
                    attempt.samples.append(event["step"])
                    attempt.sampled_at = time
    for index, attempt in enumerate(attempts):
        until = attempts[index + 1].start if index + 1 < len(attempts) else math.inf
        attempt.lines = metrics[(attempt.start <= metrics["time"]) & (metrics["time"] < until)]
        if attempt.state is None:
            last_lines = attempt.lines["time"][-1:].tolist()
            attempt.end = max(attempt.end, min(written.get(attempt.number or 0, 0.0), until), *last_lines)
    return attempts, launches


def repeated_share(attempts: Sequence[Attempt], index: int, spans: Mapping[int, tuple[int, int]]) -> float:
    """The share of the steps of a script's attempt that later ones repeat; 0 where that is not known. spans: see goodput."""
    numbers = [attempt.number or 0 for attempt in attempts[index:]]
    if numbers[0] not in spans or attempts[index].state == "finished":
        return 0.0
    first, last = spans[numbers[0]]
    restart = min((spans[number][0] for number in numbers[1:] if number in spans), default=last + 1)
    return min(1.0, max(0, last + 1 - restart) / (last + 1 - first))


def last_counted_step(attempts: Sequence[Attempt], index: int, *, running: bool) -> float:
    """The step up to which an attempt's work is in the weights; infinity where all of it is."""
    resumes = [attempt.resumed for attempt in attempts[index + 1 :] if attempt.resumed or len(attempt.lines)]
    if resumes:
        return min(resumes)
    if attempts[index].state == "finished" or running:
        return math.inf
    return max((step for attempt in attempts for step in attempt.saved), default=0)


def attempt_seconds(attempt: Attempt, *, last_step: float) -> dict[str, float]:
    """Returns an attempt's seconds by kind. last_step: see last_counted_step."""
    lines = attempt.lines[attempt.lines["step"] <= last_step]
    is_repeated = last_step < max(attempt.saved, default=0)  # what it saved was damaged or removed
    if not len(lines):
        made_no_step = attempt.state in ("interrupted", "regrouped") and not len(attempt.lines)
        ended_well = (attempt.state == "finished" and not is_repeated) or made_no_step
        return {"start_up" if ended_well else "lost": attempt.end - attempt.start}
    seconds = dict.fromkeys(("steps", "start_up", "compile", "checkpoint", "evaluation", "lost"), 0.0)
    first_s = float(lines["step_ms"][0]) / 1000
    usual_s = float(np.median(lines["step_ms"][1:] if len(lines) > 1 else lines["step_ms"])) / 1000
    seconds["start_up"] = max(0.0, float(lines["time"][0]) - attempt.start - first_s)
    seconds["compile"] = max(0.0, first_s - usual_s)
    wall = np.diff(lines["time"])
    steps_s = np.minimum(wall, np.diff(lines["step"]) * lines["step_ms"][1:] / 1000)
    seconds["steps"] = first_s - seconds["compile"] + float(steps_s.sum())
    for kind, mask in kinds_between(attempt, lines).items():
        seconds[kind] += float((wall - steps_s)[mask].sum())
    tail_s = max(0.0, attempt.end - float(lines["time"][-1]))
    ended_well = attempt.state in ("finished", "interrupted", "regrouped") and len(lines) == len(attempt.lines)
    is_kept = ended_well and not is_repeated
    if last_step == math.inf or is_kept:  # its last weights were saved, and nothing of it was done again
        begun = [float(lines["time"][-1]), *([attempt.saved_at] if attempt.saved_at < attempt.sampled_at else [])]
        sample_s = min(tail_s, max(0.0, attempt.sampled_at - max(begun)))  # the last sample, behind the last checkpoint
        seconds["evaluation"] += sample_s
        seconds["checkpoint"] += tail_s - sample_s
    else:
        unlogged_s = min(tail_s, (last_step - float(lines["step"][-1])) * float(lines["step_ms"][-1]) / 1000)
        seconds["steps"] += unlogged_s
        seconds["lost"] += tail_s - unlogged_s
    return seconds


def kinds_between(attempt: Attempt, lines: StepLines) -> dict[str, NDArray[np.bool_]]:
    """Returns a mask over pairs of neighbouring lines for each kind of time that may pass between them."""

    def contains(steps: Sequence[int]) -> NDArray[np.bool_]:
        """Whether one of the steps lies between the pair, its first step included and its last excluded."""
        before = np.searchsorted(np.sort(np.array(steps, dtype=float)), lines["step"])
        return np.asarray(np.diff(before) > 0)

    evaluation = ~np.isnan(lines["val_bpb"][1:]) | contains(attempt.samples)
    checkpoint = ~evaluation & contains(attempt.saved)
    return {"evaluation": evaluation, "checkpoint": checkpoint, "steps": ~evaluation & ~checkpoint}
