"""
What the terminal shows while a run goes on, read from the run folder alone: metrics.jsonl and events.jsonl.

On a terminal a progress bar with the events above it, else one plain line per logged step. It begins with what is
written after it was made, so a resumed run does not repeat itself. Rich is imported when a terminal first shows a
bar: the time from the command to the first step is counted in tenths of a second.
"""

import json
import os
from collections import deque
from collections.abc import Callable
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from paceline.check.format import format_findings
from paceline.errors import Finding
from paceline.explain.format import format_explanation
from paceline.explain.run import explain_run
from paceline.launch.failure import Failure, read_log_tail
from paceline.launch.supervisor import LAUNCH_LOG, Outcome
from paceline.rundir import RunDir, append_event, utc_now
from paceline.units import format_bytes, format_count, format_duration, format_mfu

if TYPE_CHECKING:
    pass

ETA_RECORDS = 50  # logged steps over which the speed is taken: evaluations and saves are in it
TRACEBACK_LINES = 40
LAST_LINES = 10  # of a rank that left no traceback
SAMPLE_WIDTH = 160
REDRAW_S = 0.25
BAR_WIDTH = 16

OnMetrics = Callable[[dict[str, Any]], None]  # takes each line of metrics.jsonl


class Digest:
    """Call poll() some times a second; it costs two stat() calls when nothing is new."""

    def __init__(
        self,
        run: RunDir,
        *,
        num_steps: int,
        total_batch_size: int,
        stream: TextIO,
        on_metrics: OnMetrics = lambda record: None,
    ):
        self.num_steps = num_steps
        self.on_metrics = on_metrics
        self.total_batch_size = total_batch_size
        self.stream = stream
        self.metrics = Follow(run.metrics)
        self.events = Follow(run.events)
        self.recent: deque[dict[str, Any]] = deque(maxlen=ETA_RECORDS)
        self.bar: Bar | None = None
        self.stopping_said = False

    def poll(self) -> None:
        if self.bar is None and is_terminal(self.stream):
            self.bar = Bar(self.stream, num_steps=self.num_steps)
        # a step first, then what was done after it: checkpoints, samples
        for record in self.metrics.read():
            self.show_metrics(record)
            self.on_metrics(record)
        for event in self.events.read():
            self.show_event(event)
        if self.bar:
            self.bar.redraw()

    def close(self) -> None:
        self.poll()
        if self.bar:
            self.bar.close()

    def show_metrics(self, record: dict[str, Any]) -> None:
        step = record.get("step")
        if not isinstance(step, int):
            return
        if record.get("loss") is not None:
            self.recent.append(record)
            eta_s = seconds_left(list(self.recent), num_steps=self.num_steps)
            if self.bar:
                self.bar.update(record, tokens=step * self.total_batch_size, eta_s=eta_s)
            else:
                self.say(format_step(record, num_steps=self.num_steps, eta_s=eta_s))
        if record.get("val_bpb") is not None:
            self.say(f"{step_label(step, self.num_steps)} | val_bpb {record['val_bpb']:.4f}")

    def show_event(self, event: dict[str, Any]) -> None:
        kind = event.get("event")
        if kind == "stopping" and self.stopping_said:
            return  # the supervisor and the workers may both write it
        self.stopping_said = kind == "stopping" or (self.stopping_said and kind != "attempt")
        if text := format_event(event, num_steps=self.num_steps):
            self.say(text)

    def say(self, text: str) -> None:
        if self.bar:
            self.bar.say(text)
        else:
            self.stream.write(text + "\n")
            self.stream.flush()


class Follow:
    """New JSON lines of a file that grows, and that a resume may write anew with its last lines gone."""

    def __init__(self, path: Path):
        self.path = path
        self.inode, self.offset = self.stat()
        self.shown_until = utc_now()

    def stat(self) -> tuple[int, int]:
        try:
            found = self.path.stat()
        except OSError:
            return 0, 0
        return found.st_ino, found.st_size

    def read(self) -> list[dict[str, Any]]:
        inode, size = self.stat()
        again = size < self.offset or self.inode not in (0, inode)  # 0: there was no file yet, all of it is new
        if again:
            self.offset = 0
        self.inode = inode
        if size <= self.offset:
            return []
        with self.path.open("rb") as file:
            file.seek(self.offset)
            whole = file.read().rpartition(b"\n")[0]  # a half-written line is read when it is whole
        self.offset += len(whole) + bool(whole)
        records = [record for line in whole.split(b"\n") if (record := read_record(line))]
        if again:
            records = [record for record in records if str(record.get("time", "")) > self.shown_until]
        if records:
            self.shown_until = max(self.shown_until, str(records[-1].get("time", "")))
        return records


def read_record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


class Bar:
    """The rich progress bar; drawn by redraw() alone, so that no thread of ours runs beside the workers."""

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
            console=Console(file=stream),
            auto_refresh=False,
            expand=True,
        )
        self.task = self.progress.add_task("", total=num_steps, step="starting", numbers="")
        self.progress.start()
        self.drawn_at = 0.0
        self.changed = True

    def update(self, record: dict[str, Any], *, tokens: int, eta_s: float | None) -> None:
        step = record["step"]
        self.progress.update(
            self.task,
            completed=step,
            step=f"step {step:>{self.width}}/{self.progress.tasks[0].total:.0f}",
            numbers=" | ".join([*by_importance(format_numbers(record, eta_s=eta_s)), f"{format_count(tokens)} tokens"]),
        )
        self.changed = True

    def say(self, text: str) -> None:
        self.progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def redraw(self) -> None:
        now = self.progress.get_time()
        if self.changed and now - self.drawn_at >= REDRAW_S:
            self.progress.refresh()
            self.drawn_at, self.changed = now, False

    def close(self) -> None:
        self.progress.refresh()
        self.progress.stop()


