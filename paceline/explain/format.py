"""
An explanation for a reader: two lines first, then what it rests on, then what only followed; on the terminal, as Markdown, as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from paceline.explain.record import SUPERVISED, Evidence, Explanation

RED, GREEN, FAINT, PLAIN = "\x1b[1;31m", "\x1b[32m", "\x1b[2m", "\x1b[0m"
LINES_OF_ONE = 4  # shown of a message
WIDTH = 200


def format_explanation(explanation: Explanation, *, coloured: bool = False) -> str:
    """Line one: what broke and where. Line two: what mends it."""
    head = f"{explanation.cause}: {with_place(explanation)}"
    fix = f"  fix: {explanation.fix}"
    if coloured:
        head = (
            f"{GREEN if explanation.cause == 'healthy' else RED}{explanation.cause}{PLAIN}: {with_place(explanation)}"
        )
        fix = f"  {GREEN}fix{PLAIN}: {explanation.fix}"
    lines = [head, *([fix] if explanation.fix else [])]
    if explanation.evidence:
        lines += ["", "evidence", *format_lines(explanation.evidence)]
    if explanation.consequences:
        lines += ["", "only followed", *format_lines(explanation.consequences)]
    if notes := notes_of(explanation):
        lines += ["", *notes]
    return "\n".join(lines)


def with_place(explanation: Explanation) -> str:
    """The summary, with the rank, the step and the host that it does not name itself."""
    parts = []
    if explanation.rank is not None and f"rank {explanation.rank}" not in explanation.summary:
        parts.append(f"rank {explanation.rank}")
    if explanation.step is not None and f"step {explanation.step}" not in explanation.summary:
        parts.append(f"step {explanation.step:,}")
    if explanation.host is not None and explanation.host not in explanation.summary:
        parts.append(f"host {explanation.host}")
    return explanation.summary + (f" ({', '.join(parts)})" if parts else "")


def format_lines(evidence: Sequence[Evidence]) -> list[str]:
    lines = []
    for each in evidence:
        first, *rest = each.text.splitlines() or [""]
        rank = "" if each.rank is None else f"rank {each.rank}  "
        lines.append(f"  {place_of(each)}  {rank}{first[:WIDTH]}")
        lines += [f"      {line[:WIDTH]}" for line in rest[: LINES_OF_ONE - 1]]
    return lines


def place_of(evidence: Evidence) -> str:
    return f"{evidence.source}:{evidence.line}" if evidence.source else f"line {evidence.line}"


def notes_of(explanation: Explanation) -> list[str]:
    """How sure, what else, who suffered."""
    notes = []
    if explanation.victims:
        some = ", ".join(map(str, explanation.victims[:16])) + (" ..." if len(explanation.victims) > 16 else "")
        notes.append(f"rank{'s' if len(explanation.victims) > 1 else ''} {some} only followed")
    if explanation.cause not in ("healthy", "unknown"):
        also = f"; it could also be {' or '.join(explanation.also)}" if explanation.also else ""
        more = (
            f"; paceline explain --cause {explanation.cause} tells more" if explanation.cause not in SUPERVISED else ""
        )
        notes.append(f"{explanation.confidence:.0%} sure{also}{more}")
    return notes


def format_markdown(explanation: Explanation) -> str:
    """For pasting into an issue."""
    lines = [f"**{explanation.cause}**: {with_place(explanation)}"]
    lines += ["", f"**Fix:** {explanation.fix}"] if explanation.fix else []
    for title, evidence in (("Evidence", explanation.evidence), ("Only followed", explanation.consequences)):
        if evidence:
            fence = fence_for("\n".join(each.text for each in evidence))
            lines += ["", f"{title}:", "", f"{fence}text", *format_lines(evidence), fence]
    if notes := notes_of(explanation):
        lines += ["", *notes]
    return "\n".join(lines)


def fence_for(text: str) -> str:
    """Longer than any row of backticks in the text."""
    fence = "```"
    while fence in text:
        fence += "`"
    return fence


def to_json(explanation: Explanation) -> str:
    return json.dumps(asdict(explanation), indent=1, ensure_ascii=False)
