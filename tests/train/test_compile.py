"""The compile switch does something: the forward that the loop calls runs compiled graphs, or none."""

import pytest
import torch

from paceline.config import ModelConfig
from paceline.model.gpt import GPT
from paceline.plan.algorithms import group_settings
from paceline.plan.shapes import param_shapes
from paceline.train.optim import ReplicatedOptimizer, ShardedOptimizer

CONFIG = ModelConfig(n_layer=1, n_embd=32, n_head=1, n_kv_head=1, head_dim=32, sequence_len=16, vocab_size=64)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ShardedOptimizer, ReplicatedOptimizer])
@pytest.mark.parametrize("compiled", [True, False])
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
        model,
        param_shapes(CONFIG),
        settings,
        rank=0,
        world_size=1,
        compute_dtype=torch.float32,
        grad_accum_steps=1,
    )
    if compiled:
        model.compile(dynamic=False, backend="eager")  # which graphs are compiled does not depend on what compiles them
    idx = torch.zeros(2, 16, dtype=torch.int64)
    with optimizer.micro_step(last=True):
        optimizer.module(idx, idx).backward()
    assert (counters["stats"]["unique_graphs"] > 0) == compiled
