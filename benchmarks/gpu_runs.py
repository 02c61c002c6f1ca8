"""
The rows of benchmarks/gpu.py: what each is called, how long it takes on an H100 at most, and how it is measured.

Those of this file are real commands of paceline in a temporary folder; those of gpu_kernels.py are functions that a run calls, in a
process of their own, so that an error of CUDA ends one row. Nothing here knows what was measured before.
"""

import gzip
import hashlib
import importlib.util
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# a machine with a card may have torch and little else
STAND_INS = [] if importlib.util.find_spec("orjson") else [str(ROOT / "benchmarks" / "stand_ins")]
Keys = dict[str, object]
TINY: Keys = {"depth": 2, "n-embd": 128, "head-dim": 64, "sequence-len": 128, "vocab-size": 512, "total-batch-size": 2048,
              "device-batch-size": 8, "num-steps": 8, "seed": 1, "window-pattern": "L", "compile": "false",
              "precision": "fp32"}  # fmt: skip
# rows of 2,048: FlashAttention's backward adds several blocks to one gradient
LONG: Keys = {"precision": "bf16", "sequence-len": 2048, "total-batch-size": 16384, "n-embd": 256, "head-dim": 128,
              "deterministic": True}  # fmt: skip
ROWS_OF_DEPTH = {8: 32, 12: 32, 20: 16}  # device_batch_size at 2,048 tokens, for a card of 80 GB or more
SECONDS_OF_DEPTH = {8: 60, 12: 90, 20: 200}  # of a short run, most of which the compiler takes
SKIPPED_STEPS = 3
TOP_KERNELS = 8


@dataclass(frozen=True)
class Setup:
    """What all rows have in common. deadline: of time.monotonic(), at which a command is ended and its row has failed."""

    folder: Path
    deadline: float
    device: str
    sequence_len: int
    steps: int


@dataclass(frozen=True)
class Result:
    right: bool
    figures: str
    numbers: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    name: str
    part: str
    seconds: float
    measure: Callable[[Setup], Result]


class RowFailed(Exception):
    """A command that ended with an error or not at all; the end of its output."""


class TimeOver(RowFailed):
    """A command that was ended at the deadline."""


def all_rows(depths: Sequence[int], device: str) -> Iterator[Row]:
    """Yields every row, the ones of correctness first. Some need a GPU."""
    yield from right_rows(device)
    for name in ("fa3", "cudnn", "flash", "flex", "sdpa"):
        yield kernel_row(f"attention by {name}", "kernels", depths[0])
    yield kernel_row("loss", "kernels", depths[0])
    yield kernel_row("casts to fp8", "low", depths[0])
    for name in ("fp8", "mxfp8", "mxfp4", "nvfp4"):
        yield kernel_row(f"products in {name}", "low", depths[0])
    for depth in depths:
        ways: dict[str, Keys] = {"SSSL": {}, "L": {"window-pattern": "L"}}
        ways["fp8"] = {"precision": "fp8"} | ({} if device == "cuda" else {"emulate": True})
        if device == "cuda":
            ways["eager"] = {"compile": "false"}
        if device == "cuda" and depth == depths[-1]:
            ways |= {"offload": {"offload": "optimizer"}, "8bit states": {"optimizer-states": "8bit"}}
        for way, extra in ways.items():
            yield depth_row(f"depth {depth} {way}", "fast", depth, partial(measure_speed, depth=depth, extra=extra))
    for depth in depths:
        yield depth_row(f"start at depth {depth}", "start", depth, partial(measure_start, depth=depth))
        yield depth_row(f"profile of depth {depth}", "profile", depth, partial(measure_profile, depth=depth))
        checkpointed: Keys = {"compile": "false", "activation-checkpointing": "true"}
        memory_ways = {"eager": {"compile": "false"}, "compiled": {"compile": "true"}, "checkpointed": checkpointed}
        for way, extra in memory_ways.items():
            measure = partial(measure_memory, depth=depth, extra=extra)
            yield depth_row(f"memory of depth {depth} {way}", "memory", depth, measure)


