"""
The records of events.jsonl as text with a level, as a list of attempts and as the state of a run; and that of a log. Pure.

Everything that shows events renders them here, so they read the same everywhere: `event_view` is for the terminal view, the web
view and reports, `event_line` for what `paceline train` prints.
"""

import json
import math
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from paceline.errors import INTERRUPTED
from paceline.explain.curve_verdict import MEMORY_GROWS, OVERFITS, SLOWS_DOWN, STANDS_STILL
from paceline.explain.explanation import HEALTHY, UNKNOWN, format_failures, format_summary
from paceline.explain.lines import strip_escapes
from paceline.explain.recorded_end import SUPERVISOR_LOST
from paceline.heartbeat import Heartbeat
from paceline.rundir import RunDir
from paceline.units import format_bytes, format_list, format_ms, format_number_of, unix_time
from paceline.watch.growing_file import JsonRecord
from paceline.watch.snapshot import LIVE, AttemptView, EventView, Level, State

TEXT_CHARS = 300
SAMPLE_CHARS = 160  # of a sample; the whole is in samples/
LEVELS: dict[str, Level] = {
    "finished": "good", "resumed": "good", "failed": "error", "verdict": "error", "rank_failed": "error", "hang": "error",
    "save_failed": "warning", "rollback": "warning", "trouble": "warning", "finding": "warning", "stopping": "warning",
    "silence": "warning", "damaged": "warning",
    "interrupted": "warning", "stopped": "warning", "requeued": "warning", "slurm_job": "warning", "plan_changed": "warning",
}  # fmt: skip
ATTEMPT_LEVELS: dict[str, Level] = {"finished": "good", "failed": "error"}  # by the state in which an attempt ended
END_STATES: dict[str, State] = {
    "finished": "finished",
    "stopped": "stopped",
    "failed": "failed",
    "interrupted": "stopped",
    "requeued": "queued",
    "submitted": "queued",
}
# events that do not change the state of a run; a stop may be requested after its last step
STATELESS = {
    "checkpoint", "sample", "note", "memory", "step_time", "finding", "attempt_ended", "verdict", "decision", "save_failed",
    "stopping", "silence", "damaged",
}  # fmt: skip
# keys of a config that say where a run is, or its length in another unit than steps
MICRO_BATCH = ("device_batch_size", "grad_accum_steps")  # what a plan chooses for its ranks
UNCOMPARED_KEYS = ("name", "runs_dir", "cache_dir", "epochs", "time", "tokens_per_param")
AUTO = "auto"  # a setting that was not set
SettingChanges = dict[str, tuple[str, str]]  # by key: before and now
BEFORE_ATTEMPTS = {"launch", "script", "note", "finding"}
INTERRUPTED_JOB = f"{INTERRUPTED}:0"  # exit code and signal, as Slurm shows them
PHASE_STATES: dict[str, State] = {"eval": "evaluating", "sample": "evaluating", "save": "saving"}
ATTEMPT_FIELDS = {"attempt_ended": ("state", "message"), "verdict": ("cause", "summary"), "decision": ("action", "why")}
DECISIONS = {"stop": "no further attempt: ", "retry": "retrying: "}  # other actions say themselves what is done
REQUIRED_FIELDS = {
    "attempt": ("attempt",),
    **dict.fromkeys(("resumed", "checkpoint", "sample", "set_aside"), ("step",)),
}
# by the launching terminal; a finding is printed whole, by check/ready.py
PRINTED = {
    "checkpoint", "save_failed", "rollback", "sample", "resumed", "stopping", "silence", "damaged", "note", "step_time",
}  # fmt: skip
# what curves show of a run that goes on, or has come to its end
GOES_ON = (STANDS_STILL, MEMORY_GROWS, SLOWS_DOWN, OVERFITS)
STOPPED_BY_USER = ("keyboard-interrupt", "slurm-cancelled")
LIKELY = 0.5  # below it a log that still grows has not failed: it may only have come to its first collective
TEXTS = {  # of events whose fields stand in a sentence as they are; event_text makes all other texts
    "attempt_ended": "attempt {attempt} {state}",
    "hang": "hang: {text}",
    "silence": "before the stop {text}",
    "damaged": "{message}",
    "finding": "{what}: {why}",
    "failed": "the run failed",
    "interrupted": "the run was interrupted",
    "requeued": "job {job_id} was requeued: {why}",
    "submitted": "submitted to Slurm as job {job_id}",
    "slurm_job": "job {job_id} ended: {state}",
}


