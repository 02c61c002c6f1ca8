"""
Streams of a card that is not there: what is put on which stream, and what is known to have ended before what.

PyTorch's streams and events are replaced, and `Work.wait`. Each stream has a vector clock, and so has the CPU (L. Lamport, 1978;
C. Fidge, 1988). Two accesses to the same bytes from two streams, one of them a write, must be ordered by waits: otherwise a real
card may do them in any order, and that is a race. Memory counts as written by the stream that allocates it, and as soon as its
tensors are gone it is the allocator's again, for work on that stream. What the CPU itself reads and writes is a stream too. As
NCCL's process group does it, a collective runs on a stream of its own, behind what was on the current stream when it was started,
and `Work.wait` makes the current stream wait, not the CPU.
"""

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor

DEFAULT, NCCL, HOST = "default", "NCCL", "host"
Clock = dict[str, int]  # stream -> the ops on it that are known to have ended


class Timeline:
    """All streams of this process.

    on_join: called with the name of each wait of a stream or of the CPU. on_race: called with what a race is between.
    """

    def __init__(self) -> None:
        self.thread = threading.local()
        self.on_join: Callable[[str], None] = lambda name: None
        self.on_race: Callable[[str], None] = lambda kind: None
        self.pinned = set[int]()  # storages of the host whose pages are locked
        self.clear()

    def clear(self) -> None:
        """Forgets what has happened."""
        self.clocks: dict[str, Clock] = defaultdict(dict)
        # storage -> first byte, the one behind the last, written, stream -> number of the op on it
        self.accesses: dict[int, dict[tuple[int, int, bool, str], int]] = {}
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

    def touch(self, clock: Clock, stream: str, tensor: Tensor, *, write: bool) -> None:
        """Records an access by a stream's newest op, and whether all that it must not overlap has ended."""
        storage = tensor.untyped_storage()
        start, end = span(tensor)
        key = storage_of(tensor)
        if key not in self.accesses:
            self.accesses[key] = {}
            weakref.finalize(storage, self.freed, key, stream, on_card=device_of(tensor) == "cuda")
        for (other_start, other_end, other_write, other), number in self.accesses[key].items():
            apart = other_end <= start or end <= other_start
            if other != stream and (write or other_write) and not apart and clock.get(other, 0) < number:
                self.on_race(f"{'write' if write else 'read'} beside {'write' if other_write else 'read'}")
        self.accesses[key][start, end, write, stream] = clock[stream]

    def pin(self, tensor: Tensor) -> None:
        """Locks the pages of a tensor of the host."""
        self.pinned.add(storage_of(tensor))
        weakref.finalize(tensor.untyped_storage(), self.pinned.discard, storage_of(tensor))

    def freed(self, key: int, owner: str, *, on_card: bool) -> None:
        """Called when a storage is gone: later work on its owner's stream may have the memory."""
        for (_, _, _, stream), number in self.accesses.pop(key, {}).items():
            if on_card and stream not in (owner, HOST) and self.clocks[owner].get(stream, 0) < number:
                self.on_race(f"freed on {owner} beside work on {stream}")

    def collective(self, tensors: Iterable[Tensor]) -> None:
        """Starts a collective on memory, on NCCL's stream."""
        join(self.clocks[NCCL], self.clocks[self.current])
        clock = self.begin(NCCL)
        for tensor in tensors:
            if device_of(tensor) == "cuda":  # host_values.py keeps DDP's table of buckets on the CPU
                self.touch(clock, NCCL, tensor, write=True)
        self.newest_collective = dict(clock)

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


def span(tensor: Tensor) -> tuple[int, int]:
    """Returns the first byte of a tensor in its storage, and the one behind its last."""
    first = tensor.storage_offset() * tensor.itemsize
    steps = (
        0 if size == 0 else (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return first, first + (sum(steps) + 1) * tensor.itemsize if tensor.numel() else first


def device_of(tensor: Tensor) -> str:
    """Returns the type of a tensor's device, without an op: a fake tensor's `device` is one."""
    return (tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device).type


def storage_of(tensor: Tensor) -> int:
    """Returns what all tensors in one piece of memory have in common."""
    return tensor.untyped_storage()._cdata


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

    def wait_event(self, event: "CardEvent") -> None:
        join(TIMELINE.clocks[self.name], event.clock)
        TIMELINE.on_join("wait_event")

    def synchronize(self) -> None:
        TIMELINE.wait_on_host(self.name)
        TIMELINE.on_join("synchronize")


class CardEvent:
    """Stands for torch.cuda.Event, as far as the package uses it."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.clock: Clock = {}

    def record(self, stream: CardStream | None = None) -> None:
        self.clock = dict(TIMELINE.begin(stream.name if stream else TIMELINE.current))

    def synchronize(self) -> None:
        join(TIMELINE.clocks[HOST], self.clock)
        TIMELINE.on_join("synchronize")

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
