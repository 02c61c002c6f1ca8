"""
Reads one file into documents: text, gzip, jsonl, parquet and `datasets` folders.

Everything is streamed, so memory is bounded by one part (text) or one row group (tables), not by the file. Every way a
file can be broken becomes an UnreadableFile that names the file and the place in it.
"""

import gzip
import hashlib
import json
import re
import shlex
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, cast

from paceline.encoding import check_utf8
from paceline.errors import FileFix, UnreadableFile
from paceline.hub import is_saved_dataset, load_split, missing_extra

TEXT_FIELD = "text"
TEXT_PER_BYTE = {"gz": 3.0, "parquet": 2.5}  # of files that are compressed, as a rule
# names of a field that is the text where it is the only one of strings; under other names that may be an id, a hash or a label
TEXT_NAMES = re.compile(
    r"(?i)(raw_|page_|text_)?(text|contents?)|source_code|body|document|article|story|abstract|essay|lyrics|markdown"
    r"|paragraph|passage|poem|post|comment|review|tweet|sentence|sequence|transcript"
)
NO_TEXT = re.compile(  # fields that the command of an error leaves out of the text
    r"(?i)(^|_)(id|uuid|hash|md5|sha\w*|url|path|file|name|date|timestamp|lang|language|source|license|split)$"
)
MESSAGE_NAMES = ("content", "value", "text", "message")  # of the text of a message in a conversation
PRINT_ROWS = (
    "import json, sys, pyarrow.parquet as p;"
    " [print(json.dumps(r, default=str)) for b in p.ParquetFile(sys.argv[1]).iter_batches() for r in b.to_pylist()]"
)
KEEPS_ORIG = ", which writes FILE.jsonl and keeps FILE.orig"
JSON_LINES = FileFix('zcat -f "$f" | jq -c "arrays[], objects" > "$f.jsonl" && mv "$f" "$f.orig"', KEEPS_ORIG)
FORMATS = {
    ".txt": "text",
    ".md": "text",
    ".py": "text",
    ".txt.gz": "text",
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl",
    ".ndjson": "jsonl",
    ".ndjson.gz": "jsonl",
    ".parquet": "parquet",
}
PRINT_CSV = (
    "import csv, json, sys; csv.field_size_limit(sys.maxsize); rows = csv.DictReader(open(sys.argv[1], newline='',"
    " encoding='utf-8-sig'), dialect=sys.argv[2]); [print(json.dumps(row)) for row in rows]"
)
TO_LINES = f'{shlex.quote(sys.executable)} -c {shlex.quote(PRINT_CSV)} "$f" {{}} > "$f.jsonl"'
CONVERT = {  # commands that make a file that can be read
    ".zst": FileFix('zstd -d "$f"', " unpacks it"),
    ".xz": FileFix('xz -dk "$f"', " unpacks it"),
    ".bz2": FileFix('bzip2 -dk "$f"', " unpacks it"),
    ".zip": FileFix('unzip "$f" -d "$f.d"', " unpacks it"),
    ".csv": FileFix(TO_LINES.format("excel"), ", which writes FILE.jsonl"),
    ".tsv": FileFix(TO_LINES.format("excel-tab"), ", which writes FILE.jsonl"),
    ".json": JSON_LINES,
}
PACKED = (".zst", ".xz", ".bz2", ".zip")
CONVERTED = {".zip": "{0}.d"} | dict.fromkeys((".csv", ".tsv", ".json"), "{0}.jsonl")  # the others lose their suffix
MARK = b"<|endoftext|>"  # between the documents of a .txt file, as in TinyStories and in GPT-2's data
BOM = b"\xef\xbb\xbf"
BATCH_ROWS = 1024
Parts = Iterator[tuple[bytes, float]]  # of the text, each with the share of the file up to its end
STRING_TYPES = ("string", "large_string", "string_view")  # of Arrow


