"""
Evidence that no log contains: flight recorder dumps, samples of the hosts' health, and the kernel log.

A flight recorder dump shows which rank did not arrive at a collective that the others wait in. It is a pickle of plain values, one
file per rank, `<prefix><rank>`; a class in it is rejected, so a file that only looks like a dump runs no code. Format:
torch/csrc/distributed/c10d/FlightRecorder.hpp. health/<host>.jsonl (launch/health.py) has Xid errors, memory and disk use, and
reduced clocks. The kernel log has kills and Xid errors too, but few users may read it: if nobody can, that is no error.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.explain.explanation import Evidence, Record
from paceline.explain.matches import FLIGHT_RECORDER
from paceline.explain.reader import Log
from paceline.rundir import read_end
from paceline.units import format_bytes

MAX_DUMP_BYTES = 1 << 26
SAMPLE_BYTES = 256 << 10  # from the end of a file: some minutes of samples
KERNEL_LOG_BYTES = 1 << 20  # from the end of a file
NEARLY_ALL = 0.95  # of memory, or of a disk
KMSG = Path("/dev/kmsg")
KERNEL_LOGS = (Path("/var/log/kern.log"), Path("/var/log/messages"), Path("/var/log/syslog"))
KILL_DELAY_S = 10.0  # by which the kernel may log a kill later than the process ends
MAX_PID_DIGITS = 9

RANK = re.compile(r"(\d+)$")
NUMBER = re.compile(r"\d+")
OOM_KILL = re.compile(r"Killed process \d+|oom-kill:")
KERNEL_ERROR = re.compile(r"Killed process|oom-kill|Out of memory|Xid|segfault at|general protection", re.IGNORECASE)
BROKEN_DUMP = (
    *(OSError, EOFError, KeyError, TypeError, ValueError, AttributeError, IndexError, MemoryError),
    pickle.UnpicklingError,
)

Sample = dict[str, Any]


@dataclass(frozen=True)
class LastCollective:
    """The last collective that one rank recorded."""

    sequence: int
    name: str


@dataclass(frozen=True)
class Samples:
    """The last samples of a host in one attempt, the oldest first."""

    path: Path
    lines: Sequence[Sample]

    @property
    def host(self) -> str:
        return self.path.stem

    def ends_of(self, name: str) -> tuple[Sample, Sample] | None:
        """The first and the last sample that have a field: some fields are only in samples in which they changed."""
        lines = [line for line in self.lines if isinstance(line.get(name), int)]
        return (lines[0], lines[-1]) if lines else None

    def evidence(self, text: str) -> Evidence:
        """A text about the last sample."""
        return Evidence(count_lines(self.path), text, None, f"health/{self.host}.jsonl")


class PlainUnpickler(pickle.Unpickler):
    """Loads numbers, strings, lists and dicts only."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} in a flight recorder dump")


def flight_recorder_log(paths: Sequence[Path]) -> Log | None:
    """A log of one line about the late rank; None if the dumps do not show exactly one."""
    last = {
        int(match[1]): collective
        for path in paths
        if (match := RANK.search(path.name)) and (collective := read_last_collective(path))
    }
    if len(last) < 2:
        return None
    lowest = min(collective.sequence for collective in last.values())
    latest = max(last.values(), key=lambda collective: collective.sequence)
    behind = [rank for rank, collective in last.items() if collective.sequence == lowest]
    if latest.sequence == lowest or len(behind) > 1:
        return None
    text = (
        f"{FLIGHT_RECORDER}: Rank {behind[0]} is at collective {lowest} ({last[behind[0]].name}), the others wait"
        f" in {latest.sequence} ({latest.name}): Watchdog caught collective operation timeout"
    )
    record = Record("line", text, 1, rank=behind[0], source=FLIGHT_RECORDER)
    return Log(records=(record,), ranks=frozenset(last))


def read_last_collective(path: Path) -> LastCollective | None:
    """The last collective of the first process group, which all ranks belong to; None if there is none to read."""
    try:
        if path.stat().st_size > MAX_DUMP_BYTES:
            return None
        dump = PlainUnpickler(io.BytesIO(path.read_bytes())).load()
        entries = [entry for entry in dump["entries"] if not entry.get("is_p2p")]
        group = min(entry["pg_id"] for entry in entries)
        last = max(
            (entry for entry in entries if entry["pg_id"] == group), key=lambda entry: entry["collective_seq_id"]
        )
        return LastCollective(int(last["collective_seq_id"]), str(last.get("profiling_name", "")))
    except BROKEN_DUMP:
        return None


def read_samples(path: Path, *, since: str) -> Samples:
    """The samples at the end of a health file whose time is not before `since`."""
    lines = []
    for line in read_end(path, SAMPLE_BYTES)[0].splitlines():
        with suppress(ValueError, KeyError, TypeError):  # a crash may cut a line
            sample: Sample = json.loads(line)
            if sample["time"] >= since:
                lines.append(sample)
    return Samples(path, lines)


