"""
Config + Machine -> Forecast: the plan, how long its step and its run take and what they cost, with all that this machine knows.

Reads what was measured and kept in the cache folder: the link by `paceline comm`, speeds by `paceline plan --measure` and by runs,
memory by runs. Starts nothing and asks no device: the Machine is given.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline.config import Config
from paceline.errors import PlanError, UsageError
from paceline.plan.gpus import find_gpu
from paceline.plan.kept import kept_calibration
from paceline.plan.levers import Lever, levers
from paceline.plan.links import Link, link_of
from paceline.plan.machine import Machine, imagined_machine
from paceline.plan.memory import checkpoint_bytes
from paceline.plan.planner import Plan, make_plan
from paceline.plan.run_cost import Price, RunCost, run_cost
from paceline.plan.speeds import load_speeds
from paceline.plan.step_time import StepSetup, StepTime, step_time
from paceline.plan.too_large import kept_too_large

FULLEST_SHARE = 0.9  # of a device's memory, that a lever may suggest


@dataclass(frozen=True)
class Asked:
    """What a plan is asked for beside the config: devices that need not be here, and prices."""

    gpu: str | None = None
    gpus: int | None = None  # of each host
    hosts: int | None = None
    link: str | None = None
    price: Price | None = None
    watts: float | None = None  # of each device


@dataclass(frozen=True)
class Forecast:
    """plan.cost holds step and run as JSON; run is None where a step's time is not known."""

    plan: Plan
    machine: Machine
    setup: StepSetup
    step: StepTime
    run: RunCost | None
    levers: tuple[Lever, ...]


def machine_asked(asked: Asked, here: Callable[[], Machine]) -> Machine:
    """The GPUs that were named, or those here in the asked number; `here` is called only for the latter."""
    hosts = asked.hosts or 1
    if asked.gpu is not None:
        return imagined_machine(find_gpu(asked.gpu), gpus=asked.gpus or 1, hosts=hosts)
    machine = here()
    if asked.gpus is not None and not machine.gpus:
        raise UsageError(f"--gpus {asked.gpus}, but no GPU is here", fix=f'--gpu "RTX 5090" --gpus {asked.gpus}')
    if asked.gpus is not None:
        first = machine.gpus[0]
        machine = replace(machine, gpus=tuple(replace(first, index=index) for index in range(asked.gpus)))
    return replace(machine, hosts=hosts)


def forecast(
    config: Config, machine: Machine, *, asked: Asked, cache: Path, vocab_size: int, num_rows: int
) -> Forecast:
    """Raises PlanError where nothing fits."""
    planned = partial(
        make_plan,
        machine=machine,
        vocab_size=vocab_size,
        num_rows=num_rows,
        calibrate=kept_calibration(cache),
        too_large=kept_too_large(cache),
    )
    plan = planned(config)
    link = link_of(asked.link, machine, world_size=plan.world_size, device=plan.device, comm=read_comm(cache))
    setup = step_setup(plan, machine, link=link, cache=cache)
    step = step_time(setup)
    run = None
    if step.seconds is not None:
        run = run_cost(
            step.seconds,
            num_steps=plan.num_steps,
            world_size=plan.world_size,
            eval_every=config.eval_every,
            eval_tokens=config.eval_tokens,
            save_every=config.save_every,
            total_batch_size=plan.total_batch_size,
            checkpoint_bytes=checkpoint_bytes(plan.model, optimizer=plan.optimizer),
            watts=asked.watts if asked.watts is not None else setup.spec.watts if setup.spec else None,
            price=asked.price,
        )
    plan = replace(plan, cost=cost_json(step, run))
    found = levers(
        setup,
        largest_device_batch_size=_rows(planned, replace(config, device_batch_size=None, memory_share=FULLEST_SHARE)),
        fits_without_checkpointing=_rows(planned, replace(config, activation_checkpointing=False)) is not None,
    )
    return Forecast(plan, machine, setup, step, run, found)


def _rows(planned: Callable[[Config], Plan], config: Config) -> int | None:
    """Rows at once of a plan without checkpointing that was not asked for; None where it does not fit."""
    with suppress(PlanError):
        plan = planned(config)
        if not plan.activation_checkpointing or config.activation_checkpointing:
            return plan.device_batch_size
    return None


def step_setup(plan: Plan, machine: Machine, *, link: Link | None, cache: Path) -> StepSetup:
    gpu = machine.gpus[0] if plan.device == "cuda" else None
    return StepSetup(
        model=plan.model,
        device=plan.device,
        world_size=plan.world_size,
        precision=plan.precision,
        optimizer=plan.optimizer,
        shard=plan.shard,
        device_batch_size=plan.device_batch_size,
        grad_accum_steps=plan.grad_accum_steps,
        activation_checkpointing=plan.activation_checkpointing,
        compile=plan.compile,
        attention=plan.attention,
        spec=gpu.spec if gpu else None,
        threads=plan.threads,
        link=link,
        speeds=load_speeds(
            cache,
            device_name=plan.device_name,
            threads=plan.threads,
            processes=1 if gpu else plan.world_size,
        ),
        hosts=plan.hosts,
    )


def read_comm(cache: Path) -> dict[str, Any] | None:
    """What `paceline comm` measured last; None where there is nothing that can be read."""
    with suppress(OSError, ValueError):
        found = json.loads((cache / "comm.json").read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else None
    return None


def cost_json(step: StepTime, run: RunCost | None) -> dict[str, Any]:
    return {**asdict(step), "run": None if run is None else asdict(run)}
