"""
Streams of a card that is not there: what is put on which stream, and what is known to have ended before what.

PyTorch's streams and events are replaced, and `Work.wait`. Each stream has a vector clock, and so has the CPU (L. Lamport, 1978;
C. Fidge, 1988): an op that touches memory which another stream has written, without having waited for it, is a race. As NCCL's
process group does it, a collective runs on a stream of its own, behind what was on the current stream when it was started, and
`Work.wait` makes the current stream wait, not the CPU.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork

DEFAULT, NCCL, HOST = "default", "NCCL", "host"
Clock = dict[str, int]  # stream -> the ops on it that are known to have ended


class Timeline:
    """All streams of this process. on_join: called with the name of each wait of a stream or of the CPU."""

    def __init__(self) -> None:
        self.thread = threading.local()
        self.on_join: Callable[[str], None] = lambda name: None
        self.clear()

    def clear(self) -> None:
        """Forgets what has happened."""
        self.clocks: dict[str, Clock] = defaultdict(dict)
        self.writes: dict[int, tuple[str, int]] = {}  # storage -> stream, number of the op on it
        self.reads: dict[int, Clock] = {}  # storage -> the last op of each stream that reads it
        self.works: list[tuple[dist.Work, Clock]] = []
        self.newest_collective: Clock = {}

    @property
    def current(self) -> str:
        """The name of this thread's current stream."""
        return getattr(self.thread, "stream", DEFAULT)

    def begin(self, stream: str) -> Clock:
        """Puts an op on a stream, and returns the stream's clock. What the CPU knows has ended before it."""
        clock = self.clocks[stream]
        join(clock, self.clocks[HOST])
        clock[stream] = clock.get(stream, 0) + 1
        return clock

    def touch(self, clock: Clock, stream: str, storage: int, *, write: bool) -> bool:
        """Records an access by a stream's newest op; returns whether all that it must not overlap has ended."""
        writer, number = self.writes.get(storage, (stream, 0))
        ordered = clock.get(writer, 0) >= number
        readers = self.reads.setdefault(storage, {})
        if write:
            ordered &= all(clock.get(reader, 0) >= last for reader, last in readers.items())
            readers.clear()
            self.writes[storage] = (stream, clock[stream])
        else:
            readers[stream] = clock[stream]
        return ordered

    def collective(self, storages: set[int]) -> bool:
        """Starts a collective on memory, on NCCL's stream; returns whether nothing else is at work there."""
        join(self.clocks[NCCL], self.clocks[self.current])
        clock = self.begin(NCCL)
        ordered = [self.touch(clock, NCCL, storage, write=True) for storage in storages]
        self.newest_collective = dict(clock)
        return all(ordered)

    def started(self, work: dist.Work) -> dist.Work:
        """Takes a work for that of the newest collective, and returns it."""
        self.works.append((work, self.newest_collective))
        return work

    def wait_work(self, work: dist.Work) -> bool:
        """Makes the current stream wait for a work; returns True, as Work.wait does."""
        ends = [clock for other, clock in self.works if other is work]
        join(self.clocks[self.current], ends[-1] if ends else self.newest_collective)
        self.works = [(other, clock) for other, clock in self.works if other is not work]
        self.on_join("work.wait")
        return True

    def wait_on_host(self, stream: str) -> None:
        """Makes the CPU wait for a stream."""
        join(self.clocks[HOST], self.clocks[stream])


def join(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)


TIMELINE = Timeline()


class CardStream:
    """Stands for torch.cuda.Stream, as far as the package and these tests use it."""

    count = 0

    def __init__(self, device: Any = None, priority: int = 0, *, name: str | None = None) -> None:
        CardStream.count += 1
        self.name = name or f"stream {CardStream.count}"
        self.device, self.cuda_stream = torch.device("cuda", 0), CardStream.count

    def wait_stream(self, stream: "CardStream") -> None:
        join(TIMELINE.clocks[self.name], TIMELINE.clocks[stream.name])
        TIMELINE.on_join("wait_stream")

    def synchronize(self) -> None:
        TIMELINE.wait_on_host(self.name)
        TIMELINE.on_join("synchronize")


class CardEvent:
    """Stands for torch.cuda.Event, as far as the package uses it."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.clock: Clock = {}

    def record(self) -> None:
        self.clock = dict(TIMELINE.begin(TIMELINE.current))

    def query(self) -> bool:
        """Returns whether the CPU knows that the card has passed this event."""
        return all(TIMELINE.clocks[HOST].get(stream, 0) >= number for stream, number in self.clock.items())

    def elapsed_time(self, end: "CardEvent") -> float:
        if not (self.query() and end.query()):
            raise RuntimeError("CUDA error: device not ready")
        return 1.0


def synchronize(device: Any = None) -> None:
    """Stands for torch.cuda.synchronize."""
    for stream in list(TIMELINE.clocks):
        TIMELINE.wait_on_host(stream)
    TIMELINE.on_join("synchronize")


@contextmanager
def on_stream(stream: CardStream) -> Iterator[None]:
    """Stands for torch.cuda.stream."""
    before = TIMELINE.current
    TIMELINE.thread.stream = stream.name
    try:
        yield
    finally:
        TIMELINE.thread.stream = before


def insert_streams() -> None:
    """Gives torch.cuda these streams and events, and makes `Work.wait` known to them."""
    answers = {
        "Stream": CardStream,
        "Event": CardEvent,
        "current_stream": lambda device=None: CardStream(name=TIMELINE.current),
        "stream": on_stream,
        "synchronize": synchronize,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    FakeWork.wait = lambda work, *args: TIMELINE.wait_work(work)
    FakeWork.synchronize = lambda work: TIMELINE.wait_work(work)
