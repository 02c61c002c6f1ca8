"""
The terminal view's list of runs, from which one is opened, and two runs compared: curves over each other, settings that differ.
`paceline runs` lists runs as text; `paceline runs show` prints one run, or several with these settings.

Pure, but for `list_runs`, `show_runs` and `differing_settings`, which read the run folders.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, combinations
from pathlib import Path
from typing import Any, get_args

from paceline.errors import PacelineError, nearest
from paceline.explain.lines import strip_escapes
from paceline.explain.series import natural_order
from paceline.run_options import RunsOptions
from paceline.rundir import RunDir, read_json_lines
from paceline.terminal import cells, cut, pad, terminal_width, without_middle
from paceline.units import format_count
from paceline.watch.about import evaluations_by_title, format_evaluation, read_about, read_evaluations, short_texts
from paceline.watch.events import AUTO, format_setting
from paceline.watch.measures import METRICS, format_figure, format_measure, format_time
from paceline.watch.snapshot import LIVE, Evaluation, Snapshot, State, finite
from paceline.watch.status import RunStatus, format_run, format_steps, lost_runs, open_reader, run_json, run_status
from paceline.watch.summary import LEVEL_SIGNS, STATE_SIGNS
from paceline.watch.terminal import chart
from paceline.watch.terminal.line import EMPTY, Line, clean, heading, section, side_by_side, split_width

COMPARED = ("loss", "val_bpb")
WIDE = 100  # columns from which two charts stand side by side, and a run's last activity is shown
NUMBERS = 58  # columns of a row without the name
STYLES = ("blue", "orange")  # of the two runs
MAX_NAME = 40  # columns of a run's name above its settings
MIN_NAME, MIN_NOTE = 20, 12  # columns of a name and of a note in the list of runs
HEAD = (
    "run", "state", "step", "loss", "val_bpb", "eval_tokens", "eval_text", "eval", "eval of", "tok/s",
    "last activity (UTC)", "tags",
)  # fmt: skip
# in the order in which a narrow list leaves them out
NARROW_WITHOUT = ("last activity (UTC)", "tok/s", "eval_text", "eval of", "eval_tokens", "tags")
RARE = ("eval_tokens", "eval_text", "eval of")  # columns that are shown where the runs differ in them
LEFT = ("run", "state", "eval_text", "eval of", "tags")  # columns of texts
SIGNS = {"step": -1, "tok_per_sec": -1}  # of what a list begins with the largest of
NUM_HEADINGS = 2  # lines above the first run
Setting = tuple[str, ...]  # name, and its value in each run


@dataclass(frozen=True)
class RunChoice:
    """The runs that can be opened, what the keys have chosen, and the run that is compared."""

    runs: Sequence[RunStatus] = ()
    chosen: int = 0
    other: Snapshot | None = None  # None: it is being read
    settings: Sequence[Setting] = ()  # that differ

    def active(self, shown: Snapshot | None) -> list[str]:
        """Returns the names of the runs that go on, without that of the one which is shown and of those in Slurm's queue."""
        return [run.name for run in self.runs if run.state in LIVE[1:] and (shown is None or run.name != shown.name)]

    @property
    def path(self) -> Path:
        return Path(self.runs[min(self.chosen, len(self.runs) - 1)].path)


def runs_page(choice: RunChoice, *, opened: str, width: int) -> list[Line]:
    """A line for each run, the latest first. opened: the path of the run that is shown."""
    runs, chosen = choice.runs, choice.chosen
    room = width - NUMBERS - (21 if width >= WIDE else 0)
    titles = f"   {pad('run', room)}  {'state':<13}{'step':>15}{'loss':>8}{'val_bpb':>8}{'tok/s':>8}"
    titles += f"{'last activity (UTC)':>21}" if width >= WIDE else ""
    lines = [heading(f"runs: {len(runs):,}", width), ((titles, "faint"),)]
    for number, run in enumerate(runs):
        sign, style = STATE_SIGNS.get(run.state, STATE_SIGNS["unknown"])
        if run.notes and style == "good":
            sign, style = LEVEL_SIGNS["warning"]
        speed = "n/a" if run.tok_per_sec is None else format_count(run.tok_per_sec)
        values = (
            f"{format_steps(run):>15}{format_figure('loss', run.loss):>8}{format_figure('val_bpb', run.val_bpb):>8}"
        )
        values += f"{speed:>8}" + (f"{format_time(run.time or 'n/a'):>21}" if width >= WIDE else "")
        name, mark = pad(cut(clean(run.name), room), room), "*" if run.path == opened else " "
        lines.append(
            (
                (f"{mark}{'>' if number == chosen else ' '} ", "key"),
                (name, "active" if number == chosen else "strong" if run.path == opened else ""),
                (f"  {sign} {run.state:<11}", style),
                (values, ""),
            )
        )
    return lines if runs else [*lines, ((" no runs here", "faint"),)]


