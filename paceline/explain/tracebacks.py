"""
Puts exceptions together from lines: a traceback's frames and its message.

Several processes may write into one log, so each stream (LogLine.stream) has its own unfinished error. A traceback may
lack its first line, its last line or both; whatever is there becomes a record.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from paceline.explain.explanation import Record, RecordKind
from paceline.explain.lines import LogLine

MAX_FRAMES = 60  # innermost
MAX_MESSAGE_LINES = 16
MAX_MESSAGE_CHARS = 6000
MAX_NOISE = 40  # other lines within one traceback before it counts as incomplete
MAX_STREAMS = 4096

IGNORED_INTERRUPT = "KeyboardInterrupt: ignored by Python"  # counts only in a single log that shows nothing else
CUT_OFF = "a traceback without its last line"
HOOK_FAILED = "Error in sys.excepthook: the exception that ended the program is missing"

# by DCP, of whichever rank prints it
REPORTED_RANK = re.compile(r"\(most recent call last\): \(RANK (?P<rank>\d{1,6})\)")
HEADER = re.compile(r"Traceback \(most recent call last\)|^Original Traceback|Exception in thread (?!\")")
MESSAGE_BEFORE = re.compile(r"\w: \S.*\w")
FRAME = re.compile(
    r"^\s*(?P<frame>File \"[^\"]*\", line \d+(?:,? in .*)?)"
    r"|^(?P<ipython>(?:[~/.]|[A-Za-z]:)\S*\.py[xc]? in (?:<cell line: \d+>|\S+)\(.*\))"
    r"|^(?:File )?(?P<notebook>(?P<file>Cell In\s?\[\d+\]|(?<=File )\S[^:]*)"
    r"(?:, line |:)(?P<line>\d+)(?:, in (?P<name>[\w.<>]+)\(.*)?)$"
    r"|^(?P<rich>(?:[~/.]|[A-Za-z]:)?[\w./\\~-]+\.py:\d+ in \S+)$|^(?P<cell><ipython-input-\S+> in )"
)
NOTEBOOK_SOURCE = re.compile(r"^(?:-+> ?| +)\d+(?: |$)")  # a line of a cell or a file below its frame
EXCEPTION = re.compile(
    r"^(?:uncaught exception: )?(?P<type>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Interrupt|ExceptionGroup|Exit"
    r"|Failure|Timeout|TimeoutExpired|Killed|Empty|Full|StopIteration|Warning|Abort))(?:\(\w+\))?(?:: |:$|$)"
)
IN_TRACEBACK = re.compile(r"^(?!(?:Completed?|Done|Finished|OK)$)(?P<type>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)(?:: |:$|$)")
BARE_EXCEPTION = re.compile(  # without a traceback above it; stricter, because prose contains such names too
    r"^(?P<type>(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*|_?[a-z]\w*\.[A-Z]\w*)?(?:Error|Exception|KeyboardInterrupt|ExceptionGroup))"
    r"(?:\(\w+\))?(?:: (?![-+.\de]+$)|:$|$)"  # not a measure
)
EXCEPTION_REPR = re.compile(  # alone on its line, as Hydra and loggers print it
    r"^(?P<type>(?:\w+\.)*[A-Z]\w*(?:Error|Exception))"
    r"\((?:(?<=KeyError\()(?P<key>['\"].*['\"])|(?:(?<=Error\()(?P<errno>\d{1,3}), )?"
    r"(?P<quote>['\"])(?P<message>.*)(?P=quote)),?\)$"
)
STACK = re.compile(r"\(most recent call first\)|^Stack \(most recent call|^Fatal Python error: ")  # not an error
CHAIN = re.compile(r"During handling of the above exception|direct cause of the following exception")
MAX_BEHIND = 6  # lines, from its announcement to an exception that Python ignores
IGNORED = re.compile(
    r"^Exception (?:ignored (?:in|on|while)|happened during processing of request)"  # a server goes on
    r"|^Error in atexit|^Exception in Tkinter|^Error in (?P<hook>sys\.excepthook)"
    r"|.{0,80}\bJax plugin configuration error: "  # it goes on with the other devices
    r"|^Error processing line \d+ of \S+\.pth:$"  # of site-packages, of which Python leaves the others out
)
SPAWNED = re.compile(r"-- Process (?P<rank>\d+) terminated with the following error")
# how a program shows an exception that it caught: its type and message, or its repr
SHOWN = re.compile(r"(?P<type>(?:\w+\.)*[A-Z]\w*(?:Error|Exception))(?:: (?P<message>\S.*)|\((?P<arguments>.+)\))$")
ENDED_PROCESS = re.compile(
    r"(?:\S*Exception: )process (?P<rank>\d{1,4}) terminated with (?:signal|exit code (?P<code>[1-9]))"
)
WRAPPER = re.compile(
    r"ChildFailedError|WorkerGroupFailureException|ProcessRaisedException|ProcessExitedException|CalledProcessError|SpawnException"
    r"|^(?:\w+\.)*\w+: Caught \w+ in (?:DataLoader worker|replica|pin memory|\w+) |ray\.exceptions\.RayTaskError"
    r"|WorkerCrashedError$|^SystemExit: \d|^Exception:(?: *$| process \d+ terminated with exit code)"
    r"|^torch\.distributed\.(?:elastic\S*SignalException|checkpoint\S*CheckpointException)"
    r"|RuntimeError: TorchDistributor failed"
)
SPAWN_CHILD = re.compile(r"multiprocessing[/\\](?:spawn|forkserver)\.py\"?.* in (?:_main|spawn_main|main)")
UNREADABLE = re.compile(r"EOFError\b|\S*UnpicklingError: pickle data was truncated")  # a parent did not send all
ASSERTION = re.compile(r"^\W*(?:\d+\W+)?assert\b\s*(?P<expression>.+)")
RAISED = re.compile(
    r"\W*(?:\d+\W+)?raise (?P<type>[A-Z][\w.]*)\(f?(?P<quote>['\"])(?P<message>.+?)(?:(?P=quote)\)?)?\s*$"
)
BARE_ASSERTION = re.compile(r"^AssertionError:?\s*$")
LONELY_TYPE = re.compile(r"^((?:\w+\.)*\w+:) *\n(?=\S)")  # its message is on the next line, as rich breaks it
# what huggingface_hub, torch.load and Keras write above a blank line and the rest of the message
BEFORE_BLANK = re.compile(
    r"\(Request ID: [^)]*\)$|WeightsUnpickler error: *$"
    r"|: Exception encountered when calling \w+\.call\(\)\.$|Example error message for object <.*>:$"
)
# whose statement says what was empty or never begun, or that a file was to be written
SHOWN_WITH_SOURCE = ("ZeroDivisionError: ", "IndexError: list index out of range", "UnboundLocalError: ")
STATEMENT_SHOWN = tuple(  # messages that need their statement below them, and what it contains then
    (re.compile(message), re.compile(statement))
    for message, statement in (
        (r"(?:FileNotFound|IsADirectory)Error: ", r"\bopen\((?:.*, *)?(?:mode *= *)?['\"][wax][bt+]{0,2}['\"]"),
        (  # a function that was passed to the package that calls it, by the name that it has there, and no wrapper's
            r"TypeError: (?P<function>(?!forward\b)[a-z]\w*)\(\) got an unexpected keyword argument '\w+'$",
            r"(?:\b|_)(?:func|fn|function|callback|reward|metrics?|collat\w*|hook|preprocess\w*|transform)\w{0,8}\((?!.*\*\*)",
        ),
        (r"TypeError: [A-Z]\w*\.__init__\(\) got an unexpected keyword argument '\w+'$", r"\(\*\*"),
        (r"KeyError: ", r"\b(?:stoi|vocab|ck|ckpt|checkpoint|\w+(?:to|2)_?i(?:d|x|dx|ndex|nt)s?)\["),
        (r"TypeError: 'NoneType' object is not subscriptable", r"(?<!\])\[['\"][\w.-]+['\"]\]\[[^\]]*\](?!\[)"),
        (r"TypeError: 'NoneType' object is not iterable$", r"\bis_listy\(.*\bin self\.types\)"),
        (r"TypeError: '<=' not supported between instances of 'float' and 'str'$", r" <= lr\b"),
        (r"\w+Error: index -?\d+ is out of bounds for dim", r"\bgather\([^()]*\b(?:target|label)s?\b"),
        (r"BrokenPipeError: ", r"\bprint\(|\bsys\.std(?:out|err)\.(?:write|flush)\("),
        (r"ValueError: (?:could not convert string to float|invalid literal for int\(\))", r"\b(?:environ|getenv)\b"),
        (r"AttributeError: Can't get attribute ", r"\b(?:pickle|joblib|dill|cloudpickle)\.loads?\("),
    )
)
ONE_LINE = re.compile(
    r"(?:\w+\.)*(?:KeyError: |\w+Error: \[(?:Errno|WinError) -?\d+\] .*)(?P<quote>['\"]).*(?P=quote)$"
    r"|NameError: name '\w+' is not defined|AttributeError: '[\w.]+' object has no attribute '\w+'"
    r"|ModuleNotFoundError: No module named '[\w.]+'$|ray\.exceptions\.GetTimeoutError: "
)
NOT_MESSAGE = re.compile(  # a new log line, not a further line of the message
    r"^\[|^\d{4}-\d\d|^(?:\w+: )?(?:INFO|WARNING|ERROR|DEBUG|CRITICAL|FATAL)\b|^(?:wandb|srun|slurmstepd|INFO|W|E|I) ?[:\[]"
    r"|^Traceback|^During handling|^The above exception|^Exception (?:ignored|in thread)|^Error in sys\.excepthook"
    r"|^-- Process|^\$ |^>>> |^[=*#_-]{8,}|^\+(-\+)?-{8,}"
    r"|^Process \S+:$|^\s*File \"|^real\s|^NCCL |^terminate called|^Exception raised from|^frame #\d+|^Killed|^Aborted"
    r"|^Dumping (?:input data|scheduler output)\b|^\S+\.py:\d+: \w*Warning: "  # vLLM, all its settings; a warning
    r"|^PC: @ |^make: |^In \[\d|^[WEIFC] \S+\.(?:py|cpp|cc|cu|h|hpp):\d+\]|^(?:Current )?[Tt]hread 0x|^Fatal Python error"
)


@dataclass
class Unfinished:
    """An error whose lines are still being read."""

    record: Record  # without text and frames
    ignored: bool
    has_header: bool = False
    type: str = ""  # as IPython prints it in the header
    frames: list[str] = field(default_factory=list)
    source: list[str] = field(default_factory=list)  # lines below the last frame
    message: list[str] = field(default_factory=list)
    indent: int = 0  # of the last frame
    noise: int = 0


class TracebackReader:
    """Takes the lines of a log in order and returns each exception as a record when it is complete."""

    def __init__(self) -> None:
        self._open: dict[str, Unfinished] = {}
        self._ignored: dict[str, int] = {}  # by stream: the line that announced one
        self.last_ignored: int | None = None
        self._hooks: dict[str, Record] = {}  # by stream: sys.excepthook failed, whose exception follows
        self._assertions: dict[str, list[str]] = {}  # by stream: a source line whose traceback lacks its first lines
        self._interrupt: Record | None = None  # a Ctrl-C that Python ignored, with nothing behind it
        self._cut: list[Record] = []  # errors of which the end is missing
        self._stacks: set[str] = set()  # streams that are printing a stack dump
        self._spawned: dict[str, int] = {}  # by stream: the rank whose traceback follows
        self._chains: dict[str, tuple[str, bool]] = {}  # by stream: the last chain's first message, whether it goes on

    def feed(self, number: int, line: LogLine, step: int | None) -> tuple[list[Record], bool]:
        """Returns the records that this line completes, and whether the line is part of an error."""
        error, done = self._open.get(line.stream), []
        if error and error.message:
            if continues(error, line):
                error.message.append(line.text)
                return [], True
            done = self._finish(line.stream)
        is_part = self._is_part(number, line, step)
        if not is_part and line.text.strip():
            self._interrupt = None
        return done, is_part

    def flush(self, *, at_end: bool = False) -> list[Record]:
        """Completes the unfinished errors at a gap in the log or its end; behind a gap comes the message of IPython's."""
        for key in [key for key, error in self._open.items() if at_end or error.message or not error.type]:
            self._cut += self._finish(key)
        records, self._cut = self._cut, []
        return records

    @property
    def is_open(self) -> bool:
        """Whether an error is not complete."""
        return bool(self._open)

    def is_source(self, line: LogLine) -> bool:
        """Whether a line is the source of the frame above it."""
        error = self._open.get(line.stream)
        if error is None or not error.frames or error.message:
            return False
        if NOTEBOOK_SOURCE.match(line.text):
            return True
        return not error.source and len(line.text) - len(line.text.lstrip()) > error.indent

    def end_message(self, stream: str) -> list[Record]:
        """Completes a stream's error whose message has begun."""
        error = self._open.get(stream)
        return self._finish(stream) if error and error.message else []

    def close(self) -> list[Record]:
        """Completes every unfinished error at the end of the log, with the exceptions that sys.excepthook did not print."""
        records = [*self.flush(at_end=True), *self._hooks.values()]
        return [*records, self._interrupt] if self._interrupt else records

    def _is_part(self, number: int, line: LogLine, step: int | None) -> bool:
        """Whether the line belongs to an error whose message has not begun yet."""
        key, text = line.stream, line.text
        if STACK.search(text):
            self._stacks.add(key)
            self._open.pop(key, None)
            return False
        frame = FRAME.match(text)
        if text.strip() and not frame:
            self._stacks.discard(key)
        if CHAIN.search(text):
            self._open.pop(key, None)
            self._chains[key] = (self._chains.get(key, ("", False))[0], True)
        elif match := IGNORED.match(text):
            self._ignored[key] = self.last_ignored = number
            if match["hook"]:
                self._hooks[key] = Record("exception", HOOK_FAILED, number, line.rank, line.host, line.time, step)
        elif match := SPAWNED.search(text):
            self._spawned[key] = int(match["rank"])
        elif header := HEADER.search(text):
            if match := REPORTED_RANK.search(text):
                line = replace(line, rank=int(match["rank"]))
            error = self._start(number, line, step)
            error.has_header, named = True, text[: header.start()].strip()
            error.type = named if named and EXCEPTION.fullmatch(named) else ""
            # a logger's own sentence, with the error behind it
            return not MESSAGE_BEFORE.search(text[: header.start()])
        elif not frame:
            return self._is_message(number, line, step)
        elif key in self._open or key not in self._stacks:
            error = self._open.get(key) or self._start(number, line, step)
            error.indent = len(text) - len(text.lstrip())
            error.frames = [*error.frames[-MAX_FRAMES:], frame_text(frame)]
            error.source = []
        return True

    def _start(self, number: int, line: LogLine, step: int | None) -> Unfinished:
        """Opens an error on a stream; with too many open ones the oldest is dropped."""
        key = line.stream
        self._open.pop(key, None)
        if len(self._open) >= MAX_STREAMS:
            self._open.pop(next(iter(self._open)))
        rank = self._spawned.pop(key, line.rank)
        first, goes_on = self._chains.pop(key, ("", False))
        record = Record("exception", "", number, rank, line.host, line.time, step, context=first if goes_on else "")
        is_ignored = number - self._ignored.pop(key, -MAX_BEHIND) < MAX_BEHIND
        error = self._open[key] = Unfinished(record, is_ignored)
        return error

    def _is_message(self, number: int, line: LogLine, step: int | None) -> bool:
        """Whether the line begins a message, or is a source line of the traceback above it."""
        error, text = self._open.get(line.stream), line.text
        if error is None:
            assertion = self._assertions.pop(line.stream, [])
            if not BARE_EXCEPTION.match(text):
                if ASSERTION.match(text) or (assertion and not text.strip(" ^~")):
                    self._assertions[line.stream] = [*assertion, text]
                return False
            if not line.stream and (lost := self._only_open()):
                error = self._open[line.stream] = self._open.pop(lost)  # the last line came without its prefix
            else:
                error = self._start(number, line, step)
                error.source = assertion
            error.message.append(text)
            return True
        indented = text.lstrip()
        if error.frames and 0 < len(text) - len(indented) <= error.indent and EXCEPTION.match(indented):
            text = indented
        if EXCEPTION.match(text) or (error.frames and IN_TRACEBACK.match(text) and not NOT_MESSAGE.match(text)):
            error.message.append(text)
            return True
        if text.startswith((" ", "\t", "--", "│", "^")) or not text or text[:1].isdigit():
            error.source.append(text)
            return True
        error.noise += 1
        if error.noise > MAX_NOISE:
            self._cut += self._finish(line.stream)
        return False

    def _only_open(self) -> str | None:
        """The stream of the only error whose message is missing."""
        open_keys = [key for key, error in self._open.items() if error.frames and not error.message]
        return open_keys[0] if len(open_keys) == 1 else None

    def _finish(self, key: str) -> list[Record]:
        """Closes the error as a record; none for an exception that Python ignored, because it ends no run."""
        error = self._open.pop(key)
        text = "\n".join(error.message)[:MAX_MESSAGE_CHARS].rstrip() or error.type
        text = LONELY_TYPE.sub(r"\1 ", text)
        is_cut = not text and error.has_header and bool(error.frames)
        if is_cut and (raised := raised_text(error.source)):
            text = raised
        if error.ignored and text.startswith("KeyboardInterrupt"):
            self._interrupt = replace(error.record, text=IGNORED_INTERRUPT, frames=tuple(error.frames[-MAX_FRAMES:]))
        if error.ignored or not (text or is_cut):
            return []
        self._hooks.pop(key, None)
        self._chains[key] = (error.record.context or text.partition("\n")[0], False)
        if BARE_ASSERTION.match(text) and (expression := asserted_expression(error.source)):
            text = f"AssertionError: {expression}"
        if text.startswith(SHOWN_WITH_SOURCE) and (statement := failed_statement(error.source)):
            text += f": {statement}"
        elif needs_statement(text, statement := failed_statement(error.source)):
            text += f"\n{statement}"
        child = UNREADABLE.match(text) and any(map(SPAWN_CHILD.search, error.frames[-2:]))
        kind: RecordKind = "banner" if child or WRAPPER.search(text) else "exception"
        rank = error.record.rank
        if match := ENDED_PROCESS.match(text):
            rank, kind = int(match["rank"]), "exit" if match["code"] else kind
        frames = tuple(error.frames[-MAX_FRAMES:])
        return [replace(error.record, kind=kind, text=text or CUT_OFF, rank=rank, frames=frames)]


