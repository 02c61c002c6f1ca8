"""
Node 0's side of joining: it listens, lets the other nodes in (launch/node.py has the handshake), and keeps a link to each.

A thread of its own answers each connection, within a few seconds and a few kilobytes: a stranger that sends nothing, or garbage,
delays nobody. Who is refused learns why; so does the terminal of node 0, or the events of the run once it has a folder.
"""

import errno
import io
import ipaddress
import json
import os
import queue
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime

from paceline.check.probes.network_probe import own_addresses
from paceline.errors import PacelineError
from paceline.launch.channel import Lines
from paceline.launch.node import (
    HELLO_S,
    NO_PROTOCOL,
    OTHER_TOKEN,
    REPORT_S,
    SILENT_S,
    Line,
    is_proof,
    proof,
    read_line,
    send_line,
)
from paceline.launch.places import Place
from paceline.launch.ssh import ANSWER_S, ModuleProcess, code_archive
from paceline.rundir import RunDir, append_event

OPEN_S = 10.0  # for a node to open a connection
QUIET_S = 4.0  # a node sends a line every second: after this one that was started again may take its place
MAX_HANDSHAKES = 64  # at the same time
MAX_REFUSALS = 30  # that are reported: a stranger cannot fill the disk
END_S = 5.0
ACCEPT_S = 0.2
RESTART = "start the command there again"


class SendingEnd(io.FileIO):
    """The direction of a connection in which this process sends; closing it is the end of the other side's input."""

    def close(self) -> None:
        if not self.closed:
            with suppress(OSError), socket.socket(fileno=os.dup(self.fileno())) as connection:
                connection.shutdown(socket.SHUT_WR)
        super().close()


class JoinedModule(ModuleProcess):
    """A module of this package on a node that has joined; a connection is its stdin and stdout."""

    def __init__(self, connection: socket.socket, link: "NodeLink", number: str):
        self.link, self.number = link, number
        self.deadline = time.monotonic() + ANSWER_S
        self.stdin = SendingEnd(os.dup(connection.fileno()), "wb")
        self.stdout = io.FileIO(connection.detach(), "rb")
        self.lines, self.waiting = Lines(self.stdout.fileno()), list[Line]()

    def write(self, chunk: bytes) -> None:
        with suppress(OSError):  # next_line has the reason
            self.stdin.write(chunk)

    def failure(self) -> PacelineError:
        self.close()
        return PacelineError(self.link.end_of(self.number), fix=f"see the output of paceline on {self.link.name}")

    def close(self) -> None:
        self.stdin.close()
        self.stdout.close()

    def kill(self) -> None:
        self.close()

    def __exit__(self, *_: object) -> None:
        self.close()


class NodeLink:
    """The link from node 0 to a node that has joined."""

    def __init__(self, rank: int, name: str):
        self.rank, self.name = rank, name
        self.peer = self.instance = ""
        self.connection: socket.socket | None = None  # None: it was lost
        self.heard_at = 0.0
        self.lock = threading.Lock()
        self.arrivals: dict[str, queue.SimpleQueue[socket.socket | None]] = {}  # of connections, by their id
        self.ends: dict[str, str] = {}  # how modules have ended
        self.record: Callable[[RunDir], None] = lambda run: None  # writes what has happened into the run's events

    def open(self, module: str) -> JoinedModule:
        """Starts a module there; raises PacelineError where the node cannot be asked."""
        number, arrival = secrets.token_hex(8), queue.SimpleQueue[socket.socket | None]()
        self.arrivals[number] = arrival
        try:
            self.send({"do": "open", "id": number, "module": module})
            connection = arrival.get(timeout=OPEN_S)
        except queue.Empty:
            raise PacelineError(
                f"it opened no connection in {OPEN_S:.0f} s", fix="see how busy it is: uptime"
            ) from None
        finally:
            del self.arrivals[number]
        if connection is None:
            raise PacelineError(self.end_of(number), fix=f"see the output of paceline on {self.name}")
        return JoinedModule(connection, self, number)

    def send(self, line: Line) -> None:
        """Sends an order; raises PacelineError where the connection is lost."""
        with self.lock:
            try:
                if self.connection is not None:
                    send_line(self.connection, line)
                    return
            except OSError:
                self.connection = None
        raise PacelineError(
            f"the connection to node {self.rank} is lost", fix=f"see the output of paceline on {self.name}"
        )

    def end_of(self, number: str) -> str:
        """Returns how a module ended, as far as the node reports it within a second."""
        deadline = time.monotonic() + 1.0
        while self.connection is not None and number not in self.ends and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.ends.get(number) or "its paceline did not report why"

    def follow(self, connection: socket.socket) -> None:
        """Reads the node's lines until the connection ends or is silent."""
        connection.settimeout(SILENT_S)
        lines = Lines(connection.fileno())
        with suppress(OSError, ValueError, KeyError), connection:
            while connection.recv(1, socket.MSG_PEEK):
                self.heard_at = time.monotonic()
                for line in lines.read():
                    if line["event"] == "ended":
                        self.ends[line["id"]] = line["error"] or f"exit code {line['exit_code']}"
                        if arrival := self.arrivals.get(line["id"]):
                            arrival.put(None)
                    elif line["event"] == "signal":  # of a scheduler that ends the job: as if it had come here
                        os.kill(os.getpid(), signal.SIGTERM)
                    elif line["event"] == "alive":
                        with self.lock:
                            send_line(connection, {"do": "alive"})
        with self.lock:
            if self.connection is connection:
                self.connection = None


