"""
One step of a build as a process: its whole output in a log, its progress shown, ended with all it started, its failure read.

A step is a session of its own. Ctrl-C and SIGTERM end all of that session, so that no compiler is left behind; ninja then
forgets what was half written, and the next build goes on from there.
"""

import ctypes
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from paceline.errors import PacelineError
from paceline.kernel_files import names_in
from paceline.units import format_duration

STATUS = "[%f/%t] "  # NINJA_STATUS: finished and all steps of this call
PROGRESS = re.compile(r"^\[(\d+)/(\d+)\] ")
ENDING_S = 5.0
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_PDEATHSIG = 1  # linux/prctl.h
EVERY_S, TENTHS = 60.0, 10  # a plain line of progress comes so often
SHOWN_LINES = 6
KEPT_LINES = 4000  # for what is said of a failure; the log has all

FAILED = re.compile(r"^FAILED: (?:\[code=\d+\] )?(\S+)")
COMPILED = re.compile(r"\s-c (\S+)")
COMPILER_ERROR = re.compile(r"(^|[\s:])(fatal error|error|undefined reference)\b", re.IGNORECASE)
KILLED = re.compile(r"Killed|died due to signal 9|out of memory|Cannot allocate memory|signal terminated program")
FULL = re.compile(r"No space left on device")
CMAKE_ERROR = re.compile(r"^CMake Error\b")
SUBMODULES = "git -C {source} submodule update --init --recursive"
CMAKE_FIXES = (  # what CMake says -> what mends it
    (r"Could not find UV|libuv|uv\.h", SUBMODULES),
    (r"does not contain a CMakeLists\.txt|Cannot find source file", SUBMODULES),
    (
        r"requires CUDA|CUDA cannot be found|CMAKE_CUDA_COMPILER|conflicting CUDA",
        "export CUDA_HOME=/usr/local/cuda-13.0",
    ),
    (r"cuDNN", "USE_CUDNN=0 before the command, or install cuDNN"),
    (r"Could NOT find (Python|NumPy)|Python\.h", "apt install python3-dev; pip install numpy"),
    (r"CMake [\d.]+ or higher is required", "pip install --upgrade cmake"),
    (r"GCC-[\d.]+ or newer|C\+\+\d+ support", "export CXX=g++-13 CC=gcc-13, a newer compiler"),
)


class StepInterrupted(KeyboardInterrupt):
    """Ctrl-C or a signal during a step. done, total: of what ninja had to do; 0 where it told nothing."""

    def __init__(self, done: int, total: int):
        super().__init__()
        self.done, self.total = done, total


OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Ended:
    exit_code: int
    lines: tuple[str, ...]  # the last ones


def run_step(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    log: Path,
    cwd: Path | None = None,
    on_progress: OnProgress | None = None,
) -> Ended:
    """Raises StepInterrupted when it was interrupted, after all of it has ended."""
    kept: list[str] = []
    progress = 0, 0
    libc = ctypes.CDLL(None)  # before the fork
    with interrupts() as release, log.open("a", encoding="utf-8", errors="replace") as out:
        out.write(f"$ {shlex.join(command)}\n")
        process = subprocess.Popen(
            command,
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGINT),  # should we be killed
        )
        assert process.stdout is not None
        try:
            release()
            for line in process.stdout:
                out.write(line)
                kept.append(line.rstrip("\n"))
                if len(kept) > 2 * KEPT_LINES:
                    del kept[:-KEPT_LINES]
                if found := PROGRESS.match(line):
                    progress = int(found[1]), int(found[2])
                    if on_progress is not None:
                        out.flush()
                        on_progress(*progress)
            process.wait()
        except KeyboardInterrupt:
            raise StepInterrupted(*progress) from None
        finally:
            end_session(process)
            process.stdout.close()
    return Ended(process.returncode, tuple(kept))


@contextmanager
def interrupts() -> Iterator[Callable[[], None]]:
    """SIGTERM and SIGHUP end the work as Ctrl-C does, unless ignored (nohup). All wait until what is given here is called:
    between fork and exec they would break the start of the step, or leave a process that nobody knows.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    held, came = True, False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        if not held:
            raise KeyboardInterrupt

    def release() -> None:
        nonlocal held
        held = False
        if came:
            raise KeyboardInterrupt

    heard = [number for number in ENDING_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in heard}
    try:
        yield release
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_session(process: subprocess.Popen[str]) -> None:
    """Interrupts the step, which ends what it started; kills what is left. ninja gives every compiler a group of its own."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):  # a second Ctrl-C: no more waiting
            process.wait(ENDING_S)
    for pid in map(int, filter(str.isdigit, names_in("/proc"))):
        with suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == process.pid:
                os.kill(pid, signal.SIGKILL)
    process.wait()


