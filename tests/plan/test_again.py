"""A run that goes on computes as it began, whatever was learnt of the machine since."""

from dataclasses import replace

import pytest

from paceline.config import Config
from paceline.errors import PlanError
from paceline.plan.again import plan_again
from paceline.plan.estimate import Calibration
from paceline.plan.gpus import find_gpu
from paceline.plan.machine import Gpu, Machine
from paceline.plan.planner import Plan, make_plan

CARD = Gpu(0, "NVIDIA GeForce RTX 5090", 32_607 << 20, (12, 0), find_gpu("RTX 5090"))
ONE, TWO = (Machine(tuple(replace(CARD, index=i) for i in range(n)), 16, False, 64 << 30) for n in (1, 2))
CONFIG = Config(depth=12, num_steps=50, total_batch_size=524_288)


def maker(ratio: float | None = None):
    """make_plan on a machine that measured allocations of `ratio` times the planned."""
    calibration = Calibration(ratio or 1.0, None, "measured")

    def make(config: Config, machine: Machine) -> Plan:
        calibrate = (lambda name, setup: calibration) if ratio else None
        return make_plan(config, machine, vocab_size=32_768, num_rows=1000, calibrate=calibrate)

    return make


def settings(plan: Plan) -> tuple:
    return plan.device_batch_size, plan.logits_budget_bytes, plan.activation_checkpointing, plan.compile


def test_a_new_calibration_changes_a_new_plan_and_not_that_of_a_run_that_goes_on():
    old = replace(maker()(CONFIG, TWO), compile=True)
    assert settings(maker(2.5)(CONFIG, TWO))[0] < old.device_batch_size
    again = plan_again(old, CONFIG, TWO, make=maker(2.5))
    assert settings(again) == settings(old)
    assert (again.memory_share, again.grad_accum_steps) == (old.memory_share, old.grad_accum_steps)


def test_what_ran_here_is_not_refused_by_arithmetic():
    old = maker()(CONFIG, TWO)
    with pytest.raises(PlanError):
        maker(40.0)(CONFIG, TWO)
    again = plan_again(old, CONFIG, TWO, make=maker(40.0))
    assert settings(again) == settings(old)
    assert again.memory["verdict"] == "does not fit"  # it says what it believes


def test_on_another_number_of_devices_all_is_worked_out_anew():
    old = replace(maker()(CONFIG, TWO), compile=True)
    assert settings(plan_again(old, CONFIG, ONE, make=maker(2.5))) == settings(maker(2.5)(CONFIG, ONE))


def test_a_smaller_card_refuses_what_does_not_fit_it_and_says_what_would():
    old = maker()(CONFIG, TWO)
    small = replace(TWO, gpus=tuple(replace(gpu, memory_bytes=8 << 30) for gpu in TWO.gpus))
    with pytest.raises(PlanError) as error:
        plan_again(old, CONFIG, small, make=maker())
    assert error.value.fix.startswith("--device-batch-size ")


def test_what_the_user_sets_now_counts_and_the_rest_is_kept():
    old = maker()(CONFIG, TWO)
    now = replace(CONFIG, activation_checkpointing=True)
    again = plan_again(old, now, TWO, make=maker(1.5), changed={"activation_checkpointing"})
    assert settings(again) == (old.device_batch_size, old.logits_budget_bytes, True, old.compile)


@pytest.mark.parametrize(
    "changed", [{"profile": "conservative"}, {"memory_share": 0.3}, {"device_batch_size": None}], ids=str
)
def test_a_user_who_asks_for_another_fit_gets_one(changed):
    old = replace(maker()(CONFIG, TWO), device_batch_size=1, grad_accum_steps=128)
    now = replace(CONFIG, **changed)
    assert plan_again(old, now, TWO, make=maker(), changed=set(changed)) == maker()(now, TWO)


def test_rows_that_the_config_sets_are_the_configs():
    old = maker()(CONFIG, TWO)
    now = replace(CONFIG, device_batch_size=2)
    assert plan_again(old, now, TWO, make=maker(), changed={"device_batch_size"}).device_batch_size == 2
