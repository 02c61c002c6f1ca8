"""
Parses a log into records, in one pass and bounded memory, whatever its encoding, size or launcher.

line_filter.py selects the lines worth parsing; they are parsed by lines.py, progress.py and tracebacks.py. What a record means is
decided by the catalogue and the verdict.
"""

import re
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from paceline.explain.catalogue import load_catalogue
from paceline.explain.explanation import Record, RecordKind
from paceline.explain.forwarded import ForwardedLines, WrappedLines
from paceline.explain.line_filter import AFTER, BEFORE, LineFilter, Shapes, Start
from paceline.explain.line_measures import StepLoss, in_english, read_step_and_loss, strip_bars
from paceline.explain.lines import (
    MAX_LINE_BYTES,
    MAX_LINE_CHARS,
    MAX_RANKS,
    LogLine,
    cut_middle,
    decode_line,
    has_word,
    split_line,
    split_prefix,
    strip_escapes,
    unwrap_json,
)
from paceline.explain.log import LAST_LINES, Log, OpenRun
from paceline.explain.log_text import (
    as_text,
    is_binary,
    is_notebook,
    printed_outputs,
    split_start,
    until_error,
    whole_lines,
)
from paceline.explain.run_bounds import COMMAND, NEW_PROCESS, START_WORD, may_start, rank_in_start, shape_of
from paceline.explain.tracebacks import TracebackReader, as_raised

SAMPLE_BYTES = 1 << 16  # of a log, which show whether it is text
NOT_TEXT, INCOMPLETE = "not a text", "the compressed file is incomplete"
FIRST_SELECTED, LAST_SELECTED = 6000, 3000  # lines parsed of a log in which nearly every line has an error word
# lines or seconds from one start of a program to the next; ranks print the same within less
MIN_RUN, MIN_RUN_S = 40, 30.0
MAX_RUNS = 32  # before the last one, stored of a log with more
PROGRESS_LINES, FEW_PROGRESS_LINES = 60, 8  # searched for a step before a selected line; of a log in which many were
MANY_PROGRESS_LINES = 20_000  # searched, of which each takes 0.1 to 0.3 ms
SAMPLED_LINES, LATE_SAMPLES = 200, 3  # of those before them: where steps begin again, a new curve begins
LATE = 10_000  # lines into a log: it has enough samples, and later blocks give fewer

