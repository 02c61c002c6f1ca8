"""
The runs that a page may ask for, by name, each read as it grows: the only way from what a browser says to a file.

A name is looked up among the run folders that are there, a log among those that the snapshot lists. No part of a path is ever
made of what came from outside, and a run with a link that leads out of its folder is not shown.
"""

import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from paceline.errors import PacelineError
from paceline.rundir import RunDir
from paceline.watch.about import read_about
from paceline.watch.logs import read_tail, search
from paceline.watch.snapshot import Snapshot
from paceline.watch.status import Reader, RunList, open_reader, run_folders, run_status

FRESH_S = 0.8  # a snapshot is not read again within this time, however many look
MAX_OPEN = 8  # readers kept; the one that was asked for longest ago goes
TAIL_BYTES = 256 << 10
MAX_HITS = 200


@dataclass
class Opened:
    reader: Reader
    lock: Lock = field(default_factory=Lock)
    snapshot: Snapshot | None = None
    read_at: float = 0.0
    asked_at: float = 0.0


class Shelf:
    """`named`: a run folder or a log file that is shown too, wherever it lies."""

    def __init__(self, runs_dir: Path, named: Path | None = None):
        self.runs_dir = runs_dir
        self.named = named and named.absolute()  # a run may be called `.`
        self._list = RunList(runs_dir)
        self._opened: dict[str, Opened] = {}
        self._lock = Lock()

    def paths(self) -> dict[str, Path]:
        """Every run that can be asked for, by name."""
        found = {path.name: path for path in run_folders(self.runs_dir)}
        return found | ({self.named.name: self.named} if self.named else {})

    def refused(self) -> list[Path]:
        """The links for which a run is not shown."""
        return [link for path in self.paths().values() if (link := link_out_of(path))]

    def runs(self) -> list[dict[str, Any]]:
        """The runs at a glance, the latest first; a log file before them."""
        found = [status.to_json() for status in self._list.read() if not link_out_of(Path(status.path))]
        if self.named is None or any(Path(each["path"]).resolve() == self.named.resolve() for each in found):
            return found
        others = [each for each in found if each["name"] != self.named.name]
        if self.named.is_dir():
            return [run_status(RunDir(self.named)).to_json(), *others]
        return [log_at_a_glance(self.snapshot(self.named.name)), *others]

    def snapshot(self, name: str) -> Snapshot:
        """KeyError where no such run is there, PacelineError where it is refused."""
        opened = self._open(name)
        with opened.lock:
            now = time.monotonic()
            if opened.snapshot is None or now - opened.read_at > FRESH_S:
                opened.snapshot = opened.reader.update()
                opened.read_at = time.monotonic()
            return opened.snapshot

    def read_ahead(self, name: str) -> None:
        """What is wrong with it is said to who asks for it."""
        with suppress(KeyError, PacelineError, OSError):
            self.snapshot(name)

    def _open(self, name: str) -> Opened:
        path = self.paths()[name]
        check_links(path)
        with self._lock:
            if name not in self._opened:
                self._opened[name] = Opened(open_reader(path))
            self._opened[name].asked_at = time.monotonic()
            while len(self._opened) > MAX_OPEN:
                del self._opened[min(self._opened, key=lambda each: self._opened[each].asked_at)]
            return self._opened[name]

    def about(self, name: str) -> dict[str, Any]:
        path = self.paths()[name]
        return read_about(RunDir(path)) if path.is_dir() else {"config": {}, "facts": [], "samples": []}

    def log_tail(self, name: str, *, attempt: int, rank: int | None) -> dict[str, Any]:
        path = self._log(name, attempt=attempt, rank=rank)
        text = read_tail(path, max_bytes=TAIL_BYTES)
        return {"text": text, "whole": path.stat().st_size <= TAIL_BYTES}

    def log_hits(self, name: str, text: str, *, attempt: int, rank: int | None) -> dict[str, Any]:
        hits = search(self._log(name, attempt=attempt, rank=rank), text, limit=MAX_HITS)
        return {"hits": hits, "all": len(hits) < MAX_HITS}

    def _log(self, name: str, *, attempt: int, rank: int | None) -> Path:
        """KeyError where the snapshot lists no such log."""
        for log in self.snapshot(name).logs:
            if (log.attempt, log.rank) == (attempt, rank):
                return Path(log.path)
        raise KeyError(f"no log of attempt {attempt}, rank {rank}")


def check_links(path: Path) -> None:
    if link := link_out_of(path):
        raise PacelineError(
            f"{link} is a link that leads out of the run folder: the browser is not shown what it leads to",
            fix=f"paceline watch {path} shows it in the terminal",
        )


def link_out_of(path: Path) -> Path | None:
    """A link that leads out of a run folder, among the files that are read of it. The folder may be a link itself."""
    run, inside = RunDir(path), os.path.realpath(path)
    files = (run.config_toml, run.plan_json, run.findings, run.events, run.metrics)
    folders = (
        path / "facts",
        run.health_dir,
        run.progress(0).parent,
        run.logs(0).parent,
        run.samples,
        run.hang(0).parent,
    )
    for each in (*files, *folders, *(found for folder in folders for found in folder.rglob("*"))):
        if each.is_symlink() and not Path(os.path.realpath(each)).is_relative_to(inside):
            return each
    return None


def log_at_a_glance(snapshot: Snapshot) -> dict[str, Any]:
    names = ("name", "path", "state", "step", "num_steps", "loss", "val_bpb", "tok_per_sec")
    return {name: getattr(snapshot, name) for name in names} | {"attempts": 1, "time": None, "command": None}
