"""
The formulas of the optimizers, each once, and what changes from step to step: learning rate, momentum and weight decay.

Formulas work on tensors in place and do not depend on ranks, modules or schedules. AdamW: arXiv 1711.05101, torch's fused kernel.
Muon, as nanochat has it (its optim.py, July 2026): momentum and orthogonalization of kellerjordan.github.io/posts/muon; Polar
Express, arXiv 2505.16932; row equilibration (MuonEq), arXiv 2603.28254; renormalization (Muon+), arXiv 2602.21545; variance
reduction (NorMuon), arXiv 2510.05491; cautious decay, arXiv 2510.12402.

Schedules are pure functions of (step, num_steps), so that extending a run, or resuming it anywhere, needs no scheduler state. Their
shapes and figures: nanochat, July 2026. Their `step` counts the optimizer steps already done, so the first is made with step = 0.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.plan.host import probe_cpu_bf16

# m rows and n columns of a matrix; ... is nothing, or a batch of matrices of one shape

# a, b, c of x -> a x + (b xx' + c (xx')^2) x, one line an iteration: arXiv 2505.16932 for five iterations, safety factor 0.02
# and cushion 2, with the digits that nanochat and modded-nanogpt publish
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
POLAR_EXPRESS_MARGIN = 1.01  # rounding must not push a singular value above 1, where the polynomials diverge
SMALLEST_NORM = 1e-6
SMALLEST_VARIANCE = 1e-10
MOMENTUM_START, MOMENTUM_PEAK, MOMENTUM_END = 0.85, 0.97, 0.90
MOMENTUM_WARMUP_STEPS = 400


@torch.no_grad()
def adamw_update(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    grad_scale: float,
) -> None:
    """Applies decoupled decay, both moments and bias correction; all tensors are fp32 and change in place. `step` counts from 1.

    grads are multiplied by grad_scale, in place too. A tensor cut at multiples of 64 elements gets the same bits in parts as
    whole: the kernel's vectors then cover the same elements (tests/train/test_updates.py).
    """
    if not weights:
        return
    device = weights[0].device
    torch._fused_adamw_(
        list(weights),
        list(grads),
        list(exp_avgs),
        list(exp_avg_sqs),
        [],
        list(torch.full((len(weights),), float(step), device=device).unbind()),
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=torch.full((), 1 / grad_scale, device=device),  # the kernel divides
        found_inf=None,
    )


@torch.no_grad()
def muon_update(
    weight: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor,
    second_momentum_buffer: Tensor,
    *,
    lr: float,
    momentum: float,
    beta2: float,
    weight_decay: float,
    grad_scale: float,
    dtype: torch.dtype,
) -> None:
    """Takes one step of a matrix. weight, grad, momentum_buffer: (..., m, n) fp32.

    second_momentum_buffer: (..., m, 1) or (..., 1, n) fp32, one number for each index of the longer side. All four change in
    place. dtype: of the orthogonalization, see `newton_schulz_dtype`.
    """
    # orthogonalization makes every direction of the update equally large: rare directions learn as fast as frequent ones
    update = nesterov(grad.mul_(grad_scale), momentum_buffer, momentum=momentum)
    update = orthogonalize(equilibrate_rows(update), dtype=dtype).float()
    update = reduce_variance(renormalize(update), second_momentum_buffer, beta2=beta2)
    # a tall matrix takes a larger step: its orthogonal update moves each output by less
    descend(weight, update, lr=lr * max(1.0, weight.size(-2) / weight.size(-1)) ** 0.5, weight_decay=weight_decay)


def nesterov(grad: Tensor, momentum_buffer: Tensor, *, momentum: float) -> Tensor:
    """Updates the buffer, a running mean (not a sum), and returns the momentum one step ahead. grad is overwritten."""
    momentum_buffer.lerp_(grad, 1 - momentum)
    return grad.lerp_(momentum_buffer, momentum)


def equilibrate_rows(update: Tensor) -> Tensor:
    """Scales every row to the rows' root mean square norm: the spectrum that enters orthogonalization is flatter."""
    row_norms = torch.linalg.vector_norm(update, dim=-1, keepdim=True)  # (..., m, 1)
    target = row_norms.square().mean(dim=-2, keepdim=True).sqrt_()  # (..., 1, 1)
    return update.mul(target / row_norms.clamp_min_(SMALLEST_NORM))


