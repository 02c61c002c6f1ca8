"""What inductor makes of a run's step and evaluation for one card: programs of kernels, and a binary of each kernel."""

from typing import Any

from gpu_proof.card_compiler import KernelKeeper, make_binaries
from gpu_proof.walk import prepare, walk

# depth 12's shapes in two layers, one with a window and one without: what is compiled for the other ten is equal
DEPTH_12 = {
    "n_embd": 768,
    "head_dim": 128,
    "sequence_len": 2048,
    "device_batch_size": 8,
    "total_batch_size": 2 * 8 * 2048,
    "vocab_size": 32_768,
}


def main(capability: int, *walks: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the facts of each walk with programs and binaries. walks: the arguments of walk.walk; "binaries": false for none."""
    prepare()
    keeper, facts = KernelKeeper(capability), []
    for settings in walks:
        keeper.forget()
        wanted = settings.pop("binaries", True)
        fact = walk(keeper, **DEPTH_12 | settings)
        binaries = make_binaries(keeper.sources) if wanted else []
        facts.append(fact | {"programs": list(keeper.programs), "binaries": binaries})
    return facts
