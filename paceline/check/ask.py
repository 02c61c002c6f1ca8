"""
What is about to be done, in numbers: the half of a verdict that no host can tell. None: not known, or nothing of the kind.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Ask:
    """Without arguments: nothing in particular, just this machine."""

    command: str = "check"
    device: str | None = None  # None: cuda where there is one
    nproc: int | None = None  # on each host
    num_hosts: int = 1
    precision: str | None = None
    compile: bool | None = None
    config: dict[str, Any] | None = None  # every key of Config
    set_keys: frozenset[str] = field(default_factory=frozenset)  # those the user has set
    run_dir: str | None = None
    data: str | None = None
    tokenizer: str | None = None
    vocab_size: int | None = None
    sequence_len: int | None = None
    device_batch_size: int | None = None
    total_batch_size: int | None = None
    num_steps: int | None = None
    need_gpu_bytes: int | None = None  # at least, on each GPU
    need_host_bytes: int | None = None  # at least, of all processes on a host
    checkpoint_bytes: int | None = None
    num_checkpoints: int | None = None  # at one time
    port: int | None = None  # None: the kernel picks one
    tracker: str | None = None
    refused: tuple[str, str] | None = None  # message and fix of a plan that cannot be
