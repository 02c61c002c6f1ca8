"""
The loss between its two products as one Triton kernel: it reads a row of logits twice, and writes their gradient in their place.

model/layers.py imports it where Triton is installed, which CUDA builds of PyTorch for Linux bring along. capped_nats_ there has the
formula and its reason; this is the same in fp32, whatever the logits are. Many threads work on few rows, so that the second reading
finds a row in the L2 cache. Fusing loss and gradient in place of the logits is Liger's idea (arXiv 2410.10989).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # columns at a time: 16 bytes of 16-bit logits for each thread
WARPS = 16


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
        BLOCK=BLOCK,
        num_warps=WARPS,
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
