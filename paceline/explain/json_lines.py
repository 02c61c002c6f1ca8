"""
Log lines that are JSON objects: the text that the program logged, as it would stand in a plain log.

Read are the objects of docker's json-file, Kubernetes' loggers, structlog, loguru (serialize=True), python-json-logger, Elastic's
ECS and Google Cloud. An object without a message, such as a line of metrics, stays as it is. What the text means is decided by
the readers of plain lines.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from paceline.explain.lines import ISO

MAX_JSON_BYTES = 1 << 18  # a longer line is read as plain text
MAX_BEFORE = 200  # bytes of another program's prefix before the object
MAX_DEPTH = 3  # of objects in the object

MESSAGES = ("log", "message", "msg", "event", "text", "textPayload", "body", "short_message", "error.message")
TRACEBACKS = (
    *("exc_info", "exception", "exc_text", "traceback", "stack_trace", "stacktrace", "stack", "full_message"),
    *("error.stack_trace", "exception.stacktrace", "formatted"),
)
NESTED = ("error", "err", "exception", "exc_info", "jsonPayload", "record", "attributes", "extra", "fields", "data")
RANKS = ("rank", "global_rank", "RANK")
TIMES = ("time", "timestamp", "@timestamp", "asctime", "ts")
LEVELS = ("level", "levelname", "severity", "log.level", "lvl")
SHOWN_LEVEL = re.compile(r"(?i)(?:WARN(?:ING)?|ERROR|CRITICAL|FATAL)$")
EXCEPTION = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b")

Fields = Mapping[str, Any]


def unwrap_json(raw: bytes) -> list[bytes]:
    """The lines of text in a line of JSON, each with rank and time as a prefix; the line itself if it is none with a message."""
    start = raw.find(b'{"', 0, MAX_BEFORE)
    if start < 0 or len(raw) > MAX_JSON_BYTES or not raw.rstrip().endswith(b"}"):
        return [raw]
    try:
        fields = json.loads(raw[start:])
    except (ValueError, RecursionError):
        return [raw]
    if not isinstance(fields, dict) or not (lines := list(logged_lines(fields))):
        return [raw]
    prefix = raw[:start] + prefix_of(fields).encode("utf-8", "replace")
    return [prefix + line.encode("utf-8", "replace") for line in lines]


def logged_lines(fields: Fields, depth: int = 0) -> Iterator[str]:
    """The message's lines, the first with its level, and then those of the traceback."""
    message = first_text(fields, MESSAGES)
    lines = message.splitlines()
    level = first_text(fields, LEVELS)
    if lines and SHOWN_LEVEL.match(level) and not EXCEPTION.match(message):
        lines[0] = f"{level.upper()}: {lines[0]}"
    yield from lines
    for name in TRACEBACKS:
        traceback = traceback_text(fields.get(name))
        if traceback and traceback not in message:
            yield from traceback.splitlines()
    is_whole = "text" in fields and "record" in fields  # loguru's text
    for name in NESTED if depth < MAX_DEPTH and not is_whole else ():
        if isinstance(inner := fields.get(name), dict):
            yield from logged_lines(inner, depth + 1)


def traceback_text(value: Any) -> str:
    """A traceback as text, as lines, or as structlog's list of exceptions with frames; empty for anything else."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        return ""
    if value and all(isinstance(item, str) for item in value):
        return "\n".join(line.rstrip("\n") for line in value)
    lines = []
    for error in (item for item in value if isinstance(item, dict) and "exc_type" in item):
        lines.append("Traceback (most recent call last):")
        frames = error.get("frames")
        for frame in frames if isinstance(frames, list) else ():
            if isinstance(frame, dict):
                lines.append(f'  File "{frame.get("filename")}", line {frame.get("lineno")}, in {frame.get("name")}')
                lines.append(f"    {frame.get('line') or ''}")
        lines.append(f"{error['exc_type']}: {error.get('exc_value', '')}")
    return "\n".join(lines)


def prefix_of(fields: Fields) -> str:
    """Time and rank, in the form of a plain log."""
    time = first_text(fields, TIMES)
    inner = [fields, *(fields[name] for name in NESTED if isinstance(fields.get(name), dict))]
    rank = next((part[name] for part in inner for name in RANKS if type(part.get(name)) is int), None)
    return (f"{time} " if ISO.fullmatch(f"{time} ") else "") + (f"[rank{rank}]: " if rank is not None else "")


def first_text(fields: Fields, names: tuple[str, ...]) -> str:
    """The first of these fields that is a text."""
    return next((value for name in names if isinstance(value := fields.get(name), str) and value.strip()), "")
