"""
Curves in a terminal, as dots of Braille, two by four in each character; and the page `curves`.

Each column of dots shows the least and the greatest value of its steps, so a spike of one step is visible at any width.
Pure: a Snapshot or numbers in, lines out.
"""

import math
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, pairwise
from operator import itemgetter
from statistics import fmean
from typing import Any

from paceline.terminal import cells, cut, pad
from paceline.units import format_count, format_percent
from paceline.watch.measures import METRICS, format_measure
from paceline.watch.snapshot import Series, Snapshot
from paceline.watch.terminal.line import EMPTY, Line, clean, heading, side_by_side, split_width

CURVES = [name for name in METRICS if name != "peak_bytes"]  # known curves, the most important first
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # of a character: left and right column, top to bottom
LEVELS, NOT_FINITE = "▁▂▃▄▅▆▇█", "×"
SMOOTH_SHARE = 0.05  # of the steps that are shown


@dataclass(frozen=True)
class CurveChoice:
    """What the keys have chosen on the page."""

    curve: str = "loss"
    log_scale: bool = False
    part: float = 1.0  # share of the steps, up to the last
    smooth: bool = False
    point: float | None = None  # where the curve is read, as a share of the width


def curves_page(snapshot: Snapshot, choice: CurveChoice, *, width: int, height: int) -> list[Line]:
    """One curve large, and a line for each curve below it."""
    names = all_curve_names(snapshot)
    if not names:
        return [EMPTY, ((" no numbers yet", "faint"),)]
    current = choice.curve if choice.curve in names else names[0]
    room = max(6, height - len(names) - 1)
    lines = curve_block(snapshot, replace(choice, curve=current), width=width, height=room)
    title = "all steps" if choice.part >= 1 else f"last {format_percent(choice.part)} of the steps"
    title += ", logarithmic" if choice.log_scale else ""
    title += ", smoothed" if choice.smooth else ""
    lines.append(heading(title, width, right=(("least       most     last", "faint"),)))
    for name in names:
        series = last_part(snapshot.series[name], choice.part)
        lines.append(curve_line(name, series, room=max(4, width - 51), is_current=name == current))
    return lines


def curve_line(name: str, series: Series, *, room: int, is_current: bool) -> Line:
    title, style, least_span = curve_look(name)
    if not (values := series.values):
        return ((f"   {title:<12} n/a", "faint"),)
    ends = finite(values) or values
    low_text, high_text, last = (format_measure(name, value) for value in (min(ends), max(ends), values[-1]))
    return (
        (" > " if is_current else "   ", "key"),
        (pad(cut(title, 13), 14), "strong" if is_current else ""),
        (f"{steady_line(series, room, least_span):<{room}}", style),
        (f"{low_text:>11}{high_text:>11}", "faint"),
        (f"{last:>11} ", "strong"),
    )


def curve_look(name: str) -> tuple[str, str, float]:
    """Returns a curve's title, its style and the least span of its axis as a share of its middle."""
    if name not in CURVES:
        return clean(name), "blue", 0.1
    title = "step, ms" if name == "step_ms" else METRICS[name].label
    return title, METRICS[name].style, 0.02 if name in ("loss", "val_bpb") else 0.2


def curve_row(
    snapshot: Snapshot, names: Sequence[str], *, width: int, height: int, shares: Sequence[int], gap: int = 2
) -> list[Line]:
    """Several curves side by side; shares: of the width."""
    if not names:
        return []
    widths = split_width(width, shares[: len(names)], gap=gap)
    columns = zip(names, widths, strict=True)
    return side_by_side(
        [(curve_block(snapshot, CurveChoice(name), width=column, height=height), column) for name, column in columns],
        gap=gap,
    )


def curve_block(snapshot: Snapshot, choice: CurveChoice, *, width: int, height: int) -> list[Line]:
    name = choice.curve
    title, style, least_span = curve_look(name)
    series = last_part(snapshot.series.get(name, Series()), choice.part)
    planned = (snapshot.plan or {}).get(name)
    planned = planned if isinstance(planned, int | float) else None
    right: Line = ((format_measure(name, series.values[-1]), "strong"),) if series.values else ()
    shown = smoothed(series) if choice.smooth else series
    if choice.point is not None and series.values:
        step, value = value_at(shown, choice.point)
        place = "line" if snapshot.step is None else "step"
        right = ((f"{place} {step:,}: ", "faint"), (format_measure(name, value), "key"), ("   last ", "faint"), *right)
    look: dict[str, Any] = {
        "least_span": least_span,
        "log": choice.log_scale,
        "planned": planned,
        "point": choice.point,
        "axis": "line" if snapshot.step is None else "step",
    }
    lines = chart((shown, style), width=width, height=height - 1, **look)
    return [heading(title, width, right=right), *lines]


