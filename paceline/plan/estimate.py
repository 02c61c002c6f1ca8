"""
From the bytes of a step to what a device must have: the allocator's part, the process's, and how sure either is.

What this machine measured before (plan/kept.py) narrows the range. Pure arithmetic; sources stand beside the figures.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.plan.activations import MemorySetup
from paceline.plan.fits import Verdict, process_bytes, verdict
from paceline.plan.memory import Phase, copies_bytes, phases
from paceline.plan.range import Range
from paceline.units import MIB

# torch.cuda.max_memory_allocated against the sum of tensors: kernels' own workspaces and what is not known of a card
# (the facts' error budget of July 2026, nanochat-type models); a CPU's allocator is counted to the byte
EAGER_ERROR, COMPILED_ERROR, CPU_ERROR, MEASURED_ERROR = 0.10, 0.15, 0.03, 0.04
WORKSPACE_BYTES = 32 * MIB  # of cuBLASLt from Hopper on (pytorch pull request 120925); 8 to 12 before
CPU_PROCESS_BYTES = Range(
    200 * MIB, 260 * MIB, 420 * MIB
)  # resident: Python, torch 2.13, gloo, no model; a compiler is 80 more
# resident bytes for each that is allocated: malloc keeps what is freed in a heap with holes (model/cpu_process.py); two models of
# 600 and 430 MiB at three numbers of rows grew by 1.6 to 1.7
CPU_HEAP_GROWTH = Range(1.0, 1.5, 1.8)


@dataclass(frozen=True)
class Calibration:
    """What this machine measured of this kind of model: allocated bytes over planned ones, and the rest of the process."""

    ratio: float
    beside_bytes: int | None  # process minus allocated, as the driver says; None where it was not measured
    source: str  # "measured in 3 runs, the last on 2026-11-21"


Calibrate = Callable[[str, MemorySetup], Calibration | None]  # device name, setup -> what was measured of such


@dataclass(frozen=True)
class MemoryEstimate:
    """phases: by arithmetic. ratio: of what was measured to that, 1 where nothing was. allocated: torch's peak, kernels'
    workspaces in it. process: what the device must have. card_bytes: what it has, None if that is not known.
    """

    phases: tuple[Phase, ...]
    allocated: Range
    process: Range
    card_bytes: int | None
    copies_bytes: int  # of a checkpoint in the host's memory
    ratio: float
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
            "parts": {name: round(self.ratio * size) for name, size in self.peak.parts.items()},
            "phases": {phase.name: phase.bytes for phase in self.phases},
            "allocated_bytes": self.allocated.rounded(),
            "process_bytes": self.process.rounded(),
            "card_bytes": self.card_bytes,
            "copies_bytes": self.copies_bytes,
            "share": self.share,
            "verdict": self.verdict,
            "source": self.source,
        }


def estimate_memory(
    setup: MemorySetup, *, card_bytes: int | None, consumer: bool | None, calibration: Calibration | None
) -> MemoryEstimate:
    """consumer: GeForce and the like, whose context was measured; None if the card is not in the table."""
    found = phases(setup)
    allocated = _allocated(setup, max(phase.bytes for phase in found), calibration)
    copies = copies_bytes(setup)
    if calibration and calibration.beside_bytes is not None:
        beside = Range(*(calibration.beside_bytes * factor for factor in (0.9, 1.0, 1.2)))
        process = _sum(allocated, beside)
    elif setup.device == "cpu":
        held = Range(*(each * grown for each, grown in zip(_values(allocated), _values(CPU_HEAP_GROWTH), strict=True)))
        process = _sum(held, _sum(CPU_PROCESS_BYTES, Range(copies, copies, copies)))
    else:
        process = process_bytes(allocated, world_size=setup.world_size, consumer=consumer, expandable=True)
    ratio = calibration.ratio if calibration else 1.0
    source = calibration.source if calibration else "arithmetic alone: nothing was measured on this kind of device yet"
    return MemoryEstimate(found, allocated, process, card_bytes or None, copies, ratio, source)


def _allocated(setup: MemorySetup, peak: int, calibration: Calibration | None) -> Range:
    if calibration is not None:
        expected, error = peak * calibration.ratio, MEASURED_ERROR
    elif setup.device == "cpu":
        expected, error = float(peak), CPU_ERROR
    else:
        expected, error = float(peak + WORKSPACE_BYTES), COMPILED_ERROR if setup.compiled else EAGER_ERROR
    return Range(expected * (1 - error), expected, expected * (1 + error))


def _values(of: Range) -> tuple[float, float, float]:
    return of.low, of.expected, of.high


def _sum(a: Range, b: Range) -> Range:
    return Range(a.low + b.low, a.expected + b.expected, a.high + b.high)
