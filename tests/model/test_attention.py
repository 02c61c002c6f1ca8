"""
Attention's ways against plain PyTorch.

PyTorch's flash operators have no kernel for CPUs: these tests give them one, written from the documentation of FlashAttention. What
is tested is that our calls mean the window that they should mean, and that the gradients find their way.
"""

import pytest
import torch
import torch.nn.functional as F

from paceline.config import ModelConfig
from paceline.errors import PlanError
from paceline.model import attention
from paceline.model.attention import ATTENTION_ERROR, attend, attention_error, attention_problem, causal_attention
from paceline.model.gpt import GPT

CPU = torch.device("cpu")
CONFIG = ModelConfig(
    n_layer=2, n_embd=32, n_head=4, n_kv_head=2, head_dim=8, sequence_len=300, vocab_size=100, window_pattern="SL"
)


def documented_probabilities(q, k, is_causal, left, right):
    """(B, H, T, T) of q: (B, T, H, D); k: (B, T, K, D). A key may lie `left` before and `right` after its query; None: any."""
    right = 0 if is_causal else right
    back = torch.arange(q.shape[1]).unsqueeze(1) - torch.arange(k.shape[1])
    visible = torch.ones_like(back, dtype=torch.bool)
    visible &= back <= left if left not in (None, -1) else visible
    visible &= -back <= right if right not in (None, -1) else visible
    scores = torch.einsum("bihd,bjhd->bhij", q, for_every_head(k, q)) * q.shape[-1] ** -0.5
    return scores.masked_fill(~visible, -torch.inf).softmax(-1)


def for_every_head(x, q):
    return x.repeat_interleave(q.shape[2] // x.shape[2], 2)


def flash_forward(q, k, v, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, debug, *, scale=None, window_size_left=None,
                  window_size_right=None, **unused):  # fmt: skip
    assert (cum_q, cum_k, max_q, max_k, dropout_p, debug, scale) == (
        None,
        None,
        q.shape[1],
        k.shape[1],
        0.0,
        False,
        None,
    )
    assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous()  # in the projections' order
    p = documented_probabilities(q, k, is_causal, window_size_left, window_size_right)
    y = torch.einsum("bhij,bjhd->bihd", p, for_every_head(v, q)).contiguous()
    row_sums, empty = q.new_zeros(q.shape[0], q.shape[2], q.shape[1]), torch.zeros(2, dtype=torch.uint64)
    return y, row_sums, empty, empty.new_zeros(()), q.new_zeros(0)


def flash_backward(dy, q, k, v, out, row_sums, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, rng, unused, *, scale=None,
                   window_size_left=None, window_size_right=None):  # fmt: skip
    p = documented_probabilities(q, k, is_causal, window_size_left, window_size_right)
    dp = torch.einsum("bihd,bjhd->bhij", dy, for_every_head(v, q))
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    dq = torch.einsum("bhij,bjhd->bihd", ds, for_every_head(k, q))
    of_heads = (torch.einsum("bhij,bihd->bjhd", weights, x) for weights, x in ((ds, q), (p, dy)))
    return dq, *(x.unflatten(2, (k.shape[2], -1)).sum(3) for x in of_heads)


@pytest.fixture
def flash_on_cpu():
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", flash_forward, "CPU")
    library.impl("_flash_attention_backward", flash_backward, "CPU")
    yield
    library._destroy()


def inputs(heads=4, kv_heads=4, num_tokens=300):
    """(B, heads, T, D), in the memory order (B, T, heads, D), as a GPU's projections write them."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, num_tokens, count, 16) for count in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator).transpose(1, 2).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [1, 2, 128, 299, 300, 512])
def test_a_window_of_flash_attention_is_that_of_the_reference(flash_on_cpu, kv_heads, window):
    q, k, v = inputs(kv_heads=kv_heads)
    y = attend(q, k, v, None, window=window, way="flash")
    wide = [x.repeat_interleave(4 // kv_heads, 1) for x in (k, v)]
    exact = causal_attention(q, *wide, window=window)
    torch.testing.assert_close(y, exact, rtol=1e-5, atol=1e-5)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    for mine, exact_gradient in zip(*(torch.autograd.grad(x, (q, k, v), dy) for x in (y, exact)), strict=True):
        torch.testing.assert_close(mine, exact_gradient, rtol=1e-5, atol=1e-5)


def test_flash_attention_writes_in_the_projections_order(flash_on_cpu):
    assert attend(*inputs(kv_heads=2), None, window=128, way="flash").is_contiguous()


def test_cudnn_takes_full_layers_and_flash_those_with_a_window(flash_on_cpu, monkeypatch):
    q, k, v = inputs(kv_heads=2)
    calls = []

    def cudnn(q, k, v, bias, log_sums, dropout_p, is_causal):
        calls.append((bias, log_sums, dropout_p, is_causal))
        return (F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True),)

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", cudnn)
    for window in (128, 300):
        y = attend(q, k, v, None, window=window, way="cudnn")
        torch.testing.assert_close(y, attend(q, k, v, None, window=window, way="flash"), rtol=1e-5, atol=1e-5)
    assert calls == [(None, True, 0.0, True)]


def test_one_query_sees_every_key_of_the_cache_whatever_the_way():
    q, k, v = inputs()
    one = q[:, :, -1:]
    assert torch.equal(attend(one, k, v, None, window=8, way="flash"), attend(one, k, v, None, window=8))


@pytest.mark.parametrize("way", ["fa3", "cudnn", "flash", "flex"])
def test_a_cpu_refuses_what_is_for_gpus(way):
    with pytest.raises(PlanError) as error:
        GPT(CONFIG, compute_dtype=torch.float32, attention=way).masks(300, CPU)
    assert error.value.fix == "attention sdpa"


def test_the_trial_accepts_what_is_right_in_16_bits_and_refuses_a_window_that_is_one_key_short(monkeypatch):
    config = ModelConfig(2, 256, 4, 2, 64, sequence_len=2048, vocab_size=100, window_pattern="SL")
    assert 0.004 < attention_error(config, "sdpa", torch.bfloat16, CPU) < ATTENTION_ERROR / 2
    assert attention_problem(config, "sdpa", torch.bfloat16, CPU) is None

    def short(q, k, v, mask, *, window, way):
        return attend(q, k, v, mask, window=window - (window < 1024), way=way)

    monkeypatch.setattr(attention, "attend", short)
    assert attention_problem(config, "sdpa", torch.bfloat16, CPU) == "its numbers are 4.2 % off"


def test_a_way_that_does_not_run_is_a_reason_and_not_an_error():
    problem = attention_problem(CONFIG, "flash", torch.bfloat16, CPU)
    assert problem.startswith("NotImplementedError: Could not run 'aten::_flash_attention_forward'")
    assert "flash_attn_interface" in attention_problem(CONFIG, "fa3", torch.bfloat16, CPU)
