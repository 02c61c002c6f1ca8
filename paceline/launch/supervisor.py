"""
One attempt of a run, from the start of its processes to its outcome. No torch: it never touches a tensor.

It talks with the agent of each host (launch/agent.py), which owns the engine and the workers (launch/cluster.py). Ctrl-C reaches
only this process, which then asks the agents to stop. Everything that the attempt does is written to events.jsonl.
"""

import math
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from paceline.errors import INTERRUPTED
from paceline.explain.explanation import MAX_VICTIMS, Explanation
from paceline.explain.recorded_end import HANG
from paceline.heartbeat import read_heartbeat
from paceline.launch.agent import kill_processes
from paceline.launch.cluster import Cluster
from paceline.launch.failure import Failure, find_early_exits, find_failures, find_script_exits
from paceline.launch.log_tail import read_log_tail
from paceline.launch.losses import agent_failure, find_blocked, host_failure, mark_unreachable, settle_losses
from paceline.launch.member import Member
from paceline.launch.stop_signals import STOP_NOW, StopSignals, catch_signals, is_stop_requested
from paceline.launch.watchdog import Hang, Watchdog
from paceline.redaction import redact_text
from paceline.rundir import RunDir, append_event
from paceline.slurm import allocation
from paceline.units import format_ranks, signal_name, signal_number

TICK_S = 0.2
# after a rank has exited too early: its peers may save and report it, but a peer that waits for it to join would wait forever
EARLY_EXIT_GRACE_S = 3.0
# of the peers of a failed rank between SIGTERM and SIGKILL: in a collective they never return; a script has as long as in torchrun
PEER_GRACE_S, SCRIPT_PEER_GRACE_S = 3.0, 30.0
AGENT_MARGIN_S = 12.0  # within this the agent kills what does not end by itself, and then exits