def is_complete(event: JsonRecord) -> bool:
    """Whether an event has the fields that its kind needs; a crash may have cut it, or another version written it."""
    numbers = {*REQUIRED_FIELDS.get(str(event.get("event")), ()), *({"attempt"} & event.keys())}
    return not math.isnan(unix_time(event.get("time"))) and all(type(event.get(name)) is int for name in numbers)


def event_view(event: JsonRecord) -> EventView | None:
    """Returns an event as one line of text with its level; None for an event that only programs read."""
    kind = str(event.get("event"))
    if kind == "memory":  # only the planner reads it
        return None
    step, time, level = event.get("step"), unix_time(event.get("time")), LEVELS.get(kind, "info")
    if kind == "attempt_ended":
        level = ATTEMPT_LEVELS.get(str(event.get("state")), "warning")
    elif kind == "rank_failed" and event.get("consequence"):
        level = "info"
    return EventView(
        time if time == time else None, kind, event_text(event), level, step if type(step) is int else None
    )


def unsaved_texts(events: Sequence[JsonRecord | EventView]) -> Iterator[str]:
    """Yields that the last checkpoint of the last attempt found no room, and which one is the newest."""
    views = (
        view for event in reversed(events) if (view := event if isinstance(event, EventView) else event_view(event))
    )
    saves = [view for view in views if view.kind in ("attempt", "save_failed", "checkpoint", "set_aside")]
    if saves and saves[0].kind == "save_failed":
        newest = next((view.step for view in saves if view.kind in ("checkpoint", "set_aside")), None)
        yield saves[0].text + ("" if newest is None else f"; the newest checkpoint is of step {newest:,}")


def event_line(event: JsonRecord, *, num_steps: int, ending: str = "") -> str | None:
    """Returns the line that the launching terminal prints; None for events that it does not print.

    The line opens with the step's label where the event has a step. ending: what the ranks do before they stop.
    """
    kind, step = event.get("event"), event.get("step")
    if kind not in PRINTED:
        return None
    if kind == "stopping":
        return f"{event_text(event)}{ending and f': {ending}'}; Ctrl-C again to end now"
    text = event_text(event, labelled=True, max_chars=None)
    return f"{step_label(step, num_steps)} | {text}" if isinstance(step, int) and kind != "step_time" else text


def step_label(step: int, num_steps: int) -> str:
    """step 00120/02500"""
    width = max(5, len(str(num_steps)))
    return f"step {step:0{width}d}/{num_steps:0{width}d}"


def event_text(event: JsonRecord, *, labelled: bool = False, max_chars: int | None = TEXT_CHARS) -> str:
    """Returns one line of text. labelled: the step stands before it already. max_chars None: the whole text."""
    kind = str(event.get("event"))
    try:
        text = TEXTS[kind].format_map(event) if kind in TEXTS else sentence_of(kind, event, labelled=labelled)
    except (KeyError, TypeError, ValueError):  # another version wrote this event
        text = None
    return one_line(text or str(event.get("text", kind.replace("_", " "))), max_chars)


