"""
The runs of a folder: a list of all, one by its name, and a reader that makes snapshots of one.

Only files are read, and no numpy is loaded, so `paceline runs` answers at once. While a process holds a run, its events and the
heartbeat of rank 0 give its state; otherwise its events alone. The Shelf is the only way from what a browser sends to a file: a
run's name is looked up among the run folders, a log among those that the snapshot lists, and no path is ever made of text from
outside. A run with a link that leads out of its folder is not shown. A run that was shown stays, and is shown as gone.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

from paceline.errors import PacelineError
from paceline.explain.series import natural_order
from paceline.heartbeat import read_heartbeat
from paceline.rundir import RunDir, is_locked, is_queued, is_run, read_end, read_json_lines, read_text, to_utc
from paceline.typed_fields import damaged_files, hints_of, well_typed
from paceline.units import format_list
from paceline.watch.about import (
    check_links,
    config_in,
    csv_lines,
    link_out_of,
    measured_on,
    read_about,
    read_evaluations,
    read_notes,
)
from paceline.watch.events import end_state, is_complete, last_event_time, live_state, run_notes
from paceline.watch.growing_file import file_stamp, parse_lines, read_part, search
from paceline.watch.log_lines import ScriptValues
from paceline.watch.measures import format_bpb, format_figure, format_step, format_time
from paceline.watch.snapshot import LIVE, Evaluation, Snapshot, State
from paceline.watch.summary import attempt_outcome, goodput_line, goodput_table, host_place
from paceline.watch.trend import mean_speed

END_BYTES = 64 << 10  # read of metrics.jsonl for a list of runs, unless a field is further back
MAX_END_BYTES = 4 << 20
FRESH_S = 0.8  # a snapshot is read at most this often, however many pages are open
MAX_OPEN = 16  # readers; the least recently used one is closed
PART_BYTES = 256 << 10  # of a log, at once
MAX_HITS = 200  # of a search


class Reader(Protocol):
    """`update` reads only what is new, and copes with files that are missing, half written or replaced."""

    def update(self) -> Snapshot: ...


def open_reader(path: Path) -> Reader:
    """Returns the reader for a run folder or any log file; it has read nothing yet."""
    from paceline.watch.log_reader import TrainingLogReader
    from paceline.watch.run_reader import RunReader

    if is_run(RunDir(path)):
        return RunReader(RunDir(path))
    if path.is_file():
        return TrainingLogReader(path)
    if path.is_dir():
        raise PacelineError(
            f"{path} is not a run: it has no config.toml", fix="give a file in it; or see `paceline runs`"
        )
    raise PacelineError(f"no such file: {path}", fix="give a run folder, or the log of a training")


@dataclass(frozen=True)
class RunStatus:
    """One line of the list of runs. What is not known yet is None."""

    name: str
    path: str
    state: str  # as of a Snapshot
    step: int | None
    num_steps: int | None
    loss: float | None
    val_bpb: float | None
    eval_tokens: int | None  # held-out tokens that val_bpb is measured on
    eval_text: str | None  # the text that they are of
    tok_per_sec: float | None
    attempts: int
    time: str | None  # of the last activity: an event, a logged step, or output of a script
    command: list[str] | None = None  # of `paceline run`, whose runs have no metrics.jsonl
    tags: list[str] = field(default_factory=list)  # of `paceline runs tag`
    note: str = ""  # of `paceline runs note`
    notes: list[str] = field(default_factory=list)  # what could not be read or saved, one line each
    eval: Evaluation | None = None  # the newest result of `paceline eval`


def run_status(run: RunDir, script: ScriptValues | None = None) -> RunStatus:
    """Reads only the end of metrics.jsonl, or of a script's log, so that a hundred long runs are listed at once."""
    events = list(filter(is_complete, read_json_lines(run.events)))
    command = next((event.get("command") for event in reversed(events) if event.get("event") == "script"), None)
    attempts = sum(event.get("event") == "attempt" for event in events)
    names = ("step", "loss", "val_bpb", "tok_per_sec")
    log = run.rank_log(attempts, 0)
    read = (script or ScriptValues(run)).read(events, names) if command else last_values(run.metrics, (*names, "time"))
    start: dict[str, Any] = {"step": None if command else 0, **measured_on(config_in(run))}
    values = {**dict.fromkeys(names), **start, **read}
    state = run_state(run, events, values)
    if not command and state not in LIVE:
        values |= {name: speed for name, speed in end_speed(run, events).items() if name in names}
    times = [values.pop("time", None), last_event_time(events)]
    if command and state in LIVE:
        paths = [log]
    else:
        paths = [] if any(times) else [run.config_toml, run.preparing_json, run.submitted_toml]
    times += [to_utc(stamp[0] / 1e9) for path in paths if (stamp := file_stamp(path))]
    tags, note = read_notes(run)
    num_steps = values.pop("num_steps", None)
    with suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
        num_steps = int(json.loads(read_text(run.plan_json))["num_steps"])
    status = RunStatus(
        name=run.name, path=str(run.path), state=state, num_steps=num_steps, attempts=attempts,
        time=max((time for time in times if isinstance(time, str)), default=None),
        command=command, tags=tags, note=note, **values, notes=[*damaged_files(run), *run_notes(run, state, events)],
        eval=max(read_evaluations(run, events), key=lambda result: result.time, default=None),
    )  # fmt: skip
    return well_typed(status, RunStatus)  # type: ignore[no-any-return]


