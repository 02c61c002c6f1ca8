"""
The facts of one host as JSON: `python -m paceline.check.probes.facts`, with the request on stdin.

Each probe is a process with its own deadline, because a wedged driver, a dead network disk or a broken build may hang or crash it.
All are started at once. A probe that hangs, crashes or answers no JSON is itself a fact, and the facts that it would have filled
are None. Nothing here judges: the verdicts do, from these facts alone, on whatever host. docs/facts.schema.json describes every
field. No key, token or password leaves the host: paceline/redaction.py removes them.
"""

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from paceline.config import Config, cache_dir
from paceline.errors import PacelineError
from paceline.redaction import SET, redact, secrecy
from paceline.rundir import utc_now
from paceline.units import format_exit

Json = dict[str, Any]
VERSION = 1
ENDING_S = 0.2  # a killed process may stay in a system call of a dead disk or driver
MAX_ANSWER_BYTES = 16 << 20
MAX_STDERR_BYTES = 4096
QUOTED_CHARS = 120  # of an answer that is not JSON

BUSY = "still computing after"
BUSY_TIMES = 4  # times its deadline a probe may compute in all
EXTENSION = 0.1  # of its deadline: how much a probe that computes gets at a time
OVERTIME_S = 2.0  # after the last moment a probe ends itself, in case the process that started it is gone
RELEVANT = re.compile(
    r"(CUDA|NVIDIA|NCCL|GLOO|OMP|MKL|LD|MASTER|SLURM|WANDB|HF|TOKENIZERS|KMP|OPENBLAS|TORCH|PYTORCH|TRITON|UCX|TP)_"
    r"|TORCH|PYTHON|USE_LIBUV$|NNODES$|OMPI_COMM_WORLD_SIZE$|RANK$|LOCAL_RANK$|WORLD_SIZE$|TMPDIR$|XDG_CACHE_HOME$|CXX$|CC$|CONDA_PREFIX$|VIRTUAL_ENV$"
)
HF_SHOWN = {"HF_HOME", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_ENDPOINT"}
BARE_KEY = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[0-9A-Fa-f]{32,}|(?=.*\d)(?=.*[a-z])(?=.*[A-Z])[\w+=-]{32,}")

OnProbe = Callable[[str], None]  # takes the name of a probe that is done


@dataclass(frozen=True)
class Probe:
    """A process, and the parts of the facts that it fills."""

    name: str
    fills: tuple[str, ...]
    command: tuple[str, ...]
    deadline_s: float = 5.0


def _probe(name: str, *fills: str, module: str | None = None, deadline_s: float = 5.0) -> Probe:
    """Returns the probe that `module` runs, by default NAME_probe. -P: a file in the current folder must not shadow a module."""
    command = (sys.executable, "-P", "-m", f"paceline.check.probes.{module or name}_probe")
    return Probe(name, fills or (name,), command if module is None else (*command, name), deadline_s)


PROBES = (
    # torch starts first because it takes longest; without -P, because a worker is started without it too
    Probe("torch", ("torch",), (sys.executable, "-m", "paceline.check.probes.torch_probe"), deadline_s=30.0),
    _probe("storage", deadline_s=7.0),  # each place has 3 s of it, the speed 1.5
    _probe("gpu", "driver", "nvml_error", "gpus", "nvidia_cards"),
    _probe("host"),
    _probe("python", "python", "packages", module="host"),
    _probe("network"),
    _probe("tools", module="host"),
    _probe("text", module="storage"),
)

FOLDER_PROBES = ("storage", "text")  # of a machine that starts a run and takes no part in it
DEFAULTS: Json = {
    **dict.fromkeys((
        "run_dir", "data", "val_data", "text_field", "tokenizer", "vocab_size", "cache_dir", "port", "torch_path", "cached_torch",
        "probes",
    )),
    "measure_disk": True,
}  # fmt: skip


AUTO = "auto"  # the cache of this host, or the file in it


def gather_facts(*, on_probe: OnProbe | None = None, **request: Any) -> Json:
    """Returns the facts of this host. Takes as long as the slowest probe, at most its deadline; a failing probe raises nothing.

    request: keys of DEFAULTS. torch_path is another install or a source tree, probed instead. cached_torch is a file that keeps the
    answer about torch from one launch to the next, until something changes. probes: the names of those to run, None for all.
    """
    assert request.keys() <= DEFAULTS.keys(), request
    names = request.get("probes")
    probes = [probe for probe in PROBES if names is None or probe.name in names]
    return ask_probes(probes, {**DEFAULTS, **request}, on_probe=on_probe)


def ask_probes(probes: Sequence[Probe], request: Mapping[str, Any], *, on_probe: OnProbe | None = None) -> Json:
    """Runs all probes at once and combines their answers."""
    facts: Json = {"version": VERSION, "time": utc_now(), "probes": dict.fromkeys(probe.name for probe in probes)}
    facts |= {part: None for probe in probes for part in probe.fills}
    with closing(wait_for_answers(probes, request)) as processes:
        for process in processes:
            name, answer = process.probe.name, process.answer or {}
            error = process.error or answer.get("error")
            facts |= {part: answer.get(part) for part in process.probe.fills}
            entry = {"ok": error is None, "seconds": round(process.seconds, 3), "error": error}
            if answer.get("cached"):
                entry |= {"seconds": 0.0, "cached": True}
            facts["probes"][name] = entry
            if on_probe is not None:
                on_probe(name)
    facts["env"] = relevant_env(os.environ)
    redacted: Json = redact(facts)
    return redacted


class ProbeProcess:
    """A probe's process, from its start to its answer."""

    def __init__(self, probe: Probe, request: Mapping[str, Any], selector: selectors.BaseSelector):
        self.probe, self.selector = probe, selector
        self.answer: Json | None = None
        self.error: str | None = None
        self.stdout = self.stderr = b""
        self.is_done, self.idle_looks = False, 0
        self.started, self.seconds, self.allowed_s, self.is_busy = time.monotonic(), 0.0, probe.deadline_s, False
        self.process: subprocess.Popen[bytes] | None = None
        try:
            self.process = subprocess.Popen(
                probe.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # a group with its children, which Ctrl-C does not reach
            )
        except OSError as error:
            self.error, self.is_done = error_line(error), True
            return
        assert self.process.stdin and self.process.stdout and self.process.stderr
        with suppress(BrokenPipeError), self.process.stdin as stdin:  # it may have crashed already
            limits = {"deadline_s": probe.deadline_s, "most_s": BUSY_TIMES * probe.deadline_s + OVERTIME_S}
            stdin.write(json.dumps({**request, **limits}, default=str).encode())
        for pipe in (self.process.stdout, self.process.stderr):
            selector.register(pipe, selectors.EVENT_READ, self)

    @property
    def time_left_s(self) -> float:
        return 0.0 if self.is_done else max(0.0, self.started + self.allowed_s - time.monotonic())

    def extend(self) -> bool:
        """Gives a probe that is computing at its deadline more time: on a busy machine it waits for a core, and does not hang."""
        if self.is_done or self.process is None:
            return False
        self.idle_looks = 0 if is_computing(self.process.pid) else self.idle_looks + 1
        if self.idle_looks > 1:  # one look may fall on a moment in which it waits for a page
            return False
        self.is_busy = self.allowed_s >= BUSY_TIMES * self.probe.deadline_s
        self.allowed_s += self.probe.deadline_s * EXTENSION
        return not self.is_busy

    def read(self, pipe: IO[bytes]) -> None:
        """Reads what is there. The probe is done with its answer, after which its process may hang, or at the end of its output."""
        chunk = os.read(pipe.fileno(), 1 << 16)
        if not chunk:
            self.selector.unregister(pipe)
        if self.process is not None and pipe is self.process.stderr:
            self.stderr = (self.stderr + chunk)[-MAX_STDERR_BYTES:]
            return
        self.stdout += chunk
        for line in self.stdout.split(b"\n")[:-1]:
            if line.startswith(b"{") and self.answer is None:
                with suppress(ValueError):
                    self.answer = json.loads(line)
        self.is_done = not chunk or self.answer is not None or len(self.stdout) > MAX_ANSWER_BYTES

    def end(self) -> None:
        """Kills the probe's process group; reports the deadline or the exit status if it gave no answer."""
        self.seconds = time.monotonic() - self.started
        if self.process is None:
            return
        assert self.process.stdout and self.process.stderr
        exit_code = None
        with suppress(subprocess.TimeoutExpired):
            exit_code = self.process.wait(ENDING_S if self.is_done else 0)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(ENDING_S)
        os.set_blocking(self.process.stderr.fileno(), False)
        self.stderr += self.process.stderr.read() or b""
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe in self.selector.get_map():
                self.selector.unregister(pipe)
            pipe.close()
        if self.answer is None:
            late = f"{BUSY} {self.allowed_s:g} s" if self.is_busy else f"no answer in {self.allowed_s:g} s"
            self.error = self.describe_end(exit_code) if self.is_done else late

    def describe_end(self, exit_code: int | None) -> str:
        if exit_code is not None and exit_code < 0:
            return format_exit(exit_code)
        last = self.stderr.decode(errors="replace").strip().splitlines()
        if self.stdout:
            return f"answered no JSON: {self.stdout[:QUOTED_CHARS].decode(errors='replace').strip()!r}"
        return last[-1] if last else f"ended with exit code {exit_code} and no answer"


def wait_for_answers(probes: Sequence[Probe], request: Mapping[str, Any]) -> Generator[ProbeProcess]:
    """Starts all probes and yields each one that is done, with its answer or with how it ended."""
    running: list[ProbeProcess] = []
    with selectors.DefaultSelector() as selector:
        try:
            for probe in probes:
                running.append(ProbeProcess(probe, request, selector))
            while running:
                for key, _ in selector.select(min(process.time_left_s for process in running)):
                    key.data.read(key.fileobj)
                for process in [process for process in running if process.time_left_s == 0 and not process.extend()]:
                    process.end()
                    running.remove(process)
                    yield process
        finally:
            for process in running:
                process.end()


def is_computing(group: int) -> bool:
    """Returns whether a process of the group is on a core or waits for one, by /proc."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            state, _, process_group, *_ = path.read_text().rpartition(")")[2].split()
            if state == "R" and int(process_group) == group:
                return True
    return False


def main() -> int:
    """Answers a request from another host: the arguments of gather_facts, all optional. cached_torch and cache_dir may be AUTO."""
    try:
        request = json.loads(sys.stdin.read() or "{}")
        if unknown := sorted(request.keys() - DEFAULTS.keys()):
            raise ValueError(f"unknown: {', '.join(unknown)}")
        if request.get("cached_torch") == AUTO:
            request["cached_torch"] = str(cache_dir(Config()) / "torch.json")
        if request.get("cache_dir") == AUTO:
            request["cache_dir"] = str(cache_dir(Config()))
    except (ValueError, AttributeError) as error:
        fix = f"send a JSON object with {', '.join(DEFAULTS)}"
        print(PacelineError(f"no request for facts: {error}", fix=fix), file=sys.stderr)
        return 2
    with suppress(KeyboardInterrupt):
        print(json.dumps(gather_facts(**request)))
        return 0
    return 130


def relevant_env(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that affect a run, sorted; `set` stands for a value that may be secret."""
    shown = {}
    for name in sorted(filter(RELEVANT.match, env)):
        hidden = secrecy(name) or (name.startswith("HF_") and name not in HF_SHOWN)
        shown[name] = SET if env[name] and (hidden or BARE_KEY.fullmatch(env[name])) else redact(env[name])
    return shown


def answer(probe: Callable[[Json], Json]) -> None:
    """Runs a probe's whole process: reads the request, prints the answer. Other output to stdout goes to stderr."""
    line = os.dup(1)
    os.dup2(2, 1)
    request: Json = json.loads(sys.stdin.read() or "{}")
    if request.get("most_s"):
        signal.setitimer(signal.ITIMER_REAL, request["most_s"])  # SIGALRM ends this process
    try:
        facts = probe(request)
    except Exception as error:  # a probe that fails is a fact
        facts = {"error": error_line(error)}
    with os.fdopen(line, "w", encoding="utf-8") as out:
        out.write(json.dumps(facts) + "\n")
    sys.stderr.flush()
    os._exit(0)  # threads that still hang in a system call are left behind


def error_line(error: BaseException) -> str:
    """Returns the type and the first line: `OSError: [Errno 5] Input/output error`."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
