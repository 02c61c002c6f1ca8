"""
A trial of a plan before the run (train/probe.py): of one that fills most of a device, or one whose length is a time.

The first gets a smaller micro-batch if memory runs out, the second its number of steps. The trial starts one process per rank as a
run does, in its own folder under the cache. No torch.
"""

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.config import Config
from paceline.errors import PacelineError, TrainingFailed
from paceline.launch.failure import NO_PRIMITIVE, OUT_OF_MEMORY, Failure
from paceline.launch.job import plan_env
from paceline.launch.supervisor import run_attempt
from paceline.launch.watchdog import Watchdog
from paceline.plan.history import PROBE, MemoryRecord, keep_record, record_of
from paceline.plan.machine import Machine
from paceline.plan.planner import MakePlan, Plan, replan
from paceline.plan.shapes import choose_eval_tokens, steps_of_time
from paceline.plan.sizing import divisors
from paceline.rundir import RunDir, read_json_lines
from paceline.terminal import progress_line
from paceline.units import format_bytes, format_ms, format_number_of, parse_duration

TRIAL_SHARE = 0.85  # of a device's memory: a plan below has room for what arithmetic does not see
PROBE_COMMAND = (sys.executable, "-m", "paceline.train.probe")
STOP_GRACE_S = 1.0  # there is nothing to save


class ProbeFailed(PacelineError):
    """The trial failed for another reason than memory, so the run would fail too."""

    exit_code = TrainingFailed.exit_code


@dataclass(frozen=True)
class Speed:
    """What a trial measured on its slowest rank, in seconds. start_s: from the launch until the model is ready."""

    start_s: float
    step_s: float
    eval_s_per_token: float


@dataclass(frozen=True)
class TrialOutcome:
    """The plan that passed, with its rows. text: the trials in one line. speed: measured where the plan's length is a time."""

    plan: Plan
    text: str
    speed: Speed | None = None


@dataclass(frozen=True)
class Trial:
    """What one trial measured; one record for eager and compiled each, as far as they were tried."""

    records: tuple[MemoryRecord, ...]
    speed: Speed | None


@dataclass(frozen=True)
class OutOfMemory:
    """The trial ran out of memory."""

    rank: int | None
    reason: str


def try_plan(
    config: Config, plan: Plan, machine: Machine, *, make: MakePlan, cache: Path, libuv: bool
) -> tuple[Config, Plan, list[str]]:
    """Tries a plan on its devices if that is needed; returns the config and the plan that follow, and lines about the trial.

    A plan that fills most of its devices gets a smaller micro-batch if memory runs out; a length that is a time becomes a number of
    steps. make: plans the run's text again. Raises PacelineError where the run would fail.
    """
    if not wants_probe(plan):
        return config, plan, []
    trial = find_rows(plan, cache=cache, env=plan_env(plan, libuv=libuv)[0], libuv=libuv)
    lines = [trial.text] if trial.text else []
    if trial.speed is not None:
        config, text = with_length(config, trial.plan, trial.speed)
        print(text, flush=True)
        lines.append(text)
    return config, replan(trial.plan, config, machine, make=make), lines


def wants_probe(plan: Plan) -> bool:
    """Whether a plan is tried before the run."""
    return plan.time is not None or fills_memory(plan)


def fills_memory(plan: Plan) -> bool:
    """Whether the planner chose the rows for most of a device's memory; rows that the user has set do not count."""
    return plan.memory_share is not None and plan.memory_share >= TRIAL_SHARE


