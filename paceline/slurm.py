"""
What Slurm says: the job that this process runs in, and any job or partition, by Slurm's own commands.

Reading is pure and apart from asking: tests/launch/test_slurm.py reads recorded output. Times are Unix seconds, limits seconds.
Commands and their output: Slurm 22.05, man scontrol, sinfo, squeue, sbatch.
"""

import math
import os
import re
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.units import format_duration, format_list, format_number_of

FRESH_S, FIRST_S = 5.0, 1.0
ANSWER_S = 20.0  # slurmctld may be busy; the commands themselves retry for about as long
SHELL_STEPS = ("", "4294967290")  # no step, or the one that salloc's shell runs in (slurm.h: SLURM_INTERACTIVE_STEP)
NODE_WORD = re.compile(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*|(?:\[[^\]]*\][^,\[]*)+")
FIELD = re.compile(r"(?:^|\s)([A-Z][\w/:&]*)=(.*?)(?=\s+[A-Z][\w/:&]*=|\s*$)", re.DOTALL)
GPUS = re.compile(r"\bgpu(?::(?P<kind>[A-Za-z][^:(,\s]*))?:(?P<count>\d+)")
# of a job that runs and waits no more; man squeue, JOB STATE CODES
ENDED = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT",
)  # fmt: skip
UNKNOWN_JOB = "Invalid job id"
# 13_3 for the task of an array that starts last: its number, 13, means the whole array to every command of Slurm
JobId = int | str
# of a node that takes no new job until somebody does something about it; man sinfo, NODE STATE CODES
UNUSABLE = (
    "down", "drained", "draining", "drng", "fail", "failing", "futr", "future", "inval", "maint", "unk", "unknown",
)  # fmt: skip


@dataclass(frozen=True)
class Allocation:
    """The nodes that a job of Slurm gives this process, which is its batch script, its shell, or the only task of a step."""

    job_id: JobId
    nodes: tuple[str, ...]
    node: str | None  # where this process runs; None: on none of them, as salloc's shell may
    restarts: int  # how often Slurm has requeued the job


@dataclass(frozen=True)
class SlurmJob:
    """One job as scontrol shows it."""

    job_id: JobId
    state: str
    reason: str | None = None  # why it waits or has ended
    can_requeue: bool = False
    is_batch: bool = False
    restarts: int = 0
    is_preempted: bool = False  # it was told to end for another job
    start: float | None = None  # or when it is expected
    end: float | None = None  # of its limit, or when it ended
    limit_s: float = math.inf
    nodes: str = ""
    exit_code: str | None = None
    task: str | None = None  # 4_2: the second task of the array 4, as squeue and scancel call it

    @property
    def is_over(self) -> bool:
        return self.state in ENDED

    @property
    def text(self) -> str:
        """Returns the state as squeue shows it: PENDING (Priority)."""
        return self.state if self.reason is None or self.state == "RUNNING" else f"{self.state} ({self.reason})"


@dataclass(frozen=True)
class Partition:
    """One partition. gpus: on each of its nodes, the fewest; None where it has none."""

    name: str
    state: str
    is_default: bool
    num_nodes: int
    max_nodes: float
    max_s: float
    default_s: float | None
    gpus: int | None = None
    gpu_kind: str | None = None  # as the site calls them: a100, rtx4090
    accounts: tuple[str, ...] = ()  # it is for these alone; none: for all
    num_down: int = 0  # of its nodes, those that are down or drained, or do not answer

    @property
    def num_up(self) -> int:
        return self.num_nodes - self.num_down


