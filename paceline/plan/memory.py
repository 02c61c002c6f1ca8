"""
Bytes of one rank: what it holds from step to step, the peak of each phase of a step, and the size of a checkpoint.

What is held is exact, from the layout that the worker uses (plan/sharding.py); what comes and goes is plan/activations.py's. The
peak is the largest of the phases. No torch; tests/train/test_exact.py holds both against a trace of the worker's own ops.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from paceline.config import ModelConfig
from paceline.plan.activations import (
    MemorySetup,
    backward_extra_bytes,
    checkpointed_layer_bytes,
    forward_extra_bytes,
    head_bytes,
    layer_bytes,
    loss_bytes,
    running_layer_bytes,
    stem_bytes,
)
from paceline.plan.compiled import (
    compiled_backward,
    compiled_forward_extra_bytes,
    compiled_layer_bytes,
    compiled_running_layer_bytes,
    compiled_stem_bytes,
)
from paceline.plan.shapes import ParamShape, has_value_embed, param_shapes
from paceline.plan.sharding import Bucket, ShardPlan, shard_plan

FP32, NARROW = 4, 2


@dataclass(frozen=True)
class StateBytes:
    """What one rank holds."""

    weights: int  # what the model computes with
    gradients: int
    masters: int  # fp32 copies of the owned weights; none where the model computes in fp32
    states: int
    communication: int  # gradients that other ranks send, and their fp32 sum

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.masters + self.states + self.communication


@dataclass(frozen=True)
class Phase:
    """A moment of a step. parts: bytes by what they are."""

    name: str
    parts: Mapping[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())


def peak_phase(setup: MemorySetup) -> Phase:
    return max(phases(setup), key=lambda phase: phase.bytes)


def phases(setup: MemorySetup) -> tuple[Phase, ...]:
    """Of the fullest rank, in the order of a step."""
    held = fullest_state(setup)
    base = {"weights": held.weights, "masters": held.masters, "states": held.states}
    if held.communication:
        base["communication"] = held.communication
    fresh = setup.world_size == 1 and setup.grad_accum_steps == 1  # gradients come into being during the backward
    unsummed = setup.shard == "none" and setup.world_size > 1 and setup.grad_accum_steps > 1
    before = 0 if fresh else held.gradients * (2 if unsummed else 1)  # DDP's buckets, and what is not in them yet
    kept = [_kept(setup, layer) for layer in range(setup.model.n_layer)]
    activations = (compiled_stem_bytes if setup.compiled else stem_bytes)(setup) + sum(kept)
    backward = (compiled_backward if setup.compiled else _backward)(setup, kept, before=before, fresh=fresh)
    loss = loss_bytes(setup)
    forward = {
        "gradients": before,
        "activations": activations,
        "working": _forward_extra(setup),
    }
    losing = {
        "gradients": before,
        "activations": activations + head_bytes(setup),
        "loss": loss.kept + loss.working,
    }
    evaluation = {
        "gradients": held.gradients,
        "activations": 0,
        "working": _evaluation_bytes(setup),
    }
    return (
        Phase("forward", base | forward),
        Phase("loss", base | losing),
        Phase("backward", base | backward),
        Phase("optimizer", base | {"gradients": held.gradients, "working": _update_bytes(setup)}),
        Phase("evaluation", base | evaluation),
    )


def _kept(setup: MemorySetup, layer: int) -> int:
    if setup.activation_checkpointing:
        return checkpointed_layer_bytes(setup, layer)
    return (compiled_layer_bytes if setup.compiled else layer_bytes)(setup, layer)


def _forward_extra(setup: MemorySetup) -> int:
    if setup.compiled:
        return compiled_forward_extra_bytes(setup)
    return running_layer_bytes(setup) if setup.activation_checkpointing else forward_extra_bytes(setup)


def _recomputed(setup: MemorySetup, layer: int) -> int:
    """What a checkpointed layer holds while it runs, beyond what it keeps."""
    if not setup.activation_checkpointing:
        return 0
    return layer_bytes(setup, layer) - checkpointed_layer_bytes(setup, layer)


def _backward(setup: MemorySetup, kept: list[int], *, before: int, fresh: bool) -> dict[str, int]:
    """At its fullest: at the start of one layer's backward, or where an embedding's gradient is made."""
    model, stream = setup.model, setup.stream_bytes
    table = model.padded_vocab_size * model.n_kv_head * model.head_dim
    looked_up = 0 if setup.element_bytes == FP32 else FP32 * setup.num_tokens * model.n_kv_head * model.head_dim
    stem = stem_bytes(setup)
    gradients = before + (FP32 * model.padded_vocab_size * model.n_embd if fresh else 0)
    fullest: dict[str, int] = {}
    for layer in reversed(range(model.n_layer)):
        saved = stem + sum(kept[: layer + 1])
        extra = backward_extra_bytes(setup, layer)
        if setup.activation_checkpointing:
            extra += _recomputed(setup, layer)
        found = [{"gradients": gradients, "activations": saved, "working": extra}]
        if fresh:
            gradients += FP32 * _layer_numel(model, layer)
        if has_value_embed(layer, model.n_layer):
            made = FP32 * table + looked_up + setup.value_bytes + 3 * stream
            found.append({"gradients": gradients, "activations": stem + sum(kept[:layer]), "working": made})
            gradients += FP32 * table if fresh else 0
        fullest = max([fullest, *found], key=lambda parts: sum(parts.values()))
    embedding = {
        "gradients": gradients,
        "activations": stem,
        "working": FP32 * model.padded_vocab_size * model.n_embd
        + (FP32 * setup.num_tokens * model.n_embd if looked_up else 0)
        + stream,
    }
    return max(fullest, embedding, key=lambda parts: sum(parts.values()))


def _layer_numel(model: ModelConfig, layer: int) -> int:
    q_width, kv_width = model.n_head * model.head_dim, model.n_kv_head * model.head_dim
    return model.n_embd * (2 * q_width + 2 * kv_width + 8 * model.n_embd)


def _evaluation_bytes(setup: MemorySetup) -> int:
    """Without gradients: tokens, the stream, its copies at the start and in the middle, and one layer or the logits."""
    stream = setup.stream_bytes
    layer = 2 * stream + (compiled_running_layer_bytes if setup.compiled else running_layer_bytes)(setup)
    return stem_bytes(setup) - stream + max(layer, loss_bytes(setup, with_grad=False).working)


def _update_bytes(setup: MemorySetup) -> int:
    """Temporaries of Muon's largest batch of matrices; AdamW updates in place."""
    if setup.shard == "none" or setup.optimizer == "adamw":
        return 0
    width = NARROW if setup.device != "cpu" else FP32
    largest = 0
    for bucket in _layout(setup.model, setup.world_size, setup.optimizer).buckets:
        if not bucket.whole:
            continue
        shapes = [share.param.shape for share in bucket.shares(0)]
        runs = _runs(shapes) if setup.device != "cpu" else [(shape, 1) for shape in shapes]
        largest = max([largest, *(_batch_bytes(shape, count, width) for shape, count in runs)])
    return largest


