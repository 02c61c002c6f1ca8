"""What one real rank of test_offload.py does: steps of the worker's own model with and without --offload optimizer."""

from pathlib import Path

import torch
import torch.distributed as dist
from optim_ranks import join_group
from state_ranks import plan_with, steps_of, whole

from paceline.plan import offloading
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
ROWS_OF_A_BATCH = 64 * 64 * 4 * 3  # bytes: tables are cut into several batches


def run_rank(rank: int, world_size: int, port: int, folder: Path) -> None:
    """Each way with and without offloading; then the last steps of muon in bf16 from each checkpoint of its own and one rank."""
    join_group(rank, world_size, port)
    offloading.ROW_BATCH_BYTES = ROWS_OF_A_BATCH
    facts = {
        (name, offload): steps_of(rank, plan_with(world_size, "fp32", offload=offload, **keys))
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
                    plan = plan_with(world_size, "fp32", offload=offload, **WAYS[name])
                    facts[name, saved_by, saved_with, offload] = steps_of(rank, plan, saved=saved)
    torch.save(facts, folder / f"all-{world_size}-{rank}.pt")
    shutdown()
