"""
What a rank's process does at this moment, seen from outside: its stacks, its state in /proc, its last collectives. No torch.

py-spy takes the Python stacks of any Python process, a stopped one included, where it is installed and permitted. A rank of the
trainer writes its own at SIGUSR2 (train/process.py). Nothing here waits for long, because the process may never answer.

The flight recorders know the last collectives of each rank. torch's NCCL makes a named pipe for each rank, and at a byte in it
writes the recording to a file (DumpPipe in torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp, torch 2.13; it checks the pipe once
a second). It writes that file at its own timeouts as well. torch's gloo does neither: the trainer's ranks do (train/process.py).
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from paceline.rundir import RECORDER_DUMP, RunDir, append_event, read_end

WORKING = 0.2  # of one core: a process that uses less only waits
IDLE = 0.05  # of one core: a script is idle when each of its ranks uses less
PY_SPY_S = 4.0  # for all ranks together
OWN_STACKS_S = 1.0  # for a rank's own handler, which needs a few ms
PAUSE_S = 0.02
SAMPLE_BYTES = 1 << 16  # of the end of health/<host>.jsonl: more than one line
FRAME = re.compile(
    r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$'  # faulthandler
    r"|^\s+(?P<name2>\S.*) \((?P<file2>[^()]+):(?P<line2>\d+)\)$"  # py-spy
)
MAIN_THREAD = re.compile(r'^Thread \S+ \([^)]*\): "MainThread"')
COLLECTIVES = "torch/distributed/distributed_c10d.py"
# where DDP's constructor, forward and backward call C++ code that waits for the other ranks
WAITS_IN_C = re.compile(r"/torch/(distributed/\w+|nn/parallel/distributed|autograd/graph)\.py$")
# where a rank waits for the next batch, and where a worker of its data loader makes one
DATA_LOADER, FETCH = "torch/utils/data/dataloader.py", "torch/utils/data/_utils/fetch.py"
NEXT_BATCH = "_try_get_data"
WORKERS = "workers of its data loader, taken by py-spy"
PROCESS = re.compile(r"^Process (\d+): ")
BACKWARD = "_engine_run_backward"  # the innermost frame of a wait in backward
# a queue, a lock or a child process is not another rank
STDLIB = re.compile(r"/lib/python3\.\d+/(?!(site|dist)-packages/)|<frozen ")
THREADS = re.compile(r"/lib/python3\.\d+/(threading|queue)\.py$")
LIBRARY = re.compile(r"/(site|dist)-packages/(?!paceline/)|/lib/python3\.\d+/|<frozen ")
STATES = {
    "T": "stopped (state T)",
    "t": "stopped by a debugger (state t)",
    "Z": "ended (state Z)",
    "D": "waiting for a disk or a device (state D)",
    "R": "running (state R)",
    "S": "waiting (state S)",
}
CANNOT_RUN = ("T", "t", "Z", None)  # None: the process is gone
STATUS_FIELDS = (
    "State", "VmRSS", "Threads", "SigBlk", "SigCgt", "voluntary_ctxt_switches", "nonvoluntary_ctxt_switches", "TracerPid",
)  # fmt: skip
PIPE, DUMP = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_FR_DUMP_TEMP_FILE"  # stems, to which torch adds the rank
OLDER_DUMP = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
PIPE_STEM = "collectives_"
RECORDING_S = 1.2
PROGRAM = ("<module>", "_run_module_as_main")  # the outermost frame of a program that runs
GONE = ("Z", None)  # states of a process that runs no more; nobody may have asked how it ended


def process_state(pid: int) -> str | None:
    """Returns the letter in /proc/PID/stat, None when there is no such process. The name before it may hold any character."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


@dataclass(frozen=True)
class RankProcess:
    """A rank's process at one moment."""

    pid: int
    state: str | None  # the letter in /proc/PID/stat; None: there is no such process
    cpu_s: float  # used so far, with its children


