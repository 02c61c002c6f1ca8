"""Rows out of token shards."""

import json

import numpy as np
import pytest

from paceline.data.rows import BadToken, TokenSplit

BOS = 7


@pytest.fixture
def make_split(tmp_path):
    """Tokens 0, 1, 2, ... in shards of shard_tokens."""

    def make(num_tokens, *, shard_tokens=1000, dtype="uint16", vocab_size=1 << 20):
        tokens = np.arange(num_tokens, dtype=np.dtype(dtype).newbyteorder("<"))
        shards = []
        for number in range(-(-num_tokens // shard_tokens)):
            tokens[number * shard_tokens : (number + 1) * shard_tokens].tofile(tmp_path / f"train_{number:05d}.bin")
            shards.append(f"train_{number:05d}.bin")
        np.save(tmp_path / "train.docs.npy", np.array([0], dtype=np.int64))
        facts = {
            "num_tokens": num_tokens,
            "num_bytes": 1,
            "num_documents": 1,
            "shards": shards,
            "docs": "train.docs.npy",
        }
        meta = {"bos_id": BOS, "dtype": dtype, "shard_tokens": shard_tokens, "splits": {"train": facts}}
        meta["vocab_size"] = vocab_size
        return TokenSplit(tmp_path, "train", json.loads(json.dumps(meta)))

    return make


def test_targets_are_the_tokens_one_later(make_split):
    idx, targets = make_split(13).rows(np.array([2, 0]), 4)
    assert (idx.dtype, targets.dtype) == (np.int64, np.int64)
    assert idx.tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]
    assert targets.tolist() == [[9, 10, 11, 12], [1, 2, 3, 4]]


def test_the_last_row_is_filled_with_bos_and_ignored_targets(make_split):
    split = make_split(11)
    assert split.num_rows(4) == 3
    idx, targets = split.rows(np.array([2]), 4)
    assert idx.tolist() == [[8, 9, BOS, BOS]]
    assert targets.tolist() == [[9, 10, -1, -1]]


@pytest.mark.parametrize("num_tokens", [2, 3, 4, 5, 8, 9, 10, 64, 65])
@pytest.mark.parametrize("sequence_len", [1, 2, 4, 100])
def test_every_token_of_an_epoch_is_once_an_input_and_once_a_target(make_split, num_tokens, sequence_len):
    split = make_split(num_tokens, shard_tokens=3)
    idx, targets = split.rows(np.arange(split.num_rows(sequence_len)), sequence_len)
    counted = targets >= 0
    assert idx[counted].tolist() == list(range(num_tokens - 1))
    assert targets[counted].tolist() == list(range(1, num_tokens))


@pytest.mark.parametrize("shard_tokens", [1, 2, 5, 7, 100])
def test_rows_do_not_depend_on_how_the_tokens_lie_in_shards(make_split, shard_tokens):
    idx, targets = make_split(50, shard_tokens=shard_tokens).rows(np.array([3, 1, 7]), 6)
    assert idx[0].tolist() == [18, 19, 20, 21, 22, 23]
    assert idx[1].tolist() == [6, 7, 8, 9, 10, 11]
    assert targets[2].tolist() == [43, 44, 45, 46, 47, 48]


def test_token_ids_over_65535_are_kept_in_uint32(make_split):
    idx, targets = make_split(70_000, shard_tokens=1 << 20, dtype="uint32").rows(np.array([69_998]), 1)
    assert (idx.tolist(), targets.tolist()) == ([[69_998]], [[69_999]])


def test_a_row_that_is_not_there_is_a_bug(make_split):
    with pytest.raises(AssertionError):
        make_split(9).rows(np.array([2]), 4)


def test_the_shards_that_rows_lie_in_are_named(make_split):
    split = make_split(100, shard_tokens=30)
    assert split.files_of(np.array([0]), 10) == ["train_00000.bin"]
    assert split.files_of(np.array([2]), 10) == ["train_00000.bin", "train_00001.bin"]  # its last target is token 30
    assert split.files_of(np.array([9, 4]), 10) == ["train_00001.bin", "train_00003.bin"]


def test_a_token_that_the_vocabulary_has_not_is_told_with_its_row(make_split, tmp_path):
    split = make_split(100, vocab_size=42)
    split.rows(np.array([0, 3]), 10)
    for row in (4, 5):  # as a target, as an input
        with pytest.raises(BadToken) as error:
            split.rows(np.array([0, row]), 10)
        assert error.value.message.startswith(f"row {row} of the text in {tmp_path} has the token ")
