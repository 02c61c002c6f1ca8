"""
Number formats of 8 and 4 bits: how a tensor becomes elements with scales, and these become values again.

Pure functions on tensors: no gradients, no products, no layers. Arithmetic is in fp32, whatever comes in. Blocks run along the last
dim, over which a product sums. Formats: OCP Microscaling Formats v1.0 (E4M3, E5M2, E2M1, E8M0); NVFP4, arXiv 2509.25149, in the
order of operations of TransformerEngine's reference, which has the hardware's bits. Random bits come from counters (Philox, Salmon
et al. 2011), so that they repeat on any device and at any number of ranks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# R rows and K columns of an operand; S its blocks along a row

LARGEST = {"e4m3": 448.0, "e5m2": 57_344.0, "e2m1": 6.0}
# PyTorch can store E2M1 but not compute with it: its elements are kept as fp32
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e2m1": torch.float32}
MX_BLOCK, NVFP4_BLOCK = 32, 16
BIAS, NOT_A_NUMBER = 127, 255  # of a scale in E8M0
SMALLEST_AMAX = 2.0**-100  # of a whole tensor: its reciprocal stays finite
LARGEST_FP32 = torch.finfo(torch.float32).max
# signs before the Hadamard transform, as NVIDIA's kernels have them; the same on all ranks
NEGATIVE = 0b1101011111101000
MULTIPLIER, KEY_STEP, ROUNDS = 0xD256D193, 0x9E3779B9, 7  # of Philox 2x32; 7 rounds pass BigCrush
WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class Quantized:
    """A tensor of elements and their scales: value = element * its block's scale * tensor_scale.

    elements: (R, K), float8 or fp32 of E2M1 values. scales: () fp32, (R, S) bytes of E8M0 or float8 of E4M3. block: the elements
    of a row that share a scale; 0: all of the tensor. tensor_scale: () fp32.
    """

    elements: Tensor
    scales: Tensor
    block: int
    tensor_scale: Tensor | None = None

    @property
    def is_packed(self) -> bool:
        """Whether two elements fit into a byte."""
        return self.elements.dtype == torch.float32


def quantize_tensorwise(x: Tensor, element: str) -> Quantized:
    """Quantizes a tensor of any shape with one scale, so that its largest element is the format's."""
    amax, largest = x.abs().amax().float().clamp_min(SMALLEST_AMAX), LARGEST[element]
    return Quantized(_to_element(x.float() * (largest / amax), element), amax * (1 / largest), block=0)


def quantize_mx(x: Tensor, element: str, *, noise: Tensor | None = None) -> Quantized:
    """Quantizes (R, K) with a power of two for each 32 elements of a row.

    The specification takes the power of two below the largest element, which may be clipped then: this takes the next one in that
    case, the rule that is called rceil. noise: of uniform, for stochastic rounding of E2M1. A block with a NaN or an infinity is
    all NaN.
    """
    blocks = in_blocks(x.float(), MX_BLOCK)  # (R, S, 32)
    bits = blocks.abs().amax(-1).view(torch.int32)  # (R, S); of fp32: 8 of the exponent, 23 of the mantissa
    largest = math.frexp(LARGEST[element])  # mantissa in [0.5, 1), exponent
    byte = (bits >> 23) - (largest[1] - 1) + ((bits & 0x7FFFFF) > int((2 * largest[0] - 1) * 2**23))
    byte = torch.where(bits >= 0x7F800000, NOT_A_NUMBER, byte.clamp_min(0))
    inverse = ((2 * BIAS - byte) << 23).view(torch.float32)  # 2 ** (127 - byte)
    inverse = torch.where(byte == NOT_A_NUMBER, math.nan, inverse).unsqueeze(-1)
    return Quantized(_to_element((blocks * inverse).flatten(-2), element, noise), byte.to(torch.uint8), MX_BLOCK)


