"""
A node that joins a run: it connects to node 0 (launch/meeting.py) and starts there what node 0 asks for.

Every connection begins with the same handshake: each side proves by HMAC-SHA256 over the other's random challenge that it has the
token of the run, which itself never travels. What follows is neither signed nor encrypted, as with torch's own store and NCCL: the
network between the nodes has to be one that is trusted. The first connection stays: node 0 sends its orders on it, and the exit
code at the end. For each module that it asks for (facts, links, the far end of a run) the node opens another one, which becomes
the module's stdin and stdout, as if ssh had started it.
"""

import hashlib
import hmac
import json
import os
import secrets
import select
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from paceline.errors import INTERRUPTED, PacelineError, TrainingFailed
from paceline.launch.agent import start_child
from paceline.launch.places import Place
from paceline.launch.ssh import MAX_STDERR_BYTES, code_archive
from paceline.terminal import stop_signals

TOKEN = "PACELINE_TOKEN"
MIN_TOKEN_CHARS = 16  # a handshake that somebody has recorded must not let them try all tokens
MAKE_TOKEN = "python3 -c 'import secrets; print(secrets.token_hex(32))'"
HELLO_S = 5.0  # for all of a handshake
MAX_LINE_BYTES = 4096
CONNECT_S, RETRY_S = 3.0, 0.5
ALIVE_S = 1.0
POLL_S = 0.05
SILENT_S = 15.0  # a side that says nothing for so long is lost
RETURN_S = 60.0  # a network that was away may be there again within this
MAX_REFUSED = 4  # then node 0 has ended
REPORT_S = 15.0
END_S = 45.0  # without node 0: its far end waits 9 s, then the ranks save in at most 29
MODULES = ("paceline.check.probes.facts", "paceline.check.probes.link_probe", "paceline.launch.remote")
OTHER_TOKEN = "its token is another one"
SILENT_END = "it closed the connection without a word"
NO_PROTOCOL = "it does not speak paceline's protocol"

Line = dict[str, Any]


class Refused(PacelineError):
    """The other side does not take this connection, and says why."""


def read_token(variable: str | None, folder: Path) -> bytes:
    """Returns the run's token: PACELINE_TOKEN, or the file `token` in the folder. Raises PacelineError where it is not secret."""
    path = folder / "token"
    place = f"on every node, in {TOKEN} or in {path} (chmod 600)"
    text = (variable or "").strip()
    if not text:
        try:
            with path.open() as file:
                status = os.fstat(file.fileno())
                text = file.read(MAX_LINE_BYTES).strip()
        except (OSError, UnicodeDecodeError) as error:
            why = "" if isinstance(error, FileNotFoundError) else f", {path} cannot be read"
            what = f"there is no token{why}: by it the nodes of a run know each other"
            raise PacelineError(what, fix=f"the same one {place}; this makes one: {MAKE_TOKEN}") from None
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
            what = f"{path} can be read by others: mode {stat.S_IMODE(status.st_mode):o}, owner {status.st_uid}"
            raise PacelineError(what, fix=f"a new token, and chmod 600 {path}; this makes one: {MAKE_TOKEN}")
    if len(text) < MIN_TOKEN_CHARS:
        what = f"the token has {len(text)} characters: a short one can be guessed"
        raise PacelineError(what, fix=f"a longer one {place}; this makes one: {MAKE_TOKEN}")
    return text.encode(errors="surrogateescape")  # a variable may hold any bytes


def proof(token: bytes, *parts: str) -> str:
    """Returns what only somebody with the token can compute from these parts."""
    return hmac.new(token, json.dumps(parts).encode(), hashlib.sha256).hexdigest()


def is_proof(text: object, token: bytes, *parts: str) -> bool:
    return hmac.compare_digest(str(text).encode(errors="replace"), proof(token, *parts).encode())


def send_line(connection: socket.socket, line: Mapping[str, Any]) -> None:
    connection.sendall(json.dumps(line).encode() + b"\n")


def read_line(connection: socket.socket, deadline: float) -> Line:
    """Returns the next line and not a byte more. Raises ValueError for any other protocol, OSError where none comes in time."""
    received = bytearray()
    while not received.endswith(b"\n"):
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            byte = connection.recv(1)
        except ConnectionError:  # it is closed, and what was sent there was not read
            byte = b""
        if not byte:
            raise ConnectionError("the connection was closed" if received else SILENT_END)
        received += byte
        if len(received) > MAX_LINE_BYTES or received[:1] != b"{":
            raise ValueError(NO_PROTOCOL)
        if time.monotonic() > deadline:
            raise TimeoutError("timed out")
    try:
        line: Line = json.loads(received)
    except (ValueError, RecursionError):
        raise ValueError(NO_PROTOCOL) from None
    return line


