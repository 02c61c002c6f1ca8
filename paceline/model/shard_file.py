"""
One rank's part of a checkpoint: a plain safetensors file, hashed on its way to the disk.

Written by hand because safetensors' own writer takes everything in one call: here the bytes go out in bounded chunks,
each hashed as it is written, so that a save neither reads its file back nor holds the interpreter for long. Reading is
safetensors' own. No torch: a tensor comes as its dtype's code, its shape and its bytes.

Format: https://github.com/huggingface/safetensors#format (8 bytes length, JSON header, tensors without gaps).
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CHUNK_BYTES = 4 << 20  # hashing and writing let go of the interpreter once per chunk


@dataclass(frozen=True)
class RawTensor:
    """A tensor as safetensors stores it: code such as 'F32', contiguous little-endian bytes."""

    name: str
    code: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True)
class FileEntry:
    """What must hold of a file of a checkpoint."""

    bytes: int
    sha256: str


def write_shard(path: Path, tensors: Sequence[RawTensor]) -> FileEntry:
    """Write and sync a safetensors file; OSError where the disk says no."""
    digest, num_bytes = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file:
        for block in (memoryview(_header(tensors)), *(tensor.data for tensor in tensors)):
            for start in range(0, len(block), CHUNK_BYTES):
                chunk = block[start : start + CHUNK_BYTES]
                digest.update(chunk)
                num_bytes += len(chunk)
                while chunk:  # an unbuffered write may take less than it was given
                    chunk = chunk[file.write(chunk) :]
        os.fsync(file.fileno())
    return FileEntry(num_bytes, digest.hexdigest())


def shard_bytes(tensors: Sequence[RawTensor]) -> int:
    """Size of the file that `write_shard` makes."""
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
