"""
The terminal view's overview, put together from all parts, the pages `events` and `log`, and the text that `--once` prints.

Pure but for `read_log`: a Snapshot, the time and a size in, lines out. The overview is exactly as large as the screen; longer
pages scroll. `--once` is for scripts and pipes; its width decides only how much of a text is shown.
Below WIDE columns the parts stand below each other; from there on curves are on the left, machines on the right.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.units import format_bytes
from paceline.watch.growing_file import read_tail, search
from paceline.watch.snapshot import LIVE, LogView, Series, Snapshot
from paceline.watch.summary import first_log, format_measure, line_level
from paceline.watch.terminal.chart import (
    CURVES,
    CurveChoice,
    curve_block,
    curve_look,
    curve_row,
    curves_page,
    drawn_curves,
    format_short,
    steady_line,
)
from paceline.watch.terminal.head import (
    banner,
    event_lines,
    failure_of,
    goodput_lines,
    header,
    note_lines,
    plan_lines,
    why_page,
)
from paceline.watch.terminal.line import (
    EMPTY,
    Line,
    Piece,
    clean,
    coloured,
    cut,
    fit,
    heading,
    help_lines,
    paragraph,
    plain,
    section,
    side_by_side,
    split_width,
    to_ascii,
)
from paceline.watch.terminal.machines import (
    gpus_over_time,
    known_ranks,
    machine_lines,
    machines_block,
    machines_page,
    rank_grid,
    rank_lines,
    ranks_title,
)

FIRST_CURVES = ("loss", "val_bpb", "tok_per_sec")
WIDE = 130
MIN_LOG_LINES = 2  # on the overview, below everything else
TAIL_BYTES = 128 << 10
MAX_HITS = 1000
LAST_EVENTS = 8  # of `--once`
LOG_STYLES = {"error": "red", "warning": "orange"}  # by level


@dataclass(frozen=True)
class LogChoice:
    """What the keys have chosen. attempt None: the log to open with; rank None: the launch's own log."""

    attempt: int | None = None
    rank: int | None = None
    query: str = ""  # empty: the end of the log
    wrapped: bool = False


@dataclass(frozen=True)
class LogText:
    """What was read of a log: lines, each with its number where a text was searched for."""

    log: LogView | None
    query: str
    lines: list[tuple[int | None, str]]


NO_LOG = LogText(None, "", [])


def page_lines(
    page: str,
    snapshot: Snapshot,
    *,
    now: float,
    width: int,
    height: int,
    choice: CurveChoice,
    log: LogText,
    wrapped: bool,
) -> list[Line]:
    """The lines of a page by its name. Pages other than overview and curves leave a column to the scrollbar."""
    match page:
        case "curves":
            return curves_page(snapshot, choice, width=width, height=height)
        case "machines":
            return machines_page(snapshot, width=width - 1)
        case "events":
            return events_page(snapshot, now=now, width=width - 1)
        case "log":
            return log_lines(log, width=width - 1, wrapped=wrapped)
        case "why":
            return [fit(line, width - 1) for line in why_page(snapshot, width=width - 1)]
        case "help":
            return help_lines(width - 1)
    return overview(snapshot, now=now, width=width, height=height, log=log)


def overview(snapshot: Snapshot, *, now: float, width: int, height: int, log: LogText = NO_LOG) -> list[Line]:
    """The page `overview`. log: of one rank, whose end fills the remaining room."""
    top = banner(snapshot, width=width, height=4 if height < 27 else 8)
    room = height - len(top)
    layout = wide_overview if width >= WIDE and room >= 24 else narrow_overview
    lines = [*top, *layout(snapshot, now=now, width=width, height=room, log=log)]
    return [fit(line, width) for line in [*lines, *[EMPTY] * height][:height]]


