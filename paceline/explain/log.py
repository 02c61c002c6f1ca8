"""What is known of a log when it has been read: its records and its progress, run by run."""

import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, pairwise

from paceline.explain.explanation import LogProgress, Record
from paceline.explain.line_measures import parse_count
from paceline.explain.lines import KILLED_LAUNCHER
from paceline.explain.progress import DONE, LossPoint, ProgressLine, ProgressTracker, store
from paceline.explain.run_bounds import RunBounds
from paceline.explain.series import MetricSeries, SeriesTable

FIRST_RECORDS, LAST_RECORDS = 2000, 1000  # stored of a run with more errors
SEVERAL_PROCESSES = re.compile(r"(?i)\brank(?:\b|_?\d)|torchrun|torch\.distributed|srun|mpirun|deepspeed|world[_ ]size")
PROMPT = re.compile(r"(?:\(Pdb\+*\)|\bipdb>) *$")  # of a debugger, which waits for input
MIN_SERVED = 3  # in a log's last lines
SAMPLE_LINES = 24  # of a text that a model has written, to the line that ends it
SAMPLE_END = re.compile(
    r"(?i)\W*end (?:of )?(?:the )?(?:model )?(?:samples?|generat(?:ions?|ed text)|completions?)\b[^:]{0,30}$"
)
SERVED = re.compile(  # a request that was answered, vLLM's report of such, what Jupyter does for its user
    r'HTTP/\d(?:\.\d)?" 20\d\b|\bAvg generation throughput: (?!0\.0\b)\d'
    r"|\b(?:Notebook|Server|Lab)App\] (?:Saving file at|Kernel started|20\d (?:GET|PUT|POST|PATCH) )"
)
# a tensor that is NaN with no name before it; the numbers that differ between lines of one form; how many of the last lines have it
UNNAMED_NAN = re.compile(r"(?:^|[,;(\[]\s*|[\d)\]]:?\s+)tensor\(nan(?=[\s,;)\]]|$)")
NUMBER = re.compile(r"[-+]?\d[\d.,]*(?:e[-+]?\d+)?")
UNNAMED, MIN_UNNAMED = "a value without a name", 5
# a row of nothing but numbers behind a counter; columns that become NaN in the same row, as one alone may where it is not computed
ROW, MIN_LOST = re.compile(r"\s*\d+(?:[\s,;|]+(?:[-+]?\d+(?:\.\d*)?(?:e[-+]?\d+)?|nan))+\s*"), 2
CELL = re.compile(r"[^\s,;|]+")
PAIR = re.compile(
    r"(?i)(?:^\W*(?P<step>\d{1,9})\b.{0,60}?)?(?<![a-z])tr(?:ain)?[ :=]{1,3}(?P<train>\d+\.\d+)[ ,;|/]{1,4}"
    r"(?:va(?:l(?:id)?)?|dev|test|held-?out)[ :=]{1,3}(?P<valid>\d+\.\d+)(?![\d.]* ?(?:%|s\b|ms|sec|min))"
)
NO_LOSS = re.compile(r"(?i)(?<![a-z])(?:acc|f1|auc|iou|dice|score|time|sec|lr|rate|mem|size|reward|return)")
EARLY_STOP = re.compile(  # not that it may come
    r"(?i)(?:\bearly[ -]?stop|\bstop\w* early\b)(?!.*\b(?:counter|patience|enabled|monitor)\b)"
    r"|(?i:early ?stop\w* counter: (?P<count>[2-9]|\d\d+) (?:out of|/) (?P=count)\b)"
)
ACCURACY = re.compile(
    r"(?i)(?:(?<![a-z])(?:acc(?:uracy)?(?:@1)?|top-?1|[it]2[it]_r@?1)(?: of the [\w ]{1,60})?|准确率)['\"]?"
    r"(?:\s*[:：=]\s*['\"]?|\s+(?=\d+\.\d))(?P<value>\d+(?:\.\d+)?)(?P<percent>\s?%)?"
)
RESUMED = re.compile(  # from a checkpoint of a step
    r"(?i)(?!.*\b(?:convert|export|merg|evaluat|test)).{0,60}?\b(?:load(?:ed|ing)|resum(?:ed|ing)|restor(?:ed|ing))\b.{0,120}?"
    r"\b(?:step|iter(?:ation)?|epoch|checkpoint|ckpt)[ _=:-]{0,2}(?P<step>\d{1,12})\b"
)
# of a curriculum, behind whose harder tasks or longer texts the loss begins higher; losses of a stage, and the fall that shows
# that it learns
STAGE = re.compile(r"(?i)\b(?:stage|phase|task|res(?:olution)?)[ _=:]{1,3}(?P<stage>\d{1,3})\b")
MIN_STAGE, STAGE_START, STAGE_FALL, STAGE_END = 10, 3, 0.8, 3
SAVED = re.compile(r"(?i)^(?!.*\b(?:not|never|no|0|fail\w*|error)\b).*\b(?:saved|wrote|written)\b")
JOINED = re.compile(r"\bMEMBER: (?P<member>\d{1,6})/(?P<members>\d{1,6})\b")  # of Lightning's ranks, as they join
# what tells apart the tasks of an array or the workers of a pool that write to one log
MEMBER, MAX_MEMBERS = re.compile(r"\[?(?:task|worker|job|replica) ?[#=:]? ?\d{1,6}\]:? "), 1000
# with the point: fewer may be the same by rounding; the last value is reported again at the end; values of a curve over epochs
RANK_DIGITS, RANK_SPREAD, FEW_VALUES = 6, 3, 3
# what lines report as exactly 0, not rounded to it, where the loss stands still
EXACT_ZERO = re.compile(r"0(?:\.0|\.0{7,}|(?:\.0*)?e[-+]?0+)?")
ZERO_REASONS = {
    "the learning rate is 0": re.compile(r"(?i)(?<![a-z])(?:lr|learning.rate)\W{1,4}(?P<value>\d[\d.]*(?:e[-+]?\d+)?)"),
    "the margins between chosen and rejected answers are 0": re.compile(r"rewards/margins\W{1,4}(?P<value>[\d.]+)"),
}
ZEROS = 3  # on the lines of a log, if no others are there
LAST_LINES = 8  # stored for a failure that is not in the catalogue