class PlainProgress:
    """Lines for a pipe: at every tenth, and no more than a minute apart while there is progress."""

    def __init__(self, say: Callable[[str], None], label: str):
        self._say, self._label = say, label
        self._started = self._said_at = time.monotonic()
        self._tenths = 0

    def __call__(self, done: int, total: int) -> None:
        now, tenths = time.monotonic(), TENTHS * done // max(total, 1)
        if tenths == self._tenths and now - self._said_at < EVERY_S:
            return
        self._said_at, self._tenths = now, tenths
        took = now - self._started
        left = took / done * (total - done) if done else None
        self._say(f"{self._label} {done:,}/{total:,} | {format_duration(took)} | eta {format_duration(left)}")


def configure_failed(ended: Ended, *, source: Path, log: Path) -> PacelineError:
    quoted = cmake_error(ended.lines)
    matching = (fix for pattern, fix in CMAKE_FIXES if any(re.search(pattern, line, re.IGNORECASE) for line in quoted))
    fix = next(matching, "the log tells more: {log}")
    words = "\n         ".join(quoted) or f"cmake ended with {ended.exit_code}"
    return PacelineError(f"the build cannot be configured: {words}", fix=fix.format(source=source, log=log))


def cmake_error(lines: Sequence[str]) -> list[str]:
    """CMake's own words: the first error, else the last lines."""
    start = next((i for i, line in enumerate(lines) if CMAKE_ERROR.match(line)), None)
    return [line for line in lines[-SHOWN_LINES:] if line.strip()] if start is None else cmake_message(lines[start:])


def cmake_message(lines: Sequence[str]) -> list[str]:
    """The error or warning in the first line, up to the call stack or the next message."""
    quoted = [lines[0]]
    for line in lines[1:]:
        if line.startswith(("Call Stack", "-- ", "CMake ")) or len(quoted) == SHOWN_LINES:
            break
        if line.strip():
            quoted.append(line.strip())
    return quoted


def compile_failed(ended: Ended, *, jobs: int, log: Path) -> PacelineError:
    """Which file, the compiler's first words about it, and what mends it."""
    failures = list(find_failures(ended.lines))
    told = "\n".join(line for _, lines in failures for line in lines) or "\n".join(ended.lines[-SHOWN_LINES:])
    if ended.exit_code == -signal.SIGKILL or KILLED.search(told):
        killed = failures[0][0] if failures else "ninja"
        fewer = max(1, jobs // 2)
        return PacelineError(
            f"killed while it compiled {killed}: memory for {jobs} compilers at once was not there",
            fix=f"the same command with --jobs {fewer} goes on where it stopped" if fewer < jobs
            else "more memory or swap, then the same command goes on",
        )  # fmt: skip
    if FULL.search(told):
        return PacelineError("the disk is full", fix="make room, then the same command goes on where it stopped")
    if not failures:
        return PacelineError(f"ninja ended with {ended.exit_code}: {told}", fix=f"the log has all of it: {log}")
    name, lines = failures[0]
    quoted = [line for line in lines if COMPILER_ERROR.search(line)][:SHOWN_LINES] or lines[-SHOWN_LINES:]
    more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
    words = "\n         ".join(quoted)
    return PacelineError(
        f"{name}{more} does not compile: {words}", fix=f"the log has all of it: {log}; then the same command goes on"
    )


def find_failures(lines: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """Each failed step: its source file, or what it makes where no compiler was called, and what was printed."""
    name: str | None = None
    printed: list[str] = []
    command_next = False
    for line in lines:
        failed = FAILED.match(line)
        if (failed or PROGRESS.match(line) or line.startswith("ninja:")) and name is not None:
            yield name, printed
            name = None
        if failed:
            name, printed, command_next = failed[1], [], True
        elif command_next:
            compiled = COMPILED.search(line)
            name, command_next = (compiled[1] if compiled else name), False
        elif name is not None:
            printed.append(line)
    if name is not None:
        yield name, printed


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
