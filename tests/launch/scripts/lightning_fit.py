"""A Lightning module fitted by two processes on the CPU."""

import os
import sys

import lightning
import torch


class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        source, targets = batch
        return torch.nn.functional.mse_loss(self.layer(source), targets)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)


lightning.seed_everything(0)
dataset = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, default_root_dir=sys.argv[1]
)
model = Line()
trainer.fit(model, torch.utils.data.DataLoader(dataset, batch_size=8))
print(f"rank {trainer.global_rank} of {trainer.world_size}, {trainer.global_step} steps,"
      f" weight {model.layer.weight[0, 0].item():.6f}")  # fmt: skip
sys.stdout.flush()
os._exit(0)  # in torch 2.13, gloo with DDP aborts one interpreter exit in five, under torchrun as well
