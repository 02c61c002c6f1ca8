"""
A tensor to fp8 by two Triton kernels: its largest absolute value, then its codes, as they are and transposed from one reading.

model/linear.py calls them on CUDA devices where Triton is installed. The numbers are those of formats.quantize_tensorwise, to the
bit. A product wants both layouts of a gradient and of a weight; op by op each is made by a reading of its own, and the transposed
one writes single bytes far apart. LLMQ's README shows what casting and transposing at once gains on GeForce cards.

Values are rounded before they are cast: on capability 8.9 Triton casts fp32 to fp16 and that to fp8, which rounds twice.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, BLOCKS = 4096, 8  # elements at a time, and how many times, in a program that looks for the largest
TILE = 128  # rows and columns of a program that casts: a row of a tile is 128 bytes in either layout
CAST_WARPS = 8


def largest_fused(x: Tensor) -> Tensor:
    """Returns the largest absolute value of a contiguous tensor, () fp32; NaN if there is one."""
    largest = torch.zeros((), dtype=torch.int32, device=x.device)
    largest_kernel[(triton.cdiv(x.numel(), BLOCK * BLOCKS),)](x, largest, x.numel(), BLOCK=BLOCK, BLOCKS=BLOCKS)
    return largest.view(torch.float32)


def cast_fused(
    x: Tensor, amax: Tensor, dtype: torch.dtype, *, smallest: float, rows: bool, columns: bool
) -> tuple[Tensor, Tensor]:
    """Returns x in fp8 as (M, K) and transposed as (K, M), scaled so that amax is the format's largest; else an empty tensor.

    x: (M, K), contiguous. amax: () fp32, taken as `smallest` below it. rows, columns: which of the two are wanted.
    """
    height, width = x.shape
    shapes = ((height, width) if rows else (0,), (width, height) if columns else (0,))
    codes, format_of = [torch.empty(shape, dtype=dtype, device=x.device) for shape in shapes], torch.finfo(dtype)
    grid = (triton.cdiv(width, TILE), triton.cdiv(height, TILE))
    cast_kernel[grid](
        x,
        *codes,
        amax,
        height,
        width,
        LARGEST=format_of.max,
        NORMAL=format_of.smallest_normal,
        MANTISSA=-int(math.log2(format_of.eps)),
        SMALLEST=smallest,
        ROWS=rows,
        COLUMNS=columns,
        TILE=TILE,
        num_warps=CAST_WARPS,
    )
    return codes[0], codes[1]


@triton.jit  # type: ignore[untyped-decorator]
def largest_kernel(x, largest, numel, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Raises `largest`, the bits of a number that is not negative: as integers they have the numbers' order, NaN last."""
    start = tl.program_id(0).to(tl.int64) * (BLOCK * BLOCKS)
    largest_bits = tl.zeros((BLOCK,), tl.int32)
    for block in range(BLOCKS):
        index = start + block * BLOCK + tl.arange(0, BLOCK)
        size = tl.abs(tl.load(x + index, mask=index < numel, other=0.0).to(tl.float32))
        largest_bits = tl.maximum(largest_bits, size.to(tl.int32, bitcast=True))
    tl.atomic_max(largest, tl.max(largest_bits, 0))


@triton.jit  # type: ignore[untyped-decorator]
def cast_kernel(  # type: ignore[no-untyped-def]
    x,
    rows,
    columns,
    amax,
    height,
    width,
    LARGEST: tl.constexpr,
    NORMAL: tl.constexpr,
    MANTISSA: tl.constexpr,
    SMALLEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Casts one tile of x in each program. NORMAL, MANTISSA: the format's smallest normal value, its bits behind the point."""
    k = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)[None, :]
    m = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)[:, None]
    inside = (m < height) & (k < width)
    size = tl.maximum(tl.load(amax), SMALLEST, propagate_nan=tl.PropagateNan.ALL)
    scale = tl.div_rn(1.0, size) * LARGEST  # as PyTorch divides a number by a tensor
    values = tl.load(x + m * width + k, mask=inside, other=0.0).to(tl.float32) * scale
    values = rounded(tl.clamp(values, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL), NORMAL, MANTISSA)
    if ROWS:
        tl.store(rows + m * width + k, values.to(rows.dtype.element_ty), mask=inside)
    if COLUMNS:
        codes = tl.trans(values.to(columns.dtype.element_ty))
        tl.store(columns + tl.trans(k) * height + tl.trans(m), codes, mask=tl.trans(inside))


@triton.jit  # type: ignore[untyped-decorator]
def rounded(values, NORMAL: tl.constexpr, MANTISSA: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rounds fp32 values to those of a format, to even; NaN stays."""
    DROPPED: tl.constexpr = 23 - MANTISSA
    FAR: tl.constexpr = NORMAL * 2.0**DROPPED  # beside it fp32 has the step of the format's values below NORMAL
    bits = values.to(tl.int32, bitcast=True)
    size = tl.abs(values)
    even = (bits >> DROPPED) & 1
    normal = ((bits + (even + ((1 << (DROPPED - 1)) - 1))) & (-(1 << DROPPED))).to(tl.float32, bitcast=True)
    small = (((size + FAR) - FAR).to(tl.int32, bitcast=True) | (bits & -0x80000000)).to(tl.float32, bitcast=True)
    return tl.where(size < NORMAL, small, tl.where(size <= 1e6, normal, values))