FOREIGN_PROGRESS = (  # the same words in other languages
    "|conclu|termin|beend|abgeschl|обучен|训练|学習|학습|poca|poque|rdida|perdita|perda|perte|verlust|отер|поха|kayb|损失|損失|손실"
    "|轮|輪|エポック|에포크|에폭"
).encode()
# in every line that reports a step, a loss, memory or the end of the work, and in the rows of a table of numbers
PROGRESS_WORD = re.compile(
    rb"(?i)step|loss|iter|epoch|\bit\b|\dit \[|updat|batch|%\||finish|complet|done|train_runtime|reached|passed|saved|exit ?code: 0"
    rb"|learn:|accura|early|episode|end train|task/s|\bep\b|\b(?:val|test)\w*\]?[ _/-]+(?:\d+ +)?(?:acc|au|f1|dice)"
    + FOREIGN_PROGRESS
    + rb"|nll|xent|info_?nce|perplex|ppl|bp[bcd]|mem|rss|vram|^\d+ (?:train|val|hella) [\dni]|^s:\d+ (?:t[re]l|eval):|^\[\d+\]\s"
    rb"|\btr(?:ain)?[ :=]+\d|^(?:[\s|]|\xe2\x94[\x82\x83])*\d[\d./]*(?:[\s|,;]|\xe2\x94[\x82\x83]|\x1b\[[\d;]*m)+-?(?:\d|nan)"
)
USUAL_PROGRESS = (b"step", b"loss", b"poch")  # found sooner
LOSSES = (b"oss", b"OSS", b" L=")
MARKS = (
    (b"val", b"Val", b"VAL"),
    (b"poch", b"POCH"),
    (b"ccura",),
    (b"\ttrain", b"\tvalid", b"\teval"),  # of gradient boosting
    LOSSES,
)  # of evaluations, of where another training begins
TITLE = re.compile(rb"(?i)\W*(?:test|validation|evaluation)\b[^\n]{0,12}:\s*$")  # of the line behind it
RARE = 0.25  # losses are sampled on their own where they stand in a smaller share of the lines
SHELL_WORD = r"Killed|Aborted|Terminated|Bus error|User defined signal [12]"  # of a process that a signal ended
SIGNAL = re.compile(
    r"\bSIG(?:KILL|TERM|SEGV|ABRT|BUS|INT|HUP|ILL|FPE|PIPE|USR1|USR2)\b(?! was installed)"
    r"|[Ss]ignal:? \d+|Segmentation fault|core dumped"
    rf"|^(?:.*: line \d+: +\d+ )?(?:{SHELL_WORD}|Illegal instruction)\b(?! \d)|Signals\.SIG"
    r"|^fish: Job \d+, .* terminated by signal"
    r"|^(?:zsh: |\[\d+\] +[-+] +\d+ )(?:killed|segmentation fault|abort|bus error|terminated|illegal hardware instruction)\b"
)
EXIT = re.compile(
    r"exit(?:ed|ing|s)? (?:\w+ )?(?:with )?(?:exit )?(?:status|code)|exit ?code|non-zero exit|\(exit \d|return code|Exited with"
    r"|^wandb: .*\(failed \d+\)|^g?make(?:\[\d+\])?: \*\*\* \[[^\]]+\] Error \d+$",
    re.IGNORECASE,
)
# by a launcher to the other ranks
FORWARDED = re.compile(r"Sending process \d+ closing signal|ended after it: |Sending signal .* to process")
AFTER_BAR = re.compile(  # the shell's message about a process, or an error, behind progress without a newline
    rf"[\d\]%)s](?P<word>(?:{SHELL_WORD}|Segmentation fault)(?: \(core dumped\))?|fish: Job \d+, .*|(?<=\d)\[ERROR\] .*)$"
)
BANNER_RANK = re.compile(r"^\s*rank\s+: (?P<rank>\d+) \(local_rank: \d+\)")
BANNER_HOST = re.compile(r"^\s*host\s+: (?P<host>\S+)")
BANNER_LINE = re.compile(r"^\s*(?:time|host|error_file)\s+: ")
BANNER_TRACEBACK = re.compile(r"^\s*traceback : ")
BANNER_EXIT = re.compile(r"^\s*exitcode\s+: ")
RANK_IN_TEXT = re.compile(
    r"\[(?:Rank|rank|RANK|global rank) (?P<a>\d+)\]|\[PG[^\]]*\bRank (?P<b>\d+)\]|\blocal_rank: (?P<c>\d+)"
    r"|\[Rank (?P<d>\d+)\b|\b[Tt]ask (?P<e>\d+): |task_id=(?P<f>\d+)|\btrainer process with rank=\[(?P<n>\d+)\]"
    r"|\bprocess rank (?P<g>\d+) with PID|[Pp]rocess (?P<h>\d{1,4}) terminated with|^rank (?P<i>\d+) (?:failed|ended after it): "
    r"|^\W*(?:[Gg]lobal[ _])?(?:[Rr]ank|RANK)[ _=:]?(?P<j>\d{1,6})(?::| ?\(local[ _]rank)|\bglobal_rank[=: ]+(?P<k>\d{1,6})\b"
    r"|\b(?:on|at|from|by) (?:global )?rank[ =:]?(?P<l>\d{1,6})\b|\.py:\d+\] \((?P<m>\d{1,6})/\d{1,6}\) "
)
# detectron2: a file for each
FILE_RANK = re.compile(r"\bRank of current process: (?P<rank>\d{1,6})\. World size: (?!1$)\d")
SNIPPET_RANK = re.compile(r"^\[Rank (?P<rank>\d{1,6}) Error Snippet\]:$")  # Ray Train's, above a traceback


def read_log(
    chunks: Iterable[bytes], *, rank: int | None = None, source: str | None = None, shapes: Shapes | None = None
) -> Log:
    """Parses a log that comes in chunks of any size. rank, source: of the whole file, where a line does not report its rank.

    shapes: shared by the logs of one run, whose lines are much alike.
    """
    parser = LogParser(rank=rank, source=source, filter=LineFilter(shapes or Shapes()))
    errors: list[Exception] = []
    first, chunks = split_start(until_error(chunks, errors))
    if is_binary(first[:SAMPLE_BYTES]):
        return Log(problem=NOT_TEXT)
    in_cells = is_notebook(first)
    texts, note = printed_outputs(b"".join([first, *chunks])) if in_cells else (as_text(first, chunks), "")
    for block, is_last in whole_lines(texts):
        parser.feed(block, is_last=is_last)
    return replace(parser.finish(), problem=INCOMPLETE if errors else "", is_notebook=in_cells, note=note)


