"""
What a snapshot means, in text: whether the run is well, and each value with its unit. Views and reports take their texts from here.

Pure: a snapshot and the time in, plain text and levels out, without styles or markup. What is not known is no warning.
`summarize` judges the run in one sentence; `warnings` are its parts; `format_measure`, `format_percent`, `format_power`,
`format_temperature`, `format_memory` and `gpu_problems` are for single values; STATE_SIGNS and LEVEL_SIGNS go before them.
"""

import math
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.units import (
    GIB,
    format_bytes,
    format_duration,
    format_energy,
    format_ms,
    format_number_of,
    format_ranks,
    unix_time,
)
from paceline.watch.snapshot import (
    BROKEN,
    LIVE,
    TIME_KINDS,
    AttemptView,
    Goodput,
    GpuView,
    HostView,
    Level,
    LogView,
    RankView,
    Series,
    Snapshot,
)

STATE_SIGNS = {  # and the name of a style
    "starting": ("◐", "blue"),
    "training": ("●", "good"),
    "evaluating": ("◐", "good"),
    "saving": ("◐", "good"),
    "recovering": ("↻", "warning"),
    "running": ("●", "good"),
    "finished": ("✓", "good"),
    "stopped": ("■", "warning"),
    "failed": ("✗", "error"),
    "broken": ("✗", "error"),
    "unknown": ("?", "faint"),
}
LEVEL_SIGNS = {"info": ("·", "faint"), "good": ("✓", "good"), "warning": ("!", "warning"), "error": ("✗", "error")}


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
    "share": lambda share: f"{100 * share:.1f} %",
    "percent": lambda share: f"{100 * share:.0f} %",
    "bytes": format_bytes,
    "count": "{:,.0f}".format,
    "watts": "{:.0f} W".format,
    "celsius": "{:.0f} °C".format,
    "mhz": "{:,.0f} MHz".format,
    "rate": lambda rate: f"{format_bytes(rate)}/s",
}

MAX_SILENCE_S = 60.0  # of a live run, unless SILENT_STEPS steps take longer
SILENT_STEPS = 5
MAX_SILENCE_UNTIMED_S = 300.0  # of a script or a log that has shown neither a step's time nor a silence yet
SILENCE_RATIO = 2  # times the longest silence that it came back from
SILENT_SAMPLES = 5  # of a host, and at least MAX_SILENCE_S
LONG_PHASES = ("start", "load", "compile", "eval", "sample", "save", "ending")
LONG_PHASE_RATIO = 10  # times as long may a rank be silent in one of these
END_PHASES = ("done", "stopped")  # a rank in one of these sends no more heartbeats
IDLE_USE = 0.3  # of a GPU while its run trains
SLOWER_THAN_PLANNED, SLOWER_THAN_BEFORE = 1.15, 1.5
LAST_STEPS, MIN_STEPS = 10, 40  # logged steps: whose median is the present, and how many a run needs for a past
FULL_RAM, MIN_DISK_BYTES = 0.95, 5 << 30
TREND_POINTS = 20  # the last points of a curve, compared with as many before them
RISE, FALL = 0.02, 0.0005  # of the loss between the two
ERROR_NAMES = {"xid": "xid", "ecc_uncorrected": "ecc"}  # errors of a GPU that a person must know, and their short names
POWER_LIMIT = "power"  # the reason to slow down of every GPU that works: no problem
MAX_RANKS_NAMED = 6
MIN_SHARE = 0.05  # of the busy time: a kind of time with less is not in goodput_line
TROUBLE = re.compile(r"\b(error|exception|traceback|failed|fatal|killed)\b|Error:", re.IGNORECASE)
WARNING = re.compile(r"\bwarn(ing)?\b", re.IGNORECASE)


@dataclass(frozen=True)
class Summary:
    level: Level
    text: str


def summarize(snapshot: Snapshot, *, now: float) -> Summary | None:
    """Returns one sentence about how the run is; None where its state says everything."""
    if snapshot.state in ("failed", "broken"):
        unexplained = "The run ended without reporting why." if snapshot.state == "broken" else "The run failed."
        return Summary("error", sentence(str((snapshot.explanation or {}).get("summary") or unexplained)))
    if snapshot.state == "recovering" and (last := snapshot.attempts[-1:]) and last[0].summary:
        return Summary("warning", f"Attempt {last[0].attempt} ended: {last[0].summary}. The next attempt is starting.")
    if snapshot.state == "starting":
        phases = dict.fromkeys(rank.phase for rank in snapshot.ranks if rank.phase)
        return Summary("info", f"No step is finished yet{': ' if phases else ''}{', '.join(phases)}.")
    count = len(snapshot.attempts) - 1
    recoveries = f", after {format_number_of(count, 'recovery', 'recoveries')}" if count > 0 else ""
    if snapshot.state == "finished":
        return Summary("good", f"All steps are done{recoveries}.")
    if snapshot.state == "stopped":
        return Summary("info", f"Stopped on request{recoveries}; it can be resumed.")
    if snapshot.state not in LIVE:
        return None
    if texts := list(warnings(snapshot, now=now)):
        return Summary("warning", sentence("; ".join(texts)))
    return Summary("good", sentence(": ".join(filter(None, ("all well", ", ".join(good_signs(snapshot)))))))


