"""
Who does not come: read from progress/<rank>, which each rank writes before and after an operation, and from /proc.

It ends nothing itself: poll() raises, and run_attempt leaves nothing running however its block is left. No torch.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, TrainingFailed
from paceline.rundir import RunDir, read_json_lines

START_S = 60.0  # importing torch on a busy machine; a stopped process is told from a slow one by its state
STATES = {
    "T": "stopped (state T)",
    "t": "stopped by a debugger (state t)",
    "Z": "ended (state Z)",
    "D": "waiting for a disk or a device (state D)",
    "R": "running (state R)",
    "S": "waiting (state S)",
}
STILL = ("T", "t", "Z", None)  # such a process does nothing at all; None: it is gone

Progress = dict[str, Any]  # as train/selftest.py's Notes write it


class Hung(PacelineError):
    """No rank gets on; the message names who did not come."""

    exit_code = TrainingFailed.exit_code


class HangWatch:
    """poll() some times a second: shows how far rank 0 is, and raises Hung when no rank has got on for deadline_s."""

    def __init__(
        self,
        run: RunDir,
        *,
        attempt: int,
        nproc: int,
        deadline_s: float,
        on_progress: Callable[[Progress], None],
        fix: str,
    ):
        self.run, self.attempt, self.nproc = run, attempt, nproc
        self.deadline_s, self.on_progress, self.fix = deadline_s, on_progress, fix
        self.seen: list[Progress | None] = []
        self.since = time.monotonic()

    def poll(self) -> None:
        progress = [next(read_json_lines(self.run.progress(rank)), None) for rank in range(self.nproc)]
        now = time.monotonic()
        if progress != self.seen:
            self.seen, self.since = progress, now
            if progress[0]:
                self.on_progress(progress[0])
        silent_s = now - self.since
        if silent_s < self.deadline_s:
            return
        states = [self.process_state(rank) for rank in range(self.nproc)]
        done = all(each is not None and each["phase"] == "done" for each in progress)
        slow_start = None in progress and silent_s < START_S and not any(state in ("T", "t") for state in states)
        if not done and not slow_start:
            raise Hung(f"no rank got on for {silent_s:.0f} s: {who_is_late(progress, states)}", fix=self.fix)

    def process_state(self, rank: int) -> str | None:
        try:
            return process_state(int((self.run.logs(self.attempt) / f"{rank}.pid").read_text()))
        except (OSError, ValueError):
            return None


def process_state(pid: int) -> str | None:
    """The letter in /proc/PID/stat; None when there is no such process. The name before it may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


def who_is_late(progress: Sequence[Progress | None], states: Sequence[str | None]) -> str:
    """Those that cannot get on, else those behind the others, else all: 'rank 1 did not come to ...; it is stopped (state T)'."""
    places = [place(each) for each in progress]
    furthest = max(places)
    everyone = range(len(progress))
    still = [rank for rank in everyone if states[rank] in STILL]
    late = still or [rank for rank in everyone if places[rank] < furthest] or list(everyone)
    first, ahead = progress[late[0]], progress[places.index(furthest)]
    if ahead is None:
        did = "did not start"
    elif first is not None and first["inside"]:
        did = f"came to {first['phase']} and did not get through"
    else:
        did = f"did not come to {ahead['phase']}"
    how = list(dict.fromkeys(STATES.get(states[rank] or "", "gone") for rank in late))
    if len(late) == 1:
        return f"rank {late[0]} {did}; it is {how[0]}"
    return f"ranks {', '.join(map(str, late[:-1]))} and {late[-1]} {did}; they are {' or '.join(how)}"


def place(progress: Progress | None) -> tuple[int, bool, int]:
    """Later is greater. `part` counts within a long operation."""
    if progress is None:
        return -1, False, 0
    return progress["step"], not progress["inside"], progress["part"]
