"""
Seconds of one optimizer step, part by part, what limits it, and what that stands on.

The parts are what a rank does: products, attention, the layers' other ops, loss, gradients, update, and what is sent and not
hidden. How much of each there is comes from plan/cost.py, how fast the device does it from plan/speeds.py. A GPU works while its
host prepares the next ops, so the longer of the two counts; a CPU is its own host. Nothing is guessed: a device that is neither
in the table nor measured has no time. What is sent, and what hides it: arXiv 1910.02054 for the bytes, train/optim.py for when.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from paceline.config import ModelConfig
from paceline.plan.assumed import assumed_speeds, with_fused_ops
from paceline.plan.cost import (
    Messages,
    attention_pairs,
    flops_per_token,
    mfu,
    newton_schulz_total_flops,
    step_messages,
    update_work,
    window_sizes,
)
from paceline.plan.gpus import GpuSpec
from paceline.plan.links import Link, link_of_speeds
from paceline.plan.range import Range
from paceline.plan.shapes import has_value_embed, num_params
from paceline.plan.speeds import Speeds

HIDDEN_SHARE = {
    "cuda": 0.8,
    "cpu": 0.0,
}  # of the backward under which gradients are sent; a CPU's copying takes its own time
BACKWARD_SHARE = 2 / 3
RECOMPUTED = 4 / 3  # a layer's forward is done twice
SMALLEST_SPREAD = 0.03


@dataclass(frozen=True)
class StepSetup:
    """All that the time of a step depends on. world_size counts the ranks of all hosts. compile: None is the worker's choice."""

    model: ModelConfig
    device: str
    world_size: int
    precision: str
    optimizer: str
    shard: str
    device_batch_size: int
    grad_accum_steps: int
    activation_checkpointing: bool = False
    compile: bool | None = None
    attention: str = "sdpa"
    spec: GpuSpec | None = None
    threads: int = 1
    link: Link | None = None
    speeds: Speeds | None = None
    hosts: int = 1

    @property
    def compiled(self) -> bool:
        """Left open, a GPU's worker nearly always finds compiling worth it; a CPU's seldom."""
        return self.device == "cuda" if self.compile is None else self.compile

    @property
    def tokens(self) -> int:
        """Of one micro-step on one device."""
        return self.device_batch_size * self.model.sequence_len

    @property
    def total_batch_size(self) -> int:
        return self.tokens * self.grad_accum_steps * self.world_size

    @property
    def key(self) -> str:
        """What a run of it is remembered by."""
        m = self.model
        shape = (
            f"d{m.n_layer} {m.n_embd} {m.n_head}/{m.n_kv_head} x {m.sequence_len} v{m.vocab_size} {m.window_pattern}"
        )
        batch = f"{self.device_batch_size} x {self.grad_accum_steps} x {self.world_size}"
        how = f"{'checkpointed ' if self.activation_checkpointing else ''}{'compiled' if self.compiled else 'eager'}"
        return f"{shape}, {batch}, {self.precision} {self.optimizer} {self.shard} {how}"


@dataclass(frozen=True)
class StepTime:
    """seconds is None where the device is unknown, and with it all that follows.

    parts: expected seconds by name, their sum the step.
    hidden_s: of sending, under other work. exposed_share: of the step, spent waiting for what is sent.
    """

    seconds: Range | None
    parts: Mapping[str, float]
    hidden_s: float
    exposed_share: float | None
    tok_per_sec: Range | None
    mfu: float | None
    limit: str | None
    assumptions: tuple[str, ...]
    uncorrected_s: float | None = None  # without what earlier runs taught: what remember_step compares with


@dataclass(frozen=True)
class Sending:
    """Of one step. gradients, weights: seconds that are waited for."""

    gradients: float
    weights: float
    hidden: float


def step_time(setup: StepSetup) -> StepTime:
    speeds = setup.speeds or (
        assumed_speeds(setup.spec, precision=setup.precision, compiled=setup.compiled) if setup.spec else None
    )
    if setup.speeds is not None and setup.device == "cuda" and setup.compiled:
        speeds = with_fused_ops(setup.speeds, precision=setup.precision)
    if setup.device == "cpu" and (link := link_of_speeds(speeds, world_size=setup.world_size)) is not None:
        setup = replace(setup, link=link)  # measured with the trainer's own messages, while all cores were at work
    lacking = _lacking(setup, speeds)
    if speeds is None or lacking:
        return StepTime(None, {}, 0.0, None, None, None, None, (lacking,))
    micro = micro_step_parts(setup, speeds)
    device_parts = {name: setup.grad_accum_steps * seconds for name, seconds in micro.items()}
    device_parts["gradients"] = _gradient_seconds(setup, speeds)
    optimizer = _optimizer_seconds(setup, speeds)
    sending = _sending(setup, micro_s=sum(micro.values()), muon_s=optimizer["Muon"])
    computed = sum(device_parts.values())
    host = setup.grad_accum_steps * _host_seconds(setup, speeds)
    waiting_host = host if setup.device == "cpu" else max(0.0, host - computed)
    parts = {
        **device_parts,
        **optimizer,
        "gradients sent": sending.gradients,
        "weights sent": sending.weights,
        "host": waiting_host,
    }
    return _summed(setup, speeds, {name: seconds for name, seconds in parts.items() if seconds > 0}, sending)


