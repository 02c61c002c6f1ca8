"""
What is known of a run or a log at one moment: plain data, made by run_reader.py and log_reader.py, shown by every view and report.

What is not known is None or empty, and nobody replaces it with a guess. Times are Unix seconds, bytes are bytes, shares 0 to 1.
The fields are the JSON of `paceline watch --once --json`, so they keep their names. `changes` returns what the web page needs to
know of a new snapshot: a curve that has grown from its first new point on, and every other part whole where it changed.
static/stream.js puts the changes together to snapshots.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, Literal

import orjson

from paceline.units import format_energy

State = Literal[
    "queued",  # its job waits in Slurm's queue
    "preparing",  # the text is being prepared; nothing has been started
    "starting",  # an attempt has begun and has not finished a step
    "training",
    "evaluating",
    "saving",
    "recovering",  # between two attempts
    "running",  # a script's run, or a log whose phase is not known
    "finished",
    "stopped",
    "failed",
    "broken",  # ended without reporting why
    "gone",  # its folder or file does not exist any more
    "unknown",  # a log that shows neither a step nor an error, or whose end shows neither an error nor a last word
]
LIVE = ("queued", "preparing", "starting", "training", "evaluating", "saving", "recovering", "running")
BROKEN = ("failed", "broken", "recovering", "unknown")  # states that an explanation is shown for
Level = Literal["info", "good", "warning", "error"]

TIME_KINDS = {  # of Goodput.seconds: what each is called
    "steps": "steps that counted",
    "start_up": "start-up",
    "checks": "data, plan and checks",
    "compile": "compiling and warm-up",
    "checkpoint": "checkpoints",
    "evaluation": "evaluations and samples",
    "lost": "work lost",
    "recovery": "recovery",
    "idle": "idle",
}


@dataclass(frozen=True)
class Series:
    """One curve, thinned: as many values and times as steps, in the order of steps. Extremes are kept.

    Where no line of a log shows a step, its lines are counted in place of steps.
    """

    is_typed: ClassVar[bool] = True  # its points were arrays of numbers
    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class RankView:
    rank: int
    host: str | None = None
    step: int | None = None
    phase: str | None = None  # of paceline.heartbeat.PHASES
    silent_s: float | None = None  # since its last heartbeat
    busy_ms: float | None = None  # its own work in its last logged step, without waiting for other ranks
    slow: bool = False  # clearly slower than the other ranks
    slow_share: float | None = None  # of the run in which it was


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
    throttled: dict[str, float] = field(default_factory=dict)  # by reason: the share of the run's samples
    pcie: str | None = None  # "gen 4 x16"
    processes: list[dict[str, Any]] = field(default_factory=list)  # pid, name, bytes, ours
    errors: dict[str, int] = field(default_factory=dict)  # xid, ecc_corrected, ecc_uncorrected, ...


@dataclass(frozen=True)
class HostView:
    name: str
    time: float | None = None  # of the last sample
    every_s: float | None = None  # the usual time between two samples
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
    ranks: list[int] = field(default_factory=list)  # of the last attempt, where the run has several hosts
    lost: bool = False  # while the run goes on with the others


@dataclass(frozen=True)
class EventView:
    time: float | None
    kind: str  # its name in events.jsonl
    text: str  # one line
    level: Level = "info"
    step: int | None = None


@dataclass(frozen=True)
class AttemptView:
    """One attempt: how it ended, what the explanation found, what the policy decided."""

    attempt: int
    time: str
    state: str | None = None
    cause: str | None = None
    summary: str | None = None
    action: str | None = None
    why: str | None = None
    message: str | None = None  # of a stop that cut ranks off
    damage: str | None = None  # the checkpoint that it could not resume from
    job: str | None = None  # what became of Slurm's job behind it
    # the step that it resumed from, and the settings in which it differs from the attempts before
    changes: str | None = None
    world_size: int | None = None


@dataclass(frozen=True)
class Evaluation:
    """A result of `paceline eval`, with the fields of its line in evals.jsonl."""

    time: str = ""
    step: int = 0
    val_bpb: float = 0.0
    eval_tokens: int = 0  # that were scored
    eval_text: str = ""
    text_field: str | None = None
    max_tokens: int | None = None  # of --tokens

    @property
    def title(self) -> str:
        """What was measured: results with the same title can be compared."""
        field = f", field {self.text_field}" if self.text_field else ""
        return self.eval_text + field + (f", at most {self.max_tokens:,} tokens" if self.max_tokens else "")


@dataclass(frozen=True)
class LogView:
    attempt: int
    rank: int | None  # None: the launch's own log, or the log of another host
    path: str
    bytes: int
    host: str | None = None  # where there are several
    name: str | None = None  # of a log of another host: launch-bob, kernel-bob


@dataclass(frozen=True)
class Goodput:
    """Where the time of a run went. `seconds` has every kind of TIME_KINDS, in that order."""

    seconds: dict[str, float]
    num_steps: int  # that counted
    tok_per_sec: float | None  # over all time but idle; None where no such number exists
    energy_j: int | None = None  # of the GPUs in all attempts, lost work included; None where no GPU reports it

    @property
    def busy_s(self) -> float:
        return sum(self.seconds.values()) - self.seconds["idle"]

    @property
    def share(self) -> float | None:
        """The share of the busy time that went into steps that counted, 0 to 1."""
        return self.seconds["steps"] / self.busy_s if self.busy_s else None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "share": self.share}


@dataclass(frozen=True)
class Snapshot:
    name: str
    path: str
    kind: Literal["training", "script", "log"]
    state: State
    command: list[str] | None = None  # of a script's run
    framework: str | None = None  # of a log whose lines show it
    step: int | None = None  # None too where no line of a script or a log shows one
    num_steps: int | None = None
    loss: float | None = None  # the last one reported; may be NaN or infinite
    val_bpb: float | None = None
    eval_tokens: int | None = None  # held-out tokens that val_bpb is measured on
    eval_text: str | None = None  # the text that they are of
    tok_per_sec: float | None = None
    step_ms: float | None = None
    mfu: float | None = None
    peak_bytes: int | None = None
    eta_s: float | None = None
    elapsed_s: float | None = None
    tokens_per_step: int | None = None
    started: float | None = None
    updated: float | None = None  # the latest heartbeat or change of any file
    silence_s: float | None = None  # of a script or a log: the longest recent silence that it came back from
    series: dict[str, Series] = field(default_factory=dict)  # by field of metrics.jsonl: loss, val_bpb, ...
    rank_series: list[Series] = field(default_factory=list)  # busy_ms by rank; empty where not known
    gpu_series: dict[str, Series] = field(default_factory=dict)  # "HOST/INDEX use", "HOST/INDEX used_bytes", ...
    host_series: dict[str, Series] = field(default_factory=dict)  # "HOST cpu", "HOST ram_used", "HOST net_in_bps", ...
    ranks: list[RankView] = field(default_factory=list)
    hosts: list[HostView] = field(default_factory=list)
    events: list[EventView] = field(default_factory=list)  # the last 500, oldest first
    attempts: list[AttemptView] = field(default_factory=list)
    logs: list[LogView] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)  # by what was measured and by step
    goodput: Goodput | None = None
    plan: dict[str, Any] | None = None  # expected: step_ms, tok_per_sec, peak_bytes, mfu, total_s, where planned
    findings: list[dict[str, Any]] = field(default_factory=list)
    explanation: dict[str, Any] | None = None  # paceline.explain's, of the attempt that ended the run
    notes: list[str] = field(default_factory=list)  # what could not be read, one line each
    tags: list[str] = field(default_factory=list)  # of `paceline runs tag`
    note: str = ""  # of `paceline runs note`
    preparing: dict[str, Any] | None = None  # the work before the launch: label, and share and eta_s where known
    slurm: str | None = None  # job 4711 RUNNING on n[1-4], 3h12m of 8h00m left

    @property
    def share(self) -> float | None:
        """How much of the run is done, or of its preparation."""
        if self.preparing and self.state == "preparing":
            return self.preparing["share"]  # type: ignore[no-any-return]
        return min(1.0, self.step / self.num_steps) if self.num_steps and self.step is not None else None

    @property
    def why_unknown(self) -> str:
        """Why the state of a log is unknown."""
        if self.step is None and self.loss is None:
            return "this log shows no known step, no known loss and no known error"
        return "this log stopped growing without an error or a last word"

    def to_json(self) -> dict[str, Any]:
        """Returns all fields for JSON, with None in place of NaN and infinity."""
        fields: dict[str, Any] = finite({**asdict(self), "goodput": self.goodput.to_json() if self.goodput else None})
        return fields


def finite(value: Any) -> Any:
    """Returns a value of JSON types with None in place of NaN and infinity."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)


