"""
Which rank owns which part of the optimizer: buckets, segments, shards, padding. Pure arithmetic, for worker and planner.

A bucket is one flat buffer of world_size equal segments; rank r owns segment r: it sums the gradients there, holds the
fp32 weights and the states, and sends the new weights to the others. Tensors lie whole and contiguous in their bucket,
so a parameter is a view of it. Where the algorithm needs whole matrices (plan/algorithms.py), each lies inside one segment;
other tensors are cut at row borders. Tensors under SMALL elements are kept and updated by every rank.

Buckets stand in the order in which backward completes them, and are sent in that order on all ranks. Where the weights are sharded
too, buckets are of as few layers as divide evenly over the ranks, and gather_schedule decides when each is gathered.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby
from math import lcm, prod

from paceline.plan.algorithms import ALGORITHMS, Algorithm, algorithm_of
from paceline.plan.shapes import FP32, HEAD, MATRIX, ParamShape

ALIGNMENT = 64  # elements between borders: vector instructions then round the same elements alike at any world size
SMALL = 1024  # elements; below, a collective of its own costs more than updating it everywhere
NUM_BUCKETS = 6  # of each kind, about: enough to overlap, few enough for long messages and batches of matrices
BATCH_NUMEL = 48 << 20  # elements of the matrices that a GPU updates together: about a gigabyte of temporaries
# of DDP's messages: kDefaultFirstBucketBytes, kDefaultBucketBytesCap in torch/csrc/distributed/c10d/reducer.hpp
DDP_FIRST_BUCKET_BYTES, DDP_BUCKET_BYTES = 1 << 20, 25 << 20


@dataclass(frozen=True)
class Placement:
    """A tensor's place in its bucket: `offset` elements from the start."""

    param: ParamShape
    offset: int


@dataclass(frozen=True)
class Share:
    """Rows [lo, hi) of a tensor, `start` elements into their owner's segment."""

    param: ParamShape
    lo: int
    hi: int
    start: int


