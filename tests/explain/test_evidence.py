"""Evidence outside of logs: flight recorder dumps, samples of the hosts' health, and the kernel log."""

import io
import json
import math
import os
import pickle
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from paceline.explain import evidence
from paceline.explain.collectives import flight_recorder_logs
from paceline.explain.evidence import KMSG, has_oom_kill, read_kernel_errors, read_kmsg, read_record
from paceline.explain.run_folder import explain, explain_run
from paceline.rundir import RECORDER_DUMP, RunDir, append_event, append_sample, utc_now
from paceline.units import unix_time

CGROUPS = Path("/sys/fs/cgroup/memory")
OOM_KILL = "Nov 21 10:00:00 node-3 kernel: Out of memory: Killed process 4712 (python) total-vm:68719476kB"
OTHER_OOM_KILL = "Nov 21 10:00:00 node-3 kernel: Out of memory: Killed process 99 (java) total-vm:1kB"
FAILED = """step 5 loss: 3.0
Traceback (most recent call last):
  File "x.py", line 1, in <module>
RuntimeError: CUDA error: unspecified launch failure
"""
KILLED = "step 5 loss: 3.0\nexitcode: -9 (pid: 111)\n"
FULL = {"ram_used": 8 * 1020 << 20}  # nearly 8 GiB


def dump_content(sequence, name="nccl:all_reduce", *, completed=None, world_size=None):
    entries = [
        {"pg_id": 0, "collective_seq_id": n, "profiling_name": name, "is_p2p": False, "input_sizes": [[4]]}
        for n in range(1, sequence + 1)
    ]
    if completed is not None:
        entries = [{**entry, "state": "completed" if n < completed else "started"} for n, entry in enumerate(entries)]
    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(world_size)))}} if world_size else {}
    return {"version": "2.5", "pg_config": groups, "entries": entries}


def dump(run, rank, sequence, name="nccl:all_reduce"):
    run.logs(1).mkdir(parents=True, exist_ok=True)
    path = run.logs(1) / f"{RECORDER_DUMP}{rank}"
    path.write_bytes(pickle.dumps(dump_content(sequence, name)))


def recorded(run, *sequences, world_size=None):
    """The logs of the late rank if each rank's last collective is the one with this number."""
    for rank, sequence in enumerate(sequences):
        dump(run, rank, sequence)
    return flight_recorder_logs(run, 1, [{"event": "attempt", "world_size": world_size or len(sequences)}])


def test_the_one_rank_that_did_not_arrive_is_the_late_one(tmp_path):
    [log] = recorded(RunDir(tmp_path), 41, 41, 40, 41)
    (record,) = log.records
    assert record.rank == 2
    assert record.text == (
        "flight recorder: the ranks wait in different collectives (ranks 0, 1 and 3 in nccl:all_reduce number 41,"
        " rank 2 in nccl:all_reduce number 40): rank 2 did not get past number 40"
    )


def test_ranks_at_the_same_collective_have_no_late_rank(tmp_path):
    assert recorded(RunDir(tmp_path), 41, 41, 41, 41) == []


def test_several_ranks_that_are_behind_have_no_late_rank(tmp_path):
    [log] = recorded(RunDir(tmp_path), 40, 40, 41, 41)
    assert log.records[0].rank is None and "ranks 0 and 1 did not get past number 40" in log.records[0].text


def write_dumps(folder, *contents, as_json=False):
    """A folder with a log of a hang and torch's dumps beside it."""
    (folder / "train.log").write_text("step 1 loss: 2.0\nstep 2 loss: 1.9\n")
    for rank, content in enumerate(contents):
        path = folder / f"nccl_trace_rank_{rank}{'.json' if as_json else ''}"
        path.write_bytes(json.dumps(content).encode() if as_json else pickle.dumps(content))
    return explain(folder / "train.log")


@pytest.mark.parametrize("as_json", [False, True])
def test_dumps_beside_a_log_show_the_operation_that_one_rank_does_not_call(tmp_path, as_json):
    contents = [
        dump_content(5, name, completed=4, world_size=3)
        for name in ("nccl:all_reduce", "nccl:broadcast", "nccl:all_reduce")
    ]
    explanation = write_dumps(tmp_path, *contents, as_json=as_json)
    assert (explanation.cause, explanation.rank) == ("collective-timeout-desync", 1)
    assert (
        "under number 5 the ranks wait in different operations (ranks 0 and 2 in nccl:all_reduce" in explanation.summary
    )


