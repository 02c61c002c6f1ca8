"""
What other people's trainers allocate: nanochat of three dates and an early modded-nanogpt. Not part of paceline.

Closed form, the largest of four moments of a step. What shapes tell (weights, gradients, states, scores) has no error of its own; a
range comes only from what a point does not tell and from the choices of kernels and compiler, each a row of three figures below:
at least, expected, at most. The figures were read off traces of these models, their code and published logs; test_published_runs.py
holds the closed form against the traces. N tokens of a micro-step, V vocabulary, C width, L layers, unit = 2 * N * C bytes.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from paceline.plan.estimate import Range, Verdict, process_bytes, sum_of_independent, verdict
from paceline.plan.gpu_table import GpuSpec, find_gpu, gpu_table
from paceline.units import GIB

Point = Mapping[str, Any]
Choices = tuple[float, float, float]  # at least, expected, at most
Choose = Callable[[str], float]  # the figure of a row of UNSURE

FP32, BF16 = 4, 2
EAGER_LOSS = {"bf16": 14, "fp32": 16}  # bytes for each of N * V, by where the softcap is computed
MATH_UNITS = 3  # of a layer, more than flash keeps: q, k and v in fp32 instead of bf16
UNNAMED = 0.05  # of the whole: judgement; eager logs and published CUDA figures lie 1 to 6 % from such arithmetic
VOCABS = (32_768, 65_536)  # what nanochat's tokenizer was trained to

UNSURE: Mapping[str, Choices] = {
    # units that a layer keeps: 18 with the fused RMSNorm, 4 more with the composite one
    "eager units": (18, 20, 22),
    # the eager set at least; 19 by partitioning the graph
    "compiled units": (18, 19, 20),
    # the one log that reached the loss leaves 14 to 16 beside the scores
    "compiled math units": (14, 17, 20),
    # bytes for each of N * V: the logits' gradient in place of the logits, as the published CUDA figures suggest, or beside them
    "compiled loss": (2, 2, 4),
    # the same before torch let a backward graph write into what forward kept
    "compiled loss of 2024": (2, 4, 4),
    # scores of the layer that runs backward, beside those that are kept
    "math backward": (1, 2, 3),
    # units: gradients of the MLP's two inner tensors and of the stream
    "block backward": (5, 9, 10),
    # bytes for each of V * C: in bf16, then in fp32
    "head gradient": (2, 6, 6),
    # cuBLAS workspaces and what a kernel needs while it runs
    "temporaries": (0.05 * GIB, 0.15 * GIB, 0.3 * GIB),
    # bytes for each element of the matrices that Muon updates at once
    "update": (2, 6, 14),
    # 0: with a single micro-step gradients come into being during the backward, and how many there are is not always told
    "gradients before": (0, 1, 1),
    # 0: layers that are recomputed do without bf16 copies of their weights; autocast keeps them until it ends
    "copies kept": (0, 1, 1),
    # 0: Muon's momentum is sharded, as from the middle of October 2024 on
    "momentum of all": (0, 1, 1),
    "units of nanochat-2025-10": (0, 0, 0),
    # half a unit for the value embeddings of every other layer; one for the stream before it is mixed with the first
    "units of nanochat-2026-01": (0, 0.5, 1.5),
    "units of nanochat-2026-06": (0, 0.5, 1.5),
    # an fp32 stream: 2 for the two places where it is kept; 1 or 2 for a norm's output if it is kept before its cast
    "units of modded-nanogpt 2024-10": (2, 3, 5),
}


@dataclass(frozen=True)
class Family:
    """A trainer as of a date."""

    name: str
    softcap: str
    loss: str = "compiled loss"
    value_embeds: bool = False
    tied_fp32_embedding: bool = False
    ddp: bool = False
    stacks: bool = False  # Muon updates all matrices of a shape at once
    expandable: bool = True  # the script sets the allocator so


FAMILIES = (
    Family("nanochat-2025-10", "bf16"),
    Family("nanochat-2026-01", "fp32", stacks=True),
    Family("nanochat-2026-06", "fp32", value_embeds=True, stacks=True),
    Family(
        "modded-nanogpt 2024-10",
        "bf16",
        loss="compiled loss of 2024",
        tied_fp32_embedding=True,
        ddp=True,
        expandable=False,
    ),
)


@dataclass(frozen=True)
class Run:
    """A point with nothing left open but grad_accum: None where it is not told."""

    family: Family
    depth: int
    dim: int
    heads: int
    batch: int
    seq: int
    vocab: int
    world_size: int
    compiled: bool
    checkpointing: bool
    math: bool  # the attention kernel that makes the scores; the others keep q, k, v, their output and a sum per row
    sharded: bool
    grad_accum: int | None

    @property
    def num_tokens(self) -> int:
        return self.batch * self.seq

    @property
    def unit(self) -> int:
        return BF16 * self.num_tokens * self.dim

    @property
    def scores(self) -> int:
        """Of one layer, in fp32."""
        return FP32 * self.batch * self.heads * self.seq**2

    @property
    def table(self) -> int:
        return self.vocab * self.dim

    @property
    def matrices(self) -> int:
        return 12 * self.depth * self.dim**2


def verdict_of(point: Point) -> tuple[Range, Verdict]:
    """What a card must have, and whether this point's has it."""
    card = card_of(point)
    allocated = allocated_of(point)
    if not point.get("expandable_segments", families_of(point)[0].expandable):
        allocated = with_fragments(allocated)
    need = process_bytes(allocated, world_size=point["world_size"], consumer=card.consumer)
    return need, verdict(need, card.memory_mib << 20)


