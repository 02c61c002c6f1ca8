"""
`paceline run` from the first word to the last: any script, started as `train` starts its workers.

The run folder is a training run's without our metrics: config.toml repeats the run, events and logs tell what
happened. What the ranks say goes to stdout, what paceline says to stderr. What the script does with its ranks is its own
business; it finds what torchrun would have told it in its environment.
"""

import json
import os
import sys
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from paceline.config import Config, check_config, checked_value
from paceline.errors import PacelineError, UsageError
from paceline.explain.catalogue import load_catalogue
from paceline.launch.attempts import Ending, recovery_of, run_attempts
from paceline.launch.beside import beside, take_beside
from paceline.launch.command import executed, name_of_command, split_command
from paceline.launch.digest import Follow, format_explained
from paceline.launch.env import format_env, harm_lines, worker_env
from paceline.launch.policy import CRASHES, Abilities, Decision, Ended
from paceline.launch.sampler import check_every
from paceline.launch.supervisor import Caught, Outcome, run_attempt
from paceline.launch.tail import Tail, wants_colour
from paceline.launch.watchdog import Watchdog
from paceline.options import parse_options
from paceline.plan.machine import Machine, probe_machine
from paceline.plan.planner import choose_device, choose_world_size
from paceline.rundir import RunDir, append_event, lock_run, read_json_lines, write_atomic
from paceline.terminal import lasting_screen
from paceline.units import format_duration

OPTIONS: dict[str, Callable[[str], Any]] = {
    "nproc": int, "name": str, "runs-dir": str, "device": str, "quiet-ranks": bool, "show-env": bool, "no-check": bool,
    "max-attempts": int, "no-recover": bool, "hang-after": float, "health-every": float,
}  # fmt: skip
PROGRESS_S = 600.0  # what a script saves is not known: an attempt that lasted as long has come further
STOP_GRACE_S = 60.0
CONFIG_KEYS = {"command", "nproc", "device", "cwd"}


@dataclass(frozen=True)
class Script:
    """What is run, and on what."""

    command: tuple[str, ...]  # the user's words: train.py --lr 0.1
    nproc: int
    device: str
    cwd: Path


@dataclass(frozen=True)
class Cleared:
    """What the checks before a launch say to it."""

    libuv: bool = True
    stop: PacelineError | None = None  # why it would fail
    files: Mapping[Path, str] = field(default_factory=dict)  # to be written once the run folder is there: findings.json


@lasting_screen()
def run_words(
    words: list[str],
    *,
    check: Callable[[Script, RunDir], Cleared] | None = None,
    spent: Callable[[RunDir], str] | None = None,
) -> int:
    """The command with its words; returns the exit code.

    check: asked before anything starts, unless --no-check. spent: where the run's time went, in a line for its end.
    """
    own, command = split_command(words)
    own, wanted = take_beside(own)
    _, options = parse_options(own, OPTIONS)
    recovery = recovery_of(
        max_attempts=options.get("max-attempts"),
        no_recover=bool(options.get("no-recover")),
        hang_after_s=options.get("hang-after"),
    )
    health_every_s = check_every(options.get("health-every"))
    machine = probe_machine()
    script = make_script(command, options, machine)
    argv = executed(script.command, cwd=script.cwd)
    run = chosen_run(options, script)
    checked = check(script, run) if check and not options.get("no-check") else Cleared()
    env, rows = worker_env(
        dict(os.environ),
        nproc=script.nproc,
        device=script.device,
        cpu_cores=machine.cpu_cores,
        libuv=checked.libuv,
        for_script=True,
    )
    if options.get("show-env"):
        print(format_env(rows))
        return 0
    if checked.stop:
        raise checked.stop
    lock = create_run(run, script, files=checked.files)
    say([*format_script(script, machine), f"run     {run.path}", *harm_lines(rows), ""])
    started = time.monotonic()
    quiet = bool(options.get("quiet-ranks"))
    job = ScriptJob(run, script, argv, env, lock, checked.libuv, quiet, recovery.hang_after_s, health_every_s)
    with beside(run, wanted):
        try:
            ending = run_attempts(job, recovery)
        finally:
            os.close(lock)
        seconds = time.monotonic() - started
        times = [f"time    {spent(run)}"] if spent else []
        say(closing_lines(run, script, ending, seconds=seconds, times=times))
    return exit_code_of(ending)


