import math

import pytest
from rows import with_rows

from paceline.units import (
    format_list,
    format_ms,
    format_number_of,
    format_ranks,
    likely_number,
    parse_duration,
    parse_time,
    signal_name,
    signal_number,
    unix_time,
    whole_number,
)


def test_ranks_are_listed_as_a_person_would():
    assert [format_ranks(ranks) for ranks in ([1], [0, 1], range(3))] == ["rank 1", "ranks 0 and 1", "ranks 0, 1 and 2"]
    assert format_ranks(range(64), limit=2) == "ranks 0, 1 and 62 more"
    assert format_ranks(range(2), limit=2) == "ranks 0 and 1"


def test_lists_and_counts_read_as_english():
    assert [format_list(items) for items in ([], ["a"], ["a", "b"], "abc")] == ["none", "a", "a and b", "a, b and c"]
    assert [format_number_of(count, "row") for count in (0, 1, 1200)] == ["0 rows", "1 row", "1,200 rows"]
    assert format_number_of(2, "process", "processes") == "2 processes"


def test_a_whole_number_may_be_written_in_several_ways():
    assert [whole_number(text) for text in ("5000", "5,000", "5_000", "5e3", "1e9")] == [*[5000] * 4, 10**9]
    for text in ("5.5", "nan", "inf", "1e400", "k"):
        with pytest.raises(ValueError, match="int|float"):
            whole_number(text)


def test_milliseconds_have_three_digits():
    assert [format_ms(ms) for ms in (1.234, 12.34, 612.3, 41_000.0)] == ["1.23 ms", "12.3 ms", "612 ms", "41,000 ms"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90m", 5400), ("12h", 43_200), ("1d12h", 129_600), ("2m30s", 150), ("30s", 30), ("1.5H", 5400)],
)
def test_a_duration_is_read_in_seconds(text: str, seconds: float):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "90", "0m", "-2m", "2m1h", "two hours", "1,5h", "٣m"])
def test_what_is_no_duration_is_refused(text: str):
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(text)


def test_times_of_records_become_unix_seconds_and_damaged_ones_nan():
    assert parse_time("2026-07-25T14:31:02.120Z") == unix_time("2026-07-25T14:31:02.120Z") == 1784989862.12
    assert all(math.isnan(unix_time(value)) for value in ("yesterday", None, 7))
    with pytest.raises(ValueError, match="yesterday"):
        parse_time("yesterday")


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (34, "SIGRTMIN"), (40, "SIGRTMIN+6")])
def test_a_signal_has_a_name_even_where_python_knows_none(number: int, name: str):
    assert (signal_name(number), signal_number(name)) == (name, number)


@with_rows(
    ("text", "kind", "is_time", "number"),
    [
        ("5k", int, False, 5000), ("1.5 M", int, False, 1_500_000), ("2,000", int, False, 2000), ("65%", float, False, 0.65),
        ("7%", float, False, 0.07), ("10m", float, True, 600), ("1.5h", float, True, 5400), ("5k", float, True, None),
        ("65%", int, False, None), ("many", int, False, None), ("0,65", float, False, None), ("5k", str, False, None),
    ],
)  # fmt: skip
def test_a_number_with_a_unit_or_a_fraction_has_one_likely_value(text, kind, is_time, number):
    assert likely_number(text, kind, is_time=is_time) == number


def test_a_text_that_could_mean_two_numbers_is_not_guessed_and_sizes_are_binary():
    assert likely_number("512k", int, is_time=False, usual=524_288) == 524_288
    assert likely_number("1.500", int, is_time=False) is likely_number("0,002", float, is_time=False) is None
