"""What runs measure of memory, and that what was learnt does not change a run under way."""

import json
import os
import signal
import subprocess
import time
from dataclasses import replace

import pytest
import torch
from runs import Workshop, events, final_bits, metrics

from paceline.config import Config
from paceline.plan.history import FILE_NAME, keep_record, read_records
from paceline.plan.machine import Machine, probe_machine
from paceline.plan.planner import make_plan
from paceline.train.probe import made_up_tokens, shortened
from paceline.train.process import footprint, own_bytes, peak_resident_bytes
from paceline.units import MIB


@pytest.fixture(scope="module")
def shop(tmp_path_factory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("memory"))


@pytest.mark.dist
def test_every_rank_records_its_memory_at_step_20_and_at_the_end(unbroken):
    noted = events(unbroken, "memory")
    assert sorted((event["rank"], event["step"]) for event in noted) == [(0, 20), (0, 40), (1, 20), (1, 40)]
    for event in noted:
        assert event["attempt"] == 1
        assert event["driver_bytes"] > event["planned_bytes"] > 0
        assert (event["copies_bytes"] > 0) == (event["step"] == 40)  # one checkpoint, at the end


@pytest.mark.dist
def test_the_next_plan_uses_the_memory_of_a_runs_fullest_rank(unbroken):
    [record] = [record for record in read_records(unbroken.parents[1] / "cache") if record.source == "unbroken"]
    last = [event for event in events(unbroken, "memory") if event["step"] == 40]
    assert record.driver_bytes == max(event["driver_bytes"] for event in last)
    assert (record.device_name, record.compiled, record.allocated_bytes) == ("CPU", False, None)


@pytest.mark.dist
@pytest.mark.soak
def test_a_calibration_made_while_a_run_was_interrupted_does_not_change_its_bits(shop):
    keys = {
        "nproc": 2,
        "device_batch_size": "auto",
        "memory_share": round(2 * 400 * MIB / probe_machine().memory_bytes, 4),
    }
    whole = shop.train("whole", num_steps=40, **keys)
    command = shop.train_command("broken", num_steps=40, **keys)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    run, deadline = shop.folder / "runs" / "broken", time.monotonic() + 300
    while not (run / "metrics.jsonl").exists() or len(metrics(run)) < 5:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=300) and process.returncode == 130
    cache = shop.folder / "cache"
    [record] = [record for record in read_records(cache) if record.source == "broken"]  # of an interrupted attempt too
    (cache / FILE_NAME).unlink()
    keep_record(cache, replace(record, driver_bytes=560 * MIB))
    refused = shop.finish(shop.train_command("other", **keys), code=1)
    assert "needed on each process" in refused
    shop.resume(run)
    assert json.loads((run / "plan.json").read_text())["device_batch_size"] == 6
    assert final_bits(run) == final_bits(whole)
    (cache / FILE_NAME).unlink()


def test_the_probe_takes_as_many_micro_steps_as_change_anything():
    machine = Machine(gpus=(), cpu_cores=1, cpu_bf16=False, memory_bytes=8 << 30)
    config = Config(depth=2, n_embd=64, head_dim=32, sequence_len=64, total_batch_size=64 * 12, num_steps=3)
    for rows, micro_steps in ((12, 1), (6, 2), (3, 2)):
        plan = shortened(make_plan(replace(config, device_batch_size=rows), machine, vocab_size=512, num_rows=0))
        assert (plan.grad_accum_steps, plan.total_batch_size) == (micro_steps, micro_steps * rows * 64)
        idx, targets = made_up_tokens(plan, torch.device("cpu"))(0, 0)
        assert idx.shape == targets.shape == (rows, 64)
        assert idx.min() >= 0 and idx.max() < 512


def test_on_a_cpu_the_footprint_is_the_kernels_highest_resident_size():
    before = peak_resident_bytes()
    held = torch.ones(before + (64 << 20), dtype=torch.uint8)  # an earlier test's peak stays the process's
    assert footprint(torch.device("cpu")) == {
        "allocated_bytes": None,
        "reserved_bytes": None,
        "driver_bytes": peak_resident_bytes(),
    }
    assert peak_resident_bytes() >= held.nbytes


def test_the_drivers_bytes_count_for_this_process_and_for_a_single_one():
    here = os.getpid()
    assert own_bytes([(here, 5), (1, 9)], at_least=5) == 5
    assert own_bytes([(1, 9)], at_least=5) == 9  # a container: pids are the host's
    assert own_bytes([(1, 9), (2, 9)], at_least=5) is None
    assert own_bytes([(1, 3)], at_least=5) is None  # less than this process holds: another one
    assert own_bytes([], at_least=5) is None


@pytest.mark.gpu
def test_on_a_gpu_the_footprint_has_the_allocators_and_the_drivers_bytes():
    device = torch.device("cuda", 0)
    held = torch.ones(256 << 20, dtype=torch.uint8, device=device)
    found = footprint(device)
    assert found["allocated_bytes"] >= held.nbytes
    assert found["reserved_bytes"] >= found["allocated_bytes"]
    assert found["driver_bytes"] is None or found["driver_bytes"] > found["reserved_bytes"]
