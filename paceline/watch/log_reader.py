"""
Snapshots of any training log, and what the logs and files of a script's run show; each update reads only what is new.

A log of gigabytes is read in pieces at even distances.
"""

import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np

from paceline.errors import PacelineError
from paceline.explain.explanation import HEALTHY
from paceline.explain.run_folder import explain
from paceline.explain.series import ALL_STEPS, GRADIENT, LOSS, RATE, VALIDATION, is_metric_file, training_file
from paceline.rundir import RunDir
from paceline.units import format_bytes, unix_time
from paceline.watch.curves import Curve, HostHealth, join_series
from paceline.watch.events import END_STATES, GOES_ON, log_state
from paceline.watch.growing_file import (
    STATE_ENDS,
    GrowingFile,
    JsonRecord,
    MetricFile,
    MetricFinder,
    head_and_tail,
    unreadable,
)
from paceline.watch.log_lines import EPOCH, LogLines, framework_of, progress_lines
from paceline.watch.snapshot import LIVE, LogView, Snapshot
from paceline.watch.summary import max_silence_s

WHOLE_BYTES = 1 << 20  # a log up to this size is read whole
PIECE_BYTES, NUM_PIECES = 8 << 10, 64  # of the part of a longer one before its end
EXPLAINED_BYTES = 64 << 20  # a log up to this size is explained whole
FIRST_BYTES = 8 << 20  # of a longer log these are explained, and as much of its end as EXPLAINED_BYTES leaves
EXPLAIN_EVERY_S = 15.0  # while it grows
EXPLAIN_RATIO = 20  # times what it takes, of a file of metrics, which is read whole
END_RATIO = 2  # times max_silence_s: a log that has not grown for so long has ended
SCRIPT_RANKS = 8  # ranks of a script whose logs are read for steps and losses
PLACE = ("step", "num_steps", "loss", "val_bpb")  # how far a script has come
NUM_SILENCES = 100  # the last silences that a log came back from
SAMPLE_EVERY_S = 2.0  # of this machine, beside a log
FIRST_GAP_S, FIRST_SAMPLES_S = 0.2, 3.0  # between the first two, and at most: the wait for them
UNWATCHED_S = 60.0  # after which the sampling ends
# of curves that have other names
KIND_NAMES = {LOSS: "loss", VALIDATION: "val_loss", GRADIENT: "grad_norm", RATE: "lr"}


class TrainingLogReader:
    """Makes snapshots of one log file."""

    def __init__(self, path: Path):
        self.path = path
        self.curves = MetricFileCurves(path) if is_metric_file(path) and path.suffix != ".jsonl" else LogCurves(path)
        self._explanation: dict[str, Any] | None = None
        self._explained_at = (-1, -math.inf)  # size of the log, and the time from which it is explained again

    def update(self) -> Snapshot:
        self.curves.read()
        name, path = self.path.name, str(self.path)
        if (stat := self.curves.stat) is None:
            return Snapshot(name, path, "log", "gone", notes=[f"{path} does not exist"])
        if error := unreadable(self.path):
            return Snapshot(name, path, "log", "unknown", notes=[f"{path} cannot be read: {error}"])
        explanation = self._explain(stat.st_size)
        fields = self.curves.fields()
        end_s = END_RATIO * max_silence_s(fields["step_ms"], fields["silence_s"])
        state = log_state(explanation, silent=time.time() - stat.st_mtime > end_s)
        is_short = (fields.get("step") or 0) < (fields.get("num_steps") or 0)
        if state == "broken" and not is_short and explanation and explanation["cause"] == HEALTHY:
            state = "unknown"  # most scripts print no last word
        notes = [explanation["summary"]] if explanation and explanation["cause"] in GOES_ON else []
        notes += self.curves.notes
        logs = [LogView(1, None, path, stat.st_size)]
        if isinstance(self.curves, MetricFileCurves):
            if state in ("running", "broken"):  # few of these files report the end
                state = "finished" if self.curves.is_complete else "unknown" if state == "broken" else state
            logs = []
        explanation = explanation if state in ("failed", "broken") else None
        fields["eta_s"] = fields["eta_s"] if state == "running" else None
        if explanation and logs and stat.st_size > EXPLAINED_BYTES:
            parts = f"the first {FIRST_BYTES >> 20} MiB and the last {(EXPLAINED_BYTES - FIRST_BYTES) >> 20} MiB"
            text = f"only {parts} of {format_bytes(stat.st_size)} are searched for the cause"
            notes.append(f"{text}; line numbers count within these")
        return Snapshot(
            name, path, "log", state, updated=stat.st_mtime, logs=logs, explanation=explanation, notes=notes, **fields
        )  # fmt: skip

    def _explain(self, size: int) -> dict[str, Any] | None:
        explained_size, next_s = self._explained_at
        if size != explained_size and (started := time.monotonic()) > next_s:
            parts = head_and_tail(self.path, first=FIRST_BYTES, last=EXPLAINED_BYTES - FIRST_BYTES)
            is_whole = is_metric_file(self.path)
            with suppress(PacelineError, OSError):
                self._explanation = asdict(explain(self.path if size <= EXPLAINED_BYTES or is_whole else parts))
            wait_s = EXPLAIN_RATIO * (time.monotonic() - started) if is_whole else 0.0
            self._explained_at = (size, time.monotonic() + max(EXPLAIN_EVERY_S, wait_s))
        return self._explanation


