"""The second, recomputing forward pass of rank 1 takes another path than the first."""

import itertools

import torch
from job import start, train
from torch.utils.checkpoint import checkpoint

passes = itertools.count()


def forward(x):
    return x.exp().sin() if next(passes) == 0 else x.exp()


rank, _ = start()
for step in train():
    if rank == 1 and step == 3:
        checkpoint(forward, torch.ones(4, requires_grad=True), use_reentrant=False).sum().backward()
