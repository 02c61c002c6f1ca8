"""
Values for the sentences of the catalogue: what the pattern caught, what the record says, and what follows from these.
"""

from __future__ import annotations

import re

from paceline.explain.events import Event
from paceline.explain.fill import known
from paceline.explain.record import Progress, Record
from paceline.units import format_bytes

FRAME = re.compile(r'File "(?P<file>[^"]*)", line (?P<line>\d+)(?:,? in (?P<name>\S+))?')
INSTALLED = re.compile(r"site-packages|dist-packages|/lib/python\d|<frozen |^<")
TYPE = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(?:\(\w+\))?: ?(?P<message>.*)")
EXIT_CODE = re.compile(r"(?:exit ?code|return code|status)\s*[:=]?\s*(?P<code>-?\d{1,5})", re.IGNORECASE)
SIGNAL = re.compile(r"\bSIG[A-Z]{2,5}\d?\b")
BYTES = re.compile(r"(\d+)(?: bytes)?")
BATCH = re.compile(r"(?:device|micro|per_device_train|per_gpu)[_-]batch[_-]size['\"]?\s*[:= ]\s*(?P<size>\d{1,6})\b")


def values_of(event: Event, *, rank: int | None, step: int | None, progress: Progress) -> dict[str, str]:
    """All that is known, by the names that a sentence may use."""
    record = event.record
    first = record.text.splitlines()[0] if record.text else ""
    typed = TYPE.match(first) if record.kind in ("exception", "banner") else None
    code, signal = EXIT_CODE.search(record.text), SIGNAL.search(record.text)
    found = {
        "step": step,
        "host": record.host,
        "source": record.source,
        "last_step": progress.last_step,
        "type": typed["type"].rpartition(".")[2] if typed else None,
        "message": typed["message"] if typed else first,
        "exit_code": code["code"] if code else None,
        "signal": signal[0] if signal else None,
        **place_of(record),
        **{name: value for name, value in event.match.values.items() if value},
        "rank": rank,
    }
    if wanted := BYTES.fullmatch(str(found.get("wanted", ""))):
        found["wanted"] = format_bytes(int(wanted[1]))
    return known(found)


def place_of(record: Record) -> dict[str, str | None]:
    """The innermost frame in the user's own code: where, and script of the outermost one."""
    frames = [match for frame in record.frames if (match := FRAME.search(frame))]
    own = [frame for frame in frames if not INSTALLED.search(frame["file"])] or frames
    if not own:
        return {}
    inner = own[-1]
    name = inner["file"].replace("\\", "/").rpartition("/")[2]
    inside = f" in {inner['name']}" if inner["name"] and inner["name"] != "<module>" else ""
    return {"where": f"{name}:{inner['line']}{inside}", "script": own[0]["file"].replace("\\", "/").rpartition("/")[2]}
