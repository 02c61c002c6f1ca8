"""
metrics.jsonl and health/<host>.jsonl as curves and as their last values, read as the files grow.

Any numeric field becomes a curve. A Curve needs bounded memory, however long the run: it keeps the lowest and the highest point
of each stretch of steps. Stretches are powers of two wide and begin at zero, so a longer one consists of whole shorter ones, and
what is an extreme of a stretch now was kept at every earlier thinning. The last points stay whole, because trend.py judges them.

A long health file is not read whole: lines at even distances make the curves, its end the present. A field that seldom
changes stands in some lines only; it holds until a line has it again. launch/health.py writes these files.
"""

import math
import statistics
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.units import unix_time
from paceline.watch.growing_file import GrowingFile, JsonRecord, by_name, parse_lines, paused_collector
from paceline.watch.snapshot import GpuView, HostView, Series
from paceline.watch.trend import WHOLE_LINES

MAX_POINTS = 2000  # of a curve
THIN_AT = 8  # times its points a curve takes before it is thinned, unless it is requested
MAX_RANK_POINTS = 32_000  # of all ranks' curves together
MAX_DEVICE_POINTS = 64_000  # of all curves of a host and its GPUs together
SLOW = 1.15  # times as long as the other ranks takes a slow one
SLOW_LINES, MIN_SLOW_LINES = 20, 10  # logged steps over which the times of ranks are compared
SLOW_SHARE = 0.85  # of SLOW_LINES lines in which a slow rank takes longer than the others; of fewer lines, all
RECENT_LINES = 50  # of metrics.jsonl, from which the present speed is taken
WHOLE_BYTES = 2 << 20  # a health file up to this size is read whole
END_BYTES = 256 << 10  # of a longer file: the last minutes, whole
NUM_SAMPLES = 1000  # of what stands before its end
MAX_LINE_BYTES = 16 << 10
NUM_GAPS = 9  # between samples; their median is the usual gap
GPU_CURVES = (
    "use", "used_bytes", "power_w", "temperature_c", "sm_mhz", "memory_use", "pcie_in_bps", "pcie_out_bps",
)  # fmt: skip
HOST_CURVES = (
    "cpu", "ram_used", "cgroup_used", "disk_free", "net_in_bps", "net_out_bps", "disk_read_bps", "disk_write_bps",
)  # fmt: skip
HOST_FIELDS = {field.name for field in fields(HostView)} - {"name", "time", "every_s", "gpus"}
GPU_FIELDS = {field.name for field in fields(GpuView)} - {"index", "throttled"}