def orthogonalize(
    update: Tensor,
    *,
    dtype: torch.dtype,
    coefficients: Sequence[tuple[float, float, float]] = POLAR_EXPRESS,
    margin: float = POLAR_EXPRESS_MARGIN,
) -> Tensor:
    """Returns nearly the nearest semi-orthogonal matrix, all singular values close to 1; (..., m, n) in `dtype`."""
    norm = torch.linalg.vector_norm(update, dim=(-2, -1), keepdim=True) * margin + SMALLEST_NORM
    tall = update.size(-2) > update.size(-1)
    x: Tensor = (update / norm).to(dtype)
    x = x.mT.contiguous() if tall else x  # (..., m, n) with m <= n: the Gram matrix is of the short side
    multiply_add = torch.baddbmm if x.ndim == 3 else torch.addmm
    for a, b, c in coefficients:
        gram = x @ x.mT  # (..., m, m)
        x = multiply_add(x, multiply_add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def renormalize(update: Tensor) -> Tensor:
    """Scales to the norm of an exactly semi-orthogonal matrix, which five iterations miss by a little."""
    norm = torch.linalg.vector_norm(update, dim=(-2, -1), keepdim=True).clamp_min_(SMALLEST_NORM)
    return update.mul(min(update.shape[-2:]) ** 0.5 / norm)


def reduce_variance(update: Tensor, second_momentum_buffer: Tensor, *, beta2: float) -> Tensor:
    """Shrinks rows (or columns: the longer side) that recently moved much, and grows the others; the norm of the whole stays."""
    dim = -1 if update.size(-2) >= update.size(-1) else -2
    sums = torch.linalg.vector_norm(update, dim=dim, keepdim=True).square_()  # (..., m, 1) or (..., 1, n)
    variance = sums / update.size(dim)
    second_momentum_buffer.lerp_(variance, 1 - beta2)
    scale = second_momentum_buffer.clamp_min(SMALLEST_VARIANCE).rsqrt_()
    norm = variance.sum(dim=(-2, -1), keepdim=True).sqrt_()
    scaled_norm = (variance * scale.square()).sum(dim=(-2, -1), keepdim=True).sqrt_()
    return update.mul(scale * (norm / scaled_norm.clamp_min_(SMALLEST_VARIANCE)))


def descend(weight: Tensor, update: Tensor, *, lr: float, weight_decay: float) -> None:
    """Applies the update, and decays only the weights that the update shrinks anyway: decay never works against it (cautious)."""
    shrinks = (update * weight) >= 0
    weight.addcmul_(weight, shrinks, value=-lr * weight_decay)
    weight.add_(update, alpha=-lr)


def newton_schulz_dtype(device: torch.device) -> torch.dtype:
    """Returns bf16 where the device multiplies it natively: the iteration tolerates the rounding and is 2 to 4 times faster.

    Tensors on the meta device stand for a GPU's: a trace of memory has no other device to ask.
    """
    if device.type == "cpu":
        native = probe_cpu_bf16()
    else:
        native = device.type == "meta" or torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.bfloat16 if native else torch.float32


def lr_mult(step: int, num_steps: int, *, warmup_steps: int, warmdown_ratio: float, final_lr_frac: float) -> float:
    """Returns the factor of the learning rates: linear warm-up, constant, linear warm-down to final_lr_frac.

    A warm-up longer than a third of the run is cut to that.
    """
    warmup = min(warmup_steps, num_steps // 3)
    if step < warmup:
        return (step + 1) / warmup
    warmdown = warmdown_ratio * num_steps
    remaining = (num_steps - step) / warmdown if warmdown else 1.0
    return 1.0 if remaining >= 1 else final_lr_frac + (1 - final_lr_frac) * remaining


def momentum_of_step(step: int, num_steps: int, *, warmdown_ratio: float) -> float:
    """Returns Muon's momentum: it rises over the first steps, when old gradients mislead, and falls with the learning rate."""
    up = MOMENTUM_START + (MOMENTUM_PEAK - MOMENTUM_START) * min(1.0, step / MOMENTUM_WARMUP_STEPS)
    warmdown = warmdown_ratio * num_steps
    into = 1 - (num_steps - step) / warmdown if warmdown else 0.0
    return up if into <= 0 else up + (MOMENTUM_END - up) * into


def weight_decay_mult(step: int, num_steps: int) -> float:
    """Returns the factor of the matrices' weight decay, a cosine from 1 to 0."""
    return 0.5 * (1 + math.cos(math.pi * step / num_steps))
