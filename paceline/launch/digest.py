"""
What the terminal shows while a run goes on: a training's steps and events, or the lines of a script's ranks.

A training's digest comes from metrics.jsonl and events.jsonl alone: on a terminal a progress bar with the events above it,
otherwise one plain line per logged step. It starts with what is written after it was made, so a resumed run does not repeat itself.
Rich is imported when a terminal first shows a bar: the time from the command to the first step counts in tenths of a second.

A script's rank logs are shown for eyes, while the files keep every byte. Of a line that a progress bar overwrites, only the last
state is shown, at most every BAR_EVERY_S; an unfinished line is shown after UNFINISHED_AFTER_S; a very long line is cut; bytes that
would move the cursor or are no text are left out. The tail holds one line of each rank in memory, never more.
"""

import math
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TextIO

from paceline.check.format import format_findings
from paceline.errors import Finding
from paceline.heartbeat import read_heartbeat
from paceline.noise import seconds_per_step
from paceline.rundir import RunDir, open_file, utc_now
from paceline.terminal import COLOUR, SEQUENCE, STEERING, is_terminal, own_stream
from paceline.units import format_bytes, format_count, format_duration, format_mfu, format_ms, parse_time
from paceline.watch.events import event_line, step_label
from paceline.watch.growing_file import GrowingFile, JsonRecord, parse_lines

ETA_RECORDS = 50  # logged steps that the speed is taken from: it includes evaluations and saves
REDRAW_S = 0.25
BAR_WIDTH = 16
SLOW_STEP_S = 5.0  # a stop says that it waits for such a step

CHUNK_BYTES = 1 << 18
TURN_BYTES = 1 << 23  # of one rank before the other ranks have their turn and a Ctrl-C is noticed
LINE_BYTES = 4096  # shown of one line
UNFINISHED_AFTER_S = 1.0
BAR_EVERY_S = 10.0
COLOURS = (36, 33, 32, 35, 34, 31)  # of ranks 0, 1, ... on a terminal: cyan, yellow, green, magenta, blue, red

CONTROL = bytes({*range(32), 127} - {*b"\t\n\r\x1b"})
SPECIAL = CONTROL + b"\r\x1b"  # a line without these is shown as it is
ESCAPE, COLOUR_CODE = re.compile(SEQUENCE.encode()), re.compile(COLOUR.pattern.encode())
COLOUR_END = b"\x1b[0m"

OnMetrics = Callable[[JsonRecord], None]  # takes each line of metrics.jsonl


