"""
Sends a run folder to an experiment tracker: `python -m paceline.track.follower RUN NAME` next to a run, or `paceline track`.

It follows metrics.jsonl, or a script's log or files of metrics, and health/, and sends each row to one tracker (track/trackers.py).
The run does not depend on it: of the run's files it only appends a `note` to events.jsonl. A row is new if it comes after the
Position, which moves with each row that is read and stands in RUN/track/NAME.json, so that no row is sent twice.
"""

import json
import math
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.explain.series import read_events, read_wandb
from paceline.file_systems import NoLocks, try_lock
from paceline.redaction import redact
from paceline.rundir import RunDir, append_event, holder_of, is_locked, read_json_lines, write_atomic
from paceline.track.trackers import Position, TrackerRow, open_tracker, start_time
from paceline.units import format_number_of, unix_time
from paceline.watch.events import end_state
from paceline.watch.growing_file import STATE_ENDS, GrowingFile, MetricSteps, Step, parse_lines
from paceline.watch.log_lines import LogLines, progress_lines

POLL_S = 2.0
SAVING_POLL_S = 0.2
POSITION_EVERY_S = 10.0  # how often the position is saved
FINISH_S = 900.0  # to send the remaining rows after the command that held the run has ended
HEALTH_S = 15.0  # each row of health is a mean over so long
OWN_FILES = {"tensorboard": read_events, "wandb": read_wandb}  # the readers of files that a script's own tracker writes
HOLD_S = 60.0  # how long files of metrics may take to come after the first step of a log without a loss
# fields of a line that are not measures
SKIPPED = {"time", "step", "index", "processes", "cores", "ram_total", "disk_total", "total_bytes"}


def main() -> int:
    """Follows a run until stdin ends, whose other end the command that holds the run keeps open, and its workers have ended.

    FINISH_S after the end of stdin the process ends, even if a library hangs.
    """
    run, name = RunDir(Path(sys.argv[1])), sys.argv[2]
    os.nice(19)  # the training gets the processor first
    # a batch system sends them to all processes alike, while the run has not ended yet
    for signum in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, lambda *_: None)
    link, released, holder = os.dup(0), threading.Event(), holder_of(run)
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 0)  # no library can ask a question

    def wait_for_end() -> None:
        while os.read(link, 4096):
            pass
        released.set()
        time.sleep(FINISH_S)
        os._exit(1)

    def continues() -> bool:
        if not released.wait(POLL_S):
            return True
        time.sleep(SAVING_POLL_S)
        return holder is not None and holder_of(run) == holder

    threading.Thread(target=wait_for_end, daemon=True).start()
    try:
        track(run, name, continues=continues, report=lambda text: add_note(run, text), wait_s=FINISH_S)
    except PacelineError as error:
        add_note(run, f"{error.message}; paceline track {run.quoted} --to {name} sends what is missing")
        raise
    return 0


def track_all(run: RunDir, names: Sequence[str]) -> None:
    """Sends what each tracker lacks; raises the first problem when all have had their turn."""
    problems = list[PacelineError]()
    for name in names:
        try:
            track_now(run, name)
        except PacelineError as error:
            problems.append(error)
    if problems:
        raise problems[0]


def track_now(run: RunDir, name: str) -> None:
    """`paceline track`: sends what is missing, and follows a live run to its end."""
    if is_locked(run):
        print(f"{run.name} is running: following it to its end; Ctrl-C stops", flush=True)

    def continues() -> bool:
        with suppress(KeyboardInterrupt):
            if is_locked(run):
                time.sleep(POLL_S)
                return True
        return False

    sent, problem = track(run, name, continues=continues, report=lambda text: print(text, flush=True))
    num_offline = read_position(run, name).num_offline
    offline = f"{name}: {format_number_of(num_offline, 'row')} saved offline"
    if problem:
        fix = f"paceline track {run.quoted} --to {name}, once its server answers and accepts your login"
        raise PacelineError(f"{offline}, nothing sent", fix=fix)
    line = f"{name}: {format_number_of(sent, 'row')} sent" if sent else f"{name}: no new rows"
    print(offline if num_offline else line)


def track(
    run: RunDir, name: str, *, continues: Callable[[], bool], report: Callable[[str], None], wait_s: float = 0.0
) -> tuple[int, str | None]:
    """Sends all new rows; returns their number, and why they are only saved on this host, where nobody chose that.

    Raises PacelineError for any error of a library.

    continues: waits until the next read is due, and returns whether more rows may come. wait_s: for another process that sends.
    """
    try:
        with only_one(run, name, wait_s=wait_s):
            return send(run, name, continues, report)
    except PacelineError:
        raise
    except Exception as error:
        message = (str(error).splitlines() or [""])[0]
        raise PacelineError(
            f"{name}: {type(error).__name__}: {message}",
            fix=f"paceline track {run.quoted} --to {name}, once it is fixed",
        ) from error


