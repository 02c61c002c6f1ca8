"""Where the time of a run went, by events and metrics written for it: every second is of one kind."""

import json
import os
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest

from paceline.rundir import RunDir, append_sample
from paceline.units import parse_time
from paceline.watch.goodput import goodput as goodput_of_lines
from paceline.watch.goodput import step_lines
from paceline.watch.run_reader import RunReader
from paceline.watch.snapshot import Goodput
from paceline.watch.summary import goodput_line, goodput_table

START = 1_800_000_000


def at(seconds: float) -> str:
    return datetime.fromtimestamp(START + seconds, UTC).isoformat()


def event(seconds, name, **fields):
    return {"time": at(seconds), "event": name, **fields}


def line(seconds, step, step_ms, **fields):
    return {"time": at(seconds), "step": step, "step_ms": step_ms, **fields}


# 4 s of checks, 6 s of start-up and a first step of 3 s, steps of 1 s, 2 s of evaluation at step 3, a save of 1 s after step 3
BEGIN = [event(4, "launch", prepared_s=4.0), event(5, "attempt", attempt=1)]
LINES = [line(13, 1, 3000), line(14, 2, 1000), line(17, 3, 1000, val_bpb=2.0), line(19, 4, 1000)]
SAVE = [event(18, "checkpoint", step=3)]


def goodput(events, metrics, **options) -> Goodput:
    lines = [(line["step"], parse_time(line["time"]), line["step_ms"], line.get("val_bpb")) for line in metrics]
    return goodput_of_lines(events, step_lines(np.array(lines, dtype=float).reshape(-1, 4).T), **options)


def spent(events, metrics, **options) -> dict[str, float]:
    result = goodput(events, metrics, **{"tokens_per_step": 100, **options})
    return {kind: seconds for kind, seconds in result.seconds.items() if seconds}


def test_a_run_without_a_failure():
    events = [*BEGIN, *SAVE, event(20, "attempt_ended", state="finished")]
    assert spent(events, LINES) == {
        "steps": 4.0, "start_up": 6.0, "checks": 4.0, "compile": 2.0, "checkpoint": 2.0, "evaluation": 2.0,
    }  # fmt: skip
    result = goodput(events, LINES, tokens_per_step=100)
    assert (result.num_steps, result.busy_s, result.tok_per_sec, result.share) == (4, 20.0, 20.0, 0.2)


def test_work_after_the_checkpoint_that_the_next_attempt_loads_is_lost():
    """Line 4 went when step 4 was done again. From the fault to the first new step it is recovery."""
    events = [
        *BEGIN, *SAVE, event(22, "attempt_ended", state="failed"), event(22, "decision", action="retry"),
        event(24, "attempt", attempt=2), event(29, "resumed", step=3), event(31, "attempt_ended", state="finished"),
    ]  # fmt: skip
    result = spent(events, [*LINES[:3], line(30, 4, 1000)])
    assert result["lost"] == 5.0
    assert result["recovery"] == 2.0 + 5.0
    assert result["steps"] == 3.0 + 1.0
    assert sum(result.values()) == 31.0


def test_an_attempt_without_a_checkpoint_is_lost_whole():
    events = [
        *BEGIN, event(15, "attempt_ended", state="failed"), event(16, "attempt", attempt=2),
        event(30, "attempt_ended", state="finished"),
    ]  # fmt: skip
    result = spent(events, [line(20, 1, 1000), line(21, 2, 1000)])
    assert result["lost"] == 10.0


def test_the_time_until_a_resume_is_idle_and_does_not_lower_the_speed():
    stopped = [*BEGIN, event(19.5, "checkpoint", step=4), event(20, "attempt_ended", state="interrupted")]
    resumed = [
        event(104, "launch", prepared_s=4.0), event(105, "attempt", attempt=2), event(110, "resumed", step=4),
        event(120, "attempt_ended", state="finished"),
    ]  # fmt: skip
    metrics = [*LINES, line(112, 5, 1000)]
    result = goodput([*stopped, *resumed], metrics, tokens_per_step=100)
    assert result.seconds["idle"] == 80.0
    assert (result.seconds["recovery"], result.seconds["lost"]) == (0.0, 0.0)
    assert (result.num_steps, result.busy_s, result.tok_per_sec) == (5, 40.0, 12.5)


def test_the_time_after_a_supervisor_was_killed_is_idle():
    """The next command writes the verdict on the attempt, hours later."""
    events = [
        *BEGIN, event(19.5, "checkpoint", step=4), event(20, "stopped", step=4),
        event(7200, "launch", prepared_s=1.0), event(7200, "verdict", attempt=1, cause="supervisor-lost"),
        event(7201, "attempt", attempt=2), event(7203, "resumed", step=4), event(7210, "attempt_ended", state="finished"),
    ]  # fmt: skip
    result = spent(events, [*LINES, line(7205, 5, 1000)])
    assert result["idle"] == 7200 - 1.0 - 20
    assert result.get("lost", 0) <= 1.0


