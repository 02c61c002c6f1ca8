"""
One command on a machine with one CUDA GPU: is it right, then how fast is it. On an H100 the first part takes over 5 minutes, each
depth of the second 2 to 3.

    python benchmarks/gpu.py [--parts right,kernels,low,fast] [--depths 8,12,20] [--budget-s 460]
    python benchmarks/gpu.py --plan [--depths 8,12,16,24]

Right and fast are real `paceline train` in a temporary folder. Right: loss on the GPU against the CPU, compiled against eager,
fp16 and bf16 against fp32, a broken run against an unbroken one, an offloaded optimizer against one on the GPU. Kernels, a
minute: each way of attention and of the loss on the shapes of the first depth, by the functions that a run calls; how far each is
from its reference, and its milliseconds. Low, half a minute and two short runs: the kernels that cast to fp8 against the codec,
to the bit; each low precision's products against their emulation, where the card has them, and how many times as fast as bf16's
they are by width (fp8 also with a scale for each row); tokens/s of the second depth in bf16 and in fp8. Fast: tokens/s, MFU and
peak memory, planned and measured, in bf16 per depth, compiled: rows of 2,048 tokens, 524,288 tokens a step as the recipe has
them; then the last depth with --offload optimizer, and by how much a step is longer, planned and measured. Exit code 1 if
anything is wrong. Needs torch 2.11+, numpy, tokenizers, safetensors, rich, psutil, orjson, argcomplete. `--device cpu --depths 2
--sequence-len 128` goes through the same steps without a GPU. --plan: the planned peak of memory beside the measured one, eager,
compiled and checkpointed at each depth; first by arithmetic alone, then by a plan that knows what these runs have measured. On a
CPU it is the process, with what PyTorch itself takes.
"""

import argparse
import hashlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TINY = {"depth": 2, "n-embd": 128, "head-dim": 64, "sequence-len": 128, "vocab-size": 512, "total-batch-size": 2048,
        "device-batch-size": 8, "num-steps": 8, "seed": 1, "window-pattern": "L"}  # fmt: skip
ROWS_OF_DEPTH = {8: 32, 12: 32, 20: 16}  # device_batch_size at 2,048 tokens, for a card of 80 GB or more
EVERY_STEP = {"log-every": 1, "eval-every": 0, "eval-tokens": 4096}
SKIPPED_STEPS = 3


def train(folder: Path, name: str, keys: dict[str, object], *, command: str = "train") -> Path:
    """Runs the command to its end; the run folder. A failure shows its output and ends the benchmark."""
    if command == "train":
        keys = {"name": name, "runs-dir": folder, "nproc": 1, **EVERY_STEP, **keys}
    words = ["resume", str(folder / name)] if command == "resume" else ["train"]
    words += [word for key, value in keys.items() for word in (f"--{key}", *([] if value is True else [str(value)]))]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-m", "paceline.cli", *words], env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(
            f"paceline {' '.join(words)} ended with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
    return folder / name


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in metrics(run)]


def weights_hash(run: Path, step: int) -> str:
    hashes = hashlib.sha256()
    for file in sorted((run / "checkpoints" / f"step_{step:06d}").glob("*.safetensors")):
        hashes.update(file.read_bytes())
    return hashes.hexdigest()[:16]


def check_correctness(folder: Path, device: str) -> Iterator[tuple[str, bool, str]]:
    """(what, right, figures) of each check, as soon as it is known"""
    base = {**TINY, "device": device, "compile": "false"}
    cpu = losses(train(folder, "cpu", {**base, "device": "cpu", "precision": "fp32"}))
    fp32 = losses(train(folder, "fp32", {**base, "precision": "fp32"}))
    yield within("fp32 here against fp32 on the CPU", fp32, cpu, 2e-3)
    for precision in ("bf16", "fp16"):
        ours = losses(train(folder, precision, {**base, "precision": precision}))
        yield within(f"{precision} against fp32", ours, fp32, 0.05)
    compiled = losses(train(folder, "compiled", {**base, "precision": "fp32", "compile": "true"}))
    yield within("compiled against eager, fp32", compiled, fp32, 2e-3)
    if device == "cuda":
        rows = {**base, "precision": "fp32", "window-pattern": "SL", "sequence-len": 256}
        windows = losses(train(folder, "windows", rows))
        masked = losses(train(folder, "masks", {**rows, "device": "cpu"}))
        yield within("window attention (flex) against masks on the CPU", windows, masked, 2e-3)
    long = {"precision": "bf16", "sequence-len": 2048, "total-batch-size": 16384, "n-embd": 256, "head-dim": 128}
    # rows of 2,048: FlashAttention's backward adds several blocks to one gradient
    for compile_key in ("false", "true"):
        keys = {**base, **long, "deterministic": True, "window-pattern": "SL", "compile": compile_key}
        yield check_resume(folder, keys, f"resumed, compile={compile_key}")
    if device == "cuda":
        yield check_offload(folder, {**base, **long, "deterministic": True})


