"""
Bytes that come and go within a micro-step: what forward keeps for backward, and what lives only while an op runs.

Read off the code: model/gpt.py, pointwise.py, loss.py, cpu_attention.py say what each op keeps. Pure arithmetic, no torch; the
sums are held against a trace of the model's own ops in tests/train/test_exact.py.
"""

from dataclasses import dataclass

from paceline.config import ModelConfig
from paceline.plan.cost import window_sizes
from paceline.plan.shapes import has_value_embed

FP32, INT64 = 4, 8
ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}

LOSS_COPIES = 3  # fp32 tensors of a block's logits that model/loss.py holds at once
BLOCK_SHARE = 4  # of a chunk's budget that one block's fp32 copies may take: model/loss.py's FP32_COPIES
CPU_CHUNK_BYTES, CPU_BLOCK_BYTES = 16 << 20, 2 << 20  # model/loss.py: what stays in a CPU's cache
CPU_ATTENTION_BLOCK, CPU_KEEP_TOKENS = 128, 512  # model/cpu_attention.py


@dataclass(frozen=True)
class MemorySetup:
    """All that the memory of one rank depends on.

    attention: the kernel: flash (FlexAttention keeps the same), efficient, math, or cpu (model/cpu_attention.py).
    """

    model: ModelConfig
    device: str
    world_size: int
    optimizer: str
    shard: str
    precision: str
    device_batch_size: int
    grad_accum_steps: int
    logits_budget_bytes: int
    activation_checkpointing: bool
    attention: str
    compiled: bool

    @property
    def num_tokens(self) -> int:
        """Of one micro-step on one device."""
        return self.device_batch_size * self.model.sequence_len

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.precision]

    @property
    def casts_weights(self) -> bool:
        """Replicated weights stay fp32 and are cast where they are used; backward keeps the copies."""
        return self.shard == "none" and self.element_bytes != FP32

    @property
    def stream_bytes(self) -> int:
        """The residual stream once: (B, T, C)."""
        return self.num_tokens * self.model.n_embd * self.element_bytes

    @property
    def query_bytes(self) -> int:
        return self.num_tokens * self.model.n_head * self.model.head_dim * self.element_bytes

    @property
    def value_bytes(self) -> int:
        """Keys, or values, or a value embedding: (B, T, K, D)."""
        return self.num_tokens * self.model.n_kv_head * self.model.head_dim * self.element_bytes


def stem_bytes(setup: MemorySetup) -> int:
    """Tokens and targets; the normed embedding and its scale, its smeared sum, the smear gate; cos and sin."""
    model, num_tokens, element = setup.model, setup.num_tokens, setup.element_bytes
    tokens = 2 * INT64 * num_tokens
    rotary = 2 * model.sequence_len * model.head_dim * element
    return tokens + rotary + 2 * setup.stream_bytes + 3 * num_tokens * element


def layer_bytes(setup: MemorySetup, layer: int) -> int:
    """What one layer keeps for its backward: all that its ops save, its input among it."""
    model, num_tokens, element = setup.model, setup.num_tokens, setup.element_bytes
    stream, query, value = setup.stream_bytes, setup.query_bytes, setup.value_bytes
    norms = 2 * stream + 2 * num_tokens * element
    qk_norms = query + value + num_tokens * (model.n_head + model.n_kv_head) * element
    mlp = 2 * 4 * stream  # positive part and its square
    kept = (stream if layer else 0) + norms + qk_norms + mlp  # the first layer's input is the stem's
    kept += _attention_bytes(setup, layer)
    if has_value_embed(layer, model.n_layer):
        gate_input = min(12, model.n_embd)
        kept += value + num_tokens * (2 * model.n_kv_head + gate_input) * element
    if setup.casts_weights:
        kept += element * layer_weights(model)
    return kept


def layer_weights(model: ModelConfig) -> int:
    """Elements of a layer's matrices."""
    q_width, kv_width = model.n_head * model.head_dim, model.n_kv_head * model.head_dim
    return model.n_embd * (2 * q_width + 2 * kv_width + 8 * model.n_embd)


def _attention_bytes(setup: MemorySetup, layer: int) -> int:
    """v, the output, and what the kernel keeps beside them; q and k are the norm's."""
    model, num_tokens = setup.model, setup.num_tokens
    kept = setup.value_bytes + setup.query_bytes
    if setup.attention == "cpu":
        if model.n_head > model.n_kv_head:
            kept += 2 * setup.query_bytes - setup.value_bytes  # k and v repeated for every head
        if model.sequence_len <= CPU_KEEP_TOKENS:
            rows = setup.device_batch_size * model.n_head
            kept += rows * block_scores(model, layer) * setup.element_bytes
        return kept
    if setup.attention == "math":
        return setup.query_bytes + _widened_bytes(setup) + score_bytes(setup)
    return kept + FP32 * num_tokens * model.n_head  # the log of each row's sum


def _widened_bytes(setup: MemorySetup) -> int:
    """q, k and v for every head, in fp32: what the math kernel makes of them."""
    return 3 * FP32 * setup.num_tokens * setup.model.n_head * setup.model.head_dim


