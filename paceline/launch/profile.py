"""
`paceline profile`: where the time and the memory of a few real steps go, on all ranks, beside the plan's own shares.

It starts train/profiler.py for each rank as a run's workers are started, and puts their summaries together. Of a run it reads the
config, the plan and the text; it writes to RUN/profile/ alone, and for a config to the cache folder. No torch.
"""

import json
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

from paceline.check.format import format_findings
from paceline.check.probes.facts import DEFAULTS, PROBES, ask_probes
from paceline.config import Config, cache_dir
from paceline.config_file import find_config, resolve_config
from paceline.data.prepare import TokenDataset
from paceline.errors import Finding, PacelineError, PlanError, TrainingFailed, UsageError
from paceline.heartbeat import read_heartbeat
from paceline.launch.hosts import HOST_KEYS
from paceline.launch.run_text import planner, prepare_data, record_data, reopen_data
from paceline.launch.supervisor import Outcome
from paceline.launch.train import changed_run
from paceline.launch.trial import first_failure, memory_reason, read_reports, run_session, session_folder
from paceline.options import ProfileOptions
from paceline.plan.algorithms import ALGORITHMS
from paceline.plan.breakdown import COMPUTE, IDLE, PARTS, SENT
from paceline.plan.estimate import NAMES
from paceline.plan.forecast import plan_lines
from paceline.plan.machine import Machine, probe_machine
from paceline.plan.memory import fullest_state
from paceline.plan.planner import Plan, memory_setup
from paceline.plan.replan import MakePlan, replan
from paceline.plan.sizing import FULLEST_PROFILE, PROFILES, divisors
from paceline.rundir import RunDir, is_locked, write_atomic
from paceline.terminal import show_progress
from paceline.typed_fields import find_training_run
from paceline.units import format_bytes, format_ms, format_number_of, format_percent

WARMUP_STEPS = 6  # and those in which memory is traced
WORKER = (sys.executable, "-m", "paceline.train.profiler")
ENOUGH_USE = 0.8  # of a step, in computing
LEAST_GAIN = 0.03  # of a fix that is suggested
PLANNED_PHASES = {"forward": ("forward", "loss"), "backward": ("backward",), "update": ("optimizer",)}
PERFETTO = "https://ui.perfetto.dev"
SCRIPT_FIX = "use torch.profiler in the script; py-spy record --pid PID shows the Python code of a rank while it runs"


def profile_steps(options: ProfileOptions) -> tuple[dict[str, Any], Plan]:
    """Profiles the run or the config; returns what profile.json has, and the plan. Raises PacelineError where it cannot."""
    for key in HOST_KEYS:
        if key in options.keys:
            raise UsageError(f"profile runs on this host alone, without --{key}", fix=f"leave --{key} out")
    machine, name = probe_machine(), options.config
    if name is None or name.endswith((".toml", ".py")) or find_config(name).is_file():
        config = resolve_config(name, options.keys)
        dataset = prepare_data(config)
        make = planner(dataset)
        plan, run = make(config, machine), session_folder(cache_dir(config) / "profile")
    else:
        source = find_training_run(name, runs_dir=options.keys.get("runs_dir", "runs"), script_fix=SCRIPT_FIX)
        config, plan, dataset, make = plan_of_run(source, machine, options.keys)
        run = session_folder(
            source.path / "profile",
            fix=f"paceline profile {shlex.quote(str(source.config_toml))} writes to the cache folder",
        )
    write_atomic(run.plan_json, plan.to_json())
    record_data(run, dataset, config)
    torch = ask_probes(PROBES[:1], {**DEFAULTS, "cached_torch": cache_dir(config) / "torch.json"})["torch"] or {}
    ranks = run_ranks(
        run, plan, steps=options.steps, deterministic=config.deterministic, libuv=torch.get("libuv") is not False
    )
    plan = Plan.from_json(run.plan_json.read_text())  # with whether it compiles, where that was tried
    results = make_profile(ranks, plan, rows=lambda: largest_rows(config, machine, make))
    results |= {
        "steps": options.steps,
        "folder": str(run.path),
        "traces": [str(path) for path in sorted(run.path.glob("trace_*.gz"))],
    }
    write_atomic(run.path / "profile.json", json.dumps(results, indent=1) + "\n")
    return results, plan


