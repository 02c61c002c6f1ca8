"""
Whether the program survived an error: the one place with the rules by which an error did not end its run.

    survived           steps of its rank follow, "done" vouches for it, or one of the rows below holds   run_continued
    the outcome        nothing but "done" follows, a line repeats it, or others waited in vain           is_last_word, others_waited
    not, all of them   most of the last items failed, nothing but "done" follows, nothing else was done     errors_of_last_items
    handled            a line above it says what the program does instead                                is_handled
    about one item     lines of its shape come often, far apart, and others follow                       is_of_item
    caught             a line right behind it says what is tried instead, and steps follow               is_caught
    of a sample        one of several errors at one place of an evaluation whose results are saved       is_of_evaluated
    quoted             it is a part of a text that a model has written                                   is_quoted
    of a trial         Optuna went on with other trials                                                  is_of_trial
    of a shutdown      a server had stopped its engine itself                                            is_of_shutdown
    lacks a view       a missing program would only have shown the machine                               lacks_a_view
    warned of          a logger wrote it below a warning, and it led to no other error                   line_above
    a side error       that warning says that something failed beside the training                       is_side_error
    beside the program it ended no more than a thread, a tracker or a logging call                       left_program_running

What no process survives (CONTEXT_LOST) is never caught, and never a side error.
"""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from paceline.explain.explanation import Record
from paceline.explain.frames import INSTALLED, PACKAGE
from paceline.explain.lines import WARNING_LINE
from paceline.explain.log import LAST_LINES, SAVED, Log
from paceline.explain.run_bounds import BEHIND_END, BUFFERED_LINES, ended_program, failed_at_import, shape_of

