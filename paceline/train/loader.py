"""
Rows to tensors: which rows a rank takes in a micro-step, and their way to its device. No state but the batches that the run
passes over (train/trouble.py): a step number is all it needs.
"""

# B device_batch_size rows, T sequence_len

from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from paceline.data.order import Int64s, batch_of_step, micro_batch_rows, rows_of_step
from paceline.data.rows import TokenSplit
from paceline.plan.planner import Plan


class TrainLoader:
    """Micro-batches of one rank."""

    def __init__(
        self,
        split: TokenSplit,
        plan: Plan,
        *,
        seed: int,
        rank: int,
        device: torch.device,
        passed_over: Collection[int] = (),
    ):
        self.split, self.plan, self.seed, self.rank, self.device = split, plan, seed, rank, device
        self.num_rows = split.num_rows(plan.model.sequence_len)
        self.passed_over = passed_over

    def rows_of(self, step: int, micro_step: int) -> Int64s:
        """(B,) int64: this rank's rows of a micro-step."""
        plan = self.plan
        batch = batch_of_step(step, self.passed_over)
        step_rows = rows_of_step(batch, rows_per_step=plan.rows_per_step, num_rows=self.num_rows, seed=self.seed)
        return micro_batch_rows(
            step_rows,
            micro_step=micro_step,
            rank=self.rank,
            world_size=plan.world_size,
            device_batch_size=plan.device_batch_size,
        )

    def files_of(self, step: int) -> list[str]:
        """The shards that this rank's rows of a step lie in."""
        rows = [self.rows_of(step, micro_step) for micro_step in range(self.plan.grad_accum_steps)]
        return self.split.files_of(np.concatenate(rows), self.plan.model.sequence_len)

    def micro_batch(self, step: int, micro_step: int) -> tuple[Tensor, Tensor]:
        """idx, targets: (B, T) int64 on the device; targets of -1 do not count."""
        idx, targets = self.split.rows(self.rows_of(step, micro_step), self.plan.model.sequence_len)
        return to_device(idx, self.device), to_device(targets, self.device)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Through pinned memory to a GPU, so that the copy runs beside the step before; as it is on the CPU."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
