"""
A torch tried out: a store, process groups of one, matrix products with a known answer. `python -m paceline.check.torch_proof`.

The request, JSON on stdin: torch_path (None: the torch of this Python). The answer: a line of JSON before each trial and one
after it, so that whoever listens knows what was under way when this process crashed or hung.
"""

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from paceline.check.probe import error_line
from paceline.check.torch_files import add_torch_path

DEADLINE = timedelta(seconds=20)
PR_SET_PDEATHSIG = 1  # linux/prctl.h
NUM_ELEMENTS = 4096
ROWS, INNER, COLUMNS = 256, 64, 128
BF16_CAPABILITY = (8, 0)

Trial = tuple[str, Callable[[], str | None]]  # its name; returns what there is to say


def try_torch(torch_path: str | None, send: Callable[[dict[str, Any]], None]) -> None:
    if torch_path:
        add_torch_path(torch_path)
    if not attempt("import", lambda: import_torch(torch_path), send):
        return
    import torch

    for name, trial in trials(torch):
        attempt(name, trial, send)


def attempt(name: str, trial: Callable[[], str | None], send: Callable[[dict[str, Any]], None]) -> bool:
    send({"begin": name})
    started = time.perf_counter()
    said, error = None, None
    try:
        said = trial()
    except Exception as problem:
        error = error_line(problem)
    send({"name": name, "ok": error is None, "seconds": round(time.perf_counter() - started, 3), "said": error or said})
    return error is None


def import_torch(torch_path: str | None) -> str:
    import torch

    path = Path(torch.__file__ or "").parent
    if torch_path and not path.is_relative_to(Path(torch_path).expanduser().absolute()):
        raise ImportError(f"torch came from {path}")
    return str(torch.__version__)


def trials(torch: Any) -> Iterator[Trial]:
    if torch.distributed.is_available():
        yield "store with libuv", partial(try_store, torch)
        if torch.distributed.is_gloo_available():
            yield "gloo all_reduce", partial(try_group, torch, "gloo", "cpu")
        if torch.cuda.is_available() and torch.distributed.is_nccl_available():
            yield "nccl all_reduce", partial(try_group, torch, "nccl", "cuda:0")
    else:
        yield "torch.distributed", missing_distributed
    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0))]
    for device in devices:
        yield f"matmul fp32 {device}", partial(try_matmul, torch, torch.float32, device)
        if device == "cpu" or torch.cuda.get_device_capability(device) >= BF16_CAPABILITY:
            yield f"matmul bf16 {device}", partial(try_matmul, torch, torch.bfloat16, device)


def missing_distributed() -> str:
    raise RuntimeError("this torch was built without torch.distributed: two ranks cannot talk")


def try_store(torch: Any) -> str:
    """A server and a client, as every launch makes them."""
    options = {"timeout": DEADLINE, "use_libuv": True}
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, **options)
    client = torch.distributed.TCPStore("127.0.0.1", server.port, is_master=False, **options)
    client.set("key", "value")
    got = server.get("key")
    if got != b"value":
        raise ArithmeticError(f"the store gave {got!r} for b'value'")
    if not server.libuvBackend:
        raise RuntimeError("the store was made without libuv though it was asked for")
    return "a value went through"


def try_group(torch: Any, backend: str, device: str) -> str:
    """Of one rank. Its store needs neither a network nor libuv: that is another trial."""
    dist = torch.distributed
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=DEADLINE)
    try:
        x = torch.arange(NUM_ELEMENTS, dtype=torch.float32, device=device)
        dist.all_reduce(x)
        check_equal(torch, x, torch.arange(NUM_ELEMENTS))
    finally:
        dist.destroy_process_group()
    return f"{NUM_ELEMENTS:,} elements right"


def try_matmul(torch: Any, dtype: Any, device: str) -> str:
    """Small integers: every sum is below 256 and so exact in bf16 too."""
    a = (torch.arange(ROWS * INNER) % 5 - 2).reshape(ROWS, INNER)
    b = (torch.arange(INNER * COLUMNS) % 3 - 1).reshape(INNER, COLUMNS)
    check_equal(torch, a.to(device, dtype) @ b.to(device, dtype), (a[:, :, None] * b[None]).sum(1))
    return f"{ROWS * COLUMNS:,} elements right"


def check_equal(torch: Any, got: Any, exact: Any) -> None:
    """got: any device and dtype. exact: int64 on the CPU."""
    wrong = int((got.cpu().double() != exact.double()).sum())
    if wrong:
        raise ArithmeticError(f"{wrong:,} of {exact.numel():,} elements are wrong")


def main() -> None:
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what else is printed is no answer
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    request = json.loads(sys.stdin.read() or "{}")
    try_torch(request.get("torch_path"), lambda event: print(json.dumps(event), file=out, flush=True))
    os._exit(0)  # a library's own ending is not on trial


if __name__ == "__main__":
    main()
