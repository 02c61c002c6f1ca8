"""
Token shards: writing them, choosing the rows of a step, and reading those rows. Row r begins at token r * T of its split, or
holds the documents that best-fit packing put into it.

The rows of step s are a pure function of (seed, s). Each epoch is a permutation of all rows, computed for just the requested
positions: no shuffled list in memory, no state to save, the same rows whatever the world size. Integer arithmetic only, so every
platform gives the same rows. The permutation is a Feistel network on a grid of rows x columns just larger than num_rows, and
what falls outside is permuted again until it is inside: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002 (the
generalized Feistel and cycle walking). The round function is the finalizer of SplitMix64 (Steele et al., OOPSLA 2014).

Shards are mapped, not read: the workers of a host share one copy in the page cache. They are written by one thread, in the order of
the documents, while other threads encode batches of them (the tokenizer releases the interpreter meanwhile): same bytes for any
number of workers, memory bounded by the batches under way, and no child process to clean up after Ctrl-C.
"""

import hashlib
import math
import os
import shlex
import time
from array import array
from bisect import bisect, insort
from collections import deque
from collections.abc import Collection, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.data.corpus import Progress, cannot_write, held_out_below, part_bytes_of, read_corpus
from paceline.data.readers import Document, ReadNotes, SourceFile
from paceline.data.tokenizer import TOKENIZER_FILE, Tokenizer, train_tokenizer_on
from paceline.errors import PacelineError
from paceline.rundir import utc_now

# T tokens in a row, n requested rows

Batch = tuple[list[Document], list[npt.NDArray[Any]], float]  # documents, the tokens of each, source bytes read so far
Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]

# of text encoded at a time: enough to keep cores busy, little enough that Ctrl-C is answered at once
BATCH_BYTES = 512 << 10
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


def write_dataset(
    folder: Path,
    *,
    files: list[SourceFile],
    tokenizer: Tokenizer | None,
    vocab_size: int,
    num_workers: int | None,
    shard_tokens: int,
    progress: Progress | None,
) -> dict[str, Any]:
    """Fills the folder with all files but meta.json, and returns the content of that."""
    start = time.monotonic()
    part_bytes = part_bytes_of(files)
    below = held_out_below(files, part_bytes=part_bytes)
    if tokenizer is None:
        tokenizer = train_tokenizer_on(files, vocab_size=vocab_size, below=below, progress=progress)
    trained = time.monotonic()
    tokenizer_file = HashedFile(folder / TOKENIZER_FILE)
    tokenizer_file.write(tokenizer.json_bytes)
    tokenizer_entry = tokenizer_file.close()
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    writers = {name: SplitWriter(folder, name, shard_tokens=shard_tokens) for name in ("train", "val")}
    total = sum(file.num_bytes for file in files)
    lossless = True  # as far as the first document of each batch shows
    notes = ReadNotes()
    corpus = read_corpus(files, part_bytes=part_bytes, notes=notes)
    batches = _encoded(corpus, tokenizer, num_workers=num_workers, dtype=dtype)
    with closing(batches):
        for documents, batch_ids, done in batches:
            lossless = lossless and tokenizer.decode(batch_ids[0][1:].tolist()) == documents[0].text
            for document, ids in zip(documents, batch_ids, strict=True):
                writers["val" if document.digest < below else "train"].append(ids, num_bytes=document.num_bytes)
            if progress is not None:
                progress("tokenize", done, total)
    splits = {name: writer.close() for name, writer in writers.items()}
    return {
        "num_files": len(files),
        "empty_rows": notes.empty_rows.total(),
        "text_fields": sorted(notes.text_fields),
        "num_split_files": len(notes.marked),  # at <|endoftext|>
        "tokenizer_hash": tokenizer.hash,
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos_id,
        "lossless": lossless,
        "dtype": dtype.name,
        "shard_tokens": shard_tokens,
        "part_bytes": part_bytes,
        "splits": splits,
        "files": {TOKENIZER_FILE: tokenizer_entry, **writers["train"].files, **writers["val"].files},
        "created": utc_now(),
        "train_tokenizer_s": round(trained - start, 3),
        "tokenize_s": round(time.monotonic() - trained, 3),
    }


