"""Optimizer states of 8 bits: what their codes keep, that rounding has no bias, and that they become the same codes again."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.plan.states import BLOCK, block_size
from paceline.train.state_codes import MANTISSA_BITS, decode, encode_, random_bits
from paceline.train.updates import adamw_update

SIGNED, SQUARES = torch.int8, torch.uint8
SHAPES = ((3, 640), (2, 5, 24), (7, 256))


def encoded(x, dtype, *, step=1):
    codes = torch.empty(x.shape, dtype=dtype)
    bases = torch.empty(*x.shape[:-1], x.shape[-1] // block_size(x.shape[-1]), dtype=torch.int16)
    encode_(x, codes, bases, step=step)
    return codes, bases


def again(x, dtype, *, step=1):
    return decode(*encoded(x, dtype, step=step))


def numbers(dtype, *, seed=0, octaves=2.0, shape=(64, 640)):
    """Random numbers over many powers of two; none below 0 for squares."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp2(octaves * torch.randn(shape, generator=generator))
    return x.square() if dtype == SQUARES else x


wide = (st.integers(0, 2**31), st.floats(0, 40), st.integers(-90, 60), st.sampled_from(SHAPES), st.integers(1, 10**6))


@settings(max_examples=60)
@given(*wide, st.integers(1, 10**6))
def test_decoded_squares_have_the_same_codes_in_any_step(seed, octaves, exponent, shape, step, other):
    x = (numbers(SQUARES, seed=seed, octaves=octaves, shape=shape) * 2.0**exponent).nan_to_num()
    codes, bases = encoded(x, SQUARES, step=step)
    assert all(map(torch.equal, encoded(decode(codes, bases), SQUARES, step=other), (codes, bases)))


@settings(max_examples=60)
@example(28, 40.0, 59, (7, 256), 1)
@given(*wide)
def test_signs_and_zeros_stay_and_no_number_is_off_by_more_than_its_step(seed, octaves, exponent, shape, step):
    """Up to half of the largest float: what is rounded up from the other half can be infinite."""
    x = numbers(SIGNED, seed=seed, octaves=octaves, shape=shape) * 2.0**exponent
    x = x.nan_to_num().clamp(-(2.0**127), 2.0**127)
    x[..., ::5] = 0
    values = again(x, SIGNED, step=step)
    assert ((values == 0) | (values.sign() == x.sign())).all() and values[..., ::5].eq(0).all()
    floor = x.view(*shape[:-1], -1, block_size(shape[-1])).abs().amax(-1, keepdim=True) * 2.0**-14
    steps = 2.0**-MANTISSA_BITS * (x.abs().view(*floor.shape[:-1], -1) + floor).view(shape)
    assert ((values - x).abs() <= steps + 2.0**-126).all()


def test_every_code_of_a_square_at_every_base_is_the_code_of_its_number():
    bases = torch.arange(0, 2040 - 255, 3, dtype=torch.int16).unsqueeze(1)  # (blocks, 1), up to the largest numbers
    codes = torch.arange(256).to(torch.uint8).expand(len(bases), -1).contiguous()
    x = decode(codes, bases)
    assert x.isfinite().all() and (x.diff(dim=1) > 0).all()
    back, same = torch.empty_like(codes), torch.empty_like(bases)
    encode_(x, back, same, step=7)
    assert torch.equal(back, codes) and torch.equal(same, bases)


@pytest.mark.parametrize("dtype", [SIGNED, SQUARES])
def test_a_large_number_is_off_by_less_than_an_eighth(dtype):
    x = numbers(dtype)
    large = x.abs() > x.abs().amax(-1, keepdim=True) / 128
    assert ((again(x, dtype) / x - 1)[large].abs() < 1.02 * 2.0**-MANTISSA_BITS).all()


@pytest.mark.parametrize("dtype", [SIGNED, SQUARES])
def test_rounding_has_no_bias(dtype):
    x, steps = numbers(dtype, shape=(40, 256)), 1000
    x = torch.where(x.abs() > x.abs().amax(-1, keepdim=True) * 2.0**-30, x, 1.0 if dtype == SQUARES else 0.0)
    mean = sum(again(x, dtype, step=step) for step in range(steps)) / steps
    step_of = 2.0**-MANTISSA_BITS * (x.abs() + (x.abs().amax(-1, keepdim=True) * 2.0**-14 if dtype == SIGNED else 0))
    off = (mean - x) / step_of
    assert off.abs().max() < 0.5 * 6 / steps**0.5 and off.mean().abs() < 3e-4


