"""
One attempt of a run, from the start of its processes to what came of it; no torch, never touches a tensor.

The agent (launch/agent.py) is at the other end of its stdin and stdout and holds the engine and the workers. Ctrl-C
reaches only this process, which asks the agent to stop. What the attempt did stands in events.jsonl.
"""

import json
import math
import os
import selectors
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from paceline.errors import Interrupted
from paceline.launch.agent import Lines, kill_processes
from paceline.launch.failure import Failure, find_early_exits, find_failures, read_log_tail
from paceline.launch.recorder import recorder_env
from paceline.launch.watchdog import Hang, Watchdog
from paceline.rundir import RunDir, append_event, read_json_lines

TICK_S = 0.2
ONE_CTRL_C_S = 0.3  # wrappers such as `uv run` pass on the signal that the terminal has sent already
EARLY_GRACE_S = (
    3.0  # a rank has left: its peers may save and say so, but one that waits for it to join never learns of it
)
AGENT_MARGIN_S = 12.0  # the agent ends what will not end by itself, and then itself, within this
LAUNCH_LOG = "launch.log"  # stderr of the agent and the engine

STOP_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGUSR1,
)  # SIGUSR1: a batch system says that the time is nearly up

State = Literal["finished", "failed", "interrupted"]


@dataclass(frozen=True)
class Outcome:
    state: State
    exit_code: int
    attempt: int
    failures: list[Failure]  # the root cause first
    joined: bool | None = None  # False: every rank ended well, and none had joined the others in a process group

    @property
    def root(self) -> Failure | None:
        return self.failures[0] if self.failures else None


def run_attempt(
    run: RunDir,
    *,
    command: list[str],
    nproc: int,
    attempt: int,
    env: Mapping[str, str],
    lock_fd: int | None,
    on_tick: Callable[[], None],
    caught: "Caught | None" = None,
    watchdog: Watchdog | None = None,
    stop_grace_s: float = 60.0,
    libuv: bool = True,
    cwd: Path | None = None,
    own_exit_codes: bool = False,
    health_every_s: float = 0.0,
) -> Outcome:
    """Start `nproc` workers and stay until they have ended; call it from the main thread, as it takes the signals.

    caught: signals that have come before count as well.
    on_tick is called some times a second; so is the watchdog, and the rank that it names is killed. lock_fd: flock on the
    run folder, which agent and engine keep too.
    libuv: False where torch was built without it; `env` must say so too (launch/env.py). cwd: of the workers.
    own_exit_codes: the attempt ends with what its root cause ended with, as a shell would say it.
    health_every_s: between two samples of the host's health; 0: none.
    """
    logs_dir = run.logs(attempt).resolve()
    logs_dir.mkdir(parents=True, exist_ok=True)
    forget_marks(run)
    job = {
        "command": command,
        "nproc": nproc,
        "env": {**env, **recorder_env(env, run, logs_dir)},
        "logs_dir": str(logs_dir),
        "run_id": uuid.uuid4().hex,
        "lock_fd": lock_fd,
        "stop_grace_s": stop_grace_s,
        "libuv": libuv,
        "cwd": None if cwd is None else str(cwd),
        "run_path": str(run.path.resolve()),
        "health_every_s": health_every_s,
    }
    watch = AttemptWatch(run, attempt, nproc, own_exit_codes=own_exit_codes)
    with caught_signals(caught) as caught, started_agent(job) as link:
        while not link.ended:
            for line in link.read(timeout_s=TICK_S):
                watch.note(line)
            if caught.first and not watch.stopping:
                watch.note_stop(caught.first)
                link.send("stop", give_up_s=stop_grace_s + AGENT_MARGIN_S)
            if (caught.kill or watch.left_early()) and not watch.killing:
                watch.killing = True
                link.send("kill", give_up_s=AGENT_MARGIN_S)
            on_tick()
            if watchdog and not watch.stopping and (hang := watchdog.poll()):
                watch.note_hang(hang)
                end_hang(link, hang)
    outcome = watch.outcome(agent_exit_code=link.agent.returncode)
    on_tick()
    return outcome


def end_hang(link: "AgentLink", hang: Hang) -> None:
    if hang.rank is None:
        link.send("kill", give_up_s=AGENT_MARGIN_S)
    else:
        link.send("kill_rank", rank=hang.rank, give_up_s=AGENT_MARGIN_S)


