"""FLOPs by hand, and against PyTorch's counter on the real model."""

import pytest
import torch

from paceline.config import ModelConfig
from paceline.model.gpt import GPT
from paceline.plan.cost import flops_per_token, mfu
from paceline.plan.shapes import window_sizes

SMALL = ModelConfig(n_layer=2, n_embd=32, n_head=4, n_kv_head=2, head_dim=8, sequence_len=16, vocab_size=100)


def test_flops_of_a_small_model_are_those_counted_by_hand():
    attention = 32 * 32 + 16 * 32 + 16 * 32 + 32 * 32  # q, k, v, proj
    mlp = 2 * 32 * 128
    gate, lm_head = 2 * 12, 128 * 32  # one value embedding, in the last layer; 100 tokens are padded to 128
    scores = 2 * 12 * 8 * 4 * 16  # layers x 12 x head_dim x n_head x tokens seen
    assert flops_per_token(SMALL) == 6 * (2 * (attention + mlp) + gate + lm_head) + scores


def test_short_windows_are_a_quarter_rounded_up_to_128_and_the_last_layer_sees_all():
    model = ModelConfig(6, 64, 1, 1, 64, sequence_len=1100, vocab_size=64, window_pattern="SSSL")
    assert window_sizes(model) == (384, 384, 384, 1100, 384, 1100)


def test_a_short_window_is_never_longer_than_the_row():
    model = ModelConfig(2, 64, 1, 1, 64, sequence_len=100, vocab_size=64, window_pattern="S")
    assert window_sizes(model) == (100, 100)


def test_windows_take_flops_off():
    model = ModelConfig(4, 64, 1, 1, 64, sequence_len=1024, vocab_size=64)
    windowed = ModelConfig(4, 64, 1, 1, 64, sequence_len=1024, vocab_size=64, window_pattern="SSSL")
    assert flops_per_token(model) - flops_per_token(windowed) == 3 * 12 * 64 * (1024 - 256)


def test_flops_agree_with_those_pytorch_counts_within_a_tenth_of_a_percent():
    """One block of 128 tokens: CPU attention skips no key then, as the formula counts it."""
    from torch.utils.flop_counter import FlopCounterMode  # it imports Triton

    config = ModelConfig(n_layer=3, n_embd=64, n_head=4, n_kv_head=4, head_dim=16, sequence_len=128, vocab_size=512)
    model = GPT(config, compute_dtype=torch.float32)
    model.init_weights(seed=0)
    idx = torch.zeros(2, 128, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(idx, idx).backward()
    assert counter.get_total_flops() / (2 * 128) == pytest.approx(flops_per_token(config), rel=1e-3)


def test_mfu_is_a_share_of_the_peak_and_unknown_without_one():
    assert mfu(1000.0, 2_000_000, 8e9) == 0.25
    assert mfu(1000.0, 2_000_000, None) is None