@dataclass(frozen=True)
class Log:
    """What the verdict uses of a log: of its last run, where it holds several."""

    records: tuple[Record, ...] = ()
    progress: LogProgress = field(default_factory=LogProgress)
    last_progress: tuple[ProgressLine, ...] = ()
    last_lines: tuple[tuple[int, str], ...] = ()
    last_steps: Mapping[int, int] = field(default_factory=dict)  # by rank, of lines that have a rank
    ranks: frozenset[int] = frozenset()  # whose lines were parsed
    losses: tuple[LossPoint, ...] = ()  # of one rank, a part of them in a long log
    held_out: tuple[LossPoint, ...] = ()  # likewise, of evaluations
    scores: tuple[LossPoint, ...] = ()  # likewise, of evaluations: accuracies
    gradients: tuple[LossPoint, ...] = ()  # their norms
    memory: tuple[LossPoint, ...] = ()  # in use
    rewards: tuple[LossPoint, ...] = ()  # of a policy
    accuracies: tuple[float, ...] = ()  # of training or evaluations, as shares
    speeds: tuple[LossPoint, ...] = ()  # likewise, throughput
    first_line: int = 1  # of the run
    is_restart: bool = False  # the run begins as the log did
    is_later: bool = False  # by its clock, or as only a new process does, so that no buffer held its lines
    by_command: bool = False  # the run begins with a command that a shell prints
    has_end: bool = False  # a record reports the end of a program
    stops_early: bool = False  # no loss of training is behind a line that reports early stopping
    members: Mapping[str, int] = field(default_factory=dict)  # the last line with progress of each member of the job
    last_ignored: int | None = None  # the line that announces an exception that Python ignored
    earlier: "tuple[Log, ...]" = ()  # the runs before it in the same log, of many the last ones
    is_notebook: bool = False
    note: str = ""  # on cells of a notebook that failed before later ones worked
    problem: str = ""  # why the log could not be read whole

    @property
    def last_progress_line(self) -> int:
        return max((line for line, _, _ in self.last_progress), default=0)

    @property
    def last_line(self) -> int:
        return self.last_lines[-1][0] if self.last_lines else 0

    def is_in_sample(self, line: int, text: str) -> bool:
        """Whether what stands from a line on is a part of what a model has written, since a line behind it ends such a text."""
        near = [other.text for other in self.records_between(line + 1, line + SAMPLE_LINES)]
        ends = [other for number, other in self.last_lines if line < number <= line + SAMPLE_LINES]
        return any(map(SAMPLE_END.match, (*text.split("\n")[1:], *near, *ends)))

    @property
    def is_serving(self) -> bool:
        """Whether it ends with requests that a server has answered."""
        return sum(SERVED.search(text) is not None for _, text in self.last_lines) >= MIN_SERVED

    @property
    def lacks_members(self) -> bool:
        """Whether the log ends while ranks join, and the last one of them has not."""
        members = [match for _, line in self.last_lines if (match := JOINED.search(line))]
        return bool(members) and not any(match["member"] == match["members"] for match in members)

    @cached_property
    def has_one_process(self) -> bool:
        """Whether no line tells of several processes."""
        texts = [*(record.text for record in self.records), *(text for _, text in self.last_lines)]
        return not (self.ranks or any(map(SEVERAL_PROCESSES.search, texts)))

    @cached_property
    def _by_line(self) -> tuple[list[Record], list[int]]:
        records = sorted(self.records, key=lambda record: record.line)
        return records, [record.line for record in records]

    def records_between(self, first: int, last: int) -> list[Record]:
        """The records of the lines from first to last, in the order of the lines."""
        records, lines = self._by_line
        return records[bisect_left(lines, first) : bisect_right(lines, last)]

    def steps_after(self, record: Record, *, before: float = math.inf) -> set[int]:
        """The steps that the same rank reports between a record and a line; a line without a step counts as one of its own."""
        return {
            -line if step is None else step
            for line, rank, step in self.last_progress
            if record.line < line < before and (record.rank is None or rank in (None, record.rank))
        }

    def lost_launcher(self, record: Record) -> bool:
        """Whether a shell reports that the ranks' launcher was killed, and no program behind it that its work is done.

        A script says "done" behind a program that has failed, too.
        """
        is_killed = KILLED_LAUNCHER.search(record.text) is not None
        ends = (text for number, text in self.last_lines if number > record.line and " " in text)
        return is_killed and not any(map(DONE.search, ends))


