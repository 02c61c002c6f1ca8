"""
Causal attention over all earlier tokens or a window of them, on every device, and the keys and values that a generation keeps.

It does not depend on the model's layers or weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.attention
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from paceline.config import FLASH, ModelConfig
from paceline.model.layers import compile_once
from paceline.plan.activations import CPU_KEEP_TOKENS
from paceline.plan.cost import attention_blocks
from paceline.plan.shapes import window_sizes
from paceline.units import format_percent

# B rows, T tokens in a row (with a cache: new tokens), C n_embd, H n_head, K n_kv_head, D head_dim; N = B*H

CHECKED_TOKENS = 1024  # of a row whose attention is compared with the reference
ATTENTION_ERROR = 0.02  # relative: bf16 gives up to 0.009, a window of 256 that is one key short 0.04

Mask = Tensor | BlockMask | None  # None: all earlier tokens


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, window: int, way: str = "sdpa") -> Tensor:
    """Returns (B, T, H, D) of q: (B, H, T, D); k, v: (B, K, T, D). A single query sees every key: the cache has picked them.

    way: one of config.ATTENTION, for many queries. mask: make_mask's, of the same way and window.
    """
    y: Tensor
    groups, many_queries = q.shape[1] // k.shape[1], q.shape[2] > 1
    if many_queries and way in FLASH:
        if way == "cudnn" and window >= q.shape[2]:
            # the operator itself: scaled_dot_product_attention may take another kernel without a word
            y = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)[0]
            return y.transpose(1, 2)
        return flash_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), window=window)
    if many_queries and q.device.type == "cpu":
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        return causal_attention(q, k, v, window=window)
    if isinstance(mask, BlockMask):
        # compiled even for an eager model: uncompiled it holds all scores at once
        flex: Any = flex_attention if torch.compiler.is_compiling() else compile_once(flex_attention)
        y = flex(q, k, v, block_mask=mask, enable_gqa=groups > 1)
    else:
        causal = many_queries and mask is None
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=groups > 1)
    return y.transpose(1, 2)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, *, window: int) -> Tensor:
    """Returns causal attention over a window, in 16 bits on a GPU: (B, T, H, D) of q: (B, T, H, D); k, v: (B, T, K, D).

    By PyTorch's FlashAttention 2, which scaled_dot_product_attention offers without windows; after use_flash3 by FlashAttention 3.
    It reads and writes in the order of the projections, and has no mask: a window costs what it sees.
    """
    num_tokens = q.shape[1]
    is_full = window >= num_tokens
    # the first number is of keys before a query's own, the second of keys after it
    limits = {} if is_full else {"window_size_left": window - 1, "window_size_right": 0}
    sizes = (None, None, num_tokens, num_tokens)  # every row is as long
    return cast(Tensor, torch.ops.aten._flash_attention_forward(q, k, v, *sizes, 0.0, is_full, False, **limits)[0])


def use_flash3(use: bool) -> None:
    """Makes flash_attention take FlashAttention 3, or PyTorch's own kernels, in this process.

    Raises an ImportError or a RuntimeError where the package flash_attn_3 is not installed for this PyTorch.
    """
    if use:
        torch.nn.attention.activate_flash_attention_impl("FA3")
    elif torch.nn.attention.current_flash_attention_impl() is not None:
        torch.nn.attention.restore_flash_attention_impl()


def make_mask(num_tokens: int, window: int, device: torch.device, *, way: str) -> Mask:
    """Returns what makes a window of the way; None where all earlier tokens are visible, and where its kernels take windows.

    SDPA's masks are dense, which rules out a GPU's flash kernels.
    """
    if window >= num_tokens or device.type == "cpu" or way in FLASH:
        return None
    if way == "flex":
        return sliding_block_mask(num_tokens, window, device)
    at = torch.arange(num_tokens, device=device)
    back = at.unsqueeze(1) - at  # (T, T): how far key j lies before query i
    return (back >= 0) & (back < window)


def attention_problem(config: ModelConfig, way: str, dtype: torch.dtype, device: torch.device) -> str | None:
    """Returns why a way does not run on this device, or None where it does, and agrees with the reference."""
    try:
        use_flash3(way == "fa3")
        error = attention_error(config, way, dtype, device)
    except Exception as problem:  # a library, a compiler or a driver that is missing or too old shows in many ways
        return f"{type(problem).__name__}: {problem}".splitlines()[0]
    return None if error < ATTENTION_ERROR else f"its numbers are {format_percent(error, digits=1)} off"


def attention_error(config: ModelConfig, way: str, dtype: torch.dtype, device: torch.device) -> float:
    """Returns how far a way is from causal_attention in fp32, in output and gradients, of one row and the heads of one key."""
    config = replace(config, sequence_len=min(config.sequence_len, CHECKED_TOKENS))
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, config.sequence_len, heads, config.head_dim) for heads in (config.n_head // config.n_kv_head, 1, 1)]
    inputs = [torch.randn(shape, generator=generator).to(device, dtype).transpose(1, 2) for shape in shapes]
    wide = [x.float().expand(-1, shapes[0][2], -1, -1) for x in inputs]  # each head with keys of its own
    errors = []
    for window in set(window_sizes(config)):
        mask = make_mask(config.sequence_len, window, device, way=way)
        tensors = with_gradients(partial(attend, mask=mask, window=window, way=way), inputs)
        exact = with_gradients(partial(causal_attention, window=window), wide)
        for x, reference in zip(tensors, exact, strict=True):
            reference = reference if x.shape == reference.shape else reference.sum(1, keepdim=True)  # of a shared key
            errors.append((x - reference).norm() / reference.norm())
    return float(torch.stack(errors).max())  # on the host, which decides by it


def with_gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns function(*inputs), and the gradients by them of half the sum of its squares."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = function(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, y.detach())


def sliding_block_mask(num_tokens: int, window: int, device: torch.device) -> BlockMask:
    """Returns FlexAttention's mask of a causal window, for rows of num_tokens."""

    def is_visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i - j < window)

    return create_block_mask(is_visible, None, None, num_tokens, num_tokens, device=str(device))


