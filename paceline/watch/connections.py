"""
The server's end of `paceline watch --web`: the socket on loopback, the connections on it, and the browser that is opened.

Connections that ask for nothing are closed, so that nobody keeps others out by holding them.
"""

import asyncio
import math
import os
import socket
import tempfile
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from paceline.errors import PacelineError, UsageError, expand_home
from paceline.rundir import read_text

PORT = 8765  # the first port to try
PORT_ATTEMPTS = 20
HEADERS_S = 10.0  # for a whole request on an open connection
MAX_IDLE = 32  # connections without a whole request
OPENING = '<meta http-equiv="refresh" content="0; url='  # of the file for the browser; the address follows


def listen(port: int | None) -> socket.socket:
    """Returns a listening socket on loopback. port None: the first free port from PORT on."""
    if port is not None and not 0 <= port < 1 << 16:
        raise UsageError(f"--port {port}: not a port", fix="--port 8765, or --port 0 for any free port")
    for number in range(PORT, PORT + PORT_ATTEMPTS) if port is None else [port]:
        try:
            return socket.create_server(("127.0.0.1", number), backlog=64)  # a browser waits from now on
        except OSError as error:
            reason = os.strerror(error.errno or 0)
    ports = f"port {port}" if port is not None else f"ports {PORT} to {PORT + PORT_ATTEMPTS - 1}"
    loopback = "sudo ip link set lo up && sudo ip addr replace 127.0.0.1/8 dev lo"
    fix = "paceline watch --web --port 0 takes any free port" if port != 0 else loopback
    raise PacelineError(f"cannot listen on {ports} of 127.0.0.1: {reason}", fix=fix)


class TimedConnection(H11Protocol):
    """A connection that is closed when it asks for nothing, or does not end a request's headers, for HEADERS_S.

    Of more than MAX_IDLE such connections the oldest is closed, so that they cannot use up the files that a process may open.
    """

    idle_since = math.inf
    timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self.watch()
        idle = [connection for connection in self.connections if getattr(connection, "idle_since", math.inf) < math.inf]
        if len(idle) > MAX_IDLE:
            min(idle, key=lambda connection: connection.idle_since).transport.close()  # type: ignore[union-attr]

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.timer:
            self.timer.cancel()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.watch()

    def watch(self) -> None:
        """Starts the time of a connection that has no whole request, and ends that of one that has."""
        is_idle = self.conn.their_state is h11.IDLE
        if is_idle and self.idle_since == math.inf:
            self.idle_since = self.loop.time()
            self.timer = self.loop.call_later(HEADERS_S, self.transport.close)
        elif not is_idle and self.timer:
            self.timer.cancel()
            self.idle_since, self.timer = math.inf, None


@contextmanager
def opened_browser(address: str) -> Iterator[None]:
    """Opens a file in the browser that redirects to the address, because every user of this host can read a command line.

    Only this user can read the file. It lies in the home folder, because a sandboxed browser reads no other.
    """
    home = expand_home("~")
    remove_dead_pages(home)
    try:
        fd, name = tempfile.mkstemp(prefix=f"paceline-{os.getpid()}-", suffix=".html", dir=home)
    except OSError as error:
        raise PacelineError(
            f"--open: cannot write a file to {home}: {error.strerror}",
            fix="leave out --open and open the printed address",
        ) from error
    try:
        with open(fd, "w") as file:
            file.write(f'{OPENING}{address}">\n')
        # in a thread, because a text browser returns only when it is closed, and needs the server until then
        threading.Thread(target=webbrowser.open, args=[Path(name).as_uri()], daemon=True).start()
        yield
    finally:
        Path(name).unlink(missing_ok=True)


def remove_dead_pages(folder: Path) -> None:
    """Removes the files of opened_browser whose server was killed; its token is dead too."""
    for path in folder.glob("paceline-*-*.html"):
        pid = path.name.split("-")[1]
        with suppress(OSError, ValueError):
            if pid.isdecimal() and not Path("/proc", pid).exists() and read_text(path).startswith(OPENING):
                path.unlink()
