"""
Which rank an event is to be blamed on, and which ranks only suffered from it.

The rank that writes an error is not always the one that caused it: who waits in a collective tells of the wait, and the
culprit is the one that did not come. Where nothing tells, the rank is unknown; a wrong one costs more than none.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence, Set

from paceline.explain.events import Event
from paceline.explain.reader import BANNER_RANK, Log
from paceline.explain.record import Record

# what only those write who wait for another
PEER_DIED = "peer-died"
WAITING = {"collective-timeout-desync", "nccl-p2p-hang", PEER_DIED}
FROM_OUTSIDE = {"keyboard-interrupt", "terminal-hangup"}  # reaches all ranks, and none is to blame
ROOT_CAUSE = re.compile(r"Root Cause \(first observed failure\)")
FAILED_RANK = re.compile(r"failed \(exitcode: -?\d+\) local_rank: (?P<rank>\d+)")
SPAWNED = re.compile(r"[Pp]rocess (?P<pid>\d+) spawned with command: .*--local[_-]rank[=', ]+(?P<rank>\d+)")
PID_FAILED = re.compile(
    r"(?:Killing subprocess|[Pp]rocess) (?P<pid>\d+)\b.*(?:exits with|return code|exit code|terminated)"
)
WORK = re.compile(r"last enqueued(?: NCCL)? work: (?P<enqueued>-?\d+)")
WORLD = re.compile(
    r"world[_ ]size['\"]?[:= ]+(?P<size>\d+)|\bnranks (?P<nranks>\d+)|nproc[_-]per[_-]node[= ]+(?P<nproc>\d+)"
    r"|num_local_procs=(?P<procs>\d+)|MEMBER: \d+/(?P<members>\d+)"
)
RUNS = re.compile(
    r"Rank (?P<rank>\d+) is running collective: CollectiveFingerPrint\((?:SequenceNumber=\d+, )?(?P<what>[^)]*)"
)
ENDED_BY_LAUNCHER = re.compile(r"-15\b|-9\b|SIGTERM|SIGKILL")
NUMBER = re.compile(r"\d+")
MAX_RANK = 10**6
FLIGHT_RECORDER = "flight recorder"  # source of a record that names the rank which is late


def culprit_rank(event: Event, standing: Sequence[Event], logs: Sequence[Log]) -> int | None:
    """standing: all events that may have ended the run."""
    alike = [each for each in standing if each.cause.id == event.cause.id]
    victims = {each.record.rank for each in standing if each.cause.follows is True and each.record.rank is not None}
    named = named_rank(event)
    if named is not None:
        return named
    if event.cause.id in FROM_OUTSIDE:
        return None
    if event.cause.id in WAITING:
        return rank_waited_for(alike, logs)
    if event.record.rank is not None:
        return event.record.rank
    if (told := next((each.record.rank for each in alike if each.record.rank is not None), None)) is not None:
        return told
    blamed = launcher_blames(record for log in logs for record in log.records)
    if blamed is None and event.record.kind in ("exit", "signal"):
        return only_silent(victims, logs)  # a killed rank says nothing; who lost it does
    return blamed


def only_silent(told: Set[int], logs: Sequence[Log]) -> int | None:
    silent = everyone(logs) - told
    return silent.pop() if told and len(silent) == 1 else None


def named_rank(event: Event) -> int | None:
    """Whom the text itself names as the one to blame."""
    for name in ("rank", "late"):
        if (match := NUMBER.search(event.match.values.get(name) or "")) and int(match[0]) < MAX_RANK:
            return int(match[0])
    return None


def rank_waited_for(waiting: Sequence[Event], logs: Sequence[Log]) -> int | None:
    """The one rank that all others wait for: it enqueued least, or made fewest steps, or alone is silent."""
    for event in waiting:
        if (named := named_rank(event)) is not None:
            return named
    for log in logs:
        for record in log.records:
            if record.source == FLIGHT_RECORDER:
                return record.rank
    if (odd := odd_one_out(waiting)) is not None:
        return odd
    enqueued: dict[int, int] = {}
    for record in (record for log in logs for record in log.records):
        if record.rank is not None and (match := WORK.search(record.text)):
            enqueued[record.rank] = min(int(match["enqueued"]), enqueued.get(record.rank, 1 << 62))
    steps: dict[int, int] = {}
    for log in logs:
        for rank, step in log.last_steps.items():
            steps[rank] = max(step, steps.get(rank, step))
    for counts in (enqueued, steps):
        if len(counts) > 1 and (behind := only_least(counts)) is not None:
            return behind
    told = {event.record.rank for event in waiting if event.record.rank is not None} | own_exits(logs)
    return only_silent(told, logs)


def own_exits(logs: Sequence[Log]) -> set[int]:
    """Ranks that ended by themselves: the launcher did not have to."""
    exits = (record for log in logs for record in log.records if record.kind == "exit" and record.rank is not None)
    return {record.rank for record in exits if record.rank is not None and not ENDED_BY_LAUNCHER.search(record.text)}


def odd_one_out(waiting: Sequence[Event]) -> int | None:
    """The one rank that runs another collective than all others; of two ranks, neither is the odd one."""
    runs = {match["rank"]: match["what"] for event in waiting for match in RUNS.finditer(event.record.text)}
    counts = Counter(runs.values())
    odd = [rank for rank, what in runs.items() if counts[what] == 1]
    return int(odd[0]) if len(odd) == 1 and len(runs) > 2 and len(odd[0]) < 7 else None


def only_least(counts: dict[int, int]) -> int | None:
    least = min(counts.values())
    ranks = [rank for rank, count in counts.items() if count == least]
    return ranks[0] if len(ranks) == 1 else None


def everyone(logs: Sequence[Log]) -> set[int]:
    """All ranks of the job, as far as the logs tell."""
    ranks: set[int] = set()
    size = 0
    for log in logs:
        ranks |= log.ranks
        for record in log.records:
            ranks |= {record.rank} if record.rank is not None else set()
            for match in WORLD.finditer(record.text):
                size = max(size, int(match[match.lastgroup or 0]))
    return ranks | set(range(size)) if size <= MAX_RANK and len(ranks) <= size else ranks


def launcher_blames(records: Iterable[Record]) -> int | None:
    """The rank that a launcher saw fail first."""
    in_root_cause = False
    pids: dict[str, int] = {}
    first: int | None = None
    for record in records:
        text = record.text
        if ROOT_CAUSE.search(text):
            in_root_cause = True
        elif in_root_cause and (match := BANNER_RANK.match(text)):
            return int(match["rank"])
        elif match := SPAWNED.search(text):
            pids[match["pid"]] = int(match["rank"])
        elif first is None and (match := FAILED_RANK.search(text)):
            first = int(match["rank"])
        elif first is None and (match := PID_FAILED.search(text)):
            first = pids.get(match["pid"])
        elif first is None and record.kind in ("exit", "signal") and record.rank is not None:
            first = record.rank
    return first
