"""The caching allocator with expandable segments as arithmetic: what is reserved for a known sequence, and what holds for any."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.train.exact import LARGE_SEGMENT, _Arena, replay

MIB = 1 << 20


def reserved(*events: tuple[int, int]) -> int:
    return replay(events)[1]


def test_sizes_are_rounded_up_to_512_bytes():
    assert replay([(1, 1), (2, 512), (3, 513)]) == (512 + 512 + 1024, 2 * MIB)


def test_the_peak_is_of_what_lives_at_once():
    assert replay([(1, 4 * MIB), (2, 3 * MIB), (1, -4 * MIB), (3, 2 * MIB)])[0] == 7 * MIB


def test_an_unknown_name_frees_nothing():
    assert replay([(7, -MIB), (1, MIB)])[0] == MIB


def test_up_to_a_mebibyte_comes_from_an_arena_that_grows_by_two():
    assert reserved((1, MIB), (2, MIB)) == 2 * MIB
    assert reserved((1, MIB), (2, MIB), (3, 1)) == 4 * MIB


def test_more_comes_from_an_arena_that_grows_by_twenty():
    assert reserved((1, MIB + 1)) == 20 * MIB
    assert reserved((1, 9 * MIB), (2, 9 * MIB)) == 20 * MIB
    assert reserved((1, 9 * MIB), (2, 9 * MIB), (3, 3 * MIB)) == 40 * MIB


def test_small_and_large_do_not_share_segments():
    assert reserved((1, 100), (2, 2 * MIB)) == 22 * MIB


def test_the_smallest_free_block_that_fits_is_taken():
    holes = [(1, 32 * MIB), (2, MIB + 512), (3, 16 * MIB), (4, 10 * MIB), (1, -32 * MIB), (3, -16 * MIB)]
    assert reserved(*holes, (5, 14 * MIB), (6, 32 * MIB)) == 60 * MIB


def test_freed_neighbours_become_one_block():
    pieces = [(1, 6 * MIB), (2, 6 * MIB), (3, 6 * MIB)]  # of one segment of 20
    assert reserved(*pieces, (1, -6 * MIB), (2, -6 * MIB), (4, 12 * MIB)) == 20 * MIB
    assert reserved(*pieces, (2, -6 * MIB), (1, -6 * MIB), (4, 12 * MIB)) == 20 * MIB
    assert reserved(*pieces, (1, -6 * MIB), (3, -6 * MIB), (4, 12 * MIB)) == 40 * MIB  # the middle is in use
    everything = [(name, -6 * MIB) for name in (1, 3, 2)]
    assert reserved(*pieces, *everything, (4, 20 * MIB)) == 20 * MIB


def test_an_arena_grows_at_its_end_by_what_is_missing():
    assert reserved((1, 3 * MIB)) == 20 * MIB
    assert reserved((1, 12 * MIB), (2, 12 * MIB)) == 40 * MIB
    assert reserved((1, 30 * MIB), (1, -30 * MIB), (2, 100 * MIB)) == 100 * MIB  # the free end counts towards the 100


def test_an_arena_wastes_no_rest():
    allocations = [(1, 20 * MIB - 512), (2, 20 * MIB - 512), (3, MIB + 512)]
    assert replay(allocations) == (41 * MIB - 512, 60 * MIB)


def test_an_arena_does_not_move_what_lives():
    assert reserved((1, 30 * MIB), (2, 10 * MIB), (1, -30 * MIB), (3, 40 * MIB)) == 80 * MIB


def test_a_hole_is_taken_before_the_end_that_may_grow():
    """12 MiB from the hole of 18, though the end's 16 fits better: 36 then need 20 more, not 40."""
    holes = [(1, 18 * MIB), (2, 6 * MIB), (1, -18 * MIB)]  # a hole of 18, then 6 in use, then 16 free
    assert reserved(*holes, (3, 12 * MIB), (4, 36 * MIB)) == 60 * MIB


@st.composite
def sequences(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Allocations of all kinds and frees of what lives, in any order."""
    sizes = st.one_of(st.integers(1, 4096), st.integers(1, 2 * MIB), st.integers(MIB, 64 * MIB))
    events: list[tuple[int, int]] = []
    live: dict[int, int] = {}
    for name in range(draw(st.integers(1, 40))):
        if live and draw(st.booleans()):
            freed = draw(st.sampled_from(sorted(live)))
            events.append((freed, -live.pop(freed)))
        live[name] = draw(sizes)
        events.append((name, live[name]))
    return events


@settings(max_examples=60)
@given(sequences())
def test_reserved_holds_what_is_allocated(events):
    allocated, whole = replay(events)
    assert allocated <= whole and whole % (2 * MIB) == 0


@settings(max_examples=60)
@given(sequences())
def test_when_all_is_freed_an_arena_is_one_block_again(events):
    arena, live = _Arena(LARGE_SEGMENT), {}
    for name, size in events:
        if size > 0:
            rounded = -(-size // 512) * 512
            live[name] = (arena.take(rounded), rounded)
        else:
            arena.give_back(*live.pop(name))
    spans = sorted(live.values())
    assert all(start + size <= following for (start, size), (following, _) in pairwise(spans))
    for block in live.values():
        arena.give_back(*block)
    assert arena.free == [(arena.reserved, 0)]


@settings(max_examples=60)
@given(sequences())
def test_a_prefix_never_needs_more(events):
    half, whole = replay(events[: len(events) // 2]), replay(events)
    assert half[0] <= whole[0] and half[1] <= whole[1]
