"""Rank 1's loader workers hand over batches of 4 MiB through a /dev/shm of 1 MiB."""

import torch
from job import start, train
from torch.utils.data import DataLoader

rank, _ = start()
for step in train():
    if rank == 1 and step == 3:
        for _ in DataLoader(torch.ones(64, 1 << 18), batch_size=4, num_workers=2):
            pass
