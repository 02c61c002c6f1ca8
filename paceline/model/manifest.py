"""
The files of a checkpoint: one safetensors file per rank, and the manifest that lists and hashes them.

`checkpoints/step_000040/` holds one safetensors file for each rank that owned something, and `manifest.json`. The folder gets its
name by one rename after all of it is on disk, so a folder of that name is complete, or was damaged later, which a hash shows.
docs/checkpoint.md describes the format. There is no torch here: any process may list and verify.
"""

import functools
import hashlib
import itertools
import json
import re
import shlex
import shutil
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.plan.shapes import ParamShape
from paceline.rundir import RunDir, unreadable_file
from paceline.units import format_number_of

FORMAT = 1
MANIFEST = "manifest.json"
HASHING_THREADS = 4  # one reads and hashes about 1.5 GB/s, a disk gives more
CLEARLY_HIGHER = 1.01  # times a val_bpb
IS_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)  # of a file of a checkpoint
_json = functools.partial(json.dumps, ensure_ascii=False, allow_nan=False)


@dataclass(frozen=True)
class FileEntry:
    """The size and hash of a checkpoint's file."""

    bytes: int
    sha256: str


class NoCheckpoint(PacelineError):
    """There is no checkpoint, not even a damaged one."""


class DamagedCheckpoint(PacelineError):
    """A checkpoint that was complete and has changed since."""

    def __init__(self, path: Path, detail: str):
        super().__init__(
            f"checkpoint {path.name} is damaged ({detail})",
            fix=f"use another checkpoint of {path.parent}; `paceline resume` does so by itself",
        )


class UnreadableCheckpoint(PacelineError):
    """A checkpoint whose file `path` is there and cannot be read: no permission, or a mount that is away. It may be intact."""

    def __init__(self, path: Path, error: OSError):
        problem, folder = unreadable_file(path, error), path.parent
        move = shlex.join(["mv", str(folder), f"{folder}.lost"])
        way_out = (
            "" if isinstance(error, PermissionError) else f"; where it is lost for good, {move} leaves the one before"
        )
        super().__init__(problem.message, fix=f"{problem.fix}{way_out}")


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
    """The content of manifest.json, without its format number and its own hash."""

    step: int
    world_size: int  # that saved it; any other may read it
    time: str  # UTC
    paceline: str
    torch: str
    val_bpb: float | None
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, TensorEntry]
    state: Mapping[str, Any]


def list_checkpoints(directory: Path, *, skip_unreadable: bool = False) -> list[tuple[Path, Manifest]]:
    """Returns the checkpoints newest first, by their manifests alone, without the damaged ones. Raises UnreadableCheckpoint."""
    checkpoints, skipped = [], (DamagedCheckpoint, *([UnreadableCheckpoint] if skip_unreadable else []))
    for path in step_folders(directory):
        with suppress(*skipped):
            checkpoints.append((path, read_manifest(path)))
    return checkpoints


def best_checkpoint(manifests: Iterable[Manifest]) -> Manifest | None:
    """Returns the one with the lowest val_bpb, of several the newest; None where none has a score."""
    scored = [(manifest.val_bpb, -manifest.step, manifest) for manifest in manifests if manifest.val_bpb is not None]
    return min(scored, key=lambda item: item[:2])[2] if scored else None


def check_shapes(path: Path, manifest: Manifest, shapes: Iterable[ParamShape], *, fix: str) -> None:
    """Raises PacelineError where the checkpoint is not of a model with just these parameters. path: its folder."""
    planned = {f"model.{shape.name}": list(shape.shape) for shape in shapes}
    saved = {key: list(entry.shape) for key, entry in manifest.tensors.items() if key.startswith("model.")}
    differing = [key for key in {**planned, **saved} if planned.get(key) != saved.get(key)]
    if differing:
        here, there = (format_shape(shapes.get(differing[0])) for shapes in (planned, saved))
        raise PacelineError(
            f"checkpoint {path} is of another model: {differing[0]} is {there} in it and {here} in the run", fix=fix
        )


