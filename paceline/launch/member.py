"""
One host of a run, as the supervisor sees it: its ranks, the link to it, and whether it still takes part.
"""

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.launch.channel import Channel, Line
from paceline.launch.hosts import HostEntry
from paceline.launch.ssh import SshModule


@dataclass(eq=False)
class Member:
    """One host of a run, and the link to it."""

    entry: HostEntry
    nproc: int
    name: str  # as events and messages call it
    first_rank: int = 0
    channel: Channel | None = None
    ssh: SshModule | None = None  # None: this host
    agent: subprocess.Popen[bytes] | None = None  # on this host
    address: str | None = None  # by which the other hosts reach it
    path: str = ""  # of the run folder there
    shared: bool = True
    own_job: Mapping[str, Any] = field(default_factory=dict)  # what differs there: command and cwd of a script
    clock_s: float = 0.0  # how far its clock is ahead of ours
    is_greeted: bool = False  # its first line has come: before that it reads no frames
    agent_ended: bool = True
    exit_code: int | None = None  # of its agent
    silent_s: float = 0.0
    lost: str | None = None  # why it takes part no longer
    kill_at: float = float("inf")
    waiting: list[Line] = field(default_factory=list)

    @property
    def is_here(self) -> bool:
        return self.ssh is None

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.nproc)

    def send(self, line: Mapping[str, Any]) -> None:
        if self.channel is not None:
            self.channel.send(line)

    def lose(self, why: str) -> None:
        """Leaves the host out: nothing is expected of it any more."""
        self.lost, self.agent_ended = self.lost or why, True
        if self.ssh:
            self.ssh.process.kill()
            self.ssh.process.wait()
        self.channel = None
