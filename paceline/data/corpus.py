"""
The text of a run: a source string becomes files, files become documents, and some documents are held out.

    builtin             the running Python's own standard library sources, without its tests (PSF licence)
    PATH                one file, or a folder with everything under it but runs, of the types in FORMATS
    hf:NAME[:CONFIG[:SPLIT]]    a split of a dataset in Hugging Face `datasets` format; NAME may be a local folder

Without SPLIT it is `train`, and `validation` of a text for validation.

A document is one text file, or in a .txt file what is between two marks <|endoftext|>; or the text in one line of jsonl or
one row of a table. A long one is cut at line ends into parts, each a document of its own. This module does not depend on tokens.
"""

import math
import os
import shlex
import stat
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from paceline.data.readers import (
    CONVERT,
    CONVERTED,
    FORMATS,
    PACKED,
    Document,
    ReadNotes,
    SourceFile,
    format_of,
    read_documents,
)
from paceline.errors import PacelineError, UnreadableFile, expand_home
from paceline.hub import PREFIX, is_saved_dataset, parse_source
from paceline.units import format_list, format_number_of

META = "meta.json"  # in the folder of a prepared text
Progress = Callable[[str, float, float], None]  # label of the work, amount done, in all (0: unknown)

NOT_TEXT_TO_LEARN = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}
RUN_FILES = ({".lock", "config.toml"}, {".lock", "preparing.json"})  # of a run folder, or of one that is being prepared

MIN_PART_BYTES, MAX_PART_BYTES = 4 << 10, 256 << 10
TARGET_PARTS = 64  # of a source that is one long file, so that some can be held out

HELD_OUT_ONE_IN = 50
SMALL_CORPUS_BYTES, SMALL_HELD_OUT_ONE_IN = 4 << 20, 10  # under 4 MiB, 2 percent is too little text to measure on

HUB_BYTES = 64 << 20  # assumed for a dataset of the hub: its size is not known before it is downloaded
SCAN_AFTER_ERROR_BYTES = 256 << 20  # read at most to find the other broken files
MAX_BROKEN_NAMED = 10  # of them


def list_files(
    source: str, *, val_source: str | None = None, text_field: str | None = None, print_note: bool = False
) -> list[SourceFile]:
    """Returns the files of a source in a fixed order without opening any, since it runs at every start.

    val_source: the config's val_data, whose files come first and are not trained on. text_field: the config's, of files that have
    fields. print_note: says on stderr which files of other types are left out, which of the source are of val_source, and where
    text_field has no effect. Raises PacelineError for a source without text.
    """
    files = _files_of(source, split="train", print_note=print_note)
    if val_source is not None:
        files = _with_val_files(files, val_source, source=source, print_note=print_note)
    if text_field is None:
        return files
    if print_note and all(file.format == "text" for file in files):
        print(f"note    --text-field {text_field} has no effect: {source} is plain text", file=sys.stderr)
    return [file if file.format == "text" else replace(file, text_field=text_field) for file in files]


def _with_val_files(files: list[SourceFile], val_source: str, *, source: str, print_note: bool) -> list[SourceFile]:
    """Returns the files of val_source and behind them those of the source that are no files of it."""
    try:
        held_out = _files_of(val_source, split="validation", print_note=print_note)
    except PacelineError as error:
        fix = (error.fix or "").replace("--data", "--val-data")
        raise PacelineError(f"val_data: {error.message}", fix=fix) from error
    paths: dict[tuple[str, str, str], set[Path]] = {}
    for file in held_out:
        paths.setdefault((file.stamp, file.config, file.split), set()).add(Path(file.path).resolve())

    def is_held_out(file: SourceFile) -> bool:
        alike = paths.get((file.stamp, file.config, file.split), ())
        return bool(alike) and Path(file.path).resolve() in alike

    to_train_on = [file for file in files if not is_held_out(file)]
    if not to_train_on:
        raise PacelineError(
            f"no text is left to train on: all of {source} is in val_data {val_source}",
            fix="leave --val-data out, which holds a share out, or give another text",
        )
    if print_note and (num_left_out := len(files) - len(to_train_on)):
        what = format_number_of(num_left_out, "file")
        print(f"note    {source}: {what} of --val-data {val_source} will not be trained on", file=sys.stderr)
    return [*(replace(file, is_held_out=True) for file in held_out), *to_train_on]


