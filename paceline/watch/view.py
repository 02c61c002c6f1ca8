"""
`paceline watch` and `paceline report`: which run or log is shown, and as what.

`watch` shows it in the terminal, once as text or JSON, or in the browser; textual and starlette are imported by the view that needs
them. `report` writes one run in one file, to keep or to send: the browser's own page with the run in it, or Markdown. The HTML
needs no server: it holds scripts, styles and numbers, and its content policy forbids everything else. What may be secret is taken
out before anything is formatted (paceline/redaction.py); the views, which are for the own screen, show the text as it is.
"""

import base64
import hashlib
import html
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, UsageError
from paceline.explain.explanation import with_commands
from paceline.redaction import redact
from paceline.run_options import ReportOptions, WatchOptions
from paceline.rundir import RunDir, find_run, is_preparing, write_atomic
from paceline.terminal import cells, pad, shows_colours
from paceline.units import format_count, format_duration, format_list
from paceline.watch.about import read_about
from paceline.watch.measures import format_time
from paceline.watch.panels import action_text, figures, goodput_panel, run_panels, why_panel
from paceline.watch.snapshot import LIVE, Series, Snapshot, changes, to_text
from paceline.watch.status import Reader, RunList, Shelf, open_reader
from paceline.watch.summary import attempt_outcome, has_hosts, ranks_and_hosts, summarize
from paceline.watch.terminal.chart import finite, format_short, sparkline
from paceline.watch.terminal.pages import format_once

INTERVAL_S = 3.0
PIPE_WIDTH = 100
MIN_WIDTH = 40
PLAIN_TERMINALS = ("linux", "vt100", "vt220")  # their fonts have no dots of Braille
NO_TERMINALS = ("", "dumb", "unknown")
STATIC = Path(__file__).parent / "static"
STYLE = re.compile(r'<link rel="stylesheet" href="static/([\w.]+)">\n')
SCRIPT = re.compile(r'<script defer src="static/([\w.]+)"></script>\n')
SPARKLINE_WIDTH = 48  # characters of a curve in Markdown
MAX_EVENTS = 30  # in Markdown


def show_run(options: WatchOptions, samples: Callable[[Path], Iterator[dict[str, Any]]] = lambda _: iter(())) -> int:
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
    if options.json and not options.once and not options.web:
        raise UsageError("--json needs --once", fix="add --once")
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
        return find_reported(options.run, runs_dir=options.runs_dir)
    runs = RunList(Path(options.runs_dir)).read()
    if not runs:
        raise PacelineError(
            f"no runs in {options.runs_dir}",
            fix="paceline train makes one; paceline watch --log FILE watches any training's log",
        )
    return Path(next((run for run in runs if run.state in LIVE), runs[0]).path)


def folder_of_runs(options: WatchOptions, path: Path | None) -> Path:
    """Returns the folder whose runs are listed: that of the run which is given, unless --runs-dir sets another."""
    is_set = options.runs_dir != WatchOptions.runs_dir
    return Path(options.runs_dir) if is_set or path is None or not path.is_dir() else path.absolute().parent


def find_reported(name: str, *, runs_dir: str) -> Path:
    """Returns the path of what is watched or reported: a run folder, a run by its name, or a log file."""
    path = Path(name)
    folders = [folder for folder in (path, Path(runs_dir) / name) if is_preparing(RunDir(folder))]
    return path if path.is_file() else folders[0] if folders else find_run(name, runs_dir=runs_dir).path


def answer_report(options: ReportOptions, *, now: float) -> str:
    """Writes the report of a run, and returns what to print: where it is, or the report itself."""
    path = find_reported(options.run, runs_dir=options.runs_dir)
    is_markdown = options.markdown or Path(options.out or "").suffix == ".md"
    text = (markdown_report if is_markdown else html_report)(path, now=now)
    output = options.out or ("-" if is_markdown else f"{path.name}.html")
    if output == "-":
        return text
    write_report(Path(output), text)
    return f"report  {output}\n"


def write_report(output: Path, text: str) -> None:
    """Writes a report at once: a full disk leaves the report that was there before."""
    text = text.encode(errors="replace").decode()  # the name of a run may not be UTF-8
    try:
        if output.exists() and not output.is_file():  # /dev/stdout
            output.write_text(text, encoding="utf-8")
        else:
            write_atomic(output, text)
    except OSError as error:
        raise PacelineError(
            f"cannot write {output}: {error.strerror}", fix="write to another place with --out FILE"
        ) from error


def html_report(path: Path, *, now: float) -> str:
    """Returns the page of a run folder or a log file."""
    snapshot, about = redact(open_reader(path).update()), redact(read_about(RunDir(path)))
    verdict = summarize(snapshot, now=now)
    report = {
        **changes(None, snapshot),
        "run": snapshot.name,
        "now": now,
        "summary": verdict and asdict(verdict),
        "panels": {**run_panels(snapshot, now=now), "logs": None},
        "about": about,
    }
    for log in report["parts"]["logs"]:
        log["path"] = Path(log["path"]).name
    return page_with(report, title=f"{snapshot.name} · paceline")


