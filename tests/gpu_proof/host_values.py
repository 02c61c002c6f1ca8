"""
What must have values although the card has none: DDP's table of buckets, and the files of a checkpoint.

DDP is PyTorch's own, with its reducer in C++. Three things of it are replaced. It does not compare shapes between ranks at the
start. Its table of buckets, which rank 0 sends after the first step, stays on the CPU. And it sends a bucket by a hook that does
what it does by itself, since the work of a rank that does not exist has no tensor for it to read; it waits at the end of backward.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.parallel.distributed as ddp
from gpu_proof.streams import TIMELINE
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.autograd import Variable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.train import optim


class HostValues(TorchDispatchMode):
    """While it is active, tensors that are made on the CPU have values. A copy from the card to them has none: they keep theirs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            to_host = func is torch.ops.aten.copy_.default and not isinstance(args[0], FakeTensor)
            return args[0] if to_host else func(*args, **kwargs)
        # of what a card's tensors are made, only DDP's table is of this dtype
        if torch.device(kwargs.get("device") or "cpu").type == "cuda":
            if kwargs.get("dtype") != torch.int32:
                return func(*args, **kwargs)
            kwargs["device"] = torch.device("cpu")
        pinned = kwargs.pop("pin_memory", None)
        with unset_fake_temporarily():
            out = func(*args, **kwargs)
        if pinned:
            TIMELINE.pin(out)
        return out


class CardDDP(ddp.DistributedDataParallel):
    """DDP that sends its buckets between ranks that do not exist."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.register_comm_hook(None, send_bucket)


def send_bucket(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Sends a bucket's gradients; the end of the backward waits for it."""
    work = TIMELINE.started(dist.all_reduce(bucket.buffer(), async_op=True))
    Variable._execution_engine.queue_callback(work.wait)  # type: ignore[attr-defined]
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def insert_ddp() -> None:
    """Makes DDP work on the fake card of this process."""
    rebuild = dist.Reducer._rebuild_buckets

    def rebuild_with_values(reducer: dist.Reducer) -> bool:
        with HostValues():
            return rebuild(reducer)

    dist.Reducer._rebuild_buckets = rebuild_with_values  # type: ignore[method-assign]
    ddp._verify_param_shape_across_processes = lambda *args: None  # type: ignore[attr-defined]
    dist.Logger.set_runtime_stats_and_log = lambda logger: None  # type: ignore[attr-defined] # it reads the card's clock
    optim.DistributedDataParallel = CardDDP  # type: ignore[misc]
