"""
What a snapshot means, in text: whether the run is well, and where its time went. Views and reports take their texts from here.

Pure: a snapshot and the time in, plain text and levels out, without styles or markup. What is not known is no warning.
`summarize` judges the run in one sentence, with `warnings` while it is live and `troubles` at its end; "all well" needs evidence.
"""

import math
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.heartbeat import END_PHASES
from paceline.units import (
    format_bytes,
    format_duration,
    format_energy,
    format_list,
    format_ms,
    format_number_of,
    format_percent,
    format_ranks,
    unix_time,
)
from paceline.watch.events import end_notes, unsaved_texts
from paceline.watch.measures import (
    FORMATS,
    POWER_LIMIT,
    gpu_errors,
    is_disk_low,
    is_full,
    ram_of,
    spaced,
    throttle_reasons,
)
from paceline.watch.snapshot import (
    BROKEN,
    LIVE,
    TIME_KINDS,
    AttemptView,
    Goodput,
    HostView,
    Level,
    LogView,
    RankView,
    Series,
    Snapshot,
)
from paceline.watch.trend import fell_to_zero, is_falling, rise_of, slowdown, step_times, turns_up

STATE_SIGNS = {  # and the name of a style
    "queued": ("◌", "blue"),
    "preparing": ("◐", "blue"),
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
    "gone": ("✗", "error"),
    "unknown": ("?", "faint"),
}
UNEXPLAINED: dict[str, str] = {  # by state
    "failed": "the run failed",
    "broken": "the run ended without reporting why",
    "gone": "its files are gone: deleted, moved, or on a disk that is not mounted any more",
}
LEVEL_SIGNS = {"info": ("·", "faint"), "good": ("✓", "good"), "warning": ("!", "warning"), "error": ("✗", "error")}

MAX_SILENCE_S, SILENT_STEPS = 60.0, 5  # of a live run, unless so many steps take longer
MAX_SILENCE_UNTIMED_S = 300.0  # of a script or a log that has shown neither a step's time nor a silence yet
SILENCE_RATIO = 2  # times the longest silence that it came back from
SILENT_SAMPLES = 5  # of a host, and at least MAX_SILENCE_S
LONG_PHASES = ("start", "load", "compile", "eval", "sample", "save", "ending")
LONG_PHASE_RATIO = 10  # times as long may a rank be silent in one of these
IDLE_USE, SLOWER_THAN_PLANNED = 0.3, 1.15  # shares of a GPU's time while its run trains, and of a step's planned time
ZERO_LINES = 5  # logged steps without a learning rate
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
    state = snapshot.state
    if state == "gone" and snapshot.preparing:
        return Summary("error", "The command ended before the training began; its own output shows why.")
    if state in UNEXPLAINED:
        return Summary("error", sentence(str((snapshot.explanation or {}).get("summary") or UNEXPLAINED[state])))
    if state == "queued":
        job = snapshot.slurm or "its queue is not known here"
        text = "its job has started, and its attempt has not" if " RUNNING" in job else "Slurm has not started it yet"
        return Summary("info", sentence(f"{text}: {job}"))
    if state == "unknown" and not snapshot.notes:  # which tell why it cannot be read
        return Summary("info", sentence(snapshot.why_unknown))
    if state == "preparing":
        return Summary("info", sentence("no step is taken yet: " + format_preparing(snapshot)))
    if state == "recovering" or state == "starting":
        return start_summary(snapshot, now=now)
    if state == "finished" or state == "stopped":
        texts = list(troubles(snapshot))
        first = finished_text(snapshot) if state == "finished" else "Stopped on request"
        last = "; it can be resumed" if state == "stopped" and snapshot.kind == "training" else ""
        level: Level = "warning" if texts else "good" if state == "finished" else "info"
        return Summary(level, sentence("; ".join([f"{first}{format_recoveries(snapshot)}{last}", *texts])))
    if state not in LIVE:
        return None
    if texts := list(warnings(snapshot, now=now)):
        return Summary("warning", sentence("; ".join(texts)))
    if texts := list(good_signs(snapshot)):
        return Summary("good", sentence(f"all well: {', '.join(texts)}"))
    if snapshot.step or snapshot.series or snapshot.ranks:
        return Summary("info", "Nothing unusual so far, and too little is reported to say more.")
    return Summary("info", "Nothing is known: neither a step nor a loss nor a heartbeat is reported.")


def finished_text(snapshot: Snapshot) -> str:
    """Returns how a run finished; what a script has done is known only where it printed its last step."""
    if snapshot.kind == "training" or snapshot.step == snapshot.num_steps is not None:
        return "All steps are done"
    place = f" at step {snapshot.step:,} of {snapshot.num_steps:,}" if snapshot.step and snapshot.num_steps else ""
    return f"The {'script ended with exit code 0' if snapshot.kind == 'script' else 'training ended without an error'}{place}"