def forget_marks(run: RunDir) -> None:
    """Where the ranks of the attempt before came to would pass for signs of life of the next."""
    for path in run.progress(0).parent.glob("*"):
        path.unlink(missing_ok=True)


class AttemptWatch:
    """What the agent has told so far, and the events that follow from it."""

    def __init__(self, run: RunDir, attempt: int, nproc: int, *, own_exit_codes: bool):
        self.run = run
        self.attempt = attempt
        self.nproc = nproc
        self.own_exit_codes = own_exit_codes
        self.stopping = False
        self.killing = False
        self.failed_first = False  # a rank had failed before anyone asked to stop
        self.ranks: list[dict[str, Any]] = []
        self.engine_exit_code: int | None = None
        self.joined: bool | None = None
        self.hang: Hang | None = None
        self.left_at = math.inf  # when a rank was seen to have ended with 0 before its work was done

    def note(self, line: dict[str, Any]) -> None:
        if "ranks" in line:
            self.ranks = line["ranks"]
        if line["event"] == "started":
            self.note_attempt()
        elif line["event"] == "rank_failed":
            self.failed_first = not self.stopping
        elif line["event"] == "rank_ended" and find_early_exits(self.run, self.ranks):
            self.left_at = min(self.left_at, time.monotonic())
        elif line["event"] == "ended":
            self.joined = line["joined"]
        elif line["event"] == "engine_ended":
            self.engine_exit_code = line["exit_code"]
            if line["left"]:
                left = ", ".join(map(str, line["left"]))
                append_event(self.run, "note", text=f"processes that do not end even when killed: {left}")

    def left_early(self) -> bool:
        return not self.stopping and time.monotonic() - self.left_at > EARLY_GRACE_S

    def note_attempt(self) -> None:
        pids = [each["pid"] for each in self.ranks]  # none when it ended before the workers were started
        append_event(self.run, "attempt", attempt=self.attempt, nproc=self.nproc, world_size=self.nproc, pids=pids)

    def note_stop(self, signal_name: str) -> None:
        self.stopping = True
        append_event(self.run, "stopping", attempt=self.attempt, signal=signal_name)

    def note_hang(self, hang: Hang) -> None:
        self.hang = hang
        append_event(self.run, "hang", attempt=self.attempt, **asdict(hang))

    def outcome(self, *, agent_exit_code: int) -> Outcome:
        if not self.ranks:
            self.note_attempt()
        failures = find_failures(self.run, self.attempt, self.ranks)
        early = [] if self.stopping else find_early_exits(self.run, self.ranks)
        if early:
            failures = [*early, *(replace(each, consequence=True) for each in failures)]
        elif self.hang:
            failures = hang_first(self.hang, failures)
        elif not failures and not self.stopping and (self.engine_exit_code or self.engine_exit_code is None):
            failures = [self.launch_failure(agent_exit_code)]
        state = self.state(failures)
        if state == "failed":
            self.note_failures(failures)
        exit_code = exit_code_of(state, failures, own=self.own_exit_codes)
        outcome = Outcome(state, exit_code, self.attempt, failures, self.joined)
        append_event(self.run, "attempt_ended", attempt=self.attempt, state=state, exit_code=outcome.exit_code)
        return outcome

    def note_failures(self, failures: list[Failure]) -> None:
        for failure in failures:
            append_event(
                self.run,
                "rank_failed",
                attempt=self.attempt,
                rank=failure.rank,
                exit_code=failure.exit_code,
                signal=failure.signal,
                message=failure.message,
                consequence=failure.consequence,
            )

    def state(self, failures: list[Failure]) -> State:
        if not self.stopping or self.failed_first:
            if failures:
                return "failed"
            return (
                "interrupted" if "stopped" in self.last_phases() else "finished"
            )  # the signal went to the workers alone
        if any(failure.traceback and not failure.consequence for failure in failures):
            return "failed"  # an error while stopping, such as a full disk: perhaps nothing was saved
        return "finished" if self.all_done() else "interrupted"

    def all_done(self) -> bool:
        """Every rank says that it had reached its last step: the order to stop came too late to matter."""
        phases = self.last_phases()
        return bool(phases) and all(phase == "done" for phase in phases)

    def last_phases(self) -> list[str | None]:
        """Of each rank, where it marks its progress, as those of a script do not."""
        paths = [self.run.progress(each["rank"]) for each in self.ranks]
        last = [list(read_json_lines(path))[-1:] for path in paths]
        return [line[0].get("phase") if line else None for line in last]

    def launch_failure(self, agent_exit_code: int) -> Failure:
        who, exit_code = "torch's elastic agent", self.engine_exit_code
        if exit_code is None:
            who, exit_code = "the launch agent", agent_exit_code
        killed_by = signal.Signals(-exit_code).name if exit_code < 0 else None
        return Failure(
            rank=None,
            exit_code=None if killed_by else exit_code,
            signal=killed_by,
            message=f"{who} was ended by {killed_by}" if killed_by else f"{who} ended with code {exit_code}",
            time=time.time(),
            consequence=False,
            traceback=None if killed_by else "\n".join(read_log_tail(self.run.logs(self.attempt) / LAUNCH_LOG)),
        )


