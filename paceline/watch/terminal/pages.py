"""
The terminal view's overview, put together from all parts, the pages `events` and `log`, and the text that `--once` prints.

Pure but for `read_log`: a Snapshot, the time and a size in, lines out. The overview is exactly as large as the screen; longer
pages scroll. `--once` is for scripts and pipes; its width decides only how much of a text is shown.
Below WIDE columns the parts stand below each other; from there on curves are on the left, machines on the right.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.terminal import cut, pad
from paceline.units import format_bytes, format_number_of
from paceline.watch.growing_file import read_tail, search
from paceline.watch.measures import METRICS, format_measure
from paceline.watch.snapshot import LIVE, LogView, Series, Snapshot
from paceline.watch.summary import first_log, line_level, log_title
from paceline.watch.terminal import chart, head, machines
from paceline.watch.terminal.line import (
    EMPTY,
    Line,
    clean,
    coloured,
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
from paceline.watch.terminal.runs import RunChoice, compare_page, runs_page

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
    name: str | None = None  # of a log of another host
    query: str = ""  # empty: the end of the log
    wrapped: bool = False


@dataclass(frozen=True)
class LogText:
    """What was read of a log: lines, each with its number where a text was searched for."""

    log: LogView | None
    choice: LogChoice
    lines: list[tuple[int | None, str]]


NO_LOG = LogText(None, LogChoice(), [])
NO_RUNS = RunChoice()


def page_lines(
    page: str,
    snapshot: Snapshot,
    *,
    now: float,
    width: int,
    height: int,
    choice: chart.CurveChoice,
    log: LogText,
    wrapped: bool,
    runs: RunChoice = NO_RUNS,
) -> list[Line]:
    """The lines of a page by its name. Pages other than overview and curves leave a column to the scrollbar."""
    width -= page not in ("overview", "curves")
    match page:
        case "curves":
            lines = chart.curves_page(snapshot, choice, width=width, height=height)
        case "machines":
            lines = machines.machines_page(snapshot, width=width)
        case "events":
            notes = section("notes", head.note_lines(snapshot, width=width), width)
            lines = [*notes, *section("events, UTC", head.event_lines(snapshot, now=now, width=width), width)][1:]
        case "log":
            lines = log_lines(log, width=width, wrapped=wrapped)
        case "why":
            lines = head.why_page(snapshot, width=width)
        case "runs":
            lines = runs_page(runs, opened=snapshot.path, width=width)
        case "compare":
            lines = compare_page(snapshot, runs, width=width, height=height)
        case "help":
            lines = help_lines(width)
        case _:
            lines = overview(snapshot, now=now, width=width, height=height, log=log)
    return [fit(line, width) for line in lines]


def overview(snapshot: Snapshot, *, now: float, width: int, height: int, log: LogText = NO_LOG) -> list[Line]:
    """The page `overview`. log: of one rank, whose end fills the remaining room."""
    top = head.banner(snapshot, width=width, height=4 if height < 27 else 8)
    room = height - len(top)
    layout = wide_overview if width >= WIDE and room >= 24 else narrow_overview
    lines = [*top, *layout(snapshot, now=now, width=width, height=room, log=log)]
    return [*lines, *[EMPTY] * height][:height]


def narrow_overview(snapshot: Snapshot, *, now: float, width: int, height: int, log: LogText) -> list[Line]:
    """80 x 24: curves, machines, ranks, events, and a log in the remaining lines."""
    curves = chart.drawn_curves(snapshot, FIRST_CURVES)[: 3 if width >= 72 else 1]
    least_curves, least_events = 6 if curves else 0, 3
    spare = height - least_curves - least_events
    ranks = machines.known_ranks(snapshot.ranks)
    least_ranks = 1 + min(2, len(ranks)) if ranks else 0
    devices = machines.machines_block(snapshot, width=width, height=max(1, spare - least_ranks - 1))
    spare -= len(devices)
    grid = machines.rank_grid(ranks, width=width, height=max(2, min(6, spare - 1)))
    spare -= len(grid) + bool(grid)
    events_height = 1 + min(len(snapshot.events), max(4, height // 4))
    curves_height = min(16, least_curves + max(0, spare + least_events - events_height))
    lines = chart.curve_row(snapshot, curves, width=width, height=curves_height, shares=(3, 2, 2))
    lines += [*devices, *section(machines.ranks_title(ranks), grid, width)[1:]]
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
    """The notes on what could not be read, and the events; a log has none."""
    notes = section("notes", head.note_lines(snapshot, width=width)[: max(0, height)], width)[1:]
    height -= len(notes)
    if height < 1 or (not snapshot.events and (snapshot.kind == "log" or notes)):
        return notes
    return [*notes, heading("events", width), *head.event_lines(snapshot, now=now, width=width, height=height)]


def wide_overview(snapshot: Snapshot, *, now: float, width: int, height: int, log: LogText) -> list[Line]:
    """200 x 60: curves and events on the left; machines, ranks, plan, time and the end of a log on the right."""
    names = chart.drawn_curves(snapshot, chart.CURVES)
    widths = split_width(width, (11, 9), gap=3)
    lower = height if not names else max(7, min(max(len(snapshot.events), 10) + 1, height // 4))
    left: list[Line] = []
    if names:  # the first curve large, others in pairs below it
        room = height - lower - 1
        pairs = [names[i : i + 2] for i in range(1, len(names), 2)][: 3 if room >= 44 else 2 if room >= 26 else 1]
        pair_height = min(11, room // (len(pairs) + 2))
        large = room - (pair_height + 1) * len(pairs)
        left = [*chart.curve_block(snapshot, chart.CurveChoice(names[0]), width=widths[0], height=large), EMPTY]
        for pair in pairs:
            left += chart.curve_row(snapshot, pair, width=widths[0], height=pair_height, shares=(1, 1), gap=3)
            left.append(EMPTY)
    left += last_block(snapshot, now=now, width=widths[0], height=height - len(left) - 1)
    least_log = max(7, height // 6) if log.log else 0
    right = right_side(snapshot, width=widths[1], height=height - least_log)
    right += [EMPTY] if right else []
    right += log_block(log, width=widths[1], height=height - len(right) - 1)
    return side_by_side([(left, widths[0]), (right[:height], widths[1])], gap=3)


def right_side(snapshot: Snapshot, *, width: int, height: int) -> list[Line]:
    """Machines and ranks, then plan and time, then GPUs over time where there is room."""
    tables = section("plan", head.plan_lines(snapshot), width)
    tables += section("time", head.goodput_lines(snapshot, width=width), width)
    ranks = machines.known_ranks(snapshot.ranks)
    ranks_height = min(12, len(ranks) + 2, height // 3) if ranks else 0
    lines = machines.machines_block(snapshot, width=width, height=max(2, height - len(tables) - ranks_height - 1))
    room = height - len(tables) - len(lines) - 2
    over_time = bool(snapshot.rank_series) and len(ranks) <= room
    grid = (
        machines.rank_lines(snapshot, width=width) if over_time else machines.rank_grid(ranks, width=width, height=room)
    )
    lines += [*section(machines.ranks_title(ranks), grid, width), *tables]
    lines += machines.gpus_over_time(snapshot, width=width, height=height - len(lines) - 2)
    return lines if lines[:1] != [EMPTY] else lines[1:]


def chosen_log(snapshot: Snapshot, choice: LogChoice) -> LogView | None:
    """The log that was chosen, as long as it exists; else the log to open with."""
    place = (choice.attempt, choice.rank, choice.name)
    return next((log for log in snapshot.logs if (log.attempt, log.rank, log.name) == place), first_log(snapshot))


def neighbour_log(snapshot: Snapshot, choice: LogChoice, *, ranks: int = 0, attempts: int = 0) -> LogChoice:
    """The log so many ranks or attempts further on, cyclically. In another attempt it is the same rank's, if there is one."""
    current = chosen_log(snapshot, choice)
    if current is None:
        return choice
    numbers = sorted({log.attempt for log in snapshot.logs})
    attempt = numbers[(numbers.index(current.attempt) + attempts) % len(numbers)]
    logs = [(log.rank, log.name) for log in snapshot.logs if log.attempt == attempt]
    own = (current.rank, current.name)
    index = logs.index(own) if own in logs else next((i for i, (rank, _) in enumerate(logs) if rank is not None), 0)
    rank, name = logs[(index + ranks) % len(logs)]
    return replace(choice, attempt=attempt, rank=rank, name=name, query="")


