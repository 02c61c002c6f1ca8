"""
One host of a run, as the supervisor sees it: its ranks, the link to it, and whether it still takes part.

A link is made beside the loop that follows an attempt, and made again after it was lost: first quickly, then every few seconds.
"""

import hashlib
import math
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import Finding, PacelineError
from paceline.launch.channel import Channel, Line
from paceline.launch.connect import open_module
from paceline.launch.hosts import HostEntry, is_this_host
from paceline.launch.ssh import ModuleProcess, disk_fix
from paceline.launch.stacks import RankProcess
from paceline.options import LaunchOptions
from paceline.rundir import RunDir, read_json_lines

REMOTE = "paceline.launch.remote"
QUICK_FOR_S = 8.0  # a connection that breaks while its host is well is there again within this
QUICK_S = 0.5
REJOIN_S = 3.0
SRUN_REJOIN_S = 30.0  # each try asks Slurm's controller, which has others to serve
STALE_S = 120.0  # a link that has waited longer may be given up at the far end
MAX_LOSSES = 3  # a host that is lost so often is left out for good


class Reach(threading.Thread):
    """Connects to a host, which may take seconds."""

    def __init__(self, entry: HostEntry, python: str | None):
        super().__init__(daemon=True)
        self.entry, self.python, self.began = entry, python, time.monotonic()
        self.result: ModuleProcess | PacelineError | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = open_module(self.entry, REMOTE, python=self.python)
        except PacelineError as error:
            self.result = error
        except OSError as error:  # no more processes or files
            self.result = PacelineError(
                f"the link to it could not be started: {error.strerror}", fix="repeat the command"
            )


def reach_early(entries: Sequence[HostEntry], python: str | None, options: LaunchOptions) -> dict[HostEntry, Reach]:
    """Starts to connect to the other hosts beside the checks; not for a process that only prints, or goes on as another one."""
    others = [] if options.detach or options.show_env else [entry for entry in entries if not is_this_host(entry)]
    return {entry: Reach(entry, python) for entry in others}