def warnings(snapshot: Snapshot, *, now: float) -> Iterator[str]:
    """Yields what is wrong with a live run, each with its number, the gravest first."""
    longest_s = max_silence_s(snapshot.step_ms, snapshot.silence_s, heartbeats=snapshot.kind == "training")
    if snapshot.updated is not None and now - snapshot.updated > longest_s:
        yield f"no output or heartbeat for {format_duration(now - snapshot.updated)}"
    elif silent := [rank for rank in snapshot.ranks if is_silent(rank, longest_s=longest_s)]:
        phase = f" in {silent[0].phase}" if silent[0].phase else ""
        yield f"{ranks_are([rank.rank for rank in silent])} silent for {format_duration(silent[0].silent_s)}{phase}"
    curve = snapshot.series.get("loss", Series())
    if snapshot.loss is not None and not math.isfinite(snapshot.loss):
        yield "the loss is NaN or infinite"
    elif (change := trend(curve)) is not None and change > RISE:
        yield f"the loss is {100 * change:.0f} % higher since step {curve.steps[-TREND_POINTS]:,} than before"
    if slow := [rank.rank for rank in snapshot.ranks if rank.slow]:
        yield f"{ranks_are(slow)} slower than the others"
    start = unix_time(snapshot.attempts[-1].time) if snapshot.attempts else 0.0
    for host in snapshot.hosts:
        quiet_s = now - max(host.time or 0.0, start)
        if host.every_s is not None and quiet_s > max(MAX_SILENCE_S, SILENT_SAMPLES * host.every_s):
            yield f"no health sample of {host.name} for {format_duration(quiet_s)}"
        else:
            yield from host_warnings(host, busy=snapshot.state == "training")
    yield from speed_warnings(snapshot)


def max_silence_s(step_ms: float | None, silence_s: float | None, *, heartbeats: bool = False) -> float:
    """Seconds of silence that are usual. silence_s: see Snapshot. heartbeats: whether its ranks write to progress/."""
    if step_ms is None and silence_s is None and not heartbeats:
        return MAX_SILENCE_UNTIMED_S
    return max(MAX_SILENCE_S, SILENT_STEPS * (step_ms or 0) / 1000, SILENCE_RATIO * (silence_s or 0))


def is_silent(rank: RankView, *, longest_s: float = MAX_SILENCE_S) -> bool:
    """Whether a rank that has not ended sends no heartbeat for longer than its phase explains."""
    ratio = LONG_PHASE_RATIO if rank.phase in LONG_PHASES else 1
    return rank.phase not in END_PHASES and (rank.silent_s or 0) > ratio * longest_s


def trend(series: Series) -> float | None:
    """The change of a curve's last points against those before them, as a share; None for a short or non-finite curve."""
    last, before = series.values[-TREND_POINTS:], series.values[-2 * TREND_POINTS : -TREND_POINTS]
    if len(before) < TREND_POINTS or not all(map(math.isfinite, (*last, *before))):
        return None
    mean = statistics.fmean(before)
    return (statistics.fmean(last) - mean) / abs(mean) if mean else None


def host_warnings(host: HostView, *, busy: bool) -> Iterator[str]:
    for gpu in host.gpus:
        name = f"GPU {gpu.index} of {host.name}"
        if reasons := throttle_reasons(gpu):
            yield f"{name} is throttled: {', '.join(reasons)}"
        if errors := [f"{spaced(error)} {gpu.errors[error]}" for error in ERROR_NAMES if gpu.errors.get(error)]:
            yield f"{name} has errors: {', '.join(errors)}"
        if busy and gpu.use is not None and gpu.use < IDLE_USE:
            yield f"{name} is busy {100 * gpu.use:.0f} % of the time"
    used, total = ram_of(host)
    if used and total and is_full(used, total):
        yield f"{host.name} has {format_bytes(total - used)} of {format_bytes(total)} RAM left"
    if host.disk_free is not None and is_disk_low(host):
        yield f"{host.name} has {format_bytes(host.disk_free)} of disk left"


def speed_warnings(snapshot: Snapshot) -> Iterator[str]:
    planned = (snapshot.plan or {}).get("step_ms")
    if planned and snapshot.step_ms and snapshot.step_ms > SLOWER_THAN_PLANNED * planned:
        yield f"a step takes {100 * (snapshot.step_ms / planned - 1):.0f} % longer than planned"
        return
    times = [value for value in snapshot.series.get("step_ms", Series()).values if math.isfinite(value)]
    if len(times) < MIN_STEPS:
        return
    present, best = statistics.median(times[-LAST_STEPS:]), statistics.quantiles(times, n=4)[0]
    if present > SLOWER_THAN_BEFORE * best:
        yield f"a step takes {format_ms(present)} now and took {format_ms(best)} at its best"


