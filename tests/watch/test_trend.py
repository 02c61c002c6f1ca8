"""A loss that rises is noticed and noise is not; steps that have become slower are noticed."""

import math
import random
from itertools import pairwise

import pytest

from paceline.watch.snapshot import Series, Snapshot
from paceline.watch.trend import WHOLE_LINES, is_falling, rise_of, slowdown, turns_up

SHAPES = {"level": lambda step: 2.6, "falling": lambda step: 2.9 + 7.9 * math.exp(-step / 140)}
NOISE_LEVELS = (0.003, 0.01, 0.03, 0.1, 0.3)  # standard deviation, as a share of the loss


def normal(chance):
    return chance.gauss(0, 1)


def heavy_tailed(chance):
    """Student's t of three degrees of freedom, of variance 1."""
    return chance.gauss(0, 1) / math.sqrt(sum(chance.gauss(0, 1) ** 2 for _ in range(3)))


def curve(shape, noise, level, *, lines=300, seed):
    chance = random.Random(seed)
    return [SHAPES[shape](step) + 2.6 * level * noise(chance) for step in range(1, lines + 1)]


def looks(values, *, every, start=24):
    for end in range(start, len(values) + 1, every):
        first = max(0, end - WHOLE_LINES)
        yield Series(list(range(first + 1, end + 1)), values[first:end], [])


@pytest.mark.parametrize("noise", [normal, heavy_tailed])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_thousand_looks_at_healthy_curves_of_five_noise_levels_raise_no_alarm(shape, noise):
    curves = [curve(shape, noise, level, seed=seed) for level in NOISE_LEVELS for seed in range(4)]
    alarms = [rise_of(look) for values in curves for look in looks(values, every=5)]
    assert len(alarms) >= 1000
    assert [alarm for alarm in alarms if alarm] == []


@pytest.mark.parametrize("noise", [normal, heavy_tailed])
def test_a_rise_of_three_standard_errors_is_found_within_thirty_lines(noise):
    """Three standard errors of the difference between two means of ten lines, on a level curve of a hundred lines."""
    num_found = 0
    for seed in range(50):
        values = curve("level", noise, 0.03, lines=130, seed=seed)
        risen = values[:100] + [value + 3 * math.sqrt(2 / 10) * 0.03 * 2.6 for value in values[100:]]
        num_found += any(rise_of(look) for look in looks(risen, every=3, start=103))
    assert num_found >= 46


def test_a_rise_has_a_size_and_a_step():
    values = [2.6 + 0.02 * (-1) ** step for step in range(100)] + [2.86 + 0.02 * (-1) ** step for step in range(20)]
    rise, step = rise_of(Series(list(range(10, 1210, 10)), values, []))
    assert (rise, step) == (pytest.approx(0.1, abs=0.01), 1010)


def test_values_that_are_nan_or_infinite_hide_no_rise_and_no_fall():
    lost = {30: math.inf, 105: math.nan, 110: math.nan}
    level = [2.6 + 0.02 * (-1) ** step for step in range(100)] + [2.86 + 0.02 * (-1) ** step for step in range(25)]
    risen = [lost.get(step, value) for step, value in enumerate(level)]
    assert rise_of(Series(list(range(125)), risen, []))[1] == 100
    fallen = [lost.get(step, 5 / (1 + step)) for step in range(125)]
    assert is_falling(Series(list(range(125)), fallen, []))


def test_a_spike_of_three_lines_is_no_rise():
    values = curve("level", normal, 0.01, seed=1)
    assert not any(
        rise_of(look) for look in looks([*values[:200], 9.0, 8.0, 5.0, *values[200:240]], every=1, start=195)
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_whether_the_loss_falls_seldom_changes(shape):
    for seed, level in enumerate((0.01, 0.03)):
        values = curve(shape, normal, level, lines=500, seed=seed)
        answers = [is_falling(Series([], values[:end], [])) for end in range(24, 501, 2)]
        assert sum(first != second for first, second in pairwise(answers)) <= 2
        assert answers[10] is (shape == "falling")


@pytest.mark.parametrize("slow_lines", [3, 5, 20])
def test_a_slowdown_is_noticed_after_ten_lines(slow_lines):
    usual = [200.0 + step % 7 for step in range(10)]
    assert slowdown(usual) is None
    assert slowdown([*usual, *[700.0] * (slow_lines - 1), 760.0]) == (700.0, pytest.approx(203, abs=3))


def test_the_first_step_compiles_and_a_jitter_of_a_tenth_is_no_slowdown():
    chance = random.Random(3)
    times = [9_000.0] + [200 * (1 + 0.1 * chance.gauss(0, 1)) for _ in range(300)]
    assert not any(slowdown(times[:end]) for end in range(1, 301))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([2.276, 0.7342, 0.7353, 0.7408, 0.7535, 0.7732], "the val_bpb rises since step 1,000, from 0.7342 to 0.7732"),
        ([2.276, 0.7342, math.nan, 0.7353, 0.7351, 0.7342], None),
        ([2.276, 0.9, 0.8, 0.78], None),
        ([], None),
    ],
)
def test_a_score_of_held_out_text_that_rises_beyond_its_noise_is_a_sentence(values, text):
    series = Series([500 * (at + 1) for at in range(len(values))], values, [])
    snapshot = Snapshot("a", "a", "training", "training", step=3000, series={"val_bpb": series})
    assert list(turns_up(snapshot)) == ([text] if text else [])


def test_a_curve_without_steps_is_judged_too():
    series = Series([], [3.1, 2.2, 2.3, 2.5, 2.7, 2.9], [])
    assert list(turns_up(Snapshot("a", "a", "log", "training", series={"val_loss": series}))) == [
        "the val_loss rises, from 2.2 to 2.9"
    ]
