"""A plan that fills most of a device, tried on it: fewer rows where memory runs out, and no run before that is known."""

import json
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rows import with_rows

from paceline.config import Config
from paceline.errors import PacelineError, TrainingFailed
from paceline.launch.failure import Failure
from paceline.launch.supervisor import Outcome
from paceline.launch.trial import (
    KEEP_FOLDERS,
    Speed,
    find_rows,
    memory_reason,
    read_trial,
    session_folder,
    try_plan,
    with_length,
)
from paceline.plan.history import read_records
from paceline.plan.machine import Machine
from paceline.plan.planner import Plan, make_plan
from paceline.rundir import RunDir, utc_now

MIB = 1 << 20
HOST = Machine(gpus=(), cpu_cores=1, cpu_bf16=False, memory_bytes=8 << 30)
SMALL = Config(depth=2, n_embd=64, head_dim=32, sequence_len=128, total_batch_size=1536, num_steps=3, nproc=1)

# many narrow layers: 16 rows take 0.4 GiB more than 4, and hardly any time
DEEP = {
    "depth": 40, "n-embd": 64, "head-dim": 32, "sequence-len": 128, "vocab-size": 512, "total-batch-size": 4096,
    "num-steps": 2, "precision": "fp32", "device": "cpu", "nproc": 2, "eval-tokens": 2048, "eval-every": 0,
    "save-every": 0, "compile": "false", "profile": "aggressive",
}  # fmt: skip
LIMIT_BYTES = 850 * MIB  # 16 rows took 1074 MiB of heap and thread stacks, 4 took 760 (torch 2.13)

STAND_IN = """
import json, os, pathlib, signal, sys, time
out = pathlib.Path(sys.argv[1])
plan = json.loads((out / "plan.json").read_text())
if plan["device_batch_size"] > {most}:
    {end}
(out / "probe").mkdir()
figures = dict(time="2026-11-21T10:00:00.000Z", compiled=False, compile_tried=False, torch="2.13.0", copies_bytes=0)
figures |= dict(allocated_bytes=None, reserved_bytes=None, driver_bytes=3 << 30)
figures |= dict(ready_time=time.time(), step_s=0.5, eval_s_per_token=0.001)
(out / "probe" / "0.json").write_text(json.dumps([figures]))
"""


def planned(**fields) -> Plan:
    return make_plan(replace(SMALL, **fields), HOST, vocab_size=512, num_rows=0)


def with_stand_in(folder: Path, *, most: int, end: str, plan: Plan | None = None):
    """find_rows() with a program in the probe's place that ends in `end` for more than `most` rows."""
    script = folder / "stand_in.py"
    script.write_text(STAND_IN.format(most=most, end=end))
    command = (sys.executable, str(script))
    return find_rows(plan or planned(), cache=folder / "cache", libuv=True, probe=command)


@pytest.fixture
def no_launch(monkeypatch):
    """The program in the probe's place runs as a plain process, where how ranks are launched makes no difference."""

    def attempt(run, *, command, **_):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            return Outcome("finished", 0, 1, [])
        message = done.stderr.splitlines()[-1]
        return Outcome("failed", 3, 1, [Failure(0, done.returncode, None, message, time=0.0, consequence=False)])

    monkeypatch.setattr("paceline.launch.trial.run_attempt", attempt)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"profile": "aggressive"}, True),
        ({"memory_share": 0.85}, True),
        ({"memory_share": 0.84}, False),
        ({"profile": "balanced"}, False),
        ({"profile": "aggressive", "device_batch_size": 4}, False),
        ({"device_batch_size": 4, "num_steps": None, "time": "2m"}, True),
    ],
    ids=str,
)
def test_rows_that_paceline_chose_for_most_of_the_memory_are_tried_and_a_length_that_is_a_time(
    fields, expected, monkeypatch
):
    plan, calls = planned(**fields), []
    monkeypatch.setattr("paceline.launch.trial.find_rows", lambda plan, **_: calls.append(plan) or (plan, "", None))
    monkeypatch.setattr("paceline.launch.trial.replan", lambda plan, *_, **__: plan)
    assert try_plan(SMALL, plan, HOST, make=None, libuv=True) == (SMALL, plan, [])
    assert calls == [plan] * expected