def within(what: str, ours: list[float], reference: list[float], tolerance: float) -> tuple[str, bool, str]:
    worst = max(abs(a - b) for a, b in zip(ours, reference, strict=True))
    return (
        what,
        worst <= tolerance,
        f"largest difference of the loss {worst:.2e} over {len(ours)} steps (allowed {tolerance:g})",
    )


def check_resume(folder: Path, keys: dict[str, object], name: str) -> tuple[str, bool, str]:
    """A run that lost its last checkpoint, resumed from the one before, ends with the same bits."""
    run = train(folder, name, {**keys, "save-every": 4})
    unbroken = weights_hash(run, 8)
    shutil.rmtree(run / "checkpoints" / "step_000008")
    train(folder, name, {"num-steps": 8}, command="resume")
    resumed = weights_hash(run, 8)
    return f"{name}, from step 4 against unbroken", resumed == unbroken, f"weights and states {unbroken} and {resumed}"


def check_offload(folder: Path, keys: dict[str, object]) -> tuple[str, bool, str]:
    """A run whose masters and states are on the host ends with the bits of one that has them on the GPU."""
    hashes = [
        weights_hash(train(folder, f"offload-{where}", {**keys, "precision": "bf16", "offload": where}), 8)
        for where in ("none", "optimizer")
    ]
    return "offload optimizer against none", len(set(hashes)) == 1, f"weights and states {' and '.join(hashes)}"


def shape_of(depth: int) -> dict[str, object]:
    """Every key that the recipe derives from the depth, since `paceline train` without a config takes those of tiny.toml."""
    return {"depth": depth, "n-embd": 64 * depth, "head-dim": 128, "window-pattern": "SSSL", "vocab-size": 32768}


def measure(
    folder: Path, depth: int, *, device: str, sequence_len: int, steps: int, offload: str = "none"
) -> tuple[str, float, float]:
    """One line of the table; and the seconds of a step, measured and planned."""
    rows = ROWS_OF_DEPTH.get(depth, 8)
    keys = {**shape_of(depth), "sequence-len": sequence_len, "device-batch-size": rows, "total-batch-size": 256 * sequence_len,
            "num-steps": steps, "device": device, "compile": "true" if device == "cuda" else "false", "save-every": 0,
            "offload": offload}  # fmt: skip
    started = time.monotonic()
    run = train(folder, f"d{depth}-offload-{offload}", keys)
    lines = metrics(run)[SKIPPED_STEPS:]
    plan = json.loads((run / "plan.json").read_text())
    planned, planned_s = plan["memory"]["allocated_bytes"]["expected"], plan["cost"].get("seconds")
    shutil.rmtree(run)
    speed = statistics.median(line["tok_per_sec"] for line in lines)
    share = lines[-1]["mfu"]
    mfu = "n/a" if share is None else f"{100 * speed / lines[-1]['tok_per_sec'] * share:.1f} %"
    line = (
        f"{depth:>5}  {rows:>4} x {sequence_len:<6}{speed:>12,.0f}  {mfu:>7}  {lines[-1]['peak_bytes'] / 2**30:>7.1f} GiB"
        f"  {planned / 2**30:>7.1f} GiB  {time.monotonic() - started:>5.0f} s in all"
    )
    step_s = statistics.median(line["step_ms"] for line in lines) / 1000
    return line, step_s, planned_s["expected"] if planned_s else math.nan


def offload_lines(
    folder: Path, depth: int, step_s: float, planned_s: float, *, device: str, sequence_len: int, steps: int
) -> str:
    """The depth's line with --offload optimizer, and its step beside one without. step_s, planned_s: of that one."""
    line, offloaded_s, planned_offloaded_s = measure(
        folder, depth, device=device, sequence_len=sequence_len, steps=steps, offload="optimizer"
    )
    return (
        f"{line}, --offload optimizer\n       a step takes {1000 * offloaded_s:,.0f} ms, without offloading {1000 * step_s:,.0f}:"
        f" {1000 * (offloaded_s - step_s):+,.0f} ms, planned {1000 * (planned_offloaded_s - planned_s):+,.0f} ms"
    )


