"""
The speed of this device in each piece of a training step: `python -m paceline.train.measure --device cpu --threads N --out FILE`.

It takes some seconds, once for each machine and number of processes. With --processes N as many measure at once, since they share
memory and cores as a run's ranks do. The pieces are the model's own functions, at sizes between which plan/speeds.py interpolates.
"""

# t tokens, C width, V vocabulary

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.config import LOW_PRECISIONS, ModelConfig
from paceline.model.attention import attend
from paceline.model.gpt import DTYPES, GPT
from paceline.model.layers import capped_nats_, chunk_rows, embedding_gradient, fused_loss_problem, plus_matmul
from paceline.model.linear import product_problem
from paceline.plan.algorithms import longer_side, newton_schulz_flops
from paceline.plan.cost import attention_pairs
from paceline.plan.host import probe_cpu_bf16
from paceline.plan.speeds import Speeds
from paceline.rundir import utc_now, write_atomic
from paceline.train.buckets import SegmentSum, start_all_gather
from paceline.train.process import ONEDNN_GAIN, all_reduce_sum, finish_work, keep_freed_memory, onednn_gain, use_onednn
from paceline.train.product_trial import low_linear_rate
from paceline.train.updates import adamw_update, muon_update, newton_schulz_dtype

SHORTEST_S = 0.04  # a piece is repeated for at least so long
FEWEST, MOST = 4, 50  # repeats
TURNS = 5  # of a deeper and a shallower model
SENDS = 12
HEAD_DIM, HEADS = 64, 2
MIN_OTHER_SHARE = 0.05  # of a layer's time, for the ops between products: noise must not make it zero
BUDGET_BYTES = 512 << 20  # of logits: the config's default


Rates = dict[str, list[tuple[float, float]]]  # by name: size, units per second


@dataclass(frozen=True)
class Sizes:
    """Small enough for seconds on this kind of device, wide enough for what is trained on it."""

    tokens: int
    widths: tuple[int, ...]
    layer_widths: tuple[int, ...]
    row_lengths: tuple[int, ...]
    vocab: int
    muon_widths: tuple[int, ...]
    elements: int


SIZES = {
    "cpu": Sizes(1024, (64, 128, 256, 512, 768), (128, 384), (128, 256, 512, 1024), 4096,
                 (64, 128, 256, 512), 1 << 21),
    "cuda": Sizes(32768, (256, 512, 768, 1024, 1536, 2048), (512, 1024, 1536), (1024, 2048, 4096), 32768,
                  (256, 512, 1024, 1536), 1 << 25),
}  # fmt: skip


@dataclass(frozen=True)
class Bench:
    """Times on one rank, averaged over all."""

    device: torch.device
    world_size: int

    def seconds(self, piece: Callable[[], object], *, repeats: int | None = None) -> float:
        """Of one call, the lower quartile: others on the machine only add. Collective; so is a piece with `repeats`."""
        piece()
        finish_work(self.device)
        if self.world_size > 1:
            dist.barrier()
        times: list[float] = []
        fewest, most = (FEWEST, MOST) if repeats is None else (repeats, repeats)
        while len(times) < fewest or (sum(times) < SHORTEST_S and len(times) < most):
            started = time.perf_counter()
            piece()
            finish_work(self.device)
            times.append(time.perf_counter() - started)
        lower_quartile = statistics.quantiles(times, n=4)[0] if len(times) > 1 else times[0]
        total = torch.tensor([lower_quartile], dtype=torch.float64)
        all_reduce_sum(total)
        return float(total) / self.world_size


