"""A run that is resumed computes as it began, whatever was measured on the machine since."""

from dataclasses import replace

import pytest
from setups import DEPTH_12, ONE, TWO, planner, rows

from paceline.config import Config
from paceline.errors import PlanError
from paceline.plan.activations import MemorySetup
from paceline.plan.estimate import Calibration, Range
from paceline.plan.machine import Machine
from paceline.plan.memory import peak_phase
from paceline.plan.planner import Plan, make_plan
from paceline.plan.precision import LowPrecision
from paceline.plan.replan import changes_on_resume, fewer_ranks, format_change, replan, smaller_plan
from paceline.plan.sizing import Measured


def maker(ratio: float | None = None):
    """make_plan on a machine that measured allocations of `ratio` times the planned."""

    def calibrate(_, setup: MemorySetup) -> Calibration | None:
        size = peak_phase(setup).bytes * (ratio or 0)
        return Calibration(Range(0.96 * size, size, 1.04 * size), None, "measured") if ratio else None

    def make(config: Config, machine: Machine) -> Plan:
        return make_plan(config, machine, vocab_size=32_768, num_rows=1000, measured=Measured(calibrate))

    return make


def settings(plan: Plan) -> tuple:
    return plan.device_batch_size, plan.logits_budget_bytes, plan.activation_checkpointing, plan.compile


def test_a_new_calibration_changes_new_plans_and_not_that_of_a_resumed_run():
    old = replace(maker()(DEPTH_12, TWO), compile=True, onednn=True)
    assert settings(maker(2.5)(DEPTH_12, TWO))[0] < old.device_batch_size
    new_plan = replan(old, DEPTH_12, TWO, make=maker(2.5))
    assert (settings(new_plan), new_plan.onednn) == (settings(old), True)
    assert (new_plan.memory_share, new_plan.grad_accum_steps) == (old.memory_share, old.grad_accum_steps)


def test_a_resumed_run_keeps_its_attention_unless_it_is_set():
    old = replace(maker()(DEPTH_12, TWO), attention="flash")
    assert maker()(DEPTH_12, TWO).attention is None
    assert replan(old, DEPTH_12, TWO, make=maker()).attention == "flash"
    assert replan(old, replace(DEPTH_12, attention="flex"), TWO, make=maker()).attention == "flex"
    assert replan(old, DEPTH_12, TWO, make=maker(), set_keys=frozenset({"attention"})).attention is None
    assert replan(old, DEPTH_12, ONE, make=maker()).attention is None  # on other devices


@pytest.mark.parametrize(
    ("keys", "fix"), [({"nproc": 3}, "--nproc 2"), ({"nproc": 4, "device_batch_size": 3}, "--device-batch-size 2")]
)
def test_a_number_of_processes_or_rows_that_does_not_share_a_step_gets_one_that_does(keys, fix):
    cpus = Machine((), cpu_cores=8, cpu_bf16=False, memory_bytes=64 << 30)
    config = Config(depth=2, sequence_len=64, total_batch_size=64 * 16, nproc=2, num_steps=10, vocab_size=512)
    old = maker()(config, cpus)
    with pytest.raises(PlanError, match="cannot share the 16 rows of each step evenly, which a run keeps") as error:
        replan(old, replace(config, **keys), cpus, make=maker(), set_keys=frozenset(keys))
    assert error.value.fix == fix
    [key, value] = fix.removeprefix("--").replace("-", "_").split()
    assert replan(old, replace(config, **keys | {key: int(value)}), cpus, make=maker()).total_batch_size == 64 * 16


def test_what_ran_here_is_not_refused_by_arithmetic():
    old = maker()(DEPTH_12, TWO)
    with pytest.raises(PlanError):
        maker(40.0)(DEPTH_12, TWO)
    new_plan = replan(old, DEPTH_12, TWO, make=maker(40.0))
    assert settings(new_plan) == settings(old)
    assert new_plan.memory["verdict"] == "does not fit"  # it says what it believes


def test_another_number_of_devices_gets_a_new_plan():
    old = replace(maker()(DEPTH_12, TWO), compile=True)
    assert settings(replan(old, DEPTH_12, ONE, make=maker(2.5))) == settings(maker(2.5)(DEPTH_12, ONE))


