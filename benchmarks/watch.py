"""
How fast a long run opens: 8 ranks, 200,000 logged steps, samples of three days, then the same run after it failed, with its logs:
its explanation comes on top. `python benchmarks/watch.py [--steps N]`.

Makes the run folder and opens it in both views: seconds from the command to the first full screen of a terminal of 120 x 36, and
from the address to the numbers and to the curves on the page; the most memory that each process held; how soon
a new line of metrics is known to the page; which share of a core the open page takes while a step is logged each second.
Then reads it as both views do, each time in a fresh process: seconds until the
first snapshot, seconds of a later one after a new line, CPU seconds of the first with all imports (on a busy machine the truer
figure), and the most memory; and the same of a run that failed, with logs.
"""

import argparse
import fcntl
import json
import os
import pty
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil

WATCH = [sys.executable, "-m", "paceline.cli", "watch"]
TERMINAL = {**os.environ, "TERM": "xterm-256color"}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

RANKS, DAYS, EVERY_S = 8, 3, 2
START = datetime(2026, 1, 1, tzinfo=UTC)

OUT_OF_MEMORY = """Traceback (most recent call last):
  File "train.py", line 1, in <module>
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.20 GiB. GPU 0 has a total capacity of 7.79 GiB.
"""
READ = """
import json, resource, sys, time
began = time.perf_counter()
from pathlib import Path
from paceline.watch.status import open_reader
imported = time.perf_counter()
reader = open_reader(Path(sys.argv[1]))
snapshot = reader.update()
first, cpu = time.perf_counter(), time.process_time()
with (Path(sys.argv[1]) / "metrics.jsonl").open("a") as file:
    file.write(sys.argv[2])
before = time.perf_counter()
assert reader.update().step == snapshot.step + 1
updated = time.perf_counter()
print(json.dumps({
    "import_s": round(imported - began, 3), "open_s": round(first - imported, 3), "cpu_s": round(cpu, 3),
    "update_s": round(updated - before, 4),
    "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    "explained": bool(snapshot.explanation),
    "points": max(len(series.steps) for series in [*snapshot.series.values(), *snapshot.rank_series]),
}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--live-s", type=float, default=30, help="seconds for which the open page is watched")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "long"
        make_run(run, steps=args.steps)
        sizes = {
            path.name: path.stat().st_size >> 20 for path in (run / "metrics.jsonl", run / "health" / "node.jsonl")
        }
        print(f"{args.steps:,} steps of {RANKS} ranks, samples of {DAYS} days; MiB: {sizes}")
        for number in range(args.runs):
            open_in_terminal(run)
            open_in_browser(run, step=args.steps + 1 + number, steps=args.steps)
        last = follow_in_browser(run, step=args.steps + args.runs, steps=args.steps, seconds=args.live_s)
        read(run, steps=last, runs=args.runs)
        fail(run, steps=last + args.runs)
        print("failed, with logs:")
        read(run, steps=last + args.runs, runs=args.runs)
        began = time.perf_counter()
        listed = subprocess.run([sys.executable, "-m", "paceline.cli", "runs", folder], capture_output=True, text=True)
        print(f"paceline runs: {time.perf_counter() - began:.3f} s\n{listed.stdout}")


def open_in_terminal(run: Path) -> None:
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 36, 120, 0, 0))
    began = time.perf_counter()
    view = psutil.Popen([*WATCH, str(run)], stdin=terminal, stdout=terminal, stderr=terminal, env=TERMINAL)
    shown = b""
    while b"quit" not in shown or b"tok/s" not in shown:  # the key line, and the figures
        shown += os.read(screen, 1 << 16)
    took_s = time.perf_counter() - began
    print(f"terminal: {took_s:.2f} s, {peak_mib(view)} MiB, {sum(view.cpu_times()[:2]):.2f} CPU s", flush=True)
    end(view)
    os.close(screen)
    os.close(terminal)


def open_in_browser(run: Path, *, step: int, steps: int) -> None:
    with open_page(run) as (page, server, began):
        page.wait_for_selector(".tile b")
        numbers_s = time.perf_counter() - began
        page.wait_for_selector(".chart canvas")
        curves_s = time.perf_counter() - began
        cpu = ", ".join(
            f"{name} {sum(map(cpu_s, group)):.2f}" for name, group in (("server", [server]), ("browser", browsers()))
        )
        with (run / "metrics.jsonl").open("a") as file:
            file.write(metric_line(step, steps))
        began = time.perf_counter()
        page.wait_for_function("step => app.page.run?.head.step === step", arg=step, polling=20)
        new_line_s = time.perf_counter() - began
        print(
            f"page: numbers {numbers_s:.2f} s, curves {curves_s:.2f} s, server {peak_mib(server)} MiB, CPU s: {cpu};"
            f" a new line {new_line_s:.2f} s",
            flush=True,
        )


def follow_in_browser(run: Path, *, step: int, steps: int, seconds: float) -> int:
    """Prints which share of a core the browser's processes and the server take while a step is logged each second.

    Returns the last step.
    """
    with open_page(run) as (page, server, _):
        page.wait_for_selector(".chart canvas")
        time.sleep(5)
        browser = browsers()
        before, began = {child.pid: cpu_s(child) for child in (server, *browser)}, time.perf_counter()
        while time.perf_counter() < began + seconds:
            step += 1
            with (run / "metrics.jsonl").open("a") as file:
                file.write(metric_line(step, steps))
            if step % EVERY_S == 0:
                with (run / "health" / "node.jsonl").open("a") as file:
                    file.write(health_line(DAYS * 86400 // EVERY_S + step))
            time.sleep(1)
        took_s = time.perf_counter() - began
        shares = {child.pid: (cpu_s(child) - before[child.pid]) / took_s for child in (server, *browser)}
        kinds = {child.pid: kind_of(child) for child in browser}
        parts = ", ".join(f"{kinds[pid]} {100 * shares[pid]:.1f} %" for pid in kinds if shares[pid] > 0.002)
        whole = sum(shares[pid] for pid in kinds)
        print(
            f"live page: {100 * whole:.1f} % of a core ({parts}); server {100 * shares[server.pid]:.1f} %", flush=True
        )
    return step


def browsers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if "chrom" in child.name()]


def cpu_s(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:2])


def kind_of(process: psutil.Process) -> str:
    """renderer, gpu-process, ...; "browser" for the one that started them."""
    kinds = [word.removeprefix("--type=") for word in process.cmdline() if word.startswith("--type=")]
    return kinds[0] if kinds else "browser"


@contextmanager
def open_page(run: Path) -> Iterator[tuple[Any, psutil.Popen, float]]:
    """A page of the run in a headless browser, its server, and when the address was opened."""
    from playwright.sync_api import sync_playwright

    command = [*WATCH, str(run), "--web", "--port", "0"]
    server = psutil.Popen(command, stdout=subprocess.PIPE, text=True)
    address = next(line.strip() for line in server.stdout if "http" in line)
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        began = time.perf_counter()
        page.goto(address, wait_until="commit")
        yield page, server, began
        browser.close()
    end(server)


def peak_mib(process: psutil.Process) -> int:
    """Returns the most memory that the process held so far."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) >> 10


