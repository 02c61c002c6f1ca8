"""
Bytes of one rank: what it holds from step to step, the peak of each phase of a step, and the size of a checkpoint.

What a rank holds is exact, from the layout that the worker uses (plan/sharding.py); plan/activations.py adds what lives within a
step. The peak is the largest of the phases. No torch; tests/train/test_exact.py holds both against a trace of the worker's own ops.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from paceline.plan.activations import (
    MemorySetup,
    backward_parts,
    forward_extra_bytes,
    head_bytes,
    loss_bytes,
    running_layer_bytes,
    saved_bytes,
    stem_bytes,
)
from paceline.plan.algorithms import algorithm_of
from paceline.plan.cost import RunSetup
from paceline.plan.offloading import NUM_BUFFERS, copies_in_batch, offloaded_batches, row_batches
from paceline.plan.precision import code_bytes, working_bytes
from paceline.plan.shapes import FP32, MATRIX, NARROW, ParamShape, param_shapes
from paceline.plan.sharding import Bucket, GatheredBytes, gather_schedule, matrix_batches, parts_of, row_size
from paceline.plan.states import decoded_bytes, has_codes, stored_states


@dataclass(frozen=True)
class StateBytes:
    """The bytes that one rank holds from step to step."""

    weights: int  # that the model computes with
    gradients: int
    masters: int  # fp32 copies of the owned weights; none where the model computes in fp32
    states: int
    communication: int  # gradients that other ranks send, on a CPU, and the fp32 sum of narrow ones
    on_host: int = 0  # masters and states that are offloaded: page-locked memory of the host

    @property
    def total(self) -> int:
        """The bytes on the device."""
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


@lru_cache(maxsize=64)
def phases(setup: MemorySetup) -> tuple[Phase, ...]:
    """Returns the phases of the fullest rank, in the order of a step."""
    state = fullest_state(setup)
    base = {"weights": state.weights, "masters": state.masters, "states": state.states}
    if state.communication:
        base["communication"] = state.communication
    low = setup.low_precision
    if not setup.shards_weights:  # else they come and go with the weights
        base["weights"] += code_bytes(low, setup.model, device=setup.device)
    quantized = working_bytes(low, setup.model, tokens=setup.num_tokens, device=setup.device, compiled=setup.compiled)
    fresh = setup.world_size == 1 and setup.grad_accum_steps == 1  # gradients are made during the backward
    unsummed = setup.shard == "none" and setup.world_size > 1 and setup.grad_accum_steps > 1
    before = 0 if fresh else state.gradients * (2 if unsummed else 1)  # DDP's buckets, and what is not in them yet
    added = FP32 if fresh else -FP32 if unsummed and not setup.compiled else 0
    saved = [saved_bytes(setup, layer) for layer in range(setup.model.n_layer)]
    activations = stem_bytes(setup, compiled=setup.compiled) + sum(saved)
    staging = staging_bytes(setup)
    updating = {"working": _update_bytes(setup.of_states), **({"staging": staging} if staging else {})}
    num_layers, gathered = setup.model.n_layer, gathered_bytes(setup)
    forward, loss = gathered[num_layers].parts(), gathered[num_layers + 1].parts()
    in_backward = [gathered[-2 - part] for part in range(num_layers + 2)]
    backward = backward_parts(setup, saved, before=before, added=added, gathered=in_backward)
    moments = {
        "forward": {
            "gradients": before,
            "activations": activations,
            "working": forward_extra_bytes(setup) + quantized,
            **forward,
        },
        "loss": {
            "gradients": before,
            "activations": activations + head_bytes(setup),
            "loss": sum(loss_bytes(setup)),
            **loss,
        },
        "backward": backward | {"working": backward["working"] + quantized},
        "optimizer": {"gradients": state.gradients, **updating},
        "evaluation": {"gradients": state.gradients, "activations": 0, **_evaluation_parts(setup)},
    }
    return tuple(Phase(name, base | parts) for name, parts in moments.items())


def _evaluation_parts(setup: MemorySetup) -> dict[str, int]:
    """Returns what an evaluation needs: tokens, the stream, its copies at the start and in the middle, one layer or the logits."""
    stream = setup.stream_bytes
    tokens = stem_bytes(setup, compiled=False) - stream
    gathered = gathered_bytes(setup, backward=False)
    layers = max(gathered[1:-2], key=lambda extra: extra.weights)
    moments = (
        {"working": tokens + 2 * stream + running_layer_bytes(setup), **layers.parts()},
        {"working": tokens + sum(loss_bytes(setup, with_grad=False)), **gathered[-2].parts()},
    )
    return max(moments, key=lambda parts: sum(parts.values()))


def gathered_bytes(setup: MemorySetup, *, backward: bool = True) -> tuple[GatheredBytes, ...]:
    """Returns what sharded weights take beyond a rank's own, from each moment of gather_schedule to the next; else nothing.

    Those are gathered weights, and the buffers of gradients from a bucket's first one until its sum over ranks is known.
    """
    return _gathered_bytes(setup.of_states, setup.activation_checkpointing, backward)


@lru_cache(maxsize=256)
def _gathered_bytes(setup: RunSetup, checkpointing: bool | str, backward: bool) -> tuple[GatheredBytes, ...]:
    if not setup.shards_weights:
        return tuple(GatheredBytes() for _ in range(2 * (setup.model.n_layer + 3)))
    shapes = param_shapes(setup.model)
    plan = setup.layout
    schedule = gather_schedule(plan, shapes, checkpointing=checkpointing, backward=backward)
    numels, parts = [bucket.segment for bucket in plan.buckets], parts_of(shapes)
    # received beside this rank's own
    copies = setup.world_size + (setup.world_size - 1 if setup.device == "cpu" else 0)
    grad_bytes = copies * (NARROW if setup.precision == "bf16" else FP32)
    last_parts = [max(parts[placement.param.name] for placement in bucket.placements) for bucket in plan.buckets]

    def total(buckets: set[int]) -> int:
        return sum(numels[number] for number in buckets)

    live, filled, moments = set[int](), set[int](), []
    for at, moment in enumerate(schedule):
        live = (live | set(moment.gather)) - set(moment.free)
        filled -= set(schedule[at - 1].complete)  # whose sums end here
        in_backward = backward and at > setup.model.n_layer + 2
        part = len(schedule) - 2 - at  # of the backward from here on
        first = {number for number, last in enumerate(last_parts) if in_backward and part == last}
        matrices = {number for number in first if plan.buckets[number].placements[0].param.group == MATRIX}
        sizes = (grad_bytes * total(buckets) for buckets in (filled, matrices, first - matrices))
        moments.append(GatheredBytes(setup.element_bytes * setup.world_size * total(live), *sizes))
        filled |= first
    return tuple(moments)


def staging_bytes(setup: MemorySetup) -> int:
    """Returns the buffers through which masters and states pass during an update; 0 where none are offloaded."""
    batches = offloaded_batches(setup)
    return min(NUM_BUFFERS, len(batches)) * max((batch.buffer_bytes for batch in batches), default=0)


@lru_cache(maxsize=256)
def _update_bytes(setup: RunSetup) -> int:
    """Returns the temporaries of the largest batch of the update: of whole matrices, or of states that are decoded."""
    on_cpu = setup.device == "cpu"
    moves_masters = setup.offload == "optimizer" and setup.precision != "fp32"  # their buffer is a stack already
    if setup.shard == "none":
        buckets = [([(shape, shape.shape) for shape in param_shapes(setup.model)], False)]
    else:
        buckets = [_owned_shapes(bucket) for bucket in setup.layout.buckets]
    largest = 0
    for members, whole in buckets:
        if not members:
            continue
        algorithm = algorithm_of(setup.optimizer, members[0][0].group, optimizer_states=setup.optimizer_states)
        shapes = [shape for _, shape in members]
        if not whole:
            copies = copies_in_batch(algorithm, masters=moves_masters)
            for batch in row_batches(shapes, num_copies=copies) if algorithm.codes else ():
                numels = [(rows.hi - rows.lo) * prod(shapes[rows.number][1:]) for rows in batch]
                largest = max(largest, decoded_bytes(algorithm, numel=sum(numels), largest=max(numels)))
            continue
        for matrices in matrix_batches(shapes, together=not on_cpu):
            shape, count = shapes[matrices.start], len(matrices)
            numel = FP32 * count * prod(shape)
            working = algorithm.working_bytes(shape, count, FP32 if on_cpu else NARROW)
            working -= numel if moves_masters and count > 1 else 0
            # the momentum in fp32; encoding it takes no more than the update itself
            working += numel if has_codes(algorithm, shape) else 0
            largest = max(largest, working)
    return largest


def _owned_shapes(bucket: Bucket) -> tuple[list[tuple[ParamShape, tuple[int, ...]]], bool]:
    """Returns what the first rank owns of a bucket, each with the shape of its rows; and whether that is whole matrices."""
    shares = bucket.shares(0)
    return [(share.param, (share.hi - share.lo, *share.param.shape[1:])) for share in shares], bucket.whole


def fullest_state(setup: RunSetup) -> StateBytes:
    """Returns the state of the rank that holds most."""
    return _fullest_state(setup.of_states)


@lru_cache(maxsize=256)
def _fullest_state(setup: RunSetup) -> StateBytes:
    ranks = range(setup.world_size if setup.shard != "none" else 1)
    return max((state_bytes(setup, rank=rank) for rank in ranks), key=lambda state: state.total)


def copies_bytes(setup: RunSetup) -> int:
    """Returns the fullest rank's part of a checkpoint, fp32 weights and states: it stays in host memory from the first save on.

    It is there beside what is offloaded: the next step changes that while the checkpoint is written.
    """
    state = fullest_state(replace(setup, offload="none"))
    masters = state.masters or (state.weights if setup.shard == "none" else state.weights // setup.world_size)
    return masters + state.states


def state_bytes(setup: RunSetup, *, rank: int) -> StateBytes:
    """Returns what a rank holds between two steps, with the gradients as they are before the update."""

    def states_of(owned: Iterable[tuple[ParamShape, int]]) -> int:
        return sum(_bytes_of_states(setup, param, rows) for param, rows in owned)

    if setup.shard == "none":
        numel = sum(shape.numel for shape in param_shapes(setup.model))
        states = states_of((shape, shape.shape[0]) for shape in param_shapes(setup.model))
        return StateBytes(FP32 * numel, FP32 * numel, masters=0, states=states, communication=0)
    plan, world_size, sharded = setup.layout, setup.world_size, setup.shards_weights
    width, grad_width = setup.element_bytes, setup.sent_bytes
    segments = sum(bucket.segment for bucket in plan.buckets)
    owned = [(share.param, share.hi - share.lo) for bucket in plan.buckets for share in bucket.shares(rank)]
    owned_numel = sum(rows * row_size(param) for param, rows in owned)
    small = sum(shape.numel for shape in plan.replicated)
    replicated = states_of((shape, shape.shape[0]) for shape in plan.replicated)
    if world_size == 1:  # one rank keeps what autograd made, several have flat buffers
        gradients, communication = FP32 * owned_numel, 0
    elif sharded:  # sums over micro-steps; buffers come and go
        gradients, communication = FP32 * segments, 0
    else:
        received = 0 if setup.device == "cuda" else world_size - 1  # segments; NCCL sums in place
        gradients = grad_width * segments * world_size
        communication = segments * (grad_width * received + (FP32 if grad_width != FP32 else 0))
    masters = FP32 * owned_numel if sharded or setup.precision != "fp32" else 0
    states = states_of(owned) + replicated
    weights, on_host = 0 if sharded else width * segments * world_size, 0
    if setup.offload == "optimizer":
        on_host, states = states - replicated, replicated
        if setup.precision != "fp32":  # a rank that gathers weights keeps its own on the device in their place
            on_host, masters, weights = on_host + masters, 0, weights or width * segments
    return StateBytes(
        weights=weights + FP32 * small,
        gradients=gradients + FP32 * small,
        masters=masters,
        states=states,
        communication=communication,
        on_host=on_host,
    )


def checkpoint_bytes(setup: RunSetup) -> int:
    """Returns the size of a checkpoint: fp32 weights and the states of all ranks; headers and generators add some kilobytes."""
    shapes = param_shapes(setup.model)
    states = sum(_bytes_of_states(setup, shape, shape.shape[0]) for shape in shapes)
    return FP32 * sum(shape.numel for shape in shapes) + states


def _bytes_of_states(setup: RunSetup, param: ParamShape, rows: int) -> int:
    """Returns the bytes of the states of some rows."""
    algorithm = algorithm_of(setup.optimizer, param.group, optimizer_states=setup.optimizer_states)
    return sum(tensor.num_bytes for tensor in stored_states(algorithm, param.shape, rows=rows))