@dataclass(frozen=True)
class SourceFile:
    """A file, or a whole `datasets` dataset, before it is opened."""

    path: str
    format: str  # text, jsonl, parquet or hf
    num_bytes: int
    stamp: str  # changes when the content may have changed: size and mtime_ns
    config: str = ""  # of a dataset from the hub
    split: str = ""  # of a dataset
    text_field: str | None = None  # of its records; None: TEXT_FIELD, or the one that is found
    is_held_out: bool = False  # a text for validation

    @property
    def text_bytes(self) -> float:
        """About how many bytes of text it has; 0 for a dataset of the hub, whose size is not known."""
        ending = self.path.lower().rpartition(".")[2]
        return 0 if self.stamp == "hub" else self.num_bytes * TEXT_PER_BYTE.get(ending, 1.0)


@dataclass(frozen=True)
class Document:
    """A piece of text that is trained on as one."""

    text: str
    num_bytes: int  # in UTF-8
    digest: int  # 64 bits of BLAKE2b of the text: decides whether it is held out, where no file is
    share_read: float  # of its file, up to its end: 0 to 1
    is_held_out: bool  # as its file is


@dataclass(frozen=True)
class ReadNotes:
    """What reading shows of a source beside its documents."""

    empty_rows: Counter[str] = field(default_factory=Counter)  # by file: rows of which the text is null or empty
    text_fields: set[str] = field(default_factory=set)  # the fields of records that hold the text
    marked: set[str] = field(default_factory=set)  # text files that were split at MARK


def format_of(path: str) -> str | None:
    """Returns the format of a file by its name; None where it cannot be read."""
    name = path.lower()
    return next((kind for suffix, kind in FORMATS.items() if name.endswith(suffix)), None)


def read_documents(file: SourceFile, *, part_bytes: int, notes: ReadNotes | None = None) -> Iterator[Document]:
    """Yields the documents of one file in order, but skips those of white space alone; raises UnreadableFile.

    notes: is added to.
    """
    notes = notes or ReadNotes()
    read = {"text": _read_text, "jsonl": _read_jsonl, "parquet": _read_parquet, "hf": _read_hf}[file.format]
    for content, share_read in read(file, part_bytes, notes):
        text = content.decode()
        if text and not text.isspace():
            digest = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
            yield Document(text, len(content), digest=digest, share_read=share_read, is_held_out=file.is_held_out)
        elif not text:
            notes.empty_rows[file.path] += 1


def cut_at_line_ends(content: bytes, part_bytes: int) -> Iterator[bytes]:
    """Yields parts of at most part_bytes that end with a line, or inside a longer line, never inside a character."""
    start = 0
    while len(content) - start > part_bytes:
        end = content.rfind(b"\n", start, start + part_bytes) + 1
        if end <= start:
            end = start + part_bytes
            while end > start + part_bytes - 4 and content[end] & 0xC0 == 0x80:  # inside a character
                end -= 1
        yield content[start:end]
        start = end
    if start < len(content):
        yield content[start:]


def _read_text(file: SourceFile, part_bytes: int, notes: ReadNotes) -> Parts:
    """Yields the parts of a text; of a .txt file each text between two MARKs is a document, without line ends around the marks."""
    mark = MARK if file.path.lower().endswith((".txt", ".txt.gz")) else None
    is_behind_mark = False
    with _opened(file) as (stream, raw):
        tail = stream.read(part_bytes)
        offset = len(BOM) if tail.startswith(BOM) else 0  # in the file, where the part begins
        tail, block = tail[offset:], tail
        while block:
            block = stream.read(part_bytes)
            contents = (tail + block).split(mark) if mark else [tail + block]
            for number, content in enumerate(contents, start=1):
                is_ended = number < len(contents)
                half = 0 if is_ended or not block else len(MARK)  # the last bytes of a block may begin a mark
                split = max(0, len(content) - half)
                parts = list(cut_at_line_ends(content[:split], part_bytes))
                if not is_ended:
                    tail = (parts.pop() if block and parts else b"") + content[split:]
                for index, part in enumerate(parts, start=1):
                    check_utf8(file.path, part, offset=offset)
                    offset += len(part)
                    text = part.lstrip(b"\r\n") if is_behind_mark else part
                    text = text.rstrip(b"\r\n") if is_ended and index == len(parts) else text
                    is_behind_mark = is_behind_mark and not text
                    if text:
                        yield text, min(1.0, raw.tell() / file.num_bytes) if block else 1.0
                if is_ended:
                    offset, is_behind_mark = offset + len(MARK), True
                    notes.marked.add(file.path)


