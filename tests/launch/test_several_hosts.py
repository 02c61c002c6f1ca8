"""Trainings on hosts that share no disk: real sshd in network namespaces (tests/namespaces.py)."""

import json
import os
import signal
import sys
import time

import namespaces
import pytest
from namespaces import namespaced_hosts

from paceline.model.manifest import newest_good, read_manifest
from paceline.rundir import RunDir, read_json_lines

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.skipif(bool(namespaces.WHY_NOT), reason=namespaces.WHY_NOT),
]
SIZES = [
    "--depth=2", "--n-embd=64", "--head-dim=32", "--sequence-len=64", "--vocab-size=512", "--total-batch-size=1536",
    "--device-batch-size=4", "--save-every=10", "--eval-every=0", "--eval-tokens=1024", "--data=text.txt", "--health-every=0",
    "--no-check", "--num-steps",
]  # fmt: skip
DEADLINE_S = 120.0


@pytest.fixture
def hosts(tmp_path):
    with namespaced_hosts(3, tmp_path) as made:
        lines = (f"the {number} quick brown foxes jump over {number * number} lazy dogs\n" for number in range(3000))
        (tmp_path / "text.txt").write_text("".join(lines))
        yield made


def last_files(run: RunDir) -> dict[str, str]:
    """Returns the hash of every file of the newest checkpoint."""
    path, _ = newest_good(run.checkpoints, set_aside=False)
    return {name: entry.sha256 for name, entry in read_manifest(path).files.items()}


def train_on_one_host(hosts, *, nproc: int, num_steps: int) -> dict[str, str]:
    runs = hosts.folder / "one"
    done = hosts.paceline(
        "h1", "train", *SIZES, str(num_steps), "--nproc", str(nproc), "--runs-dir", str(runs), "--name", "a"
    )
    assert done.returncode == 0, done.stderr
    return last_files(RunDir(runs / "a"))


def wait_for_checkpoint(run: RunDir, driver) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not any(event["event"] == "checkpoint" for event in read_json_lines(run.events)):
        assert driver.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def test_hosts_without_a_shared_disk_train_recover_and_go_on_without_the_driver(hosts):
    """Driven from a third machine: a killed rank, the same bits as one host, a copy, and the driver's folder lost."""
    expected = train_on_one_host(hosts, nproc=2, num_steps=60)
    run = RunDir(hosts.on("h3", hosts.private) / "runs" / "a")
    command = [sys.executable, "-m", "paceline.cli", "train", *SIZES, "60", "--nproc", "1", "--hosts", "h1,h2"]
    with (hosts.folder / "driver.log").open("w") as log:
        driver = hosts.start(
            "h3", *command, "--runs-dir", str(hosts.private / "runs"), "--name", "a", stdout=log, stderr=log
        )
        wait_for_checkpoint(run, driver)
        attempt = next(event for event in read_json_lines(run.events) if event["event"] == "attempt")
        os.kill(attempt["pids"][1], signal.SIGKILL)
        code = driver.wait(DEADLINE_S)
    output = (hosts.folder / "driver.log").read_text()
    assert code == 0, output
    assert attempt["hosts"] == {"h1": [0], "h2": [1]}
    events = list(read_json_lines(run.events))
    failed = next(event for event in events if event["event"] == "rank_failed")
    assert (failed["rank"], failed["signal"], failed["host"]) == (1, "SIGKILL", "h2"), output
    assert [event["attempt"] for event in events if event["event"] == "attempt"] == [1, 2]
    assert last_files(run) == expected  # the same bits as on one host, in spite of the kill
    assert "resumed from" in run.rank_log(2, 0).read_text()
    assert run.rank_log(2, 1).stat().st_size
    steps = [line["step"] for line in read_json_lines(run.metrics)]
    assert steps == sorted(set(steps)) and steps[-1] == 60
    (copy,) = (hosts.folder / "h2" / "cache" / "paceline" / "runs").glob("*/a")
    assert last_files(RunDir(copy)) == expected  # and one other host has them too

    resumed = hosts.paceline(
        "h2", "resume", str(copy), "--hosts", "h2,h1", "--num-steps", "70", "--no-check", "--health-every", "0"
    )
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "resumed" in resumed.stdout
    assert [line["step"] for line in read_json_lines(RunDir(copy).metrics)][-1] == 70
    history = list(read_json_lines(RunDir(copy).events))
    assert [event["attempt"] for event in history if event["event"] == "attempt"] == [1, 2, 3]
    assert json.loads(RunDir(copy).dataset_json.read_text())["path"].startswith(str(hosts.folder / "h2"))


@pytest.mark.soak
def test_three_hosts_end_with_the_bits_of_three_ranks(hosts):
    expected = train_on_one_host(hosts, nproc=3, num_steps=20)
    runs = ["--runs-dir", str(hosts.private / "runs"), "--name", "a"]
    done = hosts.paceline("h1", "train", *SIZES, "20", "--nproc", "1", "--hosts", "h1,h2,h3", *runs)
    assert done.returncode == 0, done.stderr
    assert last_files(RunDir(hosts.on("h1", hosts.private) / "runs" / "a")) == expected
