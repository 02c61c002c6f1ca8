"""
The layers of the model that are written by hand, each with its gradient: elementwise pieces, embedding, loss.

PyTorch's own RMSNorm, and a chain of small ops for the other elementwise pieces, take several times as many passes over memory in
eager mode, on CPUs above all. Written out they also save nothing for backward that a neighbour does not keep anyway. torch.compile
traces through them. The formulas are nanochat's (RMSNorm without weight, QK norm, half-split rotary, ReLU^2); reductions
accumulate in fp32.

The loss is soft-capped cross-entropy within a stated number of bytes. Logits, the largest tensor of a small GPT, exist for a
chunk of tokens at a time, and their gradient overwrites them: one pass forward yields the loss and the gradients by x and by the
weight (Liger's idea, of its fused linear cross-entropy). The cap, nanochat's 15 tanh(z / 15), keeps a few confident tokens from
driving the logits up without bound, which low precision would not survive. It is 30 sigmoid(z / 7.5) - 15, and the -15 does not
change softmax: sigmoid is ten times cheaper than tanh on a CPU. Values stay within [0, 30], so exp needs no maximum taken off.
"""

import functools
import importlib.util
import math
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from paceline.plan.activations import loss_chunks

# B rows, T tokens, C n_embd, H heads, D head_dim, V padded_vocab_size; N tokens in the loss

RMS_EPS = 1e-6
SOFTCAP = 15.0  # of the logits
# relative: of the Triton kernel, whose exp and division are approximations on a GPU, against PyTorch
FUSED_ERROR = 1e-4
COMPILED_SHAPES = 64  # of one function at most
QK_GAIN = 1.2  # of q and of k after their norm: sharper attention than unit vectors give


def rms_norm(x: Tensor) -> Tensor:
    """Divides x by its root mean square along the last dim. x: any shape and dtype; the result has both."""
    return cast(Tensor, _RMSNorm.apply(x))  # type: ignore[no-untyped-call]