def main() -> None:
    """Measures and writes --out; with --processes it starts as many of itself."""
    parser = argparse.ArgumentParser(description="Speeds of this device, for paceline plan")
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--precision", help="default: fp32, and bf16 where the device multiplies it natively")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is None and args.processes > 1:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "paceline.train.measure", *sys.argv[1:], f"--store={folder}/store"]
            ranks = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(args.processes)]
            codes = [rank.wait() for rank in ranks]
        sys.exit(next((code for code in codes if code), 0))  # of the first that failed
    torch.set_num_threads(args.threads)
    device = torch.device(args.device, args.rank or 0) if args.device == "cuda" else torch.device("cpu")
    if args.processes > 1:
        where = f"file://{args.store}"
        dist.init_process_group("gloo", init_method=where, rank=args.rank, world_size=args.processes)
    # a CPU without bf16 takes half an hour for products that nobody plans on it
    native = "bf16,fp32" if args.device == "cuda" or probe_cpu_bf16() else "fp32"
    precisions = (args.precision or native).split(",")
    speeds = measure(device, threads=args.threads, processes=args.processes, precisions=precisions)
    if not args.rank:
        write_atomic(args.out, json.dumps(asdict(speeds), indent=1) + "\n")
    if args.processes > 1:
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # as the worker: gloo's threads abort in the interpreter's own exit, now and then


def measure(device: torch.device, *, threads: int, processes: int, precisions: list[str]) -> Speeds:
    """Measures all pieces. Collective where there are several processes."""
    if device.type == "cpu":
        keep_freed_memory()
    bench, sizes = Bench(device, processes), SIZES[device.type]
    rates: Rates = {}
    # the host's seconds for a layer and for a micro-step, on tensors so small that the ops take no time
    models = [ModelConfig(depth, 32, 2, 2, 16, sequence_len=8, vocab_size=64) for depth in (2, 6)]
    shallow_s, deep_s = (bench.seconds(model_piece(bench, model, 8, torch.float32)) for model in models)
    layer_s = max(deep_s - shallow_s, 0.0) / 4
    micro_step_s = max(shallow_s - 2 * layer_s, 0.0)
    for precision in sorted(precisions):  # bf16 before fp32, whose setting holds for the rest of the process
        if device.type == "cpu" and precision == "fp32" and onednn_gain() >= ONEDNN_GAIN:
            use_onednn()
        points_of = layer_rates(bench, sizes, DTYPES[precision], host_s=layer_s)
        rates |= {f"{name} {precision}": points for name, points in points_of.items()}
    rates |= low_rates(device, sizes)
    for name, aspect in (("muon", 1), ("muon_long", 4)):
        shapes = [(aspect * width, width) for width in sizes.muon_widths]
        rates[name] = [(float(shape[1]), newton_schulz_flops(shape) / muon_seconds(bench, shape)) for shape in shapes]
    rates |= memory_rates(bench, sizes)
    host = {"layer": layer_s, "micro_step": micro_step_s, "update": muon_seconds(bench, (8, 8))}
    if processes > 1:
        host["send"], rate = send_rate(bench, processes)
        rates["send"] = [(1.0, rate)]
    return Speeds(
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        threads=threads,
        processes=processes,
        rates={name: tuple(points) for name, points in rates.items()},
        host=host,
        source=f"measured {utc_now()[:10]} with torch {torch.__version__} on {platform.machine()}",
    )