class NumberRows:
    """Finds columns without a name that were finite in many rows of numbers and are NaN in all rows since."""

    def __init__(self) -> None:
        self._first = 0  # the counter of the last row
        self._num_finite: list[int] = []  # by column
        self._lost: dict[int, list[int]] = {}  # by column, the lines since it is NaN

    def add(self, number: int, text: str) -> None:
        if ROW.fullmatch(text) is None:
            return
        cells = CELL.findall(text)
        if len(cells) != len(self._num_finite) or int(cells[0]) < self._first:
            self._num_finite, self._lost = [0] * len(cells), {}
        self._first = int(cells[0])
        for column, cell in enumerate(cells):
            if cell != "nan":
                self._num_finite[column] += 1
                self._lost.pop(column, None)
            elif self._num_finite[column] >= MIN_UNNAMED:
                self._lost.setdefault(column, []).append(number)

    @property
    def nan_line(self) -> int | None:
        """The first of the rows in which several columns are NaN."""
        starts = Counter(lines[0] for lines in self._lost.values() if len(lines) >= MIN_UNNAMED)
        return next((line for line, count in starts.items() if count >= MIN_LOST), None)


class OpenRun:
    """What was read of a run so far."""

    def __init__(self, first_line: int, *, rank: int | None):
        self.first_line = first_line
        self.is_restart, self.is_later, self.by_command = False, False, False
        self.last_ignored: int | None = None
        self.first: list[Record] = []
        self.last: deque[Record] = deque(maxlen=LAST_RECORDS)
        self.num_parsed = 0  # selected lines
        self.progress = ProgressTracker()
        self.ranks: set[int] = set() if rank is None else {rank}
        self.tail: deque[tuple[int, str]] = deque(maxlen=LAST_LINES)
        self.bounds = RunBounds()
        self.rows = NumberRows()
        self.accuracies: list[float] = []
        self.members: dict[str, int] = {}
        self.pairs: list[tuple[LossPoint, ...]] = []  # of training and evaluation, without the name of a measure
        self.early_stop: LossPoint | None = None  # the last loss of training before it
        self.stage: int | None = None
        self.stage_step: int | None = None  # where the last of several stages began

    def add_progress(self, text: str) -> None:
        """Notes the text of a line of progress, which the tracker has read."""
        self.bounds.add_progress(text)
        if match := STAGE.search(text):
            before, self.stage = self.stage, int(match["stage"])
            if before is not None and self.stage > before:
                self.stage_step = self.progress.step_of(None)

    def add_measures(self, number: int, text: str) -> None:
        """Notes what a line that the tracker has read tells beside its progress."""
        self.rows.add(number, text)
        if (match := MEMBER.match(text)) and len(self.members) < MAX_MEMBERS:
            self.members[match[0]] = number
        if match := ACCURACY.search(text):
            value = float(match["value"])
            store(self.accuracies, value / 100 if match["percent"] or value > 1 else value)
        if (match := PAIR.search(text)) and not NO_LOSS.search(text, 0, match.start("train")):
            step, values = parse_count(match["step"] or ""), (("loss", match["train"]), ("eval_loss", match["valid"]))
            store(self.pairs, tuple(LossPoint(step, name, float(value)) for name, value in values))
        if EARLY_STOP.search(text):
            self.early_stop = self._last_trained()

    def _last_trained(self) -> LossPoint | None:
        return next((point for point in reversed(self.progress.losses) if point.name != "eval_loss"), None)

    def add_record(self, record: Record) -> None:
        (self.first if len(self.first) < FIRST_RECORDS else self.last).append(record)
        self.bounds.add_record(record)

    def is_resumed(self, text: str) -> bool:
        """Whether a line behind the end of a job loads a checkpoint that the run itself had reached: another job goes on."""
        first, end, match = self.progress.first_step, self.bounds.end, RESUMED.match(text)
        if match is None or first is None or end is None or end.step is None or self.bounds.is_shared:
            return False
        return self.bounds.is_closed and first < int(match["step"]) <= end.step

    def close(self, behind: int | None = None) -> Log:
        """The run as a log; behind: the number of the first line that is not a part of it, if there is one."""
        tail = tuple(item for item in self.tail if behind is None or item[0] < behind)
        progress = self.progress.progress(tail[-1][0] if tail else None)
        has_measures = self.progress.held_out or self.progress.scores or self.progress.rewards
        if progress.nan_line is None and progress.last_loss is None and not has_measures:
            number = find_unnamed_nan(tail) or self.rows.nan_line
            progress = replace(progress, nan_line=number, nan_measure=UNNAMED) if number else progress
        if tail and PROMPT.search(tail[-1][1]):
            progress = replace(progress, finished=False, done_line=None)
        records = tuple(record for record in (*self.first, *self.last) if behind is None or record.line < behind)
        has_stopped = self.early_stop is not None and self.early_stop == self._last_trained()
        curves = self.progress
        losses, held_out = losses_of_stage(curves.losses, self.stage_step), tuple(curves.held_out)
        # a pair is one of losses, not of scores, if that of training falls
        if self.pairs and not (losses or held_out) and self.pairs[-1][0].value < self.pairs[0][0].value:
            losses, held_out = zip(*self.pairs, strict=True)
        return Log(
            records=records, progress=progress, last_progress=tuple(curves.lines), last_lines=tail,
            last_steps=curves.steps_by_rank, ranks=frozenset(self.ranks),
            losses=losses, held_out=held_out,
            scores=tuple(curves.scores), gradients=tuple(curves.gradients), memory=curves.memory,
            rewards=tuple(curves.rewards), accuracies=tuple(self.accuracies), speeds=tuple(curves.speeds),
            first_line=self.first_line, is_restart=self.is_restart, is_later=self.is_later, by_command=self.by_command,
            has_end=self.bounds.end is not None, stops_early=has_stopped, last_ignored=self.last_ignored,
            members=self.members,
        )  # fmt: skip


