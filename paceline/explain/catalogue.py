"""
The catalogue of causes: the entries of catalogue.toml, the search for those that a text shows, and their descriptions.

Every pattern has literals, one of which is in every text that it matches: searching for the literal is the fast first test,
and the regular expression is compiled when its literal first occurs. What a match means for the run is decided by the
verdict. dev/causes_page.py writes docs/causes.md.
"""

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, nearest
from paceline.explain.lines import DIGITS

FIXERS = {"user": "you", "admin": "the administrator of the machine", "hardware": "a repair, or other hardware"}
RETRIES = {
    "never": "fails the same way",
    "same": "may work",
    "smaller": "works with less memory",
    "other-port": "works on another port",
    "other-checkpoint": "works from an earlier checkpoint",
    "later": "may work later",
}
MAX_TEXT = 8000  # characters of a text that are searched
MAX_MATCHES = 2_000  # texts that are remembered with their causes: many ranks report the same
MAX_SHAPES = 20_000  # texts without digits that are remembered
CUDA_CALL = re.compile(  # how programs other than torch report what CUDA says of a call that failed
    r"(?i)(?<!NCCL WARN )\bcuda (?:failure|error)\b[^'\n]{0,80}'([^'\n]+)'|\bGPUassert: (.+?) \S+\.(?:cuh?|cpp|h)\b"
    r"|\bcuda (?:runtime error|failure|error(?: at)? \S+:\d+): ([^\n]+)|\bcuda (?:failure|error) \d+:? \(?([^()\n]+)"
    r"|\b(?:cudaError[A-Z]\w+|CUDA_ERROR_\w+): ([^\n]+)|\bcuda[A-Z]\w+(?:\([^\n]*\))? (?:failed|returned)[^\n:]{0,40}: ([^\n]+)"
)
# where a translated word stands: a signal behind bash's `line 2: 4711`, behind an open progress bar, or alone
SIGNAL_FORM = (
    r"(?P<colon>)(?:^[^\n]{{0,80}}\d[ 行列\xa0]{{0,3}}[:：,] {{0,6}}\d+ +{word}(?=\s|[(（]|$)"
    r"|^{word}(?=$|  | *[(（])|(?<=[\d\]%)s]){word}$)"
)
HEAD_FORM = r"(?P<colon>)(?:^|(?<=[\]\s|>])){word}[ \xa0]?[:：] *"  # of a message
MESSAGE_FORM = r"(?P<colon>[ \xa0]*[:：]\s*)?{word}"


class WordIndex:
    """Finds which of many words a text contains, and remembers it for all texts that differ only by digits."""

    def __init__(self, words: Iterable[str]) -> None:
        self._words = [(word.translate(DIGITS), word) for word in words]
        self._candidates: dict[str, list[str]] = {}  # by text without digits: the words that may be in it

    def find(self, text: str) -> list[str]:
        """The words in the text, in their order."""
        shape = text.translate(DIGITS)
        if (words := self._candidates.get(shape)) is None:
            if len(self._candidates) > MAX_SHAPES:
                self._candidates.clear()
            words = self._candidates[shape] = [word for key, word in self._words if key in shape]
        return [word for word in words if word in text]


@dataclass(frozen=True)
class Pattern:
    """One form of text that shows a cause."""

    match: str
    literals: Sequence[str]  # lower case; every text that matches contains one of them
    weight: float  # how surely such a text means the cause, 0 to 1
    kind: str = "any"  # of record: any, exception, exit, signal, or line, which includes signals and exits
    unless: str = ""
    follows: bool | Sequence[str] | None = None  # overrides the cause's
    silent: bool | None = None  # likewise

    @cached_property
    def regex(self) -> re.Pattern[str]:
        return re.compile(self.match, re.MULTILINE)

    def fits(self, kind: str) -> bool:
        """Whether the pattern is meant for records of this kind."""
        return self.kind in ("any", kind) or (self.kind == "line" and kind != "exception")

    def overriding(self, cause: "Cause") -> "Cause":
        """The cause as this form of text shows it."""
        if self.follows is None and self.silent is None:
            return cause
        follows = cause.follows if self.follows is None else self.follows
        return replace(cause, follows=follows, silent=cause.silent if self.silent is None else self.silent)


@dataclass(frozen=True)
class Fix:
    """What to do about a cause in one case of it."""

    fix: str  # a template
    why: str  # it helps
    case: str = ""  # in words, for docs/causes.md
    when: str = ""  # a regular expression, searched in the records that show the cause
    retry: str = ""  # overrides the cause's

    @cached_property
    def regex(self) -> re.Pattern[str]:
        return re.compile(self.when, re.MULTILINE)


