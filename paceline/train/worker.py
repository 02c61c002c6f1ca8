"""
One rank of a run: `python -m paceline.train.worker RUN --attempt N`, started by the elastic engine with RANK and WORLD_SIZE set.

Everything it needs stands in the run folder: config.toml, plan.json, and the newest good checkpoint if there is one. It decides
nothing of the plan again, except whether to compile where the plan leaves that open. On SIGTERM or SIGUSR1 it finishes the step,
saves, and ends with 0; all ranks agree on that step.
"""

import argparse
import contextlib
import json
import logging
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.config import Config
from paceline.config_file import load_config
from paceline.data.dataset import BadToken, batch_of_step
from paceline.data.prepare import TokenDataset, open_dataset, verify
from paceline.data.tokenizer import Tokenizer
from paceline.heartbeat import HeartbeatWriter
from paceline.model.checkpoint import CheckpointWriter, SavedCheckpoint
from paceline.model.gpt import GPT
from paceline.model.publish import NoSpace
from paceline.plan.memory import checkpoint_bytes
from paceline.plan.planner import Plan
from paceline.plan.shapes import choose_eval_tokens
from paceline.rundir import RunDir, append_event, read_json_lines, utc_now, write_atomic
from paceline.train.evaluate import val_bpb, write_sample
from paceline.train.loop import Loop, LossScale, StopRequest, TrainLoader
from paceline.train.optim import Optimizer, make_optimizer
from paceline.train.process import MemoryEvents, answer_with_stacks, broadcast_object, run_rank
from paceline.train.setup import (
    choose_compile,
    initial_scale,
    make_model,
    resume,
    rng_pieces,
    start_ranks,
)
from paceline.train.trouble import LossGuard, LossTrouble, answer_trouble, load_skipped
from paceline.units import format_bytes

# B rows in a micro-batch, T tokens in a row

log = logging.getLogger("paceline")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # SIGUSR1: a batch system's warning that the time is nearly up


def main() -> None:
    """Trains, and ends the process with the error's exit code, or 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    args = parser.parse_args()
    run, rank = RunDir(args.run), int(os.environ.get("RANK", "0"))
    stop = StopRequest()
    for signum in STOP_SIGNALS:
        signal.signal(signum, stop.set)
    logging.basicConfig(
        stream=sys.stdout,
        level=logging.INFO,
        format="[%(levelname)s] %(asctime)s %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
    )
    progress = HeartbeatWriter(run, rank)
    progress.beat(0, "start")
    answer_with_stacks(run, attempt=args.attempt, rank=rank)
    run_rank(
        lambda: train_rank(run, attempt=args.attempt, stop=stop, progress=progress),
        run,
        attempt=args.attempt,
        rank=rank,
    )


def train_rank(run: RunDir, *, attempt: int, stop: StopRequest, progress: HeartbeatWriter) -> None:
    """Prepares everything that the loop needs, runs it, and ends the run's files."""
    config, _ = load_config(run.config_toml, {})
    plan = Plan.from_json(run.plan_json.read_text())
    torch.set_num_threads(plan.threads)
    device, rank = start_ranks(plan)
    dataset = open_dataset(Path(json.loads(run.dataset_json.read_text())["path"]))
    model = make_model(plan, seed=config.seed, device=device)
    torch.manual_seed(config.seed * 1_000_003 + rank)
    optimizer = make_optimizer(model, plan, plan.groups, rank=rank)
    skipped = broadcast_object(load_skipped(run) if rank == 0 else [])
    skipped_batches = [batch["batch"] for batch in skipped]
    loader = TrainLoader(
        dataset.split("train"), plan, seed=config.seed, rank=rank, device=device, skipped_batches=skipped_batches
    )
    scale = LossScale(initial_scale(plan), dynamic=plan.precision == "fp16")
    guard = LossGuard(config.max_loss_spike)
    start = resume(run, optimizer, scale, guard, rank=rank, device=device, plan=plan)
    progress.beat(start, "compile")
    forward = choose_compile(run, model, optimizer, plan, loader, rank=rank)
    memory = MemoryEvents(run, attempt, rank, device, plan, compiled=model._compiled_call_impl is not None)
    writer = make_writer(run, config, plan, attempt=attempt, rank=rank)

    def evaluate() -> float:
        tokenizer = Tokenizer.load(dataset.tokenizer_json)
        return val_bpb(
            model,
            dataset.split("val"),
            token_bytes=torch.from_numpy(tokenizer.token_bytes()).to(device),
            max_tokens=choose_eval_tokens(config, num_steps=plan.num_steps, total_batch_size=plan.total_batch_size),
            device_batch_size=plan.device_batch_size,
            rank=rank,
            world_size=plan.world_size,
        )

    def save(step: int, bpb: float | None) -> None:
        state: dict[str, Any] = {
            "optimizer": optimizer.state_dict(),
            "scale": scale.state_dict(),
            "loss_guard": guard.state_dict(),
        }
        state |= {"seed": config.seed, "momentum_form": "ema"}
        pieces = optimizer.pieces() + rng_pieces(rank, device)
        memory.copies_bytes = sum(piece.tensor.nbytes for piece in pieces)
        writer.save(step, pieces, state, val_bpb=bpb)

    def sample(step: int) -> None:
        if rank == 0:
            write_sample(run, model, dataset, step=step, seed=config.seed)

    loop = Loop(
        run, config, plan, optimizer, forward, loader, rank, device, stop, evaluate, save, sample, memory.write, progress,
        scale, guard, writer.has_space_again,
    )  # fmt: skip
    if start >= plan.num_steps:
        finish(run, step=start, bpb=None, stopped=False, rank=rank, progress=progress, writer=writer)
        return
    done, bpb, stopped = train_or_explain(loop, start, dataset, writer, skipped, attempt=attempt, model=model)
    memory.write(done)
    finish(run, step=done, bpb=bpb, stopped=stopped, rank=rank, progress=progress, writer=writer)


