"""
The sentences of an explanation: the catalogue's templates with the values of a log.

The values come from the pattern's groups, from the record, and from the caller. A failure that is not in the catalogue has a fix
that says what to look for; notes tell what was survived, and what is odd in a healthy log.
"""

import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle

from paceline.explain.catalogue import Cause, load_catalogue
from paceline.explain.explanation import LogProgress, Record
from paceline.explain.frames import INSTALLED
from paceline.explain.line_measures import UNITS
from paceline.explain.log import Log
from paceline.explain.matches import WAITING, Event
from paceline.units import format_bytes, format_duration, format_list, format_ranks

MAX_VALUE_CHARS = 300
WHOLE_COMMANDS = ("resume",)  # values that are not of a log, and whose words are quoted already
MAX_CASE_RECORDS = 20  # searched for the case of a cause
MAX_SURVIVED = 3  # causes named
MAX_PLACES = 3  # where ranks waited, and ranks at each
RANK_PREFIX = re.compile(r"^\W*(?:(?:CRITICAL|ERROR|FATAL)\b\W*)?(?:rank[ _:=]?\d+\W*)?", re.IGNORECASE)
FRAME = re.compile(r'File "(?P<file>[^"]*)", line (?P<line>\d+)(?:,? in (?P<name>\S+))?')
PACKAGE = re.compile(r"(?:site|dist)-packages[/\\](?!(?:torch|numpy)[/\\])(?P<name>[\w-]+)[/\\]")
IN_PACKAGE = re.compile(r"(?:site|dist)-packages[/\\](?P<path>.+)")
TYPE = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(?:\(\w+\))?: ?(?P<message>.*)")
SIZE = r"(?P<size>\d+(?:\.\d+)?) (?P<unit>[KMG])iB"
GPU_SIZES = [  # requested, of the GPU, and as torch before 2.1 says it: allocated, reserved
    re.compile(text)
    for text in (
        rf"Tried to allocate {SIZE}", rf"total capacit?y of {SIZE}", rf"{SIZE} already allocated", rf"{SIZE} reserved in total"
    )
]  # fmt: skip
OTHER_FILE = re.compile(r"Read file <(?P<path>[^>]+)> for stderr output of this job")  # LSF
EXIT_CODE = re.compile(r"(?:exit ?code|return code|status)\s*[:=]?\s*(?P<code>-?\d{1,5})", re.IGNORECASE)
MAX_OWN_CODE = 123  # a shell's and a launcher's begin above it
SIGNAL = re.compile(r"\bSIG[A-Z]{2,5}\d?\b")
BYTES = re.compile(r"(\d{1,15})(?: bytes)?")
MAX_DIGITS = 15  # of a duration
# as Python shows a file that it did not find, with a quote in its name, as bytes or as an object
QUOTED_PATH = re.compile(  # of a rename the first one
    r"No such file or directory: (?:b|\w*Path\()?(?P<quote>['\"])(?P<path>.+?)(?P=quote)(?:\)?$| -> )", re.MULTILINE
)
MAX_JOB_CHARS = 80
RANK = re.compile(r"(?i)\brank[ _=:-]{0,2}(\d{1,6})\b")
LONG_WORK = re.compile(  # that one rank does while the others wait for it
    r"(?i)\b(?:tokeniz|pre-?process|prepar|download|convert|merg|export|upload|copy|compress|cach|sav|writ|index|consolidat"
    r"|evaluat)ing\b|^checkpoint$"
)
WAITS = re.compile(r"(?i)\bwait(?:s|ing)\b")  # of a rank that tells for whose work
WORK_ENDED = re.compile(r"(?i)\b(?:done|finished|completed?|saved|written|skipp\w+|fail\w*|errors?|warning)\b")
SHAPE = re.compile(r"\[(\d{1,9}(?:, \d{1,9}){3,7})\]")
MAX_TIMES = 64
OPTIONAL = re.compile(r"\[([^\[\]]*\{[^\[\]]*)\]")
PLACEHOLDER = re.compile(r"\{(\w+)\}")
ONE_LOG = "COMMAND > run.log 2>&1, then paceline explain run.log"
ONE_LOG_PER_RANK = "torchrun --redirects 3 --log-dir logs, then paceline explain logs"
QUOTING_CODE = re.compile(r"`([^`\"]*'[^`\"]*)`")  # code between backticks with a text in it
MIN_ZEROS = 5  # evaluations


