"""
TensorBoard, Weights & Biases and trackio behind the same three calls. Each library is imported when its tracker is opened.

A tracker gets numbers over steps and the config of the run, without what may be secret. It never gets the command of a script.
"""

import json
import math
import os
import re
import sys
import threading
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from importlib import import_module
from io import StringIO
from typing import Any, Protocol

from paceline.redaction import redact
from paceline.rundir import RunDir, read_config, read_json_lines, read_text
from paceline.units import unix_time

Report = Callable[[str], None]

PROJECT = "paceline"
CONNECT_S = 5.0  # for the first answer of W&B's server
INIT_S = 30  # for W&B to begin a run
ARRIVAL_S = 600.0  # for the last rows to arrive
NO_KEY = re.compile(r"(?i)no api.key|api.key not configured")


@dataclass(frozen=True)
class TrackerRow:
    """One row of numbers. step: None for a row of health. elapsed_s: since the run began."""

    time: float  # Unix seconds
    elapsed_s: float
    values: dict[str, float]
    step: int | None = None


@dataclass
class Position:
    """How far a tracker has come. id: the tracker's name for the run."""

    id: str | None = None
    step: int = -1
    time: float = 0.0  # of the row of that step
    health: dict[str, float] = field(default_factory=dict)  # by host: time of the last sample
    num_offline: int = 0  # rows that are saved on this host and that no server has


class Tracker(Protocol):
    online: bool = True  # whether rows go where they can be viewed
    problem: str | None = None  # why they do not, unless the user chose that
    redone: bool = False  # whether it accepts another row of a step that a resume has repeated
    where: str  # how to view it

    def add(self, row: TrackerRow) -> None: ...

    def flush(self) -> None:
        """Makes sure that added rows survive a kill; nothing to do where the library or its server reports its last step."""
        return

    def close(self, *, exit_code: int) -> bool:
        """Ends the run at the tracker; returns whether all rows have arrived. exit_code: of the run."""


def open_tracker(name: str, run: RunDir, position: Position, report: Report) -> Tracker:
    """Opens a tracker and moves the position to the last row that the tracker itself has."""
    position.id = position.id or uuid.uuid4().hex[:12]
    openers: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorBoard(run, position),
        "wandb": lambda: Wandb(run, position, report),
        "trackio": lambda: Trackio(run, position),
    }
    return openers[name]()


class TensorBoard(Tracker):
    """Event files under RUN/track/tensorboard, with health over seconds in a folder of its own."""

    redone = True

    def __init__(self, run: RunDir, position: Position):
        self.files = import_module("tensorboard.summary.writer.event_file_writer")
        self.events = import_module("tensorboard.compat.proto.event_pb2")
        self.summaries = import_module("tensorboard.compat.proto.summary_pb2")
        self.folder = run.track("tensorboard").with_suffix("")
        self.start = start_time(run)
        self.where = f"tensorboard --logdir {self.folder}"
        self.writers: dict[str, Any] = {}  # by subfolder; each is opened by its first row, so that no row adds no file
        self.is_continued = self.folder.exists()
        self.step = position.step
        elapsed_s = max(position.health.values(), default=self.start) - self.start
        self.next = {"": self.step + 1, "health": int(elapsed_s) + 1 if position.health else 0}

    def writer(self, subfolder: str) -> Any:
        if subfolder not in self.writers:
            self.writers[subfolder] = self.files.EventFileWriter(str(self.folder / subfolder))
            if self.is_continued:  # rows after the saved position come a second time
                self.restart_at(self.writers[subfolder], self.next[subfolder])
        return self.writers[subfolder]

    def add(self, row: TrackerRow) -> None:
        writer, step = self.writer("health" if row.step is None else ""), row.step
        if step is None:
            step = int(row.elapsed_s)
        elif step <= self.step:
            self.restart_at(writer, step)
        values = [self.summaries.Summary.Value(tag=tag, simple_value=value) for tag, value in row.values.items()]
        summary = self.summaries.Summary(value=values)
        writer.add_event(self.events.Event(wall_time=row.time, step=step, summary=summary))
        self.step = self.step if row.step is None else row.step

    def restart_at(self, writer: Any, step: int) -> None:
        """Makes TensorBoard drop what it has read of this step and all after it."""
        status = self.events.SessionLog(status=self.events.SessionLog.START)
        writer.add_event(self.events.Event(wall_time=self.start, step=step, session_log=status))

    def flush(self) -> None:
        for writer in self.writers.values():
            writer.flush()

    def close(self, *, exit_code: int) -> bool:
        for writer in self.writers.values():
            writer.close()
        return True


