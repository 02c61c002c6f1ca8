"""Rank 1 fails first, rank 0 a moment later, before the launcher ends it, with an error of its own."""

import time

from job import start, train

rank, _ = start()
for step in train():
    if rank == 1 and step == 3:
        raise ValueError("sample 1841 has 3 fields, expected 4")
    if rank == 0 and step == 3:
        time.sleep(0.03)
        raise KeyError("learning_rate")