def _read_jsonl(file: SourceFile, part_bytes: int, notes: ReadNotes) -> Parts:
    name, end = None, 0
    with _opened(file) as (stream, raw):
        for number, line in enumerate(stream, start=1):
            where, offset, end = f"{file.path}:{number}", end, end + len(line)
            if number == 1:
                line = line.removeprefix(BOM)
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:  # json stops at about 1,000 levels
                check_utf8(file.path, line, offset=offset)
                cut = "" if line.endswith(b"\n") else ", and the file ends within the line: it may be cut short"
                is_spread = number == 1 and line.strip() in {b"{", b"["}  # over several lines
                fix = JSON_LINES.for_file(file.path) if is_spread else "fix or delete that line, or get the file again"
                raise UnreadableFile(f"{where} is not JSON: {_first_line(error)}{cut}", fix=fix) from error
            if not isinstance(record, dict):
                is_array = number == 1 and isinstance(record, list)
                fix = JSON_LINES.for_file(file.path) if is_array else 'write each line as {"text": "..."}'
                raise UnreadableFile(f"{where} is a JSON {type(record).__name__}, not an object", fix=fix)
            name = name or _field_of_record(file, where, record)
            if name is None:
                yield b"", min(1.0, raw.tell() / file.num_bytes)
                continue
            notes.text_fields.add(name)
            if name not in (TEXT_FIELD, file.text_field) and isinstance(record.get(TEXT_FIELD), str):
                renames = _text_fix(file, f".{TEXT_FIELD} //= {_jq_path(name)}")
                problem = f"{where} has the field {TEXT_FIELD!r}, and the lines before it have their text in {name!r}"
                raise UnreadableFile(problem, fix=renames.for_file(file.path), file_fix=renames)
            if name not in record:
                raise UnreadableFile(
                    f"{where} has no field {name!r}, which the lines before it have; it has {', '.join(record) or 'none'}",
                    fix=f"give every line the field {name!r}",
                )
            for part in _cut_value(where, record[name], part_bytes):
                yield part, min(1.0, raw.tell() / file.num_bytes)


def _read_parquet(file: SourceFile, part_bytes: int, notes: ReadNotes) -> Parts:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise missing_extra(file.path) from error
    try:
        with pyarrow.parquet.ParquetFile(file.path) as table:
            types = {column.name: column.type for column in table.schema_arrow}
            for name, kind in types.items():
                if pyarrow.types.is_dictionary(kind):  # a category of pandas: its values are what is read
                    types[name] = kind.value_type
            is_string = {name: str(kind) in STRING_TYPES for name, kind in types.items()}
            first_rows = (batch.to_pylist()[0] for batch in table.iter_batches(1))
            column = _text_field(file, file.path, is_string, lambda: next(first_rows, {}))
            notes.text_fields.add(column)
            batches = (batch.column(0).to_pylist() for batch in table.iter_batches(BATCH_ROWS, columns=[column]))
            yield from _table_parts(file, batches, table.metadata.num_rows, part_bytes)
    except (pyarrow.ArrowException, OSError) as error:
        raise UnreadableFile(
            f"{file.path} cannot be read as parquet: {_first_line(error)}",
            fix="download or write the file again, or move it out of the folder",
        ) from error