def narrow_overview(snapshot: Snapshot, *, now: float, width: int, height: int, log: LogText = NO_LOG) -> list[Line]:
    """80 x 24: curves, machines, ranks, events, and a log in the remaining lines."""
    curves = drawn_curves(snapshot, FIRST_CURVES)[: 3 if width >= 72 else 1]
    least_curves, least_events = 6 if curves else 0, 3
    spare = height - least_curves - least_events
    ranks = known_ranks(snapshot.ranks)
    least_ranks = 1 + min(2, len(ranks)) if ranks else 0
    machines = machines_block(snapshot, width=width, height=max(1, spare - least_ranks - 1))
    spare -= len(machines)
    grid = rank_grid(ranks, width=width, height=max(2, min(6, spare - 1)))
    spare -= len(grid) + bool(grid)
    events_height = 1 + min(len(snapshot.events), max(4, height // 4))
    curves_height = min(16, least_curves + max(0, spare + least_events - events_height))
    lines = curve_row(snapshot, curves, width=width, height=curves_height, shares=(3, 2, 2))
    lines += [*machines, *section(ranks_title(ranks), grid, width)[1:]]
    room = height - len(lines) - 1
    block = last_block(snapshot, now=now, width=width, height=room)
    log_height = room - len(block)
    if not block or log_height >= MIN_LOG_LINES:
        block += log_block(log, width=width, height=log_height)
    return [*lines, *block]


def log_block(log: LogText, *, width: int, height: int) -> list[Line]:
    """The last lines of a log under a heading."""
    if log.log is None or height < 1:
        return []
    return [log_heading(log, width=width), *log_lines(log, width=width)[-height:]]


def last_block(snapshot: Snapshot, *, now: float, width: int, height: int) -> list[Line]:
    """Events; for a log, which has none, the notes on what could not be read."""
    if height < 1 or (snapshot.kind == "log" and not snapshot.events and not snapshot.notes):
        return []
    if snapshot.notes and not snapshot.events:
        return [heading("notes", width), *note_lines(snapshot, width=width)[:height]]
    return [heading("events", width), *event_lines(snapshot, now=now, width=width, height=height)]


def wide_overview(snapshot: Snapshot, *, now: float, width: int, height: int, log: LogText = NO_LOG) -> list[Line]:
    """200 x 60: curves and events on the left; machines, ranks, plan, time and the end of a log on the right."""
    names = drawn_curves(snapshot, CURVES)
    widths = split_width(width, (11, 9), gap=3)
    lower = height if not names else max(7, min(max(len(snapshot.events), 10) + 1, height // 4))
    left = [*left_side(snapshot, names, width=widths[0], height=height - lower - 1), EMPTY] if names else []
    left += last_block(snapshot, now=now, width=widths[0], height=height - len(left) - 1)
    least_log = max(7, height // 6) if log.log else 0
    right = right_side(snapshot, width=widths[1], height=height - least_log)
    right += [EMPTY] if right else []
    right += log_block(log, width=widths[1], height=height - len(right) - 1)
    return side_by_side([(left, widths[0]), (right[:height], widths[1])], gap=3)


def left_side(snapshot: Snapshot, names: list[str], *, width: int, height: int) -> list[Line]:
    """The loss large, other curves in pairs below it."""
    pairs = [names[i : i + 2] for i in range(1, len(names), 2)][: 3 if height >= 44 else 2 if height >= 26 else 1]
    pair_height = min(11, height // (len(pairs) + 2))
    lines = curve_block(snapshot, names[0], width=width, height=height - (pair_height + 1) * len(pairs))
    for pair in pairs:
        lines += [EMPTY, *curve_row(snapshot, pair, width=width, height=pair_height, shares=(1, 1), gap=3)]
    return lines


def right_side(snapshot: Snapshot, *, width: int, height: int) -> list[Line]:
    """Machines and ranks, then plan and time, then GPUs over time where there is room."""
    tables = section("plan", plan_lines(snapshot, width=width), width)
    tables += section("time", goodput_lines(snapshot, width=width), width)
    ranks = known_ranks(snapshot.ranks)
    ranks_height = min(12, len(ranks) + 2, height // 3) if ranks else 0
    lines = machines_block(snapshot, width=width, height=max(2, height - len(tables) - ranks_height - 1))
    room = height - len(tables) - len(lines) - 2
    over_time = bool(snapshot.rank_series) and len(ranks) <= room
    grid = rank_lines(snapshot, width=width) if over_time else rank_grid(ranks, width=width, height=room)
    lines += [*section(ranks_title(ranks), grid, width), *tables]
    lines += gpus_over_time(snapshot, width=width, height=height - len(lines) - 2)
    return lines if lines[:1] != [EMPTY] else lines[1:]


def events_page(snapshot: Snapshot, *, now: float, width: int) -> list[Line]:
    notes = [heading("notes", width), *note_lines(snapshot, width=width), EMPTY] if snapshot.notes else []
    lines = [*notes, heading("events, UTC", width), *event_lines(snapshot, now=now, width=width)]
    return [fit(line, width) for line in lines]


def chosen_log(snapshot: Snapshot, choice: LogChoice) -> LogView | None:
    """The log that was chosen, as long as it exists; else the log to open with."""
    place = (choice.attempt, choice.rank)
    return next((log for log in snapshot.logs if (log.attempt, log.rank) == place), first_log(snapshot))


def neighbour_log(snapshot: Snapshot, choice: LogChoice, *, ranks: int = 0, attempts: int = 0) -> LogChoice:
    """The log so many ranks or attempts further on, cyclically. In another attempt it is the same rank's, if there is one."""
    current = chosen_log(snapshot, choice)
    if current is None:
        return choice
    numbers = sorted({log.attempt for log in snapshot.logs})
    attempt = numbers[(numbers.index(current.attempt) + attempts) % len(numbers)]
    logs = [log.rank for log in snapshot.logs if log.attempt == attempt]
    rank = current.rank if current.rank in logs else next((rank for rank in logs if rank is not None), logs[0])
    return replace(choice, attempt=attempt, rank=logs[(logs.index(rank) + ranks) % len(logs)], query="")


def read_log(snapshot: Snapshot, choice: LogChoice) -> LogText:
    """Reads the end of the chosen log, or its lines with the query; bounded, whatever the size of the file."""
    log = chosen_log(snapshot, choice)
    if log is None:
        return LogText(None, choice.query, [])
    path = Path(log.path)
    if choice.query:
        return LogText(log, choice.query, list(search(path, choice.query, limit=MAX_HITS)))
    return LogText(log, "", [(None, line) for line in read_tail(path, max_bytes=TAIL_BYTES).splitlines()])


def log_heading(text: LogText, *, width: int) -> Line:
    log = text.log
    if log is None:
        return heading("log", width)
    title = "log" if log.rank is None else f"log of rank {log.rank}"
    attempt = "" if log.rank is None else f"attempt {log.attempt}  "
    right: Line = ((f"{attempt}{cut(clean(Path(log.path).name), 24)}  {format_bytes(log.bytes)}", "faint"),)
    if text.query:
        count = f"{len(text.lines)}{' or more' if len(text.lines) == MAX_HITS else ''}"
        right = ((f"{count} lines with ", "faint"), (cut(clean(text.query), 24), "match"))
    return heading(title, width, right=right)


def log_lines(text: LogText, *, width: int, wrapped: bool = False) -> list[Line]:
    """The lines of a log, without the heading."""
    if text.log is None:
        return [((" no log yet", "faint"),)]
    if not text.lines:
        return [((" no such line" if text.query else " nothing yet", "faint"),)]
    lines: list[Line] = []
    for number, line in text.lines:
        margin = (f" {number:>8,}  " if number is not None else " ", "faint")
        style = LOG_STYLES.get(line_level(line), "")
        for *start, (row, _) in paragraph(line, width, margin, wrapped=wrapped):
            lines.append(fit((*start, *matched(row, text.query, style)), width))
    return lines


def matched(text: str, query: str, style: str) -> Line:
    """Returns the text with every match of the query highlighted."""
    if not query:
        return ((text, style),)
    pieces: list[Piece] = []
    while (at := text.lower().find(query.lower())) >= 0:
        pieces += [(text[:at], style), (text[at : at + len(query)], "match")]
        text = text[at + len(query) :]
    return (*pieces, (text, style))


def format_once(snapshot: Snapshot, *, now: float, width: int, colour: bool = False, ascii_only: bool = False) -> str:
    """Returns one snapshot as text. width: of the terminal; only the lines of cause and fix may be longer."""
    lines = header(snapshot, now=now, width=width)
    if explanation := failure_of(snapshot):  # never cut, because scripts search for them
        lines.append(((clean(f" cause: {explanation['cause']}: {explanation['summary']}"), "error"),))
        lines += [((clean(f" fix: {explanation['fix']}"), "strong"),)] if explanation.get("fix") else []
    for title, block in once_blocks(snapshot, now=now, width=width):
        lines += section(title, block, width)
    text = "\n".join((coloured if colour else plain)(line) for line in lines)
    return to_ascii(text) if ascii_only else text


def once_blocks(snapshot: Snapshot, *, now: float, width: int) -> Iterator[tuple[str, list[Line]]]:
    """Yields the heading and the lines of each block; a block without lines is not shown."""
    yield "curves", [once_curve(name, series, width=width) for name, series in snapshot.series.items() if series.values]
    yield "machines" if snapshot.state in LIVE else "last sample: machines", machine_lines(snapshot, width=width)
    ranks = known_ranks(snapshot.ranks)
    yield ranks_title(ranks), rank_grid(ranks, width=width, height=64)
    yield "plan", plan_lines(snapshot, width=width)
    yield "time", goodput_lines(snapshot, width=width)
    yield "events, UTC", event_lines(snapshot, now=now, width=width, height=LAST_EVENTS) if snapshot.events else []
    yield "notes", [line for note in snapshot.notes for line in paragraph(note, width - 1, (" ", ""))]


def once_curve(name: str, series: Series, *, width: int) -> Line:
    first, last = format_short(series.values[0]), format_measure(name, series.values[-1])
    room = max(4, min(60, width - 40))
    return (
        (f" {cut(clean(name), 14):<15}{first:>7} ", ""),
        (steady_line(series, room, curve_look(name)[2]), "blue"),
        (f" {last}", "strong"),
    )
