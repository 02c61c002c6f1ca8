"""
`paceline comm`: whether collectives between the ranks here, or of several hosts, give right results, how fast they are, and what
that means for training.

It starts comm/rank_process.py for each rank as a run's workers are started, follows their heartbeats, collects their reports and
compares the speed with what the links allow. No torch. The figures stay in a file, where plans for these hosts find them.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any

from paceline.check.ready import machine_of_hosts
from paceline.check.verdicts.hosts_verdicts import interfaces_of, nominal_bits_per_s
from paceline.check.verdicts.hosts_verdicts import links as links_of
from paceline.check.verdicts.rules import Facts, Host, Intent
from paceline.comm.analysis import LinkRate, largest_point, link_of_gpus, make_results, sweep_sizes
from paceline.config import Config
from paceline.errors import PacelineError, TrainingFailed, check_new_file
from paceline.heartbeat import read_heartbeat
from paceline.launch.cluster import Cluster
from paceline.launch.hosts import HostEntry
from paceline.launch.train import cluster_of
from paceline.launch.trial import first_failure, read_reports, run_session, session_folder
from paceline.plan.forecast import comm_file
from paceline.plan.machine import probe_machine
from paceline.plan.planner import Plan, make_plan
from paceline.plan.replan import of_unknown_memory
from paceline.rundir import RunDir, write_atomic
from paceline.units import MIB

WORKER = (sys.executable, "-m", "paceline.comm.rank_process")
MAX_BYTES = {"cuda": 256 * MIB, "cpu": 16 * MIB}
SWEEP_S = 4.0  # approximately: slow operations run at least five times
DEADLINE_S = 10.0
SLOWEST_BYTES_PER_S = 100e6  # of 1 Gb Ethernet: the deadline leaves time for the largest message at this rate


def measure_comm(
    config: Config,
    *,
    cache_dir: Path,
    max_bytes: int | None = None,
    deadline_s: float = DEADLINE_S,
    sweep_s: float = SWEEP_S,
    tok_per_sec: float | None = None,
    out: Path | None = None,
    progress: Callable[[str, float, float], None] = lambda label, done, total: None,
    worker: Sequence[str] = WORKER,
    entries: Sequence[HostEntry] = (),
    facts: Sequence[Facts] = (),
) -> dict[str, Any]:
    """Tests and measures the collectives; writes the figures to `out`, else under cache_dir, where plans look, and returns them.

    config: device, nproc, and the model whose training step is estimated. entries: several hosts. facts: of each, or of this one.
    tok_per_sec: of one process alone. progress(label, done, total). worker: the command of each rank. Raises TrainingFailed when a
    rank hangs or fails.
    """
    started = time.monotonic()
    machine = machine_of_hosts(facts if entries else ()) or probe_machine()
    machine = of_unknown_memory(machine)  # only the model's messages matter here, not whether it fits
    plan = make_plan(config, machine, vocab_size=config.vocab_size, num_rows=0)
    check_ranks(plan)
    max_bytes = max_bytes or MAX_BYTES[plan.device]
    run = session_folder(cache_dir / "comm")
    sizes = ",".join(map(str, sweep_sizes(max_bytes)))
    command = [*worker, str(run.path), plan.device, sizes, str(sweep_s)]
    silence_s = deadline_s + max_bytes / SLOWEST_BYTES_PER_S
    libuv = all((host["torch"] or {}).get("libuv") is not False for host in facts)
    cluster = cluster_of(entries, config, machine)
    try:
        if cluster:
            cluster.connect(run, text=None, is_kept=False)
        hosts = run_ranks(run, plan, command, deadline_s=silence_s, libuv=libuv, progress=progress, cluster=cluster)
    finally:
        if cluster:
            cluster.close()
    reports = read_reports(run.path / "comm", plan.world_size)
    links = (
        links_between_hosts(plan, hosts, facts)
        if cluster
        else links_between(plan, facts[0]["gpus"] or () if facts else ())
    )
    results = make_results(reports, plan, links, tok_per_sec=tok_per_sec, hosts=hosts)
    file = out or comm_file(cache_dir, list(hosts))
    results |= {"folder": str(run.path), "seconds": round(time.monotonic() - started, 1)}
    if machine.link:  # the same figure tells a plan later whether the link is still like this
        results["tcp_bytes_per_s"] = round(machine.link.bytes_per_s)
    results["replaced_bytes"] = None if out else largest_bytes(file)
    if results["right"] or out is not None:  # a plan must not rely on a machine that computes wrong results
        save_results(results, file)
    return {**results, "file": str(file)}


def largest_bytes(file: Path) -> int | None:
    """Returns the bytes of the largest message of a saved measurement; None where there is none."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        return int(largest_point(json.loads(file.read_text(encoding="utf-8")))["bytes"])
    return None


