"""
The worker's steps and evaluations on a card that is not there: graphs, waits, copies, dtypes and collectives.

Every claim is shown to be one that can fail: the walk of a version with that fault is refused by the same check.
"""

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from gpu_proof.fake_card import can_insert, on_card

pytestmark = [
    pytest.mark.slow,
    pytest.mark.compiler,
    pytest.mark.skipif(not can_insert(), reason="needs Linux and the CPU build of PyTorch"),
]

WORLD_SIZES = (1, 2, 4, 8)
EAGER = {"compile": False, "window_pattern": "L"}
SHORT = EAGER | {"gpus": 8}  # a step of one micro-step
COMPILED = {"rounds": 2}
STEP = {"phases": ["step"]}
BY_LAYER = COMPILED | STEP | {"gpus": 2, "depth": 4, "window_pattern": "SSSL"}
FIRST_RANKS = {f"rank 0 of {gpus}": EAGER | {"gpus": gpus} for gpus in WORLD_SIZES}
LAST_RANKS = {f"rank {gpus - 1} of {gpus}": EAGER | STEP | {"gpus": gpus, "rank": gpus - 1} for gpus in WORLD_SIZES[1:]}
RANKS_BETWEEN = {
    f"rank {rank} of {gpus}": EAGER | STEP | {"gpus": gpus, "rank": rank}
    for gpus in WORLD_SIZES
    for rank in range(1, gpus - 1)
}
FULL = EAGER | {"shard": "full", "depth": 3, "n_embd": 128}
SHARDED = {
    f"weights, rank {rank} of {gpus}": FULL | STEP | {"gpus": gpus, "rank": rank}
    for gpus in WORLD_SIZES[1:]
    for rank in (0, gpus - 1)
}
SOUND = {
    "windows": COMPILED | {"phases": ["step", "evaluation", "sample"]},
    "cuDNN and grouped queries": STEP | {"attention": "cudnn", "n_kv_head": 1},
    "without Triton": COMPILED | STEP | {"fused_loss": False},
    "checkpointing and grouped queries": COMPILED | {"activation_checkpointing": True, "n_kv_head": 1} | STEP,
    "layers of rank 0 of 2": BY_LAYER,
    "layers of rank 1 of 2": BY_LAYER | {"rank": 1},
    "adamw": EAGER | STEP | {"gpus": 2, "optimizer": "adamw"},
    **FIRST_RANKS,
    **LAST_RANKS,
    **SHARDED,
    "weights sharded, compiled": COMPILED | {"shard": "full", "gpus": 2, "phases": ["step", "sample"]},
    "weights sharded, checkpointing": FULL | STEP | {"gpus": 2, "activation_checkpointing": True},
}
ONE_LAYER = {"depth": 1}
BROKEN = {
    "a graph break": ONE_LAYER | STEP,
    "gradients sent at the end": EAGER | STEP | {"gpus": 2},
    "a short last batch": ONE_LAYER | {"phases": ["evaluation"]},
    "gradients in an evaluation": ONE_LAYER,
    "an .item() in the step": SHORT,
    "a CPU tensor in a CUDA expression": SHORT,
    "a blocking copy": SHORT,
    "an fp32 product": SHORT,
    "a bf16 master": SHORT,
    "collectives in another order": EAGER | STEP | {"gpus": 2, "rank": 1},
    "gradients sent in fp32": SHORT | STEP,
    "weights gathered late": FULL | STEP | {"gpus": 2},
}
Facts = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("card")


LONG = {  # which compile what others compile too; `make soak` has them
    *("cuDNN and grouped queries", "without Triton", "checkpointing and grouped queries", "layers of rank 1 of 2"),
    *("weights sharded, compiled", "a graph break", "gradients in an evaluation"),
}


