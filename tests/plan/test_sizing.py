"""The solver: what it may change, in which order, and that it never breaks what must stay."""

import itertools
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import Config
from paceline.errors import PlanError
from paceline.plan import sizing
from paceline.plan.estimate import estimate_memory
from paceline.plan.forecast import measured_here
from paceline.plan.gpu_table import find_gpu
from paceline.plan.machine import Machine, imagined_machine
from paceline.plan.planner import make_plan, memory_setup
from paceline.plan.shapes import RUNGS
from paceline.plan.sizing import NOTHING_MEASURED, PROFILES, DoesNotFit, ceiling, divisors

CARDS = ("RTX 3060", "RTX 4090", "RTX 5090", "H100", "H200")
MACHINE = imagined_machine(find_gpu("RTX 5090"), gpus=2, hosts=1)


def planned(machine=MACHINE, *, measured=NOTHING_MEASURED, **keys):
    return make_plan(Config(**{"num_steps": 1, **keys}), machine, vocab_size=32_768, num_rows=0, measured=measured)


configs = st.fixed_dictionaries(
    {
        "depth": st.integers(1, 24),
        "sequence_len": st.sampled_from([256, 1000, 2048, 4096]),
        "optimizer": st.sampled_from(["muon", "adamw"]),
        "memory_share": st.floats(0.05, 1.0),
        "activation_checkpointing": st.sampled_from([None, *RUNGS]),
        "logits_mib": st.sampled_from([None, 64, 1024]),
    }
)
machines = st.builds(
    lambda card, gpus, hosts: imagined_machine(find_gpu(card), gpus=gpus, hosts=hosts),
    st.sampled_from(CARDS),
    st.integers(1, 4),
    st.integers(1, 2),
)


@settings(max_examples=50)
@given(keys=configs, machine=machines, rows=st.integers(1, 96))
def test_a_sized_batch_keeps_the_total_and_fits_by_its_own_estimate(keys, machine, rows):
    check_sized_batch(keys, machine, rows)


@pytest.mark.soak
@settings(max_examples=300)
@given(keys=configs, machine=machines, rows=st.integers(1, 96))
def test_300_sized_batches_keep_the_total_and_fit_by_their_own_estimate(keys, machine, rows):
    check_sized_batch(keys, machine, rows)


def check_sized_batch(keys, machine, rows):
    total = rows * keys["sequence_len"] * len(machine.gpus) * machine.hosts
    try:
        plan = planned(machine, **keys, total_batch_size=total)
    except DoesNotFit as error:
        assert error.estimate.process.expected > keys["memory_share"] * machine.gpus[0].memory_bytes or (
            error.estimate.process.high > machine.gpus[0].memory_bytes
        )
        return
    tokens = plan.device_batch_size * plan.grad_accum_steps * plan.model.sequence_len * plan.world_size
    assert tokens == plan.total_batch_size == total
    assert plan.memory["process_bytes"]["expected"] <= ceiling(keys["memory_share"], machine.gpus[0].memory_bytes)
    assert plan.memory["process_bytes"]["high"] <= machine.gpus[0].memory_bytes


@settings(max_examples=40)
@given(keys=configs, rows=st.integers(1, 96), more=st.floats(0.0, 0.5))
def test_more_memory_never_means_fewer_rows(keys, rows, more):
    fixed = {**keys, "activation_checkpointing": keys["activation_checkpointing"] or False, "logits_mib": 512}
    total = rows * keys["sequence_len"] * 2
    try:
        less = planned(**fixed, total_batch_size=total)
    except DoesNotFit:
        return
    share = min(1.0, keys["memory_share"] + more)
    assert (
        planned(**{**fixed, "memory_share": share}, total_batch_size=total).device_batch_size >= less.device_batch_size
    )


@given(number=st.integers(1, 5000))
def test_divisors_are_all_of_them_from_the_largest(number):
    assert divisors(number) == [n for n in range(number, 0, -1) if number % n == 0]


def test_a_profile_is_a_share_of_the_card():
    shares = {name: planned(depth=20, profile=name, total_batch_size=2**19).memory["share"] for name in PROFILES}
    assert all(shares[name] <= PROFILES[name] + 0.005 for name in PROFILES)
    assert shares["conservative"] < shares["balanced"] < shares["aggressive"]


