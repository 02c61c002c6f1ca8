import pytest

from paceline.errors import PlanError
from paceline.plan.range import Range
from paceline.plan.run_cost import Price, parse_price, run_cost, saving_seconds

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
    ("words", "price"),
    [
        ("0.30/kWh", Price(0.30, "kWh")),
        ("2.50/gpu-hour", Price(2.5, "gpu-hour")),
        ("$2/GPU-hour", Price(2.0, "gpu-hour")),
        (".3 EUR / kwh", Price(0.3, "kWh")),
    ],
)
def test_prices_are_read(words, price):
    assert parse_price(words) == price


@pytest.mark.parametrize("words", ["0.30", "", "kWh", "1/hour", "-1/kWh x"])
def test_a_price_without_its_unit_names_both_forms(words):
    with pytest.raises(PlanError) as error:
        parse_price(words)
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


def test_evaluations_are_forward_passes_and_come_at_the_end_too():
    each = {**BASE, "eval_tokens": 3_000, "total_batch_size": 1_000, "eval_every": 1000}
    assert run_cost(SECOND, **each).evaluating_hours * 3600 == pytest.approx(4 * 3 / 3)  # at 1000, 2000, 3000, 3600


def test_only_what_is_not_written_beside_training_is_waited_for():
    assert saving_seconds(500_000_000, between_s=10, saves=5) == pytest.approx(1.0)  # the last alone
    assert saving_seconds(5_000_000_000, between_s=4, saves=3) == pytest.approx(10 + 2 * 6)
