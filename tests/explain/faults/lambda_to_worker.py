"""A loader worker that is spawned cannot be given a lambda."""

from job import start
from torch.utils.data import DataLoader

rank, _ = start()
loader = DataLoader(range(8), num_workers=1, multiprocessing_context="spawn", collate_fn=lambda rows: rows)
if rank == 1:
    next(iter(loader))
