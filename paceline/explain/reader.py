"""
Takes a log apart into records, in one pass and bounded memory.

Any encoding, any size, any launcher: reader_filter.py finds the lines worth a look, reader_prefix.py says whose they are,
reader_errors.py puts exceptions together, reader_progress.py reads the steps. What the records mean is for the
catalogue and the verdict.
"""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

from paceline.explain.reader_errors import ErrorReader
from paceline.explain.reader_filter import AFTER, LineFilter
from paceline.explain.reader_prefix import Line, plain, split_prefix
from paceline.explain.reader_progress import MAX_RANKS, MarkPlace, ProgressNotes, take_bars
from paceline.explain.record import Progress, Record, RecordKind

CHUNK_BYTES = 1 << 21
MAX_LINE_CHARS = 4000
MAX_LINE_BYTES = 1 << 16  # of a longer line only the beginning is looked at
MAX_WORD_CHARS = 400  # a pattern that begins with a word takes time by the square of the word's length
LONG_WORD = re.compile(rb"\S{401,}")
FIRST_RECORDS, LAST_RECORDS = 2000, 1000  # kept of a log that tells of errors without end
MARKS_LOOKED_BACK = 60  # lines, for the step that a telling line is of
FIRST_TELLING, LAST_TELLING = 6000, 3000  # lines looked at of a log in which nearly every line tells of something
LAST_LINES = 8  # kept for those cases of which nothing is known

SIGNAL = re.compile(
    r"\bSIG(?:KILL|TERM|SEGV|ABRT|BUS|INT|HUP|ILL|FPE|PIPE|USR1|USR2)\b|[Ss]ignal:? \d+|Segmentation fault|core dumped"
    r"|^(?:.*: line \d+: +\d+ )?(?:Killed|Aborted|Terminated|Bus error|Illegal instruction)\b|Signals\.SIG"
)
EXIT = re.compile(
    r"exit(?:ed|ing|s)? (?:\w+ )?(?:with )?(?:exit )?(?:status|code)|exit ?code|non-zero exit|return code|Exited with",
    re.IGNORECASE,
)
PASSED_ON = re.compile(
    r"Sending process \d+ closing signal|ended after it: |Sending signal .* to process"
)  # by launchers to the others
AFTER_BAR = re.compile(  # what the shell says of a process that had not ended its line
    r"[\d\]%)s](?P<word>(?:Killed|Terminated|Aborted|Bus error|Segmentation fault)(?: \(core dumped\))?)$"
)
BANNER_RANK = re.compile(r"^\s+rank\s+: (?P<rank>\d+) \(local_rank: \d+\)")
BANNER_HOST = re.compile(r"^\s+host\s+: (?P<host>\S+)")
BANNER_LINE = re.compile(r"^\s+(?:time|error_file)\s+: ")
BANNER_TRACEBACK = re.compile(r"^\s+traceback : ")
RANK_IN_TEXT = re.compile(
    r"\[(?:Rank|rank|RANK|global rank) (?P<a>\d+)\]|\[PG[^\]]*\bRank (?P<b>\d+)\]|\blocal_rank: (?P<c>\d+)"
    r"|\[Rank (?P<d>\d+)\b|\b[Tt]ask (?P<e>\d+): |task_id=(?P<f>\d+)"
    r"|\bprocess rank (?P<g>\d+) with PID|[Pp]rocess (?P<h>\d{1,4}) terminated with|^rank (?P<i>\d+) (?:failed|ended after it): "
)


@dataclass(frozen=True)
class Log:
    """All that the verdict needs of a log."""

    records: tuple[Record, ...]
    progress: Progress
    last_marks: tuple[MarkPlace, ...]  # the last signs of progress
    last_lines: tuple[tuple[int, str], ...]
    num_lines: int
    num_bytes: int
    dropped: int = 0  # records that were too many
    last_steps: Mapping[int, int] = field(default_factory=dict)  # by rank, where lines say whose they are
    ranks: frozenset[int] = frozenset()  # that have written anything telling


def read_log(
    chunks: Iterable[bytes], *, literals: Iterable[str] = (), rank: int | None = None, source: str | None = None
) -> Log:
    """literals: of the catalogue. rank: whose log it is, where the file says so and the lines do not."""
    reader = LogReader(literals, rank=rank, source=source)
    for block in whole_lines(as_utf8(chunks)):
        reader.feed(block)
    return reader.finish()


