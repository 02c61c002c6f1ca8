"""
The bytes of a log as the text that a program printed.

A file may be compressed, in UTF-16 (PowerShell's >), in HTML, one string with all lines, a log viewer's CSV, or a notebook. That
stores what each cell printed when it last ran, also an error that its author has long fixed elsewhere.
"""

import bz2
import codecs
import csv
import gzip
import html
import io
import json
import lzma
import re
import shlex
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import reduce
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from paceline.errors import PacelineError
from paceline.explain.lines import Fields, has_word
from paceline.rundir import open_file
from paceline.units import format_number_of

CHUNK_BYTES = 1 << 21
FORMAT_BYTES = 6  # at the start of a file, which show how it is compressed
OPENERS: dict[bytes, Callable[..., Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
UNPACKERS = {b"\x28\xb5\x2f\xfd": "zstd -dc", b"PK\x03\x04": "unzip -p"}  # commands for what explain does not unpack
CSV_NAME = r'"?[\w@. ()/-]{1,60}"?'
CSV_HEADER = re.compile(rf"{CSV_NAME}(?:,{CSV_NAME}){{1,60}}")
MESSAGE_COLUMNS = ("message", "msg", "@message", "log", "line", "_raw", "textpayload", "jsonpayload.message", "content")
TIME_COLUMN = re.compile(r"(?i)time|^date$|^ts$")
START_BYTES = 4096  # of a log, which show its encoding
UNPRINTED = bytes([*range(1, 7), *range(14, 27), *range(28, 32), 127])
HTML_QUOTES = (b"&quot;", b"&#39;", b"&#x27;", b"&#34;", b"&lt;")
HTML_ESCAPES = (*HTML_QUOTES, b"&gt;", b"&nbsp;", b"&amp;")
# when a cell began to run, in the metadata of JupyterLab and Kaggle, of papermill and ExecuteTime, of Colab
CELL_STARTS = ("iopub.execute_input", "start_time", "timestamp")
PIP_INSTALL = re.compile(r"\bpip3? install\b")
PRINTED_ERROR = re.compile(r"(?m)^(?:\x1b\[[\d;?]*\w)*(?:ERROR: |usage: |\S+: error: ).*")  # pip's and argparse's
SHELL_CELL = (
    # commands alone that start no program of the user's: they say nothing about an error before them
    re.compile(r"\s*(?:#.*\n\s*)*(?:!(?!.*(?:python|torchrun|accelerate|deepspeed|\.sh\b)).*(?:\n\s*|$))+")
)
VIEWER = re.compile(  # left with Ctrl-C
    r"(?m)^\s*!\s*(?:(?:tail|less|watch|\w*top|nvidia-smi)\b|(?!.*(?:python|torchrun|\.sh\b)).* (?:logs?|stream-\w+)(?: |$))"
)
# of a cell that starts other programs
STARTS_PROGRAM = re.compile(r"(?m)^\s*(?:!|%%)|\bsubprocess\b|\bos\.system\b|_launcher\b")
LOGGED_TRACEBACK = re.compile(r"(?m)^(?:.*\n)?Traceback \(most recent call last\):\n(?:[ \t].*\n)+.*")
ROW_END = re.compile(r" ?(?:</(?:tr|div|p)>|<br ?/?>|<table[^>]*>) ?")
CELL_END, HTML_TAG = re.compile(r" ?</t[dh]> ?"), re.compile(r" ?<[^>]*> ?")


def read_chunks(path: Path) -> Iterator[bytes]:
    """The bytes of a file, decompressed; read_log reads a compressed file that is incomplete as far as possible."""
    try:
        if path.is_fifo() and path.parts[1:2] != ("dev",):  # but for the shell's <(command), which has a writer
            open_file(path)
        with path.open("rb") as file:
            yield from chunks_from(file, name=shlex.quote(str(path)))
    except OSError as error:
        raise unreadable_log(path, error) from error


def unreadable_log(path: Path, error: OSError) -> PacelineError:
    return PacelineError(f"{path} cannot be read: {error.strerror or error}", fix="check the path and its permissions")


def chunks_from(file: BinaryIO, *, name: str = "FILE") -> Iterator[bytes]:
    """The bytes of an open file as they arrive, decompressed: a pipe returns what it has. name: for the shell."""
    start = file.peek(FORMAT_BYTES)[:FORMAT_BYTES] if isinstance(file, io.BufferedReader) else b""
    if unpacker := next((UNPACKERS[magic] for magic in UNPACKERS if start.startswith(magic)), None):
        raise PacelineError(f"{name} is compressed", fix=f"{unpacker} {name} | paceline explain -")
    opener = next((OPENERS[magic] for magic in OPENERS if start.startswith(magic)), None)
    opened = opener(file) if opener else file
    read = getattr(opened, "read1", opened.read)
    chunk = read(CHUNK_BYTES)
    if chunk[257:262] == b"ustar":
        fix = f"mkdir logs && tar -xf {name} -C logs && paceline explain logs"
        raise PacelineError(f"{name} is an archive of files", fix=fix)
    while chunk:
        yield chunk
        chunk = read(CHUNK_BYTES)


def until_error(chunks: Iterable[bytes], errors: list[Exception]) -> Iterator[bytes]:
    """The chunks of a log; where a compressed file is incomplete they end, and the error is added to errors."""
    try:
        yield from chunks
    except (EOFError, lzma.LZMAError, zlib.error) as error:
        errors.append(error)


def split_start(chunks: Iterable[bytes]) -> tuple[bytes, Iterator[bytes]]:
    """The first START_BYTES or more of a log, and the chunks after them."""
    iterator = iter(chunks)
    first = b""
    while len(first) < START_BYTES and (chunk := next(iterator, None)) is not None:
        first += chunk
    return first, iterator


def whole_lines(chunks: Iterable[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Blocks that end at a line end, without its newline, and whether each is the last. A line over CHUNK_BYTES is cut."""
    block, part = None, b""
    for chunk in equal_chunks(chunks):
        part += chunk
        end = part.rfind(b"\n")
        if end < 0 and len(part) > CHUNK_BYTES:
            end = part.rfind(b"\r")
            end = end if end > 0 else len(part)
        if end >= 0:
            if block is not None:
                yield block, False
            block, part = part[:end], part[end + 1 :]
    if block is not None:
        yield block + b"\n" + part if part else block, True
    elif part:
        yield part, True


def equal_chunks(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in chunks of CHUNK_BYTES, the last one shorter: what is learned from a block depends on its size."""
    parts, size = [], 0
    for chunk in chunks:
        start = 0
        while start < len(chunk):
            part = chunk[start : start + CHUNK_BYTES - size]
            parts.append(part)
            start, size = start + len(part), size + len(part)
            if size == CHUNK_BYTES:
                yield b"".join(parts)
                parts, size = [], 0
    if parts:
        yield b"".join(parts)


def is_utf16(first: bytes) -> bool:
    start = first[:START_BYTES]
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        return True
    in_turn = sorted((start[0::2].count(0), start[1::2].count(0)))  # a hole in a log has them side by side
    return 0.4 < sum(in_turn) / max(1, len(start)) < 0.7 and len(start) > 8 and in_turn[0] < in_turn[1] / 2


def is_binary(first: bytes) -> bool:
    """Whether a file that starts like this is no text: control characters that no program prints. NULs can be a hole in a log."""
    text = first.replace(b"\0", b"")
    num_control = len(text) - len(text.translate(None, UNPRINTED))
    return num_control > 4 + len(text) / 30 and not is_utf16(first)


def as_text(first: bytes, others: Iterator[bytes]) -> Iterator[bytes]:
    """Yields what a program printed, of a log in UTF-16 (PowerShell's >), in HTML, in one string, or in a log viewer's CSV."""
    chunks = chain([first], others)
    if not is_utf16(first):
        if column := message_column(first):
            yield from exported_messages(b"".join(chunks), column)
        else:
            yield from map(replacement_for(first), chunks)
        return
    is_big = first.startswith(b"\xfe\xff") or (not first.startswith(b"\xff\xfe") and first[:1] == b"\0")
    for text in codecs.iterdecode(chunks, "utf-16-be" if is_big else "utf-16-le", "replace"):
        yield text.encode("utf-8", "replace")


def replacement_for(first: bytes) -> Callable[[bytes], bytes]:
    """Returns what undoes the escapes of a log that starts like this: HTML's, or those of a string with all its lines."""
    escapes: dict[bytes, bytes] = {}
    if first.count(b"\n") < 3 < first.count(b"\\n") / 2:
        escapes = {b"\\r\\n": b"\n", b"\\n": b"\n", b"\\t": b"\t", b'\\"': b'"'}
    elif has_word(first, HTML_QUOTES):
        escapes = {entity: html.unescape(entity.decode()).encode() for entity in HTML_ESCAPES}
    return lambda chunk: reduce(lambda text, pair: text.replace(*pair), escapes.items(), chunk)


def message_column(first: bytes) -> str:
    """The column with the lines of a log in the CSV that starts like this; empty if it is none, such as a table of metrics."""
    header = first.removeprefix(b"\xef\xbb\xbf").partition(b"\n")[0].decode("utf-8", "replace").strip()
    if not CSV_HEADER.fullmatch(header):
        return ""
    columns = next(csv.reader([header]))
    if not any(map(TIME_COLUMN.search, columns)):
        return ""
    return next((column for column in columns if column.strip().lower() in MESSAGE_COLUMNS), "")


def exported_messages(content: bytes, column: str) -> Iterator[bytes]:
    """Yields the messages of a log viewer's CSV, the oldest first."""
    csv.field_size_limit(max(csv.field_size_limit(), len(content)))  # a message may be a whole traceback
    lines, times = [], []
    for row in csv.DictReader(io.StringIO(content.decode("utf-8-sig", "replace"), newline="")):
        lines.append((row[column] or "").rstrip("\r\n"))
        times.append(next((row[name] or "" for name in row if name and TIME_COLUMN.search(name)), ""))
    if times and times[0] > times[-1]:
        lines.reverse()
    for line in lines:
        yield line.encode("utf-8", "replace") + b"\n"


def is_notebook(first: bytes) -> bool:
    return first.lstrip().startswith(b"{") and has_word(first, (b'"cell_type"', b'"nbformat"'))


def printed_outputs(content: bytes) -> tuple[list[bytes], str]:
    """What the cells of a notebook printed, in the order in which they ran, without survived errors; a sentence on those."""
    try:
        cells = [cell for cell in json.loads(content)["cells"] if cell.get("outputs") or cell.get("execution_count")]
        errors = [[str(item["ename"]) for item in cell.get("outputs", ()) if "ename" in item] for cell in cells]
        counts = count_cells(cells)
        is_shell = [SHELL_CELL.fullmatch(whole_text(cell.get("source"))) for cell in cells]
        works = [not (failed or shell) for failed, shell in zip(errors, is_shell, strict=True)]
        survived = [is_survived(at, counts, works) for at in range(len(cells))]
        last_errors = {name for at, names in enumerate(errors) if not survived[at] for name in names}
        lacks_package = not last_errors.isdisjoint({"ImportError", "ModuleNotFoundError"})
        texts = []
        # the errors that count come last: their cells may have no count
        for at in sorted(range(len(cells)), key=lambda at: (bool(errors[at]) and not survived[at], counts[at])):
            outputs = [item for item in cells[at].get("outputs", ()) if not (survived[at] and "ename" in item)]
            text, source = "\n".join([*map(output_text, outputs), ""]), whole_text(cells[at].get("source"))
            if VIEWER.search(source):
                text = text.replace("^C", "")
            if survived[at] and not errors[at] and not STARTS_PROGRAM.search(source):  # it worked, as a later one did
                text = LOGGED_TRACEBACK.sub("", text)
            is_install = survived[at] and not lacks_package and PIP_INSTALL.search(source)
            is_usage = survived[at] and "SystemExit" in errors[at]
            texts.append((PRINTED_ERROR.sub("", text) if is_install or is_usage else text).encode("utf-8", "replace"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return [content], ""  # it is cut
    past = [names for at, names in enumerate(errors) if survived[at] and names]
    kinds = ", ".join(dict.fromkeys(chain(*past)))
    return texts, f"{format_number_of(len(past), 'cell')} failed before later ones worked: {kinds}" if past else ""


def count_cells(cells: Sequence[Fields]) -> list[int]:
    """Numbers the cells by their times if all have one, else by their counts, else as they stand; 0 if others have a count."""
    infos = [[info for info in cell.get("metadata", {}).values() if isinstance(info, dict)] for cell in cells]
    times = [
        max((str(info[key]) for info in part for key in CELL_STARTS if info.get(key)), default="") for part in infos
    ]
    counts = [cell.get("execution_count") or 0 for cell in cells]
    if all(times):
        order = sorted(times)
        return [1 + bisect_left(order, time) for time in times]
    return counts if any(counts) else [*range(1, 1 + len(cells))]


def is_survived(at: int, counts: Sequence[int], works: Sequence[bool]) -> bool:
    """Whether a cell ran later and worked: one below, or one above if its count is near, as a new kernel counts from 1.

    works: whether each cell ran a program without an error.
    """
    is_unique = counts[at] > 0 and counts.count(counts[at]) == 1
    return any(
        count > counts[at] and works[other] and (other > at or (is_unique and count - counts[at] <= len(counts)))
        for other, count in enumerate(counts)
    )


def output_text(output: Fields) -> str:
    """The text of one output of a cell; of a table, such as transformers' of losses, a line for each row."""
    data = output.get("data") or {}
    text = whole_text(output.get("text") or data.get("text/plain"))
    if (table := whole_text(data.get("text/html"))) and text[:1] in ("", "<"):  # a table of pandas is text already
        return html.unescape(HTML_TAG.sub("", CELL_END.sub("\t", ROW_END.sub("\n", " ".join(table.split())))))
    error = f"{output['ename']}: {output.get('evalue')}" if "ename" in output else ""
    return "\n".join(output.get("traceback") or ()) or error or text


def whole_text(text: Any) -> str:
    """A notebook's text, which is a string or a list of lines with their newlines."""
    return "".join(text) if isinstance(text, list) else text or ""


def count_lines(path: Path) -> int:
    """The number of lines of a file, without parsing them."""
    with suppress(OSError), open_file(path) as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
    return 0
