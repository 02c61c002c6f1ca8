"""
Token shards: choosing the rows of a step, and reading those rows. Row r begins at token r * T of its split, or
holds the documents that best-fit packing put into it.

The rows of step s are a pure function of (seed, s). Each epoch is a permutation of all rows, computed for just the requested
positions: no shuffled list in memory, no state to save, the same rows whatever the world size. Integer arithmetic only, so every
platform gives the same rows. The permutation is a Feistel network on a grid of rows x columns just larger than num_rows, and
what falls outside is permuted again until it is inside: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002 (the
generalized Feistel and cycle walking). The round function is the finalizer of SplitMix64 (Steele et al., OOPSLA 2014).

Shards are mapped, not read: the workers of a host share one copy in the page cache.
"""

import math
import os
import shlex
from bisect import bisect, insort
from collections.abc import Collection
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import PacelineError
from paceline.file_systems import cannot_write

# T tokens in a row, n requested rows

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]

IGNORED = -1  # a target that does not count
MAX_ROWS = 1 << 40
PACKED_FROM = 1_000  # documents that a row may be packed from
ROUNDS = 6  # four make a Feistel network look random; two more for domains of a few rows

GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, the increment of SplitMix64
MIX_1, MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class BadToken(PacelineError):
    """A token outside the vocabulary: the shard is damaged, or of another tokenizer."""

    def __init__(self, path: Path, *, row: int, token: int, vocab_size: int):
        super().__init__(
            f"row {row:,} of the text in {path} has the token {token:,}, of a vocabulary of {vocab_size:,}",
            fix=f"delete it and run the same command again, which prepares it again: rm -r {shlex.quote(str(path))}",
        )


