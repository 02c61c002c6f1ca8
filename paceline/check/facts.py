"""
What is true on one host, as JSON: `python -m paceline.check.facts`, the request on stdin.

Each probe is a process of its own with its own deadline, all started at once; one that hangs, crashes or answers no
JSON is itself a fact, and what it would have told is None. Nothing here judges: verdicts.py does, from these facts alone,
on whatever host. docs/facts.schema.json describes every field. Nothing secret is in them (redaction.py).
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.check.probe import Json, error_line
from paceline.check.redaction import redact, shown_env
from paceline.rundir import utc_now

VERSION = 1
ENDING_S = 0.2  # a killed process that is still in a system call of a dead disk or driver is not waited for
MAX_ANSWER_BYTES = 16 << 20
MAX_COMPLAINT_BYTES = 4096
SHOWN_CHARS = 120  # of an answer that is no JSON

OnProbe = Callable[[str, Json], None]  # the probe's name and its entry in "probes"


@dataclass(frozen=True)
class Probe:
    """A process to ask, and the parts of the facts that it fills."""

    name: str
    fills: tuple[str, ...]
    command: tuple[str, ...]
    deadline_s: float = 5.0


def _probe(name: str, *fills: str, **settings: Any) -> Probe:
    # -P: a file in the current folder must not shadow a module
    return Probe(name, fills or (name,), (sys.executable, "-P", "-m", f"paceline.check.{name}_probe"), **settings)


PROBES = (
    # torch: the first to start, for it takes longest; without -P, since a worker is started without it too
    Probe("torch", ("torch",), (sys.executable, "-m", "paceline.check.torch_probe"), deadline_s=30.0),
    _probe("storage", deadline_s=7.0),  # each place has 3 s of it, the speed 1.5
    _probe("gpu", "driver", "nvml_error", "gpus", "nvidia_cards"),
    _probe("host"),
    _probe("python", "python", "packages"),
    _probe("network"),
    _probe("tools"),
    _probe("text"),
)

DEFAULTS: Json = {
    **dict.fromkeys(("run_dir", "data", "tokenizer", "cache_dir", "port", "vocab_size", "torch_path", "cached_torch")),
    "measure_disk": True,
}


def gather_facts(
    *,
    run_dir: Path | None = None,
    data: str | None = None,
    tokenizer: str | None = None,
    cache_dir: Path | None = None,
    port: int | None = None,
    vocab_size: int | None = None,
    torch_path: Path | None = None,
    measure_disk: bool = True,
    cached_torch: Path | None = None,
    on_probe: OnProbe | None = None,
) -> Json:
    """The facts of this host. Never raises for what it finds; takes as long as its slowest probe, or that one's deadline.

    torch_path: another install, or a source tree, to look at instead. cached_torch: a file in which the answer about
    torch is kept from one launch to the next, as long as nothing of it has changed.
    """
    request = {
        "run_dir": run_dir and str(run_dir),
        "data": data,
        "tokenizer": tokenizer,
        "cache_dir": cache_dir and str(cache_dir),
        "port": port,
        "vocab_size": vocab_size,
        "torch_path": torch_path and str(torch_path),
        "measure_disk": measure_disk,
        "cached_torch": cached_torch and str(cached_torch),
    }
    assert request.keys() == DEFAULTS.keys()
    return ask_probes(PROBES, request, on_probe=on_probe)


def ask_probes(probes: Sequence[Probe], request: Mapping[str, Any], *, on_probe: OnProbe | None = None) -> Json:
    """Asks all at once and puts their answers together."""
    facts: Json = {"version": VERSION, "time": utc_now(), "probes": dict.fromkeys(probe.name for probe in probes)}
    facts |= {part: None for probe in probes for part in probe.fills}
    with closing(wait_for_answers([Asked(probe, request) for probe in probes])) as answers:
        for asked in answers:
            answer = asked.answer or {}
            error = asked.error or answer.get("error")
            facts |= {part: answer.get(part) for part in asked.probe.fills}
            entry = {"ok": error is None, "seconds": round(asked.seconds, 3), "error": error}
            if answer.get("cached"):
                entry |= {"seconds": 0.0, "cached": True}
            facts["probes"][asked.probe.name] = redact(entry)
            if on_probe is not None:
                on_probe(asked.probe.name, facts["probes"][asked.probe.name])
    facts["env"] = shown_env(os.environ)
    shown: Json = redact(facts)
    return shown


@dataclass(eq=False)
class Asked:
    """A probe's process, from its start to its answer."""

    probe: Probe
    request: Mapping[str, Any]
    answer: Json | None = None
    error: str | None = None
    seconds: float = 0.0
    process: subprocess.Popen[bytes] | None = None
    printed: bytes = b""
    complained: bytes = b""
    started: float = field(default_factory=time.monotonic)

    def start(self) -> None:
        self.started = time.monotonic()
        try:
            self.process = subprocess.Popen(
                self.probe.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # with what it starts it is one group; Ctrl-C reaches the asker alone
            )
        except OSError as error:
            self.error = error_line(error)
            return
        assert self.process.stdin is not None
        with suppress(BrokenPipeError), self.process.stdin as stdin:  # it may have crashed already
            stdin.write(json.dumps({**self.request, "deadline_s": self.probe.deadline_s}).encode())

    @property
    def time_left_s(self) -> float:
        return self.started + self.probe.deadline_s - time.monotonic()

    def hear(self, chunk: bytes) -> bool:
        """Takes what was printed; True when that is the whole answer. The process may hang on its way out."""
        self.printed += chunk
        for line in self.printed.split(b"\n")[:-1]:
            if line.startswith(b"{"):
                with suppress(ValueError):
                    self.answer = json.loads(line)
                    return True
        return len(self.printed) > MAX_ANSWER_BYTES

    def end(self, error: str | None = None) -> None:
        """Leaves nothing of it running; without an answer says how it ended."""
        self.seconds = time.monotonic() - self.started
        exit_code = None
        if self.process is not None:
            with suppress(subprocess.TimeoutExpired):
                exit_code = self.process.wait(0 if error else ENDING_S)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(ENDING_S)
            assert self.process.stdout and self.process.stderr
            os.set_blocking(self.process.stderr.fileno(), False)
            self.complained += self.process.stderr.read() or b""
            self.process.stdout.close()
            self.process.stderr.close()
        if self.answer is None and self.error is None:
            self.error = error or self.describe_end(exit_code)

    def describe_end(self, exit_code: int | None) -> str:
        if exit_code is not None and exit_code < 0:
            return f"ended by {signal.Signals(-exit_code).name}"
        last = self.complained.decode(errors="replace").strip().splitlines()
        if self.printed:
            return f"answered no JSON: {self.printed[:SHOWN_CHARS].decode(errors='replace').strip()!r}"
        return last[-1] if last else f"ended with exit code {exit_code} and no answer"


