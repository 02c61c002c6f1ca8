"""paceline comm between hosts in namespaces: right results over the chosen interface and ports, a fault with its host."""

import json
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import namespaces
import psutil
import pytest
from namespaces import add_cable, namespaced_hosts

from paceline.heartbeat import read_heartbeat

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(bool(namespaces.WHY_NOT), reason=namespaces.WHY_NOT),
    pytest.mark.skipif(shutil.which("nft") is None, reason="nft is missing"),
]
COMM = ("comm", "--hosts", "h1,h2", "--device", "cpu", "--nproc", "1", "--max-bytes", "1048576")
RANGE = "29400-29440"
RULES = (
    "add table inet f; add chain inet f i { type filter hook input priority 0; };"
    "add rule inet f i iifname eth0 tcp dport != 2222 ct state new drop;"
    f"add rule inet f i iifname eth1 tcp dport != {RANGE} ct state new drop"
)


@pytest.fixture
def hosts(tmp_path):
    with namespaced_hosts(2, tmp_path) as hosts:
        add_cable(hosts)
        yield hosts


def comm(hosts, *options):
    return hosts.run("h1", sys.executable, "-m", "paceline.cli", *COMM, *options, timeout_s=400)


def test_collectives_cross_a_firewall_by_the_chosen_interface_and_range_and_plans_use_the_figures(hosts):
    for name in ("h1", "h2"):
        assert hosts.run(name, "nft", RULES).returncode == 0
        assert (
            hosts.run(name, "sysctl", "-w", f"net.ipv4.ip_local_port_range={RANGE.replace('-', ' ')}").returncode == 0
        )
    options = ("--interface", "eth1", "--ports", RANGE, "--cache-dir", str(hosts.folder / "cache"))
    answer = comm(hosts, *options, "--json")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    results = json.loads(answer.stdout)
    assert results["right"] and results["hosts"] == {"h1": [0], "h2": [1]}
    assert [pair["link"]["name"] for pair in results["pairs"]] == ["h1 to h2"]
    planned = hosts.paceline("h1", "plan", *COMM[1:5], "--nproc", "1", *options, "--json")
    assert "measured by paceline comm" in json.loads(planned.stdout)["cost"]["hosts"]["source"]


def stop_rank(folder: Path, rank: int) -> None:
    """Stops this rank of the folder's ranks, on whichever host, once it is past init_process_group."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                words = process.cmdline()
                started = any(
                    (beat := read_heartbeat(path)) and beat.step > 1
                    for path in folder.glob(f"cache/comm/*/progress/{rank}")
                )
                is_rank = "paceline.comm.rank_process" in words and any(str(folder) in word for word in words)
                if started and is_rank and process.environ().get("RANK") == str(rank):
                    process.send_signal(signal.SIGSTOP)
                    return
        time.sleep(0.05)


def test_a_rank_that_is_stopped_is_reported_with_its_host(hosts):
    thread = threading.Thread(target=stop_rank, args=(hosts.folder, 1))
    thread.start()
    answer = comm(hosts, "--deadline", "5", "--cache-dir", str(hosts.folder / "cache"))
    thread.join()
    assert answer.returncode == 3, answer.stdout + answer.stderr
    assert "rank 1 on h2 is stopped" in answer.stderr
