"""
`--offload optimizer`: masters and states stay in the host's memory, and are on the GPU only while they are updated.

HostMemory holds them in one page-locked allocation. In each step, Staging copies a batch into a buffer on the GPU, before its turn,
and back after it. Both directions have a stream of their own, so that the copies of the next batch and of the one before run under
the update; events order them. The buffers exist during the update alone: forward and backward have their memory. On a device
without streams the same calls run in order.

What is moved, and in which batches: plan/offloading.py. The updates: update_batches.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from paceline.errors import PacelineError
from paceline.plan.algorithms import Algorithm
from paceline.plan.offloading import NUM_BUFFERS, aligned, moved_tensors
from paceline.plan.sharding import ShardPlan
from paceline.plan.states import DTYPE_BYTES, StoredTensor
from paceline.train.update_batches import UpdateBatch
from paceline.units import format_bytes

PORTABLE = 1  # cudaHostRegisterPortable: locked for every CUDA context of this process


class HostMemory:
    """The host's memory of one rank, zeros. tensors: of each parameter, by "master" and the names of its states.

    The tensors of one kind of a bucket's shares lie one behind the other, so that those of a batch are one tensor. Wide dtypes come
    first: each tensor then starts at a multiple of its element's size.
    """

    def __init__(
        self,
        plan: ShardPlan,
        algorithms: Mapping[str, Algorithm],
        *,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        """algorithms: by group. dtype: that the model computes in; in fp32 its weights are the masters, and stay."""
        masters = dtype != torch.float32
        places: list[tuple[str, StoredTensor]] = []  # with the parameter's name
        for bucket in plan.buckets:
            members: list[tuple[str, StoredTensor]] = []
            for share in bucket.shares(rank):
                algorithm, rows = algorithms[share.param.group], share.hi - share.lo
                moved = moved_tensors(algorithm, share.param.shape, rows=rows, masters=masters)
                members += [(share.param.name, tensor) for tensor in moved]
            order = list(dict.fromkeys(tensor.name for _, tensor in members))
            places += sorted(members, key=lambda place: order.index(place[1].name))
        places.sort(key=lambda place: -DTYPE_BYTES[place[1].dtype])
        flat = host_zeros(sum(tensor.num_bytes for _, tensor in places), device)
        self.tensors: dict[str, dict[str, Tensor]] = {}
        start = 0
        for name, tensor in places:
            part = flat[start : start + tensor.num_bytes].view(getattr(torch, tensor.dtype))
            self.tensors.setdefault(name, {})[tensor.name] = part.view(tensor.shape)
            start += tensor.num_bytes


def host_zeros(num_bytes: int, device: torch.device) -> Tensor:
    """Returns (num_bytes,) uint8 in the host's memory, page-locked for a CUDA device.

    On the meta device, whose tensors stand for a GPU's, it is on that device too: train/exact.py does not count it.
    """
    flat = torch.zeros(num_bytes, dtype=torch.uint8, device="meta" if device.type == "meta" else "cpu")
    if device.type == "cuda":
        page_lock(flat)
    return flat


def page_lock(tensor: Tensor) -> None:
    """Locks the pages of a tensor, so that copies run beside the GPU's work; raises PacelineError where the driver refuses.

    PyTorch's own pinned memory is rounded up to a power of two (pytorch issue 150517): up to twice as much as is needed.
    """
    if not tensor.nbytes:
        return
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, PORTABLE))
    if error or not tensor.is_pinned():
        raise PacelineError(
            f"--offload optimizer: CUDA cannot page-lock {format_bytes(tensor.nbytes)} of this host's memory"
            f" (cudaHostRegister: error {error})",
            fix="free the host's memory, raise `ulimit -l` (docker run --ulimit memlock=-1), or --offload none",
        )


class Staging:
    """Buffers on the device through which batches pass in their order, one step after the other."""

    def __init__(self, batches: Sequence[UpdateBatch], device: torch.device):
        self._batches, self._device = list(batches), device
        sizes = (sum(aligned(tensor.nbytes) for tensor in batch.tensors) for batch in batches)
        self._buffer_bytes = max(sizes, default=0)
        self._backend: Any = torch.cuda if device.type == "cuda" else torch.cpu  # whose streams change nothing
        self._to_device, self._to_host = self._backend.Stream(), self._backend.Stream()
        self._at = 0  # the batch whose turn it is
        self._buffers: list[Tensor] = []
        self._staged: dict[int, list[Tensor]] = {}
        self._arrived: dict[int, Any] = {}  # events
        self._sent: dict[int, Any] = {}

    @contextmanager
    def on_device(self, batch: UpdateBatch) -> Iterator[Sequence[Tensor]]:
        """Gives the batch's tensors on the device, to be changed in place; sends them back at the end of the block."""
        at, last = self._at, len(self._batches) - 1
        assert batch is self._batches[at], "another batch's turn"
        if at == 0:
            self._begin()
        if at < last:
            self._fetch(at + 1)
        compute = self._backend.current_stream()
        compute.wait_event(self._arrived.pop(at))
        yield self._staged[at]
        self._send_back(at)
        self._at = at + 1
        if at == last:
            # what comes next on this stream may have the buffers' memory, and the next step reads the host's
            compute.wait_event(self._sent[last])
            self._at, self._buffers = 0, []

    def synchronize(self) -> None:
        """Waits until the host's memory has all that was sent back; call it before the CPU reads or writes there."""
        for event in self._sent.values():
            event.synchronize()
        self._sent.clear()

    def _begin(self) -> None:
        self._sent.clear()
        count = min(NUM_BUFFERS, len(self._batches))
        self._buffers = [torch.empty(self._buffer_bytes, dtype=torch.uint8, device=self._device) for _ in range(count)]
        self._to_device.wait_stream(self._backend.current_stream())  # which may still use the buffers' memory
        self._fetch(0)

    def _fetch(self, at: int) -> None:
        """Starts to copy a batch to the device, once its buffer is free."""
        buffer, start = self._buffers[at % NUM_BUFFERS], 0
        if at >= NUM_BUFFERS:
            self._to_device.wait_event(self._sent[at - NUM_BUFFERS])
        self._staged[at] = []
        with self._backend.stream(self._to_device):
            for tensor in self._batches[at].tensors:
                staged = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                start += aligned(tensor.nbytes)
                self._staged[at].append(staged.copy_(tensor, non_blocking=True))
        self._arrived[at] = self._record(self._to_device)

    def _send_back(self, at: int) -> None:
        """Starts to copy a batch to the host, once it is updated."""
        self._to_host.wait_event(self._record(self._backend.current_stream()))
        with self._backend.stream(self._to_host):
            for tensor, staged in zip(self._batches[at].tensors, self._staged.pop(at), strict=True):
                tensor.copy_(staged, non_blocking=True)
        self._sent[at] = self._record(self._to_host)

    def _record(self, stream: Any) -> Any:
        event = self._backend.Event()
        event.record(stream)
        return event
