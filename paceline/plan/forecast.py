"""
Config + Machine -> Forecast: the plan, how long its step and its run take, what they cost; and how that looks on the screen.

It reads the measurements in the cache folder: the link by `paceline comm`, speeds by `paceline plan --measure` and by runs, memory
by runs. It starts nothing and probes no device.
"""

import json
import math
import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline.config import Config
from paceline.errors import PlanError, UsageError
from paceline.plan.advice import Lever, Price, RunCost, levers, run_cost
from paceline.plan.estimate import Range
from paceline.plan.gpu_table import find_gpu
from paceline.plan.history import load_calibration, load_too_large
from paceline.plan.links import Link, link_of
from paceline.plan.machine import Machine, imagined_machine
from paceline.plan.memory import checkpoint_bytes
from paceline.plan.planner import Plan, make_plan
from paceline.plan.shapes import choose_eval_tokens, num_params, steps_of_time
from paceline.plan.speeds import load_speeds
from paceline.plan.step_time import StepSetup, StepTime, step_time
from paceline.units import format_bytes, format_count, format_duration, format_mfu, format_number_of, parse_duration

FULLEST_SHARE = 0.9  # of a device's memory, that a lever may suggest
BAR_WIDTH = 44
BEFORE_BAR = 50  # columns
EIGHTHS = " ▏▎▍▌▋▊▉█"
NAMES = {
    "weights": "weights",
    "masters": "fp32 masters",
    "states": "optimizer states",
    "communication": "communication buffers",
    "gradients": "gradients",
    "activations": "activations",
    "loss": "loss and logits",
    "working": "temporaries",
}
FULLEST = {
    "forward": "in the last layer's forward",
    "loss": "in the loss",
    "backward": "in a layer's backward",
    "optimizer": "in the optimizer's update",
    "evaluation": "in an evaluation",
}


@dataclass(frozen=True)
class Scenario:
    """What a plan is made for besides the config: devices that need not be in this machine, and prices."""

    gpu: str | None = None
    gpus: int | None = None  # of each host
    hosts: int | None = None
    link: str | None = None
    price: Price | None = None
    watts: float | None = None  # of each device


@dataclass(frozen=True)
class Forecast:
    """A plan with its time and cost. plan.cost holds step and run as JSON; run is None where a step's time is not known."""

    plan: Plan
    machine: Machine
    setup: StepSetup
    step: StepTime
    run: RunCost | None
    levers: tuple[Lever, ...]


def scenario_machine(scenario: Scenario, probe: Callable[[], Machine]) -> Machine:
    """Returns a machine with the named GPUs, or this machine with the scenario's number of them; only the latter calls probe."""
    hosts, num_gpus = scenario.hosts or 1, scenario.gpus
    if scenario.gpu is not None:
        return imagined_machine(find_gpu(scenario.gpu), gpus=num_gpus or 1, hosts=hosts)
    machine = probe()
    if num_gpus is not None and not machine.gpus:
        raise UsageError(f"--gpus {num_gpus}, but no GPU is here", fix=f'--gpu "RTX 5090" --gpus {num_gpus}')
    if num_gpus is not None:
        first = machine.gpus[0]
        machine = replace(machine, gpus=tuple(replace(first, index=index) for index in range(num_gpus)))
    return replace(machine, hosts=hosts)


def forecast(
    config: Config, machine: Machine, *, scenario: Scenario, cache: Path, vocab_size: int, num_rows: int
) -> Forecast:
    """Returns the forecast; raises PlanError where nothing fits. cache: paceline's cache folder."""
    planned = partial(
        make_plan,
        machine=machine,
        vocab_size=vocab_size,
        num_rows=num_rows,
        calibrate=load_calibration(cache),
        too_large=load_too_large(cache),
    )
    plan = planned(config)
    link = link_of(scenario.link, machine, world_size=plan.world_size, device=plan.device, comm=read_comm(cache))
    setup = step_setup(plan, machine, link=link, cache=cache)
    step = step_time(setup)
    if config.time is not None and step.seconds is not None:
        num_steps = steps_of_time(parse_duration(config.time), step_s=step.seconds.expected)
        plan = planned(replace(config, num_steps=num_steps))
    run = None
    if step.seconds is not None:
        run = run_cost(
            step.seconds,
            num_steps=plan.num_steps,
            world_size=plan.world_size,
            eval_every=config.eval_every,
            eval_tokens=choose_eval_tokens(config, num_steps=plan.num_steps, total_batch_size=plan.total_batch_size),
            save_every=config.save_every,
            total_batch_size=plan.total_batch_size,
            checkpoint_bytes=checkpoint_bytes(plan.model, optimizer=plan.optimizer),
            watts=scenario.watts if scenario.watts is not None else setup.spec.watts if setup.spec else None,
            price=scenario.price,
        )
    plan = replace(plan, cost={**asdict(step), "run": None if run is None else asdict(run)})
    suggestions = levers(
        setup,
        largest_device_batch_size=_rows(planned, replace(config, device_batch_size=None, memory_share=FULLEST_SHARE)),
        fits_without_checkpointing=_rows(planned, replace(config, activation_checkpointing=False)) is not None,
    )
    return Forecast(plan, machine, setup, step, run, suggestions)


