"""
`paceline comm`: do collectives between the ranks here give right results, how fast are they, what does that mean for training.

Starts train/selftest.py once per rank as a run's workers are started, watches that all get on, gathers what each rank wrote
and holds the speed against the links. No torch. The figures are kept in a file for whoever plans a run on this host.
"""

import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from paceline.check.links import (
    Fit,
    Link,
    bus_factor,
    fit_line,
    link_of_gpus,
    link_verdict,
    locate,
    sweep_sizes,
    training_cost,
)
from paceline.config import Config
from paceline.errors import PacelineError, TrainingFailed
from paceline.launch.env import worker_env
from paceline.launch.failure import Failure
from paceline.launch.hang import HangWatch, Progress
from paceline.launch.supervisor import run_attempt
from paceline.plan.machine import Machine, probe_machine
from paceline.plan.planner import Plan, make_plan
from paceline.rundir import RunDir, utc_now, write_atomic
from paceline.units import MIB, format_bytes

WORKER = (sys.executable, "-m", "paceline.train.selftest")
MAX_BYTES = {"cuda": 256 * MIB, "cpu": 16 * MIB}
SMALLEST_BYTES = 4096
SWEEP_S = 4.0  # about: slow operations are done five times at least
DEADLINE_S, SHORTEST_DEADLINE_S = 10.0, 1.0
SLOWEST_BYTES_PER_S = 100e6  # of 1 Gb Ethernet: the deadline leaves time for the largest message at this rate
STOP_GRACE_S = 1.0  # there is nothing to save
KEEP_FOLDERS = 10  # of the last runs, with every rank's log
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")


class CommFailed(PacelineError):
    """A rank ended before it had measured, or measured wrong results."""

    exit_code = TrainingFailed.exit_code


def measure_comm(
    config: Config,
    *,
    cache_dir: Path,
    gpus: Sequence[Mapping[str, Any]] = (),
    max_bytes: int | None = None,
    deadline_s: float = DEADLINE_S,
    sweep_s: float = SWEEP_S,
    tok_per_sec: float | None = None,
    out: Path | None = None,
    libuv: bool = True,
    progress: Callable[[str, float, float], None] = lambda label, done, total: None,
    worker: Sequence[str] = WORKER,
) -> dict[str, Any]:
    """Tests and measures; writes the figures to `out`, else to comm.json under cache_dir, and returns them.

    config: device, nproc, and the model whose step is reckoned. gpus: the section of that name in this host's facts.
    tok_per_sec: of one process alone. libuv: whether this torch has it. progress(label, done, total). worker: the command that
    is started once per rank.
    """
    started = time.monotonic()
    plan = make_plan(config, of_any_memory(probe_machine()), vocab_size=config.vocab_size, num_rows=0)
    check_ranks(plan)
    max_bytes = max_bytes or MAX_BYTES[plan.device]
    if max_bytes < SMALLEST_BYTES:
        raise PacelineError(
            f"max-bytes is {max_bytes:,}, too small to tell latency from bandwidth", fix=f"--max-bytes {MIB}"
        )
    if deadline_s < SHORTEST_DEADLINE_S:
        raise PacelineError(
            f"deadline is {deadline_s:g} s, a busy machine may be silent for as long", fix=f"--deadline {DEADLINE_S:g}"
        )
    run = new_folder(cache_dir)
    sizes = ",".join(map(str, sweep_sizes(max_bytes)))
    arguments = [str(run.path), "--device", plan.device, "--sizes", sizes, "--sweep-s", str(sweep_s)]
    silence_s = deadline_s + max_bytes / SLOWEST_BYTES_PER_S
    run_ranks(run, plan, [*worker, *arguments], deadline_s=silence_s, libuv=libuv, progress=progress)
    reports = [json.loads((run.path / "comm" / f"{rank}.json").read_text()) for rank in range(plan.world_size)]
    results = make_results(reports, plan, links_between(plan, gpus), tok_per_sec=tok_per_sec)
    results |= {"folder": str(run.path), "seconds": round(time.monotonic() - started, 1)}
    file = out or cache_dir / "comm.json"
    if results["right"] or out is not None:  # a plan must not count on a machine that computes wrong
        write_results(file, results)
    return {**results, "file": str(file)}


