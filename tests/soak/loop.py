"""
The fault loop: real runs on CPU ranks, faults at exact places, and the result of each.

    python -m soak.loop [--seed 1] [--faults 100] [--only sigkill,disk] [--write docs/reliability.md]     (PYTHONPATH=tests)

The exit code is 1 if any fault was not recovered from correctly. The same seed gives the same faults at the same places.
"""

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from soak.audit import FaultResult, judge, problems_of_run, read_record
from soak.drive import Drive, RunEnded, loop_keys
from soak.faults import KINDS, RANKS, Run, num_steps, pack, sample
from soak.host import Host
from soak.table import Result, format_page, format_table, write_page
from train.runs import Workshop, final_bits

MOST = 5  # faults in a run
HANG_AFTER_S = 8.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    parser.add_argument("--only", help=f"kinds, of {', '.join(KINDS)}")
    parser.add_argument("--write", type=Path, help="the page to write")
    parser.add_argument("--keep", type=Path, help="a folder; runs with problems stay in its `broken`")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing stays mounted
    kinds = args.only.split(",") if args.only else list(KINDS)
    with tempfile.TemporaryDirectory() as name:
        folder = args.keep or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        result = soak(folder, seed=args.seed, count=args.faults, kinds=kinds, jobs=args.jobs)
    print(format_table(result))
    if args.write:
        write_page(args.write, one_host=format_page(result))
    return 1 if result.problems else 0


def soak(
    folder: Path,
    *,
    seed: int,
    count: int,
    kinds: Sequence[str] = tuple(KINDS),
    ranks: Sequence[str] = RANKS,
    nprocs: Sequence[int] = (2, 3),
    most: int = MOST,
    jobs: int = 1,
    hang_after_s: float = HANG_AFTER_S,
    show: Callable[[str], None] = lambda text: print(text, flush=True),
) -> Result:
    """Makes all runs, `jobs` at the same time."""
    began = time.monotonic()
    host, pool = Host(folder), ThreadPoolExecutor(jobs)
    try:
        kinds = [kind for kind in kinds if kind != "disk" or host.can_mount]
        runs = pack(sample(seed, count, kinds=kinds, ranks=ranks), seed=seed, most=most, nprocs=nprocs)
        for note in host.notes:
            show(note)
        shop = Workshop(folder, check=True)
        steps = num_steps(most)
        unbroken = {nproc: undisturbed(shop, nproc=nproc, steps=steps) for nproc in sorted({run.nproc for run in runs})}
        results: list[FaultResult] = []
        problems: list[str] = []

        def run_number(number: int) -> tuple[int, list[FaultResult], list[str]]:
            run = runs[number]
            return number, *one_run(shop, host, run, name_of(number), steps, unbroken[run.nproc], hang_after_s)

        for future in as_completed([pool.submit(run_number, number) for number in range(len(runs))]):
            number, new_results, new_problems = future.result()
            if new_problems:
                kept, pipes = folder / "broken" / name_of(number), shutil.ignore_patterns("*.pipe")
                shutil.copytree(folder / "disks" / name_of(number), kept, ignore=pipes)
            results += new_results
            problems += new_problems
            done, spent = len(results), time.monotonic() - began
            show(
                f"{done}/{count} faults | run {number + 1} of {len(runs)} | eta {spent / done * (count - done) / 60:.0f} min"
            )
            for result in new_results:
                show(f"  {describe(result)}")
            for text in new_problems:
                show(f"  PROBLEM {text}")
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        host.end_all(folder / "orders")
        host.close()
    return Result(tuple(results), tuple(problems), seed, len(runs), time.monotonic() - began, tuple(host.notes))


def name_of(number: int) -> str:
    return f"run-{number:02d}"


def undisturbed(shop: Workshop, *, nproc: int, steps: int) -> dict[str, str]:
    return final_bits(shop.train(f"undisturbed-{nproc}", **loop_keys(nproc=nproc, num_steps=steps)))


def one_run(
    shop: Workshop, host: Host, run: Run, name: str, steps: int, unbroken: dict[str, str], hang_after_s: float
) -> tuple[list[FaultResult], list[str]]:
    """Returns the results of a run's faults, and the problems."""
    drive = Drive(shop, host, run, name=name, num_steps=steps, hang_after_s=hang_after_s)
    problems: list[str] = []
    exit_code = None
    try:
        exit_code = drive.run()
    except RunEnded as error:
        problems.append(f"{name}: {error}")
    left = host.processes_of(drive.orders) if exit_code is not None else []
    host.end_all(drive.orders)
    record = read_record(drive.run_dir)
    injections = [injection for injection in drive.injections if injection.time]
    results = [
        judge(record, injection, following, hang_after_s=hang_after_s)
        for injection, following in zip(injections, [*injections[1:], None], strict=True)
    ]
    problems += [f"{name}: {describe(result)}: {text}" for result in results for text in result.problems]
    if exit_code is not None:
        texts = problems_of_run(record, num_steps=steps, exit_code=exit_code, left=left, unbroken=unbroken)
        problems += [f"{name}: {text}" for text in texts]
    return results, problems


def describe(result: FaultResult) -> str:
    notice = "" if result.notice_s is None else f", noticed after {result.notice_s:.1f} s"
    lost = "" if result.lost_steps is None else f", {result.lost_steps} steps lost"
    resume = "" if result.resume_s is None else f", next step after {result.resume_s:.1f} s"
    fault = result.fault
    return f"{fault.kind} {fault.rank} of {result.nproc} at {fault.phase} ({fault.place}): {result.cause}{notice}{lost}{resume}"


if __name__ == "__main__":
    sys.exit(main())
