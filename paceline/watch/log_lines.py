"""
What the lines of any training log show.

`read_line` takes step, number of steps, loss and speed from a line, as nanochat, nanoGPT, Hugging Face Trainer, Lightning, litgpt,
DeepSpeed, Megatron, torchtitan and paceline print them. It finds steps and losses as paceline.explain does, which also
explains what broke. The framework is shown only where a line can be of no other.
"""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from paceline.explain.line_measures import BAR, PART_LOSS, parse_count, read_step_and_loss, strip_bars
from paceline.explain.lines import split_prefix, strip_escapes
from paceline.explain.progress import EPOCH_OF
from paceline.explain.series import LOSS, training_file
from paceline.rundir import RunDir, is_locked
from paceline.units import unix_time
from paceline.watch.growing_file import (
    STATE_ENDS,
    GrowingFile,
    JsonRecord,
    MetricFinder,
    end_of_metrics,
    file_stamp,
    read_part,
)

MAX_LINE_BYTES = 4000  # a longer line shows no progress
END_BYTES = 64 << 10  # read of a log for a list of runs
UNEVEN = 1.25  # times the share of the epochs that steps over all of them may be ahead or behind

# a line without a match shows no progress
PROGRESS = re.compile(rb"(?i)loss|step|iter|it/s|s/it|bpb|tok|epoch|\d\s*/\s*\d|%\|")
NUMBER = r"(?P<value>[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|(?:nan|inf)\b)"
SEPARATOR = r"['\"]?\s*[:=|]?\s*['\"]?"
STEPS_OF = re.compile(
    r"(?i)(?<![a-z])(?:global[_ ]?steps?|steps?|iter(?:ation)?s?|it|batch)['\"]?\s*[:=# \[(]{0,3}\s*\d[\d,]*\s*/\s*(?P<of>\d[\d,]*)"
)
TOTAL = re.compile(r"/\s*([\d,]+)")  # on a line that may show a number of steps
BAR_SPEED = re.compile(r"(?P<value>\d+(?:\.\d+)?)\s*(?P<unit>it/s|s/it|steps?/s)")
TRAINING_BAR = re.compile(r"(?i)\b(?:epoch|train|step|iter)|^\W*$")
EPOCH_BAR = re.compile(r"(?i)\bepoch:? (?P<epoch>\d+)$")
EPOCH = re.compile(r"['\"]epoch['\"]: ['\"]?(?P<value>\d+\.?\d*)")  # transformers' Trainer
STEP_FIRST = re.compile(r"(?i)^\W*(?:global[_ ]?)?(?:step|iter(?:ation)?)\b")
RUN_SUMMARY = re.compile(r"train_runtime")  # the loss on such a line is the mean of all steps
LOG_MEASURES = (  # name, a text that such a line contains in lower case, the pattern
    ("loss", "loss", rf"(?<![a-z_])(?:train[_ /]?|lm[_ ]|running[_ ])?loss(?:[_ ](?:train|step))?{SEPARATOR}{NUMBER}"),
    ("val_loss", "val", rf"(?:(?<![a-z])(?:e?val|validation)[_ /]?loss|loss train: \S+ val){SEPARATOR}{NUMBER}"),
    ("val_bpb", "bpb", rf"(?:val(?:idation)?[_ ]?)?bpb{SEPARATOR}{NUMBER}"),
    ("tok_per_sec", "tok", rf"(?<![a-z])tok(?:ens)?[/_ ](?:per_)?s(?:ec(?:ond)?)?{SEPARATOR}{NUMBER}"),
    ("tok_per_sec", "tps", rf"(?<![a-z])tps{SEPARATOR}{NUMBER}"),
    ("grad_norm", "norm", rf"(?<![a-z])(?:grad(?:ient)?[_ ]norm|gnorm){SEPARATOR}{NUMBER}"),
    ("lr", "lr", rf"(?<![a-z])lr{SEPARATOR}\[?{NUMBER}"),
    ("lr", "learning", rf"learning[_ ]rate{SEPARATOR}{NUMBER}"),
    ("mfu_percent", "mfu", rf"(?<![a-z])mfu{SEPARATOR}{NUMBER}\s*%?"),
    ("step_ms", "dt", rf"(?<![a-z])dt{SEPARATOR}{NUMBER}\s?(?P<unit>ms|s)\b"),
    ("step_ms", "time", rf"(?:(?:iter|step|batch)[ _]time|, time){SEPARATOR}{NUMBER}\s?(?P<unit>ms|s)\b"),
    ("step_ms", "(ms)", rf"elapsed time per iteration \((?P<unit>ms)\){SEPARATOR}{NUMBER}"),
    ("step_ms", "(s)", rf"(?<![a-z])(?:iter|step) time \((?P<unit>s)\){SEPARATOR}{NUMBER}"),
)
PATTERNS = tuple((name, needle, re.compile(pattern, re.IGNORECASE)) for name, needle, pattern in LOG_MEASURES)
# on a line with a step or a loss, if it has one such value
BARE_SPEEDS = (
    (
        "tok_per_sec",
        re.compile(rf"(?<![\w.,]){NUMBER}\s?tok(?:en)?s?(?:/| per )s(?:ec(?:ond)?)?\b(?![/\w]|['\"]?\s*[:=])"),
    ),
    ("step_ms", re.compile(rf"[|,]\s*{NUMBER}\s?(?P<unit>ms|s)(?:/step)?\s*(?=[|,]|$)")),
)
FRAMEWORKS = (
    ("paceline", re.compile(r"\| [\d,]+ ms \| [\d,]+ tok/s")),
    ("nanochat", re.compile(r"\blrm: |Validation bpb:")),
    ("litgpt", re.compile(r"Epoch \d+ \| iter \d+ step \d+ \|")),
    ("Megatron", re.compile(r"iteration +\d+/ *\d+ \| consumed samples:")),
    ("DeepSpeed", re.compile(r"\[[Dd]eep[Ss]peed\]|steps: \d+ loss: .*iter time \(s\)|micro_step=\d+/global_step=")),
    ("torchtitan", re.compile(r"\btps: [\d,]+ +tflops:")),
    ("nanoGPT", re.compile(r"iter \d+: loss [\d.]+, time [\d.]+ms")),
    ("Hugging Face Trainer", re.compile(r"\{'loss': .*'epoch': |'train_runtime': ")),
    ("Lightning", re.compile(r"Epoch \d+: +\d+%\|.*(?:v_num=|_step=)|LightningModule|`Trainer\.fit` stopped")),
)


