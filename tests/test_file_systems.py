"""Locks of files: where a file system has none, and where a mount keeps them to one host; tests/launch/test_nfs.py has real NFS."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import file_systems
from paceline.data.prepare import prepare
from paceline.file_systems import NoLocks, is_of_one_host, try_lock
from paceline.launch import background
from paceline.launch.stacks import process_state
from paceline.rundir import RunDir, is_locked, lock_run
from paceline.track.follower import only_one

MOUNT = "50 1 {device} / /home rw,relatime shared:1 - nfs4 server:/ rw,vers=3,{option},addr=10.0.0.1\n"


@pytest.fixture
def without_locks(monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(file_systems.fcntl, "flock", refuse)


def test_a_lock_is_held_once_and_by_many_readers(tmp_path):
    path = tmp_path / "x"
    with path.open("a") as first, path.open("a") as second, path.open() as reader, path.open() as other:
        assert try_lock(first)
        assert not try_lock(second) and not try_lock(reader, shared=True)
        first.close()
        assert try_lock(reader, shared=True) and try_lock(other, shared=True)
        assert not try_lock(second, patient=True)


WORKER = "import sys; sys.stdin.read()"
SUPERVISOR = f"""
import subprocess, sys
from pathlib import Path
from paceline.rundir import RunDir, lock_run
lock = lock_run(RunDir(Path(sys.argv[1])))
subprocess.Popen([sys.executable, "-c", {WORKER!r}], pass_fds=(lock,))
"""


def test_resume_waits_for_workers_that_outlive_a_supervisor_whose_end_nobody_asked_for(tmp_path, capsys, monkeypatch):
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(tmp_path)], stdin=subprocess.PIPE)
    os.waitid(os.P_PID, supervisor.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    assert Path(f"/proc/{supervisor.pid}").exists() and is_locked(RunDir(tmp_path))

    def state_of(pid: int) -> str | None:
        supervisor.stdin.close()  # the worker ends
        return process_state(pid)

    monkeypatch.setattr(background, "process_state", state_of)
    os.close(background.wait_for_lock(RunDir(tmp_path)))
    assert "waiting for the workers" in capsys.readouterr().out
    supervisor.wait()


def test_a_file_system_without_locks_stops_no_run(tmp_path, without_locks, capsys):
    lock_run(RunDir(tmp_path))
    assert "is on a file system without locks" in capsys.readouterr().err
    assert not is_locked(RunDir(tmp_path))
    with (tmp_path / "x").open("a") as file, pytest.raises(NoLocks):
        try_lock(file)


def test_a_text_is_prepared_and_a_tracker_sends_on_a_file_system_without_locks(tmp_path, without_locks, capsys):
    text, cache = tmp_path / "text.txt", tmp_path / "cache"
    text.write_text("".join(f"{number} lazy dogs\n" for number in range(2000)))
    other = cache / "data" / ".other.making"  # of a process that may be at work
    other.mkdir(parents=True)
    prepare(str(text), tokenizer=None, vocab_size=300, cache_dir=cache)
    assert "has no locks: prepare one text at a time" in capsys.readouterr().err
    assert other.is_dir()
    with only_one(RunDir(tmp_path), "tensorboard", wait_s=0.0):
        pass


@pytest.mark.parametrize(("option", "kept"), [("local_lock=none", False), ("local_lock=flock", True), ("nolock", True)])
def test_a_mount_that_keeps_locks_to_one_host_is_known_by_its_options(tmp_path, monkeypatch, option, kept, capsys):
    device = tmp_path.stat().st_dev
    line = MOUNT.format(device=f"{os.major(device)}:{os.minor(device)}", option=option)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: line)
    lock = lock_run(RunDir(tmp_path))
    assert is_of_one_host(lock) == kept
    assert ("other hosts do not see locks of" in capsys.readouterr().err) == kept
