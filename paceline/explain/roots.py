"""
Which of the events is the cause, and which are only its consequences.

An event is a consequence if its cause can follow from that of another event, if a launcher only forwards it, or if it is the end
of a process that had failed before. What the ranks of a hang wait in decides between the causes of a timeout.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import replace

from paceline.explain.blame import own_error, ranks_of_job
from paceline.explain.catalogue import load_catalogue
from paceline.explain.collectives import DESYNC, FIRST_TRANSFER, CollectiveHang, read_hang
from paceline.explain.explanation import RECORDED, Record
from paceline.explain.lines import WARNING_LINE
from paceline.explain.log import Log
from paceline.explain.matches import FALLBACK, GUESS, PEER_DIED, RACE, WAITING, Event, as_fatal
from paceline.explain.run_bounds import ended_program
from paceline.explain.sentences import RANK_PREFIX
from paceline.explain.survival import STEPS_AFTER
from paceline.explain.tracebacks import IGNORED_INTERRUPT

TIMEOUTS = {DESYNC, FIRST_TRANSFER}
ABORT = "native-abort"
CRASHES = {ABORT, "sigsegv"}  # also how a process goes down after a Python exception, while its threads are torn down
JOB_ENDS = {"slurm-time-limit", "slurm-cancelled"}  # what the scheduler writes once all ranks are gone
NEAR = 0.12  # of scores that differ by less the first event wins
MIN_ENDS = 3  # of a script, which show that it was started again and again
MAX_COMPARED = 32  # events of one kind that an event of another log is compared with

STOPPED = re.compile(r"-15\b|SIGTERM|-6\b|SIGABRT")  # by the launcher, or by the abort of its communicator
WATCHDOG = re.compile(r"[Ww]atchdog|ProcessGroupNCCL|taking the entire process down")  # NCCL's aborts the process
REFUSED = re.compile(r"(?P<script>[\w.-]+\.py): error: ")
# in the path of a file that no program of the script has to write
INPUT = re.compile(r"(?i)(?<![a-z])inputs?(?![a-z])")
AGENT_REPORT = re.compile(r"E (?P<pid>\d+) torch/distributed/elastic/multiprocessing/api\.py:\d+\] failed \(")
AGENT_END = re.compile(r"ChildFailedError|SignalException")
WILL_RESTART = re.compile(r"\d+/\d+ attempts left; +will restart worker group")
LEFT_OVER_CAUSES = {RACE, "port-in-use"}
LEFT_OVER_TEXT = re.compile(  # of a file, a folder, a lock or a port
    r"(?i)^(?:\w+\.)*(?:OSError|FileExistsError|BlockingIOError|Timeout)\b.*(?:\bexists\b|\bnot empty\b|\block|\bin use\b)"
    r"|\bdatabase is locked\b|\block(?:file)? exists\b"
)
# of a collective or of the store, as the rank sees it that did not cause it
LOST = re.compile(r"gloo/transport/|remote process exited|Connection was likely closed|DistNetworkError: ")
DDP_CHECK = re.compile(r"DDP expects same model across all ranks|_verify_param_shape_across_processes")


def without_ignored_interrupts(logs: Sequence[Log]) -> Sequence[Log]:
    """The logs without a Ctrl-C that Python ignored, unless nothing else tells how one log ended."""
    has_other_end = any(log.progress.nan_line or (log.progress.done_line or 0) > log.last_progress_line for log in logs)
    if len(logs) == 1 and not has_other_end:
        return logs
    return [replace(log, records=tuple(r for r in log.records if r.text != IGNORED_INTERRUPT)) for log in logs]


def find_hang(candidates: Sequence[Event], logs: Sequence[Log], *, has_steps: bool) -> CollectiveHang | None:
    """What the ranks wait in, if one of the candidates is a timeout. has_steps: the run made steps."""
    if not any(event.cause.id in TIMEOUTS for event in candidates):
        return None
    records = [record for log in logs for record in log.records]
    return read_hang(records, ranks=ranks_of_job(logs), has_steps=has_steps)


def apply_hang(candidates: Sequence[Event], hang: CollectiveHang | None) -> list[Event]:
    """The candidates; those about a timeout have the cause that the ranks' waits prove, one for each record."""
    if hang is None:
        return list(candidates)
    proven = load_catalogue().causes[hang.cause] if hang.cause else None
    events: dict[tuple[int, str], Event] = {}
    for event in sorted(candidates, key=lambda event: -event.score):
        if event.cause.id in TIMEOUTS:
            event = replace(event, cause=proven or event.cause, values={**event.values, "observed": hang.sentence})
        events.setdefault((id(event.record), event.cause.id), event)
    return sorted(events.values(), key=lambda event: event.place)


# exceptions that need no other cause, and lines about what a program can do without: a build, a package, a server
OF_ITS_OWN = frozenset(
    {"cuda-oom", "shape-mismatch", "dtype-mismatch", "device-mismatch", "keyboard-interrupt", "disk-full"}
)
SURVIVED = frozenset({
    "abi-mismatch", "compile-failure", "hub-offline", "import-error", "rate-limited", "service-unreachable",
    "shared-library-missing", "state-dict-mismatch", "system-tool-missing", "version-mismatch", "wandb-login",
})  # fmt: skip