def progress_lines(block: bytes) -> Iterator[bytes]:
    """Yields lines, and states of a progress bar, that may show progress."""
    for line in block.split(b"\n"):
        for state in line.rstrip(b"\r").split(b"\r"):
            if len(state) < MAX_LINE_BYTES and PROGRESS.search(state):
                yield state


class LineValues(NamedTuple):
    """What a line shows; None where it does not. by_bar: a progress bar shows it. The loss may be NaN or infinite."""

    step: int | None
    num_steps: int | None
    values: dict[str, float]
    by_bar: bool
    epochs: tuple[int, int] | None = None  # the epoch and their number, of a line that may count steps in each epoch


def read_line(raw: str) -> LineValues | None:
    """Returns what a line of a training log shows; None for a line without progress."""
    line = split_prefix(strip_escapes(raw)).text
    if RUN_SUMMARY.search(line):
        return None
    epochs = (int(epoch["epoch"]), int(epoch["of"])) if (epoch := EPOCH_OF.search(line)) else None
    text, bar = strip_bars(line)[0], bar_of(line)
    if bar is not None and bar.step is None:  # a bar that was reset still shows the measures of before
        line = text
    mark = read_step_and_loss(text)
    values = measures_of(line, is_step=mark is not None)
    if mark is not None and mark.name == PART_LOSS:
        values["part_loss"] = values.pop("loss", mark.loss or math.nan)  # of an evaluation if others are of training
    elif mark is not None and mark.name == "eval_loss":
        values.pop("loss", None)
        if mark.loss is not None and "val_bpb" not in values:
            values.setdefault("val_loss", mark.loss)
    elif mark is not None and mark.loss is not None and "val_loss" not in values:
        values.setdefault("loss", mark.loss)
    step, num_steps = (mark.step if mark else None), None
    if bar is not None:
        step, num_steps = step if bar.step is None else bar.step, bar.num_steps
        values = {**bar.values, **values}
    elif (total := STEPS_OF.search(text)) is not None:
        num_steps = parse_count(total["of"])
        epochs = None if total[0].lower().startswith("global") else epochs
    elif not values and not STEP_FIRST.search(text):
        return None  # "total steps: 1000"
    values = {name: value for name, value in values.items() if math.isfinite(value) or name.endswith("loss")}
    return LineValues(step, num_steps, values, bar is not None, epochs) if values or step is not None else None