def layer_rates(bench: Bench, sizes: Sizes, dtype: torch.dtype, *, host_s: float) -> Rates:
    """Returns the rates of a precision."""
    linear = []
    for width in sizes.widths:
        seconds = bench.seconds(linear_piece(bench, width, sizes.tokens, dtype))
        linear.append((float(width), 6 * sizes.tokens * 12 * width**2 / seconds))
    return {
        "linear": linear,
        **attention_rates(bench, sizes, dtype),
        "pointwise": [pointwise_rate(bench, width, sizes, dtype, host_s=host_s) for width in sizes.layer_widths],
        "head": [head_rate(bench, width, sizes, dtype) for width in sizes.layer_widths],
        "logits": [logits_rate(bench, vocab, dtype) for vocab in (sizes.vocab // 8, sizes.vocab)],
    }


def low_rates(device: torch.device, sizes: Sizes) -> Rates:
    """Returns the rates of a layer's products in each low precision that this GPU computes rightly."""
    names = [name for name in LOW_PRECISIONS if device.type == "cuda" and product_problem(name, device) is None]
    return {
        f"linear {name}": [
            (float(width), low_linear_rate(width, sizes.tokens, name, device=device)) for width in sizes.widths
        ]
        for name in names
    }


def linear_piece(bench: Bench, width: int, tokens: int, dtype: torch.dtype) -> Callable[[], object]:
    """Returns the products of a layer's matrices together: four square ones and two four times as large."""
    sides = [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]
    weights = [torch.randn(side, dtype=dtype, device=bench.device) for side in sides]
    streams = {side: torch.randn(tokens, side, dtype=dtype, device=bench.device) for side in (width, 4 * width)}

    def piece() -> None:
        for weight in weights:
            x, dy = streams[weight.shape[1]], streams[weight.shape[0]]
            _ = x @ weight.t(), dy @ weight, dy.t() @ x

    return piece


def attention_rates(bench: Bench, sizes: Sizes, dtype: torch.dtype) -> Rates:
    """Measures by two head widths: what grows with the width are the products, the remainder is the softmax."""
    narrow, wide, rates = 32, 128, Rates(attention_dots=[], attention_pairs=[])
    for row_length in sizes.row_lengths:
        narrow_s, wide_s = (
            attention_seconds(bench, row_length, sizes.tokens, dtype, width) for width in (narrow, wide)
        )
        rows = max(1, sizes.tokens // row_length)
        pairs = rows * HEADS * attention_pairs(row_length, row_length, device=bench.device.type)
        slope = max(wide_s - narrow_s, 0.1 * wide_s) / (wide - narrow)
        rates["attention_dots"].append((float(row_length), 12 * pairs / slope))
        softmax_s = max(narrow_s - narrow * slope, 0.02 * narrow_s)
        rates["attention_pairs"].append((float(row_length), pairs / softmax_s))
    return rates


def attention_seconds(bench: Bench, row_length: int, tokens: int, dtype: torch.dtype, head_dim: int) -> float:
    shape = (max(1, tokens // row_length), HEADS, row_length, head_dim)
    q, k, v = (torch.randn(shape, dtype=dtype, device=bench.device, requires_grad=True) for _ in range(3))

    def piece() -> None:
        y = attend(q, k, v, None, window=row_length)
        torch.autograd.grad(y, (q, k, v), y.detach())

    return bench.seconds(piece)


def model_piece(bench: Bench, config: ModelConfig, tokens: int, dtype: torch.dtype) -> Callable[[], object]:
    model = GPT(config, compute_dtype=dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.02)
    model.to(bench.device)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data = parameter.data.to(dtype)
    idx = torch.randint(0, 64, (max(1, tokens // config.sequence_len), config.sequence_len), device=bench.device)

    def piece() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        model(idx, idx).backward()

    return piece


def pointwise_rate(bench: Bench, width: int, sizes: Sizes, dtype: torch.dtype, *, host_s: float) -> tuple[float, float]:
    """What a layer takes beyond products, attention and the host's share."""
    row_length, tokens = sizes.row_lengths[1], 2 * sizes.tokens
    heads, shallow, deep = max(1, width // HEAD_DIM), 1, 4
    models = [ModelConfig(depth, width, heads, heads, HEAD_DIM, row_length, 64) for depth in (shallow, deep)]
    pieces = [model_piece(bench, model, tokens, dtype) for model in models]
    # one layer of the real model, forward and backward: a deeper one's time less a shallower one's, in turn
    differences = [-bench.seconds(pieces[0], repeats=1) + bench.seconds(pieces[1], repeats=1) for _ in range(TURNS)]
    whole = statistics.median(differences) / (deep - shallow)
    products = bench.seconds(linear_piece(bench, width, tokens, dtype))
    attention = attention_seconds(bench, row_length, tokens, dtype, HEAD_DIM) * (width // HEAD_DIM) / HEADS
    remainder = whole - products - attention - (host_s if bench.device.type == "cpu" else 0.0)
    return float(tokens * width), tokens * width / max(remainder, MIN_OTHER_SHARE * whole)


def head_rate(bench: Bench, width: int, sizes: Sizes, dtype: torch.dtype) -> tuple[float, float]:
    """lm_head's three products, a chunk of tokens at a time, as model/layers.py makes them."""
    x = torch.randn(sizes.tokens, width, dtype=dtype, device=bench.device)
    weight = torch.randn(sizes.vocab, width, dtype=dtype, device=bench.device)
    chunk, _ = chunk_rows(x, sizes.vocab, BUDGET_BYTES, in_place=bench.device.type == "cuda")
    buffer, dx = x.new_empty(chunk, sizes.vocab), torch.empty_like(x)

    def piece() -> None:
        dw = None
        for start in range(0, sizes.tokens, chunk):
            rows = x[start : start + chunk]
            logits = torch.mm(rows, weight.t(), out=buffer[: len(rows)])
            torch.mm(logits, weight, out=dx[start : start + chunk])
            dw = plus_matmul(dw, logits.t(), rows)

    return float(width), 6 * sizes.tokens * width * sizes.vocab / bench.seconds(piece)


def logits_rate(bench: Bench, vocab: int, dtype: torch.dtype) -> tuple[float, float]:
    """Returns logits per second, from logits to their gradient, on a block as model/layers.py takes it."""
    z = torch.zeros(4096, vocab, dtype=dtype, device=bench.device)
    fused = fused_loss_problem(bench.device) is None
    _, block = chunk_rows(z, vocab, BUDGET_BYTES, in_place=fused)
    z, capped = z[:block].normal_(), torch.ops.paceline.capped_nats_ if fused else capped_nats_
    targets = torch.randint(0, vocab, (block,), device=bench.device)
    return float(vocab), block * vocab / bench.seconds(lambda: capped(z, targets, vocab, True, None))


def muon_seconds(bench: Bench, shape: tuple[int, int]) -> float:
    """Returns the seconds of one update of a matrix, with settings that change nothing of the time."""
    weight, grad, momentum = (torch.randn(shape, device=bench.device) for _ in range(3))
    second, dtype = torch.ones(longer_side(shape), device=bench.device), newton_schulz_dtype(bench.device)
    settings = {"lr": 0.0, "momentum": 0.9, "beta2": 0.9, "weight_decay": 0.1, "grad_scale": 1.0}
    return bench.seconds(lambda: muon_update(weight, grad, momentum, second, dtype=dtype, **settings))


def memory_rates(bench: Bench, sizes: Sizes) -> Rates:
    """Returns elements per second of AdamW and of an embedding's gradient, and bytes per second, read and written, of a copy."""
    weight, grad, exp_avg, exp_avg_sq = (torch.ones(sizes.elements, device=bench.device) for _ in range(4))

    def adamw() -> None:
        settings = {"lr": 0.0, "eps": 1e-10, "weight_decay": 0.1, "grad_scale": 1.0}
        adamw_update([weight], [grad], [exp_avg], [exp_avg_sq], step=1, betas=(0.9, 0.95), **settings)

    width = 128
    dy = torch.randn(sizes.tokens, width, device=bench.device)
    idx = torch.randint(0, sizes.vocab, (sizes.tokens,), device=bench.device)
    source = torch.ones(16 * sizes.elements, dtype=torch.uint8, device=bench.device)
    target = torch.ones_like(source)  # zeros may all be one page of memory
    works = {
        "adamw": (sizes.elements, adamw),
        "table": (width * (sizes.tokens + sizes.vocab), lambda: embedding_gradient(dy, idx, sizes.vocab)),
        "copy": (2 * len(source), lambda: target.copy_(source)),
    }
    return {name: [(1.0, amount / bench.seconds(piece))] for name, (amount, piece) in works.items()}


def send_rate(bench: Bench, processes: int) -> tuple[float, float]:
    """Returns seconds of a message and bytes per second each way, of a sum over ranks and a gather as in a step."""
    rank, times = dist.get_rank(), []
    for segment in (1 << 14, 1 << 20):
        flat = torch.ones(processes * segment)
        total = SegmentSum(flat, rank=rank, world_size=processes, tag=1)

        def piece(flat: Tensor = flat, total: SegmentSum = total) -> None:
            total.start()
            total.wait()
            for work in start_all_gather(flat, rank=rank, world_size=processes, tag=2):
                work.wait()

        times.append(bench.seconds(piece, repeats=SENDS) / 2)
    sent = [4 * segment * (processes - 1) for segment in (1 << 14, 1 << 20)]
    rate = (sent[1] - sent[0]) / max(times[1] - times[0], 1e-9)
    return max(times[0] - sent[0] / rate, 0.0), rate


if __name__ == "__main__":
    main()