def of_last_program(roots: Sequence[Event], logs: Sequence[Log]) -> list[Event]:
    """The roots of the last end, where one script failed several times in ways of its own: a file collects its errors.

    Likewise behind another script, if the last one failed twice.
    """
    ends = {(event.record.line, script_that_ended(event.record)) for event in roots}
    if len(ends) < MIN_ENDS or not all(script for _, script in ends):
        return list(roots)
    *_, before, last = sorted(ends)
    if before[1] != last[1] or "<" in last[1] or len(logs) > 1 or not logs[0].has_one_process:
        return list(roots)
    return [event for event in roots if event.record.line == last[0]]


def script_that_ended(record: Record) -> str:
    """The name of the script that an exception ended which nobody has caught, or argparse, which refused its arguments."""
    if record.kind == "exception" and ended_program(record):
        return re.sub(r'.*["/\\](?=.)|"$', "", first_file(record))
    match = REFUSED.match(record.text)
    return match["script"] if match else ""


def find_roots(candidates: Sequence[Event], hang: CollectiveHang | None) -> list[Event]:
    """The candidates that are no consequence of others; all of them if each is one.

    An event is compared with all of its own log and with some of each kind: thousands of ranks fail alike.
    """
    by_log: dict[int, list[Event]] = {}
    by_kind: dict[tuple[str, str, bool], list[Event]] = {}
    for event in candidates:
        by_log.setdefault(event.place[0], []).append(event)
        by_kind.setdefault((event.cause.id, event.record.kind, event.from_launcher), []).append(event)
    if len(by_log) == 1:
        by_kind.clear()
    some = [event for events in by_kind.values() for event in events[:MAX_COMPARED]]
    roots = [event for event in candidates if not is_consequence(event, [*by_log[event.place[0]], *some])]
    if any(
        event.record.kind == "exception" and (event.cause.id in OF_ITS_OWN or ended_program(event.record))
        for event in roots
    ):
        roots = [event for event in roots if not (event.cause.id in SURVIVED and event.record.kind == "line")]
    if hang is not None and hang.cause == FIRST_TRANSFER:  # DDP's check of the models is only the first one to wait
        roots = [event for event in roots if not DDP_CHECK.search(event.record.text)]
    return roots or list(candidates)


def before_restart(candidates: Sequence[Event], events: Sequence[Event], logs: Sequence[Log]) -> list[Event]:
    """The candidates of the attempt whose workers torchrun restarted, if the next one began and failed of what that had left.

    Behind a second start by hand, by another agent, the folder or the port is the user's to clear. events: all, since the
    steps of the next attempt make those that ended the one before look survived.
    """
    for number, log in enumerate(logs):
        begin, restart = restarted_attempt(log)
        own = [event for event in events if event.place[0] == number and event.cause.severity == "fatal"]
        failed = [
            as_fatal(event)
            for event in own
            if begin < event.place[1] <= restart and (not event.run_continued or ended_program(event.record))
        ]
        has_error = any(
            not (event.cause.follows is True or event.from_launcher or is_left_over(event)) for event in failed
        )
        behind = [event for event in candidates if event.place[0] == number and event.place[1] > restart]
        left = list(filter(is_left_over, find_roots(behind, None)))
        ends = [event.record.line for event in left]
        steps = {step for line, _, step in log.last_progress if restart < line < min(ends, default=0)}
        if has_error and left and len(steps) < STEPS_AFTER:
            candidates = [*failed, *(event for event in candidates if event.place[0] != number)]
    return list(candidates)


def restarted_attempt(log: Log) -> tuple[float, float]:
    """The lines between which a log has the last attempt behind which torchrun's agent restarted the workers; infinite for none."""
    reports = agent_reports(log)
    lines = [line for at, (line, pid) in enumerate(reports) if any(pid == other for _, other in reports[at + 1 :])]
    lines += [record.line for record in log.records if WILL_RESTART.search(record.text)]
    restart = max(lines, default=math.inf)
    ends = [record.line for record in log.records if record.line < restart and AGENT_END.search(record.text)]
    return max(ends, default=0), restart


def agent_reports(log: Log) -> list[tuple[int, str]]:
    """The lines in which agents of torchrun report that a worker failed, and the pids of those agents."""
    return [(record.line, match["pid"]) for record in log.records if (match := AGENT_REPORT.match(record.text))]


def is_left_over(event: Event) -> bool:
    """Whether an error can be about what an earlier attempt left behind: a lock, a folder, a port."""
    return event.record.kind != "banner" and bool(
        event.cause.id in LEFT_OVER_CAUSES or LEFT_OVER_TEXT.search(event.record.text)
    )


