"""
One line of a log: its prefix, its progress bars, and the step and loss that it reports.

Launchers and loggers write rank, host and time before a line. Such prefixes nest (`worker-1: [default0]:[rank8]:
[2026-01-02 03:04:05] text`), so they are removed one after the other until none matches. A program that prints behind an
open progress bar prints on the same line, so bars are removed too. Steps and losses are read in the forms of the usual
trainers.
"""

import math
import re
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.explain.explanation import LogProgress
from paceline.terminal import STEERING

MAX_PREFIXES = 8  # on one line; real ones have four
MAX_RANKS = 100_000
MAX_PROGRESS_LINES = 64  # stored; what came before them has not ended the run
MAX_LOSSES = 2000  # stored; with more every second one is dropped
MAX_DIGITS = 15
ABRUPT = (
    0.5  # a loss above this followed by exactly 0: transformers writes 0 for NaN (trainer.py, logging_nan_inf_filter)
)
SKIPPED_STEPS = 3  # in a row, by a loss scaler: with more the gradients are lost
DAYS_BEFORE_MONTH = (0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334)
MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")

# behind the 8-bit CSI, or with U+FFFD in place of ESC, which a lossy decoder has put there
OTHER_ESCAPE = re.compile(r"(?:\x9b|\ufffd\[)[0-?]*[ -/]*[@-~]")

RANK = re.compile(
    r"\s*\[(?:rank|default|RANK |Rank )(?P<rank>\d{1,6})\]:? ?"  # torch, torchrun
    r"|\[\d+,(?P<mpi>\d{1,6})\](?:<std(?:err|out|diag)>)?:? ?"  # mpirun --tag-output
    r"|\[(?P<horovod>\d{1,6})\]<std(?:err|out)>:? ?"
    r"|\(Worker_(?:TP|PP)(?P<vllm>\d+) pid=\d+\) ?"  # vLLM with one parallel dimension; Ray and NeMo-RL
    r"|\((?P<actor>(?:[\w.:-]{1,80}(?:\(\w*\)|\[rank=(?P<nemo>\d+)\])?,? ?)?(?:rank=(?P<ray>\d+), ?)?pid=\d+"
    r"(?:, ?ip=(?P<ip>[\d.]+))?)\) ?"
    r"|(?:CRITICAL|ERROR) \[[\w.]{1,80}:\d+, rank=(?P<olmo>\d+)\] "
    r"|\[(?P<paceline>\d{1,4})\] {1,4}(?=[^\s{])"  # the terminal output of paceline; [17] {'loss': ... is a list's number
)
SLURM = re.compile(r" {0,5}(?P<rank>\d{1,5}): ?(?=\S|  )")  # srun --label
NCCL = re.compile(r"(?P<host>[\w.-]{1,80}):\d+:\d+ \[(?P<device>-?\d{1,3})\] ")
HOST = re.compile(  # pdsh (accelerate and DeepSpeed on several hosts), docker compose
    r"(?P<host>(?:[\w-]*(?:worker|node|gpu|host|master|server|dgx|^ip-)[\w.-]*|\d{1,3}(?:\.\d{1,3}){3}"
    r"|[A-Za-z][\w.-]*\d)(?<!\.so)(?<!\.py))"
    r"(?:: (?=\s*(?:\[|Traceback|  File|\w+(?:\.\w+)*(?:Error|Exception|Interrupt)\b|[\w-]+:\d+:\d+ ))| +\| )"
)
OTHER = re.compile(
    r"[\w.-]+(?:/\d+)? (?=\[default\d+\]:|\[rank\d+\]:)"  # torchx
    r"| {0,6}\d{1,6}[ \t]+(?=(?:Traceback \(|  File \"|File \"|(?:\w+\.)*\w*(?:Error|Exception): ))"  # cat -n
    r"|\d+\.\d+s[ \t]+\d+[ \t]+"  # Kaggle: seconds, line number
    r"|std(?:out|err) [FP] "  # Kubernetes
    r"|\(raylet(?:, ip=[\d.]+)?\) "  # Ray, for processes that have not registered yet
    r"|\[\d+ similar log lines\] "  # Monarch
    r"|(?:python[\d.]*|torchrun|accelerate|deepspeed|bash|sh)\[\d{1,7}\]: "  # journald
    r"|ERROR \d\d-\d\d \d\d:\d\d:\d\d \[?[\w./-]{1,200}\.py:\d+\] ?"  # vLLM
    r"|[EFC] \S{1,200}\.py:\d+\] \[[\d/_]{1,20}\] "  # torch.compile: graph 0, its second compilation
    r"|E {2,40}(?=\S)| {2,8}\| (?=Traceback|  File|\w+(?:Error|Exception))"  # pytest, and exception groups
)

