"""
Lines of the terminal view as pieces of text with named styles; and the last line, which shows the keys of each page.

Pure: no terminal and no library. The name of a style says what a piece means, STYLES how that looks. Colour never carries meaning
alone, so a line reads the same without it. Colour-blind readers can tell the colours apart.
"""

import unicodedata
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, pairwise, zip_longest
from typing import NamedTuple

from paceline.terminal import ELLIPSIS, cells, cut
from paceline.watch.snapshot import Snapshot

Piece = tuple[str, str]  # text, name of its style
Line = tuple[Piece, ...]

EMPTY: Line = ()

STYLES = {  # as rich writes it; and for `--once`, as SGR of the sixteen colours that every terminal has
    "": ("", ""),
    "strong": ("bold", "1"),
    "faint": ("#7d8590", "2"),
    "track": ("#50565e", "2"),
    "title": ("#9aa4b0", "1"),
    "key": ("bold #56a8e8", "36"),
    "active": ("bold reverse", "7"),
    "good": ("bold #3fae7c", "32"),
    "warning": ("bold #dd9a2b", "33"),
    "error": ("bold #e5603f", "31"),
    "match": ("bold reverse #dd9a2b", "7"),
    "blue": ("#56a8e8", "36"),
    "orange": ("#dd9a2b", "33"),
    "green": ("#3fae7c", "32"),
    "violet": ("#a98bdb", "35"),
    "red": ("#e5603f", "31"),
}
BRAILLE = {  # dots that lie high, low, or both
    0x2800 + dots: " " if not dots else "'" if not dots & 0b11110110 else "." if not dots & 0b00011011 else ":"
    for dots in range(256)
}
ASCII = BRAILLE | str.maketrans("━╸─┈╌┊│┤└●○◐✓✗■↻·…°–−×█▁▂▃▄▅▆▇␡←→↑↓␣", "==-.-:||+*oo+x#@-.'--x#.,:-=+*?<>^v_")
CONTROLS: dict[int, int | str] = {  # of clean
    **{code: 0x2400 + code for code in range(32)},
    127: "␡",
    **dict.fromkeys((*range(128, 160), *range(0xD800, 0xE000)), "�"),
}

MAX_LABEL, MIN_LABEL = 24, 8  # columns of another run's name in the last line
PAGES = ("overview", "curves", "machines", "events", "log", "why")
HELP_PAGE = "help"
KEY_HELP = (
    ("1 ... 6", "overview, curves, machines, events, log, why; the last line can also be clicked"),
    ("Tab, Shift+Tab", "the next page, the previous page"),
    ("↑ ↓ j k", "scroll, as do PgUp, PgDn, Home, End, g and G. At its end, the log follows new lines"),
    ("space", "hold the screen, and continue"),
    ("r, Ctrl-L", "read now; repaint the screen"),
    ("← →", "on curves: another curve. On log: another rank"),
    ("z", "on curves: all steps, the last half, the last tenth"),
    ("y s", "on curves: logarithmic axis on and off, smoothed or as it is"),
    ("[ ]", "on curves: read the curve at a point further left or right"),
    ("a", "on log: the previous attempt"),
    ("/", "on log: find a text in the whole file, in upper or lower case. Esc returns to its end"),
    ("w", "on log: wrap long lines on and off"),
    ("c", "on why: copy the fix"),
    ("o", "the list of runs: ↑ ↓ choose one, Enter opens it, m compares it with the one that is open"),
    ("q, Ctrl-C", "quit. The run continues"),
)


def clean(text: str) -> str:
    """Makes the text of a log or a name safe to show: control characters become visible, marks of direction are dropped."""
    if text.isascii() and text.isprintable():
        return text
    text = text.expandtabs(4).translate(CONTROLS)
    return "".join(char for char in text if unicodedata.category(char) not in ("Cf", "Zl", "Zp"))


def width_of(line: Iterable[Piece]) -> int:
    return sum(cells(text) for text, _ in line)


def fit(line: Iterable[Piece], width: int) -> Line:
    """Cuts or fills a line to exactly `width` columns."""
    used, pieces = 0, []
    for text, style in line:
        piece = cut(text, width - used)
        if piece:
            pieces.append((piece, style))
        used += cells(piece)
        if piece != text:
            break
    return (*pieces, (" " * (width - used), "")) if used < width else tuple(pieces)


