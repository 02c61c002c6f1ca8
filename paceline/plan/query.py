"""
`paceline plan`: its options, the forecasts that answer them, and their JSON and tables.

--exact and --measure need torch, so they run modules of train/ as processes of their own.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline.config import KEYS, Config, ModelConfig
from paceline.config_file import unknown_key, with_values
from paceline.errors import PacelineError, PlanError, UsageError
from paceline.options import PlanOptions
from paceline.plan.advice import Advice, Fit, advise, parse_price, time_of_budget
from paceline.plan.forecast import (
    Forecast,
    Scenario,
    columns,
    forecast,
    format_exact,
    format_forecast,
    format_hours,
    format_kwh,
    format_seconds,
    format_table,
    scenario_machine,
)
from paceline.plan.machine import probe_machine
from paceline.plan.planner import memory_setup
from paceline.plan.sizing import DoesNotFit, divisors
from paceline.plan.speeds import Speeds, keep_speeds
from paceline.plan.step_time import StepSetup
from paceline.terminal import progress_line
from paceline.units import format_bytes, format_count, format_mfu, parse_duration

SWEPT = {  # values of --sweep KEY alone; device_batch_size takes the divisors of a device's rows
    "depth": (4, 8, 12, 16, 20, 24, 28, 32),
    "sequence_len": (512, 1024, 2048, 4096, 8192),
    "profile": ("conservative", "balanced", "aggressive"),
    "optimizer": KEYS["optimizer"].choices,
}


DEFAULTS_OF_A_PLAN = {"depth": 12}  # for a machine that is not here; train's default is too small to show anything
COLUMNS = ("rows", "memory", "of card", "fits", "checkpointing", "step", "tok/s", "mfu", "run", "kWh")
VERDICTS = {"fits": "yes", "does not fit": "no", "undecidable": "perhaps", None: "n/a"}


@dataclass(frozen=True)
class PlanQuery:
    """What the command line asks for besides config keys."""

    options: PlanOptions
    scenario: Scenario
    compare: tuple[str, ...]  # the names of GPUs

    @property
    def is_imagined(self) -> bool:
        return bool(self.options.gpu or self.compare or self.options.time or self.options.budget)


def query_of(options: PlanOptions) -> PlanQuery:
    """Returns the query of the options; raises UsageError for a price or a list of GPUs that cannot be read."""
    names = tuple(name.strip() for name in (options.compare or "").split(",") if name.strip())
    if options.compare is not None and not names:
        raise UsageError("--compare names no GPU", fix='--compare "RTX 4090,RTX 5090,H100"')
    price = parse_price(options.price) if options.price is not None else None
    scenario = Scenario(options.gpu, options.gpus, options.hosts, options.link, price, options.watts)
    return PlanQuery(options, scenario, names)


def answer(config: Config, query: PlanQuery, *, set_keys: frozenset[str], cache: Path) -> str:
    """Returns the whole text of the command. set_keys: the config keys that flags set. cache: paceline's cache folder."""
    scenario, options = query.scenario, query.options
    if config.epochs is not None:
        raise PlanError(
            "the length is given in epochs, and a plan does not read the text",
            fix="--num-steps N; train says how many steps the epochs are",
        )

    def forecast_of(config: Config, scenario: Scenario = scenario) -> Forecast:
        machine = scenario_machine(scenario, probe_machine)
        return forecast(config, machine, scenario=scenario, cache=cache, vocab_size=config.vocab_size, num_rows=0)

    if options.measure:
        measure_here(forecast_of(config), scenario, cache=cache)
    if query.compare:
        rows = [row("GPU", name, partial(forecast_of, config, replace(scenario, gpu=name))) for name in query.compare]
        return table(rows, as_json=options.json)
    if options.sweep is not None:
        key, values = swept(options.sweep, partial(forecast_of, with_values(config, device_batch_size=None)))
        rows = [row(key, value, partial(forecast_of, with_values(config, **{key: value}))) for value in values]
        return table(rows, as_json=options.json)
    advice = None
    if options.time or options.budget:
        advice = advise_depth(config, query, forecast_of, set_keys=set_keys)
        config = with_values(config, depth=advice.depth, num_steps=advice.num_steps, time=None)
    result = forecast_of(config)
    exact = exact_facts(result) if options.exact else None
    if options.json:
        return json.dumps(forecast_json(result, exact=exact, advice=advice), indent=1)
    blocks = [format_advice(advice, options)] if advice else []
    blocks.append(format_forecast(result, width=columns()))
    return "\n\n".join([*blocks, *([format_exact(exact)] if exact else [])])