def _files_of(source: str, *, split: str, print_note: bool) -> list[SourceFile]:
    """split: of a dataset, where the source names none."""
    if source == "builtin":
        return _builtin_files()
    if source.startswith(PREFIX):
        return [_hf_source(source, split=split)]
    path = expand_home(source)
    try:
        path.lstat()
    except FileNotFoundError as error:
        raise PacelineError(
            f"no such file or folder: {source} (looked in {Path.cwd()})", fix=_missing_fix(source)
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise _stat_error(path, error) from error
    if path.is_dir():
        return _folder_files(path, print_note=print_note)
    status = _stat_file(name := str(path.absolute()))
    if (kind := format_of(name)) is None:
        fix = f"these can: {' '.join(FORMATS)}; plain text under another name only needs renaming"
        if command := _conversion([str(path)]):
            converted = CONVERTED.get(path.suffix.lower(), "{0.parent}/{0.stem}").format(path)
            fix = f"{command}; then --data {shlex.quote(converted)}"
        raise PacelineError(f"{path} is not of a type that can be read", fix=fix)
    if status.st_size == 0:
        raise PacelineError(f"{path} is empty", fix="put text into it, or give another path")
    return [_source_file(name, kind, status)]


def _missing_fix(source: str) -> str:
    """Returns how to write what a source without a file may have meant."""
    if "://" in source:
        return "download it first, and give the file or its folder"
    if set(source) & set("*?[,;"):
        return "give one file, or one folder, which is read with all that is under it; patterns and lists are not read"
    return "check the path; `builtin` is text that is always there, hf:NAME a dataset from the Hugging Face hub"


def read_corpus(
    files: list[SourceFile], *, part_bytes: int, max_bytes: int | None = None, notes: ReadNotes | None = None
) -> Iterator[tuple[Document, float]]:
    """Yields all documents in order, each with the number of source bytes read so far, for a progress bar.

    With max_bytes it yields only about so much text, from the start of each file in proportion to its size. When a file
    cannot be read, the error names it and the broken files after it. notes: as read_documents has it.
    """
    total_bytes = sum(file.num_bytes for file in files)
    done = 0.0
    for number, file in enumerate(files):
        allowed = math.inf if max_bytes is None else max_bytes * file.num_bytes / total_bytes
        try:
            for document in read_documents(file, part_bytes=part_bytes, notes=notes):
                yield document, done + document.share_read * file.num_bytes
                allowed -= document.num_bytes
                if allowed <= 0:
                    break
        except UnreadableFile as error:
            others = _unreadable(files[number + 1 :])
            also = _format_others(others, num_files=len(files)) if others else ""
            fix, is_alike = error.file_fix, all(other.file_fix == error.file_fix for other in others.values())
            if others and is_alike and fix and fix.command and (fix.guard or len(files) == 1 + len(others)):
                patterns = _patterns([file.path, *others])
                raise UnreadableFile(error.message + also, fix=fix.for_files(patterns)) from error
            raise UnreadableFile(error.message + also, fix=error.fix) from error
        done += file.num_bytes


def part_bytes_of(files: list[SourceFile]) -> int:
    """Returns the length above which documents are cut: a power of two, so that it rarely changes when a corpus grows."""
    total_bytes = sum(file.num_bytes for file in files if not file.is_held_out)
    target = max(MIN_PART_BYTES, min(MAX_PART_BYTES, total_bytes // TARGET_PARTS))
    return 1 << (target.bit_length() - 1)


def held_out_below(files: list[SourceFile], *, part_bytes: int) -> int:
    """Returns the number below which a document's digest means that it is held out: 1 in 50, or 1 in 10 under 4 MiB.

    The digest is of the document's content alone, so a document stays on its side when others come, go or move. Where
    that leaves a side empty (few documents), exactly the document with the smallest digest is held out. 0 where whole files are.
    """
    if any(file.is_held_out for file in files):
        for is_held_out, purpose in ((True, "validate"), (False, "train")):
            side = [file for file in files if file.is_held_out == is_held_out]
            if next(read_corpus(side, part_bytes=part_bytes), None) is None:
                raise PacelineError(
                    f"there is no text to {purpose} on in {side[0].path}", fix="put text into it, or give another path"
                )
        return 0
    small = sum(file.num_bytes for file in files) < SMALL_CORPUS_BYTES
    limit = (1 << 64) // (SMALL_HELD_OUT_ONE_IN if small else HELD_OUT_ONE_IN)
    sides, digests, num_bytes, notes = set(), set(), 0, ReadNotes()
    for document, _ in read_corpus(files, part_bytes=part_bytes, notes=notes):
        sides.add(document.digest < limit)
        if len(sides) == 2:
            return limit
        digests.add(document.digest)
        num_bytes += document.num_bytes
    if len(digests) < 2:
        name = files[0].path if len(files) == 1 else f"the text of {len(files)} files ({files[0].path}, ...)"
        fix = f"add text: two different documents, or one of more than {2 * MIN_PART_BYTES:,} bytes"
        without_text = ""
        if notes.empty_rows:
            rows = format_number_of(notes.empty_rows.total(), "row")
            without_text = f"; the text of {rows} is null or empty, first in {next(iter(notes.empty_rows))}"
            fix = "--text-field NAME, where another field holds the text"
        raise PacelineError(
            f"{name} is too small: {num_bytes:,} bytes of text in {format_number_of(len(digests), 'distinct document')}"
            f", and one must be held out{without_text}",
            fix=fix,
        )
    return min(digests) + 1


def _unreadable(files: list[SourceFile]) -> dict[str, UnreadableFile]:
    """Returns the errors of the broken ones among the files that follow, by path, within SCAN_AFTER_ERROR_BYTES."""
    errors, budget = {}, 0
    for file in files:
        budget += file.num_bytes
        if budget > SCAN_AFTER_ERROR_BYTES:
            break
        try:
            deque(read_documents(file, part_bytes=MAX_PART_BYTES), maxlen=0)
        except UnreadableFile as error:
            errors[file.path] = error
    return errors


def _format_others(errors: dict[str, UnreadableFile], *, num_files: int) -> str:
    """Returns what follows the first error: how many files more cannot be read, and a line for each of the first of them."""
    lines = [error.message for error in errors.values()][:MAX_BROKEN_NAMED]
    lines += ["..."] if len(errors) > MAX_BROKEN_NAMED else []
    head = f" (and {len(errors)} more of the {num_files} files cannot be read either)"
    return "\n       ".join([head, *lines])


def _patterns(paths: list[str]) -> str:
    """Returns the shell's patterns of these files: one for each type and depth below their common folder."""
    top = os.path.commonpath([Path(path).parent for path in paths])
    patterns = set()
    for path in paths:
        suffix = next((suffix for suffix in FORMATS if path.lower().endswith(suffix)), Path(path).suffix)
        patterns.add("*/" * (len(Path(path).relative_to(top).parts) - 1) + "*" + path[-len(suffix) :])
    return " ".join(f"{shlex.quote(top)}/{pattern}" for pattern in sorted(patterns))


def _conversion(paths: list[str]) -> str | None:
    """Returns the command that converts the first of these files of CONVERT, and the others of its type; None without one."""
    suffix = next((suffix for path in paths if (suffix := Path(path).suffix.lower()) in CONVERT), None)
    if suffix is None:
        return None
    alike = [path for path in paths if path.lower().endswith(suffix)]
    return CONVERT[suffix].for_files(_patterns(alike)) if len(alike) > 1 else CONVERT[suffix].for_file(alike[0])


def _builtin_files() -> list[SourceFile]:
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - NOT_TEXT_TO_LEARN)
        paths = [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
        files += [_source_file(str(path), "text", status) for path in paths if (status := path.stat()).st_size]
    if not files:
        raise PacelineError(
            f"this Python has no standard library sources in {root}: there is no built-in text",
            fix="give text of your own: --data PATH",
        )
    return files


def _folder_files(folder: Path, *, print_note: bool) -> list[SourceFile]:
    """Returns every file of a known type under the folder, without hidden and empty ones.

    Paths are strings: of 100,000 files a Path for each would take most of the time.
    """
    root = str(folder.absolute())
    files: list[SourceFile] = []
    broken: list[PacelineError] = []
    others = []
    for path in _walk(root, broken):
        if (kind := format_of(path)) is None:
            others.append(path.removeprefix(root).lstrip("/"))
            continue
        try:
            files.append(_source_file(path, kind, _stat_file(path)))
        except PacelineError as error:
            broken.append(error)
    if broken:
        more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
        raise UnreadableFile(broken[0].message + more, fix=broken[0].fix) from broken[0]
    with_text = [file for file in files if file.num_bytes]
    known, shown = " ".join(FORMATS), format_list(others, limit=5)
    if with_text and others and print_note:
        left_out = format_number_of(len(others), "file")
        command = _conversion([f"{root}/{name}" for name in others if name.lower().endswith(PACKED)])
        effect = f"; {command}" if command else ""
        print(f"note    {folder}: left out {left_out} of other types: {shown}{effect}", file=sys.stderr)
    if with_text:
        return with_text
    if files:
        what = f"nothing to read in {folder}: all its text files are empty ({len(files)} of them)"
        fix = "put text into them, or give another path"
    elif not others:
        has_entries = any(folder.iterdir())
        what = f"{folder} has only hidden files or empty folders" if has_entries else f"{folder} is an empty folder"
        fix = f"put text files there ({known}), or give another path"
    else:
        what = f"no text file in {folder}: it holds {shown}"
        command = _conversion([f"{root}/{name}" for name in others])
        fix = command or f"give a folder with files of these types: {known}"
        if {"train.bin", "val.bin"} <= {*others}:  # nanoGPT's
            fix = "these .bin files are tokens: give the text that they were made from, such as nanoGPT's input.txt"
        if is_saved_dataset(folder):
            fix = f"--data hf:{shlex.quote(str(folder))}, as it was written by save_to_disk"
    raise PacelineError(what, fix=fix)


def _walk(root: str, broken: list[PacelineError]) -> Iterator[str]:
    """Yields the files under the folder in sorted order, without those of runs: a model would learn what models wrote.

    Linked folders are entered once, whatever loops the links make.
    """
    entered: set[tuple[int, int]] = set()
    for here, subfolders, names in os.walk(
        root, followlinks=True, onerror=lambda error: broken.append(_stat_error(Path(error.filename), error))
    ):
        inode = Path(here).stat()
        is_run = here != root and any(files.issubset(names) for files in RUN_FILES)
        if is_run or (inode.st_dev, inode.st_ino) in entered:
            subfolders.clear()
            continue
        entered.add((inode.st_dev, inode.st_ino))
        subfolders[:] = sorted(name for name in subfolders if not name.startswith(".") and name != "__pycache__")
        yield from (os.path.join(here, name) for name in sorted(names) if not name.startswith("."))  # noqa: PTH118


def _source_file(path: str, kind: str, status: os.stat_result) -> SourceFile:
    stamp = f"{status.st_size}:{status.st_mtime_ns}"
    return SourceFile(path=path, format=kind, num_bytes=status.st_size, stamp=stamp)


def _stat_file(path: str) -> os.stat_result:
    try:
        status = os.stat(path)  # noqa: PTH116
        if stat.S_ISREG(status.st_mode) and not os.access(path, os.R_OK):
            raise PermissionError
    except OSError as error:
        raise _stat_error(Path(path), error) from error
    if not stat.S_ISREG(status.st_mode):
        raise UnreadableFile(f"{path} is not a regular file", fix="give a file or a folder of files")
    return status


def _stat_error(path: Path, error: Exception) -> UnreadableFile:
    if isinstance(error, PermissionError):
        return UnreadableFile(
            f"no permission to read {path}", fix=f"chmod u+rX {shlex.quote(str(path))}, or ask its owner"
        )
    if isinstance(error, FileNotFoundError) and path.is_symlink():
        return UnreadableFile(
            f"{path} is a link to {path.readlink()}, which leads nowhere",
            fix=f"put the file back, or remove the link: rm {shlex.quote(str(path))}",
        )
    return UnreadableFile(f"cannot read {path}: {error}", fix="check the path and the disk")


def _hf_source(source: str, *, split: str) -> SourceFile:
    """Returns one SourceFile for the whole dataset; a local one is stamped by its files, one from the hub by its name alone."""
    name, config, own_split = parse_source(source)
    if not name:
        raise PacelineError(
            f"{source} names no dataset", fix="write hf:NAME or hf:NAME:CONFIG, such as hf:roneneldan/TinyStories"
        )
    folder = expand_home(name)
    if config and is_saved_dataset(folder):
        fix = f"give {shlex.quote(f'{PREFIX}{name}::{own_split}')}"
        raise PacelineError(f"{folder} was written by save_to_disk and has no configuration `{config}`", fix=fix)
    split = own_split or ("" if (folder / "state.json").exists() else split)
    if not folder.is_dir():
        if name.startswith((".", "/", "~")):
            raise PacelineError(f"no such dataset folder: {name}", fix="check the path; hub datasets are hf:OWNER/NAME")
        return SourceFile(path=name, format="hf", num_bytes=HUB_BYTES, stamp="hub", config=config, split=split)
    broken: list[PacelineError] = []
    root, stamps, num_bytes = str(folder.absolute()), [], 0
    for path in _walk(root, broken):
        status = _stat_file(path)
        num_bytes += status.st_size
        stamps.append(f"{path.removeprefix(root).lstrip('/')}:{status.st_size}:{status.st_mtime_ns}")
    if broken or not stamps:
        raise broken[0] if broken else PacelineError(f"{folder} is an empty folder", fix="save a dataset there first")
    return SourceFile(path=root, format="hf", num_bytes=num_bytes, stamp=" ".join(stamps), config=config, split=split)
