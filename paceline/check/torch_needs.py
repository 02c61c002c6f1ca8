"""
What a build of PyTorch needs before it starts: tools, headers, submodules, disk, no second libuv in the way. All that is missing is
named at once, each with what mends it.
"""

import configparser
import importlib.metadata
import os
import re
import shlex
import shutil
import sys
import sysconfig
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from paceline.check.torch_archs import Capability, parse_archs
from paceline.check.torch_files import UV_HEADERS, UV_PART
from paceline.check.torch_recipe import DISK_BYTES, TOOLKITS, Option
from paceline.check.verdict import Facts, at, version_of
from paceline.errors import PacelineError
from paceline.kernel_files import names_in, read_text
from paceline.units import format_bytes

CMAKE_MINIMUM = re.compile(r"^\s*cmake_minimum_required\s*\(\s*VERSION\s+([\d.]+)", re.IGNORECASE | re.MULTILINE)
REQUIREMENT = re.compile(r"^\s*([A-Za-z0-9][\w.-]*)")
PROGRAMS_IN_REQUIRES = {"cmake", "ninja"}  # any of that name on PATH will do
BUNDLED_UV = Path("third_party/tensorpipe/third_party/libuv")
FLAGS = ("CFLAGS", "CXXFLAGS", "CPPFLAGS")
SHOWN = 4
BLOCK_BYTES = 512  # of st_blocks, whatever the file system


@dataclass(frozen=True)
class Need:
    """Something that is missing, or in the way."""

    what: str
    fix: str


def check_source(source: Path) -> None:
    if not (source / "CMakeLists.txt").is_file() or not (source / "torch").is_dir():
        raise PacelineError(
            f"--source {source}: no PyTorch source tree, which has CMakeLists.txt and torch/",
            fix="git clone --recursive https://github.com/pytorch/pytorch",
        )


def find_needs(source: Path, build: Path, options: Sequence[Option], here: Facts, env: Mapping[str, str]) -> list[Need]:
    """here: the sections tools and gpus of this host's facts. env: what the build will see."""
    values = {option.name: option.value for option in options}
    cuda = values.get("USE_CUDA") == "ON"
    needs = [*needs_programs(source, here), *needs_python(source, headers=Path(sysconfig.get_path("include")))]
    if cuda:
        needs += needs_nvcc(here, archs=values.get("TORCH_CUDA_ARCH_LIST", ""))
    needs += needs_submodules(source)
    if cuda and values.get("USE_NCCL") == "ON" and values.get("USE_SYSTEM_NCCL") != "ON":
        needs += needs_nccl(source)
    if values.get("USE_TENSORPIPE") == "ON":
        needs += needs_one_libuv(source, env)
    return [*needs, *needs_disk(build, DISK_BYTES[cuda])]


def needs_programs(source: Path, here: Facts) -> Iterator[Need]:
    cmake, wanted = at(here, "tools.cmake"), CMAKE_MINIMUM.search(read_text(source / "CMakeLists.txt") or "")
    if cmake is None:
        yield Need("no cmake", "pip install cmake")
    elif wanted and (version_of(cmake["version"]) or (999,)) < (version_of(wanted[1]) or ()):
        yield Need(f"cmake {cmake['version']}, this source needs {wanted[1]}", f"pip install 'cmake>={wanted[1]}'")
    if at(here, "tools.ninja") is None:
        yield Need("no ninja", "pip install ninja")
    if at(here, "tools.cxx") is None:
        yield Need("no C++ compiler", "apt install g++, or set CXX")


def needs_python(source: Path, *, headers: Path) -> Iterator[Need]:
    if not (headers / "Python.h").is_file():
        yield Need(
            f"no Python.h in {headers}",
            f"apt install python{sys.version_info[0]}.{sys.version_info[1]}-dev",
        )
    missing = [name for name in build_requires(source) if name not in PROGRAMS_IN_REQUIRES and not is_installed(name)]
    if missing:
        yield Need(f"Python packages that the build needs: {', '.join(missing)}", f"pip install {' '.join(missing)}")


def build_requires(source: Path) -> list[str]:
    """Names of what pyproject.toml wants for a build; pip leaves it to us when it builds without isolation."""
    try:
        wanted = tomllib.loads(read_text(source / "pyproject.toml") or "")["build-system"]["requires"]
    except (tomllib.TOMLDecodeError, KeyError):
        wanted = ["setuptools"]
    return [found[1] for each in ("pip", *wanted) if (found := REQUIREMENT.match(each))]


