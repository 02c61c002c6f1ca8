"""
Rows to tensors: which rows a rank takes in a micro-step, and their way to its device. No state: a step number is all it needs.
"""

# B device_batch_size rows, T sequence_len

import numpy as np
import torch
from torch import Tensor

from paceline.data.order import micro_batch_rows, rows_of_step
from paceline.data.rows import TokenSplit
from paceline.plan.planner import Plan


class TrainLoader:
    """Micro-batches of one rank."""

    def __init__(self, split: TokenSplit, plan: Plan, *, seed: int, rank: int, device: torch.device):
        self.split, self.plan, self.seed, self.rank, self.device = split, plan, seed, rank, device
        self.num_rows = split.num_rows(plan.model.sequence_len)

    def micro_batch(self, step: int, micro_step: int) -> tuple[Tensor, Tensor]:
        """idx, targets: (B, T) int64 on the device; targets of -1 do not count."""
        plan = self.plan
        step_rows = rows_of_step(step, rows_per_step=plan.rows_per_step, num_rows=self.num_rows, seed=self.seed)
        mine = micro_batch_rows(
            step_rows,
            micro_step=micro_step,
            rank=self.rank,
            world_size=plan.world_size,
            device_batch_size=plan.device_batch_size,
        )
        idx, targets = self.split.rows(mine, plan.model.sequence_len)
        return to_device(idx, self.device), to_device(targets, self.device)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Through pinned memory to a GPU, so that the copy runs beside the step before; as it is on the CPU."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
