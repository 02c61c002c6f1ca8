"""The page in a real browser: the list, comparisons, links, lines of devices, parts of logs, and a server that is gone."""

import json
import re
from typing import Any

import pytest
from browser_pages import SOON_MS, go, picture
from run_folders import append_step, serving, utc, write_run
from snapshots import NOW, training

from paceline.rundir import RunDir, append_json_line
from paceline.watch.about import write_notes
from paceline.watch.status import Shelf

pytestmark = [pytest.mark.soak, pytest.mark.dist]

NAMES = "[...document.querySelectorAll('.runs tbody th a')].map((link) => link.textContent)"
LOSS = "app.page.board.charts.get('loss')"


def write_seeds(folder: Any) -> None:
    """Two depths, two seeds of each; the last run has gone on for longer."""
    for depth in (4, 12):
        for seed in (1, 2):
            run = write_run(folder, f"d{depth}-s{seed}", steps=0, depth=depth, seed=seed)
            for step in range(1, 7 if (depth, seed) == (12, 2) else 5):
                append_step(run, step, loss=depth / 4 + seed / 10, val_bpb=(16 - depth) / 10 + seed / 10)


def run_names(page: Any, expected: list[str]) -> None:
    page.wait_for_function(f"names => JSON.stringify({NAMES}) === JSON.stringify(names)", arg=expected)


def test_the_list_is_sorted_by_a_column_and_filtered_by_text_tag_and_setting(page, tmp_path):
    write_seeds(tmp_path)
    write_notes(RunDir(tmp_path / "d4-s2"), tags=["baseline"], note="wider <b>text</b>")
    with serving(Shelf(tmp_path)) as port:
        go(page, port)
        page.click("[data-column=loss]")
        run_names(page, ["d4-s1", "d4-s2", "d12-s1", "d12-s2"])
        page.click("[data-column=loss]")
        run_names(page, ["d12-s2", "d12-s1", "d4-s2", "d4-s1"])
        assert page.get_attribute("th:has([data-column=loss])", "aria-sort") == "descending"
        page.click("[data-column=name]")
        page.keyboard.press("/")
        page.keyboard.type("depth=4")
        run_names(page, ["d4-s1", "d4-s2"])
        page.keyboard.type(" wider")
        run_names(page, ["d4-s2"])
        assert page.inner_text(".runs .note") == "wider <b>text</b>"
        page.fill("input[type=search]", "")
        run_names(page, ["d4-s1", "d4-s2", "d12-s1", "d12-s2"])
        page.click(".tag")
        run_names(page, ["d4-s2"])


def test_runs_that_differ_only_in_their_seed_form_a_group_with_mean_and_spread(page, tmp_path):
    write_seeds(tmp_path)
    with serving(Shelf(tmp_path)) as port:
        go(page, port)
        page.click("[data-column=name]")
        page.click("button:has-text('group seeds')")
        cells = page.locator("tr.group").evaluate_all(
            "rows => rows.map((row) => row.innerText.split(/\\s*[\\n\\t]\\s*/))"
        )
        assert cells[0][-4:-1] == ["4", "1.1500 ± 0.0707", "1.3500 ± 0.0707"] or cells[0][-3:] == [
            "4",
            "1.1500 ± 0.0707",
            "1.3500 ± 0.0707",
        ]
        assert "unequal steps" in cells[1] and "1.3500 ± 0.0707" not in cells[1]
        assert page.locator("tr.group .note").all_inner_texts() == ["depth 4", "depth 12"]
        page.locator("tr.group input").first.check()
        assert page.inner_text("button.main") == "Compare 2 runs"
        picture(page, "groups")