def right_rows(device: str) -> Iterator[Row]:
    def against(name: str, keys: Keys, reference: Keys, tolerance: float) -> Row:
        return Row(name, "right", 45, partial(compare_losses, keys=keys, reference=reference, tolerance=tolerance))

    yield against("fp32 here against fp32 on the CPU", {}, {"device": "cpu"}, 2e-3)
    yield against("bf16 against fp32", {"precision": "bf16"}, {}, 0.05)
    yield against("fp16 against fp32", {"precision": "fp16"}, {}, 0.05)
    yield against("compiled against eager, fp32", {"compile": "true"}, {}, 2e-3)
    for precision in ("fp8", "nvfp4"):
        low: Keys = {"depth": 4, "precision": precision, "emulate": True}
        yield against(f"emulated {precision} here against the CPU", low, low | {"device": "cpu"}, 0.05)
    if device == "cuda":
        windows: Keys = {"window-pattern": "SL", "sequence-len": 256}
        yield against("windows (flex) against masks on the CPU", windows, windows | {"device": "cpu"}, 2e-3)
    for compile_key in ("false", "true"):
        keys = LONG | {"window-pattern": "SL", "compile": compile_key}
        measure = partial(check_resume, keys=keys)
        yield Row(f"resumed against unbroken, compile={compile_key}", "right", 90, measure)
    in_8_bits = partial(check_resume, keys=LONG | {"optimizer-states": "8bit"})
    yield Row("resumed against unbroken, states of 8 bits", "right", 90, in_8_bits)
    if device == "cuda":
        yield Row("offload optimizer against none", "right", 60, check_offload)


def kernel_row(name: str, part: str, depth: int) -> Row:
    return Row(f"{name}, depth {depth}", part, 45, partial(ask_kernels, name=name, depth=depth))


def depth_row(name: str, part: str, depth: int, measure: Callable[[Setup], Result]) -> Row:
    return Row(name, part, SECONDS_OF_DEPTH.get(depth, 200 if depth > 12 else 60), measure)


# --------------------------------------------------------------------------- commands


