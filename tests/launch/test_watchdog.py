"""When silence is a hang and when not, with a clock of the test's own."""

import json
import signal
import subprocess
import time

import pytest

from paceline.launch.watchdog import Watchdog
from paceline.rundir import RunDir, append_sample
from paceline.train.progress import Progress


class Bench:
    """Two ranks that only sleep, and marks that the test makes for them."""

    def __init__(self, folder, processes):
        self.run = RunDir(folder)
        self.processes = processes
        self.marks = [Progress(self.run, rank) for rank in range(2)]
        self.now = 1000.0
        self.dog = Watchdog(self.run, 1, 2, hang_after_s=8, pids=self.pids, clock=lambda: self.now)

    def pids(self):
        return {rank: process.pid for rank, process in enumerate(self.processes)}

    def mark(self, *places):
        for mark, place in zip(self.marks, places, strict=True):
            mark.mark(*place)
        assert self.dog.poll() is None

    def after(self, seconds, *, every_s=0.1):
        """The first hang found while that time passes."""
        for _ in range(round(seconds / every_s)):
            self.now += every_s
            if hang := self.dog.poll():
                return hang
        return None

    def stop(self, rank):
        self.processes[rank].send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 5
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
    """Ranks that have done some quick steps; rank 1 is behind."""
    for step in range(3, 9):
        bench.mark((step, "train"), (step, "train"))
        bench.now += 0.1
    bench.mark((8, "reduce"), (8, "load"))


def test_silence_in_a_step_is_a_hang_once_the_allowance_is_over_and_is_told_once(bench):
    in_step_nine(bench)
    assert bench.after(7.8) is None
    hang = bench.after(1)
    assert (hang.rank, hang.phase, hang.step) == (1, "load", 8)
    assert 8 <= hang.silent_s <= 8.6
    assert bench.after(100) is None


def test_any_mark_begins_the_silence_anew(bench):
    in_step_nine(bench)
    assert bench.after(7) is None
    bench.mark((8, "reduce"), (8, "forward"))
    assert bench.after(7) is None


def test_time_in_which_nobody_looked_does_not_count(bench):
    in_step_nine(bench)
    for _ in range(6):
        bench.now += 3600
        assert bench.dog.poll() is None
    assert bench.after(4) is not None


def test_a_clock_that_jumps_back_is_no_hang_and_does_not_put_one_off_for_ever(bench):
    in_step_nine(bench)
    bench.now -= 500
    assert bench.dog.poll() is None
    assert bench.after(10) is not None


def test_an_evaluation_may_last_but_not_when_its_process_is_stopped(bench):
    in_step_nine(bench)
    bench.mark((9, "eval"), (9, "eval"))
    assert bench.after(70) is None
    bench.stop(0)
    assert bench.after(7) is None
    hang = bench.after(3)
    assert (hang.rank, hang.phase) == (0, "eval")
    assert "rank 0 is stopped (state T) in eval of step 10" in hang.text


def test_a_stop_that_is_over_again_was_none(bench):
    bench.mark((9, "eval"), (9, "eval"))
    assert bench.after(20) is None
    bench.stop(0)
    assert bench.after(5) is None
    bench.processes[0].send_signal(signal.SIGCONT)
    time.sleep(0.1)
    assert bench.after(6) is None
    bench.stop(0)
    assert bench.after(5) is None


def test_a_rank_that_ends_has_got_on_and_when_all_have_it_is_up_to_the_engine_to_see_it(bench):
    in_step_nine(bench)
    assert bench.after(7) is None
    bench.processes[1].kill()
    bench.processes[1].wait()
    assert bench.after(7) is None
    bench.processes[0].kill()
    bench.processes[0].wait()
    assert bench.after(79) is None
    assert bench.after(3).rank is None  # it does not: it hangs itself


def test_a_launch_that_starts_no_rank_is_a_hang_of_its_own(tmp_path):
    now = [0.0]
    dog = Watchdog(RunDir(tmp_path), 1, 2, clock=lambda: now[0])
    found = []
    while now[0] < 620 and not any(found):
        now[0] += 1
        found.append(dog.poll())
    assert 600 <= now[0] <= 602
    assert found[-1].rank is None


def test_a_rank_that_has_gone_without_a_word_is_named_when_the_other_waits_for_it(bench):
    in_step_nine(bench)
    bench.processes[0].kill()
    bench.processes[0].wait()
    hang = bench.after(20)
    assert hang.rank == 0
    assert "rank 0 is gone" in hang.text


def test_what_was_known_is_kept_in_a_file_for_each_rank_and_one_for_programs(bench):
    for second in (0, 2):
        append_sample(bench.run.health("tower"), {"time": f"2026-01-01T00:00:0{second}.000Z", "cpu": 0.5})
    in_step_nine(bench)
    hang = bench.after(10)
    assert hang.evidence == ("hangs/1/0.txt", "hangs/1/1.txt", "hangs/1/hang.json")
    said = json.loads((bench.run.hang(1) / "hang.json").read_text())
    assert (said["rank"], said["text"]) == (1, hang.text)
    assert [rank["mark"]["phase"] for rank in said["ranks"]] == ["reduce", "load"]
    assert "MemTotal" in said["host"]["meminfo"]
    assert said["host"]["tower"] == {"time": "2026-01-01T00:00:02.000Z", "cpu": 0.5}
    text = (bench.run.hang(1) / "1.txt").read_text()
    assert f"rank 1, process {bench.processes[1].pid}" in text
    assert "State: S (sleeping)" in text
    assert "waits in " in text


def test_evidence_that_cannot_be_written_does_not_hide_the_hang(bench):
    in_step_nine(bench)
    (bench.run.path / "hangs").write_text("a file where the folder should be")
    hang = bench.after(10)
    assert (hang.rank, hang.evidence) == (1, ())


def test_a_rank_under_a_debugger_is_left_alone(bench, monkeypatch):
    in_step_nine(bench)
    monkeypatch.setattr("paceline.launch.watchdog.process_state", lambda pid: "t")
    assert bench.after(1000) is None


def test_without_a_word_on_it_a_step_may_take_a_minute_and_a_script_may_be_silent_for_ten(tmp_path):
    run = RunDir(tmp_path)
    assert Watchdog(run, 1, 2).floor_s == 60
    assert Watchdog(run, 1, 2, script=True).floor_s == 600


def test_looking_costs_next_to_nothing_while_marks_come(bench):
    in_step_nine(bench)
    num = 500
    started = time.process_time()
    for step in range(num):
        bench.now += 0.1
        bench.mark((9 + step, "train"), (9 + step, "train"))
    assert (time.process_time() - started) / num < 0.005  # seconds in each of ten polls a second; some 0.0002