CURVES = ("series", "rank_series", "gpu_series", "host_series")
BY_TIME = ("gpu_series", "host_series")  # drawn over time only, so their steps are not sent
PARTS = (
    "ranks", "hosts", "events", "attempts", "logs", "evaluations", "goodput", "plan", "findings", "explanation", "notes",
)  # fmt: skip
HEAD = tuple(field.name for field in fields(Snapshot) if field.name not in (*CURVES, *PARTS))


def changes(before: Snapshot | None, after: Snapshot) -> dict[str, Any]:
    """Returns what changed: {head?, parts?: {name: value}, curves?: {group: {key: new points}}}.

    before None: everything, which is also what a report holds.
    """
    # compared in lists: the same NaN, of a loss that was not written again, is equal to itself
    names = (*HEAD, *PARTS)
    changed = {name for name in names if before is None or [getattr(before, name)] != [getattr(after, name)]}
    news = {
        "head": {name: getattr(after, name) for name in HEAD} if changed.intersection(HEAD) else {},
        "parts": {name: to_plain(getattr(after, name)) for name in PARTS if name in changed},
        "curves": {
            name: points
            for name in CURVES
            if (points := new_points(curves_of(before, name), curves_of(after, name), by_time=name in BY_TIME))
        },
    }
    return {group: values for group, values in news.items() if values}


