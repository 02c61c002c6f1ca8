"""
The progress of a run, followed line by line: its steps, losses, gradient norms, rewards and memory, and whether it reports its end.
"""

import math
import re
import sys
from collections import Counter, deque
from dataclasses import replace
from typing import NamedTuple, TypeVar

from paceline.explain import line_measures
from paceline.explain.explanation import LogProgress
from paceline.explain.line_measures import HELD_OUT_WORDS, MEAN_LOSS, PART_LOSS, StepLoss, labelled_values, read_score
from paceline.explain.line_rows import read_boosting, read_columns, read_counter, read_row, read_speed
from paceline.explain.lines import MAX_RANKS, LogLine, has_word
from paceline.noise import ABRUPT

# stored: what came before these lines has not ended the run, and with more losses every second one is dropped
MAX_PROGRESS_LINES, MAX_LOSSES = 64, 2000
MAX_SPEEDS, SPEED_EVERY = 500, 20  # of which each line has one, and later every so many
MAX_TITLE, MAX_MEASURES = 40, 32  # characters of the line above an evaluation; of memory, by name and rank
# values of any measure that was finite before it became NaN; lines on which measures are looked for before one is
MIN_FINITE, LABELLED_LINES, MAX_LABELS = 2, 200, 500
SKIPPED_STEPS = 3  # in a row, by a loss scaler: with more the gradients are lost
EPOCH = re.compile(
    r"(?i)(?:^(?:[a-z]{4,8}:[\w.]{1,40}:)?|[|\]] {0,3}| [-:] |\}, |^\{(?=.*\"(?:train_)?loss\": ).*, (?=\"epoch\": \d+[,}]))\W*"
    r"(?:(?:(?:train|begin|start)\w*(?: the model for)?|end of)\W+)?(?:epoch(?: n\w{1,5})?|ep\b)\W{,4}(?P<epoch>\d{1,6})\b(?!\.\d)"
)
EPOCH_OF = re.compile(r"(?i)\bepochs?\W{,4}(?P<epoch>\d{1,6})\s*(?:/|of)\s*(?P<of>\d{1,6})\b")  # Epoch [6/10]
# steps whose mean loss counts, or that are a training behind which another begins, with this much of the first loss
MIN_MEAN, AS_AT_FIRST = 10, 0.8
KERAS_BAR = re.compile(r"\s*(?P<at>\d+)/(?P<of>\d+) (?:\[[=>.]{10,}\]|[━╸]{10,})")
KERAS_EPOCH = re.compile(r"\s*Epoch \d+/\d+\s*")
MIN_LOSSES, MIN_EPOCHS = 3, 3  # that show a training above a bar of Keras; of one behind which another begins
DONE = re.compile(
    r"(?:train|tun)ing (?:is |was |has been )?(?:successfully )?(?:completed?|finished|done)|^\W*end train(?:ing)?\W*$"
    r"|(?:finished|done) training|train_runtime|saved (?:the )?final|^\W*end of training\b|(?:max_steps|max_epochs)=?\d*`? reached"
    r"|job (?:finished|completed) success|\ball \d* ?(?:tests|checks) passed|normal termination \(return value 0\)"
    r"|training has finished|\ball stages (?:complete|finished)|run finished"
    r"|finished: final loss|finished successfully|^successfully completed\.$"
    r"|\ball \w+ completed successfully|collective test concluded|avg bus bandwidth +:|^training time \d+:\d\d:\d\d$"
    r"|(?:handling exit code|got exitcode): 0$"  # W&B's hook
    r"|^(?:done|fertig|terminé|готово)\.?$"
    r"|\"run_stop\".{0,300}\"status\": \"success\"|terminated of its own accord .*with exit-code 0"
    r"|(?:treinamento|entrenamiento) (?:conclu|complet|finaliz|termin)[a-zí]+|training (?:ist )?(?:abgeschlossen|beendet)"
    r"|entra[iî]nement termin[eé]|(?:обучение |^\[train\] )(?:завершено|закончено)"
    r"|заверш[её]н\w* успешно|успешно (?:заверш[её]н|обучен)\w*"
    r"|训练(?:已)?(?:完成|结束)|学習(?:が)?(?:完了|終了)|학습 ?(?:완료|종료)",
    re.IGNORECASE,
)
YAML_SETTING, SECTIONS = re.compile(r" +[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+: "), 3  # with a setting of one name
SOME_FAILED = re.compile(r"(?i)\b[1-9]\d* (?:\w+ )?(?:failed|failures?)\b|\bfailed: [1-9]")  # 0 OK, 1 failed
DONE_WORDS = (  # one is in every text that matches; the pattern alone takes a fourth of the time of a line
    "finish", "done", "complet", "runtime", "final", "reached", "passed", "training time", "own accord", "run_stop", "conclu",
    "bandwidth", "end train", "termin", "abgeschl", "beendet", "заверш", "закончен", "успешно", "完", "结束", "終了",
    "완료", "종료", "exit", "end of training", "fertig", "готово",
)  # fmt: skip
# losses of a policy; rewards of preference pairs, whose loss is one as of any classifier
POLICY_LOSS = re.compile(r"(?!.*loss.*loss).*\b(?:td|bellman|actor|policy|pg)\d?[ _-]loss\W{1,3}\d")  # alone on a line
PAIR_REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins")
TEST = re.compile(r"(?i)(?!.*(?<![a-z])(?:val|dev)).*(?<![a-z])test")  # another curve than that of a validation

