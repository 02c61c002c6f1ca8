"""
What a link between ranks should give, what it gave, which one is at fault, and what it costs a training step.

Pure: figures in, figures and words out; `paceline comm` (launch/comm.py) brings the figures. Algorithm and bus bandwidth are
nccl-tests' (its doc/PERFORMANCE.md): bytes / seconds, and that times what a collective must move over the slowest link, so
that it compares with the link at any number of ranks. Link rates are one direction, from the PCI-SIG's and NVIDIA's tables.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from paceline.plan.planner import Plan
from paceline.plan.shapes import num_params, param_shapes
from paceline.plan.sharding import shard_plan

PCIE_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
NVLINK_BYTES_PER_S = {
    (7, 0): 25e9,
    (8, 0): 25e9,
    (8, 6): 14.06e9,
    (9, 0): 25e9,
    (10, 0): 50e9,
}  # one link, by capability
GOOD_SHARE = 0.7  # cards that reach each other directly give 75 to 90 % of the link
FAIR_SHARE = 0.4  # through host memory every byte crosses two links: 45 to 60 %
ASSUMED_MFU = 0.45  # of a well-set-up run, where nothing was measured
ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}

Wrong = Mapping[str, Any]  # one wrong result, as train/selftest.py records it


@dataclass(frozen=True)
class Link:
    """bytes_per_s: one direction, None where nothing is known to hold a measurement against."""

    name: str
    bytes_per_s: float | None


@dataclass(frozen=True)
class Fit:
    """seconds = latency_s + bytes / bytes_per_s."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True)
class StepTraffic:
    """Bytes of each message of one optimizer step, by collective."""

    messages: Mapping[str, tuple[int, ...]]

    def seconds(self, fits: Mapping[str, Fit]) -> float:
        """One after the other, with nothing hidden behind compute."""
        return sum(fits[name].seconds(size) for name, sizes in self.messages.items() for size in sizes)

    def bus_bytes(self, world_size: int) -> float:
        return sum(bus_factor(name, world_size) * sum(sizes) for name, sizes in self.messages.items())


def bus_factor(collective: str, world_size: int) -> float:
    """Bus over algorithm bandwidth. The bytes of reduce_scatter and all_gather are those of all ranks together."""
    if collective == "all_reduce":
        return 2 * (world_size - 1) / world_size
    if collective in ("reduce_scatter", "all_gather"):
        return (world_size - 1) / world_size
    assert collective in ("broadcast", "p2p"), collective
    return 1.0


def fit_line(points: Sequence[tuple[int, float]]) -> Fit:
    """Through (bytes, seconds), by least squares of the relative error: small messages count as much as large ones."""
    weights = [1 / seconds**2 for _, seconds in points]
    mean_bytes = sum(w * size for w, (size, _) in zip(weights, points, strict=True)) / sum(weights)
    mean_s = sum(w * seconds for w, (_, seconds) in zip(weights, points, strict=True)) / sum(weights)
    spread = sum(w * (size - mean_bytes) ** 2 for w, (size, _) in zip(weights, points, strict=True))
    joint = sum(w * (size - mean_bytes) * (s - mean_s) for w, (size, s) in zip(weights, points, strict=True))
    if joint <= 0:  # one size alone, or time does not grow with size
        size, seconds = max(points)
        return Fit(0.0, size / seconds)
    return Fit(max(0.0, mean_s - joint / spread * mean_bytes), spread / joint)


def link_of_gpus(one: Mapping[str, Any], other: Mapping[str, Any]) -> Link:
    """Between two of facts' `gpus`: NVLink where both have it, else the narrower of their PCIe links.

    PCIe's generation is the highest that card and slot agree on: an idle card lowers the present one.
    """
    nvlinks, capability = min(one["nvlinks"] or 0, other["nvlinks"] or 0), tuple(one["capability"] or ())
    if nvlinks:
        per_link = NVLINK_BYTES_PER_S.get(capability)
        return Link(f"{nvlinks} NVLinks", None if per_link is None else nvlinks * per_link)
    ports = [gpu["pcie"] for gpu in (one, other)]
    known = [p for p in ports if p and p["generation_max"] in PCIE_LANE_BYTES_PER_S and p["width"]]
    if len(known) < 2:
        return Link("PCIe of unknown generation or width", None)
    rate, generation, width = min(
        (PCIE_LANE_BYTES_PER_S[p["generation_max"]] * p["width"], p["generation_max"], p["width"]) for p in known
    )
    return Link(f"PCIe {generation}.0 x{width}", rate)


def link_of_interface(interface: Mapping[str, Any]) -> Link:
    """Of one of facts' `network.interfaces`."""
    if interface["loopback"]:
        return Link("loopback", None)
    speed = interface["speed_mbps"]
    if not speed:
        return Link(f"{interface['name']}, speed unknown", None)
    return Link(f"{speed / 1000:g} Gb/s {interface['kind']}", speed * 1e6 / 8)