def exit_code_of(ending: Ending) -> int:
    """The script's own; but 1 for a known mistake of its author's, of which argparse's 2 is one way to end."""
    cause = load_catalogue().causes.get(ending.explanation.cause) if ending.explanation else None
    root = ending.outcome.root
    theirs = root is not None and root.rank is not None
    known = theirs and cause is not None and cause.retry == "never" and cause.id not in CRASHES
    return PacelineError.exit_code if known else ending.outcome.exit_code


def make_script(command: list[str], options: Mapping[str, Any], machine: Machine) -> Script:
    """From the words, or from the config.toml that an earlier run has left; what is not said follows from the machine."""
    said = {name: options[name] for name in ("nproc", "device") if name in options}
    cwd = Path.cwd()
    if command and command[0].endswith(".toml"):
        if command[1:]:
            raise UsageError(f"{command[0]} has its own command", fix=f"paceline run {command[0]}")
        before = read_config(Path(command[0]))
        command, cwd = list(before["command"]), Path(before["cwd"])
        said = {"nproc": before["nproc"], "device": before["device"], **said}
        if not cwd.is_dir():
            raise PacelineError(f"{cwd}, where the command is to run, is not there", fix="bring it back, or change cwd")
    config = Config(**{name: checked_value(name, value, where=f"--{name}") for name, value in said.items()})
    device = choose_device(config, machine)
    return Script(tuple(command), choose_world_size(config, machine, device=device), device, cwd)