@dataclass(eq=False)
class Member:
    """One host of a run, and the link to it."""

    entry: HostEntry
    nproc: int
    index: int = 0  # among the hosts of the attempt
    first_rank: int = 0
    channel: Channel | None = None
    link: ModuleProcess | None = None  # None: this host, or no link
    agent: subprocess.Popen[bytes] | None = None  # on this host
    address: str | None = None  # by which the other hosts reach it
    run_id: str | None = None  # of the last attempt that it took part in
    shared: bool = True
    folder: str | None = None  # its run folder
    free_bytes: int | None = None  # on the disk of that
    own_job: Mapping[str, Any] = field(default_factory=dict)  # what differs there: command and cwd of a script
    clock_s: float = 0.0  # how far its clock is ahead of ours
    is_open: bool = False  # it has found or made its run folder
    agent_ended: bool = True
    exit_code: int | None = None  # of its agent
    silent_s: float = 0.0
    lost: str | None = None  # why it takes part no longer
    fault: str | None = None  # why the link was lost in this attempt, even if it is there again
    finding: Finding | None = None  # what is wrong with the way to it
    link_ended: bool = False  # it was lost because the connection ended, not because it is silent
    num_losses: int = 0
    error: PacelineError | None = None  # of the last try to connect
    kill_at: float = float("inf")
    waiting: list[Line] = field(default_factory=list)
    processes: dict[int, RankProcess] = field(default_factory=dict)  # of its ranks, a second ago
    token: Path | None = None  # in the run folder, until the host has looked for it
    lost_at: float = -math.inf
    retry_at: float = math.inf  # when to connect
    open_by: float = math.inf
    reach: Reach | None = None  # a try to connect

    @property
    def name(self) -> str:
        """As events and messages call it."""
        return self.entry.host

    @property
    def is_greeted(self) -> bool:
        """Whether its first line has come: before that it reads no frames."""
        return self.is_open or self.token is not None

    @property
    def is_tried(self) -> bool:
        """Whether it is lost and a link to it is being made, or will be."""
        return (
            self.lost is not None
            and not self.is_open
            and (bool(self.channel or self.reach) or self.retry_at < math.inf)
        )

    @property
    def is_here(self) -> bool:
        return is_this_host(self.entry)

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.nproc)

    def send(self, line: Mapping[str, Any]) -> None:
        if self.channel is not None:
            self.channel.send(line)

    def send_behind(self, frames: Iterable[bytes]) -> None:
        if self.channel is not None:
            self.channel.send_behind(frames)

    def lose(self, why: str, *, link_ended: bool = False) -> None:
        """Leaves the host out: nothing is expected of it any more. A try to connect follows."""
        now = time.monotonic()
        if self.lost is None:
            self.lost, self.fault, self.lost_at, self.link_ended = why, self.fault or why, now, link_ended
        self.agent_ended = True
        self.drop()
        if self.num_losses < MAX_LOSSES:
            slow_s = SRUN_REJOIN_S if self.entry.way == "srun" else REJOIN_S
            self.retry_at = now + (QUICK_S if now - self.lost_at < QUICK_FOR_S else slow_s)

    def take_state(self, line: Line) -> None:
        """Takes what the host reports every second."""
        # a delay on the way makes the difference smaller, never larger
        self.clock_s = max(self.clock_s, line.get("time", -math.inf) - time.time())
        self.processes = {int(rank): RankProcess(**facts) for rank, facts in line.get("processes", {}).items()}

    def open(self, line: Line) -> None:
        """Takes the host's answer about its run folder: it may take part."""
        self.shared, self.folder, self.address, self.is_open = line["shared"], line["folder"], line["address"], True
        self.forget_token()

    def refuse(self, line: Line) -> None:
        """Leaves the host out, which could not carry out an order."""
        fix = disk_fix(self.entry.destination, line["why"]) if line["disk"] else line["fix"]
        if line["disk"] and self.entry.way == "joined":
            fix = f"df -h ~/.cache on {self.name}; another cache: XDG_CACHE_HOME=DIR in the environment there"
        self.error = PacelineError(line["why"], fix=fix) if fix else None
        self.lose(line["why"])

    def drop(self) -> None:
        """Ends the link."""
        self.channel, self.is_open, self.retry_at = None, False, math.inf
        self.forget_token()
        if self.link:
            self.link.kill()
            self.link = None

    def forget_token(self) -> None:
        if self.token is not None:
            self.token.unlink(missing_ok=True)
            self.token = None

    def connect(self, python: str | None, *, open_s: float) -> None:
        """Starts to connect when it is due, and takes the link once it is there. Never waits."""
        now = time.monotonic()
        if self.reach is None:
            if now >= self.retry_at:
                self.retry_at, self.reach = math.inf, Reach(self.entry, python)
            return
        result = self.reach.result
        if isinstance(result, PacelineError):
            self.reach, self.error = None, result
            self.lose(result.message)
        elif result is not None and now - self.reach.began > STALE_S:
            self.reach = None
            result.__exit__()
        elif result is not None:
            self.reach, self.error, self.link, self.retry_at = None, None, result, math.inf
            self.channel, self.silent_s, self.open_by = (
                Channel(result.stdout.fileno(), result.stdin.fileno()), 0.0, now + open_s
            )  # fmt: skip

    def greet(self, line: Line, run: RunDir, *, text: str, interface: str | None, is_kept: bool) -> None:
        """Asks the host, which has just said hello, for its copy of the run folder, and to end what a lost link has left there."""
        self.clock_s = line["time"] - time.time()
        if is_kept and self.entry.node:
            self.entry.node.record(run)
        self.token = run.path / f".shared-{secrets.token_hex(8)}"
        self.token.touch()
        head, path = socket.gethostname(), str(run.path.resolve())
        # a run that was deleted may have had the same name, and left its copy there
        began = next((event["time"] for event in read_json_lines(run.events)), "")
        key = hashlib.sha256(f"{head}:{path}:{began}".encode()).hexdigest()[:12]
        folder = {"path": path, "token": self.token.name, "key": key, "text": text or None, "interface": interface}
        growing = [*run.path.glob("logs/*/*"), *run.path.glob("health/*")]
        sizes = {str(path.relative_to(run.path)): path.stat().st_size for path in growing if path.is_file()}
        attempt = {"run_id": self.run_id, "index": self.index}  # the last one in which it took part
        order = {"do": "open", **folder, **attempt, "sizes": sizes, "host": self.name, "head": head, "kept": is_kept}
        self.send(order)

    def give_up(self) -> None:
        """Connects no more."""
        self.reach, self.retry_at = None, math.inf
