"""
A training as a job of launch/attempts.py: the worker, its digest on the screen, and what a retry can change in the plan. No torch.

The worker decides nothing: it reads plan.json when it starts. config.toml keeps what the user requested. Once in each attempt the
measured step time is compared with the planned one, which also corrects the next plan of this machine.
"""

import json
import os
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.config import Config, cache_dir
from paceline.errors import Finding, PacelineError, PlanError
from paceline.explain.curve_verdict import add_findings
from paceline.explain.evidence import judge_run, read_samples
from paceline.explain.explanation import HEALTHY, Explanation, format_summary
from paceline.launch.attempts import Job
from paceline.launch.cluster import Cluster
from paceline.launch.digest import Digest, OnMetrics
from paceline.launch.env import EnvRow, Launch, env_elsewhere, worker_env
from paceline.launch.losses import check_folder, readmit, ready_hosts, record_joined
from paceline.launch.policy import Abilities, AttemptEnd, Decision
from paceline.launch.stop_signals import StopSignals
from paceline.launch.supervisor import Outcome, run_attempt
from paceline.model.manifest import better_checkpoint, newest_folder, saved_step
from paceline.plan.advice import step_gap
from paceline.plan.estimate import Range
from paceline.plan.forecast import step_setup
from paceline.plan.history import keep_attempt, keep_too_large
from paceline.plan.host import probe_cpu_cores
from paceline.plan.machine import probe_machine
from paceline.plan.memory import checkpoint_bytes
from paceline.plan.nvml import LostCards
from paceline.plan.planner import Plan
from paceline.plan.replan import MakePlan, fewer_ranks, format_change, replan, smaller_plan
from paceline.plan.speeds import remember_step
from paceline.plan.step_time import StepTime
from paceline.rundir import RunDir, append_event, read_json_lines, resume_command, write_atomic
from paceline.units import format_duration, format_number_of
from paceline.watch.events import end_state
from paceline.watch.measures import format_bpb
from paceline.watch.status import run_status

SAVE_BYTES_PER_S = 50e6  # of a slow disk
STOP_GRACE_S = 60.0
COMPARED_AFTER = 20  # steps of an attempt
SETTLED_AFTER = 10  # the steps before are slower: files, kernels and memory are used for the first time


