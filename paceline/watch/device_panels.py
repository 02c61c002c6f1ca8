"""
The web page's ranks, hosts and GPUs, and the maps of how each device was used: a part of panels.py, and as pure.
"""

from typing import Any, NamedTuple

from paceline.units import format_bytes, format_duration, format_ms, format_number_of, format_percent
from paceline.watch.measures import (
    ERROR_NAMES,
    FORMATS,
    format_memory,
    format_power,
    format_temperature,
    gpu_model,
    is_disk_low,
    is_full,
    memory_share,
    ram_of,
    spaced,
    throttle_reasons,
)
from paceline.watch.snapshot import LIVE, GpuView, HostView, Snapshot
from paceline.watch.summary import host_place, is_silent, name_ranks

Panel = dict[str, Any]

FRESH_S = 10.0  # a sample of a live run that is older shows when it was measured


class DeviceMap(NamedTuple):
    """How a field of gpu_series or host_series becomes a map; unit: of FORMATS."""

    label: str
    about: str
    unit: str
    whole: str | None = None  # field of the device with the value of full colour; without it, that is `high`
    high: float | None = None  # None: the highest value
    low: float = 0.0  # the value without colour
    colour: str = "heat-full"  # of the highest value


MAPS = {
    "use": DeviceMap("GPU use", "share of time in which a kernel ran", "percent", high=1.0),
    "used_bytes": DeviceMap("GPU memory", "memory taken", "bytes", "total_bytes"),
    "power_w": DeviceMap("GPU power", "power drawn", "watts", "power_limit_w", 700.0),
    "temperature_c": DeviceMap("GPU temperature", "30 to 90 °C", "celsius", low=30.0, high=90.0, colour="heat-slow"),
    "sm_mhz": DeviceMap("GPU clock", "of the multiprocessors", "mhz"),
    "memory_use": DeviceMap("GPU memory use", "share of time in which memory was read or written", "percent", high=1.0),
    "pcie_in_bps": DeviceMap("PCIe in", "to the GPU", "rate"),
    "pcie_out_bps": DeviceMap("PCIe out", "from the GPU", "rate"),
    "cpu": DeviceMap("CPU", "share of all cores", "percent", high=1.0),
    "ram_used": DeviceMap("RAM", "memory taken", "bytes", "ram_total"),
    "net_in_bps": DeviceMap("network in", "received", "rate"),
    "net_out_bps": DeviceMap("network out", "sent", "rate"),
    "disk_read_bps": DeviceMap("disk read", "from all disks", "rate"),
    "disk_write_bps": DeviceMap("disk write", "to all disks", "rate"),
    "disk_free": DeviceMap("disk free", "of the run's disk", "bytes", "disk_total"),
}
SLOW = "▲ slow"
# of a GPU's memory: a process of others that takes less, such as a desktop's, is shown without a warning
SMALL_SHARE = 0.05


def ranks_panel(snapshot: Snapshot) -> Panel | None:
    """Returns one sentence, the labels of the map's rows by rank, and a table for a page without the map."""
    ranks, is_live = snapshot.ranks, snapshot.state in LIVE
    if not (is_live and ranks) and not snapshot.rank_series and all(rank.busy_ms is None for rank in ranks):
        return None
    times = ["" if rank.busy_ms is None else format_ms(rank.busy_ms) for rank in ranks]
    marks = [SLOW if rank.slow else None for rank in ranks]
    labels = {
        str(rank.rank): {"sub": rank.host, "value": text, "mark": mark}
        for rank, text, mark in zip(ranks, times, marks, strict=True)
    }
    longest = max((rank.busy_ms for rank in ranks if rank.busy_ms), default=1.0)
    columns: dict[str, list[Any]] = {
        "host": [rank.host for rank in ranks],
        "step": [None if rank.step is None else f"{rank.step:,}" for rank in ranks],
        "phase": [rank.phase for rank in ranks],
        "own work in a step": [
            None if rank.busy_ms is None else {"share": rank.busy_ms / longest, "text": text, "slow": mark}
            for rank, text, mark in zip(ranks, times, marks, strict=True)
        ],
    }
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    rows = [[str(rank.rank), *(cells[i] or "n/a" for cells in shown.values())] for i, rank in enumerate(ranks)]
    table = {"heads": ["rank", *shown], "rows": rows}
    return {"text": ranks_text(snapshot) if is_live else "", "labels": labels, "table": table}


def ranks_text(snapshot: Snapshot) -> str:
    ranks = snapshot.ranks
    phases = ", ".join(dict.fromkeys(rank.phase for rank in ranks if rank.phase))
    text = format_number_of(len(ranks), "rank") + (f" in {phases}" if phases else "")
    silent = [
        f"{name_ranks([rank], snapshot)} for {format_duration(rank.silent_s)}"
        + (f" in {rank.phase}" if rank.phase else "")
        for rank in ranks
        if is_silent(rank)
    ]
    return text + (f"; silent: {', '.join(silent[:8])}" if silent else "")


