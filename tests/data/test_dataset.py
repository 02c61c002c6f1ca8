"""Rows out of token shards, their stateless order, and how ranks share a step."""

import json
import tracemalloc
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import with_rows

from paceline.data.dataset import PACKED_FROM, BadToken, TokenSplit, batch_of_step, pack_best_fit, rows_of_step
from paceline.errors import PacelineError

BOS = 7


@pytest.fixture
def make_split(tmp_path):
    """Tokens 0, 1, 2, ... in shards of shard_tokens."""

    def make(num_tokens, *, shard_tokens=1000, dtype="uint16", vocab_size=1 << 20, starts=(0,), packing="stream"):
        tokens = np.arange(num_tokens, dtype=np.dtype(dtype).newbyteorder("<"))
        shards = []
        for number in range(-(-num_tokens // shard_tokens)):
            tokens[number * shard_tokens : (number + 1) * shard_tokens].tofile(tmp_path / f"train_{number:05d}.bin")
            shards.append(f"train_{number:05d}.bin")
        np.save(tmp_path / "train.docs.npy", np.array(starts, dtype=np.int64))
        facts = {
            "num_tokens": num_tokens,
            "num_bytes": 1,
            "num_documents": 1,
            "shards": shards,
            "docs": "train.docs.npy",
        }
        meta = {"bos_id": BOS, "dtype": dtype, "shard_tokens": shard_tokens, "splits": {"train": facts}}
        meta["vocab_size"] = vocab_size
        return TokenSplit(tmp_path, "train", json.loads(json.dumps(meta)), packing=packing)

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


def test_a_token_outside_the_vocabulary_is_reported_with_its_row(make_split, tmp_path):
    split = make_split(100, vocab_size=42)
    split.rows(np.array([0, 3]), 10)
    for row in (4, 5):  # as a target, as an input
        with pytest.raises(BadToken) as error:
            split.rows(np.array([0, row]), 10)
        assert error.value.message.startswith(f"row {row} of the text in {tmp_path} has the token ")


SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 100, 255, 256, 257, 1000, 1023, 1024, 1025, 4095, 4097, 65_535, 65_537]


def epoch(number: int, *, num_rows: int, seed: int = 0) -> list[int]:
    return rows_of_step(number, rows_per_step=num_rows, num_rows=num_rows, seed=seed).tolist()


@with_rows("num_rows", SIZES)
def test_an_epoch_holds_every_row_exactly_once(num_rows):
    for number in (0, 1, 7):
        assert sorted(epoch(number, num_rows=num_rows)) == list(range(num_rows))


@pytest.mark.parametrize("rows_per_step", [1, 3, 10, 64, 97, 250])
def test_steps_that_cross_an_epoch_border_still_see_every_row_once_an_epoch(rows_per_step):
    num_rows, num_epochs = 97, 5
    steps = -(-num_rows * num_epochs // rows_per_step)
    rows = np.concatenate(
        [rows_of_step(step, rows_per_step=rows_per_step, num_rows=num_rows, seed=3) for step in range(steps)]
    )
    for number in range(num_epochs):
        rows_of_epoch = rows[number * num_rows : (number + 1) * num_rows]
        assert sorted(rows_of_epoch) == list(range(num_rows))


def test_the_size_of_a_step_does_not_change_the_order():
    def first_120(rows_per_step):
        return np.concatenate(
            [rows_of_step(s, rows_per_step=rows_per_step, num_rows=50, seed=1) for s in range(120 // rows_per_step)]
        ).tolist()

    assert first_120(1) == first_120(8) == first_120(60) == first_120(120)


def test_the_order_is_frozen_so_that_old_runs_resume_on_the_same_rows():
    assert rows_of_step(0, rows_per_step=8, num_rows=1000, seed=42).tolist() == [792, 400, 482, 8, 549, 781, 960, 690]
    far = rows_of_step(10**9, rows_per_step=4, num_rows=2**40, seed=-1)
    assert far.tolist() == [1078257091107, 869750038860, 458822479650, 515333841981]


def test_epochs_and_seeds_differ_and_do_not_repeat_each_other():
    orders = {tuple(epoch(e, num_rows=100, seed=s)) for e in range(10) for s in range(10)}
    assert len(orders) == 100


def test_small_corpora_are_shuffled_too():
    assert {tuple(epoch(e, num_rows=2)) for e in range(20)} == {(0, 1), (1, 0)}
    assert len({tuple(epoch(e, num_rows=3)) for e in range(100)}) == 6
    assert len({tuple(epoch(e, num_rows=4)) for e in range(300)}) == 24


def test_rows_up_to_two_to_the_forty_are_in_range_and_distinct():
    rows = rows_of_step(12_345, rows_per_step=4096, num_rows=2**40 - 1, seed=5)
    assert rows.dtype == np.int64
    assert rows.min() >= 0 and rows.max() < 2**40 - 1
    assert len(set(rows.tolist())) == 4096
    assert rows.max() > 2**39  # not only the low ones


def test_an_epoch_is_well_mixed():
    order = np.array(epoch(0, num_rows=10_000))
    displacement = np.abs(order - np.arange(10_000)).mean()
    assert displacement == pytest.approx(10_000 / 3, rel=0.03)  # the mean of a random permutation
    steps = np.diff(order)
    assert np.unique(steps).size > 5_000  # no fixed distance between neighbours
    assert (np.abs(steps) == 1).mean() < 0.002
    assert abs(np.corrcoef(order, np.roll(order, 1))[0, 1]) < 0.03
    assert abs(np.corrcoef(order, epoch(1, num_rows=10_000))[0, 1]) < 0.03


def test_each_row_is_as_likely_at_each_place():
    num_rows, num_epochs = 10, 4000
    counts = np.zeros((num_rows, num_rows))
    rows = rows_of_step(0, rows_per_step=num_rows * num_epochs, num_rows=num_rows, seed=9).reshape(num_epochs, num_rows)
    for place in range(num_rows):
        counts[place] = np.bincount(rows[:, place], minlength=num_rows)
    expected = num_epochs / num_rows
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert chi_squared < 81 + 4 * (2 * 81) ** 0.5  # 81 degrees of freedom, four standard deviations


def test_a_step_computes_its_own_rows_alone_and_warns_of_nothing():
    tracemalloc.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(50):
                rows_of_step(step, rows_per_step=512, num_rows=10_000_019, seed=step)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1_000_000  # an order of all rows takes 80


def test_steps_move_up_past_skipped_batches():
    assert [batch_of_step(step, []) for step in range(5)] == [0, 1, 2, 3, 4]
    assert [batch_of_step(step, [2]) for step in range(5)] == [0, 1, 3, 4, 5]
    assert [batch_of_step(step, [3, 0, 2]) for step in range(4)] == [1, 4, 5, 6]


def test_skipping_one_more_batch_changes_no_step_before_it():
    for more in range(2, 9):
        before, after = ([batch_of_step(step, batches) for step in range(8)] for batches in ([1], [1, more]))
        same = before.index(more)
        assert after[:same] == before[:same]
        assert more not in after


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(2, 20))
def test_every_row_but_the_last_ones_is_full_and_begins_with_a_document(lengths, capacity):
    rows, documents, taken = pack_best_fit(np.array(lengths), capacity=capacity)
    assert sorted(documents) == list(range(len(lengths)))
    filled = np.bincount(rows, weights=taken)
    assert (filled[:-1] == capacity).all() and 0 < filled[-1] <= capacity
    whole = taken == np.array(lengths)[documents]
    last_of_row = np.append(rows[1:] != rows[:-1], True)
    assert (whole | last_of_row).all()  # only what fills a row is cut


def test_the_longest_document_that_fits_comes_next_and_else_the_shortest_is_cut():
    rows, documents, taken = pack_best_fit(np.array([3, 5, 9, 4, 4]), capacity=10)
    assert list(zip(rows.tolist(), documents.tolist(), taken.tolist(), strict=True)) == [
        (0, 2, 9),
        (0, 0, 1),
        (1, 1, 5),
        (1, 4, 4),
        (1, 3, 1),
    ]


def test_a_row_is_packed_from_the_next_thousand_documents():
    lengths = np.array([2] * PACKED_FROM + [10])
    order = pack_best_fit(lengths, capacity=10)[1].tolist()
    assert order.index(PACKED_FROM) == 5  # the best from the first row on, had it been seen


def test_packed_rows_are_read_across_shards_and_their_file_is_made_once(make_split, tmp_path):
    split = make_split(24, shard_tokens=5, starts=(0, 3, 8, 17, 21), packing="best-fit")
    assert (split.num_rows(9), split.left_out(9)) == (2, 1 - 20 / 24)
    assert split.num_rows(8) == 3
    idx, targets = split.rows(np.array([1, 0, 2]), 8)
    assert idx.tolist() == [[3, 4, 5, 6, 7, 17, 18, 19], [*range(8, 16)], [21, 22, 23, 0, 1, BOS, BOS, BOS]]
    assert targets.tolist() == [[4, 5, 6, 7, 17, 18, 19, 20], [*range(9, 17)], [22, 23, 0, 1, 2, -1, -1, -1]]
    (tmp_path / "train.docs.npy").unlink()  # the packed rows are there
    assert make_split(24, shard_tokens=5, packing="best-fit").num_rows(9) == 2
    assert sorted(path.name for path in tmp_path.glob("*best_fit*")) == ["train.best_fit_8.npy", "train.best_fit_9.npy"]


def test_packed_rows_that_cannot_be_written_have_a_fix(make_split, tmp_path, monkeypatch):
    split = make_split(24, packing="best-fit")

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np.lib.format, "write_array", full)
    with pytest.raises(PacelineError, match="no room to write prepared text") as error:
        split.num_rows(9)
    assert "free some space" in error.value.fix
    assert not list(tmp_path.glob("*best_fit*"))