class TokenSplit:
    """The tokens of one split as one long sequence, whatever shards it lies in.

    A row may hold several documents, and attention crosses from one to the next: only the separator token shows the border.
    """

    def __init__(self, path: Path, name: str, meta: dict[str, Any], *, packing: str = "stream"):
        facts = meta["splits"][name]
        self._name, self._packing, self._docs = name, packing, path / facts["docs"]
        self.num_tokens: int = facts["num_tokens"]
        self._bos_id, self._vocab_size, self._shard_tokens = meta["bos_id"], meta["vocab_size"], meta["shard_tokens"]
        dtype = np.dtype(meta["dtype"]).newbyteorder("<")
        self._shards = [np.memmap(path / shard, dtype=dtype, mode="r") for shard in facts["shards"]]
        self._path = path
        self._shard_names: list[str] = facts["shards"]
        self._pieces: dict[int, Int64s] = {}

    def num_rows(self, sequence_len: int) -> int:
        """Counts the rows of an epoch; of a stream, every token but the last is once an input, all but the first once a target."""
        if self._packing == "best-fit":
            return int(self.pieces(sequence_len)[-1, 0]) + 1
        return -(-(self.num_tokens - 1) // sequence_len)

    def pieces(self, sequence_len: int) -> Int64s:
        """Returns where packed rows lie, (documents, 3) int64, mapped: row, first token, number of tokens; made at the first call.

        Raises PacelineError where the file cannot be written.
        """
        path = self._path / f"{self._name}.best_fit_{sequence_len}.npy"
        if sequence_len not in self._pieces:
            if not path.exists():
                starts = np.load(self._docs)
                packed = pack_best_fit(np.diff(starts, append=self.num_tokens), capacity=sequence_len + 1)
                save_whole(path, np.column_stack((packed[0], starts[packed[1]], packed[2])))
            self._pieces[sequence_len] = np.load(path, mmap_mode="r")
        return self._pieces[sequence_len]

    def left_out(self, sequence_len: int) -> float:
        """Returns the share of tokens that are in no row."""
        if self._packing == "stream":
            return 0.0
        return 1 - int(self.pieces(sequence_len)[:, 2].sum()) / self.num_tokens

    def row(self, row: int, sequence_len: int) -> npt.NDArray[Any]:
        """Returns the tokens of a row, (T + 1,), or fewer in the last ones."""
        if self._packing == "stream":
            return self.tokens(row * sequence_len, (row + 1) * sequence_len + 1)
        pieces = self.pieces(sequence_len)
        first, end = np.searchsorted(pieces[:, 0], (row, row + 1))
        return np.concatenate([self.tokens(start, start + length) for _, start, length in pieces[first:end].tolist()])

    def rows(self, row_indices: Int64s, sequence_len: int) -> tuple[Int64s, Int64s]:
        """Returns idx and targets, both (n, T) int64; a short last row is filled with bos in idx and -1 in targets.

        Raises BadToken for a token outside the vocabulary.
        """
        idx = np.full((len(row_indices), sequence_len), self._bos_id, dtype=np.int64)
        targets = np.full((len(row_indices), sequence_len), IGNORED, dtype=np.int64)
        for n, row in enumerate(row_indices.tolist()):
            assert 0 <= row < self.num_rows(sequence_len)
            tokens = self.row(row, sequence_len)
            idx[n, : len(tokens) - 1] = tokens[:-1]
            targets[n, : len(tokens) - 1] = tokens[1:]
        if len(idx) and (idx.max() >= self._vocab_size or targets.max() >= self._vocab_size):
            worst = np.maximum(idx, targets).max(axis=1)
            row, token = int(row_indices[worst.argmax()]), int(worst.max())
            raise BadToken(self._path, row=row, token=token, vocab_size=self._vocab_size)
        return idx, targets

    def files_of(self, row_indices: Int64s, sequence_len: int) -> list[str]:
        """Returns the names of the shards that hold these rows; those of packed rows lie anywhere."""
        if self._packing == "best-fit":
            return self._shard_names
        first = row_indices * sequence_len // self._shard_tokens
        last = np.minimum((row_indices + 1) * sequence_len, self.num_tokens - 1) // self._shard_tokens
        return [self._shard_names[n] for n in sorted({*first.tolist(), *last.tolist()})]

    def tokens(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Returns tokens start to stop, or to the end; all shards but the last are shard_tokens long."""
        stop = min(stop, self.num_tokens)
        pieces = []
        while start < stop:
            shard, offset = divmod(start, self._shard_tokens)
            piece = self._shards[shard][offset : offset + stop - start]
            pieces.append(piece)
            start += len(piece)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def pack_best_fit(lengths: Int64s, *, capacity: int) -> tuple[Int64s, Int64s, Int64s]:
    """Packs documents into rows that each begin with one: nanochat's best fit, whose rows have no padding.

    Of the next 1,000 documents the longest that fits whole comes next; where none does, the shortest is cut to fill the row, and
    its rest is in no row. Every document has one piece. The last row may be short. Returns row, document and number of tokens of
    each piece, (documents,) int64, in the order of the rows. lengths: (documents,) int64, tokens of each; capacity: of a row.
    """
    waiting: list[tuple[int, int]] = []  # length and document, sorted
    documents = iter(enumerate(lengths.tolist()))
    pieces, row, room = np.empty((len(lengths), 3), dtype=np.int64), 0, capacity
    for n in range(len(lengths)):
        for document, length in islice(documents, PACKED_FROM - len(waiting)):
            insort(waiting, (length, document))
        fits = bisect(waiting, (room, len(lengths)))
        length, document = waiting.pop(max(0, fits - 1))
        taken = min(length, room)
        pieces[n] = row, document, taken
        room -= taken
        if room == 0:
            row, room = row + 1, capacity
    return pieces[:, 0], pieces[:, 1], pieces[:, 2]


def save_whole(path: Path, array: npt.NDArray[Any]) -> None:
    """Writes an array that is there whole or not at all; of several processes that write the same, one does it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            np.lib.format.write_array(file, array, version=(1, 0), allow_pickle=False)
        partial.rename(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise cannot_write(path, error) from error


def rows_of_step(step: int, *, rows_per_step: int, num_rows: int, seed: int) -> Int64s:
    """Returns the rows of step `step`, counted from 0, (rows_per_step,) int64. Every row comes exactly once in an epoch.

    A step may end one epoch and begin the next; with fewer rows than rows_per_step it holds several epochs.
    """
    assert step >= 0 and rows_per_step >= 1 and 1 <= num_rows <= MAX_ROWS
    positions = np.arange(step * rows_per_step, (step + 1) * rows_per_step, dtype=np.uint64)
    epochs, places = np.divmod(positions, np.uint64(num_rows))
    # a key for each (seed, epoch); the seed is mixed first, so seed 1 epoch 0 is not seed 0 epoch 1
    seeds = np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)  # an array: numpy warns when a scalar wraps
    keys = _mix(_mix(seeds + np.uint64(GOLDEN)) + epochs)
    return _permute(places, keys, num_rows=num_rows).astype(np.int64)


def batch_of_step(step: int, skipped_batches: Collection[int]) -> int:
    """Returns the batch that step `step` takes: batch b holds the rows of step b of a run that skips none.

    Later steps move up by one for each skipped batch. Steps before the first skipped batch keep theirs, so a run that returns to a
    checkpoint and skips a later batch equals a run that had skipped it from the start.
    """
    batch = step
    for skipped in sorted(set(skipped_batches)):
        batch += skipped <= batch
    return batch


def _permute(places: UInt64s, keys: UInt64s, *, num_rows: int) -> UInt64s:
    """Maps each place in [0, num_rows) to another, by the permutation of its key."""
    columns = math.isqrt(num_rows - 1) + 1
    lines = -(-num_rows // columns)  # lines * columns exceeds num_rows by less than one line
    permuted = _feistel(places, keys, lines=lines, columns=columns)
    while (outside := np.flatnonzero(permuted >= num_rows)).size:
        permuted[outside] = _feistel(permuted[outside], keys[outside], lines=lines, columns=columns)
    return permuted


def _feistel(places: UInt64s, keys: UInt64s, *, lines: int, columns: int) -> UInt64s:
    """Applies a bijection of [0, lines * columns): each round shifts one coordinate by a hash of the other."""
    line, column = np.divmod(places, np.uint64(columns))
    for number in range(1, ROUNDS + 1):
        round_keys = keys + np.uint64(number * GOLDEN & 0xFFFFFFFFFFFFFFFF)
        if number % 2:
            line = (line + _mix(round_keys ^ column) % np.uint64(lines)) % np.uint64(lines)
        else:
            column = (column + _mix(round_keys ^ line) % np.uint64(columns)) % np.uint64(columns)
    return line * np.uint64(columns) + column


def _mix(x: UInt64s) -> UInt64s:
    """Applies the finalizer of SplitMix64: every bit of the result depends on every bit of x."""
    x = (x ^ (x >> np.uint64(30))) * MIX_1
    x = (x ^ (x >> np.uint64(27))) * MIX_2
    return x ^ (x >> np.uint64(31))
