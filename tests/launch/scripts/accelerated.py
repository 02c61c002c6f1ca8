"""A loop of accelerate's: prepare, backward, gather."""

import os
import sys

import torch
from accelerate import Accelerator

accelerator = Accelerator()
torch.manual_seed(0)
dataset = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(dataset, batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for source, targets in loader:
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(source), targets)
    accelerator.backward(loss)
    optimizer.step()
total = accelerator.reduce(torch.ones(1, device=accelerator.device)).item()
weight = accelerator.unwrap_model(model).weight[0, 0].item()
sys.stdout.write(  # one write: print's newline is another, and accelerate's ranks share one pipe
    f"rank {accelerator.process_index} of {accelerator.num_processes}, sum {total}, {len(loader)} steps,"
    f" {accelerator.mixed_precision}, weight {weight:.6f}\n"
)
accelerator.end_training()
sys.stdout.flush()
os._exit(0)  # in torch 2.13, gloo with DDP aborts one interpreter exit in five, under torchrun as well
