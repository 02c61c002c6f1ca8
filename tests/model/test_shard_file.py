import hashlib
from pathlib import Path

import torch
from safetensors import safe_open

from paceline.model.shard_file import RawTensor, shard_bytes, write_shard


def test_the_returned_size_and_hash_are_those_of_the_file(tmp_path: Path):
    tensors = [RawTensor("a", "U8", (9_000_000,), memoryview(bytes(range(250)) * 36_000))]
    entry = write_shard(tmp_path / "shard", tensors)
    raw = (tmp_path / "shard").read_bytes()
    assert (entry.bytes, entry.sha256) == (len(raw), hashlib.sha256(raw).hexdigest())
    assert shard_bytes(tensors) == len(raw)


def test_safetensors_reads_what_was_written(tmp_path: Path):
    rows = torch.arange(6, dtype=torch.int64)
    tensors = [
        RawTensor("pos[0:6]", "I64", (2, 3), memoryview(rows.numpy().tobytes())),
        RawTensor("größe", "F32", (), memoryview(torch.tensor(1.5).numpy().tobytes())),
        RawTensor("none", "F32", (4, 0), memoryview(b"")),
    ]
    write_shard(tmp_path / "shard", tensors)
    with safe_open(tmp_path / "shard", framework="pt") as file:
        assert torch.equal(file.get_tensor("pos[0:6]"), rows.view(2, 3))
        assert torch.equal(file.get_tensor("größe"), torch.tensor(1.5))
        assert file.get_tensor("none").shape == (4, 0)


def test_the_first_tensor_starts_on_eight_bytes(tmp_path: Path):
    write_shard(tmp_path / "shard", [RawTensor("x", "U8", (1,), memoryview(b"!"))])
    length = int.from_bytes((tmp_path / "shard").read_bytes()[:8], "little")
    assert length % 8 == 0
