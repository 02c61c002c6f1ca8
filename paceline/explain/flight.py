"""
PyTorch's flight recorder: which rank did not come to a collective that the others wait in.

A dump is a pickle of plain values; a class in it is refused, so a file that only looks like a dump runs nothing.

Format: torch/csrc/distributed/c10d/FlightRecorder.hpp; one file for each rank, `<prefix><rank>`.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.explain.blame import FLIGHT_RECORDER
from paceline.explain.reader import Log
from paceline.explain.record import Progress, Record

MAX_BYTES = 1 << 26
RANK = re.compile(r"(\d+)$")


class PlainUnpickler(pickle.Unpickler):
    """Numbers, texts, lists and dicts."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} in a flight recorder dump")


@dataclass(frozen=True)
class LastCollective:
    """Where one rank stands."""

    sequence: int
    name: str


def late_rank(paths: Sequence[Path]) -> Log | None:
    """A log of one line that names the rank; None where the dumps do not single one out."""
    last = {int(match[1]): found for path in paths if (match := RANK.search(path.name)) and (found := read_last(path))}
    if len(last) < 2:
        return None
    least, most = min(each.sequence for each in last.values()), max(each.sequence for each in last.values())
    behind = [rank for rank, each in last.items() if each.sequence == least]
    if least == most or len(behind) > 1:
        return None
    waits = next(each for each in last.values() if each.sequence == most)
    text = (
        f"{FLIGHT_RECORDER}: Rank {behind[0]} is at collective {least} ({last[behind[0]].name}), the others wait"
        f" in {most} ({waits.name}):"
        f" Watchdog caught collective operation timeout"
    )
    record = Record("line", text, 1, rank=behind[0], source=FLIGHT_RECORDER)
    log = Log(records=(record,), progress=Progress(), last_marks=(), last_lines=(), num_lines=1, num_bytes=0)
    return replace(log, ranks=frozenset(last))


def read_last(path: Path) -> LastCollective | None:
    try:
        if path.stat().st_size > MAX_BYTES:
            return None
        dump = PlainUnpickler(io.BytesIO(path.read_bytes())).load()
        entries = [each for each in dump["entries"] if not each.get("is_p2p")]
        return newest(entries)
    except (
        OSError,
        EOFError,
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        IndexError,
        MemoryError,
        pickle.UnpicklingError,
    ):
        return None


def newest(entries: Sequence[Mapping[str, Any]]) -> LastCollective | None:
    """Of the process group that all ranks have: the first."""
    first = [each for each in entries if each["pg_id"] == min(each["pg_id"] for each in entries)]
    if not first:
        return None
    last = max(first, key=lambda each: each["collective_seq_id"])
    return LastCollective(int(last["collective_seq_id"]), str(last.get("profiling_name", "")))
