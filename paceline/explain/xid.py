"""
Xid errors in health/<host>.jsonl, where launch/health.py has put what the driver told. The kernel log has them too, but few
may read it, and none in a container.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.rundir import read_end

END_BYTES = 256 << 10  # of the samples: some minutes


@dataclass(frozen=True)
class Xid:
    """The last one of a GPU."""

    host: str
    line: str  # as the kernel would have put it
    pid: int | None  # of the run's process on that GPU, where the driver told


def read_xids(path: Path, *, since: str) -> list[Xid]:
    """since: the time, as the samples have it, from which they count."""
    xids: dict[int, int] = {}
    pids: dict[int, int] = {}
    for line in read_end(path, END_BYTES)[0].splitlines():
        with suppress(ValueError, KeyError, TypeError):  # a crash has cut it
            sample: dict[str, Any] = json.loads(line)
            for gpu in sample.get("gpus", ()) if sample["time"] >= since else ():
                for process in gpu.get("processes", ()):
                    if process.get("ours"):
                        pids[gpu["index"]] = process["pid"]
                if "xid" in gpu.get("errors", ()):
                    xids[gpu["index"]] = gpu["errors"]["xid"]
    host = path.stem
    return [
        Xid(host, f"NVRM: Xid (PCI:GPU{index}): {xid}, GPU {index} of {host}", pids.get(index))
        for index, xid in xids.items()
    ]