@pytest.mark.dist
@pytest.mark.soak
def test_a_process_that_the_kernel_kills_for_memory_gets_fewer_rows(tmp_path, capsys):
    plan, text, _ = with_stand_in(tmp_path, most=4, end="os.kill(os.getpid(), signal.SIGKILL)")
    assert (plan.device_batch_size, plan.grad_accum_steps) == (4, 3)
    killed = "not fit on rank 0 (ended by SIGKILL, as the kernel does when memory runs out)"
    assert text == f"probe: 12 rows do {killed}; 6 rows do {killed}; 4 rows: 3.0 GiB of 8.0 GiB, kept"
    assert capsys.readouterr().out == text + "\n"
    [record] = read_records(tmp_path / "cache")
    assert (record.source, record.driver_bytes) == ("probe", 3 << 30)
    assert list((tmp_path / "cache" / "probe").iterdir()) == []


def test_a_trial_for_a_time_measures_the_speed_and_prints_nothing_about_memory(no_launch, tmp_path, capsys):
    _, text, speed = with_stand_in(tmp_path, most=12, end="pass", plan=planned(num_steps=None, time="2m"))
    assert (speed.step_s, speed.eval_s_per_token) == (0.5, 0.001)
    assert 0 < speed.start_s < 120
    assert (text, capsys.readouterr().out) == ("", "")


def test_rows_that_the_user_has_set_are_not_changed_by_a_trial_for_a_time(no_launch, tmp_path):
    plan = planned(num_steps=None, time="2m", device_batch_size=12)
    with pytest.raises(PacelineError) as error:
        with_stand_in(tmp_path, most=6, end="raise MemoryError", plan=plan)
    assert error.value.message == "probe: 12 rows do not fit on rank 0 (out of memory)"
    assert error.value.fix == "--device-batch-size auto"


@pytest.mark.parametrize("year", [2020, 2099])
def test_only_the_folders_of_the_last_measurements_are_kept_and_the_new_one_although_the_clock_was_set_back(
    tmp_path, year
):
    for i in range(KEEP_FOLDERS + 3):
        (tmp_path / "comm" / f"{year}0101-0000{i:02d}").mkdir(parents=True)
    run = session_folder(tmp_path / "comm")
    left = {path.name for path in (tmp_path / "comm").iterdir()}
    assert left == {run.path.name, *(f"{year}0101-0000{i:02d}" for i in range(4, KEEP_FOLDERS + 3))}


def test_a_time_becomes_steps_and_automatic_evaluations_a_tenth_of_it():
    config = replace(SMALL, num_steps=None, time="2m", eval_every=0)
    plan = planned(num_steps=None, time="2m")
    config, text = with_length(config, plan, Speed(start_s=20.0, step_s=0.5, eval_s_per_token=0.0005))
    assert text == "time    2m at 0.50 s a step: 180 steps"
    assert (config.time, config.num_steps, config.eval_tokens) == (None, 180, 16_384)  # below 20,000


def test_a_machine_that_is_too_slow_for_the_time_takes_the_fewest_steps():
    config = replace(SMALL, num_steps=None, time="2m", eval_tokens=1000)
    config, text = with_length(config, planned(num_steps=None, time="2m"), Speed(5.0, 9.0, 0.001))
    text, fewest = text.split("; ")
    assert text == "time    2m at 9.00 s a step: 60 steps"
    assert fewest == "these are the fewest of a run by time and take about 9m00s: --num-steps 12 is shorter"
    assert (config.num_steps, config.eval_tokens) == (60, 1000)


def test_the_slowest_rank_and_the_faster_of_eager_and_compiled_decide(tmp_path):
    run = RunDir(tmp_path)
    (tmp_path / "probe").mkdir()
    memory = {"time": utc_now(), "compile_tried": True, "torch": "2.13.0", "copies_bytes": 0, "driver_bytes": 3 << 30}
    memory |= {"allocated_bytes": None, "reserved_bytes": None}
    for rank, steps in enumerate([(0.5, 0.3), (0.6, 0.4)]):
        memory["ready_time"] = 110.0 + rank
        stages = [
            {**memory, "compiled": bool(i), "step_s": step_s, "eval_s_per_token": step_s / 100}
            for i, step_s in enumerate(steps)
        ]
        (tmp_path / "probe" / f"{rank}.json").write_text(json.dumps(stages))
    plan = make_plan(replace(SMALL, num_steps=None, time="8h", nproc=2), HOST, vocab_size=512, num_rows=0)
    assert read_trial(run, plan, launched=100.0, ahead_s={1: 0.5}).speed == Speed(10.5, 0.4, 0.004)