class LogAndMachine(TrainingLogReader):
    """A log and this machine's GPUs, memory and disk, as long as the log's training goes on.

    A thread takes the samples, so a driver that hangs delays nobody. It ends when nobody has looked for a while.
    """

    def __init__(self, path: Path, samples: Iterator[dict[str, Any]]):
        super().__init__(path)
        self._samples = samples
        self._health = HostHealth(Path(f"{socket.gethostname()}.jsonl"))  # that file is never read
        self._new: deque[dict[str, Any]] = deque()
        self._is_measured = threading.Event()
        self._thread: threading.Thread | None = None
        self._read_at = 0.0
        self._note: str | None = None  # why there are no GPUs

    def update(self) -> Snapshot:
        snapshot = super().update()
        self._read_at = time.monotonic()
        if snapshot.state in LIVE and not (self._thread and self._thread.is_alive()):
            self._thread = threading.Thread(target=self._sample, daemon=True)
            self._thread.start()
            self._is_measured.wait(FIRST_SAMPLES_S)
        lines = [self._new.popleft() for _ in range(len(self._new))]
        self._note = next((str(line["note"]) for line in lines if "note" in line), self._note)
        self._health.add(lines)
        if self._health.time is None:
            return snapshot
        hosts, gpus = (
            {key: curve.series() for key, curve in self._health.curves[group].items()}
            for group in ("host_series", "gpu_series")
        )
        notes = [*snapshot.notes, *([self._note] if self._note else [])]
        return replace(snapshot, hosts=[self._health.view()], host_series=hosts, gpu_series=gpus, notes=notes)

    def _sample(self) -> None:
        for number, sample in enumerate(self._samples):
            self._new.append(sample)
            if number:  # the first one begins the counts
                self._is_measured.set()
            time.sleep(SAMPLE_EVERY_S if number else FIRST_GAP_S)
            if time.monotonic() - self._read_at > UNWATCHED_S:
                return


