"""
Planned against measured speed of real runs on CPU processes.

    python benchmarks/plan.py [--rounds 3] [--steps 12] [--only 0,3] [--toys 10] [--fp32]

Measures this machine's pieces for one process and for two (train/measure.py), runs two configs to calibrate and then eight others
through `paceline train`, and prints predicted and measured tokens/s of each with their ratio. Rounds go through all configs in
turn; the median of a round's steps but the first two counts, and the median of the rounds. What ran while other processes took
more than a seventh of the machine is done again: two threads that wait for each other lose many times what a third takes.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from paceline.plan.forecast import step_setup
from paceline.plan.machine import probe_machine
from paceline.plan.planner import Plan
from paceline.plan.speeds import Speeds, keep_speeds, load_speeds, remember_step
from paceline.plan.step_time import StepSetup, StepTime, step_time

SKIPPED_STEPS = 2
LOUD, TRIES = 0.15, 3  # others' share of the machine, and how often they are waited for
Made = TypeVar("Made")


@dataclass(frozen=True)
class Case:
    nproc: int
    depth: int
    n_embd: int
    sequence_len: int
    vocab_size: int
    device_batch_size: int
    grad_accum_steps: int
    precision: str
    rest: tuple[str, ...] = ()

    @property
    def flags(self) -> list[str]:
        keys = {"nproc", "depth", "n_embd", "sequence_len", "vocab_size", "device_batch_size", "precision"}
        words = [word for key in sorted(keys) for word in (f"--{key.replace('_', '-')}", str(getattr(self, key)))]
        total = self.nproc * self.device_batch_size * self.grad_accum_steps * self.sequence_len
        return [*words, "--total-batch-size", str(total), "--head-dim", "64", *self.rest]

    @property
    def name(self) -> str:
        rest = " ".join(word.removeprefix("--") for word in self.rest)
        rows = f"{self.device_batch_size} x {self.grad_accum_steps}"
        return (
            f"{self.nproc} proc, d{self.depth} {self.n_embd} wide, T {self.sequence_len}, V {self.vocab_size}, {rows} rows,"
            f" {self.precision} {rest}".strip()
        )


CALIBRATION = (
    Case(1, 4, 256, 256, 4096, 8, 1, "bf16"),
    Case(2, 4, 256, 256, 4096, 8, 1, "bf16"),
)
TOYS = tuple(
    Case(nproc, 2, width, 64, 512, rows, 1, "fp32") for nproc in (1, 2) for width in (64, 128, 192) for rows in (4, 16)
)
TOY_STEPS = 30
CASES = (
    Case(1, 4, 128, 256, 4096, 16, 1, "bf16"),
    Case(1, 6, 384, 256, 8192, 8, 1, "fp32", ("--optimizer", "adamw")),
    Case(1, 8, 512, 512, 8192, 2, 2, "bf16"),
    Case(1, 5, 320, 1024, 4096, 2, 1, "fp32"),
    Case(2, 4, 128, 256, 4096, 8, 3, "bf16"),
    Case(2, 6, 384, 256, 8192, 8, 1, "bf16", ("--optimizer", "adamw")),
    Case(2, 3, 192, 512, 2048, 8, 1, "fp32", ("--optimizer", "adamw", "--shard", "none")),
    Case(2, 6, 256, 512, 4096, 4, 2, "fp32", ("--activation-checkpointing",)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", help="numbers of cases, from 0")
    parser.add_argument(
        "--patience",
        type=float,
        default=30.0,
        help="seconds to wait for a quiet machine, each time; 0: take it as it is",
    )
    parser.add_argument("--speeds", type=Path, help="a folder with measurements made before")
    parser.add_argument(
        "--toys", type=int, default=0, help="so many toy runs first, which leave their history in the cache"
    )
    parser.add_argument("--fp32", action="store_true", help="every case in fp32, for a CPU that does not multiply bf16")
    args = parser.parse_args()
    chosen = CASES if args.only is None else tuple(CASES[int(word)] for word in args.only.split(","))
    calibration = CALIBRATION
    if args.fp32:
        chosen, calibration = (
            tuple(replace(case, precision="fp32") for case in cases) for cases in (chosen, calibration)
        )
    cores = probe_machine().cpu_cores
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cache = args.speeds or folder
        for nproc in sorted({case.nproc for case in (*chosen, *TOYS[: args.toys])}):
            if load_speeds(cache, device_name="CPU", threads=max(1, cores // nproc), processes=nproc) is None:
                quietly(args.patience, lambda n=nproc: measure(cache, nproc=n, threads=max(1, cores // n)))
        for number, toy in enumerate(TOYS[: args.toys]):
            plan, measured = run(folder, toy, steps=TOY_STEPS)
            learn(cache, plan, measured_s=measured)
            print(f"toy {number + 1}: {measured * 1000:,.0f} ms  {toy.name}", file=sys.stderr, flush=True)
        seconds: dict[Case, list[float]] = {case: [] for case in (*calibration, *chosen)}
        plans: dict[Case, Plan] = {}
        for number in range(args.rounds):
            for case in seconds:
                plans[case], measured = quietly(args.patience, lambda c=case: run(folder, c, steps=args.steps))
                seconds[case].append(measured)
                print(f"round {number + 1}: {measured * 1000:,.0f} ms  {case.name}", file=sys.stderr, flush=True)
        medians = {case: statistics.median(times) for case, times in seconds.items()}
        raw = {case: predict(plans[case], cache) for case in medians}
        for case in calibration:
            if case.nproc in {each.nproc for each in chosen}:
                learn(cache, plans[case], measured_s=medians[case])
        show(medians, plans, raw, {case: predict(plans[case], cache) for case in medians})


def quietly(patience_s: float, piece: Callable[[], Made]) -> Made:
    """What it returns, when the machine was nearly its own; the last try's in any case, the first's without patience."""
    for _ in range(TRIES):
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline and others_share(lambda: time.sleep(1.0))[0] > LOUD:
            pass
        share, made = others_share(piece)
        if share <= LOUD or not patience_s:
            break
        print(f"others took {share:.0%} of the machine: again", file=sys.stderr, flush=True)
    return made


def others_share(piece: Callable[[], Made]) -> tuple[float, Made]:
    """Of all cores' time, what neither this process nor those it started used."""
    started, busy, own = time.monotonic(), busy_seconds(), own_seconds()
    made = piece()
    wall = time.monotonic() - started
    return (busy_seconds() - busy - (own_seconds() - own)) / (wall * (os.cpu_count() or 1)), made


