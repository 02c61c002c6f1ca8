"""
One host's end of the launch: `python -m paceline.launch.agent`, JSON lines in on stdin and out on stdout.

The first line in is the job; later ones are {"do": "stop"}, {"do": "kill"} and {"do": "kill_rank"}. Lines out are the engine's
(train/elastic.py) and, last, `engine_ended`. When stdin ends the supervisor or the connection is gone: the workers may
save, then everything ends. So it works alike as a child process and at the far end of ssh. No torch here: it must be
up at once and stay small beside the workers.
"""

import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.launch.recorder import remove_pipes
from paceline.launch.sampler import end_sampler, start_sampler

PR_SET_PDEATHSIG = 1  # linux/prctl.h
RANK_SCRIPT = Path(__file__).with_name("rank.py")
LINK_LOST_GRACE_S = 20.0  # nobody watches any more: time for a save, not for more
ENGINE_MARGIN_S = 3.0  # how much later than its own deadline the engine may end before it is killed
FAILED_GRACE_S = 3.0  # the engine gives the peers of a failed rank this long
KILL_DEADLINE_S = 10.0
WAKE_UP_S = 0.5  # a signal does not interrupt select: deadlines it sets are seen this late


def main() -> int:
    commands = Lines(sys.stdin.fileno())
    lines = commands.read()
    while not lines and not commands.ended:
        lines = commands.read()
    if not lines:
        return 1  # the supervisor ended before it gave a job
    return Agent(lines[0], commands).run(lines[1:])


class Lines:
    """JSON lines from a pipe, as far as they have come; never waits for the rest of one."""

    def __init__(self, fd: int):
        self.fd = fd
        self.ended = False
        self._part = b""

    def read(self) -> list[dict[str, Any]]:
        chunk = os.read(self.fd, 1 << 16)
        self.ended = not chunk
        *whole, self._part = (self._part + chunk).split(b"\n")
        return [json.loads(line) for line in whole if line.startswith(b"{")]  # torch may print to stdout as well


class Agent:
    """The engine's parent: passes its lines on, stops it when asked, and leaves nothing running."""

    def __init__(self, job: dict[str, Any], commands: Lines):
        self.run_id: str = job["run_id"]
        self.stop_grace_s: float = job["stop_grace_s"]
        self.logs_dir = Path(job["logs_dir"])
        self.commands = commands
        self.kill_at = float("inf")
        self.pids: dict[int, int] = {}
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(signum, lambda *_: self.stop(self.stop_grace_s))
        self.engine = start_engine(job)
        self.sampler = start_sampler(job["run_path"], every_s=job["health_every_s"], run_id=self.run_id)
        assert self.engine.stdout is not None
        self.reports = Lines(self.engine.stdout.fileno())

    def run(self, lines: list[dict[str, Any]]) -> int:
        with selectors.DefaultSelector() as selector:
            selector.register(self.reports.fd, selectors.EVENT_READ, self.pass_on)
            selector.register(self.commands.fd, selectors.EVENT_READ, self.follow)
            self.obey(lines)
            while not self.reports.ended:
                timeout = max(0.0, min(WAKE_UP_S, self.kill_at - time.monotonic()))
                for key, _ in selector.select(timeout):
                    key.data()
                if self.commands.ended and self.commands.fd in selector.get_map():
                    selector.unregister(self.commands.fd)
                if time.monotonic() >= self.kill_at:
                    self.engine.kill()
        exit_code = self.engine.wait()
        end_sampler(self.sampler)
        left = kill_processes(self.run_id, timeout_s=KILL_DEADLINE_S)
        remove_pipes(self.logs_dir)
        send({"event": "engine_ended", "exit_code": exit_code, "left": left})
        return 0

    def pass_on(self) -> None:
        for line in self.reports.read():
            send(line)
            if line["event"] == "started":
                self.pids = {each["rank"]: each["pid"] for each in line["ranks"]}
            elif line["event"] == "rank_failed":
                self.kill_after(FAILED_GRACE_S + ENGINE_MARGIN_S)

    def follow(self) -> None:
        self.obey(self.commands.read())
        if self.commands.ended:
            self.stop(min(self.stop_grace_s, LINK_LOST_GRACE_S))

    def obey(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            if line["do"] == "stop":
                self.stop(self.stop_grace_s)
            elif line["do"] == "kill":
                self.kill_after(0.0)
            elif line["do"] == "kill_rank":
                self.kill_rank(line["rank"])

    def stop(self, grace_s: float) -> None:
        """The engine tells its workers, and gives them stop_grace_s; one still importing torch just ends."""
        self.engine.send_signal(signal.SIGTERM)
        self.kill_after(grace_s + ENGINE_MARGIN_S)

    def kill_rank(self, rank: int) -> None:
        """One that hangs, with its data loaders; the engine sees it end and ends the others."""
        pid = self.pids.get(rank)
        if pid in processes_of(self.run_id):  # else it has ended, and its number may be another's by now
            with suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
        self.kill_after(FAILED_GRACE_S + ENGINE_MARGIN_S)

    def kill_after(self, seconds: float) -> None:
        self.kill_at = min(self.kill_at, time.monotonic() + seconds)


def start_engine(job: dict[str, Any]) -> subprocess.Popen[bytes]:
    logs_dir = Path(job["logs_dir"])
    logs_dir.mkdir(parents=True, exist_ok=True)
    engine_job = {key: job[key] for key in ("command", "nproc", "logs_dir", "run_id", "stop_grace_s", "libuv")}
    job_json = logs_dir / "job.json"  # without the environment: it may hold keys, and the folder may be shared
    job_json.write_text(json.dumps({**engine_job, "rank_script": str(RANK_SCRIPT), "agent_pid": os.getpid()}))
    prctl = ctypes.CDLL(None).prctl
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "paceline.train.elastic", str(job_json)],
        env=job["env"],
        cwd=job["cwd"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        # the run stays locked until the engine is gone too, and with it, by PDEATHSIG, its workers
        pass_fds=() if job["lock_fd"] is None else (job["lock_fd"],),
        preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL),  # safe here: no second thread that holds a lock
    )


def send(line: dict[str, Any]) -> None:
    with suppress(BrokenPipeError):  # the supervisor is gone; its end of stdin says so too
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


def kill_processes(run_id: str, *, timeout_s: float) -> list[int]:
    """SIGKILL to whatever still runs under the workers of this attempt; returns those that would not end."""
    deadline = time.monotonic() + timeout_s
    while (pids := processes_of(run_id)) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return pids


def processes_of(run_id: str) -> list[int]:
    """Workers and all they started, detached ones included: torch puts the attempt's id into their environment.

    Only what carries that id was started by this attempt, so a pid that the system has given away again is never hit.
    """
    mark = f"TORCHELASTIC_RUN_ID={run_id}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # it has just ended, or belongs to another user
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


if __name__ == "__main__":
    sys.exit(main())
