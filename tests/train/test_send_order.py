"""When the gradients of a layer are complete, against the products of the backward that are still to come."""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import distributed
from torch.profiler import ProfilerActivity, profile, record_function

from paceline.config import ModelConfig
from paceline.model.gpt import GPT, Block
from paceline.plan.shapes import param_shapes
from paceline.plan.sharding import ddp_buckets

N_LAYER = 10  # more than torch's default limit of compiled variants, and than there are kinds of layers
PRODUCTS = {"aten::mm", "aten::bmm", "aten::addmm"}


def make_gpt(way: str, *, n_layer: int = N_LAYER, checkpointed: bool = False) -> GPT:
    config = ModelConfig(n_layer, 32, 1, 1, 32, sequence_len=160, vocab_size=64, window_pattern="SL")
    model = GPT(config, compute_dtype=torch.float32, activation_checkpointing=checkpointed)
    model.init_weights(seed=1)
    if way != "eager":
        model.compile(dynamic=False, by_block=way == "by block", backend="aot_eager")
    return model


@cache
def backward(
    way: str, *, n_layer: int = N_LAYER, checkpointed: bool = False
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """For each parameter, the share of the backward's products that begin after its gradient is complete; and the gradient."""
    torch._dynamo.reset()
    model = make_gpt(way, n_layer=n_layer, checkpointed=checkpointed)
    idx = torch.randint(64, (1, model.config.sequence_len), generator=torch.Generator().manual_seed(0))
    model(idx, idx.roll(-1)).backward()  # compiles

    def note(name):
        def hook(param):
            with record_function(f"complete {name}"):
                pass

        return hook

    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(note(name))
    model.zero_grad()
    nats = model(idx, idx.roll(-1))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        nats.backward()
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    names = [event.name() for event in events]
    products = [i for i, name in enumerate(names) if name in PRODUCTS]
    assert len(products) > 10 * n_layer
    shares = {
        name.removeprefix("complete "): sum(product > i for product in products) / len(products)
        for i, name in enumerate(names)
        if name.startswith("complete ")
    }
    return shares, {name: param.grad for name, param in model.named_parameters()}


def layer_of(name: str) -> int | None:
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    return numbers[0] if numbers else None


@pytest.mark.slow
@pytest.mark.parametrize(
    "way, checkpointed", [("eager", False), ("by block", False), pytest.param("by block", True, marks=pytest.mark.soak)]
)
def test_a_layers_gradients_are_complete_before_the_backward_of_the_layer_below(way, checkpointed):
    order, grads = backward(way, checkpointed=checkpointed)
    assert order["lm_head.weight"] == 1.0  # the loss has made it: it is sent under the whole backward
    for name, share in order.items():
        layer = layer_of(name)
        if layer is not None:  # the layers are alike: each is about a tenth of the backward
            assert share == pytest.approx(layer / N_LAYER, abs=0.02 if way == "by block" else 0.1), name
    assert order["wte.weight"] == 0.0
    for name, eager in backward("eager")[1].items():
        torch.testing.assert_close(grads[name], eager, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.soak
def test_one_graph_completes_every_gradient_at_its_end():
    assert set(backward("whole", n_layer=2)[0].values()) == {0.0}


@pytest.mark.soak
@pytest.mark.slow
def test_layers_of_one_kind_share_a_graph():
    from torch._dynamo.eval_frame import innermost_fn
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = make_gpt("by block")
    idx = torch.zeros(1, model.config.sequence_len, dtype=torch.int64)
    for _ in range(3):
        model(idx, idx).backward()
    training = counters["stats"]["unique_graphs"]
    with torch.no_grad():
        model(idx, idx, reduction="none")
    assert innermost_fn(model.part(Block.forward, None)) is Block.forward
    # windows and value embeddings alternate together here: two kinds of layers, what is before and after them, and the loss
    assert training == 2 + 2 + 1
    assert counters["stats"]["unique_graphs"] == 2 * training  # an evaluation has no gradients
    assert not counters["graph_break"]


@pytest.mark.slow
def test_a_block_that_would_be_compiled_too_often_is_an_error_and_not_eager():
    from torch._dynamo.exc import FailOnRecompileLimitHit

    torch._dynamo.reset()
    model = make_gpt("by block")
    model.part(Block.forward, None)  # sets the limit
    idx = torch.zeros(1, model.config.sequence_len, dtype=torch.int64)
    with torch._dynamo.config.patch(recompile_limit=1), pytest.raises(FailOnRecompileLimitHit):
        model(idx, idx)


def test_the_planned_ddp_buckets_are_those_that_pytorch_makes_of_the_order_of_gradients():
    config = ModelConfig(6, 256, 2, 2, 128, 32, 4096, "SSSL")
    model = GPT(config, compute_dtype=torch.float32)
    model.init_weights(seed=1)
    complete: list[torch.Tensor] = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(complete.append)
    idx = torch.zeros(1, 32, dtype=torch.int64)
    model(idx, idx).backward()
    caps = [dist._DEFAULT_FIRST_BUCKET_BYTES, distributed._DEFAULT_BUCKET_CAP_MB << 20]
    buckets, _ = dist._compute_bucket_assignment_by_size(complete, caps, [False] * len(complete))
    sizes = tuple(sum(complete[at].nbytes for at in bucket) for bucket in buckets)
    assert len(sizes) == 3
    assert ddp_buckets(param_shapes(config)) == sizes
