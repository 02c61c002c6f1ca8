"""
`paceline watch`: which run or log is shown, and as what.

In the terminal, once as text or JSON, or in the browser; textual and starlette are imported by the view that needs them.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, UsageError
from paceline.run_options import WatchOptions
from paceline.rundir import RunDir, find_run, is_preparing
from paceline.terminal import shows_colours
from paceline.units import format_list
from paceline.watch.snapshot import LIVE
from paceline.watch.status import Reader, RunList, Shelf, no_runs, open_reader
from paceline.watch.terminal.pages import format_once

INTERVAL_S = 3.0
PIPE_WIDTH = 100
MIN_WIDTH = 40
PLAIN_TERMINALS = ("linux", "vt100", "vt220")  # their fonts have no dots of Braille
NO_TERMINALS = ("", "dumb", "unknown")


def show_run(options: WatchOptions, samples: Callable[[Path], Iterator[dict[str, Any]]]) -> int:
    """Shows the run or log that the options mean, in the view that they mean; returns the exit code.

    samples: of this machine, and of the disk that a path is on, to be shown beside a log.
    """
    check_options(options)

    def open_watched(path: Path) -> Reader:
        from paceline.watch.log_reader import LogAndMachine

        return LogAndMachine(path, samples(path.absolute().parent)) if path.is_file() else open_reader(path)

    if options.web:
        from paceline.watch.web import serve

        path = what_to_watch(options) if options.run or options.log else None
        shelf = Shelf(folder_of_runs(options, path), path, open_named=open_watched)
        return serve(shelf, path, port=options.port, open_browser=options.open)
    path = what_to_watch(options)
    reader = open_watched(path)
    if options.json:
        print(json.dumps(reader.update().to_json(), indent=1))
        return 0
    ascii_only = options.ascii or (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
    terminal = os.environ.get("TERM", "")
    streams = {"standard input": sys.stdin, "standard output": sys.stdout, "standard error": sys.stderr}
    piped = next((name for name, stream in streams.items() if not stream.isatty()), None)  # textual draws on the last
    if piped is None and terminal not in NO_TERMINALS and not options.once:
        from paceline.watch.terminal.app import WatchApp

        ascii_only = ascii_only or terminal in PLAIN_TERMINALS
        run_list, interval_s = RunList(folder_of_runs(options, path)), options.interval_s or INTERVAL_S
        several = not (options.run or options.log) and sum(run.state in LIVE for run in run_list.read()) > 1
        page = "runs" if several else "overview"
        app = WatchApp(reader, interval_s=interval_s, ascii_only=ascii_only, run_list=run_list, page=page)
        app.run()
        return app.return_code or 0
    if not options.once:
        reason = f"{piped} is not a terminal" if piped else f"TERM={terminal} cannot show the live view"
        print(f"{reason}: printing one view, as --once does", file=sys.stderr)
    width = max(MIN_WIDTH, shutil.get_terminal_size((PIPE_WIDTH, 24)).columns)
    colour = shows_colours(sys.stdout)
    print(format_once(reader.update(), now=time.time(), width=width, colour=colour, ascii_only=ascii_only))
    return 0


def check_options(options: WatchOptions) -> None:
    """Raises UsageError for options that contradict each other."""
    if options.run and options.log:
        raise UsageError("watch takes a RUN or a --log, both are given", fix=f"paceline watch --log {options.log}")
    if (options.port is not None or options.open) and not options.web:
        raise UsageError("--port and --open need --web", fix="add --web")
    flags = ("once", "json", "interval_s", "ascii")
    names = [f"--{flag.removesuffix('_s')}" for flag in flags if getattr(options, flag)]
    if options.web and names:
        raise UsageError(f"{names[0]} cannot be combined with --web", fix=f"leave out {format_list(names)}, or --web")
    runs = Path(options.runs_dir)
    if options.web and runs != Path(WatchOptions.runs_dir) and not runs.is_dir():  # runs may come into the usual folder
        raise PacelineError(f"{runs} is no folder of runs", fix="check the path: paceline watch --web --runs-dir DIR")


def what_to_watch(options: WatchOptions) -> Path:
    """Returns the log, or the run that the options give; else the running one, else the latest."""
    if options.log is not None:
        return options.log
    if options.run:
        return find_shown(options.run, runs_dir=options.runs_dir)
    runs = RunList(Path(options.runs_dir)).read()
    if not runs:
        fix = "paceline train makes one; paceline watch --log FILE watches any training's log"
        raise no_runs(Path(options.runs_dir), fix=fix)
    return Path(next((run for run in runs if run.state in LIVE), runs[0]).path)


def folder_of_runs(options: WatchOptions, path: Path | None) -> Path:
    """Returns the folder whose runs are listed: that of the run which is given, unless --runs-dir sets another."""
    is_set = options.runs_dir != WatchOptions.runs_dir
    return Path(options.runs_dir) if is_set or path is None or not path.is_dir() else path.absolute().parent


def find_shown(name: str, *, runs_dir: str) -> Path:
    """Returns the path of what `watch` or `report` shows: a run folder, a run by its name, or a log file."""
    path = Path(name)
    folders = [folder for folder in (path, Path(runs_dir) / name) if is_preparing(RunDir(folder))]
    return path if path.is_file() else folders[0] if folders else find_run(name, runs_dir=runs_dir).path
