"""
The way of a save to the disk: each rank writes its part, then rank 0 the manifest, and renames the folder.

Ranks meet through files alone: each writes its safetensors file and, when that is synced, a small JSON file with the same name into
a folder with a hidden name. A kill at any moment leaves earlier checkpoints, and a hidden folder that `clean_leftovers` removes.

safetensors' own writer takes everything in one call. `write_shard` writes in bounded chunks and hashes each, so that a save neither
reads its file back nor holds the interpreter for long. The format: https://github.com/huggingface/safetensors#format.
"""

import errno
import hashlib
import json
import mmap
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.file_systems import free_space
from paceline.model.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    TensorEntry,
    best_checkpoint,
    discard,
    encode_manifest,
    list_checkpoints,
    read_manifest,
    step_folder_name,
    step_folders,
    tensor_entry,
)
from paceline.rundir import NO_SPACE, RunDir, resume_command, unwritable_file, utc_now, write_atomic
from paceline.units import format_bytes

CHUNK_BYTES = 4 << 20  # hashing and writing release the interpreter once per chunk
POLL_S = 0.02
GIVEN_UP = "given_up"  # rank 0 leaves it in the hidden folder: a rank that finishes later then removes its own files


@dataclass(frozen=True)
class RawTensor:
    """A tensor as safetensors stores it: code such as 'F32', contiguous little-endian bytes."""

    name: str
    code: str
    shape: tuple[int, ...]
    data: memoryview


class NoSpace(PacelineError):
    """The disk or the quota is full: the training can continue, and a later save may find space."""

    def __init__(
        self, message: str, *, fix: str, step: int, needed_bytes: int, free_bytes: int | None, host: str | None = None
    ):
        super().__init__(message, fix=fix)
        self.record = {"cause": "disk-full"}  # for the rank's error file
        self.host = host  # whose disk is full, if it is not this one's
        # needed: of the whole checkpoint; free: after giving up
        self.step, self.needed_bytes, self.free_bytes = step, needed_bytes, free_bytes


@dataclass(frozen=True)
class PendingSave:
    """One rank's part of one save."""

    directory: Path  # checkpoints/ of the run
    step: int
    rank: int
    world_size: int
    attempt: str  # equal on all ranks, and different from that of any earlier save of this step
    tensors: Sequence[RawTensor]
    entries: Mapping[str, dict[str, Any]]  # key -> shape, dtype, parts of this rank
    whole_bytes: int | None = None  # of all ranks' tensors together, where that is known

    @property
    def folder(self) -> Path:
        """Returns the hidden folder, which is renamed when the checkpoint is complete."""
        return self.directory / f".{step_folder_name(self.step)}.{self.attempt}.tmp"

    @property
    def file(self) -> Path:
        """Returns this rank's safetensors file."""
        return self.folder / shard_name(self.rank, self.world_size)

    @property
    def resume(self) -> str:
        """Returns the command that continues its run."""
        return resume_command(RunDir(self.directory.parent))


def shard_name(rank: int, world_size: int) -> str:
    """Returns the name of a rank's file."""
    return f"shard_{rank:05d}_of_{world_size:05d}.safetensors"


def write_part(save: PendingSave) -> None:
    """Writes this rank's file, then the JSON that marks it as whole. A rank that owns nothing writes the JSON alone."""
    save.directory.mkdir(exist_ok=True)  # a run folder that has vanished is not made again
    save.folder.mkdir(exist_ok=True)
    # rank 0 did not wait, and removes all parts: no useless file may stay on a full disk
    given_up = save.folder / GIVEN_UP
    try:
        files = {save.file.name: asdict(write_shard(save.file, save.tensors))} if save.tensors else {}
        write_atomic(save.file.with_suffix(".json"), json.dumps({"files": files, "tensors": save.entries}))
    except FileNotFoundError:  # rank 0 removed a file before this rank could give it its name
        if not given_up.exists():
            raise
    if given_up.exists():
        remove_part(save)


def write_shard(path: Path, tensors: Sequence[RawTensor]) -> FileEntry:
    """Writes and syncs a safetensors file; raises OSError where the disk refuses."""
    digest, num_bytes = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file:
        for block in (memoryview(_header(tensors)), *(tensor.data for tensor in tensors)):
            for start in range(0, len(block), CHUNK_BYTES):
                chunk = block[start : start + CHUNK_BYTES]
                digest.update(chunk)
                num_bytes += len(chunk)
                while chunk:  # an unbuffered write may take less than its argument
                    chunk = chunk[file.write(chunk) :]
        os.fsync(file.fileno())
    return FileEntry(num_bytes, digest.hexdigest())


