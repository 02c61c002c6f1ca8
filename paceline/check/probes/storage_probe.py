"""
The folders that a run writes to and reads from, its text and its tokenizer: `python -m paceline.check.probes.storage_probe [text]`.

Two probes in two processes. The first measures space, rights, file system and speed. Rights are tested by really writing; what is
written has no name in any folder or loses it at once, and a missing folder is judged by its nearest parent. The second reads file
names, sizes and times of the text. `prepared` says whether a run would find it prepared, by the fingerprint of data/prepare.py.
"""

import difflib
import errno
import hashlib
import json
import os
import random
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from paceline.check.probes.facts import Json, answer
from paceline.data.corpus import NOT_TEXT_TO_LEARN, list_files
from paceline.data.prepare import dataset_path, open_dataset
from paceline.data.readers import FORMATS, SourceFile
from paceline.data.tokenizer import SEPARATORS, tokenizer_vocab_size
from paceline.errors import PacelineError
from paceline.file_systems import read_mounts
from paceline.hub import PREFIX, ask_hub, endpoint, is_cached, is_saved_dataset, missing_packages, parse_source
from paceline.plan.host import names_in

PLACE_DEADLINE_S = 3.0
SPEED_DEADLINE_S = 1.5
WRITE_BYTES, WRITE_S, READ_S = 64 << 20, 0.3, 0.1
CHUNK_BYTES = 2 << 20
MIN_FREE_BYTES = 1 << 30  # with less free space nothing is measured
NETWORK_FILESYSTEMS = {
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "afs", "9p", "panfs", "wekafs",
    "pvfs2", "orangefs", "ocfs2", "gfs2", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.s3fs", "fuse.gcsfuse",
    "fuse.juicefs", "fuse.rclone", "fuse.goofys", "fuse.mount-s3", "fuse.blobfuse2", "fuse.alluxio-fuse", "fuse.seaweedfs",
}  # fmt: skip
LISTING_S = 1.0  # a folder of a million files is not counted to the end
SHOWN_FILES = 3
BUILTIN = "builtin"


def probe_storage(request: Json) -> Json:
    """Returns the facts of the folders. Request: the paths run_dir, data, cache_dir (None: not probed) and measure_disk."""
    paths = {
        "run_dir": request.get("run_dir"),
        "data": local_path(request.get("data")),
        "cache": request.get("cache_dir"),
        "tmp": os.environ.get("TMPDIR") or "/tmp",
    }
    late = f"no answer in {PLACE_DEADLINE_S:.0f} s"
    places = {name: unknown_place(path, error=late) for name, path in paths.items() if path is not None}
    texts: list[list[str]] = []

    def probe(name: str) -> None:
        if name == "cache":
            texts.append(names_in(expanded(places[name]["path"]) / "data"))
        places[name] = probe_place(Path(places[name]["path"]), write=name != "data")

    run_threads([partial(probe, name) for name in places], deadline_s=PLACE_DEADLINE_S)
    if request.get("measure_disk"):
        run_threads([partial(measure_places, places)], deadline_s=SPEED_DEADLINE_S)
    hidden = ("base", "device")
    public = {name: {key: place[key] for key in place if key not in hidden} for name, place in places.items()}
    return {"storage": {**{name: public.get(name) for name in paths}, "texts": next(iter(texts), None)}}


def run_threads(functions: Sequence[Callable[[], None]], *, deadline_s: float) -> None:
    """Runs the functions at once, and waits for them until the deadline: a dead network disk never answers."""
    threads = [threading.Thread(target=function, daemon=True) for function in functions]
    deadline = time.monotonic() + deadline_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def local_path(data: str | None) -> str | None:
    """Returns the path in a data source; None for a source that is not on a disk."""
    if data is None or data == BUILTIN:
        return None
    if not data.startswith(PREFIX):
        return data
    name, *_ = parse_source(data)
    if not name:
        return data  # `hf:` names no dataset: there is no text there
    return name if name.startswith((".", "/", "~")) or Path(name).exists() else None


def unknown_place(path: str, *, error: str | None) -> dict[str, Any]:
    names = (
        "exists", "writable", "total_bytes", "free_bytes", "free_inodes", "filesystem", "network", "write_bytes_per_s",
        "read_bytes_per_s", "base", "device",
    )  # fmt: skip
    return {"path": str(path), **dict.fromkeys(names), "error": error}