def with_fragments(allocated: Range) -> Range:
    """What is reserved without expandable segments, which paceline always sets: beyond what is allocated, a judgement."""
    return sum_of_independent(allocated, Range(0.0, 0.04, 0.10).scaled(allocated.expected))


def allocated_of(point: Point) -> Range:
    """torch.cuda.max_memory_allocated of a training step."""
    return hull(map(allocated_by, runs_of(point)))


def allocated_by(run: Run) -> Range:
    """Each row of UNSURE has a cause of its own."""
    expected = peak_bytes(run, lambda row: UNSURE[row][1])
    parts = [Range(expected * (1 - UNNAMED), expected, expected * (1 + UNNAMED))]
    for unsure, (low, _, high) in UNSURE.items():
        least, most = (
            peak_bytes(run, lambda row, name=unsure, figure=figure: figure if row == name else UNSURE[row][1])
            for figure in (low, high)
        )
        parts.append(Range(least - expected, 0.0, most - expected))
    return sum_of_independent(*parts)


def hull(ranges: Iterable[Range]) -> Range:
    all_ranges = list(ranges)
    expected = [item.expected for item in all_ranges]
    middle = (min(expected) + max(expected)) / 2
    return Range(min(item.low for item in all_ranges), middle, max(item.high for item in all_ranges))


def runs_of(point: Point) -> Iterable[Run]:
    """One for each way of filling in what the point does not tell."""
    dims = point["model_dims"]
    vocab, compiled, checkpointing = (point.get(key) for key in ("vocab", "compile", "checkpointing"))
    for family, each_vocab, is_compiled, is_checkpointed, math in product(
        families_of(point),
        VOCABS if vocab is None else (vocab,),
        (False, True) if compiled is None else (compiled,),
        (False, True) if checkpointing is None else (bool(checkpointing),),
        math_choices(point),
    ):
        yield Run(
            family,
            depth=dims["depth"],
            dim=dims["dim"],
            heads=dims["heads"],
            batch=point["batch"],
            seq=point["seq"],
            vocab=each_vocab,
            world_size=point["world_size"],
            compiled=is_compiled,
            checkpointing=is_checkpointed,
            math=math,
            sharded="unsharded" not in (point.get("optimizer") or ""),
            grad_accum=point.get("grad_accum"),
        )


def math_choices(point: Point) -> tuple[bool, ...]:
    """Whether the math kernel ran: as the point says; else as the logs of this software on this card; else not.

    nanochat of October 2025 on RTX 5090 D: the logs ask for whole score matrices. Other RTX 50 cards, and a card that is only
    assumed, may be the same: both. FlashAttention and SDPA's flash kernel keep the same.
    """
    if kernel := point.get("sdpa"):
        return (kernel.startswith("math"),)
    if not point["model_dims"]["family"].startswith("nanochat-2025"):
        return (False,)
    if "assumed" in point["gpu"]:
        return (False, True)
    card = card_of(point)
    if card.name == "RTX 5090 D":
        return (True,)
    return (False, True) if card.consumer and (card.capability or (0, 0)) >= (12, 0) else (False,)


