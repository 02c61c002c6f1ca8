"""
Seconds from sbatch to the first step: a run by `paceline train --slurm` beside a bare batch script with srun and torchrun.

    PYTHONPATH=tests python benchmarks/slurm.py [ROUNDS]

A real Slurm of three network namespaces (tests/slurm_cluster.py), so it needs root and slurm-wlm. Both train the same model by the
same worker on two nodes, from text that is prepared; the bare script has no checks, no plan, no supervisor.
"""

import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from slurm_cluster import SlurmCluster, slurm_cluster

from paceline.rundir import RunDir, read_json_lines
from paceline.units import parse_time

SIZES = (
    "--nproc=1", "--depth=2", "--n-embd=64", "--head-dim=32", "--sequence-len=64", "--vocab-size=512", "--device=cpu",
    "--total-batch-size=1536", "--device-batch-size=4", "--sample-every=0", "--eval-every=0", "--eval-tokens=1024",
    "--data=text.txt", "--precision=fp32", "--num-steps=5", "--log-every=1", "--slurm", "--hosts=2", "--slurm-args=--time=30",
    "--detach",
)  # fmt: skip
BARE = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --time=30 --exclusive --output={run}/bare.log
export OMP_NUM_THREADS=1
exec srun --mpi=none {python} -m torch.distributed.run --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d \\
  --rdzv-endpoint=n1:29500 --rdzv-id=$SLURM_JOB_ID -m paceline.train.worker {run} --attempt 1
"""


def first_step(run: RunDir) -> float | None:
    """Returns the time of the first step; None where there is none yet."""
    lines = (line for line in read_json_lines(run.metrics) if line["step"] >= 1 and line.get("loss") is not None)
    return next((parse_time(line["time"]) for line in lines), None)


def time_paceline(cluster: SlurmCluster, run: RunDir, *arguments: str) -> float:
    done = cluster.paceline("train", *SIZES, *arguments, "--name", run.name)
    assert done.returncode == 0, done.stderr
    return wait_for_step(cluster, run) - (run.path / "slurm.sh").stat().st_mtime


def time_bare(cluster: SlurmCluster, run: RunDir, source: RunDir) -> float:
    """source: a run whose plan and text it takes."""
    for folder in (run.logs(1), run.progress(0).parent):
        folder.mkdir(parents=True)
    for path in (source.config_toml, source.plan_json, source.dataset_json):
        shutil.copy(path, run.path)
    shutil.copytree(source.path / "tokenizer", run.path / "tokenizer")
    (run.path / "bare.sh").write_text(BARE.format(run=run.path, python=sys.executable))
    started = time.time()
    cluster.slurm("sbatch", str(run.path / "bare.sh"))
    return wait_for_step(cluster, run) - started


def wait_for_step(cluster: SlurmCluster, run: RunDir) -> float:
    cluster.wait_for(lambda: first_step(run))
    cluster.wait_for(lambda: not cluster.slurm("squeue", "--noheader").strip())
    moment = first_step(run)
    assert moment
    return moment


def main(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder, slurm_cluster(Path(folder)) as cluster:
        lines = (f"the {number} quick brown foxes jump over {number * number} lazy dogs\n" for number in range(3000))
        (Path(folder) / "text.txt").write_text("".join(lines))
        time_paceline(cluster, RunDir(cluster.runs / "first"))  # prepares the text, and fills the caches
        seconds: dict[str, list[float]] = {"paceline": [], "paceline --no-check": [], "bare": []}
        for number in range(rounds):
            run = RunDir(cluster.runs / f"run{number}")
            seconds["paceline"].append(time_paceline(cluster, run))
            other = RunDir(cluster.runs / f"unchecked{number}")
            seconds["paceline --no-check"].append(time_paceline(cluster, other, "--no-check", "--health-every=0"))
            seconds["bare"].append(time_bare(cluster, RunDir(cluster.runs / f"bare{number}"), run))
        for name, values in seconds.items():
            shown = ", ".join(f"{value:.1f}" for value in values)
            print(f"{name:20} {statistics.median(values):5.1f} s, median of {shown}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
