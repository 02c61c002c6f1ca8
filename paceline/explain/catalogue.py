"""
The catalogue of causes: what is known of each, and which texts show it.

The entries are data (catalogue.toml); this module reads them and finds those that a text matches. A pattern names a literal
that stands in every text it matches: the search for it is the fast first test, and a regular expression is compiled when
its literal turns up for the first time. What a match means for the run is for the verdict.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("catalogue.toml")
SEVERITIES = ("fatal", "warning")
MENDERS = ("user", "admin", "hardware")
RETRIES = ("never", "same", "smaller", "other-port", "other-checkpoint", "later")
KINDS = ("any", "exception", "line", "exit", "signal")
MAX_TEXT = 8000  # of a text, that patterns are tried on


@dataclass(frozen=True)
class Pattern:
    """One form of text that shows a cause."""

    match: str
    literals: tuple[str, ...]  # lower case; one of them stands in every text that matches
    weight: float  # how surely such a text means the cause, 0 to 1
    kind: str = "any"  # of record: a line pattern is tried on lines, signals and exits too
    unless: str = ""
    follows: bool | frozenset[str] | None = (
        None  # where such a text may follow from other things than the cause mostly does
    )

    @cached_property
    def regex(self) -> re.Pattern[str]:
        return re.compile(self.match, re.MULTILINE)

    @cached_property
    def unless_regex(self) -> re.Pattern[str]:
        return re.compile(self.unless, re.MULTILINE)

    def fits(self, kind: str) -> bool:
        return self.kind in ("any", kind) or (self.kind == "line" and kind != "exception")

    def search(self, text: str) -> re.Match[str] | None:
        found = self.regex.search(text)
        return None if found is None or (self.unless and self.unless_regex.search(text)) else found


@dataclass(frozen=True)
class Cause:
    """One entry of the catalogue."""

    id: str
    group: str  # the subject under which it stands in docs/causes.md
    title: str
    summary: str  # sentences that fill.py completes
    fix: str
    severity: str
    mend: str
    retry: str
    follows: bool | frozenset[str]  # True: a consequence of whatever else is there
    mistaken_for: frozenset[str]
    source: str
    patterns: tuple[Pattern, ...]


@dataclass(frozen=True)
class Match:
    """A cause that a text shows, with what its pattern caught."""

    cause: Cause
    weight: float
    values: Mapping[str, str] = field(default_factory=dict)
    pattern: Pattern | None = None


@dataclass(frozen=True)
class Catalogue:
    """All causes, by id, in the order of the file."""

    causes: Mapping[str, Cause]

    @cached_property
    def literals(self) -> tuple[str, ...]:
        """One of them stands in every text that anything matches."""
        return tuple(sorted(self._by_literal))

    @cached_property
    def _by_literal(self) -> dict[str, list[tuple[Cause, Pattern]]]:
        found: dict[str, list[tuple[Cause, Pattern]]] = {}
        for cause in self.causes.values():
            for pattern in cause.patterns:
                for literal in pattern.literals:
                    found.setdefault(literal, []).append((cause, pattern))
        return found

    def match(self, text: str, kind: str) -> list[Match]:
        """Every cause that the text shows, each once, by its weightiest pattern; the surest first."""
        text = text[:MAX_TEXT]
        lowered = text.lower()
        best: dict[str, Match] = {}
        for literal, candidates in self._by_literal.items():
            if literal not in lowered:
                continue
            for cause, pattern in candidates:
                before = best.get(cause.id)
                if (before and before.weight >= pattern.weight) or not pattern.fits(kind):
                    continue
                if found := pattern.search(text):
                    values = {name: value for name, value in found.groupdict().items() if value}
                    meant = cause if pattern.follows is None else replace(cause, follows=pattern.follows)
                    best[cause.id] = Match(meant, pattern.weight, values, pattern)
        return sorted(best.values(), key=lambda match: -match.weight)


@cache
def load_catalogue() -> Catalogue:
    """The catalogue that is installed with this program."""
    return make_catalogue(tomllib.loads(FILE.read_text(encoding="utf-8"))["cause"])


def make_catalogue(entries: Iterable[Mapping[str, Any]]) -> Catalogue:
    causes: dict[str, Cause] = {}
    for entry in entries:
        cause = cause_from(entry)
        if cause.id in causes:
            raise ValueError(f"two entries {cause.id}")
        causes[cause.id] = cause
    return Catalogue(causes)


def cause_from(entry: Mapping[str, Any]) -> Cause:
    return Cause(
        id=entry["id"],
        group=entry["group"],
        title=entry["title"],
        summary=entry["summary"],
        fix=entry["fix"],
        severity=entry.get("severity", "fatal"),
        mend=entry.get("mend", "user"),
        retry=entry.get("retry", "never"),
        follows=follows_from(entry.get("follows", False)),
        mistaken_for=frozenset(entry.get("mistaken_for", ())),
        source=entry.get("source", ""),
        patterns=tuple(pattern_from(each) for each in entry.get("pattern", ())),
    )


def pattern_from(entry: Mapping[str, Any]) -> Pattern:
    literal = entry["literal"]
    return Pattern(
        match=entry["match"],
        literals=(literal,) if isinstance(literal, str) else tuple(literal),
        weight=float(entry["weight"]),
        kind=entry.get("kind", "any"),
        unless=entry.get("unless", ""),
        follows=follows_from(entry["follows"]) if "follows" in entry else None,
    )


def follows_from(value: bool | list[str]) -> bool | frozenset[str]:
    return value if isinstance(value, bool) else frozenset(value)
