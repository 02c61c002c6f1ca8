"""
Bytes that a run holds from its first step to its last: weights, gradients, optimizer states; and the size of a checkpoint.

Exact, from the layout that the worker uses (plan/sharding.py). Activations and logits come and go within a step and are not
here. No torch; tests/train/test_optim.py adds up the worker's own tensors.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.config import ModelConfig
from paceline.plan.shapes import ParamShape, param_shapes
from paceline.plan.sharding import Bucket, shard_plan

FP32, NARROW = 4, 2


@dataclass(frozen=True)
class StateBytes:
    """What one rank holds."""

    weights: int  # what the model computes with
    gradients: int
    masters: int  # fp32 copies of the owned weights; none where the model computes in fp32
    states: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.masters + self.states


def state_bytes(
    model: ModelConfig,
    *,
    world_size: int,
    rank: int,
    optimizer: str,
    shard: str,
    precision: str,
    grad_accum_steps: int,
    device: str,
) -> StateBytes:
    """Between two steps; gradients as they stand before the update."""
    shapes = param_shapes(model)
    if shard == "none":
        numel = sum(shape.numel for shape in shapes)
        return StateBytes(weights=FP32 * numel, gradients=FP32 * numel, masters=0, states=2 * FP32 * numel)
    plan = shard_plan(shapes, world_size=world_size, optimizer=optimizer)
    width = FP32 if precision == "fp32" else NARROW
    grad_width = NARROW if precision == "bf16" and grad_accum_steps == 1 and world_size > 1 else FP32
    owned = [
        (share.param, share.hi - share.lo, bucket.whole) for bucket in plan.buckets for share in bucket.shares(rank)
    ]
    small = sum(shape.numel for shape in plan.replicated)
    num_owned = sum(rows * (param.numel // param.shape[0]) for param, rows, _ in owned)
    return StateBytes(
        weights=width * sum(bucket.segment for bucket in plan.buckets) * world_size + FP32 * small,
        gradients=sum(_gradient_bytes(bucket, world_size, grad_width, device) for bucket in plan.buckets)
        + FP32 * small,
        masters=0 if precision == "fp32" else FP32 * num_owned,
        states=FP32 * (sum(_num_states(param, rows, muon=whole) for param, rows, whole in owned) + 2 * small),
    )


def checkpoint_bytes(model: ModelConfig, *, optimizer: str) -> int:
    """Weights in fp32 and states, over all ranks; the files' headers and generators add some kilobytes."""
    shapes = param_shapes(model)
    muon = {shape.name for bucket in _whole_buckets(shapes, optimizer) for shape in bucket}
    return FP32 * sum(shape.numel + _num_states(shape, shape.shape[0], muon=shape.name in muon) for shape in shapes)


def _whole_buckets(shapes: tuple[ParamShape, ...], optimizer: str) -> Iterable[list[ParamShape]]:
    buckets = shard_plan(shapes, world_size=1, optimizer=optimizer).buckets
    return ([placement.param for placement in bucket.placements] for bucket in buckets if bucket.whole)


def _gradient_bytes(bucket: Bucket, world_size: int, width: int, device: str) -> int:
    """One rank keeps what autograd made; several have a flat buffer, what they receive, and an fp32 sum."""
    if world_size == 1:
        return FP32 * sum(placement.param.numel for placement in bucket.placements)
    received = 1 if device == "cuda" else world_size - 1  # segments
    total = FP32 * bucket.segment if width != FP32 else 0
    return width * bucket.segment * (world_size + received) + total


def _num_states(param: ParamShape, rows: int, *, muon: bool) -> int:
    """Elements of the states of some rows: momentum and one variance per longer side; or AdamW's two."""
    numel = rows * (param.numel // param.shape[0])
    return numel + max(param.shape) if muon else 2 * numel