def _read_hf(file: SourceFile, part_bytes: int, notes: ReadNotes) -> Parts:
    dataset = load_split(file.path, config=file.config, split=file.split)
    types = {name: getattr(feature, "dtype", "") for name, feature in dataset.features.items()}
    is_string = {name: str(dtype) in STRING_TYPES for name, dtype in types.items()}
    column = _text_field(file, file.path, is_string, lambda: dataset[0] if len(dataset) else {})
    notes.text_fields.add(column)
    batches = (batch[column] for batch in dataset.select_columns([column]).iter(BATCH_ROWS))
    yield from _table_parts(file, batches, len(dataset), part_bytes)


def _table_parts(file: SourceFile, batches: Iterable[list[Any]], num_rows: int, part_bytes: int) -> Parts:
    for row, value in enumerate(chain.from_iterable(batches), start=1):
        for part in _cut_value(f"row {row} of {file.path}", value, part_bytes):
            yield part, row / num_rows


@contextmanager
def _opened(file: SourceFile) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """The stream of text bytes and the file under it, which is another one when compressed."""
    try:
        with open(file.path, "rb") as raw:
            yield (cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if file.path.lower().endswith(".gz") else raw), raw
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UnreadableFile(
            f"{file.path} is damaged, or not gzip: {_first_line(error)}",
            fix=f"download or write it again; `gzip -t {shlex.quote(file.path)}` tests it",
        ) from error
    except OSError as error:
        raise UnreadableFile(
            f"cannot read {file.path}: {error.strerror or error}",
            fix="check that the file is there, that you may read it, and the disk",
        ) from error


def _field_of_record(file: SourceFile, where: str, record: dict[str, Any]) -> str | None:
    """Returns the field of the text; None where only a record after this one can show it, as this one has nulls and no strings."""
    name = file.text_field or TEXT_FIELD
    if name in record and record[name] is None:
        return name
    is_string = {key: isinstance(value, str) for key, value in record.items()}
    is_open = file.text_field is None and not any(is_string.values()) and None in record.values()
    if is_open and not any(map(_message_path, record.values())):
        return None
    return _text_field(file, where, is_string, lambda: record)


def _text_field(file: SourceFile, where: str, is_string: dict[str, bool], first_row: Callable[[], Any]) -> str:
    """Returns the field that was named, else `text`, or the only field of strings where its name is one of TEXT_NAMES.

    Raises UnreadableFile.
    """
    target, strings = file.text_field or TEXT_FIELD, [name for name, yes in is_string.items() if yes]
    if target in strings:
        return target
    if not file.text_field and target not in is_string and len(strings) == 1 and TEXT_NAMES.fullmatch(strings[0]):
        return strings[0]
    raise _missing_text(file, where, is_string, first_row())


def _missing_text(file: SourceFile, where: str, is_string: dict[str, bool], row: dict[str, Any]) -> UnreadableFile:
    """Returns the error of records whose text is in no field of its own, with the command that gives them one."""
    target, strings = file.text_field or TEXT_FIELD, [name for name, yes in is_string.items() if yes]
    chat = [f"{_jq_path(name)}[]?{path}" for name, value in row.items() if (path := _message_path(value))]
    fields = ", ".join(is_string) or "none"
    likely = [name for name in strings if not NO_TEXT.search(name)]
    best = max(likely, key=lambda name: (bool(TEXT_NAMES.fullmatch(name)), len(row.get(name) or "")), default="")
    others = f"{len(strings)} other fields are strings" if len(strings) != 1 else f"{strings[0]!r} may be no text"
    message = f"{where} has no field {target!r}" + ("" if file.text_field else f" of strings, and {others}")
    if target in is_string:
        message = f"{where}: its field {target!r} holds no strings"
    named = [name for name in is_string if name in strings or (strings and row.get(name) is None)]
    paths = [_jq_path(name) for name in named if not NO_TEXT.search(name)]
    inner = [item for name, value in row.items() for item in _inner_strings(value, _jq_path(name))]
    paths += [path for name, path in inner if TEXT_NAMES.fullmatch(name)]
    paths = paths or [path for _, path in inner]
    if chat:
        problem = f"{message}, and it" if file.text_field else where
        message = f"{problem} is of a chat set: each conversation has to become one string"
    message += f"; it has {fields}"
    if not (chat or paths):
        return UnreadableFile(message, fix=f"write the text of each record as a string into a field {target!r}")
    values = f'[{", ".join(chat or paths)} | strings | select(. != "")]'
    before = f"--text-field {shlex.quote(best)}, or " if best and (file.text_field or not chat) else ""
    key = _jq_path(target).removeprefix(".").strip("[]")
    file_fix = replace(_text_fix(file, f'{{{key}: ({values} | join("\\n\\n"))}}'), before=before)
    return UnreadableFile(message, fix=file_fix.for_file(file.path), file_fix=file_fix)


