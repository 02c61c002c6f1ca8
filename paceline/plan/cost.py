"""
FLOPs, messages and updates of a training step, from shapes alone. Pure arithmetic: no torch, no GPU, no clock.

PaLM, arXiv 2204.02311, appendix B. Attention counts the whole window, the causal half is not taken off, as nanochat counts it:
an MFU here compares with those published.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from paceline.config import ModelConfig
from paceline.plan.algorithms import ALGORITHMS
from paceline.plan.precision import LowPrecision
from paceline.plan.shapes import ELEMENT_BYTES, FP32, NARROW, layer_weights, matmul_params, param_shapes, window_sizes
from paceline.plan.sharding import ShardPlan, ddp_buckets, gather_schedule, sends_narrow, shard_plan, shards_weights
from paceline.units import MIB

BACKWARD_PER_FORWARD = 2  # one matmul forward is two backward: by input and by weight
ATTENTION_BLOCK = 128  # queries at once: a smaller block skips more of the causal half but makes smaller matmuls
LOGITS_MIB = 512  # of a chunk of the loss: from here on, larger ones were not faster


def forward_passes(model: ModelConfig, rung: bool | str) -> tuple[float, float, float]:
    """Returns by how much activation checkpointing lengthens attention, products and elementwise ops.

    A forward is a third of a layer's work. Of an MLP the first product and ReLU^2, a quarter of the elementwise ops, are repeated.
    """
    if rung is True:
        return 4 / 3, 4 / 3, 4 / 3
    product = 4 * model.n_embd**2 / layer_weights(model) if rung == "mlp" else 0.0
    return 1.0, 1 + product / 3, 1 + (1 / 4 if rung else 0.0) / 3


def flops_per_token(model: ModelConfig) -> int:
    """Returns the FLOPs to train on one token, forward and backward; a multiply-add counts as two."""
    weights = 2 * matmul_params(model)
    scores = 4 * model.n_head * model.head_dim * sum(window_sizes(model))  # q @ k and att @ v
    return (1 + BACKWARD_PER_FORWARD) * (weights + scores)


def mfu(tok_per_sec: float, flops_per_token: int, peak_flops: float | None) -> float | None:
    """Returns the share of one device's peak, 0 to 1; None where the peak is unknown. tok_per_sec is that of one device."""
    return tok_per_sec * flops_per_token / peak_flops if peak_flops else None


@lru_cache(maxsize=256)
def attention_pairs(num_tokens: int, window: int, *, device: str) -> int:
    """Returns the pairs of query and key of one head in one row that a kernel computes, whole blocks of queries at a time."""
    total = 0
    for queries, keys in attention_blocks(num_tokens, window):
        # a GPU's kernel takes whole blocks of keys too
        first = keys.start if device == "cpu" else keys.start // ATTENTION_BLOCK * ATTENTION_BLOCK
        total += (queries.stop - queries.start) * (keys.stop - first)
    return total


def attention_blocks(num_tokens: int, window: int) -> Iterator[tuple[slice, slice]]:
    """Yields each block of queries, and the keys that any of them sees: itself and the window - 1 tokens before each query."""
    for start in range(0, num_tokens, ATTENTION_BLOCK):
        end = min(start + ATTENTION_BLOCK, num_tokens)
        yield slice(start, end), slice(max(0, start - window + 1), end)


