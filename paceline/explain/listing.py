"""
The catalogue for a reader: all causes at a glance, one in full.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import asdict
from textwrap import indent

from paceline.errors import PacelineError
from paceline.explain.catalogue import Cause, load_catalogue

MENDS = {"user": "you", "admin": "whoever runs the machine", "hardware": "other hardware"}
RETRIES = {
    "never": "a retry fails again",
    "same": "the same again may work",
    "smaller": "works with less memory",
    "other-port": "works on another port",
    "other-checkpoint": "works from another checkpoint",
    "later": "may work later",
}


def format_causes() -> str:
    causes = load_catalogue().causes
    width = max(map(len, causes), default=0)
    return "\n".join(
        f"{cause.id:<{width}}  {cause.title}" for cause in sorted(causes.values(), key=lambda each: each.id)
    )


def causes_json() -> str:
    return json.dumps([to_json(cause) for cause in load_catalogue().causes.values()], indent=1, ensure_ascii=False)


def cause_of(name: str) -> Cause:
    causes = load_catalogue().causes
    if name not in causes:
        near = difflib.get_close_matches(name, causes, n=1)
        raise PacelineError(
            f"no cause {name}", fix=f"--cause {near[0]}" if near else "paceline explain --list shows all"
        )
    return causes[name]


def cause_json(name: str) -> str:
    return json.dumps(to_json(cause_of(name)), indent=1, ensure_ascii=False)


def format_cause(name: str) -> str:
    cause = cause_of(name)
    follows = cause.follows if isinstance(cause.follows, bool) else sorted(cause.follows)
    lines = [
        f"{cause.id}: {cause.title}",
        "",
        f"says     {cause.summary}",
        f"fix      {cause.fix}",
        f"mended   by {MENDS.get(cause.mend, cause.mend)}",
        f"retry    {RETRIES.get(cause.retry, cause.retry)}",
        f"weight   {'a warning, never the end of a run by itself' if cause.severity == 'warning' else 'ends a run'}",
    ]
    if follows:
        lines.append(f"follows  {'any other cause' if follows is True else ', '.join(follows)}")
    if cause.mistaken_for:
        lines.append(f"not      {', '.join(sorted(cause.mistaken_for))}")
    if cause.source:
        lines.append(f"source   {cause.source}")
    patterns = "\n".join(f"{pattern.weight:.2f}  {pattern.match}" for pattern in cause.patterns)
    return "\n".join([*lines, "", "shown by", indent(patterns, "  ")])


def to_json(cause: Cause) -> dict[str, object]:
    return json.loads(json.dumps(asdict(cause), default=str))  # type: ignore[no-any-return]
