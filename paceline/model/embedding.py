"""
Rows of a table by token, with a gradient that is summed in fp32 and in a fixed order.

PyTorch sums the gradient of a bf16 table in bf16 on CPUs, 6 % off for a token that comes 800 times in a batch. torch.compile makes
atomic additions of it, whose order differs from run to run; as an op of its own it is left to PyTorch's deterministic kernels, so
that a resumed run ends in the same bits.
"""

# B rows, T tokens, V rows of the table, C columns

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function


class Embedding(nn.Embedding):
    """(B, T) int64 -> (B, T, C)."""

    def reset_parameters(self) -> None:
        """Nothing: GPT.init_weights draws all weights."""

    def forward(self, idx: Tensor) -> Tensor:
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
    """(V, C) fp32: the sum of dy (..., C) over the places of each token in idx. An op of its own, which a compiler leaves whole."""
    return cast(Tensor, torch.ops.paceline.embedding_gradient(dy, idx, num_rows))


def sum_by_row(dy: Tensor, idx: Tensor, num_rows: int) -> Tensor:
    return cast(Tensor, torch.ops.aten.embedding_dense_backward(dy.float(), idx, num_rows, -1, False))


def no_values(dy: Tensor, idx: Tensor, num_rows: int) -> Tensor:
    return dy.new_empty(num_rows, dy.shape[-1], dtype=torch.float32)


# not torch.library.custom_op: its first call imports the compiler, which takes longer than the rest of a small run's start
OPS = torch.library.Library("paceline", "DEF")  # type: ignore[no-untyped-call]
OPS.define("embedding_gradient(Tensor dy, Tensor idx, SymInt num_rows) -> Tensor")  # type: ignore[no-untyped-call]
OPS.impl("embedding_gradient", sum_by_row, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("paceline::embedding_gradient", no_values, lib=OPS)
