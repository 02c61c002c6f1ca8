"""What one real rank of test_offload.py does: steps of the worker's own model with and without --offload optimizer."""

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from full_shard_ranks import build, micro_batches, plan_of, train
from optim_ranks import join_group, rows
from torch import Tensor

from paceline.plan import offloading
from paceline.plan.planner import Plan
from paceline.train.process import shutdown

WAYS = {  # each value of a setting beside each of the others once
    f"{optimizer} {precision} {shard}": {"optimizer": optimizer, "precision": precision, "shard": shard}
    for optimizer, precision, shard in (
        ("muon", "bf16", "optimizer"),
        ("muon", "bf16", "full"),
        ("muon", "fp32", "full"),
        ("adamw", "fp32", "optimizer"),
        ("adamw", "bf16", "full"),
    )
}
OFFLOADS = ("none", "optimizer")
STEPS = 3
SAVED_AT = 2
ROWS_OF_A_BATCH = 64 * 64 * 4 * 3  # bytes: tables are cut into several batches


def plan_with(offload: str, world_size: int, **keys: object) -> Plan:
    """The planner refuses it on a CPU, where it saves nothing; the classes work there in order."""
    return replace(plan_of(world_size, device_batch_size=3, **keys), offload=offload)


def steps_of(rank: int, plan: Plan, *, saved: dict[str, Tensor] | None = None) -> dict[str, object]:
    """All steps, or those after SAVED_AT from a checkpoint: losses, rows at SAVED_AT and at the end, the model's own weights."""
    model, optimizer = build(plan, rank)
    facts: dict[str, object] = {}
    losses, start = [], 0
    if saved is not None:
        optimizer.load(lambda key, lo, hi: saved[key][lo:hi])
        optimizer.load_state_dict({"step_count": SAVED_AT})
        start = SAVED_AT
    for step in range(start, STEPS):
        losses += train(model, optimizer, plan, rank, steps=range(step, step + 1))
        if step + 1 == SAVED_AT:
            facts["checkpoint"] = rows(optimizer)
    idx = next(micro_batches(plan, 0, 0))
    with torch.no_grad():
        nats = model(idx, idx.roll(-1, 1), reduction="none")
    norms = optimizer.norms(grad_scale=1.0)
    weights = {} if plan.shard == "full" else {name: param.detach().clone() for name, param in model.named_parameters()}
    return facts | {"losses": losses, "rows": rows(optimizer), "nats": nats, "norms": norms, "weights": weights}


def whole(ranks: list[list]) -> dict[str, Tensor]:
    """A checkpoint's tensors from the rows of all ranks."""
    tensors: dict[str, Tensor] = {}
    for key, shape, lo, tensor in (piece for pieces in ranks for piece in pieces):
        tensors.setdefault(key, torch.full(shape, torch.nan))[lo : lo + len(tensor)] = tensor
    return tensors


def run_rank(rank: int, world_size: int, port: int, folder: Path) -> None:
    """Each way with and without offloading; then the last steps of muon in bf16 from each checkpoint of its own and one rank."""
    join_group(rank, world_size, port)
    offloading.ROW_BATCH_BYTES = ROWS_OF_A_BATCH
    facts = {
        (name, offload): steps_of(rank, plan_with(offload, world_size, **keys))
        for name, keys in WAYS.items()
        for offload in OFFLOADS
    }
    resumed = ("muon bf16 optimizer", "muon bf16 full")
    saved_here = {(name, offload): facts[name, offload]["checkpoint"] for name in resumed for offload in OFFLOADS}
    torch.save(saved_here, folder / f"{world_size}-{rank}.pt")
    if world_size > 1:
        dist.barrier()
    for saved_by in sorted({1, world_size}):
        ranks = [torch.load(folder / f"{saved_by}-{other}.pt") for other in range(saved_by)]
        for name in resumed:
            for saved_with in OFFLOADS:
                saved = whole([one[name, saved_with] for one in ranks])
                for offload in OFFLOADS:
                    plan = plan_with(offload, world_size, **WAYS[name])
                    facts[name, saved_by, saved_with, offload] = steps_of(rank, plan, saved=saved)
    torch.save(facts, folder / f"all-{world_size}-{rank}.pt")
    shutdown()
