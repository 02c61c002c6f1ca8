"""
The parts of the terminal view about the run: header, progress, figures, events, plan, time; and the page `why`.

`why` shows what broke and what fixes it, with the log lines that prove it, then each attempt and what the checks found.
Pure: a Snapshot, the time and a width in, lines out. Times are UTC, as everywhere in a run folder.
"""

import math
from datetime import UTC, datetime
from typing import Any

from paceline.units import format_count, format_duration, format_energy, format_number_of, format_ranks
from paceline.watch.panels import action_text, figures, goodput_panel, severity_level, why_panel
from paceline.watch.snapshot import BROKEN, LIVE, AttemptView, EventView, Snapshot
from paceline.watch.summary import (
    LEVEL_SIGNS,
    METRICS,
    STATE_SIGNS,
    attempt_outcome,
    format_measure,
    format_percent,
    format_time,
    summarize,
)
from paceline.watch.terminal.line import (
    ELLIPSIS,
    EMPTY,
    Line,
    Piece,
    bar,
    clean,
    cut,
    fit,
    heading,
    spread,
    width_of,
    wrap,
)

MAX_RANKS_NAMED = 16
MAX_EVIDENCE_LINES = 8


def header(snapshot: Snapshot, *, now: float, width: int, error: str | None = None) -> list[Line]:
    """Header: name, state, progress, speed, health. error: why the last reading failed; it replaces the title."""
    first = title(snapshot, now=now, width=width)
    if error:
        first = fit(((" ! ", "warning"), (clean(error), "warning")), width)
    return [
        first,
        progress(snapshot, width=width),
        *figures_line(snapshot, width=width),
        *health(snapshot, now=now, width=width),
    ]


def health(snapshot: Snapshot, *, now: float, width: int) -> list[Line]:
    """One line, or two for a warning; none for a run that broke, because that has a banner."""
    summary = summarize(snapshot, now=now)
    if summary is None or snapshot.state in ("failed", "broken"):
        return []
    sign, style = LEVEL_SIGNS[summary.level]
    text, room = clean(summary.text), width - 4
    if summary.level == "warning":
        rows = wrap(text, room)
        rows = rows if len(rows) < 3 else [rows[0], cut(" ".join(rows[1:]), room)]
        return [fit(((f" {sign if i == 0 else ' '} ", style), (row, "orange")), width) for i, row in enumerate(rows)]
    while cut(text, room) != text and ", " in text:
        text = text.rpartition(", ")[0] + "."
    return [fit(((f" {sign} ", style), (cut(text, room), "")), width)]


