"""What `--offload optimizer` moves, in which batches, how long an update waits for it, and where it is refused."""

import json
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from setups import gpt, on
from test_memory import setups

from paceline.check.ready import training_intent
from paceline.config import Config
from paceline.errors import PlanError
from paceline.plan import offloading
from paceline.plan.forecast import forecast, memory_lines, plan_lines
from paceline.plan.gpu_table import find_gpu
from paceline.plan.links import host_link
from paceline.plan.machine import Machine, imagined_machine
from paceline.plan.memory import copies_bytes, fullest_state, phases, staging_bytes, state_bytes
from paceline.plan.offloading import NUM_BUFFERS, offloaded_batches, row_batches, staged_seconds
from paceline.plan.planner import Plan, make_plan, memory_setup
from paceline.plan.sharding import ALIGNMENT
from paceline.plan.step_time import MOVED, step_time
from paceline.units import GIB

ONE_4090 = imagined_machine(find_gpu("RTX 4090"), gpus=1, hosts=1)
DEEP = Config(depth=24, num_steps=100, offload="optimizer")


def planned(config: Config = DEEP, machine: Machine = ONE_4090) -> Plan:
    return make_plan(config, machine, vocab_size=32_768, num_rows=0)


gpu_setups = (
    setups().filter(lambda setup: setup.shard != "none").map(lambda s: replace(s, device="cuda", attention="flash"))
)


@settings(max_examples=60)
@given(gpu_setups, st.sampled_from(["optimizer", "full"]))
def test_a_rank_has_less_by_exactly_what_is_on_the_host(setup, shard):
    setup = replace(setup, shard=shard)
    for rank in range(setup.world_size):
        without, state = (state_bytes(replace(setup, offload=to), rank=rank) for to in ("none", "optimizer"))
        own_weights = 0  # in place of the masters that a gathered bucket is filled from
        if shard == "full" and setup.world_size > 1 and setup.precision != "fp32":
            own_weights = 2 * sum(bucket.segment for bucket in setup.layout.buckets)
        assert without.total - state.total == state.on_host - own_weights
        assert state.masters == (without.masters if setup.precision == "fp32" else 0)
        small = sum(p.numel for p in setup.layout.replicated)
        assert state.states <= 2 * 4 * small
        assert without.on_host == 0


@settings(max_examples=60)
@given(gpu_setups)
def test_every_phase_has_less_by_what_moved_and_the_update_has_the_buffers(setup):
    setup = replace(setup, world_size=1)
    offloaded = replace(setup, offload="optimizer")
    on_host = fullest_state(offloaded).on_host
    for before, after in zip(phases(setup), phases(offloaded), strict=True):
        if before.name == "optimizer":
            stacks = before.parts["working"] - after.parts["working"]  # a buffer is a stack of masters already
            assert stacks >= 0 and after.parts["staging"] == staging_bytes(offloaded)
            assert after.bytes == before.bytes - on_host - stacks + staging_bytes(offloaded)
        else:
            assert after.bytes == before.bytes - on_host
    assert copies_bytes(offloaded) == copies_bytes(setup)


@settings(max_examples=60)
@given(gpu_setups)
def test_the_batches_move_what_is_on_the_host_through_buffers_of_the_largest(setup):
    offloaded = replace(setup, offload="optimizer")
    batches = offloaded_batches(offloaded)
    assert sum(batch.moved_bytes for batch in batches) == state_bytes(offloaded, rank=0).on_host
    padding = [(batch.buffer_bytes - batch.moved_bytes, batch.shape) for batch in batches]
    assert all(size >= 0 and (shape is None or size < 3 * 4 * ALIGNMENT) for size, shape in padding)
    largest = max(batch.buffer_bytes for batch in batches)
    assert staging_bytes(offloaded) == min(NUM_BUFFERS, len(batches)) * largest
    rows = [batch.shape is None for batch in batches]
    assert rows == sorted(rows, reverse=True)  # elementwise updates come first
    assert offloaded_batches(setup) == () and staging_bytes(setup) == 0