def build_backend(source: Path) -> str:
    try:
        return str(tomllib.loads(read_text(source / "pyproject.toml") or "")["build-system"]["build-backend"])
    except (tomllib.TOMLDecodeError, KeyError):
        return "setuptools.build_meta"


def is_installed(name: str) -> bool:
    with suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version(name)
        return True
    return False


def needs_nvcc(here: Facts, *, archs: str) -> Iterator[Need]:
    nvcc = at(here, "tools.nvcc")
    if nvcc is None:
        yield Need(
            "no nvcc, and a build for GPUs is asked for",
            "install the CUDA toolkit, or set CUDA_HOME; USE_CUDA=0 for none",
        )
        return
    version = version_of(nvcc["version"])
    known = next((each for each in TOOLKITS if version and (version_of(each[0]) or ()) <= version[:2]), None)
    if known is None:
        return
    first, last = known[1], known[2]
    beyond: list[Capability] = [each for each in parse_archs(archs) if not first <= each <= last]
    if beyond:
        able = [name for name, low, high in TOOLKITS if all(low <= each <= high for each in beyond)]
        names = ", ".join(f"{major}.{minor}" for major, minor in beyond)
        yield Need(
            f"nvcc {nvcc['version']} does not compile for {names}", f"CUDA {able[0]}" if able else "another --arch"
        )


def needs_submodules(source: Path) -> Iterator[Need]:
    modules = configparser.ConfigParser()
    modules.read_string("\n".join(line.strip() for line in (read_text(source / ".gitmodules") or "").splitlines()))
    paths = [modules[section].get("path", "") for section in modules.sections()]
    empty = [path for path in paths if path and not names_in(source / path)]
    if BUNDLED_UV.parts[1] in {Path(path).name for path in paths} and not empty and not names_in(source / BUNDLED_UV):
        empty = [str(BUNDLED_UV)]  # a submodule of tensorpipe's own
    if empty:
        shown = ", ".join(empty[:SHOWN]) + (f" and {len(empty) - SHOWN} more" if len(empty) > SHOWN else "")
        yield Need(
            f"submodules that are not checked out: {shown}", f"git -C {source} submodule update --init --recursive"
        )


def needs_nccl(source: Path) -> Iterator[Need]:
    """Pinned by a file and cloned by PyTorch's own build, after its cmake; ours must find it before."""
    script = source / "tools/optional_submodules.py"
    if script.is_file() and not names_in(source / "third_party/nccl"):
        yield Need(
            "NCCL's source is not in third_party/nccl",
            f"cd {source} && python tools/optional_submodules.py checkout_nccl",
        )


def needs_one_libuv(source: Path, env: Mapping[str, str]) -> Iterator[Need]:
    """Folders that the compiler searches before PyTorch's own libuv, which is a system folder to it: CPATH and -I."""
    bundled = next((version for name in UV_HEADERS if (version := uv_version(source / name))), None)
    searched = [("CPATH", word) for word in env.get("CPATH", "").split(":") if word]
    for name in FLAGS:
        words = shlex.split(env.get(name, ""))
        pairs = pairwise([*words, ""])  # -Ifolder, or -I folder
        searched += [(name, word[2:] or following) for word, following in pairs if word.startswith("-I")]
    for name, folder in searched:
        found = uv_version(Path(folder, "uv/version.h"))
        if bundled and found and found != bundled:
            yield Need(
                f"{name} puts the header of libuv {found} ({folder}) before PyTorch's own {bundled}", f"unset {name}"
            )


def uv_version(header: Path) -> str | None:
    parts = dict(UV_PART.findall(read_text(header) or ""))
    return ".".join(parts[name] for name in ("MAJOR", "MINOR", "PATCH")) if len(parts) == 3 else None


def needs_disk(build: Path, num_bytes: int) -> Iterator[Need]:
    """Nothing to say to a build that is far gone: what it has written counts for it."""
    place = next(folder for folder in (build, *build.parents) if folder.exists())
    written = folder_bytes(build) if build.is_dir() else 0
    free = shutil.disk_usage(place).free
    if free + written < num_bytes:
        yield Need(
            f"{format_bytes(free)} free at {place}, a build takes {format_bytes(num_bytes)}",
            "--build-dir on a larger disk",
        )


def folder_bytes(folder: Path) -> int:
    """On the disk; a file that goes away meanwhile counts for nothing."""
    num_bytes = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                num_bytes += Path(path, name).lstat().st_blocks * BLOCK_BYTES
    return num_bytes
