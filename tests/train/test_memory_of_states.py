"""plan/memory.py against every tensor that really lives when a model and its optimizer stand ready for an update."""

from itertools import product

import torch
from rows import with_rows

from paceline.config import ModelConfig
from paceline.model.gpt import DTYPES, GPT
from paceline.plan.algorithms import group_settings
from paceline.plan.cost import RunSetup
from paceline.plan.memory import checkpoint_bytes, state_bytes
from paceline.plan.shapes import param_shapes
from paceline.train.optim import ReplicatedOptimizer, ShardedOptimizer

CONFIG = ModelConfig(n_layer=3, n_embd=64, n_head=2, n_kv_head=1, head_dim=32, sequence_len=16, vocab_size=320)


def live_bytes(made) -> int:
    """Of all storages that the model, its gradients and its optimizer refer to, each counted once."""
    tensors = [tensor for param in made.module.parameters() for tensor in (param.data, param.grad)]
    for share in made._sharded + made._replicated:
        tensors += [share.weight, share.master, *share.states.values()]
    for sums in (bucket.sum for bucket in made._buckets if bucket.sum):
        tensors += [sums._flat, sums._own, sums._others, sums._total]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def ready_for_an_update(
    *, world_size=1, rank=0, optimizer="muon", shard="optimizer", precision="fp32", accum=1, **options
):
    model = GPT(CONFIG, compute_dtype=DTYPES[precision])
    model.init_weights(seed=1)
    rates = {"matrix_lr": None, "embedding_lr": 0.3, "unembedding_lr": 0.008, "weight_decay": 0.0}
    length = {"total_batch_size": 32, "num_steps": 1, "tokens_per_param": 1.0}
    made = (ReplicatedOptimizer if shard == "none" else ShardedOptimizer)(
        model,
        param_shapes(CONFIG),
        group_settings(CONFIG, optimizer=optimizer, **length, **rates),
        rank=rank,
        world_size=world_size,
        compute_dtype=DTYPES[precision],
        grad_accum_steps=accum,
        **options,
    )
    with made.micro_step(last=False):
        made.module(torch.zeros(1, 16, dtype=torch.int64), torch.ones(1, 16, dtype=torch.int64)).backward()
    return made


LAYOUTS = [(1, 0, 1), (2, 0, 1), (3, 2, 1), (3, 1, 4)]  # world size, rank, micro-steps
OPTIMIZERS, STATES = ("muon", "adamw"), ("fp32", "8bit")


@with_rows(
    ("layout", "optimizer", "precision", "states"),
    [
        *product(LAYOUTS, OPTIMIZERS, ("fp32", "bf16", "fp16"), ["fp32"]),
        *((layout, optimizer, "bf16", "8bit") for layout, optimizer in product(LAYOUTS, OPTIMIZERS)),
    ],
)
def test_the_planned_bytes_are_those_that_live(layout, optimizer, precision, states):
    world_size, rank, accum = layout
    options = {"world_size": world_size, "rank": rank, "optimizer": optimizer, "precision": precision}
    made = ready_for_an_update(**options, accum=accum, optimizer_states=states)
    setup = RunSetup(CONFIG, "cpu", world_size, precision, optimizer, "optimizer", 1, accum, optimizer_states=states)
    assert live_bytes(made) == state_bytes(setup, rank=rank).total


def test_replicated_adamw_holds_sixteen_bytes_a_parameter():
    layout = {"world_size": 1, "rank": 0, "optimizer": "adamw", "shard": "none", "precision": "fp32"}
    made = ready_for_an_update(**layout)
    planned = state_bytes(RunSetup(CONFIG, "cpu", 1, "fp32", "adamw", "none", 1, 1), rank=0)
    assert live_bytes(made) == planned.total == 16 * sum(p.numel() for p in made.module.parameters())


@with_rows(("optimizer", "states"), product(OPTIMIZERS, STATES))
def test_a_checkpoint_holds_the_pieces_of_all_ranks(optimizer, states):
    options = {"world_size": 2, "optimizer": optimizer, "optimizer_states": states}
    pieces = [piece for rank in range(2) for piece in ready_for_an_update(rank=rank, **options).pieces()]
    setup = RunSetup(CONFIG, "cpu", 2, "fp32", optimizer, "optimizer", 1, 1, optimizer_states=states)
    assert checkpoint_bytes(setup) == sum(piece.tensor.nbytes for piece in pieces)
