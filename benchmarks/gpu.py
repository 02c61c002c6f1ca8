"""
One command on a machine with one CUDA GPU: is it right, then how fast is it.

    python benchmarks/gpu.py [--parts right,kernels,low,fast,start,profile,memory] [--depths 8,12,20] [--out gpu.json]

Every row is written to --out as soon as it is known, and to a Markdown table beside it. A row that fails is recorded with its
error, and the next one begins. The same command again takes the rows that are missing or were not right; other parts and depths may
be asked of the same file. No row begins that would not end within --budget-s, so that one call stays below eight minutes.

right: real runs; the loss on the GPU against the CPU, compiled against eager, bf16 and fp16 against fp32; resumed against unbroken,
to the bit; offloaded against not. kernels: each way of attention and of the loss on the shapes of the first depth, by the functions
that a run calls; milliseconds, and how far from the reference. low: the casts to fp8 against the codec, to the bit; the products of
each low precision against bf16's by width. fast: tokens/s, MFU, peak memory and time, planned and measured, and seconds to the
first step: windows SSSL and L, fp8, eager; the last depth offloaded. start: seconds from the command to the end of the first step,
of a new run and of a resumed one. profile: the kernels that take the most of a step, communication in the open (0 on one GPU),
idle. memory: the peak, planned by arithmetic and by a plan that knows what has run: eager, compiled, checkpointed.

Exit code: 0 all right, 1 a row is wrong or failed, 3 rows are left. `--device cpu --depths 2 --sequence-len 128` takes the same
steps without a GPU. Needs torch 2.11 or later, numpy, tokenizers, safetensors, rich and psutil; paceline itself may be a clone.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gpu_runs import ROOT, Result, Row, RowFailed, Setup, TimeOver, all_rows

PARTS = {
    "right": "Right",
    "kernels": "Kernels",
    "low": "Low precisions",
    "fast": "Speed",
    "start": "Start and restart",
    "profile": "Profile",
    "memory": "Memory",
}
VERDICTS = {"right": "ok", "wrong": "WRONG", "failed": "FAILED"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--depths", default="8,12,20")
    parser.add_argument("--sequence-len", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--budget-s", type=float, default=460)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    args = parser.parse_args()
    if unknown := set(args.parts.split(",")) - PARTS.keys():
        parser.error(f"no part {', '.join(sorted(unknown))}: {', '.join(PARTS)}")
    settings = {name: getattr(args, name) for name in ("device", "sequence_len", "steps")}
    results = load_results(args.out, machine_facts(args.device) | settings)
    deadline = time.monotonic() + args.budget_s
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        setup = Setup(Path(folder), deadline=deadline, **settings)
        depths = [int(word) for word in args.depths.split(",")]
        rows = [row for row in all_rows(depths, args.device) if row.part in args.parts.split(",")]
        left = measure_rows(rows, setup, results, out=args.out)
    print(f"\n{args.out} and {args.out.with_suffix('.md')} have {len(results['rows'])} rows")
    if left:
        print(f"{left} rows are left: the same command takes them")
    wrong = any(results["rows"][row.name]["verdict"] != "right" for row in rows if row.name in results["rows"])
    return 1 if wrong else 3 if left else 0


def measure_rows(rows: Iterable[Row], setup: Setup, results: dict[str, Any], *, out: Path) -> int:
    """Measures and records those that are not yet right; returns how many the time did not suffice for."""
    left, measured = 0, 0
    for row in rows:
        if results["rows"].get(row.name, {}).get("verdict") == "right":
            continue
        # one row always begins, so that a short budget cannot make every call end with nothing
        if measured and time.monotonic() + row.seconds > setup.deadline:
            left += 1
            continue
        measured, started = measured + 1, time.monotonic()
        try:
            result = row.measure(setup)
            verdict = "right" if result.right else "wrong"
        except TimeOver as error:
            if measured > 1:  # it may need more than what the rows before it have left
                left += 1
                continue
            result, verdict = Result(False, str(error)), "failed"
        except (RowFailed, KeyError, ValueError, OSError, ZeroDivisionError) as error:
            result, verdict = Result(False, str(error) if isinstance(error, RowFailed) else repr(error)), "failed"
        results["rows"][row.name] = {
            "part": row.part,
            "verdict": verdict,
            "figures": result.figures,
            "numbers": result.numbers,
            "seconds": round(time.monotonic() - started, 1),
            "commit": commit(),
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        save_results(out, results)
        print(f"{VERDICTS[verdict]:<6} {row.name}: {result.figures}", flush=True)
    return left


def load_results(path: Path, machine: dict[str, Any]) -> dict[str, Any]:
    """Returns what the file has, or an empty result. Rows of another machine or of other settings may not stand in one file."""
    if not path.exists():
        return {"machine": machine, "rows": {}}
    results: dict[str, Any] = json.loads(path.read_text())
    if different := [key for key in machine if results["machine"].get(key) != machine[key]]:
        key = different[0]
        sys.exit(
            f"error: {path} has rows with {key} {results['machine'].get(key)}, here it is {machine[key]}\n"
            "  fix: --out another.json"
        )
    return results


def save_results(path: Path, results: dict[str, Any]) -> None:
    """Replaces the JSON and the table; a reader, or a run that is killed now, finds the old or the new one."""
    for target, text in ((path, json.dumps(results, indent=1) + "\n"), (path.with_suffix(".md"), markdown(results))):
        partial = target.with_name(target.name + ".partial")
        partial.write_text(text)
        partial.replace(target)


def machine_facts(device: str) -> dict[str, Any]:
    sys.path.insert(0, str(ROOT))
    from paceline.plan.machine import probe_machine

    machine = probe_machine()
    if device == "cuda" and not machine.gpus:
        sys.exit("error: no CUDA GPU is here\n  fix: --device cpu --depths 2 --sequence-len 128 takes the same steps")
    name = machine.gpus[0].name if device == "cuda" else f"CPU, {machine.cpu_cores} cores"
    return {"name": name, "torch": version("torch"), "python": sys.version.split()[0]}


def commit() -> str:
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def markdown(results: dict[str, Any]) -> str:
    """Returns the tables for dev/BENCH.md: of speeds one column for each number, of other parts what, verdict and figures."""
    machine, rows = results["machine"], results["rows"]
    commits = ", ".join(sorted({row["commit"] for row in rows.values()}))
    lines = [f"## {machine['name']}, torch {machine['torch']}, commit {commits}", ""]
    lines += [f"`python benchmarks/gpu.py --device {machine['device']} --sequence-len {machine['sequence_len']}`"]
    for part, title in PARTS.items():
        of_part = {name: row for name, row in rows.items() if row["part"] == part}
        if not of_part:
            continue
        numbers = [key for row in of_part.values() for key in row["numbers"]] if part == "fast" else []
        heads = ["row", "verdict", *dict.fromkeys(numbers), "figures"]
        lines += ["", f"### {title}", "", f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
        for name, row in of_part.items():
            # the first line of an error is enough here; the JSON has it whole
            figures = row["figures"].partition("\n")[0].replace("|", "/")
            cells = [name, VERDICTS[row["verdict"]], *(row["numbers"].get(head, "") for head in heads[2:-1]), figures]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
