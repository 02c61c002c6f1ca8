"""Trainings of several hosts in network namespaces, and what can be done to one of them: for tests and the fault loop."""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from namespaces import PORT, Hosts

from paceline.model.manifest import newest_good, read_manifest
from paceline.rundir import RunDir, read_json_lines

DEADLINE_S = 120.0
MODEL = (
    "--nproc", "1", "--depth", "2", "--n-embd", "64", "--head-dim", "32", "--sequence-len", "64", "--vocab-size", "512",
    "--total-batch-size", "1536", "--device-batch-size", "4", "--sample-every", "0", "--log-every", "1",
)  # fmt: skip
LAUNCH = ("--no-check", "--health-every", "0")
FILLER = "filler"


class HostsRun:
    """A training of several hosts in the background, started on h1. shared: they all see the run folder."""

    def __init__(self, hosts: Hosts, name: str, *arguments: str, listed: str = "h1,h2", shared: bool = False):
        runs = hosts.folder / "runs" if shared else hosts.private / "runs"
        self.hosts, self.name, self.run = hosts, name, RunDir((runs if shared else hosts.on("h1", runs)) / name)
        self.path = runs / name  # as h1 sees it
        self.log = (hosts.folder / f"{name}.out").open("w+")
        self.start("h1", "train", "--hosts", listed, *MODEL, "--runs-dir", str(runs), "--name", name, *arguments)

    def start(self, host: str, *words: str) -> None:
        command = [sys.executable, "-m", "paceline.cli", *words, *LAUNCH]
        self.process = self.hosts.start(host, *command, stdout=self.log, stderr=self.log)

    def resume(self, host: str, path: Path, *arguments: str, listed: str = "h1,h2") -> None:
        """Continues it by hand, on a host that has its run folder or a copy."""
        self.start(host, "resume", str(path), "--hosts", listed, *arguments)

    @property
    def copy(self) -> Path:
        """The copy on h2."""
        return next((self.hosts.folder / "h2" / "cache" / "paceline" / "runs").glob(f"*/{self.name}"))

    @property
    def output(self) -> str:
        return Path(self.log.name).read_text()

    def events(self, kind: str) -> list[dict]:
        return [event for event in read_json_lines(self.run.events) if event["event"] == kind]

    def lines(self) -> list[dict]:
        return list(read_json_lines(self.run.metrics))

    def step(self) -> int:
        return max((line["step"] for line in self.lines()), default=-1)

    def wait_for(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.05)

    def end(self) -> str:
        self.process.wait(3 * DEADLINE_S)
        assert self.process.returncode == 0, self.output
        return self.output

    def stop(self) -> None:
        """Ends the run as Ctrl-C does."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait(DEADLINE_S)
        assert self.process.returncode == 130, self.output

    def processes(self, host: str) -> list[psutil.Process]:
        """Returns what runs on a host, but for its ssh server."""
        return [process for process in all_processes(self.hosts, host) if "-D" not in cmdline(process)]

    def process_of(self, host: str, part: str) -> psutil.Process:
        """Returns a process of a host by a part of its command line."""
        return next(p for p in self.processes(host) if any(part in word for word in cmdline(p)))

    def left(self, host: str, *, timeout_s: float = 20.0) -> list[str]:
        """Returns what runs on a host some seconds later, but for sessions of its ssh server: TCP keeps those of a lost peer."""
        deadline = time.monotonic() + timeout_s
        while True:
            lines = [" ".join(cmdline(process)) for process in self.processes(host)]
            running = [line for line in lines if not line.startswith("sshd: ")]
            if not running or time.monotonic() > deadline:
                return running
            time.sleep(0.1)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()


def last_files(run: RunDir) -> dict[str, str]:
    """Returns the hash of every file of the newest checkpoint."""
    path, _ = newest_good(run.checkpoints, set_aside=False)
    return {name: entry.sha256 for name, entry in read_manifest(path).files.items()}


def all_processes(hosts: Hosts, host: str) -> list[psutil.Process]:
    command = ["ip", "netns", "pids", hosts.prefix + host]
    processes = []
    for pid in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split():
        with suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(int(pid)))
    return processes


def cmdline(process: psutil.Process) -> list[str]:
    with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return process.cmdline()
    return []


def set_cable(hosts: Hosts, host: str, state: str) -> None:
    hosts.ip("-n", hosts.prefix + host, "link", "set", "eth0", state)


def kill_all(run: HostsRun, host: str, signum: signal.Signals = signal.SIGKILL) -> None:
    for process in run.processes(host):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signum)


def is_remote(process: psutil.Process) -> bool:
    return any("stdin.buffer.readline" in word for word in cmdline(process))


def in_network(hosts: Hosts, name: str, *words: str) -> int:
    """Runs a command in the network of a host, or of the hub between them; returns its exit code."""
    return subprocess.run(
        ["ip", "netns", "exec", hosts.prefix + name, *words], capture_output=True, check=False
    ).returncode


def cable_ends(hosts: Hosts) -> Iterator[tuple[str, str]]:
    """Yields both ends of h2's cable: what leaves the one arrives at the other."""
    yield from (("h2", "eth0"), ("hub", f"v{hosts.names.index('h2') + 1}"))


