"""
One rank of a run: `python -m paceline.train.worker RUN --attempt N`, started by the elastic engine with RANK and WORLD_SIZE set.

Everything it needs stands in the run folder: config.toml, plan.json, the newest good checkpoint if there is one. It decides
nothing of the plan again. On SIGTERM or SIGUSR1 it finishes the step, saves, and ends with 0; all ranks agree on that step.
"""

import argparse
import contextlib
import errno
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
from paceline.data.rows import BadToken
from paceline.data.shards import TokenDataset, open_dataset, verify
from paceline.data.tokenizer import Tokenizer
from paceline.errors import PacelineError
from paceline.model.checkpoint import (
    CheckpointWriter,
    NoSpace,
    SavedCheckpoint,
)
from paceline.model.cpu_process import fp32_matmul_through_onednn, keep_freed_memory
from paceline.model.generate import generate
from paceline.model.gpt import GPT
from paceline.plan.memory import checkpoint_bytes
from paceline.plan.planner import Plan
from paceline.plan.shapes import param_shapes
from paceline.rundir import NO_SPACE, RunDir, append_event, read_json_lines, unwritable, utc_now, write_atomic
from paceline.train.dist import broadcast_object, init_distributed, shutdown
from paceline.train.evaluate import val_bpb
from paceline.train.footprint import MemoryNotes
from paceline.train.loader import TrainLoader
from paceline.train.loop import Loop, LossScale, StopRequest
from paceline.train.optim import ReplicatedAdamW, ShardedOptimizer
from paceline.train.progress import Progress, answer_with_stacks
from paceline.train.recorder import answer_with_collectives
from paceline.train.saved import numbers_to_save, resume, rng_pieces
from paceline.train.trouble import LossGuard, LossTrouble, answer_trouble, keep_evidence, load_skipped
from paceline.units import format_bytes, format_duration

log = logging.getLogger("paceline")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # SIGUSR1: a batch system's warning that the time is nearly up
COMPILE_TRIAL_MICRO_STEPS = 3
SAMPLE_PROMPT_TOKENS, SAMPLE_TOKENS = 48, 160


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    args = parser.parse_args()
    run, rank = RunDir(args.run), int(os.environ.get("RANK", "0"))
    stop = StopRequest()
    for signum in STOP_SIGNALS:
        signal.signal(signum, stop.ask)
    logging.basicConfig(
        stream=sys.stdout,
        level=logging.INFO,
        format="[%(levelname)s] %(asctime)s %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
    )
    progress = Progress(run, rank)
    progress.mark(0, "start")
    answer_with_stacks(run, attempt=args.attempt, rank=rank)
    try:
        work(run, attempt=args.attempt, stop=stop, progress=progress)
    except BaseException as error:
        told = in_run_folder(run, error)
        write_error(run, attempt=args.attempt, rank=rank, error=told)
        with contextlib.suppress(OSError):  # the log may lie on a full disk
            traceback.print_exception(told)
            sys.stdout.flush()
        # exit at once: interpreter shutdown would wait in the destructors of collectives whose peers are gone
        os._exit(told.exit_code if isinstance(told, PacelineError) else 1)
    shutdown()
    logging.shutdown()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(0)  # gloo's threads under DDP abort in the interpreter's own exit, now and then (torch 2.13)


def in_run_folder(run: RunDir, error: BaseException) -> BaseException:
    """In words that a user can act on, where the error is that the run folder cannot be written."""
    if not isinstance(error, OSError) or error.filename is None:
        return error
    path = Path(os.fsdecode(error.filename))
    if path.is_relative_to(run.path) and (not run.path.is_dir() or error.errno in (errno.EROFS, errno.EACCES)):
        return unwritable(path if run.path.is_dir() else run.config_toml, error)
    return error


