"""
Steps, evaluations and samples of a run on a fake card: the worker's own model, optimizer, loader and loop, with every op seen.

A walk is one rank of a run that does not exist. It tells which graphs are compiled in which phase, where the CPU waits for the
card, copies to the card, collectives in order with their bytes, and the dtypes of products.
"""

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from gpu_proof.broken import BROKEN
from gpu_proof.card_compiler import GraphKeeper
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

import paceline
from paceline.config import Config
from paceline.heartbeat import HeartbeatWriter
from paceline.plan.cost import Messages, step_messages
from paceline.plan.gpu_table import find_gpu
from paceline.plan.machine import imagined_machine
from paceline.plan.planner import Plan, make_plan
from paceline.rundir import RunDir
from paceline.train import evaluate, setup
from paceline.train.buckets import GatheredBucket
from paceline.train.exact import attention_kernel
from paceline.train.loop import Loop, StopRequest, TrainLoader
from paceline.train.optim import make_optimizer

aten = torch.ops.aten
CARD = torch.device("cuda", 0)
PACKAGE = str(Path(paceline.__file__).parent) + "/"
# the shape of what these return depends on values: the CPU waits until it knows it
SHAPED_BY_VALUES = {"nonzero", "masked_select", "unique", "_unique", "_unique2", "unique_dim", "unique_consecutive"}
WITHOUT_KERNEL = ("empty", "new_empty", "_unsafe_view", "detach", "alias", "lift", "wait_tensor", "device")
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "addmm_", "flex_attention", "_flash_attention_forward"}
PRODUCTS |= {"_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention"}
SMALL = {  # two layers: with a window and without, with a value embedding and without
    "depth": 2,
    "n_embd": 256,
    "sequence_len": 256,
    "window_pattern": "SL",
    "device_batch_size": 2,
    "total_batch_size": 4_096,  # a micro-step of 8 GPUs
    "vocab_size": 4096,
    "num_steps": 10,
    "compile": True,
}
PHASES: dict[str, Callable[[Loop], Any]] = {
    "step": lambda loop: loop.one_step(0),
    "evaluation": lambda loop: loop.evaluate(),
    "sample": lambda loop: loop.sample(0),
}
EVAL_ROWS = 11  # of all ranks: the last batch is short on one rank at least


class Recorder(TorchDispatchMode):
    """Sees every op. Each record but collectives has the function of the package that called it."""

    supports_higher_order_operators = True  # FlexAttention

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.copies: Counter[tuple[str, bool]] = Counter()  # from host to card; whether the CPU goes on meanwhile
        self.collectives: list[tuple[str, int]] = []
        self.products_before: list[int] = []  # for each collective: how many products were begun before it
        self.products: Counter[tuple[str, str]] = Counter()  # (function, dtype)
        self.attention: Counter[str] = Counter()  # by operator, forward and backward
        self.kernels: Counter[str] = Counter()  # by function: ops that start one at least
        self.moved_bytes: Counter[str] = Counter()  # by function: what these ops read and write
        self.order: list[
            tuple[str, int, int]
        ] = []  # of sharded weights: gather or wait, the bucket, the products before it

    def to_json(self) -> dict[str, Any]:
        """Returns the records; waits as often as they stand in the code, not as often as they happen."""
        counts = {name: [[*key, n] for key, n in getattr(self, name).items()] for name in ("copies", "products")}
        counts["attention"] = sorted(self.attention)
        work = {name: [count, self.moved_bytes[name]] for name, count in self.kernels.items()}
        waits = [name.rpartition(":")[0] for name in self.waits]
        sent = {"collectives": self.collectives, "products_before": self.products_before, "order": self.order}
        return {"waits": waits, "work": work, **sent, **counts}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets torch.compile run its graphs although a mode is active."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func)).partition(".")[0]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        devices = {tensor.device.type for tensor in tensors}
        if name in ("_local_scalar_dense", "item"):  # and "to": in inference mode an op comes as it was called
            if "cuda" in devices:
                self.waits[place(line=True)] += 1
            return 1.0 if args[0].is_floating_point() else 1
        if name in SHAPED_BY_VALUES and "cuda" in devices:
            self.waits[place(line=True)] += 1
        if getattr(func, "namespace", "") == "c10d":
            self.collectives.append((name, max(tensor.nbytes for tensor in tensors)))
            self.products_before.append(self.products.total())
        if "attention" in name:
            self.attention[name] += 1
        if name in PRODUCTS:
            # of the matrices: what a product is added to may be wider
            self.products[place(), str(tensors[1].dtype).removeprefix("torch.")] += 1
        out = func(*args, **kwargs)
        if "cuda" in devices and not getattr(func, "is_view", False) and not name.startswith(WITHOUT_KERNEL):
            written = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
            written += tensors[:1] if name == "capped_nats_" else []  # in place, and it returns the nats
            self.kernels[function := place()] += 1
            read = tree_leaves((args, {key: value for key, value in kwargs.items() if key != "out"}))
            self.moved_bytes[function] += sum(leaf.nbytes for leaf in [*read, *written] if isinstance(leaf, Tensor))
        if name in ("_to_copy", "to", "copy_"):
            source, result = (args[1], args[0]) if name == "copy_" else (args[0], out)
            no_wait = bool(kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
            if source.device.type == "cuda" and result.device.type == "cpu":
                self.waits[place(line=True)] += 1
            elif source.device.type == "cpu" and result.device.type == "cuda":
                self.copies[place(), no_wait and getattr(source, "in_pinned_memory", False)] += 1
        return out


def place(*, line: bool = False) -> str:
    """Returns the innermost function of the package on the stack, `train/loop.py:one_step`, and its line if asked for."""
    frame: FrameType | None = sys._getframe(1)
    while frame and not frame.f_code.co_filename.startswith(PACKAGE):
        if frame.f_code.co_filename.startswith("<eval_with_key>"):
            return "a compiled graph"
        frame = frame.f_back
    if frame is None:
        return "backward"  # in autograd's own thread
    name = f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_code.co_name}"
    return f"{name}:{frame.f_lineno}" if line else name


