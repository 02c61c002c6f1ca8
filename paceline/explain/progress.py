"""
The progress that the lines of a log report: steps, losses, the norm of the gradients, memory, in the forms of the usual trainers.

A program that prints behind an open progress bar prints on the same line, so bars are removed from a line before it is read.
"""

import math
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from paceline.explain.explanation import LogProgress
from paceline.explain.lines import MAX_RANKS, LogLine

MAX_PROGRESS_LINES = 64  # stored; what came before them has not ended the run
MAX_LOSSES = 2000  # stored; with more every second one is dropped
MAX_MEASURES = 32  # of memory, by name and rank
MAX_DIGITS = 15
# a loss above this followed by exactly 0: transformers writes 0 for NaN (trainer.py, logging_nan_inf_filter)
ABRUPT = 0.5
SKIPPED_STEPS = 3  # in a row, by a loss scaler: with more the gradients are lost

BAR = re.compile(
    r"(?:[^\s|%][^|%]{0,80}?: +)? {0,3}(?P<percent>\d{1,3})%\|[^|]*"
    r"\|? {0,2}(?P<at>[\d.,]+[kMG]?)/(?P<of>[\d.,]+[kMG]?)(?: \[[^\]]*(?:\]|$)|)"
)
COUNTER = re.compile(
    r"(?:[^\s|%][^|%]{0,80}?: +)? {0,3}(?P<at>\d+)it \[\d+:\d\d[^\]]*(?:\]|$)"
)  # tqdm's, without a total
PREPARATION = re.compile(  # the bar of what comes before training, or beside it
    r"\W*(?:(?:Up|Down)?[Ll]oad|Fetch|Map|Tokeniz|Generating \w+ split|Filter|Resolv|Prepar|Extract|Convert|Writ|Sav|Quantiz"
    r"|Compil|Captur|Cach|Index|Pack|Cast|Flatten|Sett|Applying|Adding|Truncating|Creating)"
)
BARE_BAR = re.compile(r" {0,3}\d{1,3}%\|[█▏▎▍▌▋▊▉ #=>.-]*\|?")  # cut in the middle, or without a count
# `gradient accumulation steps: 8` is a setting, no progress
SETTINGS = (
    "accumulation", "accum", "warmup", "max", "num", "total", "optimization", "decay", "logging", "save", "eval", "target",
    "print", "of",
)  # fmt: skip
STEP = re.compile(
    "".join(f"(?<!{word}.)" for word in SETTINGS)
    + r"(?<![a-z])(?:global[_ ]?steps?|steps?|iter(?:ation)?s?|updates?|num_updates|batch"
    r"|(?<!\d)it)['\"]?\s*[:=# \[(]{0,3}\s*(?P<step>\d[\d,]*)(?P<of>\s*/\s*\d[\d,]*)?(?![\w.]|\s*[A-Za-z]+/)",
    re.IGNORECASE,
)
# 2.5, '2.5', nan.0, tensor(nan, np.float64(nan)
VALUE = (
    r"['\"]?\s*(?:[:=|]|is\b(?: (?:not finite|non-finite|NaN)[:,]?)?)?\s*(?:[\w.]{1,20}\()?['\"]?"
    r"(?P<value>[-+]?(?:\d+(?:\.\d*)?(?:e[-+]?\d+)?|nan|inf))(?:\.0)?\b"
)
LOSS = re.compile(
    rf"loss(?: train|_(?!scal|weight|fn|func|type)[a-z]\w{{0,15}}|[_-]?\d{{1,2}}(?= ?[:=]|[ ]+[-+]?\d))?{VALUE}",
    re.IGNORECASE,
)
HELD_OUT_LOSS = re.compile(rf"\be?val(?:id(?:ation)?)?[_ /.-]*loss{VALUE}", re.IGNORECASE)
OF_WHOLE_RUN = re.compile(r"train_runtime|^ *train_loss +=")  # a line whose loss is a mean
NAN_OUTPUT = re.compile(r"['\"]log(?:p|it)s/\w+['\"]: nan")  # of a model whose loss is written as 0
GRAD_NORM = re.compile(rf"(?:grad(?:ient)?s?[_ /.-]*(?:global[_ ])?|\bg|\b)norm{VALUE}", re.IGNORECASE)
MEMORY_WORD = re.compile(r"(?i)(?<![a-z])(?:mem(?:ory)?|v?ram|rss|allocated|reserved)(?![a-z])")
PART_END = re.compile(r"[,|;{}\t]|\s{2}")
AMOUNT = re.compile(
    r"(?i)(?<![\w./-])(?P<value>\d{1,15}(?:\.\d{1,9})?)[ \t]?(?P<unit>[kmgt]?i?b?)%?(?=[\s,;|()\]/}'\"]|$)"
)
MAX_NAME = 60  # characters of a measure's name
UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
COUNTERS = re.compile(r"(?i)((?:gpu|cuda|device|rank)[ :#]{0,2}\d+)|[ :]?\d+")  # all but a device's number
NOT_IN_USE = re.compile(
    r"(?i)free|avail|total|limit|capacity|cach|load|disk|file|param|fraction|(?:time|step|iter|iteration|epoch|batch|loss)\W*$"
)
NAME_START = re.compile(r"[\w./-]*$")  # of a measure's name, before the part that LOSS finds
COLUMN_GAP = re.compile(r"\s*\|\s*|\t+|\s{2,}")
LOSS_COLUMN = re.compile(r"(?i)(?:^|[\s_/-])loss$")
YOLO_ROW = re.compile(r"^\s*\d+/\d+\s+[\d.]+[GM]?\s+(?P<losses>(?:(?:\d+\.\d+|0|nan|inf)\s+){2,5})")  # epoch, memory
TIMESTEPS = re.compile(r"^\| +total_timesteps +\| +(?P<step>\d+) +\|$")  # in the tables of stable-baselines3
EPOCH = re.compile(r"(?i)(?:^|[|\]] {0,3}| [-:] )\W*(?:train\w*\W+)?epoch\W{0,4}(?P<epoch>\d{1,6})\b(?!\.\d)")
MIN_EPOCHS = 3  # of a training behind which another begins
STEP_COLUMN = re.compile(r"(?i)(?:global[_ ])?(?:step|iter(?:ation)?|epoch)s?")
ROW_STARTS = frozenset("0123456789-nNi")  # 3/30, nan, NaN, No log, inf
NUMBER_CELL = re.compile(r"(?i)[-+]?(?:\d+(?:\.\d*)?(?:e[-+]?\d+)?|nan|inf)")
OTHER_LOSS = re.compile(r"(?:val|valid|validation|eval|test|dev|best|min|prev)[_ /.-]*$", re.IGNORECASE)
EVALUATION = re.compile(  # how a line of one begins
    r"(?i)^\W*(?:test|val|valid|validation|eval|evaluation|(?:test|validat|evaluat)ing)\b ?(?:[:\[]|- )"
)
REWARD = re.compile(rf"(?i)(?<![\w/])(?:(?:train|critic)/)?(?:mean_)?rewards?(?:[/_]mean)?{VALUE}")
RECORD_LOSS = re.compile(
    r"(?:best|min|prev|(?:keep\w*|the) last)[_ /.-]*(?:\w{2,6}[_ /.-]*)?$", re.IGNORECASE
)  # infinite at first
DONE = re.compile(
    r"(?:train|tun)ing (?:is )?(?:completed?|finished|done)|(?:finished|done) training|train_runtime|saved (?:the )?final"
    r"|(?:max_steps|max_epochs)=?\d*`? reached|job (?:finished|completed) success|\ball \d* ?(?:tests|checks) passed"
    r"|training has finished|run finished|finished successfully|^done\.?$|^training time \d+:\d\d:\d\d$"
    r"|terminated of its own accord .*with exit-code 0"
    r"|(?:treinamento|entrenamiento) (?:conclu|complet|finaliz|termin)[a-zí]+|training (?:ist )?(?:abgeschlossen|beendet)"
    r"|entra[iî]nement termin[eé]|обучение (?:завершено|закончено)"
    r"|训练(?:已)?(?:完成|结束)|学習(?:が)?(?:完了|終了)|학습 ?(?:완료|종료)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class StepLoss:
    """The step, the loss and the norm of the gradients that one line reports."""

    step: int | None
    loss: float | None
    is_last: bool = False  # step 100/100
    grad_norm: float | None = None
    name: str = "loss"
    held_out: float | None = None  # the loss of an evaluation beside that of training
    reward: float | None = None


Point = TypeVar("Point")
LossPoint = tuple[int | None, str, float]  # step, name, value
ProgressLine = tuple[int, int | None, int | None]  # number in the log, rank, step


class ProgressTracker:
    """Collects the progress of one log, line by line."""

    def __init__(self) -> None:
        self.lines: deque[ProgressLine] = deque(maxlen=MAX_PROGRESS_LINES)
        self.steps_by_rank: dict[int, int] = {}  # the last step of each rank whose lines have a rank
        self.first_step: int | None = None
        self._losses: list[LossPoint] = []
        self._held_out: list[LossPoint] = []
        self._memory: dict[str, list[tuple[int, float]]] = {}
        self._loss_rank: int | None = None  # whose losses are stored: the first that reported one
        self._is_policy = False
        self._is_dict = False  # the line is one of transformers' Trainer
        self._is_filtered = False  # the losses are 0 in place of NaN
        self._columns: tuple[str, ...] = ()  # of the table whose rows may follow
        self._num_lines = 0
        self._last_step: int | None = None
        self._last_loss: float | None = None
        self._done_line: int | None = None
        self._is_last = False  # the last progress line is step 100/100
        self._non_finite: dict[str, list[ProgressLine]] = {}  # by measure: its values since the last finite one
        self._finite: set[str] = set()  # measures that were finite at least once
        self._infinite: set[str] = set()  # measures of which one of those values is infinite, not NaN
        self._rewards: list[LossPoint] = []
        self._epoch = 0

    def step_of(self, rank: int | None) -> int | None:
        """The last step that this rank reported, or else that any rank reported."""
        return self._last_step if rank is None else self.steps_by_rank.get(rank, self._last_step)

    def add(self, number: int, line: LogLine, bar: StepLoss | None) -> bool:
        """Adds line `number` of the log and returns whether it reports progress; bar: the progress bar that was removed from it."""
        if DONE.search(line.text):
            self._done_line = number
        self._is_dict = "'loss':" in line.text
        self._is_policy = self._is_policy or "reward" in line.text.lower()
        self._columns = read_columns(line.text) or self._columns
        if (match := EPOCH.search(line.text)) is not None:
            self._begin_epoch(int(match["epoch"]))
        progress = read_row(line.text, self._columns) or read_step_and_loss(line.text) or bar
        if progress is None and (row := TIMESTEPS.match(line.text)) is not None:
            progress = StepLoss(parse_count(row["step"]), None)
        if progress is None and match is not None:
            progress = StepLoss(None, None)
        if progress is not None:
            self._add_progress(number, line.rank, progress)
        self._add_memory(line)
        return progress is not None

    def _begin_epoch(self, epoch: int) -> None:
        """Notes the epoch of a line. Where the epochs begin again, another training does: curves do not go on from the last one."""
        if epoch <= 1 and self._epoch >= epoch + MIN_EPOCHS:
            for points in (self._losses, self._held_out, self._rewards):
                points.clear()
            self._memory.clear()
        self._epoch = epoch

    def _add_progress(self, number: int, rank: int | None, progress: StepLoss) -> None:
        self._num_lines += 1
        overruns = (
            self._is_last and progress.step == (self._last_step or 0) + 1
        )  # tqdm goes on counting without the total
        self._is_last = progress.is_last or overruns
        if progress.step is not None:
            self._last_step = progress.step
            # a header may report the number of all steps first
            self.first_step = progress.step if self.first_step is None else min(self.first_step, progress.step)
            if rank is not None and len(self.steps_by_rank) < MAX_RANKS:
                self.steps_by_rank[rank] = progress.step
        if progress.loss is not None:
            fell_to_zero = progress.loss == 0 and (self._last_loss or 0.0) > ABRUPT and self._is_dict
            self._is_filtered = fell_to_zero or (progress.loss == 0 and self._is_filtered)
            self._last_loss = progress.loss
            self._add_loss(rank, (progress.step, progress.name, progress.loss))
        if progress.reward is not None:
            store(self._rewards, (progress.step, "reward", progress.reward))
        if progress.held_out is not None and rank == self._loss_rank:
            store(self._held_out, (progress.step, "eval_loss", progress.held_out))
        for measure, value in (("loss", progress.loss), ("grad_norm", progress.grad_norm)):
            if value is not None:
                value = math.nan if measure == "loss" and self._is_filtered and not self._is_policy else value
                self._add_value(measure, value, (number, rank, progress.step))
        self.lines.append((number, rank, progress.step))

    def _add_memory(self, line: LogLine) -> None:
        """Notes the memory that a line of a run with steps reports."""
        if self._last_step is None or not MEMORY_WORD.search(line.text):
            return
        for name, value in read_memory(line.text):
            key = name if line.rank is None else f"rank {line.rank} {name}"
            if key in self._memory or len(self._memory) < MAX_MEASURES:
                store(self._memory.setdefault(key, []), (self._last_step, value))

    @property
    def memory(self) -> tuple[LossPoint, ...]:
        """The memory in use, by step and name."""
        return tuple((step, name, value) for name, points in self._memory.items() for step, value in points)

    @property
    def losses(self) -> tuple[LossPoint, ...]:
        """The losses of one rank; none of a policy, whose loss rises while it learns."""
        return () if self._is_policy else tuple(self._losses)

    @property
    def rewards(self) -> tuple[LossPoint, ...]:
        """A policy's rewards."""
        return tuple(self._rewards)

    @property
    def held_out(self) -> tuple[LossPoint, ...]:
        """The losses of evaluations."""
        return tuple(self._held_out)

    def _add_loss(self, rank: int | None, point: LossPoint) -> None:
        if not self._losses:
            self._loss_rank = rank
        if rank == self._loss_rank:
            store(self._losses, point)

    def _add_value(self, measure: str, value: float, at: ProgressLine) -> None:
        """Notes whether a measure is finite; at: where it is reported."""
        if math.isfinite(value):
            self._non_finite.pop(measure, None)
            self._finite.add(measure)
            self._infinite.discard(measure)
            return
        if math.isinf(value):
            self._infinite.add(measure)
        values = self._non_finite.setdefault(measure, [])
        if len(values) < SKIPPED_STEPS:
            number, rank, step = at
            values.append((number, rank, self.step_of(rank) if step is None else step))

    def progress(self, last_line: int | None) -> LogProgress:
        """The progress so far; last_line is the number of the log's last line."""
        finished = self._done_line is not None or self._is_last
        silent_end = bool(self.lines) and self.lines[-1][0] == last_line and not finished
        reached = LogProgress(
            steps=self._num_lines, first_step=self.first_step, last_step=self._last_step, last_loss=self._last_loss,
            done_line=self._done_line, finished=finished, silent_end=silent_end,
        )  # fmt: skip
        norms = self._non_finite.get("grad_norm", [])
        # a loss scaler skips some steps with such a gradient norm, most of them infinite; behind a loss of 0, with all of them
        # so, or where the log stops at NaN, no step counts
        never_finite = len(norms) > 1 and "grad_norm" not in self._finite
        stops_there = silent_end and bool(norms) and "grad_norm" not in self._infinite
        is_lost = len(norms) == SKIPPED_STEPS or reached.last_loss == 0 or never_finite or stops_there
        for measure in ("loss", "grad_norm"):
            values = self._non_finite.get(measure)
            if values and (measure == "loss" or is_lost):
                number, _, step = values[0]
                return replace(reached, nan_line=number, nan_step=step, nan_measure=measure)
        return reached


def store(points: list[Point], point: Point) -> None:
    """Appends a point to those that are stored, which are never more than MAX_LOSSES."""
    points.append(point)
    if len(points) > MAX_LOSSES:
        del points[1::2]


def strip_bars(text: str) -> tuple[str, StepLoss | None]:
    """The line without its progress bars, and the count of the last one with the loss beside it."""
    if "%|" not in text:
        return strip_counters(text) if "it [" in text else (text, None)
    progress = None
    for match in BAR.finditer(text):
        at, of = parse_count(match["at"]), parse_count(match["of"])
        if PREPARATION.match(match[0]):
            continue
        loss = read_value(find_measure(LOSS, match[0])) if "loss" in match[0].lower() else None
        if row := YOLO_ROW.match(match[0]):
            loss = sum(map(float, row["losses"].split()))
        progress = StepLoss(step=at, loss=loss, is_last=at is not None and at == of)
    return BARE_BAR.sub("", BAR.sub("", text)).strip(" \t"), progress


def strip_counters(text: str) -> tuple[str, StepLoss | None]:
    """The same for bars without a total."""
    counted = [match for match in COUNTER.finditer(text) if not PREPARATION.match(match[0])]
    progress = StepLoss(parse_count(counted[-1]["at"]), None) if counted else None
    return COUNTER.sub("", text).strip(" \t"), progress


def read_step_and_loss(text: str) -> StepLoss | None:
    """The step or the loss that a line reports; None if it reports neither."""
    lowered = text.lower()
    loss_match = find_measure(LOSS, text) if "loss" in lowered else None
    loss = read_value(loss_match)
    if loss is not None and math.isfinite(loss) and OF_WHOLE_RUN.search(text):
        return None
    held_out = read_value(find_measure(HELD_OUT_LOSS, text)) if "val" in lowered and loss is not None else None
    step = STEP.search(text)
    grad_norm = read_value(find_measure(GRAD_NORM, text)) if "norm" in lowered else None
    if step is None and loss is None:
        return None if grad_norm is None or math.isfinite(grad_norm) else StepLoss(None, None, grad_norm=grad_norm)
    if loss is None and step is not None and not (step["of"] or ":" in text or "=" in text or len(text) < 40):
        return None  # prose, such as "takes 3 steps 2 at a time"
    number = parse_count(step["step"]) if step else None
    is_last = bool(step and step["of"] and parse_count(step["of"].strip("/ \t")) == number)
    if loss == 0 and NAN_OUTPUT.search(text):
        loss = math.nan
    if loss == 0 and "reward" in lowered and lowered.count("nan") == 1:
        grad_norm = (
            None  # of GRPO, whose loss is 0 by design: as long as rewards and KL are finite, only the step is skipped
        )
    name = name_of(loss_match) if loss_match else "loss"
    name = "eval_loss" if EVALUATION.match(text) else name
    reward = read_value(REWARD.search(text)) if "reward" in lowered else None
    return StepLoss(number, loss, is_last, grad_norm, name, held_out, reward)


def find_measure(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """The measure's first value of training, or its first one that is not finite; of validation if there is no other; no record."""
    matches = [match for match in pattern.finditer(text) if not RECORD_LOSS.search(before(match))]
    training = [match for match in matches if not OTHER_LOSS.search(before(match))]
    broken = (match for match in [*training, *matches] if not math.isfinite(float(match["value"])))
    return next(broken, next(iter(training or matches), None))


def before(match: re.Match[str]) -> str:
    """The words before a match that tell what is measured."""
    return match.string[max(0, match.start() - 20) : match.start()]


def name_of(match: re.Match[str]) -> str:
    """The name of a loss in the form of metrics: train/loss."""
    before = match.string[max(0, match.start() - 40) : match.start()]
    prefix = NAME_START.search(before)
    return "eval_loss" if OTHER_LOSS.search(before) else f"{prefix[0] if prefix else ''}loss"


def read_memory(text: str) -> Iterator[tuple[str, float]]:
    """The amounts of memory in use that a line reports, by name: in bytes where they have a unit."""
    for part in filter(MEMORY_WORD.search, PART_END.split(text)):
        for match in AMOUNT.finditer(part):
            name = part[: match.start()]
            if MEMORY_WORD.search(name) and not NOT_IN_USE.search(name):
                words = COUNTERS.sub(r"\1", name).split()
                named = " ".join(words).strip(" :=([{'\"")[-MAX_NAME:]
                unit = UNITS.get(match["unit"][:1].lower())
                yield (
                    (named, float(match["value"]))
                    if unit is None
                    else (f"{named} (bytes)", float(match["value"]) * unit)
                )


def read_value(match: re.Match[str] | None) -> float | None:
    return float(match["value"]) if match else None


def read_columns(text: str) -> tuple[str, ...]:
    """The names of a table's columns; none if no column is a loss."""
    names = tuple(filter(None, COLUMN_GAP.split(text.strip(" \t|")))) if "loss" in text.lower() else ()
    is_header = len(names) > 1 and all(name[0].isalpha() and not set(name) & set(":={") for name in names)
    return names if is_header and any(map(LOSS_COLUMN.search, names)) else ()


def read_row(text: str, columns: Sequence[str]) -> StepLoss | None:
    """The step and a loss in a row of a table: the first loss that is not finite, of training if there is one."""
    if not columns or text.strip(" \t|")[:1] not in ROW_STARTS:
        return None
    row = dict(zip(columns, filter(None, COLUMN_GAP.split(text.strip(" \t|"))), strict=False))
    losses = {name: float(row[name]) for name in row if LOSS_COLUMN.search(name) and NUMBER_CELL.fullmatch(row[name])}
    if len(row) < len(columns) or not losses:
        return None
    training = {name: loss for name, loss in losses.items() if not OTHER_LOSS.search(name[:-4])} or losses
    name = next((name for name, loss in training.items() if not math.isfinite(loss)), next(iter(training)))
    counters = sorted(filter(STEP_COLUMN.fullmatch, row), key=lambda name: name.lower().startswith("epoch"))
    counts = [parse_count(row[name].partition("/")[0]) for name in counters]
    reward = float(row["reward"]) if NUMBER_CELL.fullmatch(row.get("reward", "")) else None
    step = next((count for count in counts if count is not None), None)
    return StepLoss(step, training[name], name=name, reward=reward)


def parse_count(text: str) -> int | None:
    """'12,345' -> 12345; None if it is not a whole number of at most 15 digits."""
    digits = text.replace(",", "")
    return int(digits) if digits.isdigit() and digits.isascii() and len(digits) <= MAX_DIGITS else None