def page_with(report: dict[str, Any], *, title: str) -> str:
    """Returns index.html with everything that it loads put into it, in the same order."""
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    style, script = (
        "\n".join((STATIC / name).read_text(encoding="utf-8") for name in pattern.findall(page))
        for pattern in (STYLE, SCRIPT)
    )
    policy = f"default-src 'none'; style-src '{hash_of(style)}'; script-src '{hash_of(script)}'; img-src data:"
    data = to_text(report).replace("<", "\\u003c")  # so that no text of a run ends the script element
    tag = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    elements = f'<script type="application/json" id="report">{data}</script>\n<script>{script}</script>\n</body>'
    page = SCRIPT.sub("", STYLE.sub("", page))
    page = page.replace(
        "<title>paceline</title>", f"<title>{html.escape(title, quote=False)}</title>\n<style>{style}</style>"
    )
    return page.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{tag}').replace("</body>", elements)


def hash_of(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def markdown_report(path: Path, *, now: float) -> str:
    """Returns the report as Markdown, for an issue, a pull request or a notebook of experiments."""
    snapshot, about = redact(open_reader(path).update()), redact(read_about(RunDir(path)))
    verdict = summarize(snapshot, now=now)
    rows = [f"| {name} | {text} | {planned} | {over} |" for name, _, text, planned, over, _ in figures(snapshot)]
    config = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in about["config"].items()]
    blocks = [
        [f"# {escape(snapshot.name)}: {snapshot.state}", "", *([escape(verdict.text)] if verdict else [])],
        [", ".join(progress(snapshot))],
        ["| | measured | plan | |", "|---|---:|---:|---:|", *rows] if rows else [],
        [f"- {escape(note)}" for note in snapshot.notes],
        section("What happened", explanation(snapshot)),
        section("Curves", fenced(curves(snapshot.series))),
        section("Where the time went", time_spent(snapshot)),
        section("Attempts", attempts(snapshot) if len(snapshot.attempts) > 1 else ()),
        section("Events", events(snapshot)),
        section("Findings of the checks", (f"- {escape(str(finding.get('what')))}" for finding in snapshot.findings)),
        section("Machine", (machine(**facts) for facts in about["facts"])),
        section("Sample", (line for sample in about["samples"][:1] for line in fenced(sample["text"]))),
        section("Config", fenced("\n".join(config))),
    ]
    return "\n\n".join("\n".join(lines).strip() for lines in blocks if any(lines)) + "\n"


def section(title: str, lines: Iterable[str]) -> list[str]:
    block = [f"## {title}", "", *lines]
    return block if len(block) > 2 else []


def progress(snapshot: Snapshot) -> Iterator[str]:
    if snapshot.step:
        yield f"step {snapshot.step:,}" + (f" of {snapshot.num_steps:,}" if snapshot.num_steps else "")
    if snapshot.step and snapshot.tokens_per_step:
        yield f"{format_count(snapshot.step * snapshot.tokens_per_step)} tokens"
    if has_hosts(snapshot):
        yield ranks_and_hosts(snapshot)
    if snapshot.elapsed_s is not None:
        yield f"{format_duration(snapshot.elapsed_s)} in all"
    if snapshot.started is not None:
        yield f"started {datetime.fromtimestamp(snapshot.started, UTC):%Y-%m-%d %H:%M} UTC"


def explanation(snapshot: Snapshot) -> list[str]:
    if not snapshot.explanation:
        return []
    why = why_panel(snapshot.explanation)
    lines = [f"**{why['cause']}**: {escape(str(why['summary']))}"]
    if fix := why["fix"] and str(why["fix"]):
        lines += ["", f"**Fix:** {with_commands(fix)}"]
    evidence = [f"{line['place']}  {line['text']}" for block in why["blocks"][:1] for line in block["lines"]]
    return [*lines, "", *fenced("\n".join(evidence))] if snapshot.explanation.get("evidence") else lines


def curves(series: dict[str, Series]) -> str:
    drawn = {name: values for name, curve in series.items() if len(values := finite(curve.values)) > 1}
    wide = max(map(cells, drawn), default=0)
    return "\n".join(
        f"{pad(name, wide)}  {sparkline(values, SPARKLINE_WIDTH)}  {format_short(values[0])} to {format_short(values[-1])}"
        for name, values in drawn.items()
    )


def time_spent(snapshot: Snapshot) -> list[str]:
    goodput = goodput_panel(snapshot)
    if goodput is None:
        return []
    rows = [f"| {row['name']} | {row['duration']} | {row['percent']} |" for row in goodput["rows"]]
    return ["| | | |", "|---|---:|---:|", *rows, "", goodput["energy"] or ""]


def attempts(snapshot: Snapshot) -> Iterator[str]:
    for attempt in snapshot.attempts:
        line = f"{attempt.attempt}. {format_time(attempt.time)} UTC: {attempt_outcome(snapshot, attempt)}"
        line += f"; {attempt.cause}: {escape(attempt.summary)}" if attempt.summary else ""
        action = action_text(attempt)
        yield line + (f"; {escape(action)}" if action else "")


def events(snapshot: Snapshot) -> Iterator[str]:
    for event in [event for event in snapshot.events if event.kind != "sample"][-MAX_EVENTS:]:
        time = f"{datetime.fromtimestamp(event.time, UTC):%m-%d %H:%M:%S}" if event.time else ""
        yield f"- {time}  {escape(event.text)}"


def machine(host: str, rows: Sequence[tuple[str, str]]) -> str:
    return f"- {escape(host)}: " + ", ".join(f"{name} {escape(value)}" for name, value in rows)


def fenced(text: str) -> list[str]:
    fence = "```"
    while fence in text:
        fence += "`"
    return [f"{fence}text", text, fence] if text else []


def escape(text: str) -> str:
    """Returns text that Markdown and HTML show as it is."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", text.replace("\n", " ")) if re.search(r"[\\`*\[\]<>|]", text) else text
