"""
On PYTHONPATH of a run of the fault loop: what a rank, or torch's agent, does to itself when it comes to the place of a fault.

SOAK_ORDERS is a folder: orders.json has the faults, `armed` the number of the one that may strike now. At its place a rank
writes reached.N, then does what is ordered, or waits for go.N while something is done to it.
"""

import json
import os
import sys
import time
from pathlib import Path

ORDERS = Path(os.environ["SOAK_ORDERS"]) if "SOAK_ORDERS" in os.environ else None
WAIT_S = 60.0
GREED_BYTES = 1500 << 20
SLOW_S, SLOW_MARKS = 0.1, 15


def wait_for(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)


def armed():
    try:
        return int((ORDERS / "armed").read_text())
    except (OSError, ValueError):
        return -1


def reached(number, **fields):
    """False where some attempt has come to it before. Complete or absent, and only once."""
    part = ORDERS / f"part.{os.getpid()}"
    part.write_text(json.dumps({"time": time.time(), "pid": os.getpid(), **fields}))
    try:
        os.link(part, ORDERS / f"reached.{number}")
    except FileExistsError:
        return False
    return True


def matches(order, rank, step, phase):
    return order["rank"] == rank and order["place"] == phase and order["step"] in (None, step)


def strike(order):
    kind = order["kind"]
    if kind == "sigsegv":
        import ctypes

        ctypes.string_at(0)
    elif kind == "exception":
        raise RuntimeError("the fault loop wants this rank to fail")
    elif kind == "exit0":
        os._exit(0)
    elif kind == "memory" and order["variant"]:
        cap_address_space()
    elif kind == "memory":
        grow()


def grow():
    """The kernel looks for the greatest process of the control group; this one says it is."""
    (ORDERS / "greedy").touch()
    Path("/proc/self/oom_score_adj").write_text("1000")
    bytearray(b"x") * GREED_BYTES


def cap_address_space():
    import resource

    import torch

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    torch.empty(GREED_BYTES, dtype=torch.uint8)


def rank_comes(mark):
    """HeartbeatWriter.beat, with the faults of this rank at their places."""
    orders = json.loads((ORDERS / "orders.json").read_text())
    rank = int(os.environ["RANK"])
    mine = {number: order for number, order in enumerate(orders) if order["rank"] == rank}
    slow = 0

    def mark_and_strike(self, step, phase, micro_step=0):
        nonlocal slow
        mark(self, step, phase, micro_step)
        if slow:
            slow -= 1
            time.sleep(SLOW_S)
        for number, order in mine.items():
            if not matches(order, rank, step, phase) or (ORDERS / f"reached.{number}").exists():
                continue
            if order["step"] is not None:
                wait_for(lambda n=number: armed() >= n)
            if armed() != number or not reached(number, step=step):
                continue
            if order["kind"] == "slow":
                slow = SLOW_MARKS
                time.sleep(5 * SLOW_S)
                continue
            if not order["at_once"]:
                wait_for((ORDERS / f"go.{number}").exists)
            strike(order)

    return mark_and_strike


def port_is_taken(store):
    """TCPStore, on a port that another process listens on already."""

    def store_on_taken_port(host, port, *args, **kwargs):
        import socket

        orders, number = json.loads((ORDERS / "orders.json").read_text()), armed()
        if port or not 0 <= number < len(orders) or orders[number]["kind"] != "port" or not reached(number, step=0):
            return store(host, port, *args, **kwargs)
        with socket.socket() as thief:
            thief.bind(("127.0.0.1", 0))
            thief.listen()
            return store(host, thief.getsockname()[1], *args, **kwargs)

    return store_on_taken_port


if ORDERS and "paceline.train.worker" in sys.orig_argv:
    from paceline.heartbeat import HeartbeatWriter

    HeartbeatWriter.beat = rank_comes(HeartbeatWriter.beat)
elif ORDERS and "paceline.launch.elastic" in sys.orig_argv:
    import torch.distributed

    torch.distributed.TCPStore = port_is_taken(torch.distributed.TCPStore)
