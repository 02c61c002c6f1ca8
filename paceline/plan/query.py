"""
`paceline plan` and `paceline configs`: their options, the forecasts that answer them, and their JSON and tables.

--exact and --measure need torch, so they run modules of train/ as processes of their own.
"""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline.config import KEYS, Config, cache_dir, format_flags
from paceline.config_file import load_config, packaged_configs, resolve_config, unknown_key, with_values
from paceline.errors import PacelineError, PlanError, UsageError, nearest
from paceline.options import ConfigsOptions, PlanOptions
from paceline.other_names import KEY_OF
from paceline.plan.advice import (
    HOUR_S,
    Advice,
    Price,
    advise,
    expected_bpb,
    flags_of_time,
    format_advice,
    format_spent,
    limit_text,
    limits_of,
    longer_run,
    parse_price,
    train_command,
)
from paceline.plan.forecast import Forecast, forecast, format_exact, format_forecast, format_kwh, format_seconds
from paceline.plan.gpu_table import COUNTED
from paceline.plan.links import read_link
from paceline.plan.machine import Machine, machine_of, needs_no_link, num_hosts, run_module
from paceline.plan.planner import Plan, make_model_config, memory_setup
from paceline.plan.shapes import batch_of_horizon, choose_num_steps, num_params, text_remark
from paceline.plan.sizing import DoesNotFit, divisors
from paceline.plan.speeds import Speeds, keep_speeds
from paceline.terminal import progress_line, table_lines
from paceline.units import format_bytes, format_count, format_duration, format_percent

# values of --sweep KEY alone; device_batch_size takes the divisors of a device's rows
SWEPT = {"depth": (4, 8, 12, 16, 20, 24, 28, 32), "sequence_len": (512, 1024, 2048, 4096, 8192)}
DEFAULTS_OF_A_PLAN = {"depth": 12}  # for a machine that is not here; train's default is too small to show anything
FOLLOWED_ROWS = (*range(1, 9), *range(10, 17, 2), *range(20, 33, 4), *range(40, 65, 8))
# options of which the first would leave the others unused
NOT_BESIDE = {"compare": ("sweep", "gpu", "time", "budget", "exact"), "sweep": ("time", "budget", "exact")}
COLUMNS = ("rows", "batch", "memory", "of card", "fits", "checkpointing", "step", "tok/s", "mfu", "run", "kWh")
VERDICTS = {"fits": "yes", "does not fit": "no", "undecidable": "perhaps", None: "n/a"}
NO_ROWS = "--follow-rows needs --sweep device_batch_size"
SizesOf = Callable[[Config], tuple[int, int, int]]  # prepare.TextSizes of the text, which depend on TEXT_KEYS
TEXT_KEYS = ("data", "val_data", "text_field", "tokenizer", "vocab_size", "sequence_len", "packing")