def plan_of_run(
    source: RunDir, machine: Machine, changes: Mapping[str, Any]
) -> tuple[Config, Plan, TokenDataset, MakePlan]:
    """Returns config, plan and text of a run as it would be resumed here. Raises PacelineError for one that is training."""
    if is_locked(source):
        raise PacelineError(
            f"{source.name} is training: a profile on the same devices would slow both",
            fix="wait for it to end, or stop it with Ctrl-C and resume it after the profile",
        )
    config, plan = changed_run(source, changes, otherwise=f"paceline profile {shlex.quote(str(source.config_toml))}")
    dataset = reopen_data(source, config, is_elsewhere=not {"data", "val_data"}.isdisjoint(changes))
    make = planner(dataset)
    return config, replan(plan, config, machine, make=make, set_keys=frozenset(changes)), dataset, make


def run_ranks(run: RunDir, plan: Plan, *, steps: int, deterministic: bool, libuv: bool) -> list[dict[str, Any]]:
    """Returns each rank's summary. It removes the folder where the user has stopped it."""
    with show_progress() as progress:

        def on_tick() -> None:
            if heartbeat := read_heartbeat(run.progress(0)):
                progress(f"profiling {format_number_of(steps, 'step')}", heartbeat.step, 2 * steps + WARMUP_STEPS)

        command = [*WORKER, str(run.path), f"--steps={steps}", *(["--deterministic"] if deterministic else [])]
        try:
            outcome = run_session(run, plan, command, libuv=libuv, on_tick=on_tick)
        except KeyboardInterrupt:
            shutil.rmtree(run.path, ignore_errors=True)
            raise
    if outcome.state == "failed":
        raise failed_profile(run, plan, outcome)
    return read_reports(run.path, plan.world_size)


def failed_profile(run: RunDir, plan: Plan, outcome: Outcome) -> TrainingFailed:
    """Returns the error for ranks that did not end well."""
    text, fix = first_failure(run, outcome, during=" while it was profiled")
    smaller = [rows for rows in divisors(plan.device_batch_size) if rows < plan.device_batch_size]
    if memory_reason(outcome.failures[0], plan) and smaller:
        fix = f"--device-batch-size {smaller[0]}"
    return TrainingFailed(text, fix=fix)


def largest_rows(config: Config, machine: Machine, make: MakePlan) -> int | None:
    """Returns the largest micro-batch that the planner says fits; None where it finds none."""
    with suppress(PlanError):
        fullest = replace(config, device_batch_size=None, memory_share=PROFILES[FULLEST_PROFILE])
        return make(fullest, machine).device_batch_size
    return None


def make_profile(ranks: Sequence[Mapping[str, Any]], plan: Plan, *, rows: Callable[[], int | None]) -> dict[str, Any]:
    """Returns the ranks' summaries together, beside the plan. rows: returns the largest micro-batch that fits."""
    step_ms = fmean(rank["step_ms"] for rank in ranks)
    unprofiled, profiled = (
        {name: fmean(rank[kind][name] for rank in ranks) for name in ("ms", "cpu_ms")}
        for kind in ("unprofiled", "profiled")
    )
    planned_s = plan.cost["seconds"]["expected"] if plan.cost.get("seconds") else 0.0  # 0: not known
    planned = planned_parts(plan)
    parts: dict[str, dict[str, Any]] = {}
    for name in PARTS:
        values = [rank["parts"].get(name, 0.0) for rank in ranks]
        ms, expected_ms = fmean(values), planned.get(name)
        if ms or expected_ms:
            parts[name] = {
                "ms": ms,
                "share": ms / step_ms,
                "planned_ms": expected_ms,
                "planned_share": expected_ms / (1000 * planned_s) if expected_ms else None,
                "rank_ms": [round(value, 3) for value in values],
            }
    results = {
        "step_ms": step_ms,
        "unprofiled": unprofiled,
        "profiled": profiled,
        "overhead": {name: profiled[name] / unprofiled[name] - 1 for name in unprofiled},
        "planned_ms": 1000 * planned_s or None,
        "use": sum(parts[name]["share"] for name in COMPUTE if name in parts),
        "parts": parts,
        "hidden_ms": fmean(rank["hidden_ms"] for rank in ranks),
        "launches": max(rank["launches"] for rank in ranks),
        "waits": max(rank["waits"] for rank in ranks),
        "memory": memory_table(ranks, plan),
    }
    finding = low_use(results, plan, rows=rows)
    return {**results, "finding": finding.to_json() if finding else None}


