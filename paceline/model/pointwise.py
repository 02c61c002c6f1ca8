"""
The elementwise pieces of the model, each with its gradient written out.

PyTorch's own RMSNorm, and a chain of small ops for the rest, take several times as many passes over memory in eager mode, on CPUs
above all; written out they also save nothing for backward that a neighbour does not keep anyway. torch.compile traces through
them. The formulas are nanochat's (RMSNorm without weight, QK norm, half-split rotary, ReLU^2); reductions accumulate in fp32.
"""

# B rows, T tokens, C n_embd, H heads, D head_dim

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

RMS_EPS = 1e-6
QK_GAIN = 1.2  # of q and of k after their norm: sharper attention than unit vectors give


def rms_norm(x: Tensor) -> Tensor:
    """x over its root mean square along the last dim."""
    return cast(Tensor, _RMSNorm.apply(x))  # type: ignore[no-untyped-call]


def rotary_norm(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """QK_GAIN * rms_norm(x), each pair (d, d + D/2) turned by its position's angle. x: (B, T, H, D) -> (B, H, T, D).

    cos, sin: (T, D) in x.dtype, the same angles for both halves, the second half's sines negative.
    """
    return cast(Tensor, _RotaryNorm.apply(x, cos, sin))  # type: ignore[no-untyped-call]


def relu_squared(x: Tensor) -> Tensor:
    return cast(Tensor, _ReluSquared.apply(x))  # type: ignore[no-untyped-call]


def mix(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """a * x + b * y; a and b are fp32 scalars, and so are their gradients."""
    return cast(Tensor, _Mix.apply(x, y, a, b))  # type: ignore[no-untyped-call]


def rms_scale(x: Tensor, *, gain: float = 1.0) -> Tensor:
    """What rms_norm multiplies by, (..., 1) in x.dtype."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True).float()  # its sum is fp32 whatever x is
    scale: Tensor = (norm.square() / x.shape[-1] + RMS_EPS).rsqrt() * gain
    return scale.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, direction: float) -> Tensor:
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin, value=direction)


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
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x.transpose(1, 2)  # (B, H, T, D)
        scale = rms_scale(x, gain=QK_GAIN)
        # a CPU's batched matmuls want each head's rows together, so they are laid out anew as they are written; a GPU's flash
        # kernels take any order and answer in that of q: as it is here, c_proj reads the answer without a copy
        out = torch.empty(x.shape, dtype=x.dtype) if x.device.type == "cpu" else None
        unit = torch.mul(x, scale, out=out)
        y = rotate(unit, cos, sin, direction=1)
        ctx.save_for_backward(y, scale, cos, sin)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (dy,), (y, scale, cos, sin) = grads, ctx.saved_tensors
        # a rotation keeps dot products, so the norm's gradient is taken of the rotated vectors and turned back once
        along = (dy * y).mean(-1, keepdim=True)
        unturned = rotate(torch.addcmul(dy, y, along, value=-(QK_GAIN**-2)), cos, sin, direction=-1)
        return unturned.mul_(scale).transpose(1, 2), None, None  # (B, T, H, D)


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
    def forward(ctx: Any, x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(x, y, a, b)
        return (x * a.to(x.dtype)).addcmul_(y, b.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        (dz,), (x, y, a, b) = grads, ctx.saved_tensors
        da = (dz * x).sum(dtype=torch.float32)
        db = (dz * y).sum(dtype=torch.float32)
        return dz * a.to(dz.dtype), dz * b.to(dz.dtype), da, db
