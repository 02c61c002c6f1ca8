"""Rank 1 hands bf16 rows to fp32 weights."""

import torch
from job import start, train

rank, _ = start()
layer = torch.nn.Linear(8, 4)
for step in train():
    layer(torch.ones(2, 8, dtype=torch.bfloat16 if rank == 1 and step == 3 else torch.float32))