def allocation(env: Mapping[str, str] | None = None) -> Allocation | None:
    """Returns the allocation of this process; None outside of Slurm, and for one of several tasks, which others have started."""
    env = os.environ if env is None else env
    if not env.get("SLURM_JOB_ID", "").isdigit():
        return None
    nodes = env.get("SLURM_JOB_NODELIST", "")
    if env.get("SLURM_STEP_ID", "") not in SHELL_STEPS:
        if env.get("SLURM_STEP_NUM_TASKS") != "1":
            return None
        nodes = env.get("SLURM_STEP_NODELIST", nodes)
    names = expand_nodes(nodes)
    node = env.get("SLURMD_NODENAME")
    restarts = int(env.get("SLURM_RESTART_COUNT", "0") or 0)
    job_id = name_job(env["SLURM_JOB_ID"], env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID"))
    return Allocation(job_id, names, node if node in names else None, restarts) if names else None


def name_job(number: str, array: str | None, task: str | None) -> JobId:
    """Returns what names one job alone. A job that a task of an array has submitted may have the variables of that array."""
    return f"{array}_{task}" if number == array and task is not None and task.isdigit() else int(number)


def parse_job_id(value: object) -> JobId | None:
    """Returns the job of slurm.json; None where the file is broken."""
    if isinstance(value, str):
        return value if re.fullmatch(r"\d+_\d+", value) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def expand_nodes(text: str) -> tuple[str, ...]:
    """Returns n1, n2, n4, m01 for n[1-2,4],m01; several ranges in one name multiply."""
    names: list[str] = []
    for word in NODE_WORD.findall(text):
        parts = re.split(r"\[([^\]]*)\]", word)
        choices = [numbers_of(part) if index % 2 else [part] for index, part in enumerate(parts)]
        names += ["".join(chosen) for chosen in product(*choices)]
    return tuple(names)


def numbers_of(text: str) -> list[str]:
    """Returns 01, 02, 07 for 01-02,07."""
    numbers: list[str] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high or low) + 1)]
    return numbers


def format_nodes(nodes: Sequence[str]) -> str:
    """Returns `n1`, `n1 and n2` or `n1 to n4`."""
    return f"{nodes[0]} to {nodes[-1]}" if len(nodes) > 2 else format_list(nodes)


def format_allocation(place: Allocation, job: SlurmJob | None) -> str:
    """Returns the line that says where a run was found to be: job, nodes and the end of its time."""
    nodes = f"{format_number_of(len(place.nodes), 'node')}: {format_nodes(place.nodes)}"
    until = "" if job is None or job.end is None or job.limit_s == math.inf else f", until {format_clock(job.end)}"
    restarts = f", requeued {format_number_of(place.restarts, 'time')}" if place.restarts else ""
    return f"slurm   job {place.job_id}, {nodes}{until}{restarts}"


def format_clock(unix: float, *, now: float | None = None) -> str:
    """Returns the local time of day, with the date where it is not today: what the clock on the wall shows."""
    moment, today = time.localtime(unix), time.localtime(now)
    return time.strftime("%H:%M" if moment[:3] == today[:3] else "%Y-%m-%d %H:%M", moment)


def parse_limit(text: str) -> float:
    """Returns the seconds of a time limit: 90, 90:00, 8:00:00, 1-12, 2-12:30, UNLIMITED. Raises ValueError."""
    if text.upper() in ("UNLIMITED", "INFINITE", "PARTITION_LIMIT"):
        return math.inf
    days, dash, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if len(parts) > 3 or min(parts) < 0:
        raise ValueError(text)
    if dash:  # days-hours:minutes:seconds
        hours, minutes, seconds = [*parts, 0, 0][:3]
        return float(86_400 * int(days) + 3600 * hours + 60 * minutes + seconds)
    hours, minutes, seconds = {1: (0, *parts, 0), 2: (0, *parts), 3: tuple(parts)}[len(parts)]
    return float(3600 * hours + 60 * minutes + seconds)


def read_record(text: str) -> dict[str, str]:
    """Returns the fields of one record of `scontrol show --oneliner`; a value may have spaces."""
    fields: dict[str, str] = {}
    for name, value in FIELD.findall(text):
        fields.setdefault(name, value)
    return fields


