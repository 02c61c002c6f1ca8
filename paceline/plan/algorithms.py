"""
One row for each optimizer algorithm, and the settings of each group of parameters. Pure arithmetic: no torch.

To add an optimizer, add a row here with its name in config.py's choices, a function in train/updates.py, and a test. The config's
`optimizer` updates the block matrices; embeddings, lm_head and the small parameters are always updated by OTHERS.

Settings follow nanochat of July 2026 (its base_train.py and dev/LOG.md): they are tuned at depth 12 with 524,288 tokens a step, and
carried to other sizes by powers of batch, width and length.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache

from paceline.config import MATRIX_LR, RATES_OF_DEPTH, Config, ModelConfig, format_flags
from paceline.plan.shapes import FP32, HEAD, MATRIX, REFERENCE_BATCH, REFERENCE_WIDTH, reference_params

Shape = tuple[int, ...]

OTHERS = "adamw"  # updates every group but the matrices
NEWTON_SCHULZ_ITERATIONS = 5  # the lines of POLAR_EXPRESS in train/updates.py
EPS = 1e-10
# tokens a step, and steps, up to which these rates of `tiny` were tried with Muon and are better than the defaults
SMALL_BATCH, FEW_STEPS = 12_288, 600
SMALL_BATCH_RATES = {"matrix_lr": 0.1, "embedding_lr": 0.6, "unembedding_lr": 0.06, "weight_decay": 0.05}
MAX_DECAY_OF_STEP = 0.5  # of a weight; with this formula only runs of fewer than some 30 steps reach it


@dataclass(frozen=True)
class Algorithm:
    """What the planner and the worker need to know of an optimizer algorithm besides its update function.

    A whole algorithm needs whole matrices, each on one rank: its time is FLOPs. An elementwise one takes any rows of a tensor: its
    time is the bytes it moves, and train/updates.py gets lists of tensors.
    """

    name: str  # in config.toml, in GroupSettings and in checkpoints' settings
    title: str  # on the screen, and among the parts of a step's time
    update: str  # the function in train/updates.py
    whole: bool
    states: Mapping[str, Callable[[Shape], Shape]]  # name in checkpoints -> its fp32 shape for rows of a parameter
    codes: Mapping[str, str]  # of states that 8 bits can hold: int8 where they have a sign, else uint8 (plan/states.py)
    matrix_lr: float  # default at the reference
    matrix_betas: tuple[float, float]
    matrix_weight_decay: float | None  # None: the config's weight_decay, scaled to the run's length
    lr_falls_with_width: bool  # False where the update has the same size at any width
    flops: Callable[[Shape], int]  # of one update of a matrix; 0 for an elementwise algorithm
    # temporaries for (shape, matrices updated together, bytes of a factor)
    working_bytes: Callable[[Shape, int, int], int]
    # names in speeds.json -> long side by short side of the matrix that is measured; 1 if elementwise
    rates: Mapping[str, int]
    peak_share: float = 0.0  # of a GPU's dense peak that a whole algorithm is assumed to reach
    moved_bytes: int = 0  # of an element, read and written by an elementwise algorithm

    def rate_name(self, shape: Shape) -> str:
        """Returns the rate that was measured on matrices nearest in form to this one."""
        aspect = max(shape) / min(shape)
        return min(self.rates, key=lambda name: abs(math.log(aspect / self.rates[name])))


def same_shape(shape: Shape) -> Shape:
    """Returns the shape of one number for each element."""
    return shape


def longer_side(shape: Shape) -> Shape:
    """Returns the shape of one number for each index of a matrix's longer side."""
    rows, cols = shape
    return (rows, 1) if rows >= cols else (1, cols)


def newton_schulz_flops(shape: Shape) -> int:
    """Counts the FLOPs of all iterations: the short side's Gram matrix, its square, and its product with the matrix."""
    short, long = min(shape), max(shape)
    return 2 * NEWTON_SCHULZ_ITERATIONS * (2 * short * short * long + short**3)


def newton_schulz_bytes(shape: Shape, count: int, factor_bytes: int) -> int:
    """Returns the stacks of weights and gradients where there are several matrices, then the fullest line of muon_update."""
    short, long = min(shape), max(shape)
    numel, gram = count * short * long, count * short * short
    stacks = 2 * FP32 * numel if count > 1 else 0
    division = (2 * FP32 + (factor_bytes if factor_bytes != FP32 else 0)) * numel
    iteration = FP32 * numel + 2 * factor_bytes * numel + 2 * factor_bytes * gram
    return stacks + max(division, iteration, 3 * FP32 * numel)


