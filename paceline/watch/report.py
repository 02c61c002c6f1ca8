"""
`paceline report`: one run in one file, to keep or to send. The browser's own page with the run inside, or Markdown.

The HTML asks nothing of any server: scripts, styles and numbers are in it, and its content policy forbids the rest. What may
be secret is taken out by the caller's `redact`.
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.rundir import RunDir
from paceline.units import format_bytes, format_count, format_duration, format_energy, format_mfu
from paceline.watch.about import read_about
from paceline.watch.concerns import summary
from paceline.watch.feed import changes, to_text
from paceline.watch.goodput import KINDS
from paceline.watch.show import find_any_run
from paceline.watch.snapshot import Series, Snapshot
from paceline.watch.status import open_reader

STATIC = Path(__file__).parent / "static"
STYLE = re.compile(r'<link rel="stylesheet" href="static/([\w.]+)">\n')
SCRIPT = re.compile(r'<script defer src="static/([\w.]+)"></script>\n')
BARS = "▁▂▃▄▅▆▇█"
BARS_WIDE = 48
EVENTS_TOLD = 30  # in Markdown
FORMATS: dict[str, Callable[[float], str]] = {
    "loss": "{:.4f}".format,
    "val_bpb": "{:.4f}".format,
    "tok_per_sec": "{:,.0f}".format,
    "step_ms": "{:,.0f} ms".format,
    "mfu": format_mfu,
    "peak_bytes": format_bytes,
    "total_s": format_duration,
}


def find_reported(word: str, *, runs_dir: str | None) -> Path:
    """A run folder, a run's name, or a log file."""
    path = Path(word)
    return path if path.is_file() else find_any_run(word, runs_dir=runs_dir or "runs").path


def write_report(output: Path, text: str) -> None:
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PacelineError(f"{output} cannot be written: {error.strerror}", fix="--output FILE, elsewhere") from error


def html_report(path: Path, *, now: float, redact: Callable[[Any], Any] = lambda value: value) -> str:
    """path: a run folder or a log file."""
    snapshot, about = read(path)
    says = summary(snapshot, now=now)
    told = {
        **changes(None, snapshot),
        "run": snapshot.name,
        "now": now,
        "summary": says and asdict(says),
        "about": about,
    }
    for log in told["parts"]["logs"]:
        log["path"] = Path(log["path"]).name
    return page_with(redact(told), title=f"{snapshot.name} · paceline")


def read(path: Path) -> tuple[Snapshot, dict[str, Any]]:
    snapshot = open_reader(path).update()
    return snapshot, read_about(RunDir(path)) if path.is_dir() else {}


def page_with(report: dict[str, Any], *, title: str) -> str:
    """index.html with all that it loads put into it, in the same order."""
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    style = "\n".join(map(static_text, STYLE.findall(page)))
    script = "\n".join(map(static_text, SCRIPT.findall(page)))
    policy = f"default-src 'none'; style-src '{hash_of(style)}'; script-src '{hash_of(script)}'; img-src data:"
    held = to_text(report).replace("<", "\\u003c")  # no text of a run can end the element it stands in
    inside = [
        f'<script type="application/json" id="report">{held}</script>',
        f"<script>{script}</script>\n</body>",
    ]
    page = SCRIPT.sub("", STYLE.sub("", page))
    page = page.replace("<title>paceline</title>", f"<title>{escaped(title)}</title>\n<style>{style}</style>")
    page = page.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{policy_tag(policy)}')
    return page.replace("</body>", "\n".join(inside))


