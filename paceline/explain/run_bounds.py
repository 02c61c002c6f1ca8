"""
Where one run in a log ends and the next one begins: nohup appends to a file, a script runs several programs, a job is requeued.

A run begins where a shell or a launcher starts a program, where a program that has ended prints what it prints first, or where
steps begin again behind an end. Python writes a file's lines late and tracebacks at once, so output behind an exception that nobody
has caught can be older than it: such output begins a run only if its like was printed before the exception, or far behind it.
"""

import re
from dataclasses import dataclass, field

from paceline.explain.explanation import Record
from paceline.explain.forwarded import ERROR_LEVEL
from paceline.explain.line_measures import StepLoss
from paceline.explain.lines import DIGITS, KILLED_LAUNCHER, LogLine
from paceline.explain.progress import EPOCH, ProgressTracker

BUFFERED_LINES = 120  # that a buffer may still hold when a program ends
MAX_SHAPES, SHAPE_CHARS, COUNT_CHARS = 64, 30, 80
COUNT = re.compile(r"(?<![\d.])\d{1,12}(?![\d.])")
PROGRAM = (
    r"(?:\w+=\S* +)*(?:(?:exec|time|nohup|env|sudo) +)*(?:\S*/)?"
    r"(?:python[\d.]*|torchrun|accelerate|deepspeed|srun|mpirun|mpiexec|bash|sh|uv run|poetry run|conda run)\b"
)
COMMAND = re.compile(  # as a shell prints it before it starts a program
    rf"\+{{1,4}} +{PROGRAM}|(?:\(\S{{1,40}}\) )?(?:\S{{1,60}}@\S{{1,60}} ?)?\$ +{PROGRAM}|nohup: ignoring input"
)
RANKS_START = re.compile(  # of torchrun, of deepspeed
    r"(?:\*+ ?|W torch/distributed/run\.py:\d+\] )?Setting OMP_NUM_THREADS environment variable for each process"
    r"|\[INFO\] \[runner\.py:\d+:main\] cmd = "
)
# written at once, so that no buffer held it
LAUNCHER = re.compile(rf"{RANKS_START.pattern}|\| NVIDIA-SMI \d|wandb: Tracking run with wandb version")
NEW_PROCESS = re.compile(  # Paddle's C++ writes it at once, when a process takes its GPU and joins the others
    r"[IW] \w+\.cc:\d+\] (?:Please NOTE: device: \d|init nccl context nranks: \d|ProcessGroupNCCL pg_timeout_ )"
)
DUMP = re.compile(
    r"(?:\S.{0,80}[\s:\]])?Namespace\(|(?:args|arguments|config(?:uration)?|options)\W{0,3}\{", re.IGNORECASE
)
LSF_END = re.compile(r"The output \(if any\) is above this job summary")  # each job appends its own
OF_LSF = re.compile(r"PS:$|Read file <")  # behind it
START_WORD = re.compile(  # in the lower-case bytes of every line that either can match
    rb"^\s*\++ |\$ +[a-z/]|nohup: |omp_num_threads|\] cmd = |nvidia-smi \d|tracking run with|namespace\("
    rb"|output \(if any\) is above|please note: device|init nccl context|nccl pg_timeout_"
    rb"|^(?:args|arguments|config|configuration|options)\W"
)
RANK_IN_START = re.compile(r"(?:^\W?[Rr]ank |\b(?:from|on) [Rr]ank )(?P<rank>\d{1,6})(?=[\]:.]|\W*$)")
PARENT = ("torch.multiprocessing.spawn.", "ProcessRaisedException", "ProcessExitedException")  # of several ranks
OUTERMOST = re.compile(r"in (?:<module>|_run_module_as_main)(?:  .*)?$")  # a part of a progress bar may stand behind it
CANCELLED_JOB = re.compile(r"\*\*\* (?:JOB|STEP) (?P<job>\d+)\S* (?:ON \S+ )?CANCELLED")
UNCOMPILED = re.compile(r"(?:Syntax|Indentation|Tab)Error")  # without a caller: Python could not begin to run it
SHELL_END = re.compile(  # of a program, as what has started it reports
    r"ChildFailedError|^(?:(?:[^'\"]*|[^\s'\"]\S*): line \d+: +\d+ +)?"
    r"(?:Killed|Aborted|Terminated|Segmentation fault|Bus error)\b(?! \d)"
    r"|(?<!['\"])srun: error: .*(?:[Ee]xited with|Killed|Terminated|Aborted|Segmentation)|exits with return code = -?[1-9]"
    r"|^Port \d+ is in use by another program|^FatalError: `"  # Flask; a signal, as Paddle's C++ reports it
    r"|^\S+\.py: error: "  # argparse, before the program did anything
)
BEHIND_END = re.compile(  # of a program: what was typed at a prompt, the end of a helper that a script had started beside it
    r"(?:-?(?:ba)?sh: )?[\w./-]+: command not found|zsh: command not found: \S+$"
    r"|(?:\S+: line \d+: +\d+ +|\[\d+\][-+]? +)Terminated +(?:nohup +)?(?:\S*/)?(?:tensorboard|nvidia-smi|gpustat|tail|sleep)\b"
)


