"""
metrics.jsonl as curves and columns, read as it grows. Any numeric field becomes a curve; a resume that writes the file anew
begins them anew.
"""

import gc
import math
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.watch.growing import GrowingFile
from paceline.watch.lines import parse_lines, unix_time
from paceline.watch.series import MAX_POINTS, Curve

Record = dict[str, Any]

RECENT_LINES = 50  # what the speed of now is taken from
RANK_POINTS = 32_000  # of all ranks' curves together


class Metrics:
    """`read` now and then; then the rest."""

    def __init__(self, path: Path):
        self.file = GrowingFile(path)
        self._forget()

    def _forget(self) -> None:
        self.curves: dict[str, Curve] = {}
        self.rank_curves: list[Curve] = []
        self.recent: deque[Record] = deque(maxlen=RECENT_LINES)
        self.latest: Record = {}  # the last value of each field
        self._columns = {name: array("d") for name in ("step", "time", "step_ms", "val_bpb")}

    def read(self) -> None:
        """What is new."""
        if self.file.is_other():
            self._forget()
        with collector_at_rest():
            for block in self.file.blocks():
                records = parse_lines(block)
                self._add([record for record in records if type(record.get("step")) is int])

    def column(self, name: str) -> NDArray[np.float64]:
        """step, time, step_ms or val_bpb of all lines; NaN where a line lacks it."""
        return np.frombuffer(self._columns[name]) if self._columns[name] else np.empty(0)

    def _add(self, records: Sequence[Record]) -> None:
        if not records:
            return
        self.recent.extend(records[-RECENT_LINES:])
        values = by_name(records)
        texts, ranks = values.pop("time", ()), values.pop("rank_ms", ())
        columns = {name: numbers(values[name]) for name in values}
        absent = np.full(len(records), math.nan)
        columns["time"] = filled(unix_times(texts) if texts else absent, self.latest.get("time", 0.0))
        for name, column in self._columns.items():
            column.frombytes(columns.get(name, absent).tobytes())
        for name, found in columns.items():
            if name not in ("step", "time"):
                self.curves.setdefault(name, Curve()).extend(columns["step"], found, columns["time"])
            sound = np.flatnonzero(np.isfinite(found))
            if len(sound):
                self.latest[name] = float(found[sound[-1]])
        if ranks:
            self._add_ranks(ranks, columns["step"], columns["time"])

    def _add_ranks(self, ranks: Sequence[Any], steps: NDArray[np.float64], times: NDArray[np.float64]) -> None:
        """ranks: of each line what it says of all ranks, or None. How many they are may change with an attempt."""
        counts = np.array([len(each) if isinstance(each, list) else 0 for each in ranks])
        for count in sorted(set(counts.tolist()) - {0}):
            rows = np.flatnonzero(counts == count)
            busy = numbers(list(chain.from_iterable(ranks[row] for row in rows.tolist()))).reshape(-1, count)
            while len(self.rank_curves) < count:
                self.rank_curves.append(Curve(max_points=min(MAX_POINTS, max(100, RANK_POINTS // count))))
            for rank in range(count):
                self.rank_curves[rank].extend(steps[rows], busy[:, rank], times[rows])


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Many small objects at once make Python's collector walk them over and over: a fifth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def by_name(records: Sequence[Record]) -> dict[str, Sequence[Any]]:
    """The values of each field, None where a record lacks it. Most records have the same fields: those go fast."""
    common = [name for name in records[0] if name in records[-1]]
    try:
        rows = map(itemgetter(*common), records) if len(common) > 1 else ((each[common[0]],) for each in records)
        found: dict[str, Sequence[Any]] = dict(zip(common, zip(*rows, strict=True), strict=True))
    except KeyError:
        found = {}
    others = set().union(*[record for record in records if len(record) != len(found)]) - found.keys()
    return found | {name: [record.get(name) for record in records] for name in others}


def numbers(values: Sequence[Any]) -> NDArray[np.float64]:
    """NaN for what is no number."""
    with suppress(ValueError, TypeError):
        return np.array(values, dtype=float)  # None becomes NaN
    return np.array([value if isinstance(value, int | float) else math.nan for value in values], dtype=float)


def unix_times(texts: Sequence[Any]) -> NDArray[np.float64]:
    """Of ISO times in UTC; NaN for what is none."""
    with suppress(ValueError, TypeError):
        if len(texts[0]) == len(texts[-1]) == 24 and texts[0][-1] == "Z":  # as rundir.utc_now writes them
            return np.array(texts, dtype="U23").astype("datetime64[ms]").astype(np.int64) / 1000
    return np.array([unix_time(text) for text in texts])


def filled(times: NDArray[np.float64], before: float) -> NDArray[np.float64]:
    """A line without a time has that of the line before."""
    times = np.concatenate([[before], times])
    known = np.maximum.accumulate(np.where(np.isnan(times), 0, np.arange(len(times))))
    return times[known][1:]
