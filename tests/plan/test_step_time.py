"""The time of a step against published runs, and what must hold of any."""

from dataclasses import replace

import pytest
from setups import MEASURED_CPU, SLOW, gpt, on, on_cpu

from paceline.plan.step_time import step_time
from paceline.units import MIB

# tokens/s or MFU as published (names: run, setup, figure); the MFU of models with other embeddings is compared, not their tokens
TOKENS = [
    ("nanochat d12, mlpatron.com", on("H100", gpt(12)), 546_000),
    ("autoresearch d8, its program.md", on("H100", gpt(8, vocab=8192), rows=128), 1_660_000),
    ("nanochat d12 with window L, lzwjava.github.io", on("RTX 4070", gpt(12, pattern="L"), rows=8), 55_700),
]
SHARES = [
    ("nanochat d12 with window L, mlpatron.com", on("H100", gpt(12, pattern="L")), 0.46),
    ("nanochat d12, LOG 01-12", on("H100", gpt(12), gpus=8), 0.41),
    ("nanochat d18, LOG 02-19", on("H100", gpt(18), gpus=8), 0.46),
    ("nanochat d24, leaderboard's run 1", on("H100", gpt(24), gpus=8, rows=16), 0.500),
    ("nanochat d26, LOG 02-02", on("H100", gpt(26), gpus=8, rows=16), 0.492),
    ("nanochat d32, run1000.sh", on("H100", gpt(32, vocab=65_536, pattern="L"), gpus=8, rows=8), 0.509),
    ("nanochat d20 of October 2025, issue 147", on("A100", gpt(20, vocab=65_536, pattern="L"), gpus=8, rows=16), 0.74),
    ("nanochat d20 of October 2025, issue 157", on("RTX 4090", gpt(20, vocab=65_536, pattern="L"), rows=4), 0.80),
]


@pytest.mark.parametrize(("run", "setup", "tok_per_sec"), TOKENS, ids=[run for run, *_ in TOKENS])
def test_published_tokens_a_second_are_in_the_planned_range(run, setup, tok_per_sec):
    planned = step_time(setup).tok_per_sec
    assert planned.low <= tok_per_sec <= planned.high


@pytest.mark.parametrize(("run", "setup", "share"), SHARES, ids=[run for run, *_ in SHARES])
def test_published_shares_of_the_peak_are_in_the_planned_range(run, setup, share):
    planned = step_time(setup)
    speed = planned.tok_per_sec
    assert planned.mfu * speed.low <= share * speed.expected <= planned.mfu * speed.high


def test_two_runs_of_the_present_recipe_on_an_h100_are_predicted_within_5_percent():
    assert step_time(on("H100", gpt(12))).tok_per_sec.expected == pytest.approx(546_000, rel=0.05)
    assert step_time(on("H100", gpt(12, pattern="L"))).mfu == pytest.approx(0.46, rel=0.05)


@pytest.mark.parametrize(
    "setup", [on("RTX 5090", gpt(12), gpus=2, rows=16), on_cpu()], ids=["two cards", "two processes"]
)
def test_the_parts_add_up_to_the_step(setup):
    planned = step_time(setup)
    assert sum(planned.parts.values()) == pytest.approx(planned.seconds.expected)
    assert planned.tok_per_sec.expected == pytest.approx(setup.total_batch_size / planned.seconds.expected)


def test_a_card_that_is_neither_in_the_table_nor_measured_has_no_time():
    unknown = step_time(replace(on("H100", gpt(12)), spec=None))
    assert (unknown.seconds, unknown.tok_per_sec, unknown.mfu, unknown.limit) == (None, None, None, None)
    assert unknown.assumptions == ("no time: bf16 speed of this card is in no table and was not measured",)


def test_a_cpu_that_was_not_measured_has_no_time():
    assert step_time(on_cpu(speeds=None)).seconds is None


def test_a_precision_that_was_not_measured_has_no_time():
    assert step_time(on_cpu(precision="bf16")).assumptions == ("no time: CPU was not measured in bf16",)


def test_devices_without_a_known_link_have_no_time():
    assert step_time(replace(on("RTX 5090", gpt(12), gpus=2), link=None)).seconds is None