def shape_cable(hosts: Hosts, *words: str) -> bool:
    """Gives h2's cable a queue in both directions; returns whether this kernel has that kind."""
    return not any(
        in_network(hosts, name, "tc", "qdisc", "replace", "dev", device, "root", *words)
        for name, device in cable_ends(hosts)
    )


def filter_packets(hosts: Hosts, *rules: str) -> None:
    """Applies rules of nft to what arrives at h2 and, from h2, at h1."""
    for name, source in (("h2", ""), ("h1", f"ip saddr 10.77.0.{hosts.names.index('h2') + 1} ")):
        chain = "add chain inet fault arriving { type filter hook input priority 0; }"
        adding = [f"add rule inet fault arriving iifname eth0 {source}{rule}" for rule in rules]
        text = "; ".join(["add table inet fault", chain, *adding])
        assert in_network(hosts, name, "nft", text) == 0, text


def slow_down(run: HostsRun) -> None:
    assert shape_cable(run.hosts, "tbf", "rate", "1mbit", "burst", "32kb", "latency", "400ms")


def lose_packets(run: HostsRun) -> None:
    if not shape_cable(run.hosts, "netem", "loss", "5%"):
        filter_packets(run.hosts, "numgen random mod 100 < 5 drop")


def has_netem(hosts: Hosts) -> bool:
    """Whether this kernel can lose packets in a queue; else nft drops them."""
    try:
        return shape_cable(hosts, "netem", "loss", "5%")
    finally:
        clear_cable(hosts)


def close_ports(run: HostsRun) -> None:
    """Closes all ports but ssh's, for open connections too."""
    ssh = (f"tcp dport {PORT} accept", f"tcp sport {PORT} accept")  # as one rule with != nft compares both at once
    filter_packets(run.hosts, *ssh, "meta l4proto tcp drop")


def clear_cable(hosts: Hosts) -> None:
    for name, device in cable_ends(hosts):
        in_network(hosts, name, "tc", "qdisc", "del", "dev", device, "root")
    for name in ("h1", "h2"):
        in_network(hosts, name, "nft", "flush ruleset")
        set_cable(hosts, name, "up")


def small_disk(hosts_folder: Path, host: str) -> Path:
    return hosts_folder / host / "cache"


def fill_disk(run: HostsRun) -> None:
    """Fills the disk of h2's cache, until free_disk."""
    disk = small_disk(run.hosts.folder, "h2")
    with suppress(OSError), (disk / FILLER).open("wb", buffering=0) as filler:  # the run may write meanwhile
        while filler.write(bytes(min(1 << 20, max(1, shutil.disk_usage(disk).free)))):
            pass


def free_disk(run: HostsRun) -> None:
    (small_disk(run.hosts.folder, "h2") / FILLER).unlink(missing_ok=True)


@dataclass(frozen=True)
class HostFault:
    """What is done to a run, and what is right after it."""

    what: str
    inject: Callable[[HostsRun], object]
    causes: tuple[str | None, ...]  # that the run may name; None: the attempt goes on
    # then: none: no attempt ends; retry: another one on the same hosts; alone: on h1; join: h2 takes part again; here: the command
    # has ended, and the run is resumed on h1; copy: from the copy on h2
    then: Literal["none", "retry", "alone", "join", "here", "copy"]
    host: str | None = "h2"
    ranks: tuple[int | None, ...] = (None,)  # one of them is named with the cause
    report: str = ""  # what the output must have, as a regular expression
    noticed_s: float = 8.0  # at most
    for_s: float | None = None  # it is undone after this; None: at the end
    until: Callable[[HostsRun], object] | None = None  # or when this has happened
    num_steps: int = 40
    keys: tuple[str, ...] = ("--no-rejoin",)
    torchrun: tuple[str, str] = ("-", "-")  # when it notices, and its next step


def has_failed(run: HostsRun) -> bool:
    return bool(run.events("save_failed") or run.events("verdict"))


