"""
The bytes that live while ops run, without running them: every tensor storage is seen as it is made and as it dies.

On the CPU's fake tensors the sums are those of PyTorch's own profiler, to some bytes in a gigabyte. For a GPU the model is traced
on the meta device, with the attention kernel that the GPU would take: PyTorch's own meta kernels tell what it keeps. What a
kernel allocates for itself while it runs is not seen. The method: torch.distributed._tools.mem_tracker, in a tenth of its time.
"""

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Sdpa = Callable[..., Tensor]


@dataclass
class Peak:
    """The fullest moment of a phase. made_in: its bytes by the phase in which they were made."""

    bytes: int = 0
    made_in: dict[str, int] = field(default_factory=dict)


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, `now` is the bytes of all storages that ops have made and that still live.

    events: (storage, bytes) in order, bytes negative where it dies: what plan/allocator.py replays.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now, self.phase = 0, "start"
        self.peaks: dict[str, Peak] = {}
        self.events: list[tuple[int, int]] = []
        self._alive: dict[int, tuple[int, int, str]] = {}  # storage -> its number, bytes, phase in which it was made
        self._made_in: dict[str, int] = {}
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.paceline.embedding_gradient.default:  # a custom op hides what it makes within
            dy, idx, num_rows = args
            with self:
                return torch.ops.aten.embedding_dense_backward(dy.float(), idx, num_rows, -1, False)
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage())
        if torch.Tag.pointwise in func.tags:
            self._pass(_cast_bytes([leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]))
        return made

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._alive:
            return
        self._count += 1
        size = storage.nbytes()
        self._alive[key] = (self._count, size, self.phase)
        self._made_in[self.phase] = self._made_in.get(self.phase, 0) + size
        self.events.append((self._count, size))
        self.now += size
        self._note_peak()
        weakref.finalize(storage, self._die, key)

    def _pass(self, size: int) -> None:
        """Bytes that live while one op runs."""
        if size:
            self._count += 1
            self.events += [(self._count, size), (self._count, -size)]
            self.now += size
            self._made_in[self.phase] = self._made_in.get(self.phase, 0) + size
            self._note_peak()
            self.now -= size
            self._made_in[self.phase] -= size

    def _note_peak(self) -> None:
        peak = self.peaks.setdefault(self.phase, Peak())
        if self.now > peak.bytes:
            peak.bytes, peak.made_in = self.now, dict(self._made_in)

    def _die(self, key: int) -> None:
        number, size, phase = self._alive.pop(key)
        self._made_in[phase] -= size
        self.now -= size
        self.events.append((number, -size))


def _cast_bytes(operands: list[Tensor]) -> int:
    """What a CPU's kernel copies first where dtypes differ; a GPU's casts as it reads."""
    operands = [operand for operand in operands if operand.ndim and operand.device.type == "cpu"]
    if len({operand.dtype for operand in operands}) < 2:
        return 0
    common = functools.reduce(torch.promote_types, (operand.dtype for operand in operands))
    return sum(operand.numel() * common.itemsize for operand in operands if operand.dtype != common)


@contextmanager
def attention_kernel(name: str) -> Iterator[None]:
    """scaled_dot_product_attention as the kernel `name` ("flash", "efficient") does it; "math" is what meta tensors take anyway."""
    before = F.scaled_dot_product_attention
    kernels: dict[str, Sdpa] = {"flash": _flash, "efficient": _efficient}
    F.scaled_dot_product_attention = kernels.get(name, before)
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before


def _flash(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, **options: Any) -> Tensor:
    y: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]
    return y


def _efficient(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, **options: Any) -> Tensor:
    y: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, is_causal)[0]
    return y
