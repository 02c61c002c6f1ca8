"""The terminal view itself: every key, live changes, few repaints."""

import asyncio
import os
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from run_folders import append_step, utc, write_run
from snapshots import NOW, STATES, failed, recovered, training, two_hosts
from textual.events import AppBlur, AppFocus

from paceline.errors import PacelineError
from paceline.rundir import append_json_line, lock_run
from paceline.watch.snapshot import LogView, Snapshot
from paceline.watch.status import RunList, open_reader
from paceline.watch.terminal.app import LineView, WatchApp
from paceline.watch.terminal.line import PAGES

LOG = "".join(f"step {step:04d} loss {4 - step / 1000:.3f}\n" for step in range(1, 901))
MOST_S = 60.0  # for what takes a second


class Told:
    """A reader of what a test says next."""

    def __init__(self, snapshot: Snapshot):
        self.snapshot, self.error, self.reads = snapshot, "", 0

    def update(self) -> Snapshot:
        self.reads += 1
        if self.error:
            raise PacelineError(self.error, fix="wait")
        return self.snapshot


def seen(app: WatchApp) -> str:
    """The text on the screen."""
    parts = app.query(LineView)
    return "\n".join(
        "".join(piece.text for piece in part.render_line(y)) for part in parts for y in range(part.size.height)
    )


async def settle(app: WatchApp, pilot) -> None:
    await app.workers.wait_for_complete()
    await pilot.pause()


def watched(
    snapshots: Told, script: Callable[[WatchApp, object], Awaitable[None]], size: tuple[int, int] = (80, 24)
) -> None:
    async def run() -> None:
        app = WatchApp(snapshots, interval_s=3600, clock=lambda: NOW)
        async with app.run_test(size=size) as pilot:
            await settle(app, pilot)

            async def press(*keys: str) -> str:
                await pilot.press(*keys)
                await settle(app, pilot)
                return seen(app)

            app.press, app.pilot = press, pilot
            await script(app, pilot)

    asyncio.run(asyncio.wait_for(run(), MOST_S))


@pytest.fixture
def logs(tmp_path):
    """A run with two attempts of two ranks each, and their logs."""
    hits = []
    for attempt in (1, 2):
        for rank in (0, 1):
            path = tmp_path / f"{attempt}-{rank}.log"
            path.write_text(
                f"here is rank {rank} of attempt {attempt}\n{LOG}RuntimeError: [rank {rank}] \x1b[31mboom\x1b[0m\n"
            )
            hits.append(LogView(attempt, rank, str(path), path.stat().st_size))
    return replace(recovered(), logs=hits)


def test_every_state_is_shown_and_every_page_of_it():
    async def script(app, pilot):
        for make in STATES.values():
            app.show_snapshot(make(NOW), None, error=None)
            for number, page in enumerate(PAGES):
                app.action_page(page)
                assert f"{number + 1} {page}" in seen(app).splitlines()[-1]
        for number, page in enumerate(PAGES):
            await pilot.press(str(number + 1))
            assert app.page == page

    watched(Told(training()), script)


def test_tab_and_shift_tab_cycle_through_the_pages_and_escape_returns():
    async def script(app, pilot):
        await app.press("tab", "tab")
        assert app.page == "machines"
        await app.press("shift+tab", "shift+tab", "shift+tab")
        assert app.page == "why"
        await app.press("escape")
        assert app.page == "overview"

    watched(Told(training()), script)


def test_keys_choose_zoom_and_scale_the_curves():
    async def script(app, pilot):
        assert "── loss" in (await app.press("2"))
        assert "── val_bpb" in (await app.press("right"))
        assert "── loss" in (await app.press("up"))
        assert "── val_bpb" in (await app.press("down"))
        assert "── loss" in (await app.press("left"))
        assert "── val_bpb" in (await app.press("j"))
        assert "── loss" in (await app.press("k"))
        assert "last 50 % of the steps" in (await app.press("z"))
        assert "last 10 % of the steps, logarithmic" in (await app.press("z", "y"))
        screen = await app.press("z", "y")
        assert "── all steps ──" in screen and "logarithmic" not in screen

    watched(Told(training()), script)


