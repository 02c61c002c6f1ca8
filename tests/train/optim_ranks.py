"""What one real process of test_optim_dist.py does. Results go to a file for each rank; the tests compare them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.plan.algorithms import GroupSettings
from paceline.plan.shapes import ParamShape
from paceline.plan.sharding import parts_of
from paceline.train.optim import FullyShardedOptimizer, ReplicatedOptimizer, ShardedOptimizer
from paceline.train.process import all_reduce_sum, any_rank, broadcast_object, init_distributed, shutdown

SHAPES = (
    ParamShape("scale", (7,), "scalars"),
    ParamShape("wte", (1003, 24), "wte"),
    ParamShape("layer.0.square", (64, 64), "matrix"),
    ParamShape("layer.0.wide", (64, 256), "matrix"),
    ParamShape("layer.1.tall", (256, 64), "matrix"),
    ParamShape("layer.1.odd", (33, 57), "matrix"),
    ParamShape("layer.1.gate", (3, 12), "matrix"),
)
MICRO_BATCHES = 12  # of a step, dealt over the ranks
LR = 0.02
COLLECTIVES = (
    "isend", "irecv", "all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "broadcast", "barrier", "all_to_all_single",
    "reduce_scatter_single", "all_gather_single",
)  # fmt: skip


class Tensors(nn.Module):
    """Just parameters; forward multiplies each by a given tensor, so that tensor becomes its gradient."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for shape in SHAPES:
            tensor = nn.Parameter(torch.randn(shape.shape, generator=generator))
            self.register_parameter(shape.name.replace(".", "_"), tensor)

    def named_parameters(self, *args, **kwargs):
        names = {shape.name.replace(".", "_"): shape.name for shape in SHAPES}
        for name, param in super().named_parameters(*args, **kwargs):
            yield names[name], param

    def forward(self, grads: dict[str, Tensor], *, backwards: bool = False) -> Tensor:
        params = dict(self.named_parameters())
        names = sorted(grads, reverse=backwards)  # the order in which gradients arrive
        return sum((params[name].float() * grads[name]).sum() for name in names)


class PartedTensors(Tensors):
    """The same, part by part, as the optimizer that gathers weights wants it."""

    activation_checkpointing = False

    def forward(self, grads: dict[str, Tensor], *, backwards: bool = False) -> Tensor:
        params, parts = dict(self.named_parameters()), parts_of(SHAPES)
        total = torch.zeros((), requires_grad=True)
        for part in range(5):  # before the layers, two layers, after them, the end
            total = self.passage(part, total)
            names = sorted((name for name in grads if parts[name] == part), reverse=backwards)
            total = sum(((params[name].float() * grads[name]).sum() for name in names), start=total)
        return total


def exact_grads(step: int, micro_batch: int, *, bits: int = 10) -> dict[str, Tensor]:
    """Multiples of 2^-bits below 1/2: twelve of them add up without rounding, in any order."""
    generator = torch.Generator().manual_seed(1000 * step + micro_batch)
    half = 2 ** (bits - 1)
    return {s.name: torch.randint(-half + 1, half, s.shape, generator=generator) / 2**bits for s in SHAPES}


def random_grads(step: int, micro_batch: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + micro_batch)
    return {shape.name: torch.randn(shape.shape, generator=generator) for shape in SHAPES}


def make_optimizer(
    rank: int, world_size: int, *, kind=ShardedOptimizer, muon=True, dtype=torch.float32, grad_accum_steps=2, **options
):
    adamw = GroupSettings("adamw", LR, (0.8, 0.95), 1e-10, 0.1)
    matrix = GroupSettings("muon", LR, (0.0, 0.9), 1e-10, 0.1) if muon else adamw
    return kind(
        PartedTensors() if kind is FullyShardedOptimizer else Tensors(),
        SHAPES,
        {"matrix": matrix, "wte": adamw, "scalars": adamw},
        rank=rank,
        world_size=world_size,
        compute_dtype=dtype,
        grad_accum_steps=grad_accum_steps,
        **options,
    )