def answer(options: PlanOptions, ask_hosts: Callable[[Config], Machine], sizes_of: SizesOf) -> str:
    """Returns the whole text of the command. ask_hosts: returns what the hosts are like that a config names."""
    if options.time and not options.budget and (options.config is not None or "depth" in options.keys):
        options = replace(options, keys={**options.keys, "time": options.time}, time=None)  # the length, as for train
    compared = [name.strip() for name in (options.compare or "").split(",") if name.strip()]
    if options.compare is not None and not compared:
        raise UsageError("--compare names no GPU", fix='--compare "RTX 4090,RTX 5090,H100"')
    price = parse_price(options.price) if options.price is not None else None
    is_imagined = options.gpu or compared or options.time or options.budget
    resolve = partial(resolve_config, options.config, default=DEFAULTS_OF_A_PLAN if is_imagined else None)
    config = resolve(options.keys)
    sizes = sizes_of(config)
    if config.epochs is not None and not sizes[0]:
        what = "the length is given in epochs, and a plan does not read the text"
        raise PlanError(what, fix="--num-steps N; train says how many steps the epochs are")
    check_together(options, device=config.device)
    hosts = None if (config.hosts or "1").isdecimal() else ask_hosts(config)

    def forecast_of(changed: Config, gpu: str | None = options.gpu, **settings: bool) -> Forecast:
        is_same_text = all(getattr(changed, key) == getattr(config, key) for key in TEXT_KEYS)
        num_rows, vocab_size, about_rows = sizes if is_same_text else sizes_of(changed)
        machine = planned_machine(options, gpu, hosts or num_hosts(config))
        result = forecast(
            changed,
            machine,
            cache=cache_dir(changed),
            vocab_size=vocab_size,
            num_rows=num_rows,
            link_name=None if needs_no_link(compared, options.gpus, machine) else options.link,
            watts=options.watts,
            price=price,
            **settings,
        )
        return replace(result, about_rows=about_rows)

    one_of_many = partial(forecast_of, is_whole=False)
    if options.measure:
        if hosts is not None:
            raise UsageError("--measure measures the device here", fix="paceline plan --measure, on each host alone")
        measure_here(forecast_of(config), options, cache=cache_dir(config))
    if compared:
        return table("GPU", [(name, partial(one_of_many, config, name)) for name in compared], as_json=options.json)
    if options.sweep is not None:
        return sweep(lambda change: resolve({**options.keys, **change}, print_notes=False), options, one_of_many)
    advice, more = None, list[str]()
    if options.time or options.budget:
        advice, more = advise_depth(config, options, price, one_of_many, num_rows=sizes[0] or sizes[2])
        config = with_values(config, depth=advice.depth, time=None, **advice.length)
    result = forecast_of(config)
    if price is not None and (result.run is None or result.run.money is None):
        raise without_cost(result, options)
    exact = exact_facts(result.plan) if options.exact else None
    if options.json:
        return json.dumps(forecast_json(result, exact=exact, advice=advice), indent=1)
    blocks = [format_forecast(result), *([format_exact(exact)] if exact else [])]
    if advice:
        command = train_command(config, options.config)
        blocks.insert(0, format_advice(advice, limit=limit_text(options), more=more, command=command))
    return "\n\n".join(blocks)


def planned_machine(options: PlanOptions, gpu: str | None, hosts: Machine | int) -> Machine:
    """Returns the machine of a plan; a name of --compare may begin with a number of cards. Raises PlanError for a wrong --link."""
    counted = COUNTED.fullmatch(gpu) if gpu and options.compare else None
    count, gpu = (int(counted[1]), counted[2]) if counted else (options.gpus, gpu)
    machine = machine_of(gpu, count, hosts)
    if options.link is not None:  # the plan may fail before its link is read, and so may every fix of it
        read_link(options.link, machine.gpus[0].spec if machine.gpus else None)
    return machine


def check_together(options: PlanOptions, *, device: str | None) -> None:
    """Raises UsageError for options of which one would be ignored. device: of the config."""
    names = {name for name, value in vars(options).items() if value not in (None, False)}
    for table_name, others in NOT_BESIDE.items():
        if table_name in names and (unused := [name for name in others if name in names]):
            fix = f"leave --{unused[0]} out, or --{table_name}"
            if (table_name, unused[0]) == ("compare", "time"):
                fix = f"--depth N or a CONFIG, whose length --time then is; or {fix}"
            raise UsageError(f"--{table_name} makes a table, which takes no --{unused[0]}", fix=fix)
    if device == "cpu" and (gpus := [name for name in ("gpu", "gpus", "compare") if name in names]):
        raise UsageError(
            f"--{gpus[0]} is about GPUs, but device is cpu", fix=f"--device cuda, or leave --{gpus[0]} out"
        )
    if options.slurm_args and not options.slurm:
        raise UsageError("--slurm-args is about --slurm", fix="--slurm, or leave it out")
    if options.follow_rows and options.sweep is None:
        raise UsageError(NO_ROWS, fix="--sweep device_batch_size --follow-rows")