def test_measured_speeds_replace_the_tables_and_are_no_less_certain():
    table = on("RTX 5090", gpt(12))
    measured = replace(
        MEASURED_CPU, device_name="RTX 5090", rates={**MEASURED_CPU.rates, "linear bf16": ((768, 1e14),)}
    )
    wide, narrow = step_time(table), step_time(replace(table, speeds=measured))
    assert narrow.seconds.high / narrow.seconds.low <= wide.seconds.high / wide.seconds.low
    assert narrow.assumptions[0] == "speeds measured 2026-11-21"


def test_a_run_that_was_timed_corrects_the_next_plan_of_the_same_setup():
    setup = on_cpu()
    before = step_time(setup)
    taught = replace(setup, speeds=replace(MEASURED_CPU, steps={setup.key: 1.5}))
    after = step_time(taught)
    assert after.seconds.expected == pytest.approx(1.5 * before.seconds.expected)
    assert after.uncorrected_s == pytest.approx(before.seconds.expected)
    assert after.seconds.high / after.seconds.expected < before.seconds.high / before.seconds.expected


def test_runs_that_were_off_by_several_times_make_the_range_wide_and_no_time_negative():
    setup = on_cpu()
    seconds = step_time(replace(setup, speeds=replace(MEASURED_CPU, steps={"a": 0.8, "b": 1.2, "c": 4.5}))).seconds
    assert 0 < seconds.low < seconds.expected / 3
    assert seconds.high > 3 * seconds.expected


def test_a_measured_card_has_fused_ops_at_the_speed_of_its_memory():
    rates = {**MEASURED_CPU.rates, **{name.replace("fp32", "bf16"): rate for name, rate in MEASURED_CPU.rates.items()}}
    measured = replace(on("RTX 5090", gpt(12)), speeds=replace(MEASURED_CPU, rates={**rates, "copy": ((1, 1e12),)}))
    eager, compiled = (step_time(replace(measured, compile=flag)).parts for flag in (False, True))
    assert compiled["elementwise"] < eager["elementwise"] and compiled["matmuls"] == eager["matmuls"]


def test_a_card_s_host_prepares_an_update_of_many_matrices_once():
    rates = {**MEASURED_CPU.rates, **{name.replace("fp32", "bf16"): rate for name, rate in MEASURED_CPU.rates.items()}}
    muon = {name: ((1, 1e18),) for name in rates if name.startswith("muon")}  # a card without limits
    slow_host = replace(MEASURED_CPU, rates={**rates, **muon}, host={**MEASURED_CPU.host, "update": 1e-3})
    card = step_time(replace(on("H100", gpt(12)), speeds=slow_host)).parts["Muon"]
    assert card == pytest.approx(4e-3, rel=0.01)  # three shapes of matrices, and the gates: 78 in all


def test_checkpointing_costs_a_third_of_the_layers():
    full, checkpointed = (step_time(on_cpu(activation_checkpointing=flag)).parts for flag in (False, True))
    assert checkpointed["matmuls"] == pytest.approx(4 / 3 * full["matmuls"])
    assert checkpointed["loss"] == full["loss"]


def test_a_slow_link_is_what_limits_small_steps_over_hosts():
    small = on("RTX 5090", gpt(12), rows=8, total=32_768, hosts=2)
    assert step_time(replace(small, link=replace(SLOW, bytes_per_s=1e8))).limit == "link"


def test_more_micro_steps_hide_more_of_what_is_sent():
    few, many = (step_time(replace(on("RTX 5090", gpt(12), gpus=2, rows=8), grad_accum_steps=g)) for g in (2, 16))
    assert many.exposed_share < few.exposed_share


def test_a_gpu_that_waits_for_its_host_sends_meanwhile():
    small = on("RTX 4090", replace(gpt(1), sequence_len=256), hosts=2, rows=3, total=1536)
    chunks, recomputed = replace(small, logits_budget_bytes=32 * MIB), replace(small, activation_checkpointing="mlp")
    assert step_time(small).parts["host"] > 0
    for longer in (chunks, recomputed):
        assert step_time(longer).seconds.expected >= step_time(small).seconds.expected - 1e-12


def test_one_device_sends_nothing():
    alone = step_time(on("RTX 5090", gpt(12)))
    assert (alone.exposed_share, alone.hidden_s) == (0, 0)


def test_replicated_adamw_sends_every_gradient_whole():
    sharded = step_time(on_cpu(optimizer="adamw"))
    replicated = step_time(on_cpu(optimizer="adamw", shard="none"))
    assert "weights sent" not in replicated.parts and "weights sent" in sharded.parts