class LogParser:
    """Parses one log; feed() takes blocks of whole lines."""

    def __init__(self, *, rank: int | None, source: str | None, filter: LineFilter):
        self._filter = filter
        self._wrapped, self._forwarded = WrappedLines(), ForwardedLines()
        self._tracebacks = TracebackReader()
        self._rank, self._source = rank, source
        self._run = OpenRun(1, rank=rank)
        self._last_begin: tuple[int, float | None] = (1, None)  # line and time, where the log's first lines came last
        self._earlier: deque[Log] = deque(maxlen=MAX_RUNS)
        self._late: deque[tuple[int, bytes]] = deque(maxlen=LAST_SELECTED)  # parsed at the end of the run
        self._number = 0  # of the last line
        self._starts: dict[int, Start] = {}  # numbers of lines as the log's first ones, in this block
        # of this block, and the first that the run's last lines do not have yet
        self._lines: tuple[Sequence[int], list[bytes], int] = ((), [], 0)
        self._pending = 0  # lines at the start of the next block that follow a selected one
        self._waiting: deque[tuple[int, bytes]] = deque(maxlen=PROGRESS_LINES)  # parsed before the next event
        self._before: deque[str] = deque(maxlen=BEFORE)  # how the last lines that are no part of an error begin
        self._num_progress = 0  # lines read for progress
        self._snippet_rank: int | None = None
        self._banner_rank: int | None = None
        self._banner_host: str | None = None

    def feed(self, block: bytes, *, is_last: bool = False) -> None:
        block, lines, numbers = self._split(block)
        selected = self._filter.select(lines, block, is_last=is_last)
        self._lines = (numbers, lines, 0)
        if self._number == 0:
            self._run.bounds.first_rank = rank_in_start(split_prefix(decode_line(lines[0])))
        self._starts = {numbers[at]: start for at, start in self._filter.starts.items()}
        pending = range(min(self._pending, len(lines)))
        if pending or self._starts:
            selected = sorted({*pending, *selected, *self._filter.starts})
        marks = [words for words in MARKS if has_word(block, words)]
        self._pending = AFTER if selected and selected[-1] == len(lines) - 1 else 0
        before = -1
        for at in (*selected, len(lines)):
            if at != before + 1:
                self._skip(lines, numbers, range(before + 1, at), marks)
            if at < len(lines):
                self._select(numbers[at], lines[at])
            before = at
        self._read_tail()
        self._number = numbers[-1]

    def _select(self, number: int, raw: bytes) -> None:
        """Parses a selected line, at once or, behind many others of the run, at its end."""
        if self._run.num_parsed >= FIRST_SELECTED and (number in self._starts or START_WORD.search(raw.lower())):
            self._read_late()
        elif self._run.num_parsed >= FIRST_SELECTED:
            self._late.extend((number, cut_middle(part)) for part in split_line(raw))
            return
        self._run.num_parsed += 1
        for part in split_line(raw):
            self._parse(number, part)

    def finish(self) -> Log:
        self._read_late()
        self._add(self._tracebacks.close())
        return replace(self._run.close(), earlier=tuple(self._earlier))

    def _read_late(self) -> None:
        """Parses the lines that were put off."""
        self._read_waiting()
        before = 0
        while self._late:
            number, raw = self._late.popleft()
            if number > before + 1:
                self._add(self._tracebacks.flush())
            self._parse(number, raw)
            before = number

    def _begin_run(self, first_line: int) -> None:
        """Closes the run before a line and begins the next one with it."""
        self._read_tail(first_line)
        ended, self._run = self._run, OpenRun(first_line, rank=self._rank)
        self._earlier.append(ended.close(first_line))
        self._run.tail.extend(item for item in ended.tail if item[0] >= first_line)
        for record in (*ended.first, *ended.last):
            if record.line >= first_line:
                self._run.add_record(record)
        self._banner_rank = self._banner_host = None

    def _read_tail(self, behind: int | None = None) -> None:
        """Reads the last lines of the run as far as this block has them, up to a line that is no longer a part of it."""
        numbers, lines, start = self._lines
        stop = len(lines) if behind is None else max(start, bisect_left(numbers, behind))
        self._lines = (numbers, lines, stop)
        while stop > start and not lines[stop - 1].strip():
            stop -= 1
        start = max(start, stop - 4 * LAST_LINES)
        ends = zip(numbers[start:stop], lines[start:stop], strict=True)
        parts = ((n, decode_line(part).rstrip()) for n, raw in ends if raw.strip() for part in unwrap_json(raw))
        self._run.tail.extend((n, text) for n, text in parts if text)

    def _split(self, block: bytes) -> tuple[bytes, list[bytes], Sequence[int]]:
        """The block with carriage returns as newlines, its lines, and the number of each line in the log."""
        lines = block.split(b"\n")
        numbers: Sequence[int] = range(self._number + 1, self._number + 1 + len(lines))
        if b"\r" in block:
            states = [line.rstrip(b"\r").split(b"\r") for line in lines]
            numbers = [number for number, parts in enumerate(states, self._number + 1) for _ in parts]
            lines = [part for parts in states for part in parts]
            block = b"\n".join(lines)
        whole, numbers = self._wrapped.join(lines, numbers)
        unwrapped = self._forwarded.unwrap(whole, block)
        return block if unwrapped is lines else b"\n".join(unwrapped), unwrapped, numbers

    def _skip(self, lines: list[bytes], numbers: Sequence[int], gap: range, marks: Sequence[Sequence[bytes]]) -> None:
        """Skips lines without an error word but progress at the gap's end, some before, marked ones, and the log's first."""
        self._add(self._tracebacks.flush())
        if self._run.progress.first_step is None:
            self._read_waiting()
        num_lines = PROGRESS_LINES if self._num_progress < MANY_PROGRESS_LINES else FEW_PROGRESS_LINES
        start = max(gap.start, gap.stop - num_lines)
        first = gap.start + num_lines if self._run.progress.first_step is None else gap.start
        samples = max(LATE_SAMPLES, SAMPLED_LINES * LATE // max(LATE, self._number))
        between = {*range(first, start, 1 + max(0, start - first) // samples)}
        for words in marks:
            marked = [at for at in range(first, start) if has_word(lines[at], words)]
            if words is not LOSSES or len(marked) < RARE * (start - first):
                marked = marked[:: 1 + len(marked) // samples]
                between |= {*marked, *(at + 1 for at in marked if at + 1 < start and TITLE.match(lines[at]))}
        for at in (*range(gap.start, min(first, start)), *sorted(between)):
            self._read_progress(numbers[at], lines[at])
        self._waiting.extend((numbers[at], lines[at]) for at in range(start, gap.stop))

    def _read_waiting(self) -> None:
        while self._waiting:
            self._read_progress(*self._waiting.popleft())

    def _read_progress(self, number: int, raw: bytes) -> None:
        self._num_progress += 1
        shows_progress = (
            has_word(raw, USUAL_PROGRESS) or PROGRESS_WORD.search(raw, 0, MAX_LINE_BYTES) or TITLE.match(raw)
        )
        for part in unwrap_json(raw) if shows_progress else ():
            text, bar = strip_bars(strip_escapes(part[:MAX_LINE_CHARS].decode("utf-8", "replace")))
            self._add_progress(number, split_prefix(text), bar)

    def _add_progress(self, number: int, line: LogLine, bar: StepLoss | None) -> None:
        """Notes the progress that a line reports, of the next run where it shows that one has begun."""
        bounds = self._run.bounds
        bounds.is_shared = bounds.is_shared or bool(line.stream)
        if bounds.end is not None or bounds.settings is not None:
            progress = read_step_and_loss(in_english(line.text, line.text.lower())) or bar
            if (first_line := bounds.start_of_next(number, line.text, progress, self._run.progress)) is not None:
                self._begin_run(first_line)
        self._run.add_measures(number, line.text)
        if self._run.progress.add(number, line, bar) and not self._tracebacks.is_open:  # an open error may be the end
            self._run.add_progress(line.text)

    def _parse(self, number: int, raw: bytes) -> None:
        self._read_waiting()
        text, bar = strip_bars(decode_line(raw))
        if text.startswith(("│", "╭", "╰", "┃")):  # the box around rich's traceback
            text = text.strip("│┃╭╮╰╯─ ").replace("❱", " ")
        line = split_prefix(text)
        line = replace(line, text=as_raised(line.text))
        rank, self._snippet_rank = self._snippet_rank, None
        if match := SNIPPET_RANK.match(line.text):
            self._snippet_rank = int(match["rank"])
        elif rank is not None:
            line = replace(line, rank=rank)
        if match := FILE_RANK.search(line.text):
            self._rank = int(match["rank"])
        if line.rank is None and self._rank is not None:
            line = replace(line, rank=self._rank)
        start = self._starts.get(number)
        if start or may_start(line.text):
            self._add(self._tracebacks.flush())
        elif shape_of(line.text) in {*self._run.bounds.shapes, *self._before}:  # as before the error, such as progress
            self._add(self._tracebacks.end_message(line.stream))
        if start and self._run.bounds.is_late_rank(number, line) and not self._is_later(line.time):
            start = None
        is_first = start in ("two", "first two")
        is_next = self._run.bounds.starts_run(number, line.text, is_first=is_first) or self._run.is_resumed(line.text)
        if is_next or (start in ("first", "first two") and self._is_apart(number, line.time, start)):
            self._begin_run(number)
            self._run.is_restart = start is not None
            self._run.is_later = self._run.is_restart and self._is_later(line.time)
        self._run.by_command = self._run.by_command or COMMAND.match(line.text) is not None
        self._run.is_later = self._run.is_later or NEW_PROCESS.match(line.text) is not None
        begins = is_first or self._run.first_line == number
        if begins or self._last_begin[1] is None:
            self._last_begin = (number if begins else self._last_begin[0], line.time)
        if line.rank is not None and len(self._run.ranks) < MAX_RANKS:
            self._run.ranks.add(line.rank)
        progress_lines = self._run.progress.lines
        is_new = not progress_lines or number >= progress_lines[-1][0]  # late lines stand before progress already read
        if is_new and not self._tracebacks.is_source(line):
            self._add_progress(number, line, bar)
        if BANNER_TRACEBACK.match(line.text) and self._banner_rank is not None:
            line = replace(line, rank=self._banner_rank, host=self._banner_host)
        step = self._run.progress.step_of(line.rank)
        completed, is_part = self._tracebacks.feed(number, line, step)
        self._run.last_ignored = self._tracebacks.last_ignored
        self._add(completed)
        if not is_part and line.text.strip():
            self._before.append(shape_of(line.text) if line.text[0].isalpha() else "\n")
            self._add([self._record(number, line, step)])

    def _is_apart(self, number: int, time: float | None, start: Start) -> bool:
        """Whether the log's first lines come again in another run: ranks print them within few lines and seconds.

        The first line alone, which a program may repeat, begins one behind an exception only.
        """
        bounds = self._run.bounds
        is_far = start == "first two" and number - self._last_begin[0] >= MIN_RUN
        has_failed = bounds.has_exception or (start == "first two" and number - bounds.error_line <= LAST_LINES)
        return is_far or (has_failed and self._is_later(time))

    def _is_later(self, time: float | None) -> bool:
        """Whether the clock shows that a process began after those whose first lines came last."""
        last_time = self._last_begin[1]
        return time is not None and last_time is not None and time - last_time >= MIN_RUN_S

    def _record(self, number: int, line: LogLine, step: int | None) -> Record:
        """The record of a line that is not part of a traceback; rank and host may come from torchrun's banner above it."""
        text = line.text
        english = load_catalogue().in_english(text)
        if match := AFTER_BAR.search(text):
            text = english = match["word"]
        rank, host = line.rank, line.host
        if match := BANNER_RANK.match(text):
            self._banner_rank = int(match["rank"])
        elif match := BANNER_HOST.match(text):
            self._banner_host = match["host"]
        if self._banner_rank is not None and (BANNER_EXIT.match(text) or BANNER_TRACEBACK.match(text)):
            rank, host = self._banner_rank, self._banner_host
        elif rank is None and (match := RANK_IN_TEXT.search(text)):
            rank = int(match[match.lastgroup or 0])
        kind: RecordKind = "signal" if SIGNAL.search(english) else "exit" if EXIT.search(text) else "line"
        is_rest = rank is None and BANNER_TRACEBACK.match(text)  # of a block whose beginning is missing
        if is_rest or FORWARDED.search(text) or BANNER_LINE.match(text) or BANNER_RANK.match(text):
            kind = "banner"
        return Record(kind, text, number, rank, host, line.time, step, source=self._source, device=line.device)

    def _add(self, records: list[Record]) -> None:
        for record in records:
            record = replace(record, source=self._source) if record.source != self._source else record
            if (first_line := self._run.bounds.first_line_behind(record)) is not None:
                self._begin_run(first_line)
            self._run.add_record(record)