@dataclass(frozen=True)
class RunSetup:
    """What the memory and the time of a step both depend on. world_size counts the ranks of all hosts.

    offload: "optimizer" where masters and states are in the host's memory. optimizer_states: the config's, fp32 or 8bit.
    """

    model: ModelConfig
    device: str
    world_size: int
    precision: str
    optimizer: str
    shard: str
    device_batch_size: int
    grad_accum_steps: int
    activation_checkpointing: bool | str = False  # of plan/shapes.py: RUNGS
    logits_budget_bytes: int = LOGITS_MIB * MIB
    offload: str = "none"
    optimizer_states: str = "fp32"
    low_precision: LowPrecision | None = None  # of the blocks' products; all else is in `precision`

    @cached_property
    def num_tokens(self) -> int:
        """The tokens of one micro-step on one device."""
        return self.device_batch_size * self.model.sequence_len

    @cached_property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.precision]

    @cached_property
    def shards_weights(self) -> bool:
        """Whether each rank has a part of the weights alone, and gathers the others when it uses them."""
        return shards_weights(world_size=self.world_size, shard=self.shard)

    @cached_property
    def sends_narrow(self) -> bool:
        """Whether gradients are sent in bf16."""
        bf16, accum = self.precision == "bf16", self.grad_accum_steps
        return sends_narrow(bf16=bf16, grad_accum_steps=accum, world_size=self.world_size, shard=self.shard)

    @cached_property
    def sent_bytes(self) -> int:
        """Bytes of an element of the gradients that autograd leaves, as they are sent."""
        return NARROW if self.sends_narrow else FP32

    @cached_property
    def layout(self) -> ShardPlan:
        """Which rank owns what."""
        return layout(self.model, self.world_size, self.optimizer, self.shard)

    @cached_property
    def of_states(self) -> "RunSetup":
        """What a rank's states and their update depend on: a key for caches. More micro-steps than two change nothing."""
        run = (self.model, self.device, self.world_size, self.precision, self.optimizer, self.shard)
        batch = (1, min(2, self.grad_accum_steps))
        return RunSetup(*run, *batch, offload=self.offload, optimizer_states=self.optimizer_states)


@dataclass(frozen=True)
class Messages:
    """What one rank's step sends: bytes of each collective over all ranks, in the order in which they start."""

    reduce_scatter: tuple[int, ...]
    all_gather: tuple[int, ...]
    all_reduce: tuple[int, ...]


def step_messages(setup: RunSetup) -> Messages:
    """Returns a step's messages: gradients to owners, new weights from them, small tensors to all; under DDP every gradient.

    Sharded weights are sent for each micro-step, and so are its gradients.
    """
    if setup.world_size == 1:
        return Messages((), (), ())
    shapes = param_shapes(setup.model)
    if setup.shard == "none":
        return Messages((), (), ddp_buckets(shapes))
    plan = setup.layout
    numels = [bucket.segment * setup.world_size for bucket in plan.buckets]
    small = FP32 * sum(shape.numel for shape in plan.replicated)
    gathered = sums = tuple(range(len(numels)))
    if setup.shards_weights:
        schedule = gather_schedule(plan, shapes, checkpointing=setup.activation_checkpointing)
        gathered = tuple(number for moment in schedule for number in moment.gather) * setup.grad_accum_steps
        sums = tuple(number for moment in schedule for number in moment.complete) * setup.grad_accum_steps
    return Messages(
        tuple(setup.sent_bytes * numels[number] for number in sums),
        tuple(setup.element_bytes * numels[number] for number in gathered),
        (small,),
    )


def update_work(setup: RunSetup) -> tuple[tuple[tuple[int, ...], ...], int]:
    """Returns what the rank with the most FLOPs updates: shapes of its whole matrices, and elements that are updated by rows."""
    return _update_work(setup.of_states)


@lru_cache(maxsize=256)
def _update_work(setup: RunSetup) -> tuple[tuple[tuple[int, ...], ...], int]:
    if setup.shard == "none":
        return (), sum(shape.numel for shape in param_shapes(setup.model))
    plan, flops = setup.layout, ALGORITHMS[setup.optimizer].flops
    whole = [bucket for bucket in plan.buckets if bucket.whole]
    owned = [
        tuple(share.param.shape for bucket in whole for share in bucket.shares(rank))
        for rank in range(setup.world_size)
    ]
    rows = sum(bucket.segment for bucket in plan.buckets if not bucket.whole)
    small = sum(shape.numel for shape in plan.replicated)
    return max(owned, key=lambda shapes: sum(map(flops, shapes))), rows + small


@lru_cache(maxsize=64)
def layout(model: ModelConfig, world_size: int, optimizer: str, shard: str) -> ShardPlan:
    """Returns the shard plan of a model, computed once in a process."""
    return shard_plan(param_shapes(model), world_size=world_size, optimizer=optimizer, shard=shard)
