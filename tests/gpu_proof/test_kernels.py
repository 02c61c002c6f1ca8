"""
The kernels of a run's step and evaluation for cards that are not there: each has a binary, and fits.

Every claim is shown to be one that can fail: the kernels of a version with that fault are refused by the same check.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from gpu_proof.card_compiler import cast_binary, largest_binary
from gpu_proof.cases import NEEDS_CARD, NEEDS_TRITON
from gpu_proof.fake_card import CARDS, on_card

pytestmark = [pytest.mark.soak, pytest.mark.compiler, NEEDS_CARD, NEEDS_TRITON]

CHUNK_OF_LOGITS = 32_768 * 8192  # elements
# what PyTorch's own kernels do, by design
EAGER_OPS = {
    "torch.ops.aten._flash_attention_forward.default",
    "torch.ops.aten._flash_attention_backward.default",
    "torch.ops.aten._scaled_dot_product_flash_attention.default",  # full layers beside FlexAttention
    "torch.ops.aten._scaled_dot_product_flash_attention_backward.default",
    "torch.ops.aten._scaled_dot_product_cudnn_attention.default",
    "torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default",
    "torch.ops.higher_order.graphsafe_run_with_rng_state",  # flash attention computed again: it could have dropped at random
    "torch.ops.paceline.embedding_gradient.default",
}
# of a thread: FlexAttention's backward spills 464, with grouped queries 592
STACK_BYTES = {"triton_tem_": 640, "": 0}
TRAINING = {"rounds": 2, "phases": ["step", "evaluation"]}
OTHER_WAYS = {
    "precision": "fp16",
    "attention": "flex",
    "activation_checkpointing": True,
    "n_kv_head": 2,
    "phases": ["step"],
}
STEP = {"phases": ["step"]}
OWN_OPS = {f"torch.ops.paceline.{name}.default" for name in ("largest", "cast", "block_product")}
LOW = {"rounds": 2, "phases": ["step"], "depth": 3}
LOW_WALKS = [  # compute capability, precision, whether it is emulated
    *[(capability, "fp8", False) for capability in (89, 90, 100, 120)],
    *[(capability, name, False) for capability in (100, 120) for name in ("mxfp8", "nvfp4")],
    *[(86, "fp8", True), (90, "nvfp4", True), (120, "mxfp4", True)],
]
FLEX = STEP | {"attention": "flex"}
WITHOUT_TRITON = STEP | {"depth": 1, "fused_loss": False}
Facts = dict[str, Any]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Callable[..., list[Facts]]:
    """Returns the facts of walks on a card; the guard is compiled once."""
    folder = tmp_path_factory.mktemp("card")
    return lambda capability, *walks: on_card(capability, "gpu_proof.kernels", capability, *walks, folder=folder)


def check_fit(facts: Facts, capability: int) -> None:
    assert facts["error"] is None and len(facts["binaries"]) > 15
    for binary in facts["binaries"]:
        assert binary["error"] is None, binary
        assert binary["shared_bytes"] <= CARDS[capability].shared_bytes, binary
        limit = next(size for start, size in STACK_BYTES.items() if binary["kernel"].startswith(start))
        assert binary["stack_bytes"] <= limit, binary


def check_work(facts: Facts, *dtypes: str, ops: frozenset[str] = frozenset(EAGER_OPS)) -> None:
    """No large buffer beside the chunk of logits, no op that inductor leaves to PyTorch, no product in another dtype."""
    assert facts["error"] is None and facts["programs"]
    for program in facts["programs"]:
        assert all(numel < CHUNK_OF_LOGITS for numel, _ in program["buffers"]), program
        assert set(program["eager_ops"]) <= ops, program
        assert set(program["products"]) <= set(dtypes), program
    assert not [binary["kernel"] for binary in facts["binaries"] if binary["trigonometry"]]


@pytest.mark.parametrize("capability", CARDS)
def test_every_kernel_of_a_step_and_an_evaluation_fits(compiled, capability):
    (facts,) = compiled(capability, TRAINING)
    assert [graphs for _, graphs in facts["graphs"]][2:] == [[], []]
    check_fit(facts, capability)
    check_work(facts, "bfloat16")


@pytest.mark.parametrize("capability", [90, 120])
def test_kernels_of_fp16_with_checkpointing_and_grouped_queries_fit(compiled, capability):
    (facts,) = compiled(capability, OTHER_WAYS)
    check_fit(facts, capability)
    check_work(facts, "float16")


@pytest.mark.parametrize("capability", [90, 120])
def test_the_loss_that_is_compiled_where_triton_is_missing_has_no_large_buffer(compiled, capability):
    (facts,) = compiled(capability, WITHOUT_TRITON)
    assert [program["graph"] for program in facts["programs"]][-1] == "capped_nats_"
    check_work(facts, "bfloat16")


@pytest.mark.parametrize("capability, precision, emulate", LOW_WALKS)
def test_a_step_with_low_products_is_one_graph_whose_kernels_fit(compiled, capability, precision, emulate):
    """Operands are rotated in fp32. Random bits of an MLP's gradient are not kept as 64-bit integers."""
    (facts,) = compiled(capability, LOW | {"precision": precision, "emulate": emulate})
    assert facts["graphs"] == [["step", ["forward"]], ["step", []]]
    check_fit(facts, capability)
    # Triton converts e4m3 from compute capability 8.9 on; before, PyTorch does so between the kernels of an emulation
    conversion = {"torch.ops.prims.convert_element_type.default"} if capability < 89 else set()
    check_work(facts, "bfloat16", "float32", ops=frozenset(EAGER_OPS | OWN_OPS | conversion))
    low_ops = Counter(op for program in facts["programs"] for op in program["eager_ops"] if op in OWN_OPS)
    assert low_ops == low_ops_of(precision, emulate)
    buffers = [buffer for program in facts["programs"] for buffer in program["buffers"]]
    widest = 8 * 2048 * 4 * 768  # tokens of a micro-batch, and what an MLP has between its matrices
    assert all(numel < widest for numel, dtype in buffers if dtype == "int64")


