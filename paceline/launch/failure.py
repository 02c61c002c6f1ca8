"""
Why an attempt failed: which rank failed first, what it left behind, and the explanation corrected by what the supervisor observed.

It reads exit codes, `<rank>.error.json` and the end of the rank's log. When one rank dies, its peers lose their connections and
often end before it or together with it, so the first exit code would blame the wrong rank. A log does not show who killed a rank:
the kernel because the host ran out of memory (its counter of such kills has grown), the supervisor because the rank hung (event
`hang`), or somebody else.
"""

import errno
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from paceline.errors import TrainingFailed
from paceline.explain.catalogue import load_catalogue
from paceline.explain.collectives import flight_recorder_logs, hang_fix
from paceline.explain.explanation import HEALTHY, KERNEL_LOG, UNKNOWN, Explanation, name_host
from paceline.explain.lines import strip_escapes
from paceline.explain.log import Log
from paceline.explain.matches import PEER_DIED
from paceline.explain.recorded_end import (
    DISK_FULL,
    EVEN_BATCHES,
    HANG,
    HOST_MEMORY,
    KILLED,
    WORKER_KILLED,
    RankError,
    explain_full_disk,
    find_last,
    next_command,
    read_error_file,
)
from paceline.heartbeat import END_PHASES, read_heartbeat
from paceline.launch.log_tail import ERROR_START, PEER_LOST, exception_line, read_log_tail
from paceline.launch.policy import TRAINER_CRASHES, AttemptEnd, Retry
from paceline.launch.ssh import disk_fix
from paceline.launch.stacks import STATES, Frame, call_site, main_frames
from paceline.plan.host import memory_limit, physical_memory_bytes
from paceline.redaction import redact_text
from paceline.rundir import RunDir, read_json_lines
from paceline.units import exit_signal, format_bytes

FAILED_EXIT_CODE = TrainingFailed.exit_code

OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|MemoryError|out of memory|allocate memory|not enough memory|bad_alloc|ALLOC_FAILED",
    re.IGNORECASE,
)
# oneDNN's only message when memory runs out
NO_PRIMITIVE = re.compile(r"could not (create|execute) a primitive( descriptor)?")
# sent from outside, whatever the program was doing
OUTSIDE_SIGNALS = {"SIGTERM", "SIGKILL", "SIGINT", "SIGHUP", "SIGUSR1"}

# causes that no log shows
REFUSED = "refused"  # the rank itself reported what is wrong and how to fix it
HOST_LOST = "host-lost"
LINK_LOST = "link-lost"  # the host answers again
# as `check` calls them: the ranks of other hosts do not reach those of a host, although ssh does
BLOCKED = ("hosts-unconnected", "hosts-path-mtu")
OF_HOSTS = (HOST_LOST, LINK_LOST, *BLOCKED)
EXITED = "exited-early"  # with exit code 0, which no log tells from success
SCRIPT_EXIT = "exit code 0 while other ranks still exchanged data with it"
FULL_DISK = os.strerror(errno.ENOSPC)  # in what another host reports

REJOINS = "; it joins the run again when it "  # in the fix of a lost host, while the run goes on

