"""
Streams and events of a card that is not there, and what follows from them: which copies run beside which work, and races.

Each operation has a place in its stream's order; an event carries how far its stream was, and who waits for it is behind that
(vector clocks). Two accesses to the same bytes from two streams, one of them a write, must be ordered by such waits: otherwise a
real card may do them in any order. Memory counts as written by the stream that allocates it, and is the allocator's again, for work
on that stream, as soon as the tensor dies. What the CPU itself reads and writes is a stream too.
"""

import tempfile
import types
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from gpu_proof.recorder import Recorder
from gpu_proof.walk import make_loop, prepare, process_group
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from paceline.config import Config
from paceline.plan import offloading
from paceline.plan.gpu_table import find_gpu
from paceline.plan.machine import imagined_machine
from paceline.plan.memory import fullest_state
from paceline.plan.planner import make_plan, memory_setup
from paceline.rundir import RunDir
from paceline.train import offload, optim, update_batches
from paceline.train.exact import attention_kernel

SMALL = {
    "depth": 2,
    "n_embd": 128,
    "sequence_len": 128,
    "window_pattern": "L",
    "device_batch_size": 2,
    "total_batch_size": 512,
    "vocab_size": 2048,
    "num_steps": 10,
    "compile": False,
    "offload": "optimizer",
}
SMALL_BATCH_BYTES = 3 * 4 * 128 * 256  # of rows: a table is several batches, more than there are buffers
SOURCE = Path(offload.__file__).read_text()
FETCH = "        if at < last:\n            self._fetch(at + 1)\n"
WAIT = "        compute = self._backend.current_stream()\n        compute.wait_event(self._arrived.pop(at))\n"
# faults: what stands in train/offload.py, and what stands there instead
FAULTS = {
    "a blocking copy": ("staged.copy_(tensor, non_blocking=True)", "staged.copy_(tensor)"),
    "memory that is not locked": ("        page_lock(flat)", "        pass"),
    "a buffer used again too early": (
        "self._to_device.wait_event(self._sent[at - NUM_BUFFERS])",
        "self._sent[at - NUM_BUFFERS]",
    ),
    "an update before its tensors are there": ("compute.wait_event(self._arrived.pop(at))", "self._arrived.pop(at)"),
    "sent back before the update": (
        "self._to_host.wait_event(self._record(self._backend.current_stream()))",
        "self._record(self._backend.current_stream())",
    ),
    "buffers that others still use": ("self._to_device.wait_stream(self._backend.current_stream())", "pass"),
    "buffers freed too early": ("compute.wait_event(self._sent[last])", "pass"),
    "a checkpoint that waits for nothing": ("            event.synchronize()", "            pass"),
    "fetched behind the update": (
        f"{FETCH}{WAIT}        yield self._staged[at]\n",
        f"{WAIT}        yield self._staged[at]\n{FETCH}",
    ),
    "states that stay on the card": (
        "zip(self._batches[at].tensors, self._staged.pop(at), strict=True)",
        "zip(self._batches[at].tensors[:1], self._staged.pop(at), strict=False)",
    ),
    "all on one stream": (
        "self._backend.Stream(), self._backend.Stream()",
        "self._backend.current_stream(), self._backend.current_stream()",
    ),
}


class Stream:
    """clock: how much of each stream is done before what this one does next."""

    names = iter(())
    current: "Stream"
    cpu: "Stream"

    def __init__(self, *args: Any, name: str | None = None, **options: Any) -> None:
        self.name = name or next(Stream.names)
        self.clock: dict[str, int] = {}

    def wait_event(self, event: "Event") -> None:
        self.join(event.clock)

    def wait_stream(self, stream: "Stream") -> None:
        self.join(stream.clock)

    def join(self, clock: dict[str, int]) -> None:
        for name, at in clock.items():
            self.clock[name] = max(at, self.clock.get(name, 0))

    def tick(self) -> int:
        self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return self.clock[self.name]


