"""
What one rank updates: rows of a parameter with their fp32 master, their gradient and their states; and AdamW over a list of such.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.model.checkpoint import Piece
from paceline.plan.scaling import GroupSettings
from paceline.plan.shapes import ParamShape
from paceline.train.updates import adamw_update, second_momentum_shape

Read = Callable[[str, int, int], Tensor]  # key, first row, last row + 1 -> those rows
NO_GRADIENT = torch.empty(0)


@dataclass
class Owned:
    """Rows [lo, hi) of a parameter, whose update is this rank's work.

    weight: what the model computes with. master: fp32, the same tensor where the model computes in fp32.
    """

    param: nn.Parameter
    shape: ParamShape
    lo: int
    hi: int
    weight: Tensor
    master: Tensor
    states: dict[str, Tensor]
    grad: Tensor = NO_GRADIENT  # fp32, summed over ranks: set by each reduce

    def pieces(self) -> Iterator[Piece]:
        name, shape, rows = self.shape.name, self.shape.shape, (self.lo, self.hi)
        yield Piece(f"model.{name}", shape, rows, self.master)
        for state, tensor in self.states.items():
            by_row = tensor.shape == self.master.shape
            yield Piece(
                f"optim.{name}.{state}",
                shape if by_row else tuple(tensor.shape),
                rows if by_row else (0, tensor.shape[0]),
                tensor,
            )

    def load(self, read: Read) -> None:
        for piece in self.pieces():
            piece.tensor.copy_(read(piece.key, *piece.rows))
        self.publish()

    def publish(self) -> None:
        """Rounds the new master into the weight."""
        if self.weight is not self.master:
            self.weight.copy_(self.master)


def owned(
    param: nn.Parameter, shape: ParamShape, *, rows: tuple[int, int], weight: Tensor, master: Tensor, muon: bool
) -> Owned:
    """With states of zero."""
    if muon:
        second = master.new_zeros(second_momentum_shape(shape.shape))
        states = {"momentum_buffer": torch.zeros_like(master), "second_momentum_buffer": second}
    else:
        states = {"exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master)}
    return Owned(param, shape, *rows, weight, master, states)


def step_adamw(
    shares: Sequence[Owned], groups: Mapping[str, GroupSettings], *, step: int, lr_mult: float, grad_scale: float
) -> None:
    """One call of the formula for each group among the shares."""
    for name in dict.fromkeys(share.shape.group for share in shares):
        group, members = groups[name], [share for share in shares if share.shape.group == name]
        adamw_update(
            [share.master for share in members],
            [share.grad for share in members],
            [share.states["exp_avg"] for share in members],
            [share.states["exp_avg_sq"] for share in members],
            step=step,
            lr=group.lr * lr_mult,
            betas=group.betas,
            eps=group.eps,
            weight_decay=group.weight_decay,
            grad_scale=grad_scale,
        )


def sum_of_squares(grads: Sequence[Tensor], device: torch.device) -> Tensor:
    """() fp32. Non-finite as soon as one element is."""
    norms = torch._foreach_norm(list(grads)) if grads else (torch.zeros((), device=device),)
    return torch.stack(list(norms)).square_().sum()


def check_shapes(params: Mapping[str, nn.Parameter], shapes: Sequence[ParamShape]) -> None:
    found, planned = {name: tuple(param.shape) for name, param in params.items()}, {s.name: s.shape for s in shapes}
    assert found == planned, f"the model and plan/shapes.py differ in {sorted(found.items() ^ planned.items())}"
    assert all(param.dtype == torch.float32 for param in params.values()), "weights are initialised in fp32"


def whole_tensor(param: nn.Parameter, shape: ParamShape) -> Owned:
    return owned(param, shape, rows=(0, shape.shape[0]), weight=param.data, master=param.data, muon=False)


def grad_or_zeros(param: nn.Parameter) -> Tensor:
    return torch.zeros_like(param) if param.grad is None else param.grad.detach()


def norms_of(shares: Sequence[Owned], *, grad_scale: float) -> dict[str, dict[str, Any]]:
    """What stands out in the rows of each parameter that this rank owns, after a reduce; None where a norm is no number."""
    return {
        share.shape.name: {
            "rows": [share.lo, share.hi],
            "weight_norm": _norm(share.master),
            "weight_bad": _num_bad(share.master),
            "grad_norm": _norm(share.grad, scale=grad_scale),
            "grad_bad": _num_bad(share.grad),
        }
        for share in shares
        if share.lo < share.hi
    }


def _norm(x: Tensor, *, scale: float = 1.0) -> float | None:
    norm = float(torch.linalg.vector_norm(x.float())) * scale
    return norm if math.isfinite(norm) else None


def _num_bad(x: Tensor) -> int:
    """Elements that are not finite."""
    return int((~x.isfinite()).sum())
