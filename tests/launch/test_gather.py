"""What another host's ranks write and how it reaches the supervisor's run folder."""

import socket

import pytest

from paceline.heartbeat import HeartbeatWriter, read_heartbeat
from paceline.launch.channel import Channel, wait
from paceline.launch.gather import FROM_HOST, Follower, receive
from paceline.rundir import RunDir


@pytest.fixture
def ends():
    """The channels of both ends of a link."""
    pair = socket.socketpair()
    yield [Channel(end.fileno(), end.fileno()) for end in pair]
    for end in pair:
        end.close()


def carry(ends, run):
    """Sends what the first end has to send and writes what arrives at the second into the run folder."""
    near, far = ends
    while near.has_more:
        wait([near, far], 0.05)
        near.read()
        for line, data in far.read():
            receive(run, line, data, allowed=FROM_HOST)
    wait([far], 0.05)
    for line, data in far.read():
        receive(run, line, data, allowed=FROM_HOST)


def test_every_heartbeat_arrives_although_a_mapped_file_keeps_its_time(tmp_path, ends):
    copy, run = RunDir(tmp_path / "copy"), RunDir(tmp_path / "run")
    follower, heartbeat = Follower(copy, ends[0]), HeartbeatWriter(copy, 3)
    for step in range(5):
        heartbeat.beat(step, "forward")
        follower.scan(1)
        carry(ends, run)
        assert read_heartbeat(run.progress(3)).step == step


def test_logs_of_a_host_arrive_under_their_own_names(tmp_path, ends):
    copy, run = RunDir(tmp_path / "copy"), RunDir(tmp_path / "run")
    copy.logs(1).mkdir(parents=True)
    copy.launch_log(1, "bob").write_text("the agent's\n")
    copy.kernel_log(1, "bob").write_text("[rank3]: Killed process 7\n")
    follower = Follower(copy, ends[0])
    follower.scan(1)
    carry(ends, run)
    with copy.launch_log(1, "bob").open("a") as log:
        log.write("more\n")
    follower.scan(1)
    carry(ends, run)
    assert run.launch_log(1, "bob").read_text() == "the agent's\nmore\n"
    assert run.kernel_log(1, "bob").read_text() == "[rank3]: Killed process 7\n"
