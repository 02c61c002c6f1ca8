"""
What long work shows while it lasts: a bar or a line on a terminal, plain lines in a pipe. Rich is imported when a bar is drawn.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


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