def quantize_nvfp4(x: Tensor, *, square: bool = False, noise: Tensor | None = None) -> Quantized:
    """Quantizes (R, K) to E2M1 with an E4M3 scale for each 16 elements of a row, or for each 16 x 16, and one fp32 scale.

    Squares make the quantized transpose the transpose of the quantized. noise: of uniform, for stochastic rounding.
    """
    x = x.float()
    size = NVFP4_BLOCK
    if square:
        block_amax = in_blocks(x.abs(), size).amax(-1)  # (R, S)
        block_amax = block_amax.view(-1, size, block_amax.shape[-1]).amax(1)  # (R/16, S)
        block_amax = block_amax.unsqueeze(1).expand(-1, size, -1).flatten(0, 1)  # (R, S)
    else:
        block_amax = in_blocks(x.abs(), size).amax(-1)  # (R, S)
    amax = block_amax.amax()
    largest = LARGEST["e2m1"] * LARGEST["e4m3"]
    encode = torch.where(amax == 0, 1.0, (largest / amax).clamp_max(LARGEST_FP32))  # ()
    scales = (block_amax * (encode * (1 / LARGEST["e2m1"]))).clamp_max(LARGEST["e4m3"]).to(DTYPES["e4m3"])
    inverse = (1 / (scales.float() * (1 / encode))).clamp_max(LARGEST_FP32)  # (R, S)
    scaled = in_blocks(x, size) * inverse.unsqueeze(-1)
    return Quantized(_to_element(scaled.flatten(-2), "e2m1", noise), scales, size, 1 / encode)


def _to_element(x: Tensor, element: str, noise: Tensor | None = None) -> Tensor:
    """Rounds fp32 values to those of a format, to even or by noise; beyond the largest to the largest. NaN stays."""
    largest = LARGEST[element]
    if element != "e2m1":
        return x.clamp(-largest, largest).to(DTYPES[element])
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    if noise is None:
        return (torch.round(x / step) * step).clamp(-largest, largest)
    steps = size / step
    whole = steps.floor()
    rounded = (whole + (noise < steps - whole)) * step
    return torch.copysign(rounded.clamp_max(largest), x)


def in_blocks(x: Tensor, size: int) -> Tensor:
    """Returns (..., K) as (..., K/size, size)."""
    return x.reshape(*x.shape[:-1], -1, size)


def block_scales(q: Quantized) -> Tensor:
    """Returns the scales of blocks as fp32, (R, S)."""
    if q.scales.dtype != torch.uint8:
        return q.scales.float()
    byte = q.scales.to(torch.int32)
    scale = (byte.clamp_min(1) << 23).view(torch.float32)  # 2 ** (byte - 127)
    return torch.where(byte == NOT_A_NUMBER, math.nan, torch.where(byte == 0, 0.5 * scale, scale))


