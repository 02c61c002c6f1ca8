"""
Where the time and the memory of training steps went: pure functions of the events of torch.profiler's Chrome trace.

The parts have the names of plan/step_time.py, so measured and planned stand side by side. On a GPU its kernels count; on a CPU the
operations of the main thread. Each belongs to what it was launched from: an operation, an autograd Function of model/layers.py, and
the phase of the step, which train/profiler.py marks. Communication is exposed where nothing else runs. What remains is idle: the
text is loaded, the host prepares the next operation, or it has waited for the device. The format: "Trace Event Format" by Google,
with the categories and arguments that Kineto writes.
"""

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

RANGE = "paceline."  # and the phase: the name of a range in the trace
STEP = "ProfilerStep#"
COMPUTE = ("matmuls", "attention", "elementwise", "loss", "embeddings", "gradients", "optimizer")
SENT = ("gradients sent", "weights sent")
IDLE = ("data", "host", "synchronizing")
PARTS = (*COMPUTE, *SENT, *IDLE)
PHASES = ("load", "forward", "backward", "reduce", "update")  # of heartbeats within a step
MEMORY_PHASES = {
    "load": "forward",
    "forward": "forward",
    "backward": "backward",
    "reduce": "update",
    "update": "update",
}

PHASE_PARTS = {"load": "data", "reduce": "gradients", "update": "optimizer"}  # of all that is done in that phase
OPERATIONS = (  # by its own name; what runs within one of the first three belongs to it
    ("loss", re.compile("SumOfNats")),
    (
        "attention",
        re.compile("CausalAttention|scaled_dot_product|flash|fmha|flex_attention|efficient_attention|::(badd)?bmm"),
    ),
    ("embeddings", re.compile("_Lookup|[Ee]mbedding")),
    ("gradients", re.compile("AccumulateGrad")),
    ("matmuls", re.compile("aten::(mm|addmm|matmul|linear)$|gemm|nvjet|cutlass")),
)
INHERITED = {"loss", "attention", "embeddings", "gradients", "optimizer", "data"}
MESSAGE = re.compile("(c10d|gloo|nccl):|ncclDevKernel|ncclKernel|record_param_comms")
UNDER_WAY = ("gloo:", "nccl:")  # spans from the start of a message to its end, beside what runs meanwhile
# their own time is Python's and autograd's, between the operations in them
AROUND_OPERATIONS = re.compile(r"(torch::)?autograd::|_[A-Z]|\w+Backward\d*$|DistributedDataParallel|CompiledFunction")
SYNCHRONIZE = re.compile("cuda(Stream|Device|Event)Synchronize")
ON_THREAD = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")

Event = Mapping[str, Any]


class Interval(NamedTuple):
    """A time in which one thing was done; microseconds."""

    start: float
    end: float
    part: str


class Phases:
    """The phases of all steps, in the order of time."""

    def __init__(self, events: Iterable[Event]):
        marks = [event for event in events if event.get("cat") == "user_annotation" and event["name"].startswith(RANGE)]
        ranges = sorted((event["ts"], event["ts"] + event["dur"], event["name"]) for event in marks)
        self.intervals = [Interval(start, end, name.removeprefix(RANGE)) for start, end, name in ranges]
        self.starts = [interval.start for interval in self.intervals]

    def number_at(self, time: float) -> int:
        """Returns the number of the phase that began last, -1 before the first."""
        return bisect_right(self.starts, time) - 1

    def at(self, time: float) -> str:
        """Returns the name of the phase, empty between two phases."""
        number = self.number_at(time)
        return self.intervals[number].part if number >= 0 and time <= self.intervals[number].end else ""


