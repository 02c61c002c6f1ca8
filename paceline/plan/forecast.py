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
from urllib.parse import quote

from paceline.config import Config, format_flags
from paceline.errors import Change, PlanError
from paceline.plan.activations import MemorySetup
from paceline.plan.advice import Lever, Price, RunCost, levers, run_cost
from paceline.plan.estimate import Range, named_parts
from paceline.plan.history import load_calibration, load_too_large
from paceline.plan.links import faster_links, link_of
from paceline.plan.machine import Machine
from paceline.plan.memory import checkpoint_bytes
from paceline.plan.planner import SETUP_FIELDS, Plan, make_plan, threads_of
from paceline.plan.precision import precision_name
from paceline.plan.shapes import MIN_STEPS, choose_eval_tokens, format_epochs, num_params, steps_of_time
from paceline.plan.sizing import Measured, fuller_plans
from paceline.plan.speeds import load_speeds
from paceline.plan.step_time import StepSetup, StepTime, sending_seconds, step_time
from paceline.units import (
    format_bytes,
    format_count,
    format_duration,
    format_ms,
    format_number_of,
    format_percent,
    parse_duration,
)

BAR_WIDTH = 44
BEFORE_BAR = 50  # columns
EIGHTHS = " ▏▎▍▌▋▊▉█"
FULLEST = {
    "forward": "in the last layer's forward",
    "loss": "in the loss",
    "backward": "in a layer's backward",
    "optimizer": "in the optimizer's update",
    "evaluation": "in an evaluation",
}


@dataclass(frozen=True)
class Forecast:
    """A plan with its time and cost. plan.cost holds step and run as JSON; run is None where a step's time is not known."""

    plan: Plan
    setup: StepSetup
    step: StepTime
    run: RunCost | None
    levers: tuple[Lever, ...] | None  # None: not looked for
    about_rows: int = 0  # as TextSizes has it: for the reader, no step follows from it


def forecast(
    config: Config,
    machine: Machine,
    *,
    cache: Path,
    vocab_size: int,
    num_rows: int,
    link_name: str | None = None,
    watts: float | None = None,
    price: Price | None = None,
    is_whole: bool = True,
    find_fix: bool = True,
) -> Forecast:
    """Returns the forecast; raises PlanError where nothing fits. cache: paceline's cache folder. watts: of each device.

    is_whole: False for one of many, which is shown without what would make its step faster. find_fix: as make_plan has it.
    """
    measured = measured_here(cache, link_name=link_name, machine=machine)
    planned = partial(make_plan, vocab_size=vocab_size, num_rows=num_rows)
    plan = planned(config, machine, measured=measured, find_fix=find_fix)
    setup = step_setup(plan, machine, cache=cache, link_name=link_name)
    step, run = step_time(setup), None
    if step.seconds is not None:
        if config.time is not None:
            num_steps = steps_of_time(parse_duration(config.time), step_s=step.seconds.expected)
            plan = planned(replace(config, num_steps=num_steps), machine, measured=measured)
        run = run_cost(
            step.seconds,
            num_steps=plan.num_steps,
            world_size=plan.world_size,
            eval_every=config.eval_every,
            eval_tokens=choose_eval_tokens(config, num_steps=plan.num_steps, total_batch_size=plan.total_batch_size),
            save_every=config.save_every,
            total_batch_size=plan.total_batch_size,
            checkpoint_bytes=checkpoint_bytes(plan),
            watts=watts if watts is not None else setup.spec.watts if setup.spec else None,
            price=price,
        )
    hosts = hosts_cost(config, plan, setup, step, machine, cache=cache, vocab_size=vocab_size)
    plan = replace(plan, cost={**asdict(step), "run": None if run is None else asdict(run), "hosts": hosts})
    is_improvable = is_whole and step.seconds is not None
    others = other_setups(config, setup, machine, planned, cache=cache, link_name=link_name) if is_improvable else ()
    return Forecast(plan, setup, step, run, levers(setup, others) if is_whole else None)


