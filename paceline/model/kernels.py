"""
The Triton kernels: the loss between its two products, and the cast of a tensor to fp8.

Loss: one kernel reads a row of logits twice, and writes their gradient in their place. model/layers.py calls it where Triton is
installed, which CUDA builds of PyTorch for Linux bring along. capped_nats_ there has the formula and its reason; this is the same
in fp32, whatever the logits are. Many threads work on few rows, so that the second reading finds a row in the L2 cache. Fusing loss
and gradient in place of the logits is Liger's idea (arXiv 2410.10989).

Cast: one kernel finds the tensor's largest absolute value, another writes its codes, as they are and transposed from one reading.
model/linear.py calls them on CUDA devices. The numbers are those of formats.quantize_tensorwise, to the bit. A product wants both
layouts of a gradient and of a weight; op by op each is made by a reading of its own, and the transposed one writes single bytes far
apart. LLMQ's README shows what casting and transposing at once gains on GeForce cards. Values are rounded before they are cast: on
capability 8.9 Triton casts fp32 to fp16 and that to fp8, which rounds twice.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

LOSS_BLOCK = 4096  # columns at a time: 16 bytes of 16-bit logits for each thread
LOSS_WARPS = 16
AMAX_BLOCK, AMAX_BLOCKS = 4096, 8  # elements at a time, and how many times, in a program that looks for the largest
TILE = 128  # rows and columns of a program that casts: a row of a tile is 128 bytes in either layout
CAST_WARPS = 8


def capped_nats_fused_(
    z: Tensor, targets: Tensor, vocab_size: int, with_grad: bool, grad_scale: Tensor | None, *, cap: float
) -> Tensor:
    """Returns what layers.capped_nats_ returns, and does to z, whose rows are contiguous, what it does."""
    nats = torch.empty(len(z), dtype=torch.float32, device=z.device)  # (n,)
    # without a scale any pointer will do: it is not read
    pointers = (z, targets, nats, nats if grad_scale is None else grad_scale)
    sizes = (z.stride(0), z.shape[1], vocab_size)
    capped_nats_kernel[(len(z),)](
        *pointers,
        *sizes,
        CAP_WIDTH=2 * cap,
        WITH_GRAD=with_grad,
        HAS_SCALE=grad_scale is not None,
        BLOCK=LOSS_BLOCK,
        num_warps=LOSS_WARPS,
    )
    return nats


@triton.jit  # type: ignore[untyped-decorator]
def capped_nats_kernel(  # type: ignore[no-untyped-def]
    logits,
    targets,
    nats,
    grad_scale,
    row_stride,
    width,
    vocab_size,
    CAP_WIDTH: tl.constexpr,
    WITH_GRAD: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes one row of logits in each program. CAP_WIDTH: the difference between the largest and the smallest capped logit."""
    TO_SIGMOID: tl.constexpr = 4.0 / CAP_WIDTH
    TO_BITS: tl.constexpr = CAP_WIDTH * 1.4426950408889634  # exp(x) = exp2(x / ln 2)
    row = tl.program_id(0).to(tl.int64)  # a chunk may have more than 2^31 logits
    logits += row * row_stride
    target = tl.load(targets + row)
    total, at_target = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_token = column < vocab_size
        s = tl.sigmoid(tl.load(logits + column, mask=is_token, other=0.0).to(tl.float32) * TO_SIGMOID)
        total += tl.where(is_token, tl.exp2(s * TO_BITS), 0.0)
        at_target += tl.where(column == target, s, 0.0)
    row_total = tl.sum(total, 0)
    tl.store(nats + row, tl.where(target >= 0, tl.log(row_total) - tl.sum(at_target, 0) * CAP_WIDTH, 0.0))
    if WITH_GRAD:
        weight = tl.where(target >= 0, 4.0, 0.0)
        if HAS_SCALE:
            weight *= tl.load(grad_scale)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            is_token = column < vocab_size
            s = tl.sigmoid(tl.load(logits + column, mask=is_token, other=0.0).to(tl.float32) * TO_SIGMOID)
            error = tl.exp2(s * TO_BITS) / row_total - tl.where(column == target, 1.0, 0.0)
            gradient = tl.where(is_token, weight * error * s * (1.0 - s), 0.0)
            tl.store(logits + column, gradient.to(logits.dtype.element_ty), mask=column < width)


def largest_fused(x: Tensor) -> Tensor:
    """Returns the largest absolute value of a contiguous tensor, () fp32; NaN if there is one."""
    largest = torch.zeros((), dtype=torch.int32, device=x.device)
    grid = (triton.cdiv(x.numel(), AMAX_BLOCK * AMAX_BLOCKS),)
    largest_kernel[grid](x, largest, x.numel(), BLOCK=AMAX_BLOCK, BLOCKS=AMAX_BLOCKS)
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
