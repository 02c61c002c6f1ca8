"""
The panels of the web page and the report as text, shares and levels, so that the browser formats and judges nothing.

Pure: a Snapshot and the time in, JSON out. Numbers are formatted by the functions of the terminal view, so both views show
the same text. A time of day stays a number, because only the browser knows the reader's time zone.
"""

import math
import re
import shlex
import statistics
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from paceline.units import format_bytes, format_count, format_duration, format_energy, format_percent, unix_time
from paceline.watch.about import OWN_KEYS, evaluation_rows, evaluations_by_title, group_key
from paceline.watch.device_panels import Panel, host_panel, map_panels, ranks_panel
from paceline.watch.measures import METRICS, format_figure, format_step
from paceline.watch.snapshot import LIVE, AttemptView, EventView, Level, LogView, Series, Snapshot
from paceline.watch.summary import (
    LEVEL_SIGNS,
    STATE_SIGNS,
    attempt_outcome,
    first_log,
    goodput_share,
    has_hosts,
    line_level,
    log_title,
    ranks_and_hosts,
    summarize,
    time_name,
    time_rows,
)

FIGURES = ("loss", "val_bpb", "tok_per_sec", "step_ms", "mfu", "peak_bytes", "total_s")
TOLERANCE = 0.1  # of a planned figure
QUIET_S = 20.0  # without a heartbeat, after which the head of the page shows for how long
SIGNS = {level: sign for level, (sign, _) in LEVEL_SIGNS.items()} | {"warning": "▲"}
TONES = {"blue": "busy", "faint": "calm"}  # of the terminal's styles; the others are called the same
MARKED = ("verdict", "hang", "trouble", "rollback", "resumed")  # events that charts show
SEVERITIES: dict[str, Level] = {"stop": "error", "warn": "warning"}
ATTEMPT_STATES = {"no end recorded": "broken", "interrupted": "stopped", "regrouped": "recovering"}
COMMAND = re.compile(r"(?:paceline|--|[A-Z_]+=|pip|sudo|export)\b ?|--")


def run_panels(snapshot: Snapshot, *, now: float) -> dict[str, Any]:
    """Returns every panel by name; None or empty where the run has nothing to show in it."""
    return {
        "head": head_panel(snapshot, now=now),
        "tiles": list(tiles(snapshot)),
        "fields": fields(snapshot),
        "figures": list(compared_figures(snapshot)),
        "why": why_panel(snapshot.explanation, snapshot.logs) if snapshot.explanation else None,
        "attempts": attempts_panel(snapshot),
        "plan": [(name, planned, text, gap) for name, _, text, planned, gap, _ in figures(snapshot) if planned] or None,
        "goodput": goodput_panel(snapshot),
        "evaluations": evaluation_rows(snapshot.evaluations) or None,
        "findings": [finding_panel(finding) for finding in snapshot.findings] or None,
        "ranks": ranks_panel(snapshot),
        "hosts": [host_panel(host, is_live=snapshot.state in LIVE, now=now) for host in snapshot.hosts],
        "maps": map_panels(snapshot),
        "events": [  # what stands beside an event's own text
            {"sign": SIGNS[event.level], "step": "" if event.step is None else f"step {event.step:,}"}
            for event in snapshot.events
        ],
        "spans": [span_panel(snapshot, attempt) for attempt in snapshot.attempts],
        "marks": {axis: marks_on(snapshot, axis) for axis in ("steps", "tokens", "hours", "clock")},
        "logs": logs_panel(snapshot),
    }


def badge(state: str, notes: Sequence[str] = ()) -> Panel:
    sign, style = STATE_SIGNS.get(state, STATE_SIGNS["unknown"])
    if notes and style == "good":
        sign, style = LEVEL_SIGNS["warning"]
    return {"state": state, "sign": sign, "level": TONES.get(style, style)}


