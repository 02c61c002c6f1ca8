"""Trainings on hosts that share no disk: real sshd in network namespaces (tests/namespaces.py)."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import namespaces
import pytest
from hosts_run import last_files
from namespaces import namespaced_hosts

from paceline.rundir import RunDir, read_json_lines

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.skipif(bool(namespaces.WHY_NOT), reason=namespaces.WHY_NOT),
]
SIZES = [
    "--depth=2", "--n-embd=64", "--head-dim=32", "--sequence-len=64", "--vocab-size=512", "--total-batch-size=1536",
    "--device-batch-size=4", "--save-every=10", "--eval-every=0", "--eval-tokens=1024", "--data=text.txt", "--health-every=0",
    "--no-check", "--precision=fp32", "--num-steps",
]  # fmt: skip
DEADLINE_S = 120.0


@pytest.fixture
def hosts(tmp_path):
    with namespaced_hosts(3, tmp_path) as made:
        lines = (f"the {number} quick brown foxes jump over {number * number} lazy dogs\n" for number in range(3000))
        (tmp_path / "text.txt").write_text("".join(lines))
        yield made


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


@pytest.mark.soak
def test_hosts_without_a_shared_disk_recover_and_one_goes_on_with_its_copy_when_the_driver_s_folder_is_lost(hosts):
    copy = train_recovered(hosts)
    resumed = hosts.paceline(
        "h2", "resume", str(copy), "--hosts", "h2,h1", "--num-steps", "70", "--no-check", "--health-every", "0"
    )
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "resumed" in resumed.stdout
    assert [line["step"] for line in read_json_lines(RunDir(copy).metrics)][-1] == 70
    history = list(read_json_lines(RunDir(copy).events))
    assert [event["attempt"] for event in history if event["event"] == "attempt"] == [1, 2, 3]
    assert json.loads(RunDir(copy).dataset_json.read_text())["path"].startswith(str(hosts.folder / "h2"))


def train_recovered(hosts) -> Path:
    """A killed rank of two hosts driven from a third, and the same bits as on one. Returns the copy on the second host."""
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
    return copy


@pytest.mark.soak
def test_three_hosts_end_with_the_bits_of_three_ranks(hosts):
    expected = train_on_one_host(hosts, nproc=3, num_steps=20)
    runs = ["--runs-dir", str(hosts.private / "runs"), "--name", "a"]
    done = hosts.paceline("h1", "train", *SIZES, "20", "--nproc", "1", "--hosts", "h1,h2,h3", *runs)
    assert done.returncode == 0, done.stderr
    assert last_files(RunDir(hosts.on("h1", hosts.private) / "runs" / "a")) == expected


@pytest.mark.soak
def test_hosts_are_listed_by_their_ipv6_addresses(hosts):
    runs = ["--runs-dir", str(hosts.private / "runs"), "--name", "a"]
    done = hosts.paceline("h1", "train", *SIZES, "3", "--nproc", "1", "--hosts", "[fd77::1],[fd77::2]", *runs)
    assert done.returncode == 0, done.stderr
    run = RunDir(hosts.on("h1", hosts.private) / "runs" / "a")
    [attempt] = (event for event in read_json_lines(run.events) if event["event"] == "attempt")
    assert attempt["hosts"] == {"fd77::1": [0], "fd77::2": [1]}
    assert [line["step"] for line in read_json_lines(run.metrics)][-1] == 3
    job = json.loads((run.logs(1) / "job-0.json").read_text())
    assert job["rendezvous"]["host"] == "fd77::1"
    assert 'hosts = "[fd77::1],[fd77::2]"' in run.config_toml.read_text()


@pytest.mark.soak
def test_a_changed_plan_reaches_a_host_that_has_the_one_before_and_so_does_a_new_run_of_the_same_name(hosts):
    runs = ["--runs-dir", str(hosts.private / "runs"), "--name", "a"]
    start = ["train", *SIZES, "20", "--hosts", "h1:1,h2:1", *runs]
    assert hosts.paceline("h1", *start).returncode == 0
    run = RunDir(hosts.on("h1", hosts.private) / "runs" / "a")
    resume = ["resume", str(hosts.private / "runs" / "a"), "--hosts", "h1:2,h2:2", "--num-steps", "30", "--no-check"]
    longer = hosts.paceline("h1", *resume, "--step", "10")  # h2 has its own copy of step 20
    assert longer.returncode == 0, longer.stderr
    assert [event["step"] for event in read_json_lines(run.events) if event["event"] == "resumed"] == [10]
    attempts = [event for event in read_json_lines(run.events) if event["event"] == "attempt"]
    assert [event["world_size"] for event in attempts] == [2, 4]
    steps = [line["step"] for line in read_json_lines(run.metrics)]
    assert steps == sorted(set(steps)) and steps[-1] == 30
    shutil.rmtree(run.path)
    timed = [word for word in start if word not in ("--num-steps", "20")]
    again = hosts.paceline("h1", *timed, "--time", "20s")  # a trial on both, and another length
    assert again.returncode == 0, again.stderr
    num_steps = json.loads(run.plan_json.read_text())["num_steps"]
    assert f" a step: {num_steps:,} steps" in again.stdout and num_steps >= 60
    assert max(line["step"] for line in read_json_lines(run.metrics)) == num_steps
    copies = (hosts.folder / "h2" / "cache" / "paceline" / "runs").iterdir()
    assert [[path.name for path in copy.iterdir()] for copy in copies] == [["a"], ["a"]]  # none of the trial


AGENT_NOTE = """
import sys
from paceline.launch.ssh import agent_note
print(agent_note(["h2"]))
"""


def test_a_forwarded_agent_that_alone_opens_a_host_is_named_before_its_login_ends(hosts, tmp_path):
    folder = tmp_path / "ssh-XXXX"
    folder.mkdir()
    socket = folder / "agent.1"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(socket)], stdout=subprocess.DEVNULL)
    try:
        while not socket.exists():
            time.sleep(0.02)
        with_agent = ["env", "-u", "SSH_AGENT_PID", f"SSH_AUTH_SOCK={socket}"]
        with_key = hosts.run("h1", *with_agent, sys.executable, "-c", AGENT_NOTE)
        added = hosts.run("h1", *with_agent, "ssh-add", str(tmp_path / "id"))
        assert added.returncode == 0, added.stderr
        (tmp_path / "id").rename(tmp_path / "away")
        (tmp_path / "id.pub").rename(tmp_path / "away.pub")
        config = tmp_path / "config"
        config.write_text(config.read_text().replace("  IdentitiesOnly yes\n", ""))
        without_key = hosts.run("h1", *with_agent, sys.executable, "-c", AGENT_NOTE)
    finally:
        agent.kill()
        agent.wait()
    assert with_key.stdout == "None\n", with_key.stderr
    assert without_key.stdout.startswith("note    only your forwarded ssh agent opens h2"), without_key.stderr