def sentence_of(kind: str, event: JsonRecord, *, labelled: bool) -> str | None:
    """Returns the text of an event whose fields need units, or that has several forms; None for one that carries its own."""
    at = f" at step {event['step']:,}" if event.get("step") is not None and not labelled else ""
    match kind:
        case "launch":
            return f"launched: data, plan and checks took {event.get('prepared_s', 0.0):.0f} s"
        case "script":
            return f"launched: {shlex.join(event['command'])}"
        case "attempt":
            places = [f"{host}: {format_list(ranks)}" for host, ranks in event.get("hosts", {}).items()]
            where = f" ({'; '.join(places)})" if places else ""
            return f"attempt {event['attempt']} on {format_number_of(event['world_size'], 'rank')}{where}"
        case "checkpoint":
            parts = [f"checkpoint saved{at}", *([format_bytes(event["bytes"])] if "bytes" in event else [])]
            parts += [f"{event['seconds']:.1f} s"] if "seconds" in event else []
            return (" | " if labelled else ", ").join(parts)
        case "save_failed":
            free = f", {format_bytes(event['free_bytes'])} free" if event.get("free_bytes") is not None else ""
            place = f" on {event['host']}, whose disk is full" if event.get("host") else ""
            needed = f"{format_bytes(event['needed_bytes'])} needed{place}{free}"
            return f"checkpoint not saved{at}: {needed}; {event.get('effect', 'it is saved as soon as there is room')}"
        case "sample":
            return f"sample{at}: {one_line(str(event.get('text', '')), SAMPLE_CHARS)}"
        case "resumed":
            return f"resumed{at.replace('at', 'from')}" if event["step"] else "restarting from the first step"
        case "rollback":
            count = f"rollback {event['number']} of at most {event['at_most']}, " if "number" in event else ""
            skipped = f"back to step {event['to_step']:,}, skipping the batch of step {event['step']:,}"
            return f"{event['cause']}{at}: {count}{skipped}"
        case "trouble":
            return event["message"] if labelled else f"step {event['step']:,}: {event['message']}"
        case "step_time":
            planned_s, measured_s = event["planned_s"], event["measured_s"]
            gap = f"{100 * (measured_s / planned_s - 1):+.0f} %"
            return f"planned {format_ms(1000 * planned_s)} a step, measured {format_ms(1000 * measured_s)} ({gap})"
        case "finished" | "stopped":
            bpb = "" if event.get("val_bpb") is None else f", val_bpb {event['val_bpb']:.4f}"
            return f"{kind}{at}{bpb}"
        case "rank_failed":
            host = event.get("host")
            if event.get("rank") is None:
                source = (
                    "launch failed" if host is None else f"lost host {host}" if is_lost_host(event) else f"host {host}"
                )
                return f"{source}: {event['message']}"
            source = f"rank {event['rank']}" + (f" on {host}" if host else "")
            return f"{source} {'ended after it' if event.get('consequence') else 'failed'}: {event['message']}"
        case "decision":
            return DECISIONS.get(event["action"], "") + str(event["why"])
        case "plan_changed":
            batch = f"device_batch_size {event['device_batch_size']}, {event['grad_accum_steps']} micro-steps"
            return f"plan changed: {format_number_of(event['world_size'], 'rank')}, {batch}"
        case "verdict":
            return f"{event['cause']}: {format_summary(event)}"
        case "stopping":
            reason, sent = event.get("signal") or event.get("reason"), event.get("sent")
            left = f", {event['seconds_left']} s left" if "seconds_left" in event else ""
            left += f", sending {sent}" if sent not in (None, reason) else ""
            return f"stopping on {reason}{left}" if reason else "stopping"
    return None


def one_line(text: str, max_chars: int | None) -> str:
    """Returns the text on one line, without escape sequences and characters that would move a cursor."""
    text = strip_escapes(text if max_chars is None else text[: 4 * max_chars])
    line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return line if max_chars is None or len(line) <= max_chars else line[: max_chars - 1] + "…"


def run_notes(run: RunDir, state: State, events: Sequence[JsonRecord]) -> Iterator[str]:
    """Yields what a list of runs says below them: of a checkpoint without room, of a failure that a good end hides."""
    if state in LIVE:
        yield from unsaved_texts(events)
    elif state == "finished":
        # a damaged checkpoint was overcome: the run itself shows it
        yield from end_notes(state, attempt_views([event for event in events if event.get("event") != "damaged"]))
    else:
        yield from unstarted_notes(run, state, events)


def unstarted_notes(run: RunDir, state: State, events: Sequence[JsonRecord]) -> Iterator[str]:
    """Yields that the command of a run ended before the first attempt, and left no record of why."""
    is_before = state == "broken" and all(event.get("event") in BEFORE_ATTEMPTS for event in events)
    if is_before and not run.metrics.exists() and not run.logs(1).exists():  # events may be lost
        yield "nothing was started: the command ended before the first attempt; paceline resume starts it"


def end_notes(state: State, attempts: Sequence[AttemptView]) -> Iterator[str]:
    """Yields what went wrong in the attempts of a run that has ended without a failure."""
    if state == "finished" and attempts and attempts[-1].state == "finished" and attempts[-1].summary:
        yield f"its output shows a failure: {attempts[-1].summary}"
    elif state == "stopped":
        failed = (attempt for attempt in attempts if attempt.state in ("failed", None) and attempt.cause)
        yield from format_failures((attempt.attempt, str(attempt.cause), attempt.summary or "") for attempt in failed)
        yield from (text for attempt in attempts[-1:] for text in (attempt.message, attempt.job) if text)
    yield from (attempt.damage for attempt in attempts if attempt.damage)


