"""
The terminal view: textual takes keys, size and repaints; every line on the screen is made by the pure terminal_*.py beside it.

The run folder is read in a thread, at an interval and never twice at once. Only columns that changed are painted again, so
the view is usable over a slow line. Nothing here writes into the run folder.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events, on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Input

from paceline.errors import PacelineError
from paceline.watch.snapshot import Snapshot
from paceline.watch.status import Reader
from paceline.watch.terminal.head import head
from paceline.watch.terminal.keys import HELP_PAGE, PAGES, Key, key_line, keys_of, words_of_help
from paceline.watch.terminal.line import EMPTY, STYLES, Line, changed_columns, fit, to_ascii
from paceline.watch.terminal.log import LogChoice, LogText, log_heading, log_lines, other_attempt, other_rank, read_log
from paceline.watch.terminal.pages import Choice, all_curves, curves_page, events_page, machines_page, overview
from paceline.watch.terminal.why import why

LOOKS = {name: Style(color=look.color, bold=look.bold, reverse=look.reverse) for name, look in STYLES.items()}
PARTS = (1.0, 0.5, 0.1)  # of the steps, that `z` goes through
GROWING = ("events", "log")  # pages that open at their end and stay there


class Lines(ScrollView, can_focus=True):
    """Lines as they are, scrolled where they are more than fit; paints only what differs from what is there."""

    DEFAULT_CSS = """
    Lines { scrollbar-size-vertical: 1; overflow-x: hidden; }
    Lines, Lines:hover, Lines:focus {
        scrollbar-color: #50565e; scrollbar-color-hover: #7d8590; scrollbar-color-active: #7d8590;
        scrollbar-background: ansi_default; scrollbar-background-hover: ansi_default; scrollbar-background-active: ansi_default;
    }
    Lines.plain { scrollbar-size-vertical: 0; }
    """

    def __init__(self, *, id: str, plain: bool) -> None:
        super().__init__(id=id, classes="plain" if plain else "")
        self._lines: list[Line] = []
        self._plain = plain

    def show(self, lines: Sequence[Line]) -> None:
        before, self._lines = self._lines, list(lines)
        if len(before) != len(lines):
            self.virtual_size = Size(self.size.width, len(lines))
        for y in range(self.scroll_offset.y, self.scroll_offset.y + self.size.height):
            old, new = (each[y] if y < len(each) else EMPTY for each in (before, self._lines))
            if old != new and (changed := changed_columns(old, new)):
                start, end = changed
                self.refresh(Region(start, y - self.scroll_offset.y, end - start, 1))

    def render_line(self, y: int) -> Strip:
        index = y + self.scroll_offset.y
        line = self._lines[index] if index < len(self._lines) else EMPTY
        return strip_of(line, width=self.size.width, plain=self._plain)


class Keys(Widget):
    """The last line: what can be pressed now; each can be clicked too."""

    DEFAULT_CSS = "Keys { height: 1; }"

    def __init__(self, *, plain: bool) -> None:
        super().__init__(id="keys")
        self._keys: list[Key] = []
        self._plain = plain

    def show(self, keys: list[Key]) -> None:
        if keys != self._keys:
            self._keys = keys
            self.refresh()

    def render_line(self, y: int) -> Strip:
        return strip_of(key_line(self._keys), width=self.size.width, plain=self._plain)

    async def on_click(self, event: events.Click) -> None:
        at = 1
        for key in self._keys:
            if at <= event.x < at + key.width:
                await self.app.run_action(key.action)
                return
            at += key.width + 2


def strip_of(line: Line, *, width: int, plain: bool) -> Strip:
    pieces = [Segment(to_ascii(text) if plain else text, LOOKS[style]) for text, style in line]
    return Strip(pieces).adjust_cell_length(width, LOOKS[""])


class Watch(App[None]):
    """paceline watch"""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { layout: vertical; background: ansi_default; }
    #head { height: 3; overflow: hidden hidden; }
    #page { height: 1fr; }
    #find { height: 1; border: none; padding: 0 1; display: none; background: ansi_default; }
    #find:focus { border: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(i + 1), f"page('{name}')", name, show=False) for i, name in enumerate(PAGES)),
        Binding("tab", "turn(1)", show=False, priority=True),
        Binding("shift+tab", "turn(-1)", show=False, priority=True),
        Binding("question_mark,h", f"page('{HELP_PAGE}')", show=False),
        Binding("q", "leave", show=False),
        Binding("ctrl+c", "leave", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", show=False),
        Binding("ctrl+l", "repaint", show=False),
        Binding("escape", "out", show=False, priority=True),
        Binding("space", "hold", show=False),
        Binding("r", "read", show=False),
        Binding("left", "beside(-1)", show=False, priority=True),
        Binding("right", "beside(1)", show=False, priority=True),
        Binding("z", "part", show=False),
        Binding("y", "log_scale", show=False),
        Binding("a", "attempt", show=False),
        Binding("w", "wrap", show=False),
        Binding("c", "copy_fix", show=False),
        Binding("slash", "find", show=False, priority=True),  # the next key may be there already
        Binding("j,down", "scroll(1)", show=False),
        Binding("k,up", "scroll(-1)", show=False),
        Binding("g", "end(False)", show=False),
        Binding("G", "end(True)", show=False),
    ]

    def __init__(
        self,
        reader: Reader,
        *,
        interval_s: float = 3.0,
        ascii_only: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(ansi_color=True)  # before the theme: what NO_COLOR does is settled here
        self.theme = "ansi-dark"  # the terminal's own background
        self.animation_level = "none"
        self.reader, self.interval_s, self.clock = reader, interval_s, clock
        self.page = PAGES[0]
        self.snapshot: Snapshot | None = None
        self.said: str | None = None  # what the last reading could not do
        self.now = clock()
        self.held = self.copied = self._reading = False
        self.choice, self.log_choice = Choice(), LogChoice()
        self.log_text: LogText | None = None
        self._plain = ascii_only

    def compose(self) -> ComposeResult:
        yield Lines(id="head", plain=self._plain)
        yield Lines(id="page", plain=self._plain)
        find = Input(placeholder="find in this log", id="find", compact=True)
        find.cursor_blink = False
        yield find
        yield Keys(plain=self._plain)

    def on_mount(self) -> None:
        # SIGHUP ends the process at once: the terminal that an orderly end would write to is gone
        with suppress(NotImplementedError, RuntimeError, ValueError):  # not the main thread: a test
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.exit)
        self.app_resume_signal.subscribe(self, lambda _: self.action_repaint())
        self.query_one("#page", Lines).focus()
        self.set_interval(self.interval_s, self.action_read)
        self.action_read()
        self.draw()

    def action_read(self) -> None:
        """Reads in a thread, unless one is still at it. A search is not done again each time: the file may be large."""
        if self._reading:
            return
        self._reading = True
        choice = self.log_choice if self.needs_log and not self.log_choice.wanted else None
        self.run_worker(lambda: self._read(choice), thread=True, group="read")

    def _read(self, choice: LogChoice | None) -> None:
        snapshot, said = self.snapshot, None
        try:
            snapshot = self.reader.update()
        except PacelineError as error:
            said = error.message
        text = read_log(snapshot, choice) if snapshot and choice else None
        self.call_from_thread(self.take, snapshot, choice, text, said=said)

    def take(
        self,
        snapshot: Snapshot | None,
        choice: LogChoice | None = None,
        text: LogText | None = None,
        *,
        said: str | None = None,
    ) -> None:
        """What was read goes onto the screen, unless the picture is held, or another log is wanted by now."""
        self._reading = False
        if self.held:
            return
        self.snapshot, self.said, self.now = snapshot, said, self.clock()
        if text and choice == self.log_choice:
            self.log_text = text
        self.draw()

    def choose_log(self, choice: LogChoice) -> None:
        """Another log, or another text to find in it: read at once, held or not."""
        self.log_choice = choice
        snapshot = self.snapshot
        if snapshot is not None:
            self.run_worker(lambda: self._read_log(snapshot, choice), thread=True, group="log", exclusive=True)

    def _read_log(self, snapshot: Snapshot, choice: LogChoice) -> None:
        text = read_log(snapshot, choice)
        self.call_from_thread(self.take_log, choice, text)

    def take_log(self, choice: LogChoice, text: LogText) -> None:
        if choice == self.log_choice:
            self.log_text = text
            self.draw()
            if self.page == "log":
                self.query_one("#page", Lines).scroll_end(animate=False, x_axis=False)

    @property
    def needs_log(self) -> bool:
        return self.page in ("overview", "log")

    def draw(self) -> None:
        width = self.size.width
        page = self.query_one("#page", Lines)
        if self.snapshot is None:
            self.query_one("#head", Lines).show([EMPTY, fit(((f"  {self.said or 'reading ...'}", "faint"),), width)])
        else:
            self.draw_head(self.snapshot, width=width)
            follows = self.page in GROWING and page.scroll_offset.y >= page.max_scroll_y
            page.show(self.body(self.snapshot, width=width, height=page.size.height))
            if follows:
                page.scroll_end(animate=False, immediate=True, x_axis=False)
        keys = keys_of(self.page, width=width, held=self.held, copied=self.copied, snapshot=self.snapshot)
        self.query_one(Keys).show(keys)

    def draw_head(self, snapshot: Snapshot, *, width: int) -> None:
        """What does not scroll: how the run is, and on the page of a log whose it is."""
        lines, shown = head(snapshot, now=self.now, width=width, said=self.said), self.query_one("#head", Lines)
        if self.page == "log":
            lines.append(log_heading(self.log_text or LogText(None, "", []), width=width))
        if shown.styles.height is None or shown.styles.height.value != len(lines):
            shown.styles.height = len(lines)
            self.call_after_refresh(self.draw)  # the page has another height now
        shown.show(lines)

    def body(self, snapshot: Snapshot, *, width: int, height: int) -> list[Line]:
        match self.page:
            case "curves":
                return curves_page(snapshot, self.choice, width=width, height=height)
            case "machines":
                return machines_page(snapshot, width=width - 1)
            case "events":
                return events_page(snapshot, now=self.now, width=width - 1)
            case "log":
                text = self.log_text or LogText(None, "", [])
                return log_lines(text, width=width - 1, wrapped=self.log_choice.wrapped)
            case "why":
                return [fit(line, width - 1) for line in why(snapshot, width=width - 1)]
            case "help":
                return words_of_help(width - 1)
        return overview(snapshot, now=self.now, width=width, height=height, log=self.log_text)

    def on_resize(self) -> None:
        self.call_after_refresh(self.draw)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """While a text is typed, its keys are the text's."""
        return action in ("leave", "out") or not isinstance(self.focused, Input)

    def action_page(self, name: str) -> None:
        self.page = PAGES[0] if name == self.page == HELP_PAGE else name
        self.copied = False
        page = self.query_one("#page", Lines)
        page.scroll_to(y=0, animate=False, immediate=True)
        self.draw()
        if self.page == "log":
            self.choose_log(self.log_choice)
        elif self.log_choice.wanted:  # what was looked for is of that page alone
            self.choose_log(replace(self.log_choice, wanted=""))
        if self.page in GROWING:
            page.scroll_end(animate=False, x_axis=False)

    def action_turn(self, by: int) -> None:
        at = PAGES.index(self.page) if self.page in PAGES else 0
        self.action_page(PAGES[(at + by) % len(PAGES)])

    def action_beside(self, by: int) -> None:
        """The next curve, or the next rank's log."""
        if self.snapshot is None:
            return
        if self.page == "curves" and (names := all_curves(self.snapshot)):
            at = names.index(self.choice.curve) if self.choice.curve in names else 0
            self.choice = replace(self.choice, curve=names[(at + by) % len(names)])
            self.draw()
        elif self.page == "log":
            self.choose_log(other_rank(self.snapshot, self.log_choice, by))

    def action_part(self) -> None:
        self.choice = replace(self.choice, part=PARTS[(PARTS.index(self.choice.part) + 1) % len(PARTS)])
        self.draw()

    def action_log_scale(self) -> None:
        self.choice = replace(self.choice, log_scale=not self.choice.log_scale)
        self.draw()

    def action_attempt(self) -> None:
        if self.page == "log" and self.snapshot:
            self.choose_log(other_attempt(self.snapshot, self.log_choice))

    def action_wrap(self) -> None:
        self.log_choice = replace(self.log_choice, wrapped=not self.log_choice.wrapped)
        self.draw()

    def action_find(self) -> None:
        if self.page != "log":
            self.action_page("log")
        self.show_find(True)

    @on(Input.Submitted, "#find")
    def find(self, event: Input.Submitted) -> None:
        self.show_find(False)
        self.choose_log(replace(self.log_choice, wanted=event.value))

    def show_find(self, shown: bool) -> None:
        find, keys = self.query_one("#find", Input), self.query_one(Keys)
        find.display, keys.display = shown, not shown
        self.set_focus(find if shown else self.query_one("#page", Lines))

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        """A click beside the text that is typed leaves it, as Esc does; the terminal's own loss of focus does not."""
        if self.query_one("#find").display and not isinstance(event.widget, Input):
            self.show_find(False)

    def action_out(self) -> None:
        """Out of what is typed, found or explained; else to the overview."""
        if isinstance(self.focused, Input):
            self.show_find(False)
        elif self.page == "log" and self.log_choice.wanted:
            self.choose_log(replace(self.log_choice, wanted=""))
        else:
            self.action_page(PAGES[0])

    def action_hold(self) -> None:
        self.held = not self.held
        self.draw()
        if not self.held:
            self.action_read()

    def action_copy_fix(self) -> None:
        said = self.snapshot.explanation if self.snapshot else None
        if said and said.get("fix"):
            self.copy_to_clipboard(str(said["fix"]))
            self.copied = True
            self.draw()

    def action_scroll(self, by: int) -> None:
        if self.page == "curves":
            self.action_beside(by)
        else:
            self.query_one("#page", Lines).scroll_relative(y=by, animate=False)

    def action_end(self, last: bool) -> None:
        page = self.query_one("#page", Lines)
        if last:
            page.scroll_end(animate=False, x_axis=False)
        else:
            page.scroll_home(animate=False, x_axis=False)

    def action_repaint(self) -> None:
        """After Ctrl-Z and fg, or when something else has written on the terminal."""
        for part in (*self.query(Lines), self.query_one(Keys)):
            part.refresh()

    def action_leave(self) -> None:
        self.exit()


def watch(reader: Reader, *, interval_s: float, ascii_only: bool) -> None:
    """Until the user leaves."""
    Watch(reader, interval_s=interval_s, ascii_only=ascii_only).run()
