"""
The run folder: every file name in it, how each is written and read.

It is the only interface between a run and everything that reads it, so names and fields never change. Times are UTC. Readers skip a
half-written last line. Nothing here depends on what a step or a process is.
"""

import errno
import json
import os
import re
import shlex
import socket
import stat
import sys
import threading
import time
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from paceline.errors import PacelineError
from paceline.file_systems import NoLocks, is_of_one_host, try_lock

RECORDER_DUMP = "comm_lib_trace_rank_"  # torch's name for a dump of its flight recorder; the rank follows
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class Entry:
    """A path in the run folder, by its name there."""

    def __init__(self, name: str):
        self.name = name

    def __get__(self, run: "RunDir", _: type["RunDir"]) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class RunDir:
    """Paths of one run. Creating the object touches nothing."""

    path: Path

    config_toml = Entry("config.toml")  # the resolved config; written last, it makes the folder a run
    plan_json = Entry("plan.json")  # what the planner chose and expected
    preparing_json = Entry("preparing.json")  # before config.toml: what is done to the text, and how far it got
    dataset_json = Entry("dataset.json")  # the folder of the token shards, what is in them, and their keys
    findings = Entry("findings.json")  # the findings of the checks before the last attempt
    events = Entry("events.jsonl")  # what happened: attempts, checkpoints, failures, decisions
    metrics = Entry("metrics.jsonl")  # one line for each logged step
    evaluations = Entry("evals.jsonl")  # one line for each result of `paceline eval`
    checkpoints = Entry("checkpoints")  # a folder for each checkpoint
    samples = Entry("samples")  # text that the model wrote during the run
    exports = Entry("export")  # folders that `paceline export` made: the model as Hugging Face files
    skipped_json = Entry("skipped.json")  # the batches that the run skips after a rollback
    tokenizer_json = Entry("tokenizer/tokenizer.json")  # the tokenizer that the run's text was tokenized with
    notes = Entry("notes.json")  # {tags, note}: what its user wrote about the run
    slurm_json = Entry("slurm.json")  # {job_id, ...}: the Slurm job that has the run, or had it last
    submitted_toml = Entry("submitted.toml")  # the config of a run that waits in Slurm's queue
    lock = Entry(".lock")  # locked while a process holds the run; it has the process and its host
    health_dir = Entry("health")  # a file for each host: samples of its GPUs, memory, disk and network

    @property
    def name(self) -> str:
        """The run's name, which is its folder's."""
        return self.path.name

    def facts(self, host: str) -> Path:
        """The facts of a host when an attempt began."""
        return self.path / "facts" / f"{host}.json"

    def sample(self, step: int) -> Path:
        """The sample of a step."""
        return self.samples / f"step_{step:06d}.txt"

    def trouble(self, step: int) -> Path:
        """Details of a step whose loss or gradient was NaN or infinite, or whose loss spiked; a file for each attempt and rank."""
        return self.path / "trouble" / f"step_{step:06d}"

    def progress(self, rank: int) -> Path:
        """A rank's heartbeat."""
        return self.path / "progress" / str(rank)

    def logs(self, attempt: int) -> Path:
        """The folder with the logs of an attempt."""
        return self.path / "logs" / str(attempt)

    def rank_log(self, attempt: int, rank: int) -> Path:
        """A rank's output, whole."""
        return self.logs(attempt) / f"{rank}.log"

    def launch_log(self, attempt: int, host: str | None = None) -> Path:
        """What agent and engine wrote: those of the supervisor's host, or of another one."""
        return self.logs(attempt) / (f"launch-{host}.log" if host else "launch.log")

    def kernel_log(self, attempt: int, host: str) -> Path:
        """What the kernel log of another host has about its ranks; absent where it has nothing, or cannot be read."""
        return self.logs(attempt) / f"kernel-{host}.log"

    @property
    def quoted(self) -> str:
        """Its path, as a shell takes it."""
        return shlex.quote(str(self.path))

    def rank_error(self, attempt: int, rank: int) -> Path:
        """The exception that ended a rank: {time, type, message, fix, traceback, step}."""
        return self.logs(attempt) / f"{rank}.error.json"

    def rank_stacks(self, attempt: int, rank: int) -> Path:
        """The stacks of a trainer's rank, written when it receives SIGUSR2; otherwise empty."""
        return self.logs(attempt) / f"{rank}.stacks"

    def recorder_dumps(self, attempt: int) -> list[Path]:
        """Dumps of torch's flight recorder: a rank's last collectives, on request or after torch's timeout (launch/stacks.py)."""
        return sorted(self.logs(attempt).glob(f"{RECORDER_DUMP}*"))

    def health(self, host: str) -> Path:
        """The samples of one host."""
        return self.health_dir / f"{host}.jsonl"

    def track(self, name: str) -> Path:
        """What a tracker has sent so far."""
        return self.path / "track" / f"{name}.json"

    def hang(self, attempt: int) -> Path:
        """The evidence of a hang: hang.json and a file for each rank."""
        return self.path / "hangs" / str(attempt)


