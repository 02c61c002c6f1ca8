"""Sharded weights (`--shard full`) on 1, 2 and 3 real ranks over gloo, against replicated ones."""

import pytest
import torch
from full_shard_ranks import WAYS, run_rank
from test_optim_dist import facts_of_ranks, gathered, same_bits

pytestmark = pytest.mark.dist

WORLD_SIZES = (1, 2, 3)
EAGER = tuple(name for name in WAYS if name != "compiled")


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[int, list[dict]]:
    return facts_of_ranks(tmp_path_factory.mktemp("ranks"), WORLD_SIZES, run_rank, EAGER)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> list[dict]:
    return facts_of_ranks(tmp_path_factory.mktemp("compiled"), (2,), run_rank, ("compiled",))[2]


def all_rows(ranks: list[dict], name: str) -> dict[str, torch.Tensor]:
    return gathered([rank[name]["rows"] for rank in ranks])


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_first_loss_is_that_of_one_rank_and_the_second_too_up_to_rounding(found, world_size):
    alone = found[1][0]["optimizer"]["losses"]
    for rank in found[world_size]:
        assert rank["full"]["losses"][0] == pytest.approx(alone[0], abs=1e-5)
        assert rank["full"]["losses"] == pytest.approx(alone, abs=1e-3)


def check_bits(ranks: list[dict], name: str) -> None:
    """Weights and states after two steps, an evaluation and a sample are those of replicated weights."""
    full, replicated = (all_rows(ranks, f"{name} {shard}") for shard in ("full", "optimizer"))
    assert same_bits(full, replicated)
    assert not any(tensor.isnan().any() for tensor in full.values())
    for rank in ranks:
        assert torch.equal(rank[f"{name} full"]["nats"], rank[f"{name} optimizer"]["nats"])
        assert rank[f"{name} full"]["sample"] == rank[f"{name} optimizer"]["sample"]


@pytest.mark.parametrize("name", EAGER)
def test_two_ranks_with_one_micro_step_have_the_bits_of_replicated_weights(found, name):
    check_bits(found[2], name)


@pytest.mark.soak
def test_compiled_layers_have_the_bits_of_replicated_weights(compiled):
    check_bits(compiled, "compiled")


@pytest.mark.parametrize("name", ["checkpointed", "MLPs checkpointed"])
def test_recomputed_activations_change_no_bit(found, name):
    assert same_bits(all_rows(found[2], f"{name} full"), all_rows(found[2], "one micro-step full"))


def test_a_run_that_changes_between_shard_modes_ends_in_the_bits_of_one_that_does_not(found):
    assert same_bits(*(gathered([rank[name] for rank in found[2]]) for name in ("switched", "unbroken")))


@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
def test_between_steps_a_rank_holds_no_weights_but_the_small_ones(found, world_size):
    for rank in found[world_size]:
        assert rank["full"]["memory"] < 400 < 100_000 < rank["optimizer"]["memory"]