def of_any_memory(machine: Machine) -> Machine:
    """Whether the model would fit is not asked: only its messages are."""
    return replace(machine, gpus=tuple(replace(gpu, memory_bytes=0) for gpu in machine.gpus), memory_bytes=0)


def check_ranks(plan: Plan) -> None:
    if plan.world_size > 1:
        return
    if plan.device == "cuda":
        raise PacelineError(
            f"comm tests what goes between ranks, and there is one GPU ({plan.device_name})",
            fix="with one GPU nothing is sent; --device cpu --nproc 2 tests two processes on the CPU",
        )
    raise PacelineError("comm tests what goes between ranks, and one process has nobody to talk to", fix="--nproc 2")


def new_folder(cache_dir: Path) -> RunDir:
    """Kept afterwards, as long as it is among the newest."""
    parent = cache_dir / "comm"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=parent))
    except OSError as error:
        raise PacelineError(
            f"{parent} cannot be written: {error.strerror}", fix="--cache-dir DIR in a place you can write"
        ) from error
    for old in sorted(parent.iterdir())[:-KEEP_FOLDERS]:
        shutil.rmtree(old, ignore_errors=True)
    return RunDir(path)


def write_results(file: Path, results: Mapping[str, Any]) -> None:
    try:
        write_atomic(file, json.dumps(results, indent=1) + "\n")
    except OSError as error:
        raise PacelineError(f"{file} cannot be written: {error.strerror}", fix="--out FILE") from error


def run_ranks(
    run: RunDir,
    plan: Plan,
    command: list[str],
    *,
    deadline_s: float,
    libuv: bool,
    progress: Callable[[str, float, float], None],
) -> None:
    """Returns when every rank has written its report."""

    def show(rank_progress: Progress) -> None:
        progress("testing and timing collectives", rank_progress["step"], rank_progress["of"] or 1)

    watch = HangWatch(
        run,
        attempt=1,
        nproc=plan.world_size,
        deadline_s=deadline_s,
        on_progress=show,
        fix=f"logs: {run.logs(1)}; " + hang_fix(plan),
    )
    env, _ = worker_env(
        dict(os.environ),
        nproc=plan.world_size,
        device=plan.device,
        cpu_cores=plan.threads * plan.world_size,
        libuv=libuv,
    )
    outcome = run_attempt(
        run,
        command=command,
        nproc=plan.world_size,
        attempt=1,
        env=env,
        lock_fd=None,
        on_tick=watch.poll,
        stop_grace_s=STOP_GRACE_S,
        libuv=libuv,
    )
    if outcome.state == "interrupted":
        raise KeyboardInterrupt
    if outcome.root is not None:
        raise failed(run, outcome.root)


def hang_fix(plan: Plan) -> str:
    if plan.device == "cuda":
        return "NCCL_P2P_DISABLE=1 paceline comm tells whether the direct path between the cards is at fault"
    return (
        "paceline comm again; a rank that is stopped was stopped from outside (Ctrl-Z, a debugger, a frozen container)"
    )


def failed(run: RunDir, root: Failure) -> CommFailed:
    who = "the launch" if root.rank is None else f"rank {root.rank}"
    return CommFailed(f"{who} failed: {root.message}", fix=root.fix or f"the logs tell more: {run.logs(1)}")


def links_between(plan: Plan, gpus: Sequence[Mapping[str, Any]]) -> dict[tuple[int, ...], Link]:
    """For each two ranks. A rank's GPU is the visible one of its number."""
    pairs = list(combinations(range(plan.world_size), 2))
    if plan.device == "cpu":
        return dict.fromkeys(pairs, Link("loopback", None))
    visible = [gpu for gpu in gpus if gpu["visible"]]
    if len(visible) < plan.world_size:
        return dict.fromkeys(pairs, Link("link unknown", None))
    return {(a, b): link_of_gpus(visible[a], visible[b]) for a, b in pairs}


