"""
The same plan once more: what a run that goes on keeps of what was worked out when it began.

How many rows are taken at once, in how many chunks the loss is summed and what is compiled decide the order of additions, and with
it every bit that follows. What was learnt of this machine since must not change them under a run that was broken off.
"""

from collections.abc import Callable, Set
from contextlib import suppress
from dataclasses import replace
from typing import Any

from paceline.config import Config
from paceline.plan.fit import DoesNotFit, divisors
from paceline.plan.machine import Machine
from paceline.plan.planner import Plan, choose_device, choose_world_size, memory_setup
from paceline.units import MIB

# a user who names one of these now asks for another fit
FIT_KEYS = frozenset({"profile", "memory_share", "precision"})

MakePlan = Callable[[Config, Machine], Plan]


def plan_again(old: Plan, config: Config, machine: Machine, *, make: MakePlan, changed: Set[str] = frozenset()) -> Plan:
    """As `make`, but with the rows, chunks, checkpointing and compiling of `old` where the config leaves them open.

    changed: keys that the user gives now, "auto" among their values. On other devices, or another number of them, all is worked
    out anew. What has run on this device is not refused by arithmetic.
    """
    device = choose_device(config, machine)
    same = (device, choose_world_size(config, machine, device=device)) == (old.device, old.world_size)
    rows_anew = "device_batch_size" in changed and config.device_batch_size is None
    if not same or rows_anew or changed & FIT_KEYS:
        return make(config, machine)
    was: dict[str, Any] = {
        "device_batch_size": old.device_batch_size,
        "logits_mib": old.logits_budget_bytes // MIB,
        "activation_checkpointing": old.activation_checkpointing,
        "compile": old.compile,
    }
    kept = {key: value for key, value in was.items() if getattr(config, key) is None and key not in changed}
    plan = _make_unrefused(old, replace(config, **kept), machine, make)
    if "compile" in kept:
        plan = replace(plan, compile=old.compile)  # a trial's answer holds for the whole run
    if "device_batch_size" in kept:
        plan = replace(plan, memory_share=old.memory_share, notes=old.notes)
    return plan


def smaller_plan(old: Plan, config: Config, machine: Machine, *, make: MakePlan) -> Plan | None:
    """The next that needs less memory for the same steps: fewer rows at once, then activation checkpointing; else None."""
    share_rows = old.device_batch_size * old.grad_accum_steps
    fewer = [count for count in divisors(share_rows) if count < old.device_batch_size]
    tries: list[dict[str, Any]] = [{"device_batch_size": count} for count in fewer]
    if not old.activation_checkpointing and config.activation_checkpointing is None:
        tries.append({"device_batch_size": old.device_batch_size, "activation_checkpointing": True})
    for change in tries:
        with suppress(DoesNotFit):
            return plan_again(old, replace(config, **change), machine, make=make, changed=frozenset(change))
    return None


def words_of_change(old: Plan, new: Plan) -> str:
    """4 rows at once instead of 8, 6 micro-steps instead of 3"""
    words = []
    if new.device_batch_size != old.device_batch_size:
        rows = "row" if new.device_batch_size == 1 else "rows"
        words.append(f"{new.device_batch_size} {rows} at once instead of {old.device_batch_size}")
    if new.grad_accum_steps != old.grad_accum_steps:
        words.append(f"{new.grad_accum_steps} micro-steps instead of {old.grad_accum_steps}")
    if new.activation_checkpointing and not old.activation_checkpointing:
        words.append("activation checkpointing")
    return ", ".join(words)


def fewer_ranks(old: Plan, *, devices: int) -> int:
    """The most ranks, of so many devices, that can share the rows of each step; 0 if none can."""
    rows = old.total_batch_size // old.model.sequence_len
    return next((count for count in range(min(devices, old.world_size), 0, -1) if rows % count == 0), 0)


def _make_unrefused(old: Plan, config: Config, machine: Machine, make: MakePlan) -> Plan:
    try:
        return make(config, machine)
    except DoesNotFit as error:
        plan = make(config, of_unknown_memory(machine))
        before, here = old.memory.get("card_bytes"), error.estimate.card_bytes
        as_before = (plan.device_name, memory_setup(plan)) == (old.device_name, memory_setup(old))
        if not as_before or before is None or here is None or here < before:
            raise
        return replace(plan, memory=error.estimate.to_json())


def of_unknown_memory(machine: Machine) -> Machine:
    """Nothing is refused there."""
    gpus = tuple(replace(gpu, memory_bytes=0) for gpu in machine.gpus)
    return replace(machine, gpus=gpus, memory_bytes=0)