def utc_now() -> str:
    """Returns the time as every file of a run has it: 2026-11-20T10:00:00.000Z."""
    return to_utc(time.time())


def to_utc(seconds: float) -> str:
    """Converts Unix seconds to the form of `utc_now`."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


_pending: dict[Path, bytes] = {}  # lines of this process that did not fit on the disk yet, by file


def append_json_line(path: Path, record: dict[str, Any], *, quiet: bool = False) -> None:
    """Appends a line in one write call, so that lines of several writers do not mix.

    On a full disk it writes the line together with the next line that fits, and unless `quiet` prints it on stderr. Raises
    PacelineError where the folder is gone or cannot be written.
    """
    line = (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode()
    lines = _pending.pop(path, b"") + line
    try:
        append_whole(path, lines)
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise unwritable_file(path, error) from error
        _pending[path] = lines
        if not quiet:
            text = f"{path}: no space left, writing this later: {line.decode().rstrip()}"
            with suppress(OSError):  # stderr may be a log on the same disk
                print(text, file=sys.stderr, flush=True)


def append_sample(path: Path, record: dict[str, Any]) -> bool:
    """Appends a line that may be lost: on a full disk or without a folder it is skipped. Returns whether it was written."""
    try:
        path.parent.mkdir(exist_ok=True)
        append_whole(path, (json.dumps(record, separators=(",", ":"), ensure_ascii=False) + "\n").encode())
    except OSError:
        return False
    return True


def append_whole(path: Path, lines: bytes) -> None:
    """Writes all of the lines or none; after a line that a crash or a full disk has cut, it starts a new one."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        before = os.fstat(fd).st_size
        text = lines if before == 0 or os.pread(fd, 1, before - 1) == b"\n" else b"\n" + lines
        if (written := os.write(fd, text)) < len(text):
            if os.fstat(fd).st_size == before + written:  # no other writer has appended since
                os.ftruncate(fd, before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(fd)


def unwritable_file(path: Path, error: OSError) -> PacelineError:
    """Returns the error for a file of a run folder that cannot be written for another reason than a full disk."""
    if not path.parent.is_dir():
        fix = "restore the run folder, mount it again or use its new name, then continue the run; or start a new one"
        return PacelineError(f"{path.parent} is gone: it existed when the run began", fix=fix)
    fix = f"make the run folder writable again, then: {resume_command(RunDir(path.parent))}"
    return PacelineError(f"{path} cannot be written: {error.strerror}", fix=fix)


def unwritable_run(run: RunDir, error: OSError) -> PacelineError:
    """Returns the error for a run folder that cannot be created or written."""
    has_begun = os.access(run.config_toml, os.F_OK)
    fix = f"copy it first: cp -r {run.quoted} DIR" if has_begun else "--runs-dir DIR in a place you can write"
    fix = "make room in its file system (df -h), then repeat the command" if error.errno in NO_SPACE else fix
    return PacelineError(f"run folder {run.path} cannot be written: {error.strerror}", fix=fix)


def append_event(run: RunDir, event: str, **fields: Any) -> None:
    """Appends a line to events.jsonl, with the time."""
    append_json_line(run.events, {"time": utc_now(), "event": event, **fields})


def open_file(path: Path) -> BinaryIO:
    """Opens a file for reading. Raises OSError also where a pipe or a device stands, which could block its reader for ever."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return os.fdopen(fd, "rb")
    os.close(fd)
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_text(path: Path) -> str:
    """Returns what a small file holds. Raises OSError, or ValueError where it is not UTF-8."""
    with open_file(path) as file:
        return file.read().decode()


def check_readable(run: RunDir) -> None:
    """Raises PacelineError for a file that is there and cannot be read, so that no view takes it for a missing one."""
    for path in (run.config_toml, run.events, run.metrics, run.plan_json, run.findings):
        try:
            open_file(path).close()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise unreadable_file(path, error) from error


def unreadable_file(path: Path, error: OSError) -> PacelineError:
    """Returns the error for a file or a folder that is there and cannot be read."""
    right = "ask its owner for the right to read it (chmod -R a+rX)"
    fix = right if isinstance(error, PermissionError) else "restore the file, or look at its disk or mount"
    closed = next((folder for folder in reversed(path.parents) if not os.access(folder, os.X_OK)), None)
    return PacelineError(f"{closed or path} cannot be read: {error.strerror or error}", fix=fix)


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the records of a file; a half-written last line, or one that a crash has cut, is skipped."""
    with suppress(FileNotFoundError, NotADirectoryError), open_file(path) as file:
        yield from json_records(line for line in file if line.endswith(b"\n"))


def json_records(lines: Iterable[str | bytes]) -> Iterator[dict[str, Any]]:
    """Yields the lines that are JSON objects."""
    for line in lines:
        with suppress(ValueError):
            if isinstance(record := json.loads(line), dict):
                yield record


def read_end(path: Path, length: int) -> tuple[bytes, bool]:
    """Returns the whole lines among the last `length` bytes, and whether they are the whole file."""
    try:
        with open_file(path) as file:
            start = max(0, file.seek(0, os.SEEK_END) - length)
            file.seek(start)
            end = file.read(length)
    except OSError:
        return b"", True
    return end[end.find(b"\n") + 1 if start else 0 : end.rfind(b"\n") + 1], start == 0


def write_atomic(path: Path, text: str) -> None:
    """Replaces a file at once: a reader never sees half of it, nor does a crash leave half of it."""
    part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_native_id()}.part")  # each writer has its own
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