@dataclass(frozen=True)
class Cause:
    """One entry of the catalogue."""

    id: str
    group: str  # heading in docs/causes.md
    title: str
    summary: str  # a template, like fix
    fix: str
    why: str  # the fix helps
    fixes: Sequence[Fix] = ()  # the first whose `when` matches replaces the fix
    severity: str = "fatal"  # or warning
    fixed_by: str = "user"
    retry: str = "never"
    follows: bool | Sequence[str] = False  # True: a consequence of any other cause
    silent: bool = False  # the run goes on with wrong numbers, so that its progress is no sign of health
    mistaken_for: Sequence[str] = ()
    source: str = ""
    patterns: Sequence[Pattern] = ()

    def choose_fix(self, text: str) -> tuple[str, dict[str, str]]:
        """The fix for the case that the text shows, and the values of the groups that recognize the case."""
        for fix in self.fixes:
            if match := fix.regex.search(text):
                return fix.fix, {name: value for name, value in match.groupdict().items() if value}
        return self.fix, {}

    def choose_retry(self, text: str) -> str:
        """Whether a retry can help in the case that the text shows."""
        return next((fix.retry for fix in self.fixes if fix.regex.search(text)), "") or self.retry


@dataclass(frozen=True)
class Keyword:
    """Words that tell what a text is about, where no pattern does."""

    cause: str
    match: str

    @cached_property
    def regex(self) -> re.Pattern[str]:
        return re.compile(self.match, re.IGNORECASE)


@dataclass(frozen=True)
class Catalogue:
    """All causes, by id, in the order of the file."""

    causes: Mapping[str, Cause]
    translations: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)  # signals, messages
    packages: Mapping[str, str] = field(default_factory=dict)  # Python module -> what pip installs, where names differ
    keywords: Sequence[Keyword] = ()

    @cached_property
    def foreign(self) -> dict[str, tuple[str, str]]:
        """Every translated word, the longest first: the form in which it counts, and its English."""
        forms = {"signals": (SIGNAL_FORM, "line 0: 0 "), "heads": (HEAD_FORM, ""), "messages": (MESSAGE_FORM, "")}
        words = {
            word: (forms[kind][0], forms[kind][1] + english)
            for kind, table in self.translations.items()
            for english, translations in table.items()
            for word in translations
        }
        return dict(sorted(words.items(), key=lambda item: -len(item[0])))

    def in_english(self, text: str) -> str:
        """Returns the text with what a shell or the C library says in another language as they say it in English."""
        for word in self._foreign_index.find(text):
            form, english = self.foreign[word]
            pattern = re.compile(form.format(word=re.escape(word)), re.MULTILINE)
            parts = pattern.split(text)  # text, colon or None, text, ...
            text = parts[0] + "".join(
                f"{': ' if colon else ''}{english}{after}"
                for colon, after in zip(parts[1::2], parts[2::2], strict=True)
            )
        return text

    @cached_property
    def _foreign_index(self) -> WordIndex:
        return WordIndex(self.foreign)

    @cached_property
    def _literal_index(self) -> WordIndex:
        return WordIndex(self.by_literal)

    @cached_property
    def by_literal(self) -> dict[str, list[tuple[Cause, Pattern]]]:
        """Every text that any pattern matches contains one of these keys."""
        index: dict[str, list[tuple[Cause, Pattern]]] = {}
        for cause in self.causes.values():
            for pattern in cause.patterns:
                for literal in pattern.literals:
                    index.setdefault(literal, []).append((cause, pattern))
        return index

    @cached_property
    def _places(self) -> dict[str, int]:
        return {id: place for place, id in enumerate(self.causes)}

    @cached_property
    def _matches(self) -> dict[tuple[str, str], list[tuple[Cause, float, dict[str, str]]]]:
        return {}

    def match(self, text: str, kind: str) -> list[tuple[Cause, float, dict[str, str]]]:
        """Every cause that the text shows, by its pattern of highest weight, with that weight and the values of its groups.

        Sorted by weight, the highest first, and then in the order of the file.
        """
        key = (text, kind)
        if (matches := self._matches.get(key)) is None:
            if len(self._matches) > MAX_MATCHES:
                self._matches.clear()
            text = self.in_english(text[:MAX_TEXT])
            call = CUDA_CALL.search(text)
            as_torch_says = f"\nCUDA error: {call[call.lastindex or 0]}" if call else ""
            matches = self._matches[key] = self._search(text + as_torch_says, kind)
        return matches

    def guess(self, text: str) -> Cause | None:
        """The cause that a text is likely about, by its words alone."""
        text = self.in_english(text[:MAX_TEXT])
        return next((self.causes[keyword.cause] for keyword in self.keywords if keyword.regex.search(text)), None)

    def _search(self, text: str, kind: str) -> list[tuple[Cause, float, dict[str, str]]]:
        lowered = text.lower()
        best: dict[str, tuple[Cause, float, dict[str, str]]] = {}
        for literal in self._literal_index.find(lowered):
            for cause, pattern in self.by_literal[literal]:
                previous = best.get(cause.id)
                if (previous and previous[1] >= pattern.weight) or not pattern.fits(kind):
                    continue
                match = pattern.regex.search(text)
                if match and not (pattern.unless and re.search(pattern.unless, text, re.MULTILINE)):
                    values = {name: value for name, value in match.groupdict().items() if value}
                    best[cause.id] = (pattern.overriding(cause), pattern.weight, values)
        places = self._places
        return sorted(best.values(), key=lambda match: (-match[1], places[match[0].id]))


