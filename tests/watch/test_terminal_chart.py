"""Curves in a terminal."""

import math

import pytest

from paceline.watch.snapshot import Series
from paceline.watch.terminal.chart import (
    chart,
    even_values,
    format_short,
    last_part,
    pulse,
    round_axis,
    smoothed,
    sparkline,
)
from paceline.watch.terminal.line import plain


def series(values) -> Series:
    return Series(list(range(1, len(values) + 1)), list(values), [float(i) for i in range(len(values))])


def drawn(values, **options) -> list[str]:
    return [plain(line) for line in chart((series(values), "blue"), **{"width": 30, "height": 6, **options})]


def test_the_axis_of_one_point_has_its_step_once_below_it():
    lines = drawn([4.0], width=100)
    assert lines[-1].split() == ["step", "1"]
    assert lines[-1].index("1") == next(line.index("┤") for line in lines if "┤" in line) + 1


def test_a_falling_line_goes_from_the_upper_left_to_the_lower_right():
    assert drawn([4.0, 3.0, 2.0, 1.0]) == [
        "    4 ┤⠤⣄⡀",
        "      │  ⠉⠙⠲⠤⣄⡀",
        "      │       ⠉⠙⠒⠦⢤⣀⡀",
        "    2 ┤             ⠉⠙⠒⠦⣄⣀",
        "      │                  ⠈⠙⠒⠦⣄",
        " step  1                     4",
    ]


@pytest.mark.parametrize(
    ("last", "text"), [(6_000, " step  6,000"), (12_345, " step 12,345"), (1_000_000, "   1,000,000")]
)
def test_the_steps_below_a_narrow_chart_end_with_it_and_a_long_one_takes_the_room_of_the_name(last, text):
    lines = chart((Series([0, 500, last], [3.0, 2.0, 1.0], [0.0, 1.0, 2.0]), "blue"), width=12, height=4)
    assert plain(lines[-1]) == text


def test_a_spike_of_one_step_in_ten_thousand_is_visible():
    values = [1.0] * 10_000
    values[5000] = 9.0
    lines = drawn(values)
    assert any(ord(char) > 0x2800 for char in lines[0])
    assert sum(any(ord(char) > 0x2800 for char in line) for line in lines) == 5


def test_values_that_are_not_finite_are_crosses_and_belong_to_the_axis():
    lines = drawn([4.0, 3.0, 2.0, math.nan, math.inf])
    assert (lines[-2].count("×"), lines[-1].split()) == (2, ["step", "1", "5"])
    assert sparkline([4.0, math.nan, 2.0, math.nan, math.nan], 5) == "█×▁××"
    assert smoothed(series([4.0, math.nan, 2.0])).values[::2] == [4.0, 2.0]


def test_noise_of_a_steady_value_does_not_fill_the_chart():
    lines = drawn([1000 + (-1) ** i for i in range(100)], least_span=0.2)
    assert sum(any(ord(char) > 0x2800 for char in line) for line in lines) <= 2


def test_the_plan_is_a_dotted_line_below_the_curve():
    lines = drawn([90.0, 91.0], planned=100.0, least_span=0.2)
    assert lines[0].count("┈") + lines[1].count("┈") == 23


@pytest.mark.parametrize(
    ("low", "high", "rows"),
    [(2.9, 10.8, 7), (0.0, 1.0, 4), (-3.0, 5e6, 9), (1e-9, 3e-9, 5), (7, 7.001, 12), (0.1, 3.0, 30)],
)
def test_an_axis_holds_the_values_and_has_evenly_spaced_round_ticks(low, high, rows):
    bottom, top, ticks = round_axis(low, high, rows)
    assert bottom <= low + 1e-12 and top >= high - 1e-12
    assert low < 0 or bottom > -(top - bottom) / rows
    assert ticks and len({b - a for a, b in zip(list(ticks), list(ticks)[1:], strict=False)}) <= 1
    for row, value in ticks.items():
        assert value == pytest.approx(top - (row + 0.5) * (top - bottom) / rows, abs=(top - bottom) * 1e-6)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], "no value yet"),
        ([math.nan], "every value is NaN or infinite"),
        ([math.inf], "every value is NaN or infinite"),
    ],
)
def test_a_chart_without_finite_values_says_so(values, text):
    assert drawn(values)[0] == text


@pytest.mark.parametrize("values", [[1.0], [0.0, 0.0], [1.0, math.nan, 2.0], [1e-300, 1e300], [-1.0, 1.0]])
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("size", [(12, 2), (13, 3), (200, 40)])
def test_every_line_has_the_requested_width_whatever_the_values(values, log, size):
    lines = drawn(values, width=size[0], height=size[1], log=log)
    assert len(lines) == size[1]
    assert all(len(line) <= size[0] for line in lines)


def test_the_last_part_of_a_curve_is_by_steps():
    assert last_part(series(range(101)), 0.1).steps == list(range(91, 102))


def test_blocks_and_pulse():
    assert sparkline([1, 2, 3, 4], 4) == "▁▃▆█"
    assert sparkline([5, 5], 10) == "▁▁"
    assert sparkline([], 10) == sparkline([1.0], 0) == pulse([]) == ""
    assert pulse([1.0, 0.5, 0.0]) == "━─·"


def test_a_logarithmic_axis_has_round_numbers():
    def ticks(*values):
        return [line.split("┤")[0].strip() for line in drawn(values, height=15, log=True) if "┤" in line]

    assert ticks(5.0, 4.0) == ["5.00", "4.70", "4.50", "4.30", "4.00"]
    assert ticks(10.0, 0.01) == ["8.00", "2.00", "0.400", "0.0900", "0.0200"]


def test_unevenly_logged_steps_become_equal_parts():
    assert even_values([0, 1, 2, 3, 99], [1.0, 2.0, 3.0, 4.0, 9.0], 4) == [2.5, 2.5, 2.5, 9.0]
    assert even_values([], [], 4) == []


def test_numbers_on_an_axis_are_short():
    assert [format_short(v) for v in (0, 10.41, 0.4123, 856_000, 1.25e6, 999.6, 1e-7, -3.0)] == [
        "0", "10.4", "0.412", "856K", "1.2M", "1000", "1.0e-07", "-3.00",
    ]  # fmt: skip


def test_a_first_value_that_is_not_finite_has_a_name_too():
    assert [format_short(value) for value in (math.nan, -math.inf)] == ["nan", "-inf"]
