"""Whatever is killed, nothing stays behind, and the run is locked for as long as a worker may live."""

import math
import os
import signal
import subprocess

import pytest

from paceline.errors import PacelineError
from paceline.launch.agent import Agent
from paceline.rundir import lock_run

pytestmark = pytest.mark.dist

# with a child of its own, as data loaders are, and one that has left its session, as trackers do
WORKER = """
    import os, signal, subprocess, time
    subprocess.Popen(["sleep", "600"])
    subprocess.Popen(["sleep", "601"], start_new_session=True)
    print("ready", flush=True)
    time.sleep(600)
"""

IGNORES_SIGTERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
SAVES = """
import signal, sys
def save(*_):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
"""


def test_workers_save_and_nothing_is_left_when_the_supervisor_is_killed(launch, monkeypatch):
    monkeypatch.setenv("HEALTH_EVERY_S", "1")  # with a sampler of health beside the agent
    running = launch(SAVES + WORKER.replace("\n    ", "\n")).wait_until_running()
    running.signal(signal.SIGKILL)
    assert len(running.tree) == 9
    assert running.left() == []
    assert running.log(0) == running.log(1) == "ready\nsaved\n"


@pytest.mark.soak
def test_workers_that_ignore_sigterm_outlive_a_killed_supervisor_by_their_grace_only(launch):
    running = launch(IGNORES_SIGTERM + "import time; print('ready', flush=True); time.sleep(600)", stop_grace_s=2.0)
    running.wait_until_running().signal(signal.SIGKILL)
    running.process.wait()
    with pytest.raises(PacelineError, match="in use by process"):
        lock_run(running.run)
    assert running.left() == []
    os.close(lock_run(running.run))


@pytest.mark.parametrize(
    "part", ["paceline.launch.agent", pytest.param("paceline.launch.elastic", marks=pytest.mark.soak)]
)
def test_nothing_is_left_when_a_process_between_is_killed(launch, part):
    running = launch(IGNORES_SIGTERM + "import os" + WORKER.replace("\n    ", "\n")).wait_until_running()
    os.kill(running.pid_of(part), signal.SIGKILL)
    ended = running.end()
    assert running.left(timeout_s=0) == []
    assert (ended.exit_code, ended.outcome["state"], ended.outcome["failures"][0]["rank"]) == (3, "failed", None)
    assert ended.outcome["failures"][0]["message"].endswith("was killed by SIGKILL")


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_is_left_when_a_worker_is_killed_and_it_is_reported_with_its_signal(launch, rank):
    running = launch(WORKER).wait_until_running()
    os.kill(running.worker_pid(rank), signal.SIGKILL)
    ended = running.end()
    assert running.left(timeout_s=0) == []
    root = ended.outcome["failures"][0]
    assert (root["rank"], root["signal"], root["exit_code"]) == (rank, "SIGKILL", None)
    assert ended.output.startswith(f"rank {rank} failed: ended by SIGKILL")
    assert ended.exit_code == 3
    assert ended.event("rank_failed")["signal"] == "SIGKILL"


@pytest.mark.soak
def test_a_stopped_worker_is_ended_with_the_others(launch):
    running = launch(WORKER).wait_until_running()
    os.kill(running.worker_pid(0), signal.SIGSTOP)
    os.kill(running.worker_pid(1), signal.SIGKILL)
    assert running.end().outcome["failures"][0]["rank"] == 1
    assert running.left(timeout_s=0) == []


def test_an_order_to_stop_of_an_earlier_version_which_has_no_signal_is_sigterm():
    agent = Agent.__new__(Agent)  # its engine is a program that ends at any signal
    agent.engine, agent.pids = subprocess.Popen(["sleep", "600"]), {0: 1}
    agent.stop_grace_s, agent.kill_at = 1.0, math.inf
    agent.obey([{"do": "stop"}])
    assert agent.engine.wait(60) == -signal.SIGTERM
