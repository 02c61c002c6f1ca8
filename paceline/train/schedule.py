"""
What changes from step to step: learning rate, Muon's momentum, weight decay. Pure functions of (step, num_steps).

So extending a run, or resuming it anywhere, needs no scheduler state. Shapes and figures: nanochat, July 2026.
`step` is the number of optimizer steps already done, so the first step is made with step = 0.
"""

import math

MOMENTUM_START, MOMENTUM_PEAK, MOMENTUM_END = 0.85, 0.97, 0.90
MOMENTUM_WARMUP_STEPS = 400


def lr_mult(step: int, num_steps: int, *, warmup_steps: int, warmdown_ratio: float, final_lr_frac: float) -> float:
    """Linear warm-up, constant, linear warm-down to final_lr_frac. A warm-up longer than a third of the run is cut to that."""
    warmup = min(warmup_steps, num_steps // 3)
    if step < warmup:
        return (step + 1) / warmup
    warmdown = warmdown_ratio * num_steps
    left = (num_steps - step) / warmdown if warmdown else 1.0
    return 1.0 if left >= 1 else final_lr_frac + (1 - final_lr_frac) * left


def muon_momentum(step: int, num_steps: int, *, warmdown_ratio: float) -> float:
    """Up over the first steps, down again with the learning rate."""
    up = MOMENTUM_START + (MOMENTUM_PEAK - MOMENTUM_START) * min(1.0, step / MOMENTUM_WARMUP_STEPS)
    warmdown = warmdown_ratio * num_steps
    into = 1 - (num_steps - step) / warmdown if warmdown else 0.0
    return up if into <= 0 else up + (MOMENTUM_END - up) * into


def weight_decay_mult(step: int, num_steps: int) -> float:
    """Cosine from 1 to 0."""
    return 0.5 * (1 + math.cos(math.pi * step / num_steps))