def probe_place(path: Path, *, write: bool) -> dict[str, Any]:
    """Returns the facts of one folder. write False: the rights are read from the system, and no file is created."""
    place = unknown_place(str(path), error=None)
    path = Path(os.path.abspath(expanded(path)))  # noqa: PTH100 (a broken link must stay visible)
    base, error = nearest_folder(path)
    place |= {"exists": base == path or os.path.lexists(path), "base": base}
    if error is None and base == path.parent and path.is_file():
        place["exists"] = True
        error = "Not a directory" if write else None
    space = os.statvfs(base)
    filesystem = filesystem_of(base)
    place |= {
        "device": base.stat().st_dev,
        "total_bytes": space.f_blocks * space.f_frsize,
        "free_bytes": space.f_bavail * space.f_frsize,
        "free_inodes": space.f_favail if space.f_files else None,  # btrfs and others have no such count
        "filesystem": filesystem,
        "network": None if filesystem is None else filesystem in NETWORK_FILESYSTEMS,
    }
    if error is None:
        error = write_error(base) if write else access_error(path if place["exists"] else base)
    return place | {"writable": error is None, "error": error}


def nearest_folder(path: Path) -> tuple[Path, str | None]:
    """Returns the nearest existing folder, and the obstacle on the way to the path unless it is merely missing."""
    error = None
    for folder in (path, *path.parents):
        try:
            if folder.is_dir():
                return folder, error
            if folder != path and folder.exists():
                error = "Not a directory"
            elif folder.is_symlink() and not folder.exists():
                error = f"a link to {os.readlink(folder)}, which does not exist"  # noqa: PTH115
        except OSError as problem:
            error = problem.strerror
    return Path("/"), error


def write_error(folder: Path) -> str | None:
    try:
        fd = open_nameless(folder)
        try:
            os.write(fd, b"x" * 4096)
            os.fsync(fd)  # a full network disk reports it only now
        finally:
            os.close(fd)
    except OSError as error:
        return error.strerror
    return None


def access_error(path: Path) -> str | None:
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        return "Read-only file system"
    return None if os.access(path, os.W_OK) else "Permission denied"


