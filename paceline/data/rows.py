"""
Rows of tokens out of prepared shards: row r is the tokens from r * T on, its targets the tokens one later.

Shards are mapped, not read: the workers of a host share one copy in the page cache. Which rows to take is order.py's.
"""

# T tokens in a row, n rows asked for

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import PacelineError

Int64s = npt.NDArray[np.int64]

IGNORED = -1  # a target that does not count


class BadToken(PacelineError):
    """A token that the vocabulary has not: the shard is damaged, or of another tokenizer."""

    def __init__(self, path: Path, *, row: int, token: int, vocab_size: int):
        super().__init__(
            f"row {row:,} of the text in {path} has the token {token:,}, of a vocabulary of {vocab_size:,}",
            fix=f"delete it and run the same command again, which prepares it anew: rm -r '{path}'",
        )


class TokenSplit:
    """The tokens of one split as one long sequence, whatever shards it lies in."""

    def __init__(self, path: Path, name: str, meta: dict[str, Any]):
        facts = meta["splits"][name]
        self.num_tokens: int = facts["num_tokens"]
        self.num_bytes: int = facts["num_bytes"]
        self.num_documents: int = facts["num_documents"]
        self._bos_id: int = meta["bos_id"]
        self._shard_tokens: int = meta["shard_tokens"]
        dtype = np.dtype(meta["dtype"]).newbyteorder("<")
        self._shards = [np.memmap(path / shard, dtype=dtype, mode="r") for shard in facts["shards"]]
        self._path, self._vocab_size = path, meta["vocab_size"]
        self._shard_names: list[str] = facts["shards"]
        self._docs_path = path / facts["docs"]

    def num_rows(self, sequence_len: int) -> int:
        """Rows of an epoch: every token but the last is once an input, every token but the first once a target."""
        return -(-(self.num_tokens - 1) // sequence_len)

    def rows(self, row_indices: Int64s, sequence_len: int) -> tuple[Int64s, Int64s]:
        """idx and targets, both (n, T) int64. The last row may be short: bos fills idx, and targets -1."""
        idx = np.full((len(row_indices), sequence_len), self._bos_id, dtype=np.int64)
        targets = np.full((len(row_indices), sequence_len), IGNORED, dtype=np.int64)
        for n, row in enumerate(row_indices.tolist()):
            assert 0 <= row < self.num_rows(sequence_len)
            tokens = self.tokens(row * sequence_len, (row + 1) * sequence_len + 1)  # (T + 1,), or fewer at the end
            idx[n, : len(tokens) - 1] = tokens[:-1]
            targets[n, : len(tokens) - 1] = tokens[1:]
        if len(idx) and (idx.max() >= self._vocab_size or targets.max() >= self._vocab_size):
            worst = np.maximum(idx, targets).max(axis=1)
            row, token = int(row_indices[worst.argmax()]), int(worst.max())
            raise BadToken(self._path, row=row, token=token, vocab_size=self._vocab_size)
        return idx, targets

    def files_of(self, row_indices: Int64s, sequence_len: int) -> list[str]:
        """The shards that these rows lie in."""
        first = row_indices * sequence_len // self._shard_tokens
        last = np.minimum((row_indices + 1) * sequence_len, self.num_tokens - 1) // self._shard_tokens
        return [self._shard_names[n] for n in sorted({*first.tolist(), *last.tolist()})]

    def tokens(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Tokens start to stop, or to the end; all shards but the last are shard_tokens long."""
        stop = min(stop, self.num_tokens)
        pieces = []
        while start < stop:
            shard, offset = divmod(start, self._shard_tokens)
            piece = self._shards[shard][offset : offset + stop - start]
            pieces.append(piece)
            start += len(piece)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def document_starts(self) -> Int64s:
        """(num_documents,) int64: each document's first token, the separator, counted within the split."""
        starts: Int64s = np.load(self._docs_path)
        return starts
