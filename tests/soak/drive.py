"""
One run of the fault loop with real processes: starts it, does to it what its faults say, and notes when what was seen.

It stands outside: marks, events, processes and files are all it looks at. What a rank does to itself: inside/sitecustomize.py.
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

from paceline.marks import read_mark
from paceline.rundir import RunDir, read_json_lines, write_atomic

INSIDE = Path(__file__).with_name("inside")
PATIENCE_S = 150.0  # for anything that must come; a machine may be busy
CUT_BYTES = 100
LITTLE_BYTES = 300_000  # too little for a checkpoint, enough for events


@dataclass
class Struck:
    """What came of one fault. Times in seconds since 1970, as the events have them."""

    fault: Fault
    rank: int
    nproc: int
    attempt: int = 0  # in which it struck
    struck: float = 0.0
    step: int = 0  # done by then, of the rank that was furthest
    noticed: float | None = None  # when all had ended, where nobody was left to notice; else audit.py reads it
    problems: list[str] = field(default_factory=list)


class Drive:
    """run() does it all; afterwards `struck` has what came of each fault, and `problems` what was wrong with the run itself."""

    def __init__(self, shop: Workshop, host: Host, run: Run, *, name: str, num_steps: int, hang_after_s: float):
        self.shop, self.host, self.spec = shop, host, run
        self.disk = host.small_disk(shop.folder / "disks" / name)
        self.run_dir = RunDir(self.disk / name)
        self.orders = shop.folder / "orders" / name
        self.screen = shop.folder / "screens" / f"{name}.txt"
        self.group = host.memory_group(name)
        self.words = [*("--hang-after", str(hang_after_s)), *("--max-attempts", "20")]
        self.keys = loop_keys(nproc=run.nproc, num_steps=num_steps)
        self.struck = [Struck(fault, run.rank(number), run.nproc) for number, fault in enumerate(run.faults)]
        self.process: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """The exit code of the command that came to the end."""
        self.orders.mkdir(parents=True)
        self.screen.parent.mkdir(exist_ok=True)
        orders = [
            {**asdict(each.fault), "rank": each.rank, "step": self.spec.step(number), "at_once": at_once(each.fault)}
            for number, each in enumerate(self.struck)
        ]
        (self.orders / "orders.json").write_text(json.dumps(orders))
        self.arm(0)
        self.start(self.shop.train_command(self.run_dir.name, runs_dir=self.disk, **self.keys))
        try:
            for number in range(len(self.struck)):
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
                self.host.inside(self.group, [*command, *self.words]), stdout=screen, stderr=screen, env=env
            )

    def end(self) -> None:
        """However the run was left, nothing of it stays; what should have ended by itself is for audit.py, before."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def arm(self, number: int) -> None:
        write_atomic(self.orders / "armed", str(number))

    def one_fault(self, number: int) -> None:
        each = self.struck[number]
        reached = self.orders / f"reached.{number}"
        before = len(self.events("decision"))
        self.wait_for(reached.exists, f"fault {number} ({each.fault.kind}) to be reached")
        said = json.loads(reached.read_text())
        each.struck, each.step = said["time"], said["step"]
        self.deed(each, number, said["pid"])
        if each.fault.kind == "supervisor":
            self.wait_for(lambda: not self.host.processes_of(self.orders), "the workers' end", alive=False)
            each.noticed, each.attempt = time.time(), self.last_attempt()
        elif each.fault.restarts:
            self.wait_for(lambda: len(self.events("decision")) > before, f"a decision on fault {number}")
            each.attempt = self.events("decision")[before]["attempt"]
        else:
            each.attempt = self.last_attempt()
        each.step = max(each.step, self.furthest())
        self.host.unlimit(self.group)
        if number + 1 < len(self.struck):
            self.arm(number + 1)
        if each.fault.kind == "supervisor":
            self.start(self.shop.command("resume", str(self.run_dir.path)))

    def deed(self, each: Struck, number: int, pid: int) -> None:
        """What is done from outside; the rank waits at its place, or has gone on for delay_ms."""
        go, fault = self.orders / f"go.{number}", each.fault
        if fault.delay_ms:
            go.touch()
            time.sleep(fault.delay_ms / 1000)
        if fault.kind in ("sigkill", "sigstop"):
            each.struck = time.time()
            os.kill(pid, signal.SIGKILL if fault.kind == "sigkill" else signal.SIGSTOP)
        elif fault.kind == "agent":
            part = "paceline.train.elastic" if fault.variant else "paceline.launch.agent"
            each.struck = time.time()
            self.child(part).kill()
        elif fault.kind == "supervisor":
            assert self.process is not None
            each.struck = time.time()
            self.process.kill()
            self.process.wait()
        elif fault.kind == "checkpoint":
            damage(self.newest_checkpoint(), rank=each.rank, cut=fault.variant == 0)
            if fault.restarts:
                each.struck = time.time()
                os.kill(pid, signal.SIGKILL)
        elif fault.kind == "memory" and not fault.variant:
            self.host.limit(self.group, nproc=self.spec.nproc)
        elif fault.kind == "disk":
            self.fill_for_a_while(go, left=0 if fault.variant else LITTLE_BYTES)
        go.touch()

    def fill_for_a_while(self, go: Path, *, left: int) -> None:
        """Until a checkpoint has found no room."""
        saved = max((event["step"] for event in self.events("checkpoint")), default=0)
        filler = self.disk / "filler"
        with suppress(OSError):  # the run may write meanwhile: then it is full to the last byte
            filler.write_bytes(bytes(shutil.disk_usage(self.disk).free - left))
        go.touch()
        self.wait_for(lambda: self.furthest() >= saved + INTERVAL + 2, "steps on a full disk")
        filler.unlink()

    def furthest(self) -> int:
        marks = [read_mark(self.run_dir.progress(rank)) for rank in range(self.spec.nproc)]
        return max((mark.step for mark in marks if mark is not None), default=0)

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
                raise RunEnded(f"the run ended with {self.process.returncode} before {what}: {self.last_words()}")
            if time.monotonic() > deadline:
                raise RunEnded(f"{what} did not come in {PATIENCE_S:.0f} s: {self.last_words()}")
            time.sleep(0.01)

    def last_words(self) -> str:
        return " / ".join(self.screen.read_text(errors="replace").splitlines()[-6:])


class RunEnded(Exception):
    """It cannot take the faults that are left."""


def loop_keys(*, nproc: int, num_steps: int) -> dict[str, object]:
    """One row at once: then less memory means activation checkpointing, which changes no bit."""
    keys = {"nproc": nproc, "num_steps": num_steps, "save_every": INTERVAL, "eval_every": INTERVAL, "keep_last": 3}
    return {**keys, "device_batch_size": 1, "total_batch_size": SMALL["total-batch-size"], "sample_every": 0}


def at_once(fault: Fault) -> bool:
    """Whether the rank need not wait for anything to be done from outside."""
    return fault.kind in ("sigsegv", "exception", "exit0", "slow") or (fault.kind == "memory" and fault.variant == 1)


def damage(checkpoint: Path, *, rank: int, cut: bool) -> None:
    [file] = checkpoint.glob(f"shard_{rank:05d}*")
    with file.open("r+b") as opened:
        size = opened.seek(0, os.SEEK_END)
        if cut:
            opened.truncate(size - CUT_BYTES)
        else:
            opened.seek(size - CUT_BYTES)
            was = opened.read(1)
            opened.seek(size - CUT_BYTES)
            opened.write(bytes([was[0] ^ 0x10]))  # one bit
