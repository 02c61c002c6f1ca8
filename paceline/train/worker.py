"""
One rank of a run: `python -m paceline.train.worker RUN --attempt N`, started by the elastic engine with RANK and WORLD_SIZE set.

Everything it needs stands in the run folder: config.toml, plan.json, the newest good checkpoint if there is one. It decides
nothing of the plan again. On SIGTERM it finishes the step, saves, and ends with 0; all ranks agree on that step.
"""

import argparse
import contextlib
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from paceline.config import load_config
from paceline.data.shards import TokenDataset, open_dataset
from paceline.data.tokenizer import Tokenizer
from paceline.errors import PacelineError
from paceline.model.checkpoint import (
    CheckpointReader,
    CheckpointWriter,
    NoCheckpoint,
    Piece,
    SavedCheckpoint,
    clean_leftovers,
    load_newest_good,
    open_checkpoint,
)
from paceline.model.cpu_process import fp32_matmul_through_onednn, keep_freed_memory
from paceline.model.generate import generate
from paceline.model.gpt import GPT
from paceline.plan.planner import Plan
from paceline.plan.shapes import param_shapes
from paceline.rundir import RunDir, append_event, read_json_lines, utc_now, write_atomic
from paceline.train.dist import broadcast_object, init_distributed, shutdown
from paceline.train.evaluate import val_bpb
from paceline.train.footprint import MemoryNotes
from paceline.train.loader import TrainLoader
from paceline.train.loop import Loop, LossScale, Progress, StopRequest
from paceline.train.optim import ReplicatedAdamW, ShardedOptimizer
from paceline.units import format_bytes, format_duration

log = logging.getLogger("paceline")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
COMPILE_TRIAL_MICRO_STEPS = 3
SAMPLE_PROMPT_TOKENS, SAMPLE_TOKENS = 48, 160


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    args = parser.parse_args()
    run, rank = RunDir(args.run), int(os.environ.get("RANK", "0"))
    stop = StopRequest()
    signal.signal(signal.SIGTERM, stop.ask)
    logging.basicConfig(
        stream=sys.stdout,
        level=logging.INFO,
        format="[%(levelname)s] %(asctime)s %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
    )
    progress = Progress(run, rank)
    progress.mark(0, "start")
    try:
        work(run, attempt=args.attempt, stop=stop, progress=progress)
    except BaseException as error:
        write_error(run, attempt=args.attempt, rank=rank, error=error)
        traceback.print_exc()
        sys.stdout.flush()
        # exit at once: interpreter shutdown would wait in the destructors of collectives whose peers are gone
        os._exit(error.exit_code if isinstance(error, PacelineError) else 1)
    shutdown()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads under DDP abort in the interpreter's own exit, now and then (torch 2.13)


def write_error(run: RunDir, *, attempt: int, rank: int, error: BaseException) -> None:
    """The supervisor reads this to tell whose failure came first, and what to show."""
    record = {
        "time": utc_now(),
        "rank": rank,
        "type": type(error).__name__,
        "message": error.message if isinstance(error, PacelineError) else str(error),
        "fix": error.fix if isinstance(error, PacelineError) else None,
        "exit_code": error.exit_code if isinstance(error, PacelineError) else 3,
        "traceback": traceback.format_exc(),
    }
    path = run.rank_error(attempt, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(record))


def work(run: RunDir, *, attempt: int, stop: StopRequest, progress: Progress) -> None:
    config, _ = load_config(run.config_toml, {})
    plan = Plan.from_json(run.plan_json.read_text())
    torch.set_num_threads(plan.threads)
    device, rank = start_ranks(plan)
    dataset = open_dataset(Path(json.loads(run.dataset_json.read_text())["path"]))
    model = make_model(plan, seed=config.seed, device=device)
    torch.manual_seed(config.seed * 1_000_003 + rank)
    optimizer = make_optimizer(model, plan, rank=rank)
    loader = TrainLoader(dataset.split("train"), plan, seed=config.seed, rank=rank, device=device)
    scale = LossScale(initial_scale(plan), dynamic=plan.precision == "fp16")
    start = resume(run, optimizer, scale, rank=rank, device=device, plan=plan)
    forward = choose_compile(run, model, optimizer, plan, loader, rank=rank)
    memory = MemoryNotes(run, attempt, rank, device, plan, compiled=model._compiled_call_impl is not None)
    writer = CheckpointWriter(
        run.checkpoints,
        rank=rank,
        world_size=plan.world_size,
        keep_last=config.keep_last,
        attempt=str(attempt),
        on_saved=lambda saved: on_saved(run, saved),
    )

    def evaluate() -> float:
        tokenizer = Tokenizer.load(dataset.tokenizer_json)
        return val_bpb(
            model,
            dataset.split("val"),
            token_bytes=torch.from_numpy(tokenizer.token_bytes()).to(device),
            max_tokens=config.eval_tokens,
            device_batch_size=plan.device_batch_size,
            rank=rank,
            world_size=plan.world_size,
        )

    def save(step: int, bpb: float | None) -> None:
        state = {
            "optimizer": optimizer.state_dict(),
            "scale": scale.state_dict(),
            "seed": config.seed,
            "momentum_form": "ema",
        }
        pieces = optimizer.pieces() + rng_pieces(rank, device)
        memory.copies_bytes = sum(piece.tensor.nbytes for piece in pieces)
        writer.save(step, pieces, state, val_bpb=bpb)

    def sample(step: int) -> None:
        if rank == 0:
            write_sample(run, model, dataset, step=step, seed=config.seed)

    loop = Loop(
        run, config, plan, optimizer, forward, loader, rank, device, stop, evaluate, save, sample, memory.note, progress,
        scale,
    )  # fmt: skip
    if start >= plan.num_steps:
        finish(run, step=start, bpb=None, stopped=False, rank=rank, progress=progress, writer=writer)
        return
    done, bpb, stopped = loop.train(start)
    memory.note(done)
    finish(run, step=done, bpb=bpb, stopped=stopped, rank=rank, progress=progress, writer=writer)


