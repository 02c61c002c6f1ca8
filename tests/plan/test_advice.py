"""What a run costs, what to train in a given time or budget, and what makes a step faster."""

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import pytest
from setups import SLOW, gpt, on, on_cpu

from paceline.config import ModelConfig
from paceline.errors import PlanError
from paceline.plan.advice import (
    Advice,
    Price,
    advise,
    expected_bpb,
    levers,
    parse_price,
    run_cost,
    step_gap,
    time_of_budget,
)
from paceline.plan.estimate import Range
from paceline.plan.gpu_table import find_gpu
from paceline.plan.shapes import horizon_tokens, model_of_depth
from paceline.plan.sizing import DoesNotFit
from paceline.plan.step_time import StepSetup, step_time

BASE = {
    "num_steps": 3600,
    "world_size": 2,
    "eval_every": 0,
    "eval_tokens": 1,
    "save_every": 0,
    "total_batch_size": 10**9,
    "checkpoint_bytes": 0,
}
SECOND = Range(0.9, 1.0, 1.2)


@pytest.mark.parametrize(
    ("text", "price"),
    [
        ("0.30/kWh", Price(0.30, "kWh")),
        ("2.50/gpu-hour", Price(2.5, "gpu-hour")),
        ("$2/GPU-hour", Price(2.0, "gpu-hour")),
        (".3 EUR / kwh", Price(0.3, "kWh")),
    ],
)
def test_prices_are_read(text, price):
    assert parse_price(text) == price


@pytest.mark.parametrize("text", ["0.30", "", "kWh", "1/hour", "-1/kWh x"])
def test_a_price_without_its_unit_names_both_forms(text):
    with pytest.raises(PlanError) as error:
        parse_price(text)
    assert error.value.fix == "--price 0.30/kWh or --price 2.50/gpu-hour"


def test_3600_steps_of_a_second_take_an_hour():
    cost = run_cost(SECOND, **BASE)
    assert cost.hours.expected == pytest.approx(1.0, rel=1e-6)
    assert (cost.hours.low, cost.hours.high) == (pytest.approx(0.9), pytest.approx(1.2))
    assert cost.gpu_hours.expected == pytest.approx(2.0)


def test_energy_is_a_share_of_the_devices_limit():
    cost = run_cost(SECOND, **BASE, watts=500)
    assert cost.kwh.expected == pytest.approx(2 * 0.9 * 0.5)
    assert cost.kwh.low == pytest.approx(0.9 * 2 * 0.7 * 0.5)
    assert cost.kwh.high == pytest.approx(1.2 * 2 * 0.5)


def test_money_by_the_kwh_and_by_the_gpu_hour():
    assert run_cost(SECOND, **BASE, watts=500, price=Price(0.3, "kWh")).money.expected == pytest.approx(0.27)
    assert run_cost(SECOND, **BASE, price=Price(2.5, "gpu-hour")).money.expected == pytest.approx(5.0)


def test_without_watts_there_is_no_energy_and_no_price_of_it():
    cost = run_cost(SECOND, **BASE, price=Price(0.3, "kWh"))
    assert (cost.kwh, cost.money) == (None, None)


def test_evaluations_are_forward_passes_from_the_start_to_the_end():
    each = {**BASE, "eval_tokens": 3_000, "total_batch_size": 1_000, "eval_every": 1000}
    assert run_cost(SECOND, **each).evaluating_hours * 3600 == pytest.approx(5 * 3 / 3)  # at 0, 1000, 2000, 3000, 3600


def test_training_waits_only_for_checkpoints_that_are_not_written_meanwhile():
    def saving_s(checkpoint_bytes: int, *, between: int, saves: int) -> float:
        run = {**BASE, "checkpoint_bytes": checkpoint_bytes, "save_every": between, "num_steps": between * saves}
        return 3600 * run_cost(SECOND, **run).saving_hours

    assert saving_s(500_000_000, between=10, saves=5) == pytest.approx(1.0)  # the last alone
    assert saving_s(5_000_000_000, between=4, saves=3) == pytest.approx(10 + 2 * 6)


LIKE = ModelConfig(12, 768, 6, 6, 128, 2048, 32_768, "SSSL")
H100 = StepSetup(LIKE, "cuda", 1, "bf16", "muon", "optimizer", 32, 8, spec=find_gpu("H100"))


