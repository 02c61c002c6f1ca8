"""Products in a low precision against products of their operands' values, and what stays the same from run to run."""

import pytest
import torch

from paceline.config import ModelConfig
from paceline.model import linear
from paceline.model.gpt import GPT
from paceline.model.linear import (
    RECIPES,
    Linear,
    LowProducts,
    columns_of,
    make_operand,
    operands_of,
    product,
    product_problem,
    quantize,
    weight_operands,
)
from tests.model.native_codes import e2m1_elements, unpack_e2m1, unswizzle_scales

CPU = torch.device("cpu")
TOKENS, IN, OUT = 96, 64, 160
CONFIG = ModelConfig(n_layer=3, n_embd=64, n_head=2, n_kv_head=2, head_dim=32, sequence_len=64, vocab_size=300)


def normal(*shape, seed=1, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_layer(name, *, dtype=torch.float32):
    layer = Linear(IN, OUT)
    layer.weight.data = normal(OUT, IN, seed=2, dtype=dtype) / 8
    return layer, LowProducts([layer], name, native=False, keeps_codes=True, device=CPU)


def gradients(layer, x, dy):
    """The result, and the gradients of input and weight."""
    x = x.clone().requires_grad_()
    layer.weight.grad = None
    y = layer(x)
    y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad


def distance(a, b):
    return ((a - b).double().norm() / b.double().norm()).item()


@pytest.mark.parametrize("name", RECIPES)
def test_a_layer_multiplies_the_values_of_its_quantized_operands(name):
    recipe, (layer, low) = RECIPES[name], make_layer(name)
    x, dy = normal(TOKENS, IN), normal(TOKENS, OUT, seed=3)
    low.begin(seed=1, step=5, micro_step=0, micro_batch=0)
    y, dx, dw = gradients(layer, x, dy)
    weight, weight_columns = weight_operands(layer.weight.detach(), name, native=False)
    noise = layer.key if recipe.stochastic else None
    dy_rows, dy_columns = operands_of(dy, recipe, recipe.gradient, native=False, key=noise)
    x_rows = make_operand(quantize(x, recipe, recipe.forward), native=False)
    x_columns = columns_of(x, recipe, recipe.forward, native=False)
    for got, a, b in ((y, x_rows, weight), (dx, dy_rows, weight_columns), (dw, dy_columns, x_columns)):
        assert distance(got, a.values.double() @ b.values.double().t()) < 1e-6


# relative errors of products of Gaussian data, by torchao's own emulation: 0.037 (MXFP8), 0.160 (MXFP4), 0.133 (NVFP4 forward)
@pytest.mark.parametrize("name, forward, backward", [
    ("fp8", 0.04, 0.065), ("mxfp8", 0.04, 0.04), ("mxfp4", 0.18, 0.22), ("nvfp4", 0.16, 0.20),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_as_near_as_the_format_allows(name, forward, backward, dtype):
    layer, low = make_layer(name, dtype=dtype)
    x, dy = normal(2, TOKENS, IN, dtype=dtype), normal(2, TOKENS, OUT, seed=3, dtype=dtype)
    low.begin(seed=1, step=5, micro_step=0, micro_batch=0)
    quantized = gradients(layer, x, dy)
    low.end()
    for got, exact, bound in zip(quantized, gradients(layer, x, dy), (forward, backward, backward), strict=True):
        assert got.dtype == dtype and got.shape == exact.shape
        assert 0.3 * bound < distance(got, exact) < bound


def test_a_cpu_s_own_fp8_product_has_the_bits_of_the_emulation():
    recipe, values = RECIPES["fp8"], torch.tensor([-2.0, -1.0, 0.0, 0.5, 1.0, 3.0])
    pick = torch.Generator().manual_seed(4)
    for element in ("e4m3", "e5m2"):  # elements of few bits, whose sums are exact in any order
        a, b = (values[torch.randint(6, (rows, IN), generator=pick)] for rows in (32, 48))
        a[0, 0], b[0, 0] = 448, 448
        for dtype in (torch.float32, torch.bfloat16):
            native, emulated = (
                product(*(make_operand(quantize(x, recipe, kind), native=way) for x, kind in ((a, element), (b, "e4m3"))),
                        recipe, dtype=dtype)
                for way in (True, False)
            )  # fmt: skip
            assert torch.equal(native, emulated)
    x, w = (make_operand(quantize(normal(64, IN, seed=seed), recipe, "e4m3"), native=True) for seed in (5, 6))
    x2, w2 = (make_operand(quantize(normal(64, IN, seed=seed), recipe, "e4m3"), native=False) for seed in (5, 6))
    assert distance(product(x, w, recipe, dtype=torch.float32), product(x2, w2, recipe, dtype=torch.float32)) < 1e-6


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4"])
def test_native_operands_hold_the_emulated_values(name):
    weight = normal(OUT, IN, seed=2)
    for native, emulated in zip(*(weight_operands(weight, name, native=way) for way in (True, False)), strict=True):
        rows, columns = emulated.values.shape
        block = 16 if name == "nvfp4" else 32
        codes, scales = native.values, unswizzle_scales(native.scales, (rows, columns // block))
        elements = codes.float() if name == "mxfp8" else e2m1_elements(unpack_e2m1(codes))
        scales = scales.contiguous().view(torch.float8_e4m3fn if name == "nvfp4" else torch.float8_e8m0fnu).float()
        values = (elements.unflatten(-1, (-1, block)) * scales.unsqueeze(-1)).flatten(-2)
        assert torch.equal(values if native.factor is None else values * native.factor, emulated.values)
        assert codes.is_contiguous()


def test_random_bits_depend_on_seed_step_and_batch_and_not_on_the_rank_that_has_it():
    layer, low = make_layer("nvfp4")
    x, dy = normal(TOKENS, IN), normal(TOKENS, OUT, seed=3)

    def gradient(**at):
        low.begin(**({"seed": 1, "step": 5, "micro_step": 0, "micro_batch": 3} | at))
        return gradients(layer, x, dy)[1]

    first = gradient()
    assert torch.equal(gradient(micro_step=1), first)
    for other in ({"seed": 2}, {"step": 6}, {"micro_batch": 4}):
        assert not torch.equal(gradient(**other), first)


def test_the_mean_of_stochastic_gradients_is_the_gradient_of_the_quantized_weight():
    layer, low = make_layer("nvfp4")
    x, dy = normal(TOKENS, IN), normal(TOKENS, OUT, seed=3)
    low.begin(seed=1, step=0, micro_step=0, micro_batch=0)
    exact = dy @ weight_operands(layer.weight.detach(), "nvfp4", native=False)[0].values
    draws = []
    for batch in range(64):
        low.begin(seed=1, step=0, micro_step=1, micro_batch=batch)
        draws.append(gradients(layer, x, dy)[1])
    assert distance(torch.stack(draws).mean(0), exact) < 2.5 / 8 * distance(draws[0], exact)


def test_a_weight_is_quantized_once_a_step():
    layer, low = make_layer("fp8")
    x, dy = normal(TOKENS, IN), normal(TOKENS, OUT, seed=3)
    low.begin(seed=1, step=0, micro_step=0, micro_batch=0)
    before = gradients(layer, x, dy)[0]
    layer.weight.data *= 2
    low.begin(seed=1, step=0, micro_step=1, micro_batch=1)
    assert torch.equal(gradients(layer, x, dy)[0], before)
    low.begin(seed=1, step=1, micro_step=0, micro_batch=0)
    assert torch.equal(gradients(layer, x, dy)[0], 2 * before)


def test_without_gradients_the_product_is_in_the_input_s_dtype():
    layer, low = make_layer("mxfp4")
    x = normal(TOKENS, IN)
    low.begin(seed=1, step=0, micro_step=0, micro_batch=0)
    with torch.no_grad():
        assert torch.equal(layer(x), x @ layer.weight.t())


@pytest.mark.parametrize("name", RECIPES)
def test_a_model_learns_with_low_products_and_leaves_other_layers_alone(name):
    model, plain = (GPT(CONFIG, compute_dtype=torch.bfloat16) for _ in range(2))
    for made in (model, plain):
        made.init_weights(seed=1)
        for layer in made.h:
            layer.attn.c_proj.weight.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(2))
    low = model.use_low_products(name, 2, native=False, keeps_codes=True, device=CPU)
    low.begin(seed=1, step=0, micro_step=0, micro_batch=0)
    assert [layer.attn.c_q.recipe for layer in model.h] == [name, name, None]
    assert {model.lm_head.recipe, model.smear_gate.recipe, model.h[0].attn.ve_gate.recipe} == {None}
    idx = torch.randint(300, (2, 65), generator=torch.Generator().manual_seed(3))
    losses, gradient = [], []
    for made in (model, plain):
        loss = made(idx[:, :-1], idx[:, 1:])
        loss.backward()
        losses.append(loss.item())
        gradient.append(torch.cat([parameter.grad.flatten() for parameter in made.parameters()]))
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
    assert 0.9 < torch.cosine_similarity(*gradient, dim=0) < 0.99999


@pytest.mark.soak
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("by_block", [True, False])
def test_a_compiled_model_has_the_gradients_of_an_eager_one(name, by_block):
    torch._dynamo.reset()
    gradient = []
    for compiled in (False, True):
        model = GPT(CONFIG, compute_dtype=torch.float32)
        model.init_weights(seed=1)
        low = model.use_low_products(name, 2, native=False, keeps_codes=True, device=CPU)
        if compiled:
            model.compile(dynamic=False, by_block=by_block)
        idx = torch.randint(300, (2, 65), generator=torch.Generator().manual_seed(3))
        for step in range(2):
            low.begin(seed=1, step=step, micro_step=0, micro_batch=0)
            model.zero_grad()
            model(idx[:, :-1], idx[:, 1:]).backward()
        gradient.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert torch.cosine_similarity(*gradient, dim=0) > 0.99


def test_products_that_a_device_has_are_compared_with_the_emulation(monkeypatch):
    assert product_problem("fp8", CPU) is None  # which a CPU computes itself
    assert "CPU does not support" in product_problem("nvfp4", CPU)  # and these not
    monkeypatch.setattr(
        linear, "scaled_product", lambda a, b, *args, **options: torch.zeros(len(a.values), len(b.values))
    )
    assert product_problem("fp8", CPU) == "its y is 1 off the emulation's, all zeros"
