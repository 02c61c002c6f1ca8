"""
The engine of one host: PyTorch's own elastic agent around the workers, `python -m paceline.launch.elastic JOB.json`.

launch/agent.py starts it and reads the JSON lines that it prints: `started` with every pid, `rank_failed` as soon as a rank fails,
`rank_ended` when one exits with 0 before the others, `ended` with every exit code and whether any rank joined a process group. It
never restarts a rank: a restart would reuse the store of the attempt before, and the supervisor decides about attempts. The
differences to torchrun:

- the peers of a failed rank have `peer_grace_s` after SIGTERM: 30 s in a script, as with torchrun, and 3 s in the trainer;
- SIGTERM, or SIGINT for the Ctrl-C of a script, goes to every worker, which saves and exits at its own pace, up to `stop_grace_s`;
- the rendezvous on one host needs no host name and no port chosen in advance;
- it works with a torch that was built without libuv.
"""

import gc
import importlib
import json
import logging
import math
import os
import re
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any


class Postponed(ModuleType):
    """Stands for a module until something asks for an attribute of it."""

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), attribute)


gc.disable()  # while torch is imported: collections would add a sixth to its time
# a third of the import's time is for tensors without values and for exports: this process has neither
if __name__ == "__main__":
    for name in ("torch._meta_registrations", "torch.export"):
        sys.modules[name] = Postponed(name)

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

gc.freeze()  # what torch made stays to the end: no later collection needs to visit it
gc.enable()

MONITOR_INTERVAL_S = 0.1
KILL_S = 3  # for the processes to be gone
LOOPBACK = "127.0.0.1"
STORE_TIMEOUT_S = 60
SHELL = re.compile(r"(a|ba|da|fi|k|mk|z)?sh(93)?\b|busybox\b")


def main(job_path: str) -> int:
    """Runs the workers of a job until they have ended."""
    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    if os.getppid() != job["agent_pid"]:
        return 1  # the agent ended before PDEATHSIG took effect

    # torch puts the host's full name into each of its own events: 6 lookups for 2 workers, seconds each on slow DNS
    socket.getfqdn = lambda name="": name or socket.gethostname()

    logs_dir = Path(job_path).parent.resolve()  # its place now, after the seconds in which torch was imported
    if "PACELINE_RUN" in os.environ:
        os.environ["PACELINE_RUN"] = str(logs_dir.parents[1])
    spec = WorkerSpec(
        role="worker",
        local_world_size=job["nproc"],
        rdzv_handler=(
            HostsRendezvous(job["run_id"], libuv=job["libuv"], **job["rendezvous"])
            if job["rendezvous"]
            else OneHostRendezvous(job["run_id"], libuv=job["libuv"])
        ),
        entrypoint=sys.executable,
        # rank.py needs the standard library alone: -I and -S save 15 ms of each start
        args=("-I", "-S", job["rank_script"], str(os.getpid()), str(logs_dir), *job["command"]),
        max_restarts=0,
        monitor_interval=MONITOR_INTERVAL_S,
    )
    graces = {name: job[name] for name in ("stop_grace_s", "peer_grace_s")}
    engine = Engine(spec, logs_specs=RankLogs(str(logs_dir)), **graces)
    engine.run()
    report("ended", ranks=engine.ranks(), joined=engine.joined)
    return 0


def report(event: str, **fields: Any) -> None:
    """Prints a line for the agent."""
    print(json.dumps({"event": event, **fields}), flush=True)


