"""
Two hosts beside one: the same two ranks on two network namespaces with a real sshd each, and on this host.

    python benchmarks/hosts.py [--starts 5] [--slices 30] [--slice-s 3]

First the median seconds from the command to the end of the first step, in alternating starts. Then tokens/s: both runs are started
and one of them is always stopped (SIGSTOP), in turns of a few seconds, so that a noisy machine is equally noisy for both; the time
that a run was stopped does not count. Printed are both speeds, their ratio, and the ratio in each third of the turns.

The two hosts have one core each, as each rank of the one host has: a rank computes with one thread. For the speeds all processes
are then allowed on all cores, so that paceline's own processes compete with the ranks in the same way. Needs root, openssh-server
and iproute2, as tests/namespaces.py does. The link between the namespaces is this machine's memory: what a real link costs,
`paceline plan --hosts` says.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from paceline.rundir import RunDir, read_json_lines
from paceline.units import parse_time

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from namespaces import WHY_NOT, Hosts, namespaced_hosts

BATCH = 8192  # tokens a step
SIZES = [
    "--depth=4", "--n-embd=128", "--head-dim=64", "--sequence-len=256", "--vocab-size=4096", f"--total-batch-size={BATCH}",
    "--device-batch-size=4", "--precision=fp32", "--no-compile", "--log-every=1", "--eval-every=0", "--eval-tokens=256",
    "--save-every=0",
]  # fmt: skip
PLACES = {"one host": ["--nproc=2"], "two hosts": ["--nproc=1", "--hosts=h1,h2"]}
SETTLED_AFTER = 10  # steps
START_DEADLINE_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--slices", type=int, default=30, help="turns of each run")
    parser.add_argument("--slice-s", type=float, default=3.0, help="seconds of a turn")
    args = parser.parse_args()
    if WHY_NOT:
        sys.exit(f"cannot run: {WHY_NOT}")
    with tempfile.TemporaryDirectory() as name, namespaced_hosts(2, Path(name)) as hosts:
        for place in PLACES:
            measure_start(hosts, place, name=f"warm-{place[:3]}")  # the text is prepared then, and the code is there
        starts: dict[str, list[float]] = {place: [] for place in PLACES}
        for number in range(args.starts):
            for place, seconds in starts.items():
                seconds.append(measure_start(hosts, place, name=f"start-{place[:3]}-{number}"))
            print({place: round(values[-1], 2) for place, values in starts.items()}, file=sys.stderr, flush=True)
        speeds = measure_speeds(hosts, slices=args.slices, slice_s=args.slice_s)
    one, two = speeds.values()
    print("| | command to first step, s | tokens/s |\n|---|---|---|")
    for place in PLACES:
        print(f"| {place} | {statistics.median(starts[place]):.2f} | {speeds[place].between(0, 1):,.0f} |")
    one_s, two_s = (statistics.median(values) for values in starts.values())
    thirds = [two.between(part / 3, (part + 1) / 3) / one.between(part / 3, (part + 1) / 3) for part in range(3)]
    ratio = two.between(0, 1) / one.between(0, 1)
    print(
        f"| two hosts beside one | {two_s - one_s:+.2f} s | {ratio:.3f} (thirds: {', '.join(f'{x:.3f}' for x in thirds)}) |"
    )


def start(hosts: Hosts, place: str, *, name: str, steps: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "paceline.cli", "train", *SIZES, *PLACES[place], f"--num-steps={steps}"]
    command += [f"--runs-dir={hosts.private / 'runs'}", f"--name={name}"]
    command = hosts.command("h1", command, cores="all" if place == "one host" else "one")
    return subprocess.Popen(
        command, env=hosts.env("h1"), cwd=hosts.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def step_times(hosts: Hosts, name: str) -> list[float]:
    """Returns when each step ended, in seconds since 1970."""
    path = RunDir(hosts.on("h1", hosts.private / "runs") / name).metrics
    return (
        [parse_time(line["time"]) for line in read_json_lines(path) if "tok_per_sec" in line] if path.exists() else []
    )


def measure_start(hosts: Hosts, place: str, *, name: str) -> float:
    """Returns seconds from the command to the end of the first step."""
    began = time.time()
    if code := start(hosts, place, name=name, steps=2).wait():
        sys.exit(f"{place}: paceline train ended with exit code {code}")
    return step_times(hosts, name)[0] - began


@dataclass
class Speed:
    """One run's progress while it was allowed to go on."""

    turns: list[tuple[float, float]] = field(default_factory=list)  # began, ended; seconds since 1970
    steps: list[float] = field(default_factory=list)  # when each ended

    def active_s(self, until: float) -> float:
        """Returns for how long the run went on before a moment."""
        return sum(max(0.0, min(ended, until) - began) for began, ended in self.turns)

    def between(self, first: float, last: float) -> float:
        """Returns tokens/s from one share of the turns to another."""
        began, ended = (self.turns[round(share * (len(self.turns) - 1))][0] for share in (first, last))
        inside = self.steps[bisect_right(self.steps, began) : bisect_right(self.steps, ended)]
        return BATCH * (len(inside) - 1) / (self.active_s(inside[-1]) - self.active_s(inside[0]))


def measure_speeds(hosts: Hosts, *, slices: int, slice_s: float) -> dict[str, Speed]:
    """Both runs in turns; steps before the first turn count as warming up."""
    speeds = {place: Speed() for place in PLACES}
    names = {place: f"speed-{place[:3]}" for place in PLACES}
    served = pids_on(hosts)
    groups: dict[str, set[int]] = {}
    others: set[int] = set(served)
    try:
        for place in PLACES:
            process = start(hosts, place, name=names[place], steps=100_000)
            wait_until_settled(hosts, names[place], process)
            groups[place] = pids_on(hosts) - others
            others |= groups[place]
            send(signal.SIGSTOP, groups[place])
            allow_all_cores(groups[place])
        for _ in range(slices):
            for place in PLACES:
                with running(groups[place]):
                    began = time.time()
                    time.sleep(slice_s)
                    speeds[place].turns.append((began, time.time()))
        for place, speed in speeds.items():
            speed.steps = step_times(hosts, names[place])
    finally:
        send(signal.SIGKILL, pids_on(hosts) - served)
    return speeds


def wait_until_settled(hosts: Hosts, name: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    while len(step_times(hosts, name)) < SETTLED_AFTER:
        if process.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"{name} did not come to step {SETTLED_AFTER}")
        time.sleep(0.2)


@contextmanager
def running(pids: set[int]) -> Iterator[None]:
    send(signal.SIGCONT, pids)
    try:
        yield
    finally:
        send(signal.SIGSTOP, pids)


def pids_on(hosts: Hosts) -> set[int]:
    """Returns the processes on all hosts."""
    listed = [
        subprocess.run(["ip", "netns", "pids", hosts.prefix + host], capture_output=True, text=True, check=True).stdout
        for host in hosts.names
    ]
    return {int(pid) for text in listed for pid in text.split()}


def allow_all_cores(pids: set[int]) -> None:
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                os.sched_setaffinity(int(thread), range(os.cpu_count() or 1))


def send(what: signal.Signals, pids: set[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, what)


if __name__ == "__main__":
    main()
