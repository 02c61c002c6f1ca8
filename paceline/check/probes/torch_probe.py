"""
Facts of the torch that the workers would import: `python -m paceline.check.probes.torch_probe`.

A child process imports it, since a broken build may crash the import or never return; what the files show is known before. The
child sends its facts after each stage, so a crash loses only the later ones. A good answer may be cached in a file: importing
torch takes seconds, and nothing changes until torch, the driver or the environment does.
"""

import ctypes
import gc
import importlib.util
import json
import os
import re
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from paceline.check.probes.facts import Json, answer, error_line
from paceline.check.probes.host_probe import find_compiler
from paceline.check.torch_install import (
    add_torch_path,
    cache_key,
    describe_build,
    find_shadowing,
    find_torch,
    is_in,
    library_folders,
    read_version_file,
)
from paceline.errors import PacelineError
from paceline.plan.host import read_text
from paceline.rundir import write_atomic
from paceline.units import format_exit

DEADLINE_S = 30.0
MARGIN_S = 2.0  # a child that hangs is killed this much before the deadline: what the files show must still be sent
STORE_DEADLINE = timedelta(seconds=10)
PR_SET_PDEATHSIG = 1  # linux/prctl.h
LIBRARIES = re.compile(
    r"lib(torch|c10|nccl|cudnn|cudart|cublas|uv(?=[.-])|gloo|gomp|iomp5|mkl|nvshmem|amdhip64|rccl)[^/]*\.so[^/]*$"
)
SO_VERSION = re.compile(r"\.so\.(\d[\d.]*)$")
SYSTEM_PREFIXES = ("/", "/usr", "/usr/local")  # a library there belongs to no Python
UNKNOWN = (
    "error", "version", "path", "git_version", "cuda", "cudnn", "nccl", "hip", "debug", "archs", "build", "source_dir", "libuv",
    "libuv_error", "distributed", "gloo", "nccl_backend", "mpi", "libraries", "cuda_available", "cuda_error", "num_threads",
    "compile_backend", "build_tree", "libuv_header", "libuv_library",
    "shadowing",
)  # fmt: skip


def probe_torch(request: Json) -> Json:
    """Returns the facts of torch. Request: torch_path (None: of this Python), cached_torch (None: no cache), deadline_s."""
    torch_path, cache = request.get("torch_path"), request.get("cached_torch")
    if torch_path:
        add_torch_path(torch_path)
    path = find_torch()
    if path is None:
        return {"torch": None}
    shadowing = find_shadowing(path)
    key = cache_key(path, torch_path=torch_path, shadowing=shadowing)
    if cache and (section := read_cache(Path(cache), key)):
        return {"torch": section, "cached": True}
    section = dict.fromkeys(UNKNOWN) | read_version_file(path) | {"path": str(path)}
    section |= describe_build(path, version=section["version"]) | {"shadowing": shadowing}
    deadline_s = request.get("deadline_s") or DEADLINE_S
    ending = run_stages(section, deadline_s=max(deadline_s / 2, deadline_s - MARGIN_S))
    if section["error"] or ending:  # unusable libraries are no longer in memory
        loaded = {library["path"] for library in section["libraries"] or ()}
        added = [describe_library(name, torch_folder=path) for name in section["shadowing"] if name not in loaded]
        section["libraries"] = [*(section["libraries"] or ()), *added]
    if ending:  # the child did not finish, so torch raised no error
        section["error"] = ending
        return {"torch": section, "error": ending}
    # not cached: an error, which may go away by itself, such as that of a card that answers again in a minute
    if cache and section["error"] is None and not (section["cuda_error"] and key["driver"]):
        with suppress(OSError, PacelineError):  # the cache only saves time
            Path(cache).parent.mkdir(parents=True, exist_ok=True)
            write_atomic(Path(cache), json.dumps({"key": key, "torch": section}) + "\n")
    return {"torch": section}


def run_stages(section: Json, *, deadline_s: float) -> str | None:
    """Fills the section from a child process; returns how the child failed, None if it did not."""
    reading, writing = os.pipe()
    pid = os.fork()  # safe: no threads yet
    if pid == 0:
        exit_code = 1
        try:
            os.close(reading)
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            with os.fdopen(writing, "w") as out:
                describe_torch(lambda facts: print(json.dumps(facts), file=out, flush=True))
            exit_code = 0
        finally:
            os._exit(exit_code)
    os.close(writing)
    deadline, lines = time.monotonic() + deadline_s, b""
    while select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
        if not (chunk := os.read(reading, 1 << 16)):
            break
        lines += chunk
    else:
        os.kill(pid, signal.SIGKILL)
    for line in lines.split(b"\n")[:-1]:
        section |= json.loads(line)
    if time.monotonic() >= deadline:
        return f"no answer in {deadline_s:g} s"
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return format_exit(status) if status else None


def describe_torch(send: Callable[[Json], None]) -> None:
    """Runs every stage in the child; the error of the first failing stage becomes the section's."""
    gc.disable()  # for a process this short: collections would add a sixth to the time of the import
    try:
        import torch
    except BaseException as error:  # SystemExit too
        send({"error": error_line(error), "libraries": probe_libraries(None)})
        return
    failed = False
    for stage in STAGES:
        try:
            send(stage(torch))
        except Exception as error:
            if not failed:
                send({"error": f"{stage.__name__.removeprefix('describe_')}: {error_line(error)}"})
            failed = True
    send({"libraries": probe_libraries(Path(torch.__file__).parent), "libuv_library": libuv_library()})


