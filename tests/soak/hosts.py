"""
The fault loop of several hosts: real runs over real ssh servers in network namespaces, one fault each, and what became of it.

    python -m soak.hosts [--seed 1] [--faults 68] [--only power,cable] [--out FILE] [--write docs/reliability.md]
    (PYTHONPATH=tests, as root)

The same seed gives the same faults at the same places; every kind comes in every phase before one is repeated. --out: a file that
gets a line of JSON for each fault; a loop that was broken off continues from it. The exit code is 1 if a fault was not recovered
from correctly.
"""

import argparse
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import namespaces
from hosts_run import DEADLINE_S, FAULTS, HostFault, HostsRun, has_netem, kill_all, last_files, small_disk, undo
from namespaces import Hosts, namespaced_hosts
from soak.faults import PHASES
from soak.table import HostResult, Place, format_hosts, write_page

from paceline.errors import PacelineError
from paceline.heartbeat import read_heartbeat
from paceline.model.manifest import newest_folder
from paceline.rundir import RunDir
from paceline.units import parse_time

INTERVAL = 10  # steps from one checkpoint to the next, and from one evaluation to the next
KEYS = ("--save-every", str(INTERVAL), "--eval-every", str(INTERVAL), "--eval-tokens", "16384")
DISK_BYTES = 128 << 20  # of h2: code, text and the copies of one run
NEED_NFT = ("loss", "mtu", "ports")  # the first where the kernel has no netem
ENOUGH_S = 180.0  # for the part of a run after its fault


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, help="of each kind one in every phase, if left out")
    parser.add_argument("--only", help=f"kinds, of {', '.join(FAULTS)}")
    parser.add_argument("--out", type=Path, help="a file for the results; those that it has are not repeated")
    parser.add_argument("--write", type=Path, help="the page whose section about several hosts is replaced")
    parser.add_argument("--keep", type=Path, help="a folder for the outputs of runs with problems")
    args = parser.parse_args()
    if namespaces.WHY_NOT:
        print(f"skipped: the fault loop of several hosts: {namespaces.WHY_NOT}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing stays mounted
    kinds, notes = args.only.split(",") if args.only else list(FAULTS), list[str]()
    if not shutil.which("nft"):
        kinds = [kind for kind in kinds if kind not in NEED_NFT]
        notes.append(f"Not tried, as nft is missing (apt install nftables): {', '.join(NEED_NFT)}.")
        print(f"skipped: {notes[-1]}", flush=True)
    places = sample(args.seed, args.faults or len(kinds) * len(PHASES), kinds=kinds) if kinds else []
    results = read_results(args.out, places)
    with tempfile.TemporaryDirectory() as name, hosts_with_small_disk(Path(name)) as hosts:
        if "loss" in kinds and not has_netem(hosts):
            notes.append("Packets are lost by a rule of nft: this kernel has no netem.")
            print(f"skipped: netem. {notes[-1]}", flush=True)
        for result in soak(hosts, places[len(results) :], keep=args.keep, done=len(results)):
            results.append(result)
            if args.out:
                with args.out.open("a") as file:
                    file.write(json.dumps(asdict(result)) + "\n")
    text = format_hosts(results, FAULTS, seed=args.seed, interval=INTERVAL, notes=notes)
    print(text)
    if args.write:
        write_page(args.write, several=text)
    return 1 if any(result.problems for result in results) else 0


def sample(seed: int, count: int, *, kinds: Sequence[str] = tuple(FAULTS)) -> list[Place]:
    """Returns faults of every kind in turn, each in all phases before one is repeated."""
    rng = random.Random(seed)
    first = {kind: rng.randrange(len(PHASES)) for kind in FAULTS}
    turns = [(kinds[number % len(kinds)], number // len(kinds)) for number in range(count)]
    phases = [(kind, PHASES[(first[kind] + turn) % len(PHASES)]) for kind, turn in turns]
    return [Place(kind, phase, rng.randint(INTERVAL + 3, 2 * INTERVAL - 2)) for kind, phase in phases]


def read_results(path: Path | None, places: Sequence[Place]) -> list[HostResult]:
    """Returns the results of an earlier loop; those of another seed or other kinds are refused."""
    if path is None or not path.exists():
        return []
    records = [json.loads(line) for line in path.read_text().splitlines()]
    results = [HostResult(**{**r, "fault": Place(**r["fault"]), "problems": tuple(r["problems"])}) for r in records]
    if [result.fault for result in results] != list(places[: len(results)]):
        sys.exit(f"{path} is from another loop: give another --out")
    return results


@contextmanager
def hosts_with_small_disk(folder: Path) -> Iterator[Hosts]:
    """Makes two hosts; the cache of h2 has a disk of its own."""
    disk = small_disk(folder, "h2")
    disk.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", disk], check=True)
    try:
        with namespaced_hosts(2, folder) as hosts:
            yield hosts
    finally:
        subprocess.run(["umount", "-l", disk], check=False)


def soak(hosts: Hosts, places: Sequence[Place], *, keep: Path | None, done: int) -> Iterator[HostResult]:
    """Makes a run without any fault, and one for each fault."""
    if not places:
        return
    began, total = time.monotonic(), done + len(places)
    unbroken = HostsRun(hosts, "unbroken", "--num-steps", str(FAULTS["rank"].num_steps), *KEYS)
    unbroken.end()
    expected = last_files(unbroken.run)
    for number, place in enumerate(places, 1):
        name = f"run{done + number:02d}-{place.kind}-{place.phase}"
        result = one_fault(hosts, name, place, expected=expected)
        eta_s = (time.monotonic() - began) / number * (len(places) - number)
        print(f"{done + number}/{total} | eta {eta_s / 60:.0f} min | {describe(result)}", flush=True)
        if result.problems and keep:
            keep.mkdir(parents=True, exist_ok=True)
            for path in (*hosts.folder.glob(f"{name}.out"), *hosts.folder.rglob(f"runs/**/{name}/events.jsonl")):
                shutil.copy(path, keep / f"{name}.{'-'.join(path.relative_to(hosts.folder).parts[:1])}.{path.name}")
        for path in (
            *hosts.folder.glob(f"h?/private/runs/{name}"),
            *hosts.folder.glob(f"h?/cache/paceline/runs/*/{name}"),
        ):
            shutil.rmtree(path, ignore_errors=True)
        yield result


def one_fault(hosts: Hosts, name: str, place: Place, *, expected: dict[str, str]) -> HostResult:
    """Injects a fault at a place of a run and judges what follows."""
    fault, began = FAULTS[place.kind], time.monotonic()
    run = HostsRun(hosts, name, "--num-steps", str(fault.num_steps), *KEYS, *fault.keys)
    result = HostResult(place, "none", False, None, None, None, 0.0, ())
    try:
        reach(run, place)
        since, step, saved = (
            time.time(),
            max(run.step(), 0),
            newest_step(run.copy if fault.then == "copy" else run.run.path),
        )
        fault.inject(run)
        noticed = follow(run, fault, since)
        result = judge(run, place, since=since, step=step, saved=saved, noticed=noticed, expected=expected)
    except (AssertionError, subprocess.TimeoutExpired, PacelineError, StopIteration) as error:
        result = replace(result, problems=(f"{type(error).__name__}: {str(error)[-600:]}",))
    finally:
        undo(run)
        run.close()
    left = [] if result.problems else run.left("h1") + run.left("h2")
    for host in hosts.names:  # what is left, or goes on after a problem, must not disturb the next run
        kill_all(run, host)
    problems = (*result.problems, *(f"left: {line[:80]}" for line in left))
    return replace(result, seconds=round(time.monotonic() - began, 1), problems=problems)


def reach(run: HostsRun, place: Place) -> None:
    """Waits until the run is at the place: at the start of its ranks, or after some steps in this phase."""
    if place.phase == "start":
        run.wait_for(lambda: run.events("attempt"))
        return
    run.wait_for(lambda: run.step() >= place.after)
    run.wait_for(lambda: newest_step(run.run.path) >= INTERVAL and newest_step(run.copy) >= INTERVAL)
    conditions: dict[str, Callable[[], object]] = {
        "step": lambda: True,
        "save": lambda: list(run.run.checkpoints.glob(".step_*.tmp")),
        "eval": lambda: (beat := read_heartbeat(run.run.progress(0))) and beat.phase == "eval",
    }
    deadline = time.monotonic() + DEADLINE_S
    while not conditions[place.phase]():
        assert run.process.poll() is None and time.monotonic() < deadline, f"no {place.phase} was reached: {run.output}"
        time.sleep(0.001)


def newest_step(run: Path) -> int:
    """Returns the step of the newest whole checkpoint in a run folder; 0 where it has none."""
    folder = newest_folder(run / "checkpoints")
    return int(folder.name.removeprefix("step_")) if folder else 0


def follow(run: HostsRun, fault: HostFault, since: float) -> float | None:
    """Stays with the run to its end; undoes the fault when it is time, and resumes a run whose command has ended.

    Returns when everything had ended, of a run that nobody supervised.
    """
    if fault.then in ("here", "copy"):
        run.process.wait(ENOUGH_S)
        if fault.host == "h1" and fault.report:
            assert run.process.returncode == 1, run.output
        left = run.left("h1", timeout_s=fault.noticed_s) + run.left("h2", timeout_s=fault.noticed_s)
        ended = time.time()
        assert not left, f"left before the run was resumed: {left}"
        undo(run)
        if fault.then == "copy":
            run.run = RunDir(run.copy)
            run.resume("h2", run.copy, "--no-rejoin", listed="h2,h1")
        else:
            run.resume("h1", run.path, "--no-rejoin")
        run.end()
        return ended
    if fault.for_s is not None:
        time.sleep(max(0.0, since + fault.for_s - time.time()))
        undo(run)
    if fault.until is not None:
        run.wait_for(lambda: fault.until and fault.until(run))
        undo(run)
    if fault.then == "join":
        run.wait_for(lambda: len(run.events("attempt")) == 3)
        joined = run.events("attempt")[2]["time"]
        run.wait_for(lambda: any(line["time"] > joined for line in run.lines()))
        run.stop()
    else:
        run.process.wait(ENOUGH_S)
        assert run.process.returncode == 0, run.output
    return None


def judge(
    run: HostsRun, place: Place, *, since: float, step: int, saved: int, noticed: float | None, expected: dict[str, str]
) -> HostResult:
    """Returns what became of a fault. step: done when it struck; saved: of the newest whole checkpoint then."""
    fault, problems = FAULTS[place.kind], list[str]()
    verdicts, attempts = run.events("verdict"), run.events("attempt")
    verdict = verdicts[0] if verdicts else {}
    cause = verdict.get("cause")
    is_placed = verdict.get("host") == fault.host and verdict.get("rank") in fault.ranks
    right = cause in fault.causes and (cause is None or is_placed)
    if fault.report and not re.search(fault.report, run.output):
        right = False
        problems.append(f"nothing reports {fault.report!r}")
    if not right:
        problems.append(
            f"the cause is {cause} of {verdict.get('rank')} on {verdict.get('host')}: {verdict.get('summary')}"
        )
    if len(verdicts) > 1:
        problems.append(f"more failures: {', '.join(event['cause'] for event in verdicts[1:])}")
    failed = [parse_time(event["time"]) for kind in ("hang", "rank_failed") for event in run.events(kind)]
    noticed = noticed or min(failed, default=None)
    notice_s = None if noticed is None or not verdicts else noticed - since
    if notice_s is not None and notice_s > fault.noticed_s:
        problems.append(f"noticed after {notice_s:.1f} s")
    lost = resume_s = None
    if verdicts:
        lost = max(0, step - next((event["step"] for event in run.events("resumed")), 0))
        if lost > max(INTERVAL, step - saved):
            problems.append(f"{lost} steps lost")
        steps = [parse_time(line["time"]) for line in run.lines()]
        resume_s = next(
            (time - since for time in steps if len(attempts) > 1 and time > parse_time(attempts[1]["time"])), None
        )
    sizes = [event["world_size"] for event in attempts]
    usual = {"none": [2], "retry": [2, 2], "alone": [2, 1], "join": [2, 1, 2], "here": [2, 2], "copy": [2, 2]}[
        fault.then
    ]
    if sizes != usual and not (cause is None and None in fault.causes and sizes == [2]):
        problems.append(f"attempts with {sizes} ranks")
    numbers = [line["step"] for line in run.lines() if "loss" in line]
    if numbers != list(range(1, len(numbers) + 1)):
        problems.append(f"metrics.jsonl has the steps {numbers}")
    if fault.then not in ("alone", "join") and last_files(run.run) != expected:
        problems.append("the weights differ from those of the undisturbed run")
    return HostResult(place, str(cause), right, notice_s, lost, resume_s, 0.0, tuple(problems))


def describe(result: HostResult) -> str:
    notice = "" if result.notice_s is None else f", noticed after {result.notice_s:.1f} s"
    lost = "" if result.lost_steps is None else f", {result.lost_steps} steps lost"
    resume = "" if result.resume_s is None else f", next step after {result.resume_s:.1f} s"
    problems = "".join(f"\n  PROBLEM {text}" for text in result.problems)
    return f"{result.fault.kind} at {result.fault.phase}: {result.cause}{notice}{lost}{resume} ({result.seconds:.0f} s){problems}"


if __name__ == "__main__":
    sys.exit(main())