class Meeting:
    """Where the nodes of a run meet: the listener of node 0, and the links to those that have joined."""

    def __init__(self, place: Place, token: bytes, show: Callable[[str], None]):
        self.place, self.token, self.show = place, token, show
        self.code, self.session = code_archive()[0], secrets.token_hex(16)
        self.links: dict[int, NodeLink] = {}
        self.began: str | None = None  # when the run began, without those that had not come
        self.has_ended = False
        self.run: RunDir | None = None
        self.notes: list[str] = []
        self.changed = threading.Condition()
        self.num_handshakes = self.num_refusals = 0
        self.listener = listen(place, show)
        threading.Thread(target=self.accept, daemon=True).start()

    def gather(self, *, timeout_s: float, min_nodes: int) -> list[NodeLink]:
        """Waits for the other nodes and returns the links to them, by their rank.

        min_nodes: as many suffice once the time is over, where it is more than one. Raises PacelineError where too few have come.
        """
        count, began = self.place.num_nodes, time.monotonic()
        reported_at = began
        with self.changed:
            while missing := [rank for rank in range(1, count) if rank not in self.links]:
                names = f"node{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of {count}"
                now = time.monotonic()
                if now - began > timeout_s:
                    break
                if now - reported_at > REPORT_S:
                    reported_at = now
                    self.show(f"waiting for {names}; {timeout_s - now + began:.0f} s left")
                self.changed.wait(min(REPORT_S, began + timeout_s - now + 0.01))
            self.began = f"{datetime.now():%H:%M:%S}"
        if missing and not (min_nodes > 1 and count - len(missing) >= min_nodes):
            fix = "see the output of paceline there; --join-timeout waits longer, --min-hosts begins with fewer"
            raise PacelineError(f"{names} did not join in {timeout_s:.0f} s", fix=fix)
        if missing:
            self.note(f"{names} did not join in {timeout_s:.0f} s: the run begins without")
        return [self.links[rank] for rank in sorted(self.links)]

    def accept(self) -> None:
        """Answers each connection in a thread; beyond MAX_HANDSHAKES they are closed at once."""
        while not self.has_ended:
            try:
                connection, peer = self.listener.accept()
            except OSError:  # no more files, or the listener was closed
                time.sleep(ACCEPT_S)
                continue
            if self.num_handshakes >= MAX_HANDSHAKES:
                connection.close()
                continue
            with self.changed:
                self.num_handshakes += 1
            address = str(peer[0]).removeprefix("::ffff:")
            threading.Thread(target=self.answer, args=(connection, address), daemon=True).start()

    def answer(self, connection: socket.socket, peer: str) -> None:
        """Does the handshake, and serves the node if it is let in."""
        link: NodeLink | None = None
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = self.admit(connection, peer)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            why = NO_PROTOCOL if isinstance(error, KeyError | TypeError | AttributeError | UnicodeError) else error
            self.note_refusal(f"a connection from {peer}: {why}")
            connection.close()
        finally:
            with self.changed:
                self.num_handshakes -= 1
        if link is not None:
            link.follow(connection)

    def admit(self, connection: socket.socket, peer: str) -> NodeLink | None:
        """Returns the link of a node that joins; None for a connection that is for a module, or refused."""
        deadline, challenge = time.monotonic() + HELLO_S, secrets.token_hex(16)
        connection.settimeout(HELLO_S)
        with suppress(ConnectionError):  # read_line reports it
            send_line(connection, {"challenge": challenge})
        line = read_line(connection, deadline)
        text, theirs = line["hello"], line["challenge"]

        def reply(answer: Line) -> None:
            own = json.dumps(answer)
            send_line(connection, {"text": own, "proof": proof(self.token, "head", theirs, challenge, own)})

        def refuse(why: str, fix: str) -> None:
            self.note_refusal(f"{place}: {why}")
            with suppress(OSError):  # it may be gone
                reply({"refused": why, "fix": fix})
            connection.close()

        place = f"a connection from {peer}"
        if not is_proof(line["proof"], self.token, "node", challenge, theirs, text):
            refuse(OTHER_TOKEN, "")
            return None
        hello = json.loads(text)
        if hello["kind"] == "module":
            waiting = [link.arrivals[hello["id"]] for link in list(self.links.values()) if hello["id"] in link.arrivals]
            if not waiting or hello["session"] != self.session:
                refuse("nobody waits for it", "")
                return None
            reply({"session": self.session})
            connection.settimeout(None)
            waiting[0].put(connection)
            return None
        place = f"node {hello['node_rank']}, {hello['host']} at {peer}"
        with self.changed:
            if refusal := self.refusal(hello):
                refuse(*refusal)
                return None
            link = self.links.setdefault(hello["node_rank"], NodeLink(hello["node_rank"], self.name_of(hello)))
            reply({"session": self.session})
            is_new = link.instance != hello["instance"]
            link.connection, link.peer, link.instance, link.record = connection, peer, hello["instance"], self.record
            link.heard_at = time.monotonic()
            self.changed.notify_all()
        if is_new:
            self.note(f"joined  {link.name} at {peer} as node {link.rank}")
        return link

    def refusal(self, hello: Line) -> tuple[str, str] | None:
        """Returns why a node is refused, and the fix; None for one that may join."""
        rank, count = hello["node_rank"], self.place.num_nodes
        if self.has_ended or hello["session"] not in (None, self.session):
            return "the run that it took part in has ended", RESTART
        if hello["code"] != self.code:
            return "its code is not that of node 0", "install the same version of paceline on every node"
        if hello["num_nodes"] != count or not 0 < rank < count:
            what = f"it is node {rank} of {hello['num_nodes']}, and node 0 counts {count}"
            return what, "the same number of nodes for all, and ranks from 0 on"
        link = self.links.get(rank)
        if link is None and self.began:
            return f"it is late: the run began without it at {self.began}", "--join-timeout waits longer for it"
        is_heard = link and link.connection is not None and time.monotonic() - link.heard_at < QUIET_S
        if link and is_heard and link.instance != hello["instance"]:
            return f"node {rank} is there already: {link.name} at {link.peer}", "another node rank for each node"
        return None

    def name_of(self, hello: Line) -> str:
        """Returns what the run calls a node: its host name, with its rank where that is another's."""
        host = hello["host"]
        names = {socket.gethostname(), *(link.name for link in self.links.values())}
        is_name = (
            isinstance(host, str) and 0 < len(host) < 254 and all(char.isalnum() or char in "-_." for char in host)
        )
        if is_name and host not in names:
            return str(host)
        return f"{host if is_name else 'node'}-{hello['node_rank']}"

    def note(self, text: str) -> None:
        """Shows what has happened; once the run has a folder, its events have it."""
        if self.run is not None:
            with suppress(OSError, PacelineError):
                append_event(self.run, "note", text=text)
            return
        self.notes.append(text)
        self.show(text)

    def note_refusal(self, text: str) -> None:
        """Shows who was refused, and why, unless there have been too many."""
        self.num_refusals += 1
        if self.num_refusals <= MAX_REFUSALS and not self.has_ended:
            self.note(f"refused {text}")
        elif self.num_refusals == MAX_REFUSALS + 1:
            self.note("further connections that are refused are not reported")

    def record(self, run: RunDir) -> None:
        """Writes what has happened so far, and from now on, into the events of the run."""
        if self.run is None:
            self.run = run
            for text in self.notes:
                append_event(run, "note", text=text)

    def close(self, exit_code: int, why: str) -> None:
        """Tells the nodes to end with this exit code, and listens no more."""
        self.has_ended = True
        links = list(self.links.values())
        for link in links:
            with suppress(PacelineError):
                link.send({"do": "exit", "code": exit_code, "why": why})
        deadline = time.monotonic() + END_S
        while any(link.connection for link in links) and time.monotonic() < deadline:
            time.sleep(0.01)  # until they have read it
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


