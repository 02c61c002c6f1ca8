"""
What the ranks of another host write, on its way into the run folder of the supervisor; and what they need, on its way there.

The host keeps a copy of the run folder. A Follower there looks at it several times a second and sends what is new: of a file that
grows the bytes, of a file that is replaced the whole. The supervisor writes them under the same names, so that everyone who looks
at a run finds all ranks in one folder. Names that arrive are checked against those that a run has.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from paceline.launch.channel import PIECE_BYTES, Channel, Line, frame
from paceline.model.manifest import MANIFEST
from paceline.rundir import NO_SPACE, RunDir, write_atomic

# what a host may send into the run folder, and how: only new bytes, or the whole file each time
GROWS = re.compile(r"events\.jsonl|metrics\.jsonl|health/[^/]+\.jsonl|logs/\d+/[^/]+\.(?:log|stacks)")
REPLACED = re.compile(
    r"plan\.json|progress/\d+|comm/(?:\d+\.json|num_operations)|probe/\d+\.json|samples/[^/]+|trouble/[^/]+/[^/]+"
    r"|logs/\d+/(?:[^/]+\.error\.json|comm_lib_trace_rank_\d+)|checkpoints/\.step_\d+\.[\w-]+\.tmp/[^/]+"
)
# what the supervisor sends into the copy of another host before each attempt, and all that it may send
RUN_FILES = ("config.toml", "plan.json", "dataset.json", "skipped.json", "tokenizer/tokenizer.json")
SENT = re.compile(
    "|".join(map(re.escape, RUN_FILES)) + r"|metrics\.jsonl|checkpoints/[^/]+/[^/]+|history/(?:events|metrics)\.jsonl"
)
SHARED = ("events.jsonl",)  # the supervisor writes into it too
FROM_HOST = re.compile(f"(?:{GROWS.pattern}|{REPLACED.pattern})")
PART = ".part"
FOLDERS = ("health", "comm", "probe", "samples", "trouble/*", "checkpoints/.step_*.tmp")


class Follower:
    """Sends what the ranks of this host write into their copy of the run folder."""

    def __init__(self, run: RunDir, channel: Channel):
        self.run, self.channel = run, channel
        self._sent: dict[str, tuple[int, int, int]] = {}  # by name: inode, size, and time of the last change
        self._last: dict[str, bytes] = {}  # what small files held

    def skip(self) -> None:
        """Counts everything that is there as sent: it came from the supervisor."""
        self._sent.clear()  # a new file may have the inode of one that was removed
        for name, path in self._files(None):
            with suppress(OSError):
                self._sent[name] = stamp(path)

    def catch_up(self, sizes: Mapping[str, int]) -> None:
        """Sends what a broken link has kept back. sizes: what the supervisor has of the files that grow, of all attempts."""
        for name, size in sizes.items():
            with suppress(OSError):
                self._sent[name] = ((self.run.path / name).stat().st_ino, size, 0)
        # the plan may have changed since, and steps that were not received are done again
        for path in (self.run.plan_json, self.run.metrics):
            with suppress(OSError):
                self._sent[path.name] = stamp(path)
        self.scan(None)

    def hurry(self, attempt: int) -> None:
        """Sends the heartbeats and errors that are new, before all files that wait: a rank's end is judged by them."""
        for path in [*self.run.path.glob("progress/*"), *self.run.logs(attempt).glob("*.error.json")]:
            with suppress(OSError):
                data = path.read_bytes()  # a heartbeat is a mapped file: no time in its stat shows that it has changed
                if data != self._last.get(path.name):
                    self._last[path.name] = data
                    name = str(path.relative_to(self.run.path))
                    self.channel.send({"file": name, "last": True}, data)

    def scan(self, attempt: int | None) -> None:
        """Sends what else is new."""
        for name, path in self._files(attempt):
            with suppress(OSError):
                before, now = self._sent.get(name), stamp(path)
                if now == before:
                    continue
                self._sent[name] = now
                grows = bool(GROWS.fullmatch(name))
                start = before[1] if grows and before and before[0] == now[0] and before[1] <= now[1] else 0
                is_new = grows and before is not None and start == 0 and name not in SHARED
                self.channel.send_behind(file_frames(path, name, start=start, end=now[1], grows=grows, is_new=is_new))

    def _files(self, attempt: int | None) -> Iterator[tuple[str, Path]]:
        """Yields the files that travel; a checkpoint's tensors only when the JSON says that they are whole, and before it."""
        logs = [f"logs/{attempt}"] if attempt is not None else ["logs/*"]
        paths = [self.run.events, self.run.metrics, self.run.plan_json]
        for pattern in (*logs, *FOLDERS):
            for folder in self.run.path.glob(pattern):
                paths += sorted(path for path in folder.glob("*") if path.is_file())
        names = {str(path.relative_to(self.run.path)): path for path in paths}
        for name, path in names.items():
            if name.endswith(PART) or not (GROWS.fullmatch(name) or REPLACED.fullmatch(name)):
                continue
            if name.startswith("checkpoints/"):
                if path.suffix == ".safetensors":
                    continue
                tensors = path.with_suffix(".safetensors")
                if path.suffix == ".json" and tensors.exists():
                    yield str(tensors.relative_to(self.run.path)), tensors
            yield name, path


