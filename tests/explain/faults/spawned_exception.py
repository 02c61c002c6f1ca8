"""Rank 1 of two that mp.spawn started raises."""

import os

import torch.multiprocessing as mp
from job import start, train


def work(rank, world_size):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    start()
    for step in train():
        if rank == 1 and step == 3:
            raise ValueError("sample 1841 has 3 fields, expected 4")


if __name__ == "__main__":
    mp.spawn(work, args=(2,), nprocs=2)
