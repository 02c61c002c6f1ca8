"""
Runs comm/rank_process.py with a faulty rank: `wrong_rank.py FAULT RANK RUN ...`; RANK "all" means every rank.

On that rank torch.distributed's own functions are wrapped, and their arguments or results are changed.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from paceline.comm.rank_process import main

CALLS_BEFORE = 20  # all_reduces that succeed before the rank fails
calls = 0


def changed(x: Tensor) -> Tensor:
    """Returns a copy with another number at the last place."""
    x = x.clone()
    x[-1] += 1
    return x


def wrong_result(x: Tensor, *args: Any, **kwargs: Any) -> Any:
    work = all_reduce(x, *args, **kwargs)
    if work is not None:
        work.wait()
    x.copy_(changed(x))
    return work


def wrong_contribution(x: Tensor, *args: Any, **kwargs: Any) -> Any:
    x.copy_(changed(x))
    return all_reduce(x, *args, **kwargs)


def wrong_message(x: Tensor, *args: Any, **kwargs: Any) -> Any:
    x.copy_(changed(x))
    return isend(x, *args, **kwargs)


def after_some_calls(act: Callable[[], None]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        global calls
        calls += 1
        if calls > CALLS_BEFORE:
            act()
        return all_reduce(*args, **kwargs)

    return wrapped


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fail() -> None:
    raise ValueError("boom")


def wrong_barrier(*args: Any, **kwargs: Any) -> None:
    """Waits for no rank."""


if __name__ == "__main__":
    fault, rank = sys.argv[1], sys.argv[2]
    del sys.argv[1:3]
    all_reduce, isend = dist.all_reduce, dist.isend
    if rank in (os.environ["RANK"], "all"):
        match fault:
            case "result":
                dist.all_reduce = wrong_result
            case "share":
                dist.all_reduce = wrong_contribution
            case "message":
                dist.isend = wrong_message
            case "barrier":
                dist.barrier = wrong_barrier
            case "stop":
                dist.all_reduce = after_some_calls(stop)
            case "fail":
                dist.all_reduce = after_some_calls(fail)
            case "sleep":
                dist.all_reduce = after_some_calls(lambda: time.sleep(120))
            case _:
                raise SystemExit(f"no such fault: {fault}")
    main()
