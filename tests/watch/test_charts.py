"""The charts of the page in a real browser: what is painted, zoom, cursor, scales, smoothing and export."""

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from browser_pages import go
from run_folders import append_step, serving, write_run
from snapshots import NOW, STATES, training

from paceline.watch.report import html_report
from paceline.watch.status import Shelf

pytestmark = [pytest.mark.soak, pytest.mark.dist]

CHART_OF = "app.page.board.charts.get(name)"
LOSS = "app.page.board.charts.get('loss')"
BLUE = (0, 114, 178)  # line-1 of the light theme
# how far each pixel within two of a point is from a colour, the nearest one
DISTANCE = """([x, y, colour]) => {
    const chart = app.page.board.charts.get('loss');
    const scale = devicePixelRatio;
    const [left, top] = [chart.left(x), chart.top(y)].map((at) => Math.round(at * scale) - 2);
    const copy = new OffscreenCanvas(5, 5).getContext('2d', { willReadFrequently: true });
    copy.drawImage(chart.base, -left, -top);
    const pixels = copy.getImageData(0, 0, 5, 5).data;
    const distances = [];
    for (let i = 0; i < pixels.length; i += 4)
        if (pixels[i + 3] > 128) distances.push(Math.max(...colour.map((part, j) => Math.abs(part - pixels[i + j]))));
    return Math.min(...distances, 999);
}"""


def open_run(page: Any, port: int, name: str = "training") -> None:
    go(page, port, f"/run/{name}")
    page.wait_for_function(f"() => {LOSS}?.frame")


def hover(page: Any, x: float, field: str = "loss") -> None:
    """Moves the pointer to x in a chart, and waits until the page shows the cursor."""
    left = page.evaluate("([field, x]) => app.page.board.charts.get(field).left(x)", [field, x])
    box = page.locator(f".chart[data-field={field}] .cover").bounding_box()
    page.mouse.move(box["x"] + left, box["y"] + 60)
    page.wait_for_selector(f".chart[data-field={field}] .chart-now.at-cursor")


def now_of(page: Any, field: str) -> str:
    return page.inner_text(f".chart[data-field={field}] .chart-now")


def test_the_line_is_painted_through_its_points_and_nowhere_else(page, port):
    open_run(page, port)
    loss = training(NOW).series["loss"]
    for index in (0, 30, 100):
        assert page.evaluate(DISTANCE, [loss.steps[index], loss.values[index], BLUE]) < 40
    assert page.evaluate(DISTANCE, [600, 8.0, BLUE]) > 100


def test_charts_in_sight_are_painted_first_and_all_others_once_the_browser_is_idle(page, port):
    page.add_init_script("window.idle = []; window.requestIdleCallback = (act) => window.idle.push(act);")
    open_run(page, port)
    painted = (
        "() => [...app.page.board.charts.values(), ...app.page.devices.charts.values()].filter(({ frame }) => frame)"
    )
    page.wait_for_function("() => app.page.devices.charts.size && window.idle.length")
    first = page.evaluate(f"({painted})().map(({{ name }}) => name)")
    assert "loss" in first and "disk_free" not in first
    page.evaluate("window.idle.splice(0).forEach((act) => act())")
    size = page.evaluate("app.page.board.charts.size + app.page.devices.charts.size")
    page.wait_for_function(f"size => ({painted})().length === size", arg=size)


def test_a_drag_zooms_all_charts_alike_and_a_double_click_shows_the_whole_run(page, port):
    open_run(page, port)
    begin, end = page.evaluate(f"[{LOSS}.xAt(150), {LOSS}.xAt(350)]")
    box = page.locator(".chart[data-field=loss] .cover").bounding_box()
    page.mouse.move(box["x"] + 150, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 350, box["y"] + 50, steps=4)
    page.mouse.up()
    for name in training(NOW).series:  # a chart out of sight is painted when it comes into sight
        page.locator(f".chart[data-field={name}]").scroll_into_view_if_needed()
        page.wait_for_function(f"name => {CHART_OF}.frame && !{CHART_OF}.isStale", arg=name)
        first, last = page.evaluate(f"name => {CHART_OF}.frame.shown", name)
        assert abs(first - begin) < 4 and abs(last - end) < 4
    page.dblclick(".chart[data-field=mfu] .cover")
    assert page.evaluate("app.page.board.view.range") is None
    page.mouse.move(box["x"] + 150, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 152, box["y"] + 50)
    page.mouse.up()
    assert page.evaluate("app.page.board.view.range") is None, "a click is no zoom"