@given(st.lists(st.tuples(st.integers(1, 300), st.sampled_from([1, 8, 24, 64, 100])), min_size=1), st.integers(1, 3))
def test_batches_of_rows_cover_all_rows_once_in_order_and_are_cut_where_vectors_end(shapes, copies):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offloading, "ROW_BATCH_BYTES", 4 * 9600)
        batches = row_batches(shapes, num_copies=copies)
    ranges = [rows for batch in batches for rows in batch]
    assert ranges == sorted(ranges)
    for number, (rows, cols) in enumerate(shapes):
        own = [(lo, hi) for n, lo, hi in ranges if n == number]
        assert [lo for lo, _ in own] == [0, *(hi for _, hi in own[:-1])] and own[-1][1] == rows
        assert all(lo * cols % ALIGNMENT == 0 for lo, _ in own)
    for batch in batches:
        numel = sum((hi - lo) * prod(shapes[number][1:]) for number, lo, hi in batch)
        assert numel <= 9600 // copies or len(batch) == 1


@pytest.mark.parametrize(
    "moves, updates, seconds",
    [
        ([], [], 0),
        ([2], [3], 2 + 3 + 2),
        ([1] * 10, [4] * 10, 1 + 40 + 1),  # all but the first and the last move is hidden
        ([4] * 10, [0] * 10, 40 + 4),  # both directions at once
        ([4] * 10, [1] * 10, 40 + 1 + 4),
        ([1, 8, 1], [5, 5, 5], 1 + 8 + 5 + 8 + 1),  # the third goes back behind the second
    ],
)
def test_moves_are_hidden_under_updates_as_far_as_these_go(moves, updates, seconds):
    assert staged_seconds(moves, updates) == seconds


def test_a_step_waits_for_what_its_updates_do_not_hide():
    setup = replace(on("RTX 4090", gpt(24), rows=4), offload="optimizer")
    without, step = step_time(replace(setup, offload="none")), step_time(setup)
    moved = sum(batch.moved_bytes for batch in offloaded_batches(setup))
    link = host_link(find_gpu("RTX 4090"), num_gpus=1)
    assert link.bytes_per_s == pytest.approx(0.45 * 16 * 1.969e9)
    waiting = step.parts[MOVED]
    assert 0 < waiting < moved / link.bytes_per_s  # less than one way alone: both go at once, and matrices hide theirs
    assert step.seconds.expected == pytest.approx(without.seconds.expected + waiting)
    assert waiting + step.hidden_s == pytest.approx(2 * moved / link.bytes_per_s)
    assert any("masters and states moved over PCIe 4 x16, 14.2 GB/s each way" in line for line in step.assumptions)
    assert setup.key != replace(setup, offload="none").key


def test_two_cards_of_a_desktop_board_have_eight_lanes_each():
    one, two = (host_link(find_gpu("RTX 5090"), num_gpus=number).bytes_per_s for number in (1, 2))
    assert one == 2 * two
    assert host_link(find_gpu("H100"), num_gpus=2) == host_link(find_gpu("H100"), num_gpus=8)


def test_a_card_whose_way_to_the_host_is_not_known_has_no_time_with_offloading():
    setup = on("RTX 4090", gpt(12))
    unknown = replace(setup, spec=replace(setup.spec, pcie_gen=None), offload="optimizer")
    step = step_time(unknown)
    assert step.seconds is None and step.assumptions[0].endswith("reaches its host's memory is in no table")
    assert step_time(replace(unknown, offload="none")).seconds is not None


def test_a_model_that_fits_one_card_with_offloading_alone():
    with pytest.raises(PlanError) as error:
        planned(replace(DEEP, offload="none"))
    assert error.value.fix == "--offload optimizer needs 13.5 GiB, same total_batch_size"
    plan = planned()
    assert plan.memory["verdict"] == "fits" and plan.offload == "optimizer"
    on_host = fullest_state(memory_setup(plan)).on_host
    assert plan.memory["offloaded_bytes"] == on_host > 12 * GIB
    assert Plan.from_json(plan.to_json()) == plan
    older = {key: value for key, value in json.loads(plan.to_json()).items() if key != "offload"}
    assert Plan.from_json(json.dumps(older)).offload == "none"