# regrouped: saved and ended so that the next attempt has more hosts
State = Literal["finished", "failed", "interrupted", "regrouped"]


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended."""

    state: State
    exit_code: int
    attempt: int
    failures: list[Failure]  # the root cause first
    joined: bool | None = None  # False: every rank succeeded, and none had joined a process group
    hang: Hang | None = None
    explanation: Explanation | None = None  # of a failure, once launch/attempts.py has it
    between_attempts: bool = False  # the user stopped the run before the next attempt began
    free_bytes: Mapping[str, int] = field(default_factory=dict)  # on the disks of other hosts
    message: str | None = None  # of a stop that cut ranks off


def run_attempt(
    run: RunDir,
    *,
    command: list[str],
    nproc: int,
    env: Mapping[str, str],
    attempt: int = 1,
    lock_fd: int | None = None,
    on_tick: Callable[[], None] = lambda: None,
    on_move: Callable[[RunDir], None] = lambda run: None,
    signals: StopSignals | None = None,
    hang_after_s: float | None = None,
    stop_grace_s: float = 60.0,
    libuv: bool = True,
    cwd: Path | None = None,
    script: bool = False,
    health_every_s: float = 0.0,
    cluster: Cluster | None = None,
    settings: Mapping[str, str] | None = None,
) -> Outcome:
    """Starts `nproc` workers and returns when they have ended. Call it from the main thread, as it handles signals.

    signals: earlier ones count as well. on_tick is called several times a second, on_move where the run
    folder was renamed, with its new place. A rank that the watchdog reports is killed.
    lock_fd: the flock on the run folder, which agent and engine inherit. libuv: False where torch was built without it; `env` must
    agree (launch/env.py). cwd: of the workers. script: the workers run a user's script, so they write no heartbeats, and the
    attempt's exit code is that of its root cause, 3 for a hang. health_every_s: between two samples; 0 for none.
    cluster: the hosts that the workers run on, nproc together; else this one. settings: what of `env` other hosts get too.
    """
    cluster = cluster or Cluster.here(nproc)
    record = AttemptRecord(run, attempt, cluster, script=script)
    job = {
        "command": command, "env": env, "lock_fd": lock_fd, "stop_grace_s": stop_grace_s, "libuv": libuv,
        "peer_grace_s": record.peer_grace_s,
        "cwd": None if cwd is None else str(cwd), "health_every_s": health_every_s,
    }  # fmt: skip
    watch = partial(Watchdog, attempt=attempt, nproc=nproc, hang_after_s=hang_after_s, script=script, cluster=cluster)
    watchdog = watch(run)
    with catch_signals(signals or StopSignals()) as signals, start_agents(cluster, run, attempt, job, settings or {}):
        while cluster.runs:
            lines = cluster.read(TICK_S)
            if record.follow(lock_fd, on_move):
                watchdog = watch(record.run)
            for member, line in lines:
                record.add(member, line)
            is_new_stop = signals.first and not (record.stopping or record.failed_first)
            if is_new_stop and (silence := watchdog.before_stop(by_person=signals.by_person)):
                record.add_silence(silence)
            record.give_orders(signals, stop_grace_s=stop_grace_s)
            on_tick()
            if not record.stopping and not record.failed_first and (hang := watchdog.poll()):
                record.end_hang(hang)
        if record.is_network_suspect:
            find_blocked(cluster)
        settle_losses(cluster, is_quick=signals.first is not None)
    record.follow(lock_fd, on_move)
    outcome = record.outcome()
    on_tick()
    return outcome


def moved_run(run: RunDir, lock_fd: int | None) -> RunDir | None:
    """Returns the run where its folder was renamed, which its open lock shows; None where the folder is in its place or gone."""
    with suppress(OSError):  # a file system that does not answer
        lock = Path(f"/proc/self/fd/{lock_fd}").readlink()
        path = run.path.with_name(lock.parent.name)  # relative, if the run's is
        if lock.name == run.lock.name and lock.exists() and not run.path.exists():
            return RunDir(path if path.exists() and path.samefile(lock.parent) else lock.parent)
    return None


class AttemptRecord:
    """What the agents have reported so far. Writes the events that follow from it."""

    def __init__(self, run: RunDir, attempt: int, cluster: Cluster, *, script: bool):
        self.run, self.attempt, self.cluster, self.script = run, attempt, cluster, script
        self.members = cluster.begin()
        self.nproc = sum(member.nproc for member in self.members)
        self.peer_grace_s = SCRIPT_PEER_GRACE_S if script else PEER_GRACE_S
        self.stopping = self.killing = self.ending = self.regrouping = False
        self.is_overdue = self.is_cut_short = False  # ended behind the time of a notice, or at a second Ctrl-C
        self.stop_s = 0.0  # that the ranks have to end, once they should
        self.dead_agents: list[Member] = []  # whose agent ended first, by itself
        self.failed_first = False  # a rank had failed before anyone asked to stop
        self.by_rank: dict[int, dict[str, Any]] = {}
        self.engine_exit_code: int | None = None
        self.joined: bool | None = None
        self.hang: Hang | None = None
        self.early_exit_at = math.inf  # when a rank was seen to have exited with 0 before its work was done
        self.failed_at = math.inf
        self.is_written = False

    @property
    def ranks(self) -> list[dict[str, Any]]:
        return [self.by_rank[rank] for rank in sorted(self.by_rank)]

    @property
    def broken(self) -> bool:
        """Whether one of several hosts can no longer finish the attempt, so that the others should end."""
        if len(self.members) == 1 or self.stopping:
            return False
        return any(rank["exit_code"] for rank in self.by_rank.values()) or any(
            member.fault or (member.agent_ended and member.exit_code) for member in self.members
        )

    @property
    def is_network_suspect(self) -> bool:
        """Whether the ranks of several hosts waited for each other, and nothing else shows why."""
        if len(self.members) == 1 or self.stopping or self.dead_agents or any(member.fault for member in self.members):
            return False
        failures = find_failures(self.run, self.attempt, self.ranks)
        return self.hang is not None or (bool(failures) and all(failure.consequence for failure in failures))

    def follow(self, lock_fd: int | None, on_move: Callable[[RunDir], None]) -> bool:
        """Continues where the run folder was renamed to; returns whether it was since the last call. Other hosts cannot follow."""
        moved = moved_run(self.run, lock_fd) if len(self.cluster.members) == 1 else None
        if moved:
            self.run = self.cluster.run = moved
            on_move(moved)
        return moved is not None

    def give_orders(self, signals: StopSignals, *, stop_grace_s: float) -> None:
        """Ends the attempt, at the pace that is due, where the user or a failure says so."""
        if self.cluster.is_leaving and not self.stopping:
            self.stopping = self.regrouping = True
            self.cluster.order("stop", signal=signal.SIGTERM, give_up_s=stop_grace_s + AGENT_MARGIN_S)
        signals.kill = signals.kill or bool(signals.first and is_stop_requested(self.run, STOP_NOW))
        if signals.first and (not self.stopping or self.regrouping):
            self.stopping, self.regrouping = True, False
            hint = "; Ctrl-C again to end now" if signals.by_person else ""
            text = "a rank had failed before" + ": its peers may still save" * (self.nproc > 1) + hint
            late = {"text": text} if self.failed_first else {}
            # as under torchrun: a script that saves at KeyboardInterrupt does so, and `paceline stop` is for those of SIGTERM
            is_ctrl_c = self.script and signals.by_person and not is_stop_requested(self.run)
            signum = signal.SIGINT if is_ctrl_c else signal.SIGTERM
            facts = {**signals.facts(), "sent": signum.name}
            append_event(self.run, "note" if late else "stopping", attempt=self.attempt, **late, **facts)
            self.stop_s = min(stop_grace_s, signals.deadline - time.monotonic())
            self.cluster.order("stop", signal=signum, give_up_s=stop_grace_s + AGENT_MARGIN_S)
        # the peers of a rank that exited too early have had their grace period
        is_overdue = not self.stopping and time.monotonic() - self.early_exit_at > EARLY_EXIT_GRACE_S
        if (signals.is_over or is_overdue) and not self.killing:
            self.killing = True
            self.is_cut_short = self.script and signals.kill
            if signals.is_over and not signals.kill:
                self.is_overdue = True
                append_event(
                    self.run, "note", text="the time of the notice is over: ending without the rest of the save"
                )
            self.cluster.order("kill", give_up_s=AGENT_MARGIN_S)
        if self.script and not self.stopping and time.monotonic() - self.failed_at > PEER_GRACE_S:
            self.failed_at = math.inf
            text = f"a rank has failed: the others have {self.peer_grace_s:.0f} s to save and end"
            append_event(self.run, "note", text=text)
        if self.broken and not self.ending:
            self.ending = True
            self.dead_agents = [m for m in self.members if m.agent_ended and m.exit_code and not m.fault]
            # the peers of a failed rank may print why they end; of a lost host they know nothing, but a script may save
            is_lost = any(member.fault for member in self.members) and not self.script
            do, grace_s = ("kill", 0.0) if is_lost else ("end", self.peer_grace_s)
            self.cluster.order(do, give_up_s=grace_s + AGENT_MARGIN_S)

    def end_hang(self, hang: Hang) -> None:
        """Ends a hung attempt by its rank to blame, or all ranks at once."""
        self.hang = hang
        append_event(self.run, "hang", attempt=self.attempt, **asdict(hang))
        do, grace_s = ("kill", 0.0) if hang.rank is None else ("kill_rank", self.peer_grace_s)
        self.cluster.order(do, rank=hang.rank, give_up_s=grace_s + AGENT_MARGIN_S)

    def add_silence(self, silence: Hang) -> None:
        """Takes what the ranks did before a stop; an exception that had ended a rank's program is its failure."""
        if silence.error:
            self.hang, self.failed_first = silence, True
        kind = "hang" if silence.error else "silence"
        append_event(self.run, kind, attempt=self.attempt, **asdict(silence))

    def add(self, member: Member, line: dict[str, Any]) -> None:
        """Takes a line from an agent."""
        for rank in line.get("ranks", ()):
            is_several = len(self.cluster.members) > 1
            rank |= {"host": member.name, "clock_s": member.clock_s} if is_several else {}
            self.by_rank[rank["rank"]] = rank
        if line["event"] == "unreachable":
            mark_unreachable(self.cluster, member, line)
        elif line["event"] == "started" and len(self.by_rank) == self.nproc:
            self.write_attempt()
        elif line["event"] == "rank_failed" and not self.failed_first:
            self.failed_first = not self.stopping
            self.failed_at = time.monotonic()
        elif line["event"] == "rank_ended" and find_early_exits(self.run, self.ranks):
            self.early_exit_at = min(self.early_exit_at, time.monotonic())
        elif line["event"] == "ended":
            self.joined = line["joined"]
        elif line["event"] == "engine_ended":
            self.engine_exit_code = self.engine_exit_code or line["exit_code"]
            if line["left"]:
                text = f"ended what the ranks had left running: {', '.join(line['left'])}"
                append_event(self.run, "note", text=redact_text(text))
            if line["survivors"]:
                pids = ", ".join(map(str, line["survivors"]))
                append_event(self.run, "note", text=f"processes that survive SIGKILL: {pids}")

    def write_attempt(self) -> None:
        """Writes the start of the attempt to events.jsonl."""
        self.is_written = True
        pids = [rank["pid"] for rank in self.ranks]  # none when it ended before the workers were started
        hosts = {member.name: list(member.ranks) for member in self.members}
        several: dict[str, Any] = {}
        if place := allocation():
            several = {"job_id": place.job_id, "job_restarts": place.restarts}
        if len(self.cluster.members) > 1:  # clock_s: how far the clock of each host is ahead of this one's
            head = next((member.name for member in self.members if member.is_here), None)  # the host of this process
            clock_s = {member.name: round(member.clock_s, 3) for member in self.members}
            several |= {"hosts": hosts, "head": head, "clock_s": clock_s}
        append_event(
            self.run, "attempt", attempt=self.attempt, nproc=self.nproc, world_size=self.nproc, pids=pids, **several
        )

    def outcome(self) -> Outcome:
        """Returns the outcome once the agents have ended."""
        if not self.is_written:
            self.write_attempt()
        failures = self.failures()
        state = self.state(failures)
        exit_code = INTERRUPTED if state == "interrupted" else 0
        if state == "failed":
            root = failures[0]
            exit_code = root.exit_with
            if self.script and root.rank is not None and root.cause != HANG:
                exit_code = root.exit_code or (128 + signal_number(root.signal) if root.signal else root.exit_with)
            for failure in failures:
                names = ("rank", "exit_code", "signal", "message", "consequence", *(["host"] if failure.host else []))
                facts = {name: getattr(failure, name) for name in names}
                append_event(self.run, "rank_failed", attempt=self.attempt, **facts)
        message = self.cut_off() if state == "interrupted" else None
        text = {"message": message} if message else {}
        append_event(self.run, "attempt_ended", attempt=self.attempt, state=state, exit_code=exit_code, **text)
        free_bytes = {member.name: member.free_bytes for member in self.members if member.free_bytes is not None}
        return Outcome(
            state, exit_code, self.attempt, failures, self.joined, self.hang, free_bytes=free_bytes, message=message
        )

    def cut_off(self) -> str | None:
        """Returns which ranks were killed while they may have been saving; a training's checkpoints are complete or absent."""
        is_late = self.is_overdue or self.is_cut_short
        killed = [r["rank"] for r in self.ranks if r["killed"] or (is_late and r["exit_code"] is None)]
        why = " at once, as requested" if self.is_cut_short else f", which did not end in {self.stop_s:.0f} s"
        text = f"killed {format_ranks(killed, limit=MAX_VICTIMS)}{why}: what was being saved is incomplete"
        return text if killed else None

    def failures(self) -> list[Failure]:
        """Returns every failure, the root cause first: a lost host, a rank that exited too early, hung or failed, or the launch."""
        failures = find_failures(self.run, self.attempt, self.ranks)
        roots = [] if self.stopping and not self.regrouping else [host_failure(m) for m in self.members if m.fault]
        if not roots and len(self.members) > 1:
            roots = [agent_failure(member) for member in self.dead_agents]
        if not roots and not self.stopping:
            roots = find_early_exits(self.run, self.ranks)
            roots = roots or (find_script_exits(self.ranks, failures) if self.script and not self.hang else [])
        if not roots and self.hang:
            host = next((rank.get("host") for rank in self.ranks if rank["rank"] == self.hang.rank), None)
            roots = [self.hang.failure(host)]
            failures = [failure for failure in failures if failure.rank != self.hang.rank]
        if roots:  # the errors of its peers follow from its kill
            return [*roots, *(replace(failure, consequence=True) for failure in failures)]
        if failures or self.stopping or self.engine_exit_code == 0:
            return failures
        process, exit_code = "torch's elastic agent", self.engine_exit_code
        if exit_code is None:
            process, exit_code = "the launch agent", next((m.exit_code for m in self.members if m.exit_code), 0)
        if exit_code < 0:
            name = signal_name(-exit_code)
            return [Failure(None, None, name, f"{process} was killed by {name}", time.time(), consequence=False)]
        message = f"{process} exited with code {exit_code}"
        log = "\n".join(read_log_tail(self.run.launch_log(self.attempt)))
        return [Failure(None, exit_code, None, message, time.time(), consequence=False, traceback=log)]

    def state(self, failures: list[Failure]) -> State:
        """Returns whether the attempt finished, failed or was stopped."""
        heartbeats = [read_heartbeat(self.run.progress(rank["rank"])) for rank in self.ranks]
        phases = {heartbeat and heartbeat.phase for heartbeat in heartbeats}  # the last ones; None for a script's ranks
        if not self.stopping or self.failed_first or (self.regrouping and failures):
            if failures:
                return "failed"
            # the workers alone may have received the signal
            return "interrupted" if "stopped" in phases else "finished"
        errors = [failure for failure in failures if failure.traceback and not failure.consequence]
        if any(not failure.message.startswith("KeyboardInterrupt") for failure in errors):
            return "failed"  # an error while stopping, such as a full disk: perhaps nothing was saved
        # where every rank had reached its last step, the order to stop came too late to matter
        return "finished" if phases == {"done"} else "regrouped" if self.regrouping else "interrupted"


@contextmanager
def start_agents(
    cluster: Cluster, run: RunDir, attempt: int, job: dict[str, Any], settings: Mapping[str, str]
) -> Iterator[None]:
    """Starts the agents with their job. However the block is left, nothing of the attempt runs afterwards."""
    for path in run.progress(0).parent.glob("*"):
        path.unlink(missing_ok=True)  # heartbeats of the previous attempt
    job["run_id"] = uuid.uuid4().hex
    try:
        cluster.start(run, attempt, job, settings=settings)
        yield
    finally:
        cluster.stop_agents()
        for member in cluster.started:
            if member.is_here:
                kill_processes(job["run_id"], timeout_s=AGENT_MARGIN_S, index=member.index)
