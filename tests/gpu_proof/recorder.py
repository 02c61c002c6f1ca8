"""
Every op of a walk, as it is dispatched: kernels and bytes, products, copies, collectives, streams, random numbers.

It also tells where the CPU waits for the card, and which ops touch memory that another stream is at work on (streams.py).
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from gpu_proof.streams import HOST, NCCL, TIMELINE, device_of, storage_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import paceline

PACKAGE = str(Path(paceline.__file__).parent) + "/"
# the shape of what these return depends on values: the CPU waits until it knows it
SHAPED_BY_VALUES = {"nonzero", "masked_select", "unique", "_unique", "_unique2", "unique_dim", "unique_consecutive"}
WITHOUT_KERNEL = ("empty", "new_empty", "_unsafe_view", "detach", "alias", "lift", "wait_tensor", "device")
VIEWS = ("detach", "alias", "_unsafe_view")  # that do not say so
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "addmm_", "flex_attention", "_flash_attention_forward"}
PRODUCTS |= {"_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention"}


class Recorder(TorchDispatchMode):
    """Sees every op. Each record but collectives has the function of the package that called it."""

    supports_higher_order_operators = True  # FlexAttention

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.copies: Counter[tuple[str, bool]] = Counter()  # from host to card; whether the CPU goes on meanwhile
        self.copies_before: list[int] = []  # for each copy from host to card: how many products were begun before it
        self.copies_to_host: list[tuple[str, str, int]] = []  # that the CPU does not wait for: where, stream, its op
        self.collectives: list[tuple[str, int]] = []
        self.products_before: list[int] = []  # for each collective: how many products were begun before it
        self.products: Counter[tuple[str, str]] = Counter()  # (function, dtype)
        self.attention: Counter[str] = Counter()  # by operator, forward and backward
        self.kernels: Counter[str] = Counter()  # by function: ops that start one at least
        self.moved_bytes: Counter[str] = Counter()  # by function: what these ops read and write
        # of sharded weights: gather or wait, the bucket, the products before it
        self.order: list[tuple[str, int, int]] = []
        self.streams: Counter[tuple[str, str]] = Counter()  # kind of op, the stream that it is put on
        self.joins: list[tuple[str, str, int]] = []  # waits of a stream: how, where, the products before it
        self.races: Counter[str] = Counter()
        self.draws: Counter[tuple[str, str, str]] = Counter()  # function, device, the generator and its seed

    def to_json(self) -> dict[str, Any]:
        """Returns the records; waits as often as they stand in the code, not as often as they happen."""
        counted = ("copies", "products", "streams", "draws")
        counts = {name: [[*key, n] for key, n in getattr(self, name).items()] for name in counted}
        known = TIMELINE.clocks[HOST]
        unfinished = [where for where, stream, number in self.copies_to_host if known.get(stream, 0) < number]
        work = {name: [count, self.moved_bytes[name]] for name, count in self.kernels.items()}
        lists = ("collectives", "products_before", "order", "joins", "copies_before")
        return {
            "waits": [name.rpartition(":")[0] for name in self.waits],
            "work": work,
            "attention": sorted(self.attention),
            "races": sorted(self.races),
            "copies_to_host": len(self.copies_to_host),
            "unfinished": sorted(set(unfinished)),
            **{name: getattr(self, name) for name in lists},
            **counts,
        }

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records what is done within, waits of streams too."""
        TIMELINE.on_join, TIMELINE.on_race = self.note_join, self.note_race
        try:
            with self:
                yield
        finally:
            TIMELINE.on_join = TIMELINE.on_race = lambda what: None

    def note_join(self, name: str) -> None:
        """Called where a stream or the CPU waits."""
        if name == "synchronize":
            self.waits[place(line=True)] += 1
        else:
            self.joins.append((name, place(), self.products.total()))

    def note_race(self, kind: str) -> None:
        """Called where two streams touch the same memory and neither waits for the other."""
        self.races[f"{place(line=True)}: {kind}"] += 1

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets torch.compile run its graphs although a mode is active."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func)).partition(".")[0]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        devices = {device_of(tensor) for tensor in tensors}
        if name in ("_local_scalar_dense", "item"):  # and "to": in inference mode an op comes as it was called
            if "cuda" in devices:
                self.wait_on_host()
            return 1.0 if args[0].is_floating_point() else 1
        if name in SHAPED_BY_VALUES and "cuda" in devices:
            self.wait_on_host()
        if getattr(func, "namespace", "") == "c10d":
            self.note_collective(name, tensors)
        if "attention" in name:
            self.attention[name] += 1
        if name in PRODUCTS:
            # of the matrices: what a product is added to may be wider
            self.products[place(), str(tensors[1].dtype).removeprefix("torch.")] += 1
        out = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            self.note_draw(func, args, kwargs, out)
        if "cuda" in devices and not getattr(func, "is_view", False) and not name.startswith(WITHOUT_KERNEL):
            self.note_kernel(name, tensors, args, kwargs, out)
        is_view = getattr(func, "is_view", False) or name in VIEWS
        if getattr(func, "namespace", "") != "c10d" and not is_view:
            self.note_accesses(func, tensors, args, kwargs, out)
        if name in ("_to_copy", "to", "copy_"):
            self.note_copy(name, args, kwargs, out)
        return out

    def wait_on_host(self) -> None:
        """Records that the CPU waits for the current stream."""
        self.waits[place(line=True)] += 1
        TIMELINE.wait_on_host(TIMELINE.current)

    def note_collective(self, name: str, tensors: list[Tensor]) -> None:
        """Records a collective, by its largest tensor."""
        self.collectives.append((name, max(tensor.nbytes for tensor in tensors)))
        self.products_before.append(self.products.total())
        self.streams["collective", NCCL] += 1
        TIMELINE.collective(tensors)

    def note_kernel(self, name: str, tensors: list[Tensor], args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Records an op that starts kernels."""
        written = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        written += tensors[:1] if name == "capped_nats_" else []  # in place, and it returns the nats
        self.kernels[function := place()] += 1
        read = tree_leaves((args, {key: value for key, value in kwargs.items() if key != "out"}))
        self.moved_bytes[function] += sum(leaf.nbytes for leaf in [*read, *written] if isinstance(leaf, Tensor))

    def note_accesses(self, func: Any, tensors: list[Tensor], args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Puts an op on the current stream, or on the CPU, and checks that the memory that it touches is free for it."""
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        on_card = any(device_of(tensor) == "cuda" for tensor in [*tensors, *outputs])
        stream = TIMELINE.current if on_card else HOST
        clock = TIMELINE.begin(stream)
        if on_card:
            beside = any(device_of(tensor) == "cpu" and tensor.ndim for tensor in tensors)
            self.streams["copy" if beside else "kernel", stream] += 1
        written = set[int]()
        for at, key in mutable_arguments(func):
            value = kwargs[key] if key in kwargs else args[at] if at < len(args) else None
            written |= {id(leaf) for leaf in tree_leaves(value)}
        for tensor in tensors:
            # a number goes along with the launch
            if tensor.ndim or device_of(tensor) == "cuda" or not on_card:
                TIMELINE.touch(clock, stream, tensor, write=id(tensor) in written)
        known = {storage_of(tensor) for tensor in tensors}
        for tensor in outputs:
            if storage_of(tensor) not in known:
                TIMELINE.touch(clock, stream, tensor, write=True)  # new memory

    def note_draw(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Records an op that draws random numbers, unless it is a dropout of nothing."""
        arguments = func._schema.arguments
        values = {argument.name: argument.default_value for argument in arguments}
        values |= dict(zip(values, args, strict=False)) | kwargs
        if values.get("dropout_p", values.get("p")) == 0:
            return
        device = next(device_of(leaf) for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
        generator = values.get("generator")
        by = "global" if generator is None else f"own, {generator.device.type}, seed {generator.initial_seed()}"
        self.draws[place(), device, by] += 1

    def note_copy(self, name: str, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Records a copy between host and card."""
        source, result = (args[1], args[0]) if name == "copy_" else (args[0], out)
        no_wait = bool(kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
        direction = (device_of(source), device_of(result))
        if direction == ("cuda", "cpu"):
            if no_wait and storage_of(result) in TIMELINE.pinned:
                self.copies_to_host.append(
                    (place(), TIMELINE.current, TIMELINE.clocks[TIMELINE.current][TIMELINE.current])
                )
            else:
                self.wait_on_host()
        elif direction == ("cpu", "cuda"):
            if not no_wait:
                TIMELINE.wait_on_host(TIMELINE.current)
            self.copies[place(), no_wait and storage_of(source) in TIMELINE.pinned] += 1
            self.copies_before.append(self.products.total())


@cache
def mutable_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Returns position and name of the arguments that an operator writes to."""
    schema = getattr(func, "_schema", None)
    arguments = enumerate(schema.arguments if schema else ())
    return tuple(
        (at, argument.name) for at, argument in arguments if argument.alias_info and argument.alias_info.is_write
    )


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