def _inner_strings(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yields the names of the strings in an object of a record, and where jq finds each."""
    for name, inner in value.items() if isinstance(value, dict) else ():
        place = path + re.sub(r"^\.\[", "[", _jq_path(name))
        if isinstance(inner, str) and not NO_TEXT.search(name):
            yield name, place
        yield from _inner_strings(inner, place)


def _message_path(value: Any) -> str | None:
    """Returns where jq finds the text of a message, where the value is a list of messages."""
    message = value[0] if isinstance(value, list) and value and isinstance(value[0], dict) else {}
    return next((_jq_path(name) for name in MESSAGE_NAMES if isinstance(message.get(name), str)), None)


def _jq_path(name: str) -> str:
    return f".{name}" if re.fullmatch(r"[A-Za-z_][A-Za-z_0-9]*", name) else f".[{json.dumps(name)}]"


def _text_fix(file: SourceFile, jq_filter: str) -> FileFix:
    """Returns the command that makes records with a field `text` of what the filter of jq gives of each."""
    jq, python = f"jq -c {shlex.quote(jq_filter)}", f"{shlex.quote(sys.executable)} -c"
    if file.format == "hf":
        function = "load_from_disk" if is_saved_dataset(Path(file.path)) else "load_dataset"
        name = ", ".join(json.dumps(part, ensure_ascii=False) for part in (file.path, file.config) if part)
        split = f'["{file.split}"]' if file.split else ""
        code = shlex.quote(f'import datasets; datasets.{function}({name}){split}.to_json("rows.jsonl")')
        return FileFix(f"{python} {code} && {jq} rows.jsonl > text.jsonl", ", then --data text.jsonl")
    if file.path.lower().endswith((".jsonl", ".ndjson")):
        return FileFix(f'{jq} "$f" > "$f.new" && mv "$f" "$f.orig" && mv "$f.new" "$f"')
    rows = f"{python} {shlex.quote(PRINT_ROWS)}" if file.format == "parquet" else "zcat"
    return FileFix(f'{rows} "$f" | {jq} > "$f.jsonl" && mv "$f" "$f.orig"', KEEPS_ORIG)


def _cut_value(where: str, value: Any, part_bytes: int) -> Iterator[bytes]:
    """Yields a row's text in parts; an empty one for a null or an empty text."""
    if value is None or value == "":
        yield b""
        return
    if not isinstance(value, str):
        raise UnreadableFile(f"{where} holds {type(value).__name__}, not text", fix="make it a string, or null")
    try:
        content = value.encode()
    except UnicodeEncodeError as error:
        raise UnreadableFile(
            f"{where} holds half a character: \\u{ord(value[error.start]):04x} at character {error.start:,}",
            fix="write the file again from its source: half of a surrogate pair cannot be UTF-8",
        ) from error
    yield from cut_at_line_ends(content, part_bytes)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
