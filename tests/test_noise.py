"""Medians, quartiles and stretches are those of Python's module statistics, for any number of values."""

import random
import statistics

import pytest

from paceline.noise import lowest_stretch, median, quartile, running_median, seconds_per_step


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 10, 31])
def test_median_and_quartiles_equal_those_of_python(size):
    values = [random.Random(size).gauss(0, 1) for _ in range(size)]
    assert median(iter(values)) == pytest.approx(statistics.median(values))
    assert [quartile(values, number) for number in (1, 2, 3)] == pytest.approx(statistics.quantiles(values, n=4))


def test_a_running_median_removes_a_spike_and_keeps_a_step():
    assert running_median([1, 1, 9, 1, 1, 5, 5, 5], 3) == [1, 1, 1, 1, 1, 5, 5, 5]


def test_the_lowest_stretch_is_the_first_of_the_lowest_median():
    assert lowest_stretch([9, 9, 9, 9, 2, 1, 2, 1, 8, 8, 8, 8], 4) == 4


def test_the_time_of_a_step_counts_no_night_asleep_and_no_clock_that_was_set():
    assert seconds_per_step([0, 10, 20, 30], [100, 105, 120, 125]) == pytest.approx(25 / 30)  # with an evaluation
    assert seconds_per_step([0, 10, 20, 30], [100, 105, 30_000, 30_005]) == 0.5
    assert seconds_per_step([0, 10, 20, 30], [3700, 3705, 110, 115]) == 0.5
    assert seconds_per_step([0, 10], [3700, 105]) is None
    assert seconds_per_step([7], [100]) is None
