"""
What a rank puts into a checkpoint beside the optimizer's pieces, and how it takes all of it back.

Which rows come next is not in it: they follow from the step, the seed and RUN/skipped.json.
"""

import contextlib
import json
import logging
from pathlib import Path
from typing import Any

import torch

from paceline.model.checkpoint import (
    CheckpointReader,
    NoCheckpoint,
    Piece,
    clean_leftovers,
    load_newest_good,
    open_checkpoint,
)
from paceline.plan.planner import Plan
from paceline.rundir import RunDir, append_event, read_json_lines, write_atomic
from paceline.train.dist import broadcast_object
from paceline.train.loop import LossScale
from paceline.train.optim import ReplicatedAdamW, ShardedOptimizer
from paceline.train.trouble import LossGuard

log = logging.getLogger("paceline")


def numbers_to_save(
    optimizer: ShardedOptimizer | ReplicatedAdamW, scale: LossScale, guard: LossGuard
) -> dict[str, Any]:
    """The same on every rank."""
    return {
        "optimizer": optimizer.state_dict(),
        "scale": scale.state_dict(),
        "loss_guard": guard.state_dict(),
    }


def rng_pieces(rank: int, device: torch.device) -> list[Piece]:
    states = {f"rng.cpu.{rank}": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"rng.cuda.{rank}"] = torch.cuda.get_rng_state(device)
    return [Piece(key, tuple(state.shape), (0, len(state)), state) for key, state in states.items()]


def resume(
    run: RunDir,
    optimizer: ShardedOptimizer | ReplicatedAdamW,
    scale: LossScale,
    guard: LossGuard,
    *,
    rank: int,
    device: torch.device,
    plan: Plan,
) -> int:
    """Steps done at the newest good checkpoint, loaded; 0 for a fresh run. Rank 0 checks the hashes, the others take its word."""
    choice: tuple[str | None, list[str]] = (None, [])
    if rank == 0 and run.checkpoints.is_dir():
        clean_leftovers(run.checkpoints)
        with contextlib.suppress(NoCheckpoint):
            reader, notes = load_newest_good(run.checkpoints, set_aside=True)
            choice = (str(reader.path), notes)
    path, notes = broadcast_object(choice)
    if path is None:
        if rank == 0 and (dropped := drop_metrics_after(run, 0)):  # an attempt that ended before its first checkpoint
            append_event(run, "resumed", step=0, from_world_size=None, dropped_metrics=dropped)
        return 0
    checkpoint = open_checkpoint(Path(path))
    optimizer.load(checkpoint.read)
    optimizer.load_state_dict(checkpoint.state["optimizer"])
    if scale.dynamic and checkpoint.state["scale"]["value"] != 1.0:
        scale.load_state_dict(checkpoint.state["scale"])
    if "loss_guard" in checkpoint.state:  # not in those of earlier versions
        guard.load_state_dict(checkpoint.state["loss_guard"])
    load_rng(checkpoint, rank=rank, device=device)
    if rank == 0:
        for note in notes:
            append_event(run, "note", text=note)
        dropped = drop_metrics_after(run, checkpoint.step)
        append_event(
            run, "resumed", step=checkpoint.step, from_world_size=checkpoint.world_size, dropped_metrics=dropped
        )
        log.info(
            f"resumed from {path}, step {checkpoint.step}; saved by {checkpoint.world_size} ranks, now {plan.world_size}"
        )
    return checkpoint.step


def load_rng(checkpoint: CheckpointReader, *, rank: int, device: torch.device) -> None:
    """Each rank takes its own generators back; a rank that did not exist then keeps its fresh seed."""
    keys = checkpoint.keys()
    if f"rng.cpu.{rank}" in keys:
        torch.set_rng_state(checkpoint.read_all(f"rng.cpu.{rank}"))
    if device.type == "cuda" and f"rng.cuda.{rank}" in keys:
        torch.cuda.set_rng_state(checkpoint.read_all(f"rng.cuda.{rank}"), device)


def drop_metrics_after(run: RunDir, step: int) -> int:
    """Lines of steps that are done again are replaced: metrics.jsonl never holds a step twice. Returns how many went."""
    records = list(read_json_lines(run.metrics))
    kept = [record for record in records if record["step"] <= step]
    if run.metrics.exists():
        write_atomic(run.metrics, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept))
    return len(records) - len(kept)