def make_writer(run: RunDir, config: Config, plan: Plan, *, attempt: int, rank: int) -> CheckpointWriter:
    """Returns the writer of this rank's checkpoints, which records each one in events.jsonl."""
    return CheckpointWriter(
        run.checkpoints,
        rank=rank,
        world_size=plan.world_size,
        keep_last=config.keep_last,
        attempt=str(attempt),
        on_saved=lambda saved: on_saved(run, saved),
        on_no_space=lambda error: on_no_space(run, error, rank=rank),
        whole_bytes=checkpoint_bytes(plan.model, optimizer=plan.optimizer),
    )


def train_or_explain(
    loop: Loop,
    start: int,
    dataset: TokenDataset,
    writer: CheckpointWriter,
    skipped: list[dict[str, Any]],
    *,
    attempt: int,
    model: GPT,
) -> tuple[int, float | None, bool]:
    """Trains from step `start`; returns what Loop.train does. Loss trouble and bad tokens end with their cause and evidence."""
    run, loader, rank = loop.run, loop.loader, loop.rank
    assert isinstance(loader, TrainLoader)
    try:
        return loop.train(start)
    except BadToken:
        loop.progress.beat(start, "ending")
        verify(dataset)  # raises an error that names the file, where one is damaged
        raise
    except LossTrouble as error:
        loop.progress.beat(error.trouble.step - 1, "ending")
        verify(dataset, files=loader.files_of(error.trouble.step - 1))  # no rollback fixes a damaged file
        writer.wait()  # the checkpoint from which the next attempt resumes may still be under way
        keep_evidence(
            run,
            error,
            attempt=attempt,
            rank=rank,
            model=model,
            optimizer=loop.optimizer,
            loader=loader,
            grad_scale=loop.grad_scale,
        )
        raise answer_trouble(run, error, skipped, on_nan=loop.config.on_nan, rank=rank) from error


