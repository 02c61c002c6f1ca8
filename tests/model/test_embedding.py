"""The gradient of a table against torch's own."""

import pytest
import torch
import torch.nn.functional as F

from paceline.model.embedding import Embedding


def gradient(embedding, idx, dy):
    return torch.autograd.grad(embedding(idx), embedding.weight, dy)[0]


def test_rows_and_their_gradient_are_torch_s():
    embedding = Embedding(10, 4)
    torch.nn.init.normal_(embedding.weight, generator=torch.Generator().manual_seed(0))
    idx = torch.tensor([[1, 2, 2], [9, 1, 1]])
    dy = torch.arange(24.0).view(2, 3, 4)
    assert torch.equal(embedding(idx), F.embedding(idx, embedding.weight))
    exact = torch.autograd.grad(F.embedding(idx, embedding.weight), embedding.weight, dy)[0]
    assert torch.equal(gradient(embedding, idx, dy), exact)


def test_a_frequent_token_s_bf16_gradient_is_summed_in_fp32():
    embedding = Embedding(3, 8).to(torch.bfloat16)
    ones = torch.ones(1, 1000, 8, dtype=torch.bfloat16)
    grad = gradient(embedding, torch.full((1, 1000), 2), ones)
    assert grad[2].tolist() == [1000.0] * 8  # bf16 sums would stop at 256


@pytest.mark.slow
def test_compiled_it_stays_one_op_with_the_same_bits():
    embedding = Embedding(50, 16)
    torch.nn.init.zeros_(embedding.weight)
    generator = torch.Generator().manual_seed(0)
    idx = torch.randint(50, (4, 500), generator=generator)
    dy = torch.randn(4, 500, 16, generator=generator)
    assert torch.equal(gradient(torch.compile(embedding), idx, dy), gradient(embedding, idx, dy))