class Walks:
    """The facts of walks by name. Those of a tier are made together, in one process that imports the compiler once."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __getitem__(self, name: str) -> Facts:
        return self.tier(name in LONG)[name]

    @functools.cache  # noqa: B019
    def tier(self, long: bool) -> dict[str, Facts]:
        settings = SOUND | {name: keys | {"broken": name} for name, keys in BROKEN.items()}
        settings = {name: keys for name, keys in settings.items() if (name in LONG) == long}
        return dict(zip(settings, on_card(120, "gpu_proof.walk", *settings.values(), folder=self.folder), strict=True))


@pytest.fixture(scope="module")
def walks(folder) -> Walks:
    return Walks(folder)


def tiered(names: Iterable[str]) -> list[Any]:
    """The names as parameters; the long ones are of the soak tier."""
    return [pytest.param(name, marks=pytest.mark.soak) if name in LONG else name for name in names]


# what each phase compiles the first time: the loss is outside of the model's graph, and a graph gives the nats their shape
GRAPHS = {"step": ["forward"], "evaluation": ["forward", "rest of forward"]}
# of four layers the first and the third share a graph; others have a value embedding, and the last one no window
PARTS = ["stem", "forward", "forward", "forward", "backout"]
BREAK = "Skip calling `torch.compiler.disable()`d function"  # before the loss


def check_graphs(facts: Facts, graphs: dict[str, list[str]] = GRAPHS) -> None:
    assert facts["error"] is None
    expected = dict(graphs)
    assert facts["graphs"] == [[phase, expected.pop(phase, [])] for phase, _ in facts["graphs"]]
    assert set(facts["breaks"]) == {BREAK}


def check_waits(facts: Facts) -> None:
    assert facts["error"] is None
    assert facts["step"]["waits"] == ["train/loop.py:one_step"]  # whose comment says why
    assert facts["evaluation"]["waits"] == ["train/evaluate.py:val_bpb"]  # after the last batch
    for phase in ("step", "evaluation"):  # from pinned memory, while the CPU goes on
        assert {(place, in_passing) for place, in_passing, _ in facts[phase]["copies"]} == {
            ("train/loop.py:to_device", True)
        }


def check_dtypes(facts: Facts) -> None:
    assert facts["error"] is None
    phases = [phase for phase in ("step", "evaluation") if phase in facts]
    assert {dtype for phase in phases for _, dtype, _ in facts[phase]["products"]} == {"bfloat16"}
    assert facts["masters"] == ["torch.float32"]


def check_collectives(ranks: list[Facts], gpus: int) -> None:
    """The same on all ranks, and what the planner counts."""
    assert all(facts["error"] is None for facts in ranks)
    sent = [facts["step"]["collectives"] for facts in ranks]
    assert all(other == sent[0] for other in sent)
    planned, extras = ranks[0]["messages"], 4 * (3 + gpus)  # nats, requests, squares, and a number for each rank
    assert of_kind(sent[0], "_reduce_scatter_base_") == planned["reduce_scatter"]
    assert sorted(of_kind(sent[0], "_allgather_base_")) == sorted(planned["all_gather"])
    assert of_kind(sent[0], "allreduce_") == [size + extras for size in planned["all_reduce"]]
    assert len(sent[0]) == sum(map(len, planned.values()))


def check_overlap(facts: Facts) -> None:
    """Gradients are sent while there is work left: lm_head's before the backward of the layers, the others' under it."""
    assert facts["error"] is None
    step = facts["step"]
    sent = zip(step["collectives"], step["products_before"], strict=True)
    begun = [before for (name, _), before in sent if name == "_reduce_scatter_base_"]
    in_backward = sum(count for place, _, count in step["products"] if place == "backward") // facts["micro_steps"]
    in_model = sum(count for place, _, count in step["products"] if place != "train/updates.py:orthogonalize")
    assert in_model - begun[0] == in_backward  # all products of the layers' backward are to come
    assert all(before < in_model for before in begun[:-1])  # but for the embeddings', which come last


def check_gathers(facts: Facts) -> None:
    """Weights are sent while the part before works, all but the first part's, with which each micro-step begins."""
    assert facts["error"] is None
    order = facts["step"]["order"]
    for at, (name, bucket, before) in enumerate(order):
        if name == "gather" and bucket != order[0][1]:
            waits = [products for what, number, products in order[at:] if (what, number) == ("wait", bucket)]
            assert waits[0] > before


def of_kind(collectives: list[tuple[str, int]], kind: str) -> list[int]:
    return [size for name, size in collectives if name == kind]


@pytest.mark.parametrize("name", tiered(["windows", "cuDNN and grouped queries", "checkpointing and grouped queries"]))
def test_a_compiled_model_is_one_graph_beside_the_loss_and_nothing_is_compiled_again(walks, name):
    check_graphs(walks[name])


@pytest.mark.parametrize("name", tiered(["windows", "checkpointing and grouped queries"]))
def test_windows_and_full_layers_are_flash_operators(walks, name):
    assert walks[name]["step"]["attention"] == ["_flash_attention_backward", "_flash_attention_forward"]


def test_a_prompt_s_windows_are_flash_operators_too(walks):
    """A new token's query sees all keys that its cache holds."""
    assert walks["windows"]["sample"]["attention"] == [
        "_flash_attention_forward",
        "_scaled_dot_product_flash_attention",
    ]


@pytest.mark.soak
def test_other_ways_of_attention_are_taken_as_they_are_set(walks):
    assert walks["cuDNN and grouped queries"]["step"]["attention"] == [
        "_flash_attention_backward",
        "_flash_attention_forward",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_cudnn_attention_backward",
    ]


@pytest.mark.soak
def test_without_triton_the_loss_is_a_graph_of_its_own(walks):
    check_graphs(walks["without Triton"], {"step": ["forward", "capped_nats_"]})


