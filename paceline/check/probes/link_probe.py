"""
How this host reaches another one: `python -m paceline.check.probes.link_probe`, with JSON lines on stdin and stdout.

The first line in has a token, the port to listen on (None: any), the range for the store, and the interface. It is answered with
the ports and the addresses of this host, first the one that a launch uses. Each later line asks for the clock, or has those of
another host and is answered with what came out. The process ends with its stdin.
"""

import json
import os
import signal
import socket
import statistics
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import Any

from paceline.check.probes.network_probe import LINK_LOCAL, interface_here, link_address, own_addresses
from paceline.errors import PacelineError

HEADER = struct.Struct("!cQ")  # what to do with the bytes that follow: echo them, count them, or send as many
ECHO, COUNT, SEND, REPLY = b"e", b"c", b"s", struct.Struct("!Q")
MAX_ECHO_BYTES = 4096
ROUND_TRIPS = 21
LARGE_BYTES = 256 << 10  # more than a packet of any MTU
SPEED_S = 0.2  # in each direction
MAX_SPEED_BYTES = 4 << 30
CONNECT_S, ANSWER_S = 2.0, 4.0
END_S = 300  # ends this process in any case
CHUNK = bytes(1 << 18)
IP_MTU, IPV6_MTU = 14, 24  # linux/in.h, linux/in6.h: of the path, as far as the kernel knows it


def main() -> int:
    signal.alarm(END_S)
    request = json.loads(sys.stdin.readline() or "{}")
    if "token" not in request:
        return 2
    token = bytes.fromhex(request["token"])
    low, high = request.get("ports") or (0, -1)
    listeners = [listen((request.get("port") or 0, 0)), listen(range(low, high + 1))]
    for listener in listeners:
        if listener is not None:
            Thread(target=serve, args=(listener, token), daemon=True).start()
    port, store_port = (listener and listener.getsockname()[1] for listener in listeners)
    try:
        addresses = list(reachable_addresses(request.get("interface")))
    except PacelineError as error:
        print(json.dumps({"reason": error.message}), flush=True)
        return 1
    print(json.dumps({"port": port, "store_port": store_port, "addresses": addresses}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "clock" in request:
            print(json.dumps({"unix": time.time()}), flush=True)
            continue
        store = {} if low == 0 else try_store(request["addresses"][0], request["store_port"])
        print(json.dumps({**measure(request["addresses"], request["port"], token), **store}), flush=True)
    sys.stdout.flush()
    os._exit(0)  # connections that still wait are left behind


def listen(ports: Iterable[int]) -> socket.socket | None:
    """Returns a listener on all interfaces, for IPv4 and where possible IPv6, on the first of the ports that is free."""
    for number in ports:
        with suppress(OSError):
            if socket.has_dualstack_ipv6():
                return socket.create_server(("", number), family=socket.AF_INET6, dualstack_ipv6=True)
            return socket.create_server(("", number))
    return None


def reachable_addresses(interface: str | None) -> Iterator[str]:
    """Yields the addresses by which other hosts may reach this one, first the link's, then IPv4; of an interface only its own."""
    if interface is not None:
        yield interface_here(interface)[1]
        return
    if address := link_address():
        yield address
    for address in sorted(own_addresses(), key=lambda address: ":" in address):
        if not address.startswith(("127.", "::1", *LINK_LOCAL)):
            yield address


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
            elif kind == SEND and size <= MAX_SPEED_BYTES:
                send_zeros(connection, size)
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
    """Returns the first address that answers, the round trip in microseconds and both speeds in bits per second, or what failed.

    tried: the addresses that did not answer before it. mtu: of the path.
    """
    link: dict[str, Any] = {"address": None, "port": port, "rtt_us": None, "bits_per_s": None, "error": None}
    link |= {"tried": [], "back_bits_per_s": None, "mtu": None}
    for address in dict.fromkeys(addresses):
        try:
            with socket.create_connection((address, port), timeout=CONNECT_S) as connection:
                connection.settimeout(ANSWER_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                link |= {"address": address, "error": "token", "local": connection.getsockname()[0]}
                connection.sendall(token)
                link |= {"error": "small", "rtt_us": round_trip_us(connection)}
                link["error"] = "large"
                link |= {"bits_per_s": measure_speed(partial(send_seconds, connection)), "error": None}
                link |= {"mtu": path_mtu(connection)}
                link |= {"back_bits_per_s": measure_speed(partial(receive_seconds, connection))}
                return link
        except OSError as error:
            if link["address"]:
                return link
            link["tried"].append(address)
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


def measure_speed(seconds_of: Callable[[int], float]) -> int:
    """Returns bits per second of one direction, by as many bytes as take SPEED_S; the first are enough on a slow link."""
    size, seconds = LARGE_BYTES, seconds_of(LARGE_BYTES)
    if seconds < SPEED_S:
        size = int(min(MAX_SPEED_BYTES, LARGE_BYTES / seconds * SPEED_S))
        seconds = seconds_of(size)
    return round(8 * size / seconds)


def send_seconds(connection: socket.socket, size: int) -> float:
    """Returns the seconds until the other host has counted this many bytes."""
    started = time.perf_counter()
    connection.sendall(HEADER.pack(COUNT, size))
    send_zeros(connection, size)
    receive(connection, REPLY.size)
    return time.perf_counter() - started


def receive_seconds(connection: socket.socket, size: int) -> float:
    """Returns the seconds until the other host has sent this many bytes."""
    started = time.perf_counter()
    connection.sendall(HEADER.pack(SEND, size))
    count(connection, size)
    return time.perf_counter() - started


def send_zeros(connection: socket.socket, size: int) -> None:
    for start in range(0, size, len(CHUNK)):
        connection.sendall(memoryview(CHUNK)[: size - start])


def path_mtu(connection: socket.socket) -> int | None:
    with suppress(OSError):
        if connection.family == socket.AF_INET6:
            return connection.getsockopt(socket.IPPROTO_IPV6, IPV6_MTU)
        return connection.getsockopt(socket.IPPROTO_IP, IP_MTU)
    return None


def try_store(address: str, port: int | None) -> dict[str, Any]:
    """Returns whether a port of the range answers, on which the ranks would meet."""
    if port is None:
        return {"store_port": None, "store_error": "none of them is free there"}
    try:
        socket.create_connection((address, port), timeout=CONNECT_S).close()
    except OSError as error:
        return {"store_port": port, "store_error": error.strerror or str(error)}
    return {"store_port": port, "store_error": None}


if __name__ == "__main__":
    sys.exit(main())