def exact(q: Quantized, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Returns what a product multiplies, (R, K), and the factor of its result: bf16 and fp32 hold the first exactly.

    An element of E4M3 or E2M1 has at most 4 significant bits and an E4M3 scale as many; a power of two adds none. What covers a
    whole tensor is the factor, () fp32.
    """
    if not q.block:
        return q.elements.to(dtype), q.scales
    blocks = in_blocks(q.elements.float(), q.block) * block_scales(q).unsqueeze(-1)
    return blocks.flatten(-2).to(dtype), q.tensor_scale


def dequantize(q: Quantized) -> Tensor:
    """Returns the values, (R, K) fp32."""
    values, factor = exact(q, torch.float32)
    return values if factor is None else values * factor


def transposed(q: Quantized) -> Quantized:
    """Returns the transpose, of one scale or of square blocks."""
    scales = q.scales
    if q.block:
        bytes_of_scales = scales.view(torch.uint8)[:: q.block].t()  # (S, R/16)
        scales = bytes_of_scales.repeat_interleave(q.block, 0).view(scales.dtype)
    return Quantized(q.elements.t(), scales, q.block, q.tensor_scale)


def e2m1_codes(elements: Tensor) -> Tensor:
    """Returns the codes of E2M1 values, 0 to 15 in uint8."""
    size = elements.abs()
    code = torch.where(size < 2, 2 * size, torch.where(size < 4, size + 2, size / 2 + 4))
    return code.to(torch.uint8) + 8 * torch.signbit(elements).to(torch.uint8)


def pack_e2m1(codes: Tensor) -> Tensor:
    """Puts two codes into a byte, the even one into its low half: (R, K) -> (R, K/2) uint8."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def swizzle_scales(scales: Tensor) -> Tensor:
    """Returns (R, S) scales, one byte each, in the order in which tensor cores read them, padded with zeros: 1-dim.

    Tiles of 128 x 4 follow each other along rows; within a tile row r, column c is byte 16 * (r % 32) + 4 * (r // 32) + c.
    """
    rows, columns = (-(-size // step) * step for size, step in zip(scales.shape, (128, 4), strict=True))
    padded = scales.new_zeros(rows, columns, dtype=torch.uint8)
    padded[: scales.shape[0], : scales.shape[1]] = scales.view(torch.uint8)
    tiles = padded.view(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.flatten()


def hadamard(size: int, device: torch.device) -> Tensor:
    """Returns the orthogonal matrix of a random Hadamard transform, (size, size) fp32: signs, then Sylvester's matrix.

    size: 16 or 32.
    """
    index = torch.arange(size, device=device)  # arithmetic on the device: a table would be copied there in every call
    bits = index & index.unsqueeze(1)  # (size, size); an entry is negative where an odd number of them is set
    for shift in (4, 2, 1):
        bits = bits ^ bits >> shift
    signs = (NEGATIVE >> index % 16).unsqueeze(1)  # of rows
    return (1 - 2 * ((bits ^ signs) & 1)).float() / math.sqrt(size)


def rotate(x: Tensor, size: int) -> Tensor:
    """Applies the random Hadamard transform to each `size` elements along the last dim, fp32.

    It is orthogonal: a product of two operands that are both rotated along the dim of its sum is the same.
    """
    rotated = in_blocks(x.float(), size) @ hadamard(size, x.device)
    return rotated.flatten(-2)


def uniform(shape: Sequence[int], key: Tensor, stream: int) -> Tensor:
    """Returns random numbers in [0, 1), fp32 of 16 bits, that depend on key, stream and an element's index alone.

    key: () int64. Rounding to E2M1 by 16 bits has a bias of 2**-17 of a step.
    """
    count, key_and_stream = math.prod(shape), (key & WORD, (key >> 32) + stream & WORD)
    if torch.compiler.is_compiling():  # four times the arithmetic, in registers, and no words in memory
        index = torch.arange(count, device=key.device)
        low, high = words_of(index >> 2, *key_and_stream)
        parts = torch.where(index & 2 == 0, low, high) >> 16 * (index & 1) & 0xFFFF
    else:
        low, high = words_of(torch.arange(-(-count // 4), device=key.device), *key_and_stream)
        parts = torch.stack((low & 0xFFFF, low >> 16, high & 0xFFFF, high >> 16), dim=-1).flatten()[:count]
    return (parts.float() * 2**-16).view(*shape)


def words_of(index: Tensor, key: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
    """Returns two random words for each index.

    The counter begins at the key, since TorchInductor would multiply a plain index in 32 bits (torch 2.13).
    """
    return philox(index ^ key, stream, key)


def philox(low: Tensor, high: Tensor, key: Tensor, *, rounds: int = ROUNDS) -> tuple[Tensor, Tensor]:
    """Returns two random words of 32 bits for each counter of two, by Philox 2x32; all are int64."""
    for _ in range(rounds):
        wide = low * MULTIPLIER  # wraps around at 64 bits, which changes none of them
        low, high = (wide >> 32 & WORD) ^ key ^ high, wide & WORD
        key = key + KEY_STEP & WORD
    return low, high
