"""When silence is a hang and when it is not, with a clock that the test sets."""

import json
import math
import signal
import subprocess
import time
from pathlib import Path

import pytest

from paceline.heartbeat import HeartbeatWriter
from paceline.launch.activity import (
    HANG_AFTER_S,
    LONG_PHASE,
    NOTICED_AFTER_S,
    SCRIPT_HANG_AFTER_S,
    USUAL_STEPS,
    WORKING_PHASE,
    HeartbeatActivity,
    LogActivity,
)
from paceline.launch.stacks import IDLE, Frame
from paceline.launch.watchdog import LONGEST_POLL_S, RankState, Watchdog, record_hang
from paceline.rundir import RunDir, append_sample


class Bench:
    """Two ranks that only sleep, and heartbeats that the test writes for them."""

    def __init__(self, folder, processes):
        self.run = RunDir(folder)
        self.processes = processes
        self.writers = [HeartbeatWriter(self.run, rank) for rank in range(2)]
        self.now = 1000.0
        self.dog = Watchdog(self.run, 1, 2, hang_after_s=8, clock=lambda: self.now)
        self.run.logs(1).mkdir(parents=True)
        for rank, process in enumerate(processes):
            (self.run.logs(1) / f"{rank}.pid").write_text(str(process.pid))

    def beat(self, *places):
        for writer, place in zip(self.writers, places, strict=True):
            writer.beat(*place)
        assert self.dog.poll() is None

    def after(self, seconds, *, every_s=0.1):
        """Returns the first hang that is reported while that time passes."""
        for _ in range(round(seconds / every_s)):
            self.now += every_s
            if hang := self.dog.poll():
                return hang
        return None

    def stop(self, rank):
        self.processes[rank].send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 120
        while "T" not in (text := self.stat(rank)) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert text.rpartition(")")[2].split()[0] == "T"

    def stat(self, rank):
        with open(f"/proc/{self.processes[rank].pid}/stat") as file:
            return file.read()


@pytest.fixture
def bench(tmp_path):
    processes = [subprocess.Popen(["sleep", "1000"]) for _ in range(2)]
    yield Bench(tmp_path, processes)
    for process in processes:
        process.kill()
        process.wait()


def in_step_nine(bench):
    """Both ranks have completed some quick steps, and rank 1 is behind."""
    for step in range(3, 9):
        bench.beat((step, "train"), (step, "train"))
        bench.now += 0.1
    bench.beat((8, "reduce"), (8, "load"))


def test_silence_in_a_step_is_a_hang_after_the_allowance_and_is_reported_once(bench):
    in_step_nine(bench)
    assert bench.after(7.8) is None
    hang = bench.after(1)
    assert (hang.rank, hang.phase, hang.step) == (1, "load", 8)
    assert 8 <= hang.silent_s <= 8.6
    assert bench.after(100) is None


def test_any_heartbeat_ends_the_silence(bench):
    in_step_nine(bench)
    assert bench.after(7) is None
    bench.beat((8, "reduce"), (8, "forward"))
    assert bench.after(7) is None


def test_time_between_distant_polls_does_not_count(bench):
    in_step_nine(bench)
    for _ in range(6):
        bench.now += 3600
        assert bench.dog.poll() is None
    assert bench.after(4) is not None


def test_a_clock_that_jumps_back_neither_causes_nor_hides_a_hang(bench):
    in_step_nine(bench)
    bench.now -= 500
    assert bench.dog.poll() is None
    assert bench.after(10) is not None


def test_an_evaluation_may_be_long_unless_its_process_is_stopped(bench):
    in_step_nine(bench)
    bench.beat((9, "eval"), (9, "eval"))
    assert bench.after(70, every_s=LONGEST_POLL_S) is None
    bench.stop(0)
    assert bench.after(7) is None
    hang = bench.after(3)
    assert (hang.rank, hang.phase) == (0, "eval")
    assert "rank 0 is stopped (state T) in eval of step 10" in hang.text