def planned_parts(plan: Plan) -> dict[str, float]:
    """Returns the plan's milliseconds by part; empty where it has no time."""
    titles = {row.title for row in ALGORITHMS.values()}
    parts: dict[str, float] = {}
    for name, seconds in plan.cost.get("parts", {}).items():
        part = "optimizer" if name in titles else name
        parts[part] = parts.get(part, 0.0) + 1000 * seconds
    return parts


def memory_table(ranks: Sequence[Mapping[str, Any]], plan: Plan) -> dict[str, dict[str, int]]:
    """Returns the fullest rank's bytes by kind in each phase: what it holds all the time by arithmetic, the others as traced."""
    state = fullest_state(memory_setup(plan))
    held = {
        "weights": state.weights,
        "masters": state.masters,
        "states": state.states,
        "communication": state.communication,
    }
    buffers = state.gradients if plan.world_size > 1 else 0  # flat buffers; one rank's are made by each backward
    table = {}
    for phase, planned in PLANNED_PHASES.items():
        traced = max((rank["memory"][phase] for rank in ranks), key=lambda kinds: sum(kinds.values()))
        parts = {**held, **traced, "gradients": buffers + traced["gradients"]}
        table[phase] = {**parts, "total": sum(parts.values())}
        if "phases" in plan.memory:
            table[phase]["planned"] = max(plan.memory["phases"][name] for name in planned)
    return table


def low_use(results: Mapping[str, Any], plan: Plan, *, rows: Callable[[], int | None]) -> Finding | None:
    """Returns the finding where computing takes less than ENOUGH_USE of a step: what takes most of the remainder, and its fix."""
    use, step_ms, parts = results["use"], results["step_ms"], results["parts"]
    if use >= ENOUGH_USE:
        return None
    losses = {name: parts[name]["ms"] for name in IDLE if name in parts}
    if results["waits"] < 1 and "synchronizing" in losses:  # the step's own wait, after which the host begins again
        losses["host"] = losses.get("host", 0.0) + losses.pop("synchronizing")
    if sent := waiting_ms(parts):
        losses |= {"communication": min(sent), "imbalance": fmean(sent) - min(sent)}
    reason = max(losses, key=lambda name: losses[name])
    lost_ms = losses[reason]
    what = (
        f"compute takes {format_percent(use)} of a step;"
        f" the largest loss is {reason}, {format_ms(lost_ms)} or {format_percent(lost_ms / step_ms)}"
    )
    why, fix = cause_and_fix(reason, lost_ms, results, plan, rows=rows)
    return Finding("low-device-use", "warn", what, why, fix, {"use": use, "losses_ms": losses})


def waiting_ms(parts: Mapping[str, Any]) -> list[float]:
    """Returns how long each rank waits for messages: for the link, and for ranks that send later."""
    return [sum(values) for values in zip(*(parts[name]["rank_ms"] for name in SENT if name in parts), strict=True)]


def cause_and_fix(
    reason: str, lost_ms: float, results: Mapping[str, Any], plan: Plan, *, rows: Callable[[], int | None]
) -> tuple[str, str]:
    """Returns why a step loses time for this reason, and what helps."""
    on_gpu, parts = plan.device == "cuda", results["parts"]
    longer = f"--total-batch-size {2 * plan.total_batch_size}: half as many steps for as many tokens"
    match reason:
        case "data":
            return "the step waits until its text is loaded", "--cache-dir DIR on a local disk, for the token shards"
        case "communication":
            why = "messages take longer than the computing that could hide them"
            return why, f"{longer}; paceline comm --nproc {plan.world_size} shows whether the link is slow"
        case "imbalance":
            sent = waiting_ms(parts)
            slow = sent.index(min(sent))
            own_ms = [
                sum(parts[name]["rank_ms"][rank] for name in COMPUTE if name in parts) for rank in range(len(sent))
            ]
            others_ms = (sum(own_ms) - own_ms[slow]) / (len(own_ms) - 1)
            computing = f"it computes {format_ms(own_ms[slow])} of a step, they {format_ms(others_ms)}"
            why = f"the other ranks wait for rank {slow}: {computing}"
            heat = f"nvidia-smi -i {slow} -q -d PERFORMANCE,POWER while it trains: heat, power limit, other processes"
            return why, heat if on_gpu else "look at top: other processes use the cores of that rank"
        case "synchronizing":
            why = f"the host waits for the device {results['waits']:g} times within a step, and then the device for the host"
            return why, "look for cudaStreamSynchronize in the trace: .item(), .tolist() and .cpu() make it"
    launches = f"the {results['launches']:,} {'kernels' if on_gpu else 'operations'} of a step"
    why = f"Python and autograd take this time between {launches}"
    if on_gpu:
        why = f"the host does not start {launches} as fast as the GPU ends them"
    if on_gpu and plan.compile is False:
        return why, "--compile true: fewer and larger kernels"
    share_rows = plan.device_batch_size * plan.grad_accum_steps
    fitting = (rows() or 0) if plan.grad_accum_steps > 1 else 0
    larger = [count for count in divisors(share_rows) if plan.device_batch_size < count <= fitting]
    if larger:
        accum = share_rows // larger[0]
        gain = results["step_ms"] / (results["step_ms"] - lost_ms * (1 - accum / plan.grad_accum_steps)) - 1
        if gain >= LEAST_GAIN:
            micro_steps = f"{accum} instead of {plan.grad_accum_steps} micro-steps"
            return (
                why,
                f"--device-batch-size {larger[0]}: it fits, {micro_steps}, about {format_percent(gain)} more tok/s",
            )
    return why, f"{longer}; or a wider model"