def measure_here(forecast: Forecast, scenario: Scenario, *, cache: Path) -> None:
    """Times the pieces of a step on the device here, which takes some seconds, and keeps the speeds for every later plan."""
    if scenario.gpu is not None:
        raise UsageError("--measure measures the device here", fix=f"leave --gpu {scenario.gpu} out")
    setup = forecast.setup
    processes = setup.world_size if setup.device == "cpu" else 1
    with tempfile.TemporaryDirectory() as folder, progress_line("measuring") as show:
        out = Path(folder) / "speeds.json"
        show(f"{forecast.plan.device_name}, {processes} x {setup.threads} threads, under a minute")
        options = {"device": setup.device, "out": out, "threads": setup.threads, "processes": processes}
        run_module("paceline.train.measure", *(f"--{name}={value}" for name, value in options.items()))
        keep_speeds(cache, Speeds.from_json(json.loads(out.read_text())))


def advise_depth(
    config: Config, query: PlanQuery, forecast_of: Callable[[Config], Forecast], *, set_keys: frozenset[str]
) -> Advice:
    """Returns the deepest model whose whole length ends within --time or --budget."""
    fixed = [name for name in ("n_embd", "num_steps") if getattr(config, name) is not None]
    fixed += ["depth"] if "depth" in set_keys else []
    if fixed:
        raise UsageError(
            f"--time and --budget choose the depth and the length, but {fixed[0]} is set",
            fix=f"leave {fixed[0]} at auto",
        )

    def of_depth(depth: int) -> Forecast:
        return forecast_of(with_values(config, depth=depth, n_kv_head=None))

    def fits(model: ModelConfig) -> Fit | None:
        try:
            plan = of_depth(model.n_layer).plan
        except DoesNotFit:
            return None
        return Fit(plan.device_batch_size, plan.activation_checkpointing)

    smallest = of_depth(1)
    return advise(
        smallest.setup,
        time_s=_seconds(query, smallest.setup),
        tokens_per_param=config.tokens_per_param,
        data=config.data,
        fits=fits,
        head_dim=config.head_dim,
        total_batch_size=config.total_batch_size,
    )


def _seconds(query: PlanQuery, setup: StepSetup) -> float:
    """Returns the seconds that may be spent: the smaller of --time and what --budget pays for."""
    limits, options, scenario = [], query.options, query.scenario
    if options.time is not None:
        try:
            limits.append(parse_duration(options.time))
        except ValueError:
            raise UsageError(f"--time {options.time}: not a time", fix="--time 12h, 90m or 1d12h") from None
    if options.budget is not None:
        if scenario.price is None:
            raise UsageError("--budget needs a price", fix=f"--budget {options.budget:g} --price 2.50/gpu-hour")
        watts = scenario.watts or (setup.spec.watts if setup.spec else None)
        limits.append(time_of_budget(options.budget, price=scenario.price, num_gpus=setup.world_size, watts=watts))
    return min(limits)


def format_advice(advice: Advice, options: PlanOptions) -> str:
    """Returns the lines about the depth for --time or --budget."""
    limit = " and ".join(
        text for text in (options.time, f"a budget of {options.budget:g}" if options.budget else None) if text
    )
    bpb = (
        f"{advice.val_bpb.low:.3f} to {advice.val_bpb.high:.3f}" if advice.val_bpb else "n/a: not measured on this text"
    )
    return (
        f"advice  depth {advice.depth} for {format_count(advice.num_tokens)} tokens is the most that {limit} allows;"
        f" {advice.deeper}\n        val_bpb {bpb}"
    )


