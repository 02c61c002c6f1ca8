"""
Any training log to one Snapshot, again and again, each time reading only what is new.

What its lines say of step, loss and speed is log_lines.py's; what broke is paceline.explain's. Of a log of gigabytes
pieces at even distances make the curves.
"""

import math
import os
import re
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import PacelineError
from paceline.explain.explain import explain
from paceline.units import format_bytes
from paceline.watch.concerns import longest_silence
from paceline.watch.growing import LINES, STATES, GrowingFile, last_end
from paceline.watch.log_lines import WORTH_A_LOOK, framework_of, read_line
from paceline.watch.series import Curve
from paceline.watch.snapshot import LogView, Series, Snapshot, State

WHOLE_BYTES = 1 << 20  # read whole up to this size
PIECE_BYTES = 8 << 10
LINE_END = re.compile(rb"[\n\r]")
NUM_PIECES = 64
EXPLAINED_BYTES = 64 << 20  # explained whole up to this size; of a longer log its first FIRST_BYTES and its end
FIRST_BYTES = 8 << 20
EXPLAIN_EVERY_S = 15.0  # while it grows
QUIET = 2  # times the silence that is worth a word: a log that has not grown for so long has ended
LEFT_OUT = (
    f"of {{}} the first {FIRST_BYTES >> 20} MiB and the last {(EXPLAINED_BYTES - FIRST_BYTES) >> 20} are searched for the cause,"
    " and lines counted in these"
)
LAST_SILENCES = 100  # looks between which a log grew, from which it is known how long it may be silent


