"""
The explanation of a failure, the records and the progress that it is made from, and its output formats.

The reader parses a log into records, the catalogue matches their text, the verdict turns the matches into one Explanation.
It is printed as text, as Markdown or as JSON.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import Any, Literal

from paceline.explain.lines import DIGITS
from paceline.terminal import STEERING
from paceline.units import format_bytes, format_list, format_percent, format_ranks

RecordKind = Literal["exception", "line", "signal", "exit", "banner"]
HEALTHY, UNKNOWN = "healthy", "unknown"  # besides the ids of the catalogue

# only the supervisor observes them
SUPERVISOR_CAUSES = frozenset({
    "hang", "exited-early", "host-lost", "link-lost", "supervisor-lost", "hosts-unconnected", "hosts-path-mtu", "job-over",
})  # fmt: skip
# by a rank, with their own fix; not in the catalogue
REPORTED_CAUSES = frozenset({"loss-spike", "gradient-nan", "refused"})
KERNEL_LOG = "kernel log"  # how the source of its lines begins
RECORDED = "events.jsonl"  # the source of records of how ranks ended, which the supervisor wrote
MAX_LINES, MAX_WIDTH = 4, 200  # of one message on the screen
MAX_TEXT = 600  # characters of a line of evidence
MAX_VICTIMS = 16  # listed by number
# fields of to_json() that can quote the log, which anyone may have written
UNTRUSTED = (
    *("summary", "fix", "host", "evidence.text", "evidence.source", "consequences.text", "consequences.source"),
    *("curves.name", "curves.source", "curves.summary", "notes"),
)
MARKDOWN = re.compile(r"([\\`*_\[\]<>|~#!&$])")
BARS, NO_BAR, MARK = "▁▂▃▄▅▆▇█", "×", "│"  # × where a curve is NaN or infinite, │ before what is wrong
LOG_SCALE = 3  # times the lowest value, from which on bars show logarithms
TABLE_COLUMNS = 7
RED, GREEN, RESET = "\x1b[1;31m", "\x1b[32m", "\x1b[0m"


@dataclass(frozen=True)
class Record:
    """One event of one rank: an exception with its traceback, a line that reports an error, a signal or an exit."""

    kind: RecordKind
    text: str  # without prefix, colours and progress bars; of an exception "Type: message" with the whole message
    line: int  # number of its first line in the log, from 1
    rank: int | None = None
    host: str | None = None
    time: float | None = None  # seconds, comparable within one log
    step: int | None = None  # of the last progress line before it
    frames: tuple[str, ...] = ()  # 'File "x", line 3, in f' lines of a traceback, innermost last
    source: str | None = None  # the file's name if several were read
    device: int | None = None  # the GPU's index on its host, in lines of NCCL
    # how the first exception of a chain of tracebacks begins, which was handled when this one was raised
    context: str = ""


@dataclass(frozen=True)
class LogProgress:
    """How far a log got, by its progress lines."""

    steps: int = 0  # number of progress lines
    first_step: int | None = None
    last_step: int | None = None
    last_loss: float | None = None
    nan_line: int | None = None  # from this line on every value of nan_measure is NaN or infinite
    nan_step: int | None = None
    nan_rank: int | None = None  # whose values were NaN steps before those of the others
    nan_measure: str = "loss"
    is_all_nan: bool = False  # no loss was finite
    done_line: int | None = None  # reports that the work is done
    finished: bool = False  # the log reports that the work is done
    silent_end: bool = False  # the last line is a progress line
    last_epoch: tuple[int, int] | None = None  # with their number, where the line of the last step has both


@dataclass(frozen=True)
class Evidence:
    """A line of the log that supports a verdict."""

    line: int
    text: str
    rank: int | None = None
    source: str | None = None  # the file's name if several were read


def make_evidence(records: Sequence[Record], limit: int) -> tuple[Evidence, ...]:
    """The first records; texts of one rank that differ only by digits appear once."""
    distinct: dict[tuple[int | None, str], Evidence] = {}
    for record in records:
        text = shorten(record.text)
        key = (record.rank, text.translate(DIGITS))
        distinct.setdefault(key, Evidence(record.line, text, record.rank, record.source))
    return tuple(distinct.values())[:limit]


def shorten(text: str) -> str:
    return cut(text.strip(), MAX_TEXT)


def cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


@dataclass(frozen=True)
class CurveEvidence:
    """A curve of the run, thinned, and what it shows."""

    name: str
    source: str  # the file
    steps: tuple[int, ...]
    values: tuple[float | None, ...]  # None: NaN or infinite
    cause: str | None = None  # None: nothing is wrong with it
    step: int | None = None  # where that began
    summary: str = ""


@dataclass(frozen=True)
class Explanation:
    """What failed, where, and the fix; cause is an id of the catalogue, one of the causes above, HEALTHY or UNKNOWN."""

    cause: str
    also: tuple[str, ...] = ()
    confidence: float = 0.0
    rank: int | None = None
    step: int | None = None
    host: str | None = None
    line: int | None = None
    summary: str = ""
    fix: str = ""
    evidence: tuple[Evidence, ...] = ()
    consequences: tuple[Evidence, ...] = ()
    progress: LogProgress = LogProgress()
    victims: tuple[int, ...] = ()  # ranks that failed only as a consequence
    curves: tuple[CurveEvidence, ...] = ()
    notes: tuple[str, ...] = ()  # what of the input was not read

    @property
    def shows_failure(self) -> bool:
        """Whether there is a failure, known or not; an unknown cause without a line means that nothing was found."""
        return self.cause != HEALTHY and (self.cause != UNKNOWN or self.line is not None)


def name_host(explanation: Explanation, hosts: Mapping[str, Sequence[int]]) -> Explanation:
    """Returns the explanation with the host of its rank, also in the summary: `rank 3 on bob`. hosts: the ranks on each."""
    rank = explanation.rank
    host = next((name for name, ranks in hosts.items() if rank in ranks), None)
    if host is None:
        return explanation
    subject, summary = f"rank {rank} on {host}", explanation.summary
    if subject not in summary:
        summary = re.sub(rf"\brank {rank}\b", lambda _: subject, summary, count=1)
    return replace(explanation, host=host, summary=summary)


def format_explanation(explanation: Explanation, *, coloured: bool = False) -> str:
    """Cause and fix on the first two lines, then the evidence, the consequences and notes."""
    explanation = without_controls(explanation)
    cause, label = explanation.cause, "fix"
    if coloured:
        cause = f"{GREEN if cause == HEALTHY else RED}{cause}{RESET}"
        label = f"{GREEN}{label}{RESET}"
    lines = [f"{cause}: {format_summary(explanation)}"]
    if explanation.fix:
        lines.append(f"  {label}: {explanation.fix}")
    for title, evidence in (("evidence", explanation.evidence), ("consequences", explanation.consequences)):
        lines += ["", title, *format_evidence(evidence)] if evidence else []
    if explanation.curves:
        lines += ["", "curves", *format_curves(explanation, mark=f"{RED}{MARK}{RESET}" if coloured else MARK)]
    return "\n".join([*lines, *format_notes(explanation)])


def format_markdown(explanation: Explanation) -> str:
    """The same as Markdown, to paste into an issue."""
    explanation = without_controls(explanation)
    lines = [f"**{explanation.cause}**: {escape_markdown(format_summary(explanation))}"]
    if explanation.fix:
        lines += ["", f"**Fix:** {with_commands(explanation.fix)}"]
    for title, block in (
        ("Evidence", format_evidence(explanation.evidence)),
        ("Consequences", format_evidence(explanation.consequences)),
        ("Curves", format_curves(explanation)),
    ):
        if not block:
            continue
        longest = max((len(ticks) for line in block for ticks in re.findall("`+", line)), default=0)
        fence = "`" * max(3, longest + 1)  # longer than any run of backticks in the text
        lines += ["", f"{title}:", "", f"{fence}text", *block, fence]
    return "\n".join([*lines, *format_notes(explanation)])


def to_json(explanation: Explanation) -> str:
    """All fields, and under `untrusted` the names of those that can quote the log."""
    values = {**asdict(without_controls(explanation)), "untrusted": UNTRUSTED}
    return json.dumps(values, indent=1, ensure_ascii=False)


def without_controls(explanation: Explanation) -> Explanation:
    """The explanation without characters in its texts that steer a terminal or turn the direction of text."""

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            return value if value.isprintable() else STEERING.sub("", value)
        if isinstance(value, tuple):
            return tuple(map(clean, value))
        if not is_dataclass(value):
            return value
        return replace(value, **{field.name: clean(getattr(value, field.name)) for field in fields(value)})  # type: ignore[type-var]

    return clean(explanation)  # type: ignore[no-any-return]


def escape_markdown(text: str) -> str:
    return MARKDOWN.sub(r"\\\1", " ".join(text.split()))


def with_commands(fix: str) -> str:
    """A fix as Markdown, in which its commands, between backticks, stay code."""
    texts = fix.split("`")
    if len(texts) % 2 == 0:  # one of them has no end
        return escape_markdown(fix)
    return "".join(f"`{text}`" if number % 2 else MARKDOWN.sub(r"\\\1", text) for number, text in enumerate(texts))


def format_summary(explanation: Explanation | Mapping[str, Any]) -> str:
    """The summary, with the rank, the step and the host that it does not mention itself: that of a curve, else the last one."""
    fields = explanation if isinstance(explanation, Mapping) else vars(explanation)
    rank, step, host, summary = (fields.get(name) for name in ("rank", "step", "host", "summary"))
    summary = str(summary or "")
    subject = f"rank {rank}" + (f" on {host}" if host else "")
    parts = [subject] if rank is not None and f"rank {rank}" not in summary else []
    if step is not None and f"step {step}" not in summary:
        parts.append(f"step {step:,}" if fields.get("curves") else f"last step {step:,}")
    parts += [f"host {host}"] if host is not None and subject not in parts and host not in summary else []
    return summary + (f" ({', '.join(parts)})" if parts else "")


def format_failures(failures: Iterable[tuple[int, str, str]]) -> list[str]:
    """One line for each cause: the attempts that failed of it, and the last one's summary. failures: attempt, cause, summary."""
    by_cause: dict[str, tuple[list[int], str]] = {}
    for attempt, cause, summary in failures:
        by_cause[cause] = ([*by_cause.get(cause, ([], ""))[0], attempt], summary)
    return [
        f"attempt{'s' * (len(numbers) > 1)} {format_list(numbers)} failed: {cause}: {summary}"
        for cause, (numbers, summary) in by_cause.items()
    ]