def value_at(series: Series, share: float) -> tuple[int, float]:
    """Returns the point of a curve that is nearest to a share of its steps."""
    place = series.steps[0] + share * (series.steps[-1] - series.steps[0])
    index = min(range(len(series.steps)), key=lambda index: abs(series.steps[index] - place))
    return series.steps[index], series.values[index]


def smoothed(series: Series) -> Series:
    """Returns a curve's means over SMOOTH_SHARE of its steps before each point; the first points are means of fewer."""
    values, first = list[float](), 0
    span = SMOOTH_SHARE * (series.steps[-1] - series.steps[0]) if series.steps else 0.0
    for index, (step, value) in enumerate(zip(series.steps, series.values, strict=True)):
        while series.steps[first] < step - span:
            first += 1
        values.append(fmean(finite(series.values[first : index + 1])) if math.isfinite(value) else value)
    return Series(series.steps, values, series.times)


def all_curve_names(snapshot: Snapshot) -> list[str]:
    """The known curves, the most important first, then everything else that the run has written."""
    return sorted(snapshot.series, key=lambda name: CURVES.index(name) if name in CURVES else len(CURVES))


def drawn_curves(snapshot: Snapshot, names: Sequence[str]) -> list[str]:
    """The curves among the names that have a value."""
    return [name for name in names if snapshot.series.get(name, Series()).values]


def chart(
    *curves: tuple[Series, str],
    width: int,
    height: int,
    least_span: float = 0.02,
    log: bool = False,
    planned: float | None = None,
    point: float | None = None,
    axis: str = "step",
) -> list[Line]:
    """Draws curves, each with its style, in `height` lines, with the first and the last step on the last line, after `axis`.

    Curves after the first are dashed. least_span: least range of the axis as a share of its middle, so that noise stays small.
    planned: drawn as a dotted line. point: a share of the width, drawn as an upright line.
    """
    lists = [
        [(step, value) for step, value in zip(series.steps, series.values, strict=True) if math.isfinite(value)]
        for series, _ in curves
    ]
    points = sorted(chain.from_iterable(lists))
    places = sorted(chain.from_iterable(series.steps for series, _ in curves))
    rows = height - 1
    if not points or rows < 1 or width < 12:
        text = "every value is NaN or infinite" if places and not points else "no value yet"
        return [((text, "faint"),)][:height] + [EMPTY] * (height - 1)
    if log := log and min(value for _, value in points) > 0:
        lists = [[(step, math.log10(value)) for step, value in points] for points in lists]
        planned = math.log10(planned) if planned and planned > 0 else None
    bounds = [value for points in lists for _, value in points] + ([] if planned is None else [planned])
    low, high = widen(min(bounds), max(bounds), least_span=least_span, log=log)
    low, high, ticks = (log_axis if log else round_axis)(low, high, rows)
    labels = [format_short(10**tick) for tick in ticks.values()] if log else tick_labels(list(ticks.values()))
    texts = dict(zip(ticks, labels, strict=True))
    margin = max(5, *map(cells, texts.values()))
    columns = width - margin - 2
    first, last = places[0], places[-1]
    crosses = {
        round((step - first) / max(1, last - first) * (columns - 1))
        for series, _ in curves
        for step, value in zip(series.steps, series.values, strict=True)
        if not math.isfinite(value)
    }
    place: dict[str, Any] = {"low": low, "high": high, "first": first, "last": last}
    place |= {"columns": columns, "rows": rows}
    shown = enumerate(zip(lists, curves, strict=True))
    grids = [(draw(points, is_dashed=i > 0, **place), style) for i, (points, (_, style)) in shown if points]
    level = None if planned is None else dot_of(planned, low, high, rows) // 4
    mark = None if point is None else round(point * (columns - 1))
    lines: list[Line] = []
    for y in range(rows):
        scale: Line = ((f"{texts.get(y, ''):>{margin}} ", "faint"), ("┤" if y in texts else "│", "track"))
        row = [(grid[y], style) for grid, style in grids]
        lines.append((*scale, *chart_row(row, is_plan=y == level, mark=mark, crosses=crosses if y == rows - 1 else ())))
    steps = f"{step_labels(first, last, columns):>{width}}"
    name = "" if steps[: margin + 1].strip() else axis  # a long number takes its room
    return [*lines, ((f"{name:>{margin}}{steps[margin:]}" if name else steps, "faint"),)]


