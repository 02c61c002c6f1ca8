"""
What launchers and loggers write before a line: its rank, host and time; and what a terminal needs and a reader does not.

Knows nothing of what the line says. Prefixes nest (`worker-1: [default0]:[rank8]: [2026-01-02 03:04:05] text`), so they
are taken off one after the other until none fits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_PREFIXES = 8  # on one line; real ones have four
SECONDS_PER_DAY = 24 * 3600
DAYS_BEFORE_MONTH = (0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334)
MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")

# colours and cursor moves; a log that went through a lossy decoder has U+FFFD where ESC stood
ANSI = re.compile(
    r"[\x1b\ufffd]\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[()][0-9A-Za-z]|\x1b[=>78DMEc]"
)
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")

RANK = re.compile(
    r"\s*\[(?:rank|default|RANK |Rank )(?P<rank>\d{1,6})\]:? ?"  # torch, torchrun
    r"|\[\d+,(?P<mpi>\d{1,6})\](?:<std(?:err|out|diag)>)?:? ?"  # mpirun --tag-output
    r"|\[(?P<horovod>\d{1,6})\]<std(?:err|out)>:? ?"
    r"|\((?P<actor>(?:[\w.:-]{1,80}(?:\(\w*\))?,? ?)?(?:rank=(?P<ray>\d+), ?)?pid=\d+(?:, ?ip=(?P<ip>[\d.]+))?)\) ?"  # Ray, vLLM
    r"|\[(?P<ours>\d{1,4})\] {1,4}(?=\S)"  # paceline's terminal
)
SLURM = re.compile(r" {0,5}(?P<rank>\d{1,5}): ?(?=\S|  )")  # srun --label
NCCL = re.compile(r"(?P<host>[\w.-]{1,80}):\d+:\d+ \[(?P<device>-?\d{1,3})\] ")
HOST = re.compile(  # pdsh: accelerate and DeepSpeed over several hosts; docker compose: "worker-1  | "
    r"(?P<host>(?:[\w-]*(?:worker|node|gpu|host|master|server|dgx|^ip-)[\w.-]*|\d{1,3}(?:\.\d{1,3}){3}"
    r"|[A-Za-z][\w.-]*\d)(?<!\.so)(?<!\.py))"
    r"(?:: (?=\s*(?:\[|Traceback|  File|\w+(?:\.\w+)*(?:Error|Exception|Interrupt)\b|[\w-]+:\d+:\d+ ))| +\| )"
)
TORCHRUN_APP = re.compile(r"[\w.]+(?:/\d+)? (?=\[default\d+\]:|\[rank\d+\]:)")  # torchx
LISTING = re.compile(
    r" {0,6}\d{1,6}[ \t]+(?=(?:Traceback \(|  File \"|File \"|(?:\w+\.)*\w*(?:Error|Exception): ))"
)  # cat -n
NOTEBOOK = re.compile(r"\d+\.\d+s[ \t]+\d+[ \t]+")  # Kaggle: seconds, line number
PYTEST = re.compile(r"E {2,40}(?=\S)| {2,8}\| (?=Traceback|  File|\w+(?:Error|Exception))")  # and exception groups

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
class Line:
    """One line without what stood before it."""

    text: str
    rank: int | None = None
    host: str | None = None
    time: float | None = None
    stream: str = ""  # lines of one process have the same; "" where nothing tells them apart


def plain(text: str) -> str:
    """Without colours, cursor moves and other bytes that show nothing."""
    if "\x1b" in text or "\ufffd[" in text:
        text = ANSI.sub("", text)
    return text if text.isprintable() else CONTROL.sub("", text)


def split_prefix(text: str) -> Line:
    """A line's text, and what its prefixes say of where and when it was written."""
    rank: int | None = None
    host: str | None = None
    time: float | None = None
    stream = ""
    for _ in range(MAX_PREFIXES):
        if match := RANK.match(text):
            found = match["rank"] or match["mpi"] or match["horovod"] or match["ray"] or match["ours"]
            rank = int(found) if found else rank
            host = match["ip"] or host
            stream = stream or match[0].strip(" :")
        elif match := NCCL.match(text):
            host = match["host"]
            stream = stream or match[0].strip()  # [5] is the GPU's number on its host: with several hosts not the rank
        elif match := HOST.match(text):
            host = match["host"]
            stream = stream or match["host"]
        elif time is None and (match := next(filter(None, (pattern.match(text) for pattern in TIMES)), None)):
            time = seconds_of(match)
            host = match.groupdict().get("host") or host
            if match.re is GLOG:
                text = f"{match['open'] or ''}{match['level']} {text[match.end() :]}"
                continue
        elif match := SLURM.match(text):
            rank = int(match["rank"]) if rank is None else rank
            stream = stream or match[0].strip(" :")
        elif not (
            match := TORCHRUN_APP.match(text) or LISTING.match(text) or NOTEBOOK.match(text) or PYTEST.match(text)
        ):
            break
        text = text[match.end() :]
    return Line(text=text.rstrip(), rank=rank, host=host, time=time, stream=stream)


def seconds_of(match: re.Match[str]) -> float:
    """Seconds since some fixed moment; years count 365.25 days, so only times of one form compare exactly."""
    parts = match.groupdict()
    month = (
        MONTHS.index(name) + 1
        if (name := (parts.get("name") or "").lower()) in MONTHS
        else int(parts.get("month") or 1)
    )
    days = (
        int(parts.get("year") or 0) * 365.25
        + DAYS_BEFORE_MONTH[min(max(month, 1), 12) - 1]
        + int(parts.get("day") or 0)
    )
    clock = int(parts.get("hour") or 0) * 3600 + int(parts.get("minute") or 0) * 60 + float(parts.get("second") or 0)
    fraction = (parts.get("fraction") or "").lstrip(".,:")
    return days * SECONDS_PER_DAY + clock + (float("0." + fraction) if fraction else 0.0)