Point = TypeVar("Point")
ProgressLine = tuple[int, int | None, int | None]  # number in the log, rank, step


class LossPoint(NamedTuple):
    """One value of a curve. epoch: the last one that was reported before it."""

    step: int | None
    name: str
    value: float
    epoch: int | None = None


class ProgressTracker:
    """Collects the progress of one log, line by line."""

    def __init__(self) -> None:
        self.lines: deque[ProgressLine] = deque(maxlen=MAX_PROGRESS_LINES)
        self.steps_by_rank: dict[int, int] = {}  # the last step of each rank whose lines have a rank
        self.first_step: int | None = None
        self._losses: list[LossPoint] = []
        self.held_out: list[LossPoint] = []  # losses of evaluations
        self._memory: dict[str, list[tuple[int, float]]] = {}
        self.speeds: list[LossPoint] = []  # throughput
        self._loss_rank: int | None = None  # whose losses are stored: the first that reported one
        self._is_policy, self._has_rewards = False, False
        self._is_dict, self._is_filtered = False, False  # a line of transformers' Trainer; losses are 0 in place of NaN
        self._columns: tuple[str, ...] = ()  # of the table whose rows may follow
        self._num_lines, self._num_other_losses = 0, 0  # of progress; with losses, that are no bar of Keras
        self._last_step: int | None = None
        self._last_epoch: tuple[int, int] | None = None  # with their number, where the line of the last step has both
        self._last_loss: float | None = None
        self._done_line: int | None = None
        self._bar, self._is_last = line_measures.TrainingBar(), False  # the last progress line is step 100/100
        self._non_finite: dict[str, list[ProgressLine]] = {}  # by measure: its values since the last finite one
        self._is_nan_held_out: bool | None = None  # whether evaluations alone are; None while none is
        self._of_ranks: dict[
            tuple[str, int | None], list[ProgressLine]
        ] = {}  # by measure: the last finite value, the next
        self._finite: set[str] = set()  # measures that were finite at least once
        self._infinite: set[str] = set()  # measures of which one of those values is infinite, not NaN
        self.rewards: list[LossPoint] = []  # of a policy
        self.scores: list[LossPoint] = []  # accuracies of evaluations
        self.gradients: list[LossPoint] = []  # their norms
        self._epoch, self._first_epoch = 0, sys.maxsize
        self._settings: Counter[str] = Counter()  # names of lines that look like settings
        self._header = ""  # of the last line that reports an epoch alone, from the epoch on
        self._finite_lines: list[str] = []  # the first lines without NaN
        self._labels: Counter[str] = Counter()  # by the words before a value: how often it was finite on these
        self._lost: dict[str, list[ProgressLine]] = {}  # its values since, that are NaN
        self._is_evaluation = False  # the line before is the title of one
        self._in_epoch, self._epoch_batches = False, ""  # of Keras: an epoch is above, whose bar is not at its end

    def step_of(self, rank: int | None) -> int | None:
        """The last step that this rank reported, or else that any rank reported."""
        return self._last_step if rank is None else self.steps_by_rank.get(rank, self._last_step)

    def add(self, number: int, line: LogLine, bar: StepLoss | None) -> bool:
        """Adds line `number` of the log and returns whether it reports progress; bar: the progress bar that was removed from it."""
        lowered = line.text.lower()
        if (text := line_measures.in_english(line.text, lowered)) is not line.text:
            lowered = text.lower()
        if has_word(lowered, DONE_WORDS) and DONE.search(line.text) and not SOME_FAILED.search(line.text):
            self._done_line = number
        self._is_dict = "'loss':" in text
        if "reward" in lowered:
            self._has_rewards = True
            self._is_policy = self._is_policy or not has_word(lowered, PAIR_REWARDS)
        self._is_policy = self._is_policy or ("loss" in lowered and POLICY_LOSS.match(lowered) is not None)
        self._columns = read_columns(text) or self._columns
        match = EPOCH.search(text) if "epoch" in lowered or lowered.startswith("ep") or " ep" in lowered else None
        if match is not None:
            self._begin_epoch(int(match["epoch"]))
            self._in_epoch = self._in_epoch or KERAS_EPOCH.fullmatch(text) is not None
        progress = None if self._is_setting(text) else read_row(text, self._columns) or read_line(text, bar)
        if progress is not None and None in (progress.step, progress.loss) and line_measures.is_setting(text):
            progress = None
        if progress is not None and progress.name == MEAN_LOSS:
            counts = not self._losses and (self._last_step or 0) >= MIN_MEAN
            progress = replace(progress, step=self._last_step) if counts else None
        if progress is None and match is not None and text[match.start() :] != self._header:
            progress, self._header = StepLoss(None, None), text[match.start() :]
        if progress is not None and progress.loss is not None:
            bar_share = self._keras_evaluation(text)
            if self._is_evaluation or (bar_share and math.isfinite(progress.loss)):
                score = read_score(line_measures.SCORE.search(text))
                progress = replace(progress, name="eval_loss", score=score)
                progress = progress if bar_share in (None, 1) else replace(progress, loss=None, score=None)
        self._is_evaluation = len(text) < MAX_TITLE and line_measures.EVALUATION_TITLE.match(text) is not None
        score = read_score(line_measures.HELD_OUT_SCORE.search(text)) if has_word(lowered, HELD_OUT_WORDS) else None
        if score is not None and (progress is None or progress.loss is None):
            store(self.scores, self._point(self._last_step, "score", score))
        if progress is not None:
            self._add_progress(number, line.rank, progress, text)
            if progress.step is not None:
                place = EPOCH_OF.search(text) if match is not None else None
                self._last_epoch = (int(place["epoch"]), int(place["of"])) if place else None
            if self._lost or "nan" in lowered:
                self._add_labels(text, (number, line.rank, self._last_step))
            elif len(self._finite_lines) < LABELLED_LINES:
                self._finite_lines.append(text)
        is_sampled = len(self.speeds) < MAX_SPEEDS or not self._num_lines % SPEED_EVERY
        has_speed = is_sampled and progress is not None and progress.step is not None
        speed = read_speed(line.text) if has_speed and has_word(lowered, ("/s", "per", "s/it", "step")) else None
        if speed is not None and line.rank == self._loss_rank:
            store(self.speeds, LossPoint(self._last_step, "throughput", speed))
        if has_word(lowered, line_measures.MEMORY_WORDS):
            self._add_memory(line)
        return progress is not None

    def _is_setting(self, text: str) -> bool:
        """Whether a line is one of a block of settings in capitals, such as Detectron2's; measures come often under one name."""
        if text[:1] != " " or (match := YAML_SETTING.match(text)) is None:
            return False
        self._settings[match[0]] += 1
        return self._settings[match[0]] <= SECTIONS

    def _keras_evaluation(self, text: str) -> float | None:
        """How far a bar of Keras' evaluate is, by a line with a loss: no epoch is above it, and its number of batches is another.

        None for any other line. Without a training above it, it may be one: `fit` of one epoch prints no epoch.
        """
        if (bar := KERAS_BAR.match(text)) is None:
            self._num_other_losses += 1
            return None
        if self._in_epoch:
            self._epoch_batches = bar["of"]
            self._in_epoch = bar["at"] != bar["of"]
            return None
        has_trained = self._epoch_batches or self._num_other_losses >= MIN_LOSSES
        is_other = has_trained and bar["of"] != self._epoch_batches
        return int(bar["at"]) / max(1, int(bar["of"])) if is_other else None

    def _begin_epoch(self, epoch: int) -> None:
        """Notes the epoch of a line. Where the epochs begin again, another training does: curves do not go on from the last one."""
        self._first_epoch = min(epoch, self._first_epoch)
        if epoch <= max(1, self._first_epoch) + 1 and self._epoch >= epoch + MIN_EPOCHS:
            self._clear_curves()
        self._epoch = epoch

    def _clear_curves(self) -> None:
        for points in (self._losses, self.held_out, self.rewards, self.scores, self.gradients, self.speeds):
            points.clear()
        self._memory.clear()

    def _add_progress(self, number: int, rank: int | None, progress: StepLoss, text: str) -> None:
        self._num_lines += 1
        progress = self._bar.counted(progress, has_losses=bool(self._losses))
        # tqdm goes on counting without the total
        overruns = self._is_last and progress.step == (self._last_step or 0) + 1
        says_more = self._is_last and progress.step == self._last_step  # of the last step, such as its checkpoint
        self._is_last = progress.is_last or overruns or says_more
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
            name = "test_loss" if progress.name == "eval_loss" and TEST.match(text) else progress.name
            self._add_loss(rank, self._point(progress.step, name, progress.loss))
            self._add_evaluation(text, progress.name, progress.loss)
        # many games begin with scores of 0
        is_first = progress.reward == 0 and not self.rewards and line_measures.EPISODE_SCORE.match(text) is not None
        is_first = is_first and line_measures.REWARD.search(text) is None
        reward = None if is_first else progress.reward
        named = (("reward", reward), ("score", progress.score), ("grad_norm", progress.grad_norm))
        for points, (name, value) in zip((self.rewards, self.scores, self.gradients), named, strict=True):
            if value is not None:
                store(points, self._point(progress.step, name, value))
        if progress.held_out is not None and rank == self._loss_rank:
            store(self.held_out, self._point(progress.step, "eval_loss", progress.held_out))
        for measure, value in (("loss", progress.loss), ("grad_norm", progress.grad_norm)):
            if value is not None:
                value = math.nan if measure == "loss" and self._is_filtered and not self._has_rewards else value
                self._add_value(measure, value, (number, rank, progress.step), line_measures.rank_of(text, rank))
        self.lines.append((number, rank, progress.step))

    def _add_evaluation(self, text: str, name: str, loss: float) -> None:
        """Notes whether evaluations alone are NaN: a finite loss of training, which is not 0, is beside the first or behind it."""
        is_held_out = name in ("eval_loss", PART_LOSS)
        losses = [value for label, value in labelled_values(text) if "loss" in label] if is_held_out else [loss]
        if is_held_out == math.isfinite(loss):
            self._is_nan_held_out = None
        elif is_held_out or self._is_nan_held_out is not None:
            self._is_nan_held_out = self._is_nan_held_out or any(value and math.isfinite(value) for value in losses)

    def _add_labels(self, text: str, at: ProgressLine) -> None:
        """Notes which of the values on a line are NaN; a loss may have any name."""
        if not self._labels:
            lines = map(labelled_values, self._finite_lines)
            self._labels.update(label for values in lines for label, value in values if math.isfinite(value))
        for label, value in labelled_values(text):
            if math.isfinite(value):
                self._lost.pop(label, None)
                if label in self._labels or len(self._labels) < MAX_LABELS:
                    self._labels[label] += 1
            elif math.isnan(value) and self._labels[label] >= MIN_FINITE:
                places = self._lost.setdefault(label, [])
                places.extend([at] if len(places) < SKIPPED_STEPS else [])

    def _add_memory(self, line: LogLine) -> None:
        """Notes the memory that a line reports behind the first progress, over the lines of progress where no step is known."""
        step = self._num_lines if self._last_step is None else self._last_step
        for name, value in line_measures.read_memory(line.text) if self._num_lines else ():
            key = name if line.rank is None else f"rank {line.rank} {name}"
            if key in self._memory or len(self._memory) < MAX_MEASURES:
                store(self._memory.setdefault(key, []), (step, value))

    @property
    def memory(self) -> tuple[LossPoint, ...]:
        """The memory in use, by step and name."""
        return tuple(LossPoint(step, name, value) for name, points in self._memory.items() for step, value in points)

    @property
    def losses(self) -> tuple[LossPoint, ...]:
        """The losses of one rank; none of a policy, whose loss rises while it learns."""
        if self._is_policy:
            return ()
        name = "eval_loss" if any(p.name not in (PART_LOSS, "eval_loss", "test_loss") for p in self._losses) else "loss"
        return tuple(point._replace(name=name) if point.name == PART_LOSS else point for point in self._losses)

    def _point(self, step: int | None, name: str, value: float) -> LossPoint:
        return LossPoint(step, name, value, None if self._first_epoch == sys.maxsize else self._epoch)

    def _add_loss(self, rank: int | None, point: LossPoint) -> None:
        if not self._losses:
            self._loss_rank = rank
        if rank != self._loss_rank:
            return
        if self._losses and begins_again(self._losses[0], self._losses[-1], point):
            self._clear_curves()
        store(self._losses, point)

    def _add_value(self, measure: str, value: float, at: ProgressLine, rank: int | None) -> None:
        """Notes whether a measure is finite; at: where it is reported. rank: where the line names one in its text alone too."""
        if math.isfinite(value):
            self._of_ranks[measure, rank] = [at]
            self._non_finite.pop(measure, None)
            self._finite.add(measure)
            self._infinite.discard(measure)
            return
        if math.isinf(value):
            self._infinite.add(measure)
        self._of_ranks[measure, rank] = [*self._of_ranks.get((measure, rank), [(0, None, -1)]), at][:2]
        values = self._non_finite.setdefault(measure, [])
        if len(values) < SKIPPED_STEPS:
            values.append((*at[:2], self.step_of(at[1]) if at[2] is None else at[2]))

    def progress(self, last_line: int | None) -> LogProgress:
        """The progress so far; last_line is the number of the log's last line."""
        finished = self._done_line is not None or self._is_last
        silent_end = bool(self.lines) and self.lines[-1][0] == last_line and not finished
        reached = LogProgress(
            steps=self._num_lines, first_step=self.first_step, last_step=self._last_step, last_epoch=self._last_epoch,
            last_loss=self._last_loss, is_all_nan="loss" not in self._finite, done_line=self._done_line,
            finished=finished, silent_end=silent_end,
        )  # fmt: skip
        for label, places in self._lost.items():
            if len(places) >= SKIPPED_STEPS and "loss" not in self._non_finite:
                number, _, step = places[0]
                return replace(reached, nan_line=number, nan_step=step, nan_measure=label)
        norms = self._non_finite.get("grad_norm", [])
        # a loss scaler skips some such steps, most infinite; none counts after a loss of 0, if all are so, or the log stops there
        never_finite = len(norms) > 1 and "grad_norm" not in self._finite
        stops_there = silent_end and bool(norms) and "grad_norm" not in self._infinite
        is_lost = len(norms) == SKIPPED_STEPS or reached.last_loss == 0 or never_finite or stops_there
        for measure in ("loss", "grad_norm"):
            values = self._non_finite.get(measure)
            if values and (measure == "loss" or is_lost):
                number, _, step = values[0]
                label = "eval_loss" if measure == "loss" and self._is_nan_held_out and not norms else measure
                number, rank, step = line_measures.first_to_end(self._of_ranks, measure) or (number, None, step)
                return replace(reached, nan_line=number, nan_step=step, nan_rank=rank, nan_measure=label)
        return reached


