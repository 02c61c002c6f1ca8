"""
`paceline watch`: which run or log is meant, and which view shows it: the terminal, one look as text or JSON, or the browser.

textual and starlette are imported by the view that needs them.
"""

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, UsageError
from paceline.options import parse_options
from paceline.watch.once import format_once
from paceline.watch.show import find_any_run
from paceline.watch.status import list_runs, open_reader

KNOWN: dict[str, Any] = {
    "once": bool, "json": bool, "log": Path, "interval": float, "ascii": bool, "runs-dir": str,
    "web": bool, "port": int, "open": bool,
}  # fmt: skip
INTERVAL_S = 3.0
PIPE_WIDTH = 100
LEAST_WIDTH = 60  # of what is printed once
PLAIN_TERMINALS = ("linux", "vt100", "vt220")  # whose fonts have no dots of Braille
NO_TERMINALS = ("", "dumb", "unknown")


def watch_words(args: list[str]) -> int:
    words, options = parse_options(args, KNOWN)
    check_words(words, options)
    runs_dir = Path(options.get("runs-dir", "runs"))
    if options.get("web"):
        from paceline.watch.web import serve

        path = what_to_watch(words, options) if words or "log" in options else None
        return serve(runs_dir, path, port=options.get("port"), open_browser=bool(options.get("open")))
    path = what_to_watch(words, options)
    if options.get("json"):
        print(json.dumps(open_reader(path).update().to_json(), indent=1))
        return 0
    if options.get("once") or not is_terminal():
        if not options.get("once"):
            print("standard output is no terminal: one look, as with --once", file=sys.stderr)
        print_once(path, ascii_only=bool(options.get("ascii")))
        return 0
    from paceline.watch.terminal.app import watch

    watch(
        open_reader(path),
        interval_s=options.get("interval", INTERVAL_S),
        ascii_only=bool(options.get("ascii")) or takes_no_utf8() or os.environ.get("TERM") in PLAIN_TERMINALS,
    )
    return 0


def check_words(words: list[str], options: dict[str, Any]) -> None:
    if len(words) > 1:
        raise UsageError(f"watch takes one RUN, {len(words)} are given", fix=f"paceline watch {words[0]}")
    if words and "log" in options:
        raise UsageError("watch takes a RUN or a --log, both are given", fix=f"paceline watch --log {options['log']}")
    if not 0.2 <= options.get("interval", INTERVAL_S) <= 3600:
        raise UsageError(f"--interval {options['interval']:g}: not between 0.2 and 3600 seconds", fix="--interval 3")
    if options.get("json") and not options.get("once"):
        raise UsageError("--json is of --once", fix="paceline watch --once --json")
    if ("port" in options or options.get("open")) and not options.get("web"):
        raise UsageError("--port and --open are of --web", fix="paceline watch --web")
    others = [f"--{name}" for name in ("once", "json", "interval", "ascii") if name in options]
    if options.get("web") and others:
        raise UsageError(f"{others[0]} is not of --web", fix=f"leave out {' and '.join(others)}, or --web")


def what_to_watch(words: list[str], options: dict[str, Any]) -> Path:
    """The log; the run that is named; the one that runs; the latest."""
    log: Path | None = options.get("log")
    if log is not None:
        return log
    folder = options.get("runs-dir", "runs")
    if words and Path(words[0]).is_file():
        return Path(words[0])  # a log, without saying so
    if words:
        return find_any_run(words[0], runs_dir=folder).path
    runs = list_runs(Path(folder))
    if not runs:
        raise PacelineError(
            f"no runs in {folder}", fix="paceline train makes one; paceline watch --log FILE watches any training's log"
        )
    return Path(next((run for run in runs if run.state == "running"), runs[0]).path)


def print_once(path: Path, *, ascii_only: bool) -> None:
    on_terminal = sys.stdout.isatty()
    width = max(LEAST_WIDTH, shutil.get_terminal_size((PIPE_WIDTH, 24)).columns)
    text = format_once(
        open_reader(path).update(),
        now=time.time(),
        width=width,
        colour=on_terminal and not os.environ.get("NO_COLOR"),
        ascii_only=ascii_only or takes_no_utf8(),
    )
    print(text)


def is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "") not in NO_TERMINALS


def takes_no_utf8() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
