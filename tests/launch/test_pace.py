"""The measured step beside the planned one."""

import io
import json
from dataclasses import asdict, replace

import pytest

from paceline.config import Config
from paceline.errors import Finding
from paceline.launch.digest import Digest
from paceline.launch.pace import StepWatch, planned_step, watch_steps
from paceline.plan.machine import Machine
from paceline.plan.planner import make_plan
from paceline.plan.range import Range
from paceline.plan.speeds import Speeds, keep_speeds, load_speeds
from paceline.plan.step_time import StepTime
from paceline.rundir import RunDir, append_json_line, read_json_lines, utc_now

FINDING = Finding("step-slower-than-planned", "warn", "a step takes 900 ms", "likely the link", "paceline comm")
PLANNED = StepTime(Range(0.5, 0.612, 0.7), {"matmuls": 0.612}, 0.0, 0.0, Range(1.0, 2.0, 3.0), None, "compute", ())


@pytest.fixture
def run(tmp_path):
    return RunDir(tmp_path)


def show(run: RunDir, lines: list[tuple[int, float]], finding: Finding | None = None) -> list[str]:
    """The digest's lines of logged steps (step, step_ms), those of steps left out."""
    stream = io.StringIO()
    watch = StepWatch(run, planned_s=0.612, gap=lambda measured_s: finding)
    digest = Digest(run, num_steps=5000, total_batch_size=1, stream=stream, on_metrics=watch.note)
    for step, step_ms in lines:
        append_json_line(run.metrics, {"step": step, "loss": 1.0, "step_ms": step_ms, "time": utc_now()})
        digest.poll()
    digest.close()
    return [line for line in stream.getvalue().splitlines() if not line.startswith("step ")]


def test_after_twenty_steps_the_measured_step_stands_beside_the_planned_once(run):
    lines = [(1, 9000.0), (10, 800.0), (20, 655.0), (30, 655.0), (40, 655.0)]
    assert show(run, lines) == ["planned 612 ms a step, measured 655 ms (+7 %)"]
    [event] = [event for event in read_json_lines(run.events) if event["event"] == "step_time"]
    assert (event["step"], event["planned_s"], event["measured_s"]) == (20, 0.612, 0.655)


def test_every_step_logged_gives_the_mean_of_those_that_are_settled(run):
    lines = [(step, 5000.0 if step <= 10 else 600.0 + 10 * (step % 2)) for step in range(1, 30)]
    assert show(run, lines) == ["planned 612 ms a step, measured 605 ms (-1 %)"]


def test_seldom_logged_steps_are_compared_at_the_first_line_after(run):
    assert show(run, [(1, 9000.0), (500, 612.0)]) == ["planned 612 ms a step, measured 612 ms (+0 %)"]


def test_a_resumed_run_counts_from_where_it_goes_on(run):
    assert show(run, [(1001, 9000.0), (1010, 800.0)]) == []
    assert show(run, [(1001, 9000.0), (1010, 800.0), (1020, 612.0)]) == [
        "planned 612 ms a step, measured 612 ms (+0 %)"
    ]


@pytest.mark.parametrize("before", [None, [{"id": "other"}]])
def test_a_large_gap_is_a_finding_beside_those_of_the_checks(run, before):
    if before is not None:
        run.findings.write_text(json.dumps(before))
    shown = show(run, [(1, 900.0), (20, 900.0)], FINDING)
    assert shown == [
        "planned 612 ms a step, measured 900 ms (+47 %)",
        "warn  step-slower-than-planned  a step takes 900 ms",
        "  why                           likely the link",
        "  fix                           paceline comm",
    ]
    findings = json.loads(run.findings.read_text())
    assert [finding["id"] for finding in findings] == [*(["other"] if before else []), FINDING.id]


def test_a_plan_without_a_time_is_held_against_nothing(run):
    machine = Machine(gpus=(), cpu_cores=1, cpu_bf16=False, memory_bytes=8 << 30)
    plan = make_plan(Config(depth=2, total_batch_size=4096, num_steps=1), machine, vocab_size=512, num_rows=0)
    watch = watch_steps(run, plan, cache=run.path)
    for step in (1, 20, 40):
        watch({"step": step, "step_ms": 1.0})
    assert not run.events.exists()


def test_a_step_twice_as_long_as_planned_is_found_with_its_likely_cause(run):
    machine = Machine(gpus=(), cpu_cores=1, cpu_bf16=False, memory_bytes=8 << 30)
    plan = make_plan(Config(depth=2, total_batch_size=4096, num_steps=1), machine, vocab_size=512, num_rows=0)
    watch = watch_steps(run, replace(plan, cost=json.loads(json.dumps(asdict(PLANNED)))), cache=run.path)
    for step in (1, 10, 20):
        watch({"step": step, "step_ms": 1224.0})
    [finding] = json.loads(run.findings.read_text())
    assert (finding["id"], finding["severity"]) == ("step-slower-than-planned", "warn")
    assert finding["why"] == "likely other processes on these cores: the plan counts on all of them"


def test_a_measured_step_corrects_the_next_plan_of_a_machine_whose_speeds_are_known(run, tmp_path):
    machine = Machine(gpus=(), cpu_cores=1, cpu_bf16=False, memory_bytes=8 << 30)
    config = Config(depth=2, total_batch_size=4096, num_steps=1)
    plan = make_plan(config, machine, vocab_size=512, num_rows=0)
    keep_speeds(tmp_path, Speeds("CPU", plan.threads, plan.world_size, {}, {}, "measured"))
    cost = asdict(replace(PLANNED, uncorrected_s=0.5))
    watch = watch_steps(run, replace(plan, cost=json.loads(json.dumps(cost))), cache=tmp_path)
    for step in (1, 10, 20):
        watch({"step": step, "step_ms": 600.0})
    taught = load_speeds(tmp_path, device_name="CPU", threads=plan.threads, processes=plan.world_size)
    assert list(taught.steps.values()) == [pytest.approx(1.2)]


def test_a_planned_step_is_read_back_as_it_was_written():
    assert planned_step(json.loads(json.dumps({**asdict(PLANNED), "run": None, "more": 1}))) == StepTime(
        **{**vars(PLANNED), "assumptions": []}
    )
