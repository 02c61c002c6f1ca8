"""Heartbeats: one line in a mapped file that readers can trust, at almost no cost."""

import json
import signal
import subprocess
import sys
import time

import pytest

from paceline.heartbeat import PHASES, WIDTH, Heartbeat, HeartbeatWriter, OperationHeartbeat, read_heartbeat
from paceline.rundir import RunDir, read_json_lines


@pytest.fixture
def run(tmp_path):
    return RunDir(tmp_path)


def test_a_heartbeat_is_one_whole_line_of_json_overwritten_in_place(run):
    writer = HeartbeatWriter(run, 1)
    writer.beat(123456, "train")
    writer.beat(7, "eval")
    text = run.progress(1).read_text()
    assert len(text) == WIDTH
    assert text.endswith("}\n")
    fields = next(read_json_lines(run.progress(1)))
    assert (fields["step"], fields["micro_step"], fields["phase"]) == (7, 0, "eval")
    assert abs(fields["time"] - time.time()) < 60


def test_a_reader_gets_the_heartbeat_with_the_monotonic_time_of_the_host(run):
    HeartbeatWriter(run, 0).beat(12, "backward", 3)
    heartbeat = read_heartbeat(run.progress(0))
    assert heartbeat == Heartbeat(12, 3, "backward", heartbeat.monotonic)
    assert abs(heartbeat.monotonic - time.monotonic()) < 60


@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_has_the_same_length(run, phase):
    HeartbeatWriter(run, 0).beat(999_999_999, phase, 99_999)
    assert read_heartbeat(run.progress(0)).phase == phase


def test_a_half_written_heartbeat_is_recognised(run):
    writer = HeartbeatWriter(run, 0)
    writer.beat(98, "train")
    before = run.progress(0).read_bytes()
    writer.beat(120, "train")
    after = run.progress(0).read_bytes()
    run.progress(0).write_bytes(after[:17] + before[17:])
    assert json.loads(run.progress(0).read_bytes())["step"] == 128  # well formed, and a step that never was
    assert read_heartbeat(run.progress(0)) is None


def test_without_a_heartbeat_the_reader_gets_none(run):
    assert read_heartbeat(run.progress(0)) is None
    HeartbeatWriter(run, 0)
    assert read_heartbeat(run.progress(0)) is None


def test_a_longer_line_of_an_older_version_is_replaced(run):
    run.progress(0).parent.mkdir()
    run.progress(0).write_text('{"step": 3}'.ljust(400) + "\n")
    HeartbeatWriter(run, 0).beat(4, "load")
    assert read_heartbeat(run.progress(0)).step == 4


def test_heartbeats_grow_in_the_order_of_a_step():
    order = [
        *(Heartbeat(4, 0, phase, 0) for phase in ("train", "eval", "save", "load", "forward", "backward")),
        *(Heartbeat(4, 1, phase, 0) for phase in ("load", "backward", "reduce", "update")),
        Heartbeat(5, 0, "train", 0),
    ]
    assert [heartbeat.place for heartbeat in order] == sorted(heartbeat.place for heartbeat in order)


def test_a_heartbeat_outlives_the_process_that_wrote_it(run):
    script = (
        "import os, sys; from pathlib import Path; from paceline.rundir import RunDir;"
        "from paceline.heartbeat import HeartbeatWriter; HeartbeatWriter(RunDir(Path(sys.argv[1])), 0).beat(5, 'save');"
        "os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(run.path)]).returncode == -signal.SIGKILL
    assert read_heartbeat(run.progress(0)).phase == "save"


def test_a_heartbeat_costs_microseconds(run):
    """About one on a quiet machine; the bound leaves room for a busy one."""
    writer, num = HeartbeatWriter(run, 0), 20_000
    times = []
    for _ in range(5):
        started = time.process_time()
        for step in range(num):
            writer.beat(step, "forward", 3)
        times.append((time.process_time() - started) / num)
    assert min(times) < 10e-6


def test_an_operation_of_comm_is_named_in_full_and_grows_with_its_parts(run):
    heartbeat = OperationHeartbeat(run, 1)
    places = []
    for name in ("init_process_group", "all_reduce of 256 MiB between ranks 126 and 127"):
        heartbeat.begin(name)
        for _ in range(2):
            heartbeat.advance()
            places.append(read_heartbeat(run.progress(1)).place)
        assert read_heartbeat(run.progress(1)).position == name
    heartbeat.end()
    last = read_heartbeat(run.progress(1))
    assert (last.step, last.phase) == (3, "done")
    assert [*places, last.place] == sorted({*places, last.place})


def test_a_step_is_counted_from_one_in_text():
    assert Heartbeat(411, 0, "load", 0.0).position == "load of step 412"
    assert Heartbeat(0, 0, "start", 0.0).position == "start"