def send(
    run: RunDir, name: str, continues: Callable[[], bool], report: Callable[[str], None]
) -> tuple[int, str | None]:
    position, sent, more = read_position(run, name), 0, True
    tracker = open_tracker(name, run, position, report)
    report(f"{name}: {tracker.where}")
    try:
        files = MetricSteps(run, own=OWN_FILES.get(name), report=lambda text: report(f"{name}: {text}"))
        rows, saved_at = RunRows(run, position, redone=tracker.redone, files=files), time.monotonic()
        save_position(run, name, position)
        while more:
            more = continues()
            for row in rows.read(last=not more):
                tracker.add(row)
                sent += 1
                position.num_offline += not tracker.online
            if more and time.monotonic() - saved_at >= POSITION_EVERY_S:
                tracker.flush()
                save_position(run, name, position)
                saved_at = time.monotonic()
    except BaseException:
        tracker.close(exit_code=0)
        raise
    # a locked run continues without this tracker
    is_well = is_locked(run) or end_state(read_json_lines(run.events)) in ("finished", "stopped")
    if not tracker.close(exit_code=0 if is_well else 1):
        raise PacelineError(f"{name}: not all rows have arrived", fix=f"paceline track {run.quoted} --to {name}")
    save_position(run, name, position)
    return sent, tracker.problem


def read_position(run: RunDir, name: str) -> Position:
    """Returns how far a tracker has come; the beginning where nothing is saved."""
    with suppress(OSError, ValueError, TypeError):
        return Position(**json.loads(run.track(name).read_text()))
    return Position()


def save_position(run: RunDir, name: str, position: Position) -> None:
    with suppress(OSError):  # a full disk: rows that were sent may be read again
        write_atomic(run.track(name), json.dumps(asdict(position)) + "\n")


@contextmanager
def only_one(run: RunDir, name: str, *, wait_s: float) -> Iterator[None]:
    run.track(name).parent.mkdir(exist_ok=True)
    until = time.monotonic() + wait_s
    with run.track(name).with_suffix(".lock").open("a") as file:
        with suppress(NoLocks):  # the command has said so
            while not try_lock(file):
                if time.monotonic() >= until:
                    message = f"{name}: another process is sending {run.name} to it"
                    raise PacelineError(message, fix="wait for it to end")
                time.sleep(SAVING_POLL_S)
        yield


def add_note(run: RunDir, text: str) -> None:
    with suppress(PacelineError):  # the run folder was removed
        append_event(run, "note", text=redact(text))  # an error of a library may quote an address with a login


class RunRows:
    """New rows of a run. redone: whether a step that a resume repeats makes another row; never of a script. files: of a script."""

    def __init__(self, run: RunDir, position: Position, *, redone: bool, files: MetricSteps | None = None):
        self.run = run
        self.position = position
        self.redone = redone
        self.start = start_time(run)
        self.metrics = GrowingFile(run.metrics)
        self.events = GrowingFile(run.events)
        # of each attempt: its start, and of several hosts that of each rank
        self.places: list[tuple[float, dict[str, str]]] = []
        self.hosts: dict[str, HostRows] = {}
        self.logs: dict[Path, LogRows] = {}
        # of a log, until a line shows a loss, or no file of metrics has come by that time
        self.files, self.held, self.has_loss, self.until = files, list[Step](), False, math.inf

    def read(self, *, last: bool = False) -> Iterator[TrackerRow]:
        """Yields new rows, health before steps. last: nothing follows, so a mean over a shorter time is a row too."""
        health = self.position.health
        for path in sorted(self.run.health_dir.glob("*.jsonl")):
            host = self.hosts.setdefault(path.stem, HostRows(path))
            for sampled, values in host.read(after=health.get(host.name, 0.0), last=last):
                health[host.name] = sampled
                yield self.row(sampled, values)
        redone = self.redone and self.run.metrics.exists()
        for step, logged, values in self.steps(last=last):
            if step > self.position.step or (redone and logged > self.position.time):
                self.position.step, self.position.time = step, logged
                yield self.row(logged, values, step)

    def steps(self, *, last: bool) -> Iterator[Step]:
        """Yields the steps of metrics.jsonl; of a script's run, which has none, those in the log of rank 0, or without a loss
        there those in the script's own files of metrics."""
        self.read_places()
        self.metrics.restarted()  # a replaced file is read from its beginning
        for block in self.metrics.blocks():
            for record in parse_lines(block):
                logged, step = unix_time(record.get("time")), record.get("step")
                if type(step) is int and not math.isnan(logged):
                    places = next((places for start, places in reversed(self.places) if start <= logged), {})
                    yield step, logged, dict(on_hosts(measures(record), places))
        if not self.run.metrics.exists():
            for path in sorted(self.run.path.glob("logs/*/0.log"), key=lambda path: int(path.parent.name)):
                self.held += self.logs.setdefault(path, LogRows(path)).read(last=last)
            self.has_loss = self.has_loss or any("loss" in name for *_, values in self.held for name in values)
            if not self.has_loss and self.files:
                yield from self.files.read([start for start, _ in self.places], last=last)
                self.held = [] if self.files.has_loss else self.held
            if self.held and self.until == math.inf:
                self.until = time.monotonic() + HOLD_S
            if self.has_loss or last or time.monotonic() >= self.until:
                yield from self.held
                self.held = []

    def read_places(self) -> None:
        """Reads which rank is on which host from the attempts that have begun."""
        if self.events.restarted():
            self.places.clear()
        for block in self.events.blocks():
            for event in parse_lines(block):
                if event.get("event") == "attempt" and not math.isnan(start := unix_time(event.get("time"))):
                    hosts = event.get("hosts") or {}
                    self.places.append((start, {str(rank): host for host, ranks in hosts.items() for rank in ranks}))

    def row(self, at: float, values: dict[str, float], step: int | None = None) -> TrackerRow:
        self.start = self.start or start_time(self.run) or at
        return TrackerRow(at, max(0.0, at - self.start), values, step)