def format_profile(results: Mapping[str, Any], plan: Plan, *, width: int) -> str:
    """Returns the screen: plan, time, memory, finding, traces."""
    blocks = [
        "\n".join(line for line in plan_lines(plan) if not line.startswith("length")),
        "\n".join(time_lines(results, plan, width=width)),
        "\n".join(memory_lines(results["memory"])),
    ]
    if results["finding"]:
        finding = Finding(**results["finding"])
        wrap = partial(textwrap.fill, width=min(width, 120), subsequent_indent=" " * (8 + len(finding.id)))
        blocks.append("\n".join(map(wrap, format_findings([finding]).splitlines())))
    traces = results["traces"]
    shown = traces[0] + (f" and {len(traces) - 1} more" if len(traces) > 1 else "")
    blocks.append(f"trace   {shown}\n        open it in {PERFETTO} or chrome://tracing")
    return "\n\n".join(blocks)


def time_lines(results: Mapping[str, Any], plan: Plan, *, width: int) -> list[str]:
    """Returns the table of parts, with the slowest and the fastest rank where the terminal is wide enough."""
    has_ranks = plan.world_size > 1 and width >= 90
    has_plan = results["planned_ms"] is not None

    def line(name: str, ms: float, planned_ms: float | None, rank_ms: Sequence[float]) -> str:
        text = f"{name:<22}{format_ms(ms):>10}{100 * ms / results['step_ms']:>8.1f} %"
        if has_plan:
            planned = format_ms(planned_ms) if planned_ms else "-"
            share = format_percent(planned_ms / results["planned_ms"], digits=1) if planned_ms else ""
            text += f"{planned:>14}{share:>10}"
        if has_ranks and rank_ms:
            text += f"     {format_ms(min(rank_ms))} to {format_ms(max(rank_ms))}"
        return text.rstrip()

    heads = [
        f"{'time of a step':<22}{'measured':>20}",
        f"{'planned':>24}" if has_plan else "",
        "     ranks" if has_ranks else "",
    ]
    lines = ["".join(heads)]
    lines += [line(name, part["ms"], part["planned_ms"], part["rank_ms"]) for name, part in results["parts"].items()]
    lines.append(line("step", results["step_ms"], results["planned_ms"], []))
    if plan.world_size > 1:
        lines.append(f"{'sent under other work':<22}{format_ms(results['hidden_ms']):>10}")
    ranks = f"{format_number_of(results['steps'], 'step')} on {format_number_of(plan.world_size, 'rank')}"
    lines += ["", f"compute takes {format_percent(results['use'], digits=1)} of a step; mean of {ranks}"]
    for name, what in {"ms": "by the clock", "cpu_ms": "of processor time"}.items():
        times = format_ms(results["unprofiled"][name]), f"{100 * results['overhead'][name]:+.0f} %"
        lines.append(f"without the profiler {times[0]} {what}, {times[1]} with it: medians")
    if not has_plan:
        lines.append("no time is planned: paceline plan --measure measures this device first")
    return lines


def memory_lines(memory: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Returns the table of bytes by kind at the fullest moment of each phase."""
    names = {"total": "in all", "planned": "planned", "rest": "temporaries", **NAMES}
    rows = [name for name in memory["forward"] if any(memory[phase][name] for phase in memory)]
    lines = [f"{'memory at the fullest':<22}" + "".join(f"{phase:>12}" for phase in memory)]
    for name in rows:
        lines.append(f"{names[name]:<22}" + "".join(f"{format_bytes(memory[phase][name]):>12}" for phase in memory))
    return lines
