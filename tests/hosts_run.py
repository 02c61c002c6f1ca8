"""Trainings of several hosts in network namespaces, and what can be done to one of them: for tests and the fault loop."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
from namespaces import Hosts

from paceline.rundir import RunDir, read_json_lines

DEADLINE_S = 120.0
MODEL = (
    "--nproc", "1", "--depth", "2", "--n-embd", "64", "--head-dim", "32", "--sequence-len", "64", "--vocab-size", "512",
    "--total-batch-size", "1536", "--device-batch-size", "4", "--sample-every", "0", "--log-every", "1",
    "--no-check", "--health-every", "0",
)  # fmt: skip


class HostsRun:
    """A training of several hosts in the background, started on h1. shared: they all see the run folder."""

    def __init__(self, hosts: Hosts, name: str, *arguments: str, listed: str = "h1,h2", shared: bool = False):
        runs = hosts.folder / "runs" if shared else hosts.private / "runs"
        self.hosts, self.run = hosts, RunDir((runs if shared else hosts.on("h1", runs)) / name)
        words = ["train", "--hosts", listed, *MODEL, "--runs-dir", str(runs), "--name", name, *arguments]
        self.log = (hosts.folder / f"{name}.out").open("w+")
        command = [sys.executable, "-m", "paceline.cli", *words]
        self.process = hosts.start("h1", *command, stdout=self.log, stderr=self.log)

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
        out = subprocess.run(
            ["ip", "netns", "pids", self.hosts.prefix + host], capture_output=True, text=True, check=True
        )
        found = []
        for pid in out.stdout.split():
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(int(pid))
                if "-D" not in process.cmdline():
                    found.append(process)
        return found

    def process_of(self, host: str, part: str) -> psutil.Process:
        """Returns a process of a host by a part of its command line."""
        return next(p for p in self.processes(host) if any(part in word for word in cmdline(p)))

    def left(self, host: str) -> list[str]:
        """Returns what runs on a host some seconds later."""
        deadline = time.monotonic() + 20
        while (running := self.processes(host)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return [" ".join(cmdline(process)) for process in running]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()


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


# what is done to h2, the cause that the run names, and whether h2 is in the next attempt
FAULTS = {
    "rank killed": (lambda run: run.process_of("h2", "train.worker").kill(), "killed-from-outside", True),
    "agent killed": (lambda run: run.process_of("h2", "launch.agent").kill(), "killed-from-outside", True),
    "remote killed": (lambda run: next(filter(is_remote, run.processes("h2"))).kill(), "link-lost", True),
    "ssh session killed": (lambda run: run.process_of("h2", "sshd").kill(), "link-lost", True),
    "cable out": (lambda run: set_cable(run.hosts, "h2", "down"), "host-lost", False),
    "power cut": (lambda run: (set_cable(run.hosts, "h2", "down"), kill_all(run, "h2")), "host-lost", False),
    "all stopped": (lambda run: kill_all(run, "h2", signal.SIGSTOP), "host-lost", False),
}


def undo(run: HostsRun, host: str) -> None:
    """Undoes what a fault has left: a stopped host, a cable that is out."""
    kill_all(run, host, signal.SIGCONT)
    set_cable(run.hosts, host, "up")
