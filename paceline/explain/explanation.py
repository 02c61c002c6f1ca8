"""
The explanation of a failure, the records and the progress that it is made from, and its output formats.

The reader parses a log into records, the catalogue matches their text, the verdict turns the matches into one Explanation.
It is printed as text, as Markdown or as JSON.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from paceline.terminal import STEERING
from paceline.units import format_ranks

RecordKind = Literal["exception", "line", "signal", "exit", "banner"]

# only the supervisor observes them
SUPERVISOR_CAUSES = frozenset({"hang", "exited-early", "host-lost", "link-lost", "supervisor-lost"})
KERNEL_LOG = "kernel log"  # how the source of its lines begins
MAX_LINES, MAX_WIDTH = 4, 200  # of one message on the screen
MAX_VICTIMS = 16  # listed by number
# fields of to_json() that can quote the log, which anyone may have written
UNTRUSTED = ("summary", "fix", "host", "evidence.text", "evidence.source", "consequences.text", "consequences.source")
MARKDOWN = re.compile(r"([\\`*_\[\]<>|~#!&$])")
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


@dataclass(frozen=True)
class LogProgress:
    """How far a log got, by its progress lines."""

    steps: int = 0  # number of progress lines
    first_step: int | None = None
    last_step: int | None = None
    last_loss: float | None = None
    nan_line: int | None = None  # from this line on every value of nan_measure is NaN or infinite
    nan_step: int | None = None
    nan_measure: str = "loss"
    done_line: int | None = None  # reports that the work is done
    finished: bool = False  # the log reports that the work is done
    silent_end: bool = False  # the last line is a progress line


@dataclass(frozen=True)
class Evidence:
    """A line of the log that supports a verdict."""

    line: int
    text: str
    rank: int | None = None
    source: str | None = None  # the file's name if several were read


@dataclass(frozen=True)
class Explanation:
    """What failed, where, and the fix; cause is an id of the catalogue, one of SUPERVISOR_CAUSES, "healthy" or "unknown"."""

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
        cause = f"{GREEN if cause == 'healthy' else RED}{cause}{RESET}"
        label = f"{GREEN}{label}{RESET}"
    lines = [f"{cause}: {format_summary(explanation)}"]
    if explanation.fix:
        lines.append(f"  {label}: {explanation.fix}")
    for title, evidence in (("evidence", explanation.evidence), ("consequences", explanation.consequences)):
        lines += ["", title, *format_evidence(evidence)] if evidence else []
    return "\n".join([*lines, *format_notes(explanation)])


def format_markdown(explanation: Explanation) -> str:
    """The same as Markdown, to paste into an issue."""
    explanation = without_controls(explanation)
    lines = [f"**{explanation.cause}**: {escape_markdown(format_summary(explanation))}"]
    if explanation.fix:
        lines += ["", f"**Fix:** {escape_markdown(explanation.fix)}"]
    for title, evidence in (("evidence", explanation.evidence), ("consequences", explanation.consequences)):
        if not evidence:
            continue
        longest = max((len(ticks) for item in evidence for ticks in re.findall("`+", item.text)), default=0)
        fence = "`" * max(3, longest + 1)  # longer than any run of backticks in the text
        lines += ["", f"{title.capitalize()}:", "", f"{fence}text", *format_evidence(evidence), fence]
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
        if isinstance(value, Evidence):
            source = None if value.source is None else " ".join(clean(value.source).split("\n"))
            return replace(value, text=clean(value.text), source=source)
        return tuple(map(clean, value)) if isinstance(value, tuple) else value

    return replace(
        explanation, **{field.name: clean(getattr(explanation, field.name)) for field in fields(explanation)}
    )


def escape_markdown(text: str) -> str:
    return MARKDOWN.sub(r"\\\1", " ".join(text.split()))


def format_summary(explanation: Explanation) -> str:
    """The summary, with the rank, the step and the host that it does not mention itself."""
    rank, step, host, summary = explanation.rank, explanation.step, explanation.host, explanation.summary
    parts = [f"rank {rank}"] if rank is not None and f"rank {rank}" not in summary else []
    parts += [f"step {step:,}"] if step is not None and f"step {step}" not in summary else []
    parts += [f"host {host}"] if host is not None and host not in summary else []
    return summary + (f" ({', '.join(parts)})" if parts else "")


def format_evidence(evidence: Sequence[Evidence]) -> list[str]:
    """Place, rank and the first lines of each message."""
    lines = []
    for item in evidence:
        place = f"{item.source}:{item.line}" if item.source else f"line {item.line}"
        rank = "" if item.rank is None else f"rank {item.rank}  "
        first, *others = item.text.splitlines() or [""]
        lines.append(f"  {place}  {rank}{first[:MAX_WIDTH]}")
        lines += [f"      {line[:MAX_WIDTH]}" for line in others[: MAX_LINES - 1]]
    return lines


def format_notes(explanation: Explanation) -> list[str]:
    """The victims, the confidence and other possible causes."""
    notes = []
    if explanation.victims:
        notes.append(f"{format_ranks(explanation.victims, limit=MAX_VICTIMS)} failed only as a consequence")
    if explanation.cause not in ("healthy", "unknown"):
        also = f"; it could also be {' or '.join(explanation.also)}" if explanation.also else ""
        command = f"; more: paceline explain --cause {explanation.cause}"
        notes.append(
            f"{explanation.confidence:.0%} sure{also}{'' if explanation.cause in SUPERVISOR_CAUSES else command}"
        )
    return ["", *notes] if notes else []