def hosts_cost(
    config: Config, plan: Plan, setup: StepSetup, step: StepTime, machine: Machine, *, cache: Path, vocab_size: int
) -> dict[str, Any] | None:
    """Returns what the link between hosts costs a step, and how fast one of them alone takes the same batch; None on one host."""
    if machine.hosts == 1 or setup.link is None:
        return None
    summing_s, gathering_s, _ = sending_seconds(setup)
    cost: dict[str, Any] = {"link": setup.link.name, "bytes_per_s": setup.link.bytes_per_s, "source": setup.link.source}
    cost |= {"sending_s": summing_s + gathering_s, "tok_per_sec": None, "one_host_tok_per_sec": None}
    if step.tok_per_sec is None:
        return cost
    cost["tok_per_sec"] = step.tok_per_sec.expected
    one = replace(machine, hosts=1, names=(), link=None)
    with suppress(PlanError):  # it may fit on several hosts alone
        config = replace(config, total_batch_size=plan.total_batch_size, num_steps=plan.num_steps, time=None)
        alone = make_plan(config, one, vocab_size=vocab_size, num_rows=0, measured=measured_here(cache), find_fix=False)
        speed = step_time(step_setup(alone, one, cache=cache)).tok_per_sec
        cost["one_host_tok_per_sec"] = speed.expected if speed else None
    return cost


def other_setups(
    config: Config,
    setup: StepSetup,
    machine: Machine,
    planned: Callable[..., Plan],
    *,
    cache: Path,
    link_name: str | None,
) -> Iterator[tuple[str, StepSetup]]:
    """Yields changes and the step that `planned`, make_plan, then chooses: other flags, a larger batch, other hardware."""
    fuller = fuller_plans(config, setup.device, setup.precision)
    changes: list[tuple[str, Change, Machine, str | None]] = [
        *((format_flags(change), change, machine, link_name) for change in fuller),
        ("twice the total batch", {"total_batch_size": 2 * setup.total_batch_size}, machine, link_name),
        *((what, {}, machine, name) for what, name in faster_links(setup.link, setup.spec, hosts=setup.hosts)),
    ]
    if machine.hosts > 1 and machine.gpus:
        gpus = tuple(replace(machine.gpus[0], index=index) for index in range(setup.world_size))
        one = replace(machine, gpus=gpus, hosts=1, names=(), link=None)
        changes.append((f"all {setup.world_size} GPUs in one host", {"nproc": None}, one, None))
    for what, change, other, name in changes:
        with suppress(PlanError):
            measured = measured_here(cache, link_name=name, machine=other)
            plan = planned(replace(config, **change), other, measured=measured, find_fix=False)
            yield what, step_setup(plan, other, cache=cache, link_name=name)


def measured_here(cache: Path, *, link_name: str | None = None, machine: Machine | None = None) -> Measured:
    """Returns what make_plan is to know. cache: paceline's cache folder, read once. machine: None is this one alone."""
    comm = read_comm(cache, machine)

    def step_seconds(machine: Machine, setup: MemorySetup, compile: bool | None) -> float | None:
        """Returns nothing for a CPU: its micro-batch is small in any case (sizing.CPU_MICRO_STEP_TOKENS)."""
        if setup.device == "cpu":
            return None
        gpu = machine.gpus[0]
        timed = StepSetup(
            **{name: getattr(setup, name) for name in SETUP_FIELDS},
            compile=compile,
            spec=gpu.spec,
            link=link_of(link_name, machine, world_size=setup.world_size, device=setup.device, comm=comm),
            speeds=load_speeds(cache, device_name=gpu.name, threads=threads_of(machine, setup.world_size), processes=1),
            hosts=machine.hosts,
        )
        return step_time(timed).uncorrected_s  # corrected by a run of one setup, the others would compare badly

    return Measured(load_calibration(cache), load_too_large(cache), step_seconds)


