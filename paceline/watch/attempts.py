"""
The attempts of a run, and how it ended, by its events alone. Pure.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from paceline.watch.snapshot import AttemptView, State

ENDS: dict[str, State] = {"finished": "finished", "stopped": "stopped", "failed": "failed", "interrupted": "stopped"}
PASSING = {
    "checkpoint", "sample", "note", "memory", "step_time", "finding", "attempt_ended", "verdict", "decision", "save_failed",
}  # say nothing of the state  # fmt: skip


def end_of(events: Iterable[dict[str, Any]]) -> State:
    """What a run is that no process holds; `broken` where its last word is not that of an end."""
    state: State = "broken"
    for event in events:
        kind = str(event.get("event"))
        state = ENDS.get(kind, state if kind in PASSING else "broken")
        if state == "broken" and kind == "attempt_ended" and event.get("state") == "interrupted":
            state = "stopped"  # before its first step, or asked twice: no rank says that it has stopped
    return state


def attempts_of(events: Sequence[dict[str, Any]]) -> list[AttemptView]:
    told: dict[int, dict[str, Any]] = {}
    for event in events:
        number = event.get("attempt", 0)
        if event.get("event") == "attempt":
            told[number] = {"time": event["time"]}
        elif number in told:
            names = {"attempt_ended": ("state",), "verdict": ("cause", "summary"), "decision": ("action", "why")}
            told[number] |= {name: event.get(name) for name in names.get(str(event.get("event")), ())}
    return [AttemptView(number, **values) for number, values in told.items()]