@pytest.mark.parametrize("name", tiered(["a graph break", "a short last batch", "gradients in an evaluation"]))
def test_more_graphs_are_noticed(walks, name):
    with pytest.raises(AssertionError):
        check_graphs(walks[name])


def test_beside_other_ranks_each_kind_of_layer_is_a_graph_without_breaks(walks):
    facts = walks["layers of rank 0 of 2"]
    assert facts["error"] is None and facts["breaks"] == []
    assert facts["graphs"] == [["step", PARTS], ["step", []]]


@pytest.mark.parametrize("name", ["rank 0 of 2", "adamw"])
def test_gradients_are_sent_under_the_backward(walks, name):
    check_overlap(walks[name])


def test_gradients_that_are_sent_only_at_the_end_are_noticed(walks):
    with pytest.raises(AssertionError):
        check_overlap(walks["gradients sent at the end"])


@pytest.mark.parametrize("name", ["windows", *FIRST_RANKS])
def test_the_cpu_waits_once_in_a_step_and_once_in_an_evaluation(walks, name):
    check_waits(walks[name])


def test_a_sample_compiles_nothing_and_waits_for_its_tokens_alone(walks):
    assert ["sample", []] in walks["windows"]["graphs"]
    assert walks["windows"]["sample"]["waits"] == ["train/evaluate.py:next_tokens"]


@pytest.mark.parametrize("name", ["an .item() in the step", "a CPU tensor in a CUDA expression", "a blocking copy"])
def test_more_waits_and_tensors_on_the_wrong_device_are_noticed(walks, name):
    with pytest.raises(AssertionError):
        check_waits(walks[name])


@pytest.mark.parametrize("name", tiered(SOUND))
def test_products_are_in_bf16_and_master_weights_in_fp32(walks, name):
    check_dtypes(walks[name])


@pytest.mark.parametrize("name", ["an fp32 product", "a bf16 master"])
def test_other_dtypes_are_noticed(walks, name):
    with pytest.raises(AssertionError):
        check_dtypes(walks[name])


@pytest.mark.parametrize("gpus", WORLD_SIZES)
def test_the_first_and_the_last_rank_send_the_same_in_the_same_order_as_many_bytes_as_planned(walks, gpus):
    check_collectives([walks[f"rank {rank} of {gpus}"] for rank in sorted({0, gpus - 1})], gpus)


@pytest.mark.soak
def test_compiled_ranks_send_what_eager_ones_do(walks):
    check_collectives([walks[f"layers of rank {rank} of 2"] for rank in range(2)], 2)


@pytest.mark.soak
def test_the_ranks_between_send_the_same(walks, folder):
    between = on_card(120, "gpu_proof.walk", *RANKS_BETWEEN.values(), folder=folder)
    for keys, facts in zip(RANKS_BETWEEN.values(), between, strict=True):
        check_collectives([walks[f"rank 0 of {keys['gpus']}"], facts], keys["gpus"])
        check_dtypes(facts)


@pytest.mark.parametrize("gpus", WORLD_SIZES[1:])
def test_the_first_and_the_last_rank_gather_the_same_weights_in_the_same_order_as_many_bytes_as_planned(walks, gpus):
    ranks = [walks[f"weights, rank {rank} of {gpus}"] for rank in (0, gpus - 1)]
    check_collectives(ranks, gpus=gpus)
    check_gathers(ranks[0])


def test_recomputed_layers_gather_their_embeddings_again(walks):
    check_collectives([walks["weights sharded, checkpointing"]], gpus=2)
    without = walks["weights, rank 0 of 2"]["messages"]["all_gather"]
    assert len(walks["weights sharded, checkpointing"]["messages"]["all_gather"]) > len(without)


def test_weights_gathered_late_are_noticed(walks):
    with pytest.raises(AssertionError):
        check_gathers(walks["weights gathered late"])


@pytest.mark.soak
def test_compiled_layers_gather_their_weights_outside_of_the_graphs(walks):
    facts = walks["weights sharded, compiled"]
    assert facts["error"] is None
    assert [phase for phase, graphs in facts["graphs"] if graphs] == ["step"]  # none in the second round
    assert facts["breaks"] == []
    assert facts["step"]["waits"] == ["train/loop.py:one_step"]
    assert {dtype for _, dtype, _ in facts["step"]["products"]} == {"bfloat16"}


@pytest.mark.parametrize("name, gpus", [("collectives in another order", 2), ("gradients sent in fp32", 8)])
def test_another_order_on_one_rank_and_other_bytes_are_noticed(walks, name, gpus):
    with pytest.raises(AssertionError):
        check_collectives([walks[f"rank 0 of {gpus}"], walks[name]], gpus)
