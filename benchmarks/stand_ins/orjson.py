"""Stands for orjson on a machine on which nothing can be installed: gpu_runs.py puts it on the path where orjson is missing."""

import json
from typing import Any

JSONDecodeError = json.JSONDecodeError


def loads(text: bytes | str) -> Any:
    """Returns what the JSON says; as orjson, it knows no NaN."""
    return json.loads(text, parse_constant=_refuse)


def dumps(value: Any) -> bytes:
    """Returns JSON without spaces."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