def write_error(run: RunDir, *, attempt: int, rank: int, error: BaseException) -> None:
    """The supervisor reads this to tell whose failure came first, and what to show."""
    record = {
        "time": utc_now(),
        "rank": rank,
        "type": type(error).__name__,
        "message": error.message if isinstance(error, PacelineError) else str(error),
        "fix": error.fix if isinstance(error, PacelineError) else None,
        "exit_code": error.exit_code if isinstance(error, PacelineError) else 3,
        "traceback": "".join(traceback.format_exception(error)),
        **(error.record if isinstance(error, LossTrouble) else {}),
    }
    path = run.rank_error(attempt, rank)
    with contextlib.suppress(OSError):  # the run folder may be what has failed: the traceback is in the rank's log too
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
    skipped = broadcast_object(load_skipped(run) if rank == 0 else [])
    passed_over = [each["batch"] for each in skipped]
    loader = TrainLoader(
        dataset.split("train"), plan, seed=config.seed, rank=rank, device=device, passed_over=passed_over
    )
    scale = LossScale(initial_scale(plan), dynamic=plan.precision == "fp16")
    guard = LossGuard(config.max_loss_spike)
    start = resume(run, optimizer, scale, guard, rank=rank, device=device, plan=plan)
    progress.mark(start, "compile")
    forward = choose_compile(run, model, optimizer, plan, loader, rank=rank)
    memory = MemoryNotes(run, attempt, rank, device, plan, compiled=model._compiled_call_impl is not None)
    writer = CheckpointWriter(
        run.checkpoints,
        rank=rank,
        world_size=plan.world_size,
        keep_last=config.keep_last,
        attempt=str(attempt),
        on_saved=lambda saved: on_saved(run, saved),
        on_no_space=lambda error: on_no_space(run, error, rank=rank),
        whole_bytes=checkpoint_bytes(plan.model, optimizer=plan.optimizer),
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
        state = {**numbers_to_save(optimizer, scale, guard), "seed": config.seed, "momentum_form": "ema"}
        pieces = optimizer.pieces() + rng_pieces(rank, device)
        memory.copies_bytes = sum(piece.tensor.nbytes for piece in pieces)
        writer.save(step, pieces, state, val_bpb=bpb)

    def sample(step: int) -> None:
        if rank == 0:
            write_sample(run, model, dataset, step=step, seed=config.seed)

    loop = Loop(
        run, config, plan, optimizer, forward, loader, rank, device, stop, evaluate, save, sample, memory.note, progress,
        scale, guard, writer.has_space_again,
    )  # fmt: skip
    if start >= plan.num_steps:
        finish(run, step=start, bpb=None, stopped=False, rank=rank, progress=progress, writer=writer)
        return
    try:
        done, bpb, stopped = loop.train(start)
    except BadToken:
        progress.mark(start, "ending")
        verify(dataset)  # names the file, where one is damaged
        raise
    except LossTrouble as error:
        progress.mark(error.trouble.step - 1, "ending")
        verify(dataset, files=loader.files_of(error.trouble.step - 1))  # no rollback mends a damaged file
        writer.wait()  # the checkpoint that the next attempt goes on from may still be under way
        keep_evidence(
            run,
            error,
            attempt=attempt,
            rank=rank,
            model=model,
            optimizer=optimizer,
            loader=loader,
            grad_scale=loop.grad_scale,
        )
        raise answer_trouble(run, error, skipped, on_nan=config.on_nan, rank=rank) from error
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
    answer_with_collectives(rank)
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


def on_saved(run: RunDir, saved: SavedCheckpoint) -> None:
    append_event(run, "checkpoint", step=saved.step, seconds=round(saved.seconds, 3), bytes=saved.bytes)
    log.info(f"checkpoint at step {saved.step}: {format_bytes(saved.bytes)} in {saved.seconds:.1f} s")


def on_no_space(run: RunDir, error: NoSpace, *, rank: int) -> None:
    """The training goes on: with the next due save, or as soon as there is room, the loop tries again."""
    if rank == 0:
        needed_bytes, free_bytes = error.needed_bytes, error.free_bytes
        append_event(
            run, "save_failed", step=error.step, needed_bytes=needed_bytes, free_bytes=free_bytes, message=error.message
        )
    log.warning(f"{error.message}; the training goes on, and saves as soon as there is room")


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
    try:
        run.samples.mkdir(exist_ok=True)
        write_atomic(run.sample(step), before + text)
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        log.warning(f"{run.sample(step)} not written: {error.strerror}")  # the event below has the text
    append_event(run, "sample", step=step, prompt=before, text=text)


def finish(
    run: RunDir, *, step: int, bpb: float | None, stopped: bool, rank: int, progress: Progress, writer: CheckpointWriter
) -> None:
    """Ends the run's files: the last checkpoint is on disk before anyone is told so."""
    progress.mark(step, "ending")
    writer.wait()
    if writer.no_space:
        raise writer.no_space  # the last weights are lost: not what anyone calls finished
    if rank == 0:
        with contextlib.suppress(IndexError):
            bpb = bpb if bpb is not None else [r["val_bpb"] for r in read_json_lines(run.metrics) if "val_bpb" in r][-1]
        append_event(run, "stopped" if stopped else "finished", step=step, val_bpb=bpb)
    progress.mark(step, "stopped" if stopped else "done")


if __name__ == "__main__":
    main()