def test_the_log_of_any_rank_and_attempt_opens_at_its_end(logs):
    async def script(app, pilot):
        screen = await app.press("5")
        assert "log of rank 0" in screen and "attempt 2" in screen
        assert "RuntimeError: [rank 0] boom" in screen
        assert "log of rank 1" in (await app.press("right"))
        assert "log of rank 0" in (await app.press("left"))
        assert "log of rank 1" in (await app.press("left"))  # round
        screen = await app.press("a")
        assert "attempt 1" in screen and "[rank 1] boom" in screen
        assert "here is rank 1 of attempt 1" in (await app.press("g"))
        assert "here is" not in (await app.press("G"))

    watched(Told(logs), script)


@pytest.mark.parametrize(
    ("first", "keys", "moved"),
    [
        ("home", "down j j", 3),
        ("g", "down down up k j", 1),
        ("home", "pagedown", 18),
        ("home", "pagedown pagedown pageup", 18),
        ("end", "k up", -2),
        ("G", "pageup", -18),
        ("end", "pageup home", None),
    ],
)
def test_keys_that_scroll(logs, first, keys, moved):
    async def script(app, pilot):
        page = app.query_one("#page", LineView)
        await app.press("5", first)
        start = page.scroll_offset.y
        assert start == (0 if first in ("home", "g") else page.max_scroll_y) and page.size.height == 18
        await app.press(*keys.split())
        assert page.scroll_offset.y == (0 if moved is None else start + moved)

    watched(Told(logs), script)


def test_the_log_follows_new_lines_unless_it_is_scrolled_up(logs):
    async def script(app, pilot):
        path = logs.logs[2].path
        await app.press("5")
        with open(path, "a") as file:
            file.write("one line more\n")
        assert "one line more" in (await app.press("r"))
        await app.press("up", "up", "up")
        with open(path, "a") as file:
            file.write("and another\n")
        assert "and another" not in (await app.press("r"))

    watched(Told(logs), script)


def test_a_text_is_found_in_the_whole_log_and_escape_returns_to_its_end(logs):
    async def script(app, pilot):
        await app.press("5", "slash", *"STEP", "space", *"012q")
        screen = await app.press("backspace", "enter")
        assert "10 lines with STEP 012" in screen and "121  step 0120" in screen
        assert "step 0500" not in screen
        assert "[rank 0] boom" in (await app.press("escape"))
        await app.press("slash", *"zz")
        assert "no such line" in (await app.press("enter"))
        await app.press("1")
        assert "[rank 0] boom" in (await app.press("5"))
        await app.press("slash", "x")
        await app.press("escape")
        assert not app.query_one("#find").display and app.page == "log"

    watched(Told(logs), script)


def test_a_click_into_the_log_ends_typing_and_another_window_does_not(logs):
    async def script(app, pilot):
        await app.press("5", "slash", *"boo")
        app.post_message(AppBlur())
        await settle(app, pilot)
        app.post_message(AppFocus())
        await app.press("m")
        find = app.query_one("#find")
        assert (find.value, find.display, app.focused) == ("boom", True, find)
        await pilot.click("#page", offset=(5, 5))
        await settle(app, pilot)
        assert not find.display and "5 log" in seen(app).splitlines()[-1]
        assert app.key_bar.display and app.page == "log"
        assert "here is rank 0" in (await app.press("g"))

    watched(Told(logs), script)


def test_events_open_at_the_last_one_and_stay_there():
    many = replace(training(), events=[replace(training().events[0], text=f"event {i}") for i in range(100)])
    snapshots = Told(many)

    async def script(app, pilot):
        assert "event 99 " in (await app.press("4"))
        snapshots.snapshot = replace(many, events=[*many.events, replace(many.events[0], text="and one more")])
        assert "and one more" in (await app.press("r"))
        assert "event 0 " in (await app.press("g"))

    watched(snapshots, script)


