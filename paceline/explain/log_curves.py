"""
Judges the curves on the lines of a log: losses, rewards, memory. Pure.

A log says less than a file of metrics: of a long one only a part of the lines is read, and a name on a line may mean anything. So
the limits are wider here, and a loss that hardly moves is no failure, but no sign either that the run works.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from paceline.explain.curve_verdict import (
    MIN_POINTS,
    SPIKE,
    STANDS_STILL,
    START_RISE,
    STRETCHES,
    STUCK_FALL,
    CurveFinding,
    add_findings,
    find_growth,
    find_overfitting,
    find_rises,
    find_still,
    is_stuck,
    is_whole,
)
from paceline.explain.explanation import Explanation, format_value
from paceline.explain.log import Log
from paceline.explain.series import (
    LOSS,
    MEMORY,
    REWARD,
    VALIDATION,
    MetricSeries,
    evenly_spaced,
    line_series,
    show_curve,
)
from paceline.explain.verdict import HEALTHY, UNKNOWN
from paceline.noise import median, standard_errors_below

LOG_RISE = 1.0  # of a loss that was higher at first
PART_RISE = 9.0  # of one whose first steps are not in the log
ZEROS, ZERO_REWARDS = 3, 10  # on the lines of a log, if no others are there
NO_REWARD = "every reward is 0"
LOG_GROWTH = 0.2  # of memory
MIN_FLAT, FLAT_RANGE = 5, 0.0015  # points of a loss, and the share of its level that they span
Z_FALL, MAX_FALL = 2.0, 0.05  # of a loss, in standard errors and as a share: less is no fall
LEARNED = 0.5  # of its first value: a loss that is lower for good has fallen before the points where it is level


def judge_progress(explanation: Explanation, logs: Sequence[Log]) -> Explanation:
    """The explanation of logs; where it shows no failure, the curves on the lines of the log with the most are judged too."""
    if explanation.shows_failure:
        return explanation
    points = {
        name: max((getattr(log, name) for log in logs), key=len, default=())
        for name in ("losses", "held_out", "memory", "rewards")
    }
    reported = line_series(points["losses"], source="log")
    losses, held_out = ([item for item in reported if item.kind == kind] for kind in (LOSS, VALIDATION))
    memories = [evenly_spaced(item) for item in line_series(points["memory"], source="log", kind=MEMORY)]
    still = (
        finding
        for finding in find_still(losses, [], [])
        if finding.at < len(finding.series.values) // 2 or is_stuck(finding.series.values)
    )
    findings = [
        *(rise for item in losses for rise in find_rises([item], least_rise(item))),
        *still,
        *find_unlearned(losses, held_out),
        *find_zeros(losses, ZEROS),
        *find_zeros(line_series(points["rewards"], source="log", kind=REWARD), ZERO_REWARDS, NO_REWARD),
        *find_growth(memories, LOG_GROWTH),
        *find_overfitting([*line_series(points["held_out"], source="log"), *held_out]),
    ]
    if not findings and explanation.cause == HEALTHY and (flat := next(filter(hardly_moves, losses + held_out), None)):
        return unproven(explanation, flat)
    return add_findings(explanation, findings[:1])


def find_zeros(series: Sequence[MetricSeries], at_least: int, reason: str | None = None) -> Iterator[CurveFinding]:
    """Curves on the lines of a log that are 0 wherever they are reported."""
    for item in series:
        if len(item.values) >= at_least and not any(item.values):
            yield CurveFinding(STANDS_STILL, item, 0, reason)


def find_unlearned(losses: Sequence[MetricSeries], held_out: Sequence[MetricSeries]) -> Iterator[CurveFinding]:
    """Losses of training that do not fall over the whole run, beyond their noise, while those of evaluations do not either."""
    if losses and held_out and not any(map(falls, [*losses, *held_out])):
        yield CurveFinding(STANDS_STILL, losses[0], 0)


def falls(series: MetricSeries) -> bool:
    """Whether a loss falls, or has too few points to tell."""
    values = list(filter(math.isfinite, series.values))
    third = len(values) // 3
    if len(values) < MIN_POINTS or not is_whole(series):
        return True
    first, last = values[:third], values[-third:]
    return standard_errors_below(last, first) > Z_FALL or median(last) < (1 - MAX_FALL) * median(first)


def least_rise(series: MetricSeries) -> float:
    """The share of its lowest level by which a loss must rise: less where it ends above its first points, more in a later part."""
    if not is_whole(series):
        return PART_RISE
    last = list(filter(math.isfinite, series.values[-STRETCHES[0] :]))
    return START_RISE if last and median(last) > max(series.values[:SPIKE]) else LOG_RISE


def hardly_moves(series: MetricSeries) -> bool:
    """Whether a curve that begins where its run did is nearly the same at all of its few points, or at most of its last ones."""
    values = list(filter(math.isfinite, series.values))
    if len(values) < MIN_FLAT or not is_whole(series):
        return False
    tail = values[len(values) // 4 :]
    if abs(median(tail)) < LEARNED * abs(values[0]):
        return False
    fell = median(values[: len(values) // 4] or values) - median(tail)
    return max(tail) - min(tail) < FLAT_RANGE * abs(values[0]) and fell < STUCK_FALL * abs(values[0])


def unproven(explanation: Explanation, flat: MetricSeries) -> Explanation:
    """The explanation of a log without a failure whose loss does not show that anything is learned."""
    first, last = (format_value(flat.name, flat.values[at]) for at in (0, -1))
    summary = (
        f"no failure found, but the loss hardly moves: {flat.name} {first} to {last} over {len(flat.values):,} reports"
    )
    fix = "check the learning rate, that the weights are those that were meant to be loaded, and that the labels are not masked"
    return replace(explanation, cause=UNKNOWN, confidence=0.0, summary=summary, fix=fix, curves=(show_curve(flat),))
