"""
What watching and saving cost a run, and how soon one that breaks is at work again.

    python benchmarks/overhead.py [--pairs 60] [--rounds 5] [--only supervisor,checkpoints,viewers,restart,hang]

A/B rows (VARIANTS): one run, in which blocks of steps with a thing take turns with blocks without it; each block without is
compared with the two beside it, as neighbours share what else the machine does. Seconds, and CPU seconds of all processes of
the run, which tell more on a busy machine. Real runs on 2 CPU processes with one thread. viewers: the terminal view, the page
in a browser and TensorBoard forwarding, all at once; the run on one core and the views on another, as where GPUs train.
restart: from a SIGKILL of a rank to the end of the first new step, against command to first step of the same run. hang: from a
SIGSTOP of a rank until it is named.
"""

import argparse
import math
import os
import pty
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import psutil

from paceline.rundir import RunDir, read_json_lines

SWITCH = Path(__file__).with_name("switch")
NPROC = 2
SHAPE = {
    "depth": 4, "n-embd": 128, "head-dim": 64, "sequence-len": 256, "vocab-size": 2048, "total-batch-size": 4096,
    "device-batch-size": 8, "precision": "fp32", "device": "cpu", "nproc": NPROC, "log-every": 1, "eval-every": 0,
    "sample-every": 0, "save-every": 0, "eval-tokens": 256, "compile": "false",
}  # fmt: skip
PATIENCE_S = 300.0
CRASH_STEP = 12
Deed = Callable[["Running"], None]


@dataclass(frozen=True)
class Variant:
    """An A/B row. switch: what the ranks leave out in odd blocks; off, on: what is done from outside at their borders."""

    name: str
    block: int  # steps
    bar: float  # of tokens/s that it may cost
    switch: str | None = None
    flags: tuple[str, ...] = ()
    begin: Deed = lambda running: None
    off: Deed = lambda running: None
    on: Deed = lambda running: None
    end: Deed = lambda running: None
    skip: int = 2  # steps after a border, which is seen from outside a little late
    nproc: int = NPROC
    cores: frozenset[int] | None = None  # for the run; the views have the others


@dataclass
class Running:
    """A run under way."""

    run: RunDir
    process: subprocess.Popen[bytes]
    started: float
    screen: Path
    viewers: list[psutil.Process] = field(default_factory=list)

    @property
    def holders(self) -> list[psutil.Process]:
        """The command, the launch agent and torch's: all but the ranks."""
        root = psutil.Process(self.process.pid)
        return [
            root,
            *(each for each in root.children(recursive=True) if "paceline.train.worker" not in each.cmdline()),
        ]

    @property
    def metrics(self) -> list[dict]:
        return list(read_json_lines(self.run.metrics))

    def wait_for(self, condition: Callable[[], object], every_s: float = 0.02) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.process.poll() is None, self.screen.read_text()
            assert time.monotonic() < deadline, "it did not come to this"
            time.sleep(every_s)


def freeze(running: Running) -> None:
    for each in running.holders:
        each.suspend()


def thaw(running: Running) -> None:
    for each in reversed(running.holders):
        each.resume()


