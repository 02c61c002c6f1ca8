"""
How many kernels a step of depth 12 launches on two cards that are not there, and FlexAttention's shared memory: what
test_kernels.py takes minutes for, in the part that matters most.

Every claim is shown to be one that can fail: the kernels of a version with that fault are refused by the same check.
"""

from collections.abc import Callable
from typing import Any

import pytest
from gpu_proof.cases import NEEDS_CARD, NEEDS_TRITON
from gpu_proof.fake_card import CARDS, on_card
from gpu_proof.table import UPDATE

pytestmark = [pytest.mark.soak, pytest.mark.compiler, NEEDS_CARD, NEEDS_TRITON]

# a fused kernel that is split costs a launch and a pass over memory in every layer and micro-step, so these are today's counts:
# of a layer with a value embedding, the products and flash attention included
LAYER_LAUNCHES = {"forward": 14, "backward": 22}
# of gradients into buckets, and of an update op by op: 17 batches of this rank's matrices, and rows
UPDATE_LAUNCHES = 1163
STEP = {"depth": 12, "window_pattern": "SSSL", "gpus": 2, "total_batch_size": 2 * 8 * 2048, "phases": ["step"]}
STEP |= {"binaries": False}
FLEX = {"head_dim 128": {"flex": 128}}
WIDE_FLEX = "head_dim 256"
SPLIT = "a reduction over all tokens in a layer"
SINGLE = "matrices updated one by one"
WALKS: dict[int, dict[str, dict[str, Any]]] = {
    90: FLEX | {"step": STEP},
    120: FLEX
    | {
        "step": STEP,
        WIDE_FLEX: {"flex": 256},
        SPLIT: STEP | {"depth": 2, "broken": SPLIT},
        SINGLE: STEP | {"depth": 6, "compile": False, "broken": SINGLE},
    },
}
ON_CARDS = pytest.mark.parametrize("capability", WALKS)
Facts = dict[str, Any]


@pytest.fixture(scope="module")
def walks(tmp_path_factory) -> Callable[[int], dict[str, Facts]]:
    """Returns the facts of a card's walks by name, which one process makes."""
    folder, made = tmp_path_factory.mktemp("card"), dict[int, dict[str, Facts]]()

    def of_card(capability: int) -> dict[str, Facts]:
        if capability not in made:
            settings = WALKS[capability]
            facts = on_card(capability, "gpu_proof.kernels", capability, *settings.values(), folder=folder)
            made[capability] = dict(zip(settings, facts, strict=True))
        return made[capability]

    return of_card


def check_layers(facts: Facts) -> None:
    """The graphs of the layers, a forward and its backward in turns, launch no more than they have to."""
    assert facts["error"] is None and facts["breaks"] == []
    layers = [program for program in facts["programs"] if program["graph"] == "forward"]
    assert len(layers) % 2 == 0 and layers
    for at, program in enumerate(layers):
        assert launches_of(program) <= LAYER_LAUNCHES["backward" if at % 2 else "forward"], program


def launches_of(program: dict[str, Any]) -> int:
    return len(program["launches"]) + program["num_products"] + len(program["eager_ops"])


def check_update(facts: Facts) -> None:
    assert facts["error"] is None
    counts = {place: count for place, (count, _) in facts["step"]["work"].items() if place.startswith(UPDATE)}
    assert 0 < sum(counts.values()) <= UPDATE_LAUNCHES, counts


def check_shared_memory(facts: Facts, capability: int) -> None:
    templates = [binary for binary in facts["binaries"] if "_tem_" in binary["kernel"]]
    assert {binary["error"] for binary in templates} == {None} and len(templates) > 1  # forward and backward
    assert max(binary["shared_bytes"] for binary in templates) <= CARDS[capability].shared_bytes


@ON_CARDS
def test_a_layer_of_depth_12_launches_no_more_kernels_than_today(walks, capability):
    check_layers(walks(capability)["step"])


@ON_CARDS
def test_an_update_of_depth_12_launches_no_more_kernels_than_today(walks, capability):
    check_update(walks(capability)["step"])


@ON_CARDS
def test_flex_attention_fits_the_shared_memory_of_a_card(walks, capability):
    check_shared_memory(walks(capability)["head_dim 128"], capability)


@ON_CARDS
def test_one_gpu_s_graph_of_depth_12_launches_no_more_kernels_than_today(tmp_path, capability):
    """The whole model is one graph there, and all matrices of a shape are updated together."""
    alone = STEP | {"gpus": 1, "total_batch_size": 8 * 2048}
    (facts,) = on_card(capability, "gpu_proof.kernels", capability, alone, folder=tmp_path)
    assert facts["error"] is None
    forward, backward = map(launches_of, facts["programs"][:2])
    assert forward <= 150 and backward <= 268
    assert sum(count for place, (count, _) in facts["step"]["work"].items() if place.startswith(UPDATE)) <= 342


def test_a_layer_whose_fusions_are_split_is_noticed(walks):
    facts = walks(120)[SPLIT]
    assert facts["error"] is None and facts["breaks"] == []
    with pytest.raises(AssertionError):
        check_layers(facts)


def test_matrices_that_are_updated_one_by_one_are_noticed(walks):
    assert walks(120)[SINGLE]["error"] is None
    with pytest.raises(AssertionError):
        check_update(walks(120)[SINGLE])


def test_flex_attention_that_is_too_large_for_a_card_is_noticed(walks):
    """Its backward at head_dim 256, pytorch issue 198224."""
    facts = walks(120)[WIDE_FLEX]
    assert max(binary["shared_bytes"] for binary in facts["binaries"]) == 114_688
    with pytest.raises(AssertionError):
        check_shared_memory(facts, 120)
