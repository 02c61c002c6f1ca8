"""
A log, several, a folder of them, or a stream: opened, read and explained.

One file may hold all ranks, or each rank has its own, whose name or folder tells which. Packed files are read as they are.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from paceline.errors import PacelineError
from paceline.explain.catalogue import Catalogue, load_catalogue
from paceline.explain.error_file import read_error_file
from paceline.explain.reader import CHUNK_BYTES, Log, read_log
from paceline.explain.record import Explanation
from paceline.explain.verdict import reach_verdict

MAX_FILES = 20_000
LOG_NAMES = re.compile(
    r"(?:\.(?:log|txt|out|err|output|stdout|stderr)(?:\.\d+)?(?:\.(?:gz|bz2|xz))?|(?:^|/)(?:stdout|stderr|slurm-\S+|log)|\.[oe]\d+)$"
)
ERROR_NAMES = re.compile(r"(?:^|[._-])error\.json$")
OPENERS: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
RANK_NAMES = (
    re.compile(r"(?:^|[^a-z])(?:rank|worker|process|proc|task)[-_.]?(?P<rank>\d{1,6})(?!\d)", re.IGNORECASE),
    re.compile(r"(?:^|/)(?P<rank>\d{1,5})(?:/(?:stdout|stderr)\.log|\.(?:log|out|err|txt|error\.json)|/error\.json)$"),
)


def explain(
    source: Iterable[bytes] | Path | Sequence[Path],
    *,
    catalogue: Catalogue | None = None,
    values: Mapping[str, str] | None = None,
) -> Explanation:
    """source: chunks of one log, a file, a folder, or several. values: what is known beside, such as a batch size."""
    catalogue = catalogue or load_catalogue()
    if isinstance(source, Path):
        source = [source]
    paths = (
        list(source)
        if isinstance(source, Sequence)
        and not isinstance(source, bytes)
        and all(isinstance(each, Path) for each in source)
        else None
    )
    if paths is None:
        logs = [read_log(cast("Iterable[bytes]", source), literals=catalogue.literals)]
    else:
        logs = read_files(files_of(cast("list[Path]", paths)), catalogue)
    return reach_verdict(logs, catalogue, values=values)


def read_files(files: Sequence[Path], catalogue: Catalogue) -> list[Log]:
    """Each file a log; where there are several, records say which they are from."""
    ranks = ranks_of(files)
    logs = []
    for path, rank in zip(files, ranks, strict=True):
        source = str(path) if len(files) > 1 else None
        if ERROR_NAMES.search(path.name):
            logs += [error] if (error := read_error_file(path, rank=rank)) else []
            continue
        logs.append(read_log(chunks_of(path), literals=catalogue.literals, rank=rank, source=source))
    return logs


def files_of(paths: Sequence[Path]) -> list[Path]:
    """The files meant; of a folder those that look like logs, or all of its text files if none does."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(each for each in path.rglob("*") if each.is_file())[:MAX_FILES]
            named = [each for each in inside if LOG_NAMES.search(each.as_posix()) or ERROR_NAMES.search(each.name)]
            found = named or [each for each in inside if is_text(each)]
            if not found:
                raise PacelineError(f"no log in {path}", fix="name the files: paceline explain FILE ...")
            files += found
        elif path.exists():
            files.append(path)
        else:
            raise PacelineError(
                f"no such file: {path}", fix="paceline explain LOG, a run's name, or - for standard input"
            )
    return list(dict.fromkeys(files))


def ranks_of(files: Sequence[Path]) -> list[int | None]:
    """From the names, where they differ between the files; one file alone may hold many ranks."""
    if len(files) == 1:
        return [rank_in_name(files[0])]
    ranks = [rank_in_name(path) for path in files]
    return ranks if len({rank for rank in ranks if rank is not None}) > 1 else [None] * len(files)


def rank_in_name(path: Path) -> int | None:
    name = "/".join(path.parts[-2:])
    match = next(filter(None, (pattern.search(name) for pattern in RANK_NAMES)), None)
    return int(match["rank"]) if match else None


def is_text(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return b"\0" not in file.read(4096)
    except OSError:
        return False


def chunks_of(path: Path) -> Iterator[bytes]:
    """The file's bytes; a packed one's unpacked, as far as it is whole."""
    try:
        with OPENERS.get(path.suffix, open_plain)(path) as file:
            yield from chunks_from(file)
    except (EOFError, lzma.LZMAError):
        return  # a log that is still being written, or was cut: what came is read
    except OSError as error:
        raise PacelineError(
            f"{path} cannot be read: {error.strerror or error}", fix="check the path and its permissions"
        ) from error


def open_plain(path: Path) -> BinaryIO:
    return path.open("rb")


def chunks_from(file: BinaryIO) -> Iterator[bytes]:
    """As it comes: a pipe gives what it has."""
    read = getattr(file, "read1", file.read)
    while chunk := read(CHUNK_BYTES):
        yield chunk
