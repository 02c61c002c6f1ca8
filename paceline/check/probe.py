"""
What the probes share: each is a process that takes a JSON request on stdin and prints one JSON line.

A process of its own, since what it touches may hang or crash: a wedged driver, a dead network disk, a broken build.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.kernel_files import read_text

Json = dict[str, Any]
OVERTIME_S = 2.0  # a probe whose asker is gone ends itself this long after its deadline


def answer(probe: Callable[[Json], Json]) -> None:
    """The whole of a probe's process. What else is printed to stdout from here on goes to stderr."""
    line = os.dup(1)
    os.dup2(2, 1)
    request: Json = json.loads(sys.stdin.read() or "{}")
    if request.get("deadline_s"):
        signal.setitimer(signal.ITIMER_REAL, request["deadline_s"] + OVERTIME_S)  # its default action is to end us
    try:
        facts = probe(request)
    except Exception as error:  # a probe that fails is a fact
        facts = {"error": error_line(error)}
    with os.fdopen(line, "w", encoding="utf-8") as out:
        out.write(json.dumps(facts) + "\n")
    sys.stderr.flush()
    os._exit(0)  # threads that still hang in a system call are left behind


def error_line(error: BaseException) -> str:
    """`OSError: [Errno 5] Input/output error`: type and first line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def process_name(pid: int) -> str | None:
    """`python train.py`: the program and its script or module. The other arguments may hold a key."""
    words = [word for word in (read_text(f"/proc/{pid}/cmdline") or "").split("\0") if word]
    if not words:
        return read_text(f"/proc/{pid}/comm")  # a kernel thread, or one that has just ended
    program = Path(words[0]).name
    if not program.startswith("python"):
        return program
    for word, following in zip(words[1:], [*words[2:], ""], strict=True):
        if word in ("-m", "-c"):
            return f"{program} {word} {following}" if word == "-m" else f"{program} -c"
        if not word.startswith("-"):
            return f"{program} {Path(word).name}"
    return program