ALGORITHMS: Mapping[str, Algorithm] = {
    row.name: row
    for row in (
        Algorithm(
            name="muon",
            title="Muon",
            update="muon_update",
            whole=True,
            states={"momentum_buffer": same_shape, "second_momentum_buffer": longer_side},
            codes={"momentum_buffer": "int8"},  # the other is one number for each row
            matrix_lr=MATRIX_LR["muon"],
            matrix_betas=(0.0, 0.9),  # the second is NorMuon's; the momentum is a schedule of train/updates.py
            matrix_weight_decay=None,
            lr_falls_with_width=False,
            flops=newton_schulz_flops,
            working_bytes=newton_schulz_bytes,
            rates={"muon": 1, "muon_long": 4},
            peak_share=0.4,
        ),
        Algorithm(
            name="adamw",
            title="AdamW",
            update="adamw_update",
            whole=False,
            states={"exp_avg": same_shape, "exp_avg_sq": same_shape},
            codes={"exp_avg": "int8", "exp_avg_sq": "uint8"},
            matrix_lr=MATRIX_LR["adamw"],
            matrix_betas=(0.9, 0.95),
            matrix_weight_decay=0.1,
            lr_falls_with_width=True,
            flops=lambda shape: 0,
            working_bytes=lambda shape, count, factor_bytes: 0,  # the fused kernel works in place
            rates={"adamw": 1},
            moved_bytes=34,  # weight, gradient, two moments in fp32, each read and written; and the bf16 weight
        ),
    )
}


def algorithm_of(optimizer: str, group: str, *, optimizer_states: str = "fp32") -> Algorithm:
    """Returns the algorithm that updates a group of plan/shapes.py. optimizer, optimizer_states: the config's."""
    return with_states(optimizer if group == MATRIX else OTHERS, optimizer_states)


@cache
def with_states(name: str, optimizer_states: str) -> Algorithm:
    """Returns the algorithm of a name as the config's `optimizer_states` has it: in fp32 no state has codes."""
    row = ALGORITHMS[name]
    return row if optimizer_states == "8bit" else replace(row, codes={})


@dataclass(frozen=True)
class GroupSettings:
    """How one group of parameters is updated. algorithm: a name of ALGORITHMS."""

    algorithm: str
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


def rate_notes(config: Config, *, total_batch_size: int, num_steps: int) -> list[str]:
    """Returns that other learning rates learn faster where this was measured (dev/LOG.md): few steps of small batches."""
    is_default = config.optimizer == "muon" and all(
        getattr(config, key) == getattr(Config, key) for key in RATES_OF_DEPTH
    )
    if not is_default or total_batch_size > SMALL_BATCH or num_steps > FEW_STEPS:
        return []
    about = f"the learning rates are made for {REFERENCE_BATCH:,} tokens a step"
    faster = f"{format_flags(SMALL_BATCH_RATES)}, those of `tiny`"
    return [f"{about}; a few hundred steps of {total_batch_size:,} learn faster with {faster}"]


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
    """Returns the settings of each group of plan/shapes.py. Learning rates are given at the reference, and scaled here."""
    row = ALGORITHMS[optimizer]
    batch = math.sqrt(total_batch_size / REFERENCE_BATCH)
    width = (model.n_embd / REFERENCE_WIDTH) ** -0.5
    lr = (row.matrix_lr if matrix_lr is None else matrix_lr) * batch * (width if row.lr_falls_with_width else 1.0)
    decay = row.matrix_weight_decay
    if decay is None:
        reference_tokens = tokens_per_param * reference_params(model)
        decay = weight_decay * batch * reference_tokens / (total_batch_size * num_steps)
        if lr:  # a step takes lr x decay of a weight: in a run of a few steps it would be more than all of it
            decay = min(decay, MAX_DECAY_OF_STEP / lr)

    def others(lr: float, betas: tuple[float, float], weight_decay: float) -> GroupSettings:
        return GroupSettings(OTHERS, lr, betas, EPS, weight_decay)

    return {
        MATRIX: GroupSettings(row.name, lr, row.matrix_betas, EPS, decay),
        HEAD: others(unembedding_lr * batch * width, (0.8, 0.96), 0.01),
        "wte": others(embedding_lr * batch * width, (0.8, 0.995), 0.001),
        "value_embeds": others(embedding_lr / 2 * batch * width, (0.8, 0.995), 0.01),
        "resid_lambdas": others(0.005 * batch, (0.8, 0.95), 0.05),
        "x0_lambdas": others(0.5 * batch, (0.96, 0.95), 0.0),
        # nanochat has 0.2 for every batch; with 1,024 tokens a step that spoils the first third of a run (dev/LOG.md)
        "smear": others(0.2 * min(1.0, batch), (0.8, 0.95), 0.0),
    }
