"""
What plan/activations.py counts, for a compiled model, where it differs from an eager one.

What forward keeps is read off the graphs that AOT autograd's min-cut partitioner makes of the model on meta tensors with a GPU's
flash kernel. What works beside it is read off inductor's own schedule on a CPU, with that kernel's like: its allocations as the
profiler counts them. tests/train/test_compiled_memory.py does both again. A GPU's schedule was not seen and may fuse otherwise:
what is kept is within 1 % of the graphs, a phase within 5 % of such runs and, by judgement, 15 % of a GPU's; with activation
checkpointing, where most is work and inductor's order moves with sizes, 10 % and 20 %.
"""

from paceline.config import ModelConfig
from paceline.plan.activations import (
    CPU_KEEP_TOKENS,
    FP32,
    INT64,
    MemorySetup,
    block_scores,
    forward_extra_bytes,
    layer_bytes,
    layer_weights,
    running_layer_bytes,
)
from paceline.plan.shapes import SMEAR_GATE_CHANNELS, VE_GATE_CHANNELS, has_value_embed

# in streams
RUNNING = 7  # a layer that keeps nothing: x, its norm, the MLP's inner 4 in place, the sum
SQUARE_GRADIENT = 4  # of a layer that runs a second time
PUT_OFF = 8  # the square and its gradient of a layer above, until inductor makes the weights' gradients of them


def compiled_stem_bytes(setup: MemorySetup) -> int:
    """Tokens and targets; sines; the embedding, its scale and its smeared sum; the smear gate and a copy of its input."""
    model, num_tokens, element = setup.model, setup.num_tokens, setup.element_bytes
    gate = 1 + min(SMEAR_GATE_CHANNELS, model.n_embd)
    rotary = model.sequence_len * model.head_dim * element  # cosines are computed again
    return 2 * INT64 * num_tokens + rotary + 2 * setup.stream_bytes + (1 + gate) * num_tokens * element


def compiled_layer_bytes(setup: MemorySetup, layer: int) -> int:
    """As eager, tensor by tensor: the partitioner keeps the MLP before its ReLU where eager keeps it after.

    Of a value embedding's gate it keeps what comes before the sigmoid alone. Of a CPU's attention it keeps all
    probabilities, however long the rows, and q, k, v also as the batched matmuls read them.
    """
    model, element = setup.model, setup.element_bytes
    kept = layer_bytes(setup, layer)
    if has_value_embed(layer, model.n_layer):
        kept -= setup.num_tokens * (model.n_kv_head + min(VE_GATE_CHANNELS, model.n_embd)) * element
    if setup.attention == "cpu":
        if setup.device_batch_size > 1 and model.n_head == model.n_kv_head:
            kept += 2 * setup.query_bytes
        if model.sequence_len > CPU_KEEP_TOKENS:
            kept += setup.device_batch_size * model.n_head * block_scores(model, layer) * element
    return kept


def compiled_forward_extra_bytes(setup: MemorySetup) -> int:
    """The mixed stream: what is pointwise is written in its input's place."""
    if setup.activation_checkpointing:
        return compiled_running_layer_bytes(setup)
    return forward_extra_bytes(setup) if setup.attention == "math" else setup.stream_bytes


def compiled_running_layer_bytes(setup: MemorySetup) -> int:
    return running_layer_bytes(setup) if setup.attention == "math" else RUNNING * setup.stream_bytes


def compiled_backward(setup: MemorySetup, kept: list[int], *, before: int, fresh: bool) -> dict[str, int]:
    """At its fullest. One graph returns all gradients at its end, in the weights' dtype; autograd then hands them over."""
    model, stem = setup.model, compiled_stem_bytes(setup)
    head = FP32 * model.padded_vocab_size * model.n_embd if fresh else 0  # the loss has made it
    gradients = before + head
    found: list[dict[str, int]] = []
    for layer in reversed(range(model.n_layer)):
        working = _layer_backward_bytes(setup, layer, kept[layer])
        found.append({"gradients": gradients, "activations": stem + sum(kept[: layer + 1]), "working": working})
        gradients += _width(setup) * layer_weights(model)
        if has_value_embed(layer, model.n_layer):
            working = _streams(setup, layer - 1) * setup.stream_bytes
            working += _embedding_bytes(setup, setup.value_bytes, _value_table(model))
            found.append({"gradients": gradients, "activations": stem + sum(kept[:layer]), "working": working})
            gradients += _width(setup) * _value_table(model)
    table = model.padded_vocab_size * model.n_embd
    working = _embedding_bytes(setup, setup.stream_bytes, table)
    found.append({"gradients": gradients, "activations": 0, "working": working})
    gradients += _width(setup) * table
    handed = _handed_over_bytes(setup) if fresh and _width(setup) != FP32 else 0
    found.append({"gradients": gradients, "activations": 2 * INT64 * setup.num_tokens, "working": handed})
    return max(found, key=lambda parts: sum(parts.values()))


def _width(setup: MemorySetup) -> int:
    """Bytes of a weight, and so of its gradient; replicated weights are fp32."""
    return FP32 if setup.shard == "none" else setup.element_bytes


def _streams(setup: MemorySetup, layer: int) -> int:
    """Gradients as wide as the stream when layer's backward begins.

    Its output's; of every layer above, its share of x0's gradient, for all are summed at the very end; until the middle
    the loss's gradient and the normed output, of which the middle's gradient is computed.
    """
    n_layer = setup.model.n_layer
    shares = 0 if setup.activation_checkpointing else n_layer - 1 - layer
    return 1 + shares + (2 if layer >= n_layer // 2 else 0)


def _layer_backward_bytes(setup: MemorySetup, layer: int, kept: int) -> int:
    """At its start: the gradient of the MLP's second matrix beside the streams."""
    working = _streams(setup, layer) * setup.stream_bytes + setup.element_bytes * 4 * setup.model.n_embd**2
    if setup.activation_checkpointing:
        beside = SQUARE_GRADIENT + (PUT_OFF if layer < setup.model.n_layer - 1 else 0)
        working += compiled_layer_bytes(setup, layer) - kept + beside * setup.stream_bytes
    return working


def _value_table(model: ModelConfig) -> int:
    return model.padded_vocab_size * model.n_kv_head * model.head_dim


def _embedding_bytes(setup: MemorySetup, rows_bytes: int, table: int) -> int:
    """Of one table: its rows' gradient, in fp32 too, then the table's in fp32, then that in the weight's dtype."""
    if setup.element_bytes == FP32:
        return rows_bytes + FP32 * table
    widened = rows_bytes * FP32 // setup.element_bytes
    return FP32 * table + max(rows_bytes + widened, _width(setup) * table if _width(setup) != FP32 else 0)


def _handed_over_bytes(setup: MemorySetup) -> int:
    """The most that fp32 copies add to narrow gradients while autograd makes them one by one, in the order of forward."""
    model, width = setup.model, _width(setup)
    numels = [model.padded_vocab_size * model.n_embd]
    for layer in range(model.n_layer):
        numels += [_value_table(model)] if has_value_embed(layer, model.n_layer) else []
        mlp = 4 * model.n_embd**2
        numels += [layer_weights(model) - 2 * mlp, mlp, mlp]
    copied = fullest = 0
    for numel in numels:
        fullest = max(fullest, copied + FP32 * numel)
        copied += (FP32 - width) * numel
    return fullest
