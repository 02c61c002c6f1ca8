"""
Hosts that are lost during an attempt: whether they were, what the failure says of it, and who comes back.

A host whose connection ends while it is well itself answers again within seconds: it was not lost. One that stays away is left out
until its link is open again; it then takes part after the next checkpoint (launch/job.py).
"""

import signal
import time

from paceline.launch.cluster import Cluster
from paceline.launch.failure import Failure
from paceline.launch.member import MAX_LOSSES, QUICK_FOR_S, Member
from paceline.launch.ssh import SSH_FAILED
from paceline.rundir import append_event


def settle_losses(cluster: Cluster, *, is_quick: bool) -> None:
    """After an attempt: a host that answers again within seconds was not lost. is_quick: without waiting for it."""
    broken = [member for member in cluster.started if member.fault]
    while not is_quick and any(
        m.link_ended and not m.is_open and time.monotonic() - m.lost_at < QUICK_FOR_S for m in broken
    ):
        cluster.pump(0.05)
    for member in broken:
        if cluster.copies:
            cluster.copies.forget(member)
        if member.is_open:
            member.lost = None
            continue
        member.num_losses += 1
        if member.num_losses >= MAX_LOSSES:
            member.give_up()
            if cluster.run:
                text = f"host {member.name} was lost {MAX_LOSSES} times: it is left out from now on"
                append_event(cluster.run, "note", text=text)


def ready_hosts(cluster: Cluster) -> list[Member]:
    """Returns the hosts that do not take part and could: those that answer again, and those that were not needed."""
    return [member for member in cluster.members if member.lost and member.is_open]


def readmit(cluster: Cluster, count: int) -> list[Member]:
    """Lets the hosts that are ready take part in the next attempt, `count` hosts in all; returns them."""
    ready = ready_hosts(cluster)
    for member in ready:
        member.lost = None
    cluster.limit(count)
    return [member for member in ready if member.lost is None]


def host_failure(member: Member) -> Failure:
    """Returns the failure of a host whose link was lost; one that answers again by now has an exit code, that of ssh."""
    exit_code = None if member.lost else SSH_FAILED
    return Failure(None, exit_code, None, str(member.fault), time.time(), consequence=False, host=member.name)


def agent_failure(member: Member) -> Failure:
    """Returns the failure of a host's agent; the host itself is well."""
    assert member.exit_code
    name = signal.Signals(-member.exit_code).name if member.exit_code < 0 else None
    how = f"was killed by {name}" if name else f"exited with code {member.exit_code}"
    exit_code = None if name else member.exit_code
    return Failure(
        None,
        exit_code,
        name,
        f"the launch agent on {member.name} {how}",
        time.time(),
        consequence=False,
        host=member.name,
    )
