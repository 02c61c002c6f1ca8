"""
One run of the fault loop with real processes: it starts the run, injects its faults and records when what was noticed.

It uses heartbeats, events, processes and files only. What a rank does to itself is in inside/sitecustomize.py.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
from soak.faults import INTERVAL, Fault, Run
from soak.host import Host
from train.runs import SMALL, Workshop

from paceline.heartbeat import read_heartbeat
from paceline.rundir import RunDir, read_json_lines, write_atomic

INSIDE = Path(__file__).with_name("inside")
PATIENCE_S = 150.0  # for anything that must happen; a machine may be busy
CUT_BYTES = 100
LITTLE_BYTES = 300_000  # too little for a checkpoint, enough for events


@dataclass
class Injection:
    """One fault as it was injected. Times are Unix seconds, as the events have them."""

    fault: Fault
    rank: int
    nproc: int
    attempt: int = 0  # in which it struck
    time: float = 0.0  # 0: not yet
    step: int = 0  # completed by then, by the rank that was furthest
    notice_time: float | None = None  # when all had ended, if no supervisor was left; otherwise audit.py reads it
    problems: list[str] = field(default_factory=list)


class Drive:
    """run() does everything; afterwards `injections` has each fault as it was injected."""

    def __init__(self, shop: Workshop, host: Host, run: Run, *, name: str, num_steps: int, hang_after_s: float):
        self.shop, self.host, self.spec = shop, host, run
        self.disk = host.small_disk(shop.folder / "disks" / name)
        self.run_dir = RunDir(self.disk / name)
        self.orders = shop.folder / "orders" / name
        self.screen = shop.folder / "screens" / f"{name}.txt"
        self.group = host.memory_group(name)
        self.flags = [*("--hang-after", str(hang_after_s)), *("--max-attempts", "20")]
        self.keys = loop_keys(nproc=run.nproc, num_steps=num_steps)
        self.injections = [Injection(fault, run.rank(number), run.nproc) for number, fault in enumerate(run.faults)]
        self.process: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Runs to the end and returns the last command's exit code."""
        self.orders.mkdir(parents=True)
        self.screen.parent.mkdir(exist_ok=True)
        orders = [
            {
                **asdict(injection.fault),
                "rank": injection.rank,
                "step": self.spec.step(number),
                "at_once": is_immediate(injection.fault),
            }
            for number, injection in enumerate(self.injections)
        ]
        (self.orders / "orders.json").write_text(json.dumps(orders))
        self.arm(0)
        self.start(self.shop.train_command(self.run_dir.name, runs_dir=self.disk, **self.keys))
        try:
            for number in range(len(self.injections)):
                self.one_fault(number)
            assert self.process is not None
            return self.process.wait(PATIENCE_S)
        finally:
            self.end()

    def start(self, command: list[str]) -> None:
        path = os.pathsep.join([str(INSIDE), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "SOAK_ORDERS": str(self.orders)}
        with self.screen.open("ab") as screen:
            self.process = subprocess.Popen(
                self.host.inside(self.group, [*command, *self.flags]), stdout=screen, stderr=screen, env=env
            )

    def end(self) -> None:
        """Kills the command if it still runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def arm(self, number: int) -> None:
        write_atomic(self.orders / "armed", str(number))

    def one_fault(self, number: int) -> None:
        injection = self.injections[number]
        reached = self.orders / f"reached.{number}"
        before = len(self.events("decision"))
        self.wait_for(reached.exists, f"fault {number} ({injection.fault.kind}) to be reached")
        place = json.loads(reached.read_text())
        injection.time, injection.step = place["time"], place["step"]
        self.inflict(injection, number, place["pid"])
        if injection.fault.kind == "supervisor":
            self.wait_for(lambda: not self.host.processes_of(self.orders), "the workers' end", alive=False)
            injection.notice_time, injection.attempt = time.time(), self.last_attempt()
        elif injection.fault.restarts:
            self.wait_for(lambda: len(self.events("decision")) > before, f"a decision on fault {number}")
            injection.attempt = self.events("decision")[before]["attempt"]
        else:
            injection.attempt = self.last_attempt()
        injection.step = max(injection.step, self.furthest())
        self.host.unlimit(self.group)
        if number + 1 < len(self.injections):
            self.arm(number + 1)
        if injection.fault.kind == "supervisor":
            self.start(self.shop.resume_command(self.run_dir.path))

    def inflict(self, injection: Injection, number: int, pid: int) -> None:
        """Does what is done from outside; the rank waits at its place, or has continued for delay_ms."""
        go, fault = self.orders / f"go.{number}", injection.fault
        if fault.delay_ms:
            go.touch()
            time.sleep(fault.delay_ms / 1000)
        if fault.kind in ("sigkill", "sigstop"):
            injection.time = time.time()
            os.kill(pid, signal.SIGKILL if fault.kind == "sigkill" else signal.SIGSTOP)
        elif fault.kind == "agent":
            part = "paceline.launch.elastic" if fault.variant else "paceline.launch.agent"
            injection.time = time.time()
            self.child(part).kill()
        elif fault.kind == "supervisor":
            assert self.process is not None
            injection.time = time.time()
            self.process.kill()
            self.process.wait()
        elif fault.kind == "checkpoint":
            damage(self.newest_checkpoint(), rank=injection.rank, cut=fault.variant == 0)
            if fault.restarts:
                injection.time = time.time()
                os.kill(pid, signal.SIGKILL)
        elif fault.kind == "memory" and not fault.variant:
            self.host.limit(self.group, nproc=self.spec.nproc)
        elif fault.kind == "disk":
            self.fill_for_a_while(go, left=0 if fault.variant else LITTLE_BYTES)
        go.touch()

    def fill_for_a_while(self, go: Path, *, left: int) -> None:
        """Fills the disk until a checkpoint has not fitted."""
        saved = max((event["step"] for event in self.events("checkpoint")), default=0)
        filler = self.disk / "filler"
        with suppress(OSError):  # the run may write meanwhile: then it is full to the last byte
            filler.write_bytes(bytes(shutil.disk_usage(self.disk).free - left))
        go.touch()
        self.wait_for(lambda: self.furthest() >= saved + INTERVAL + 2, "steps on a full disk")
        filler.unlink()

    def furthest(self) -> int:
        heartbeats = [read_heartbeat(self.run_dir.progress(rank)) for rank in range(self.spec.nproc)]
        return max((heartbeat.step for heartbeat in heartbeats if heartbeat is not None), default=0)

    def child(self, part: str) -> psutil.Process:
        assert self.process is not None
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(process for process in children if part in process.cmdline())

    def newest_checkpoint(self) -> Path:
        return max(path for path in self.run_dir.checkpoints.glob("step_*") if path.name[5:].isdigit())

    def events(self, kind: str) -> list[dict]:
        return [event for event in read_json_lines(self.run_dir.events) if event.get("event") == kind]

    def last_attempt(self) -> int:
        return max((event["attempt"] for event in self.events("attempt")), default=1)

    def wait_for(self, condition: Callable[[], object], what: str, *, alive: bool = True) -> None:
        deadline = time.monotonic() + PATIENCE_S
        assert self.process is not None
        while not condition():
            if alive and self.process.poll() is not None:
                raise RunEnded(f"the run ended with {self.process.returncode} before {what}: {self.last_lines()}")
            if time.monotonic() > deadline:
                raise RunEnded(f"{what} did not happen in {PATIENCE_S:.0f} s: {self.last_lines()}")
            time.sleep(0.01)

    def last_lines(self) -> str:
        return " / ".join(self.screen.read_text(errors="replace").splitlines()[-6:])


class RunEnded(Exception):
    """The run ended before all of its faults were injected."""


def loop_keys(*, nproc: int, num_steps: int) -> dict[str, object]:
    """Returns the config keys. With a micro-batch of one row, less memory means activation checkpointing, which changes no bit."""
    keys = {"nproc": nproc, "num_steps": num_steps, "save_every": INTERVAL, "eval_every": INTERVAL, "keep_last": 3}
    return {**keys, "device_batch_size": 1, "total_batch_size": SMALL["total-batch-size"], "sample_every": 0}


def is_immediate(fault: Fault) -> bool:
    """Whether the rank does not have to wait for anything from outside."""
    return fault.kind in ("sigsegv", "exception", "exit0", "slow") or (fault.kind == "memory" and fault.variant == 1)


def damage(checkpoint: Path, *, rank: int, cut: bool) -> None:
    [file] = checkpoint.glob(f"shard_{rank:05d}*")
    with file.open("r+b") as opened:
        size = opened.seek(0, os.SEEK_END)
        if cut:
            opened.truncate(size - CUT_BYTES)
        else:
            opened.seek(size - CUT_BYTES)
            byte = opened.read(1)
            opened.seek(size - CUT_BYTES)
            opened.write(bytes([byte[0] ^ 0x10]))  # one bit
