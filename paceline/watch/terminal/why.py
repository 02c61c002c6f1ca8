"""
The page that answers why: what broke and what mends it, with the lines that say so; each attempt; what the checks found.

Pure: a Snapshot and a width in, lines out.
"""

from typing import Any

from paceline.watch.snapshot import AttemptView, Snapshot
from paceline.watch.terminal.line import EMPTY, Line, clean, cut, heading, wrap

MARKS = {"stop": ("✗", "error"), "warn": ("!", "warning"), "note": ("·", "faint")}


def why(snapshot: Snapshot, *, width: int) -> list[Line]:
    lines = explanation(snapshot.explanation, width=width) if snapshot.explanation else nothing_broke(snapshot, width)
    if snapshot.attempts:
        lines += [EMPTY, heading("attempts", width), *attempts(snapshot.attempts, width=width)]
    if snapshot.findings:
        lines += [EMPTY, heading("what the checks found", width), *findings(snapshot.findings, width=width)]
    return lines


def nothing_broke(snapshot: Snapshot, width: int) -> list[Line]:
    words = {
        "broken": "it ended without a word: neither the supervisor nor a rank wrote why. The logs (5) may tell.",
        "unknown": "nothing in it is known as a step or an error",
    }.get(snapshot.state, "nothing has ended this run")
    return [heading("why", width), *indented(words, width=width, style="faint")]


def explanation(said: dict[str, Any], *, width: int) -> list[Line]:
    healthy = said.get("cause") == "healthy"
    lines: list[Line] = [heading("why", width)]
    lines += marked(
        "✓" if healthy else "✗", f"{said['cause']}: {said['summary']}", width, "good" if healthy else "error"
    )
    if said.get("fix"):
        lines += marked("→", str(said["fix"]), width, "good", text_style="strong")
    place = [f"{name} {said[name]}" for name in ("rank", "step", "host") if said.get(name) is not None]
    sure = f"{said['confidence']:.0%} sure" if isinstance(said.get("confidence"), float) else ""
    also = f"could also be {' or '.join(said['also'])}" if said.get("also") else ""
    others = said.get("victims") or []
    victims = f"rank{'s' if len(others) > 1 else ''} {' '.join(map(str, others[:16]))} only followed" if others else ""
    lines += indented(", ".join(word for word in (*place, sure, also, victims) if word), width=width, style="faint")
    for title, key in (("evidence", "evidence"), ("only followed", "consequences")):
        if said.get(key):
            lines += [EMPTY, heading(title, width)]
            for each in said[key]:
                lines += evidence(each, width=width)
    return lines


def evidence(each: dict[str, Any], *, width: int) -> list[Line]:
    """Where it stands, then the line itself, whole."""
    place = f"{each['source']}:{each['line']}" if each.get("source") else f"line {each.get('line')}"
    rank = "" if each.get("rank") is None else f"  rank {each['rank']}"
    lines: list[Line] = [((f"   {cut(clean(place), width - 20)}", "faint"), (rank, "faint"))]
    for text in str(each.get("text", "")).splitlines()[:8]:
        lines += [(("     ", ""), (row, "")) for row in wrap(clean(text), width - 7)]
    return lines


def attempts(each_of: list[AttemptView], *, width: int) -> list[Line]:
    lines: list[Line] = []
    for each in each_of:
        ended = each.state or "no end was noted"
        style = {"finished": "good", "failed": "error"}.get(ended, "")
        began = each.time[:19].replace("T", " ")
        lines.append(((f" {each.attempt:>3}  ", "strong"), (f"{began} UTC  ", "faint"), (ended, style)))
        if each.summary:
            lines += indented(f"{each.cause}: {each.summary}", width=width, by=6)
        if each.action:
            lines += indented(f"then {each.action.replace('_', ' ')}: {each.why}", width=width, by=6, style="faint")
    return lines


def findings(found: list[dict[str, Any]], *, width: int) -> list[Line]:
    lines: list[Line] = []
    for finding in found:
        mark, style = MARKS.get(str(finding.get("severity")), MARKS["note"])
        lines += marked(mark, f"{finding.get('id')}: {finding.get('what')}", width, style, text_style="")
        lines += indented(f"{finding.get('why')}", width=width, style="faint")
        if finding.get("fix"):
            lines += indented(f"fix: {finding['fix']}", width=width)
    return lines


def marked(mark: str, text: str, width: int, style: str, *, text_style: str | None = None) -> list[Line]:
    tone = style if text_style is None else text_style
    rows = wrap(clean(text), width - 4)
    return [((f" {mark} " if i == 0 else "   ", style), (row, tone)) for i, row in enumerate(rows)]


def indented(text: str, *, width: int, style: str = "", by: int = 3) -> list[Line]:
    return [((" " * by, ""), (row, style)) for row in wrap(clean(text), width - by - 1)] if text else []
