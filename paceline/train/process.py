"""
What the worker arranges for its process as a whole: process group, end, answers to signals, clocks, records of its memory.

Stacks and recorded collectives are written only when they are requested (launch/stacks.py). Memory is read a few times in a run,
between steps and never in one; what cannot be known is None. The CPU's two settings are each worth more than any change of code;
they hold for the whole process, so the worker makes them once, before its first large tensor. A library must not.
"""

import contextlib
import ctypes
import errno
import faulthandler
import json
import logging
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import product
from pathlib import Path
from statistics import median
from threading import Thread
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import PacelineError
from paceline.plan.host import peak_resident_bytes
from paceline.plan.memory import peak_phase
from paceline.plan.nvml import process_memory
from paceline.plan.planner import Plan, memory_setup
from paceline.rundir import RunDir, append_event, unwritable_file, utc_now, write_atomic

TIMEOUT_S = 1800.0  # a collective that takes longer has lost a rank; the supervisor sees most deaths within a second
FP32_ERROR = 1e-5  # relative, of a matmul over 512 terms: fp32 makes 3e-7, bf16 or tf32 inside make over 1e-4
ONEDNN_GAIN = 1.7  # from which on it is used: by less, noise would decide
MATMUL_TRIALS = 4  # of a layer of 512 channels and 128 tokens
MATMUL_ROUNDS = 9  # at most, whose median counts: 0.6 s on one core, and mostly half of that
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # from glibc's malloc.h


def init_distributed(device: str, *, timeout_s: float = TIMEOUT_S) -> tuple[int, int, int]:
    """Joins the process group of torchrun's environment; returns rank, world_size, local_rank.

    A single process without a launcher needs no process group. Raises PacelineError where the environment is incomplete.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        if device == "cuda":
            torch.cuda.set_device(0)
        return 0, 1, 0
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise PacelineError(
            f"WORLD_SIZE is {world_size}, but {', '.join(missing)} not set: each process would train alone",
            fix="start it through paceline train or torchrun, or unset WORLD_SIZE",
        )
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    timeout = timedelta(seconds=timeout_s)
    if device == "cuda":
        torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl", timeout=timeout, device_id=torch.device("cuda", local_rank))
    else:
        dist.init_process_group("gloo", timeout=timeout)
    assert dist.get_world_size() == world_size, (dist.get_world_size(), world_size)
    return rank, world_size, local_rank


def shutdown() -> None:
    """Leaves the process group at a clean end. Collective."""
    if dist.is_initialized():
        dist.barrier()  # a rank that leaves early resets connections from which others still read
        dist.destroy_process_group()


def all_reduce_sum(tensor: Tensor) -> None:
    """Sums over ranks, in place. Collective."""
    if dist.is_initialized():
        dist.all_reduce(tensor)


def any_rank(is_true: bool, device: torch.device) -> bool:
    """Returns on every rank whether it is true on at least one. Collective."""
    count = torch.tensor([float(is_true)], device=device)
    all_reduce_sum(count)
    return bool(count.item())


def finish_work(device: torch.device) -> None:
    """Waits until a GPU has done what it was given, so that a clock may be read; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def broadcast_object(value: Any) -> Any:
    """Returns rank 0's value on every rank. Collective."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def run_rank(work: Callable[[], None], run: RunDir, *, attempt: int, rank: int) -> NoReturn:
    """Does the work and ends the process: with 0, or with an error file in the run folder and the error's exit code."""
    try:
        work()
    except BaseException as error:
        error = write_error(run, error, attempt=attempt, rank=rank)
        with contextlib.suppress(OSError):  # the log may lie on a full disk
            traceback.print_exception(error)
            sys.stdout.flush()
        # exit at once: interpreter shutdown would wait in the destructors of collectives whose peers are gone
        os._exit(error.exit_code if isinstance(error, PacelineError) else 1)
    shutdown()
    logging.shutdown()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(0)  # gloo's threads under DDP sometimes abort in the interpreter's own exit (torch 2.13)


def write_error(run: RunDir, error: BaseException, *, attempt: int, rank: int) -> BaseException:
    """Writes the rank's error file, from which the supervisor learns which rank failed first, and what to show.

    Returns the error, or one with a fix where the run folder is gone or cannot be written.
    """
    if isinstance(error, OSError) and error.filename is not None:
        path = Path(os.fsdecode(error.filename))
        if path.is_relative_to(run.path) and (not run.path.is_dir() or error.errno in (errno.EROFS, errno.EACCES)):
            error = unwritable_file(path if run.path.is_dir() else run.config_toml, error)
    known = error if isinstance(error, PacelineError) else None
    record = {
        "time": utc_now(),
        "rank": rank,
        "type": type(error).__name__,
        "message": known.message if known else str(error),
        "fix": known.fix if known else None,
        "exit_code": known.exit_code if known else 3,
        "traceback": "".join(traceback.format_exception(error)),
        **getattr(error, "record", {}),  # of a LossTrouble: its cause and step
    }
    with contextlib.suppress(OSError):  # the run folder may be what has failed: the traceback is in the rank's log too
        write_atomic(run.rank_error(attempt, rank), json.dumps(record))
    return error


