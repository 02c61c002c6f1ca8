"""
One rank of a run: `python -m paceline.train.worker RUN --attempt N`, started by the elastic engine with RANK and WORLD_SIZE set.

Everything it needs stands in the run folder: config.toml, plan.json, and the newest good checkpoint if there is one. It decides
nothing of the plan again, except whether to compile where the plan leaves that open. On SIGTERM or SIGUSR1 it finishes the step,
saves, and ends with 0; all ranks agree on that step.
"""

import argparse
import gc
import json
import logging
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

gc.disable()  # while torch is imported: collections would add a sixth to its time

import torch

from paceline.config import Config
from paceline.config_file import load_config
from paceline.data.dataset import BadToken, batch_of_step
from paceline.data.prepare import dataset_of, verify
from paceline.data.tokenizer import Tokenizer
from paceline.heartbeat import HeartbeatWriter
from paceline.model.checkpoint import CheckpointWriter
from paceline.model.gpt import GPT
from paceline.model.publish import NoSpace
from paceline.plan.memory import checkpoint_bytes
from paceline.plan.planner import Plan
from paceline.plan.shapes import choose_eval_tokens
from paceline.rundir import RunDir, append_event, read_json_lines, utc_now, write_atomic
from paceline.train.evaluate import val_bpb, write_sample
from paceline.train.loop import Loop, TrainLoader
from paceline.train.optim import make_optimizer
from paceline.train.process import (
    MemoryEvents,
    StopRequest,
    all_reduce_sum,
    answer_with_stacks,
    broadcast_object,
    run_rank,
)
from paceline.train.setup import choose_compile, make_model, resume, rng_pieces, start_ranks
from paceline.train.trouble import LossTrouble, answer_trouble, load_skipped
from paceline.units import format_bytes

gc.freeze()  # what torch made stays to the end: no later collection needs to visit it
gc.enable()

# B rows in a micro-batch, T tokens in a row

LAST_SAVE_WAIT_S = 3600.0  # for room for the last checkpoint: until then the last weights exist in memory alone
LAST_SAVE_POLL_S = 0.5

log = logging.getLogger("paceline")


def main() -> None:
    """Trains, and ends the process with the error's exit code, or 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    args = parser.parse_args()
    run, rank = RunDir(args.run), int(os.environ.get("RANK", "0"))
    stop = StopRequest()
    stop.listen((signal.SIGTERM, signal.SIGUSR1))  # SIGUSR1: a batch system's warning that the time is nearly up
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
    plan, device, rank = start_ranks(run, deterministic=config.deterministic)
    dataset = dataset_of(run)
    model = make_model(plan, seed=config.seed, device=device)
    torch.manual_seed(config.seed * 1_000_003 + rank)
    optimizer = make_optimizer(model, plan, plan.groups, rank=rank)
    skipped = broadcast_object([batch["batch"] for batch in load_skipped(run)] if rank == 0 else [])
    loader = TrainLoader(
        dataset.split("train", config.packing), plan, config.seed, rank, device, skipped_batches=skipped
    )
    loop = Loop(run, config, plan, optimizer, loader.micro_batch, rank, device, progress, stop, model.low_products)
    start = resume(loop)
    progress.beat(start, "compile")
    choose_compile(loop, model)
    memory = MemoryEvents(run, attempt, rank, device, plan, compiled=model.compiled)
    writer = make_writer(run, config, plan, attempt=attempt, rank=rank, stop=stop)

    def evaluate() -> float:
        return val_bpb(
            model,
            dataset.split("val", config.packing),
            token_bytes=torch.from_numpy(Tokenizer.load(dataset.tokenizer_json).token_bytes()).to(device),
            max_tokens=choose_eval_tokens(config, num_steps=plan.num_steps, total_batch_size=plan.total_batch_size),
            device_batch_size=plan.device_batch_size,
            rank=rank,
            world_size=plan.world_size,
        )

    def save(step: int, bpb: float | None) -> None:
        parts: dict[str, Any] = {"optimizer": optimizer, "scale": loop.scale, "loss_guard": loop.guard}
        state = {name: part.state_dict() for name, part in parts.items()}
        pieces = optimizer.pieces() + rng_pieces(rank, device)
        memory.copies_bytes = sum(piece.tensor.nbytes for piece in pieces)
        # momentum_form is for readers of the checkpoint: the buffer is a running mean, not a sum (updates.nesterov)
        writer.save(step, pieces, {**state, "seed": config.seed, "momentum_form": "ema"}, val_bpb=bpb)

    def sample(step: int) -> None:
        write_sample(run, model, dataset, step=step, seed=config.seed, rank=rank)

    loop.evaluate, loop.save, loop.sample = evaluate, save, sample
    loop.record_memory, loop.can_save_again = memory.write, writer.has_space_again
    done, bpb, stopped = start, None, False
    if start < plan.num_steps:
        try:
            done, bpb, stopped = loop.train(start)
        except BadToken:
            progress.beat(start, "ending")
            verify(dataset)  # raises an error that names the file, where one is damaged
            raise
        except LossTrouble as error:
            progress.beat(error.trouble.step - 1, "ending")
            verify(dataset, files=loader.files_of(error.trouble.step - 1))  # no rollback fixes a damaged file
            writer.wait()  # the checkpoint from which the next attempt resumes may still be under way
            norms = keep_evidence(loop, loader, model, error, attempt=attempt)
            bad_weight = find_bad_weight(model, norms, device)
            raise answer_trouble(run, error, on_nan=config.on_nan, rank=rank, bad_weight=bad_weight) from error
        memory.write(done)
    finish(loop, writer, step=done, bpb=bpb, stopped=stopped)


def make_writer(
    run: RunDir, config: Config, plan: Plan, *, attempt: int, rank: int, stop: StopRequest
) -> CheckpointWriter:
    """Returns the writer of this rank's checkpoints, which records each one in events.jsonl."""

    def on_saved(step: int, seconds: float, num_bytes: int) -> None:
        append_event(run, "checkpoint", step=step, seconds=round(seconds, 3), bytes=num_bytes)
        log.info(f"checkpoint at step {step}: {format_bytes(num_bytes)} in {seconds:.1f} s")

    def on_no_space(error: NoSpace) -> None:
        is_last = error.step == plan.num_steps
        effect = f"{'the run waits' if is_last else 'training continues'} and saves as soon as there is room"
        effect += "; a stop before that loses the steps that are not saved" if is_last else ""
        effect = "the run stops without it" if stop.is_set else effect
        if rank == 0:
            facts = {"needed_bytes": error.needed_bytes, "free_bytes": error.free_bytes, "effect": effect}
            host = {"host": error.host} if error.host else {}
            last = {"last": True} if is_last else {}
            append_event(run, "save_failed", step=error.step, **facts, **host, **last, message=error.message)
        log.warning(f"{error.message}; {effect}")

    return CheckpointWriter(
        run.checkpoints,
        rank=rank,
        world_size=plan.world_size,
        keep_last=config.keep_last,
        attempt=str(attempt),
        on_saved=on_saved,
        on_no_space=on_no_space,
        whole_bytes=checkpoint_bytes(plan),
    )


