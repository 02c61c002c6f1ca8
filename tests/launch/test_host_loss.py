"""What a run of several hosts does when one of them is lost, and when it comes back: real ssh servers in network namespaces."""

import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator

import namespaces
import pytest
from hosts_run import FAULTS, HostsRun, cmdline, set_cable
from namespaces import Hosts, namespaced_hosts

from paceline.launch.channel import Channel
from paceline.launch.cluster import LONGEST_TICK_S, Cluster
from paceline.launch.failure import find_failures
from paceline.launch.hosts import HostEntry
from paceline.launch.losses import settle_losses
from paceline.launch.member import MAX_LOSSES, Member
from paceline.rundir import RunDir
from paceline.units import parse_time

needs_namespaces = pytest.mark.skipif(bool(namespaces.WHY_NOT), reason=namespaces.WHY_NOT)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory) -> Iterator[Hosts]:
    with namespaced_hosts(3, tmp_path_factory.mktemp("loss")) as hosts:
        yield hosts


@pytest.fixture
def start(hosts) -> Iterator[Callable[..., HostsRun]]:
    started: list[HostsRun] = []

    def start(*arguments: str, listed: str = "h1,h2", shared: bool = False) -> HostsRun:
        name = f"run{len(list(hosts.folder.glob('run*.out')))}"
        started.append(HostsRun(hosts, name, "--eval-every", "0", *arguments, listed=listed, shared=shared))
        return started[-1]

    yield start
    for run in started:
        run.close()
    set_cable(hosts, "h2", "up")


def noticed_s(run: HostsRun, since: float) -> float:
    """Returns how long after a moment the first failure was written down."""
    return parse_time(run.events("rank_failed")[0]["time"]) - since


def check_loss(run: HostsRun, name: str) -> None:
    """Does it to h2, which is lost, and checks what follows up to the first step of the next attempt."""
    fault = FAULTS[name]
    run.wait_for(lambda: run.step() >= 6)
    since = time.time()
    fault.inject(run)
    run.wait_for(lambda: run.events("resumed"))
    assert noticed_s(run, since) < 7
    verdict, decision = run.events("verdict")[0], run.events("decision")[0]
    assert (verdict["cause"], verdict["host"], verdict["rank"]) == ("host-lost", "h2", None), run.output
    assert decision["action"] == "fewer-ranks"
    first, second = run.events("attempt")
    assert second["world_size"] == first["world_size"] - 1
    assert run.step() - run.events("resumed")[0]["step"] <= 5  # the save interval
    assert "host h2: nothing was heard of it for 6 s" in run.output
    assert "lost h2: continuing on h1" in run.output
    # stopping the healthy ones, explaining and planning included; a busy machine needs the rest
    assert parse_time(second["time"]) - since < 30


@pytest.mark.soak
@pytest.mark.dist
@needs_namespaces
def test_a_host_without_power_is_left_out_and_joins_again_after_a_checkpoint(start):
    run = start("--num-steps", "3000", "--save-every", "5")
    check_loss(run, "power")
    set_cable(run.hosts, "h2", "up")
    run.wait_for(lambda: len(run.events("resumed")) == 2)
    [joined] = run.events("joined")
    assert (joined["joined"], joined["hosts"]) == (["h2"], ["h1", "h2"])
    assert [e["state"] for e in run.events("attempt_ended")] == ["failed", "regrouped"]
    assert run.events("attempt")[2]["hosts"] == {"h1": [0], "h2": [1]}
    assert len(run.events("verdict")) == 1  # the second attempt ended for h2, not of a fault
    run.stop()
    steps = [line["step"] for line in run.lines()]
    assert steps == list(range(1, len(steps) + 1))
    assert run.left("h2") == []


@pytest.mark.soak
@needs_namespaces
def test_two_of_three_hosts_go_on_and_a_run_with_too_few_waits_for_one_that_comes_back(start):
    run = start("--num-steps", "3000", "--save-every", "5", "--min-hosts", "2", listed="h1,h2,h3")
    check_loss(run, "cable")
    assert run.events("attempt")[1]["hosts"] == {"h1": [0], "h3": [1]}
    set_cable(run.hosts, "h3", "down")
    run.wait_for(lambda: run.events("decision")[-1]["action"] == "await-hosts")
    assert "attempt 3 once they are back, within 30 min" in run.output
    set_cable(run.hosts, "h3", "up")
    run.wait_for(lambda: len(run.events("resumed")) == 2)
    run.stop()
    assert run.events("attempt")[2]["hosts"] == {"h1": [0], "h3": [1]}


@pytest.mark.soak
@needs_namespaces
def test_a_run_whose_driver_was_offline_goes_on_when_it_is_back(start):
    run = start("--num-steps", "3000", "--save-every", "5", listed="h2,h3")
    run.wait_for(lambda: run.step() >= 6)
    set_cable(run.hosts, "h1", "down")
    run.wait_for(lambda: run.events("decision"))
    set_cable(run.hosts, "h1", "up")
    run.wait_for(lambda: run.events("resumed"))
    run.stop()
    assert "no other host: this machine may have been offline or asleep" in run.events("verdict")[0]["summary"]
    assert [event["world_size"] for event in run.events("attempt")] == [2, 2]
    steps = [line["step"] for line in run.lines()]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.soak