def test_a_process_that_was_continued_does_not_count_as_stopped(bench):
    bench.beat((9, "eval"), (9, "eval"))
    assert bench.after(20) is None
    bench.stop(0)
    assert bench.after(5) is None
    bench.processes[0].send_signal(signal.SIGCONT)
    time.sleep(0.1)
    assert bench.after(6) is None
    bench.stop(0)
    assert bench.after(5) is None


def test_a_rank_that_ends_made_progress_and_the_engine_has_time_to_notice_that_all_have_ended(bench):
    in_step_nine(bench)
    assert bench.after(7) is None
    bench.processes[1].kill()
    bench.processes[1].wait()
    assert bench.after(7) is None
    bench.processes[0].kill()
    bench.processes[0].wait()
    assert bench.after(79) is None
    assert bench.after(3).rank is None  # the engine itself hangs


def test_a_launch_that_starts_no_rank_is_a_hang(tmp_path):
    now = [0.0]
    dog = Watchdog(RunDir(tmp_path), 1, 2, clock=lambda: now[0])
    hangs = []
    while now[0] < 620 and not any(hangs):
        now[0] += 1
        hangs.append(dog.poll())
    assert 600 <= now[0] <= 602
    assert hangs[-1].rank is None


def test_a_rank_that_vanished_is_named_while_the_other_waits_for_it(bench):
    in_step_nine(bench)
    bench.processes[0].kill()
    bench.processes[0].wait()
    hang = bench.after(20)
    assert hang.rank == 0
    assert "rank 0 is gone" in hang.text


def test_the_evidence_is_a_text_file_for_each_rank_and_one_json_file(bench):
    for second in (0, 2):
        append_sample(bench.run.health("tower"), {"time": f"2026-01-01T00:00:0{second}.000Z", "cpu": 0.5})
    in_step_nine(bench)
    hang = bench.after(10)
    assert hang.evidence == ("hangs/1/0.txt", "hangs/1/1.txt", "hangs/1/hang.json")
    record = json.loads((bench.run.hang(1) / "hang.json").read_text())
    assert (record["rank"], record["text"]) == (1, hang.text)
    assert [rank["mark"]["phase"] for rank in record["ranks"]] == ["reduce", "load"]
    assert "MemTotal" in record["host"]["meminfo"]
    assert record["host"]["tower"] == {"time": "2026-01-01T00:00:02.000Z", "cpu": 0.5}
    text = (bench.run.hang(1) / "1.txt").read_text()
    assert f"rank 1, process {bench.processes[1].pid}" in text
    assert "State: S (sleeping)" in text
    assert "waits in " in text


def test_evidence_that_cannot_be_written_does_not_hide_the_hang(bench):
    in_step_nine(bench)
    (bench.run.path / "hangs").write_text("a file where the folder should be")
    hang = bench.after(10)
    assert (hang.rank, hang.evidence) == (1, ())


@pytest.mark.soak
def test_a_stop_after_some_usual_steps_of_silence_finds_what_the_ranks_do(bench):
    bench.dog = Watchdog(bench.run, 1, 2, clock=lambda: bench.now)
    in_step_nine(bench)
    assert bench.after(NOTICED_AFTER_S - 1) is None
    assert bench.dog.before_stop(by_person=True) is None
    assert bench.after(2) is None
    silence = bench.dog.before_stop(by_person=True)
    assert (silence.rank, silence.phase, silence.is_seen) == (1, "load", True)
    waited = f"no rank made progress for {NOTICED_AFTER_S + 1:.0f} s"
    assert f"{waited}: rank 1 is waiting (state S) in load of step 9" in silence.text
    assert (bench.run.hang(1) / "1.txt").exists()
    assert bench.after(60).rank == 1  # it is still the watchdog's to find


def test_a_stop_of_ranks_that_have_caught_an_exception_leaves_nothing(bench):
    in_step_nine(bench)
    bench.run.rank_log(1, 0).write_text(
        'Traceback (most recent call last):\n  File "a.py", line 4\nValueError: caught\n'
    )
    assert bench.dog.before_stop(by_person=False) is None
    assert not bench.run.hang(1).exists()


