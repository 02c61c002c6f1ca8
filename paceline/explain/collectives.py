"""
What the ranks of a hang wait in: the same collective or different ones, the first one or a later one.

A timeout alone does not say why data did not arrive. Ranks that wait in different collectives under one number, or in the same one
under different numbers, are out of step: the program is wrong. Ranks that all wait in their first collective are in step: the path
between the GPUs is broken. Each hang has one sentence about what was seen.

Lines show it, and files: flight recorder dumps, NCCL's RAS reports, and the stacks that the supervisor took of all ranks. A dump
is a pickle of plain values or JSON, one file per rank, `<prefix><rank>`; a class in a pickle is rejected, so a file that only looks
like a dump runs no code. A RAS report is what ncclras prints: how many operations each rank has launched, and which processes do
not answer. The folder `hangs` of a run has the heartbeat, the state and the stack of each rank.

Formats: torch ProcessGroupNCCL.cpp (WorkNCCL, PG status), ProcessGroupWrapper.cpp (CollectiveFingerPrint), FlightRecorder.hpp;
NCCL's INFO lines.
"""

import io
import json
import pickle
import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.explain.explanation import Evidence, Record
from paceline.explain.log import Log
from paceline.rundir import RECORDER_DUMP, RunDir, open_file, read_end
from paceline.units import format_ranks

DESYNC, FIRST_TRANSFER = "collective-timeout-desync", "nccl-p2p-hang"
FLIGHT_RECORDER = "flight recorder"  # source of a record about the dumps of all ranks
SAME_FIRST = "wait in the same first collective"
MAX_RANK_DIGITS = 6
MAX_PLACES, MAX_SHOWN = 4, 8  # in a sentence

WORK = re.compile(r"WorkNCCL\((?:SeqNum=(?P<number>\d+), )?OpType=(?P<operation>\w+)(?:, (?P<size>NumelIn=\d+))?")
GROUP = re.compile(r"\[PG (?:ID \d+ PG GUID )?(?P<group>[^\]]*?) ?Rank \d+\]")
STATUS = re.compile(
    r"(?i)last enqueued(?: nccl)? work: (?P<enqueued>-?\d+)(?:, last completed(?: nccl)? work: (?P<completed>-?\d+))?"
)
FINGERPRINT = re.compile(
    r"Rank (?P<rank>\d+) is running collective: CollectiveFingerPrint\((?:SequenceNumber=(?P<number>\d+), )?"
    r"OpType=(?P<operation>\w+)(?:, (?P<size>TensorShape=\[[^\]]*\](?:, TensorDtypes=\w+)?))?"
)
MIN_INFO = 3
NCCL_INFO = re.compile(r"NCCL INFO ")
CLOSED = re.compile(r"NCCL INFO comm 0x[\da-f]+ .* (?:Abort|Destroy) COMPLETE")
INIT_ENDED = re.compile(r"Init COMPLETE|Connected all (?:rings|trees)| via (?:P2P|SHM|NET)")

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
# of hangs/<attempt>/<rank>.txt: the heartbeat, the process, and the first frame of faulthandler or py-spy
HANG_LINES = (re.compile(r"mark: (?!none)"), re.compile(r"State:"), re.compile(r'File "|\S.* \([^()]+:\d+\)$'))


@dataclass(frozen=True)
class Wait:
    """The collective that a rank waits in."""

    number: int | None
    operation: str
    size: str = ""  # of its tensor, as the log has it
    group: str = ""  # the process group, if the log names it


@dataclass(frozen=True)
class CollectiveHang:
    """What the waits of the ranks show."""

    sentence: str
    cause: str | None = None  # if it is proven
    late_rank: int | None = None
    in_step: bool = False


def read_hang(records: Sequence[Record], *, ranks: Set[int], has_steps: bool) -> CollectiveHang | None:
    """What the records of a log about collectives show; None if there are none. ranks: all that the logs know.

    has_steps: the run made steps, so the first collective of a process group is not the first transfer.
    """
    hang = compare_reports(records, ranks)
    return replace(hang, cause=None) if hang and has_steps and hang.cause == FIRST_TRANSFER else hang


