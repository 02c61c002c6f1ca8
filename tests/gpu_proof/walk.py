"""
Steps, evaluations and samples of a run on a fake card: the worker's own model, optimizer, loader and loop, with every op seen.

A walk is one rank of a run that does not exist. It tells which graphs are compiled in which phase, where the CPU waits for the
card, copies to the card, collectives in order with their bytes, and the dtypes of products.
"""

import gc
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from gpu_proof.broken import BROKEN
from gpu_proof.card_compiler import GraphKeeper
from gpu_proof.host_values import HostValues, insert_ddp
from gpu_proof.recorder import Recorder
from gpu_proof.streams import TIMELINE
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from paceline.config import Config
from paceline.heartbeat import HeartbeatWriter
from paceline.plan.cost import step_messages
from paceline.plan.gpu_table import find_gpu
from paceline.plan.machine import imagined_machine
from paceline.plan.memory import peak_phase
from paceline.plan.planner import Plan, make_plan, memory_setup
from paceline.rundir import RunDir
from paceline.train import buckets, evaluate, setup
from paceline.train.buckets import GatheredBucket
from paceline.train.exact import LiveBytes, attention_kernel
from paceline.train.loop import Loop, TrainLoader
from paceline.train.optim import make_optimizer
from paceline.train.process import StopRequest
from paceline.train.worker import make_writer

CARD = torch.device("cuda", 0)
SMALL: dict[str, Any] = {  # two layers: with a window and without, with a value embedding and without
    "depth": 2,
    "n_embd": 256,
    "sequence_len": 256,
    "window_pattern": "SL",
    "device_batch_size": 2,
    "vocab_size": 4096,
    "num_steps": 10,
    "compile": True,
}
WITH_VALUES = ("save", "resume")  # what they write and read are real files
READS: dict[tuple[int, int], tuple[str, list[int]]] = {}  # step and micro-step -> thread and rows
EVAL_ROWS = 5  # of all ranks: the last batch is short on one rank at least


def noted(name: str, method: Callable[[GatheredBucket], None]) -> Callable[[GatheredBucket], None]:
    """Returns the method of a bucket, with a record of its calls."""

    def noting(bucket: GatheredBucket) -> None:
        recorder = next((mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Recorder)), None)
        if recorder is not None:
            recorder.order.append((name, bucket.tag, recorder.products.total()))
        method(bucket)

    return noting