def _runs(shapes: list[tuple[int, ...]]) -> list[tuple[tuple[int, ...], int]]:
    """Neighbours of one shape are updated together."""
    runs: list[tuple[tuple[int, ...], int]] = []
    for shape in shapes:
        if runs and runs[-1][0] == shape:
            runs[-1] = (shape, runs[-1][1] + 1)
        else:
            runs.append((shape, 1))
    return runs


def _batch_bytes(shape: tuple[int, ...], count: int, width: int) -> int:
    """Stacks of weights and gradients where there are several; then the fullest line of train/updates.py."""
    short, long = sorted(shape)
    numel, gram = count * short * long, count * short * short
    stacks = 2 * FP32 * numel if count > 1 else 0
    division = (2 * FP32 + (width if width != FP32 else 0)) * numel
    iteration = FP32 * numel + 2 * width * numel + 2 * width * gram
    return stacks + max(division, iteration, 3 * FP32 * numel)


def fullest_state(setup: MemorySetup) -> StateBytes:
    """Of the rank that holds most."""
    ranks = range(setup.world_size) if setup.shard != "none" else (0,)
    found = (
        state_bytes(
            setup.model,
            world_size=setup.world_size,
            rank=rank,
            optimizer=setup.optimizer,
            shard=setup.shard,
            precision=setup.precision,
            grad_accum_steps=setup.grad_accum_steps,
            device=setup.device,
        )
        for rank in ranks
    )
    return max(found, key=lambda state: state.total)


