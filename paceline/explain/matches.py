"""
Which events of a log may have ended the run.

An event is a record with one cause that the catalogue finds in it. Its score is lower if it is a warning, if a launcher only
forwards it, or if the run continued after it, as it did twice after what began alike.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.explain.catalogue import Cause, load_catalogue
from paceline.explain.collectives import CLOSED, DESYNC, FIRST_TRANSFER
from paceline.explain.explanation import Record
from paceline.explain.frames import (
    PACKAGE,
    is_caught,
    is_check,
    is_outcome,
    is_own,
    is_side_error,
    is_warned_of,
    left_program_running,
    match_frames,
    others_waited,
)  # fmt: skip
from paceline.explain.lines import IGNORABLE
from paceline.explain.log import LAST_LINES, Log
from paceline.explain.run_bounds import BEHIND_END, BUFFERED_LINES, PROGRAM, ended_program, failed_at_import, shape_of
from paceline.explain.tracebacks import as_raised, shown_exception

MIN_STEPS = 2  # progress lines that show that a run goes on
STEPS_AFTER = 3  # different steps after an error: it did not end the run
CONTINUED, WARNING, ERROR_LINE = 0.45, 0.55, 0.93  # factors of a score
WEIGHTS = {"banner": 0.5, "exception": 1.0}  # by the kind of record; ERROR_LINE for any other
FALLBACK = "user-code-exception"  # the cause of an exception if no other one matches
CUDA_ERROR = "cuda-error"
VAGUE = {FALLBACK: 0.4, "config-error": 0.66, CUDA_ERROR: 0.7}  # the highest weight of a match that tells little
GUESS, OWN_CLASS_WEIGHT, KILL_WEIGHT = 0.42, 0.3, 0.6  # of keywords, of a class of the user's own, of a cut bar
CODE_ERROR = re.compile(  # what Python itself says about a mistake in code
    r"(?:\w+\.)*(?:TypeError|NameError|UnboundLocalError|AttributeError|KeyError|IndexError|ZeroDivisionError|StopIteration"
    r"|RecursionError|SyntaxError|IndentationError|TabError|NotImplementedError)\b"
)
MAX_EVENTS = 400  # of one log, from either end
RACE, MANY_FILES = "rank-file-race", 20  # what fails for so many files needs no other process
PEER_DIED = "peer-died"
WAITING = {DESYNC, FIRST_TRANSFER, PEER_DIED}  # reported by ranks that wait for another

STOPPED = re.compile(r"(?:Sending process|Unable to shutdown process) (?P<pid>\d+)\b")
PID = re.compile(r"\b(?:pid:|PID) (?P<pid>\d+)\b")
STOP_SIGNAL = re.compile(r"-(?:2|9|15)\b|SIG(?:INT|KILL|TERM)\b")
WARNING_LINE = re.compile(
    r"^\W*(?:W|I|D|INFO|WARN|WARNING|DEBUG|NOTE)\b(?!.*\b(?:ERROR|FATAL|Error:))|\b\w*Warning: "
    r"|\[(?:WARNING|INFO|DEBUG)\]|NCCL INFO|^\s*(?:warnings\.)?warn\(|(?<!NCCL )\b(?:WARNING|WARN|INFO|DEBUG)\b[ :|\]-]"
)
WRAPPED = re.compile(
    r"(?:ChildFailed|CalledProcess|RayTask|WorkerCrashed)Error|WorkerGroupFailure|ProcessRaised|ProcessExited|SystemExit: [1-9]"
)
EXIT_ZERO = (
    r"exit(?:ed|ing|s)? (?:\w+ )?(?:with )?(?:exit )?(?:status|code)[ :=]*0\b|exit[ -]?code[ :=]+0\b"
    r"|return code[ :=]+0\b|ExitCode 0:0|exit_?code\W+(?:null|none)\b|\s{2}exit code$"  # not yet, the head of a table
)
NO_FAILURE = re.compile(rf"{EXIT_ZERO}|(?<!sigkill_)handler|^Terminated at \w{{3}} ", re.IGNORECASE)  # LSF's time
CANNOT_START = re.compile(r"can't open file '[^']+': \[Errno 2\]")  # Python itself, before any program runs
NOT_FOUND = re.compile(  # said by a script or a shell
    r"(?:^|: )(?:line )?\d+: [\w./-]+: (?:command )?not found|^(?:ba)?sh: [\w./-]+: command not found"
    r"|^(?:mkdir|ln|cp|mv|rm|chmod|chown|touch): cannot |\.sh: line \d+: syntax error"  # by others of its commands
)
# a way back through NCCL's functions, also when its sockets are closed at the end
NCCL_RETURN = re.compile(r"^NCCL INFO \S+:\d+ -> \d+$")
TYPED_KEYS = re.compile(r"(?:\^C)+")  # as a terminal shows them
WENT_ON, BEFORE_DONE, MAX_QUOTED = 40, 8, 16  # lines behind an error, before the end, that quote an error above them
MIN_REPEATS, MAX_ADVICE = 5, 8  # lines about an item that was left out; lines behind the advice of bitsandbytes
RETRIES = re.compile(r"(?i)\bretry(?:ing)? \(?(?:attempt )?\d+ ?(?:/|of) ?\d|^g?make(?:\[\d+\])?: \*\*\* ")
HANDLED = re.compile(r"(?i)\bfail\w*, (?:re)?(?:trying|installing|falling back)\b")
NO_IMPORT = re.compile(r"(?i)\bfailed to import\b|\bcould not (?:be )?import")
REPORTED = re.compile(  # what a program says before an error that it caught
    r"^.{0,100}?(?:\b(?:ERROR|FATAL)\b[\]) |-]+(?=\S)"
    r"|(?i:\b(?:error|exception|fail(?:ed|ure)?|crashed|aborted)\b)[^:\n]{0,60}: ?)"
)
GOES_ON = re.compile(
    r"(?i)\bretrying in \d|\b(?:is|are) optional\b|\bwill be disabled\b|^Using .* (?:since|because)\b|\bno out of memory\b"
    r"|^\W*(?:from [\w.]+ import \w|import [\w.]+$)|│ +(?:❱ +)?\d+ │|│ │ "  # source: below a warning, in the boxes of rich
)
QUOTED_COMMAND = re.compile(rf"{REPORTED.pattern}{PROGRAM} +(?:-\S+ +)*\S+\.(?:py|sh)\b")  # that failed
MESSAGE_TYPES = ("Error", "RuntimeError", "ValueError", "KeyError", "OSError", "AssertionError")
PYTHON_MESSAGE = re.compile(  # what Python and NumPy say about a mistake in code, without its type
    r"(?:\w+ index|\w+) out of range$|(?:float |integer )?(?:division|modulo)\b.* by zero|'\w+' object (?:is not|has no|cannot)"
    r"|unsupported operand|(?:name|local variable|cannot access local variable) '\w+' |'[\w.-]+'$|module '[\w.]+' has no attribute"
    r"|(?:not enough|too many) values to unpack|invalid literal for|could not convert string|[Tt]he truth value of an? "
    r"|cannot unpack non-iterable |\S+\(\) (?:got|takes|missing)\b|zero-size array to reduction"
)
PROGRAM_ENDED = re.compile(
    r"destroy_process_group\(\) was not called before program exit|process group has NOT been destroyed before"
)
CANCELLED = r"\*\*\* (?:STEP|JOB) \S+ (?:ON \S+ )?CANCELLED"
CANCELLED_STEP = re.compile(rf"{CANCELLED}|srun: (?:Force Terminated|forcing job termination)")
ENDS = re.compile(rf"{CANCELLED_STEP.pattern}|(?i:ctrl ?[-+] ?c\b)")  # each time that it comes
FATAL = re.compile(  # what stops at NaN, a kernel's assertion, NCCL's watchdog, Slurm
    r"[Ss]top [Tt]raining$|terminating training|block: \[[\d,]+\], thread: \[[\d,]+\] Assertion "
    r"|Watchdog caught collective operation timeout|taking the entire process down|terminate called |what\(\):  "
    rf"|{CANCELLED}"
)
NOT_SET_UP = re.compile(  # which a program can go on without, as what imports bitsandbytes does
    r"^CUDA Setup failed despite (?:CUDA|GPU) being available|CUDA capability sm_\w+ is not compatible with the current PyTorch"
)
DIED = re.compile(r"\bdied with <Signals\.SIG")  # as Python reports the end of a child
TASK_KILLED = re.compile(r"task \d+(?:[,-]\d+)*: (?:Killed|Terminated)|^(?:Killed|Terminated)\b")
NAMED_EXCEPTION = re.compile(r"(?!SystemExit|KeyboardInterrupt)(?:\w+\.)*(?:[A-Z]\w+|error)(?::|$)")
# behind a bar that did not get to its end: of a process that could not clean up
CUT_BAR = re.compile(r"(?<!\d)\d{1,2}%\|(?!.*\d%\|).*resource_tracker: There appear to be \d+ leaked")
NOT_OWN = {"version-mismatch", "config-error"}
USAGE = re.compile(r"error: (?:unrecognized arg|ambiguous |(?:the following )?argument)|FATAL: +could not open image ")


@dataclass(frozen=True)
class Event:
    """One record with one cause that it may show."""

    record: Record
    cause: Cause
    values: Mapping[str, str]  # of the pattern's named groups
    score: float  # 0 to 1
    run_continued: bool
    place: tuple[int, int]  # number of the log, line
    from_launcher: bool  # a launcher's report, or the end of a process that the launcher stopped


@dataclass(frozen=True)
class Continuation:
    """What a log shows of work that goes on after its errors."""

    done: range  # the lines that "done" vouches for
    repeated: frozenset[str]  # shapes of lines that come often, far apart, before others: about items that are left out
    cancelled: float  # the line with which Slurm reports that it ended a step; infinite where there is none
    stop: float  # the same, where all that follows was in a buffer


def find_events(log: Log, *, number: int) -> list[Event]:
    """Everything that the catalogue finds in a log; number is the log's place among those read together."""
    events = []
    stopped = {match["pid"] for record in log.records for match in STOPPED.finditer(record.text)}
    ended = min((record.line for record in log.records if PROGRAM_ENDED.search(record.text)), default=None)
    continuation = continuation_of(log)
    survived: Counter[str] = Counter()  # by the start of the text
    is_shut_down = any(CLOSED.search(record.text) for record in log.records)
    is_left = any("Horovod has been shut down" in record.text for record in log.records)
    harmless = [record for record in log.records if left_program_running(record, log)]
    warned = {  # the lines behind a warning that a package could not be imported
        record.line + 1 for record in log.records if NO_IMPORT.search(record.text) and WARNING_LINE.search(record.text)
    }
    harmless_ids, announcements = {id(record) for record in harmless}, {record.line - 1 for record in harmless}
    for record in log.records:
        matches = matches_of(record, log)
        if ended is not None and record.line > ended and WARNING_LINE.search(record.text):
            matches = [match for match in matches if match[0].id != PEER_DIED]  # ranks leave one after the other
        is_line, is_return = record.kind == "line", is_shut_down and NCCL_RETURN.search(record.text)
        if is_line and (IGNORABLE.search(record.text) or is_return or record.line in announcements | warned):
            continue
        # TensorFlow's exception says no more than that its graph failed
        if id(record) in harmless_ids or (is_left and record.text.endswith("Graph execution error:")):
            continue
        shape = shape_of(record.text)
        is_end = ended_program(record) or ENDS.search(record.text)
        continued = run_continued(record, log, continuation) or (survived[shape] >= 2 and not is_end)
        survived[shape] += continued
        # launchers write exits and signals as warnings too
        factor = WARNING if is_line and WARNING_LINE.search(record.text) else WEIGHTS.get(record.kind, ERROR_LINE)
        pid = PID.search(record.text) if record.kind in ("exit", "signal") and STOP_SIGNAL.search(record.text) else None
        was_stopped = pid is not None and pid["pid"] in stopped
        was_cancelled = record.line > continuation.cancelled and bool(TASK_KILLED.search(record.text))
        is_banner = record.kind == "banner" or bool(STOPPED.search(record.text))
        from_launcher = is_banner or was_stopped or was_cancelled
        for cause, weight, values in matches:
            was_harmless = continued and not cause.silent
            score = weight * factor * (CONTINUED if was_harmless else 1.0)
            events.append(Event(record, cause, values, score, was_harmless, (number, record.line), from_launcher))
    own = load_catalogue().causes[FALLBACK]
    if len({event.values.get("path") for event in events if event.cause.id == RACE}) >= MANY_FILES:
        events = [replace(event, cause=own) if event.cause.id == RACE else event for event in events]
    return events if len(events) <= 2 * MAX_EVENTS else [*events[:MAX_EVENTS], *events[-MAX_EVENTS:]]


