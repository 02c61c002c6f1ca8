"""
A bare PyTorch loop to be measured against: DDP, fused AdamW, gradient clipping, nothing else. The model is paceline's own.

Run under torchrun. Rank 0 prints one JSON line: seconds of every step, and the wall time at which the first step ended.
"""

import argparse
import json
import os
import time

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paceline.config import ModelConfig
from paceline.model.gpt import GPT


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", required=True, help="ModelConfig as JSON")
    parser.add_argument("--tokens", required=True, help="a uint16 token shard")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--accum", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    config = ModelConfig(**json.loads(args.shape))
    torch.manual_seed(1)
    model = GPT(config, compute_dtype=torch.float32)
    model.init_weights(seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True) if dist.get_world_size() > 1 else model
    tokens = np.memmap(args.tokens, dtype=np.uint16, mode="r")
    rng = np.random.default_rng(rank)
    seconds, first = [], 0.0
    for _ in range(args.steps):
        started = time.perf_counter()
        for micro_step in range(args.accum):
            starts = rng.integers(0, len(tokens) - config.sequence_len - 1, args.rows)
            rows = torch.from_numpy(
                np.stack([tokens[i : i + config.sequence_len + 1] for i in starts]).astype(np.int64)
            )
            if ddp is not model:
                ddp.require_backward_grad_sync = micro_step == args.accum - 1
            loss = ddp(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) / (
                args.rows * config.sequence_len * args.accum
            )
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - started)
        first = first or time.time()
    if rank == 0:
        print(json.dumps({"seconds": seconds, "first_step": first, "loss": loss.item()}), flush=True)
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
