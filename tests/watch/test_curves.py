"""Curves in bounded memory: what stays of a million points, and what is read of a large file of metrics that grows."""

import os
import struct
from itertools import count

import numpy as np
import pytest

from paceline.explain.event_files import masked_crc
from paceline.watch.curves import Curve, slow_ranks
from paceline.watch.growing_file import MetricFile
from paceline.watch.log_reader import MetricFileCurves
from paceline.watch.trend import WHOLE_LINES


def long_curve(num_points: int, *, spikes: dict[int, float], block: int = 5000) -> Curve:
    curve = Curve()
    for start in range(0, num_points, block):
        steps = np.arange(start, min(num_points, start + block))
        values = 3 + 0.1 * np.sin(steps / 100)
        for step, value in spikes.items():
            values[steps == step] = value
        curve.extend(steps, values, steps / 10)
    return curve


def test_few_points_stay_as_they_are():
    curve = Curve()
    curve.extend([1, 2], [5.0, 4.0], [10.0, 20.0])
    curve.extend([3], [3.0], [30.0])
    series = curve.series()
    assert (series.steps, series.values, series.times) == ([1, 2, 3], [5.0, 4.0, 3.0], [10.0, 20.0, 30.0])


def test_where_a_long_curve_is_nan_it_stays_so():
    curve, steps = Curve(has_gaps=True), np.arange(100_000)
    curve.extend(steps, np.where((steps > 20_000) & (steps < 60_000), np.nan, 1.0), steps)
    series = curve.series()
    gap = [step for step, value in zip(series.steps, series.values, strict=True) if np.isnan(value)]
    assert len(series.steps) < 2001 and gap[0] < 20_200 and gap[-1] > 59_700 and len(gap) > 200


def test_a_million_points_become_two_thousand_and_every_spike_stays():
    spikes = {77_777: 99.0, 400_001: -5.0, 999_990: 42.0}
    series = long_curve(1_000_000, spikes=spikes).series()
    assert len(series.steps) <= 2000
    points = dict(zip(series.steps, series.values, strict=True))
    assert {step: points.get(step) for step in spikes} == spikes
    assert series.times[series.steps.index(77_777)] == 7777.7


def test_the_first_point_and_the_last_stay():
    series = long_curve(123_457, spikes={}).series()
    assert (series.steps[0], series.steps[-1]) == (0, 123_456)


def test_points_added_one_by_one_are_thinned_like_points_added_together():
    one_by_one, together = Curve(max_points=20), Curve(max_points=20)
    values = [(7 * step) % 31 for step in range(300)]
    for step, value in enumerate(values):
        one_by_one.extend([step], [value], [step])
    together.extend(range(300), values, range(300))
    spikes = {step for step, value in enumerate(values) if value in (0, 30)}
    assert len(one_by_one.series().steps) <= 20
    assert spikes & set(together.series().steps) == spikes & set(one_by_one.series().steps)


def test_non_finite_values_are_left_out():
    curve = Curve()
    curve.extend([1, 2, 3], [1.0, float("nan"), float("inf")], [0, 0, 0])
    assert curve.series().steps == [1]


def test_a_thinned_curve_keeps_a_point_that_is_nan():
    curve = Curve(max_points=20, has_gaps=True)
    curve.extend(range(1000), [float("nan") if step == 301 else 1000.0 - step for step in range(1000)], range(1000))
    assert [
        step for step, value in zip(curve.series().steps, curve.series().values, strict=True) if value != value
    ] == [301]


def test_a_repeated_step_replaces_all_steps_after_it():
    curve = Curve()
    curve.extend([1, 2, 3, 4], [1.0, 2.0, 3.0, 4.0], [0, 0, 0, 0])
    curve.extend([3, 4], [30.0, 40.0], [1, 1])
    assert curve.series().values == [1.0, 2.0, 30.0, 40.0]


def test_a_sample_in_time_has_the_last_step_finished_by_then():
    curve = Curve()
    curve.extend([5.0, 15.0, 25.0], [0.1, 0.2, 0.3], [5.0, 15.0, 25.0])
    series = curve.series(np.array([100.0, 200.0]), np.array([10.0, 20.0]))
    assert (series.steps, series.values) == ([0, 100, 200], [0.1, 0.2, 0.3])


def test_the_last_points_stay_whole():
    series = long_curve(50_007, spikes={}, block=101).series()
    assert series.steps[-WHOLE_LINES:] == list(range(50_007 - WHOLE_LINES, 50_007))


def test_steps_that_come_again_replace_those_before_them():
    curve = Curve()
    curve.extend([1, 2, 3, 4, 3, 4, 5], [5.0, 4.0, 9.0, 9.0, 3.0, 2.0, 1.0], [1.0] * 7)
    assert (curve.series().steps, curve.series().values) == ([1, 2, 3, 4, 5], [5.0, 4.0, 3.0, 2.0, 1.0])