def read_shard(path: Path) -> list[RawTensor]:
    """Returns the tensors of a safetensors file, whose bytes are read from the disk when they are used."""
    with path.open("rb") as file:
        content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(bytes(content[8:start]))
    return [
        RawTensor(name, entry["dtype"], tuple(entry["shape"]), content[start:][slice(*entry["data_offsets"])])
        for name, entry in header.items()
        if name != "__metadata__"
    ]


def shard_bytes(tensors: Sequence[RawTensor]) -> int:
    """Returns the size of the file that `write_shard` makes."""
    return len(_header(tensors)) + sum(len(tensor.data) for tensor in tensors)


def _header(tensors: Sequence[RawTensor]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        end = start + len(tensor.data)
        header[tensor.name] = {"dtype": tensor.code, "shape": tensor.shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the first tensor starts on 8 bytes
    return len(text).to_bytes(8, "little") + text


def publish(
    save: PendingSave,
    *,
    state: Mapping[str, Any],
    val_bpb: float | None,
    versions: Mapping[str, str],
    deadline_s: float,
) -> int:
    """Waits for all parts, merges them and renames the folder; returns its bytes. For rank 0 alone."""
    parts = _collect(save, deadline_s=deadline_s)
    for note in save.directory.glob(f".step_*.tmp/{GIVEN_UP}"):  # of earlier saves: by now no rank writes to them
        shutil.rmtree(note.parent, ignore_errors=True)
    files = {name: FileEntry(**entry) for part in parts for name, entry in part["files"].items()}
    manifest = Manifest(
        step=save.step,
        world_size=save.world_size,
        time=utc_now(),
        val_bpb=val_bpb,
        files=files,
        tensors=_merged([part["tensors"] for part in parts]),
        state=state,
        **versions,
    )
    write_atomic(save.folder / MANIFEST, encode_manifest(manifest))
    for rank in range(save.world_size):
        (save.folder / shard_name(rank, save.world_size)).with_suffix(".json").unlink()
    _sync_folder(save.folder)
    final = save.directory / step_folder_name(save.step)
    replaced = final.with_name(f"{final.name}.replaced")
    if final.exists():  # clean_leftovers fixes a kill between the two renames
        final.rename(replaced)
    save.folder.rename(final)
    _sync_folder(save.directory)
    if replaced.exists():
        discard(replaced)
    return sum(entry.bytes for entry in files.values())


def copy_weights(source: Path, directory: Path) -> None:
    """Makes step 0 of a new run from a checkpoint's weights alone, without optimizer states. directory: of its checkpoints.

    Raises OSError where the disk refuses, and PacelineError where a weight is NaN or infinite.
    """
    import numpy as np  # whoever reads runs imports this module, and must not wait for numpy

    manifest = read_manifest(source)
    tensors = {key: entry for key, entry in manifest.tensors.items() if key.startswith("model.")}
    final = directory / step_folder_name(0)
    folder = final.with_name(f".{final.name}.first.tmp")
    folder.mkdir(parents=True)
    others = [path.name for path in step_folders(source.parent) if path != source]
    files: dict[str, FileEntry] = {}
    for file in manifest.files:
        names = {part.name for entry in tensors.values() for part in entry.parts if part.file == file}
        weights = [tensor for tensor in read_shard(source / file) if tensor.name in names]
        for tensor in weights:
            assert tensor.code == "F32", f"{tensor.name} is saved as {tensor.code}"
            if not np.isfinite(np.frombuffer(tensor.data, np.float32)).all():
                raise PacelineError(
                    f"the weights of {source} hold NaN or infinity, first in {tensor.name.removeprefix('model.')}",
                    fix=f"take another checkpoint of {source.parent}: {' or '.join(others) or 'none is left'}",
                )
        if weights:
            files[file] = write_shard(folder / file, weights)
    first = replace(manifest, step=0, time=utc_now(), val_bpb=None, files=files, tensors=tensors, state={})
    write_atomic(folder / MANIFEST, encode_manifest(first))
    _sync_folder(folder)
    folder.rename(final)
    _sync_folder(directory)


def prune(directory: Path, *, step: int, keep_last: int) -> None:
    """Removes all checkpoints up to `step` but the newest keep_last and the best; newer ones stay."""
    checkpoints = list_checkpoints(directory, skip_unreadable=True)
    listed = [(path, manifest) for path, manifest in checkpoints if manifest.step <= step]
    best = best_checkpoint(manifest for _, manifest in listed)
    for path, manifest in listed[keep_last:]:
        if manifest is not best:
            discard(path)


def give_up(save: PendingSave, error: BaseException) -> None:
    """Frees the disk, and marks this part as failed so that rank 0 does not wait for it."""
    if save.world_size == 1:
        shutil.rmtree(save.folder, ignore_errors=True)
        return
    with suppress(OSError):  # then rank 0 waits until its deadline, and the others' parts stay until the next attempt
        remove_part(save)
        if save.rank != 0:
            full = isinstance(error, OSError) and error.errno in NO_SPACE
            save.file.with_suffix(".full" if full else ".failed").touch()  # no byte of it may be left for more
            return
        (save.folder / GIVEN_UP).touch()
        for path in save.folder.glob("shard_*"):
            path.unlink(missing_ok=True)


def remove_part(save: PendingSave) -> None:
    """Removes this rank's files."""
    save.file.unlink(missing_ok=True)
    save.file.with_suffix(".json").unlink(missing_ok=True)


def explained(error: OSError, save: PendingSave) -> PacelineError:
    """Returns the error for the user when the disk refused. Call it after `give_up`, so that it counts the freed space."""
    who = f"rank {save.rank} of {save.world_size}"
    if error.errno in NO_SPACE:
        return no_space(save, who, num_bytes=shard_bytes(save.tensors))
    if not save.directory.parent.is_dir():
        return unwritable_file(save.directory, error)
    too_large = "ulimit -f unlimited, or another file system where that is not the limit"
    return PacelineError(
        f"{who} cannot write the checkpoint of step {save.step} to {save.directory}: {error.strerror}",
        fix=f"{too_large if error.errno == errno.EFBIG else 'make the folder writable'}, then: {save.resume}",
    )


def no_space(save: PendingSave, who: str, *, num_bytes: int | None, host: str = "") -> NoSpace:
    """Returns the error of a full disk. num_bytes: of the part of `who`, None if it does not know it.

    host: with the full disk; empty for this one.
    """
    free_bytes = None if host else free_space(save.directory)
    place = f" on {host}" if host else ""
    who += place
    needs = "has not enough" if num_bytes is None else f"needs {format_bytes(num_bytes)}"
    if save.whole_bytes is not None and save.world_size > 1:
        needs += f", all together {format_bytes(save.whole_bytes)}"
    free = "" if free_bytes is None else f", {format_bytes(free_bytes)} free in {save.directory}"
    return NoSpace(
        f"no space for the checkpoint of step {save.step}: {who} {needs}{free}; the checkpoints before it are untouched",
        fix=f"free some space{place} (older checkpoints lie there too), then: {save.resume}",
        step=save.step,
        needed_bytes=max(save.whole_bytes or 0, num_bytes or 0),
        free_bytes=free_bytes,
        host=host or None,
    )


def _collect(save: PendingSave, *, deadline_s: float) -> list[dict[str, Any]]:
    """Waits for all ranks' JSON and returns it; raises PacelineError where a rank failed or the deadline has passed."""
    deadline = time.monotonic() + deadline_s
    notes = [(save.folder / shard_name(rank, save.world_size)).with_suffix(".json") for rank in range(save.world_size)]
    while missing := [rank for rank, note in enumerate(notes) if not note.exists()]:
        for rank in missing:
            if notes[rank].with_suffix(".full").exists():
                host = notes[rank].with_suffix(".full").read_text()
                raise no_space(save, f"rank {rank} of {save.world_size}", num_bytes=None, host=host)
            if notes[rank].with_suffix(".failed").exists():
                raise PacelineError(
                    f"rank {rank} of {save.world_size} could not write its part of the checkpoint of step {save.step};"
                    " the checkpoints before it are untouched",
                    fix=f"see the end of rank {rank}'s log, then: {save.resume}",
                )
        if time.monotonic() > deadline:
            raise PacelineError(
                f"no checkpoint of step {save.step}: after {deadline_s:g} s rank {', '.join(map(str, missing))}"
                f" of {save.world_size} has not written its part to {save.directory}",
                fix="see that rank's log; on several hosts the run folder must lie on a file system that all share",
            )
        time.sleep(POLL_S)
    return [json.loads(note.read_text("utf-8")) for note in notes]


def _merged(ranks: Sequence[Mapping[str, dict[str, Any]]]) -> dict[str, TensorEntry]:
    """Merges the ranks' entries; raises ValueError for a row that no rank owns, or two do: a bug of the sharding."""
    merged: dict[str, dict[str, Any]] = {}
    for entries in ranks:
        for key, entry in entries.items():
            whole = merged.setdefault(key, {**entry, "parts": []})
            if (whole["shape"], whole["dtype"]) != (entry["shape"], entry["dtype"]):
                raise ValueError(f"{key}: {whole['dtype']} {whole['shape']} and {entry['dtype']} {entry['shape']}")
            whole["parts"] += entry["parts"]
    return {key: tensor_entry(**merged[key]) for key in sorted(merged)}


def _sync_folder(path: Path) -> None:
    """Syncs the folder, so that the names in it survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
