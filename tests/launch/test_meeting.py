"""How nodes meet: the handshake on real sockets, who is refused and why. Real commands are in test_join.py."""

import json
import os
import re
import socket
import threading
from contextlib import closing, contextmanager, suppress
from dataclasses import replace

import pytest
from waiting import wait_for

from paceline.config import Config
from paceline.errors import PacelineError, UsageError
from paceline.launch import meeting as meeting_module
from paceline.launch import node as node_module
from paceline.launch.connect import run_at_place
from paceline.launch.hosts import HostEntry, hosts_of, is_this_host
from paceline.launch.meeting import MAX_REFUSALS, Meeting
from paceline.launch.node import NO_PROTOCOL, OTHER_TOKEN, SILENT_END, Node, read_token
from paceline.launch.node import TOKEN as TOKEN_NAME
from paceline.launch.places import Place
from paceline.options import ScriptOptions
from paceline.rundir import RunDir, read_json_lines

TOKEN = b"a token of the run, long enough"
DEADLINE_S = 300.0  # guards against hanging alone


def free_port():
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        return listener.getsockname()[1]


class Met:
    """Node 0, and what it shows."""

    def __init__(self, num_nodes, address):
        self.lines, self.nodes = [], []
        self.place = Place("NODE_RANK and NNODES", 0, num_nodes, (address,), free_port())
        self.meeting = Meeting(self.place, TOKEN, self.lines.append)

    def node(self, rank, *, token=TOKEN, num_nodes=None):
        place = replace(self.place, node_rank=rank, num_nodes=num_nodes or self.place.num_nodes)
        self.nodes.append(Node(place, token, lambda text: None))
        return self.nodes[-1]

    def join(self, rank, **changes):
        node = self.node(rank, **changes)
        node.join(DEADLINE_S)
        return node

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.place.port), timeout=DEADLINE_S)

    def shown(self, text):
        wait_for(lambda: any(text in line for line in self.lines))
        return next(line for line in self.lines if text in line)


@contextmanager
def node_0(num_nodes=2, address="127.0.0.1"):
    met = Met(num_nodes, address)
    try:
        yield met
    finally:
        for node in met.nodes:
            node.drop()
        met.meeting.close(0, "the test has ended")


def refusal(node):
    with pytest.raises(PacelineError) as error:
        node.join(DEADLINE_S)
    return error.value.message, error.value.fix


def test_nodes_join_in_any_order_and_have_names_of_their_own():
    with node_0(4) as met:
        for rank, name in ((3, "ada"), (1, "ada"), (2, "../x")):
            node = met.node(rank)
            node.host = name
            node.join(DEADLINE_S)
        links = met.meeting.gather(timeout_s=DEADLINE_S, min_nodes=1)
    assert [(link.rank, link.name) for link in links] == [(1, "ada-1"), (2, "node-2"), (3, "ada")]
    assert met.lines[0] == "joined  ada at 127.0.0.1 as node 3"


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_nodes_meet_at_an_ipv6_address_and_at_a_name():
    for address, own in (("::1", "::1"), ("localhost", "127.0.0.1")):
        with node_0(address=address) as met:
            met.join(1)
            assert met.meeting.gather(timeout_s=DEADLINE_S, min_nodes=1)[0].peer in (own, "::1")


def test_a_joined_host_is_never_this_one():
    assert is_this_host(HostEntry(socket.gethostname()))
    assert not is_this_host(HostEntry(socket.gethostname(), way="joined"))


