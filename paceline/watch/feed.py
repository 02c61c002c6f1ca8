"""
What a page needs of a snapshot, and of the next one only what is new: JSON small enough for a slow line.

A curve that has grown is sent from its first new point on. Every other part is sent whole where it has changed. Pure: no
files, no clock. The browser's half is static/stream.js; what it puts together from all changes is the snapshot again.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Any

import orjson

from paceline.units import format_energy
from paceline.watch.goodput import KINDS
from paceline.watch.snapshot import Series, Snapshot

CURVES = ("series", "rank_series", "gpu_series", "host_series")
BY_TIME = ("gpu_series", "host_series")  # drawn over time alone: their steps stay here
PARTS = ("ranks", "hosts", "events", "attempts", "logs", "goodput", "plan", "findings", "explanation", "notes")
HEAD = tuple(field.name for field in fields(Snapshot) if field.name not in (*CURVES, *PARTS))


def changes(before: Snapshot | None, after: Snapshot) -> dict[str, Any]:
    """What makes `after` of `before`: {head?, parts: {name: value}, curves: {group: {key: grown}}}, each only if it changed.

    before None: everything, which is also what a report holds.
    """
    told: dict[str, Any] = {}
    head = {name: getattr(after, name) for name in HEAD}
    if before is None or head != {name: getattr(before, name) for name in HEAD}:
        told["head"] = head
    parts = {
        name: plain(name, getattr(after, name))
        for name in PARTS
        if before is None or getattr(before, name) != getattr(after, name)
    }
    curves = {
        name: grown_curves(curves_of(before, name), curves_of(after, name), by_time=name in BY_TIME) for name in CURVES
    }
    told |= {"parts": parts} if parts else {}
    return told | ({"curves": found} if (found := {name: group for name, group in curves.items() if group}) else {})


def plain(name: str, value: Any) -> Any:
    if name == "goodput":
        if value is None:
            return None
        energy = None if value.energy_j is None else format_energy(value.energy_j)
        return {**value.to_json(), "words": KINDS, "energy": energy}
    if isinstance(value, list):
        return [asdict(each) if is_dataclass(each) and not isinstance(each, type) else each for each in value]
    return value


def curves_of(snapshot: Snapshot | None, name: str) -> Mapping[str, Series]:
    if snapshot is None:
        return {}
    found = getattr(snapshot, name)
    return {str(rank): series for rank, series in enumerate(found)} if isinstance(found, list) else found


def grown_curves(before: Mapping[str, Series], after: Mapping[str, Series], *, by_time: bool) -> dict[str, Any]:
    """By key: {from, steps?, values, times}, the points that take the place of all from index `from` on; None: it is gone."""
    found: dict[str, Any] = {}
    for key, series in after.items():
        old = before.get(key)
        if old is None or old != series:
            start = shared_points(old, series) if old else 0
            found[key] = {
                "from": start,
                **({} if by_time else {"steps": series.steps[start:]}),
                "values": [short(value) for value in series.values[start:]],
                "times": [round(time, 1) for time in series.times[start:]],
            }
    return found | {key: None for key in before if key not in after}


def shared_points(old: Series, new: Series) -> int:
    """How many points both begin with: all of the old ones, mostly; fewer after it was thinned."""
    size = len(old.steps)
    if new.steps[:size] == old.steps and new.values[:size] == old.values and new.times[:size] == old.times:
        return size
    pairs = zip(
        zip(old.steps, old.values, old.times, strict=False),
        zip(new.steps, new.values, new.times, strict=False),
        strict=False,
    )
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(size, len(new.steps)))


def short(value: float) -> float | None:
    """Eight digits: as many as a screen shows of the number itself. What is no number is a gap."""
    return float(f"{value:.8g}") if math.isfinite(value) else None


def to_text(message: Any) -> str:
    """JSON in one line that every browser reads: what is no number is null."""
    try:
        return orjson.dumps(message).decode()
    except TypeError:  # a file name that is no UTF-8
        return orjson.dumps(without_surrogates(message)).decode()


def without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, Mapping):
        return {without_surrogates(key): without_surrogates(each) for key, each in value.items()}
    return [without_surrogates(each) for each in value] if isinstance(value, list | tuple) else value
