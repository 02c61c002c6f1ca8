"""How long silence may last: by what the rank does, and by what it has taken before."""

import math
import time
from pathlib import Path

import pytest

from paceline.launch.signs import AT_WORK, IDLE, LONG, STEPS, LogSigns, MarkSigns
from paceline.launch.watchdog import HANG_AFTER_S, SCRIPT_HANG_AFTER_S
from paceline.rundir import RunDir
from paceline.train.progress import Progress

BUSY, QUIET = {0: 1.0, 1: 0.0}, {0: 0.0, 1: 0.0}


class Ranks:
    def __init__(self, folder, *, floor_s=60.0):
        self.signs = MarkSigns(RunDir(folder), 2, floor_s)
        self.marks = [Progress(RunDir(folder), rank) for rank in range(2)]
        self.now_s = 0.0

    def mark(self, *place, after_s=0.0):
        self.now_s += after_s
        for each in self.marks:
            each.mark(*place)
        assert self.signs.changed(self.now_s)

    def steps(self, num, *, seconds, start=0):
        for step in range(start, start + num):
            self.mark(step, "load")
            self.mark(step + 1, "train", after_s=seconds)


@pytest.fixture
def ranks(tmp_path):
    return Ranks(tmp_path)


def test_a_start_may_take_ten_times_as_long_and_longer_at_work(ranks):
    assert ranks.signs.allowed_s(QUIET) == 600
    assert ranks.signs.allowed_s(BUSY) == 3600


def test_the_first_step_of_an_attempt_may_take_as_long_as_a_start(ranks):
    ranks.mark(500, "train")
    ranks.mark(500, "backward")
    assert ranks.signs.allowed_s(QUIET) == 600
    ranks.mark(501, "train", after_s=90)
    assert ranks.signs.allowed_s(BUSY) == 60


def test_short_steps_leave_the_least_allowance(ranks):
    ranks.steps(5, seconds=0.2)
    ranks.mark(5, "reduce")
    assert ranks.signs.allowed_s(BUSY) == 60


def test_long_steps_are_given_six_times_the_usual_one_without_the_first(ranks):
    ranks.steps(1, seconds=300)
    ranks.steps(6, seconds=20, start=1)
    assert ranks.signs.allowed_s(QUIET) == 120


def test_one_slow_step_does_not_count_as_usual(ranks):
    ranks.steps(4, seconds=1)
    ranks.steps(1, seconds=500, start=4)
    ranks.steps(4, seconds=1, start=5)
    assert ranks.signs.allowed_s(QUIET) == 60


def test_an_evaluation_is_learned_from_the_longest_before(ranks):
    ranks.steps(2, seconds=1)
    ranks.mark(2, "eval")
    assert ranks.signs.allowed_s(QUIET) == 600
    ranks.mark(2, "load", after_s=200)
    assert ranks.signs.allowed_s(QUIET) == 60
    ranks.mark(3, "eval")
    assert ranks.signs.allowed_s(QUIET) == 1200


def test_the_rank_with_the_longest_task_counts_as_the_others_wait_for_it(ranks):
    ranks.steps(2, seconds=1)
    ranks.marks[0].mark(2, "sample")
    ranks.marks[1].mark(2, "reduce")
    ranks.signs.changed(3)
    assert ranks.signs.allowed_s(QUIET) == 600


def test_the_least_allowance_is_what_was_asked_for(tmp_path):
    ranks = Ranks(tmp_path, floor_s=8)
    assert ranks.signs.allowed_s(QUIET) == 80
    ranks.steps(3, seconds=0.1)
    assert ranks.signs.allowed_s(QUIET) == 8


def test_the_same_mark_again_is_a_sign_of_life_and_no_mark_is_none(ranks):
    assert not ranks.signs.changed(1)
    ranks.mark(3, "forward")
    assert not ranks.signs.changed(2)
    time.sleep(0.005)
    ranks.mark(3, "forward")


def test_a_line_of_a_script_is_a_sign_of_life(tmp_path):
    run = RunDir(tmp_path)
    run.logs(1).mkdir(parents=True)
    signs = LogSigns(run, 1, 2, 60)
    run.rank_log(1, 0).write_text("a")
    assert signs.changed(0)
    assert not signs.changed(1)
    with run.rank_log(1, 0).open("a") as log:
        log.write("b")
    assert signs.changed(2)


def test_a_silent_script_at_work_is_left_alone(tmp_path):
    signs = LogSigns(RunDir(tmp_path), 1, 2, 60)
    assert signs.allowed_s(QUIET) == 60
    assert signs.allowed_s(BUSY) == math.inf


def test_the_page_about_hangs_has_the_same_figures():
    page = (Path(__file__).parents[2] / "docs" / "hangs.md").read_text()
    long_s = LONG * HANG_AFTER_S
    for words in (
        f"| {HANG_AFTER_S:.0f} s, or {STEPS} times the usual step |",
        f"| {long_s:.0f} s, or {STEPS} times the longest so far in this attempt |",
        f"| {AT_WORK * long_s:,.0f} s: ",
        f"each uses less than {IDLE:.0%} of one core".replace("%", " %"),
        f"| {SCRIPT_HANG_AFTER_S:.0f} s, or `--hang-after` |",
        "| at work | for any time: ",
    ):
        assert words in page
