"""Whatever is killed, nothing stays behind, and the run is locked for as long as a worker may live."""

import os
import signal
import time

import pytest

from paceline.errors import PacelineError
from paceline.rundir import lock_run

pytestmark = pytest.mark.dist

# with a child of its own, as data loaders are, and one that has left its session, as trackers do
WORKER = """
    import os, signal, subprocess, time
    subprocess.Popen(["sleep", "60"])
    subprocess.Popen(["sleep", "61"], start_new_session=True)
    print("ready", flush=True)
    time.sleep(60)
"""

IGNORES_SIGTERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


def test_nothing_is_left_when_the_supervisor_is_killed(launch, monkeypatch):
    monkeypatch.setenv("HEALTH_EVERY_S", "1")  # with a sampler of health beside the agent
    running = launch(WORKER).wait_until_running()
    running.signal(signal.SIGKILL)
    assert len(running.tree) == 9
    assert running.left(timeout_s=5) == []


def test_workers_that_ignore_sigterm_outlive_a_killed_supervisor_by_their_grace_only(launch):
    running = launch(IGNORES_SIGTERM + "import time; print('ready', flush=True); time.sleep(60)", stop_grace_s=1.0)
    running.wait_until_running().signal(signal.SIGKILL)
    time.sleep(0.5)
    with pytest.raises(PacelineError, match="in use by process"):
        lock_run(running.run)
    assert running.left(timeout_s=6) == []
    os.close(lock_run(running.run))


def test_workers_save_when_the_supervisor_is_killed(launch):
    script = """
        import signal, sys, time
        def save(*_):
            print("saved", flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        print("ready", flush=True)
        time.sleep(60)
    """
    running = launch(script).wait_until_running()
    running.signal(signal.SIGKILL)
    assert running.left(timeout_s=5) == []
    assert running.log(0) == running.log(1) == "ready\nsaved\n"


@pytest.mark.parametrize("part", ["paceline.launch.agent", "paceline.train.elastic"])
def test_nothing_is_left_when_a_process_between_is_killed(launch, part):
    running = launch(IGNORES_SIGTERM + "import os" + WORKER.replace("\n    ", "\n")).wait_until_running()
    os.kill(running.pid_of(part), signal.SIGKILL)
    ended = running.end(timeout_s=8)
    assert running.left(timeout_s=0) == []
    assert (ended.exit_code, ended.outcome["state"], ended.outcome["failures"][0]["rank"]) == (3, "failed", None)
    assert ended.outcome["failures"][0]["message"].endswith("was ended by SIGKILL")


@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_is_left_when_a_worker_is_killed(launch, rank):
    running = launch(WORKER).wait_until_running()
    os.kill(running.worker_pid(rank), signal.SIGKILL)
    ended = running.end(timeout_s=8)
    assert running.left(timeout_s=0) == []
    assert ended.outcome["failures"][0]["rank"] == rank


def test_a_stopped_worker_is_ended_with_the_others(launch):
    running = launch(WORKER).wait_until_running()
    os.kill(running.worker_pid(0), signal.SIGSTOP)
    os.kill(running.worker_pid(1), signal.SIGKILL)
    assert running.end(timeout_s=8).outcome["failures"][0]["rank"] == 1
    assert running.left(timeout_s=0) == []


def test_what_a_worker_started_ends_with_a_run_that_ends_well(launch):
    running = launch(WORKER.replace("time.sleep(60)", "time.sleep(1)")).wait_until_running()
    assert running.end(timeout_s=8).exit_code == 0
    assert running.left(timeout_s=0) == []