def step_setup(plan: Plan, machine: Machine, *, cache: Path, link_name: str | None = None) -> StepSetup:
    """Returns all that the time of a plan's step depends on, with the link and the speeds that were measured here."""
    comm = read_comm(cache, machine)
    link = link_of(link_name, machine, world_size=plan.world_size, device=plan.device, comm=comm)
    gpu = machine.gpus[0] if plan.device == "cuda" else None
    processes = 1 if gpu else plan.world_size // plan.hosts
    speeds = load_speeds(cache, device_name=plan.device_name, threads=plan.threads, processes=processes)
    names = {field.name for field in fields(StepSetup)} - {"spec", "link", "speeds"}
    shared = {name: getattr(plan, name) for name in names}
    return StepSetup(**shared, spec=gpu.spec if gpu else None, link=link, speeds=speeds)


def comm_file(cache: Path, hosts: Sequence[str]) -> Path:
    """Returns the file of what `paceline comm` measured on this host, or on these."""
    names = "".join(f"-{quote(name, safe='@')}" for name in sorted(hosts))
    return cache / f"comm{names}.json"


def read_comm(cache: Path, machine: Machine | None) -> dict[str, Any] | None:
    """Returns what `paceline comm` measured last on the machine's hosts, None: on this one; None where it measured nothing."""
    with suppress(OSError, ValueError):
        record = json.loads(comm_file(cache, machine.names if machine else ()).read_text(encoding="utf-8"))
        return record if isinstance(record, dict) else None
    return None


def format_plan(plan: Plan, *, source: str) -> list[str]:
    """Returns what a run prints before it starts: the plan, its text and what it is expected to need. source: the text's name."""
    model, *lines = plan_lines(plan)
    if plan.memory:  # a plan of an older version has none
        need, card = plan.memory["process_bytes"]["expected"], plan.memory["card_bytes"]
        of_card = f" of {format_bytes(card)}, {format_percent(need / card)}" if card else ""
        device = "GPU" if plan.device == "cuda" else "process"
        lines.append(f"memory  {format_bytes(need)} expected on each {device}{of_card}")
    if plan.cost.get("seconds"):
        step_s = plan.cost["seconds"]["expected"]
        whole = format_duration(step_s * plan.num_steps)
        lines.append(f"time    {1000 * step_s:,.0f} ms a step expected, {whole} in all")
    return [model, f"text    {source}", *lines, *(f"note    {note}" for note in plan.notes)]


def plan_lines(plan: Plan, *, about_rows: int = 0) -> list[str]:
    """Returns model, step, length and device in a line each. about_rows: as TextSizes has it."""
    model, accum = plan.model, plan.grad_accum_steps
    processes = format_number_of(plan.world_size, "CPU process", "CPU processes")
    on_cpu = f"{processes} x {format_number_of(plan.threads, 'thread')}"
    devices = f"{plan.world_size} x {plan.device_name}" if plan.device == "cuda" else on_cpu
    if plan.hosts > 1:
        devices += f" on {plan.hosts} hosts"
    compiled = {True: "compiled", False: "eager", None: "compile: measured first"}[plan.compile]
    sharded = {"none": "states replicated (DDP)", "optimizer": "states sharded", "full": "weights and states sharded"}
    states = "one device" if plan.world_size == 1 and plan.shard != "none" else sharded[plan.shard]
    if plan.offload != "none":
        states += ", states on the host" if plan.precision == "fp32" else ", masters and states on the host"
    states += "" if plan.optimizer_states == "fp32" else ", 8-bit states"
    tokens = format_count(plan.num_steps * plan.total_batch_size)
    length = f"{format_number_of(plan.num_steps, 'step')}, {tokens} tokens"
    epochs = format_epochs(plan.epochs) or format_epochs(plan.epochs_of(about_rows), is_estimate=True)
    length += f", {epochs}" if epochs else ""
    if plan.time is not None:
        length += ", the fewest of a run by time" * (plan.num_steps == MIN_STEPS)
        about = f": about {length}" if plan.cost.get("seconds") else ""
        length = f"as many steps as {plan.time} allows, measured at the start{about}"
    heads, rows = format_number_of(model.n_head, "head"), format_number_of(plan.device_batch_size, "row")
    return [
        f"model   depth {model.n_layer}, {model.n_embd} wide, {heads}, vocabulary {model.vocab_size:,},"
        f" {format_count(num_params(model))} parameters",
        f"step    {plan.total_batch_size:,} tokens = {rows} x {model.sequence_len:,} tokens"
        f" x {format_number_of(plan.world_size, 'process', 'processes')} x {format_number_of(accum, 'micro-step')}",
        f"length  {length}",
        f"device  {devices}, {precision_name(plan.precision, plan.low_precision)}, {plan.optimizer}, {states}, {compiled}",
        *hosts_lines(plan),
    ]