class SplitWriter:
    """Writes the shards of one split, one after the other, hashed as they are written."""

    def __init__(self, folder: Path, split: str, *, shard_tokens: int):
        self._folder, self._split, self._shard_tokens = folder, split, shard_tokens
        self._shard: HashedFile | None = None
        self._capacity = 0  # tokens that still fit in the open shard
        self._shards: list[str] = []
        self._starts = array("q")
        self._num_tokens = self._num_bytes = 0
        self.files: dict[str, dict[str, Any]] = {}

    def append(self, ids: npt.NDArray[Any], *, num_bytes: int) -> None:
        """Writes a document. ids: (n,) in the shards' dtype; num_bytes: of its text."""
        self._starts.append(self._num_tokens)
        self._num_tokens += len(ids)
        self._num_bytes += num_bytes
        while len(ids):
            if self._shard is None or self._capacity == 0:
                self._close_shard()
                self._shard = HashedFile(self._folder / f"{self._split}_{len(self._shards):05d}.bin")
                self._shards.append(self._shard.path.name)
                self._capacity = self._shard_tokens
            self._shard.write(ids[: self._capacity].tobytes())
            written = min(self._capacity, len(ids))
            self._capacity -= written
            ids = ids[written:]

    def close(self) -> dict[str, Any]:
        """Ends the last shard, writes the documents' starts, and returns the split's entry of meta.json."""
        self._close_shard()
        docs = HashedFile(self._folder / f"{self._split}.docs.npy")
        starts = np.array(self._starts, dtype=np.int64)
        np.lib.format.write_array(docs, starts, version=(1, 0), allow_pickle=False)
        self.files[docs.path.name] = docs.close()
        return {
            "num_documents": len(self._starts),
            "num_tokens": self._num_tokens,
            "num_bytes": self._num_bytes,
            "shards": self._shards,
            "docs": docs.path.name,
        }

    def _close_shard(self) -> None:
        if self._shard is not None:
            self.files[self._shard.path.name] = self._shard.close()
            self._shard = None


class HashedFile:
    """A new file that computes the SHA-256 of what is written to it; prepare turns its OSErrors into errors with a fix."""

    def __init__(self, path: Path):
        self.path = path
        self._file = path.open("xb", buffering=1 << 20)
        self._hash = hashlib.sha256()

    def write(self, content: bytes) -> None:
        """Appends to the file and to its hash."""
        self._file.write(content)
        self._hash.update(content)

    def close(self) -> dict[str, Any]:
        """Syncs the file and returns its size and hash."""
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
            return {"bytes": self._file.tell(), "sha256": self._hash.hexdigest()}


def _encoded(
    corpus: Iterator[tuple[Document, float]], tokenizer: Tokenizer, *, num_workers: int | None, dtype: np.dtype[Any]
) -> Generator[Batch, None, None]:
    """Yields batches in the order of the documents, while several are being encoded."""

    def encode(documents: list[Document], done: float) -> Batch:
        texts = [document.text for document in documents]
        ids = [np.array([tokenizer.bos_id, *ids], dtype=dtype) for ids in tokenizer.encode_batch(texts)]
        return documents, ids, done

    num_workers = num_workers or os.cpu_count() or 1
    under_way: deque[Future[Batch]] = deque()
    documents: list[Document] = []
    num_bytes, done = 0, 0.0
    with ThreadPoolExecutor(num_workers) as pool:
        try:
            for document, done in corpus:
                documents.append(document)
                num_bytes += document.num_bytes
                if num_bytes >= BATCH_BYTES:
                    under_way.append(pool.submit(encode, documents, done))
                    documents, num_bytes = [], 0
                    if len(under_way) > num_workers:
                        yield under_way.popleft().result()
            if documents:
                under_way.append(pool.submit(encode, documents, done))
            while under_way:
                yield under_way.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


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