def test_dumps_of_which_none_has_completed_a_collective_show_a_broken_path(tmp_path):
    explanation = write_dumps(tmp_path, *[dump_content(1, completed=0, world_size=2)] * 2)
    assert explanation.cause == "nccl-p2p-hang"
    assert "ranks 0 and 1 wait in the same first collective (nccl:all_reduce)" in explanation.summary


def test_dumps_of_some_ranks_only_prove_nothing(tmp_path):
    contents = [dump_content(number, completed=0, world_size=3) for number in (1, 2)]
    assert write_dumps(tmp_path, *contents).cause == "healthy"


def test_dumps_of_an_earlier_run_are_ignored(tmp_path):
    contents = [dump_content(1, completed=0, world_size=2)] * 2
    assert write_dumps(tmp_path, *contents).cause == "nccl-p2p-hang"
    for path in tmp_path.glob("nccl_trace_rank_*"):
        os.utime(path, (time.time() - 3e5,) * 2)
    assert explain(tmp_path / "train.log").cause == "healthy"


RAS = """\
Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         2         4         8         8   RUNNING  MISMATCH

Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different AllReduce operation counts
  7 ranks have launched up to operation 64
  Rank 5 has launched up to operation 60 -- GPU 1 managed by process 4711 on node node1
"""
DEAD = """\
Errors
======

DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 4711 on node 172.16.64.213 managing GPU 5
"""


@pytest.mark.parametrize(
    ("report", "cause", "rank", "text"),
    [
        (RAS, "collective-timeout-desync", 5, "most 64: rank 5 launched fewer or more"),
        (DEAD, "peer-died", None, "Process 4711 on node 172.16.64.213 managing GPU 5"),
    ],
)
def test_a_ras_report_beside_a_log_shows_the_rank_that_lags_behind_or_is_dead(tmp_path, report, cause, rank, text):
    (tmp_path / "train.log").write_text("loading\n")
    (tmp_path / "ncclras.txt").write_text(report)
    explanation = explain(tmp_path)
    assert (explanation.cause, explanation.rank) == (cause, rank)
    assert text in explanation.evidence[0].text
    assert explanation.evidence[0].source == str(tmp_path / "ncclras.txt")


def test_a_pickle_that_would_run_code_is_rejected(tmp_path):
    class Evil:
        def __reduce__(self):
            return (tmp_path.joinpath("ran").touch, ())

    run = RunDir(tmp_path)
    dump(run, 1, 3)
    (run.logs(1) / f"{RECORDER_DUMP}0").write_bytes(pickle.dumps(Evil()))
    assert flight_recorder_logs(run, 1, [{"event": "attempt", "world_size": 2}]) == []
    assert not (tmp_path / "ran").exists()


def test_a_run_folder_has_a_late_rank_only_if_every_rank_wrote_a_dump(tmp_path):
    assert [log.records[0].rank for log in recorded(RunDir(tmp_path), 41, 41, 40)] == [2]
    assert recorded(RunDir(tmp_path), 41, 41, 40, world_size=4) == []


def test_an_xid_in_the_samples_of_the_attempt_shows_the_gpu_and_its_rank(tmp_path):
    run = RunDir(tmp_path)
    run.config_toml.write_text("depth = 4\n")
    old = {"index": 2, "errors": {"xid": 48, "xid_count": 1}}
    append_sample(run.health("node7"), {"time": "2026-01-01T00:00:00.000Z", "gpus": [old]})
    append_event(run, "attempt", attempt=1, world_size=2, pids=[111, 222])
    run.logs(1).mkdir(parents=True)
    for rank in (0, 1):
        run.rank_log(1, rank).write_text(FAILED)
    gpu = {"index": 3, "processes": [{"pid": 222, "ours": True}], "errors": {"xid": 79, "xid_count": 1}}
    append_sample(run.health("node7"), {"time": utc_now(), "gpus": [gpu]})
    explanation = explain_run(run)
    assert (explanation.cause, explanation.rank) == ("gpu-hardware-error", 1)
    assert "Xid 79" in explanation.summary
    assert explanation.evidence[0].text.endswith("79, GPU 3 of node7, GPU has fallen off the bus")
    assert explanation.fix.startswith("reboot the host (a lost GPU cannot be reset)")


