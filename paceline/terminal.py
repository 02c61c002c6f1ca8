"""
Text on the screen: the progress of long work, as a bar or a line on a terminal and as plain lines in a pipe; tables of facts;
the columns that texts take; and the lines of --help.

Every command prints through a PlainStream, so no run's name, log or exception can steer the terminal. Files of --out are
written here too.

Rich is imported when a bar is drawn.
"""

import argparse
import errno
import fcntl
import os
import re
import shutil
import signal
import sys
import termios
import time
import tomllib
import unicodedata
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any, TextIO

from paceline.errors import PacelineError
from paceline.rundir import NO_SPACE, unreadable_file, write_atomic
from paceline.units import format_duration, format_percent

# an escape sequence, whole or cut
SEQUENCE = r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])?"
# with the characters that move the cursor or turn the direction of text
STEERING = re.compile(SEQUENCE + r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
COLOUR = re.compile(r"\x1b\[[\d;:]*m")

ELLIPSIS = "…"
LINE_EVERY_S = 20.0  # between two lines of progress in a pipe
ASCII_BARS = str.maketrans("█▉▊▋▌▍▎▏·", "#####   .")  # of a plan, for a terminal without UTF-8


def is_terminal(stream: TextIO) -> bool:
    """Whether the stream is a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def shows_colours(stream: TextIO) -> bool:
    """Whether the stream is a terminal on which its user wants colours (no-color.org)."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


@contextmanager
def show_progress() -> Iterator[Callable[[str, float, float], None]]:
    """Yields progress(label, done, total), which draws a bar on a terminal.

    In a pipe it prints a line when the work begins, then every LINE_EVERY_S how far it is and how long it may still take.
    """
    if not is_terminal(sys.stderr):
        starts: dict[str, tuple[float, float]] = {}  # the time and what was done then
        printed_at = 0.0

        def line(label: str, done: float, total: float) -> None:
            nonlocal printed_at
            now, is_first = time.monotonic(), label not in starts
            start, before = starts.setdefault(label, (now, done))
            if not is_first and now - printed_at < LINE_EVERY_S:
                return
            printed_at, text = now, "..."
            if not is_first and done > before and total:
                left_s = (now - start) * (total - done) / (done - before)
                text = f"{format_percent(done / total)}, {format_duration(left_s)} left"
            print(f"{label} {text}", file=sys.stderr, flush=True)

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=own_stream(sys.stderr)), transient=True) as bar:
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
        if is_terminal(sys.stderr):
            print(f"\r\x1b[2K{label}: {', '.join(done)}", end="", file=own_stream(sys.stderr), flush=True)

    try:
        yield add
    finally:
        if done and is_terminal(sys.stderr):
            print("\r\x1b[2K", end="", file=own_stream(sys.stderr), flush=True)


def cells(text: str) -> int:
    """Columns that a text takes: two for a wide character, none for one that combines with the character before it."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 1 + (unicodedata.east_asian_width(char) in ("W", "F")) for char in text
    )


def cut(text: str, width: int) -> str:
    """Cuts a text to at most `width` columns, with an ellipsis for what is cut off."""
    if cells(text) <= width:
        return text
    ends = takewhile(lambda end: end < width, accumulate(map(cells, text)))
    return text[: len(list(ends))] + ELLIPSIS if width > 0 else ""


def without_middle(name: str, width: int) -> str:
    """Returns a name of at most `width` columns: the runs of a sweep differ at its end."""
    if cells(name) <= width:
        return name
    start = cut(name, width // 2)
    return start + next(name[i:] for i in range(len(name)) if cells(name[i:]) <= width - cells(start))


def terminal_width() -> int | None:
    """Returns the columns of the terminal that shows stdout; None where it is a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def pad(text: str, width: int, *, right: bool = False) -> str:
    """Fills a text with spaces to `width` columns. right: it stands at the right end."""
    spaces = " " * (width - cells(text))
    return spaces + text if right else text + spaces


def table_lines(cells: Sequence[Mapping[str, str]]) -> list[str]:
    """Returns the header and a line for each row of cells; the first column starts at the left."""
    columns = list(dict.fromkeys(column for row in cells for column in row))
    lines = [columns, *([row.get(column, "") for column in columns] for row in cells)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]).rstrip() for first, *others in lines
    ]


def format_facts(facts: dict[str, Any]) -> str:
    """Aligned `name  value` lines with separated thousands; a nested table becomes lines such as `train num_tokens`."""
    facts = dict(facts)
    while tables := [name for name, value in facts.items() if isinstance(value, dict) and value]:
        for name in tables:
            facts |= {f"{name} {key}": value for key, value in facts.pop(name).items()}
    width = max(map(cells, facts))
    return "\n".join(f"{pad(name, width)}  {format_fact(value)}" for name, value in facts.items())


def format_fact(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "n/a"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}"
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


