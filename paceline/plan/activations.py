"""
Bytes that live within a micro-step: what forward saves for backward, and what exists only while an op runs. Pure arithmetic.

Eager: read off the code. model/gpt.py, layers.py and loss.py show what each op saves; tests/train/test_exact.py holds the sums
against a trace of the model's own ops.

Compiled, where it differs: what forward saves is read off the graphs that AOT autograd's min-cut partitioner makes of the model on
meta tensors with a GPU's flash kernel; what works besides it is read off inductor's own schedule on a CPU, its allocations as the
profiler counts them. tests/train/test_compiled_memory.py does both again. A GPU's schedule was not seen and may fuse otherwise:
what is saved is within 1 % of the graphs, a phase within 5 % of such runs and, by judgement, 15 % of a GPU's; with activation
checkpointing, where most is work and inductor's order moves with sizes, 10 % and 20 %. Both forms of a compiled model were seen so:
one graph, and a graph for each layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from paceline.plan.cost import RunSetup, attention_pairs
from paceline.plan.shapes import (
    FP32,
    INT64,
    has_value_embed,
    layer_weights,
    smear_gate_width,
    value_table,
    ve_gate_width,
    window_sizes,
)
from paceline.plan.sharding import GatheredBytes, compiles_by_block

LOSS_COPIES = 3  # fp32 tensors as large as a block's logits that model/layers.py holds at once
BLOCK_SHARE = 4  # of a chunk's budget: what one block's fp32 copies may take
CPU_CHUNK_BYTES = 16 << 20  # larger is not faster, and glibc hands larger tensors out as fresh pages, each a fault
CPU_BLOCK_BYTES = 2 << 20  # a block's logits stay in the L2 cache from op to op
# up to here a CPU's probabilities are kept for backward; beyond they would outweigh all other activations
CPU_KEEP_TOKENS = 512

# of a compiled layer, in tensors as large as the residual stream
RUNNING = 7  # of a layer that saves nothing: x, its norm, the MLP's inner 4 in place, the sum
SQUARE_GRADIENT = 4  # of a layer that runs a second time within one graph
MADE_AGAIN: dict[bool | str, int] = {False: 0, "relu": 4, "mlp": 8, True: 0}  # of an MLP, besides whole layers
POSTPONED = 8  # the square and its gradient of a layer above, until inductor makes the weights' gradients of them


@dataclass(frozen=True, kw_only=True)
class MemorySetup(RunSetup):
    """All that the memory of one rank depends on.

    attention: the kernel: flash (FlexAttention saves the same), efficient, math, or cpu (model/layers.py).
    """

    attention: str
    compiled: bool

    @cached_property
    def one_graph(self) -> bool:
        """Whether the whole model is compiled as one graph; otherwise a compiled model is one graph for each layer."""
        return self.compiled and not compiles_by_block(world_size=self.world_size, shard=self.shard)

    @cached_property
    def casts_weights(self) -> bool:
        """Replicated weights stay fp32 and are cast where they are used; backward keeps the copies."""
        return self.shard == "none" and self.element_bytes != FP32

    @cached_property
    def stream_bytes(self) -> int:
        """The residual stream once: (B, T, C)."""
        return self.num_tokens * self.model.n_embd * self.element_bytes

    @cached_property
    def query_bytes(self) -> int:
        return self.num_tokens * self.model.n_head * self.model.head_dim * self.element_bytes

    @cached_property
    def value_bytes(self) -> int:
        """Keys, or values, or a value embedding: (B, T, K, D)."""
        return self.num_tokens * self.model.n_kv_head * self.model.head_dim * self.element_bytes

    @cached_property
    def whole_layers(self) -> tuple[int, ...]:
        """layer_bytes of each layer, computed once for those of one kind."""
        kinds = [
            (layer > 0, has_value_embed(layer, self.model.n_layer), window)
            for layer, window in enumerate(window_sizes(self.model))
        ]
        sizes = {kind: layer_bytes(self, kinds.index(kind)) for kind in set(kinds)}
        return tuple(sizes[kind] for kind in kinds)


def stem_bytes(setup: MemorySetup, *, compiled: bool) -> int:
    """Returns tokens and targets; the normed embedding and its scale, its smeared sum, the smear gate; cos and sin.

    A compiled model computes cosines again. A copy of the smear gate's input is saved, but not by an eager model of one row.
    """
    model, num_tokens, element = setup.model, setup.num_tokens, setup.element_bytes
    angles, scalars = (1, 2) if compiled else (2, 3)
    scalars += smear_gate_width(model) if compiled or setup.device_batch_size > 1 else 0
    rotary = angles * model.sequence_len * model.head_dim * element
    return 2 * INT64 * num_tokens + rotary + 2 * setup.stream_bytes + scalars * num_tokens * element


def saved_bytes(setup: MemorySetup, layer: int) -> int:
    """Returns what one layer saves for its backward: all, without the MLP's square, without the MLP, or only its input."""
    if setup.activation_checkpointing is True:
        return setup.stream_bytes if layer else 0
    cast = setup.element_bytes * setup.model.n_embd**2 if setup.casts_weights else 0
    return setup.whole_layers[layer] - MADE_AGAIN[setup.activation_checkpointing] * (setup.stream_bytes + cast)


