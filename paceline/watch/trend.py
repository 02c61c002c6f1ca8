"""
Whether a curve rises, falls, turns up, is level or suddenly 0, and whether steps have become slower, judged against the
curve's own noise. Pure.

A rise is a stretch of the last lines whose mean lies `Z_RISE` standard errors above the lines before them. Where the older
half of those lines is clearly higher than the newer one, the curve was falling, and only the newer half counts.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import inf, isfinite, sqrt
from typing import Any

from paceline.noise import ABRUPT, CLIP, clip, level_of, standard_errors_below, turn_of
from paceline.units import unix_time
from paceline.watch.measures import format_figure
from paceline.watch.snapshot import Series, Snapshot

STRETCH_LINES = 40  # the longest stretch of last lines that is judged
WHOLE_LINES = 4 * STRETCH_LINES  # the end of a curve that is never thinned: a stretch and what it is compared with
MIN_STRETCH, MIN_BEFORE, MIN_PART = 5, 20, 8
Z_RISE, Z_FALL, Z_LEVEL = 4.2, 3.0, 1.0  # standard errors
MIN_RISE = 0.01  # of the level: a smaller one is nobody's concern
MEAN_LINES = 20
PACE_LINES, MIN_PACE_LINES = 5, 10  # whose median is the present pace, and how many show a past
SLOWER = 1.5


def rise_of(series: Series) -> tuple[float, int] | None:
    """Returns by which share the last values are higher than those before them, and since which step; None: they are not."""
    places = finite_places(series)[-WHOLE_LINES:]
    values = [series.values[at] for at in places]
    longest = min(STRETCH_LINES, len(values) // 2, len(values) - MIN_BEFORE)
    if longest < MIN_STRETCH:
        return None
    before = values[:-longest]
    while (
        len(half := before[len(before) // 2 :]) >= MIN_BEFORE
        and standard_errors_below(half, before[: -len(half)]) > Z_FALL
    ):
        before = half
    level, noise = level_of(before)
    total, highest, length = 0.0, 0.0, 0
    for count, value in enumerate(reversed(values[-longest:]), 1):
        total += clip(value - level, CLIP * noise)
        z = total / (noise * sqrt(count + count**2 / len(before)))
        if count >= MIN_STRETCH and z > highest:
            highest, length = z, count
    if highest < Z_RISE * (1 + 7 / len(before)):  # about as Student's t, whose noise is known from as few lines
        return None
    rise = (statistics.fmean(values[-length:]) - level) / abs(level) if level else 0.0
    return (rise, series.steps[places[-length]]) if rise > MIN_RISE else None


def finite_places(series: Series) -> list[int]:
    """Returns the indices of the values that are neither NaN nor infinite."""
    return [at for at, value in enumerate(series.values) if isfinite(value)]


def is_falling(series: Series) -> bool | None:
    """Whether the newer of the last two parts of a curve is clearly lower; None for a short curve.

    A part is up to a third of the curve and ends at one of few points, and a doubtful part leaves the answer of the point
    before it: the answer does not change from line to line.
    """
    values = [series.values[at] for at in finite_places(series)]
    if len(values) < 3 * MIN_PART:
        return None
    while len(values) >= 3 * MIN_PART:
        part = 1 << ((len(values) // 3).bit_length() - 1)
        values = values[: len(values) - len(values) % (part // 4)]
        z = standard_errors_below(values[-part:], values[-2 * part : -part])
        if not Z_LEVEL < z < Z_FALL:
            return z >= Z_FALL
        values = values[:-1]
    return False


def slowdown(times: Sequence[float]) -> tuple[float, float] | None:
    """Returns the present time of a step and its usual best; None where the present is not clearly longer."""
    times = [value for value in times if isfinite(value)]
    if len(times) < MIN_PACE_LINES:
        return None
    present, best = statistics.median(times[-PACE_LINES:]), statistics.quantiles(times, n=4)[0]
    return (present, best) if present > SLOWER * best else None


def step_times(snapshot: Snapshot) -> list[float]:
    """Returns the finite times of the logged steps since the number of ranks last changed, in milliseconds."""
    series, since = snapshot.series.get("step_ms", Series()), 0.0
    for before, attempt in pairwise(snapshot.attempts):
        since = unix_time(attempt.time) if attempt.world_size != before.world_size else since
    times = series.times or [inf] * len(series.values)
    return [value for value, time in zip(series.values, times, strict=True) if time >= since and isfinite(value)]


def mean_speed(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns step_ms, tok_per_sec and mfu of a run that has ended: means over the steps of its last MEAN_LINES lines.

    The last line alone often covers one step: the number of steps need not be a multiple of log_every. lines: of one attempt
    in metrics.jsonl; the first of them only tells where the next one begins. Empty where no speed is known.
    """
    numbers = [line for line in lines if all(type(line.get(name)) in (int, float) for name in ("step", "step_ms"))]
    pairs = [(last["step"] - line["step"], last["step_ms"]) for line, last in pairwise(numbers[-MEAN_LINES - 1 :])]
    num_steps, total_ms = sum(count for count, _ in pairs), sum(count * step_ms for count, step_ms in pairs)
    if not (num_steps and total_ms):
        return {}
    last, mean_ms = numbers[-1], total_ms / num_steps
    speeds = {name: last[name] for name in ("tok_per_sec", "mfu") if type(last.get(name)) in (int, float)}
    return {"step_ms": round(mean_ms, 2)} | {
        name: round(v * last["step_ms"] / mean_ms, 4) for name, v in speeds.items()
    }


def fell_to_zero(snapshot: Snapshot) -> bool:
    """Whether the loss is suddenly 0, by which transformers shows NaN; a loss that was small before, as GRPO's, may be 0."""
    if snapshot.loss != 0:
        return False
    values = snapshot.series.get("loss", Series()).values
    before = next((value for value in reversed(values) if value and isfinite(value)), None)
    if before is None:  # other programs print a small loss as 0.000
        return snapshot.kind == "training" or snapshot.framework == "Hugging Face Trainer"
    return before > ABRUPT


def turns_up(snapshot: Snapshot) -> Iterator[str]:
    """Yields since when a metric of held-out text rises: the run overfits."""
    for name in ("val_bpb", "val_loss"):
        series = snapshot.series.get(name, Series())
        places = finite_places(series)
        turn = turn_of([series.values[at] for at in places])
        if turn is not None:
            lowest, last = (format_figure(name, series.values[places[at]]) for at in (turn, -1))
            since = f" since step {series.steps[places[turn]]:,}" if snapshot.step else ""
            yield f"the {name} rises{since}, from {lowest} to {last}"