def format_shape(shape: Sequence[int] | None) -> str:
    """Returns `512 x 64`, or what stands for a tensor that is missing."""
    return "missing" if shape is None else " x ".join(map(str, shape)) or "one number"


def better_checkpoint(directory: Path, step: int) -> Manifest | None:
    """Returns the best checkpoint, where the val_bpb of that of `step`, the newest good one, is clearly higher."""
    listed = (manifest for _, manifest in list_checkpoints(directory, skip_unreadable=True))
    manifests = {manifest.step: manifest for manifest in listed if manifest.step <= step}  # newer ones are damaged
    best, score = best_checkpoint(manifests.values()), manifests[step].val_bpb if step in manifests else None
    return best if best and best.val_bpb and score and score > CLEARLY_HIGHER * best.val_bpb else None


def verify(path: Path) -> None:
    """Reads every byte of the checkpoint.

    Raises DamagedCheckpoint with the first file that is not as it was written, UnreadableCheckpoint with one that cannot be read.
    """
    files = read_manifest(path).files
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        for name, damage in zip(files, pool.map(lambda name: _damage(path / name, files[name]), files), strict=True):
            if damage:
                raise DamagedCheckpoint(path, f"{name}: {damage}")


def newest_good(directory: Path, *, set_aside: bool) -> tuple[Path, list[str]]:
    """Returns the newest checkpoint that verifies, and one line for each newer one that does not.

    set_aside renames those to step_000060.damaged: the evidence stays, and the step can be saved again. It is for the process that
    continues training; one that only reads leaves them where they are. Raises NoCheckpoint, UnreadableCheckpoint where one that may
    be intact cannot be read, or PacelineError if all are damaged.
    """
    damaged: list[tuple[Path, DamagedCheckpoint]] = []
    for path in step_folders(directory):
        try:
            verify(path)
        except DamagedCheckpoint as error:
            if path.exists():  # otherwise the trainer has just pruned it
                damaged.append((path, error))
            continue
        notes = []
        for other, problem in damaged:
            repeated = format_number_of(step_of(other) - step_of(path), "step is", "steps are")
            action = f"going on from {path.name}, {repeated} done again" if set_aside else f"using {path.name} instead"
            notes.append(f"{problem.message}: {action}")
        if set_aside:
            for other, _ in damaged:
                other.rename(free_name(other, "damaged"))
        return path, notes
    if not damaged:
        raise NoCheckpoint(f"no checkpoint in {directory}", fix="train until the first one is saved (save_every steps)")
    raise PacelineError(
        f"no good checkpoint in {directory}: " + "; ".join(error.message for _, error in damaged),
        fix="copy an intact step folder back from a backup, or train again under another --name",
    )


def last_good_step(directory: Path) -> int:
    """Returns the step of the newest checkpoint that verifies; 0 if there is none. Raises UnreadableCheckpoint."""
    try:
        path, _ = newest_good(directory, set_aside=False)
    except UnreadableCheckpoint:
        raise
    except PacelineError:
        return 0
    return step_of(path)


def find_checkpoint(run: RunDir, step: int | str) -> Path:
    """Returns the folder of the checkpoint of a step, or of the best one. Raises PacelineError where it is not kept."""
    if isinstance(step, str):
        if (best := best_checkpoint(manifest for _, manifest in list_checkpoints(run.checkpoints))) is None:
            raise PacelineError(f"no checkpoint of {run.name} has a val_bpb", fix="leave --step out for the newest")
        step = best.step
    path = run.checkpoints / step_folder_name(step)
    if not path.is_dir():
        fix = format_steps(run) or "--step after a save; none yet"
        raise PacelineError(f"{run.name} has no checkpoint at step {step}", fix=fix)
    return path


def verified_checkpoint(run: RunDir, step: int | str) -> Path:
    """Returns find_checkpoint after reading every byte of it. Raises PacelineError also where it is damaged."""
    path = find_checkpoint(run, step)
    try:
        verify(path)
    except DamagedCheckpoint as error:
        raise PacelineError(error.message, fix=format_steps(run, without=step_of(path)) or error.fix) from error
    return path


