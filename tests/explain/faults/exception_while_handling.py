"""Rank 1 fails while it handles a failure: the first of two chained exceptions is the cause."""

from pathlib import Path

from job import start, train

rank, _ = start()
for step in train():
    if rank == 1 and step == 3:
        try:
            Path("shards/train_00003.bin").read_bytes()
        except FileNotFoundError as error:
            raise RuntimeError("data loader cannot go on") from error