def make_results(
    reports: Sequence[Mapping[str, Any]],
    plan: Plan,
    links: Mapping[tuple[int, ...], Link],
    *,
    tok_per_sec: float | None,
) -> dict[str, Any]:
    """What all ranks say together. The slowest rank's time counts: a step waits for it."""
    wrong = [each for report in reports for each in report["wrong"]]
    first = reports[0]
    results: dict[str, Any] = {
        "version": 1,
        "time": utc_now(),
        "host": socket.gethostname(),
        "device": plan.device,
        "device_names": [report["device"] for report in reports],
        "backend": first["backend"],
        "torch": first["torch"],
        "world_size": plan.world_size,
        "checks": first["checks"],
        "dtypes": first["dtypes"],
        "tested": first["collectives"],
        "right": not wrong,
        "wrong": wrong,
        "where": locate(wrong) if wrong else None,
        "collectives": {},
        "pairs": [],
        "training": None,
    }
    if wrong:
        return results
    seconds: dict[tuple[str, tuple[int, ...]], dict[int, float]] = {}
    for each in (each for report in reports for each in report["speed"]):
        sizes = seconds.setdefault((each["collective"], tuple(each["ranks"])), {})
        sizes[each["bytes"]] = max(sizes.get(each["bytes"], 0.0), each["seconds"])
    curves = {key: curve(key[0], len(key[1]), sizes) for key, sizes in seconds.items()}
    collectives = {name: curves[name, tuple(range(plan.world_size))] for name in COLLECTIVES}
    pairs = []
    for ranks, link in links.items():
        measured = curves["p2p", ranks]
        share, verdict = link_verdict(link, measured["points"][-1]["bus_bytes_per_s"])
        pairs.append({"ranks": list(ranks), "link": asdict(link), **measured, "share": share, "verdict": verdict})
    fits = {name: Fit(each["latency_s"], each["bytes_per_s"]) for name, each in collectives.items()}
    training = training_cost(plan, fits, tok_per_sec=tok_per_sec)
    return {**results, "collectives": collectives, "pairs": pairs, "training": training}


def curve(collective: str, world_size: int, seconds: Mapping[int, float]) -> dict[str, Any]:
    """Its points by size, and the line through them: seconds = latency_s + bytes / bytes_per_s."""
    points = sorted(seconds.items())
    factor = bus_factor(collective, world_size)
    return {
        **asdict(fit_line(points)),
        "points": [
            {
                "bytes": size,
                "seconds": each_s,
                "algorithm_bytes_per_s": size / each_s,
                "bus_bytes_per_s": factor * size / each_s,
            }
            for size, each_s in points
        ],
    }


def format_comm(results: Mapping[str, Any]) -> str:
    names = list(dict.fromkeys(results["device_names"]))
    who = f"{results['world_size']} x {names[0]}" if len(names) == 1 else ", ".join(results["device_names"])
    head = f"ranks   {who} on {results['host']}, {results['backend']}, torch {results['torch']}"
    tested = f"{results['checks']} checks of {len(results['tested'])} operations in {', '.join(results['dtypes'])}"
    if not results["right"]:
        return "\n".join(
            [head, f"wrong   {len(results['wrong'])} of what the ranks got; {tested}", *format_wrong(results)]
        )
    return "\n".join(
        [
            head,
            f"right   {tested}: every rank has the right results",
            "",
            *format_summary(results),
            "",
            *format_sizes(results),
            "",
            *(format_link(pair) for pair in results["pairs"]),
            f"train   {format_training(results['training'])}",
            f"kept    {results['file']}, {results['seconds']:.0f} s",
        ]
    )


