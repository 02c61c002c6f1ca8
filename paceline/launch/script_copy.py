"""
The far end of launch/sync.py: a copy of a script's folder in the cache of this host, and the files that the script saves here.

Nothing arrives that was not asked for, and nothing leaves the folder: no absolute name, no `..`, no link out of it. What an earlier
run has sent and this one does not have is removed; what the script itself has written stays. What it saves below PACELINE_RUN
travels in sets, the newest version of each file: in the background, and between two attempts.
"""

import hashlib
import json
import math
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path

from paceline.config import Config, cache_dir
from paceline.file_systems import free_space
from paceline.launch.channel import Channel, Line, frame
from paceline.launch.gather import PART, SAVED, file_frames, missing_files, write_piece
from paceline.rundir import RunDir, write_atomic

PREFIX = "script/"  # of the names of its files in frames
# what the run itself has in a script's run folder; everything else there is the script's
OWN_NAMES = {
    "config.toml", "events.jsonl", "findings.json", "metrics.jsonl", "notes.json", "plan.json", "slurm.json", "submitted.toml",
    "comm", "facts", "hangs", "health", "history", "logs", "probe", "progress", "samples", "track", "trouble",
}  # fmt: skip
SAME_S = 2.0  # two versions of a file with the same size are one version, if their times differ by less
FILE_QUIET_S, FOLDER_QUIET_S = 0.5, 5.0  # what has changed since then may still be written
SEND_EVERY_S = 30.0  # while the script runs, at most so often
REPLACED = ".replaced"
Version = tuple[int, float]  # of a file: its size, and when it was written
PIECES = 64  # that are sent before lines and logs have their turn again


