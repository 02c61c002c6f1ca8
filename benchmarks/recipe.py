"""
The recipe's claim: Muon reaches AdamW's val_bpb in at most 60 % of its steps. Same model, rows and schedule, depth 4.

    python benchmarks/recipe.py [--data FILE] [--steps 300] [--share 0.6]

AdamW trains for all steps at each of several learning rates and its best counts; then Muon trains for that share of the
steps, with its own default settings. Both have their whole schedule, warm-down included. A step has twice the tokens of
tiny.toml: at its 12,288 both are so far from converged that the count of steps decides alone. Prints a table; exit code 1 if the
claim does not hold.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ADAMW_LRS = (0.01, 0.02, 0.04)
TOTAL_BATCH_SIZE = 24_576


def train(folder: Path, name: str, data: str, words: list[str]) -> float:
    """val_bpb at the end of a run of the tiny model."""
    command = [sys.executable, "-m", "paceline.cli", "train", "--runs-dir", str(folder), "--name", name, "--data", data]
    command += ["--eval-every", "0", "--save-every", "0", "--total-batch-size", str(TOTAL_BATCH_SIZE), *words]
    subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ)
    return float(json.loads((folder / name / "metrics.jsonl").read_text().splitlines()[-1])["val_bpb"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="builtin")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--share", type=float, default=0.6)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        adamw = {}
        for lr in ADAMW_LRS:
            words = ["--optimizer", "adamw", "--matrix-lr", str(lr), "--num-steps", str(args.steps)]
            adamw[lr] = train(folder, f"adamw-{lr}", args.data, words)
            print(f"adamw  matrix_lr {lr:<6} {args.steps:>5} steps  val_bpb {adamw[lr]:.4f}", flush=True)
        steps = round(args.share * args.steps)
        muon = train(folder, "muon", args.data, ["--num-steps", str(steps)])
        print(f"muon   defaults         {steps:>5} steps  val_bpb {muon:.4f}")
    best = min(adamw.values())
    verdict = "holds" if muon <= best else "does not hold"
    print(f"\nMuon in {args.share:.0%} of the steps: {muon:.4f} against AdamW's best {best:.4f}: {verdict}")
    sys.exit(0 if muon <= best else 1)


if __name__ == "__main__":
    main()
