"""
A trial of a plan before the run (train/probe.py): of one that fills most of a device, or one whose length is a time.

The first gets a smaller micro-batch if memory runs out, the second its number of steps. The trial starts one process per rank as a
run does, on all its hosts, in its own folder under the cache. No torch.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.config import Config, cache_dir
from paceline.errors import PacelineError, TrainingFailed
from paceline.launch.cluster import Cluster
from paceline.launch.env import env_elsewhere
from paceline.launch.failure import NO_PRIMITIVE, OUT_OF_MEMORY, Failure
from paceline.launch.job import plan_env, plan_launch
from paceline.launch.supervisor import Outcome, run_attempt
from paceline.plan.history import PROBE, MemoryRecord, keep_record, record_of
from paceline.plan.machine import Machine
from paceline.plan.planner import Plan
from paceline.plan.replan import MakePlan, replan
from paceline.plan.shapes import choose_eval_tokens, steps_of_time
from paceline.plan.sizing import divisors
from paceline.rundir import RunDir
from paceline.terminal import progress_line
from paceline.units import format_bytes, format_duration, format_ms, format_number_of, parse_duration

TRIAL_SHARE = 0.85  # of a device's memory: a plan below has room for what arithmetic does not see
PROBE_COMMAND = (sys.executable, "-m", "paceline.train.probe")
STOP_GRACE_S = 1.0  # there is nothing to save
KEEP_FOLDERS = 10  # of one kind, with every rank's log


MakeCluster = Callable[[], Cluster | None]  # the hosts that a trial runs on; None for this one alone


@dataclass(frozen=True)
class Speed:
    """What a trial measured on its slowest rank, in seconds. start_s: from the launch until the model is ready."""

    start_s: float
    step_s: float
    eval_s_per_token: float


@dataclass(frozen=True)
class Trial:
    """What one trial measured; one record for eager and compiled each, as far as they were tried.

    speed: where the plan's length is a time. out_of_memory: 'on rank 1 (out of memory)' where the trial did not fit.
    """

    records: tuple[MemoryRecord, ...] = ()
    speed: Speed | None = None
    out_of_memory: str = ""


def try_plan(
    config: Config, plan: Plan, machine: Machine, *, make: MakePlan, libuv: bool, cluster: MakeCluster = lambda: None
) -> tuple[Config, Plan, list[str]]:
    """Tries a plan on its devices if that is needed; returns the config and the plan that follow, and lines about the trial.

    A plan that fills most of its devices gets a smaller micro-batch if memory runs out; a length that is a time becomes a number of
    steps. make: plans the run's text again. cluster: the hosts of one trial. Raises PacelineError where the run would fail.
    """
    if plan.time is None and not fills_memory(plan):
        return config, plan, []
    plan, text, speed = find_rows(plan, cache=cache_dir(config), libuv=libuv, cluster=cluster)
    lines = [text] if text else []
    if speed is not None:
        config, text = with_length(config, plan, speed)
        print(text, flush=True)
        lines.append(text)
    return config, replan(plan, config, machine, make=make), lines


def fills_memory(plan: Plan) -> bool:
    """Whether the planner chose the rows for most of a device's memory; rows that the user has set do not count."""
    return plan.memory_share is not None and plan.memory_share >= TRIAL_SHARE


