"""
What a checkpoint folder says of itself, and whether that is so.

`checkpoints/step_000040/` holds one safetensors file per rank that owned something and `manifest.json`: every file's
size and hash, which file holds which rows of which tensor, and the numbers that go with them. The folder gets its name
by one rename after all of it is on disk, so a folder of that name is complete, or was damaged later: then a hash tells.
docs/checkpoint.md describes the format to outsiders. No torch and no tensors here: any process may list and verify.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.model.shard_file import FileEntry

FORMAT = 1
MANIFEST = "manifest.json"
HASHING_THREADS = 4  # one reads and hashes about 1.5 GB/s, a disk gives more
_STEP_FOLDER = re.compile(r"step_(\d{6,})")


class NoCheckpoint(PacelineError):
    """There is none, not even a damaged one."""


class DamagedCheckpoint(PacelineError):
    """A folder that was complete and is not what it was."""

    def __init__(self, path: Path, detail: str):
        super().__init__(
            f"checkpoint {path.name} is damaged ({detail})",
            fix=f"use another checkpoint of {path.parent}; `paceline resume` does so by itself",
        )


@dataclass(frozen=True)
class Part:
    """Rows [lo, hi) of a tensor are the tensor `name` of the safetensors file `file`."""

    file: str
    name: str
    rows: tuple[int, int]


@dataclass(frozen=True)
class TensorEntry:
    """A tensor's full shape, torch's name of its dtype, and its parts in row order: every row once."""

    shape: tuple[int, ...]
    dtype: str
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        reached = 0
        for part in self.parts:
            lo, hi = part.rows
            if lo != reached or hi <= lo:
                raise ValueError(f"{part.name}: rows {lo} to {hi} follow row {reached}")
            reached = hi
        if reached != num_rows(self.shape):
            raise ValueError(f"{reached} of {num_rows(self.shape)} rows of a tensor of shape {self.shape}")


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json, but for its format number and its own hash."""

    step: int
    world_size: int  # that saved it; any other may read it
    time: str  # UTC
    paceline: str
    torch: str
    val_bpb: float | None
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, TensorEntry]
    state: Mapping[str, Any]


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint in a list."""

    path: Path
    step: int
    val_bpb: float | None
    world_size: int
    time: str
    bytes: int


def list_checkpoints(directory: Path) -> list[CheckpointInfo]:
    """Newest first, by their manifests alone; one whose manifest is damaged is left out."""
    found = []
    for path in step_folders(directory):
        try:
            manifest = read_manifest(path)
        except DamagedCheckpoint:
            continue
        num_bytes = sum(entry.bytes for entry in manifest.files.values())
        found.append(
            CheckpointInfo(path, manifest.step, manifest.val_bpb, manifest.world_size, manifest.time, num_bytes)
        )
    return found


def verify(path: Path) -> None:
    """Read every byte of the checkpoint; DamagedCheckpoint names the first file that is not as it was written."""
    files = read_manifest(path).files
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        for name, damage in zip(files, pool.map(lambda name: _damage(path / name, files[name]), files), strict=True):
            if damage:
                raise DamagedCheckpoint(path, f"{name}: {damage}")


def newest_good(directory: Path, *, set_aside: bool) -> tuple[Path, list[str]]:
    """The newest checkpoint that verifies, and one line for each newer one that does not.

    set_aside renames those to step_000060.damaged: the evidence stays, and the step can be saved again. For the process
    that goes on training; one that only reads leaves them where they are.
    """
    damaged: list[tuple[Path, DamagedCheckpoint]] = []
    for path in step_folders(directory):
        try:
            verify(path)
        except DamagedCheckpoint as error:
            if path.exists():  # else the trainer has just pruned it
                damaged.append((path, error))
            continue
        notes = [
            f"{error.message}: going on from {path.name}, {_step(other) - _step(path)} steps are done again"
            for other, error in damaged
        ]
        if set_aside:
            for other, _ in damaged:
                other.rename(_free_name(other.with_name(f"{other.name}.damaged")))
        return path, notes
    if not damaged:
        raise NoCheckpoint(f"no checkpoint in {directory}", fix="train until the first one is saved (save_every steps)")
    raise PacelineError(
        f"no good checkpoint in {directory}: " + "; ".join(error.message for _, error in damaged),
        fix="copy an intact step folder back from a backup, or train again under another --name",
    )


def clean_leftovers(directory: Path) -> None:
    """Remove what killed saves left. By rank 0, before any rank saves or loads."""
    for path in directory.glob(".step_*.tmp"):
        shutil.rmtree(path)
    for path in directory.glob("step_*.replaced"):
        final = path.with_suffix("")
        if final.exists():
            discard(path)
        else:  # killed between the two renames of a replacement
            path.rename(final)


def discard(path: Path) -> None:
    """Remove a checkpoint; killed half-way, it leaves none that looks whole."""
    hidden = path.with_name(f".{path.name}.discarded.tmp")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden)


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint folder `path`; DamagedCheckpoint if it is not as it was written."""
    try:
        raw = (path / MANIFEST).read_bytes()
    except OSError as error:
        raise DamagedCheckpoint(path, f"{MANIFEST}: {error.strerror}") from None
    head, _, tail = raw.rpartition(b",\n")
    if not head or tail != _seal(head):
        raise DamagedCheckpoint(path, f"{MANIFEST}: its own sha256 differs")
    fields = json.loads(raw)
    if fields["format"] != FORMAT:
        raise PacelineError(
            f"checkpoint {path} has format {fields['format']}, this paceline reads {FORMAT}",
            fix=f"use paceline {fields['paceline']}, which wrote it",
        )
    return Manifest(
        files={name: FileEntry(**entry) for name, entry in fields["files"].items()},
        tensors={key: tensor_entry(**entry) for key, entry in fields["tensors"].items()},
        **{name: fields[name] for name in ("step", "world_size", "time", "paceline", "torch", "val_bpb", "state")},
    )


