"""
Files that grow: their new whole lines in blocks, the JSON records in these, what a file of metrics gains, the last lines of a log.

GrowingFile reads a half-written last line when it is whole. It reads a file that vanished, shrank or was replaced, like
metrics.jsonl on a resume, from its beginning. Memory is bounded everywhere, because a log may have gigabytes.
"""

import gc
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import orjson

from paceline.errors import PacelineError
from paceline.explain.event_files import WANDB_BLOCK_BYTES
from paceline.explain.lines import strip_escapes
from paceline.explain.series import (
    CONTINUED,
    LOSS,
    MEMORY,
    STEP_NAMES,
    Kinds,
    MetricSeries,
    Reader,
    SeriesTable,
    kind_of,
    read_events,
    read_series,
    read_wandb,
    reader_of,
    training_file,
    written_metrics,
)
from paceline.rundir import RunDir, open_file

JsonRecord = dict[str, Any]
Step = tuple[int, float, dict[str, float]]  # its number, when it was logged, its measures

BLOCK_BYTES = 1 << 20
LINE_ENDS, STATE_ENDS = b"\n", b"\n\r"  # of a program's lines; of a progress bar's states as well
LARGE_BYTES = 256 << 10  # of a longer file of metrics what it has gained is read alone
REMEMBERED_BYTES = 64  # before the offset: other bytes there mean another file
LINE_CHARS = 4000  # shown of a longer line
FIND_EVERY_S, FIND_RATIO = 5.0, 50  # at least between two searches, and times what a search takes
METRICS_END_BYTES, MAX_FRAMED_BYTES = 32 << 10, 8 << 20  # read for a list of runs; of a file whose frames are skipped
WANDB_END_BYTES = 4 * WANDB_BLOCK_BYTES  # W&B records the machine between two steps
FRAME_BYTES = 16  # of a TFRecord beside its data


