"""
The worker's steps, evaluations, samples and checkpoints on a card that is not there: graphs, waits, copies, streams, dtypes,
collectives, random numbers and bytes.

Every claim is shown to be one that can fail: the walk of a version with that fault is refused by the same check.
"""

from pathlib import Path

import pytest
from gpu_proof.cases import (
    FIRST_RANKS,
    NEEDS_CARD,
    RANKS_BETWEEN,
    REPLICATED,
    SHARDED,
    SOUND,
    WORLD_SIZES,
    Facts,
    Walks,
    tiered,
    tiered_pairs,
    tiered_sizes,
)
from gpu_proof.fake_card import on_card

pytestmark = [pytest.mark.slow, pytest.mark.compiler, NEEDS_CARD]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("card")


@pytest.fixture(scope="module")
def walks(folder) -> Walks:
    return Walks(folder)


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


def check_averages(ranks: list[Facts], gpus: int) -> None:
    """DDP sends the planned buckets, and each but the last while there is work left."""
    assert all(facts["error"] is None for facts in ranks)
    first, *others = [facts["step"] for facts in ranks]
    assert all(other["collectives"] == first["collectives"] for other in others)
    # rank 0's table of buckets, after the first step
    averages = [
        sent for sent in zip(first["collectives"], first["products_before"], strict=True) if sent[0][0] != "broadcast_"
    ]
    *buckets, extras = averages
    assert {name for (name, _), _ in averages} == {"allreduce_"}
    assert [size for (_, size), _ in buckets] == ranks[0]["messages"]["all_reduce"]
    assert extras[0][1] == 4 * (2 + gpus)  # nats, requests, and a number for each rank
    in_model = sum(count for _, _, count in first["products"])
    assert all(before < in_model for _, before in buckets[:-1]) and len(buckets) > 1


def check_streams(facts: Facts) -> None:
    """One stream does everything but collectives, waits for each of these once, and touches nothing that they are at work on."""
    assert facts["error"] is None
    step = facts["step"]
    assert {tuple(kind_and_stream) for *kind_and_stream, _ in step["streams"]} <= {
        ("kernel", "default"),
        ("copy", "default"),
        ("collective", "NCCL"),
    }
    assert {how for how, _, _ in step["joins"]} <= {"work.wait"}
    # rank 0's table of buckets is waited for within DDP
    assert len(step["joins"]) == len([name for name, _ in step["collectives"] if name != "broadcast_"])
    assert step["races"] == []


def check_waits_of_streams(facts: Facts) -> None:
    """Nothing waits before the backward has ended: sums then, the small tensors, and the weights after the whole update."""
    assert facts["error"] is None
    step, planned = facts["step"], facts["messages"]
    in_all = sum(count for _, _, count in step["products"])
    backward_end = in_all - sum(
        count for place, _, count in step["products"] if place == "train/updates.py:orthogonalize"
    )
    sums, weights = len(planned["reduce_scatter"]), len(planned["all_gather"])
    assert [tuple(join) for join in step["joins"]] == [
        *[("work.wait", "train/buckets.py:wait", backward_end)] * sums,
        ("work.wait", "train/process.py:all_reduce_sum", backward_end),
        *[("work.wait", "train/optim.py:step", in_all)] * weights,
    ]


