"""
A CUDA card that is not there: PyTorch, its compiler and Triton are told of one card of a given compute capability.

Tensors on it are fake: shapes, dtypes and devices without values. Whatever follows from these alone is as on a real card: graphs,
kernels' source, binaries for that card, devices that do not match, copies, collectives. Nothing runs: there is no speed, no NCCL
and no memory. A process that has a fake card keeps it, so tests start one for it (see `on_card`).
"""

import ctypes
import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).parent
GIB = 1 << 30


@dataclass(frozen=True)
class Card:
    """What kernels depend on. shared_bytes: the most that one block may ask for; registers: of one thread, spilled beyond."""

    name: str
    processors: int
    shared_bytes: int
    threads_per_processor: int
    memory_bytes: int
    registers: int = 255


# CUDA C++ Programming Guide, technical specifications per compute capability; NVIDIA's pages of the cards
CARDS = {
    80: Card("A100", 108, 163 << 10, 2048, 80 * GIB),
    86: Card("RTX 3090", 82, 99 << 10, 1536, 24 * GIB),
    89: Card("RTX 4090", 128, 99 << 10, 1536, 24 * GIB),
    90: Card("H100", 132, 227 << 10, 2048, 80 * GIB),
    100: Card("B200", 148, 227 << 10, 2048, 180 * GIB),
    120: Card("RTX 5090", 170, 99 << 10, 1536, 32 * GIB),
}


def can_insert() -> bool:
    """Returns whether this machine can have a fake card: PyTorch's CUDA build brings hooks of its own."""
    import torch

    return sys.platform == "linux" and torch.version.cuda is None


def on_card(capability: int, module: str, *args: object, folder: Path) -> Any:
    """Runs `module`'s main(*args) in a process that has the card, and returns what it prints as JSON.

    folder: for the guard and the compilers' caches; processes with one folder share them.
    """
    environment = os.environ | {
        "LD_PRELOAD": str(build_guard(folder)),
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / f"inductor_{capability}"),
        "TRITON_CACHE_DIR": str(folder / "triton_cache"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", "gpu_proof.fake_card", str(capability), module, *map(json.dumps, args)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}\n{done.stderr[-6000:]}"
    return json.loads(done.stdout.splitlines()[-1])


@functools.cache
def build_guard(folder: Path) -> Path:
    """Compiles guard.cpp against the installed PyTorch; a few seconds."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    torch, library = Path(spec.origin).parent, folder / f"guard_{os.getpid()}.so"
    command = [
        shutil.which("g++") or "c++",
        "-std=c++20",
        "-shared",
        "-fPIC",
        "-O1",
        f"-I{torch}/include",
        str(HERE / "guard.cpp"),
        "-o",
        str(library),
    ]
    subprocess.run([*command, f"-L{torch}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch}/lib"], check=True)
    return library


def insert(capability: int) -> None:
    """Gives this process the card, for good. Call it before anything imports the compiler, which keeps what torch.cuda says."""
    import numpy as np
    import torch
    from gpu_proof.streams import insert_streams

    ctypes.CDLL(os.environ["LD_PRELOAD"]).insert_guard()
    card = CARDS[capability]
    properties = SimpleNamespace(
        name=card.name,
        major=capability // 10,
        minor=capability % 10,
        multi_processor_count=card.processors,
        total_memory=card.memory_bytes,
        warp_size=32,
        regs_per_multiprocessor=65_536,
        max_threads_per_multi_processor=card.threads_per_processor,
        max_threads_per_block=1024,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=card.shared_bytes,
        shared_memory_per_multiprocessor=card.shared_bytes + 1024,
        L2_cache_size=50 << 20,
        uuid="0",
        is_integrated=False,
        gcnArchName="",
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "device_count": 1,
        "current_device": 0,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "get_device_properties": properties,
        "get_device_capability": divmod(capability, 10),
        "get_device_name": card.name,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
    }
    for name in ("_lazy_init", "set_device", "empty_cache", "reset_peak_memory_stats"):
        answers[name] = None
    for name, answer in answers.items():
        for module in (torch.cuda, torch.cuda.random):  # which has its own names for some
            setattr(module, name, lambda *args, answer=answer, **options: answer)
    insert_streams()

    class IdleGenerator(torch.Generator):
        """The card's default one: nothing draws from it, but it has a state, which a checkpoint holds."""

        device = torch.device("cuda", 0)
        state = torch.zeros(16, dtype=torch.uint8)

        def manual_seed(self, seed: int) -> "IdleGenerator":
            self.state = torch.from_numpy(np.array([seed, 0]).view(np.uint8))  # seed and offset, as CUDA's
            return self

        def get_state(self) -> torch.Tensor:
            return self.state

        def set_state(self, state: torch.Tensor) -> "IdleGenerator":
            self.state = state
            return self

        def clone_state(self) -> "IdleGenerator":
            return self

    torch.cuda.default_generators = (IdleGenerator(),)
    from torch._dynamo.device_interface import CudaInterface

    CudaInterface.get_raw_stream = staticmethod(lambda index: 0)  # type: ignore[method-assign,assignment]


def main() -> None:
    """Runs another module's main(*args) on the card."""
    capability, module, *args = sys.argv[1:]
    insert(int(capability))
    print(json.dumps(importlib.import_module(module).main(*map(json.loads, args))))


if __name__ == "__main__":
    main()
