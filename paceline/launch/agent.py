"""
One host's side of the launch: `python -m paceline.launch.agent`, with JSON lines on stdin and stdout.

The first line on stdin is the job; later ones are orders: {"do": "stop", "signal": 2}, {"do": "end"}, "kill", "kill_rank". Stdout
has the engine's lines (launch/elastic.py) and, last, `engine_ended`; on several hosts first `store`, the port where the ranks meet.
When stdin ends, the supervisor or the connection is gone: the workers may save, then everything ends. So it works the same as
a child process and at the far end of ssh. No torch: it must start at once and stay small beside the workers.
"""

import ctypes
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.launch.channel import Lines
from paceline.launch.stacks import recorder_env, remove_pipes
from paceline.rundir import RunDir

PR_SET_PDEATHSIG = 1  # linux/prctl.h
RANK_SCRIPT = Path(__file__).with_name("rank.py")
LINK_LOST_GRACE_S = 17.0  # without a supervisor: enough for a save
ENGINE_MARGIN_S = 3.0  # how much later than its own deadline the engine may end before it is killed
KILL_DEADLINE_S = 10.0
LEFT_RUNNING_S, MAX_COMMAND = 1.0, 120  # what helps a process ends soon behind it; characters
CONNECT_S = 8.0  # four packets of TCP, if the first are lost
SAMPLER_END_S = 2.0  # a sampler in a system call that does not return is left behind
WAKE_UP_S = 0.5  # a signal does not interrupt select: its deadline is noticed this late


def main() -> int:
    """Reads the job from stdin and runs it."""
    commands = Lines(sys.stdin.fileno())
    lines: list[dict[str, Any]] = []
    while not lines and not commands.ended:
        lines = commands.read()
    if not lines:
        return 1  # the supervisor ended before it sent a job
    place = lines[0]["rendezvous"]
    if place and place["index"] and (why := connect_error(place["host"], place["port"])):
        send({"event": "unreachable", "address": place["host"], "port": place["port"], "reason": why})
        return 1
    return Agent(lines[0], commands).run(lines[1:])


