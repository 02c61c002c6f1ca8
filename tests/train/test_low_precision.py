"""Runs with low products: they learn, resume to the same bits, do not depend on the number of ranks, and end in 16 bits."""

import json

import pytest
from runs import Workshop, events, final_bits, metrics

pytestmark = pytest.mark.dist
LOW = {"depth": 4, "emulate": "true", "num_steps": 12}


@pytest.fixture(scope="module")
def shop(tmp_path_factory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("shop"))


@pytest.mark.soak
@pytest.mark.parametrize("precision", ["fp8", "mxfp8", "mxfp4", "nvfp4"])
def test_a_run_in_a_low_precision_is_resumed_to_the_bits_of_an_unbroken_one(shop, precision):
    run = shop.train(precision, nproc=2, precision=precision, save_every=6, keep_last=5, **LOW)
    plan = json.loads((run / "plan.json").read_text())
    assert plan["low_precision"] == {"name": precision, "emulated": True, "num_layers": 2 if "fp4" in precision else 4}
    assert f'precision = "{precision}"' in (run / "config.toml").read_text()
    losses = [line["loss"] for line in metrics(run)]
    assert losses[-1] < losses[0]
    unbroken = final_bits(run)
    resumed = shop.copy(run, f"{precision}-resumed")
    (resumed / "checkpoints" / "step_000012").rename(resumed / "gone")
    shop.resume(resumed)
    assert [event["step"] for event in events(resumed, "resumed")] == [6]
    assert final_bits(resumed) == unbroken


@pytest.mark.soak
@pytest.mark.parametrize("precision", ["fp8", "mxfp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("shard", ["optimizer", "full"])
def test_one_two_and_three_ranks_take_the_same_steps(shop, precision, shard):
    runs = [
        shop.train(f"{precision}-{shard}-{nproc}", nproc=nproc, precision=precision, shard=shard, **LOW)
        for nproc in (1, 2, 3)
    ]
    alone, *others = ([line["loss"] for line in metrics(run)] for run in runs)
    for losses in others:
        assert losses[0] == pytest.approx(alone[0], abs=1e-5)
        assert losses == pytest.approx(alone, abs=5e-3)


@pytest.mark.soak
def test_the_last_steps_may_be_in_16_bits(shop):
    finished = shop.train("finish", nproc=1, precision="mxfp4", bf16_finish=0.5, **LOW)
    low = shop.train("low", nproc=1, precision="mxfp4", **LOW)
    finished_losses, low_losses = ([line["loss"] for line in metrics(run)] for run in (finished, low))
    assert finished_losses[:6] == low_losses[:6]
    assert finished_losses[6:] != low_losses[6:]


@pytest.mark.soak
def test_a_low_precision_may_be_left_and_taken_up_on_resume(shop):
    run = shop.train("left", nproc=1, precision="fp8", **LOW)
    output = shop.resume(run, precision="bf16", emulate="false", num_steps=16)
    assert "precision changed from bf16 with emulated fp8 products to bf16" in output
    assert json.loads((run / "plan.json").read_text())["low_precision"] is None
    shop.resume(run, precision="nvfp4", emulate="true", num_steps=20)
    assert json.loads((run / "plan.json").read_text())["low_precision"]["name"] == "nvfp4"
    assert [line["step"] for line in metrics(run)] == list(range(1, 21))
