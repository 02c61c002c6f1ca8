"""
From the bytes of a step to what a device must have, and whether that fits: each figure as a range of what is believed.

Pure arithmetic. A card's memory is its total as the driver reports it. What this machine measured before (plan/history.py) narrows
the ranges. Where the figures come from: non-torch memory in torch's out-of-memory messages (process in use, less allocated, less
reserved but unallocated) of eleven runs of two ranks on RTX 5090 D (0.76 to 0.78 GiB each) and of single processes on RTX 4090, L40
and L40S (0.41 to 0.50); "total capacity" in such messages against the driver's total. Eight ranks and other cards were not
measured: their ranges are wide.
"""

from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from math import hypot
from typing import Any, Literal

from paceline.plan.activations import MemorySetup
from paceline.plan.memory import Phase, copies_bytes, fullest_state, phases
from paceline.units import GIB, MIB


@dataclass(frozen=True)
class Range:
    """A figure with its uncertainty: what is expected, and between what it is believed to lie."""

    low: float
    expected: float
    high: float

    def __post_init__(self) -> None:
        assert self.low <= self.expected <= self.high, self

    def __add__(self, other: "Range") -> "Range":
        return Range(self.low + other.low, self.expected + other.expected, self.high + other.high)

    def scaled(self, factor: float) -> "Range":
        """Returns the same range in another unit; factor is positive."""
        return Range(self.low * factor, self.expected * factor, self.high * factor)

    def rounded(self) -> dict[str, int]:
        """Returns the range in whole numbers, as JSON holds it."""
        return {"low": round(self.low), "expected": round(self.expected), "high": round(self.high)}


NAMES = {
    "weights": "weights",
    "masters": "fp32 masters",
    "states": "optimizer states",
    "staging": "staging buffers",
    "gathered": "gathered weights",
    "communication": "communication buffers",
    "gradients": "gradients",
    "activations": "activations",
    "loss": "loss and logits",
    "working": "temporaries",
}
Verdict = Literal["fits", "does not fit", "undecidable"]

CONTEXT = Range(0.3 * GIB, 0.45 * GIB, 0.7 * GIB)  # CUDA context and loaded kernels of one process
TWO_CONSUMER_RANKS = Range(0.65 * GIB, 0.77 * GIB, 0.95 * GIB)  # context and NCCL, measured on one kind of card
RANKS = Range(0.45 * GIB, 0.85 * GIB, 1.8 * GIB)  # context and NCCL, more ranks or another card: judgement
# the driver's total less torch's capacity: 0.25 to 0.5 GiB of 12, 0.3 to 0.5 of 24 and 32, 0.3 to 0.65 of 45, 0.4 to 0.86 of 80
HELD_BACK = Range(0.25 * GIB, 0.35 * GIB, 0.43 * GIB)
HELD_BACK_SHARE = Range(0.0, 0.002, 0.0055)
# reserved beyond allocated where a card is full: under 0.7 % in eleven messages with expandable segments, up to 3 % in simulation
EXPANDABLE = Range(0.0, 0.007, 0.03)
# torch.cuda.max_memory_allocated against the sum of tensors: kernels' own workspaces and what is not known of a card
# (the facts' error budget of July 2026, nanochat-type models); a CPU's allocator is counted to the byte
EAGER_ERROR, COMPILED_ERROR, CPU_ERROR = 0.10, 0.15, 0.03
WORKSPACE_BYTES = 32 * MIB  # of cuBLASLt from Hopper on (pytorch pull request 120925); 8 to 12 before
# resident: Python, torch 2.13, gloo, no model; a compiler is 80 more
CPU_PROCESS_BYTES = Range(200 * MIB, 260 * MIB, 420 * MIB)
# resident bytes for each that is allocated: malloc keeps what is freed in a heap with holes (train/process.py); two models of
# 600 and 430 MiB at three numbers of rows grew by 1.6 to 1.7
CPU_HEAP_GROWTH = Range(1.0, 1.5, 1.8)


def verdict(need_bytes: Range, card_bytes: int) -> Verdict:
    """Returns whether process_bytes fit a card. card_bytes: the card's total."""
    if need_bytes.high <= card_bytes:
        return "fits"
    return "does not fit" if need_bytes.low > card_bytes else "undecidable"


def process_bytes(allocated: Range, *, world_size: int, consumer: bool | None) -> Range:
    """Returns the total that a card must have for torch to allocate that much, in expandable segments.

    consumer: GeForce and the like; None if the card is not known.
    """
    fragments = EXPANDABLE.scaled(allocated.expected)
    growing = HELD_BACK_SHARE.scaled(allocated.expected)
    context = context_bytes(world_size, consumer=consumer)
    return sum_of_independent(allocated, fragments, context, HELD_BACK, growing)


