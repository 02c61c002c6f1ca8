"""
An install of torch: what its files show without an import, and trials of it: `python -m paceline.check.torch_install`.

The files are all that is known about an install that cannot be imported, and what a cached answer about it must match. The trials
are a store, process groups of one rank and matrix products with known results. Their process takes the path of a torch, by default
this Python's. It prints a line of JSON before and after each trial, so that the reader knows which one was running when the process
crashed or hung.
"""

import ast
import ctypes
import gc
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from paceline.check.probes.facts import error_line
from paceline.plan.host import names_in, read_text
from paceline.plan.nvml import kernel_driver_version

SOURCE_FILES = ("CMakeLists.txt", "aten", "c10")  # next to torch/ in its source tree
CACHE_VERSION = 2  # of the cached section's fields
CACHE_ENV = (
    "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "USE_LIBUV", "CUDA_HOME", "OMP_NUM_THREADS",
)  # fmt: skip
UV_HEADERS = (
    "third_party/tensorpipe/third_party/libuv/include/uv/version.h",  # within the source tree
    "third_party/libuv/include/uv/version.h",
)
BUILT_HERE = re.compile(r"\+git[0-9a-f]{6,}$")  # what setup.py writes; release and nightly wheels say otherwise
UV_PART = re.compile(r"#define\s+UV_VERSION_(MAJOR|MINOR|PATCH)\s+(\d+)")
DEADLINE = timedelta(seconds=20)
PR_SET_PDEATHSIG = 1  # linux/prctl.h
NUM_ELEMENTS = 4096
ROWS, INNER, COLUMNS = 256, 64, 128
BF16_CAPABILITY = (8, 0)

Trial = tuple[str, Callable[[], str]]  # its name; the function returns a message


def add_torch_path(torch_path: str) -> None:
    """Puts another install first on sys.path: its site-packages, a source tree, or the torch folder itself."""
    folder = Path(torch_path).expanduser().absolute()
    if folder.name == "torch" and (folder / "__init__.py").is_file():
        folder = folder.parent
    sys.path.insert(0, str(folder))


