"""Rank 1 has one layer more: DDP compares the models before it starts."""

import torch
from job import start
from torch.nn.parallel import DistributedDataParallel

rank, _ = start()
layers = [torch.nn.Linear(4, 4) for _ in range(2 + (rank == 1))]
DistributedDataParallel(torch.nn.Sequential(*layers))
