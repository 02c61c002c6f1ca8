"""The order to stop an attempt: a signal, or the notice of a preemption."""

import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

from paceline.rundir import RunDir
from paceline.terminal import stop_signals

# wrappers such as `uv run` repeat the signal that the terminal has already sent; they lead the process group of the terminal's job
ONE_CTRL_C_S = 0.3
STOP_REQUEST = "\nstop"  # behind the holder in the lock: `paceline stop` sends the signal of a Ctrl-C
STOP_NOW = f"{STOP_REQUEST} now"  # `paceline stop --now`


@dataclass
class StopSignals:
    """The order to stop: the signals since the attempt began."""

    first: str | None = None
    first_time: float = 0.0
    kill: bool = False
    source: str | None = None  # of the preemption notice that came first, a noun phrase
    deadline: float = math.inf  # by the monotonic clock: what still runs then is killed

    @property
    def by_person(self) -> bool:
        """Whether a person ordered the stop: a batch system and a provider's notice leave no time for more than the save."""
        return self.first == "SIGINT"

    @property
    def is_over(self) -> bool:
        """Whether nothing more may be saved."""
        return self.kill or time.monotonic() > self.deadline

    def facts(self) -> dict[str, str | float]:
        """Returns who ordered the stop, as the event `stopping` has it: a signal, or a notice and the seconds that it left."""
        if self.source is None:
            return {"signal": str(self.first)}
        left = {} if math.isinf(self.deadline) else {"seconds_left": round(max(0.0, self.deadline - time.monotonic()))}
        return {"reason": self.source, **left}

    def preempt(self, source: str, seconds_left: float | None) -> None:
        """Takes a preemption notice, from any thread."""
        now = time.monotonic()
        if seconds_left is not None:
            self.deadline = min(self.deadline, now + seconds_left)
        if self.first is None:
            self.source, self.first_time = source, now
            self.first = "preemption"  # last: the main thread reads the others once this is set

    def add(self, signum: int, frame: FrameType | None) -> None:
        """Takes a signal; it is a signal handler."""
        now = time.monotonic()
        if self.first is None:
            self.first, self.first_time = signal.Signals(signum).name, now
        elif signum == signal.SIGINT:  # a second SIGTERM is only a batch system that repeats itself
            has_no_wrapper = self.by_person and os.getpgrp() == os.getpid()
            self.kill = self.kill or has_no_wrapper or now - self.first_time > ONE_CTRL_C_S


@contextmanager
def catch_signals(signals: StopSignals) -> Iterator[StopSignals]:
    """Collects the signals that arrive within the block."""
    handlers = {signum: signal.signal(signum, signals.add) for signum in stop_signals()}
    try:
        yield signals
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


def request_stop(run: RunDir, *, now: bool) -> None:
    """Notes in the run's lock that the signal which follows is from `paceline stop`; the next holder overwrites it."""
    with suppress(OSError), run.lock.open("r+") as lock:
        lock.seek(0, os.SEEK_END)
        lock.write(STOP_NOW if now else STOP_REQUEST)


def is_stop_requested(run: RunDir, request: str = STOP_REQUEST) -> bool:
    """Whether `paceline stop` has sent the signal that stops the run, and nobody at a terminal. request: STOP_NOW for `--now`."""
    with suppress(OSError):
        return request in run.lock.read_text(errors="replace")
    return False
