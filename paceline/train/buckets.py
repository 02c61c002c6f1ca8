"""
What one rank updates: rows of a parameter with their fp32 master, gradient and states, in flat buffers that are sent as a whole.

plan/sharding.py decides which rows a rank owns and where they lie in a buffer; plan/algorithms.py which states they have. With
`--offload optimizer` masters and states are in the host's memory (train/offload.py).

gloo's own reduce-scatter is an all-reduce inside and its all-gather copies twice, so on the CPU segments go from rank to rank
directly: the fewest bytes, no copy but the one on the wire (dev/LOG.md has the measurements). Only `Work.wait()` is used: on
NCCL it orders streams and does not block, and gloo has no futures.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from paceline.model.checkpoint import Piece
from paceline.plan.algorithms import Algorithm
from paceline.plan.offloading import MASTER
from paceline.plan.shapes import ParamShape
from paceline.plan.sharding import Bucket
from paceline.plan.states import BASE, stored_states
from paceline.train.state_codes import load_states

# segment elements of a flat buffer for each rank

Read = Callable[[str, int, int], Tensor]  # key, first row, last row + 1 -> those rows
NO_GRADIENT = torch.empty(0)
REDUCE_SCATTER = ("reduce_scatter_single", "reduce_scatter_tensor")  # the name since torch 2.13, and before
ALL_GATHER = ("all_gather_single", "all_gather_into_tensor")


@dataclass
class Owned:
    """Rows [lo, hi) of a parameter, whose update is this rank's work.

    weight: what the model computes with. master: fp32, the same tensor as weight where the model computes in fp32. home: where the
    states are to be, and under MASTER the master; empty: on the device.
    """

    param: nn.Parameter
    shape: ParamShape
    lo: int
    hi: int
    weight: Tensor
    master: Tensor
    algorithm: Algorithm
    home: Mapping[str, Tensor] = field(default_factory=dict)
    grad: Tensor = NO_GRADIENT  # fp32, summed over ranks: set by each reduce

    def __post_init__(self) -> None:
        self.on_host, self.master_on_host = bool(self.home), MASTER in self.home
        self.states = {  # as they are stored: fp32, or codes and bases
            state.name: self.home[state.name]
            if self.on_host
            else self.master.new_zeros(state.shape, dtype=getattr(torch, state.dtype))
            for state in stored_states(self.algorithm, self.shape.shape, rows=self.hi - self.lo)
        }
        if self.master_on_host:
            self.master = self.home[MASTER].copy_(self.master)

    def movable(self) -> list[Tensor]:
        """Returns what --offload moves: the master, where it is on the host, and the states."""
        return [*([self.master] if self.master_on_host else []), *self.states.values()]

    def pieces(self) -> Iterator[Piece]:
        """Yields the master and the states under their keys in a checkpoint."""
        name, shape, rows = self.shape.name, self.shape.shape, (self.lo, self.hi)
        yield Piece(f"model.{name}", shape, rows, self.master)
        for state, tensor in self.states.items():
            by_row = len(tensor) == len(self.master)
            yield Piece(
                f"optim.{name}.{state}",
                (shape[0], *tensor.shape[1:]) if by_row else tuple(tensor.shape),
                rows if by_row else (0, tensor.shape[0]),
                tensor,
            )

    def load(self, read: Read, *, with_states: bool) -> None:
        """Fills master and states from a checkpoint; states of either precision become those of this run."""
        master, *states = self.pieces()
        self.master.copy_(read(master.key, *master.rows))
        prefix, rows = f"optim.{self.shape.name}.", {piece.key: piece.rows for piece in states}
        if with_states:
            load_states(self.states, lambda name: read(prefix + name, *rows[prefix + name.removesuffix(BASE)]))
        if self.master_on_host:
            self.weight.copy_(self.master)

    def round_into_weight(self) -> None:
        """Rounds the updated master into the weight; one on the host was rounded on the device, by its update or by load."""
        if self.weight is not self.master and not self.master_on_host:
            self.weight.copy_(self.master)


def assert_shapes(params: Mapping[str, nn.Parameter], shapes: Sequence[ParamShape]) -> None:
    """Fails where a model is not the one that is planned, or not fp32 yet."""
    actual = {name: tuple(param.shape) for name, param in params.items()}
    planned = {shape.name: shape.shape for shape in shapes}
    assert actual == planned, f"the model and plan/shapes.py differ in {sorted(actual.items() ^ planned.items())}"
    assert all(param.dtype == torch.float32 for param in params.values()), "weights are initialised in fp32"


def sum_of_squares(grads: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns the sum over all elements, () fp32: non-finite as soon as one element is."""
    norms = torch._foreach_norm(list(grads)) if grads else (torch.zeros((), device=device),)
    return torch.stack(list(norms)).square_().sum()