def without_cost(result: Forecast, options: PlanOptions) -> UsageError:
    """Returns the error where --price cannot be answered."""
    if result.run is None:
        here = options.gpu is None and not options.compare
        fix = "paceline plan --measure" if here else "leave --price out"
        return UsageError(f"--price {options.price}: {result.step.assumptions[0].removeprefix('no time: ')}", fix=fix)
    why = f"the power of {result.plan.device_name} is not known"
    return UsageError(f"--price {options.price}: {why}", fix="--watts 450, or --price 2.50/gpu-hour")


def answer_configs(options: ConfigsOptions) -> str:
    """Returns the list of the packaged configs, or the text of one."""
    paths = packaged_configs()
    if options.name is not None and options.name not in paths:
        near = nearest(options.name, paths)
        fix = f"paceline configs {near}" if near else f"one of {', '.join(paths)}"
        raise PacelineError(f"no config {options.name}", fix=fix)
    if options.name is not None and not options.json:
        return paths[options.name].read_text(encoding="utf-8").rstrip("\n")
    rows = [config_facts(name, path) for name, path in paths.items() if options.name in (None, name)]
    if options.json:
        return json.dumps(rows, indent=1)
    lines = table_lines(
        [
            {
                "config": row["name"],
                "depth": str(row["depth"]),
                "parameters": format_count(row["parameters"]),
                "length": row["time"] or f"{format_count(row['tokens'])} tokens",
                "tokens a step": f"{row['total_batch_size']:,}",
            }
            for row in rows
        ]
    )
    texts = ["", *(row["about"] for row in rows)]
    return "\n".join(f"{line}  {text}".rstrip() for line, text in zip(lines, texts, strict=True))


def config_facts(name: str, path: Path) -> dict[str, Any]:
    """Returns what a packaged config trains, by arithmetic alone. tokens is None where the length is a time."""
    config, _ = load_config(path, {})
    model = make_model_config(config, vocab_size=config.vocab_size, device="cpu")
    total = config.total_batch_size or batch_of_horizon(model)
    num_steps = choose_num_steps(config, model, total_batch_size=total, num_rows=0)
    about = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    return {
        "name": name,
        "about": about,
        "depth": config.depth,
        "parameters": num_params(model),
        "tokens": None if config.time else num_steps * total,
        "time": config.time,
        "total_batch_size": total,
        "sequence_len": config.sequence_len,
        "profile": config.profile,
    }


def measure_here(forecast: Forecast, options: PlanOptions, *, cache: Path) -> None:
    """Times the pieces of a step on the device here, which takes some seconds, and keeps the speeds for every later plan."""
    if options.gpu is not None:
        raise UsageError("--measure measures the device here", fix=f"leave --gpu {options.gpu} out")
    setup = forecast.setup
    processes = setup.world_size // setup.hosts if setup.device == "cpu" else 1
    with tempfile.TemporaryDirectory() as folder, progress_line("measuring") as show:
        out = Path(folder) / "speeds.json"
        show(f"{forecast.plan.device_name}, {processes} x {setup.threads} threads, under a minute")
        arguments = {"device": setup.device, "out": out, "threads": setup.threads, "processes": processes}
        if forecast.plan.precision == "bf16":
            arguments["precision"] = "bf16,fp32"
        run_module("paceline.train.measure", *(f"--{name}={value}" for name, value in arguments.items()))
        keep_speeds(cache, Speeds.from_json(json.loads(out.read_text())))