def answer_with_stacks(run: RunDir, *, attempt: int, rank: int) -> None:
    """Makes SIGUSR2 write the stack of every thread to a file, without the interpreter: even from a collective that never ends."""
    run.logs(attempt).mkdir(parents=True, exist_ok=True)
    faulthandler.register(signal.SIGUSR2, file=run.rank_stacks(attempt, rank).open("w"))


def answer_with_collectives(rank: int) -> None:
    """Starts a thread that waits at a pipe and writes this rank's recorded collectives; with NCCL torch does this by itself."""
    pipe, dump = (os.environ.get(f"TORCH_{name}") for name in ("NCCL_DEBUG_INFO_PIPE_FILE", "FR_DUMP_TEMP_FILE"))
    if not pipe or not dump or not dist.is_initialized() or dist.get_backend() == "nccl":
        return
    path = Path(f"{pipe}{rank}.pipe")
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    fd = os.open(path, os.O_RDWR)  # a writer as well: otherwise the wait ends when another writer closes the pipe

    def dump_on_request() -> None:
        from torch._C._distributed_c10d import _dump_fr_trace  # type: ignore[attr-defined]

        while os.read(fd, 1):  # without stack traces, which take torch a second or two
            Path(f"{dump}{rank}").write_bytes(_dump_fr_trace(includeStackTraces=False))

    Thread(target=dump_on_request, name="flight recorder", daemon=True).start()


class MemoryEvents:
    """Writes how much memory this rank has taken and how much was planned. plan/history.py keeps each attempt's last event."""

    def __init__(self, run: RunDir, attempt: int, rank: int, device: torch.device, plan: Plan, *, compiled: bool):
        """Must be called when the model is ready to train. compiled: what the trial decided where the plan left it open."""
        self.run, self.attempt, self.rank, self.device = run, attempt, rank, device
        self.compile_tried = plan.compile is None
        self.planned_bytes = peak_phase(memory_setup(replace(plan, compile=compiled))).bytes
        self.copies_bytes = 0  # of the last checkpoint; set by the worker
        if self.compile_tried:
            forget_peaks(device)

    def write(self, step: int) -> None:
        """Appends one event."""
        append_event(
            self.run,
            "memory",
            attempt=self.attempt,
            rank=self.rank,
            step=step,
            planned_bytes=self.planned_bytes,
            copies_bytes=self.copies_bytes,
            compile_tried=self.compile_tried,
            torch=torch.__version__,
            **footprint(self.device),
        )


