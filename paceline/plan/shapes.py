"""
Every parameter's name, shape and group, and what the depth dial makes of them: width, batch size, steps. Pure arithmetic.

The model and the planner both stand on this. Parameters are in the order in which model/gpt.py registers them;
tests/model/test_gpt.py holds the two together. The dial's rules are nanochat's of July 2026 (its base_train.py and dev/LOG.md).

The steps follow from num_steps, epochs, time or tokens_per_param; launch/trial.py measures the seconds of a step for a time. What
is chosen is written to config.toml, so a resumed or repeated run computes nothing of it again.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod

from paceline.config import Config, ModelConfig
from paceline.units import BYTES_PER_TOKEN, format_bytes, format_count

FP32, NARROW, INT64 = 4, 2, 8  # bytes of an element
ELEMENT_BYTES = {"fp32": FP32, "bf16": NARROW, "fp16": NARROW}  # by the config's precision
VE_GATE_CHANNELS = 12  # of the residual stream that open a layer's value embedding
SMEAR_GATE_CHANNELS = 24  # of the embedding that open the mixing with the token before
# of activation checkpointing, what is computed again in backward: nothing, the MLPs' ReLU^2, the MLPs, or whole layers
RUNGS = (False, "relu", "mlp", True)
MATRIX = "matrix"  # the group of the block matrices
HEAD = "lm_head"  # the group of the output matrix
ASPECT = 64  # width per layer
REFERENCE_DEPTH = 12  # the model that learning rates and batch size are tuned on
REFERENCE_BATCH = 2**19  # tokens a step
REFERENCE_WIDTH = 768
BATCH_EXPONENT = 0.383  # optimal tokens a step grow with training tokens to this power
MIN_STEPS = 60  # of a run whose length is a time: with fewer steps the loss hardly falls
EVAL_SHARE = 0.1  # of a run's time, for all its evaluations
EVAL_COST = 0.5  # of evaluating a token, in the time of training on one; the forward alone is a third
MAX_EVAL_TOKENS = 1 << 20
MANY_EPOCHS, GOOD_EPOCHS = 10, 4  # more than four improve the model little: arXiv 2305.16264
SHORT_WINDOW_MULTIPLE = 128


@dataclass(frozen=True)
class ParamShape:
    """A parameter. group: key of the settings in plan/algorithms.py."""

    name: str
    shape: tuple[int, ...]
    group: str

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)


def has_value_embed(layer: int, n_layer: int) -> bool:
    """Returns whether a layer has one: every second layer does, the last one always."""
    return layer % 2 == (n_layer - 1) % 2


def ve_gate_width(model: ModelConfig) -> int:
    """Returns the channels of the stream that open a layer's value embedding."""
    return min(VE_GATE_CHANNELS, model.n_embd)


def smear_gate_width(model: ModelConfig) -> int:
    """Returns the channels of the embedding that open the mixing with the token before."""
    return min(SMEAR_GATE_CHANNELS, model.n_embd)


@lru_cache(maxsize=64)
def param_shapes(model: ModelConfig) -> tuple[ParamShape, ...]:
    """Returns all parameters, in registration order."""
    width, vocab = model.n_embd, model.padded_vocab_size
    kv_width = model.n_kv_head * model.head_dim
    value_layers = [i for i in range(model.n_layer) if has_value_embed(i, model.n_layer)]
    shapes = [
        ParamShape("resid_lambdas", (model.n_layer,), "resid_lambdas"),
        ParamShape("x0_lambdas", (model.n_layer,), "x0_lambdas"),
        ParamShape("smear_lambda", (1,), "smear"),
        ParamShape("backout_lambda", (1,), "smear"),
        ParamShape("wte.weight", (vocab, width), "wte"),
    ]
    for i in range(model.n_layer):
        matrices = [ParamShape(f"h.{i}.{name}.weight", shape, MATRIX) for name, shape in layer_matrices(model).items()]
        if i in value_layers:
            gate = (model.n_kv_head, ve_gate_width(model))
            matrices.insert(4, ParamShape(f"h.{i}.attn.ve_gate.weight", gate, MATRIX))  # before the MLP's
        shapes += matrices
    shapes += [ParamShape(f"value_embeds.{i}.weight", (vocab, kv_width), "value_embeds") for i in value_layers]
    shapes.append(ParamShape("lm_head.weight", (vocab, width), HEAD))
    shapes.append(ParamShape("smear_gate.weight", (1, smear_gate_width(model)), "smear"))
    return tuple(shapes)


