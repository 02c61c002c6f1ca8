"""
Runs a script of tests/explain/faults/ under a launcher and writes the output of launcher and ranks to one log.

Every process of a script has the same TMPDIR, by which it is identified and killed afterwards, whatever session or group it is in.
Small disks are mounted in a mount namespace, and limits are control groups below the one that the test runs in.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from signal import Signals

import psutil
import pytest

FAULTS = Path(__file__).with_name("faults")
MODULE = [sys.executable, "-m"]
EVERY = "every"  # all ranks fail the same way: any of them, or none, is right
MOUNT = 'mkdir -p $1; mount -t tmpfs -o size=$2 none $1; shift 2; exec "$@"'
NO_NETWORK = ("unshare", "--net")
PACKAGES = {"accelerate", "deepspeed", "huggingface_hub", "lightning", "pip", "requests", "safetensors", "transformers"}
BEFORE_SIGNAL = b"step 00003"


@dataclass(frozen=True)
class Fault:
    """One kind of failure: how it is started, and what its log must contain."""

    script: str
    cause: str
    rank: int | str | None  # the culprit; None: no rank, EVERY: any rank
    shows: str  # in the log if the intended failure happened
    launcher: str = "torchrun"
    nproc: int = 2
    also: tuple[str, ...] = ()  # other causes that the log supports too
    fix: str = ""  # a part of the fix for this case of the cause
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    around: tuple[str, ...] = ()  # command words before the launcher's
    limits: tuple[str, str, str] | None = None  # control group of argument 1: controller, file, value
    signal: Signals | None = None  # sent to the launcher's group after step 3
    package: str | None = None  # imported by the script and not required by this project
    timeout_s: float = 120.0

    def __str__(self) -> str:
        return "-".join([self.launcher, self.script, *self.args, *([self.signal.name] if self.signal else [])])


@dataclass(frozen=True)
class Ended:
    exit_code: int
    log: Path


def small_disk(folder: str, size: str) -> tuple[str, ...]:
    """Command words for a tmpfs of that size at folder, seen by what follows them alone."""
    return ("unshare", "--mount", "sh", "-c", MOUNT, "sh", folder, size)


def fail(fault: Fault, log: Path, *, env: Mapping[str, str]) -> Ended:
    """Runs a fault to its end; skips the test where this machine cannot make it fail so."""
    skip_without(fault)
    folder = tempfile.mkdtemp(prefix="fault")  # short: the loader workers' sockets lie in it, whose paths are limited
    command = [*fault.around, *launch_command(fault), str(FAULTS / f"{fault.script}.py"), *fault.args]
    own = {"OMP_NUM_THREADS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2", "MASTER_ADDR": "127.0.0.1"}
    own |= {"MASTER_PORT": str(free_port()), "TMPDIR": folder, **env, **fault.env}
    with limited(fault.limits) as group, log.open("wb") as out:
        try:
            process = subprocess.Popen(
                [*command, *group],
                cwd=folder,
                env=os.environ | own,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            if fault.signal is not None:
                wait_for_text(log, BEFORE_SIGNAL, process)
                os.killpg(process.pid, fault.signal)
            exit_code = process.wait(fault.timeout_s)
        finally:
            kill_processes_in(folder)
            shutil.rmtree(folder)
    return Ended(exit_code, log)


def launch_command(fault: Fault) -> list[str]:
    nproc, port = str(fault.nproc), str(free_port())
    match fault.launcher:
        case "torchrun":
            return [*MODULE, "torch.distributed.run", "--standalone", "--nproc-per-node", nproc]
        case "torchrun tee":  # every line gets a prefix such as [default1]:
            return [*MODULE, "torch.distributed.run", "--standalone", "--nproc-per-node", nproc, "--tee", "3"]
        case "torchrun static":
            return [*MODULE, "torch.distributed.run", "--nproc-per-node", nproc, "--master-port", port]
        case "accelerate":
            launch = [*MODULE, "accelerate.commands.launch", "--multi_gpu", "--num_processes", nproc]
            return ["env", "ACCELERATE_USE_CPU=true", *launch, "--main_process_port", port]
        case "deepspeed":
            deepspeed = str(Path(sys.executable).with_name("deepspeed"))
            launch = [deepspeed, "--num_accelerators", nproc, "--master_port", port, "--no_local_rank"]
            return ["env", "DS_ACCELERATOR=cpu", *launch]
        case "paceline":
            return [
                str(Path(sys.executable).with_name("paceline")),
                "run",
                "--nproc",
                nproc,
                "--device",
                "cpu",
                "--no-check",
                "--",
            ]
        case "python":
            return [sys.executable]
    raise ValueError(fault.launcher)


def skip_without(fault: Fault) -> None:
    for package in {fault.package, fault.launcher} & PACKAGES:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if fault.around and subprocess.run([*fault.around[:2], "true"], capture_output=True).returncode:
        pytest.skip(f"{' '.join(fault.around[:2])} is not allowed here")


@contextmanager
def limited(limits: tuple[str, str, str] | None) -> Iterator[list[str]]:
    """A control group with the limit, below that of this process; yields its path as an argument for the script."""
    if limits is None:
        yield []
        return
    controller, name, value = limits
    groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = next((path for _, controllers, path in groups if controller in controllers.split(",")), "")
    group = Path(f"/sys/fs/cgroup/{controller}{own}/fault-{os.getpid()}")
    try:
        group.mkdir()
        (group / name).write_text(value)
    except OSError as error:
        pytest.skip(f"no control group of {controller} can be made here: {error}")
    try:
        yield [str(group)]
    finally:
        deadline = time.monotonic() + 120
        while group.exists() and time.monotonic() < deadline:
            with suppress(OSError):  # busy until the last process in it is gone
                group.rmdir()
            time.sleep(0.05)


def wait_for_text(log: Path, text: bytes, process: subprocess.Popen[bytes], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while text not in log.read_bytes():
        assert process.poll() is None, log.read_text(errors="replace")
        assert time.monotonic() < deadline, log.read_text(errors="replace")
        time.sleep(0.05)


def kill_processes_in(folder: str) -> None:
    """Kills the processes with this TMPDIR until none is left."""
    deadline = time.monotonic() + 120
    while (
        alive := [process for process in psutil.process_iter() if was_started_in(process, folder)]
    ) and time.monotonic() < deadline:
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=1)
    assert not alive, alive


def was_started_in(process: psutil.Process, folder: str) -> bool:
    try:
        return process.environ().get("TMPDIR") == folder and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
        return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