def count_lines(path: Path) -> int:
    """The number of lines of a file, without parsing them."""
    with suppress(OSError), path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
    return 0


def find_xids(samples: Samples) -> list[tuple[str, int | None]]:
    """The last Xid error of each GPU of a host as a line of the kernel log, and the run's process there, if it is known."""
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
        (f"NVRM: Xid (PCI:GPU{index}): {xid}, GPU {index} of {samples.host}", pids.get(index))
        for index, xid in xids.items()
    ]


def memory_evidence(samples: Samples) -> list[Evidence]:
    """How memory grew until it was nearly full, on the host or in the run's control group."""
    evidence = []
    for used, total, owner in (
        ("ram_used", "ram_total", samples.host),
        ("cgroup_used", "cgroup_limit", "the control group"),
    ):
        ends, sizes = samples.ends_of(used), samples.ends_of(total)
        size = sizes[1][total] if sizes else 0
        if ends and size and ends[1][used] >= NEARLY_ALL * size:
            first, last = ends
            text = (
                f"memory of {owner}: {format_bytes(first[used])} at {time_of_day(first)}, {format_bytes(last[used])} of"
                f" {format_bytes(size)} at {time_of_day(last)}, the last sample"
            )
            evidence.append(samples.evidence(text))
    return evidence


def disk_evidence(samples: Samples) -> list[Evidence]:
    """How the disk of the run folder filled until it was nearly full."""
    ends, sizes = samples.ends_of("disk_free"), samples.ends_of("disk_total")
    size = sizes[1]["disk_total"] if sizes else 0
    if not ends or not size or ends[1]["disk_free"] > (1 - NEARLY_ALL) * size:
        return []
    first, last = (f"{format_bytes(sample['disk_free'])} free at {time_of_day(sample)}" for sample in ends)
    return [samples.evidence(f"disk of the run folder on {samples.host}: {first}, {last}, the last sample")]


def clock_evidence(samples: Samples) -> list[Evidence]:
    """GPUs with reduced clocks at the last sample, except for the power limit, which is usual."""
    evidence = []
    for gpu in samples.lines[-1].get("gpus", ()) if samples.lines else ():
        if reasons := [reason for reason in gpu.get("throttle", ()) if reason != "power"]:
            reasons += [f"{gpu['sm_mhz']} MHz"] if "sm_mhz" in gpu else []
            reasons += [f"{gpu['temperature_c']} °C"] if "temperature_c" in gpu else []
            text = f"GPU {gpu.get('index')} of {samples.host} ran at reduced clocks: {', '.join(reasons)}"
            evidence.append(samples.evidence(text))
    return evidence


def time_of_day(sample: Sample) -> str:
    return str(sample["time"])[11:19]  # 14:05:31, UTC


def read_kernel_errors(
    ranks: Mapping[int, int], *, kmsg: Path = KMSG, files: tuple[Path, ...] = KERNEL_LOGS
) -> list[tuple[int, str]]:
    """Lines of the kernel log about processes of the run, each with the rank; ranks maps process ids to ranks."""
    if not ranks:
        return []
    errors = []
    for line in [text for _, text in read_kmsg(kmsg)] or read_kernel_logs(files):
        if KERNEL_ERROR.search(line):
            pids = [int(number) for number in NUMBER.findall(line) if len(number) <= MAX_PID_DIGITS]
            rank = next((ranks[pid] for pid in pids if pid in ranks), None)
            if rank is not None:
                errors.append((rank, line))
    return errors


def has_oom_kill(start: float, end: float, *, kmsg: Path = KMSG) -> bool | None:
    """Whether the kernel killed a process between two Unix times because memory ran out; None if that cannot be known.

    In a container the process ids differ from the kernel's, so a kill of any process counts.
    """
    booted = time.time() - time.monotonic()  # the kernel's clock stops during a suspend, as the monotonic one does
    lines = [(booted + seconds, text) for seconds, text in read_kmsg(kmsg)]
    if not lines or lines[0][0] > start:
        return None  # not readable, or older records were overwritten
    return any(start <= at <= end + KILL_DELAY_S and OOM_KILL.search(text) for at, text in lines)


def read_kmsg(path: Path) -> list[tuple[float, str]]:
    """Seconds since boot and text of each record of /dev/kmsg.

    One read returns one record, `level,number,microseconds,flags;text`, and fails after the last one.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return []
    lines: list[tuple[float, str]] = []
    try:
        with suppress(BlockingIOError):
            while record := os.read(fd, 1 << 16):
                head, _, text = record.decode(errors="replace").partition("\n")[0].partition(";")
                parts = head.split(",")
                if len(parts) > 2 and parts[2].isdecimal():
                    lines.append((int(parts[2]) / 1e6, text))
    except OSError:  # a record was overwritten during the read
        return lines
    finally:
        os.close(fd)
    return lines


def read_kernel_logs(paths: tuple[Path, ...]) -> Iterator[str]:
    for path in paths:
        with suppress(OSError), path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - KERNEL_LOG_BYTES))
            yield from file.read().decode(errors="replace").splitlines()
