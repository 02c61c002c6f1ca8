"""
The pages of the terminal view, put together from its parts: overview, curves, machines, events, why.

Pure: a Snapshot, the time and a size in, lines out. The overview is exactly as large as the screen; the others may be longer and
scroll. Up to WIDE columns everything stands below each other; from there on curves are on the left, machines on the right.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.units import GIB
from paceline.watch.concerns import LIVE
from paceline.watch.snapshot import GpuView, Series, Snapshot
from paceline.watch.terminal.chart import chart, evenly, pulse, since, sparkline, steady
from paceline.watch.terminal.head import banner, events, format_measure, notes, planned, time_spent
from paceline.watch.terminal.line import EMPTY, Line, Piece, beside, cells, clean, cut, fit, heading, split_width
from paceline.watch.terminal.log import LogText, log_heading, log_lines
from paceline.watch.terminal.machines import (
    gpu_rows,
    host_facts,
    known,
    machines,
    rank_cell,
    rank_grid,
    ranks_heading,
    slowest,
)

FIRST_CURVES = ("loss", "val_bpb", "tok_per_sec")
WIDE = 130
LEAST_MOST_LAST = "least       most     last"
LEAST_LOG = 2  # lines of a log, below the rest
CURVES = {  # field of metrics.jsonl: what it is called, style, least span of its axis
    "loss": ("loss", "blue", 0.02),
    "val_bpb": ("val_bpb", "orange", 0.02),
    "tok_per_sec": ("tok/s", "green", 0.2),
    "step_ms": ("step, ms", "violet", 0.2),
    "mfu": ("mfu", "green", 0.2),
    "grad_norm": ("grad_norm", "red", 0.2),
    "lr_mult": ("lr_mult", "blue", 0.2),
}


@dataclass(frozen=True)
class Choice:
    """What the keys have set."""

    curve: str = "loss"
    log_scale: bool = False
    part: float = 1.0  # of the steps, from the end


def overview(snapshot: Snapshot, *, now: float, width: int, height: int, log: LogText | None = None) -> list[Line]:
    """log: of one rank, whose end fills the room that is left."""
    top = banner(snapshot, width=width, height=4 if height < 27 else 8)
    rest = height - len(top)
    if width >= WIDE and rest >= 24:
        lines = [*top, *beside_each_other(snapshot, now=now, width=width, height=rest, log=log)]
    else:
        lines = [*top, *below_each_other(snapshot, now=now, width=width, height=rest, log=log)]
    return [fit(line, width) for line in [*lines, *[EMPTY] * height][:height]]


def below_each_other(
    snapshot: Snapshot, *, now: float, width: int, height: int, log: LogText | None = None
) -> list[Line]:
    """80 x 24: curves, machines, ranks, then events, and a log in what is left."""
    curves = [name for name in curves_of(snapshot) if name in FIRST_CURVES][: 3 if width >= 72 else 1]
    least_curves, least_events = 6 if curves else 0, 3
    spare = height - least_curves - least_events
    least_ranks = 1 + min(2, len(known(snapshot.ranks))) if known(snapshot.ranks) else 0
    block = machines(snapshot, width=width, height=max(1, spare - least_ranks - 1)) if snapshot.hosts else []
    spare -= len(block) + bool(snapshot.hosts)
    ranks = (
        rank_grid(known(snapshot.ranks), width=width, height=max(2, min(6, spare - 1))) if known(snapshot.ranks) else []
    )
    spare -= len(ranks) + bool(ranks)
    wanted_events = 1 + min(len(snapshot.events), max(4, height // 4))
    curves_height = min(16, least_curves + max(0, spare + least_events - wanted_events)) if curves else 0
    lines = curve_row(snapshot, curves, width=width, height=curves_height)
    lines += machines_block(snapshot, block, width=width)
    lines += [heading(ranks_heading(snapshot.ranks), width), *ranks] if ranks else []
    room = height - len(lines) - 1
    block = last_block(snapshot, now=now, width=width, height=room)
    left = room - len(block)
    if not block or left >= LEAST_LOG:
        block += log_block(log, width=width, height=left)
    return [*lines, *block]


def log_block(log: LogText | None, *, width: int, height: int) -> list[Line]:
    """The last lines of it, with a heading."""
    if log is None or log.log is None or height < 1:
        return []
    return [log_heading(log, width=width), *log_lines(log, width=width)[-height:]]


def last_block(snapshot: Snapshot, *, now: float, width: int, height: int) -> list[Line]:
    """Events; of a log, which has none, what could not be read."""
    if height < 1 or (snapshot.kind == "log" and not snapshot.events and not snapshot.notes):
        return []
    said = notes(snapshot, width=width)
    if not snapshot.events and said:
        return [heading("notes", width), *said[:height]]
    return [heading("events", width), *events(snapshot, now=now, width=width, height=height)]


def machines_block(snapshot: Snapshot, block: list[Line], *, width: int) -> list[Line]:
    if not snapshot.hosts:
        return []
    first = snapshot.hosts[0]
    num_gpus = sum(len(host.gpus) for host in snapshot.hosts)
    name = f"{num_gpus} GPU{'s' if num_gpus != 1 else ''}" if num_gpus else "no GPU"
    name = name if snapshot.state in LIVE else f"last seen: {name}"
    facts = (
        host_facts(first, width=width - 20)
        if len(snapshot.hosts) == 1
        else (("memory, use, power, temperature", "faint"),)
    )
    return [heading(name, width, right=facts), *block]


def curve_row(snapshot: Snapshot, names: Sequence[str], *, width: int, height: int, part: float = 1.0) -> list[Line]:
    """Some curves side by side; the first is the widest."""
    if not names or height < 3:
        return []
    widths = split_width(width, [3, 2, 2][: len(names)])
    blocks = [
        (curve_block(snapshot, name, width=each, height=height, part=part), each)
        for name, each in zip(names, widths, strict=True)
    ]
    return beside(blocks)


def curve_block(
    snapshot: Snapshot, name: str, *, width: int, height: int, part: float = 1.0, log: bool = False
) -> list[Line]:
    called, style, least_span = CURVES.get(name, (name, "blue", 0.1))
    series = since(snapshot.series.get(name, Series()), part)
    expected = (snapshot.plan or {}).get(name)
    last = ((format_measure(name, series.values[-1]), "strong"),) if series.values else ()
    lines = chart(
        series,
        width=width,
        height=height - 1,
        style=style,
        least_span=least_span,
        log=log,
        planned=expected if isinstance(expected, int | float) else None,
    )
    return [heading(called, width, right=last), *lines]


def beside_each_other(
    snapshot: Snapshot, *, now: float, width: int, height: int, log: LogText | None = None
) -> list[Line]:
    """200 x 60: curves and events on the left; machines, ranks, plan, time and the end of a log on the right."""
    names = curves_of(snapshot)
    widths = split_width(width, (11, 9), gap=3)
    lower = height if not names else max(7, min(max(len(snapshot.events), 10) + 1, height // 4))
    left = [*left_side(snapshot, names, width=widths[0], height=height - lower - 1), EMPTY] if names else []
    left += last_block(snapshot, now=now, width=widths[0], height=height - len(left) - 1)
    least_log = max(7, height // 6) if log and log.log else 0
    right = right_side(snapshot, width=widths[1], height=height - least_log)
    gap = [EMPTY] if right else []
    right += [*gap, *log_block(log, width=widths[1], height=height - len(right) - len(gap) - 1)]
    return beside([(left, widths[0]), (right[:height], widths[1])], gap=3)


def curves_of(snapshot: Snapshot) -> list[str]:
    """Those with a value, the most telling first."""
    return [name for name in CURVES if snapshot.series.get(name, Series()).values]


def all_curves(snapshot: Snapshot) -> list[str]:
    """The known ones first, then whatever else the run has written."""
    known_ones = [name for name in CURVES if name in snapshot.series]
    return known_ones + [name for name in snapshot.series if name not in CURVES]


def left_side(snapshot: Snapshot, names: list[str], *, width: int, height: int) -> list[Line]:
    """The loss large, the others in pairs below it."""
    first, others = names[0], names[1:]
    pairs = [others[i : i + 2] for i in range(0, len(others), 2)][: 3 if height >= 44 else 2 if height >= 26 else 1]
    each = min(11, height // (len(pairs) + 2)) if pairs else 0
    lines = curve_block(snapshot, first, width=width, height=height - (each + 1) * len(pairs))
    for pair in pairs:
        blocks = [
            (curve_block(snapshot, name, width=of_one, height=each), of_one)
            for name, of_one in zip(pair, split_width(width, [1] * len(pair), gap=3), strict=True)
        ]
        lines += [EMPTY, *beside(blocks, gap=3)]
    return lines


def right_side(snapshot: Snapshot, *, width: int, height: int) -> list[Line]:
    """Machines and ranks, then plan and time, then GPUs and ranks over time where there is still room."""
    tables = [("plan", planned(snapshot, width=width)), ("time", time_spent(snapshot, width=width))]
    tables = [(title, lines) for title, lines in tables if lines]
    for_tables = sum(len(lines) + 2 for _, lines in tables)
    for_ranks = min(12, len(known(snapshot.ranks)) + 2, height // 3) if known(snapshot.ranks) else 0
    block = machines(snapshot, width=width, height=max(2, height - for_tables - for_ranks - 1))
    lines = machines_block(snapshot, block, width=width)
    if ranks := known(snapshot.ranks):
        room = height - for_tables - len(lines) - 2
        over_time = bool(snapshot.rank_series) and len(ranks) <= room
        grid = rank_lines(snapshot, width=width) if over_time else rank_grid(ranks, width=width, height=room)
        lines += [*([EMPTY] if lines else []), heading(ranks_heading(snapshot.ranks), width), *grid]
    for title, table in tables:
        lines += [*([EMPTY] if lines else []), heading(title, width), *table]
    return lines + gpus_over_time(snapshot, width=width, height=height - len(lines) - 2)


def gpus_over_time(snapshot: Snapshot, *, width: int, height: int) -> list[Line]:
    """The use of each GPU since the run began; nothing where there is no room for all."""
    shown = [(name, series) for name, series in snapshot.gpu_series.items() if name.endswith(" use") and series.values]
    columns = 1 if len(shown) <= height else 2
    if not shown or len(shown) > columns * height:
        return []
    names = [clean(name.removesuffix(" use")) for name, _ in shown]
    names = names if len(snapshot.hosts) > 1 else [name.rpartition("/")[2] for name in names]
    margin = min(24, max(map(cells, names)))
    each = split_width(width, [1] * columns)[0]
    lines: list[Line] = []
    for name, (_, series) in zip(names, shown, strict=True):
        by_time = replace(series, steps=[int(time) for time in series.times])
        line = pulse(evenly(by_time, each - margin - 9))
        lines.append(
            ((f" {cut(name, margin):>{margin}} ", "strong"), (line, "green"), (f" {series.values[-1]:>5.0%}", ""))
        )
    rows = -(-len(lines) // columns)
    return [
        EMPTY,
        heading("GPU use, over time", width),
        *beside([(lines[:rows], each), (lines[rows:], each)][:columns]),
    ]


def curves_page(snapshot: Snapshot, choice: Choice, *, width: int, height: int) -> list[Line]:
    """One curve large; all others as a line each below it."""
    names = all_curves(snapshot)
    if not names:
        return [EMPTY, fit(((" no numbers yet", "faint"),), width)]
    chosen = choice.curve if choice.curve in names else names[0]
    table = [curve_line(snapshot, name, width=width, here=name == chosen, part=choice.part) for name in names]
    room = max(6, height - len(table) - 1)
    lines = curve_block(snapshot, chosen, width=width, height=room, part=choice.part, log=choice.log_scale)
    said = f"{'all steps' if choice.part >= 1 else f'last {choice.part:.0%} of the steps'}"
    said += ", logarithmic" if choice.log_scale else ""
    return [*lines, heading(said, width, right=((LEAST_MOST_LAST, "faint"),)), *table]


def curve_line(snapshot: Snapshot, name: str, *, width: int, here: bool, part: float) -> Line:
    called, style, least_span = CURVES.get(name, (name, "blue", 0.1))
    values = since(snapshot.series[name], part).values
    if not values:
        return fit(((f"   {called:<12} n/a", "faint"),), width)
    least, most, last = (format_measure(name, value) for value in (min(values), max(values), values[-1]))
    room = max(4, width - 17 - 34)
    return fit(
        (
            (" > " if here else "   ", "key"),
            (f"{cut(called, 13):<14}", "strong" if here else ""),
            (f"{steady(since(snapshot.series[name], part), room, least_span):<{room}}", style),
            (f"{least:>11}{most:>11}", "faint"),
            (f"{last:>11} ", "strong"),
        ),
        width,
    )


def machines_page(snapshot: Snapshot, *, width: int) -> list[Line]:
    """Everything about hosts, GPUs and ranks, as long as it is."""
    lines: list[Line] = []
    every = [gpu for host in snapshot.hosts for gpu in host.gpus]
    for host in snapshot.hosts:
        lines += [heading(clean(host.name), width), (*((" ", ""),), *host_facts(host, width=width - 2, long=True))]
        lines += gpu_rows(host.gpus, width=width, among=every)
        lines += processes(host.gpus, width=width)
    if known(snapshot.ranks):
        lines += [heading("ranks: own work a step, over time", width), *rank_lines(snapshot, width=width)]
    if not snapshot.hosts and not known(snapshot.ranks):
        lines += [EMPTY, ((" no samples of any machine in this run folder", "faint"),)]
    return [fit(line, width) for line in lines]


def processes(gpus: Sequence[GpuView], *, width: int) -> list[Line]:
    """Which process holds how much of which GPU, some in a line; those of others are marked."""
    found: list[Line] = []
    for gpu in gpus:
        for process in gpu.processes:
            size = process.get("bytes")
            memory = f"{size / GIB:.1f} GiB" if isinstance(size, int | float) else ""
            found.append(
                (
                    (f"    GPU {gpu.index}  ", "faint"),
                    (f"{process.get('pid')} {cut(clean(str(process.get('name') or '')), 14):<15}", ""),
                    (f"{memory:>9}", "faint"),
                    ("  ! not of this run" if process.get("ours") is False else "", "warning"),
                )
            )
    columns = max(1, min((width + 2) // 60, len(found)))
    rows = -(-len(found) // columns)
    each = split_width(width, [1] * columns)[0]
    return beside([(found[i * rows : (i + 1) * rows], each) for i in range(columns)])


def rank_lines(snapshot: Snapshot, *, width: int) -> list[Line]:
    """Each rank now, and its own work over the run as blocks between the least and the greatest of all."""
    longest = slowest(known(snapshot.ranks))
    every = [value for series in snapshot.rank_series for value in series.values]
    low = 0.9 * min(every, default=0.0)
    high = max(1.6 * low, max(every, default=1.0))  # so that the noise of equal ranks stays low
    cell = min(width, 42)
    lines: list[Line] = []
    for rank in known(snapshot.ranks):
        where = f"{cut(clean(rank.host or ''), 12):<13}" if width >= 100 else ""
        line: list[Piece] = [*rank_cell(rank, width=cell, longest=longest), (f"  {where}", "faint")]
        room = width - cell - 2 - len(where) - 1
        if rank.rank < len(snapshot.rank_series) and room > 4:
            values = snapshot.rank_series[rank.rank].values
            line.append((sparkline(values, room, low=low, high=high), "orange" if rank.slow else "blue"))
        lines.append(tuple(line))
    return lines


def events_page(snapshot: Snapshot, *, now: float, width: int) -> list[Line]:
    said = [heading("notes", width), *notes(snapshot, width=width), EMPTY] if snapshot.notes else []
    lines = [*said, heading("events, UTC", width), *events(snapshot, now=now, width=width)]
    return [fit(line, width) for line in lines]
