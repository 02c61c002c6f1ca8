"""
How long a rank works on a step by itself: from the step's start to the end of its backward, before it waits for the others.

On a GPU the device's own clock counts, by events that are read a step later, when it has passed them: no wait is added.
"""

import time

import torch


class BusyClock:
    """`start` and `stop` once in each step; `mean_ms` and `forget` when a line of metrics is due."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []  # of this step and of the last
        self._started = 0.0
        self._sum_ms, self._steps = 0.0, 0

    def start(self) -> None:
        if self._on_gpu:
            pair = self._events.pop(0) if len(self._events) > 1 else (timed_event(), timed_event())
            pair[0].record()
            self._events.append(pair)
        else:
            self._started = time.perf_counter()

    def stop(self) -> None:
        """Before anything that waits for another rank."""
        if not self._on_gpu:
            self._add(1000 * (time.perf_counter() - self._started))
            return
        self._events[-1][1].record()
        if len(self._events) > 1:  # the last step's: its end was waited for, for the loss
            start, end = self._events[0]
            self._add(start.elapsed_time(end))

    @property
    def mean_ms(self) -> float:
        """Of the steps since `forget`; 0.0 where none is known yet."""
        return self._sum_ms / self._steps if self._steps else 0.0

    def forget(self) -> None:
        self._sum_ms, self._steps = 0.0, 0

    def _add(self, ms: float) -> None:
        self._sum_ms, self._steps = self._sum_ms + ms, self._steps + 1


def timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