def listen(place: Place, show: Callable[[str], None]) -> socket.socket:
    """Returns a listener on the address by which the other nodes reach this one, or on all where that is not clear.

    Raises PacelineError where the port is taken, or mpirun runs on another host than rank 0.
    """
    own = own_addresses()
    resolved = dict.fromkeys(address for name in place.addresses for address in addresses_of(name, place.port))
    local = [address for address in resolved if address in own]
    # a host's own name often means 127.0.1.1 on that host alone
    usable = [text for text in local if text in place.addresses or not ipaddress.ip_address(text).is_loopback]
    if not local:
        what = f"{', '.join(place.addresses)} is no address of this host, which is node 0 by {place.source}"
        if place.source.startswith("Open MPI"):
            raise PacelineError(what, fix="mpirun -x MASTER_ADDR, with the address of the first host of its list")
        show(f"note    {what}: listening on all of its addresses")
    host = usable[0] if len(usable) == 1 else ""
    has_ipv6 = ":" in host or (not host and socket.has_dualstack_ipv6())
    family = socket.AF_INET6 if has_ipv6 else socket.AF_INET
    try:
        return socket.create_server(
            (host, place.port), family=family, backlog=128, dualstack_ipv6=has_ipv6 and not host
        )
    except OSError as error:
        is_taken = error.errno == errno.EADDRINUSE
        what = "is taken" if is_taken else f"cannot be used: {error.strerror}"
        fix = "--ports A-B on every node, with ports that are free"
        raise PacelineError(f"port {place.port}, where the nodes of this run meet, {what}", fix=fix) from error


def addresses_of(name: str, port: int) -> list[str]:
    """Returns the addresses of a name; none where it has none here."""
    with suppress(OSError):
        return [str(place[0]) for *_, place in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)]
    return []
