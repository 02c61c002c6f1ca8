"""
The pages by their numbers, the keys that the last line shows on each, and the page that explains them all. Pure.
"""

from dataclasses import dataclass

from paceline.watch.snapshot import Snapshot
from paceline.watch.terminal.line import Line, Piece, cells, fit, heading, wrap

PAGES = ("overview", "curves", "machines", "events", "log", "why")
HELP_PAGE = "help"
EXPLAINED = (
    ("1 ... 6", "overview, curves, machines, events, log, why; they can be clicked too"),
    ("Tab, Shift+Tab", "the next page, the one before"),
    ("↑ ↓ j k", "scroll; PgUp, PgDn, Home, End, g and G too. At its end, the log follows what is written"),
    ("space", "hold the picture still, and let it go on"),
    ("r, Ctrl-L", "read now; paint everything again"),
    ("← →", "on curves: which one. On log: which rank"),
    ("z", "on curves: all steps, the last half, the last tenth"),
    ("y", "on curves: a logarithmic axis, and back"),
    ("a", "on log: the attempt before, round and round"),
    ("/", "on log: find a text in the whole file, in whatever case. Esc goes back to the end"),
    ("w", "on log: long lines whole, on several rows"),
    ("c", "on why: copy the fix"),
    ("q, Ctrl-C", "leave. The run does not notice"),
)


@dataclass(frozen=True)
class Key:
    key: str
    word: str
    action: str
    here: bool = False  # the page that is shown, or what has just been done

    @property
    def width(self) -> int:
        return cells(self.key) + (1 + cells(self.word) if self.word else 0)


def keys_of(page: str, *, width: int, held: bool = False, copied: bool = False, snapshot: Snapshot | None) -> list[Key]:
    """All with their words where there is room, else only the number of the pages that are not shown."""
    last = [
        *([Key("space", "go on", "hold", here=True)] if held else []),
        Key("?", "help", f"page('{HELP_PAGE}')", here=page == HELP_PAGE),
        Key("q", "quit", "leave"),
    ]
    extra = keys_of_page(page, snapshot, copied=copied)
    for worded in (True, False):
        pages = [
            Key(str(i + 1), name if worded or name == page else "", f"page('{name}')", here=name == page)
            for i, name in enumerate(PAGES)
        ]
        keys = [*pages, *extra, *last]
        if sum(key.width + 2 for key in keys) <= width:
            break
    return keys


def keys_of_page(page: str, snapshot: Snapshot | None, *, copied: bool) -> list[Key]:
    if snapshot is None:
        return []
    if page == "curves" and snapshot.series:
        return [Key("←→", "curve", "beside(1)"), Key("z", "zoom", "part"), Key("y", "log axis", "log_scale")]
    if page == "log" and snapshot.logs:
        attempt = [Key("a", "attempt", "attempt")] if len(snapshot.attempts) > 1 else []
        return [Key("←→", "rank", "beside(1)"), *attempt, Key("/", "find", "find"), Key("w", "wrap", "wrap")]
    if page == "why" and snapshot.explanation and snapshot.explanation.get("fix"):
        return [Key("c", "copied" if copied else "copy the fix", "copy_fix", here=copied)]
    return []


def key_line(keys: list[Key]) -> Line:
    line: list[Piece] = [(" ", "")]
    for key in keys:
        if key.here:
            line.append((f"{key.key} {key.word}", "here"))
        else:
            line += [(key.key, "key"), (f" {key.word}" if key.word else "", "faint")]
        line.append(("  ", ""))
    return tuple(line)


def words_of_help(width: int) -> list[Line]:
    lines: list[Line] = [heading("keys", width)]
    for keys, words in EXPLAINED:
        for i, row in enumerate(wrap(words, width - 20)):
            lines.append(((f"  {keys if i == 0 else '':<16}", "key"), (row, "")))
    return [fit(line, width) for line in lines]