def context_bytes(world_size: int, *, consumer: bool | None) -> Range:
    """Returns what a process takes on its card besides torch's allocator: CUDA's context, kernels and, of several ranks, NCCL."""
    several = TWO_CONSUMER_RANKS if world_size == 2 and consumer else RANKS
    return CONTEXT if world_size == 1 else several


def sum_of_independent(*parts: Range) -> Range:
    """Adds ranges whose deviations have separate causes: as squares, since all are not at their worst at once."""
    expected = sum(part.expected for part in parts)
    below = hypot(*(part.expected - part.low for part in parts))
    above = hypot(*(part.high - part.expected for part in parts))
    return Range(expected - below, expected, expected + above)


@dataclass(frozen=True)
class Calibration:
    """What this machine's own measurements say of a setup, in place of assumptions."""

    allocated: Range | None  # torch's peak; None on a CPU, whose allocator arithmetic counts to the byte
    process: Range | None  # what the device must have; None where no process was measured
    source: str  # "measured in 3 runs here, the last on 2026-11-21"


Calibrate = Callable[[str, MemorySetup], Calibration | None]  # device name, setup -> what was measured of such models


@dataclass(frozen=True)
class MemoryEstimate:
    """What a setup is expected to need.

    phases: by arithmetic. ratio: what was measured over phases, 1 where nothing was. allocated: torch's peak with kernels'
    workspaces. process: what the device must have. card_bytes: what it has, None if that is not known.
    """

    phases: tuple[Phase, ...]
    allocated: Range
    process: Range
    card_bytes: int | None
    copies_bytes: int  # of a checkpoint in the host's memory
    offloaded_bytes: int  # masters and states in the host's memory
    ratio: float
    source: str

    def to_json(self) -> dict[str, Any]:
        """Returns what plan.json holds; bytes are whole numbers, share is the expected part of the card, 0 to 1."""
        process, card = self.process, self.card_bytes
        peak = max(self.phases, key=lambda phase: phase.bytes)
        return {
            "peak_phase": peak.name,
            "parts": {name: round(self.ratio * size) for name, size in peak.parts.items()},
            "phases": {phase.name: phase.bytes for phase in self.phases},
            "allocated_bytes": self.allocated.rounded(),
            "process_bytes": process.rounded(),
            "card_bytes": card,
            "copies_bytes": self.copies_bytes,
            "offloaded_bytes": self.offloaded_bytes,
            "share": process.expected / card if card else None,
            "verdict": verdict(process, card) if card else None,
            "source": self.source,
        }


def estimate_memory(
    setup: MemorySetup, *, card_bytes: int | None, consumer: bool | None, calibration: Calibration | None
) -> MemoryEstimate:
    """Returns what a setup needs. consumer: GeForce and the like, whose context was measured; None for an unknown card."""
    planned = phases(setup)
    peak, copies = float(max(phase.bytes for phase in planned)), copies_bytes(setup)
    ratio = 1.0
    if calibration and calibration.allocated:
        allocated, ratio = calibration.allocated, calibration.allocated.expected / peak
    elif setup.device == "cpu":
        allocated = Range(peak * (1 - CPU_ERROR), peak, peak * (1 + CPU_ERROR))
    else:
        allocated = arithmetic_error(setup).scaled(peak + WORKSPACE_BYTES)
    if calibration and calibration.process:
        process = calibration.process
    elif setup.device == "cpu":
        heap = Range(
            *(size * growth for size, growth in zip(astuple(allocated), astuple(CPU_HEAP_GROWTH), strict=True))
        )
        process = heap + CPU_PROCESS_BYTES + Range(copies, copies, copies)
    else:
        process = process_bytes(allocated, world_size=setup.world_size, consumer=consumer)
    source = calibration.source if calibration else "arithmetic alone: nothing was measured on this kind of device yet"
    offloaded = fullest_state(setup).on_host
    return MemoryEstimate(planned, allocated, process, card_bytes or None, copies, offloaded, ratio, source)


def named_parts(parts: Mapping[str, float], need: float, *, on_gpu: bool) -> list[tuple[str, float]]:
    """Returns parts by their names on the screen, and what the device must have besides, with parts under a thousandth."""
    named = [(NAMES[name], size) for name, size in parts.items() if size >= 0.001 * need]
    others = "CUDA, kernels, fragments" if on_gpu else "Python, PyTorch, copies"
    return [*named, (others, need - sum(size for _, size in named))]


def arithmetic_error(setup: MemorySetup) -> Range:
    """Returns a GPU's allocated bytes over the closed form's, as far as that is known without a measurement."""
    error = COMPILED_ERROR if setup.compiled else EAGER_ERROR
    return Range(1 - error, 1.0, 1 + error)
