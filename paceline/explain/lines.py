"""
One line of a log: its text, cut to a length, and the rank, host and time in its prefix.

Launchers and loggers write rank, host and time before a line. Such prefixes nest (`worker-1: [default0]:[rank8]:
[2026-01-02 03:04:05] text`), so they are removed one after the other until none matches.

A line may also be a JSON object, around the text as it would stand in a plain log: of docker's json-file, Kubernetes' loggers,
structlog, loguru (serialize=True), python-json-logger, Elastic's ECS and Google Cloud. An object without a message, such as a line
of metrics, stays as it is.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, AnyStr

from paceline.terminal import STEERING

DIGITS = str.maketrans("", "", "0123456789")  # for str.translate, which removes them
MAX_PREFIXES = 8  # on one line; real ones have four
MAX_RANKS = 100_000
# only the beginning of a longer line is parsed, and the two ends of that
MAX_LINE_BYTES, MAX_LINE_CHARS = 1 << 16, 4000
MAX_WORD_CHARS = 400  # a pattern that begins with a word takes time by the square of the word's length
LONG_WORD = re.compile(rb"\S{401,}")
ESCAPED = re.compile(rb'\\n *File \\?"')  # a traceback as one text, with its newlines as two characters
GLUED = re.compile(rb"(?<=[^\s:\]])(?=\[rank\d+\]:)")  # where two ranks have written on one line
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
    r"|\(raylet(?:, ip=(?P<raylet>[\d.]+))?\) "  # Ray, for processes that have not registered yet
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
    r"|\|? ?(?:ERROR|INFO) \| std(?:err|out) \| "  # FastChat, which logs what other code prints
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
# the pid of torchrun's agent stays in the text: it tells whether the same agent had started the workers before
GLOG = re.compile(
    r"\s*(?P<open>\[)?(?P<level>[IWEFDC]) ?(?P<month>\d{1,2})(?P<day>\d\d) (?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)"
    r"(?P<fraction>[.,]\d+)? +(?:\d+ (?!torch/distributed/elastic/multiprocessing/api\.py:\d+\] failed \())?"
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

MAX_JSON_BYTES = 1 << 18  # a longer line is read as plain text
MAX_BEFORE = 200  # bytes of another program's prefix before the object
MAX_DEPTH = 3  # of objects in the object

MESSAGES = (
    *("log", "message", "msg", "event", "text", "textPayload", "body", "short_message", "error.message", "MESSAGE"),
)
TRACEBACKS = (
    *("exc_info", "exception", "exc_text", "traceback", "stack_trace", "stacktrace", "stack", "full_message"),
    *("error.stack_trace", "exception.stacktrace", "formatted"),
)
NESTED = ("error", "err", "exception", "exc_info", "jsonPayload", "record", "attributes", "extra", "fields", "data")
STEPS = {"epoch", "step", "global_step", "iteration", "iter"}
RANKS = ("rank", "global_rank", "RANK")
TIME_FIELDS = ("time", "timestamp", "@timestamp", "asctime", "ts")
LEVELS = ("level", "levelname", "severity", "log.level", "lvl")
SAMPLE_FIELDS = {"role", "messages", "prompt", "completion", "question", "task_id"}  # of an object whose texts are data
SHOWN_LEVEL = re.compile(r"(?i)(?:WARN(?:ING)?|ERROR|CRITICAL|FATAL)$")
EXCEPTION = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b")

WARNING_LINE = re.compile(
    r"^\W*(?:W|I|D|INFO|WARN|WARNING|DEBUG|NOTE)\b(?!.*\b(?:ERROR|FATAL|Error:))|\b\w*Warning: "
    r"|\[(?:WARNING|INFO|DEBUG)\]|NCCL INFO|^\s*(?:warnings\.)?warn\(|(?<!NCCL )\b(?:WARNING|WARN|INFO|DEBUG)\b[ :|\]-]"
)
RECOVERED = (  # what a program does in place of what failed
    r"\b(?:proceed|continu)ing (?:without|anyway)\b|\bbut continuing\b|\bfall(?:ing|s) ?back (?:to|on)\b"
    r"|\b(?:going to|using) \S+ instead\b(?! of)|\btrying port \d|\bsome optimizations will not be enabled\b"
    r"|(?<!learning rate), (?:trying|installing|downloading|creating|continuing|using|rebuilding|resuming)\b"
    r"|, (?:start|train)ing from scratch\b"
)
KILLED_LAUNCHER = re.compile(  # as a shell reports it, of the program that starts all ranks
    r": \d+ (?:Killed|Terminated) +(?:timeout .*)?(?:\S*/)?(?:torchrun|accelerate|deepspeed|mpirun|mpiexec|srun)\b"
)
IGNORABLE = re.compile(  # or what a program says that it leaves out
    r"(?i)\b(?:may|can) (?:be )?(?:safely )?ignored?\b|\bsafely ignored?\b|\(ignor(?:ed|ing)\)|^\W*skip(?:ping|ped)?\b"
    r"|\bwill be skipped\b|^Warp CUDA error 100: "  # NVIDIA Warp then works on the CPU
    r"|\bignor(?:e|ed|ing) (?:\w+ ){0,2}(?:errors?|exceptions?|failures?)\b|NCCL INFO dlvsym failed"
    r"|\b(?:is|are|be) expected (?:if|when|as|since|because)\b"
    # of what a launcher looks at, and of the libraries that DeepSpeed tries to link
    rf"|{RECOVERED}|_is_a_lwp: open|select_algorithm\.py\b|^MESA-LOADER|cannot find -l(?:aio|cufile)\b|TensorBoard could not bind"
    r"|slurm_load_jobs error: |^Aborting on container exit\b"  # of squeue; of Compose, however one ended
    # Isaac Sim at inotify's limit, Lmod
    r"|Failed to create change watch for|Module cannot be loaded due to a conflict|Load of requirement \S+ failed"
    # of W&B: behind every cell of a notebook, in its own log without an NVIDIA GPU
    r"|Error in callback <bound method _WandbInit\.|\bgpu\.py:is_available\(\):\d+\] Error initializing NVML:|\bgit repo not found"
    r"|Failed to (?:sample|serialize) metric:"
    r"|_cgroup_procs_check: |Cannot write to cgroup\.procs|TensorDispatcher: dlopen failed|\bexits with return code = [1-9]"
    r"|^\w[\w. -]{2,40} {3,}not (?:built correctly|found|available)\b"  # a row of a table of the environment
    r"|failed call to cuInit|Ignore above cudart dlerror"  # TensorFlow and XLA go on with the CPU
    r"|xla_bridge\b.*Unable to initialize backend"  # JAX asks for each in turn
    r"|Plan failed with a cudnnException|No OpenGL_accelerate module loaded"  # torch takes another plan, PyOpenGL goes on
    # torch's profiler; W&B, which asks which cloud it runs in
    r"|External init callback must run in same thread|^ERROR: dialing: google: "
    r"|NCCL WARN NET/OFI (?:Failed to initialize \w+ protocol|aws-ofi-nccl initialization failed|Initializing plugin)"  # others do
    r"|^Exception happened during processing of request from "  # a server's, which goes on
    r"|\bUCX +(?:DEBUG|DIAG|INFO|TRACE)\b"
    r"|has failed to shutdown the rendezvous"  # another node has shut it down before; a lost one shows in its own log
    r"|^(?:\S+ - +)?(?:Unable to find text: |Could not find answer: )'"  # of SQuAD's scripts, for each text that was normalized
    # of transformers' Trainer: weights that are tied; of accelerate
    r"|^There were missing keys in the checkpoint model loaded: |^Detected kernel version \S+, which is below the recommended"
    r"|^Failed to load \S*torchao/_C"  # for another GPU or torch; transformers imports torchao where it is installed
)
# what is printed before any work: by tools, and settings, whose values are not measured
OF_TOOLS = re.compile(r"(?:wandb: (?!Synced|Run summary|\s|.*[▁▂▃▄▅▆▇█])|nohup: |stty: |\s*warnings\.warn\().*")
SETTING = re.compile(r"(?!wandb: |.*\d\.[1-9]\d\d)\W*[A-Za-z_][\w.]*['\"]?(?::$|: | ?= ?(?=\S)).*|[^A-Za-z0-9]*")
SWITCH = re.compile(r"[:=] ?(?:(?i:true|false|none|null)\b|'')")

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class LogLine:
    """The text of one line, and what its prefix reports about where and when it was written."""

    text: str
    rank: int | None = None
    host: str | None = None
    time: float | None = None
    stream: str = ""  # the same for all lines of one process; "" if nothing identifies the process
    device: int | None = None  # the GPU's index on its host


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
            host = match["ip"] or match["raylet"] or host
            stream = stream or match[0].strip(" :")
        elif match := NCCL.match(text) or HOST.match(text):
            host = match["host"]
            device = int(match["device"]) if match.re is NCCL else device
            stream = stream or match[0].strip(" :|")
        elif (time is None or text[:4].isdigit()) and (
            match := next(filter(None, (pattern.match(text) for pattern in TIMES)), None)
        ):
            time = seconds_of(match) if time is None else time
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


def only_begins(texts: Sequence[str]) -> bool:
    """Whether lines are no more than what tools print at the start, and settings."""
    is_start = any(OF_TOOLS.match(text) or SWITCH.search(text) for text in texts)
    return is_start and all(OF_TOOLS.match(text) or SETTING.fullmatch(text) for text in texts)


def seconds_of(match: re.Match[str]) -> float:
    """Seconds since a fixed moment. A year counts 365.25 days, so only times of the same format compare exactly."""
    parts = defaultdict(str, {name: text for name, text in match.groupdict().items() if text})
    name = parts["name"].lower()
    month = MONTHS.index(name) + 1 if name in MONTHS else int(parts["month"] or 1)
    days = int(parts["year"] or 0) * 365.25 + int(parts["day"] or 0) + DAYS_BEFORE_MONTH[min(max(month, 1), 12) - 1]
    clock = int(parts["hour"] or 0) * 3600 + int(parts["minute"] or 0) * 60 + float(parts["second"])
    return days * 24 * 3600 + clock + float("0." + parts["fraction"].lstrip(".,:"))


def unwrap_json(raw: bytes) -> list[bytes]:
    """The lines of text in a line of JSON, each with rank and time as a prefix; the line itself if it is none with a message."""
    raw = raw.lstrip(b"[, ") if raw[:2] in {b"[{", b",{"} else raw  # an array with one object a line, of Kaggle for one
    start = raw.find(b'{"', 0, MAX_BEFORE)
    if start < 0 or len(raw) > MAX_JSON_BYTES or not raw.rstrip().endswith(b"}"):
        return [raw]
    try:
        fields = json.loads(raw[start:])
    except (ValueError, RecursionError):
        return [raw]
    if not isinstance(fields, dict):
        return [raw]
    if not (lines := list(logged_lines(fields))):
        message = fields.get("message")
        is_sample = not SAMPLE_FIELDS.isdisjoint(message if isinstance(message, dict) else fields)
        numbers = {name: value for name, value in fields.items() if isinstance(value, int | float)}
        return [json.dumps(numbers).encode() if is_sample else raw]
    prefix = raw[:start] + prefix_of(fields).encode("utf-8", "replace")
    return [prefix + line.encode("utf-8", "replace") for line in lines]


def split_line(raw: bytes) -> list[bytes]:
    """The parts of a line that different ranks wrote without a newline, or the lines of text in a line of JSON or in quotes."""
    lines = unwrap_json(raw)
    if ESCAPED.search(raw) and lines == [raw]:
        lines = raw.replace(b'\\"', b'"').split(b"\\n")
    return [part for line in lines for part in GLUED.split(line)]


def decode_line(raw: bytes) -> str:
    """The line as text of limited length, without escape sequences."""
    return strip_escapes(cut_middle(raw).decode("utf-8", "replace"))


def cut_middle(raw: bytes) -> bytes:
    """Shortens a long line and long words in it to their two ends."""
    if len(raw) <= MAX_WORD_CHARS:
        return raw
    raw = LONG_WORD.sub(
        lambda match: match[0][: MAX_WORD_CHARS // 2] + b"..." + match[0][-MAX_WORD_CHARS // 2 :], raw[:MAX_LINE_BYTES]
    )
    if len(raw) <= MAX_LINE_CHARS:
        return raw
    return raw[: MAX_LINE_CHARS * 3 // 4] + b" ... " + raw[-MAX_LINE_CHARS // 4 :]


def logged_lines(fields: Fields, depth: int = 0) -> Iterator[str]:
    """The message's lines, the first with its level, and then those of the traceback."""
    has_data = "pipe" in fields or "stream_name" in fields  # of milabench, of Kaggle
    message = first_text(fields, ("data", *MESSAGES) if has_data else MESSAGES)
    lines = message.splitlines()
    level = first_text(fields, LEVELS)
    is_output = "textPayload" in fields  # Google Cloud calls all that a container writes to stderr an error
    if lines and SHOWN_LEVEL.match(level) and not is_output and not EXCEPTION.match(message):
        lines[0] = f"{level.upper()}: {lines[0]}"
    if lines and SHOWN_LEVEL.match(level) and (reason := first_text(fields, ("error", "err"))) not in message:
        lines[0] += f": {reason}"
    if lines and not any(map(str.isdigit, lines[0])) and not STEPS.isdisjoint(fields):  # whose measures are fields
        measures = ((name, value) for name, value in fields.items() if name not in TIME_FIELDS)
        lines[0] += "".join(f" {name}: {value}" for name, value in measures if type(value) in (int, float))
    yield from lines
    for name in TRACEBACKS:
        traceback = traceback_text(fields.get(name))
        if traceback and traceback not in message:
            yield from traceback.splitlines()
    kind, value = first_text(fields, ("exc_type",)), first_text(fields, ("exc", "exc_value", "exc_message"))
    is_error = EXCEPTION.fullmatch(kind) and not WARNING_LINE.match(level.upper())
    if is_error and value and not any(map(fields.get, TRACEBACKS)):
        yield f"{kind}: {value}"
    is_whole = "text" in fields and "record" in fields  # loguru's text
    for name in NESTED if depth < MAX_DEPTH and not is_whole else ():
        if isinstance(inner := fields.get(name), dict):
            yield from logged_lines(inner, depth + 1)


