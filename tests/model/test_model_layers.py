"""The layers written by hand against PyTorch's own: elementwise pieces, embedding, attention on the CPU."""

import pytest
import torch
import torch.nn.functional as F

from paceline.model.attention import causal_attention
from paceline.model.layers import Embedding, _RotaryNorm, mix, relu_squared, rms_norm, rotary_norm


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def check(mine, exact, inputs):
    torch.testing.assert_close(mine, exact)
    dy = randn(*exact.shape, seed=9).detach()
    pairs = zip(torch.autograd.grad(mine, inputs, dy), torch.autograd.grad(exact, inputs, dy), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_rms_norm_equals_torchs():
    x = randn(3, 5, 16)
    check(rms_norm(x), F.rms_norm(x, (16,), eps=1e-6), (x,))


def test_rms_norm_of_zero_is_zero_with_a_finite_gradient():
    x = torch.zeros(2, 8, requires_grad=True)
    rms_norm(x).sum().backward()
    assert torch.isfinite(x.grad).all()


def test_rotary_norm_turns_normed_pairs():
    x, angle = randn(2, 7, 3, 8), randn(7, 4, seed=1).detach()
    cos, sin = angle.cos(), angle.sin()
    low, high = (1.2 * F.rms_norm(x, (8,), eps=1e-6)).transpose(1, 2).chunk(2, dim=-1)
    exact = torch.cat((low * cos + high * sin, high * cos - low * sin), dim=-1)
    check(rotary_norm(x, torch.cat((cos, cos), -1), torch.cat((sin, -sin), -1)), exact, (x,))


def test_the_order_for_a_gpu_has_the_same_numbers():
    x, angle, dy = randn(2, 7, 3, 8), randn(7, 4, seed=1).detach(), randn(2, 3, 7, 8, seed=2).detach()
    tables = torch.cat((angle.cos(), angle.cos()), -1), torch.cat((angle.sin(), -angle.sin()), -1)
    for_cpu, for_gpu = (_RotaryNorm.apply(x, *tables, heads_first) for heads_first in (True, False))
    torch.testing.assert_close(for_gpu, for_cpu)
    assert for_gpu.transpose(1, 2).is_contiguous()
    torch.testing.assert_close(torch.autograd.grad(for_gpu, x, dy), torch.autograd.grad(for_cpu, x, dy))


def test_relu_squared():
    x = randn(4, 6)
    check(relu_squared(x), F.relu(x).square(), (x,))


def test_mix_scales_both_and_learns_the_scales():
    x, y, a, b = randn(2, 3, 4), randn(2, 3, 4, seed=1), randn(1, seed=2), randn(1, seed=3)
    check(mix(x, y, a[0], b[0]), a * x + b * y, (x, y, a, b))


def test_mix_without_the_first_scale_adds():
    x, y, b = randn(2, 3, 4), randn(2, 3, 4, seed=1), randn(1, seed=3)
    check(mix(x, y, None, b[0]), x + b * y, (x, y, b))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=[pytest.mark.soak, pytest.mark.compiler])])