def look(running: Running) -> None:
    """In a terminal of 120 x 36, in a browser, and through TensorBoard's forwarder, which --track has started."""
    os.sched_setaffinity(0, os.sched_getaffinity(0) - os.sched_getaffinity(running.process.pid))
    words = [sys.executable, "-m", "paceline.cli", "watch", str(running.run.path)]
    screen, terminal = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "36"}
    shown = subprocess.Popen(words, stdin=terminal, stdout=terminal, stderr=terminal, env=env, start_new_session=True)
    threading.Thread(target=lambda: all(iter(lambda: os.read(screen, 1 << 16), b"")), daemon=True).start()
    served = subprocess.Popen([*words, "--web", "--port", "0"], stdout=subprocess.PIPE, text=True)
    address = next(line.strip() for line in served.stdout if "http" in line)
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    headless = [
        browser,
        "--headless=new",
        "--no-sandbox",
        "--remote-debugging-port=0",
        f"--user-data-dir={running.screen}.d",
    ]
    page = subprocess.Popen([*headless, address], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    forwarders = [each for each in running.holders if "paceline.track.follower" in each.cmdline()]
    assert forwarders, "no forwarder"
    running.wait_for(lambda: running.metrics[-1]["step"] > CRASH_STEP)  # all have begun
    running.viewers += [*(psutil.Process(each.pid) for each in (shown, served, page)), *forwarders]


def everything_of(viewers: Sequence[psutil.Process]) -> list[psutil.Process]:
    return [*viewers, *(child for each in viewers for child in each.children(recursive=True))]


def close_eyes(running: Running) -> None:
    for each in everything_of(running.viewers):
        each.suspend()


def open_eyes(running: Running) -> None:
    for each in everything_of(running.viewers):
        each.resume()


def leave(running: Running) -> None:
    open_eyes(running)
    for each in everything_of(running.viewers[:-1]):  # the forwarder ends with the run
        each.kill()
    os.sched_setaffinity(0, range(os.cpu_count() or 1))


VARIANTS = (
    Variant("supervisor", block=10, bar=0.005, switch="marks", off=freeze, on=thaw),
    Variant("checkpoints", block=50, bar=0.02, switch="saves", flags=("--save-every", "50"), skip=0),
    Variant(
        "viewers", block=30, bar=0.01, flags=("--nproc", "1", "--track", "tensorboard"), nproc=1, cores=frozenset({0}),
        begin=look, off=close_eyes, on=open_eyes, end=leave,
    ),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=60, help="of blocks, for each A/B row")
    parser.add_argument("--rounds", type=int, default=5, help="of restart; two of each hang")
    parser.add_argument("--only", default=",".join([*(each.name for each in VARIANTS), "restart", "hang"]))
    args = parser.parse_args()
    wanted = args.only.split(",")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for variant in VARIANTS:
            if variant.name in wanted:
                compare(folder, variant, pairs=args.pairs)
        if "restart" in wanted:
            restart(folder, rounds=args.rounds)
        if "hang" in wanted:
            hang(folder, rounds=max(1, args.rounds // 2))


@contextmanager
def running(
    folder: Path, *flags: str, num_steps: int, switch: str | None = None, cores: frozenset[int] | None = None
) -> Iterator[Running]:
    name = f"run-{time.time_ns()}"
    places = {"name": name, "runs-dir": folder / "runs", "num-steps": num_steps}
    values = {f"--{key}": str(value) for key, value in {**SHAPE, **places}.items()}
    words = [word for pair in (values | dict(zip(flags[::2], flags[1::2], strict=True))).items() for word in pair]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if switch:
        paths = [str(SWITCH), *filter(None, [os.environ.get("PYTHONPATH")])]
        env |= {"PYTHONPATH": os.pathsep.join(paths), "OVERHEAD_SWITCH": switch}
    started = time.time()
    command = [sys.executable, "-m", "paceline.cli", "train", *words]
    with (folder / "screen.txt").open("wb") as screen:
        pin = None if cores is None else (lambda: os.sched_setaffinity(0, cores))
        process = subprocess.Popen(command, stdout=screen, stderr=screen, env=env, preexec_fn=pin)
    found = Running(RunDir(folder / "runs" / name), process, started, folder / "screen.txt")
    try:
        found.wait_for(lambda: found.metrics)
        yield found
    finally:
        with suppress(psutil.Error):  # it may have ended just now
            thaw(found)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)


def compare(folder: Path, variant: Variant, *, pairs: int) -> None:
    """Blocks 0, 2, 4, ... have it, 1, 3, 5, ... do not; the first two are warm-up."""
    blocks = 2 * pairs + 3
    switch = f"{variant.switch} {variant.block}" if variant.switch else None
    with running(
        folder, *variant.flags, num_steps=(blocks + 2) * variant.block, switch=switch, cores=variant.cores
    ) as run:
        variant.begin(run)
        everyone = [*run.holders, *(psutil.Process(rank_pid(run, rank)) for rank in range(variant.nproc))]
        used = [cpu_seconds(everyone)]  # at each border
        held, began = cpu_seconds(run.holders), time.monotonic()
        file = run.run.metrics.open("rb")
        step = 0
        while len(used) <= blocks:
            step += sum(1 for line in file if line.endswith(b"\n"))
            if step // variant.block == len(used):
                (variant.off if len(used) % 2 else variant.on)(run)
                used.append(cpu_seconds(everyone))
            time.sleep(0.005)
            assert run.process.poll() is None, run.screen.read_text()
        share = (cpu_seconds(run.holders) - held) / (time.monotonic() - began)
        variant.on(run)
        variant.end(run)
        ends = {line["step"]: seconds_of(line) for line in run.metrics}
    report(variant, "tokens/s", block_seconds(ends, variant, blocks))
    report(variant, "CPU time", [after - before for before, after in pairwise(used[2:])])
    if variant.switch == "saves":
        report_saves(run)
    if variant.off is freeze:  # for half of the blocks
        print(f"{variant.name:<12} all processes but the ranks use {200 * share:.2f} % of one core", flush=True)


def report_saves(run: Running) -> None:
    """What each save took of a rank, as the switch has it told."""
    text = "".join(run.run.rank_log(1, rank).read_text() for rank in range(NPROC))
    loop, beside = (
        statistics.median(map(float, re.findall(rf"^save: ([\d.]+) ms {where}", text, re.MULTILINE)))
        for where in ("in the loop", "of CPU beside it")
    )
    print(f"checkpoints  each save of a rank: {loop:.1f} ms in the loop, {beside:.1f} ms of CPU beside it", flush=True)


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(each.cpu_times()[:2]) for each in processes)


def block_seconds(ends: dict[int, float], variant: Variant, blocks: int) -> list[float]:
    """Of each block after the warm-up, without its first steps."""
    size, skip = variant.block, variant.skip
    return [
        (ends[(number + 1) * size] - ends[number * size + skip]) / (size - skip) * size for number in range(2, blocks)
    ]


def report(variant: Variant, what: str, seconds: Sequence[float]) -> None:
    """Each block without it is compared with the mean of the two with it beside it, so that a drift falls out."""
    ratios = sorted(
        seconds[number] / math.sqrt(seconds[number - 1] * seconds[number + 1])
        for number in range(1, len(seconds) - 1, 2)
    )
    low, middle, high = ratios[len(ratios) // 4], statistics.median(ratios), ratios[3 * len(ratios) // 4]
    error = statistics.stdev(ratios) / math.sqrt(len(ratios))
    print(
        f"{variant.name:<12} {what}: costs {100 * (1 - middle):.2f} %, bar {100 * variant.bar:.1f} %; without / with: median"
        f" {middle:.4f} (middle half {low:.3f} to {high:.3f}, standard error {error:.4f}, {len(ratios)} pairs,"
        f" {1000 * statistics.median(seconds) / variant.block:.0f} ms a step)",
        flush=True,
    )


def seconds_of(record: dict) -> float:
    return datetime.fromisoformat(record["time"]).timestamp()


def restart(folder: Path, *, rounds: int) -> None:
    fresh, again = [], []
    for _ in range(rounds):
        with running(folder, "--save-every", str(CRASH_STEP - 2), num_steps=100_000) as run:
            fresh.append(seconds_of(run.metrics[0]) - run.started)
            run.wait_for(lambda run=run: checkpoints(run) and run.metrics[-1]["step"] >= CRASH_STEP)
            struck = time.time()
            os.kill(rank_pid(run, 1), signal.SIGKILL)
            run.wait_for(lambda run=run: len(events(run, "attempt")) > 1)
            second_s = seconds_of(events(run, "attempt")[1])
            run.wait_for(lambda run=run, since=second_s: seconds_of(run.metrics[-1]) > since)
            first_new = next(line for line in run.metrics if seconds_of(line) > second_s)
            again.append(seconds_of(first_new) - struck)
        print(f"round {len(fresh)}: fresh {fresh[-1]:.2f} s, again {again[-1]:.2f} s", file=sys.stderr, flush=True)
    ratios = sorted(a / b for a, b in zip(again, fresh, strict=True))
    print(
        f"restart      fault to the first new step {statistics.median(again):.2f} s, command to the first step"
        f" {statistics.median(fresh):.2f} s: median ratio {statistics.median(ratios):.3f} ({ratios[0]:.2f} to {ratios[-1]:.2f},"
        f" {rounds} rounds), bar 1.3",
        flush=True,
    )


def hang(folder: Path, *, rounds: int) -> None:
    for flags, bar_s in ((("--hang-after", "8"), 10.0), ((), 60.6)):
        took = []
        for _ in range(rounds):
            with running(folder, *flags, num_steps=100_000) as run:
                run.wait_for(lambda run=run: run.metrics[-1]["step"] >= CRASH_STEP)
                struck = time.time()
                os.kill(rank_pid(run, 1), signal.SIGSTOP)
                run.wait_for(lambda run=run: events(run, "hang"))
                [found] = events(run, "hang")
                assert found["rank"] == 1, found
                took.append(seconds_of(found) - struck)
        print(
            f"hang         {' '.join(flags) or 'default'}: a stopped rank is named after"
            f" {', '.join(f'{each:.1f}' for each in took)} s, bar {bar_s:g} s",
            flush=True,
        )


def events(run: Running, kind: str) -> list[dict]:
    return [event for event in read_json_lines(run.run.events) if event["event"] == kind]


def checkpoints(run: Running) -> list[dict]:
    return events(run, "checkpoint")


def rank_pid(run: Running, rank: int) -> int:
    return int((run.run.logs(1) / f"{rank}.pid").read_text())


if __name__ == "__main__":
    main()