def test_a_val_bpb_on_other_numbers_of_tokens_is_marked_and_is_not_the_best(page, tmp_path):
    write_seeds(tmp_path)
    with serving(Shelf(tmp_path)) as port:
        go(page, port)
        assert not page.locator("[data-column=eval_tokens]").count()
        for name in ("d4-s1", "d4-s2", "d12-s1"):
            with RunDir(tmp_path / name).config_toml.open("a") as file:
                file.write(f"eval_tokens = {4096 if name == 'd12-s1' else 256}\n")
            append_step(RunDir(tmp_path / name), 5, loss=int(name[-1]), val_bpb=1.0)
        page.wait_for_selector("[data-column=eval_tokens]")
        row = page.locator("tr:has-text('d12-s1')")
        assert row.locator("td").all_inner_texts()[-4:-2] == ["1.0000", "4,096"]
        go(page, port, "/compare/d4-s1/d12-s1")
        page.wait_for_selector("#figures tr:has-text('eval_tokens ▲')")
        assert not page.locator("#figures tr:has-text('val_bpb') .best").count()
        go(page, port, "/compare/d4-s1/d4-s2")
        page.wait_for_selector("#figures tr:has-text('loss') .best")
        assert not page.locator("#figures tr:has-text('eval_tokens')").count()
        for name, key in (("d4-s1", "data"), ("d4-s2", "val_data")):
            with RunDir(tmp_path / name).config_toml.open("a") as file:
                file.write(f'{key} = "/texts/{name}/valid.txt"\n')
        go(page, port)
        page.wait_for_selector("[data-column=eval_text]")
        go(page, port, "/compare/d4-s1/d4-s2")
        page.wait_for_selector("#figures tr:has-text('eval_text ▲'):has-text('d4-s2/valid.txt')")
        assert not page.locator("#figures tr:has-text('val_bpb') .best").count()


def test_a_comparison_names_the_best_at_a_common_step_and_what_the_runs_ran_on(page, tmp_path):
    write_seeds(tmp_path)
    for name, gpu, world_size in (("d12-s1", "RTX 5090", 2), ("d12-s2", "RTX 4090", 1)):
        run = RunDir(tmp_path / name)
        run.facts("tower").parent.mkdir()
        run.facts("tower").write_text(json.dumps({"gpus": [{"name": gpu}], "torch": {"version": "2.9.0"}}))
        append_json_line(run.events, {"time": utc(200), "event": "attempt", "attempt": 2, "world_size": world_size})
    with serving(Shelf(tmp_path)) as port:
        go(page, port, "/compare/d12-s1/d12-s2")
        page.wait_for_selector("#figures tr:has-text('loss at step 4') .best")
        rows = page.locator("#figures tbody tr").all_inner_texts()
        best = page.locator("#figures .best").evaluate_all(
            "cells => cells.map((cell) => cell.parentNode.firstChild.textContent)"
        )
        assert not {"loss", "val_bpb"} & set(best) and {"loss at step 4", "val_bpb at step 4"} <= set(best), rows
        page.wait_for_selector("#differences td")
        differences = {
            row.split()[0]: row.split()[1:] for row in page.locator("#differences tbody tr").all_inner_texts()
        }
        assert differences.keys() == {"seed", "GPUs", "ranks"}
        assert (differences["ranks"], differences["GPUs"][-2:]) == (["2", "1"], ["RTX", "4090"])


def test_runs_that_were_evaluated_at_other_steps_are_compared_at_one_that_both_have(page, tmp_path):
    for name, every, steps in (("short", 10, 31), ("long", 25, 101)):
        run = write_run(tmp_path, name, steps=0)
        for step in range(0, steps, 5):
            append_step(run, step, loss=9 - step / 50, **({} if step % every else {"val_bpb": 4 / (1 + step)}))
    with serving(Shelf(tmp_path)) as port:
        go(page, port, "/compare/short/long")
        page.wait_for_selector("#figures tr:has-text('loss at step 30')")
        assert not page.locator("#figures tr:has-text('val_bpb at step')").count(), (
            "a line from 0 to 25 is no measurement"
        )