def test_scales_are_not_rounded_to_bf16(compiled):
    """The mean over many numbers shows the scale itself: bf16's nearest to 1.05 is 1.0469, 0.3 % less."""
    x = 1 + torch.rand(1 << 16, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    x, y, a, b = x.requires_grad_(), torch.zeros_like(x), torch.tensor(1.05), torch.tensor(0.0)
    z = (torch.compile(mix) if compiled else mix)(x, y, a, b)
    assert z.dtype == torch.bfloat16
    assert (z.double() / x.double()).mean().item() == pytest.approx(1.05, rel=3e-4)
    (dx,) = torch.autograd.grad(z, x, x.detach())
    assert (dx.double() / x.detach().double()).mean().item() == pytest.approx(1.05, rel=3e-4)


def test_scalar_gradients_of_a_large_bf16_tensor_are_summed_in_fp32():
    x = torch.full((256, 256), 1.0, dtype=torch.bfloat16)
    a, b = torch.ones((), requires_grad=True), torch.ones((), requires_grad=True)
    mix(x, x, a, b).float().sum().backward()
    assert a.grad.item() == pytest.approx(65_536, abs=0)  # bf16 sums would stop at 256
    assert a.grad.dtype == torch.float32


def gradient(embedding, idx, dy):
    return torch.autograd.grad(embedding(idx), embedding.weight, dy)[0]


def test_rows_and_their_gradient_equal_torchs():
    embedding = Embedding(10, 4)
    torch.nn.init.normal_(embedding.weight, generator=torch.Generator().manual_seed(0))
    idx = torch.tensor([[1, 2, 2], [9, 1, 1]])
    dy = torch.arange(24.0).view(2, 3, 4)
    assert torch.equal(embedding(idx), F.embedding(idx, embedding.weight))
    exact = torch.autograd.grad(F.embedding(idx, embedding.weight), embedding.weight, dy)[0]
    assert torch.equal(gradient(embedding, idx, dy), exact)


def test_the_bf16_gradient_of_a_frequent_token_is_summed_in_fp32():
    embedding = Embedding(3, 8).to(torch.bfloat16)
    ones = torch.ones(1, 1000, 8, dtype=torch.bfloat16)
    grad = gradient(embedding, torch.full((1, 1000), 2), ones)
    assert grad[2].tolist() == [1000.0] * 8  # bf16 sums would stop at 256


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.compiler, pytest.mark.soak])]
)
def test_a_compiled_embedding_gradient_stays_one_op_with_the_same_bits(backend):
    embedding = Embedding(50, 16)
    torch.nn.init.zeros_(embedding.weight)
    generator = torch.Generator().manual_seed(0)
    idx = torch.randint(50, (4, 500), generator=generator)
    dy = torch.randn(4, 500, 16, generator=generator)
    assert torch.equal(gradient(torch.compile(embedding, backend=backend), idx, dy), gradient(embedding, idx, dy))


@pytest.mark.parametrize("num_tokens", [1, 100, 128, 300, 600])  # 600: probabilities are computed again
@pytest.mark.parametrize("window", [1, 100, 128, 257, 1000])
def test_blocks_equal_attention_under_a_mask(num_tokens, window):
    generator = torch.Generator().manual_seed(0)
    q, k, v, dy = (torch.randn(2, 3, num_tokens, 8, generator=generator, requires_grad=True) for _ in range(4))
    back = torch.arange(num_tokens).unsqueeze(1) - torch.arange(num_tokens)
    exact = F.scaled_dot_product_attention(q, k, v, attn_mask=(back >= 0) & (back < window)).transpose(1, 2)
    mine = causal_attention(q, k, v, window=window)
    torch.testing.assert_close(mine, exact)
    dy = dy.detach().transpose(1, 2)
    for a, b in zip(torch.autograd.grad(mine, (q, k, v), dy), torch.autograd.grad(exact, (q, k, v), dy), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "function, inputs",
    [
        (rms_norm, [(2, 3, 8)]),
        (relu_squared, [(2, 3, 8)]),
        (rotary_norm, [(2, 7, 3, 8), (7, 8), (7, 8)]),
        (mix, [(2, 3, 8), (2, 3, 8), (), ()]),
    ],
)
def test_a_compiled_forward_changes_nothing_in_place(function, inputs):
    """Torch 2.11 drops the gradient of a function that does, without an error: the layers below learn nothing."""
    names = []

    def backend(graph, example_inputs):
        called = [node for node in graph.graph.nodes if node.op in ("call_function", "call_method")]
        names.extend(str(getattr(node.target, "__name__", node.target)) for node in called)
        return graph

    with torch.no_grad():  # the forward is then part of the graph
        torch.compile(function, backend=backend, dynamic=False)(*(torch.randn(shape) for shape in inputs))
    assert names
    assert not [name for name in names if name.endswith("_") and not name.endswith("__")]