def rank_processes(run: RunDir, attempt: int, ranks: Iterable[int]) -> dict[int, RankProcess]:
    """Returns the processes of ranks that run on this host, as far as they have been started."""
    pids = rank_pids(run, attempt, ranks)
    return {rank: RankProcess(pid, process_state(pid), cpu_seconds(pid)) for rank, pid in pids.items()}


def inspect_ranks(run: RunDir, attempt: int, ranks: Iterable[int], *, own_ranks: bool) -> dict[int, dict[str, str]]:
    """Returns the `stacks` and the `process` of each rank of this host, as text; asks the flight recorders for their files too.

    It takes seconds. own_ranks: they run paceline's own code.
    """
    pids = rank_pids(run, attempt, ranks)
    recordings = request_recordings(
        run, attempt, [r for r, pid in pids.items() if process_state(pid) not in CANNOT_RUN]
    )
    stacks = take_stacks(run, attempt, pids, own_ranks=own_ranks)
    texts = {rank: {"stacks": stacks.get(rank, ""), "process": describe_process(pid)} for rank, pid in pids.items()}
    wait_for_recordings(recordings)
    return texts


@dataclass(frozen=True)
class Frame:
    name: str
    file: str
    line: int


def take_stacks(run: RunDir, attempt: int, pids: Mapping[int, int], *, own_ranks: bool) -> dict[int, str]:
    """Returns the stacks of each rank that could be read, after the name of the tool. own_ranks: they run paceline's own code."""
    texts = {rank: f"py-spy\n{text}" for rank, text in py_spy_stacks(pids).items()}
    if own_ranks:
        texts |= own_stacks(run, attempt, {rank: pid for rank, pid in pids.items() if rank not in texts})
    waiting = [rank for rank, text in texts.items() if loads_batch(main_frames(text))]
    children = [(rank, pid) for rank in waiting for pid in child_pids(pids[rank])]
    workers = py_spy_stacks(dict(enumerate(pid for _, pid in children)))
    for rank in waiting:
        own = (text for number, text in workers.items() if children[number][0] == rank and FETCH in text)
        texts[rank] = "\n".join([texts[rank], WORKERS, *own])
    return texts