def explain_samples(tmp_path, log, *samples):
    """Explains a failed attempt of one rank with these samples of its host."""
    run = RunDir(tmp_path)
    tmp_path.mkdir(exist_ok=True)
    run.config_toml.write_text("depth = 4\n")
    append_sample(run.health("node7"), {"time": "2026-01-01T00:00:00.000Z", "ram_used": 1 << 30, "ram_total": 8 << 30})
    append_event(run, "attempt", attempt=1, world_size=1, pids=[111])
    run.logs(1).mkdir(parents=True)
    run.rank_log(1, 0).write_text(log)
    for sample in samples:
        append_sample(run.health("node7"), {"time": utc_now(), **sample})
    return explain_run(run)


def bytes_read():
    """The bytes that this process has read so far."""
    path = Path("/proc/self/io")
    if not path.exists():
        pytest.skip("this system does not count the bytes that a process reads")
    return int(path.read_text().split()[1])


def test_only_the_end_of_a_long_health_file_is_read(tmp_path):
    run = RunDir(tmp_path)
    explain_samples(tmp_path, FAILED, FULL)
    with run.health("node7").open("a") as file:
        file.writelines(
            json.dumps({"time": utc_now(), "ram_used": 1 << 30, "pad": "x" * 400}) + "\n" for _ in range(50_000)
        )
    before = bytes_read()
    assert explain_run(run).cause == "illegal-memory-access"
    assert bytes_read() - before < 5 << 20 < run.health("node7").stat().st_size


def test_the_progress_of_a_long_run_is_read_from_both_ends_of_its_metrics(tmp_path):
    run = RunDir(tmp_path)
    with run.metrics.open("w") as file:
        file.write('{"broken\n')
        file.writelines(f'{{"step": {step}, "loss": 2.5, "pad": "{"x" * 100}"}}\n' for step in range(1, 10_001))
        file.write('{"step": 10001}\n{"step": "x"}\n[1]\n{"step": 10002, "lo')
    progress = explain_samples(tmp_path, FAILED).progress
    assert (progress.first_step, progress.last_step, progress.last_loss) == (1, 10_001, 2.5)
    assert progress.steps >= 10_001


def texts(explanation):
    return [item.text for item in explanation.evidence if item.source == "health/node7.jsonl"]


def test_memory_that_grew_until_the_end_is_evidence_for_a_kill(tmp_path):
    explanation = explain_samples(
        tmp_path, KILLED, {"ram_used": 2 << 30, "ram_total": 8 << 30}, {"ram_used": 5 << 30}, FULL
    )
    [text] = texts(explanation)
    assert text.startswith("memory of node7: 2.0 GiB at ")
    assert "8.0 GiB of 8.0 GiB" in text
    assert explanation.evidence[-1].line == 4


def test_the_limit_of_a_control_group_counts_too(tmp_path):
    group = {"cgroup_used": 99 << 20, "cgroup_limit": 100 << 20}
    [text] = texts(explain_samples(tmp_path, KILLED, {"ram_used": 2 << 30, "ram_total": 8 << 30, **group}))
    assert "memory of the control group" in text


def test_free_memory_and_memory_of_an_earlier_attempt_are_not_evidence(tmp_path):
    assert texts(explain_samples(tmp_path / "a", KILLED, {"ram_used": 2 << 30, "ram_total": 8 << 30})) == []
    assert texts(explain_samples(tmp_path / "b", KILLED)) == []


def test_memory_is_no_evidence_for_an_unrelated_cause(tmp_path):
    mistake = "Traceback (most recent call last):\nModuleNotFoundError: No module named 'flash_attn'\n"
    assert texts(explain_samples(tmp_path, mistake, {**FULL, "ram_total": 8 << 30})) == []


def test_a_disk_that_filled_is_evidence_for_a_failed_write(tmp_path):
    full = "Traceback (most recent call last):\nOSError: [Errno 28] No space left on device\n"
    explanation = explain_samples(
        tmp_path, full, {"disk_free": 50 << 30, "disk_total": 100 << 30}, {"disk_free": 1 << 20}
    )
    [text] = texts(explanation)
    assert explanation.cause == "disk-full"
    assert "50.0 GiB free" in text and "1.0 MiB free" in text