def greet(connection: socket.socket, token: bytes, hello: Line) -> Line:
    """Does the handshake of the side that connects; returns node 0's answer. Raises Refused, OSError or ValueError."""
    deadline = time.monotonic() + HELLO_S
    challenge = str(read_line(connection, deadline).get("challenge"))
    text, own = json.dumps(hello), secrets.token_hex(16)
    send_line(connection, {"hello": text, "challenge": own, "proof": proof(token, "node", challenge, own, text)})
    answer = read_line(connection, deadline)
    if not is_proof(answer.get("proof"), token, "head", own, challenge, str(answer.get("text"))):
        raise Refused("its token is another one than this node's", fix=f"the same {TOKEN} on every node")
    reply: Line = json.loads(answer["text"])
    if "refused" in reply:
        raise Refused(reply["refused"], fix=reply["fix"])
    connection.settimeout(None)
    return reply


class Node:
    """This node of a run: the connection to node 0, and the modules that run here for it."""

    def __init__(self, place: Place, token: bytes, show: Callable[[str], None]):
        self.place, self.token, self.show = place, token, show
        self.instance = secrets.token_hex(8)  # of this process: a second one is no return of the first
        self.host = socket.gethostname()
        self.address = place.addresses[0]  # of node 0, the one that answers
        self.session: str | None = None  # of node 0's process
        self.control: socket.socket | None = None
        self.received = b""
        self.heard_at = 0.0
        self.num_refused = 0  # tries to connect again
        # by the id of their connection, with their stderr
        self.modules: dict[str, tuple[subprocess.Popen[bytes], Any]] = {}
        self.signals: list[str] = []
        self.is_stopping = self.is_killed = False

    def run(self, *, join_timeout_s: float) -> int:
        """Joins, serves node 0 until it ends, and returns its exit code. Call it from the main thread, as it handles signals."""
        self.join(join_timeout_s)
        self.show(f"joined  as {self.place.text}; node 0 is at {self.address}, port {self.place.port}")
        for signum in stop_signals():
            signal.signal(signum, self.add_signal)
        exit_code, why = self.serve()
        self.end_modules()
        self.show(f"ended   with exit code {exit_code}: {why}")
        return exit_code

    def join(self, timeout_s: float) -> None:
        """Connects as soon as node 0 listens; raises PacelineError where it refuses, or does not come in time."""
        deadline, reported_at, reason = time.monotonic() + timeout_s, time.monotonic(), ""
        place = self.place
        while True:
            for self.address in place.addresses:
                try:
                    self.connect()
                    return
                except ValueError as error:
                    what = f"what answers at {self.address}, port {place.port}, is not node 0: {error}"
                    raise PacelineError(
                        what, fix="--ports A-B on every node, with ports that nothing else has"
                    ) from error
                except Refused as error:
                    raise PacelineError(f"node 0 refused {place.text}: {error.message}", fix=error.fix) from None
                except OSError as error:
                    reason = f"{self.address}, port {place.port}: {error.strerror or error}"
            now = time.monotonic()
            if now > deadline:
                fix = f"see that node 0 runs, and that port {place.port} is open there; --join-timeout waits longer"
                raise PacelineError(f"node 0 did not answer for {timeout_s:.0f} s: {reason}", fix=fix)
            if now - reported_at > REPORT_S:
                reported_at = now
                self.show(f"waiting for node 0 as {place.text}: {reason}; {deadline - now:.0f} s left")
            time.sleep(RETRY_S)

    def connect(self) -> None:
        """Opens the connection that stays. Raises as `greet` does."""
        names = {"host": self.host, "node_rank": self.place.node_rank, "num_nodes": self.place.num_nodes}
        code = code_archive()[0]
        hello = {"kind": "node", "code": code, "instance": self.instance, "session": self.session, **names}
        self.control, reply = self.open_connection(hello)
        self.session, self.received, self.heard_at, self.num_refused = reply["session"], b"", time.monotonic(), 0

    def open_connection(self, hello: Line) -> tuple[socket.socket, Line]:
        connection = socket.create_connection((self.address, self.place.port), timeout=CONNECT_S)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection, greet(connection, self.token, hello)
        except BaseException:
            connection.close()
            raise

    def serve(self) -> tuple[int, str]:
        """Carries out node 0's orders; returns its exit code, and why this node ends."""
        lost_at = alive_at = 0.0
        while True:
            now = time.monotonic()
            self.report_ends()
            self.pass_signals()
            if self.is_killed:
                return INTERRUPTED, "a second Ctrl-C"
            if self.control is not None:
                if now - alive_at > ALIVE_S:
                    alive_at = now
                    self.report({"event": "alive"})
                for line in self.read_orders():
                    if line["do"] == "exit":
                        self.drop()
                        return int(line["code"]), str(line["why"])
                    if line["do"] == "open":
                        self.open(str(line["id"]), str(line["module"]))
                lost_at = time.monotonic()
            elif self.is_stopping or now - lost_at > RETURN_S or not self.has_returned():
                return (
                    TrainingFailed.exit_code,
                    f"the connection to node 0 was lost; see the output there, at {self.address}",
                )

    def read_orders(self) -> list[Line]:
        """Returns the lines that have arrived within half a second. A connection that has ended or is silent is dropped."""
        assert self.control
        if select.select([self.control], [], [], RETRY_S)[0]:
            try:
                piece = self.control.recv(1 << 16)
            except OSError:
                piece = b""
            self.received += piece
            self.heard_at = time.monotonic()
            if not piece:
                self.drop()
        elif time.monotonic() - self.heard_at > SILENT_S:
            self.drop()
        *lines, self.received = self.received.split(b"\n")
        return [json.loads(line) for line in lines]

    def has_returned(self) -> bool:
        """Tries to connect to the same node 0 again; returns whether there is hope."""
        try:
            self.connect()
        except (Refused, ValueError) as error:
            self.show(f"node 0 refused this node's return: {error.args[0]}")
            return False
        except OSError as error:
            time.sleep(RETRY_S)
            self.num_refused += isinstance(error, ConnectionRefusedError)  # nothing listens: node 0's process has ended
        return self.num_refused < MAX_REFUSED

    def open(self, number: str, module: str) -> None:
        """Starts a module whose stdin and stdout are a connection of its own; it is killed when this process ends."""
        try:
            if module not in MODULES:
                raise ValueError(f"no module {module}")
            hello = {"kind": "module", "id": number, "session": self.session}
            connection, _ = self.open_connection(hello)
        except (PacelineError, OSError, ValueError) as error:
            self.report({"event": "ended", "id": number, "exit_code": 1, "error": str(error)})
            return
        stderr = tempfile.TemporaryFile()  # noqa: SIM115  closed when its module has ended
        with connection:
            options = {"stdin": connection, "stdout": connection, "stderr": stderr, "start_new_session": True}
            self.modules[number] = start_child(module, **options), stderr

    def report_ends(self) -> None:
        """Tells node 0 how modules have ended, with the last line that they wrote to stderr."""
        for number, (process, stderr) in list(self.modules.items()):
            if process.poll() is not None:
                del self.modules[number]
                stderr.seek(0)
                lines = stderr.read(MAX_STDERR_BYTES).decode(errors="replace").strip().splitlines()
                stderr.close()
                last = lines[-1].strip() if lines else ""
                self.report({"event": "ended", "id": number, "exit_code": process.returncode, "error": last})

    def report(self, line: Line) -> None:
        """Sends a line to node 0; one that is lost drops the connection."""
        if self.control is not None:
            try:
                send_line(self.control, line)
            except OSError:
                self.drop()

    def drop(self) -> None:
        if self.control is not None:
            self.control.close()
            self.control = None

    def add_signal(self, signum: int, frame: FrameType | None) -> None:
        """Takes a signal; it is a signal handler."""
        self.signals.append(signal.Signals(signum).name)

    def pass_signals(self) -> None:
        """Tells node 0 of a signal: it saves and ends the run on all nodes. A second Ctrl-C ends this node at once."""
        for name in self.signals:
            if self.is_stopping and name == "SIGINT":
                self.is_killed = True
            elif not self.is_stopping:
                self.is_stopping = True
                self.show(
                    f"stopping: {name} goes to node 0, which saves and ends the run; Ctrl-C again ends this node now"
                )
                self.report({"event": "signal", "name": name})
        self.signals.clear()

    def end_modules(self) -> None:
        """Waits until what runs here has saved and ended, and kills what has not."""
        deadline = time.monotonic() + END_S
        while self.modules and not self.is_killed and time.monotonic() < deadline:
            self.report_ends()
            self.pass_signals()
            time.sleep(POLL_S)
        for process, _ in self.modules.values():
            process.kill()  # what it has started ends with its stdin
            process.wait()
