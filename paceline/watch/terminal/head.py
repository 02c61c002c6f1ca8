"""
The parts of the terminal view about the run: header, progress, figures, events, plan, time; and the page `why`.

`why` shows what broke and what fixes it, with the log lines that prove it, then each attempt and what the checks found.
Pure: a Snapshot, the time and a width in, lines out. Times are UTC, as everywhere in a run folder.
"""

import math
import shlex
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import chain
from typing import Any

from paceline.explain.explanation import HEALTHY
from paceline.terminal import ELLIPSIS, cut
from paceline.units import format_count, format_duration, format_energy, format_percent, format_ranks
from paceline.watch.measures import METRICS, format_measure, format_time
from paceline.watch.panels import action_text, figures, goodput_panel, severity_level, why_panel
from paceline.watch.snapshot import BROKEN, LIVE, TIME_KINDS, EventView, Snapshot
from paceline.watch.summary import (
    LEVEL_SIGNS,
    STATE_SIGNS,
    UNEXPLAINED,
    attempt_outcome,
    goodput_share,
    ranks_and_hosts,
    summarize,
    time_name,
)
from paceline.watch.terminal.line import Line, Piece, bar, clean, facts_line, fit, heading, paragraph, section, width_of

MAX_RANKS_NAMED = 16
MAX_EVIDENCE_LINES = 8
MARGIN: Piece = ("   ", "")
LEVEL_TONES = {"warning": "orange", "error": "red"}
ARROW: Piece = (" → ", "good")  # before a fix


def header(snapshot: Snapshot, *, now: float, width: int, error: str | None = None) -> list[Line]:
    """Header: name, state, progress, speed, health. error: why the last reading failed; it replaces the title."""
    first = ((f" ! {clean(error)}", "warning"),) if error else title(snapshot, now=now, width=width)
    facts = facts_line(measures(snapshot), width - 2)
    lines = [first, progress(snapshot, width=width), *([((" ", ""), *facts)] if facts else [])]
    if own := clean("  ".join(filter(None, (" ".join(f"#{tag}" for tag in snapshot.tags), snapshot.note)))):
        lines.append(((f" {own}", "faint"),))
    return [fit(line, width) for line in (*lines, *health(snapshot, now=now, width=width))]


def health(snapshot: Snapshot, *, now: float, width: int) -> list[Line]:
    """One line where all is well, else up to two; none for a run that broke, because that has a banner."""
    summary = summarize(snapshot, now=now)
    if summary is None or snapshot.state in ("failed", "broken"):
        return []
    sign, style = LEVEL_SIGNS[summary.level]
    text, start = clean(summary.text), (f" {sign} ", style)
    if summary.level != "good":
        tone = LEVEL_TONES.get(summary.level, "")
        lines = paragraph(text, width, start, style=tone)
        if len(lines) > 2:
            following = " ".join(line[-1][0] for line in lines[1:])
            lines[1:] = paragraph(following, width, MARGIN, style=tone, wrapped=False)
        return lines
    while cut(text, width - 4) != text and ", " in text:
        text = text.rpartition(", ")[0] + "."
    return paragraph(text, width, start, wrapped=False)


