"""Schedules are functions of (step, num_steps): their corners, exactly."""

import pytest

from paceline.train.schedule import lr_mult, muon_momentum, weight_decay_mult

SHAPE = {"warmup_steps": 40, "warmdown_ratio": 0.65, "final_lr_frac": 0.05}


def test_the_learning_rate_warms_up_stays_and_warms_down():
    mults = [lr_mult(step, 1000, **SHAPE) for step in (0, 19, 39, 40, 350, 675, 999)]
    assert mults == pytest.approx([1 / 40, 0.5, 1.0, 1.0, 1.0, 0.05 + 0.95 * 0.5, 0.05 + 0.95 / 650])


def test_a_short_run_cuts_its_warm_up_to_a_third():
    assert lr_mult(1, 9, **SHAPE) == pytest.approx(2 / 3)
    assert lr_mult(2, 9, **SHAPE) == 1.0


def test_without_warm_up_and_warm_down_the_rate_is_constant():
    flat = {"warmup_steps": 0, "warmdown_ratio": 0.0, "final_lr_frac": 0.05}
    assert {lr_mult(step, 10, **flat) for step in range(10)} == {1.0}


def test_a_longer_plan_lifts_the_rate_of_the_same_step():
    assert lr_mult(99, 100, **SHAPE) < 0.1
    assert lr_mult(99, 1000, **SHAPE) == 1.0


def test_momentum_rises_over_400_steps_and_falls_in_the_warm_down():
    values = [muon_momentum(step, 2000, warmdown_ratio=0.65) for step in (0, 200, 400, 700, 1350, 2000)]
    assert values == pytest.approx([0.85, 0.91, 0.97, 0.97, 0.935, 0.90])


def test_weight_decay_falls_to_nothing_along_a_cosine():
    assert [weight_decay_mult(step, 100) for step in (0, 50, 100)] == pytest.approx([1.0, 0.5, 0.0])
