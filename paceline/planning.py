"""
`paceline plan`: what its options ask, the forecasts that answer them, and how they are shown. Torch only for --exact and --measure.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline.config import KEYS, Config, ModelConfig, parsed_value, unknown_key, with_values
from paceline.errors import PacelineError, PlanError, UsageError
from paceline.options import take_flag, take_option
from paceline.plan.advice import Advice, Fit, advise, time_of_budget
from paceline.plan.fit import DoesNotFit, divisors
from paceline.plan.forecast import Asked, Forecast, forecast, machine_asked
from paceline.plan.format import format_forecast, format_table, hours_words, kwh_words, seconds_words
from paceline.plan.machine import probe_machine
from paceline.plan.planner import memory_setup
from paceline.plan.run_cost import parse_price
from paceline.plan.speeds import Speeds, keep_speeds
from paceline.plan.step_time import StepSetup
from paceline.terminal import waiting
from paceline.units import format_bytes, format_count, format_mfu

SWEPT = {  # values of --sweep KEY alone; device_batch_size takes the divisors of a device's rows
    "depth": (4, 8, 12, 16, 20, 24, 28, 32),
    "sequence_len": (512, 1024, 2048, 4096, 8192),
    "profile": ("conservative", "balanced", "aggressive"),
    "optimizer": ("muon", "adamw"),
}


DEFAULTS_OF_A_PLAN = {"depth": 12}  # of what is only thought of; the tiny default of train would say nothing


@dataclass(frozen=True)
class Wanted:
    """What the command line says beside config keys."""

    asked: Asked
    exact: bool
    measure: bool
    time: str | None
    budget: float | None
    compare: tuple[str, ...]
    sweep: str | None
    as_json: bool

    @property
    def is_imagined(self) -> bool:
        return bool(self.asked.gpu or self.compare or self.time or self.budget)


def take_wanted(args: list[str]) -> tuple[list[str], Wanted]:
    """The options, and the words that are left: a config and its keys."""
    args, as_json = take_flag(args, "--json")
    args, exact = take_flag(args, "--exact")
    args, measure = take_flag(args, "--measure")
    args, gpu = take_option(args, "gpu", str)
    args, gpus = take_option(args, "gpus", int)
    args, hosts = take_option(args, "hosts", int)
    args, link = take_option(args, "link", str)
    args, price = take_option(args, "price", str)
    args, watts = take_option(args, "watts", float)
    args, time = take_option(args, "time", str)
    args, budget = take_option(args, "budget", float)
    args, compare = take_option(args, "compare", str)
    args, sweep = take_option(args, "sweep", str)
    for name, value, likely in (("gpus", gpus, 2), ("hosts", hosts, 2), ("watts", watts, 450), ("budget", budget, 50)):
        if value is not None and not 0 < value < 1e6:
            raise UsageError(f"--{name} {value:g}: not a number above 0", fix=f"--{name} {likely}")
    names = tuple(name.strip() for name in (compare or "").split(",") if name.strip())
    if compare is not None and not names:
        raise UsageError("--compare names no GPU", fix='--compare "RTX 4090,RTX 5090,H100"')
    asked = Asked(gpu, gpus, hosts, link, parse_price(price) if price is not None else None, watts)
    return args, Wanted(asked, exact, measure, time, budget, names, sweep, as_json)


def answer(config: Config, wanted: Wanted, *, set_keys: frozenset[str], cache: Path) -> str:
    """The text of the whole answer. set_keys: those that flags have set."""
    asked = wanted.asked
    if config.epochs is not None:
        raise PlanError(
            "the length is given in epochs, and a plan does not read the text",
            fix="--num-steps N; train says how many steps the epochs are",
        )

    def forecast_of(config: Config, asked: Asked) -> Forecast:
        return forecast(
            config,
            machine_asked(asked, probe_machine),
            asked=asked,
            cache=cache,
            vocab_size=config.vocab_size,
            num_rows=0,
        )

    if wanted.measure:
        measure_here(forecast_of(config, asked), asked, cache=cache)
    if wanted.compare:
        rows = [row("GPU", name, partial(forecast_of, config, replace(asked, gpu=name))) for name in wanted.compare]
        return table(rows, as_json=wanted.as_json)
    if wanted.sweep is not None:
        key, values = swept(wanted.sweep, partial(forecast_of, with_values(config, device_batch_size=None), asked))
        rows = [row(key, value, partial(forecast_of, with_values(config, **{key: value}), asked)) for value in values]
        return table(rows, as_json=wanted.as_json)
    advice = None
    if wanted.time or wanted.budget:
        advice = advise_depth(config, wanted, forecast_of, set_keys=set_keys)
    if advice is not None:
        config = with_values(config, depth=advice.depth, num_steps=advice.num_steps)
    found = forecast_of(config, asked)
    exact = exact_facts(found) if wanted.exact else None
    if wanted.as_json:
        return json.dumps(forecast_json(found, exact=exact, advice=advice), indent=1)
    blocks = [advice_words(advice, wanted)] if advice else []
    return "\n\n".join([*blocks, format_forecast(found, width=columns()), *([exact_words(exact)] if exact else [])])


def measure_here(found: Forecast, asked: Asked, *, cache: Path) -> None:
    """Times the pieces of a step on the device here, some seconds, and keeps them for every later plan."""
    if asked.gpu is not None:
        raise UsageError("--measure measures the device here", fix=f"leave --gpu {asked.gpu} out")
    setup = found.setup
    processes = setup.world_size if setup.device == "cpu" else 1
    with tempfile.TemporaryDirectory() as folder, waiting("measuring") as say:
        out = Path(folder) / "speeds.json"
        command = [sys.executable, "-m", "paceline.train.measure", "--device", setup.device, "--out", str(out)]
        say(f"{found.plan.device_name}, {processes} x {setup.threads} threads, under a minute")
        done = subprocess.run(
            [*command, "--threads", str(setup.threads), "--processes", str(processes)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            last = done.stdout.strip().splitlines()[-1:] or ["no output"]
            raise PacelineError(f"the measurement ended with {done.returncode}: {last[0]}", fix=" ".join(command[:3]))
        keep_speeds(cache, Speeds.from_json(json.loads(out.read_text())))


def advise_depth(
    config: Config, wanted: Wanted, forecast_of: Callable[[Config, Asked], Forecast], *, set_keys: frozenset[str]
) -> Advice:
    """The deepest model whose whole length ends within --time or --budget."""
    fixed = [name for name in ("n_embd", "num_steps") if getattr(config, name) is not None]
    fixed += ["depth"] if "depth" in set_keys else []
    if fixed:
        raise UsageError(
            f"--time and --budget choose the depth and the length, but {fixed[0]} is set",
            fix=f"leave {fixed[0]} at auto",
        )

    def of_depth(depth: int) -> Forecast:
        return forecast_of(with_values(config, depth=depth, n_kv_head=None), wanted.asked)

    def fits(model: ModelConfig) -> Fit | None:
        try:
            plan = of_depth(model.n_layer).plan
        except DoesNotFit:
            return None
        return Fit(plan.device_batch_size, plan.activation_checkpointing)

    smallest = of_depth(1)
    return advise(
        smallest.setup,
        time_s=_seconds(wanted, smallest.setup),
        tokens_per_param=config.tokens_per_param,
        data=config.data,
        fits=fits,
        head_dim=config.head_dim,
        total_batch_size=config.total_batch_size,
    )


def _seconds(wanted: Wanted, setup: StepSetup) -> float:
    """What may be spent; the smaller of --time and what --budget pays for."""
    limits = []
    if wanted.time is not None:
        limits.append(parse_duration(wanted.time))
    if wanted.budget is not None:
        if wanted.asked.price is None:
            raise UsageError("--budget needs a price", fix=f"--budget {wanted.budget:g} --price 2.50/gpu-hour")
        watts = wanted.asked.watts or (setup.spec.watts if setup.spec else None)
        limits.append(time_of_budget(wanted.budget, price=wanted.asked.price, num_gpus=setup.world_size, watts=watts))
    return min(limits)


def parse_duration(text: str) -> float:
    """'90m', '12h', '1d12h' in seconds."""
    found = re.fullmatch(r"(?:(\d+)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?", text.strip().lower())
    seconds = (
        sum(float(part or 0) * unit for part, unit in zip(found.groups(), (86_400, 3600, 60), strict=True))
        if found
        else 0
    )
    if not seconds:
        raise UsageError(f"--time {text}: not a time", fix="--time 12h, 90m or 1d12h")
    return seconds


def advice_words(advice: Advice, wanted: Wanted) -> str:
    limit = " and ".join(
        text for text in (wanted.time, f"a budget of {wanted.budget:g}" if wanted.budget else None) if text
    )
    bpb = (
        f"{advice.val_bpb.low:.3f} to {advice.val_bpb.high:.3f}" if advice.val_bpb else "n/a: not measured on this text"
    )
    return (
        f"advice  depth {advice.depth} for {format_count(advice.num_tokens)} tokens is the most that {limit} allows;"
        f" {advice.deeper}\n        val_bpb {bpb}"
    )


def columns() -> int:
    """Of the terminal; 120 where there is none, and at most: longer lines are not read."""
    return min(120, shutil.get_terminal_size((120, 24)).columns)


def swept(text: str, plain: Callable[[], Forecast]) -> tuple[str, list[Any]]:
    """`depth`, or `depth=8,12,16`: the key and its values."""
    name, equals, listed = text.partition("=")
    key = name.strip().replace("-", "_")
    if key not in KEYS:
        raise unknown_key(key, where="--sweep")
    if equals:
        return key, [parsed_value(key, value.strip()) for value in listed.split(",")]
    if key == "device_batch_size":
        plan = plain().plan
        return key, sorted(divisors(plan.device_batch_size * plan.grad_accum_steps))
    if key not in SWEPT:
        raise UsageError(f"--sweep {key}: which values?", fix=f"--sweep {key}=A,B,C")
    return key, list(SWEPT[key])


@dataclass(frozen=True)
class Row:
    """One line of a table: a forecast, or why there is none."""

    name: str
    value: Any
    forecast: Forecast | None
    refusal: PlanError | None


def row(name: str, value: Any, make: Callable[[], Forecast]) -> Row:
    try:
        return Row(name, value, make(), None)
    except PlanError as error:
        if name == "GPU" and not isinstance(error, DoesNotFit):
            raise  # an unknown name is no line of the table
        return Row(name, value, None, error)


def table(rows: list[Row], *, as_json: bool) -> str:
    if as_json:
        return json.dumps([row_json(each) for each in rows], indent=1)
    refused = [f"{each.value}: {each.refusal.message}" for each in rows if each.refusal]
    return "\n".join([format_table([row_words(each) for each in rows]), *([""] if refused else []), *refused])


def row_json(each: Row) -> dict[str, Any]:
    if each.forecast is None:
        assert each.refusal is not None
        return {each.name: each.value, "error": each.refusal.message, "fix": each.refusal.fix}
    return {each.name: each.value, **forecast_json(each.forecast)}


def row_words(each: Row) -> dict[str, str]:
    name = {each.name: str(each.value)}
    if each.forecast is None:
        needs = each.refusal.estimate.process.expected if isinstance(each.refusal, DoesNotFit) else None
        words = {"memory": format_bytes(needs) if needs else "n/a", "fits": "no"}
        return name | {column: words.get(column, "") for column in COLUMNS}
    found = each.forecast
    plan, step, memory = found.plan, found.step, found.plan.memory
    share = f"{100 * memory['share']:.0f} %" if memory["share"] else "n/a"
    words = {
        "rows": f"{plan.device_batch_size} x {plan.grad_accum_steps}",
        "memory": format_bytes(memory["process_bytes"]["expected"]),
        "of card": share,
        "fits": {"fits": "yes", "does not fit": "no", "undecidable": "perhaps", None: "n/a"}[memory["verdict"]],
        "checkpointing": "yes" if plan.activation_checkpointing else "no",
        "step": seconds_words(step.seconds) if step.seconds else "n/a",
        "tok/s": f"{step.tok_per_sec.expected:,.0f}" if step.tok_per_sec else "n/a",
        "mfu": format_mfu(step.mfu),
        "run": hours_words(found.run.hours) if found.run else "n/a",
        "kWh": kwh_words(found.run.kwh) if found.run and found.run.kwh else "n/a",
    }
    if found.run and found.run.money:
        words["cost"] = f"{found.run.money.expected:,.2f}"
    return name | words


COLUMNS = ("rows", "memory", "of card", "fits", "checkpointing", "step", "tok/s", "mfu", "run", "kWh")


def forecast_json(
    found: Forecast, *, exact: Mapping[str, Any] | None = None, advice: Advice | None = None
) -> dict[str, Any]:
    values = {**json.loads(found.plan.to_json()), "levers": [asdict(lever) for lever in found.levers]}
    if exact is not None:
        values["exact"] = dict(exact)
    if advice is not None:
        bpb = asdict(advice.val_bpb) if advice.val_bpb else None
        values["advice"] = {
            "depth": advice.depth,
            "num_tokens": advice.num_tokens,
            "val_bpb": bpb,
            "deeper": advice.deeper,
        }
    return values


def exact_facts(found: Forecast) -> dict[str, Any]:
    """Two traced steps of the plan that was found."""
    from paceline.train.exact import trace_steps

    setup = memory_setup(found.plan)
    trace = trace_steps(setup)
    planned = max(found.plan.memory["phases"].values())
    return {
        "traced_bytes": trace.peak_bytes,
        "planned_bytes": planned,
        "difference": planned / trace.peak_bytes - 1,
        "phases": {name: peak.bytes for name, peak in trace.peaks.items()},
        "allocated_bytes": trace.replay.allocated,
        "reserved_bytes": trace.replay.reserved,
        "compiled": setup.compiled,
    }


def exact_words(exact: Mapping[str, Any]) -> str:
    compiled = "; eager, the plan is for a compiled model" if exact["compiled"] else ""
    phases = ", ".join(f"{name} {format_bytes(size)}" for name, size in exact["phases"].items())
    return (
        f"exact   {format_bytes(exact['traced_bytes'])} in two traced steps, the plan's arithmetic is"
        f" {100 * exact['difference']:+.2f} % off{compiled}\n"
        f"        {phases}\n"
        f"        PyTorch's allocator: {format_bytes(exact['allocated_bytes'])} allocated,"
        f" {format_bytes(exact['reserved_bytes'])} reserved with expandable segments"
    )
