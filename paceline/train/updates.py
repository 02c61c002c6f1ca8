"""
The formulas of the optimizers, each once, on tensors: no ranks, no modules, no schedules.

AdamW: arXiv 1711.05101, torch's fused kernel. Muon, as nanochat has it (its optim.py, July 2026): momentum and orthogonalization
of kellerjordan.github.io/posts/muon; Polar Express, arXiv 2505.16932; row equilibration (MuonEq), arXiv 2603.28254;
renormalization (Muon+), arXiv 2602.21545; variance reduction (NorMuon), arXiv 2510.05491; cautious decay, arXiv 2510.12402.
"""

# m rows and n columns of a matrix; ... is nothing, or a batch of matrices of one shape

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.plan.machine import probe_cpu_bf16

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
    """Decoupled decay, both moments, bias correction; all fp32, in place. `step` counts from 1.

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
    """One step of a matrix: weight, grad, momentum_buffer (..., m, n) fp32, second_momentum_buffer as `second_momentum_shape`.

    All four are changed in place. dtype: of the orthogonalization, see `newton_schulz_dtype`.
    """
    update = nesterov(grad.mul_(grad_scale), momentum_buffer, momentum=momentum)
    update = orthogonalize(equilibrate_rows(update), dtype=dtype).float()
    update = reduce_variance(renormalize(update), second_momentum_buffer, beta2=beta2)
    descend(weight, update, lr=lr * max(1.0, weight.size(-2) / weight.size(-1)) ** 0.5, weight_decay=weight_decay)


def nesterov(grad: Tensor, momentum_buffer: Tensor, *, momentum: float) -> Tensor:
    """The buffer is a running mean (not a sum); returns the gradient looked at one step ahead. grad is overwritten."""
    momentum_buffer.lerp_(grad, 1 - momentum)
    return grad.lerp_(momentum_buffer, momentum)


def equilibrate_rows(update: Tensor) -> Tensor:
    """Every row to the rows' root mean square norm: the spectrum that enters orthogonalization is flatter."""
    row_norms = torch.linalg.vector_norm(update, dim=-1, keepdim=True)  # (..., m, 1)
    wanted = row_norms.square().mean(dim=-2, keepdim=True).sqrt_()  # (..., 1, 1)
    return update.mul(wanted / row_norms.clamp_min_(SMALLEST_NORM))


def orthogonalize(
    update: Tensor,
    *,
    dtype: torch.dtype,
    coefficients: Sequence[tuple[float, float, float]] = POLAR_EXPRESS,
    margin: float = POLAR_EXPRESS_MARGIN,
) -> Tensor:
    """Towards the nearest semi-orthogonal matrix, all singular values near 1; (..., m, n) in `dtype`."""
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
    """To the norm of an exactly semi-orthogonal matrix, which five iterations miss by a little."""
    norm = torch.linalg.vector_norm(update, dim=(-2, -1), keepdim=True).clamp_min_(SMALLEST_NORM)
    return update.mul(min(update.shape[-2:]) ** 0.5 / norm)


def second_momentum_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """One number for each index of the longer side."""
    rows, cols = shape
    return (rows, 1) if rows >= cols else (1, cols)


def reduce_variance(update: Tensor, second_momentum_buffer: Tensor, *, beta2: float) -> Tensor:
    """Rows (or columns, the longer side) that moved much of late move less; the whole keeps its norm."""
    dim = -1 if update.size(-2) >= update.size(-1) else -2
    sums = torch.linalg.vector_norm(update, dim=dim, keepdim=True).square_()  # (..., m, 1) or (..., 1, n)
    variance = sums / update.size(dim)
    second_momentum_buffer.lerp_(variance, 1 - beta2)
    scale = second_momentum_buffer.clamp_min(SMALLEST_VARIANCE).rsqrt_()
    norm = variance.sum(dim=(-2, -1), keepdim=True).sqrt_()
    scaled_norm = (variance * scale.square()).sum(dim=(-2, -1), keepdim=True).sqrt_()
    return update.mul(scale * (norm / scaled_norm.clamp_min_(SMALLEST_VARIANCE)))


def descend(weight: Tensor, update: Tensor, *, lr: float, weight_decay: float) -> None:
    """Decays only the weights that the update shrinks as well (cautious)."""
    shrinks = (update * weight) >= 0
    weight.addcmul_(weight, shrinks, value=-lr * weight_decay)
    weight.add_(update, alpha=-lr)


def newton_schulz_dtype(device: torch.device) -> torch.dtype:
    """bf16 where the device multiplies it natively: it stands the rounding, and it is 2 to 4 times faster than fp32.

    Tensors on the meta device stand for a GPU's: a trace of memory has no other device to ask.
    """
    if device.type == "cpu":
        native = probe_cpu_bf16()
    else:
        native = device.type == "meta" or torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.bfloat16 if native else torch.float32
