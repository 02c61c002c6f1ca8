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
                tasks[label] = bar.add_task(label, total=total or None)  # None: how much there is to do is not known
            bar.update(tasks[label], completed=done, total=total or None)

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


def format_facts(facts: dict[str, Any]) -> str:
    """Aligned `name  value` lines with separated thousands; a nested table becomes lines such as `train num_tokens`."""
    facts = dict(facts)
    while tables := [name for name, value in facts.items() if isinstance(value, dict) and value]:
        for name in tables:
            facts |= {f"{name} {key}": value for key, value in facts.pop(name).items()}
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
        with self._tolerance():
            self._stream.write(text)
        return len(text)

    def flush(self, *, is_last: bool = False) -> None:
        """is_last: what is still buffered would raise again when the interpreter exits."""
        with self._tolerance(but=() if is_last else NO_SPACE):
            self._stream.flush()

    @contextmanager
    def _tolerance(self, but: tuple[int, ...] = NO_SPACE) -> Iterator[None]:
        """Silences the stream after an error other than `but`."""
        try:
            yield
        except OSError as error:
            if error.errno not in but:
                with suppress(OSError, ValueError), open(os.devnull, "w") as null:
                    os.dup2(null.fileno(), self._stream.fileno())

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
                stream.flush(is_last=True)
        sys.stdout, sys.stderr = before
