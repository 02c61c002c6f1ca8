"""The parts of the loop that stand alone: loss scale, clock."""

import json

from paceline.train.loop import SCALE_GROWTH_STEPS, LossScale, StepClock


def test_an_overflow_halves_the_scale_and_many_good_steps_double_it():
    scale = LossScale(8.0, dynamic=True)
    scale.update(overflow=True)
    assert scale.value == 4.0
    for _ in range(SCALE_GROWTH_STEPS):
        scale.update(overflow=False)
    assert scale.value == 8.0


def test_a_loss_scale_survives_its_state():
    scale = LossScale(4.0, good_steps=7, dynamic=True)
    other = LossScale(1.0, dynamic=True)
    other.load_state_dict(json.loads(json.dumps(scale.state_dict())))
    assert other == scale


def test_the_clock_gives_the_mean_of_the_steps_since_the_last_line():
    clock = StepClock(steps=4, seconds=2.0)
    assert clock.take_step_ms() == 500.0
    assert (clock.steps, clock.seconds) == (0, 0.0)