class Digest:
    """What a training prints. Call poll() several times a second; it costs little when nothing is new."""

    def __init__(
        self,
        run: RunDir,
        *,
        num_steps: int,
        total_batch_size: int,
        stream: TextIO,
        on_metrics: OnMetrics = lambda record: None,
        stop_grace_s: float = 60.0,
    ):
        self.run, self.num_steps, self.stop_grace_s = run, num_steps, stop_grace_s
        self.on_metrics = on_metrics
        self.total_batch_size = total_batch_size
        self.stream = stream
        self.metrics = NewRecords(run.metrics)
        self.events = NewRecords(run.events)
        self.recent: deque[JsonRecord] = deque(maxlen=ETA_RECORDS)
        self.bar: Bar | None = None
        self.stop_shown = False

    def poll(self) -> None:
        """Shows what is new in the run folder."""
        if self.bar is None and is_terminal(self.stream):
            self.bar = Bar(self.stream, num_steps=self.num_steps)
        # a step first, then what follows it: checkpoints, samples
        for record in self.metrics.read():
            self.show_metrics(record)
            self.on_metrics(record)
        for event in self.events.read():
            self.show_event(event)
        if self.bar:
            self.bar.redraw()

    def close(self) -> None:
        """Shows the last lines and leaves the bar as it is."""
        self.poll()
        if self.bar:
            self.bar.close()

    def show_metrics(self, record: JsonRecord) -> None:
        """Shows a line of metrics.jsonl."""
        step = record.get("step")
        if not isinstance(step, int):
            return
        if record.get("loss") is not None:
            self.recent.append(record)
            eta_s = seconds_left(list(self.recent), num_steps=self.num_steps)
            if self.bar:
                self.bar.update(record, tokens=step * self.total_batch_size, eta_s=eta_s)
            else:
                self.show(format_step(record, num_steps=self.num_steps, eta_s=eta_s))
        if record.get("val_bpb") is not None:
            self.show(f"{step_label(step, self.num_steps)} | val_bpb {record['val_bpb']:.4f}")

    def show_event(self, event: JsonRecord) -> None:
        """Shows a line of events.jsonl, unless only the file needs it."""
        kind = event.get("event")
        if kind == "stopping" and self.stop_shown:
            return  # the supervisor and the workers may both write it
        if kind == "sample" and event.get("step") == self.num_steps:
            return  # the closing lines have the last one whole
        self.stop_shown = kind == "stopping" or (self.stop_shown and kind != "attempt")
        ending = self.ending(event) if kind == "stopping" else ""
        if kind == "finding":
            self.show(format_findings([Finding(**{field.name: event[field.name] for field in fields(Finding)})]))
        elif text := event_line(event, num_steps=self.num_steps, ending=ending):
            self.show(text)

    def ending(self, stopping: JsonRecord) -> str:
        """Returns what the ranks do before they stop; until the first step is done they end at once, as nothing is to be saved."""
        if not self.recent:
            return ""
        heartbeat, step_s = read_heartbeat(self.run.progress(0)), (self.recent[-1].get("step_ms") or 0.0) / 1000
        if heartbeat and heartbeat.phase == "eval":
            work = "finishing the evaluation"
        elif step_s >= SLOW_STEP_S:
            work = f"finishing the step, {format_duration(step_s)} each"
        else:
            return "saving a checkpoint"
        grace_s = min(self.stop_grace_s, stopping.get("seconds_left", math.inf))
        return f"{work}, then saving a checkpoint, {format_duration(grace_s)} at most"

    def show(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        if self.bar:
            self.bar.show(text)
        else:
            self.stream.write(text + "\n")
            self.stream.flush()


class NewRecords:
    """The records that are appended to a file of JSON lines. A resume may rewrite the file without its last lines."""

    def __init__(self, path: Path, *, offset: int | None = None):
        """offset: bytes of the file that count as read; None: all that it has now."""
        self._file = GrowingFile(path)
        self._file.restarted()  # it remembers which file this is
        size = path.stat().st_size if path.exists() else 0
        self._file.skip_to(size if offset is None else offset, before=b"")
        self._read_until = utc_now()

    def read(self) -> list[JsonRecord]:
        """Returns the records that are new since the last call; after a rewrite, those that are newer than the last one."""
        is_rewritten = self._file.restarted()
        records = [record for block in self._file.blocks() for record in parse_lines(block)]
        if is_rewritten:
            records = [record for record in records if str(record.get("time", "")) > self._read_until]
        if records:
            self._read_until = max(self._read_until, str(records[-1].get("time", "")))
        return records


class Bar:
    """The rich progress bar. Only redraw() draws it, so that no thread of ours competes with the workers."""

    def __init__(self, stream: TextIO, *, num_steps: int):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        one_line = Column(no_wrap=True, overflow="ellipsis", ratio=1)  # a narrow terminal loses the last numbers
        self.width = len(str(num_steps))
        self.progress: Progress = Progress(
            TextColumn("{task.fields[step]}", markup=False, table_column=Column(no_wrap=True)),
            BarColumn(bar_width=BAR_WIDTH),
            TextColumn("{task.fields[numbers]}", markup=False, table_column=one_line),
            console=Console(file=own_stream(stream)),
            auto_refresh=False,
            expand=True,
        )
        self.task = self.progress.add_task("", total=num_steps, step="starting", numbers="")
        self.progress.start()
        self.drawn_at = 0.0
        self.changed = True

    def update(self, record: JsonRecord, *, tokens: int, eta_s: float | None) -> None:
        """Sets the bar to a logged step."""
        step = record["step"]
        # a bar has less room than a line: loss and remaining time come first, unknown numbers are left out
        loss, *others, eta = format_numbers(record, eta_s=eta_s)
        numbers = [loss, eta, *(number for number in others if "n/a" not in number), f"{format_count(tokens)} tokens"]
        self.progress.update(
            self.task,
            completed=step,
            step=f"step {step:>{self.width}}/{self.progress.tasks[0].total:.0f}",
            numbers=" | ".join(numbers),
        )
        self.changed = True

    def show(self, text: str) -> None:
        """Prints a line above the bar."""
        self.progress.console.print(STEERING.sub("", text), markup=False, highlight=False, soft_wrap=True)

    def redraw(self) -> None:
        """Draws the bar if it has changed, at most every REDRAW_S."""
        now = self.progress.get_time()
        if self.changed and now - self.drawn_at >= REDRAW_S:
            self.progress.refresh()
            self.drawn_at, self.changed = now, False

    def close(self) -> None:
        """Draws the bar a last time."""
        self.progress.refresh()
        self.progress.stop()


def format_step(record: JsonRecord, *, num_steps: int, eta_s: float | None) -> str:
    """Returns 'step 00120/02500 | loss 4.1203 | 612 ms | 856,679 tok/s | mfu 41.2% | 38.1 GiB | eta 24m17s'."""
    return " | ".join([step_label(record["step"], num_steps), *format_numbers(record, eta_s=eta_s)])


def format_numbers(record: JsonRecord, *, eta_s: float | None) -> list[str]:
    """Returns the numbers of a logged step with their units; 'n/a' for what is unknown."""
    step_ms, tok_per_sec, peak_bytes = (record.get(key) for key in ("step_ms", "tok_per_sec", "peak_bytes"))
    return [
        f"loss {record['loss']:.4f}",
        "n/a ms" if step_ms is None else format_ms(step_ms),
        "n/a tok/s" if tok_per_sec is None else f"{tok_per_sec:,.0f} tok/s",
        f"mfu {format_mfu(record.get('mfu'))}",
        "n/a GiB" if peak_bytes is None else format_bytes(peak_bytes),
        f"eta {format_duration(eta_s)}",
    ]


def seconds_left(records: list[JsonRecord], *, num_steps: int) -> float | None:
    """Returns the remaining time, from the clock between logged steps; from step_ms while only one step is logged."""
    step_s = seconds_per_step(
        [record["step"] for record in records], [parse_time(record["time"]) for record in records]
    )
    if step_s is None and (step_ms := records[-1].get("step_ms")) is not None:
        step_s = step_ms / 1000
    steps_left: int = num_steps - records[-1]["step"]
    return None if step_s is None else step_s * steps_left


class LogTail:
    """The rank logs on the terminal: whole lines, each with its rank. With nothing new, poll() costs a stat() per rank."""

    def __init__(
        self,
        paths: Mapping[int, Path],
        *,
        stream: TextIO,
        colour: bool,
        hosts: Mapping[int, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """paths: rank -> its log. hosts: rank -> its host, where there are several."""
        names = {rank: f"{hosts[rank] if hosts else ''}[{rank}]" for rank in paths}
        width = max(map(len, names.values()))
        self.stream = stream
        self.clock = clock
        self.logs = []
        for rank, path in paths.items():
            name = names[rank].ljust(width)
            prefix = f"\x1b[{COLOURS[rank % len(COLOURS)]}m{name}\x1b[0m " if colour else f"{name} "
            self.logs.append(RankLog(path, prefix=prefix.encode() if len(paths) > 1 or hosts else b"", colour=colour))

    def poll(self) -> None:
        """Shows what is new in the logs, of each rank about TURN_BYTES."""
        for log in self.logs:
            self.advance(log, turn_bytes=TURN_BYTES)
            self.show(log.take(b"", now=self.clock()))

    def close(self) -> None:
        """Shows everything that the files have, rank by rank, unfinished last lines included."""
        for log in self.logs:
            self.advance(log, turn_bytes=math.inf)
            self.show(log.finish())

    def advance(self, log: "RankLog", *, turn_bytes: float) -> None:
        """Shows what is new in one log, until about turn_bytes are read."""
        start = log.offset
        while log.offset - start < turn_bytes and (chunk := log.read()):
            self.show(log.take(chunk, now=self.clock()))

    def show(self, lines: bytes) -> None:
        """Prints lines; characters that the stream cannot encode are replaced."""
        if not lines:
            return
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        self.stream.write(lines.decode(errors="replace").encode(encoding, "replace").decode(encoding))
        self.stream.flush()


class RankLog:
    """One rank's log file and its unfinished last line."""

    def __init__(self, path: Path, *, prefix: bytes, colour: bool):
        self.path = path
        self.prefix = prefix
        self.colour = colour
        self.offset = 0
        self._part = b""  # the visible part of the unfinished line, at most LINE_BYTES
        self._num_cut = 0  # bytes of that line that were dropped
        self._grown_at = 0.0
        self._bar_at = float("-inf")
        self._bar_shown = b""

    def read(self) -> bytes:
        """Returns the next bytes of the file; empty where nothing is new."""
        try:
            if self.path.stat().st_size <= self.offset:
                return b""
            with open_file(self.path) as file:
                file.seek(self.offset)
                chunk = file.read(CHUNK_BYTES)
        except OSError:
            return b""  # the rank has not started yet
        self.offset += len(chunk)
        return chunk

    def take(self, chunk: bytes, *, now: float) -> bytes:
        """Takes bytes of the file and returns the lines to show now."""
        *whole, last = chunk.split(b"\n")
        lines = []
        if whole:
            self._extend(whole[0])
            lines = [self._finish(), self._lines(whole[1:])]
        if last:
            self._extend(last)
            self._grown_at = now
        return b"".join([*lines, self._unfinished(now=now)])

    def _lines(self, lines: list[bytes]) -> bytes:
        text = b"\n".join(lines)
        if lines and len(text.translate(None, SPECIAL)) == len(text) and max(map(len, lines)) <= LINE_BYTES:
            return b"%s%s\n" % (self.prefix, text.replace(b"\n", b"\n" + self.prefix))  # five times as fast
        return b"".join(map(self._line, lines))

    def finish(self) -> bytes:
        """Returns the unfinished line."""
        return self._finish() if self._part else b""

    def _extend(self, piece: bytes) -> None:
        line = self._part + piece
        if b"\r" in line:
            self._num_cut *= b"\r" not in piece  # the cut bytes are overwritten
            text = line.rstrip(b"\r")
            end = b"\r" * (len(line) > len(text))  # "\r\n" may be split in two, and a bar may write its "\r" last
            line = b"\r" * (b"\r" in text) + text.rpartition(b"\r")[2] + end
        self._part, num_cut = line[: LINE_BYTES + 1], len(line) - LINE_BYTES - 1
        self._num_cut += max(0, num_cut)

    def _finish(self) -> bytes:
        line, num_cut, bar_shown = self._part, self._num_cut, self._bar_shown
        self._part, self._num_cut, self._bar_shown = b"", 0, b""
        if bar_shown and line.strip(b"\r") == bar_shown:
            return b""  # the bar's last state is on the screen already
        if line.startswith(b"\r") and not line.strip():
            return b""  # a bar that erased itself
        return self._line(line, num_cut=num_cut)

    def _unfinished(self, *, now: float) -> bytes:
        """Returns a progress bar's state from time to time, and a line that has not grown for a moment."""
        state = self._part.strip(b"\r")
        if self._part.startswith(b"\r") or self._part.endswith(b"\r"):
            if not state.strip() or state == self._bar_shown or now - self._bar_at < BAR_EVERY_S:
                return b""
            self._bar_at, self._bar_shown = now, state
            return self._line(state)
        if not state or now - self._grown_at < UNFINISHED_AFTER_S:
            return b""
        return self._finish()

    def _line(self, line: bytes, *, num_cut: int = 0) -> bytes:
        line = line.rstrip(b"\r").rpartition(b"\r")[2]
        num_cut += max(0, len(line) - LINE_BYTES)
        line = line[:LINE_BYTES]
        if b"\x1b" in line:
            line = ESCAPE.sub(lambda match: match[0] if self.colour and COLOUR_CODE.fullmatch(match[0]) else b"", line)
            line += COLOUR_END * self.colour
        line = line.translate(None, CONTROL)
        more = f" … {num_cut:,} more bytes: {self.path}".encode() if num_cut else b""
        return b"%s%s%s\n" % (self.prefix, line, more)
