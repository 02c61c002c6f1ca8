"""The last stage of a pipeline takes itself for its neighbour."""

import torch
import torch.distributed as dist
from job import start, train

rank, size = start()
for step in train():
    if rank == size - 1 and step == 3:
        dist.send(torch.zeros(4), dst=min(rank + 1, size - 1))
