"""
What fits: the most rows at once, then smaller loss chunks, then activation checkpointing; or the smallest change that would.

total_batch_size, the rows of a step and the learning rates stay: only how much of a step is in memory at once is chosen.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from paceline.config import Config, ModelConfig
from paceline.errors import PlanError
from paceline.plan.activations import MemorySetup
from paceline.plan.estimate import Calibrate, MemoryEstimate, estimate_memory
from paceline.plan.machine import Machine
from paceline.plan.scaling import width_of_depth
from paceline.units import MIB, format_bytes

PROFILES = {"conservative": 0.48, "balanced": 0.65, "aggressive": 0.90}  # of the device's memory
LOGITS_MIB = 512  # from here on, larger chunks were not faster
SMALLEST_LOGITS_MIB = 32
CPU_MICRO_STEP_TOKENS = 2_048  # of an automatic device_batch_size: more are no faster on a CPU
BLIND_MICRO_STEP_TOKENS = 32_768  # the same on a GPU whose memory is not known

Estimate = Callable[[MemorySetup], MemoryEstimate]
TooLarge = Callable[
    [str, MemorySetup, int | None], bool
]  # device name, setup, bytes of the device -> it failed here before


class DoesNotFit(PlanError):
    """estimate: of the least that was tried."""

    def __init__(self, message: str, *, fix: str, estimate: MemoryEstimate):
        super().__init__(message, fix=fix)
        self.estimate = estimate


@dataclass(frozen=True)
class Free:
    """What the solver may choose; what is not free keeps the setup's value."""

    rows: bool
    logits: bool
    checkpointing: bool
    most_rows: int | None = None  # more are no faster on this device
    too_large: Callable[[MemorySetup], bool] = lambda setup: False  # it ran out of memory here before


@dataclass(frozen=True)
class Chosen:
    """A setup that fits, and what it is expected to need."""

    setup: MemorySetup
    estimate: MemoryEstimate
    share: float | None  # of the device that was to be filled; None where device_batch_size was given
    notes: tuple[str, ...]


def choose_fit(
    config: Config,
    setup: MemorySetup,
    machine: Machine,
    *,
    share_rows: int,
    calibrate: Calibrate | None,
    too_large: TooLarge | None = None,
) -> Chosen:
    """setup: as the config has it. Raises PlanError, with the smallest change that would fit."""
    gpu = machine.gpus[0] if setup.device == "cuda" else None
    card_bytes = gpu.memory_bytes if gpu else machine.memory_bytes // (setup.world_size // machine.hosts)

    def estimate(candidate: MemorySetup) -> MemoryEstimate:
        consumer = gpu.spec.consumer if gpu and gpu.spec else None
        calibration = calibrate(gpu.name if gpu else "CPU", candidate) if calibrate else None
        return estimate_memory(candidate, card_bytes=card_bytes, consumer=consumer, calibration=calibration)

    def failed_here(candidate: MemorySetup) -> bool:
        return too_large is not None and too_large(gpu.name if gpu else "CPU", candidate, card_bytes or None)

    share = memory_share(config) if config.device_batch_size is None else 1.0
    most = CPU_MICRO_STEP_TOKENS if gpu is None else None if card_bytes else BLIND_MICRO_STEP_TOKENS
    free = Free(
        rows=config.device_batch_size is None,
        logits=config.logits_mib is None,
        checkpointing=config.activation_checkpointing is None,
        most_rows=max(1, most // setup.model.sequence_len) if most else None,
        **({"too_large": failed_here} if config.device_batch_size is None else {}),
    )
    found = fit(
        setup,
        share_rows=share_rows,
        budget_bytes=share * card_bytes if card_bytes else None,
        free=free,
        estimate=estimate,
    )
    if found is None:
        raise does_not_fit(config, setup, share_rows=share_rows, share=share, free=free, estimate=estimate)
    notes = [*cost_notes(setup, found)]
    if not free.rows and config.memory_share is not None:
        notes.append(f"device_batch_size is set to {config.device_batch_size}, so memory_share chooses nothing")
    return Chosen(found, estimate(found), share if free.rows else None, tuple(notes))


def memory_share(config: Config) -> float:
    return PROFILES[config.profile] if config.memory_share is None else config.memory_share


def cost_notes(asked: MemorySetup, found: MemorySetup) -> Iterator[str]:
    if found.logits_budget_bytes != asked.logits_budget_bytes:
        yield f"loss in chunks of {format_bytes(found.logits_budget_bytes)} to fit: some per cent slower"
    if found.activation_checkpointing and not asked.activation_checkpointing:
        yield "activation checkpointing to fit: blocks are computed twice, 4/3 of the time"


def does_not_fit(
    config: Config, setup: MemorySetup, *, share_rows: int, share: float, free: Free, estimate: Estimate
) -> DoesNotFit:
    least = list(relaxations(setup, free))[-1] if free.rows else setup
    if free.rows:
        least = with_rows(least, 1, share_rows=share_rows)
    needs = estimate(least)
    assert needs.card_bytes is not None
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in needs.peak.parts.items() if size >= MIB)
    rows = f"{least.device_batch_size} row{'s' if least.device_batch_size > 1 else ''} at once"
    allowed = f"{100 * share:.0f} % of its " if share < 1 else ""
    device = "GPU" if setup.device == "cuda" else "process"
    return DoesNotFit(
        f"{format_bytes(needs.process.expected)} needed on each {device} with {rows}, {allowed}{format_bytes(needs.card_bytes)}"
        f" may be used ({parts})",
        fix=smallest_change(config, setup, share_rows=share_rows, share=share, free=free, estimate=estimate),
        estimate=needs,
    )


