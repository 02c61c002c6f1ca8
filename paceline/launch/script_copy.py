"""
The far end of launch/sync.py: a copy of a script's folder in the cache of this host, and what the script saves in its run folder.

Nothing arrives that was not asked for, and nothing leaves the folder: no absolute name, no `..`, no link out of it. What an earlier
run has sent and this one does not have is removed; what the script itself has written stays.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from paceline.config import Config, cache_dir
from paceline.launch.channel import Line
from paceline.launch.gather import PART, missing_files, write_piece
from paceline.rundir import RunDir, write_atomic

PREFIX = "script/"  # of the names of its files in frames
# what the run itself has in a script's run folder; everything else there is the script's
OWN_NAMES = {
    "config.toml", "events.jsonl", "findings.json", "metrics.jsonl", "notes.json", "plan.json", "slurm.json", "submitted.toml",
    "comm", "facts", "hangs", "health", "history", "logs", "probe", "progress", "samples", "track", "trouble",
}  # fmt: skip
Version = tuple[int, float]  # of a file: its size, and when it was written
MAX_SAVED = 10_000


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


def saved_files(run: RunDir) -> dict[str, Version]:
    """Returns what a script has saved in its run folder: MAX_SAVED files at most, as far as they can be read; no links."""
    files: dict[str, Version] = {}
    for place, folders, names in os.walk(run.path):
        if Path(place) == run.path:
            folders[:], names = ([n for n in part if n not in OWN_NAMES and n[0] != "."] for part in (folders, names))
        for path in (Path(place, name) for name in names if not name.endswith(PART)):
            if len(files) == MAX_SAVED:
                return files
            with suppress(OSError):
                state = path.lstat()
                if stat.S_ISREG(state.st_mode):
                    name = os.fsencode(path.relative_to(run.path)).decode(errors="replace")
                    files[name] = (state.st_size, state.st_mtime)
    return files
