"""
The level of a noisy curve and how certain it is, quartiles, the lowest stretch, where it rises, leaps, turns or stands still. Pure.

Values are clipped at three standard deviations first, so that single spikes and heavy tails are noise. Python's own module for
statistics also computes with fractions and takes longer to load than all of this takes to run.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import sqrt

# a loss above this followed by exactly 0: transformers writes 0 for NaN (trainer.py, logging_nan_inf_filter)
ABRUPT = 0.5
CLIP = 3.0  # standard deviations
MAX_LIKENESS = 0.6  # of neighbouring values: their correlation, which makes a mean of them less certain
MIN_NOISE = 0.001  # of the level: that of a curve that is printed with few digits
GROWTH_BLOCKS, GROWTH_LATE, Z_GROWTH = 8, 0.38, 5.0  # the share of the growth in the later half; standard errors
MIN_BLOCK = 4  # points
SPIKE = 5  # points over which a median removes spikes
STILL_CHANGE, STILL_ERROR = 0.004, 0.0016  # of the level: between thirds of a curve, and the standard error of that
NEAR_ZERO = 0.04  # of the first points: a curve that low varies by factors
MIN_LEVEL, STUCK_FALL = 6, 0.01  # points of a third; the share of the level, from the first points
MIN_DIGITS, HALF = 20, 0.5  # units of the last digit that show a change of a twentieth; of the first points
SAME_VALUES, MIN_PERIOD = 20, 6  # in a row; points of an epoch that is repeated
EVEN_RISES, MAX_EVEN_RISES = 5, GROWTH_BLOCKS * MIN_BLOCK - 2  # in a row, of a curve too short for such blocks
# times the usual time between two lines: an evaluation; beyond it the machine slept, or its clock was set
MAX_PAUSE = 10
EVENNESS = 4  # times that one of them may be as large or small as their median
# numbers of last points that are compared with an earlier stretch of the same length; standard errors by which they are higher
STRETCHES, Z_RISE = (10, 20, 40), 5.0
# of a loss that was never lower than in its first points; of its highest level, from which it falls again
START_RISE, COMING_DOWN = 0.5, 0.5
MIN_VALIDATION, MIN_AFTER = 6, 3  # points of a validation curve, and after its lowest
VALIDATION_RISE, Z_VALIDATION = 0.02, 5.0  # as a share of the lowest; standard errors
MIN_RISES, FEW_RISE = 2, 0.3  # of few points: one after the other, and all of them as a share of the lowest
MIN_POINTS, JUMP_FROM, Z_FALL = 20, 10, 2.0  # of a curve that is judged; of one before a jump; standard errors
# times the lowest stretch, the height, the number of the last points of a few; times a single first point
LEAP, MIN_LEAP, LEAP_POINTS, FAR_LEAP = 100.0, 10.0, 3, 300.0
# last points of a plateau; the ratio of the highest to the lowest, also of nearly the same; how many times any value before
PLATEAU, PLATEAU_SPREAD, SAME_SPREAD, JUMP = 5, 1.6, 1.01, 4.0
# the level and the number of points of a loss that no model starts with, unless it falls; and one that none comes back from
TOO_HIGH, MIN_HIGH, ABSURD = 1e6, 8, 1e12

# points of a guess between classes; the greatest logarithm of their number; how near to it losses are; how many times one in as
# many accuracies may be, and how far from a half
MIN_GUESSES, MAX_LOG, NEAR_GUESS, OFF_GUESS, NEAR_EVEN = 8, 12.0, 0.02, 1.5, 0.1

# of a sum over each epoch: the share of itself to which it falls, how often at least, and of its falls; how far its totals may rise
RESET, MIN_RESETS, MOST_FALLS, MAX_GROWTH = 0.6, 3, 0.8, 2.0


def seconds_per_step(steps: Sequence[float], times: Sequence[float]) -> float | None:
    """Returns the mean time of a step between logged lines, without those between which the clock was set or the machine slept."""
    lines = pairwise(zip(steps, times, strict=True))
    spans = [(last - first, end - start) for (first, start), (last, end) in lines if last > first and end >= start]
    if not spans:
        return None
    usual_s = median(seconds / count for count, seconds in spans)
    counts, seconds = zip(*(span for span in spans if span[1] <= MAX_PAUSE * usual_s * span[0]), strict=True)
    return math.fsum(seconds) / math.fsum(counts)


def standard_errors_below(values: Sequence[float], before: Sequence[float]) -> float:
    """Returns how much lower the mean of the values is, in standard errors of the difference."""
    (level, noise), (level_before, noise_before) = level_of(values), level_of(before)
    return (level_before - level) / sqrt(noise**2 / len(values) + noise_before**2 / len(before))


def level_of(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean after clipping, and the standard deviation of independent values whose mean is as uncertain."""
    middle = median(values)
    spread = 1.4826 * median(abs(value - middle) for value in values)  # sigma of normal noise
    clipped = [clip(value - middle, CLIP * spread) for value in values]
    mean = math.fsum(clipped) / len(clipped)
    offsets = [value - mean for value in clipped]
    squares = math.fsum(offset**2 for offset in offsets)
    products = math.fsum(first * second for first, second in pairwise(offsets))
    likeness = max(0.0, min(MAX_LIKENESS, products / squares)) if squares else 0.0
    noise = sqrt(squares / len(values) * (1 + likeness) / (1 - likeness))
    return middle + mean, max(noise, MIN_NOISE * abs(middle)) or 1e-12


