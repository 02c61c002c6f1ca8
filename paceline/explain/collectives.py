"""
What the ranks of a hang wait in: the same collective or different ones, the first one or a later one.

A timeout alone does not say why data did not arrive. Ranks that wait in different collectives under one number, or in the same one
under different numbers, are out of step: the program is wrong. Ranks that all wait in their first collective are in step: the path
between the GPUs is broken. Each hang has one sentence about what was seen.

Formats: torch ProcessGroupNCCL.cpp (WorkNCCL, PG status), ProcessGroupWrapper.cpp (CollectiveFingerPrint); NCCL's INFO lines.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from paceline.explain.explanation import Record
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