def test_if_not_even_one_row_fits_nothing_is_started_and_the_error_has_a_fix(no_launch, tmp_path):
    with pytest.raises(PacelineError) as error:
        with_stand_in(tmp_path, most=0, end="raise MemoryError", plan=planned(total_batch_size=128))
    assert error.value.message == "probe: 1 row does not fit on rank 0 (out of memory)"
    assert error.value.fix == "--activation-checkpointing, or --depth 1"


@pytest.mark.dist
def test_another_error_is_not_mistaken_for_a_lack_of_memory(tmp_path):
    with pytest.raises(TrainingFailed) as error:
        with_stand_in(tmp_path, most=0, end="raise ValueError('boom')")
    assert error.value.message.endswith("rank 0 failed: ValueError: boom")
    [folder] = (tmp_path / "cache" / "probe").iterdir()
    assert "boom" in (folder / "logs" / "1" / "0.log").read_text()


NO_PRIMITIVE = "RuntimeError: could not create a primitive"


@with_rows(("message", "device", "reason"), [
    *((message, device, "out of memory") for device in ("cpu", "cuda") for message in [
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 31.36 GiB",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "AcceleratorError: CUDA error: out of memory",
        "MemoryError: std::bad_alloc",
    ]),
    # oneDNN has one message for everything that it cannot do
    (NO_PRIMITIVE, "cpu", "could not create a primitive, as where memory runs out"),
    (NO_PRIMITIVE, "cuda", None),
    ("ended by SIGKILL", "cpu", "ended by SIGKILL, as the kernel does when memory runs out"),
    # the host's memory, which fewer rows do not fix
    ("ended by SIGKILL", "cuda", None),
])  # fmt: skip
def test_memory_that_runs_out_is_recognized_by_the_message_or_the_signal(message, device, reason):
    signal = "SIGKILL" if "SIGKILL" in message else None
    failure = Failure(1, None if signal else 1, signal, message, time=0.0, consequence=False)
    plan = replace(planned(), device=device)
    assert memory_reason(failure, plan) == reason
    assert memory_reason(replace(failure, consequence=True), plan) is None


def train(folder: Path, **keys: object) -> list[str]:
    flags = {**DEEP, "name": "deep", "runs-dir": folder / "runs", "cache-dir": folder / "cache", **keys}
    args = [arg for key, value in flags.items() for arg in (f"--{key}", str(value))]
    return [sys.executable, "-m", "paceline.cli", "train", "--no-check", *args]


@pytest.mark.dist
@pytest.mark.soak
def test_under_a_memory_limit_the_run_trains_with_the_rows_that_passed(tmp_path):
    limit = (LIMIT_BYTES, LIMIT_BYTES)
    done = subprocess.run(
        train(tmp_path),
        capture_output=True,
        text=True,
        timeout=280,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, limit),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("probe: ")]
    assert line.startswith("probe: 16 rows do not fit on rank ")
    rows = int(line.split(" rows: ")[0].split()[-1])
    assert line.endswith(", kept")
    plan = json.loads((tmp_path / "runs" / "deep" / "plan.json").read_text())
    assert (plan["device_batch_size"], plan["grad_accum_steps"]) == (rows, 16 // rows)
    assert rows < 16
    assert "device_batch_size" not in (tmp_path / "runs" / "deep" / "config.toml").read_text()
    assert [record.source for record in read_records(tmp_path / "cache")] == ["probe", "deep"]


@pytest.mark.dist
@pytest.mark.soak
def test_ctrl_c_while_it_is_tried_ends_with_130_and_leaves_nothing(tmp_path):
    process = subprocess.Popen(train(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "cache" / "probe").glob("*/progress/0")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert (process.returncode, output.splitlines()[-1]) == (130, "interrupted")
    assert not (tmp_path / "runs" / "deep").exists()
    assert list((tmp_path / "cache" / "probe").iterdir()) == []
