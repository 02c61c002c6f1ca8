"""
What a link between ranks should reach and what it reached, which rank is at fault, and what the traffic costs a training step.

Pure: figures in, figures and text out; comm/session.py supplies the figures. Algorithm and bus bandwidth are defined as in
nccl-tests (doc/PERFORMANCE.md): bytes / seconds, and the same times a factor for what the collective must move over the slowest
link, which makes it comparable with the link at any number of ranks. Link rates are for one direction, from the PCI-SIG's and
NVIDIA's tables.
"""

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count, takewhile
from typing import Any

from paceline.plan.cost import step_messages
from paceline.plan.links import PCIE_LANE_BYTES_PER_S
from paceline.plan.planner import Plan
from paceline.rundir import utc_now
from paceline.units import format_bytes, format_list, format_percent, format_ranks

NVLINK_BYTES_PER_S = {
    (7, 0): 25e9,
    (8, 0): 25e9,
    (8, 6): 14.06e9,
    (9, 0): 25e9,
    (10, 0): 50e9,
}  # one link, by capability
GOOD_SHARE = 0.7  # cards that reach each other directly give 75 to 90 % of the link
FAIR_SHARE = 0.4  # through host memory every byte crosses two links: 45 to 60 %
ASSUMED_MFU = 0.45  # of a well-configured run, where nothing was measured


@dataclass(frozen=True)
class LinkRate:
    """bytes_per_s: in one direction; None where no reference is known. network: between hosts."""

    name: str
    bytes_per_s: float | None
    network: bool = False


def bus_factor(collective: str, world_size: int) -> float:
    """Bus bandwidth divided by algorithm bandwidth. The bytes of reduce_scatter and all_gather are those of all ranks together."""
    if collective in ("broadcast", "p2p"):
        return 1.0
    return {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}[collective] * (world_size - 1) / world_size


def fit_line(points: Sequence[tuple[int, float]]) -> dict[str, float]:
    """Returns the line seconds = latency_s + bytes / bytes_per_s through (bytes, seconds).

    It has the least squares of the relative error: small messages count as much as large ones.
    """
    weights = [1 / seconds**2 for _, seconds in points]
    mean_bytes = sum(w * size for w, (size, _) in zip(weights, points, strict=True)) / sum(weights)
    mean_s = sum(w * seconds for w, (_, seconds) in zip(weights, points, strict=True)) / sum(weights)
    spread = sum(w * (size - mean_bytes) ** 2 for w, (size, _) in zip(weights, points, strict=True))
    joint = sum(w * (size - mean_bytes) * (s - mean_s) for w, (size, s) in zip(weights, points, strict=True))
    if joint <= 0:  # one size alone, or time does not grow with size
        size, seconds = max(points)
        return {"latency_s": 0.0, "bytes_per_s": size / seconds}
    return {"latency_s": max(0.0, mean_s - joint / spread * mean_bytes), "bytes_per_s": spread / joint}


def link_of_gpus(one: Mapping[str, Any], other: Mapping[str, Any]) -> LinkRate:
    """Returns the link between two of facts' `gpus`: NVLink where both have it, else the narrower of their PCIe links.

    The PCIe generation is the highest that card and slot support: an idle card lowers its current one.
    """
    nvlinks, capability = min(one["nvlinks"] or 0, other["nvlinks"] or 0), tuple(one["capability"] or ())
    if nvlinks:
        per_link = NVLINK_BYTES_PER_S.get(capability)
        return LinkRate(f"{nvlinks} NVLinks", None if per_link is None else nvlinks * per_link)
    ports = [gpu["pcie"] for gpu in (one, other)]
    known = [p for p in ports if p and p["generation_max"] in PCIE_LANE_BYTES_PER_S and p["width"]]
    if len(known) < 2:
        return LinkRate("PCIe of unknown generation or width", None)
    rate, generation, width = min(
        (PCIE_LANE_BYTES_PER_S[p["generation_max"]] * p["width"], p["generation_max"], p["width"]) for p in known
    )
    return LinkRate(f"PCIe {generation}.0 x{width}", rate)