def parse_job(text: str) -> SlurmJob:
    """Returns the job of `scontrol show job --oneliner`."""
    fields = read_record(text)
    reason = fields.get("Reason")
    return SlurmJob(
        name_job(fields["JobId"], fields.get("ArrayJobId"), fields.get("ArrayTaskId")),
        fields["JobState"],
        reason if reason not in (None, "", "None") else None,
        can_requeue=fields.get("Requeue") == "1",
        is_batch=fields.get("BatchFlag") == "1",
        restarts=int(fields.get("Restarts", 0)),
        is_preempted=parse_clock(fields.get("PreemptTime")) is not None,
        start=parse_clock(fields.get("StartTime")),
        end=parse_clock(fields.get("EndTime")),
        limit_s=parse_limit(fields.get("TimeLimit", "UNLIMITED")),
        nodes=fields.get("NodeList", "").replace("(null)", ""),
        exit_code=fields.get("ExitCode"),
        task=f"{fields.get('ArrayJobId')}_{fields['ArrayTaskId']}" if fields.get("ArrayTaskId", "").isdigit() else None,
    )


def parse_clock(text: str | None) -> float | None:
    """Returns the Unix time of 2026-11-23T18:00:00, which is local; None for Unknown, None and N/A."""
    with suppress(ValueError, TypeError):
        return time.mktime(time.strptime(str(text), "%Y-%m-%dT%H:%M:%S"))
    return None


def parse_partition(text: str, nodes: str) -> Partition:
    """Returns the partition of `scontrol show partition --oneliner`.

    nodes: a line for each kind of its nodes, as sinfo shows them: how many, their state, their GPUs.
    """
    fields = read_record(text)
    kinds = [match for line in nodes.splitlines() if (match := GPUS.search(line))]
    states = [line.split()[:2] for line in nodes.splitlines() if line.strip()]
    default = fields.get("DefaultTime", "NONE")
    return Partition(
        fields["PartitionName"],
        fields.get("State", "UP"),
        fields.get("Default") == "YES",
        int(fields.get("TotalNodes", 0)),
        max_nodes=math.inf if not (most := fields.get("MaxNodes", "")).isdigit() else int(most),
        max_s=parse_limit(fields.get("MaxTime", "UNLIMITED")),
        default_s=None if default in ("NONE", "") else parse_limit(default),
        gpus=min((int(match["count"]) for match in kinds), default=None),
        gpu_kind=next((match["kind"] for match in kinds if match["kind"]), None),
        accounts=() if (names := fields.get("AllowAccounts", "ALL")) == "ALL" else tuple(names.split(",")),
        num_down=sum(int(count) for count, state in states if is_unusable(state)),
    )


def is_unusable(state: str) -> bool:
    """Returns whether a node takes no job. state: of sinfo, with a mark behind it: down*, idle~ (sleeps), mixed# (wakes up)."""
    return state.endswith("*") or state.lower().rstrip("~#!%$@^-+") in UNUSABLE


class SlurmError(PacelineError):
    """A command of Slurm has refused."""


def is_installed() -> bool:
    return shutil.which("scontrol") is not None


def ask(*command: str, timeout_s: float = ANSWER_S) -> str:
    """Returns what a command of Slurm prints; raises SlurmError with its own words where it fails."""
    env = {**os.environ, "SLURM_TIME_FORMAT": "standard", "LC_ALL": "C.UTF-8"}
    shown = shlex.join(command)
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=env,
            check=False,
            errors="replace",
        )
    except FileNotFoundError as error:
        fix = "run it where Slurm is installed, on a login node"
        raise SlurmError(f"{command[0]} is not here", fix=fix) from error
    except subprocess.TimeoutExpired as error:
        raise SlurmError(f"Slurm did not answer `{shown}` in {timeout_s:.0f} s", fix="scontrol ping") from error
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        words = "; ".join(dict.fromkeys(re.sub(r"^\w+: (?:error|fatal): ", "", line) for line in lines[-3:]))
        fix = "run it on a login node, or set SLURM_CONF" if "configuration source" in words else shown
        raise SlurmError(f"Slurm: {words or f'exit code {done.returncode}'}", fix=fix)
    return done.stdout


