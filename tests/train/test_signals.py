"""Who sends a signal to a training run, and what becomes of it: real runs, resumed to the bits of one that nobody touched."""

import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from runs import STEPS, Workshop, events, final_bits, metrics

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def shop(tmp_path_factory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("signals ü"))


class Running:
    """A run on 2 ranks, started or resumed, that has made some steps."""

    def __init__(self, run: Path, command: list[str]):
        self.run = run
        before = len(steps_of(run))
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        wait_for(lambda: len(steps_of(self.run)) >= before + 4)
        self.tree = psutil.Process(self.process.pid).children(recursive=True)
        self.workers = events(self.run, "attempt")[-1]["pids"]

    def end(self) -> str:
        output, _ = self.process.communicate(timeout=300)
        return output

    def left(self, timeout_s: float) -> list[psutil.Process]:
        return psutil.wait_procs(self.tree, timeout=timeout_s)[1]


def start(shop: Workshop, name: str, **keys: object) -> Running:
    return Running(shop.folder / "runs" / name, shop.train_command(name, nproc=2, **{"num_steps": STEPS, **keys}))


def wait_for(condition: Callable[[], bool], timeout_s: float = 300.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def steps_of(run: Path) -> list[int]:
    return [line["step"] for line in metrics(run)] if (run / "metrics.jsonl").exists() else []


def saved_steps(run: Path) -> list[int]:
    return [event["step"] for event in events(run, "checkpoint")]


def test_a_run_that_ctrl_c_stopped_and_that_lost_a_rank_on_resume_has_the_bits_of_an_unbroken_one(shop, unbroken):
    running = start(shop, "disturbed", save_every=5)
    run = running.run
    running.process.send_signal(signal.SIGINT)
    output = running.end()
    assert running.process.returncode == 130, output
    step, saved = events(run, "stopped")[0]["step"], saved_steps(run)
    assert saved[-1] == step and saved.count(step) == 1
    assert f"checkpoint at step {step}" in output
    assert output.rstrip().endswith(f"paceline resume {shlex.quote(str(run))}")
    running = Running(run, shop.resume_command(run))
    os.kill(running.workers[1], signal.SIGKILL)
    output = running.end()
    assert running.process.returncode == 0, output
    [decision] = events(run, "decision")
    assert (decision["action"], decision["cause"], decision["rank"]) == ("retry", "killed-from-outside", 1)
    assert len(events(run, "attempt")) == 3
    assert final_bits(run) == final_bits(unbroken)
    assert steps_of(run) == list(range(1, STEPS + 1))
    # the matmuls of both were chosen by a trial, once
    chosen = {json.loads((path / "plan.json").read_text())["onednn"] for path in (run, unbroken)}
    assert chosen in ({True}, {False})


@pytest.mark.soak
def test_sigterm_saves_ends_with_130_and_resumes_to_the_same_bits(shop, unbroken):
    running = start(shop, "terminated")
    running.process.send_signal(signal.SIGTERM)
    output = running.end()
    assert running.process.returncode == 130, output
    assert f"checkpoint at step {events(running.run, 'stopped')[0]['step']}" in output
    shop.resume(running.run)
    assert final_bits(running.run) == final_bits(unbroken)


@pytest.mark.soak
def test_a_preemption_notice_saves_ends_with_130_and_resumes_to_the_same_bits(shop, unbroken):
    notice = shop.folder / "notice"
    running = start(shop, "preempted", preempt_file=notice)
    for pid in running.workers:
        os.kill(pid, signal.SIGSTOP)  # so that the steps are not done before the file is looked at
    notice.write_text("60")
    wait_for(lambda: bool(events(running.run, "stopping")))
    for pid in running.workers:
        os.kill(pid, signal.SIGCONT)
    output = running.end()
    assert running.process.returncode == 130, output
    [stopping] = events(running.run, "stopping")
    assert stopping["reason"] == f"the notice file {notice}" and 0 < stopping["seconds_left"] <= 55
    left = f"{stopping['seconds_left']} s left, sending SIGTERM"
    assert f"stopping on the notice file {notice}, {left}: saving a checkpoint" in output
    step = events(running.run, "stopped")[0]["step"]
    assert saved_steps(running.run)[-1] == step < STEPS
    assert output.rstrip().endswith(f"paceline resume {shlex.quote(str(running.run))}")
    shop.resume(running.run, preempt_file=notice)  # the old notice is no notice for the new command
    assert final_bits(running.run) == final_bits(unbroken)


@pytest.mark.soak
def test_a_warning_to_every_process_of_the_job_is_one_warning(shop, unbroken):
    running = start(shop, "all-warned")
    for process in [psutil.Process(running.process.pid), *running.tree]:
        process.send_signal(signal.SIGUSR1)
    output = running.end()
    assert running.process.returncode == 130, output
    shop.resume(running.run)
    assert final_bits(running.run) == final_bits(unbroken)


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGTERM])
@pytest.mark.soak
def test_a_signal_to_one_worker_alone_ends_all_at_one_step_and_is_no_failure(shop, unbroken, signum):
    running = start(shop, f"one-worker-{signum}")
    os.kill(running.workers[1], signum)
    output = running.end()
    assert running.process.returncode == 130, output
    assert output.rstrip().endswith(f"next    paceline resume {shlex.quote(str(running.run))}")
    [stopped] = events(running.run, "stopped")
    assert steps_of(running.run)[-1] == stopped["step"] < STEPS
    shop.resume(running.run)
    assert final_bits(running.run) == final_bits(unbroken)


@pytest.mark.soak
def test_ctrl_c_twice_ends_a_run_now_and_it_resumes_from_its_last_checkpoint(shop, unbroken):
    running = start(shop, "twice", save_every=3)
    wait_for(lambda: bool(events(running.run, "checkpoint")))
    for pid in running.workers:
        os.kill(pid, signal.SIGSTOP)  # so that the first Ctrl-C cannot have ended them yet
    running.process.send_signal(signal.SIGINT)
    wait_for(lambda: bool(events(running.run, "stopping")))
    time.sleep(0.5)  # two signals closer together count as one
    running.process.send_signal(signal.SIGINT)
    running.end()
    assert running.process.returncode == 130
    assert running.left(timeout_s=2) == []
    [ended] = events(running.run, "attempt_ended")
    assert "message" not in ended  # a checkpoint is complete or absent, so nothing is damaged
    shop.resume(running.run)
    assert final_bits(running.run) == final_bits(unbroken)


@pytest.mark.soak
def test_a_killed_supervisor_leaves_no_process_and_its_run_resumes(shop, unbroken):
    running = start(shop, "killed", save_every=3)
    running.process.send_signal(signal.SIGKILL)
    output = shop.resume(running.run)  # waits for workers that are still saving
    assert running.left(timeout_s=0) == []
    assert "resumed" in output
    assert steps_of(running.run) == list(range(1, STEPS + 1))
    assert final_bits(running.run) == final_bits(unbroken)
