"""Hand-written gradients against autograd's own, and their sums in bf16."""

import pytest
import torch
import torch.nn.functional as F

from paceline.model.pointwise import mix, relu_squared, rms_norm, rotary_norm


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def check(mine, exact, inputs):
    torch.testing.assert_close(mine, exact)
    dy = randn(*exact.shape, seed=9).detach()
    pairs = zip(torch.autograd.grad(mine, inputs, dy), torch.autograd.grad(exact, inputs, dy), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_rms_norm_is_torch_s():
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


def test_relu_squared():
    x = randn(4, 6)
    check(relu_squared(x), F.relu(x).square(), (x,))


def test_mix_scales_both_and_learns_the_scales():
    x, y, a, b = randn(2, 3, 4), randn(2, 3, 4, seed=1), randn(1, seed=2), randn(1, seed=3)
    check(mix(x, y, a[0], b[0]), a * x + b * y, (x, y, a, b))


def test_scalar_gradients_of_a_large_bf16_tensor_are_summed_in_fp32():
    x = torch.full((256, 256), 1.0, dtype=torch.bfloat16)
    a, b = torch.ones((), requires_grad=True), torch.ones((), requires_grad=True)
    mix(x, x, a, b).float().sum().backward()
    assert a.grad.item() == pytest.approx(65_536, abs=0)  # bf16 sums would stop at 256
    assert a.grad.dtype == torch.float32