@dataclass(frozen=True)
class Bucket:
    """A flat buffer. whole: no tensor is split over ranks. segment: elements of each rank."""

    placements: tuple[Placement, ...]
    segment: int
    whole: bool

    def shares(self, rank: int) -> tuple[Share, ...]:
        """Returns what lies in segment `rank`, in order."""
        if rank not in self._known:
            self._known[rank] = self._cut(rank)
        return self._known[rank]

    @cached_property
    def _known(self) -> dict[int, tuple[Share, ...]]:
        return {}

    def _cut(self, rank: int) -> tuple[Share, ...]:
        begin, end = rank * self.segment, (rank + 1) * self.segment
        shares = []
        for placement in self.placements:
            param, cols = placement.param, row_size(placement.param)
            # borders lie between rows
            lo, hi = (min(max(border - placement.offset, 0), param.numel) // cols for border in (begin, end))
            if lo < hi:
                shares.append(Share(param, lo, hi, placement.offset + lo * cols - begin))
        return tuple(shares)


@dataclass(frozen=True)
class ShardPlan:
    """The layout of all ranks. replicated: small tensors that every rank updates."""

    world_size: int
    buckets: tuple[Bucket, ...]  # in the order they are sent
    replicated: tuple[ParamShape, ...]


def shards_weights(*, world_size: int, shard: str) -> bool:
    """Returns whether each rank holds its own part of the weights alone, and gathers the others' when it needs them."""
    return shard == "full" and world_size > 1


def shard_plan(shapes: Sequence[ParamShape], *, world_size: int, optimizer: str, shard: str = "optimizer") -> ShardPlan:
    """Lays out the optimizer's work. optimizer: the config's, whose row says which matrices need a whole owner."""
    by_layer = shards_weights(world_size=world_size, shard=shard)
    whole = {shape.name: shape for shape in shapes if algorithm_of(optimizer, shape.group).whole}
    replicated = [shape for shape in shapes if shape.name not in whole and shape.numel < SMALL]
    ready = {shape.name: position for position, shape in enumerate(backward_order(shapes))}

    def in_order(members: Iterable[ParamShape]) -> list[ParamShape]:
        return sorted(members, key=lambda shape: ready[shape.name])

    loads = [0] * world_size  # FLOPs of the updates, carried from bucket to bucket
    parts = parts_of(shapes) if by_layer else None
    groups = _matrix_groups(in_order(whole.values()), world_size, parts)
    buckets = [_whole_bucket(group, loads, ALGORITHMS[optimizer]) for group in groups]
    by_rows = in_order(shape for shape in shapes if shape.name not in whole and shape.numel >= SMALL)
    buckets += [_row_bucket(group, world_size) for group in _row_groups(by_rows, parts)]
    buckets.sort(key=lambda bucket: max(ready[placement.param.name] for placement in bucket.placements))
    return ShardPlan(world_size, tuple(buckets), tuple(replicated))


@dataclass(frozen=True)
class Moment:
    """What happens where a micro-step enters a part: numbers of buckets."""

    free: tuple[int, ...]  # weights that are not needed soon
    gather: tuple[int, ...]  # weights that are sent from here on: those of this part first, then those needed next
    need: tuple[int, ...]  # weights that are waited for
    complete: tuple[int, ...]  # gradients whose sums over ranks start


@dataclass(frozen=True)
class GatheredBytes:
    """What sharded weights take beyond a rank's own while a part of the model is at work.

    buffers: of gradients that are being filled or sent. matrices, tables: of gradients whose first comes in this backward.
    """

    weights: int = 0
    buffers: int = 0
    matrices: int = 0
    tables: int = 0

    def parts(self, *, matrices: int = 0) -> dict[str, int]:
        """Returns the bytes by their kind. matrices: how much of these is there."""
        parts = {"gathered": self.weights} if self.weights else {}
        if communication := self.buffers + matrices:
            parts["communication"] = communication
        return parts


def gather_schedule(
    plan: ShardPlan, shapes: Sequence[ParamShape], *, checkpointing: bool | str, backward: bool = True
) -> tuple[Moment, ...]:
    """Returns what a micro-step does with weights that are sharded, the same on all ranks.

    The moments are where the forward enters each part (`parts_of`), its end, where the backward enters each part, the last first,
    and its end: the part that the forward enters at moment p, the backward leaves at moment -1 - p. checkpointing: the
    rung; layers that are computed again look up their embeddings again, and matrices are needed in any case. backward False: a
    forward alone.
    """
    parts = parts_of(shapes)
    after = 1 + _num_layers(shapes)  # the last part
    forward: list[set[int]] = [set() for _ in range(after + 2)]
    back: list[set[int]] = [set() for _ in range(after + 2)]
    first_parts: list[int] = []
    for number, bucket in enumerate(plan.buckets):
        first_parts.append(min(parts[placement.param.name] for placement in bucket.placements))
        for param in (placement.param for placement in bucket.placements):
            part = parts[param.name]
            forward[part].add(number)
            if param.group == MATRIX or (checkpointing is True and 0 < part < after):
                back[after - part].add(number)
    needs = forward + (back if backward else [])
    moments, live, until = [], set[int](), 0
    for at, need in enumerate(needs):
        # up to the next moment that needs more than this one: one message ahead
        until = max(until, next((then for then in range(at, len(needs)) if needs[then] - need), at))
        soon = set[int]().union(*needs[at : until + 1])
        gather = sorted(need - live) + sorted(soon - live - need)
        left = 2 * after + 3 - at  # the part that the backward leaves here
        complete = tuple(number for number, first in enumerate(first_parts) if first == left and at > after + 1)
        moments.append(Moment(tuple(sorted(live - soon)), tuple(gather), tuple(sorted(need)), complete))
        live = soon
    return tuple(moments)


def sends_narrow(*, bf16: bool, grad_accum_steps: int, world_size: int, shard: str) -> bool:
    """Returns whether gradients are sent in bf16: those of a single micro-step lose no bits that its backward had.

    Where the weights are sharded, each micro-step sends its own, and the owner adds them up in fp32.
    """
    single = grad_accum_steps == 1 or shards_weights(world_size=world_size, shard=shard)
    return bf16 and single and world_size > 1 and shard != "none"


def ddp_buckets(shapes: Sequence[ParamShape]) -> tuple[int, ...]:
    """Returns the bytes of DDP's messages of a step, by which it averages fp32 gradients, in their order.

    A bucket takes gradients as they are complete, until it has its cap; from the second step on DDP knows their order. As
    compute_bucket_assignment_by_size of torch's reducer.cpp.
    """
    buckets, cap, size = [], DDP_FIRST_BUCKET_BYTES, 0
    for shape in _autograd_order(shapes):
        size += FP32 * shape.numel
        if size >= cap:
            buckets.append(size)
            size, cap = 0, DDP_BUCKET_BYTES
    return tuple([*buckets, size] if size else buckets)


def _autograd_order(shapes: Sequence[ParamShape]) -> list[ParamShape]:
    """Returns the order in which autograd has whole gradients: the end of the model, the layers, and what all layers read."""
    parts, last, end = parts_of(shapes), _num_layers(shapes), ("lm_head.weight", "backout_lambda")

    def when(shape: ParamShape) -> tuple[int, int, bool]:
        if shape.name in end:
            return 0, end.index(shape.name), False
        part = parts[shape.name]
        is_table = shape.group != MATRIX and shape.numel >= SMALL
        return (1, -part, is_table) if 0 < part <= last else (2, 0, is_table)

    return sorted(backward_order(shapes), key=when)


def compiles_by_block(*, world_size: int, shard: str) -> bool:
    """Returns whether a compiled model is one graph for each layer: its gradients are then sent under the backward.

    A single graph returns all gradients at its end. One process sends none; DDP splits a single graph at its own buckets.
    """
    return world_size > 1 and shard != "none"


def matrix_batches(shapes: Sequence[tuple[int, ...]], *, together: bool) -> Iterator[range]:
    """Yields the neighbours of each update: one, or where `together` those of one shape, up to BATCH_NUMEL elements."""
    for shape, members in groupby(range(len(shapes)), key=lambda number: shapes[number]):
        first, *others = members
        end = first + 1 + len(others)
        most = max(1, BATCH_NUMEL // prod(shape)) if together else 1
        yield from (range(start, min(start + most, end)) for start in range(first, end, most))


def row_size(param: ParamShape) -> int:
    """Returns the elements of one row."""
    return prod(param.shape[1:])


def backward_order(shapes: Sequence[ParamShape]) -> list[ParamShape]:
    """Returns the order in which gradients are complete: after the layers, the layers from the last on, before the layers."""
    parts = parts_of(shapes)
    return [shapes[i] for i in sorted(range(len(shapes)), key=lambda i: (-parts[shapes[i].name], -i))]


def parts_of(shapes: Sequence[ParamShape]) -> dict[str, int]:
    """Returns the part of the forward that each parameter is for: 0 before the layers, 1 for the first, one more after the last.

    A value embedding, registered behind the layers, belongs to its own layer.
    """
    layers, after = [_layer_of(shape.name) for shape in shapes], 1 + _num_layers(shapes)
    last = max((i for i, layer in enumerate(layers) if layer is not None), default=-1)
    outside = [0 if i < last else after for i in range(len(shapes))]
    return {
        shape.name: part if layer is None else layer + 1
        for shape, layer, part in zip(shapes, layers, outside, strict=True)
    }


@cache
def _layer_of(name: str) -> int | None:
    return next((int(word) for word in name.split(".") if word.isdigit()), None)


def _num_layers(shapes: Sequence[ParamShape]) -> int:
    return 1 + max((layer for shape in shapes if (layer := _layer_of(shape.name)) is not None), default=-1)


def _matrix_groups(
    matrices: list[ParamShape], world_size: int, parts: Mapping[str, int] | None
) -> list[list[ParamShape]]:
    """Returns groups that are large enough and whose large shapes divide evenly over the ranks: then no segment is padded.

    A single rank sends nothing and has one group. Small matrices, the gates of all layers, are in the last one: a GPU then updates
    all of a shape at once, and a call takes its time whatever the size. parts: of each matrix, where the weights are sharded too: a
    group then has whole layers, as few as divide evenly, and their small matrices.
    """
    if world_size == 1:
        return [matrices] if matrices else []
    if parts:
        enough, small = 0.0, []
        together = [list(members) for _, members in groupby(matrices, key=lambda matrix: parts[matrix.name])]
    else:
        enough = sum(matrix.numel for matrix in matrices) / NUM_BUCKETS
        small = [matrix for matrix in matrices if matrix.numel < SMALL]
        together = [[matrix] for matrix in matrices if matrix.numel >= SMALL]
    groups: list[list[ParamShape]] = [[]]
    for unit in together:
        group = groups[-1]
        group += unit
        shapes = [tuple(sorted(member.shape)) for member in group if member.numel >= SMALL]
        even = all(shapes.count(shape) % world_size == 0 for shape in set(shapes))
        if even and sum(member.numel for member in group) >= enough:
            groups.append([])
    groups = [group for group in groups if group] or [[]]
    groups[-1] += small
    return [group for group in groups if group]


def _whole_bucket(matrices: list[ParamShape], loads: list[int], algorithm: Algorithm) -> Bucket:
    """Gives each matrix, the longest update first, to the least loaded rank. Adds to loads."""
    owned: list[list[ParamShape]] = [[] for _ in loads]
    for matrix in sorted(matrices, key=lambda matrix: (-algorithm.flops(matrix.shape), matrix.shape)):
        rank = loads.index(min(loads))
        owned[rank].append(matrix)
        loads[rank] += algorithm.flops(matrix.shape)
    segment = max(sum(_aligned(matrix.numel, ALIGNMENT) for matrix in members) for members in owned)
    placements = []
    for rank, members in enumerate(owned):
        offset = rank * segment
        for matrix in members:
            placements.append(Placement(matrix, offset))
            offset += _aligned(matrix.numel, ALIGNMENT)
    return Bucket(tuple(placements), segment, whole=True)


def _row_groups(tensors: list[ParamShape], parts: Mapping[str, int] | None) -> list[list[ParamShape]]:
    """Returns the tensors of each bucket: their row sizes divide each other, so that one border is a row border of all.

    lm_head has a bucket of its own. The loss has made its gradient before the backward begins, so it is sent under all of it.
    parts: as for _matrix_groups: a bucket is then of one layer, and a table, which backward does not read, has its own.
    """
    group_numel = sum(tensor.numel for tensor in tensors) / NUM_BUCKETS
    kind = {tensor.name: (parts[tensor.name], tensor.group) if parts else tensor.group == HEAD for tensor in tensors}
    groups: list[list[ParamShape]] = []
    for tensor in tensors:
        units = _units([*groups[-1], tensor]) if groups else []
        fits = units and max(units) == lcm(*units)  # all divide the largest
        full = groups and not parts and sum(member.numel for member in groups[-1]) >= group_numel
        if not fits or full or kind[tensor.name] != kind[groups[-1][-1].name]:
            groups.append([])
        groups[-1].append(tensor)
    return groups


def _row_bucket(tensors: list[ParamShape], world_size: int) -> Bucket:
    """Puts tensors one after the other, cut into equal segments at multiples of the unit."""
    unit = max(_units(tensors))
    placements, offset = [], 0
    for tensor in tensors:
        placements.append(Placement(tensor, offset))
        offset += _aligned(tensor.numel, unit)
    return Bucket(tuple(placements), _aligned(-(-offset // world_size), unit), whole=False)


def _units(tensors: list[ParamShape]) -> list[int]:
    """Returns for each tensor the smallest number of elements that is whole rows and aligned."""
    return [lcm(row_size(tensor), ALIGNMENT) for tensor in tensors]


def _aligned(numel: int, unit: int) -> int:
    return -(-numel // unit) * unit
