"""
Which events of a log may have ended the run.

An event is a record with one cause that the catalogue finds in it. Its score is lower if it is a warning, if a launcher only
forwards it, or if the run continued after it, as it did twice after what began alike.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.explain.catalogue import Cause, load_catalogue
from paceline.explain.collectives import CLOSED, DESYNC, FIRST_TRANSFER
from paceline.explain.explanation import Record
from paceline.explain.frames import PACKAGE, is_check, is_own, match_frames
from paceline.explain.lines import IGNORABLE, WARNING_LINE
from paceline.explain.log import SAVED, Log
from paceline.explain.run_bounds import PROGRAM, ended_program, shape_of
from paceline.explain.survival import (
    CANCELLED_STEP,
    CODE_ERROR,
    WENT_ON,
    continuation_of,
    is_caught,
    is_failure,
    is_near_end,
    left_program_running,
    run_continued,
)
from paceline.explain.tracebacks import as_raised, shown_exception

MIN_STEPS = 2  # progress lines that show that a run goes on
CONTINUED, WARNING, ERROR_LINE = 0.45, 0.55, 0.93  # factors of a score
WEIGHTS = {"banner": 0.5, "exception": 1.0}  # by the kind of record; ERROR_LINE for any other
FALLBACK = "user-code-exception"  # the cause of an exception if no other one matches
CUDA_ERROR = "cuda-error"
VAGUE = {FALLBACK: 0.4, "config-error": 0.66, CUDA_ERROR: 0.7}  # the highest weight of a match that tells little
GUESS, OWN_CLASS_WEIGHT, KILL_WEIGHT = 0.42, 0.3, 0.6  # of keywords, of a class of the user's own, of a cut bar
MAX_EVENTS = 400  # of one log, from either end
RACE, MANY_FILES = "rank-file-race", 20  # what fails for so many files needs no other process
PEER_DIED = "peer-died"
WAITING = {DESYNC, FIRST_TRANSFER, PEER_DIED}  # reported by ranks that wait for another

STOPPED = re.compile(r"(?:Sending process|Unable to shutdown process) (?P<pid>\d+)\b")
# torchrun's own signal, in the rest of a block that names the rank that failed first
STOPPED_BEFORE_ROOT = re.compile(r"\s*traceback : Signal 15 \(SIGTERM\)")
PID = re.compile(r"\b(?:pid:|PID) (?P<pid>\d+)\b")
TERMINATED = re.compile(r"failed \(exitcode: -15\)")  # a worker, before torchrun's agent stopped others
TERMINATED_WEIGHT = 0.45
STOP_SIGNAL = re.compile(r"-(?:2|9|15)\b|SIG(?:INT|KILL|TERM)\b")
# a way back through NCCL's functions, also when its sockets are closed at the end
NCCL_RETURN = re.compile(r"^NCCL INFO \S+:\d+ -> \d+$")
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
ENDS = re.compile(  # each time that it comes
    rf"{CANCELLED_STEP.pattern}|(?i:ctrl ?[-+] ?c\b)|thread: \[[\d,]+\] Assertion "
)
TASK_KILLED = re.compile(r"task \d+(?:[,-]\d+)*: (?:Killed|Terminated)|^(?:Killed|Terminated)\b")
NAMED_EXCEPTION = re.compile(r"(?!SystemExit|KeyboardInterrupt)(?:\w+\.)*(?:[A-Z]\w+|error)(?::|$)")
# behind a bar that did not get to its end: of a process that could not clean up
CUT_BAR = re.compile(r"(?<!\d)\d{1,2}%\|(?!.*\d%\|).*resource_tracker: There appear to be \d+ leaked")
NOT_SAVED = re.compile(
    r"(?i)\b(?:could ?n[o']t|can(?:no|')t|unable to|failed? to|error) (?:be )?(?:sav|writ|wrote|stor|serializ)\w*"
    r"|\bsav(?:e|ing)\b.{0,40}\bfail|\bfail\w* .{0,20}\bsav|No space left on device"
    # not because an earlier one is better
    r"|^(?!.*\b(?:improv\w*|best|better|worse|disabled|only|since|because)\b).*\bnot (?:saved|written|stored)\b"
)
CHECKPOINT = re.compile(
    r"(?i)checkpoint|ckpt|\b(?:model|weights|snapshot)\b|\.(?:pth?|npz|bin|safetensors|h5|keras)\b|^\W*save failed|\bsaving\W{2,}"
)
# a warning of torch, which then computes on the CPU; what an error says that may come from it
CPU_INSTEAD = re.compile(r"Warning: CUDA initialization: ")
OF_GPU = re.compile(r"(?i)cuda|gpu|nvidia|device|nccl|driver")
# pictures and texts beside the weights, other ranks, copies elsewhere, saves that are repeated
OF_OTHERS = re.compile(
    r"(?i)image|graph|diagram|\bcard\b|plot|summary|artifact|\brank\b|retry|again|s3:|gs:|upload|tensorboard|wandb"
)
NOT_OWN = {"version-mismatch", "config-error"}


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


def find_events(log: Log, *, number: int) -> list[Event]:
    """Everything that the catalogue finds in a log; number is the log's place among those read together."""
    events = []
    stopped = {match["pid"] for record in log.records for match in STOPPED.finditer(record.text)}
    ended = min((record.line for record in log.records if PROGRAM_ENDED.search(record.text)), default=None)
    root_cause = max((record.line for record in log.records if "Root Cause (first" in record.text), default=0)
    continuation, causes = continuation_of(log), load_catalogue().causes
    survived: Counter[str] = Counter()  # by the start of the text
    is_shut_down = any(CLOSED.search(record.text) for record in log.records)
    is_left = any("Horovod has been shut down" in record.text for record in log.records)
    harmless = [record for record in log.records if left_program_running(record, log)]
    warned = {  # the lines behind a warning that a package could not be imported
        record.line + 1 for record in log.records if NO_IMPORT.search(record.text) and WARNING_LINE.search(record.text)
    }
    ends = [record for record in log.records if record.kind == "exception" and ended_program(record)]
    failed_on_cpu = any(not OF_GPU.search(" ".join((record.text, *record.frames))) for record in ends)
    harmless_ids, announcements = {id(record) for record in harmless}, {record.line - 1 for record in harmless}
    for record in log.records:
        matches = matches_of(record, log)
        if ended is not None and record.line > ended and WARNING_LINE.search(record.text):
            matches = [match for match in matches if match[0].id != PEER_DIED]  # ranks leave one after the other
        is_line, is_return = record.kind == "line", is_shut_down and NCCL_RETURN.search(record.text)
        if record.rank is None and record.line < root_cause and STOPPED_BEFORE_ROOT.match(record.text):
            continue
        if is_line and (IGNORABLE.search(record.text) or is_return or record.line in announcements | warned):
            continue
        # TensorFlow's exception says no more than that its graph failed
        if id(record) in harmless_ids or (is_left and record.text.endswith("Graph execution error:")):
            continue
        if failed_on_cpu and CPU_INSTEAD.search(record.text):
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
        if stopped and pid is not None and not was_stopped and TERMINATED.search(record.text):
            from_outside = replace(causes["preempted-sigterm"], follows=[*causes.keys() - {PEER_DIED}])
            matches = [(from_outside, TERMINATED_WEIGHT / factor, {})]
        for cause, weight, values in matches:
            was_harmless = continued and not cause.silent
            score = weight * factor * (CONTINUED if was_harmless else 1.0)
            events.append(Event(record, cause, values, score, was_harmless, (number, record.line), from_launcher))
    own = causes[FALLBACK]
    if len({event.values.get("path") for event in events if event.cause.id == RACE}) >= MANY_FILES:
        events = [replace(event, cause=own) if event.cause.id == RACE else event for event in events]
    return events if len(events) <= 2 * MAX_EVENTS else [*events[:MAX_EVENTS], *events[-MAX_EVENTS:]]