class GrowingFile:
    """Yields what a file has gained since the last look: call `restarted` first, then `blocks`."""

    def __init__(self, path: Path, *, ends: bytes = LINE_ENDS):
        """ends: STATE_ENDS also takes lines that a progress bar has overwritten before their end."""
        self.path = path
        self.ends = ends
        self.offset = 0
        self.sampled_bytes = 0  # at its beginning, of which only pieces were read
        self._inode, self._state = 0, (0, 0)  # size and time at the last look
        self._before = b""  # the last bytes that were read

    def restarted(self) -> bool:
        """Whether the file is not a continuation of what was read; it is then read from its beginning."""
        try:
            stat = self.path.stat()
            state = (stat.st_size, stat.st_mtime_ns)
            same = self._inode in (0, stat.st_ino) and stat.st_size >= self.offset
            if same and state != self._state:
                with open_file(self.path) as file:
                    same = os.pread(file.fileno(), len(self._before), self.offset - len(self._before)) == self._before
            self._inode, self._state = stat.st_ino, state
        except OSError:
            same, self._inode = self.offset == 0, 0
        if not same:
            self.offset, self.sampled_bytes, self._before = 0, 0, b""
        return not same

    def blocks(self, *, to_end: bool = False) -> Iterator[bytes]:
        """Yields whole lines, each with its end. A line longer than a block comes in pieces. to_end: also a half-written line."""
        with suppress(OSError), open_file(self.path) as file:  # it may have vanished, or not exist yet
            file.seek(self.offset)
            partial = b""
            while chunk := file.read(BLOCK_BYTES):
                block = partial + chunk
                end = last_end(block, self.ends) or (len(block) if len(block) > 2 * BLOCK_BYTES else 0)
                block, partial = block[:end], block[end:]
                if block:
                    self.skip_to(self.offset + len(block), before=block)
                    yield block
            if to_end and partial:
                self.skip_to(self.offset + len(partial), before=partial)
                yield partial

    def samples(self, whole_bytes: int, *, end_bytes: int, count: int, piece_bytes: int) -> Iterator[bytes]:
        """Yields whole lines of a file longer than `whole_bytes`, `count` pieces at even distances; its end remains to be read."""
        with suppress(OSError), open_file(self.path) as file:
            end = os.fstat(file.fileno()).st_size - end_bytes
            if self.offset or end + end_bytes <= whole_bytes:
                return
            self.sampled_bytes = end
            for number in range(count):
                piece = os.pread(file.fileno(), piece_bytes, end * number // count)
                starts = [start for start in map(piece.find, self.ends) if start >= 0]
                yield piece[min(starts, default=-1) + 1 if number else 0 : last_end(piece, self.ends)]
            before = os.pread(file.fileno(), piece_bytes, end - piece_bytes)
            line_end = last_end(before, self.ends)
            self.skip_to(end - piece_bytes + line_end, before=before[:line_end])

    def skip_to(self, offset: int, *, before: bytes) -> None:
        """Counts everything before the offset as read; `before` are the bytes that end there."""
        self.offset, self._before = offset, before[-REMEMBERED_BYTES:]


class MetricFile:
    """A file of any trainer's metrics; of a large one that grows, what it has gained since the last look."""

    def __init__(self, path: Path, *, kinds: Kinds | None = None):
        """kinds: of names, if others than the known ones count."""
        self.notes: list[str] = []
        self._file, self._new_table = GrowingFile(path), partial(SeriesTable, str(path), kinds=kinds)
        self._table = self._new_table()
        self.ends: dict[str, int] = {}  # the last step of each curve

    @property
    def counts_rows(self) -> bool:
        """Whether steps of the curves are numbers of rows, because the file does not name them."""
        return self._table.counts_rows

    def read(self) -> tuple[list[MetricSeries], bool]:
        """Returns the curves, and whether they continue those that were returned before. Raises PacelineError."""
        path, is_continued = self._file.path, False
        if not self._file.restarted() and self._table.end > LARGE_BYTES and reader_of(path) in CONTINUED:
            series, notes = read_series([path], self._table)
            is_continued = not notes and all(self.ends.get(item.name, math.inf) < item.steps[0] for item in series)
        if not is_continued:  # also for a step that comes a second time, a new name and a damaged record
            self._table, self.ends = self._new_table(), {}
            series, self.notes = read_series([path], self._table)
        self.ends |= {item.name: item.steps[-1] for item in series}
        start = max(0, self._table.end - REMEMBERED_BYTES)
        with suppress(OSError), open_file(path) as file:
            self._file.skip_to(self._table.end, before=os.pread(file.fileno(), self._table.end - start, start))
        return series, is_continued


class MetricFinder:
    """Finds the files of metrics that a script wrote into its run folder, and searches the folder again only now and then."""

    def __init__(self, run: RunDir):
        self.run = run
        self._starts: Sequence[float] | None = None
        self._files: list[list[Path]] = []
        self._due = math.inf  # when the folder is searched again

    @property
    def is_due(self) -> bool:
        """Whether `find` would search the folder again."""
        return time.monotonic() >= self._due

    def find(self, starts: Sequence[float]) -> list[list[Path]]:
        """Returns the files of each attempt. starts: of the attempts."""
        if self.is_due or starts != self._starts:
            began = time.monotonic()
            self._starts, self._files = starts, list(written_metrics(self.run, starts).values())
            self._due = (now := time.monotonic()) + max(FIND_EVERY_S, FIND_RATIO * (now - began))
        return self._files


class MetricSteps:
    """Steps in the file of metrics that shows the training of a script's attempt, each with all numbers that the file names.

    A tracker gets nothing from files of its own kind: there the script has sent the numbers to it by itself. own: their reader.
    """

    def __init__(self, run: RunDir, *, own: Reader | None, report: Callable[[str], None]):
        self.run, self.own, self.report = run, own, report
        self.has_loss, self.text = False, ""  # of training; what was reported
        self.finder, self.files = MetricFinder(run), dict[Path, MetricFile]()
        self.stamps = dict[Path, tuple[int, int] | None]()  # of files at the last read
        self.ends = dict[Path, tuple[bool, int]]()  # of files that name steps: whether they have a loss, the last step
        self.waiting = dict[Path, dict[int, Step]]()  # steps that were not yielded

    def read(self, starts: Sequence[float], *, last: bool) -> Iterator[Step]:
        """Yields the steps of each attempt but the last step of the last one, which further numbers may follow."""
        attempts = self.finder.find(starts)
        for paths in attempts:
            for path in paths:
                with suppress(PacelineError, OSError):  # it may vanish
                    self.read_file(path)
            ends = {path: self.ends[path] for path in paths if path in self.ends}
            if not any(has_loss for has_loss, _ in ends.values()):
                continue
            path, is_last = training_file(ends), paths is attempts[-1]
            own = next((other for other in ends if ends[other][0] and reader_of(other) is self.own), None)
            self.has_loss, name = True, (own or path).relative_to(self.run.path)
            text = f"{name} is the script's own: only health is sent" if own else f"steps are those of {name}"
            if text != self.text and is_last:
                self.text = text
                self.report(text)
            for step in sorted(self.waiting[path])[: -1 if is_last and not last else None] if not own else ():
                yield self.waiting[path].pop(step)

    def read_file(self, path: Path) -> None:
        """Reads what is new in a file; of one that is read again from its beginning all steps."""
        if (stamp := file_stamp(path)) == self.stamps.get(path):
            return
        file = self.files.setdefault(path, MetricFile(path, kinds=kind_of_number))
        series, is_continued = file.read()
        self.stamps[path], written = stamp, min(time.time(), path.stat().st_mtime)
        steps = self.waiting[path] = self.waiting[path] if is_continued else {}
        for item in series:
            for step, value, at in zip(item.steps, item.values, item.times, strict=True):
                steps.setdefault(step, (step, written if math.isnan(at) else at, {}))[2][item.name] = value
        if file.ends and not file.counts_rows:
            self.ends[path] = any(kind_of(name) == LOSS for name in file.ends), max(file.ends.values())


def kind_of_number(name: str) -> str | None:
    """The kind of any number but a step and a tracker's own, such as _runtime."""
    is_metric = name == "epoch" or not (name.startswith("_") or name in STEP_NAMES or name.endswith("time"))
    return kind_of(name) or ("number" if is_metric else None)


def end_of_metrics(path: Path) -> list[MetricSeries]:
    """Returns the curves at the end of a file of metrics; empty for one that does not name its steps or is too large."""
    table = SeriesTable(str(path))
    with suppress(OSError, PacelineError), open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = size - METRICS_END_BYTES
        if start > 0 and path.suffix in (".csv", ".jsonl"):
            table.header = file.readline(BLOCK_BYTES).decode("utf-8-sig", "replace")
            file.seek(start)
            file.readline(BLOCK_BYTES)  # its end
            table.end = file.tell()
        elif reader_of(path) is read_events and start <= MAX_FRAMED_BYTES:
            while table.end < start:
                file.seek(table.end)
                table.end += FRAME_BYTES + int.from_bytes(file.read(8), "little")
        elif reader_of(path) is read_wandb and size > LARGE_BYTES:
            table.end = (size - WANDB_END_BYTES) // WANDB_BLOCK_BYTES * WANDB_BLOCK_BYTES
        elif start > LARGE_BYTES:
            return []
        if table.end >= size:  # a length is damaged
            return []
        series = [item for item in read_series([path], table)[0] if item.kind != MEMORY]
        return [] if table.counts_rows else series
    return []


def file_stamp(path: Path) -> tuple[int, int] | None:
    """What changes whenever a file changes; None where the file does not exist or is in a folder that cannot be read."""
    with suppress(OSError):
        stat = path.stat()
        return stat.st_mtime_ns, stat.st_size
    return None


def head_and_tail(path: Path, *, first: int, last: int) -> Iterator[bytes]:
    """Yields the whole lines at both ends of a file: of so many first and last bytes."""
    with open_file(path) as file:
        head = file.read(first)
        yield head[: last_end(head, LINE_ENDS)]
        file.seek(-last, os.SEEK_END)
        file.readline(BLOCK_BYTES)
        yield from iter(lambda: file.read(BLOCK_BYTES), b"")


def unreadable(path: Path) -> str | None:
    """Why a file cannot be read; None where it can be."""
    try:
        path.open("rb").close()
    except OSError as error:
        return str(error.strerror)
    return None


def last_end(block: bytes, ends: bytes) -> int:
    """Where the last whole line of a block ends; 0 where it has none."""
    return max(map(block.rfind, ends)) + 1


def parse_lines(block: bytes) -> list[JsonRecord]:
    """Returns the JSON objects among the lines of a block and skips all other lines."""
    with suppress(ValueError):
        records = orjson.loads(b"[" + block.strip(b"\n").replace(b"\n", b",") + b"]")
        if set(map(type, records)) <= {dict}:
            return list(records)
    records = []
    for line in block.split(b"\n"):
        with suppress(ValueError):
            if isinstance(record := orjson.loads(line), dict):
                records.append(record)
    return records


def read_tail(path: Path, *, max_bytes: int = 256 << 10) -> str:
    """Returns the last whole lines of a log as a terminal would show them; empty where the file does not exist."""
    with suppress(OSError):
        return str(read_part(path, max_bytes=max_bytes)["text"])
    return ""


def read_part(
    path: Path,
    *,
    start: int | None = None,
    stop: int | None = None,
    line: int | None = None,
    max_bytes: int = 256 << 10,
) -> dict[str, Any]:
    """Returns whole lines of a log from a byte on, up to a byte, or around a line, as {text, from, to, whole, line?, index?}.

    Without any of them: its end. from and to are bytes of the file. index: where the line stands among those returned.
    """
    with open_file(path) as file:
        size = file.seek(0, 2)
        at = None if line is None else line_offset(path, line)
        is_cut = start is None  # its first line may be cut
        if at is not None:
            start, stop = max(0, at - max_bytes // 2), min(size, at + max_bytes // 2)
        elif start is not None:
            start, stop = min(start, size), min(size, start + max_bytes)
        else:
            stop = size if stop is None else min(stop, size)
            start = max(0, stop - max_bytes)
        file.seek(start)
        block = file.read(stop - start)
        if start and is_cut:  # a cut first line belongs to the part before
            file.seek(start - 1)
            cut = 0 if file.read(1) == b"\n" else block.find(b"\n") + 1
            start, block = start + cut, block[cut:]
    if stop < size and (end := block.rfind(b"\n") + 1):
        block = block[:end]
    text = "\n".join(map(shown_line, block.split(b"\n")))
    part = {"text": text, "from": start, "to": start + len(block), "whole": not start and start + len(block) >= size}
    return part if at is None else {**part, "line": line, "index": block[: at - start].count(b"\n")}


def line_offset(path: Path, line: int) -> int | None:
    """Returns the byte at which a line, counted from 1, begins; None where the file has fewer lines."""
    number = offset = 0
    for block in GrowingFile(path).blocks(to_end=True):
        count = block.count(b"\n")
        if number + count >= line - 1:
            position = 0
            for _ in range(line - 1 - number):
                position = block.index(b"\n", position) + 1
            return offset + position
        number, offset = number + count, offset + len(block)
    return None


def search(path: Path, text: str, *, limit: int = 200) -> list[tuple[int, str]]:
    """Returns the last `limit` lines that contain `text`, in upper or lower case, with their numbers from 1, oldest first."""
    needle, number, hits = text.lower(), 1, deque[tuple[int, str]](maxlen=limit)
    raw = needle.encode() if needle.isascii() else b""  # bytes are compared many times faster than text
    for block in GrowingFile(path).blocks(to_end=True) if needle else ():
        if raw in block.lower() if raw else needle in block.decode(errors="replace").lower():
            for index, line in enumerate(block.split(b"\n")):
                if needle in line.decode(errors="replace").lower():
                    hits.append((number + index, shown_line(line)))
        number += block.count(b"\n")
    return list(hits)


def shown_line(line: bytes) -> str:
    """A line as a terminal shows it: the last state of a progress bar, without colours and cursor moves."""
    line = line.rstrip(b"\r").rpartition(b"\r")[2]
    return strip_escapes(line[: 4 * LINE_CHARS].decode(errors="replace"))[:LINE_CHARS]


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pauses the garbage collector: it would walk the many new records over and over, for a fifth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def by_name(records: Sequence[JsonRecord]) -> dict[str, Sequence[Any]]:
    """Returns the values of each field, None where a record lacks it. Fields that all records share take the fast way."""
    common = [name for name in records[0] if name in records[-1]]
    try:
        rows = map(itemgetter(*common), records) if len(common) > 1 else ((record[common[0]],) for record in records)
        columns: dict[str, Sequence[Any]] = dict(zip(common, zip(*rows, strict=True), strict=True))
    except KeyError:
        columns = {}
    others = set().union(*[record for record in records if len(record) != len(columns)]) - columns.keys()
    return columns | {name: [record.get(name) for record in records] for name in others}