class Engine(LocalElasticAgent):
    """torch's agent with reports on stdout, and a grace for the peers of a failed rank and at a stop."""

    def __init__(self, spec: WorkerSpec, *, logs_specs: LogsSpecs, stop_grace_s: float, peer_grace_s: float):
        super().__init__(spec, logs_specs)
        self._stop_grace_s, self._peer_grace_s = stop_grace_s, peer_grace_s
        self._stop_signal: signal.Signals | None = None  # for the workers, once a stop is requested
        self._peer_failed = False
        self._deadline = math.inf  # of the workers, once they have received a signal
        self._end_times: dict[int, float] = {}  # rank -> Unix time at which its end was noticed
        self._ended_by_us: set[int] = set()
        self._killed: set[int] = set()  # behind their deadline
        self._is_shell: dict[int, bool] = {}  # rank -> whether its process is a shell, or was one when it ended
        self._num_succeeded = 0
        self._keys_before = 0
        self.joined: bool | None = None  # whether a rank joined a process group; None: unknown

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._keys_before = self._num_keys()
        pids: dict[int, Any] = super()._start_workers(worker_group)
        # torch has just installed handlers that would end this process at once
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(signum, self._request_stop)
        signal.signal(signal.SIGUSR2, self._note_peer)
        signal.signal(signal.SIGRTMIN, blame_nobody)
        report("started", ranks=self.ranks())
        return pids

    def _request_stop(self, signum: int, frame: FrameType | None) -> None:
        self._stop_signal = self._stop_signal or (signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM)

    def _note_peer(self, signum: int, frame: FrameType | None) -> None:
        self._peer_failed = True  # a rank of another host

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Called by torch every MONITOR_INTERVAL_S: reports ends, carries out a stop, and ends the peers of a failed rank."""
        assert isinstance(self._pcontext, SubprocessContext)
        ranks = self.ranks()
        running = [rank["rank"] for rank in ranks if rank["exit_code"] is None]
        failed = [rank for rank in ranks if rank["exit_code"]]
        if running and len(ranks) - len(running) - len(failed) > self._num_succeeded:
            self._num_succeeded = len(ranks) - len(running) - len(failed)
            report("rank_ended", ranks=ranks)  # with 0: only its heartbeat shows whether that is too early
        if failed or self._peer_failed or self._stop_signal:
            ended: set[int] = set()
            self._pcontext._capture_process_failures(ended)  # torch's log blames the rank that it has noted first
            self._pcontext._running_local_ranks -= ended
            if self._deadline == math.inf:
                self._end_workers(self._pcontext, running, failed)
            if running and time.monotonic() < self._deadline:
                # torch would end them all at the first exit code other than 0
                return RunResult(state=WorkerState.HEALTHY)
            self._killed.update(running)
            self._pcontext.close(signal.SIGKILL, timeout=KILL_S)
        result: RunResult = super()._monitor_workers(worker_group)
        rendezvous = worker_group.spec.rdzv_handler
        # on several hosts the other agents write to the store as well
        if (
            result.state == WorkerState.SUCCEEDED
            and isinstance(rendezvous, OneHostRendezvous)
            and rendezvous.use_agent_store
        ):
            # a rank that joins writes its address to the shared store
            self.joined = self._num_keys() > self._keys_before
        return result

    def _end_workers(self, context: SubprocessContext, running: list[int], failed: list[dict[str, Any]]) -> None:
        """Signals the workers at a stop, or the peers of a failed rank, which is reported; sets their deadline."""
        if failed and not self._stop_signal:
            report("rank_failed", ranks=failed)
        if not self._stop_signal:
            self._ended_by_us.update(running)
        self._deadline = time.monotonic() + (self._stop_grace_s if self._stop_signal else self._peer_grace_s)
        signum = self._stop_signal or signal.SIGTERM
        for worker in self.ranks():
            is_waiting = worker["is_shell"] and worker["exit_code"] is None
            programs = list_programs(worker["pid"]) if is_waiting and signum == signal.SIGINT else []
            # not its group: its data loaders must outlive the save
            context.subprocess_handlers[worker["local_rank"]].proc.send_signal(signum)
            for pid in programs:
                with suppress(OSError):  # it has just ended
                    os.kill(pid, signal.SIGINT)

    def _num_keys(self) -> int:
        """Returns the number of keys in the whole store; the agent's have a prefix, the workers' have none."""
        return int(self._worker_group.store.num_keys())  # type: ignore[attr-defined]  # declared None

    def ranks(self) -> list[dict[str, Any]]:
        """Returns each rank's pid, whether it is a shell and, if it has ended, its exit code (negative: the signal) and time."""
        assert isinstance(self._pcontext, SubprocessContext)
        ranks = []
        for local_rank, handler in self._pcontext.subprocess_handlers.items():
            rank = self._worker_group.workers[local_rank].global_rank
            exit_code = handler.proc.poll()
            if exit_code is None:  # its pid is not another process's
                self._is_shell[rank] = is_shell(handler.proc.pid, self._is_shell.get(rank, False))
            else:
                self._end_times.setdefault(rank, time.time())
            record = {"rank": rank, "local_rank": local_rank, "pid": handler.proc.pid, "exit_code": exit_code}
            by_us = {"ended_by_us": rank in self._ended_by_us, "killed": rank in self._killed}
            facts = {"time": self._end_times.get(rank), "is_shell": self._is_shell.get(rank, False)}
            ranks.append({**record, **facts, **by_us})
        return ranks


