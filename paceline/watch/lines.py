"""
JSON lines and the times in them, as whoever follows a run folder reads them. Light: a list of runs needs no more.
"""

import math
from contextlib import suppress
from datetime import datetime
from typing import Any

import orjson

Record = dict[str, Any]


def parse_lines(block: bytes) -> list[Record]:
    """The JSON objects of a block of lines; what is none is passed over."""
    with suppress(ValueError):
        found = orjson.loads(b"[" + block.strip(b"\n").replace(b"\n", b",") + b"]")
        if set(map(type, found)) <= {dict}:
            return list(found)
    records = []
    for line in block.split(b"\n"):
        with suppress(ValueError):
            if isinstance(record := orjson.loads(line), dict):
                records.append(record)
    return records


def unix_time(text: Any) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, TypeError):
        return math.nan
