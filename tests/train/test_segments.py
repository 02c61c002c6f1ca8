"""Sums of gradients as a GPU's rank starts them: tensors without values, PyTorch's process group that sends nothing."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.train.buckets import SegmentSum, start_all_gather

WORLD_SIZE, SEGMENT = 4, 192


class Collectives(TorchDispatchMode):
    """Notes what each collective writes to and what it reads, as (storage, first element, elements)."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.calls.append((func._opname, span(args[0]), span(args[1])))
        return func(*args, **(kwargs or {}))


def span(tensor):
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.numel()


@pytest.fixture(params=range(WORLD_SIZE))
def rank(request):
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=WORLD_SIZE)
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_sums_and_gathers_in_the_buffer_itself(rank, dtype):
    flat = torch.empty(WORLD_SIZE * SEGMENT, dtype=dtype, device="meta")
    total = SegmentSum(flat, rank=rank, world_size=WORLD_SIZE, tag=0)
    with Collectives() as seen:
        total.start()
        summed = total.wait()
        for work in start_all_gather(flat, rank=rank, world_size=WORLD_SIZE, tag=0):
            work.wait()
    storage = flat.untyped_storage()._cdata
    own, whole = (storage, rank * SEGMENT, SEGMENT), (storage, 0, WORLD_SIZE * SEGMENT)
    # NCCL works in place exactly where the output is this rank's segment of the input, and the other way round
    assert [call[1:] for call in seen.calls] == [(own, whole), (whole, own)]
    assert summed.dtype == torch.float32
    assert (span(summed) == own) == (dtype == torch.float32)