def test_a_long_line_is_cut_or_shown_whole(logs, tmp_path):
    path = tmp_path / "long.log"
    path.write_text("word " * 60 + "end\n")
    snapshot = replace(logs, logs=[LogView(1, 0, str(path), 400)])

    async def script(app, pilot):
        assert "…" in (await app.press("5"))
        assert "end" in (await app.press("w"))

    watched(Told(snapshot), script)


def test_a_held_screen_stays_until_it_continues():
    snapshots = Told(training())

    async def script(app, pilot):
        assert "space continue" in (await app.press("space"))
        snapshots.snapshot = failed()
        assert "● training" in (await app.press("r"))
        assert "✗ failed" in (await app.press("space"))

    watched(snapshots, script)


def test_the_explanation_is_shown_and_its_fix_can_be_copied():
    async def script(app, pilot):
        assert "97 % sure" in (await app.press("6"))
        assert "c copied" in (await app.press("c"))
        assert app.clipboard == "paceline resume books --device-batch-size 16"

    watched(Told(failed()), script)


@pytest.mark.parametrize("key", ["question_mark", "h"])
def test_help_shows_all_keys_and_closes_with_the_same_key(key):
    async def script(app, pilot):
        assert "Shift+Tab" in (await app.press(key))
        assert app.page == "help"
        await app.press(key)
        assert app.page == "overview"

    watched(Told(training()), script)


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
def test_q_and_ctrl_c_quit_even_while_a_text_is_typed(key):
    async def script(app, pilot):
        await app.press("5", *(["slash"] if key == "ctrl+c" else []))
        await pilot.press(key)
        await pilot.pause()
        assert app._exit

    watched(Told(training()), script)


def test_keys_can_be_clicked():
    async def script(app, pilot):
        at = seen(app).splitlines()[-1].index("3 machines")
        for gap in (0, at - 1, at - 2):
            await pilot.click("#keys", offset=(gap, 0))
            assert app.page == "overview"
        await pilot.click("#keys", offset=(at, 0))
        assert app.page == "machines"

    watched(Told(training()), script)


def test_a_click_on_the_header_takes_no_key_from_the_page():
    async def script(app, pilot):
        await app.press("question_mark")
        await pilot.resize_terminal(80, 12)
        await app.press("G")
        assert app.body.scroll_offset.y > 0
        await pilot.click("#head")
        await app.press("g")
        assert app.body.scroll_offset.y == 0

    watched(Told(training()), script)


def test_a_failed_reading_is_reported_and_the_last_screen_stays():
    snapshots = Told(training())

    async def script(app, pilot):
        snapshots.error = "runs/books is gone"
        screen = await app.press("r")
        assert "! runs/books is gone" in screen and "1,240/2,500" in screen
        snapshots.error = ""
        assert "● training" in (await app.press("r"))

    watched(snapshots, script)


def test_only_changed_columns_are_repainted():
    snapshots = Told(training())

    async def script(app, pilot):
        painted = []
        for part in app.query(LineView):
            part.refresh = lambda *regions, **_: painted.extend(regions)
        app.show_snapshot(training(), None, error=None)
        assert painted == []
        app.show_snapshot(replace(training(), tok_per_sec=1.0), None, error=None)
        assert [(region.y, region.height) for region in painted] == [(2, 1)]
        assert painted[0].x > 30

    watched(snapshots, script)


def test_a_new_size_is_filled_at_once():
    async def script(app, pilot):
        await pilot.resize_terminal(200, 60)
        await settle(app, pilot)
        screen = seen(app).splitlines()
        assert len(screen) == 60 and {len(line) for line in screen} == {200}
        await pilot.resize_terminal(30, 8)
        await settle(app, pilot)
        assert len(seen(app).splitlines()) == 8

    watched(Told(two_hosts()), script)