def template_values(event: Event, *, rank: int | None, step: int | None, progress: LogProgress) -> dict[str, str]:
    """The values for a template of the catalogue, by name."""
    record = event.record
    first = first_lines(record.text)
    exception = TYPE.match(first) if record.kind in ("exception", "banner") else None
    code, signal = EXIT_CODE.search(record.text), SIGNAL.search(record.text)
    values = {
        "step": step,
        "host": record.host,
        "source": record.source,
        "last_step": progress.last_step,
        "nan_step": progress.nan_step,
        "type": exception["type"].rpartition(".")[2] if exception else None,
        "message": exception["message"] if exception else first,
        "exit_code": code["code"] if code else None,
        "signal": signal[0] if signal else None,
        **frame_values(record),
        "package": package_of(event.values.get("module")),
        **event.values,
        "rank": rank,
        "times": None if record.rank is None else times_too_large(event.values),
    }
    if observed := memory_of_gpu(record.text):
        values["observed"] = observed
    if (quoted := QUOTED_PATH.search(record.text)) and quoted["path"].startswith(event.values.get("path", quoted[0])):
        values["path"] = quoted["path"]
    if num_bytes := BYTES.fullmatch(str(values.get("requested", ""))):
        values["requested"] = format_bytes(int(num_bytes[1]))
    for name, seconds in (("ran_ms", 0.001), ("ran_s", 1.0)):
        if (duration := event.values.get(name)) and len(duration) <= MAX_DIGITS:
            values["duration"] = format_duration(int(duration) * seconds)
    return clean_values(values)


def memory_of_gpu(text: str) -> str | None:
    """What the sizes in a message of torch show of the memory of a GPU that ran out."""
    matches = [pattern.search(text) for pattern in GPU_SIZES]
    requested, total, allocated, reserved = (
        float(match["size"]) * UNITS[match["unit"].lower()] if match else 0.0 for match in matches
    )
    if requested > total > 0:
        return "the tensor alone is larger than the GPU"
    if allocated and reserved - allocated > requested:
        return f"{format_bytes(reserved - allocated)} are reserved but unused"
    return None


def first_lines(text: str) -> str:
    """The first line of a message, with the one behind it where it ends with a colon."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def times_too_large(values: Mapping[str, str]) -> int | None:
    """How many times as many numbers as there are a shape of four dims or more has, if it is a whole number of times."""
    shape, size = SHAPE.fullmatch(values.get("right", "")), values.get("left", "")
    if shape is None or not size.isdecimal() or not 0 < int(size) < 10**MAX_DIGITS:
        return None
    times, remainder = divmod(math.prod(map(int, shape[1].split(", "))), int(size))
    return times if not remainder and 2 <= times <= MAX_TIMES else None


def describe_ranks(
    culprit: Event, related: Sequence[Record], *, rank: int | None, log: Log, left: Sequence[Record]
) -> dict[str, str]:
    """What other ranks did: `observed` and `job` where a rank waited for them, `lone_rank` if they did not fail so.

    related: the records of ranks that waited too, or of the same cause.
    `done_line` reports the end of the work, before the culprit's record and behind the last step. left: reports_of_leaving.
    """
    record, done_line = culprit.record, log.progress.done_line or 0
    values = {"done_line": str(done_line)} if 0 < log.last_progress_line < done_line < record.line else {}
    if culprit.cause.id in WAITING:
        return {**values, **describe_places([record, *related], left), **describe_work([record, *related], log)}
    others = {other.rank for other in log.records} - {None, rank}
    is_lone = bool(rank) and record.kind == "exception" and {other.rank for other in related} <= {None, rank}
    return {**values, "lone_rank": str(rank)} if is_lone and others else values


def describe_work(waiting: Sequence[Record], log: Log) -> dict[str, str]:
    """`job` and `job_line`: the last line before a rank stopped waiting, if it reports work of a rank that did not wait."""
    ranks = {record.rank for record in waiting}
    lines = [other for other in log.records if other.kind == "line" and other.line < waiting[0].line]
    others = [other for other in lines if ranks.isdisjoint((other.rank, *map(int, RANK.findall(other.text))))]
    others = [other for other in others if not WAITS.search(other.text)]
    last = max(others, key=lambda other: other.line, default=None)
    if last is None or not LONG_WORK.search(last.text) or WORK_ENDED.search(last.text):
        return {}
    return {"job": last.text.strip()[:MAX_JOB_CHARS], "job_line": str(last.line)}


def describe_places(records: Sequence[Record], left: Sequence[Record]) -> dict[str, str]:
    """`observed`: where in the user's code ranks waited for one another, and the report of one that stopped or skipped alone."""
    places = places_of(records)
    reports = [f"only rank {record.rank} reports: {RANK_PREFIX.sub('', record.text)}" for record in left]
    if not places:
        return {"observed": reports[0]} if reports else {}
    ranks: dict[str, list[int]] = {}
    for rank, where in sorted(places.items()):
        ranks.setdefault(where, []).append(rank)
    parts = [f"{format_ranks(numbers, limit=MAX_PLACES)} at {where}" for where, numbers in ranks.items()]
    first = parts[0].replace(" at ", " waited at ", 1)
    return {"observed": "; ".join([*reports, format_list([first, *parts[1:]], limit=MAX_PLACES)])}