def head_panel(snapshot: Snapshot, *, now: float) -> Panel:
    """Returns name, state, command, summary and progress; `title` is the title of the browser's tab."""
    share = snapshot.share
    is_live, shown = snapshot.state in LIVE, badge(snapshot.state)
    level = "busy" if is_live and shown["level"] == "good" else shown["level"]
    command = f"a log of {snapshot.framework}" if snapshot.framework else None
    is_explained = snapshot.explanation and snapshot.state != "recovering"  # beside it, the sentence says what is done
    verdict = None if is_explained else summarize(snapshot, now=now)
    part = f"{math.floor(100 * share)} % " if share is not None and is_live else ""
    return {
        "badge": shown,
        "command": shlex.join(snapshot.command) if snapshot.command else command,
        "summary": {"level": verdict.level, "text": verdict.text} if verdict else None,
        "tags": snapshot.tags,
        "note": snapshot.note or None,
        "notes": snapshot.notes,
        "progress": None if share is None else {"percent": round(100 * share, 1), "level": level},
        "facts": list(head_facts(snapshot, share, now=now)),
        "title": f"{shown['sign']} {part}{snapshot.name} · paceline",
    }


def head_facts(snapshot: Snapshot, share: float | None, *, now: float) -> Iterator[list[Any]]:
    """Yields sentences in pieces: text, {text} in bold, {time} for the reader's clock."""
    is_live = snapshot.state in LIVE
    if share is not None and snapshot.num_steps:
        after = f" of {snapshot.num_steps:,}, {format_percent(share, digits=1 if share < 0.1 else 0)}"
        yield [{"text": f"step {snapshot.step:,}"}, after]
    elif snapshot.step:
        yield [{"text": f"step {snapshot.step:,}"}]
    if snapshot.tokens_per_step and snapshot.step:
        yield [f"{format_count(snapshot.step * snapshot.tokens_per_step)} tokens"]
    if has_hosts(snapshot):
        yield [ranks_and_hosts(snapshot)]
    if snapshot.elapsed_s is not None:
        yield [f"{format_duration(snapshot.elapsed_s)} {'so far' if is_live else 'in all'}"]
    if is_live and snapshot.eta_s is not None:
        until = round((now + snapshot.eta_s) / 60) * 60
        yield [{"text": f"{format_duration(snapshot.eta_s)} to go"}, ", until ", {"time": until, "seconds": False}]
    if snapshot.updated is None:
        return
    if not is_live:
        yield ["last activity ", {"time": round(snapshot.updated), "seconds": True}]
    elif (silent_s := now - snapshot.updated) >= QUIET_S:
        yield [f"silent for {format_duration(silent_s // 5 * 5)}"]