def title(snapshot: Snapshot, *, now: float, width: int) -> Line:
    sign, style = STATE_SIGNS[snapshot.state]
    left: list[Piece] = [
        (" " + cut(clean(snapshot.name), max(12, width // 3)), "strong"),
        (f"  {sign} {snapshot.state}", style),
    ]
    if len(snapshot.attempts) > 1:
        left.append((f"  attempt {snapshot.attempts[-1].attempt}", ""))
    if snapshot.state not in LIVE and snapshot.updated is not None:
        left.append((f"  {format_duration(max(0.0, now - snapshot.updated))} ago", "faint"))
    about = origin(snapshot)
    text = f"{cut(about, max(8, width - width_of(left) - 20))}  " if about else ""
    right = ((f"{text}{datetime.fromtimestamp(now, UTC):%H:%M:%S} UTC ", "faint"),)
    room = width - width_of(right)
    return (*fit(left, room), *right) if width_of(left) < room else tuple(left)


def origin(snapshot: Snapshot) -> str:
    """A script's command, a log's framework, a training's ranks and hosts."""
    if snapshot.command:
        return clean(shlex.join(snapshot.command))
    if snapshot.kind == "log":
        return clean(snapshot.framework or "log")
    return clean(ranks_and_hosts(snapshot))


def progress(snapshot: Snapshot, *, width: int) -> Line:
    is_live, share = snapshot.state in LIVE, snapshot.share
    left: Line = ((f" step {snapshot.step:,}  ", "strong"),) if snapshot.step else ((" n/a  ", "faint"),)
    right: list[Piece] = []
    if snapshot.preparing and snapshot.state == "preparing":
        left = ((" n/a  " if share is None else f" {format_percent(share)}  ", "strong"),)
        right.append((f"  {cut(clean(snapshot.preparing['label']), 40)}", "strong"))
    elif snapshot.num_steps and snapshot.step is not None and share is not None:
        left = ((f" {math.floor(1000 * share) / 10:.1f} %  ", "strong"),)
        right.append((f"  {snapshot.step:,}/{snapshot.num_steps:,}", "strong"))
    if is_live and snapshot.eta_s is not None:
        right.append((f"  {format_duration(snapshot.eta_s)} left", ""))
    if snapshot.elapsed_s is not None:
        right.append((f"  {format_duration(snapshot.elapsed_s)} {'so far' if is_live else 'in all'}", "faint"))
    style = STATE_SIGNS[snapshot.state][1]
    style = "blue" if style == "good" and snapshot.state != "finished" else style
    return (*left, *bar(share, max(4, width - width_of((*left, *right)) - 1), style=style), *right)


def measures(snapshot: Snapshot) -> Iterator[tuple[str, str, str]]:
    """Yields names, numbers and their style, the most important first."""
    for name, measure in METRICS.items():
        if name != "peak_bytes" and (value := getattr(snapshot, name, None)) is not None:
            yield measure.label, format_measure(name, value), "strong"
    if snapshot.goodput and (share := goodput_share(snapshot)) is not None:
        place = time_name("steps", snapshot.goodput)
        yield "goodput" if place == TIME_KINDS["steps"] else f"in {place}", format_percent(share), "strong"
    if snapshot.peak_bytes is not None:
        yield "peak", format_measure("peak_bytes", snapshot.peak_bytes), "strong"
    if snapshot.tokens_per_step and snapshot.step:
        yield "tokens", format_count(snapshot.tokens_per_step * snapshot.step), "strong"


def banner(snapshot: Snapshot, *, width: int, height: int) -> list[Line]:
    """Cause and fix of a run that broke, in at most `height` lines."""
    explanation = failure_of(snapshot)
    if snapshot.state == "broken" and not snapshot.explanation:
        text = UNEXPLAINED["broken"] + ("; its logs (5) may show it" if snapshot.logs else "")
        return [((f" ✗ {text}", "error"),)]
    if explanation is None or snapshot.state == "recovering":  # its sentence is in the header
        return []
    lines = paragraph(f"{explanation['cause']}: {explanation['summary']}", width, (" ✗ ", "error"), style="error")
    fix = paragraph(f"fix: {explanation['fix']}", width, ARROW, style="strong") if explanation.get("fix") else []
    return [*shortened(lines, max(1, height - len(fix)), width), *fix][:height]


def shortened(lines: list[Line], height: int, width: int) -> list[Line]:
    """The first lines of a paragraph; an ellipsis ends the last where more follow."""
    if len(lines) <= height:
        return lines
    sign, (text, style) = lines[height - 1]
    return [*lines[: height - 1], (sign, (cut(text, width - 6) + ELLIPSIS, style))]


def failure_of(snapshot: Snapshot) -> dict[str, Any] | None:
    """The explanation of what broke; None for a run that did not break, and for an unexplained one."""
    explanation = snapshot.explanation
    is_failure = explanation and explanation.get("cause") != HEALTHY and snapshot.state in BROKEN
    return explanation if is_failure else None


def event_lines(snapshot: Snapshot, *, now: float, width: int, height: int | None = None) -> list[Line]:
    """The last events, the latest at the bottom. height None: all events, wrapped, so that nothing is cut."""
    recent = snapshot.events if height is None else snapshot.events[-height:] if height else []
    if not recent:
        return [((" nothing yet", "faint"),)] if height != 0 else []
    lines: list[Line] = []
    for event in recent:
        sign, style = LEVEL_SIGNS[event.level]
        tone = LEVEL_TONES.get(event.level, "")
        start = (f" {clock(event, now)}  ", "faint"), (f"{sign} ", style)
        lines += paragraph(event.text, width, *start, style=tone, wrapped=height is None)
    return lines


def clock(event: EventView, now: float) -> str:
    """The time of an event, with its date where that is not today."""
    if event.time is None:
        return " " * 12
    time, today = datetime.fromtimestamp(event.time, UTC), datetime.fromtimestamp(now, UTC)
    return f"{time:%H:%M:%S}" if time.date() == today.date() else f"{time:%b %d %H:%M}"


def goodput_lines(snapshot: Snapshot, *, width: int) -> list[Line]:
    """Where the time went, the longest first."""
    panel, lines = goodput_panel(snapshot), list[Line]()
    for row in panel["rows"] if panel else ():
        if row["share"] is None or row["share"] < 0.001:
            continue
        style = {"steps": "green", "lost": "red", "recovery": "orange"}.get(row["kind"], "blue")
        after = f" {row['percent']:>7} {row['duration']:>7}"
        middle = bar(row["share"], max(2, width - 26 - len(after)), style=style)
        lines.append(((f" {cut(row['name'], 24):<25}", "faint"), *middle, (after, "strong")))
    if snapshot.goodput and panel and snapshot.goodput.energy_j is not None:
        lines.append(((f" {'energy of the GPUs':<25}", "faint"), (format_energy(snapshot.goodput.energy_j), "strong")))
    return lines


def plan_lines(snapshot: Snapshot) -> list[Line]:
    """What the plan expected, what is measured, and the difference."""
    lines: list[Line] = [((f" {'':<12}{'planned':>12}{'measured':>12}", "faint"),)]
    for figure in figures(snapshot):
        if figure.difference and figure.name in METRICS:
            label, values = f" {METRICS[figure.name].label:<12}", f"{figure.planned:>12}{figure.text:>12}"
            mark, style = (" !", "warning") if figure.worse else ("", "faint")
            lines.append(((label, "faint"), (values, "strong"), (f"  {figure.difference}{mark}", style)))
    return lines if len(lines) > 1 else []


def note_lines(snapshot: Snapshot, *, width: int) -> list[Line]:
    notes = [paragraph(note, width, (" ! ", "warning"), wrapped=False) for note in snapshot.notes]
    return list(chain.from_iterable(notes))


def why_page(snapshot: Snapshot, *, width: int) -> list[Line]:
    """The explanation of a failure, the attempts and the findings of the checks."""
    lines = [heading("why", width)]
    if snapshot.explanation:
        lines += explanation_lines(snapshot.explanation, width=width)
    else:
        text = {
            "broken": "the run ended without reporting why: neither the supervisor nor a rank did. The logs (5) may show it.",
            "unknown": snapshot.why_unknown,
        }.get(snapshot.state, "nothing has ended this run")
        lines += paragraph(text, width, MARGIN, style="faint")
    lines += section("attempts", attempt_lines(snapshot, width=width), width)
    return lines + section("what the checks found", finding_lines(snapshot.findings, width=width), width)


def explanation_lines(explanation: dict[str, Any], *, width: int) -> list[Line]:
    why = why_panel(explanation)
    sign, style = ("✓", "good") if why["cause"] == HEALTHY else ("✗", "error")
    lines = paragraph(f"{why['cause']}: {why['summary']}", width, (f" {sign} ", style), style=style)
    lines += paragraph(str(why["fix"]), width, ARROW, style="strong") if why["fix"] else []
    victims = explanation.get("victims")
    followers = f"{format_ranks(victims, limit=MAX_RANKS_NAMED)} only followed" if victims else None
    if about := ", ".join(filter(None, (why["place"], why["sure"], followers))):
        lines += paragraph(about, width, MARGIN, style="faint")
    for block in why["blocks"]:
        rows: list[Line] = []
        for record in block["lines"]:
            rows.append(((f"   {cut(clean(record['place']), width - 10)}", "faint"),))
            for text in str(record["text"] or "").splitlines()[:MAX_EVIDENCE_LINES]:
                rows += paragraph(text, width - 1, ("     ", ""))
        lines += section(block["title"].lower(), rows, width)
    return lines


def attempt_lines(snapshot: Snapshot, *, width: int) -> list[Line]:
    lines: list[Line] = []
    for attempt in snapshot.attempts:
        outcome = attempt_outcome(snapshot, attempt)
        style = {"finished": "good", "failed": "error"}.get(outcome, "")
        start = f"{format_time(attempt.time)} UTC  "
        lines.append(((f" {attempt.attempt:>3}  ", "strong"), (start, "faint"), (outcome, style)))
        if attempt.changes:
            lines += paragraph(attempt.changes, width, MARGIN, MARGIN, style="faint")
        if attempt.summary:
            lines += paragraph(f"{attempt.cause}: {attempt.summary}", width, MARGIN, MARGIN)
        if action := action_text(attempt):
            lines += paragraph(action, width, MARGIN, MARGIN, style="faint")
    return lines


def finding_lines(findings: list[dict[str, Any]], *, width: int) -> list[Line]:
    lines: list[Line] = []
    for finding in findings:
        sign, style = LEVEL_SIGNS[severity_level(finding)]
        lines += paragraph(f"{finding.get('id')}: {finding.get('what')}", width, (f" {sign} ", style))
        lines += paragraph(f"{finding.get('why')}", width, MARGIN, style="faint")
        if finding.get("fix"):
            lines += paragraph(f"fix: {finding['fix']}", width, MARGIN)
    return lines