def host_panel(host: HostView, *, is_live: bool, now: float) -> Panel:
    is_old = host.time is not None and (host.lost or not is_live or now - host.time > FRESH_S)
    return {
        "name": host.name,
        "place": host_place(host),
        "is_lost": host.lost,
        "measured": round(host.time) if is_old and host.time is not None else None,
        "gauges": host_gauges(host),
        "gpus": [gpu_panel(gpu) for gpu in host.gpus],
    }


def gauge(name: str, share: float | None, text: str, *, is_grave: bool = False) -> Panel:
    """Returns a gauge. share None: the whole is not known, so there is no bar."""
    return {"name": name, "share": share, "text": text, "level": "warning" if is_grave else ""}


def host_gauges(host: HostView) -> list[Panel]:
    gauges = []
    if host.cpu is not None:
        cores = f" of {host.cores} cores" if host.cores else ""
        gauges.append(gauge("CPU", host.cpu, format_percent(host.cpu) + cores))
    used, whole = ram_of(host)
    if used is not None:
        name = "RAM (cgroup)" if host.cgroup_limit and host.cgroup_used is not None else "RAM"
        text = format_bytes(used) + (f" of {format_bytes(whole)}" if whole else "")
        gauges.append(gauge(name, used / whole if whole else None, text, is_grave=is_full(used, whole)))
    if host.disk_free is not None:
        share = 1 - host.disk_free / host.disk_total if host.disk_total else None
        gauges.append(gauge("disk", share, f"{format_bytes(host.disk_free)} free", is_grave=is_disk_low(host)))
    if host.net_in_bps is not None and host.net_out_bps is not None:
        text = f"{format_bytes(host.net_in_bps)}/s in, {format_bytes(host.net_out_bps)}/s out"
        gauges.append(gauge("network", None, text))
    return gauges


def gpu_panel(gpu: GpuView) -> Panel:
    power = gpu.power_w / gpu.power_limit_w if gpu.power_w is not None and gpu.power_limit_w else None
    gauges = [
        gauge("use", gpu.use, format_percent(gpu.use)),
        gauge("memory", memory_share(gpu), format_memory(gpu)),
        gauge("power", power, format_power(gpu)),
    ]
    more = [format_temperature(gpu)] if gpu.temperature_c is not None else []
    more += [f"{gpu.sm_mhz:,} MHz"] if gpu.sm_mhz is not None else []
    more += [f"PCIe {gpu.pcie}"] if gpu.pcie else []
    return {
        "name": f"GPU {gpu.index}",
        "model": gpu_model(gpu.name),
        "gauges": [gauge for gauge in gauges if gauge["text"] != "n/a"],
        "more": ", ".join(more),
        "marks": marks(gpu),
    }


def marks(gpu: GpuView) -> list[Panel]:
    """Returns what is unusual: throttled clocks, errors, processes of others."""
    shown = [{"level": "", "text": f"▲ throttled: {reason}"} for reason in throttle_reasons(gpu)]
    for name in ERROR_NAMES:
        if count := gpu.errors.get(name):
            shown.append({"level": "error", "text": f"✗ {spaced(name)} {count}"})
    for process in gpu.processes:
        if process.get("ours") is False:
            size, whole = process.get("bytes"), gpu.total_bytes
            text, is_small = f"also {process.get('name')} {process.get('pid')}", False
            if isinstance(size, int | float):
                text, is_small = f"{text}, {format_bytes(size)}", size < SMALL_SHARE * (whole or 0)
            shown.append({"level": "calm", "text": text} if is_small else {"level": "", "text": f"▲ {text}"})
    return shown


def map_panels(snapshot: Snapshot) -> dict[str, Panel]:
    """Returns each field that devices report; a row names its curve and the values without and with full colour.

    span: the ends of the field's axis, where it is drawn as lines.
    """
    rows: dict[str, list[Panel]] = {field: [] for field in MAPS}
    hosts: dict[str, HostView | GpuView] = {host.name: host for host in snapshot.hosts}
    gpus = {f"{host.name}/{gpu.index}": gpu for host in snapshot.hosts for gpu in host.gpus}
    for group in ("gpu_series", "host_series"):
        for key, series in getattr(snapshot, group).items():
            device, _, field = key.rpartition(" ")
            device_name = device
            if field not in MAPS or not series.values:
                continue
            label, sub, mark, owner = device, None, None, hosts.get(device)
            if group == "gpu_series":
                name, _, index = device.rpartition("/")
                label, sub, owner = f"GPU {index}", name if len(hosts) > 1 else None, gpus.get(device)
                device_name = " ".join(filter(None, (sub, label)))
                mark = "▲ throttled" if device in gpus and throttle_reasons(gpus[device]) else None
            kind, last, most = MAPS[field], series.values[-1], max(series.values)
            high = float(getattr(owner, kind.whole or "", None) or kind.high or most or 1.0)
            texts = {"group": group, "key": key, "device": device_name, "label": label, "sub": sub, "mark": mark}
            rows[field].append({**texts, "value": FORMATS[kind.unit](last), "low": kind.low, "high": high})
    return {
        field: {
            "label": kind.label,
            "about": kind.about,
            "unit": kind.unit,
            "colour": kind.colour,
            "span": [kind.low, max(row["high"] for row in rows[field])],
            "rows": rows[field],
        }
        for field, kind in MAPS.items()
        if rows[field]
    }
