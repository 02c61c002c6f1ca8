"""
Hours, energy and money of a whole run: its steps, evaluations and checkpoints, each as a range.

What a host beside its GPUs draws, what it costs to store text, and how long a queue is are not known here.
"""

import re
from dataclasses import dataclass
from typing import Literal

from paceline.errors import PlanError
from paceline.plan.range import Range

FORWARD_SHARE = 1 / 3  # of a step: an evaluation has no backward
DISK_BYTES_PER_S = 500e6  # a SATA drive; the copy goes on beside training, a checkpoint waits for the one before
POWER_SHARE = (0.7, 0.9, 1.0)  # of the board's limit while training: narrow models leave units idle
HOUR_S = 3600.0
PRICE_FORMS = "--price 0.30/kWh or --price 2.50/gpu-hour"
UNITS: dict[str, Literal["kWh", "gpu-hour"]] = {"kwh": "kWh", "gpu-hour": "gpu-hour", "gpuhour": "gpu-hour"}


@dataclass(frozen=True)
class Price:
    amount: float
    unit: Literal["kWh", "gpu-hour"]


@dataclass(frozen=True)
class RunCost:
    """hours: of everything. evaluating and saving: expected parts of it. None: what it would follow from is not known."""

    hours: Range
    evaluating_hours: float
    saving_hours: float
    gpu_hours: Range
    kwh: Range | None
    money: Range | None
    assumptions: tuple[str, ...]


def parse_price(words: str) -> Price:
    """'0.30/kWh' or '2.50/gpu-hour', with or without a currency sign."""
    found = re.fullmatch(r"[^\d.,]*(\d+(?:\.\d+)?|\.\d+)[^\d/]*/([a-z-]+)", words.lower().replace(" ", ""))
    if found is None or found[2] not in UNITS:
        raise PlanError(f"--price {words} does not say what is paid for", fix=PRICE_FORMS)
    return Price(float(found[1]), UNITS[found[2]])


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
    """step: seconds. watts: the limit of one device's power, without which there is no energy. Every 0 steps: at the end."""
    training = step.scaled(num_steps)
    evaluating = FORWARD_SHARE * eval_tokens / total_batch_size * _times(num_steps, eval_every) * step.expected
    saving = saving_seconds(checkpoint_bytes, between_s=save_every * step.expected, saves=_times(num_steps, save_every))
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
        shares = f"{POWER_SHARE[0]:.0%} to {POWER_SHARE[2]:.0%}"
        assumptions.append(f"{shares} of {watts:.0f} W drawn by each device; the rest of the host is not in it")
    if price is not None:
        paid = gpu_hours if price.unit == "gpu-hour" else kwh
        money = None if paid is None else paid.scaled(price.amount)
    return RunCost(hours, evaluating / HOUR_S, saving / HOUR_S, gpu_hours, kwh, money, tuple(assumptions))


def saving_seconds(checkpoint_bytes: int, *, between_s: float, saves: int) -> float:
    """What is waited for: the last one whole, others where the next comes before they are written."""
    once = checkpoint_bytes / DISK_BYTES_PER_S
    return once + max(0, saves - 1) * max(0.0, once - between_s)


def _times(num_steps: int, every: int) -> int:
    """At the end in any case."""
    return -(-num_steps // every) if every else 1