def _rows(planned: Callable[[Config], Plan], config: Config) -> int | None:
    """Returns the rows of a micro-step of such a plan; None where it does not fit, or only with checkpointing that is not set."""
    with suppress(PlanError):
        plan = planned(config)
        if not plan.activation_checkpointing or config.activation_checkpointing:
            return plan.device_batch_size
    return None


def step_setup(plan: Plan, machine: Machine, *, link: Link | None, cache: Path) -> StepSetup:
    """Returns all that the time of a plan's step depends on, with the speeds that were measured here."""
    gpu = machine.gpus[0] if plan.device == "cuda" else None
    processes = 1 if gpu else plan.world_size
    speeds = load_speeds(cache, device_name=plan.device_name, threads=plan.threads, processes=processes)
    names = {field.name for field in fields(StepSetup)} - {"spec", "link", "speeds"}
    shared = {name: getattr(plan, name) for name in names}
    return StepSetup(**shared, spec=gpu.spec if gpu else None, link=link, speeds=speeds)


def read_comm(cache: Path) -> dict[str, Any] | None:
    """Returns what `paceline comm` measured last; None where it measured nothing."""
    with suppress(OSError, ValueError):
        record = json.loads((cache / "comm.json").read_text(encoding="utf-8"))
        return record if isinstance(record, dict) else None
    return None


def format_plan(plan: Plan, *, source: str) -> list[str]:
    """Returns what a run prints before it starts: the plan, its text and what it is expected to need. source: the text's name."""
    model, *lines = plan_lines(plan)
    return [model, f"text    {source}", *lines, *expected_lines(plan), *(f"note    {note}" for note in plan.notes)]


def plan_lines(plan: Plan) -> list[str]:
    """Returns model, step, length and device in a line each."""
    model, accum = plan.model, plan.grad_accum_steps
    processes = format_number_of(plan.world_size, "CPU process", "CPU processes")
    on_cpu = f"{processes} x {format_number_of(plan.threads, 'thread')}"
    devices = f"{plan.world_size} x {plan.device_name}" if plan.device == "cuda" else on_cpu
    if plan.hosts > 1:
        devices += f" on {plan.hosts} hosts"
    compiled = {True: "compiled", False: "eager", None: "compile: measured first"}[plan.compile]
    states = (
        "states replicated (DDP)" if plan.shard == "none" else "states sharded" if plan.world_size > 1 else "one device"
    )
    epochs = f", {plan.epochs:.3g} epochs" if plan.epochs else ""
    length = f"{plan.num_steps:,} steps, {format_count(plan.num_steps * plan.total_batch_size)} tokens{epochs}"
    if plan.time is not None:
        about = f": about {length}" if plan.cost.get("seconds") else ""
        length = f"as many steps as {plan.time} allows, measured at the start{about}"
    return [
        f"model   depth {model.n_layer}, {model.n_embd} wide, {model.n_head} heads, vocabulary {model.vocab_size:,},"
        f" {format_count(num_params(model))} parameters",
        f"step    {plan.total_batch_size:,} tokens = {plan.device_batch_size} rows x {model.sequence_len:,} tokens"
        f" x {format_number_of(plan.world_size, 'process', 'processes')} x {format_number_of(accum, 'micro-step')}",
        f"length  {length}",
        f"device  {devices}, {plan.precision}, {plan.optimizer}, {states}, {compiled}",
    ]