def save_results(results: Mapping[str, Any], file: Path) -> None:
    try:
        write_atomic(file, json.dumps(results, indent=1) + "\n")
    except OSError as error:
        raise PacelineError(f"{file} cannot be written: {error.strerror}", fix="--out FILE") from error


def check_request(config: Config, *, out: Path | None, entries: Sequence[HostEntry]) -> None:
    """Raises what can be known before the hosts are asked for their facts, which takes seconds."""
    if out is not None:
        check_new_file(out, force=True)
    if config.nproc == 1 and not entries:
        raise no_peer()


def check_ranks(plan: Plan) -> None:
    """Raises PacelineError where the plan has one rank."""
    if plan.world_size > 1:
        return
    if plan.device == "cuda":
        raise PacelineError(
            f"comm tests messages between ranks, and there is one GPU ({plan.device_name})",
            fix="one GPU sends nothing; --device cpu --nproc 2 tests two processes on the CPU",
        )
    raise no_peer()


def no_peer() -> PacelineError:
    return PacelineError("comm tests messages between ranks, and one process has no peer", fix="--nproc 2")


def run_ranks(
    run: RunDir,
    plan: Plan,
    command: list[str],
    *,
    deadline_s: float,
    libuv: bool,
    progress: Callable[[str, float, float], None],
    cluster: Cluster | None = None,
) -> dict[str, Sequence[int]]:
    """Returns when every rank has written its report: the ranks of each of several hosts."""

    def show_progress() -> None:
        heartbeat = read_heartbeat(run.progress(0))
        if heartbeat is not None:
            total = 1.0  # until rank 0 has counted the operations of each rank
            with suppress(OSError, ValueError):
                total = float((run.path / "comm" / "num_operations").read_text())
            progress("testing and timing collectives", heartbeat.step, total)

    outcome = run_session(
        run, plan, command, libuv=libuv, cluster=cluster, on_tick=show_progress, hang_after_s=deadline_s
    )
    if outcome.hang is not None:
        fix = (
            "run paceline comm again; a stopped rank was stopped from outside (Ctrl-Z, a debugger, a frozen container)"
        )
        if plan.device == "cuda":
            fix = "NCCL_P2P_DISABLE=1 paceline comm shows whether the direct path between the cards is at fault"
        raise TrainingFailed(outcome.hang.text, fix=f"logs: {run.logs(1)}; {fix}")
    hosts: dict[str, Sequence[int]] = {m.name: m.ranks for m in cluster.started} if cluster else {}
    if outcome.failures:
        text, fix = first_failure(run, outcome)
        raise TrainingFailed(text, fix=fix)
    return hosts


def links_between_hosts(
    plan: Plan, hosts: Mapping[str, Sequence[int]], facts: Sequence[Facts]
) -> dict[tuple[int, ...], LinkRate]:
    """Returns the link between every two ranks. hosts: the ranks of each, by the name that it has in its facts' connection."""
    by_name = {short_name_of(host): host for host in (Host(host, Intent()) for host in facts)}
    host_of = {rank: name for name, ranks in hosts.items() for rank in ranks}
    ends = {
        frozenset((short_name_of(a), short_name_of(b))): interfaces_of(a, b, link)
        for a, b, link in links_of([*by_name.values()])
    }
    rates: dict[tuple[int, ...], LinkRate] = {}
    for a, b in combinations(range(plan.world_size), 2):
        first, second = host_of[a], host_of[b]
        if first != second:
            nominal = nominal_bits_per_s(ends.get(frozenset((first, second)), ()))
            name = f"{first} to {second}" + (f", {nominal / 1e9:g} Gb/s" if nominal else "")
            rates[a, b] = LinkRate(name, nominal / 8 if nominal else None, network=True)
        elif plan.device == "cpu":
            rates[a, b] = LinkRate(f"loopback of {first}", None)
        else:
            gpus, start = by_name[first].gpus, hosts[first][0]
            rates[a, b] = link_of_gpus(gpus[a - start], gpus[b - start])
    return rates


def short_name_of(host: Host) -> str:
    """Returns the name that a host has in the cluster: its destination without the user."""
    return host.name.rpartition("@")[2]


def links_between(plan: Plan, gpus: Sequence[Mapping[str, Any]]) -> dict[tuple[int, ...], LinkRate]:
    """Returns the link between every two ranks. A rank's GPU is the visible one with its number."""
    pairs = list(combinations(range(plan.world_size), 2))
    if plan.device == "cpu":
        return dict.fromkeys(pairs, LinkRate("loopback", None))
    visible = [gpu for gpu in gpus if gpu["visible"]]
    if len(visible) < plan.world_size:
        return dict.fromkeys(pairs, LinkRate("link unknown", None))
    return {(a, b): link_of_gpus(visible[a], visible[b]) for a, b in pairs}
