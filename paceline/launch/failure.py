"""
What a failed rank left behind, and which of several failed first.

Reads exit codes, `<rank>.error.json` and the end of the rank's log. When one rank dies, its peers lose their
connections and often end first or together with it; blaming the first exit code seen would name the wrong rank.
"""

import json
import re
import signal
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from paceline.errors import TrainingFailed
from paceline.marks import read_mark
from paceline.rundir import RunDir

FAILED_EXIT_CODE = TrainingFailed.exit_code
LOG_TAIL_BYTES = 1 << 16  # a log may have grown to gigabytes

# what a healthy rank says when a peer has gone
PEER_LOST = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|typically caused by a remote worker crashing|connectFullMesh failed"
    r"|ncclRemoteError|remote process exited|NCCL communicator was aborted|DistNetworkError|DistStoreError"
    r"|Timed out waiting \d+ms|Some NCCL operations have failed or timed out"
    r"|Watchdog caught collective operation timeout"
)
SENT_SIGNALS = {"SIGTERM", "SIGKILL", "SIGINT", "SIGHUP", "SIGUSR1"}  # from outside, whatever the program was doing
TORCH_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # before each line of a traceback once there is a process group
ERROR_START = ("Traceback (most recent call last):", "Fatal Python error: ")


@dataclass(frozen=True)
class Failure:
    """One rank's end, or with rank None that of the launch itself."""

    rank: int | None
    exit_code: int | None  # None when a signal ended it
    signal: str | None  # "SIGKILL"
    message: str
    time: float  # Unix time of the error where the rank noted it, else of its end
    consequence: bool  # of a peer's failure, or of the order to end
    fix: str | None = None  # with a fix it is a mistake the user can mend
    exit_with: int = FAILED_EXIT_CODE  # what the command ends with when this is the root cause
    traceback: str | None = None


def find_failures(run: RunDir, attempt: int, ranks: list[dict[str, Any]]) -> list[Failure]:
    """One for each rank that ended badly, the root cause first. `ranks` as train/elastic.py reports them."""
    failures = [read_failure(run, attempt, each) for each in ranks if each["exit_code"]]
    return sorted(failures, key=blame)


def find_early_exits(run: RunDir, ranks: list[dict[str, Any]]) -> list[Failure]:
    """Ranks of our trainer that ended with 0 by themselves, with work left to do by their marks. Peers then wait for them."""
    found = []
    for each in ranks:
        mark = read_mark(run.progress(each["rank"]))
        if each["exit_code"] != 0 or each["ended_by_us"] or mark is None or mark.phase in ("stopped", "done"):
            continue
        where = "at its start" if mark.phase == "start" else f"after step {mark.step:,}, in {mark.phase}"
        message = f"rank {each['rank']} ended with exit code 0 {where}, before its work was done"
        found.append(Failure(each["rank"], 0, None, message, each["time"], consequence=False))
    return found


def blame(failure: Failure) -> tuple[bool, bool, bool, float]:
    """Sorts the root cause first. A rank that stands blocked with its own error unsaid may be ended last, by us."""
    silent = failure.signal in SENT_SIGNALS and failure.traceback is None
    return failure.consequence, failure.consequence and silent, bool(PEER_LOST.search(failure.message)), failure.time


def read_failure(run: RunDir, attempt: int, ended: dict[str, Any]) -> Failure:
    rank, exit_code = ended["rank"], ended["exit_code"]
    lines = read_log_tail(run.rank_log(attempt, rank))
    error = read_error(run.rank_error(attempt, rank))
    signal_name = signal.Signals(-exit_code).name if exit_code < 0 else None
    traceback = error.get("traceback")
    if not traceback and (ended["ended_by_us"] or signal_name not in SENT_SIGNALS):
        traceback = last_traceback(lines)  # else it is of an error that the program had survived
    said = error.get("message") or (exception_line(traceback) if traceback else None)
    fix = error.get("fix")
    return Failure(
        rank=rank,
        exit_code=exit_code if exit_code > 0 else None,
        signal=signal_name,
        message=said or describe_exit(exit_code, lines),
        time=error.get("time") or ended["time"],
        consequence=bool(PEER_LOST.search(said or "")) or (ended["ended_by_us"] and not error),
        fix=fix,
        exit_with=error.get("exit_code", FAILED_EXIT_CODE),
        traceback=traceback,
    )


def describe_exit(exit_code: int, lines: list[str]) -> str:
    if exit_code == -signal.SIGKILL:
        return "ended by SIGKILL: sent by someone, or by the kernel when memory ran out"
    if exit_code < 0:
        return f"ended by {signal.Signals(-exit_code).name}"
    last = next((line.strip() for line in reversed(lines) if line.strip()), None)
    return f"exit code {exit_code}, " + (f"last line: {last}" if last else "without a word")


def read_error(path: Path) -> dict[str, Any]:
    """As our worker writes it, or as torch's @record does: {"message": {"message", "extraInfo": {...}}}; else empty."""
    try:
        error = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(error["message"], dict):
            extra = error["message"]["extraInfo"]
            return {
                "message": error["message"]["message"],
                "traceback": extra["py_callstack"],
                "time": float(extra["timestamp"]),
            }
        return {
            "message": error["message"] if error.get("fix") else f"{error['type']}: {error['message']}".rstrip(": "),
            "traceback": error.get("traceback"),
            "fix": error.get("fix"),
            "exit_code": int(error.get("exit_code", FAILED_EXIT_CODE)),
            "time": datetime.fromisoformat(error["time"]).timestamp(),
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # none, or one that a kill left half-written: the log tells


def read_log_tail(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [TORCH_PREFIX.sub("", line) for line in text.splitlines()]


def last_traceback(lines: list[str]) -> str | None:
    """From the last start of an error to the end of the log; native frames and warnings after it belong to it."""
    for start in range(len(lines) - 1, -1, -1):
        if lines[start].lstrip().startswith(ERROR_START):
            return "\n".join(lines[start:])
    return None


def exception_line(traceback: str) -> str:
    """'ValueError: boom', the first line under the frames."""
    first, *rest = traceback.strip().splitlines()
    if not first.lstrip().startswith(ERROR_START[0]):
        return first
    return next((line for line in rest if line.strip() and not line.startswith(" ")), first)