def compare_reports(records: Sequence[Record], ranks: Set[int]) -> CollectiveHang | None:
    """What the ranks' reports about collectives show."""
    for record in records:
        if record.source == FLIGHT_RECORDER:
            sentence = record.text.removeprefix(f"{FLIGHT_RECORDER}: ")
            is_first = SAME_FIRST in sentence
            return CollectiveHang(sentence, FIRST_TRANSFER if is_first else DESYNC, record.rank, in_step=is_first)
    waits: dict[int | None, Wait] = {}
    completed: dict[int | None, int] = {}
    groups: dict[int | None, str] = {}
    for record in records:
        if match := GROUP.search(record.text):
            groups.setdefault(record.rank, match["group"])
        if match := WORK.search(record.text):
            waits.setdefault(record.rank, wait_of(match))
        if (match := STATUS.search(record.text)) and match["completed"]:
            completed.setdefault(record.rank, int(match["completed"]))
        for match in FINGERPRINT.finditer(record.text):
            if len(match["rank"]) <= MAX_RANK_DIGITS:
                waits.setdefault(int(match["rank"]), wait_of(match))
    if len(waits) > 1:
        waits.pop(None, None)
    known = {rank: replace(wait, group=groups.get(rank, "")) for rank, wait in waits.items() if rank is not None}
    if len(known) > 1:
        return compare_waits(known, completed=completed, silent=ranks - set(known))
    return explain_single(next(iter(waits.items()), None), completed, silent=ranks - set(waits) - set(completed))


def wait_of(match: re.Match[str]) -> Wait:
    """The wait that a match of WORK or FINGERPRINT reports."""
    number = int(match["number"]) if match["number"] else None
    return Wait(number, match["operation"], match["size"] or "")


def compare_waits(
    waits: Mapping[int, Wait], *, completed: Mapping[int | None, int], silent: Set[int]
) -> CollectiveHang:
    """What the waits of two or more ranks show. silent: ranks that report no wait."""
    ranks, wait = format_ranks(sorted(waits), limit=MAX_SHOWN), next(iter(waits.values()))
    groups = {wait.group for wait in waits.values() if wait.group}
    if len(groups) > 1:
        return CollectiveHang(
            f"the ranks wait in different process groups: {join_places(waits, lambda wait: wait.group or 'one')}"
        )
    numbers = {wait.number for wait in waits.values()}
    if len(numbers) == 1 and len({(wait.operation, wait.size) for wait in waits.values()}) > 1:
        if len({wait.operation for wait in waits.values()}) > 1:
            what, places = "in different operations", join_places(waits, lambda wait: wait.operation)
        else:
            what, places = f"in {wait.operation} of different sizes", join_places(waits, lambda wait: wait.size)
        subject = "under one number" if wait.number is None else f"under number {wait.number:,}"
        sentence = f"{subject} the ranks wait {what} ({places}): that proves that they do not call the same collectives"
        return CollectiveHang(sentence, DESYNC, odd_rank(waits))
    if len(numbers) > 1 and None not in numbers:
        lowest = min(number for number in numbers if number is not None)
        late = [rank for rank, wait in waits.items() if wait.number == lowest]
        first = "the first one" if lowest <= 1 else f"number {lowest:,}"
        places = join_places(waits, lambda wait: f"{wait.operation} number {wait.number:,}")
        behind = format_ranks(sorted(late), limit=MAX_SHOWN)
        sentence = f"the ranks wait in different collectives ({places}): {behind} did not get past {first}"
        return CollectiveHang(sentence, DESYNC, late[0] if len(late) == 1 else None)
    if is_first(wait, completed):
        sentence = f"{ranks} {SAME_FIRST} ({wait.operation})"
        if silent:
            return CollectiveHang(sentence + without_report(silent))
        sentence += " and none has completed one: the ranks are in step, but no data arrived"
        return CollectiveHang(sentence, FIRST_TRANSFER, in_step=True)
    place = wait.operation if wait.number is None else f"{wait.operation}, number {wait.number:,}"
    sentence = f"{ranks} wait in the same collective ({place})"
    if silent:
        return CollectiveHang(sentence + without_report(silent))
    return CollectiveHang(
        f"{sentence} after others that completed: these ranks are in step", in_step=wait.number is not None
    )