def find_rows(
    plan: Plan, *, cache: Path, env: Mapping[str, str], libuv: bool, probe: tuple[str, ...] = PROBE_COMMAND
) -> TrialOutcome:
    """Returns the plan with the largest micro-batch that passes, from the planned one down. `cache` remembers what it used.

    It prints a line about memory, where that was in question. Raises PacelineError if nothing fits, KeyboardInterrupt on Ctrl-C.
    """
    failures: list[str] = []
    share_rows = plan.device_batch_size * plan.grad_accum_steps
    fixed_rows = plan.memory_share is None  # the user has set them
    with progress_line("trying two steps") as on_try:
        candidates = [rows for rows in divisors(share_rows) if rows <= plan.device_batch_size]
        for rows in candidates[:1] if fixed_rows else candidates:
            on_try(format_number_of(rows, "row"))
            candidate = replace(plan, device_batch_size=rows, grad_accum_steps=share_rows // rows)
            trial = run_trial(candidate, cache=cache, env=env, libuv=libuv, probe=probe)
            if not isinstance(trial, OutOfMemory):
                break
            place = "" if trial.rank is None else f" on rank {trial.rank}"
            verb = "does" if rows == 1 else "do"
            failures.append(f"{format_number_of(rows, 'row')} {verb} not fit{place} ({trial.reason})")
        else:
            smaller = f"--depth {max(1, plan.model.n_layer - 1)}"
            fix = smaller if plan.activation_checkpointing else f"--activation-checkpointing, or {smaller}"
            raise PacelineError(f"probe: {'; '.join(failures)}", fix="--device-batch-size auto" if fixed_rows else fix)
    for record in trial.records:
        keep_record(cache, record)
    text = ""
    if failures or fills_memory(plan):
        text = f"probe: {'; '.join([*failures, format_fit(candidate, trial.records)])}"
        print(text, flush=True)
    return TrialOutcome(candidate, text, trial.speed)


def with_length(config: Config, plan: Plan, speed: Speed) -> tuple[Config, str]:
    """Returns the config with as many steps as end in config.time at the measured speed, and a line about it.

    plan: with the rows that passed. Where eval_tokens is automatic, it becomes what a tenth of the time allows.
    """
    assert config.time is not None
    eval_s = None if config.eval_tokens is None else config.eval_tokens * speed.eval_s_per_token
    time_s = parse_duration(config.time) - speed.start_s
    num_steps = steps_of_time(time_s, step_s=speed.step_s, eval_s=eval_s, eval_every=config.eval_every)
    eval_tokens = choose_eval_tokens(
        config,
        num_steps=num_steps,
        total_batch_size=plan.total_batch_size,
        cost=speed.eval_s_per_token * plan.total_batch_size / speed.step_s,
    )
    step = f"{speed.step_s:.2f} s" if speed.step_s >= 0.1 else format_ms(1000 * speed.step_s)
    least = ", the fewest that a run takes" if num_steps * speed.step_s > time_s else ""
    text = f"length  {num_steps:,} steps: {step} a step, {config.time} requested{least}"
    return replace(config, time=None, num_steps=num_steps, eval_tokens=eval_tokens), text


def format_fit(plan: Plan, records: tuple[MemoryRecord, ...]) -> str:
    """Returns '7 rows: 21.3 GiB of 31.8 GiB, kept'."""
    sizes = [record.driver_bytes or record.reserved_bytes for record in records]
    used = max((size for size in sizes if size is not None), default=None)
    card = plan.memory.get("card_bytes")
    of_card = f" of {format_bytes(card)}" if card else ""
    rows = format_number_of(plan.device_batch_size, "row")
    return f"{rows}: {'n/a' if used is None else format_bytes(used)}{of_card}, kept"


def run_trial(
    plan: Plan, *, cache: Path, env: Mapping[str, str], libuv: bool, probe: tuple[str, ...]
) -> Trial | OutOfMemory:
    """Runs one trial. It removes its folder unless something else than memory failed, whose logs the user needs."""
    run = new_folder(cache)
    plan_json = run.path / "plan.json"
    plan_json.write_text(plan.to_json())
    failed, launched = False, time.time()
    try:
        outcome = run_attempt(
            run,
            command=[*probe, str(plan_json), str(run.path)],
            nproc=plan.world_size,
            attempt=1,
            env=env,
            lock_fd=None,
            on_tick=lambda: None,
            watchdog=Watchdog(run, 1, plan.world_size),
            stop_grace_s=STOP_GRACE_S,
            libuv=libuv,
        )
        if outcome.state == "interrupted":
            raise KeyboardInterrupt
        if outcome.state == "finished":
            return read_trial(run, plan, launched=launched)
        hung = any(event.get("event") == "hang" for event in read_json_lines(run.events))
        for failure in outcome.failures:
            if not hung and (reason := memory_reason(failure, plan)):
                return OutOfMemory(failure.rank, reason)
        failed, root = True, outcome.failures[0]
        source = "the launch" if root.rank is None else f"rank {root.rank}"
        raise ProbeFailed(
            f"two steps were tried before the run, and {source} failed: {root.message}",
            fix=root.fix or f"read the logs: {run.logs(1)}; --profile balanced starts without the trial",
        )
    finally:
        if not failed:
            shutil.rmtree(run.path, ignore_errors=True)


def new_folder(cache: Path) -> RunDir:
    """Makes a run folder for one trial. Raises PacelineError where the cache cannot be written."""
    parent = cache / "probe"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return RunDir(Path(tempfile.mkdtemp(dir=parent)).resolve())
    except OSError as error:
        raise PacelineError(
            f"{parent} cannot be written: {error.strerror}", fix="--cache-dir DIR in a place you can write"
        ) from error


def memory_reason(failure: Failure, plan: Plan) -> str | None:
    """Returns how memory ran out, if it did. The kernel kills a process that takes a host's last memory without any message."""
    if failure.consequence:
        return None
    if OUT_OF_MEMORY.search(failure.message):
        return "out of memory"
    if plan.device == "cpu" and (match := NO_PRIMITIVE.search(failure.message)):
        return f"{match[0]}, as where memory runs out"
    if plan.device == "cpu" and failure.signal == "SIGKILL":
        return "ended by SIGKILL, as the kernel does when memory runs out"
    return None


def read_trial(run: RunDir, plan: Plan, *, launched: float) -> Trial:
    """Returns what the ranks measured. launched: Unix seconds."""
    ranks: list[list[dict[str, Any]]] = [
        json.loads((run.path / "probe" / f"{rank}.json").read_text()) for rank in range(plan.world_size)
    ]
    stages = list(zip(*ranks, strict=True))
    records = (record_of(replace(plan, compile=stage[0]["compiled"]), stage, source=PROBE) for stage in stages)
    known = tuple(record for record in records if record is not None)
    if plan.time is None:
        return Trial(known, None)
    # the worker, too, takes the faster of the two stages
    return Trial(known, min((speed_of(stage, launched) for stage in stages), key=lambda speed: speed.step_s))


def speed_of(stage: Sequence[Mapping[str, float]], launched: float) -> Speed:
    """Returns the speed of the slowest rank in a stage, eager or compiled. launched: Unix seconds."""
    return Speed(
        max(rank["ready_time"] for rank in stage) - launched,
        *(max(rank[name] for rank in stage) for name in ("step_s", "eval_s_per_token")),
    )
