"""
What a process is doing just now, from outside: the Python stacks of its threads, and what that says about collectives.

py-spy takes them from any Python process, a stopped one included, where it is installed and may. A rank of our trainer writes its
own at SIGUSR2 (train/progress.py). No torch, and nothing here waits for long: the process asked may never answer.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.launch.hang import STILL, process_state
from paceline.rundir import RunDir

PY_SPY_S = 4.0  # for all ranks together
ANSWER_S = 1.0  # for a rank's own handler, which needs a few ms
PAUSE_S = 0.02
FRAME = re.compile(
    r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$'  # faulthandler
    r"|^\s+(?P<name2>\S.*) \((?P<file2>[^()]+):(?P<line2>\d+)\)$"  # py-spy
)
MAIN_THREAD = re.compile(r'^Thread \S+ \([^)]*\): "MainThread"')
COLLECTIVES = "torch/distributed/distributed_c10d.py"
STDLIB = re.compile(
    r"/lib/python3\.\d+/(?!(site|dist)-packages/)|<frozen "
)  # a queue, a lock, a child: waits for no rank
LIBRARY = re.compile(r"/(site|dist)-packages/(?!paceline/)|/lib/python3\.\d+/|<frozen ")


@dataclass(frozen=True)
class Frame:
    name: str
    file: str
    line: int

    @property
    def where(self) -> str:
        """With as much of the path as tells files apart."""
        return f"{'/'.join(Path(self.file).parts[-2:])}:{self.line}"

    @property
    def waits_for_others(self) -> bool:
        """Inside torch's collectives, or at the wait for one that was started before."""
        return self.file.endswith(COLLECTIVES) or (".wait(" in self.source and not STDLIB.search(self.file))

    @property
    def source(self) -> str:
        try:
            return Path(self.file).read_text(encoding="utf-8", errors="replace").splitlines()[self.line - 1].strip()
        except (OSError, IndexError):
            return ""


def take_stacks(run: RunDir, attempt: int, pids: Mapping[int, int], *, own: bool) -> dict[int, str]:
    """rank -> the text of its stacks, with the tool that took them; of those ranks that gave any. own: our trainer's ranks."""
    py_spy = find_py_spy()
    texts = py_spy_stacks(py_spy, pids) if py_spy else {}
    if own:
        texts |= asked_stacks(run, attempt, {rank: pid for rank, pid in pids.items() if rank not in texts})
    return texts


def find_py_spy() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def py_spy_stacks(py_spy: str, pids: Mapping[int, int]) -> dict[int, str]:
    """All at once. It cannot pause a process that stands still already, and need not."""
    dumps = {}
    for rank, pid in pids.items():
        how = ["--nonblocking"] if process_state(pid) in STILL else []
        command = [py_spy, "dump", "--full-filenames", *how, "--pid", str(pid)]
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
            texts[rank] = f"py-spy\n{text}"
    return texts


def asked_stacks(run: RunDir, attempt: int, pids: Mapping[int, int]) -> dict[int, str]:
    """Of ranks that have said they would answer: to any other process SIGUSR2 is the end."""
    before = {}
    for rank, pid in pids.items():
        if process_state(pid) not in STILL and catches(pid, signal.SIGUSR2):
            with suppress(OSError):
                before[rank] = run.rank_stacks(attempt, rank).stat().st_size
                os.kill(pid, signal.SIGUSR2)
    deadline, texts = time.monotonic() + ANSWER_S, dict[int, str]()
    while len(texts) < len(before) and time.monotonic() < deadline:
        sizes = {rank: run.rank_stacks(attempt, rank).stat().st_size for rank in before}
        time.sleep(PAUSE_S)
        for rank, size in sizes.items():
            path = run.rank_stacks(attempt, rank)
            if size > before[rank] and path.stat().st_size == size:  # it has come, and nothing more comes
                with path.open(encoding="utf-8", errors="replace") as file:
                    file.seek(before[rank])
                    texts[rank] = f"faulthandler\n{file.read()}"
    return texts


def catches(pid: int, signum: signal.Signals) -> bool:
    """By the mask of caught signals in /proc/PID/status."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return bool(caught and int(caught[1], 16) >> (signum - 1) & 1)


def main_frames(text: str) -> list[Frame]:
    """Of the main thread, the innermost first. py-spy names it; faulthandler has it last."""
    threads: list[list[Frame]] = []
    named: list[Frame] | None = None
    for line in text.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            threads.append([])
            named = threads[-1] if MAIN_THREAD.match(line) else named
        elif threads and (found := FRAME.match(line)):
            name, file, number = (found[key] or found[f"{key}2"] for key in ("name", "file", "line"))
            threads[-1].append(Frame(name, file, int(number)))
    return named or (threads[-1] if threads else [])


def waits_for_others(frames: list[Frame]) -> bool:
    """Whether the thread is inside a collective: it has come to it, and the end is up to other ranks."""
    return any(frame.waits_for_others for frame in frames[:4])


def what_it_does(frames: list[Frame]) -> str | None:
    """'all_reduce, called at train/loop.py:185', or 'micro_batch at train/loader.py:80'; None where nothing is known."""
    if not frames:
        return None
    called = next((frame for frame in frames if not LIBRARY.search(frame.file)), frames[0])
    collective = [frame for frame in frames if frame.file.endswith(COLLECTIVES)]
    if collective:
        return f"{collective[-1].name}, called at {called.where}"
    return f"{called.name} at {called.where}"