def start_summary(snapshot: Snapshot, *, now: float) -> Summary:
    """The sentence about a run before the first step of an attempt: why there is another attempt, and how far it got."""
    ended = [attempt for attempt in snapshot.attempts[-2:] if attempt.state or attempt.summary]
    broken = ended[-1] if ended and ended[-1].state in ("failed", None) else None
    level: Level = "warning" if broken else "info"
    if ended and ended[-1] is snapshot.attempts[-1]:  # the next one has not begun
        is_decided = snapshot.state == "starting" or ended[-1].action
        itself = " by itself" if snapshot.state == "recovering" else ""
        text = f"The next attempt is starting{itself}." if is_decided else "The supervisor decides what to do next."
    else:
        phases = dict.fromkeys(rank.phase for rank in snapshot.ranks if rank.phase)
        step = f"step of attempt {snapshot.attempts[-1].attempt}" if len(snapshot.attempts) > 1 else "step"
        text = sentence(f"no {step} is finished yet" + (f": {', '.join(phases)}" if phases else ""))
        if texts := list(warnings(snapshot, now=now)):
            text, level = f"{text} {sentence('; '.join(texts))}", "warning"
    if broken:
        why = broken.summary or (snapshot.explanation or {}).get("summary") or "its cause is being looked for"
        text = f"{text} {sentence(f'attempt {broken.attempt} ended: {why}')}"
    return Summary(level, text)


def format_preparing(snapshot: Snapshot) -> str:
    """tokenize, 42 %, 3m10s left"""
    work = snapshot.preparing or {}
    share, eta_s = work.get("share"), work.get("eta_s")
    parts = [str(work.get("label")), *([format_percent(share)] if share is not None else [])]
    return ", ".join(parts + ([f"{format_duration(eta_s)} left"] if eta_s is not None else []))


def format_recoveries(snapshot: Snapshot) -> str:
    """Returns `, after 2 recoveries (cuda-oom, hang)`; an extension and a resume after Ctrl-C are none, nor is one by hand."""
    broken = [attempt for attempt in snapshot.attempts[:-1] if attempt.state in ("failed", None)]
    causes = ", ".join(dict.fromkeys(attempt.cause for attempt in broken if attempt.cause))
    is_by_itself = all(attempt.action not in (None, "stop") for attempt in broken)
    count = format_number_of(len(broken), *(("recovery", "recoveries") if is_by_itself else ("failed attempt",)))
    return (f", after {count}" + (f" ({causes})" if causes else "")) if broken else ""


def troubles(snapshot: Snapshot) -> Iterator[str]:
    """Yields what went wrong in a run that has ended, and what slowed it down over its whole time."""
    yield from end_notes(snapshot.state, snapshot.attempts)
    if snapshot.loss is not None and (fell_to_zero(snapshot) or not math.isfinite(snapshot.loss)):
        yield f"the last loss is {'NaN or infinite' if snapshot.loss else '0'}"
    yield from turns_up(snapshot)
    for rank in snapshot.ranks:
        if (share := rank.slow_share or 0) >= MIN_SHARE:
            yield f"{name_ranks([rank], snapshot)} was slower than the others for {format_percent(share)} of the steps"
    for host in snapshot.hosts:
        for gpu in host.gpus:
            name = f"GPU {gpu.index} of {host.name}"
            shares = {reason: share for reason, share in gpu.throttled.items() if reason != POWER_LIMIT}
            if shares and max(shares.values()) >= MIN_SHARE:
                curve = snapshot.gpu_series.get(f"{host.name}/{gpu.index} temperature_c", Series())
                heat = f", at up to {FORMATS['celsius'](max(curve.values))}" if curve.values else ""
                reasons = ", ".join(map(spaced, shares))
                yield f"{name} was throttled for {format_percent(max(shares.values()))} of the time ({reasons}{heat})"
            if errors := gpu_errors(gpu):
                yield f"{name} had errors: {errors}"
    times = step_times(snapshot)
    planned = (snapshot.plan or {}).get("step_ms")
    if times and planned and (over := statistics.median(times) / planned) > SLOWER_THAN_PLANNED:
        yield f"a step took {format_percent(over - 1)} longer than planned"
    elif snapshot.state != "finished" and (slower := slowdown(times)):
        yield f"a step took {format_ms(slower[0])} at the end and {format_ms(slower[1])} at its best"
    if (spent := snapshot.goodput) and spent.busy_s and (lost := spent.seconds["lost"] / spent.busy_s) >= MIN_SHARE:
        yield f"{format_percent(lost)} of the time was lost work"


