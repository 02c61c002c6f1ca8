"""transformers' Trainer on a model made from a config: nothing is downloaded."""

import os
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        row = torch.arange(i, i + 16) % 50
        return {"input_ids": row, "labels": row}


torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2))
arguments = TrainingArguments(
    output_dir=sys.argv[1], per_device_train_batch_size=4, max_steps=3, logging_steps=1, save_steps=3, report_to="none",
    ddp_find_unused_parameters=False,
)  # fmt: skip
trainer = Trainer(model=model, args=arguments, train_dataset=Rows())
trainer.train()
print(f"rank {arguments.process_index} of {arguments.world_size}, {trainer.state.global_step} steps,"
      f" weight {model.transformer.wte.weight[0, 0].item():.6f}")  # fmt: skip
torch.distributed.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # in torch 2.13, gloo with DDP aborts one interpreter exit in five, under torchrun as well
