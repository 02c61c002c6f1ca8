"""
What is updated together: matrices of one shape, or rows of tensors with an elementwise algorithm. One call of a formula for each.

A batch has its states, and with `--offload optimizer` its fp32 masters, as `tensors`: on the device, or in the host's memory. Then
train/offload.py brings them to the device, and `update` gets them there; it rounds the new masters into the weights before they
leave. States of 8 bits are fp32 during their batch's update alone (state_codes.py). The formulas: updates.py. Which rows are in a
batch: plan/sharding.py and plan/offloading.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.plan.algorithms import ALGORITHMS, GroupSettings
from paceline.plan.offloading import RowRange, copies_in_batch, row_batches
from paceline.plan.sharding import matrix_batches
from paceline.train import updates
from paceline.train.buckets import Owned
from paceline.train.state_codes import decoded, encode_states

# m rows and n columns of a matrix, k matrices in a batch


@dataclass(frozen=True)
class StepSettings:
    """What changes from step to step, for all groups. step counts from 1. dtype: of the orthogonalization."""

    step: int
    lr_mult: float
    momentum: float
    weight_decay_mult: float
    grad_scale: float
    dtype: torch.dtype


@dataclass(frozen=True)
class Rows:
    """Rows of one parameter for an elementwise algorithm, all on the device. states: in the algorithm's order."""

    group: str
    master: Tensor
    grad: Tensor
    states: Sequence[Tensor]


def update_rows(members: Sequence[Rows], groups: Mapping[str, GroupSettings], settings: StepSettings) -> None:
    """Updates the rows by their groups' elementwise algorithms, in place; one call of the formula for each group."""
    for name in dict.fromkeys(rows.group for rows in members):
        group, in_group = groups[name], [rows for rows in members if rows.group == name]
        getattr(updates, ALGORITHMS[group.algorithm].update)(
            [rows.master for rows in in_group],
            [rows.grad for rows in in_group],
            *map(list, zip(*(rows.states for rows in in_group), strict=True)),
            step=settings.step,
            lr=group.lr * settings.lr_mult,
            betas=group.betas,
            eps=group.eps,
            weight_decay=group.weight_decay,
            grad_scale=settings.grad_scale,
        )


class RowBatch:
    """Rows of shares. ranges: which rows, counted from the share's first, of which share."""

    def __init__(self, shares: Sequence[Owned], ranges: Sequence[RowRange]):
        self._parts = [(shares[number], lo, hi) for number, lo, hi in ranges]
        self.tensors = [tensor[lo:hi] for share, lo, hi in self._parts for tensor in share.movable()]

    def update(self, groups: Mapping[str, GroupSettings], settings: StepSettings, tensors: Sequence[Tensor]) -> None:
        """Takes one step. tensors: self.tensors on the device, which change in place."""
        remaining = iter(tensors)
        members, rounded, stored = [], [], []
        for share, lo, hi in self._parts:
            master = next(remaining) if share.master_on_host else share.master[lo:hi]
            stored.append({name: next(remaining) for name in share.states})
            members.append(Rows(share.shape.group, master, share.grad[lo:hi], decoded(stored[-1])))
            if share.master_on_host:
                rounded.append((share.weight[lo:hi], master))
        update_rows(members, groups, settings)
        for rows, codes in zip(members, stored, strict=True):
            encode_states(rows.states, codes, step=settings.step)
        for weight, master in rounded:
            weight.copy_(master)


class MatrixBatch:
    """Matrices of one shape, with one tensor for each state: (m, n), or (k, m, n) of k. They make their shares' states views."""

    def __init__(self, shares: Sequence[Owned]):
        self.shares = list(shares)
        if shares[0].on_host:
            self.tensors = [joined(parts) for parts in zip(*(share.movable() for share in shares), strict=True)]
            return
        states = shares[0].states
        if len(shares) > 1:
            states = {name: torch.stack([share.states[name] for share in shares]) for name in states}
            for i, share in enumerate(shares):
                share.states = {name: state[i] for name, state in states.items()}
        self.tensors = list(states.values())

    def update(self, groups: Mapping[str, GroupSettings], settings: StepSettings, tensors: Sequence[Tensor]) -> None:
        """Takes one step. tensors: self.tensors on the device, which change in place."""
        group, single = groups[self.shares[0].shape.group], len(self.shares) == 1
        masters, grads = [share.master for share in self.shares], [share.grad for share in self.shares]
        staged, remaining = None, tensors
        if self.shares[0].master_on_host:
            staged, *remaining = tensors
        stored = dict(zip(self.shares[0].states, remaining, strict=True))
        states = decoded(stored)
        weight = staged if staged is not None else masters[0] if single else torch.stack(masters)  # (m, n) or (k, m, n)
        getattr(updates, ALGORITHMS[group.algorithm].update)(
            weight,
            grads[0] if single else torch.stack(grads),
            *states,
            lr=group.lr * settings.lr_mult,
            momentum=settings.momentum,
            beta2=group.betas[1],
            weight_decay=group.weight_decay * settings.weight_decay_mult,
            grad_scale=settings.grad_scale,
            dtype=settings.dtype,
        )
        encode_states(states, stored, step=settings.step)
        parts = [weight] if single else list(weight.unbind())
        if staged is not None:
            for share, master in zip(self.shares, parts, strict=True):
                share.weight.copy_(master)
        elif not single:
            torch._foreach_copy_(masters, parts)


UpdateBatch = RowBatch | MatrixBatch


def make_batches(shares: Sequence[Owned], *, whole: bool, together: bool) -> Iterator[UpdateBatch]:
    """Yields the batches of one bucket's shares. whole: their algorithm needs whole matrices.

    Neighbours of one shape go into one batch where `together`, for a GPU, which single small products leave idle. A CPU takes each
    by itself: it stays in the cache, and its bits cannot depend on how many this rank owns. Rows are cut where they are moved or
    decoded.
    """
    if whole:
        for batch in matrix_batches([share.shape.shape for share in shares], together=together):
            yield MatrixBatch([shares[number] for number in batch])
    elif shares and (shares[0].on_host or shares[0].algorithm.codes):
        first, shapes = shares[0], [tuple(share.master.shape) for share in shares]
        copies = copies_in_batch(first.algorithm, masters=first.master_on_host)
        for ranges in row_batches(shapes, num_copies=copies):
            yield RowBatch(shares, ranges)
    elif shares:
        yield RowBatch(shares, [RowRange(number, 0, share.hi - share.lo) for number, share in enumerate(shares)])


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Returns one tensor for tensors of one shape that lie one behind the other: (...), or (k, ...) of k; nothing is copied."""
    first, numel = tensors[0], tensors[0].numel()
    if len(tensors) == 1:
        return first
    starts = [tensor.storage_offset() - first.storage_offset() for tensor in tensors]
    assert starts == [i * numel for i in range(len(tensors))], "the host's memory has another order"
    return first.as_strided((len(tensors), *first.shape), (numel, *first.stride()))
