"""Rank 1 meets a bad sample at step 3; the others wait for it in all_reduce and lose their connection."""

from job import start, train

rank, _ = start()
for step in train():
    if rank == 1 and step == 3:
        raise ValueError("sample 1841 has 3 fields, expected 4")