class Metrics:
    """metrics.jsonl: call `read` now and then, and use the attributes after it."""

    def __init__(self, path: Path):
        self.file = GrowingFile(path)
        self._forget()

    def _forget(self) -> None:
        self.curves: dict[str, Curve] = {}
        self.rank_curves: list[Curve] = []
        self.recent: deque[JsonRecord] = deque(maxlen=RECENT_LINES)
        self.latest: JsonRecord = {}  # the last value of each field
        self.slow_shares: dict[int, float] = {}  # by rank: the share of the run in which it was slow
        self._num_slow, self._num_windows = Counter[int](), 0  # stretches of SLOW_LINES lines
        self._window = np.empty((0, 0))  # times of ranks of which there are no SLOW_LINES yet
        self._columns = {name: array("d") for name in ("step", "time", "step_ms", "val_bpb")}

    def read(self) -> None:
        """Reads what is new."""
        if self.file.restarted():
            self._forget()
        with paused_collector():
            for block in self.file.blocks():
                records = [record for record in parse_lines(block) if type(record.get("step")) is int]
                first = records[:1] if records and records[0]["step"] == 0 else []  # has fewer fields than all others
                self._add(first)
                self._add(records[len(first) :])

    def column(self, name: str) -> NDArray[np.float64]:
        """Returns step, time, step_ms or val_bpb of all lines as float64; NaN where a line lacks it."""
        return np.frombuffer(self._columns[name]) if self._columns[name] else np.empty(0)

    def _add(self, records: Sequence[JsonRecord]) -> None:
        if not records:
            return
        self.recent.extend(records)
        values = by_name(records)
        texts, ranks = values.pop("time", ()), values.pop("rank_ms", ())
        columns = {name: numbers(values[name]) for name in values}
        absent = np.full(len(records), math.nan)
        times = np.concatenate([[self.latest.get("time", 0.0)], unix_times(texts) if texts else absent])
        last_known = np.maximum.accumulate(np.where(np.isnan(times), 0, np.arange(len(times))))
        columns["time"] = times[last_known][1:]  # a line without a time has that of the line before it
        for name, column in self._columns.items():
            column.frombytes(columns.get(name, absent).tobytes())
        for name, column_values in columns.items():
            if name not in ("step", "time"):
                self.curves.setdefault(name, Curve()).extend(columns["step"], column_values, columns["time"])
            finite_rows = np.flatnonzero(np.isfinite(column_values))
            if len(finite_rows):
                self.latest[name] = float(column_values[finite_rows[-1]])
        if ranks:
            self._add_ranks(ranks, columns["step"], columns["time"])

    def _add_ranks(self, ranks: Sequence[Any], steps: NDArray[np.float64], times: NDArray[np.float64]) -> None:
        """ranks: each line's list of one value per rank, or None. The number of ranks may change with an attempt."""
        counts = np.array([len(values) if isinstance(values, list) else 0 for values in ranks])
        for count in sorted(set(counts.tolist()) - {0}):
            rows = np.flatnonzero(counts == count)
            busy = numbers(list(chain.from_iterable(ranks[row] for row in rows.tolist()))).reshape(-1, count)
            while len(self.rank_curves) < count:
                self.rank_curves.append(Curve(max_points=min(MAX_POINTS, max(100, MAX_RANK_POINTS // count))))
            for rank in range(count):
                self.rank_curves[rank].extend(steps[rows], busy[:, rank], times[rows])
            self._judge_ranks(busy)

    def _judge_ranks(self, busy: NDArray[np.float64]) -> None:
        """Counts the stretches in which each rank was slow. busy: (lines, ranks)."""
        same_ranks = self._window.shape[1] == busy.shape[1]
        lines = np.concatenate([self._window, busy]) if same_ranks else busy
        count = len(lines) // SLOW_LINES
        self._window = lines[count * SLOW_LINES :]
        if count:
            slow = slow_ranks(lines[: count * SLOW_LINES].reshape(count, SLOW_LINES, -1)).sum(axis=0)
            self._num_windows += count
            self._num_slow.update(dict(enumerate(slow.tolist())))
            self.slow_shares = {rank: number / self._num_windows for rank, number in self._num_slow.items()}


def slow_ranks(times: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Returns which ranks clearly take longer than the others. times: (..., lines, ranks), own work without waiting.

    A rank is compared with the median of the others, which of two ranks is the other one. With 20 lines, 20,000 looks at two
    ranks with a jitter of 10 % show no slow one, and of ranks that are 28 % slower 99 % are found.
    """
    lines, ranks = times.shape[-2:]
    if ranks < 2 or lines < MIN_SLOW_LINES:
        return np.zeros((*times.shape[:-2], ranks), dtype=bool)
    usual = np.median(times, axis=-2)
    slow: NDArray[np.bool_] = usual > SLOW * median_of_others(usual)
    if not slow.any():
        return slow
    share = (times > median_of_others(times)).mean(axis=-2)
    slow &= share >= (SLOW_SHARE if lines >= SLOW_LINES else 1.0)
    return slow


def median_of_others(times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns for each of the last axis the median of all others."""
    ordered, place = np.sort(times, axis=-1), times.argsort(axis=-1).argsort(axis=-1)
    others = times.shape[-1] - 1
    low, high = (
        np.where(index < place, ordered[..., index, None], ordered[..., index + 1, None])
        for index in ((others - 1) // 2, others // 2)
    )
    return (low + high) / 2


class HostHealth:
    """health/<host>.jsonl: call `read` now and then, and use the attributes after it."""

    def __init__(self, path: Path):
        self.name = path.stem
        self.file = GrowingFile(path)
        self._forget()

    def _forget(self) -> None:
        self.time: float | None = None
        # by group and key of a Snapshot
        self.curves: dict[str, dict[str, Curve]] = {"host_series": {}, "gpu_series": {}}
        self._gaps: deque[float] = deque(maxlen=NUM_GAPS)
        self._values: JsonRecord = {}
        self._gpus: dict[int, JsonRecord] = {}
        self._num_samples = Counter[int]()  # by GPU
        self._num_throttled = Counter[tuple[int, str]]()  # by GPU and reason
        self._energy: dict[int, tuple[int, int]] = {}  # by GPU: joules of earlier attempts, and of the last

    def read(self) -> None:
        """Reads what is new."""
        if self.file.restarted():
            self._forget()
        pieces = self.file.samples(WHOLE_BYTES, end_bytes=END_BYTES, count=NUM_SAMPLES, piece_bytes=MAX_LINE_BYTES)
        self.add([record for piece in pieces for record in parse_lines(piece[: piece.find(b"\n") + 1])])
        for block in self.file.blocks():
            self.add(parse_lines(block))

    def add(self, records: list[JsonRecord]) -> None:
        """Adds lines of the file, or samples like them."""
        # the lines of each device with their times, by group, device and the names of its curves
        devices: dict[tuple[str, str, tuple[str, ...]], tuple[list[float], list[JsonRecord]]] = defaultdict(
            lambda: ([], [])
        )
        for record in records:
            time = unix_time(record.get("time"))
            if not time > (self.time or 0):
                continue
            if self.time is not None:
                self._gaps.append(time - self.time)
            self.time = time
            self._values.update({name: record[name] for name in HOST_FIELDS & record.keys()})
            parts: list[tuple[tuple[str, str, tuple[str, ...]], JsonRecord]] = [
                (("host_series", self.name, HOST_CURVES), record)
            ]
            gpus = record["gpus"] if isinstance(record.get("gpus"), list) else ()
            for gpu in [gpu for gpu in gpus if isinstance(gpu, dict) and type(gpu.get("index")) is int]:
                gpu_values = self._gpus.setdefault(gpu["index"], {})
                # these stand in every line, unless a card does not report them, as after it left the bus
                unknown: JsonRecord = dict.fromkeys(GPU_FIELDS.intersection(GPU_CURVES)) | {"throttle": []}
                gpu_values.update(unknown | {name: gpu[name] for name in GPU_FIELDS & gpu.keys()})
                self._num_samples[gpu["index"]] += 1
                for reason in gpu_values["throttle"]:
                    self._num_throttled[gpu["index"], reason] += 1
                parts.append((("gpu_series", f"{self.name}/{gpu['index']}", GPU_CURVES), gpu))
                if isinstance(joules := gpu.get("energy_j"), int):
                    before, last = self._energy.get(gpu["index"], (0, 0))
                    # it is counted from the start of an attempt, so a smaller value means another attempt
                    self._energy[gpu["index"]] = (before + last, joules) if joules < last else (before, joules)
            for device, values in parts:
                devices[device][0].append(time)
                devices[device][1].append(values)
        count = len(GPU_CURVES) * len(self._gpus) + len(HOST_CURVES)
        for (group, device_name, names), (times, rows) in devices.items():
            for name in names:
                column = numbers([row.get(name) for row in rows])
                if not np.isfinite(column).any():
                    continue
                key = f"{device_name} {name}"
                if (curve := self.curves[group].get(key)) is None:
                    curve = self.curves[group][key] = Curve(max_points=min(MAX_POINTS, MAX_DEVICE_POINTS // count))
                curve.extend(times, column, times)

    def energy_j(self) -> list[int]:
        """Returns the energy in all attempts of each GPU that reports it."""
        return list(map(sum, self._energy.values()))

    def view(self) -> HostView:
        throttled: dict[int, dict[str, float]] = {index: {} for index in self._gpus}
        for (index, reason), number in self._num_throttled.items():
            throttled[index][reason] = round(number / self._num_samples[index], 4)
        gpus = [GpuView(index, **values, throttled=throttled[index]) for index, values in sorted(self._gpus.items())]
        every_s = statistics.median(self._gaps) if self._gaps else None
        return HostView(self.name, self.time, every_s, **self._values, gpus=gpus)


class Curve:
    """A curve that is thinned now and then. Its points are in the order of x: steps, or seconds where nothing counts steps."""

    def __init__(self, *, max_points: int = MAX_POINTS, has_gaps: bool = False):
        """has_gaps: keeps non-finite values; else they mean that a line lacks the field."""
        self.max_points, self.has_gaps = max_points, has_gaps
        self.x = self.values = self.times = np.empty(0)
        self._series: Series | None = None

    def extend(self, x: ArrayLike, values: ArrayLike, times: ArrayLike) -> None:
        """Adds points. A point replaces those at its x and behind it."""
        new = [np.asarray(column, dtype=float) for column in (x, values, times)]
        if not self.has_gaps:
            new = [column[np.isfinite(new[1])] for column in new]
        if not len(new[0]):
            return
        if not (np.diff(new[0]) > 0).all():
            following = np.minimum.accumulate(new[0][::-1])[::-1]  # the least x from each point on
            new = [column[np.append(new[0][:-1] < following[1:], True)] for column in new]
        self.cut(new[0][0])
        self.x, self.values, self.times = (
            np.concatenate([old, column]) for old, column in zip((self.x, self.values, self.times), new, strict=True)
        )
        if len(self.x) > THIN_AT * self.max_points:
            self._thin()

    def cut(self, x: float) -> None:
        """Removes the points at x and behind it."""
        count = int(np.searchsorted(self.x, x))
        self.x, self.values, self.times = self.x[:count], self.values[:count], self.times[:count]
        self._series = None

    def _thin(self) -> None:
        if len(self.x) <= self.max_points:
            return
        whole = len(self.x) - min(WHOLE_LINES, self.max_points // 4)  # where the points that stay begin
        index = extremes(self.x[:whole], self.values[:whole], max_points=self.max_points - (len(self.x) - whole))
        index = np.concatenate([index, np.arange(whole, len(self.x))])
        self.x, self.values, self.times = self.x[index], self.values[index], self.times[index]

    def series(self, steps: NDArray[np.float64] | None = None, times: NDArray[np.float64] | None = None) -> Series:
        """Returns the curve with x as steps, or with the last of the run's logged steps, finished at `times`, at each time."""
        if self._series is None:
            self._thin()
            x = self.x
            if steps is not None and times is not None:
                x = np.concatenate([[0.0], steps])[np.searchsorted(times, self.times, side="right")]
            self._series = Series(x.astype(int).tolist(), self.values.tolist(), self.times.tolist())
        return self._series


def join_series(attempts: Iterable[Mapping[str, Curve]], *, by_line: bool) -> dict[str, Series]:
    """Returns curves of several attempts by name; each attempt replaces what an earlier one shows from its first step on.

    by_line: lines are counted in place of steps, in each attempt from 1; an attempt follows the lines of earlier epochs.
    """
    joined: dict[str, Curve] = {}
    for curves in attempts:
        shift = 0.0
        if by_line and "epoch" in curves and "epoch" in joined:
            earlier = joined["epoch"].values < curves["epoch"].values[0]
            shift = joined["epoch"].x[earlier].max(initial=0.0)
        first = min((curve.x.min(initial=math.inf) for curve in curves.values()), default=math.inf)
        for curve in joined.values():
            curve.cut(first + shift)
        for name, curve in curves.items():
            joined.setdefault(name, Curve(has_gaps=True)).extend(curve.x + shift, curve.values, curve.times)
    return {name: curve.series() for name, curve in joined.items()}


def extremes(x: NDArray[np.float64], values: NDArray[np.float64], *, max_points: int) -> NDArray[np.intp]:
    """Returns the indices of each stretch's lowest, highest and first non-finite point, and of the first and the last point."""
    width = 1.0
    while (x[-1] - x[0]) / width >= max_points // 2 - 2:
        width *= 2
    stretch = np.floor(x / width)  # a power of two divides exactly
    starts = np.flatnonzero(np.concatenate([[True], stretch[1:] != stretch[:-1]]))
    sizes, is_kept = np.diff(np.append(starts, len(x))), np.zeros(len(x), dtype=bool)
    is_kept[[0, -1]] = True
    finite = np.where(np.isfinite(values), values, np.nan)
    lowest, highest = (np.repeat(extreme.reduceat(finite, starts), sizes) for extreme in (np.fmin, np.fmax))
    for is_hit in (values == lowest, values == highest, np.isnan(finite)):
        hits = np.flatnonzero(is_hit)
        is_kept[hits[np.unique(stretch[hits], return_index=True)[1]]] = True  # the first of a stretch
    return np.flatnonzero(is_kept)


def numbers(values: Sequence[Any]) -> NDArray[np.float64]:
    """Returns float64 values, with NaN for everything that is not a number."""
    with suppress(ValueError, TypeError):
        return np.array(values, dtype=float)  # None becomes NaN
    return np.array([value if isinstance(value, int | float) else math.nan for value in values], dtype=float)


def unix_times(texts: Sequence[Any]) -> NDArray[np.float64]:
    """Converts ISO times in UTC to Unix seconds; NaN for anything that is not a time."""
    with suppress(ValueError, TypeError):
        if len(texts[0]) == len(texts[-1]) == 24 and texts[0][-1] == "Z":  # as rundir.utc_now writes them
            return np.array(texts, dtype="U23").astype("datetime64[ms]").astype(np.int64) / 1000
    return np.array([unix_time(text) for text in texts])
