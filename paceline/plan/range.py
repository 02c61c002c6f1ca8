"""
A figure with its uncertainty: what is expected, and between what it is believed to lie.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    low: float
    expected: float
    high: float

    def __post_init__(self) -> None:
        assert self.low <= self.expected <= self.high, self

    def scaled(self, factor: float) -> "Range":
        """The same uncertainty in another unit; factor is positive."""
        return Range(self.low * factor, self.expected * factor, self.high * factor)

    def rounded(self) -> dict[str, int]:
        return {"low": round(self.low), "expected": round(self.expected), "high": round(self.high)}
