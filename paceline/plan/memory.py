"""
Bytes of one rank: what it holds from step to step, the peak of each phase of a step, and the size of a checkpoint.

What a rank holds is exact, from the layout that the worker uses (plan/sharding.py); plan/activations.py adds what lives within a
step. The peak is the largest of the phases. No torch; tests/train/test_exact.py holds both against a trace of the worker's own ops.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from paceline.config import ModelConfig
from paceline.plan.activations import (
    MemorySetup,
    backward_extra_bytes,
    checkpointed_layer_bytes,
    compiled_backward,
    compiled_forward_extra_bytes,
    compiled_layer_bytes,
    compiled_running_layer_bytes,
    compiled_stem_bytes,
    forward_extra_bytes,
    head_bytes,
    layer_bytes,
    loss_bytes,
    running_layer_bytes,
    stem_bytes,
)
from paceline.plan.algorithms import ALGORITHMS, algorithm_of
from paceline.plan.cost import layout
from paceline.plan.shapes import FP32, NARROW, ParamShape, has_value_embed, layer_weights, param_shapes, value_table
from paceline.plan.sharding import Bucket, row_size


@dataclass(frozen=True)
class StateBytes:
    """The bytes that one rank holds from step to step."""

    weights: int  # that the model computes with
    gradients: int
    masters: int  # fp32 copies of the owned weights; none where the model computes in fp32
    states: int
    communication: int  # gradients that other ranks send, and their fp32 sum

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.masters + self.states + self.communication


@dataclass(frozen=True)
class Phase:
    """A moment of a step. parts: bytes by their kind."""

    name: str
    parts: Mapping[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())


def peak_phase(setup: MemorySetup) -> Phase:
    """Returns the phase that needs most."""
    return max(phases(setup), key=lambda phase: phase.bytes)


def phases(setup: MemorySetup) -> tuple[Phase, ...]:
    """Returns the phases of the fullest rank, in the order of a step."""
    state = fullest_state(setup)
    base = {"weights": state.weights, "masters": state.masters, "states": state.states}
    if state.communication:
        base["communication"] = state.communication
    fresh = setup.world_size == 1 and setup.grad_accum_steps == 1  # gradients are made during the backward
    unsummed = setup.shard == "none" and setup.world_size > 1 and setup.grad_accum_steps > 1
    before = 0 if fresh else state.gradients * (2 if unsummed else 1)  # DDP's buckets, and what is not in them yet
    saved = [_saved_bytes(setup, layer) for layer in range(setup.model.n_layer)]
    activations = (compiled_stem_bytes if setup.compiled else stem_bytes)(setup) + sum(saved)
    backward = (compiled_backward if setup.compiled else _backward)(setup, saved, before=before, fresh=fresh)
    loss = loss_bytes(setup)
    head = activations + head_bytes(setup)
    moments = {
        "forward": {"gradients": before, "activations": activations, "working": _forward_extra(setup)},
        "loss": {"gradients": before, "activations": head, "loss": loss.saved + loss.working},
        "backward": backward,
        "optimizer": {"gradients": state.gradients, "working": _update_bytes(setup)},
        "evaluation": {"gradients": state.gradients, "activations": 0, "working": _evaluation_bytes(setup)},
    }
    return tuple(Phase(name, base | parts) for name, parts in moments.items())


def _saved_bytes(setup: MemorySetup, layer: int) -> int:
    if setup.activation_checkpointing:
        return checkpointed_layer_bytes(setup, layer)
    return (compiled_layer_bytes if setup.compiled else layer_bytes)(setup, layer)


def _forward_extra(setup: MemorySetup) -> int:
    if setup.compiled:
        return compiled_forward_extra_bytes(setup)
    return running_layer_bytes(setup) if setup.activation_checkpointing else forward_extra_bytes(setup)


def _backward(setup: MemorySetup, saved: list[int], *, before: int, fresh: bool) -> dict[str, int]:
    """Returns the fullest moment: the start of one layer's backward, or where an embedding's gradient is made."""
    model, stream = setup.model, setup.stream_bytes
    table = value_table(model)
    looked_up = 0 if setup.element_bytes == FP32 else FP32 * setup.num_tokens * model.n_kv_head * model.head_dim
    stem = stem_bytes(setup)
    gradients = before + (FP32 * model.padded_vocab_size * model.n_embd if fresh else 0)
    fullest: dict[str, int] = {}
    for layer in reversed(range(model.n_layer)):
        activations = stem + sum(saved[: layer + 1])
        extra = backward_extra_bytes(setup, layer)
        if setup.activation_checkpointing:  # it holds all of the layer while that runs again
            extra += layer_bytes(setup, layer) - checkpointed_layer_bytes(setup, layer)
        moments = [{"gradients": gradients, "activations": activations, "working": extra}]
        if fresh:
            gradients += FP32 * layer_weights(model)
        if has_value_embed(layer, model.n_layer):
            working = FP32 * table + looked_up + setup.value_bytes + 3 * stream
            moments.append({"gradients": gradients, "activations": stem + sum(saved[:layer]), "working": working})
            gradients += FP32 * table if fresh else 0
        fullest = max([fullest, *moments], key=lambda parts: sum(parts.values()))
    embedding = {
        "gradients": gradients,
        "activations": stem,
        "working": FP32 * model.padded_vocab_size * model.n_embd
        + (FP32 * setup.num_tokens * model.n_embd if looked_up else 0)
        + stream,
    }
    return max(fullest, embedding, key=lambda parts: sum(parts.values()))


def _evaluation_bytes(setup: MemorySetup) -> int:
    """Returns what an evaluation needs: tokens, the stream, its copies at the start and in the middle, one layer or the logits."""
    stream = setup.stream_bytes
    layer = 2 * stream + (compiled_running_layer_bytes if setup.compiled else running_layer_bytes)(setup)
    return stem_bytes(setup) - stream + max(layer, loss_bytes(setup, with_grad=False).working)


def _update_bytes(setup: MemorySetup) -> int:
    """Returns the temporaries of the largest batch of whole matrices."""
    algorithm = ALGORITHMS[setup.optimizer]
    if setup.shard == "none" or not algorithm.whole:
        return 0
    width = NARROW if setup.device != "cpu" else FP32
    largest = 0
    for bucket in layout(setup.model, setup.world_size, setup.optimizer).buckets:
        if not bucket.whole:
            continue
        shapes = [share.param.shape for share in bucket.shares(0)]
        runs = _runs(shapes) if setup.device != "cpu" else [(shape, 1) for shape in shapes]
        largest = max([largest, *(algorithm.working_bytes(shape, count, width) for shape, count in runs)])
    return largest


def _runs(shapes: list[tuple[int, ...]]) -> list[tuple[tuple[int, ...], int]]:
    """Returns shapes and counts of neighbours of one shape, which are updated together."""
    runs: list[tuple[tuple[int, ...], int]] = []
    for shape in shapes:
        if runs and runs[-1][0] == shape:
            runs[-1] = (shape, runs[-1][1] + 1)
        else:
            runs.append((shape, 1))
    return runs


def fullest_state(setup: MemorySetup) -> StateBytes:
    """Returns the state of the rank that holds most."""
    ranks = range(setup.world_size) if setup.shard != "none" else (0,)
    states = (
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
    return max(states, key=lambda state: state.total)


def copies_bytes(setup: MemorySetup) -> int:
    """Returns the fullest rank's part of a checkpoint, fp32 weights and states: it stays in host memory from the first save on."""
    state = fullest_state(setup)
    masters = state.masters or (state.weights if setup.shard == "none" else state.weights // setup.world_size)
    return masters + state.states


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
    """Returns what a rank holds between two steps, with the gradients as they are before the update."""
    if shard == "none":
        numel = sum(shape.numel for shape in param_shapes(model))
        state_numel = sum(_state_numel(optimizer, shape, shape.shape[0]) for shape in param_shapes(model))
        return StateBytes(FP32 * numel, FP32 * numel, masters=0, states=FP32 * state_numel, communication=0)
    plan = layout(model, world_size, optimizer)
    width = FP32 if precision == "fp32" else NARROW
    grad_width = NARROW if precision == "bf16" and grad_accum_steps == 1 and world_size > 1 else FP32
    owned = [(share.param, share.hi - share.lo) for bucket in plan.buckets for share in bucket.shares(rank)]
    owned_numel = sum(rows * row_size(param) for param, rows in owned)
    small = sum(shape.numel for shape in plan.replicated)
    with_states = owned + [(shape, shape.shape[0]) for shape in plan.replicated]
    return StateBytes(
        weights=width * sum(bucket.segment for bucket in plan.buckets) * world_size + FP32 * small,
        gradients=sum(_gradient_bytes(bucket, world_size, grad_width) for bucket in plan.buckets) + FP32 * small,
        masters=0 if precision == "fp32" else FP32 * owned_numel,
        states=FP32 * sum(_state_numel(optimizer, param, rows) for param, rows in with_states),
        communication=sum(_received_bytes(bucket, world_size, grad_width, device) for bucket in plan.buckets),
    )


def checkpoint_bytes(model: ModelConfig, *, optimizer: str) -> int:
    """Returns the size of a checkpoint: fp32 weights and states of all ranks; headers and generators add some kilobytes."""
    shapes = param_shapes(model)
    return FP32 * sum(shape.numel + _state_numel(optimizer, shape, shape.shape[0]) for shape in shapes)


def _gradient_bytes(bucket: Bucket, world_size: int, width: int) -> int:
    """Returns the gradients of a bucket: one rank keeps what autograd made, several have a flat buffer."""
    if world_size == 1:
        return FP32 * sum(placement.param.numel for placement in bucket.placements)
    return width * bucket.segment * world_size


def _received_bytes(bucket: Bucket, world_size: int, width: int, device: str) -> int:
    if world_size == 1:
        return 0
    received = 1 if device == "cuda" else world_size - 1  # segments
    return width * bucket.segment * received + (FP32 * bucket.segment if width != FP32 else 0)


def _state_numel(optimizer: str, param: ParamShape, rows: int) -> int:
    """Returns the elements of the states of some rows."""
    return algorithm_of(optimizer, param.group).state_numel((rows, *param.shape[1:]))
