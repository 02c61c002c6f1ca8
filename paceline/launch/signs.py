"""
Signs of life of a run's ranks, and for how long they may be missing: marks of our trainer's ranks, log lines of a script's.

What is usual is learned as the attempt goes on. Knows files and seconds; processes are launch/watchdog.py's.
"""

import math
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from statistics import median

from paceline.marks import Mark, read_mark
from paceline.rundir import RunDir

STEPS = 6  # times the usual length of a step, or the longest evaluation, checkpoint, ... so far
LONG = (
    10  # times as long for what is no plain step: the start, the first step (it compiles), an evaluation, a checkpoint
)
AT_WORK = (
    6  # times as long again while processors are at work there: a large model compiles, a large checkpoint is hashed
)
IN_STEP = ("train", "load", "forward", "backward", "reduce", "update")
USUAL_OF = 20  # steps
WORKING = 0.2  # of one core: less than this, and a process only waits
IDLE = 0.05  # of one core: a script's ranks that all use less do nothing


class MarkSigns:
    """progress/<rank> of every rank. Those of an earlier attempt are removed by then (launch/supervisor.py)."""

    own = True

    def __init__(self, run: RunDir, nproc: int, floor_s: float):
        self.paths = {rank: run.progress(rank) for rank in range(nproc)}
        self.floor_s = floor_s
        self.marks: dict[int, Mark] = {}
        self.first_step: dict[int, int] = {}  # of the attempt: that which may compile
        self.entered_s: dict[int, float] = {}  # when the rank came to its phase
        self.longest_s: dict[str, float] = {}  # in each phase that is no step's
        self.step_s: deque[float] = deque(maxlen=USUAL_OF)
        self.stepped_s = 0.0

    def changed(self, awake_s: float) -> bool:
        slowest = self._slowest()
        changed = False
        for rank, path in self.paths.items():
            mark = read_mark(path)
            if mark is not None and mark != self.marks.get(rank):
                self._note(rank, mark, awake_s)
                changed = True
        if changed and (now := self._slowest()) > slowest:
            if slowest > min(self.first_step.values(), default=slowest):
                self.step_s.append((awake_s - self.stepped_s) / (now - slowest))
            self.stepped_s = awake_s
        return changed

    def _slowest(self) -> int:
        """Steps that every rank has done; -1 before all have begun."""
        return (
            min((mark.step for mark in self.marks.values()), default=-1) if len(self.marks) == len(self.paths) else -1
        )

    def _note(self, rank: int, mark: Mark, awake_s: float) -> None:
        before = self.marks.get(rank)
        if before is None or before.phase != mark.phase:
            if before is not None:
                lasted_s = awake_s - self.entered_s[rank]
                self.longest_s[before.phase] = max(lasted_s, self.longest_s.get(before.phase, 0.0))
            self.entered_s[rank] = awake_s
        if mark.phase in IN_STEP:
            self.first_step.setdefault(rank, mark.step)
        self.marks[rank] = mark

    def allowed_s(self, cores: Mapping[int, float]) -> float:
        """The longest that any rank may take where it is."""
        return max(self._allowed_s(rank, cores.get(rank, 0.0)) for rank in self.paths)

    def _allowed_s(self, rank: int, cores: float) -> float:
        mark = self.marks.get(rank)
        if mark is not None and mark.phase in IN_STEP and mark.step > self.first_step[rank]:
            return max(self.floor_s, STEPS * median(self.step_s)) if self.step_s else self.floor_s
        at_work = cores >= WORKING and not (mark and mark.phase == "reduce")  # whoever waits for a GPU may spin
        long_s = LONG * self.floor_s * (AT_WORK if at_work else 1)
        return max(long_s, STEPS * self.longest_s.get(mark.phase, 0.0)) if mark is not None else long_s


class LogSigns:
    """Bytes in the ranks' logs. A script may say nothing for long and be well, so idle processors are asked for besides."""

    own = False

    def __init__(self, run: RunDir, attempt: int, nproc: int, floor_s: float):
        self.paths = [run.rank_log(attempt, rank) for rank in range(nproc)]
        self.floor_s = floor_s
        self.marks: dict[int, Mark] = {}
        self.sizes: list[int] = []

    def changed(self, awake_s: float) -> bool:
        before, self.sizes = self.sizes, []
        for path in self.paths:
            with suppress(OSError):
                self.sizes.append(path.stat().st_size)
        return self.sizes != before

    def allowed_s(self, cores: Mapping[int, float]) -> float:
        return self.floor_s if all(used < IDLE for used in cores.values()) else math.inf