def test_a_rank_that_works_may_only_be_slow_when_the_run_is_stopped(bench, monkeypatch):
    bench.dog = Watchdog(bench.run, 1, 2, clock=lambda: bench.now)
    in_step_nine(bench)
    assert bench.after(NOTICED_AFTER_S + 1) is None
    for cores in ({0: 0.0, 1: 0.9}, {0: 0.9, 1: 0.0}):  # the late rank, or the other one
        monkeypatch.setattr(bench.dog, "_cores", lambda processes, cores=cores: cores)
        silence = bench.dog.before_stop(by_person=True)
        assert (silence.rank, silence.is_seen) == (1, False)


def test_a_hang_with_all_ranks_in_collectives_says_whether_these_differ(bench):
    def frames(line):
        place = Frame("step", "/home/ann/train.py", line)
        return (Frame("all_reduce", "/v/site-packages/torch/distributed/distributed_c10d.py", 3252), place)

    def hang(*lines):
        ranks = [RankState(rank, 100 + rank, "S", None, frames(line)) for rank, line in enumerate(lines)]
        return record_hang(bench.run, 1, ranks, {}, silent_s=14, missing="printed a line")

    assert hang(37, 38).in_collectives and not hang(37, 37).in_collectives
    assert hang(37, 38).text.startswith("no rank printed a line for 14 s: nothing shows which rank is to blame")


def test_a_stop_in_a_usual_evaluation_records_nothing(bench):
    bench.dog = Watchdog(bench.run, 1, 2, clock=lambda: bench.now)
    in_step_nine(bench)
    bench.beat((9, "eval"), (9, "eval"))
    assert (
        bench.after(HANG_AFTER_S - 1, every_s=LONGEST_POLL_S) is None and bench.dog.before_stop(by_person=True) is None
    )
    bench.now += 20
    bench.beat((9, "train"), (9, "train"))
    bench.beat((10, "eval"), (10, "eval"))
    assert bench.after(2 * HANG_AFTER_S - 5, every_s=LONGEST_POLL_S) is None  # twice the longest so far
    assert bench.dog.before_stop(by_person=True) is None


def test_a_rank_under_a_debugger_is_left_alone(bench, monkeypatch):
    in_step_nine(bench)
    monkeypatch.setattr("paceline.launch.stacks.process_state", lambda pid: "t")
    assert bench.after(100, every_s=LONGEST_POLL_S) is None


def test_by_default_a_step_may_take_a_minute_and_a_script_may_be_silent_for_ten(tmp_path):
    run = RunDir(tmp_path)
    assert Watchdog(run, 1, 2).floor_s == 60
    assert Watchdog(run, 1, 2, script=True).floor_s == 600


def test_polling_costs_almost_nothing_while_heartbeats_arrive(bench):
    in_step_nine(bench)
    num = 500
    started = time.process_time()
    for step in range(num):
        bench.now += 0.1
        bench.beat((9 + step, "train"), (9 + step, "train"))
    assert (time.process_time() - started) / num < 0.005  # seconds in each of ten polls a second; some 0.0002


BUSY, QUIET = {0: 1.0, 1: 0.0}, {0: 0.0, 1: 0.0}


class Pace:
    """Two ranks whose heartbeats the test writes; time is counted, not waited for."""

    def __init__(self, folder, *, floor_s=60.0):
        self.activity = HeartbeatActivity(RunDir(folder), 2, floor_s)
        self.writers = [HeartbeatWriter(RunDir(folder), rank) for rank in range(2)]
        self.now_s = 0.0

    def beat(self, *place, after_s=0.0):
        self.now_s += after_s
        for writer in self.writers:
            writer.beat(*place)
        assert self.activity.has_changed(self.now_s)

    def steps(self, num, *, seconds, start=0):
        for step in range(start, start + num):
            self.beat(step, "load")
            self.beat(step + 1, "train", after_s=seconds)


@pytest.fixture
def pace(tmp_path):
    return Pace(tmp_path)


def test_a_start_may_take_ten_times_as_long_and_longer_while_it_works(pace):
    assert pace.activity.allowed_s(QUIET) == 600
    assert pace.activity.allowed_s(BUSY) == 3600


def test_the_first_step_of_an_attempt_may_take_as_long_as_a_start(pace):
    pace.beat(500, "train")
    pace.beat(500, "backward")
    assert pace.activity.allowed_s(QUIET) == 600
    pace.beat(501, "train", after_s=90)
    assert pace.activity.allowed_s(BUSY) == 60


