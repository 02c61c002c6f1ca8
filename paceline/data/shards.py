"""
Prepared text: token shards on disk, made once, then mapped into memory by every worker.

    <cache_dir>/data/<fingerprint>/
      train_00000.bin ...  val_00000.bin ...   token ids, little-endian uint16, or uint32 when the vocabulary needs it
      train.docs.npy  val.docs.npy             int64: where each document starts, counted in tokens of its split
      tokenizer.json                           the one the ids are of
      meta.json                                sizes, source, and the SHA-256 of every file above

A document is the separator token, then its text. The fingerprint is of the source files' paths, sizes and times, the
tokenizer and the settings, so a look at the file system alone says whether a prepared folder is still right: that look
is on the way to the first step, so this module imports neither numpy nor the tokenizers. writer.py makes the folder and
rows.py maps it, each loaded when there is such work.
"""

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paceline.data.corpus import Progress, list_files
from paceline.data.readers import SourceFile
from paceline.data.tokenizer import Tokenizer, read_tokenizer_file
from paceline.errors import PacelineError
from paceline.rundir import write_atomic

if TYPE_CHECKING:
    from paceline.data.rows import TokenSplit

FORMAT_VERSION = 1  # of the folder, and of how text becomes tokens: a new one prepares everything anew
SHARD_TOKENS = 1 << 27
META = "meta.json"
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class TokenDataset:
    """A prepared folder: what its meta.json says, and the way to its tokens."""

    path: Path
    meta: dict[str, Any]
    reused: bool = True  # False from the `prepare` that wrote it

    @property
    def tokenizer_json(self) -> Path:
        return self.path / TOKENIZER

    @property
    def vocab_size(self) -> int:
        return int(self.meta["vocab_size"])

    @property
    def bos_id(self) -> int:
        return int(self.meta["bos_id"])

    def split(self, name: Literal["train", "val"]) -> "TokenSplit":
        from paceline.data.rows import TokenSplit

        return TokenSplit(self.path, name, self.meta)


def prepare(
    source: str,
    *,
    tokenizer: Path | None,
    vocab_size: int,
    cache_dir: Path,
    num_workers: int | None = None,
    progress: Progress | None = None,
    shard_tokens: int = SHARD_TOKENS,
) -> TokenDataset:
    """The dataset of this source, made if it is not there yet or the source changed.

    Without a tokenizer one of vocab_size is trained on the training split. The folder appears whole or not at all; of
    several processes that ask at once, one makes it and the others wait.
    """
    files = list_files(source)
    tokenizer_json = None if tokenizer is None else read_tokenizer_file(tokenizer)
    ids_of = f"trained {vocab_size}" if tokenizer_json is None else hashlib.sha256(tokenizer_json).hexdigest()
    settings = {"tokenizer": ids_of, "shard_tokens": shard_tokens}
    path = cache_dir.expanduser() / "data" / make_fingerprint(files, settings)
    if (path / META).exists():
        return open_dataset(path)

    from paceline.data.writer import new_folder, write_dataset

    given = None if tokenizer_json is None else Tokenizer(tokenizer_json, name=str(tokenizer))
    with new_folder(path, progress=progress) as folder:
        if folder is None:  # another process made it while this one waited
            return open_dataset(path)
        meta = write_dataset(
            folder,
            files=files,
            tokenizer=given,
            vocab_size=vocab_size,
            num_workers=num_workers,
            shard_tokens=shard_tokens,
            progress=progress,
        )
        if make_fingerprint(list_files(source), settings) != path.name:
            raise PacelineError(
                f"the files of {source} changed while they were read",
                fix="wait until what writes them is done, then run the same command again",
            )
        meta = {"format_version": FORMAT_VERSION, "fingerprint": path.name, "source": source} | meta
        write_atomic(folder / META, json.dumps(meta, indent=1) + "\n")
    return replace(open_dataset(path), reused=False)


def make_fingerprint(files: list[SourceFile], settings: dict[str, Any]) -> str:
    """16 hex digits that change when the prepared folder would; no file is opened."""
    listed = [[file.path, file.config, file.stamp] for file in files]
    content = json.dumps([FORMAT_VERSION, settings, listed], ensure_ascii=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def open_dataset(path: Path) -> TokenDataset:
    """A prepared folder, for any process. Cheap: looks at file sizes; `verify` reads the contents."""
    try:
        meta = json.loads((path / META).read_bytes())
        version, files = meta["format_version"], meta["files"]
        if version != FORMAT_VERSION:
            raise PacelineError(
                f"{path} was prepared in format {version}, this paceline reads {FORMAT_VERSION}", fix=_again(path)
            )
        for name, facts in files.items():
            size = (path / name).stat().st_size
            if size != facts["bytes"]:
                raise PacelineError(
                    f"{path / name} is damaged: {size:,} bytes long instead of {facts['bytes']:,}", fix=_again(path)
                )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PacelineError(f"{path / META} is damaged", fix=_again(path)) from error
    except FileNotFoundError as error:
        if not (path / META).exists():
            raise PacelineError(
                f"{path} is not prepared text: it has no {META}", fix="prepare it: paceline data prepare SOURCE"
            ) from error
        raise PacelineError(f"{error.filename} is missing", fix=_again(path)) from error
    except OSError as error:
        raise PacelineError(
            f"cannot read {path}: {error.strerror}", fix="check its permissions and the disk"
        ) from error
    return TokenDataset(path=path, meta=meta)


def verify(dataset: TokenDataset, *, files: Collection[str] | None = None, progress: Progress | None = None) -> None:
    """Reads every file again, or those named, and holds it against its hash in meta.json; raises at the first that differs."""
    chosen = {name: facts for name, facts in dataset.meta["files"].items() if files is None or name in files}
    total = sum(facts["bytes"] for facts in chosen.values())
    done = 0
    for name, facts in chosen.items():
        try:
            with (dataset.path / name).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise PacelineError(
                f"cannot read {dataset.path / name}: {error.strerror}", fix=_again(dataset.path)
            ) from error
        if found != facts["sha256"]:
            raise PacelineError(
                f"{dataset.path / name} is damaged: its SHA-256 is {found[:12]}..., not {facts['sha256'][:12]}...",
                fix=_again(dataset.path),
            )
        done += facts["bytes"]
        if progress is not None:
            progress("verify", done, total)


def data_info(dataset: TokenDataset) -> dict[str, Any]:
    """What `paceline data info` prints: meta.json with the ratios worked out."""
    meta = dataset.meta
    splits = {
        name: facts | {"bytes_per_token": facts["num_bytes"] / facts["num_tokens"]}
        for name, facts in meta["splits"].items()
    }
    num_tokens = sum(facts["num_tokens"] for facts in splits.values())
    num_bytes = sum(facts["num_bytes"] for facts in splits.values())
    return meta | {
        "path": str(dataset.path),
        "splits": splits,
        "num_tokens": num_tokens,
        "num_bytes": num_bytes,
        "num_documents": sum(facts["num_documents"] for facts in splits.values()),
        "bytes_per_token": num_bytes / num_tokens,
        "held_out_share": splits["val"]["num_bytes"] / num_bytes,
        "disk_bytes": sum(facts["bytes"] for facts in meta["files"].values()),
    }


def _again(path: Path) -> str:
    return f"delete it and run the same command again, which prepares it anew: rm -r '{path}'"