def test_twelve_runs_are_compared_the_one_at_the_pointer_stands_out_and_seeds_are_a_band(page, tmp_path):
    for number in range(12):
        run = write_run(tmp_path, f"r{number:02}", steps=0, depth=4 + number // 4, seed=number)
        for step in (1, 2, 3):
            append_step(run, step, loss=10.0 - step - number / 10)
    with serving(Shelf(tmp_path)) as port:
        go(page, port, "/compare/" + "/".join(f"r{number:02}" for number in range(12)))
        page.wait_for_function(f"() => {LOSS}?.lines.length === 12 && {LOSS}.frame")
        styles = page.evaluate(f"{LOSS}.lines.map(({{ colour, dash }}) => colour + dash)")
        assert len(set(styles)) == 12
        left, top = page.evaluate(f"[{LOSS}.left(2), {LOSS}.top(8 - 0.3)]")
        box = page.locator(".chart[data-field=loss] .cover").bounding_box()
        page.mouse.move(box["x"] + left, box["y"] + top)
        page.wait_for_selector("#tip b")
        assert page.inner_text("#tip b").split() == ["7.7000", "r03"] and page.locator("#tip svg").count() == 12
        page.click("button:has-text('mean of seeds')")
        page.wait_for_function(f"() => {LOSS}.lines.length === 3")
        mean, low = page.evaluate(f"[{LOSS}.lines[0].y[0], {LOSS}.lines[0].low[0]]")
        assert mean == pytest.approx(8.85) and mean - low == pytest.approx(0.129099, abs=1e-5)
        picture(page, "seeds")


def test_a_link_keeps_axis_zoom_smoothing_scale_and_width(page, port):
    go(page, port, "/run/training")
    page.wait_for_function(f"() => {LOSS}?.frame")
    page.keyboard.press("x")
    page.keyboard.press("s")
    page.keyboard.press("+")
    page.hover(".chart[data-field=loss]")
    page.click(".chart[data-field=loss] .save button:has-text('log')")
    page.click(".chart[data-field=loss] .name")
    address = page.url
    assert re.search(r"#/run/training\?x=tokens&smooth=0.6&zoom=[^&]+&flip=loss&wide=loss$", address)
    view = "(({ axis, weight, range, flipped, wide }) => [axis, weight, range, [...flipped], [...wide]])(app.page.board.view)"
    before = page.evaluate(view)
    page.evaluate("localStorage.clear()")
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_function(f"() => {LOSS}?.frame")
    assert page.evaluate(view) == before
    assert page.evaluate(f"[{LOSS}.isLog, app.page.board.charts.get('val_bpb').isLog]") == [True, False]
    assert page.evaluate(f"[{LOSS}.height, {LOSS}.lineAt({{ offsetX: 100, offsetY: 50 }})]") == [420, None]
    page.hover(".chart[data-field=loss] .cover")
    page.wait_for_selector(".chart[data-field=loss] .chart-now:has-text(', smoothed ')")


def test_a_run_without_tokens_shows_steps_and_says_so(page, port):
    go(page, port, "/run/training?x=tokens")
    page.wait_for_function(f"() => {LOSS}?.frame")
    go(page, port, "/run/trainer_log?x=tokens")
    page.wait_for_function(f"() => {LOSS}?.frame")
    assert page.inner_text(".segments [aria-pressed=true]") == "steps"
    assert "The tokens of a step are not known for this run" in page.inner_text("#curves")
    assert len(page.evaluate(f"{LOSS}.lines[0].x")) > 10


def test_axes_have_round_values_and_one_of_them_below_the_curve(page, port):
    go(page, port, "/run/training")
    page.wait_for_function(f"() => {LOSS}?.frame")
    ticks = f"valueTicks(...{LOSS}.y.range, 7, {{ log: {LOSS}.isLog }})"
    lowest = min(training(NOW).series["loss"].values)
    for expected in ([2, 4, 6, 8, 10], [2, 5, 10]):
        assert page.evaluate(ticks) == expected and expected[0] < lowest
        page.keyboard.press("l")
    assert page.evaluate("[logTicks(2.7, 10.9, 7), logTicks(560, 640, 5)]") == [
        [3, 5, 7, 10],
        [560, 580, 600, 620, 640],
    ]


def test_times_are_utc_wherever_the_reader_is(browser, port):
    context = browser.new_context(timezone_id="America/New_York")
    context.set_default_timeout(SOON_MS)
    page = context.new_page()
    go(page, port, "/run/failed")
    assert page.inner_text(".zone") == "times are UTC"
    event = page.evaluate("app.page.run.parts.events.at(-1).time")
    shown = page.locator(".events time").first.inner_text()
    assert shown.endswith(f"{int(event) // 3600 % 24:02}:{int(event) // 60 % 60:02}:{int(event) % 60:02}")
    context.close()


def test_devices_are_lines_with_axes_that_zoom_or_a_map(page, port):
    go(page, port, "/run/training")
    page.locator("#devices .charts").scroll_into_view_if_needed()
    chart = "app.page.devices.charts.get('power_w')"
    page.wait_for_function(f"() => {chart}?.frame && !{chart}.isStale")
    assert page.evaluate(f"{chart}.lines.map(({{ label }}) => label)") == ["GPU 0", "GPU 1"]
    assert page.evaluate("[...app.page.devices.charts.keys()]") == ["use", "used_bytes", "power_w", "temperature_c"]
    assert page.evaluate(f"{chart}.y.range") == [0, 575]
    box = page.locator(".chart[data-field=power_w] .cover").bounding_box()
    page.mouse.move(box["x"] + 100, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 200, box["y"] + 50, steps=3)
    page.mouse.up()
    zoomed = page.evaluate("[app.page.devices.view.range, app.page.board.view.range]")
    assert zoomed[0][0] < zoomed[0][1] and zoomed[1] is None
    page.keyboard.press("+")
    page.wait_for_function("() => app.page.board.view.range")
    assert page.evaluate("app.page.devices.view.range") != zoomed[0], "a zoom of the curves is followed"
    page.click("#devices button:has-text('map')")
    page.wait_for_selector("#devices .heat canvas")
    assert page.locator("#devices .charts").is_hidden()


def test_a_log_is_opened_at_a_hit_or_at_evidence_and_read_part_by_part(page, tmp_path):
    text = "".join(f"line {number} {'x' * 90}\n" for number in range(1, 9001))
    run = write_run(
        tmp_path, "long", log=text.replace("line 4000 ", "torch.OutOfMemoryError: CUDA out of memory "), end="failed"
    )
    append_json_line(run.events, {"time": utc(200), "event": "rank_failed", "attempt": 1, "rank": 0, "exit_code": 1})
    first = "document.querySelector('.log div')?.textContent.startsWith"
    with serving(Shelf(tmp_path)) as port:
        go(page, port, "/run/long")
        page.locator(".evidence a").first.click()
        page.wait_for_selector(".log .at:has-text('OutOfMemoryError')")
        assert page.inner_text(".log .at .line-number") == "4000"
        page.click("[aria-label='The beginning of the log']")
        page.wait_for_function(f"() => {first}('line 1 ')")
        parts = [page.inner_text(".log")]
        for _ in range(4):
            last = page.evaluate("app.page.logs.part.to")
            if last == run.rank_log(1, 0).stat().st_size:
                break
            page.click("[aria-label='The part after this one']")
            page.wait_for_function("last => app.page.logs.part.from === last", arg=last)
            parts.append(page.inner_text(".log"))
        assert len(parts) > 2 and re.findall(r"line (\d+) ", "".join(parts))[-1] == "9000"
        page.fill("#logs input", "line 77 ")
        page.wait_for_selector(".log mark")
        page.click(".log button.line-number")
        page.wait_for_selector(".log .at:has-text('line 77 ')")
        page.click("[aria-label='The end of the log']")
        page.wait_for_selector(".log div:has-text('line 9000 ')")


def test_an_address_that_is_not_one_says_so(page, port):
    go(page, port, "/run/%")
    assert "This page has nothing at #/run/%" in page.inner_text("main")


@pytest.mark.server_ends
def test_a_server_that_is_gone_is_reported_and_one_with_another_token_too(page, tmp_path):
    write_run(tmp_path, "a")
    with serving(Shelf(tmp_path)) as port:
        go(page, port, "/run/a")
        page.route("**/api/stream*", lambda route: route.fulfill(status=204))  # as refused: no stream, and no retry
        page.evaluate("app.open()")
        page.wait_for_selector(".banner:has-text('Another one answers at this port')")
        page.unroute("**/api/stream*")
        page.evaluate("app.open()")
        page.wait_for_function("() => app.state === 'live' && document.querySelector('.banner').hidden")
    page.wait_for_selector(".banner:has-text('No answer from the server since')")
