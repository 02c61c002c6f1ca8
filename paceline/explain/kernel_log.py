"""
What the kernel log says of some processes: killed for want of memory, a GPU that failed under them.

/dev/kmsg is readable where the kernel allows it; else the files that a logging service keeps. Where none can be read, nothing
is known, and that is no error.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

KMSG = Path("/dev/kmsg")
KEPT = (Path("/var/log/kern.log"), Path("/var/log/messages"), Path("/var/log/syslog"))
TAIL_BYTES = 1 << 20
OOM_KILL = re.compile(r"Killed process \d+|oom-kill:")
AFTER_S = 10.0  # that a kill may be noted later than its end was seen
TELLING = re.compile(r"Killed process|oom-kill|Out of memory|Xid|segfault at|general protection", re.IGNORECASE)
NUMBER = re.compile(r"\d+")


def kernel_lines(
    ranks: Mapping[int, int], *, kmsg: Path = KMSG, kept: tuple[Path, ...] = KEPT
) -> list[tuple[int, str]]:
    """ranks: by process id. Lines about these processes, each with the rank."""
    if not ranks:
        return []
    found = []
    for line in [text for _, text in read_kmsg(kmsg)] or read_kept(kept):
        if TELLING.search(line):
            rank = next(
                (ranks[pid] for text in NUMBER.findall(line) if len(text) < 10 and (pid := int(text)) in ranks), None
            )
            if rank is not None:
                found.append((rank, line))
    return found


def killed_for_memory(start: float, end: float, *, kmsg: Path = KMSG) -> bool | None:
    """Whether the kernel killed anything for want of memory between two Unix times; None where that cannot be known.

    In a container the numbers of processes differ from the kernel's, so any such kill counts.
    """
    booted = time.time() - time.monotonic()  # the kernel stamps by the clock that stands still in a suspend
    lines = [(booted + seconds, text) for seconds, text in read_kmsg(kmsg)]
    if not lines or lines[0][0] > start:
        return None  # not readable, or older records have been overwritten
    return any(start <= at <= end + AFTER_S and OOM_KILL.search(text) for at, text in lines)


def read_kmsg(path: Path) -> list[tuple[float, str]]:
    """Seconds since boot, and text. One read gives one record, `level,number,microseconds,flags;text`; it fails after the last."""
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
    except OSError:  # a record was overwritten meanwhile
        return lines
    finally:
        os.close(fd)
    return lines


def read_kept(paths: tuple[Path, ...]) -> Iterator[str]:
    for path in paths:
        with suppress(OSError), path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            yield from file.read().decode(errors="replace").splitlines()