def format_wrong(results: Mapping[str, Any]) -> list[str]:
    """One line for each operation and rank that had wrong results, and who it must be."""
    lines: dict[tuple[str, int], str] = {}
    for each in results["wrong"]:
        lines.setdefault((each["collective"], each["rank"]), f"        rank {each['rank']}: {format_one_wrong(each)}")
    return [
        *lines.values(),
        f"where   {results['where']}",
        f"fix     {wrong_fix(results)}",
        f"logs    {results['folder']}",
    ]


def format_one_wrong(wrong: Mapping[str, Any]) -> str:
    name, sender = wrong["collective"], wrong["sender"]
    if wrong["index"] is None:
        return f"{name}: {wrong['got']}"
    return (
        f"{name}{'' if sender is None else f' from rank {sender}'} of {wrong['numel']:,} {wrong['dtype']}: element"
        f" {wrong['index']:,} is {wrong['got']}, must be {wrong['expected']} ({wrong['num_wrong']:,} wrong)"
    )


def wrong_fix(results: Mapping[str, Any]) -> str:
    if results["device"] == "cuda":
        return "NCCL_P2P_DISABLE=1 paceline comm: right with it, leave it set (the direct path between the cards is at fault)"
    return (
        "do not train here before this is found: memory (memtest86), network card, torch build (paceline torch check)"
    )


def format_summary(results: Mapping[str, Any]) -> list[str]:
    lines = [f"{'':<16}{'latency':>9}{'algorithm':>13}{'bus':>13}"]
    curves = dict(results["collectives"])
    for pair in results["pairs"]:
        curves[f"p2p {pair['ranks'][0]}-{pair['ranks'][1]}"] = pair
    for name, each in curves.items():
        last = each["points"][-1]
        speeds = (last["algorithm_bytes_per_s"], last["bus_bytes_per_s"])
        rates = "".join(f"{format_rate(speed):>13}" for speed in speeds)
        lines.append(f"{name:<16}{format_seconds(each['points'][0]['seconds']):>9}{rates}")
    smallest, largest = (results["collectives"]["all_reduce"]["points"][i]["bytes"] for i in (0, -1))
    return [*lines, f"{'':<16}latency at {format_bytes(smallest)}, bandwidth at {format_bytes(largest)}"]


def format_sizes(results: Mapping[str, Any]) -> list[str]:
    """A row for each size: time and bus bandwidth of every collective."""
    curves = results["collectives"]
    lines = ["bus GB/s" + "".join(f"{name:>17}" for name in curves)]
    for i, point in enumerate(curves["all_reduce"]["points"]):
        cells = [each["points"][i] for each in curves.values()]
        shown = "".join(f"{format_seconds(c['seconds']):>9}{c['bus_bytes_per_s'] / 1e9:>8.3f}" for c in cells)
        lines.append(f"{format_bytes(point['bytes']):<8}{shown}")
    return lines


def format_link(pair: Mapping[str, Any]) -> str:
    measured, should = pair["points"][-1]["bus_bytes_per_s"], pair["link"]["bytes_per_s"]
    held = f"{pair['share']:.0%} of {format_rate(should)}: " if should else ""
    return (
        f"link    {pair['ranks'][0]}-{pair['ranks'][1]} {pair['link']['name']}, {format_rate(measured)},"
        f" {held}{pair['verdict']}"
    )


def format_training(training: Mapping[str, Any]) -> str:
    step = f"a depth-{training['depth']} step of {training['total_batch_size']:,} tokens"
    rate, sending = format_rate(training["bus_bytes_per_s"]), format_seconds(training["sending_s"])
    if training["computing_s"] is None:
        return (
            f"at {rate} {step} sends for {sending}; its compute time is unknown ({training['computing_from']}):"
            " --tok-per-sec N, as one process alone reaches, tells the share"
        )
    return (
        f"at {rate} {step} spends up to {training['waiting_share']:.0%} waiting: {sending} of sending, in part under"
        f" {format_seconds(training['computing_s'])} of compute ({training['computing_from']})"
    )


def format_rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s"


def format_seconds(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
