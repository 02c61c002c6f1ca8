"""A loop of accelerate's; argument 1 says what happens to rank 1 at step 3: `raise`, `kill` or `split`."""

import os
import signal
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration

accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=sys.argv[1] == "split"))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.randn(63, 4), batch_size=7)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for step, rows in enumerate(loader):
    accelerator.backward(model(rows).square().mean())
    optimizer.step()
    accelerator.print(f"step {step}", flush=True)
    if accelerator.process_index == 1 and step == 3:
        if sys.argv[1] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("sample 1841 has 3 fields, expected 4")
