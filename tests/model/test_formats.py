"""Codes, scales and values of 8 and 4 bits, by hand, by rule and beside other implementations; random bits and rotations."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rows import with_rows

from paceline.model.formats import (
    DTYPES,
    LARGEST,
    dequantize,
    e2m1_codes,
    exact,
    hadamard,
    pack_e2m1,
    philox,
    quantize_mx,
    quantize_nvfp4,
    quantize_tensorwise,
    rotate,
    swizzle_scales,
    transposed,
    uniform,
)
from tests.model.native_codes import E2M1, e2m1_elements, unpack_e2m1, unswizzle_scales

TINY = 2.0**-9
HUGE = 2.0**125


def row(values, size):
    """One row of a block, padded with zeros."""
    return torch.tensor([[*values, *[0.0] * (size - len(values))]])


def key(number):
    return torch.tensor(number, dtype=torch.int64)


# input, scale byte, codes, values; by hand from OCP Microscaling Formats v1.0
@pytest.mark.parametrize("values, byte, codes, expected", [
    ((0, 0.5, 1, 1.5, 2, 3, 4, 6), 127, "01234567", (0, 0.5, 1, 1.5, 2, 3, 4, 6)),
    ((6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5), 127, "70224466", (6, 0, 1, 1, 2, 2, 4, 4)),
    ((-6, -0.25, -0.75, -5, -0.0, 0.26), 127, "f8ae81", (-6, 0, -1, -4, 0, 0.5)),
    ((7, -7, 6.9, 0.6, 3.4), 128, "6e513", (8, -8, 6, 1, 3)),
    ((8, 1, 0.4, 5), 128, "6104", (8, 1, 0, 4)),
    ((0.75, 0.1, 0.0625, 0.03125), 124, "7210", (0.75, 0.125, 0.0625, 0)),
    ((5.99, 4.99, 5.01), 127, "767", (6, 4, 6)),
    ((12, 10, 9.99, 2), 128, "7662", (12, 8, 8, 2)),
    ((2**-124, 2**-126), 1, "62", (2**-124, 2**-126)),
    ((3e38, 1e38, 1e37), 253, "620", (math.inf, 2 * HUGE, 0)),  # 2**128 is beyond fp32
    ((0, 0), 0, "00", (0, 0)),
])  # fmt: skip
def test_a_block_of_mxfp4_is_what_the_specification_says(values, byte, codes, expected):
    q = quantize_mx(row(values, 32), "e2m1")
    assert q.scales.tolist() == [[byte]]
    assert "".join(f"{code:x}" for code in e2m1_codes(q.elements)[0, : len(codes)].tolist()) == codes
    assert dequantize(q)[0, : len(expected)].tolist() == list(expected)


def test_the_largest_element_of_a_block_of_mxfp8_is_not_clipped():
    q = quantize_mx(row((448, 500, 1, 0.001, -300, 17), 32), "e4m3")
    assert q.scales.item() == 128
    assert dequantize(q)[0, :6].tolist() == [448, 512, 1, 0, -288, 16]


# amax of the tensor, a block, the byte of its scale, codes, values; those of TransformerEngine's reference
@with_rows("amax, block, byte, codes, expected", [
    (2688, (2688, 1344, 448, -896, 672, 224, 112), 0x7E, "752c310", (2688, 1344, 448, -896, 672, 224, 0)),
    (2688, (6, 5, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25), 0x38, "76644220", (6, 4, 4, 2, 2, 1, 1, 0)),
    (2688, (3, -3, 1.5, 0.3, 0.1), 0x30, "7f510", (3, -3, 1.5, 0.25, 0)),
    (2688, (6.3, 6, 5, 1), 0x38, "7762", (6, 6, 4, 1)),
    (2688, (6.375, 3), 0x38, "75", (6, 3)),
    (2688, (7.125, 7), 0x3A, "77", (7.5, 7.5)),
    (2688, (6.37, -6.37), 0x38, "7f", (6, -6)),
    (5376, (12, 10, 7, 5), 0x38, "7664", (12, 8, 8, 4)),
    (1, (1, 0.5, 0.25, -0.125, 0.1), 0x7E, "753a1", (1, 0.5, 0.25, -1 / 6, 1 / 12)),
    (2688, (6 * TINY, 3 * TINY, TINY), 0x01, "752", (6 * TINY, 3 * TINY, TINY)),
    (2688, (6 * TINY / 4, TINY / 4), 0x00, "", (0, 0)),
    (0, (0, -0.0), 0x00, "0", (0, 0)),
])  # fmt: skip
def test_a_block_of_nvfp4_has_the_codes_of_nvidia_s_reference(amax, block, byte, codes, expected):
    q = quantize_nvfp4(torch.cat((row(block, 16), row((amax,), 16))))
    assert q.scales.view(torch.uint8)[0, 0].item() == byte
    assert "".join(f"{code:x}" for code in e2m1_codes(q.elements)[0, : len(codes)].tolist()) == codes
    assert dequantize(q)[0, : len(expected)].tolist() == pytest.approx(list(expected), rel=2e-7)


def test_square_blocks_have_one_scale_and_the_transpose_is_quantized_to_the_same_values():
    weight = torch.ones(16, 16)
    weight[0, 0] = 6
    weight = torch.cat((weight, torch.full((16, 16), 2688.0)))
    assert dequantize(quantize_nvfp4(weight, square=True))[1, 0].item() == 1
    assert dequantize(quantize_nvfp4(weight))[1, 0].item() == 1.03125
    x = torch.randn(48, 64, generator=torch.Generator().manual_seed(1))
    q = quantize_nvfp4(x, square=True)
    assert torch.equal(dequantize(quantize_nvfp4(x.t(), square=True)), dequantize(q).t())
    assert torch.equal(dequantize(transposed(q)), dequantize(q).t())
    assert not torch.equal(dequantize(quantize_nvfp4(x.t())), dequantize(quantize_nvfp4(x)).t())


def test_every_code_of_e2m1_is_a_value_and_back():
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(e2m1_codes(e2m1_elements(codes)), codes)
    assert e2m1_elements(codes)[:8].tolist() == list(E2M1)
    assert pack_e2m1(torch.tensor([1, 2], dtype=torch.uint8)).tolist() == [0x21]
    assert torch.equal(unpack_e2m1(pack_e2m1(codes)), codes)


@pytest.mark.parametrize("element", ["e4m3", "e5m2", "e2m1"])
def test_every_value_of_a_format_stays_and_every_midpoint_goes_to_the_even_code(element):
    if element == "e2m1":
        values, codes = torch.tensor(E2M1), torch.arange(8)
    else:
        codes = torch.arange(128, dtype=torch.uint8)
        values = codes.view(DTYPES[element]).float()
        codes, values = codes[values.isfinite()], values[values.isfinite()]
    low, high = values[:-1], values[1:]
    even = torch.where(codes[:-1] % 2 == 0, low, high)
    blocks = torch.full((len(even), 2, 32), LARGEST[element])  # the largest value keeps each scale at one
    blocks[:, 0, 1], blocks[:, 1, 1] = low, (low + high) / 2
    got = dequantize(quantize_mx(blocks.flatten(1), element)).view_as(blocks)
    assert torch.equal(got[:, 0, 1], low)
    assert torch.equal(got[:, 1, 1], even)


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_one_scale_takes_the_largest_element_to_the_end_of_the_format(element):
    x = torch.randn(32, 48, generator=torch.Generator().manual_seed(2)) * 1e-5
    q = quantize_tensorwise(x, element)
    assert q.elements.float().abs().amax().item() == LARGEST[element]
    assert (dequantize(q) - x).abs().max() <= x.abs().max() * 2**-3
    assert dequantize(quantize_tensorwise(torch.zeros(4, 4), element)).tolist() == torch.zeros(4, 4).tolist()
    largest = torch.finfo(torch.float32).max
    assert dequantize(quantize_tensorwise(torch.tensor([[largest, -largest]]), element)).isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("quantize", [
    lambda x: quantize_tensorwise(x, "e4m3"), lambda x: quantize_mx(x, "e4m3"), lambda x: quantize_mx(x, "e2m1"), quantize_nvfp4,
])  # fmt: skip
def test_what_is_not_finite_shows(quantize, bad):
    x = torch.ones(32, 64)
    x[1, 1] = bad
    assert not dequantize(quantize(x))[1, 1].isfinite()


@given(st.integers(0, 10_000), st.integers(-60, 60))
def test_values_without_the_outer_scale_are_exact_in_bf16(seed, exponent):
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    quantized = [
        *(quantize_tensorwise(x, element) for element in ("e4m3", "e5m2")),
        *(quantize_mx(x, element) for element in ("e4m3", "e5m2", "e2m1")),
        quantize_nvfp4(x),
        quantize_nvfp4(x, square=True),
    ]
    for q in quantized:
        wide, factor = exact(q, torch.float32)
        narrow, _ = exact(q, torch.bfloat16)
        assert torch.equal(wide, narrow.float())
        assert torch.equal(dequantize(q), wide if factor is None else wide * factor)


@pytest.mark.parametrize("value, noise, expected", [
    (2.4, 0.39, 3), (2.4, 0.41, 2), (-5, 0.49, -6), (-5, 0.5, -4), (0.1, 0.19, 0.5), (0.1, 0.21, 0), (6, 0.0, 6),
])  # fmt: skip
def test_stochastic_rounding_goes_up_where_the_noise_is_below_the_fraction(value, noise, expected):
    x = row((6, value), 32)
    assert dequantize(quantize_mx(x, "e2m1", noise=torch.full_like(x, noise)))[0, 1].item() == expected


def test_stochastic_rounding_is_right_in_the_mean():
    x = torch.full((100, 3200), 2.4)
    x[:, ::32] = 6
    values = dequantize(quantize_mx(x, "e2m1", noise=uniform(x.shape, key(7), 1)))
    mean = values.view(-1, 32)[:, 1:].double().mean().item()
    assert mean == pytest.approx(2.4, abs=5 * math.sqrt(0.24 / 310_000) + 2**-17)


def test_philox_gives_its_published_words():
    """Known answers of Random123, kat_vectors: philox2x32 with 10 rounds."""
    for counter, secret, words in (
        ((0, 0), 0, (0xFF1DAE59, 0x6CD10DF2)),
        ((0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFF, (0x2C3F628B, 0xAB4FD7AD)),
        ((0x243F6A88, 0x85A308D3), 0x13198A2E, (0xDD7CE038, 0xF62A4C12)),
    ):
        assert tuple(map(int, philox(key(counter[0]), key(counter[1]), key(secret), rounds=10))) == words


def test_random_bits_depend_on_key_stream_and_index_alone():
    numbers = uniform((300, 7), key(2**61 + 5), 1)
    assert torch.equal(uniform((2100,), key(2**61 + 5), 1).view(300, 7), numbers)
    assert torch.equal(uniform((299, 7), key(2**61 + 5), 1), numbers[:299])
    others = [
        uniform((300, 7), key(number), stream) for number, stream in ((2**61 + 6, 1), (2**60 + 5, 1), (2**61 + 5, 2))
    ]
    for other in others:
        assert abs(torch.corrcoef(torch.stack((numbers.flatten(), other.flatten())))[0, 1]) < 5 / math.sqrt(2100)
    assert numbers.min() >= 0 and numbers.max() < 1
    assert numbers.mean().item() == pytest.approx(0.5, abs=5 * math.sqrt(1 / 12 / 2100))


def test_a_rotation_is_orthogonal_and_leaves_a_product_as_it_is():
    assert rotate(torch.ones(1, 16), 16)[0].tolist() == [-1, 0, 1, 0, 1, 0, -1, 0, 1, 2, 1, 0, 1, 0, 1, -2]
    for size in (16, 32):
        matrix = hadamard(size, torch.device("cpu"))
        assert torch.allclose(matrix @ matrix.t(), torch.eye(size), atol=1e-6)
    a, b = torch.randn(2, 24, 64, generator=torch.Generator().manual_seed(3)).double().float().unbind()
    assert torch.allclose(rotate(a, 16) @ rotate(b, 16).t(), a @ b.t(), atol=1e-5)


@pytest.mark.parametrize("shape", [(128, 4), (1, 1), (200, 7), (300, 12)])
def test_scales_are_ordered_in_tiles_and_back(shape):
    scales = torch.randint(255, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
    swizzled = swizzle_scales(scales)
    assert swizzled.numel() == -(-shape[0] // 128) * 128 * -(-shape[1] // 4) * 4
    assert torch.equal(unswizzle_scales(swizzled, shape), scales)
    if shape[0] > 40:
        assert swizzled[16 * 8 + 4 * 1 + 3].item() == scales[40, 3].item()  # row 40 is row 8 of the second quarter


def test_the_codes_are_those_of_torchao():
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="torchao is not installed")
    from torchao.prototype.mx_formats.config import ScaleCalculationMode as Mode

    generator = torch.Generator().manual_seed(5)
    x = torch.randn(64, 128, generator=generator) * 2.0 ** torch.randint(-20, 20, (64, 1), generator=generator)
    x = x.bfloat16()
    for element, dtype in (("e4m3", torch.float8_e4m3fn), ("e2m1", torch.float4_e2m1fn_x2)):
        scales, elements = mx.to_mx(x, dtype, 32, Mode.RCEIL)
        q = quantize_mx(x, element)
        codes = q.elements.view(torch.uint8) if element == "e4m3" else pack_e2m1(e2m1_codes(q.elements))
        assert torch.equal(scales.view(torch.uint8), q.scales)
        assert torch.equal(elements.view(torch.uint8), codes)


@pytest.mark.parametrize("square", [False, True])
def test_the_codes_of_nvfp4_are_those_of_transformer_engine(square):
    reference = pytest.importorskip(
        "transformer_engine.pytorch.custom_recipes.reference_nvfp4", reason="TransformerEngine is not installed"
    )
    tile = (16, 16) if square else (1, 16)
    quantizer = reference.NVFP4QuantizerRef("e2m1", columnwise=False, quant_tile_shape=tile)
    generator = torch.Generator().manual_seed(6)
    for exponent in (-30, 0, 30):
        spread = torch.randint(-12, 12, (256, 1), generator=generator)
        x = torch.randn(256, 512, generator=generator) * 2.0 ** (exponent + spread)
        expected, q = quantizer.quantize(x), quantize_nvfp4(x, square=square)
        assert torch.equal(expected.scale.view(torch.uint8), q.scales.view(torch.uint8))
        assert torch.equal(reference.cast_from_fp4x2(expected.data, torch.float32), q.elements)
