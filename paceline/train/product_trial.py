"""
Which of a run's products gain by a low precision on this card: a trial of about two seconds before the first step.

Each shape of a block's matrices is multiplied forward and backward with the tokens of a micro-batch, in 16 bits and in the low
precision, op by op as an uncompiled layer does it. fp8 is for speed, so that matrices which lose by it stay in 16 bits. The other
formats are experiments: they are only measured. plan.json keeps the answer, since every bit that follows depends on it.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch

from paceline.config import ModelConfig
from paceline.errors import PacelineError
from paceline.model.gpt import DTYPES
from paceline.model.linear import Linear, LowProducts, product_problem
from paceline.plan.planner import Plan
from paceline.plan.precision import MIN_GAIN, gain_text, loses
from paceline.plan.shapes import layer_matrices, layer_weights
from paceline.train.process import broadcast_object, finish_work, forget_peaks

SHORTEST_S = 0.05  # a product is repeated for so long
TURNS = 5  # in each of which both precisions are measured


def choose_products(plan: Plan, device: torch.device) -> tuple[Plan, list[str]]:
    """Returns the plan with the gain of each matrix, and what is to be reported; raises PacelineError where nothing gains.

    Rank 0's clock decides for all. Collective.
    """
    low = plan.low_precision
    if low is None or low.emulated:
        return plan, []
    if problem := product_problem(low.name, device):
        raise PacelineError(
            f"{low.name} products do not work on {plan.device_name} with PyTorch {torch.__version__}: {problem}",
            fix="--precision auto, or --emulate (right, but slower than 16 bits)",
        )
    if plan.product_gains is not None:
        return plan, []
    gains = broadcast_object(measure_gains(plan, device))
    forget_peaks(device)
    plan = replace(plan, product_gains=gains)
    if low.name == "fp8" and all(gain < MIN_GAIN for gain in gains.values()):
        raise PacelineError(
            f"fp8 is slower than bf16 on {plan.device_name} in every product of this model: {gain_text(gains)}",
            fix="--precision auto, or a wider model",
        )
    slow = loses(low, gains)
    stay = f"; in 16 bits: {', '.join(slow)}" if slow else ""
    return plan, [f"{low.name} products, times as fast as in bf16: {gain_text(gains)}{stay}"]


def measure_gains(plan: Plan, device: torch.device) -> dict[str, float]:
    """Returns the time in 16 bits over the time in the low precision, of each matrix of a block."""
    assert plan.low_precision is not None
    tokens, gains = plan.device_batch_size * plan.model.sequence_len, dict[tuple[int, int], float]()
    matrices = layer_matrices(plan.model)
    for shape in set(matrices.values()):
        pieces = [
            product_piece(shape, tokens, name, dtype=DTYPES[plan.precision], device=device)
            for name in (None, plan.low_precision.name)
        ]
        turns = [tuple(seconds_of(piece, device) for piece in pieces) for _ in range(TURNS)]
        gains[shape] = median(wide_s / low_s for wide_s, low_s in turns)
    return {name: gains[shape] for name, shape in matrices.items()}


def product_piece(
    shape: tuple[int, int], tokens: int, name: str | None, *, dtype: torch.dtype, device: torch.device
) -> Callable[[], None]:
    """Returns a layer's three products, (O, I) its shape, in a low precision or in 16 bits. Weights are quantized beforehand."""
    layer = Linear(shape[1], shape[0]).to(device, dtype)
    torch.nn.init.normal_(layer.weight, 0, 0.02)
    if name is not None:
        low = LowProducts([layer], name, native=True, keeps_codes=True, device=device)
        low.begin(seed=0, step=0, micro_step=0, micro_batch=0)
    x, dy = (torch.randn(tokens, size, dtype=dtype, device=device) for size in (shape[1], shape[0]))
    x.requires_grad_()

    def piece() -> None:
        layer.weight.grad = x.grad = None
        layer(x).backward(dy)

    return piece


def seconds_of(piece: Callable[[], None], device: torch.device) -> float:
    """Returns the seconds of one call, averaged over as many as take SHORTEST_S."""
    piece()
    calls, passed = 1, 0.0
    while passed < SHORTEST_S:
        calls *= 2
        finish_work(device)
        started = time.perf_counter()
        for _ in range(calls):
            piece()
        finish_work(device)
        passed = time.perf_counter() - started
    return passed / calls


def low_linear_rate(width: int, tokens: int, name: str, *, device: torch.device) -> float:
    """Returns FLOPs per second of a layer's matrices in a low precision; bf16 is all else."""
    model = ModelConfig(1, width, 1, 1, width, sequence_len=tokens, vocab_size=64)
    shapes = layer_matrices(model).values()
    pieces = [product_piece(shape, tokens, name, dtype=torch.bfloat16, device=device) for shape in shapes]
    return 6 * tokens * layer_weights(model) / sum(seconds_of(piece, device) for piece in pieces)
