"""
Lines of the terminal view as pieces of text with named styles; and the last line, which shows the keys of each page.

Pure: no terminal and no library. The name of a style says what a piece means, STYLES how that looks. Colour never carries meaning
alone, so a line reads the same without it. Colour-blind readers can tell the colours apart.
"""

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from paceline.watch.snapshot import Snapshot

Piece = tuple[str, str]  # text, name of its style
Line = tuple[Piece, ...]

EMPTY: Line = ()
ELLIPSIS = "…"


@dataclass(frozen=True)
class TextStyle:
    color: str | None = None  # None: the terminal's own
    sgr: str = ""  # for `--once`, in the sixteen colours that every terminal has
    bold: bool = False
    reverse: bool = False


STYLES = {
    "": TextStyle(),
    "strong": TextStyle(bold=True, sgr="1"),
    "faint": TextStyle("#7d8590", sgr="2"),
    "track": TextStyle("#50565e", sgr="2"),
    "title": TextStyle("#9aa4b0", sgr="1"),
    "key": TextStyle("#56a8e8", sgr="36", bold=True),
    "active": TextStyle(bold=True, reverse=True, sgr="7"),
    "good": TextStyle("#3fae7c", sgr="32", bold=True),
    "warning": TextStyle("#dd9a2b", sgr="33", bold=True),
    "error": TextStyle("#e5603f", sgr="31", bold=True),
    "match": TextStyle("#dd9a2b", sgr="7", bold=True, reverse=True),
    "blue": TextStyle("#56a8e8", sgr="36"),
    "orange": TextStyle("#dd9a2b", sgr="33"),
    "green": TextStyle("#3fae7c", sgr="32"),
    "violet": TextStyle("#a98bdb", sgr="35"),
    "red": TextStyle("#e5603f", sgr="31"),
}
BRAILLE = {chr(0x2800 + dots): _ascii for dots in range(256) for _ascii in [
    " " if not dots else "'" if not dots & 0b11110110 else "." if not dots & 0b00011011 else ":"
]}  # fmt: skip
ASCII = str.maketrans(
    {
        **BRAILLE,
        **dict(zip("━╸─┈│┤└●○◐✓✗■↻·…°–−×█▁▂▃▄▅▆▇␡", "==-.||+*oo+x#@-.'--x#.,:-=+*?", strict=True)),
        "←": "<", "→": ">", "↑": "^", "↓": "v", "␣": "_",
    }
)  # fmt: skip

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
    ("y", "on curves: logarithmic axis on and off"),
    ("a", "on log: the previous attempt"),
    ("/", "on log: find a text in the whole file, in upper or lower case. Esc returns to its end"),
    ("w", "on log: wrap long lines on and off"),
    ("c", "on why: copy the fix"),
    ("q, Ctrl-C", "quit. The run continues"),
)


def clean(text: str) -> str:
    """Makes the text of a log or a name safe to show: control characters become visible, marks of direction are dropped."""
    if text.isascii() and text.isprintable():
        return text
    chars = []
    for char in text.expandtabs(4):
        kind = unicodedata.category(char)
        if kind == "Cc":
            chars.append("␡" if ord(char) == 127 else chr(0x2400 + ord(char)) if ord(char) < 32 else "�")
        elif kind == "Cs":
            chars.append("�")
        elif kind not in ("Cf", "Zl", "Zp"):
            chars.append(char)
    return "".join(chars)


