"""
The all_reduce bandwidth that `paceline comm` measures beside that of a bare loop, in turn, on the same ranks; and the ratio.

    python benchmarks/comm.py [--nproc 2] [--rounds 25] [--device cpu]

Bare is what everybody writes: some warm-up calls, then a clock around a loop of dist.all_reduce, ten times, the median. Both
sides have a buffer of their own. Medians over rounds, with the spread of the ratios. The bar: a median ratio of 0.90 to 1.10 at
the largest size, which is the one that comm calls bandwidth; small messages vary by more on a busy machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.comm.rank_process import dist_store
from paceline.comm.sweep import Measure, measures
from paceline.heartbeat import OperationHeartbeat
from paceline.rundir import RunDir
from paceline.train.process import init_distributed, shutdown
from paceline.units import MIB, format_bytes

SIZES = {"cpu": [MIB, 4 * MIB, 16 * MIB], "cuda": [MIB, 16 * MIB, 256 * MIB]}
SECONDS = 0.2  # of each side in each round
GROUPS = 10
EXPECTED_BYTES_PER_S = {"cpu": 1e9, "cuda": 2e10}  # only sets how many calls a bare loop has
WARM_UPS = 3


def bare_bandwidth(num_bytes: int, count: int, device: torch.device) -> float:
    """Bytes/s in the median of GROUPS loops of `count` calls; the same count on all ranks."""
    x = torch.zeros(num_bytes // 4, device=device)
    for _ in range(WARM_UPS):
        dist.all_reduce(x)
    seconds = []
    for _ in range(GROUPS):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            dist.all_reduce(x)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append((time.perf_counter() - started) / count)
    return num_bytes / statistics.median(seconds)


def work(rounds: int, device_type: str) -> None:
    """On each rank. Rank 0 prints (size, paceline's bytes/s, bare bytes/s) as JSON lines."""
    rank, world_size, local_rank = init_distributed(device_type)
    device = torch.device("cuda", local_rank) if device_type == "cuda" else torch.device("cpu")
    sweep = measures(rank, world_size, device, sizes=SIZES[device_type])
    all_reduces = [measure for measure in sweep if measure.collective == "all_reduce"]
    heartbeat = OperationHeartbeat(RunDir(Path(tempfile.mkdtemp())), rank)
    for turn in range(rounds):
        for measure in all_reduces:
            numbered = replace(measure, number=turn * len(sweep) + measure.number)
            count = max(1, int(SECONDS / GROUPS * EXPECTED_BYTES_PER_S[device_type] / measure.num_bytes))

            def ours(numbered: Measure = numbered) -> float:
                result = numbered.run(heartbeat, dist_store(), budget_s=SECONDS)
                assert result is not None
                return float(result["bytes"] / result["seconds"])

            def bare(num_bytes: int = measure.num_bytes, count: int = count) -> float:
                return bare_bandwidth(num_bytes, count, device)

            if turn % 2:
                bare_rate, our_rate = bare(), ours()
            else:
                our_rate, bare_rate = ours(), bare()
            if rank == 0:
                print(json.dumps([measure.num_bytes, our_rate, bare_rate]), flush=True)
    shutdown()
    sys.stdout.flush()
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    if "RANK" in os.environ:
        work(args.rounds, args.device)
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={args.nproc}", "--standalone"]
    command += [__file__, "--rounds", str(args.rounds), "--device", args.device]
    env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    ratio = 0.0
    for size in dict.fromkeys(row[0] for row in rows):
        ours, bare = ([row[i] for row in rows if row[0] == size] for i in (1, 2))
        ratios = [a / b for a, b in zip(ours, bare, strict=True)]
        ratio = statistics.median(ratios)
        print(
            f"{format_bytes(size):>8}  paceline {statistics.median(ours) / 1e9:.3f} GB/s, bare"
            f" {statistics.median(bare) / 1e9:.3f} GB/s, ratio {ratio:.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        )
    off = abs(ratio - 1)
    print("within 10 %" if off <= 0.1 else f"off by {off:.0%}: outside the bar of 10 %")
    return 0 if off <= 0.1 else 1


if __name__ == "__main__":
    sys.exit(main())
