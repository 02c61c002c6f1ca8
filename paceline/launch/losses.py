"""
Hosts that are lost during an attempt: whether they were, what the failure says of it, and who comes back.

A host whose connection ends while it is well itself answers again within seconds: it was not lost. One that stays away is left out
until its link is open again; it then takes part after the next checkpoint (launch/job.py), or at once if the run waits for it. One
that ssh reaches and the ranks of other hosts do not is left out until the run is resumed: nothing shows when its ports are open.
"""

import shlex
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import psutil  # type: ignore[import-untyped, unused-ignore]

from paceline.check.probes.network_probe import interface_to
from paceline.check.ready import find_findings
from paceline.check.verdicts.rules import Intent
from paceline.errors import Finding, PacelineError
from paceline.launch.cluster import Cluster
from paceline.launch.failure import BLOCKED, FULL_DISK, HOST_LOST, LINK_LOST, Failure
from paceline.launch.host_facts import link_probes, measure_links
from paceline.launch.member import MAX_LOSSES, QUICK_FOR_S, Member
from paceline.launch.policy import AWAIT_S
from paceline.launch.ssh import SSH_FAILED
from paceline.rundir import RunDir, append_event
from paceline.units import signal_name

# packets of common networks: jumbo frames, Ethernet, PPPoE, WireGuard, GRE, the least of IPv6, and what the internet always takes
PACKET_BYTES = (9000, 1500, 1492, 1420, 1400, 1280, 1200, 576)
PING = ("env", "LC_ALL=C", "ping", "-n", "-c", "3", "-i", "0.2", "-M", "do", "-s")  # two of three may be lost by chance
PING_S = 0.7
REPLY = b"bytes from"
ALONE_S = 30.0  # after so long hosts that answer again do not wait for the others
IP_BYTES, IPV6_BYTES = 28, 48  # the headers of a ping


def settle_losses(cluster: Cluster, *, is_quick: bool) -> None:
    """After an attempt: a host that answers again within seconds was not lost. is_quick: without waiting for it."""
    broken = [member for member in cluster.started if member.fault]
    while not is_quick and any(
        m.link_ended and not m.is_open and time.monotonic() - m.lost_at < QUICK_FOR_S for m in broken
    ):
        cluster.pump(0.05)
    silent = [m for m in broken if m.lost and not m.link_ended and m.finding is None and not is_quick]
    with ThreadPoolExecutor(max(1, len(silent))) as pool:
        for member, finding in zip(silent, pool.map(find_path_mtu, silent), strict=True):
            member.finding = finding
    others = [member for member in cluster.started if not member.is_here]
    is_own = len(others) > 1 and all(m.fault and m.finding is None and not m.is_open for m in others)
    for member in broken:
        if cluster.copies:
            cluster.copies.forget(member)
        if member.is_open:
            member.lost = None
            continue
        if is_own:
            member.fault = f"{member.fault}, and of no other host: this machine may have been offline or asleep"
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


def awaited_hosts(cluster: Cluster | None) -> tuple[str, ...]:
    """Returns the hosts of the attempt that are lost and tried again. One of Slurm or another launcher comes back with its job."""
    if cluster is None or not cluster.rejoin:
        return ()
    return tuple(m.name for m in cluster.started if m.is_tried and m.entry.way == "ssh")


def await_hosts(
    cluster: Cluster | None,
    choose: Callable[[int], int],
    *,
    is_over: Callable[[], bool],
    show: Callable[[list[str]], None],
) -> bool:
    """Waits until the lost hosts answer again, or for ALONE_S some that suffice; returns whether they take part again.

    choose: returns how many of so many hosts can go on, 0 for none. is_over: the user waits no longer.
    """
    began = heard_at = time.monotonic()
    num_ready = 0
    while cluster and not is_over() and time.monotonic() - began < AWAIT_S:
        cluster.pump(0.1)
        ready = ready_hosts(cluster)
        if len(ready) != num_ready:
            num_ready, heard_at = len(ready), time.monotonic()
        is_settled = not awaited_hosts(cluster) or time.monotonic() - heard_at > ALONE_S
        if ready and is_settled and (count := choose(len(cluster.present) + len(ready))):
            show([record_joined(cluster, readmit(cluster, count))])
            return True
    return False


def record_joined(cluster: Cluster, members: Sequence[Member]) -> str:
    """Writes to the events which hosts take part again; returns the line that says so."""
    assert cluster.run
    names, hosts = [member.name for member in members], [member.name for member in cluster.present]
    text = f"{', '.join(names)} joined: continuing on {', '.join(hosts)}"
    append_event(cluster.run, "joined", joined=names, hosts=hosts, text=text)
    return text


def readmit(cluster: Cluster, count: int) -> list[Member]:
    """Lets the hosts that are ready take part in the next attempt, `count` hosts in all; returns them."""
    ready = ready_hosts(cluster)
    for member in ready:
        member.lost = None
    cluster.limit(count)
    return [member for member in ready if member.lost is None]