def link_verdict(link: LinkRate, bytes_per_s: float) -> tuple[float | None, str]:
    """Returns the share of the link's rate that was reached, and a judgement."""
    if link.bytes_per_s is None:
        return None, "no reference rate is known"
    share = bytes_per_s / link.bytes_per_s
    if share >= GOOD_SHARE:
        return share, "good"
    if link.network:
        return share, "slow: paceline check --hosts compares the interfaces and the path"
    if share >= FAIR_SHARE:
        return share, "fair, as through host memory: these cards do not access each other directly"
    return share, "poor: paceline check searches for a narrow slot, an IOMMU or a slow interface"


def locate(wrong: Sequence[Mapping[str, Any]]) -> str:
    """Names the rank that all wrong results have in common: by single messages first, then by pairs, then by all ranks."""
    arrows = sorted({(w["sender"], w["rank"]) for w in wrong if w["collective"] == "p2p"})
    pairs = sorted({tuple(sorted(w["ranks"])) for w in wrong if len(w["ranks"]) == 2})
    receivers = sorted({w["rank"] for w in wrong})
    if all(w["collective"] == "barrier" for w in wrong):
        verb = "passes" if len(receivers) == 1 else "pass"
        return f"{format_ranks(receivers)} {verb} the barrier before all ranks have reached it"
    arrow_from, arrow_to = {a for a, _ in arrows}, {b for _, b in arrows}
    if len(arrows) > 1 and len(arrow_from) == 1:
        return f"rank {arrows[0][0]} sends wrong results to {format_ranks(sorted(arrow_to))}"
    if len(arrows) > 1 and len(arrow_to) == 1:
        return f"rank {arrows[0][1]} receives wrong results from {format_ranks(sorted(arrow_from))}"
    if arrows:
        verb = "gives" if len(arrows) == 1 else "give"
        return f"{format_list(f'rank {a} -> rank {b}' for a, b in arrows)} {verb} wrong results"
    if len(receivers) == 1:
        return f"rank {receivers[0]} alone gets wrong results; what it sends arrives right"
    pair_names = format_list(f"{a}-{b}" for a, b in pairs)
    common = set(receivers).intersection(*map(set, pairs)) if len(pairs) > 1 else set()
    if len(common) == 1:
        return f"rank {common.pop()} is in every pair with wrong results: {pair_names}"
    if pairs:
        return f"wrong results between ranks {pair_names}; single messages between ranks arrive right"
    return f"only {format_ranks(receivers)} together get wrong results; every pair by itself is right"


def with_hosts(text: str, hosts: Mapping[str, Sequence[int]]) -> str:
    """Returns a text about ranks with the host of each rank that it names."""
    named = set(map(int, re.findall(r"\d+", text)))
    places = [f"rank {rank} on {name}" for name, ranks in hosts.items() for rank in ranks if rank in named]
    return f"{text} ({', '.join(places)})" if places else text


