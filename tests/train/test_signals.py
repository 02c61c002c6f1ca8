"""Who sends a signal to a training run, and what becomes of it: real runs, resumed to the bits of one that nobody touched."""

import os
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
    return Workshop(tmp_path_factory.mktemp("signals"))


class Running:
    """A run on 2 ranks that has made some steps."""

    def __init__(self, shop: Workshop, name: str, **keys: object):
        self.run = shop.folder / "runs" / name
        command = shop.train_command(name, nproc=2, **{"num_steps": STEPS, **keys})
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        wait_for(lambda: len(steps_of(self.run)) >= 4)
        self.tree = psutil.Process(self.process.pid).children(recursive=True)
        self.workers = events(self.run, "attempt")[-1]["pids"]

    def end(self) -> str:
        output, _ = self.process.communicate(timeout=300)
        return output

    def left(self, timeout_s: float) -> list[psutil.Process]:
        return psutil.wait_procs(self.tree, timeout=timeout_s)[1]


def wait_for(condition: Callable[[], bool], timeout_s: float = 300.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def steps_of(run: Path) -> list[int]:
    return [line["step"] for line in metrics(run)] if (run / "metrics.jsonl").exists() else []


def test_the_warning_of_a_batch_system_saves_ends_and_resumes_to_the_same_bits(shop, unbroken):
    running = Running(shop, "warned")
    running.process.send_signal(signal.SIGUSR1)
    output = running.end()
    assert running.process.returncode == 130, output
    [stopped] = events(running.run, "stopped")
    assert [event["step"] for event in events(running.run, "checkpoint")] == [stopped["step"]]
    assert [event["signal"] for event in events(running.run, "stopping")] == ["SIGUSR1"]
    shop.resume(running.run)
    assert final_bits(running.run) == final_bits(unbroken)


@pytest.mark.soak
def test_a_warning_to_every_process_of_the_job_is_one_warning(shop, unbroken):
    running = Running(shop, "all-warned")
    for process in [psutil.Process(running.process.pid), *running.tree]:
        process.send_signal(signal.SIGUSR1)
    output = running.end()
    assert running.process.returncode == 130, output
    shop.resume(running.run)
    assert final_bits(running.run) == final_bits(unbroken)


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGTERM])
@pytest.mark.soak
def test_a_signal_to_one_worker_alone_ends_all_at_one_step_and_is_no_failure(shop, unbroken, signum):
    running = Running(shop, f"one-worker-{signum}")
    os.kill(running.workers[1], signum)
    output = running.end()
    assert running.process.returncode == 130, output
    assert output.rstrip().endswith(f"next    paceline resume {running.run}")
    [stopped] = events(running.run, "stopped")
    assert steps_of(running.run)[-1] == stopped["step"] < STEPS
    shop.resume(running.run)
    assert final_bits(running.run) == final_bits(unbroken)


@pytest.mark.soak
def test_ctrl_c_twice_ends_a_run_now_and_it_resumes_from_its_last_checkpoint(shop, unbroken):
    running = Running(shop, "twice", save_every=3)
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
    shop.resume(running.run)
    assert final_bits(running.run) == final_bits(unbroken)


@pytest.mark.soak
def test_a_killed_supervisor_leaves_no_process_and_its_run_resumes(shop, unbroken):
    running = Running(shop, "killed", save_every=3)
    running.process.send_signal(signal.SIGKILL)
    output = shop.resume(running.run)  # waits for workers that are still saving
    assert running.left(timeout_s=0) == []
    assert "resumed" in output
    assert steps_of(running.run) == list(range(1, STEPS + 1))
    assert final_bits(running.run) == final_bits(unbroken)