def wait_for_answers(asked: Sequence[Asked]) -> Generator[Asked]:
    """Starts all, and gives each when it is done: with its answer, or with how it ended."""
    running: set[Asked] = set()
    try:
        with selectors.DefaultSelector() as selector:
            for each in asked:
                each.start()
                running.add(each)
                if each.process is not None:
                    selector.register(each.process.stdout, selectors.EVENT_READ, each)  # type: ignore[arg-type]
                    selector.register(each.process.stderr, selectors.EVENT_READ, each)  # type: ignore[arg-type]
            while running:
                done = read_answers(selector, running)
                for each, error in done.items():
                    for pipe in (each.process.stdout, each.process.stderr) if each.process else ():
                        if pipe in selector.get_map():
                            selector.unregister(pipe)  # type: ignore[arg-type]
                    each.end(error)
                    running.discard(each)
                    yield each
    finally:
        for each in running:
            each.end("interrupted")


def read_answers(selector: selectors.BaseSelector, running: set[Asked]) -> dict[Asked, str | None]:
    """Waits for the next to be printed, or for the next deadline; returns those that are done, late ones with an error."""
    done: dict[Asked, str | None] = {each: None for each in running if each.process is None}
    if done:
        return done
    for key, _ in selector.select(max(0.0, min(each.time_left_s for each in running))):
        each, chunk = key.data, os.read(key.fd, 1 << 16)
        if key.fileobj is each.process.stderr:
            each.complained = (each.complained + chunk)[-MAX_COMPLAINT_BYTES:]
            if not chunk:
                selector.unregister(key.fileobj)
        elif not chunk or each.hear(chunk):
            done[each] = None
    late = [each for each in running if each.time_left_s <= 0 and each not in done]
    return done | {each: f"no answer in {each.probe.deadline_s:g} s" for each in late}


def main() -> int:
    """What a remote host runs: the keys of the request are those of gather_facts, all of them optional."""
    try:
        request = json.loads(sys.stdin.read() or "{}")
        unknown = sorted(request.keys() - DEFAULTS.keys())
        problem = f"unknown: {', '.join(unknown)}" if unknown else None
    except (ValueError, AttributeError) as error:
        problem = str(error)
    if problem:
        print(
            f"error: no request for facts: {problem}\n  fix: send a JSON object with {', '.join(DEFAULTS)}",
            file=sys.stderr,
        )
        return 2
    try:
        facts = ask_probes(PROBES, {**DEFAULTS, **request})
    except KeyboardInterrupt:
        return 130
    print(json.dumps(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