def hosts_lines(plan: Plan) -> Iterator[str]:
    """Yields the line about what the link between hosts costs, of a plan for several."""
    cost = plan.cost.get("hosts")
    if not cost:
        return
    link = f"{cost['link']}, {cost['bytes_per_s'] / 1e9:.3g} GB/s each way, {cost['source']}"
    sending = f"a step sends for {format_ms(1000 * cost['sending_s'])} over {link}"
    together, alone = cost["tok_per_sec"], cost["one_host_tok_per_sec"]
    if together is None:
        yield f"hosts   {sending}; its compute time is not known: paceline plan --measure"
    elif alone is None:
        yield f"hosts   {sending}: {together:,.0f} tok/s on {plan.hosts} hosts; one alone is too small"
    else:
        slower = together < alone
        verdict = "slower than one alone" if slower else f"{together / alone:.2f} times one alone"
        help_text = "; leave --hosts out, use a faster link, or raise total_batch_size" if slower else ""
        yield (
            f"hosts   {plan.hosts} hosts: {together:,.0f} tok/s, {verdict}: {alone:,.0f} tok/s; {sending}{help_text}"
        )


def format_exact(exact: Mapping[str, Any]) -> str:
    """Returns the lines about a trace: query.exact_facts."""
    compiled = "; eager, the plan is for a compiled model" if exact["compiled"] else ""
    phases = ", ".join(f"{name} {format_bytes(size)}" for name, size in exact["phases"].items())
    return (
        f"exact   {format_bytes(exact['traced_bytes'])} in two traced steps, the plan's arithmetic is"
        f" {100 * exact['difference']:+.2f} % off{compiled}\n        {phases}\n"
        f"        PyTorch's allocator: {format_bytes(exact['allocated_bytes'])} allocated,"
        f" {format_bytes(exact['reserved_bytes'])} reserved with expandable segments"
    )


def format_forecast(forecast: Forecast) -> str:
    """Returns the screen of a forecast, as wide as the terminal; longer lines continue under their first word."""
    width = min(120, shutil.get_terminal_size((120, 24)).columns)  # longer lines are not read
    blocks = [
        plan_lines(forecast.plan, about_rows=forecast.about_rows),
        memory_lines(forecast.plan, bar_width=max(10, min(BAR_WIDTH, width - BEFORE_BAR))),
        time_lines(forecast),
        assumed_lines(forecast),
    ]
    wrap = partial(textwrap.fill, width=width, subsequent_indent=" " * 10)
    text = "\n\n".join("\n".join(wrap(line.replace(" %", "\xa0%")) for line in block) for block in blocks)
    return text.replace("\xa0", " ")  # a number and its sign stay on one line


def memory_lines(plan: Plan, *, bar_width: int) -> Iterator[str]:
    """Yields one line for each part, its bar beginning where the one above ends: together they are the device."""
    memory, on_gpu = plan.memory, plan.device == "cuda"
    low, need, high = (memory["process_bytes"][name] for name in ("low", "expected", "high"))
    card = memory["card_bytes"]
    scale = card or need
    parts = named_parts(memory["parts"], need, on_gpu=on_gpu)
    yield f"memory  of each {'GPU' if on_gpu else 'process'} at its fullest: {FULLEST[memory['peak_phase']]}"
    start = 0.0
    for name, size in (*parts, *([("free", card - need)] if card and card > need else [])):
        bar = waterfall(start / scale, (start + size) / scale, width=bar_width, filled=name != "free")
        name = name.replace("CUDA", "ROCm") if plan.device_name.startswith("AMD ") else name
        yield f"        {name:<25}{format_bytes(size):>8}  {100 * size / scale:3.0f} %  {bar}".rstrip()
        start += size
    verdict = "; how much the device has is not known"
    if card:
        aim = f", aimed at {format_percent(plan.memory_share)}" if plan.memory_share else ""
        verdict = f", {format_percent(memory['share'])} of {format_bytes(card)}{aim}: {memory['verdict']}"
    bounds = f"({format_bytes(low)} to {format_bytes(high)})"
    yield f"        {'needed':<25}{format_bytes(need):>8}  {bounds}{verdict}"
    if offloaded := memory.get("offloaded_bytes"):  # not in plans of an older version
        copies, ranks = memory["copies_bytes"], plan.world_size // plan.hosts
        on_host = (
            f"{format_bytes(ranks * offloaded)} page-locked, {format_bytes(ranks * copies)} for copies of a checkpoint"
        )
        yield f"        {'host memory':<25}{format_bytes(ranks * (offloaded + copies)):>8}  of each host: {on_host}"