def test_reduced_clocks_are_evidence_for_a_late_rank(tmp_path):
    late = "[rank0]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE) ran for 600000 ms\n"
    hot = {"index": 1, "throttle": ["power", "thermal"], "sm_mhz": 810, "temperature_c": 93}
    usual = {"index": 0, "throttle": ["power"], "sm_mhz": 2400, "temperature_c": 70}
    [text] = texts(explain_samples(tmp_path, late, {"gpus": [usual, hot]}))
    assert text == "GPU 1 of node7 ran at reduced clocks: thermal, 810 MHz, 93 °C"


def test_kernel_errors_of_the_runs_processes_have_their_ranks(tmp_path):
    path = tmp_path / "kern.log"
    path.write_text(f"{OTHER_OOM_KILL}\n{OOM_KILL}\nNov 21 kernel: 4712 packets\n")
    assert read_kernel_errors({4711: 0, 4712: 1}, since=math.nan, kmsg=tmp_path / "none", files=(path,)) == [
        (1, OOM_KILL)
    ]


@pytest.mark.parametrize(
    ("line", "pid"),
    [
        ("Memory cgroup out of memory: Killed process 4712 (python) total-vm:218812kB, UID:0 pgtables:104kB", 4712),
        ("oom-kill:constraint=CONSTRAINT_MEMCG,mems_allowed=0,task=python,pid=4712,uid=1000", 4712),
        ("NVRM: Xid (PCI:0000:65:00): 31, pid=4712, name=python, Ch 00000008", 4712),
        ("python[4712]: segfault at 18 ip 00007f1c2d4e11a0 sp 00007ffd error 4 in libtorch.so", 4712),
        ("traps: python[4712] general protection fault ip:7f1c sp:7ffd error:0", 4712),
    ],
)
def test_only_a_process_id_of_a_kernel_error_names_a_rank(tmp_path, line, pid):
    path = tmp_path / "kern.log"
    path.write_text(f"[ 957.515074] {line}\n")
    numbers = {int(number): 1 for number in re.findall(r"\d+", path.read_text()) if int(number) != pid}
    files = {"kmsg": tmp_path / "none", "files": (path,)}
    assert read_kernel_errors(numbers, since=time.time(), **files) == []
    assert read_kernel_errors({pid: 0}, since=time.time(), **files) == [(0, path.read_text().rstrip())]


def test_a_kernel_error_of_another_time_is_about_another_process(tmp_path):
    now, ranks = time.time(), {9: 1}
    kmsg = kmsg_of(tmp_path / "kmsg", 500, text := "Memory cgroup out of memory: Killed process 9 (python)")
    assert read_kernel_errors(ranks, since=now - 600, until=now - 495, kmsg=kmsg) == [(1, text)]
    assert read_kernel_errors(ranks, since=now - 400, until=now, kmsg=kmsg) == []
    assert read_kernel_errors(ranks, since=now - 800, until=now - 600, kmsg=kmsg) == []