def matches_of(record: Record, log: Log) -> list[tuple[Cause, float, dict[str, str]]]:
    """What a record shows, by its text and its frames."""
    causes = load_catalogue().causes
    by_frame = match_frames(record)
    matches = [(causes[by_frame[0]], *by_frame[1:])] if by_frame else load_catalogue().match(record.text, record.kind)
    is_own_file = record.text.startswith("FileExistsError") and not any(map(PACKAGE.search, record.frames[-3:]))
    if is_own_file and log.has_one_process:  # an earlier run's
        matches = [(causes[FALLBACK], GUESS, {})]
    if any(number == record.line and CUT_BAR.search(text) for number, text in log.last_lines):
        matches = [(causes["killed-from-outside"], KILL_WEIGHT, {})]
    if is_own(record):
        matches = [match for match in matches if match[0].id not in NOT_OWN]
        matches = matches or [(causes[FALLBACK], GUESS, {})]
    if not matches and NAMED_EXCEPTION.match(record.text) and ended_program(record):  # a class of the user's own
        matches = [(causes[FALLBACK], OWN_CLASS_WEIGHT, {})]
    if len(matches) > 1:
        matches = [match for match in matches if match[0].id != FALLBACK]
        matches = [match for match in matches if not is_vague(match)] or matches
    is_vague_one = record.kind == "exception" and not CODE_ERROR.match(record.text) and all(map(is_vague, matches))
    if is_vague_one and not (is_own(record) or is_check(record)):
        matches = guessed(record.text) or matches
    if record.kind == "line" and matches and all(map(is_vague, matches)):
        matches = matches_of_message(record.text) or matches
    return matches