def check_reads(facts: Facts) -> None:
    """A thread has read all rows but the run's first ones ahead, and each micro-step begins with their copies."""
    assert facts["error"] is None
    step, micro_steps = facts["step"], facts["micro_steps"]
    threads = {micro_step: thread for _, micro_step, thread, _ in facts["reads"]}
    assert threads == {0: "MainThread"} | dict.fromkeys(range(1, micro_steps), "loader")
    in_model = sum(count for place, _, count in step["products"] if place != "train/updates.py:orthogonalize")
    begins = [in_model // micro_steps * micro_step for micro_step in range(micro_steps)]
    assert step["copies_before"] == [begin for begin in begins for _ in ("idx", "targets")]


def check_draws(facts: Facts) -> None:
    assert facts["error"] is None
    for phase in {"step", "evaluation", "save"} & set(facts):
        assert facts[phase]["draws"] == []
    if "sample" in facts:  # on the CPU: a seed then gives the same text on every device
        assert facts["sample"]["draws"] == [["train/evaluate.py:next_tokens", "cpu", "own, cpu, seed 1", 3]]


def check_resumption(facts: Facts) -> None:
    """The card's copies have ended when they are written, generators go on where they were, and the rows are those of the step."""
    assert facts["error"] is None
    assert facts["save"]["copies_to_host"] > 0 and facts["save"]["unfinished"] == []
    assert facts["save"]["waits"] == ["model/checkpoint.py:_copy"]
    saved, resumed = facts["save"]["generators"], facts["resume"]
    assert resumed["generators"] == saved
    assert all(resumed["fresh"][device] != saved[device] for device in ("cpu", "cuda"))
    continued, reread = resumed["rows"]
    assert resumed["start"] == 1 and continued == reread


def check_bytes(facts: Facts) -> None:
    assert facts["error"] is None
    assert facts["planned_bytes"] == pytest.approx(facts["traced_bytes"], rel=0.015)


def of_kind(collectives: list[tuple[str, int]], kind: str) -> list[int]:
    return [size for name, size in collectives if name == kind]


@pytest.mark.parametrize("name", tiered(["windows", "cuDNN and grouped queries", "checkpointing and grouped queries"]))
def test_a_compiled_model_is_one_graph_beside_the_loss_and_nothing_is_compiled_again(walks, name):
    check_graphs(walks[name])


@pytest.mark.parametrize("name", tiered(["windows", "checkpointing and grouped queries"]))
def test_windows_and_full_layers_are_flash_operators(walks, name):
    assert walks[name]["step"]["attention"] == ["_flash_attention_backward", "_flash_attention_forward"]


@pytest.mark.soak
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


@pytest.mark.soak
def test_beside_other_ranks_each_kind_of_layer_is_a_graph_without_breaks(walks):
    facts = walks["layers of rank 0 of 2"]
    assert facts["error"] is None and facts["breaks"] == []
    assert facts["graphs"] == [["step", PARTS], ["step", []]]


@pytest.mark.parametrize("name", ["rank 0 of 2", "adamw"])
def test_gradients_are_sent_under_the_backward(walks, name):
    check_overlap(walks[name])


@pytest.mark.parametrize("name", tiered(["windows", *FIRST_RANKS]))
def test_the_cpu_waits_once_in_a_step_and_once_in_an_evaluation(walks, name):
    check_waits(walks[name])


@pytest.mark.soak
def test_a_sample_compiles_nothing_and_waits_for_its_tokens_alone(walks):
    assert ["sample", []] in walks["windows"]["graphs"]
    assert walks["windows"]["sample"]["waits"] == ["train/evaluate.py:next_tokens"]


@pytest.mark.parametrize("name", tiered(SOUND))
def test_products_are_in_bf16_and_master_weights_in_fp32(walks, name):
    check_dtypes(walks[name])


@pytest.mark.parametrize("gpus", tiered_sizes(WORLD_SIZES))
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


@pytest.mark.parametrize("gpus", tiered_sizes(WORLD_SIZES[1:], "weights, "))
def test_the_first_and_the_last_rank_gather_the_same_weights_in_the_same_order_as_many_bytes_as_planned(walks, gpus):
    ranks = [walks[f"weights, rank {rank} of {gpus}"] for rank in (0, gpus - 1)]
    check_collectives(ranks, gpus=gpus)
    check_gathers(ranks[0])


@pytest.mark.soak
def test_recomputed_layers_gather_their_embeddings_again(walks):
    check_collectives([walks["weights sharded, checkpointing"]], gpus=2)
    without = walks["weights, rank 0 of 2"]["messages"]["all_gather"]
    assert len(walks["weights sharded, checkpointing"]["messages"]["all_gather"]) > len(without)


@pytest.mark.soak
def test_compiled_layers_gather_their_weights_outside_of_the_graphs(walks):
    facts = walks["weights sharded, compiled"]
    assert facts["error"] is None
    assert [phase for phase, graphs in facts["graphs"] if graphs] == ["step"]  # none in the second round
    assert facts["breaks"] == []
    assert facts["step"]["waits"] == ["train/loop.py:one_step"]
    assert {dtype for _, dtype, _ in facts["step"]["products"]} == {"bfloat16"}


@pytest.mark.parametrize("name, gpus", tiered_pairs({"collectives in another order": 2, "gradients sent in fp32": 8}))
def test_another_order_on_one_rank_and_other_bytes_are_noticed(walks, name, gpus):
    with pytest.raises(AssertionError):
        check_collectives([walks[f"rank 0 of {gpus}"], walks[name]], gpus)


@pytest.mark.parametrize("gpus", tiered_sizes((2, 8), "DDP, "))
def test_ddp_sends_every_gradient_once_under_the_backward_and_the_same_on_all_ranks(walks, gpus):
    """By PyTorch's own reducer, in its buckets of the second step."""
    check_averages([walks[f"DDP, rank {rank} of {gpus}"] for rank in (0, gpus - 1)], gpus)


@pytest.mark.parametrize(
    "name, gpus", tiered_pairs({"gradients sent in every micro-step": 2, "gradients in one bucket": 8})
)
def test_other_averages_are_noticed(walks, name, gpus):
    with pytest.raises(AssertionError):
        check_averages([walks[name]], gpus)


@pytest.mark.parametrize(
    "name", tiered([*FIRST_RANKS, *SHARDED, *REPLICATED, "adamw", "resumed", "windows", "layers of rank 0 of 2"])
)
def test_one_stream_does_all_but_the_collectives_and_waits_for_each_of_these_once(walks, name):
    check_streams(walks[name])


@pytest.mark.parametrize("name", tiered([*list(FIRST_RANKS)[1:], "adamw"]))
def test_the_stream_waits_when_the_backward_has_ended_and_for_weights_after_the_whole_update(walks, name):
    check_waits_of_streams(walks[name])


@pytest.mark.parametrize("name", tiered([*FIRST_RANKS, "weights, rank 0 of 2", "DDP, rank 0 of 2"]))
def test_rows_are_read_ahead_and_a_micro_step_begins_with_their_copies(walks, name):
    check_reads(walks[name])


@pytest.mark.parametrize(
    "name", tiered([*FIRST_RANKS, "weights, rank 0 of 2", "weights sharded, checkpointing", "resumed", "windows"])
)
def test_a_step_draws_no_random_numbers_and_a_sample_from_a_generator_of_the_run_s_seed(walks, name):
    check_draws(walks[name])


def test_a_resumed_run_has_the_generators_of_its_checkpoint_and_reads_the_rows_of_its_step(walks):
    check_resumption(walks["resumed"])


@pytest.mark.parametrize(
    "name", tiered([*FIRST_RANKS, *SHARDED, *REPLICATED, "adamw", "weights sharded, checkpointing"])
)
def test_a_rank_holds_at_its_peak_what_is_planned(walks, name):
    """By the trace of all storages, DDP's buckets among them, against plan/memory.py."""
    check_bytes(walks[name])


FAULTS = {
    check_overlap: ["gradients sent at the end"],
    check_gathers: ["weights gathered late"],
    check_waits: [
        "an .item() in the step",
        "a synchronize in the step",
        "a blocking copy",
        "a CPU tensor in a CUDA expression",
    ],
    check_dtypes: ["an fp32 product", "a bf16 master"],
    check_streams: [
        *("a copy on a stream of its own", "a sum that nobody waits for", "weights that nobody waits for"),
        *("a stream of its own that the step waits for", "a clock that is read at once"),
    ],
    check_waits_of_streams: ["a wait in the backward"],
    check_reads: ["rows read when they are needed"],
    check_draws: ["dropout in the forward", "noise from the CPU in the forward", "a sample from the default generator"],
    check_resumption: [
        *("a checkpoint that nobody waits for", "a checkpoint without the card's generator"),
        "rows in the order of reading",
    ],
    check_bytes: ["gradients sent in fp32", "weights that are never freed"],
}
ERRORS = {  # of PyTorch itself
    "a CPU tensor in a CUDA expression": "FakeTensorDeviceMismatchError",
    "a clock that is read at once": "RuntimeError: CUDA error: device not ready",
}


@pytest.mark.parametrize(
    "name, check", tiered_pairs({name: check for check, names in FAULTS.items() for name in names})
)
def test_a_fault_is_noticed(walks, check, name):
    assert str(walks[name]["error"]).startswith(ERRORS.get(name, "None"))
    with pytest.raises(AssertionError):
        check(walks[name])


RACES = ["a copy on a stream of its own", "a sum that nobody waits for", "weights that nobody waits for"]


@pytest.mark.soak
def test_a_race_is_found_where_a_stream_does_not_wait_and_only_there(walks):
    assert all(walks[name]["step"]["races"] for name in RACES)
    assert walks["a wait in the backward"]["step"]["races"] == []
    # the step waits for the copy, but the allocator gives the memory to that stream again without waiting for the step
    races = walks["a stream of its own that the step waits for"]["step"]["races"]
    assert races and all(": freed on stream" in race for race in races)
