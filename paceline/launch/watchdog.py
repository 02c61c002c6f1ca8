"""
Decides whether the ranks still make progress. Silence that lasts longer than usual is a hang, and the rank that holds up the
others is its culprit.

The ranks of the trainer and of `paceline comm` write heartbeats (paceline/heartbeat.py); a user's script shows activity only by
log lines and processor time. The usual duration of a step is learned during the attempt. The evidence of a hang is kept under
RUN/hangs/<attempt>/, and launch/supervisor.py kills the rank that is to blame.

Time in which poll() was not called does not count: a suspended laptop, a stopped container or a paused supervisor is no hang, and
neither is a jump of the clock. A rank under a debugger is left alone.

The first of these criteria that separates some ranks from the others decides on the culprit: an exception that ended its program
and not its process; a process that cannot run; a heartbeat behind the others; a stack outside any collective while others wait in
one; a process that uses its cores while others idle.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from paceline.explain.recorded_end import HANG
from paceline.heartbeat import END_PHASES, Heartbeat
from paceline.launch.activity import (
    HANG_AFTER_S,
    LONG_PHASE,
    SCRIPT_HANG_AFTER_S,
    HeartbeatActivity,
    LogActivity,
    RankHosts,
)
from paceline.launch.cluster import Cluster
from paceline.launch.failure import Failure
from paceline.launch.log_tail import uncaught_error
from paceline.launch.stacks import (
    CANNOT_RUN,
    GONE,
    STATES,
    WORKING,
    Frame,
    RankProcess,
    busy_worker,
    call_site,
    describe_host,
    has_ended,
    in_collective,
    loads_batch,
    main_frames,
    waits_for_others,
)
from paceline.rundir import RunDir, utc_now, write_atomic
from paceline.units import format_list, format_ranks

PROCESS_CHECK_S = 0.5  # between two looks at the processes while heartbeats are missing
LONGEST_POLL_S = 1.0  # more time than this between two polls does not count
MADE_PROGRESS = "made progress"
PROGRAM_ENDED = " after the end of its program: a thread or an exit handler keeps its process"
MAX_PLACES = 4  # in one sentence


@dataclass(frozen=True)
class Hang:
    """A hang, as events.jsonl and hang.json record it. rank: None where nothing distinguishes the ranks."""

    rank: int | None
    silent_s: float
    phase: str | None
    step: int | None
    text: str
    evidence: tuple[str, ...] = ()  # files, relative to the run folder
    is_seen: bool = True  # False: the silence alone suggests it, no rank is seen waiting for another
    in_collectives: bool = False  # all ranks wait in collectives, and not all in the same one
    error: str | None = None  # that ended the rank's program, while a thread or an exit handler keeps its process
    places: tuple[str, ...] = ()  # where the ranks to blame are, if the stacks of all of them show it

    def failure(self, host: str | None) -> Failure:
        """Returns the failure of the rank to blame: the exception that ended its program, or that it hung and was killed."""
        if self.error:
            return Failure(self.rank, 1, None, self.error, time.time(), consequence=False, host=host)
        return Failure(self.rank, None, "SIGKILL", self.text, time.time(), consequence=False, host=host, cause=HANG)


@dataclass(frozen=True)
class RankState:
    """What is known about one rank at the end of the silence."""

    rank: int
    pid: int | None
    state: str | None  # the letter in /proc/PID/stat; None: there is no such process
    heartbeat: Heartbeat | None = None  # None: it has written none, or it is a script's
    frames: tuple[Frame, ...] = ()  # of its main thread, the innermost first
    cores: float = 0.0  # used during the silence, with its children
    host: str | None = None  # where there are several
    worker: str | None = None  # of its data loader: 'worker 4711 is in __getitem__ at data.py:17'
    error: str | None = None  # the exception that ended its program

    @property
    def idles(self) -> bool:
        """Whether it only waits; in a collective it may do that with all of a core."""
        return self.cores < WORKING or in_collective(self.frames)

    @property
    def place(self) -> tuple[int, int, int]:
        return (-1, 0, 0) if self.heartbeat is None else self.heartbeat.place


class Watchdog:
    """Call poll() some times a second from the start of an attempt: it returns a hang once, and None after that.

    hang_after_s: seconds of silence within a step; None: the default. script: the ranks write no heartbeats. cluster: where the
    ranks run, if not all on this host.
    """

    def __init__(
        self,
        run: RunDir,
        attempt: int,
        nproc: int,
        *,
        hang_after_s: float | None = None,
        script: bool = False,
        cluster: Cluster | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.run, self.attempt, self.nproc, self.script = run, attempt, nproc, script
        self.hosts = RankHosts(cluster or Cluster.here(nproc), run, attempt)
        self.logs = [run.rank_log(attempt, rank) for rank in range(nproc)]
        default_s = SCRIPT_HANG_AFTER_S if script else HANG_AFTER_S
        self.floor_s = default_s if hang_after_s is None else hang_after_s
        self.activity: HeartbeatActivity | LogActivity = (
            LogActivity(run, attempt, nproc, self.floor_s) if script else HeartbeatActivity(run, nproc, self.floor_s)
        )
        self._clock, self._polled_at = clock, clock()
        self._awake_s = 0.0  # time that counts: the sum of what passed between polls
        self._active_s = self._checked_s = 0.0  # when the last activity and the last look at the processes were
        self._cpu_s: dict[int, float] = {}  # processor time of each rank at _cpu_since_s, soon after the last activity
        self._cpu_since_s = 0.0
        self._stopped_since_s: float | None = None  # since when some process has been stopped
        self._ended_ranks: set[int] = set()  # a rank that ends has made progress
        self.hang: Hang | None = None

    def poll(self) -> Hang | None:
        """Returns the hang once it is certain, else None; call it several times a second."""
        now = self._clock()
        self._awake_s += min(max(0.0, now - self._polled_at), LONGEST_POLL_S)
        self._polled_at = now
        if self.hang is not None:
            return None
        if self.activity.has_changed(self._awake_s):
            self._active_s = self._checked_s = self._awake_s
            self._cpu_s, self._stopped_since_s = {}, None
            return None
        if self._awake_s - self._checked_s < PROCESS_CHECK_S:
            return None
        self._checked_s = self._awake_s
        return self._check_processes()

    def _check_processes(self) -> Hang | None:
        """Checks the processes while heartbeats are missing."""
        processes, silent_s = self.hosts.processes(), self._awake_s - self._active_s
        if not self._cpu_s:
            self._cpu_s, self._cpu_since_s = {rank: process.cpu_s for rank, process in processes.items()}, self._awake_s
        states = {rank: process.state for rank, process in processes.items()}
        if "T" not in states.values():
            self._stopped_since_s = None
        elif self._stopped_since_s is None:
            self._stopped_since_s = self._awake_s
        ended = {rank for rank, state in states.items() if state in GONE}
        if "t" in states.values() or ended != self._ended_ranks:
            self._ended_ranks, self._active_s = ended, self._awake_s
            return None
        all_ended = len(ended) == len(states)  # or none has begun; the engine notices, unless it hangs itself
        if silent_s < self.floor_s * (LONG_PHASE if all_ended else 1):
            return None
        cores = self._cores(processes)
        stopped = self._stopped_since_s is not None and self._awake_s - self._stopped_since_s >= self.floor_s
        if not stopped and silent_s < self.activity.allowed_s(cores):
            return None
        ranks, texts = self._inspect(processes, cores)
        self.hang = record_hang(self.run, self.attempt, ranks, texts, silent_s=silent_s, missing=MADE_PROGRESS)
        return self.hang

    def before_stop(self, *, by_person: bool) -> Hang | None:
        """Returns what the ranks do at a stop, None where they work: a person often sees a hang first.

        An exception may have ended a program just before. It takes seconds, and must come before the ranks are told to stop.
        """
        silent_s, processes = self._awake_s - self._active_s, self.hosts.processes()
        alive = [rank for rank, process in processes.items() if process.state not in GONE]
        is_silent = by_person and silent_s >= self.activity.noticed_after_s()
        is_over = any(uncaught_error(self.logs[rank], None, logs=self.logs) for rank in alive)
        if self.hang is not None or not alive or not (is_silent or is_over):
            return None
        ranks, texts = self._inspect(processes, self._cores(processes))
        if not is_silent and find_culprits(ranks)[0].error is None:  # the traceback was one that the program has caught
            return None
        missing = "printed a line" if self.script else MADE_PROGRESS
        hang = record_hang(self.run, self.attempt, ranks, texts, silent_s=silent_s, missing=missing)
        return replace(hang, is_seen=shows_wait(ranks, late=hang.rank)) if is_silent else hang

    def _cores(self, processes: Mapping[int, RankProcess]) -> dict[int, float]:
        """Returns the cores that each rank used on average during the silence."""
        seconds = max(self._awake_s - self._cpu_since_s, PROCESS_CHECK_S)
        used_s = {rank: p.cpu_s - self._cpu_s[rank] for rank, p in processes.items() if rank in self._cpu_s}
        return {rank: max(0.0, cpu_s) / seconds for rank, cpu_s in used_s.items()}

    def _inspect(
        self, processes: Mapping[int, RankProcess], cores: Mapping[int, float]
    ) -> tuple[list[RankState], dict[int, dict[str, str]]]:
        """Takes the stacks of all ranks; returns what each does, and the texts that show it."""
        texts = self.hosts.inspect(own_ranks=not self.script)
        names = self.hosts.names()
        ranks = []
        for rank in range(self.nproc):
            process, stacks = processes.get(rank), texts.get(rank, {}).get("stacks", "")
            heartbeat, frames = self.activity.heartbeats.get(rank), tuple(main_frames(stacks))
            pid, state = (process.pid, process.state) if process else (None, None)
            worker = busy_worker(stacks) if loads_batch(frames) else None
            error = uncaught_error(self.logs[rank], frames, logs=self.logs)
            host, used = names.get(rank), cores.get(rank, 0.0)
            ranks.append(RankState(rank, pid, state, heartbeat, frames, used, host, worker, error))
        return ranks, texts


def record_hang(
    run: RunDir,
    attempt: int,
    ranks: Sequence[RankState],
    observed: Mapping[int, Mapping[str, str]],
    *,
    silent_s: float,
    missing: str,
) -> Hang:
    """Returns the hang; writes a file for each rank and hang.json, as far as they can be. observed: as inspect_ranks returns it."""
    culprits = find_culprits(ranks)
    is_certain = len(culprits) < len(ranks) or len(ranks) == 1 or culprits[0].error is not None
    heartbeat = culprits[0].heartbeat
    places = [f"rank {rank.rank}: {call_site(rank.frames)}" for rank in culprits if rank.frames]
    hang = Hang(
        rank=culprits[0].rank if is_certain else None,
        silent_s=round(silent_s, 1),
        phase=heartbeat.phase if heartbeat else None,
        step=heartbeat.step if heartbeat else None,
        text=describe_hang(ranks, culprits, silent_s=silent_s, missing=missing),
        in_collectives=not is_certain
        and all(waits_for_others(rank.frames) for rank in ranks)
        and len({call_site(rank.frames) for rank in ranks}) > 1,
        error=culprits[0].error,
        places=tuple(places) if len(places) == len(culprits) else (),
    )
    texts = {f"{rank.rank}.txt": describe_rank(rank, **observed.get(rank.rank, {})) for rank in ranks}
    facts = {name: value for name, value in asdict(hang).items() if name != "evidence"}
    # a file keeps the first names of its fields
    states = [{name.replace("heartbeat", "mark"): value for name, value in asdict(rank).items()} for rank in ranks]
    record = {"time": utc_now(), **facts, "ranks": states, "host": describe_host(run)}
    texts["hang.json"] = json.dumps(record, indent=1) + "\n"
    paths = []
    with suppress(OSError):  # a full disk must not keep the run from continuing
        run.hang(attempt).mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_atomic(run.hang(attempt) / name, text)
            paths.append(run.hang(attempt) / name)
    evidence = [str(path.relative_to(run.path)) for path in [*paths, *run.recorder_dumps(attempt)]]
    return replace(hang, evidence=tuple(evidence))


def describe_rank(rank: RankState, *, stacks: str = "", process: str = "") -> str:
    heartbeat = json.dumps(asdict(rank.heartbeat)) if rank.heartbeat else "none"
    process = process if rank.state is not None and process else "gone"
    host = f" on {rank.host}" if rank.host else ""
    return (
        f"rank {rank.rank}{host}, process {rank.pid or 'n/a'}\nmark: {heartbeat}\ncores in use: {rank.cores:.2f}\n\n{process}\n\n"
        f"stacks, taken by {stacks or 'no tool: none could take them'}\n"
    )


def find_culprits(ranks: Sequence[RankState]) -> list[RankState]:
    """Returns the ranks that hold up the others, and every rank where no criterion separates them."""
    if all(rank.state in GONE for rank in ranks):
        return list(ranks)
    furthest = max(rank.place for rank in ranks)
    some_wait = any(waits_for_others(rank.frames) for rank in ranks)
    criteria: tuple[Callable[[RankState], bool], ...] = (
        lambda rank: rank.error is not None,
        lambda rank: rank.state in CANNOT_RUN and not (rank.heartbeat and rank.heartbeat.phase in END_PHASES),
        lambda rank: rank.place < furthest,
        lambda rank: some_wait and bool(rank.frames) and not waits_for_others(rank.frames),
        lambda rank: rank.cores >= WORKING,
    )
    for criterion in criteria:
        matching = [rank for rank in ranks if criterion(rank)]
        if matching and len(matching) < len(ranks):
            last = min(rank.place for rank in matching)
            return [rank for rank in matching if rank.place == last]
    return list(ranks)


def shows_wait(ranks: Sequence[RankState], *, late: int | None) -> bool:
    """Whether ranks are seen waiting for the late one, which does nothing, or all for each other.

    One that works may only be slow, and so may one alone. A rank that has ended holds up nobody who notices it.
    """
    if len(ranks) == 1 or any(rank.state in GONE for rank in ranks):
        return False
    if late is None:
        return all(waits_for_others(rank.frames) and rank.idles for rank in ranks)
    waiting = (waits_for_others(rank.frames) or rank.idles for rank in ranks if rank.rank != late)
    return ranks[late].cores < WORKING and all(waiting)


def describe_hang(
    ranks: Sequence[RankState], culprits: Sequence[RankState], *, silent_s: float, missing: str = MADE_PROGRESS
) -> str:
    """Returns one sentence: which ranks are stuck where, and which ranks wait for them. missing: what no rank did so long."""
    late, others = culprits[0], [rank for rank in ranks if rank not in culprits]
    start = f"no rank {missing} for {silent_s:.0f} s"
    stuck = describe_ranks(culprits, describe_activity, verbs=("is ", "are "))
    worker = next((f"; its {rank.worker}" for rank in culprits if rank.worker), "")
    if not others:
        if len({describe_activity(rank) for rank in ranks}) > 1:
            return f"{start}: nothing shows which rank is to blame: {stuck}"
        if worker and len(ranks) > 1:
            worker = next(f"; {rank.worker} (of rank {rank.rank})" for rank in ranks if rank.worker)
        subject = "the only rank is" if len(ranks) == 1 else "nothing distinguishes the ranks: all are"
        return f"{start}: {subject} {describe_activity(late)}{worker}"
    ahead = max(others, key=lambda rank: rank.place)
    missed = ""
    if ahead.heartbeat is not None and ahead.place > late.place:
        missed = f" and did not reach {ahead.heartbeat.position}"
    return f"{start}: {stuck}{missed}{worker}; {describe_ranks(others, describe_place, verbs=('waits', 'wait'))}"


def describe_ranks(ranks: Sequence[RankState], describe: Callable[[RankState], str], *, verbs: tuple[str, str]) -> str:
    """Returns 'rank 0 is waiting in x and ranks 1 and 2 are waiting in y': ranks of one description together."""
    groups: dict[str, list[RankState]] = {}
    for rank in ranks:
        groups.setdefault(describe(rank), []).append(rank)
    texts = []
    for text, group in groups.items():
        hosts = {rank.host for rank in group}
        host = f" on {group[0].host}" if group[0].host and len(hosts) == 1 else ""
        texts.append(f"{format_ranks(rank.rank for rank in group)}{host} {verbs[len(group) > 1]}{text}")
    return format_list(texts, limit=MAX_PLACES)


def describe_activity(rank: RankState) -> str:
    """Returns 'waiting (state S) in load of step 3', as far as it is known."""
    if rank.state in ("S", "R") and rank.cores >= WORKING:
        return f"working ({rank.cores:.1f} cores){describe_place(rank)}"
    after = f" after {rank.error}" if rank.error else PROGRAM_ENDED if has_ended(rank.frames) else ""
    return STATES.get(rank.state or "", "gone") + describe_place(rank) + after


def describe_place(rank: RankState) -> str:
    """Returns ' in load of step 3, micro_batch at train/loop.py:124', as far as it is known."""
    parts = [rank.heartbeat.position if rank.heartbeat else None, call_site(rank.frames)]
    text = ", ".join(part for part in parts if part)
    return f" in {text}" if text else ""
