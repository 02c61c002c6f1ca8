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
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

SOFTCAP = 15.0
FP32_COPIES = 4  # tensors as large as a block's logits that capped_nats_ holds at once, in fp32
CPU_CHUNK_BYTES = 16 << 20  # larger is not faster, and glibc hands larger tensors out as fresh pages, each a fault
CPU_BLOCK_BYTES = 2 << 20  # a block's logits stay in the L2 cache from op to op


def softcap(logits: Tensor) -> Tensor:
    return SOFTCAP * torch.tanh(logits / SOFTCAP)


def sum_of_nats(
    x: Tensor, weight: Tensor, targets: Tensor, *, vocab_size: int, budget_bytes: int, compiled: bool
) -> Tensor:
    """() fp32: nats summed over the targets that are not -1. x: (N, C); weight: (V, C) in x.dtype; targets: (N,) int64.

    budget_bytes bounds what is as large as logits: themselves, their gradient, fp32 copies between; one token's at least.
    """
    if torch.is_grad_enabled():
        return cast(Tensor, _SumOfNats.apply(x, weight, targets, vocab_size, budget_bytes, compiled))  # type: ignore[no-untyped-call]
    chunks = nats_by_chunk(x, weight, targets, vocab_size, budget_bytes, compiled=compiled, with_grad=False)
    return torch.cat([nats for _, nats, _ in chunks]).sum()


@torch.no_grad()
def nats_per_token(
    x: Tensor, weight: Tensor, targets: Tensor, *, vocab_size: int, budget_bytes: int, compiled: bool
) -> Tensor:
    """(N,) fp32: nats of each target, 0 where it is -1. To evaluate with: it has no gradient."""
    chunks = nats_by_chunk(x, weight, targets, vocab_size, budget_bytes, compiled=compiled, with_grad=False)
    return torch.cat([nats for _, nats, _ in chunks])


def nats_by_chunk(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    budget_bytes: int,
    *,
    compiled: bool,
    with_grad: bool,
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Of each chunk: its tokens, (chunk,) fp32 nats, and (chunk, V) their gradient by the logits, or the logits.

    All chunks' logits lie in the same memory: use them before the next chunk.
    """
    chunk, block = chunk_rows(x, weight.shape[0], budget_bytes, compiled=compiled)
    capped = _compiled_capped_nats() if compiled else capped_nats_
    buffer = x.new_empty(chunk, weight.shape[0])  # (chunk, V) x.dtype
    for start in range(0, x.shape[0], chunk):
        rows = slice(start, min(start + chunk, x.shape[0]))
        logits = torch.mm(x[rows], weight.t(), out=buffer[: rows.stop - start])
        pairs = zip(logits.split(block), targets[rows].split(block), strict=True)  # type: ignore[no-untyped-call]
        yield rows, torch.cat([capped(z, at, vocab_size, with_grad) for z, at in pairs]), logits


def chunk_rows(x: Tensor, vocab: int, budget_bytes: int, *, compiled: bool) -> tuple[int, int]:
    """Tokens whose logits are computed at once, and tokens of these that go through capped_nats_ at once."""
    num_tokens = x.shape[0]
    if compiled and x.device.type != "cpu":  # one kernel without copies
        chunk = min(num_tokens, max(1, budget_bytes // (vocab * x.element_size())))
        return chunk, chunk
    chunk_bytes, block_bytes = budget_bytes // 2, budget_bytes // 2 // FP32_COPIES
    if x.device.type == "cpu":
        chunk_bytes, block_bytes = min(chunk_bytes, CPU_CHUNK_BYTES), min(block_bytes, CPU_BLOCK_BYTES)
    chunk = min(num_tokens, max(1, chunk_bytes // (vocab * x.element_size())))
    return chunk, min(chunk, max(1, block_bytes // (vocab * 4)))


class _SumOfNats(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, budget_bytes: int, compiled: bool
    ) -> Tensor:
        dx, dw, sums = torch.empty_like(x), None, []
        chunks = nats_by_chunk(x, weight, targets, vocab_size, budget_bytes, compiled=compiled, with_grad=True)
        for rows, nats, dlogits in chunks:
            torch.mm(dlogits, weight, out=dx[rows])
            dw = plus_matmul(dw, dlogits.t(), x[rows])
            sums.append(nats.sum())
        ctx.save_for_backward(dx, dw)
        return torch.stack(sums).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dnats,), (dx, dw) = grads, ctx.saved_tensors
        return dx.mul_(dnats.to(dx.dtype)), dw.mul_(dnats), None, None, None, None  # in place: a second backward raises


def plus_matmul(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + a @ b in fp32, in total's place; None stands for zero."""
    if total is None:
        return (a @ b).float()
    return total.addmm_(a, b) if a.dtype == total.dtype else total.add_(a @ b)


def capped_nats_(z: Tensor, targets: Tensor, vocab_size: int, with_grad: bool) -> Tensor:
    """(n,) fp32 nats; with_grad puts d(nats)/dz in z's place.

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
    return ((total.log() - s_at * (2 * SOFTCAP)) * valid).squeeze(-1)


@functools.cache
def _compiled_capped_nats() -> Callable[[Tensor, Tensor, int, bool], Tensor]:
    return torch.compile(capped_nats_, dynamic=False)