def test_a_jitter_of_a_tenth_is_no_slow_rank_and_a_rank_that_is_28_percent_slower_is():
    chance = np.random.default_rng(1)
    for num_ranks in (2, 3, 8):
        times = 100 * (1 + 0.1 * chance.standard_normal((1000, 20, num_ranks)))
        assert not slow_ranks(times).any()
        times[..., 1] *= 1.28
        is_slow = slow_ranks(times)
        assert is_slow[:, 1].mean() > 0.97
        assert is_slow.sum() == is_slow[:, 1].sum()


def csv_row(step: int, loss: float) -> bytes:
    return b"%d,%f\n" % (step, loss)


def event(step: int, loss: float) -> bytes:
    value = b"\n\x04loss\x15" + struct.pack("<f", loss)
    summary = b"\n%c%s" % (len(value), value)
    body = b"\t" + struct.pack("<d", 1.8e9 + step) + b"\x10%c*%c%s" % (step, len(summary), summary)
    length = struct.pack("<Q", len(body))
    return length + masked_crc(length) + body + masked_crc(body)


@pytest.mark.parametrize(
    "name, first, record",
    [("metrics.csv", b"step,loss\n", csv_row), ("events.out.tfevents.1", b"", event)],
    ids=["csv", "events"],
)
def test_of_a_large_file_of_metrics_only_what_it_has_gained_is_read(tmp_path, monkeypatch, name, first, record):
    monkeypatch.setattr("paceline.watch.growing_file.LARGE_BYTES", 100)
    path, continued, read, times = tmp_path / name, [], MetricFile.read, count(1_800_000_000)

    def read_and_record(file):
        series, is_continued = read(file)
        continued.append((is_continued, sum(len(item.steps) for item in series)))
        return series, is_continued

    monkeypatch.setattr(MetricFile, "read", read_and_record)
    curves = MetricFileCurves(path)

    def steps_after(content: bytes, mode: str = "ab") -> list[int]:
        with path.open(mode) as file:
            file.write(content)
        os.utime(path, (0, next(times)))  # the clock of the file system is coarser than this test
        curves.read()
        series = curves.fields()["series"]["loss"]
        assert series.values == pytest.approx([5 - step / 100 for step in series.steps], rel=1e-6)
        return series.steps

    def records(*steps: int) -> bytes:
        return b"".join(record(step, 5 - step / 100) for step in steps)

    assert steps_after(first + records(*range(1, 41))) == list(range(1, 41))
    half = len(records(42)) // 2
    assert steps_after(records(41, 42)[:-half]) == list(range(1, 42))
    assert steps_after(records(42)[-half:] + records(43)) == list(range(1, 44))
    assert continued == [(False, 40), (True, 1), (True, 2)]
    assert steps_after(records(31, 32)) == list(range(1, 33))  # resumed
    assert steps_after(records(33)) == list(range(1, 34))
    assert continued[3:] == [(False, 32), (True, 1)]
    (tmp_path / "new").write_bytes(first + records(*range(1, 60)))
    (tmp_path / "new").replace(path)
    assert steps_after(b"") == list(range(1, 60))
    for steps in (range(31, 91), range(32, 92), range(1, 3)):  # longer, as long, and shorter
        assert steps_after(first + records(*steps), "wb") == list(steps)
    assert continued[5:] == [(False, 59), (False, 60), (False, 60), (False, 2)]


def read_parts(path, monkeypatch, *parts: str) -> MetricFileCurves:
    """The curves of a large CSV of metrics that was read after each part of it was written."""
    monkeypatch.setattr("paceline.watch.growing_file.LARGE_BYTES", 100)
    curves = MetricFileCurves(path)
    for number, part in enumerate(parts):
        with path.open("a", newline="") as file:
            file.write(part)
        os.utime(path, (0, number))
        curves.read()
    return curves


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
def test_a_last_row_of_a_large_csv_counts_without_its_end_and_is_read_again_when_it_has_grown(
    tmp_path, monkeypatch, end
):
    rows = end.join(["loss,step", *(f"{5 - step / 100},{step}" for step in range(1, 51))])
    curve = read_parts(tmp_path / "a.csv", monkeypatch, rows).curves["loss"].series()
    assert curve.steps == list(range(1, 51)) and curve.values[-1] == 4.5
    curve = read_parts(tmp_path / "b.csv", monkeypatch, rows[:-1], f"0{end}4", f",51{end}").curves["loss"].series()
    assert curve.steps == list(range(1, 52)) and curve.values[-2:] == [4.5, 4.0]


def test_rows_of_a_large_csv_without_steps_are_counted_once(tmp_path, monkeypatch):
    rows = "loss,lr\n" + "4.5,0.1\n" * 50
    curves = read_parts(tmp_path / "metrics.csv", monkeypatch, rows + "4.", "25,0.1\n4.125,0.1\n").curves
    assert curves["loss"].series().steps == list(range(52)) and curves["loss"].series().values[-2:] == [4.25, 4.125]


def test_the_step_of_a_large_csv_is_the_last_of_all_curves(tmp_path, monkeypatch):
    rows = "".join(f"{step},4.5,\n" for step in range(1, 41))
    curves = read_parts(tmp_path / "metrics.csv", monkeypatch, f"step,loss,val_acc\n{rows}3,,0.5\n", "4,,0.6\n")
    assert curves.step == 40 and curves.curves["val_acc"].series().steps == [3, 4]
