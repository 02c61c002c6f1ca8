"""
Where the ranks of an attempt run, and how the watchdog sees their processes.

Those of this host are seen in /proc. launch/remote.py sends those of its host every second, and takes their stacks on an order: a
process id means something on its own host alone.
"""

from dataclasses import dataclass

from paceline.launch.cluster import Cluster
from paceline.launch.stacks import RankProcess, inspect_ranks, rank_processes
from paceline.rundir import RunDir

INSPECTION_S = 10.0  # another host has as long for its stacks


@dataclass(frozen=True)
class RankHosts:
    """The ranks of an attempt, on one host or several."""

    cluster: Cluster
    run: RunDir
    attempt: int

    def processes(self) -> dict[int, RankProcess]:
        """Returns the processes that have been started, by rank."""
        processes: dict[int, RankProcess] = {}
        for member in self.cluster.begin():
            here = rank_processes(self.run, self.attempt, member.ranks) if member.is_here else member.processes
            processes |= {rank: process for rank, process in here.items() if rank in member.ranks}
        return processes

    def inspect(self, *, own_ranks: bool) -> dict[int, dict[str, str]]:
        """Returns what each process does, as inspect_ranks does."""
        members = self.cluster.begin()
        others = [member for member in members if not member.is_here]
        for member in others:
            member.send({"do": "stacks", "own_ranks": own_ranks})
        texts: dict[int, dict[str, str]] = {}
        for member in members:
            if member.is_here:
                texts |= inspect_ranks(self.run, self.attempt, member.ranks, own_ranks=own_ranks)
        for line in self.cluster.answers(others, "stacks", timeout_s=INSPECTION_S, is_required=False).values():
            texts |= {int(rank): facts for rank, facts in line["ranks"].items()}
        return texts

    def names(self) -> dict[int, str]:
        """Returns the host of each rank; nothing where there is one."""
        members = self.cluster.begin()
        return {rank: member.name for member in members for rank in member.ranks} if len(members) > 1 else {}
