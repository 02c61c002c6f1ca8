"""mp.spawn at the top of the script: every child starts it again."""

import torch.multiprocessing as mp


def work(rank):
    print("rank", rank)


mp.spawn(work, nprocs=2)
