"""Rank 1 looks up a token that the vocabulary does not have."""

import torch
from job import start, train

rank, _ = start()
wte = torch.nn.Embedding(16, 8)
for step in train():
    wte(torch.tensor([1, 2, 50257 if rank == 1 and step == 3 else 3]))
