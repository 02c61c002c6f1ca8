"""
What the files of a torch install tell without importing it: version, kind of build, headers, and when it was changed.

This is all that can be known of an install that does not import, and what a kept answer about it must match.
"""

import ast
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from paceline.kernel_files import names_in, read_text

SOURCE_MARKS = ("CMakeLists.txt", "aten", "c10")  # beside torch/ in its source tree
CACHE_VERSION = 1  # of the kept section's fields
CACHE_ENV = (
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "PYTHONPATH",
    "CUDA_VISIBLE_DEVICES",
    "USE_LIBUV",
    "CUDA_HOME",
    "OMP_NUM_THREADS",
)
UV_HEADERS = (
    "third_party/tensorpipe/third_party/libuv/include/uv/version.h",  # within the source tree
    "third_party/libuv/include/uv/version.h",
)
BUILT_HERE = re.compile(r"\+git[0-9a-f]{6,}$")  # what setup.py writes; release and nightly wheels say otherwise
UV_PART = re.compile(r"#define\s+UV_VERSION_(MAJOR|MINOR|PATCH)\s+(\d+)")


def add_torch_path(torch_path: str) -> None:
    """Puts another install first: its site-packages, a source tree, or the torch folder itself."""
    folder = Path(torch_path).expanduser().absolute()
    if folder.name == "torch" and (folder / "__init__.py").is_file():
        folder = folder.parent
    sys.path.insert(0, str(folder))


def find_torch() -> Path | None:
    """Folder of the torch that `import torch` would take; None where there is none."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if spec.origin and spec.origin not in ("namespace", "built-in"):
        return Path(spec.origin).parent
    folders = list(spec.submodule_search_locations or [])  # a folder that only has the name, such as a checkout's
    return Path(folders[0]) if folders else None


def read_version_file(path: Path) -> dict[str, Any]:
    """version, git_version, cuda, hip and debug as torch/version.py has them; None where it is not there."""
    found: dict[str, Any] = {}
    try:
        statements = ast.parse(read_text(path / "version.py") or "").body
    except SyntaxError:
        statements = []
    for statement in statements:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        value = getattr(statement, "value", None)
        if isinstance(value, ast.Constant):
            found |= {target.id: value.value for target in targets if isinstance(target, ast.Name)}
    return {"version": found.get("__version__")} | {
        name: found.get(name) for name in ("git_version", "cuda", "hip", "debug")
    }


def describe_build(path: Path, *, version: str | None) -> dict[str, Any]:
    """build, source_dir, build_tree and libuv_header."""
    record = install_record(path)
    direct = json.loads(record.get("direct_url.json") or "{}")
    url = urlsplit(direct.get("url", ""))
    tree = None
    if all((path.parent / mark).exists() for mark in SOURCE_MARKS):
        tree = path.parent
    elif "dir_info" in direct and Path(unquote(url.path)).is_dir():
        tree = Path(unquote(url.path))
    if tree == path.parent or direct.get("dir_info", {}).get("editable"):
        build = "editable"
    elif record.get("INSTALLER") == "conda":
        build = "conda"
    elif "dir_info" in direct or BUILT_HERE.search(version or "") or not record:
        build = "source"
    else:
        build = "wheel"
    made_here = build in ("source", "editable")
    return {
        "build": build,
        "source_dir": str(tree) if tree else None,
        "build_tree": describe_build_tree(tree, path) if tree else None,
        "libuv_header": libuv_header(tree) if made_here else None,
    }


def install_record(path: Path) -> dict[str, str | None]:
    """The files that an installer left about the torch in this folder; empty where none did."""
    for distribution in importlib.metadata.distributions(path=[str(path.parent)]):
        if distribution.metadata["Name"] == "torch":
            names = ("direct_url.json", "INSTALLER")
            return {name: (text.strip() if (text := distribution.read_text(name)) else None) for name in names}
    return {}


def describe_build_tree(tree: Path, path: Path) -> dict[str, Any] | None:
    """Libraries that were built and are newer than, or of another size as, those that torch loads."""
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
    """Libraries that the loader takes before torch's own of the same name, by LD_LIBRARY_PATH or LD_PRELOAD.

    torch's are found by RUNPATH, which comes after both. What is shadowed may not even load, and then leaves no trace.
    """
    folders = [path / "lib", *path.parent.glob("nvidia/*/lib")]
    own = {name for folder in folders for name in names_in(folder) if ".so" in name}
    found = [Path(word) for word in re.split(r"[ :]", os.environ.get("LD_PRELOAD", "")) if Path(word).name in own]
    searched = os.environ.get("LD_LIBRARY_PATH")
    for word in searched.split(":") if searched else ():
        folder = Path(word) if word else Path.cwd()  # ld.so: an empty one is the current folder
        if not any(os.path.realpath(folder) == os.path.realpath(each) for each in folders):
            found += [folder / name for name in names_in(folder) if name in own - {each.name for each in found}]
    return [str(each) for each in found]


def libuv_header(tree: Path | None) -> str | None:
    """Version in the header that a build here takes: the bundled one, else conda's, else the system's."""
    candidates = [tree / name for name in UV_HEADERS] if tree else []
    prefixes = [os.environ.get("CONDA_PREFIX"), sys.prefix, "/usr/local", "/usr"]
    candidates += [Path(prefix, "include/uv/version.h") for prefix in prefixes if prefix]
    for candidate in candidates:
        parts = dict(UV_PART.findall(read_text(candidate) or ""))
        if len(parts) == 3:
            return f"{parts['MAJOR']}.{parts['MINOR']}.{parts['PATCH']}"
    return None


def cache_key(path: Path, *, torch_path: str | None, shadowing: list[str]) -> dict[str, Any]:
    """What a kept section must match: the files, the interpreter, what steers the loader, the driver."""
    stamps = {}
    for name in (
        "version.py",
        *(f"lib/lib{library}.so" for library in ("torch_cpu", "torch_cuda", "torch_python", "c10")),
    ):
        try:
            status = (path / name).stat()
            stamps[str(path / name)] = [status.st_mtime_ns, status.st_size]
        except OSError:
            stamps[str(path / name)] = []
    return {
        "cache_version": CACHE_VERSION,
        "files": stamps,
        "shadowing": shadowing,
        "executable": sys.executable,
        "torch_path": torch_path,
        "env": {name: os.environ.get(name) for name in CACHE_ENV},
        "driver": read_text("/sys/module/nvidia/version"),
    }