def losses_of_stage(losses: tuple[LossPoint, ...], first_step: int | None) -> tuple[LossPoint, ...]:
    """The losses from the step on where the last stage of a curriculum began, if they fall in it; else all of them.

    A stage that begins far above the first loss of all has diverged where it began.
    """
    values = [point for point in losses if first_step is not None and first_step <= (point.step or 0)]
    if len(values) < MIN_STAGE or values[0].value > STAGE_START * losses[0].value:
        return losses
    highest = max(point.value for point in values[-STAGE_END:])
    return tuple(values) if highest < STAGE_FALL * values[0].value else losses


def find_unnamed_nan(lines: Sequence[tuple[int, str]]) -> int | None:
    """The first of several lines of one form that report NaN in the same place, without a name before it."""
    forms: dict[str, list[int]] = defaultdict(list)
    for number, text in lines:
        if UNNAMED_NAN.search(text):
            forms[NUMBER.sub("0", text)].append(number)
    return next((numbers[0] for numbers in forms.values() if len(numbers) >= MIN_UNNAMED), None)


def step_of(rank: int | None, record: Record, logs: Sequence[Log], progress: LogProgress) -> int | None:
    """Returns the step of a failure: that of its record, or the last step of the rank to blame where another one reports it."""
    step = progress.last_step if record.step is None else record.step
    if rank is None or (record.step is not None and record.rank == rank):
        return step
    steps = (log.progress.last_step if log.ranks == {rank} else log.last_steps.get(rank) for log in logs)
    return max((own for own in steps if own is not None), default=step)