def describe_versions(torch: Any) -> Json:
    return {
        "version": str(torch.__version__),
        "git_version": torch.version.git_version,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "debug": bool(torch.version.debug),
        "archs": torch._C._cuda_getArchFlags().split() if hasattr(torch._C, "_cuda_getArchFlags") else [],
        "num_threads": torch.get_num_threads(),
    }


def describe_distributed(torch: Any) -> Json:
    dist = torch.distributed
    available = dist.is_available()
    return {
        "distributed": available,
        "gloo": available and dist.is_gloo_available(),
        "nccl_backend": available and dist.is_nccl_available(),
        "mpi": available and dist.is_mpi_available(),
    }


def describe_store(torch: Any) -> Json:
    """Returns whether a store with libuv can be made, as at every launch, and the exact error if not."""
    if not torch.distributed.is_available():
        return {"libuv": None}
    try:
        store = torch.distributed.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=STORE_DEADLINE, use_libuv=True
        )
    except Exception as error:  # without 127.0.0.1 (no loopback in a container) libuv is not to blame
        return {"libuv": False if "libuv" in str(error) else None, "libuv_error": str(error)}
    return {"libuv": bool(store.libuvBackend)}


def describe_cuda(torch: Any) -> Json:
    """Returns what torch itself sees of the cards, without creating a context on them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = bool(torch.cuda.is_available())
    error = next((str(warning.message).splitlines()[0] for warning in caught if "CUDA" in str(warning.message)), None)
    if not available and error is None and (torch.version.cuda or torch.version.hip):
        try:
            torch._C._cuda_init()
        except Exception as problem:
            error = error_line(problem)
    return {"cuda_available": available, "cuda_error": None if available else error}


def describe_cuda_libraries(torch: Any) -> Json:
    """Returns the versions of cuDNN, which refuses to load in a wrong version, and of NCCL."""
    facts: Json = {}
    if torch.version.cuda:
        facts["cudnn"] = cudnn_version(torch.backends.cudnn.version())
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        facts["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version()[:3])
    return facts


def cudnn_version(number: int | None) -> str | None:
    """Returns 9.10.2 for 91002; before version 9 the first part counted thousands."""
    if number is None:
        return None
    major, minor = divmod(number, 10000 if number >= 90000 else 1000)
    return f"{major}.{minor // 100}.{minor % 100}"


def describe_compile(torch: Any) -> Json:
    """Returns what torch.compile generates kernels with: Triton for a card, a C++ compiler otherwise."""
    if torch.version.cuda and importlib.util.find_spec("triton") is not None:
        import triton  # type: ignore[import-not-found, unused-ignore]

        return {"compile_backend": f"triton {triton.__version__}"}
    return {"compile_backend": "c++" if find_compiler() else None}


STAGES = (
    describe_versions,
    describe_distributed,
    describe_store,
    describe_cuda,
    describe_cuda_libraries,
    describe_compile,
)


def probe_libraries(torch_folder: Path | None) -> list[Json]:
    """Returns the shared libraries in this process's memory, and whether each is from the expected folder."""
    torch_folder = torch_folder or find_torch()
    paths = [path for path in mapped_files() if LIBRARIES.search(Path(path).name)]
    return [describe_library(path, torch_folder=torch_folder) for path in paths]


def mapped_files() -> list[str]:
    """Returns the files in this process's memory, sorted."""
    lines = (line.split(None, 5) for line in (read_text("/proc/self/maps") or "").splitlines())
    return sorted(
        {fields[5].removesuffix(" (deleted)") for fields in lines if len(fields) == 6 and fields[5][0] == "/"}
    )


def describe_library(path: str, *, torch_folder: Path | None) -> Json:
    return {
        "name": Path(path).name,
        "path": path,
        "expected": is_expected(path, torch_folder=torch_folder),
        "version": match.group(1) if (match := SO_VERSION.search(path)) else None,
    }


def is_expected(path: str, *, torch_folder: Path | None) -> bool:
    """Returns whether the library is in torch's own folder, in an nvidia wheel next to it, or in the Python's prefix."""
    folders = []
    if torch_folder is not None:
        real = Path(os.path.realpath(torch_folder))
        folders += [torch_folder, real, real.parent / "nvidia", real.parent / "torch.libs", real.parent / "triton"]
        if "/usr/lib/python3" in str(real):
            folders.append(Path("/usr/lib"))  # the torch of the Linux distribution uses its libraries
    prefixes = [Path(prefix) for prefix in {sys.prefix, sys.base_prefix} if prefix not in SYSTEM_PREFIXES]
    links = [*(library_folders(torch_folder) if torch_folder else ()), *(prefix / "lib" for prefix in prefixes)]
    return any(Path(path).is_relative_to(folder) for folder in [*folders, *prefixes]) or is_in(links, path)


def libuv_library() -> str | None:
    """Returns the version of the libuv in this process: of its own library, or of the one inside torch's."""
    paths = mapped_files()
    own = [path for path in paths if Path(path).name.startswith(("libuv.so", "libuv-"))]
    inside = [path for path in paths if Path(path).name.startswith(("libtorch_cpu.so", "libtensorpipe"))]
    for path in own + inside:
        with suppress(OSError, AttributeError):
            function = ctypes.CDLL(path).uv_version_string
            function.restype = ctypes.c_char_p
            return str(function().decode())
    return None


def read_cache(path: Path, key: Json) -> Json | None:
    try:
        cached = json.loads(read_text(path) or "")
        section = cached["torch"] if cached["key"] == key else None
        return section if section and set(UNKNOWN) <= section.keys() else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


if __name__ == "__main__":
    answer(probe_torch)
