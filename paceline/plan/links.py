"""
Links between ranks and how fast they are: named by the user, measured by `paceline comm`, between hosts by the check, or assumed.

A Link's bytes_per_s is bus bandwidth: what each rank sends and receives at once in an all-reduce (nccl-tests, PERFORMANCE.md).
Between GPUs that do not reach each other directly every byte crosses two links and the host's memory: two RTX 5090 at PCIe 5.0
x8 + x8 give 24 GB/s one way alone and about 15 each way at once (open-gpu-kernel-modules fork); 25 to 28 is what NCCL reaches
at x16 without P2P (nccl issue 1639, a host with five 4090), 50 to 56 with it (rtx6kpro tables). Ethernet's rates are IEEE 802.3's;
2.5 and 5 Gb/s are 802.3bz.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import PlanError
from paceline.plan.gpu_table import GpuSpec
from paceline.plan.machine import HostLink, Machine
from paceline.plan.speeds import Speeds

PCIE_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}  # PCI-SIG, one direction
THROUGH_HOST_SHARE = 0.45  # of a lane's rate: 15 of 31.5 GB/s and 28 of 63 were seen, both ways at once
DIRECT_SHARE = 0.85  # 54 of 63 GB/s
ETHERNET_SHARE = 0.9  # of the wire, for TCP's headers and framing
INFINIBAND_SHARE = 0.92
FABRIC_SHARE = 0.75  # 48 of 64 GB/s: AMD's figure of what is usable of a link between two MI300X
NVLINK_SHARE = 0.8  # 360 of 450 GB/s: NCCL's all-reduce on an 8x H100 board, without NVLink SHARP
INFINIBAND_GBITS = {"edr": 100, "hdr": 200, "ndr": 400, "xdr": 800}  # four lanes
LATENCY_S = {"pcie": 30e-6, "nvlink": 15e-6, "ib": 20e-6, "ethernet": 100e-6}
X8_X8_CARDS = 2  # a desktop board splits its sixteen lanes over two slots
DEFAULT_ETHERNET_GBITS = 10
FASTER_ETHERNET = {1: 10, 10: 25, 25: 100}
OTHER_RATE = 4  # times faster or slower than before: a busy host alone explains a factor of two
EXAMPLES = "1GbE, 2.5GbE, 10GbE, 25GbE, 100GbE, PCIe 4 x16, PCIe 5 x8, PCIe 5 x16 P2P, NVLink, IB HDR, IB NDR"


@dataclass(frozen=True)
class Link:
    """What ranks send over. bytes_per_s: each way at once, of one rank. latency_s: of one collective. spread: relative error."""

    name: str
    bytes_per_s: float
    latency_s: float
    source: str
    spread: float = 0.3


def link_of(
    name: str | None, machine: Machine, *, world_size: int, device: str, comm: Mapping[str, Any] | None
) -> Link | None:
    """Returns the link of all ranks: over several hosts the slower one of within and between. None: one rank, or not known.

    name: what the user typed, for the link between hosts where there are several. world_size: over all hosts.
    comm: what `paceline comm` wrote.
    """
    if world_size == 1 and name:
        raise PlanError(f"--link {name}, but one device alone sends nothing", fix="--gpus 2 or --hosts 2")
    if world_size == 1:
        return None
    spec = machine.gpus[0].spec if device == "cuda" and machine.gpus else None
    user_link = read_link(name, spec) if name else None
    measured = measured_link(comm, machine, world_size=world_size, device=device)
    if machine.hosts == 1:
        return user_link or measured or inner_link(spec, num_gpus=world_size, device=device)
    was_bytes_per_s = changed_rate(comm, machine.link)
    if user_link is None and measured is not None and was_bytes_per_s is None:
        return measured
    between = user_link or checked_link(machine.link, was_bytes_per_s=was_bytes_per_s)
    if between is None:
        source = f"assumed: {DEFAULT_ETHERNET_GBITS}GbE between hosts; --link names another"
        between = _ethernet(DEFAULT_ETHERNET_GBITS, source=source)
    per_host = world_size // machine.hosts
    within = inner_link(spec, num_gpus=per_host, device=device) if per_host > 1 else None
    return between if within is None or between.bytes_per_s <= within.bytes_per_s else within


def faster_links(link: Link | None, spec: GpuSpec | None, *, hosts: int) -> Iterator[tuple[str, str]]:
    """Yields a faster link of the same kind, in words and by its name."""
    if link is None:
        return
    if match := re.fullmatch(r"PCIe (\d) x(\d+)( P2P)?", link.name):
        generation, lanes = match[1], int(match[2])
        if lanes < 16 and spec is not None and lanes < (spec.pcie_lanes or 0):
            yield "a x16 slot for each card", f"PCIe {generation} x16{match[3] or ''}"
    if match := re.fullmatch(r"(\d+)GbE", link.name):
        faster = FASTER_ETHERNET.get(int(match[1]))
        if faster is not None:
            yield f"{faster}GbE between the {'hosts' if hosts > 1 else 'GPUs'}", f"{faster}GbE"


def read_link(name: str, spec: GpuSpec | None) -> Link:
    """Returns the link that a user named, in any case and spacing; raises PlanError for an unknown one."""
    text = re.sub(r"[\s_-]+", "", name.lower()).replace(".0", "")
    if match := re.fullmatch(r"(\d+(?:\.\d)?)(?:gbe|gbit|gb/s|g|gigabit)(?:ethernet)?", text):
        if 1 <= float(match[1]) <= 800:
            return _ethernet(float(match[1]), source="as asked")
    elif match := re.fullmatch(r"pcie(?:gen)?(\d)x(\d+)(p2p)?", text):
        if int(match[1]) in PCIE_LANE_BYTES_PER_S and int(match[2]) in (1, 2, 4, 8, 16):
            return _pcie(int(match[1]), int(match[2]), direct=bool(match[3]), source="as asked")
    elif match := re.fullmatch(r"(?:ib|infiniband)?(edr|hdr|ndr|xdr)", text):
        gbits = INFINIBAND_GBITS[match[1]]
        rate = INFINIBAND_SHARE * gbits * 1e9 / 8
        return Link(f"InfiniBand {match[1].upper()}", rate, LATENCY_S["ib"], f"as asked: {gbits} Gb/s", spread=0.2)
    elif text == "nvlink":
        if spec is None or spec.nvlink_bytes_per_s is None:
            who = spec.name if spec else "this card"
            others = EXAMPLES.replace("NVLink, ", "")
            raise PlanError(f"--link NVLink, but no NVLink of {who} is known", fix=f"one of {others}")
        return _nvlink(spec.nvlink_bytes_per_s, source="as asked")
    raise PlanError(f"--link {name} is not a known link", fix=f"one of {EXAMPLES}")


def link_of_speeds(speeds: Speeds | None, *, world_size: int) -> Link | None:
    """Returns the link that train/measure.py measured with as many ranks; None without it."""
    rate = speeds.rate("send") if speeds is not None and speeds.processes == world_size else None
    if speeds is None or rate is None:
        return None
    name = f"{world_size} x {speeds.device_name}"
    return Link(name, rate, speeds.host.get("send", 0.0), speeds.source, spread=speeds.spread)


def measured_link(comm: Mapping[str, Any] | None, machine: Machine, *, world_size: int, device: str) -> Link | None:
    """Returns the link of comm.json, if it was measured with these devices: as many, of the same names, on the same hosts."""
    if not comm or not comm.get("right") or not comm.get("collectives"):
        return None
    per_host = world_size // machine.hosts
    names = ["CPU"] * per_host if device == "cpu" else [gpu.name for gpu in machine.gpus[:per_host]]
    devices = sorted(names * machine.hosts)
    if comm["device"] != device or comm["world_size"] != world_size or sorted(comm["device_names"]) != devices:
        return None
    if machine.hosts > 1 and sorted(comm.get("hosts", ())) != sorted(machine.names):
        return None
    share = (world_size - 1) / world_size  # bus over algorithm bandwidth of these two
    fits = [comm["collectives"][name] for name in ("reduce_scatter", "all_gather")]
    seconds = sum(1 / (share * fit["bytes_per_s"]) for fit in fits) / len(fits)
    latency_s = sum(fit["latency_s"] for fit in fits) / len(fits)
    source = f"measured by paceline comm {comm['time'][:10]}"
    return Link(f"{world_size} x {names[0]}", 1 / seconds, latency_s, source, spread=0.15)


def changed_rate(comm: Mapping[str, Any] | None, link: HostLink | None) -> float | None:
    """Returns what one TCP connection between the hosts reached beside the measurements of comm.json; None where it still does."""
    before = comm.get("tcp_bytes_per_s") if comm else None  # an older version did not keep it
    if not before or link is None or before / OTHER_RATE < link.bytes_per_s < before * OTHER_RATE:
        return None
    return float(before)


def checked_link(link: HostLink | None, *, was_bytes_per_s: float | None = None) -> Link | None:
    """Returns the link between hosts by the check's figures: each message waits for one round trip.

    was_bytes_per_s: when `paceline comm` measured it, where that no longer holds.
    """
    if link is None:
        return None
    source = "measured by the check, one TCP connection"
    if was_bytes_per_s:
        source += f" that had {was_bytes_per_s / 1e9:.3g} GB/s when paceline comm measured it"
    return Link(" to ".join(link.hosts), link.bytes_per_s, link.rtt_s, source, spread=0.2)


def inner_link(spec: GpuSpec | None, *, num_gpus: int, device: str) -> Link | None:
    """Returns the link assumed between the GPUs of one host; None for CPUs and for cards that are not in the table."""
    if device == "cpu" or spec is None:
        return None
    if spec.nvlink_bytes_per_s is not None and not spec.consumer:
        return _nvlink(spec.nvlink_bytes_per_s, source=f"assumed: the NVLinks of {spec.name} all connected")
    if spec.peer_bytes_per_s is not None:
        rate = FABRIC_SHARE * spec.peer_bytes_per_s * (num_gpus - 1)
        return Link("Infinity Fabric", rate, LATENCY_S["nvlink"], f"assumed: a link between any two {spec.name}", 0.25)
    if spec.pcie_gen is None or spec.pcie_lanes is None:
        return None
    lanes, slots = slot_lanes(spec.pcie_lanes, spec.consumer, num_gpus)
    why = f"assumed: {slots}PCIe {spec.pcie_gen} x{lanes} through host memory, without P2P; paceline comm measures it"
    return _pcie(spec.pcie_gen, lanes, direct=False, source=why)


def host_link(spec: GpuSpec | None, *, num_gpus: int) -> Link | None:
    """Returns the link to the host's memory, both ways at once; None for a card whose link is not known.

    The same figure as between GPUs through host memory: each card's link then carries what it sends and what it receives.
    num_gpus: of one host.
    """
    if spec is None or spec.pcie_gen is None or spec.pcie_lanes is None:
        return None
    lanes, slots = slot_lanes(spec.pcie_lanes, spec.consumer, num_gpus)
    return _pcie(spec.pcie_gen, lanes, direct=False, source=f"assumed: {slots}both ways at once")


def slot_lanes(lanes: int, consumer: bool, num_gpus: int) -> tuple[int, str]:
    """Returns the lanes that each card of a host has, and why they are fewer than its own."""
    if consumer and num_gpus == X8_X8_CARDS:
        return min(lanes, 8), "a desktop board's two slots, eight lanes each, "
    return lanes, ""


def _pcie(generation: int, lanes: int, *, direct: bool, source: str) -> Link:
    rate = PCIE_LANE_BYTES_PER_S[generation] * lanes * (DIRECT_SHARE if direct else THROUGH_HOST_SHARE)
    name = f"PCIe {generation} x{lanes}" + (" P2P" if direct else "")
    return Link(name, rate, LATENCY_S["pcie"], source, spread=0.35)


def _nvlink(bytes_per_s: float, *, source: str) -> Link:
    return Link("NVLink", NVLINK_SHARE * bytes_per_s, LATENCY_S["nvlink"], source, spread=0.25)


def _ethernet(gbits: float, *, source: str) -> Link:
    return Link(f"{gbits:g}GbE", ETHERNET_SHARE * gbits * 1e9 / 8, LATENCY_S["ethernet"], source, spread=0.2)
