"""
Which rank an event is to be blamed on.

The rank that writes an error is not always the one that caused it: a rank that waits in a collective reports the wait, and the
culprit is the rank that did not arrive. Where no log shows the culprit it stays unknown, because a wrong rank costs the user more
than none.
"""

import re
from collections.abc import Iterable, Sequence, Set
from itertools import pairwise

from paceline.explain.collectives import DESYNC, STATUS, CollectiveHang
from paceline.explain.explanation import RECORDED, Record
from paceline.explain.lines import IGNORABLE, KILLED_LAUNCHER
from paceline.explain.log import Log
from paceline.explain.matches import PROGRAM_ENDED, WAITING, Event
from paceline.explain.reader import BANNER_RANK
from paceline.explain.run_bounds import shape_of
from paceline.explain.sentences import places_of
from paceline.explain.survival import LOST_PEER

MAX_RANK = 10**6
EXTERNAL = {"keyboard-interrupt", "terminal-hangup"}  # sent to all ranks, no rank is to blame
ROOT_CAUSE = re.compile(r"Root Cause \(first observed failure\)")
FAILED_RANK = re.compile(
    r"failed \(exitcode: -?\d+\) local_rank: (?P<torch>\d+)|\brank (?P<mpi>\d+) exited with code [1-9]"
    r"|MPI_ABORT was invoked on rank (?P<abort>\d+)"
)
SPAWNED = re.compile(r"[Pp]rocess (?P<pid>\d+) spawned with command: .*--local[_-]rank[=', ]+(?P<rank>\d+)")
PID_FAILED = re.compile(
    r"(?:Killing subprocess|[Pp]rocess) (?P<pid>\d+)\b.*(?:exits with|return code|exit code|terminated)"
)
STOPPED_TASKS = re.compile(r"srun: error: \S+: tasks (?P<tasks>0-[\d,-]{1,400}): Terminated")
WORLD = re.compile(
    r"world[_ ]size['\"]?[:= ]+(?P<size>\d+)|\bnranks (?P<nranks>\d+)|nproc[_-]per[_-]node[= ]+(?P<nproc>\d+)"
    r"|num_local_procs=(?P<procs>\d+)|MEMBER: \d+/(?P<members>\d+)|WORLD_SIZE in environ: \d+/(?P<environ>\d+)"
)
OWN_RANK = re.compile(r"\bGLOBAL_RANK: (?P<rank>\d{1,6}), MEMBER: \d")
STOPPED_BY_LAUNCHER = re.compile(r"-15\b|-9\b|SIGTERM|SIGKILL")
NUMBER = re.compile(r"\d+")
OWN_ERROR = re.compile(r"\W*(?:CRITICAL|ERROR|FATAL)\b")  # as a logger of the program marks it
# as a rank says of itself
WAITS_FOR_RANK = re.compile(r"(?i)\bwait\w* (?:for|on) (?:rank \d|(?:all |the )*other ranks\b|all (?:the )?ranks\b)")
# which all ranks have to do together
LEFT = re.compile(  # no setting, and no loss scale, which all ranks have alike
    r"(?i)^(?!.*(?:=|patience|monitor|overflow|loss.?scale)).*"
    r"(?:\bearly[ -]?stop(?:s|ped|ping)?\b|\bskip(?:s|ped|ping)?\b.{0,30}\b(?:batch|step|iteration|update)\b)"
)


def culprit_rank(
    event: Event, candidates: Sequence[Event], logs: Sequence[Log], *, hang: CollectiveHang | None
) -> int | None:
    """The rank that caused the event; candidates are all events that may have ended the run. hang: of its collectives."""
    if (rank := rank_in_text(event)) is not None or event.cause.id in EXTERNAL:
        return rank
    if KILLED_LAUNCHER.search(event.record.text):
        return None
    if world_size(logs) == 1:
        return 0
    same_cause = [other for other in candidates if other.cause.id == event.cause.id]
    if failed_alike(event, logs):
        return None
    if event.cause.id in WAITING and event.cause.follows is True:  # one that compared what ranks called waits for none
        apart = event.cause.id == DESYNC and hang is None and wait_apart(candidates, logs)
        return None if apart else late_rank(same_cause, logs, hang=hang)
    named = {rank_in_text(other) for other in same_cause} - {None}
    if len(named) == 1:
        return named.pop()
    records = [event.record, *(other.record for other in same_cause)]
    if event.record.rank is not None:  # other errors of the same cause have causes of their own
        records = [record for record in records if shape_of(record.text) == shape_of(event.record.text)]
    ranks = [record.rank for record in records if record.rank is not None]
    blamed = rank_blamed_by_launcher(logs)
    waiting = {
        number
        for other in candidates
        if other.cause.id in WAITING
        for number in (other.record.rank, rank_in_text(other))
    }
    if ranks and (blamed is None or blamed in waiting - {*ranks} or len({*ranks}) == 1):
        return ranks[0]  # else the launcher knows which of them ended first
    waited = {
        other.record.rank
        for other in candidates
        if other.cause.id in WAITING and other.record.rank not in (None, rank_in_text(other))
    }
    if blamed in waited:  # for the rank whose error this is
        others = ranks_of_job(logs) - waited
        return others.pop() if len(others) == 1 else None
    if blamed is not None:
        return blamed
    if event.record.kind not in ("exit", "signal"):
        log = logs[event.place[0]]
        left = first_to_leave(event, log) if event.record.kind == "exception" else None
        ranks_found = (left, rank_of_device(event.record, logs), only_failing_rank(logs), rank_of_process(log))
        return next((rank for rank in ranks_found if rank is not None), None)
    # a killed rank prints nothing; the ranks that lost it do
    return only_silent_rank({other.record.rank for other in candidates if other.cause.follows is True}, logs)