def copies_bytes(setup: MemorySetup) -> int:
    """Of the fullest rank's part of a checkpoint, weights in fp32 and states: kept in the host's memory from the first save on."""
    held = fullest_state(setup)
    masters = held.masters or (held.weights if setup.shard == "none" else held.weights // setup.world_size)
    return masters + held.states


@lru_cache(maxsize=64)
def _layout(model: ModelConfig, world_size: int, optimizer: str) -> ShardPlan:
    return shard_plan(param_shapes(model), world_size=world_size, optimizer=optimizer)


@lru_cache(maxsize=256)
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
    if shard == "none":
        numel = sum(shape.numel for shape in param_shapes(model))
        return StateBytes(FP32 * numel, FP32 * numel, masters=0, states=2 * FP32 * numel, communication=0)
    plan = _layout(model, world_size, optimizer)
    width = FP32 if precision == "fp32" else NARROW
    grad_width = NARROW if precision == "bf16" and grad_accum_steps == 1 and world_size > 1 else FP32
    owned = [
        (share.param, share.hi - share.lo, bucket.whole) for bucket in plan.buckets for share in bucket.shares(rank)
    ]
    small = sum(shape.numel for shape in plan.replicated)
    num_owned = sum(rows * (param.numel // param.shape[0]) for param, rows, _ in owned)
    return StateBytes(
        weights=width * sum(bucket.segment for bucket in plan.buckets) * world_size + FP32 * small,
        gradients=sum(_gradient_bytes(bucket, world_size, grad_width) for bucket in plan.buckets) + FP32 * small,
        masters=0 if precision == "fp32" else FP32 * num_owned,
        states=FP32 * (sum(_num_states(param, rows, muon=whole) for param, rows, whole in owned) + 2 * small),
        communication=sum(_received_bytes(bucket, world_size, grad_width, device) for bucket in plan.buckets),
    )


def checkpoint_bytes(model: ModelConfig, *, optimizer: str) -> int:
    """Weights in fp32 and states, over all ranks; the files' headers and generators add some kilobytes."""
    shapes = param_shapes(model)
    muon = {shape.name for bucket in _whole_buckets(model, optimizer) for shape in bucket}
    return FP32 * sum(shape.numel + _num_states(shape, shape.shape[0], muon=shape.name in muon) for shape in shapes)


def _whole_buckets(model: ModelConfig, optimizer: str) -> Iterable[list[ParamShape]]:
    buckets = _layout(model, 1, optimizer).buckets
    return ([placement.param for placement in bucket.placements] for bucket in buckets if bucket.whole)


def _gradient_bytes(bucket: Bucket, world_size: int, width: int) -> int:
    """One rank keeps what autograd made; several have a flat buffer."""
    if world_size == 1:
        return FP32 * sum(placement.param.numel for placement in bucket.placements)
    return width * bucket.segment * world_size


def _received_bytes(bucket: Bucket, world_size: int, width: int, device: str) -> int:
    if world_size == 1:
        return 0
    received = 1 if device == "cuda" else world_size - 1  # segments
    return width * bucket.segment * received + (FP32 * bucket.segment if width != FP32 else 0)


def _num_states(param: ParamShape, rows: int, *, muon: bool) -> int:
    """Elements of the states of some rows: momentum and one variance per longer side; or AdamW's two."""
    numel = rows * (param.numel // param.shape[0])
    return numel + max(param.shape) if muon else 2 * numel