def test_a_stranger_is_refused_and_delays_nobody():
    with node_0() as met:
        silent = [met.connect() for _ in range(20)]
        for words in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"{}\n",
            b"[1]\n",
            b'{"hello": 1, "challenge": 2, "proof": 3}\n',
            b'{"hello": "", "challenge": "\\ud800", "proof": "\\ud800"}\n',
            b"{" * 9000,
            b'{"":' * 1020 + b"\n",
        ):
            with met.connect() as stranger:
                stranger.sendall(words)
        with met.connect():
            pass
        with met.connect() as stranger:
            stranger.settimeout(DEADLINE_S)
            assert stranger.recv(1)  # what it has not read makes its end a reset
        met.join(1)
        assert len(met.meeting.gather(timeout_s=DEADLINE_S, min_nodes=1)) == 1
        met.shown("refused a connection from 127.0.0.1: it does not speak paceline's protocol")
        met.shown("refused a connection from 127.0.0.1: its token is another one")
        wait_for(lambda: sum(SILENT_END in line for line in met.lines) == 2)
        reasons = {line.partition("127.0.0.1: ")[2] for line in met.lines if line.startswith("refused")}
        assert reasons <= {NO_PROTOCOL, OTHER_TOKEN, SILENT_END, "timed out"}, met.lines
        for stranger in silent:
            stranger.close()


def test_many_silent_strangers_are_closed_at_once_and_those_that_wait_within_seconds(monkeypatch):
    monkeypatch.setattr(meeting_module, "MAX_HANDSHAKES", 3)
    monkeypatch.setattr(meeting_module, "HELLO_S", 0.5)
    with node_0() as met:
        silent = [met.connect() for _ in range(6)]
        met.join(1)  # it is closed too, and tries again
        for stranger in silent:
            stranger.settimeout(DEADLINE_S)
            while stranger.recv(4096):
                pass
            stranger.close()
        met.shown("refused a connection from 127.0.0.1: timed out")


def test_refusals_do_not_fill_the_disk():
    with node_0() as met:
        for _ in range(MAX_REFUSALS + 10):
            met.connect().close()
        met.shown("further connections that are refused are not reported")
        wait_for(lambda: met.meeting.num_refusals == MAX_REFUSALS + 10)
        assert len(met.lines) == MAX_REFUSALS + 1
        met.join(1)
        met.shown("as node 1")  # whoever is let in is always reported


def test_another_token_is_refused_on_both_sides():
    with node_0() as met:
        what, fix = refusal(met.node(1, token=b"another token, as long as it"))
        assert what.endswith("its token is another one than this node's") and "PACELINE_TOKEN" in fix
        assert met.shown("refused") == "refused a connection from 127.0.0.1: its token is another one"
        assert "token, as long" not in "".join(met.lines)
        met.join(1)


def test_a_recorded_handshake_opens_nothing():
    with node_0() as met:
        sent = []
        original = node_module.send_line
        node_module.send_line = lambda connection, line: (sent.append(line), original(connection, line))
        try:
            node = met.join(1)
            met.shown("as node 1")
            node.drop()
        finally:
            node_module.send_line = original
        assert TOKEN.decode() not in json.dumps(sent)
        wait_for(lambda: met.meeting.links[1].connection is None)
        with met.connect() as stranger:
            stranger.sendall(json.dumps(sent[0]).encode() + b"\n")
            met.shown("refused a connection from 127.0.0.1: its token is another one")
        assert met.meeting.links[1].connection is None


def test_a_node_refuses_a_node_0_without_the_token_and_whatever_else_answers():
    def answer(words):
        connection, _ = listener.accept()
        with connection, suppress(ConnectionResetError):
            connection.sendall(words)
            connection.recv(4096)

    port = free_port()
    place = Place("NODE_RANK and NNODES", 1, 2, ("127.0.0.1",), port)
    false = b'{"challenge": "1"}\n{"text": "{\\"session\\": \\"1\\"}", "proof": "2"}\n'
    with closing(socket.create_server(("127.0.0.1", port))) as listener:
        for words, message in ((false, "its token is another one"), (b"SSH-2.0-OpenSSH\r\n", "is not node 0")):
            thread = threading.Thread(target=answer, args=(words,))
            thread.start()
            what, _ = refusal(Node(place, TOKEN, lambda text: None))
            thread.join()
            assert message in what