STEPS_AFTER = 3  # different steps after an error: it did not end the run
CODE_ERROR = re.compile(  # what Python itself says about a mistake in code
    r"(?:\w+\.)*(?:TypeError|NameError|UnboundLocalError|AttributeError|KeyError|IndexError|ZeroDivisionError|StopIteration"
    r"|RecursionError|SyntaxError|IndentationError|TabError|NotImplementedError)\b"
)
WRAPPED = re.compile(
    r"(?:ChildFailed|CalledProcess|RayTask|WorkerCrashed)Error|WorkerGroupFailure|ProcessRaised|ProcessExited|SystemExit: [1-9]"
)
EXIT_ZERO = (
    r"exit(?:ed|ing|s)? (?:\w+ )?(?:with )?(?:exit )?(?:status|code)[ :=]*0\b|exit[ -]?code[ :=]+0\b"
    r"|return code[ :=]+0\b|ExitCode 0:0|exit_?code\W+(?:null|none)\b|\s{2}exit code$"  # not yet, the head of a table
    r"|^jobid\s.*\bexitcode\s*$"  # of sacct
)
NO_FAILURE = re.compile(rf"{EXIT_ZERO}|(?<!sigkill_)handler|^Terminated at \w{{3}} ", re.IGNORECASE)  # LSF's time
CANNOT_START = re.compile(r"can't open file '[^']+': \[Errno 2\]")  # Python itself, before any program runs
NOT_FOUND = re.compile(  # said by a script or a shell
    r"(?:^|: )(?:line )?\d+: [\w./-]+: (?:command )?not found|^(?:ba)?sh: [\w./-]+: command not found"
    r"|^(?:mkdir|ln|cp|mv|rm|chmod|chown|touch): cannot |\.sh: line \d+: syntax error"  # by others of its commands
)
SHOWS_MACHINE = re.compile(
    r": (?:nvidia-smi|rocm-smi|gpustat|nvtop|htop|free|lscpu|tree|figlet|git): "
)  # no training needs it
TYPED_KEYS = re.compile(r"(?:\^C)+")  # as a terminal shows them
WENT_ON, BEFORE_DONE, MAX_QUOTED = 40, 8, 16  # lines behind an error, before the end, that quote an error above them
MIN_REPEATS, MAX_ADVICE = 5, 8  # lines about an item that was left out; lines behind the advice of bitsandbytes
RETRIES = re.compile(r"(?i)\bretry(?:ing)? \(?(?:attempt )?\d+ ?(?:/|of) ?\d|^g?make(?:\[\d+\])?: \*\*\* ")
HANDLED = re.compile(r"(?i)\bfail\w*, (?:re)?(?:trying|installing|falling back)\b")
CANCELLED = r"\*\*\* (?:STEP|JOB) \S+ (?:ON \S+ )?CANCELLED"
CANCELLED_STEP = re.compile(rf"{CANCELLED}|srun: (?:Force Terminated|forcing job termination)")
FATAL = re.compile(  # what stops at NaN, a kernel's assertion, NCCL's watchdog, Slurm
    rf"{CANCELLED}|[Ss]top [Tt]raining$|terminating training|block: \[[\d,]+\], thread: \[[\d,]+\] Assertion "
    r"|Watchdog caught collective operation timeout|taking the entire process down|terminate called |what\(\):  "
)
FASTER_FAISS = "No module named 'faiss.swigfaiss_"  # what faiss tries before its plain library
NOT_SET_UP = re.compile(  # which a program can go on without, as what imports bitsandbytes does
    r"^CUDA Setup failed despite (?:CUDA|GPU) being available|CUDA capability sm_\w+ is not compatible with the current PyTorch"
)
DIED = re.compile(r"\bdied with <Signals\.SIG")  # as Python reports the end of a child
USAGE = re.compile(r"error: (?:unrecognized arg|ambiguous |(?:the following )?argument)|FATAL: +could not open image ")
OUTCOME_LINES = 8  # behind an exception
TRAINING_FAILED = re.compile(r"(?i)\b(?:training|fine-?tuning|experiment|job|run) (?:has )?failed\b")
# of a queue whose reader is gone; its thread prints it and ends
QUEUE = re.compile(
    r"multiprocessing[/\\](?:queues\.py.*, in _feed|connection\.py.*, in (?:close|send_bytes|_send_bytes|_send|_close))$"
)
NO_READER = re.compile(r"BrokenPipeError|OSError: \[Errno 9\]")
IN_CHILD = re.compile(r"multiprocessing[/\\]process\.py\", line \d+,? in _bootstrap")  # likewise, a child process
NOTHING_CAME = re.compile(r"(?:\w+\.)*(?:Empty|EOFError|BrokenPipeError|ConnectionResetError)\b")
IN_WAIT = re.compile(r"\bqueues?\.py\b|[/\\]multiprocessing[/\\]|\bin (?:get|recv|join)\b")
LOST_PEER = re.compile(r"Connection (?:closed|reset) by peer|Broken pipe|remote process exited")
IN_THREAD = re.compile(r"threading\.py\", line \d+,? in _bootstrap")  # the first frame of what ends a thread alone
NOT_LOADED = re.compile(r"(?i)could not|cannot|unable|fail|error")
PACKAGE_IMPORT = re.compile(r"(?:site|dist)-packages[/\\].* in <module>$")  # the first frame is the package's own
TRACKER = re.compile(  # or a server of notebooks, or what looks for a build of bitsandbytes
    r"(?:site|dist)-packages/(?:bitsandbytes/c\w+\.py|(?:tornado|jupyter\w*|notebook|wandb|tensorboardX?|mlflow|comet_ml|neptune"
    r"|trackio|clearml|swanlab)/|iopath/common/event_logger)"
)
TRACKER_COMMAND = re.compile(r"packages/wandb/cli/")  # which is the program itself, where nothing was trained
# where logging prints what a wrong call raised, and a server what a request did
LOGGING = re.compile(
    r"\blogging[/\\]__init__\.py\", line \d+, in emit$|\bsocketserver\.py\", line \d+, in _?(?:handle|process)_request_\w+$"
)
LOGGED = re.compile(r"Message: .*\nArguments: \(")  # behind the stack that logging prints with it
# right behind an exception: what the program does in place of what failed
CAUGHT = re.compile(r"(?i)^.{0,40}?\b(?:(?:re)?trying (?:again )?with|falling back to)\b")
OF_MACHINE = re.compile(r"OutOfMemory|[Oo]ut of memory|CUDA|core dumped|Segmentation fault|terminate called")
# what no process survives
CONTEXT_LOST = re.compile(r"illegal memory access|device-side assert|launch failure|uncorrectable ECC")
SKIPS = r"(?i:\b(?:skipp|ignor)(?:ed|ing)\b)"
WARNED = re.compile(  # or an error after which a program goes on, as it says
    r"\bWARN(?:ING)?\b|\bERROR\b.*\b(?:optional|keeping|continu(?:e|es|ing)|skipp(?:ed|ing)|ignor(?:ed|ing)|falling back)\b"
)
FAILED = re.compile(
    r"(?i)fail|error|exception|could not|cannot|can't|unable|optional|skip|ignor|retry|fall(?:ing)? back"
)
WORK_FAILED = re.compile(  # not of a side task
    r"(?i)\b(?:training|run|job|step|epoch)\b.{0,30}\b(?:fail|crash|abort|error|exception)"
    r"|\b(?:fail\w*|crash\w*|error|exception)\b.{0,12}\b(?:in|at|during) (?:step|epoch|training)"
    r"|^wandb: |\bnot (?:skipp|continu|ignor)"
)
ITEM, LAST_ITEMS = re.compile(r"(?<!\d)\d{1,9}(?!\d)"), 40  # its number; of which most must fail
MIN_EVALUATED = 3  # different errors at one place of the script: Python ends at the first that nobody has caught
CHAIN_LINES = 6  # from an exception to the one that it led to, beside the lines of its frames
CHILD_STEPS = 20  # that a program takes from what its queue still holds
TRIAL, FAILED_TRIAL = re.compile(r"\bTrial \d+ (?:finished|pruned)\b"), re.compile(r"\bTrial \d+ failed with\b")
STOPS_ENGINE = re.compile(  # vLLM's server, by a signal
    r"\[shutdown\] (?:API server: (?:shutdown triggered|stopping engine client)|EngineCore: trigger received signal=)"
)
STOPPING_LINES = 50
ENGINE_GONE = re.compile(r"EngineDeadError\b|\bAsyncLLM output_handler failed")