class ScriptCopy:
    """The copy of one script's folder."""

    def __init__(self) -> None:
        self.root: Path | None = None
        self.requested = set[str]()

    def answer(self, line: Line) -> Line:
        """Returns which files are missing, in a folder of this host or in the copy, and the working directory if it is there."""
        files: Mapping[str, str] = line["files"]
        if "at" in line:
            place, cwd = Path(line["at"]), Path(line["cwd"])
            exists = all((place / name).is_file() for name in files)
            facts = {"cwd": line["cwd"] if cwd.is_dir() else None, "exists": exists}
            return {"event": "script", **facts, "lacks": missing_files(place, line["files"])}
        if not re.fullmatch(r"[0-9a-f]{12}", line["key"]):
            raise ValueError(f"not a key: {line['key']!r}")
        check_name(line["name"])
        copies = cache_dir(Config()) / "scripts"
        self.root = copies / line["key"] / line["name"].replace("/", "_")
        self.root.mkdir(parents=True, exist_ok=True)
        folders = [name for name in [*line["folders"], line["cwd"]] if name != "."]
        paths = {name: self.path_of(name) for name in [*files, *folders]}
        if not line["keeps"]:
            self.remove_stale(copies / f"{line['key']}.json", files)
        lacks = missing_files(self.root, line["files"])
        self.requested = set(lacks)
        if not lacks:
            for name in folders:
                paths[name].mkdir(parents=True, exist_ok=True)
            for name in files:
                paths[name].chmod(0o755 if name in line["executable"] else 0o644)
        return {"event": "script", "cwd": str(self.root / line["cwd"]), "lacks": lacks}

    def take(self, name: str, line: Line, data: bytes) -> None:
        """Writes a piece of a file into the copy. Raises ValueError for a file that was not asked for."""
        if name not in self.requested:
            raise ValueError(f"a file that was not asked for: {name!r}")
        path = self.path_of(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256(os.fsencode(path.name)).hexdigest()[:16]
        part = path.with_name(f".{digest}-{os.getpid()}{PART}")  # the name itself may be as long as a name can be
        write_piece(path, line, data, part=part)

    def path_of(self, name: str) -> Path:
        """Returns where a file of the copy is. Raises ValueError where that is outside, also by a link."""
        assert self.root
        check_name(name)
        path = self.root / name
        if not path.parent.resolve().is_relative_to(self.root.resolve()):
            raise ValueError(f"a link leads out of {self.root}: {name!r}")
        return path

    def remove_stale(self, record: Path, files: Mapping[str, str]) -> None:
        """Removes what was sent before and is not in `files`, with the folders that this leaves empty."""
        assert self.root
        before: list[str] = []
        with suppress(OSError, ValueError):
            before = json.loads(record.read_text(encoding="utf-8"))
        for name in before:
            if name not in files:
                path = self.path_of(name)
                with suppress(OSError):  # the script has removed it, or uses its folder
                    path.unlink()
                    for folder in path.parents[: name.count("/")]:
                        folder.rmdir()
        write_atomic(record, json.dumps(sorted(files)) + "\n")


def check_name(name: str) -> None:
    """Raises ValueError for a name that is not one of a file below a folder."""
    if "\0" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError(f"not a name below the folder: {name!r}")


def saved_files(run: RunDir, on_error: Callable[[OSError], object] | None = None) -> dict[str, Version]:
    """Returns every file that a script has saved in its run folder, as far as it can be read; links are not followed."""
    files = {}
    for place, folders, names in os.walk(run.path, onerror=on_error):
        if Path(place) == run.path:
            folders[:], names = ([n for n in part if n not in OWN_NAMES and n[0] != "."] for part in (folders, names))
        for path in (Path(place, name) for name in names if not name.endswith(PART)):
            with suppress(FileNotFoundError):
                state = path.lstat()
                if stat.S_ISREG(state.st_mode):
                    files[str(path.relative_to(run.path))] = (state.st_size, state.st_mtime)
    return files


def is_newer(version: Sequence[float], other: Sequence[float] | None) -> bool:
    """Whether a version of a file is newer than another one. other: None where there is none."""
    return other is None or version[1] > other[1] + SAME_S or (version[0] != other[0] and version[1] >= other[1])


def saved_path(run: RunDir, name: str) -> Path:
    """Returns where a script's file is in the run folder. Raises ValueError for one of the run's own, or one outside."""
    check_name(name)
    path, top = run.path / name, name.partition("/")[0]
    if top in OWN_NAMES or top.startswith(".") or not path.parent.resolve().is_relative_to(run.path.resolve()):
        raise ValueError(f"not a file of a script: {name!r}")
    return path


def take_saved(run: RunDir, line: Line, data: bytes, host: str) -> None:
    """Takes a piece of a set of files that a script saved. When the set is whole, it replaces what is older.

    host: where they were saved. What it replaces here stays in REPLACED: a host that lost power may have half a file.
    """
    folder, name = run.path / f".saved-{host.replace('/', '_')}", str(line["file"]).removeprefix(SAVED)
    if name:
        saved_path(run, name)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_piece(folder / name, line, data)
        if line["last"]:
            os.utime(folder / name, (line["time"], line["time"]))
        return
    files = saved_files(run)
    for path in [path for path in folder.rglob("*") if path.is_file() and path.suffix != PART]:
        name = str(path.relative_to(folder))
        if is_newer((path.stat().st_size, path.stat().st_mtime), files.get(name)):
            target, replaced = saved_path(run, name), run.path / REPLACED / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if host and name in files:
                replaced.parent.mkdir(parents=True, exist_ok=True)
                target.replace(replaced)
            path.replace(target)
    shutil.rmtree(folder, ignore_errors=True)
    for name in line["gone"]:
        saved_path(run, name).unlink(missing_ok=True)


class SavedFiles:
    """Sends what a script saves in this host's copy of its run folder. Times of files are those of this host's clock."""

    prefix = SAVED

    def __init__(self, run: RunDir, channel: Channel):
        self.run, self.channel = run, channel
        self.known = dict[str, Version]()  # what the supervisor has
        self.sent = dict[str, Version]()  # of that, what came from here
        self.clock_s, self.room = 0.0, 0  # how far this clock is ahead; bytes that the supervisor takes
        self.look_at, self.began = math.inf, 0.0
        self.frames: Iterator[bytes] = iter(())

    def exchange(self, line: Line) -> None:
        """Sends what is newer here than there, then the answer. line: the supervisor's files, and whether it wants later ones."""
        self.clock_s, self.room = line["clock_s"], line["room"]
        self.known = {name: (size, at + self.clock_s) for name, (size, at) in line["files"].items()}
        self.look_at = time.monotonic() if line["follows"] else math.inf
        self.frames = chain(self.new_frames(), self.answer())

    def push(self) -> None:
        """Sends a few pieces, or looks for new files when it is time. Call it when nothing else waits to be sent."""
        now, pieces = time.monotonic(), list[bytes]()
        with suppress(OSError):  # what cannot be read is not sent
            pieces = list(islice(self.frames, PIECES))
        if pieces:
            self.began = self.began or now
            self.channel.send_behind(pieces)
        elif self.began:  # a slow link has most of its time for the script
            self.look_at, self.began = max(self.look_at, now + max(SEND_EVERY_S, 10 * (now - self.began))), 0.0
        elif now > self.look_at:
            self.frames, self.look_at = self.new_frames(is_running=True), now + FOLDER_QUIET_S

    def take(self, line: Line, data: bytes) -> None:
        """Takes a piece of a set from the supervisor, which has the newest versions."""
        take_saved(self.run, {**line, "time": line.get("time", 0.0) + self.clock_s}, data, "")
        if line["file"] == SAVED:
            self.known |= saved_files(self.run)

    def new_frames(self, *, is_running: bool = False) -> Iterator[bytes]:
        """Yields the files that the supervisor lacks, as one set. is_running: without those that are being written."""
        files, now = saved_files(self.run), time.time()
        ages = {name: now - at if is_running else math.inf for name, (_, at) in files.items()}
        busy = {Path(name).parent for name, age in ages.items() if age < FOLDER_QUIET_S} - {Path()}
        names = [name for name in files if ages[name] > FILE_QUIET_S and Path(name).parent not in busy]
        names = sorted((n for n in names if is_newer(files[n], self.known.get(n))), key=lambda name: files[name][1])
        if not names or sum(files[name][0] for name in names) > self.room:
            return
        for name in names:
            yield from file_frames(self.run.path / name, f"{SAVED}{name}", saved_at=files[name][1] - self.clock_s)
        problems = list[OSError]()
        after = saved_files(self.run, problems.append)
        new = {name: files[name] for name in names if after.get(name) == files[name]}
        self.known, self.sent = self.known | new, self.sent | new
        # the script has removed a file, and what follows it has arrived
        gone = [name for name in self.sent if name not in after and not problems]
        gone = [n for n in gone if any(2 * s >= self.sent[n][0] and at > self.sent[n][1] for s, at in new.values())]
        self.sent = {name: version for name, version in self.sent.items() if name not in gone}
        yield frame({"file": SAVED, "last": True, "gone": gone})

    def answer(self) -> Iterator[bytes]:
        """Yields what the script has saved here, by the supervisor's clock."""
        files = {name: (size, at - self.clock_s) for name, (size, at) in saved_files(self.run).items()}
        yield frame({"event": "exchanged", "files": files, "free": free_space(self.run.path) or 0})