def start_ranks(plan: Plan) -> tuple[torch.device, int]:
    """Joins the process group. Refuses a world other than the plan's: such ranks would each train alone."""
    if plan.device == "cuda" and not torch.cuda.is_available():
        raise PacelineError(
            f"the plan is for {plan.device_name}, but this PyTorch ({torch.__version__}) cannot use CUDA here",
            fix="install a CUDA build of PyTorch, or --device cpu",
        )
    rank, world_size, local_rank = init_distributed(plan.device)
    if world_size != plan.world_size:
        raise PacelineError(
            f"{world_size} ranks were started, the plan is for {plan.world_size}",
            fix="start it through paceline train or resume",
        )
    if plan.device == "cuda":
        torch.set_float32_matmul_precision("highest" if plan.precision == "fp32" else "high")
        return torch.device("cuda", local_rank), rank
    keep_freed_memory()
    if plan.precision == "fp32" and fp32_matmul_through_onednn():
        log.info(
            "fp32 matmuls go through oneDNN, checked against fp64: PyTorch's default library is slower on this CPU"
        )
    return torch.device("cpu"), rank


def make_model(plan: Plan, *, seed: int, device: torch.device) -> GPT:
    model = GPT(
        plan.model,
        compute_dtype=DTYPES[plan.precision],
        logits_budget_bytes=plan.logits_budget_bytes,
        activation_checkpointing=plan.activation_checkpointing,
        attention="flex" if plan.attention == "flex" else "sdpa",
    )
    model.init_weights(seed=seed)
    model.to(device)
    model.masks(plan.model.sequence_len, device, flex=plan.attention == "flex")
    return model


def make_optimizer(model: GPT, plan: Plan, *, rank: int) -> ShardedOptimizer | ReplicatedAdamW:
    kind = ReplicatedAdamW if plan.shard == "none" else ShardedOptimizer
    return kind(
        model,
        param_shapes(plan.model),
        dict(plan.groups),
        rank=rank,
        world_size=plan.world_size,
        compute_dtype=DTYPES[plan.precision],
        grad_accum_steps=plan.grad_accum_steps,
    )


def initial_scale(plan: Plan) -> float:
    """fp16: 2**16 on the mean loss, as torch.amp.GradScaler starts; our loss is a sum over the micro-step's tokens."""
    if plan.precision != "fp16":
        return 1.0
    tokens = plan.device_batch_size * plan.model.sequence_len
    return float(2 ** max(0, 16 - (tokens - 1).bit_length()))


def resume(
    run: RunDir,
    optimizer: ShardedOptimizer | ReplicatedAdamW,
    scale: LossScale,
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
        return 0
    checkpoint = open_checkpoint(Path(path))
    optimizer.load(checkpoint.read)
    optimizer.load_state_dict(checkpoint.state["optimizer"])
    if scale.dynamic and checkpoint.state["scale"]["value"] != 1.0:
        scale.load_state_dict(checkpoint.state["scale"])
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


def drop_metrics_after(run: RunDir, step: int) -> int:
    """Lines of steps that are done again are replaced: metrics.jsonl never holds a step twice. Returns how many went."""
    records = list(read_json_lines(run.metrics))
    kept = [record for record in records if record["step"] <= step]
    if run.metrics.exists():
        write_atomic(run.metrics, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept))
    return len(records) - len(kept)


