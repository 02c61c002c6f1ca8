"""Every rank moves a model whose weights are still on the meta device."""

import torch
from job import start, train

start()
with torch.device("meta"):
    model = torch.nn.Linear(8, 4)
model.to("cpu")
for _ in train():
    pass