def is_vague(match: tuple[Cause, float, dict[str, str]]) -> bool:
    """Whether a match tells no more than the type of an exception, or that a value was rejected."""
    return match[1] <= VAGUE.get(match[0].id, 0.0)


def guessed(text: str) -> list[tuple[Cause, float, dict[str, str]]]:
    """What the words of a text suggest, in the form of the catalogue's matches."""
    first = text.partition("\n")[0]  # further lines of a CUDA error are the same for all
    cause = load_catalogue().guess(first) or (None if "CUDA error" in first else load_catalogue().guess(text))
    return [(cause, GUESS, {})] if cause else []


def guess_events(records: Sequence[Record]) -> list[Event]:
    """The events that the words of exceptions and lines suggest which no pattern knows."""
    return [
        Event(record, cause, values, weight, False, (0, record.line), False)
        for record in records
        if record.kind in ("exception", "line") and not QUOTED_COMMAND.match(record.text)
        for cause, weight, values in (record.kind == "line" and matches_of_message(record.text)) or guessed(record.text)
    ]


def matches_of_message(text: str) -> list[tuple[Cause, float, dict[str, str]]]:
    """What a line shows if it is an exception's message without its type, as `print(f"Training failed: {error}")` writes it."""
    if WARNING_LINE.search(text) or IGNORABLE.search(text) or GOES_ON.search(text) or QUOTED_COMMAND.match(text):
        return []
    catalogue = load_catalogue()
    inner = REPORTED.sub("", text, count=1)
    message = REPORTED.sub("", inner, count=1)
    shown = [error for error in map(as_raised, (inner, message)) if shown_exception(error)]
    typed = shown + [f"{name}: {words}" for words in dict.fromkeys((message, inner, text)) for name in MESSAGE_TYPES]
    known = [match for error in typed for match in catalogue.match(error, "exception")]
    matches = [match for match in known if match[0].id != FALLBACK] or [match for match in known if not is_vague(match)]
    if message == text:  # nothing says that it reports an error
        if " " not in text:
            return []  # a name or a path
        matches = [match for match in matches if not is_vague(match)]
    elif shown or PYTHON_MESSAGE.match(message):
        guess = [] if not shown or CODE_ERROR.match(shown[0]) else guessed(shown[0])
        matches = matches or guess or [(catalogue.causes[FALLBACK], GUESS, shown_exception(shown[0]) if shown else {})]
    if not matches:
        return []
    cause, weight, values = max(matches, key=lambda match: match[1])
    return [(cause, weight * ERROR_LINE, values)]


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
    if FATAL.search(record.text) and last_line - record.line <= BUFFERED_LINES:
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
    if (is_done and BEHIND_END.match(record.text)) or (is_far and (log.is_serving or is_warned_of(record, log))):
        return True
    if NOT_FOUND.search(record.text):
        return is_far or log.has_trained_behind(record) or any(CODE_ERROR.match(other.text) for other in behind)
    if is_of_item(record) and shape_of(record.text) in continuation.repeated:
        return True
    stop = continuation.stop if ended_program(record) else math.inf
    return len(log.steps_after(record, before=stop)) >= STEPS_AFTER