class RunInUse(PacelineError):
    """A process holds the run. pid: of the supervisor, if it is this host's; it may be gone while its workers save and end."""

    def __init__(self, run: RunDir, holder: str):
        word, _, host = holder.partition(" ")
        is_here = host in ("", socket.gethostname())
        self.pid = int(word) if word.isdigit() and is_here else None
        text = f"run {run.name} is in use by process {word or 'unknown'}" + ("" if is_here else f" on {host}")
        super().__init__(text, fix=f"paceline stop {run.quoted} ends it, or wait for its end")


def lock_run(run: RunDir, *, host: str | None = None) -> int:
    """Returns a file descriptor that holds the run until every process that inherited it has ended. Raises RunInUse.

    host: of the supervisor, where this process keeps a copy for it.
    """
    fd = os.open(run.lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if not try_lock(fd, patient=True):
            raise RunInUse(run, os.pread(fd, 64, 0).decode(errors="replace").partition("\n")[0])
        if is_of_one_host(fd):
            where = f"other hosts do not see locks of {run.path}, as it is mounted"
            print(f"note    {where}: start the run on one host only", file=sys.stderr)
    except NoLocks:
        print(f"note    {run.path} is on a file system without locks: start the run once only", file=sys.stderr)
    except BaseException:
        os.close(fd)
        raise
    write_holder(fd, host=host)
    return fd


def write_holder(lock: int, *, host: str | None = None) -> None:
    """Writes this process and its host into the lock."""
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()} {host or socket.gethostname()}".encode(), 0)
    os.fsync(lock)  # on NFS other hosts see it only then, while the lock stays open


