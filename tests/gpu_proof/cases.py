"""The walks that test_walk.py makes: settings of runs, sound ones and broken ones, and their facts by name."""

import functools
import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from gpu_proof.fake_card import can_insert, on_card

NEEDS_CARD = pytest.mark.skipif(not can_insert(), reason="needs Linux and the CPU build of PyTorch")
NEEDS_TRITON = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton: pip install -e '.[gpu-proof]'"
)
WORLD_SIZES = (1, 2, 4, 8)
EAGER = {"compile": False, "window_pattern": "L"}
SHORT = EAGER | {"gpus": 8}  # a step of one micro-step, where others have two
COMPILED = {"rounds": 2}
STEP = {"phases": ["step"]}
BY_LAYER = COMPILED | STEP | {"gpus": 2, "depth": 4, "window_pattern": "SSSL"}
FIRST_RANKS = {f"rank 0 of {gpus}": EAGER | {"gpus": gpus} for gpus in WORLD_SIZES}
LAST_RANKS = {f"rank {gpus - 1} of {gpus}": EAGER | STEP | {"gpus": gpus, "rank": gpus - 1} for gpus in WORLD_SIZES[1:]}
RANKS_BETWEEN = {
    f"rank {rank} of {gpus}": EAGER | STEP | {"gpus": gpus, "rank": rank}
    for gpus in WORLD_SIZES
    for rank in range(1, gpus - 1)
}
FULL = EAGER | {"shard": "full", "depth": 3, "n_embd": 128}
SHARDED = {
    f"weights, rank {rank} of {gpus}": FULL | STEP | {"gpus": gpus, "rank": rank}
    for gpus in WORLD_SIZES[1:]
    for rank in (0, gpus - 1)
}
# in the second round DDP has its buckets
DDP = EAGER | STEP | {"depth": 1, "shard": "none", "optimizer": "adamw", "vocab_size": 32_768, "rounds": 2}
REPLICATED = {
    f"DDP, rank {rank} of {gpus}": DDP | {"gpus": gpus, "rank": rank} for gpus in (2, 8) for rank in (0, gpus - 1)
}
RESUMED = EAGER | {"phases": ["save", "resume"], "depth": 1}
SOUND = {
    "windows": COMPILED | {"phases": ["step", "evaluation", "sample"]},
    "cuDNN and grouped queries": STEP | {"attention": "cudnn", "n_kv_head": 1},
    "without Triton": COMPILED | STEP | {"fused_loss": False},
    "checkpointing and grouped queries": COMPILED | {"activation_checkpointing": True, "n_kv_head": 1} | STEP,
    "layers of rank 0 of 2": BY_LAYER,
    "layers of rank 1 of 2": BY_LAYER | {"rank": 1},
    "adamw": EAGER | STEP | {"gpus": 2, "optimizer": "adamw"},
    **FIRST_RANKS,
    **LAST_RANKS,
    **SHARDED,
    **REPLICATED,
    "resumed": EAGER | {"phases": ["step", "save", "resume", "sample"], "depth": 1},
    "weights sharded, compiled": COMPILED | {"shard": "full", "gpus": 2, "phases": ["step", "sample"]},
    "weights sharded, checkpointing": FULL | STEP | {"gpus": 2, "activation_checkpointing": True},
}
ONE_LAYER = {"depth": 1}
SHORT_STEP = SHORT | STEP | ONE_LAYER
BROKEN = {
    "a graph break": ONE_LAYER | STEP,
    "gradients sent at the end": EAGER | STEP | {"gpus": 2},
    "a short last batch": ONE_LAYER | {"phases": ["evaluation"]},
    "gradients in an evaluation": ONE_LAYER,
    "an .item() in the step": SHORT | ONE_LAYER,
    "a CPU tensor in a CUDA expression": SHORT,
    "a blocking copy": SHORT,
    "an fp32 product": SHORT | ONE_LAYER,
    "a bf16 master": SHORT,
    "collectives in another order": EAGER | STEP | {"gpus": 2, "rank": 1},
    "gradients sent in fp32": SHORT | STEP,
    "weights gathered late": FULL | STEP | {"gpus": 2},
    "gradients sent in every micro-step": DDP | {"gpus": 2},
    "gradients in one bucket": DDP | {"gpus": 8},
    "a synchronize in the step": SHORT_STEP,
    "a copy on a stream of its own": SHORT_STEP,
    "a stream of its own that the step waits for": SHORT_STEP,
    "a clock that is read at once": SHORT_STEP,
    "a sum that nobody waits for": SHORT_STEP,
    "weights that nobody waits for": FULL | STEP | {"gpus": 8},
    "weights that are never freed": FULL | STEP | {"gpus": 8},
    "a wait in the backward": SHORT_STEP,
    "rows read when they are needed": EAGER | STEP | ONE_LAYER,
    "dropout in the forward": SHORT_STEP,
    "noise from the CPU in the forward": SHORT_STEP,
    "a sample from the default generator": EAGER | ONE_LAYER | {"phases": ["sample"]},
    "a checkpoint that nobody waits for": RESUMED,
    "a checkpoint without the card's generator": RESUMED,
    "rows in the order of reading": RESUMED | {"phases": ["step", "save", "resume"]},
}
Facts = dict[str, Any]
SHORT_BROKEN = {  # a few of them
    *("an .item() in the step", "collectives in another order", "gradients sent in every micro-step")
}
LONG = {  # all that compile, other numbers of ranks than 1 and 2, and most of the faults; `make soak` has them
    *(name for name, keys in SOUND.items() if "compile" not in keys),
    *("weights sharded, checkpointing", "a graph break", "gradients in an evaluation"),
    *(name for name in SOUND if name.endswith((" of 4", " of 8"))),
    *(name for name in BROKEN if name not in SHORT_BROKEN),
}


class Walks:
    """The facts of walks by name. Those of a tier are made together, in one process that imports the compiler once."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __getitem__(self, name: str) -> Facts:
        return self.tier(name in LONG)[name]

    @functools.cache  # noqa: B019
    def tier(self, long: bool) -> dict[str, Facts]:
        settings = SOUND | {name: keys | {"broken": name} for name, keys in BROKEN.items()}
        settings = {name: keys for name, keys in settings.items() if (name in LONG) == long}
        return dict(zip(settings, on_card(120, "gpu_proof.walk", *settings.values(), folder=self.folder), strict=True))


def tiered_sizes(sizes: Iterable[int], kind: str = "") -> list[Any]:
    """The numbers of ranks as parameters. kind: what the names of the walks begin with."""
    return [pytest.param(gpus, marks=pytest.mark.soak) if f"{kind}rank 0 of {gpus}" in LONG else gpus for gpus in sizes]


def tiered(names: Iterable[str]) -> list[Any]:
    """The names as parameters; the long ones are of the soak tier."""
    return [pytest.param(name, marks=pytest.mark.soak) if name in LONG else name for name in names]


def tiered_pairs(pairs: Mapping[str, object]) -> list[Any]:
    """Names with what belongs to them as parameters; the long ones are of the soak tier."""
    return [pytest.param(*pair, marks=pytest.mark.soak if pair[0] in LONG else ()) for pair in pairs.items()]
