"""
Files that show a hang: flight recorder dumps, NCCL's RAS reports, and the stacks that the supervisor took of all ranks.

A flight recorder dump shows which rank did not arrive at a collective that the others wait in. It is a pickle of plain values or
JSON, one file per rank, `<prefix><rank>`; a class in a pickle is rejected, so a file that only looks like a dump runs no code.
Format: torch/csrc/distributed/c10d/FlightRecorder.hpp. A RAS report is what ncclras prints: how many operations each rank has
launched, and which processes do not answer. The folder `hangs` of a run has the heartbeat, the state and the stack of each rank.
"""

import io
import json
import pickle
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.explain.collectives import FLIGHT_RECORDER, Wait, compare_waits
from paceline.explain.explanation import Evidence, Record
from paceline.explain.log import Log
from paceline.rundir import RECORDER_DUMP, RunDir, open_file, read_end
from paceline.units import format_ranks

MAX_DUMP_BYTES = 1 << 26
MAX_APART_S = 24 * 3600.0  # between the last writes of a log and of a dump beside it; torch's folder for dumps is /tmp
DUMP_NAME = re.compile(rf"(?:nccl_trace_rank_|{RECORDER_DUMP})\d+(?:\.json)?$")
RAS_NAME = re.compile(r"(?:^|[._-])(?:nccl[_-]?)?ras(?:[_-]\w+)?(?:\.(?:txt|log|out))?$")
RAS = "NCCL RAS"
RAS_MAJORITY = re.compile(r"\d+ ranks have launched up to operation (?P<count>\d+)")
RAS_RANK = re.compile(r"Rank (?P<rank>\d{1,6}) has launched up to operation (?P<count>\d{1,15})")
RAS_LATE = re.compile(r"^\s+Rank (\d{1,6}) -- GPU", re.MULTILINE)
RAS_DEAD = re.compile(r"^\s+Process \d+ on node \S+ managing GPUs? [\d,]+", re.MULTILINE)
RAS_BYTES, MAX_LATE = 1 << 20, 8
RANK = re.compile(r"(\d+)$")
BROKEN_DUMP = (OSError, EOFError, LookupError, TypeError, ValueError, AttributeError, MemoryError, pickle.PickleError)
BUILD_LOCK = b"torch/utils/file_baton.py"  # in the stack of a rank that waits until an extension is built
NEXT_BATCH = b"_try_get_data"  # of a rank that waits for a worker of its data loader
HANG_LINES = (  # of hangs/<attempt>/<rank>.txt: the heartbeat, the process, and the first frame of faulthandler or py-spy
    re.compile(r"mark: (?!none)"),
    re.compile(r"State:"),
    re.compile(r'File "|\S.* \([^()]+:\d+\)$'),
)


class PlainUnpickler(pickle.Unpickler):
    """Loads numbers, strings, lists and dicts only."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} in a flight recorder dump")


@dataclass(frozen=True)
class Dump:
    """What one rank's flight recorder shows of the first process group, which all ranks belong to."""

    last: Wait
    completed: int | None  # number of the last completed collective
    world_size: int | None


def flight_recorder_logs(run: RunDir, attempt: int, events: Sequence[Mapping[str, Any]]) -> list[Log]:
    """A log of one line about the dumps of a run's attempt, if they prove something."""
    world_size = next((event.get("world_size") for event in events if event.get("event") == "attempt"), None)
    return compare_dumps(run.recorder_dumps(attempt), world_size=world_size)


def companion_logs(files: Sequence[Path]) -> list[Log]:
    """What flight recorder dumps and RAS reports in the folders of log files show."""
    inside: list[Path] = []
    for folder in dict.fromkeys(file.parent for file in files):
        with suppress(OSError):
            inside += sorted(
                path for path in folder.iterdir() if DUMP_NAME.search(path.name) or RAS_NAME.search(path.name)
            )
    last = max((mtime for file in files if (mtime := modified_at(file)) is not None), default=0.0)
    inside = [path for path in inside if abs((modified_at(path) or 0.0) - last) < MAX_APART_S]
    dumps = [path for path in inside if DUMP_NAME.search(path.name)]
    reports = [path for path in inside if RAS_NAME.search(path.name)]
    return [*compare_dumps(dumps, world_size=None), *(log for path in reports for log in read_ras_report(path))]


def modified_at(path: Path) -> float | None:
    with suppress(OSError):
        return path.stat().st_mtime
    return None


