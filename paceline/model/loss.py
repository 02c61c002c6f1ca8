"""
Soft-capped cross-entropy over a large vocabulary, within a stated number of bytes.

Logits are the largest tensor of a small GPT. Here they exist for a chunk of tokens at a time, and their gradient takes their place:
one pass forward yields the loss and the gradients by x and by the weight, so that nothing is kept and nothing computed twice.
The idea is Liger's fused linear cross-entropy; softcap(z) = 15 tanh(z / 15) is nanochat's.

15 tanh(z / 15) = 30 sigmoid(z / 7.5) - 15, and softmax does not see the -15: sigmoid is ten times cheaper than tanh on a CPU.
Values stay within [0, 30], so exp needs no maximum taken off.
"""

# N tokens, C n_embd, V padded_vocab_size

import functools
import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

SOFTCAP = 15.0
FP32_COPIES = 4  # tensors as large as a block's logits that capped_nats_ holds at once, in fp32
CPU_CHUNK_BYTES = 16 << 20  # larger is not faster, and glibc hands larger tensors out as fresh pages, each a fault
CPU_BLOCK_BYTES = 1 << 20  # a block's logits stay in the L2 cache from op to op


def softcap(logits: Tensor) -> Tensor:
    return SOFTCAP * torch.tanh(logits / SOFTCAP)


@torch.compiler.disable  # a compiler may keep several chunks alive; only capped_nats_ is compiled
def sum_of_nats(
    x: Tensor, weight: Tensor, targets: Tensor, *, vocab_size: int, budget_bytes: int, compiled: bool
) -> Tensor:
    """() fp32: nats summed over the targets that are not -1. x: (N, C); weight: (V, C) in x.dtype; targets: (N,) int64.

    budget_bytes bounds all that is as large as logits: themselves, their gradient and the fp32 copies between (one token's at least).
    """
    return cast(
        Tensor, _SumOfNats.apply(x, weight, targets, vocab_size, budget_bytes, compiled, torch.is_grad_enabled())
    )


@torch.compiler.disable
def nats_per_token(x: Tensor, weight: Tensor, targets: Tensor, *, vocab_size: int, budget_bytes: int) -> Tensor:
    """(N,) fp32: nats of each target, 0 where it is -1. Differentiable; a chunk's logits are computed again for backward."""
    rows, _ = chunk_rows(x, weight.shape[0], budget_bytes)
    chunks = zip(x.split(rows), targets.split(rows), strict=True)
    return torch.cat([checkpoint(_plain_nats, *chunk, weight, vocab_size, use_reentrant=False) for chunk in chunks])


def _plain_nats(x: Tensor, targets: Tensor, weight: Tensor, vocab_size: int) -> Tensor:
    logits = softcap((x @ weight.t())[:, :vocab_size].float())
    return torch.nn.functional.cross_entropy(logits, targets, ignore_index=-1, reduction="none")


def chunk_rows(x: Tensor, vocab: int, budget_bytes: int) -> tuple[int, int]:
    """Tokens whose logits are computed at once, and tokens of these that are turned into nats and gradient at once."""
    chunk_bytes, block_bytes = budget_bytes // 2, budget_bytes // 2 // FP32_COPIES
    if x.device.type == "cpu":
        chunk_bytes, block_bytes = min(chunk_bytes, CPU_CHUNK_BYTES), min(block_bytes, CPU_BLOCK_BYTES)
    chunk = min(x.shape[0], max(1, chunk_bytes // (vocab * x.element_size())))
    return chunk, min(chunk, max(1, block_bytes // (vocab * 4)))


class _SumOfNats(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocab_size: int,
        budget_bytes: int,
        compiled: bool,
        with_grad: bool,
    ) -> Tensor:
        nats = torch.zeros((), dtype=torch.float32, device=x.device)
        dx, dw = torch.empty_like(x if with_grad else x[:0]), None
        chunk, block = chunk_rows(x, weight.shape[0], budget_bytes)
        capped = _compiled_capped_nats() if compiled else capped_nats_
        for at in range(0, x.shape[0], chunk):
            rows = slice(at, at + chunk)
            logits = x[rows] @ weight.t()  # (chunk, V) x.dtype
            pairs = zip(logits.split(block), targets[rows].split(block), strict=True)
            nats += torch.stack([capped(z, y, vocab_size, with_grad) for z, y in pairs]).sum()
            if with_grad:  # logits hold their gradient now
                torch.mm(logits, weight, out=dx[rows])
                dw = plus_matmul(dw, logits.t(), x[rows])
        ctx.save_for_backward(dx, dw)
        return nats

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dnats,), (dx, dw) = grads, ctx.saved_tensors
        return dx * dnats.to(dx.dtype), dw.mul_(dnats), None, None, None, None, None


def plus_matmul(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + a @ b in fp32, in total's place; None stands for zero."""
    if total is None:
        return (a @ b).float()
    return total.addmm_(a, b) if a.dtype == total.dtype else total.add_(a @ b)


def capped_nats_(z: Tensor, targets: Tensor, vocab_size: int, with_grad: bool) -> Tensor:
    """() fp32 sum of nats; puts d(nats)/dz in z's place.

    z: (n, V) logits before the cap; columns from vocab_size on stand for no token.
    """
    valid = (targets >= 0).unsqueeze(-1)  # (n, 1)
    at = targets.clamp_min(0).unsqueeze(-1)  # (n, 1)
    s = (z[:, :vocab_size].float() * (2 / SOFTCAP)).sigmoid_()  # (n, vocab_size) fp32
    e = torch.exp2(s * (2 * SOFTCAP / math.log(2)))
    total, s_at, e_at = e.sum(-1, keepdim=True), s.gather(-1, at), e.gather(-1, at)  # (n, 1) each
    if with_grad:  # (softmax - onehot) * dcap/dz, and dcap/dz = 4 s (1 - s)
        z[:, :vocab_size] = e.mul_(4 * valid / total).mul_(s.addcmul_(s, s, value=-1))
        z[:, vocab_size:] = 0
        z.scatter_(-1, at, (4 * valid * (e_at / total - 1) * s_at * (1 - s_at)).to(z.dtype))
    return ((total.log() - s_at * (2 * SOFTCAP)) * valid).sum()


@functools.cache
def _compiled_capped_nats() -> Callable[[Tensor, Tensor, int, bool], Tensor]:
    return torch.compile(capped_nats_, dynamic=False)