def read_log(snapshot: Snapshot, choice: LogChoice) -> LogText:
    """Reads the end of the chosen log, or its lines with the query; bounded, whatever the size of the file."""
    log = chosen_log(snapshot, choice)
    if log is None:
        return LogText(None, choice, [])
    path = Path(log.path)
    if choice.query:
        return LogText(log, choice, list(search(path, choice.query, limit=MAX_HITS)))
    return LogText(log, choice, [(None, line) for line in read_tail(path, max_bytes=TAIL_BYTES).splitlines()])


def log_heading(text: LogText, *, width: int) -> Line:
    log = text.log
    if log is None:
        return heading("log", width)
    title = "log" if log.rank is None and not log.name else f"log of {log_title(log)}".replace("of kernel log ", "")
    attempt = "" if log.rank is None and not log.name else f"attempt {log.attempt}  "
    right: Line = ((f"{attempt}{cut(clean(Path(log.path).name), 24)}  {format_bytes(log.bytes)}", "faint"),)
    if text.choice.query:
        count = (
            f"{MAX_HITS} lines or more" if len(text.lines) == MAX_HITS else format_number_of(len(text.lines), "line")
        )
        right = ((f"{count} with ", "faint"), (cut(clean(text.choice.query), 24), "match"))
    return heading(title, width, right=right)


