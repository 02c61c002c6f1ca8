"""
A rank's heartbeat: one line in progress/<rank> that says where the rank is. This module writes and reads it.

The line is JSON of constant length in a memory-mapped file, overwritten in place: a write costs about a microsecond and no
system call, and the last line stays when the process is killed. Its last field is the CRC-32 of what stands before it, which
exposes a half-written line. The trainer's ranks write the phases below, `paceline comm`'s the operation that they are in.
"""

import json
import mmap
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from paceline.rundir import RunDir, open_file

# in the order in which a rank comes to them after `step` steps
PHASES = (
    "start", "compile", "train", "eval", "save", "sample", "load", "forward", "backward", "reduce", "update", "ending", "stopped",
    "done",
)  # fmt: skip
END_PHASES = ("stopped", "done")  # a rank in one of these sends no more heartbeats
LINE = '{"step": %9d, "micro_step": %5d, "phase": %s, "time": %14.3f, "monotonic": %14.3f, "sum": '
SUM = b"%10d}\n"
PHASE_WIDTH = 10  # of the longest phase with its quotes
OPERATION_WIDTH = 80  # enough for what `paceline comm` calls an operation
QUOTED = {phase: f'"{phase}"'.rjust(PHASE_WIDTH) for phase in PHASES}
WIDTH = len(LINE % (0, 0, QUOTED["start"], 0, 0)) + len(SUM % 0)


@dataclass(frozen=True)
class Heartbeat:
    """Where a rank was when it last wrote."""

    step: int  # completed so far
    micro_step: int
    phase: str
    monotonic: float  # of the host, in seconds; stands still while it is suspended
    time: float = field(default=0.0, compare=False)  # Unix seconds: what another host can compare

    @property
    def place(self) -> tuple[int, int, int]:
        """Grows as a rank makes progress. An operation of `paceline comm` counts as the last phase of its step."""
        return self.step, self.micro_step, PHASES.index(self.phase) if self.phase in QUOTED else len(PHASES)

    @property
    def position(self) -> str:
        """Returns `load of step 412`, or the phase alone where it belongs to no step."""
        if self.phase in ("start", "compile", "ending", "stopped", "done") or self.phase not in QUOTED:
            return self.phase
        return f"{self.phase} of step {self.step + 1:,}"


class HeartbeatWriter:
    """Writes this rank's heartbeat: `step` counts the completed steps, `phase` is what the rank does next."""

    def __init__(self, run: RunDir, rank: int, *, phase_width: int = PHASE_WIDTH):
        self._phase_width = phase_width
        width = WIDTH + phase_width - PHASE_WIDTH
        path = run.progress(rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o644)
        with path.open("r+b") as file:
            file.write(b" " * width)  # takes the space now: a store into a mapped hole of a full disk is a SIGBUS
            file.truncate()
            self._map = mmap.mmap(file.fileno(), width)

    def beat(self, step: int, phase: str, micro_step: int = 0) -> None:
        quoted = (QUOTED.get(phase) or json.dumps(phase)).rjust(self._phase_width)
        line = (LINE % (step, micro_step, quoted, time.time(), time.monotonic())).encode()
        self._map[:] = line + SUM % zlib.crc32(line)


class OperationHeartbeat:
    """Writes the heartbeat of a rank of `paceline comm`: `step` counts its operations, `phase` names the current one."""

    def __init__(self, run: RunDir, rank: int):
        self._writer = HeartbeatWriter(run, rank, phase_width=OPERATION_WIDTH)
        self._operation, self._part = "start", 0
        self.step = 0

    def begin(self, operation: str) -> None:
        self.step += 1
        self._operation, self._part = operation, 0
        self._writer.beat(self.step, operation)

    def advance(self) -> None:
        """Reports one more part of a long operation."""
        self._part += 1
        self._writer.beat(self.step, self._operation, self._part)

    def end(self) -> None:
        self._writer.beat(self.step + 1, "done")


def read_heartbeat(path: Path) -> Heartbeat | None:
    """Returns None where no heartbeat was written yet, and where one is being written at this moment."""
    try:
        with open_file(path) as file:
            line = file.read()
        fields = json.loads(line)
        if zlib.crc32(line[: -len(SUM % 0)]) != fields["sum"]:
            return None
        return Heartbeat(fields["step"], fields["micro_step"], fields["phase"], fields["monotonic"], fields["time"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_heartbeats(run: RunDir) -> dict[int, Heartbeat]:
    """Returns the last heartbeat of each rank that has written one, by rank."""
    ranks = sorted(int(path.name) for path in run.progress(0).parent.glob("*") if path.name.isdecimal())
    return {rank: heartbeat for rank in ranks if (heartbeat := read_heartbeat(run.progress(rank)))}