def without_report(silent: Set[int]) -> str:
    return f", {format_ranks(sorted(silent), limit=MAX_SHOWN)} did not report any"


def explain_single(
    report: tuple[int | None, Wait] | None, completed: Mapping[int | None, int], *, silent: Set[int]
) -> CollectiveHang | None:
    """What the wait of one rank, or only its numbers of collectives, show."""
    if report is None:
        if not completed:
            return None
        subject = (
            "a rank" if None in completed else format_ranks(sorted(rank for rank in completed if rank is not None))
        )
        if max(completed.values()) > 0:
            return CollectiveHang(f"the last collective that {subject} completed is number {max(completed.values()):,}")
        return CollectiveHang(f"{subject} completed no collective", FIRST_TRANSFER if not silent else None)
    rank, wait = report
    subject = "a rank" if rank is None else f"rank {rank}"
    others = without_report(silent) if silent and rank is not None else ""
    if is_first(wait, completed):
        proven = FIRST_TRANSFER if completed and not others else None
        return CollectiveHang(
            f"{subject} waits in its first collective ({wait.operation}) and has completed none{others}", proven
        )
    number = "" if wait.number is None else f", number {wait.number:,}"
    return CollectiveHang(f"{subject} waits in a collective ({wait.operation}{number}){others}")


def is_first(wait: Wait, completed: Mapping[int | None, int]) -> bool:
    """Whether nobody has completed a collective; without numbers of completed ones, whether this one is number 1."""
    return max(completed.values()) <= 0 if completed else wait.number is not None and wait.number <= 1


def odd_rank(waits: Mapping[int, Wait]) -> int | None:
    """The one of three or more ranks that waits in another collective than all others; of two either may be wrong."""
    frequency = Counter((wait.operation, wait.size) for wait in waits.values())
    odd = [rank for rank, wait in waits.items() if frequency[wait.operation, wait.size] == 1]
    return odd[0] if len(odd) == 1 and len(waits) > 2 else None


def join_places(waits: Mapping[int, Wait], place: Callable[[Wait], str]) -> str:
    """`ranks 0 and 2 in ALLREDUCE, rank 1 in BROADCAST`, for the first MAX_PLACES places."""
    ranks: dict[str, list[int]] = {}
    for rank, wait in sorted(waits.items()):
        ranks.setdefault(place(wait), []).append(rank)
    shown = [f"{format_ranks(group, limit=MAX_SHOWN)} in {text}" for text, group in ranks.items()]
    return ", ".join(shown[:MAX_PLACES]) + (", ..." if len(shown) > MAX_PLACES else "")


def ends_in_nccl(last_lines: Sequence[str]) -> bool:
    """Whether at least half of a log's last lines, and more than a few unless communicators are ready, are NCCL's INFO lines."""
    least = 1 if any(map(INIT_ENDED.search, last_lines)) else MIN_INFO
    return sum(1 for line in last_lines if NCCL_INFO.search(line)) >= max(least, len(last_lines) / 2)


def ends_at_init(last_lines: Sequence[str]) -> bool:
    """Whether a log ends soon after NCCL's INFO lines about communicators that are ready."""
    return ends_in_nccl(last_lines) and any(map(INIT_ENDED.search, last_lines))


def is_closed(last_lines: Sequence[str]) -> bool:
    """Whether a process has closed its communicators before its log ends, so that it did not hang."""
    return any(map(CLOSED.search, last_lines))


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