def find_torch() -> Path | None:
    """Returns the folder of the torch that `import torch` would load; None where there is none."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if spec.origin and spec.origin not in ("namespace", "built-in"):
        return Path(spec.origin).parent
    folders = list(spec.submodule_search_locations or [])  # a folder that only has the name, such as one in a checkout
    return Path(folders[0]) if folders else None


def read_version_file(path: Path) -> dict[str, Any]:
    """Returns version, git_version, cuda, hip and debug from torch/version.py; None where they are missing."""
    values: dict[str, Any] = {}
    with suppress(SyntaxError):
        for statement in ast.parse(read_text(path / "version.py") or "").body:
            if isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(statement.value, ast.Constant):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                values |= {target.id: statement.value.value for target in targets if isinstance(target, ast.Name)}
    names = ("git_version", "cuda", "hip", "debug")
    return {"version": values.get("__version__"), **{name: values.get(name) for name in names}}


def describe_build(path: Path, *, version: str | None) -> dict[str, Any]:
    """Returns build, source_dir, build_tree and libuv_header of the install."""
    packages = importlib.metadata.distributions(path=[str(path.parent)])
    package = next((package for package in packages if package.metadata["Name"] == "torch"), None)
    direct = json.loads((package and package.read_text("direct_url.json")) or "{}")
    installer = ((package and package.read_text("INSTALLER")) or "").strip()
    folder = Path(unquote(urlsplit(direct.get("url", "")).path))
    tree = None
    if all((path.parent / mark).exists() for mark in SOURCE_FILES):
        tree = path.parent
    elif "dir_info" in direct and folder.is_dir():
        tree = folder
    if tree == path.parent or direct.get("dir_info", {}).get("editable"):
        build = "editable"
    elif installer == "conda":
        build = "conda"
    elif "dir_info" in direct or BUILT_HERE.search(version or "") or package is None:
        build = "source"
    else:
        build = "wheel"
    return {
        "build": build,
        "source_dir": str(tree) if tree else None,
        "build_tree": describe_build_tree(tree, path) if tree else None,
        "libuv_header": libuv_header(tree) if build in ("source", "editable") else None,
    }


def describe_build_tree(tree: Path, path: Path) -> dict[str, Any] | None:
    """Returns the built libraries that are newer than those that torch loads, or differ in size."""
    built, used = tree / "build" / "lib", path / "lib"
    if not built.is_dir():
        return None
    newer = []
    for name in names_in(built):
        if not name.startswith(("libtorch", "libc10", "libshm")) or ".so" not in name or (used / name).is_symlink():
            continue
        ours, theirs = (built / name).stat(), (used / name).stat() if (used / name).exists() else None
        if theirs is None or ours.st_mtime > theirs.st_mtime + 1 or ours.st_size != theirs.st_size:
            newer.append(name)
    return {"path": str(tree / "build"), "libraries_newer": newer}


def find_shadowing(path: Path) -> list[str]:
    """Returns libraries that the loader prefers to torch's own of the same name, because of LD_LIBRARY_PATH or LD_PRELOAD.

    torch's own are found by RUNPATH, which comes after both. A shadowing library may fail to load and then leaves no trace.
    """
    folders = library_folders(path)
    own = {name for folder in folders for name in names_in(folder) if ".so" in name}
    preloaded = re.split(r"[ :]", os.environ.get("LD_PRELOAD", ""))
    shadowing = [Path(name) for name in preloaded if Path(name).name in own]
    searched = os.environ.get("LD_LIBRARY_PATH")
    for name in searched.split(":") if searched else ():
        folder = Path(name) if name else Path.cwd()  # ld.so: an empty name is the current folder
        if not any(os.path.realpath(folder) == os.path.realpath(other) for other in folders):
            known = {path.name for path in shadowing}
            shadowing += [folder / library for library in names_in(folder) if library in own - known]
    return [str(library) for library in shadowing if not is_in(folders, str(library))]


def library_folders(path: Path) -> list[Path]:
    """Returns where the libraries of a torch are: in its own folder, and in the nvidia wheels next to it."""
    return [path / "lib", *path.parent.glob("nvidia/*/lib")]


def is_in(folders: Iterable[Path], path: str) -> bool:
    """Returns whether a library is one of these folders' files, which may be links, as `uv --link-mode symlink` makes them."""
    real = os.path.realpath(path)
    return any(os.path.realpath(folder / Path(path).name) == real for folder in folders)


def libuv_header(tree: Path | None) -> str | None:
    """Returns the version in the header that a build here uses: the bundled one, else conda's, else the system's."""
    candidates = [tree / name for name in UV_HEADERS] if tree else []
    prefixes = [os.environ.get("CONDA_PREFIX"), sys.prefix, "/usr/local", "/usr"]
    candidates += [Path(prefix, "include/uv/version.h") for prefix in prefixes if prefix]
    for candidate in candidates:
        parts = dict(UV_PART.findall(read_text(candidate) or ""))
        if len(parts) == 3:
            return f"{parts['MAJOR']}.{parts['MINOR']}.{parts['PATCH']}"
    return None


def cache_key(path: Path, *, torch_path: str | None, shadowing: list[str]) -> dict[str, Any]:
    """Returns what a cached section must match: the files, the interpreter, the loader's variables, the driver."""
    stamps: dict[str, list[int]] = {}
    for name in ("version.py", *(f"lib/lib{name}.so" for name in ("torch_cpu", "torch_cuda", "torch_python", "c10"))):
        stamps[str(path / name)] = []
        with suppress(OSError):
            status = (path / name).stat()
            stamps[str(path / name)] = [status.st_mtime_ns, status.st_size]
    return {
        "cache_version": CACHE_VERSION,
        "files": stamps,
        "shadowing": shadowing,
        "executable": sys.executable,
        "torch_path": torch_path,
        "env": {name: os.environ.get(name) for name in CACHE_ENV} | {"PYTHONPATH": foreign_paths()},
        "driver": kernel_driver_version(),
    }