ISO = re.compile(
    r"\s*\[?(?P<year>\d{4})[-/](?P<month>\d\d)[-/](?P<day>\d\d)[T _-]{1,2}(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)"
    r"(?P<fraction>[.,:]\d+)?(?: ?Z|[+-]\d\d:?\d\d| UTC)?(?:\]|(?=[\s,:|]|$))[ :|-]*"
)
GLOG = re.compile(
    r"\s*(?P<open>\[)?(?P<level>[IWEFDC])(?P<month>\d{1,2})(?P<day>\d\d) (?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)"
    r"(?P<fraction>[.,]\d+)? +(?:\d+ )?"
)
CTIME = re.compile(
    r"\s*\[?(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) (?P<name>[A-Z][a-z]{2}) {1,2}(?P<day>\d{1,2})"
    r" (?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)"
    r"(?: [A-Z]{3,4})? (?P<year>\d{4})\]?:? ?(?=[\[\s\S])"
)
SYSLOG = re.compile(
    r"(?P<name>[A-Z][a-z]{2}) {1,2}(?P<day>\d{1,2}) (?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d) (?P<host>[\w.-]+) "
    r"(?=kernel|systemd|slurm|\w+\[)"
)
CLOCK = re.compile(
    r"\s*\[?(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)(?P<fraction>[.,]\d+)?\]?(?=[\s:|,-])[ :|,-]*"
)
UPTIME = re.compile(r"\[ *(?P<second>\d+\.\d{6})\] ")  # dmesg
TIMES = (ISO, GLOG, CTIME, SYSLOG, CLOCK, UPTIME)

