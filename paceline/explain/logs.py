"""
Explains a log, several logs, a folder of them, or a stream; compressed files are read directly.

One file may hold the output of all ranks, or each rank has its own file, whose name or folder contains the rank. A failed
process may also have written an error file: torch's error.json or paceline's `<rank>.error.json`.
"""

import bz2
import gzip
import json
import lzma
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from paceline.errors import PacelineError
from paceline.explain.explanation import Explanation, Record
from paceline.explain.reader import CHUNK_BYTES, Log, read_log
from paceline.explain.verdict import reach_verdict
from paceline.units import parse_time

MAX_FILES = 20_000
MAX_ERROR_FILE_BYTES = 1 << 20
LOG_NAMES = re.compile(
    r"(?:\.(?:log|txt|out|err|output|stdout|stderr)(?:\.\d+)?(?:\.(?:gz|bz2|xz))?|(?:^|/)(?:stdout|stderr|slurm-\S+|log)|\.[oe]\d+)$"
)
ERROR_NAMES = re.compile(r"(?:^|[._-])error\.json$")
RANK_NAME = re.compile(r"(?:^|[^a-z])(?:rank|worker|process|proc|task)[-_.]?(?P<rank>\d{1,6})(?!\d)", re.IGNORECASE)
RANK_FILE = re.compile(
    r"(?:^|/)(?P<rank>\d{1,5})(?:/(?:stdout|stderr)\.log|\.(?:log|out|err|txt|error\.json)|/error\.json)$"
)
OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
BROKEN_FILE = (OSError, ValueError, KeyError, TypeError, AttributeError)  # raised by an error file of unknown content


def explain(source: Iterable[bytes] | Path | Sequence[Path]) -> Explanation:
    """Explains the chunks of one log, a file, a folder, or several of them."""
    items: Iterable[Any] = [source] if isinstance(source, Path) else source
    if isinstance(items, Sequence) and all(isinstance(item, Path) for item in items):
        return reach_verdict(read_files(find_files(items)))
    return reach_verdict([read_log(items)])


def read_files(files: Sequence[Path]) -> list[Log]:
    """Parses each file as a log; if there are several, records have the file's name as their source."""
    logs = []
    for path, rank in zip(files, ranks_of(files), strict=True):
        if ERROR_NAMES.search(path.name):
            logs += read_error_file(path, rank=rank)
            continue
        source = str(path) if len(files) > 1 else None
        logs.append(read_log(read_chunks(path), rank=rank, source=source))
    return logs


def find_files(paths: Sequence[Path]) -> list[Path]:
    """The paths with each folder replaced by its log files, or by all its text files if none looks like a log."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.is_file())[:MAX_FILES]
            logs = [file for file in inside if LOG_NAMES.search(file.as_posix()) or ERROR_NAMES.search(file.name)]
            logs = logs or [file for file in inside if is_text(file)]
            if not logs:
                raise PacelineError(f"no log in {path}", fix="pass the files: paceline explain FILE ...")
            files += logs
        elif path.exists():
            files.append(path)
        else:
            raise PacelineError(
                f"no such file: {path}", fix="paceline explain LOG, a run's name, or - for standard input"
            )
    return list(dict.fromkeys(files))


def is_text(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return b"\0" not in file.read(4096)
    except OSError:
        return False


def ranks_of(files: Sequence[Path]) -> list[int | None]:
    """The ranks in the names, if the files have different ones; one file alone may hold the output of many ranks."""
    names = ["/".join(path.parts[-2:]) for path in files]
    matches = [RANK_NAME.search(name) or RANK_FILE.search(name) for name in names]
    ranks = [int(match["rank"]) if match else None for match in matches]
    return ranks if len(files) == 1 or len(set(ranks) - {None}) > 1 else [None] * len(files)


def read_chunks(path: Path) -> Iterator[bytes]:
    """The bytes of a file, decompressed; a compressed file that is incomplete is read as far as possible."""
    try:
        with suppress(EOFError, lzma.LZMAError), OPENERS.get(path.suffix, open)(path, "rb") as file:
            yield from chunks_from(file)
    except OSError as error:
        raise PacelineError(
            f"{path} cannot be read: {error.strerror or error}", fix="check the path and its permissions"
        ) from error


def chunks_from(file: BinaryIO) -> Iterator[bytes]:
    """The bytes of an open file as they arrive: a pipe returns what it has."""
    read = getattr(file, "read1", file.read)
    while chunk := read(CHUNK_BYTES):
        yield chunk


def read_error_file(path: Path, *, rank: int | None) -> list[Log]:
    """A log of one record; none if the file is not an error file or is incomplete. torch nests what paceline does not."""
    try:
        if path.stat().st_size > MAX_ERROR_FILE_BYTES:
            return []
        error = json.loads(path.read_text(encoding="utf-8"))
        message = error["message"]
        if isinstance(message, dict):
            error = {"traceback": message["extraInfo"].get("py_callstack")}
            text, time = str(message["message"]), float(message["extraInfo"]["timestamp"])
        else:
            text = f"{error['type']}: {message}" if error.get("type") else str(message)
            time = parse_time(error["time"]) if error.get("time") else None
        step, traceback = error.get("step"), error.get("traceback") or ""
    except BROKEN_FILE:
        return []
    records = read_log([traceback.encode()], rank=rank, source=str(path)).records
    frames = records[-1].frames if records else ()
    step = step if isinstance(step, int) else None
    return [Log(records=(Record("exception", text, 1, rank, None, time, step, frames, str(path)),))]