def choose_compile(
    run: RunDir,
    model: GPT,
    optimizer: ShardedOptimizer | ReplicatedAdamW,
    plan: Plan,
    loader: TrainLoader,
    *,
    rank: int,
) -> Callable[..., Tensor]:
    """The forward to train with. Where the plan left it open, a trial decides; the answer is kept for every later attempt."""
    if plan.compile is None:
        eager_ms = trial_ms(optimizer, loader)
        started = time.perf_counter()
        model.compile(dynamic=False)
        trial_ms(optimizer, loader)
        compile_s = time.perf_counter() - started
        compiled_ms = trial_ms(optimizer, loader)
        saved_s = (eager_ms - compiled_ms) / 1000 * plan.grad_accum_steps * plan.num_steps
        use = broadcast_object(saved_s > 0)  # rank 0's clock decides for all: different graphs would round differently
        if not use:
            model._compiled_call_impl = None  # back to eager
        if rank == 0:
            write_atomic(run.plan_json, replace(plan, compile=use).to_json())
            text = (
                f"compile: a micro-step takes {compiled_ms:.0f} ms compiled, {eager_ms:.0f} ms eager"
                f" ({format_duration(compile_s)} to compile): {'compiled' if use else 'eager'}"
            )
            append_event(run, "note", text=text)
            log.info(text)
    elif plan.compile:
        model.compile(dynamic=False)
    return optimizer.module


def trial_ms(optimizer: ShardedOptimizer | ReplicatedAdamW, loader: TrainLoader) -> float:
    """Median milliseconds of a micro-step; its gradients are thrown away and no weight is touched."""
    times = []
    for _ in range(COMPILE_TRIAL_MICRO_STEPS):
        started = time.perf_counter()
        optimizer.zero_grad()
        idx, targets = loader.micro_batch(0, 0)
        with optimizer.micro_step(last=False):
            optimizer.module(idx, targets).backward()
        if idx.is_cuda:
            torch.cuda.synchronize()  # a clock needs the work to be done
        times.append(1000 * (time.perf_counter() - started))
    return sorted(times)[len(times) // 2]


def rng_pieces(rank: int, device: torch.device) -> list[Piece]:
    states = {f"rng.cpu.{rank}": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"rng.cuda.{rank}"] = torch.cuda.get_rng_state(device)
    return [Piece(key, tuple(state.shape), (0, len(state)), state) for key, state in states.items()]


def load_rng(checkpoint: CheckpointReader, *, rank: int, device: torch.device) -> None:
    """Each rank takes its own generators back; a rank that did not exist then keeps its fresh seed."""
    keys = checkpoint.keys()
    if f"rng.cpu.{rank}" in keys:
        torch.set_rng_state(checkpoint.read_all(f"rng.cpu.{rank}"))
    if device.type == "cuda" and f"rng.cuda.{rank}" in keys:
        torch.cuda.set_rng_state(checkpoint.read_all(f"rng.cuda.{rank}"), device)


def on_saved(run: RunDir, saved: SavedCheckpoint) -> None:
    append_event(run, "checkpoint", step=saved.step, seconds=round(saved.seconds, 3), bytes=saved.bytes)
    log.info(f"checkpoint at step {saved.step}: {format_bytes(saved.bytes)} in {saved.seconds:.1f} s")


@torch.no_grad()
def write_sample(run: RunDir, model: GPT, dataset: TokenDataset, *, step: int, seed: int) -> None:
    """The model goes on from held-out tokens, to samples/ and the screen. Rank 0 only; others wait at the next collective."""
    tokenizer = Tokenizer.load(dataset.tokenizer_json)
    held_out = dataset.split("val")
    middle = held_out.num_tokens // 2
    prompt = held_out.tokens(middle, min(middle + SAMPLE_PROMPT_TOKENS, held_out.num_tokens)).tolist()
    tokens: list[int] = []
    for new in generate(
        model,
        prompt,
        num_samples=1,
        max_new_tokens=SAMPLE_TOKENS,
        temperature=0.8,
        top_k=50,
        seed=seed,
        stop_token=tokenizer.bos_id,
    ):
        tokens += [token for token in new if token is not None]
    before, text = tokenizer.decode(prompt), tokenizer.decode(tokens)
    run.samples.mkdir(exist_ok=True)
    write_atomic(run.sample(step), before + text)
    append_event(run, "sample", step=step, prompt=before, text=text)


def finish(
    run: RunDir, *, step: int, bpb: float | None, stopped: bool, rank: int, progress: Progress, writer: CheckpointWriter
) -> None:
    """Ends the run's files: the last checkpoint is on disk before anyone is told so."""
    writer.wait()
    if rank == 0:
        with contextlib.suppress(IndexError):
            bpb = bpb if bpb is not None else [r["val_bpb"] for r in read_json_lines(run.metrics) if "val_bpb" in r][-1]
        append_event(run, "stopped" if stopped else "finished", step=step, val_bpb=bpb)
    progress.mark(step, "stopped" if stopped else "done")


if __name__ == "__main__":
    main()
