"""Stacks of processes, taken from outside and read."""

import inspect
import queue
import signal
import subprocess
import sys
import threading
import time

import pytest

from paceline.launch.hang import process_state
from paceline.launch.stacks import Frame, catches, main_frames, take_stacks, waits_for_others, what_it_does
from paceline.rundir import RunDir

PY_SPY = """py-spy
Process 4474: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 4478 (idle): "helper"
    wait (threading.py:320)
Thread 4474 (idle): "MainThread"
    all_reduce (/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py:3252)
    wrapper (/v/lib/python3.11/site-packages/torch/distributed/c10d_logger.py:83)
    one_step (/home/me/src/train.py:190)
    <module> (/home/me/src/train.py:7)
"""
FAULTHANDLER = """faulthandler
Current thread 0x00007fef0f4606c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 982 in run

Thread 0x00007fef0ffbbb80 (most recent call first):
  File "/home/me/src/data.py", line 3 in tokenize
  File "/home/me/src/train.py", line 7 in <module>
"""
SPINS = """
import sys
from pathlib import Path
from paceline.rundir import RunDir
from paceline.train.progress import answer_with_stacks
def spin():
    print("ready", flush=True)
    while True: sum(range(1000))
answer_with_stacks(RunDir(Path(sys.argv[1])), attempt=1, rank=0)
spin()
"""


def test_the_main_thread_is_found_in_what_py_spy_prints():
    frames = main_frames(PY_SPY)
    assert [frame.name for frame in frames] == ["all_reduce", "wrapper", "one_step", "<module>"]
    assert waits_for_others(frames)
    assert what_it_does(frames) == "all_reduce, called at src/train.py:190"


def test_the_main_thread_is_found_in_what_faulthandler_writes():
    frames = main_frames(FAULTHANDLER)
    assert frames == [Frame("tokenize", "/home/me/src/data.py", 3), Frame("<module>", "/home/me/src/train.py", 7)]
    assert not waits_for_others(frames)
    assert what_it_does(frames) == "tokenize at src/data.py:3"


def test_a_wait_for_work_that_was_started_before_is_a_wait_for_others(tmp_path):
    source = tmp_path / "sums.py"
    source.write_text("def finish(works):\n    for work in works:\n        work.wait()\n")
    assert waits_for_others([Frame("finish", str(source), 3)])
    assert not waits_for_others([Frame("finish", str(source), 2)])


def test_a_wait_for_a_queue_or_a_lock_is_none_for_other_ranks():
    lines, first = inspect.getsourcelines(queue.Queue.get)
    at = first + next(number for number, line in enumerate(lines) if ".wait(" in line)
    assert not waits_for_others([Frame("wait", threading.__file__, 320), Frame("get", queue.__file__, at)])


def test_no_stack_is_no_place():
    assert main_frames("") == []
    assert what_it_does([]) is None


@pytest.fixture
def spinning(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", SPINS, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    yield RunDir(tmp_path), process
    process.kill()
    process.wait()


def without_py_spy(monkeypatch):
    monkeypatch.setattr("paceline.launch.stacks.find_py_spy", lambda: None)


def test_a_rank_of_ours_writes_its_stacks_from_an_endless_loop_and_goes_on(spinning, monkeypatch):
    without_py_spy(monkeypatch)
    run, process = spinning
    for _ in range(2):  # the second time only what is new
        text = take_stacks(run, 1, {0: process.pid}, own=True)[0]
        assert text.startswith("faulthandler\n")
        assert text.count("in spin") == 1
    assert process.poll() is None


def test_a_stopped_rank_is_not_waited_for(spinning, monkeypatch):
    without_py_spy(monkeypatch)
    run, process = spinning
    process.send_signal(signal.SIGSTOP)
    while process_state(process.pid) != "T":
        time.sleep(0.01)
    started = time.monotonic()
    assert take_stacks(run, 1, {0: process.pid}, own=True) == {}
    assert time.monotonic() - started < 0.5


def test_a_process_that_would_not_answer_is_never_signalled(tmp_path, monkeypatch):
    """SIGUSR2 is the end of one that does not catch it: one of ours that has just begun, or a script's."""
    without_py_spy(monkeypatch)
    run = RunDir(tmp_path)
    run.logs(1).mkdir(parents=True)
    run.rank_stacks(1, 0).touch()
    process = subprocess.Popen(["sleep", "100"])
    try:
        assert not catches(process.pid, signal.SIGUSR2)
        assert take_stacks(run, 1, {0: process.pid}, own=True) == {}
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("stopped", [False, True])
def test_py_spy_shows_any_python_process_a_stopped_one_too(spinning, stopped):
    run, process = spinning
    if stopped:
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.1)
    text = take_stacks(run, 1, {0: process.pid}, own=False)[0]
    assert text.startswith("py-spy\n")
    assert "spin" in [frame.name for frame in main_frames(text)]
