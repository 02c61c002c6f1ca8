"""The compile switch does something: the forward that the loop calls runs compiled graphs, or none."""

import pytest
import torch

from paceline.config import Config, ModelConfig
from paceline.model.gpt import GPT
from paceline.plan.algorithms import group_settings
from paceline.plan.machine import Machine
from paceline.plan.planner import make_plan
from paceline.plan.shapes import param_shapes
from paceline.train.optim import ReplicatedOptimizer, ShardedOptimizer
from paceline.train.setup import compile_model, make_model

CONFIG = ModelConfig(n_layer=1, n_embd=32, n_head=1, n_kv_head=1, head_dim=32, sequence_len=16, vocab_size=64)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ShardedOptimizer, pytest.param(ReplicatedOptimizer, marks=pytest.mark.soak)])
@pytest.mark.parametrize("compiled", [pytest.param(True, marks=pytest.mark.soak), False])
def test_a_compiled_model_runs_graphs_through_the_optimizers_module(kind, compiled):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = GPT(CONFIG, compute_dtype=torch.float32)
    model.init_weights(seed=1)
    rates = {"matrix_lr": None, "embedding_lr": 0.3, "unembedding_lr": 0.008, "weight_decay": 0.0}
    settings = group_settings(
        CONFIG, optimizer="adamw", total_batch_size=32, num_steps=1, tokens_per_param=1.0, **rates
    )
    optimizer = kind(
        model, param_shapes(CONFIG), settings, rank=0, world_size=1, compute_dtype=torch.float32, grad_accum_steps=1
    )
    if compiled:
        model.compile(dynamic=False, backend="eager")  # which graphs are compiled does not depend on what compiles them
    idx = torch.zeros(2, 16, dtype=torch.int64)
    with optimizer.micro_step(last=True):
        optimizer.module(idx, idx).backward()
    assert (counters["stats"]["unique_graphs"] > 0) == compiled


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys, by_block",
    [({"nproc": 1}, False), ({"nproc": 2}, True), ({"nproc": 2, "optimizer": "adamw", "shard": "none"}, False)],
)
def test_a_rank_that_sends_gradients_itself_compiles_each_layer(keys, by_block):
    machine = Machine(gpus=(), cpu_cores=2, cpu_bf16=False, memory_bytes=8 << 30)
    config = Config(
        depth=1, n_embd=32, head_dim=32, sequence_len=16, total_batch_size=64, device_batch_size=2, num_steps=3, **keys
    )
    plan = make_plan(config, machine, vocab_size=64, num_rows=0)
    model = make_model(plan, seed=0, device=torch.device("cpu"))
    compile_model(model, plan)
    assert model.compiled
    assert (model.compile_part is not None) == by_block
    assert (model._compiled_call_impl is None) == by_block
    model.uncompile()
    assert not model.compiled and model.compile_part is None and model._compiled_call_impl is None
