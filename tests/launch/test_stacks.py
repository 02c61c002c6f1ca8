"""Stacks, states and flight recordings of processes, taken from outside."""

import inspect
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from paceline.launch.stacks import (
    DUMP,
    OLDER_DUMP,
    PIPE,
    WORKERS,
    Frame,
    busy_worker,
    call_site,
    catches,
    loads_batch,
    main_frames,
    process_state,
    recorder_env,
    remove_pipes,
    request_recordings,
    take_stacks,
    wait_for_recordings,
    waits_for_others,
)
from paceline.rundir import RunDir, read_json_lines

DEADLINE_S = 120.0  # against hanging
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
from paceline.rundir import RunDir, read_json_lines
from paceline.train.process import answer_with_stacks
def spin():
    print("ready", flush=True)
    while True: sum(range(1000))
answer_with_stacks(RunDir(Path(sys.argv[1])), attempt=1, rank=0)
spin()
"""


def test_the_main_thread_is_read_from_the_output_of_py_spy():
    frames = main_frames(PY_SPY)
    assert [frame.name for frame in frames] == ["all_reduce", "wrapper", "one_step", "<module>"]
    assert waits_for_others(frames)
    assert call_site(frames) == "all_reduce, called at src/train.py:190"


def test_the_main_thread_is_read_from_the_output_of_faulthandler():
    frames = main_frames(FAULTHANDLER)
    assert frames == [Frame("tokenize", "/home/me/src/data.py", 3), Frame("<module>", "/home/me/src/train.py", 7)]
    assert not waits_for_others(frames)
    assert call_site(frames) == "tokenize at src/data.py:3"


def test_a_wait_for_work_that_was_started_before_is_a_wait_for_others(tmp_path):
    source = tmp_path / "sums.py"
    source.write_text("def finish(works):\n    for work in works:\n        work.wait()\n")
    assert waits_for_others([Frame("finish", str(source), 3)])
    assert not waits_for_others([Frame("finish", str(source), 2)])


def test_a_wait_for_a_queue_or_a_lock_is_not_a_wait_for_other_ranks():
    lines, first = inspect.getsourcelines(queue.Queue.get)
    at = first + next(number for number, line in enumerate(lines) if ".wait(" in line)
    assert not waits_for_others([Frame("wait", threading.__file__, 320), Frame("get", queue.__file__, at)])


def test_a_rank_that_waits_for_its_data_loader_is_shown_with_the_worker_that_makes_a_batch():
    folder = "/v/lib/python3.11/site-packages/torch/utils/data"
    waiting = (
        'Process 102: python train.py\n\nThread 102 (idle): "MainThread"\n'
        "    wait (/v/lib/python3.11/multiprocessing/connection.py:947)\n"
        f"    _MultiProcessingDataLoaderIter._try_get_data ({folder}/dataloader.py:1291)\n    <module> (/home/ann/train.py:23)\n"
    )
    worker = (  # forked, so its outermost frames are those of the rank
        'Process 105: python train.py\n\nThread 105 (idle): "MainThread"\n    Photos.__getitem__ (/home/ann/photos.py:14)\n'
        f"    _MapDatasetFetcher.fetch ({folder}/_utils/fetch.py:54)\n"
        f"    _MultiProcessingDataLoaderIter.__init__ ({folder}/dataloader.py:1176)\n    <module> (/home/ann/train.py:23)\n"
    )
    text = "\n".join(["py-spy", waiting, WORKERS, worker])
    frames = main_frames(text)
    assert loads_batch(frames) and not loads_batch(main_frames(worker))
    assert call_site(frames) == "DataLoader.__next__, called at ann/train.py:23"
    assert busy_worker(text) == "worker 105 is in Photos.__getitem__ at ann/photos.py:14"
    assert busy_worker(waiting) is None


def test_without_a_stack_there_is_no_call_site():
    assert main_frames("") == []
    assert call_site([]) is None


@pytest.fixture(scope="module")
def spinning_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spinning")
    process = subprocess.Popen([sys.executable, "-c", SPINS, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    yield RunDir(folder), process
    process.kill()
    process.wait()


@pytest.fixture
def spinning(spinning_process):
    """One process for all tests here; it goes on after each."""
    yield spinning_process
    spinning_process[1].send_signal(signal.SIGCONT)


def stop(process):
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)


def without_py_spy(monkeypatch):
    monkeypatch.setattr("paceline.launch.stacks.py_spy_stacks", lambda pids: {})
    monkeypatch.setattr("paceline.launch.stacks.OWN_STACKS_S", DEADLINE_S)


@pytest.mark.dist
def test_an_own_rank_writes_its_stacks_from_an_endless_loop_and_continues(spinning, monkeypatch):
    without_py_spy(monkeypatch)
    run, process = spinning
    for _ in range(2):  # the second time only what is new
        text = take_stacks(run, 1, {0: process.pid}, own_ranks=True)[0]
        assert text.startswith("faulthandler\n")
        assert text.count("in spin") == 1
    assert process.poll() is None


@pytest.mark.dist
def test_the_stacks_of_a_stopped_rank_are_not_waited_for(spinning, monkeypatch):
    without_py_spy(monkeypatch)
    run, process = spinning
    stop(process)
    assert take_stacks(run, 1, {0: process.pid}, own_ranks=True) == {}
    pending = re.findall(r"^(?:SigPnd|ShdPnd):\t(\w+)$", Path(f"/proc/{process.pid}/status").read_text(), re.M)
    assert [int(mask, 16) & (1 << (signal.SIGUSR2 - 1)) for mask in pending] == [0, 0]  # it was not even asked


def test_a_process_that_does_not_handle_the_signal_never_gets_it(tmp_path, monkeypatch):
    """SIGUSR2 ends a process without a handler: an own rank that has just started, or a script."""
    without_py_spy(monkeypatch)
    run = RunDir(tmp_path)
    run.logs(1).mkdir(parents=True)
    run.rank_stacks(1, 0).touch()
    process = subprocess.Popen(["sleep", "100"])
    try:
        assert not catches(process.pid, signal.SIGUSR2)
        assert take_stacks(run, 1, {0: process.pid}, own_ranks=True) == {}
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


@pytest.mark.dist
@pytest.mark.parametrize("stopped", [False, True])
def test_py_spy_reads_any_python_process_even_a_stopped_one(spinning, stopped, monkeypatch):
    monkeypatch.setattr("paceline.launch.stacks.PY_SPY_S", DEADLINE_S)
    run, process = spinning
    if stopped:
        stop(process)
    text = take_stacks(run, 1, {0: process.pid}, own_ranks=False)[0]
    assert text.startswith("py-spy\n")
    assert "spin" in [frame.name for frame in main_frames(text)]


def test_a_process_state_is_stopped_and_then_gone():
    process = subprocess.Popen(["sleep", "600"])
    stop(process)
    assert process_state(process.pid) == "T"
    process.kill()
    process.wait()
    assert process_state(process.pid) is None


def test_each_attempt_has_its_own_pipes_and_recordings(tmp_path):
    variables = recorder_env({}, RunDir(tmp_path), tmp_path)
    assert {name: Path(stem).parent for name, stem in variables.items()} == {PIPE: tmp_path, DUMP: tmp_path}
    assert not list(tmp_path.iterdir())


def test_recorder_variables_that_the_user_has_set_stay(tmp_path):
    for name in (PIPE, DUMP, OLDER_DUMP):
        assert recorder_env({name: "/elsewhere/trace_"}, RunDir(tmp_path), tmp_path) == {}


def test_where_pipes_cannot_exist_the_recorders_stay_off_and_the_run_notes_it(tmp_path):
    run = RunDir(tmp_path)
    assert recorder_env({}, run, tmp_path / "absent") == {}
    [note] = read_json_lines(run.events)
    assert "holds no named pipes" in note["text"]


def test_only_ranks_that_listen_are_asked_for_recordings_and_the_wait_for_them_is_short(tmp_path):
    run = RunDir(tmp_path)
    stem = run.logs(1)
    stem.mkdir(parents=True)
    for rank in (0, 1):
        os.mkfifo(stem / f"collectives_{rank}.pipe")
    reader = os.open(stem / "collectives_1.pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        paths = request_recordings(run, 1, [0, 1, 2])
        assert [path.name for path in paths] == ["comm_lib_trace_rank_1"]
        assert os.read(reader, 8) == b"1"
        wait_for_recordings(paths)
    finally:
        os.close(reader)
    remove_pipes(stem)
    assert list(stem.iterdir()) == []
