"""
`paceline report`: one run in one file, to keep or to send: the browser's own page with the run in it, or Markdown.

The HTML needs no server: it holds scripts, styles and numbers, and its content policy forbids everything else. What may be secret
is taken out before anything is formatted (paceline/redaction.py); the views, which are for the own screen, show the text as it is.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from paceline.explain.explanation import format_summary, with_commands
from paceline.explain.lines import strip_escapes
from paceline.redaction import redact
from paceline.run_options import ReportOptions
from paceline.rundir import RunDir
from paceline.terminal import cells, pad, write_output
from paceline.units import format_count, format_duration
from paceline.watch.about import evaluation_rows, read_about
from paceline.watch.measures import format_measure, format_time
from paceline.watch.panels import action_text, figures, goodput_panel, run_panels, why_panel
from paceline.watch.snapshot import Series, Snapshot, changes, to_text
from paceline.watch.status import open_reader
from paceline.watch.summary import attempt_outcome, has_hosts, ranks_and_hosts, summarize
from paceline.watch.terminal.chart import curve_look, finite, steady_line
from paceline.watch.view import find_shown

STATIC = Path(__file__).parent / "static"
STYLE = re.compile(r'<link rel="stylesheet" href="static/([\w.]+)">\n')
SCRIPT = re.compile(r'<script defer src="static/([\w.]+)"></script>\n')
SPARKLINE_WIDTH = 48  # characters of a curve in Markdown
MAX_EVENTS = 30  # in Markdown


def answer_report(options: ReportOptions, *, now: float) -> str:
    """Writes the report of a run, and returns what to print: where it is, or the report itself."""
    path = find_shown(options.run, runs_dir=options.runs_dir)
    is_markdown = options.markdown or Path(options.out or "").suffix == ".md"
    text = (markdown_report if is_markdown else html_report)(path, now=now)
    output = options.out or ("-" if is_markdown else f"{path.name}.html")
    if output == "-":
        return text
    write_output(Path(output), text.encode(errors="replace").decode())  # the name of a run may not be UTF-8
    return f"report  {output}\n"


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
        ["Tags: " + ", ".join(map(escape, snapshot.tags))] if snapshot.tags else [],
        [escape(strip_escapes(snapshot.note))],
        ["| | measured | plan | |", "|---|---:|---:|---:|", *rows] if rows else [],
        [f"- {escape(note)}" for note in snapshot.notes],
        section("What happened", explanation(snapshot)),
        section("Curves", fenced(curves(snapshot.series))),
        section("Results of paceline eval", evaluations(snapshot)),
        section("Where the time went", time_spent(snapshot)),
        section("Attempts", attempts(snapshot) if len(snapshot.attempts) > 1 else ()),
        section("Events", events(snapshot)),
        section("Findings of the checks", (f"- {escape(str(finding.get('what')))}" for finding in snapshot.findings)),
        section("Machine", (machine(**facts) for facts in about["facts"])),
        section("Sample", (line for sample in about["samples"][:1] for line in sample_lines(**sample))),
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
    lines = [f"**{why['cause']}**: {escape(format_summary(snapshot.explanation))}"]
    if fix := why["fix"] and str(why["fix"]):
        lines += ["", f"**Fix:** {with_commands(fix)}"]
    evidence = [f"{line['place']}  {line['text']}" for block in why["blocks"][:1] for line in block["lines"]]
    return [*lines, "", *fenced("\n".join(evidence))] if snapshot.explanation.get("evidence") else lines


def curves(series: dict[str, Series]) -> str:
    drawn = {name: curve for name, curve in series.items() if len(finite(curve.values)) > 1}
    wide, lines = max(map(cells, drawn), default=0), []
    for name, curve in drawn.items():
        first, last = (format_measure(name, curve.values[at]) for at in (0, -1))
        lines.append(
            f"{pad(name, wide)}  {steady_line(curve, SPARKLINE_WIDTH, curve_look(name)[2])}  {first} to {last}"
        )
    return "\n".join(lines)


def evaluations(snapshot: Snapshot) -> list[str]:
    rows = [f"| {escape(text)} | {' | '.join(row)} |" for text, *row, _ in evaluation_rows(snapshot.evaluations)]
    return ["| text | step | val_bpb | tokens |", "|---|---:|---:|---:|", *rows] if rows else []


def time_spent(snapshot: Snapshot) -> list[str]:
    goodput = goodput_panel(snapshot)
    if goodput is None:
        return []
    rows = [f"| {row['name']} | {row['duration']} | {row['percent']} |" for row in goodput["rows"]]
    return ["| | | |", "|---|---:|---:|", *rows, "", goodput["energy"] or ""]


def attempts(snapshot: Snapshot) -> Iterator[str]:
    for attempt in snapshot.attempts:
        line = f"{attempt.attempt}. {format_time(attempt.time)} UTC: {attempt_outcome(snapshot, attempt)}"
        line += f"; {escape(attempt.changes)}" if attempt.changes else ""
        line += f"; {attempt.cause}: {escape(attempt.summary)}" if attempt.summary else ""
        action = action_text(attempt)
        yield line + (f"; {escape(action)}" if action else "")


def events(snapshot: Snapshot) -> Iterator[str]:
    for event in [event for event in snapshot.events if event.kind != "sample"][-MAX_EVENTS:]:
        time = f"{datetime.fromtimestamp(event.time, UTC):%m-%d %H:%M:%S}" if event.time else ""
        yield f"- {time}  {escape(event.text)}"


def machine(host: str, rows: Sequence[tuple[str, str]]) -> str:
    return f"- {escape(host)}: " + ", ".join(f"{name} {escape(value)}" for name, value in rows)


def sample_lines(name: str, prompt: str, text: str) -> list[str]:
    """Returns a sample with the prompt apart from what the model wrote."""
    if not prompt or not text.startswith(prompt):
        return fenced(text)
    written = text.removeprefix(prompt)
    return [f"Held-out text, at {name}:", "", *fenced(prompt), "", "Continued by the model:", "", *fenced(written)]


def fenced(text: str) -> list[str]:
    fence = "```"
    while fence in text:
        fence += "`"
    return [f"{fence}text", text, fence] if text else []


def escape(text: str) -> str:
    """Returns text that Markdown and HTML show as it is."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", text.replace("\n", " ")) if re.search(r"[\\`*\[\]<>|]", text) else text
