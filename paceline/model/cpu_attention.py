"""
Causal attention on CPUs, whole or windowed, as batched matmuls over blocks of queries.

Each block of queries meets only the keys it may see, so a window costs what it sees. In bf16 with rows of a few hundred tokens this
takes a third of the time of PyTorch's own CPU kernel, in fp32 somewhat less than it (dev/BENCH.md). Scores are rounded to the inputs'
dtype before softmax; QK norm keeps them small.
"""

# N rows times heads, T tokens, D head_dim

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

BLOCK = 128  # queries at once: a smaller block skips more of the causal half but makes smaller matmuls
KEEP_TOKENS = 512  # up to here probabilities are kept for backward; beyond they would outweigh all other activations


def causal_attention(q: Tensor, k: Tensor, v: Tensor, *, window: int) -> Tensor:
    """q, k, v: (N, T, D) -> (N, T, D). Each token sees itself and the window - 1 tokens before."""
    return cast(Tensor, _CausalAttention.apply(q, k, v, window))


def blocks(num_tokens: int, window: int) -> Iterator[tuple[slice, slice]]:
    """Queries of each block, and the keys that any of them sees."""
    for start in range(0, num_tokens, BLOCK):
        end = min(start + BLOCK, num_tokens)
        yield slice(start, end), slice(max(0, start - window + 1), end)


def probabilities(q: Tensor, k: Tensor, rows: slice, keys: slice, window: int) -> Tensor:
    """(N, rows, keys) in q.dtype."""
    back = torch.arange(rows.start, rows.stop).unsqueeze(1) - torch.arange(keys.start, keys.stop)
    hidden = torch.zeros(back.shape, dtype=q.dtype).masked_fill_((back < 0) | (back >= window), -torch.inf)
    return torch.baddbmm(hidden, q[:, rows], k[:, keys].transpose(1, 2), alpha=q.shape[-1] ** -0.5).softmax(-1)


class _CausalAttention(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        y, kept = torch.empty_like(q), []
        for rows, keys in blocks(q.shape[1], window):
            p = probabilities(q, k, rows, keys, window)
            y[:, rows] = torch.bmm(p, v[:, keys])
            if q.shape[1] <= KEEP_TOKENS:
                kept.append(p)
        ctx.window = window
        ctx.save_for_backward(q, k, v, *kept)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        (dy,), (q, k, v, *kept) = grads, ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for i, (rows, keys) in enumerate(blocks(q.shape[1], ctx.window)):
            p = kept[i] if kept else probabilities(q, k, rows, keys, ctx.window)
            dv[:, keys] += torch.bmm(p.transpose(1, 2), dy[:, rows])
            ds = torch._softmax_backward_data(torch.bmm(dy[:, rows], v[:, keys].transpose(1, 2)), p, -1, p.dtype)
            dq[:, rows] = torch.bmm(ds, k[:, keys])
            dk[:, keys] += torch.bmm(ds.transpose(1, 2), q[:, rows])
        scale = q.shape[-1] ** -0.5
        return dq.mul_(scale), dk.mul_(scale), dv, None