def matches_of(record: Record, log: Log) -> list[tuple[Cause, float, dict[str, str]]]:
    """What a record shows, by its text and its frames."""
    causes = load_catalogue().causes
    by_frame = match_frames(record)
    matches = [(causes[by_frame[0]], *by_frame[1:])] if by_frame else load_catalogue().match(record.text, record.kind)
    is_own_file = record.text.startswith("FileExistsError") and not any(map(PACKAGE.search, record.frames[-2:]))
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


def as_ended(events: Sequence[Event], logs: Sequence[Log]) -> list[Event]:
    """Those of the events after which the log goes on that ended their program: exceptions that nobody has caught.

    What follows such a one was in a buffer, as Python writes a file's lines late and tracebacks at once, or is little else. Before
    many lines, or before a run that finished, it was an earlier run's.
    """
    return [
        as_fatal(event)
        for event in events
        for log in [logs[event.place[0]]]
        if event.run_continued and is_near_end(event.record, log) and not is_caught(event.record, log)
        if ended_program(event.record) or is_forwarded(event.record, log)
    ]


def as_fatal(event: Event) -> Event:
    """The event as one after which its run did not go on."""
    return replace(event, run_continued=False, score=event.score / CONTINUED) if event.run_continued else event


def is_forwarded(record: Record, log: Log) -> bool:
    """Whether an exception is that of a worker, quoted by the driver's own, which nobody has caught."""
    before = log.records_between(record.line - WENT_ON, record.line - 1)
    return record.kind == "exception" and any(other.kind == "banner" and ended_program(other) for other in before)


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


def failed_saves(log: Log) -> list[Record]:
    """The last report that a checkpoint was not saved, if none was saved behind the one before it, or none in this log at all."""
    texts = dict(log.last_lines) | {record.line: record.text for record in log.records}
    english = ((number, load_catalogue().in_english(text)) for number, text in sorted(texts.items()))
    saves = [
        (number, bool(SAVED.search(text))) for number, text in english if SAVED.search(text) or is_failed_save(text)
    ]
    if not saves or saves[-1][1] or (len(saves) > 1 and saves[-2][1]):
        return []
    is_last = len(saves) > 1 or saves[-1][0] > log.last_progress_line
    return [record for record in log.records if record.line == saves[-1][0] and is_last]


def is_failed_save(text: str) -> bool:
    return bool(NOT_SAVED.search(text) and CHECKPOINT.search(text)) and not OF_OTHERS.search(text)
