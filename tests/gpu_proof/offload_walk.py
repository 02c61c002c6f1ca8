"""
Steps of a rank whose masters and states are in the host's memory: what is copied when, on which stream, and races.

A version of train/offload.py with a fault is made from its text.
"""

import tempfile
import types
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from gpu_proof.recorder import Recorder
from gpu_proof.streams import TIMELINE, device_of, storage_of
from gpu_proof.walk import make_loop, prepare, process_group
from torch._subclasses.fake_tensor import FakeTensorMode

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


class MoveRecorder(Recorder):
    """Sees every copy between the card and the masters and states in the host's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.home: set[int] = set()  # their storages
        self.moves: list[tuple[str, int, bool, bool, str]] = []  # direction, bytes, without waiting, locked, stream

    def note_copy(self, name: str, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Records a copy with its stream, where the host's side is masters or states."""
        super().note_copy(name, args, kwargs, out)
        if name != "copy_" or device_of(args[0]) == device_of(args[1]):
            return
        to_card = device_of(args[0]) == "cuda"
        on_host = args[1] if to_card else args[0]
        if storage_of(on_host) in self.home:
            locked, no_wait = storage_of(on_host) in TIMELINE.pinned, len(args) > 2 and bool(args[2])
            self.moves.append(("in" if to_card else "out", on_host.nbytes, no_wait, locked, TIMELINE.current))


def variant(fault: str | None) -> types.ModuleType:
    """Returns train/offload.py, with the fault."""
    old, new = FAULTS[fault] if fault else ("", "")
    assert not fault or SOURCE.count(old) == 1, f"{fault}: {SOURCE.count(old)} places have it"
    module = types.ModuleType("offload_variant")
    exec(compile(SOURCE.replace(old, new) if fault else SOURCE, offload.__file__, "exec"), vars(module))
    module.page_lock = TIMELINE.pin  # type: ignore[attr-defined]
    return module


def walk(*, fault: str | None = None, gpus: int = 1, steps: int = 2, **keys: Any) -> dict[str, Any]:
    """Returns the moves, the order of batches and the races of a rank's steps and of a checkpoint after them."""
    config = Config(**{**SMALL, **keys})
    plan = make_plan(config, imagined_machine(find_gpu("RTX 5090"), gpus=gpus, hosts=1), vocab_size=2048, num_rows=1000)
    TIMELINE.clear()
    facts: dict[str, Any] = {"error": None, "steps": steps}
    facts["planned_bytes"] = fullest_state(memory_setup(plan)).on_host
    module, order, recorder = variant(fault), [], MoveRecorder()
    update_types = (update_batches.RowBatch, update_batches.MatrixBatch)
    try:
        with ExitStack() as stack:
            for name in ("HostMemory", "Staging"):
                stack.enter_context(patch.object(optim, name, getattr(module, name)))
            stack.enter_context(patch.object(offloading, "ROW_BATCH_BYTES", SMALL_BATCH_BYTES))
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            stack.enter_context(process_group(0, gpus))
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(attention_kernel("flash"))
            with recorder.recording():
                loop = make_loop(plan, RunDir(Path(folder)), 0)
                batches = loop.optimizer._staging._batches  # type: ignore[union-attr]
                recorder.home = {storage_of(tensor) for batch in batches for tensor in batch.tensors}
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


def noted(update: Any, batches: list[Any], recorder: MoveRecorder, order: list[Any]) -> Any:
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
