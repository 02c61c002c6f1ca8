"""
How each value is written, with its unit, in every view and report: metrics, and what is known of GPUs and hosts. Pure.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from paceline.units import GIB, format_bytes, format_duration, format_ms, format_number_of, format_percent
from paceline.watch.snapshot import GpuView, HostView

FULL_RAM, MIN_DISK_BYTES = 0.95, 5 << 30
ERROR_NAMES = {"xid": "xid", "ecc_uncorrected": "ecc"}  # errors of a GPU that a person must know, and their short names
POWER_LIMIT = "power"  # the reason to slow down of every GPU that works: no problem


@dataclass(frozen=True)
class Metric:
    """How a field of metrics.jsonl is shown in every view."""

    label: str  # in the terminal
    about: str
    unit: str | None = None  # of values under the cursor, see format.js
    better: str | None = None  # "less" or "more"
    style: str = "blue"  # of its curve in the terminal
    steady: bool = False  # hardly changes in a good run


METRICS = {
    "loss": Metric("loss", "nats per token", "loss", "less"),
    "val_bpb": Metric("val_bpb", "bits per byte, held-out text", "loss", "less", "orange"),
    "tok_per_sec": Metric("tok/s", "tokens per second", "count", "more", "green", steady=True),
    "step_ms": Metric("step", "milliseconds a step", "ms", "less", "violet", steady=True),
    "mfu": Metric("mfu", "share of the peak FLOPs", "share", "more", "green", steady=True),
    "grad_norm": Metric("grad_norm", "before clipping", style="red"),
    "lr_mult": Metric("lr_mult", "of the full learning rate"),
    "peak_bytes": Metric("peak memory", "most memory taken on a device", "bytes", steady=True),
}
FORMATS: dict[str, Callable[[float], str]] = {  # by unit, as UNITS in format.js
    "loss": "{:.4f}".format,
    "ms": format_ms,
    "share": partial(format_percent, digits=1),
    "percent": format_percent,
    "bytes": format_bytes,
    "count": "{:,.0f}".format,
    "watts": "{:.0f} W".format,
    "celsius": "{:.0f} °C".format,
    "mhz": "{:,.0f} MHz".format,
    "rate": lambda rate: f"{format_bytes(rate)}/s",
}


def spaced(name: str) -> str:
    return name.replace("_", " ")


def format_measure(name: str, value: float) -> str:
    """Formats a value of a snapshot or a curve, by the name of its field, with its unit."""
    if name in METRICS and (unit := METRICS[name].unit):
        return FORMATS[unit](value)
    return f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"


def format_step(step: int | None) -> str:
    return "n/a" if step is None else f"{step:,}"


def format_figure(name: str, value: float | None) -> str:
    """Returns a figure of the plan or of the run with its unit; n/a where it is not known. A loss that is NaN is shown as nan."""
    if value is None or (name != "loss" and not math.isfinite(value)):
        return "n/a"
    return format_duration(value) if name == "total_s" else format_measure(name, value)


def format_bpb(val_bpb: float | None, eval_tokens: int | None) -> str:
    """Returns a run's val_bpb with the held-out tokens that it was measured on: '1.4443 on 47,616 tokens'."""
    tokens = "" if val_bpb is None or eval_tokens is None else f" on {format_number_of(eval_tokens, 'token')}"
    return format_figure("val_bpb", val_bpb) + tokens


def format_time(time: str) -> str:
    """Returns an ISO time to the second, with a space in the middle."""
    return str(time)[:19].replace("T", " ")


def format_power(gpu: GpuView) -> str:
    """521/575 W"""
    if gpu.power_w is None:
        return "n/a"
    return f"{gpu.power_w:.0f}/{gpu.power_limit_w:.0f} W" if gpu.power_limit_w else FORMATS["watts"](gpu.power_w)


def format_temperature(gpu: GpuView) -> str:
    return "n/a" if gpu.temperature_c is None else FORMATS["celsius"](gpu.temperature_c)


def format_memory(gpu: GpuView) -> str:
    """26.3/31.4 GiB"""
    if gpu.used_bytes is None or not gpu.total_bytes:
        return "n/a"
    return f"{gpu.used_bytes / GIB:.1f}/{gpu.total_bytes / GIB:.1f} GiB"


def memory_share(gpu: GpuView) -> float | None:
    return None if gpu.used_bytes is None or not gpu.total_bytes else gpu.used_bytes / gpu.total_bytes


def gpu_model(name: str | None) -> str:
    """NVIDIA GeForce RTX 5090 -> RTX 5090; NVIDIA H100 80GB HBM3 -> H100"""
    model = re.sub(r"\b(NVIDIA|GeForce|Generation|\d+GB|HBM\w*|PCIe|SXM\d?)\b", "", name or "GPU")
    return " ".join(model.replace("-", " ").split()) or "GPU"


def throttle_reasons(gpu: GpuView) -> list[str]:
    return [spaced(reason) for reason in gpu.throttle if reason != POWER_LIMIT]


def gpu_errors(gpu: GpuView) -> str:
    return ", ".join(f"{spaced(error)} {gpu.errors[error]}" for error in ERROR_NAMES if gpu.errors.get(error))


def gpu_problems(gpu: GpuView) -> str:
    """Why a GPU is slower than it could be, and its errors, briefly; empty where nothing is unusual."""
    errors = [f"{name} {gpu.errors[error]}" for error, name in ERROR_NAMES.items() if gpu.errors.get(error)]
    return ", ".join([*throttle_reasons(gpu), *errors])


def ram_of(host: HostView) -> tuple[int | None, int | None]:
    """Used and total bytes of what limits the host's processes: the cgroup where it has a limit, else all RAM."""
    if host.cgroup_limit and host.cgroup_used is not None:
        return host.cgroup_used, host.cgroup_limit
    return host.ram_used, host.ram_total


def is_full(used: int | None, total: int | None) -> bool:
    """Whether so little memory is left that it is a warning."""
    return used is not None and bool(total) and used > FULL_RAM * (total or 0)


def is_disk_low(host: HostView) -> bool:
    return host.disk_free is not None and host.disk_free < MIN_DISK_BYTES