def causal_attention(q: Tensor, k: Tensor, v: Tensor, *, window: int) -> Tensor:
    """Returns attention in which each token sees itself and the window - 1 tokens before. q, k, v: (B, H, T, D) -> (B, T, H, D).

    For CPUs, and as the reference for a GPU's kernels. Each block of queries meets only the keys that it may see, so a window costs
    what it sees. In bf16 with rows of a few hundred tokens this takes a third of the time of PyTorch's own CPU kernel, in fp32 four
    fifths. Scores are rounded to the inputs' dtype before softmax; QK norm keeps them small.
    """
    return cast(Tensor, _CausalAttention.apply(q, k, v, window))  # type: ignore[no-untyped-call]


def probabilities(q: Tensor, k: Tensor, rows: slice, keys: slice, window: int) -> Tensor:
    """Returns the attention probabilities of a block, (N, rows, keys) in q.dtype."""
    at = [torch.arange(part.start, part.stop, device=q.device) for part in (rows, keys)]
    back = at[0].unsqueeze(1) - at[1]
    hidden = torch.zeros(back.shape, dtype=q.dtype, device=q.device).masked_fill_(
        (back < 0) | (back >= window), -torch.inf
    )
    return torch.baddbmm(hidden, q[:, rows], k[:, keys].transpose(1, 2), alpha=q.shape[-1] ** -0.5).softmax(-1)


class _CausalAttention(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        shape, num_tokens = q.shape, q.shape[2]
        q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)  # (N, T, D)
        y = q.new_empty(shape[0], num_tokens, shape[1], shape[3])  # (B, T, H, D)
        saved = []
        for rows, keys in attention_blocks(num_tokens, window):
            p = probabilities(q, k, rows, keys, window)
            y[:, rows] = torch.bmm(p, v[:, keys]).view(*shape[:2], -1, shape[3]).transpose(1, 2)
            if num_tokens <= CPU_KEEP_TOKENS:  # longer rows compute p again in backward
                saved.append(p)
        ctx.shape, ctx.window = shape, window
        ctx.save_for_backward(q, k, v, *saved)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, *saved = ctx.saved_tensors
        dy = grads[0].transpose(1, 2).flatten(0, 1)  # (N, T, D)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for i, (rows, keys) in enumerate(attention_blocks(q.shape[1], ctx.window)):
            p = saved[i] if saved else probabilities(q, k, rows, keys, ctx.window)
            dv[:, keys] += torch.bmm(p.transpose(1, 2), dy[:, rows])
            ds = torch._softmax_backward_data(torch.bmm(dy[:, rows], v[:, keys].transpose(1, 2)), p, -1, p.dtype)
            dq[:, rows] = torch.bmm(ds, k[:, keys])
            dk[:, keys] += torch.bmm(ds.transpose(1, 2), q[:, rows])
        scale = q.shape[-1] ** -0.5
        return dq.mul_(scale).view(ctx.shape), dk.mul_(scale).view(ctx.shape), dv.view(ctx.shape), None


class KVCache:
    """Keys and values of the tokens that a generation has read, so that each new token costs one row of work.

    Each layer keeps as many tokens as its window sees, in a ring: memory is fixed and generation may continue past sequence_len.
    Positions continue to count, since rotary attention depends only on differences.
    """

    def __init__(self, config: ModelConfig, *, num_rows: int, dtype: torch.dtype, device: torch.device):
        sizes = [(num_rows, config.n_kv_head, window, config.head_dim) for window in window_sizes(config)]
        self.k = [torch.empty(size, dtype=dtype, device=device) for size in sizes]
        self.v = [torch.empty(size, dtype=dtype, device=device) for size in sizes]
        self.last_embedding: Tensor | None = None  # (B, 1, C), which the next token smears in
        self.length = 0  # tokens read

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores k and v, (B, K, T, D), and returns all keys and values that the newest token may attend to.

        T > 1 is allowed only while the cache is empty: it then returns k and v themselves, for use under the layer's mask.
        """
        num_new, size = k.shape[2], self.k[layer].shape[2]
        assert num_new == 1 or self.length == 0, "several tokens at once only on an empty cache"
        num_stored = min(num_new, size)
        end = self.length + num_new
        slots = torch.arange(end - num_stored, end, device=k.device) % size
        self.k[layer][:, :, slots] = k[:, :, -num_stored:]
        self.v[layer][:, :, slots] = v[:, :, -num_stored:]
        if num_new > 1:
            return k, v
        num_visible = min(end, size)
        return self.k[layer][:, :, :num_visible], self.v[layer][:, :, :num_visible]

    def repeat(self, num_rows: int) -> None:
        """Makes num_rows equal rows of the one row."""
        assert self.last_embedding is not None, "the cache is empty"
        self.k = [k.repeat(num_rows, 1, 1, 1) for k in self.k]
        self.v = [v.repeat(num_rows, 1, 1, 1) for v in self.v]
        self.last_embedding = self.last_embedding.repeat(num_rows, 1, 1)