def _lacking(setup: StepSetup, speeds: Speeds | None) -> str:
    """Why no time can be given; empty where one can."""
    if speeds is None:
        if setup.device == "cpu":
            return "no time: this CPU was not measured yet"
        who = setup.spec.name if setup.spec else "this card"
        return f"no time: {setup.precision} speed of {who} is in no table and was not measured"
    if speeds.rate("linear", setup.precision, size=setup.model.n_embd) is None:
        return f"no time: {speeds.device_name} was not measured in {setup.precision}"
    if setup.world_size > 1 and setup.link is None:
        return "no time: the link between the devices is unknown; paceline comm measures it, --link names it"
    return ""


def _summed(setup: StepSetup, speeds: Speeds, parts: Mapping[str, float], sending: Sending) -> StepTime:
    plain = sum(parts.values())
    learned = speeds.ratio(setup.key)
    factor, spread = learned or (1.0, speeds.spread)
    shown = {name: factor * seconds for name, seconds in parts.items()}
    total = factor * plain
    link_spread = setup.link.spread if setup.link else 0.0
    sent = shown.get("gradients sent", 0.0) + shown.get("weights sent", 0.0)
    off = max(SMALLEST_SPREAD * total, spread * (total - sent) + link_spread * sent)
    # earlier runs, on a busy machine, may have been off by more than the whole: then as many times less as more
    seconds = Range(total - off if off < total / 2 else total / (1 + off / total), total, total + off)
    tokens = setup.total_batch_size
    speed = Range(tokens / seconds.high, tokens / total, tokens / seconds.low)
    peak = setup.spec.peak_flops.get(setup.precision) if setup.spec else None
    return StepTime(
        seconds,
        shown,
        hidden_s=sending.hidden,
        exposed_share=sent / total,
        tok_per_sec=speed,
        mfu=mfu(speed.expected / setup.world_size, flops_per_token(setup.model), peak),
        limit=_limit(shown),
        assumptions=_assumptions(setup, speeds, learned),
        uncorrected_s=plain,
    )


def micro_step_parts(setup: StepSetup, speeds: Speeds) -> dict[str, float]:
    """Seconds of the device for one forward and backward."""
    model, tokens, width = setup.model, setup.tokens, setup.model.n_embd
    again = RECOMPUTED if setup.activation_checkpointing else 1.0
    q_width, kv_width = model.n_head * model.head_dim, model.n_kv_head * model.head_dim
    layer_weights = width * (2 * q_width + 2 * kv_width + 8 * width)

    def seconds(name: str, amount: float, size: float = 1.0, *, in_precision: bool = True) -> float:
        rate = speeds.rate(name, setup.precision if in_precision else None, size=size)
        return 0.0 if rate is None else amount / rate

    pairs = sum(attention_pairs(model.sequence_len, window, device=setup.device) for window in window_sizes(model))
    pairs *= setup.device_batch_size * model.n_head
    vocab, elements = model.padded_vocab_size, tokens * width
    tables = 1 + sum(has_value_embed(layer, model.n_layer) for layer in range(model.n_layer))
    return {
        "matmuls": again * seconds("linear", 6 * tokens * model.n_layer * layer_weights, width),
        "attention": again
        * (
            seconds("attention_dots", 12 * pairs * model.head_dim, model.sequence_len)
            + seconds("attention_pairs", pairs, model.sequence_len)
        ),
        "elementwise": again * seconds("pointwise", model.n_layer * elements, elements),
        "loss": seconds("head", 6 * elements * vocab, width) + seconds("logits", tokens * vocab, vocab),
        "embeddings": seconds("table", tables * (vocab + tokens) * kv_width, in_precision=False),
    }


