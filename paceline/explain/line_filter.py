"""
Selects the lines of a log that are worth parsing, by their shapes.

Most lines of a training log equal an earlier line except for their digits. Only new shapes are looked at; those without any error
word are remembered and then skipped at the speed of bytes.translate and a set. The logs of one run share what was learnt.
"""

import re
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Literal

from paceline.explain.catalogue import load_catalogue
from paceline.explain.lines import MAX_LINE_BYTES
from paceline.explain.progress import reports_progress
from paceline.explain.run_bounds import START_WORD

# of a log's first lines, what comes again: the first and one behind it, another two in turn, or the first, perhaps alone
Start = Literal["first two", "two", "first"]
BEFORE, AFTER = 3, 24  # lines selected around one with an error word: the context and the further lines of its message
MAX_SHAPES = 50_000  # remembered; with more the set is cleared
# characters in each of a log's first lines, and lines, that show a new run where two recur
MIN_START, MAX_STARTS = 12, 6
MAX_START_BYTES = 4000  # of such a line
SOURCE = re.compile(rb"(?:\[\w+\]: ?)? {4}")  # of a traceback whose beginning is not there
NO_START = re.compile(rb"(?i)warn|error")  # comes again within one run
MAX_REPEATS = 200  # times that a line shape with an error word is parsed, but in the log's last lines
LAST_LINES = 200
# digits, separators, blocks of progress bars
SHAPE_DROPS = b" \t0123456789.,-+:\xe2\x96\x88\x89\x8a\x8b\x8c\x8d\x8e\x8f"

ERROR_WORD = re.compile(
    rb"error|exception|traceback|fatal|fail|abort|assert|kill|signal|sig[a-z]{3,4}\b|core dumped|terminat|interrupt|cancel"
    rb"|cannot|can't|unable|not found|no such|denied|refused|timed? ?out|exceed|exhaust|out of|overflow|corrupt|invalid"
    rb"|unexpected|mismatch|panic|crash|undefined symbol|nccl warn|xid|file \"|broken|unreachable|\bexit|exited|preempt"
    rb"|\.py[:(]\d|in <module>|\bnan\b|\binf\b|rank +:|host +:|time +:|return ?code|status[=: ]+\(?-?\d|could ?n[o']t"
    rb"|early.?stop|rank of current process|skipping (?:batch|step|iter|update)"
)
NUMBER = re.compile(r"-?\d+")


class Shapes:
    """Line shapes, the lines without digits, spaces and bars, that are known not to be worth parsing.

    A shape is worth parsing if it contains an error word or one of the catalogue's literals.
    """

    def __init__(self) -> None:
        self._plain: set[bytes] = set()
        self._errors: set[bytes] = set()

    def find_errors(self, shapes: set[bytes], first_lines: Callable[[set[bytes]], dict[bytes, bytes]]) -> set[bytes]:
        """Those of the shapes that are worth parsing; first_lines returns the first line of each shape that is not known yet."""
        known_errors = shapes & self._errors
        new_shapes = shapes - self._plain - known_errors
        if not new_shapes:
            return known_errors
        if len(self._plain) + len(self._errors) + len(new_shapes) > MAX_SHAPES:
            self._plain.clear()
            self._errors.clear()
        errors = search_errors(first_lines(new_shapes))
        self._errors |= {shape for shape in errors if len(shape) < MAX_LINE_BYTES}
        self._plain |= {shape for shape in new_shapes - errors if len(shape) < MAX_LINE_BYTES}
        return errors | known_errors