def run_of_depth(depth: int, *, too_large: Callable[[int], bool] = lambda depth: depth > 30) -> Advice:
    if too_large(depth):
        raise DoesNotFit("", estimate=None, changes=iter(()), deeper_may_fit=depth < 40)
    model = model_of_depth(LIKE, depth)
    setup = replace(H100, model=model, device_batch_size=max(1, 32 // max(1, depth // 12)))
    num_steps = max(1, round(horizon_tokens(model, tokens_per_param=12) / setup.total_batch_size))
    return Advice(setup, num_steps, step_time(setup).seconds.scaled(num_steps), None)


def advice_for(hours: float, run_of_depth: Callable[[int], Advice] = run_of_depth) -> Advice:
    words = {"enough": lambda seconds: f"--time {seconds:.0f}s", "spent": lambda seconds: f"takes {seconds:.0f}s"}
    return advise(run_of_depth, time_s=3600 * hours, limit=f"{hours}h", **words)


def test_the_deepest_model_that_ends_in_time_and_no_deeper():
    found = advice_for(12)
    assert found.seconds.expected <= 12 * 3600
    assert advice_for(found.seconds.expected / 3600 * 0.99).depth < found.depth
    assert found.deeper.startswith(f"depth {found.depth + 1} takes ")


def test_a_deeper_model_that_fits_again_as_its_weights_are_sharded_is_found():
    gap = partial(run_of_depth, too_large=lambda depth: 20 < depth < 24 or depth > 26)
    found = advice_for(1000, gap)
    assert (found.depth, found.deeper) == (26, "depth 27 does not fit in memory with these settings")
    found = advice_for(run_of_depth(22).seconds.expected / 3600, gap)
    assert (found.depth, found.deeper) == (20, "depth 21 does not fit in memory with these settings")


def test_the_depth_is_that_of_trying_one_after_another_and_few_are_tried():
    cases = [lambda depth: depth > 30, lambda depth: depth > 42, lambda depth: depth > 128, lambda depth: depth > 5]
    cases += [lambda depth: depth == 3, lambda depth: 20 < depth < 24 or depth > 26, lambda depth: depth > 9]
    for (number, too_large), hours in itertools.product(enumerate(cases), (0.01, 0.02, 0.1, 0.5, 2, 12, 100, 1e3, 1e5)):
        expected = None
        for depth in range(1, 129):
            with contextlib.suppress(DoesNotFit):
                run = run_of_depth(depth, too_large=too_large)
                if run.seconds.expected > 3600 * hours:
                    break
                expected = run
            if too_large(depth) and depth >= 40:
                break
        assert replace(advice_for(hours, partial(run_of_depth, too_large=too_large)), deeper="") == expected, number
    tried = Mock(side_effect=run_of_depth)
    assert (advice_for(12, tried).depth, tried.call_count) == (20, 8)


def test_an_error_of_the_first_deeper_model_is_raised_and_that_of_a_deeper_one_is_not():
    def without_host_memory(depth: int, *, above: int) -> Advice:
        if depth > above:
            raise PlanError("no host memory", fix="")
        return run_of_depth(depth)

    depth = advice_for(12).depth
    assert advice_for(12, partial(without_host_memory, above=depth + 1)) == advice_for(12)
    with pytest.raises(PlanError, match="no host memory"):
        advice_for(12, partial(without_host_memory, above=depth))


def test_too_little_time_says_how_much_is_enough():
    with pytest.raises(PlanError) as error:
        advice_for(0.0001)
    assert error.value.message == "0.0001h is too little for a model of any depth"
    shortest = run_of_depth(1).seconds.expected
    assert error.value.fix == f"--time {shortest:.0f}s allows the smallest"


def test_nothing_that_fits_is_refused():
    with pytest.raises(PlanError, match="no model fits"):
        advice_for(1, partial(run_of_depth, too_large=lambda depth: True))


def test_bits_per_byte_are_known_between_the_measured_depths_of_that_text_alone():
    def bpb(depth: int, data: str = "climbmix", val_data: str | None = None):
        return expected_bpb(model_of_depth(LIKE, depth), data=data, val_data=val_data)

    assert bpb(12, val_data="climbmix") and not bpb(12, val_data="books") and not bpb(12, "books", "climbmix")
    assert bpb(12).low <= 0.854 <= bpb(12).high and bpb(24).expected == pytest.approx(0.718)
    assert bpb(12).expected > bpb(16).expected > bpb(24).expected
    assert (bpb(8), bpb(26), bpb(12, "builtin")) == (None, None, None)
    assert expected_bpb(replace(LIKE, vocab_size=65_536), data="climbmix", val_data=None) is None


def test_a_budget_buys_hours():
    assert time_of_budget(50, price=Price(2.5, "gpu-hour"), num_gpus=2, watts=None) == pytest.approx(10 * 3600)
    assert time_of_budget(9, price=Price(0.5, "kWh"), num_gpus=2, watts=1000) == pytest.approx(10 * 3600)
    with pytest.raises(PlanError) as error:
        time_of_budget(9, price=Price(0.5, "kWh"), num_gpus=2, watts=None)
    assert "--watts" in error.value.fix


def test_levers_are_sorted_and_each_is_worth_a_percent():
    setup = replace(on("RTX 5090", gpt(12), gpus=2, rows=4, total=65_536), compile=False, activation_checkpointing=True)
    found = levers(setup, [("--device-batch-size auto", replace(setup, device_batch_size=16, grad_accum_steps=1))])
    assert [each.gain for each in found] == sorted((each.gain for each in found), reverse=True)
    assert all(each.gain >= 0.01 for each in found)
    assert {"--compile", "--device-batch-size auto"} == {each.what for each in found}


def test_without_a_time_there_are_no_levers():
    assert levers(on_cpu(speeds=None)) == ()


def test_a_step_near_the_plan_is_no_finding():
    setup = on("RTX 5090", gpt(12))
    planned = step_time(setup)
    assert step_gap(setup, planned, 1.15 * planned.seconds.expected) is None
    assert step_gap(setup, step_time(replace(setup, spec=None)), 1.0) is None


def test_a_step_over_a_slow_link_names_the_link():
    setup = replace(on("RTX 5090", gpt(12), rows=8, total=32_768, hosts=2), link=SLOW)
    planned = step_time(setup)
    finding = step_gap(setup, planned, 1.5 * planned.seconds.expected)
    assert (finding.id, finding.severity) == ("step-slower-than-planned", "warn")
    assert "likely the link: 10GbE" in finding.why and finding.fix == "paceline comm --nproc 2 measures it"


def test_a_slow_step_on_one_card_names_its_clock():
    setup = replace(on("RTX 5090", gpt(12)), compile=True)
    finding = step_gap(setup, step_time(setup), 2 * step_time(setup).seconds.expected)
    assert finding.why.startswith("likely the cards run below their clock") and "(+100 %)" in finding.what


def test_a_faster_step_is_a_note():
    setup = on_cpu()
    finding = step_gap(setup, step_time(setup), 0.5 * step_time(setup).seconds.expected)
    assert (finding.id, finding.severity) == ("step-faster-than-planned", "note")