def format_evidence(evidence: Sequence[Evidence]) -> list[str]:
    """Place, rank and the first lines of each message."""
    lines = []
    for item in evidence:
        place = f"{' '.join(item.source.split())}:{item.line}" if item.source else f"line {item.line}"
        rank = "" if item.rank is None else f"rank {item.rank}  "
        first, *others = item.text.splitlines() or [""]
        lines.append(f"  {place}  {rank}{cut(first, MAX_WIDTH)}")
        lines += [f"      {cut(line, MAX_WIDTH)}" for line in others[: MAX_LINES - 1]]
    return lines


def format_curves(explanation: Explanation, *, mark: str = MARK) -> list[str]:
    """Each curve as bars on one line, and a table of some of its values; what it shows, unless the first line says so."""
    lines = []
    for curve in explanation.curves:
        summary = f": {curve.cause}, {curve.summary}" if curve.cause not in (None, explanation.cause) else ""
        where = "" if curve.step is None else f", {MARK} step {curve.step:,}"
        lines += [f"  {curve.name} ({curve.source}){summary}"[: 2 * MAX_WIDTH]]
        lines += [f"    {format_bars(curve, mark=mark)}  step {curve.steps[0]:,} to {curve.steps[-1]:,}{where}"]
        last = len(curve.steps) - 1
        columns = {number * last // (TABLE_COLUMNS - 1) for number in range(TABLE_COLUMNS)} | {mark_of(curve) or 0}
        cells = [(f"{curve.steps[at]:,}", format_value(curve.name, curve.values[at])) for at in sorted(columns)]
        widths = [max(map(len, cell)) for cell in cells]
        for row, label in enumerate(("step", "value")):
            texts = (cell[row].rjust(width) for cell, width in zip(cells, widths, strict=True))
            lines.append(f"    {label:<5}  {'  '.join(texts)}")
    return lines


def mark_of(curve: CurveEvidence) -> int | None:
    """The column in which something began to be wrong."""
    if curve.step is None:
        return None
    return max((at for at, step in enumerate(curve.steps) if step <= curve.step), default=0)


def format_bars(curve: CurveEvidence, *, mark: str) -> str:
    finite = [value for value in curve.values if value is not None]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = math.log if low > 0 and high > LOG_SCALE * low else float
    first, last = (scale(low), scale(high)) if finite else (0.0, 0.0)
    parts = []
    for at, value in enumerate(curve.values):
        share = 0.0 if value is None or first == last else (scale(value) - first) / (last - first)
        parts += [mark] if at == mark_of(curve) else []
        parts.append(NO_BAR if value is None else BARS[round(share * (len(BARS) - 1))])
    return "".join(parts)


def format_value(name: str, value: float | None) -> str:
    """A value of a curve, with its unit where the name has it."""
    if value is None:
        return "nan"
    in_bytes = "bytes" in name.lower() or name.endswith("_used")
    return format_bytes(value) if in_bytes else f"{value:,.0f}" if 1e4 <= abs(value) < 1e7 else f"{value:.4g}"


def format_notes(explanation: Explanation) -> list[str]:
    """What was not read, the victims, the confidence and other possible causes."""
    notes = list(explanation.notes)
    if explanation.victims:
        notes.append(f"{format_ranks(explanation.victims, limit=MAX_VICTIMS)} failed only as a consequence")
    if explanation.cause not in (HEALTHY, UNKNOWN):
        also = f"; it could also be {' or '.join(explanation.also)}" if explanation.also else ""
        is_listed = explanation.cause not in SUPERVISOR_CAUSES | REPORTED_CAUSES
        command = f"; more: paceline explain --cause {explanation.cause}" if is_listed else ""
        notes.append(f"{format_percent(explanation.confidence)} sure{also}{command}")
    return ["", *notes] if notes else []
