"""A fit of Lightning's on two processes; argument 1 says what happens to rank 1 at step 3: `raise` or `kill`."""

import os
import signal
import sys

import lightning
import torch


class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, rows, index):
        if self.global_rank == 1 and index == 3:
            if sys.argv[1] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("sample 1841 has 3 fields, expected 4")
        return self.layer(rows).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


loader = torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=4)
trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False)
trainer.fit(Line(), loader)
