"""
Judges the curves on the lines of a log: losses, rewards, memory. Pure.

A log says less than a file of metrics: of a long one only a part of the lines is read, and a name on a line may mean anything. So
the limits are wider here, and a loss that hardly moves is no failure, but no sign either that the run works.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any

from paceline import noise
from paceline.explain import curve_verdict
from paceline.explain.curve_verdict import DIVERGED, FROM_START, LEARNED, OVERFITS, STANDS_STILL, CurveFinding
from paceline.explain.explanation import HEALTHY, UNKNOWN, Explanation, format_value
from paceline.explain.line_measures import MEAN_LOSS
from paceline.explain.log import EARLY_STOP, ZEROS, Log, line_series, shares_of, zero_reason
from paceline.explain.progress import LossPoint
from paceline.explain.series import LOSS, MEMORY, PART_LOSS, REWARD, SCORE, THROUGHPUT, VALIDATION, MetricSeries
from paceline.explain.verdict import NAN

Curves = Sequence[MetricSeries]
Points = Sequence[LossPoint]
EXPLODED = 1e3  # times its first points, or 1
LOG_RISE, PART_RISE = 1.0, 9.0  # of a loss that was higher at first; of one whose first steps are not in the log
ZERO_REWARDS, SAME_REWARDS, LOST_REWARDS = 10, 40, 20  # on the lines of a log, if no others are there
# of the highest reward: from below it a reward may have decayed to 0; times the usual distance of two points: more hides how
LOST_FROM, LOST_GAP = 0.1, 3
NO_REWARD, ONE_REWARD = "every reward is 0", "every reward is the same"
LOST_REWARD, MEAN_OF_ALL = "the reward fell to 0 and stays there", "the mean of all steps is exactly 0"
# points of a loss, and the share of its level that they span; such points that are no longer few; fewer that are the same
MIN_FLAT, FLAT_RANGE, MIN_STILL, FEW_SAME, SAME_RANGE = 5, 0.0015, 12, 4, 1e-4
# classes between which a model guesses: the loss is the logarithm of their number; how near to it, of many points and of few
MAX_CLASSES, NEAR_CHANCE, ABOUT_CHANCE = 10, 0.0015, 0.015
MIN_CHANCE, MIN_FEW = 30, 3  # points of the last half; of a curve that rounds its losses, beside one of evaluations
# losses of a guess between two classes; how near to ln 2 those behind the first are, the level of their last half, and epochs
MIN_HALF, LN_2, FEW_CHANCE, STILL_CHANCE, MIN_EPOCHS, EPOCH_CHANCE = 5, math.log(2), 0.03, 0.01, 8, 0.005
EVEN, ENDS_EVEN = 0.02, 0.05  # how near to a half its accuracies are: each of them, the last ones
LONG_EPOCHS, LONG_STEPS = 8, 200  # of a guess that no beginning explains
# of two networks that compete, whose losses may stay there
OF_GAN = re.compile(r"(?i)\b(?:discriminator|generator|adversar)|(?<![a-z])(?:[dg][ _]?loss|loss[ _]?[dg])(?![a-z])")
CHANCE = "ln {number}, as of a guess between {number} classes"
LOG_GROWTH, LOG_SLOWER = 0.2, 1.0  # of memory, of the time for a sample
MIN_SAME_SCORES = 20  # evaluations
STEADY_RISES, STEADY_RISE = 7, 0.03  # from each point of a loss to the next; as a share of the first one
PERFECT, TINY = 0.99, 0.01  # an accuracy; a loss beside it, whose last digit may stay
RISEN = 1.2  # times its first value: a score, as a loss falls
TRAIN_RISE, FAR_ABOVE = 0.1, 5.0  # of the loss of training, as a share; times the lowest loss of evaluations
# Lightning's bar shows the loss that was logged last, by default (log_every_n_steps) on every 50th step
LIGHTNING_BAR, LOGGED_EVERY = re.compile(r"\bv_num="), 50


def judge_progress(explanation: Explanation, logs: Sequence[Log]) -> Explanation:
    """The explanation of logs; where it shows no failure, the curves on the lines of the log with the most are judged too."""
    if explanation.shows_failure:
        return explanation
    points = {
        name: max((getattr(log, name) for log in logs), key=len, default=())
        for name in ("losses", "held_out", "scores", "gradients", "memory", "rewards", "speeds", "accuracies")
    }
    reported = line_series(points["losses"])
    if any(LIGHTNING_BAR.search(text) for log in logs for _, text in log.last_lines):
        reported = [item for item in reported if not repeats_logged(item, points["losses"])]
        points["held_out"] = [next(group) for _, group in groupby(points["held_out"], key=lambda point: point.value)]
    kinds = (LOSS, VALIDATION, PART_LOSS)
    losses, held_out, parts = ([item for item in reported if item.kind == kind] for kind in kinds)
    memories = [curve_verdict.evenly_spaced(item) for item in line_series(points["memory"], kind=MEMORY)]
    speeds = [curve_verdict.evenly_spaced(item) for item in line_series(points["speeds"], kind=THROUGHPUT)]
    evaluations = [*line_series(points["held_out"]), *held_out]
    if not losses and all(point.step is point.epoch is None for point in points["losses"]):
        evaluations = []  # results of several programs
    scores, rewards = line_series(points["scores"], kind=SCORE), line_series(points["rewards"], kind=REWARD)
    learns = any(map(curve_verdict.is_lowest_at_end, evaluations))
    has_gained, ends_best = any(map(curve_verdict.improves, rewards)), is_best_at_end(points["scores"])
    rising = [] if learns else [item for item in losses if not (ends_best and curve_verdict.ends_below_start(item))]
    rising = [item for item in rising if not has_gained or any(find_explosions([item]))]
    falls = any(map(curve_verdict.may_fall, losses))
    # transformers writes 0 for a loss that is NaN, but not in evaluations
    has_nan = any(math.isnan(point.value) for name in ("losses", "held_out") for point in points[name])
    guesses = [*find_guesses(losses, evaluations, scores)]
    if not any(OF_GAN.search(text) for log in logs for _, text in log.last_lines):
        guesses += find_all_guesses(losses, parts, evaluations, points)
    findings = [
        *(rise for item in rising for rise in curve_verdict.find_rises([item], least_rise(item, evaluations))),
        *(find_steady_rises(rising, evaluations) if not parts else ()),
        *find_explosions(parts),
        *find_still(losses, points["accuracies"]),
        *curve_verdict.find_unlearned(losses, held_out),
        *find_chance(losses, held_out),
        *guesses,
        *find_zeros(losses, ZEROS, cause=NAN if has_nan else STANDS_STILL),
        *find_zeros([item for item in losses if item.name == MEAN_LOSS], 1, reason=MEAN_OF_ALL),
        *find_zeros(rewards, ZERO_REWARDS, reason=NO_REWARD),
        *(() if falls else find_one_reward(rewards)),
        *find_lost_reward(rewards),
        *curve_verdict.find_growth(memories, LOG_GROWTH),
        *curve_verdict.find_slowdown({THROUGHPUT: speeds}, LOG_SLOWER),
        *(() if ends_best else find_turns(losses, evaluations, scores)),
        *(() if falls else find_same(points["scores"], points["held_out"])),
    ]
    stops_early = any(log.stops_early or any(EARLY_STOP.search(text) for _, text in log.last_lines) for log in logs)
    flat = next(filter(hardly_moves, losses + held_out), None)
    if stops_early:  # the training has waited for this
        findings = [item for item in findings if item in guesses or item.cause not in (STANDS_STILL, OVERFITS)]
    elif flat and not findings and explanation.cause == HEALTHY:
        if len(flat.values) < MIN_STILL:
            return unproven(explanation, flat)
        findings = [CurveFinding(STANDS_STILL, flat, 0)]
    shown = [with_reason(item, logs, points["gradients"]) for item in findings[:1]]
    return curve_verdict.add_findings(explanation, shown)


def with_reason(finding: CurveFinding, logs: Sequence[Log], gradients: Points) -> CurveFinding:
    """The finding with what else the log shows of a loss that stands still."""
    if finding.cause != STANDS_STILL or finding.reason or finding.series.kind != LOSS:
        return finding
    if reason := zero_reason(logs):
        return replace(finding, reason=reason)
    if len(gradients) >= ZERO_REWARDS and not any(point.value for point in gradients):
        return replace(finding, reason="the gradient norm is 0")
    level = noise.median(finding.series.finite or [0.0])
    number = classes_of(level)
    is_guess = number is not None and noise.is_about(level, math.log(number), NEAR_CHANCE)
    return replace(finding, reason=CHANCE.format(number=number)) if is_guess else finding


def repeats_logged(series: MetricSeries, points: Points) -> bool:
    """Whether a curve is the one value that a bar of Lightning shows before its second one is logged; points: of all curves."""
    steps = [point.step or 0 for point in points if point.name == series.name]
    is_first_bar = steps == sorted(steps) and steps[0] < steps[-1] < LOGGED_EVERY
    return (is_first_bar or series.kind == VALIDATION) and len({*series.values}) == 1


def find_still(losses: Curves, accuracies: Sequence[float]) -> Iterator[CurveFinding]:
    """Losses that stand still from early on, but for the last digit of a tiny one beside an accuracy that is perfect.

    One that rose before it stands is a score, as CatBoost's may be, or diverged.
    """
    is_perfect = noise.median(list(accuracies) or [0.0]) > PERFECT
    for finding in curve_verdict.find_still(losses, [], []):
        values = finding.series.values
        is_rounded = is_perfect and max(values) < TINY and noise.has_one_digit(values)
        still = values[finding.at :]
        has_risen = still[0] > RISEN * values[0] and still[-1] > still[0]
        if not (is_rounded or has_risen) and (finding.at < len(values) // 2 or noise.is_stuck(values)):
            yield finding


def find_steady_rises(losses: Curves, held_out: Curves) -> Iterator[CurveFinding]:
    """Losses of few points that rise from each to the next, while every loss of evaluations is higher at its end too."""
    is_worse = bool(held_out) and all(
        noise.median(item.values[-noise.SPIKE :]) > max(item.values[:2]) for item in held_out
    )
    for item in losses if is_worse else ():
        rises = [after > before for before, after in pairwise(item.values)]
        if len(rises) >= STEADY_RISES and all(rises) and item.values[-1] > (1 + STEADY_RISE) * item.values[0] > 0:
            yield CurveFinding(DIVERGED, item, 0, FROM_START)


def find_explosions(parts: Curves) -> Iterator[CurveFinding]:
    """Losses of parts, such as those of a GAN, that need not fall but end many times as high as they began."""
    for series in parts:
        values = series.finite
        if len(values) >= noise.MIN_POINTS and noise.median(values[-noise.SPIKE :]) > EXPLODED * max(
            1.0, *values[: noise.SPIKE]
        ):
            yield CurveFinding(DIVERGED, series, next(at for at, value in enumerate(series.values) if value > EXPLODED))


def is_best_at_end(scores: Points) -> bool:
    """Whether the accuracy of evaluations has risen and ends at about its best: a loss that rises is no failure then."""
    values = [point.value for point in scores]
    if len(values) < curve_verdict.MIN_SCORES:
        return False
    end = noise.median(values[-curve_verdict.MIN_SCORES :])
    return values[0] < end >= (1 - curve_verdict.NEAR_BEST) * max(values)


def find_zeros(
    series: Curves, at_least: int, *, cause: str = STANDS_STILL, reason: str | None = None
) -> Iterator[CurveFinding]:
    """Curves that are 0 wherever they are reported."""
    for item in series:
        if len(item.values) >= at_least and not any(item.values):
            yield CurveFinding(cause, item, 0, reason)


def find_one_reward(rewards: Curves) -> Iterator[CurveFinding]:
    """Rewards below 0 that are one value: one above may be the best there is."""
    for item in rewards:
        if len(item.values) >= SAME_REWARDS and min(item.values) == max(item.values) < 0:
            yield CurveFinding(STANDS_STILL, item, 0, ONE_REWARD)


def find_lost_reward(rewards: Curves) -> Iterator[CurveFinding]:
    """Rewards that were all above 0 and, without coming down to it, are exactly 0 from some update to the end."""
    for item in rewards:
        first = max((at for at, value in enumerate(item.values, 1) if value), default=0)
        is_long = first >= noise.MIN_POINTS and len(item.values) - first >= LOST_REWARDS
        before, steps = item.values[:first], item.steps
        if not is_long or min(before) <= 0 or noise.median(before[-noise.SPIKE :]) < LOST_FROM * max(before):
            continue
        if steps[first] - steps[first - 1] <= LOST_GAP * (steps[first - 1] - steps[0]) / (first - 1):
            yield CurveFinding(STANDS_STILL, item, first, LOST_REWARD)


def find_chance(losses: Curves, held_out: Curves) -> Iterator[CurveFinding]:
    """Losses that come down to what guessing between a few classes gives, and stay; few points count where evaluations agree."""
    for series in filter(curve_verdict.is_whole, losses):
        values = series.finite
        half = values[len(values) // 2 :]
        number = classes_of(noise.median(half)) if half else None
        if number is None:
            continue
        chance = math.log(number)
        comes_down = (
            len(half) >= MIN_CHANCE and noise.is_level(half) and noise.is_about(noise.median(half), chance, NEAR_CHANCE)
        )
        if number == 2:
            curves = [values, *(item.values for item in held_out)]
            agrees = len(curves) > 1 and min(map(len, curves)) >= MIN_FEW
            agrees = agrees and all(noise.is_about(value, chance, ABOUT_CHANCE) for curve in curves for value in curve)
            begins_there = len(values) >= MIN_CHANCE and noise.is_about(values[0], chance, ABOUT_CHANCE)
            stays = agrees or (begins_there and min(values) > (1 - ABOUT_CHANCE) * chance)
        else:
            stays = len(values) >= FEW_SAME and all(noise.is_about(value, chance, SAME_RANGE) for value in values)
        if comes_down or stays:
            at = len(series.values) // 2 if comes_down else 0
            yield CurveFinding(STANDS_STILL, series, at, CHANCE.format(number=number))


def classes_of(loss: float) -> int | None:
    """The number of classes, if they are few, between which a guess has about this loss."""
    number = round(math.exp(min(max(loss, 0.0), 9.0)))
    return number if 2 <= number <= MAX_CLASSES else None


def find_guesses(losses: Curves, evaluations: Curves, scores: Curves) -> Iterator[CurveFinding]:
    """Losses that begin and end where a guess between two classes is, as those of evaluations do, whose accuracy is a half."""
    ends = [item.values[-1] for item in scores if len(item.values) >= noise.MIN_POINTS]
    is_half = bool(ends) and all(min(abs(end - 0.5), abs(end / 100 - 0.5)) < ENDS_EVEN for end in ends)
    parts = [part for item in (*losses, *evaluations) for part in (item.values[:MIN_FEW], item.values[-MIN_FEW:])]
    if (
        is_half
        and losses
        and evaluations
        and all(noise.is_about(noise.median(part), LN_2, ABOUT_CHANCE) for part in parts)
    ):
        yield CurveFinding(STANDS_STILL, losses[0], 0, CHANCE.format(number=2))


def find_all_guesses(
    losses: Curves, parts: Curves, evaluations: Curves, points: Mapping[str, Sequence[Any]]
) -> Iterator[CurveFinding]:
    """Losses and accuracies that are those of a guess between classes over many epochs or steps, or many evaluations."""
    shares = shares_of(points["scores"]) or points["accuracies"]
    trained = [(item, points["accuracies"]) for item in (*losses, *(parts if len(parts) == 1 else ()))]
    for item, accuracies in (*trained, *((item, shares) for item in evaluations)):
        named = [point for point in (*points["losses"], *points["held_out"]) if point.name == item.name]
        steps = [point.step for point in named if point.step is not None] or [0]
        is_long = item.kind == VALIDATION and len(item.values) >= noise.MIN_POINTS
        is_long = (
            is_long or len({point.epoch for point in named}) >= LONG_EPOCHS or max(steps) - min(steps) >= LONG_STEPS
        )
        if is_long and (number := noise.guessed_classes(item.finite, accuracies)):
            yield CurveFinding(STANDS_STILL, item, 0, CHANCE.format(number=number))
    if not parts:
        yield from find_half(losses, [p for p in points["losses"] if p.name != "eval_loss"], points["accuracies"])


def find_half(losses: Curves, points: Points, accuracies: Sequence[float]) -> Iterator[CurveFinding]:
    """A loss that stays at a guess between two classes, or an epoch's among those of samples; accuracies of a half."""
    values = [point.value for point in points]
    if len(losses) != 1 or len(values) < MIN_HALF or not all(map(math.isfinite, values)):
        return
    half = values[len(values) // 2 :]
    starts = [point.value for before, point in pairwise(points) if (point.epoch or 0) > (before.epoch or 0)]
    off = max((abs(value - 0.5) for value in accuracies), default=0.0)
    is_near = len(accuracies) >= MIN_FEW and off < EVEN and noise.median(half) > (1 - STILL_CHANCE) * LN_2
    is_near = is_near and all(noise.is_about(value, LN_2, FEW_CHANCE) for value in values[1:])
    stays = MIN_EPOCHS <= len(starts) < len(half) and all(noise.is_about(value, LN_2, EPOCH_CHANCE) for value in starts)
    if is_near or (stays and off < ENDS_EVEN and noise.is_about(sum(half) / len(half), LN_2, FEW_CHANCE)):
        yield CurveFinding(STANDS_STILL, losses[0], 0, CHANCE.format(number=2))


def find_same(*evaluations: Points) -> Iterator[CurveFinding]:
    """The score or loss of evaluations that is the same in each of them, and not perfect."""
    for points in evaluations:
        values = {point.value for point in points}
        is_score = bool(points) and points[0].name == "score"
        is_perfect = values <= {1.0, 100.0} if is_score else values == {0.0}
        if len(points) >= MIN_SAME_SCORES and len(values) == 1 and not is_perfect:
            yield CurveFinding(STANDS_STILL, line_series(points, kind=LOSS)[0], 0, "in every evaluation")


def find_turns(losses: Curves, held_out: Curves, scores: Curves) -> Iterator[CurveFinding]:
    """Validation losses that turn up or end far above the lowest, unless that of training rises too or neither of them moves."""
    curves = [item for item in held_out if not curve_verdict.is_learned(item)]
    far = (item for item in curves if len(item.values) >= noise.MIN_POINTS)
    far = (
        item for item in far if min(item.values[-noise.SPIKE :]) > FAR_ABOVE * sorted(item.values)[noise.SPIKE - 1] > 0
    )
    lowest = (CurveFinding(OVERFITS, item, item.values.index(min(item.values))) for item in far)
    for finding in (*curve_verdict.find_overfitting(curves, scores), *lowest):
        share, values = finding.at / len(finding.series.values), finding.series.values
        places = [(item, int(share * len(item.values))) for item in losses]
        tail = values[len(values) // 2 :]
        is_flat = len(tail) >= STEADY_RISES and max(tail) - min(tail) < curve_verdict.FLAT_VALIDATION * abs(tail[-1])
        if is_flat and places and not any(course_since(item, at) < 1 - TRAIN_RISE for item, at in places):
            yield CurveFinding(STANDS_STILL, finding.series, len(values) // 2)
        else:
            yield next((rise for item, at in places if (rise := rise_since(item, at))), finding)


def course_since(series: MetricSeries, at: int) -> float:
    """The level of a loss at its end, as a share of that about a point of it."""
    width = max(noise.SPIKE, len(series.values) // 20)  # more than an epoch's own course
    near = noise.median(series.values[max(0, at - width) : at + width])
    return noise.median(series.values[-2 * width :]) / near if near > 0 else 0.0


def rise_since(series: MetricSeries, at: int) -> CurveFinding | None:
    """A loss that is higher at its end than about a point of it."""
    last = noise.median(series.values[-2 * max(noise.SPIKE, len(series.values) // 20) :])
    has_risen = len(series.values) >= noise.MIN_POINTS and last > series.values[at] > 0
    has_risen = has_risen and course_since(series, at) > 1 + TRAIN_RISE
    return CurveFinding(DIVERGED, series, at) if has_risen else None


def least_rise(series: MetricSeries, evaluations: Curves) -> float:
    """The share of its lowest level by which a loss must rise: less where it ends above its first points or where each loss of
    evaluations has risen as well, more in a later part."""
    if not curve_verdict.is_whole(series):
        return PART_RISE
    if series not in evaluations and evaluations and all(map(curve_verdict.ends_high, evaluations)):
        return curve_verdict.BOTH_RISE
    last = list(filter(math.isfinite, series.values[-noise.STRETCHES[0] :]))
    return noise.START_RISE if last and noise.median(last) > max(series.values[: noise.SPIKE]) else LOG_RISE


def hardly_moves(series: MetricSeries) -> bool:
    """Whether a curve that begins where its run did is nearly the same at all of its few points, or at most of its last ones."""
    values = series.finite
    is_same = len(values) >= FEW_SAME and 0 < max(values) - min(values) < SAME_RANGE * abs(values[0])
    if not (len(values) >= MIN_FLAT or is_same) or not curve_verdict.is_whole(series) or noise.has_one_digit(values):
        return False
    tail = values[len(values) // 4 :]
    has_level = abs(noise.median(tail)) >= LEARNED * abs(values[0])
    fell = noise.median(values[: len(values) // 4] or values) - noise.median(tail)
    return (
        has_level and max(tail) - min(tail) < FLAT_RANGE * abs(values[0]) and fell < noise.STUCK_FALL * abs(values[0])
    )


def unproven(explanation: Explanation, flat: MetricSeries) -> Explanation:
    """The explanation of a log without a failure whose loss does not show that anything is learned."""
    first, last = (format_value(flat.name, flat.values[at]) for at in (0, -1))
    course = f"{flat.name} {first} to {last} over {len(flat.values):,} reports"
    summary = f"no failure found, but the loss hardly moves: {course}"
    fix = (
        "check the learning rate, that the weights are those that were meant to be loaded, that the inputs differ from sample"
        " to sample, and that the labels are not masked"
    )
    shown = curve_verdict.show_curve(flat)
    return replace(explanation, cause=UNKNOWN, confidence=0.0, summary=summary, fix=fix, curves=(shown,))