def step_traffic(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Returns the bytes of each message of one optimizer step, by collective."""
    return asdict(step_messages(plan))


def compute_seconds(plan: Plan, tok_per_sec: float | None) -> tuple[float | None, str]:
    """Returns the compute time of one step and where the figure is from. tok_per_sec: measured in one process alone."""
    tokens = plan.total_batch_size / plan.world_size
    if tok_per_sec is not None:
        return tokens / tok_per_sec, f"at {tok_per_sec:,.0f} tok/s in each process"
    if plan.peak_flops is None:
        return None, f"no peak FLOPS is known for {plan.device_name} in {plan.precision}"
    return tokens * plan.flops_per_token / (
        ASSUMED_MFU * plan.peak_flops
    ), f"at {format_percent(ASSUMED_MFU)} of peak, assumed"


def training_cost(plan: Plan, fits: Mapping[str, Mapping[str, Any]], *, tok_per_sec: float | None) -> dict[str, Any]:
    """What the measured links mean for a step of `plan`. waiting_share is an upper limit: backward hides part of the traffic."""
    traffic = step_traffic(plan)
    sending_s = sum(
        fits[name]["latency_s"] + size / fits[name]["bytes_per_s"] for name, sizes in traffic.items() for size in sizes
    )
    bus_bytes = sum(bus_factor(name, plan.world_size) * sum(sizes) for name, sizes in traffic.items())
    computing_s, source = compute_seconds(plan, tok_per_sec)
    return {
        "depth": plan.model.n_layer,
        "total_batch_size": plan.total_batch_size,
        "precision": plan.precision,
        "bytes": sum(sum(sizes) for sizes in traffic.values()),
        "bus_bytes_per_s": bus_bytes / sending_s,
        "sending_s": sending_s,
        "computing_s": computing_s,
        "computing_from": source,
        "waiting_share": None if computing_s is None else sending_s / (sending_s + computing_s),
    }


def sweep_sizes(max_bytes: int) -> list[int]:
    """Returns 1 KiB, 4 KiB, 16 KiB, ... and max_bytes itself."""
    return [*takewhile(max_bytes.__gt__, (1024 * 4**i for i in count())), max_bytes]


COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")


def make_results(
    reports: Sequence[Mapping[str, Any]],
    plan: Plan,
    links: Mapping[tuple[int, ...], LinkRate],
    *,
    tok_per_sec: float | None,
    hosts: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, Any]:
    """Combines the reports of all ranks. The time of the slowest rank counts: a step waits for it. hosts: the ranks of each."""
    hosts = hosts or {}
    wrong = [error for report in reports for error in report["wrong"]]
    first = reports[0]
    results: dict[str, Any] = {
        "version": 1,
        "time": utc_now(),
        "host": ", ".join(hosts) or socket.gethostname(),
        "hosts": {name: list(ranks) for name, ranks in hosts.items()},
        "device": plan.device,
        "device_names": [report["device"] for report in reports],
        "backend": first["backend"],
        "torch": first["torch"],
        "world_size": plan.world_size,
        "checks": first["checks"],
        "dtypes": first["dtypes"],
        "tested": first["collectives"],
        "right": not wrong,
        "wrong": wrong,
        "where": with_hosts(locate(wrong), hosts) if wrong else None,
        "collectives": {},
        "pairs": [],
        "training": None,
    }
    if wrong:
        return results
    seconds: dict[tuple[str, tuple[int, ...]], dict[int, float]] = {}
    for point in (point for report in reports for point in report["speed"]):
        sizes = seconds.setdefault((point["collective"], tuple(point["ranks"])), {})
        sizes[point["bytes"]] = max(sizes.get(point["bytes"], 0.0), point["seconds"])
    curves = {key: curve(key[0], len(key[1]), sizes) for key, sizes in seconds.items()}
    collectives = {name: curves[name, tuple(range(plan.world_size))] for name in COLLECTIVES}
    pairs = []
    for ranks, link in links.items():
        measured = curves["p2p", ranks]
        share, verdict = link_verdict(link, measured["points"][-1]["bus_bytes_per_s"])
        pairs.append({"ranks": list(ranks), "link": asdict(link), **measured, "share": share, "verdict": verdict})
    training = training_cost(plan, collectives, tok_per_sec=tok_per_sec)
    return {**results, "collectives": collectives, "pairs": pairs, "training": training}


def curve(collective: str, world_size: int, seconds: Mapping[int, float]) -> dict[str, Any]:
    """Returns the points by size and the line through them: seconds = latency_s + bytes / bytes_per_s."""
    points = sorted(seconds.items())
    factor = bus_factor(collective, world_size)
    return {
        **fit_line(points),
        "points": [
            {
                "bytes": size,
                "seconds": size_s,
                "algorithm_bytes_per_s": size / size_s,
                "bus_bytes_per_s": factor * size / size_s,
            }
            for size, size_s in points
        ],
    }


def format_comm(results: Mapping[str, Any]) -> str:
    names = list(dict.fromkeys(results["device_names"]))
    devices = f"{results['world_size']} x {names[0]}" if len(names) == 1 else ", ".join(results["device_names"])
    head = f"ranks   {devices} on {results['host']}, {results['backend']}, torch {results['torch']}"
    tested = f"{results['checks']} checks of {len(results['tested'])} operations in {', '.join(results['dtypes'])}"
    if not results["right"]:
        return "\n".join([head, f"wrong   {len(results['wrong'])} results; {tested}", *format_wrong(results)])
    blocks = (
        [head, f"right   {tested}: every rank has the right results"],
        format_summary(results),
        format_sizes(results),
        [*map(format_link, results["pairs"]), f"train   {format_training(results['training'])}"],
    )
    saved = f"saved   {results['file']}, {results['seconds']:.0f} s"
    replaced_bytes = results.get("replaced_bytes") or 0
    if replaced_bytes > largest_point(results)["bytes"]:
        before = f"a measurement up to {format_bytes(replaced_bytes)}"
        saved += f"\nnote    it replaces {before}, which is better for plans; --out FILE replaces none"
    return "\n\n".join("\n".join(block) for block in blocks) + f"\n{saved}"


def largest_point(results: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns what was measured of all_reduce with the largest message, from which plans take the bandwidth."""
    point: Mapping[str, Any] = results["collectives"]["all_reduce"]["points"][-1]
    return point


def format_wrong(results: Mapping[str, Any]) -> list[str]:
    """Returns one line for each operation and rank with wrong results, and where the fault is."""
    lines: dict[tuple[str, int], str] = {}
    for error in results["wrong"]:
        text = f"        rank {error['rank']}: {format_one_wrong(error)}"
        lines.setdefault((error["collective"], error["rank"]), text)
    fix = "find the cause before training here: memory (memtest86), network card, torch build (paceline torch check)"
    if results["device"] == "cuda":
        fix = "NCCL_P2P_DISABLE=1 paceline comm: if that is right, leave it set (the direct path between the cards is at fault)"
    return [*lines.values(), f"where   {results['where']}", f"fix     {fix}", f"logs    {results['folder']}"]


def format_one_wrong(wrong: Mapping[str, Any]) -> str:
    name, sender = wrong["collective"], wrong["sender"]
    if wrong["index"] is None:
        return f"{name}: {wrong['got']}"
    return (
        f"{name}{'' if sender is None else f' from rank {sender}'} of {wrong['numel']:,} {wrong['dtype']}: element"
        f" {wrong['index']:,} is {wrong['got']}, should be {wrong['expected']} ({wrong['num_wrong']:,} wrong)"
    )


def format_summary(results: Mapping[str, Any]) -> list[str]:
    lines = [f"{'':<16}{'latency':>9}{'algorithm':>13}{'bus':>13}"]
    curves = dict(results["collectives"])
    for pair in results["pairs"]:
        curves[f"p2p {pair['ranks'][0]}-{pair['ranks'][1]}"] = pair
    for name, speeds_by_size in curves.items():
        first, last = speeds_by_size["points"][0], speeds_by_size["points"][-1]
        speeds = (last["algorithm_bytes_per_s"], last["bus_bytes_per_s"])
        rates = "".join(f"{format_rate(speed):>13}" for speed in speeds)
        lines.append(f"{name:<16}{format_seconds(first['seconds']):>9}{rates}")
    smallest, largest = (results["collectives"]["all_reduce"]["points"][i]["bytes"] for i in (0, -1))
    return [*lines, f"{'':<16}latency at {format_bytes(smallest)}, bandwidth at {format_bytes(largest)}"]


def format_sizes(results: Mapping[str, Any]) -> list[str]:
    """Returns a row for each size with the time and bus bandwidth of every collective."""
    curves = results["collectives"]
    lines = ["bus GB/s" + "".join(f"{name:>17}" for name in curves)]
    for i, point in enumerate(curves["all_reduce"]["points"]):
        cells = [collective["points"][i] for collective in curves.values()]
        row = "".join(f"{format_seconds(c['seconds']):>9}{c['bus_bytes_per_s'] / 1e9:>8.3f}" for c in cells)
        lines.append(f"{format_bytes(point['bytes']):<8}{row}")
    return lines


def format_link(pair: Mapping[str, Any]) -> str:
    measured, expected = pair["points"][-1]["bus_bytes_per_s"], pair["link"]["bytes_per_s"]
    share = f"{format_percent(pair['share'])} of {format_rate(expected)}: " if expected else ""
    return (
        f"link    {pair['ranks'][0]}-{pair['ranks'][1]} {pair['link']['name']}, {format_rate(measured)},"
        f" {share}{pair['verdict']}"
    )


def format_training(training: Mapping[str, Any]) -> str:
    step = f"a depth-{training['depth']} step of {training['total_batch_size']:,} tokens"
    rate, sending = format_rate(training["bus_bytes_per_s"]), format_seconds(training["sending_s"])
    if training["computing_s"] is None:
        return (
            f"at {rate} {step} sends for {sending}; its compute time is unknown ({training['computing_from']}):"
            " --tok-per-sec N, measured in one process alone, gives the share"
        )
    return (
        f"at {rate} {step} spends up to {format_percent(training['waiting_share'])} waiting:"
        f" {sending} of sending, partly hidden behind {format_seconds(training['computing_s'])}"
        f" of compute ({training['computing_from']})"
    )


def format_rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s"


def format_seconds(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
