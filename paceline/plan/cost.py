"""
FLOPs of training, from shapes alone. Pure arithmetic: no torch, no GPU, no clock.

PaLM, arXiv 2204.02311, appendix B. Attention counts the whole window, the causal half is not taken off, as nanochat counts it:
an MFU here compares with those published.
"""

from paceline.config import ModelConfig
from paceline.plan.shapes import matmul_params

BACKWARD_PER_FORWARD = 2  # one matmul forward is two backward: by input and by weight
SHORT_WINDOW_MULTIPLE = 128


def window_sizes(model: ModelConfig) -> tuple[int, ...]:
    """Tokens that each layer's attention sees: all for L, a quarter rounded up to 128 for S; the last layer sees all."""
    full = model.sequence_len
    short = min(full, -(-full // 4 // SHORT_WINDOW_MULTIPLE) * SHORT_WINDOW_MULTIPLE)
    pattern = model.window_pattern
    sizes = [full if pattern[i % len(pattern)] == "L" else short for i in range(model.n_layer)]
    return (*sizes[:-1], full)


def flops_per_token(model: ModelConfig) -> int:
    """FLOPs to train on one token, forward and backward; a multiply-add counts as two."""
    weights = 2 * matmul_params(model)
    scores = 4 * model.n_head * model.head_dim * sum(window_sizes(model))  # q @ k and att @ v
    return (1 + BACKWARD_PER_FORWARD) * (weights + scores)


def mfu(tok_per_sec: float, flops_per_token: int, peak_flops: float | None) -> float | None:
    """Share of one device's peak, 0 to 1; None where the peak is unknown. tok_per_sec is that of one device."""
    return tok_per_sec * flops_per_token / peak_flops if peak_flops else None
