"""
The ranks' flight recorders, which know their last collectives: switched on, and asked when a run hangs. No torch.

torch's NCCL makes a named pipe for each rank, and at a byte in it writes what the rank has recorded to a file (DumpPipe in
torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp, torch 2.13; it looks once a second). It writes that file at a timeout of its own
as well. Its gloo does neither: there a rank of our trainer answers by itself (train/recorder.py).
"""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from paceline.rundir import RECORDED, RunDir, append_event

PIPE, DUMP = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_FR_DUMP_TEMP_FILE"  # stems, to which torch adds the rank
OLDER_DUMP = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
PIPE_STEM = "collectives_"
ANSWER_S = 1.2
PAUSE_S = 0.02


def recorder_env(user_env: Mapping[str, str], run: RunDir, logs_dir: Path) -> dict[str, str]:
    """What an attempt's ranks must be told; nothing where the user has said it, or, with a note, where no pipe can be."""
    if any(name in user_env for name in (PIPE, DUMP, OLDER_DUMP)):
        return {}
    if not can_have_pipes(logs_dir):
        append_event(
            run, "note", text=f"{logs_dir} holds no named pipes: should the run hang, no flight recorder is asked"
        )
        return {}
    return {PIPE: str(logs_dir / PIPE_STEM), DUMP: str(logs_dir / RECORDED)}


def can_have_pipes(folder: Path) -> bool:
    """Not on every network file system; torch would end the rank there."""
    try:
        os.mkfifo(folder / "try.pipe")
        (folder / "try.pipe").unlink()
    except OSError:
        return False
    return True


def ask_recorders(run: RunDir, attempt: int, ranks: Sequence[int]) -> list[Path]:
    """The dumps that are to come of ranks that can answer."""
    asked = []
    for rank in ranks:
        with suppress(OSError):  # no pipe, or nobody reads it
            pipe = os.open(run.logs(attempt) / f"{PIPE_STEM}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(pipe, b"1")
            finally:
                os.close(pipe)
            asked.append(run.logs(attempt) / f"{RECORDED}{rank}")
    return asked


def wait_for_dumps(asked: Sequence[Path]) -> None:
    """Until all are there and grow no more, but not for long."""
    deadline, sizes = time.monotonic() + ANSWER_S, [0]
    while time.monotonic() < deadline:
        before, sizes = sizes, [path.stat().st_size if path.exists() else 0 for path in asked]
        if before == sizes and all(sizes):
            return
        time.sleep(PAUSE_S)


def remove_pipes(logs_dir: Path) -> None:
    """Whoever copies the folder would wait at one."""
    for pipe in logs_dir.glob(f"{PIPE_STEM}*.pipe"):
        with suppress(OSError):
            pipe.unlink()