class LogReader:
    """One log; feed() takes blocks of whole lines."""

    def __init__(self, literals: Iterable[str], *, rank: int | None, source: str | None):
        self._filter = LineFilter(literals)
        self._errors = ErrorReader()
        self._rank, self._source = rank, source
        self._first: list[Record] = []
        self._last: deque[Record] = deque(maxlen=LAST_RECORDS)
        self._dropped = 0
        self._looked = 0
        self._late: deque[tuple[int, bytes]] = deque(maxlen=LAST_TELLING)
        self._number = 0  # of the line last read
        self._bytes = 0
        self._owed = 0  # lines of the next block that follow a telling one
        self._notes = ProgressNotes()
        self._ranks: set[int] = set() if rank is None else {rank}
        self._tail: deque[tuple[int, str]] = deque(maxlen=LAST_LINES)
        self._banner_rank: int | None = None
        self._banner_host: str | None = None

    def feed(self, block: bytes) -> None:
        self._bytes += len(block)
        lines = block.split(b"\n")
        numbers = None
        if b"\r" in block:
            parts = [line.rstrip(b"\r").split(b"\r") for line in lines]
            numbers = [at for at, pieces in enumerate(parts) for _ in pieces]
            lines = [piece for pieces in parts for piece in pieces]
            block = b"\n".join(lines)
        keep = self._filter.kept(lines, block)
        if self._owed:
            keep = sorted({*range(min(self._owed, len(lines))), *keep})
        self._owed = AFTER if keep and keep[-1] == len(lines) - 1 else 0
        before = -1
        for at in keep:
            if at != before + 1:
                self._gap(lines, before, at, numbers)
            self._look_at(self._number + 1 + (numbers[at] if numbers else at), lines[at])
            before = at
        if before < len(lines) - 1:
            self._gap(lines, before, len(lines), numbers)
        self._note_tail(lines, numbers)
        self._number += (numbers[-1] if numbers else len(lines) - 1) + 1

    def finish(self) -> Log:
        self._take_late()
        self._add(self._errors.flush())
        tail = tuple((number, text) for number, text in self._tail if text)
        last_number = tail[-1][0] if tail else None
        return Log(
            records=(*self._first, *self._last),
            progress=self._notes.progress(last_number),
            last_marks=tuple(self._notes.marks),
            last_lines=tail,
            num_lines=self._number,
            num_bytes=self._bytes,
            dropped=self._dropped,
            last_steps=self._notes.steps_of,
            ranks=frozenset(self._ranks),
        )

    def _gap(self, lines: list[bytes], after: int, until: int, numbers: list[int] | None) -> None:
        """Lines that tell of no error are passed over; the first and the last mark of progress in them count."""
        self._add(self._errors.flush())
        start = max(after + 1, until - MARKS_LOOKED_BACK)
        looked = [*range(start, until)]
        if self._notes.first_step is None:
            looked = [*range(after + 1, min(after + 1 + MARKS_LOOKED_BACK, start)), *looked]
        for at in looked:
            text, bar = take_bars(plain(lines[at][:MAX_LINE_CHARS].decode("utf-8", "replace")))
            self._notes.note(self._number + 1 + (numbers[at] if numbers else at), split_prefix(text), bar)

    def _look_at(self, number: int, raw: bytes) -> None:
        """Now, or at the end if it is among the last."""
        if self._looked < FIRST_TELLING:
            self._looked += 1
            self._take(number, raw)
        else:
            self._late.append((number, cut_middle(raw)))

    def _take_late(self) -> None:
        before = 0
        for number, raw in self._late:
            if number > before + 1:
                self._add(self._errors.flush())
            self._take(number, raw)
            before = number

    def _take(self, number: int, raw: bytes) -> None:
        text = plain(cut_middle(raw).decode("utf-8", "replace"))
        text, bar = take_bars(text)
        line = split_prefix(unboxed(text))
        if line.rank is None and self._rank is not None:
            line = replace(line, rank=self._rank)
        if line.rank is not None and len(self._ranks) < MAX_RANKS:
            self._ranks.add(line.rank)
        if not self._notes.marks or number >= self._notes.marks[-1].line:  # a late line's place is before later marks
            self._notes.note(number, line, bar)
        if BANNER_TRACEBACK.match(line.text) and self._banner_rank is not None:
            line = replace(line, rank=self._banner_rank, host=self._banner_host)
        step = self._notes.step_of(line.rank)
        finished, is_part = self._errors.feed(number, line, step)
        self._add(finished)
        if not is_part and line.text.strip():
            self._add([self._record(number, line, step)])

    def _record(self, number: int, line: Line, step: int | None) -> Record:
        text = line.text
        if match := AFTER_BAR.search(text):
            text = match["word"]
        rank, host = line.rank, line.host
        if match := BANNER_RANK.match(text):
            self._banner_rank = int(match["rank"])
        elif match := BANNER_HOST.match(text):
            self._banner_host = match["host"]
        in_banner = bool(
            self._banner_rank is not None
            and text.startswith("  ")
            and (EXIT.search(text) or BANNER_TRACEBACK.match(text))
        )
        if in_banner:
            rank, host = self._banner_rank, self._banner_host
        elif rank is None and (match := RANK_IN_TEXT.search(text)):
            rank = int(match[match.lastgroup or 0])
        kind: RecordKind = "signal" if SIGNAL.search(text) else "exit" if EXIT.search(text) else "line"
        if PASSED_ON.search(text) or BANNER_LINE.match(text) or BANNER_HOST.match(text) or BANNER_RANK.match(text):
            kind = "banner"
        return Record(kind=kind, text=text, line=number, rank=rank, host=host, time=line.time, step=step)

    def _note_tail(self, lines: list[bytes], numbers: list[int] | None) -> None:
        for at in range(max(0, len(lines) - 4 * LAST_LINES), len(lines)):
            if lines[at].strip():
                text = plain(cut_middle(lines[at]).decode("utf-8", "replace")).rstrip()
                self._tail.append((self._number + 1 + (numbers[at] if numbers else at), text))

    def _add(self, records: list[Record]) -> None:
        for record in records:
            if self._source:
                record = replace(record, source=self._source)
            if record.rank is None and self._rank is not None:
                record = replace(record, rank=self._rank)
            if len(self._first) < FIRST_RECORDS:
                self._first.append(record)
            else:
                self._dropped += len(self._last) == LAST_RECORDS
                self._last.append(record)


