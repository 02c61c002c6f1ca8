"""
Text on the screen: what long work shows while it lasts, a bar or a line on a terminal and plain lines in a pipe; tables of facts.

Rich is imported when a bar is drawn.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from paceline.rundir import NO_SPACE


@contextmanager
def show_progress() -> Iterator[Callable[[str, float, float], None]]:
    """progress(label, done, total): a bar on a terminal; one line per label when piped."""
    if not sys.stderr.isatty():
        seen: set[str] = set()

        def line(label: str, done: float, total: float) -> None:
            if label not in seen:
                seen.add(label)
                print(f"{label} ...", file=sys.stderr, flush=True)

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, Any] = {}

        def update(label: str, done: float, total: float) -> None:
            if label not in tasks:
                tasks[label] = bar.add_task(label, total=total)
            bar.update(tasks[label], completed=done, total=total)

        yield update


@contextmanager
def waiting(label: str) -> Iterator[Callable[[str], None]]:
    """On a terminal, one line that says what is done so far, and goes when all is."""
    done: list[str] = []

    def add(name: str) -> None:
        done.append(name)
        if sys.stderr.isatty():
            print(f"\r\x1b[2K{label}: {', '.join(done)}", end="", file=sys.stderr, flush=True)

    try:
        yield add
    finally:
        if done and sys.stderr.isatty():
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def write_now(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def format_facts(facts: dict[str, Any]) -> str:
    """Aligned `name  value` lines; thousands separated; a table within becomes lines of its own, `train num_tokens`."""
    for name, value in list(facts.items()):
        if isinstance(value, dict) and value:
            facts = {**facts, **{f"{name} {key}": inner for key, inner in value.items()}}
            del facts[name]
    if any(isinstance(value, dict) and value for value in facts.values()):
        return format_facts(facts)
    width = max(len(name) for name in facts)
    return "\n".join(f"{name:<{width}}  {format_fact(value)}" for name, value in facts.items())


def format_fact(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "n/a"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}"
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


class Lasting:
    """A stream that raises nothing: once nobody reads it any more it is silent, and on a full disk lines are lost."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._bear(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._bear(error)

    def end(self) -> None:
        """What is still held back would be an error of the interpreter's own end."""
        try:
            self._stream.flush()
        except OSError:
            self._silence()

    def _bear(self, error: OSError) -> None:
        if error.errno not in NO_SPACE:
            self._silence()

    def _silence(self) -> None:
        with suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lasting_screen() -> Iterator[None]:
    """For as long as a run is under way, stdout and stderr may vanish: `| head`, a closed terminal, a log on a full disk."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = Lasting(before[0]), Lasting(before[1])
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, Lasting):
                stream.end()
        sys.stdout, sys.stderr = before