def kernel_rows(depth: int, *, device: str, sequence_len: int) -> Iterator[tuple[str, bool, str]]:
    """(what, right, figures) of each way of attention and of the loss, in bf16."""
    sys.path.insert(0, str(ROOT))
    import torch

    from paceline.config import ATTENTION, Config
    from paceline.model.attention import attention_error
    from paceline.plan.machine import AttentionCase, probe_machine
    from paceline.plan.planner import make_plan
    from paceline.train.setup import attention_ms, try_attention

    rows = ROWS_OF_DEPTH.get(depth, 8)
    keys: dict[str, Any] = {key.replace("-", "_"): value for key, value in shape_of(depth).items()}
    keys |= {"sequence_len": sequence_len, "device_batch_size": rows, "total_batch_size": rows * sequence_len}
    config = Config(**keys, device=device, nproc=1, precision="bf16", num_steps=1)
    plan = make_plan(config, probe_machine(), vocab_size=config.vocab_size, num_rows=1000)
    card = torch.device(device, 0)
    capability = torch.cuda.get_device_capability(card) if device == "cuda" else None
    case = AttentionCase(plan.model, device, plan.precision, capability)
    for name in ATTENTION:
        problem, ms = case.problem(name), 0.0
        if problem is None:
            problem, ms = try_attention(plan, name, card)
        if problem is None:
            error = attention_error(plan.model, name, torch.bfloat16, card)
            full = attention_ms(replace(plan, model=replace(plan.model, window_pattern="L")), name, card)
            figures = (
                f"{ms:.2f} ms of a micro-step of {rows} rows, {full:.2f} ms with window L, error {100 * error:.2f} %"
            )
        else:
            figures = f"not taken: {problem}"
        yield f"attention by {name}", not (problem or "").startswith("its numbers"), figures
    yield from loss_rows(card, vocab=config.vocab_size, width=plan.model.n_embd)


def loss_rows(card: Any, *, vocab: int, width: int) -> Iterator[tuple[str, bool, str]]:
    """The loss between its products, on a chunk of logits in bf16, and the product that sums lm_head's gradient."""
    import torch

    from paceline.model import layers
    from paceline.train.measure import Bench

    num_tokens = (512 << 20) // (2 * vocab) if card.type == "cuda" else 64
    bench = Bench(card, world_size=1)
    z = 4 * torch.randn(num_tokens, vocab, device=card).bfloat16()
    targets = torch.randint(0, vocab, (num_tokens,), device=card)
    exact, nats = z.clone(), layers.capped_nats_(z.float(), targets, vocab, True)
    layers.capped_nats_(exact, targets, vocab, True)
    ways = {"PyTorch, op by op": layers.capped_nats_, "torch.compile": layers.compile_once(layers.capped_nats_)}
    problem = layers.fused_loss_problem(card)
    if problem is None:
        ways["Triton"] = torch.ops.paceline.capped_nats_
    else:
        yield "loss by Triton", card.type == "cpu", f"not taken: {problem}"
    for name, capped in ways.items():
        logits = z.clone()
        error = float((capped(logits, targets, vocab, True, None) - nats).norm() / nats.norm())
        gradient_error = float((logits.float() - exact.float()).norm() / exact.float().norm())
        ms = 1000 * bench.seconds(partial(capped, logits, targets, vocab, True, None))
        figures = f"{ms:.2f} ms for {num_tokens:,} x {vocab:,} logits, error {error:.1e}, of the gradient {gradient_error:.1e}"
        yield f"loss by {name}", error < 1e-4 and gradient_error < 5e-3, figures
    x, total = torch.randn(num_tokens, width, device=card).bfloat16(), torch.zeros(vocab, width, device=card)
    apart = 1000 * bench.seconds(lambda: total.add_(z.t() @ x))
    as_one = 1000 * bench.seconds(lambda: layers.plus_matmul(total, z.t(), x))
    wide, start = z.t().float() @ x.float(), torch.ones_like(total)
    error = float((layers.plus_matmul(start, z.t(), x) - 1 - wide).norm() / wide.norm())
    yield (
        "lm_head's gradient",
        error < 5e-3,
        f"{as_one:.2f} ms a chunk, {apart:.2f} ms as product and sum, error {error:.1e}",
    )