def layer_bytes(setup: MemorySetup, layer: int) -> int:
    """Returns what one layer saves for its backward without activation checkpointing, its input included.

    A compiled layer saves the MLP before its ReLU instead of after, and of a value embedding's gate only the sigmoid's input.
    """
    model, num_tokens, element = setup.model, setup.num_tokens, setup.element_bytes
    stream, query, value = setup.stream_bytes, setup.query_bytes, setup.value_bytes
    norms = 2 * stream + 2 * num_tokens * element
    qk_norms = query + value + num_tokens * (model.n_head + model.n_kv_head) * element
    mlp = 2 * 4 * stream  # positive part and its square
    saved = (stream if layer else 0) + norms + qk_norms + mlp  # the first layer's input is the stem's
    saved += _attention_bytes(setup, layer)
    if has_value_embed(layer, model.n_layer):
        gate = model.n_kv_head if setup.compiled else 2 * model.n_kv_head + ve_gate_width(model)
        saved += value + num_tokens * gate * element
    if setup.casts_weights:
        saved += element * layer_weights(model)
    return saved


def _attention_bytes(setup: MemorySetup, layer: int) -> int:
    """Returns v, the output, and what the kernel saves besides them; q and k are counted with the norm.

    On a CPU a compiled layer saves all probabilities, however long the rows, and q, k, v also as the batched matmuls read them.
    """
    model, num_tokens = setup.model, setup.num_tokens
    saved = setup.value_bytes + setup.query_bytes
    if setup.attention == "cpu":
        if model.n_head > model.n_kv_head:
            saved += 2 * setup.query_bytes - setup.value_bytes  # k and v repeated for every head
        elif setup.compiled and setup.device_batch_size > 1:
            saved += 2 * setup.query_bytes
        if setup.compiled or model.sequence_len <= CPU_KEEP_TOKENS:
            pairs = attention_pairs(model.sequence_len, window_sizes(model)[layer], device="cpu")
            saved += setup.device_batch_size * model.n_head * pairs * setup.element_bytes
        return saved
    if setup.attention == "math":
        return setup.query_bytes + _widened_bytes(setup) + score_bytes(setup)
    # a window's mask, which PyTorch makes of True and False; a flash kernel needs none
    masked = setup.attention == "efficient" and window_sizes(model)[layer] < model.sequence_len
    saved += setup.element_bytes * model.sequence_len**2 if masked else 0
    return saved + FP32 * num_tokens * model.n_head  # the log of each row's sum


def _widened_bytes(setup: MemorySetup) -> int:
    """Returns q, k and v for every head in fp32, as the math kernel makes them."""
    return 3 * FP32 * setup.num_tokens * setup.model.n_head * setup.model.head_dim