def _gradient_seconds(setup: StepSetup, speeds: Speeds) -> float:
    """Passes over gradients beyond those that write them: sums of micro-steps, copies to what is sent, changes of format."""
    numel, narrow = num_params(setup.model), setup.precision != "fp32"
    bytes_moved = 12.0 * (setup.grad_accum_steps - 1)  # read two, write one
    if setup.world_size > 1:
        bytes_moved += 8
    if narrow and setup.shard == "none":
        bytes_moved += 12 * setup.grad_accum_steps  # weights to the narrow format, gradients back
    elif narrow and (setup.grad_accum_steps > 1 or setup.world_size == 1):
        bytes_moved += 6 * setup.grad_accum_steps
    rate = speeds.rate("copy")
    return 0.0 if rate is None else numel * bytes_moved / rate


def _optimizer_seconds(setup: StepSetup, speeds: Speeds) -> dict[str, float]:
    """Of the rank with the most to do. A CPU takes matrices one by one, a GPU those of one shape together."""
    work = update_work(setup.model, world_size=setup.world_size, optimizer=setup.optimizer, shard=setup.shard)
    adamw, muon = speeds.rate("adamw"), 0.0
    for shape in work.matrices:
        short, long = sorted(shape)
        rate = speeds.rate("muon_long" if long > 2 * short else "muon", size=short)
        by_flops = newton_schulz_total_flops(shape) / rate if rate else 0.0
        muon += max(by_flops, speeds.host.get("update", 0.0))
    return {"Muon": muon, "AdamW": work.adamw_elements / adamw if adamw else 0.0}


def _host_seconds(setup: StepSetup, speeds: Speeds) -> float:
    again = RECOMPUTED if setup.activation_checkpointing else 1.0
    return again * setup.model.n_layer * speeds.host["layer"] + speeds.host["micro_step"]


def _sending(setup: StepSetup, *, micro_s: float, muon_s: float) -> Sending:
    """Sums start under the last backward, AdamW's gathers go on under Newton-Schulz; one message is always waited for."""
    if setup.world_size == 1:
        return Sending(0.0, 0.0, 0.0)
    assert setup.link is not None
    messages = step_messages(
        setup.model,
        world_size=setup.world_size,
        optimizer=setup.optimizer,
        shard=setup.shard,
        precision=setup.precision,
        grad_accum_steps=setup.grad_accum_steps,
    )
    summing, gathering = _sending_seconds(messages, setup.link, setup.world_size)
    hidden_share = HIDDEN_SHARE[setup.device]
    buckets = (
        max(1, len(messages.reduce_scatter)) if setup.shard != "none" else 8
    )  # DDP's of 25 MiB, the last alone counts
    backward = hidden_share * BACKWARD_SHARE * micro_s
    gradients = max(summing / buckets, summing - backward)
    weights = max(gathering / buckets, gathering - hidden_share * muon_s)
    return Sending(gradients, weights, summing + gathering - gradients - weights)


def _sending_seconds(messages: Messages, link: Link, world_size: int) -> tuple[float, float]:
    """Of all gradients, and of all weights, with nothing hidden."""
    share = (world_size - 1) / world_size

    def seconds(sizes: tuple[int, ...], rounds: int) -> float:
        return rounds * share * sum(sizes) / link.bytes_per_s + rounds * len(sizes) * link.latency_s

    summing = seconds(messages.reduce_scatter, 1) + seconds(messages.all_reduce, 2)
    return summing, seconds(messages.all_gather, 1)


LIMITS = {
    "compute": ("matmuls", "attention", "Muon"),
    "memory bandwidth": ("elementwise", "embeddings", "gradients", "AdamW"),
    "link": ("gradients sent", "weights sent"),
    "host": ("host",),
}


def _limit(parts: Mapping[str, float]) -> str:
    """What takes most of the step. The loss is a product first."""
    sums = {limit: sum(parts.get(name, 0.0) for name in names) for limit, names in LIMITS.items()}
    sums["compute"] += parts.get("loss", 0.0)
    return max(sums, key=lambda limit: sums[limit])


def _assumptions(setup: StepSetup, speeds: Speeds, learned: tuple[float, float] | None) -> tuple[str, ...]:
    lines = [f"speeds {speeds.source}"]
    if learned is not None:
        lines.append(f"corrected by {learned[0]:.2f}, as {len(speeds.steps)} earlier runs here took")
    if setup.link is not None and setup.world_size > 1:
        rate = f"{setup.link.bytes_per_s / 1e9:.3g} GB/s each way"
        lines.append(f"link {setup.link.name}, {rate}, {setup.link.source}")
        if setup.device == "cuda":
            lines.append(f"{HIDDEN_SHARE['cuda']:.0%} of a backward hides what is sent under it: assumed, not measured")
    if setup.compile is None and setup.device == "cuda":
        lines.append("compiled: the worker tries it before the first step")
    if setup.compile is not False and setup.device == "cpu":
        lines.append("eager: what compiling gains on a CPU was not measured")
    return tuple(lines)