def failed_alike(event: Event, logs: Sequence[Log]) -> bool:
    """Whether an error that has no rank itself is there once for each rank that failed, as a launcher reports, else of the job."""
    texts = [record.text for log in logs for record in log.records]
    reports = [match for text in texts if (match := BANNER_RANK.match(text) or FAILED_RANK.search(text))]
    failed = {int(match[match.lastgroup or 0]) for match in reports} or ranks_of_job(logs)
    first = event.record.text.partition("\n")[0]
    alike = [record for log in logs for record in log.records if record.kind == event.record.kind]
    alike = [record for record in alike if shape_of(record.text.partition("\n")[0]) == shape_of(first)]
    return all(record.rank is None for record in alike) and len(alike) == len(failed) > 1


def wait_apart(candidates: Sequence[Event], logs: Sequence[Log]) -> bool:
    """Whether all ranks of the job wait, and not all in the same line of the user's code: in different collectives."""
    places = places_of(other.record for other in candidates if other.cause.id in WAITING)
    return len({*places.values()}) > 1 and ranks_of_job(logs) <= places.keys()


def ranks_of_victims(records: Iterable[Record], culprit: int | None) -> tuple[int, ...]:
    return tuple(sorted({record.rank for record in records if record.rank is not None} - {culprit}))


def rank_of_device(record: Record, logs: Sequence[Log]) -> int | None:
    """The index of NCCL's GPU, which is the rank where all are on one host and each rank sees all of them."""
    others = [other for log in logs for other in log.records if other.device is not None]
    is_rank = len({other.host for other in others}) == 1 and len({other.device for other in others}) > 1
    return record.device if is_rank else None


def only_failing_rank(logs: Sequence[Log]) -> int | None:
    """The rank of all exceptions that have one, if it is the same and did not only lose another rank."""
    failed = [
        record for log in logs for record in log.records if record.kind == "exception" and record.rank is not None
    ]
    ranks = {record.rank for record in failed}
    return ranks.pop() if len(ranks) == 1 and not all(LOST_PEER.search(record.text) for record in failed) else None


def rank_of_process(log: Log) -> int | None:
    """The rank that Lightning reports as the log's own; several ranks that print into one log report several."""
    ranks = {int(match["rank"]) for record in log.records if (match := OWN_RANK.search(record.text))}
    return ranks.pop() if len(ranks) == 1 else None


def first_to_leave(event: Event, log: Log) -> int | None:
    """The rank that first reports its end behind an exception, which has no rank itself."""
    after = (record for record in log.records if record.line > event.record.line)
    return next((record.rank for record in after if PROGRAM_ENDED.search(record.text)), None)


def rank_in_text(event: Event) -> int | None:
    """The rank that the text itself blames."""
    for name in ("rank", "late_rank"):
        if (match := NUMBER.search(event.values.get(name) or "")) and int(match[0]) < MAX_RANK:
            return int(match[0])
    return None


def late_rank(waiting: Sequence[Event], logs: Sequence[Log], *, hang: CollectiveHang | None) -> int | None:
    """The one rank that all others wait for: its last collective or step is the lowest, or it alone prints nothing."""
    records = [record for log in logs for record in log.records]
    ranks = [rank for event in waiting if (rank := rank_in_text(event)) is not None]
    if ranks:
        return ranks[0]
    if hang is not None and (hang.in_step or hang.late_rank is not None):
        return hang.late_rank
    enqueued: dict[int, int] = {}
    for record in records:
        if record.rank is not None and (match := STATUS.search(record.text)):
            enqueued[record.rank] = min(int(match["enqueued"]), enqueued.get(record.rank, 1 << 62))
    steps: dict[int, int] = {}
    for log in logs:
        for rank, step in log.last_steps.items():
            steps[rank] = max(step, steps.get(rank, step))
    for counts in (enqueued, steps):
        lowest = [rank for rank, count in counts.items() if count == min(counts.values())]
        if 2 * len(lowest) < len(counts) or (len(counts) == 2 and len(lowest) == 1):
            return min(lowest)
    exited = [record for record in records if record.kind == "exit" and not STOPPED_BY_LAUNCHER.search(record.text)]
    return only_silent_rank({record.rank for record in (*(event.record for event in waiting), *exited)}, logs)


