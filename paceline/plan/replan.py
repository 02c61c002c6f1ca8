"""
A plan made again: for a run that is resumed, for one that ran out of memory, and for one that lost devices.

Pure arithmetic, like plan/planner.py, whose choices of the first plan are kept.
"""

from collections.abc import Callable, Set
from contextlib import suppress
from dataclasses import replace
from typing import Any

from paceline.config import Config
from paceline.errors import PlanError
from paceline.plan.machine import Machine
from paceline.plan.planner import Plan, choose_device, choose_world_size, memory_setup
from paceline.plan.precision import precision_name
from paceline.plan.shapes import RUNGS
from paceline.plan.sizing import DoesNotFit, divisors
from paceline.units import MIB, format_number_of

# a user who sets one of these on resume wants another fit
FIT_KEYS = frozenset({"profile", "memory_share", "precision"})

MakePlan = Callable[[Config, Machine], Plan]


def replan(old: Plan, config: Config, machine: Machine, *, make: MakePlan, set_keys: Set[str] = frozenset()) -> Plan:
    """Returns what `make` does, with rows, chunks, checkpointing, sharding and compiling of `old` where the config has none.

    These decide the order of additions, and with it every bit that follows: what was measured here since then must not change them
    under a run that was interrupted. set_keys: keys that the user sets on resume, "auto" among their values. On other devices, or
    another number of them, nothing is kept. What has run on this device is not refused by arithmetic.
    """
    device = choose_device(config, machine)
    world_size = choose_world_size(config, machine, device=device)
    check_shares(old, config, world_size=world_size, hosts=machine.hosts)
    same = (device, world_size) == (old.device, old.world_size)
    rows_are_open = "device_batch_size" in set_keys and config.device_batch_size is None
    if not same or rows_are_open or set_keys & FIT_KEYS:
        return make(config, machine)
    values: dict[str, Any] = {
        "device_batch_size": old.device_batch_size,
        "logits_mib": old.logits_budget_bytes // MIB,
        "activation_checkpointing": old.activation_checkpointing,
        "shard": old.shard,
        "compile": old.compile,
    }
    old_values = {key: value for key, value in values.items() if getattr(config, key) is None and key not in set_keys}
    plan = replace(_make_unrefused(old, replace(config, **old_values), machine, make), onednn=old.onednn)
    if config.attention is None and "attention" not in set_keys and old.attention is not None:
        plan = replace(plan, attention=old.attention, attention_kernel=old.attention_kernel)
    if plan.low_precision == old.low_precision:
        plan = replace(plan, product_gains=old.product_gains)
    if "compile" in old_values:
        plan = replace(plan, compile=old.compile)  # a trial's answer holds for the whole run
    if "device_batch_size" in old_values:
        plan = replace(plan, memory_share=old.memory_share, notes=old.notes)
    return plan


def check_shares(old: Plan, config: Config, *, world_size: int, hosts: int) -> None:
    """Raises PlanError where the ranks cannot share the rows of a step, whose number a run keeps."""
    rows = old.total_batch_size // old.model.sequence_len
    counts = [count for count in range(world_size // hosts, 0, -1) if rows % (count * hosts) == 0]
    if rows % world_size:
        text = format_number_of(world_size, "process", "processes")
        fix = f"--nproc {counts[0]}" if counts else "fewer hosts"
    elif (micro_rows := config.device_batch_size) and rows // world_size % micro_rows:
        text = f"micro-batches of {format_number_of(micro_rows, 'row')} on {format_number_of(world_size, 'process', 'processes')}"
        fix = f"--device-batch-size {next(count for count in divisors(rows // world_size) if count < micro_rows)}"
    else:
        return
    raise PlanError(f"{text} cannot share the {rows} rows of each step evenly, which a run keeps", fix=fix)


def smaller_plan(old: Plan, config: Config, machine: Machine, *, make: MakePlan) -> Plan | None:
    """Returns the next plan that needs less memory for the same steps.

    That is a smaller micro-batch, then activation checkpointing, then sharded weights.
    """
    share_rows = old.device_batch_size * old.grad_accum_steps
    fewer = [count for count in divisors(share_rows) if count < old.device_batch_size]
    changes: list[dict[str, Any]] = [{"device_batch_size": count} for count in fewer]
    if config.activation_checkpointing is None:
        rungs = RUNGS[RUNGS.index(old.activation_checkpointing) + 1 :]
        changes += [{"device_batch_size": old.device_batch_size, "activation_checkpointing": rung} for rung in rungs]
    if old.shard == "optimizer" and old.world_size > 1 and config.shard is None:
        changes.append({"device_batch_size": old.device_batch_size, "shard": "full"})
    for change in changes:
        with suppress(DoesNotFit):
            return replan(old, replace(config, **change), machine, make=make, set_keys=frozenset(change))
    return None


def format_change(old: Plan, new: Plan) -> str:
    """Returns `device_batch_size 4 instead of 8, 6 micro-steps instead of 3`."""
    parts = []
    if new.device_batch_size != old.device_batch_size:
        parts.append(f"device_batch_size {new.device_batch_size} instead of {old.device_batch_size}")
    if new.grad_accum_steps != old.grad_accum_steps:
        parts.append(f"{new.grad_accum_steps} micro-steps instead of {old.grad_accum_steps}")
    if new.activation_checkpointing and new.activation_checkpointing != old.activation_checkpointing:
        rung = "" if new.activation_checkpointing is True else f" ({new.activation_checkpointing})"
        parts.append(f"activation checkpointing{rung}")
    if new.shard != old.shard:
        parts.append(f"shard {new.shard}")
    return ", ".join(parts)


def changes_on_resume(old: Plan, new: Plan) -> list[str]:
    """Returns a sentence for each change that the curves of a resumed run will show."""
    sentences = []
    before, now = (precision_name(plan.precision, plan.low_precision) for plan in (old, new))
    if now != before:
        sentences.append(f"precision changed from {before} to {now}")
    if new.num_steps != old.num_steps:
        lengths = f"from {old.num_steps:,} to {new.num_steps:,} steps"
        sentences.append(f"length changed {lengths}: the learning rate schedule now covers the whole length")
    return sentences


def fewer_ranks(old: Plan, *, devices: int) -> int:
    """Returns the most ranks, on so many devices, that can share the rows of each step; 0 if none can."""
    rows = old.total_batch_size // old.model.sequence_len
    return next((count for count in range(min(devices, old.world_size), 0, -1) if rows % count == 0), 0)


def _make_unrefused(old: Plan, config: Config, machine: Machine, make: MakePlan) -> Plan:
    """Returns the plan; one that equals the old plan is made even where arithmetic says that it does not fit."""
    try:
        return make(config, machine)
    except DoesNotFit as error:
        plan = make(config, of_unknown_memory(machine))
        old_bytes, card_bytes = old.memory.get("card_bytes"), error.estimate.card_bytes
        is_same = (plan.device_name, memory_setup(plan)) == (old.device_name, memory_setup(old))
        if not is_same or old_bytes is None or card_bytes is None or card_bytes < old_bytes:
            raise
        return replace(plan, memory=error.estimate.to_json())


def of_unknown_memory(machine: Machine) -> Machine:
    """Returns the machine with devices of unknown memory, on which nothing is refused."""
    gpus = tuple(replace(gpu, memory_bytes=0) for gpu in machine.gpus)
    return replace(machine, gpus=gpus, memory_bytes=0)
