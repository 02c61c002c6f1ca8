"""
What both views, the report and `paceline runs show --json` know of a run at one moment. Plain data, made by status.py alone.

What is not known is None, or empty; nobody fills it in with a guess. Times are Unix seconds, bytes are bytes, shares 0 to 1.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from paceline.watch.goodput import Goodput

State = Literal[
    "starting",  # an attempt has begun, and no step is done yet
    "training",
    "evaluating",
    "saving",
    "recovering",  # between two attempts
    "running",  # a script's run, or a log whose phase is not known
    "finished",
    "stopped",
    "failed",
    "broken",  # it ended without a word
    "unknown",  # a log that tells no step and no error
]
Level = Literal["info", "good", "warning", "error"]


@dataclass(frozen=True)
class Series:
    """One curve, thinned: the same number of steps, values and times, in the order of steps; extremes are kept."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class RankView:
    rank: int
    host: str | None = None
    step: int | None = None
    phase: str | None = None  # of paceline.marks.PHASES
    silent_s: float | None = None  # since its last mark
    busy_ms: float | None = None  # of its last logged step: its own work, without waiting for the others
    slow: bool = False  # clearly slower than the others


@dataclass(frozen=True)
class GpuView:
    index: int
    name: str | None = None
    used_bytes: int | None = None
    total_bytes: int | None = None
    use: float | None = None  # share of time in which a kernel ran
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    sm_mhz: int | None = None
    throttle: list[str] = field(default_factory=list)  # reasons, as NVML names them
    pcie: str | None = None  # "gen 4 x16"
    processes: list[dict[str, Any]] = field(default_factory=list)  # pid, name, bytes, ours
    errors: dict[str, int] = field(default_factory=dict)  # xid, ecc_corrected, ecc_uncorrected, ...


@dataclass(frozen=True)
class HostView:
    name: str
    time: float | None = None  # of the sample
    every_s: float | None = None  # between two samples, usually
    cpu: float | None = None  # share of all cores
    cores: int | None = None
    ram_used: int | None = None
    ram_total: int | None = None
    cgroup_used: int | None = None
    cgroup_limit: int | None = None
    disk_free: int | None = None
    disk_total: int | None = None
    net_in_bps: float | None = None  # bytes per second
    net_out_bps: float | None = None
    gpus: list[GpuView] = field(default_factory=list)


@dataclass(frozen=True)
class EventView:
    time: float | None
    kind: str  # as events.jsonl names it
    text: str  # one line for the eye
    level: Level = "info"
    step: int | None = None


@dataclass(frozen=True)
class AttemptView:
    """One attempt: how it ended, what was found, what was decided then."""

    attempt: int
    time: str
    state: str | None = None
    cause: str | None = None
    summary: str | None = None
    action: str | None = None
    why: str | None = None


@dataclass(frozen=True)
class LogView:
    attempt: int
    rank: int | None  # None: the launch's own
    path: str
    bytes: int


@dataclass(frozen=True)
class Snapshot:
    name: str
    path: str
    kind: Literal["training", "script", "log"]
    state: State
    command: list[str] | None = None  # of a script's run
    framework: str | None = None  # of a log, where its lines tell
    step: int = 0
    num_steps: int | None = None
    loss: float | None = None  # may be NaN or infinite: what was told last
    val_bpb: float | None = None
    tok_per_sec: float | None = None
    step_ms: float | None = None
    mfu: float | None = None
    peak_bytes: int | None = None
    eta_s: float | None = None
    elapsed_s: float | None = None
    tokens_per_step: int | None = None
    started: float | None = None
    updated: float | None = None  # the latest sign of life in any file
    silence_s: float | None = None  # of a script or a log: the longest of late that it came back from
    series: dict[str, Series] = field(default_factory=dict)  # by field of metrics.jsonl: loss, val_bpb, ...
    rank_series: list[Series] = field(default_factory=list)  # busy_ms of each rank, by rank; empty where not known
    gpu_series: dict[str, Series] = field(default_factory=dict)  # "HOST/INDEX use", "HOST/INDEX used_bytes", ...
    host_series: dict[str, Series] = field(default_factory=dict)  # "HOST cpu", "HOST ram_used", "HOST net_in_bps", ...
    ranks: list[RankView] = field(default_factory=list)
    hosts: list[HostView] = field(default_factory=list)
    events: list[EventView] = field(default_factory=list)  # the last 500, oldest first
    attempts: list[AttemptView] = field(default_factory=list)
    logs: list[LogView] = field(default_factory=list)
    goodput: Goodput | None = None
    plan: dict[str, Any] | None = None  # expected: step_ms, tok_per_sec, peak_bytes, mfu, total_s, where planned
    findings: list[dict[str, Any]] = field(default_factory=list)
    explanation: dict[str, Any] | None = None  # paceline.explain's, of the attempt that ended the run
    notes: list[str] = field(default_factory=list)  # what could not be read, a line each

    def to_json(self) -> dict[str, Any]:
        """What is no number is None: JSON has no word for it."""
        return only_finite({**asdict(self), "goodput": self.goodput.to_json() if self.goodput else None})  # type: ignore[no-any-return]


def only_finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: only_finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [only_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
