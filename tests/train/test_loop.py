"""The loss scale, a part of the loop that stands alone."""

import json

from paceline.train.loop import SCALE_GROWTH_STEPS, LossScale


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