def py_spy_stacks(pids: Mapping[int, int]) -> dict[int, str]:
    """Takes the stacks of all these processes in parallel; returns those that it could take, by the keys of pids.

    py-spy cannot pause a process that is stopped already, and need not.
    """
    folders = [str(Path(sys.executable).parent), *os.get_exec_path()]  # first that of a virtual environment
    py_spy = shutil.which("py-spy", path=os.pathsep.join(folders))
    dumps = {}
    for rank, pid in pids.items() if py_spy else ():
        options = ["--nonblocking"] if process_state(pid) in CANNOT_RUN else []
        command = [str(py_spy), "dump", "--full-filenames", *options, "--pid", str(pid)]
        with suppress(OSError):
            dumps[rank] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    deadline, texts = time.monotonic() + PY_SPY_S, dict[int, str]()
    for rank, dump in dumps.items():
        try:
            text, _ = dump.communicate(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            dump.kill()
            dump.communicate()
            continue
        if dump.returncode == 0:
            texts[rank] = text
    return texts


def child_pids(pid: int) -> list[int]:
    """Returns the children of a process, data loader workers among them."""
    with suppress(psutil.Error):
        return [child.pid for child in psutil.Process(pid).children()]
    return []


def own_stacks(run: RunDir, attempt: int, pids: Mapping[int, int]) -> dict[int, str]:
    """Asks the ranks that handle SIGUSR2 for their stacks; it would end any other process."""
    before = {}
    for rank, pid in pids.items():
        if process_state(pid) not in CANNOT_RUN and catches(pid, signal.SIGUSR2):
            with suppress(OSError):
                before[rank] = run.rank_stacks(attempt, rank).stat().st_size
                os.kill(pid, signal.SIGUSR2)
    deadline, texts = time.monotonic() + OWN_STACKS_S, dict[int, str]()
    while len(texts) < len(before) and time.monotonic() < deadline:
        sizes = {rank: run.rank_stacks(attempt, rank).stat().st_size for rank in before}
        time.sleep(PAUSE_S)
        for rank, size in sizes.items():
            path = run.rank_stacks(attempt, rank)
            if size > before[rank] and path.stat().st_size == size:  # all of it has come
                with path.open(encoding="utf-8", errors="replace") as file:
                    file.seek(before[rank])
                    texts[rank] = f"faulthandler\n{file.read()}"
    return texts


def catches(pid: int, signum: signal.Signals) -> bool:
    """Whether the process handles this signal, by its mask in /proc/PID/status."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return bool(caught and int(caught[1], 16) >> (signum - 1) & 1)


def main_frames(text: str) -> list[Frame]:
    """Returns the frames of the main thread, innermost first. py-spy names that thread; faulthandler prints it last."""
    threads: list[list[Frame]] = []
    named: list[Frame] | None = None
    for line in text.partition(f"\n{WORKERS}\n")[0].splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            threads.append([])
            named = threads[-1] if MAIN_THREAD.match(line) else named
        elif threads and (match := FRAME.match(line)):
            name, file, number = (match[key] or match[f"{key}2"] for key in ("name", "file", "line"))
            threads[-1].append(Frame(name, file, int(number)))
    return named or (threads[-1] if threads else [])


def has_ended(frames: Sequence[Frame]) -> bool | None:
    """Whether the program has ended and a thread or an exit handler keeps its process; None without frames of the main thread."""
    return frames[-1].name not in PROGRAM if frames else None


def in_collective(frames: Sequence[Frame]) -> bool:
    """Whether the thread is inside one of torch's collectives, called as such."""
    return any(frame.file.endswith(COLLECTIVES) for frame in frames[:4])


def waits_for_others(frames: Sequence[Frame]) -> bool:
    """Whether the thread is inside one of torch's collectives or DDP's, or waits for one that was started before."""
    return (
        in_collective(frames)
        or any(".wait(" in source_line(frame) and not STDLIB.search(frame.file) for frame in frames[:4])
        or any(WAITS_IN_C.search(frame.file) for frame in frames[:1])
    )


def waits_for_thread(frames: Sequence[Frame]) -> bool:
    """Whether the thread is inside join, queue.get, Event.wait or the interpreter's exit, or in an iterator of the user's."""
    is_next = bool(frames) and frames[0].name.endswith("__next__") and not LIBRARY.search(frames[0].file)
    return is_next or any(THREADS.search(frame.file) for frame in frames[:1])


def loads_batch(frames: Sequence[Frame]) -> bool:
    """Whether the thread waits for the workers of a data loader."""
    return any(frame.file.endswith(DATA_LOADER) and frame.name.endswith(NEXT_BATCH) for frame in frames)


def busy_worker(text: str) -> str | None:
    """Returns 'worker 4711 is in __getitem__ at data.py:17', the first worker below a rank's stacks that makes a batch."""
    for stacks in re.split(r"^(?=Process )", text.partition(f"\n{WORKERS}\n")[2], flags=re.MULTILINE):
        if (process := PROCESS.match(stacks)) and (site := call_site(main_frames(stacks))):
            return f"worker {process[1]} is in {site}"
    return None


def source_line(frame: Frame) -> str:
    """Returns the line of code, never from a cache: a script may change between two attempts. Empty where there is none."""
    try:
        return Path(frame.file).read_text(encoding="utf-8", errors="replace").splitlines()[frame.line - 1]
    except (OSError, IndexError):
        return ""


def call_site(frames: Sequence[Frame]) -> str | None:
    """Returns 'all_reduce, called at train/loop.py:185' or 'micro_batch at train/loop.py:152'; None without frames."""
    if not frames:
        return None
    called = next((frame for frame in frames if not LIBRARY.search(frame.file)), frames[0])
    place = f"{'/'.join(Path(called.file).parts[-2:])}:{called.line}"
    if loads_batch(frames):
        return f"DataLoader.__next__, called at {place}"
    collectives = [frame for frame in frames if frame.file.endswith(COLLECTIVES)]
    collective = frames[1:2] if frames[0].name == BACKWARD else collectives
    return f"{collective[-1].name}, called at {place}" if collective else f"{called.name} at {place}"


def rank_pids(run: RunDir, attempt: int, ranks: Iterable[int]) -> dict[int, int]:
    """Returns the process of each of these ranks that has been started, as launch/rank.py recorded it on their host."""
    pids = {}
    for rank in ranks:
        with suppress(OSError, ValueError):
            pids[rank] = int((run.logs(attempt) / f"{rank}.pid").read_text())
    return pids


def cpu_seconds(pid: int) -> float:
    """Returns the processor time of the process, its children and those it has waited for; 0 when it is gone."""
    seconds = 0.0
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for member in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):  # it has just ended
                used = member.cpu_times()
                seconds += used.user + used.system + used.children_user + used.children_system
    return seconds


