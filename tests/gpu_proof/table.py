"""
Kernels and bytes of a training step of depth 12, as TorchInductor writes it for GPUs that are not there.

`PYTHONPATH=tests python -m gpu_proof.table 90 120`, with Triton installed. Bytes are what kernels read and write, each tensor once
for each kernel; what a cache saves is not counted. A product's bytes are included.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

from gpu_proof.fake_card import CARDS, on_card

ROWS = 16  # of a micro-batch
TOKENS = ROWS * 2048
SETTINGS = {"depth": 12, "device_batch_size": ROWS, "total_batch_size": TOKENS, "phases": ["step"], "binaries": False}
UPDATE = ("train/optim.py", "train/buckets.py", "train/update_batches.py", "train/updates.py")


def main() -> None:
    """Prints a Markdown table."""
    print(f"A micro-step of {TOKENS:,} tokens, and an update.\n")
    print("| GPU | part | kernels by Triton | products | other kernels | GB | bytes per token |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for capability in map(int, sys.argv[1:]):
            (facts,) = on_card(capability, "gpu_proof.kernels", capability, SETTINGS, folder=Path(folder))
            for part, triton, products, others, num_bytes in parts(facts):
                per_token = "" if part == "update" else f"{num_bytes / TOKENS:,.0f}"
                name = f"sm_{capability}, {CARDS[capability].name}"
                print(f"| {name} | {part} | {triton} | {products} | {others} | {num_bytes / 1e9:.1f} | {per_token} |")


def parts(facts: dict[str, Any]) -> list[tuple[str, int, int, int, int]]:
    """Returns each part's kernels and bytes."""
    assert facts["error"] is None, facts["error"]
    forward, backward = facts["programs"][:2]
    work = facts["step"]["work"]
    chunks = sum(count for place, _, count in facts["step"]["products"] if place == "model/layers.py:nats_by_chunk")
    outside = [work[place] for place in work if place.startswith("model/layers.py:")]
    update = [work[place] for place in work if place.startswith(UPDATE)]
    whole = [
        (name, len(program["launches"]), program["num_products"], len(program["eager_ops"]), program["bytes"])
        for name, program in (("forward", forward), ("backward", backward))
    ]
    products = 3 * chunks
    others = sum(count for count, _ in outside) - products - chunks  # the loss kernel runs once a chunk
    whole.append(("loss", chunks, products, others, sum(size for _, size in outside)))
    rows = [row for row in facts["step"]["products"] if row[0].startswith(UPDATE)]
    products = sum(count for _, _, count in rows)
    whole.append(("update", 0, products, sum(count for count, _ in update) - products, sum(size for _, size in update)))
    return whole


if __name__ == "__main__":
    main()