def smallest_change(
    config: Config, setup: MemorySetup, *, share_rows: int, share: float, free: Free, estimate: Estimate
) -> str:
    """Of what keeps the run the same, the first that fits; else a smaller model."""
    card = estimate(setup).card_bytes
    assert card is not None
    if not free.rows:
        with_free_rows = replace(free, rows=True)
        found = fit(setup, share_rows=share_rows, budget_bytes=card, free=with_free_rows, estimate=estimate)
        if found is not None:
            return f"{flags_of(setup, found)} needs {format_bytes(estimate(found).process.expected)}, same total_batch_size"
    for name, other in PROFILES.items():
        if other > share and fit(setup, share_rows=share_rows, budget_bytes=other * card, free=free, estimate=estimate):
            return f"--profile {name} ({100 * other:.0f} % of the memory)"
    everything = replace(free, rows=True, logits=True, checkpointing=True)
    found = fit(setup, share_rows=share_rows, budget_bytes=share * card, free=everything, estimate=estimate)
    if found is not None:
        return f"{flags_of(setup, found)} needs {format_bytes(estimate(found).process.expected)}, same total_batch_size"
    if setup.device == "cpu" and setup.world_size > 1:  # which share the host's memory
        alone, rows, memory = replace(setup, world_size=1), share_rows * setup.world_size, card * setup.world_size

        def of_all(candidate: MemorySetup) -> MemoryEstimate:
            return replace(estimate(candidate), card_bytes=memory)

        if fit(alone, share_rows=rows, budget_bytes=share * memory, free=everything, estimate=of_all):
            return "--nproc 1"
    for depth in range(setup.model.n_layer - 1, 0, -1):
        smaller = replace(setup, model=_shallower(config, setup.model, depth))
        if fit(smaller, share_rows=share_rows, budget_bytes=share * card, free=everything, estimate=estimate):
            return f"--depth {depth}, or a device with more memory"
    return "a device with more memory, or a shorter sequence_len or smaller vocab_size"


def flags_of(asked: MemorySetup, found: MemorySetup) -> str:
    flags = []
    if found.device_batch_size != asked.device_batch_size:
        flags.append(f"--device-batch-size {found.device_batch_size}")
    if found.logits_budget_bytes != asked.logits_budget_bytes:
        flags.append(f"--logits-mib {found.logits_budget_bytes // MIB}")
    if found.activation_checkpointing != asked.activation_checkpointing:
        flags.append("--activation-checkpointing")
    return " ".join(flags)


def _shallower(config: Config, model: ModelConfig, depth: int) -> ModelConfig:
    """With fewer layers; narrower as well, where the width follows from the depth."""
    if config.n_embd is not None:
        return replace(model, n_layer=depth)
    width = width_of_depth(depth, head_dim=config.head_dim)
    heads = width // config.head_dim
    return replace(model, n_layer=depth, n_embd=width, n_head=heads, n_kv_head=config.n_kv_head or heads)


def divisors(number: int) -> list[int]:
    """From the largest down."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)}, reverse=True)


def with_rows(setup: MemorySetup, rows: int, *, share_rows: int) -> MemorySetup:
    return replace(setup, device_batch_size=rows, grad_accum_steps=share_rows // rows)


def fit(
    setup: MemorySetup, *, share_rows: int, budget_bytes: float | None, free: Free, estimate: Estimate
) -> MemorySetup | None:
    """The setup that takes most rows at once within budget_bytes; None if none does.

    share_rows: one device's rows of a step, over all micro-steps. budget_bytes None: the device's memory is not known, and no
    more than most_rows are taken.
    """
    rows = divisors(share_rows) if free.rows else [setup.device_batch_size]
    if free.rows and free.most_rows is not None:
        rows = [count for count in rows if count <= free.most_rows]
    for relaxed in relaxations(setup, free):
        for count in rows:
            candidate = with_rows(relaxed, count, share_rows=share_rows)
            if not free.too_large(candidate) and (budget_bytes is None or fits(estimate(candidate), budget_bytes)):
                return candidate
    return None


def fits(estimate: MemoryEstimate, budget_bytes: float) -> bool:
    """As expected within the budget, and at the worst within the device."""
    within = estimate.card_bytes is None or estimate.process.high <= estimate.card_bytes
    return estimate.process.expected <= budget_bytes and within


def relaxations(setup: MemorySetup, free: Free) -> Iterator[MemorySetup]:
    """The setup; then with ever smaller loss chunks; then with checkpointing as well. Each costs more speed than the one before."""
    yield setup
    smaller = setup
    while free.logits and smaller.logits_budget_bytes // 2 >= SMALLEST_LOGITS_MIB * MIB:
        smaller = replace(smaller, logits_budget_bytes=smaller.logits_budget_bytes // 2)
        yield smaller
    if free.checkpointing and not setup.activation_checkpointing:
        yield replace(setup, activation_checkpointing=True)
        if smaller is not setup:
            yield replace(smaller, activation_checkpointing=True)