@dataclass
class TrainingJob(Job):
    """One training. make: plans the run's text again."""

    config: Config
    make: MakePlan
    next_plan: Plan | None = None
    saved_before: str | None = None  # the newest checkpoint when a host became ready
    is_training = True
    workers_record_end = True

    @property
    def plan(self) -> Plan:
        """The current plan; a worker may have added whether it compiles."""
        return Plan.from_json(self.run.plan_json.read_text())

    def attempt(self, number: int, signals: StopSignals) -> Outcome:
        """Runs the worker on every rank and shows its digest."""
        plan, cache, cluster = self.plan, cache_dir(self.config), self.cluster
        env, _ = plan_env(plan, libuv=self.libuv)
        if cluster:
            cluster.settle()
        digest = Digest(
            self.run,
            num_steps=plan.num_steps,
            total_batch_size=plan.total_batch_size,
            stream=sys.stdout,
            on_metrics=watch_steps(self.run, plan, cache=cache, cluster=cluster),
            stop_grace_s=stop_grace_s(plan),
        )
        try:
            outcome = run_attempt(
                self.run,
                command=[sys.executable, "-m", "paceline.train.worker", str(self.run.path), "--attempt", str(number)],
                nproc=plan.world_size, attempt=number, env=env, cluster=cluster, lock_fd=self.lock, signals=signals,
                settings=env_elsewhere(os.environ, plan_launch(plan, libuv=self.libuv), self.options.env),
                stop_grace_s=stop_grace_s(plan), on_tick=lambda: self.tick(digest), on_move=self.move,
                hang_after_s=self.options.hang_after_s, libuv=self.libuv, health_every_s=self.options.health_every_s,
            )  # fmt: skip
            if cluster:
                cluster.finish_copies(keep_last=self.config.keep_last, is_over=lambda: signals.is_over)
        finally:
            digest.close()
        keep_attempt(cache, self.run, number)
        return outcome

    def save_s(self) -> float:
        """Returns how long a save may take by plan."""
        return planned_save_s(self.plan)

    def tick(self, digest: Digest) -> None:
        """Is called several times a second during an attempt."""
        digest.poll()
        if self.cluster:
            check_folder(self.cluster, self.run)
            self.cluster.keep_copies(keep_last=self.config.keep_last)
            self.invite(self.cluster)

    def invite(self, cluster: Cluster) -> None:
        """Ends the attempt after its next checkpoint when more hosts are ready than take part, and all of them can go on."""
        if not ready_hosts(cluster) or cluster.is_leaving:
            self.saved_before = None
            return
        saved = newest.name if (newest := newest_folder(self.run.checkpoints)) else ""
        if self.saved_before is None:
            self.saved_before = saved
        if saved != self.saved_before:
            self.saved_before = saved
            self.next_plan = self.plan_hosts(
                cluster, range(len(cluster.present) + len(ready_hosts(cluster)), len(cluster.present), -1)
            )
            cluster.is_leaving = self.next_plan is not None

    def regroup(self) -> None:
        """Lets the hosts that are ready take part in the next attempt, by the plan for them."""
        assert self.cluster and self.next_plan
        joined = readmit(self.cluster, self.next_plan.world_size // self.cluster.members[0].nproc)
        self.show([record_joined(self.cluster, joined)])
        self.write_plan(self.next_plan)

    def choose_hosts(self, count: int) -> int:
        """Returns how many of so many hosts can make the next attempt, and plans it where they are fewer than before."""
        assert self.cluster
        nproc = self.cluster.members[0].nproc
        if count >= (num_before := self.plan.world_size // nproc):
            return num_before
        plan = self.plan_hosts(self.cluster, range(count, self.options.min_hosts - 1, -1))
        if plan:
            self.write_plan(plan)
        return plan.world_size // nproc if plan else 0

    def abilities(self, end: AttemptEnd) -> Abilities:
        """Returns what can be changed on the devices that are here now, and plans it."""
        old = self.plan
        abilities = Abilities(own_trainer=True, rows_on_host=old.device == "cpu")
        self.next_plan = None
        if self.cluster and self.cluster.lost_in_attempt:
            return self.fewer_hosts(abilities, self.cluster)
        machine = self.cluster.machine if self.cluster else probe_machine()
        is_silent = machine.driver_error is not None and not isinstance(machine.driver_error, LostCards)
        if is_silent and old.device == "cuda":  # the number of remaining devices is unknown
            return abilities
        # what is known of other hosts is from before the run
        if self.cluster is None and old.device == "cuda" and len(machine.gpus) < old.world_size:
            if count := fewer_ranks(old, devices=len(machine.gpus)):
                config = replace(self.config, nproc=count, device_batch_size=None)  # the micro-batch is chosen again
                set_keys = frozenset({"nproc", "device_batch_size"})
                try:
                    self.next_plan = replan(old, config, machine, make=self.make, set_keys=set_keys)
                except PlanError:  # too large for the remaining devices
                    count = 0
            return replace(abilities, ranks_left=count)
        if end.retry == "smaller":
            self.next_plan = smaller_plan(old, self.config, machine, make=self.make)
            return replace(abilities, smaller=format_change(old, self.next_plan) if self.next_plan else None)
        return abilities

    def fewer_hosts(self, abilities: Abilities, cluster: Cluster) -> Abilities:
        """Returns what the remaining hosts can do, and plans it: the same steps on as many hosts as divide them."""
        lost, left = cluster.lost_in_attempt, [member.name for member in cluster.present]
        abilities = replace(abilities, lost_hosts=lost, ranks_left=0)
        self.next_plan = self.plan_hosts(cluster, range(len(left), self.options.min_hosts - 1, -1))
        if self.next_plan is None:
            return replace(abilities, hosts_left=tuple(left))
        count = self.next_plan.world_size // cluster.members[0].nproc
        cluster.limit(count)
        return replace(abilities, ranks_left=self.next_plan.world_size, hosts_left=tuple(left[:count]))

    def plan_hosts(self, cluster: Cluster, counts: Sequence[int]) -> Plan | None:
        """Returns the plan for the first of these numbers of hosts that divides the batch and holds the model."""
        config = replace(self.config, device_batch_size=None)
        for count in counts:
            machine = replace(cluster.machine, hosts=count)
            with suppress(PlanError):
                return replan(self.plan, config, machine, make=self.make, set_keys=frozenset({"device_batch_size"}))
        return None

    def change(self, decision: Decision) -> None:
        """Writes the next plan, if there is one."""
        if self.next_plan is None:
            return
        old, new = self.plan, self.next_plan
        if decision.action == "smaller":
            card_bytes = new.memory.get("card_bytes")
            available = None if card_bytes is None else card_bytes - bytes_of_other_processes(self.run)
            keep_too_large(cache_dir(self.config), old, card_bytes=available, source=self.run.name)
        self.write_plan(new)

    def write_plan(self, new: Plan) -> None:
        write_atomic(self.run.plan_json, new.to_json())
        names = ("world_size", "device_batch_size", "grad_accum_steps", "activation_checkpointing")
        append_event(self.run, "plan_changed", **{name: getattr(new, name) for name in names})

    def show(self, lines: Sequence[str], *, exit_code: int = 0) -> None:
        """Prints to stdout, or to stderr for a run that does not succeed."""
        print("\n".join(lines), file=sys.stderr if exit_code else sys.stdout, flush=True)

    def closing_lines(self, outcome: Outcome, *, seconds: float, time_line: str) -> list[str]:
        """Returns how far the training got, its last sample, where the run is and which commands come next."""
        run = self.run
        if outcome.state == "interrupted":
            events = list(read_json_lines(run.events))
            saved = saved_step(run.checkpoints)
            progress = f"checkpoint at step {saved:,}" if saved else "before the first checkpoint"
            head = f"interrupted after {format_duration(seconds)}, {progress}"
            # a job that is requeued continues the run, and a resume is refused
            commands = [] if end_state(events) == "queued" else [f"next    {resume_command(run)}"]
            return ["", head, time_line, *commands]
        status = run_status(run)
        first = first_step(run)
        own_steps = f", {status.step - first:,} of them" if first and status.step else ""
        ends = [event for event in read_json_lines(run.events) if event.get("event") == "finished"]
        val_bpb = ends[-1].get("val_bpb") if ends else None  # of the last weights alone
        bpb = format_bpb(val_bpb, status.eval_tokens)
        best = better_checkpoint(run.checkpoints, status.step or 0)
        take = "eval, sample and export take it with --step"
        best_lines = [f"best    val_bpb {best.val_bpb:.4f} at step {best.step:,}; {take} {best.step}"] if best else []
        if findings := judge_run(run):
            shown = format_summary(add_findings(Explanation(HEALTHY), findings))
            best_lines.append(f"note    {shown}: paceline explain {run.quoted}")
        lines = [
            "",
            f"done    {format_number_of(status.step or 0, 'step')}{own_steps} in {format_duration(seconds)}, val_bpb {bpb}",
            time_line,
            *best_lines,
            f"run     {run.path}",
            f'next    paceline sample {run.quoted} --prompt "..."',
            f"        paceline eval {run.quoted}",
            f"        {resume_command(run)} --num-steps {2 * self.plan.num_steps}",
        ]
        samples = [event for event in read_json_lines(run.events) if event.get("event") == "sample"]
        if not samples or samples[-1].get("step") != status.step:
            return lines
        prompt, text = (quoted(str(samples[-1].get(name, ""))) for name in ("prompt", "text"))
        head = f"sample  held-out text, which the model then continues ({run.sample(samples[-1]['step'])})"
        return ["", head, prompt, "        continued by the model", text, *lines]


def first_step(run: RunDir) -> int:
    """Returns the step from which the last command started or resumed the run."""
    num_launches, step = 0, None
    for event in read_json_lines(run.events):
        if event.get("event") == "launch":
            step, num_launches = None, num_launches + 1
        elif event.get("event") == "resumed" and step is None:
            step = event["step"]
    if step is None or num_launches < 2:  # the first command began at 0, whatever its later attempts resumed from
        return 0
    return int(step)


def quoted(text: str) -> str:
    """Returns a text of several lines for the screen, behind a margin and without control characters."""
    shown = "".join(char if char.isprintable() or char == "\n" else " " for char in text).strip("\n").rstrip()
    return textwrap.indent(shown, "  | ", lambda _: True)


def plan_env(plan: Plan, *, libuv: bool) -> tuple[dict[str, str], list[EnvRow]]:
    """Returns the workers' environment for a plan, and its table. libuv: whether this torch has it."""
    return worker_env(os.environ, plan_launch(plan, libuv=libuv))


def plan_launch(plan: Plan, *, libuv: bool) -> Launch:
    """Returns what the environment of a plan's ranks depends on."""
    return Launch(plan.world_size, plan.device, probe_cpu_cores() * plan.hosts, libuv=libuv)


def stop_grace_s(plan: Plan) -> float:
    """Returns how long ranks may take to stop: what a save needs, and a minute."""
    return STOP_GRACE_S + planned_save_s(plan)


def planned_save_s(plan: Plan) -> float:
    """Returns the seconds from an order to stop to the end of the save, at most: two steps, and a checkpoint to a slow disk."""
    step = planned_step(plan.cost)
    saving_s = checkpoint_bytes(plan) / SAVE_BYTES_PER_S
    return saving_s + (2 * step.seconds.high if step and step.seconds else 0.0)


def bytes_of_other_processes(run: RunDir) -> int:
    """Returns the bytes that other processes used of a GPU at the last sample, the most of any GPU; 0 where that is unknown."""
    used: dict[tuple[str, int], int] = {}
    for path in run.health_dir.glob("*.jsonl"):
        for line in read_samples(path, since=""):
            for gpu in line.get("gpus", ()):
                if "processes" in gpu:
                    sizes = [process.get("bytes", 0) for process in gpu["processes"] if process.get("ours") is False]
                    used[path.stem, gpu["index"]] = sum(sizes)
    return max(used.values(), default=0)


def watch_steps(run: RunDir, plan: Plan, *, cache: Path, cluster: Cluster | None = None) -> OnMetrics:
    """Returns the function that takes the lines of metrics.jsonl; it does nothing where the plan has no step time."""
    planned = planned_step(plan.cost)
    if planned is None or planned.seconds is None:
        return lambda record: None

    def gap(measured_s: float) -> Finding | None:
        machine = cluster.machine if cluster else probe_machine()
        setup = step_setup(plan, machine, cache=cache)
        # a step over a network says nothing about this device's speed
        if setup.speeds is not None and planned.uncorrected_s is not None and plan.hosts == 1:
            # a cache that cannot be written makes the next plan less precise, and does not stop this run
            with suppress(PacelineError):
                remember_step(
                    cache, setup.speeds, key=setup.key, predicted_s=planned.uncorrected_s, measured_s=measured_s
                )
        return step_gap(setup, planned, measured_s)

    return StepWatch(run, planned_s=planned.seconds.expected, gap=gap).add


def planned_step(cost: Mapping[str, Any]) -> StepTime | None:
    """Returns the step time that plan.json has; None where it has none."""
    if not cost.get("seconds"):
        return None
    values = {field.name: cost[field.name] for field in fields(StepTime) if field.name in cost}
    ranges = {name: Range(**values[name]) for name in ("seconds", "tok_per_sec") if values[name] is not None}
    return StepTime(**{**values, **ranges})


class StepWatch:
    """Compares the measured step time with the planned one, once. A line's step_ms is the mean since the line before.

    gap: seconds of a measured step -> a finding about a large difference.
    """

    def __init__(self, run: RunDir, *, planned_s: float, gap: Callable[[float], Finding | None]):
        self.run, self.planned_s, self.gap = run, planned_s, gap
        self.lines: list[tuple[int, float]] = []  # step and step_ms of the attempt, until they are compared
        self.done = False

    def add(self, record: dict[str, Any]) -> None:
        """Takes a line of metrics.jsonl. The comparison is an event; a large difference becomes a finding."""
        step, step_ms = record.get("step"), record.get("step_ms")
        if self.done or not isinstance(step, int) or not isinstance(step_ms, int | float):
            return
        self.lines.append((step, step_ms))
        first = self.lines[0][0]
        settled = [(b - a, ms) for (a, _), (b, ms) in pairwise(self.lines) if b >= first + SETTLED_AFTER]
        if step < first + COMPARED_AFTER - 1 or not settled:
            return
        self.done = True
        measured_s = sum(steps * ms for steps, ms in settled) / sum(steps for steps, _ in settled) / 1000
        append_event(self.run, "step_time", step=step, planned_s=self.planned_s, measured_s=round(measured_s, 6))
        if finding := self.gap(measured_s):
            findings: list[dict[str, Any]] = []
            with suppress(OSError, ValueError):  # --no-check does not write the file
                findings = json.loads(self.run.findings.read_text())
            write_atomic(self.run.findings, json.dumps([*findings, finding.to_json()], indent=1) + "\n")
            append_event(self.run, "finding", **finding.to_json())