def run_state(run: RunDir, events: Sequence[dict[str, Any]], line: dict[str, Any]) -> State:
    """Returns the state of a run. line: the last values of metrics.jsonl."""
    if not is_locked(run):
        return end_state(events, is_queued=is_queued(run))
    if not run.config_toml.is_file():
        return "preparing"
    with suppress(KeyError, TypeError):  # damaged events
        return live_state(events, read_heartbeat(run.progress(0)), line)
    return "running"


def last_values(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """Returns the last value of each field, of RunStatus's type, in a file of JSON lines, within MAX_END_BYTES of its end."""
    values: dict[str, Any] = {}
    kinds = {name: hints_of(RunStatus)[name][0] for name in names}
    for length in (END_BYTES, 16 * END_BYTES, MAX_END_BYTES):
        block, is_whole = read_end(path, length)
        for record in reversed(parse_lines(block)):
            for name in [name for name in names if name not in values and record.get(name) is not None]:
                if (value := well_typed(record[name], kinds[name])) is not None:
                    values[name] = value
        if is_whole or len(values) == len(names):
            break
    return values


def end_speed(run: RunDir, events: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Returns the mean speed of a run that has ended, from the end of metrics.jsonl without the lines of earlier attempts."""
    start = next((str(event["time"]) for event in reversed(events) if event.get("event") == "attempt"), "")
    return mean_speed(
        [line for line in parse_lines(read_end(run.metrics, END_BYTES)[0]) if str(line.get("time")) >= start]
    )


class RunList:
    """The runs of a folder; each `read` opens only those whose files have changed."""

    def __init__(self, runs_dir: Path):
        self.runs_dir = runs_dir
        self._cached: dict[Path, tuple[Any, ScriptValues, RunStatus]] = {}

    def read(self) -> list[RunStatus]:
        """Returns the runs, the latest first, and those of the same time by their names."""
        current = {}
        for path in sorted(run_folders(self.runs_dir), key=natural_order):
            with suppress(OSError):  # it has vanished, or belongs to another user
                run = RunDir(path)
                files = [run.config_toml, run.plan_json, run.events, run.metrics, run.notes, run.evaluations]
                key = (is_live := is_locked(run), *map(file_stamp, [*files, run.progress(0)]))
                cached_key, script, status = self._cached.get(path, (None, ScriptValues(run), None))
                if status is None or cached_key != key or not script.is_current(is_live=is_live):
                    status = run_status(run, script)
                current[path] = (key, script, status)
        self._cached = current
        return sorted((status for *_, status in current.values()), key=lambda status: status.time or "", reverse=True)


def lost_runs(runs_dir: Path) -> list[Path]:
    """Returns the folders with checkpoints of a run that has no config.toml."""
    folders = dict.fromkeys(path.parents[1] for path in sorted(runs_dir.glob("*/checkpoints/step_*")))
    return [folder for folder in folders if not is_run(RunDir(folder))]


def no_runs(runs_dir: Path, *, fix: str) -> PacelineError:
    """Returns the error for a folder without runs."""
    if lost := lost_runs(runs_dir):
        names = format_list([folder.name for folder in lost])
        lack = f"{names} {'has' if len(lost) == 1 else 'have'} checkpoints and no config.toml"
        return PacelineError(f"no runs in {runs_dir}: {lack}", fix="restore config.toml from a copy of the run")
    return PacelineError(f"no runs in {runs_dir}", fix=fix)


def run_folders(runs_dir: Path) -> list[Path]:
    """Returns the run folders that can be read; a folder of another user or of the file system itself is skipped."""
    if not runs_dir.is_dir():
        return []
    folders = []
    for path in runs_dir.iterdir():
        with suppress(OSError):
            if is_run(RunDir(path)):
                folders.append(path)
    return folders


def format_steps(status: RunStatus | Snapshot) -> str:
    return format_step(status.step) + (f"/{status.num_steps:,}" if status.num_steps and status.step is not None else "")


def run_json(snapshot: Snapshot) -> dict[str, Any]:
    """Returns the whole snapshot for programs; `attempts` is their number, as in the list of runs."""
    fields = snapshot.to_json()
    return {**fields, "attempts": len(snapshot.attempts), "each_attempt": fields["attempts"]}


def format_run(snapshot: Snapshot) -> str:
    """Returns one run at length: its state, how each attempt ended and what was decided then, where its time went."""
    is_training, loss = snapshot.kind == "training", f"loss {format_figure('loss', snapshot.loss)}"
    figure = f"val_bpb {format_bpb(snapshot.val_bpb, snapshot.eval_tokens)}" if is_training else loss
    shows_figures = is_training or (snapshot.step, snapshot.loss) != (None, None)
    of_steps = f", step {format_steps(snapshot)}, {figure}" if shows_figures else ""
    places = [f"{host.name}: {host_place(host)}" for host in snapshot.hosts if host_place(host)]
    lines = [f"{snapshot.name}: {snapshot.state}{of_steps}", f"run     {snapshot.path}"]
    results = [
        f"{format_time(result.time)} UTC, step {result.step:,}: val_bpb"
        f" {format_bpb(result.val_bpb, result.eval_tokens)} of {result.title}"
        for result in snapshot.evaluations
    ]
    own = {"eval": results, "tags": [" ".join(snapshot.tags)], "note": [snapshot.note, *snapshot.notes]}
    rows = {"slurm": [snapshot.slurm or ""], "hosts": ["; ".join(places)], **own}
    lines += [*(f"{name:<8}{text}" for name, texts in rows.items() for text in texts if text), ""]
    for attempt in snapshot.attempts:
        head = f"attempt {attempt.attempt}, {format_time(attempt.time)} UTC"
        lines.append(f"{head}: {attempt_outcome(snapshot, attempt)}")
        lines += [f"  {attempt.changes}"] if attempt.changes else []
        if attempt.summary:
            lines.append(f"  {attempt.cause}: {attempt.summary}")
        elif snapshot.explanation and attempt is snapshot.attempts[-1]:  # nobody was left to record it
            lines.append(f"  {snapshot.explanation['cause']}: {snapshot.explanation['summary']}")
        decision = f"{attempt.action}: {attempt.why}" if attempt.action else None
        lines += [f"  {text}" for text in (attempt.message, attempt.damage, decision, attempt.job) if text]
    if (goodput := snapshot.goodput) and goodput.busy_s:
        lines += ["", *goodput_table(goodput), "", f"time    {goodput_line(goodput)}"]
    return "\n".join(lines).rstrip("\n")


@dataclass
class Opened:
    reader: Reader
    path: Path
    lock: Lock = field(default_factory=Lock)
    snapshot: Snapshot | None = None
    read_at: float = 0.0


class Shelf:
    """The runs of a folder, each read as it grows.

    named: a run folder or a log file elsewhere that is shown too; open_named opens it.
    """

    def __init__(
        self, runs_dir: Path, named: Path | None = None, *, open_named: Callable[[Path], Reader] = open_reader
    ):
        self.runs_dir, self.open_named = runs_dir, open_named
        self.named = named and named.absolute()  # a run may be called `.`
        self._list = RunList(runs_dir)
        self._opened: dict[str, Opened] = {}  # the last used one is the last
        self._configs: dict[Path, tuple[Any, dict[str, Any]]] = {}
        self._lock = Lock()

    def paths(self) -> dict[str, Path]:
        """Returns every run that a page may request, by name."""
        # by their names as JSON has them
        paths = {path.name.encode(errors="replace").decode(): path for path in run_folders(self.runs_dir)}
        return paths | ({self.named.name: self.named} if self.named else {})

    def refused(self) -> list[Path]:
        """Returns the links because of which a run is not shown."""
        return [link for path in self.paths().values() if (link := link_out_of(path))]

    def runs(self) -> list[dict[str, Any]]:
        """Returns the runs at a glance, the latest first; a log file before them."""
        runs = [asdict(status) for status in self._list.read() if not link_out_of(Path(status.path))]
        if self.named is None or any(Path(run["path"]).resolve() == self.named.resolve() for run in runs):
            return runs
        if self.named.is_dir():
            named = asdict(run_status(RunDir(self.named)))
        else:
            log = self.snapshot(self.named.name)
            named = {field.name: getattr(log, field.name, None) for field in fields(RunStatus)} | {"attempts": 1}
        return [named, *(run for run in runs if run["name"] != self.named.name)]

    def snapshot(self, name: str) -> Snapshot:
        """Returns a snapshot at most FRESH_S old; KeyError for an unknown run, PacelineError for a refused one."""
        opened = self._open(name)
        with opened.lock:
            now = time.monotonic()
            if opened.snapshot is None or now - opened.read_at > FRESH_S:
                opened.snapshot = opened.reader.update()
                opened.read_at = time.monotonic()
            return opened.snapshot

    def glimpse(self, name: str) -> Snapshot | None:
        """Returns the last figures of a run from the ends of its files, while nothing else of it has been read; else None."""
        opened = self._open(name)
        if opened.snapshot is not None or not (opened.path / "config.toml").is_file():
            return None
        status = asdict(run_status(RunDir(opened.path)))
        figures = {name: value for name, value in status.items() if name not in ("attempts", "time", "eval")}
        return Snapshot(kind="script" if status["command"] else "training", **figures)

    def read_ahead(self, name: str) -> None:
        """Reads a run before a page requests it; errors are left to the request."""
        with suppress(KeyError, PacelineError, OSError):
            self.snapshot(name)

    def _open(self, name: str) -> Opened:
        with self._lock:
            opened = self._opened.pop(name, None)
            path = self.paths()[name] if opened is None else opened.path
            check_links(path)
            open_path = self.open_named if path == self.named else open_reader
            self._opened[name] = opened = opened or Opened(open_path(path), path)
            if len(self._opened) > MAX_OPEN:
                del self._opened[next(iter(self._opened))]
            return opened

    def settings(self) -> dict[str, dict[str, Any]]:
        """Returns the config of every run that is shown, by name; it is read again only when its file has changed."""
        current: dict[Path, tuple[Any, dict[str, Any]]] = {}
        for path in run_folders(self.runs_dir):
            run, cached = RunDir(path), self._configs.get(path)
            with suppress(OSError):  # it has vanished, or belongs to another user
                stamp = file_stamp(run.config_toml)
                current[path] = cached if cached and cached[0] == stamp else (stamp, config_in(run))
        self._configs = current
        return {path.name: config for path, (_, config) in current.items() if not link_out_of(path)}

    def metrics_table(self, name: str) -> Iterator[str]:
        """Yields metrics.jsonl as CSV."""
        path = self.paths()[name]
        check_links(path)
        return csv_lines(RunDir(path).metrics)

    def about(self, name: str) -> dict[str, Any]:
        path = self.paths()[name]
        check_links(path)
        return read_about(RunDir(path))

    def log_part(
        self, name: str, *, attempt: int, rank: int | None, log_name: str | None = None, **place: int
    ) -> dict[str, Any]:
        """Returns the end of a log, or its part at a place: start, stop or line, as read_part takes them."""
        return read_part(self._log(name, attempt, rank, log_name), **place, max_bytes=PART_BYTES)

    def log_hits(
        self, name: str, text: str, *, attempt: int, rank: int | None, log_name: str | None = None
    ) -> dict[str, Any]:
        hits = search(self._log(name, attempt, rank, log_name), text, limit=MAX_HITS)
        return {"hits": hits, "all": len(hits) < MAX_HITS}

    def _log(self, name: str, attempt: int, rank: int | None, log_name: str | None) -> Path:
        """Returns the path of a log; KeyError where the snapshot lists no such log."""
        for log in self.snapshot(name).logs:
            if (log.attempt, log.rank, log.name) == (attempt, rank, log_name):
                return Path(log.path)
        raise KeyError(f"no log of attempt {attempt}, rank {rank}, {log_name}")