def layer_matrices(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Returns (out, in) of one layer's matrices by their names in it, without the gate of its value embedding."""
    q_width, kv_width = model.n_head * model.head_dim, model.n_kv_head * model.head_dim
    width = model.n_embd
    return {
        "attn.c_q": (q_width, width),
        "attn.c_k": (kv_width, width),
        "attn.c_v": (kv_width, width),
        "attn.c_proj": (width, q_width),
        "mlp.c_fc": (4 * width, width),
        "mlp.c_proj": (width, 4 * width),
    }


@lru_cache(maxsize=64)
def layer_weights(model: ModelConfig) -> int:
    """Returns the elements of layer_matrices."""
    return sum(rows * columns for rows, columns in layer_matrices(model).values())


def value_table(model: ModelConfig) -> int:
    """Returns the elements of one value embedding."""
    return model.padded_vocab_size * model.n_kv_head * model.head_dim


@lru_cache(maxsize=64)
def num_params(model: ModelConfig) -> int:
    """Counts all parameters."""
    return sum(shape.numel for shape in param_shapes(model))


@lru_cache(maxsize=64)
def matmul_params(model: ModelConfig) -> int:
    """Counts the parameters that multiply every token: block matrices and lm_head; embedding lookups are free."""
    return sum(shape.numel for shape in param_shapes(model) if shape.group in (MATRIX, HEAD))


def width_of_depth(depth: int, *, head_dim: int) -> int:
    """Returns 64 x depth, rounded up to whole heads."""
    return -(-ASPECT * depth // head_dim) * head_dim


def model_of_depth(model: ModelConfig, depth: int) -> ModelConfig:
    """Returns the model of another depth, with the width that follows from it."""
    width = width_of_depth(depth, head_dim=model.head_dim)
    heads = width // model.head_dim
    return replace(model, n_layer=depth, n_embd=width, n_head=heads, n_kv_head=heads)


def reference_params(model: ModelConfig) -> int:
    """Returns matmul_params of the depth-12 model that the rules were tuned on, with this run's vocabulary."""
    return matmul_params(model_of_depth(replace(model, head_dim=128), REFERENCE_DEPTH))


def horizon_tokens(model: ModelConfig, *, tokens_per_param: float) -> int:
    """Returns the training tokens: so many per parameter of the block matrices and lm_head."""
    return int(tokens_per_param * matmul_params(model))


def batch_of_horizon(model: ModelConfig) -> int:
    """Returns the tokens of a step, a power of two, that suit a run of horizon_tokens at any tokens_per_param."""
    growth = matmul_params(model) / reference_params(model)
    return int(2 ** round(math.log2(REFERENCE_BATCH * growth**BATCH_EXPONENT)))


def choose_num_steps(config: Config, model: ModelConfig, *, total_batch_size: int, num_rows: int) -> int:
    """Returns the steps of the run; for a length that is a time, the fewest, until a trial has measured the speed."""
    if config.num_steps is not None:
        return config.num_steps
    if config.time is not None:
        return MIN_STEPS
    if config.epochs is not None:
        rows_per_step = total_batch_size // model.sequence_len
        return max(1, -(-int(config.epochs * num_rows) // rows_per_step))
    return max(1, round(horizon_tokens(model, tokens_per_param=config.tokens_per_param) / total_batch_size))


def format_epochs(epochs: float | None, *, is_estimate: bool = False) -> str:
    """Returns how often a run reads its text, and beyond MANY_EPOCHS that this is too often; empty where it is not known."""
    if not epochs:
        return ""
    digits = 2 if is_estimate else 3
    shown = (
        f"{epochs:.{digits}g}"
        if round(epochs) < 100
        else f"{round(epochs, (2 - len(str(int(epochs)))) * is_estimate):,.0f}"
    )
    remark = ": more than about four improve the model little" if epochs > MANY_EPOCHS else ""
    return f"about {shown} epochs of the text{remark}" if is_estimate else f"{shown} epochs{remark}"


def text_remark(model: ModelConfig, num_tokens: int, *, tokens_per_param: float, text_tokens: int | None) -> str:
    """Returns what to do where a text is too little to train a model on so many tokens; empty where it is enough, or not known.

    text_tokens: of one epoch; 0: not known; None: no text is chosen, and the line says how much it takes.
    """
    epochs, enough = num_tokens / (text_tokens or math.inf), format_bytes(num_tokens * BYTES_PER_TOKEN / GOOD_EPOCHS)
    if text_tokens is None:
        return f"text    {format_count(num_tokens)} tokens are {GOOD_EPOCHS} epochs of about {enough} of text: --data SOURCE"
    if epochs <= MANY_EPOCHS:
        return ""
    models = (model_of_depth(model, depth) for depth in range(1, model.n_layer))
    lengths = [horizon_tokens(smaller, tokens_per_param=tokens_per_param) for smaller in models]
    depth = sum(length <= GOOD_EPOCHS * text_tokens for length in lengths)
    smaller = f"a model of depth {depth} at most" if depth else "the config tiny"
    shown = format_epochs(epochs, is_estimate=True).partition(":")[0]
    return f"text    {shown}: use about {enough} of text, or {smaller}, and train it for {GOOD_EPOCHS} epochs"


def steps_of_time(time_s: float, *, step_s: float, eval_s: float | None = None, eval_every: int = 0) -> int:
    """Returns the steps that end within time_s seconds together with their evaluations, but at least MIN_STEPS.

    eval_s: seconds of one evaluation; None where eval_tokens is automatic, so that all evaluations take EVAL_SHARE of the time.
    """
    if eval_s is None:
        num_steps = (1 - EVAL_SHARE) * time_s / step_s
    else:
        first_s = eval_s if eval_every else 0.0  # of the evaluation before the first step
        num_steps = (time_s - first_s - eval_s) / step_s  # one at the end
        if eval_every and num_steps > eval_every:
            num_steps = (time_s - first_s) / (step_s + eval_s / eval_every)
    return max(MIN_STEPS, int(num_steps))


def num_evaluations(num_steps: int, *, eval_every: int) -> int:
    """Returns how often a run evaluates: before its first step, every eval_every steps, and at its end; 0: only at the end."""
    return 1 - (-num_steps // eval_every) if eval_every else 1


def choose_eval_tokens(config: Config, *, num_steps: int, total_batch_size: int, cost: float = EVAL_COST) -> int:
    """Returns the tokens of one evaluation: the config's, or so many that all evaluations take EVAL_SHARE of the run's time.

    A power of two, so that runs of about the same length score the same text; with the tokens of at least half a step.
    cost: the time to evaluate a token, in that to train on one.
    """
    if config.eval_tokens is not None:
        return config.eval_tokens
    num_evals = num_evaluations(num_steps, eval_every=config.eval_every)
    num_tokens = EVAL_SHARE / (1 - EVAL_SHARE) * num_steps * total_batch_size / (num_evals * cost)
    return min(MAX_EVAL_TOKENS, 1 << max(total_batch_size, int(num_tokens)).bit_length() - 1)


def window_sizes(model: ModelConfig) -> tuple[int, ...]:
    """Returns the tokens that each layer's attention sees: all for L, a quarter rounded up to 128 for S; all in the last layer."""
    full = model.sequence_len
    short = min(full, -(-full // 4 // SHORT_WINDOW_MULTIPLE) * SHORT_WINDOW_MULTIPLE)
    pattern = model.window_pattern
    sizes = [full if pattern[i % len(pattern)] == "L" else short for i in range(model.n_layer)]
    return (*sizes[:-1], full)
