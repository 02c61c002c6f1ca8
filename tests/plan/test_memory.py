"""The phases of a step and their parts, in figures that can be checked by hand, and what always holds between setups."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paceline.config import ModelConfig
from paceline.plan.activations import MemorySetup, chunk_sizes, loss_bytes, saved_bytes, stem_bytes
from paceline.plan.cost import RunSetup
from paceline.plan.memory import Phase, fullest_state, peak_phase, phases, state_bytes
from paceline.plan.shapes import param_shapes

MIB = 1 << 20
MODEL = ModelConfig(n_layer=2, n_embd=128, n_head=2, n_kv_head=2, head_dim=64, sequence_len=256, vocab_size=1024)
SETUP = MemorySetup(
    model=MODEL,
    device="cuda",
    world_size=1,
    optimizer="adamw",
    shard="optimizer",
    precision="bf16",
    device_batch_size=4,
    grad_accum_steps=2,
    logits_budget_bytes=256 * MIB,
    activation_checkpointing=False,
    attention="flash",
    compiled=False,
)
NUM_TOKENS = 4 * 256
STREAM = NUM_TOKENS * 128 * 2  # (B, T, C) in bf16
NUMEL = sum(shape.numel for shape in param_shapes(MODEL))


def by_name(setup: MemorySetup) -> dict[str, Phase]:
    return {phase.name: phase for phase in phases(setup)}


def test_the_stem_is_tokens_the_stream_twice_a_gate_with_its_input_and_the_angles():
    tokens, gate, angles = 2 * 8 * NUM_TOKENS, (3 + 24) * 2 * NUM_TOKENS, 2 * 2 * 256 * 64
    assert stem_bytes(SETUP, compiled=False) == tokens + 2 * STREAM + gate + angles


def test_a_layer_keeps_sixteen_streams_and_what_is_small():
    """Of the last layer, with a value embedding: input, 2 norms, q, k, v, the output, 4 + 4 of the MLP, the value embedding."""
    norms, qk_norms, row_sums = 2 * 2 * NUM_TOKENS, 2 * (2 + 2) * NUM_TOKENS, 4 * 2 * NUM_TOKENS
    gate = 2 * (2 * 2 + 12) * NUM_TOKENS
    assert saved_bytes(SETUP, 1) == 16 * STREAM + norms + qk_norms + row_sums + gate
    assert saved_bytes(SETUP, 0) == 14 * STREAM + norms + qk_norms + row_sums  # its input is the stem's


def test_a_checkpointed_layer_keeps_its_input():
    checkpointed = replace(SETUP, activation_checkpointing=True)
    assert [saved_bytes(checkpointed, layer) for layer in (0, 1)] == [0, STREAM]


def test_the_loss_keeps_two_gradients_and_works_on_one_chunk_of_logits():
    saved, working = loss_bytes(SETUP)
    assert chunk_sizes(SETUP) == (NUM_TOKENS, NUM_TOKENS)
    assert saved == STREAM + 4 * 1024 * 128
    logits = NUM_TOKENS * 1024
    assert working == 2 * logits  # their gradient takes their place


def test_a_small_budget_cuts_the_loss_into_chunks():
    small = replace(SETUP, logits_budget_bytes=MIB)
    assert chunk_sizes(small) == (512, 512)
    assert loss_bytes(small)[1] == MIB


def test_a_cpu_s_budget_is_for_copies_too():
    on_cpu = replace(SETUP, device="cpu", attention="cpu", logits_budget_bytes=MIB)
    assert chunk_sizes(on_cpu) == (256, 32)  # half the budget for logits in bf16, an eighth for each copy in fp32


def test_a_cpu_widens_the_chunk_that_it_adds_to_the_gradient():
    on_cpu = replace(SETUP, device="cpu", attention="cpu", logits_budget_bytes=MIB)
    assert loss_bytes(on_cpu)[1] == 256 * 1024 * 2 + (2 + 4) * 1024 * 128


def test_a_rank_holds_eighteen_bytes_a_parameter_from_step_to_step():
    """bf16 weights, fp32 gradients, masters and two states; tensors under 1,024 elements need no master and are fp32."""
    state_size = by_name(SETUP)["optimizer"].parts
    small = sum(shape.numel for shape in param_shapes(MODEL) if shape.numel < 1024)
    assert state_size["weights"] == 2 * (NUMEL - small) + 4 * small
    assert (state_size["gradients"], state_size["masters"], state_size["states"]) == (
        4 * NUMEL,
        4 * (NUMEL - small),
        8 * NUMEL,
    )
    assert "communication" not in state_size


def test_one_micro_step_of_one_rank_makes_its_gradients_in_the_backward():
    several, single = by_name(SETUP), by_name(replace(SETUP, grad_accum_steps=1))
    assert several["forward"].parts["gradients"] == 4 * NUMEL and single["forward"].parts["gradients"] == 0
    assert 0 < single["backward"].parts["gradients"] < 4 * NUMEL
    assert single["optimizer"].parts["gradients"] == 4 * NUMEL


def test_ddp_holds_gradients_twice_until_the_last_micro_step():
    """Its buckets, and the tensors that earlier micro-steps add to."""
    ddp = replace(SETUP, shard="none", world_size=2)
    assert by_name(ddp)["forward"].parts["gradients"] == 8 * NUMEL
    assert by_name(replace(ddp, grad_accum_steps=1))["forward"].parts["gradients"] == 4 * NUMEL
    assert by_name(ddp)["optimizer"].parts["gradients"] == 4 * NUMEL


def test_a_window_saves_probabilities_on_a_cpu():
    on_cpu = replace(SETUP, device="cpu", attention="cpu")
    windowed = replace(on_cpu, model=replace(MODEL, window_pattern="S"))
    assert peak_phase(windowed).bytes < peak_phase(on_cpu).bytes


@pytest.mark.parametrize("attention, scores", [("flash", 0), ("efficient", 0), ("math", 4 * 4 * 2 * 256**2)])
def test_only_the_math_kernel_keeps_scores(attention, scores):
    longer = replace(MODEL, sequence_len=512)
    once, twice = (saved_bytes(replace(SETUP, attention=attention, model=model), 0) for model in (MODEL, longer))
    assert twice - 2 * once == 2 * scores  # all but scores grows as the tokens do


@st.composite
def setups(draw: st.DrawFn) -> MemorySetup:
    device = draw(st.sampled_from(["cpu", "cuda"]))
    heads = draw(st.integers(1, 6))
    model = ModelConfig(
        n_layer=draw(st.integers(1, 12)),
        n_embd=64 * heads,
        n_head=heads,
        n_kv_head=draw(st.sampled_from([1, heads])),
        head_dim=64,
        sequence_len=draw(st.sampled_from([64, 500, 1024])),
        vocab_size=draw(st.integers(256, 40_000)),
    )
    optimizer, shard = draw(st.sampled_from([("muon", "optimizer"), ("adamw", "optimizer"), ("adamw", "none")]))
    return MemorySetup(
        model=model,
        device=device,
        world_size=draw(st.sampled_from([1, 2, 4])),
        optimizer=optimizer,
        shard=shard,
        precision=draw(st.sampled_from(["fp32", "bf16", "fp16"])),
        device_batch_size=draw(st.integers(1, 16)),
        grad_accum_steps=draw(st.integers(1, 3)),
        logits_budget_bytes=draw(st.sampled_from([32, 256, 1024])) * MIB,
        activation_checkpointing=draw(st.booleans()),
        attention="cpu" if device == "cpu" else draw(st.sampled_from(["flash", "math"])),
        compiled=False,
    )


@settings(max_examples=60)
@given(setups())
def test_another_row_never_needs_less(setup):
    more = replace(setup, device_batch_size=setup.device_batch_size + 1)
    for phase, larger in zip(phases(setup), phases(more), strict=True):
        assert phase.bytes <= larger.bytes, phase.name


@settings(max_examples=60)
@given(setups())
def test_checkpointing_of_several_layers_never_needs_more(setup):
    assume(setup.model.n_layer > 1)
    with_it, without = (peak_phase(replace(setup, activation_checkpointing=on)).bytes for on in (True, False))
    assert with_it <= without


@settings(max_examples=60)
@given(setups())
def test_twice_the_ranks_hold_no_more_each(setup):
    """Masters and states are shared out; padding of buckets is the exception, and small."""
    assume(setup.shard == "optimizer")
    state_size, halved = (fullest_state(replace(setup, world_size=size)) for size in (2, 4))
    assert halved.states + halved.masters <= 1.05 * (state_size.states + state_size.masters)


@settings(max_examples=60)
@given(setups())
def test_a_smaller_budget_for_logits_never_needs_more(setup):
    """Once there are several chunks: with one alone, the weight's gradient comes after the copies and not beside them."""
    while chunk_sizes(setup)[0] >= setup.num_tokens and setup.logits_budget_bytes > 1:
        setup = replace(setup, logits_budget_bytes=setup.logits_budget_bytes // 2)
    smaller = replace(setup, logits_budget_bytes=setup.logits_budget_bytes // 2)
    assert loss_bytes(smaller)[1] <= loss_bytes(setup)[1]


@pytest.mark.parametrize("accum, sum_bytes", [(1, 4), (4, 0)])
def test_a_gpu_receives_the_sum_of_gradients_where_they_lie(accum, sum_bytes):
    """Only bf16 gradients, of a single micro-step, have a sum of their own: fp32, of this rank's segments."""
    setup = RunSetup(MODEL, "cuda", 2, "bf16", "muon", "optimizer", 1, accum)
    segment = sum(bucket.segment for bucket in setup.layout.buckets)
    assert state_bytes(setup, rank=0).communication == sum_bytes * segment