def rotary_norm(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns QK_GAIN * rms_norm(x) with each pair (d, d + D/2) turned by its position's angle. x: (B, T, H, D) -> (B, H, T, D).

    cos, sin: (T, D) in x.dtype, the same angles for both halves, the second half's sines negative.
    """
    # A CPU's batched matmuls want each head's rows together, so all is written in that order. A GPU's flash kernels take any order
    # and return their result, and the gradients, in that of q: in the order of x no product needs a copy.
    return cast(Tensor, _RotaryNorm.apply(x, cos, sin, x.device.type == "cpu"))  # type: ignore[no-untyped-call]


def relu_squared(x: Tensor) -> Tensor:
    """Returns max(x, 0) squared, of Primer (arXiv 2109.08668): it needs no exponential, and only itself for its gradient."""
    return cast(Tensor, _ReluSquared.apply(x))  # type: ignore[no-untyped-call]


def mix(x: Tensor, y: Tensor, a: Tensor | None, b: Tensor) -> Tensor:
    """Returns a * x + b * y; a and b are fp32 scalars, and so are their gradients; None stands for 1.

    A scalar is never rounded to the activations' dtype: bf16 makes 1.0469 of 1.05, in every layer and for every token alike.
    """
    return cast(Tensor, _Mix.apply(x, y, a, b))  # type: ignore[no-untyped-call]


def rms_scale(x: Tensor, *, gain: float = 1.0) -> Tensor:
    """Returns the factor of rms_norm, (..., 1) in x.dtype."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True).float()  # its sum is fp32 whatever x is
    scale: Tensor = (norm.square() / x.shape[-1] + RMS_EPS).rsqrt() * gain
    return scale.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, direction: float) -> Tensor:
    """Turns the pairs (d, d + D/2) of the last dim by their angles; direction -1 turns them back."""
    return plus_product(x * cos, x.roll(x.shape[-1] // 2, -1), sin, factor=direction)


def plus_product(total: Tensor, a: Tensor, b: Tensor, *, factor: float = 1.0) -> Tensor:
    """Returns total + factor * a * b, in the memory of total where the model is not compiled.

    Compiled, a Function whose forward changes its result in place has no gradient in torch 2.11: no error, all zeros.
    """
    if torch.compiler.is_compiling():
        return torch.addcmul(total, a, b, value=factor)
    return total.addcmul_(a, b, value=factor)


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        scale = rms_scale(x)
        y = x * scale
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (dy,), (y, scale) = grads, ctx.saved_tensors
        along = (dy * y).mean(-1, keepdim=True)
        return torch.addcmul(dy, y, along, value=-1).mul_(scale)


class _RotaryNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, heads_first: bool) -> Tensor:
        if heads_first:
            x = x.transpose(1, 2)  # (B, H, T, D)
        else:
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # (T, 1, D)
        scale = rms_scale(x, gain=QK_GAIN)
        unit = torch.mul(x, scale, out=torch.empty(x.shape, dtype=x.dtype) if heads_first else None)
        y = rotate(unit, cos, sin, direction=1)
        ctx.heads_first = heads_first
        ctx.save_for_backward(y, scale, cos, sin)
        return y if heads_first else y.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (dy,), (y, scale, cos, sin) = grads, ctx.saved_tensors
        if not ctx.heads_first:
            dy = dy.transpose(1, 2)  # (B, T, H, D)
        # a rotation keeps dot products, so the norm's gradient is computed on the rotated vectors and turned back once
        along = (dy * y).mean(-1, keepdim=True)
        unturned = rotate(torch.addcmul(dy, y, along, value=-(QK_GAIN**-2)), cos, sin, direction=-1)
        dx = unturned.mul_(scale)  # in the order of y
        return dx.transpose(1, 2) if ctx.heads_first else dx, None, None, None


class _ReluSquared(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        positive = x.relu()
        ctx.save_for_backward(positive)
        return positive * positive

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (dy,), (positive,) = grads, ctx.saved_tensors
        dx: Tensor = dy * positive
        return dx.mul_(2)


class _Mix(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, a: Tensor | None, b: Tensor) -> Tensor:
        ctx.save_for_backward(None if a is None else x, y, a, b)
        wide_x, wide_y = widened(x), widened(y)
        return (torch.addcmul(wide_x, wide_y, b) if a is None else plus_product(wide_x * a, wide_y, b)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        (dz,), (x, y, a, b) = grads, ctx.saved_tensors
        da = None if a is None else (dz * x).sum(dtype=torch.float32)
        db = (dz * y).sum(dtype=torch.float32)
        dx, dy = (dz if scalar is None else (widened(dz) * scalar).to(dz.dtype) for scalar in (a, b))
        return dx, dy, da, db


def widened(x: Tensor) -> Tensor:
    """Returns x in fp32. A compiled kernel computes in fp32 by itself; a cast would be one more tensor that it may keep."""
    return x if torch.compiler.is_compiling() else x.float()


class Embedding(nn.Embedding):
    """Looks up the row of each token, (B, T) int64 -> (B, T, C), with a gradient that is summed in fp32 and in a fixed order.

    PyTorch sums the gradient of a bf16 table in bf16 on CPUs, 6 % off for a token that comes 800 times in a batch. torch.compile
    makes atomic additions of it, whose order differs from run to run; as an op of its own it is left to PyTorch's deterministic
    kernels, so that a resumed run ends in the same bits.
    """

    def reset_parameters(self) -> None:
        """Does nothing: GPT.init_weights draws all weights."""

    def forward(self, idx: Tensor) -> Tensor:
        """Returns the rows of the tokens, (B, T, C) in the table's dtype."""
        return cast(Tensor, _Lookup.apply(self.weight, idx))  # type: ignore[no-untyped-call]


class _Lookup(Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, idx: Tensor) -> Tensor:
        ctx.num_rows = weight.shape[0]
        ctx.save_for_backward(idx)
        return F.embedding(idx, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (idx,) = ctx.saved_tensors
        return embedding_gradient(grads[0], idx, ctx.num_rows), None


def embedding_gradient(dy: Tensor, idx: Tensor, num_rows: int) -> Tensor:
    """Sums dy (..., C) over the positions of each token in idx: (V, C) fp32. As an op of its own a compiler leaves it whole."""
    return cast(Tensor, torch.ops.paceline.embedding_gradient(dy, idx, num_rows))


def sum_by_row(dy: Tensor, idx: Tensor, num_rows: int) -> Tensor:
    """Computes embedding_gradient, for every device."""
    return cast(Tensor, torch.ops.aten.embedding_dense_backward(dy.float(), idx, num_rows, -1, False))


# not torch.library.custom_op: its first call imports the compiler, which takes longer than the whole start of a small run
OPS = torch.library.Library("paceline", "DEF")  # type: ignore[no-untyped-call]


def define_op(
    schema: str, function: Callable[..., Any], fake: Callable[..., Any], *, key: str = "CompositeExplicitAutograd"
) -> None:
    """Makes the function an op, torch.ops.paceline.NAME. fake: returns its results without values, for tracing."""
    name = schema.partition("(")[0]
    OPS.define(schema)  # type: ignore[no-untyped-call]
    OPS.impl(name, function, key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"paceline::{name}", fake, lib=OPS)


GRADIENT = "embedding_gradient(Tensor dy, Tensor idx, SymInt num_rows) -> Tensor"
define_op(GRADIENT, sum_by_row, lambda dy, idx, rows: dy.new_empty(rows, dy.shape[-1], dtype=torch.float32))


def softcap(logits: Tensor) -> Tensor:
    """Returns the capped logits, in (-SOFTCAP, SOFTCAP); the shape and the dtype stay."""
    return SOFTCAP * torch.tanh(logits / SOFTCAP)


def sum_of_nats(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    budget_bytes: int,
    compiled: bool,
    fused: bool = False,
    grad_scale: Tensor | None = None,
) -> Tensor:
    """Sums the nats of the targets that are not -1, () fp32. x: (N, C); weight: (V, C) in x.dtype; targets: (N,) int64.

    budget_bytes bounds all tensors as large as logits: these, their gradient and the fp32 copies between; one token fits always.
    compiled, fused: what works on the logits is a graph of its own, or model/kernels.py. The gradients are multiplied by
    grad_scale, () fp32, before the first product: in fp16 that one may overflow too.
    """
    settings = (vocab_size, budget_bytes, compiled, fused, grad_scale)
    return cast(Tensor, _SumOfNats.apply(x, weight, targets, *settings))  # type: ignore[no-untyped-call]


@torch.no_grad()
def nats_per_token(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    budget_bytes: int,
    compiled: bool,
    fused: bool = False,
) -> Tensor:
    """Returns the nats of each target, (N,) fp32, 0 where it is -1. It has no gradient: it is for evaluation."""
    chunks = nats_by_chunk(x, weight, targets, vocab_size, budget_bytes, compiled, fused, with_grad=False)
    return torch.cat([nats for _, nats, _ in chunks])


def nats_by_chunk(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    budget_bytes: int,
    compiled: bool,
    fused: bool,
    grad_scale: Tensor | None = None,
    *,
    with_grad: bool,
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yields for each chunk: its tokens, (chunk,) fp32 nats, and (chunk, V) their gradient by the logits, or the logits.

    All chunks' logits lie in the same memory: use them before the next chunk.
    """
    chunk, block = chunk_rows(x, weight.shape[0], budget_bytes, in_place=compiled or fused)
    capped: Callable[..., Tensor] = compile_once(capped_nats_) if compiled else capped_nats_
    if fused:
        capped = torch.ops.paceline.capped_nats_
    buffer = x.new_empty(chunk, weight.shape[0])  # (chunk, V) x.dtype
    for start in range(0, x.shape[0], chunk):
        rows = slice(start, min(start + chunk, x.shape[0]))
        logits = torch.mm(x[rows], weight.t(), out=buffer[: rows.stop - start])
        pairs = zip(logits.split(block), targets[rows].split(block), strict=True)  # type: ignore[no-untyped-call]
        yield rows, torch.cat([capped(z, at, vocab_size, with_grad, grad_scale) for z, at in pairs]), logits


def chunk_rows(x: Tensor, vocab: int, budget_bytes: int, *, in_place: bool) -> tuple[int, int]:
    """Returns the tokens of one chunk of logits, and the tokens of these that go through capped_nats_ at a time."""
    sizes = {"vocab": vocab, "element_bytes": x.element_size(), "budget_bytes": budget_bytes}
    return loss_chunks(x.shape[0], **sizes, device=x.device.type, in_place=in_place)


class _SumOfNats(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, *settings: Any) -> Tensor:
        dx, dw, sums = torch.empty_like(x), None, []
        chunks = nats_by_chunk(x, weight, targets, *settings, with_grad=True)
        for rows, nats, dlogits in chunks:
            torch.mm(dlogits, weight, out=dx[rows])
            dw = plus_matmul(dw, dlogits.t(), x[rows])
            sums.append(nats.sum())
        ctx.save_for_backward(dx, dw)
        return torch.stack(sums).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dnats,), (dx, dw) = grads, ctx.saved_tensors
        return dx.mul_(dnats.to(dx.dtype)), dw.mul_(dnats), *[None] * 6  # in place: a second backward raises


def plus_matmul(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Returns total + a @ b in fp32, in the memory of total; None stands for zero."""
    if a.dtype != torch.float32 and a.device.type != "cpu":  # a GPU's products are summed in fp32 anyway
        options: dict[str, Any] = {"out_dtype": torch.float32}
        return torch.mm(a, b, **options) if total is None else torch.addmm(total, a, b, **options, out=total)
    if total is None:
        return (a @ b).float()
    return total.addmm_(a, b) if a.dtype == total.dtype else total.add_(a @ b)


def capped_nats_(
    z: Tensor, targets: Tensor, vocab_size: int, with_grad: bool, grad_scale: Tensor | None = None
) -> Tensor:
    """Returns (n,) fp32 nats; with_grad overwrites z by grad_scale * d(nats)/dz.

    z: (n, V) logits before the cap; columns from vocab_size on stand for no token.
    """
    valid = (targets >= 0).unsqueeze(-1)  # (n, 1)
    at = targets.clamp_min(0).unsqueeze(-1)  # (n, 1)
    # with s = sigmoid(2z / cap) the capped logit is 2 cap s - cap, and softmax does not see the constant
    s = (z[:, :vocab_size].float() * (2 / SOFTCAP)).sigmoid_()  # (n, vocab_size) fp32
    e = torch.exp2(s * (2 * SOFTCAP / math.log(2)))
    weight = 4 * valid if grad_scale is None else 4 * grad_scale * valid  # (n, 1)
    total, s_at, e_at = e.sum(-1, keepdim=True), s.gather(-1, at), e.gather(-1, at)  # (n, 1) each
    if with_grad and torch.compiler.is_compiling():
        # writing at an index would be a kernel of its own, behind a copy of all logits
        is_target = torch.arange(vocab_size, device=z.device) == at  # (n, vocab_size)
        z[:, :vocab_size] = weight * (e / total - is_target.float()) * s * (1 - s)
        z[:, vocab_size:] = 0
    elif with_grad:  # (softmax - onehot) * dcap/dz, and dcap/dz = 4 s (1 - s)
        z[:, :vocab_size] = e.mul_(weight / total).mul_(s.addcmul_(s, s, value=-1))
        z[:, vocab_size:] = 0
        at_target = (weight * (e_at / total - 1) * s_at * (1 - s_at)).to(z.dtype)  # (n, 1)
        z[torch.arange(len(z), device=z.device), at.squeeze(-1)] = at_target.squeeze(-1)
    return ((total.log() - s_at * (2 * SOFTCAP)) * valid).squeeze(-1)


def fused_loss_problem(device: torch.device) -> str | None:
    """Returns why the Triton kernel cannot compute the loss on the device; None where it does, with the numbers of capped_nats_."""
    if device.type != "cuda":
        return "it is for CUDA devices"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    z = torch.linspace(-20, 20, 8 * 1024, device=device).view(8, 1024)
    targets, scale = torch.arange(-1, 7, device=device), torch.full((), 8.0, device=device)
    try:
        pairs = [(function(y := z.clone(), targets, 1000, True, scale), y) for function in (capped_nats_, run_fused)]
        errors = [(exact - fused).norm() / exact.norm() for exact, fused in zip(*pairs, strict=True)]
    except Exception as error:  # it is compiled here, with a C compiler and the driver, which may fail in many ways
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None if max(errors) < FUSED_ERROR else "its numbers are wrong here"


def run_fused(z: Tensor, targets: Tensor, vocab_size: int, with_grad: bool, grad_scale: Tensor | None) -> Tensor:
    """Computes capped_nats_ by the Triton kernel, on a CUDA device."""
    from paceline.model.kernels import capped_nats_fused_

    return capped_nats_fused_(z, targets, vocab_size, with_grad, grad_scale, cap=SOFTCAP)


NATS = "capped_nats_(Tensor(a!) z, Tensor targets, int vocab_size, bool with_grad, Tensor? grad_scale) -> Tensor"
define_op(NATS, run_fused, lambda z, *_: z.new_empty(len(z), dtype=torch.float32), key="CUDA")


@functools.cache
def compile_once(function: Callable[..., Any], *, backend: Any = "inductor") -> Callable[..., Any]:
    """Compiles a function on its own, for an eager model too; the compiler is imported by the first call."""
    compiled = torch.compile(function, dynamic=False, backend=backend)
    never_fall_back()
    return compiled


def never_fall_back() -> None:
    """Makes a function that is compiled for too many shapes an error. Call it once the compiler is imported.

    Every shape is compiled by itself, and past torch's limit of 8 of them a function would silently stay eager.
    """
    settings = torch._dynamo.config
    settings.recompile_limit, settings.fail_on_recompile_limit_hit = COMPILED_SHAPES, True
