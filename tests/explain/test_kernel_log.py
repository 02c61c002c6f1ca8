"""What the kernel log says of a run's own processes, with their ranks."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.explain.kernel_log import KMSG, kernel_lines, killed_for_memory, read_kmsg
from paceline.explain.run import explain_run
from paceline.rundir import RunDir, append_event

CGROUPS = Path("/sys/fs/cgroup/memory")
KILLED = "Nov 21 10:00:00 node-3 kernel: Out of memory: Killed process 4712 (python) total-vm:68719476kB"
ANOTHER = "Nov 21 10:00:00 node-3 kernel: Out of memory: Killed process 99 (java) total-vm:1kB"


def test_lines_about_the_runs_processes_have_their_ranks(tmp_path):
    path = tmp_path / "kern.log"
    path.write_text(f"{ANOTHER}\n{KILLED}\nNov 21 kernel: 4712 packets\n")
    assert kernel_lines({4711: 0, 4712: 1}, kmsg=tmp_path / "none", kept=(path,)) == [(1, KILLED)]


def test_a_log_that_cannot_be_read_says_nothing(tmp_path):
    assert kernel_lines({4711: 0}, kmsg=tmp_path / "none", kept=(tmp_path / "none",)) == []


def kmsg_of(path, ago: float, text: str):
    """A log of one record, so many seconds old, as one read of the kernel's gives it."""
    path.write_text(f"6,1,{int(1e6 * (time.monotonic() - ago))},-;{text}\n")
    return path


@pytest.mark.skipif(not os.access(KMSG, os.R_OK), reason="/dev/kmsg may not be read")
def test_the_kernel_s_own_log_has_times_and_texts():
    lines = read_kmsg(KMSG)
    assert lines and all(0 <= seconds <= time.monotonic() + 1 for seconds, _ in lines)


def test_without_a_kernel_log_that_goes_back_far_enough_nothing_is_known(tmp_path):
    now = time.time()
    assert killed_for_memory(now - 60, now, kmsg=tmp_path / "none") is None
    assert killed_for_memory(now - 60, now, kmsg=kmsg_of(tmp_path / "late", 30, "eth0 is up")) is None


def test_a_quiet_time_is_known_to_be_quiet(tmp_path):
    now = time.time()
    log = kmsg_of(tmp_path / "kmsg", 500, "Memory cgroup out of memory: Killed process 9 (python)")
    assert killed_for_memory(now - 600, now, kmsg=log) is None  # older records are gone
    assert killed_for_memory(now - 400, now, kmsg=log) is False


@pytest.mark.skipif(
    not (os.access(KMSG, os.R_OK) and os.access(CGROUPS, os.W_OK)),
    reason="needs root, /dev/kmsg and cgroups of version 1",
)
def test_a_real_kill_for_memory_is_found(tmp_path):
    group = CGROUPS / f"paceline-kmsg-{os.getpid()}"
    group.mkdir()
    started = time.time()
    try:
        (group / "memory.limit_in_bytes").write_text(str(20 << 20))
        hungry = f"echo $$ > {group}/cgroup.procs; exec {sys.executable} -c 'x = bytearray(200 << 20)'"
        done = subprocess.run(["bash", "-c", hungry], check=False, timeout=60)
    finally:
        group.rmdir()
    assert done.returncode in (-9, 137)
    assert killed_for_memory(started, time.time())


@pytest.mark.skipif(not os.access(KMSG, os.R_OK), reason="/dev/kmsg may not be read")
def test_a_rank_killed_with_enough_memory_was_killed_by_somebody(tmp_path):
    run = RunDir(tmp_path / "books")
    run.logs(1).mkdir(parents=True)
    run.rank_log(1, 1).write_text("step 3/9 | loss 2.1\n")
    append_event(run, "attempt", attempt=1, nproc=2, pids=[1 << 22, 1 << 22])
    append_event(run, "rank_failed", attempt=1, rank=1, exit_code=None, signal="SIGKILL", consequence=False)
    said = explain_run(run)
    assert (said.cause, said.also, said.rank) == ("killed-from-outside", ("host-oom-killed",), 1)
    assert said.fix.endswith(f"paceline resume {run.path}")
