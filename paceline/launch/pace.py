"""
The measured step beside the planned one, once in an attempt, after its first steps.

Reads metrics that the digest has read from the run folder; the line on the screen is that of the event it writes.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from paceline.errors import Finding, PacelineError
from paceline.launch.digest import OnMetrics
from paceline.plan.forecast import read_comm, step_setup
from paceline.plan.levers import step_gap
from paceline.plan.links import link_of
from paceline.plan.machine import probe_machine
from paceline.plan.planner import Plan
from paceline.plan.range import Range
from paceline.plan.speeds import remember_step
from paceline.plan.step_time import StepTime
from paceline.rundir import RunDir, append_event, write_atomic

COMPARED_AFTER = 20  # steps of an attempt
SETTLED_AFTER = 10  # the steps before are slower: files, kernels and memory are met for the first time

Gap = Callable[[float], Finding | None]  # seconds of a measured step -> what a large difference means


def watch_steps(run: RunDir, plan: Plan, *, cache: Path) -> OnMetrics:
    """Takes the lines of metrics; does nothing where no step was planned. What was measured corrects the next plan."""
    if not plan.cost.get("seconds"):
        return lambda record: None
    planned = planned_step(plan.cost)
    assert planned.seconds is not None

    def gap(measured_s: float) -> Finding | None:
        machine = probe_machine()
        link = link_of(None, machine, world_size=plan.world_size, device=plan.device, comm=read_comm(cache))
        setup = step_setup(plan, machine, link=link, cache=cache)
        if setup.speeds is not None and planned.uncorrected_s is not None:
            with suppress(
                PacelineError
            ):  # a cache that cannot be written costs the next plan's precision, not this run
                remember_step(
                    cache, setup.speeds, key=setup.key, predicted_s=planned.uncorrected_s, measured_s=measured_s
                )
        return step_gap(setup, planned, measured_s)

    return StepWatch(run, planned_s=planned.seconds.expected, gap=gap).note


def planned_step(cost: Mapping[str, Any]) -> StepTime:
    """As plan.json has it."""
    known = {each.name: cost[each.name] for each in fields(StepTime) if each.name in cost}
    ranges = {name: Range(**known[name]) for name in ("seconds", "tok_per_sec") if known[name] is not None}
    return StepTime(**{**known, **ranges})


class StepWatch:
    """note() takes each line of metrics.jsonl; step_ms there is the mean of the steps since the line before."""

    def __init__(self, run: RunDir, *, planned_s: float, gap: Gap):
        self.run, self.planned_s, self.gap = run, planned_s, gap
        self.first: int | None = None  # step of the attempt's first line, which is its first step
        self.before = 0  # step of the line before
        self.steps, self.seconds = 0, 0.0
        self.done = False

    def note(self, record: dict[str, Any]) -> None:
        step, step_ms = record.get("step"), record.get("step_ms")
        if self.done or not isinstance(step, int) or not isinstance(step_ms, int | float):
            return
        if self.first is None:
            self.first = self.before = step
            return
        if step >= self.first + SETTLED_AFTER:
            self.steps += step - self.before
            self.seconds += (step - self.before) * step_ms / 1000
        self.before = step
        if step >= self.first + COMPARED_AFTER - 1 and self.steps:
            self.done = True
            self.compare(step, self.seconds / self.steps)

    def compare(self, step: int, measured_s: float) -> None:
        append_event(self.run, "step_time", step=step, planned_s=self.planned_s, measured_s=round(measured_s, 6))
        finding = self.gap(measured_s)
        if finding is not None:
            add_finding(self.run, finding)
            append_event(self.run, "finding", **finding.to_json())


def add_finding(run: RunDir, finding: Finding) -> None:
    """To findings.json, which is not there where the checks were left out."""
    findings: list[dict[str, Any]] = []
    with suppress(OSError, ValueError):
        findings = json.loads(run.findings.read_text())
    write_atomic(run.findings, json.dumps([*findings, finding.to_json()], indent=1) + "\n")
