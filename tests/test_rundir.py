"""The run folder's files: whole lines, whole files, one holder at a time."""

import errno
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline.errors import PacelineError
from paceline.file_systems import reserve_space
from paceline.rundir import (
    RunDir,
    append_event,
    append_json_line,
    is_locked,
    lock_run,
    read_json_lines,
    unreadable_file,
    unwritable_run,
    write_atomic,
)
from paceline.typed_fields import read_run_file


def test_a_half_written_last_line_is_passed_over(tmp_path):
    file = tmp_path / "metrics.jsonl"
    append_json_line(file, {"step": 1})
    with file.open("a") as out:
        out.write('{"step": 2')
    assert list(read_json_lines(file)) == [{"step": 1}]


def test_a_line_damaged_in_the_middle_hides_no_other(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n\x00\x00{broken\n[1]\n{"step": 2}\n')
    assert list(read_json_lines(file)) == [{"step": 1}, {"step": 2}]


def test_an_event_carries_utc_time_and_its_fields(tmp_path):
    run = RunDir(tmp_path)
    append_event(run, "checkpoint", step=40)
    (event,) = read_json_lines(run.events)
    assert (event["event"], event["step"], event["time"][-1]) == ("checkpoint", 40, "Z")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    file = tmp_path / "plan.json"
    write_atomic(file, "one")
    write_atomic(file, "two")
    assert (file.read_text(), os.listdir(tmp_path)) == ("two", ["plan.json"])


def test_a_run_of_another_user_is_to_be_copied_and_a_new_one_to_go_elsewhere(tmp_path):
    run, error = RunDir(tmp_path / "a"), PermissionError(13, "Permission denied")
    assert unwritable_run(run, error).fix == "--runs-dir DIR in a place you can write"
    run.path.mkdir()
    run.config_toml.touch()
    assert unwritable_run(run, error).fix == f"copy it first: cp -r {run.path} DIR"


def test_a_run_in_use_names_its_process_and_is_free_when_that_ends(tmp_path):
    run = RunDir(tmp_path)
    code = (
        "import sys; from pathlib import Path; from paceline.rundir import RunDir, lock_run;"
        "lock_run(RunDir(Path(sys.argv[1]))); print('held', flush=True); input()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "held\n"
    assert is_locked(run)
    with pytest.raises(PacelineError, match=f"in use by process {holder.pid}"):
        lock_run(run)
    holder.kill()
    holder.wait()
    assert not is_locked(run)
    os.close(lock_run(run))


def test_writers_of_one_file_do_not_take_each_other_s_half(tmp_path):
    path = tmp_path / "speeds.json"

    def write(number):
        for _ in range(100):
            write_atomic(path, str(number) * 5000)
            assert len(set(path.read_text())) == 1 and path.stat().st_size == 5000

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert [entry.name for entry in tmp_path.iterdir()] == ["speeds.json"]


def test_a_file_in_a_closed_folder_is_reported_as_that_folder(tmp_path, monkeypatch):
    closed = tmp_path / "closed"
    monkeypatch.setattr(os, "access", lambda path, mode: closed not in (path, *path.parents))
    error = PermissionError(errno.EACCES, "Permission denied")  # as from read(), which names no file
    assert unreadable_file(closed / "slurm.json", error).message == f"{closed} cannot be read: Permission denied"
    path = tmp_path / "config.toml"
    path.symlink_to("/proc/self/mem")
    with pytest.raises(PacelineError, match=f"{path} cannot be read: Input/output error"):
        read_run_file(path, str)


def test_the_last_events_of_a_run_fit_on_a_full_disk(tiny_disk):
    run = RunDir(tiny_disk)
    append_event(run, "attempt", attempt=1)
    reserve_space(run.events, 64 << 10)
    fd = os.open(tiny_disk / "fill", os.O_WRONLY | os.O_CREAT)
    with pytest.raises(OSError, match="No space left"):
        while True:
            os.write(fd, b"x" * 4096)
    os.close(fd)
    for step in range(20):
        append_event(run, "note", text=f"step {step}: {'x' * 500}")
    events = list(read_json_lines(run.events))
    assert [event["event"] for event in events] == ["attempt", *["note"] * 20]
