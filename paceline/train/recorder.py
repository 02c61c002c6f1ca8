"""
What this rank recorded of its collectives, written when asked, as torch does by itself for NCCL (launch/recorder.py).
"""

import os
from pathlib import Path
from threading import Thread

import torch.distributed as dist


def answer_with_collectives(rank: int) -> None:
    """From now on, where torch does not: a thread waits at the pipe, and needs no time until a byte comes."""
    pipe, dump = (os.environ.get(f"TORCH_{name}") for name in ("NCCL_DEBUG_INFO_PIPE_FILE", "FR_DUMP_TEMP_FILE"))
    if not pipe or not dump or not dist.is_initialized() or dist.get_backend() == "nccl":
        return
    path = Path(f"{pipe}{rank}.pipe")
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    fd = os.open(path, os.O_RDWR)  # a writer as well, so that no other's leaving ends the wait
    Thread(target=answer, args=(fd, Path(f"{dump}{rank}")), name="flight recorder", daemon=True).start()


def answer(fd: int, dump: Path) -> None:
    from torch._C._distributed_c10d import _dump_fr_trace  # type: ignore[attr-defined]

    while os.read(fd, 1):  # where each collective was called is left out: that takes torch a second or two
        dump.write_bytes(_dump_fr_trace(includeStackTraces=False))