def compare_dumps(paths: Sequence[Path], *, world_size: int | None) -> list[Log]:
    """A log of one line about the ranks' last collectives, if they prove something.

    Every rank must have written a dump: one without may be the late one. world_size: None if only the dumps know it.
    """
    dumps = {int(match[1]): dump for path in paths if (match := RANK.search(path.stem)) and (dump := read_dump(path))}
    world_size = world_size or max((dump.world_size or 0 for dump in dumps.values()), default=0) or len(dumps)
    if len(dumps) != world_size or len(dumps) < 2:
        return []
    completed: dict[int | None, int] = {
        rank: dump.completed for rank, dump in dumps.items() if dump.completed is not None
    }
    hang = compare_waits({rank: dump.last for rank, dump in dumps.items()}, completed=completed, silent=set())
    if hang.cause is None:
        return []
    record = Record("line", f"{FLIGHT_RECORDER}: {hang.sentence}", 1, rank=hang.late_rank, source=FLIGHT_RECORDER)
    return [Log(records=(record,), ranks=frozenset(dumps))]


def read_dump(path: Path) -> Dump | None:
    """One rank's dump; None if it is none or has no collective."""
    try:
        if path.stat().st_size > MAX_DUMP_BYTES:
            return None
        with open_file(path) as file:
            content = file.read()
        dump = json.loads(content) if content.lstrip().startswith(b"{") else PlainUnpickler(io.BytesIO(content)).load()
        entries = [entry for entry in dump["entries"] if not entry.get("is_p2p")]
        group = min(int(entry.get("pg_id", 0)) for entry in entries)
        entries = [entry for entry in entries if int(entry.get("pg_id", 0)) == group]
        last = max(entries, key=lambda entry: int(entry["collective_seq_id"]))
        done = [int(entry["collective_seq_id"]) for entry in entries if entry.get("state") == "completed"]
        sizes = json.dumps(last["input_sizes"]) if last.get("input_sizes") else ""
        wait = Wait(int(last["collective_seq_id"]), str(last.get("profiling_name", "")), sizes)
        return Dump(wait, max(done, default=0) if "state" in last else None, dump_world_size(dump))
    except BROKEN_DUMP:
        return None


def dump_world_size(dump: Mapping[str, Any]) -> int | None:
    """The number of ranks of the largest process group; None if the dump does not have it."""
    groups = [config["ranks"] for config in dict(dump.get("pg_config") or {}).values() if "ranks" in config]
    return max((len(json.loads(ranks) if isinstance(ranks, str) else ranks) for ranks in groups), default=None)


def read_ras_report(path: Path) -> list[Log]:
    """A log of the operations that ranks lag behind with and of the processes that do not answer; none if all is well."""
    with suppress(OSError):
        text = read_end(path, RAS_BYTES)[0].decode(errors="replace")
        counts = {int(match["rank"]): int(match["count"]) for match in RAS_RANK.finditer(text)}
        texts = []
        if match := RAS_MAJORITY.search(text):
            late = list(counts) or [int(rank) for rank in RAS_LATE.findall(text)]
            behind = f": {format_ranks(late[:MAX_LATE])} launched fewer or more" if late else ""
            texts = [(f"the ranks have launched different numbers of operations, most {match['count']}{behind}", late)]
        texts += [(f"a process does not answer: {match[0].strip()}", []) for match in RAS_DEAD.finditer(text)]
        records = tuple(
            Record("line", f"{RAS}: {text}", 1, rank=ranks[0] if len(ranks) == 1 else None, source=str(path))
            for text, ranks in texts
        )
        return [Log(records=records)] if records else []
    return []


def hang_fix(run: RunDir, hang: Mapping[str, Any]) -> str:
    """Returns where the stacks of all ranks are, and what helps where they show it. hang: the event `hang` or `silence`."""
    folder = run.hang(hang["attempt"])
    texts = []
    with suppress(OSError):
        texts = [path.read_bytes() for path in folder.glob("*.txt")]
    if any(BUILD_LOCK in text for text in texts):
        return (
            "torch waits for another process that builds an extension, or for the lock of a build that was killed: where none"
            " runs (`pgrep -a ninja`), run `find ~/.cache/torch_extensions -name lock -delete` (or in TORCH_EXTENSIONS_DIR)"
        )
    read = f"read what every rank was doing: `less {shlex.quote(str(folder))}/*.txt`"
    if hang.get("in_collectives"):
        return (
            "all ranks must make the same collectives in the same order: one of these left its loop early (uneven batches, a break,"
            f" `if rank == 0:` around a collective), so it is in the next one; {read}"
        )
    if any(NEXT_BATCH in text for text in texts):
        return (
            "find what the data loader's worker waits for: num_workers=0 runs the same code in the rank itself, and"
            f" DataLoader(..., timeout=120) makes an error of it; {read}"
        )
    return read


def hang_evidence(run: RunDir, attempt: int, rank: int | None) -> list[Evidence]:
    """The last heartbeat, the process state and the stack of the rank that the others wait for."""
    path = run.hang(attempt) / f"{rank}.txt"
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return []
    firsts = [next((i for i, line in enumerate(lines) if pattern.match(line)), None) for pattern in HANG_LINES]
    source = str(path.relative_to(run.path))
    return [Evidence(i + 1, lines[i], rank, source) for i in sorted(i for i in firsts if i is not None)]