def is_locked(run: RunDir) -> bool:
    """Whether a process holds the run."""
    with suppress(OSError), open_file(run.lock) as file:
        try:
            return not try_lock(file, shared=True)
        except OSError as error:  # with locks: the server is gone, and with it what the run writes
            return not isinstance(error, NoLocks)
    return False


def holder_of(run: RunDir) -> str | None:
    """Returns the process and its host, "4711 ada", as the lock has them; None where no process holds the run."""
    return run.lock.read_text(errors="replace").partition("\n")[0] if is_locked(run) else None


def is_preparing(run: RunDir) -> bool:
    """Whether a command prepares text for a run that has no config.toml yet."""
    return run.preparing_json.is_file() and is_locked(run)


def is_queued(run: RunDir) -> bool:
    """Whether a run was submitted to Slurm and has no config.toml yet: it waits, or its job has just started."""
    return run.submitted_toml.is_file() and not run.config_toml.is_file()


def is_run(run: RunDir) -> bool:
    """Whether the folder is a run's: one that began, is prepared, or waits in Slurm's queue."""
    return run.config_toml.is_file() or is_preparing(run) or is_queued(run)


def find_run(name: str, *, runs_dir: str = "runs") -> RunDir:
    """The run folder that a path, or a name in runs_dir, means: a training run's or a script's."""
    named, folder = Path(name), Path(runs_dir)
    named = named.resolve() if named.name in ("", "..") else named  # a run is called by the name of its folder
    for path in (places := dict.fromkeys((named, folder / name))):
        if (path / "config.toml").is_file() or is_queued(RunDir(path)):
            return RunDir(path)
    names = sorted(path.parent.name for path in folder.glob("*/config.toml"))
    fix = f"one of {', '.join(names)}" if names else "paceline train makes one; give the folder if it is elsewhere"
    problem = f"no run {name}: no config.toml in {' or '.join(map(str, places))}"
    if lost := next((place for place in places if (place / "checkpoints").is_dir()), None):
        problem = f"{lost} has checkpoints and no config.toml"
        fix = "restore it from a copy of the run, or write it with the keys of the CONFIG and the flags that began the run"
    elif owner := next((place for place in named.parents if (place / "config.toml").is_file()), None):
        step = re.fullmatch(r"step_(\d+)", named.name) if named.is_dir() else None
        option = f", with --step {int(step[1])} for resume, sample, eval or export" if step else ""
        fix = f"give the folder of the run: {shlex.quote(str(owner))}{option}"
    elif len(names) > 5:
        fix = f"paceline runs{'' if runs_dir == 'runs' else f' {shlex.quote(runs_dir)}'} lists all {len(names)} runs"
    raise PacelineError(problem, fix=fix)


def resume_command(run: RunDir) -> str:
    """Returns the command that continues a run, as a job if it was submitted."""
    return f"paceline resume {run.quoted}{' --slurm' if 'args' in job_facts(run) else ''}"  # which a submission alone writes


def is_script_run(run: RunDir) -> bool:
    return "command" in read_config(run)


def read_config(run: RunDir) -> dict[str, Any]:
    """Returns the config of a training run, or of a script's run, which has a command; empty where it is missing or damaged."""
    with suppress(OSError, ValueError):
        return tomllib.loads(read_text(run.config_toml))
    return {}


def job_facts(run: RunDir) -> dict[str, Any]:
    """Returns what slurm.json has; empty where it is missing or damaged."""
    with suppress(OSError, ValueError):
        return facts if isinstance(facts := json.loads(read_text(run.slurm_json)), dict) else {}
    return {}
