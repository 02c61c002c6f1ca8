"""What a run of several hosts does when one of them is lost, and when it comes back: real ssh servers in network namespaces."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import namespaces
import psutil
import pytest
from namespaces import Hosts, namespaced_hosts

from paceline.rundir import RunDir, read_json_lines
from paceline.units import parse_time

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(bool(namespaces.WHY_NOT), reason=namespaces.WHY_NOT),
]
DEADLINE_S = 120.0
MODEL = (
    "--nproc", "1", "--depth", "2", "--n-embd", "64", "--head-dim", "32", "--sequence-len", "64", "--vocab-size", "512",
    "--total-batch-size", "1536", "--device-batch-size", "4", "--eval-every", "0", "--sample-every", "0", "--log-every", "1",
    "--no-check", "--health-every", "0",
)  # fmt: skip


class HostsRun:
    """A training of several hosts in the background, started on h1."""

    def __init__(self, hosts: Hosts, name: str, *arguments: str, listed: str):
        self.hosts, self.run = hosts, RunDir(hosts.folder / "runs" / name)
        words = ["train", "--hosts", listed, *MODEL, "--runs-dir", "runs", "--name", name, *arguments]
        env = {**os.environ, "PATH": f"{hosts.folder / 'bin'}:{os.environ['PATH']}", "COLUMNS": "200"}
        command = hosts.command("h1", ["taskset", "-c", "0", sys.executable, "-m", "paceline.cli", *words])
        self.log = (hosts.folder / f"{name}.out").open("w+")
        self.process = subprocess.Popen(command, cwd=hosts.folder, env=env, stdout=self.log, stderr=self.log)

    @property
    def output(self) -> str:
        return Path(self.log.name).read_text()

    def events(self, kind: str) -> list[dict]:
        return [event for event in read_json_lines(self.run.events) if event["event"] == kind]

    def step(self) -> int:
        return max((line["step"] for line in read_json_lines(self.run.metrics)), default=-1)

    def wait_for(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.05)

    def end(self) -> str:
        self.process.wait(DEADLINE_S)
        assert self.process.returncode == 0, self.output
        return self.output

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


@pytest.fixture(scope="module")
def hosts(tmp_path_factory) -> Iterator[Hosts]:
    with namespaced_hosts(3, tmp_path_factory.mktemp("loss")) as hosts:
        yield hosts


@pytest.fixture
def start(hosts, request) -> Iterator[Callable[..., HostsRun]]:
    started: list[HostsRun] = []

    def start(*arguments: str, listed: str = "h1,h2") -> HostsRun:
        started.append(HostsRun(hosts, request.node.name.split("[")[0][:40], *arguments, listed=listed))
        return started[-1]

    yield start
    for run in started:
        run.close()
    set_cable(hosts, "h2", "up")


def set_cable(hosts: Hosts, host: str, state: str) -> None:
    hosts.ip("-n", hosts.prefix + host, "link", "set", "eth0", state)


def kill_all(run: HostsRun, host: str, signum: signal.Signals = signal.SIGKILL) -> None:
    for process in run.processes(host):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signum)


def noticed_s(run: HostsRun, since: float) -> float:
    """Returns how long after a moment the first failure was written down."""
    return parse_time(run.events("rank_failed")[0]["time"]) - since
