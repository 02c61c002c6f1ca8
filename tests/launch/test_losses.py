"""What is said of a host that was lost, or that the ranks of others do not reach. Real faults of networks: soak/hosts.py."""

import json
import math
import os
import socket
import subprocess
import sys

import pytest

from paceline.errors import PacelineError
from paceline.explain.explanation import Explanation
from paceline.launch.agent import connect_error
from paceline.launch.cluster import Cluster
from paceline.launch.failure import Failure, explain_end
from paceline.launch.hosts import HostEntry
from paceline.launch.losses import (
    await_hosts,
    awaited_hosts,
    check_folder,
    host_failure,
    link_finding,
    mark_unreachable,
    settle_losses,
)
from paceline.rundir import RunDir, append_event


@pytest.fixture
def cluster() -> Cluster:
    cluster = Cluster([HostEntry("ada.invalid"), HostEntry("bob.invalid")], None, nproc=1, rejoin=True)
    cluster.begin()
    return cluster


def test_a_host_that_cannot_reach_the_first_one_is_named_with_the_fix_and_left_out(cluster):
    _, bob = cluster.started
    mark_unreachable(cluster, bob, {"address": "10.0.0.1", "port": 4000, "reason": "timed out"})
    failure = host_failure(bob)
    assert (failure.cause, failure.host, failure.subject) == ("hosts-unconnected", "bob.invalid", "host bob.invalid")
    assert failure.message == "bob.invalid cannot connect to ada.invalid: 10.0.0.1 port 4000: timed out"
    assert failure.fix == "on ada.invalid, for a firewall: sudo ufw allow from the address of bob.invalid"
    assert bob.lost and math.isinf(bob.retry_at)  # ssh would reach it, and the next attempt would wait for it again
    assert cluster.begin() == cluster.started and cluster.lost_in_attempt == ("bob.invalid",)


def test_a_link_that_could_not_be_measured_blames_nobody(cluster):
    link = {"address": "10.0.0.2", "port": 4000, "bits_per_s": 1e9, "rtt_us": 90.0}
    assert link_finding(cluster, *cluster.started, {**link, "error": None}) is None
    assert link_finding(cluster, *cluster.started, {**link, "error": "probe", "reason": "no answer"}) is None
    large = link_finding(cluster, *cluster.started, {**link, "error": "large", "bits_per_s": None})
    assert large is not None and large.id == "hosts-path-mtu"


def test_a_silent_host_is_lost_and_one_that_answers_again_was_not(cluster):
    bob = cluster.started[1]
    bob.lose("nothing was heard of it for 6 s")
    assert (host_failure(bob).cause, host_failure(bob).exit_code) == ("host-lost", None)
    bob.lost = None
    assert (host_failure(bob).cause, host_failure(bob).exit_code) == ("link-lost", 255)


def test_the_wait_ends_when_all_lost_hosts_are_back_or_nobody_waits(cluster, tmp_path):
    cluster.run, shown = RunDir(tmp_path), list[list[str]]()
    for member in cluster.started:
        member.lose("it is silent")
    settle_losses(cluster, is_quick=True)
    assert awaited_hosts(cluster) == ("ada.invalid", "bob.invalid")
    assert all("this machine may have been offline or asleep" in str(member.fault) for member in cluster.started)
    assert not await_hosts(cluster, lambda count: count, is_over=lambda: True, show=shown.append)
    for member in cluster.started:
        member.give_up()
        member.is_open = True
    assert await_hosts(cluster, lambda count: count, is_over=lambda: False, show=shown.append)
    assert shown == [["ada.invalid, bob.invalid joined: continuing on ada.invalid, bob.invalid"]]
    assert cluster.present == cluster.started


def test_an_agent_that_does_not_reach_the_first_host_says_so_and_ends(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert connect_error("127.0.0.1", port) is None
    job = {"rendezvous": {"host": "127.0.0.1", "port": port, "index": 1, "hosts": 2}}
    command = [sys.executable, "-m", "paceline.launch.agent"]
    done = subprocess.run(
        command, input=json.dumps(job) + "\n", capture_output=True, text=True, timeout=120, check=False
    )
    report = {"event": "unreachable", "address": "127.0.0.1", "port": port, "reason": "Connection refused"}
    assert (done.returncode, json.loads(done.stdout)) == (1, report)


def test_a_run_folder_that_is_lost_is_an_error_that_says_where_the_copy_is(cluster, tmp_path):
    run, bob = RunDir(tmp_path / "books"), cluster.started[1]
    run.path.mkdir()
    run.config_toml.touch()
    check_folder(cluster, run)
    run.config_toml.unlink()
    with pytest.raises(PacelineError, match="books is gone") as error:
        check_folder(cluster, run)
    assert error.value.fix.startswith("restore the run folder")  # all hosts share it
    bob.shared, bob.folder = False, "/home/bob/.cache/paceline/runs/12ab/books"
    with pytest.raises(PacelineError) as error:
        check_folder(cluster, run)
    assert error.value.fix == f"on bob.invalid: paceline resume {bob.folder} --hosts bob.invalid,ada.invalid"


def explained(
    run: RunDir, root: Failure, free_bytes: dict[str, int], *, logs_show: str = "unknown"
) -> tuple[str, str | None, str, str, str]:
    end, explanation = explain_end(run, 1, root, Explanation(logs_show), memory_ran_out=None, free_bytes=free_bytes)
    return explanation.cause, explanation.host, explanation.summary, explanation.fix, end.retry


def test_a_rank_that_failed_is_never_healthy_whatever_its_log_shows(tmp_path):
    run = RunDir(tmp_path)
    append_event(run, "attempt", attempt=1, hosts={"ada": [0], "bob": [1]}, head="ada")
    silent = Failure(1, 1, None, "exit code 1, no output", 0.0, consequence=False, host="bob")
    cause, _, summary, fix, _ = explained(run, silent, {"bob": 1 << 30}, logs_show="healthy")
    assert (cause, summary) == ("unknown", "rank 1 on bob: exit code 1, no output")
    assert fix == f"read the end of its log: {run.rank_log(1, 1)}"
    assert explained(run, silent, {"bob": 0}, logs_show="healthy")[0] == "disk-full"


def test_a_full_disk_of_another_host_is_named_with_the_host(tmp_path):
    run = RunDir(tmp_path)
    append_event(run, "attempt", attempt=1, hosts={"ada": [0], "bob": [1]}, head="ada")
    silent = Failure(1, 1, None, "exit code 1, no output", 0.0, consequence=False, host="bob")
    assert explained(run, silent, {"bob": 1 << 30})[0] == "unknown"
    cause, host, summary, fix, retry = explained(run, silent, {"bob": 0})
    assert (cause, host, retry) == ("disk-full", "bob", "other-checkpoint")  # the policy waits for room
    assert summary == "the disk of bob is full: nothing could be written"
    room = "make room on it (ssh bob 'df -h ${XDG_CACHE_HOME:-~/.cache}')"
    assert fix == f"{room}; then `paceline resume {run.path}` goes on from the last checkpoint"
    refused = f"attempt: [Errno 28] {os.strerror(28)}: '/home/bob/.cache/paceline/runs/12ab/books/logs/1'"
    lost = Failure(None, None, None, refused, 0.0, consequence=False, host="bob", cause="host-lost")
    cause, host, summary, fix, _ = explained(run, lost, {})
    assert (cause, host, summary) == ("disk-full", "bob", f"host bob: {refused}")
    logs = "/home/bob/.cache/paceline/runs/12ab/books/logs"
    assert fix == f"make room there: ssh bob df -h {logs}; it joins the run again when it has some"