def waterfall(start: float, end: float, *, width: int, filled: bool) -> str:
    """Returns a bar from start to end, shares of width, in eighths of a character."""
    first, last = (round(8 * width * min(1.0, share)) for share in (start, end))
    if not filled:
        return " " * -(-first // 8) + "·" * (width - -(-first // 8))
    whole, eighths = divmod(last - first // 8 * 8, 8)
    return " " * (first // 8) + "█" * whole + EIGHTHS[eighths]


def time_lines(forecast: Forecast) -> Iterator[str]:
    """Yields the lines about a step, the run and the levers."""
    step = forecast.step
    if step.seconds is None or step.tok_per_sec is None:
        why = step.assumptions[0].removeprefix("no time: ")
        yield f"time    n/a, {why}" + (": paceline plan --measure does it" if why.endswith("measured yet") else "")
        return
    speed = f"{step.tok_per_sec.expected:,.0f} tok/s, mfu {format_percent(step.mfu, digits=1)}, limited by {step.limit}"
    yield f"time    {format_seconds(step.seconds)} a step, {speed}"
    total, largest = sum(step.parts.values()), sorted(step.parts.items(), key=lambda part: -part[1])
    yield "        " + ", ".join(f"{name} {format_percent(s / total)}" for name, s in largest if s >= 0.01 * total)
    if forecast.run is not None:
        yield f"run     {format_run(forecast.run, forecast.plan)}"
    if forecast.levers:
        yield f"helps   {', '.join(f'{lever.what} +{format_percent(lever.gain)}' for lever in forecast.levers[:4])}"


def format_seconds(seconds: Range) -> str:
    """Returns `612 ms (580 to 650)`, or seconds from ten on."""
    if seconds.expected < 10:
        low, expected, high = (f"{1000 * value:,.0f}" for value in (seconds.low, seconds.expected, seconds.high))
        return f"{expected} ms ({low} to {high})"
    return f"{seconds.expected:.1f} s ({seconds.low:.1f} to {seconds.high:.1f})"


def format_run(run: RunCost, plan: Plan) -> str:
    """Returns hours, energy and money of the run."""
    tokens, hours = format_count(plan.num_steps * plan.total_batch_size), run.hours
    low, expected, high = (format_duration(3600 * value) for value in (hours.low, hours.expected, hours.high))
    parts = [f"{expected} ({low} to {high}) for {format_number_of(plan.num_steps, 'step')}, {tokens} tokens"]
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
    plan, step, run = forecast.plan, forecast.step, forecast.run
    yield f"assumed memory: {plan.memory['source']}"
    kernel = [f"attention by {format_attention(plan)}"] if plan.device == "cuda" else []
    times = [*(step.assumptions if step.seconds is not None else ()), *(run.assumptions if run is not None else ())]
    yield from (f"        {line}" for line in (*kernel, *plan.notes, *times))


def format_attention(plan: Plan) -> str:
    """Returns `flash`, or `cudnn, flash or flex, as a trial at the start decides`."""
    if plan.attention is not None:
        return plan.attention
    return f"{', '.join(plan.attention_choices[:-1])} or {plan.attention_choices[-1]}, as a trial at the start decides"
