"""
health/<host>.jsonl as curves and as what is so now, read as it grows. launch/health.py writes it.

A long file is not read whole: lines at even distances make the curves, its end the present. A field that seldom changes stands
only in some lines; it holds until it is told anew.
"""

import os
import statistics
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from paceline.watch.growing import GrowingFile
from paceline.watch.lines import parse_lines, unix_time
from paceline.watch.series import Curve
from paceline.watch.snapshot import GpuView, HostView

WHOLE_BYTES = 2 << 20  # read whole up to this size
END_BYTES = 256 << 10  # of a longer file: the last minutes, whole
NUM_SAMPLES = 1000  # of what stands before
LINE_BYTES = 16 << 10  # no line is longer
LAST_GAPS = 9  # between samples, whose median is the usual one
GPU_CURVES = ("use", "used_bytes", "power_w", "temperature_c", "sm_mhz")
HOST_CURVES = ("cpu", "ram_used", "cgroup_used", "disk_free", "net_in_bps", "net_out_bps")
HOST_FIELDS = {field.name for field in fields(HostView)} - {"name", "time", "every_s", "gpus"}
GPU_FIELDS = {field.name for field in fields(GpuView)} - {"index"}


class Host:
    """One host's samples. `read` now and then; then the rest."""

    def __init__(self, path: Path):
        self.name = path.stem
        self.file = GrowingFile(path)
        self._forget()

    def _forget(self) -> None:
        self.time: float | None = None
        self.host_curves: dict[str, Curve] = {}
        self.gpu_curves: dict[tuple[int, str], Curve] = {}
        self._gaps: deque[float] = deque(maxlen=LAST_GAPS)
        self._values: dict[str, Any] = {}
        self._gpus: dict[int, dict[str, Any]] = {}
        self._energy: dict[int, tuple[int, int]] = {}  # of each GPU: of earlier attempts, and of the last

    def read(self) -> None:
        """What is new."""
        if self.file.is_other():
            self._forget()
        if self.file.offset == 0:
            self._read_evenly()
        for block in self.file.blocks():
            self._add(parse_lines(block))

    def _read_evenly(self) -> None:
        """The past of a long file; leaves its end to be read whole."""
        with suppress(OSError), self.file.path.open("rb") as file:
            end = os.fstat(file.fileno()).st_size - END_BYTES
            if end + END_BYTES > WHOLE_BYTES:
                self._add(list(sampled_lines(file.fileno(), end=end)))
                before = os.pread(file.fileno(), LINE_BYTES, end - LINE_BYTES)
                whole = end - LINE_BYTES + before.rfind(b"\n") + 1
                self.file.skip_to(whole, before=before[: before.rfind(b"\n") + 1])

    def _add(self, records: list[dict[str, Any]]) -> None:
        points: dict[tuple[int | None, str], tuple[list[float], list[float]]] = {}
        for record in records:
            time = unix_time(record.get("time"))
            if not time > (self.time or 0):
                continue
            if self.time is not None:
                self._gaps.append(time - self.time)
            self.time = time
            self._values.update({name: record[name] for name in HOST_FIELDS & record.keys()})
            parts: list[tuple[int | None, tuple[str, ...], dict[str, Any]]] = [(None, HOST_CURVES, record)]
            for gpu in record.get("gpus", ()):
                known = self._gpus.setdefault(gpu["index"], {})
                known.update({"throttle": []} | {name: gpu[name] for name in GPU_FIELDS & gpu.keys()})
                parts.append((gpu["index"], GPU_CURVES, gpu))
                self._add_energy(gpu["index"], gpu.get("energy_j"))
            for index, names, values in parts:
                for name in names:
                    if isinstance(value := values.get(name), int | float):
                        times, found = points.setdefault((index, name), ([], []))
                        times.append(time)
                        found.append(value)
        for (index, name), (times, found) in points.items():
            if index is None:
                curve = self.host_curves.setdefault(name, Curve())
            else:
                curve = self.gpu_curves.setdefault((index, name), Curve())
            curve.extend(times, found, times)

    def _add_energy(self, index: int, joules: Any) -> None:
        """It is counted from the start of an attempt: where it is less than before, another has begun."""
        if isinstance(joules, int):
            before, last = self._energy.get(index, (0, 0))
            self._energy[index] = (before + last, joules) if joules < last else (before, joules)

    @property
    def energy_j(self) -> int | None:
        """Of all its GPUs in all attempts; None where no card tells."""
        return sum(map(sum, self._energy.values())) if self._energy else None

    def view(self) -> HostView:
        gpus = [GpuView(index, **values) for index, values in sorted(self._gpus.items())]
        every_s = statistics.median(self._gaps) if self._gaps else None
        return HostView(self.name, self.time, every_s, **self._values, gpus=gpus)


def sampled_lines(fd: int, *, end: int) -> Iterator[dict[str, Any]]:
    """Whole lines that begin before `end`, at even distances, in their order."""
    last = -1
    for number in range(NUM_SAMPLES):
        offset = end * number // NUM_SAMPLES
        chunk = os.pread(fd, LINE_BYTES, offset)
        start = 0 if offset == 0 else chunk.find(b"\n") + 1
        stop = chunk.find(b"\n", start)
        if stop >= 0 and (start or not offset) and offset + start > last:
            last = offset + start
            yield from parse_lines(chunk[start:stop])