def step_labels(first: int, last: int, columns: int) -> str:
    """Returns the steps at the left and the right end of an axis, and at its middle where there is room."""
    if first == last:
        return f"{first:<{columns},}"
    left, right, middle = f"{first:,}", f"{last:,}", f"{(first + last) // 2:,}" if columns > 60 else ""
    if len(left + middle + right) >= columns:
        left = middle = ""
    start = (columns - len(middle)) // 2 if middle else len(left)
    return f"{left:<{start}}{middle}{right:>{columns - start - len(middle)}}"


def chart_row(
    curves: Sequence[tuple[Sequence[int], str]], *, is_plan: bool, mark: int | None, crosses: Collection[int] = ()
) -> Line:
    """Joins the dots of several curves; the first one hides the others. mark: the column of the point that is read.

    crosses: the columns of values that are not finite.
    """
    pieces = [
        next(
            ((chr(0x2800 + dots), style) for dots, (_, style) in zip(column, curves, strict=True) if dots),
            (NOT_FINITE, "red") if x in crosses else ("┊", "key") if x == mark else ("┈" if is_plan else " ", "faint"),
        )
        for x, column in enumerate(zip(*(row for row, _ in curves), strict=True))
    ]
    return tuple(("".join(char for char, _ in group), style) for style, group in groupby(pieces, key=itemgetter(1)))


def widen(low: float, high: float, *, least_span: float, log: bool) -> tuple[float, float]:
    """Widens a range so that the noise of a steady value does not fill it."""
    middle = (low + high) / 2
    min_span = 0.05 if log else max(abs(middle) * least_span, 1e-9)
    return (low, high) if high - low >= min_span else (middle - min_span / 2, middle + min_span / 2)