@cache
def load_catalogue() -> Catalogue:
    tables = tomllib.loads(Path(__file__).with_name("catalogue.toml").read_text(encoding="utf-8"))
    named = {name: tables[name] for name in ("common_fixes", "translations", "packages")}
    made = make_catalogue(tables["cause"], **named)
    return replace(made, keywords=[Keyword(**keyword) for keyword in tables["keywords"]])


def make_catalogue(
    entries: Iterable[Mapping[str, Any]],
    *,
    common_fixes: Mapping[str, Mapping[str, str]] | None = None,
    translations: Mapping[str, Any] | None = None,
    packages: Mapping[str, str] | None = None,
) -> Catalogue:
    """The catalogue of these entries; ValueError if two have the same id."""
    causes: dict[str, Cause] = {}
    common = common_fixes or {}
    for entry in entries:
        fixes = [Fix(**(common[fix["common"]] if "common" in fix else fix)) for fix in entry.get("fixes", ())]
        patterns = [Pattern(**pattern) for pattern in entry.get("patterns", ())]
        cause = Cause(**{**entry, "fixes": fixes, "patterns": patterns})
        if cause.id in causes:
            raise ValueError(f"two entries {cause.id}")
        causes[cause.id] = cause
    return Catalogue(causes, translations or {}, packages or {})


def find_cause(id: str) -> Cause:
    """The cause with this id; PacelineError with the ids that have it as a part, or the nearest, if there is none."""
    causes = load_catalogue().causes
    if id not in causes:
        related = [name for name in causes if f"-{id.lower()}-" in f"-{name}-"]
        near = related[0] if len(related) == 1 else nearest(id.lower(), causes)
        fix = f"--cause {near}" if near else "paceline explain --list shows all causes"
        fix = f"one of {', '.join(sorted(related))}" if len(related) > 1 else fix
        raise PacelineError(f"no cause {id}", fix=fix)
    return causes[id]


def format_causes() -> str:
    """One line for each cause, sorted by id."""
    causes = load_catalogue().causes
    width = max(map(len, causes), default=0)
    return "\n".join(f"{id:<{width}}  {cause.title}" for id, cause in sorted(causes.items()))


def format_cause(id: str) -> str:
    """Everything that the catalogue contains about one cause."""
    cause = find_cause(id)
    labels = [(f"{label[0].lower()}{label[1:]}", value) for label, value in facts_of(cause)]
    facts = [f"{label:<15} {value}" if len(label) <= 15 else f"{label}:\n{'':<15} {value}" for label, value in labels]
    patterns = [f"  {pattern.weight:.2f}  {pattern.match}" for pattern in cause.patterns]
    shown = ["weights and patterns", *patterns] if patterns else ["no line of a log shows it, the curves of a run do"]
    return "\n".join([f"{id}: {format_title(cause)}", "", *facts, "", *shown])


def causes_json(id: str | None = None) -> str:
    """One cause, or all, as JSON. Field names stay as published: `fixed_by` has another name there."""
    causes = load_catalogue().causes.values() if id is None else [find_cause(id)]
    fields = [
        {"mend" if name == "fixed_by" else name: value for name, value in asdict(cause).items()} for cause in causes
    ]
    return json.dumps(fields if id is None else fields[0], indent=1, ensure_ascii=False)


def format_title(cause: Cause) -> str:
    return cause.title + (" (a warning: it never ends a run by itself)" if cause.severity == "warning" else "")


def retry_note(fix: Fix) -> str:
    return f"; a retry {RETRIES[fix.retry]}" if fix.retry else ""


def facts_of(cause: Cause) -> list[tuple[str, str]]:
    """What users read about a cause, as labels and texts."""
    facts = [
        ("Message", cause.summary),
        ("Fix", cause.fix),
        ("Why", cause.why),
        *((f"Fix if {fix.case}", f"{fix.fix} ({fix.why}{retry_note(fix)})") for fix in cause.fixes),
        ("Fixed by", FIXERS[cause.fixed_by]),
        ("A retry", RETRIES[cause.retry]),
        ("Can follow from", "any other cause" if cause.follows is True else ", ".join(cause.follows or ())),
        ("Similar causes", ", ".join(cause.mistaken_for)),
        ("Source", cause.source),
    ]
    return [(label, text) for label, text in facts if text]
