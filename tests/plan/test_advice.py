from dataclasses import replace

import pytest

from paceline.config import ModelConfig
from paceline.errors import PlanError
from paceline.plan.advice import Fit, advise, expected_bpb, model_of_depth, time_of_budget
from paceline.plan.gpus import find_gpu
from paceline.plan.run_cost import Price
from paceline.plan.scaling import horizon_tokens
from paceline.plan.step_time import StepSetup

LIKE = ModelConfig(12, 768, 6, 6, 128, 2048, 32_768, "SSSL")
H100 = StepSetup(LIKE, "cuda", 1, "bf16", "muon", "optimizer", 32, 8, spec=find_gpu("H100"))


def rows_of(model: ModelConfig) -> Fit | None:
    return Fit(max(1, 32 // max(1, model.n_layer // 12))) if model.n_layer <= 30 else None


def advice(hours: float, **changes: object):
    settings = {"tokens_per_param": 12.0, "data": "hf:karpathy/climbmix-400b-shuffle", "fits": rows_of, **changes}
    return advise(H100, time_s=3600 * hours, **settings)


def test_the_deepest_model_that_ends_in_time_and_no_deeper():
    found = advice(12)
    assert found.seconds.expected <= 12 * 3600
    assert advice(found.seconds.expected / 3600 * 0.99).depth < found.depth
    assert found.deeper.startswith(f"depth {found.depth + 1} takes ")


def test_more_time_never_gives_a_shallower_model():
    depths = [advice(hours).depth for hours in (0.1, 0.3, 1, 3, 10, 30)]
    assert depths == sorted(depths) and depths[-1] > depths[0]


def test_tokens_are_those_of_the_scaling_rule():
    found = advice(3)
    horizon = horizon_tokens(found.setup.model, tokens_per_param=12.0)
    assert found.num_tokens == pytest.approx(horizon, rel=0.01)
    assert found.num_tokens == found.num_steps * found.setup.total_batch_size


def test_memory_bounds_the_depth():
    found = advice(1000)
    assert (found.depth, found.deeper) == (30, "depth 31 does not fit in memory")


def test_too_little_time_says_how_much_is_enough():
    with pytest.raises(PlanError) as error:
        advice(0.0001)
    assert "too short for a model of any depth" in error.value.message and "--time " in error.value.fix


def test_nothing_that_fits_is_refused():
    with pytest.raises(PlanError, match="no model fits"):
        advice(1, fits=lambda model: None)


def test_a_device_without_a_time_is_refused():
    with pytest.raises(PlanError, match="no time"):
        advise(replace(H100, spec=None), time_s=3600, tokens_per_param=12, data="", fits=rows_of)


def test_bits_per_byte_are_known_between_the_measured_depths_of_that_text_alone():
    def bpb(depth: int, data: str = "climbmix"):
        return expected_bpb(model_of_depth(LIKE, depth, head_dim=128), data=data)

    assert bpb(12).low <= 0.854 <= bpb(12).high and bpb(24).expected == pytest.approx(0.718)
    assert bpb(12).expected > bpb(16).expected > bpb(24).expected
    assert (bpb(8), bpb(26), bpb(12, "builtin")) == (None, None, None)


def test_another_vocabulary_has_no_expected_bits_per_byte():
    assert expected_bpb(replace(LIKE, vocab_size=65_536), data="climbmix") is None


def test_a_budget_buys_hours():
    assert time_of_budget(50, price=Price(2.5, "gpu-hour"), num_gpus=2, watts=None) == pytest.approx(10 * 3600)
    assert time_of_budget(9, price=Price(0.5, "kWh"), num_gpus=2, watts=1000) == pytest.approx(10 * 3600)


def test_a_budget_by_the_kwh_needs_the_watts():
    with pytest.raises(PlanError) as error:
        time_of_budget(9, price=Price(0.5, "kWh"), num_gpus=2, watts=None)
    assert "--watts" in error.value.fix
