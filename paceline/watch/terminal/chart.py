"""
Curves in a terminal: dots of Braille, two by four in each character. Pure: numbers in, lines out.

Each column of dots shows the least and the greatest value of its steps, so a spike of one step is seen at any width.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from paceline.units import format_count
from paceline.watch.snapshot import Series
from paceline.watch.terminal.line import EMPTY, Line, cells

DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # of a character: left and right column, top to bottom
LEVELS = "▁▂▃▄▅▆▇█"


def chart(
    series: Series,
    *,
    width: int,
    height: int,
    style: str,
    least_span: float = 0.02,
    log: bool = False,
    planned: float | None = None,
) -> list[Line]:
    """`height` lines, the last with the first and the last step. least_span: of the middle, so that noise stays small.

    planned: a value that shows as a dotted line.
    """
    points = [(step, value) for step, value in zip(series.steps, series.values, strict=True) if math.isfinite(value)]
    rows = height - 1
    if not points or rows < 1 or width < 12:
        return [(("no value yet", "faint"),)][:height] + [EMPTY] * (height - 1)
    log = log and min(value for _, value in points) > 0
    scale: Callable[[float], float] = math.log10 if log else float
    bounds = [scale(value) for _, value in points]
    if planned is not None and (planned > 0 or not log):
        bounds.append(scale(planned))
    low, high = widen(min(bounds), max(bounds), least_span=least_span, log=log)
    low, high, ticks = (even_axis if log else round_axis)(low, high, rows)
    shown_as = map(short, (10**tick for tick in ticks.values())) if log else labels(list(ticks.values()))
    texts = dict(zip(ticks, shown_as, strict=True))
    margin = max(5, *map(cells, texts.values()))
    columns = width - margin - 2
    grid = draw([(step, scale(value)) for step, value in points], low, high, columns=columns, rows=rows)
    level = None if planned is None else row_of(scale(planned), low, high, rows)
    lines = []
    for y, row in enumerate(grid):
        edge = "┤" if y in texts else "│"
        shown = "".join(chr(0x2800 + dots) if dots else "┈" if y == level else " " for dots in row)
        lines.append(((f"{texts.get(y, ''):>{margin}} ", "faint"), (edge, "track"), *with_level(shown, style)))
    return [*lines, steps_line(points[0][0], points[-1][0], margin=margin, columns=columns)]


def with_level(text: str, style: str) -> Line:
    """The curve in its style, the dotted line of the plan in a quiet one."""
    pieces: list[tuple[str, str]] = []
    for char in text:
        kind = "faint" if char == "┈" else style
        if pieces and pieces[-1][1] == kind:
            pieces[-1] = (pieces[-1][0] + char, kind)
        else:
            pieces.append((char, kind))
    return tuple(pieces)


def steps_line(first: int, last: int, *, margin: int, columns: int) -> Line:
    left, right = f"{first:,}", f"{last:,}"
    middle = f"{(first + last) // 2:,}" if columns > 60 else ""
    gap = columns - len(left) - len(right) - len(middle)
    if gap < 1:
        return ((f"{right:>{margin + 2 + columns}}", "faint"),)
    before = (columns - len(middle)) // 2 - len(left) if middle else gap
    return ((" " * (margin + 2) + left + " " * before + middle + " " * (gap - before) + right, "faint"),)


def widen(low: float, high: float, *, least_span: float, log: bool) -> tuple[float, float]:
    """A range at least so wide that the noise of a steady value does not fill it."""
    middle = (low + high) / 2
    least = 0.05 if log else max(abs(middle) * least_span, 1e-9)
    if high - low >= least:
        return low, high
    return middle - least / 2, middle + least / 2


def round_axis(low: float, high: float, rows: int) -> tuple[float, float, dict[int, float]]:
    """A range that holds the values, and round numbers on it, by row: every second to fourth row, in the middle of it."""
    power = 10.0 ** math.floor(math.log10((high - low) / rows))
    ways = sorted((factor * power / apart, apart) for factor in (2, 2.5, 5, 10, 20, 25, 50) for apart in (4, 3, 2))
    for each_row, apart in ways:
        step = each_row * apart
        last = math.floor(high / step)
        first = max(0, math.ceil((high - last * step) / each_row - 0.5))  # the row of the greatest of them
        top = last * step + (first + 0.5) * each_row
        if low >= 0 > top - rows * each_row:  # no room below zero for what is never below it
            up = min(math.floor((low - top) / each_row + rows), math.ceil(rows - top / each_row))
            first, top = first + max(0, up), top + max(0, up) * each_row
        ticks = {row: (last - (row - first) // apart) * step for row in range(first % apart, rows, apart)}
        if top - rows * each_row <= low and len(ticks) >= min(2, rows // 2):
            return top - rows * each_row, top, ticks or {0: (low + high) / 2}
    return even_axis(low, high, rows)


def even_axis(low: float, high: float, rows: int) -> tuple[float, float, dict[int, float]]:
    """For logarithms: every second row or so, whatever is there."""
    each_row = (high - low) / rows
    apart = max(2, rows // 5)
    return low, high, {row: high - (row + 0.5) * each_row for row in range(0, rows, apart)}


def labels(ticks: Sequence[float]) -> list[str]:
    """All with the same number of decimals."""
    if max(map(abs, ticks)) >= 10_000:
        return [format_count(tick) if abs(tick) < 1e15 else short(tick) for tick in ticks]
    step = ticks[0] - ticks[1] if len(ticks) > 1 else ticks[0] or 1.0
    decimals = next((digits for digits in range(6) if math.isclose(step, round(step, digits), rel_tol=1e-6)), 6)
    return [f"{tick:,.{decimals}f}" for tick in ticks]


def row_of(value: float, low: float, high: float, rows: int) -> int:
    """Which line of characters a value is in, from the top."""
    dots = dot_of(value, low, high, rows)
    return dots // 4


def dot_of(value: float, low: float, high: float, rows: int) -> int:
    share = (value - low) / (high - low)
    return round((1 - min(1.0, max(0.0, share))) * (4 * rows - 1))


def draw(points: Sequence[tuple[int, float]], low: float, high: float, *, columns: int, rows: int) -> list[list[int]]:
    """The dots of each character. Neighbouring points are joined."""
    grid = [[0] * columns for _ in range(rows)]
    span = max(1, points[-1][0] - points[0][0])
    placed = [
        (round((step - points[0][0]) / span * (2 * columns - 1)), dot_of(value, low, high, rows))
        for step, value in points
    ]

    def fill(x: int, top: int, bottom: int) -> None:
        for y in range(top, bottom + 1):
            grid[y // 4][x // 2] |= DOTS[x % 2][y % 4]

    fill(placed[0][0], placed[0][1], placed[0][1])
    for (x0, y0), (x1, y1) in pairwise(placed):
        before = y0
        for x in range(x0, x1 + 1):
            at = y1 if x1 == x0 else round(y0 + (y1 - y0) * (x - x0) / (x1 - x0))
            fill(x, min(before, at), max(before, at))
            before = at
    return grid


def sparkline(values: Sequence[float], width: int, *, low: float | None = None, high: float | None = None) -> str:
    """One line of blocks; the mean of each column's values."""
    known = [value for value in values if math.isfinite(value)]
    if not known or width < 1:
        return ""
    low, high = min(known) if low is None else low, max(known) if high is None else high
    span = (high - low) or 1.0
    columns = min(width, len(known))
    edges = [len(known) * i // columns for i in range(columns + 1)]
    means = [sum(known[a:b]) / (b - a) for a, b in pairwise(edges)]
    return "".join(LEVELS[min(7, max(0, int(8 * (mean - low) / span)))] for mean in means)


def evenly(series: Series, columns: int) -> list[float]:
    """A value for each of so many equal parts of the steps: the mean of those in it, else the one before."""
    if not series.steps:
        return []
    first, span = series.steps[0], max(1, series.steps[-1] - series.steps[0])
    parts: list[list[float]] = [[] for _ in range(columns)]
    for step, value in zip(series.steps, series.values, strict=True):
        if math.isfinite(value):
            parts[min(columns - 1, (step - first) * columns // span)].append(value)
    values = [math.nan]
    for part in parts:
        values.append(sum(part) / len(part) if part else values[-1])
    return values[1:]


def steady(series: Series, columns: int, least_span: float) -> str:
    """A curve as one line of blocks, in which noise of less than least_span of the middle stays small."""
    known = [value for value in series.values if math.isfinite(value)]
    if not known:
        return ""
    low, high = widen(min(known), max(known), least_span=least_span, log=False)
    return sparkline(evenly(series, columns), columns, low=low, high=high)


def pulse(shares: Sequence[float]) -> str:
    """Busy or not, over time, as one thin line: heavy where a share is high, dots where it is low."""
    return "".join("━" if share >= 0.8 else "─" if share >= 0.4 else "·" for share in shares)


def since(series: Series, share: float) -> Series:
    """The last part of a curve, by steps: 0.1 is the last tenth."""
    if not series.steps or share >= 1:
        return series
    first = series.steps[-1] - (series.steps[-1] - series.steps[0]) * share
    start = next(i for i, step in enumerate(series.steps) if step >= first)
    return Series(series.steps[start:], series.values[start:], series.times[start:])


def short(value: float) -> str:
    """10.4, 0.412, 856K, 1.25M: at most about five characters, for the edge of a chart."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 10_000:
        return format_count(value) if size < 1e15 else f"{value:.0e}"
    if size >= 1000:
        return f"{value:,.0f}"
    digits = max(0, 2 - math.floor(math.log10(size)))
    return f"{value:.{min(6, digits)}f}" if size >= 1e-3 else f"{value:.1e}"