def median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    half, is_odd = divmod(len(ordered), 2)
    return ordered[half] if is_odd else (ordered[half - 1] + ordered[half]) / 2


def quartile(values: Sequence[float], number: int) -> float:
    """The quartile of two or more values, between those at the places number * (n + 1) / 4 below and above."""
    ordered = sorted(values)
    at = min(max(number * (len(ordered) + 1) // 4, 1), len(ordered) - 1)
    part = number * (len(ordered) + 1) - 4 * at
    return (ordered[at - 1] * (4 - part) + ordered[at] * part) / 4


def running_median(values: Sequence[float], width: int) -> list[float]:
    half = width // 2
    return [median(values[max(0, at - half) : at + half + 1]) for at in range(len(values))]


def lowest_stretch(values: Sequence[float], length: int) -> int:
    """The start of the stretch of this length with the lowest median, by quarters of a stretch."""
    starts = range(0, len(values) - length + 1, max(1, length // 4))
    stretches = {start: values[start : start + length] for start in starts}
    return min(stretches, key=lambda start: (median(stretches[start]), sum(stretches[start])))


def grows(values: Sequence[float], min_growth: float) -> bool:
    """Whether a curve rises from block to block, to its end and without flattening."""
    size = len(values) // GROWTH_BLOCKS
    if size < MIN_BLOCK:
        return False
    blocks = [values[len(values) - (number + 1) * size :][:size] for number in reversed(range(GROWTH_BLOCKS))]
    medians = [median(block) for block in blocks]
    growth = medians[-1] - medians[0]
    if medians[0] <= 0 or growth < min_growth * medians[0]:
        return False
    middle = median(medians[GROWTH_BLOCKS // 2 - 1 : GROWTH_BLOCKS // 2 + 1])
    rises = sum(second > first for first, second in pairwise(medians))
    is_steady = rises >= GROWTH_BLOCKS - 2 and medians[-1] > medians[-2]
    goes_on = medians[-1] - middle >= GROWTH_LATE * growth
    return is_steady and goes_on and standard_errors_below(blocks[0], blocks[-1]) > Z_GROWTH


def grows_evenly(values: Sequence[float], min_growth: float) -> bool:
    """Whether a curve of a few points rises from each to the next by nearly the same; its first step allocates what stays."""
    rises = [second - first for first, second in pairwise(values[1:])]
    if not EVEN_RISES <= len(rises) <= MAX_EVEN_RISES or values[1] <= 0 or values[-1] < (1 + min_growth) * values[1]:
        return False
    return min(rises) > median(rises) / EVENNESS > 0 and max(rises) < EVENNESS * median(rises)


def falls(values: Sequence[float], max_fall: float) -> bool:
    """Whether the last third of a curve is lower than its first, beyond the noise or by a share of its level."""
    first, last = values[: len(values) // 3], values[-(len(values) // 3) :]
    fell = median(first) - median(last)
    return standard_errors_below(last, first) > Z_FALL or fell > max_fall * abs(median(first))


def rise_to_end(values: Sequence[float], min_rise: float) -> int | None:
    """Where a curve began to rise that is higher at its end than its lowest stretch, by a share of it and beyond its noise."""
    for length in STRETCHES:
        if len(values) < max(MIN_POINTS, 4 * length if length > STRETCHES[0] else 0):
            return None
        length = min(length, len(values) // 3)
        last = values[-length:]
        start = lowest_stretch(values[:-length], length)
        before = values[start : start + length]
        low, high = median(before), median(last)
        stands_out = high > quartile(before, 3) and quartile(last, 1) > low
        if length <= STRETCHES[0]:
            stands_out = quartile(last, 1) > quartile(before, 3)
        stands_out = stands_out and standard_errors_below(before, last) > Z_RISE
        if length <= STRETCHES[0]:  # of which one of many is low by chance
            jumps = 1.4826 * median(abs(after - value) for value, after in pairwise(values)) / sqrt(2)
            stands_out = stands_out and high - low > Z_RISE * jumps * sqrt(2 / length)
        if high <= (1 + min_rise) * low or not stands_out:
            continue
        smooth = running_median(values, SPIKE)
        peak = max(smooth[start:])
        if median(last[length // 2 :]) - low < 0.5 * (peak - low):
            continue  # it is coming down
        limit = max(low + 0.1 * (high - low), quartile(before, 3))
        return max((at for at in range(len(values) - 1) if smooth[at] <= limit), default=start) + 1
    return None


def rise_from_start(values: Sequence[float], min_rise: float) -> int | None:
    """0 if the whole curve is higher than its first points."""
    first, last = values[:3], values[-max(10, len(values) // 3) :]
    rose = len(values) >= MIN_POINTS and quartile(last, 1) > (1 + max(START_RISE, min_rise)) * max(first)
    falls_again = median(last) < COMING_DOWN * max(running_median(values, SPIKE))
    return 0 if rose and quartile(values[3:], 1) > max(first) and not falls_again else None


def leap(values: Sequence[float]) -> int | None:
    """Where a curve, also one of few points, leaves its level by orders of magnitude and stays there to its end."""
    before, last = values[:-LEAP_POINTS], values[-LEAP_POINTS:]
    if len(values) > LEAP_POINTS and min(values[1:]) >= max(MIN_LEAP, FAR_LEAP * values[0]):
        return 1
    if len(before) < LEAP_POINTS:
        return None
    start = lowest_stretch(before, LEAP_POINTS)
    if min(last) < (limit := max(MIN_LEAP, LEAP * max(before[start : start + LEAP_POINTS]))):
        return None
    at = max(at for at, value in enumerate(values) if value < limit) + 1
    return None if comes_down(values[at:]) else at


def comes_down(values: Sequence[float]) -> bool:
    """Whether a curve ends orders of magnitude below its peak, as that of a later run behind those of others does."""
    return max(running_median(values, SPIKE)) > LEAP * max(values[-LEAP_POINTS:])


def short_rise(values: Sequence[float]) -> int | None:
    """The last point of a short curve before it leaves the level of its first two for one of twice that height."""
    last, first = values[-PLATEAU:], max(values[:2])
    if len(values) >= PLATEAU + 2 and min(values[1:]) > JUMP * values[0] and max(last) <= SAME_SPREAD * min(last):
        return 1
    if not PLATEAU + 2 <= len(values) < MIN_POINTS or min(last) <= 2 * first or max(last) > PLATEAU_SPREAD * min(last):
        return None
    return max(at for at, value in enumerate(values) if value <= first)


def jump(values: Sequence[float]) -> int | None:
    """Where a curve leaps to several times any value before, and stays there."""
    places = range(JUMP_FROM, len(values) - PLATEAU + 1)
    jumps = (at for at in places if values[at] > JUMP * values[at - 1] and not comes_down(values[at:]))
    return next((at for at in jumps if min(values[at:]) > JUMP * max(values[:at])), None)


def bends(values: Sequence[float]) -> float:
    """The standard deviation of a curve's noise, by how far points lie off the line between their neighbours."""
    offsets = (values[at + 1] - 2 * values[at] + values[at - 1] for at in range(1, len(values) - 1))
    return 1.4826 * median(map(abs, offsets)) / sqrt(6)


def is_too_high(values: Sequence[float]) -> bool:
    half, lowest = len(values) // 2, min(values)
    if len(values) < MIN_HIGH:
        return len(values) >= LEAP_POINTS and lowest > ABSURD
    stays = median(values[half:]) > 0.9 * median(values[:half]) or values[-1] > values[0]
    return lowest > ABSURD or (stays and min(values[half:]) > TOO_HIGH)


def turn_of(values: Sequence[float]) -> int | None:
    """Where a curve is lowest that rises from there to its end, beyond its noise."""
    if len(values) < MIN_VALIDATION:
        return turn_of_few(values)
    smooth = [median(values[max(0, at - 1) : at + 2]) for at in range(len(values))]
    at = min(range(len(values)), key=smooth.__getitem__)
    after = len(values) - 1 - at
    if after < MIN_AFTER:
        return None
    last = values[-max(MIN_AFTER, after // 3) :]
    first = at if after >= MIN_VALIDATION else 0  # a steep fall before it is no noise
    noise = max(bends(values[max(0, first - 1) :]), 1e-4 * abs(smooth[at]))
    rise = median(last) - smooth[at]
    beyond = rise > Z_VALIDATION * noise * sqrt(1 / len(last) + 1 / 3)
    falls_again = rise < COMING_DOWN * (max(smooth[at:]) - smooth[at])
    if not beyond or rise <= VALIDATION_RISE * abs(smooth[at]) or min(last) <= smooth[at] or falls_again:
        return None
    return min(range(max(0, at - 1), at + 2), key=values.__getitem__)


def turn_of_few(values: Sequence[float]) -> int | None:
    """Where a curve of few points is lowest that rises from there to its end: one after the other, and far."""
    at = max((at for at, value in enumerate(values) if value == min(values)), default=0)
    after = values[at:]
    rises = len(after) > MIN_RISES and all(low < high for low, high in pairwise(after))
    return at if rises and after[-1] > (1 + FEW_RISE) * after[0] > 0 else None


def start_of_growth(values: Sequence[float]) -> int:
    """Where a curve begins to grow: the bend of the line, level and then rising, that fits best."""
    size = max(1, len(values) // 40)
    medians = [median(values[at : at + size]) for at in range(size, len(values) - size + 1, size)]

    offsets = [value - math.fsum(medians) / len(medians) for value in medians]

    def explained(bend: int) -> float:  # of the medians' variance, by the line
        rising = [max(0, at - bend) for at in range(len(medians))]
        center = sum(rising) / len(rising)
        product = math.fsum((x - center) * offset for x, offset in zip(rising, offsets, strict=True))
        return product**2 / math.fsum((x - center) ** 2 for x in rising)

    bend = max(range(len(medians) - 2), key=explained)
    return (bend + 1) * size if bend else 0


def constant_tail(values: Sequence[float]) -> int | None:
    """Where the last values begin to be one and the same."""
    at = len(values)
    while at and values[at - 1] == values[-1]:
        at -= 1
    return at if len(values) - at >= max(SAME_VALUES, len(values) // 20) else None


def is_rounded(values: Sequence[float]) -> bool:
    """Whether a curve has come down to so few units of its last digit that no small change of it shows."""
    digit = 10.0 ** -max(len(repr(value).partition(".")[2]) for value in values)
    return 0 <= values[-1] < min(MIN_DIGITS * digit, HALF * max(values[:SPIKE]))


def is_running_sum(values: Sequence[float]) -> bool:
    """Whether a curve falls by nothing but resets, several times, as a sum over the batches of each epoch does."""
    falls = [(before, after) for before, after in pairwise(values) if after < before]
    totals = [before for before, after in falls if 0 <= after < RESET * before]
    is_sum = len(totals) >= MIN_RESETS and len(totals) >= MOST_FALLS * len(falls)
    return is_sum and max(totals[-1], values[-1]) < MAX_GROWTH * totals[0]


def repeats_epochs(values: Sequence[float]) -> bool:
    """Whether a curve repeats its first values to its end, of which the later are no lower: a second run's would be.

    Exactly two equal halves are a log that was written twice.
    """
    for period in range(MIN_PERIOD, len(values) - MIN_PERIOD + 1):
        if values[period] == values[0] and len(values) != 2 * period and values[period:] == values[:-period]:
            first, last = values[: period // 2], values[period // 2 : period]
            num_rises = sum(after > before for before, after in pairwise(values[:period]))
            return len({*values}) >= MIN_PERIOD and num_rises >= period / 4 and median(last) > 0.9 * median(first)
    return False


def is_level(values: Sequence[float]) -> bool:
    """Whether the thirds of a curve are equally high, and it has so little noise that a small fall would show."""
    third = len(values) // 3
    if third < MIN_LEVEL:
        return False
    (first, noise), (middle, _), (last, last_noise) = (
        level_of(values[start : start + third]) for start in (0, third, len(values) - third)
    )
    error = math.hypot(noise, last_noise) / math.sqrt(third)
    is_same = max(first, middle, last) - min(first, middle, last) < STILL_CHANGE * abs(first)
    return is_same and error < STILL_ERROR * abs(first)


def is_stuck(values: Sequence[float]) -> bool:
    """Whether a curve, or its last third, is level, and hardly lower than its first points."""
    last = values[-(len(values) // 3) :]
    if not (is_level(values) or is_level(last)):
        return False
    return median(values[:SPIKE]) - median(last) < STUCK_FALL * abs(median(last))


def clip(value: float, limit: float) -> float:
    return max(-limit, min(limit, value))


def comes_down_to_zero(values: Sequence[float]) -> bool:
    """Whether a curve ends at 0 and was near it in its last value above."""
    above = [value for value in values if value]
    return bool(above) and values[-1] == 0 and 0 < above[-1] < NEAR_ZERO * max(above[:SPIKE])


def is_about(value: float, level: float, share: float) -> bool:
    """Whether a value is a level, but for less than a share of it."""
    return abs(value - level) < share * level


def has_one_digit(values: Sequence[float]) -> bool:
    """Whether the values are printed with one digit, which shows no small change."""
    return all(float(f"{value:.1g}") == value for value in values)


def guessed_classes(losses: Sequence[float], accuracies: Sequence[float]) -> int | None:
    """The number of classes between which a model guesses all the time, whatever the noise; None if it does not.

    The losses of each third are about the logarithm of the number, and the accuracies about one in as many.
    """
    if min(len(losses), len(accuracies)) < MIN_GUESSES:
        return None
    number = round(math.exp(min(max(median(losses), 0.0), MAX_LOG)))
    thirds = (losses[len(losses) * at // 3 : len(losses) * (at + 1) // 3] for at in range(3))
    is_near = number > 1 and all(is_about(median(part), math.log(number), NEAR_GUESS) for part in thirds)
    share = math.fsum(accuracies) / len(accuracies)
    if not is_near or falls(losses, math.inf):
        return None
    if number == 2:
        is_flat = not falls([-value for value in accuracies], math.inf)
        return number if is_flat and abs(share - 0.5) < NEAR_EVEN else None
    last = accuracies[-(len(accuracies) // 3) :]
    is_guess = 1 / OFF_GUESS < share * number < OFF_GUESS and math.fsum(last) / len(last) * number < OFF_GUESS
    return number if is_guess else None
