"""
Undoes what other programs have done to a program's output: a prefix before each line, lines broken at a width.

Airflow, Spark, Determined or a launcher's own logger write a prefix before each line. It is in no list, and its level says nothing
about the line behind it. It is learned where it is certain: two lines that no logger writes one by one, such as frames of a
traceback, have the same before them, but for digits. From then on it is removed from every line that begins so. So is what every
line of a log begins with: the spaces of a pasted one, a tag in brackets, a time with the name of a logger.

A terminal breaks lines at its width: in a copy from tmux, in what PowerShell writes of a program's stderr. A log counts as broken
where its longest lines are equally long, most of them are followed by a line that begins otherwise than they do, and words go on in
that line. PowerShell breaks before a word that does not fit and keeps the space; its record of the first line shows the width.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import AnyStr

from paceline.explain.lines import DIGITS, HOST, has_word, split_prefix, strip_escapes, unwrap_json
from paceline.explain.progress import reports_progress

# of Python and NCCL, which write them at the start of a line
DIRECT = re.compile(
    r'Traceback \(most recent call last\)|(?:  )?File "[^"]*", line \d|[\w.-]{1,80}:\d+:\d+ \[-?\d+\] NCCL '
)
TRACEBACK = b"Traceback (most recent call last)"
DIRECT_WORDS = (TRACEBACK, b'File "', b'File \\"', b"] NCCL ")
# of an error behind which the next text began without a newline
MESSAGE = re.compile(r"(?:Error|Exception|Interrupt)\b")
MAX_APART = 12  # lines between two of them
MAX_LINES, MAX_PREFIXES, MAX_PREFIX = 60, 8, 120  # of them looked at in a block; learned; characters
MAX_SAMPLE = 500  # lines of which the common start is looked for
MIN_COMMON, MIN_SHARED = 3, 4  # lines that begin alike; that begin alike but for their digits
TAG = re.compile(rb"\s*(?:[^\s|][^\n]{0,60}[\]|>] |> |)")  # but not the edge of a table
AS_ZERO, ZEROS, SPACES = str.maketrans("123456789", "0" * 9), re.compile("00+"), re.compile(r"\s+")
EDGE = re.compile(r"^\+|[\])}>|](?!:) ?|:(?![0:]) ?| (?:- )?")  # where a prefix may end
HAS_WORD = re.compile(r"[A-Za-z]{3}")
FORWARDER = re.compile(  # digits as 0: a time or a number alone, a level with names around it, the name of a pod or a stream
    r"\+|(?:[\d\W_]|[AP]M|UTC|\b[TZ]\b|(?<=\d)[TZs]|[A-Z][a-z]{2} (?=\d))+"
    r"|(?:[IWE](?=\d)|\[\w+ [IW] |.*\b(?:INFO|WARN(?:ING)?|DEBUG|info|warning|debug)\b).{0,80}"
    r"|[\w.-]*-\d[\w.-]* (?:[\w.-]+ )?|std(?:err|out): ?|[A-Za-z][\w.-]*\d: ?|\W.{0,60}[\])|>]:? ?|.*\d:\d.* [\w.-]*\d[\w.-]* "
)
ERROR_LEVEL = re.compile(r"\b(?:ERROR|CRITICAL|FATAL)\b")
NOT_FORWARDER = re.compile(r"\bTrial \d|Error\b|Exception\b|(?i:loss|epoch|step|iter)|[\"']|(?<!rank)=")
PARTS = re.compile(r"(\d+|\s+)")
CLOCK = re.compile(r"\d:\d\d")
LEVEL = re.compile(r"\b(?:INFO|WARN(?:ING)?|ERROR|DEBUG|CRITICAL)\b")
COUNT = re.compile(r"\[?(\d{1,9})\]?\s")
RANK = re.compile(r"(?i)\brank\W?(\d{1,6})\b|\[(\d{1,6})\]<std")
NOT_IN_NAME = re.compile(r"[^\w.-]+")
MIN_WIDTH, MAX_WIDTH = 60, 400  # characters of a line
MIN_BROKEN, MIN_SHARE = 3, 0.6  # different lines that go on in the next one, and their share of those of full width
START = 4  # characters by which two lines begin alike
POWERSHELL_RECORD = "    + CategoryInfo "
IN_SHELL = re.compile(r"\S+ : ")  # `python : `, before the first line of its stderr
MAX_RECORD = 40  # lines of a record up to CategoryInfo
RULE = 12  # different characters; fewer are a line of dashes


class ForwardedLines:
    """Learns the prefixes of one log and removes them; a rank or the name of a host in them stays."""

    def __init__(self) -> None:
        self._patterns: dict[str, re.Pattern[bytes]] = {}  # by prefix without digits
        self._common: bytes | None = None  # what all lines of the first block begin with

    def unwrap(self, lines: list[bytes], block: bytes) -> list[bytes]:
        """The lines of a block without these prefixes; the same list if it has none."""
        is_first = self._common is None
        if self._common is None:
            self._common = common_start(lines)
            self._learn_shared(lines)
        if self._common:
            lines = [line.removeprefix(self._common) for line in lines]
        if len(self._patterns) < MAX_PREFIXES and (is_first or TRACEBACK in block):
            self._learn(lines)
        return [self._strip(line) for line in lines] if self._patterns else lines

    def _learn(self, lines: Sequence[bytes]) -> None:
        direct = [at for at, line in enumerate(lines) if has_word(line, DIRECT_WORDS)]
        last: dict[str, int] = {}  # by prefix without digits: the line that had it last
        for at in direct[:MAX_LINES]:
            whole = read_text(lines[at]).rstrip()
            text = split_prefix(whole).text
            text = text if whole.endswith(text) else whole  # a level of glog stays in the text behind its time
            match = DIRECT.search(text)
            prefix = text[: match.start()] if match else ""
            if not prefix.strip() or len(prefix) > MAX_PREFIX or MESSAGE.search(prefix):
                continue
            shape = prefix.translate(DIGITS)
            if at - last.get(shape, -MAX_APART) < MAX_APART:
                known = whole[: len(whole) - len(text)]
                pattern = f"({pattern_of(known)})({pattern_of(prefix)})"
                self._patterns.setdefault(shape, re.compile(pattern.encode("utf-8", "replace")))
            last[shape] = at

    def _learn_shared(self, lines: Sequence[bytes]) -> None:
        """Learns the prefix of all lines, which differs in its digits."""
        texts = [line for line in lines if line.strip()]
        sample = [read_text(line) for line in texts[:: 1 + len(texts) // MAX_SAMPLE]]
        if not (shape := shared_shape(sample)) or counts_up(sample):
            return
        start = re.compile(pattern_of(shape.strip()) + (r"\s" if shape.endswith(" ") else ""))
        ends = [(line, match.end()) for line in sample if (match := start.match(line))]
        line, end = ends[0] if ends else ("", 0)
        text = split_prefix(line).text
        # it also tells time, rank and host; a level of glog stays in the text behind its time
        known = line.rstrip().removesuffix(text) if line.rstrip().endswith(text) else ""
        if end <= len(known):
            return
        indents = [len(line[end:]) - len(line[end:].lstrip(" ")) for line, end in ends if line[end:].strip()]
        prefix = line[:end].removeprefix(known).lstrip() + " " * min(indents, default=0)
        pattern = f"({pattern_of(known) if known else ''})({pattern_of(prefix)})"
        self._patterns[prefix.translate(DIGITS)] = re.compile(pattern.encode("utf-8", "replace"))

    def _strip(self, raw: bytes) -> bytes:
        """A line without the first of the prefixes with which it begins."""
        if b"\x1b" in raw or raw.startswith(b"{"):
            raw = read_text(raw).encode("utf-8", "replace")
        for pattern in self._patterns.values():
            if match := pattern.match(raw):
                known = match[1] + origin_of(match[2].decode("utf-8", "replace")).encode()
                space = b" " if known[-1:].isdigit() else b""  # between a time and the text
                return known + space + raw[match.end() :]
        return raw


def counts_up(texts: Sequence[str]) -> bool:
    """Whether all lines begin with a count, such as [5] of an iteration, that rises often and never falls."""
    counts = [int(match[1]) for text in texts if (match := COUNT.match(text))]
    steps = [after - before for before, after in pairwise(counts)]
    return len(counts) == len(texts) and min(steps, default=0) >= 0 and 3 * sum(map(bool, steps)) >= len(steps) > 0


class WrappedLines:
    """Finds the width at which the lines of a log are broken, in its first block, and joins them."""

    def __init__(self) -> None:
        self._width: int | None = None  # 0 if the lines are whole
        self._at_words = False  # PowerShell's way

    def join(self, lines: list[bytes], numbers: Sequence[int]) -> tuple[list[bytes], Sequence[int]]:
        """The lines as they were before, each with the number of its first part; the same lists if none is broken."""
        if self._width is None:
            texts = [line.decode("utf-8", "replace") for line in lines]
            self._width = width_of_record(texts)
            self._at_words = self._width > 0
            self._width = self._width or find_width(texts)
        if not self._width:
            return lines, numbers
        joined: list[bytes] = []
        first_numbers: list[int] = []
        goes_on = False
        for at, (line, number) in enumerate(zip(lines, numbers, strict=True)):
            if goes_on:
                joined[-1] += line
            else:
                joined.append(line)
                first_numbers.append(number)
            if self._at_words:
                goes_on = goes_on_at_word(line, b"".join(lines[at + 1 : at + 2]), self._width)
            else:
                goes_on = len(line.decode("utf-8", "replace")) == self._width
        return joined, first_numbers


def common_start(lines: Sequence[bytes]) -> bytes:
    """What all lines begin with that are not empty: spaces and a tag, but no level and no progress."""
    texts = [line for line in lines if line.strip()]
    if len(texts) < MIN_COMMON:
        return b""
    match = TAG.match(common_prefix(texts))
    tag = match[0].decode("utf-8", "replace") if match else ""
    is_tag = not LEVEL.search(tag) and split_prefix(f"{tag}text").text != "text" and not reports_progress(tag)
    return match[0] if match and (is_tag or not tag.strip()) else b""


def common_prefix(texts: Sequence[AnyStr]) -> AnyStr:
    first, last = min(texts), max(texts)
    length = next((at for at, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), len(first))
    return first[:length]


def shared_shape(lines: Sequence[str]) -> str:
    """What all lines begin with, digits as 0 and spaces as one, up to where a logger's prefix may end; empty if it is none."""
    if len(lines) < MIN_SHARED:
        return ""
    shapes = [ZEROS.sub("0", SPACES.sub(" ", line[: 2 * MAX_PREFIX].translate(AS_ZERO))) for line in lines]
    common = common_prefix(shapes)
    if ERROR_LEVEL.search(common):  # it says that all lines are errors
        return ""
    for end in [edge.end() for edge in EDGE.finditer(common[:MAX_PREFIX])][::-1]:
        shape = common[:end]
        is_cut = "0:0" in common[end:]  # before the time that the program itself writes
        if is_cut or NOT_FORWARDER.search(shape) or not FORWARDER.fullmatch(shape):
            continue
        if len({text for text in (line[len(shape) :] for line in shapes) if HAS_WORD.search(text)}) >= MIN_COMMON:
            return "" if reports_progress(shape) else shape
    return ""


