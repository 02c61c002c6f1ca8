"""Waits of tests for what other processes and threads do; the deadline only guards against hanging, on a busy machine too."""

import time
from collections.abc import Callable
from typing import TypeVar

DEADLINE_S = 300.0

Value = TypeVar("Value")


def wait_for(condition: Callable[[], Value], *, timeout_s: float = DEADLINE_S) -> Value:
    """Returns the first value of the condition that is true."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return value
