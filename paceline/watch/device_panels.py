"""
The web page's ranks, hosts and GPUs, and the maps of how each device was used: a part of panels.py, and as pure.
"""

from collections.abc import Sequence
from typing import Any

from paceline.units import format_bytes, format_duration, format_ms, format_number_of
from paceline.watch.snapshot import LIVE, GpuView, HostView, RankView, Snapshot
from paceline.watch.summary import (
    ERROR_NAMES,
    format_memory,
    format_percent,
    format_power,
    format_temperature,
    gpu_model,
    is_disk_low,
    is_full,
    is_silent,
    memory_share,
    ram_of,
    spaced,
    throttle_reasons,
)

Panel = dict[str, Any]

FRESH_S = 10.0  # a sample of a live run that is older shows when it was measured
MAPS = {  # of a field of gpu_series or host_series: about, unit of format.js, colour of the most
    "use": ("share of time in which a kernel ran", "percent", "heat-full"),
    "used_bytes": ("memory taken", "bytes", "heat-full"),
    "power_w": ("watts", "watts", "heat-full"),
    "temperature_c": ("30 to 90 °C", "celsius", "heat-slow"),
    "cpu": ("share of all cores of the host", "percent", "heat-full"),
    "ram_used": ("memory of the host taken", "bytes", "heat-full"),
}
MOST_WATTS = 700.0  # of a card whose limit is not known
SLOW = "▲ slow"


def ranks_panel(snapshot: Snapshot) -> Panel | None:
    """Returns one sentence, the labels of the map's rows by rank, and a table for a page without the map."""
    ranks, is_live = snapshot.ranks, snapshot.state in LIVE
    if not (is_live and ranks) and not snapshot.rank_series and all(rank.busy_ms is None for rank in ranks):
        return None
    labels = {
        str(rank.rank): {
            "sub": rank.host,
            "value": format_ms(rank.busy_ms) if rank.busy_ms is not None else "",
            "mark": SLOW if rank.slow else None,
        }
        for rank in ranks
    }
    return {"text": ranks_text(ranks) if is_live else "", "labels": labels, "table": ranks_table(ranks)}


def ranks_text(ranks: Sequence[RankView]) -> str:
    phases = ", ".join(dict.fromkeys(rank.phase for rank in ranks if rank.phase))
    text = format_number_of(len(ranks), "rank") + (f" in {phases}" if phases else "")
    silent = [
        f"rank {rank.rank} for {format_duration(rank.silent_s)}" + (f" in {rank.phase}" if rank.phase else "")
        for rank in ranks
        if is_silent(rank)
    ]
    return text + (f"; silent: {', '.join(silent[:8])}" if silent else "")


def ranks_table(ranks: Sequence[RankView]) -> Panel:
    longest = max((rank.busy_ms for rank in ranks if rank.busy_ms), default=1.0)
    columns: dict[str, list[Any]] = {
        "host": [rank.host for rank in ranks],
        "step": [None if rank.step is None else f"{rank.step:,}" for rank in ranks],
        "phase": [rank.phase for rank in ranks],
        "own work in a step": [
            None if rank.busy_ms is None
            else {"share": rank.busy_ms / longest, "text": format_ms(rank.busy_ms),
                  "slow": SLOW if rank.slow else None}
            for rank in ranks
        ],
    }  # fmt: skip
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    rows = [[str(rank.rank), *(cells[i] or "n/a" for cells in shown.values())] for i, rank in enumerate(ranks)]
    return {"heads": ["rank", *shown], "rows": rows}


