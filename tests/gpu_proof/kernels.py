"""What inductor makes of a run's step and evaluation for one card: programs of kernels, and a binary of each kernel."""

from typing import Any

import torch
from gpu_proof.card_compiler import KernelKeeper, make_binaries
from gpu_proof.walk import CARD, prepare, walk
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.model.attention import attend, sliding_block_mask

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
    """Returns the facts of each walk with programs and binaries.

    walks: the arguments of walk.walk; "binaries": false for none. Or "flex": a head_dim, for FlexAttention's kernels alone.
    """
    prepare()
    keeper, facts = KernelKeeper(capability), []
    for settings in walks:
        keeper.forget()
        wanted, head_dim = settings.pop("binaries", True), settings.pop("flex", None)
        fact = flex_attention(head_dim) if head_dim else walk(keeper, **DEPTH_12 | settings)
        binaries = make_binaries(keeper.sources) if wanted else []
        facts.append(fact | {"programs": list(keeper.programs), "binaries": binaries})
    return facts


def flex_attention(head_dim: int) -> dict[str, None]:
    """Calls FlexAttention with a window on the card, so that its forward and backward are compiled."""
    with FakeTensorMode():
        mask = sliding_block_mask(DEPTH_12["sequence_len"], 512, CARD)
        shape = (1, 2, DEPTH_12["sequence_len"], head_dim)
        q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device=CARD, requires_grad=True) for _ in range(3))
        attend(q, k, v, mask, window=512, way="flex")
    return {"error": None}