def encode_manifest(manifest: Manifest) -> str:
    """JSON with a line per field, file and tensor; the last line holds the sha256 of all bytes before it."""
    lines = [f'"format": {FORMAT}']
    for field, value in asdict(manifest).items():
        if field in ("files", "tensors"):
            entries = [f"  {_json(name)}: {_json(entry)}" for name, entry in value.items()]
            lines.append(f"{_json(field)}: {{\n" + ",\n".join(entries) + "\n }")
        else:
            lines.append(f"{_json(field)}: {_json(value)}")
    head = "{\n " + ",\n ".join(lines)
    return head + ",\n" + _seal(head.encode()).decode()


def tensor_entry(shape: Sequence[int], dtype: str, parts: Sequence[Mapping[str, Any]]) -> TensorEntry:
    """From JSON, parts in any order; ValueError if a row is missing or there twice."""
    ordered = sorted((Part(part["file"], part["name"], (part["rows"][0], part["rows"][1])) for part in parts), key=_lo)
    return TensorEntry(tuple(shape), dtype, tuple(ordered))


def num_rows(shape: Sequence[int]) -> int:
    return shape[0] if shape else 1  # a scalar has one row


def step_folder_name(step: int) -> str:
    return f"step_{step:06d}"


def step_folders(directory: Path) -> list[Path]:
    """Newest first, damaged ones too."""
    if not directory.is_dir():
        return []
    return sorted((path for path in directory.iterdir() if _STEP_FOLDER.fullmatch(path.name)), key=_step, reverse=True)


def _damage(path: Path, entry: FileEntry) -> str | None:
    try:
        num_bytes = path.stat().st_size
        if num_bytes != entry.bytes:
            return f"{num_bytes:,} bytes instead of {entry.bytes:,}"
        with path.open("rb", buffering=0) as file:
            intact = hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256
    except OSError as error:
        return error.strerror
    return None if intact else "sha256 differs"


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _lo(part: Part) -> int:
    return part.rows[0]


def _free_name(path: Path) -> Path:
    free, number = path, 1
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def _seal(head: bytes) -> bytes:
    return f' "manifest_sha256": "{hashlib.sha256(head).hexdigest()}"\n}}\n'.encode()


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
