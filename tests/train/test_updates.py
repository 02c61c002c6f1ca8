"""The formulas against torch's own optimizers and against their definitions, and what changes from step to step."""

import copy

import pytest
import torch
from torch import Tensor

from paceline.plan.algorithms import longer_side
from paceline.train.updates import (
    POLAR_EXPRESS,
    adamw_update,
    descend,
    equilibrate_rows,
    lr_mult,
    momentum_of_step,
    muon_update,
    nesterov,
    newton_schulz_dtype,
    orthogonalize,
    reduce_variance,
    renormalize,
    weight_decay_mult,
)

SHAPES = [(64, 64), (64, 256), (256, 64), (33, 57), (3, 12)]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_adamw_equals_torch_adamw():
    p = torch.nn.Parameter(randn(40, 25))
    reference = torch.optim.AdamW([p], lr=0.01, betas=(0.8, 0.95), eps=1e-8, weight_decay=0.1)
    weight, exp_avg, exp_avg_sq = p.detach().clone(), torch.zeros(40, 25), torch.zeros(40, 25)
    for step in range(1, 6):
        grad = randn(40, 25, seed=step)
        p.grad = grad.clone()
        reference.step()
        adamw_update(
            [weight],
            [grad * 8],
            [exp_avg],
            [exp_avg_sq],
            step=step,
            lr=0.01,
            betas=(0.8, 0.95),
            eps=1e-8,
            weight_decay=0.1,
            grad_scale=1 / 8,
        )
    torch.testing.assert_close(weight, p.detach(), atol=1e-6, rtol=0)
    torch.testing.assert_close(exp_avg_sq, reference.state[p]["exp_avg_sq"], atol=1e-6, rtol=0)


