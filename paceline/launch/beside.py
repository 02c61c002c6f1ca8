"""
What runs beside a run and is not of it: trackers and notices, a process each, that follow the run folder.

Started with the attempts and told of their end by their stdin, which this process holds the other end of. Whether they work,
hang or die, the run goes on the same; it waits a moment for them when all is done, and leaves behind what takes longer.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from paceline.errors import PacelineError, UsageError
from paceline.launch.digest import Follow
from paceline.launch.notify import receiver_of
from paceline.options import take_values
from paceline.rundir import RunDir

TRACKERS = ("tensorboard", "wandb", "trackio")
SAY_AFTER_S = 2.0
LEAVE_AFTER_S = 30.0
POLL_S = 0.05


@dataclass(frozen=True)
class Beside:
    """notify: addresses, which are secrets."""

    track: tuple[str, ...] = ()
    notify: tuple[str, ...] = ()


def take_beside(args: list[str]) -> tuple[list[str], Beside]:
    """--track and --notify, each as often as one likes, and the words that are left."""
    args, track = take_values(args, "track")
    args, notify = take_values(args, "notify")
    for word in notify:
        receiver_of(word)
    return args, Beside(tracker_names(",".join(track)), tuple(notify))


def tracker_names(words: str, *, flag: str = "--track") -> tuple[str, ...]:
    """wandb,tensorboard: those that are known and installed; refused before anything starts."""
    names = tuple(dict.fromkeys(name for name in words.split(",") if name))
    for name in names:
        if name not in TRACKERS:
            raise UsageError(f"{flag} {name}: no such tracker", fix=f"one of {', '.join(TRACKERS)}")
        if (spec := find_spec(name)) is None or spec.origin is None:  # a folder wandb/ is no package
            raise PacelineError(f"{name} is not installed", fix=f"pip install {name}")
    return names


@contextmanager
def beside(run: RunDir, wanted: Beside) -> Iterator[None]:
    """For the time of the block, and some seconds after it."""
    helpers = start_all(run, wanted)
    try:
        yield
    finally:
        part(run, helpers)


def start_all(run: RunDir, wanted: Beside) -> dict[str, subprocess.Popen[bytes]]:
    """By name; one that cannot be started is a line on the screen."""
    sizes = {"events_bytes": size_of(run.events), "metrics_bytes": size_of(run.metrics)}
    helpers = {}
    with saying("notify"):
        for number, to in enumerate(wanted.notify):
            job = {"run": str(run.path), "to": to, **sizes}
            helpers[f"notify {number}"] = start("paceline.launch.notify", log=Path(os.devnull), job=job)
    for name in wanted.track:
        with saying(name):
            run.track(name).parent.mkdir(exist_ok=True)
            log = run.track(name).with_suffix(".log")
            helpers[name] = start("paceline.watch.track", str(run.path), name, log=log)
    return helpers


@contextmanager
def saying(name: str) -> Iterator[None]:
    """A full disk, or no more processes allowed: the run has no need of it."""
    try:
        yield
    except OSError as error:
        print(f"{name} is not started: {error}", file=sys.stderr, flush=True)


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def start(module: str, *words: str, log: Path, job: object = None) -> subprocess.Popen[bytes]:
    """In a session of its own: a terminal's Ctrl-C is not for it. job: its first line of stdin."""
    with log.open("ab") as out:
        helper = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *words],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    if job is not None:
        assert helper.stdin is not None
        with suppress(BrokenPipeError):
            helper.stdin.write(json.dumps(job).encode() + b"\n")
            helper.stdin.flush()
    return helper


def part(run: RunDir, helpers: dict[str, subprocess.Popen[bytes]]) -> None:
    """They have the last rows to send; Ctrl-C leaves them at it. What they have to say comes last."""
    notes = Follow(run.events)
    for helper in helpers.values():
        assert helper.stdin is not None
        helper.stdin.close()
    began, waiting = time.monotonic(), False
    with suppress(KeyboardInterrupt):
        while (left := names_of(helpers)) and time.monotonic() - began < LEAVE_AFTER_S:
            if not waiting and time.monotonic() - began > SAY_AFTER_S:
                waiting = True
                print(
                    f"waiting for {left}, at most {LEAVE_AFTER_S:.0f} s; Ctrl-C leaves it at work",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(POLL_S)
    said = [str(event["text"]) for event in notes.read() if event.get("event") == "note"]
    said += [f"{name} was killed" for name, helper in helpers.items() if (helper.poll() or 0) < 0]
    if left := names_of(helpers):
        said.append(f"still sending: {left}; ends by itself")
    for line in said:
        print(line, file=sys.stderr, flush=True)


def names_of(helpers: dict[str, subprocess.Popen[bytes]]) -> str:
    """Of those that still run."""
    return ", ".join(dict.fromkeys(name.split()[0] for name, helper in helpers.items() if helper.poll() is None))
