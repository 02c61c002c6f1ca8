"""
Signs that the ranks make progress, and how long the silence between two of them may last: the heartbeats of the trainer's ranks,
the log lines of a script's, their processes on each host.
"""

import math
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

from paceline.heartbeat import PHASES, Heartbeat, read_heartbeat
from paceline.launch.cluster import Cluster
from paceline.launch.stacks import IDLE, WORKING, RankProcess, inspect_ranks, rank_processes
from paceline.rundir import RunDir

HANG_AFTER_S = 60.0  # of silence within a step
SCRIPT_HANG_AFTER_S = 600.0  # of a script, which may print nothing for long
USUAL_STEPS = 6  # a step may take this many times the usual step, a long phase this many times its longest so far
LONG_PHASE = 10  # times the floor: the start, the first step (it compiles), an evaluation, a checkpoint
WORKING_PHASE = 6  # times that while the processor is used: a large model compiles, a large checkpoint is hashed
NOTICED_AFTER_S = 20.0  # a person who watches steps come and then none takes a shorter silence for a slow step
NOTICED_PAUSES = 2  # times the longest pause between two lines of a script, or the longest phase of its kind so far
IN_STEP = ("train", "load", "forward", "backward", "reduce", "update")
MEDIAN_OF = 20  # steps
INSPECTION_S = 10.0  # another host has as long for the stacks of its ranks


class HeartbeatActivity:
    """The heartbeats of all ranks of this attempt, and how long each phase has taken so far."""

    def __init__(self, run: RunDir, nproc: int, floor_s: float):
        self.paths = {rank: run.progress(rank) for rank in range(nproc)}
        self.floor_s = floor_s
        self.heartbeats: dict[int, Heartbeat] = {}
        self.first_step: dict[int, int] = {}  # of the attempt: that which may compile
        self.entered_s: dict[int, float] = {}  # when the rank came to its phase
        self.longest_s: dict[str, float] = {}  # of each phase that belongs to no step
        self.step_s: deque[float] = deque(maxlen=MEDIAN_OF)
        self.stepped_s = 0.0

    def has_changed(self, awake_s: float) -> bool:
        step_before, changed = self._slowest_step(), False
        for rank, path in self.paths.items():
            heartbeat, before = read_heartbeat(path), self.heartbeats.get(rank)
            if heartbeat is None or heartbeat == before:
                continue
            changed = True
            if before is None or before.phase != heartbeat.phase:
                if before is not None:
                    duration_s = awake_s - self.entered_s[rank]
                    self.longest_s[before.phase] = max(duration_s, self.longest_s.get(before.phase, 0.0))
                self.entered_s[rank] = awake_s
            if heartbeat.phase in IN_STEP:
                self.first_step.setdefault(rank, heartbeat.step)
            self.heartbeats[rank] = heartbeat
        if (step := self._slowest_step()) > step_before:
            if step_before > min(self.first_step.values(), default=step_before):
                self.step_s.append((awake_s - self.stepped_s) / (step - step_before))
            self.stepped_s = awake_s
        return changed

    def _slowest_step(self) -> int:
        """Returns the steps that every rank has completed; -1 before all ranks have started."""
        if len(self.heartbeats) < len(self.paths):
            return -1
        return min(heartbeat.step for heartbeat in self.heartbeats.values())

    def allowed_s(self, cores: Mapping[int, float]) -> float:
        """Returns the longest silence that any rank's phase allows: the other ranks may be waiting for that rank."""
        return max(self._allowed_s(rank, cores.get(rank, 0.0)) for rank in self.paths)

    def noticed_after_s(self) -> float:
        """Returns from which silence on a stop may be the answer to a hang that somebody saw: usual steps or phases."""
        beats = [self.heartbeats.get(rank) for rank in self.paths]
        if all(beat and beat.phase in IN_STEP and beat.step > self.first_step[rank] for rank, beat in enumerate(beats)):
            return max(NOTICED_AFTER_S, USUAL_STEPS * median(self.step_s)) if self.step_s else HANG_AFTER_S
        longest_s = max((self.longest_s.get(beat.phase, 0.0) for beat in beats if beat), default=0.0)
        return max(HANG_AFTER_S, NOTICED_PAUSES * longest_s)

    def _allowed_s(self, rank: int, cores: float) -> float:
        """Returns the silence that this rank's phase allows: `floor_s` or some usual steps within a step, more in a long phase."""
        heartbeat = self.heartbeats.get(rank)
        if heartbeat is not None and heartbeat.phase not in PHASES:  # an operation of `paceline comm`
            return self.floor_s
        if heartbeat is not None and heartbeat.phase in IN_STEP and heartbeat.step > self.first_step[rank]:
            return max(self.floor_s, USUAL_STEPS * median(self.step_s)) if self.step_s else self.floor_s
        works = cores >= WORKING and not (heartbeat and heartbeat.phase == "reduce")  # a wait for a GPU may spin
        long_s = LONG_PHASE * self.floor_s * (WORKING_PHASE if works else 1)
        return max(long_s, USUAL_STEPS * self.longest_s.get(heartbeat.phase, 0.0)) if heartbeat else long_s


