"""
Numbers over steps from the files in which trainers and their trackers leave them, whatever their format.

TensorBoard event files, offline files of Weights & Biases, trainer_state.json of the Hugging Face Trainer, Lightning's metrics.csv,
JSON lines such as our own metrics.jsonl. KINDS says which of their many names mean the same. A step that comes a second time, after
a resume, replaces what was recorded from that step on. What is damaged is left out, and a note says so; so is, without a note, a
last line or record that is cut: its writer may still write it.
"""

import csv
import io
import json
import math
import os
import re
import shlex
from bisect import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import islice, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

from paceline.errors import PacelineError
from paceline.explain.event_files import Report, read_event_file, read_wandb_file
from paceline.explain.line_measures import ERROR_NAME, HELD_OUT_PART, HELD_OUT_WORD, PART_FIELDS
from paceline.explain.log_text import START_BYTES, message_column, unreadable_log
from paceline.rundir import RunDir, json_records, open_file
from paceline.units import format_number_of, unix_time

LOSS, VALIDATION, GRADIENT, RATE = "loss", "validation loss", "gradient norm", "learning rate"
MEMORY, THROUGHPUT, STEP_TIME, REWARD, SCORE = "memory", "throughput", "step time", "reward", "score"
ACCURACY, PART_LOSS = "accuracy", "loss of a part"  # of training; of a part of the model, such as a discriminator
PENALTY = "penalty"  # beside the loss; it may rise
OF_A_PART = (LOSS, PART_LOSS, ACCURACY)  # kinds whose record may say of which part of the text they are
HELD_OUT, ERROR = rf"(?:{HELD_OUT_WORD}|validation_metrics)", f"(?:logloss|{ERROR_NAME})"
KINDS = (  # a kind, and the names that mean it, in lower case with _ between words: the first that matches counts
    (VALIDATION, rf"(?:.+_)?{HELD_OUT}(?:_.+)?_(?:loss|{ERROR})(?:_epoch|_step)?|loss_{HELD_OUT}|lm_loss_validation"),
    (
        LOSS,
        r"(?:(?:train|training|trainer|metrics|samples|loss_metrics|loss)_)*"
        r"(?:(?:lm|per|global_avg|reduced_train|tot|total|ce|nll|cross_entropy|running|step|batch|epoch|mean|avg)_)*"
        rf"(?:(?:\w*log|\w*cross_?entropy_?)?loss(?:_step|_epoch|_avg|_total|_tra?i?n|_training)?|{ERROR}(?:_tra?i?n|_epoch|_step)*)",
    ),
    (GRADIENT, r"(?:.+_)?grad(?:ient)?s?(?:_[\d_]+)?_?norm(?:_total|_step)?"),
    (RATE, r"(?:.+_)?(?:lr|learning_rate|lr_mult|lrm)(?:_\w+)?"),
    (
        MEMORY,
        r"(?!.*(?:retries|ooms))(?:(?:.+_)?mem(?:ory)?(?:_?\w*(?:activ|alloc|reserv|used|usage|rss)\w*|_percent)?|peak_bytes"
        r"|.+_used_bytes|.*(?:ram|cgroup)_used|.*(?:allocated|reserved)_bytes_all_current)",
    ),
    (
        THROUGHPUT,
        rf"(?!(?:.+_)?{HELD_OUT}_)(?:.+_)?(?:(?:tok|tokens?|samples?|items|batches|steps|it|iterations)_per_sec(?:ond)?"
        r"(?:_per_(?:gpu|device))?|tps|throughput(?:_tps)?)",
    ),
    (
        STEP_TIME,
        r"(?:(?:train|perf|timing_s|time_metrics)_)?(?:step_ms|dt|(?:iter|iteration|step|batch)_time(?:_ms|_s)?|time_per_step"
        r"|end_to_end_s|step_timing_in_s)",
    ),
    (SCORE, rf"{HELD_OUT}_(?:acc|accuracy|f1|auc|auroc)"),
    (ACCURACY, r"(?:.+_)?acc(?:uracy)?"),
    (REWARD, r"(?:train_|objective_|critic_|actor_)?(?:rewards?(?:_mean)?|(?:approx_|ppo_)?kl)"),
    (REWARD, rf"(?:.+_)?(?:{HELD_OUT}|train|ep\w*|mean|av\w+|running)_(?:reward|return)s?(?:_mean)?"),
    (PENALTY, r"(?:.+_)?(?:kl|kld|entropy|reg|regulari[sz]ation)_loss"),
    (PART_LOSS, r"(?:.+_)?loss"),
)
STEP_NAMES = (  # the first that a record has is its step
    "train/global_step", "trainer/global_step", "global_step", "step", "current_steps", "iteration", "iter", "_step", "epoch",
)  # fmt: skip
PART = re.compile(rf"{HELD_OUT}|train|training|health")  # the name of a folder with one part of a run's event files
Reader = Callable[[BinaryIO, "SeriesTable", Report], None]
Kinds = Callable[[str], str | None]
EXPORTED, TAG = ["Wall time", "step", "Value"], re.compile(r"tag-(.+?)(?:[_ (]+\d+[)_]*)?$")  # TensorBoard's download
ALL_STEPS = "all steps are done"  # a note on a trainer's state
FLAT_OBJECT = re.compile(r"\{[^{}]*\}")
WORDS = re.compile(r"[^a-z0-9]+")
MAX_FOLDERS, MAX_DEPTH = 1000, 6  # below a run's, that are searched for files of metrics
MAX_LARGE, MAX_NEW = 8, 4  # files of metrics that are read of an attempt: the largest and the newest
FIRST_OF = 50  # shares of an epoch's steps
MAX_JUDGED_BYTES = 8 << 20  # of a file of metrics that is judged after each attempt
MAX_CLOCK_LAG_S = 60.0  # of a file server behind the host of the first attempt
SAME_LENGTH = 0.9  # of the steps of an attempt's longest file: files of its other ranks have about as many