class EpochSteps:
    """Counts the steps of all epochs of a log that counts them in each: step 80/250 in epoch 6/10 is step 1330/2500.

    Some logs count the steps of all epochs themselves. Which it is shows where one epoch follows another, and before that
    only where the share of the steps is not that of the epochs.
    """

    def __init__(self) -> None:
        self.first_epoch = 1  # 0 behind a line of epoch 0
        self.restarts: bool | None = None  # whether each epoch counts from 0; None: no two epochs were seen yet
        self._last: tuple[int, int] | None = None  # epoch and step of the line before, which may be a later one

    def count(self, step: int, *, num_steps: int, epoch: int, num_epochs: int) -> tuple[int, int | None]:
        """Returns the step and the number of steps of all epochs by the values of a line; None where it may be either number."""
        self.first_epoch = min(self.first_epoch, epoch)
        if self._last is not None and self._last[0] != epoch:
            (_, end), (_, start) = sorted((self._last, (epoch, step)))
            self.restarts = start <= end
        self._last = epoch, step
        epochs_before = epoch - self.first_epoch
        share = step / num_steps * num_epochs
        restarts = self.restarts
        if restarts is None and not epochs_before / UNEVEN <= share <= (epochs_before + 1) * UNEVEN:
            restarts = True
        if restarts:  # epochs from 0 on may be shown as "0/9 to 9/9"
            return epochs_before * num_steps + step, max(num_epochs, epochs_before + 1) * num_steps
        return step, num_steps if epochs_before or restarts is False or num_epochs == 1 else None


class LogLines:
    """What the lines of one log show in their order, with the steps of all epochs.

    A bar that is shorter than that of a training with losses is of an evaluation, unless a loss of training comes while it is
    unfinished: then it is of another training, such as the next stage.
    """

    def __init__(self) -> None:
        self._epoch_steps = EpochSteps()
        # the last number of steps on a line, and whether losses came with it
        self._num_steps, self._has_loss = 0, False
        self._shorter: LineValues | None = None  # the last state of a shorter bar since

    def read(self, raw: str) -> LineValues | None:
        """Returns what the next line shows; None for one without progress, and for the bar of an evaluation."""
        if (line := read_line(raw)) is None:
            return None
        if line.by_bar and self._has_loss and (line.num_steps or math.inf) < self._num_steps:
            self._shorter = line
            return None
        has_loss = "loss" in line.values
        if has_loss and not line.by_bar and (bar := self._shorter) and (bar.step or 0) < (bar.num_steps or 0):
            line = line._replace(step=line.step or bar.step, num_steps=bar.num_steps)
        if line.num_steps:
            self._has_loss = self._has_loss and self._num_steps in (0, line.num_steps)
            self._num_steps, self._shorter = line.num_steps, None
        self._has_loss = self._has_loss or has_loss
        return counted(line, self._epoch_steps)


def counted(line: LineValues, epoch_steps: EpochSteps) -> LineValues:
    """Returns a line with the steps of all epochs, where it has the epoch and their number."""
    if line.step is None or not line.num_steps or line.epochs is None:
        return line
    epoch, num_epochs = line.epochs
    if line.by_bar and line.num_steps == num_epochs:  # the bar counts epochs
        return line
    step, num_steps = epoch_steps.count(line.step, num_steps=line.num_steps, epoch=epoch, num_epochs=num_epochs)
    return line._replace(step=step, num_steps=num_steps)


def bar_of(text: str) -> LineValues | None:
    """Returns what the last progress bar on the line shows; None where it cannot be that of a training."""
    bars = list(BAR.finditer(text)) if "%|" in text else []
    if not bars or (at := parse_count(bars[-1]["at"])) is None or not (total := parse_count(bars[-1]["of"])):
        return None
    before = text[: bars[-1].start("percent")].strip(" :")
    if before and not TRAINING_BAR.search(before):
        return None
    values = {}
    if (speed := BAR_SPEED.search(bars[-1][0])) is not None and float(speed["value"]) > 0:
        rate = float(speed["value"])
        values["step_ms"] = 1000 * rate if speed["unit"] == "s/it" else 1000 / rate
    if (epoch := EPOCH_BAR.search(before)) is not None:  # restarts in each epoch, at 0 with the title of the last one
        return LineValues(int(epoch["epoch"]) * total + at if at else None, None, values, True)
    return LineValues(at, total, values, True)


def in_ms(match: re.Match[str]) -> float:
    """The value of a match, in milliseconds where it is a time."""
    value = float(match["value"].replace(",", ""))
    return value * 1000 if match.groupdict().get("unit") == "s" else value


def measures_of(text: str, *, is_step: bool) -> dict[str, float]:
    measures, lowered = dict[str, float](), text.lower()
    for name, needle, pattern in PATTERNS:
        if needle in lowered and (match := pattern.search(text)) is not None:
            measures[name] = in_ms(match)
    for name, pattern in BARE_SPEEDS if is_step else ():
        if name not in measures and len(matches := list(pattern.finditer(text))) == 1:
            measures[name] = in_ms(matches[0])
    if "mfu_percent" in measures:
        measures["mfu"] = round(measures.pop("mfu_percent") / 100, 6)
    return measures