def attempt_views(events: Sequence[JsonRecord]) -> list[AttemptView]:
    """Returns the attempts of a run, each with how it ended and what was decided then."""
    attempts, requested, requests = dict[int, JsonRecord](), None, dict[int, int]()  # the steps of --step
    for event in events:
        number, kind = event.get("attempt", 0), str(event.get("event"))
        if kind == "attempt":
            attempts[number] = {"time": event["time"], "world_size": event.get("world_size")}
            if requested is not None:
                requests[number] = requested
                attempts[number] |= {"changes": f"to resume from step {requested:,}, as --step asked"}
        elif kind in ("launch", "script") and attempts and "state" not in attempts[max(attempts)]:
            attempts[max(attempts)].setdefault("cause", SUPERVISOR_LOST)  # the verdict comes when all hosts are ready
        elif kind in ("set_aside", "resumed") and type(event.get("step")) is int:
            requested = event["step"] if kind == "set_aside" else None
        elif kind == "damaged" and attempts:  # of the attempt that resumes from another checkpoint
            attempts[max(attempts)] |= {"damage": event.get("message")}
        elif kind == "requeued" and attempts:
            attempts[max(attempts)] |= {"job": f"its Slurm job was requeued: {event.get('why')}"}
        elif kind == "slurm_job" and "attempt" not in event and attempts:
            text = f"Slurm's job {event.get('job_id')} ended before it continued the run: {event.get('state')}"
            attempts[max(attempts)] |= {"job": text}
        elif number in attempts:
            attempts[number] |= {name: event.get(name) for name in ATTEMPT_FIELDS.get(kind, ())}
            with suppress(TypeError, ValueError):  # a damaged step
                attempts[number] |= {"summary": format_summary(event)} if kind == "verdict" else {}
    for number, step, _, changes in setting_changes(events):
        if number in attempts:
            texts = ", ".join(f"{key} {now} in place of {before}" for key, (before, now) in changes.items())
            way = ", as --step asked" if step == requests.get(number) else " on" if texts else ""
            text = f"from step {step:,}{way}: {texts}" if texts else f"resumed from step {step:,}{way}"
            attempts[number] |= {"changes": one_line(text, TEXT_CHARS)}
    return [AttemptView(number, **values) for number, values in attempts.items()]


def setting_changes(events: Iterable[JsonRecord]) -> Iterator[tuple[int, int, SettingChanges, SettingChanges]]:
    """Yields each attempt that resumed, the step that it resumed from, and by key the settings before that step and from it on.

    The last of the four has those that the attempt itself changed: an earlier one at the same step may have changed others.
    """

    def changes(before: dict[str, Any]) -> SettingChanges:
        return {key: (before[key], now[key]) for key in before if now.get(key, before[key]) != before[key]}

    number, now, held = 0, dict[str, Any](), [(0, dict[str, Any]())]  # the settings, and from which step on
    for event in events:
        kind, config = event.get("event"), event.get("config")
        if kind == "launch" and isinstance(config, dict):
            now = {key: format_setting(value) for key, value in config.items() if key not in UNCOMPARED_KEYS}
        if kind in ("launch", "plan_changed"):
            now = now | {name: format_setting(event[name]) for name in MICRO_BATCH if name in event}
        elif kind == "attempt":
            now = now | {"ranks": str(event.get("world_size"))}
            number, held = event.get("attempt", 0), held if held[-1][1] else [(0, now)]
        elif kind == "resumed" and type(step := event.get("step")) is int:
            last = next((settings for start, settings in reversed(held) if start <= step), held[0][1])
            held = [item for item in held if item[0] < step] or held[:1]  # what came after it is done again
            yield number, step, changes(held[-1][1]), changes(last)
            held.append((step, now))


def format_setting(value: Any) -> str:
    return AUTO if value is None else value if isinstance(value, str) else json.dumps(value)