def test_the_screen_shows_where_masters_and_states_are():
    plan = planned()
    assert "one device, masters and states on the host" in plan_lines(plan)[3]
    *_, last = memory_lines(plan, bar_width=40)
    assert last.split(maxsplit=4)[:4] == ["host", "memory", "25.9", "GiB"]
    assert last.endswith("of each host: 12.9 GiB page-locked, 12.9 GiB for copies of a checkpoint")
    fp32 = planned(replace(DEEP, depth=12, precision="fp32"))
    assert "one device, states on the host" in plan_lines(fp32)[3]
    with_buffers = replace(plan, memory=plan.memory | {"parts": phases(memory_setup(plan))[3].parts})
    assert any(line.split()[:2] == ["staging", "buffers"] for line in memory_lines(with_buffers, bar_width=40))


def test_a_cpu_has_no_gpu_whose_memory_it_would_save():
    with pytest.raises(PlanError) as error:
        planned(replace(DEEP, depth=4, device="cpu"), Machine((), 4, True, 64 << 30))
    assert "the ranks are on the CPU: there is no GPU whose memory it would save" in error.value.message
    assert error.value.fix == "--offload none"


@pytest.mark.parametrize(
    "gpus, memory_gib, fits", [(1, 32, True), (1, 28, False), (2, 32, True), (2, 28, False), (1, 0, True)]
)
def test_all_ranks_of_a_host_must_have_room_in_its_memory(gpus, memory_gib, fits):
    """25.9 GiB of one rank's, or of two ranks': each has half."""
    machine = replace(imagined_machine(find_gpu("RTX 4090"), gpus=gpus, hosts=1), memory_bytes=memory_gib << 30)
    if fits:
        assert planned(machine=machine).memory["verdict"] == "fits"
        return
    with pytest.raises(PlanError) as error:
        planned(machine=machine)
    assert f"of each host's memory needed to offload the optimizer of {gpus} rank" in error.value.message
    assert error.value.message.endswith("90 % of 28.0 GiB may be used")


def test_a_host_with_too_little_memory_is_told_to_offload_smaller_states_or_nothing():
    machine = replace(ONE_4090, memory_bytes=16 << 30)
    with pytest.raises(PlanError) as error:
        planned(replace(DEEP, offload="none"), machine)
    assert error.value.fix == "--offload optimizer --optimizer-states 8bit needs 13.5 GiB, same total_batch_size"
    with pytest.raises(PlanError) as error:
        planned(replace(DEEP, offload="none"), replace(ONE_4090, memory_bytes=8 << 30))
    assert error.value.fix.startswith("--depth ")


def test_the_check_asks_each_host_for_what_is_offloaded_and_a_checkpoints_copies():
    plan = planned()
    needs = []
    for offload in ("none", "optimizer"):
        config = replace(DEEP, offload=offload)
        intent = training_intent(
            config, replace(plan, offload=offload), command="train", set_keys=frozenset(), run_path=Path("run")
        )
        needs.append(intent.need_host_bytes)
    setup = memory_setup(plan)
    assert needs[1] - needs[0] == fullest_state(setup).on_host + copies_bytes(setup)


@pytest.mark.parametrize("depth, helps", [(20, True), (12, False)])
def test_offloading_helps_where_its_memory_spares_more_work_than_it_costs(depth, helps, tmp_path):
    config = Config(depth=depth, num_steps=100)
    facts = forecast(config, ONE_4090, cache=tmp_path, vocab_size=32_768, num_rows=0)
    gains = {lever.what: lever.gain for lever in facts.levers}
    assert ("--offload optimizer" in gains) == helps
    if helps:
        offloaded = forecast(
            replace(config, offload="optimizer"), ONE_4090, cache=tmp_path, vocab_size=32_768, num_rows=0
        )
        faster = facts.step.seconds.expected / offloaded.step.seconds.expected - 1
        assert gains["--offload optimizer"] == pytest.approx(faster) and faster > 0.1
        assert facts.plan.activation_checkpointing != offloaded.plan.activation_checkpointing
