"""
Writes token shards: one thread in the order of the documents, while other threads encode batches of them.

The tokenizer releases the interpreter meanwhile. The bytes are the same for any number of workers, memory is bounded by the batches
under way, and there is no child process to clean up after Ctrl-C. The folder is written next to its final
place and renamed at the end, under a lock, so a killed process leaves no half folder and a second one meets none.
"""

import hashlib
import os
import shutil
import sys
import time
from array import array
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from paceline.data.corpus import META, Progress, held_out_below, part_bytes_of, read_corpus
from paceline.data.readers import Document, ReadNotes, SourceFile
from paceline.data.tokenizer import TOKENIZER_FILE, Tokenizer, train_tokenizer_on
from paceline.file_systems import NoLocks, cannot_write, try_lock
from paceline.rundir import utc_now
from paceline.units import format_number_of

Batch = tuple[list[Document], list[npt.NDArray[Any]], float]  # documents, the tokens of each, source bytes read so far
# of text encoded at a time: enough to keep cores busy, little enough that Ctrl-C is answered at once
BATCH_BYTES = 512 << 10


@contextmanager
def new_folder(path: Path, *, progress: Progress | None) -> Iterator[Path | None]:
    """Yields a folder to fill, which becomes `path` if the block succeeds; None if another process has made `path` meanwhile."""
    making = path.with_name(f".{path.name}.making")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(making, progress=progress):
            if (path / META).exists():
                yield None
                return
            for other in path.parent.glob(".*.making"):  # of other texts too: no later command may ever need those
                # a PermissionError: the lock of another user with umask 077
                with suppress(NoLocks, PermissionError), _open_lock(other) as file:
                    if other != making and try_lock(file):  # its process was killed
                        shutil.rmtree(other, ignore_errors=True)
            shutil.rmtree(making, ignore_errors=True)
            shutil.rmtree(path, ignore_errors=True)  # without META it is half a folder
            try:
                making.mkdir()
                yield making
                making.rename(path)
            except BaseException:
                shutil.rmtree(making, ignore_errors=True)
                raise
    except OSError as error:
        raise cannot_write(path, error) from error


@contextmanager
def _locked(making: Path, *, progress: Progress | None) -> Iterator[None]:
    """Holds the folder's lock; the lock file stays, since removing it would let two processes lock two files of one name."""
    with _open_lock(making) as file:
        try:
            if not try_lock(file):
                if progress is not None:
                    progress("wait for another process that prepares the same text", 0, 1)
                try_lock(file, wait=True)
        except NoLocks:
            print(f"note    {making.parent} has no locks: prepare one text at a time", file=sys.stderr)
        yield


def _open_lock(making: Path) -> IO[str]:
    """Opens the lock file of a folder, which may be another user's where a cache is shared: reading is enough to lock it."""
    path = making.with_suffix(".lock")
    try:
        return path.open("a")
    except PermissionError:
        if not path.exists():
            raise
        return path.open()


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
    digests: set[int] = set()  # of files that are held out
    num_shared = 0
    with closing(batches):
        for documents, batch_ids, done in batches:
            lossless = lossless and tokenizer.decode(batch_ids[0][1:].tolist()) == documents[0].text
            for document, ids in zip(documents, batch_ids, strict=True):
                is_held_out = document.is_held_out or document.digest < below
                writers["val" if is_held_out else "train"].append(ids, num_bytes=document.num_bytes)
                num_shared += not is_held_out and document.digest in digests
                digests.update([document.digest] if document.is_held_out else [])
            if progress is not None:
                progress("tokenize", done, total)
    splits = {name: writer.close() for name, writer in writers.items()}
    return {
        "num_files": len(files),
        "empty_rows": notes.empty_rows.total(),
        "text_fields": sorted(notes.text_fields),
        "num_split_files": len(notes.marked),  # at <|endoftext|>
        "num_shared_documents": num_shared,
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


def print_notes(source: str, meta: dict[str, Any]) -> None:
    """Says which text was left out or split, to stderr."""
    if meta["empty_rows"]:
        rows = format_number_of(meta["empty_rows"], "row")
        print(f"note    {source}: left out {rows} whose text is null or empty", file=sys.stderr)
    if meta["num_split_files"]:
        split = format_number_of(meta["num_split_files"], ".txt file")
        print(f"note    {source}: {split} split into documents at each <|endoftext|>; .md keeps it", file=sys.stderr)
    if meta["num_shared_documents"]:
        shared = format_number_of(meta["num_shared_documents"], "document")
        print(f"note    {source}: val_bpb comes out too low, as --val-data has {shared} of it too", file=sys.stderr)


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
