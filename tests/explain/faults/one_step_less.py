"""Rank 1 has one batch less and ends well; rank 0 is alone in its last all_reduce."""

import torch.distributed as dist
from job import start, train

rank, _ = start()
for _ in train(num_steps=6 - rank):
    pass
dist.destroy_process_group()