def side_by_side(blocks: Sequence[tuple[Sequence[Line], int]], *, gap: int = 2) -> list[Line]:
    """Joins blocks of lines side by side, each of its own width, all as high as the highest."""
    rows: list[Line] = [EMPTY] * max((len(lines) for lines, _ in blocks), default=0)
    for index, (lines, width) in enumerate(blocks):
        before = ((" " * gap, ""),) if index else ()
        rows = [(*row, *before, *fit(line, width)) for row, line in zip_longest(rows, lines, fillvalue=EMPTY)]
    return rows


def split_width(width: int, shares: Sequence[int], *, gap: int = 2) -> list[int]:
    """Returns the widths of blocks that stand side by side, in proportion to their shares."""
    room = width - gap * (len(shares) - 1)
    edges = [room * total // sum(shares) for total in accumulate(shares, initial=0)]
    return [after - before for before, after in pairwise(edges)]


def in_columns(lines: Sequence[Line], count: int, *, width: int) -> list[Line]:
    """Arranges lines in columns of equal width, one column after the other."""
    rows = -(-len(lines) // count)
    widths = split_width(width, [1] * count)
    return side_by_side([(lines[i * rows : (i + 1) * rows], column) for i, column in enumerate(widths)])


def heading(title: str, width: int, *, right: Line = ()) -> Line:
    """── title ─────────── right ──"""
    left: Line = (("── ", "track"), (title, "title"), (" ", ""))
    after: Line = ((" ", ""), *right, (" ──", "track")) if right else ()
    if width_of(left) + width_of(after) >= width:
        after = ()
    return fit((*left, ("─" * (width - width_of(left) - width_of(after)), "track"), *after), width)


def section(title: str, lines: Sequence[Line], width: int) -> list[Line]:
    """Lines under a heading, below an empty line; nothing without lines."""
    return [EMPTY, heading(title, width), *lines] if lines else []


def facts_line(facts: Iterable[tuple[str, str, str]], width: int) -> Line:
    """Names and values, as many as there is room for. facts: name, value, style of the value."""
    line: Line = ()
    for name, value, style in facts:
        longer = (*line, ("  " if line else "", ""), (f"{name} ", "faint"), (value, style))
        if width_of(longer) <= width:
            line = longer
    return line


def bar(share: float | None, width: int, *, style: str = "blue") -> Line:
    """Draws a share of 0 to 1 as a heavy line on a light one; only the light one where the share is None."""
    halves = 0 if share is None else round(2 * width * min(1.0, max(0.0, share)))
    full, half = divmod(halves, 2)
    heavy = "━" * full + "╸" * half
    return ((heavy, style), ("─" * (width - len(heavy)), "track"))


def wrap(text: str, width: int) -> list[str]:
    """Breaks a text into rows, at spaces where possible; by columns, not characters."""
    lines, width = [""], max(2, width)  # as wide as the widest character
    for word in text.split(" "):
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if cells(joined) <= width:
            lines[-1] = joined
            continue
        lines += [word] if lines[-1] else []
        lines[-1] = lines[-1] or word
        while cells(lines[-1]) > width:
            row = cut(lines[-1], width + 1).removesuffix(ELLIPSIS)
            lines[-1:] = [row, lines[-1][len(row) :]]
    return lines


def paragraph(text: str, width: int, *start: Piece, style: str = "", wrapped: bool = True) -> list[Line]:
    """A text behind its start: on as many lines as it takes, indented alike, or cut to one. The last column stays free."""
    margin = width_of(start)
    room, text = width - margin - 1, clean(text)
    rows = wrap(text, room) if wrapped else [cut(text, room)]
    return [(*(((" " * margin, ""),) if i else start), (row, style)) for i, row in enumerate(rows)]


def changed_columns(old: Line, new: Line) -> tuple[int, int] | None:
    """Returns the first column in which two lines differ and the one after the last; None for equal lines."""
    pairs = enumerate(zip_longest(split_cells(old), split_cells(new), fillvalue=(" ", "")))
    columns = [column for column, (before, after) in pairs if before != after]
    return (columns[0], columns[-1] + 1) if columns else None


def split_cells(line: Line) -> list[Piece]:
    """Returns a piece for each column; the second half of a wide character is empty, combining characters stay with theirs."""
    columns: list[Piece] = []
    for text, style in line:
        for char in text:
            width = cells(char)
            if width == 0 and columns:
                columns[-1] = (columns[-1][0] + char, style)
            else:
                columns += [(char, style), ("", style)][:width]
    return columns


def plain(line: Line) -> str:
    return "".join(text for text, _ in line).rstrip()


def coloured(line: Line) -> str:
    """Returns the line with a terminal's colour codes, for `--once`."""
    codes = [(text, STYLES[style][1] if text.strip() else "") for text, style in line]
    return "".join(f"\x1b[{code}m{text}\x1b[0m" if code else text for text, code in codes).rstrip()


def to_ascii(text: str) -> str:
    """Draws the same in plain characters, for a terminal or a pipe that takes no UTF-8."""
    return text.translate(ASCII).encode("ascii", "replace").decode()


class Key(NamedTuple):
    key: str
    label: str
    action: str
    active: bool = False  # the page that is shown, or what has just been done

    @property
    def line(self) -> Line:
        if self.active:
            return ((f"{self.key} {self.label}", "active"), ("  ", ""))
        return ((self.key, "key"), (f" {self.label}" if self.label else "", "faint"), ("  ", ""))


def key_line(keys: Iterable[Key]) -> Line:
    return ((" ", ""), *chain.from_iterable(key.line for key in keys))


def page_keys(
    page: str, *, width: int, held: bool, copied: bool = False, snapshot: Snapshot | None, active: Sequence[str] = ()
) -> list[Key]:
    """Returns the keys of the last line, with the names of all pages where there is room. active: other runs that go on."""
    keys = extra_keys(page, snapshot, copied=copied) if snapshot else []
    keys += [Key("space", "continue", "hold", active=True)] if held else []
    keys += [Key("?", "help", f"page('{HELP_PAGE}')", active=page == HELP_PAGE), Key("q", "quit", "quit")]
    pages = [Key(str(i), name, f"page('{name}')", active=name == page) for i, name in enumerate(PAGES, 1)]
    numbers = [key if key.active else key._replace(label="") for key in pages]
    runs = Key("o", "runs", "page('runs')", active=page == "runs")
    room = width + 1 - width_of(key_line([*numbers, runs._replace(label="", active=True), *keys]))
    if page != "runs" and (label := running_label(active, room)):
        runs = runs._replace(label=label, active=True)
    if runs.active or width_of(key_line([*pages, runs, *keys])) <= width + 1:
        keys.insert(0, runs)
    return [*(pages if width_of(key_line([*pages, *keys])) <= width + 1 else numbers), *keys]


def running_label(active: Sequence[str], room: int) -> str:
    """Returns that other runs go on, in at most `room` columns; empty without such runs, and where nothing fits."""
    if not active:
        return ""
    count, name = len(active), clean(active[0])
    longer = [f"{cut(name, columns)} is running" for columns in range(MAX_LABEL, MIN_LABEL - 1, -1)]
    labels = [*(longer if count == 1 else [f"{count} others are running"]), f"{count} running"]
    return next((label for label in labels if cells(label) <= room), "")


def extra_keys(page: str, snapshot: Snapshot, *, copied: bool) -> list[Key]:
    if page == "runs":
        return [Key("↑↓", "choose", "choose_run(1)"), Key("Enter", "open", "open_run"), Key("m", "compare", "compare")]
    if page == "compare":
        return [Key("Esc", "runs", "escape")]
    if page == "curves" and snapshot.series:
        return [Key("←→", "curve", "neighbour(1)"), Key("z", "zoom", "zoom"), Key("y", "log axis", "log_scale")]
    if page == "log" and snapshot.logs:
        attempt = [Key("a", "attempt", "attempt")] if len(snapshot.attempts) > 1 else []
        return [Key("←→", "rank", "neighbour(1)"), *attempt, Key("/", "find", "find"), Key("w", "wrap", "wrap")]
    if page == "why" and snapshot.explanation and snapshot.explanation.get("fix"):
        return [Key("c", "copied" if copied else "copy the fix", "copy_fix", active=copied)]
    return []


def help_lines(width: int) -> list[Line]:
    rows = [row for keys, text in KEY_HELP for row in paragraph(text, width - 1, (f"  {keys:<16}", "key"))]
    return [heading("keys", width), *rows]