def test_a_curve_can_be_smoothed_and_read_at_a_point():
    async def script(app, pilot):
        assert "last 50 % of the steps, smoothed" in (await app.press("2", "z", "s"))
        screen = await app.press("left_square_bracket", "left_square_bracket")
        assert re.search(r"step 1,2[01]\d: 2\.[89]\d+ +last 2\.9216", screen) and "┊" in screen
        assert "step 1,240: " in (await app.press("right_square_bracket", "right_square_bracket"))

    watched(Told(training()), script)


@pytest.fixture
def many_runs(tmp_path):
    """120 runs, the latest first; the deeper ones have a lower loss."""
    for number in range(120):
        run = write_run(tmp_path, f"run-{number:03d}", steps=3, end=None, depth=4 + number % 2)
        append_step(run, 200, loss=3 - number % 2, val_bpb=1.25)
        append_json_line(run.events, {"time": utc(1000 + number), "event": "finished", "step": 200})
    return tmp_path


def test_a_run_is_chosen_among_many_opened_and_compared_with_the_one_that_is_open(many_runs):
    async def run():
        reader = open_reader(many_runs / "run-119")
        app = WatchApp(reader, interval_s=3600, clock=lambda: NOW, run_list=RunList(many_runs))
        async with app.run_test(size=(80, 24)) as pilot:

            async def press(*keys):
                await pilot.press(*keys)
                await settle(app, pilot)
                return seen(app)

            await settle(app, pilot)
            screen = await press("o")
            assert "── runs: 120" in screen and "*> run-119" in screen and "3.0000  1.2500" in screen
            assert "*  run-119" in (await press("down")) and " > run-118" in seen(app)
            screen = await press(*["pagedown"] * 11, "down", "up")
            assert " > run-008" in screen and "run-119" not in screen.split("\n", 4)[4]
            screen = await press("m")
            assert "━━ run-119   ╌╌ run-008" in screen and "2.0000 3.0000" in screen
            assert "── loss, nats per token ──" in screen and re.search(r"\n +step +1 .* 200 *\n", screen)
            assert re.search(r"── settings .*\n setting +run-119 +run-008 .*\n depth +5 +4 ", await press("end"))
            assert " > run-008" in (await press("escape"))
            assert seen(app).startswith(" run-119") and (await press("enter")).startswith(" run-008")
            assert app.page == "overview"

    asyncio.run(asyncio.wait_for(run(), MOST_S))


def test_the_last_line_names_the_run_that_goes_on_beside_the_one_that_is_shown(tmp_path):
    write_run(tmp_path, "sweep-1", steps=3)
    following = write_run(tmp_path, "sweep-2", steps=3, end=None)

    async def run():
        runs = RunList(tmp_path)
        app = WatchApp(open_reader(tmp_path / "sweep-1"), interval_s=3600, clock=lambda: NOW, run_list=runs)
        async with app.run_test(size=(80, 24)) as pilot:
            await settle(app, pilot)
            assert "o sweep" not in seen(app)
            lock = lock_run(following)
            app.action_read()
            await settle(app, pilot)
            assert "o sweep-2 is running" in seen(app).splitlines()[-1]
            await pilot.press("o")
            await settle(app, pilot)
            assert "o sweep-2" not in seen(app) and "sweep-2" in seen(app)
            os.close(lock)

    asyncio.run(asyncio.wait_for(run(), MOST_S))


def test_the_keys_of_the_list_of_runs_scroll_other_pages_as_before(many_runs):
    async def script(app, pilot):
        page = app.query_one("#page", LineView)
        await app.press("o")
        assert "no runs here" in seen(app)
        await app.press("down", "enter", "m", "question_mark")
        await pilot.resize_terminal(80, 12)
        await app.press("down", "down")
        assert page.scroll_offset.y == 2

    watched(Told(training()), script)