def test_other_code_another_count_and_a_rank_that_is_none_are_refused(monkeypatch):
    with node_0(3) as met:
        assert "it is node 3 of 4, and node 0 counts 3" in refusal(met.node(3, num_nodes=4))[0]
        assert "it is node 1 of 2, and node 0 counts 3" in refusal(met.node(1, num_nodes=2))[0]
        assert "it is node 7 of 3" in refusal(met.node(7))[0]
        monkeypatch.setattr(node_module, "code_archive", lambda: ("other", b""))
        what, fix = refusal(met.node(1))
        assert what == "node 0 refused node 1 of 3 by NODE_RANK and NNODES: its code is not that of node 0"
        assert fix == "install the same version of paceline on every node"
        assert met.shown("its code").startswith(f"refused node 1, {socket.gethostname()} at 127.0.0.1: ")
        assert not met.meeting.links


def test_a_second_node_of_the_same_rank_is_refused_until_the_first_is_lost(monkeypatch):
    monkeypatch.setattr(meeting_module, "QUIET_S", DEADLINE_S)  # these nodes send nothing
    with node_0() as met:
        first = met.join(1)
        what, fix = refusal(met.node(1))
        assert "node 1 is there already" in what and fix == "another node rank for each node"
        first.drop()
        wait_for(lambda: met.meeting.links[1].connection is None)
        met.join(1)  # its launcher has started it again


def test_a_node_that_was_started_again_takes_the_place_of_one_that_has_fallen_silent(monkeypatch):
    monkeypatch.setattr(meeting_module, "QUIET_S", 0.0)
    with node_0() as met:
        met.join(1)  # its machine has lost power: nothing closes the connection
        second = met.join(1)
        link = met.meeting.links[1]
        wait_for(lambda: link.instance == second.instance and link.connection is not None)


def test_a_node_whose_connection_breaks_returns():
    with node_0() as met:
        node = met.join(1)
        link = met.meeting.links[1]
        wait_for(lambda: link.connection is not None)
        first = link.connection
        node.connect()  # before node 0 notices
        wait_for(lambda: link.connection not in (None, first))
        link.send({"do": "exit", "code": 7, "why": "it is over"})
        assert node.serve() == (7, "it is over")
        assert [line for line in met.lines if "joined" in line] == [f"joined  {link.name} at 127.0.0.1 as node 1"]
        met.meeting.session = "of another run"
        with pytest.raises(PacelineError, match="the run that it took part in has ended"):
            node.connect()


def test_a_node_that_does_not_come_is_named_and_one_that_comes_late_is_refused(tmp_path):
    with node_0(3) as met:
        met.join(1)
        with pytest.raises(PacelineError) as error:
            met.meeting.gather(timeout_s=0.2, min_nodes=3)
        assert error.value.message == "node 2 of 3 did not join in 0 s"
        assert "--join-timeout waits longer, --min-hosts begins with fewer" in error.value.fix
        assert [link.rank for link in met.meeting.gather(timeout_s=0.2, min_nodes=2)] == [1]
        run = RunDir(tmp_path)
        met.meeting.links[1].record(run)
        what, fix = refusal(met.node(2))
        assert "it is late: the run began without it at " in what and fix == "--join-timeout waits longer for it"
    notes = [event["text"] for event in read_json_lines(run.events)]
    assert notes[1] == "node 2 of 3 did not join in 0 s: the run begins without"
    assert notes[2].startswith(f"refused node 2, {socket.gethostname()} at 127.0.0.1: it is late")


def test_node_0_tells_who_is_missing_while_it_waits(monkeypatch):
    monkeypatch.setattr(meeting_module, "REPORT_S", 0.1)
    with node_0(4) as met:
        met.join(2)
        waiting = threading.Thread(target=met.meeting.gather, kwargs={"timeout_s": DEADLINE_S, "min_nodes": 1})
        waiting.start()
        assert re.fullmatch(r"waiting for nodes 1, 3 of 4; \d+ s left", met.shown("waiting"))
        met.join(1)
        met.join(3)
        waiting.join()


