"""
`paceline watch --once`: how a run is, as text for scripts, pipes and eyes without a terminal. Pure, from the same Snapshot.

Each line begins with a word that `grep` finds; nothing in it depends on the width of a terminal but how much of a text is shown.
"""

from collections.abc import Iterator

from paceline.watch.concerns import LIVE
from paceline.watch.snapshot import Series, Snapshot
from paceline.watch.terminal.chart import short, steady
from paceline.watch.terminal.head import BROKEN, events, format_measure, head, planned, time_spent
from paceline.watch.terminal.line import EMPTY, Line, clean, coloured, cut, fit, heading, plain, to_ascii, wrap
from paceline.watch.terminal.machines import gpu_rows, host_facts, known, rank_grid, ranks_heading

LAST_EVENTS = 8
LEAST_SPAN = {
    "tok_per_sec": 0.2,
    "step_ms": 0.2,
    "mfu": 0.2,
    "grad_norm": 0.2,
}  # of a curve's middle, so that noise stays small


def format_once(snapshot: Snapshot, *, now: float, width: int, colour: bool = False, ascii_only: bool = False) -> str:
    lines = [*head(snapshot, now=now, width=width), *broken_by(snapshot)]
    for name, block in blocks(snapshot, now=now, width=width):
        if block:
            lines += [EMPTY, heading(name, width), *block]
    text = "\n".join((coloured if colour else plain)(line) for line in lines)
    return to_ascii(text) if ascii_only else text


def broken_by(snapshot: Snapshot) -> list[Line]:
    """Cause and fix whole: a script looks for them."""
    said = snapshot.explanation
    if not said or said.get("cause") == "healthy" or snapshot.state not in BROKEN:
        return []
    rows = [f"cause: {said['cause']}: {said['summary']}", *([f"fix: {said['fix']}"] if said.get("fix") else [])]
    return [((f" {clean(row)}", "error" if i == 0 else "strong"),) for i, row in enumerate(rows)]


def blocks(snapshot: Snapshot, *, now: float, width: int) -> Iterator[tuple[str, list[Line]]]:
    yield "curves", [curve(name, series, width=width) for name, series in snapshot.series.items() if series.values]
    yield "machines" if snapshot.state in LIVE else "last seen: machines", machine_lines(snapshot, width=width)
    if ranks := known(snapshot.ranks):
        yield ranks_heading(ranks), rank_grid(ranks, width=width, height=64)
    yield "plan", planned(snapshot, width=width)
    yield "time", time_spent(snapshot, width=width)
    yield "events, UTC", events(snapshot, now=now, width=width, height=LAST_EVENTS) if snapshot.events else []
    notes = [row for note in snapshot.notes for row in wrap(clean(note), width - 3)]
    yield "notes", [((f" {row}", ""),) for row in notes]


def machine_lines(snapshot: Snapshot, *, width: int) -> list[Line]:
    lines: list[Line] = []
    every = [gpu for host in snapshot.hosts for gpu in host.gpus]
    for host in snapshot.hosts:
        facts = host_facts(host, width=width - 27, long=width >= 100)
        lines.append(fit(((f" {cut(clean(host.name), 24)}  ", "strong"), *facts), width))
        lines += gpu_rows(host.gpus, width=width, among=every)
    return lines


def curve(name: str, series: Series, *, width: int) -> Line:
    first, last = short(series.values[0]), format_measure(name, series.values[-1])
    room = max(4, min(60, width - 40))
    return (
        (f" {cut(clean(name), 14):<15}{first:>7} ", ""),
        (steady(series, room, LEAST_SPAN.get(name, 0.02)), "blue"),
        (f" {last}", "strong"),
    )