def is_handled(record: Record, log: Log) -> bool:
    """Whether the program announced above a line what it does in place of what failed."""
    before = log.records_between(record.line - MAX_QUOTED, record.line - 1)
    return not record.frames and any(HANDLED.search(other.text) for other in before)


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
    }
    cancelled = min((record.line for record in log.records if CANCELLED_STEP.search(record.text)), default=math.inf)
    goes_on = log.last_progress_line - cancelled > BUFFERED_LINES  # with another step of the job
    return Continuation(lines_before_done(log), frozenset(repeated), cancelled, math.inf if goes_on else cancelled)


def is_of_item(record: Record) -> bool:
    """Whether a record can report an item that a program leaves out: a line of its own."""
    return record.rank is None and (record.kind == "line" or (record.kind == "exception" and not record.frames))


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


def as_ended(events: Sequence[Event], logs: Sequence[Log]) -> list[Event]:
    """Those of the events after which the log goes on that ended their program: exceptions that nobody has caught.

    What follows such a one was in a buffer, as Python writes a file's lines late and tracebacks at once, or is little else. Before
    many lines, or before a run that finished, it was an earlier run's.
    """
    return [
        replace(event, run_continued=False, score=event.score / CONTINUED)
        for event in events
        for log in [logs[event.place[0]]]
        if event.run_continued and is_near_end(event.record, log) and not is_caught(event.record, log)
        if ended_program(event.record) or is_forwarded(event.record, log)
    ]