def open_nameless(folder: Path) -> int:
    """Opens a new file that is in no folder: nothing is left even if this process is killed."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.EINVAL, errno.EOPNOTSUPP):  # a file system without O_TMPFILE
            raise
    fd, name = tempfile.mkstemp(prefix=".paceline-probe-", dir=folder)
    os.unlink(name)  # noqa: PTH108
    return fd


def filesystem_of(path: Path) -> str | None:
    """Returns the type of the file system: that of the longest mount point on the path, the last of equal ones."""
    real = os.path.realpath(path)
    longest, filesystem = "", None
    for mount in read_mounts():
        inside = real == mount.point or real.startswith(mount.point.rstrip("/") + "/")
        if inside and len(mount.point) >= len(longest):
            longest, filesystem = mount.point, mount.filesystem
    return filesystem


def measure_places(places: dict[str, dict[str, Any]]) -> None:
    """Measures each device once, in the run folder or the cache; folders on the same device have the same speed."""
    measured = set()
    for name in ("run_dir", "cache"):
        place = places.get(name)
        if place and place["writable"] and place["free_bytes"] >= MIN_FREE_BYTES and place["device"] not in measured:
            measured.add(place["device"])
            write_speed, read_speed = measure_disk(place["base"])
            for other in places.values():
                if other["device"] == place["device"]:
                    other |= {"write_bytes_per_s": write_speed, "read_bytes_per_s": read_speed}


def measure_disk(folder: Path) -> tuple[float | None, float | None]:
    """Returns bytes per second of writing, with a sync after each piece, and of reading back past the page cache."""
    content = random.randbytes(CHUNK_BYTES)  # some disks and file systems compress zeros
    try:
        fd = open_nameless(folder)
        try:
            started, piece, written = time.monotonic(), CHUNK_BYTES, 0
            while written < WRITE_BYTES and time.monotonic() - started < WRITE_S:
                for _ in range(piece // CHUNK_BYTES):
                    written += os.write(fd, content)
                os.fdatasync(fd)
                piece = min(2 * piece, WRITE_BYTES - written)  # syncing small pieces would measure the sync
            write_s = time.monotonic() - started
            return written / write_s, read_back(fd, written)
        finally:
            os.close(fd)
    except OSError:
        return None, None


def read_back(fd: int, num_bytes: int) -> float | None:
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    started, done = time.monotonic(), 0
    while done < num_bytes and time.monotonic() - started < READ_S:
        chunk = os.pread(fd, CHUNK_BYTES, done)
        if not chunk:
            return None
        done += len(chunk)
    return done / (time.monotonic() - started)


def probe_text(request: Json) -> Json:
    """Returns the facts of the text and the tokenizer. Request: the config's keys of the text; data may be None."""
    data, val_data, text_field, tokenizer = map(request.get, ("data", "val_data", "text_field", "tokenizer"))
    if data is None and tokenizer is None:
        return {"text": None}
    facts: dict[str, Any] = dict.fromkeys(("exists", "bytes", "prepared", "num_tokens", "error")) | {"data": data}
    if data is not None:
        facts |= probe_source(data)
    if val_data is not None:
        facts["val"] = {"data": val_data, **probe_source(val_data)}
    tokenizer_facts, tokenizer_hash = (None, None) if tokenizer is None else probe_tokenizer(expanded(tokenizer))
    vocab_size = tokenizer_facts["vocab_size"] if tokenizer_facts else request.get("vocab_size")
    if data is not None and request.get("cache_dir"):
        can_exist = facts["exists"] is not False and (tokenizer is None or tokenizer_hash is not None)
        list_text = partial(list_files, data, val_source=val_data, text_field=text_field)
        find = partial(find_prepared, list_text, tokenizer_hash=tokenizer_hash, vocab_size=vocab_size)
        facts |= find(cache_dir=Path(request["cache_dir"])) if can_exist else {"prepared": False}
    sources = [text for text in (data, val_data) if text and text.startswith(PREFIX) and local_path(text) is None]
    if sources and not facts["prepared"]:
        facts["hub"] = probe_hub(sources[0])
    return {"text": {"vocab_size": vocab_size, **facts, "tokenizer": tokenizer_facts}}


def probe_source(data: str) -> dict[str, Any]:
    """Returns exists, bytes and error of a source."""
    if data == BUILTIN:
        return measure_folder(Path(sysconfig.get_path("stdlib")), types=(".py",), skip=NOT_TEXT_TO_LEARN)
    name = local_path(data)
    if name is None:
        name = parse_source(data)[0]
        return {"exists": True if is_cached(name) else None}
    path = expanded(name)
    try:
        status = path.stat()
        if path.is_dir():
            os.listdir(path)
            facts = measure_folder(path, types=() if data.startswith(PREFIX) else tuple(FORMATS), skip={"__pycache__"})
            is_dataset = facts.get("error") and not data.startswith(PREFIX) and is_saved_dataset(path)
            return facts | ({"near": f"{PREFIX}{name}"} if is_dataset else {})
        if not path.is_file():
            return {"exists": True, "error": "not a regular file"}
        with path.open("rb") as file:
            file.read(1)
    except FileNotFoundError:
        if path.is_symlink():
            return {"exists": False, "error": f"a link to {path.readlink()}, which does not exist"}
        return {"exists": False, "near": nearest_neighbour(name)}
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        return {"exists": None, "error": getattr(error, "strerror", None) or str(error)}
    return {"exists": True, "bytes": status.st_size}