def framework_of(text: str) -> str | None:
    return next((name for name, pattern in FRAMEWORKS if pattern.search(text)), None)


def printed_values(path: Path, names: Sequence[str], *, to_end: bool) -> dict[str, Any]:
    """Returns the last value of each field near the end of a script's log. to_end: nothing follows a last line without an end."""
    file = GrowingFile(path, ends=STATE_ENDS)
    epoch_steps, last = EpochSteps(), LineValues(None, None, {}, by_bar=False)
    with suppress(OSError):
        file.skip_to(max(0, path.stat().st_size - END_BYTES), before=b"")
    is_cut, values = file.offset > 0, dict[str, Any]()
    lines = b"".join(file.blocks(to_end=to_end)).decode("utf-8", "replace").splitlines()[is_cut:]
    needles = [("loss", ""), *((name, needle) for name, needle, _ in PATTERNS if name != "loss")]
    for line in reversed(lines):
        missing = [needle for name, needle in needles if name in names and name not in values]
        is_open = last.step is None or (last.epochs is not None and epoch_steps.restarts is None)
        if (is_open or any(needle in line.lower() for needle in missing)) and (shown := read_line(line)):
            counted(shown, epoch_steps)  # lines before the last step may tell how to count it
            last = shown if last.step is None else last
            values = {**shown.values, **values}
    values.setdefault("loss", values.get("part_loss"))  # no other line has one
    totals = TOTAL.findall("\n".join(lines)) if last.by_bar and last.epochs is None and last.num_steps else []
    if max((parse_count(total) or 0 for total in set(totals)), default=0) > (last.num_steps or 0):
        # the last bar may be of an evaluation
        steps = [shown for shown in map(LogLines().read, lines) if shown is not None and shown.step is not None]
        last = steps[-1]._replace(epochs=None) if steps else last
    if last.epochs is not None:
        with suppress(OSError):
            head = filter(None, map(read_line, read_part(path, start=0, max_bytes=END_BYTES)["text"].splitlines()))
            epochs = [shown.epochs[0] for shown in head if shown.step is not None and shown.epochs is not None]
            epoch_steps.first_epoch = min([epoch_steps.first_epoch, *epochs])
    last = counted(last, epoch_steps)
    values |= {"step": last.step, "num_steps": last.num_steps if last.step is not None else None}
    return {name: values[name] for name in (*names, "num_steps") if values.get(name) is not None}


class ScriptValues:
    """The last values that a script's run shows: in rank 0's logs; without a loss there, in its files of metrics."""

    def __init__(self, run: RunDir):
        self.run = run
        self._finder = MetricFinder(run)
        self._uses_files = False  # of metrics
        self._stamps: dict[Path, tuple[int, int] | None] = {}  # of the files that were read, from before that

    def is_current(self, *, is_live: bool) -> bool:
        """Whether `read` would return the same. is_live: the script may write its first file of metrics."""
        is_due = is_live and self._uses_files and self._finder.is_due
        return not is_due and all(file_stamp(path) == stamp for path, stamp in self._stamps.items())

    def read(self, events: Sequence[JsonRecord], names: Sequence[str], *, is_over: bool = False) -> dict[str, Any]:
        """Returns the values at the end of the last log that shows any, or of the last attempt with a file."""
        self._stamps = {}
        starts = [unix_time(event["time"]) for event in events if event.get("event") == "attempt"]
        values: dict[str, Any] = {}
        for number in range(len(starts), 0, -1):
            log, to_end = self.run.rank_log(number, 0), is_over or number < len(starts) or not is_locked(self.run)
            self._stamps[log] = file_stamp(log)
            if values := printed_values(log, names, to_end=to_end):
                break
        self._uses_files = "loss" not in values
        for paths in reversed(self._finder.find(starts)) if self._uses_files else ():
            self._stamps |= {path: file_stamp(path) for path in paths}
            if curves := {path: series for path in paths if (series := end_of_metrics(path))}:
                losses = {path: [item for item in series if item.kind == LOSS] for path, series in curves.items()}
                steps = {path: max(item.steps[-1] for item in series) for path, series in curves.items()}
                path = training_file({path: (bool(losses[path]), steps[path]) for path in curves})
                # a curve of that name is the loss where it has others
                last = min(losses[path], key=lambda item: item.name != "loss", default=None)
                if last is None and "step" in values:
                    continue
                if steps[path] > values.get("step", -math.inf):
                    values = {**values, "step": steps[path], "num_steps": None}
                return values | ({"loss": last.values[-1]} if last else {})
        return values
