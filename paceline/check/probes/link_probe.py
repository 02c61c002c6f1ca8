"""
How this host reaches another one: `python -m paceline.check.probes.link_probe`, with JSON lines on stdin and stdout.

The first line in has a token and the port to listen on, and is answered with the port and the addresses of this host. Each later
line has the addresses and the port of another host, and is answered with what came out. The process ends with its stdin.
"""

import json
import os
import signal
import socket
import statistics
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from threading import Thread
from typing import Any

import psutil

HEADER = struct.Struct("!cQ")  # what to do with the bytes that follow: echo them, or count them
ECHO, COUNT, REPLY = b"e", b"c", struct.Struct("!Q")
MAX_ECHO_BYTES = 4096
ROUND_TRIPS = 21
LARGE_BYTES = 256 << 10  # more than a packet of any MTU
SPEED_S = 0.5
MAX_SPEED_BYTES = 4 << 30
CONNECT_S, ANSWER_S = 2.0, 4.0
END_S = 300  # ends this process in any case
CHUNK = bytes(1 << 18)


def main() -> int:
    signal.alarm(END_S)
    request = json.loads(sys.stdin.readline() or "{}")
    if "token" not in request:
        return 2
    token = bytes.fromhex(request["token"])
    listener = listen(request.get("port") or 0)
    Thread(target=serve, args=(listener, token), daemon=True).start()
    print(json.dumps({"port": listener.getsockname()[1], "addresses": list(own_addresses())}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(measure(request["addresses"], request["port"], token)), flush=True)
    sys.stdout.flush()
    os._exit(0)  # connections that still wait are left behind


def listen(port: int) -> socket.socket:
    """Returns a listener on all interfaces, for IPv4 and where possible IPv6; on a free port where this one is in use."""
    for number in (port, 0):
        with suppress(OSError):
            if socket.has_dualstack_ipv6():
                return socket.create_server(("", number), family=socket.AF_INET6, dualstack_ipv6=True)
            return socket.create_server(("", number))
    raise OSError("no port to listen on")


def own_addresses() -> Iterator[str]:
    """Yields the addresses by which other hosts may reach this one, IPv4 first."""
    nics = psutil.net_if_addrs()
    for family in (socket.AF_INET, socket.AF_INET6):
        for addresses in nics.values():
            for address in addresses:
                local = address.address.startswith(("127.", "::1", "fe80:", "169.254."))
                if address.family == family and not local:
                    yield address.address


def serve(listener: socket.socket, token: bytes) -> None:
    while True:
        with suppress(OSError):
            connection, _ = listener.accept()
            Thread(target=answer, args=(connection, token), daemon=True).start()


def answer(connection: socket.socket, token: bytes) -> None:
    """Answers one connection until it ends; one that does not know the token gets no answer."""
    with suppress(OSError, ConnectionError), connection:
        connection.settimeout(ANSWER_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if receive(connection, len(token)) != token:
            return
        while True:
            kind, size = HEADER.unpack(receive(connection, HEADER.size))
            if kind == ECHO and size <= MAX_ECHO_BYTES:
                connection.sendall(receive(connection, size))
            elif kind == COUNT:
                count(connection, size)
                connection.sendall(REPLY.pack(size))
            else:
                return


def count(connection: socket.socket, size: int) -> None:
    buffer = bytearray(1 << 18)
    while size:
        received = connection.recv_into(buffer, min(size, len(buffer)))
        if not received:
            raise ConnectionError
        size -= received


def receive(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise ConnectionError
        parts += part
    return bytes(parts)


def measure(addresses: Sequence[str], port: int, token: bytes) -> dict[str, Any]:
    """Returns the first address that answers, the round trip in microseconds and the speed in bits per second, or what failed."""
    link: dict[str, Any] = {"address": None, "port": port, "rtt_us": None, "bits_per_s": None, "error": None}
    for address in dict.fromkeys(addresses):
        try:
            with socket.create_connection((address, port), timeout=CONNECT_S) as connection:
                connection.settimeout(ANSWER_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                link |= {"address": address, "error": "token", "local": connection.getsockname()[0]}
                connection.sendall(token)
                link |= {"error": "small", "rtt_us": round_trip_us(connection)}
                link["error"] = "large"
                seconds = send_seconds(connection, LARGE_BYTES)
                size = int(min(MAX_SPEED_BYTES, max(LARGE_BYTES, LARGE_BYTES / seconds * SPEED_S)))
                link |= {"error": None, "bits_per_s": round(8 * size / send_seconds(connection, size))}
                return link
        except OSError as error:
            if link["address"]:
                return link
            link["reason"] = error.strerror or str(error)
    return {**link, "error": "connect", "address": addresses[0] if addresses else None}


def round_trip_us(connection: socket.socket) -> float:
    times = []
    for _ in range(ROUND_TRIPS):
        started = time.perf_counter()
        connection.sendall(HEADER.pack(ECHO, 8) + bytes(8))
        receive(connection, 8)
        times.append(time.perf_counter() - started)
    return round(1e6 * statistics.median(times), 1)


def send_seconds(connection: socket.socket, size: int) -> float:
    """Returns the seconds until the other host has counted this many bytes."""
    started = time.perf_counter()
    connection.sendall(HEADER.pack(COUNT, size))
    for start in range(0, size, len(CHUNK)):
        connection.sendall(memoryview(CHUNK)[: size - start])
    receive(connection, REPLY.size)
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