def score_bytes(setup: MemorySetup) -> int:
    """Returns a layer's scores, all at once and in fp32 whatever the inputs are: the math kernel makes them several times."""
    return FP32 * setup.device_batch_size * setup.model.n_head * setup.model.sequence_len**2


def head_bytes(setup: MemorySetup) -> int:
    """Returns the final norm's output and scale, and the middle of the stream where no later layer saves it as its input."""
    middle_is_last = setup.model.n_layer // 2 == setup.model.n_layer - 1
    return (2 if middle_is_last else 1) * setup.stream_bytes + setup.num_tokens * setup.element_bytes


def chunk_sizes(setup: RunSetup) -> tuple[int, int]:
    """Returns loss_chunks of a setup."""
    return loss_chunks(
        setup.num_tokens,
        vocab=setup.model.padded_vocab_size,
        element_bytes=setup.element_bytes,
        budget_bytes=setup.logits_budget_bytes,
        device=setup.device,
        in_place=setup.device != "cpu",
    )


def loss_chunks(
    num_tokens: int, *, vocab: int, element_bytes: int, budget_bytes: int, device: str, in_place: bool
) -> tuple[int, int]:
    """Returns the tokens whose logits exist at once, and those of them whose fp32 copies do.

    in_place: one kernel of a GPU writes the gradient over the logits, without copies, Triton's or inductor's. A plan assumes it;
    an eager model without Triton takes an eighth of the budget less.
    """
    if in_place and device != "cpu":
        chunk = min(num_tokens, max(1, budget_bytes // (vocab * element_bytes)))
        return chunk, chunk
    chunk_bytes, block_bytes = budget_bytes // 2, budget_bytes // 2 // BLOCK_SHARE
    if device == "cpu":
        chunk_bytes, block_bytes = min(chunk_bytes, CPU_CHUNK_BYTES), min(block_bytes, CPU_BLOCK_BYTES)
    chunk = min(num_tokens, max(1, chunk_bytes // (vocab * element_bytes)))
    return chunk, min(chunk, max(1, block_bytes // (vocab * FP32)))


def loss_bytes(setup: MemorySetup, *, with_grad: bool = True) -> tuple[int, int]:
    """Returns what the loss saves until backward (gradients by its inputs), and what its logits and their copies take meanwhile.

    Without gradients: what the loss of an evaluation needs.
    """
    vocab, element = setup.model.padded_vocab_size, setup.element_bytes
    chunk, block = chunk_sizes(setup)
    logits = chunk * vocab * element
    if setup.device != "cpu":
        copies = 0  # the gradient is written in the logits' place
    elif setup.compiled:
        # with_grad: the gradient, before it takes the logits' place
        copies = (FP32 + element * with_grad) * block * vocab
    else:
        copies = LOSS_COPIES * block * vocab * FP32
    cast = vocab * setup.model.n_embd * element if setup.casts_weights else 0
    if not with_grad:
        return 0, logits + copies + cast
    weight = vocab * setup.model.n_embd
    gradient = FP32 * weight  # by lm_head's weight, summed over chunks in fp32
    # one chunk's, before it is added; a GPU adds it in fp32 as it is made
    product = element * weight if element != FP32 and setup.device == "cpu" else 0
    if chunk < setup.num_tokens:
        widened = FP32 * weight if product else 0  # a CPU copies what it adds to fp32
        working = max(copies, product + widened)
    else:
        working = max(copies - gradient, product)
    return setup.stream_bytes + gradient, logits + max(0, working) + cast


def running_layer_bytes(setup: MemorySetup) -> int:
    """Returns a layer that saves nothing: three of the stream, the MLP before and after its ReLU, a value embedding."""
    if setup.attention == "math":
        scores = 3 * score_bytes(setup) + 2 * setup.stream_bytes + _widened_bytes(setup)
        return max((3 + 3 * 4) * setup.stream_bytes, scores) + setup.value_bytes
    return RUNNING * setup.stream_bytes if setup.compiled else (3 + 3 * 4) * setup.stream_bytes + setup.value_bytes


def forward_extra_bytes(setup: MemorySetup) -> int:
    """Returns what a layer needs besides what it saves: the stream after attention, the MLP before its ReLU.

    In 16 bits the mix of the last layer with the middle needs more: both and their sum in fp32, in 16 bits, and the layer's output.
    Compiled, the mixed stream alone: pointwise ops write in their input's place. An MLP that is not saved is there while it runs.
    """
    if setup.activation_checkpointing is True:
        return running_layer_bytes(setup)
    extra = MADE_AGAIN[setup.activation_checkpointing]
    if setup.compiled and setup.attention != "math":
        return (1 + min(4, extra)) * setup.stream_bytes
    streams = max(1 + 4 + extra, 0 if setup.element_bytes == FP32 else 3 * 2 + 1 + 1)
    return max(streams * setup.stream_bytes, _scores_over_mlp(setup) + extra * setup.stream_bytes)


def _scores_over_mlp(setup: MemorySetup) -> int:
    """Returns the math kernel's three copies of the scores, without the saved one and the MLP, which does not exist yet."""
    if setup.attention != "math":
        return 0
    return 2 * score_bytes(setup) - (1 + 2 * 4) * setup.stream_bytes


def backward_parts(
    setup: MemorySetup, saved: list[int], *, before: int, added: int, gathered: Sequence[GatheredBytes]
) -> dict[str, int]:
    """Returns the parts of the fullest moment: the start of a layer's backward, or where an embedding's gradient is made.

    saved: saved_bytes of each layer. before: bytes of the gradients that earlier micro-steps left. added: what an element of a new
    gradient adds to them; negative where it is freed for DDP's buckets. One compiled graph returns all gradients at its end, in the
    weights' dtype; autograd then assigns them. A graph for each layer does so with the layer's. gathered: what else is there in the
    backward of the stem, each layer, the head.
    """
    model, stem, compiled = setup.model, stem_bytes(setup, compiled=setup.compiled), setup.one_graph
    width = _width(setup) if compiled else added
    table = model.padded_vocab_size * model.n_embd
    gradients = before + added * table  # the loss has made lm_head's
    held = list(accumulate(saved, initial=stem))  # by the layers below each, and by all
    fullest: dict[str, int] = {}
    most = -1

    def add(activations: int, working: int, extra: dict[str, int]) -> None:
        nonlocal fullest, most
        total = gradients + activations + working + sum(extra.values())
        if total > most:
            fullest = {"gradients": gradients, "activations": activations, "working": working, **extra}
            most = total

    if gathered[-1].tables:  # lm_head's gradient beside the buffer that it goes to
        handed = loss_bytes(setup)[0] + setup.sent_bytes * table + gathered[-1].tables
        add(held[-1] + head_bytes(setup), handed, gathered[-1].parts())
    for layer in reversed(range(model.n_layer)):
        extra = gathered[layer + 1]
        working = _layer_backward_bytes(setup, layer, saved[layer], buffer=extra.matrices)
        add(held[layer + 1], working, extra.parts())
        if setup.compiled and not compiled:
            working = (_streams(setup, layer) + 1) * setup.stream_bytes + _layer_gradient_bytes(setup)
            add(held[layer], working, extra.parts(matrices=extra.matrices))
        gradients += width * layer_weights(model)
        if has_value_embed(layer, model.n_layer):
            working = (_streams(setup, layer - 1) if compiled else 3) * setup.stream_bytes
            working += _embedding_bytes(setup, setup.value_bytes, value_table(model), buffer=extra.tables)
            add(held[layer], working, extra.parts(matrices=extra.matrices))
            gradients += width * value_table(model)
    working = _embedding_bytes(setup, setup.stream_bytes, table, buffer=gathered[0].tables)
    add(0 if compiled else stem, working, gathered[0].parts())
    if compiled:
        handed = _handed_over_bytes(setup) if added > 0 and width != FP32 else 0
        gradients += width * table
        add(2 * INT64 * setup.num_tokens, handed, {})
    return fullest


def _width(setup: MemorySetup) -> int:
    """Returns the bytes of a weight, and so of its gradient; replicated weights are fp32."""
    return FP32 if setup.shard == "none" else setup.element_bytes


def _streams(setup: MemorySetup, layer: int) -> int:
    """Returns how many gradients as wide as the stream exist when layer's backward begins.

    They are its output's; the part of x0's gradient of every layer above, which one graph sums at its very end; and until the
    middle the loss's gradient and the normed output, which the middle's gradient is computed from.
    """
    n_layer = setup.model.n_layer
    shares = 0 if setup.activation_checkpointing is True else n_layer - 1 - layer
    shares = shares if setup.one_graph else min(1, shares)
    return 1 + shares + (2 if layer >= n_layer // 2 else 0)


def _layer_backward_bytes(setup: MemorySetup, layer: int, saved: int, *, buffer: int) -> int:
    """Returns what the start of a layer's backward needs besides what the layers saved.

    Those are gradients of its output, of x0, of the middle, of the MLP's square and second matrix. A checkpointed layer runs again
    first: it then holds all that it would have saved, and may be fuller at the end. buffer: for the matrices' gradients, made for
    that of the MLP's second matrix when the square is freed.
    """
    n_layer, stream = setup.model.n_layer, setup.stream_bytes
    weight = setup.element_bytes * 4 * setup.model.n_embd**2
    second = setup.whole_layers[layer] - saved
    if setup.compiled:
        twice = setup.activation_checkpointing and setup.one_graph
        extra = SQUARE_GRADIENT + (POSTPONED if layer < n_layer - 1 else 0) if twice else 0
        return (_streams(setup, layer) + extra) * stream + weight + second
    streams = 1 + (layer < n_layer - 1) + (n_layer // 2 < layer)
    second += 4 * stream if setup.activation_checkpointing == "relu" else 0  # its input, beside its positive part
    second_forward = 5 * stream if setup.activation_checkpointing is True else 0  # x, and the MLP before its ReLU
    cast = FP32 * 4 * setup.model.n_embd**2 if buffer and setup.sent_bytes != _width(setup) else 0
    handed = buffer and buffer + max(weight + cast, 4 * stream)  # or the gradients before and behind the ReLU
    scores = _scores_over_mlp(setup) + weight + buffer
    return streams * stream + second + max(second_forward, 4 * stream + weight, handed, scores)


def _embedding_bytes(setup: MemorySetup, rows_bytes: int, table: int, *, buffer: int) -> int:
    """Returns one table's gradient: by its rows, in fp32 too, then the table's in fp32, then beside it in the dtype that is left.

    buffer: that it is copied to in the end, where it does not lie yet.
    """
    widened = 0 if setup.element_bytes == FP32 else rows_bytes * FP32 // setup.element_bytes
    width = _width(setup) if setup.one_graph else setup.sent_bytes
    made = FP32 * table + max(rows_bytes + widened, width * table if width != FP32 else 0)
    return max(made, setup.sent_bytes * table + buffer) if buffer else made


def _layer_gradient_bytes(setup: MemorySetup) -> int:
    """Returns the gradients that a layer's graph makes, one of them also where the buffer that it goes to has another dtype."""
    # each is freed once its fp32 copy is made
    return setup.sent_bytes * layer_weights(setup.model) + _width(setup) * 4 * setup.model.n_embd**2


def _handed_over_bytes(setup: MemorySetup) -> int:
    """Returns the most that fp32 copies add to narrow gradients while autograd makes them one by one, in the order of forward."""
    model, width = setup.model, _width(setup)
    numels = [model.padded_vocab_size * model.n_embd]
    for layer in range(model.n_layer):
        numels += [value_table(model)] if has_value_embed(layer, model.n_layer) else []
        mlp = 4 * model.n_embd**2
        numels += [layer_weights(model) - 2 * mlp, mlp, mlp]
    copied = fullest = 0
    for numel in numels:
        fullest = max(fullest, copied + FP32 * numel)
        copied += (FP32 - width) * numel
    return fullest