def busy_seconds() -> float:
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, kinds))


def measure(cache: Path, *, nproc: int, threads: int) -> None:
    out = cache / "measured.json"
    command = [sys.executable, "-m", "paceline.train.measure", "--device", "cpu", "--out", str(out)]
    subprocess.run([*command, "--threads", str(threads), "--processes", str(nproc)], check=True)
    keep_speeds(cache, Speeds.from_json(json.loads(out.read_text())))


def run(folder: Path, case: Case, *, steps: int) -> tuple[Plan, float]:
    """The run's plan, and its median seconds of a step."""
    fixed = {"num-steps": steps, "log-every": 1, "eval-every": 0, "save-every": 0, "eval-tokens": 256}
    words = [word for key, value in fixed.items() for word in (f"--{key}", str(value))]
    command = [
        sys.executable,
        "-m",
        "paceline.cli",
        "train",
        "--runs-dir",
        str(folder),
        "--name",
        "one",
        "--no-compile",
    ]
    subprocess.run([*command, *words, *case.flags], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in (folder / "one" / "metrics.jsonl").read_text().splitlines()]
    plan = Plan.from_json((folder / "one" / "plan.json").read_text())
    shutil.rmtree(folder / "one")
    return plan, statistics.median(line["step_ms"] for line in lines[SKIPPED_STEPS:]) / 1000


def setup_of(plan: Plan, cache: Path) -> StepSetup:
    return replace(step_setup(plan, probe_machine(), cache=cache), compile=False)


def predict(plan: Plan, cache: Path) -> StepTime:
    return step_time(setup_of(plan, cache))


def learn(cache: Path, plan: Plan, *, measured_s: float) -> None:
    setup = setup_of(plan, cache)
    predicted = step_time(setup).uncorrected_s
    assert setup.speeds is not None and predicted is not None
    remember_step(cache, setup.speeds, key=setup.key, predicted_s=predicted, measured_s=measured_s)


def show(
    medians: dict[Case, float], plans: dict[Case, Plan], raw: dict[Case, StepTime], learned: dict[Case, StepTime]
) -> None:
    print("| config | measured tok/s | pieces alone | ratio | after two runs | ratio | within its range |")
    print("|---|---|---|---|---|---|---|")
    for number, (case, measured_s) in enumerate(medians.items()):
        tokens = plans[case].total_batch_size
        speeds = [tokens / measured_s, *(each[case].tok_per_sec for each in (raw, learned))]
        cells = [f"{speeds[0]:,.0f}"]
        for each in speeds[1:]:
            cells += [f"{each.expected:,.0f}", f"{each.expected / speeds[0]:.2f}"]
        inside = speeds[-1].low <= speeds[0] <= speeds[-1].high
        note = " (calibrates)" if number < len(CALIBRATION) else ""
        print(f"| {case.name}{note} | {' | '.join(cells)} | {'yes' if inside else 'no'} |", flush=True)
        parts = ", ".join(f"{name} {1000 * part:.0f}" for name, part in raw[case].parts.items())
        print(f"    {1000 * measured_s:.0f} ms measured; {parts}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
