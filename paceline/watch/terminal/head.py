"""
The parts of the terminal view that tell how the run is: its head, progress, figures, events, explanation, plan and time.

Pure: a Snapshot, the time and a width in, lines out. Times are UTC, as everywhere in a run folder.
"""

import math
from datetime import UTC, datetime

from paceline.units import format_bytes, format_count, format_duration, format_energy
from paceline.watch.concerns import LIVE, summary
from paceline.watch.goodput import KINDS
from paceline.watch.snapshot import EventView, Snapshot
from paceline.watch.terminal.line import (
    ELLIPSIS,
    EMPTY,
    Line,
    Piece,
    bar,
    cells,
    clean,
    cut,
    fit,
    spread,
    width_of,
    wrap,
)

STATES = {
    "starting": ("◐", "blue"),
    "training": ("●", "good"),
    "evaluating": ("◐", "good"),
    "saving": ("◐", "good"),
    "recovering": ("↻", "warning"),
    "running": ("●", "good"),
    "finished": ("✓", "good"),
    "stopped": ("■", "warning"),
    "failed": ("✗", "error"),
    "broken": ("✗", "error"),
    "unknown": ("?", "faint"),
}
BROKEN = ("failed", "broken", "recovering", "unknown")
LEVELS = {"info": ("·", "faint"), "good": ("✓", "good"), "warning": ("!", "warning"), "error": ("✗", "error")}
PLANNED = {  # of Snapshot.plan: what each is called, and its unit
    "step_ms": "step",
    "tok_per_sec": "tok/s",
    "mfu": "mfu",
    "peak_bytes": "peak memory",
}


def head(snapshot: Snapshot, *, now: float, width: int, said: str | None = None) -> list[Line]:
    """Who and how it is, how far, how fast, and whether it is well. said: why it could not be read again just now."""
    first = title(snapshot, now=now, width=width)
    if said:
        first = fit(((" ! ", "warning"), (clean(said), "warning")), width)
    return [
        first,
        progress(snapshot, width=width),
        *figures(snapshot, width=width),
        *wellbeing(snapshot, now=now, width=width),
    ]


def wellbeing(snapshot: Snapshot, *, now: float, width: int) -> list[Line]:
    """One line, two for what wants a look; none of a run that broke: that has a banner of its own."""
    found = summary(snapshot, now=now)
    if found is None or snapshot.state in ("failed", "broken"):
        return []
    mark, style = LEVELS[found.level]
    text, room = clean(found.text), width - 4
    if found.level == "warning":
        rows = wrap(text, room)
        rows = rows if len(rows) < 3 else [rows[0], cut(" ".join(rows[1:]), room)]
        return [fit(((f" {mark if i == 0 else ' '} ", style), (row, "orange")), width) for i, row in enumerate(rows)]
    while cells(text) > room and ", " in text:
        text = text.rpartition(", ")[0] + "."
    return [fit(((f" {mark} ", style), (cut(text, room), "")), width)]