def noted_read(read: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the loader's method, with a record of the thread that calls it and of the rows."""

    def noting(loader: TrainLoader, step: int, micro_step: int) -> Any:
        rows = loader.rows_of(step, micro_step).tolist()
        READS[step, micro_step] = (threading.current_thread().name.partition("_")[0], rows)
        return read(loader, step, micro_step)

    return noting


def pin_memory(tensor: Tensor) -> Tensor:
    """Stands for Tensor.pin_memory: fake tensors have none."""
    pinned = tensor.clone()
    TIMELINE.pin(pinned)
    return pinned


def tensor(values: Any, *, device: torch.device, made: Callable[..., Tensor] = torch.tensor) -> Tensor:
    """Stands for torch.tensor, which in inference mode copies to the card without a mode seeing it."""
    return made(values).to(device)


class CardGPT(setup.GPT):
    """The model, built on the card and without first weights: fake parameters cannot be moved."""

    def __init__(self, *args: Any, **options: Any):
        # where weights are sharded, on the meta device: the optimizer brings the memory
        with torch.device("meta") if torch.get_default_device().type == "meta" else CARD:
            super().__init__(*args, **options)

    def init_weights(self, *, seed: int) -> None:
        """Draws nothing."""

    def to(self, *args: Any, **options: Any) -> "CardGPT":  # type: ignore[override]
        """Stays where it is."""
        return self


def main(*walks: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the facts of each walk. walks: the arguments of `walk`."""
    prepare()
    gc.freeze()  # what torch and its compiler made: collections need not visit it
    keeper = GraphKeeper(compiles=any((SMALL | settings)["compile"] for settings in walks))
    facts = []
    for settings in walks:
        keeper.forget()
        facts.append(walk(keeper, **settings))
    return facts


def prepare() -> None:
    """Makes this process able to walk."""
    Tensor.pin_memory = pin_memory  # type: ignore[assignment,method-assign]
    evaluate.torch = SimpleNamespace(**vars(torch) | {"tensor": tensor})  # type: ignore[attr-defined]
    setup.GPT = CardGPT  # type: ignore[misc]
    setup.initial_value = lambda name, shape, config, seed: torch.empty(shape)
    buckets._work = TIMELINE.started
    TrainLoader._read = noted_read(TrainLoader._read)  # type: ignore[method-assign]
    insert_ddp()
    for name, method in (("gather", GatheredBucket.gather), ("wait", GatheredBucket.wait_weights)):
        setattr(GatheredBucket, method.__name__, noted(name, method))


def walk(
    keeper: GraphKeeper,
    *,
    rank: int = 0,
    gpus: int = 1,
    rounds: int = 1,
    phases: Sequence[str] = ("step", "evaluation"),
    broken: str | None = None,
    attention: str = "flash",
    fused_loss: bool = True,
    **keys: Any,
) -> dict[str, Any]:
    """Returns what one rank of `gpus` does in the phases of its last round, and the graphs that each phase compiles."""
    machine = imagined_machine(find_gpu("RTX 5090"), gpus=gpus, hosts=1)
    micro_steps = 1 if gpus == 8 else 2
    batch = {"total_batch_size": micro_steps * gpus * SMALL["device_batch_size"] * SMALL["sequence_len"]}
    config = Config(**SMALL | batch | keys)
    plan = make_plan(config, machine, vocab_size=config.vocab_size, num_rows=1000)
    plan = replace(plan, attention=attention, fused_loss=fused_loss)  # also an attention that the plan would refuse
    started = time.process_time()
    TIMELINE.clear()
    READS.clear()
    facts: dict[str, Any] = {"error": None, "graphs": [], "messages": asdict(step_messages(plan))}
    facts["micro_steps"] = plan.grad_accum_steps
    try:
        with ExitStack() as stack:
            if broken is not None:
                stack.enter_context(BROKEN[broken]())
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            stack.enter_context(process_group(rank, gpus))
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(attention_kernel("flash"))
            live = None if config.compile else stack.enter_context(LiveBytes())
            loop = make_loop(plan, RunDir(Path(folder)), rank)
            facts["masters"] = sorted(
                {str(share.master.dtype) for share in loop.optimizer._sharded + loop.optimizer._replicated}
            )
            for _ in range(rounds):  # the second finds everything compiled
                for phase in phases:
                    before = len(keeper.names)
                    recorder = Recorder()
                    with HostValues() if phase in WITH_VALUES else nullcontext(), recorder.recording():
                        answer = PHASES[phase](loop)
                    facts["graphs"].append([phase, keeper.names[before:]])
                    facts[phase] = recorder.to_json() | (answer if phase in WITH_VALUES else {})
            if live is not None:
                facts |= {
                    "traced_bytes": max(live.peaks.values()),
                    "planned_bytes": peak_phase(memory_setup(plan)).bytes,
                }
            facts["reads"] = [[*key, *READS[key]] for key in sorted(READS) if key[0] == 0]
    except Exception as error:  # a fact too: devices that do not match
        facts["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
    facts["breaks"] = keeper.breaks
    facts["cpu_s"] = time.process_time() - started
    return facts


def make_loop(plan: Plan, run: RunDir, rank: int) -> Loop:
    """Returns the loop as the worker makes it, with its evaluation, and a sample of three tokens."""
    model = setup.make_model(plan, seed=1, device=CARD)
    optimizer = make_optimizer(model, plan, plan.groups, rank=rank)
    loader = TrainLoader(tokens(100), plan, 1, rank, CARD, skipped_batches=())  # type: ignore[arg-type]
    (run.path / "progress").mkdir(exist_ok=True)
    progress = HeartbeatWriter(run, rank)
    loop = Loop(
        run, Config(), plan, optimizer, loader.micro_batch, rank, CARD, progress, StopRequest(), model.low_products
    )
    setup.choose_compile(loop, model)
    loop.evaluate = lambda: evaluate.val_bpb(
        model,
        tokens(EVAL_ROWS),  # type: ignore[arg-type]
        token_bytes=torch.ones(plan.model.vocab_size, dtype=torch.int64, device=CARD),
        max_tokens=EVAL_ROWS * plan.model.sequence_len,
        device_batch_size=plan.device_batch_size,
        rank=rank,
        world_size=plan.world_size,
    )
    options = {"num_samples": 2, "max_new_tokens": 3, "temperature": 0.8, "top_k": 50, "seed": 1, "stop_token": None}
    loop.sample = lambda step: list(evaluate.generate(model, [0] * 200, **options))  # type: ignore[arg-type,assignment,return-value]
    return loop


def save_checkpoint(loop: Loop) -> dict[str, Any]:
    """Saves as the worker does; returns the states of the random number generators."""
    torch.manual_seed(1_000_003 + loop.rank)  # as the worker has done at the start
    writer = make_writer(loop.run, loop.config, loop.plan, attempt=0, rank=loop.rank, stop=loop.stop)
    parts = {"optimizer": loop.optimizer, "scale": loop.scale, "loss_guard": loop.guard}
    state = {name: part.state_dict() for name, part in parts.items()}  # type: ignore[attr-defined]
    writer.save(1, loop.optimizer.pieces() + setup.rng_pieces(loop.rank, loop.device), state)
    writer.wait()
    return {"generators": generator_states()}


def resume_checkpoint(loop: Loop) -> dict[str, Any]:
    """Resumes in a new loop, as another process would; returns its step, its generators, and the rows that both loops read next."""
    torch.manual_seed(2)
    fresh = generator_states()
    resumed = make_loop(loop.plan, loop.run, loop.rank)
    start = setup.resume(resumed)
    loaders = [other.micro_batch.__self__ for other in (loop, resumed)]  # type: ignore[attr-defined]
    micro_steps = range(loop.plan.grad_accum_steps)
    rows = [[loader.rows_of(start, micro_step).tolist() for micro_step in micro_steps] for loader in loaders]
    return {"start": start, "fresh": fresh, "generators": generator_states(), "rows": rows}


def generator_states() -> dict[str, str]:
    """Returns the states of the default generators."""
    states = {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state(CARD)}
    return {name: bytes(state.numpy()).hex()[-9000:] for name, state in states.items()}


def tokens(num_rows: int) -> SimpleNamespace:
    """Returns a split of so many rows of token 0."""

    def rows(chosen: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros((len(chosen), length), np.int64), np.zeros((len(chosen), length), np.int64)

    return SimpleNamespace(num_rows=lambda length: num_rows, rows=rows)


@contextmanager
def process_group(rank: int, world_size: int) -> Iterator[None]:
    """Joins a group of ranks that do not exist; what they send has no values."""
    if world_size == 1:
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


PHASES: dict[str, Callable[[Loop], Any]] = {
    "step": lambda loop: loop.one_step(0),
    "evaluation": lambda loop: loop.evaluate(),
    "sample": lambda loop: loop.sample(0),
    "save": save_checkpoint,
    "resume": resume_checkpoint,
}
