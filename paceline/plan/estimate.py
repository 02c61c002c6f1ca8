"""
From the bytes of a step to what a device must have: the allocator's part, the process's, and how sure either is.

What this machine measured before (plan/kept.py) narrows the range. Pure arithmetic; sources stand beside the figures.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.plan.activations import MemorySetup
from paceline.plan.fits import Verdict, process_bytes, verdict
from paceline.plan.memory import Phase, phases
from paceline.plan.range import Range
from paceline.units import MIB

# torch.cuda.max_memory_allocated against the sum of tensors: kernels' own workspaces and what is not known of a card
# (the facts' error budget of July 2026, nanochat-type models); a CPU's allocator is counted to the byte
EAGER_ERROR, COMPILED_ERROR, CPU_ERROR, MEASURED_ERROR = 0.10, 0.15, 0.03, 0.04
CPU_PROCESS_BYTES = Range(
    220 * MIB, 330 * MIB, 480 * MIB
)  # resident size of Python with torch 2.13 and gloo before the model


@dataclass(frozen=True)
class Calibration:
    """What this machine measured of this kind of model: allocated bytes over planned ones, and the rest of the process."""

    ratio: float
    beside_bytes: int | None  # process minus allocated, as the driver says; None where it was not measured
    source: str  # "measured in 3 runs, the last on 2026-11-21"


Calibrate = Callable[[str, MemorySetup], Calibration | None]  # device name, setup -> what was measured of such


@dataclass(frozen=True)
class MemoryEstimate:
    """allocated: torch's peak. process: what the device must have. card_bytes: what it has, None if that is not known."""

    phases: tuple[Phase, ...]
    allocated: Range
    process: Range
    card_bytes: int | None
    source: str

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.bytes)

    @property
    def share(self) -> float | None:
        """Of the card, 0 to 1, as expected."""
        return self.process.expected / self.card_bytes if self.card_bytes else None

    @property
    def verdict(self) -> Verdict | None:
        return verdict(self.process, self.card_bytes) if self.card_bytes else None

    def to_json(self) -> dict[str, Any]:
        """For plan.json; bytes are whole numbers."""
        return {
            "peak_phase": self.peak.name,
            "parts": dict(self.peak.parts),
            "phases": {phase.name: phase.bytes for phase in self.phases},
            "allocated_bytes": self.allocated.rounded(),
            "process_bytes": self.process.rounded(),
            "card_bytes": self.card_bytes,
            "share": self.share,
            "verdict": self.verdict,
            "source": self.source,
        }


def estimate_memory(
    setup: MemorySetup, *, card_bytes: int | None, consumer: bool | None, calibration: Calibration | None
) -> MemoryEstimate:
    """consumer: GeForce and the like, whose context was measured; None if the card is not in the table."""
    found = phases(setup)
    peak = max(phase.bytes for phase in found)
    ratio = calibration.ratio if calibration else 1.0
    error = MEASURED_ERROR if calibration else _error(setup)
    allocated = Range(peak * ratio * (1 - error), peak * ratio, peak * ratio * (1 + error))
    if calibration and calibration.beside_bytes is not None:
        beside = Range(*(calibration.beside_bytes * factor for factor in (0.9, 1.0, 1.2)))
        process = _sum(allocated, beside)
    elif setup.device == "cpu":
        process = _sum(allocated, CPU_PROCESS_BYTES)
    else:
        process = process_bytes(allocated, world_size=setup.world_size, consumer=consumer, expandable=True)
    source = calibration.source if calibration else "arithmetic alone: nothing was measured on this kind of device yet"
    return MemoryEstimate(found, allocated, process, card_bytes or None, source)


def _error(setup: MemorySetup) -> float:
    if setup.device == "cpu":
        return CPU_ERROR
    return COMPILED_ERROR if setup.compiled else EAGER_ERROR


def _sum(a: Range, b: Range) -> Range:
    return Range(a.low + b.low, a.expected + b.expected, a.high + b.high)