def line_series(points: Sequence[LossPoint], *, kind: str | None = None) -> list[MetricSeries]:
    """The curves by name that lines of a log report, over steps, or else epochs, or else their number. kind: of all of them."""
    table = SeriesTable("log", kinds=(lambda _: kind) if kind else None)
    has_steps = all(point.step is not None for point in points)
    by_name: dict[str, list[LossPoint]] = defaultdict(list)
    for point in points:
        by_name[point.name].append(point)
    by_epoch = {name for name, curve in by_name.items() if has_epochs(curve)}
    last = dict.fromkeys((name for name, curve in by_name.items() if is_of_ranks(curve)), math.nan)
    points = list(dict.fromkeys(points)) if by_epoch >= set(by_name) else points
    for number, (step, name, value, epoch) in enumerate(points):
        if name in last:
            if value == last[name]:
                continue
            last[name] = value
        step = step if has_steps else epoch if name in by_epoch else number
        table.add(name, number if step is None else step, value, math.nan)
    return table.take_series()


def has_epochs(curve: Sequence[LossPoint]) -> bool:
    """Whether each point of a curve is of a later epoch than the one before, or the same one reported again."""
    ascends = all(before == point or (before.epoch or 0) < (point.epoch or 0) for before, point in pairwise(curve))
    is_often = 2 * len({*curve}) >= len(curve) or len({point.value for point in curve}) >= FEW_VALUES
    return ascends and curve[0].epoch is not None and is_often


def is_of_ranks(curve: Sequence[LossPoint]) -> bool:
    """Whether several ranks report each value: all of two or more come about as often in a row, to many digits."""
    times = [len(list(group)) for _, group in groupby(point.value for point in curve)]
    as_often = len(times) > 1 and min(times) > 1 and max(times) <= RANK_SPREAD * min(times)
    return as_often and all(len(f"{point.value!r}") > RANK_DIGITS for point in curve)


def shares_of(scores: Sequence[LossPoint]) -> list[float]:
    """Scores as shares, also of percentages."""
    values = [point.value for point in scores]
    return [value / 100 for value in values] if max(values, default=0.0) > 1 else values


def zero_reason(logs: Sequence[Log]) -> str:
    """What is exactly 0 on the last lines that report it, so that nothing is learned."""
    texts = [text for log in logs for _, text in log.last_lines]
    for reason, pattern in ZERO_REASONS.items():
        values = [match["value"] for text in texts if (match := pattern.search(text))]
        if len(values) >= ZEROS and all(map(EXACT_ZERO.fullmatch, values)):
            return reason
    return ""
