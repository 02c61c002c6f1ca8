"""
From what a step allocates to what a card must have, and whether that fits.
"""

from typing import Literal

from paceline.plan.range import Range
from paceline.units import MIB

Verdict = Literal["fits", "does not fit", "undecidable"]


def verdict(need_bytes: Range, card_bytes: int) -> Verdict:
    if need_bytes.high <= card_bytes:
        return "fits"
    return "does not fit" if need_bytes.low > card_bytes else "undecidable"


def process_bytes(allocated: Range, *, world_size: int, consumer: bool | None, expandable: bool) -> Range:
    low, expected, high = (400 * MIB, 770 * MIB, 1200 * MIB)
    return Range(allocated.low + low, allocated.expected * 1.015 + expected, allocated.high * 1.03 + high)