def host_panel(host: HostView, *, is_live: bool, now: float) -> Panel:
    is_old = host.time is not None and (not is_live or now - host.time > FRESH_S)
    return {
        "name": host.name,
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
    is_limited = bool(host.cgroup_limit) and host.cgroup_used is not None
    if used is not None:
        share = used / whole if whole else None
        text = format_bytes(used) + (f" of {format_bytes(whole)}" if whole else "")
        name = "RAM (cgroup)" if is_limited else "RAM"
        gauges.append(gauge(name, share, text, is_grave=is_full(used, whole)))
    if host.disk_free is not None:
        share = 1 - host.disk_free / host.disk_total if host.disk_total else None
        text = f"{format_bytes(host.disk_free)} free"
        gauges.append(gauge("disk", share, text, is_grave=is_disk_low(host)))
    if host.net_in_bps is not None and host.net_out_bps is not None:
        text = f"{format_bytes(host.net_in_bps)}/s in, {format_bytes(host.net_out_bps)}/s out"
        gauges.append(gauge("network", None, text))
    return gauges


def gpu_panel(gpu: GpuView) -> Panel:
    memory = memory_share(gpu)
    gauges = [gauge("use", gpu.use, format_percent(gpu.use))] if gpu.use is not None else []
    gauges += [gauge("memory", memory, format_memory(gpu))] if memory is not None else []
    power = gpu.power_w / gpu.power_limit_w if gpu.power_w is not None and gpu.power_limit_w else None
    gauges += [gauge("power", power, format_power(gpu))] if gpu.power_w is not None else []
    more = [format_temperature(gpu)] if gpu.temperature_c is not None else []
    more += [f"{gpu.sm_mhz:,} MHz"] if gpu.sm_mhz is not None else []
    more += [f"PCIe {gpu.pcie}"] if gpu.pcie else []
    name = f"GPU {gpu.index}"
    return {"name": name, "model": gpu_model(gpu.name), "gauges": gauges, "more": ", ".join(more), "marks": marks(gpu)}


def marks(gpu: GpuView) -> list[Panel]:
    """Returns what is unusual: throttled clocks, errors, processes of others."""
    shown = [{"level": "", "text": f"▲ throttled: {reason}"} for reason in throttle_reasons(gpu)]
    for name in ERROR_NAMES:
        if count := gpu.errors.get(name):
            shown.append({"level": "error", "text": f"✗ {spaced(name)} {count}"})
    for process in gpu.processes:
        if process.get("ours") is False:
            size = process.get("bytes")
            memory = f", {format_bytes(size)}" if isinstance(size, int | float) else ""
            shown.append({"level": "", "text": f"▲ also {process.get('name')} {process.get('pid')}{memory}"})
    return shown


def map_panels(snapshot: Snapshot) -> dict[str, Panel]:
    """Returns a map for each field that devices report; a row names its curve and the values without and with full colour."""
    rows: dict[str, list[Panel]] = {}
    hosts = {host.name: host for host in snapshot.hosts}
    gpus = {f"{host.name}/{gpu.index}": gpu for host in snapshot.hosts for gpu in host.gpus}
    for group in ("gpu_series", "host_series"):
        for key, series in getattr(snapshot, group).items():
            device, _, field = key.rpartition(" ")
            if field not in MAPS or not series.values:
                continue
            row: Panel = {"group": group, "key": key, "label": device, "sub": None, "mark": None}
            if group == "gpu_series":
                name, _, index = device.rpartition("/")
                is_held = device in gpus and throttle_reasons(gpus[device])
                row |= {"label": f"GPU {index}", "sub": name if len(hosts) > 1 else None}
                row["mark"] = "▲ throttled" if is_held else None
            row["value"] = format_value(field, series.values[-1])
            owner = gpus.get(device) if group == "gpu_series" else hosts.get(device)
            rows.setdefault(field, []).append(row | scale(field, owner, series.values))
    names = ("about", "unit", "colour")
    return {
        field: dict(zip(names, MAPS[field], strict=True)) | {"rows": rows[field]} for field in MAPS if field in rows
    }


def scale(field: str, device: GpuView | HostView | None, values: list[float]) -> dict[str, float]:
    """Returns the values at which a cell of the map has no colour, and full colour."""
    if field == "temperature_c":
        return {"low": 30.0, "high": 90.0}
    if field in ("use", "cpu"):
        return {"low": 0.0, "high": 1.0}
    if field == "power_w":
        return {"low": 0.0, "high": getattr(device, "power_limit_w", None) or MOST_WATTS}
    total = getattr(device, "total_bytes" if field == "used_bytes" else "ram_total", None)
    return {"low": 0.0, "high": float(total or max(values) or 1.0)}


def format_value(field: str, value: float) -> str:
    unit = MAPS[field][1]
    if unit == "percent":
        return format_percent(value)
    return format_bytes(value) if unit == "bytes" else f"{value:.0f} {'W' if unit == 'watts' else '°C'}"