def lost_hosts(events: Iterable[JsonRecord]) -> list[str]:
    """Returns the hosts that the last command has lost and that take no part in its last attempt."""
    lost: list[str] = []
    for event in events:
        kind, host = event.get("event"), event.get("host")
        if kind in ("launch", "script"):
            lost = []
        elif kind == "attempt":
            lost = [name for name in lost if name not in (event.get("hosts") or {})]
        elif kind == "rank_failed" and is_lost_host(event) and host not in lost:
            lost.append(str(host))
    return lost


def is_lost_host(event: JsonRecord) -> bool:
    """Whether a rank_failed is about a host as a whole. One that ended with an exit code or a signal was its agent."""
    return bool(event.get("host")) and all(event.get(name) is None for name in ("rank", "exit_code", "signal"))


def live_state(events: Sequence[JsonRecord], mark: Heartbeat | None, line: JsonRecord) -> State:
    """Returns the state of a run that a process holds. mark: of rank 0, None while it is written. line: the last of metrics."""
    kinds = [event.get("event") for event in events]
    start = max((index for index, kind in enumerate(kinds) if kind == "attempt"), default=-1)
    attempt = events[start + 1 :]
    attempt_state = next((event.get("state") for event in attempt if event.get("event") == "attempt_ended"), None)
    if {"launch", "script"} & set(kinds[start + 1 :]):
        return "starting"  # another command; a supervisor that was killed has recorded no end of its attempt
    if attempt_state is not None:
        if attempt_state == "regrouped":
            return "starting"  # with more hosts
        if any(event.get("action") == "stop" for event in attempt):
            return "failed"
        if attempt_state == "failed":
            return "recovering"
        state = end_state(events)
        return "running" if state == "broken" else state  # the end is recorded when a slow terminal has all output
    if "script" in kinds:
        return "running" if start >= 0 else "starting"
    saves = [event for event in attempt if event.get("event") in ("save_failed", "checkpoint")]
    if saves and saves[-1].get("last"):
        return "saving"  # all steps are done, and the run waits for room
    first_step = next((event["step"] for event in attempt if event.get("event") == "resumed"), 0)
    if start >= 0 and mark is None and str(line.get("time", "")) >= str(events[start]["time"]):
        return "training" if line["step"] > first_step else "starting"
    return PHASE_STATES.get(mark.phase, "training") if start >= 0 and mark and mark.step > first_step else "starting"


def last_event_time(events: Sequence[JsonRecord]) -> str | None:
    """Returns the time of the last event that belongs to the run itself; a tracker's note may come long after its end."""
    return next((event.get("time") for event in reversed(events) if event.get("event") != "note"), None)


def end_state(events: Iterable[JsonRecord], *, is_queued: bool = False) -> State:
    """Returns the state of a run that no process holds: `broken` where no event reports its end.

    is_queued: it was submitted to Slurm and has not begun.
    """
    state: State = "queued" if is_queued else "broken"
    has_open_attempt = False
    for event in events:
        kind = str(event.get("event"))
        if kind in ("attempt", "attempt_ended"):
            has_open_attempt = kind == "attempt"
        if kind == "slurm_job":
            if state == "queued":  # it will not run again
                is_stopped = event.get("state") == "CANCELLED" or event.get("exit_code") == INTERRUPTED_JOB
                state = "stopped" if is_stopped else "broken"
            continue
        state = END_STATES.get(kind, state if kind in STATELESS else "broken")
        if state == "broken" and kind == "attempt_ended" and event.get("state") == "interrupted":
            state = "stopped"  # before its first step, or by a second Ctrl-C: no rank reports that it has stopped
    # workers also stop when their supervisor was killed, which then records no end of its attempt
    return "broken" if state == "stopped" and has_open_attempt else state


def log_state(explanation: dict[str, Any] | None, *, silent: bool) -> State:
    """The state of a log; explanation: None where it could not be explained. silent: it has not grown for long."""
    if explanation is None:
        return "unknown" if silent else "running"
    progress = explanation["progress"]
    is_failure = explanation["cause"] not in (HEALTHY, UNKNOWN, *GOES_ON)
    if is_failure and (silent or explanation["confidence"] >= LIKELY):
        return "stopped" if explanation["cause"] in STOPPED_BY_USER else "failed"
    if progress["finished"]:
        return "finished"
    if not progress["steps"]:
        return "unknown"
    return "broken" if silent else "running"