def static_text(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def hash_of(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def policy_tag(policy: str) -> str:
    return f'<meta http-equiv="Content-Security-Policy" content="{policy}">'


def escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def markdown_report(path: Path, *, now: float, redact: Callable[[Any], Any] = lambda value: value) -> str:
    """For an issue, a pull request or a notebook of experiments."""
    snapshot, about = read(path)
    says = summary(snapshot, now=now)
    blocks = [
        [f"# {plain(snapshot.name)}: {snapshot.state}", "", *([plain(says.text)] if says else [])],
        [", ".join(how_far(snapshot))],
        figures(snapshot),
        section("What happened", explanation(snapshot.explanation or {})),
        section("Curves", curves(snapshot.series)),
        section("Where the time went", time_spent(snapshot)),
        section("Attempts", list(attempts(snapshot)) if len(snapshot.attempts) > 1 else []),
        section("Events", events(snapshot)),
        section("Findings of the checks", [f"- {plain(str(each.get('what')))}" for each in snapshot.findings]),
        section("Machine", [line for each in about.get("facts", ()) for line in machine(each)]),
        section("Sample", sample(about.get("samples", []))),
        section("Config", config(about.get("config", {}))),
    ]
    return "\n\n".join("\n".join(map(redact, lines)).strip() for lines in blocks if any(lines)) + "\n"


def section(title: str, lines: Sequence[str]) -> list[str]:
    return [f"## {title}", "", *lines] if lines else []


def how_far(snapshot: Snapshot) -> Iterator[str]:
    if snapshot.step:
        yield f"step {snapshot.step:,}" + (f" of {snapshot.num_steps:,}" if snapshot.num_steps else "")
    if snapshot.step and snapshot.tokens_per_step:
        yield f"{format_count(snapshot.step * snapshot.tokens_per_step)} tokens"
    if snapshot.elapsed_s is not None:
        yield f"{format_duration(snapshot.elapsed_s)} in all"
    if snapshot.started is not None:
        yield f"begun {datetime.fromtimestamp(snapshot.started, UTC):%Y-%m-%d %H:%M} UTC"


def figures(snapshot: Snapshot) -> list[str]:
    planned = snapshot.plan or {}
    measured = {name: getattr(snapshot, name, None) for name in FORMATS} | {"total_s": snapshot.elapsed_s}
    rows = []
    for name, write in FORMATS.items():
        have, want = measured[name], planned.get(name)
        if have is None and want is None:
            continue
        over = f"{100 * (have / want - 1):+.0f} %" if have is not None and want else ""
        shown = ["n/a" if value is None else write(value) for value in (have, want)]
        rows.append(f"| {name} | {shown[0]} | {'' if want is None else shown[1]} | {over} |")
    return ["| | measured | plan | |", "|---|---:|---:|---:|", *rows] if rows else []


def explanation(why: dict[str, Any]) -> list[str]:
    if not why:
        return []
    lines = [f"**{why.get('cause')}**: {plain(str(why.get('summary')))}"]
    lines += ["", f"**Fix:** {code(str(why['fix']))}"] if why.get("fix") else []
    evidence = [
        f"{each.get('source') or 'line'}:{each.get('line')}  {each.get('text')}" for each in why.get("evidence", ())
    ]
    return [*lines, "", *fenced("\n".join(evidence))] if evidence else lines


def curves(series: dict[str, Series]) -> list[str]:
    known = {
        name: found for name, each in series.items() if len(found := [v for v in each.values if math.isfinite(v)]) > 1
    }
    wide = max(map(len, known), default=0)
    lines = [
        f"{name:<{wide}}  {bars(values)}  {short(values[0])} to {short(values[-1])}" for name, values in known.items()
    ]
    return fenced("\n".join(lines)) if lines else []


def bars(values: Sequence[float]) -> str:
    """A curve in one line of text: the mean of each of at most BARS_WIDE parts."""
    count = min(BARS_WIDE, len(values))
    parts = [values[len(values) * i // count : len(values) * (i + 1) // count] for i in range(count)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def short(value: float) -> str:
    return format_count(value) if abs(value) >= 1000 else f"{value:.4g}"


def time_spent(snapshot: Snapshot) -> list[str]:
    found = snapshot.goodput
    if found is None or not found.busy_s:
        return []
    spent = sorted(((seconds, kind) for kind, seconds in found.seconds.items() if seconds), reverse=True)
    rows = [
        f"| {KINDS[kind]} | {format_duration(seconds)} | {'' if kind == 'idle' else f'{100 * seconds / found.busy_s:.1f} %'} |"
        for seconds, kind in spent
    ]
    if found.energy_j is not None:
        rows.append(f"| energy of the GPUs | {format_energy(found.energy_j)} | |")
    return ["| | | |", "|---|---:|---:|", *rows]


def attempts(snapshot: Snapshot) -> Iterator[str]:
    for each in snapshot.attempts:
        told = f"{each.attempt}. {each.time[:19].replace('T', ' ')} UTC: {each.state or 'no end was noted'}"
        told += f"; {each.cause}: {plain(each.summary)}" if each.summary else ""
        yield told + (f"; then {each.action}: {plain(each.why or '')}" if each.action else "")


def events(snapshot: Snapshot) -> list[str]:
    told = [each for each in snapshot.events if each.kind != "sample"][-EVENTS_TOLD:]
    when = [datetime.fromtimestamp(each.time, UTC).strftime("%m-%d %H:%M:%S") if each.time else "" for each in told]
    return [f"- {time}  {plain(each.text)}" for time, each in zip(when, told, strict=True)]


def machine(facts: dict[str, Any]) -> list[str]:
    return [f"- {plain(facts['host'])}: " + ", ".join(f"{name} {plain(value)}" for name, value in facts["rows"])]


def sample(samples: Sequence[dict[str, str]]) -> list[str]:
    return fenced(samples[0]["text"]) if samples else []


def config(keys: dict[str, Any]) -> list[str]:
    return (
        fenced("\n".join(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in keys.items()))
        if keys
        else []
    )


def fenced(text: str) -> list[str]:
    fence = "```"
    while fence in text:
        fence += "`"
    return [f"{fence}text", text, fence]


def code(text: str) -> str:
    return f"`{text}`" if "`" not in text else plain(text)


def plain(text: str) -> str:
    """Shown as it stands: what Markdown or HTML would take for its own is escaped."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", text.replace("\n", " ")) if re.search(r"[\\`*\[\]<>|]", text) else text