def title(snapshot: Snapshot, *, now: float, width: int) -> Line:
    sign, style = STATE_SIGNS[snapshot.state]
    left: list[Piece] = [
        (" " + cut(clean(snapshot.name), max(12, width // 3)), "strong"),
        (f"  {sign} {snapshot.state}", style),
    ]
    if len(snapshot.attempts) > 1:
        left.append((f"  attempt {snapshot.attempts[-1].attempt}", ""))
    age = None if snapshot.updated is None else now - snapshot.updated
    if snapshot.state not in LIVE and age is not None:
        left.append((f"  {format_duration(max(0.0, age))} ago", "faint"))
    about = origin(snapshot)
    right: list[Piece] = [(f"{cut(about, max(8, width - width_of(tuple(left)) - 20))}  ", "faint")] if about else []
    return spread(tuple(left), (*right, (f"{datetime.fromtimestamp(now, UTC):%H:%M:%S} UTC ", "faint")), width)


def origin(snapshot: Snapshot) -> str:
    """A script's command, a log's framework, a training's ranks and hosts."""
    if snapshot.command:
        return clean(" ".join(snapshot.command))
    if snapshot.kind == "log":
        return clean(snapshot.framework or "log")
    hosts = sorted({rank.host for rank in snapshot.ranks if rank.host})
    where = f" on {clean(hosts[0])}" if len(hosts) == 1 else f" on {len(hosts)} hosts" if hosts else ""
    return f"{format_number_of(len(snapshot.ranks), 'rank')}{where}" if snapshot.ranks else ""


def progress(snapshot: Snapshot, *, width: int) -> Line:
    _, style = STATE_SIGNS[snapshot.state]
    left: Line = ((" n/a  ", "faint"),)
    right: list[Piece] = []
    share = None
    if snapshot.num_steps:
        share = min(1.0, snapshot.step / snapshot.num_steps)
        left = ((f" {math.floor(1000 * share) / 10:.1f} %  ", "strong"),)
        right.append((f"  {snapshot.step:,}/{snapshot.num_steps:,}", "strong"))
    elif snapshot.step:
        left = ((f" step {snapshot.step:,}  ", "strong"),)
    if snapshot.state in LIVE and snapshot.eta_s is not None:
        right.append((f"  {format_duration(snapshot.eta_s)} left", ""))
    if snapshot.elapsed_s is not None:
        until = "so far" if snapshot.state in LIVE else "in all"
        right.append((f"  {format_duration(snapshot.elapsed_s)} {until}", "faint"))
    room = width - width_of(left) - width_of(tuple(right)) - 1
    tone = {"good": "blue"}.get(style, style) if snapshot.state != "finished" else "good"
    return fit((*left, *bar(share, max(4, room), style=tone), *right), width)


def figures_line(snapshot: Snapshot, *, width: int) -> list[Line]:
    """One line of names and numbers, as many as there is room for; no line before there is a number."""
    texts = {
        measure.label: format_measure(name, value)
        for name, measure in METRICS.items()
        if name != "peak_bytes" and (value := getattr(snapshot, name, None)) is not None
    }
    if snapshot.goodput and snapshot.goodput.share is not None:
        texts["goodput"] = format_percent(snapshot.goodput.share)
    if snapshot.peak_bytes is not None:
        texts["peak"] = format_measure("peak_bytes", snapshot.peak_bytes)
    if snapshot.tokens_per_step and snapshot.step:
        texts["tokens"] = format_count(snapshot.tokens_per_step * snapshot.step)
    line: list[Piece] = []
    for name, text in texts.items():
        pieces: list[Piece] = [(f" {name} ", "faint"), (text, "strong"), (" ", "")]
        if width_of((*line, *pieces)) > width:
            break
        line += pieces
    return [fit(tuple(line), width)] if line else []


def banner(snapshot: Snapshot, *, width: int, height: int) -> list[Line]:
    """Cause and fix of a run that broke, in at most `height` lines."""
    explanation = failure_of(snapshot)
    if snapshot.state == "broken" and not snapshot.explanation:
        text = "the run ended without reporting why" + ("; its logs (5) may show it" if snapshot.logs else "")
        return [fit(((" ✗ ", "error"), (text, "error")), width)]
    if explanation is None:
        return []
    lines = bullet("✗", f"{explanation['cause']}: {explanation['summary']}", width, "error")
    fix = bullet("→", f"fix: {explanation['fix']}", width, "good", "strong") if explanation.get("fix") else []
    lines = [*lines[: max(1, height - len(fix))], *fix]
    if len(lines) > height:
        sign, (text, style) = lines[height - 1]
        lines[height - 1] = (sign, (cut(text, width - 6) + ELLIPSIS, style))
    return lines[:height]


def failure_of(snapshot: Snapshot) -> dict[str, Any] | None:
    """The explanation of what broke; None for a run that did not break, and for an unexplained one."""
    explanation = snapshot.explanation
    if not explanation or explanation.get("cause") == "healthy" or snapshot.state not in BROKEN:
        return None
    return explanation


def event_lines(snapshot: Snapshot, *, now: float, width: int, height: int | None = None) -> list[Line]:
    """The last events, the latest at the bottom. height None: all events, wrapped, so that nothing is cut."""
    recent = snapshot.events if height is None else snapshot.events[-height:] if height else []
    if not recent:
        return [((" nothing yet", "faint"),)] if height != 0 else []
    lines: list[Line] = []
    for event in recent:
        sign, style = LEVEL_SIGNS[event.level]
        before: Line = ((f" {clock(event, now)}  ", "faint"), (f"{sign} ", style))
        room = width - width_of(before) - 1
        text = clean(event.text)
        rows = [cut(text, room)] if height is not None else wrap(text, room)
        tone = {"warning": "orange", "error": "red"}.get(event.level, "")
        lines += [(*(before if i == 0 else ((" " * width_of(before), ""),)), (row, tone)) for i, row in enumerate(rows)]
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


def plan_lines(snapshot: Snapshot, *, width: int) -> list[Line]:
    """What the plan expected, what is measured, and the difference."""
    lines: list[Line] = [((f" {'':<12}{'planned':>12}{'measured':>12}", "faint"),)]
    for figure in figures(snapshot):
        if figure.difference and figure.name in METRICS:
            label, values = f" {METRICS[figure.name].label:<12}", f"{figure.planned:>12}{figure.text:>12}"
            difference = (
                (f"  {figure.difference} !", "warning") if figure.worse else (f"  {figure.difference}", "faint")
            )
            lines.append(((label, "faint"), (values, "strong"), difference))
    return [fit(line, width) for line in lines] if len(lines) > 1 else []


def note_lines(snapshot: Snapshot, *, width: int) -> list[Line]:
    return [((" ! ", "warning"), (cut(clean(note), width - 4), "")) for note in snapshot.notes]


def why_page(snapshot: Snapshot, *, width: int) -> list[Line]:
    """The explanation of a failure, the attempts and the findings of the checks."""
    explanation = snapshot.explanation
    lines = explanation_lines(explanation, width=width) if explanation else unexplained_lines(snapshot, width=width)
    if snapshot.attempts:
        lines += [EMPTY, heading("attempts", width), *attempt_lines(snapshot.attempts, width=width)]
    if snapshot.findings:
        lines += [EMPTY, heading("what the checks found", width), *finding_lines(snapshot.findings, width=width)]
    return lines


def unexplained_lines(snapshot: Snapshot, *, width: int) -> list[Line]:
    text = {
        "broken": "the run ended without reporting why: neither the supervisor nor a rank did. The logs (5) may show it.",
        "unknown": "this log shows no known step and no known error",
    }.get(snapshot.state, "nothing has ended this run")
    return [heading("why", width), *indented(text, width=width, style="faint")]


def explanation_lines(explanation: dict[str, Any], *, width: int) -> list[Line]:
    why = why_panel(explanation)
    sign, style = ("✓", "good") if why["cause"] == "healthy" else ("✗", "error")
    lines: list[Line] = [heading("why", width), *bullet(sign, f"{why['cause']}: {why['summary']}", width, style)]
    lines += bullet("→", str(why["fix"]), width, "good", "strong") if why["fix"] else []
    victims = explanation.get("victims")
    followers = f"{format_ranks(victims, limit=MAX_RANKS_NAMED)} only followed" if victims else None
    lines += indented(", ".join(filter(None, (why["place"], why["sure"], followers))), width=width, style="faint")
    for block in why["blocks"]:
        lines += [EMPTY, heading(block["title"].lower(), width)]
        lines += [line for record in block["lines"] for line in evidence_lines(record, width=width)]
    return lines


def evidence_lines(record: dict[str, Any], *, width: int) -> list[Line]:
    """The place of a log line, then the whole line."""
    lines: list[Line] = [((f"   {cut(clean(record['place']), width - 10)}", "faint"),)]
    for text in str(record["text"] or "").splitlines()[:MAX_EVIDENCE_LINES]:
        lines += [(("     ", ""), (row, "")) for row in wrap(clean(text), width - 7)]
    return lines


def attempt_lines(attempts: list[AttemptView], *, width: int) -> list[Line]:
    lines: list[Line] = []
    for attempt in attempts:
        outcome = attempt_outcome(attempt)
        style = {"finished": "good", "failed": "error"}.get(outcome, "")
        start = f"{format_time(attempt.time)} UTC  "
        lines.append(((f" {attempt.attempt:>3}  ", "strong"), (start, "faint"), (outcome, style)))
        if attempt.summary:
            lines += indented(f"{attempt.cause}: {attempt.summary}", width=width, by=6)
        lines += indented(action_text(attempt) or "", width=width, by=6, style="faint")
    return lines


def finding_lines(findings: list[dict[str, Any]], *, width: int) -> list[Line]:
    lines: list[Line] = []
    for finding in findings:
        sign, style = LEVEL_SIGNS[severity_level(finding)]
        lines += bullet(sign, f"{finding.get('id')}: {finding.get('what')}", width, style, "")
        lines += indented(f"{finding.get('why')}", width=width, style="faint")
        if finding.get("fix"):
            lines += indented(f"fix: {finding['fix']}", width=width)
    return lines


def bullet(sign: str, text: str, width: int, style: str, text_style: str | None = None) -> list[Line]:
    """A wrapped text behind a sign. text_style None: the sign's."""
    rows = wrap(clean(text), width - 4)
    text_style = style if text_style is None else text_style
    return [((f" {sign} " if i == 0 else "   ", style), (row, text_style)) for i, row in enumerate(rows)]


def indented(text: str, *, width: int, style: str = "", by: int = 3) -> list[Line]:
    return [((" " * by, ""), (row, style)) for row in wrap(clean(text), width - by - 1)] if text else []