def command(setup: Setup, words: Sequence[object]) -> str:
    """Runs Python with these words to its end; returns its standard output. Raises RowFailed with the end of what it printed."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", ""), *STAND_INS])}
    output, errors = setup.folder / "stdout", setup.folder / "stderr"
    # files, not pipes: a process that outlives the command would keep a pipe open
    with output.open("w") as out, errors.open("w") as err:
        try:
            done = subprocess.run(
                [sys.executable, *map(str, words)],
                env=env,
                stdout=out,
                stderr=err,
                timeout=max(1.0, setup.deadline - time.monotonic()),
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            last = (output.read_text().strip().splitlines() or ["no output"])[-1]
            raise TimeOver(f"ended after {error.timeout:.0f} s at {last!r}: {' '.join(map(str, words))}") from None
    text = output.read_text()
    if done.returncode:
        tail = (errors.read_text() or text).strip()[-4000:]
        reason = next((line for line in tail.splitlines() if line.startswith("error:")), "")
        raise RowFailed(
            f"{reason or 'no error line'}: exit code {done.returncode} of {' '.join(map(str, words))}\n{tail}"
        )
    return text


def paceline(setup: Setup, *words: object, keys: Keys) -> str:
    flags = [word for key, value in keys.items() for word in (f"--{key}", *([] if value is True else [str(value)]))]
    return command(setup, ["-m", "paceline.cli", *words, *flags])


def train(setup: Setup, keys: Keys) -> Path:
    """Returns the folder of a run that has ended well; the name is new each time."""
    name = f"run-{time.monotonic_ns()}"
    every_step: Keys = {"log-every": 1, "eval-every": 0, "eval-tokens": 4096, "device": setup.device, "nproc": 1}
    paceline(setup, "train", keys={"name": name, "runs-dir": setup.folder, **every_step, **keys})
    return setup.folder / name


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics(run: Path) -> list[dict[str, Any]]:
    return [line for line in lines_of(run / "metrics.jsonl") if "loss" in line]


# --------------------------------------------------------------------------- right


def compare_losses(setup: Setup, *, keys: Keys, reference: Keys, tolerance: float) -> Result:
    ours, theirs = ([line["loss"] for line in metrics(train(setup, {**TINY, **k}))] for k in (keys, reference))
    worst = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    figures = f"largest difference of the loss {worst:.2e} over {len(ours)} steps (allowed {tolerance:g})"
    return Result(worst <= tolerance, figures, {"losses": ours, "reference": theirs})


def check_resume(setup: Setup, *, keys: Keys) -> Result:
    """A run that lost its last checkpoint, resumed from the one before, ends with the same bits."""
    run = train(setup, {**TINY, **keys, "save-every": 4})
    unbroken = weights_hash(run, 8)
    shutil.rmtree(run / "checkpoints" / "step_000008")
    paceline(setup, "resume", run, keys={"num-steps": 8})
    resumed = weights_hash(run, 8)
    return Result(resumed == unbroken, f"weights and states {unbroken} and {resumed}, from step 4")


def check_offload(setup: Setup) -> Result:
    """A run whose masters and states are on the host ends with the bits of one that has them on the GPU."""
    keys: Keys = {**TINY, **LONG}
    hashes = [weights_hash(train(setup, {**keys, "offload": where}), 8) for where in ("none", "optimizer")]
    return Result(len(set(hashes)) == 1, f"weights and states {' and '.join(hashes)}")


def weights_hash(run: Path, step: int) -> str:
    hashes = hashlib.sha256()
    files = sorted((run / "checkpoints" / f"step_{step:06d}").glob("*.safetensors"))
    assert files, f"{run} has no checkpoint of step {step}"
    for file in files:
        hashes.update(file.read_bytes())
    return hashes.hexdigest()[:16]


def ask_kernels(setup: Setup, *, name: str, depth: int) -> Result:
    words = [ROOT / "benchmarks" / "gpu_kernels.py", name, depth, setup.device, setup.sequence_len]
    lines = [json.loads(line) for line in command(setup, words).splitlines() if line.startswith("{")]
    if not lines:
        raise RowFailed(f"{name} printed no figures")
    shown = "; ".join(f"{line['what']}: {line['figures']}" for line in lines)
    return Result(all(line["right"] for line in lines), shown, {"lines": lines})


# --------------------------------------------------------------------------- speed


def keys_of(setup: Setup, depth: int, *, total_rows: int | None = None) -> Keys:
    """Returns every key that the recipe derives from the depth, since `train` without a config takes those of tiny.toml.

    total_rows: of a step; None: 256 on a GPU, 524,288 tokens, and one micro-batch on a CPU, whose vocabulary is small too.
    """
    total_rows = total_rows or (256 if setup.device == "cuda" else ROWS_OF_DEPTH.get(depth, 8))
    return {"depth": depth, "n-embd": 64 * depth, "head-dim": 128, "window-pattern": "SSSL",
            "vocab-size": 32768 if setup.device == "cuda" else 512,
            "sequence-len": setup.sequence_len, "device-batch-size": ROWS_OF_DEPTH.get(depth, 8),
            "total-batch-size": total_rows * setup.sequence_len, "num-steps": setup.steps, "save-every": 0,
            "compile": "true" if setup.device == "cuda" else "false"}  # fmt: skip


def measure_speed(setup: Setup, *, depth: int, extra: Keys) -> Result:
    started = time.time()
    run = train(setup, {**keys_of(setup, depth), **extra})
    plan, lines = json.loads((run / "plan.json").read_text()), metrics(run)
    notes = [line["text"] for line in lines_of(run / "events.jsonl") if "products" in line.get("text", "")]
    shutil.rmtree(run)
    steady = lines[SKIPPED_STEPS:]
    speed, step_ms = (statistics.median(line[key] for line in steady) for key in ("tok_per_sec", "step_ms"))
    share, peak = steady[-1]["mfu"], max(line["peak_bytes"] for line in lines)
    planned, seconds = plan["memory"]["allocated_bytes"]["expected"], plan["cost"].get("seconds")
    numbers = {
        "rows": f"{plan['device_batch_size']} x {setup.sequence_len}",
        "attention": plan["attention"],
        "tokens/s": f"{speed:,.0f}",
        "MFU": "n/a" if share is None else f"{100 * speed / steady[-1]['tok_per_sec'] * share:.1f} %",
        "step ms": f"{step_ms:,.0f}",
        "planned ms": f"{1000 * seconds['expected']:,.0f}" if seconds else "n/a",
        "peak GiB": f"{peak / 2**30:.1f}",
        "planned GiB": f"{planned / 2**30:.1f}",
        "first step s": f"{ended_at(lines[0]) - started:.0f}",
    }
    figures = "; ".join([f"loss {lines[-1]['loss']:.4f} after {len(lines)} steps", *notes])
    return Result(math.isfinite(lines[-1]["loss"]), figures, numbers)


def measure_start(setup: Setup, *, depth: int) -> Result:
    """A new run of two steps with a checkpoint, then the same run resumed."""
    keys = keys_of(setup, depth, total_rows=ROWS_OF_DEPTH.get(depth, 8)) | {"num-steps": 2, "save-every": 2}
    started = time.time()
    run = train(setup, keys)
    first_s = ended_at(metrics(run)[0]) - started
    started = time.time()
    paceline(setup, "resume", run, keys={"num-steps": 4})
    resumed_s = next(ended_at(line) for line in metrics(run) if line["step"] > 2) - started
    shutil.rmtree(run)
    figures = f"command to the end of the first step {first_s:.1f} s, of a resumed run {resumed_s:.1f} s"
    return Result(True, figures, {"first_s": first_s, "resumed_s": resumed_s})


def ended_at(line: dict[str, Any]) -> float:
    return datetime.fromisoformat(line["time"]).timestamp()


def measure_profile(setup: Setup, *, depth: int) -> Result:
    """`paceline profile`, and the kernels of its trace; alone on a GPU nothing may be sent."""
    environment_keys: Keys = {"device": setup.device, "nproc": 1, "cache-dir": setup.folder / "profile"}
    text = paceline(setup, "profile", "--json", keys={**keys_of(setup, depth), **environment_keys})
    results = json.loads(text)
    parts = {name: part["ms"] for name, part in results["parts"].items()}
    sent = sum(ms for name, ms in parts.items() if name.endswith("sent"))
    kernels: Counter[str] = Counter()
    for event in json.loads(gzip.decompress(Path(results["traces"][0]).read_bytes()))["traceEvents"]:
        if event.get("cat") == ("kernel" if setup.device == "cuda" else "cpu_op") and "dur" in event:
            kernels[event["name"][:80]] += event["dur"]
    top = {name: us / 1000 / results["steps"] for name, us in kernels.most_common(TOP_KERNELS)}
    figures = (
        f"{results['step_ms']:.0f} ms a step, computing {100 * results['use']:.1f} %, sent in the open {sent:.1f} ms; "
        + ", ".join(f"{name} {ms:.0f} ms" for name, ms in parts.items())
        + "; kernels: "
        + ", ".join(f"{name} {ms:.1f} ms" for name, ms in top.items())
    )
    return Result(sent == 0, figures, {"parts_ms": parts, "kernels_ms": top, "use": results["use"]})


def measure_memory(setup: Setup, *, depth: int, extra: Keys) -> Result:
    """The planned peak beside the measured one, by arithmetic and by a plan that knows this run and those before it."""
    keys = keys_of(setup, depth, total_rows=2 * ROWS_OF_DEPTH.get(depth, 8)) | {"num-steps": 3} | extra
    # what was measured before this command must not help
    keys |= {"cache-dir": setup.folder / "memory"}
    run = train(setup, keys)
    planned, measured = (
        json.loads((run / "plan.json").read_text())["memory"],
        max(m["peak_bytes"] for m in metrics(run)),
    )
    shutil.rmtree(run)
    allocated = planned["allocated_bytes"]["expected"]
    on_gpu = setup.device == "cuda"
    # on a CPU it is the process that is measured, with what PyTorch itself takes
    before = max(planned["phases"].values()) + (0 if on_gpu else planned["process_bytes"]["expected"] - allocated)
    text = paceline(setup, "plan", "--json", keys={**keys, "device": setup.device, "nproc": 1})
    after = json.loads(text)["memory"]["allocated_bytes" if on_gpu else "process_bytes"]["expected"]
    off = {"arithmetic": before / measured - 1, "after": after / measured - 1}
    figures = (
        f"measured {measured / 2**30:.2f} GiB, by arithmetic {before / 2**30:.2f} ({100 * off['arithmetic']:+.1f} %),"
        f" after runs {after / 2**30:.2f} ({100 * off['after']:+.1f} %; allowed 5)"
    )
    return Result(abs(off["after"]) <= 0.05, figures, {"measured": measured, **off})