BAR = re.compile(
    r"(?:[^\s|%][^|%]{0,80}?: +)? {0,3}(?P<percent>\d{1,3})%\|[^|]*"
    r"\|? {0,2}(?P<at>[\d.,]+[kMG]?)/(?P<of>[\d.,]+[kMG]?)(?: \[[^\]]*(?:\]|$)|)"
)
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
    r"|it)['\"]?\s*[:=# \[(]{0,3}\s*(?P<step>\d[\d,]*)(?P<of>\s*/\s*\d[\d,]*)?(?![\w.]|\s*[A-Za-z]+/)",
    re.IGNORECASE,
)
# 2.5, '2.5', nan.0, tensor(nan, np.float64(nan)
VALUE = (
    r"['\"]?\s*(?:[:=|]|is\b(?: (?:not finite|non-finite|NaN)[:,]?)?)?\s*(?:[\w.]{1,20}\()?['\"]?"
    r"(?P<value>[-+]?(?:\d+(?:\.\d*)?(?:e[-+]?\d+)?|nan|inf))(?:\.0)?\b"
)
LOSS = re.compile(rf"loss(?: train|_(?!scal|weight|fn|func|type)[a-z]\w{{0,15}})?{VALUE}", re.IGNORECASE)
HELD_OUT_LOSS = re.compile(rf"\be?val(?:id(?:ation)?)?[_ /.-]*loss{VALUE}", re.IGNORECASE)
GRAD_NORM = re.compile(rf"(?:grad(?:ient)?s?[_ /.-]*(?:global[_ ])?|\bg|\b)norm{VALUE}", re.IGNORECASE)
NAME_START = re.compile(r"[\w./-]*$")  # of a measure's name, before the part that LOSS finds
COLUMN_GAP = re.compile(r"\s*\|\s*|\t+|\s{2,}")
LOSS_COLUMN = re.compile(r"(?i)(?:^|[\s_/-])loss$")
YOLO_ROW = re.compile(r"^\s*\d+/\d+\s+[\d.]+[GM]?\s+(?P<losses>(?:(?:\d+\.\d+|0|nan|inf)\s+){2,5})")  # epoch, memory
STEP_COLUMN = re.compile(r"(?i)(?:global[_ ])?(?:step|iter(?:ation)?|epoch)s?")
ROW_STARTS = frozenset("0123456789-nNi")  # 3/30, nan, NaN, No log, inf
NUMBER_CELL = re.compile(r"(?i)[-+]?(?:\d+(?:\.\d*)?(?:e[-+]?\d+)?|nan|inf)")
OTHER_LOSS = re.compile(r"(?:val|valid|validation|eval|test|dev|best|min|prev)[_ /.-]*$", re.IGNORECASE)
RECORD_LOSS = re.compile(r"(?:best|min|prev)[_ /.-]*(?:\w{2,6}[_ /.-]*)?$", re.IGNORECASE)  # infinite at first
DONE = re.compile(
    r"training (?:is )?(?:completed?|finished|done)|(?:finished|done) training|train_runtime|saved (?:the )?final"
    r"|(?:max_steps|max_epochs)=?\d*`? reached|job (?:finished|completed) success|\ball \d* ?(?:tests|checks) passed"
    r"|training has finished|run finished|finished successfully|^done\.?$",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class LogLine:
    """The text of one line, and what its prefix reports about where and when it was written."""

    text: str
    rank: int | None = None
    host: str | None = None
    time: float | None = None
    stream: str = ""  # the same for all lines of one process; "" if nothing identifies the process
    device: int | None = None  # the GPU's index on its host


@dataclass(frozen=True)
class StepLoss:
    """The step, the loss and the norm of the gradients that one line reports."""

    step: int | None
    loss: float | None
    is_last: bool = False  # step 100/100
    grad_norm: float | None = None
    name: str = "loss"
    held_out: float | None = None  # the loss of an evaluation beside that of training


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
        self._loss_rank: int | None = None  # whose losses are stored: the first that reported one
        self._is_policy = False
        self._is_filtered = False  # the losses are 0 in place of NaN
        self._columns: tuple[str, ...] = ()  # of the table whose rows may follow
        self._num_lines = 0
        self._last_step: int | None = None
        self._last_loss: float | None = None
        self._done_line: int | None = None
        self._is_last = False  # the last progress line is step 100/100
        self._non_finite: dict[str, list[ProgressLine]] = {}  # by measure: its values since the last finite one
        self._finite: set[str] = set()  # measures that were finite at least once

    def step_of(self, rank: int | None) -> int | None:
        """The last step that this rank reported, or else that any rank reported."""
        return self._last_step if rank is None else self.steps_by_rank.get(rank, self._last_step)

    def add(self, number: int, line: LogLine, bar: StepLoss | None) -> None:
        """Adds line `number` of the log; bar is the progress bar that was removed from it."""
        if DONE.search(line.text):
            self._done_line = number
        self._is_policy = self._is_policy or "reward" in line.text.lower()
        self._columns = read_columns(line.text) or self._columns
        progress = read_row(line.text, self._columns) or read_step_and_loss(line.text) or bar
        if progress is None:
            return
        self._num_lines += 1
        self._is_last = progress.is_last
        if progress.step is not None:
            self._last_step = progress.step
            # a header may report the number of all steps first
            self.first_step = progress.step if self.first_step is None else min(self.first_step, progress.step)
            if line.rank is not None and len(self.steps_by_rank) < MAX_RANKS:
                self.steps_by_rank[line.rank] = progress.step
        if progress.loss is not None:
            fell_to_zero = progress.loss == 0 and (self._last_loss or 0.0) > ABRUPT
            self._is_filtered = fell_to_zero or (progress.loss == 0 and self._is_filtered)
            self._last_loss = progress.loss
            self._add_loss(line.rank, (progress.step, progress.name, progress.loss))
        if progress.held_out is not None and line.rank == self._loss_rank:
            self._held_out.append((progress.step, "eval_loss", progress.held_out))
        for measure, value in (("loss", progress.loss), ("grad_norm", progress.grad_norm)):
            if value is not None:
                value = math.nan if measure == "loss" and self._is_filtered and not self._is_policy else value
                self._add_value(measure, value, (number, line.rank, progress.step))
        self.lines.append((number, line.rank, progress.step))

    @property
    def losses(self) -> tuple[LossPoint, ...]:
        """The losses of one rank; none of a policy, whose loss rises while it learns."""
        return () if self._is_policy else tuple(self._losses)

    @property
    def held_out(self) -> tuple[LossPoint, ...]:
        """The losses of evaluations."""
        return tuple(self._held_out)

    def _add_loss(self, rank: int | None, point: LossPoint) -> None:
        if not self._losses:
            self._loss_rank = rank
        if rank == self._loss_rank:
            self._losses.append(point)
        for losses in (self._losses, self._held_out):
            if len(losses) > MAX_LOSSES:
                del losses[1::2]

    def _add_value(self, measure: str, value: float, at: ProgressLine) -> None:
        """Notes whether a measure is finite; at: where it is reported."""
        if math.isfinite(value):
            self._non_finite.pop(measure, None)
            self._finite.add(measure)
            return
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
        # a loss scaler skips some steps with such a gradient norm; behind a loss of 0, or with all of them so, no step counts
        never_finite = len(norms) > 1 and "grad_norm" not in self._finite
        is_lost = len(norms) == SKIPPED_STEPS or reached.last_loss == 0 or never_finite
        for measure in ("loss", "grad_norm"):
            values = self._non_finite.get(measure)
            if values and (measure == "loss" or is_lost):
                number, _, step = values[0]
                return replace(reached, nan_line=number, nan_step=step, nan_measure=measure)
        return reached


def strip_escapes(text: str) -> str:
    """The text without colours, cursor moves, control characters and those that turn its direction."""
    if "\x9b" in text or "\ufffd[" in text:
        text = OTHER_ESCAPE.sub("", text)
    return text if text.isprintable() else STEERING.sub("", text)


def split_prefix(text: str) -> LogLine:
    """Removes the prefixes of a line and reads rank, host and time from them."""
    rank: int | None = None
    host: str | None = None
    time: float | None = None
    device: int | None = None
    stream = ""
    for _ in range(MAX_PREFIXES):
        if match := RANK.match(text):
            numbers = match.group("rank", "mpi", "horovod", "vllm", "nemo", "ray", "olmo", "paceline")
            rank = next((int(number) for number in numbers if number), rank)
            host = match["ip"] or host
            stream = stream or match[0].strip(" :")
        elif match := NCCL.match(text) or HOST.match(text):
            host = match["host"]
            device = int(match["device"]) if match.re is NCCL else device
            stream = stream or match[0].strip(" :|")
        elif time is None and (match := next(filter(None, (pattern.match(text) for pattern in TIMES)), None)):
            time = seconds_of(match)
            host = match.groupdict().get("host") or host
            if match.re is GLOG:
                text = f"{match['open'] or ''}{match['level']} {text[match.end() :]}"
                continue
        elif match := SLURM.match(text):
            rank = int(match["rank"]) if rank is None else rank
            stream = stream or match[0].strip(" :")
        elif not (match := OTHER.match(text)):
            break
        text = text[match.end() :]
    return LogLine(text=text.rstrip(), rank=rank, host=host, time=time, stream=stream, device=device)


def seconds_of(match: re.Match[str]) -> float:
    """Seconds since a fixed moment. A year counts 365.25 days, so only times of the same format compare exactly."""
    parts = defaultdict(str, {name: text for name, text in match.groupdict().items() if text})
    name = parts["name"].lower()
    month = MONTHS.index(name) + 1 if name in MONTHS else int(parts["month"] or 1)
    days = int(parts["year"] or 0) * 365.25 + int(parts["day"] or 0) + DAYS_BEFORE_MONTH[min(max(month, 1), 12) - 1]
    clock = int(parts["hour"] or 0) * 3600 + int(parts["minute"] or 0) * 60 + float(parts["second"])
    return days * 24 * 3600 + clock + float("0." + parts["fraction"].lstrip(".,:"))


def strip_bars(text: str) -> tuple[str, StepLoss | None]:
    """The line without its progress bars, and the count of the last one with the loss beside it."""
    if "%|" not in text:
        return text, None
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


def read_step_and_loss(text: str) -> StepLoss | None:
    """The step or the loss that a line reports; None if it reports neither."""
    lowered = text.lower()
    loss_match = find_measure(LOSS, text) if "loss" in lowered else None
    loss = read_value(loss_match)
    held_out = read_value(HELD_OUT_LOSS.search(text)) if "val" in lowered and loss is not None else None
    step = STEP.search(text)
    grad_norm = read_value(find_measure(GRAD_NORM, text)) if "norm" in lowered else None
    if step is None and loss is None:
        return None if grad_norm is None or math.isfinite(grad_norm) else StepLoss(None, None, grad_norm=grad_norm)
    if loss is None and step is not None and not (step["of"] or ":" in text or "=" in text or len(text) < 40):
        return None  # prose, such as "takes 3 steps 2 at a time"
    number = parse_count(step["step"]) if step else None
    is_last = bool(step and step["of"] and parse_count(step["of"].strip("/ \t")) == number)
    if loss == 0 and "reward" in lowered and lowered.count("nan") == 1:
        grad_norm = (
            None  # of GRPO, whose loss is 0 by design: as long as rewards and KL are finite, only the step is skipped
        )
    name = name_of(loss_match) if loss_match else "loss"
    return StepLoss(step=number, loss=loss, is_last=is_last, grad_norm=grad_norm, name=name, held_out=held_out)


def find_measure(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """The measure's first value of training, or its first one that is not finite; of validation if there is no other."""
    matches = list(pattern.finditer(text))
    names = [text[max(0, match.start() - 20) : match.start()] for match in matches]
    training = [match for match, name in zip(matches, names, strict=True) if not OTHER_LOSS.search(name)]
    measured = [match for match, name in zip(matches, names, strict=True) if not RECORD_LOSS.search(name)]
    broken = (match for match in [*training, *measured] if not math.isfinite(float(match["value"])))
    return next(broken, next(iter(training or matches), None))


def name_of(match: re.Match[str]) -> str:
    """The name of a loss in the form of metrics: train/loss."""
    before = match.string[max(0, match.start() - 40) : match.start()]
    prefix = NAME_START.search(before)
    return "eval_loss" if OTHER_LOSS.search(before) else f"{prefix[0] if prefix else ''}loss"


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
    return StepLoss(next((count for count in counts if count is not None), None), training[name], name=name)


def parse_count(text: str) -> int | None:
    """'12,345' -> 12345; None if it is not a whole number of at most 15 digits."""
    digits = text.replace(",", "")
    return int(digits) if digits.isdigit() and digits.isascii() and len(digits) <= MAX_DIGITS else None