def round_axis(low: float, high: float, rows: int) -> tuple[float, float, dict[int, float]]:
    """Returns a range that holds the values, and round numbers by row, in the middle of every second to fourth row."""
    power = 10.0 ** math.floor(math.log10((high - low) / rows))
    layouts = sorted((factor * power / apart, apart) for factor in (2, 2.5, 5, 10, 20, 25, 50) for apart in (4, 3, 2))
    for row_span, apart in layouts:
        step = row_span * apart
        last = math.floor(high / step)
        first = max(0, math.ceil((high - last * step) / row_span - 0.5))  # the row of the greatest tick
        top = last * step + (first + 0.5) * row_span
        if low >= 0 > top - rows * row_span:  # values that are never negative need no room below zero
            shift = min(math.floor((low - top) / row_span + rows), math.ceil(rows - top / row_span))
            first, top = first + max(0, shift), top + max(0, shift) * row_span
        ticks = {row: (last - (row - first) // apart) * step for row in range(first % apart, rows, apart)}
        if top - rows * row_span <= low and len(ticks) >= min(2, rows // 2):
            return top - rows * row_span, top, ticks or {0: (low + high) / 2}
    return low, high, {row: high - (row + 0.5) * (high - low) / rows for row in range(0, rows, max(2, rows // 5))}


def log_axis(low: float, high: float, rows: int) -> tuple[float, float, dict[int, float]]:
    """The same for logarithms: a tick in each third row or so, where a number of few digits lies in its row."""
    row_span = (high - low) / rows

    def roundest(row: int) -> tuple[int, int, float]:
        """Returns the digits of the shortest number in a row, the row, and the number's logarithm."""
        middle = high - (row + 0.5) * row_span
        numbers = ((digits, math.log10(float(f"{10**middle:.{digits}g}"))) for digits in range(1, 6))
        inside = ((digits, row, number) for digits, number in numbers if abs(number - middle) <= row_span / 2)
        return next(inside, (6, row, middle))

    apart = max(3, rows // 4)
    groups = (range(start, min(start + apart - 1, rows)) for start in range(0, rows, apart))
    return low, high, dict(min(map(roundest, group))[1:] for group in groups)


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Formats the ticks of an axis, all with the same number of decimals."""
    if max(map(abs, ticks)) >= 10_000:
        return [format_count(tick) if abs(tick) < 1e15 else format_short(tick) for tick in ticks]
    step = ticks[0] - ticks[1] if len(ticks) > 1 else ticks[0] or 1.0
    decimals = next((digits for digits in range(6) if math.isclose(step, round(step, digits), rel_tol=1e-6)), 6)
    return [f"{tick:,.{decimals}f}" for tick in ticks]


def dot_of(value: float, low: float, high: float, rows: int) -> int:
    """The row of dots that a value is in, from the top."""
    share = (value - low) / (high - low)
    return round((1 - min(1.0, max(0.0, share))) * (4 * rows - 1))


def draw(
    points: Sequence[tuple[int, float]],
    *,
    low: float,
    high: float,
    first: int,
    last: int,
    columns: int,
    rows: int,
    is_dashed: bool = False,
) -> list[list[int]]:
    """Returns the dots of each character as bits; neighbouring points are joined. first, last: the steps at the edges."""
    grid = [[0] * columns for _ in range(rows)]
    span = max(1, last - first)
    dots = [
        (round((step - first) / span * (2 * columns - 1)), dot_of(value, low, high, rows)) for step, value in points
    ]

    for (x0, y0), (x1, y1) in pairwise([dots[0], *dots]):
        before = y0
        for x in range(x0, x1 + 1):
            y = y1 if x1 == x0 else round(y0 + (y1 - y0) * (x - x0) / (x1 - x0))
            for dot in range(min(before, y), max(before, y) + 1) if not is_dashed or x // 2 % 2 else ():
                grid[dot // 4][x // 2] |= DOTS[x % 2][dot % 4]
            before = y
    return grid


def sparkline(values: Sequence[float], width: int, *, low: float | None = None, high: float | None = None) -> str:
    """Draws values as one line of blocks, each the mean of its column's values; × where none of them is finite."""
    points = finite(values)
    if not points or width < 1:
        return ""
    low, high = min(points) if low is None else low, max(points) if high is None else high
    columns = min(width, len(values))
    edges = [len(values) * i // columns for i in range(columns + 1)]
    parts = [finite(values[a:b]) for a, b in pairwise(edges)]
    shares = [(fmean(part) - low) / ((high - low) or 1.0) if part else None for part in parts]
    return "".join(NOT_FINITE if share is None else LEVELS[min(7, max(0, int(8 * share)))] for share in shares)


def finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def even_values(places: Sequence[float], values: Sequence[float], columns: int) -> list[float]:
    """Returns a value for each of `columns` equal parts of the places: the mean of its values, else the value before.

    NaN: the part has values, and none is finite.
    """
    if not places:
        return []
    span = max(1, places[-1] - places[0])
    edges = [bisect_left(places, places[0] + span * i / columns) for i in range(columns)]
    means = [math.nan]
    for start, end in pairwise([*edges, len(places)]):
        part = finite(values[start:end])
        means.append(fmean(part) if part else math.nan if start < end else means[-1])
    return means[1:]


def steady_line(series: Series, columns: int, least_span: float) -> str:
    """Draws a curve as one line of blocks, in which noise below `least_span` of its middle stays small."""
    if not (points := finite(series.values)):
        return ""
    low, high = widen(min(points), max(points), least_span=least_span, log=False)
    return sparkline(even_values(series.steps, series.values, columns), columns, low=low, high=high)


def pulse(shares: Sequence[float]) -> str:
    """Draws use over time as one thin line: heavy where a share is high, dots where it is low."""
    return "".join("━" if share >= 0.8 else "─" if share >= 0.4 else "·" for share in shares)


def last_part(series: Series, share: float) -> Series:
    """Returns the last part of a curve, by steps: 0.1 is the last tenth."""
    if not series.steps or share >= 1:
        return series
    start = bisect_left(series.steps, series.steps[-1] - (series.steps[-1] - series.steps[0]) * share)
    return Series(series.steps[start:], series.values[start:], series.times[start:])


def format_short(value: float) -> str:
    """10.4, 0.412, 856K, 1.25M: at most about five characters, for the edge of a chart."""
    size = abs(value)
    if size == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    if size >= 1000:
        return f"{value:,.0f}" if size < 10_000 else format_count(value) if size < 1e15 else f"{value:.0e}"
    return f"{value:.{min(6, max(0, 2 - math.floor(math.log10(size))))}f}" if size >= 1e-3 else f"{value:.1e}"
