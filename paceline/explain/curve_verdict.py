"""
Judges the curves of a run: NaN, a loss that rises or stands still, memory that grows, speed that falls, overfitting. Pure.

A finding must stand out of the curve's own noise at its end: what recovered, as a spike does, is none. Medians and quartiles of
stretches are compared, so heavy tails and single spikes count little; a rise must also be many standard errors (noise.py) high.
What a finding is called and what helps stands in the catalogue.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from paceline import noise
from paceline.explain.catalogue import load_catalogue
from paceline.explain.explanation import HEALTHY, UNKNOWN, CurveEvidence, Explanation, LogProgress, format_value
from paceline.explain.sentences import clean_values, fill_template
from paceline.explain.series import (
    ACCURACY,
    ALL_STEPS,
    GRADIENT,
    LOSS,
    MEMORY,
    PART_LOSS,
    RATE,
    REWARD,
    SCORE,
    STEP_TIME,
    THROUGHPUT,
    VALIDATION,
    MetricSeries,
)
from paceline.explain.verdict import NAN
from paceline.units import format_number_of

DIVERGED, STANDS_STILL = "loss-diverged", "loss-stands-still"
MEMORY_GROWS, SLOWS_DOWN, OVERFITS = "memory-grows", "throughput-decays", "validation-turns-up"

CURVE_COLUMNS = 48  # of a curve that is shown
MAX_POINTS = 2000  # of a curve that is judged; of a longer one, medians of neighbours
LOSS_RISE, SLOWER, MIN_SLOW_S = 0.15, 0.3, 60.0  # shares of the level that are somebody's concern; for how long
LEARNED = 0.5  # of its first value: a loss below it has learned
NOT_NORMALIZED, FROM_START = "a loss of this size that does not fall", "from its first value on"
BELOW_ZERO = "a cross entropy below 0: the labels are not between 0 and 1"
FAR_BELOW, NAN_GRADIENTS = 1e7, 5  # no likelihood of a batch; in a row: fp16's loss scale causes fewer NaN
REPEATED = "each epoch repeats the losses of the one before: no weight changes"
BOTH_RISE = 0.4  # of a loss beside evaluations that have risen by as much
MIN_SCORES, NEAR_BEST = 3, 0.02  # points of evaluations, and the share by which the last may miss the best
LATEST_START = 0.1  # of the last step: a curve that begins later has lost its beginning
MIN_GROWTH = 0.1  # of memory
GROWTH_STARTS = (0.2, 0.4, 0.6)  # of the curve: memory grows in any run at first, and a leak may begin late
REWARD_PARTS, REWARD_LEFT = 10, 0.8  # of a reward's course; of its highest gain, at its end
WORSE = 0.98  # of the score at the lowest point, which no later one reaches
FLAT_VALIDATION, MAX_FALL, LOW_ACCURACY = 0.005, 0.05, 0.5  # shares of the first value: less is no fall of a loss
# of a validation curve alone, as a share of its first value: above it nothing shows that the run works
NO_HEALTH, CONFIDENCE, FEW_CONFIDENCE = 0.1, 0.8, 0.6
HIGHER = "compare it with the loss that is trained, if it is another: where that falls, use the checkpoint with the lowest value"


@dataclass(frozen=True)
class CurveFinding:
    """What is wrong with a curve. at: the index of the point where it began; reason: what another curve says about it."""

    cause: str
    series: MetricSeries
    at: int
    reason: str | None = None


def explain_curves(series: Sequence[MetricSeries], notes: Sequence[str], *, names: str) -> Explanation:
    """The explanation of metrics alone. names: of the files, for the sentence that says that they show nothing."""
    few, share = (
        (2, 1 - MAX_FALL) if any(ALL_STEPS in note for note in notes) else (noise.LEAP_POINTS, noise.COMING_DOWN)
    )
    long = [item for item in series if item.kind not in (SCORE, ACCURACY) and is_judged(item)]
    losses = [item for item in series if item.kind == LOSS and len(item.values) >= few]
    judged = long or [item for item in losses if 0 <= item.values[-1] < share * item.values[0]]
    judged = judged or [item for item in series if is_judged(item) and item.values[-1] > item.values[0]]
    if findings := judge_curves(series):
        return add_findings(Explanation(HEALTHY, notes=tuple(notes)), findings)
    if not judged:
        reason = "no curve has the name of a loss, of memory or of a speed"
        if series:
            numbers = (f"{item.name} has {format_number_of(len(item.values), 'point')}" for item in series[:3])
            reason = f"{', '.join(numbers)}, too few to judge"
        elif notes:
            reason = "nothing whole to read"
        fix = "pass the log of the run: paceline explain LOG; or name curves as trainers do: train/loss, val/loss"
        return Explanation(UNKNOWN, summary=f"{names}: {reason}", fix=fix, notes=tuple(notes))
    shown = next((item for kind in (LOSS, VALIDATION, PART_LOSS) for item in judged if item.kind == kind), judged[0])
    first, last = (format_value(shown.name, shown.values[at]) for at in (0, -1))
    points, steps = f"{len(shown.values):,} points", f"step {shown.steps[0]:,} to {shown.steps[-1]:,}"
    # of several parts, as of a GAN, one may rise
    is_one = shown.kind == VALIDATION or [item.kind for item in judged if item.kind == PART_LOSS] == [shown.kind]
    if is_one and shown.values[-1] > (1 + NO_HEALTH) * abs(shown.values[0]):
        summary = f"no failure is certain, but {shown.name} ends above its first value: {first} to {last}, {points}"
        return Explanation(UNKNOWN, summary=summary, fix=HIGHER, curves=(show_curve(shown),), notes=tuple(notes))
    return Explanation(
        HEALTHY, confidence=CONFIDENCE if long else FEW_CONFIDENCE, curves=(show_curve(shown),), notes=tuple(notes),
        summary=f"no failure found: {shown.name} {first} to {last}, {steps}, {points}",
        progress=LogProgress(len(shown.values), shown.steps[0], shown.steps[-1]),
    )  # fmt: skip


def add_findings(explanation: Explanation, findings: Sequence[CurveFinding]) -> Explanation:
    """The explanation with the curves as evidence; what a log shows stays the cause, but for a healthy log."""
    curves = []
    for finding in findings:
        values, series = sentence_values(finding), finding.series
        cause, step = load_catalogue().causes[finding.cause], series.steps[finding.at]
        summary = fill_template(cause.summary, values)
        fix = fill_template(cause.choose_fix(finding.reason or "")[0], values, has_commands=True)
        curves.append(replace(show_curve(series), cause=cause.id, step=step, summary=summary))
        if not explanation.shows_failure:
            explanation = replace(
                explanation, cause=cause.id, summary=summary, fix=fix, step=step, confidence=CONFIDENCE
            )
    return replace(explanation, curves=tuple(curves))


def sentence_values(finding: CurveFinding) -> dict[str, str]:
    """The values for a sentence of the catalogue."""
    series, at = finding.series, finding.at
    step, last_step = series.steps[at], series.steps[-1]
    if finding.cause == NAN:
        return clean_values({"message": f"{series.name} from step {step} to its end, step {last_step}"})
    value, last = series.values[at], series.values[-1]
    if finding.cause not in (OVERFITS, STANDS_STILL) and len(series.values) >= noise.MIN_POINTS:
        (value, step), (last, last_step) = (middle_point(series, end) for end in (at + 1, len(series.values)))
    texts = {"value": format_value(series.name, value), "last_value": format_value(series.name, last)}
    if finding.cause == STANDS_STILL and 0 <= min(value, last) < LEARNED * max(value, last):
        texts = {}  # single values of a noisy curve, which would contradict the sentence
    return clean_values({"series": series.name, "step": step, "last_step": last_step, "reason": finding.reason} | texts)


def middle_point(series: MetricSeries, end: int) -> tuple[float, int]:
    """The value and the step of the point whose value is the median of the last few before an index."""
    points = [point for point in zip(series.values[:end], series.steps, strict=False) if math.isfinite(point[0])]
    near = sorted(points[-noise.SPIKE :])
    return near[(len(near) - 1) // 2]


def judge_curves(series: Sequence[MetricSeries]) -> list[CurveFinding]:
    """The findings, at most one of each cause, the gravest first."""
    by_kind: dict[str, list[MetricSeries]] = {}
    for item in series:
        by_kind.setdefault(item.kind, []).append(item)
    # the loss of a policy rises and stands still while it learns
    losses = [] if REWARD in by_kind else by_kind.get(LOSS, [])
    diverged = list(find_rises(losses))
    findings = [
        *find_nan(by_kind),
        *diverged,
        *([] if diverged else find_still(losses, by_kind.get(RATE, []), by_kind.get(GRADIENT, []))),
        *([] if diverged else find_unlearned(losses, by_kind.get(VALIDATION, []), by_kind.get(ACCURACY, []))),
        *find_growth(by_kind.get(MEMORY, [])),
        *find_slowdown(by_kind),
        *([] if diverged else find_overfitting(by_kind.get(VALIDATION, []), by_kind.get(SCORE, []))),
    ]
    first: dict[str, CurveFinding] = {}
    for finding in findings:
        first.setdefault(finding.cause, finding)
    return list(first.values())


def is_whole(series: MetricSeries) -> bool:
    """Whether a curve begins where its run did."""
    return series.steps[0] <= max(1, LATEST_START * series.steps[-1])


def is_learned(series: MetricSeries) -> bool:
    """Whether a loss has nearly vanished since its first points, where any noise multiplies it."""
    return is_whole(series) and 0 <= series.values[-1] < noise.NEAR_ZERO * max(series.values[: noise.SPIKE])


def is_judged(series: MetricSeries) -> bool:
    """Whether a curve has enough points to say that nothing is wrong with it."""
    return len(series.values) >= (noise.MIN_VALIDATION if series.kind == VALIDATION else noise.MIN_POINTS)


def is_lowest_at_end(series: MetricSeries) -> bool:
    """Whether a loss of evaluations ends at about its lowest, below where it began."""
    values = series.finite
    return len(values) >= MIN_SCORES and values[-1] <= (1 + NEAR_BEST) * min(values) < values[0]


def ends_below_start(series: MetricSeries) -> bool:
    """Whether a loss ends below its first points, so that a rise may be that of a term which joined it."""
    values = series.finite
    return bool(values) and noise.median(values[-noise.SPIKE :]) < max(values[: noise.SPIKE])


def ends_high(series: MetricSeries) -> bool:
    """Whether the last of many evaluations have a loss far above the lowest."""
    values = series.finite
    return len(values) >= noise.MIN_POINTS and noise.median(values[-noise.SPIKE :]) > (1 + BOTH_RISE) * min(values) > 0


def improves(reward: MetricSeries) -> bool:
    """Whether a reward rises beyond its noise, and is as high at its end as about its best."""
    values = thinned(reward).values
    if not is_judged(reward) or not noise.falls([-value for value in values], math.inf):
        return False
    length = max(noise.SPIKE, len(values) // REWARD_PARTS)
    levels = [noise.median(values[at : at + length]) for at in range(0, len(values), length)]
    return noise.median(values[-length:]) - levels[0] >= REWARD_LEFT * (max(levels) - levels[0])


def find_nan(by_kind: Mapping[str, Sequence[MetricSeries]]) -> Iterator[CurveFinding]:
    """Losses, or gradient norms, that are NaN or infinite to their end; losses of parts only if half of them are."""
    for kind, at_least in ((LOSS, 1), (GRADIENT, NAN_GRADIENTS), (PART_LOSS, NAN_GRADIENTS)):
        curves, broken = by_kind.get(kind, ()), []
        for item in curves:
            at = max((at for at, value in enumerate(item.values, 1) if math.isfinite(value)), default=0)
            broken += [CurveFinding(NAN, item, at)] if len(item.values) - at >= at_least else []
        yield from broken if kind != PART_LOSS or 2 * len(broken) >= len(curves) else ()


def find_rises(losses: Sequence[MetricSeries], min_rise: float = LOSS_RISE) -> Iterator[CurveFinding]:
    """Losses that have risen, by a share of their lowest level, to their end; or that are too high and do not fall."""
    for series in losses:
        finite = thinned(series)
        values = finite.values
        if not values or is_learned(finite) or noise.is_running_sum(values):
            continue
        if "crossentropy" in series.name.lower().replace("_", "") and max(values[-noise.LEAP_POINTS :]) < 0:
            yield CurveFinding(DIVERGED, series, 0, BELOW_ZERO)
        elif max(values[-noise.LEAP_POINTS :]) < -FAR_BELOW:
            if (at := noise.leap([abs(value) for value in values])) is not None:
                yield finding_at(DIVERGED, series, finite.steps[at])
        elif min(values) >= 0 < min(values[: noise.LEAP_POINTS]):
            long_rises = (rise(values, min_rise) for rise in (noise.rise_to_end, noise.rise_from_start))
            rises = (*long_rises, noise.leap(values), noise.short_rise(values), noise.jump(values))
            at = next((at for at in rises if at is not None), None)
            if at is not None and at <= 1 and is_whole(series):
                yield CurveFinding(DIVERGED, series, 0, FROM_START)
            elif at is not None:
                yield finding_at(DIVERGED, series, finite.steps[at])
            elif noise.is_too_high(values):
                yield CurveFinding(DIVERGED, series, 0, NOT_NORMALIZED)


def find_still(
    losses: Sequence[MetricSeries], rates: Sequence[MetricSeries], gradients: Sequence[MetricSeries]
) -> Iterator[CurveFinding]:
    """A loss that repeats one value, does not fall while nothing is learned, or is level from the first step."""
    for series in losses:
        finite = thinned(series)
        values, steps = finite.values, finite.steps
        if (at := noise.constant_tail(values)) is not None and abs(values[-1]) > 0.01 and not noise.is_rounded(values):
            yield finding_at(STANDS_STILL, series, steps[at])
            continue
        if noise.repeats_epochs(values):
            yield finding_at(STANDS_STILL, series, steps[0], REPEATED)
            continue
        reasons = ((rates, "the learning rate is 0"), (gradients, "the gradient norm is 0"))
        for others, reason in reasons:
            tails = ((item, noise.constant_tail(item.values)) for item in others if not item.values[-1])
            starts = [item.steps[start] for item, start in tails if start is not None]
            if not starts or len(starts) < len(others):
                continue
            after = [value for step, value in zip(steps, values, strict=True) if step >= max(starts)]
            first, last = after[: len(after) // 3], after[-len(after) // 3 :]
            is_long = len(after) >= noise.SAME_VALUES and not noise.comes_down_to_zero(values)
            if is_long and noise.standard_errors_below(last, first) <= 3:
                yield finding_at(STANDS_STILL, series, max(starts), reason)
                break
        else:
            if is_whole(series) and noise.is_stuck(values):
                yield finding_at(STANDS_STILL, series, steps[0 if noise.is_level(values) else -(len(values) // 3)])


def find_unlearned(
    losses: Sequence[MetricSeries], held_out: Sequence[MetricSeries], accuracies: Sequence[MetricSeries] = ()
) -> Iterator[CurveFinding]:
    """Losses that do not fall beyond their noise while no evaluation does, or while an accuracy below a half does not rise."""
    low = [item.values for item in accuracies if is_judged(item) and max(item.values) < LOW_ACCURACY]
    is_low = any(not noise.falls([-value for value in values], math.inf) for values in low)
    long = [item for item in losses if len(item.values) > 1]  # a single one is the mean of a run
    falling = (may_fall(item, math.inf if is_low else MAX_FALL) for item in long)
    if long and (is_low or not all(map(may_fall, held_out))) and not any(falling):
        yield CurveFinding(STANDS_STILL, long[0], 0)


def may_fall(series: MetricSeries, max_fall: float = MAX_FALL) -> bool:
    """Whether a loss falls, or has too few points to tell: fewer will do for evaluations within half a percent."""
    values = thinned(series).values or [0.0]
    is_flat = series.kind == VALIDATION and max(values) - min(values) < FLAT_VALIDATION * abs(values[0])
    if len(values) < (noise.MIN_VALIDATION if is_flat else noise.MIN_POINTS) or not is_whole(series):
        return True
    late = noise.median(values[-(len(values) // 3) :])
    has_learned = series.kind == LOSS and 0 <= late < LEARNED * max(values[: noise.SPIKE])
    return has_learned or noise.falls(values, max_fall)


def find_growth(memories: Sequence[MetricSeries], min_growth: float = MIN_GROWTH) -> Iterator[CurveFinding]:
    """Memory that grows, by a share of its first level, to its end."""
    for series in memories:
        finite = thinned(series)
        parts = (finite.values[int(share * len(finite.values)) :] for share in GROWTH_STARTS)
        if any(noise.grows(part, min_growth) for part in parts):
            yield finding_at(MEMORY_GROWS, series, finite.steps[noise.start_of_growth(finite.values)])
        elif noise.grows_evenly(finite.values, min_growth):
            yield finding_at(MEMORY_GROWS, series, finite.steps[1])


def find_slowdown(by_kind: Mapping[str, Sequence[MetricSeries]], slower: float = SLOWER) -> Iterator[CurveFinding]:
    """Speeds that have fallen; from the times of the losses, if no curve has a speed."""
    speeds = [*by_kind.get(THROUGHPUT, ()), *by_kind.get(STEP_TIME, ())]
    for series in speeds or [speed for loss in by_kind.get(LOSS, ())[:1] for speed in [speed_of(loss)]]:
        finite = thinned(series)
        slow = [value if series.kind == STEP_TIME else 1 / value for value in finite.values if value > 0]
        if len(slow) < len(finite.values) or (at := noise.rise_to_end(slow, slower)) is None:
            continue
        lasted_s = finite.times[-1] - finite.times[at]
        if not lasted_s < MIN_SLOW_S:  # NaN where times are unknown
            yield finding_at(SLOWS_DOWN, series, finite.steps[at])


def find_overfitting(curves: Sequence[MetricSeries], scores: Sequence[MetricSeries] = ()) -> Iterator[CurveFinding]:
    for series in curves:
        finite = thinned(series)
        turns = (turn_with_score(finite, item.values) for item in scores if item.steps == finite.steps)
        leaps = [finite.values.index(min(finite.values))] if noise.leap(finite.values) is not None else []
        at = next((at for at in (noise.turn_of(finite.values), *turns, *leaps) if at is not None), None)
        if at is not None:
            yield finding_at(OVERFITS, series, finite.steps[at])


def finding_at(cause: str, series: MetricSeries, step: int, reason: str | None = None) -> CurveFinding:
    return CurveFinding(cause, series, next(at for at, other in enumerate(series.steps) if other >= step), reason)


def turn_with_score(series: MetricSeries, scores: Sequence[float]) -> int | None:
    """Where a curve of few points is lowest, all later ones are far higher, and the score is best there or before."""
    at = min(range(len(scores)), key=series.values.__getitem__)
    lowest, after = series.values[at], series.values[at + 1 :]
    is_few = len(after) >= noise.MIN_AFTER and len(scores) < noise.MIN_VALIDATION
    is_worse = is_few and max(scores[at + 1 :]) < WORSE * scores[at] and min(after) > (1 + noise.FEW_RISE) * lowest > 0
    return at if is_worse else None


def thinned(series: MetricSeries) -> MetricSeries:
    """The finite points; of more than MAX_POINTS, the median of each few neighbours."""
    points = [point for point in zip(series.steps, series.values, series.times, strict=True) if math.isfinite(point[1])]
    size = 1 + len(points) // (MAX_POINTS + 1)
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    return replace(
        series,
        steps=[group[0][0] for group in groups],
        values=[noise.median(value for _, value, _ in group) for group in groups],
        times=[group[0][2] for group in groups],
    )


def evenly_spaced(series: MetricSeries) -> MetricSeries:
    """The curve at as many steps at even distances; of a long log some parts are read line by line and others are sampled."""
    steps, values = series.steps, series.values
    places = [steps[0] + (steps[-1] - steps[0]) * number // max(1, len(steps) - 1) for number in range(len(steps))]
    even = []
    for place in places:
        after = bisect_left(steps, place)
        before = max(0, after - 1)
        share = (place - steps[before]) / (steps[after] - steps[before]) if after > before else 1.0
        even.append(values[before] + share * (values[after] - values[before]))
    return replace(series, steps=places, values=even, times=[math.nan] * len(places))


def show_curve(series: MetricSeries) -> CurveEvidence:
    """The curve, thinned to the medians of neighbours between its ends."""
    size = 1 + (len(series.values) - 1) // CURVE_COLUMNS
    groups = [series.values[at : at + size] for at in range(0, len(series.values), size)]
    medians = [
        noise.median(finite) if len(finite := list(filter(math.isfinite, group))) > len(group) // 2 else None
        for group in groups
    ]
    for end in (0, -1):
        medians[end] = series.values[end] if math.isfinite(series.values[end]) else None
    steps = (*series.steps[::size][:-1], series.steps[-1])
    return CurveEvidence(series.name, series.source, steps, tuple(medians))


def speed_of(loss: MetricSeries) -> MetricSeries:
    """The steps per second between the points of a curve whose times are known."""
    pairs = list(pairwise(zip(loss.steps, loss.times, strict=True)))
    rates = [(step, (step - start) / (time - before), time) for (start, before), (step, time) in pairs if time > before]
    steps, values, times = map(list, zip(*rates, strict=True)) if len(rates) == len(pairs) > 0 else ([], [], [])
    return MetricSeries("steps per second", THROUGHPUT, loss.source, steps, values, times)