BUS_ERROR, PORT_IN_USE = "sigbus", "port-in-use"
FRAME = re.compile(r'^ +File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
ADDRESS = re.compile(r"(?::|\bport[ =:]{1,2})(\d{2,5})\b|, (\d{2,5})\)", re.IGNORECASE)
MAX_COMMAND = 80  # characters

COPY = re.compile(r"[^\s'`]*/paceline/runs/[0-9a-f]{12}/[^\s'`/]+")  # as launch/member.py names it

NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")  # pids, addresses and sizes differ where the error is the same


@dataclass(frozen=True)
class Failure:
    """How one rank failed, or with rank None the launch itself."""

    rank: int | None
    exit_code: int | None  # None when a signal ended it
    signal: str | None  # "SIGKILL"
    message: str
    time: float  # Unix time of the error where the rank recorded it, otherwise of the rank's end
    consequence: bool  # of a peer's failure, or of the order to stop
    fix: str | None = None  # set where it is a mistake that the user can fix
    exit_with: int = FAILED_EXIT_CODE  # the command's exit code when this is the root cause
    traceback: str | None = None
    host: str | None = None  # where there are several
    cause: str | None = None  # of OF_HOSTS, where the host failed and not a rank; HANG

    @property
    def subject(self) -> str:
        """'rank 3', 'rank 3 on bob', 'host bob', 'all ranks', or 'launch' for a failure of the launch itself."""
        if self.rank is None:
            return f"host {self.host}" if self.host and self.cause else "all ranks" if self.cause == HANG else "launch"
        return f"rank {self.rank}" + (f" on {self.host}" if self.host else "")


def find_failures(run: RunDir, attempt: int, ranks: list[dict[str, Any]]) -> list[Failure]:
    """Returns a failure for each rank that did not exit with 0, the root cause first. ranks: as launch/elastic.py reports them."""
    failures = [read_failure(run, attempt, rank) for rank in ranks if rank["exit_code"]]
    return sorted(failures, key=blame_order)


def find_early_exits(run: RunDir, ranks: list[dict[str, Any]]) -> list[Failure]:
    """Returns the trainer's ranks that exited with 0 although their heartbeats show work left; their peers wait for them."""
    failures = []
    for end in ranks:
        heartbeat = read_heartbeat(run.progress(end["rank"]))
        if end["exit_code"] != 0 or end["ended_by_us"] or heartbeat is None or heartbeat.phase in END_PHASES:
            continue
        place = "at its start" if heartbeat.phase == "start" else f"after step {heartbeat.step:,}, in {heartbeat.phase}"
        message = f"exit code 0 {place}, before its work was done"
        seconds = end["time"] - end.get("clock_s", 0.0)
        failures.append(Failure(end["rank"], 0, None, message, seconds, consequence=False, host=end.get("host")))
    return failures


def find_script_exits(ranks: list[dict[str, Any]], failures: Sequence[Failure]) -> list[Failure]:
    """Returns a script's ranks that exited with 0, where all that the others report is that they lost a peer."""
    if not failures or not all(failure.consequence for failure in failures):
        return []
    return [
        Failure(end["rank"], 0, None, SCRIPT_EXIT, end["time"], consequence=False, host=end.get("host"))
        for end in ranks
        if end["exit_code"] == 0 and not end["ended_by_us"]
    ]


def blame_order(failure: Failure) -> tuple[bool, bool, bool, float]:
    """Sorts the root cause first. A rank that blocks before it can print its own error may be the last to end, killed by us."""
    silent = failure.signal in OUTSIDE_SIGNALS and failure.traceback is None
    return failure.consequence, failure.consequence and silent, bool(PEER_LOST.search(failure.message)), failure.time


def read_failure(run: RunDir, attempt: int, end: dict[str, Any]) -> Failure:
    """Returns how a rank failed, from its exit code, its error file and its log. end: as launch/elastic.py reports it."""
    rank, exit_code = end["rank"], end["exit_code"]
    lines = read_log_tail(run.rank_log(attempt, rank))
    error = read_error_file(run.rank_error(attempt, rank))
    end_signal = exit_signal(exit_code, is_shell=end["is_shell"])
    traceback = (error and error.traceback) or None
    # otherwise it had survived that error
    if not traceback and (end["ended_by_us"] or end_signal not in OUTSIDE_SIGNALS):
        start = next((i for i in reversed(range(len(lines))) if ERROR_START.match(lines[i])), None)
        # native frames and warnings after an error belong to it
        traceback = None if start is None else "\n".join(lines[start:])
    message = (error.message if error.fix else error.text.rstrip(": ")) if error else None
    message = message or (exception_line(traceback) if traceback else None)
    consequence = bool(PEER_LOST.search(message or "")) or (end["ended_by_us"] and not error)
    if not message and end_signal:
        sender = "sent by somebody, or by the kernel when memory ran out"
        if end["ended_by_us"]:
            sender = "sent by the launcher, as it had not ended in time after SIGTERM"
        message = f"ended by {end_signal}" + (f": {sender}" if end_signal == "SIGKILL" else "")
    elif not message:
        last = next((line.strip() for line in reversed(lines) if line.strip()), None)
        message = f"exit code {exit_code}, " + (f"last line: {last}" if last else "no output")
    return Failure(
        rank=rank,
        exit_code=None if end_signal else exit_code,
        signal=end_signal,
        message=message,
        # the rank's host may have another time than this one
        time=((error and error.time) or end["time"]) - end.get("clock_s", 0.0),
        consequence=consequence,
        # another host knows the run by its copy
        fix=COPY.sub(lambda copy: str(run.path), error.fix) if error and error.fix else None,
        exit_with=error.exit_code if error and error.exit_code is not None else FAILED_EXIT_CODE,
        traceback=traceback,
        host=end.get("host"),
    )


def explain_end(
    run: RunDir,
    attempt: int,
    root: Failure,
    explanation: Explanation,
    *,
    memory_ran_out: bool | None,
    free_bytes: Mapping[str, int] = {},
) -> tuple[AttemptEnd, Explanation]:
    """Returns the attempt's outcome for the policy, and the explanation corrected by what the supervisor observed.

    memory_ran_out: the kernel killed a process of this run because the host ran out of memory; None where that is unknown.
    free_bytes: on the disks of other hosts.
    """
    all_events = list(read_json_lines(run.events))
    events = [event for event in all_events if event.get("attempt") in (None, attempt)]
    hang = find_last(events, "hang")
    explanation = replace(explanation, host=root.host or explanation.host)
    explanation = correct_cause(explanation, root, run, attempt, events, hang=hang, memory_ran_out=memory_ran_out)
    if explanation.cause in (UNKNOWN, HEALTHY):
        explanation = explain_full_disk(explanation, run, events, free_bytes.get(root.host or ""), host=root.host)
    if explanation.cause == HEALTHY:  # its logs show no failure, and it failed
        fix = f"read the end of its log: {run.rank_log(attempt, root.rank or 0)}"
        summary = f"{root.subject}: {root.message}"
        explanation = replace(explanation, cause=UNKNOWN, rank=root.rank, summary=summary, fix=fix, confidence=0.0)
    error = None if root.rank is None else read_error_file(run.rank_error(attempt, root.rank))
    error = error or RankError(root.message)
    explanation = replace(explanation, cause=error.cause or explanation.cause)
    if root.fix is not None and explanation.cause in TRAINER_CRASHES:
        explanation = replace(explanation, cause=REFUSED, summary=root.message, fix=root.fix, confidence=1.0)
    explanation = name_host(explanation, find_last(events, "attempt").get("hosts") or {})
    milestones = [event["event"] for event in all_events if event.get("event") in ("attempt", "checkpoint")]
    end = AttemptEnd(
        cause=explanation.cause,
        retry=retry_class(explanation, root, rollback=error.rollback),
        rank=root.rank if explanation.rank is None else explanation.rank,
        step=explanation.step if error.step is None else error.step,
        new_checkpoint=milestones[-1:] == ["checkpoint"],
        error=comparable_error(explanation, root, hang),
        rolled_back=error.rollback,
    )
    return end, explanation


def correct_cause(
    explanation: Explanation,
    root: Failure,
    run: RunDir,
    attempt: int,
    events: Sequence[Mapping[str, Any]],
    *,
    hang: Mapping[str, Any],
    memory_ran_out: bool | None,
) -> Explanation:
    """Returns the explanation with the cause that the supervisor observed, where it knows more than the logs. hang: its event."""
    lost_worker = explanation.cause == WORKER_KILLED and "Killed" in explanation.summary  # of a data loader
    if root.cause in OF_HOSTS:
        return explain_host(explanation, root)
    if root.exit_code == 0:
        log = run.rank_log(attempt, root.rank or 0)
        fix = f"read the end of {log}: usually the script or a library called exit, or SIGTERM came before step 1"
        fix = f"{EVEN_BATCHES}; else {fix}" if root.message == SCRIPT_EXIT else fix
        summary = f"rank {root.rank} ended with {root.message}"
        return replace(explanation, cause=EXITED, rank=root.rank, summary=summary, fix=fix, confidence=1.0)
    if hang:
        return explain_hang(explanation, hang, run, recorder_logs=flight_recorder_logs(run, attempt, events))
    if was_killed(root) or (memory_ran_out and lost_worker):
        return explain_kill(explanation, root, run, memory_ran_out=memory_ran_out)
    if explanation.cause == PORT_IN_USE and (place := own_port(root)):
        return explain_port(explanation, root, place)
    if explanation.cause == BUS_ERROR and root.traceback:
        return explain_bus_error(explanation, root.traceback)
    return explanation


def comparable_error(explanation: Explanation, root: Failure, hang: Mapping[str, Any]) -> str:
    """Returns what a repetition would have in common: the program's own message, or where it hung; empty where it had none."""
    if explanation.cause == HANG:
        return "; ".join(hang.get("places", ()))
    is_outside = root.signal in OUTSIDE_SIGNALS and root.traceback is None
    if is_outside or root.consequence or explanation.cause in (KILLED, *OF_HOSTS):
        return ""
    return NUMBERS.sub("N", "".join(root.message.splitlines()[:1]))


def retry_class(explanation: Explanation, root: Failure, *, rollback: bool) -> Retry:
    """Returns whether a retry can help. rollback: the rank to blame asks for one."""
    is_own_port = explanation.cause == PORT_IN_USE and own_port(root)
    if root.message == SCRIPT_EXIT or (is_own_port and is_port_of_peer(root)):
        return "never"  # the same batches end it at the same step; the ranks open the same port
    if explanation.cause in (KILLED, HANG, EXITED, *OF_HOSTS) or rollback or is_own_port:
        return "same"
    if OUT_OF_MEMORY.search(root.message) or NO_PRIMITIVE.search(root.message):
        return "smaller"
    if root.fix is not None:
        return "never"  # the rank reported a mistake and its fix
    cause = load_catalogue().causes.get(explanation.cause)
    text = "\n".join(item.text for item in explanation.evidence)
    return "never" if cause is None else cause.choose_retry(text)  # type: ignore[return-value]  # test_policy.py compares the sets


def explain_hang(
    explanation: Explanation, hang: Mapping[str, Any], run: RunDir, *, recorder_logs: Sequence[Log]
) -> Explanation:
    """Explains a hang. recorder_logs: what the flight recorders show of the rank that is late."""
    # launch.log shows how the supervisor ended the rank
    names = [Path(item.source or "").name for item in explanation.evidence]
    is_kill = bool(names) and all(name.startswith("launch") for name in names)
    is_own = explanation.cause in load_catalogue().causes and explanation.rank in (None, hang["rank"])
    if hang.get("error") and is_own and not is_kill:
        alive = f"its process did not end: see the threads in {run.hang(hang['attempt'])}/{hang['rank']}.txt"
        return replace(explanation, rank=hang["rank"], summary=f"{explanation.summary}; {alive}")
    late_rank = recorder_logs[0].records[0].rank if recorder_logs else None
    rank = late_rank if hang.get("rank") is None else hang["rank"]
    subject = "a rank" if rank is None else f"rank {rank}"
    summary = hang.get("text") or f"{subject} made no step for {hang.get('silent_s', 0):.0f} s"
    fix = f"{hang_fix(run, hang)}; --hang-after SECONDS allows a longer silence"
    if STATES["T"] in summary:
        fix = f"find what stopped the process: SIGSTOP, Ctrl-Z, a debugger or a frozen container; {fix}"
    step = explanation.step if hang.get("step") is None else hang["step"]  # a script's ranks report none
    return replace(explanation, cause=HANG, rank=rank, step=step, summary=summary, fix=fix, confidence=1.0)


def explain_bus_error(explanation: Explanation, stack: str) -> Explanation:
    """Adds to a SIGBUS where the rank used the memory; where the stack shows a mapped file, the fix for that."""
    place = call_site(main_frames(stack))
    summary = f"{explanation.summary}, used in {place}" if place else explanation.summary
    fix, _ = load_catalogue().causes[BUS_ERROR].choose_fix(stack)
    return replace(explanation, summary=summary, fix=fix)


def explain_port(explanation: Explanation, root: Failure, place: str) -> Explanation:
    """Explains a port in use that no other attempt would change. place: of the script, where it opens the port."""
    summary = f"{explanation.summary}, which the script itself opens ({place})"
    fix = f"change the port in the script ({place}), or end the process that listens on it: `ss -ltnp` shows it"
    if is_port_of_peer(root):
        fix = f"open it on rank 0 alone, or give each rank a port of its own, such as the port + LOCAL_RANK; else {fix}"
        return replace(explanation, summary=f"{summary}: most likely another rank did so first", fix=fix)
    holder = port_holder(root.traceback or "") if root.host is None else None
    held = f"; {holder} holds it" if holder else ""
    return replace(explanation, summary=f"{summary}: paceline cannot change it{held}", fix=fix)


def is_port_of_peer(root: Failure) -> bool:
    """Whether another rank has opened the same port: rank 0 did not fail, and nobody here listens now where the error shows."""
    return bool(root.rank) and root.host is None and find_listeners(root.traceback or "") == set()


def own_port(root: Failure) -> str | None:
    """Returns where the script opens a port: 'serve at code/train.py:4'; None where torch opens MASTER_PORT, or it is unknown."""
    frames = [Frame(name, file, int(line)) for file, line, name in reversed(FRAME.findall(root.traceback or ""))]
    return None if any("/torch/distributed/" in frame.file for frame in frames) else call_site(frames)


def port_holder(traceback: str) -> str | None:
    """Returns 'process 4711 (python serve.py)', which listens on a port that the traceback shows; None if none or several do."""
    with suppress(psutil.Error):  # it has just ended
        match list(find_listeners(traceback) or ()):
            case [int(pid)]:
                command = " ".join(strip_escapes(shlex.join(psutil.Process(pid).cmdline())).split())
                return f"process {pid} ({redact_text(command)[:MAX_COMMAND]})"
    return None


def find_listeners(traceback: str) -> set[int | None] | None:
    """Returns who listens on a port that the traceback shows, None for another user's process; None if it shows no port."""
    ports = {first or second for first, second in ADDRESS.findall(FRAME.sub("", traceback))}
    with suppress(psutil.Error, OSError):
        connections = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        return {c.pid for c in connections if str(c.laddr.port) in ports} if ports else None
    return None


def explain_host(explanation: Explanation, root: Failure) -> Explanation:
    """Explains the loss of a host, of the connection to one that answers again, or of the way between its ranks and others."""
    cause, summary = root.cause or HOST_LOST, f"{root.subject}: {root.message}"
    fix = f"see that {root.host} is on and in the network: ssh {root.host} true{REJOINS}answers"
    if cause == LINK_LOST:
        summary = f"{summary}; it answers again"
        fix = f"if it happens often: see who ends ssh sessions on {root.host} (journalctl -u ssh), and whether this machine sleeps"
    elif FULL_DISK in root.message:
        cause = DISK_FULL
        fix = f"make room there: {disk_fix(root.host or '', root.message)}{REJOINS}has some"
    return replace(explanation, cause=cause, rank=None, summary=summary, fix=root.fix or fix, confidence=1.0)


def was_killed(root: Failure) -> bool:
    """Whether SIGKILL ended the rank itself, before anything else failed."""
    return root.signal == "SIGKILL" and root.traceback is None and not root.consequence


def explain_kill(explanation: Explanation, root: Failure, run: RunDir, *, memory_ran_out: bool | None) -> Explanation:
    """Explains a rank that SIGKILL ended: the kernel killed it for memory, or somebody outside the run did."""
    subject = "the launch agent" if root.rank is None else f"rank {root.rank}"
    subject += f" on {root.host}" if root.host else ""
    subject = subject if was_killed(root) else f"a data loader worker of {subject}"
    if memory_ran_out or any((evidence.source or "").startswith(KERNEL_LOG) for evidence in explanation.evidence):
        host_bytes, group = physical_memory_bytes(), memory_limit()
        limit = f"this host has {format_bytes(host_bytes)}"
        if group is not None and group.limit_bytes < host_bytes:
            limit = f"its cgroup may use {format_bytes(group.limit_bytes)}"
        summary = f"the kernel killed {subject}: {limit} of memory, and none was left"
        if explanation.cause == HOST_MEMORY:
            summary = explanation.summary  # from the kernel's own log
        return replace(explanation, cause=HOST_MEMORY, rank=root.rank, summary=summary, confidence=1.0)
    if explanation.cause not in (HOST_MEMORY, KILLED, UNKNOWN, PEER_DIED):
        return explanation
    summary = f"{subject} was killed by SIGKILL from outside the run"
    memory = "memory did not run out. " if memory_ran_out is False else ""
    fix = f"{memory}A batch system's limit, the end of a container or a person sends this signal; {next_command(run)}"
    return replace(explanation, cause=KILLED, rank=root.rank, summary=summary, fix=fix, confidence=0.8)