TESTS_FAILED = re.compile(r"[=!]+ .*\b[1-9]\d* (?:failed|errors?)\b.* [=!]+$")  # the summary of pytest


@dataclass(frozen=True)
class Continuation:
    """What a log shows of work that goes on after its errors."""

    done: range  # the lines that "done" vouches for
    repeated: frozenset[str]  # shapes of lines that come often, far apart, before others: about items that are left out
    cancelled: float  # the line with which Slurm reports that it ended a step; infinite where there is none
    stop: float  # the same, where all that follows was in a buffer


def run_continued(record: Record, log: Log, continuation: Continuation) -> bool:
    """Whether the same rank made further steps after the record, or the log reports that the work is done.

    A shell script goes on without a program that it does not find, and what fails for that reason says so itself.
    """
    last_line, is_far = log.last_line, log.last_line > record.line + WENT_ON
    if NOT_SET_UP.search(record.text):
        return last_line - record.line > MAX_ADVICE
    if TYPED_KEYS.match(record.text) and not log.progress.steps and last_line - record.line > BUFFERED_LINES:
        return True  # the program has not ended
    if RETRIES.search(record.text) and last_line - record.line > MAX_QUOTED:
        return True  # what fails in the end says so
    is_fatal = FATAL.search(record.text) or log.lost_launcher(record)
    if is_fatal and last_line - record.line <= BUFFERED_LINES:
        return False  # the process ends; the steps behind it are other processes' or were in a buffer
    near = log.records_between(record.line + 1, record.line + WENT_ON - 1)
    if (record.kind == "signal" and any(DIED.search(other.text) for other in near)) or others_waited(record, log):
        return False
    if record.line in continuation.done or is_caught(record, log):
        return True
    # another program wrote what follows the end of one that had done nothing
    did_nothing = USAGE.search(record.text) is not None or failed_at_import(record)
    if last_line > record.line + BUFFERED_LINES and (did_nothing or is_handled(record, log)):
        return True
    behind = (other for other in log.records if other.line > record.line and other.frames)
    if CANNOT_START.search(record.text):
        return any(other.kind != "banner" for other in behind)  # of another program
    is_done = log.last_progress_line < (log.progress.done_line or 0) < record.line
    if (is_done and BEHIND_END.match(record.text)) or (
        is_far and (log.is_serving or WARNED.search(line_above(record, log)))
    ):
        return True
    if NOT_FOUND.search(record.text):
        return is_far or lacks_a_view(record, log) or any(CODE_ERROR.match(other.text) for other in behind)
    if is_of_item(record) and shape_of(record.text) in continuation.repeated:
        return True
    stop = continuation.stop if ended_program(record) else math.inf
    return len(log.steps_after(record, before=stop)) >= STEPS_AFTER