def test_the_cursor_shows_the_values_at_its_place_in_all_charts(page, port):
    open_run(page, port)
    series = training(NOW).series
    before = now_of(page, "mfu")
    hover(page, 500)
    index = series["loss"].steps.index(500)
    assert now_of(page, "loss") == f"{series['loss'].values[index]:.4f}"
    assert now_of(page, "mfu") == f"{100 * series['mfu'].values[index]:.1f} %"
    assert page.inner_text(".where") == "step 500"
    page.mouse.move(2, 2)
    page.wait_for_selector(".chart[data-field=mfu] .chart-now:not(.at-cursor)")
    assert now_of(page, "mfu") == before


def test_a_value_under_the_cursor_is_written_as_the_server_writes_it(page, port):
    """The browser formats the value under the cursor, Python the last value of a curve: for the same number, the same text."""
    for name, state in STATES.items():
        if not state(NOW).series:
            continue
        open_run(page, port, name)
        texts = page.evaluate("""() => Object.entries(app.page.run.panels.fields).map(([name, { unit, last }]) =>
            [formatUnit(app.page.run.curves.series[name].values.at(-1), unit), last])""")
        assert texts and all(cursor == last for cursor, last in texts), name


def test_the_logarithmic_axis_gives_each_factor_the_same_height(page, port):
    open_run(page, port)
    page.keyboard.press("l")
    one, ten, hundred = page.evaluate(f"[1, 10, 100].map((y) => {LOSS}.top(y))")
    assert abs((one - ten) - (ten - hundred)) < 1e-6 and one > ten
    loss = training(NOW).series["loss"]
    assert page.evaluate(DISTANCE, [loss.steps[60], loss.values[60], BLUE]) < 40
    ticks = page.evaluate("valueTicks(0.01, 1000, 5, { log: true })")
    assert ticks == [0.01, 0.1, 1, 10, 100, 1000]


def smoothed(values: list[float], weight: float) -> list[float]:
    """The exponential mean without the bias of its start, as W&B and TensorBoard define it."""
    mean, debias, means = 0.0, 1.0, []
    for value in values:
        mean = mean * weight + value * (1 - weight)
        debias *= weight
        means.append(mean / (1 - debias))
    return means


def test_smoothing_paints_the_exponential_mean_before_the_raw_values(page, port):
    open_run(page, port)
    page.keyboard.press("s")
    values = page.evaluate("app.page.run.curves.series.loss.values")
    raw, smooth = page.evaluate(f"{LOSS}.curves.map(({{ y, faint }}) => [Boolean(faint), y])")
    assert (raw, smooth[0]) == ([True, values], False)
    assert all(abs(a - b) < 1e-9 for a, b in zip(smooth[1], smoothed(values, 0.6), strict=True))
    steps = training(NOW).series["loss"].steps
    assert page.evaluate(DISTANCE, [steps[80], smooth[1][80], BLUE]) < 40
    assert len(page.evaluate("app.page.board.charts.get('val_bpb').curves")) == 1, "four points are not smoothed"


def test_clipping_takes_outliers_off_the_axis(page, port):
    open_run(page, port)
    whole = page.evaluate(f"{LOSS}.y.range")
    page.keyboard.press("o")
    assert page.evaluate(f"{LOSS}.y.range[1]") < whole[1]
    losses = [6 - step / 20 for step in range(30)] + [900]
    ends = "y => yRange([{ x: y.map((_, i) => i), y }], [0, 30], { clipped: true, most: 5 })"
    assert page.evaluate(ends, losses)[1] < 7, "also one of few points"
    assert page.evaluate(ends, [step / 5 for step in range(5)] + [1] * 25)[0] == 0, "a warm-up is none"


def test_what_broke_and_what_went_on_is_marked_and_the_lost_steps_are_a_band(page, port):
    open_run(page, port, "recovered")
    view = page.evaluate("app.page.board.view")
    assert [mark["kind"] for mark in view["marks"]] == ["verdict", "resumed"]
    assert view["bands"] == [[1000, 1241]]
    inside, outside = page.evaluate(f"""() => {{
        const copy = new OffscreenCanvas(3000, 600).getContext('2d', {{ willReadFrequently: true }});
        copy.drawImage({LOSS}.base, 0, 0);
        const opacity = (x) => copy.getImageData({LOSS}.left(x) * devicePixelRatio, 25 * devicePixelRatio, 1, 1).data[3];
        return [opacity(1100), opacity(900)];
    }}""")
    assert inside > 0 and outside == 0


def test_a_chart_is_saved_as_a_table_of_what_is_shown(page, port):
    open_run(page, port)
    page.evaluate("app.page.board.view.zoom(100, 300)")
    page.hover(".chart[data-field=loss]")
    with page.expect_download() as saved:
        page.click(".chart[data-field=loss] .save button:has-text('csv')")
    text = Path(saved.value.path()).read_text()
    values = dict(
        zip(*page.evaluate("(({ steps, values }) => [steps, values])(app.page.run.curves.series.loss)"), strict=True)
    )
    assert saved.value.suggested_filename == "training-loss.csv"
    assert text == "steps,loss\n" + "".join(f"{step},{values[step]}\n" for step in range(100, 301, 10))