def warnings(snapshot: Snapshot, *, now: float) -> Iterator[str]:
    """Yields what is wrong with a live run, each with its number, the gravest first."""
    longest_s = max_silence_s(snapshot.step_ms, snapshot.silence_s, heartbeats=snapshot.kind == "training")
    if snapshot.updated is not None and now - snapshot.updated > longest_s * (
        LONG_PHASE_RATIO if snapshot.state == "starting" else 1
    ):
        yield f"no output or heartbeat for {format_duration(now - snapshot.updated)}"
    elif silent := [rank for rank in snapshot.ranks if is_silent(rank, longest_s=longest_s)]:
        phase = f" in {silent[0].phase}" if silent[0].phase else ""
        yield f"{ranks_are(silent, snapshot)} silent for {format_duration(silent[0].silent_s)}{phase}"
    yield from unsaved_texts(snapshot.events)
    yield from loss_warnings(snapshot) if snapshot.state != "starting" else ()
    if slow := [rank for rank in snapshot.ranks if rank.slow]:
        yield f"{ranks_are(slow, snapshot)} slower than the others"
    start = unix_time(snapshot.attempts[-1].time) if snapshot.attempts else 0.0
    if lost := [host.name for host in snapshot.hosts if host.lost]:
        yield f"lost {format_list(lost)}: continuing on {format_list(host.name for host in snapshot.hosts if not host.lost)}"
    for host in [host for host in snapshot.hosts if not host.lost]:
        quiet_s = now - max(host.time or 0.0, start)
        if host.every_s is not None and quiet_s > max(MAX_SILENCE_S, SILENT_SAMPLES * host.every_s):
            yield f"no health sample of {host.name} for {format_duration(quiet_s)}"
        else:
            yield from host_warnings(host, busy=snapshot.state == "training")
    yield from speed_warnings(snapshot)


def loss_warnings(snapshot: Snapshot) -> Iterator[str]:
    if snapshot.loss is not None and not math.isfinite(snapshot.loss):
        yield "the loss is NaN or infinite"
    elif fell_to_zero(snapshot):
        yield "the loss is 0"
    elif rise := rise_of(snapshot.series.get("loss", Series())):
        yield f"the loss is {format_percent(rise[0])} higher{f' since step {rise[1]:,}' if snapshot.step else ''} than before"
    yield from turns_up(snapshot)
    for name in ("lr", "lr_mult"):
        values = snapshot.series.get(name, Series()).values[-ZERO_LINES:]
        if len(values) == ZERO_LINES and not any(values):
            yield "the learning rate is 0"


def max_silence_s(step_ms: float | None, silence_s: float | None, *, heartbeats: bool = False) -> float:
    """Seconds of silence that are usual. silence_s: see Snapshot. heartbeats: whether its ranks write to progress/."""
    if step_ms is None and silence_s is None and not heartbeats:
        return MAX_SILENCE_UNTIMED_S
    return max(MAX_SILENCE_S, SILENT_STEPS * (step_ms or 0) / 1000, SILENCE_RATIO * (silence_s or 0))


def is_silent(rank: RankView, *, longest_s: float = MAX_SILENCE_S) -> bool:
    """Whether a rank that has not ended sends no heartbeat for longer than its phase explains."""
    ratio = LONG_PHASE_RATIO if rank.phase in LONG_PHASES else 1
    return rank.phase not in END_PHASES and (rank.silent_s or 0) > ratio * longest_s


def host_warnings(host: HostView, *, busy: bool) -> Iterator[str]:
    for gpu in host.gpus:
        name = f"GPU {gpu.index} of {host.name}"
        if reasons := throttle_reasons(gpu):
            yield f"{name} is throttled: {', '.join(reasons)}"
        if errors := gpu_errors(gpu):
            yield f"{name} has errors: {errors}"
        if busy and gpu.use is not None and gpu.use < IDLE_USE:
            yield f"{name} is busy {format_percent(gpu.use)} of the time"
    used, total = ram_of(host)
    if used and total and is_full(used, total):
        yield f"{format_bytes(total - used)} of {format_bytes(total)} RAM are left on {host.name}"
    if host.disk_free is not None and is_disk_low(host):
        yield f"{format_bytes(host.disk_free)} of disk are left on {host.name}"


def speed_warnings(snapshot: Snapshot) -> Iterator[str]:
    planned = (snapshot.plan or {}).get("step_ms")
    if planned and snapshot.step_ms and snapshot.step_ms > SLOWER_THAN_PLANNED * planned:
        yield f"a step takes {format_percent(snapshot.step_ms / planned - 1)} longer than planned"
    elif slower := slowdown(step_times(snapshot)):
        yield f"a step takes {format_ms(slower[0])} now and took {format_ms(slower[1])} at its best"