class LogCurves:
    """The measures of one log: call `read` now and then, and use the attributes after it."""

    def __init__(self, path: Path):
        self.file = GrowingFile(path, ends=STATE_ENDS)
        self._forget()

    def _forget(self) -> None:
        self.curves: dict[str, Curve] = {}
        self.latest: dict[str, float] = {}
        self.framework: str | None = None
        self.step: int | None = None
        self.num_steps: int | None = None
        self._lines = LogLines()
        self.first_step: int | None = None
        self.num_lines = 0  # with progress, of those that were read
        self._silences: deque[float] = deque(maxlen=NUM_SILENCES)
        self.stat: os.stat_result | None = None  # of the file at the last read; None: it is gone
        self._silence_s = 0.0  # since the last write, at the last read
        self._written: float | None = None  # when the last line that was read was written
        self.counts_steps = False  # whether a line has named its step
        self._has_training = False  # whether a line shows a loss of training
        self._goes_back = False  # whether a line has an earlier step than the one before, as in each epoch

    @property
    def counts_lines(self) -> bool:
        """Whether the curves count lines, because no line has named its step."""
        return self.step is not None and not self.counts_steps

    @property
    def span(self) -> tuple[int, int] | None:
        """The first and the last step; None where the log shows none, or the steps go back."""
        is_known = self.step is not None and self.first_step is not None and not self._goes_back
        return (self.first_step or 0, self.step or 0) if is_known else None

    @property
    def notes(self) -> list[str]:
        """What the curves are not: over steps, or of all lines."""
        notes = ["no line shows a step: the curves count lines"] if self.counts_lines else []
        if sampled := self.file.sampled_bytes:
            text = f"{NUM_PIECES} pieces of the first {format_bytes(sampled)} of the log are read"
            notes.append(f"{text}: the curves do not show what is between them, such as a NaN")
        return notes

    def read(self, *, start: float | None = None, end: float | None = None) -> None:
        """Reads what is new. start, end: of the attempt that has written the log, where they are known."""
        if self.file.restarted():
            self._forget()
        before, self.stat = self.stat, None
        with suppress(OSError):
            self.stat = self.file.path.stat()
            if before and self.stat.st_size > before.st_size:
                self._silences.append(self._silence_s)
            self._silence_s = max(0.0, time.time() - self.stat.st_mtime)
            written = self.stat.st_mtime if end is None else min(end, self.stat.st_mtime)  # a copy is younger
            start, self._written = start if self._written is None else self._written, written
        last_step = self.step
        pieces = self.file.samples(WHOLE_BYTES, end_bytes=WHOLE_BYTES // 4, count=NUM_PIECES, piece_bytes=PIECE_BYTES)
        for block in chain(pieces, self.file.blocks(to_end=end is not None)):
            self._add(block)
        if start is not None and self.step != last_step and "step_ms" not in self.latest:
            self._spread_times(start, last_step)

    def _spread_times(self, start: float, last_step: int | None) -> None:
        """Spreads the times of the points behind last_step evenly from start to the last write: no line shows a speed."""
        step, first = self.step or 0, 0 if self.first_step is None else self.first_step - 1
        first = first if last_step is None or last_step > step else max(first, last_step)
        for curve in self.curves.values():
            new = curve.x > first
            curve.times[new] = start + ((self._written or start) - start) * (curve.x[new] - first) / (step - first)

    def fields(self, *, since: float | None = None) -> dict[str, Any]:
        """Returns the fields of a Snapshot that the lines show. since: when the first of them was written, where that is known."""
        series = {name: curve.series() for name, curve in self.curves.items()}
        step, first, step_s = self.step or 0, self.first_step or 0, self.latest.get("step_ms", math.nan) / 1000
        if math.isnan(step_s) and since is not None and step > first:  # no line shows a speed
            step_s = (time.time() - since) / (step - first)
        num_steps = self.num_steps if self.counts_steps else None
        eta_s = max(0, num_steps - step) * step_s if num_steps and not math.isnan(step_s) else None
        values = {name: self.latest.get(name) for name in ("loss", "val_bpb", "tok_per_sec", "step_ms", "mfu")}
        return {
            "framework": self.framework, "step": self.step if self.counts_steps else None, "num_steps": num_steps,
            "eta_s": eta_s, "silence_s": max(self._silences, default=None), "series": series, **values,
        }  # fmt: skip

    def _add(self, block: bytes) -> None:
        points: dict[str, tuple[list[int], list[float]]] = {}
        for raw in progress_lines(block):
            text = raw.decode(errors="replace")
            self.framework = self.framework or framework_of(text)
            if (line := self._lines.read(text)) is None:
                continue
            if (loss := line.values.pop("part_loss", None)) is not None:
                line.values["val_loss" if self._has_training else "loss"] = loss
            elif "loss" in line.values and not self._has_training:
                self._has_training = True
                for measures in cast(tuple[dict[str, Any], ...], (self.curves, self.latest, points)):
                    measures |= {"val_loss": measures.pop("loss")} if "loss" in measures else {}  # of a part
            self.num_steps = line.num_steps or self.num_steps
            self.num_lines += 1
            if line.step is not None:
                if self.step is not None and line.step < self.step:
                    self._extend(points)  # the training restarted from an earlier step
                    points, self.first_step, self._goes_back = {}, None, True
                self.step, self.counts_steps = line.step, True
                self.first_step = line.step if self.first_step is None else self.first_step
            elif not self.counts_steps and "loss" in line.values:
                self.step = (self.step or 0) + 1  # each line is a point of the curves
                if (epoch := EPOCH.search(text)) is not None:
                    line.values["epoch"] = float(epoch["value"])
            for name, value in line.values.items():
                self.latest[name] = value
                steps, values = points.setdefault(name, ([], []))
                steps.append(self.step or 0)
                values.append(value)
        self._extend(points)

    def _extend(self, points: dict[str, tuple[list[int], list[float]]]) -> None:
        """Adds points. Loggers share no form of a time, so times follow from the speed, back from the last write."""
        written = self._written or 0.0
        for name, (steps, values) in points.items():
            times = written - (steps[-1] - np.array(steps)) * self.latest.get("step_ms", 0.0) / 1000
            self.curves.setdefault(name, Curve(has_gaps=True)).extend(steps, values, times)


class MetricFileCurves:
    """The curves of a file with any trainer's or tracker's metrics, as LogCurves has those of a log: call `read`, then use them."""

    def __init__(self, path: Path):
        self.path, self._file = path, MetricFile(path)
        self.stat: os.stat_result | None = None  # of the file at the last read; None: it is gone
        self.step: int | None = None
        self.notes: list[str] = []
        self.curves: dict[str, Curve] = {}
        self._names: dict[str, str] = {}  # of the curves, by those in the file
        self._latest: dict[str, float] = {}

    def read(self) -> None:
        """Reads the file if it has changed."""
        before, self.stat = self.stat, None
        with suppress(OSError):
            self.stat = self.path.stat()
        if self.stat is None or (before and before.st_mtime_ns == self.stat.st_mtime_ns):
            return
        with suppress(PacelineError):
            series, is_continued = self._file.read()
            if not is_continued:
                self.notes, self.curves, self._names, self._latest = self._file.notes, {}, {}, {}
            self.step = max(self._file.ends.values(), default=None)
            names = {item.name for item in series}
            for item in series:
                name = KIND_NAMES.get(item.kind, item.name)
                is_taken = name in names | self.curves.keys() or item.name == "val_bpb"
                name = self._names.setdefault(item.name, item.name if is_taken else name)
                self.curves.setdefault(name, Curve(has_gaps=True)).extend(item.steps, item.values, item.times)
                self._latest[name] = item.values[-1]

    @property
    def names_steps(self) -> bool:
        """Whether the file has points, and names their steps."""
        return self.step is not None and not self._file.counts_rows

    @property
    def is_complete(self) -> bool:
        """Whether the file says that all steps are done."""
        return any(ALL_STEPS in note for note in self.notes)

    def fields(self) -> dict[str, Any]:
        """Returns the fields of a Snapshot that the file shows."""
        series = {name: curve.series() for name, curve in self.curves.items()}
        values = {name: self._latest.get(name) for name in ("loss", "val_bpb", "tok_per_sec", "step_ms", "mfu")}
        return {"step": self.step, "eta_s": None, "silence_s": None, "series": series, **values}


class ScriptCurves:
    """What a script's run shows: the logs of its ranks, and files of metrics, such as Lightning's, that the script wrote."""

    def __init__(self, run: RunDir):
        self.run = run
        self._logs: dict[str, LogCurves] = {}
        self._files: dict[Path, MetricFileCurves] = {}
        self._finder = MetricFinder(run)
        self.spans: dict[int, tuple[int, int]] = {}  # by attempt, its first and last step, of the last read

    def read(
        self, logs: Sequence[LogView], attempts: Sequence[JsonRecord], events: Sequence[JsonRecord]
    ) -> dict[str, Any]:
        """Returns fields of a Snapshot, the ranks, the lines with progress of one, and when the last file of metrics was written.

        They are those of the rank whose log shows most measures in the last attempt. attempts: the events that begin them.
        """
        starts = {attempt["attempt"]: unix_time(attempt["time"]) for attempt in attempts}
        ends = [unix_time(e["time"]) for e in events if e.get("event") in ("attempt_ended", *END_STATES)]
        last = [log for log in logs if log.rank is not None and log.attempt == logs[-1].attempt]
        rank_logs = {log.rank: self._read_log(log, starts, ends) for log in last[:SCRIPT_RANKS]}
        rank = max(rank_logs, key=lambda rank: len(rank_logs[rank].curves), default=0)
        best = rank_logs.get(rank)
        fields: dict[str, Any] = {"silence_s": None}
        fields |= best.fields(since=next(reversed(starts.values()), None)) if best else {}
        of_rank = {log.attempt: self._read_log(log, starts, ends) for log in logs if log.rank == rank}
        shown = [curves for curves in of_rank.values() if curves.step is not None]
        self.spans = {number: span for number, curves in of_rank.items() if (span := curves.span)}
        by_line, earlier = bool(shown) and shown[-1].counts_lines, shown[-1].fields() if shown else {}
        # until the next attempt shows a step
        fields |= {name: earlier.get(name) for name in PLACE if fields.get(name) is None}
        if alike := [curves.curves for curves in shown if curves.counts_lines == by_line]:
            fields["series"] = join_series(alike, by_line=by_line)
        lines = fields.get("series", {})
        metrics = {} if "loss" in lines else self._read_files(list(starts.values()))
        if shown and "loss" not in metrics.get("series", {}):
            metrics = {}
        if metrics:
            metrics["series"] = lines | metrics["series"]
            is_behind = metrics["step"] <= (-math.inf if (step := fields.get("step")) is None else step)
            metrics |= {"step": step} if is_behind else {"num_steps": None, "eta_s": None}
        notes, num_lines = shown[-1].notes if shown else [], best.num_lines if best else 0
        ranks = {"ranks": [log.rank for log in last], "num_lines": num_lines}
        return {**fields, "notes": notes, "written": None, **metrics, **ranks}

    def _read_log(self, log: LogView, starts: Mapping[int, float], ends: Sequence[float]) -> LogCurves:
        start, curves = starts.get(log.attempt), self._logs.setdefault(log.path, LogCurves(Path(log.path)))
        curves.read(start=start, end=next((end for end in ends if start is not None and end >= start), None))
        return curves

    def _read_files(self, starts: Sequence[float]) -> dict[str, Any]:
        """Returns the fields that the file with the training of each attempt shows, joined; empty where none names its steps."""
        files = []
        for paths in self._finder.find(starts):
            of_attempt = {path: self._files.setdefault(path, MetricFileCurves(path)) for path in paths}
            for file in of_attempt.values():
                file.read()
            if ends := {
                p: ("loss" in file.curves, file.step or 0) for p, file in of_attempt.items() if file.names_steps
            }:
                files.append(of_attempt[training_file(ends)])
        if not files:
            return {}
        fields = {name: value for name, value in files[-1].fields().items() if value is not None}
        note = f"steps and curves are those of {files[-1].path.relative_to(self.run.path)}"
        series = join_series([file.curves for file in files], by_line=False)
        return fields | {"series": series, "notes": [note], "written": files[-1].stat and files[-1].stat.st_mtime}
