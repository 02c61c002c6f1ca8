"""
What a run costs, what to train in a given time or budget, and what would make a step faster.

The cost of a run is its steps, evaluations and checkpoints in hours, energy and money, each as a range; what a host draws besides
its GPUs, and what storage costs, is not in it. The advice for a time or a budget is the deepest model whose whole length, by the
rules of plan/shapes.py, still ends in it. A lever is the same step with one thing changed that the trainer can do. A measured step
that is far from the planned one is a finding with its likely cause.
"""

import math
import re
import shlex
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import takewhile
from typing import Any, Literal

from paceline.config import LENGTH_KEYS, Config, ModelConfig, format_flags
from paceline.config_file import PACKAGED, find_config, load_config
from paceline.errors import Change, Finding, PlanError, UsageError
from paceline.options import PlanOptions
from paceline.plan.estimate import Range
from paceline.plan.shapes import num_evaluations
from paceline.plan.sizing import DoesNotFit, fuller_plans
from paceline.plan.step_time import StepSetup, StepTime, step_time
from paceline.units import format_count, format_duration, format_percent, parse_duration

FORWARD_SHARE = 1 / 3  # of a step: an evaluation has no backward
DISK_BYTES_PER_S = 500e6  # a SATA drive; training continues meanwhile, a checkpoint waits for the one before
POWER_SHARE = (0.7, 0.9, 1.0)  # of the board's limit while training: narrow models leave units idle
HOUR_S = 3600.0
DEPTHS = range(1, 129)
LITTLE_LEFT = 0.9  # of a time, that is as good as all

# val_bpb by depth that nanochat reached with this recipe on ClimbMix and its own tokenizer of 32,768: 1.156B tokens at depth 12
# (mlpatron.com, "nanochat d12 baseline"), 8 tokens for each parameter at depth 24 (its LEADERBOARD.md, run 6, a mean of five)
MEASURED_BPB = {12: 0.854, 24: 0.718}
MEASURED_DATA, MEASURED_VOCAB = "climbmix", 32_768
BPB_SPREAD, BPB_SPREAD_BETWEEN = 0.005, 0.015  # at a measured depth; between two
LEAST_GAIN = 0.01  # of a lever that is shown
GAP = 0.20  # between a measured step and the planned one, before it is a finding


@dataclass(frozen=True)
class Price:
    """What is paid for each kWh or each GPU-hour."""

    amount: float
    unit: Literal["kWh", "gpu-hour"]


@dataclass(frozen=True)
class RunCost:
    """What a run takes. hours: of everything; evaluating and saving are expected parts of it. None: not known."""

    hours: Range
    evaluating_hours: float
    saving_hours: float
    gpu_hours: Range
    kwh: Range | None
    money: Range | None
    assumptions: tuple[str, ...]


def parse_price(text: str) -> Price:
    """Reads '0.30/kWh' or '2.50/gpu-hour', with or without a currency sign; raises PlanError for anything else."""
    match = re.fullmatch(r"[^\d.,-]*(\d+(?:\.\d+)?|\.\d+)[^\d/]*/(kwh|gpu-?hour)", text.lower().replace(" ", ""))
    if match is None:
        raise PlanError(
            f"--price {text} does not say what is paid for", fix="--price 0.30/kWh or --price 2.50/gpu-hour"
        )
    return Price(float(match[1]), "kWh" if match[2] == "kwh" else "gpu-hour")