def expected_lines(plan: Plan) -> list[str]:
    """Returns expected memory and time in a line each; none for a plan of an older version."""
    lines = []
    if plan.memory:
        need, card = plan.memory["process_bytes"]["expected"], plan.memory["card_bytes"]
        of_card = f" of {format_bytes(card)}, {100 * need / card:.0f} %" if card else ""
        lines.append(
            f"memory  {format_bytes(need)} expected on each {'GPU' if plan.device == 'cuda' else 'process'}{of_card}"
        )
    if plan.cost.get("seconds"):
        seconds = plan.cost["seconds"]["expected"]
        lines.append(
            f"time    {1000 * seconds:,.0f} ms a step expected, {format_duration(seconds * plan.num_steps)} in all"
        )
    return lines


def columns() -> int:
    """Returns the terminal's width; 120 where there is none, and at most: longer lines are not read."""
    return min(120, shutil.get_terminal_size((120, 24)).columns)


def format_exact(exact: Mapping[str, Any]) -> str:
    """Returns the lines about a trace: query.exact_facts."""
    compiled = "; eager, the plan is for a compiled model" if exact["compiled"] else ""
    phases = ", ".join(f"{name} {format_bytes(size)}" for name, size in exact["phases"].items())
    return (
        f"exact   {format_bytes(exact['traced_bytes'])} in two traced steps, the plan's arithmetic is"
        f" {100 * exact['difference']:+.2f} % off{compiled}\n"
        f"        {phases}\n"
        f"        PyTorch's allocator: {format_bytes(exact['allocated_bytes'])} allocated,"
        f" {format_bytes(exact['reserved_bytes'])} reserved with expandable segments"
    )


def format_forecast(forecast: Forecast, *, width: int) -> str:
    """Returns the screen of a forecast. width: columns; longer lines continue under their first word."""
    blocks = [
        plan_lines(forecast.plan),
        memory_lines(forecast.plan, bar_width=max(10, min(BAR_WIDTH, width - BEFORE_BAR))),
        time_lines(forecast),
        [f"assumed {line}" if not i else f"        {line}" for i, line in enumerate(assumed_lines(forecast))],
    ]
    return "\n\n".join("\n".join(wrap_line(line, width) for line in block) for block in blocks)


def wrap_line(line: str, width: int) -> str:
    """Returns the line, broken where it is longer than width."""
    return line if len(line) <= width else textwrap.fill(line, width, subsequent_indent=" " * 10)


def memory_lines(plan: Plan, *, bar_width: int) -> Iterator[str]:
    """Yields one line for each part, its bar beginning where the one above ends: together they are the device."""
    memory = plan.memory
    need, card = memory["process_bytes"]["expected"], memory["card_bytes"]
    device = "GPU" if plan.device == "cuda" else "process"
    yield f"memory  of each {device} at its fullest: {FULLEST[memory['peak_phase']]}"
    scale = card or need
    start = 0.0
    for name, size in (*named_parts(plan), *([("free", card - need)] if card and card > need else [])):
        bar = waterfall(start / scale, (start + size) / scale, width=bar_width, filled=name != "free")
        yield f"        {name:<25}{format_bytes(size):>8}  {100 * size / scale:3.0f} %  {bar}".rstrip()
        start += size
    yield f"        {'needed':<25}{format_bytes(need):>8}  {format_need(plan)}"


def named_parts(plan: Plan) -> Iterator[tuple[str, float]]:
    """Yields the parts of the memory under the names on the screen, and what the process needs besides them."""
    memory = plan.memory
    for name, size in memory["parts"].items():
        if size >= 0.001 * memory["process_bytes"]["expected"]:
            yield NAMES[name], size
    overhead = memory["process_bytes"]["expected"] - sum(memory["parts"].values())
    yield "CUDA, kernels, fragments" if plan.device == "cuda" else "Python, PyTorch, copies", overhead


