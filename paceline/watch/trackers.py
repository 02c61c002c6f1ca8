"""
TensorBoard, Weights & Biases and trackio, each behind the same three calls. Every library is imported when it is opened.

None of them is asked for more than numbers over steps. Config goes along; the command of a script does not, it may hold keys.
"""

import json
import os
import re
import sys
import threading
import tomllib
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any, Protocol

from paceline.rundir import RunDir, read_json_lines
from paceline.watch.lines import unix_time
from paceline.watch.rows import Position, Row, began

NO_KEY = re.compile(r"(?i)no api.key|api.key not configured")
Say = Callable[[str], None]

PROJECT = "paceline"
REACH_S = 5.0  # for a first answer of W&B's server
INIT_S = 30  # for W&B to begin a run
FINISH_S = 600.0  # for what is on its way to arrive


class Tracker(Protocol):
    redone: bool  # whether it takes a step again that a resume has done anew
    where: str  # to look at it

    def add(self, row: Row) -> None: ...

    def flush(self) -> None:
        """Makes safe what was added."""

    def close(self, *, exit_code: int) -> bool:
        """Whether all of it has arrived. exit_code: of the run."""


def open_tracker(name: str, run: RunDir, position: Position, say: Say) -> Tracker:
    """Moves the position to where the tracker itself says it has come."""
    position.id = position.id or uuid.uuid4().hex[:12]
    made: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorBoard(run, position),
        "wandb": lambda: Wandb(run, position, say),
        "trackio": lambda: Trackio(run, position),
    }
    return made[name]()


class TensorBoard:
    """Event files under RUN/track/tensorboard, health in a folder within: its axis is seconds."""

    redone = True

    def __init__(self, run: RunDir, position: Position):
        writers = import_module("tensorboard.summary.writer.event_file_writer")
        self.events = import_module("tensorboard.compat.proto.event_pb2")
        self.summaries = import_module("tensorboard.compat.proto.summary_pb2")
        folder = run.track("tensorboard").with_suffix("")
        self.began = began(run)
        self.where = f"tensorboard --logdir {folder}"
        again = folder.exists()
        self.steps = writers.EventFileWriter(str(folder))
        self.health = writers.EventFileWriter(str(folder / "health"))
        self.step = position.step
        if again:  # what was written after the position was kept comes once more
            elapsed_s = max(position.health.values(), default=self.began) - self.began
            self.begin_again(self.steps, self.step + 1)
            self.begin_again(self.health, int(elapsed_s) + 1 if position.health else 0)

    def add(self, row: Row) -> None:
        if row.step is not None and row.step <= self.step:
            self.begin_again(self.steps, row.step)
        writer, step = (self.health, int(row.elapsed_s)) if row.step is None else (self.steps, row.step)
        values = [self.summaries.Summary.Value(tag=tag, simple_value=value) for tag, value in row.values.items()]
        summary = self.summaries.Summary(value=values)
        writer.add_event(self.events.Event(wall_time=row.time, step=step, summary=summary))
        self.step = self.step if row.step is None else row.step

    def begin_again(self, writer: Any, step: int) -> None:
        """TensorBoard forgets what it has read of this step and later ones."""
        status = self.events.SessionLog(status=self.events.SessionLog.START)
        writer.add_event(self.events.Event(wall_time=self.began, step=step, session_log=status))

    def flush(self) -> None:
        self.steps.flush()
        self.health.flush()

    def close(self, *, exit_code: int) -> bool:
        self.steps.close()
        self.health.close()
        return True