class LogCurves:
    """The measures of one log. `read` now and then; then the rest."""

    def __init__(self, path: Path):
        self.file = GrowingFile(path, ends=STATES)
        self._forget()

    def _forget(self) -> None:
        self.curves: dict[str, Curve] = {}
        self.latest: dict[str, float] = {}
        self.framework: str | None = None
        self.step: int | None = None
        self.num_steps: int | None = None
        self.first_step: int | None = None
        self.num_lines = 0  # that tell of progress, of those that were read
        self._silences: deque[float] = deque(maxlen=LAST_SILENCES)
        self._seen: tuple[int, float] | None = None  # at the last look: its size, seconds since it was written
        self._told = False  # a line has said which step it is of
        self._now = 0.0  # when the file was written last

    def read(self) -> None:
        """What is new."""
        if self.file.is_other():
            self._forget()
        with suppress(OSError):
            stat = self.file.path.stat()
            if self._seen and stat.st_size > self._seen[0]:
                self._silences.append(self._seen[1])
            self._now, self._seen = stat.st_mtime, (stat.st_size, max(0.0, time.time() - stat.st_mtime))
        if self.file.offset == 0:
            self._read_pieces()
        for block in self.file.blocks():
            self._add(block)

    def series(self) -> dict[str, Series]:
        return {name: curve.series() for name, curve in self.curves.items()}

    def fields(self) -> dict[str, Any]:
        """Of a Snapshot."""
        latest = self.latest
        eta_s = None
        if self.num_steps and self.step is not None and "step_ms" in latest:
            eta_s = max(0, self.num_steps - self.step) * latest["step_ms"] / 1000
        known = {name: latest.get(name) for name in ("loss", "val_bpb", "tok_per_sec", "step_ms", "mfu")}
        return {
            "framework": self.framework, "step": self.step or 0, "num_steps": self.num_steps, "eta_s": eta_s,
            "silence_s": max(self._silences, default=None), "series": self.series(), **known,
        }  # fmt: skip

    def eta_s(self, *, since: float) -> float | None:
        """At the pace of the steps that were done since then, a Unix time; for a log whose lines tell none."""
        if not self.num_steps or self.step is None or self.step <= (first := self.first_step or 0):
            return None
        return max(0, self.num_steps - self.step) * (time.time() - since) / (self.step - first)

    def _read_pieces(self) -> None:
        with suppress(OSError), self.file.path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= WHOLE_BYTES:
                return
            end = size - WHOLE_BYTES // 4
            for number in range(NUM_PIECES):
                piece = os.pread(file.fileno(), PIECE_BYTES, end * number // NUM_PIECES)
                first = LINE_END.search(piece)
                self._add(piece[first.end() if first and number else 0 : last_end(piece, STATES)])
            before = os.pread(file.fileno(), PIECE_BYTES, end - PIECE_BYTES)
            whole = last_end(before, STATES)
            self.file.skip_to(end - PIECE_BYTES + whole, before=before[:whole])

    def _add(self, block: bytes) -> None:
        points: dict[str, tuple[list[int], list[float]]] = {}
        for line in worth_a_look(block):
            text = line.decode(errors="replace")
            self.framework = self.framework or framework_of(text)
            found = read_line(text)
            if found is None or (found.by_bar and (found.num_steps or math.inf) < (self.num_steps or 0)):
                continue  # a shorter bar is that of an evaluation
            self.num_steps = found.num_steps or self.num_steps
            self.num_lines += 1
            if found.step is not None:
                if self.step is not None and found.step < self.step:
                    self._extend(points)  # it began again from an earlier step
                    points, self.first_step = {}, None
                self.step, self._told = found.step, True
                self.first_step = found.step if self.first_step is None else self.first_step
            elif not self._told and "loss" in found.values:
                self.step = (self.step or 0) + 1  # nothing counts the steps: the lines do
            for name, value in found.values.items():
                self.latest[name] = value
                steps, values = points.setdefault(name, ([], []))
                steps.append(self.step or 0)
                values.append(value)
        self._extend(points)

    def _extend(self, points: dict[str, tuple[list[int], list[float]]]) -> None:
        """When each step was done, its lines do not say in a form that all loggers share: by the pace, back from now."""
        for name, (steps, values) in points.items():
            times = self._now - (steps[-1] - np.array(steps)) * self.latest.get("step_ms", 0.0) / 1000
            self.curves.setdefault(name, Curve()).extend(steps, values, times)


def worth_a_look(block: bytes) -> Iterator[bytes]:
    """Lines, and the states of a progress bar, that may tell of progress."""
    for line in block.split(b"\n"):
        for state in line.rstrip(b"\r").split(b"\r"):
            if len(state) < 4000 and WORTH_A_LOOK.search(state):
                yield state


class LogReader:
    """A log of anybody's training."""

    def __init__(self, path: Path):
        self.path = path
        self.curves = LogCurves(path)
        self._explained: dict[str, Any] | None = None
        self._explained_at = (-1, -math.inf)  # its size, and when

    def update(self) -> Snapshot:
        self.curves.read()
        try:
            stat = self.path.stat()
        except OSError:
            return Snapshot(self.path.name, str(self.path), "log", "unknown", notes=[f"{self.path} is gone"])
        said = self._explanation(stat.st_size)
        fields = self.curves.fields()
        quiet_s = QUIET * longest_silence(fields["step_ms"], fields["silence_s"])
        state = state_of(said, quiet=time.time() - stat.st_mtime > quiet_s)
        told = said if said and state in ("failed", "broken") else None
        if state != "running":
            fields["eta_s"] = None
        notes = [LEFT_OUT.format(format_bytes(stat.st_size))] if told and stat.st_size > EXPLAINED_BYTES else []
        return Snapshot(
            name=self.path.name, path=str(self.path), kind="log", state=state, updated=stat.st_mtime,
            logs=[LogView(1, None, str(self.path), stat.st_size)], explanation=told, notes=notes,
            **fields,
        )  # fmt: skip

    def _explanation(self, size: int) -> dict[str, Any] | None:
        known_size, at = self._explained_at
        if size != known_size and time.monotonic() - at > EXPLAIN_EVERY_S:
            with suppress(PacelineError, OSError):
                self._explained = asdict(explain(self.path if size <= EXPLAINED_BYTES else ends_of(self.path, size)))
            self._explained_at = (size, time.monotonic())
        return self._explained


def ends_of(path: Path, size: int) -> Iterator[bytes]:
    """The whole lines at both ends of a file."""
    with path.open("rb") as file:
        first = file.read(FIRST_BYTES)
        yield first[: last_end(first, LINES)]
        file.seek(size - EXPLAINED_BYTES + FIRST_BYTES)
        file.readline(PIECE_BYTES)
        yield from iter(lambda: file.read(WHOLE_BYTES), b"")


def state_of(said: dict[str, Any] | None, *, quiet: bool) -> State:
    """said: the explanation of the log, where there is one."""
    if said is None:
        return "unknown" if quiet else "running"
    progress = said["progress"]
    if said["cause"] not in ("healthy", "unknown"):
        return "failed"
    if progress["finished"]:
        return "finished"
    if not progress["steps"]:
        return "unknown"
    return "broken" if quiet else "running"