NO_REJOIN = ("--no-rejoin",)
ORPHANS_S = 36.0  # without a supervisor: 9 s of silence, then 20 until the ranks are killed
KILLED = ("killed-from-outside",)
FAULTS = {
    "rank": HostFault(
        "a rank killed", lambda run: run.process_of("h2", "train.worker").kill(), KILLED, "retry", ranks=(1,),
        torchrun=("0.1 to 0.2", "5.0 to 7.2, or never"),
    ),
    "agent": HostFault(
        "an agent killed", lambda run: run.process_of("h2", "launch.agent").kill(), KILLED, "retry",
        torchrun=("not in 100 s", "never"),
    ),
    "remote": HostFault(
        "the far end of a link killed", lambda run: next(filter(is_remote, run.processes("h2"))).kill(), ("link-lost",), "retry",
    ),
    "sshd": HostFault(
        "an sshd session killed", lambda run: run.process_of("h2", "sshd").kill(), ("link-lost",), "retry",
    ),
    "flap": HostFault(
        "a host's network down for 3 s", lambda run: set_cable(run.hosts, "h2", "down"), (None,), "none", for_s=3.0,
        torchrun=("down for 5 s: goes on", "after 6.5"),
    ),
    "cable": HostFault(
        "a host's network down", lambda run: set_cable(run.hosts, "h2", "down"), ("host-lost",), "alone",
        torchrun=("20.2, its timeout", "54.8 on one host"),
    ),
    "power": HostFault(
        "power loss: network down, then all killed",
        lambda run: (set_cable(run.hosts, "h2", "down"), kill_all(run, "h2")), ("host-lost",), "alone",
        torchrun=("-", "42.2 on one host"),
    ),
    "stopped": HostFault(
        "SIGSTOP of everything on a host", lambda run: kill_all(run, "h2", signal.SIGSTOP), ("host-lost",), "alone", noticed_s=10.0,
        torchrun=("a rank alone: 20.2, its timeout", "54.9"),
    ),
    "slow": HostFault(
        "a link at 1 Mbit/s for 20 s", slow_down, (None,), "none", for_s=20.0, torchrun=("at 20 Mbit/s: goes on", "-"),
    ),
    "loss": HostFault(
        "5 % of packets lost", lose_packets, (None,), "none", torchrun=("goes on", "-"),
    ),
    "mtu": HostFault(
        "an MTU black hole: packets over 1,200 bytes lost", lambda run: filter_packets(run.hosts, "meta length > 1200 drop"),
        ("hosts-path-mtu",), "alone", report="eth0 mtu 1200, on both", torchrun=("hangs to its timeout", "never"),
    ),
    "ports": HostFault(
        "all ports but ssh's firewalled", close_ports, ("hosts-unconnected",), "alone", report="ufw allow", noticed_s=60.0,
        keys=(*NO_REJOIN, "--hang-after", "4"), torchrun=("17.3 and 42.6, its timeouts", "never"),
    ),
    "disk": HostFault(
        "one host's disk full for a while", fill_disk, (None, "disk-full"), "retry",
        report=r"on h2, whose disk is full|disk of h2 is full|h2: .*No space left", until=has_failed, noticed_s=15.0,
        ranks=(None, 1),
    ),
    "folder": HostFault(
        "the head's run folder lost", lambda run: subprocess.run(["rm", "-rf", run.run.path], check=False), ("supervisor-lost",),
        "copy", host="h1", report=r"is gone[^\n]*\n +fix: on h2: paceline resume ", noticed_s=ORPHANS_S,
    ),
    "supervisor": HostFault(
        "the supervisor killed", lambda run: run.process.kill(), ("supervisor-lost",), "here", host="h1", noticed_s=ORPHANS_S,
        torchrun=("its store lost: the job ends, 1.6", "never"),
    ),
    "head": HostFault(
        "the supervisor's machine lost", lambda run: (set_cable(run.hosts, "h1", "down"), kill_all(run, "h1")),
        ("supervisor-lost",), "copy", host="h1", noticed_s=ORPHANS_S, torchrun=("its store lost: the job ends, 1.6", "never"),
    ),
    "back": HostFault(
        "a host lost, and back again", lambda run: set_cable(run.hosts, "h2", "down"), ("host-lost",), "join",
        until=lambda run: len(run.events("attempt")) > 1, num_steps=3000, keys=(),
        torchrun=("back again: both hosts end", "never"),
    ),
}  # fmt: skip


def undo(run: HostsRun) -> None:
    """Undoes what a fault has left: a stopped host, a cable that is out or bad, a full disk."""
    kill_all(run, "h2", signal.SIGCONT)
    clear_cable(run.hosts)
    free_disk(run)