def as_raised(text: str) -> str:
    """An exception's repr as a traceback ends with it, `KeyError: 'a'` for `KeyError('a')`; any other text as it is."""
    if (match := EXCEPTION_REPR.match(text)) is None:
        return text
    number = f"[Errno {match['errno']}] " if match["errno"] else ""
    return f"{match['type']}: {number}{match['key'] or match['message']}"


def shown_exception(text: str) -> dict[str, str]:
    """The type and the message of an exception that a program caught and printed; empty for any other text."""
    match = SHOWN.match(as_raised(text))
    return {"type": match["type"], "message": match["message"] or match["arguments"]} if match else {}


def frame_text(frame: re.Match[str]) -> str:
    """The frame in Python's own form."""
    if frame["notebook"]:
        name = f", in {frame['name'].rpartition('.')[2]}" if frame["name"] else ""
        return f'File "{frame["file"]}", line {frame["line"]}{name}'
    return next(frame[name] for name in ("frame", "ipython", "rich", "cell") if frame[name]).strip()


def raised_text(source: Sequence[str]) -> str:
    """The error that a raise statement makes of one string, where a log ends there; source: the lines below the frame."""
    match = RAISED.match(failed_statement(source))
    return f"{match['type']}: {match['message']}" if match else ""


def failed_statement(source: Sequence[str]) -> str:
    """The last of the lines below a frame, or the one that IPython's arrow points at."""
    lines = [line for line in source if line.strip(" ^~")]
    line = next((line for line in reversed(lines) if line.startswith("-")), lines[-1] if lines else "")
    return NOTEBOOK_SOURCE.sub("", line).strip()