def break_down(events: Sequence[Event]) -> dict[str, Any]:
    """Returns what a step of one rank took: mean milliseconds of each part, which add up to step_ms."""
    spans = [event for event in events if event.get("ph") == "X"]
    named = [event for event in spans if event.get("cat") == "user_annotation"]
    phases = Phases(events)
    steps = sorted((event["ts"], event["ts"] + event["dur"]) for event in named if event["name"].startswith(STEP))
    window = Interval(steps[0][0], steps[-1][1], "")
    kernels = [event for event in spans if event.get("cat") in ON_DEVICE]
    threads, launches = _threads(spans, phases)
    if kernels:
        layers = _device_layers(kernels, launches)
        messages, message_ends = layers[1], list[float]()
    else:
        layers = [threads[next(event["tid"] for event in named if event["name"].startswith(RANGE))]]
        messages = _intervals(event for event in named if event["name"].startswith(UNDER_WAY))
        message_ends = sorted(message.end for message in messages)
    waits = _intervals(span for span in spans if SYNCHRONIZE.match(span["name"]) and span["ts"] < window.end)
    wait_ends = sorted(wait.end for wait in waits)
    covered = _layered(layers, window)
    idle = [part for gap in _outside([window], covered) for part in _idle(gap, phases, message_ends, wait_ends)]
    totals: dict[str, float] = defaultdict(float)
    for start, end, part in (*covered, *idle):
        totals[part] += end - start
    under_way = sum(end - start for start, end, _ in _layered([messages], window))
    per_step = 1 / (1000 * len(steps))  # milliseconds
    return {
        "step_ms": (window.end - window.start) * per_step,
        "parts": {part: totals[part] * per_step for part in PARTS if totals[part]},
        "hidden_ms": max(0.0, under_way - sum(totals[part] for part in SENT)) * per_step,
        "launches": round(len(kernels or [span for span in spans if span.get("cat") == "cpu_op"]) / len(steps)),
        "waits": round(sum(phases.at(wait.start) != "reduce" for wait in waits) / len(steps), 1),
    }


def _threads(spans: Iterable[Event], phases: Phases) -> tuple[dict[Any, list[Interval]], dict[Any, str]]:
    """Returns what each thread did, the innermost operation at any time, and the part that each kernel was launched for."""
    by_thread: dict[Any, list[Event]] = defaultdict(list)
    for event in spans:
        if event.get("cat") in ON_THREAD and not event["name"].startswith((RANGE, STEP, *UNDER_WAY)):
            by_thread[event["tid"]].append(event)
    launches: dict[Any, str] = {}
    threads = {thread: list(_innermost(members, phases, launches)) for thread, members in by_thread.items()}
    return threads, launches


def _innermost(events: Iterable[Event], phases: Phases, launches: dict[Any, str]) -> Iterator[Interval]:
    """Yields one thread's operations without those in them; adds the part of each launch, by its correlation, to launches."""
    stack: list[tuple[float, str, str]] = []  # end, part for what is within, part of its own time
    done = 0.0  # up to here all has been yielded
    for event in [*sorted(events, key=lambda event: (event["ts"], -event["dur"])), None]:
        start = event["ts"] if event else float("inf")
        while stack and stack[-1][0] <= start:
            end, _, own = stack.pop()
            if end > done:
                yield Interval(done, end, own)
                done = end
        if event is None:
            return
        phase = phases.at(start)
        part = _part_of(event["name"], stack[-1][1] if stack else PHASE_PARTS.get(phase, "elementwise"), phase)
        if stack and start > done:
            yield Interval(done, start, stack[-1][2])
        done = max(done, start)
        stack.append((start + event["dur"], part, "host" if AROUND_OPERATIONS.match(event["name"]) else part))
        if "correlation" in event.get("args", {}):
            launches[event["args"]["correlation"]] = part


@lru_cache(maxsize=1 << 14)
def _part_of(name: str, parent: str, phase: str) -> str:
    """Returns the part that an operation or a kernel belongs to. parent: of the operation around it."""
    if MESSAGE.match(name):
        return SENT[phase == "update"]
    if parent in INHERITED or parent in SENT:
        return parent
    return next((part for part, pattern in OPERATIONS if pattern.search(name)), parent)


def _device_layers(kernels: Iterable[Event], launches: Mapping[Any, str]) -> list[list[Interval]]:
    """Returns the intervals of kernels, of collectives and of copies to the device: each counts where no earlier one runs."""
    layers: list[list[Interval]] = [[], [], []]
    for event in kernels:
        name, launched = event["name"], launches.get(event["args"].get("correlation"), "elementwise")
        is_message = bool(MESSAGE.match(name))
        if is_message:
            part = launched if launched in SENT else SENT[0]
        else:
            part = _part_of(name, launched, "")
        layer = 1 if is_message else 2 if part == "data" else 0
        layers[layer].append(Interval(event["ts"], event["ts"] + event["dur"], part))
    return layers