def grad_or_zeros(param: nn.Parameter) -> Tensor:
    """Returns the gradient; zeros for a parameter that took no part in the step."""
    return torch.zeros_like(param) if param.grad is None else param.grad.detach()


def norm_of(name: str, x: Tensor, *, scale: float = 1.0) -> dict[str, float | int | None]:
    """Returns the norm, None where it is not finite, and the number of elements that are not finite."""
    norm = float(torch.linalg.vector_norm(x.float())) * scale
    return {f"{name}_norm": norm if math.isfinite(norm) else None, f"{name}_bad": int((~x.isfinite()).sum())}


class BucketBuffers:
    """One bucket on one rank: flat weights, flat gradients, their sum over ranks, and the rows that this rank owns.

    algorithms: by group. first_value: returns a parameter's first value, fp32, by its name. host: Owned.home of each parameter that
    has one.
    """

    gathered = False  # whether the weights are there only while they are used: GatheredBucket

    def __init__(
        self,
        bucket: Bucket,
        params: Mapping[str, nn.Parameter],
        algorithms: Mapping[str, Algorithm],
        *,
        rank: int,
        world_size: int,
        tag: int,
        compute_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        first_value: Callable[[str], Tensor],
        host: Mapping[str, Mapping[str, Tensor]],
    ):
        self.whole, self.rank, self.world_size, self.tag = bucket.whole, rank, world_size, tag
        self.params = [params[placement.param.name] for placement in bucket.placements]

        def buffer(dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
            """Returns a flat buffer, and the view of it for each parameter."""
            flat = torch.zeros(bucket.segment * world_size, dtype=dtype, device=self.params[0].device)
            ends = [(placement.offset, placement.offset + placement.param.numel) for placement in bucket.placements]
            return flat, [flat[lo:hi].view(param.shape) for (lo, hi), param in zip(ends, self.params, strict=True)]

        self.weights, views = buffer(compute_dtype)
        shares = {share.param.name: share for share in bucket.shares(rank)}
        self.owned = []
        for placement, view, param in zip(bucket.placements, views, self.params, strict=True):
            shape, share = placement.param, shares.get(placement.param.name)
            value = first_value(shape.name) if share or not self.gathered else None  # fp32
            if value is not None:
                view.copy_(value)
            param.data = view
            if grad_dtype != compute_dtype:
                param.grad_dtype = grad_dtype  # otherwise autograd would keep gradients in the weight's dtype
            if share and value is not None:
                master = weight = view[share.lo : share.hi]
                if self.gathered or compute_dtype != torch.float32:
                    rows = value[share.lo : share.hi]
                    # a view would keep the others' rows in memory
                    master = rows if len(rows) == len(value) else rows.clone()
                algorithm, home = algorithms[shape.group], host.get(shape.name, {})
                owned = Owned(param, shape, share.lo, share.hi, weight, master, algorithm, home)
                self.owned.append(owned)
        self.grad_views: list[Tensor] = []
        self.sum: SegmentSum | None = None
        if world_size > 1:
            grads, self.grad_views = buffer(grad_dtype)
            self.sum = SegmentSum(grads, rank=rank, world_size=world_size, tag=2 * tag + 1, keep=self.gathered)
            self.starts = [share.start for share in shares.values()]
        self.waiting_for = 0  # parameters whose gradient of the last micro-step is still missing

    def start_sum(self) -> None:
        """Starts the sum of gradients over ranks; a parameter that took no part in the step counts as zero. Collective."""
        assert self.sum is not None
        for param, view in zip(self.params, self.grad_views, strict=True):
            if param.grad is None:
                view.zero_()
        self.sum.start()

    def wait_sum(self) -> None:
        """Waits for the sum, and gives each share its gradient."""
        if self.sum is None:  # one rank: the gradients are where autograd left them
            for share in self.owned:
                grad = share.param.grad
                share.grad = torch.zeros_like(share.weight, dtype=torch.float32) if grad is None else grad.detach()
            return
        total = self.sum.wait()  # (segment,) fp32
        for share, start in zip(self.owned, self.starts, strict=True):
            share.grad = total[start : start + share.master.numel()].view_as(share.master)

    def send_weights(self) -> list[dist.Work]:
        """Rounds the updated rows into the weights and starts to send them to all ranks. Collective; wait for the works."""
        for share in self.owned:
            share.round_into_weight()
        if self.world_size == 1:
            return []
        return start_all_gather(self.weights, rank=self.rank, world_size=self.world_size, tag=2 * self.tag)


class GatheredBucket(BucketBuffers):
    """A bucket whose weights are there only while they are used, and whose gradients only until the owner has their sum.

    The parameters stay views of the buffer, whose memory comes and goes: what autograd has saved of a weight is whole again
    as soon as the bucket is gathered again. Where the masters are on the host, this rank's own weights stay on the device: every
    micro-step sends them.
    """

    gathered = True

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._works: list[dist.Work] = []
        self._received: set[int] = set()  # parameters whose gradient of this micro-step is in the buffer
        self.is_first = True  # no micro-step of this step has been added yet
        self._own_weights: Tensor | None = None  # (segment,) in the compute dtype
        if any(share.master_on_host for share in self.owned):
            self._own_weights = self.weights.view(self.world_size, -1)[self.rank].clone()
            for share, start in zip(self.owned, self.starts, strict=True):
                share.weight = self._own_weights[start : start + share.weight.numel()].view_as(share.weight)
        set_memory(self.weights, there=False)
        assert self.sum is not None
        self.sum.set_memory(there=False)

    def gather(self) -> None:
        """Starts to send this rank's weights to all ranks and to receive theirs. Collective; wait_weights before their use."""
        set_memory(self.weights, there=True)
        if self._own_weights is not None:
            self.weights.view(self.world_size, -1)[self.rank].copy_(self._own_weights)
        self._works = super().send_weights()

    def wait_weights(self) -> None:
        """Waits until the weights are there."""
        for work in self._works:
            work.wait()
        self._works = []

    def free(self) -> None:
        """Frees the weights' memory; the owners' masters have them."""
        set_memory(self.weights, there=False)

    def take_gradient(self, number: int) -> None:
        """Moves the gradient of the bucket's parameter `number` into the buffer."""
        assert self.sum is not None
        param = self.params[number]
        assert param.grad is not None
        if not self._received:
            self.sum.set_memory(there=True)
        self.grad_views[number].copy_(param.grad)
        param.grad = None
        self._received.add(number)

    def start_sum(self) -> None:
        """Starts the sum of a micro-step's gradients over ranks; a missing one counts as zero. Collective."""
        assert self.sum is not None
        if not self._received:
            self.sum.set_memory(there=True)
        for number, view in enumerate(self.grad_views):
            if number not in self._received:
                view.zero_()
        self._received.clear()
        self.sum.start()

    def end_sum(self) -> None:
        """Waits for the sum and adds it to those of the step's earlier micro-steps."""
        assert self.sum is not None
        total = self.sum.wait(add=not self.is_first)
        self.is_first = False
        self.sum.set_memory(there=False)
        for share, start in zip(self.owned, self.starts, strict=True):
            share.grad = total[start : start + share.master.numel()].view_as(share.master)

    def wait_sum(self) -> None:
        """Does nothing: end_sum did it."""

    def send_weights(self) -> list[dist.Work]:
        """Sends nothing: whoever needs the weights gathers them."""
        return []


class Passage(Function):
    """Returns its input, and calls `entering` where the backward comes by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, entering: Callable[[], None]) -> Tensor:
        """Returns a view of x."""
        ctx.entering = entering
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Returns the gradient."""
        ctx.entering()
        return grads[0], None


def set_memory(flat: Tensor, *, there: bool) -> None:
    """Gives a flat buffer, with all its views, memory of arbitrary content, or takes it away."""
    # an op, not UntypedStorage.resize_: the trace of a step's memory sees it
    torch.ops.inductor.resize_storage_bytes_(flat, flat.nbytes if there else 0)


class SegmentSum:
    """Sums a flat buffer of world_size equal segments over ranks, for this rank's segment alone.

    flat: (world_size * segment,) fp32, bf16 or fp16. The result is fp32, and so is gloo's summing, in a fixed order: a repeat
    has the same bits. All ranks start the same buckets in the same order; `tag` tells apart those that are under way at once.
    keep: the result is a tensor of its own, which stays when the buffers have no memory.
    """

    def __init__(self, flat: Tensor, *, rank: int, world_size: int, tag: int, keep: bool = False):
        self._flat, self._rank, self._world_size, self._tag = flat, rank, world_size, tag
        self._segments = flat.view(world_size, -1)  # (world_size, segment)
        self._works: list[dist.Work] = []
        # this rank's own segment takes the sum: NCCL writes it there in place; on the CPU this rank adds the others', which it
        # receives beside it, since gloo sends nothing before the other side has a place to receive it
        self._own = self._segments[rank]
        self._others = flat.new_empty(world_size - 1 if flat.device.type == "cpu" else 0, self._own.numel())
        in_place = flat.dtype == torch.float32 and not keep
        self._total = self._own if in_place else torch.empty_like(self._own, dtype=torch.float32)

    def set_memory(self, *, there: bool) -> None:
        """Gives the buffers memory before a micro-step's first gradient, or takes it away after `wait`."""
        for flat in (self._flat, self._others):
            set_memory(flat, there=there)

    def start(self) -> None:
        """Starts to send and receive; `flat` must not change until `wait` returns. Collective."""
        if self._flat.device.type != "cpu":
            self._works = [_single(REDUCE_SCATTER, self._own, self._flat)]
            return
        for distance in range(1, self._world_size):
            sender, receiver = (self._rank - distance) % self._world_size, (self._rank + distance) % self._world_size
            self._works += [
                _work(dist.irecv(self._others[distance - 1], sender, tag=self._tag)),
                _work(dist.isend(self._segments[receiver], receiver, tag=self._tag)),
            ]

    def wait(self, *, add: bool = False) -> Tensor:
        """Returns the sum over ranks of this rank's segment, (segment,) fp32; it is valid until the next start.

        add: adds the sum to the one that was returned before.
        """
        for work in self._works:
            work.wait()
        self._works = []
        if add:
            self._total += self._own
        elif self._total is not self._own:
            self._total.copy_(self._own)
        for received in self._others:
            self._total += received
        return self._total


def start_all_gather(flat: Tensor, *, rank: int, world_size: int, tag: int) -> list[dist.Work]:
    """Starts to send every rank's segment of `flat` to all others, in place; wait for the works before using `flat`. Collective."""
    segments = flat.view(world_size, -1)  # (world_size, segment)
    if flat.device.type != "cpu":
        return [_single(ALL_GATHER, flat, segments[rank])]
    works = []
    for distance in range(1, world_size):
        sender, receiver = (rank - distance) % world_size, (rank + distance) % world_size
        works += [
            _work(dist.irecv(segments[sender], sender, tag=tag)),
            _work(dist.isend(segments[rank], receiver, tag=tag)),
        ]
    return works


def _single(names: tuple[str, str], output: Tensor, source: Tensor) -> dist.Work:
    """Starts NCCL's collective on one tensor, by its name since torch 2.13 or before."""
    new, old = names
    return _work(getattr(dist, new if hasattr(dist, new) else old)(output, source, async_op=True))


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this process is not in the process group"
    return work
