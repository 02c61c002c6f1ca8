"""Marks: one line in a mapped file that readers can trust, at the cost of nothing. And stacks when asked."""

import json
import signal
import subprocess
import sys
import time

import pytest

from paceline.marks import PHASES, WIDTH, Mark, read_mark
from paceline.rundir import RunDir, read_json_lines
from paceline.train.progress import Progress


@pytest.fixture
def run(tmp_path):
    return RunDir(tmp_path)


def test_a_mark_is_one_whole_line_of_json_overwritten_in_place(run):
    progress = Progress(run, 1)
    progress.mark(123456, "train")
    progress.mark(7, "eval")
    text = run.progress(1).read_text()
    assert len(text) == WIDTH
    assert text.endswith("}\n")
    said = next(read_json_lines(run.progress(1)))
    assert (said["step"], said["micro_step"], said["phase"]) == (7, 0, "eval")
    assert abs(said["time"] - time.time()) < 60


def test_a_reader_gets_the_mark_back_with_the_hosts_monotonic_time(run):
    Progress(run, 0).mark(12, "backward", 3)
    mark = read_mark(run.progress(0))
    assert mark == Mark(12, 3, "backward", mark.monotonic)
    assert abs(mark.monotonic - time.monotonic()) < 60


@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_has_the_same_length(run, phase):
    Progress(run, 0).mark(999_999_999, phase, 99_999)
    assert read_mark(run.progress(0)).phase == phase


def test_a_half_written_mark_is_known(run):
    progress = Progress(run, 0)
    progress.mark(98, "train")
    before = run.progress(0).read_bytes()
    progress.mark(120, "train")
    after = run.progress(0).read_bytes()
    run.progress(0).write_bytes(after[:17] + before[17:])
    assert json.loads(run.progress(0).read_bytes())["step"] == 128  # well formed, and a step that never was
    assert read_mark(run.progress(0)) is None


def test_no_mark_yet_is_none_and_so_is_a_folder_without_one(run):
    assert read_mark(run.progress(0)) is None
    Progress(run, 0)
    assert read_mark(run.progress(0)) is None


def test_a_longer_mark_of_an_older_version_is_replaced(run):
    run.progress(0).parent.mkdir()
    run.progress(0).write_text('{"step": 3}'.ljust(400) + "\n")
    Progress(run, 0).mark(4, "load")
    assert read_mark(run.progress(0)).step == 4


def test_marks_grow_in_the_order_of_a_step():
    order = [
        Mark(4, 0, "train", 0), Mark(4, 0, "eval", 0), Mark(4, 0, "save", 0), Mark(4, 0, "load", 0), Mark(4, 0, "forward", 0),
        Mark(4, 0, "backward", 0), Mark(4, 1, "load", 0), Mark(4, 1, "backward", 0), Mark(4, 1, "reduce", 0),
        Mark(4, 1, "update", 0), Mark(5, 0, "train", 0),
    ]  # fmt: skip
    assert [mark.place for mark in order] == sorted(mark.place for mark in order)


def test_a_mark_outlives_the_process_that_made_it(run):
    script = (
        "import os, sys; from pathlib import Path; from paceline.rundir import RunDir;"
        "from paceline.train.progress import Progress; Progress(RunDir(Path(sys.argv[1])), 0).mark(5, 'save');"
        "os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(run.path)]).returncode == -signal.SIGKILL
    assert read_mark(run.progress(0)).phase == "save"


def test_a_mark_costs_microseconds(run):
    """About one on a quiet machine; the bound leaves room for a busy one."""
    progress, num = Progress(run, 0), 20_000
    times = []
    for _ in range(5):
        started = time.process_time()
        for step in range(num):
            progress.mark(step, "forward", 3)
        times.append((time.process_time() - started) / num)
    assert min(times) < 10e-6