def expanded(path: str | Path) -> Path:
    """Returns the path with the home folder in place of `~`; unchanged where that is not known, and so it is missing."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 (a Path raises RuntimeError)


def nearest_neighbour(name: str) -> str | None:
    """Returns what has nearly the same name in the same folder, written as the name is."""
    path = Path(name)
    close = difflib.get_close_matches(path.name, names_in(expanded(path.parent)), n=1, cutoff=0.75)
    return str(path.with_name(close[0])) if close else None


def measure_folder(folder: Path, *, types: tuple[str, ...], skip: set[str]) -> dict[str, Any]:
    """types: suffixes of the files that count, () for all. bytes is None where there are too many files to read in time."""
    num_files, num_bytes, deadline = 0, 0, time.monotonic() + LISTING_S
    others: list[str] = []
    for here, subfolders, names in os.walk(folder):
        subfolders[:] = [name for name in subfolders if name not in skip and not name.startswith(".")]
        for name in names:
            if name.startswith("."):
                continue
            if types and not name.lower().endswith(types):
                others.append(os.path.join(here, name))  # noqa: PTH118
                continue
            try:
                num_files += 1
                num_bytes += os.stat(os.path.join(here, name)).st_size  # noqa: PTH116, PTH118 (a Path would double the time)
            except OSError:
                continue  # a broken link; preparing reports it
        if time.monotonic() > deadline:
            return {"exists": True}
    error = None
    if not num_bytes:
        error = "no text in it: no file of " + " ".join(types) if types else "an empty folder"
        error = "all its text files are empty" if types and num_files else error
    return {
        "exists": True,
        "bytes": num_bytes,
        "num_others": len(others),
        "others": [os.path.relpath(path, folder) for path in sorted(others)[:SHOWN_FILES]],
        "error": error,
    }


def probe_hub(data: str) -> dict[str, Any]:
    """Returns what reading a dataset of the hub needs: packages, a copy in the cache, or an answer of the hub."""
    name = parse_source(data)[0]
    started = time.monotonic()
    status, error = ask_hub(name)
    return {
        "name": name,
        "endpoint": endpoint(),
        "missing_packages": missing_packages(),
        "cached": is_cached(name),
        "status": status,
        "seconds": round(time.monotonic() - started, 3),
        "error": error,
    }


def probe_tokenizer(path: Path) -> tuple[dict[str, Any], str | None]:
    """Returns path, exists, vocab_size and error of the tokenizer, and the hash of its file."""
    facts: dict[str, Any] = {"path": str(path), "exists": None, "vocab_size": None, "error": None}
    try:
        if path.is_dir():
            return facts | {"exists": True, "error": "it is a folder, not the file in it"}, None
        if not path.is_file():
            return facts | {"exists": path.exists(), "error": "not a regular file" if path.exists() else None}, None
        content = path.read_bytes()
    except OSError as error:
        return facts | {"error": error.strerror}, None
    try:
        vocab_size, has_separator = tokenizer_vocab_size(parsed := json.loads(content)), False
        if vocab_size:
            added = [token.get("content") for token in parsed.get("added_tokens") or []]
            tokens = (token if isinstance(token, str) else token[0] for token in parsed["model"]["vocab"])
            has_separator = not {*tokens, *added}.isdisjoint(SEPARATORS)
        no_separator = None if has_separator else "it has no token to put between documents"
        error_text = no_separator if vocab_size else "not a tokenizer.json"
    except ValueError:
        vocab_size, error_text = None, "not JSON"
    facts |= {"exists": True, "vocab_size": vocab_size, "error": error_text}
    return facts, hashlib.sha256(content).hexdigest()


def find_prepared(
    list_text: Callable[[], list[SourceFile]], *, tokenizer_hash: str | None, vocab_size: int | None, cache_dir: Path
) -> Json:
    """Returns whether a run would find this text prepared and whole, its folder there, its vocabulary, and the tokens it trains on.

    None where its files are too many to list in time.
    """
    results: list[Json] = []

    def find() -> None:
        try:
            path = dataset_path(list_text(), tokenizer_hash=tokenizer_hash, vocab_size=vocab_size, cache_dir=cache_dir)
            meta = open_dataset(path).meta
            facts: Json = {"num_tokens": meta["splits"]["train"]["num_tokens"], "folder": path.name}
            facts["prepared_bytes"] = sum(file["bytes"] for file in meta["files"].values())
            facts["vocab_size"] = meta["vocab_size"]
        except (PacelineError, KeyError):
            results.append({"prepared": False})
        else:
            results.append({"prepared": True, **facts})

    run_threads([find], deadline_s=LISTING_S)
    return next(iter(results), {"prepared": None})


if __name__ == "__main__":
    answer(probe_text if sys.argv[1:] == ["text"] else probe_storage)
