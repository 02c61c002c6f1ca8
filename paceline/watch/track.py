"""
A run folder to experiment trackers: `python -m paceline.watch.track RUN NAME` beside a run, or `paceline track` at any time.

Follows metrics.jsonl, or a script's log, and health/; each row goes to one tracker (watch/trackers.py). The run knows nothing
of it: no file that it needs is written here but a `note` in events.jsonl. RUN/track/NAME.json remembers how far it has
come, so that a row is never sent twice.
"""

import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from paceline.errors import PacelineError
from paceline.rundir import RunDir, append_event, holder_of, is_locked, read_json_lines, write_atomic
from paceline.watch.attempts import end_of
from paceline.watch.rows import Position, RunRows
from paceline.watch.trackers import Tracker, open_tracker

POLL_S = 2.0
SAVING_POLL_S = 0.2
KEEP_S = 10.0  # how often the position is written down
LAST_S = 900.0  # after the command that held the run, for all that is still to be sent
NICENESS = 19  # the training has the processor first


def main() -> int:
    """Beside a run: until stdin ends, of which the command that holds the run has the other end, and its workers have ended."""
    run, name = RunDir(Path(sys.argv[1])), sys.argv[2]
    os.nice(NICENESS)
    # a batch system sends them to all alike, and the run has yet to end
    for signum in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, lambda *_: None)
    released = release_of(os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # no library has anyone to ask
    holder = holder_of(run)

    def goes_on() -> bool:
        if not released.wait(POLL_S):
            return True
        time.sleep(SAVING_POLL_S)
        return holder is not None and holder_of(run) == holder

    try:
        track(run, name, goes_on=goes_on, say=lambda text: say_in_events(run, text), wait_s=LAST_S)
    except PacelineError as error:
        say_in_events(run, f"{error.message}; paceline track {run.path} --to {name} sends what is missing")
        raise
    return 0


def release_of(link: int) -> threading.Event:
    """Set when the other end is closed. A library that hangs ends with the process, some time later."""
    released = threading.Event()

    def wait() -> None:
        while os.read(link, 4096):
            pass
        released.set()
        time.sleep(LAST_S)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
    return released


def track_now(run: RunDir, name: str) -> None:
    """`paceline track`: what there is, and where the run is going on, until its end."""
    if is_locked(run):
        print(f"{run.name} is running: followed until its end; Ctrl-C leaves", flush=True)

    def goes_on() -> bool:
        with suppress(KeyboardInterrupt):
            if is_locked(run):
                time.sleep(POLL_S)
                return True
        return False

    sent = track(run, name, goes_on=goes_on, say=lambda text: print(text, flush=True))
    print(f"{name}: {sent:,} rows sent" if sent else f"{name}: nothing new")


def track(
    run: RunDir, name: str, *, goes_on: Callable[[], bool], say: Callable[[str], None], wait_s: float = 0.0
) -> int:
    """goes_on: whether more may come; it waits until the next look is due. wait_s: for another process that does the same.

    Returns how many rows were sent; PacelineError for whatever a library raises.
    """
    try:
        with only_one(run, name, wait_s=wait_s):
            return send(run, name, goes_on, say)
    except PacelineError:
        raise
    except Exception as error:
        said = (str(error).splitlines() or [""])[0]
        raise PacelineError(
            f"{name}: {type(error).__name__}: {said}", fix=f"paceline track {run.path} --to {name}, once it is mended"
        ) from error


def send(run: RunDir, name: str, goes_on: Callable[[], bool], say: Callable[[str], None]) -> int:
    position = read_position(run, name)
    tracker = open_tracker(name, run, position, say)
    say(f"{name}: {tracker.where}")
    try:
        sent = follow(run, name, tracker, position, goes_on)
    except BaseException:
        tracker.close(exit_code=0)
        raise
    if not tracker.close(exit_code=exit_code_of(run)):
        raise PacelineError(f"{name}: not all of it has arrived", fix=f"paceline track {run.path} --to {name}")
    keep_position(run, name, position)
    return sent


def follow(run: RunDir, name: str, tracker: Tracker, position: Position, goes_on: Callable[[], bool]) -> int:
    rows, sent, kept = RunRows(run, position, redone=tracker.redone), 0, time.monotonic()
    keep_position(run, name, position)
    more = True
    while more:
        more = goes_on()
        for row in rows.read(last=not more):
            tracker.add(row)
            sent += 1
        if more and time.monotonic() - kept >= KEEP_S:
            tracker.flush()
            keep_position(run, name, position)
            kept = time.monotonic()
    return sent


def exit_code_of(run: RunDir) -> int:
    """0 unless the run has failed, or ended without a word."""
    if is_locked(run):
        return 0  # it goes on, and is left
    return 0 if end_of(read_json_lines(run.events)) in ("finished", "stopped") else 1


def read_position(run: RunDir, name: str) -> Position:
    with suppress(OSError, ValueError, TypeError):
        return Position(**json.loads(run.track(name).read_text()))
    return Position()


def keep_position(run: RunDir, name: str, position: Position) -> None:
    with suppress(OSError):  # a full disk: rows that were sent may be looked at again
        write_atomic(run.track(name), json.dumps(asdict(position)) + "\n")


@contextmanager
def only_one(run: RunDir, name: str, *, wait_s: float) -> Iterator[None]:
    run.track(name).parent.mkdir(exist_ok=True)
    fd = os.open(run.track(name).with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        take_lock(fd, f"{name}: another process is sending {run.name} to it", until=time.monotonic() + wait_s)
        yield
    finally:
        os.close(fd)


def take_lock(fd: int, otherwise: str, *, until: float) -> None:
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                raise PacelineError(otherwise, fix="wait for it to end") from None
        time.sleep(SAVING_POLL_S)


def say_in_events(run: RunDir, text: str) -> None:
    with suppress(PacelineError):  # the folder is gone: there is nobody to read it
        append_event(run, "note", text=text)


if __name__ == "__main__":
    sys.exit(main())
