"""
What `--offload optimizer` keeps in the host's memory, and in which batches each update brings it to the GPU. Pure arithmetic.

The fp32 masters and the states of all but the replicated tensors leave the GPU; the weights that the model computes with stay. In
fp32 these are the masters, so states alone leave. A batch is what is updated together: matrices of one shape as without
offloading, so that their products have the same bits, or rows for an elementwise algorithm, cut to ROW_BATCH_BYTES. The GPU has
NUM_BUFFERS buffers of the largest batch during an update: one is filled, one is updated, one is sent back. With two, a buffer would
have to be sent back before it is filled again, and only one direction of the link would work at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import lcm, prod
from typing import NamedTuple

from paceline.config import Config
from paceline.errors import PlanError
from paceline.plan.algorithms import Algorithm, Shape, algorithm_of
from paceline.plan.cost import RunSetup
from paceline.plan.shapes import FP32
from paceline.plan.sharding import ALIGNMENT, matrix_batches
from paceline.plan.states import WORKING_COPIES, StoredTensor, stored_states
from paceline.units import MIB

MASTER = "master"  # beside the names of states
NUM_BUFFERS = 3
ROW_BATCH_BYTES = 128 * MIB  # some 10 ms over PCIe: a longer copy is no faster


class RowRange(NamedTuple):
    """Rows [lo, hi) of tensor `number` of a list, counted from the tensor's first row."""

    number: int
    lo: int
    hi: int


@dataclass(frozen=True)
class MovedBatch:
    """What is updated together. numel: weights. moved_bytes: each way. buffer_bytes: on the GPU, where tensors are aligned.

    shape, count: of the matrices of an algorithm that needs whole ones; None and 0 for rows.
    """

    numel: int
    moved_bytes: int
    buffer_bytes: int
    shape: Shape | None = None
    count: int = 0


def choose_offload(config: Config, *, device: str) -> str:
    """Returns the config's value; raises PlanError where there is no GPU whose memory offloading would save."""
    if config.offload != "none" and device == "cpu":
        raise PlanError(
            f"offload is {config.offload}, but the ranks are on the CPU: there is no GPU whose memory it would save",
            fix="--offload none",
            changes=({"offload": "none"},),
        )
    return config.offload


def moved_tensors(algorithm: Algorithm, shape: Shape, *, rows: int, masters: bool) -> tuple[StoredTensor, ...]:
    """Returns what some rows of a parameter have in the host's memory: their master first."""
    master = (StoredTensor(MASTER, (rows, *shape[1:])),) if masters else ()
    return master + stored_states(algorithm, shape, rows=rows)


def copies_in_batch(algorithm: Algorithm, *, masters: bool) -> int:
    """Returns the fp32 numbers for each element of a batch of rows: what is moved, or decoded, and what decoding needs."""
    return masters + len(algorithm.states) + (WORKING_COPIES if algorithm.codes else 0)


def row_batches(shapes: Sequence[Shape], *, num_copies: int) -> list[list[RowRange]]:
    """Returns which rows of tensors are updated together. num_copies: copies_in_batch.

    Rows are cut at multiples of ALIGNMENT elements: the update's vectors then cover the same elements as of a whole tensor.
    """
    limit = ROW_BATCH_BYTES // (FP32 * num_copies)
    batches: list[list[RowRange]] = []
    filled = limit  # elements of the last batch
    for number, (rows, *others) in enumerate(shapes):
        cols = prod(others)
        unit = lcm(cols, ALIGNMENT) // cols
        most = max(unit, limit // cols // unit * unit)
        for lo in range(0, rows, most):
            hi = min(rows, lo + most)
            if not batches or filled + (hi - lo) * cols > limit:
                batches.append([])
                filled = 0
            batches[-1].append(RowRange(number, lo, hi))
            filled += (hi - lo) * cols
    return batches


def aligned(num_bytes: int) -> int:
    """Returns the bytes to the start of the next tensor in a buffer."""
    return -(-num_bytes // (FP32 * ALIGNMENT)) * FP32 * ALIGNMENT


def offloaded_batches(setup: RunSetup) -> tuple[MovedBatch, ...]:
    """Returns what the first rank, which has no less than others, moves in each update, in order; without offloading nothing."""
    if setup.offload == "none":
        return ()
    return _moved_batches(setup.of_states)


@lru_cache(maxsize=64)
def _moved_batches(setup: RunSetup) -> tuple[MovedBatch, ...]:
    masters, batches = setup.precision != "fp32", list[MovedBatch]()
    for bucket in sorted(setup.layout.buckets, key=lambda bucket: bucket.whole):
        shares = bucket.shares(0)
        if not shares:
            continue
        shapes = [(share.hi - share.lo, *share.param.shape[1:]) for share in shares]
        algorithm = algorithm_of(setup.optimizer, shares[0].param.group, optimizer_states=setup.optimizer_states)
        if bucket.whole:
            matrices = matrix_batches(shapes, together=setup.device != "cpu")
            groups = [[RowRange(number, 0, shapes[number][0]) for number in batch] for batch in matrices]
        else:
            groups = row_batches(shapes, num_copies=copies_in_batch(algorithm, masters=masters))
        for group in groups:
            moved = [
                tensor
                for number, lo, hi in group
                for tensor in moved_tensors(algorithm, shares[number].param.shape, rows=hi - lo, masters=masters)
            ]
            batches.append(_moved_batch(group, shapes, moved, whole=bucket.whole))
    return tuple(batches)


def staged_seconds(moves: Sequence[float], updates: Sequence[float]) -> float:
    """Returns how long all updates take with their batches' ways to the device and back, as train/offload.py orders them.

    moves: the seconds of each batch, the same each way, both ways at once. updates: the seconds of each batch's update.
    """
    arrived = updated = 0.0
    sent: list[float] = []
    for at, (move, update) in enumerate(zip(moves, updates, strict=True)):
        arrived = max(arrived, sent[at - NUM_BUFFERS] if at >= NUM_BUFFERS else 0.0) + move
        updated = max(updated, arrived) + update
        sent.append(max(updated, sent[-1] if sent else 0.0) + move)
    return sent[-1] if sent else 0.0


def _moved_batch(
    group: Sequence[RowRange], shapes: Sequence[Shape], moved: Sequence[StoredTensor], *, whole: bool
) -> MovedBatch:
    """moved: of all members, one member after the other; of matrices, those of one kind are one tensor."""
    numel, count = sum((hi - lo) * prod(shapes[number][1:]) for number, lo, hi in group), len(group)
    sizes = [tensor.num_bytes for tensor in moved]
    if not whole:
        return MovedBatch(numel, sum(sizes), sum(map(aligned, sizes)))
    one = sizes[: len(sizes) // count]
    return MovedBatch(numel, sum(sizes), sum(aligned(count * size) for size in one), shapes[group[0].number], count)