def low_rows(device: str, *, widths: tuple[int, ...] = (512, 768, 1024, 1536, 2048)) -> Iterator[tuple[str, bool, str]]:
    """What the card makes of low precisions, with 16,384 tokens a product; (what, right, figures)."""
    sys.path.insert(0, str(ROOT))
    import torch

    from paceline.model.linear import RECIPES, product_problem
    from paceline.plan.machine import probe_machine
    from paceline.plan.precision import native_problem
    from paceline.train.measure import Bench, linear_piece
    from paceline.train.product_trial import low_linear_rate

    card, tokens = torch.device(device, 0), 16_384 if device == "cuda" else 64
    widths = widths if device == "cuda" else (64,)
    yield from cast_rows(card)
    gpu = probe_machine().gpus[0] if device == "cuda" else None
    RECIPES["fp8 by rows"] = replace(RECIPES["fp8"], codec="rowwise")
    bench = Bench(card, world_size=1)
    wide = {w: 6 * tokens * 12 * w**2 / bench.seconds(linear_piece(bench, w, tokens, torch.bfloat16)) for w in widths}
    for name in ("fp8", "fp8 by rows", "mxfp8", "mxfp4", "nvfp4"):
        planned, found = native_problem(name.split()[0], gpu), product_problem(name, card)
        if found is not None:
            # what the plan refuses may fail here, and so may the comparison; all else should not
            yield f"{name} products", planned is not None or " " in name, f"not taken: {planned or found}"
            continue
        rates = {width: low_linear_rate(width, tokens, name, device=card) for width in widths}
        figures = ", ".join(f"{rates[width] / wide[width]:.2f} at {width:,}" for width in widths)
        yield (
            f"{name} products",
            True,
            f"times as fast as bf16: {figures}; {rates[widths[-1]] / 1e12:.0f} TFLOPS at the last",
        )


def cast_rows(card: Any) -> Iterator[tuple[str, bool, str]]:
    """The kernels that cast to fp8, on the largest input of a layer at depth 12; against PyTorch op by op and compiled."""
    import torch

    from paceline.model import layers, linear
    from paceline.model.formats import quantize_tensorwise
    from paceline.train.measure import Bench

    def by_ops(x: Any) -> tuple[Any, Any]:
        rows = quantize_tensorwise(x, "e5m2").elements
        return rows, rows.t().contiguous()

    def by_triton(x: Any) -> tuple[Any, Any]:
        rows, columns = linear.cast_at_once(x, "e5m2", linear.largest_of(x), rows=True, columns=True)
        return rows.values, columns.values

    x = torch.randn(16_384 if card.type == "cuda" else 64, 3072, device=card).bfloat16()
    ways = {"PyTorch, op by op": by_ops, "torch.compile": layers.compile_once(by_ops)}
    if card.type == "cuda" and linear.HAS_TRITON:
        ways["Triton"] = by_triton
    exact, bench = by_ops(x), Bench(card, world_size=1)
    for name, cast in ways.items():
        differing = max(
            float((a.view(torch.uint8) != b.view(torch.uint8)).float().mean())
            for a, b in zip(cast(x), exact, strict=True)
        )
        ms = 1000 * bench.seconds(partial(cast, x))
        # the compiler rounds in its own way: on capability 8.9 by way of fp16
        right = differing == 0 or (name == "torch.compile" and differing < 1e-3)
        yield (
            f"fp8 both ways by {name}",
            right,
            f"{ms:.3f} ms for {len(x):,} x 3,072, codes that differ {differing:.1e}",
        )


def low_run_lines(folder: Path, depth: int, *, device: str, sequence_len: int, steps: int) -> Iterator[str]:
    """Tokens/s of a depth with fp8 products beside bf16, of real runs; what the start's trial found is in the first line."""
    speeds = {}
    for precision in ("bf16", "fp8"):
        rows = ROWS_OF_DEPTH.get(depth, 8)
        keys = {**shape_of(depth), "sequence-len": sequence_len, "device-batch-size": rows, "num-steps": steps, "save-every": 0,
                "total-batch-size": 8 * rows * sequence_len, "device": device, "precision": precision, "compile": "true",
                **({} if device == "cuda" or precision == "bf16" else {"emulate": True})}  # fmt: skip
        run = train(folder, f"d{depth}-{precision}", keys)
        lines = metrics(run)[SKIPPED_STEPS:]
        speeds[precision] = statistics.median(line["tok_per_sec"] for line in lines)
        notes = [
            line["text"] for line in map(json.loads, (run / "events.jsonl").read_text().splitlines()) if "text" in line
        ]
        yield from (note for note in notes if "products" in note)
        yield f"depth {depth} in {precision}: {speeds[precision]:,.0f} tokens/s, loss {lines[-1]['loss']:.4f} after {steps} steps"
    yield f"fp8 is {speeds['fp8'] / speeds['bf16']:.2f} times as fast as bf16 at depth {depth}"


