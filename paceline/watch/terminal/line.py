"""
Lines of the terminal view: text in pieces, each with the name of its style. No terminal and no library here.

A style's name says what a piece means; STYLES says how that looks. Colour never carries meaning alone, so a line reads the same
without any. The colours are of middle lightness and keep apart for people who do not see red from green.
"""

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

Piece = tuple[str, str]  # text, name of its style
Line = tuple[Piece, ...]

EMPTY: Line = ()
ELLIPSIS = "…"


@dataclass(frozen=True)
class Look:
    color: str | None = None  # None: the terminal's own
    sgr: str = ""  # the same for `--once`, in the sixteen colours that every terminal has
    bold: bool = False
    reverse: bool = False


STYLES = {
    "": Look(),
    "strong": Look(bold=True, sgr="1"),
    "faint": Look("#7d8590", sgr="2"),
    "track": Look("#50565e", sgr="2"),
    "title": Look("#9aa4b0", sgr="1"),
    "key": Look("#56a8e8", sgr="36", bold=True),
    "here": Look(bold=True, reverse=True, sgr="7"),
    "good": Look("#3fae7c", sgr="32", bold=True),
    "warning": Look("#dd9a2b", sgr="33", bold=True),
    "error": Look("#e5603f", sgr="31", bold=True),
    "match": Look("#dd9a2b", sgr="7", bold=True, reverse=True),
    "blue": Look("#56a8e8", sgr="36"),
    "orange": Look("#dd9a2b", sgr="33"),
    "green": Look("#3fae7c", sgr="32"),
    "violet": Look("#a98bdb", sgr="35"),
    "red": Look("#e5603f", sgr="31"),
}


def clean(text: str) -> str:
    """What a log or a name holds, safe to show: control characters and marks of direction become visible or go."""
    if text.isascii() and text.isprintable():
        return text
    shown = []
    for char in text.expandtabs(4):
        kind = unicodedata.category(char)
        if kind == "Cc":
            shown.append("␡" if ord(char) == 127 else chr(0x2400 + ord(char)) if ord(char) < 32 else "�")
        elif kind == "Cs":
            shown.append("�")
        elif kind not in ("Cf", "Zl", "Zp"):
            shown.append(char)
    return "".join(shown)


def cells(text: str) -> int:
    """Columns that a text takes: two for a wide character, none for one that combines with the last."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 1 + (unicodedata.east_asian_width(char) in ("W", "F")) for char in text
    )


def width_of(line: Line) -> int:
    return sum(cells(text) for text, _ in line)


def cut(text: str, width: int) -> str:
    """At most `width` columns; what is cut off shows as an ellipsis."""
    if cells(text) <= width:
        return text
    if width <= 0:
        return ""
    kept, room = [], width - 1
    for char in text:
        room -= cells(char)
        if room < 0:
            break
        kept.append(char)
    return "".join(kept) + ELLIPSIS


def fit(line: Line, width: int) -> Line:
    """Exactly `width` columns."""
    used, kept = 0, []
    for text, style in line:
        shown = cut(text, width - used)
        if shown:
            kept.append((shown, style))
        used += cells(shown)
        if shown != text:
            break
    return (*kept, (" " * (width - used), "")) if used < width else tuple(kept)


def spread(left: Line, right: Line, width: int) -> Line:
    """Left and right at their ends; what is on the right goes where there is no room for both."""
    room = width - width_of(right)
    return fit((*fit(left, room), *right), width) if width_of(left) < room else fit(left, width)


def beside(blocks: Sequence[tuple[Sequence[Line], int]], *, gap: int = 2) -> list[Line]:
    """Blocks of lines side by side, each of its own width, all as high as the highest."""
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
    """Widths of blocks that stand side by side, in proportion to their shares."""
    room = width - gap * (len(shares) - 1)
    edges = [room * sum(shares[:i]) // sum(shares) for i in range(len(shares) + 1)]
    return [after - before for before, after in pairwise(edges)]


def heading(title: str, width: int, *, right: Iterable[Piece] = (), style: str = "title") -> Line:
    """── title ─────────── right ──"""
    left: Line = (("── ", "track"), (title, style), (" ", ""))
    after: Line = tuple(right)
    if after and width_of(left) + width_of(after) + 5 <= width:
        after = ((" ", ""), *after, (" ──", "track"))
    else:
        after = ()
    rest = width - width_of(left) - width_of(after)
    return fit((*left, ("─" * max(0, rest), "track"), *after), width)


def bar(share: float | None, width: int, *, style: str = "blue") -> Line:
    """A share of 0 to 1 as a heavy line on a light one; only the light one where the share is not known."""
    halves = 0 if share is None else round(2 * width * min(1.0, max(0.0, share)))
    full, half = divmod(halves, 2)
    done = "━" * full + "╸" * half
    return ((done, style), ("─" * (width - len(done)), "track"))


def wrap(text: str, width: int) -> list[str]:
    """Cut at spaces where there are some, else anywhere; by columns, not characters."""
    lines, width = [""], max(2, width)  # as wide as the widest character
    for word in text.split(" "):
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if cells(joined) <= width:
            lines[-1] = joined
            continue
        lines += [word] if lines[-1] else []
        lines[-1] = lines[-1] or word
        while cells(lines[-1]) > width:
            head = cut(lines[-1], width + 1).removesuffix(ELLIPSIS)
            lines[-1:] = [head, lines[-1][len(head) :]]
    return lines


def changed_columns(old: Line, new: Line) -> tuple[int, int] | None:
    """From the first column in which two lines differ to behind the last."""
    before, after = in_cells(old), in_cells(new)
    longest = max(len(before), len(after))
    before += [(" ", "")] * (longest - len(before))
    after += [(" ", "")] * (longest - len(after))
    columns = [i for i in range(longest) if before[i] != after[i]]
    return (columns[0], columns[-1] + 1) if columns else None


def in_cells(line: Line) -> list[Piece]:
    """A piece for each column; the second half of a wide character is empty, what combines stays with its character."""
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
    """With the codes of a terminal, for `--once`."""
    shown = [
        f"\x1b[{STYLES[style].sgr}m{text}\x1b[0m" if STYLES[style].sgr and text.strip() else text
        for text, style in line
    ]
    return "".join(shown).rstrip()


BRAILLE = {chr(0x2800 + dots): _ascii for dots in range(256) for _ascii in [
    " " if not dots else "'" if not dots & 0b11110110 else "." if not dots & 0b00011011 else ":"
]}  # fmt: skip
ASCII = str.maketrans(
    {
        **BRAILLE,
        **dict(zip("━╸─┈│┤└●○◐✓✗■↻·…°–×█▁▂▃▄▅▆▇␡", "==-.||+*oo+x#@-.'-x#.,:-=+*?", strict=True)),
        "←": "<", "→": ">", "↑": "^", "↓": "v", "␣": "_",
    }
)  # fmt: skip


def to_ascii(text: str) -> str:
    """For a terminal or a pipe that takes no UTF-8: the same picture in plain characters."""
    return text.translate(ASCII).encode("ascii", "replace").decode()