def log_lines(text: LogText, *, width: int, wrapped: bool = False) -> list[Line]:
    """The lines of a log, without the heading."""
    if text.log is None:
        return [((" no log yet", "faint"),)]
    if not text.lines:
        return [((" no such line" if text.choice.query else " nothing yet", "faint"),)]
    lines: list[Line] = []
    query = re.compile(f"({re.escape(text.choice.query)})", re.IGNORECASE) if text.choice.query else None
    for number, line in text.lines:
        margin = (f" {number:>8,}  " if number is not None else " ", "faint")
        style = LOG_STYLES.get(line_level(line), "")
        for *start, (row, _) in paragraph(line, width, margin, wrapped=wrapped):
            parts = enumerate(query.split(row) if query else [row])  # every other one is a match
            lines.append((*start, *((part, "match" if i % 2 else style) for i, part in parts)))
    return lines


def format_once(snapshot: Snapshot, *, now: float, width: int, colour: bool = False, ascii_only: bool = False) -> str:
    """Returns one snapshot as text. width: of the terminal; only the lines of cause and fix may be longer."""
    lines = head.header(snapshot, now=now, width=width)
    if explanation := head.failure_of(snapshot):  # never cut, because scripts search for them
        lines.append(((clean(f" cause: {explanation['cause']}: {explanation['summary']}"), "error"),))
        lines += [((clean(f" fix: {explanation['fix']}"), "strong"),)] if explanation.get("fix") else []
    ranks = machines.known_ranks(snapshot.ranks)
    recent = head.event_lines(snapshot, now=now, width=width, height=LAST_EVENTS) if snapshot.events else []
    blocks = {
        "curves": [once_curve(name, series, width=width) for name, series in snapshot.series.items() if series.values],
        f"{'' if snapshot.state in LIVE else 'last sample: '}machines": machines.machine_lines(snapshot, width=width),
        machines.ranks_title(ranks): machines.rank_grid(ranks, width=width, height=64),
        "plan": head.plan_lines(snapshot),
        "time": head.goodput_lines(snapshot, width=width),
        "events, UTC": recent,
        "notes": [line for note in snapshot.notes for line in paragraph(note, width - 1, (" ", ""))],
    }
    for title, block in blocks.items():
        lines += [fit(line, width) for line in section(title, block, width)]
    text = "\n".join((coloured if colour else plain)(line) for line in lines)
    return to_ascii(text) if ascii_only else text


def once_curve(name: str, series: Series, *, width: int) -> Line:
    first, last = (format_measure(name, series.values[index]) for index in (0, -1))
    label = METRICS[name].label if name in METRICS else name
    room = max(4, min(60, width - 43))
    return (
        (f" {pad(cut(clean(label), 14), 15)}{first:>10} ", ""),
        (chart.steady_line(series, room, chart.curve_look(name)[2]), "blue"),
        (f" {last}", "strong"),
    )