def ended_program(record: Record) -> bool:
    """Whether nobody has caught an exception."""
    return bool(record.frames) and OUTERMOST.search(record.frames[0]) is not None


def failed_at_import(record: Record) -> bool:
    """Whether a script ended at one of its own imports, before it had done anything."""
    is_missing = record.text.startswith(("ModuleNotFoundError", "ImportError: No module named"))  # Python 3, Python 2
    return is_missing and len(record.frames) == 1 and ended_program(record)


@dataclass
class RunBounds:
    """Follows the current run of a log, to recognize the line with which the next one begins."""

    end: Record | None = None  # the last one that reports the end of a program
    is_closed: bool = False  # what has started the program reports that end, so that no buffer is left
    is_reported: bool = False  # LSF has appended its summary of the job
    is_launched: bool = False  # a launcher printed what it prints first
    has_content: bool = False
    has_exception: bool = False
    error_line: int = -BUFFERED_LINES  # the last one that a logger marks as an error
    report_line: int = 0  # the last of a launcher, behind which it may have started the ranks again
    late_line: int = -1  # the last that a rank printed so late
    first_rank: int | None = None  # that the log's first line names
    is_shared: bool = False  # several processes write, of which some go on for a while when another one ends
    shapes: set[str] = field(default_factory=set)  # how lines of progress and settings began before the first end
    epoch: int | None = None  # the last one before it
    last_progress: str = ""
    settings: tuple[int, str] | None = None  # the line where they are printed behind progress, and the last of that

    def starts_run(self, number: int, text: str, *, is_first: bool) -> bool:
        """Whether the run is over and a new one begins at a line. is_first: the log began with such a line."""
        if self.is_reported:
            return bool(text.strip()) and OF_LSF.match(text) is None
        self.is_reported = LSF_END.match(text) is not None
        is_dump = DUMP.match(text) is not None
        self.is_launched = self.is_launched or RANKS_START.match(text) is not None
        if self.end is not None:
            starts = (
                is_first
                or bool(COMMAND.match(text) or LAUNCHER.match(text) or NEW_PROCESS.match(text))
                or (is_dump and self._is_new(number, text))
            )
        else:
            starts = self.has_content and COMMAND.match(text) is not None
        if is_dump:
            self._remember(text)
            self.settings = (number, self.last_progress) if self.last_progress else None
        return starts

    def is_late_rank(self, number: int, line: LogLine) -> bool:
        """Whether the line of a program's start is that of another rank than the one that has failed, which began later."""
        rank, end = rank_in_start(line), self.end
        if end is None or self.is_closed or self.report_line >= end.line or number - end.line > BUFFERED_LINES:
            return False
        failed = self.first_rank if end.rank is None else end.rank
        is_late = number == self.late_line + 1 if rank is None else failed not in (None, rank)
        self.late_line = number if is_late else self.late_line
        return is_late

    def start_of_next(self, number: int, text: str, progress: StepLoss | None, so_far: ProgressTracker) -> int | None:
        """Where the next run began if a line shows that steps have begun again: there, or where it printed its settings.

        so_far: of this run. An evaluation prints settings too, behind which the next epoch begins with about the last loss.
        """
        if progress is None:
            return None
        if self._resumes_behind_end(number, text, progress):
            return number
        if self.settings is None or shape_of(text) != shape_of(self.settings[1]):
            return None
        (first_line, last_text), self.settings = self.settings, None
        losses = so_far.losses
        if not losses or progress.loss is None or counts_of(text) >= counts_of(last_text):
            return None
        from_first, from_last = (abs(progress.loss - losses[at].value) for at in (0, -1))
        return first_line if from_first < from_last else None

    def _resumes_behind_end(self, number: int, text: str, progress: StepLoss) -> bool:
        """Whether a line with progress shows that steps have begun again behind the end of a program."""
        if self.end is None:
            return False
        step, last_step = progress.step, self.end.step
        goes_back = last_step is None or (step is not None and 2 * step < last_step)
        if last_step is None and self.is_launched and KILLED_LAUNCHER.search(self.end.text):
            return False  # a next run would be launched too: what its ranks printed stands behind the shell's report
        if last_step is None and CANCELLED_JOB.search(self.end.text):  # Slurm lets a program go on for 30 s by default
            goes_back = number - self.end.line > BUFFERED_LINES
        if self.epoch is not None and (match := EPOCH.search(text)) and int(match["epoch"]) > self.epoch:
            goes_back = number - self.end.line > BUFFERED_LINES  # nearer it is the next epoch, still in a buffer
        return goes_back and self._is_new(number, text, is_shared=self.is_shared)

    def first_line_behind(self, record: Record) -> int | None:
        """Where the next run begins if a record is the end of another program than the end before it; ranks fail together."""
        end = self.end
        if end is None or record.rank is not None or end.rank is not None:
            return None
        jobs = [match["job"] if (match := CANCELLED_JOB.search(text)) else None for text in (end.text, record.text)]
        if None not in jobs and jobs[0] != jobs[1]:
            return end.line + 1
        if UNCOMPILED.match(record.text) and record.frames and " in " not in record.frames[0]:
            return record.line
        is_other = record.kind == "exception" and ended_program(record) and record.step == end.step
        return record.line - BUFFERED_LINES if is_other and record.line - end.line > BUFFERED_LINES else None

    def add_record(self, record: Record) -> None:
        self.has_content = True
        self.has_exception = self.has_exception or record.kind == "exception"
        if ERROR_LEVEL.search(record.text):
            self.error_line = max(self.error_line, record.line)
        if record.kind in ("exit", "banner") or record.text.startswith(PARENT):
            self.report_line = max(self.report_line, record.line)
        is_closed = bool(CANCELLED_JOB.search(record.text) or SHELL_END.search(record.text)) or failed_at_import(record)
        if is_closed or ended_program(record):
            self.end, self.is_closed = record, is_closed or self.is_closed

    def add_progress(self, text: str) -> None:
        self.has_content = True
        self.last_progress = text
        self._remember(text)

    def _remember(self, text: str) -> None:
        if self.end is None and (match := EPOCH.search(text)):
            self.epoch = int(match["epoch"])
        if self.end is None and len(self.shapes) < MAX_SHAPES:
            self.shapes.add(shape_of(text))

    def _is_new(self, number: int, text: str, *, is_shared: bool = False) -> bool:
        """Whether a line behind an end cannot be that of the program that ended: from a buffer, or of a process that goes on."""
        is_far = self.end is not None and number - self.end.line > BUFFERED_LINES
        return self.is_closed or is_far or (not is_shared and shape_of(text) in self.shapes)


def may_start(text: str) -> bool:
    """Whether a line can be the first one of a run, or the last one before it."""
    return any(pattern.match(text) for pattern in (COMMAND, LAUNCHER, NEW_PROCESS, DUMP, LSF_END))


def rank_in_start(line: LogLine) -> int | None:
    """The rank that wrote one of a program's first lines: [1] starting, hello from rank 1."""
    match = RANK_IN_START.search(line.text) if line.rank is None else None
    return int(match["rank"]) if match else line.rank


def shape_of(text: str) -> str:
    """How a text begins, without digits: texts that begin alike report the same."""
    return text[:SHAPE_CHARS].translate(DIGITS)


def counts_of(text: str) -> list[int]:
    """The whole numbers near the beginning of a line of progress: epochs, steps and their totals."""
    return [int(number) for number in COUNT.findall(text[:COUNT_CHARS])]
