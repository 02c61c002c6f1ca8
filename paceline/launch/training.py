"""
A training run as launch/attempts.py attempts it: the worker, its digest on the screen, and what of the plan can give way.

The worker decides nothing: it reads plan.json again. What the user asked stays in config.toml. No torch.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from paceline.config import Config
from paceline.errors import PlanError
from paceline.explain.samples import read_samples
from paceline.launch.digest import Digest
from paceline.launch.pace import planned_step, watch_steps
from paceline.launch.policy import Abilities, Decision, Ended
from paceline.launch.supervisor import Caught, Outcome, run_attempt
from paceline.launch.watchdog import Watchdog
from paceline.plan.again import MakePlan, fewer_ranks, plan_again, smaller_plan, words_of_change
from paceline.plan.kept import keep_attempt
from paceline.plan.machine import Machine, probe_machine
from paceline.plan.memory import checkpoint_bytes
from paceline.plan.planner import Plan
from paceline.plan.too_large import keep_too_large
from paceline.rundir import RunDir, append_event, write_atomic

SAVE_BYTES_PER_S = 50e6  # of a slow disk
STOP_GRACE_S = 60.0


class TrainingJob:
    """env_of: the workers' environment for a plan. make: a plan for the run's text. cache: paceline's folder."""

    def __init__(
        self,
        run: RunDir,
        config: Config,
        *,
        make: MakePlan,
        env_of: Callable[[Plan], dict[str, str]],
        cache: Path,
        lock: int,
        libuv: bool,
        hang_after_s: float | None = None,
        health_every_s: float = 0.0,
        probe: Callable[[], Machine] = probe_machine,
    ):
        self.run = run
        self.config = config
        self.make = make
        self.env_of = env_of
        self.cache = cache
        self.lock = lock
        self.libuv = libuv
        self.hang_after_s = hang_after_s
        self.health_every_s = health_every_s
        self.probe = probe
        self.next_plan: Plan | None = None

    @property
    def plan(self) -> Plan:
        """As it stands: a worker may have added whether it compiles."""
        return Plan.from_json(self.run.plan_json.read_text())

    def attempt(self, number: int, caught: Caught) -> Outcome:
        plan = self.plan
        digest = Digest(
            self.run,
            num_steps=plan.num_steps,
            total_batch_size=plan.total_batch_size,
            stream=sys.stdout,
            on_metrics=watch_steps(self.run, plan, cache=self.cache),
        )
        try:
            outcome = run_attempt(
                self.run,
                command=[sys.executable, "-m", "paceline.train.worker", str(self.run.path), "--attempt", str(number)],
                nproc=plan.world_size,
                attempt=number,
                env=self.env_of(plan),
                lock_fd=self.lock,
                caught=caught,
                stop_grace_s=stop_grace_s(plan),
                on_tick=digest.poll,
                watchdog=Watchdog(self.run, number, plan.world_size, hang_after_s=self.hang_after_s),
                libuv=self.libuv,
                health_every_s=self.health_every_s,
            )
        finally:
            digest.close()
        keep_attempt(self.cache, self.run, number)
        return outcome

    def came_further(self, ended: Ended) -> bool:
        return False  # its checkpoints tell

    def abilities(self, ended: Ended) -> Abilities:
        old = self.plan
        can = Abilities(own_trainer=True, rows_on_host=old.device == "cpu")
        self.next_plan = None
        try:
            machine = self.probe()
        except PlanError:  # a driver that is silent: how many devices are left is not known
            return can
        if old.device == "cuda" and len(machine.gpus) < old.world_size:
            return replace(can, ranks_left=self.plan_fewer_ranks(old, machine))
        if ended.retry == "smaller":
            self.next_plan = smaller_plan(old, self.config, machine, make=self.make)
            return replace(can, smaller=words_of_change(old, self.next_plan) if self.next_plan else None)
        return can

    def plan_fewer_ranks(self, old: Plan, machine: Machine) -> int:
        """How many the run can go on with, 0 for none; next_plan is theirs."""
        count = fewer_ranks(old, devices=len(machine.gpus))
        if count:
            try:
                self.next_plan = self.plan_of_ranks(old, count, machine)
            except PlanError:  # too large for those that are left
                return 0
        return count

    def plan_of_ranks(self, old: Plan, count: int, machine: Machine) -> Plan:
        """The same steps on fewer devices; how many rows at once is worked out anew."""
        config = replace(self.config, nproc=count, device_batch_size=None)
        return plan_again(old, config, machine, make=self.make, changed=frozenset({"nproc", "device_batch_size"}))

    def change(self, decision: Decision) -> None:
        if self.next_plan is None:
            return
        old, new = self.plan, self.next_plan
        if decision.action == "smaller":
            card_bytes = new.memory.get("card_bytes")
            had = None if card_bytes is None else card_bytes - held_by_others(self.run)
            keep_too_large(self.cache, old, card_bytes=had, source=self.run.name)
        write_atomic(self.run.plan_json, new.to_json())
        changed = {
            name: getattr(new, name)
            for name in ("world_size", "device_batch_size", "grad_accum_steps", "activation_checkpointing")
        }
        append_event(self.run, "plan_changed", **changed)

    def say(self, lines: list[str]) -> None:
        print("\n".join(lines), flush=True)


def stop_grace_s(plan: Plan) -> float:
    """What ranks that are told to stop may take: two steps, a checkpoint, and a minute."""
    step = planned_step(plan.cost).seconds if plan.cost.get("seconds") else None
    saving_s = checkpoint_bytes(plan.model, optimizer=plan.optimizer) / SAVE_BYTES_PER_S
    return STOP_GRACE_S + saving_s + (2 * step.high if step else 0.0)


def held_by_others(run: RunDir) -> int:
    """Bytes that processes of others held of a GPU at the last samples, the most of any; 0 where no driver tells."""
    held: dict[tuple[str, int], int] = {}
    for path in run.health_dir.glob("*.jsonl"):
        for line in read_samples(path, since="").lines:
            for gpu in line.get("gpus", ()):
                if "processes" in gpu:
                    others = [each.get("bytes", 0) for each in gpu["processes"] if each.get("ours") is False]
                    held[path.stem, gpu["index"]] = sum(others)
    return max(held.values(), default=0)