@pytest.mark.parametrize(("resumed", "lost"), [(3, 3.0), (0, 15.0)])
def test_what_a_finished_run_does_again_because_its_last_checkpoints_are_gone_is_lost(resumed, lost):
    events = [
        *BEGIN, *SAVE, event(19.5, "checkpoint", step=4), event(20, "attempt_ended", state="finished"),
        event(30, "launch", prepared_s=1.0), event(31, "attempt", attempt=2), event(32, "resumed", step=resumed),
        event(40, "attempt_ended", state="finished"),
    ]  # fmt: skip
    assert spent(events, [*LINES[:resumed], line(35, resumed + 1, 1000)])["lost"] == lost


@pytest.mark.parametrize("state", ["finished", "interrupted"])
def test_an_extension_of_a_run_that_ended_well_loses_nothing(state):
    """Its last seconds were its last evaluation and checkpoint, whatever follows."""
    events = [
        *BEGIN, event(19.5, "checkpoint", step=4), event(25, "attempt_ended", state=state),
        event(104, "launch", prepared_s=4.0), event(105, "attempt", attempt=2), event(110, "resumed", step=4),
        event(113, "attempt_ended", state="finished"),
    ]  # fmt: skip
    result = spent(events, [*LINES, line(112, 5, 1000)])
    assert not {"lost", "recovery"} & result.keys()
    assert result["checkpoint"] == 6.0 + 1.0


@pytest.mark.parametrize(("saved", "sampled_s"), [(19.5, 5.5), (25.0, 6.0)])
def test_the_last_sample_is_no_checkpoint(saved, sampled_s):
    ends = sorted([(saved, "checkpoint"), (25.0, "sample")])
    events = [*BEGIN, *(event(at, kind, step=4) for at, kind in ends), event(26, "attempt_ended", state="finished")]
    result = spent(events, LINES)
    assert (result["evaluation"], result["checkpoint"]) == (2.0 + sampled_s, 7.0 - sampled_s)


def test_a_run_that_was_interrupted_twice_has_lost_what_its_resume_does_again():
    events = [
        *BEGIN, *SAVE, event(25, "attempt_ended", state="interrupted"), event(104, "launch", prepared_s=4.0),
        event(105, "attempt", attempt=2), event(110, "resumed", step=3), event(113, "attempt_ended", state="finished"),
    ]  # fmt: skip
    assert spent(events, [*LINES, line(112, 4, 1000)])["lost"] == 8.0


def test_a_failed_run_has_lost_what_a_resume_would_repeat():
    result = spent([*BEGIN, *SAVE, event(25, "attempt_ended", state="failed")], LINES)
    assert result["lost"] == 8.0  # step 4 and the wait until the end was noticed


def test_a_live_run_has_lost_nothing_yet():
    events = [*BEGIN, *SAVE]
    assert "lost" not in spent(events, LINES, now=START + 19.0)
    assert spent(events, LINES)["lost"] == 2.0


def test_a_script_has_only_attempts_recovery_and_idle_time():
    events = [
        event(0, "script", command=["x.py"]), event(1, "attempt", attempt=1), event(11, "attempt_ended", state="failed"),
        event(13, "attempt", attempt=2), event(33, "attempt_ended", state="finished"),
    ]  # fmt: skip
    result = goodput(events, [], tokens_per_step=None)
    assert {kind: value for kind, value in result.seconds.items() if value} == {
        "steps": 30.0,
        "start_up": 1.0,
        "recovery": 2.0,
    }
    assert result.tok_per_sec is None


def test_the_silence_of_a_hang_in_a_script_is_lost():
    events = [event(0, "script"), event(10, "attempt"), event(70, "hang", silent_s=40.0)]
    assert spent([*events, event(73, "attempt_ended", state="failed")], [], tokens_per_step=None) == {
        "start_up": 10.0, "steps": 20.0, "lost": 43.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("first", "second", "lost"),
    [
        (range(1, 11), range(7, 20), 40.0),  # steps 7 to 10 were done again
        (range(1, 11), range(1, 20), 100.0),
        (range(1, 11), range(11, 20), 0.0),
        (range(10, 110, 10), range(110, 200, 10), 0.0),
        ([1, 2, 3, 1, 2, 3], [1, 2, 3], 0.0),  # steps that each epoch counts anew show nothing
        ([], [1], 0.0),
    ],
)
def test_steps_that_a_script_does_again_are_lost(tmp_path, first, second, lost):
    run = RunDir(tmp_path)
    events = [
        event(0, "script", command=["x.py"]), event(10, "attempt", attempt=1),
        event(110, "attempt_ended", attempt=1, state="failed"), event(111, "attempt", attempt=2),
        event(200, "attempt_ended", attempt=2, state="finished"),
    ]  # fmt: skip
    run.events.write_text("".join(json.dumps(record) + "\n" for record in events))
    for attempt, steps in ((1, first), (2, second)):
        run.logs(attempt).mkdir(parents=True)
        run.rank_log(attempt, 0).write_text("".join(f"step {step}: loss 2.5\n" for step in steps))
    seconds = RunReader(run).goodput().seconds
    assert (round(seconds["lost"]), round(seconds["steps"])) == (lost, 189 - lost)