@dataclass(frozen=True)
class MetricSeries:
    """One curve of a file, its steps ascending. times: Unix seconds, NaN where unknown."""

    name: str
    kind: str
    source: str
    steps: list[int]
    values: list[float]
    times: list[float]

    @property
    def finite(self) -> list[float]:
        return list(filter(math.isfinite, self.values))


@cache
def kind_of(name: str) -> str | None:
    """What a metric of this name measures; None for an unknown name."""
    if name.endswith(("__MIN", "__MAX")):  # beside each column of W&B's exported CSV, which are named "RUN - NAME"
        return None
    words = WORDS.sub("_", name.lower()).strip("_").replace("losses", "loss")
    return next((kind for kind, pattern in KINDS if re.fullmatch(pattern, words)), None)


class SeriesTable:
    """Collects points of known kinds, by name, in the order in which they were written. kinds: of names, if other ones count."""

    def __init__(self, source: str, *, prefix: str = "", kinds: Kinds | None = None):
        self.source, self.prefix, self._kinds = source, prefix, kinds or kind_of
        self.has_runs = False  # in the names, before " - "
        self.end, self.num_rows, self.header = 0, 0, ""  # where the file's next record begins; rows and header of a CSV
        self.counts_rows = False  # because a record names no step
        self._has_epochs = False  # in place of steps, so that each return to the first is another run
        self._points: dict[tuple[str | None, str], list[tuple[int, float, float]]] = {}  # by part and name

    def kind_of(self, name: str) -> str | None:
        return self._kinds(name.rpartition(" - ")[2] if self.has_runs else name)

    def add(self, name: str, step: int, field: Any, time: float, *, part: str | None = None) -> None:
        """Adds a field of a known kind, if it is a number. part: of the text, of a loss or an accuracy that is measured on it."""
        kind = self.kind_of(self.prefix + name)
        if kind is not None and (value := number_of(field)) is not None:
            part = part if kind in OF_A_PART else None
            self._points.setdefault((part, name), []).append((step, value, time))

    def add_record(
        self, record: Mapping[str, Any], *, number: int, time: float = math.nan, step: int | None = None
    ) -> int:
        """Adds every number of a record; returns its step. number: of the record, which is its step if it names none."""
        for name in STEP_NAMES if step is None else ():
            value = number_of(record.get(name))
            if value is not None and math.isfinite(value):
                step, self._has_epochs = int(value), name == "epoch"
                break
        if step is None:
            step, self.counts_rows = number, True
        part = held_out_part(record)
        for name, field in record.items():
            if name is not None:
                self.add(name, step, field, time, part=part)
        return step

    def take_series(self) -> list[MetricSeries]:
        """Returns and forgets the points added since the last call. A part that all losses name tells nothing, as of a stage."""
        series = []
        parts = {part for part, name in self._points if self.kind_of(self.prefix + name) in OF_A_PART}
        for (part, name), points in filter(itemgetter(1), self._points.items()):
            is_of_part = part and len(parts) > 1 and "train" not in name.lower()
            name = self.prefix + (f"{part}/{name}" if is_of_part else name)
            steps, values, times = map(list, zip(*in_order(points, are_epochs=self._has_epochs), strict=True))
            series.append(MetricSeries(name, str(self.kind_of(name)), self.source, steps, values, times))
            points.clear()
        return series


