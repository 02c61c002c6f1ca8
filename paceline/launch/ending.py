"""
What an attempt came to, for the policy: the explanation of its logs, with what only its supervisor can know.

A log does not tell who killed a rank: the kernel for want of memory (its counter of such kills has grown), the supervisor because
the rank hung (event `hang`), or somebody else. And an error that a rank ends with in our own words needs no catalogue.
"""

import json
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import psutil

from paceline.explain.catalogue import load_catalogue
from paceline.explain.reader import Log
from paceline.explain.record import Explanation
from paceline.explain.run import late_of
from paceline.launch.confirm import NO_PRIMITIVE, OUT_OF_MEMORY
from paceline.launch.failure import SENT_SIGNALS, Failure
from paceline.launch.policy import HOST_MEMORY, OURS_ONCE_MORE, Ended, Retry
from paceline.launch.supervisor import Outcome
from paceline.plan.cgroup import memory_limit
from paceline.rundir import RunDir, read_json_lines
from paceline.units import format_bytes

OUTSIDE = {"killed-from-outside", "hang"}  # of which the dead rank could say nothing
REFUSED = "refused"  # the rank itself has named what is wrong and what mends it, and the catalogue knows no better name
EXITED = "exited-early"  # with 0, which no log tells from a good end
FULL = "disk-full"
NO_ROOM_BYTES = 1 << 16
KILLED = "killed-from-outside"
NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")  # pids, addresses and sizes differ where the error is the same


def ended_of(
    run: RunDir, outcome: Outcome, found: Explanation, *, seconds: float, memory_ran_out: bool | None
) -> tuple[Ended, Explanation]:
    """The end, and the explanation in its light. memory_ran_out: the kernel ended a process of ours for it; None: not known."""
    root = outcome.root
    events = [e for e in read_json_lines(run.events) if e.get("attempt") in (None, outcome.attempt)]
    hang = next((e for e in reversed(events) if e.get("event") == "hang"), None)
    if root is not None and root.exit_code == 0:
        found = explain_exit(found, root)
    elif hang is not None:
        found = explain_hang(found, hang, recorded=late_of(run, outcome.attempt, events))
    elif root is not None and root.signal == "SIGKILL" and root.traceback is None and not root.consequence:
        found = explain_kill(found, root, memory_ran_out=memory_ran_out)
    if found.cause == "unknown" and disk_is_full(run):
        found = explain_full_disk(found, run)
    own = own_record(run, outcome)
    found = replace(found, cause=own.get("cause", found.cause))
    if root is not None and root.fix is not None and found.cause in OURS_ONCE_MORE:
        found = replace(found, cause=REFUSED, summary=root.message, fix=root.fix, confidence=1.0)
    retry = retry_of(found, root, own)
    rank = found.rank if found.rank is not None or root is None else root.rank
    ended = Ended(
        cause=found.cause,
        retry=retry,
        rank=rank,
        step=own.get("step", found.step),
        new_checkpoint=has_new_checkpoint(run, outcome.attempt),
        seconds=seconds,
        error=words_of(root) if found.cause not in OUTSIDE else "",
        rolled_back=own.get("rollback") is True,
    )
    return ended, found


def retry_of(found: Explanation, root: Failure | None, own: dict[str, Any]) -> Retry:
    if found.cause in OUTSIDE or found.cause == EXITED or own.get("rollback"):
        return "same"
    if root is not None and (OUT_OF_MEMORY.search(root.message) or NO_PRIMITIVE.search(root.message)):
        return "smaller"
    if root is not None and root.fix is not None:
        return "never"  # the rank has named the mistake and what mends it
    cause = load_catalogue().causes.get(found.cause)
    return "never" if cause is None else cause.retry  # type: ignore[return-value]  # test_policy.py holds the words together


def explain_exit(found: Explanation, root: Failure) -> Explanation:
    fix = f"its last words: logs/*/{root.rank}.log of the run; a library that calls exit, or a SIGTERM before the first step"
    return replace(found, cause=EXITED, rank=root.rank, summary=root.message, fix=fix, confidence=1.0)


def disk_is_full(run: RunDir) -> bool:
    """Then a process may end without a word: there was no room for one."""
    with suppress(OSError):
        return shutil.disk_usage(run.path).free < NO_ROOM_BYTES
    return False


def explain_full_disk(found: Explanation, run: RunDir) -> Explanation:
    fix = f"make room in the file system of {run.path} (df -h); then paceline resume {run.path}"
    return replace(found, cause=FULL, summary="the disk of the run folder is full: nothing could be written", fix=fix)


def explain_hang(found: Explanation, hang: dict[str, Any], *, recorded: Sequence[Log]) -> Explanation:
    """recorded: what the flight recorders tell of the rank that is late."""
    late = recorded[0].records[0].rank if recorded else None
    rank = late if hang.get("rank") is None else hang["rank"]
    who = "a rank" if rank is None else f"rank {rank}"
    summary = hang.get("text") or f"{who} made no step for {hang.get('silent_s', 0):.0f} s"
    fix = f"hangs/{hang['attempt']} of the run has what every rank was at; --hang-after SECONDS bears a longer silence"
    step = hang.get("step", found.step)
    return replace(found, cause="hang", rank=rank, step=step, summary=summary, fix=fix, confidence=1.0)


def explain_kill(found: Explanation, root: Failure, *, memory_ran_out: bool | None) -> Explanation:
    """Of a rank that SIGKILL has ended; the kernel's log may have told the same."""
    who = "the launch agent" if root.rank is None else f"rank {root.rank}"
    if memory_ran_out or any(each.source == "kernel log" for each in found.evidence):
        told = found if found.cause == HOST_MEMORY else None
        summary = f"the kernel killed {who}: {none_left()}"
        return replace(
            found, cause=HOST_MEMORY, rank=root.rank, summary=told.summary if told else summary, confidence=1.0
        )
    if found.cause not in (HOST_MEMORY, KILLED, "unknown", "peer-died"):
        return found
    summary = f"{who} was ended by SIGKILL, which something outside the run has sent"
    why = "memory did not run out. " if memory_ran_out is False else ""
    fix = f"{why}A batch system's limit, a container's end or a person sends such a signal; the run can go on"
    return replace(found, cause=KILLED, rank=root.rank, summary=summary, fix=fix, confidence=0.8)


def none_left() -> str:
    """Of what memory, as it is now that the run has ended."""
    host, group = psutil.virtual_memory(), memory_limit()
    if group is not None and group.limit_bytes < host.total:
        return f"its group may take {format_bytes(group.limit_bytes)} of memory, and none was left"
    return f"this host has {format_bytes(host.total)} of memory, and none was left"


def has_new_checkpoint(run: RunDir, attempt: int) -> bool:
    """Written after the attempt began."""
    mine = False
    for event in read_json_lines(run.events):
        if event.get("event") == "attempt":
            mine = event.get("attempt") == attempt
        elif mine and event.get("event") == "checkpoint":
            return True
    return False


def own_record(run: RunDir, outcome: Outcome) -> dict[str, Any]:
    """What the rank to blame wrote of its error; empty where it is not ours, or wrote none."""
    if outcome.root is None or outcome.root.rank is None:
        return {}
    try:
        record = json.loads(run.rank_error(outcome.attempt, outcome.root.rank).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def words_of(root: Failure | None) -> str:
    """What the program said of itself, without numbers that change; empty where a signal from outside ended it."""
    if root is None or (root.signal in SENT_SIGNALS and root.traceback is None) or root.consequence:
        return ""
    return NUMBERS.sub("N", root.message.splitlines()[0] if root.message else "")
