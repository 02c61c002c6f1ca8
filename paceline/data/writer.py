"""
Makes a prepared folder: text in, token shards out, whole or not at all.

One thread reads documents in order, threads of the `tokenizers` library encode batches of them (it releases the
interpreter meanwhile), and the first thread writes the results in order: same bytes for any number of workers, memory
bounded by the batches under way, and no child process to clean up after Ctrl-C. The folder is written beside its final
place and renamed at the end, under a lock, so neither a kill nor a second process leaves or meets half of one.
"""

import errno
import fcntl
import hashlib
import os
import shutil
import time
from array import array
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from paceline.data.corpus import Progress, held_out_below, part_bytes_of, read_corpus
from paceline.data.readers import Document, SourceFile
from paceline.data.shards import META, TOKENIZER
from paceline.data.tokenizer import Tokenizer, train_tokenizer, training_texts
from paceline.errors import PacelineError
from paceline.rundir import utc_now
from paceline.units import format_bytes

BATCH_BYTES = 512 << 10  # of text: large enough to keep cores busy, small enough that Ctrl-C is answered at once
MAX_UINT16_VOCAB = 1 << 16


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
    """Fills the folder with all but meta.json, and returns what that must say of it."""
    start = time.monotonic()
    part_bytes = part_bytes_of(files)
    below = held_out_below(files, part_bytes=part_bytes)
    if tokenizer is None:
        texts = training_texts(files, part_bytes=part_bytes, below=below, progress=progress)
        tokenizer = train_tokenizer(texts, vocab_size=vocab_size)
    trained = time.monotonic()
    tokenizer.save(folder / TOKENIZER)

    dtype = np.dtype("<u2" if tokenizer.vocab_size <= MAX_UINT16_VOCAB else "<u4")
    writers = {name: SplitWriter(folder, name, dtype=dtype, shard_tokens=shard_tokens) for name in ("train", "val")}
    total = sum(file.num_bytes for file in files)
    batches = _encoded(files, tokenizer, part_bytes=part_bytes, num_workers=num_workers, dtype=dtype)
    with closing(batches):
        for batch in batches:
            for document, ids in zip(batch.documents, batch.ids, strict=True):
                writers["val" if document.digest < below else "train"].append(ids, num_bytes=document.num_bytes)
            if progress is not None:
                progress("tokenize", batch.done, total)
    splits = {name: writer.close() for name, writer in writers.items()}
    hashes = {TOKENIZER: {"bytes": len(tokenizer.json_bytes), "sha256": tokenizer.hash}}
    for writer in writers.values():
        hashes |= writer.files
    return {
        "num_files": len(files),
        "tokenizer_hash": tokenizer.hash,
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos_id,
        "dtype": dtype.name,
        "shard_tokens": shard_tokens,
        "part_bytes": part_bytes,
        "splits": splits,
        "files": hashes,
        "created": utc_now(),
        "train_tokenizer_s": round(trained - start, 3),
        "tokenize_s": round(time.monotonic() - trained, 3),
    }


class SplitWriter:
    """The shards of one split, one after the other, hashed as they are written."""

    def __init__(self, folder: Path, split: str, *, dtype: np.dtype[Any], shard_tokens: int):
        self._folder, self._split, self._dtype, self._shard_tokens = folder, split, dtype, shard_tokens
        self._shard: HashedFile | None = None
        self._left = 0  # tokens that still fit in the open shard
        self._shards: list[str] = []
        self._starts = array("q")
        self._num_tokens = self._num_bytes = 0
        self.files: dict[str, dict[str, Any]] = {}

    def append(self, ids: npt.NDArray[Any], *, num_bytes: int) -> None:
        self._starts.append(self._num_tokens)
        self._num_tokens += len(ids)
        self._num_bytes += num_bytes
        while len(ids):
            if self._left == 0:
                self._next_shard()
            assert self._shard is not None
            self._shard.write(ids[: self._left].tobytes())
            written = min(self._left, len(ids))
            self._left -= written
            ids = ids[written:]

    def close(self) -> dict[str, Any]:
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

    def _next_shard(self) -> None:
        self._close_shard()
        self._shard = HashedFile(self._folder / f"{self._split}_{len(self._shards):05d}.bin")
        self._shards.append(self._shard.path.name)
        self._left = self._shard_tokens

    def _close_shard(self) -> None:
        if self._shard is not None:
            self.files[self._shard.path.name] = self._shard.close()
            self._shard = None


