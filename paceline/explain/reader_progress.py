"""
Progress marks of the usual trainers: which step a line is of, its loss, and whether it says that the work is done.

Also takes progress bars off a line: what a program prints behind a bar that is still open is on the same line.
"""

from __future__ import annotations

import math
import re
from collections import deque
from dataclasses import dataclass

from paceline.explain.reader_prefix import Line
from paceline.explain.record import Progress

LAST_MARKS = 64  # kept: what came before them has not ended the run
MAX_RANKS = 100_000

BAR = re.compile(
    r"(?:[^\s|%][^|%]{0,80}?: +)? {0,3}(?P<percent>\d{1,3})%\|[^|]*"
    r"\|? {0,2}(?P<at>[\d.,]+[kMG]?)/(?P<of>[\d.,]+[kMG]?)(?: \[[^\]]*(?:\]|$)|)"
)
BARE_BAR = re.compile(r" {0,3}\d{1,3}%\|[█▏▎▍▌▋▊▉ #=>.-]*\|?")  # cut in the middle, or without a count
STEP = re.compile(
    r"(?<![a-z])(?:global[_ ]?steps?|steps?|iter(?:ation)?s?|updates?|num_updates|batch"
    r"|it)['\"]?\s*[:=# \[(]{0,3}\s*(?P<step>\d[\d,]*)(?P<of>\s*/\s*\d[\d,]*)?(?![\w.]|\s*[A-Za-z]+/)",
    re.IGNORECASE,
)
EPOCH = re.compile(r"(?<![a-z])epoch['\"]?\s*[:=# \[(]{0,3}\s*(?P<epoch>\d+(?:\.\d+)?)", re.IGNORECASE)
LOSS = re.compile(r"loss['\"]?\s*[:=|]?\s*(?P<loss>[-+]?\d+(?:\.\d*)?(?:e[-+]?\d+)?|nan|inf)\b", re.IGNORECASE)
DONE = re.compile(
    r"training (?:is )?(?:completed?|finished|done)|finished training|train_runtime|max_steps=?\d* reached"
    r"|job (?:finished|completed) success"
    r"|\ball \d* ?(?:tests|checks) passed|training has finished|saved (?:the )?final|run finished"
    r"|finished successfully|^done\.?$",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Mark:
    """One sign of progress."""

    step: int | None
    loss: float | None
    is_last: bool = False  # step 100/100


@dataclass(frozen=True)
class MarkPlace:
    """Where a mark stands."""

    line: int
    rank: int | None
    step: int | None


class ProgressNotes:
    """The marks of one log so far."""

    def __init__(self) -> None:
        self.marks: deque[MarkPlace] = deque(maxlen=LAST_MARKS)
        self.first_step: int | None = None
        self._last_step: int | None = None
        self._last_loss: float | None = None
        self._steps = 0
        self.steps_of: dict[int, int] = {}
        self._done_line: int | None = None
        self._at_end = False  # the last mark is step 100/100
        self._nan: tuple[int, int | None] | None = None  # line and step since when no loss is a number

    def step_of(self, rank: int | None) -> int | None:
        """The step that this rank has told last, or that anyone has."""
        return self._last_step if rank is None else self.steps_of.get(rank, self._last_step)

    def note(self, number: int, line: Line, bar: Mark | None) -> None:
        mark = find_mark(line.text) or bar
        if says_done(line.text):
            self._done_line = number
        if mark is None:
            return
        self._at_end = mark.is_last
        self.marks.append(MarkPlace(number, line.rank, mark.step))
        self._steps += 1
        if mark.step is not None:
            self._last_step = mark.step
            self.first_step = mark.step if self.first_step is None else self.first_step
            if line.rank is not None and len(self.steps_of) < MAX_RANKS:
                self.steps_of[line.rank] = mark.step
        if mark.loss is not None:
            self._last_loss = mark.loss
            self._nan = None if math.isfinite(mark.loss) else self._nan or (number, self.step_of(line.rank))

    def progress(self, last_line: int | None) -> Progress:
        """last_line: of the log; one that ends on a mark ends without a word of its end."""
        done = self._done_line is not None or self._at_end
        return Progress(
            steps=self._steps,
            first_step=self.first_step,
            last_step=self._last_step,
            last_loss=self._last_loss,
            nan_line=self._nan[0] if self._nan else None,
            nan_step=self._nan[1] if self._nan else None,
            finished=done,
            done_line=self._done_line,
            silent_end=not done and bool(self.marks) and self.marks[-1].line == last_line,
        )


def take_bars(text: str) -> tuple[str, Mark | None]:
    """The line without its progress bars, and the last one's count."""
    if "%|" not in text:
        return text, None
    mark = None
    for match in BAR.finditer(text):
        at, of = whole(match["at"]), whole(match["of"])
        mark = Mark(step=at, loss=None, is_last=at is not None and at == of)
    return BARE_BAR.sub("", BAR.sub("", text)).strip(" \t"), mark


def find_mark(text: str) -> Mark | None:
    """The step or the loss that a line reports; None for a line that reports none."""
    lowered = text.lower()
    loss = LOSS.search(text) if "loss" in lowered else None
    step = STEP.search(text)
    if step is None and loss is None:
        return None
    if loss is None and step is not None and not (step["of"] or ":" in text or "=" in text or len(text) < 40):
        return None  # "takes 3 steps 2 at a time": prose
    number = whole(step["step"]) if step else None
    is_last = bool(step and step["of"] and whole(step["of"].strip("/ \t")) == number)
    return Mark(step=number, loss=float(loss["loss"]) if loss else None, is_last=is_last)


def says_done(text: str) -> bool:
    return bool(DONE.search(text))


def whole(text: str) -> int | None:
    """'12,345' -> 12345; None for what is no whole number of at most 15 digits."""
    digits = text.replace(",", "")
    return int(digits) if digits.isdigit() and digits.isascii() and len(digits) <= 15 else None
