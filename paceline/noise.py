"""
The level of a noisy curve and how certain it is. Pure.

Values are clipped at three standard deviations first, so that single spikes and heavy tails are noise.
"""

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from math import sqrt

CLIP = 3.0  # standard deviations
MAX_LIKENESS = 0.6  # of neighbouring values: their correlation, which makes a mean of them less certain
MIN_NOISE = 0.001  # of the level: that of a curve that is printed with few digits


def standard_errors_below(values: Sequence[float], before: Sequence[float]) -> float:
    """Returns how much lower the mean of the values is, in standard errors of the difference."""
    (level, noise), (level_before, noise_before) = level_of(values), level_of(before)
    return (level_before - level) / sqrt(noise**2 / len(values) + noise_before**2 / len(before))


def level_of(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean after clipping, and the standard deviation of independent values whose mean is as uncertain."""
    middle = statistics.median(values)
    spread = 1.4826 * statistics.median(abs(value - middle) for value in values)  # sigma of normal noise
    clipped = [clip(value - middle, CLIP * spread) for value in values]
    mean = statistics.fmean(clipped)
    offsets = [value - mean for value in clipped]
    squares = math.fsum(offset**2 for offset in offsets)
    products = math.fsum(first * second for first, second in pairwise(offsets))
    likeness = max(0.0, min(MAX_LIKENESS, products / squares)) if squares else 0.0
    noise = sqrt(squares / len(values) * (1 + likeness) / (1 - likeness))
    return middle + mean, max(noise, MIN_NOISE * abs(middle)) or 1e-12


def clip(value: float, limit: float) -> float:
    return max(-limit, min(limit, value))
