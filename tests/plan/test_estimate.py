"""From allocated bytes to a verdict: what was read off real out-of-memory messages, and what a range does to a verdict."""

import pytest

from paceline.plan.estimate import Range, process_bytes, sum_of_independent, verdict
from paceline.units import GIB


def exactly(size):
    return Range(size, size, size)


def test_a_range_below_the_card_fits_and_one_above_it_does_not():
    assert verdict(Range(10, 11, 12), 12) == "fits"
    assert verdict(Range(13, 14, 15), 12) == "does not fit"
    assert verdict(Range(11, 12, 13), 12) == "undecidable"


@pytest.mark.parametrize(
    ("allocated", "in_use"),
    [(30.28, 31.09), (27.97, 28.76), (30.52, 31.31), (30.29, 31.21), (26.02, 26.85), (28.87, 29.82)],
)
def test_two_ranks_on_a_5090_d_took_what_is_estimated_besides_what_they_allocated(allocated, in_use):
    need = process_bytes(exactly(allocated * GIB), world_size=2, consumer=True)
    held_back = (32_607 / 1024 - 31.36) * GIB
    assert need.low <= in_use * GIB + held_back <= need.high


@pytest.mark.parametrize(
    ("allocated", "in_use", "capacity", "total_mib"), [(21.16, 21.61, 23.52, 24_564), (43.88, 44.29, 44.42, 46_068)]
)
def test_single_processes_took_what_is_estimated(allocated, in_use, capacity, total_mib):
    need = process_bytes(exactly(allocated * GIB), world_size=1, consumer=False)
    assert need.low <= (in_use + total_mib / 1024 - capacity) * GIB <= need.high


def test_ranges_are_wider_for_more_ranks_and_other_cards():
    allocated = exactly(20 * GIB)
    known = process_bytes(allocated, world_size=2, consumer=True)
    for changed in ({"world_size": 8}, {"consumer": False}, {"consumer": None}):
        other = process_bytes(allocated, **{"world_size": 2, "consumer": True} | changed)
        assert other.high - other.low > known.high - known.low


def test_deviations_add_as_squares():
    assert sum_of_independent(Range(7, 10, 14), Range(6, 10, 13)) == Range(15, 20, 25)
    assert sum_of_independent(exactly(5), Range(1, 2, 3)) == Range(6, 7, 8)