class Wandb(Tracker):
    """Online if the server answers and accepts the login, else offline in RUN/track/wandb. Health goes with the next logged step.

    The server reports its last step, so each row arrives once, whatever happened on this host.
    """

    def __init__(self, run: RunDir, position: Position, report: Report):
        os.environ |= {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}  # of this process
        self.wandb = import_module("wandb")
        self.run, self.report = run, report
        self.counts_steps = "command" not in read_config(run)
        self.waiting: dict[str, float] = {}
        self.tracked, self.online, self.problem = self.begin(position)
        self.where = str(self.tracked.url) if self.online else f"wandb sync {run.path}/track/wandb/offline-run-*"
        # of the server; newer libraries have it in the second alone
        last = max(self.tracked.step, self.tracked.starting_step) - 1
        if self.online:
            position.num_offline = 0
        if self.online and (self.counts_steps or last < 0):
            times = [unix_time(line.get("time")) for line in read_json_lines(run.metrics) if line.get("step") == last]
            position.step, position.time = last, 0.0
            position.health = dict.fromkeys(position.health, times[-1]) if times else {}
        if not self.counts_steps:
            self.tracked.define_metric("*", step_metric="step")
            self.tracked.define_metric("health/*", step_metric="elapsed_s")

    def begin(self, position: Position) -> tuple[Any, bool, str | None]:
        """Returns W&B's run, whether it is online, and why not, unless the user chose that."""
        problem = self.offline_reason()
        if problem is None:
            try:
                return self.init(position, mode="online"), True, None
            except Exception as error:  # of many kinds: no key, a wrong key, a server that fails
                message = str(error).splitlines()[0]
                problem = "not logged in, run `wandb login`" if NO_KEY.search(message) else message
                self.wandb.teardown()  # it holds the id of the run that did not begin
        if problem:
            self.report(f"wandb: {problem}; saved offline, paceline track {self.run.quoted} --to wandb sends it later")
        return self.init(position, mode="offline"), False, problem or None

    def offline_reason(self) -> str | None:
        """Why W&B must stay offline: None if its server can be reached, empty if the user chose offline mode."""
        settings = self.wandb.setup().settings  # from its environment variables and files
        if settings.mode not in ("online", "run"):
            return ""
        url = str(settings.base_url)
        try:
            urllib.request.urlopen(url, timeout=CONNECT_S).close()
        except urllib.error.HTTPError:
            return None  # the server answers
        except (OSError, ValueError) as error:
            return f"no answer from {url.partition('://')[2]} ({getattr(error, 'reason', error)})"
        return None

    def init(self, position: Position, *, mode: str) -> Any:
        settings = self.wandb.Settings(
            silent=True, console="off", disable_git=True, disable_code=True, init_timeout=INIT_S, x_disable_stats=True,
            x_disable_meta=True, x_disable_machine_info=True, x_save_requirements=False,
        )  # fmt: skip
        return self.wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT), id=position.id, name=self.run.name, resume="allow",
            dir=str(self.run.track("wandb").parent), mode=mode, config=config_of(self.run), settings=settings,
        )  # fmt: skip

    def add(self, row: TrackerRow) -> None:
        clock = {"_timestamp": row.time}
        if not self.counts_steps:
            place = {"elapsed_s": row.elapsed_s} if row.step is None else {"step": row.step}
            self.tracked.log({**row.values, **place, **clock})
        elif row.step is None:
            self.waiting.update(row.values)
        else:
            self.tracked.log({**self.waiting, **row.values, **clock}, step=row.step)
            self.waiting = {}

    def close(self, *, exit_code: int) -> bool:
        """Waits for ARRIVAL_S, where W&B would wait for hours. Offline files are then marked as sent, for `wandb sync`."""
        arrived = threading.Event()

        def finish() -> None:
            try:
                self.tracked.finish(exit_code=exit_code)
                arrived.set()
            except Exception as error:  # of many kinds
                print(f"{type(error).__name__}: {error}", file=sys.stderr)

        ending = threading.Thread(target=finish, daemon=True)
        ending.start()
        ending.join(ARRIVAL_S)
        if self.online and arrived.is_set():
            for path in self.run.track("wandb").parent.glob("wandb/offline-run-*/run-*.wandb"):
                path.with_name(path.name + ".synced").touch()
        return arrived.is_set()


class Trackio(Tracker):
    """trackio's own folder of this user, project `paceline`. Health goes with the next logged step."""

    def __init__(self, run: RunDir, position: Position):
        self.trackio = import_module("trackio")
        self.counts_steps = "command" not in read_config(run)
        self.waiting: dict[str, float] = {}
        with redirect_stdout(StringIO()):  # it prints a lot
            self.tracked = self.trackio.init(
                project=PROJECT, name=f"{run.name}-{str(position.id)[:6]}", resume="allow", config=config_of(run),
                embed=False, auto_log_gpu=False, auto_log_cpu=False,
            )  # fmt: skip
        self.where = f"trackio show --project {self.tracked.project}, run {self.tracked.name}"
        # ahead where an earlier tracker process was killed
        position.step = max(position.step, self.tracked._next_step - 1)

    def add(self, row: TrackerRow) -> None:
        if row.step is not None:
            self.tracked.log({**self.waiting, **row.values}, step=row.step)
            self.waiting = {}
        elif self.counts_steps:
            self.waiting.update(row.values)
        else:
            self.tracked.log_system(row.values)

    def close(self, *, exit_code: int) -> bool:
        with redirect_stdout(StringIO()):
            self.trackio.finish()
        return True


def start_time(run: RunDir) -> float:
    """The Unix time of the run's first event; 0 before it."""
    time = unix_time(next(read_json_lines(run.events), {}).get("time"))
    return 0.0 if math.isnan(time) else time


def config_of(run: RunDir) -> dict[str, Any]:
    """Returns the config that trackers show."""
    config: dict[str, Any] = redact(read_config(run))
    if "command" in config:
        return {name: config[name] for name in ("nproc", "device") if name in config}
    with suppress(OSError, ValueError, KeyError, TypeError):
        plan = json.loads(read_text(run.plan_json))
        config |= {name: plan[name] for name in ("world_size", "device_batch_size", "grad_accum_steps")}
    return config