def test_a_run_that_comes_later_is_painted_in_every_chart_once_in_sight(page, port):
    go(page, port, "/compare/training/finished")
    page.wait_for_function(f"() => {LOSS}?.lines.length === 2")
    for name in page.evaluate("[...app.page.board.charts.keys()]"):
        page.locator(f".chart[data-field={name}]").scroll_into_view_if_needed()
        page.wait_for_function(f"name => JSON.parse({CHART_OF}.frame?.settings ?? '[[]]').at(-1)[2] === 2", arg=name)


def test_a_comparison_is_saved_with_a_column_for_each_run(page, port):
    go(page, port, "/compare/training/finished")
    page.wait_for_function(f"() => {LOSS}?.lines.length === 2")
    page.hover(".chart[data-field=loss]")
    with page.expect_download() as saved:
        page.click(".chart[data-field=loss] .save button:has-text('csv')")
    lines = Path(saved.value.path()).read_text().splitlines()
    assert lines[0] == "steps,loss of training,loss of finished"
    assert re.fullmatch(r"10,[\d.]+,[\d.]+", lines[1]) and re.fullmatch(r"2500,,[\d.]+", lines[-1])


def test_a_chart_is_saved_as_a_picture_of_twice_its_size(page, port):
    open_run(page, port)
    page.hover(".chart[data-field=loss]")
    with page.expect_download() as saved:
        page.click(".chart[data-field=loss] .save button:has-text('png')")
    picture = Path(saved.value.path()).read_bytes()
    width, height = struct.unpack(">II", picture[16:24])
    assert picture.startswith(b"\x89PNG") and saved.value.suggested_filename == "training-loss.png"
    assert (width, height) == tuple(page.evaluate(f"[2 * {LOSS}.width, 2 * ({LOSS}.height + 34)].map(Math.trunc)"))


def test_a_chart_follows_the_width_of_the_page_and_the_theme(page, port):
    open_run(page, port)
    before = page.evaluate(f"{LOSS}.base.width")
    page.set_viewport_size({"width": 1000, "height": 900})
    page.wait_for_function(f"before => {LOSS}.base.width < before", arg=before)
    loss = training(NOW).series["loss"]
    page.evaluate("app.setTheme('dark')")
    assert page.evaluate(DISTANCE, [loss.steps[60], loss.values[60], (0x58, 0xAE, 0xEA)]) < 40


@pytest.mark.parametrize(("width", "field"), [(1280, "use"), (390, "val_bpb")])
def test_the_heading_of_a_chart_and_its_value_take_one_line(page, port, width, field):
    open_run(page, port)
    page.set_viewport_size({"width": width, "height": 900})
    caption = page.locator(f".chart[data-field={field}] figcaption")
    heading, value = (caption.locator(css).bounding_box() for css in (".name", ".chart-now"))
    assert abs(heading["y"] - value["y"]) < 10


def test_only_what_changed_is_painted(page, tmp_path):
    """A new step of a long run moves nothing by a pixel: its numbers change, and no chart is painted for it."""
    run = write_run(tmp_path, "long", steps=3000, end=None)
    with serving(Shelf(tmp_path)) as port:
        open_run(page, port, "long")
        page.evaluate("""() => {
            window.paints = 0;
            const paint = Chart.prototype.paint;
            Chart.prototype.paint = function (...args) { window.paints += 1; return paint.apply(this, args); };
        }""")
        append_step(run, 3001)
        page.wait_for_function("() => app.page.run.head.step === 3001")
        assert page.evaluate("window.paints") == 0
        append_step(run, 4000, loss=5.0)
        page.wait_for_function("() => app.page.run.head.step === 4000")
        assert page.evaluate("window.paints") > 0


def test_a_report_has_charts_that_zoom_and_save_too(page, tmp_path):
    run = write_run(tmp_path, "kept")
    file = tmp_path / "kept.html"
    file.write_text(html_report(run.path, now=NOW))
    page.goto(f"file://{file}")
    page.wait_for_function(f"() => {LOSS}?.frame")
    page.keyboard.press("+")
    assert json.loads(page.evaluate("JSON.stringify(app.page.board.view.range)")) == [25.75, 75.25]
    page.hover(".chart[data-field=loss]")
    with page.expect_download() as saved:
        page.click(".chart[data-field=loss] .save button:has-text('csv')")
    assert Path(saved.value.path()).read_text().startswith("steps,loss\n26,")
