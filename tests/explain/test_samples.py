"""What the samples of health tell of a run that failed."""

import json
from pathlib import Path

import pytest

from paceline.explain.run import explain_run
from paceline.rundir import RunDir, append_event, append_sample, utc_now

FAILED = """step 5 loss: 3.0
Traceback (most recent call last):
  File "x.py", line 1, in <module>
RuntimeError: CUDA error: unspecified launch failure
"""


def test_an_xid_in_the_samples_of_the_attempt_names_the_card_and_its_rank(tmp_path):
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
    found = explain_run(run)
    assert (found.cause, found.rank) == ("gpu-hardware-error", 1)
    assert "Xid 79" in found.summary
    assert found.evidence[0].text.endswith("79, GPU 3 of node7")


def sampled(tmp_path, log, *samples):
    """A failed attempt of one rank, and a host's samples of it."""
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
    """By this process so far."""
    path = Path("/proc/self/io")
    if not path.exists():
        pytest.skip("this system does not count what a process reads")
    return int(path.read_text().split()[1])


def test_of_days_of_samples_the_end_is_read(tmp_path):
    run = RunDir(tmp_path)
    sampled(tmp_path, FAILED, FULL)
    with run.health("node7").open("a") as file:
        file.writelines(
            json.dumps({"time": utc_now(), "ram_used": 1 << 30, "pad": "x" * 400}) + "\n" for _ in range(50_000)
        )
    before = bytes_read()
    assert explain_run(run).cause == "illegal-memory-access"
    assert bytes_read() - before < 5 << 20 < run.health("node7").stat().st_size


def test_how_far_a_long_run_got_is_read_from_both_ends_of_its_metrics(tmp_path):
    run = RunDir(tmp_path)
    with run.metrics.open("w") as file:
        file.write('{"broken\n')
        file.writelines(f'{{"step": {step}, "loss": 2.5, "pad": "{"x" * 100}"}}\n' for step in range(1, 10_001))
        file.write('{"step": 10001}\n{"step": "x"}\n[1]\n{"step": 10002, "lo')
    progress = sampled(tmp_path, FAILED).progress
    assert (progress.first_step, progress.last_step, progress.last_loss) == (1, 10_001, 2.5)
    assert progress.steps >= 10_001


def texts(found):
    return [each.text for each in found.evidence if each.source == "health/node7.jsonl"]


KILLED = "step 5 loss: 3.0\nexitcode: -9 (pid: 111)\n"
FULL = {"ram_used": 8 * 1020 << 20}  # of 8 GiB


def test_memory_that_climbed_to_the_end_is_shown_beside_a_kill(tmp_path):
    found = sampled(tmp_path, KILLED, {"ram_used": 2 << 30, "ram_total": 8 << 30}, {"ram_used": 5 << 30}, FULL)
    [text] = texts(found)
    assert text.startswith("memory of node7: 2.0 GiB at ")
    assert "8.0 GiB of 8.0 GiB" in text
    assert found.evidence[-1].line == 4


def test_the_limit_of_a_group_counts_as_well(tmp_path):
    group = {"cgroup_used": 99 << 20, "cgroup_limit": 100 << 20}
    [text] = texts(sampled(tmp_path, KILLED, {"ram_used": 2 << 30, "ram_total": 8 << 30, **group}))
    assert "memory of the group" in text


def test_memory_that_was_there_and_memory_of_an_earlier_attempt_are_not_shown(tmp_path):
    assert texts(sampled(tmp_path / "a", KILLED, {"ram_used": 2 << 30, "ram_total": 8 << 30})) == []
    assert texts(sampled(tmp_path / "b", KILLED)) == []


def test_memory_is_not_shown_beside_a_cause_that_it_says_nothing_of(tmp_path):
    mistake = "Traceback (most recent call last):\nModuleNotFoundError: No module named 'flash_attn'\n"
    assert texts(sampled(tmp_path, mistake, {**FULL, "ram_total": 8 << 30})) == []


def test_a_disk_that_filled_is_shown_beside_a_failed_write(tmp_path):
    full = "Traceback (most recent call last):\nOSError: [Errno 28] No space left on device\n"
    found = sampled(tmp_path, full, {"disk_free": 50 << 30, "disk_total": 100 << 30}, {"disk_free": 1 << 20})
    [text] = texts(found)
    assert found.cause == "disk-full"
    assert "50.0 GiB free" in text and "1.0 MiB free" in text


def test_clocks_that_were_held_down_are_shown_where_a_rank_was_late(tmp_path):
    late = "[rank0]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE) ran for 600000 ms\n"
    hot = {"index": 1, "throttle": ["power", "thermal"], "sm_mhz": 810, "temperature_c": 93}
    usual = {"index": 0, "throttle": ["power"], "sm_mhz": 2400, "temperature_c": 70}
    [text] = texts(sampled(tmp_path, late, {"gpus": [usual, hot]}))
    assert text == "GPU 1 of node7 was held down: thermal, 810 MHz, 93 °C"