def train(optimizer, rank: int, world_size: int, *, steps: range, make_grads=exact_grads, micro_batches=MICRO_BATCHES):
    """Micro-batch i goes to rank i % world_size. Returns what the last reduce returned."""
    mine = range(rank, micro_batches, world_size)
    for step in steps:
        optimizer.zero_grad()
        for i in mine:
            with optimizer.micro_step(last=i == mine[-1]):
                optimizer.module(make_grads(step, i)).backward()
        reduced = optimizer.reduce(torch.tensor([rank + 1.0, 1.0]))
        optimizer.step(lr_mult=1.0, momentum=0.9, weight_decay_mult=1.0, grad_scale=1 / micro_batches)
    return reduced


def rows(optimizer) -> list[tuple[str, tuple[int, ...], int, Tensor]]:
    return [(piece.key, piece.shape, piece.rows[0], piece.tensor.clone()) for piece in optimizer.pieces()]


def weights(optimizer) -> dict[str, Tensor]:
    module = (
        optimizer.module.module
        if isinstance(optimizer.module, nn.parallel.DistributedDataParallel)
        else optimizer.module
    )
    return {name: param.detach().clone() for name, param in module.named_parameters()}


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Calls of torch.distributed while inside, and the elements that `isend` takes."""
    counts = dict.fromkeys((*COLLECTIVES, "sent"), 0)
    originals = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}

    def counting(name, original):
        def call(*args, **kwargs):
            counts[name] += 1
            counts["sent"] += args[0].numel() if name == "isend" else 0
            return original(*args, **kwargs)

        return call

    for name, original in originals.items():
        setattr(dist, name, counting(name, original))
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def traffic_of_a_step(rank: int, world_size: int) -> dict[str, object]:
    optimizer = make_optimizer(rank, world_size)
    optimizer.zero_grad()
    with counted() as early, optimizer.micro_step(last=False):
        optimizer.module(exact_grads(0, rank)).backward()
    with counted() as under_backward, optimizer.micro_step(last=True):
        optimizer.module(exact_grads(1, rank)).backward()
        during = dict(under_backward)
    with counted() as after:
        optimizer.reduce(torch.zeros(2))
        optimizer.step(lr_mult=1.0, momentum=0.9, weight_decay_mult=1.0, grad_scale=1.0)
    segments = sum(bucket.weights.numel() // world_size for bucket in optimizer._buckets)
    return {"early": early, "during": during, "backward": under_backward, "after": after, "segments": segments}


def missing_gradients(rank: int, world_size: int, kind: type[ShardedOptimizer]) -> list[dict[str, Tensor]]:
    """Two tensors without gradient, one more on rank 0, another order of gradients on odd ranks; then the same with zeros."""
    results = []
    for zeros in (False, True):
        optimizer = make_optimizer(rank, world_size, kind=kind)
        for step in range(2):
            grads = exact_grads(step, rank)
            missing = ["layer.1.odd", "scale"] + ["wte"] * (rank == 0)
            grads.update({name: torch.zeros_like(grads[name]) for name in missing})
            if not zeros:
                grads = {name: grad for name, grad in grads.items() if name not in missing}
            optimizer.zero_grad()
            with optimizer.micro_step(last=True):
                optimizer.module(grads, backwards=rank % 2 == 1).backward()
            optimizer.reduce(torch.zeros(1))
            optimizer.step(lr_mult=1.0, momentum=0.9, weight_decay_mult=1.0, grad_scale=0.25)
        results.append({f"{key} {lo}": tensor for key, _, lo, tensor in rows(optimizer)})
    return results


def narrow_gradients(rank: int, world_size: int) -> list[dict[str, Tensor]]:
    """bf16 gradients sent as such, one micro-step; and one rank that adds up the same micro-batches in fp32."""
    results = []
    for who, ranks in ((rank, world_size), (0, 1)):
        optimizer = make_optimizer(who, ranks, dtype=torch.bfloat16, grad_accum_steps=world_size // ranks)
        train(optimizer, who, ranks, steps=range(3), make_grads=eight_bits, micro_batches=world_size)
        results.append(weights(optimizer))
    return results


def eight_bits(step: int, micro_batch: int) -> dict[str, Tensor]:
    return exact_grads(step, micro_batch, bits=8)


def first_phase(rank: int, world_size: int) -> dict[str, object]:
    found: dict[str, object] = {}
    optimizer = make_optimizer(rank, world_size)
    found["reduced"] = train(optimizer, rank, world_size, steps=range(3))
    found["exact"] = rows(optimizer)
    found["exact weights"] = weights(optimizer)
    adamw = make_optimizer(rank, world_size, muon=False)
    train(adamw, rank, world_size, steps=range(3))
    found["exact adamw"] = rows(adamw)
    bf16 = make_optimizer(rank, world_size, dtype=torch.bfloat16)
    train(bf16, rank, world_size, steps=range(3), make_grads=eight_bits)
    found["exact bf16"] = rows(bf16)
    for name in ("random", "random again"):
        optimizer = make_optimizer(rank, world_size)
        train(optimizer, rank, world_size, steps=range(3), make_grads=random_grads)
        found[name] = rows(optimizer)
    replicated = make_optimizer(rank, world_size, kind=ReplicatedOptimizer, muon=False)
    found["replicated reduced"] = train(replicated, rank, world_size, steps=range(3), make_grads=random_grads)
    found["replicated"] = weights(replicated)
    found["replicated pieces"] = len(replicated.pieces())
    if world_size == 1:
        whole = make_optimizer(0, 1)
        train(whole, 0, 1, steps=range(6))
        found["six steps"] = rows(whole)
    else:
        found["traffic"] = traffic_of_a_step(rank, world_size)
        found["missing"] = missing_gradients(rank, world_size, ShardedOptimizer)
        found["missing full"] = missing_gradients(rank, world_size, FullyShardedOptimizer)
        for name, keys in (("exact", {}), ("exact adamw", {"muon": False}), ("exact bf16", {"dtype": torch.bfloat16})):
            full = make_optimizer(rank, world_size, kind=FullyShardedOptimizer, **keys)
            grads = eight_bits if keys.get("dtype") else exact_grads
            found[f"{name} full reduced"] = train(full, rank, world_size, steps=range(3), make_grads=grads)
            found[f"{name} full"] = rows(full)
            found[f"{name} full memory"] = sum(bucket.weights.untyped_storage().nbytes() for bucket in full._buckets)
        found["narrow"] = narrow_gradients(rank, world_size)
    if world_size == 2:
        compiled = make_optimizer(rank, world_size)
        if rank == 1:  # it owns the last shard; its eager peer sends the same
            compiled.module.compile(backend="aot_eager")
        train(compiled, rank, world_size, steps=range(3))
        found["compiled"] = rows(compiled)
    total = torch.tensor([rank + 1.0])
    all_reduce_sum(total)
    found["sum"], found["broadcast"] = total.item(), broadcast_object(f"from {rank}")
    found["any rank"] = [any_rank(rank == which, torch.device("cpu")) for which in (0, -1)]
    return found


def resumed_phase(rank: int, world_size: int, folder: Path, saved_by: int) -> dict[str, object]:
    """Three more steps from what `saved_by` ranks left; with sharded weights, too, from what others left without."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob(f"first-{saved_by}-*.pt")):
        for key, shape, lo, tensor in torch.load(path)["exact"]:
            tensors.setdefault(key, torch.full(shape, torch.nan))[lo : lo + len(tensor)] = tensor
    found: dict[str, object] = {}
    for name, kind in (("six steps", ShardedOptimizer), ("six steps full", FullyShardedOptimizer)):
        if world_size > 1 or kind is ShardedOptimizer:
            optimizer = make_optimizer(rank, world_size, kind=kind)
            optimizer.load(lambda key, lo, hi: tensors[key][lo:hi])
            optimizer.load_state_dict({"step_count": 3})
            train(optimizer, rank, world_size, steps=range(3, 6))
            found[name] = rows(optimizer)
    return found


def join_group(rank: int, world_size: int, port: int) -> None:
    torch.set_num_threads(1)
    address = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({key: str(value) for key, value in address.items()}, TORCHELASTIC_USE_AGENT_STORE="True")
    assert init_distributed("cpu", timeout_s=300) == ((rank, world_size, rank) if world_size > 1 else (0, 1, 0))
    assert dist.is_initialized() == (world_size > 1)


def run_rank(rank: int, world_size: int, port: int, folder: Path, saved_by: int | None) -> None:
    join_group(rank, world_size, port)
    if saved_by is None:
        torch.save(first_phase(rank, world_size), folder / f"first-{world_size}-{rank}.pt")
    else:
        torch.save(
            resumed_phase(rank, world_size, folder, saved_by), folder / f"resumed-{saved_by}-{world_size}-{rank}.pt"
        )
    shutdown()