def cells(text: str) -> int:
    """Columns that a text takes: two for a wide character, none for one that combines with the character before it."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 1 + (unicodedata.east_asian_width(char) in ("W", "F")) for char in text
    )


def width_of(line: Line) -> int:
    return sum(cells(text) for text, _ in line)


def cut(text: str, width: int) -> str:
    """Cuts a text to at most `width` columns, with an ellipsis for what is cut off."""
    if cells(text) <= width:
        return text
    if width <= 0:
        return ""
    room = width - 1
    for index, char in enumerate(text):
        room -= cells(char)
        if room < 0:
            return text[:index] + ELLIPSIS
    return text


def fit(line: Line, width: int) -> Line:
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


def spread(left: Line, right: Line, width: int) -> Line:
    """Puts left and right at both ends of a line; drops the right part where there is no room for both."""
    room = width - width_of(right)
    return fit((*fit(left, room), *right), width) if width_of(left) < room else fit(left, width)


def side_by_side(blocks: Sequence[tuple[Sequence[Line], int]], *, gap: int = 2) -> list[Line]:
    """Joins blocks of lines side by side, each of its own width, all as high as the highest."""
    height = max((len(lines) for lines, _ in blocks), default=0)
    rows = []
    for y in range(height):
        row: list[Piece] = []
        for index, (lines, width) in enumerate(blocks):
            row += [(" " * gap, "")] if index else []
            row += fit(lines[y] if y < len(lines) else EMPTY, width)
        rows.append(tuple(row))
    return rows


def split_width(width: int, shares: Sequence[int], *, gap: int = 2) -> list[int]:
    """Returns the widths of blocks that stand side by side, in proportion to their shares."""
    room = width - gap * (len(shares) - 1)
    edges = [room * sum(shares[:i]) // sum(shares) for i in range(len(shares) + 1)]
    return [after - before for before, after in pairwise(edges)]


def in_columns(lines: Sequence[Line], count: int, *, width: int) -> list[Line]:
    """Arranges lines in columns of equal width, one column after the other."""
    rows = -(-len(lines) // count)
    widths = split_width(width, [1] * count)
    return side_by_side([(lines[i * rows : (i + 1) * rows], column) for i, column in enumerate(widths)])


def heading(title: str, width: int, *, right: Iterable[Piece] = (), style: str = "title") -> Line:
    """── title ─────────── right ──"""
    left: Line = (("── ", "track"), (title, style), (" ", ""))
    after: Line = tuple(right)
    if after and width_of(left) + width_of(after) + 5 <= width:
        after = ((" ", ""), *after, (" ──", "track"))
    else:
        after = ()
    room = width - width_of(left) - width_of(after)
    return fit((*left, ("─" * max(0, room), "track"), *after), width)


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


def changed_columns(old: Line, new: Line) -> tuple[int, int] | None:
    """Returns the first column in which two lines differ and the one after the last; None for equal lines."""
    before, after = split_cells(old), split_cells(new)
    longest = max(len(before), len(after))
    before += [(" ", "")] * (longest - len(before))
    after += [(" ", "")] * (longest - len(after))
    columns = [i for i in range(longest) if before[i] != after[i]]
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
    pieces = [
        f"\x1b[{STYLES[style].sgr}m{text}\x1b[0m" if STYLES[style].sgr and text.strip() else text
        for text, style in line
    ]
    return "".join(pieces).rstrip()


def to_ascii(text: str) -> str:
    """Draws the same in plain characters, for a terminal or a pipe that takes no UTF-8."""
    return text.translate(ASCII).encode("ascii", "replace").decode()


@dataclass(frozen=True)
class Key:
    key: str
    label: str
    action: str
    active: bool = False  # the page that is shown, or what has just been done

    @property
    def width(self) -> int:
        return cells(self.key) + (1 + cells(self.label) if self.label else 0)


def page_keys(
    page: str, *, width: int, held: bool = False, copied: bool = False, snapshot: Snapshot | None
) -> list[Key]:
    """Returns the keys of the last line, with the names of all pages where there is room."""
    last = [
        *([Key("space", "continue", "hold", active=True)] if held else []),
        Key("?", "help", f"page('{HELP_PAGE}')", active=page == HELP_PAGE),
        Key("q", "quit", "quit"),
    ]
    extra = extra_keys(page, snapshot, copied=copied)
    for is_named in (True, False):
        pages = [
            Key(str(i + 1), name if is_named or name == page else "", f"page('{name}')", active=name == page)
            for i, name in enumerate(PAGES)
        ]
        keys = [*pages, *extra, *last]
        if sum(key.width + 2 for key in keys) <= width:
            break
    return keys


def extra_keys(page: str, snapshot: Snapshot | None, *, copied: bool) -> list[Key]:
    if snapshot is None:
        return []
    if page == "curves" and snapshot.series:
        return [Key("←→", "curve", "neighbour(1)"), Key("z", "zoom", "zoom"), Key("y", "log axis", "log_scale")]
    if page == "log" and snapshot.logs:
        attempt = [Key("a", "attempt", "attempt")] if len(snapshot.attempts) > 1 else []
        return [Key("←→", "rank", "neighbour(1)"), *attempt, Key("/", "find", "find"), Key("w", "wrap", "wrap")]
    if page == "why" and snapshot.explanation and snapshot.explanation.get("fix"):
        return [Key("c", "copied" if copied else "copy the fix", "copy_fix", active=copied)]
    return []


def key_line(keys: list[Key]) -> Line:
    line: list[Piece] = [(" ", "")]
    for key in keys:
        if key.active:
            line.append((f"{key.key} {key.label}", "active"))
        else:
            line += [(key.key, "key"), (f" {key.label}" if key.label else "", "faint")]
        line.append(("  ", ""))
    return tuple(line)


def help_lines(width: int) -> list[Line]:
    lines: list[Line] = [heading("keys", width)]
    for keys, text in KEY_HELP:
        for i, row in enumerate(wrap(text, width - 20)):
            lines.append(((f"  {keys if i == 0 else '':<16}", "key"), (row, "")))
    return [fit(line, width) for line in lines]