def advise_depth(
    config: Config,
    options: PlanOptions,
    price: Price | None,
    forecast_of: Callable[..., Forecast],
    *,
    num_rows: int,
) -> tuple[Advice, list[str]]:
    """Returns the deepest model whose whole run ends within --time or --budget, and lines about the time that is left and the text.

    It is trained longer than by the rules where that fills the time, unless --tokens-per-param is set. num_rows: of an epoch of the
    text, an estimate too; 0 where it is not known.
    """
    fixed = [name for name in ("n_embd", "n_kv_head", "num_steps") if getattr(config, name) is not None]
    fixed += ["depth"] if "depth" in options.keys else []
    if fixed:
        raise UsageError(
            f"--time and --budget choose the depth and the length, but {fixed[0]} is set",
            fix="leave --depth out" if fixed[0] == "depth" else f"{format_flags({fixed[0]: None})}, or --depth N",
        )

    def run_of_depth(depth: int, **keys: Any) -> Advice:
        result = forecast_of(with_values(config, depth=depth, time=None, **keys), find_fix=False)
        if result.run is None:
            raise PlanError(
                result.step.assumptions[0], fix="--gpu NAME of a known card, or paceline plan --measure first"
            )
        bpb = expected_bpb(result.plan.model, data=config.data, val_data=config.val_data)
        return Advice(result.setup, result.plan.num_steps, result.run.hours.scaled(HOUR_S), bpb)

    limits = limits_of(options, price, forecast_of(with_values(config, depth=1, time=None)).setup)
    time_s = min(limits.values())

    advice = advise(
        run_of_depth,
        time_s=time_s,
        limit=limit_text(options),
        enough=partial(flags_of_time, options=options, limits=limits),
        spent=partial(format_spent, options=options, limits=limits),
    )
    budget = options.budget if limits.get("budget") == time_s else None
    text_tokens = None if config.data == Config.data and "data" not in options.keys else num_rows * config.sequence_len
    remark, line = partial(text_remark, text_tokens=text_tokens, tokens_per_param=config.tokens_per_param), ""
    if text_tokens is None or not remark(advice.setup.model, advice.num_tokens):  # a longer run needs the text
        line, longer = longer_run(advice, run_of_depth, config, time_s=time_s, budget=budget)
        advice = advice if "tokens_per_param" in options.keys else longer
    taken = options.config is None or advice.depth == config.depth
    unused = "" if taken else f"        depth {config.depth} of {options.config} is not taken; train takes it"
    return advice, [line, unused, remark(advice.setup.model, advice.num_tokens)]


def sweep(
    config_of: Callable[[dict[str, Any]], Config], options: PlanOptions, forecast_of: Callable[[Config], Forecast]
) -> str:
    """Returns the table of --sweep. config_of: returns the config with these keys changed, as flags would change it."""
    assert options.sweep is not None
    open_forecast = partial(forecast_of, config_of({"device_batch_size": None}))
    key, values = swept(options.sweep, open_forecast)
    if key == "vocab_size" and (tokenizer := config_of({}).tokenizer):
        raise UsageError(
            f"--sweep vocab_size has no effect: {tokenizer} has its own vocabulary", fix="--tokenizer auto"
        )
    changes, note = [{key: value} for value in values], ""
    if options.follow_rows:
        if key != "device_batch_size":
            raise UsageError(NO_ROWS, fix="--sweep device_batch_size --follow-rows")
        plan = open_forecast().plan
        if "=" not in options.sweep:
            changes = [{key: rows} for rows in FOLLOWED_ROWS if rows <= plan.device_batch_size * plan.grad_accum_steps]
        for change in changes:
            tokens = change[key] * plan.model.sequence_len * plan.world_size
            change["total_batch_size"] = tokens * max(1, round(plan.total_batch_size / tokens))
        note = f"batch follows the rows: the multiple nearest to {plan.total_batch_size:,}, which changes the training"
    makes = [(change[key], lambda keys=change: forecast_of(config_of(keys))) for change in changes]
    lines = table(key, makes, as_json=options.json)
    return f"{lines}\n\n{note}" if note and not options.json else lines


def swept(text: str, forecast_once: Callable[[], Forecast]) -> tuple[str, list[Any]]:
    """Returns the key and the values of `depth` or `depth=8,12,16`."""
    name, equals, values = text.partition("=")
    key = name.strip().replace("-", "_")
    if key not in KEYS:
        error = unknown_key(key, where="--sweep")
        if meant := KEY_OF.get(key) or nearest(key, KEYS):
            error.fix = f"--sweep {meant}{equals}{values}"
        raise error
    if equals:
        try:
            return key, [KEYS[key].parse(value.strip()) for value in values.split(",")]
        except UsageError as error:
            raise UsageError(error.message, fix=f"--sweep {name}=A,B,C, each {KEYS[key].expected}") from None
    if key == "device_batch_size":
        plan = forecast_once().plan
        return key, sorted(divisors(plan.device_batch_size * plan.grad_accum_steps))
    choices = [*([False, True] if bool in KEYS[key].kinds else []), *(SWEPT.get(key) or KEYS[key].choices or ())]
    if not choices:
        raise UsageError(f"--sweep {key}: which values?", fix=f"--sweep {key}=A,B,C")
    return key, choices