def test_a_taken_port_is_an_error_with_its_fix():
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        place = Place("SkyPilot's variables", 0, 2, ("127.0.0.1",), listener.getsockname()[1])
        with pytest.raises(PacelineError) as error:
            Meeting(place, TOKEN, print)
    assert error.value.message.endswith("where the nodes of this run meet, is taken")
    assert error.value.fix == "--ports A-B on every node, with ports that are free"


def test_a_node_0_that_others_reach_by_another_address_listens_on_all():
    lines = []
    meeting = Meeting(Place("SkyPilot's variables", 0, 2, ("192.0.2.77",), free_port()), TOKEN, lines.append)
    meeting.close(0, "")
    what = "note    192.0.2.77 is no address of this host, which is node 0 by SkyPilot's variables: listening on all"
    assert lines == [f"{what} of its addresses"]
    with pytest.raises(PacelineError, match="192.0.2.77 is no address of this host") as error:
        Meeting(Place("Open MPI's variables", 0, 2, ("192.0.2.77",), free_port()), TOKEN, print)
    assert error.value.fix.startswith("mpirun -x MASTER_ADDR")


def test_the_token_comes_from_the_environment_or_a_file_that_only_its_owner_can_read(tmp_path):
    path = tmp_path / "token"
    with pytest.raises(PacelineError) as error:
        read_token(None, tmp_path)
    assert error.value.message.startswith("there is no token") and "secrets.token_hex(32)" in error.value.fix
    path.write_text("of the file, long enough\n")
    path.chmod(0o640)
    with pytest.raises(PacelineError, match="can be read by others: mode 640"):
        read_token("", tmp_path)
    path.chmod(0o600)
    assert read_token(None, tmp_path) == b"of the file, long enough"
    assert read_token("of the environment ", tmp_path) == b"of the environment"
    assert read_token("\udcff of any bytes, long enough", tmp_path) == b"\xff of any bytes, long enough"
    with pytest.raises(PacelineError, match="has 5 characters"):
        read_token("short", tmp_path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_token_of_another_owner_is_refused(tmp_path):
    (tmp_path / "token").write_text("of the file, long enough\n")
    (tmp_path / "token").chmod(0o600)
    os.chown(tmp_path / "token", 12_345, -1)
    with pytest.raises(PacelineError, match="owner 12345"):
        read_token(None, tmp_path)


PLAIN = {"NODE_RANK": "0", "NNODES": "2", "MASTER_ADDR": "127.0.0.1"}


def at_place(monkeypatch, options, env):
    """Returns the nodes with which a command leads."""
    for name, text in {**env, TOKEN_NAME: TOKEN.decode()}.items():
        monkeypatch.setenv(name, text)
    nodes = []
    assert run_at_place(options, lambda them: nodes.append(them) or 0, ports=None) == 0
    assert TOKEN_NAME not in os.environ
    return nodes[0]


def test_without_a_place_or_with_no_join_a_command_runs_alone(monkeypatch):
    assert at_place(monkeypatch, ScriptOptions(), {}) == ()
    assert at_place(monkeypatch, ScriptOptions(join=False), PLAIN) == ()


def test_what_does_not_go_with_a_place_is_refused(monkeypatch):
    with pytest.raises(UsageError, match="this is node 0 of 2 by NODE_RANK and NNODES, and --detach ends the process"):
        at_place(monkeypatch, ScriptOptions(detach=True), PLAIN)
    nodes = [HostEntry("ada", nproc=4), HostEntry("bob", nproc=4, way="joined")]
    assert hosts_of(Config(), nodes) == (nodes, Config(nproc=4))
    assert hosts_of(Config(nproc=2), nodes)[1].nproc == 2
    for key in ("hosts", "python"):
        with pytest.raises(
            UsageError, match=f"--{key} x is for hosts that this command reaches by itself, and 2 nodes"
        ):
            hosts_of(Config(**{key: "x"}), nodes)