class Agent:
    """The engine's parent: it forwards the engine's lines, stops it on request and leaves nothing running."""

    def __init__(self, job: dict[str, Any], commands: Lines):
        self.run_id: str = job["run_id"]
        self.stop_grace_s: float = job["stop_grace_s"]
        self.peer_grace_s: float = job["peer_grace_s"]  # of the peers of a failed rank
        self.index: int = job["rendezvous"]["index"] if job["rendezvous"] else 0
        self.logs_dir = Path(job["logs_dir"])
        self.commands = commands
        self.kill_at = float("inf")
        self.pids: dict[int, int] = {}
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(signum, lambda *_: self.stop(self.stop_grace_s))
        self.engine = start_engine(job)
        self.sampler = start_sampler(job) if job["health_every_s"] else None
        assert self.engine.stdout is not None
        self.reports = Lines(self.engine.stdout.fileno())

    def run(self, lines: list[dict[str, Any]]) -> int:
        """Serves until the engine has ended. lines: those that arrived together with the job."""
        self.obey(lines)
        while not self.reports.ended:
            timeout = max(0.0, min(WAKE_UP_S, self.kill_at - time.monotonic()))
            fds = [self.reports.fd, *([] if self.commands.ended else [self.commands.fd])]
            ready, _, _ = select.select(fds, [], [], timeout)
            if self.reports.fd in ready:
                self.forward()
            if self.commands.fd in ready:
                self.obey(self.commands.read())
                if self.commands.ended:  # there is no supervisor any more
                    self.stop(min(self.stop_grace_s, LINK_LOST_GRACE_S))
            if time.monotonic() >= self.kill_at:
                self.engine.kill()
        exit_code = self.engine.wait()
        if self.sampler is not None:
            self.sampler.kill()  # it has nothing to finish
            with suppress(subprocess.TimeoutExpired):
                self.sampler.wait(SAMPLER_END_S)
        ended_well = exit_code == 0 and self.kill_at == float("inf")  # nobody has failed, and nobody stops it
        left = left_running(self.run_id, index=self.index) if ended_well else []
        survivors = kill_processes(self.run_id, timeout_s=KILL_DEADLINE_S, index=self.index)
        remove_pipes(self.logs_dir)
        send({"event": "engine_ended", "exit_code": exit_code, "survivors": survivors, "left": left})
        return 0

    def forward(self) -> None:
        """Forwards the engine's lines to the supervisor."""
        for line in self.reports.read():
            send(line)
            if line["event"] == "started":
                self.pids = {rank["rank"]: rank["pid"] for rank in line["ranks"]}
            elif line["event"] == "rank_failed":
                self.kill_after(self.peer_grace_s + ENGINE_MARGIN_S)

    def obey(self, lines: list[dict[str, Any]]) -> None:
        """Carries out the orders in these lines."""
        for line in lines:
            if line["do"] == "stop":
                self.stop(self.stop_grace_s, signum=line.get("signal", signal.SIGTERM))
            elif line["do"] == "kill":
                self.kill_after(0.0)
            elif line["do"] == "end":  # a rank of another host has failed
                self.engine.send_signal(signal.SIGUSR2)
                self.kill_after(self.peer_grace_s + ENGINE_MARGIN_S)
            elif line["do"] == "kill_rank":
                pid = self.pids.get(line["rank"])
                # a rank that has ended has none there, and its pid may belong to another process
                if pid in processes_of(self.run_id, index=self.index):
                    self.engine.send_signal(signal.SIGRTMIN)
                    with suppress(OSError):
                        os.killpg(pid, signal.SIGKILL)  # with its data loaders; the engine then ends the other ranks
                else:
                    self.engine.send_signal(signal.SIGUSR2)
                self.kill_after(self.peer_grace_s + ENGINE_MARGIN_S)

    def stop(self, grace_s: float, *, signum: int = signal.SIGTERM) -> None:
        """Stops the engine: its workers get this signal and have grace_s; one that still imports torch just ends."""
        self.engine.send_signal(signum if self.pids else signal.SIGTERM)
        self.kill_after(grace_s + ENGINE_MARGIN_S)

    def kill_after(self, seconds: float) -> None:
        """Kills the engine after this time, unless an earlier deadline is set."""
        self.kill_at = min(self.kill_at, time.monotonic() + seconds)


