"""
A run folder as rows for a tracker: each logged step once, and the health of each host as means over a quarter of a minute.

Reads files only. A row is new if it comes after the Position, which moves on with each row that is read.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.rundir import RunDir, read_json_lines
from paceline.watch.growing import STATES, GrowingFile
from paceline.watch.lines import parse_lines, unix_time
from paceline.watch.log_lines import read_line
from paceline.watch.log_reading import worth_a_look

HEALTH_S = 15.0
NO_MEASURES = {
    "time",
    "step",
    "index",
    "processes",
    "cores",
    "ram_total",
    "disk_total",
    "total_bytes",
}  # in a line of a file


@dataclass(frozen=True)
class Row:
    """step: None for a row of health. elapsed_s: since the run began."""

    time: float  # Unix seconds
    elapsed_s: float
    values: dict[str, float]
    step: int | None = None


@dataclass
class Position:
    """How far a tracker has come. id: of the run, as the tracker names it."""

    id: str | None = None
    step: int = -1
    time: float = 0.0  # of the row of that step
    health: dict[str, float] = field(default_factory=dict)  # by host: time of the last sample


class RunRows:
    """`read` now and then. redone: a step that a resume does once more makes another row, but not one of a script."""

    def __init__(self, run: RunDir, position: Position, *, redone: bool):
        self.run = run
        self.position = position
        self.redone = redone
        self.began = began(run)
        self.metrics = GrowingFile(run.metrics)
        self.hosts: dict[str, HostRows] = {}
        self.logs: dict[Path, LogRows] = {}

    def read(self, *, last: bool = False) -> Iterator[Row]:
        """What is new, health before steps. last: nothing will follow, so a mean of a shorter time is taken too."""
        health = self.position.health
        for path in sorted(self.run.health_dir.glob("*.jsonl")):
            host = self.hosts.setdefault(path.stem, HostRows(path))
            for at, values in host.read(after=health.get(host.name, 0.0), last=last):
                health[host.name] = at
                yield self.row(at, values)
        redone = self.redone and self.run.metrics.exists()
        for step, at, values in self.steps(last=last):
            if step > self.position.step or (redone and at > self.position.time):
                self.position.step, self.position.time = step, at
                yield self.row(at, values, step)

    def steps(self, *, last: bool) -> Iterator[tuple[int, float, dict[str, float]]]:
        """Of metrics.jsonl; of a script's run, which has none, what the log of rank 0 shows."""
        self.metrics.is_other()  # then it is read again from its beginning
        for block in self.metrics.blocks():
            for record in parse_lines(block):
                at, step = unix_time(record.get("time")), record.get("step")
                if type(step) is int and not math.isnan(at):
                    yield step, at, dict(numbers(record))
        if not self.run.metrics.exists():
            for path in sorted(self.run.path.glob("logs/*/0.log"), key=lambda path: int(path.parent.name)):
                yield from self.logs.setdefault(path, LogRows(path)).read(last=last)

    def row(self, at: float, values: dict[str, float], step: int | None = None) -> Row:
        self.began = self.began or began(self.run) or at
        return Row(at, max(0.0, at - self.began), values, step)


class HostRows:
    """health/HOST.jsonl as means."""

    def __init__(self, path: Path):
        self.name = path.stem
        self.file = GrowingFile(path)
        self.window = 0
        self.time = 0.0
        self.sums: dict[str, tuple[float, int]] = {}

    def read(self, *, after: float, last: bool) -> Iterator[tuple[float, dict[str, float]]]:
        """The time of the last sample in each mean, and the means."""
        after = max(after, self.time)
        self.file.is_other()
        for block in self.file.blocks():
            for record in parse_lines(block):
                at = unix_time(record.get("time"))
                if not at > after:
                    continue
                if at // HEALTH_S != self.window and self.sums:
                    yield self.take()
                self.window, self.time = int(at // HEALTH_S), at
                for name, value in numbers(record):
                    total, count = self.sums.get(name, (0.0, 0))
                    self.sums[name] = total + value, count + 1
        if last and self.sums:
            yield self.take()

    def take(self) -> tuple[float, dict[str, float]]:
        means = {f"health/{self.name}/{name}": total / count for name, (total, count) in self.sums.items()}
        self.sums = {}
        return self.time, means


class LogRows:
    """Steps as a log shows them, each with all that its lines say."""

    def __init__(self, path: Path):
        self.path = path
        self.file = GrowingFile(path, ends=STATES)
        self.step: int | None = None
        self.values: dict[str, float] = {}

    def read(self, *, last: bool) -> Iterator[tuple[int, float, dict[str, float]]]:
        """The lines tell no time that could be compared: it is that of the file, or now."""
        self.file.is_other()
        for block in self.file.blocks():
            at = min(time.time(), self.path.stat().st_mtime)
            for line in worth_a_look(block):
                found = read_line(line.decode(errors="replace"))
                if found is None:
                    continue
                if found.step is not None and found.step != self.step:
                    yield from self.take(at)
                    self.step = found.step
                self.values |= dict(numbers(found.values))
        if last:
            yield from self.take(time.time())

    def take(self, at: float) -> Iterator[tuple[int, float, dict[str, float]]]:
        if self.step is not None and self.values:
            yield self.step, at, self.values
        self.values = {}


def began(run: RunDir) -> float:
    """Unix time of the run's first event; 0 where there is none yet."""
    at = unix_time(next(read_json_lines(run.events), {}).get("time"))
    return 0.0 if math.isnan(at) else at


def numbers(record: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Every finite number in a record, by its path: gpus/0/use, rank_ms/3."""
    for name, value in record.items():
        if name in NO_MEASURES:
            continue
        if isinstance(value, list):
            value = {str(each.get("index", i) if isinstance(each, dict) else i): each for i, each in enumerate(value)}
        if isinstance(value, dict):
            yield from numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            yield prefix + name, value
