"""paceline comm between hosts in namespaces: right results over the chosen interface and ports, a fault with its host."""

import json
import shutil
import sys

import namespaces
import pytest
from namespaces import namespaced_hosts

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(bool(namespaces.WHY_NOT), reason=namespaces.WHY_NOT),
    pytest.mark.skipif(shutil.which("nft") is None, reason="nft is missing"),
]
COMM = ("comm", "--hosts", "h1,h2", "--device", "cpu", "--nproc", "1", "--max-bytes", "65536")
RANGE = "29400-29440"
RULES = (
    "add table inet f; add chain inet f i { type filter hook input priority 0; };"
    "add rule inet f i iifname eth0 tcp dport != 2222 ct state new drop;"
    f"add rule inet f i iifname eth1 tcp dport != {RANGE} ct state new drop"
)


@pytest.fixture
def hosts(tmp_path):
    with namespaced_hosts(2, tmp_path) as hosts:
        first, second = f"{hosts.prefix}h1", f"{hosts.prefix}h2"
        hosts.ip("link", "add", "eth1", "netns", first, "type", "veth", "peer", "name", "eth1", "netns", second)
        for number, name in enumerate((first, second), 1):
            hosts.ip("-n", name, "addr", "add", f"10.88.0.{number}/24", "dev", "eth1")
            hosts.ip("-n", name, "link", "set", "eth1", "up")
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


def test_a_rank_that_is_stopped_is_reported_with_its_host(hosts):
    script = (
        "import glob, os, signal, subprocess, sys, time\n"
        "command = subprocess.Popen(sys.argv[1:])\n"
        "while command.poll() is None:\n"
        "    pids = subprocess.run(['pgrep', '-f', 'paceline.comm.rank_process'], capture_output=True, text=True).stdout.split()\n"
        "    for pid in pids:\n"
        "        words = open(f'/proc/{pid}/environ').read().split(chr(0))\n"
        "        if 'RANK=1' in words and glob.glob('cache/comm/*/progress/1'):\n"
        "            os.kill(int(pid), signal.SIGSTOP)\n"
        "    time.sleep(0.2)\n"
        "sys.exit(command.returncode)\n"
    )
    command = [
        sys.executable,
        "-m",
        "paceline.cli",
        *COMM,
        "--deadline",
        "5",
        "--cache-dir",
        str(hosts.folder / "cache"),
    ]
    answer = hosts.run("h1", sys.executable, "-c", script, *command, timeout_s=400)
    assert answer.returncode == 3
    assert "rank 1" in answer.stderr and "(on h2)" in answer.stderr