def test_a_step_may_take_six_times_the_usual_one_not_counting_the_first(pace):
    pace.steps(1, seconds=300)
    pace.steps(6, seconds=20, start=1)
    assert pace.activity.allowed_s(QUIET) == 120


def test_one_slow_step_does_not_change_what_is_usual(pace):
    pace.steps(4, seconds=1)
    pace.steps(1, seconds=500, start=4)
    pace.steps(4, seconds=1, start=5)
    assert pace.activity.allowed_s(QUIET) == 60


def test_an_evaluation_may_take_six_times_the_longest_so_far(pace):
    pace.steps(2, seconds=1)
    pace.beat(2, "eval")
    assert pace.activity.allowed_s(QUIET) == 600
    pace.beat(2, "load", after_s=200)
    assert pace.activity.allowed_s(QUIET) == 60
    pace.beat(3, "eval")
    assert pace.activity.allowed_s(QUIET) == 1200


def test_the_rank_with_the_longest_allowance_counts_because_the_others_wait_for_it(pace):
    pace.steps(2, seconds=1)
    pace.writers[0].beat(2, "sample")
    pace.writers[1].beat(2, "reduce")
    pace.activity.has_changed(3)
    assert pace.activity.allowed_s(QUIET) == 600


def test_hang_after_sets_the_floor(tmp_path):
    pace = Pace(tmp_path, floor_s=8)
    assert pace.activity.allowed_s(QUIET) == 80
    pace.steps(3, seconds=0.1)
    assert pace.activity.allowed_s(QUIET) == 8


def test_a_repeated_heartbeat_is_activity_and_a_missing_one_is_not(pace):
    assert not pace.activity.has_changed(1)
    pace.beat(3, "forward")
    assert not pace.activity.has_changed(2)
    time.sleep(0.005)
    pace.beat(3, "forward")


def test_a_log_line_of_a_script_is_activity(tmp_path):
    run = RunDir(tmp_path)
    run.logs(1).mkdir(parents=True)
    activity = LogActivity(run, 1, 2, 60)
    run.rank_log(1, 0).write_text("a")
    assert activity.has_changed(0)
    assert not activity.has_changed(1)
    with run.rank_log(1, 0).open("a") as log:
        log.write("b")
    assert activity.has_changed(2)


def test_a_script_is_silent_for_long_when_it_is_so_for_twice_its_longest_pause(tmp_path):
    run = RunDir(tmp_path)
    run.logs(1).mkdir(parents=True)
    activity = LogActivity(run, 1, 2, 600)
    assert activity.noticed_after_s() == HANG_AFTER_S  # it may still import
    for at_s, expected_s in ((3, HANG_AFTER_S), (4, NOTICED_AFTER_S), (6, NOTICED_AFTER_S), (36, 60), (37, 60)):
        with run.rank_log(1, 0).open("a") as log:
            log.write("a line\n")
        assert activity.has_changed(at_s)
        assert activity.noticed_after_s() == expected_s


def test_a_silent_script_that_works_is_left_alone(tmp_path):
    activity = LogActivity(RunDir(tmp_path), 1, 2, 60)
    assert activity.allowed_s(QUIET) == 60
    assert activity.allowed_s(BUSY) == math.inf


def test_the_page_about_hangs_has_the_same_figures():
    page = (Path(__file__).parents[2] / "docs" / "hangs.md").read_text()
    long_s = LONG_PHASE * HANG_AFTER_S
    for text in (
        f"| {HANG_AFTER_S:.0f} s, or {USUAL_STEPS} times the usual step |",
        f"| {long_s:.0f} s, or {USUAL_STEPS} times the longest so far in this attempt |",
        f"| {WORKING_PHASE * long_s:,.0f} s: ",
        f"each uses less than {IDLE:.0%} of one core".replace("%", " %"),
        f"| {SCRIPT_HANG_AFTER_S:.0f} s, or `--hang-after` |",
        f"nothing has moved for {NOTICED_AFTER_S:.0f} s and",
        "| at work | for any time: ",
    ):
        assert text in page
