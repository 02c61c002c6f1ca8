"""
Checkpoints: saved in the background while training continues, loaded on any number of ranks.

Each rank passes the pieces that it owns. The copy is taken before `save` returns, and a thread writes it (publish.py) without a
collective, so a save cannot disturb those of the training. Keys are logical and do not depend on ranks: two ranks may save what
three load. The files of a checkpoint and their hashes: manifest.py. This module does not depend on what the tensors are for, or on
what the numbers in `state` mean.
"""

import json
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

import paceline
from paceline.errors import PacelineError, nearest
from paceline.file_systems import free_space
from paceline.model.manifest import UnreadableCheckpoint, check_shapes, num_rows, read_manifest, step_folders, step_of
from paceline.model.publish import (
    NoSpace,
    PendingSave,
    RawTensor,
    explained,
    give_up,
    prune,
    publish,
    shard_name,
    write_part,
)
from paceline.plan.shapes import ParamShape
from paceline.rundir import RunDir, open_file, resume_command

LOOK_S = 2.0  # between looks at the free space after a save that found none
# until the next save where the disk showed room and refused, as with a quota; doubled by each further failure
RETRY_S, LONGEST_RETRY_S = 2.0, 300.0

DTYPE_CODES = {  # torch -> safetensors
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Piece:
    """Rows [lo, hi) of the tensor `key`, whose full shape is `shape`; a scalar has the one row (0, 1) and shape ()."""

    key: str
    shape: tuple[int, ...]
    rows: tuple[int, int]
    tensor: Tensor

    @property
    def name(self) -> str:
        """Returns the tensor's name in its file."""
        lo, hi = self.rows
        return self.key if (lo, hi) == (0, num_rows(self.shape)) else f"{self.key}[{lo}:{hi}]"


@dataclass(eq=False)
class CheckpointWriter:
    """Writes this rank's part of each checkpoint; rank 0 also completes it, and removes old ones.

    attempt: equal on all ranks and never used before in this run, so that the files of a killed attempt at the same step are never
    taken for this attempt's. on_saved is called on rank 0, from the thread: the step of a checkpoint that is on disk, the seconds
    since the call of `save`, the bytes. Call `wait` before the process ends: the thread does not keep it alive, and an interrupted
    save leaves only files that `clean_leftovers` removes.

    on_no_space: called from the thread of any rank that meets a full disk; `save` and `wait` then raise nothing.
    Earlier checkpoints stay and the training continues; `has_space_again` on that rank reports when a save may succeed.
    whole_bytes: of a checkpoint, over all ranks.
    """

    directory: Path
    _: KW_ONLY
    rank: int
    world_size: int
    attempt: str
    keep_last: int
    on_saved: Callable[[int, float, int], None]
    deadline_s: float = 600.0
    on_no_space: Callable[[NoSpace], None] | None = None
    whole_bytes: int | None = None

    def __post_init__(self) -> None:
        assert self.keep_last >= 1, self.keep_last
        self.no_space: NoSpace | None = None  # the error of the last save
        self._retry_s, self._retry_at, self._look_at = RETRY_S, 0.0, 0.0
        self._num_saves = 0
        self._copies: dict[str, Tensor] = {}  # reused by the next save: fresh memory costs more than the copying
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self, step: int, pieces: Sequence[Piece], state: Mapping[str, Any], *, val_bpb: float | None = None
    ) -> None:
        """Waits for the previous save to end, copies the pieces and starts to write them.

        All ranks call it for the same steps in the same order; no rank waits for another. state: plain JSON values; rank 0's
        are saved. Raises the error of the previous save. Saving a step again replaces it.
        """
        self.wait()
        began = time.monotonic()
        self._num_saves += 1
        save = PendingSave(
            directory=self.directory,
            step=step,
            rank=self.rank,
            world_size=self.world_size,
            attempt=f"{self.attempt}-{self._num_saves}",  # a step saved again after a failure is another attempt
            tensors=self._copy(pieces),
            entries=_entries(pieces, file=shard_name(self.rank, self.world_size)),
            whole_bytes=self.whole_bytes,
        )
        state = json.loads(json.dumps(state, allow_nan=False))  # as it is now
        arguments = (save, state, val_bpb, began)
        self._thread = threading.Thread(target=self._run, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Waits until the save under way has ended; raises its error."""
        if self._thread:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error:
            raise error

    def has_space_again(self) -> bool:
        """Returns whether the last save found no space on this host's disk and now there is some.

        Cheap enough to call in every step. What a rank of another host lacks, that rank alone can see.
        """
        error, now = self.no_space, time.monotonic()
        if error is None or error.host is not None or now < self._look_at:
            return False
        self._look_at = now + LOOK_S
        if self._thread is not None and self._thread.is_alive():
            return False
        showed_room = error.free_bytes is not None and error.free_bytes >= error.needed_bytes
        if showed_room and now < self._retry_at:
            return False
        return (free_space(self.directory) or 0) >= error.needed_bytes

    @torch.no_grad()
    def _copy(self, pieces: Sequence[Piece]) -> list[RawTensor]:
        """Copies the pieces to CPU memory, (...) in their dtypes; skips those without rows."""
        copies: dict[str, Tensor] = {}
        for piece in pieces:
            lo, hi = piece.rows
            source = piece.tensor
            assert source.shape == ((hi - lo, *piece.shape[1:]) if piece.shape else ()), (piece.name, source.shape)
            assert piece.name not in copies, f"{piece.name} twice on rank {self.rank}"
            if lo == hi:
                continue
            copy = self._copies.get(piece.name)
            if copy is None or (copy.shape, copy.dtype) != (source.shape, source.dtype):
                copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            copies[piece.name] = copy.copy_(source, non_blocking=True)
        for device in {piece.tensor.device for piece in pieces if piece.tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()  # the next step overwrites what is being copied
        self._copies = copies
        # wide dtypes first: every tensor then starts on a multiple of its element size
        wide_first = sorted(copies.items(), key=lambda item: -item[1].element_size())
        return [
            RawTensor(name, DTYPE_CODES[copy.dtype], tuple(copy.shape), copy.reshape(-1).view(torch.uint8).numpy().data)
            for name, copy in wide_first
        ]

    def _run(self, save: PendingSave, state: Mapping[str, Any], val_bpb: float | None, began: float) -> None:
        try:
            write_part(save)
            if self.rank == 0:
                versions = {"paceline": paceline.__version__, "torch": torch.__version__}
                num_bytes = publish(save, state=state, val_bpb=val_bpb, versions=versions, deadline_s=self.deadline_s)
                prune(self.directory, step=save.step, keep_last=self.keep_last)
                self.on_saved(save.step, time.monotonic() - began, num_bytes)
            self.no_space, self._retry_s = None, RETRY_S
        except BaseException as error:
            give_up(save, error)
            if isinstance(error, OSError):
                explanation = explained(error, save)
                explanation.__cause__ = error
                error = explanation
            if self.on_no_space is None or not isinstance(error, NoSpace):
                self._error = error  # for the next call to raise
                return
            self._retry_s = RETRY_S if self.no_space is None else min(2 * self._retry_s, LONGEST_RETRY_S)
            self._retry_at = time.monotonic() + self._retry_s
            self.no_space = error
            self.on_no_space(error)


class NonFiniteWeights(PacelineError):
    """A checkpoint is intact, but its weights or its optimizer states hold NaN or infinity. The fix is for who resumes."""

    def __init__(self, path: Path, key: str):
        kind, _, name = key.partition(".")
        what = "weights" if kind == "model" else "optimizer states"
        text = f"the {what} of checkpoint {path.name} hold NaN or infinity, first in {name}"
        super().__init__(text, fix=resume_before(path))
        self.record = {"cause": "loss-nan"}  # for the rank's error file


def resume_before(path: Path) -> str:
    """Returns the fix that continues a run from the checkpoint before `path`, or from its start."""
    earlier = next((step_of(other) for other in step_folders(path.parent) if step_of(other) < step_of(path)), None)
    command, place = resume_command(RunDir(path.parent.parent)), "the start" if earlier is None else f"step {earlier:,}"
    move = shlex.join(["mv", str(path), f"{path}.nan"])
    command = f"{move} && {command}" if earlier is None else f"{command} --step {earlier}"
    return f"{command}: goes on from {place}, with a lower --matrix-lr or --embedding-lr if NaN comes again"


class CheckpointReader:
    """Reads a checkpoint's tensors by key and rows, whichever ranks saved them, and only the requested rows from disk."""

    def __init__(self, path: Path):
        """Opens the folder without verifying it: `newest_good` does that, on one rank."""
        self.path, self._manifest = path, (manifest := read_manifest(path))
        self.step, self.world_size = manifest.step, manifest.world_size  # done at the save; the ranks that saved it
        self.val_bpb, self.state = manifest.val_bpb, manifest.state
        self._open_files: dict[str, Any] = {}

    def keys(self) -> list[str]:
        """Returns the keys of all tensors."""
        return list(self._manifest.tensors)

    def check_model(self, shapes: Iterable[ParamShape]) -> None:
        """Raises PacelineError where the checkpoint is not of a model with just these parameters."""
        fix = "give the run its own config.toml and checkpoints back: one of them was changed by hand"
        check_shapes(self.path, self._manifest, shapes, fix=fix)

    def read(self, key: str, lo: int = 0, hi: int | None = None) -> Tensor:
        """Returns rows [lo, hi), or from lo on, on the CPU, in the dtype that was saved; a scalar's one row has shape ().

        Raises NonFiniteWeights for NaN and infinity in a parameter of the model or a state of its optimizer.
        """
        entry = self._manifest.tensors.get(key)
        if entry is None:
            near = nearest(key, self.keys())
            raise PacelineError(
                f"checkpoint {self.path} has no tensor {key}" + (f"; the nearest is {near}" if near else ""),
                fix="use the configuration it was saved with: config.toml of its run",
            )
        hi = num_rows(entry.shape) if hi is None else hi
        assert 0 <= lo <= hi <= num_rows(entry.shape), f"rows {lo} to {hi} of {key} {entry.shape}"
        rows = torch.empty((hi - lo, *entry.shape[1:]), dtype=getattr(torch, entry.dtype))
        for part in entry.parts:
            first, last = max(lo, part.rows[0]), min(hi, part.rows[1])
            if first < last and entry.shape:
                stored = self._file(part.file).get_slice(part.name)
                rows[first - lo : last - lo] = stored[first - part.rows[0] : last - part.rows[0]]
            elif first < last:
                rows[0] = self._file(part.file).get_tensor(part.name)
        if key.startswith(("model.", "optim.")) and not rows.isfinite().all():
            raise NonFiniteWeights(self.path, key)
        return rows if entry.shape else rows[0]

    def load_model_state(self) -> dict[str, Tensor]:
        """Returns the model's parameters by their names in the module, fp32."""
        keys = [key for key in self.keys() if key.startswith("model.")]
        return {key.removeprefix("model."): self.read(key).float() for key in keys}

    def _file(self, name: str) -> Any:
        if name not in self._open_files:
            try:
                open_file(self.path / name).close()  # its error tells more than that of safetensors
                self._open_files[name] = safe_open(self.path / name, framework="pt")
            except OSError as error:
                raise UnreadableCheckpoint(self.path / name, error) from error
            except SafetensorError as error:
                raise PacelineError(
                    f"checkpoint {self.path} cannot be read ({name}: {error})",
                    fix=f"{resume_command(RunDir(self.path.parent.parent))} goes on from the newest one that is whole",
                ) from error
        return self._open_files[name]


def _entries(pieces: Sequence[Piece], *, file: str) -> dict[str, dict[str, Any]]:
    """Returns this rank's parts of each key as the manifest lists them, none where it holds no row."""
    entries: dict[str, dict[str, Any]] = {}
    for piece in pieces:
        dtype = str(piece.tensor.dtype).removeprefix("torch.")
        entry = entries.setdefault(piece.key, {"shape": list(piece.shape), "dtype": dtype, "parts": []})
        assert (entry["shape"], entry["dtype"]) == (list(piece.shape), dtype), piece.key
        if piece.rows[0] < piece.rows[1]:
            entry["parts"].append({"file": file, "name": piece.name, "rows": piece.rows})
    return entries
