"""
The engine of one host: PyTorch's own elastic agent around the workers, `python -m paceline.train.elastic JOB.json`.

Started by launch/agent.py, which reads the JSON lines it prints: `started` with every pid, `rank_failed` as soon as a
rank ends badly, `ended` with every exit code and whether any rank joined the others. It never starts a rank again
(max_restarts is 0: a restart would reuse the store of the attempt before, and the supervisor decides about attempts).
What differs from torchrun:

- the others are ended 3 s after a failed rank, not 30 s;
- SIGTERM lets every worker save and leave at its own pace, up to `stop_grace_s`;
- rendezvous on one host needs no host name and no port chosen beforehand;
- a torch without libuv will do.
"""

import json
import os
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

MONITOR_INTERVAL_S = 0.1
PEER_GRACE_S = 3.0  # a peer may print its traceback or finish a file; one that waits in a collective never returns
LOOPBACK = "127.0.0.1"


def main(job_path: str) -> int:
    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    if os.getppid() != job["agent_pid"]:
        return 1  # the agent ended before it had tied this process to its life

    # torch puts the host's full name into each of its own events: 6 look-ups for 2 workers, seconds each on slow DNS
    socket.getfqdn = lambda name="": name or socket.gethostname()

    shim = [sys.executable, "-I", "-S", job["rank_script"], str(os.getpid()), job["logs_dir"]]
    rendezvous = OneHostRendezvous(job["run_id"], libuv=job["libuv"])
    spec = WorkerSpec(
        role="worker",
        local_world_size=job["nproc"],
        rdzv_handler=rendezvous,
        entrypoint=shim[0],
        args=(*shim[1:], *job["command"]),
        max_restarts=0,
        monitor_interval=MONITOR_INTERVAL_S,
    )
    engine = Engine(spec, logs_specs=RankLogs(Path(job["logs_dir"])), stop_grace_s=job["stop_grace_s"])
    engine.run()
    report("ended", ranks=engine.ranks(), joined=engine.joined)
    return 0


def report(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


class Engine(LocalElasticAgent):
    """torch's agent, with reports on stdout, a short end for the peers of a failed rank and a patient stop."""

    def __init__(self, spec: WorkerSpec, *, logs_specs: LogsSpecs, stop_grace_s: float):
        super().__init__(spec, logs_specs)
        self._stop_grace_s = stop_grace_s
        self._stop_requested = False
        self._stop_deadline: float | None = None
        self._ended_at: dict[int, float] = {}  # rank -> Unix time at which its end was seen
        self._ended_by_us: set[int] = set()
        self._num_ended_well = 0
        self._keys_before = 0
        self.joined: bool | None = None  # a rank took part in a process group; None: not known

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._keys_before = self._num_keys()
        pids: dict[int, Any] = super()._start_workers(worker_group)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(signum, self._request_stop)  # torch has just installed handlers that would end us at once
        report("started", ranks=self.ranks())
        return pids

    def _request_stop(self, signum: int, frame: FrameType | None) -> None:
        self._stop_requested = True

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert isinstance(self._pcontext, SubprocessContext)
        ranks = self.ranks()
        running = [each["rank"] for each in ranks if each["exit_code"] is None]
        failed = [each for each in ranks if each["exit_code"]]
        if running and len(ranks) - len(running) - len(failed) > self._num_ended_well:
            self._num_ended_well = len(ranks) - len(running) - len(failed)
            report("rank_ended", ranks=ranks)  # with 0: whether that is too early only its mark can tell
        if self._stop_requested:
            if running and self._wait_for_stop():
                return RunResult(state=WorkerState.HEALTHY)  # torch would end them all at the first that is not 0
            self._pcontext.close(signal.SIGKILL, timeout=int(PEER_GRACE_S))
        elif failed:
            report("rank_failed", ranks=failed)
            self._ended_by_us.update(running)
            self._pcontext.close(signal.SIGTERM, timeout=int(PEER_GRACE_S))  # then SIGKILL
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.SUCCEEDED and worker_group.spec.rdzv_handler.use_agent_store:
            self.joined = self._num_keys() > self._keys_before  # joining leaves addresses in the store that all share
        return result

    def _num_keys(self) -> int:
        """Of the whole store: those of the agent itself stand under its prefix, those of the workers beside it."""
        return int(self._worker_group.store.num_keys())  # type: ignore[attr-defined]  # declared None

    def _wait_for_stop(self) -> bool:
        """True while the workers have time left; the first call tells them."""
        assert isinstance(self._pcontext, SubprocessContext)
        if self._stop_deadline is None:
            self._stop_deadline = time.monotonic() + self._stop_grace_s
            for handler in self._pcontext.subprocess_handlers.values():
                handler.proc.send_signal(signal.SIGTERM)  # not its group: its data loaders must outlive the save
        return time.monotonic() < self._stop_deadline

    def ranks(self) -> list[dict[str, Any]]:
        """Every rank as it stands: pid, and exit code (negative: the signal) with the time it was seen, if it ended."""
        assert isinstance(self._pcontext, SubprocessContext)
        found = []
        for local_rank, handler in self._pcontext.subprocess_handlers.items():
            rank = self._worker_group.workers[local_rank].global_rank
            exit_code = handler.proc.poll()
            if exit_code is not None:
                self._ended_at.setdefault(rank, time.time())
            found.append(
                {
                    "rank": rank,
                    "local_rank": local_rank,
                    "pid": handler.proc.pid,
                    "exit_code": exit_code,
                    "time": self._ended_at.get(rank),
                    "ended_by_us": rank in self._ended_by_us,
                }
            )
        return found


class OneHostRendezvous(RendezvousHandler):
    """All workers are on this host: the store is served here, on a port the kernel picks while binding it.

    torch's `c10d` handler would do, but sleeps up to 0.3 s at random before its first round and asks its store ten
    times a second whether another host has come; its `static` handler wants a port that is free by luck.

    Without libuv the workers cannot join this store: torch's client of an agent's store asks for libuv whatever
    USE_LIBUV says. Rank 0 then hosts one of its own, on a port that is kept free for it.
    """

    def __init__(self, run_id: str, *, libuv: bool):
        self._run_id = run_id
        self._store = TCPStore(
            LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60), use_libuv=libuv
        )
        self._kept_port = None if libuv else keep_port()

    @property
    def use_agent_store(self) -> bool:
        return self._kept_port is None  # then rank 0 joins this store like the others; no second port to find

    def next_rendezvous(self) -> RendezvousInfo:
        port = self._kept_port.getsockname()[1] if self._kept_port else self._store.port
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, RendezvousStoreInfo(LOOPBACK, port))

    def get_backend(self) -> str:
        return "one-host"

    def get_run_id(self) -> str:
        return self._run_id

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        return True


def keep_port() -> socket.socket:
    """Bound, not listening: the kernel gives the port to nobody else, and a store that reuses addresses can take it."""
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind((LOOPBACK, 0))
    return kept


class RankLogs(LogsSpecs):
    """torch redirects nothing (launch/rank.py does) and reads no error file; scripts that use @record write theirs."""

    def __init__(self, logs_dir: Path):
        super().__init__(str(logs_dir))
        self._logs_dir = logs_dir

    @property
    def root_log_dir(self) -> str:
        return str(self._logs_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for env in envs.values():
            env["TORCHELASTIC_ERROR_FILE"] = str(self._logs_dir / f"{env['RANK']}.error.json")
        inherit = dict.fromkeys(envs, "")
        return LogsDest(stdouts=inherit, stderrs=inherit, error_files=dict.fromkeys(envs, os.devnull))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