def test_a_smaller_card_refuses_what_does_not_fit_and_names_what_would():
    old = maker()(DEPTH_12, TWO)
    small = replace(TWO, gpus=tuple(replace(gpu, memory_bytes=8 << 30) for gpu in TWO.gpus))
    with pytest.raises(PlanError) as error:
        replan(old, DEPTH_12, small, make=maker())
    assert error.value.fix.startswith("--device-batch-size ")


def test_keys_that_the_user_sets_on_resume_count_and_the_others_stay():
    old = maker()(DEPTH_12, TWO)
    now = replace(DEPTH_12, activation_checkpointing=True)
    new_plan = replan(old, now, TWO, make=maker(1.5), set_keys={"activation_checkpointing"})
    assert settings(new_plan) == (old.device_batch_size, old.logits_budget_bytes, True, old.compile)


@pytest.mark.parametrize(
    "changed", [{"profile": "conservative"}, {"memory_share": 0.3}, {"device_batch_size": None}], ids=str
)
def test_a_user_who_sets_a_key_of_the_fit_gets_a_new_fit(changed):
    old = replace(maker()(DEPTH_12, TWO), device_batch_size=1, grad_accum_steps=128)
    now = replace(DEPTH_12, **changed)
    assert replan(old, now, TWO, make=maker(), set_keys=set(changed)) == maker()(now, TWO)


def test_rows_that_the_config_sets_are_the_configs():
    old = maker()(DEPTH_12, TWO)
    now = replace(DEPTH_12, device_batch_size=2)
    assert replan(old, now, TWO, make=maker(), set_keys={"device_batch_size"}).device_batch_size == 2


def test_a_smaller_plan_takes_fewer_rows_then_checkpointing_then_sharded_weights_then_does_not_exist(tmp_path):
    make = planner(tmp_path)
    plan, changes = replace(make(DEPTH_12, TWO), device_batch_size=4, grad_accum_steps=32), []
    while smaller := smaller_plan(plan, DEPTH_12, TWO, make=make):
        changes.append(format_change(plan, smaller))
        assert smaller.total_batch_size == plan.total_batch_size
        plan = smaller
    assert changes == [
        "device_batch_size 2 instead of 4, 64 micro-steps instead of 32",
        "device_batch_size 1 instead of 2, 128 micro-steps instead of 64",
        "activation checkpointing (relu)",
        "activation checkpointing (mlp)",
        "activation checkpointing",
        "shard full",
    ]


def test_checkpointing_and_sharded_weights_that_the_user_switched_off_stay_off(tmp_path):
    user_config = replace(DEPTH_12, activation_checkpointing=False, shard="optimizer")
    plan = replace(planner(tmp_path)(user_config, TWO), device_batch_size=1, grad_accum_steps=128)
    assert smaller_plan(plan, user_config, TWO, make=planner(tmp_path)) is None


def test_a_run_that_was_made_smaller_stays_smaller_when_it_is_resumed(tmp_path):
    make = planner(tmp_path)
    smaller = smaller_plan(make(DEPTH_12, TWO), DEPTH_12, TWO, make=make)
    assert smaller is not None
    assert rows(replan(smaller, DEPTH_12, TWO, make=make)) == rows(smaller)


@pytest.mark.parametrize("devices, ranks", [(3, 2), (2, 2), (1, 1), (0, 0)])
def test_a_run_continues_on_as_many_devices_as_can_share_the_rows(devices, ranks, tmp_path):
    plan = replace(planner(tmp_path)(DEPTH_12, TWO), world_size=4, total_batch_size=16 * DEPTH_12.sequence_len)
    assert fewer_ranks(plan, devices=devices) == ranks


def test_a_resumed_run_says_which_changes_its_curves_will_show():
    plan = maker()(DEPTH_12, ONE)
    fp8 = replace(plan, low_precision=LowPrecision("fp8", False, 12), num_steps=plan.num_steps + 1000)
    assert changes_on_resume(plan, replace(plan, device_batch_size=1)) == []
    precision, length = changes_on_resume(fp8, plan)
    assert precision == "precision changed from bf16 with fp8 products to bf16"
    assert length.startswith(f"length changed from {fp8.num_steps:,} to {plan.num_steps:,} steps")
