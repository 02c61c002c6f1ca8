"""
The run folder: every file name in it, how each is written and read.

It is the only interface between a run and everyone who looks at it, so names and fields stay for good. Times are UTC.
Readers meet half-written last lines and go on. Nothing here knows what a step or a process is.
"""

import errno
import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError

LOCK_TRIES, LOCK_TRY_S = 3, 0.02  # whoever only looks at a run, `is_locked`, holds it for some microseconds
RECORDED = "comm_lib_trace_rank_"  # as torch calls what its flight recorder writes; the rank follows
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


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

    def trouble(self, step: int) -> Path:
        """What is known of a step whose loss or gradient was no number, or leapt; a file for each attempt and rank."""
        return self.path / "trouble" / f"step_{step:06d}"

    @property
    def skipped_json(self) -> Path:
        """The batches of rows that the run passes over, after a rollback."""
        return self.path / "skipped.json"

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

    def rank_stacks(self, attempt: int, rank: int) -> Path:
        """Where a rank of our trainer writes the stacks of its threads whenever it is sent SIGUSR2; else empty."""
        return self.logs(attempt) / f"{rank}.stacks"

    def recorded(self, attempt: int) -> list[Path]:
        """Of its last collectives by each rank that was asked, or that met torch's own timeout (launch/recorder.py)."""
        return sorted(self.logs(attempt).glob(f"{RECORDED}*"))

    @property
    def health_dir(self) -> Path:
        """A file for each host: samples of its GPUs, memory, disk and network."""
        return self.path / "health"

    def health(self, host: str) -> Path:
        return self.health_dir / f"{host}.jsonl"

    def track(self, name: str) -> Path:
        """How far a tracker has come."""
        return self.path / "track" / f"{name}.json"

    def hang(self, attempt: int) -> Path:
        """What was known of a hang: hang.json and a file for each rank."""
        return self.path / "hangs" / str(attempt)


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


_waiting: dict[Path, bytes] = {}  # lines of this process that found no room, by file


def append_json_line(path: Path, record: dict[str, Any]) -> None:
    """One write call per line, in append mode: lines of several writers do not mix.

    On a full disk the line is said on stderr, waits for the next one that finds room, and what is at work goes on;
    PacelineError where the folder is gone or cannot be written.
    """
    line = (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode()
    lines = _waiting.pop(path, b"") + line
    try:
        with _opened_to_append(path) as fd:
            _write_whole(fd, lines)
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise unwritable(path, error) from error
        _waiting[path] = lines
        with suppress(OSError):  # stderr may be a log on the same disk
            print(f"{path}: no space, waits for some: {line.decode().rstrip()}", file=sys.stderr, flush=True)


def append_sample(path: Path, record: dict[str, Any]) -> bool:
    """A line that nobody misses: what finds no room, or no folder, is left out. Returns whether it was written."""
    line = (json.dumps(record, separators=(",", ":"), ensure_ascii=False) + "\n").encode()
    try:
        path.parent.mkdir(exist_ok=True)
        with _opened_to_append(path) as fd:
            _write_whole(fd, line)
    except OSError:
        return False
    return True


class LineFile:
    """JSON lines of one writer. On a full disk they wait in memory, in their order, until a later append finds room."""

    def __init__(self, path: Path):
        self.path = path
        self._waiting = b""

    def append(self, record: dict[str, Any]) -> None:
        self._waiting += (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode()
        try:
            with _opened_to_append(self.path) as fd:
                while self._waiting:
                    self._waiting = self._waiting[os.write(fd, self._waiting) :]
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise unwritable(self.path, error) from error


@contextmanager
def _opened_to_append(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        yield fd
    finally:
        os.close(fd)


def _ends_well(fd: int) -> bool:
    """False after a line that a crash or a full disk has cut: a new one must not be glued to it."""
    size = os.fstat(fd).st_size
    return size == 0 or os.pread(fd, 1, size - 1) == b"\n"


def _write_whole(fd: int, lines: bytes) -> None:
    """All or nothing: the part that a full disk took is given back. After a line that a crash has cut, on a new one."""
    text = lines if _ends_well(fd) else b"\n" + lines
    before = os.fstat(fd).st_size
    written = os.write(fd, text)
    if written < len(text):
        if os.fstat(fd).st_size == before + written:  # no other writer came after it
            os.ftruncate(fd, before)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def unwritable(path: Path, error: OSError) -> PacelineError:
    """What the user reads when a file of a run folder cannot be written for another reason than a full disk."""
    if not path.parent.is_dir():
        return PacelineError(
            f"{path.parent} is gone: it was there when the run began",
            fix="bring the run folder back, or mount it again, then paceline resume it; else start a new run",
        )
    return PacelineError(
        f"{path} cannot be written: {error.strerror}",
        fix=f"make the run folder writable again, then: paceline resume {path.parent}",
    )


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


def read_end(path: Path, length: int) -> tuple[bytes, bool]:
    """The whole lines among the last bytes, and whether they are all."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - length)
            file.seek(start)
            found = file.read(length)
    except OSError:
        return b"", True
    return found[found.find(b"\n") + 1 if start else 0 : found.rfind(b"\n") + 1], start == 0


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
    for _ in range(LOCK_TRIES):
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        time.sleep(LOCK_TRY_S)
    else:
        holder = os.pread(fd, 64, 0).decode(errors="replace").strip()
        os.close(fd)
        raise RunInUse(run, int(holder) if holder.isdigit() else None) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, str(os.getpid()).encode(), 0)
    return fd


def is_locked(run: RunDir) -> bool:
    """Whether some process holds the run."""
    try:
        fd = os.open(run.lock, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def holder_of(run: RunDir) -> str | None:
    """The process id in the lock; None where nobody holds the run."""
    return run.lock.read_text(errors="replace").strip() if is_locked(run) else None