def known(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


class Figure(NamedTuple):
    """A figure as the views show it, beside that of the plan."""

    name: str
    value: float | None
    text: str
    planned: str = ""
    difference: str = ""  # empty where one of the two is not known
    worse: bool = False  # than the plan, by more than TOLERANCE


def figures(snapshot: Snapshot) -> Iterator[Figure]:
    """Yields the figures that are planned or measured."""
    remaining_s = snapshot.eta_s if snapshot.state in LIVE else 0.0
    total_s = None if remaining_s is None or snapshot.elapsed_s is None else snapshot.elapsed_s + remaining_s
    for name in FIGURES:
        value, expected = total_s if name == "total_s" else getattr(snapshot, name), (snapshot.plan or {}).get(name)
        if not known(expected) or not expected:
            if value is not None:
                yield Figure(name, value, format_figure(name, value))
            continue
        over = value / expected - 1 if known(value) else math.nan
        worse = over < -TOLERANCE if name in METRICS and METRICS[name].better == "more" else over > TOLERANCE
        difference = "" if math.isnan(over) else f"{round(100 * over):+} %".replace("-", "−").replace("+0 %", "0 %")
        yield Figure(name, value, format_figure(name, value), format_figure(name, expected), difference, worse)


def tiles(snapshot: Snapshot) -> Iterator[Panel]:
    """Yields the last figures, compared with the plan."""
    for figure in figures(snapshot):
        name = figure.name
        if name == "total_s" or figure.text == "n/a":
            continue
        tile: Panel = {"name": name, "value": figure.text}
        if name == "val_bpb":
            best = min(filter(math.isfinite, snapshot.series.get(name, Series()).values), default=figure.value)
            tile["note"] = f"best {format_figure(name, best)}"
        elif not known(figure.value):
            tile |= {"difference": "NaN or infinite", "worse": True}
        elif figure.planned:
            tile |= {"note": f"plan {figure.planned} ", "difference": figure.difference, "worse": figure.worse}
        yield tile
    if snapshot.goodput and (spent := goodput_share(snapshot)) is not None:
        place = time_name("steps", snapshot.goodput)
        yield {"name": "goodput", "value": format_percent(spent), "note": f"of the time in {place}"}


def fields(snapshot: Snapshot) -> dict[str, Panel]:
    """Returns the charts in their order: what a chart shows, its unit, and its last value as text."""
    drawn = {name for name, series in snapshot.series.items() if any(map(math.isfinite, series.values))}
    shown = {}
    for name in [name for name in METRICS if name in drawn] + sorted(drawn - METRICS.keys()):
        measure, last = METRICS.get(name), format_figure(name, snapshot.series[name].values[-1])
        about, unit, steady = (measure.about, measure.unit, measure.steady) if measure else (None, None, False)
        about = None if name == "loss" and snapshot.kind != "training" else about  # a script's may be of any unit
        shown[name] = {"about": about, "unit": unit, "steady": steady, "last": last}
    return shown


def compared_figures(snapshot: Snapshot) -> Iterator[Panel]:
    """Yields what a comparison shows of a run; `step` is that of a value that falls with the steps, `at` that of a checkpoint."""
    if snapshot.step:
        yield {"name": "step", "text": f"{snapshot.step:,}", "value": snapshot.step, "better": None}
    for name, value, text, *_ in figures(snapshot):
        if name in METRICS and known(value):
            step = snapshot.step if name in ("loss", "val_bpb") else None
            yield {"name": name, "text": text, "value": value, "better": METRICS[name].better, "step": step}
            for key in ("eval_tokens", "eval_text") if name == "val_bpb" else ():
                if shown := getattr(snapshot, key):
                    yield {"name": key, "text": f"{shown:,}" if key == "eval_tokens" else shown}
    for title, result in evaluations_by_title(snapshot.evaluations).items():
        text, at = format_figure("val_bpb", result.val_bpb), f"{result.step:,}"
        yield {"name": f"eval of {title}", "text": text, "value": result.val_bpb, "better": "less", "at": at}
    if snapshot.elapsed_s is not None:
        yield {"name": "time", "text": format_duration(snapshot.elapsed_s)}
    if snapshot.goodput and (share := snapshot.goodput.share) is not None:
        yield {"name": "goodput", "text": format_percent(share), "value": share, "better": "more"}


def why_panel(why: dict[str, Any], logs: Sequence[LogView] = ()) -> Panel:
    """Returns the explanation; its lines that stand in one of the logs have its key and their number there."""
    place = [f"rank {why['rank']}"] if why.get("rank") is not None else []
    place += [f"step {why['step']:,}"] if why.get("step") is not None else []
    place += [f"host {why['host']}"] if why.get("host") else []
    sure = [f"{format_percent(why['confidence'])} sure"] if why.get("confidence") is not None else []
    sure += [f"it could also be {' or '.join(why['also'])}"] if why.get("also") else []
    blocks = []
    for title, key in (("Evidence", "evidence"), ("Only followed", "consequences")):
        lines = []
        for line in why.get(key) or ():
            source = f"{line['source']}:{line.get('line')}" if line.get("source") else f"line {line.get('line')}"
            rank = "" if line.get("rank") is None else f"  rank {line['rank']}"
            log = log_of(line, logs) if isinstance(line.get("line"), int) else None
            link = {"log": log_key(log), "line": line["line"]} if log else {}
            lines.append({"place": source + rank, "text": line.get("text"), **link})
        blocks += [{"title": title, "lines": lines}] if lines else []
    return {
        "cause": why.get("cause"),
        "place": ", ".join(place),
        "summary": why.get("summary"),
        "fix": why.get("fix"),
        "is_command": bool(COMMAND.match(str(why.get("fix")))),
        "blocks": blocks,
        "sure": "; ".join(sure),
    }


def log_of(line: dict[str, Any], logs: Sequence[LogView]) -> LogView | None:
    """Returns the log in which a line of an explanation stands: the one that it names, else that of its rank."""
    if line.get("source"):
        name = Path(str(line["source"])).parts[-3:]
        return next((log for log in logs if Path(log.path).parts[-3:] == name), None)
    last = [log for log in logs if log.attempt == logs[-1].attempt]
    return next((log for log in last if log.rank == line.get("rank") or len(last) == 1), None)


def attempts_panel(snapshot: Snapshot) -> list[Panel] | None:
    """Returns the attempts; None where other panels already show everything about the only attempt."""
    attempts = snapshot.attempts
    if len(attempts) < 2 and (snapshot.explanation or not any(attempt.cause for attempt in attempts)):
        return None
    return [
        {
            "number": attempt.attempt,
            "badge": badge(ATTEMPT_STATES.get(state := attempt_outcome(snapshot, attempt), state)),
            "time": unix_time(attempt.time),
            **{name: getattr(attempt, name) for name in ("cause", "summary", "changes")},
            "action": action_text(attempt),
        }
        for attempt in attempts
    ]


def action_text(attempt: AttemptView) -> str | None:
    """Returns what was decided after an attempt."""
    return f"then {attempt.action.replace('_', ' ')}: {attempt.why}" if attempt.action else None


def span_panel(snapshot: Snapshot, attempt: AttemptView) -> Panel:
    """Returns an attempt as a bar over time; without an end, the bar goes to the last heartbeat."""
    following = [unix_time(other.time) for other in snapshot.attempts if other.attempt > attempt.attempt]
    begin, end = unix_time(attempt.time), min(following, default=math.inf)
    ends = (event.time for event in snapshot.events if event.kind == "attempt_ended")
    grain = max(5.0, (snapshot.elapsed_s or 0.0) // 500)  # a pixel of the bar: finer, it would be redrawn in vain
    last = min(end, (snapshot.updated or begin) // grain * grain)
    end = next((time for time in ends if time is not None and begin <= time < end), max(begin, last))
    shown = badge(ATTEMPT_STATES.get(state := attempt_outcome(snapshot, attempt), state))
    return {
        "number": attempt.attempt,
        "label": f"attempt {attempt.attempt}: {shown['state']}",
        "sign": shown["sign"],
        "level": shown["level"],
        "from": begin,
        "to": end,
        "duration": format_duration(end - begin),
        "summary": attempt.summary,
    }


def goodput_panel(snapshot: Snapshot) -> Panel | None:
    if not (spent := snapshot.goodput) or not spent.busy_s:
        return None
    energy = None if spent.energy_j is None else f"The GPUs took {format_energy(spent.energy_j)}."
    return {"rows": time_rows(spent), "energy": energy}


def finding_panel(finding: dict[str, Any]) -> Panel:
    level, about = severity_level(finding), ", ".join(str(finding[key]) for key in ("id", "host") if finding.get(key))
    texts = {name: finding.get(name) for name in ("severity", "what", "why", "fix")}
    return {"level": level, "sign": SIGNS[level], "about": about, **texts}


def severity_level(finding: dict[str, Any]) -> Level:
    return SEVERITIES.get(str(finding.get("severity")), "info")


def marks_on(snapshot: Snapshot, axis: str) -> Panel:
    """Returns where something failed or resumed on an axis of the charts, and bands of the steps or hours that were lost."""
    marks, bands, broken = [], [], list[float]()
    for event in snapshot.events:
        if event.kind not in MARKED or (x := place_on(snapshot, event, axis)) is None:
            continue
        if event.kind != "resumed":
            broken.append(x)
        elif not event.step:
            continue  # the beginning of the run
        elif broken:
            bands.append([min(x, *broken), max(x, *broken)])
            broken = []
        marks.append({"x": x, "kind": event.kind})
    return {"marks": marks, "bands": bands}


def place_on(snapshot: Snapshot, event: EventView, axis: str) -> float | None:
    step, guide = event.step, snapshot.series.get("loss", Series())
    if axis == "clock":
        return event.time
    if axis == "hours":
        return None if event.time is None or snapshot.started is None else (event.time - snapshot.started) / 3600
    if step is None and event.time is not None and guide.steps:
        step = guide.steps[max(0, bisect_right(guide.times, event.time) - 1)]
    factor = 1 if axis == "steps" else snapshot.tokens_per_step
    return step * factor if step is not None and factor else None


def logs_panel(snapshot: Snapshot) -> Panel:
    """Returns the logs, the latest attempt first, and the key of the one to open with."""
    logs = sorted(snapshot.logs, key=lambda log: (-log.attempt, -1 if log.rank is None else log.rank, log.name or ""))
    several, first = len({log.attempt for log in logs}) > 1, first_log(snapshot)
    rows = []
    for log in logs:
        whose = "the log" if snapshot.kind == "log" else log_title(log)
        label = (f"attempt {log.attempt}, " if several else "") + whose
        rows.append({"key": log_key(log), "label": label, "size": format_bytes(log.bytes), **asdict(log)})
    return {"rows": rows, "first": log_key(first) if first else None}


def log_key(log: LogView) -> str:
    return f"{log.attempt}/{log.name or ('' if log.rank is None else log.rank)}"


def log_levels(lines: Sequence[str]) -> dict[str, str]:
    """Returns the levels of lines that have one, by index."""
    return {str(index): level for index, line in enumerate(lines) if (level := line_level(line)) != "info"}


def seed_groups(runs: Sequence[dict[str, Any]], configs: dict[str, dict[str, Any]]) -> dict[str, Panel]:
    """Returns by run the group of those that differ only in their seed: its size, and mean and spread of its last figures.

    configs: by run. Where there are several groups, each has the settings in which they differ.
    The spread is one standard deviation. Runs that have not reached the same step have no mean.
    """
    members: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        if key := group_key(configs.get(run["name"], {})):
            members.setdefault(key, []).append(run)
    groups = {key: group for key, group in members.items() if len(group) > 1}
    shared = {key: configs[group[0]["name"]] for key, group in groups.items()}
    names = dict.fromkeys(name for config in shared.values() for name in config if name not in OWN_KEYS)
    differing = [name for name in names if len({repr(config.get(name)) for config in shared.values()}) > 1]
    panels: dict[str, Panel] = {}
    for key, group in groups.items():
        is_even = len({run["step"] for run in group}) == 1
        panel = {"key": key, "size": len(group), "step": format_step(group[0]["step"]) if is_even else "unequal steps"}
        panel["settings"] = {name: shared[key].get(name) for name in differing}
        for name in ("loss", "val_bpb"):
            values = [run[name] for run in group if known(run[name])]
            is_whole = is_even and len(values) == len(group)
            mean = statistics.fmean(values) if is_whole else None
            spread = f" ± {format_figure(name, statistics.stdev(values))}" if is_whole else ""
            panel |= {name: format_figure(name, mean) + spread}
        panels |= {run["name"]: panel for run in group}
    return panels


def run_row(run: dict[str, Any]) -> Panel:
    """Returns the texts of a run in the list of all runs. run: a RunStatus as a dictionary."""
    num_steps, command = None if run["step"] is None else run["num_steps"], run["command"]
    return {
        "badge": badge(run["state"], run.get("notes", ())),
        "command": shlex.join(command) if command else None,
        "share": run["step"] / num_steps if num_steps else None,
        "steps": format_step(run["step"]) + (f" of {num_steps:,}" if num_steps else ""),
        "time": unix_time(run["time"]) if run["time"] else None,
        **{name: format_figure(name, run[name]) for name in ("loss", "val_bpb", "tok_per_sec")},
        "eval_tokens": format_step(run["eval_tokens"] if known(run["val_bpb"]) else None),
        "eval_text": (run["eval_text"] if known(run["val_bpb"]) else None) or "n/a",
    }
