"""Rank 1 calls broadcast where the others call all_reduce; TORCH_DISTRIBUTED_DEBUG=DETAIL tells."""

import torch
import torch.distributed as dist
from job import start, train

rank, _ = start()
for step in train():
    if step == 3:
        if rank == 1:
            dist.broadcast(torch.ones(4), src=0)
        else:
            dist.all_reduce(torch.ones(4))