@needs_namespaces
@pytest.mark.parametrize("seconds", [7, 16])
def test_hosts_are_not_lost_while_the_supervisor_is_stopped(start, seconds):
    run = start("--num-steps", "3000", "--save-every", "5")
    run.wait_for(lambda: run.step() >= 6)
    run.process.send_signal(signal.SIGSTOP)  # ip and unshare have become the command: its pid is ours
    time.sleep(seconds)
    run.process.send_signal(signal.SIGCONT)
    time.sleep(2)
    run.wait_for(lambda: len(run.events("resumed")) == (0 if seconds < 9 else 1))
    run.stop()
    assert "host-lost" not in {verdict["cause"] for verdict in run.events("verdict")}
    assert len(run.events("attempt")) == (1 if seconds < 9 else 2)
    assert all(event["world_size"] == 2 for event in run.events("attempt"))


@pytest.mark.soak
@needs_namespaces
@pytest.mark.parametrize("how", ["killed", "network down"])
def test_the_hosts_save_and_end_when_the_supervisor_is_lost(start, how):
    run = start("--num-steps", "4000", "--save-every", "0", shared=True)
    run.wait_for(lambda: run.step() >= 6)
    if how == "killed":
        run.process.kill()
    else:
        set_cable(run.hosts, "h1", "down")
    since = time.monotonic()
    while run.processes("h2") if how == "killed" else [p for p in run.processes("h2") if "worker" in str(cmdline(p))]:
        assert time.monotonic() - since < 40, run.left("h2")
        time.sleep(0.2)
    assert time.monotonic() - since < 32
    if how == "killed":
        assert run.left("h1") == []
        assert list(run.run.checkpoints.glob("step_*/manifest.json"))  # saved: there was none before
    else:
        set_cable(run.hosts, "h1", "up")


@pytest.mark.soak
@needs_namespaces
def test_a_hung_rank_of_another_host_is_named_with_its_host_and_its_stacks(start):
    run = start("--num-steps", "24", "--save-every", "5", "--hang-after", "4")
    run.wait_for(lambda: run.step() >= 6)
    run.process_of("h2", "train.worker").suspend()
    run.end()
    [hang] = run.events("hang")
    assert hang["rank"] == 1 and "rank 1 on h2 is stopped (state T)" in hang["text"]
    assert (run.events("verdict")[0]["cause"], run.events("verdict")[0]["host"]) == ("hang", "h2")
    text = (run.run.hang(1) / "1.txt").read_text()
    assert text.startswith("rank 1 on h2, process ") and "State: T (stopped)" in text
    assert "state T" not in (run.run.hang(1) / "0.txt").read_text()
    assert [event["world_size"] for event in run.events("attempt")] == [2, 2]


def linked_member(channel: Channel) -> tuple[Cluster, Member]:
    """A cluster with one other host, as it is once its link is open."""
    cluster = Cluster([HostEntry("bob.invalid")], None, nproc=1, rejoin=False)
    [member] = cluster.members
    member.channel, member.is_open = channel, True
    return cluster, member


def test_only_time_in_which_the_supervisor_was_awake_counts_as_silence():
    (read_end, _kept), (sink, write_end) = os.pipe(), os.pipe()
    cluster, member = linked_member(Channel(read_end, write_end))
    cluster._seen_at -= 3600  # it was stopped for an hour
    cluster.pump(0)
    assert member.lost is None and member.silent_s == LONGEST_TICK_S
    for _ in range(5):
        cluster._seen_at -= 60
        cluster.pump(0)
    assert member.lost == "nothing was heard of it for 6 s"
    assert os.read(sink, 100)


def test_a_host_that_was_lost_three_times_is_tried_no_more():
    cluster = Cluster([HostEntry("bob.invalid")], None, nproc=1)
    [member] = cluster.members
    for number in range(1, MAX_LOSSES + 1):
        cluster.begin()
        member.lose("nothing was heard of it")
        settle_losses(cluster, is_quick=True)
        assert (member.num_losses, math.isinf(member.retry_at)) == (number, number == MAX_LOSSES)
        cluster.stop_agents()
        member.lost = None


def test_the_clock_of_a_host_does_not_decide_who_failed_first(tmp_path):
    run = RunDir(tmp_path)
    run.logs(1).mkdir(parents=True)
    ends = []
    for rank, (second, clock_s) in enumerate([(5, 0.0), (30, 30.0)]):  # bob's clock is half a minute ahead
        error = {"time": f"2026-01-01T00:00:{second:02d}.000Z", "type": "ValueError", "message": "boom"}
        run.rank_error(1, rank).write_text(json.dumps(error))
        end = {"rank": rank, "exit_code": 1, "time": parse_time(error["time"]), "ended_by_us": False, "is_shell": False}
        ends.append({**end, "host": ["ada", "bob"][rank], "clock_s": clock_s})
    first, second = find_failures(run, 1, ends)
    assert (first.subject, second.subject) == ("rank 1 on bob", "rank 0 on ada")
    assert second.time - first.time == 5
