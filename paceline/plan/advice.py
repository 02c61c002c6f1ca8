"""
What to train in a given time or for a given budget: the deepest model whose whole length, by the scaling rules, still ends in it.

Depth sets width, batch and length (plan/scaling.py); what fits in memory is asked of the caller.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from paceline.config import ModelConfig
from paceline.errors import PlanError
from paceline.plan.range import Range
from paceline.plan.run_cost import HOUR_S, POWER_SHARE, Price
from paceline.plan.scaling import batch_of_horizon, horizon_tokens, width_of_depth
from paceline.plan.step_time import StepSetup, StepTime, step_time
from paceline.units import format_duration

DEPTHS = range(1, 129)

# val_bpb by depth that nanochat reached with this recipe on ClimbMix and its own tokenizer of 32,768: 1.156B tokens at depth 12
# (mlpatron.com, "nanochat d12 baseline"), 8 tokens for each parameter at depth 24 (its LEADERBOARD.md, run 6, a mean of five)
MEASURED_BPB = {12: 0.854, 24: 0.718}
MEASURED_DATA, MEASURED_VOCAB = "climbmix", 32_768
BPB_SPREAD, BPB_SPREAD_BETWEEN = 0.005, 0.015  # at a measured depth; between two


@dataclass(frozen=True)
class Fit:
    """How a model fits the device's memory."""

    device_batch_size: int
    activation_checkpointing: bool = False


@dataclass(frozen=True)
class Advice:
    """seconds of the steps alone. deeper: why not one layer more."""

    depth: int
    setup: StepSetup
    num_steps: int
    num_tokens: int
    step: StepTime
    seconds: Range
    val_bpb: Range | None
    deeper: str


def advise(
    template: StepSetup,
    *,
    time_s: float,
    tokens_per_param: float,
    data: str,
    fits: Callable[[ModelConfig], Fit | None],
    head_dim: int = 128,
    total_batch_size: int | None = None,
) -> Advice:
    """template: the devices and how they are used; its model gives vocabulary, row length and window pattern."""
    best: Advice | None = None
    shortest: float | None = None
    deeper = f"depth {DEPTHS[-1]} is the deepest that is tried"
    for depth in DEPTHS:
        model = model_of_depth(template.model, depth, head_dim=head_dim)
        fit = fits(model)
        if fit is None:
            deeper = f"depth {depth} does not fit in memory"
            break
        made = _make(template, model, fit, tokens_per_param=tokens_per_param, data=data, total=total_batch_size)
        if made is None:
            raise PlanError(
                step_time(template).assumptions[0], fix="--gpu NAME of a known card, or measure this device"
            )
        shortest = made.seconds.expected if shortest is None else min(shortest, made.seconds.expected)
        if made.seconds.expected > time_s:
            deeper = f"depth {depth} takes {format_duration(made.seconds.expected)}"
            if best is not None or depth > 2:
                break
            continue
        best = made
    if best is None:
        what = f"{format_duration(time_s)} is too short for a model of any depth"
        if shortest is None:
            raise PlanError(f"no model fits: {deeper}", fix="--sequence-len or --vocab-size smaller, or another card")
        raise PlanError(what, fix=f"--time {format_duration(-(-shortest // 60) * 60)} is enough for the smallest")
    return replace(best, deeper=deeper)


def model_of_depth(model: ModelConfig, depth: int, *, head_dim: int) -> ModelConfig:
    width = width_of_depth(depth, head_dim=head_dim)
    heads = width // head_dim
    return replace(model, n_layer=depth, n_embd=width, n_head=heads, n_kv_head=heads, head_dim=head_dim)


def _make(
    template: StepSetup, model: ModelConfig, fit: Fit, *, tokens_per_param: float, data: str, total: int | None
) -> Advice | None:
    horizon = horizon_tokens(model, tokens_per_param=tokens_per_param)
    unit = fit.device_batch_size * model.sequence_len * template.world_size
    accum = max(1, round((total or batch_of_horizon(model, tokens_per_param=tokens_per_param)) / unit))
    setup = replace(
        template,
        model=model,
        device_batch_size=fit.device_batch_size,
        grad_accum_steps=accum,
        activation_checkpointing=fit.activation_checkpointing,
    )
    step = step_time(setup)
    if step.seconds is None:
        return None
    num_steps = max(1, round(horizon / setup.total_batch_size))
    bpb = expected_bpb(model, data=data)
    tokens = num_steps * setup.total_batch_size
    return Advice(model.n_layer, setup, num_steps, tokens, step, step.seconds.scaled(num_steps), bpb, deeper="")


def expected_bpb(model: ModelConfig, *, data: str) -> Range | None:
    """None for other text, another vocabulary, and beyond the measured depths: bits per byte do not carry over."""
    depths = sorted(MEASURED_BPB)
    if MEASURED_DATA not in data.lower() or model.vocab_size != MEASURED_VOCAB:
        return None
    if not depths[0] <= model.n_layer <= depths[-1]:
        return None
    low, high = depths
    share = (model.n_layer - low) / (high - low)
    expected = (1 - share) * MEASURED_BPB[low] + share * MEASURED_BPB[high]
    spread = BPB_SPREAD if model.n_layer in MEASURED_BPB else BPB_SPREAD_BETWEEN
    return Range(expected - spread, expected, expected + spread)


def time_of_budget(budget: float, *, price: Price, num_gpus: int, watts: float | None) -> float:
    """Seconds that the budget pays for. watts: of one GPU at its limit, needed for a price per kWh."""
    if price.unit == "gpu-hour":
        per_hour = num_gpus * price.amount
    elif watts is None:
        raise PlanError("a price per kWh needs the power of one device", fix="--watts 450, or --price 2.50/gpu-hour")
    else:
        per_hour = num_gpus * watts / 1000 * POWER_SHARE[1] * price.amount
    return budget / per_hour * HOUR_S
