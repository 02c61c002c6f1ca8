"""
The terminal view: textual takes care of keys, size and repaints; the pure modules of this folder make every line on the screen.

A thread reads the run folder at an interval, never twice at once. Only changed columns are repainted, so that the view works over a
slow connection. Nothing is written to the run folder.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events, on, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Input

from paceline.errors import PacelineError
from paceline.watch.snapshot import Snapshot
from paceline.watch.status import Reader, RunList, open_reader
from paceline.watch.terminal.chart import CurveChoice, all_curve_names
from paceline.watch.terminal.head import header
from paceline.watch.terminal.line import (
    EMPTY,
    HELP_PAGE,
    PAGES,
    STYLES,
    Key,
    Line,
    changed_columns,
    fit,
    key_line,
    page_keys,
    to_ascii,
    width_of,
)
from paceline.watch.terminal.pages import NO_LOG, LogChoice, LogText, log_heading, neighbour_log, page_lines, read_log
from paceline.watch.terminal.runs import NUM_HEADINGS, RunChoice, differing_settings

RICH_STYLES = {name: Style.parse(style) for name, (style, _) in STYLES.items()}
ZOOMS = (1.0, 0.5, 0.1)  # shares of the steps that `z` steps through
LOG_PAGES = ("overview", "log")  # pages that show the end of a log
TAIL_PAGES = ("events", "log")  # pages that open at their end and stay there
POINTS = 40  # places on a curve that can be read


class LineView(ScrollView, can_focus=True):
    """Shows lines, scrolls where they do not fit, and repaints only columns that have changed."""

    DEFAULT_CSS = """
    LineView { scrollbar-size-vertical: 1; overflow-x: hidden; }
    LineView, LineView:hover, LineView:focus {
        scrollbar-color: #50565e; scrollbar-color-hover: #7d8590; scrollbar-color-active: #7d8590;
        scrollbar-background: ansi_default; scrollbar-background-hover: ansi_default; scrollbar-background-active: ansi_default;
    }
    LineView.plain { scrollbar-size-vertical: 0; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [("g", "scroll_home"), ("G", "scroll_end")]
    _lines: Sequence[Line] = ()

    def show(self, lines: Sequence[Line]) -> None:
        before, self._lines = self._lines, lines
        if len(before) != len(lines):
            self.virtual_size = Size(self.size.width, len(lines))
        for y in range(self.scroll_offset.y, self.scroll_offset.y + self.size.height):
            old, new = (lines[y] if y < len(lines) else EMPTY for lines in (before, self._lines))
            if old != new and (changed := changed_columns(old, new)):
                start, end = changed
                self.refresh(Region(start, y - self.scroll_offset.y, end - start, 1))

    def render_line(self, y: int) -> Strip:
        index = y + self.scroll_offset.y
        line = self._lines[index] if index < len(self._lines) else EMPTY
        plain = self.has_class("plain")
        pieces = [Segment(to_ascii(text) if plain else text, RICH_STYLES[style]) for text, style in line]
        return Strip(pieces).adjust_cell_length(self.size.width, RICH_STYLES[""])


class WatchApp(App[None]):
    """`paceline watch` on a terminal."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { layout: vertical; background: ansi_default; }
    #head { height: 3; overflow: hidden hidden; }
    #page { height: 1fr; }
    #find { height: 1; border: none; padding: 0 1; display: none; background: ansi_default; }
    #find:focus { border: none; }
    #keys { height: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *((str(i), f"page('{name}')") for i, name in enumerate(PAGES, 1)),
        Binding("tab", "turn(1)", priority=True),
        Binding("shift+tab", "turn(-1)", priority=True),
        ("question_mark,h", f"page('{HELP_PAGE}')"),
        ("q", "quit"),
        Binding("ctrl+c", "quit", priority=True),
        ("ctrl+z", "suspend_process"),
        ("ctrl+l", "repaint"),
        Binding("escape", "escape", priority=True),
        ("space", "hold"),
        ("r", "read"),
        Binding("left", "neighbour(-1)", priority=True),
        Binding("right", "neighbour(1)", priority=True),
        ("z", "zoom"),
        ("y", "log_scale"),
        ("s", "smooth"),
        ("left_square_bracket", "point(-1)"),
        ("right_square_bracket", "point(1)"),
        ("o", "page('runs')"),
        Binding("down,j", "choose_run(1)", priority=True),
        Binding("up,k", "choose_run(-1)", priority=True),
        Binding("pagedown", "choose_run(10)", priority=True),
        Binding("pageup", "choose_run(-10)", priority=True),
        Binding("enter", "open_run", priority=True),
        ("m", "compare"),
        ("a", "attempt"),
        ("w", "wrap"),
        ("c", "copy_fix"),
        Binding("slash", "find", priority=True),  # the next key may be there already
        ("j,down", "scroll(1)"),
        ("k,up", "scroll(-1)"),
    ]

    def __init__(
        self,
        reader: Reader,
        *,
        interval_s: float,
        ascii_only: bool = False,
        clock: Callable[[], float] = time.time,
        run_list: RunList | None = None,
        page: str = PAGES[0],
    ) -> None:
        """run_list: the runs that can be opened."""
        super().__init__(ansi_color=True)  # before the theme: what NO_COLOR does is settled here
        self.theme = "ansi-dark"  # the terminal's own background
        self.animation_level = "none"
        self.reader, self.interval_s, self.clock = reader, interval_s, clock
        self.page = page
        self.run_list, self.run_choice = run_list, RunChoice()
        self.other: Reader | None = None  # of the run that is compared
        self.snapshot: Snapshot | None = None
        self.error: str | None = None  # why the last reading failed
        self.now = clock()
        self.held = self.copied = self._reading = False
        self.curve_choice, self.log_choice = CurveChoice(), LogChoice()
        self.log_text = NO_LOG
        look = "plain" if ascii_only else ""
        self.head, self.body = LineView(id="head", classes=look), LineView(id="page", classes=look)
        self.query_line = Input(placeholder="find in this log", id="find", compact=True)
        self.query_line.cursor_blink = False
        self.key_bar, self.keys = LineView(id="keys", classes=look), list[Key]()
        self.head.can_focus = self.key_bar.can_focus = False

    def compose(self) -> ComposeResult:
        yield from (self.head, self.body, self.query_line, self.key_bar)

    def on_mount(self) -> None:
        # SIGHUP is not handled: the terminal that an orderly exit would write to is gone
        with suppress(NotImplementedError, RuntimeError, ValueError):  # tests run it outside the main thread
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.exit)
        self.app_resume_signal.subscribe(self, lambda _: self.action_repaint())
        self.body.focus()
        self.set_interval(self.interval_s, self.action_read)
        self.action_read()
        self.draw()

    @work
    async def action_read(self) -> None:
        """Reads in a thread, unless one is still reading. A search is not repeated, because the log may be large."""
        if self._reading:
            return
        self._reading, reader = True, self.reader
        choice = self.log_choice if self.page in LOG_PAGES and not self.log_choice.query else None
        snapshot, text, message = self.snapshot, None, None
        try:
            snapshot = await asyncio.to_thread(reader.update)
            if self.run_list:
                runs = await asyncio.to_thread(self.run_list.read)
                self.run_choice = replace(self.run_choice, runs=runs)
            if self.page == "compare" and (other := self.other):
                self.run_choice = replace(self.run_choice, other=await asyncio.to_thread(other.update))
        except PacelineError as error:
            message = error.message
            if self.snapshot is None:  # nothing was ever shown
                self.exit(return_code=error.exit_code, message=str(error))
        if snapshot and choice:
            text = await asyncio.to_thread(read_log, snapshot, choice)
        self._reading = False
        if reader is self.reader:
            self.show_snapshot(snapshot, text, error=message)
        else:  # another run was opened meanwhile
            self.action_read()

    def show_snapshot(self, snapshot: Snapshot | None, text: LogText | None, *, error: str | None) -> None:
        """Shows what was read, unless the screen is held; the log's text only if no other log was chosen meanwhile."""
        if not self.held:
            self.snapshot, self.error, self.now = snapshot, error, self.clock()
            self.log_text = text if text and text.choice == self.log_choice else self.log_text
            self.draw()

    def choose_log(self, choice: LogChoice) -> None:
        """Chooses a log, or a text to find in it, and reads it at once, even when the screen is held."""
        self.log_choice = choice
        self.read_chosen_log()

    @work(group="log", exclusive=True)
    async def read_chosen_log(self) -> None:
        if self.snapshot is not None:
            text = await asyncio.to_thread(read_log, self.snapshot, self.log_choice)
            if text.choice == self.log_choice:
                self.log_text = text
                self.draw()
                if self.page == "log":
                    self.body.scroll_end(animate=False, x_axis=False)

    def draw(self) -> None:
        width, body, snapshot, runs = self.size.width, self.body, self.snapshot, self.run_choice
        if snapshot is None:
            self.head.show([EMPTY, fit(((f"  {self.error or 'reading ...'}", "faint"),), width)])
        else:
            lines = header(snapshot, now=self.now, width=width, error=self.error)
            lines += [log_heading(self.log_text, width=width)] if self.page == "log" else []
            self.head.styles.height = len(lines)
            self.head.show(lines)
            height = max(0, self.size.height - len(lines) - 1)
            follows = self.page in TAIL_PAGES and body.scroll_offset.y >= body.max_scroll_y
            show = partial(page_lines, self.page, snapshot, now=self.now, width=width, height=height)
            body.show(show(choice=self.curve_choice, log=self.log_text, wrapped=self.log_choice.wrapped, runs=runs))
            if follows:
                body.scroll_end(animate=False, immediate=True, x_axis=False)
        keys = partial(page_keys, self.page, width=width, held=self.held, copied=self.copied)
        self.keys = keys(snapshot=snapshot, active=runs.active(snapshot))
        self.key_bar.show([key_line(self.keys)])

    def on_resize(self) -> None:
        self.call_after_refresh(self.draw)

    async def on_click(self, event: events.Click) -> None:
        """The keys on the last line can also be clicked."""
        start = 1
        for key in self.keys if event.widget is self.key_bar else ():
            end = start + width_of(key.line)
            if start <= event.x < end - 2:  # not the gap after it
                await self.run_action(key.action)
            start = end

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """While a text is typed, its keys are no actions; those of the list of runs are none on other pages."""
        if action in ("choose_run", "open_run", "compare") and self.page != "runs":
            return False
        return action in ("quit", "escape") or self.focused is not self.query_line

    def action_page(self, name: str) -> None:
        self.page = PAGES[0] if name == self.page == HELP_PAGE else name
        self.copied = False
        self.body.scroll_to(y=0, animate=False, immediate=True)
        self.draw()
        if self.page == "log":
            self.choose_log(self.log_choice)
        elif self.log_choice.query:  # a search ends with its page
            self.choose_log(replace(self.log_choice, query=""))
        if self.page in TAIL_PAGES:
            self.body.scroll_end(animate=False, x_axis=False)
        if self.page in ("runs", "compare"):
            self.action_read()
        if self.page == "runs":
            self.action_choose_run(0)  # scrolls to it

    def action_choose_run(self, by: int) -> None:
        chosen = max(0, min(len(self.run_choice.runs) - 1, self.run_choice.chosen + by))
        self.run_choice = replace(self.run_choice, chosen=chosen)
        self.draw()
        lowest = chosen + NUM_HEADINGS - self.body.size.height + 1
        self.body.scroll_to(y=min(max(self.body.scroll_offset.y, lowest), chosen), animate=False, immediate=True)

    def chosen_reader(self) -> Reader | None:
        """Opens the chosen run; None where there is none, or no longer."""
        try:
            return open_reader(self.run_choice.path) if self.run_choice.runs else None
        except PacelineError as error:
            self.error = error.message
            self.draw()
            return None

    def action_open_run(self) -> None:
        if reader := self.chosen_reader():
            self.reader, self.snapshot, self.log_text = reader, None, NO_LOG
            self.curve_choice, self.log_choice = CurveChoice(), LogChoice()
            self.action_page(PAGES[0])
            self.action_read()

    def action_compare(self) -> None:
        if self.snapshot and (reader := self.chosen_reader()):
            settings = differing_settings(Path(self.snapshot.path), self.run_choice.path)
            self.other, self.run_choice = reader, replace(self.run_choice, other=None, settings=settings)
            self.action_page("compare")

    def action_turn(self, by: int) -> None:
        index = PAGES.index(self.page) if self.page in PAGES else 0
        self.action_page(PAGES[(index + by) % len(PAGES)])

    def action_neighbour(self, by: int) -> None:
        """Shows the next curve, or the next rank's log."""
        if self.snapshot is None:
            return
        if self.page == "curves" and (names := all_curve_names(self.snapshot)):
            index = names.index(self.curve_choice.curve) if self.curve_choice.curve in names else 0
            self.choose_curve(curve=names[(index + by) % len(names)])
        elif self.page == "log":
            self.choose_log(neighbour_log(self.snapshot, self.log_choice, ranks=by))

    def choose_curve(self, **choice: Any) -> None:
        self.curve_choice = replace(self.curve_choice, **choice)
        self.draw()

    def action_zoom(self) -> None:
        self.choose_curve(part=ZOOMS[(ZOOMS.index(self.curve_choice.part) + 1) % len(ZOOMS)])

    def action_smooth(self) -> None:
        self.choose_curve(smooth=not self.curve_choice.smooth)

    def action_point(self, by: int) -> None:
        """Moves the point at which the curve is read, from its end on."""
        point = 1.0 if self.curve_choice.point is None else self.curve_choice.point
        self.choose_curve(point=min(1.0, max(0.0, point + by / POINTS)))

    def action_log_scale(self) -> None:
        self.choose_curve(log_scale=not self.curve_choice.log_scale)

    def action_attempt(self) -> None:
        if self.page == "log" and self.snapshot:
            self.choose_log(neighbour_log(self.snapshot, self.log_choice, attempts=-1))

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
        self.choose_log(replace(self.log_choice, query=event.value))

    def show_find(self, visible: bool) -> None:
        self.query_line.display, self.key_bar.display = visible, not visible
        self.set_focus(self.query_line if visible else self.body)

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        """A click elsewhere ends the typing of a text, as Esc does; the terminal's own loss of focus does not."""
        if self.query_line.display and event.widget is not self.query_line:
            self.show_find(False)

    def action_escape(self) -> None:
        """Ends typing, then the search; else returns to the overview."""
        if self.focused is self.query_line:
            self.show_find(False)
        elif self.page == "log" and self.log_choice.query:
            self.choose_log(replace(self.log_choice, query=""))
        else:
            self.action_page("runs" if self.page == "compare" else PAGES[0])

    def action_hold(self) -> None:
        self.held = not self.held
        self.draw()
        if not self.held:
            self.action_read()

    def action_copy_fix(self) -> None:
        explanation = self.snapshot.explanation if self.snapshot else None
        if explanation and explanation.get("fix"):
            self.copy_to_clipboard(str(explanation["fix"]))
            self.copied = True
            self.draw()

    def action_scroll(self, by: int) -> None:
        if self.page == "curves":
            self.action_neighbour(by)
        else:
            self.body.scroll_relative(y=by, animate=False)

    def action_repaint(self) -> None:
        """Repaints the screen, after Ctrl-Z and fg, or when another program has written on the terminal."""
        for widget in (self.head, self.body, self.key_bar):
            widget.refresh()