def is_shell(pid: int, before: bool = False) -> bool:
    """Whether a process is a shell, by its executable: one of ./train.sh is called train.sh. before: the answer if it has ended."""
    with suppress(OSError):
        return bool(SHELL.match(Path(f"/proc/{pid}/exe").readlink().name))
    return before


def list_programs(shell: int) -> list[int]:
    """Returns what a shell and the shells in it run, as they pass no signal on; not the filters behind a program, such as tee."""
    with suppress(OSError):  # it has just ended
        children = [int(pid) for pid in Path(f"/proc/{shell}/task/{shell}/children").read_text().split()]
        outputs = {open_pipe(pid, fd) for pid in (shell, *children) for fd in (1, 2)} - {None}
        programs = [pid for pid in children if open_pipe(pid, 0) not in outputs]
        return [*programs, *(program for pid in programs if is_shell(pid) for program in list_programs(pid))]
    return []


def open_pipe(pid: int, fd: int) -> str | None:
    """Returns the pipe that a process has open here, 'pipe:[4711]'; None for anything else."""
    with suppress(OSError):
        target = str(Path(f"/proc/{pid}/fd/{fd}").readlink())
        return target if target.startswith("pipe:") else None
    return None


def blame_nobody(signum: int, frame: FrameType | None) -> None:
    """Keeps torch from logging as a failure of its own that the supervisor kills a rank."""
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(
        lambda record: not record.getMessage().startswith("failed (exitcode: ")
    )


class OneHostRendezvous(StaticTCPRendezvous):
    """A rendezvous of workers on one host. The store is served here, on a port that the kernel chooses when it binds it.

    torch's `c10d` handler would work, but it sleeps up to 0.3 s at random before its first round and polls its store ten times a
    second for more hosts; its `static` handler by itself needs a port that happens to be free.

    Without libuv the workers cannot join this store: torch's client of an agent's store uses libuv whatever USE_LIBUV is. Rank 0
    then hosts its own store, on a port that is reserved for it.
    """

    def __init__(self, run_id: str, *, libuv: bool):
        super().__init__(LOOPBACK, 0, rank=0, world_size=1, run_id=run_id, timeout=STORE_TIMEOUT_S)
        store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=self.timeout, use_libuv=libuv)
        self._store, self.master_port, self._libuv = store, store.port, libuv
        if not libuv:
            # it does not listen: no other process gets this port, but a store that reuses addresses can
            self._reserved_port = socket.socket()
            self._reserved_port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._reserved_port.bind((LOOPBACK, 0))
            self.master_port = self._reserved_port.getsockname()[1]

    @property
    def use_agent_store(self) -> bool:
        return self._libuv  # then rank 0 joins this store like the others, and no second port is needed


class HostsRendezvous(StaticTCPRendezvous):
    """A rendezvous of workers on several hosts, each with the place that the supervisor gave it: no race decides who joins.

    The store of each attempt is a new one, on the listener that the first host's agent has bound.
    """

    def __init__(
        self,
        run_id: str,
        *,
        libuv: bool,
        host: str,
        port: int,
        index: int,
        hosts: int,
        listen_fd: int | None = None,
        **_: Any,
    ):
        super().__init__(host, port, rank=index, world_size=hosts, run_id=run_id, timeout=STORE_TIMEOUT_S)
        listener = {} if listen_fd is None else {"is_master": True, "master_listen_fd": listen_fd}
        self._store = TCPStore(host, port, wait_for_workers=False, timeout=self.timeout, use_libuv=libuv, **listener)  # type: ignore[arg-type]


class RankLogs(LogsSpecs):
    """Log settings for torch: launch/rank.py redirects the output, and scripts with @record write their error files here."""

    @property
    def root_log_dir(self) -> str:
        return str(self._root_log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for env in envs.values():
            env["TORCHELASTIC_ERROR_FILE"] = f"{self.root_log_dir}/{env['RANK']}.error.json"
        inherit = dict.fromkeys(envs, "")
        return LogsDest(stdouts=inherit, stderrs=inherit, error_files=dict.fromkeys(envs, os.devnull))


if __name__ == "__main__":
    os._exit(main(sys.argv[1]))  # the interpreter's own exit would take torch apart for 0.3 s