class LineFilter:
    """Selects the lines of one log that are worth parsing, by their shapes."""

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes
        self._ignored: set[bytes] = set()  # plain ones, and those that were parsed often enough
        # the shapes of the log's first lines, up to the first traceback or progress
        self._start: tuple[bytes, ...] = ()
        self._has_start = False  # these are complete
        self._failed_at_start = False  # a traceback comes behind them
        self._before = b""  # the last shape of the lines before
        self.starts: dict[int, Start] = {}  # in the lines given last
        self._repeats: dict[bytes, int] = {}

    def select(self, lines: list[bytes], block: bytes, *, is_last: bool = False) -> list[int]:
        """Indices of the lines worth parsing and of those around them; block is the same lines joined by newlines.

        is_last: of the log, whose end tells how the run ended, and so is parsed however often it has said the same.
        """
        shapes = block.translate(None, SHAPE_DROPS).split(b"\n")
        all_shapes = set(shapes)
        self.starts = self._find_starts(lines, shapes, all_shapes)
        last = len(lines) - LAST_LINES if is_last else len(lines)
        repeated = {shape for shape in shapes[max(0, last) :] if shape in self._repeats}
        new_shapes = all_shapes - self._ignored | repeated
        if not new_shapes:
            return []
        candidates = [at for at, shape in enumerate(shapes) if shape in new_shapes]

        def first_lines(requested: set[bytes]) -> dict[bytes, bytes]:
            return {shapes[at]: lines[at] for at in reversed(candidates) if shapes[at] in requested}

        error_shapes = self._shapes.find_errors(new_shapes, first_lines)
        plain_shapes = new_shapes - error_shapes
        if len(self._ignored) + len(plain_shapes) > MAX_SHAPES:
            self._ignored.clear()
        if len(self._repeats) > MAX_SHAPES:
            self._repeats.clear()
        self._ignored |= {shape for shape in plain_shapes if len(shape) < MAX_LINE_BYTES}
        selected: set[int] = set()
        for at in candidates:
            if (shape := shapes[at]) in error_shapes:
                repeats = self._repeats[shape] = self._repeats.get(shape, 0) + 1
                if repeats > MAX_REPEATS and at < last:
                    self._ignored.add(shape)
                else:
                    selected.update(range(max(0, at - BEFORE), min(len(lines), at + AFTER + 1)))
        return sorted(selected)

    def _find_starts(self, lines: list[bytes], shapes: list[bytes], all_shapes: set[bytes]) -> dict[int, Start]:
        """Where the log's first lines come again, but for digits: a program that appends to its log starts there."""
        first = self._read_start(lines, shapes)
        before, self._before = self._before, next(filter(None, reversed(shapes)), self._before)
        title, titles = next(iter(self._start), b""), list[int]()
        if title in all_shapes and title not in self._start[1:2] and is_title(title):
            titles = [at for at, shape in enumerate(shapes) if at >= first and shape == title]
        if self._failed_at_start and len(self._start) == 1:
            return dict.fromkeys(titles, "first two")
        pairs = {pair for at, pair in enumerate(pairwise(self._start)) if is_start(pair, is_first=at == 0)}
        if not any(last in all_shapes for _, last in pairs):
            return dict.fromkeys(titles, "first")
        numbers = [at for at, shape in enumerate(shapes) if shape]
        adjacent = pairwise([before, *(shapes[at] for at in numbers)])
        places = [(at, pair) for at, pair in zip(numbers, adjacent, strict=True) if pair in pairs and at >= first]
        starts: dict[int, Start] = dict.fromkeys(titles, "first")
        return starts | {at: "first two" if pair[0] == self._start[0] else "two" for at, pair in places}

    def _read_start(self, lines: list[bytes], shapes: list[bytes]) -> int:
        """Reads the log's first lines until there are enough; returns the index of the first line behind them."""
        if self._has_start:
            return 0
        for at, shape in enumerate(shapes):
            self._failed_at_start = b"Traceback" in shape or b'File"' in shape
            is_enough = self._failed_at_start or len(self._start) == MAX_STARTS
            if is_enough or reports_progress(lines[at][:MAX_START_BYTES].decode("utf-8", "replace")):
                self._has_start = True
                return at
            if shape and not SOURCE.match(lines[at]):
                self._start = (*self._start, shape)
        return len(shapes)


def is_title(shape: bytes) -> bool:
    """Whether a line alone can be the beginning of a program that failed right behind it."""
    return len(shape) >= MIN_START and not NO_START.search(shape)


def is_start(pair: tuple[bytes, bytes], *, is_first: bool) -> bool:
    """Whether two lines in turn are the beginning of a program, and nothing that it prints again and again."""
    is_distinct = pair[0] != pair[1] and min(map(len, pair)) >= MIN_START
    return is_distinct and (is_first or not any(map(NO_START.search, pair)))


def search_errors(first: dict[bytes, bytes]) -> set[bytes]:
    """The shapes worth parsing; first maps each shape to its first line."""
    lowered = {shape: line[:MAX_LINE_BYTES].lower() for shape, line in first.items()}
    error_shapes = {shape for shape, line in lowered.items() if ERROR_WORD.search(line) or START_WORD.search(line)}
    others = {shape: line for shape, line in lowered.items() if shape not in error_shapes}
    joined = b"\n".join(others.values())
    literals = [literal for literal in literals_without_error_word() if literal in joined]
    return error_shapes | {shape for shape, line in others.items() if any(literal in line for literal in literals)}


@cache
def literals_without_error_word() -> list[bytes]:
    """Of the patterns for lines; an exception has an error word anyway, and so has a line with an exit code."""
    catalogue = load_catalogue()
    literals = [
        literal
        for literal, entries in catalogue.by_literal.items()
        if not NUMBER.fullmatch(literal) and any(pattern.kind != "exception" for _, pattern in entries)
    ]
    encoded = (text.encode().lower() for text in (*literals, *catalogue.foreign))
    return [literal for literal in encoded if not ERROR_WORD.search(literal)]