def test_the_time_of_a_script_that_was_interrupted_at_its_start_is_named_as_that_of_a_script():
    ended = event(1, "attempt_ended", state="interrupted")
    events = [event(0, "script", command=["x.py"]), event(1, "attempt", attempt=1), ended]
    assert goodput_line(goodput(events, [], tokens_per_step=None)) == "0 % of 1s in the script, 100 % start-up"
    trained = goodput([event(0, "launch"), *events[1:]], [], tokens_per_step=100)
    assert goodput_line(trained) == "0 % of 1s in steps that counted, 100 % start-up; 0 tok/s overall"


def test_a_training_that_was_interrupted_before_its_first_step_has_lost_no_work():
    events = [*BEGIN, event(20, "attempt_ended", state="interrupted")]
    assert "lost" not in spent(events, [])
    assert spent([*BEGIN, event(20, "attempt_ended", state="failed")], [])["lost"] > 0


def test_a_script_that_works_counts_until_now():
    events = [event(0, "script", command=["x.py"]), event(1, "attempt", attempt=1)]
    assert goodput(events, [], tokens_per_step=None, now=START + 10.0).share == 0.9
    ended = [*events, event(5, "attempt_ended", state="failed")]
    assert goodput(ended, [], tokens_per_step=None, now=START + 10.0).seconds["steps"] == 4.0
    assert goodput(events, [], tokens_per_step=None).seconds["steps"] == 0.0


def test_an_attempt_of_a_script_whose_command_was_killed_ends_with_its_last_output(tmp_path):
    run = RunDir(tmp_path)
    begin = [event(0, "script", command=["x.py"]), event(10, "attempt", attempt=1)]
    again = [event(100, "script", command=["x.py"]), event(110, "attempt", attempt=2)]
    for count, events in enumerate(([*begin], [*begin, *again]), start=1):
        run.events.write_text("".join(json.dumps(record) + "\n" for record in events))
        os.utime(run.events, (START, parse_time(events[-1]["time"])))
        run.logs(count).mkdir(parents=True)
        for rank, seconds in enumerate((40, 50)):  # after the attempt began
            run.rank_log(count, rank).write_text(f"step {count}\n")
            os.utime(run.rank_log(count, rank), (START, parse_time(events[-1]["time"]) + seconds))
        result = RunReader(run).goodput()
        assert (result.seconds["steps"], result.seconds["start_up"]) == (50 * count, 10 * count)
    assert result.seconds["idle"] == 40.0
    os.utime(run.events, (START, START + 86_400))  # a copy of the folder has the times at which it was made
    assert RunReader(run).goodput().seconds["steps"] == 0.0


@pytest.mark.parametrize("events", [[], [event(0, "launch", prepared_s=1.0)], [event(0, "attempt", attempt=1)]])
def test_a_run_without_a_step_has_no_speed(events):
    result = goodput(events, [], tokens_per_step=100)
    assert (result.num_steps, result.tok_per_sec) == (0, None)
    assert goodput_line(result).startswith("n/a of 0s")


def test_the_table_and_the_line():
    seconds = {"steps": 60.0, "start_up": 30.0, "checks": 2.0, "compile": 0.0, "checkpoint": 0.0, "evaluation": 0.0,
               "lost": 8.0, "recovery": 0.0, "idle": 3600.0}  # fmt: skip
    result = Goodput(seconds, 10, 1234.5)
    assert goodput_table(result) == [
        "  steps that counted            1m00s   60.0 %",
        "  start-up                        30s   30.0 %",
        "  data, plan and checks            2s    2.0 %",
        "  work lost                        8s    8.0 %",
        "  idle                          1h00m",
    ]
    assert goodput_table(replace(result, energy_j=4_500_000))[-1] == "  energy of the GPUs         1.25 kWh"
    assert goodput_line(replace(result, energy_j=90_000)).endswith("tok/s overall; 25.0 Wh")
    assert goodput_line(result) == (
        "60 % of 1m40s in steps that counted, 30 % start-up, 8 % work lost; 1,234 tok/s overall"
    )


def test_energy_is_the_sum_over_all_gpus_hosts_and_attempts(tmp_path):
    run = RunDir(tmp_path)
    for name, counted in {"tower": ([0, 400, 900, 0, 50], [0, 10, 20, 0, 1]), "shed": ([0, 7],)}.items():
        for number in range(len(counted[0])):
            gpus = [{"index": index, "energy_j": joules[number]} for index, joules in enumerate(counted)]
            append_sample(run.health(name), {"time": at(number), "gpus": gpus})
    append_sample(run.health("old-card"), {"time": at(0), "gpus": [{"index": 0, "use": 0.5}]})
    assert RunReader(run).goodput().energy_j == 900 + 50 + 20 + 1 + 7


def test_energy_that_no_gpu_reports_is_unknown(tmp_path):
    append_sample(RunDir(tmp_path).health("tower"), {"time": at(0), "cpu": 0.5})
    assert RunReader(RunDir(tmp_path)).goodput().energy_j is None
