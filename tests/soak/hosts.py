"""
The fault loop of several hosts: real runs over real ssh servers in network namespaces, one fault each, and what became of it.

    python -m soak.hosts [--seed 1] [--faults 60] [--only power,cable]     (PYTHONPATH=tests, as root)

The exit code is 1 if a fault was not recovered from correctly. The same seed gives the same faults at the same places.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from hosts_run import FAULTS, HostsRun, set_cable, undo
from namespaces import Hosts, namespaced_hosts

from paceline.heartbeat import read_heartbeat
from paceline.model.manifest import newest_good, read_manifest
from paceline.rundir import RunDir
from paceline.units import parse_time

PHASES = ("start", "step", "save", "eval")
SAVE_EVERY = 6
KEYS = (
    "--num-steps",
    "30",
    "--save-every",
    str(SAVE_EVERY),
    "--eval-every",
    "6",
    "--eval-tokens",
    "8192",
    "--no-rejoin",
)
PLACE_S = 120.0  # to come to the place of the fault


@dataclass(frozen=True)
class Result:
    """What became of one fault."""

    fault: str
    phase: str
    cause: str
    noticed_s: float
    resumed_s: float  # to the first step of the next attempt
    problems: tuple[str, ...]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--only", help=f"kinds, of {', '.join(FAULTS)}")
    args = parser.parse_args()
    kinds = args.only.split(",") if args.only else list(FAULTS)
    with tempfile.TemporaryDirectory() as name, namespaced_hosts(2, Path(name)) as hosts:
        results = soak(hosts, seed=args.seed, count=args.faults, kinds=kinds)
    print(format_table(results))
    return 1 if any(result.problems for result in results) else 0


def soak(hosts: Hosts, *, seed: int, count: int, kinds: Sequence[str]) -> list[Result]:
    """Makes a run for each fault and one without any."""
    chance = random.Random(seed)
    unbroken = HostsRun(hosts, "unbroken", *KEYS)
    unbroken.end()
    expected, results = last_files(unbroken.run), []
    for number in range(count):
        fault, phase = chance.choice(kinds), chance.choice(PHASES)
        results.append(one_fault(hosts, f"run{number}", fault, phase, after=chance.randint(3, 14), expected=expected))
        print(f"{number + 1}/{count} {results[-1]}", flush=True)
    return results


def one_fault(hosts: Hosts, name: str, fault: str, phase: str, *, after: int, expected: dict[str, str]) -> Result:
    """Injects a fault at a place of a run and judges what follows. after: steps before it."""
    inject, cause, is_kept = FAULTS[fault]
    run, problems = HostsRun(hosts, name, *KEYS), list[str]()
    try:
        reach(run, phase, after)
        step, since = max(run.step(), 0), time.time()
        inject(run)
        run.end()
        verdict = next(iter(run.events("verdict")), {})
        resumed = next(iter(run.events("resumed")), {"step": 0})
        failed = [parse_time(event["time"]) for event in run.events("rank_failed")]
        steps = [parse_time(line["time"]) for line in run.lines() if parse_time(line["time"]) > since + 1]
        if (verdict.get("cause"), verdict.get("host")) != (cause, "h2"):
            problems.append(f"the cause is {verdict.get('cause')} of {verdict.get('host')}, not {cause} of h2")
        if step - resumed["step"] > SAVE_EVERY:
            problems.append(f"{step - resumed['step']} steps lost")
        if is_kept and last_files(run.run) != expected:
            problems.append("other weights than without the fault")
        undo(run, "h2")
        problems += [f"left: {line}" for line in run.left("h1") + run.left("h2")]
        noticed_s = min(failed, default=since) - since
        resumed_s = min((time for time in steps if failed and time > failed[0]), default=since) - since
        return Result(fault, phase, str(verdict.get("cause")), noticed_s, resumed_s, tuple(problems))
    except (AssertionError, subprocess.TimeoutExpired) as error:
        return Result(fault, phase, "none", 0.0, 0.0, (*problems, str(error)[-400:]))
    finally:
        run.close()
        undo(run, "h2")
        set_cable(hosts, "h2", "up")


def reach(run: HostsRun, phase: str, after: int) -> None:
    """Waits until the run is at the place: at the start of its ranks, or after some steps in this phase."""
    if phase == "start":
        run.wait_for(lambda: run.events("attempt"))
        return
    run.wait_for(lambda: run.step() >= after)
    deadline = time.monotonic() + PLACE_S
    while phase != "step" and time.monotonic() < deadline and run.process.poll() is None:
        heartbeat = read_heartbeat(run.run.progress(0))
        if heartbeat and heartbeat.phase == phase:
            return
        time.sleep(0.002)


def last_files(run: RunDir) -> dict[str, str]:
    path, _ = newest_good(run.checkpoints, set_aside=False)
    return {name: entry.sha256 for name, entry in read_manifest(path).files.items()}


def format_table(results: Sequence[Result]) -> str:
    """Returns a line for each kind of fault: how often, noticed after, next step after, and what went wrong."""
    kinds: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        kinds[result.fault].append(result)
    lines = ["| fault | number | noticed, s | next step, s | problems |", "|---|---|---|---|---|"]
    for kind, group in kinds.items():
        noticed, resumed = (
            f"{median(values):.1f}, at most {max(values):.1f}"
            for values in ([r.noticed_s for r in group], [r.resumed_s for r in group])
        )
        problems = "; ".join(problem for result in group for problem in result.problems) or "none"
        lines.append(f"| {kind} | {len(group)} | {noticed} | {resumed} | {problems} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