class Wandb:
    """Online where its server answers and knows us, else into RUN/track/wandb. Health goes with the next logged step.

    The server says how far it has come, so a row arrives once, whatever has happened here.
    """

    redone = False

    def __init__(self, run: RunDir, position: Position, say: Say):
        os.environ |= {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}  # of this process
        self.wandb = import_module("wandb")
        self.run, self.say = run, say
        self.counts_steps = not is_script(run)
        self.waiting: dict[str, float] = {}
        self.tracked, self.online = self.begin(position)
        self.where = str(self.tracked.url) if self.online else f"wandb sync {run.path}/track/wandb/offline-run-*"
        if self.online:
            self.move(position)
        if not self.counts_steps:
            self.tracked.define_metric("*", step_metric="step")
            self.tracked.define_metric("health/*", step_metric="elapsed_s")

    def begin(self, position: Position) -> tuple[Any, bool]:
        """W&B's run, and whether it is online."""
        problem = self.offline_because()
        if problem is None:
            try:
                return self.init(position, mode="online"), True
            except Exception as error:  # of many kinds: no key, a wrong one, a server that fails
                said = str(error).splitlines()[0]
                problem = "not logged in, `wandb login` does" if NO_KEY.search(said) else said
                self.wandb.teardown()  # it holds the id of the run that did not begin
        if problem:
            self.say(f"wandb: {problem}; kept offline, paceline track {self.run.path} --to wandb sends it later")
        return self.init(position, mode="offline"), False

    def offline_because(self) -> str | None:
        """None: nothing speaks against its server. Empty: its user has chosen to be offline."""
        settings = self.wandb.setup().settings  # with what stands in its variables and files
        if settings.mode not in ("online", "run"):
            return ""
        url = str(settings.base_url)
        try:
            urllib.request.urlopen(url, timeout=REACH_S).close()
        except urllib.error.HTTPError:
            return None  # an answer
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

    def move(self, position: Position) -> None:
        """To where the server is."""
        last = self.tracked.step - 1
        if self.counts_steps or last < 0:
            at = [unix_time(each.get("time")) for each in read_json_lines(self.run.metrics) if each.get("step") == last]
            position.step, position.time = last, 0.0
            position.health = dict.fromkeys(position.health, at[-1]) if at else {}

    def add(self, row: Row) -> None:
        clock = {"_timestamp": row.time}
        if not self.counts_steps:
            place = {"elapsed_s": row.elapsed_s} if row.step is None else {"step": row.step}
            self.tracked.log({**row.values, **place, **clock})
        elif row.step is None:
            self.waiting.update(row.values)
        else:
            self.tracked.log({**self.waiting, **row.values, **clock}, step=row.step)
            self.waiting = {}

    def flush(self) -> None:
        """Nothing: offline it is in the file; online the server tells, the next time."""

    def close(self, *, exit_code: int) -> bool:
        """Waits a while: W&B itself would for hours. What was kept offline has gone too then: `wandb sync` need not send it."""
        arrived = threading.Event()

        def finish() -> None:
            try:
                self.tracked.finish(exit_code=exit_code)
                arrived.set()
            except Exception as error:  # of many kinds
                print(f"{type(error).__name__}: {error}", file=sys.stderr)

        ending = threading.Thread(target=finish, daemon=True)
        ending.start()
        ending.join(FINISH_S)
        if self.online and arrived.is_set():
            for path in self.run.track("wandb").parent.glob("wandb/offline-run-*/run-*.wandb"):
                path.with_name(path.name + ".synced").touch()
        return arrived.is_set()


class Trackio:
    """trackio's own folder of this user, project `paceline`. Health goes with the next logged step."""

    redone = False

    def __init__(self, run: RunDir, position: Position):
        self.trackio = import_module("trackio")
        self.counts_steps = not is_script(run)
        self.waiting: dict[str, float] = {}
        with redirect_stdout(StringIO()):  # it has much to say
            self.tracked = self.trackio.init(
                project=PROJECT, name=f"{run.name}-{str(position.id)[:6]}", resume="allow", config=config_of(run),
                embed=False, auto_log_gpu=False, auto_log_cpu=False,
            )  # fmt: skip
        self.where = f"trackio show --project {self.tracked.project}, run {self.tracked.name}"
        position.step = max(position.step, self.tracked._next_step - 1)  # where a tracker before this was killed

    def add(self, row: Row) -> None:
        if row.step is not None:
            self.tracked.log({**self.waiting, **row.values}, step=row.step)
            self.waiting = {}
        elif self.counts_steps:
            self.waiting.update(row.values)
        else:
            self.tracked.log_system(row.values)

    def flush(self) -> None:
        """Nothing: it writes twice a second, and tells how far it is, the next time."""

    def close(self, *, exit_code: int) -> bool:
        with redirect_stdout(StringIO()):
            self.trackio.finish()
        return True


def is_script(run: RunDir) -> bool:
    return "command" in read_toml(run.config_toml)


def config_of(run: RunDir) -> dict[str, Any]:
    """What decides the run, as its trackers show it."""
    config = read_toml(run.config_toml)
    if "command" in config:
        return {name: config[name] for name in ("nproc", "device") if name in config}
    with suppress(OSError, ValueError, KeyError):
        plan = json.loads(run.plan_json.read_text())
        config |= {name: plan[name] for name in ("world_size", "device_batch_size", "grad_accum_steps")}
    return config


def read_toml(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        return tomllib.loads(path.read_text(encoding="utf-8"))
    return {}