def test_a_mean_that_moves_by_less_than_a_code_still_arrives():
    """To the nearest code it would stay where it is: 0.5 % of 1.3 a step are less than half of a code's 12 %."""
    v, squares = torch.ones(50, 256), 1.3 * torch.linspace(0.9, 1.1, 50 * 256).view(50, 256)
    for step in range(1, 2001):
        v = again(v.lerp(squares, 0.005), SQUARES, step=step)
    assert (v / squares).mean() == pytest.approx(1, rel=0.01)


@settings(max_examples=60)
@given(st.floats(1e-30, 1e30), st.floats(0, 1, exclude_min=True), st.integers(1, 10**6))
def test_a_square_beside_any_other_does_not_become_0(largest, share, step):
    x = torch.tensor([[largest, largest * share, largest * share * 1e-5, largest * 1e-30]]).clamp(min=2.0**-126)
    assert (again(x, SQUARES, step=step) > 0.88 * x).all()  # never far too small: that would be a large update


def test_what_is_not_there_stays_0():
    assert again(torch.zeros(2, 512), SQUARES).eq(0).all() and again(torch.zeros(2, 512), SIGNED).eq(0).all()
    x = numbers(SIGNED, shape=(4, 256))
    x[:, ::3] = 0
    assert again(x, SIGNED)[:, ::3].eq(0).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [SIGNED, SQUARES])
def test_what_is_not_finite_stays_so(dtype, bad):
    x = torch.ones(1, 256)
    x[0, 9] = bad
    torch.testing.assert_close(again(x, dtype)[0, 9], x[0, 9], equal_nan=True)
    canonical = torch.tensor([[0x7FFFFFFF, 0x3F800000]], dtype=torch.int32).view(torch.float32)  # a GPU's NaN
    assert again(canonical, dtype)[0, 0].isnan()


@pytest.mark.parametrize("dtype", [SIGNED, SQUARES])
def test_codes_do_not_depend_on_which_rows_are_together(dtype):
    x = numbers(dtype)
    codes, bases = encoded(x, dtype)
    parts = [encoded(rows.contiguous(), dtype) for rows in x.split([1, 20, 43])]
    assert torch.equal(torch.cat([part for part, _ in parts]), codes)
    assert torch.equal(torch.cat([part for _, part in parts]), bases)


def test_random_bits_are_even_and_differ_from_step_to_step():
    bits = torch.arange(2**20, dtype=torch.int32)  # neighbours: the hardest for a hash
    first, second = (random_bits(bits, step=step).double() / 2**20 for step in (1, 2))
    assert first.mean() == pytest.approx(0.5, abs=0.002) and first.std() == pytest.approx(12**-0.5, rel=0.01)
    for one, other in ((first, second), (first[:-1], first[1:])):
        assert torch.corrcoef(torch.stack([one, other]))[0, 1].abs() < 0.005


@pytest.mark.parametrize(
    "row_numel, size", [(256, 256), (640, 160), (128, 128), (57, 57), (24, 24), (1024, 256), (1, 1)]
)
def test_blocks_divide_a_row_evenly(row_numel, size):
    assert block_size(row_numel) == size <= BLOCK


@pytest.mark.parametrize("beta2", [0.95, 0.995])
def test_adamw_with_states_of_8_bits_arrives_where_fp32_ones_do(beta2):
    """A quadratic with gradients of very different sizes and much noise; the reference is the same update with fp32 states."""
    ends = {}
    for coded in (False, True):
        generator = torch.Generator().manual_seed(3)
        scale = torch.exp2(2 * torch.randn(16, 256, generator=generator))
        weight = torch.ones(16, 256)
        states = [torch.zeros(16, 256), torch.zeros(16, 256)]
        for step in range(1, 301):
            grad = scale * (weight + torch.randn(16, 256, generator=generator))
            settings = {"lr": 0.01, "betas": (0.8, beta2), "eps": 1e-10, "weight_decay": 0.0, "grad_scale": 1.0}
            adamw_update([weight], [grad], [states[0]], [states[1]], step=step, **settings)
            if coded:
                states = [
                    again(state, dtype, step=step) for state, dtype in zip(states, (SIGNED, SQUARES), strict=True)
                ]
        ends[coded] = weight
    assert ends[True].square().mean().sqrt() == pytest.approx(ends[False].square().mean().sqrt().item(), rel=0.05)
    assert torch.corrcoef(torch.stack([ends[False].flatten(), ends[True].flatten()]))[0, 1] > 0.9
