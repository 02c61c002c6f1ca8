"""
The run folder: every file name in it, how each is written and read.

It is the only interface between a run and everyone who looks at it, so names and fields stay for good. Times are UTC.
Readers meet half-written last lines and go on. Nothing here knows what a step or a process is.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError


@dataclass(frozen=True)
class RunDir:
    """Paths of one run. Creating the object touches nothing."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config_toml(self) -> Path:
        return self.path / "config.toml"

    @property
    def plan_json(self) -> Path:
        return self.path / "plan.json"

    @property
    def dataset_json(self) -> Path:
        """Where the prepared token shards lie, and their fingerprint."""
        return self.path / "dataset.json"

    def facts(self, host: str) -> Path:
        """What a host was like when an attempt began."""
        return self.path / "facts" / f"{host}.json"

    @property
    def findings(self) -> Path:
        """What the checks said before the last attempt."""
        return self.path / "findings.json"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    def sample(self, step: int) -> Path:
        return self.samples / f"step_{step:06d}.txt"

    @property
    def tokenizer_json(self) -> Path:
        return self.path / "tokenizer" / "tokenizer.json"

    @property
    def lock(self) -> Path:
        return self.path / ".lock"

    def progress(self, rank: int) -> Path:
        return self.path / "progress" / str(rank)

    def logs(self, attempt: int) -> Path:
        return self.path / "logs" / str(attempt)

    def rank_log(self, attempt: int, rank: int) -> Path:
        return self.logs(attempt) / f"{rank}.log"

    def rank_error(self, attempt: int, rank: int) -> Path:
        """Written by a rank that ends with an exception: {time, type, message, fix, traceback, step}."""
        return self.logs(attempt) / f"{rank}.error.json"


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def append_json_line(path: Path, record: dict[str, Any]) -> None:
    """One write call per line, in append mode: lines of several writers do not mix."""
    line = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(fd, line.encode())
    finally:
        os.close(fd)


def append_event(run: RunDir, event: str, **fields: Any) -> None:
    append_json_line(run.events, {"time": utc_now(), "event": event, **fields})


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Complete lines only; a half-written last line, or one cut by a crash, is passed over."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                try:
                    record = json.loads(line)
                except ValueError:
                    continue
                if isinstance(record, dict):
                    yield record


def write_atomic(path: Path, text: str) -> None:
    """Complete or as before: a reader never meets half a file."""
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


class RunInUse(PacelineError):
    """Some process holds the run: `pid`, which may be gone while the workers it started still save and end."""

    def __init__(self, run: RunDir, pid: int | None):
        super().__init__(
            f"run {run.name} is in use by process {pid or 'unknown'}", fix="wait for it to end, or give another --name"
        )
        self.pid = pid


def lock_run(run: RunDir) -> int:
    """File descriptor that holds the run; it is released when every process that inherited it has ended."""
    fd = os.open(run.lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.pread(fd, 64, 0).decode(errors="replace").strip()
        os.close(fd)
        raise RunInUse(run, int(holder) if holder.isdigit() else None) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, str(os.getpid()).encode(), 0)
    return fd