def to_plain(value: Any) -> Any:
    """Returns a part of a snapshot as JSON types."""
    if isinstance(value, Goodput):
        energy = None if value.energy_j is None else format_energy(value.energy_j)
        return {**value.to_json(), "words": TIME_KINDS, "energy": energy}
    if isinstance(value, list):
        return [asdict(item) if is_dataclass(item) and not isinstance(item, type) else item for item in value]
    return value


def curves_of(snapshot: Snapshot | None, name: str) -> Mapping[str, Series]:
    """Returns a group of curves by key; curves of ranks by the rank's number."""
    if snapshot is None:
        return {}
    curves = getattr(snapshot, name)
    return {str(rank): series for rank, series in enumerate(curves)} if isinstance(curves, list) else curves


def new_points(before: Mapping[str, Series], after: Mapping[str, Series], *, by_time: bool) -> dict[str, Any]:
    """Returns {from, steps?, values, times} by key: the points that replace all from index `from` on; None: the curve is gone."""
    points: dict[str, Any] = {}
    for key, series in after.items():
        old = before.get(key)
        if old != series:
            start = shared_points(old, series) if old else 0
            points[key] = {
                "from": start,
                **({} if by_time else {"steps": series.steps[start:]}),
                "values": [short(value) for value in series.values[start:]],
                "times": [round(time, 1) for time in series.times[start:]],
            }
    return points | {key: None for key in before if key not in after}


def shared_points(old: Series, new: Series) -> int:
    """Returns how many points both begin with: usually all of the old ones, fewer after a curve was thinned."""
    size = len(old.steps)
    if new.steps[:size] == old.steps and new.values[:size] == old.values and new.times[:size] == old.times:
        return size
    points = [zip(curve.steps, curve.values, curve.times, strict=True) for curve in (old, new)]
    pairs = enumerate(zip(*points, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(old.steps), len(new.steps)))


def short(value: float) -> float | None:
    """Returns eight significant digits, more than any screen shows; None, a gap, for NaN and infinity."""
    return float(f"{value:.8g}") if math.isfinite(value) else None


def to_text(message: Any) -> str:
    """Returns JSON in one line; NaN and infinity become null, which every browser reads."""
    try:
        return orjson.dumps(message).decode()
    except TypeError:  # a file name that is not UTF-8
        return json.dumps(finite(message), ensure_ascii=False).encode(errors="replace").decode()
