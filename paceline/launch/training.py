"""
A training run as launch/attempts.py attempts it: the worker, its digest on the screen, and what of the plan can give way.

The worker decides nothing: it reads plan.json again. What the user asked stays in config.toml. No torch.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from paceline.config import Config
from paceline.errors import PlanError
from paceline.launch.digest import Digest
from paceline.launch.pace import watch_steps
from paceline.launch.policy import Abilities, Decision, Ended
from paceline.launch.supervisor import Outcome, run_attempt
from paceline.launch.watchdog import Watchdog
from paceline.plan.again import MakePlan, fewer_ranks, plan_again, smaller_plan, words_of_change
from paceline.plan.kept import keep_attempt
from paceline.plan.machine import Machine, probe_machine
from paceline.plan.planner import Plan
from paceline.plan.too_large import keep_too_large
from paceline.rundir import RunDir, append_event, write_atomic


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

    def attempt(self, number: int) -> Outcome:
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
        self.next_plan, smaller, ranks_left = None, None, None
        with suppress(PlanError):  # a driver that is silent: how many devices are left is not known
            machine = self.probe()
            if old.device == "cuda" and len(machine.gpus) < old.world_size:
                ranks_left = fewer_ranks(old, devices=len(machine.gpus))
                self.next_plan = self.plan_of_ranks(old, ranks_left, machine) if ranks_left else None
            elif ended.retry == "smaller":
                self.next_plan = smaller_plan(old, self.config, machine, make=self.make)
                smaller = words_of_change(old, self.next_plan) if self.next_plan else None
        return Abilities(own_trainer=True, smaller=smaller, ranks_left=ranks_left)

    def plan_of_ranks(self, old: Plan, count: int, machine: Machine) -> Plan:
        """The same steps on fewer devices; how many rows at once is worked out anew."""
        config = replace(self.config, nproc=count, device_batch_size=None)
        return plan_again(old, config, machine, make=self.make, changed=frozenset({"nproc", "device_batch_size"}))

    def change(self, decision: Decision) -> None:
        if self.next_plan is None:
            return
        old, new = self.plan, self.next_plan
        if decision.action == "smaller":
            keep_too_large(self.cache, old, card_bytes=new.memory.get("card_bytes"), source=self.run.name)
        write_atomic(self.run.plan_json, new.to_json())
        changed = {
            name: getattr(new, name)
            for name in ("world_size", "device_batch_size", "grad_accum_steps", "activation_checkpointing")
        }
        append_event(self.run, "plan_changed", **changed)

    def say(self, lines: list[str]) -> None:
        print("\n".join(lines), flush=True)
