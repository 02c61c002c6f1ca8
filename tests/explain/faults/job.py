"""What the failing scripts share: a process group that is soon out of patience, and a few steps of training."""

import sys
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

torch.set_num_threads(1)


def start(timeout_s: float = 8.0) -> tuple[int, int]:
    """Joins the other ranks; this rank and how many there are."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    return dist.get_rank(), dist.get_world_size()


def train(num_steps: int = 6) -> Iterator[int]:
    """Steps of data parallel training on noise, rank 0 telling of each; gives every step that is done."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    for step in range(num_steps):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.data -= 0.01 * p.grad / dist.get_world_size()
            p.grad = None
        if dist.get_rank() == 0:
            say(f"step {step:05d}/{num_steps:05d} | loss {loss.item():.4f}")
        yield step


def say(text: str) -> None:
    """One write for a whole line: the ranks share a pipe."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
