"""The page in a real browser: every state draws, it lives, compares, explains, fits a phone, obeys keys, and stays on loopback.

Pictures of the pages lie in build/screenshots after the tests of the soak tier, for a look.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from browser_pages import EVIL, PHONE, SOON_MS, go, overflow, picture
from run_folders import FOLDER, append_step, serving, write_run
from snapshots import NOW, STATES, two_hosts

from paceline.rundir import RunDir
from paceline.watch.report import html_report
from paceline.watch.status import Shelf

pytestmark = pytest.mark.dist

POINTS = "app.page.run.curves.series.loss.steps.length"


def check_two_hosts(page: Any) -> None:
    """Its curves, ranks, devices, events and log."""
    page.wait_for_selector(".log div")
    assert page.locator(".chart[data-field=loss] canvas.cover").count() == 1
    assert page.evaluate("app.page.run.curves.series.loss.steps") == two_hosts(NOW).series["loss"].steps
    slow = page.locator(".heat-values div", has_text="slow")
    assert slow.inner_text().split() == ["761", "ms", "▲", "slow"]
    summary = page.inner_text(".summary")
    assert "Rank 5 on node-1 is slower than the others; GPU 1 of node-1 is throttled: thermal" in summary
    assert page.locator(".gpu").count() == 8


def check_failed(page: Any) -> None:
    """Its explanation comes first."""
    assert page.inner_text(".cause b") == "cuda-oom"
    assert page.inner_text(".fix code") == "paceline resume books --device-batch-size 16"
    assert page.locator(".evidence").first.inner_text().count("OutOfMemoryError") == 1
    assert page.evaluate(
        "document.querySelector('#why').getBoundingClientRect().top < document.querySelector('.tiles').getBoundingClientRect().top"
    )


def check_hostile(page: Any) -> None:
    """Markup in names, events, samples and logs is shown as text."""
    page.wait_for_selector(".log div.error")
    assert EVIL in page.inner_text(".log") and "\x1b" not in page.inner_text(".log")
    assert EVIL in page.text_content("#samples pre")
    assert page.locator("main img, main script, .log b").count() == 0


CHECKS = {"two_hosts": check_two_hosts, "failed": check_failed, "hostile": check_hostile}


def test_every_state_is_drawn_in_both_themes_with_what_it_has_to_show_and_nothing_goes_wrong(page, port):
    go(page, port)
    for name, state in STATES.items():
        page.evaluate("name => { location.hash = `#/run/${name}`; }", name)
        page.wait_for_function("name => app.page.run?.head.name === name", arg=name)
        assert page.text_content("h1 .badge")[1:] == state(NOW).state
        page.keyboard.press("t")
        assert overflow(page) == 0, name
        if name in CHECKS:
            CHECKS[name](page)


@pytest.mark.soak
def test_the_token_does_not_stay_in_the_address_and_a_reload_still_works(page, port):
    go(page, port, "/run/training")
    assert page.url == f"http://127.0.0.1:{port}{FOLDER}#/run/training"
    page.reload()
    page.wait_for_selector("main:not(.waiting) h1")


@pytest.mark.soak
def test_open_tells_the_token_to_the_browser_alone(page, tmp_path):
    """A browser of the terminal returns only when it is left; the list of processes shows its words to every user."""
    write_run(tmp_path / "runs", "a")
    said, left, browser = tmp_path / "said", tmp_path / "left", tmp_path / "browser"
    browser.write_text(
        f'#!/bin/sh\necho "$@" > {said}.part\nmv {said}.part {said}\nuntil [ -e {left} ]; do sleep 0.1; done\n'
    )
    browser.chmod(0o700)
    command = [sys.executable, "-m", "paceline.cli", "watch", "a", "--web", "--open", "--port", "0"]
    env = {**os.environ, "BROWSER": str(browser), "HOME": str(tmp_path)}
    process = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not said.exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        words = said.read_text().strip()
        file = Path(words.removeprefix("file://"))
        assert words.startswith(f"file://{tmp_path}/paceline-") and file.stat().st_mode & 0o777 == 0o600
        page.goto(words)
        page.wait_for_selector("main:not(.waiting) h1 .badge")
        assert page.url.endswith("/#/run/a")
        page.reload()
        page.wait_for_selector("main:not(.waiting) h1 .badge")
        page.goto("about:blank")
    finally:
        left.touch()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    assert not file.exists()


@pytest.mark.soak
def test_the_straggler_is_orange_in_the_map_and_the_others_are_not(page, port):
    go(page, port, "/run/two_hosts")
    pixels = page.evaluate("""() => {
        const canvas = document.querySelector('#ranks canvas');
        const column = canvas.getContext('2d').getImageData(canvas.width - 4, 0, 1, canvas.height).data;
        const colour = (row) => [...column.slice(4 * Math.round((row + 0.5) * canvas.height / 8)).slice(0, 4)];
        return [colour(5), colour(4)];
    }""")
    (red, _, blue, _), other = pixels
    assert red > blue + 100 and max(other[:3]) - min(other[:3]) < 16


def test_the_list_fits_a_narrow_window_and_leads_to_runs_and_to_a_comparison_of_those_chosen(page, port):
    page.set_viewport_size({"width": 820, "height": 900})
    go(page, port)
    widths = page.evaluate(
        "[...document.querySelectorAll('.scroll')].map((node) => node.scrollWidth - node.clientWidth)"
    )
    assert widths == [0]
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press(" ")
    page.check("input[data-run=finished]")
    assert page.inner_text("button.main") == "Compare 2 runs"
    page.keyboard.press("c")
    page.wait_for_selector("#differences td")
    assert page.url.endswith("#/compare/training/finished")
    assert page.locator("#differences tbody tr").inner_text().split() == ["matrix_lr", "0.1", "0.05"]
    page.wait_for_function("() => document.querySelectorAll('.chart[data-field=loss] .chart-now span').length === 2")
    for axis in ("tokens", "hours", "clock"):
        page.keyboard.press("x")
        assert page.inner_text(".segments [aria-pressed=true]") == axis
    page.set_viewport_size({"width": 1000, "height": 900})
    page.evaluate("location.hash = '#/run/training'")
    page.wait_for_function("() => app.page.run?.head.name === 'training'")
    heights = "[...document.querySelectorAll('.charts:not(.dense) .paper')].map((node) => node.offsetHeight)"
    assert page.evaluate(heights) == [240, 240, 170, 170, 170, 170, 170]  # the charts of a row have one height
    page.click(".chart .name:text-is('val_bpb')")  # over the whole width
    page.wait_for_function(f"() => {heights}.join() === '170,420,170,170,170,170,170'")
    page.evaluate("location.hash = ''")
    page.wait_for_selector(".runs .sort")
    assert page.locator(".runs .sort:visible").all_inner_texts()[-1] == "last activity ↓"
    page.set_viewport_size({"width": 820, "height": 900})
    page.click(".runs .narrow:text-is('last activity ↓')")
    assert page.locator(".runs .sort:visible").all_inner_texts()[:3] == ["run", "state", "last activity ↑"]


@pytest.mark.soak
def test_five_runs_are_compared_and_seventeen_are_not(page, tmp_path):
    for number in range(17):
        write_run(tmp_path, f"r{number}", matrix_lr=0.01 * number, steps=100 if number < 5 else 2)
    with serving(Shelf(tmp_path)) as port:
        go(page, port)
        for number in range(17):
            page.check(f"input[data-run=r{number}]")
        assert (page.inner_text("button.main"), page.is_disabled("button.main")) == ("Compare: 16 at most", True)
        for number in range(5, 17):
            page.uncheck(f"input[data-run=r{number}]")
        page.click("button.main")
        page.wait_for_selector("#differences td")
        assert page.inner_text("h1") == "5 runs compared"
        page.wait_for_function("() => app.page.runs.every(({ run }) => run.curves.series.loss?.steps.length === 100)")
        page.wait_for_function(
            "() => document.querySelectorAll('.chart[data-field=loss] .chart-now span').length === 5"
        )
        row = page.locator("#differences tbody tr", has_text="matrix_lr")
        assert row.inner_text().split() == ["matrix_lr", "0", "0.01", "0.02", "0.03", "0.04"]


@pytest.mark.soak
def test_the_place_in_the_list_stays_while_a_run_in_it_goes_on(page, tmp_path):
    for name in ("a", "b"):
        write_run(tmp_path, name)
    run = write_run(tmp_path, "c", end=None)
    focused = "() => document.activeElement.tagName + ' ' + document.activeElement.dataset.run"
    with serving(Shelf(tmp_path)) as port:
        go(page, port)
        first, second, third = page.evaluate("app.page.runs.map(({ name }) => name)")
        page.keyboard.press("j")
        page.keyboard.press("j")
        assert page.evaluate(focused) == f"A {second}"
        append_step(run, 150, loss=1.0)
        page.wait_for_function("() => app.page.runs.some(({ step }) => step === 150)")
        assert page.evaluate(focused) == f"A {second}"
        page.keyboard.press("j")
        page.keyboard.press(" ")
        assert page.evaluate("[...app.page.chosen]") == [third]
        page.focus(f"input[data-run={first}]")
        append_step(run, 151, loss=1.0)
        page.wait_for_function("() => app.page.runs.some(({ step }) => step === 151)")
        assert page.evaluate(focused) == f"INPUT {first}"


@pytest.mark.soak
def test_keys_move_zoom_and_smooth_the_curves_and_a_drag_zooms(page, port):
    go(page, port, "/run/training")
    shown = "app.page.board.view.range"
    paper = page.locator(".chart[data-field=loss] .cover").bounding_box()
    page.mouse.move(paper["x"] + 100, paper["y"] + 50)
    page.mouse.down()
    page.mouse.move(paper["x"] + 300, paper["y"] + 50, steps=4)
    page.mouse.up()
    begin, end = page.evaluate(shown)
    assert 0 < begin < end < 1240
    page.keyboard.press("-")
    page.keyboard.press("r")
    assert page.evaluate(shown) is None
    page.keyboard.press("+")
    page.keyboard.press("s")
    page.keyboard.press("l")
    assert page.evaluate("[app.page.board.view.weight, app.page.board.view.log]") == [0.6, True]
    page.keyboard.press("?")
    assert page.is_visible("dialog kbd")
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    page.keyboard.type("loss x")
    page.wait_for_selector(".log mark:text-is('loss x')")


@pytest.mark.soak
def test_pictures_of_the_pages_are_taken_for_a_look(page, port):
    pages = {
        "runs": "/",
        "two-hosts": "/run/two_hosts",
        "failed": "/run/failed",
        "compare": "/compare/training/finished",
    }
    for name, where in pages.items():
        go(page, port, where)
        picture(page, name)


@pytest.mark.soak
def test_a_phone_sees_all_without_a_sideways_scroll(page, port):
    page.set_viewport_size(PHONE)
    for where in ("/", "/run/failed", "/run/two_hosts", "/compare/training/finished"):
        go(page, port, where)
        assert overflow(page) == 0, where
    picture(page, "phone-compare")
    go(page, port, "/run/two_hosts")
    picture(page, "phone")


@pytest.mark.soak
def test_a_long_name_of_a_run_hides_no_column_and_no_state(page, tmp_path):
    write_run(tmp_path, "very-long-name-" * 12)
    with serving(Shelf(tmp_path)) as port:
        for size in ({"width": 1280, "height": 800}, PHONE):
            page.set_viewport_size(size)
            go(page, port)
            body, name, state = (page.locator(css).bounding_box() for css in (".scroll", ".runs th a", ".runs .badge"))
            assert name["x"] + name["width"] <= state["x"]
            assert state["x"] + state["width"] <= body["x"] + body["width"]
            assert page.evaluate(
                "document.querySelector('.scroll').scrollWidth <= document.querySelector('.scroll').clientWidth"
            )


def test_a_long_name_leaves_room_for_the_figures_of_a_comparison(page, tmp_path):
    name = "depth=12,lr=0.1," * 12
    for run, depth in ((name, 4), ("short", 6)):
        write_run(tmp_path, run, depth=depth)
    with serving(Shelf(tmp_path)) as port:
        for size, column in (({"width": 1280, "height": 800}, 2), (PHONE, 1)):
            page.set_viewport_size(size)
            go(page, port, f"/compare/{name}/short")
            for table in ("#figures", "#differences"):
                page.wait_for_selector(f"{table} td")
                cell = page.locator(f"{table} tbody tr").first.locator("td").nth(column - 1).bounding_box()
                panel = page.locator(table).bounding_box()
                assert cell["x"] + cell["width"] <= panel["x"] + panel["width"]
            assert overflow(page) == 0


def test_the_page_grows_with_the_run_and_follows_its_end(page, tmp_path):
    run = write_run(tmp_path, "live", steps=50, end=None)
    with serving(Shelf(tmp_path)) as port:
        go(page, port, "/run/live")
        assert page.evaluate(POINTS) == 50
        append_step(run, 51, loss=1.25)
        page.wait_for_function(f"() => {POINTS} === 51")
        assert page.inner_text(".chart[data-field=loss] .chart-now") == "1.2500"
        with run.events.open("a") as file:
            file.write(json.dumps({"time": "2026-11-21T08:40:00.000Z", "event": "finished", "step": 51}) + "\n")
        page.wait_for_selector("h1 .badge[data-state=finished]")
        assert "✓" in page.title()
        page.wait_for_function("() => app.state === 'live'")


def grow_log(page: Any, run: RunDir, text: str) -> None:
    """Until the page knows."""
    with run.rank_log(1, 0).open("a") as file:
        file.write(text)
    size = run.rank_log(1, 0).stat().st_size
    page.wait_for_function(f"() => app.page.run.parts.logs[0].bytes === {size}")


@pytest.mark.soak
def test_a_log_that_grows_is_read_again_in_sight_alone_and_not_searched_again(page, tmp_path):
    run = write_run(tmp_path, "live", end=None)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "/log?" in request.url else None)
    with serving(Shelf(tmp_path)) as port:
        go(page, port, "/run/live")
        page.wait_for_selector(".log div")
        page.wait_for_function("() => !app.page.logs.inSight")
        grow_log(page, run, "step 2\n")
        assert (len(asked), page.inner_text(".log")) == (1, "step 1\n")
        page.keyboard.press("/")
        page.wait_for_selector(".log div:has-text('step 2')")
        grow_log(page, run, "step 3\n")
        page.wait_for_selector(".log div:has-text('step 3')")
        page.keyboard.type("step")
        page.wait_for_selector(".log mark")
        grow_log(page, run, "step 4\n")
        assert [url.partition("find=")[2] for url in asked] == ["", "", "", "step"]
        page.keyboard.press("Enter")
        page.wait_for_selector(".log div:has-text('step 4')")


@pytest.mark.soak
def test_a_log_is_asked_for_once_at_a_time(page, tmp_path):
    write_run(tmp_path, "live", log="one\ntwo\nthree\n")
    held: list[Any] = []

    def wait_for(number: int) -> None:
        until = time.monotonic() + SOON_MS / 1000
        while len(held) < number:
            assert time.monotonic() < until
            page.wait_for_timeout(20)

    with serving(Shelf(tmp_path)) as port:
        go(page, port, "/run/live")
        page.wait_for_selector(".log div")
        page.route("**/log?*", lambda route: held.append(route))
        page.keyboard.press("/")
        page.keyboard.type("two")
        page.wait_for_function("() => app.page.logs.loading")
        page.fill("#logs input", "th")
        page.wait_for_function("() => app.page.logs.isOutdated")
        page.fill("#logs input", "three")
        page.wait_for_function("() => app.page.logs.find === 'three'")
        wait_for(1)
        assert len(held) == 1
        held[0].continue_()
        wait_for(2)
        held[1].continue_()
        page.wait_for_selector(".log mark")
        assert (page.inner_text(".log mark"), len(held)) == ("three", 2)
        page.unroute("**/log?*")


@pytest.mark.soak
def test_a_search_says_which_of_many_lines_it_shows(page, tmp_path):
    write_run(tmp_path, "long", log="".join(f"line {number}\n" for number in range(1, 301)))
    with serving(Shelf(tmp_path)) as port:
        go(page, port, "/run/long")
        page.keyboard.press("/")
        page.keyboard.type("line")
        page.wait_for_selector(".log mark")
        assert page.locator(".log div").first.inner_text() == "101line 101\n"
        assert page.inner_text("#logs .tools .faint") == "the last 200 lines with this text"


@pytest.mark.soak
def test_a_report_opens_from_a_file_and_asks_for_nothing(page, tmp_path):
    run = write_run(tmp_path, "kept")
    file = tmp_path / "kept.html"
    file.write_text(html_report(run.path, now=NOW))
    page.goto(f"file://{file}")
    page.wait_for_selector(".chart[data-field=loss] canvas")
    assert page.inner_text("h1 .badge").endswith("finished")
    assert page.locator("#config dt").count() == 3 and page.locator("#logs").count() == 0
    picture(page, "report")


@pytest.mark.soak
def test_a_run_whose_folder_is_gone_stays_gone_until_it_is_back(page, tmp_path):
    run = write_run(tmp_path / "runs", "a")
    with serving(Shelf(tmp_path / "runs")) as port:
        go(page, port, "/run/a")
        page.wait_for_selector(".badge:has-text('finished')")
        away = run.path.rename(tmp_path / "away")
        page.wait_for_selector(".summary.error:has-text('Its files are gone')")
        page.wait_for_timeout(3000)
        assert page.is_visible(".summary.error") and page.title().startswith("✗") and not page.is_visible("#curves")
        away.rename(run.path)
        page.wait_for_selector(".badge:has-text('finished')")
        page.wait_for_selector("#curves", state="visible")
