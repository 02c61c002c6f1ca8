"""
What the kernel log says of some processes: killed for want of memory, a GPU that failed under them.

/dev/kmsg is readable where the kernel allows it; else the files that a logging service keeps. Where none can be read, nothing
is known, and that is no error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

KMSG = Path("/dev/kmsg")
KEPT = (Path("/var/log/kern.log"), Path("/var/log/messages"), Path("/var/log/syslog"))
TAIL_BYTES = 1 << 20
TELLING = re.compile(r"Killed process|oom-kill|Out of memory|Xid|segfault at|general protection", re.IGNORECASE)
NUMBER = re.compile(r"\d+")


def kernel_lines(
    ranks: Mapping[int, int], *, kmsg: Path = KMSG, kept: tuple[Path, ...] = KEPT
) -> list[tuple[int, str]]:
    """ranks: by process id. Lines about these processes, each with the rank."""
    if not ranks:
        return []
    found = []
    for line in read_kmsg(kmsg) or read_kept(kept):
        if TELLING.search(line):
            rank = next(
                (ranks[pid] for text in NUMBER.findall(line) if len(text) < 10 and (pid := int(text)) in ranks), None
            )
            if rank is not None:
                found.append((rank, line))
    return found


def read_kmsg(path: Path) -> list[str]:
    """One read gives one record, `level,number,time,flags;text`; it fails when the last is read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return []
    lines: list[str] = []
    try:
        with suppress(BlockingIOError):
            while record := os.read(fd, 1 << 16):
                lines += [part.partition(";")[2] or part for part in record.decode(errors="replace").splitlines()[:1]]
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