def stamp(path: Path) -> tuple[int, int, int]:
    """What changes whenever a file changes."""
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def file_frames(
    path: Path, name: str, *, start: int = 0, end: int | None = None, grows: bool = False, is_new: bool = False
) -> Iterator[bytes]:
    """Yields a file in pieces. grows: they go behind what is there; is_new: but that is no longer true."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size if end is None else end
            file.seek(start)
            at = start
            is_last = False
            while not is_last:
                # lines of several writers must not mix
                data = file.read(size - at if name in SHARED else min(PIECE_BYTES, size - at))
                first, at = at == 0, at + len(data)
                is_last = at >= size or not data
                if data or not grows:
                    yield frame(
                        {"file": name, "last": is_last, "grows": grows, "new": is_new and first, "first": first}, data
                    )
    except FileNotFoundError:  # it was removed before its turn came
        return


def write_piece(path: Path, line: Line, data: bytes, *, part: Path | None = None, sync: bool = False) -> None:
    """Writes a piece of a file that appears whole or not at all. The first replaces what a link that broke has left."""
    part = part or path.with_name(path.name + PART)
    if not line.get("first", True) and not part.exists():
        return  # a piece before it did not fit
    try:
        with part.open("wb" if line.get("first", True) else "ab") as file:
            file.write(data)
            if line["last"] and sync:
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        part.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
    if line["last"]:
        part.replace(path)


def receive(run: RunDir, line: Line, data: bytes, *, allowed: re.Pattern[str]) -> None:
    """Writes a piece of a file into the run folder. Raises ValueError for a name that a run does not have, OSError for the disk."""
    name = str(line["file"])
    if not allowed.fullmatch(name) or ".." in name.split("/"):
        raise ValueError(f"a file that no run has: {name!r}")
    path = run.path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if line.get("grows"):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if line.get("new") else 0)
        fd = os.open(path, flags, 0o644)
        try:
            while data:
                data = data[os.write(fd, data) :]
        finally:
            os.close(fd)
        return
    write_piece(path, line, data, sync=name.startswith("checkpoints/"))


class Arrivals:
    """Writes what hosts send into the run folder. What a full disk refuses is left out, and does not end the run."""

    def __init__(self, run: RunDir, *, on_no_space: Callable[[str], object]):
        self.run, self.on_no_space = run, on_no_space
        self._refused = set[str]()  # files of which a piece did not fit

    def take(self, line: Line, data: bytes, *, host: str) -> None:
        """Takes a piece of a file from a host."""
        name = str(line["file"])
        if name.endswith(".full"):
            data = host.encode()  # the rank had no room to write it
        if name in self._refused and not line.get("grows"):
            if line["last"]:
                self._refused.discard(name)  # the next version of it may fit
            return
        if not self.run.path.is_dir():  # a run folder that has vanished is not made again
            return
        if name in SHARED and self.run.events.exists():  # a copy whose link was made again sends all from its beginning
            known = set(self.run.events.read_bytes().splitlines())
            data = b"".join(record for record in data.splitlines(keepends=True) if record.rstrip() not in known)
        try:
            receive(self.run, line, data, allowed=FROM_HOST)
        except ValueError:  # a name that no run has
            return
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            if name not in self._refused:
                self.on_no_space(name)
            self._refused.add(name)
            path = self.run.path / name
            path.with_name(path.name + PART).unlink(missing_ok=True)
            if name.startswith("checkpoints/"):
                # rank 0 then gives this checkpoint up, as if that rank's disk were full
                with suppress(OSError):
                    path.with_suffix(".full").touch()


def sha256_of(path: Path) -> str | None:
    """Returns the hash of a file; None where it is not there."""
    try:
        with path.open("rb", buffering=0) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def missing_files(folder: Path, files: dict[str, str], known: Path | None = None) -> list[str]:
    """Returns which of the files, by name and hash, are not in the folder as they should be.

    known: a file that keeps the hashes until a file's size or time changes, so that gigabytes are not read at every launch.
    """
    before, hashes = dict[str, Any](), dict[str, Any]()
    if known:
        with suppress(OSError, ValueError):
            before = json.loads(known.read_text(encoding="utf-8"))
    for name in files:
        path = folder / name
        with suppress(OSError):
            state = [path.stat().st_size, path.stat().st_mtime_ns]
            entry = before.get(name)
            hashes[name] = entry if entry and entry[:2] == state else [*state, sha256_of(path)]
    if known and hashes != before:
        with suppress(OSError):  # it is hashed again the next time
            write_atomic(known, json.dumps(hashes) + "\n")
    return [name for name, sha256 in files.items() if name not in hashes or hashes[name][2] != sha256]


def folder_frames(folder: Path, names: Iterable[str], prefix: str) -> Iterator[bytes]:
    """Yields files of a folder in pieces, the manifest of a checkpoint last."""
    for name in sorted(names, key=lambda name: name == MANIFEST):
        yield from file_frames(folder / name, f"{prefix}{name}")


def open_frames(folder: Path, names: Iterable[str], prefix: str) -> Iterator[bytes] | None:
    """Returns files of a folder in pieces, or None where one is missing.

    They are opened now, so that they arrive even if they are removed before their turn.
    """
    opened = []
    for name in names:
        frames = file_frames(folder / name, f"{prefix}{name}")
        first = next(frames, None)
        if first is None:
            return None
        opened.append(chain([first], frames))
    return chain.from_iterable(opened)


def remove_newer(checkpoints: Path, step: int) -> None:
    """Removes unfinished saves, and checkpoints after a step: the run goes on from that step."""
    for path in [*checkpoints.glob(".step_*.tmp"), *checkpoints.glob("step_*")]:
        number = re.match(r"\.?step_(\d+)", path.name)
        if path.name.startswith(".") or (number and int(number[1]) > step):
            shutil.rmtree(path, ignore_errors=True)
