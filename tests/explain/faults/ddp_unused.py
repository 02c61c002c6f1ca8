"""DDP waits for the gradient of a layer that the loss does not use."""

import torch
from job import start
from torch.nn.parallel import DistributedDataParallel


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x)


start()
model = DistributedDataParallel(Two())
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
