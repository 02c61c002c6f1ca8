"""
Text on the screen: what long work shows while it lasts, a bar or a line on a terminal and plain lines in a pipe; tables of facts.

Rich is imported when a bar is drawn.
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