@settings(max_examples=25)
@given(keys=configs, machine=machines, rows=st.integers(1, 48))
def test_no_other_size_that_fits_is_faster_than_the_one_that_is_chosen(keys, machine, rows):
    total = rows * keys["sequence_len"] * len(machine.gpus) * machine.hosts
    measured = measured_here(Path("nothing"))

    def seconds(**sizes):
        config = Config(**{"num_steps": 1, **keys, "total_batch_size": total, **sizes})
        plan = make_plan(config, machine, vocab_size=32_768, num_rows=0, measured=measured, find_fix=False)
        return plan, measured.step_seconds(machine, memory_setup(plan), config.compile)

    try:
        chosen, fastest_s = seconds()
    except DoesNotFit:
        return
    chunks = [keys["logits_mib"]] if keys["logits_mib"] else [512, 128, 32]
    again = RUNGS if keys["activation_checkpointing"] is None else [keys["activation_checkpointing"]]
    for sizes in itertools.product(divisors(rows), chunks, again):
        with suppress(DoesNotFit):
            names = ("device_batch_size", "logits_mib", "activation_checkpointing")
            plan, step_s = seconds(shard=chosen.shard, **dict(zip(names, sizes, strict=True)))
            within = plan.memory["process_bytes"]["expected"] <= ceiling(
                keys["memory_share"], plan.memory["card_bytes"]
            )
            assert not within or step_s >= 0.999 * fastest_s, (sizes, chosen)


def test_a_share_is_used_for_the_most_rows_and_not_the_first_size_that_needs_no_other_change():
    keys = {"depth": 20, "total_batch_size": 86_016, "sequence_len": 3072, "memory_share": 0.85}
    assert planned(**keys).device_batch_size == 2  # where no speed is known
    plan = planned(**keys, measured=measured_here(Path("nothing")))
    assert (plan.device_batch_size, plan.grad_accum_steps, plan.activation_checkpointing) == (7, 2, False)
    assert 0.84 < plan.memory["share"] < 0.855
    assert plan.notes == ("loss in chunks of 256 MiB, so that 7 rows fit",)


def test_a_profile_and_a_share_of_the_same_size_choose_the_same():
    keys = {"depth": 16, "total_batch_size": 2**18}
    assert planned(**keys, profile="aggressive") == planned(**keys, memory_share=0.90)


ONE_LONG_ROW = {"depth": 12, "sequence_len": 8192, "total_batch_size": 8192, "num_steps": 1000}
SMALL_CARD = imagined_machine(find_gpu("RTX 4070"), gpus=1, hosts=1)


def just_under(plan):
    """A share of the card that this plan no longer fits; shares are whole per cent."""
    return plan.memory["share"] - 0.006


def test_chunks_shrink_first_then_checkpointing_starts_and_both_are_reported():
    whole = planned(SMALL_CARD, **ONE_LONG_ROW, memory_share=1.0)
    chunks = planned(SMALL_CARD, **ONE_LONG_ROW, memory_share=just_under(whole))
    smallest = planned(SMALL_CARD, **ONE_LONG_ROW, memory_share=1.0, logits_mib=32)
    both = planned(SMALL_CARD, **ONE_LONG_ROW, memory_share=just_under(smallest))
    assert (whole.logits_budget_bytes >> 20, whole.activation_checkpointing, whole.notes) == (512, False, ())
    assert (chunks.logits_budget_bytes >> 20, chunks.activation_checkpointing) == (256, False)
    assert chunks.notes == ("loss in chunks of 256 MiB, so that 1 row fits",)
    assert both.activation_checkpointing == "relu"
    assert both.notes[-1] == "activation checkpointing, so that 1 row fits: MLPs' ReLU^2 is computed twice"


def test_of_checkpointing_the_first_rung_that_fits_is_taken():
    keys = {"depth": 8, "sequence_len": 16_384, "total_batch_size": 16_384, "logits_mib": 32}
    plans = [planned(SMALL_CARD, **keys, memory_share=1.0, activation_checkpointing=rung) for rung in RUNGS]
    for plan, rung in zip(plans, RUNGS[1:], strict=False):
        assert planned(SMALL_CARD, **keys, memory_share=just_under(plan)).activation_checkpointing == rung


@settings(max_examples=40)
@given(share=st.floats(0.3, 0.9), more=st.floats(0.0, 0.4))
def test_more_memory_never_means_a_slower_setup(share, more):
    def cost(memory_share):
        plan = planned(SMALL_CARD, **ONE_LONG_ROW, memory_share=min(1.0, memory_share))
        return RUNGS.index(plan.activation_checkpointing), -plan.logits_budget_bytes

    try:
        less = cost(share)
    except DoesNotFit:
        return
    assert cost(share + more) <= less


def test_rows_that_the_user_sets_stay_and_are_refused_with_rows_that_fit():
    with pytest.raises(PlanError) as error:
        planned(depth=12, device_batch_size=512, total_batch_size=2**21, activation_checkpointing=False)
    assert "needed on each GPU with device_batch_size 512" in error.value.message
    assert error.value.fix.startswith("--device-batch-size 32 needs ")
    assert error.value.fix.endswith("same total_batch_size")


