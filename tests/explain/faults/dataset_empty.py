"""Rank 1's share of the data holds no sample."""

from job import start, train
from torch.utils.data import DataLoader

rank, _ = start()
samples = list(range(64)) if rank == 0 else []
loader = DataLoader(samples, batch_size=4, shuffle=True)
for _ in train():
    pass