def lacks_a_view(record: Record, log: Log) -> bool:
    """Whether a missing program would only have shown the machine: steps follow it, or the training was saved before it."""
    saves = (line for line, text in log.last_lines if SAVED.search(text))
    was_saved = bool(log.losses) and any(log.last_progress_line < line < record.line for line in saves)
    return bool(SHOWS_MACHINE.search(record.text)) and (was_saved or len(log.steps_after(record)) >= STEPS_AFTER)


def continuation_of(log: Log) -> Continuation:
    """What a log shows of work that goes on after its errors."""
    lines: dict[str, list[int]] = defaultdict(list)
    for record in filter(is_of_item, log.records):
        lines[shape_of(record.text)].append(record.line)
    repeated = {
        shape
        for shape, alike in lines.items()
        if len(alike) >= MIN_REPEATS
        and alike[-1] - alike[0] > BUFFERED_LINES
        and log.last_line - alike[-1] >= LAST_LINES
        and not any(TESTS_FAILED.match(text) for _, text in log.last_lines)
    }
    cancelled = min((record.line for record in log.records if CANCELLED_STEP.search(record.text)), default=math.inf)
    goes_on = log.last_progress_line - cancelled > BUFFERED_LINES  # with another step of the job
    return Continuation(lines_before_done(log), frozenset(repeated), cancelled, math.inf if goes_on else cancelled)


def lines_before_done(log: Log) -> range:
    """The lines that "done" vouches for: a script also says it behind a program that has failed, or an error that it caught."""
    end = log.progress.done_line or 0
    failures = (record for record in log.records if record.line < end and is_failure(record))
    ends = (item.line for item in failures if item.kind in ("exit", "signal") or is_last_word(item, end, log))
    return range(max(ends, default=-1) + 1, end)


def is_last_word(record: Record, end: int, log: Log) -> bool:
    """Whether a traceback is the outcome, or right before the "done" that ends a log, with hardly any progress between."""
    is_near = end - record.line - record.text.count("\n") <= BEFORE_DONE and log.last_lines[0][0] <= end
    is_said = (is_near and not is_side_error(record, log)) or is_outcome(record, log)
    return bool(record.frames) and is_said and len(log.steps_after(record)) < STEPS_AFTER


def is_outcome(record: Record, log: Log) -> bool:
    """Whether a line soon behind a traceback says that the training failed with its message."""
    first, *others = record.text.split("\n")
    message = first.partition(": ")[2]
    last = record.line + 2 * len(record.frames) + OUTCOME_LINES  # a frame is two lines
    others += [other.text for other in log.records_between(record.line + 1, last)]
    return bool(record.frames and message) and any(TRAINING_FAILED.search(text) and message in text for text in others)


def is_of_item(record: Record) -> bool:
    """Whether a record can report an item that a program leaves out: a line of its own."""
    return record.rank is None and (record.kind == "line" or (record.kind == "exception" and not record.frames))


def errors_of_last_items(errors: Sequence[Record], log: Log) -> list[Record]:
    """The errors of items one after the other, by their numbers or by the line above each; no more than "done" is behind them.

    They count where most of the last items failed, no measure shows other work, and no line reports that items are skipped.
    """
    alike = [record for record in errors if shape_of(record.text) == shape_of(errors[-1].text)]
    last = alike[-MIN_REPEATS:]
    gaps = {after.line - before.line for before, after in pairwise(last)}
    is_measured = log.losses or log.held_out or log.scores or log.rewards or log.accuracies
    if is_measured or len(last) < MIN_REPEATS or len(gaps) != 1 or log.last_line - last[-1].line > 1:
        return []
    num_lines = min(LAST_ITEMS * max(gaps), log.last_line - log.first_line + 1)
    num_failed = sum(record.line > last[-1].line - num_lines for record in alike)
    texts = dict(log.last_lines)
    if 2 * max(gaps) * num_failed <= num_lines or any(re.search(SKIPS, text) for text in texts.values()):
        return []
    numbers = [set(ITEM.findall(record.text)) for record in last]
    if gaps == {1}:
        firsts = [int(match[0]) for record in last if (match := ITEM.search(record.text))]
        return last if firsts == list(range(firsts[0], firsts[0] + len(last))) else []
    above = [set(ITEM.findall(texts.get(record.line - 1, ""))) for record in last[-2:]]
    return last if gaps == {2} and above[1] & numbers[-1] - above[0] and above[0] & numbers[-2] - above[1] else []


