"""
paceline's loop beside a bare PyTorch DDP loop of the same model on CPU processes, in turn, and the ratios.

    python benchmarks/cpu.py [--rounds 5] [--steps 12] [--only fp32,auto,start,muon] [--peer NAME=COMMAND ...]

fp32: tokens/s with AdamW and fp32 on both sides. auto: paceline at its automatic precision against bare fp32. start: seconds
from the command to the end of the first step. muon: the Muon recipe against AdamW at the tiny config's total batch. Steps are
real runs of both commands; the first two of each are not counted. Medians over rounds, with the spread of the ratios.

--peer: another trainer of a model of this shape (6 layers, 384 wide, 6 heads, rows of 256 tokens, vocabulary 8192, 8 rows a
process) in the same rounds, by its own command, in which {nproc} and {threads} stand for the layout. Its last line is JSON with
tokens_per_s.
"""

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from paceline.config import Config, ModelConfig
from paceline.launch.run_text import prepare_data

SHAPE = ModelConfig(n_layer=6, n_embd=384, n_head=6, n_kv_head=6, head_dim=64, sequence_len=256, vocab_size=8192)
ROWS = 8
SKIPPED_STEPS = 2
LAYOUTS = ((1, 2), (2, 1))  # processes, threads of each
BARE = Path(__file__).with_name("bare.py")


def run_bare(folder: Path, *, nproc: int, threads: int, steps: int, shard: Path) -> tuple[float, float]:
    """Tokens/s, seconds from the command to the end of the first step."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={nproc}", "--standalone", str(BARE)]
    command += ["--shape", json.dumps(asdict(SHAPE)), "--tokens", str(shard), "--rows", str(ROWS)]
    command += ["--steps", str(steps), "--threads", str(threads)]
    started = time.time()
    done = subprocess.run(command, env=thread_env(threads), capture_output=True, text=True, check=True)
    result = json.loads(done.stdout.strip().splitlines()[-1])
    median = statistics.median(result["seconds"][SKIPPED_STEPS:])
    return nproc * ROWS * SHAPE.sequence_len / median, result["first_step"] - started


def run_paceline(folder: Path, *, nproc: int, threads: int, steps: int, flags: list[str]) -> tuple[float, float]:
    """The same of `paceline train`, read from its run folder."""
    name = f"run-{time.time_ns()}"
    command = [
        sys.executable,
        "-m",
        "paceline.cli",
        "train",
        "--runs-dir",
        str(folder),
        "--name",
        name,
        "--nproc",
        str(nproc),
    ]
    command += [
        "--num-steps",
        str(steps),
        "--log-every",
        "1",
        "--eval-every",
        "0",
        "--save-every",
        "0",
        "--eval-tokens",
        "256",
    ]
    started = time.time()
    subprocess.run([*command, *flags], env=thread_env(threads), capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    first = datetime.fromisoformat(lines[0]["time"]).timestamp()
    total = json.loads((folder / name / "plan.json").read_text())["total_batch_size"]
    shutil.rmtree(folder / name)
    return total / statistics.median(line["step_ms"] / 1000 for line in lines[SKIPPED_STEPS:]), first - started


def run_peer(command: str, *, nproc: int, threads: int) -> float:
    """Tokens/s that a peer's command prints."""
    filled = shlex.split(command.format(nproc=nproc, threads=threads))
    done = subprocess.run(filled, env=thread_env(threads), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{command} ended with {done.returncode}\n{done.stderr[-2000:]}")
    return float(json.loads(done.stdout.strip().splitlines()[-1])["tokens_per_s"])


def thread_env(threads: int) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": str(threads)}


def same_model_flags(total: int) -> list[str]:
    shape = {
        "depth": SHAPE.n_layer,
        "n-embd": SHAPE.n_embd,
        "head-dim": SHAPE.head_dim,
        "sequence-len": SHAPE.sequence_len,
    }
    rest = {"vocab-size": SHAPE.vocab_size, "device-batch-size": ROWS, "total-batch-size": total}
    return [word for key, value in {**shape, **rest}.items() for word in (f"--{key}", str(value))]


def report(title: str, ours: list[float], theirs: list[float], *, unit: str, names: tuple[str, str]) -> None:
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    print(
        f"{title:<34} {names[0]} {statistics.median(ours):>10,.1f}  {names[1]} {statistics.median(theirs):>10,.1f} {unit}"
        f"  ratio {statistics.median(ratios):.3f}  ({ratios[0]:.3f} to {ratios[-1]:.3f}, {len(ratios)} rounds)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", default="fp32,auto,start,muon")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND")
    args = parser.parse_args()
    for peer in args.peer:
        if not all(peer.partition("=")):
            parser.error(f"--peer {peer}: write NAME=COMMAND")
    wanted = set(args.only.split(","))
    dataset = prepare_data(Config(vocab_size=SHAPE.vocab_size))
    shard = dataset.path / "train_00000.bin"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for nproc, threads in LAYOUTS:
            if wanted & {"fp32", "auto", "start"}:
                compare_loops(folder, nproc=nproc, threads=threads, args=args, wanted=wanted, shard=shard)
        if "muon" in wanted:
            compare_optimizers(folder, args)


def compare_loops(
    folder: Path, *, nproc: int, threads: int, args: argparse.Namespace, wanted: set[str], shard: Path
) -> None:
    flags = [*same_model_flags(nproc * ROWS * SHAPE.sequence_len), "--optimizer", "adamw"]
    fp32, auto, bare, first, bare_first = [], [], [], [], []
    peers: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        speed, seconds = run_bare(folder, nproc=nproc, threads=threads, steps=args.steps, shard=shard)
        bare.append(speed)
        bare_first.append(seconds)
        if wanted & {"fp32", "start"}:
            speed, seconds = run_paceline(
                folder, nproc=nproc, threads=threads, steps=args.steps, flags=[*flags, "--precision", "fp32"]
            )
            fp32.append(speed)
            first.append(seconds)
        if "auto" in wanted:
            auto.append(run_paceline(folder, nproc=nproc, threads=threads, steps=args.steps, flags=flags)[0])
        for name, _, command in (peer.partition("=") for peer in args.peer):
            peers.setdefault(name, []).append(run_peer(command, nproc=nproc, threads=threads))
    layout = f"{nproc} x {threads} threads"
    names = ("paceline", "bare")
    if "fp32" in wanted:
        report(f"{layout}: fp32", fp32, bare, unit="tok/s", names=names)
    if "auto" in wanted:
        report(f"{layout}: automatic precision", auto, bare, unit="tok/s", names=names)
    for name, speeds in peers.items():
        report(f"{layout}: fp32", fp32 or auto, speeds, unit="tok/s", names=("paceline", name))
    if "start" in wanted:
        report(f"{layout}: command to first step", first, bare_first, unit="s", names=names)
        extra = statistics.median(a - b for a, b in zip(first, bare_first, strict=True))
        print(f"{'':<34} {extra:+.2f} s", flush=True)


def compare_optimizers(folder: Path, args: argparse.Namespace) -> None:
    """configs/tiny.toml as it is, against the same with AdamW for all."""
    muon, adamw = [], []
    for _ in range(args.rounds):
        muon.append(run_paceline(folder, nproc=2, threads=1, steps=args.steps, flags=[])[0])
        adamw.append(run_paceline(folder, nproc=2, threads=1, steps=args.steps, flags=["--optimizer", "adamw"])[0])
    report("tiny, 2 x 1: Muon against AdamW", muon, adamw, unit="tok/s", names=("muon", "adamw"))


if __name__ == "__main__":
    main()
