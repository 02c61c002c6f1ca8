"""
From what a step allocates to what a card must have, and whether that fits.

Pure arithmetic. A card's memory is its total as the driver reports it. Where the figures come from: non-torch memory in torch's
out-of-memory messages (process in use, less allocated, less reserved but unallocated) of eleven runs of two ranks on RTX 5090 D
(0.76 to 0.78 GiB each) and of single processes on RTX 4090, L40 and L40S (0.41 to 0.50); "total capacity" in such messages against
the driver's total. Eight ranks and other cards were not measured: their ranges are wide.
"""

from math import hypot
from typing import Literal

from paceline.plan.range import Range
from paceline.units import GIB

Verdict = Literal["fits", "does not fit", "undecidable"]

CONTEXT = Range(0.3 * GIB, 0.45 * GIB, 0.7 * GIB)  # CUDA context and loaded kernels of one process
TWO_CONSUMER_RANKS = Range(0.65 * GIB, 0.77 * GIB, 0.95 * GIB)  # context and NCCL, measured on one kind of card
RANKS = Range(0.45 * GIB, 0.85 * GIB, 1.8 * GIB)  # context and NCCL, more ranks or another card: judgement
# the driver's total less torch's capacity: 0.25 to 0.5 GiB of 12, 0.3 to 0.5 of 24 and 32, 0.3 to 0.65 of 45, 0.4 to 0.86 of 80
HELD_BACK = Range(0.25 * GIB, 0.35 * GIB, 0.43 * GIB)
HELD_BACK_SHARE = Range(0.0, 0.002, 0.0055)
# reserved beyond allocated where a card is full: under 0.7 % in eleven messages with expandable segments, up to 3 % in simulation;
# without them the allocator gives back what is wholly free and tries again, and what remains was not measured
EXPANDABLE = Range(0.0, 0.007, 0.03)
NOT_EXPANDABLE = Range(0.0, 0.04, 0.10)


def verdict(need_bytes: Range, card_bytes: int) -> Verdict:
    """need_bytes: of process_bytes. card_bytes: the card's total."""
    if need_bytes.high <= card_bytes:
        return "fits"
    return "does not fit" if need_bytes.low > card_bytes else "undecidable"


def process_bytes(allocated: Range, *, world_size: int, consumer: bool | None, expandable: bool) -> Range:
    """The total that a card must have for torch to allocate that much.

    consumer: GeForce and the like; None if the card is not known. expandable: the allocator's expandable_segments.
    """
    fragments = (EXPANDABLE if expandable else NOT_EXPANDABLE).scaled(allocated.expected)
    growing = HELD_BACK_SHARE.scaled(allocated.expected)
    return sum_of_independent(allocated, fragments, _beside(world_size, consumer), HELD_BACK, growing)


def sum_of_independent(*parts: Range) -> Range:
    """Deviations with separate causes add as squares: that all are at their worst at once is not to be expected."""
    expected = sum(part.expected for part in parts)
    below = hypot(*(part.expected - part.low for part in parts))
    above = hypot(*(part.high - part.expected for part in parts))
    return Range(expected - below, expected, expected + above)


def _beside(world_size: int, consumer: bool | None) -> Range:
    if world_size == 1:
        return CONTEXT
    return TWO_CONSUMER_RANKS if world_size == 2 and consumer else RANKS
