"""`--optimizer-states 8bit` in the plan: bytes by tensor, batches, time, fixes, levers and what the screen says."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from setups import gpt, on
from test_memory import setups

from paceline.config import Config
from paceline.errors import PlanError
from paceline.plan.algorithms import ALGORITHMS
from paceline.plan.forecast import forecast, plan_lines
from paceline.plan.gpu_table import find_gpu
from paceline.plan.machine import Machine, imagined_machine
from paceline.plan.memory import checkpoint_bytes, phases, staging_bytes, state_bytes
from paceline.plan.offloading import ROW_BATCH_BYTES, offloaded_batches
from paceline.plan.planner import Plan, make_plan, memory_setup
from paceline.plan.replan import replan
from paceline.plan.states import stored_states
from paceline.plan.step_time import step_time

ONE_4090 = imagined_machine(find_gpu("RTX 4090"), gpus=1, hosts=1)
ADAMW, MUON = ALGORITHMS["adamw"], ALGORITHMS["muon"]


def planned(machine: Machine = ONE_4090, **keys) -> Plan:
    return make_plan(Config(**{"num_steps": 100, **keys}), machine, vocab_size=32_768, num_rows=0)


def kinds(algorithm, shape, rows):
    stored = stored_states(algorithm, shape, rows=rows)
    return {tensor.name: (tensor.shape, tensor.dtype) for tensor in stored}


def test_rows_of_a_table_have_a_byte_for_each_moment_and_a_base_for_each_block():
    assert kinds(ADAMW, (1003, 640), 7) == {
        "exp_avg": ((7, 640), "int8"),
        "exp_avg.base": ((7, 4), "int16"),
        "exp_avg_sq": ((7, 640), "uint8"),
        "exp_avg_sq.base": ((7, 4), "int16"),
    }


def test_a_matrix_has_codes_for_its_momentum_alone():
    assert kinds(MUON, (256, 1024), 256) == {
        "momentum_buffer": ((256, 1024), "int8"),
        "momentum_buffer.base": ((256, 4), "int16"),
        "second_momentum_buffer": ((1, 1024), "float32"),
    }


@pytest.mark.parametrize("shape", [(12, 80), (2000,)])
def test_small_tensors_and_vectors_stay_fp32(shape):
    assert {dtype for _, dtype in kinds(ADAMW, shape, shape[0]).values()} == {"float32"}


@settings(max_examples=60)
@given(setups(), st.sampled_from(["none", "optimizer"]))
def test_states_take_a_quarter_and_a_little_and_nothing_else_changes(setup, offload):
    if offload == "optimizer" and (setup.shard == "none" or setup.device == "cpu"):
        return
    kinds = [replace(setup, offload=offload, optimizer_states=kind) for kind in ("fp32", "8bit")]
    fp32, coded = (state_bytes(kind, rank=0) for kind in kinds)
    states = state_bytes(replace(kinds[0], offload="none"), rank=0).states
    saved = fp32.states + fp32.on_host - coded.states - coded.on_host
    assert 0.68 * states < saved < 0.75 * states
    for name in ("weights", "gradients", "masters", "communication"):
        assert getattr(fp32, name) == getattr(coded, name)


@settings(max_examples=40)
@given(setups().filter(lambda setup: setup.shard != "none"))
def test_batches_move_what_is_on_the_host(setup):
    setup = replace(setup, device="cuda", attention="flash", offload="optimizer", optimizer_states="8bit")
    batches = offloaded_batches(setup)
    assert sum(batch.moved_bytes for batch in batches) == state_bytes(setup, rank=0).on_host
    assert staging_bytes(setup) < staging_bytes(replace(setup, optimizer_states="fp32")) + 3 * 2**16
    for before, after in zip(phases(replace(setup, optimizer_states="fp32")), phases(setup), strict=True):
        if before.name != "optimizer":  # the states are on the host in either case
            assert before.bytes >= after.bytes


def test_decoded_rows_take_no_more_than_a_batch():
    setup = memory_setup(planned(depth=20, optimizer="adamw", profile="aggressive", optimizer_states="8bit"))
    [update] = (phase for phase in phases(setup) if phase.name == "optimizer")
    assert 0.9 * ROW_BATCH_BYTES < update.parts["working"] <= ROW_BATCH_BYTES


def test_a_checkpoint_is_smaller_by_what_its_states_are():
    setup = replace(on("RTX 4090", gpt(12)), optimizer="adamw")
    fp32, coded = (checkpoint_bytes(replace(setup, optimizer_states=kind)) for kind in ("fp32", "8bit"))
    assert coded / fp32 == pytest.approx((4 + 2) / 12, rel=0.01)


def test_a_step_takes_longer_by_the_bytes_of_decoding():
    setup = on("RTX 4090", gpt(24), rows=4)
    coded = replace(setup, optimizer_states="8bit")
    before, after = step_time(setup), step_time(coded)
    longer = after.seconds.expected - before.seconds.expected
    assert {name for name in after.parts if after.parts[name] != before.parts[name]} == {"Muon", "AdamW"}
    assert 0.1 < longer < 0.05 * before.seconds.expected
    assert coded.key == setup.key + " 8bit states"


def test_a_model_that_fits_neither_the_card_nor_the_hosts_memory_is_told_of_8_bit_states():
    machine = replace(ONE_4090, memory_bytes=16 << 30)
    with pytest.raises(PlanError) as error:
        planned(machine, depth=26, profile="aggressive")
    assert error.value.fix == "--optimizer-states 8bit needs 21.3 GiB, same total_batch_size"
    assert planned(machine, depth=26, profile="aggressive", optimizer_states="8bit").memory["verdict"] == "fits"


def test_offloading_comes_first_where_the_host_has_the_memory():
    with pytest.raises(PlanError) as error:
        planned(depth=26, profile="aggressive")
    assert error.value.fix.startswith("--offload optimizer needs ")


def test_a_cpu_run_that_does_not_fit_is_told_of_8_bit_states():
    machine = Machine((), cpu_cores=2, cpu_bf16=True, memory_bytes=9 << 30)
    keys = {"depth": 12, "sequence_len": 256, "nproc": 1, "profile": "aggressive", "optimizer": "adamw"}
    with pytest.raises(PlanError) as error:
        planned(machine, **keys)
    assert error.value.fix.startswith("--optimizer-states 8bit needs ")


@pytest.mark.parametrize(
    "card, deepest", [("RTX 4090", {"fp32": 22, "8bit": 26}), ("RTX 5090", {"fp32": 26, "8bit": 30})]
)
def test_a_card_holds_a_deeper_model(card, deepest):
    """The table of docs/plan.md."""
    machine = imagined_machine(find_gpu(card), gpus=1, hosts=1)
    for kind, depth in deepest.items():
        keys = {"profile": "aggressive", "optimizer_states": kind}
        assert planned(machine, depth=depth, **keys).memory["verdict"] == "fits"
        with pytest.raises(PlanError):
            planned(machine, depth=depth + 1, **keys)


def test_8_bit_states_help_where_their_memory_spares_more_work_than_they_cost(tmp_path):
    facts = forecast(
        Config(depth=22, num_steps=100, profile="aggressive"), ONE_4090, cache=tmp_path, vocab_size=32_768, num_rows=0
    )
    assert {lever.what: lever.gain for lever in facts.levers}["--optimizer-states 8bit"] > 0.05


def test_the_plan_says_so():
    plan = planned(depth=12, optimizer_states="8bit")
    assert "one device, 8-bit states, compile: measured first" in plan_lines(plan)[3]
    assert "8-bit" not in "".join(plan_lines(planned(depth=12)))


def test_a_resume_may_change_the_states_and_keeps_the_rows():
    old = planned(depth=12)

    def make(config: Config, machine: Machine) -> Plan:
        return make_plan(config, machine, vocab_size=32_768, num_rows=0)

    config = Config(depth=12, num_steps=100, optimizer_states="8bit")
    new = replan(old, config, ONE_4090, make=make, set_keys=frozenset({"optimizer_states"}))
    assert (old.optimizer_states, new.optimizer_states) == ("fp32", "8bit")
    assert new.device_batch_size == old.device_batch_size
