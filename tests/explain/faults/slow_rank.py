"""Rank 1 takes longer over one step than the others wait."""

import time

from job import start, train

rank, _ = start(timeout_s=3)
for step in train():
    if rank == 1 and step == 3:
        time.sleep(60)