class HashedFile:
    """A new file that knows the SHA-256 of what was written to it. Its errors are the folder's: see new_folder."""

    def __init__(self, path: Path):
        self.path = path
        self._file = path.open("xb", buffering=1 << 20)
        self._hash = hashlib.sha256()
        self._num_bytes = 0

    def write(self, content: bytes) -> None:
        self._file.write(content)
        self._hash.update(content)
        self._num_bytes += len(content)

    def close(self) -> dict[str, Any]:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return {"bytes": self._num_bytes, "sha256": self._hash.hexdigest()}


@dataclass(frozen=True)
class Batch:
    """Documents in a row with their tokens."""

    documents: list[Document]
    ids: list[npt.NDArray[Any]]
    done: float  # source bytes read up to here


@contextmanager
def new_folder(path: Path, *, progress: Progress | None) -> Iterator[Path | None]:
    """A folder to fill, which becomes `path` when the block ends well and is removed when it does not.

    None when another process made `path` while this one waited for the lock.
    """
    making = path.with_name(f".{path.name}.making")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(making, progress=progress):
            if (path / META).exists():
                yield None
                return
            _remove_left_overs(path.parent, but=making)
            shutil.rmtree(making, ignore_errors=True)
            shutil.rmtree(path, ignore_errors=True)  # without meta.json it is not a prepared folder
            try:
                making.mkdir()
                yield making
                making.rename(path)
            except BaseException:
                shutil.rmtree(making, ignore_errors=True)
                raise
    except OSError as error:
        raise _cannot_write(path, error) from error


@contextmanager
def _locked(making: Path, *, progress: Progress | None) -> Iterator[None]:
    """Its lock file stays: removing it would let two processes hold locks on two files of one name."""
    with making.with_suffix(".lock").open("a") as file:
        if not _try_lock(file):
            if progress is not None:
                progress("wait for another process that prepares the same text", 0, 1)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_left_overs(folder: Path, *, but: Path) -> None:
    """What killed processes left half made, of other texts too: nobody may ever ask for those again."""
    for making in folder.glob(".*.making"):
        if making != but:
            with making.with_suffix(".lock").open("a") as file:
                if _try_lock(file):
                    shutil.rmtree(making, ignore_errors=True)


def _try_lock(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _cannot_write(path: Path, error: OSError) -> PacelineError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = format_bytes(shutil.disk_usage(path.parent).free)
        return PacelineError(
            f"no room to write prepared text into {path.parent}: {error.strerror} ({free} free)",
            fix="free some space there (folders under it may be deleted, they are made again), or raise the quota",
        )
    return PacelineError(
        f"cannot write prepared text into {path.parent}: {error.strerror or error}",
        fix=f"make {path.parent} a folder you may write to",
    )


def _encoded(
    files: list[SourceFile], tokenizer: Tokenizer, *, part_bytes: int, num_workers: int | None, dtype: np.dtype[Any]
) -> Generator[Batch, None, None]:
    """Batches in the order of the documents, several being encoded at a time."""

    def encode(documents: list[Document], done: float) -> Batch:
        texts = [document.text for document in documents]
        ids = [np.array([tokenizer.bos_id, *ids], dtype=dtype) for ids in tokenizer.encode_batch(texts)]
        return Batch(documents, ids, done)

    num_workers = num_workers or os.cpu_count() or 1
    under_way: deque[Future[Batch]] = deque()
    with ThreadPoolExecutor(num_workers) as pool:
        try:
            for documents, done in _batches(files, part_bytes=part_bytes):
                under_way.append(pool.submit(encode, documents, done))
                if len(under_way) > num_workers:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _batches(files: list[SourceFile], *, part_bytes: int) -> Iterator[tuple[list[Document], float]]:
    documents: list[Document] = []
    num_bytes, done = 0, 0.0
    for document, done in read_corpus(files, part_bytes=part_bytes):
        documents.append(document)
        num_bytes += document.num_bytes
        if num_bytes >= BATCH_BYTES:
            yield documents, done
            documents, num_bytes = [], 0
    if documents:
        yield documents, done