def held_out_part(record: Mapping[str, Any]) -> str | None:
    """The part of the text that a record says it names, such as eval by "mode": "Evaluation", if the training does not see it."""
    texts = (text for name in PART_FIELDS if isinstance(text := record.get(name), str))
    matches = (re.fullmatch(HELD_OUT_PART, text, re.IGNORECASE) for text in texts)
    return next((match["part"].lower() for match in matches if match), None)


def in_order(points: Sequence[tuple[int, float, float]], *, are_epochs: bool) -> list[tuple[int, float, float]]:
    """The points with ascending steps: one whose step was there before replaces that step and all after it.

    A step that returns to the first ones several times counts within an epoch, or was never set: then the points are counted.
    are_epochs: the steps are epochs, which return for another run.
    """
    first, steps = points[0][0], [step for step, _, _ in points]
    starts = (step for step, after in pairwise(steps) if after <= first + max(0, step - first) // FIRST_OF)
    if sum(step <= first or not are_epochs for step in starts) > 1:
        return [(number, value, time) for number, (_, value, time) in enumerate(points, 1)]
    ordered: list[tuple[int, float, float]] = []
    for point in points:
        while ordered and ordered[-1][0] >= point[0]:
            ordered.pop()
        ordered.append(point)
    return ordered


def number_of(field: Any) -> float | None:
    """The field as a number, also if it is text; None if it is none."""
    if isinstance(field, bool) or not isinstance(field, int | float | str):
        return None
    with suppress(ValueError, OverflowError):
        return float(field)
    return None


def is_metric_file(path: Path, *, in_folder: bool = False) -> bool:
    """Whether a file's name is one of metrics. in_folder: it was not passed by name, and any CSV file may be any table."""
    if path.suffix != ".csv" or path.name == "metrics.csv":
        return reader_of(path) is not None
    if in_folder:
        return False
    with suppress(OSError), open_file(path) as file:
        return not message_column(file.readline(START_BYTES))
    return True  # read_series tells why it cannot be read


def reader_of(path: Path) -> Reader | None:
    return next((reader for pattern, reader in READERS if pattern.search(path.name)), None)


def read_series(files: Iterable[Path], table: SeriesTable | None = None) -> tuple[list[MetricSeries], list[str]]:
    """The curves of the newest run among these files, and notes on what was left out. table: of the one file, which is read on."""
    paths = sorted({path.resolve(): path for path in files}.values(), key=natural_order)
    folders = {path.parent for path in paths}

    def run_of(path: Path) -> tuple[Path, Reader | None]:
        folder = path.parent
        is_part = folder.parent in folders or PART.fullmatch(folder.name.lower())
        return folder.parent if is_part else folder, reader_of(path)

    notes: list[str] = []
    newest = max(paths, key=lambda path: (path.stat().st_mtime_ns, path))
    is_events = reader_of(newest) is read_events
    chosen = [path for path in paths if run_of(path) == run_of(newest)] if is_events else [newest]
    if others := len(paths) - len(chosen):
        number = format_number_of(others, "other file with metrics", "other files with metrics")
        notes.append(f"judged {newest}, the newest, without {number}")
    tables = {path.parent: table for path in chosen} if table else {}
    start = table.end if table else 0
    for path in chosen:
        table = tables.setdefault(path.parent, SeriesTable(str(path)))
        table.prefix = "" if path.parent == run_of(path)[0] else f"{path.parent.name}/"
        reader = reader_of(path) or read_json_metrics
        messages: list[str] = []
        try:
            with open_file(path) as file:
                file.seek(start)
                reader(file, table, messages.append)
                table.end = file.tell()
        except OSError as error:
            raise unreadable_log(path, error) from error
        notes += (f"{path.name}: {message}" for message in messages)
    return [series for table in tables.values() for series in table.take_series()], notes


def written_metrics(run: RunDir, starts: Sequence[float]) -> dict[int, list[Path]]:
    """Returns the files of metrics in a script's run folder, by the number of the attempt. starts: of the attempts.

    What is older than the first attempt is not of the run. Links may lead out of the folder. A trainer's state is written with
    its checkpoints alone.
    """
    files: dict[int, list[tuple[int, float, Path]]] = {}
    for parent, folders, names in islice(os.walk(run.path), MAX_FOLDERS):
        depth, trackers = len(Path(parent).relative_to(run.path).parts), run.track("").parent.name
        folders[:] = [name for name in folders if depth < MAX_DEPTH and (depth or name != trackers)]
        for path in (Path(parent, name) for name in names if name != "trainer_state.json"):
            with suppress(OSError):
                if path.is_symlink() or not is_metric_file(path, in_folder=True):
                    continue
                stat = path.stat()
                attempt = bisect(starts, stat.st_mtime) or bisect(starts[:1], stat.st_mtime + MAX_CLOCK_LAG_S)
                if attempt:
                    files.setdefault(attempt, []).append((stat.st_size, stat.st_mtime, path))
    chosen = {}
    for attempt, sized in sorted(files.items()):
        newest = sorted(sized, key=itemgetter(1))[-MAX_NEW:]
        chosen[attempt] = sorted({path for *_, path in sorted(sized)[-MAX_LARGE:] + newest}, key=natural_order)
    return chosen


def training_series(paths: Sequence[Path]) -> tuple[list[MetricSeries], list[str]]:
    """The curves of the training among an attempt's files, and notes on what was left out; none where no file names steps."""
    curves, notes, ends = dict[Path, list[MetricSeries]](), dict[Path, list[str]](), dict[Path, tuple[bool, int]]()
    for path in paths:
        with suppress(OSError, PacelineError):  # it may vanish
            if path.stat().st_size > MAX_JUDGED_BYTES:
                return [], [f"metrics were not judged, they are long: paceline explain {shlex.quote(str(path.parent))}"]
            curves[path], notes[path] = read_series([path], table := SeriesTable(str(path)))
            if curves[path] and not table.counts_rows:
                has_loss = any(item.kind == LOSS for item in curves[path])
                ends[path] = has_loss, max(item.steps[-1] for item in curves[path])
    if not ends:
        return [], []
    path = training_file(ends)
    folder = path.parent.parent if PART.fullmatch(path.parent.name.lower()) else path.parent
    parts = [p for p in ends if reader_of(p) is reader_of(path) is read_events and folder in p.parents[:2]]
    return read_series(parts) if len(parts) > 1 else (curves[path], notes[path])


def training_file(ends: Mapping[Path, tuple[bool, int]]) -> Path:
    """Returns the file that shows an attempt's training. ends: whether each has a loss of training, and its last step.

    What was last written before the folder of another file was begun is of an earlier training, such as the fold before. Of
    the files that have come about as far as the longest, such as those of two ranks, it is always the first.
    """
    has_loss = any(loss for loss, _ in ends.values())
    steps = {path: step for path, (loss, step) in ends.items() if loss == has_loss}
    written = {path: (modified(path), modified(path.parent)) for path in steps}
    pairs = [(path, other) for path in steps for other in steps if path.parent != other.parent]
    over = {path for path, other in pairs if written[path][0] < min(written[other])}
    last = max(step for path, step in steps.items() if path not in over)
    return next(p for p, step in steps.items() if p not in over and step >= min(last, SAME_LENGTH * last))


def modified(path: Path) -> float:
    """When a file, or the list of the files in a folder, was last changed; 0 where it is gone."""
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def natural_order(path: Path) -> list[str | int]:
    """Numbers by value: a writer of TensorBoard counts its files in their names, and 10 comes after 9."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", str(path))]


def read_events(file: BinaryIO, table: SeriesTable, report: Report) -> None:
    for scalar in read_event_file(file, report):
        table.add(scalar.name, scalar.step, scalar.value, scalar.time)


def read_wandb(file: BinaryIO, table: SeriesTable, report: Report) -> None:
    """A sample of the machine counts for the step that was logged before it, and the last one for each step."""
    step = sampled = -1
    for number, (row, time, is_sample) in enumerate(read_wandb_file(file, report)):
        if not is_sample:
            step = table.add_record(row, number=number, time=time)
        elif step > sampled:
            sampled = table.add_record(row, number=number, time=time, step=step)


def read_trainer_state(file: BinaryIO, table: SeriesTable, report: Report) -> None:
    text = file.read().decode("utf-8", "replace")
    try:
        state = json.loads(text)
        records = state["log_history"]
        if 0 < (state.get("max_steps") or 0) <= (state.get("global_step") or 0):
            report(ALL_STEPS)
    except (ValueError, KeyError, TypeError):
        objects = (match[0] for match in FLAT_OBJECT.finditer(text))
        records = [record for record in json_records(objects) if "step" in record]
        report(f"not whole: read {len(records):,} records")
    for number, record in enumerate(record for record in records if isinstance(record, dict)):
        table.add_record(record, number=number)


def read_csv(file: BinaryIO, table: SeriesTable, report: Report) -> None:
    start, content = file.tell(), file.read()
    end = max(map(content.rfind, b"\n\r")) + 1
    if start:  # a last row without its end is read when it is whole
        content = content[:end]
    text = table.header + content.decode("utf-8-sig", "replace")
    table.header = re.split(r"[\r\n]", text, maxsplit=1)[0] + "\n"
    delimiter = next((character for character in ",;\t" if character in table.header), ",")
    if delimiter == ";":
        text = text.replace(",", ".")  # decimal commas
    rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)
    tag, num_short, is_short = TAG.search(Path(table.source).stem), 0, False
    try:
        names = [name.lower() if name.lower() in STEP_NAMES else name for name in rows.fieldnames or ()]
        rows.fieldnames = ["wall_time", "step", tag[1]] if tag and names == EXPORTED else names
        table.has_runs = any(name.endswith("__MIN") for name in names)
        for row in rows:
            is_short = None in row.values()
            num_short += is_short
            if not is_short:
                table.add_record(row, number=table.num_rows)
            table.num_rows += 1
    except csv.Error as error:
        report(f"damaged in line {rows.line_num:,}: {error}; what follows was left out")
    has_end = end == len(content)
    is_cut = is_short and not has_end
    table.num_rows -= is_cut
    file.seek(start + end if has_end or is_cut else 0)  # 0: a row counts that may still grow
    if num_short := num_short - is_cut:
        report(f"left out {format_number_of(num_short, 'row')} with too few columns")


def read_json_metrics(file: BinaryIO, table: SeriesTable, report: Report) -> None:
    lines = [line for line in file if line.strip()]
    records = list(json_records(lines))
    for number, record in enumerate(records):
        table.add_record(record, number=number, time=unix_time(record.get("time")))
    num_lines = len(lines) - (bool(lines) and not lines[-1].endswith(b"\n") and not any(json_records(lines[-1:])))
    if num_cut := num_lines - len(records):
        report(f"left out {format_number_of(num_cut, 'line')} that cannot be parsed, of {num_lines:,}")


READERS: tuple[tuple[re.Pattern[str], Reader], ...] = (  # by the name of a file
    (re.compile(r"tfevents"), read_events),
    (re.compile(r"\.wandb$"), read_wandb),
    (re.compile(r"(?:^|[._-])trainer_state\.json$"), read_trainer_state),
    (re.compile(r"\.csv$"), read_csv),
    (re.compile(r"^(?:metrics|trainer_log)\.jsonl$"), read_json_metrics),
)
CONTINUED = (read_events, read_csv)  # they can begin in the middle of a file