class LogActivity:
    """Bytes in the ranks' logs. A healthy script may print nothing for long, so its processors must be idle as well."""

    def __init__(self, run: RunDir, attempt: int, nproc: int, floor_s: float):
        self.paths = [run.rank_log(attempt, rank) for rank in range(nproc)]
        self.floor_s = floor_s
        self.heartbeats: dict[int, Heartbeat] = {}
        self.sizes: list[int] = []
        self.changed_s: float | None = None  # when the last line came
        self.longest_s: float | None = None  # pause between two lines

    def has_changed(self, awake_s: float) -> bool:
        before, self.sizes = self.sizes, []
        for path in self.paths:
            with suppress(OSError):
                self.sizes.append(path.stat().st_size)
        if self.sizes == before:
            return False
        if self.changed_s is not None:
            self.longest_s = max(self.longest_s or 0.0, awake_s - self.changed_s)
        self.changed_s = awake_s if any(self.sizes) else None
        return True

    def noticed_after_s(self) -> float:
        """Returns from which silence on a stop may be the answer to a hang that somebody saw: twice the longest pause so far."""
        pause_s = HANG_AFTER_S if self.longest_s is None else NOTICED_PAUSES * self.longest_s
        return max(NOTICED_AFTER_S, pause_s)

    def allowed_s(self, cores: Mapping[int, float]) -> float:
        return self.floor_s if all(num_cores < IDLE for num_cores in cores.values()) else math.inf


@dataclass(frozen=True)
class RankHosts:
    """The ranks of an attempt, on one host or several, and how the watchdog sees their processes.

    Those of this host are seen in /proc. launch/remote.py sends those of its host every second, and takes their stacks on an order:
    a process id means something on its own host alone.
    """

    cluster: Cluster
    run: RunDir
    attempt: int

    def processes(self) -> dict[int, RankProcess]:
        """Returns the processes that have been started, by rank."""
        processes: dict[int, RankProcess] = {}
        for member in self.cluster.begin():
            here = rank_processes(self.run, self.attempt, member.ranks) if member.is_here else member.processes
            processes |= {rank: process for rank, process in here.items() if rank in member.ranks}
        return processes

    def inspect(self, *, own_ranks: bool) -> dict[int, dict[str, str]]:
        """Returns what each process does, as inspect_ranks does."""
        members = self.cluster.begin()
        others = [member for member in members if not member.is_here]
        for member in others:
            member.send({"do": "stacks", "own_ranks": own_ranks})
        texts: dict[int, dict[str, str]] = {}
        for member in members:
            if member.is_here:
                texts |= inspect_ranks(self.run, self.attempt, member.ranks, own_ranks=own_ranks)
        for line in self.cluster.answers(others, "stacks", timeout_s=INSPECTION_S, is_required=False).values():
            texts |= {int(rank): facts for rank, facts in line["ranks"].items()}
        return texts

    def names(self) -> dict[int, str]:
        """Returns the host of each rank; nothing where there is one."""
        members = self.cluster.begin()
        return {rank: member.name for member in members for rank in member.ranks} if len(members) > 1 else {}
