"""DDP, told to look for unused parameters, with re-entrant checkpointing of a layer that is used twice."""

import torch
from job import start
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Twice(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        x = checkpoint(self.layer, x, use_reentrant=True)
        return checkpoint(self.layer, x, use_reentrant=True)


start()
model = DistributedDataParallel(Twice(), find_unused_parameters=True)
model(torch.ones(2, 4, requires_grad=True)).sum().backward()
