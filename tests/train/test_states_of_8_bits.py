"""`--optimizer-states 8bit` on 1, 2 and 3 real ranks over gloo, whole runs, and the plan's bytes against a trace."""

from dataclasses import replace

import pytest
import torch
from real_steps import setup_of
from rows import mostly_soak
from runs import Workshop, events, final_bits, metrics
from state_ranks import run_exact, run_ways, ways_of, whole
from test_optim_dist import facts_of_ranks, same_bits

from paceline.plan.memory import peak_phase, phases
from paceline.train.exact import trace_steps
from paceline.train.state_codes import decode

WORLD_SIZES = (1, 2, 3)
CASES = [(name, world_size) for world_size in WORLD_SIZES[:2] for name in ways_of(world_size)]
dist = pytest.mark.dist


@pytest.fixture(scope="module")
def exact(tmp_path_factory) -> dict[int, list[dict]]:
    """What each rank of each world size has after steps without rounding."""
    return facts_of_ranks(tmp_path_factory.mktemp("exact"), WORLD_SIZES, run_exact)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[int, list[dict]]:
    """What each rank of one and of two found in steps of a model."""
    return facts_of_ranks(tmp_path_factory.mktemp("ranks"), WORLD_SIZES[:2], run_ways)


def whole_of(ranks: list[dict], key: tuple, fact: str = "rows") -> dict[str, torch.Tensor]:
    return whole([rank[key][fact] for rank in ranks])


@dist
@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
@pytest.mark.parametrize("name", ["muon", "muon full", "adamw", "adamw full"])
def test_codes_and_weights_are_those_of_one_rank_to_the_last_bit(exact, name, world_size):
    alone = whole([exact[1][0][name.removesuffix(" full")]])
    assert same_bits(whole([rank[name] for rank in exact[world_size]]), alone)
    coded = {key for key, tensor in alone.items() if not tensor.is_floating_point()}
    states = {"momentum_buffer"} if name.startswith("muon") else set()
    small = {"scale", "layer.1.gate"}
    assert {key.rpartition(".")[2] for key in coded} == states | {"exp_avg", "exp_avg_sq", "base"}
    assert not any(f".{param}." in key for key in coded for param in small)  # which are nothing beside the rest


@dist
@pytest.mark.parametrize("world_size", WORLD_SIZES[:2])  # a mean over three ranks rounds
def test_replicated_states_have_the_codes_of_sharded_ones(exact, world_size):
    assert same_bits(whole([exact[world_size][0]["adamw none"]]), whole([exact[1][0]["adamw"]]))


@pytest.mark.soak
@dist
@pytest.mark.parametrize("name, world_size", CASES)
def test_a_broken_run_ends_in_the_bits_of_an_unbroken_one(found, name, world_size):
    ranks = found[world_size]
    assert same_bits(whole_of(ranks, (name, "8bit", "8bit")), whole_of(ranks, (name, "8bit")))
    assert ranks[0][name, "8bit", "8bit"]["losses"] == ranks[0][name, "8bit"]["losses"][2:]


@pytest.mark.soak
@dist
@pytest.mark.parametrize("name, world_size", CASES)
def test_a_run_goes_on_from_the_others_checkpoint(found, name, world_size):
    ranks = found[world_size]
    coded, fp32 = (whole_of(ranks, (name, states), "checkpoint") for states in ("8bit", "fp32"))
    to_fp32, to_codes = (whole_of(ranks, (name, *way), "loaded") for way in (("8bit", "fp32"), ("fp32", "8bit")))
    assert to_fp32.keys() == fp32.keys() and to_codes.keys() == coded.keys()
    for key, tensor in coded.items():
        if key + ".base" in coded:  # exactly the numbers of the codes
            assert torch.equal(to_fp32[key], decode(tensor, coded[key + ".base"]))
            decoded = decode(to_codes[key], to_codes[key + ".base"])
            assert (decoded - fp32[key]).norm() <= 0.06 * fp32[key].norm()
        elif not key.endswith(".base"):
            assert torch.equal(to_fp32[key], tensor) and torch.equal(to_codes[key], fp32[key])
    losses = {key: ranks[0][key]["losses"] for key in ((name, "fp32", "8bit"), (name, "8bit", "fp32"), (name, "fp32"))}
    straight = losses.pop((name, "fp32"))[2:]
    for converted in losses.values():
        assert converted == pytest.approx(straight, rel=0.02)


@pytest.mark.soak
@dist
def test_offloading_keeps_the_bits(found):
    for world_size in WORLD_SIZES[:2]:
        one, other = (whole_of(found[world_size], (name, "8bit")) for name in ("muon bf16", "muon bf16 offloaded"))
        assert same_bits(one, other)


SETUPS = {
    "muon": setup_of(depth=4),
    "AdamW, bf16": setup_of(depth=6, precision="bf16", optimizer="adamw"),
    "AdamW, large tables": setup_of(
        depth=2, optimizer="adamw", vocab_size=32_768, sequence_len=32, device_batch_size=1
    ),
    "replicated AdamW": setup_of(depth=3, optimizer="adamw", shard="none"),
    "two ranks, bf16": setup_of(depth=4, precision="bf16", world_size=2),
    "a GPU": setup_of(depth=6, device="cuda", precision="bf16", device_batch_size=1),
    "a GPU, AdamW, fp32": setup_of(depth=4, device="cuda", optimizer="adamw", device_batch_size=1),
    "a GPU of two, weights sharded": setup_of(depth=4, device="cuda", precision="bf16", world_size=2, shard="full"),
    "a GPU, offloaded": setup_of(depth=4, device="cuda", precision="bf16", device_batch_size=1, offload="optimizer"),
    "a GPU, AdamW, offloaded": setup_of(
        depth=4, device="cuda", precision="bf16", optimizer="adamw", vocab_size=32_768, offload="optimizer"
    ),
}


@pytest.mark.parametrize("name", mostly_soak(SETUPS, short={"a GPU, offloaded"}))
def test_traced_bytes_are_those_of_the_closed_form(name):
    setup = replace(SETUPS[name], optimizer_states="8bit")
    traced, planned = trace_steps(setup).peaks, {phase.name: phase.bytes for phase in phases(setup)}
    assert max(traced.values()) == pytest.approx(peak_phase(setup).bytes, rel=0.03)
    assert traced["optimizer"] == pytest.approx(planned["optimizer"], rel=0.03)


@pytest.mark.soak
@dist
def test_a_whole_run_is_resumed_to_the_same_bits_or_with_fp32_states_which_it_says(tmp_path):
    shop = Workshop(tmp_path)
    run = shop.train("coded", nproc=2, depth=2, num_steps=6, save_every=3, keep_last=5, optimizer_states="8bit")
    assert 'optimizer_states = "8bit"' in (run / "config.toml").read_text()
    unbroken = final_bits(run)
    resumed, converted = (shop.copy(run, name) for name in ("resumed", "converted"))
    for copy, keys in ((resumed, {}), (converted, {"optimizer_states": "fp32"})):
        (copy / "checkpoints" / "step_000006").rename(copy / "gone")
        shop.resume(copy, **keys)
    assert final_bits(resumed) == unbroken
    notes = [[event["text"] for event in events(run, "note")] for run in (resumed, converted)]
    line = "optimizer states converted from the checkpoint's 8bit to fp32"
    assert [line in texts for texts in notes] == [False, True]
    assert not any(key.endswith(".base") for key in final_bits(converted))
    one, other = (metrics(run)[-1]["loss"] for run in (resumed, converted))
    assert one == pytest.approx(other, rel=0.01)