def read_config(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PacelineError(f"config file {path} cannot be read: {error}", fix="config.toml of a run folder") from error
    if missing := sorted(CONFIG_KEYS - set(values)):
        raise PacelineError(
            f"{path} is not the config of a script: {', '.join(missing)} not in it",
            fix=f"paceline train {path}, if it is that of a training run",
        )
    words = values["command"]
    if set(values) > CONFIG_KEYS or not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise PacelineError(
            f"{path}: command is a list of words, beside nproc, device and cwd", fix='command = ["x.py"]'
        )
    return values


def format_config(script: Script) -> str:
    """The config.toml that gives this script back."""
    words = ", ".join(toml_string(word) for word in script.command)
    return (
        f"command = [{words}]\nnproc = {script.nproc}\ndevice = {toml_string(script.device)}\n"
        f"cwd = {toml_string(str(script.cwd))}\n"
    )


def toml_string(text: str) -> str:
    """A JSON string is a basic string of TOML, but for the one character that JSON does not escape."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def chosen_run(options: Mapping[str, Any], script: Script) -> RunDir:
    """The folder the run will have; nothing is made yet."""
    runs_dir = Path(options.get("runs-dir", Config.runs_dir))
    name = options.get("name")
    if name is None:
        stem = f"{name_of_command(script.command)}-{datetime.now():%Y%m%d-%H%M%S}"
        names = [stem, *(f"{stem}-{i}" for i in range(2, 100))]
        return RunDir(next(runs_dir / each for each in names if not (runs_dir / each).exists()))
    check_config(Config(name=name))
    run = RunDir(runs_dir / name)
    if run.path.exists() and (not run.path.is_dir() or any(run.path.iterdir())):
        raise PacelineError(f"{run.path} is already there", fix="another --name; without one, script and time make it")
    return run


def create_run(run: RunDir, script: Script, *, files: Mapping[Path, str]) -> int:
    """The folder with what is known before the start; returns its lock. config.toml comes last and makes it a run."""
    try:
        config = format_config(script)
        config.encode()
    except UnicodeEncodeError:
        raise PacelineError(
            "a word of the command is not UTF-8: the run could not be repeated", fix="rename the file"
        ) from None
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        lock = lock_run(run)
        for path, text in files.items():
            path.parent.mkdir(exist_ok=True)
            write_atomic(path, text)
        append_event(run, "script", command=list(script.command), nproc=script.nproc, device=script.device)
        write_atomic(run.config_toml, config)
    except OSError as error:
        raise PacelineError(
            f"run folder {run.path} cannot be written: {error.strerror}", fix="--runs-dir DIR in a place you can write"
        ) from error
    return lock


@dataclass(frozen=True)
class ScriptJob:
    """The script as launch/attempts.py attempts it: the same words each time, and which attempt it is in the environment."""

    run: RunDir
    script: Script
    argv: list[str]
    env: Mapping[str, str]
    lock: int
    libuv: bool
    quiet: bool  # rank 0 alone is shown
    hang_after_s: float | None
    health_every_s: float

    def attempt(self, number: int, caught: Caught) -> Outcome:
        """Its lines are shown as they come."""
        ranks = range(1 if self.quiet else self.script.nproc)
        logs = {rank: self.run.rank_log(number, rank) for rank in ranks}
        tail = Tail(logs, stream=sys.stdout, colour=wants_colour(sys.stdout))
        events = Follow(self.run.events)

        def show() -> None:
            tail.poll()
            for event in events.read():
                if event.get("event") == "stopping":
                    say([f"stopping: the script has {STOP_GRACE_S:.0f} s to end; Ctrl-C again to end now"])
                elif event.get("event") == "note":
                    say([event["text"]])

        told = {"PACELINE_ATTEMPT": str(number), "PACELINE_RUN": str(self.run.path.resolve())}
        try:
            return run_attempt(
                self.run,
                command=self.argv,
                nproc=self.script.nproc,
                attempt=number,
                env={**self.env, **told},
                lock_fd=self.lock,
                caught=caught,
                on_tick=show,
                watchdog=Watchdog(self.run, number, self.script.nproc, hang_after_s=self.hang_after_s, script=True),
                stop_grace_s=STOP_GRACE_S,
                libuv=self.libuv,
                cwd=self.script.cwd,
                own_exit_codes=True,
                health_every_s=self.health_every_s,
            )
        finally:
            tail.close()

    def came_further(self, ended: Ended) -> bool:
        """By time alone; a hang's silence is none."""
        hangs = [event["silent_s"] for event in read_json_lines(self.run.events) if event.get("event") == "hang"]
        silent_s = hangs[-1] if hangs and ended.cause == "hang" else 0.0
        return ended.seconds - silent_s >= PROGRESS_S

    def abilities(self, ended: Ended) -> Abilities:
        return Abilities()

    def change(self, decision: Decision) -> None:
        """Nothing: what is in the script is its author's. A port of ours is another one each time."""

    def say(self, lines: list[str]) -> None:
        say(lines)


def format_script(script: Script, machine: Machine) -> list[str]:
    threads = max(1, machine.cpu_cores // script.nproc)
    devices = (
        f"{script.nproc} x {machine.gpus[0].name}"
        if script.device == "cuda"
        else f"{counted(script.nproc, 'CPU process', 'CPU processes')} x {counted(threads, 'thread', 'threads')}"
    )
    return [f"script  {' '.join(script.command)}", f"device  {devices}"]


def closing_lines(run: RunDir, script: Script, ending: Ending, *, seconds: float, times: list[str]) -> list[str]:
    """How it ended; where a rank failed, its own traceback and what it means. times: lines that tell where the time went."""
    outcome = ending.outcome
    logs = f"logs    {run.logs(outcome.attempt)}"
    if outcome.state == "failed":
        rank = outcome.root.rank if outcome.root else None
        append_event(run, "failed", rank=rank, exit_code=exit_code_of(ending))
        return ["", *times, "", format_explained(outcome, run, ending.explanation)]
    append_event(run, outcome.state)
    if outcome.state == "interrupted":
        return ["", f"interrupted after {format_duration(seconds)}", *times, logs]
    alone = "note    no rank joined the others in a process group: each of {} has worked by itself"
    return [
        "",
        *([alone.format(script.nproc)] if outcome.joined is False and script.nproc > 1 else []),
        f"done    in {format_duration(seconds)}",
        *times,
        logs,
    ]


def counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def say(lines: list[str]) -> None:
    """paceline's own words: beside the script's output, never in it."""
    sys.stdout.flush()
    print("\n".join(lines), file=sys.stderr, flush=True)