def without_consequences(roots: Sequence[Event], logs: Sequence[Log]) -> list[Event]:
    """The roots but for exceptions of ranks that failed only after another one, as was recorded; all if none is left."""
    ends = [record for log in logs for record in log.records if record.source == RECORDED]
    followed = {record.rank for record in ends if record.kind == "banner"}
    others = [event for event in roots if not (event.record.kind == "exception" and event.record.rank in followed)]
    return others or list(roots)


def choose_culprit(events: Sequence[Event], blamed: int | None) -> Event:
    """The event with the highest score, or the first of nearly equal ones; blamed is the rank that a launcher reports."""
    best = max(event.score for event in events)
    leaders = [event for event in events if event.score >= best - NEAR]
    # a warning is the cause only where nothing is worse
    leaders = [event for event in leaders if not is_warning(event)] or leaders
    if len({event.place[0] for event in leaders}) == 1:
        return min(leaders, key=lambda event: (event.place[1], -event.score))
    if all(event.record.time is not None for event in leaders):
        return min(leaders, key=lambda event: (event.record.time or 0.0, -event.score))
    return min(leaders, key=lambda event: (event.record.rank not in (None, blamed), -event.score, event.place))


def is_warning(event: Event) -> bool:
    return event.record.kind == "line" and WARNING_LINE.search(event.record.text) is not None


def is_consequence(event: Event, others: Sequence[Event]) -> bool:
    """Whether the event can be a mere consequence of one of the others."""
    for other in others:
        same_cause = other.cause.id == event.cause.id and event.from_launcher == other.from_launcher
        if other.record is event.record or same_cause:
            continue
        if event.from_launcher and not other.from_launcher:
            return True
        if can_follow(event, other) and not (can_follow(other, event) and is_root(event, other)):
            return True
    return False


def can_follow(event: Event, other: Event) -> bool:
    """Whether the event can be a consequence of the other one."""
    # what fails while a rank handles a lost one
    if LOST.search(other.record.context) or LOST.search(event.record.context):
        needs_none = event.cause.id in OF_ITS_OWN and other.cause.follows is True
        return not (needs_none or LOST.search(other.record.context))
    is_abort, other_is_abort = (e.cause.id == ABORT and e.record.kind in ("exit", "signal") for e in (event, other))
    if is_abort and WATCHDOG.search(other.record.text):
        return True
    if other_is_abort and WATCHDOG.search(event.record.text):
        return False
    if event.cause.id in CRASHES and event.record.kind != "exception" and other.record.kind == "exception":
        ranks = {event.record.rank, other.record.rank} - {None}
        return len(ranks) < 2 and other.cause.follows is not True
    if lacks_output(event.record, other.record) and event.place[0] == other.place[0]:
        return True
    follows = event.cause.follows
    return follows if isinstance(follows, bool) else other.cause.id in follows


def lacks_output(record: Record, other: Record) -> bool:
    """Whether a script's later program does not find a file behind the end of another one, which may have had to write it."""
    is_later = record.line > other.line and ended_program(record) and ended_program(other)
    is_output = record.text.startswith("FileNotFoundError") and not INPUT.search(record.text)
    return is_later and is_output and first_file(record) != first_file(other)


def first_file(record: Record) -> str:
    return record.frames[0].partition(", line ")[0]


def is_root(event: Event, other: Event) -> bool:
    """Which of two events that can each follow from the other came first; on different ranks, which is not a lost peer."""
    if event.record.rank is not None and event.record.rank == other.record.rank and event.place[0] == other.place[0]:
        return event.place[1] <= other.place[1]
    if event.place[0] == other.place[0] and {event.cause.id, other.cause.id} & JOB_ENDS:
        return event.place[1] <= other.place[1]
    follows, other_follows = event.cause.follows is True, other.cause.follows is True
    if follows and event.cause.id != ABORT and not isinstance(other.cause.follows, bool):
        return True  # the catalogue names the other one as a consequence of this one
    return event.score >= other.score if follows == other_follows else other_follows


def silent_exit(candidates: Sequence[Event], unexplained: Sequence[Record]) -> Record | None:
    """The exit of a rank without any message, if all other events can only have followed from it."""
    ranks = {event.record.rank for event in candidates}
    if None in ranks:
        return None  # the message may be that of the rank that exited
    for event in candidates:
        if event.cause.id in WAITING - {PEER_DIED} or (event.cause.follows is not True and not event.from_launcher):
            return None
    exits = [record for record in unexplained if record.kind in ("exit", "signal") and record.rank not in ranks]
    return next((record for record in exits if not STOPPED.search(record.text)), None)


def last_words(ended: Record, logs: Sequence[Log]) -> list[Event]:
    """The error that a rank logged right before its silent exit: no step follows in its log."""
    cause = load_catalogue().causes[FALLBACK]
    return [
        Event(error, cause, {"message": RANK_PREFIX.sub("", error.text)}, GUESS, False, (number, error.line), False)
        for number, log in enumerate(logs)
        for error in own_error(ended.rank, log)
        if log.last_progress_line < error.line
    ]