def waterfall(start: float, end: float, *, width: int, filled: bool) -> str:
    """Returns a bar from start to end, shares of width, in eighths of a character."""
    first, last = (round(8 * width * min(1.0, share)) for share in (start, end))
    if not filled:
        return " " * -(-first // 8) + "·" * (width - -(-first // 8))
    whole = " " * (first // 8)
    left = first // 8 * 8
    return whole + "█" * ((last - left) // 8) + (EIGHTHS[(last - left) % 8] if (last - left) % 8 else "")


def format_need(plan: Plan) -> str:
    """Returns the range of the need, its share of the device and the verdict."""
    memory = plan.memory
    bounds = f"({format_bytes(memory['process_bytes']['low'])} to {format_bytes(memory['process_bytes']['high'])})"
    if not memory["card_bytes"]:
        return f"{bounds}; how much the device has is not known"
    share = f"{100 * memory['share']:.0f} % of {format_bytes(memory['card_bytes'])}"
    aim = f", aimed at {100 * plan.memory_share:.0f} %" if plan.memory_share else ""
    return f"{bounds}, {share}{aim}: {memory['verdict']}"


def time_lines(forecast: Forecast) -> Iterator[str]:
    """Yields the lines about a step, the run and the levers."""
    step = forecast.step
    if step.seconds is None or step.tok_per_sec is None:
        yield f"time    n/a, {step.assumptions[0].removeprefix('no time: ')}"
        return
    speed = f"{step.tok_per_sec.expected:,.0f} tok/s"
    yield (
        f"time    {format_seconds(step.seconds)} a step, {speed}, mfu {format_mfu(step.mfu)}, limited by {step.limit}"
    )
    yield f"        {format_shares(step)}"
    if forecast.run is not None:
        yield f"run     {format_run(forecast.run, forecast.plan)}"
    if forecast.levers:
        gains = ", ".join(f"{lever.what} +{100 * lever.gain:.0f} %" for lever in forecast.levers[:4])
        yield f"helps   {gains}"


def format_seconds(seconds: Range) -> str:
    """Returns `612 ms (580 to 650)`, or seconds from ten on."""
    if seconds.expected < 10:
        low, expected, high = (f"{1000 * value:,.0f}" for value in (seconds.low, seconds.expected, seconds.high))
        return f"{expected} ms ({low} to {high})"
    return f"{seconds.expected:.1f} s ({seconds.low:.1f} to {seconds.high:.1f})"


def format_hours(hours: Range) -> str:
    """Returns the expected hours as a duration."""
    return format_duration(3600 * hours.expected)


def format_shares(step: StepTime) -> str:
    """Returns the parts of a step in per cent, the largest first."""
    total = sum(step.parts.values())
    largest = sorted(step.parts.items(), key=lambda part: -part[1])
    parts = [f"{name} {100 * seconds / total:.0f}%" for name, seconds in largest if seconds >= 0.01 * total]
    return ", ".join(parts)


def format_run(run: RunCost, plan: Plan) -> str:
    """Returns hours, energy and money of the run."""
    tokens = format_count(plan.num_steps * plan.total_batch_size)
    low, expected, high = (
        format_duration(3600 * hours) for hours in (run.hours.low, run.hours.expected, run.hours.high)
    )
    parts = [f"{expected} ({low} to {high}) for {plan.num_steps:,} steps, {tokens} tokens"]
    if run.kwh is not None:
        parts.append(f"{format_kwh(run.kwh)} kWh")
    if run.money is not None:
        parts.append(f"costs {run.money.expected:,.2f} ({run.money.low:,.2f} to {run.money.high:,.2f})")
    return ", ".join(parts)


def format_kwh(kwh: Range) -> str:
    """Returns three digits."""
    return f"{kwh.expected:,.{max(0, 2 - math.floor(math.log10(max(1e-3, kwh.expected))))}f}"


def assumed_lines(forecast: Forecast) -> Iterator[str]:
    """Yields what the figures stand on."""
    yield f"memory: {forecast.plan.memory['source']}"
    if forecast.plan.device == "cuda":
        yield f"attention by the {forecast.plan.attention_kernel} kernel"
    yield from forecast.plan.notes
    if forecast.step.seconds is not None:
        yield from forecast.step.assumptions
    if forecast.run is not None:
        yield from forecast.run.assumptions


def format_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Returns a table with aligned columns, numbers to the right; the first column is the name."""
    names = list(rows[0])
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in names}
    lines = [names, *([row[name] for name in names] for row in rows)]
    return "\n".join(
        "  ".join(
            text.ljust(widths[name]) if i == 0 else text.rjust(widths[name])
            for i, (name, text) in enumerate(zip(names, line, strict=True))
        ).rstrip()
        for line in lines
    )