def test_a_setup_of_which_only_the_most_exceeds_the_device_is_refused_with_the_most():
    host = Machine((), cpu_cores=2, cpu_bf16=True, memory_bytes=960 << 20)
    small = {"depth": 2, "n_embd": 64, "head_dim": 32, "sequence_len": 64, "total_batch_size": 1024}
    with pytest.raises(DoesNotFit) as error:
        planned(host, **small, device_batch_size=4, nproc=2)
    assert error.value.message.startswith(
        "up to 614 MiB (424 MiB expected) needed on each process with device_batch_size 4, 480 MiB may be used ("
    )


def test_a_setup_that_fits_a_larger_share_is_refused_with_that_profile():
    with pytest.raises(PlanError) as error:
        planned(depth=24, profile="conservative", total_batch_size=2**19)
    assert error.value.fix == "--profile balanced needs 20.4 GiB, same total_batch_size"


@pytest.mark.parametrize("shard, depth", [("optimizer", 60), (None, 60)])
def test_a_setup_that_fits_nowhere_is_refused_with_the_depth_that_does(shard, depth):
    keys = {"profile": "aggressive", "total_batch_size": 2**19, "shard": shard, "offload": "optimizer"}
    with pytest.raises(PlanError) as error:
        planned(depth=depth, **keys)
    depth = int(error.value.fix.removeprefix("--depth ").partition(",")[0])
    assert planned(depth=depth, **keys).memory["share"] <= 0.905
    with pytest.raises(PlanError):
        planned(depth=depth + 1, **keys)


def test_the_fix_of_a_very_deep_model_is_found_with_few_estimates_of_it(monkeypatch):
    depths = []

    def counted(setup, **arguments):
        depths.append(setup.model.n_layer)
        return estimate_memory(setup, **arguments)

    monkeypatch.setattr(sizing, "estimate_memory", counted)
    with pytest.raises(DoesNotFit) as error:
        planned(imagined_machine(find_gpu("RTX 4090"), gpus=1, hosts=1), depth=100)
    assert (error.value.fix, depths.count(100)) == ("--depth 20", 2)


@pytest.mark.parametrize("depth, fix", [(30, "--offload optimizer needs 21.8 GiB"), (40, "--depth 26")])
def test_offloading_is_the_fix_where_the_model_fits_with_it(depth, fix):
    keys = {"profile": "aggressive", "total_batch_size": 2**19, "nproc": 1}
    with pytest.raises(PlanError) as error:
        planned(depth=depth, **keys)
    assert error.value.fix.startswith(fix)
    with_fix = keys | ({"offload": "optimizer", "depth": depth} if "offload" in fix else {"depth": 26})
    assert planned(**with_fix).memory["share"] <= 0.905


def test_weights_are_sharded_where_replicated_ones_do_not_fit_at_any_share():
    plans = {depth: planned(depth=depth, total_batch_size=2**19) for depth in (20, 32)}
    assert {depth: plan.shard for depth, plan in plans.items()} == {20: "optimizer", 32: "full"}
    assert plans[32].notes[0].startswith("weights and gradients sharded too, so that 2 rows fit")
    with pytest.raises(PlanError) as error:
        planned(depth=32, total_batch_size=2**19, shard="optimizer")
    assert error.value.fix == "--shard full"
    with pytest.raises(PlanError):
        planned(depth=32, total_batch_size=2**19, shard="full", nproc=1)


def test_a_device_whose_memory_is_not_known_gets_a_careful_batch():
    gpu = imagined_machine(find_gpu("RTX 5090"), gpus=1, hosts=1).gpus[0]
    unknown = Machine((type(gpu)(0, "Mystery", 0, None),), 8, False, 1 << 34)
    plan = planned(unknown, depth=12, total_batch_size=2**19)
    assert plan.device_batch_size * plan.model.sequence_len == 32_768
    assert plan.memory["verdict"] is None


def test_a_memory_share_with_rows_that_the_user_sets_is_reported_as_unused():
    plan = planned(depth=8, device_batch_size=4, total_batch_size=2**17, memory_share=0.5)
    assert plan.device_batch_size == 4
    assert plan.notes == ("device_batch_size is set to 4, so memory_share chooses nothing",)


def test_a_model_that_fits_is_not_relaxed_for_a_time_that_differs_by_rounding():
    keys = {"depth": 2, "sequence_len": 256, "total_batch_size": 1024, "compile": False, "profile": "aggressive"}
    hosts = imagined_machine(find_gpu("A100 80GB"), gpus=1, hosts=2)
    plan = planned(hosts, measured=measured_here(Path("nothing")), **keys)
    assert (plan.device_batch_size, plan.activation_checkpointing) == (2, False)