def noted(name: str, method: Callable[[GatheredBucket], None]) -> Callable[[GatheredBucket], None]:
    """Returns the method of a bucket, with a record of its calls."""

    def noting(bucket: GatheredBucket) -> None:
        recorder = next((mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Recorder)), None)
        if recorder is not None:
            recorder.order.append((name, bucket.tag, recorder.products.total()))
        method(bucket)

    return noting


def pin_memory(tensor: Tensor) -> Tensor:
    """Stands for Tensor.pin_memory: fake tensors have none."""
    pinned = tensor.clone()
    pinned.in_pinned_memory = True  # type: ignore[attr-defined]
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
    keeper = GraphKeeper()
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
    config = Config(**SMALL | keys)
    plan = make_plan(config, machine, vocab_size=config.vocab_size, num_rows=1000)
    plan = replace(plan, attention=attention, fused_loss=fused_loss)  # also an attention that the plan would refuse
    started = time.process_time()
    facts: dict[str, Any] = {"error": None, "graphs": [], "messages": asdict(messages_of(plan))}
    facts["micro_steps"] = plan.grad_accum_steps
    try:
        with ExitStack() as stack:
            if broken is not None:
                stack.enter_context(BROKEN[broken]())
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            stack.enter_context(process_group(rank, gpus))
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(attention_kernel("flash"))
            loop = make_loop(plan, RunDir(Path(folder)), rank)
            facts["masters"] = sorted({str(share.master.dtype) for share in loop.optimizer._saved()})
            for _ in range(rounds):  # the second finds everything compiled
                for phase in phases:
                    before = len(keeper.names)
                    with Recorder() as recorder:
                        PHASES[phase](loop)
                    facts["graphs"].append([phase, keeper.names[before:]])
                    facts[phase] = recorder.to_json()
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
    (run.path / "progress").mkdir()
    progress = HeartbeatWriter(run, rank)
    loop = Loop(run, Config(), plan, optimizer, loader.micro_batch, rank, CARD, progress, StopRequest())
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


def messages_of(plan: Plan) -> Messages:
    """Returns what the planner expects the ranks to send in a step."""
    names = ("world_size", "optimizer", "shard", "precision", "grad_accum_steps")
    shared = {name: getattr(plan, name) for name in names}
    return step_messages(plan.model, checkpointing=plan.activation_checkpointing, **shared)


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