class HostRows:
    """Means of health/HOST.jsonl."""

    def __init__(self, path: Path):
        self.name = path.stem
        self.file = GrowingFile(path)
        self.time = 0.0  # of the last sample
        self.values: dict[str, list[float]] = {}  # in its window of HEALTH_S

    def read(self, *, after: float, last: bool) -> Iterator[tuple[float, dict[str, float]]]:
        """Yields the time of the last sample in each mean, and the means."""
        after = max(after, self.time)
        self.file.restarted()
        for block in self.file.blocks():
            for record in parse_lines(block):
                sampled = unix_time(record.get("time"))
                if not sampled > after:
                    continue
                if sampled // HEALTH_S != self.time // HEALTH_S and self.values:
                    yield self.take_means()
                self.time = sampled
                for name, value in measures(record):
                    self.values.setdefault(name, []).append(value)
        if last and self.values:
            yield self.take_means()

    def take_means(self) -> tuple[float, dict[str, float]]:
        means = {f"health/{self.name}/{name}": statistics.fmean(values) for name, values in self.values.items()}
        self.values = {}
        return self.time, means


class LogRows:
    """Steps as a log shows them, each with all measures of its lines."""

    def __init__(self, path: Path):
        self.path = path
        self.file = GrowingFile(path, ends=STATE_ENDS)
        self.step: int | None = None
        self.lines = LogLines()
        self.values: dict[str, float] = {}
        self.written = 0.0

    def read(self, *, last: bool) -> Iterator[Step]:
        """Yields steps. Times in logs cannot be compared, so a step has the time of the file's last change."""
        if self.file.restarted():
            self.lines = LogLines()
        for block in self.file.blocks(to_end=last):
            self.written = min(time.time(), self.path.stat().st_mtime)
            for raw in progress_lines(block):
                if (line := self.lines.read(raw.decode(errors="replace"))) is None:
                    continue
                if line.step is not None and line.step != self.step:
                    if self.step is not None and self.values:
                        yield self.step, self.written, self.values
                    self.step, self.values = line.step, {}
                self.values |= dict(measures(line.values))
        if last and self.step is not None and self.values:
            yield self.step, self.written, self.values


def on_hosts(values: Iterable[tuple[str, float]], places: Mapping[str, str]) -> Iterator[tuple[str, float]]:
    """Yields the values with a rank's host in the names of those of ranks: rank_ms/bob/3. places: host by rank."""
    for name, value in values:
        kind, _, rank = name.partition("/")
        yield (f"{kind}/{places[rank]}/{rank}" if kind == "rank_ms" and rank in places else name), value


def measures(record: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yields every number of a record by its path: gpus/0/use, rank_ms/3."""
    for name, value in record.items():
        if name in SKIPPED:
            continue
        if isinstance(value, list):
            value = {str(item.get("index", i) if isinstance(item, dict) else i): item for i, item in enumerate(value)}
        if isinstance(value, dict):
            yield from measures(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + name, value


if __name__ == "__main__":
    sys.exit(main())