def places_of(records: Iterable[Record]) -> dict[int, str]:
    """Where in the user's code each rank waited, by its first traceback."""
    places: dict[int, str] = {}
    for record in records:
        is_own = any((match := FRAME.search(frame)) and not INSTALLED.search(match["file"]) for frame in record.frames)
        if record.rank is not None and is_own and (where := frame_values(record).get("where")):
            places.setdefault(record.rank, where)
    return places


def describe_survived(events: Sequence[Event], *, num_logs: int) -> tuple[str, ...]:
    """A note on the errors after which a healthy run continued: causes, each with its first line."""
    fatal = [event for event in events if event.cause.severity == "fatal"]
    events = [event for event in fatal if event.cause.follows is not True] or fatal
    likeliest: dict[tuple[str | None, int], Event] = {}
    for event in sorted(events, key=lambda event: -event.score):
        likeliest.setdefault((event.record.source, event.record.line), event)
    first: dict[str, Record] = {}
    for event in sorted(likeliest.values(), key=lambda event: event.record.line):
        first.setdefault(event.cause.id, event.record)
    causes = [
        f"{cause} (line {record.line:,}{f' of {record.source}' if num_logs > 1 and record.source else ''})"
        for cause, record in first.items()
    ]
    return (f"the run continued after errors: {format_list(causes, limit=MAX_SURVIVED)}",) if causes else ()


def package_of(module: str | None) -> str | None:
    """What pip installs for a module: the name of its top-level package, unless the catalogue has another one."""
    packages, name = load_catalogue().packages, (module or "").partition(".")[0]
    return packages.get(module or "") or packages.get(name, name)


def frame_values(record: Record) -> dict[str, str | None]:
    """`where`: the innermost frame, in the user's code if one is; `script`: the file of the outermost; `raised_by`: a package."""
    frames = [match for frame in record.frames if (match := FRAME.search(frame))]
    own = [frame for frame in frames if not INSTALLED.search(frame["file"])]
    if not frames:
        return {}
    frames = own or frames
    outer, inner = (frame["file"].replace("\\", "/").rpartition("/")[2] for frame in (frames[0], frames[-1]))
    name = frames[-1]["name"]
    function = f" in {name}" if name and name != "<module>" else ""
    if not own and (in_package := IN_PACKAGE.search(frames[-1]["file"])):
        inner = in_package["path"].replace("\\", "/")
    package = PACKAGE.search(record.frames[-1])
    raised_by = package["name"] if package else None
    script = outer if outer.endswith(".py") else None  # no cell of a notebook
    return {"where": f"{inner}:{frames[-1]['line']}{function}", "script": script, "raised_by": raised_by}


