"""Who does not come, told from what ranks noted and from the state of their processes."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from paceline.launch.hang import HangWatch, Hung, process_state, who_is_late
from paceline.rundir import RunDir


def at(step: int, *, inside: bool = True, part: int = 0, phase: str = "all_reduce of 1,000 fp32") -> dict:
    return {"step": step, "of": 50, "part": part, "stage": "right results", "phase": phase, "inside": inside}


def test_the_rank_behind_the_others_did_not_come():
    late = who_is_late([at(7), at(6, inside=False, phase="barrier")], ["S", "R"])
    assert late == "rank 1 did not come to all_reduce of 1,000 fp32; it is running (state R)"


def test_a_stopped_rank_is_named_wherever_it_is():
    assert who_is_late([at(7), at(7)], ["S", "T"]) == (
        "rank 1 came to all_reduce of 1,000 fp32 and did not get through; it is stopped (state T)"
    )
    assert "rank 1 did not come" in who_is_late([at(7), at(6, inside=False), at(7)], ["S", "T", "S"])


def test_a_rank_that_is_still_in_what_the_others_have_left_is_named_with_it():
    late = who_is_late([at(8, phase="barrier"), at(7)], ["S", "S"])
    assert late == "rank 1 came to all_reduce of 1,000 fp32 and did not get through; it is waiting (state S)"


def test_within_a_long_operation_the_rank_with_fewer_parts_is_behind():
    assert who_is_late([at(7, part=9), at(7, part=8)], ["S", "S"]).startswith("rank 1 came to")


def test_ranks_that_wait_in_one_operation_are_all_named():
    assert who_is_late([at(7), at(7)], ["S", "S"]) == (
        "ranks 0 and 1 came to all_reduce of 1,000 fp32 and did not get through; they are waiting (state S)"
    )


def test_a_rank_that_never_wrote_did_not_come():
    assert who_is_late([at(1, phase="init_process_group"), None], ["S", "S"]).startswith(
        "rank 1 did not come to init_process_group"
    )
    assert who_is_late([None, None], ["T", "R"]) == "rank 0 did not start; it is stopped (state T)"


def test_a_process_says_that_it_is_stopped_and_then_that_it_is_gone():
    process = subprocess.Popen(["sleep", "60"])
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    assert process_state(process.pid) == "T"
    process.kill()
    process.wait()
    assert process_state(process.pid) is None


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "progress").mkdir()
    (tmp_path / "logs" / "1").mkdir(parents=True)
    for rank in range(2):
        (tmp_path / "logs" / "1" / f"{rank}.pid").write_text(f"{os.getpid()}\n")
    return RunDir(tmp_path)


def watch(run: RunDir, *, deadline_s: float) -> HangWatch:
    return HangWatch(run, attempt=1, nproc=2, deadline_s=deadline_s, on_progress=lambda _: None, fix="logs")


def test_ranks_that_get_on_are_left_alone_and_a_silent_run_is_ended(run):
    watching = watch(run, deadline_s=0.05)
    for step in range(5):
        run.progress(0).write_text(json.dumps(at(step)) + "\n")
        run.progress(1).write_text(json.dumps(at(step)) + "\n")
        watching.poll()
        time.sleep(0.03)
    time.sleep(0.05)
    with pytest.raises(Hung, match="no rank got on for 0 s: ranks 0 and 1 came to"):
        watching.poll()


def test_a_slow_start_is_given_time(run):
    watching = watch(run, deadline_s=0.0)
    watching.poll()
    watching.poll()


def test_ranks_that_are_done_are_not_hung(run):
    for rank in range(2):
        run.progress(rank).write_text(json.dumps(at(9, inside=False, phase="done")) + "\n")
    watching = watch(run, deadline_s=0.0)
    watching.poll()
    watching.poll()