def traceback_text(value: Any) -> str:
    """A traceback as text, as lines, or as structlog's list of exceptions with frames; empty for anything else."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        return ""
    if value and all(isinstance(item, str) for item in value):
        return "\n".join(line.rstrip("\n") for line in value)
    lines = []
    for error in (item for item in value if isinstance(item, dict) and "exc_type" in item):
        lines.append("Traceback (most recent call last):")
        frames = error.get("frames")
        for frame in frames if isinstance(frames, list) else ():
            if isinstance(frame, dict):
                lines.append(f'  File "{frame.get("filename")}", line {frame.get("lineno")}, in {frame.get("name")}')
                lines.append(f"    {frame.get('line') or ''}")
        lines.append(f"{error['exc_type']}: {error.get('exc_value', '')}")
    return "\n".join(lines)


def prefix_of(fields: Fields) -> str:
    """Time and rank, in the form of a plain log."""
    time = first_text(fields, TIME_FIELDS)
    inner = [fields, *(fields[name] for name in NESTED if isinstance(fields.get(name), dict))]
    rank = next((part[name] for part in inner for name in RANKS if type(part.get(name)) is int), None)
    return (f"{time} " if ISO.fullmatch(f"{time} ") else "") + (f"[rank{rank}]: " if rank is not None else "")


def first_text(fields: Fields, names: tuple[str, ...]) -> str:
    """The first of these fields that is a text."""
    return next((value for name in names if isinstance(value := fields.get(name), str) and value.strip()), "")


def has_word(text: AnyStr, words: Iterable[AnyStr]) -> bool:
    """Whether one of the words is in a text; a pattern with the same words takes five times as long, `any` twice as long."""
    for word in words:  # noqa: SIM110
        if word in text:
            return True
    return False
