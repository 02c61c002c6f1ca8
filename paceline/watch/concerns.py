"""
One line that tells whether a run is well, and what in it wants a look. Pure: a snapshot and the time.

Each concern is a fact of the snapshot with its number. What is not known is no concern.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.units import format_bytes, format_duration
from paceline.watch.lines import unix_time
from paceline.watch.snapshot import GpuView, HostView, Level, Series, Snapshot

LIVE = ("starting", "training", "evaluating", "saving", "recovering", "running")
SILENT_S = 60.0  # for a run that goes on, and at least as long as SILENT_STEPS steps
SILENT_STEPS = 5
SILENT_UNSEEN_S = 300.0  # of a script or a log of which neither a step's time nor a silence is known yet
SILENCES = 2  # times the longest that it came back from
SILENT_SAMPLES = 5  # of a host, and at least SILENT_S
ENDED = ("done", "stopped")  # phases of a rank of which no more is to come
# in which a rank may be silent ten times as long
LONG_PHASES = ("start", "load", "compile", "eval", "sample", "save", "ending")
IDLE_USE = 0.3  # of a GPU while its run trains
SLOWER_THAN_PLANNED, SLOWER_THAN_IT_WAS = 1.15, 1.5
LAST_STEPS, LEAST_STEPS = 10, 40  # logged ones: whose median is now, and how many a run must have to have been faster
FULL_RAM, LEAST_DISK = 0.95, 5 << 30
TREND_POINTS = 20  # the last ones, compared with as many before them
RISE, FALL = 0.02, 0.0005  # of the loss between the two
GRAVE_ERRORS = ("xid", "ecc_uncorrected")
AT_ITS_POWER_LIMIT = "power"  # a reason to clock down that every card has that works


@dataclass(frozen=True)
class Summary:
    level: Level
    text: str


def summary(snapshot: Snapshot, *, now: float) -> Summary | None:
    """None where the state says it all."""
    if snapshot.state in ("failed", "broken"):
        return Summary("error", how_it_ended(snapshot))
    if snapshot.state == "recovering" and (last := snapshot.attempts[-1:]) and last[0].summary:
        return Summary("warning", f"Attempt {last[0].attempt} ended: {last[0].summary}. The next one is on its way.")
    if snapshot.state == "starting":
        phases = dict.fromkeys(rank.phase for rank in snapshot.ranks if rank.phase)
        return Summary("info", f"No step is done yet{': ' if phases else ''}{', '.join(phases)}.")
    if snapshot.state not in LIVE:
        return how_it_went(snapshot)
    if found := list(concerns(snapshot, now=now)):
        return Summary("warning", sentence(found))
    return Summary("good", sentence(["all well", *signs_of_life(snapshot)]))


def concerns(snapshot: Snapshot, *, now: float) -> Iterator[str]:
    """The gravest first."""
    yield from silence(snapshot, now=now)
    yield from of_the_loss(snapshot.loss, snapshot.series.get("loss", Series()))
    if slow := [rank for rank in snapshot.ranks if rank.slow]:
        yield f"{names('rank', [rank.rank for rank in slow])} slower than the others"
    began = unix_time(snapshot.attempts[-1].time) if snapshot.attempts else 0.0
    for host in snapshot.hosts:
        quiet_s = now - max(host.time or 0.0, began)
        if host.every_s is not None and quiet_s > max(SILENT_S, SILENT_SAMPLES * host.every_s):
            yield f"no sample of {host.name} for {format_duration(quiet_s)}"
        else:
            yield from of_a_host(host, busy=snapshot.state == "training")
    yield from of_the_pace(snapshot)


def silence(snapshot: Snapshot, *, now: float) -> Iterator[str]:
    longest = longest_silence(snapshot.step_ms, snapshot.silence_s, marked=snapshot.kind == "training")
    if snapshot.updated is not None and now - snapshot.updated > longest:
        yield f"no sign of life for {format_duration(now - snapshot.updated)}"
        return
    going = [rank for rank in snapshot.ranks if rank.phase not in ENDED]
    if quiet := [rank for rank in going if (rank.silent_s or 0) > longest * (10 if rank.phase in LONG_PHASES else 1)]:
        place = f" in {quiet[0].phase}" if quiet[0].phase else ""
        yield f"{names('rank', [rank.rank for rank in quiet])} silent for {format_duration(quiet[0].silent_s)}{place}"


def longest_silence(step_ms: float | None, silence_s: float | None, *, marked: bool = False) -> float:
    """Seconds after which it is worth a word. silence_s: see Snapshot; marked: its ranks leave marks in progress/."""
    if step_ms is None and silence_s is None and not marked:
        return SILENT_UNSEEN_S
    return max(SILENT_S, SILENT_STEPS * (step_ms or 0) / 1000, SILENCES * (silence_s or 0))


def of_the_loss(loss: float | None, curve: Series) -> Iterator[str]:
    if loss is not None and not math.isfinite(loss):
        yield "the loss is no number"
    elif (change := trend(curve)) is not None and change > RISE:
        since = curve.steps[-TREND_POINTS]
        yield f"the loss is {100 * change:.0f} % higher since step {since:,} than before"


def trend(series: Series) -> float | None:
    """The change of the mean from the points before the last ones to those, as a share; None of a short or broken curve."""
    last, before = series.values[-TREND_POINTS:], series.values[-2 * TREND_POINTS : -TREND_POINTS]
    if len(before) < TREND_POINTS or not all(map(math.isfinite, (*last, *before))):
        return None
    middle = statistics.fmean(before)
    return (statistics.fmean(last) - middle) / abs(middle) if middle else None


def of_a_host(host: HostView, *, busy: bool) -> Iterator[str]:
    for gpu in host.gpus:
        where = f"GPU {gpu.index} of {host.name}"
        if reasons := [each for each in gpu.throttle if each != AT_ITS_POWER_LIMIT]:
            yield f"{where} is held back: {', '.join(map(in_words, reasons))}"
        if errors := {name: count for name, count in gpu.errors.items() if count and name in GRAVE_ERRORS}:
            yield f"{where} has errors: {', '.join(f'{in_words(name)} {count}' for name, count in errors.items())}"
        if busy and gpu.use is not None and gpu.use < IDLE_USE:
            yield f"{where} is busy {100 * gpu.use:.0f} % of the time"
    used, whole = host.ram_used, host.ram_total
    if host.cgroup_limit and host.cgroup_used is not None:
        used, whole = host.cgroup_used, host.cgroup_limit
    if used is not None and whole and used > FULL_RAM * whole:
        yield f"{host.name} has {format_bytes(whole - used)} of {format_bytes(whole)} RAM left"
    if host.disk_free is not None and host.disk_free < LEAST_DISK:
        yield f"{host.name} has {format_bytes(host.disk_free)} of disk left"


def of_the_pace(snapshot: Snapshot) -> Iterator[str]:
    planned = (snapshot.plan or {}).get("step_ms")
    if planned and snapshot.step_ms and snapshot.step_ms > SLOWER_THAN_PLANNED * planned:
        yield f"a step takes {100 * (snapshot.step_ms / planned - 1):.0f} % longer than planned"
        return
    known = [value for value in snapshot.series.get("step_ms", Series()).values if math.isfinite(value)]
    if len(known) < LEAST_STEPS:
        return
    now, quick = statistics.median(known[-LAST_STEPS:]), statistics.quantiles(known, n=4)[0]
    if now > SLOWER_THAN_IT_WAS * quick:
        yield f"a step takes {now:,.0f} ms now and took {quick:,.0f} ms at its best"


def signs_of_life(snapshot: Snapshot) -> Iterator[str]:
    """What can be said for a run of which nothing is wrong."""
    loss = snapshot.series.get("loss")
    if loss is not None and (change := trend(loss)) is not None:
        yield "the loss is falling" if change < -FALL else "the loss is level"
    gpus = [gpu for host in snapshot.hosts for gpu in host.gpus]
    if uses := [gpu.use for gpu in gpus if gpu.use is not None]:
        yield f"{plural(gpus)} busy {100 * statistics.fmean(uses):.0f} % of the time"
    if len(snapshot.ranks) > 1 and any(rank.busy_ms for rank in snapshot.ranks):
        yield "no rank is slow"


def how_it_ended(snapshot: Snapshot) -> str:
    why = snapshot.explanation or {}
    if why.get("summary"):
        return sentence([str(why["summary"])])
    return "It ended without a word." if snapshot.state == "broken" else "It failed."


def how_it_went(snapshot: Snapshot) -> Summary | None:
    again = len(snapshot.attempts) - 1
    times = f", after {again} recover{'y' if again == 1 else 'ies'}" if again > 0 else ""
    if snapshot.state == "finished":
        return Summary("good", f"All steps are done{times}.")
    if snapshot.state == "stopped":
        return Summary("info", f"Stopped on request{times}; it can be resumed.")
    return None


def sentence(parts: Sequence[str]) -> str:
    """all well, x, y -> All well: x, y."""
    text = f"{parts[0]}: {', '.join(parts[1:])}" if parts[0] == "all well" and parts[1:] else "; ".join(parts)
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def names(word: str, numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:6])) + (" ..." if len(numbers) > 6 else "")
    return f"{word}{'s' if len(numbers) > 1 else ''} {shown} {'are' if len(numbers) > 1 else 'is'}"


def plural(gpus: Sequence[GpuView]) -> str:
    return "the GPU is" if len(gpus) == 1 else f"{len(gpus)} GPUs are"


def in_words(name: str) -> str:
    return name.replace("_", " ")
