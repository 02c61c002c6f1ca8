"""
One depth dial -> width, batch size, length, learning rates. Pure arithmetic.

The rules are nanochat's of July 2026 (its base_train.py and dev/LOG.md): values are tuned at depth 12 with 524,288 tokens a step,
and carried to other sizes by powers of batch, width and length.
"""

import math
from dataclasses import dataclass

from paceline.config import ModelConfig
from paceline.plan.shapes import matmul_params

ASPECT = 64  # width per layer
REFERENCE_DEPTH = 12
REFERENCE_BATCH = 2**19  # tokens a step
REFERENCE_WIDTH = 768
BATCH_EXPONENT = 0.383  # optimal tokens a step grow with training tokens to this power


@dataclass(frozen=True)
class GroupSettings:
    """How one group of parameters is updated. For muon, betas[1] is NorMuon's; its momentum comes with each step."""

    algorithm: str  # "muon" or "adamw"
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


def width_of_depth(depth: int, *, head_dim: int) -> int:
    """64 x depth, rounded up to whole heads."""
    return -(-ASPECT * depth // head_dim) * head_dim


def reference_model(model: ModelConfig) -> ModelConfig:
    """The depth-12 model that the rules were tuned on, with this run's vocabulary and row length."""
    width = width_of_depth(REFERENCE_DEPTH, head_dim=128)
    return ModelConfig(
        n_layer=REFERENCE_DEPTH,
        n_embd=width,
        n_head=width // 128,
        n_kv_head=width // 128,
        head_dim=128,
        sequence_len=model.sequence_len,
        vocab_size=model.vocab_size,
    )


def horizon_tokens(model: ModelConfig, *, tokens_per_param: float) -> int:
    """Training tokens: so many per parameter of the block matrices and lm_head."""
    return int(tokens_per_param * matmul_params(model))


def batch_of_horizon(model: ModelConfig, *, tokens_per_param: float) -> int:
    """Tokens a step, a power of two."""
    growth = matmul_params(model) / matmul_params(reference_model(model))
    return int(2 ** round(math.log2(REFERENCE_BATCH * growth**BATCH_EXPONENT)))


def group_settings(
    model: ModelConfig,
    *,
    optimizer: str,
    total_batch_size: int,
    num_steps: int,
    tokens_per_param: float,
    matrix_lr: float | None,
    embedding_lr: float,
    unembedding_lr: float,
    weight_decay: float,
) -> dict[str, GroupSettings]:
    """Settings of each group of plan/shapes.py. Learning rates are given at the reference, and scaled here."""
    batch = math.sqrt(total_batch_size / REFERENCE_BATCH)
    width = (model.n_embd / REFERENCE_WIDTH) ** -0.5  # AdamW's only: Muon's update has the same size at any width
    reference_tokens = tokens_per_param * matmul_params(reference_model(model))
    decay = weight_decay * batch * reference_tokens / (total_batch_size * num_steps)

    def adamw(lr: float, betas: tuple[float, float], weight_decay: float) -> GroupSettings:
        return GroupSettings("adamw", lr, betas, 1e-10, weight_decay)

    if optimizer == "muon":
        matrix = GroupSettings("muon", (0.02 if matrix_lr is None else matrix_lr) * batch, (0.0, 0.9), 1e-10, decay)
    else:
        matrix = adamw((0.002 if matrix_lr is None else matrix_lr) * batch * width, (0.9, 0.95), 0.1)
    return {
        "matrix": matrix,
        "lm_head": adamw(unembedding_lr * batch * width, (0.8, 0.96), 0.01),
        "wte": adamw(embedding_lr * batch * width, (0.8, 0.995), 0.001),
        "value_embeds": adamw(embedding_lr / 2 * batch * width, (0.8, 0.995), 0.01),
        "resid_lambdas": adamw(0.005 * batch, (0.8, 0.95), 0.05),
        "x0_lambdas": adamw(0.5 * batch, (0.96, 0.95), 0.0),
        "smear": adamw(0.2, (0.8, 0.95), 0.0),
    }
