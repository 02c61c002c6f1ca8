"""Blocks of queries against PyTorch's attention under the same mask."""

import pytest
import torch
import torch.nn.functional as F

from paceline.model.cpu_attention import causal_attention


@pytest.mark.parametrize("num_tokens", [1, 100, 128, 300, 600])  # 600: probabilities are computed again
@pytest.mark.parametrize("window", [1, 100, 128, 257, 1000])
def test_blocks_equal_attention_under_a_mask(num_tokens, window):
    generator = torch.Generator().manual_seed(0)
    q, k, v, dy = (torch.randn(2, 3, num_tokens, 8, generator=generator, requires_grad=True) for _ in range(4))
    back = torch.arange(num_tokens).unsqueeze(1) - torch.arange(num_tokens)
    exact = F.scaled_dot_product_attention(q, k, v, attn_mask=(back >= 0) & (back < window)).transpose(1, 2)
    mine = causal_attention(q, k, v, window=window)
    torch.testing.assert_close(mine, exact)
    dy = dy.detach().transpose(1, 2)
    for a, b in zip(torch.autograd.grad(mine, (q, k, v), dy), torch.autograd.grad(exact, (q, k, v), dy), strict=True):
        torch.testing.assert_close(a, b)
