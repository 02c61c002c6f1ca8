"""val_bpb: the same rows whatever the world size, bytes counted once."""

import math

import numpy as np
import pytest
import torch

from paceline.config import ModelConfig
from paceline.model.gpt import GPT
from paceline.train.evaluate import eval_rows, val_bpb

CONFIG = ModelConfig(n_layer=1, n_embd=32, n_head=1, n_kv_head=1, head_dim=32, sequence_len=8, vocab_size=64)


class Rows:
    """Held-out text of 65 random tokens: 8 rows of 8."""

    def __init__(self):
        self.ids = np.random.default_rng(0).integers(0, 64, 65)

    def num_rows(self, sequence_len):
        return 64 // sequence_len

    def rows(self, indices, sequence_len):
        windows = np.stack([self.ids[i * sequence_len : (i + 1) * sequence_len + 1] for i in indices])
        return windows[:, :-1].copy(), windows[:, 1:].copy()


@pytest.fixture
def model():
    made = GPT(CONFIG, compute_dtype=torch.float32)
    made.init_weights(seed=1)
    return made


def test_rows_are_spread_evenly_over_the_held_out_part():
    assert eval_rows(10, max_rows=5).tolist() == [0, 2, 4, 6, 8]
    assert eval_rows(3, max_rows=5).tolist() == [0, 1, 2]


def test_a_compiled_model_is_compiled_once_whatever_is_left_for_the_last_batch(model):
    sizes, shapes = torch.full((64,), 2), set()

    def backend(graph, inputs):
        shapes.update(tuple(x.shape) for x in inputs if x.dtype == torch.int64)
        return graph

    options = {"token_bytes": sizes, "max_tokens": 64, "device_batch_size": 3, "rank": 0, "world_size": 1}
    eager = val_bpb(model, Rows(), **options)  # 3 + 3 + 2 rows
    model.compile(backend=backend, dynamic=False)
    assert val_bpb(model, Rows(), **options) == pytest.approx(eager, rel=1e-6)
    assert shapes == {(3, 8)}


def test_an_untrained_model_costs_the_logarithm_of_the_vocabulary_over_the_bytes(model):
    sizes = torch.full((64,), 2)
    bpb = val_bpb(model, Rows(), token_bytes=sizes, max_tokens=64, device_batch_size=3, rank=0, world_size=1)
    assert bpb == pytest.approx(math.log2(64) / 2, rel=1e-3)


def test_special_tokens_count_neither_nats_nor_bytes(model):
    sizes = torch.full((64,), 2)
    sizes[::2] = 0
    bpb = val_bpb(model, Rows(), token_bytes=sizes, max_tokens=64, device_batch_size=3, rank=0, world_size=1)
    assert bpb == pytest.approx(math.log2(64) / 2, rel=1e-3)


def test_the_batch_size_does_not_change_the_figure(model):
    sizes = torch.arange(64) % 5
    figures = [
        val_bpb(model, Rows(), token_bytes=sizes, max_tokens=64, device_batch_size=rows, rank=0, world_size=1)
        for rows in (1, 3, 8)
    ]
    assert figures[1:] == pytest.approx([figures[0]] * 2, rel=1e-6)