def reports_of_leaving(logs: Sequence[Log], late_rank: int | None) -> list[Record]:
    """The last report of one rank that it stops early or skips a step, if no other rank that prints reports it as well.

    And if this rank and others did not take steps together behind it. Else the last error that the late rank alone logged.
    """
    reports = [record for log in logs for record in log.records if record.kind == "line" and LEFT.search(record.text)]
    ranks = {record.rank for record in reports}
    progress = {(line, rank) for log in logs for line, rank, _ in log.last_progress}
    lines = {line for line, _ in progress}
    progress |= {(record.line, record.rank) for log in logs for record in log.records if record.line in lines}
    printing = {rank for _, rank in progress}
    behind = {rank for line, rank in progress if reports and line > reports[-1].line}
    is_alone = len(ranks) == 1 and None not in ranks and not ranks < behind - {None}
    if is_alone and (printing - {None, *ranks} or ranks != {0}):
        return reports[-1:]
    return [error for log in logs for error in own_error(late_rank, log)][-1:]


def own_error(rank: int | None, log: Log) -> list[Record]:
    """The last line that a rank marks as an error and of which no other rank has the like; not one about what it can do without."""
    lines = [record for record in log.records if record.kind == "line" and OWN_ERROR.match(record.text)]
    errors = [error for error in lines if not IGNORABLE.search(error.text)]
    shapes = {shape_of(error.text) for error in errors if error.rank != rank}
    return [error for error in errors if rank == error.rank is not None and shape_of(error.text) not in shapes][-1:]


def only_silent_rank(reporting: Set[int | None], logs: Sequence[Log]) -> int | None:
    """The one rank of the job, as far as the logs show its ranks, that reports neither an error nor that it waits for another."""
    reports = {record.rank: record.text for log in logs for record in log.records if record.kind == "line"}  # at last
    silent = ranks_of_job(logs) - reporting - {rank for rank, text in reports.items() if WAITS_FOR_RANK.search(text)}
    return silent.pop() if reporting - {None} and len(silent) == 1 else None


def ranks_of_job(logs: Sequence[Log]) -> set[int]:
    """The ranks of the job as far as the logs show them: those that print, and all below a reported world size."""
    records = [record for log in logs for record in log.records]
    ranks = {record.rank for record in records if record.rank is not None}.union(
        *({*log.ranks, *log.last_steps} for log in logs)
    )
    size = world_size(logs)
    return ranks | set(range(size)) if len(ranks) <= size <= MAX_RANK else ranks


def world_size(logs: Sequence[Log]) -> int:
    """The largest number of ranks that the logs report; 0 if they report none."""
    records = (record for log in logs for record in log.records)
    return max((int(match[match.lastgroup or 0]) for r in records for match in WORLD.finditer(r.text)), default=0)


def rank_blamed_by_launcher(logs: Sequence[Log]) -> int | None:
    """The rank that a launcher reports as the first that failed."""
    ends = (record for log in logs for record in log.records if record.source == RECORDED)
    if ended := [record.rank for record in ends if record.kind in ("exit", "signal") and record.rank is not None]:
        return ended[0]  # the supervisor lists the root first
    in_root_cause = False
    pids: dict[str, int] = {}
    first: int | None = None
    for record in (record for log in logs for record in log.records):
        text = record.text
        if ROOT_CAUSE.search(text):
            in_root_cause = True
        elif in_root_cause and (match := BANNER_RANK.match(text)):
            return int(match["rank"])
        elif match := SPAWNED.search(text):
            pids[match["pid"]] = int(match["rank"])
        elif first is None and (match := FAILED_RANK.search(text)):
            first = int(match[match.lastgroup or 0])
        elif first is None and (match := PID_FAILED.search(text)):
            first = pids.get(match["pid"])
        elif first is None and (match := STOPPED_TASKS.search(text)):
            first = task_left_out(match["tasks"])
        elif first is None and record.kind in ("exit", "signal") and record.rank is not None:
            first = record.rank
    return first


def task_left_out(tasks: str) -> int | None:
    """The one number that a list such as 0-57,59-63 leaves out: srun stops all tasks but the one that failed."""
    ends = [part.partition("-") for part in tasks.split(",")]
    if not all(
        first.isdecimal() and len(first + last) < 14 and (not last or last.isdecimal()) for first, _, last in ends
    ):
        return None
    runs = [(int(first), int(last or first)) for first, _, last in ends]
    missing = [number for (_, last), (first, _) in pairwise(runs) for number in range(last + 1, min(first, last + 3))]
    return missing[0] if len(missing) == 1 else None