def cut_middle(raw: bytes) -> bytes:
    """A line of any length, and words of any length, with their two ends."""
    if len(raw) <= MAX_WORD_CHARS:
        return raw
    raw = LONG_WORD.sub(
        lambda match: match[0][: MAX_WORD_CHARS // 2] + b"..." + match[0][-MAX_WORD_CHARS // 2 :], raw[:MAX_LINE_BYTES]
    )
    if len(raw) <= MAX_LINE_CHARS:
        return raw
    return raw[: MAX_LINE_CHARS * 3 // 4] + b" ... " + raw[-MAX_LINE_CHARS // 4 :]


def unboxed(text: str) -> str:
    """A line of rich's traceback without the frame around it."""
    if text[:1] not in "│╭╰┃" or not text:
        return text
    return text.strip("│┃╭╮╰╯─ ").replace("❱", " ") or ""


def as_utf8(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """UTF-16, as PowerShell's > writes it, becomes UTF-8; anything else goes on as it is."""
    iterator = iter(chunks)
    first = next((chunk for chunk in iterator if chunk), b"")
    nuls = first[:4096].count(0)
    wide = first.startswith((b"\xff\xfe", b"\xfe\xff")) or (nuls * 5 > 2 * len(first[:4096]) and len(first) > 8)
    if not wide:
        yield first
        yield from iterator
        return
    big = first.startswith(b"\xfe\xff") or (not first.startswith(b"\xff\xfe") and first[:2][:1] == b"\0")
    decoder = codecs.getincrementaldecoder("utf-16-be" if big else "utf-16-le")("replace")
    for chunk in chain([first], iterator):
        yield decoder.decode(chunk).encode("utf-8", "replace")
    yield decoder.decode(b"", final=True).encode("utf-8", "replace")


def whole_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Blocks that end where a line ends, without the last newline. A line without end is cut at CHUNK_BYTES."""
    part = b""
    for chunk in chunks:
        part += chunk
        end = part.rfind(b"\n")
        if end < 0 and len(part) > CHUNK_BYTES:
            end = part.rfind(b"\r")
            end = end if end > 0 else len(part)
        if end >= 0:
            yield part[:end]
            part = part[end + 1 :]
    if part:
        yield part