def end(process: psutil.Popen) -> None:
    process.send_signal(signal.SIGINT)
    process.wait(20)


def read(run: Path, *, steps: int, runs: int) -> None:
    for number in range(runs):
        line = metric_line(steps + 1 + number, steps)
        done = subprocess.run([sys.executable, "-c", READ, str(run), line], capture_output=True, text=True, check=True)
        print(done.stdout.strip())


def fail(run: Path, *, steps: int) -> None:
    """Its logs, and how it ended."""
    logs = run / "logs" / "1"
    logs.mkdir(parents=True)
    for rank in range(RANKS):
        with (logs / f"{rank}.log").open("w") as file:
            file.writelines(log_line(step, steps) for step in range(1, steps + 1) if rank == 0)
            file.write(OUT_OF_MEMORY)
    ends = [{"event": "attempt_ended", "attempt": 1, "state": "failed"}, {"event": "failed", "rank": 0}]
    with (run / "events.jsonl").open("a") as file:
        file.writelines(json.dumps({"time": stamp(at(steps, steps)), **end}) + "\n" for end in ends)


def make_run(run: Path, *, steps: int) -> None:
    (run / "health").mkdir(parents=True)
    (run / "config.toml").write_text("depth = 12\n")
    (run / "plan.json").write_text(json.dumps({"num_steps": 2 * steps, "total_batch_size": 524_288}))
    events = [{"time": stamp(0), "event": "launch", "prepared_s": 3.0}]
    events.append({"time": stamp(0.1), "event": "attempt", "attempt": 1, "nproc": RANKS, "world_size": RANKS})
    events += [{"time": stamp(at(s, steps)), "event": "checkpoint", "step": s} for s in range(1000, steps, 1000)]
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    with (run / "metrics.jsonl").open("w") as file:
        file.writelines(metric_line(step, steps) for step in range(1, steps + 1))
    with (run / "health" / "node.jsonl").open("w") as file:
        file.writelines(health_line(number) for number in range(DAYS * 86400 // EVERY_S))


def at(step: int, steps: int) -> float:
    return 1 + step * DAYS * 86400 / (steps + 10)


def stamp(seconds: float) -> str:
    return (START + timedelta(seconds=seconds)).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def metric_line(step: int, steps: int) -> str:
    noise = step * 2654435761 % 1000 / 1000
    record = {"step": step, "loss": 3 + 8 / (1 + step / 100) + noise / 10}
    if step % 250 == 0:
        record["val_bpb"] = 0.9 + 2 / (1 + step / 100)
    ranks = [round(1200 + 10 * ((step * (rank + 7)) % 13) / 13, 2) for rank in range(RANKS)]
    record |= {
        "rank_ms": ranks, "lr_mult": 1.0, "grad_norm": 0.3 + noise, "step_ms": round(1290 + noise, 2),
        "tok_per_sec": round(406_000 + 100 * noise, 1), "mfu": 0.412345678901 + noise / 1000, "peak_bytes": 30_123_456_789,
        "time": stamp(at(step, steps)),
    }  # fmt: skip
    return json.dumps(record) + "\n"


def log_line(step: int, steps: int) -> str:
    return f"step {step}/{2 * steps} | loss 3.1234 | 1,290 ms | 406,000 tok/s | mfu 41.2% | 28.1 GiB | eta 24m17s\n"


def health_line(number: int) -> str:
    slow = number % 30 == 0
    host = {
        "cpu": 0.25,
        "ram_used": 40_000_000_000 + number,
        "disk_free": 10**12 - number,
        "net_in_bps": 1000,
        "net_out_bps": 900,
    }
    gpus = []
    for index in range(RANKS):
        gpu = {
            "index": index, "used_bytes": 30_000_000_000 + number, "use": number % 100 / 100, "memory_use": 0.5, "power_w": 500.25,
            "temperature_c": 60 + number % 9, "sm_mhz": 2460, "memory_mhz": 13_000, "pcie_out_bps": 10**9, "pcie_in_bps": 10**9,
        }  # fmt: skip
        if slow:
            process = {"pid": 4000 + index, "name": "python", "bytes": 29_000_000_000, "ours": True}
            gpu |= {
                "name": "NVIDIA GeForce RTX 5090",
                "total_bytes": 33_000_000_000,
                "pcie": "gen 5 x16",
                "processes": [process],
            }
        gpus.append(gpu)
    return json.dumps({"time": stamp(number * EVERY_S), **host, "gpus": gpus}, separators=(",", ":")) + "\n"


if __name__ == "__main__":
    main()
