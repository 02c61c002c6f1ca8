"""
What health/<host>.jsonl tells of an attempt that failed: Xid errors, memory and disk that ran out, clocks that were held down.

launch/health.py writes it. The kernel log has Xid errors and memory kills too, but few may read it, and none in a container; and
no log has how memory climbed before.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.explain.record import Evidence
from paceline.rundir import read_end
from paceline.units import format_bytes

END_BYTES = 256 << 10  # of the samples: some minutes
NEARLY_ALL = 0.95  # of memory, or of a disk

Sample = dict[str, Any]


@dataclass(frozen=True)
class Samples:
    """A host's last ones of an attempt, the oldest first."""

    path: Path
    lines: Sequence[Sample]

    @property
    def host(self) -> str:
        return self.path.stem

    def ends_of(self, name: str) -> tuple[Sample, Sample] | None:
        """The first and the last that tell a field."""
        told = [line for line in self.lines if isinstance(line.get(name), int)]
        return (told[0], told[-1]) if told else None

    def latest(self, name: str) -> int | None:
        """Of a field that stands only in lines where it changed."""
        ends = self.ends_of(name)
        return ends[1][name] if ends else None


@dataclass(frozen=True)
class Xid:
    """The last one of a GPU."""

    host: str
    line: str  # as the kernel would have put it
    pid: int | None  # of the run's process on that GPU, where the driver told


def read_samples(path: Path, *, since: str) -> Samples:
    """since: the time, as the samples have it, from which they count."""
    lines = []
    for line in read_end(path, END_BYTES)[0].splitlines():
        with suppress(ValueError, KeyError, TypeError):  # a crash has cut it
            sample: Sample = json.loads(line)
            if sample["time"] >= since:
                lines.append(sample)
    return Samples(path, lines)


def count_lines(path: Path) -> int:
    """Of a file of any length, without a look at what they are."""
    with suppress(OSError), path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
    return 0


def xids_of(samples: Samples) -> list[Xid]:
    xids: dict[int, int] = {}
    pids: dict[int, int] = {}
    for gpu in (gpu for line in samples.lines for gpu in line.get("gpus", ())):
        with suppress(KeyError, TypeError, AttributeError):
            for process in gpu.get("processes", ()):
                if process.get("ours"):
                    pids[gpu["index"]] = process["pid"]
            if "xid" in gpu.get("errors", ()):
                xids[gpu["index"]] = gpu["errors"]["xid"]
    return [
        Xid(samples.host, f"NVRM: Xid (PCI:GPU{index}): {xid}, GPU {index} of {samples.host}", pids.get(index))
        for index, xid in xids.items()
    ]


def short_of_memory(samples: Samples) -> list[Evidence]:
    """Of the host, or of the group that a container or a batch system put the run in, at the last sample."""
    found = []
    for used, total, whose in (("ram_used", "ram_total", samples.host), ("cgroup_used", "cgroup_limit", "the group")):
        ends, size = samples.ends_of(used), samples.latest(total)
        if ends and size and ends[1][used] >= NEARLY_ALL * size:
            before, last = ends
            text = (
                f"memory of {whose}: {format_bytes(before[used])} at {clock(before)}, {format_bytes(last[used])} of"
                f" {format_bytes(size)} at {clock(last)}, the last sample"
            )
            found.append(evidence(samples, text))
    return found


def short_of_disk(samples: Samples) -> list[Evidence]:
    ends, size = samples.ends_of("disk_free"), samples.latest("disk_total")
    if not ends or not size or ends[1]["disk_free"] > (1 - NEARLY_ALL) * size:
        return []
    before, last = (f"{format_bytes(each['disk_free'])} free at {clock(each)}" for each in ends)
    return [evidence(samples, f"disk of the run folder on {samples.host}: {before}, {last}, the last sample")]


def held_down(samples: Samples) -> list[Evidence]:
    """GPUs whose clocks were not their own at the last sample, but for the power limit, which is usual."""
    found = []
    for gpu in samples.lines[-1].get("gpus", ()) if samples.lines else ():
        if reasons := [each for each in gpu.get("throttle", ()) if each != "power"]:
            state = [f"{gpu['sm_mhz']} MHz"] * ("sm_mhz" in gpu) + [f"{gpu['temperature_c']} °C"] * (
                "temperature_c" in gpu
            )
            text = f"GPU {gpu.get('index')} of {samples.host} was held down: {', '.join([*reasons, *state])}"
            found.append(evidence(samples, text))
    return found


def clock(sample: Sample) -> str:
    """14:05:31, UTC"""
    return str(sample["time"])[11:19]


def evidence(samples: Samples, text: str) -> Evidence:
    return Evidence(count_lines(samples.path), text, None, f"health/{samples.host}.jsonl")