def score_bytes(setup: MemorySetup) -> int:
    """Scores of a layer, all at once and in fp32 whatever the inputs are: what the math kernel makes, several times over."""
    return FP32 * setup.device_batch_size * setup.model.n_head * setup.model.sequence_len**2


def block_scores(model: ModelConfig, layer: int) -> int:
    """Probabilities of one head and row: blocks of queries, each with the keys that any of them sees."""
    window, total = window_sizes(model)[layer], 0
    for start in range(0, model.sequence_len, CPU_ATTENTION_BLOCK):
        end = min(start + CPU_ATTENTION_BLOCK, model.sequence_len)
        total += (end - start) * (end - max(0, start - window + 1))
    return total


def checkpointed_layer_bytes(setup: MemorySetup, layer: int) -> int:
    """With activation checkpointing a layer keeps its input alone."""
    return setup.stream_bytes if layer else 0


def head_bytes(setup: MemorySetup) -> int:
    """The final norm's output and scale; and the middle of the stream, where no layer after it keeps it as its input."""
    middle_is_last = setup.model.n_layer // 2 == setup.model.n_layer - 1
    return (2 if middle_is_last else 1) * setup.stream_bytes + setup.num_tokens * setup.element_bytes


@dataclass(frozen=True)
class LossBytes:
    """kept: to backward, gradients of the loss by its inputs. working: logits and their copies while they are computed."""

    kept: int
    working: int


def chunk_sizes(setup: MemorySetup) -> tuple[int, int]:
    """Tokens whose logits exist at once, and tokens whose fp32 copies do: as model/loss.py's chunk_rows."""
    vocab, element, budget = setup.model.padded_vocab_size, setup.element_bytes, setup.logits_budget_bytes
    if setup.compiled and setup.device != "cpu":
        chunk = min(setup.num_tokens, max(1, budget // (vocab * element)))
        return chunk, chunk
    chunk_bytes, block_bytes = budget // 2, budget // 2 // BLOCK_SHARE
    if setup.device == "cpu":
        chunk_bytes, block_bytes = min(chunk_bytes, CPU_CHUNK_BYTES), min(block_bytes, CPU_BLOCK_BYTES)
    chunk = min(setup.num_tokens, max(1, chunk_bytes // (vocab * element)))
    return chunk, min(chunk, max(1, block_bytes // (vocab * FP32)))


def loss_bytes(setup: MemorySetup, *, with_grad: bool = True) -> LossBytes:
    vocab, element = setup.model.padded_vocab_size, setup.element_bytes
    chunk, block = chunk_sizes(setup)
    logits = chunk * vocab * element
    if setup.compiled:
        widened = FP32 if setup.device == "cpu" else 0
        copies = (
            (widened + element * with_grad) * block * vocab
        )  # with_grad: the gradient, before it takes the logits' place
    else:
        copies = LOSS_COPIES * block * vocab * FP32
    cast = vocab * setup.model.n_embd * element if setup.casts_weights else 0
    if not with_grad:
        return LossBytes(kept=0, working=logits + copies + cast)
    weight = vocab * setup.model.n_embd
    gradient = FP32 * weight  # by lm_head's weight, summed over chunks in fp32
    product = element * weight if element != FP32 else 0  # one chunk's, before it is added
    if chunk < setup.num_tokens:
        widened = FP32 * weight if product and setup.device == "cpu" else 0  # a CPU copies what it adds to fp32
        working = max(copies, product + widened)
    else:
        working = max(copies - gradient, product)
    return LossBytes(kept=setup.stream_bytes + gradient, working=logits + max(0, working) + cast)


def running_layer_bytes(setup: MemorySetup) -> int:
    """A layer that keeps nothing, at its fullest: three of the stream, the MLP before and after its ReLU, a value embedding."""
    mlp, scores = (3 + 3 * 4) * setup.stream_bytes, 0
    if setup.attention == "math":
        scores = 3 * score_bytes(setup) + 2 * setup.stream_bytes + _widened_bytes(setup)
    return max(mlp, scores) + setup.value_bytes


def forward_extra_bytes(setup: MemorySetup) -> int:
    """Beside what a layer keeps, at its fullest: the mixed stream, the stream after attention, the MLP before its ReLU."""
    return max((2 + 4) * setup.stream_bytes, _scores_beside_the_mlp(setup))


def backward_extra_bytes(setup: MemorySetup, layer: int) -> int:
    """Beside what a layer keeps, at its fullest: gradients of its output, of x0, of the middle, and of the MLP's square.

    A checkpointed layer may be fuller at the end of its second forward.
    """
    n_layer, stream = setup.model.n_layer, setup.stream_bytes
    streams = 1 + (layer < n_layer - 1) + (n_layer // 2 < layer)
    weight = setup.element_bytes * 4 * setup.model.n_embd**2  # the gradient of the MLP's second matrix
    again = 6 * stream if setup.activation_checkpointing else 0
    return streams * stream + max(again, 4 * stream + weight, _scores_beside_the_mlp(setup) + weight)


def _scores_beside_the_mlp(setup: MemorySetup) -> int:
    """The math kernel holds three times the scores, one of them kept, while nothing of the MLP is there."""
    if setup.attention != "math":
        return 0
    return 2 * score_bytes(setup) - (1 + 2 * 4) * setup.stream_bytes