def link_verdict(link: Link, bytes_per_s: float) -> tuple[float | None, str]:
    """Share of what the link should give, and what to make of it."""
    if link.bytes_per_s is None:
        return None, "nothing known to hold it against"
    share = bytes_per_s / link.bytes_per_s
    if share >= GOOD_SHARE:
        return share, "good"
    if share >= FAIR_SHARE:
        return share, "fair, as through host memory: these cards do not reach each other directly"
    return share, "poor: paceline check looks for a narrow slot, an IOMMU, a slow interface"


def locate(wrong: Sequence[Wrong]) -> str:
    """Whom the wrong results have in common: senders and receivers of single messages first, then pairs, then all."""
    arrows = sorted({(w["sender"], w["rank"]) for w in wrong if w["collective"] == "p2p"})
    pairs = sorted({tuple(sorted(w["ranks"])) for w in wrong if len(w["ranks"]) == 2})
    observers = sorted({w["rank"] for w in wrong})
    if all(w["collective"] == "barrier" for w in wrong):
        return f"ranks {listed(observers)} go through a barrier before all ranks have come to it"
    senders, receivers = {a for a, _ in arrows}, {b for _, b in arrows}
    if len(arrows) > 1 and len(senders) == 1:
        return f"rank {arrows[0][0]} gives wrong results to ranks {listed(sorted(receivers))}"
    if len(arrows) > 1 and len(receivers) == 1:
        return f"rank {arrows[0][1]} gets wrong results from ranks {listed(sorted(senders))}"
    if arrows:
        return f"{listed([f'rank {a} -> rank {b}' for a, b in arrows])} {'gives' if len(arrows) == 1 else 'give'} wrong results"
    if len(observers) == 1:
        return f"rank {observers[0]} alone gets wrong results; what it sends arrives right"
    shown = " and ".join(f"{a}-{b}" for a, b in pairs)
    common = set(observers).intersection(*map(set, pairs)) if len(pairs) > 1 else set()
    if len(common) == 1:
        return f"rank {common.pop()} is in every pair with wrong results: {shown}"
    if pairs:
        return f"wrong results between ranks {shown}; single messages between ranks arrive right"
    return f"only all of ranks {listed(observers)} together get wrong results; every pair by itself is right"


def listed(words: Sequence[object]) -> str:
    """'0, 1 and 2'."""
    *first, last = map(str, words)
    return f"{', '.join(first)} and {last}" if first else last


def step_traffic(plan: Plan) -> StepTraffic:
    """What train/optim.py sends in one step: gradients to their owners, new weights from them, the small rest to all."""
    shapes = param_shapes(plan.model)
    if plan.shard == "none":
        return StepTraffic({"all_reduce": (4 * num_params(plan.model),)})
    split = shard_plan(shapes, world_size=plan.world_size, optimizer=plan.optimizer)
    weight_bytes = ELEMENT_BYTES[plan.precision]
    grad_bytes = 2 if plan.precision == "bf16" and plan.grad_accum_steps == 1 else 4
    numels = [bucket.segment * plan.world_size for bucket in split.buckets]
    return StepTraffic(
        {
            "reduce_scatter": tuple(numel * grad_bytes for numel in numels),
            "all_gather": tuple(numel * weight_bytes for numel in numels),
            "all_reduce": (4 * sum(shape.numel for shape in split.replicated),),
        }
    )


def compute_seconds(plan: Plan, tok_per_sec: float | None) -> tuple[float | None, str]:
    """Of one step without sending, and where the figure is from. tok_per_sec: measured, of one process alone."""
    tokens = plan.total_batch_size / plan.world_size
    if tok_per_sec is not None:
        return tokens / tok_per_sec, f"at {tok_per_sec:,.0f} tok/s in each process"
    if plan.peak_flops is None:
        return None, f"no peak is known for {plan.device_name} in {plan.precision}"
    return tokens * plan.flops_per_token / (ASSUMED_MFU * plan.peak_flops), f"at {ASSUMED_MFU:.0%} of peak, assumed"


def training_cost(plan: Plan, fits: Mapping[str, Fit], *, tok_per_sec: float | None) -> dict[str, Any]:
    """What the measured links mean for a step of `plan`. The share is a limit: sending overlaps with backward in part."""
    traffic = step_traffic(plan)
    sending_s = traffic.seconds(fits)
    computing_s, source = compute_seconds(plan, tok_per_sec)
    return {
        "depth": plan.model.n_layer,
        "total_batch_size": plan.total_batch_size,
        "precision": plan.precision,
        "bytes": sum(sum(sizes) for sizes in traffic.messages.values()),
        "bus_bytes_per_s": traffic.bus_bytes(plan.world_size) / sending_s,
        "sending_s": sending_s,
        "computing_s": computing_s,
        "computing_from": source,
        "waiting_share": None if computing_s is None else sending_s / (sending_s + computing_s),
    }


def sweep_sizes(max_bytes: int) -> list[int]:
    """1 KiB, 4 KiB, 16 KiB, ... and max_bytes itself."""
    sizes = [1024]
    while sizes[-1] * 4 < max_bytes:
        sizes.append(sizes[-1] * 4)
    assert all(a < b for a, b in pairwise(sizes))
    return [*sizes, max_bytes] if max_bytes > sizes[-1] else sizes
