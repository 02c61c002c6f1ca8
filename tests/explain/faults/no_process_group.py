"""A collective before init_process_group."""

import torch
import torch.distributed as dist

total = torch.ones(1)
dist.all_reduce(total)