def find_path_mtu(member: Member) -> Finding | None:
    """Returns what is wrong with the way to a host that has fallen silent, where it answers short packets and no long ones."""
    name = interface_to(member.address) if member.address else None
    if name is None:
        return None
    mtu, headers = psutil.net_if_stats()[name].mtu, IPV6_BYTES if ":" in str(member.address) else IP_BYTES
    sizes = sorted({mtu, *(size for size in PACKET_BYTES if size < mtu)})
    pings = [[*PING, str(size - headers), str(member.address)] for size in sizes]
    with suppress(OSError):  # there is no ping here
        processes = [subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for words in pings]
        time.sleep(PING_S)
        for process in processes:
            process.kill()
        outputs = [process.communicate()[0] for process in processes]
        passed = [size for size, output in zip(sizes, outputs, strict=True) if REPLY in output]
        if passed and mtu not in passed:
            what = f"it answers packets of {passed[-1]:,} bytes and none of {mtu:,}, the MTU of {name} here"
            fix = f"sudo ip link set {name} mtu {passed[-1]}, on both; then the cable and the switch between them"
            return Finding("hosts-path-mtu", "stop", what, "", fix)
    return None


def find_blocked(cluster: Cluster) -> None:
    """Tries the connections between the hosts, as `check` does, and leaves out one that the ranks of others do not reach."""
    members = [member for member in cluster.started if member.lost is None]
    entries = [member.entry for member in members]
    interface = cluster.interface
    with link_probes(entries, python=cluster.python, ports=cluster.ports, interface=interface) as probes:
        links = measure_links(entries, probes, interface=interface)
    by_destination = {member.entry.destination: member for member in members}
    pairs = [(first, by_destination[link["to"]], link) for first in members for link in links[first.entry.destination]]
    broken = [(*pair, finding) for pair in pairs if (finding := link_finding(cluster, *pair))]
    if not broken:
        return
    count = Counter(member for first, second, _, _ in broken for member in (first, second) if not member.is_here)
    member = max(members, key=lambda member: (count[member], members.index(member)))
    leave_out(member, next(finding for *pair, _, finding in broken if member in pair))


def mark_unreachable(cluster: Cluster, member: Member, link: dict[str, Any]) -> None:
    """A host's agent reports that it does not reach the first host, where the ranks meet: it is left out."""
    if finding := link_finding(cluster, member, cluster.started[0], {**link, "error": "connect"}):
        leave_out(member, finding)


def link_finding(cluster: Cluster, first: Member, second: Member, link: dict[str, Any]) -> Finding | None:
    """Returns what `check` finds wrong with the way from one host to another. link: as check/probes/link_probe.py measures it."""
    ports = {"ports": "-".join(map(str, cluster.ports))} if cluster.ports else {}
    unknown = dict.fromkeys(("address", "bits_per_s", "rtt_us"))
    facts: list[dict[str, Any]] = [
        {"connection": {"destination": first.name}, "links": [{**unknown, **link, "to": second.name}]},
        {"connection": {"destination": second.name}},
    ]
    findings = find_findings(facts, Intent(num_hosts=2, config=ports))
    return next((finding for finding in findings if finding.id in BLOCKED and link["error"] != "probe"), None)


def leave_out(member: Member, finding: Finding) -> None:
    """Loses a host that ssh reaches: it is not tried again."""
    member.lose(finding.what)
    member.finding = finding
    member.give_up()


def host_failure(member: Member) -> Failure:
    """Returns the failure of a host whose link was lost; one that answers again by now has an exit code, that of ssh."""
    cause, message, fix = HOST_LOST if member.lost else LINK_LOST, str(member.fault), None
    if member.lost and member.finding:
        cause, fix = member.finding.id, member.finding.fix
        message += "" if message == member.finding.what else f"; {member.finding.what}"
    exit_code = SSH_FAILED if cause == LINK_LOST else None
    host = member.name
    if fix is None and member.entry.way == "joined" and FULL_DISK not in message:
        fix = f"see the output of paceline on {host}, and who ended it"
    return Failure(None, exit_code, None, message, time.time(), consequence=False, fix=fix, host=host, cause=cause)


@contextmanager
def cluster_session(cluster: Cluster | None, run: RunDir) -> Iterator[None]:
    """Ends the links after the block. Where the run folder has vanished, that is its error, whatever followed from it."""
    try:
        yield
    except (OSError, PacelineError):
        if cluster:
            check_folder(cluster, run)
        raise
    finally:
        if cluster:
            cluster.close()


def check_folder(cluster: Cluster, run: RunDir) -> None:
    """Raises PacelineError where the run folder has vanished; it says where the copy is."""
    if run.config_toml.is_file():
        return
    keepers = [m for m in cluster.started if not m.is_here and not m.shared and m.lost is None and m.folder]
    fix = "restore the run folder or mount it again, then continue the run; or start a new one"
    if keepers:
        keeper = keepers[0]
        hosts = ",".join(m.entry.text for m in [keeper, *(m for m in cluster.members if m is not keeper)])
        listed = "" if keeper.entry.way == "joined" else f" --hosts {hosts}"
        fix = f"on {keeper.name}: paceline resume {shlex.quote(str(keeper.folder))}{listed}"
    raise PacelineError(f"{run.path} is gone: it existed when the run began", fix=fix)


def agent_failure(member: Member) -> Failure:
    """Returns the failure of a host's agent; the host itself is well."""
    assert member.exit_code
    name = signal_name(-member.exit_code) if member.exit_code < 0 else None
    how = f"was killed by {name}" if name else f"exited with code {member.exit_code}"
    exit_code = None if name else member.exit_code
    message = f"the launch agent on {member.name} {how}"
    return Failure(None, exit_code, name, message, time.time(), consequence=False, host=member.name)
