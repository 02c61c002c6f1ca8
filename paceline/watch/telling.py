"""
A line of events.jsonl as a line for the eye: what happened, and whether it is good. Pure.
"""

from typing import Any

from paceline.units import format_bytes
from paceline.watch.lines import unix_time
from paceline.watch.snapshot import EventView, Level

Record = dict[str, Any]

TEXT_CHARS = 300
LEVELS: dict[str, Level] = {
    "finished": "good", "resumed": "good", "failed": "error", "verdict": "error", "rank_failed": "error", "hang": "error",
    "save_failed": "warning", "rollback": "warning", "trouble": "warning", "finding": "warning", "stopping": "warning",
    "interrupted": "warning", "stopped": "warning", "plan_changed": "warning",
}  # fmt: skip
SILENT = {"memory"}  # for the planner, not for the eye


def tell(event: Record) -> EventView | None:
    """None for what says nothing to a person."""
    kind = str(event.get("event"))
    if kind in SILENT:
        return None
    try:
        text = words_of(kind, event)
    except (KeyError, TypeError, ValueError):  # written by another version
        text = kind.replace("_", " ")
    level = LEVELS.get(kind, "info")
    if kind == "attempt_ended":
        level = {"finished": "good", "failed": "error"}.get(str(event.get("state")), "warning")  # type: ignore[assignment]
    if kind == "rank_failed" and event.get("consequence"):
        level = "info"
    step = event.get("step")
    time = unix_time(event.get("time"))
    return EventView(time if time == time else None, kind, one_line(text), level, step if type(step) is int else None)


def words_of(kind: str, event: Record) -> str:
    match kind:
        case "launch":
            return f"launched; text, plan and checks took {event.get('prepared_s', 0.0):.0f} s"
        case "script":
            return f"launched: {' '.join(event['command'])}"
        case "attempt":
            return f"attempt {event['attempt']} on {plural(event['world_size'], 'rank')}"
        case "attempt_ended":
            return f"attempt {event['attempt']} {event['state']}"
        case "checkpoint":
            parts = [format_bytes(event["bytes"])] if "bytes" in event else []
            parts += [f"{event['seconds']:.1f} s"] if "seconds" in event else []
            return ", ".join([f"checkpoint at step {event['step']:,}", *parts])
        case "save_failed":
            return f"checkpoint at step {event['step']:,} not saved: {format_bytes(event['needed_bytes'])} needed"
        case "sample":
            return f"sample at step {event['step']:,}: {event.get('text', '')}"
        case "resumed":
            return f"resumed from step {event['step']:,}" if event["step"] else "begins at the first step again"
        case "rollback":
            return f"{event['cause']} at step {event['step']:,}: back to step {event['to_step']:,}, past its rows"
        case "trouble":
            return f"step {event['step']:,}: {event['message']}"
        case "rank_failed":
            who = "launch" if event.get("rank") is None else f"rank {event['rank']}"
            return f"{who} {'ended after it' if event.get('consequence') else 'failed'}: {event['message']}"
        case "hang":
            return f"hang: {event['text']}"
        case "verdict":
            return f"{event['cause']}: {event['summary']}"
        case "decision":
            return f"{event['action']}: {event['why']}"
        case "plan_changed":
            return (
                f"plan changed: {plural(event['world_size'], 'rank')}, {event['device_batch_size']} rows at once,"
                f" {event['grad_accum_steps']} micro-steps"
            )
        case "step_time":
            gap = 100 * (event["measured_s"] / event["planned_s"] - 1)
            return f"a step takes {1000 * event['measured_s']:,.0f} ms, planned {1000 * event['planned_s']:,.0f} ({gap:+.0f} %)"
        case "finding":
            return f"{event['what']}: {event['why']}"
        case "stopping":
            return f"asked to stop by {event['signal']}"
        case "finished" | "stopped":
            bpb = "" if event.get("val_bpb") is None else f", val_bpb {event['val_bpb']:.4f}"
            return f"{kind} at step {event['step']:,}{bpb}" if "step" in event else kind
        case "failed":
            return "failed"
        case _:
            return str(event.get("text", kind.replace("_", " ")))


def plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def one_line(text: str) -> str:
    """Without what would move a cursor."""
    line = " ".join("".join(each if each.isprintable() else " " for each in text[: 4 * TEXT_CHARS]).split())
    return line if len(line) <= TEXT_CHARS else line[: TEXT_CHARS - 1] + "…"