def is_handled(record: Record, log: Log) -> bool:
    """Whether the program announced above a line what it does in place of what failed."""
    before = log.records_between(record.line - MAX_QUOTED, record.line - 1)
    return not record.frames and any(HANDLED.search(other.text) for other in before)


def is_near_end(record: Record, log: Log) -> bool:
    """Whether no more lines follow than a buffer holds, no run that finished, and no steps behind a launcher that has ended."""
    if log.last_line - record.line > BUFFERED_LINES:
        return False
    is_over = log.progress.finished or record.kind == "banner"
    return not (is_over and len(log.steps_after(record)) >= STEPS_AFTER)


def is_failure(record: Record) -> bool:
    text = record.text
    if record.kind == "exception":
        return not text.startswith(("SystemExit: 0", "SystemExit\n")) and "Warning" not in text.split(":")[0]
    if record.kind == "banner":
        return bool(WRAPPED.search(text))
    return record.kind in ("exit", "signal") and not NO_FAILURE.search(text) and not WARNING_LINE.search(text)


def left_program_running(record: Record, log: Log) -> bool:
    """Whether an exception ended no more than a thread, a tracker's or one of a program whose work was done, or a logging call."""
    if record.text.startswith("KeyboardInterrupt"):  # Python raises it in the main thread alone
        return False
    if FASTER_FAISS in record.text:
        return True
    if not record.frames:  # of one that threads have printed at once
        twins = (other for other in log.records if other.frames and other.text.startswith(record.text))
        return record.kind == "exception" and any(left_program_running(twin, log) for twin in twins)
    if NO_READER.match(record.text) and all(map(QUEUE.search, record.frames)):
        return True
    is_thread = IN_THREAD.search(record.frames[0]) is not None
    if outlived(record, log, is_thread=is_thread):
        return True
    # threads that print at once mix their frames
    places = record.frames if is_thread else (record.frames[0], record.frames[-1])
    is_program = TRACKER_COMMAND.search(record.frames[0]) and not log.progress.steps
    if any(map(TRACKER.search, places)) and not is_program:
        return all(map(INSTALLED.search, record.frames))
    done_line = log.progress.done_line or (log.last_progress_line if log.progress.finished else None)
    is_later = done_line is not None and record.line > done_line
    is_logged = LOGGING.search(record.frames[0]) or LOGGED.match(record.text)
    return bool(is_logged) or (is_later and is_thread)


def outlived(record: Record, log: Log, *, is_thread: bool) -> bool:
    """Whether another exception ended the program, before this thread, or after this failed import that was logged."""
    is_import = PACKAGE_IMPORT.search(record.frames[0]) is not None
    above = log.records_between(record.line - 1, record.line - 1) if is_import else []
    logged = any(other.kind == "line" and NOT_LOADED.search(other.text) for other in above)
    if not (is_thread or logged):
        return False
    ends = [other.line for other in log.records if ended_program(other) and not PACKAGE.search(other.frames[0])]
    return bool(ends) and ((is_thread and ends[0] < record.line) or (logged and ends[-1] > record.line))


def is_caught(record: Record, log: Log) -> bool:
    """Whether the program says behind an exception what it tries instead, and takes steps behind it.

    Likewise the end of a trial of Optuna, and of an engine that its server has stopped.
    """
    if is_of_trial(record, log) or is_of_shutdown(record, log) or is_quoted(record, log):
        return True
    if not record.frames or CONTEXT_LOST.search(record.text):
        return False
    following = log.records_between(record.line + 1, record.line + 3 * len(record.frames) + OUTCOME_LINES)
    notices = [*record.text.split("\n")[1:], *(other.text for other in following[:1])]
    if is_of_evaluated(record, log):
        return log.has_one_process
    goes_on = len(log.steps_after(record)) >= STEPS_AFTER and log.has_one_process
    return goes_on and any(map(CAUGHT.match, notices))


