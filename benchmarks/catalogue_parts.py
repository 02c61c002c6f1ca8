"""The parts of the catalogue that act on a log, and the catalogue without some of them, for `explain.py --leave-one-source-out`."""

import re
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from paceline.explain.catalogue import MAX_TEXT, Catalogue, load_catalogue
from paceline.explain.reader import read_log


@dataclass(frozen=True)
class Part:
    """What a catalogue can lose: a pattern, or the exclusion of a pattern."""

    cause: str
    number: int  # of the pattern, in the cause
    is_exclusion: bool


def acting_parts(log: bytes, catalogue: Catalogue) -> set[Part]:
    """The patterns that match a record of the log, and the exclusions that keep a pattern from matching one."""
    numbers = {id(pattern): n for cause in catalogue.causes.values() for n, pattern in enumerate(cause.patterns)}
    parts = set()
    for record in read_log([log]).records:
        text = catalogue.in_english(record.text[:MAX_TEXT])
        lowered = text.lower()
        for literal, candidates in catalogue.by_literal.items():
            if literal not in lowered:
                continue
            for cause, pattern in candidates:
                if pattern.fits(record.kind) and pattern.regex.search(text):
                    is_excluded = bool(pattern.unless and re.search(pattern.unless, text, re.MULTILINE))
                    parts.add(Part(cause.id, numbers[id(pattern)], is_excluded))
    return parts


@contextmanager
def catalogue_without(parts: Set[Part]) -> Iterator[None]:
    """Takes the parts out of the catalogue that `explain` uses, and puts them back at the end."""
    catalogue = load_catalogue()
    causes: Any = catalogue.causes
    complete = dict(causes)
    for id in {part.cause for part in parts}:
        patterns = [
            replace(pattern, unless="") if Part(id, number, True) in parts else pattern
            for number, pattern in enumerate(complete[id].patterns)
            if Part(id, number, False) not in parts
        ]
        causes[id] = replace(complete[id], patterns=patterns)
    forget_computed(catalogue)
    try:
        yield
    finally:
        causes.update(complete)
        forget_computed(catalogue)


def forget_computed(catalogue: Catalogue) -> None:
    """Removes what the catalogue has computed from its patterns."""
    for name in ("by_literal", "_literal_index", "_matches"):
        vars(catalogue).pop(name, None)
