"""What one real rank of test_full_shard.py does: the worker's own model and optimizer, with weights replicated and sharded."""

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from optim_ranks import join_group, rows
from torch import Tensor

from paceline.config import Config
from paceline.model.gpt import GPT
from paceline.plan.machine import Machine
from paceline.plan.planner import Plan, make_plan
from paceline.train.evaluate import generate
from paceline.train.optim import ShardedOptimizer, make_optimizer
from paceline.train.process import shutdown
from paceline.train.setup import make_model

ROWS, CPU = 12, torch.device("cpu")  # of a step, over all ranks
MACHINE = Machine(gpus=(), cpu_cores=4, cpu_bf16=True, memory_bytes=8 << 30)


def plan_of(world_size: int, **keys: object) -> Plan:
    config = Config(
        depth=3, n_embd=64, head_dim=32, sequence_len=32, total_batch_size=32 * ROWS, num_steps=8, vocab_size=256,
        nproc=world_size, device="cpu", **{"precision": "fp32", "compile": False, "device_batch_size": 2} | keys,
    )  # fmt: skip
    return make_plan(config, MACHINE, vocab_size=256, num_rows=0)


def build(plan: Plan, rank: int) -> tuple[GPT, ShardedOptimizer]:
    model = make_model(plan, seed=1, device=CPU)
    return model, make_optimizer(model, plan, plan.groups, rank=rank)


def micro_batches(plan: Plan, rank: int, step: int) -> Iterator[Tensor]:
    tokens = torch.randint(256, (ROWS, 32), generator=torch.Generator().manual_seed(step))
    yield from tokens.split(plan.device_batch_size)[rank :: plan.world_size]


def train(model: GPT, optimizer: ShardedOptimizer, plan: Plan, rank: int, *, steps: range) -> list[float]:
    """Returns the mean loss of each step."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        nats = torch.zeros(())
        batches = list(micro_batches(plan, rank, step))
        for idx in batches:
            with optimizer.micro_step(last=idx is batches[-1]):
                loss = model(idx, idx.roll(-1, 1))
                loss.backward()
            nats += loss.detach()
        summed = optimizer.reduce(nats[None])[0]
        losses.append(float(summed) / (32 * ROWS))
        optimizer.step(lr_mult=1.0, momentum=0.9, weight_decay_mult=1.0, grad_scale=1 / (32 * ROWS))
    return losses


def weight_memory(model: GPT) -> int:
    """The bytes of all parameters' storages, and of the gradients that autograd left."""
    params = list(model.parameters())
    tensors = [tensor for param in params for tensor in (param, param.grad) if tensor is not None]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def steps_of(rank: int, world_size: int, **keys: object) -> dict[str, object]:
    """Two steps, an evaluation and a sample; and the rows after them."""
    plan = plan_of(world_size, **keys)
    model, optimizer = build(plan, rank)
    if plan.compile:
        model.compile(dynamic=False, by_block=True, backend="aot_eager")
    losses = train(model, optimizer, plan, rank, steps=range(2))
    idx = next(micro_batches(plan, 0, 0))
    with torch.no_grad():
        nats = model(idx, idx.roll(-1, 1), reduction="none")
    options = {"num_samples": 1, "max_new_tokens": 3, "temperature": 0.8, "top_k": 50, "seed": 1, "stop_token": None}
    sample = list(generate(model, idx[0, :5].tolist(), **options))
    return {
        "losses": losses, "rows": rows(optimizer), "nats": nats, "sample": sample, "memory": weight_memory(model),
    }  # fmt: skip


def switched(
    rank: int, world_size: int, folder: Path, shards: tuple[str, ...], **keys: object
) -> list[tuple[str, tuple[int, ...], int, Tensor]]:
    """A step with each shard mode, each loaded from what the one before has saved; and what all of them left."""
    for number, shard in enumerate(shards):
        plan = plan_of(world_size, shard=shard, **keys)
        model, optimizer = build(plan, rank)
        if number:
            saved: dict[str, Tensor] = {}
            for other in range(world_size):
                for key, shape, lo, tensor in torch.load(folder / f"{number - 1}-{other}.pt"):
                    saved.setdefault(key, torch.full(shape, torch.nan))[lo : lo + len(tensor)] = tensor
            optimizer.load(lambda key, lo, hi, saved=saved: saved[key][lo:hi])
            optimizer.load_state_dict({"step_count": number})
        train(model, optimizer, plan, rank, steps=range(number, number + 1))
        torch.save(rows(optimizer), folder / f"{number}-{rank}.pt")
        dist.barrier()
    return rows(optimizer)


ONE_MICRO_STEP = {"device_batch_size": ROWS // 2}  # of two ranks: the sums are made in the same order
WAYS = {
    "one micro-step": {},
    "bf16": {"precision": "bf16"},
    "AdamW": {"optimizer": "adamw"},
    "checkpointed": {"activation_checkpointing": True},
    "MLPs checkpointed": {"activation_checkpointing": "mlp"},
    "compiled": {"compile": True},
}


def run_rank(rank: int, world_size: int, port: int, folder: Path, ways: tuple[str, ...]) -> None:
    """Both shard modes with the automatic rows; on two ranks also in these ways, and with changes of the mode."""
    join_group(rank, world_size, port)
    found: dict[str, object] = {shard: steps_of(rank, world_size, shard=shard) for shard in ("optimizer", "full")}
    for name in ways if world_size == 2 else ():
        for shard in ("optimizer", "full"):
            found[f"{name} {shard}"] = steps_of(rank, 2, shard=shard, **ONE_MICRO_STEP, **WAYS[name])
    if world_size == 2:
        for name, shards in (("switched", ("full", "optimizer", "full")), ("unbroken", ("optimizer",) * 3)):
            (folder / name).mkdir(exist_ok=True)
            found[name] = switched(rank, 2, folder / name, shards, **ONE_MICRO_STEP)
    torch.save(found, folder / f"all-{world_size}-{rank}.pt")
    shutdown()