def footprint(device: torch.device) -> dict[str, int | None]:
    """Returns the peaks of torch's allocator, allocated_bytes and reserved_bytes, and driver_bytes, the peak of the process.

    On a CPU there is no such allocator, and driver_bytes is the highest resident size so far.
    """
    if device.type != "cuda":
        return {"allocated_bytes": None, "reserved_bytes": None, "driver_bytes": peak_resident_bytes()}
    processes = process_memory(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    return {
        "allocated_bytes": int(torch.cuda.max_memory_allocated(device)),
        "reserved_bytes": int(torch.cuda.max_memory_reserved(device)),
        "driver_bytes": own_bytes(processes, at_least=int(torch.cuda.memory_reserved(device))),
    }


def forget_peaks(device: torch.device) -> None:
    """Resets the allocator's peaks after a trial: what that took is not what the training takes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def own_bytes(processes: list[tuple[int, int]], *, at_least: int) -> int | None:
    """Returns this process's bytes, context and libraries included; None if unknown. processes: (pid, bytes) on one card.

    In a container the driver lists pids of the host: a single process must then be this one, if its bytes are at_least so many.
    """
    sizes = [size for pid, size in processes if pid == os.getpid()]
    if not sizes and len(processes) == 1:
        sizes = [processes[0][1]]
    return sizes[0] if sizes and sizes[0] >= at_least else None


def onednn_gain() -> float:
    """Returns how many times as fast oneDNN's fp32 matmuls are here as MKL's; 0 if it does not keep them fp32.

    Which one is faster depends on the CPU: 2.2 times on one core of an EPYC 9005, 1.1 to 1.3 on others with bf16, 1.0 on older ones
    with AVX2, 0.45 to 0.9 on a Xeon of 2019. What is set stays as it was.
    """
    if not onednn_is_exact():
        return 0.0
    generator = torch.Generator().manual_seed(0)
    shapes = (128, 512), (128, 2048), (2048, 512)
    x, h, weight = (torch.randn(shape, generator=generator) for shape in shapes)
    products = (x, weight.t()), (h, weight), (h.t(), x)  # forward, and both gradients
    threads, gains = torch.get_num_threads(), []
    torch.set_num_threads(1)  # of several, each waits for the one that another process has delayed
    for _ in range(MATMUL_ROUNDS):
        fastest = dict.fromkeys(product((False, True), range(len(products))), math.inf)
        for (onednn, number), _ in product(fastest, range(MATMUL_TRIALS)):
            with fp32_matmuls(onednn=onednn):
                started = time.thread_time()  # of this thread's own work: time in which others run does not count
                torch.mm(*products[number])
                fastest[onednn, number] = min(fastest[onednn, number], time.thread_time() - started)
        times = [sum(fastest[onednn, number] for number in range(len(products))) for onednn in (False, True)]
        gains.append(times[0] / times[1])
        used = sum(gain >= ONEDNN_GAIN for gain in gains)
        if max(used, len(gains) - used) > MATMUL_ROUNDS // 2:
            break  # the median of all rounds is on this side
    torch.set_num_threads(threads)
    return median(gains)


def onednn_is_exact() -> bool:
    """Returns whether oneDNN keeps fp32 matmuls fp32 on this CPU. What is set stays as it was.

    PyTorch sends fp32 to oneDNN only when bf16 inside is allowed. A CPU without matrix units has no use for that and computes in
    fp32; a comparison with fp64 decides.
    """
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(512, 512, generator=generator) for _ in range(2))
    exact = a.double() @ b.double()
    try:
        with fp32_matmuls(onednn=True):
            batched = torch.bmm(a.view(4, 128, 512), b.expand(4, -1, -1)).view(512, 512)
            errors = [(y - exact).norm() / exact.norm() for y in (a @ b, a @ b.t().contiguous().t(), batched)]
    except RuntimeError:  # a build without oneDNN refuses the setting
        return False
    return bool(max(errors) < FP32_ERROR)


@contextmanager
def fp32_matmuls(*, onednn: bool) -> Iterator[None]:
    """Sends fp32 matmuls of the CPU to oneDNN or to MKL within the block."""
    setting = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = setting.fp32_precision
    setting.fp32_precision = "bf16" if onednn else "none"
    try:
        yield
    finally:
        setting.fp32_precision = before


def use_onednn() -> None:
    """Sends fp32 matmuls of the CPU to oneDNN from here on."""
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # type: ignore[attr-defined]


def keep_freed_memory() -> bool:
    """Makes malloc keep freed memory instead of returning it to Linux; returns whether it does.

    A training step frees and takes the same gigabyte again and again. Each page given back costs a fault when it is next touched:
    this took up to a quarter of the step's time. The process stays as large as it was at its peak.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is None:
        return False
    settings = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: 2**31 - 1, M_TOP_PAD: 64 << 20}
    return all(mallopt(name, value) == 1 for name, value in settings.items())


def peak_bytes(device: torch.device) -> int:
    """Returns the most memory held so far: by torch's allocator on a GPU, by the process on the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return peak_resident_bytes() or 0


class BusyClock:
    """Measures how long a rank works on a step by itself: from the step's start to the end of its backward.

    Call `start` and `stop` once in each step, and `forget` when a line of metrics is due: mean_ms is of the steps since. On a GPU
    the device's own clock counts, by events that are read a step later, when it has passed them: this adds no wait.
    """

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._events: list[list[torch.cuda.Event]] = []  # start and end of this step and of the previous one
        self._started = 0.0
        self.forget()

    def start(self) -> None:
        """Marks the beginning of a step's own work."""
        if self._on_gpu:
            if len(self._events) > 1:
                pair = self._events.pop(0)
            else:
                pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            pair[0].record()
            self._events.append(pair)
        else:
            self._started = time.perf_counter()

    def stop(self) -> None:
        """Must be called before anything that waits for another rank."""
        if not self._on_gpu:
            self._add(1000 * (time.perf_counter() - self._started))
            return
        self._events[-1][1].record()
        if len(self._events) > 1:  # the previous step's have passed: its loss was waited for
            start, end = self._events[0]
            self._add(start.elapsed_time(end))

    def forget(self) -> None:
        """Starts a new mean."""
        self.mean_ms, self._steps = 0.0, 0  # 0.0 before the first step

    def _add(self, ms: float) -> None:
        self._steps += 1
        self.mean_ms += (ms - self.mean_ms) / self._steps


@dataclass
class StopRequest:
    """A request to stop, set by a signal handler at any moment; ranks agree on it in each step and after each evaluation."""

    is_set: bool = False
    training: bool = False  # until the first step is done, which may compile for minutes, there is nothing to save

    def listen(self, signums: Sequence[int]) -> None:
        """Handles these signals. Until the first step is done they end the process even while it waits in native code."""
        for signum in signums:
            signal.signal(signum, self.set)
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing)  # Python's own handlers run only when native code has returned
        Thread(target=self._end_early, args=(reading, signums), daemon=True).start()

    def _end_early(self, fd: int, signums: Sequence[int]) -> None:
        while number := os.read(fd, 1):
            if number[0] in signums and not self.training:
                os._exit(0)

    def set(self, signum: int, frame: FrameType | None) -> None:
        """Handles a signal: requests a stop, or ends the process where there is nothing to save yet."""
        if not self.training:
            os._exit(0)
        self.is_set = True