def format_fix(cause: Cause, records: Sequence[Record], values: Mapping[str, str]) -> str:
    """The cause's fix for the case that its records show; the culprit's record is the first."""
    texts = [record.text for record in records[1:MAX_CASE_RECORDS]]
    for record in records[:1]:  # its innermost frame ends the text
        texts += [values.get("observed", ""), f"host {record.host}", record.text, *record.frames]
    fix, groups = cause.choose_fix("\n".join(texts))
    return fill_template(fix, {**values, **clean_values(groups)}, has_commands=True)


def unknown_fix(record: Record, logs: Sequence[Log]) -> str:
    """How to find out more about a failure that is not in the catalogue."""
    if record.kind == "line":
        return f"read what stands around line {record.line:,}, and look for its text in the script or program that printed it"
    if record.kind == "exception":
        return (
            "read the frames above that line; if they do not show the cause, run again with CUDA_LAUNCH_BLOCKING=1"
            " and TORCH_SHOW_CPP_STACKTRACES=1"
        )
    texts = (text for log in logs for _, text in log.last_lines)
    if stderr := next((match["path"] for text in texts if (match := OTHER_FILE.search(text))), None):
        return f"read the job's errors: {shlex.join(['paceline', 'explain', stderr])}"
    code = EXIT_CODE.search(record.text) if record.kind == "exit" else None
    if code and 1 < int(code["code"]) <= MAX_OWN_CODE:
        return (
            f"look where the process ends by itself with this code and without a traceback: sys.exit({code['code']}),"
            f" os._exit({code['code']}) or the exit of a library; what it printed before may say why"
        )
    if is_one_process(logs):
        return f"run again with PYTHONFAULTHANDLER=1: {ONE_LOG}; also check dmesg on its host"
    if all(record.kind != "exception" for log in logs for record in log.records):
        return f"the failed rank's own output is missing: {ONE_LOG_PER_RANK}; also check dmesg on its host"
    return f"run again with PYTHONFAULTHANDLER=1, NCCL_DEBUG=INFO and one log per rank: {ONE_LOG_PER_RANK}"


def is_one_process(logs: Sequence[Log]) -> bool:
    """Whether nothing shows several ranks."""
    return len(logs) == 1 and logs[0].has_one_process


def fill_template(template: str, values: Mapping[str, str], *, has_commands: bool = False) -> str:
    """The sentence with its values, on one line.

    A part in [ ] is left out if one of its values is unknown. Elsewhere an unknown rank reads "a rank" and any other unknown
    value "n/a". Text between backticks is a command: there a value is one word of the shell, and one that would still be an
    option or end the command counts as unknown and reads as its name in capitals. has_commands: no value may add backticks.
    """
    in_commands = set(PLACEHOLDER.findall("".join(template.split("`")[1::2])))
    unsafe = {name for name in in_commands & values.keys() if values[name].startswith("-") or "`" in values[name]}
    known = values.keys() - unsafe
    text = OPTIONAL.sub(lambda match: match[1] if set(PLACEHOLDER.findall(match[1])) <= known else "", template)
    text = text if "rank" in values else text.replace("rank {rank}", "a rank")
    names = PLACEHOLDER.findall(text)
    prose = {name: values.get(name, "n/a") for name in names}
    if has_commands:
        prose = {name: QUOTING_CODE.sub(r'"\1"', value).replace("`", "'") for name, value in prose.items()}
    words = {name: shlex.quote(values[name]) if name in known else name.upper() for name in names}
    words |= {name: values[name] for name in WHOLE_COMMANDS if name in known}
    parts = [part.format_map(table) for part, table in zip(text.split("`"), cycle((prose, words)), strict=False)]
    return " ".join("`".join(parts).split())


def clean_values(values: Mapping[str, object]) -> dict[str, str]:
    """The known values, each as short text on one line."""
    texts = {name: " ".join(str(value).split()) for name, value in values.items() if value is not None}
    return {name: text[:MAX_VALUE_CHARS] for name, text in texts.items() if text}


def describe_doubts(logs: Sequence[Log]) -> tuple[str, ...]:
    """Notes on a healthy log: evaluations that all score 0."""
    notes = []
    for log in logs:
        if len(log.scores) >= MIN_ZEROS and not any(point.value for point in log.scores):
            advice = "print a few predictions beside their labels, as the metric gets them"
            notes.append(f"all {len(log.scores)} evaluations have a score of 0: {advice}")
    return tuple(dict.fromkeys(notes))