def good_signs(snapshot: Snapshot) -> Iterator[str]:
    """Yields what shows that a run without warnings is well."""
    loss = snapshot.series.get("loss")
    if loss is not None and (change := trend(loss)) is not None:
        yield "the loss is falling" if change < -FALL else "the loss is level"
    gpus = [gpu for host in snapshot.hosts for gpu in host.gpus]
    if uses := [gpu.use for gpu in gpus if gpu.use is not None]:
        subject = "the GPU is" if len(gpus) == 1 else f"{len(gpus)} GPUs are"
        yield f"{subject} busy {100 * statistics.fmean(uses):.0f} % of the time"
    if len(snapshot.ranks) > 1 and any(rank.busy_ms for rank in snapshot.ranks):
        yield "no rank is slow"


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def ranks_are(ranks: Sequence[int]) -> str:
    return f"{format_ranks(ranks, limit=MAX_RANKS_NAMED)} {'is' if len(ranks) == 1 else 'are'}"


def spaced(name: str) -> str:
    return name.replace("_", " ")


def format_measure(name: str, value: float) -> str:
    """Formats a value of a snapshot or a curve, by the name of its field, with its unit."""
    if name in METRICS and (unit := METRICS[name].unit):
        return FORMATS[unit](value)
    return f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"


def format_figure(name: str, value: float | None) -> str:
    """Returns a figure of the plan or of the run with its unit; n/a where it is not known."""
    if value is None or not math.isfinite(value):
        return "n/a"
    return format_duration(value) if name == "total_s" else format_measure(name, value)


def format_time(time: str) -> str:
    """Returns an ISO time to the second, with a space in the middle."""
    return str(time)[:19].replace("T", " ")


def format_percent(share: float | None) -> str:
    return "n/a" if share is None else FORMATS["percent"](share)


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


def line_level(line: str) -> Level:
    """The level of a log's line, by the words in it."""
    return "error" if TROUBLE.search(line) else "warning" if WARNING.search(line) else "info"


def first_log(snapshot: Snapshot) -> LogView | None:
    """The log to open with: of the last attempt, the rank that broke it, else the first rank."""
    if not snapshot.logs:
        return None
    last = max(log.attempt for log in snapshot.logs)
    logs = [log for log in snapshot.logs if log.attempt == last]
    culprit = snapshot.explanation.get("rank") if snapshot.explanation and snapshot.state in BROKEN else None
    ranks = [log for log in logs if log.rank is not None]
    return next((log for log in ranks if log.rank == culprit), (ranks or logs)[0])


def attempt_outcome(attempt: AttemptView) -> str:
    return attempt.state or "no end recorded"


def time_rows(goodput: Goodput) -> list[dict[str, Any]]:
    """Returns kind, name, duration, share of the busy time, and percent: the longest kind first, idle time last."""
    rows, spent = [], {kind: seconds for kind, seconds in goodput.seconds.items() if seconds > 0}
    for kind, seconds in sorted(spent.items(), key=lambda item: (item[0] == "idle", -item[1])):
        share = seconds / goodput.busy_s if goodput.busy_s and kind != "idle" else None
        duration, percent = format_duration(seconds), "" if share is None else FORMATS["share"](share)
        rows.append({"kind": kind, "name": TIME_KINDS[kind], "duration": duration, "share": share, "percent": percent})
    return rows


def goodput_table(goodput: Goodput) -> list[str]:
    """Lines of a table in the order of TIME_KINDS: each kind of time with its duration and its share of the busy time."""
    rows = {row["kind"]: row for row in time_rows(goodput)}
    shown = [rows[kind] for kind in TIME_KINDS if kind in rows]
    lines = [f"  {row['name']:<26}{row['duration']:>9}  {row['percent']:>7}".rstrip() for row in shown]
    if goodput.energy_j is not None:
        lines.append(f"  {'energy of the GPUs':<26}{format_energy(goodput.energy_j):>9}")
    return lines


def goodput_line(goodput: Goodput) -> str:
    """64 % of 29s in steps that counted, 21 % work lost, 10 % recovery; 1,042 tok/s overall; 2.91 Wh"""
    others = [
        f"{format_percent(row['share'])} {row['name']}"
        for row in time_rows(goodput)
        if row["kind"] not in ("steps", "idle") and row["share"] >= MIN_SHARE
    ]
    steps = f"{format_percent(goodput.share)} of {format_duration(goodput.busy_s)} in {TIME_KINDS['steps']}"
    speed = "" if goodput.tok_per_sec is None else f"; {goodput.tok_per_sec:,.0f} tok/s overall"
    energy = "" if goodput.energy_j is None else f"; {format_energy(goodput.energy_j)}"
    return f"{', '.join([steps, *others])}{speed}{energy}"