def families_of(point: Point) -> tuple[Family, ...]:
    """The one named; for a month of nanochat between two of these, both: when it took over what, the month does not tell."""
    name = point["model_dims"]["family"]
    families = tuple(family for family in FAMILIES if name.startswith(family.name))
    month = re.match(r"nanochat-\d{4}-\d\d", name)
    if families or not month:
        return families
    nanochat = [family for family in FAMILIES if family.name.startswith("nanochat")]
    before = [family for family in nanochat if family.name < month[0]]
    after = [family for family in nanochat if family.name > month[0]]
    return (*before[-1:], *after[:1])


def card_of(point: Point) -> GpuSpec:
    """ "H100 80GB SXM": of the cards with these words in a name, the one with about that memory."""
    gpu_name = re.sub(r"\(.*?\)", "", point["gpu"])
    size = re.search(r"(\d+) ?GB", gpu_name)
    terms = set(re.sub(r"\d+ ?GB", "", gpu_name).split())
    matches = [spec for spec in gpu_table() if any(terms <= set(re.split("[ -]", name)) for name in names_of(spec))]
    if not matches:
        return find_gpu(gpu_name)
    gigabytes = int(size[1]) if size else 0
    return min(matches, key=lambda spec: (abs(spec.memory_mib / 1024 - gigabytes), len(spec.name)))


def names_of(spec: GpuSpec) -> tuple[str, ...]:
    return (spec.name, *spec.aliases, *spec.driver_names)


def peak_bytes(run: Run, choose: Choose) -> float:
    """The largest of four moments."""
    weights = weight_bytes(run)
    gradients = weights * (2 if run.family.ddp else 1)  # DDP's buckets beside them
    logits = run.num_tokens * run.vocab
    loss = choose(run.family.loss) if run.compiled else EAGER_LOSS[run.family.softcap]
    scores = choose("math backward") * run.scores if run.math else 0
    recomputed = layer_bytes(run, choose) if run.checkpointing else 0
    moments = {
        "loss": loss * logits,
        "gradient of the head": BF16 * logits + choose("head gradient") * run.table,
        "backward of a layer": recomputed + max(choose("block backward") * run.unit, scores),
    }
    before = 0 if run.grad_accum == 1 else 1 if run.grad_accum else choose("gradients before")
    passes = kept_bytes(run, choose) + max(moments.values()) + before * gradients
    update = gradients + update_bytes(run, choose)
    return weights + state_bytes(run, choose) + choose("temporaries") + max(passes, update)


def kept_bytes(run: Run, choose: Choose) -> float:
    """From forward to backward: the stem, the layers, and the weights' bf16 copies."""
    layer = run.unit if run.checkpointing else layer_bytes(run, choose)
    copied = run.table + run.matrices * (choose("copies kept") if run.checkpointing else 1)
    return 2 * run.unit + run.depth * layer + BF16 * copied


def layer_bytes(run: Run, choose: Choose) -> float:
    """What a layer keeps that is not recomputed."""
    if run.compiled:
        units = choose("compiled math units" if run.math else "compiled units")
    else:
        units = choose("eager units") + (MATH_UNITS if run.math else 0)
    units += choose(f"units of {run.family.name}")
    row_sums = FP32 * run.num_tokens * (3 * run.heads + 2)
    return units * run.unit + row_sums + (run.scores if run.math else 0)


def embedding_elements(run: Run) -> int:
    """Tokens' and values': every other layer, the last among them, has a table of its own for its values."""
    return run.table * (1 + ((run.depth + 1) // 2 if run.family.value_embeds else 0))


def weight_bytes(run: Run) -> int:
    if run.family.tied_fp32_embedding:
        return FP32 * (run.table + run.matrices)
    return BF16 * embedding_elements(run) + FP32 * (run.table + run.matrices)


def state_bytes(run: Run, choose: Choose) -> float:
    """AdamW's two moments of the tables, Muon's momentum of the matrices; in the weights' types."""
    adamw, muon = 2 * (weight_bytes(run) - FP32 * run.matrices), FP32 * run.matrices
    if run.family.ddp:
        everywhere = choose("momentum of all")
        return adamw + muon * (everywhere + (1 - everywhere) / run.world_size)
    return (adamw + muon) / (run.world_size if run.sharded else 1)


def update_bytes(run: Run, choose: Choose) -> float:
    """Gradients that AdamW received for its shard, and what Muon makes of its matrices."""
    received = (weight_bytes(run) - FP32 * run.matrices) / run.world_size if run.world_size > 1 else 0
    largest = 4 * run.dim**2 * (run.depth if run.family.stacks else 1)
    shared = run.world_size if run.family.stacks and run.sharded else 1
    flat = BF16 * run.matrices if run.family.ddp else 0
    return received + choose("update") * largest / shared + flat
