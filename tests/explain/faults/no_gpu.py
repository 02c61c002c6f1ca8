"""Every rank asks for a GPU, and there is none."""

import os

import torch

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
torch.ones(1, device=f"cuda:{local_rank}")