@torch.no_grad()
def keep_evidence(
    run: RunDir,
    error: LossTrouble,
    *,
    attempt: int,
    rank: int,
    model: GPT,
    optimizer: Optimizer,
    loader: TrainLoader,
    grad_scale: float,
) -> None:
    """Writes this rank's rows of the step, the loss of each from a second forward, and norms per parameter to RUN/trouble/.

    A second forward with finite losses where the first had none points to the machine, not to the rows.
    """
    trouble, step = error.trouble, error.trouble.step - 1
    rows = [loader.rows_of(step, micro_step).tolist() for micro_step in range(loader.plan.grad_accum_steps)]
    row_loss: list[float | None] = []
    for micro_step in range(loader.plan.grad_accum_steps):
        idx, targets = loader.micro_batch(step, micro_step)
        row_loss += numbers(row_means(model(idx, targets, reduction="none"), targets))
    num_tokens = loader.plan.total_batch_size // loader.plan.world_size
    evidence = {
        "time": utc_now(),
        "step": trouble.step,
        "cause": trouble.cause,
        "message": trouble.message,
        "rank": rank,
        "attempt": attempt,
        "loss": finite(error.rank_nats / num_tokens),
        "loss_of_all_ranks": trouble.loss,
        "bad_ranks": list(trouble.bad_ranks),
        "batch": batch_of_step(step, loader.skipped_batches),
        "rows": [row for micro_batch in rows for row in micro_batch],
        "row_loss": row_loss,
        "parameters": optimizer.norms(grad_scale=grad_scale),
    }
    path = run.trouble(trouble.step) / f"attempt_{attempt}_rank_{rank}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(evidence, indent=1, allow_nan=False) + "\n")
    except OSError as problem:  # the trouble itself matters more
        log.warning(f"{path} cannot be written: {problem.strerror}")


def row_means(nats: Tensor, targets: Tensor) -> Tensor:
    """Returns each row's loss per token that counts, (B,) fp32. nats, targets: (B, T)."""
    return nats.sum(1) / (targets >= 0).sum(1).clamp_min(1)


def numbers(values: Tensor) -> list[float | None]:
    """Returns the values for JSON, None for those that are not finite."""
    return [finite(value) for value in values.tolist()]


def finite(value: float) -> float | None:
    """Returns the value, or None if it is not finite: JSON has no infinity and no NaN."""
    return value if math.isfinite(value) else None


def on_saved(run: RunDir, saved: SavedCheckpoint) -> None:
    """Records a checkpoint that is on disk."""
    append_event(run, "checkpoint", step=saved.step, seconds=round(saved.seconds, 3), bytes=saved.bytes)
    log.info(f"checkpoint at step {saved.step}: {format_bytes(saved.bytes)} in {saved.seconds:.1f} s")


def on_no_space(run: RunDir, error: NoSpace, *, rank: int) -> None:
    """Records a save that found no space; the training continues, and the loop saves when there is space again."""
    if rank == 0:
        needed_bytes, free_bytes = error.needed_bytes, error.free_bytes
        append_event(
            run, "save_failed", step=error.step, needed_bytes=needed_bytes, free_bytes=free_bytes, message=error.message
        )
    log.warning(f"{error.message}; the training goes on, and saves as soon as there is room")


def finish(
    run: RunDir,
    *,
    step: int,
    bpb: float | None,
    stopped: bool,
    rank: int,
    progress: HeartbeatWriter,
    writer: CheckpointWriter,
) -> None:
    """Writes the run's last event, once the last checkpoint is on disk; raises NoSpace where it could not be saved."""
    progress.beat(step, "ending")
    writer.wait()
    if writer.no_space:
        raise writer.no_space  # the last weights are lost: the run is not finished
    if rank == 0:
        with contextlib.suppress(IndexError):
            bpb = bpb if bpb is not None else [r["val_bpb"] for r in read_json_lines(run.metrics) if "val_bpb" in r][-1]
        append_event(run, "stopped" if stopped else "finished", step=step, val_bpb=bpb)
    progress.beat(step, "stopped" if stopped else "done")


if __name__ == "__main__":
    main()