def needs_statement(text: str, statement: str) -> bool:
    """Whether only the statement below the last frame shows what a message is about, and is not itself the call that it names."""
    for message, part in STATEMENT_SHOWN:
        if (match := message.match(text)) and part.search(statement):
            function = match.groupdict().get("function")
            return function is None or function not in statement
    return False


def asserted_expression(source: Sequence[str]) -> str:
    """What an assert statement claims; source: the lines below the frame, with carets, or with line numbers as rich prints them."""
    lines = [line for line in source if line.strip(" ^~")]
    at = next((at for at in reversed(range(len(lines))) if ASSERTION.match(lines[at])), None)
    if at is None:
        return ""
    match = ASSERTION.match(lines[at])
    first = match["expression"] if match else ""
    others = [] if lines[at].lstrip(" ->")[:1].isdigit() else lines[at + 1 :]
    return " ".join([first.strip(), *(line.strip() for line in others)])


def continues(error: Unfinished, line: LogLine) -> bool:
    """Whether the line is a further line of the error's message; a logger's own line has a time."""
    text = line.text
    if (line.time is not None and error.record.time is None) or ONE_LINE.match(error.message[0]):
        return False
    if not text.strip() and BEFORE_BLANK.search(error.message[-1]):
        return True
    # the message of NLTK stands in a frame
    if text.startswith("*" * 8) and error.message[-1].strip() == "LookupError:":
        return True
    if not text.strip() or "%|" in text or len(error.message) >= MAX_MESSAGE_LINES or NOT_MESSAGE.match(text):
        return False
    if BARE_EXCEPTION.match(text) and WRAPPER.search(error.message[0]):
        return False  # the error that is wrapped
    return not (WRAPPER.search(text) or (BARE_EXCEPTION.match(text) and len(error.message) > 1 and error.frames))