@pytest.mark.parametrize("numel", [64, 1003 * 24, 10_007])
def test_adamw_gives_the_same_bits_in_aligned_parts_as_whole(numel):
    whole = [randn(numel, seed=i) for i in range(3)] + [randn(numel, seed=3).abs()]  # weight, grad, moments
    for seed in range(5):
        cuts = torch.randint(0, numel // 64 + 1, (4,), generator=torch.Generator().manual_seed(seed)) * 64
        sizes = torch.diff(torch.tensor([0, *sorted(cuts.tolist()), numel])).tolist()
        parts = [list(tensor.clone().split(sizes)) for tensor in whole]
        expected = copy.deepcopy(whole)
        for tensors in ([[tensor] for tensor in expected], parts):
            for step in (1, 2, 3):
                adamw_update(
                    *tensors, step=step, lr=0.1, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.1, grad_scale=0.3
                )
        for tensor, part in zip(expected, parts, strict=True):
            assert torch.equal(tensor, torch.cat(part))


@pytest.mark.parametrize("shape", [(64, 64), (64, 256), (256, 64), (33, 57)])
def test_muon_without_its_extra_steps_equals_torch_muon(shape):
    p = torch.nn.Parameter(randn(*shape))
    reference = torch.optim.Muon([p], lr=0.02, weight_decay=0, momentum=0.95, nesterov=True)
    weight, momentum_buffer = p.detach().clone(), torch.zeros(shape)
    for step in range(3):
        grad = randn(*shape, seed=step)
        p.grad = grad.clone()
        reference.step()
        update = nesterov(grad, momentum_buffer, momentum=0.95)
        update = orthogonalize(update, dtype=torch.bfloat16, coefficients=[(3.4445, -4.7750, 2.0315)] * 5, margin=1.0)
        descend(weight, update.float(), lr=0.02 * max(1, shape[0] / shape[1]) ** 0.5, weight_decay=0)
    assert torch.equal(momentum_buffer, reference.state[p]["momentum_buffer"])
    # torch divides by the norm in bf16, we in fp32: a relative 2^-8 on the way in
    assert (weight - p.detach()).norm() < 0.02 * (p.detach() - randn(*shape)).norm()


def test_muon_is_its_steps_in_order():
    weight, grad, momentum_buffer = randn(64, 32), randn(64, 32, seed=1), randn(64, 32, seed=2)
    second = randn(64, 1, seed=3).abs()
    expected, expected_momentum, expected_second = weight.clone(), momentum_buffer.clone(), second.clone()
    update = nesterov(grad * 0.5, expected_momentum, momentum=0.9)
    update = orthogonalize(equilibrate_rows(update), dtype=torch.float32)
    update = reduce_variance(renormalize(update), expected_second, beta2=0.8)
    descend(expected, update, lr=0.02 * 2**0.5, weight_decay=0.1)
    muon_update(
        weight,
        grad,
        momentum_buffer,
        second,
        lr=0.02,
        momentum=0.9,
        beta2=0.8,
        weight_decay=0.1,
        grad_scale=0.5,
        dtype=torch.float32,
    )
    assert torch.equal(weight, expected)
    assert torch.equal(momentum_buffer, expected_momentum)
    assert torch.equal(second, expected_second)


@pytest.mark.parametrize("shape", [(64, 256), (256, 64), (33, 57), (3, 12)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_orthogonalization_brings_all_singular_values_of_a_rectangle_near_one(shape, dtype):
    values = torch.linalg.svdvals(orthogonalize(randn(*shape), dtype=dtype).float())
    assert 0.85 < values.min() <= values.max() < 1.15


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_orthogonalization_of_a_batch_agrees_with_that_of_each_matrix(dtype):
    batch = randn(3, 64, 96)
    alone = torch.stack([orthogonalize(matrix, dtype=dtype) for matrix in batch])
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(orthogonalize(batch, dtype=dtype), alone, atol=tolerance, rtol=0)


def test_polar_express_keeps_a_matrix_of_zeros():
    assert torch.equal(
        orthogonalize(torch.zeros(8, 16), dtype=torch.bfloat16), torch.zeros(8, 16, dtype=torch.bfloat16)
    )
    assert len(POLAR_EXPRESS) == 5


def test_equilibrated_rows_have_one_norm_and_the_matrix_keeps_its_own():
    update = randn(16, 40) * torch.arange(1, 17)[:, None]
    even = equilibrate_rows(update)
    torch.testing.assert_close(even.norm(dim=1), torch.full((16,), update.norm().item() / 4))
    torch.testing.assert_close(even.norm(), update.norm())


@pytest.mark.parametrize("shape", SHAPES)
def test_renormalized_update_has_the_norm_of_a_semi_orthogonal_matrix(shape):
    torch.testing.assert_close(renormalize(randn(*shape)).norm(), torch.tensor(min(shape) ** 0.5))


@pytest.mark.parametrize("shape", SHAPES)
def test_variance_reduction_evens_out_the_longer_side_and_keeps_the_norm(shape):
    long = shape.index(max(shape))
    update = randn(*shape) * torch.linspace(0.5, 2, max(shape)).unsqueeze(1 - long)
    second = torch.zeros(longer_side(shape))
    reduced = reduce_variance(update, second, beta2=0.9)
    torch.testing.assert_close(second, 0.1 * update.square().mean(dim=1 - long, keepdim=True))
    torch.testing.assert_close(reduced.norm(), update.norm())
    spread = reduced.norm(dim=1 - long)
    torch.testing.assert_close(spread, spread.mean().expand_as(spread))


def test_decay_touches_only_weights_that_the_update_shrinks():
    weight = torch.tensor([[2.0, -2.0, 2.0, -2.0]])
    descend(weight, torch.tensor([[1.0, 1.0, -1.0, -1.0]]), lr=0.1, weight_decay=0.5)
    torch.testing.assert_close(weight, torch.tensor([[1.8, -2.1, 2.1, -1.8]]))


def test_newton_schulz_on_this_cpu_is_bf16_or_fp32():
    assert newton_schulz_dtype(torch.device("cpu")) in (torch.bfloat16, torch.float32)


SHAPE = {"warmup_steps": 40, "warmdown_ratio": 0.65, "final_lr_frac": 0.05}


def test_the_learning_rate_warms_up_stays_and_warms_down():
    mults = [lr_mult(step, 1000, **SHAPE) for step in (0, 19, 39, 40, 350, 675, 999)]
    assert mults == pytest.approx([1 / 40, 0.5, 1.0, 1.0, 1.0, 0.05 + 0.95 * 0.5, 0.05 + 0.95 / 650])


def test_a_short_run_cuts_its_warm_up_to_a_third():
    assert lr_mult(1, 9, **SHAPE) == pytest.approx(2 / 3)
    assert lr_mult(2, 9, **SHAPE) == 1.0


def test_without_warm_up_and_warm_down_the_rate_is_constant():
    flat = {"warmup_steps": 0, "warmdown_ratio": 0.0, "final_lr_frac": 0.05}
    assert {lr_mult(step, 10, **flat) for step in range(10)} == {1.0}


def test_a_longer_plan_lifts_the_rate_of_the_same_step():
    assert lr_mult(99, 100, **SHAPE) < 0.1
    assert lr_mult(99, 1000, **SHAPE) == 1.0


def test_momentum_rises_over_400_steps_and_falls_in_the_warm_down():
    values = [momentum_of_step(step, 2000, warmdown_ratio=0.65) for step in (0, 200, 400, 700, 1350, 2000)]
    assert values == pytest.approx([0.85, 0.91, 0.97, 0.97, 0.935, 0.90])


def test_weight_decay_falls_to_nothing_along_a_cosine():
    assert [weight_decay_mult(step, 100) for step in (0, 50, 100)] == pytest.approx([1.0, 0.5, 0.0])
