"""The caching allocator as arithmetic: what is reserved from the driver for a known sequence, and what holds for any."""

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.train.exact import Replay, _Pool, replay

MIB = 1 << 20


def reserved(*events: tuple[int, int], expandable: bool = False) -> int:
    return replay(events, expandable=expandable).reserved


def test_sizes_are_rounded_up_to_512_bytes():
    assert replay([(1, 1), (2, 512), (3, 513)], expandable=False) == Replay(1026, 512 + 512 + 1024, 2 * MIB)


def test_peaks_are_of_what_lives_at_once():
    peaks = replay([(1, 4 * MIB), (2, 3 * MIB), (1, -4 * MIB), (3, 2 * MIB)], expandable=False)
    assert (peaks.requested, peaks.allocated) == (7 * MIB, 7 * MIB)


def test_an_unknown_name_frees_nothing():
    assert replay([(7, -MIB), (1, MIB)], expandable=False).allocated == MIB


def test_up_to_a_mebibyte_comes_from_segments_of_two():
    assert reserved((1, MIB), (2, MIB)) == 2 * MIB
    assert reserved((1, MIB), (2, MIB), (3, 1)) == 4 * MIB


def test_more_comes_from_segments_of_twenty():
    assert reserved((1, MIB + 1)) == 20 * MIB
    assert reserved((1, 9 * MIB), (2, 9 * MIB)) == 20 * MIB
    assert reserved((1, 9 * MIB), (2, 9 * MIB), (3, 3 * MIB)) == 40 * MIB


def test_from_ten_mebibytes_on_a_segment_is_made_to_measure():
    assert reserved((1, 10 * MIB)) == 10 * MIB
    assert reserved((1, 11 * MIB)) == 12 * MIB
    assert reserved((1, 101 * MIB), (2, 51 * MIB)) == 102 * MIB + 52 * MIB


def test_small_and_large_do_not_share_segments():
    assert reserved((1, 100), (2, 2 * MIB)) == 22 * MIB


def test_a_large_block_keeps_a_rest_of_a_mebibyte_or_less():
    """So 12 and 11 MiB do not both fit where 24 were: 13 is free, 12 is taken, and what is left serves no one."""
    allocations = [(1, 24 * MIB), (1, -24 * MIB), (2, 12 * MIB), (3, 11 * MIB)]
    peaks = replay([*allocations, (4, MIB + 512)], expandable=False)
    assert peaks.allocated == 12 * MIB + 12 * MIB + MIB + 512  # the block of 11 is one of 12
    assert peaks.reserved == 24 * MIB + 20 * MIB


def test_the_smallest_free_block_that_fits_is_taken():
    holes = [(1, 30 * MIB), (2, 16 * MIB), (1, -30 * MIB), (2, -16 * MIB)]
    assert reserved(*holes, (3, 14 * MIB), (4, 30 * MIB)) == 46 * MIB


def test_freed_neighbours_become_one_block():
    pieces = [(1, 6 * MIB), (2, 6 * MIB), (3, 6 * MIB)]  # of one segment of 20
    assert reserved(*pieces, (1, -6 * MIB), (2, -6 * MIB), (4, 12 * MIB)) == 20 * MIB
    assert reserved(*pieces, (2, -6 * MIB), (1, -6 * MIB), (4, 12 * MIB)) == 20 * MIB
    assert reserved(*pieces, (1, -6 * MIB), (3, -6 * MIB), (4, 12 * MIB)) == 32 * MIB  # the middle is in use
    everything = [(name, -6 * MIB) for name in (1, 3, 2)]
    assert reserved(*pieces, *everything, (4, 20 * MIB)) == 20 * MIB


def test_an_expandable_arena_grows_at_its_end_by_what_is_missing():
    assert reserved((1, 3 * MIB), expandable=True) == 20 * MIB
    assert reserved((1, 12 * MIB), (2, 12 * MIB), expandable=True) == 40 * MIB
    grown = [(1, 30 * MIB), (1, -30 * MIB), (2, 100 * MIB)]
    assert reserved(*grown, expandable=True) == 100 * MIB  # the free end counts towards the 100
    assert reserved(*grown) == 130 * MIB


def test_an_expandable_arena_wastes_no_rest():
    allocations = [(1, 20 * MIB - 512), (2, 20 * MIB - 512), (3, MIB + 512)]
    assert replay(allocations, expandable=True) == Replay(41 * MIB - 512, 41 * MIB - 512, 60 * MIB)


def test_an_expandable_arena_does_not_move_what_lives():
    events = [(1, 30 * MIB), (2, 10 * MIB), (1, -30 * MIB), (3, 40 * MIB)]
    assert reserved(*events, expandable=True) == 80 * MIB


def test_a_hole_is_taken_before_the_end_that_may_grow():
    """12 MiB from the hole of 18, though the end's 16 fits better: 36 then need 20 more, not 40."""
    holes = [(1, 18 * MIB), (2, 6 * MIB), (1, -18 * MIB)]  # a hole of 18, then 6 in use, then 16 free
    assert reserved(*holes, (3, 12 * MIB), (4, 36 * MIB), expandable=True) == 60 * MIB


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


@settings(deadline=None, max_examples=60)
@given(sequences(), st.booleans())
def test_reserved_holds_what_is_allocated_and_that_what_was_asked_for(events, expandable):
    peaks = replay(events, expandable=expandable)
    assert peaks.requested <= peaks.allocated <= peaks.reserved
    assert peaks.reserved % (2 * MIB) == 0


@settings(deadline=None, max_examples=60)
@given(sequences(), st.booleans())
def test_when_all_is_freed_each_segment_is_one_block_again(events, expandable):
    pool = _Pool(expandable, 20 * MIB, splits_below=512 if expandable else MIB + 1)
    live = {}
    for name, size in events:
        if size > 0:
            live[name] = pool.take(-(-size // 512) * 512)
        else:
            pool.give_back(live.pop(name))
    for block in live.values():
        pool.give_back(block)
    assert sum(size for size, _, _ in pool.free) == pool.reserved
    assert sorted(segment for _, segment, _ in pool.free) == ([0] if expandable else list(range(1, pool.segments + 1)))


@settings(deadline=None, max_examples=60)
@given(sequences(), st.booleans())
def test_a_prefix_never_needs_more(events, expandable):
    half, whole = (replay(part, expandable=expandable) for part in (events[: len(events) // 2], events))
    assert half.requested <= whole.requested and half.allocated <= whole.allocated and half.reserved <= whole.reserved