def read_text(raw: bytes) -> str:
    """A line without colours; of a JSON object the message, if it is one line."""
    parts = unwrap_json(raw)
    return strip_escapes((parts[0] if len(parts) == 1 else raw).decode("utf-8", "replace"))


def pattern_of(prefix: str) -> str:
    """A pattern for prefixes that differ in their digits; on an empty line it ends without its spaces."""
    words = prefix.strip()
    pattern = "".join(
        r"\d+" if part.isdigit() else r"\s+" if part.isspace() else re.escape(part) for part in PARTS.split(words)
    )
    spaces = prefix[len(prefix.rstrip()) :]
    return f"\\s*{pattern}" + (f"(?:{re.escape(spaces)}|\\s*$)" if spaces else "")


def origin_of(prefix: str) -> str:
    """What a prefix tells of where a line comes from, in the form of torchrun or docker compose; empty if it tells nothing."""
    if match := RANK.search(prefix):
        return f"[rank{match[match.lastindex or 0]}]: "
    name = NOT_IN_NAME.sub("-", prefix).strip("-") + " | "
    is_name = HOST.fullmatch(name) and any(map(str.isdigit, name)) and not CLOCK.search(prefix)
    return name if is_name and not LEVEL.search(prefix) else ""


def find_width(lines: Sequence[str]) -> int:
    """The width at which lines are broken; 0 if they are whole."""
    width = max(map(len, lines), default=0)
    if not MIN_WIDTH <= width <= MAX_WIDTH:
        return 0
    full = [(line, after) for line, after in pairwise(lines) if len(line) == width and len(set(line)) > RULE]
    broken = [(line, after) for line, after in full if after and line[:START] != after[:START]]
    num_words = sum(is_word(line[-1]) and is_word(after[0]) for line, after in broken)
    num_shapes = len({line.translate(DIGITS) for line, _ in broken})  # a line of progress has one
    is_wrapped = num_shapes >= MIN_BROKEN and len(broken) >= MIN_SHARE * len(full) and num_words >= len(broken) / 2
    return width if is_wrapped else 0


def goes_on_at_word(line: bytes, after: bytes, width: int) -> bool:
    """Whether PowerShell broke a line before `after`: it was full, or had no place for the next word and a space behind it."""
    length = len(line.decode("utf-8", "replace"))
    if length == width:
        return not after.startswith(b"  ")
    return length < width and line.endswith(b" ") and length + len(after.split(b" ", 1)[0]) >= width


def width_of_record(lines: Sequence[str]) -> int:
    """The width at which PowerShell breaks the lines of a program's stderr, by its record of the first one; 0 without a record."""
    at = next((at for at, line in enumerate(lines) if line.startswith(POWERSHELL_RECORD)), 0)
    if not at:
        return 0
    start = next((before for before in range(at, max(at - MAX_RECORD, -1), -1) if IN_SHELL.match(lines[before])), at)
    end = next((after for after in range(at, len(lines)) if not lines[after].strip()), len(lines))
    return max(map(len, lines[start:end]))


def is_word(character: str) -> bool:
    return character.isalnum() or character in "_./-"
