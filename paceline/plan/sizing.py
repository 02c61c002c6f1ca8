"""
What fits: the largest micro-batch, then smaller loss chunks, then activation checkpointing; or the smallest change that would.

total_batch_size, the rows of a step and the learning rates stay: only the part of a step that is in memory at a time is chosen.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from paceline.config import Config
from paceline.errors import PlanError
from paceline.plan.activations import MemorySetup
from paceline.plan.estimate import Calibrate, MemoryEstimate, estimate_memory
from paceline.plan.machine import Machine
from paceline.plan.shapes import model_of_depth
from paceline.units import MIB, format_bytes

PROFILES = {"conservative": 0.48, "balanced": 0.65, "aggressive": 0.90}  # of the device's memory
LOGITS_MIB = 512  # from here on, larger chunks were not faster
SMALLEST_LOGITS_MIB = 32
CPU_MICRO_STEP_TOKENS = 2_048  # of an automatic device_batch_size: a larger one is no faster on a CPU
BLIND_MICRO_STEP_TOKENS = 32_768  # the same on a GPU whose memory is not known

Estimate = Callable[[MemorySetup], MemoryEstimate]
# device name, setup, its bytes -> whether it failed here before
TooLarge = Callable[[str, MemorySetup, int | None], bool]


class DoesNotFit(PlanError):
    """Nothing that the config leaves open fits. estimate: what the smallest setup needs."""

    def __init__(self, message: str, *, fix: str, estimate: MemoryEstimate):
        super().__init__(message, fix=fix)
        self.estimate = estimate


@dataclass(frozen=True)
class Solver:
    """What may be changed, and by what a setup is judged; everything else keeps the setup's value."""

    rows: bool
    logits: bool
    checkpointing: bool
    share_rows: int  # one device's rows of a step, over all micro-steps
    estimate: Estimate
    most_rows: int | None  # a larger micro-batch is no faster on this device
    too_large: Callable[[MemorySetup], bool]  # whether it ran out of memory here before

    def fit(self, setup: MemorySetup, budget_bytes: float | None) -> MemorySetup | None:
        """Returns the setup with the largest micro-batch within budget_bytes; None if nothing fits.

        budget_bytes None: the device's memory is not known, and the micro-batch is most_rows at most.
        """
        rows = divisors(self.share_rows) if self.rows else [setup.device_batch_size]
        if self.rows and self.most_rows is not None:
            rows = [count for count in rows if count <= self.most_rows]
        for relaxed in self.relaxations(setup):
            for count in rows:
                candidate = self.with_rows(relaxed, count)
                if self.fits(candidate, budget_bytes) and not self.too_large(candidate):
                    return candidate
        return None

    def fits(self, setup: MemorySetup, budget_bytes: float | None) -> bool:
        """Returns whether the expected bytes are within the budget, and the most within the device."""
        if budget_bytes is None:
            return True
        estimate = self.estimate(setup)
        within = estimate.card_bytes is None or estimate.process.high <= estimate.card_bytes
        return estimate.process.expected <= budget_bytes and within

    def relaxations(self, setup: MemorySetup) -> Iterator[MemorySetup]:
        """Yields the setup, then ever smaller loss chunks, then checkpointing: each costs more speed than the one before."""
        yield setup
        smaller = setup
        while self.logits and smaller.logits_budget_bytes // 2 >= SMALLEST_LOGITS_MIB * MIB:
            smaller = replace(smaller, logits_budget_bytes=smaller.logits_budget_bytes // 2)
            yield smaller
        if self.checkpointing and not setup.activation_checkpointing:
            yield replace(setup, activation_checkpointing=True)
            if smaller is not setup:
                yield replace(smaller, activation_checkpointing=True)

    def with_rows(self, setup: MemorySetup, rows: int) -> MemorySetup:
        """Returns the setup with this device_batch_size, and as many micro-steps as its rows then need."""
        return replace(setup, device_batch_size=rows, grad_accum_steps=self.share_rows // rows)


@dataclass(frozen=True)
class SizedSetup:
    """A setup that fits, and what it is expected to need."""

    setup: MemorySetup
    estimate: MemoryEstimate
    share: float | None  # of the device that was to be filled; None where device_batch_size was given
    notes: tuple[str, ...]


def choose_fit(
    config: Config, setup: MemorySetup, machine: Machine, *, calibrate: Calibrate, too_large: TooLarge
) -> SizedSetup:
    """Returns the setup, sized to the machine's memory; raises DoesNotFit with the smallest change that would fit.

    setup: as the config has it. One device's rows of a step, over all micro-steps, stay as many.
    """
    gpu = machine.gpus[0] if setup.device == "cuda" else None
    device_name = gpu.name if gpu else "CPU"
    card_bytes = gpu.memory_bytes if gpu else machine.memory_bytes // (setup.world_size // machine.hosts)

    def estimate(candidate: MemorySetup) -> MemoryEstimate:
        consumer = gpu.spec.consumer if gpu and gpu.spec else None
        calibration = calibrate(device_name, candidate)
        return estimate_memory(candidate, card_bytes=card_bytes, consumer=consumer, calibration=calibration)

    rows_are_open = config.device_batch_size is None  # rows that the user sets are the user's
    share = (config.memory_share or PROFILES[config.profile]) if rows_are_open else 1.0
    most = CPU_MICRO_STEP_TOKENS if gpu is None else None if card_bytes else BLIND_MICRO_STEP_TOKENS
    solver = Solver(
        rows=rows_are_open,
        logits=config.logits_mib is None,
        checkpointing=config.activation_checkpointing is None,
        share_rows=setup.device_batch_size * setup.grad_accum_steps,
        estimate=estimate,
        most_rows=max(1, most // setup.model.sequence_len) if most else None,
        too_large=lambda candidate: rows_are_open and too_large(device_name, candidate, card_bytes or None),
    )
    fitting = solver.fit(setup, share * card_bytes if card_bytes else None)
    if fitting is None:
        raise does_not_fit(config, setup, solver, share=share)
    notes = []
    if fitting.logits_budget_bytes != setup.logits_budget_bytes:
        notes.append(f"loss in chunks of {format_bytes(fitting.logits_budget_bytes)} to fit: some per cent slower")
    if fitting.activation_checkpointing and not setup.activation_checkpointing:
        notes.append("activation checkpointing to fit: blocks are computed twice, 4/3 of the time")
    if not solver.rows and config.memory_share is not None:
        notes.append(f"device_batch_size is set to {config.device_batch_size}, so memory_share chooses nothing")
    return SizedSetup(fitting, estimate(fitting), share if solver.rows else None, tuple(notes))


def does_not_fit(config: Config, setup: MemorySetup, solver: Solver, *, share: float) -> DoesNotFit:
    """Returns the error where nothing fits, with what the smallest setup needs and the smallest change that would fit."""
    least = solver.with_rows(list(solver.relaxations(setup))[-1], 1) if solver.rows else setup
    needs = solver.estimate(least)
    assert needs.card_bytes is not None
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in needs.peak.parts.items() if size >= MIB)
    allowed = f"{100 * share:.0f} % of its " if share < 1 else ""
    device = "GPU" if setup.device == "cuda" else "process"
    return DoesNotFit(
        f"{format_bytes(needs.process.expected)} needed on each {device} with device_batch_size {least.device_batch_size},"
        f" {allowed}{format_bytes(needs.card_bytes)} may be used ({parts})",
        fix=smallest_change(config, setup, solver, share=share),
        estimate=needs,
    )


def smallest_change(config: Config, setup: MemorySetup, solver: Solver, *, share: float) -> str:
    """Returns the first change that fits: of those that keep the run the same, then of those to the model."""
    card = solver.estimate(setup).card_bytes
    assert card is not None
    everything = replace(solver, rows=True, logits=True, checkpointing=True)

    def flags(solver: Solver, budget_bytes: float) -> str | None:
        fitting = solver.fit(setup, budget_bytes)
        if fitting is None:
            return None
        changes = []
        if fitting.device_batch_size != setup.device_batch_size:
            changes.append(f"--device-batch-size {fitting.device_batch_size}")
        if fitting.logits_budget_bytes != setup.logits_budget_bytes:
            changes.append(f"--logits-mib {fitting.logits_budget_bytes // MIB}")
        if fitting.activation_checkpointing != setup.activation_checkpointing:
            changes.append("--activation-checkpointing")
        needed = format_bytes(solver.estimate(fitting).process.expected)
        return f"{' '.join(changes)} needs {needed}, same total_batch_size"

    if not solver.rows and (change := flags(replace(solver, rows=True), card)):
        return change
    for name, other in PROFILES.items():
        if other > share and solver.fit(setup, other * card):
            return f"--profile {name} ({100 * other:.0f} % of the memory)"
    if change := flags(everything, share * card):
        return change
    if setup.device == "cpu" and setup.world_size > 1:  # which share the host's memory
        memory = card * setup.world_size

        def of_all(candidate: MemorySetup) -> MemoryEstimate:
            return replace(solver.estimate(candidate), card_bytes=memory)

        alone = replace(everything, share_rows=solver.share_rows * setup.world_size, estimate=of_all)
        if alone.fit(replace(setup, world_size=1), share * memory):
            return "--nproc 1"
    for depth in range(setup.model.n_layer - 1, 0, -1):
        model = replace(setup.model, n_layer=depth)
        if config.n_embd is None:  # the width follows from the depth
            model = model_of_depth(model, depth)
            model = replace(model, n_kv_head=config.n_kv_head or model.n_head)
        if everything.fit(replace(setup, model=model), share * card):
            return f"--depth {depth}, or a device with more memory"
    return "a device with more memory, or a shorter sequence_len or smaller vocab_size"


def divisors(number: int) -> list[int]:
    """Returns all divisors, from the largest down."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)}, reverse=True)