def compare_page(left: Snapshot, choice: RunChoice, *, width: int, height: int) -> list[Line]:
    """The curves of two runs over each other, the second one dashed, and the settings that differ."""
    if (right := choice.other) is None:
        return [((" reading ...", "faint"),)]
    pair = left, right
    below = two_columns("eval of", compared_evaluations(left.evaluations, right.evaluations), pair, width=width)
    below = section("last results of paceline eval", below, width) if below else []
    settings = two_columns("setting", choice.settings, pair, width=width) or [((" none", "faint"),)]
    below += section("settings that differ", settings, width)
    names = [name for name in COMPARED if any(snapshot.series.get(name) for snapshot in pair)]
    names = names or sorted({*left.series, *right.series})[:2]
    half = max(12, width // 2 - 8)
    lines: list[Line] = [
        (
            (" ━━ ", STYLES[0]),
            (cut(clean(left.name), half), "strong"),
            ("   ╌╌ ", STYLES[1]),
            (cut(clean(right.name), half), "strong"),
        )
    ]
    columns = len(names) if width >= WIDE else 1
    chart_height = max(8, (height - 2 - min(len(below), height // 3)) // (1 if columns > 1 else max(1, len(names))))
    if columns > 1:
        widths = split_width(width, [1] * columns)
        blocks = [
            both_curves(pair, name, width=room, height=chart_height) for name, room in zip(names, widths, strict=True)
        ]
        lines += side_by_side(list(zip(blocks, widths, strict=True)))
    else:
        lines += [line for name in names for line in both_curves(pair, name, width=width, height=chart_height)]
    return [*lines, *below]


def two_columns(title: str, rows: Sequence[Setting], pair: Sequence[Snapshot], *, width: int) -> list[Line]:
    """Returns the values of two runs below their names; nothing without rows."""
    if not rows:
        return []
    table = [(title, *(snapshot.name for snapshot in pair)), *rows]
    wide = min(max(cells(clean(name)) for name, *_ in table) + 2, width // 3)
    room = (width - wide) // 2 - 1
    return [
        (
            (f" {pad(cut(clean(name), wide - 1), wide)}", "faint"),
            (pad(cut(clean(a), room - 1), room), STYLES[0]),
            (cut(clean(b), room), STYLES[1]),
        )
        for name, a, b, *_ in table
    ]


def both_curves(pair: tuple[Snapshot, Snapshot], name: str, *, width: int, height: int) -> list[Line]:
    title, _, least_span = chart.curve_look(name)
    if name in METRICS and all(snapshot.kind == "training" for snapshot in pair):
        title += f", {METRICS[name].about.partition(',')[0]}"
    axis = "line" if all(snapshot.step is None for snapshot in pair) else "step"
    curves = [
        (snapshot.series[name], style) for snapshot, style in zip(pair, STYLES, strict=True) if name in snapshot.series
    ]
    last = [(f" {format_measure(name, series.values[-1])}", style) for series, style in curves if series.values]
    lines = chart.chart(*curves, width=width, height=height - 1, least_span=least_span, axis=axis)
    return [heading(title, width, right=tuple(last)), *lines] if curves else [heading(title, width), EMPTY]


def list_runs(runs: Sequence[RunStatus], options: RunsOptions, *, width: int | None) -> str:
    """Returns those of the runs, the latest first, that the options ask for, in their order; runs without a value are last."""

    def place(run: RunStatus) -> tuple[bool, bool, Any]:
        value: Any = getattr(run, options.sort)
        value = value.val_bpb if isinstance(value, Evaluation) else value
        is_other = options.sort == "loss" and run.command is not None  # a script's loss is of another kind
        if value is None or value != value:  # NaN
            return True, is_other, 0
        order = natural_order(Path(value)) if isinstance(value, str) else SIGNS.get(options.sort, 1) * value
        return False, is_other, order

    states = parse_states(options.state)
    tagged = [run for run in runs if {*options.tag} <= {*run.tags}]
    if options.tag and not (tagged or options.json):
        known = sorted({tag for run in runs for tag in run.tags})
        near = nearest(next((tag for tag in options.tag if tag not in known), ""), known)
        fix = f"--tag {near}" if near else f"tags are: {', '.join(known) or 'none; paceline runs tag RUN TAG adds one'}"
        raise PacelineError(f"no run in {options.runs_dir} has the tag {' and '.join(options.tag)}", fix=fix)
    chosen = [run for run in tagged if run.state in states]
    if options.state and not (chosen or options.json):
        text = f"no run in {options.runs_dir} is {' or '.join(options.state)}"
        raise PacelineError(text, fix="paceline runs, without --state, shows those that there are")
    chosen = chosen if options.sort == "time" else sorted(chosen, key=place)
    if options.json:
        return json.dumps(finite(list(map(asdict, chosen))), indent=1)
    folders = () if options.tag or options.state else lost_runs(Path(options.runs_dir))
    notes = (f"{clean(folder.name)}: not listed: no config.toml" for folder in folders)
    return "\n".join([format_runs(chosen, width=width), *notes])


def format_runs(runs: Sequence[RunStatus], *, width: int | None = None) -> str:
    """Returns the list of runs as a table, with the columns RARE where the runs differ in them, and `eval` where one has a result.

    width: the terminal's; None: unlimited. Where the table is wider, it leaves out as few of NARROW_WITHOUT as make it fit.
    """
    shortened = short_texts(run.eval_text for run in runs if run.eval_text)
    titles = short_texts(run.eval.title for run in runs if run.eval)
    rows = [
        (
            strip_escapes(run.name),
            run.state + " !" * (run.state == "finished" and bool(run.notes)),  # explained below the table
            format_steps(run),
            format_figure("loss", run.loss),
            format_figure("val_bpb", run.val_bpb),
            f"{run.eval_tokens:,}" if run.eval_tokens and run.val_bpb else "n/a",
            strip_escapes(shortened[run.eval_text]) if run.eval_text and run.val_bpb else "n/a",
            format_evaluation(run.eval, step=run.step),
            strip_escapes(titles[run.eval.title]) if run.eval else "n/a",
            "n/a" if run.tok_per_sec is None else format_count(run.tok_per_sec),
            format_time(run.time or "n/a"),
            " ".join(run.tags),
        )
        for run in runs
    ]
    columns = {name: values for name, *values in zip(HEAD, *rows, strict=True)}
    shown = {name: len({*columns[name]} - {"n/a"}) > 1 for name in RARE}
    shown |= {"eval": any(run.eval for run in runs), "tags": any(columns["tags"])}
    columns = {name: values for name, values in columns.items() if shown.get(name, True)}
    if width is not None:
        all_columns, least_room = columns, min(MIN_NAME, width_of_column("run", columns["run"]))
        for left_out in chain.from_iterable(
            combinations(NARROW_WITHOUT, count) for count in range(len(NARROW_WITHOUT) + 1)
        ):
            columns = {name: values for name, values in all_columns.items() if name not in left_out}
            if name_room(columns, width) >= least_room:
                break
        names, room = columns["run"], max(MIN_NAME, name_room(columns, width))
        short = [without_middle(name, room) for name in names]
        columns["run"] = [n if short.count(s) > names.count(n) else s for n, s in zip(names, short, strict=True)]
    padded = [
        [pad(cell, width_of_column(name, values), right=name not in LEFT) for cell in (name, *values)]
        for name, values in columns.items()
    ]
    lines = ["  ".join(row) for row in zip(*padded, strict=True)]
    texts = ["note", *(" ".join(strip_escapes(run.note).split()) for run in runs)]
    room = max(map(cells, texts)) if width is None else width - cells(lines[0]) - 2
    if any(texts[1:]) and room >= MIN_NOTE:
        lines = [f"{line}  {cut(text, room)}" for line, text in zip(lines, texts, strict=True)]
    notes = (f"{strip_escapes(run.name)}: {note}" for run in runs for note in run.notes)
    return "\n".join([*map(str.rstrip, lines), *notes])


def width_of_column(name: str, values: Sequence[str]) -> int:
    return max(map(cells, (name, *values)))


def name_room(columns: Mapping[str, Sequence[str]], width: int) -> int:
    """Returns the columns of a terminal that are left for the names of runs."""
    return width - sum(2 + width_of_column(name, values) for name, values in columns.items() if name != "run")


def parse_states(names: Sequence[str]) -> set[str]:
    """Returns the states that are named, in capitals or not; all where none is."""
    named = {name.lower() for name in names} or set(get_args(State))
    if bad := next((name for name in sorted(named) if name not in get_args(State)), None):
        raise PacelineError(f"no state is called {bad}", fix=f"--state takes {', '.join(get_args(State))}")
    return named | ({*LIVE[1:]} if "running" in named else set())


def show_runs(paths: Sequence[Path], *, as_json: bool) -> str:
    """Returns one run at length, or several as in the list with the settings that differ."""
    if len(paths) == 1:
        snapshot = open_reader(paths[0]).update()
        return json.dumps(run_json(snapshot), indent=1) if as_json else format_run(snapshot)
    runs, settings = [run_status(RunDir(path)) for path in paths], differing_settings(*paths)
    results = [read_evaluations(run, read_json_lines(run.events)) for run in map(RunDir, paths)]
    if as_json:
        rows = {name: values for name, *values in settings}
        evaluations = [list(map(asdict, of_run)) for of_run in results]
        fields = {"runs": list(map(asdict, runs)), "evaluations": evaluations, "settings": rows}
        return json.dumps(finite(fields), indent=1)
    names = [without_middle(clean(run.name), MAX_NAME) for run in runs]
    tables = [[("eval of", *names), *compared_evaluations(*results)], [("setting", *names), *settings]]
    texts = ["\n".join(table_lines(table)) for table in tables if len(table) > 1]
    last = [] if settings else ["no settings differ"]
    return "\n\n".join([format_runs(runs, width=terminal_width()), *texts, *last])


def table_lines(rows: Sequence[Setting]) -> list[str]:
    """Returns rows with straight columns."""
    table = [[clean(cell) for cell in row] for row in rows]
    widths = [max(map(cells, column)) for column in zip(*table, strict=True)]
    return ["  ".join(map(pad, row, widths)).rstrip() for row in table]


def compared_evaluations(*results: Sequence[Evaluation]) -> list[Setting]:
    """Returns a row for each text that `paceline eval` has measured one of the runs on, with the last result of each run.

    The step of the checkpoint stands behind the text where it is the same for all, else behind each result.
    """
    runs, rows = list(map(evaluations_by_title, results)), list[Setting]()
    for title in sorted(set().union(*runs)):
        row = [run.get(title) for run in runs]
        steps = [f" at step {result.step:,}" if result else "" for result in row]
        (shared,) = shown if len(shown := {*steps} - {""}) == 1 else [""]
        bpbs = [format_figure("val_bpb", result.val_bpb) if result else "n/a" for result in row]
        rows.append((title + shared, *(bpb + ("" if shared else step) for bpb, step in zip(bpbs, steps, strict=True))))
    return rows


def differing_settings(*paths: Path) -> list[Setting]:
    """Returns what differs in the configs of runs, and in the machines and the software that they ran on.

    Beside a script, which has no keys of a training, only what all have is compared; of commands the arguments that differ.
    """
    runs = [settings_of(path) for path in paths]
    with_command = [settings for settings in runs if isinstance(settings.get("command"), list)]
    options = [options_of(settings["command"]) for settings in with_command]
    has_one_set = len(set(map(frozenset, options))) < 2  # in another order
    for settings, own in zip(with_command, options, strict=True):
        differing = [option for option in own[1:] if has_one_set or not all(option in others for others in options)]
        settings["command"] = " ".join([own[0], *differing])
    names = dict.fromkeys(name for settings in runs for name in settings if name != "name")
    if 0 < len(with_command) < len(runs):
        names = {name: None for name in names if name == "command" or all(name in settings for settings in runs)}
    rows = [(name, *(format_setting(settings.get(name, "n/a")) for settings in runs)) for name in names]
    return [row for row in rows if len({value.removesuffix(f" ({AUTO})") for value in row[1:]}) > 1]


def options_of(command: Sequence[str]) -> list[str]:
    """Returns the program of a command, then its options, each with its values, as a shell takes them."""
    groups: list[list[str]] = [[]]
    for word in map(str, command):
        groups += [[]] if word.startswith("-") and groups[0] else []
        groups[-1].append(word)
    return list(map(shlex.join, groups))


def settings_of(path: Path) -> dict[str, Any]:
    about = read_about(RunDir(path))
    return {**about["config"], **about["setup"]}
