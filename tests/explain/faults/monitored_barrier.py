"""Rank 1 is late at a monitored barrier, which names the rank that it misses."""

import time
from datetime import timedelta

import torch.distributed as dist
from job import start, train

rank, _ = start()
for step in train():
    if step == 3:
        if rank == 1:
            time.sleep(60)
        dist.monitored_barrier(timeout=timedelta(seconds=3))
