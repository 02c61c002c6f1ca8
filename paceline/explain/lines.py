"""
One line of a log: its text, and the rank, host and time in its prefix.

Launchers and loggers write rank, host and time before a line. Such prefixes nest (`worker-1: [default0]:[rank8]:
[2026-01-02 03:04:05] text`), so they are removed one after the other until none matches.
"""

import re
from collections import defaultdict
from dataclasses import dataclass

from paceline.terminal import STEERING

MAX_PREFIXES = 8  # on one line; real ones have four
MAX_RANKS = 100_000
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