def start_engine(job: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Starts launch/elastic.py with the workers' environment."""
    logs_dir = Path(job["logs_dir"])
    if job["lock_fd"] is not None:  # where the run was renamed meanwhile, its lock is in the new place
        folder = Path(f"/proc/self/fd/{job['lock_fd']}").resolve().parent
        logs_dir = folder / logs_dir.relative_to(job["run_path"])
        job["run_path"] = str(folder)
    names = ("command", "nproc", "run_id", "stop_grace_s", "peer_grace_s", "libuv", "rendezvous")
    engine_job = {key: job[key] for key in names}
    # the run stays locked until engine and workers have ended too
    fds = () if job["lock_fd"] is None else (job["lock_fd"],)
    if job["rendezvous"] and job["rendezvous"]["index"] == 0:
        listener = listen(job["rendezvous"]["host"], job["rendezvous"]["ports"])
        port, fd = listener.getsockname()[1], listener.detach()
        send({"event": "store", "port": port})
        engine_job["rendezvous"] = {**job["rendezvous"], "port": port, "listen_fd": fd}
        fds = (*fds, fd)
    place = f"-{job['rendezvous']['index']}" if job["rendezvous"] else ""  # hosts may share the folder
    job_json = logs_dir / f"job{place}.json"  # without the environment: it may hold keys, and the folder may be shared
    job_json.write_text(json.dumps({**engine_job, "rank_script": str(RANK_SCRIPT), "agent_pid": os.getpid()}))
    folder_fd = os.open(logs_dir, os.O_RDONLY | os.O_DIRECTORY)  # stays valid where it is renamed later
    options = {"env": job["env"], "cwd": job["cwd"], "stdout": subprocess.PIPE, "pass_fds": (*fds, folder_fd)}
    return start_child("paceline.launch.elastic", f"/proc/self/fd/{folder_fd}/{job_json.name}", **options)


def listen(address: str, ports: Sequence[int] | None) -> socket.socket:
    """Returns a listener on this address alone: the store that it becomes asks nobody who they are. ports: first and last."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    low, high = ports or (0, 0)
    for port in range(low, high + 1):
        try:
            return socket.create_server((address, port), family=family, backlog=1024)
        except OSError as error:
            if port == high:
                text = f"{error.strerror}: the ranks meet at {address}"
                raise OSError(error.errno, f"{text}, on a port of --ports {low}-{high}" if ports else text) from error
    raise AssertionError("no port to try")


def connect_error(address: str, port: int) -> str | None:
    """Returns why the listener of the first host's agent cannot be reached; torch's store would try for a minute."""
    try:
        socket.create_connection((address, port), timeout=CONNECT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def start_sampler(job: dict[str, Any]) -> subprocess.Popen[bytes] | None:
    """Starts launch/health.py; None where it cannot be started, since the training may still begin."""
    arguments = [job["run_path"], str(job["health_every_s"]), job["run_id"], *filter(None, [job["host"]])]
    try:
        return start_child("paceline.launch.health", *arguments, stdout=subprocess.DEVNULL)
    except OSError as error:  # no more processes, or no memory
        print(f"no samples of health: {error}", file=sys.stderr)
        return None


def start_child(module: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """Starts a Python module that is killed as soon as this process has ended. options: of Popen; without stdin it gets none."""
    command = [sys.executable, "-P", "-m", module, *arguments]
    prctl = ctypes.CDLL(None).prctl
    return subprocess.Popen(
        command,
        preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL),  # safe here: no second thread that holds a lock
        **{"stdin": subprocess.DEVNULL, **options},
    )


def send(line: dict[str, Any]) -> None:
    """Sends a line to the supervisor."""
    with suppress(BrokenPipeError):  # the supervisor is gone, which ends stdin too
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


def kill_processes(run_id: str, *, timeout_s: float, index: int) -> list[int]:
    """Kills whatever still runs of this attempt's workers and their children; returns the pids that survive until timeout_s.

    index: of the host, where several may share their process ids, as containers do.
    """
    deadline = time.monotonic() + timeout_s
    while (pids := processes_of(run_id, index=index)) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return pids


def left_running(run_id: str, *, index: int) -> list[str]:
    """Returns the commands of processes that the workers started and that go on without them; most end within LEFT_RUNNING_S."""
    deadline = time.monotonic() + LEFT_RUNNING_S
    while (pids := processes_of(run_id, index=index)) and time.monotonic() < deadline:
        time.sleep(0.05)
    commands = []
    for pid in pids:
        with suppress(OSError):  # it has just ended
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            commands.append(" ".join(shlex.join(filter(None, words)).split())[:MAX_COMMAND])
    return commands


def processes_of(run_id: str, *, index: int) -> list[int]:
    """Returns the pids of the workers and of everything that they started, detached processes included.

    torch puts the attempt's id into their environment, and the host's index. Only this attempt's processes have them, so a reused
    pid is never hit.
    """
    variables = {f"TORCHELASTIC_RUN_ID={run_id}".encode(), f"GROUP_RANK={index}".encode()}
    pids = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # it has just ended, or belongs to another user
                if variables <= set((folder / "environ").read_bytes().split(b"\0")):
                    pids.append(int(folder.name))
    return pids


def prepare_attempt(run: RunDir, attempt: int, job: dict[str, Any]) -> None:
    """Makes the folder of an attempt's logs and completes its job with the paths of this host."""
    logs_dir = run.logs(attempt).resolve()
    logs_dir.mkdir(parents=True, exist_ok=True)
    job |= {"logs_dir": str(logs_dir), "run_path": str(run.path.resolve())}
    job["env"] = {**job["env"], **recorder_env(job["env"], run, logs_dir)}


def start_agent_process(log_path: Path, *, lock_fd: int | None) -> subprocess.Popen[bytes]:
    """Starts an agent, which waits for its job on stdin. Its stderr, and the engine's, go to the log."""
    with log_path.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "paceline.launch.agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            bufsize=0,
            pass_fds=() if lock_fd is None else (lock_fd,),
            start_new_session=True,  # a terminal's Ctrl-C reaches the supervisor alone
        )


if __name__ == "__main__":
    sys.exit(main())