@torch.no_grad()
def keep_evidence(loop: Loop, loader: TrainLoader, model: GPT, error: LossTrouble, *, attempt: int) -> dict[str, Any]:
    """Writes this rank's rows of the step, the loss of each from a second forward, and norms per parameter to RUN/trouble/.

    Returns these norms. A second forward with finite losses where the first had none points to the machine, not to the rows.
    """
    trouble, step, plan = error.trouble, error.trouble.step - 1, loop.plan
    rows: list[int] = []
    row_loss: list[float | None] = []
    for micro_step in range(plan.grad_accum_steps):
        rows += loader.rows_of(step, micro_step).tolist()
        idx, targets = loader.micro_batch(step, micro_step)  # (B, T)
        nats = model(idx, targets, reduction="none").sum(1) / (targets >= 0).sum(1).clamp_min(1)  # (B,) per token
        row_loss += [finite(loss) for loss in nats.tolist()]
    norms = loop.optimizer.norms(grad_scale=loop.grad_scale)
    evidence = {
        "time": utc_now(),
        "step": trouble.step,
        "cause": trouble.cause,
        "message": trouble.message,
        "rank": loop.rank,
        "attempt": attempt,
        "loss": finite(error.rank_nats / (plan.total_batch_size // plan.world_size)),
        "loss_of_all_ranks": trouble.loss,
        "bad_ranks": list(trouble.bad_ranks),
        "batch": batch_of_step(step, loader.skipped_batches),
        "rows": rows,
        "row_loss": row_loss,
        "parameters": norms,
    }
    path = loop.run.trouble(trouble.step) / f"attempt_{attempt}_rank_{loop.rank}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(evidence, indent=1, allow_nan=False) + "\n")
    except OSError as problem:  # the trouble itself matters more
        log.warning(f"{path} cannot be written: {problem.strerror}")
    return norms


def find_bad_weight(model: GPT, norms: dict[str, Any], device: torch.device) -> str | None:
    """Returns the first parameter that holds NaN or infinity on any rank; None where there is none. Collective."""
    names = [name for name, _ in model.named_parameters()]
    counts = torch.tensor([float(norms[name]["weight_bad"]) if name in norms else 0.0 for name in names]).to(device)
    all_reduce_sum(counts)
    return next((name for name, count in zip(names, counts.tolist(), strict=True) if count), None)


def finite(value: float) -> float | None:
    """Returns the value, or None if it is not finite: JSON has no infinity and no NaN."""
    return value if math.isfinite(value) else None


def finish(loop: Loop, writer: CheckpointWriter, *, step: int, bpb: float | None, stopped: bool) -> None:
    """Writes the run's last event, once the last checkpoint is on disk; raises NoSpace where it could not be saved. Collective."""
    wait_s = 0.0 if stopped else LAST_SAVE_WAIT_S
    save_last(loop, writer, step=step, bpb=bpb, deadline=time.monotonic() + wait_s)
    if loop.rank == 0:
        if bpb is None:  # an earlier attempt may have evaluated these weights; a score of others is not theirs
            scores = [line.get("val_bpb") for line in read_json_lines(loop.run.metrics) if line.get("step") == step]
            bpb = scores[-1] if scores else None
        append_event(loop.run, "stopped" if stopped else "finished", step=step, val_bpb=bpb)
    loop.progress.beat(step, "stopped" if stopped else "done")


def save_last(loop: Loop, writer: CheckpointWriter, *, step: int, bpb: float | None, deadline: float) -> None:
    """Waits for the last save, and repeats it when a disk that was full has room again. Collective.

    Raises NoSpace at the deadline, on time.monotonic's clock, or when a stop is requested: these weights are lost.
    """
    while True:
        loop.progress.beat(step, "ending")
        writer.wait()
        ends = loop.stop.is_set or time.monotonic() >= deadline
        counts = torch.tensor([writer.no_space is not None, ends, loop.can_save_again()], dtype=torch.float32)
        counts = counts.to(loop.device)
        all_reduce_sum(counts)  # of the ranks, so that all of them do the same
        num_full, num_ending, num_saving = counts.tolist()
        if num_full and num_ending and writer.no_space:
            raise writer.no_space
        if not num_full or num_ending:
            return
        if num_saving:
            loop.save(step, bpb)
        else:
            time.sleep(LAST_SAVE_POLL_S)


if __name__ == "__main__":
    main()
