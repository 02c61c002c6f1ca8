"""Real launches for the tests here: a supervisor process of its own around a script given as text."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import psutil
import pytest

from paceline.rundir import RunDir, read_json_lines

DRIVE = Path(__file__).with_name("drive.py")
DEADLINE_S = 120.0  # against hanging; a busy machine must not fail a test


class Launch:
    def __init__(self, run: RunDir, command: list[str]):
        self.run = run
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.tree: list[psutil.Process] = []

    def wait_until_running(self) -> "Launch":
        """Waits until every rank has written 'ready'; remembers every process of the launch."""
        self.wait_for(lambda: "attempt" in self.events())
        nproc = self.event("attempt")["nproc"]
        self.wait_for(lambda: all("ready" in self.log(rank) for rank in range(nproc)))
        self.tree = psutil.Process(self.process.pid).children(recursive=True)
        return self

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = DEADLINE_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline, "the launch did not come this far"
            time.sleep(0.02)

    def events(self) -> list[str]:
        return [event["event"] for event in read_json_lines(self.run.events)]

    def event(self, name: str) -> dict:
        return next(event for event in read_json_lines(self.run.events) if event["event"] == name)

    def log(self, rank: int) -> str:
        path = self.run.rank_log(1, rank)
        return path.read_text() if path.exists() else ""

    def pid_of(self, part: str) -> int:
        """Returns the pid of the process whose command line has `part`: paceline.launch.agent, paceline.launch.elastic."""
        return next(process.pid for process in self.tree if part in process.cmdline())

    def worker_pid(self, rank: int) -> int:
        return int((self.run.logs(1) / f"{rank}.pid").read_text())

    def signal(self, signum: signal.Signals) -> None:
        self.process.send_signal(signum)

    def end(self, timeout_s: float = DEADLINE_S) -> "Launch":
        self.output = self.process.communicate(timeout=timeout_s)[0]
        self.exit_code = self.process.returncode
        return self

    @property
    def outcome(self) -> dict:
        return json.loads(self.output.splitlines()[-1])

    def left(self, timeout_s: float = DEADLINE_S) -> list[str]:
        """Returns the remembered processes that still run after timeout_s; it waits only while there are any."""
        deadline = time.monotonic() + timeout_s
        while (alive := [process for process in self.tree if runs(process)]) and time.monotonic() < deadline:
            time.sleep(0.02)
        return [" ".join(process.cmdline()) for process in alive]


def runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def launches() -> Iterator[list[Launch]]:
    """The launches of a test, which end with it."""
    started: list[Launch] = []
    yield started
    for launch in started:
        launch.process.kill()
        launch.process.wait()
        for process in launch.tree:
            if runs(process):
                process.kill()


@pytest.fixture
def launch(tmp_path: Path, launches: list[Launch]) -> Callable[..., Launch]:
    def start(
        script: str, *, nproc: int = 2, stop_grace_s: float = 10.0, name: str = "run", prefix: tuple[str, ...] = ()
    ) -> Launch:
        path = tmp_path / f"{name}.py"
        path.write_text(dedent(script))
        command = [*prefix, sys.executable, str(DRIVE), str(tmp_path / name), str(nproc), str(stop_grace_s), str(path)]
        launches.append(Launch(RunDir(tmp_path / name), command))
        return launches[-1]

    return start
