"""In the shape of the elastic docs: main under @record, which writes what it raises for the launcher to read."""

import os

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main():
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    if int(os.environ["RANK"]) == 1:
        raise RuntimeError("the batch of rank 1 is empty")
    dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    main()
