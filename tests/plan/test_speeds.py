from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from paceline.errors import PacelineError
from paceline.plan.speeds import FILE_NAME, Speeds, interpolate, keep_speeds, load_speeds, remember_step

SPEEDS = Speeds(
    "CPU", 1, 2, {"linear fp32": ((100.0, 1e9), (400.0, 4e9)), "copy": ((1.0, 5e9),)}, {"layer": 1e-3}, "measured"
)


def load(folder):
    return load_speeds(folder, device_name="CPU", threads=1, processes=2)


def test_rates_between_two_sizes_follow_the_logarithms():
    assert interpolate(((100, 1e9), (400, 4e9)), 200) == pytest.approx(2e9)


def test_rates_beyond_what_was_measured_are_those_of_the_ends():
    assert [SPEEDS.rate("linear", "fp32", size=size) for size in (1, 10_000)] == [1e9, 4e9]


def test_work_that_was_not_measured_has_no_rate():
    assert (SPEEDS.rate("linear", "bf16", size=100), SPEEDS.rate("muon")) == (None, None)


def test_speeds_are_read_back_equal_and_only_for_their_layout(tmp_path):
    keep_speeds(tmp_path, SPEEDS)
    keep_speeds(tmp_path, replace(SPEEDS, threads=2, processes=1))
    assert load(tmp_path) == SPEEDS
    assert load_speeds(tmp_path, device_name="CPU", threads=4, processes=1) is None


def test_speeds_of_two_runs_at_the_same_moment_are_both_stored(tmp_path):
    def measure(threads):
        for _ in range(40):
            keep_speeds(tmp_path, replace(SPEEDS, threads=threads))
            assert load_speeds(tmp_path, device_name="CPU", threads=threads, processes=2)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(measure, (1, 2, 3)))


def test_a_missing_or_damaged_file_holds_no_speeds(tmp_path):
    assert load(tmp_path / "none") is None
    (tmp_path / FILE_NAME).write_text('{"CPU, 2 x 1 thr')
    assert load(tmp_path) is None


def test_a_folder_that_cannot_be_written_is_an_error_with_its_name(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PacelineError, match="speeds.json cannot be written"):
        keep_speeds(tmp_path / "file", SPEEDS)


def test_a_measured_step_corrects_its_own_setup_with_the_smallest_error(tmp_path):
    taught = remember_step(tmp_path, SPEEDS, key="a", predicted_s=1.0, measured_s=1.2)
    taught = remember_step(tmp_path, taught, key="b", predicted_s=1.0, measured_s=1.0)
    assert load(tmp_path) == taught
    assert taught.ratio("a", predicted_s=1.0) == (1.2, 0.05)
    ratio, spread = taught.ratio("another", predicted_s=2.0)
    assert (ratio, spread) == (pytest.approx(1.1), 0.12)


def test_runs_that_disagree_widen_the_range():
    assert replace(SPEEDS, steps={"a": 1.0, "b": 1.5}).ratio("c", predicted_s=1.0) == (1.25, pytest.approx(0.2))


def test_without_measured_steps_there_is_no_correction():
    assert SPEEDS.ratio("a", predicted_s=1.0) is None


def test_a_new_measurement_drops_the_corrections_of_the_old_one(tmp_path):
    remember_step(tmp_path, SPEEDS, key="a", predicted_s=1.0, measured_s=2.0)
    keep_speeds(tmp_path, SPEEDS)
    assert load(tmp_path).steps == {}


def test_only_the_last_runs_correct_a_prediction(tmp_path):
    taught = SPEEDS
    for number in range(25):
        taught = remember_step(tmp_path, taught, key=str(number), predicted_s=1.0, measured_s=1.0)
    assert list(taught.steps) == [str(number) for number in range(5, 25)]


def test_ten_toy_runs_correct_nothing_of_a_run_whose_steps_are_much_longer(tmp_path):
    taught = SPEEDS
    for number in range(10):
        taught = remember_step(tmp_path, taught, key=str(number), predicted_s=0.01, measured_s=0.03 + number / 1000)
    assert taught.ratio("large", predicted_s=1.0) is None
    taught = remember_step(tmp_path, taught, key="like it", predicted_s=0.5, measured_s=0.55)
    assert taught.ratio("large", predicted_s=1.0) == (pytest.approx(1.1), 0.12)
    assert load(tmp_path).ratio("large", predicted_s=1.0) == (pytest.approx(1.1), 0.12)
