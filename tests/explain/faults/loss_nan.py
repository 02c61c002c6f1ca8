"""Rank 1's loss is not a number, and the loop's own check stops it."""

import torch
from job import start, train

rank, _ = start()
for step in train():
    if rank == 1 and step == 3:
        loss = torch.tensor(-1.0).log()
        if not torch.isfinite(loss):
            raise FloatingPointError(f"loss is {loss.item()} at step {step}")