def is_of_trial(record: Record, log: Log) -> bool:
    """Whether a record reports the end of one trial of a study of Optuna, which went on with others."""
    above = log.records_between(record.line - 1, record.line - 1)
    is_trial = any(FAILED_TRIAL.search(other.text) for other in (record, *above))
    return is_trial and any(line > record.line and TRIAL.search(text) for line, text in log.last_lines)


def is_of_shutdown(record: Record, log: Log) -> bool:
    """Whether a record reports that a server's engine is gone, which the server had stopped itself."""
    above = log.records_between(record.line - STOPPING_LINES, record.line - 1)
    return ENGINE_GONE.search(record.text) is not None and any(STOPS_ENGINE.search(other.text) for other in above)


def is_of_evaluated(record: Record, log: Log) -> bool:
    """Whether a program prints what failed in each thing that it evaluates: several errors at one place, and results at the end.

    Errors that nobody seems to have caught are such only where code was run that stands in no file.
    """
    if not log.last_lines or not SAVED.search(log.last_lines[-1][1]) or OF_MACHINE.search(record.text):
        return False
    alike = [other for other in log.records if other.frames[:1] == record.frames[:1]]
    runs_texts = any('File "<string>"' in frame for other in alike for frame in other.frames)
    return (runs_texts or not ended_program(record)) and len({shape_of(other.text) for other in alike}) >= MIN_EVALUATED


def is_quoted(record: Record, log: Log) -> bool:
    """Whether the only process of a log shows an error in a text that a model has written.

    A buffer may put the end of such a text behind the traceback that ended the program, but not behind a signal.
    """
    is_real = bool(record.frames) and not record.frames[0].startswith('File "<stdin>"')
    is_real = is_real or record.kind == "signal" or OF_MACHINE.search(record.text) is not None
    return not is_real and log.is_in_sample(record.line, record.text) and log.has_one_process


def is_side_error(record: Record, log: Log) -> bool:
    """Whether that warning says that something failed, and not the training itself."""
    above = line_above(record, log)
    is_of_work = WORK_FAILED.search(above) or OF_MACHINE.search(record.text) or CONTEXT_LOST.search(record.text)
    return bool(WARNED.search(above) and FAILED.search(above) and not is_of_work)


def line_above(record: Record, log: Log) -> str:
    """The text right above an exception that was logged and led to no other; "" for any other record."""
    near = log.records_between(record.line - 2, record.line - 1)
    before = [other for other in near if other.kind == "line" and other.rank == record.rank]
    behind = log.records_between(record.line + 1, record.line + CHAIN_LINES + 3 * len(record.frames))
    is_chained = bool(behind) and behind[0].kind == "exception"
    is_logged = record.kind == "exception" and not ended_program(record) and not is_chained
    return before[-1].text if is_logged and before else ""


def others_waited(record: Record, log: Log) -> bool:
    """Whether an exception ended a child or a rank, for which its parent or another rank then waited in vain, and ended too."""
    is_of_child = bool(record.frames) and IN_CHILD.search(record.frames[0]) is not None
    is_of_rank = record.rank is not None and ended_program(record) and not LOST_PEER.search(record.text)
    if not (is_of_child or is_of_rank):
        return False
    ended = [other for other in log.records if other.line > record.line and ended_program(other)]
    if is_of_child:
        waited = (other for other in ended if NOTHING_CAME.match(other.text) and any(map(IN_WAIT.search, other.frames)))
        return any(len(log.steps_after(record, before=other.line)) < CHILD_STEPS for other in waited)
    lost = (other for other in ended if other.rank not in (None, record.rank) and LOST_PEER.search(other.text))
    lines = {line for line, _, _ in log.last_progress if line > record.line}
    went_on = any(other.rank == record.rank and other.line in lines for other in log.records)
    return not went_on and any(len(log.steps_after(other)) < STEPS_AFTER for other in lost)