def good_signs(snapshot: Snapshot) -> Iterator[str]:
    """Yields what shows that a run without warnings is well."""
    if (falling := is_falling(snapshot.series.get("loss", Series()))) is not None:
        yield "the loss is falling" if falling else "the loss is level"
    gpus = [gpu for host in snapshot.hosts for gpu in host.gpus if not host.lost]
    if uses := [gpu.use for gpu in gpus if gpu.use is not None]:
        subject = "the GPU is" if len(gpus) == 1 else f"{len(gpus)} GPUs are"
        yield f"{subject} busy {format_percent(statistics.fmean(uses))} of the time"
    if len(snapshot.ranks) > 1 and any(rank.slow_share is not None for rank in snapshot.ranks):
        yield "no rank is slow"


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def has_hosts(snapshot: Snapshot) -> bool:
    """Whether it matters which rank is on which host."""
    return any(host.ranks or host.lost for host in snapshot.hosts)


def name_ranks(ranks: Sequence[RankView], snapshot: Snapshot) -> str:
    """rank 3; of several hosts: rank 3 on bob"""
    hosts = dict.fromkeys(rank.host for rank in ranks if rank.host) if has_hosts(snapshot) else ()
    where = f" on {format_list(hosts, limit=MAX_RANKS_NAMED)}" if hosts else ""
    return format_ranks((rank.rank for rank in ranks), limit=MAX_RANKS_NAMED) + where


def ranks_are(ranks: Sequence[RankView], snapshot: Snapshot) -> str:
    return f"{name_ranks(ranks, snapshot)} {'is' if len(ranks) == 1 else 'are'}"


def ranks_and_hosts(snapshot: Snapshot) -> str:
    """4 ranks on 2 hosts; 2 ranks on ada; empty where no rank is known"""
    hosts = sorted({rank.host for rank in snapshot.ranks if rank.host})
    where = f" on {hosts[0]}" if len(hosts) == 1 else f" on {len(hosts)} hosts" if hosts else ""
    slurm = f", {snapshot.slurm}" if snapshot.slurm and snapshot.state in LIVE else ""
    return f"{format_number_of(len(snapshot.ranks), 'rank')}{where}{slurm}" if snapshot.ranks else ""


def host_place(host: HostView) -> str:
    """lost; ranks 0 and 1; empty where there is one host"""
    return "lost" if host.lost else format_ranks(host.ranks, limit=MAX_RANKS_NAMED) if host.ranks else ""


def log_title(log: LogView) -> str:
    """rank 3; of several hosts: rank 3 on bob, launch on bob, kernel log of bob"""
    if log.name and log.name.startswith("kernel"):
        return f"kernel log of {log.host}"
    return ("launch" if log.rank is None else f"rank {log.rank}") + (f" on {log.host}" if log.host else "")


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


def attempt_outcome(snapshot: Snapshot, attempt: AttemptView) -> str:
    is_current = snapshot.state in LIVE and attempt is snapshot.attempts[-1]
    return attempt.state or ("running" if is_current and not attempt.cause else "no end recorded")


def goodput_share(snapshot: Snapshot) -> float | None:
    """The share of the time in steps that counted; None where it is not known, and before the first step."""
    is_early = snapshot.state == "starting" and len(snapshot.attempts) < 2
    return None if snapshot.goodput is None or is_early else snapshot.goodput.share


def time_rows(goodput: Goodput) -> list[dict[str, Any]]:
    """Returns kind, name, duration, share of the busy time, and percent: the longest kind first, idle time last."""
    rows, spent = [], {kind: seconds for kind, seconds in goodput.seconds.items() if seconds > 0}
    for kind, seconds in sorted(spent.items(), key=lambda item: (item[0] == "idle", -item[1])):
        share = seconds / goodput.busy_s if goodput.busy_s and kind != "idle" else None
        duration, percent = format_duration(seconds), "" if share is None else FORMATS["share"](share)
        rows.append(
            {"kind": kind, "name": time_name(kind, goodput), "duration": duration, "share": share, "percent": percent}
        )
    return rows


def time_name(kind: str, goodput: Goodput) -> str:
    """Returns what a kind of time is called; a script's steps are not known."""
    is_script = goodput.busy_s > 0 and goodput.tok_per_sec is None and not goodput.num_steps
    return "the script" if kind == "steps" and is_script else TIME_KINDS[kind]


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
    steps = f"{format_percent(goodput.share)} of {format_duration(goodput.busy_s)} in {time_name('steps', goodput)}"
    speed = "" if goodput.tok_per_sec is None else f"; {goodput.tok_per_sec:,.0f} tok/s overall"
    energy = "" if goodput.energy_j is None else f"; {format_energy(goodput.energy_j)}"
    return f"{', '.join([steps, *others])}{speed}{energy}"