def low_ops_of(precision: str, emulate: bool) -> dict[str, int]:
    """Three products of each matrix; q, k and v share their input, and backward casts it once more, transposed."""
    layers, matrices, inputs = 1 if precision == "nvfp4" else LOW["depth"], 6, 4
    if emulate:
        return {}
    if precision != "fp8":
        return {"torch.ops.paceline.block_product.default": 3 * matrices * layers}
    casts = {"largest": inputs + matrices, "cast": 2 * inputs + matrices}
    return {f"torch.ops.paceline.{name}.default": count * layers for name, count in casts.items()}


@pytest.mark.parametrize("capability", [89, 90, 100, 120])
@pytest.mark.parametrize("dtype", ["*fp32", "*bf16"])
def test_the_kernels_that_cast_to_fp8_fit_a_card_and_move_16_bytes_a_thread_in_both_layouts(capability, dtype):
    largest = largest_binary(capability, dtype)
    assert largest["stack_bytes"] == 0 and largest["widest_load"] == 16
    for element in ("e4m3", "e5m2"):
        for rows, columns in ((True, True), (True, False), (False, True)):
            fact = cast_binary(capability, dtype, element, rows=rows, columns=columns)
            assert fact["stack_bytes"] == 0 and fact["shared_bytes"] <= CARDS[capability].shared_bytes
            assert fact["registers"] * fact["threads"] * 2 <= 65_536  # two tiles at a time on a processor
            assert (fact["widest_load"], fact["widest_store"]) == (16, 16)


@pytest.mark.parametrize("capability", CARDS)
@pytest.mark.parametrize("dtype", ["*fp32", "*bf16", "*fp16"])
def test_the_loss_kernel_fits_a_card_without_spills(capability, dtype):
    for with_grad in (True, False):
        check_loss_kernel(capability, dtype, with_grad=with_grad)


def check_loss_kernel(capability: int, dtype: str, *, with_grad: bool) -> None:
    from gpu_proof.card_compiler import loss_binary

    fact = loss_binary(capability, dtype, with_grad=with_grad)
    assert fact["stack_bytes"] == 0
    assert fact["shared_bytes"] <= CARDS[capability].shared_bytes
    assert fact["registers"] * fact["threads"] * 2 <= 65_536  # two rows at a time on a processor
    assert fact["widest_load"] == 16  # bytes of a thread: fewer would leave memory idle


def test_a_loss_kernel_that_spills_is_noticed(monkeypatch):
    from paceline.model import kernels

    monkeypatch.setattr(kernels, "LOSS_BLOCK", 32_768)
    monkeypatch.setattr(kernels, "LOSS_WARPS", 4)
    with pytest.raises(AssertionError):
        check_loss_kernel(90, "*bf16", with_grad=True)


def test_a_kernel_that_is_too_large_for_the_card_is_noticed(compiled):
    """FlexAttention's backward at head_dim 256: pytorch issue 198224."""
    (facts,) = compiled(120, FLEX | {"head_dim": 256})
    assert max(binary["shared_bytes"] for binary in facts["binaries"]) == 114_688
    with pytest.raises(AssertionError):
        check_fit(facts, 120)


@pytest.mark.parametrize("settings", [{"head_dim": 256}, {"n_kv_head": 2}], ids=["wide heads", "grouped queries"])
@pytest.mark.parametrize("capability", [90, 120])
def test_flash_attention_needs_no_kernel_and_no_copy_of_the_compiler(compiled, capability, settings):
    """All that inductor does for attention is the norm, the rotation and the gate: no template, no mask of (T, T)."""
    (facts,) = compiled(capability, STEP | settings)
    check_fit(facts, capability)
    check_work(facts, "bfloat16")
    calls = [op for program in facts["programs"] for op in program["eager_ops"]]
    for name in ("_flash_attention_forward", "_flash_attention_backward"):
        assert calls.count(f"torch.ops.aten.{name}.default") == 2  # layers
    assert not any("tem_" in launch for program in facts["programs"] for launch in program["launches"])
    assert not any([2048**2, "bool"] in program["buffers"] for program in facts["programs"])


@pytest.fixture(scope="module")
def broken(compiled) -> dict[str, Facts]:
    names = ("a copy of the logits", "rotary tables in the graph", "an op without a kernel", "an fp32 product")
    walks = [WITHOUT_TRITON | {"broken": name} for name in names]
    return dict(zip(names, compiled(90, *walks), strict=True))


@pytest.mark.parametrize(
    "name", ["a copy of the logits", "rotary tables in the graph", "an op without a kernel", "an fp32 product"]
)
def test_work_that_no_kernel_should_do_is_noticed(broken, name):
    assert broken[name]["error"] is None
    with pytest.raises(AssertionError):
        check_work(broken[name], "bfloat16")
