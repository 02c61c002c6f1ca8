"""Rank 1 may not have more address space, and asks for a tensor of 64 GiB."""

import resource

import torch
from job import start, train

rank, _ = start()
for step in train():
    if rank == 1 and step == 3:
        resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
        torch.ones(64 << 30, dtype=torch.uint8)