class PlainStream:
    """A stream that prints text, and on a terminal colours, but nothing else that steers a terminal."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        if STEERING.search(text):
            coloured = shows_colours(self._stream)
            text = STEERING.sub(lambda match: match[0] if coloured and COLOUR.fullmatch(match[0]) else "", text)
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:  # a file name that is not UTF-8, or a terminal that is not
            encoding = self._stream.encoding or "ascii"
            return self._stream.write(text.translate(ASCII_BARS).encode(encoding, "replace").decode(encoding))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def own_stream(stream: Any) -> Any:
    """Returns the stream for what may move the cursor: a progress bar of our own, never the text of others."""
    if isinstance(stream, TolerantStream):
        return TolerantStream(own_stream(stream._stream))
    return stream._stream if isinstance(stream, PlainStream) else stream


@contextmanager
def plain_output() -> Iterator[None]:
    """Makes stdout and stderr plain, and writes all of stdout before it ends, so that a full disk is an error of the command."""
    before = sys.stdout, sys.stderr
    # Python has no stream where the shell closed the descriptor: `paceline check >&-`
    with open(os.devnull, "w") as null:
        sys.stdout, sys.stderr = PlainStream(before[0] or null), PlainStream(before[1] or null)
        try:
            yield
            sys.stdout.flush()
        finally:
            sys.stdout, sys.stderr = before


def silence(stream: TextIO) -> None:
    """Lets a stream that cannot be written lose what it still holds, instead of raising when the interpreter exits."""
    with suppress(OSError, ValueError), open(os.devnull, "w") as null:
        os.dup2(null.fileno(), stream.fileno())


def problem_of(error: OSError) -> PacelineError:
    """Returns the user's problem behind an error: a file that cannot be read, a full disk behind stdout. Raises any other."""
    if isinstance(error, PermissionError) and error.filename is not None:
        return unreadable_file(Path(str(error.filename)), error)
    if error.errno == errno.ENAMETOOLONG:
        return PacelineError(f"{error.filename} cannot be a path: {error.strerror}", fix="check the name and the path")
    if error.errno not in NO_SPACE:
        raise error
    if error.filename is not None:
        fix = "make room in its file system (df -h), then repeat the command"
        return PacelineError(f"{error.filename} cannot be written: {error.strerror}", fix=fix)
    silence(sys.stdout)
    return PacelineError(f"the output cannot be written: {error.strerror}", fix="write it to another place")


def write_output(path: Path, text: str) -> None:
    """Writes a file of --out, whole or not at all; a device or a pipe as it is. Raises PacelineError where it cannot be written."""
    try:
        if path.exists() and not path.is_file():  # a rename would replace it
            path.write_text(text, encoding="utf-8")
        else:
            write_atomic(path.resolve(), text)
    except OSError as error:
        fix = "--out FILE in a place you can write"
        raise PacelineError(f"{path} cannot be written: {error.strerror}", fix=fix) from error


class TolerantStream:
    """A stream that raises nothing: it is silent once its reader has gone, and loses lines on a full disk, its `problem`."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self.problem: str | None = None

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
            self.problem = error.strerror if error.errno in NO_SPACE else self.problem
            if error.errno not in but:
                silence(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def stop_signals() -> tuple[signal.Signals, ...]:
    """Returns what ends a run: Ctrl-C, a batch system's notices, and the end of the terminal where nohup does not ignore that."""
    notices = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    return notices if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*notices, signal.SIGHUP)


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


def has_input() -> bool:
    """Whether something waits in a pipe or a file that is the standard input."""
    waiting = array("i", [0])
    try:
        is_piped = not os.isatty(0)
        fcntl.ioctl(0, termios.FIONREAD, waiting)
    except OSError:  # it is closed, or a device
        return False
    return is_piped and waiting[0] > 0


class HelpFormatter(argparse.HelpFormatter):
    """Keeps the paragraphs of a docstring and the lines of its examples, and shows a switch without a value.

    own: the options that are no keys of a config; of the others it shows what the config tiny sets, which is used without CONFIG.
    """

    def __init__(self, *args: Any, own: Collection[str], **settings: Any):
        super().__init__(*args, **settings)
        self._own = own

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill, parts = super()._fill_text, text.split("\n\n")
        return "\n\n".join(part if part.startswith("examples:") else fill(part, width, indent) for part in parts)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return str(action.metavar or super()._format_action_invocation(action))

    def _get_help_string(self, action: argparse.Action) -> str:
        value, text = tiny_values().get(action.dest), str(action.help)
        return text if value is None or action.dest in self._own or f"[{value}]" in text else f"{text} (tiny: {value})"


@cache
def tiny_values() -> dict[str, Any]:
    """Returns the keys that the config tiny sets."""
    values: dict[str, Any] = tomllib.loads(Path(__file__).with_name("configs").joinpath("tiny.toml").read_text("utf-8"))
    return values