def format_steps(run: RunDir, *, without: int | None = None) -> str:
    """Returns `--step 20 or 40`, the checkpoints of a run but `without`; empty where there are none."""
    steps = [str(step) for folder in reversed(step_folders(run.checkpoints)) if (step := step_of(folder)) != without]
    return "--step " + " or ".join(steps) if steps else ""


def free_name(path: Path, ending: str) -> Path:
    """Returns a name for a checkpoint, step_000060.ENDING or .ENDING-2 ..., by which no reader takes it for one."""
    endings = itertools.chain([ending], (f"{ending}-{number}" for number in itertools.count(2)))
    names = (path.with_name(f"{path.name}.{text}") for text in endings)
    return next(name for name in names if not name.exists())


def clean_leftovers(directory: Path) -> None:
    """Removes the files of killed saves. Rank 0 calls it before any rank saves or loads."""
    for path in directory.glob(".step_*.tmp"):
        shutil.rmtree(path)
    for path in directory.glob("step_*.replaced"):
        final = path.with_suffix("")
        if final.exists():
            discard(path)
        else:  # killed between the two renames of a replacement
            path.rename(final)


def discard(path: Path) -> None:
    """Removes a checkpoint; if it is killed half-way, no folder remains that looks whole."""
    hidden = path.with_name(f".{path.name}.discarded.tmp")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    # NFS keeps a file that is still being sent to another host; clean_leftovers removes what remains
    shutil.rmtree(hidden, ignore_errors=True)


def read_manifest(path: Path) -> Manifest:
    """Reads the manifest of the checkpoint folder `path`; raises DamagedCheckpoint if it is not as it was written."""
    try:
        raw = (path / MANIFEST).read_bytes()
    except IS_ABSENT as error:
        raise DamagedCheckpoint(path, f"{MANIFEST}: {error.strerror}") from None
    except OSError as error:
        raise UnreadableCheckpoint(path / MANIFEST, error) from error
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
    """Returns JSON with a line per field, file and tensor; the last line holds the sha256 of all bytes before it."""
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
    """Makes an entry from JSON, with the parts in any order; raises ValueError if a row is missing or stored twice."""
    ordered = sorted(parts, key=lambda part: part["rows"][0])
    return TensorEntry(
        tuple(shape), dtype, tuple(Part(part["file"], part["name"], tuple(part["rows"])) for part in ordered)
    )


def num_rows(shape: Sequence[int]) -> int:
    """Returns the rows of a tensor: the size of its first dimension."""
    return shape[0] if shape else 1  # a scalar has one row


def step_folder_name(step: int) -> str:
    """Returns the name of a checkpoint's folder."""
    return f"step_{step:06d}"


def step_folders(directory: Path) -> list[Path]:
    """Returns the checkpoints' folders newest first, damaged ones too."""
    if not directory.is_dir():
        return []
    return sorted(
        (path for path in directory.iterdir() if re.fullmatch(r"step_\d{6,}", path.name)), key=step_of, reverse=True
    )


def newest_folder(directory: Path) -> Path | None:
    """Returns the newest checkpoint that was complete once; None where there is none."""
    return next((path for path in step_folders(directory) if (path / MANIFEST).exists()), None)


def saved_step(directory: Path) -> int:
    """Returns the step of newest_folder; 0 where there is none, and for the weights that a run starts with."""
    newest = newest_folder(directory)
    return step_of(newest) if newest else 0


def _damage(path: Path, entry: FileEntry) -> str | None:
    try:
        num_bytes = path.stat().st_size
        if num_bytes != entry.bytes:
            return f"{num_bytes:,} bytes instead of {entry.bytes:,}"
        with path.open("rb", buffering=0) as file:
            intact = hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256
    except IS_ABSENT as error:
        return error.strerror
    except OSError as error:
        raise UnreadableCheckpoint(path, error) from error
    return None if intact else "sha256 differs"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _seal(head: bytes) -> bytes:
    return f' "manifest_sha256": "{hashlib.sha256(head).hexdigest()}"\n}}\n'.encode()