def swept(text: str, forecast_once: Callable[[], Forecast]) -> tuple[str, list[Any]]:
    """Returns the key and the values of `depth` or `depth=8,12,16`."""
    name, equals, values = text.partition("=")
    key = name.strip().replace("-", "_")
    if key not in KEYS:
        raise unknown_key(key, where="--sweep")
    if equals:
        return key, [KEYS[key].parse(value.strip()) for value in values.split(",")]
    if key == "device_batch_size":
        plan = forecast_once().plan
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
    """Returns the line of one value; an unknown GPU is an error of the whole command."""
    try:
        return Row(name, value, make(), None)
    except PlanError as error:
        if name == "GPU" and not isinstance(error, DoesNotFit):
            raise
        return Row(name, value, None, error)


def table(rows: list[Row], *, as_json: bool) -> str:
    """Returns the table, and below it why some lines have no forecast."""
    if as_json:
        return json.dumps([row_json(row) for row in rows], indent=1)
    refused = [f"{row.value}: {row.refusal.message}" for row in rows if row.refusal]
    return "\n".join([format_table([row_cells(row) for row in rows]), *([""] if refused else []), *refused])


def row_json(row: Row) -> dict[str, Any]:
    """Returns a line of the table for --json: the forecast, or the error and its fix."""
    if row.forecast is None:
        assert row.refusal is not None
        return {row.name: row.value, "error": row.refusal.message, "fix": row.refusal.fix}
    return {row.name: row.value, **forecast_json(row.forecast)}


def row_cells(row: Row) -> dict[str, str]:
    """Returns the cells of a line by column; the first is the value."""
    name = {row.name: str(row.value)}
    if row.forecast is None:
        needs = row.refusal.estimate.process.expected if isinstance(row.refusal, DoesNotFit) else None
        cells = {"memory": format_bytes(needs) if needs else "n/a", "fits": "no"}
        return name | {column: cells.get(column, "") for column in COLUMNS}
    plan, step, run, memory = row.forecast.plan, row.forecast.step, row.forecast.run, row.forecast.plan.memory
    share = f"{100 * memory['share']:.0f} %" if memory["share"] else "n/a"
    cells = {
        "rows": f"{plan.device_batch_size} x {plan.grad_accum_steps}",
        "memory": format_bytes(memory["process_bytes"]["expected"]),
        "of card": share,
        "fits": VERDICTS[memory["verdict"]],
        "checkpointing": "yes" if plan.activation_checkpointing else "no",
        "step": format_seconds(step.seconds) if step.seconds else "n/a",
        "tok/s": f"{step.tok_per_sec.expected:,.0f}" if step.tok_per_sec else "n/a",
        "mfu": format_mfu(step.mfu),
        "run": format_hours(run.hours) if run else "n/a",
        "kWh": format_kwh(run.kwh) if run and run.kwh else "n/a",
    }
    if run and run.money:
        cells["cost"] = f"{run.money.expected:,.2f}"
    return name | cells


def forecast_json(
    forecast: Forecast, *, exact: Mapping[str, Any] | None = None, advice: Advice | None = None
) -> dict[str, Any]:
    """Returns what --json prints: the plan as plan.json, with levers, the trace and the advice."""
    values = {**json.loads(forecast.plan.to_json()), "levers": [asdict(lever) for lever in forecast.levers]}
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


def exact_facts(forecast: Forecast) -> dict[str, Any]:
    """Traces two steps of the plan in a process of its own, which needs torch."""
    setup = asdict(memory_setup(forecast.plan))
    facts: dict[str, Any] = json.loads(run_module("paceline.train.exact", stdin=json.dumps(setup)).splitlines()[-1])
    if "error" in facts:
        raise PlanError(facts["error"], fix=facts["fix"])
    return facts


def run_module(module: str, *args: str, stdin: str = "") -> str:
    """Returns what a module of paceline prints as a process of its own; raises PacelineError where it fails."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", module, *args], input=stdin, capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = [*done.stdout.splitlines(), *done.stderr.splitlines()]
        last = next((line for line in reversed(lines) if line.strip()), "no output")
        raise PacelineError(f"{module} ended with {done.returncode}: {last}", fix=f"python -m {module}")
    return done.stdout
