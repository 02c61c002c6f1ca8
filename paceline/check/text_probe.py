"""
The text to train on and the tokenizer: there, readable, prepared already? `python -m paceline.check.text_probe`.

Reads file names, sizes and JSON alone. Whether shards are right is for data/shards.py; here `prepared` says whether the
cache holds a folder of this source that is whole and newer than every file of it.
"""

import hashlib
import json
import os
import sysconfig
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from paceline.check.probe import Json, answer
from paceline.check.storage_probe import local_path
from paceline.kernel_files import names_in, read_text

TYPES = (".txt", ".md", ".py", ".txt.gz", ".jsonl", ".jsonl.gz", ".parquet")  # data/corpus.py's FORMATS
NOT_TEXT_TO_LEARN = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}
LOOK_S = 1.0  # a folder of a million files is not counted to the end
BUILTIN, HUB = "builtin", "hf:"


def probe_text(request: Json) -> Json:
    """Request: data (None: no text is needed), tokenizer, vocab_size, cache_dir."""
    data, tokenizer = request.get("data"), request.get("tokenizer")
    if data is None and tokenizer is None:
        return {"text": None}
    facts: dict[str, Any] = {"data": data, "exists": None, "bytes": None, "prepared": None, "error": None}
    newest: float | None = None
    if data is not None:
        found, newest = probe_source(data)
        facts |= found
    tokenizer_facts = None if tokenizer is None else probe_tokenizer(Path(tokenizer).expanduser())
    vocab_size = tokenizer_facts["vocab_size"] if tokenizer_facts else request.get("vocab_size")
    if data is not None and request.get("cache_dir"):
        tokenizer_hash = None if tokenizer is None else file_hash(Path(tokenizer).expanduser())
        facts["prepared"] = facts["exists"] is not False and is_prepared(
            Path(request["cache_dir"]).expanduser() / "data",
            source=data,
            tokenizer_hash=tokenizer_hash,
            vocab_size=vocab_size,
            newest=newest,
        )
    return {"text": {**facts, "vocab_size": vocab_size, "tokenizer": tokenizer_facts}}


def probe_source(data: str) -> tuple[dict[str, Any], float | None]:
    """exists, bytes and error of a source, and when the newest of its files was changed."""
    if data == BUILTIN:
        return measure_folder(Path(sysconfig.get_path("stdlib")), types=(".py",), skip=NOT_TEXT_TO_LEARN)
    name = local_path(data)
    if name is None:
        return {"exists": hub_copy_exists(data) or None}, None  # on the hub, or not; nobody is asked
    path = Path(name).expanduser()
    try:
        status = path.stat()
        if path.is_dir():
            os.listdir(path)
            return measure_folder(path, types=() if data.startswith(HUB) else TYPES, skip={"__pycache__"})
        if not path.is_file():
            return {"exists": True, "error": "not a regular file"}, None
        with path.open("rb") as file:
            file.read(1)
    except FileNotFoundError:
        broken_link = path.is_symlink()
        return {
            "exists": False,
            "error": f"a link to {path.readlink()}, which leads nowhere" if broken_link else None,
        }, None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        return {"exists": None, "error": getattr(error, "strerror", None) or str(error)}, None
    return {"exists": True, "bytes": status.st_size}, status.st_mtime


def measure_folder(folder: Path, *, types: tuple[str, ...], skip: set[str]) -> tuple[dict[str, Any], float | None]:
    """types: of the files that count, () for all. bytes is None where there are more files than a look allows."""
    num_bytes, newest, deadline = 0, 0.0, time.monotonic() + LOOK_S
    for here, subfolders, names in os.walk(folder):
        subfolders[:] = [name for name in subfolders if name not in skip and not name.startswith(".")]
        for name in names:
            if name.startswith(".") or (types and not name.lower().endswith(types)):
                continue
            try:
                status = os.stat(os.path.join(here, name))  # noqa: PTH116, PTH118 (a Path for each would double the time)
            except OSError:
                continue  # a broken link; preparing says so
            num_bytes += status.st_size
            newest = max(newest, status.st_mtime)
        if time.monotonic() > deadline:
            return {"exists": True}, None
    error = None if num_bytes else "no text in it: no file of " + " ".join(types) if types else "an empty folder"
    return {"exists": True, "bytes": num_bytes, "error": error}, newest


def hub_copy_exists(data: str) -> bool:
    """Whether a dataset of the hub was downloaded before."""
    name = data.removeprefix(HUB).partition(":")[0]
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"datasets--{name.replace('/', '--')}"
    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets") / name.replace("/", "___")
    return bool(names_in(hub / "snapshots")) or prepared.is_dir()


def probe_tokenizer(path: Path) -> dict[str, Any]:
    facts: dict[str, Any] = {"path": str(path), "exists": None, "vocab_size": None, "error": None}
    if path.is_dir():
        path = path / "tokenizer.json"
    try:
        if not path.is_file():
            return facts | {"exists": path.exists(), "error": "not a regular file" if path.exists() else None}
        content = json.loads(path.read_bytes())
    except OSError as error:
        return facts | {"error": error.strerror}
    except ValueError:
        return facts | {"exists": True, "error": "not JSON"}
    vocab_size = tokenizer_vocab_size(content)
    return facts | {"exists": True, "vocab_size": vocab_size, "error": None if vocab_size else "not a tokenizer.json"}


def tokenizer_vocab_size(content: Any) -> int | None:
    """Highest token id plus one, as data/tokenizer.py counts it; None for what is no tokenizer.json."""
    try:
        vocab = content["model"]["vocab"]
        ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))  # unigram models list their tokens
        added = [token["id"] for token in content.get("added_tokens") or []]
        return int(max([*ids, *added])) + 1
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def file_hash(path: Path) -> str | None:
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
    except OSError:
        return None


def is_prepared(
    folder: Path, *, source: str, tokenizer_hash: str | None, vocab_size: int | None, newest: float | None
) -> bool | None:
    """Whether one of the prepared folders is of this source, cut by this tokenizer, whole, and newer than the text.

    None where that cannot be told: the text's own age is not known (a dataset of the hub, a folder too large to look
    through), or a smaller vocabulary than asked for was all that the text had.
    """
    found: bool | None = False
    for meta in (read_meta(folder / name) for name in names_in(folder)):
        if meta is None or meta["source"] != source:
            continue
        if newest is not None and datetime.fromisoformat(meta["created"]).timestamp() <= newest:
            continue
        if meta["tokenizer_hash"] == tokenizer_hash if tokenizer_hash else meta["vocab_size"] == vocab_size:
            return None if newest is None else True
        if tokenizer_hash is None and meta["vocab_size"] < (vocab_size or 0):
            found = None
    return found


def read_meta(folder: Path) -> dict[str, Any] | None:
    """meta.json of a prepared folder whose files are all there and as long as it says."""
    try:
        meta: dict[str, Any] = json.loads(read_text(folder / "meta.json") or "")
        sizes = {name: (folder / name).stat().st_size for name in meta["files"]}
        whole = all(sizes[name] == facts["bytes"] for name, facts in meta["files"].items())
        return meta if whole and {"source", "tokenizer_hash", "vocab_size", "created"} <= meta.keys() else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


if __name__ == "__main__":
    answer(probe_text)
