"""The real trainer with a rank that hangs: named, killed, and the run goes on to its end."""

import json
import os
import signal
import subprocess
import time

import pytest
from runs import Workshop

from paceline.marks import read_mark
from paceline.rundir import RunDir, read_json_lines

pytestmark = pytest.mark.dist


def event(run, name):
    return next((each for each in read_json_lines(run.events) if each["event"] == name), None)


def wait_for(condition, timeout_s):
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come to this"
        time.sleep(0.02)
    return found


def test_a_stopped_rank_is_named_within_ten_seconds_and_the_run_goes_on_to_its_end(tmp_path):
    workshop = Workshop(tmp_path)
    run = RunDir(tmp_path / "runs" / "stopped")
    keys = {"nproc": 2, "num_steps": 300, "save_every": 20, "log_every": 20, "hang_after": 8}
    with subprocess.Popen(
        workshop.train_command("stopped", **keys), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        wait_for(lambda: event(run, "checkpoint"), 90)
        os.kill(int((run.logs(1) / "1.pid").read_text()), signal.SIGSTOP)
        stopped = time.monotonic()
        hang = wait_for(lambda: event(run, "hang"), 15)
        took_s = time.monotonic() - stopped
        print(f"named after {took_s:.2f} s: {hang['text']}")
        output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    assert took_s <= 10
    assert hang["rank"] == 1
    assert "rank 1 is stopped (state T)" in hang["text"]
    decision = event(run, "decision")
    assert (decision["action"], decision["cause"], decision["rank"]) == ("retry", "hang", 1)
    assert [read_mark(run.progress(rank)).phase for rank in range(2)] == ["done", "done"]
    said = json.loads((run.hang(1) / "hang.json").read_text())
    assert [each["state"] for each in said["ranks"]][1] == "T"