def describe_process(pid: int) -> str:
    """Returns what /proc/PID reports, as text for a person."""
    folder = Path("/proc") / str(pid)
    lines = []
    with suppress(OSError):
        status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
        lines += [f"{name}: {status[name].strip()}" for name in STATUS_FIELDS if name in status]
    for task in sorted(folder.glob("task/*"), key=lambda path: int(path.name)):
        with suppress(OSError):
            name, wchan = (task / "comm").read_text().strip(), (task / "wchan").read_text().strip()
            place = "n/a" if wchan in ("", "0") else wchan
            lines.append(f"thread {task.name} {name}: state {process_state(int(task.name))}, waits in {place}")
    return "\n".join(lines)


def describe_host(run: RunDir) -> dict[str, Any]:
    """Returns load and memory from /proc, and the last health sample, which includes the GPUs."""
    facts: dict[str, Any] = {}
    for path in sorted(run.health_dir.glob("*.jsonl")):
        with suppress(ValueError, IndexError):
            facts[path.stem] = json.loads(read_end(path, SAMPLE_BYTES)[0].splitlines()[-1])
    for name in ("loadavg", "meminfo"):
        with suppress(OSError):
            lines = Path("/proc", name).read_text().splitlines()
            facts[name] = "; ".join(lines[:3])
    return facts


def recorder_env(user_env: Mapping[str, str], run: RunDir, logs_dir: Path) -> dict[str, str]:
    """Returns the variables that switch the recorders on; none where the user has set one, or where pipes cannot exist."""
    if any(name in user_env for name in (PIPE, DUMP, OLDER_DUMP)):
        return {}
    try:
        os.mkfifo(logs_dir / "test.pipe")
        (logs_dir / "test.pipe").unlink()
    except OSError:  # torch would end the rank
        text = f"{logs_dir} holds no named pipes: flight recorders cannot be read if the run hangs"
        append_event(run, "note", text=text)
        return {}
    return {PIPE: str(logs_dir / PIPE_STEM), DUMP: str(logs_dir / RECORDER_DUMP)}


def request_recordings(run: RunDir, attempt: int, ranks: Sequence[int]) -> list[Path]:
    """Asks the ranks that listen at their pipes; returns the files that they will write."""
    paths = []
    for rank in ranks:
        with suppress(OSError):  # no pipe, or nobody reads it
            pipe = os.open(run.logs(attempt) / f"{PIPE_STEM}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(pipe, b"1")
            finally:
                os.close(pipe)
            paths.append(run.logs(attempt) / f"{RECORDER_DUMP}{rank}")
    return paths


def wait_for_recordings(paths: Sequence[Path]) -> None:
    """Waits a short time for all files to be complete."""
    deadline, sizes = time.monotonic() + RECORDING_S, [0]
    while time.monotonic() < deadline:
        before, sizes = sizes, [path.stat().st_size if path.exists() else 0 for path in paths]
        if before == sizes and all(sizes):
            return
        time.sleep(PAUSE_S)


def remove_pipes(logs_dir: Path) -> None:
    """Removes the pipes: whatever copies the folder would wait at one."""
    for pipe in logs_dir.glob(f"{PIPE_STEM}*.pipe"):
        with suppress(OSError):
            pipe.unlink()
