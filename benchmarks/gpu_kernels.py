"""
The parts of a step alone, on one device, by the functions that a run calls; for benchmarks/gpu.py, a process for each.

    python benchmarks/gpu_kernels.py NAME DEPTH DEVICE SEQUENCE_LEN

Prints one JSON object a line: what, right, figures. Torch is imported here and not in gpu.py: what a kernel does to its process
ends with it.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from gpu_runs import ROOT, ROWS_OF_DEPTH, Setup, keys_of

from paceline.config import Config
from paceline.model import layers, linear
from paceline.model.attention import attention_error
from paceline.model.formats import quantize_tensorwise
from paceline.plan.machine import AttentionCase, probe_machine
from paceline.plan.planner import Plan, make_plan
from paceline.plan.precision import native_problem
from paceline.train.measure import Bench, linear_piece
from paceline.train.product_trial import low_linear_rate
from paceline.train.setup import attention_ms, try_attention

Line = tuple[str, bool, str]  # what, right, figures


def main() -> None:
    name, depth, device, sequence_len = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    card = torch.device(device, 0)
    if name.startswith("attention by "):
        lines = attention_lines(name.removeprefix("attention by "), depth, card, sequence_len=sequence_len)
    elif name.startswith("products in "):
        lines = product_lines(name.removeprefix("products in "), card)
    elif name == "casts to fp8":
        lines = cast_lines(card)
    else:
        lines = loss_lines(card, vocab=32768, width=64 * depth)
    for what, right, figures in lines:
        print(json.dumps({"what": what, "right": right, "figures": figures}), flush=True)


def attention_lines(name: str, depth: int, card: torch.device, *, sequence_len: int) -> Iterator[Line]:
    """One way of attention in bf16, its milliseconds with windows and without, and its error."""
    plan = plan_of(depth, card.type, sequence_len=sequence_len)
    capability = torch.cuda.get_device_capability(card) if card.type == "cuda" else None
    problem, ms = AttentionCase(plan.model, card.type, plan.precision, capability).problem(name), 0.0
    if problem is None:
        problem, ms = try_attention(plan, name, card)
    if problem is not None:
        yield name, not problem.startswith("its numbers"), f"not taken: {problem}"
        return
    error = attention_error(plan.model, name, torch.bfloat16, card)
    full = attention_ms(replace(plan, model=replace(plan.model, window_pattern="L")), name, card)
    rows = plan.device_batch_size
    yield (
        name,
        True,
        f"{ms:.2f} ms of a micro-step of {rows} rows, {full:.2f} ms with window L, error {100 * error:.2f} %",
    )


def plan_of(depth: int, device: str, *, sequence_len: int) -> Plan:
    setup = Setup(ROOT, deadline=0, device=device, sequence_len=sequence_len, steps=1)
    keys: dict[str, Any] = {
        key.replace("-", "_"): value
        for key, value in keys_of(setup, depth, total_rows=ROWS_OF_DEPTH.get(depth, 8)).items()
    }
    config = Config(**keys | {"compile": device == "cuda"}, device=device, nproc=1, precision="bf16")
    return make_plan(config, probe_machine(), vocab_size=config.vocab_size, num_rows=1000)


def loss_lines(card: torch.device, *, vocab: int, width: int) -> Iterator[Line]:
    """The loss between its products, on a chunk of logits in bf16, and the product that sums lm_head's gradient."""
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


def product_lines(name: str, card: torch.device) -> Iterator[Line]:
    """What the card makes of a low precision, with 16,384 tokens a product, beside bf16."""
    on_gpu = card.type == "cuda"
    tokens, widths = (16_384, (512, 768, 1024, 1536, 2048)) if on_gpu else (64, (64,))
    planned = native_problem(name, probe_machine().gpus[0] if on_gpu else None)
    problem = linear.product_problem(name, card)
    if problem is not None:
        # what the plan refuses may fail here, and so may the comparison; all else should not
        yield name, planned is not None, f"not taken: {planned or problem}"
        return
    bench = Bench(card, world_size=1)
    wide = {w: 6 * tokens * 12 * w**2 / bench.seconds(linear_piece(bench, w, tokens, torch.bfloat16)) for w in widths}
    rates = {width: low_linear_rate(width, tokens, name, device=card) for width in widths}
    figures = ", ".join(f"{rates[width] / wide[width]:.2f} at {width:,}" for width in widths)
    yield name, True, f"times as fast as bf16: {figures}; {rates[widths[-1]] / 1e12:.0f} TFLOPS at the last"


def cast_lines(card: torch.device) -> Iterator[Line]:
    """The kernels that cast to fp8, on the largest input of a layer at depth 12; against PyTorch op by op and compiled."""

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


if __name__ == "__main__":
    main()