def hang_first(hang: Hang, failures: list[Failure]) -> list[Failure]:
    """The rank that was named is the root cause; what the others said when it was killed only followed."""
    named = Failure(
        rank=hang.rank, exit_code=None, signal="SIGKILL", message=hang.text, time=time.time(), consequence=False
    )
    return [named, *(replace(each, consequence=True) for each in failures if each.rank != hang.rank)]


def exit_code_of(state: State, failures: list[Failure], *, own: bool) -> int:
    if state == "failed":
        root = failures[0]
        if own and root.rank is not None:
            return root.exit_code or 128 + signal.Signals[root.signal or "SIGKILL"]
        return root.exit_with
    return Interrupted.exit_code if state == "interrupted" else 0


@dataclass
class Caught:
    """Signals since the attempt began."""

    first: str | None = None
    first_time: float = 0.0
    kill: bool = False

    def take(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first, self.first_time = signal.Signals(signum).name, now
        elif signum == signal.SIGINT and now - self.first_time > ONE_CTRL_C_S:
            self.kill = True  # a second SIGTERM is only a batch system repeating itself


@contextmanager
def caught_signals(caught: Caught | None = None) -> Iterator[Caught]:
    """Those that come within the block; with `caught`, added to what it has already."""
    caught = caught or Caught()
    before = {signum: signal.signal(signum, caught.take) for signum in STOP_SIGNALS}
    try:
        yield caught
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


class AgentLink:
    """JSON lines to and from one agent; `ended` once its side is closed, be it by a kill."""

    def __init__(self, agent: subprocess.Popen[bytes]):
        assert agent.stdout is not None
        self.agent = agent
        self.give_up_at = float("inf")
        self._lines = Lines(agent.stdout.fileno())
        self._selector = selectors.DefaultSelector()
        self._selector.register(agent.stdout, selectors.EVENT_READ)

    @property
    def ended(self) -> bool:
        return self._lines.ended

    def read(self, *, timeout_s: float) -> list[dict[str, Any]]:
        """What has come by now, after at most timeout_s; a signal's effect is seen as late as that."""
        if time.monotonic() > self.give_up_at:
            self.agent.kill()  # the engine and the workers follow by PDEATHSIG
        return self._lines.read() if self._selector.select(timeout_s) else []

    def send(self, do: str, *, give_up_s: float, **fields: int) -> None:
        self.give_up_at = min(self.give_up_at, time.monotonic() + give_up_s)
        self.write({"do": do, **fields})

    def write(self, line: dict[str, Any]) -> None:
        assert self.agent.stdin is not None
        with suppress(BrokenPipeError):  # the agent has ended: read() says so next
            self.agent.stdin.write(json.dumps(line).encode() + b"\n")
            self.agent.stdin.flush()

    def close(self) -> None:
        self._selector.close()
        self.agent.kill()
        with suppress(BrokenPipeError):
            self.agent.__exit__(None, None, None)  # closes both pipes and reaps


@contextmanager
def started_agent(job: dict[str, Any]) -> Iterator[AgentLink]:
    """However the block is left, nothing of the attempt runs afterwards."""
    lock_fds = () if job["lock_fd"] is None else (job["lock_fd"],)
    with (Path(job["logs_dir"]) / LAUNCH_LOG).open("ab") as log:
        agent = subprocess.Popen(
            [sys.executable, "-P", "-m", "paceline.launch.agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=os.environ,
            pass_fds=lock_fds,
            start_new_session=True,  # a terminal's Ctrl-C reaches the supervisor alone
        )
    link = AgentLink(agent)
    try:
        link.write(job)
        yield link
    finally:
        link.close()
        kill_processes(job["run_id"], timeout_s=AGENT_MARGIN_S)