def plan_table(folder: Path, depths: list[int], *, device: str, sequence_len: int, budget_s: float) -> int:
    """Prints it. The number of configurations whose plan is more than 5 % off once it knows the measurements."""
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")  # what was measured before must not help
    ways = {"eager": {"compile": "false"}, "compiled": {"compile": "true"}}
    ways["checkpointed"] = {"compile": "false", "activation-checkpointing": "true"}
    started, runs = time.monotonic(), []
    for depth, (way, extra) in ((depth, way) for depth in depths for way in ways.items()):
        if time.monotonic() - started > budget_s:
            print(f"depth {depth} {way} left out: {budget_s:.0f} s are over")
            continue
        rows = ROWS_OF_DEPTH.get(depth, 8)
        keys = {**shape_of(depth), "sequence-len": sequence_len, "device-batch-size": rows, "device": device, "nproc": 1,
                "total-batch-size": 2 * rows * sequence_len, "num-steps": 3, "save-every": 0, **extra}  # fmt: skip
        run = train(folder, f"plan-d{depth}-{way}", keys)
        planned = json.loads((run / "plan.json").read_text())["memory"]
        measured = max(line["peak_bytes"] for line in metrics(run))
        shutil.rmtree(run)
        runs.append((depth, way, rows, keys, planned, measured))
    figure = "allocated_bytes" if device == "cuda" else "process_bytes"
    print("depth  way           rows       measured   by arithmetic     off   after runs     off")
    misses = 0
    for depth, way, rows, keys, planned, measured in runs:
        beside = planned["process_bytes"]["expected"] - planned["allocated_bytes"]["expected"]
        before = max(planned["phases"].values()) + (0 if device == "cuda" else beside)
        after = plan_of(keys)["memory"][figure]["expected"]
        misses += abs(after / measured - 1) > 0.05
        print(
            f"{depth:>5}  {way:<12}{rows:>6}  {measured / 2**30:>9.2f} GiB"
            f"  {before / 2**30:>9.2f} GiB  {100 * (before / measured - 1):>+5.1f} %"
            f"  {after / 2**30:>6.2f} GiB  {100 * (after / measured - 1):>+5.1f} %"
        )
    return misses


def plan_of(keys: dict[str, object]) -> dict[str, Any]:
    words = [word for key, value in keys.items() if key != "num-steps" for word in (f"--{key}", str(value))]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "paceline.cli", "plan", *words, "--num-steps", "3", "--json"]
    answer: dict[str, Any] = json.loads(
        subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    )
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--depths", default="8,12,20")
    parser.add_argument("--sequence-len", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--parts", default="right,kernels,low,fast", help="right: correctness; kernels; low; fast: speed"
    )
    parser.add_argument("--budget-s", type=float, default=460, help="no new depth is begun after this many seconds")
    parser.add_argument("--plan", action="store_true", help="planned memory beside measured")
    args = parser.parse_args()
    started = time.monotonic()
    depths = [int(word) for word in args.depths.split(",")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.plan:
            sys.exit(
                plan_table(folder, depths, device=args.device, sequence_len=args.sequence_len, budget_s=args.budget_s)
                > 0
            )
        wrong, parts = 0, args.parts.split(",")
        for what, right, figures in check_correctness(folder, args.device) if "right" in parts else ():
            wrong += not right
            print(f"{'ok   ' if right else 'WRONG'}  {what}: {figures}", flush=True)
        if "kernels" in parts:
            for what, right, figures in kernel_rows(depths[0], device=args.device, sequence_len=args.sequence_len):
                wrong += not right
                print(f"{'ok   ' if right else 'WRONG'}  {what}: {figures}", flush=True)
        if "low" in parts:
            for what, right, figures in low_rows(args.device):
                wrong += not right
                print(f"{'ok   ' if right else 'WRONG'}  {what}: {figures}", flush=True)
            of_run = {"device": args.device, "sequence_len": args.sequence_len, "steps": args.steps}
            for line in low_run_lines(folder, depths[min(1, len(depths) - 1)], **of_run):
                print(f"       {line}", flush=True)
        if "fast" not in parts:
            sys.exit(wrong > 0)
        print(
            "\ndepth  rows            tokens/s      mfu      peak memory      planned"
            f"   ({time.monotonic() - started:.0f} s so far)",
            flush=True,
        )
        for depth in depths:
            if time.monotonic() - started > args.budget_s:
                print(f"{depth:>5}  not measured: {args.budget_s:.0f} s are over")
                continue
            same = {"device": args.device, "sequence_len": args.sequence_len, "steps": args.steps}
            line, step_s, planned_s = measure(folder, depth, **same)
            print(line, flush=True)
            if depth == depths[-1] and args.device == "cuda":
                print(offload_lines(folder, depth, step_s, planned_s, **same), flush=True)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
