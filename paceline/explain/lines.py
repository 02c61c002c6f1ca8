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
from dataclasses import dataclass, replace

from paceline.explain.explanation import LogProgress
from paceline.terminal import SEQUENCE

MAX_PREFIXES = 8  # on one line; real ones have four
MAX_RANKS = 100_000
MAX_PROGRESS_LINES = 64  # stored; what came before them has not ended the run
MAX_DIGITS = 15
DAYS_BEFORE_MONTH = (0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334)
MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")

ESCAPE = re.compile(rf"{SEQUENCE}|\ufffd\[[0-?]*[ -/]*[@-~]")  # a lossy decoder has put U+FFFD in place of ESC
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")

RANK = re.compile(
    r"\s*\[(?:rank|default|RANK |Rank )(?P<rank>\d{1,6})\]:? ?"  # torch, torchrun
    r"|\[\d+,(?P<mpi>\d{1,6})\](?:<std(?:err|out|diag)>)?:? ?"  # mpirun --tag-output
    r"|\[(?P<horovod>\d{1,6})\]<std(?:err|out)>:? ?"
    r"|\((?P<actor>(?:[\w.:-]{1,80}(?:\(\w*\))?,? ?)?(?:rank=(?P<ray>\d+), ?)?pid=\d+(?:, ?ip=(?P<ip>[\d.]+))?)\) ?"  # Ray, vLLM
    r"|\[(?P<paceline>\d{1,4})\] {1,4}(?=\S)"  # the terminal output of paceline
)
SLURM = re.compile(r" {0,5}(?P<rank>\d{1,5}): ?(?=\S|  )")  # srun --label
NCCL = re.compile(r"(?P<host>[\w.-]{1,80}):\d+:\d+ \[(?P<device>-?\d{1,3})\] ")
HOST = re.compile(  # pdsh (accelerate and DeepSpeed on several hosts), docker compose
    r"(?P<host>(?:[\w-]*(?:worker|node|gpu|host|master|server|dgx|^ip-)[\w.-]*|\d{1,3}(?:\.\d{1,3}){3}"
    r"|[A-Za-z][\w.-]*\d)(?<!\.so)(?<!\.py))"
    r"(?:: (?=\s*(?:\[|Traceback|  File|\w+(?:\.\w+)*(?:Error|Exception|Interrupt)\b|[\w-]+:\d+:\d+ ))| +\| )"
)
OTHER = re.compile(
    r"[\w.]+(?:/\d+)? (?=\[default\d+\]:|\[rank\d+\]:)"  # torchx
    r"| {0,6}\d{1,6}[ \t]+(?=(?:Traceback \(|  File \"|File \"|(?:\w+\.)*\w*(?:Error|Exception): ))"  # cat -n
    r"|\d+\.\d+s[ \t]+\d+[ \t]+"  # Kaggle: seconds, line number
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
BARE_BAR = re.compile(r" {0,3}\d{1,3}%\|[█▏▎▍▌▋▊▉ #=>.-]*\|?")  # cut in the middle, or without a count
# `gradient accumulation steps: 8` is a setting, no progress
SETTINGS = (
    "accumulation",
    "accum",
    "warmup",
    "max",
    "num",
    "total",
    "optimization",
    "decay",
    "logging",
    "save",
    "eval",
)
STEP = re.compile(
    "".join(f"(?<!{word}.)" for word in SETTINGS)
    + r"(?<![a-z])(?:global[_ ]?steps?|steps?|iter(?:ation)?s?|updates?|num_updates|batch"
    r"|it)['\"]?\s*[:=# \[(]{0,3}\s*(?P<step>\d[\d,]*)(?P<of>\s*/\s*\d[\d,]*)?(?![\w.]|\s*[A-Za-z]+/)",
    re.IGNORECASE,
)
LOSS = re.compile(r"loss['\"]?\s*[:=|]?\s*(?P<loss>[-+]?\d+(?:\.\d*)?(?:e[-+]?\d+)?|nan|inf)\b", re.IGNORECASE)
DONE = re.compile(
    r"training (?:is )?(?:completed?|finished|done)|finished training|train_runtime|max_steps=?\d* reached"
    r"|job (?:finished|completed) success|\ball \d* ?(?:tests|checks) passed|training has finished|saved (?:the )?final"
    r"|run finished|finished successfully|^done\.?$",
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


@dataclass(frozen=True)
class StepLoss:
    """The step and the loss that one line reports."""

    step: int | None
    loss: float | None
    is_last: bool = False  # step 100/100


ProgressLine = tuple[int, int | None, int | None]  # number in the log, rank, step


class ProgressTracker:
    """Collects the progress of one log, line by line."""

    def __init__(self) -> None:
        self.lines: deque[ProgressLine] = deque(maxlen=MAX_PROGRESS_LINES)
        self.steps_by_rank: dict[int, int] = {}  # the last step of each rank whose lines have a rank
        self.reached = LogProgress()  # finished: the last progress line is step 100/100

    def step_of(self, rank: int | None) -> int | None:
        """The last step that this rank reported, or else that any rank reported."""
        last_step = self.reached.last_step
        return last_step if rank is None else self.steps_by_rank.get(rank, last_step)

    def add(self, number: int, line: LogLine, bar: StepLoss | None) -> None:
        """Adds line `number` of the log; bar is the progress bar that was removed from it."""
        if DONE.search(line.text):
            self.reached = replace(self.reached, done_line=number)
        progress = read_step_and_loss(line.text) or bar
        if progress is None:
            return
        fields: dict[str, float | None] = {"steps": self.reached.steps + 1, "finished": progress.is_last}
        if progress.step is not None:
            fields["last_step"] = progress.step
            if self.reached.first_step is None:
                fields["first_step"] = progress.step
            if line.rank is not None and len(self.steps_by_rank) < MAX_RANKS:
                self.steps_by_rank[line.rank] = progress.step
        if progress.loss is not None:
            fields["last_loss"] = progress.loss
            if math.isfinite(progress.loss):
                fields |= {"nan_line": None, "nan_step": None}
            elif self.reached.nan_line is None:
                step = self.step_of(line.rank) if progress.step is None else progress.step
                fields |= {"nan_line": number, "nan_step": step}
        self.lines.append((number, line.rank, progress.step))
        self.reached = replace(self.reached, **fields)  # type: ignore[arg-type]

    def progress(self, last_line: int | None) -> LogProgress:
        """The progress so far; last_line is the number of the log's last line."""
        finished = self.reached.done_line is not None or self.reached.finished
        is_last = bool(self.lines) and self.lines[-1][0] == last_line
        return replace(self.reached, finished=finished, silent_end=is_last and not finished)


def strip_escapes(text: str) -> str:
    """The text without colours, cursor moves and control characters."""
    if "\x1b" in text or "\ufffd[" in text:
        text = ESCAPE.sub("", text)
    return text if text.isprintable() else CONTROL.sub("", text)


def split_prefix(text: str) -> LogLine:
    """Removes the prefixes of a line and reads rank, host and time from them."""
    rank: int | None = None
    host: str | None = None
    time: float | None = None
    stream = ""
    for _ in range(MAX_PREFIXES):
        if match := RANK.match(text):
            number = match["rank"] or match["mpi"] or match["horovod"] or match["ray"] or match["paceline"]
            rank = int(number) if number else rank
            host = match["ip"] or host
            stream = stream or match[0].strip(" :")
        elif match := NCCL.match(text) or HOST.match(text):
            host = match["host"]  # NCCL's [5] is the GPU's index on its host: with several hosts not the rank
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
    return LogLine(text=text.rstrip(), rank=rank, host=host, time=time, stream=stream)


def seconds_of(match: re.Match[str]) -> float:
    """Seconds since a fixed moment. A year counts 365.25 days, so only times of the same format compare exactly."""
    parts = defaultdict(str, {name: text for name, text in match.groupdict().items() if text})
    name = parts["name"].lower()
    month = MONTHS.index(name) + 1 if name in MONTHS else int(parts["month"] or 1)
    days = int(parts["year"] or 0) * 365.25 + int(parts["day"] or 0) + DAYS_BEFORE_MONTH[min(max(month, 1), 12) - 1]
    clock = int(parts["hour"] or 0) * 3600 + int(parts["minute"] or 0) * 60 + float(parts["second"])
    return days * 24 * 3600 + clock + float("0." + parts["fraction"].lstrip(".,:"))


def strip_bars(text: str) -> tuple[str, StepLoss | None]:
    """The line without its progress bars, and the count of the last one."""
    if "%|" not in text:
        return text, None
    progress = None
    for match in BAR.finditer(text):
        at, of = parse_count(match["at"]), parse_count(match["of"])
        progress = StepLoss(step=at, loss=None, is_last=at is not None and at == of)
    return BARE_BAR.sub("", BAR.sub("", text)).strip(" \t"), progress


def read_step_and_loss(text: str) -> StepLoss | None:
    """The step or the loss that a line reports; None if it reports neither."""
    loss = LOSS.search(text) if "loss" in text.lower() else None
    step = STEP.search(text)
    if step is None and loss is None:
        return None
    if loss is None and step is not None and not (step["of"] or ":" in text or "=" in text or len(text) < 40):
        return None  # prose, such as "takes 3 steps 2 at a time"
    number = parse_count(step["step"]) if step else None
    is_last = bool(step and step["of"] and parse_count(step["of"].strip("/ \t")) == number)
    return StepLoss(step=number, loss=float(loss["loss"]) if loss else None, is_last=is_last)


def parse_count(text: str) -> int | None:
    """'12,345' -> 12345; None if it is not a whole number of at most 15 digits."""
    digits = text.replace(",", "")
    return int(digits) if digits.isdigit() and digits.isascii() and len(digits) <= MAX_DIGITS else None