def begins_again(first: LossPoint, last: LossPoint, point: LossPoint) -> bool:
    """Whether a loss is the first one of another training in the same log: at the first step again, and as high as at first.

    Where epochs are reported, their steps may begin again: only the first point of all shows it, of a run with the same seed.
    """
    if first.step is None or last.step is None or point.step is None or point.name != last.name:
        return False
    if point.epoch is not None:
        return point == first and point.step < last.step
    is_fresh = AS_AT_FIRST * first.value < point.value < first.value / AS_AT_FIRST and point.value > 2 * last.value
    return is_fresh and point.step <= first.step < last.step - MIN_MEAN


def reports_progress(text: str) -> bool:
    """Whether a line alone, without the header of a table before it, reports a step, an epoch or a loss."""
    text, bar = line_measures.strip_bars(line_measures.in_english(text, text.lower()))
    return read_line(text, bar) is not None or EPOCH.search(text) is not None


def read_line(text: str, bar: StepLoss | None) -> StepLoss | None:
    """What a line reports that is no row of a table; bar: the progress bar that was removed from it."""
    return read_boosting(text) or line_measures.read_step_and_loss(text) or bar or read_counter(text)


def store(points: list[Point], point: Point) -> None:
    """Appends a point to those that are stored, which are never more than MAX_LOSSES."""
    points.append(point)
    if len(points) > MAX_LOSSES:
        del points[1::2]
