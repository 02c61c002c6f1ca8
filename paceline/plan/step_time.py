"""
Seconds of one optimizer step, part by part, with what limits it and what the figures stand on.

The parts are what a rank does: products, attention, the layers' other ops, loss, gradients, update, and what is sent and not
hidden. How much of each there is comes from plan/cost.py, how fast the device does it from plan/speeds.py. A GPU works while its
host prepares the next ops, so the longer of the two counts; a CPU is its own host. Nothing is guessed: a device that is neither
in the table nor measured has no time. What is sent, and what hides it: arXiv 1910.02054 for the bytes, train/optim.py for when.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from paceline.plan.activations import chunk_sizes
from paceline.plan.algorithms import ALGORITHMS, OTHERS, with_states
from paceline.plan.cost import (
    LOGITS_MIB,
    RunSetup,
    attention_pairs,
    flops_per_token,
    forward_passes,
    mfu,
    step_messages,
    update_work,
)
from paceline.plan.estimate import Range
from paceline.plan.gpu_table import GpuSpec
from paceline.plan.links import Link, host_link, link_of_speeds
from paceline.plan.offloading import offloaded_batches, staged_seconds
from paceline.plan.precision import Gain, gain_of, precision_name
from paceline.plan.shapes import has_value_embed, layer_weights, num_params, window_sizes
from paceline.plan.sharding import matrix_batches
from paceline.plan.speeds import Speeds, assumed_speeds, with_fused_ops
from paceline.plan.states import codec_bytes
from paceline.units import MIB, format_percent

# of the backward that hides what is sent under it: eager or compiled by block (plan/sharding.py: compiles_by_block), a layer's
# gradients are sent under the layers below (tests/train/test_send_order.py). A CPU's copying takes its own time
HIDDEN_SHARE = {"cuda": 0.8, "cpu": 0.0}
BACKWARD_SHARE = 2 / 3
SMALLEST_SPREAD = 0.03
MOVED = "states moved"  # to the GPU and back, by --offload optimizer
LIMITS = {
    "compute": ("matmuls", "attention", *(row.title for row in ALGORITHMS.values() if row.whole), "loss"),
    "memory bandwidth": (
        "elementwise",
        "embeddings",
        "gradients",
        *(row.title for row in ALGORITHMS.values() if not row.whole),
    ),
    "link": ("gradients sent", "weights sent", MOVED),
    "host": ("host",),
}


@dataclass(frozen=True, kw_only=True)
class StepSetup(RunSetup):
    """All that the time of a step depends on. compile: None is the worker's choice."""

    compile: bool | None = None
    spec: GpuSpec | None = None
    threads: int = 1
    link: Link | None = None
    speeds: Speeds | None = None
    hosts: int = 1

    @property
    def compiled(self) -> bool:
        """Where the worker decides, a GPU's is expected to compile and a CPU's is not."""
        return self.device == "cuda" if self.compile is None else self.compile

    @property
    def moving_link(self) -> Link | None:
        """The link over which masters and states are moved; None where they are not, or where it is not known."""
        if self.offload == "none":
            return None
        return host_link(self.spec, num_gpus=self.world_size // self.hosts)

    @property
    def gain(self) -> Gain | None:
        """Of low products; None where there are none."""
        return gain_of(self.low_precision, self.model, precision=self.precision, speeds=self.speeds)

    @property
    def total_batch_size(self) -> int:
        return self.num_tokens * self.grad_accum_steps * self.world_size

    @property
    def checkpointed(self) -> str:
        """What of the key activation checkpointing is: the rung, where it is not the highest."""
        rung = self.activation_checkpointing
        return "" if rung is False else f"{rung} checkpointed ".removeprefix("True ")

    @property
    def key(self) -> str:
        """The name under which plan/speeds.py keeps how long such a step really took."""
        m = self.model
        shape = (
            f"d{m.n_layer} {m.n_embd} {m.n_head}/{m.n_kv_head} x {m.sequence_len} v{m.vocab_size} {m.window_pattern}"
        )
        batch = f"{self.device_batch_size} x {self.grad_accum_steps} x {self.world_size}"
        how = f"{self.checkpointed}{'compiled' if self.compiled else 'eager'}"
        how += "" if self.offload == "none" else " offloaded"
        how += "" if self.optimizer_states == "fp32" else f" {self.optimizer_states} states"
        return f"{shape}, {batch}, {precision_name(self.precision, self.low_precision)} {self.optimizer} {self.shard} {how}"


@dataclass(frozen=True)
class StepTime:
    """How long a step takes; seconds and all that follows from it are None where the device is unknown.

    parts: expected seconds by name; their sum is the step. hidden_s: sending under other work. exposed_share: of the step, spent
    waiting for what is sent.
    """

    seconds: Range | None
    parts: Mapping[str, float]
    hidden_s: float
    exposed_share: float | None
    tok_per_sec: Range | None
    mfu: float | None
    limit: str | None
    assumptions: tuple[str, ...]
    uncorrected_s: float | None = None  # without the correction by earlier runs: what remember_step compares with


def step_time(setup: StepSetup) -> StepTime:
    """Returns how long a step takes, from the measured speeds or else the data sheet's."""
    speeds = setup.speeds or (
        assumed_speeds(setup.spec, precision=setup.precision, compiled=setup.compiled) if setup.spec else None
    )
    if setup.speeds is not None and setup.device == "cuda" and setup.compiled:
        speeds = with_fused_ops(setup.speeds, precision=setup.precision)
    inner = link_of_speeds(speeds, world_size=setup.world_size) if setup.device == "cpu" and setup.hosts == 1 else None
    if inner is not None:
        setup = replace(setup, link=inner)  # measured with the trainer's own messages, while all cores were at work
    missing = _missing_fact(setup, speeds)
    if speeds is None or missing:
        return StepTime(None, {}, 0.0, None, None, None, None, (missing,))
    micro = micro_step_parts(setup, speeds)
    device_parts = {name: setup.grad_accum_steps * seconds for name, seconds in micro.items()}
    device_parts["gradients"] = _gradient_seconds(setup, speeds)
    optimizer = _optimizer_seconds(setup, speeds)
    whole_s = sum(optimizer.get(row.title, 0.0) for row in ALGORITHMS.values() if row.whole)
    passes, *_ = forward_passes(setup.model, setup.activation_checkpointing)
    host_micro = passes * setup.model.n_layer * speeds.host["layer"] + speeds.host["micro_step"]
    # a GPU that waits for the host sends meanwhile
    micro_s = sum(micro.values()) if setup.device == "cpu" else max(host_micro, sum(micro.values()))
    gradients_s, weights_s, hidden_s = _message_seconds(setup, micro_s=micro_s, whole_s=whole_s)
    moved_s, moved_hidden_s = moving_seconds(setup, speeds)
    host = setup.grad_accum_steps * host_micro
    waiting_host = host if setup.device == "cpu" else max(0.0, host - sum(device_parts.values()))
    parts = {
        **device_parts,
        **optimizer,
        "gradients sent": gradients_s,
        "weights sent": weights_s,
        MOVED: moved_s,
        "host": waiting_host,
    }
    parts = {name: seconds for name, seconds in parts.items() if seconds > 0}
    return _sum_parts(setup, speeds, parts, hidden_s + moved_hidden_s)


def _missing_fact(setup: StepSetup, speeds: Speeds | None) -> str:
    """Returns why there is no time; empty where there is one."""
    if speeds is None:
        if setup.device == "cpu":
            return "no time: this CPU was not measured yet"
        who = setup.spec.name if setup.spec else "this card"
        return f"no time: {setup.precision} speed of {who} is in no table and was not measured"
    if speeds.rate("linear", setup.precision, size=setup.model.n_embd) is None:
        return f"no time: {speeds.device_name} was not measured in {setup.precision}"
    if setup.gain and not setup.gain.is_known:
        return f"no time: how long {setup.gain.low.text} take has not been measured"
    if setup.world_size > 1 and setup.link is None:
        return "no time: the link between the devices is unknown; paceline comm measures it, --link names it"
    if setup.offload != "none" and setup.moving_link is None:
        return f"no time: how fast {speeds.device_name} reaches its host's memory is in no table"
    return ""


def _sum_parts(setup: StepSetup, speeds: Speeds, parts: Mapping[str, float], hidden_s: float) -> StepTime:
    uncorrected = sum(parts.values())
    correction = speeds.ratio(setup.key, predicted_s=uncorrected)
    factor, spread = correction or (1.0, speeds.spread)
    corrected = {name: factor * seconds for name, seconds in parts.items()}
    total = factor * uncorrected
    link_spread = max((link.spread for link in (setup.link, setup.moving_link) if link), default=0.0)
    sent = sum(corrected.get(name, 0.0) for name in LIMITS["link"])
    spread += setup.gain.spread if setup.gain else 0.0
    off = max(SMALLEST_SPREAD * total, spread * (total - sent) + link_spread * sent)
    # earlier runs, on a busy machine, may have been off by more than the whole: then as many times less as more
    seconds = Range(total - off if off < total / 2 else total / (1 + off / total), total, total + off)
    tokens = setup.total_batch_size
    speed = Range(tokens / seconds.high, tokens / total, tokens / seconds.low)
    by_limit = {limit: sum(corrected.get(name, 0.0) for name in names) for limit, names in LIMITS.items()}
    peak = setup.spec.peak_flops.get(setup.precision) if setup.spec else None
    return StepTime(
        seconds,
        corrected,
        hidden_s=hidden_s,
        exposed_share=sent / total,
        tok_per_sec=speed,
        mfu=mfu(speed.expected / setup.world_size, flops_per_token(setup.model), peak),
        limit=max(by_limit, key=lambda limit: by_limit[limit]),
        assumptions=_assumptions(setup, speeds, correction),
        uncorrected_s=uncorrected,
    )


def micro_step_parts(setup: StepSetup, speeds: Speeds) -> dict[str, float]:
    """Returns the device's seconds for one forward and backward, by part."""
    model, tokens, width = setup.model, setup.num_tokens, setup.model.n_embd
    attention, products, elementwise = forward_passes(model, setup.activation_checkpointing)
    kv_width = model.n_kv_head * model.head_dim

    def seconds(name: str, amount: float, size: float = 1.0, *, in_precision: bool = True) -> float:
        return speeds.seconds(name, amount, setup.precision if in_precision else None, size=size)

    pairs = sum(attention_pairs(model.sequence_len, window, device=setup.device) for window in window_sizes(model))
    pairs *= setup.device_batch_size * model.n_head
    dots = seconds("attention_dots", 12 * pairs * model.head_dim, model.sequence_len)
    vocab, elements = model.padded_vocab_size, tokens * width
    tables = 1 + sum(has_value_embed(layer, model.n_layer) for layer in range(model.n_layer))
    moved = _extra_chunks(setup) * vocab * width * (12 if setup.precision != "fp32" else 8)
    parts = {
        "matmuls": products * seconds("linear", 6 * tokens * model.n_layer * layer_weights(model), width),
        "attention": attention * (dots + seconds("attention_pairs", pairs, model.sequence_len)),
        "elementwise": elementwise * seconds("pointwise", model.n_layer * elements, elements),
        "loss": seconds("head", 6 * elements * vocab, width)
        + seconds("logits", tokens * vocab, vocab)
        + seconds("copy", moved, in_precision=False),
        "embeddings": seconds("table", tables * (vocab + tokens) * kv_width, in_precision=False),
    }
    return setup.gain.applied(parts) if setup.gain else parts


def _extra_chunks(setup: StepSetup) -> int:
    """Returns the loss's chunks beyond those of LOGITS_MIB, with which its speed is measured: each adds to lm_head's gradient."""

    usual = replace(setup, logits_budget_bytes=LOGITS_MIB * MIB)
    count, usual_count = (-(-setup.num_tokens // chunk_sizes(one)[0]) for one in (setup, usual))
    return max(0, count - usual_count)


def _gradient_seconds(setup: StepSetup, speeds: Speeds) -> float:
    """Returns the time of passes over gradients beyond those that write them: sums of micro-steps, copies into messages, casts."""
    numel, narrow = num_params(setup.model), setup.precision != "fp32"
    bytes_moved = 12.0 * (setup.grad_accum_steps - 1)  # read two, write one
    if setup.world_size > 1:
        bytes_moved += 8
    if narrow and setup.shard == "none":
        bytes_moved += 12 * setup.grad_accum_steps  # weights to the narrow format, gradients back
    elif narrow and (setup.grad_accum_steps > 1 or setup.world_size == 1):
        bytes_moved += 6 * setup.grad_accum_steps
    return speeds.seconds("copy", numel * bytes_moved)


def _optimizer_seconds(setup: StepSetup, speeds: Speeds) -> dict[str, float]:
    """Returns the update's time on the rank with the most to do, by algorithm."""
    shapes, elements = update_work(setup)
    matrices_s = 0.0
    for batch in matrix_batches(shapes, together=setup.device != "cpu"):
        matrices_s += _matrices_seconds(setup, speeds, shapes[batch.start], len(batch))
    elementwise, rows_s = _rows_seconds(setup, speeds, elements)
    return {ALGORITHMS[setup.optimizer].title: matrices_s, elementwise: rows_s}


def _matrices_seconds(setup: StepSetup, speeds: Speeds, shape: tuple[int, ...], count: int) -> float:
    """Returns the time of one call that updates `count` whole matrices."""
    row = with_states(setup.optimizer, setup.optimizer_states)
    by_flops = speeds.seconds(row.rate_name(shape), count * row.flops(shape), size=min(shape))
    coded = count * codec_bytes(row, prod(shape))
    return max(by_flops + speeds.seconds("copy", coded), speeds.host.get("update", 0.0))


def _rows_seconds(setup: StepSetup, speeds: Speeds, elements: int) -> tuple[str, float]:
    """Returns the algorithm that updates most of what is cut by rows, and its time for so many elements."""
    name = OTHERS if ALGORITHMS[setup.optimizer].whole else setup.optimizer
    elementwise = with_states(name, setup.optimizer_states)
    [rate_name] = elementwise.rates
    coded = codec_bytes(elementwise, elements)
    return elementwise.title, speeds.seconds(rate_name, elements) + speeds.seconds("copy", coded)


def moving_seconds(setup: StepSetup, speeds: Speeds) -> tuple[float, float]:
    """Returns the seconds for which an update waits for offloaded masters and states, and those of moving under its work."""
    batches = offloaded_batches(setup)
    if not batches or setup.moving_link is None:
        return 0.0, 0.0
    updates = [
        _rows_seconds(setup, speeds, batch.numel)[1]
        if batch.shape is None
        else _matrices_seconds(setup, speeds, batch.shape, batch.count)
        for batch in batches
    ]
    moves = [batch.moved_bytes / setup.moving_link.bytes_per_s for batch in batches]
    waiting = staged_seconds(moves, updates) - sum(updates)
    return waiting, max(0.0, 2 * sum(moves) - waiting)


def _message_seconds(setup: StepSetup, *, micro_s: float, whole_s: float) -> tuple[float, float, float]:
    """Returns the seconds that gradients and weights are waited for, and the seconds of sending under other work.

    Sums start under the last backward, gathers of rows continue under the updates of matrices; the last message is waited for.
    Sharded weights are gathered under every forward, where each is sent once, and backward, together with the gradients.
    """
    if setup.world_size == 1:
        return 0.0, 0.0, 0.0
    summing, gathering, last_share = sending_seconds(setup)
    hidden_share = HIDDEN_SHARE[setup.device]
    if setup.shards_weights:
        forward_s = summing * setup.element_bytes / setup.sent_bytes
        hidden_s = hidden_share * setup.grad_accum_steps * micro_s
        first_s = setup.grad_accum_steps * forward_s * last_share  # each micro-step begins with a message
        weights = max(first_s, forward_s - (1 - BACKWARD_SHARE) * hidden_s)
        backward_s = summing + gathering - forward_s
        gradients = max(summing * last_share, backward_s - BACKWARD_SHARE * hidden_s)
        return gradients, weights, summing + gathering - gradients - weights
    backward = hidden_share * BACKWARD_SHARE * micro_s
    gradients = max(summing * last_share, summing - backward)
    weights = max(gathering * last_share, gathering - hidden_share * whole_s)
    return gradients, weights, summing + gathering - gradients - weights


def sending_seconds(setup: StepSetup) -> tuple[float, float, float]:
    """Returns the seconds of sending gradients and weights, and the share of the last message, which nothing hides."""
    assert setup.link is not None
    messages = step_messages(setup)
    share, link = (setup.world_size - 1) / setup.world_size, setup.link

    def seconds(sizes: tuple[int, ...], rounds: int) -> float:
        return rounds * share * sum(sizes) / link.bytes_per_s + rounds * len(sizes) * link.latency_s

    summing = seconds(messages.reduce_scatter, 1) + seconds(messages.all_reduce, 2)
    is_ddp = setup.shard == "none"
    last_s = seconds(messages.all_reduce[-1:], 2) if is_ddp else summing / max(1, len(messages.reduce_scatter))
    return summing, seconds(messages.all_gather, 1), last_s / summing


def _assumptions(setup: StepSetup, speeds: Speeds, correction: tuple[float, float] | None) -> tuple[str, ...]:
    lines = [f"speeds {speeds.source}"]
    if correction is not None:
        lines.append(f"corrected by {correction[0]:.2f}, as {len(speeds.steps)} earlier runs here took")
    if setup.link is not None and setup.world_size > 1:
        rate = f"{setup.link.bytes_per_s / 1e9:.3g} GB/s each way"
        lines.append(f"link {setup.link.name}, {rate}, {setup.link.source}")
        if setup.device == "cuda":
            lines.append(
                f"{format_percent(HIDDEN_SHARE['cuda'])} of a backward hides what is sent under it: assumed, not measured"
            )
    if (to_host := setup.moving_link) is not None:
        rate = f"{to_host.bytes_per_s / 1e9:.3g} GB/s each way"
        moved = "states" if setup.precision == "fp32" else "masters and states"
        lines.append(f"{moved} moved over {to_host.name}, {rate}, {to_host.source}")
    lines += [setup.gain.note] if setup.gain else []
    if setup.compile is None and setup.device == "cuda":
        lines.append("compiled: the worker tries it before the first step")
    if setup.compile is not False and setup.device == "cpu":
        lines.append("eager: what compiling gains on a CPU was not measured")
    return tuple(lines)
