"""What one real rank of test_states_of_8_bits.py does: steps with 8-bit states, broken and unbroken, and converted ones."""

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from full_shard_ranks import build, micro_batches, plan_of, train
from optim_ranks import exact_grads, join_group, make_optimizer, rows
from optim_ranks import train as train_tensors
from torch import Tensor

from paceline.plan import offloading
from paceline.plan.planner import Plan
from paceline.train.optim import FullyShardedOptimizer, ReplicatedOptimizer, ShardedOptimizer
from paceline.train.process import shutdown

STATES = ("fp32", "8bit")
WAYS = {
    "muon bf16": {"optimizer": "muon", "precision": "bf16"},
    "muon bf16 offloaded": {"optimizer": "muon", "precision": "bf16", "offload": "optimizer"},
    "muon fp16 full offloaded": {"optimizer": "muon", "precision": "fp16", "shard": "full", "offload": "optimizer"},
    "adamw fp32": {"optimizer": "adamw", "precision": "fp32"},
    "adamw fp32 none": {"optimizer": "adamw", "precision": "fp32", "shard": "none"},
}
STEPS, SAVED_AT = 3, 2
ROWS_OF_A_BATCH = 64 * 64 * 4 * 5  # bytes: tables are cut into several batches


def ways_of(world_size: int) -> dict[str, dict[str, object]]:
    """`train` passes DDP by, so that several ranks with replicated states would not be one run."""
    return {name: keys for name, keys in WAYS.items() if world_size == 1 or "none" not in name}


def plan_with(world_size: int, states: str, *, offload: str = "none", **keys: object) -> Plan:
    """The planner refuses offloading on a CPU, where it saves nothing; the classes work there in order."""
    plan = plan_of(world_size, device_batch_size=3, optimizer_states=states, **keys)
    return replace(plan, offload=offload)


def steps_of(rank: int, plan: Plan, *, saved: dict[str, Tensor] | None = None) -> dict[str, object]:
    """All steps, or those after SAVED_AT from a checkpoint: losses, rows at SAVED_AT and at the end, the model's own weights."""
    model, optimizer = build(plan, rank)
    facts: dict[str, object] = {}
    start = 0
    if saved is not None:
        optimizer.load(lambda key, lo, hi: saved[key][lo:hi])
        optimizer.load_state_dict({"step_count": SAVED_AT})
        start, facts["loaded"] = SAVED_AT, rows(optimizer)
    losses = []
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
    """A checkpoint's tensors, in their dtypes, from the rows of all ranks; NaN where a number has no row."""
    tensors: dict[str, Tensor] = {}
    for key, shape, lo, tensor in (piece for pieces in ranks for piece in pieces):
        missing = torch.nan if tensor.is_floating_point() else 0
        tensors.setdefault(key, torch.full(shape, missing, dtype=tensor.dtype))[lo : lo + len(tensor)] = tensor
    return tensors


def exact_steps(rank: int, world_size: int) -> dict[str, list]:
    """Steps with gradients that add up without rounding, by each kind of optimizer."""
    kinds = {"muon": (ShardedOptimizer, True), "adamw": (ShardedOptimizer, False)}
    if world_size > 1:
        kinds |= {"muon full": (FullyShardedOptimizer, True), "adamw full": (FullyShardedOptimizer, False)}
    kinds["adamw none"] = (ReplicatedOptimizer, False)
    found = {}
    for name, (kind, muon) in kinds.items():
        optimizer = make_optimizer(rank, world_size, kind=kind, muon=muon, optimizer_states="8bit")
        train_tensors(optimizer, rank, world_size, steps=range(3), make_grads=exact_grads)
        found[name] = rows(optimizer)
    return found


def run_exact(rank: int, world_size: int, port: int, folder: Path) -> None:
    join_group(rank, world_size, port)
    torch.save(exact_steps(rank, world_size), folder / f"all-{world_size}-{rank}.pt")
    shutdown()


def run_ways(rank: int, world_size: int, port: int, folder: Path) -> None:
    """Each way with both kinds of states; then the last steps from each checkpoint."""
    join_group(rank, world_size, port)
    facts: dict[object, object] = {}
    offloading.ROW_BATCH_BYTES = ROWS_OF_A_BATCH
    ways = ways_of(world_size)
    facts |= {
        (name, states): steps_of(rank, plan_with(world_size, states, **keys))
        for name, keys in ways.items()
        for states in STATES
    }
    path = folder / f"{world_size}-{rank}.pt"
    torch.save(facts, path)
    if world_size > 1:
        dist.barrier()
    ranks = [torch.load(folder / f"{world_size}-{other}.pt") for other in range(world_size)]
    for name, keys in ways.items():
        for saved_with in STATES:
            saved = whole([one[name, saved_with]["checkpoint"] for one in ranks])
            for states in STATES if saved_with == "8bit" else ("8bit",):
                plan = plan_with(world_size, states, **keys)
                facts[name, saved_with, states] = steps_of(rank, plan, saved=saved)
    torch.save(facts, folder / f"all-{world_size}-{rank}.pt")
    shutdown()