def run_cost(
    step: Range,
    *,
    num_steps: int,
    world_size: int,
    eval_every: int,
    eval_tokens: int,
    save_every: int,
    total_batch_size: int,
    checkpoint_bytes: int,
    watts: float | None = None,
    price: Price | None = None,
) -> RunCost:
    """Returns what a run costs. step: seconds. watts: one device's limit; None: no energy is known. Every 0 steps: at the end."""
    training = step.scaled(num_steps)
    saves = -(-num_steps // save_every) if save_every else 1  # every so many steps, and at the end in any case
    evaluations = num_evaluations(num_steps, eval_every=eval_every)
    evaluating = FORWARD_SHARE * eval_tokens / total_batch_size * evaluations * step.expected
    # training waits for the last checkpoint, and for others if the next comes too soon
    saving = once = checkpoint_bytes / DISK_BYTES_PER_S
    saving += max(0, saves - 1) * max(0.0, once - save_every * step.expected)
    seconds = Range(
        training.low + evaluating * step.low / step.expected,
        training.expected + evaluating + saving,
        training.high + evaluating * step.high / step.expected + 2 * saving,
    )
    hours = seconds.scaled(1 / HOUR_S)
    gpu_hours, kwh, money = hours.scaled(world_size), None, None
    assumptions = [f"checkpoints to a disk of {DISK_BYTES_PER_S / 1e6:.0f} MB/s, written beside training"]
    if watts is not None:
        low, expected, high = (watts / 1000 * share for share in POWER_SHARE)
        kwh = Range(gpu_hours.low * low, gpu_hours.expected * expected, gpu_hours.high * high)
        shares = f"{format_percent(POWER_SHARE[0])} to {format_percent(POWER_SHARE[2])}"
        assumptions.append(f"{shares} of {watts:.0f} W drawn by each device; the rest of the host is not in it")
    if price is not None:
        paid = gpu_hours if price.unit == "gpu-hour" else kwh
        money = None if paid is None else paid.scaled(price.amount)
    return RunCost(hours, evaluating / HOUR_S, saving / HOUR_S, gpu_hours, kwh, money, tuple(assumptions))


@dataclass(frozen=True)
class Advice:
    """A model that ends in time, the deepest that does. seconds: of its whole run. deeper: why not one layer more."""

    setup: StepSetup
    num_steps: int
    seconds: Range
    val_bpb: Range | None
    deeper: str = ""
    tokens_per_param: float | None = None  # of a run that is longer than by the config's, so that it fills the time

    @property
    def depth(self) -> int:
        return self.setup.model.n_layer

    @property
    def length(self) -> Change:
        """Returns the keys of the config that set it."""
        longer = {"tokens_per_param": self.tokens_per_param, "num_steps": None}
        return longer if self.tokens_per_param else {"num_steps": self.num_steps}

    @property
    def num_tokens(self) -> int:
        return self.num_steps * self.setup.total_batch_size

    def facts(self) -> dict[str, Any]:
        """Returns what --json prints of it."""
        bpb = asdict(self.val_bpb) if self.val_bpb else None
        return {"depth": self.depth, "num_tokens": self.num_tokens, "val_bpb": bpb, "deeper": self.deeper}


def advise(
    run_of_depth: Callable[[int], Advice],
    *,
    time_s: float,
    limit: str,
    enough: Callable[[float], str],
    spent: Callable[[float], str],
) -> Advice:
    """Returns the deepest model whose whole run ends in time_s; raises PlanError where none does.

    run_of_depth: returns the run of a depth; raises DoesNotFit. limit: time_s in the user's words. enough: returns the flags that
    allow a run of so many seconds. spent: says what it takes.
    """

    @cache
    def attempt(depth: int) -> Advice | PlanError:
        try:
            return run_of_depth(depth)
        except PlanError as error:
            return error

    def in_time(depth: int) -> Advice | None:
        run = attempt(depth)
        return run if isinstance(run, Advice) and run.seconds.expected <= time_s else None

    def is_short(depth: int) -> bool:
        """Returns whether a deeper model may also end in time."""
        run = attempt(depth)
        return in_time(depth) is not None or (isinstance(run, DoesNotFit) and run.deeper_may_fit)

    # Assumes that each depth needs more and takes longer than the one before, except that the second may be faster than the first.
    # Where a deeper model is faster (few setups of several GPUs), this one or a shallower one that ends in time is the answer.
    power = next((depth for depth in (4, 8, 16, 32, 64) if not in_time(depth)), len(DEPTHS))
    depth = bisect_left(DEPTHS, True, lo=power // 2, hi=power, key=lambda depth: not in_time(depth))
    candidates = [*DEPTHS[:depth], *takewhile(is_short, DEPTHS[depth:])]
    best = next(filter(None, map(in_time, reversed(candidates))), None)
    depth = best.depth + 1 if best else 1
    if depth not in DEPTHS:
        deeper = f"depth {DEPTHS[-1]} is the deepest that is tried"
    elif isinstance(run := attempt(depth), Advice):
        deeper = f"depth {depth} {spent(run.seconds.expected)}"
    elif isinstance(run, DoesNotFit):
        deeper = f"depth {depth} does not fit in memory with these settings"
    else:
        raise run
    if best is not None:
        return replace(best, deeper=deeper)
    runs = [run for run in map(attempt, DEPTHS[: len(candidates) + 1]) if isinstance(run, Advice)]
    if not runs:
        raise PlanError(f"no model fits: {deeper}", fix="--sequence-len or --vocab-size smaller, or another card")
    shortest = min(run.seconds.expected for run in runs)
    raise PlanError(f"{limit} is too little for a model of any depth", fix=f"{enough(shortest)} allows the smallest")


def longer_run(
    advice: Advice, run_of_depth: Callable[..., Advice], config: Config, *, time_s: float, budget: float | None
) -> tuple[str, Advice]:
    """Returns a line with what uses the time that the advice leaves, and the advice that does; no line where it leaves little.

    Where memory ends first, the line has the flags with which a deeper model fits; else the tokens_per_param. budget: the money
    that time_s costs; None where the time is the limit.
    """
    used = advice.seconds.expected / time_s
    if used > LITTLE_LEFT:
        return "", advice

    def fits(depth: int, **keys: Any) -> Advice | None:
        with suppress(PlanError):
            run = run_of_depth(depth, **keys)
            return run if run.seconds.expected <= time_s else None
        return None

    left = f"{budget * (1 - used):,.2f} of {budget:g}" if budget else format_duration(time_s - advice.seconds.expected)
    remain = f"        at {config.tokens_per_param:g} tokens per parameter {left} remain, as"
    memory_ends, deeper = "does not fit" in advice.deeper, advice.depth + 1
    changes = fuller_plans(config, advice.setup.device, advice.setup.precision) if memory_ends else ()
    if flags := [format_flags(change) for change in changes if fits(deeper, **change)]:
        return f"{remain} memory ends first: depth {deeper} fits with {' or with '.join(flags)}", advice
    more = math.floor(10 * config.tokens_per_param / used) / 10
    if not (longer := fits(advice.depth, tokens_per_param=more)):
        return "", advice
    why = "memory ends first" if memory_ends else "depths come in steps of width"
    cost = f"{budget * longer.seconds.expected / time_s:,.2f} in " if budget else ""
    trains = f"trains depth {advice.depth} for {cost}{format_duration(longer.seconds.expected)}"
    line = f"{remain} {why}: --tokens-per-param {more:g} {trains}"
    return line, replace(longer, deeper=advice.deeper, tokens_per_param=more)


def train_command(config: Config, file: str | None) -> str | None:
    """Returns the command that trains this config: the flags in which it differs from the file, without one from balanced.

    None without a file where the working folder has something else of that name, and for hosts without names.
    """
    name = file or "balanced"  # without CONFIG, `train` begins with tiny, and every key of tiny would be a flag
    path = find_config(name)
    if (file is None and path.parent != PACKAGED) or (config.hosts or "").isdecimal():
        return None
    usual, _ = load_config(path, {})
    change = {key: value for key, value in asdict(config).items() if key == "depth" or value != getattr(usual, key)}
    change = {key: value for key, value in change.items() if key not in LENGTH_KEYS or value is not None}
    return f"paceline train {shlex.quote(name)} {format_flags(change)}"


def format_advice(advice: Advice, *, limit: str, more: Iterable[str], command: str | None) -> str:
    """Returns the lines about the depth for a time or a budget. limit: either in the user's words. more: other lines, or empty."""
    bpb = advice.val_bpb
    return (
        f"advice  depth {advice.depth} for {format_count(advice.num_tokens)} tokens is the most that"
        f" {limit} allows; {advice.deeper}\n"
        f"        val_bpb {f'{bpb.low:.3f} to {bpb.high:.3f}' if bpb else 'n/a: not measured on this text'}"
        + "".join(f"\n{line}" for line in more if line)
        + (f"\nnext    {command}" if command else "")
    )


def expected_bpb(model: ModelConfig, *, data: str, val_data: str | None) -> Range | None:
    """Returns val_bpb at the end; None for other text, another vocabulary, and beyond the measured depths."""
    low, high = MEASURED_BPB
    is_measured = all(MEASURED_DATA in source.lower() for source in (data, val_data or data))
    if not is_measured or model.vocab_size != MEASURED_VOCAB or not low <= model.n_layer <= high:
        return None
    share = (model.n_layer - low) / (high - low)
    expected = (1 - share) * MEASURED_BPB[low] + share * MEASURED_BPB[high]
    spread = BPB_SPREAD if model.n_layer in MEASURED_BPB else BPB_SPREAD_BETWEEN
    return Range(expected - spread, expected, expected + spread)


def limits_of(options: PlanOptions, price: Price | None, setup: StepSetup) -> dict[str, float]:
    """Returns the seconds that may be spent: those of --time, and those that --budget pays for."""
    limits = {}
    if options.time is not None:
        try:
            limits["time"] = parse_duration(options.time)
        except ValueError:
            raise UsageError(f"--time {options.time}: not a time", fix="--time 12h, 90m or 1d12h") from None
    if options.budget is not None:
        if price is None:
            raise UsageError("--budget needs a price", fix=f"--budget {options.budget} --price 2.50/gpu-hour")
        watts = options.watts or (setup.spec.watts if setup.spec else None)
        limits["budget"] = time_of_budget(options.budget, price=price, num_gpus=setup.world_size, watts=watts)
    return limits


def limit_text(options: PlanOptions) -> str:
    limits = [options.time, f"a budget of {options.budget:g}" if options.budget else None]
    return " and ".join(limit for limit in limits if limit)


def flags_of_time(seconds: float, *, options: PlanOptions, limits: dict[str, float]) -> str:
    """Returns the flags that allow a run of so many seconds, where those of the options do not. limits: of limits_of."""
    flags = []
    if seconds > limits.get("time", math.inf):
        unit = 1 if seconds < 60 else 60
        flags.append(f"--time {format_duration(unit * math.ceil(seconds / unit))}")
    if options.budget is not None and seconds > limits["budget"]:
        flags.append(f"--budget {math.ceil(100 * options.budget * seconds / limits['budget']) / 100:g}")
    return " ".join(flags)


def format_spent(seconds: float, *, options: PlanOptions, limits: dict[str, float]) -> str:
    """takes 6h53m; of a budget: costs 13.77 and takes 6h53m"""
    costs = options.budget and f"costs {options.budget * seconds / limits['budget']:,.2f} and "
    return f"{costs or ''}takes {format_duration(seconds)}"


def time_of_budget(budget: float, *, price: Price, num_gpus: int, watts: float | None) -> float:
    """Returns the seconds that a budget pays for. watts: of one GPU at its limit, needed for a price per kWh."""
    if price.unit == "gpu-hour":
        per_hour = num_gpus * price.amount
    elif watts is None:
        raise PlanError("a price per kWh needs the power of one device", fix="--watts 450, or --price 2.50/gpu-hour")
    else:
        per_hour = num_gpus * watts / 1000 * POWER_SHARE[1] * price.amount
    return budget / per_hour * HOUR_S


@dataclass(frozen=True)
class Lever:
    """A change that makes the step faster. gain: tokens/s more, relative to now."""

    what: str
    gain: float


def levers(setup: StepSetup, others: Iterable[tuple[str, StepSetup]] = ()) -> tuple[Lever, ...]:
    """Returns the changes that help, the largest gain first. others: flags and the setups that were planned with them."""
    before = step_time(setup)
    if before.tok_per_sec is None:
        return ()
    options = []
    for what, changed_setup in (*others, *_changes(setup)):
        after = step_time(changed_setup)
        if after.tok_per_sec is not None:
            options.append(Lever(what, after.tok_per_sec.expected / before.tok_per_sec.expected - 1))
    return tuple(sorted((lever for lever in options if lever.gain >= LEAST_GAIN), key=lambda lever: -lever.gain))


def _changes(setup: StepSetup) -> Iterator[tuple[str, StepSetup]]:
    """Yields what leaves the sizes of the step as they are."""
    if setup.low_precision is not None:
        yield "--precision auto", replace(setup, low_precision=None)
    if not setup.compiled and setup.device == "cuda":
        yield "--compile", replace(setup, compile=True)


def step_gap(setup: StepSetup, planned: StepTime, measured_s: float) -> Finding | None:
    """Returns a finding after the first steps of a run; None where the plan was near enough or had no figure."""
    if planned.seconds is None:
        return None
    gap = measured_s / planned.seconds.expected - 1
    if abs(gap) <= GAP:
        return None
    planned_ms, measured_ms = 1000 * planned.seconds.expected, 1000 * measured_s
    what = f"a step takes {measured_ms:,.0f} ms, {planned_ms:,.0f} were planned ({100 * gap:+.0f} %)"
    evidence = {"measured_s": measured_s, "planned_s": planned.seconds.expected, "limit": planned.limit}
    if gap < 0:
        why = "the plan stood on figures that are too low for this device"
        return Finding("step-faster-than-planned", "note", what, why, "nothing: the next plan here knows it", evidence)
    why, fix = _cause(setup, planned, extra_s=measured_s - planned.seconds.expected)
    return Finding("step-slower-than-planned", "warn", what, why, fix, evidence)


def _cause(setup: StepSetup, planned: StepTime, *, extra_s: float) -> tuple[str, str]:
    """Returns the likely cause, and how to check it: a step's length alone proves none."""
    sending = planned.hidden_s + planned.parts.get("gradients sent", 0.0) + planned.parts.get("weights sent", 0.0)
    if setup.device == "cpu":
        why = "likely other processes on these cores: the plan counts on all of them"
        return why, "look at top; then paceline plan --measure"
    if setup.world_size > 1 and extra_s < 4 * sending and sending > 0.05 * extra_s and planned.limit != "host":
        name, rate = "the link", "planned"
        if setup.link is not None:
            name, rate = setup.link.name, f"the planned {setup.link.bytes_per_s / 1e9:.3g} GB/s"
        why = f"likely the link: {name} slower than {rate}, or nothing hidden under the backward"
        return why, f"paceline comm --nproc {setup.world_size} measures it"
    if planned.limit == "host":
        return "likely the host: it prepares ops slower than planned", "--compile, or a larger --device-batch-size"
    if not setup.compiled:
        return "likely ops that are not fused: the model runs eager", "--compile"
    why = "likely the cards run below their clock (power limit, heat), or others use them"
    return why, "nvidia-smi -q -d PERFORMANCE,POWER while it trains"