def table(name: str, makes: Sequence[tuple[Any, Callable[[], Forecast]]], *, as_json: bool) -> str:
    """Returns a line for each value, a forecast or why there is none; an unknown GPU is an error of the whole command."""
    rows: list[tuple[Any, Forecast | PacelineError]] = []
    for value, make in makes:
        try:
            rows.append((value, make()))
        except PacelineError as error:  # also of a value of --sweep that conflicts with another key
            if name == "GPU" and not isinstance(error, DoesNotFit):
                raise
            rows.append((value, error))
    if as_json:
        results = [forecast_json(r) if isinstance(r, Forecast) else {"error": r.message, "fix": r.fix} for _, r in rows]
        return json.dumps([{name: value, **result} for (value, _), result in zip(rows, results, strict=True)], indent=1)
    lines = table_lines([{name: str(value), **row_cells(row)} for value, row in rows])
    reasons: dict[str, list[str]] = {}
    for value, row in rows:
        if not isinstance(row, Forecast) or row.run is None:
            reason = row.step.assumptions[0] if isinstance(row, Forecast) else row.message
            reasons.setdefault(reason, []).append(str(value))
    texts = [f"{', '.join(values)}: {reason}" for reason, values in reasons.items()]
    return "\n".join([*lines, *([""] if texts else []), *texts])


def row_cells(row: Forecast | PacelineError) -> dict[str, str]:
    """Returns the cells of a line by column."""
    if not isinstance(row, Forecast):
        needed = format_bytes(row.estimate.process.expected) if isinstance(row, DoesNotFit) else "n/a"
        return dict.fromkeys(COLUMNS, "") | {"memory": needed, "fits": "no"}
    plan, step, run, memory = row.plan, row.step, row.run, row.plan.memory
    cells = {
        "rows": f"{plan.device_batch_size} x {plan.grad_accum_steps}",
        "batch": f"{plan.total_batch_size:,}",
        "memory": format_bytes(memory["process_bytes"]["expected"]),
        "of card": format_percent(memory["share"] or None),
        "fits": VERDICTS[memory["verdict"]],
        "checkpointing": f"{plan.activation_checkpointing}".replace("True", "yes").replace("False", "no"),
        "step": format_seconds(step.seconds) if step.seconds else "n/a",
        "tok/s": f"{step.tok_per_sec.expected:,.0f}" if step.tok_per_sec else "n/a",
        "mfu": format_percent(step.mfu, digits=1),
        "run": format_duration(3600 * run.hours.expected) if run else "n/a",
        "kWh": format_kwh(run.kwh) if run and run.kwh else "n/a",
    }
    return cells | ({"cost": f"{run.money.expected:,.2f}"} if run and run.money else {})


def forecast_json(
    forecast: Forecast, *, exact: Mapping[str, Any] | None = None, advice: Advice | None = None
) -> dict[str, Any]:
    """Returns what --json prints: the plan as plan.json, with levers, the trace and the advice."""
    values: dict[str, Any] = json.loads(forecast.plan.to_json()) | {"about_rows": forecast.about_rows}
    if forecast.levers is not None:
        values["levers"] = [asdict(lever) for lever in forecast.levers]
    if exact is not None:
        values["exact"] = dict(exact)
    if advice is not None:
        values["advice"] = advice.facts()
    return values


def exact_facts(plan: Plan) -> dict[str, Any]:
    """Traces two steps of the plan in a process of its own, which needs torch."""
    setup = json.dumps(asdict(memory_setup(plan)))
    facts: dict[str, Any] = json.loads(run_module("paceline.train.exact", stdin=setup).splitlines()[-1])
    return facts