def _intervals(events: Iterable[Event]) -> list[Interval]:
    return [Interval(event["ts"], event["ts"] + event["dur"], "") for event in events]


def _layered(layers: Sequence[Iterable[Interval]], window: Interval) -> list[Interval]:
    """Returns disjoint intervals in order: where some overlap, the earlier layer's, and within a layer the one that began first."""
    covered: list[Interval] = []
    for layer in layers:
        disjoint, end = [], window.start
        for interval in sorted(layer):
            start, stop = max(interval.start, end), min(interval.end, window.end)
            if stop > start:
                disjoint.append(Interval(start, stop, interval.part))
                end = stop
        covered = sorted([*covered, *_outside(disjoint, covered)])
    return covered


def _outside(intervals: Sequence[Interval], holes: Sequence[Interval]) -> Iterator[Interval]:
    """Yields what of the intervals lies in no hole; both are disjoint and in order."""
    number = 0
    for start, end, part in intervals:
        while number < len(holes) and holes[number].end <= start:
            number += 1
        following = number
        while following < len(holes) and holes[following].start < end:
            if holes[following].start > start:
                yield Interval(start, holes[following].start, part)
            start = max(start, holes[following].end)
            following += 1
        if start < end:
            yield Interval(start, end, part)


def _idle(
    gap: Interval, phases: Phases, message_ends: Sequence[float], wait_ends: Sequence[float]
) -> Iterator[Interval]:
    """Yields why nothing ran in a gap: for a wait that has ended in it, or for what the host was doing. Ends are in order."""
    first, last = phases.number_at(gap.start) + 1, phases.number_at(gap.end) + 1
    for start, end in pairwise([gap.start, *phases.starts[first:last], gap.end]):
        phase, part = phases.at(start), "host"
        if bisect_right(message_ends, end) > bisect_left(message_ends, start):
            part = SENT[phase == "update"]
        elif phase == "load":
            part = "data"
        elif bisect_right(wait_ends, end) > bisect_left(wait_ends, start):
            part = "synchronizing"
        yield Interval(start, end, part)


def memory_by_kind(events: Sequence[Event]) -> dict[str, dict[str, int]]:
    """Returns the bytes of one step that come and go, by kind, at the fullest moment of forward, backward and update.

    What a forward makes for the backward is activations, what a backward leaves is gradients; the remainder lives for an operation.
    """
    phases = Phases(events)
    ordered = sorted((event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"])
    device = max((event["args"]["Device Type"] for event in ordered), default=0)  # 0 is the CPU, 1 CUDA
    changes: list[tuple[float, str, int]] = []
    alive: dict[int, tuple[float, int]] = {}

    def add(start: float, end: float, size: int) -> None:
        made, freed = phases.number_at(start), phases.number_at(end)
        phase = phases.at(start)
        kinds = {"load": "activations", "forward": "activations", "backward": "gradients"}
        kind = kinds.get(phase, "rest") if freed > made else "rest"
        changes.extend([(start, kind, size), (end, kind, -size)])

    for event in ordered:
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        if event["args"]["Device Type"] != device or not phases.at(event["ts"]):
            continue
        if size > 0:
            alive[address] = event["ts"], size
        elif address in alive:
            start, size = alive.pop(address)
            add(start, event["ts"], size)
    for start, size in alive.values():
        add(start, float("inf"), size)
    level = {"activations": 0, "gradients": 0, "rest": 0}
    peaks = {phase: dict(level) for phase in dict.fromkeys(MEMORY_PHASES.values())}
    for time, kind, size in sorted(changes):
        level[kind] += size
        phase = MEMORY_PHASES.get(phases.at(time), "")
        if phase and sum(level.values()) > sum(peaks[phase].values()):
            peaks[phase] = dict(level)
    return peaks