def find_rows(
    plan: Plan, *, cache: Path, libuv: bool, probe: tuple[str, ...] = PROBE_COMMAND, cluster: MakeCluster = lambda: None
) -> tuple[Plan, str, Speed | None]:
    """Returns the plan with the largest micro-batch that passes, from the planned one down, a line about memory, and the speed.

    It prints the line, where memory was in question. `cache` remembers what was used. Raises PacelineError if nothing fits,
    KeyboardInterrupt on Ctrl-C.
    """
    failures: list[str] = []
    share_rows = plan.device_batch_size * plan.grad_accum_steps
    fixed_rows = plan.memory_share is None  # the user has set them
    with progress_line("trying two steps") as on_try:
        candidates = [rows for rows in divisors(share_rows) if rows <= plan.device_batch_size]
        for rows in candidates[:1] if fixed_rows else candidates:
            size = format_number_of(rows, "row")
            on_try(size)
            candidate = replace(plan, device_batch_size=rows, grad_accum_steps=share_rows // rows)
            trial = run_trial(candidate, cache=cache, libuv=libuv, probe=probe, cluster=cluster())
            if not trial.out_of_memory:
                break
            failures.append(f"{size} {'does' if rows == 1 else 'do'} not fit {trial.out_of_memory}")
        else:
            smaller = f"--depth {max(1, plan.model.n_layer - 1)}"
            fix = smaller if plan.activation_checkpointing is True else f"--activation-checkpointing, or {smaller}"
            raise PacelineError(f"probe: {'; '.join(failures)}", fix="--device-batch-size auto" if fixed_rows else fix)
    for record in trial.records:
        keep_record(cache, record)
    if not failures and not fills_memory(plan):
        return candidate, "", trial.speed
    used_bytes = max((record.driver_bytes or record.reserved_bytes or 0 for record in trial.records), default=0)
    card_bytes = plan.memory.get("card_bytes")
    of_card = f" of {format_bytes(card_bytes)}" if card_bytes else ""
    fit = f"{size}: {format_bytes(used_bytes) if used_bytes else 'n/a'}{of_card}, kept"
    text = f"probe: {'; '.join([*failures, fit])}"
    print(text, flush=True)
    return candidate, text, trial.speed


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
    text = f"time    {config.time} at {step} a step: {format_number_of(num_steps, 'step')}"
    if (run_s := num_steps * speed.step_s) > time_s:
        shorter = f"--num-steps {max(1, int(time_s / speed.step_s))}"
        text += f"; these are the fewest of a run by time and take about {format_duration(run_s)}: {shorter} is shorter"
    return replace(config, time=None, num_steps=num_steps, eval_tokens=eval_tokens), text


def run_trial(plan: Plan, *, cache: Path, libuv: bool, probe: tuple[str, ...], cluster: Cluster | None) -> Trial:
    """Runs one trial. It removes its folder unless something else than memory failed, whose logs the user needs."""
    run = session_folder(cache / "probe")
    run.plan_json.write_text(plan.to_json())
    failed, launched = False, time.time()
    try:
        if cluster:
            cluster.connect(run, text=None, is_kept=False)
            cluster.settle()
        outcome = run_session(run, plan, [*probe, str(run.path)], libuv=libuv, cluster=cluster)
        if outcome.state == "finished":
            ahead_s = {rank: member.clock_s for member in cluster.started for rank in member.ranks} if cluster else {}
            return read_trial(run, plan, launched=launched, ahead_s=ahead_s)
        for failure in outcome.failures:
            if not outcome.hang and (reason := memory_reason(failure, plan)):
                place = "" if failure.rank is None else f"on {failure.subject} "
                return Trial(out_of_memory=f"{place}({reason})")
        failed = True
        text, fix = first_failure(run, outcome)
        if outcome.failures[0].fix is None and not plan.time:
            fix += "; --profile balanced starts without the trial"
        raise TrainingFailed(f"two steps were tried before the run, and {text}", fix=fix)
    finally:
        if cluster:
            cluster.close()
        if not failed:
            shutil.rmtree(run.path, ignore_errors=True)


def session_folder(parent: Path, *, fix: str = "--cache-dir DIR in a place you can write") -> RunDir:
    """Returns a new folder in parent and deletes all but the newest of the earlier ones."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=parent)).resolve()
    except OSError as error:
        raise PacelineError(f"{parent} cannot be written: {error.strerror}", fix=fix) from error
    # the clock may have been set back: the new folder is not always the last by name
    earlier = sorted(folder for folder in parent.iterdir() if folder.name != path.name)
    for old in earlier[: -(KEEP_FOLDERS - 1)]:
        shutil.rmtree(old, ignore_errors=True)
    return RunDir(path)


def run_session(
    run: RunDir,
    plan: Plan,
    command: list[str],
    *,
    libuv: bool,
    cluster: Cluster | None = None,
    on_tick: Callable[[], None] = lambda: None,
    hang_after_s: float | None = None,
) -> Outcome:
    """Runs a measurement's command on every rank of a plan, as a run's workers are started. Raises KeyboardInterrupt on Ctrl-C."""
    outcome = run_attempt(
        run,
        command=command,
        nproc=plan.world_size,
        env=plan_env(plan, libuv=libuv)[0],
        settings=env_elsewhere(os.environ, plan_launch(plan, libuv=libuv), ()),
        cluster=cluster,
        on_tick=on_tick,
        hang_after_s=hang_after_s,
        stop_grace_s=STOP_GRACE_S,
        libuv=libuv,
    )
    if outcome.state == "interrupted":
        raise KeyboardInterrupt
    return outcome


def first_failure(run: RunDir, outcome: Outcome, *, during: str = "") -> tuple[str, str]:
    """Returns which rank of a measurement failed first and why, and what to do. during: what failed, behind the rank."""
    root = outcome.failures[0]
    subject = "the launch" if root.subject == "launch" else root.subject
    return f"{subject} failed{during}: {root.message}", root.fix or f"read the logs: {run.logs(1)}"


def read_reports(folder: Path, world_size: int) -> list[Any]:
    """Returns the report that each rank of a session has written."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]


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


def read_trial(run: RunDir, plan: Plan, *, launched: float, ahead_s: Mapping[int, float]) -> Trial:
    """Returns what the ranks measured. launched: Unix seconds. ahead_s: how far the clocks of ranks on other hosts are ahead."""
    ranks = read_reports(run.path / "probe", plan.world_size)
    stages = list(zip(*ranks, strict=True))
    records = (record_of(replace(plan, compile=stage[0]["compiled"]), stage, source=PROBE) for stage in stages)
    known = tuple(record for record in records if record is not None)
    if plan.time is None:
        return Trial(known)
    names = ("ready_time", "step_s", "eval_s_per_token")
    for rank, own_stages in enumerate(ranks):
        for stage in own_stages:
            stage["ready_time"] -= ahead_s.get(rank, 0.0)
    slowest = [[max(rank[name] for rank in stage) for name in names] for stage in stages]
    speeds = [Speed(ready_time - launched, step_s, eval_s) for ready_time, step_s, eval_s in slowest]
    # the worker, too, takes the faster of the two stages
    return Trial(known, min(speeds, key=lambda speed: speed.step_s))