def is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def step_label(step: int, num_steps: int) -> str:
    width = max(5, len(str(num_steps)))
    return f"step {step:0{width}d}/{num_steps:0{width}d}"


def format_step(record: dict[str, Any], *, num_steps: int, eta_s: float | None) -> str:
    """step 00120/02500 | loss 4.1203 | 612 ms | 856,679 tok/s | mfu 41.2% | 38.1 GiB | eta 24m17s"""
    return " | ".join([step_label(record["step"], num_steps), *format_numbers(record, eta_s=eta_s)])


def format_numbers(record: dict[str, Any], *, eta_s: float | None) -> list[str]:
    step_ms, tok_per_sec, peak_bytes = (record.get(key) for key in ("step_ms", "tok_per_sec", "peak_bytes"))
    return [
        f"loss {record['loss']:.4f}",
        "n/a ms" if step_ms is None else format_ms(step_ms / 1000),
        "n/a tok/s" if tok_per_sec is None else f"{tok_per_sec:,.0f} tok/s",
        f"mfu {format_mfu(record.get('mfu'))}",
        "n/a GiB" if peak_bytes is None else format_bytes(peak_bytes),
        f"eta {format_duration(eta_s)}",
    ]


def format_ms(seconds: float) -> str:
    ms = 1000 * seconds
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.1f} ms"


def by_importance(numbers: list[str]) -> list[str]:
    """Loss and time left first, what is unknown left out: a bar has room for less than a line."""
    loss, *rest, eta = numbers
    return [loss, eta, *(number for number in rest if "n/a" not in number)]


def seconds_left(records: list[dict[str, Any]], *, num_steps: int) -> float | None:
    """From the clock between logged steps; from step_ms as long as there is one of them only."""
    first, last = records[0], records[-1]
    steps_left: int = num_steps - last["step"]
    steps: int = last["step"] - first["step"]
    if steps > 0:
        return (unix_time(last["time"]) - unix_time(first["time"])) / steps * steps_left
    step_ms: float | None = last.get("step_ms")
    return None if step_ms is None else step_ms / 1000 * steps_left


def unix_time(utc: str) -> float:
    return datetime.fromisoformat(utc).timestamp()


def format_event(event: dict[str, Any], *, num_steps: int) -> str | None:
    """The line for an event of the run; None for those that only the file needs."""
    label = step_label(event["step"], num_steps) if isinstance(event.get("step"), int) else ""
    match event.get("event"):
        case "checkpoint":
            size, seconds = event.get("bytes"), event.get("seconds")
            parts = [label, "checkpoint saved"]
            parts += [] if size is None else [format_bytes(size)]
            parts += [] if seconds is None else [f"{seconds:.1f} s"]
            return " | ".join(parts)
        case "sample":
            return f"{label} | sample: {one_line(str(event.get('text', '')))}"
        case "resumed":
            return f"{label} | resumed"
        case "stopping":
            return "stopping: saving a checkpoint; Ctrl-C again to end now"
        case "note":
            return str(event.get("text", ""))
        case "step_time":
            planned_s, measured_s = event["planned_s"], event["measured_s"]
            gap = f"{100 * (measured_s / planned_s - 1):+.0f} %"
            return f"planned {format_ms(planned_s)} a step, measured {format_ms(measured_s)} ({gap})"
        case "finding":
            return format_findings([Finding(**{each.name: event[each.name] for each in fields(Finding)})])
        case _:
            return None


def one_line(text: str) -> str:
    """The beginning of a text, without the terminal codes that a model may write; the whole is in samples/ and logs/."""
    line = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return line if len(line) <= SAMPLE_WIDTH else line[: SAMPLE_WIDTH - 1] + "…"


def explain_failure(outcome: Outcome, run: RunDir) -> str:
    """The last words on a failed run: what its rank said, then the cause and the fix, which go into events.jsonl as well."""
    said = format_failure(outcome, run)
    if outcome.root is None or outcome.root.fix is not None:
        return said  # the rank has named both itself
    found = explain_run(run, attempt=outcome.attempt)
    facts = {"cause": found.cause, "rank": found.rank, "step": found.step, "confidence": found.confidence}
    append_event(run, "verdict", attempt=outcome.attempt, **facts, summary=found.summary, fix=found.fix)
    return f"{said}\n\n{format_explanation(found)}"


def format_failure(outcome: Outcome, run: RunDir) -> str:
    """Which rank, what it said, where its log is. What the user can mend ends in two lines, without a traceback."""
    root = outcome.root
    if root is None:
        return ""
    log = run.logs(outcome.attempt) / LAUNCH_LOG if root.rank is None else run.rank_log(outcome.attempt, root.rank)
    if root.fix is not None:
        return f"{name_of(root)} failed, log: {log}\nerror: {root.message}\n  fix: {root.fix}"
    lines = [f"{name_of(root)} failed: {root.message}"]
    for failure in outcome.failures[1:]:
        how = "ended after it" if failure.consequence else "failed too"
        lines.append(f"{name_of(failure)} {how}: {one_line(failure.message)}")
    said = root.traceback.splitlines()[-TRACEBACK_LINES:] if root.traceback else read_log_tail(log)[-LAST_LINES:]
    return "\n".join([*lines, *(["", *said, ""] if said else []), f"log: {log}"])


def name_of(failure: Failure) -> str:
    return "launch" if failure.rank is None else f"rank {failure.rank}"