class Event:
    def __init__(self, *, enable_timing: bool = False) -> None:
        self.clock: dict[str, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict((stream or Stream.current).clock)

    def synchronize(self) -> None:
        Stream.cpu.join(self.clock)

    def elapsed_time(self, end: "Event") -> float:
        return 1.0


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    before, Stream.current = Stream.current, stream
    try:
        yield
    finally:
        Stream.current = before


class StreamRecorder(Recorder):
    """Sees every op with its stream. locked: storages whose pages are locked."""

    def __init__(self, locked: set[int]) -> None:
        super().__init__()
        self.locked, self.races = locked, set[str]()
        self.home: set[int] = set()  # the host's memory of masters and states
        self.moves: list[tuple[str, int, bool, bool, str]] = []  # direction, bytes, without waiting, locked, stream
        self._accesses: dict[
            int, dict[tuple[int, int, bool, str], int]
        ] = {}  # storage -> (from, to, writes, stream) -> place

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if name in ("_local_scalar_dense", "item"):
            Stream.cpu.join(Stream.current.clock)
            return out
        if getattr(func, "is_view", False) or name in ("detach", "_unsafe_view", "alias"):
            return out
        arguments = [*args, *(kwargs or {}).values()]
        schema = [argument for argument in func._schema.arguments if not argument.kwarg_only][: len(args)]
        writes = [bool(argument.alias_info and argument.alias_info.is_write) for argument in schema]
        written = [leaf for value, write in zip(args, writes, strict=False) if write for leaf in tensors_of(value)]
        inputs, outputs = tensors_of(arguments), tensors_of(out)
        devices = {tensor.device.type for tensor in inputs + outputs}
        stream = Stream.current if "cuda" in devices else Stream.cpu
        if stream is not Stream.cpu:
            stream.join(Stream.cpu.clock)  # the CPU has launched it
        place = stream.tick()
        known = {id(tensor) for tensor in inputs}
        for tensor in inputs:
            self._access(tensor, stream, place, write=any(tensor is other for other in written))
        for tensor in outputs:
            if id(tensor) not in known:
                self._access(tensor, stream, place, write=True)
        if name == "copy_" and len(devices) == 2:
            self._note_move(args[0], args[1], stream, without_waiting=len(args) > 2 and bool(args[2]))
        return out

    def _note_move(self, target: Tensor, source: Tensor, stream: Stream, *, without_waiting: bool) -> None:
        to_card = target.device.type == "cuda"
        on_host = source if to_card else target
        locked = on_host.untyped_storage()._cdata in self.locked
        if on_host.untyped_storage()._cdata in self.home:
            self.moves.append(("in" if to_card else "out", on_host.nbytes, without_waiting, locked, stream.name))
        if not without_waiting:
            Stream.cpu.join(stream.clock)

    def _access(self, tensor: Tensor, stream: Stream, place: int, *, write: bool) -> None:
        storage = tensor.untyped_storage()
        key, start = storage._cdata, tensor.storage_offset() * tensor.itemsize
        end = start + tensor.nbytes
        if key not in self._accesses:
            self._accesses[key] = {}
            weakref.finalize(storage, self._freed, key, stream, on_card=tensor.device.type == "cuda")
        accesses = self._accesses[key]
        for (other_start, other_end, other_write, name), at in accesses.items():
            apart = other_end <= start or end <= other_start
            if name != stream.name and (write or other_write) and not apart and stream.clock.get(name, 0) < at:
                kind = f"{'write' if write else 'read'} on {stream.name} beside {'write' if other_write else 'read'} on {name}"
                self.races.add(kind)
        accesses[start, end, write, stream.name] = place

    def _freed(self, key: int, owner: Stream, *, on_card: bool) -> None:
        for (_, _, _, name), at in self._accesses.pop(key).items():
            if on_card and name not in (owner.name, "cpu") and owner.clock.get(name, 0) < at:
                self.races.add(f"freed on {owner.name} beside work on {name}")


def tensors_of(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def variant(fault: str | None, locked: set[int]) -> types.ModuleType:
    """Returns train/offload.py, with the fault."""
    old, new = FAULTS[fault] if fault else ("", "")
    assert not fault or SOURCE.count(old) == 1, f"{fault}: {SOURCE.count(old)} places have it"
    module = types.ModuleType("offload_variant")
    exec(compile(SOURCE.replace(old, new) if fault else SOURCE, offload.__file__, "exec"), vars(module))
    module.page_lock = lambda tensor: locked.add(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]
    return module


def walk(*, fault: str | None = None, gpus: int = 1, steps: int = 2, **keys: Any) -> dict[str, Any]:
    """Returns the moves, the order of batches and the races of a rank's steps and of a checkpoint after them."""
    config = Config(**{**SMALL, **keys})
    plan = make_plan(config, imagined_machine(find_gpu("RTX 5090"), gpus=gpus, hosts=1), vocab_size=2048, num_rows=1000)
    setup, locked = memory_setup(plan), set[int]()
    Stream.names = iter(["to device", "to host"])
    Stream.current, Stream.cpu = Stream(name="compute"), Stream(name="cpu")
    facts: dict[str, Any] = {"error": None, "planned_bytes": fullest_state(setup).on_host, "steps": steps}
    module, order = variant(fault, locked), []
    update_types = (update_batches.RowBatch, update_batches.MatrixBatch)
    try:
        with ExitStack() as stack:
            streams = {
                "Stream": Stream,
                "Event": Event,
                "stream": on_stream,
                "current_stream": lambda *_: Stream.current,
            }
            for name, stand_in in streams.items():
                stack.enter_context(patch.object(torch.cuda, name, stand_in))
            for name in ("HostMemory", "Staging"):
                stack.enter_context(patch.object(optim, name, getattr(module, name)))
            stack.enter_context(patch.object(offloading, "ROW_BATCH_BYTES", SMALL_BATCH_BYTES))
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            stack.enter_context(process_group(0, gpus))
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(attention_kernel("flash"))
            recorder = StreamRecorder(locked)
            with recorder:
                loop = make_loop(plan, RunDir(Path(folder)), 0)
                batches = loop.optimizer._staging._batches  # type: ignore[union-attr]
                recorder.home = {tensor.untyped_storage()._cdata for batch in batches for tensor in batch.tensors}
                for kind in update_types:
                    stack.enter_context(patch.object(kind, "update", noted(kind.update, batches, recorder, order)))
                for step in range(steps):
                    loop.one_step(step)
                moves = list(recorder.moves)
                copies = [piece.tensor.clone() for piece in loop.optimizer.pieces()]
            facts |= {"num_batches": len(batches), "moves": moves, "order": order, "races": sorted(recorder.races)}
            facts["saved"] = len(copies)
    except Exception as error:
        facts["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
    return facts


def noted(update: Any, batches: list[Any], recorder: StreamRecorder, order: list[Any]) -> Any:
    """Returns `update` with a record: the batch, its bytes, and how many bytes were on their way to the card when it began."""

    def update_and_note(self: Any, *args: Any) -> None:
        fetched = sum(size for direction, size, *_ in recorder.moves if direction == "in")
        number = next((at for at, batch in enumerate(batches) if batch is self), None)
        if number is not None:  # replicated tensors never leave the card
            order.append([number, sum(tensor.nbytes for tensor in self.tensors), fetched])
        update(self, *args)

    return update_and_note


def main(*walks: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the facts of each walk. walks: the arguments of `walk`."""
    prepare()
    return [walk(**settings) for settings in walks]