def title(snapshot: Snapshot, *, now: float, width: int) -> Line:
    mark, style = STATES[snapshot.state]
    left: list[Piece] = [
        (" " + cut(clean(snapshot.name), max(12, width // 3)), "strong"),
        (f"  {mark} {snapshot.state}", style),
    ]
    if len(snapshot.attempts) > 1:
        left.append((f"  attempt {snapshot.attempts[-1].attempt}", ""))
    age = None if snapshot.updated is None else now - snapshot.updated
    if snapshot.state not in LIVE and age is not None:
        left.append((f"  {format_duration(max(0.0, age))} ago", "faint"))
    about = what_it_is(snapshot)
    right: list[Piece] = [(f"{cut(about, max(8, width - width_of(tuple(left)) - 20))}  ", "faint")] if about else []
    return spread(tuple(left), (*right, (f"{datetime.fromtimestamp(now, UTC):%H:%M:%S} UTC ", "faint")), width)


def what_it_is(snapshot: Snapshot) -> str:
    """Of a script its words, of a log what wrote it, of a training its ranks and hosts."""
    if snapshot.command:
        return clean(" ".join(snapshot.command))
    if snapshot.kind == "log":
        return clean(snapshot.framework or "log")
    hosts = sorted({rank.host for rank in snapshot.ranks if rank.host})
    where = f" on {clean(hosts[0])}" if len(hosts) == 1 else f" on {len(hosts)} hosts" if hosts else ""
    ranks = len(snapshot.ranks)
    return f"{ranks} rank{'s' if ranks != 1 else ''}{where}" if ranks else ""


def progress(snapshot: Snapshot, *, width: int) -> Line:
    _, style = STATES[snapshot.state]
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
        words = "so far" if snapshot.state in LIVE else "in all"
        right.append((f"  {format_duration(snapshot.elapsed_s)} {words}", "faint"))
    room = width - width_of(left) - width_of(tuple(right)) - 1
    tone = {"good": "blue"}.get(style, style) if snapshot.state != "finished" else "good"
    return fit((*left, *bar(share, max(4, room), style=tone), *right), width)


def figures(snapshot: Snapshot, *, width: int) -> list[Line]:
    """A line with names quiet and numbers strong, as many as there is room for; none before there is a number."""
    shown: list[tuple[str, str]] = []

    def add(name: str, text: str | None) -> None:
        if text is not None:
            shown.append((name, text))

    add("loss", None if snapshot.loss is None else f"{snapshot.loss:.4f}")
    add("val_bpb", None if snapshot.val_bpb is None else f"{snapshot.val_bpb:.4f}")
    add("tok/s", None if snapshot.tok_per_sec is None else f"{snapshot.tok_per_sec:,.0f}")
    add("step", None if snapshot.step_ms is None else format_ms(snapshot.step_ms))
    add("mfu", None if snapshot.mfu is None else f"{100 * snapshot.mfu:.1f} %")
    if snapshot.goodput and snapshot.goodput.share is not None:
        add("goodput", f"{100 * snapshot.goodput.share:.0f} %")
    add("peak", None if snapshot.peak_bytes is None else format_bytes(snapshot.peak_bytes))
    if snapshot.tokens_per_step and snapshot.step:
        add("tokens", format_count(snapshot.tokens_per_step * snapshot.step))
    line: list[Piece] = []
    for name, text in shown:
        pieces: list[Piece] = [(f" {name} ", "faint"), (text, "strong"), (" ", "")]
        if width_of((*line, *pieces)) > width:
            break
        line += pieces
    return [fit(tuple(line), width)] if line else []


def format_ms(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 10 else f"{value:.2f} ms"


def banner(snapshot: Snapshot, *, width: int, height: int) -> list[Line]:
    """Of a run that broke: what, and what mends it; at most `height` lines."""
    said = snapshot.explanation
    if snapshot.state == "broken" and not said:
        words = "it ended without a word of why" + ("; its logs (5) may tell" if snapshot.logs else "")
        return [fit(((" ✗ ", "error"), (words, "error")), width)]
    if not said or said.get("cause") == "healthy" or snapshot.state not in BROKEN:
        return []
    what = wrap(f"{said['cause']}: {clean(str(said['summary']))}", width - 4)
    fix = wrap(f"fix: {clean(str(said['fix']))}", width - 4) if said.get("fix") else []
    what = what[: max(1, height - len(fix))]
    lines: list[Line] = [((" ✗ " if i == 0 else "   ", "error"), (text, "error")) for i, text in enumerate(what)]
    lines += [((" → " if i == 0 else "   ", "good"), (text, "strong")) for i, text in enumerate(fix)]
    if len(lines) > height:
        mark, (text, style) = lines[height - 1]
        lines[height - 1] = (mark, (cut(text, width - 6) + ELLIPSIS, style))
    return lines[:height]


def events(snapshot: Snapshot, *, now: float, width: int, height: int | None = None) -> list[Line]:
    """The last ones at the bottom. height None: all, wrapped, so that nothing is cut."""
    shown = snapshot.events if height is None else snapshot.events[-height:] if height else []
    if not shown:
        return [((" nothing yet", "faint"),)] if height != 0 else []
    lines: list[Line] = []
    for event in shown:
        mark, style = LEVELS[event.level]
        before: Line = ((f" {clock(event, now)}  ", "faint"), (f"{mark} ", style))
        room = width - width_of(before) - 1
        text = clean(event.text)
        rows = [cut(text, room)] if height is not None else wrap(text, room)
        tone = {"warning": "orange", "error": "red"}.get(event.level, "")
        lines += [(*(before if i == 0 else ((" " * width_of(before), ""),)), (row, tone)) for i, row in enumerate(rows)]
    return lines


def clock(event: EventView, now: float) -> str:
    """The time of today, the day and time of another day; always as wide."""
    if event.time is None:
        return " " * 12
    then, today = datetime.fromtimestamp(event.time, UTC), datetime.fromtimestamp(now, UTC)
    return f"{then:%H:%M:%S}" if then.date() == today.date() else f"{then:%b %d %H:%M}"


def time_spent(snapshot: Snapshot, *, width: int) -> list[Line]:
    """Where the time went, the most first."""
    found = snapshot.goodput
    if found is None or not found.busy_s:
        return []
    lines: list[Line] = []
    for kind, seconds in sorted(found.seconds.items(), key=lambda item: -item[1]):
        if kind == "idle" or seconds < 0.001 * found.busy_s:
            continue
        share = seconds / found.busy_s
        style = {"steps": "green", "lost": "red", "recovery": "orange"}.get(kind, "blue")
        after = f" {100 * share:5.1f} % {format_duration(seconds):>7}"
        room = width - 26 - cells(after)
        lines.append(
            ((f" {cut(KINDS[kind], 24):<25}", "faint"), *bar(share, max(2, room), style=style), (after, "strong"))
        )
    if found.energy_j is not None:
        lines.append(((f" {'energy of the GPUs':<25}", "faint"), (format_energy(found.energy_j), "strong")))
    return lines


def planned(snapshot: Snapshot, *, width: int) -> list[Line]:
    """What the plan expected beside what is measured, and by how much that differs."""
    if not snapshot.plan:
        return []
    lines: list[Line] = [fit(((f" {'':<12}{'planned':>12}{'measured':>12}{'':>3}", "faint"),), width)]
    for name, called in PLANNED.items():
        expected, measured = snapshot.plan.get(name), getattr(snapshot, name)
        if not isinstance(expected, int | float) or measured is None or not expected:
            continue
        off = measured / expected - 1
        worse = off < -0.1 if name in ("tok_per_sec", "mfu") else off > 0.1
        style = "warning" if worse else "faint"
        values = f"{format_measure(name, expected):>12}{format_measure(name, measured):>12}"
        lines.append(
            fit(
                ((f" {called:<12}", "faint"), (values, "strong"), (f"  {off:+.0%}{' !' if worse else ''}", style)),
                width,
            )
        )
    return lines if len(lines) > 1 else []


def format_measure(name: str, value: float) -> str:
    """A value of Snapshot by the name of its field, with its unit."""
    match name:
        case "step_ms" | "busy_ms":
            return format_ms(value)
        case "mfu":
            return f"{100 * value:.1f} %"
        case "loss" | "val_bpb":
            return f"{value:.4f}"
        case "peak_bytes":
            return format_bytes(value)
        case "tok_per_sec":
            return f"{value:,.0f}"
        case _:
            return f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"


def notes(snapshot: Snapshot, *, width: int) -> list[Line]:
    return [((" ! ", "warning"), (cut(clean(note), width - 4), "")) for note in snapshot.notes] or [EMPTY][:0]
