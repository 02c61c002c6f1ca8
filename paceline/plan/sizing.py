"""
What fits, and of that the fastest: micro-batch, loss chunks and activation checkpointing; or which changes would make it fit, or
would use more of the memory.

total_batch_size, the rows of a step and the learning rates stay: only the part of a step that is in memory at a time is chosen.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from functools import cache, partial
from typing import Any

from paceline.config import Config
from paceline.errors import Change, PlanError
from paceline.plan.activations import MemorySetup
from paceline.plan.estimate import Calibrate, MemoryEstimate, estimate_memory, named_parts
from paceline.plan.machine import Machine
from paceline.plan.shapes import NARROW, RUNGS, model_of_depth, num_params
from paceline.units import MIB, format_bytes, format_number_of, format_percent

PROFILES = {"conservative": 0.48, "balanced": 0.65, "aggressive": 0.90}  # of the device's memory
FULLEST_PROFILE = "aggressive"
SMALLEST_LOGITS_MIB = 32
CPU_MICRO_STEP_TOKENS = 2_048  # of an automatic device_batch_size: a larger one is no faster on a CPU
BLIND_MICRO_STEP_TOKENS = 32_768  # the same on a GPU whose memory is not known
DEPTHS_TRIED = 8  # for a fix: heads or an automatic batch may rule a depth out
SIZE_KEYS = ("device_batch_size", "logits_mib", "activation_checkpointing")
SMALL_VOCAB_SIZE = 4096  # the last that a fix proposes
# of a host's memory for what is offloaded and a checkpoint's copies: the system and the processes need some
HOST_SHARE = 0.9

Estimate = Callable[[MemorySetup], MemoryEstimate]
# device name, setup, its bytes -> whether it failed here before
TooLarge = Callable[[str, MemorySetup, int | None], bool]


@dataclass(frozen=True)
class Measured:
    """What is known of the machine; by default nothing.

    calibrate: what was measured of such models. too_large: whether a size ran out of memory. step_seconds: the expected time of a
    step, by which the fastest of the setups that fit is chosen; None where it is not known.
    """

    calibrate: Calibrate = lambda *_: None
    too_large: TooLarge = lambda *_: False
    step_seconds: Callable[[Machine, MemorySetup, bool | None], float | None] = lambda *_: None


NOTHING_MEASURED = Measured()


class DoesNotFit(PlanError):
    """Nothing that the config leaves open fits. estimate: what the smallest setup needs.

    deeper_may_fit: it fits in a larger share of memory. A model that does not has its weights sharded, and may fit in this one.
    """

    def __init__(
        self, message: str, *, estimate: MemoryEstimate, changes: Iterator[Change], deeper_may_fit: bool = False
    ):
        super().__init__(message, fix="a device with more memory, or a smaller model", changes=changes)
        self.estimate = estimate
        self.deeper_may_fit = deeper_may_fit


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
    step_seconds: Callable[[MemorySetup], float | None]

    def fit(self, setup: MemorySetup, budget_bytes: float | None) -> MemorySetup | None:
        """Returns the fastest setup within budget_bytes; None if nothing fits.

        Where no time is known, the largest micro-batch of the first relaxation with which one fits. budget_bytes None: the device's
        memory is not known, and the micro-batch is most_rows at most. A setup that is relaxed further takes longer,
        unless that makes room for more rows.
        """
        best, least_s = None, 0.0
        fitting: list[MemorySetup] = []
        for relaxed in self.relaxations(setup) if self.can_fit(setup, budget_bytes) else ():
            less_relaxed = (other for other in fitting if other.logits_budget_bytes >= relaxed.logits_budget_bytes)
            above = max((other.device_batch_size for other in less_relaxed), default=0)
            candidate = self.largest(relaxed, budget_bytes, above=above)
            if candidate is None:
                continue
            fitting.append(candidate)
            seconds = self.step_seconds(candidate)
            if seconds is None:
                return candidate
            if best is None or seconds < least_s:
                best, least_s = candidate, seconds
        return best

    def can_fit(self, setup: MemorySetup, budget_bytes: float | None) -> bool:
        """Returns whether anything fits: what needs least does."""
        *_, least = self.relaxations(setup)
        return self.largest(least, budget_bytes) is not None

    def largest(self, setup: MemorySetup, budget_bytes: float | None, *, above: int = 0) -> MemorySetup | None:
        """Returns the setup with the largest micro-batch that fits, of more than `above` rows: the more rows, the faster a step.

        All rows in one micro-step may need less than fewer rows, since no gradients are summed. Otherwise more rows need more.
        """
        counts = divisors(self.share_rows) if self.rows else [setup.device_batch_size]
        if self.rows and self.most_rows is not None:
            counts = [count for count in counts if count <= self.most_rows]
        counts = [count for count in counts if count > above]
        if not counts:
            return None
        candidates = [self.with_rows(setup, count) for count in counts]
        if self.fits(candidates[0], budget_bytes):
            return candidates[0]
        if not self.fits(candidates[-1], budget_bytes):
            return None
        return candidates[bisect_left(candidates, True, lo=1, key=lambda candidate: self.fits(candidate, budget_bytes))]

    def fits(self, setup: MemorySetup, budget_bytes: float | None) -> bool:
        """Returns whether the expected bytes are within the budget, and the most within the device, and it never failed here."""
        if budget_bytes is not None:
            if NARROW * num_params(setup.model) > setup.world_size * budget_bytes:
                return False  # by the gradients alone: an estimate of very deep models takes long
            estimate = self.estimate(setup)
            within = estimate.card_bytes is None or estimate.process.high <= estimate.card_bytes
            if estimate.process.expected > budget_bytes or not within:
                return False
        return not self.too_large(setup)

    def relaxations(self, setup: MemorySetup) -> Iterator[MemorySetup]:
        """Yields the setup, then smaller loss chunks, then each rung of checkpointing with all of them; the last needs least."""
        first = RUNGS.index(setup.activation_checkpointing)
        for rung in RUNGS[first:] if self.checkpointing else RUNGS[first : first + 1]:
            relaxed = replace(setup, activation_checkpointing=rung)
            yield relaxed
            while self.logits and relaxed.logits_budget_bytes // 2 >= SMALLEST_LOGITS_MIB * MIB:
                relaxed = replace(relaxed, logits_budget_bytes=relaxed.logits_budget_bytes // 2)
                yield relaxed

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
    config: Config, setup: MemorySetup, machine: Machine, *, measured: Measured, compile: bool | None
) -> SizedSetup:
    """Returns the setup, sized to the machine's memory; raises DoesNotFit with the changes that may help.

    setup: as the config has it. compile: the plan's. One device's rows of a step, over all micro-steps, stay as many.
    """
    gpu = machine.gpus[0] if setup.device == "cuda" else None
    device_name = gpu.name if gpu else "CPU"
    card_bytes = gpu.memory_bytes if gpu else machine.memory_bytes // (setup.world_size // machine.hosts)

    @cache
    def estimate(candidate: MemorySetup) -> MemoryEstimate:
        consumer = gpu.spec.consumer if gpu and gpu.spec else None
        calibration = measured.calibrate(device_name, candidate)
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
        too_large=lambda candidate: rows_are_open and measured.too_large(device_name, candidate, card_bytes or None),
        step_seconds=lambda candidate: measured.step_seconds(machine, candidate, compile),
    )
    budget = ceiling(share, card_bytes) if card_bytes else None
    fitting = solver.fit(setup, budget)
    if fitting is None and config.shard is None and setup.world_size > 1:
        assert card_bytes is not None
        # a larger share is faster than weights that are sent in every micro-step, and the user's to choose
        if not solver.can_fit(setup, ceiling(max(share, PROFILES["aggressive"]), card_bytes)):
            setup = replace(setup, shard="full")
            fitting = solver.fit(setup, budget)
    if fitting is None:
        raise does_not_fit(config, setup, solver, share=share)
    check_host_memory(estimate(fitting), machine, ranks=setup.world_size // machine.hosts)
    notes = tuple(fit_notes(config, setup, fitting))
    return SizedSetup(fitting, estimate(fitting), share if rows_are_open else None, notes)


def fit_notes(config: Config, setup: MemorySetup, fitting: MemorySetup) -> Iterator[str]:
    """Yields what was chosen to fit, which the user pays with time, and what has no effect."""
    rows = f"so that {format_number_of(fitting.device_batch_size, 'row fits', 'rows fit')}"
    if fitting.shard != (config.shard or "optimizer"):
        yield f"weights and gradients sharded too, {rows}: they are sent in every micro-step (shard full)"
    if fitting.logits_budget_bytes != setup.logits_budget_bytes:
        yield f"loss in chunks of {format_bytes(fitting.logits_budget_bytes)}, {rows}"
    if fitting.activation_checkpointing and not setup.activation_checkpointing:
        repeats = {"relu": "MLPs' ReLU^2 is", "mlp": "MLPs are", True: "blocks are"}
        yield f"activation checkpointing, {rows}: {repeats[fitting.activation_checkpointing]} computed twice"
    if config.device_batch_size is not None and config.memory_share is not None:
        yield f"device_batch_size is set to {config.device_batch_size}, so memory_share chooses nothing"


def check_host_memory(needs: MemoryEstimate, machine: Machine, *, ranks: int) -> None:
    """Raises PlanError where the ranks of a host cannot offload as much as they are to. Memory 0 of a host: not known."""
    if not needs.offloaded_bytes or not machine.memory_bytes:
        return
    need, allowed = ranks * (needs.offloaded_bytes + needs.copies_bytes), HOST_SHARE * machine.memory_bytes
    if need > allowed:
        raise PlanError(
            f"{format_bytes(need)} of each host's memory needed to offload the optimizer of"
            f" {format_number_of(ranks, 'rank')} (masters and states {format_bytes(ranks * needs.offloaded_bytes)},"
            f" copies of a checkpoint {format_bytes(ranks * needs.copies_bytes)}),"
            f" {format_percent(HOST_SHARE)} of {format_bytes(machine.memory_bytes)} may be used",
            fix="--offload none",
            changes=({"offload": "none"}, {"optimizer_states": "8bit"}),
        )


def ceiling(share: float, card_bytes: int) -> float:
    """Returns the bytes that a share of a device allows. Shares are whole per cent: 90.4 % is shown as 90 %, and is within 90 %."""
    return min(1.0, share + 0.005) * card_bytes


def does_not_fit(config: Config, setup: MemorySetup, solver: Solver, *, share: float) -> DoesNotFit:
    """Returns the error where nothing fits, with what the smallest setup needs."""
    least = list(solver.relaxations(setup))[-1]
    least = solver.with_rows(least, 1) if solver.rows else least
    needs = solver.estimate(least)
    assert needs.card_bytes is not None
    on_gpu = setup.device == "cuda"
    named = named_parts(needs.to_json()["parts"], needs.process.expected, on_gpu=on_gpu)
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in named)
    allowed = f"{format_percent(share)} of its " if share < 1 else ""
    device = "GPU" if on_gpu else "process"
    low, need, high = (format_bytes(size) for size in astuple(needs.process))
    needed = f"{need} ({low} to {high})"
    if needs.process.expected <= ceiling(share, needs.card_bytes) and needs.process.high > needs.card_bytes:
        needed, allowed = f"up to {high} ({need} expected)", ""  # the device itself is too small for the most
    failed = "; it ran out of memory here before" if solver.too_large(least) else ""
    return DoesNotFit(
        f"{needed} needed on each {device} with device_batch_size {least.device_batch_size},"
        f" {allowed}{format_bytes(needs.card_bytes)} may be used ({parts}){failed}",
        estimate=needs,
        changes=changes_that_fit(config, setup, solver, share=share),
        deeper_may_fit=config.shard is None and setup.world_size > 1 and setup.shard != "full",
    )


def changes_that_fit(config: Config, setup: MemorySetup, solver: Solver, *, share: float) -> Iterator[Change]:
    """Yields changes of the config that probably fit: first those that keep the run the same, then those of the model."""
    card = solver.estimate(setup).card_bytes
    assert card is not None
    everything = replace(solver, rows=True, logits=True, checkpointing=True)
    opened = opened_sizes(config)

    def to_fit(solver: Solver, setup: MemorySetup, budget_bytes: float) -> dict[str, Any] | None:
        """Returns the values of the fit for keys that the user has set; the others are chosen again."""
        if (fitting := solver.fit(setup, budget_bytes)) is None:
            return None
        values = {
            "device_batch_size": fitting.device_batch_size,
            "logits_mib": fitting.logits_budget_bytes // MIB,
            "activation_checkpointing": fitting.activation_checkpointing,
        }
        return {key: value for key, value in values.items() if getattr(config, key) not in (None, value)}

    if not solver.rows and (change := to_fit(replace(solver, rows=True), setup, card)):
        yield change
    for name, other in PROFILES.items() if solver.rows else ():
        if other > share and solver.can_fit(setup, ceiling(other, card)):
            yield {"profile": name} if config.memory_share is None else {"memory_share": other}
    budget = ceiling(share, card)
    if change := to_fit(everything, setup, budget):
        yield change
    if config.shard == "optimizer" and setup.world_size > 1:
        full = replace(setup, shard="full")
        if solver.can_fit(full, budget):
            yield {"shard": "full"}
        if change := to_fit(everything, full, budget):
            yield {"shard": "full", **change}
    yield from optimizer_changes(setup, budget, solver=solver, to_fit=partial(to_fit, everything))
    if setup.device == "cpu" and setup.world_size > 1:  # which share the host's memory
        yield {"nproc": 1}
        yield {"nproc": 1, **opened}

    def at_depth(depth: int) -> MemorySetup:
        model = replace(setup.model, n_layer=depth)
        if config.n_embd is None:  # the width follows from the depth
            model = model_of_depth(model, depth)
            model = replace(model, n_kv_head=config.n_kv_head or model.n_head)
        return replace(setup, model=model)

    depths = range(setup.model.n_layer - 1, 0, -1)
    at = bisect_left(depths, True, key=lambda depth: everything.can_fit(at_depth(depth), budget))
    for depth in depths[at : at + DEPTHS_TRIED]:
        yield {"depth": depth, **(to_fit(everything, at_depth(depth), budget) or {})}
    smallest = {"depth": 1, **opened}
    for shorter in (setup.model.sequence_len // divisor for divisor in (2, 4, 8, 16, 32)):
        yield {"sequence_len": max(2, shorter), **smallest}
    if config.tokenizer is None:
        yield {"vocab_size": SMALL_VOCAB_SIZE, "sequence_len": 256, **smallest}


def opened_sizes(config: Config) -> Change:
    """Returns the change that leaves to the planner what the user has set of the micro-batch."""
    return {key: None for key in SIZE_KEYS if getattr(config, key) is not None}


def fuller_plans(config: Config, device: str, precision: str) -> Iterator[Change]:
    """Yields the changes that leave the micro-batch to the planner, up to the fullest profile.

    And those of the optimizer's states: the other place, and the other precision; and fp16 on a GPU without bf16.
    """
    if device == "cuda" and precision == "fp32" and config.precision is None:
        yield {"precision": "fp16"}
    opened = opened_sizes(config)
    if opened:
        yield opened
    if config.memory_share is not None:
        yield {**opened, "memory_share": PROFILES[FULLEST_PROFILE]}
    elif config.profile != FULLEST_PROFILE:
        yield {**opened, "profile": FULLEST_PROFILE}
    if config.shard != "none":  # what has left the GPU makes room for rows, but takes time
        yield {"offload": "none" if config.offload == "optimizer" else "optimizer"}
    yield {"optimizer_states": "fp32" if config.optimizer_states == "8bit" else "8bit"}


def optimizer_changes(
    setup: MemorySetup,
    budget_bytes: float,
    *,
    solver: Solver,
    to_fit: Callable[[MemorySetup, float], dict[str, Any] | None],
) -> Iterator[Change]:
    """Yields the changes that move the optimizer's states to the host or make them smaller, which no plan does by itself.

    Offloading comes first, since it keeps the bits of every step, though each then waits for the host's link; codes of 8 bits take
    less time and round.
    """
    options: list[dict[str, Any]] = []
    if setup.device != "cpu" and setup.shard != "none" and setup.offload == "none":
        options.append({"offload": "optimizer"})
    if setup.optimizer_states == "fp32":
        options.append({"optimizer_states": "8bit"})
    if len(options) > 1:
        options.append({key: value for option in options for key, value in option.items()})
    for option in options:
        changed = replace(setup, **option)
        if solver.can_fit(changed, budget_bytes):
            yield option
        if change := to_fit(changed, budget_bytes):
            yield {**option, **change}


def divisors(number: int) -> list[int]:
    """Returns all divisors, from the largest down."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)}, reverse=True)