def foreign_paths() -> str | None:
    """Returns PYTHONPATH without the folder of this paceline, which is another one for each version that is sent to a host."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(path for path in paths if path != str(Path(__file__).parents[2])) or None


def import_torch(torch_path: str | None) -> str:
    if torch_path:
        add_torch_path(torch_path)
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
        yield "torch.distributed", partial(try_store, torch)
    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0))]
    for device in devices:
        yield f"matmul fp32 {device}", partial(try_matmul, torch, torch.float32, device)
        if device == "cpu" or torch.cuda.get_device_capability(device) >= BF16_CAPABILITY:
            yield f"matmul bf16 {device}", partial(try_matmul, torch, torch.bfloat16, device)


def try_store(torch: Any) -> str:
    """Makes a store's server and a client, as every launch does."""
    if not torch.distributed.is_available():
        raise RuntimeError("this torch was built without torch.distributed: two ranks cannot communicate")
    options = {"timeout": DEADLINE, "use_libuv": True}
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, **options)
    client = torch.distributed.TCPStore("127.0.0.1", server.port, is_master=False, **options)
    client.set("key", "value")
    value = server.get("key")
    if value != b"value":
        raise ArithmeticError(f"the store returned {value!r} for b'value'")
    if not server.libuvBackend:
        raise RuntimeError("the store was made without libuv although it was requested")
    return "a value was passed through it"


def try_group(torch: Any, backend: str, device: str) -> str:
    """Runs an all_reduce of one rank. Its store needs neither a network nor libuv, which another trial covers."""
    dist = torch.distributed
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=DEADLINE)
    try:
        x = torch.arange(NUM_ELEMENTS, dtype=torch.float32, device=device)
        dist.all_reduce(x)
        check_equal(x, torch.arange(NUM_ELEMENTS))
    finally:
        dist.destroy_process_group()
    return f"{NUM_ELEMENTS:,} elements right"


def try_matmul(torch: Any, dtype: Any, device: str) -> str:
    """Multiplies small integers: every sum is below 256 and therefore exact in bf16 as well."""
    a = (torch.arange(ROWS * INNER) % 5 - 2).reshape(ROWS, INNER)
    b = (torch.arange(INNER * COLUMNS) % 3 - 1).reshape(INNER, COLUMNS)
    check_equal(a.to(device, dtype) @ b.to(device, dtype), (a[:, :, None] * b[None]).sum(1))
    return f"{ROWS * COLUMNS:,} elements right"


def check_equal(result: Any, exact: Any) -> None:
    """Raises ArithmeticError where they differ. result: any device and dtype. exact: int64 on the CPU."""
    wrong = int((result.cpu().double() != exact.double()).sum())
    if wrong:
        raise ArithmeticError(f"{wrong:,} of {exact.numel():,} elements are wrong")


def main(torch_path: str | None = None) -> None:
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # other output is not an answer
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def passes(name: str, trial: Callable[[], str]) -> bool:
        print(json.dumps({"begin": name}), file=out, flush=True)
        started, ok = time.perf_counter(), True
        try:
            message = trial()
        except Exception as error:
            message, ok = error_line(error), False
        seconds = round(time.perf_counter() - started, 3)
        print(json.dumps({"name": name, "ok": ok, "seconds": seconds, "message": message}), file=out, flush=True)
        return ok

    gc.disable()  # as in the probe: collections would add a sixth to the time of the import
    if passes("import", lambda: import_torch(torch_path)):
        for name, trial in trials(sys.modules["torch"]):
            passes(name, trial)
    os._exit(0)  # a library's exit handlers are not part of the trial


if __name__ == "__main__":
    main(*sys.argv[1:])
