"""
The line in progress/<rank>: where a rank of our trainer is. train/progress.py writes it, launch/watchdog.py reads it.

JSON, always of the same length. Its last field is the CRC-32 of the line before it, by which a half-written one is known.
"""

import json
import os
import zlib
from dataclasses import dataclass, field
from pathlib import Path

# in the order in which a rank comes to them after `step` steps
PHASES = (
    "start", "compile", "train", "eval", "save", "sample", "load", "forward", "backward", "reduce", "update", "ending", "stopped",
    "done",
)  # fmt: skip
LINE = '{"step": %9d, "micro_step": %5d, "phase": %s, "time": %14.3f, "monotonic": %14.3f, "sum": '
SUM = b"%10d}\n"
QUOTED = {phase: f'"{phase}"'.rjust(10) for phase in PHASES}
WIDTH = len(LINE % (0, 0, QUOTED["start"], 0, 0)) + len(SUM % 0)


@dataclass(frozen=True)
class Mark:
    step: int  # done so far
    micro_step: int
    phase: str
    monotonic: float  # of the host, in seconds; stands still while it is suspended
    time: float = field(default=0.0, compare=False)  # Unix seconds: what another host can compare

    @property
    def place(self) -> tuple[int, int, int]:
        """Grows as a rank gets on."""
        return self.step, self.micro_step, PHASES.index(self.phase)


def read_mark(path: Path) -> Mark | None:
    """None where there is none, or one that is being written just now."""
    try:
        fd = os.open(path, os.O_RDONLY)
        try:
            line = os.read(fd, WIDTH + 1)
        finally:
            os.close(fd)
        said = json.loads(line)
        if len(line) != WIDTH or zlib.crc32(line[: -len(SUM % 0)]) != said["sum"]:
            return None
        return Mark(said["step"], said["micro_step"], said["phase"], said["monotonic"], said["time"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
