"""
What the snapshots by hand are made of: curves, GPUs, hosts, ranks, events, all the same each time.
"""

import math
from collections.abc import Callable

from paceline.watch.snapshot import TIME_KINDS, EventView, Goodput, GpuView, HostView, RankView, Series

NOW = 1_795_250_000.0  # 2026-11-21T08:33:20Z
GIB = 1 << 30
NUM_STEPS = 2500
STEP = 1240
STEP_MS = 612.0
TOKENS_PER_STEP = 524_288
LOG_TEXT = "\n".join(f"step {step:05d}/02500 | loss 3.{step:04d} | 612 ms" for step in range(1, 200)) + "\n"


def noise(index: int, *, seed: int = 0) -> float:
    """Between -1 and 1, the same each time, without a pattern that the eye finds."""
    return (math.sin(12.9898 * index + 78.233 * seed) * 43758.5453) % 2 - 1


def loss_at(step: int) -> float:
    return 2.9 + 7.9 * math.exp(-step / 140) + 0.05 * noise(step)


def curve(value: Callable[[int], float], *, now: float, last: int = STEP, every: int = 10) -> Series:
    steps = list(range(every, last + 1, every))
    return Series(steps, [value(step) for step in steps], [now - (last - step) * STEP_MS / 1000 for step in steps])


def training_series(now: float, *, last: int = STEP) -> dict[str, Series]:
    return {
        "loss": curve(loss_at, now=now, last=last),
        "val_bpb": curve(lambda step: loss_at(step) / 3.1, now=now, last=last, every=250),
        "tok_per_sec": curve(lambda step: 856_000 + 9_000 * noise(step, seed=1), now=now, last=last),
        "step_ms": curve(lambda step: STEP_MS - 6 * noise(step, seed=1), now=now, last=last),
        "mfu": curve(lambda step: 0.412 + 0.004 * noise(step, seed=1), now=now, last=last),
        "grad_norm": curve(lambda step: 0.6 + 2 * math.exp(-step / 90) + 0.1 * noise(step, seed=2), now=now, last=last),
        "lr_mult": curve(lambda step: min(1.0, step / 100), now=now, last=last),
    }


def gpu(index: int, *, name: str = "NVIDIA GeForce RTX 5090", use: float = 0.97, **fields: object) -> GpuView:
    values = {
        "used_bytes": int(26.3 * GIB) + index * GIB // 4,
        "total_bytes": int(31.4 * GIB),
        "use": use,
        "power_w": 521.0 + 7 * index,
        "power_limit_w": 575.0,
        "temperature_c": 67.0 + 2 * index,
        "sm_mhz": 2460,
        "pcie": "gen 5 x16",
        "processes": [{"pid": 41_210 + index, "name": "python3", "bytes": int(26.0 * GIB), "ours": True}],
    }
    return GpuView(index, name, **{**values, **fields})  # type: ignore[arg-type]


def host(name: str, gpus: list[GpuView], *, now: float = NOW, **fields: object) -> HostView:
    values = {
        "time": now - 1.4,
        "cpu": 0.23,
        "cores": 32,
        "ram_used": 41 * GIB,
        "ram_total": 128 * GIB,
        "cgroup_used": 39 * GIB,
        "cgroup_limit": 96 * GIB,
        "disk_free": 812 * GIB,
        "disk_total": 1862 * GIB,
        "net_in_bps": 1.2e6,
        "net_out_bps": 0.8e6,
    }
    return HostView(name, gpus=gpus, **{**values, **fields})  # type: ignore[arg-type]


def rank_view(rank: int, *, host_name: str = "tower", step: int = STEP, **fields: object) -> RankView:
    values = {"phase": "train", "silent_s": 0.4, "busy_ms": 571.0 + 6 * noise(rank), "slow_share": 0.0}
    return RankView(rank, host_name, step, **{**values, **fields})  # type: ignore[arg-type]


def rank_curves(now: float, *, num_ranks: int, slow: int | None = None) -> list[Series]:
    def busy(rank: int) -> Callable[[int], float]:
        return lambda step: 571 + 8 * noise(step, seed=rank) + (190 if rank == slow and step > 600 else 0)

    return [curve(busy(rank), now=now) for rank in range(num_ranks)]


def goodput(**seconds: float) -> Goodput:
    counted = {
        **dict.fromkeys(TIME_KINDS, 0.0),
        "steps": 759.0,
        "start_up": 21.0,
        "checks": 12.0,
        "compile": 38.0,
        **seconds,
    }
    return Goodput({**counted, "checkpoint": 9.0, "evaluation": 24.0}, STEP, 753_000.0)


def event(now: float, ago: float, kind: str, text: str, *, level: str = "info", step: int | None = None) -> EventView:
    return EventView(now - ago, kind, text, level, step)  # type: ignore[arg-type]
