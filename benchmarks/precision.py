"""
The same small training in each precision: what rounding costs in bits per byte of held-out text, beside bf16.

    python benchmarks/precision.py [--depth 4] [--steps 300] [--tokens 1024] [--seeds 1,2,3] [--only bf16,nvfp4] [--optimizer adamw]
                                   [--all-blocks] [--out FILE]

Low precisions are emulated. Runs of one seed have the same first weights and the same rows in the same order, so each is compared
with the bf16 run of its seed: mean and spread of the differences. "nvfp4 plain" is NVFP4 without Hadamard transform and stochastic
rounding; "bf16 8bit" is bf16 with `--optimizer-states 8bit`. --all-blocks: the last blocks too have 4 bits. Finished runs are kept
in --out, and a second start goes on behind them. Prints a Markdown table.
"""

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

import torch

from paceline.config import Config
from paceline.data.tokenizer import Tokenizer
from paceline.heartbeat import HeartbeatWriter
from paceline.launch.run_text import prepare_data
from paceline.model.linear import RECIPES
from paceline.plan.machine import probe_machine
from paceline.plan.planner import Plan, make_plan
from paceline.plan.precision import LowPrecision
from paceline.rundir import RunDir
from paceline.train.evaluate import val_bpb
from paceline.train.loop import Loop, StopRequest, TrainLoader
from paceline.train.optim import make_optimizer
from paceline.train.setup import make_model

PLAIN, STATES = "nvfp4 plain", "bf16 8bit"
NAMES = ("fp32", "bf16", STATES, "fp8", "mxfp8", "mxfp4", "nvfp4", PLAIN)
EVAL_TOKENS = 131_072


def main() -> None:
    """Runs what is not in --out yet, then prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=1024, help="of a step")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--only", default=",".join(NAMES))
    parser.add_argument("--optimizer", default="muon")
    parser.add_argument("--all-blocks", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("precision.jsonl"))
    args = parser.parse_args()
    RECIPES[PLAIN] = replace(RECIPES["nvfp4"], stochastic=False, rotation=0)
    same = {name: getattr(args, name) for name in ("depth", "steps", "tokens", "optimizer", "all_blocks")}
    done = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    for seed in map(int, args.seeds.split(",")):
        for name in args.only.split(","):
            wanted = {**same, "seed": seed, "precision": name}
            if any(wanted.items() <= run.items() for run in done):
                continue
            done.append({**wanted, **train(name, **same, seed=seed)})
            with args.out.open("a") as file:
                file.write(json.dumps(done[-1]) + "\n")
            print(json.dumps(done[-1]), flush=True)
    print(table([run for run in done if same.items() <= run.items()]))


def train(
    name: str, *, depth: int, steps: int, tokens: int, seed: int, optimizer: str, all_blocks: bool
) -> dict[str, float]:
    """Trains in a precision; returns val_bpb at the end, and the seconds of it all."""
    started = time.perf_counter()
    low = name if name not in ("fp32", "bf16", STATES) else None
    config = Config(
        depth=depth, head_dim=64, sequence_len=128, vocab_size=2048, device_batch_size=tokens // 128, total_batch_size=tokens,
        num_steps=steps, seed=seed, device="cpu", nproc=1, compile=False,
        precision=name.removesuffix(" plain").removesuffix(" 8bit"), emulate=low is not None, optimizer=optimizer,
        optimizer_states="8bit" if name == STATES else "fp32",
    )  # fmt: skip
    dataset = prepare_data(config)
    made = make_plan(config, probe_machine(), vocab_size=config.vocab_size, num_rows=0)
    plan = replace(
        made, precision="fp32" if name == "fp32" else "bf16", low_precision=named(made, low, all_blocks=all_blocks)
    )
    torch.set_num_threads(1)  # a sum over threads would round in their number's way
    device = torch.device("cpu")
    model = make_model(plan, seed=seed, device=device)
    updater = make_optimizer(model, plan, plan.groups, rank=0)
    loader = TrainLoader(dataset.split("train", "stream"), plan, seed, 0, device, skipped_batches=())
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(Path(folder))
        progress = HeartbeatWriter(run, 0)
        loop = Loop(
            run, config, plan, updater, loader.micro_batch, 0, device, progress, StopRequest(), model.low_products
        )
        losses = [loop.one_step(step)[0]["loss"] for step in range(steps)]
    bpb = val_bpb(
        model,
        dataset.split("val", "stream"),
        token_bytes=torch.from_numpy(Tokenizer.load(dataset.tokenizer_json).token_bytes()),
        max_tokens=EVAL_TOKENS,
        device_batch_size=plan.device_batch_size,
        rank=0,
        world_size=1,
    )
    return {"val_bpb": bpb, "loss": fmean(losses[-20:]), "seconds": time.perf_counter() - started}


def named(plan: Plan, name: str | None, *, all_blocks: bool) -> LowPrecision | None:
    """Returns the plan's low precision under the name of its recipe."""
    if plan.low_precision is None or name is None:
        return None
    num_layers = plan.model.n_layer if all_blocks else plan.low_precision.num_layers
    return LowPrecision(name, plan.low_precision.emulated, num_layers)


def table(runs: list[dict[str, float]]) -> str:
    """Returns the Markdown table of val_bpb and its differences to bf16 of the same seed."""
    of_bf16 = {run["seed"]: run["val_bpb"] for run in runs if run["precision"] == "bf16"}
    lines = ["| precision | val_bpb, mean | minus bf16's | of each seed | seconds |", "|---|---|---|---|---|"]
    for name in NAMES:
        own = [run for run in runs if run["precision"] == name and run["seed"] in of_bf16]
        if not own:
            continue
        differences = [run["val_bpb"] - of_bf16[run["seed"]] for run in own]
        spread = f" ± {stdev(differences):.4f}" if len(own) > 1 and name != "bf16" else ""
        each = ", ".join(f"{difference:+.4f}" for difference in differences)
        mean, seconds = fmean(run["val_bpb"] for run in own), fmean(run["seconds"] for run in own)
        lines.append(f"| {name} | {mean:.4f} | {fmean(differences):+.4f}{spread} | {each} | {seconds:.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
