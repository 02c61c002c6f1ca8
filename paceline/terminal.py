"""
Text on the screen: the progress of long work, as a bar or a line on a terminal and as plain lines in a pipe; tables of facts.

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
    """Yields progress(label, done, total), which draws a bar on a terminal and prints one line for each label in a pipe."""
    if not sys.stderr.isatty():
        shown: set[str] = set()

        def line(label: str, done: float, total: float) -> None:
            if label not in shown:
                shown.add(label)
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
def progress_line(label: str) -> Iterator[Callable[[str], None]]:
    """Yields a function that adds a name to a line on the terminal; the line is erased at the end."""
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
    """Aligned `name  value` lines with separated thousands; a nested table becomes lines such as `train num_tokens`."""
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


class TolerantStream:
    """A stream that raises nothing: it is silent once its reader has gone, and loses lines on a full disk."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._tolerate(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._tolerate(error)

    def end(self) -> None:
        """Flushes what is buffered, which would otherwise raise when the interpreter exits."""
        try:
            self._stream.flush()
        except OSError:
            self._silence()

    def _tolerate(self, error: OSError) -> None:
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
def tolerant_output() -> Iterator[None]:
    """Keeps a run going when stdout or stderr vanish: `| head`, a closed terminal, a log on a full disk.

    It must cover a command from its first line: a reader that leaves before the launch must not prevent the launch.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = TolerantStream(before[0]), TolerantStream(before[1])
    try:
        yield
    except BrokenPipeError as error:  # of a helper process: it must not pass for a reader that has left the screen
        raise RuntimeError("a process that this command had started closed its pipe") from error
    finally:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, TolerantStream):
                stream.end()
        sys.stdout, sys.stderr = before