def is_forwarded(record: Record, log: Log) -> bool:
    """Whether an exception is that of a worker, quoted by the driver's own, which nobody has caught."""
    before = log.records_between(record.line - WENT_ON, record.line - 1)
    return record.kind == "exception" and any(other.kind == "banner" and ended_program(other) for other in before)


def is_near_end(record: Record, log: Log) -> bool:
    """Whether no more lines follow than a buffer holds, no run that finished, and no steps behind a launcher that has ended."""
    if log.last_line - record.line > BUFFERED_LINES:
        return False
    is_over = log.progress.finished or record.kind == "banner"
    return not (is_over and len(log.steps_after(record)) >= STEPS_AFTER)


def ended_programs(logs: Sequence[Log], events: Sequence[Event]) -> list[Record]:
    """The exceptions that nobody has caught and that are not in the catalogue, whatever follows them in the log."""
    explained = {id(event.record) for event in events}
    return [
        record
        for log in logs
        for record in log.records
        if id(record) not in explained and is_failure(record) and ended_program(record) and is_near_end(record, log)
        if not (left_program_running(record, log) or is_caught(record, log))
    ]


def unexplained_failures(logs: Sequence[Log], events: Sequence[Event]) -> list[Record]:
    """Records of a failure that are not in the catalogue."""
    explained = {id(event.record) for event in events}
    return [
        record
        for log in logs
        for continuation in [continuation_of(log)]
        for record in log.records
        if id(record) not in explained
        and is_failure(record)
        and not run_continued(record, log, continuation)
        and not left_program_running(record, log)
    ]


def is_failure(record: Record) -> bool:
    text = record.text
    if record.kind == "exception":
        return not text.startswith(("SystemExit: 0", "SystemExit\n")) and "Warning" not in text.split(":")[0]
    if record.kind == "banner":
        return bool(WRAPPED.search(text))
    return record.kind in ("exit", "signal") and not NO_FAILURE.search(text) and not WARNING_LINE.search(text)