@pytest.mark.parametrize("at", ["Nov 21 10:00:00", "2026-11-21T10:00:00.123456+00:00", "2026-11-21 10:00:00"])
def test_a_line_of_a_system_log_counts_by_its_time(tmp_path, at, monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    path = tmp_path / "kern.log"
    path.write_text(f"{at} node-3 kernel: Out of memory: Killed process 4712 (python) total-vm:1kB\n")
    files, killed = {"kmsg": tmp_path / "none", "files": (path,)}, unix_time("2026-11-21T10:00:00Z")
    assert len(read_kernel_errors({4712: 1}, since=killed - 60, until=killed + 60, **files)) == 1
    assert read_kernel_errors({4712: 1}, since=killed + 60, until=killed + 120, **files) == []


def test_a_line_of_a_system_log_is_of_the_year_after_the_one_in_which_the_run_began_or_of_no_coming_one(tmp_path):
    path, start = tmp_path / "kern.log", time.mktime((2025, 12, 31, 23, 0, 0, 0, 0, -1))
    path.write_text("Jan  1 00:10:00 host kernel: Out of memory: Killed process 9 (python) total-vm:1kB\n")
    files = {"kmsg": tmp_path / "none", "files": (path,)}
    assert len(read_kernel_errors({9: 0}, since=start, until=start + 7200, **files)) == 1
    path.write_text(
        time.strftime("%b %d %H:%M:%S kernel: Killed process 9 (python)\n", time.localtime(time.time() + 86400))
    )
    assert read_kernel_errors({9: 0}, since=time.time() - 3600, **files) == []


def test_a_rank_that_ended_well_was_not_killed(tmp_path, monkeypatch):
    run = RunDir(tmp_path / "books")
    run.logs(1).mkdir(parents=True)
    run.rank_log(1, 0).write_text("".join(f"step {step}/9 | loss 2.{9 - step}\n" for step in range(1, 10)))
    append_event(run, "attempt", attempt=1, nproc=1, pids=[9])
    kmsg = kmsg_of(tmp_path / "kmsg", 0, "Memory cgroup out of memory: Killed process 9 (python)")
    monkeypatch.setattr(evidence, "read_kernel_errors", partial(read_kernel_errors, kmsg=kmsg))
    assert explain_run(run).cause == "host-oom-killed"
    append_event(run, "attempt_ended", attempt=1, state="finished", exit_code=0)
    assert explain_run(run).cause == "healthy"


def test_a_kernel_log_that_cannot_be_read_has_no_errors(tmp_path):
    assert read_kernel_errors({4711: 0}, since=time.time(), kmsg=tmp_path / "none", files=(tmp_path / "none",)) == []


def kmsg_of(path, ago: float, text: str):
    """A log of one record, `ago` seconds old, in the format of /dev/kmsg."""
    path.write_text(f"6,1,{int(1e6 * (time.monotonic() - ago))},-;{text}\n")
    return path


@pytest.mark.skipif(not os.access(KMSG, os.R_OK), reason="/dev/kmsg is not readable")
def test_records_of_dev_kmsg_have_times_and_texts():
    booted, lines = time.time() - time.monotonic(), read_kmsg(KMSG)
    assert lines and all(booted - 1 <= at <= time.time() + 1 for at, _ in lines)


def test_a_kernel_log_that_starts_too_late_gives_no_answer(tmp_path):
    now = time.time()
    assert has_oom_kill(now - 60, now, kmsg=tmp_path / "none") is None
    assert has_oom_kill(now - 60, now, kmsg=kmsg_of(tmp_path / "late", 30, "eth0 is up")) is None


def test_a_time_without_an_oom_kill_is_recognized(tmp_path):
    now = time.time()
    log = kmsg_of(tmp_path / "kmsg", 500, "Memory cgroup out of memory: Killed process 9 (python)")
    assert has_oom_kill(now - 600, now, kmsg=log) is None  # older records were overwritten
    assert has_oom_kill(now - 400, now, kmsg=log) is False


@pytest.mark.skipif(
    not (os.access(KMSG, os.R_OK) and os.access(CGROUPS, os.W_OK)),
    reason="needs root, /dev/kmsg and cgroups of version 1",
)
def test_a_real_oom_kill_is_recognized(tmp_path):
    group = CGROUPS / f"paceline-kmsg-{os.getpid()}"
    group.mkdir()
    started = time.time()
    try:
        (group / "memory.limit_in_bytes").write_text(str(20 << 20))
        hungry = f"echo $$ > {group}/cgroup.procs; exec {sys.executable} -c 'x = bytearray(200 << 20)'"
        done = subprocess.run(["bash", "-c", hungry], check=False, timeout=120)
    finally:
        group.rmdir()
    assert done.returncode in (-9, 137)
    assert has_oom_kill(started, time.time())


def test_a_rank_killed_with_enough_memory_was_killed_from_outside(tmp_path, monkeypatch):
    # tests beside this one make real kills
    monkeypatch.setattr("paceline.explain.run_folder.has_oom_kill", lambda start, end: False)
    run = RunDir(tmp_path / "books")
    run.logs(1).mkdir(parents=True)
    run.rank_log(1, 1).write_text("step 3/9 | loss 2.1\n")
    append_event(run, "attempt", attempt=1, nproc=2, pids=[1 << 22, 1 << 22])
    append_event(run, "rank_failed", attempt=1, rank=1, exit_code=None, signal="SIGKILL", consequence=False)
    explanation = explain_run(run)
    assert (explanation.cause, explanation.also, explanation.rank) == ("killed-from-outside", (), 1)
    assert explanation.fix.endswith(f"`paceline resume {run.path}`")


def test_a_record_of_the_kernel_that_is_overwritten_while_it_is_read_does_not_end_the_reading():
    results = [BrokenPipeError(), BrokenPipeError(), b"6,1,2,-;text", b""]

    class Kmsg(io.RawIOBase):
        def read(self, size=-1):
            if isinstance(result := results.pop(0), OSError):
                raise result
            return result

    assert [read_record(Kmsg()), read_record(Kmsg())] == [b"6,1,2,-;text", b""]