def submit_script(script: Path) -> int:
    """Gives a batch script to sbatch and returns the number of the job.

    Raises SlurmError where Slurm refuses it, and PacelineError where Slurm has taken it and does not say the number.
    """
    words = ask("sbatch", "--parsable", str(script)).split()  # a site may print a banner first
    number = words[-1].partition(";")[0] if words else ""
    if not number.isdecimal():
        text = f"sbatch printed {' '.join(words) or 'nothing'}, and no number of a job, which may be in the queue"
        raise PacelineError(text, fix="squeue --me lists your jobs; `scancel NUMBER` ends one that is not to run")
    return int(number)


def read_job(job_id: JobId, *, timeout_s: float = ANSWER_S) -> SlurmJob | None:
    """Returns a job; None where Slurm does not know it any more."""
    try:
        return parse_job(ask("scontrol", "show", "job", "--oneliner", str(job_id), timeout_s=timeout_s))
    except SlurmError as error:
        if UNKNOWN_JOB in error.message:
            return None
        raise


class JobReader:
    """Asks for one job in the background, at most every FRESH_S: a view never waits for Slurm longer than FIRST_S."""

    def __init__(self) -> None:
        self.job: SlurmJob | None = None
        self._thread: threading.Thread | None = None
        self._asked_at = -math.inf

    def read(self, job_id: JobId | None) -> SlurmJob | None:
        """Returns the job as it was some seconds ago; None where Slurm or the job is not known here."""
        if job_id is None or not is_installed():
            return None
        is_busy = self._thread is not None and self._thread.is_alive()
        if not is_busy and time.monotonic() - self._asked_at > FRESH_S:
            is_first, self._asked_at = self._thread is None, time.monotonic()
            self._thread = threading.Thread(target=self._ask, args=(job_id,), daemon=True)
            self._thread.start()
            if is_first:
                self._thread.join(FIRST_S)
        return self.job

    def _ask(self, job_id: JobId) -> None:
        with suppress(PacelineError):  # Slurm is busy, or restarts
            self.job = read_job(job_id)


def format_job(job: SlurmJob | None, *, now: float | None = None) -> str | None:
    """Returns a job as a view shows it: its state, why it waits and until when, or how much of its time is left."""
    if job is None:
        return None
    now = time.time() if now is None else now
    text = f"job {job.task or job.job_id} {job.text}"
    if job.state == "PENDING":
        return text + (
            f", expected to start at {format_clock(job.start, now=now)}" if job.start and job.start > now else ""
        )
    text += f" on {job.nodes}" if job.nodes and not job.is_over else ""
    if job.state == "RUNNING" and job.end is not None and job.limit_s < math.inf:
        text += f", {format_duration(max(0.0, job.end - now))} of {format_duration(job.limit_s)} left"
    return text


def read_partitions(*, timeout_s: float = ANSWER_S) -> list[Partition]:
    """Returns all partitions that this user may see. timeout_s: of each of two questions."""
    nodes: dict[str, list[str]] = {}  # of each partition, a line for each kind of its nodes
    for line in ask("sinfo", "--noheader", "--format=%R %D %T %G", timeout_s=timeout_s).splitlines():
        name, _, text = line.partition(" ")
        nodes.setdefault(name, []).append(text)
    shown = ask("scontrol", "show", "partition", "--oneliner", timeout_s=timeout_s)
    records = [line for line in shown.splitlines() if line.strip()]
    return [
        parse_partition(record, "\n".join(nodes.get(read_record(record)["PartitionName"], ()))) for record in records
    ]


def unstarted_job(events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Returns how the run's last job of Slurm ended, where that was before it began an attempt."""
    last = next((event for event in reversed(events) if event.get("event") in ("attempt", "slurm_job")), None)
    return last if last and last["event"] == "slurm_job" and "attempt" not in last else None
