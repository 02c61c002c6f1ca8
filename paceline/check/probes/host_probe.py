"""
The host: system, container, CPU, memory, limits, clock; its Python and packages; programs such as compilers and git.

`python -m paceline.check.probes.host_probe [host|python|tools]`: three probes in three processes, each with its own deadline. They
read /proc and /sys without root; what a kernel or a container does not show is None. Packages are read from their metadata alone.
Every program is really run for its version, all at once.
"""

import ctypes
import importlib.metadata
import importlib.util
import netrc
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from paceline.check.probes.facts import Json, answer
from paceline.plan.host import (
    memory_limit,
    memory_sizes,
    names_in,
    physical_memory_bytes,
    probe_cpu_bf16,
    probe_cpu_cores,
    process_name,
    read_text,
)

SHM = "/dev/shm"
NUM_LARGEST = 3  # processes that are named where memory is short
LIMITS = {
    "nofile": resource.RLIMIT_NOFILE,
    "nproc": resource.RLIMIT_NPROC,
    "memlock": resource.RLIMIT_MEMLOCK,
    "core": resource.RLIMIT_CORE,
}
TIMEX_BYTES, TIMEX_STATUS_OFFSET, STA_UNSYNC = 256, 40, 0x40  # linux/timex.h; 256 is more than struct timex has
PACKAGES = (
    "torch", "numpy", "tokenizers", "safetensors", "triton", "accelerate", "transformers", "lightning", "pytorch-lightning",
    "datasets", "wandb", "flash-attn", "torchao", "deepspeed", "xformers", "psutil", "nvidia-ml-py", "rich", "paceline",
)  # fmt: skip
FAMILIES = re.compile(
    r"nvidia-(nccl|cudnn|cublas|cuda-runtime|cuda-nvrtc|nvshmem)(-cu\d+)?|pytorch-triton.*", re.IGNORECASE
)
ALWAYS = ("nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
DEADLINE_S, LAST_READ_S = 2.5, 0.05  # LAST_READ_S: for a program that is done at the deadline and was not read yet
VERSION = re.compile(r"\d+\.\d+[\w.]*")
COMPILERS = ("g++", "clang++", "c++")  # in the order in which torch.compile looks for them
WANDB_HOST = "api.wandb.ai"


def probe_host(request: Json) -> Json:
    version = read_text("/proc/version") or ""
    return {
        "host": {
            "name": platform.node(),
            "os": probe_os(),
            "kernel": platform.release(),
            "arch": platform.machine(),
            "container": probe_container(),
            "wsl": "microsoft" in version.lower(),
            "root": os.geteuid() == 0,
            "cpu": probe_cpu(),
            "memory": probe_memory(),
            "shm": probe_shm(SHM),
            "limits": {name: list(resource.getrlimit(limit)) for name, limit in LIMITS.items()},
            "clock": {"unix": time.time(), "synchronized": probe_clock_synchronized()},
        }
    }


def probe_os() -> str:
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        return platform.system()
    return f"{release.get('NAME', 'Linux').removesuffix(' GNU/Linux')} {release.get('VERSION_ID', '')}".strip()


def probe_container() -> str | None:
    """Returns the kind of container around this process, by the traces that each kind leaves."""
    groups = read_text("/proc/1/cgroup") or ""
    environ = (read_text("/proc/1/environ") or "").split("\0")  # root's alone
    declared = next((text.removeprefix("container=") for text in environ if text.startswith("container=")), None)
    declared = declared or read_text("/run/systemd/container")
    if "KUBERNETES_SERVICE_HOST" in os.environ or "kubepods" in groups:
        return "kubernetes"
    if Path("/run/.containerenv").exists() or declared in ("podman", "oci") or "libpod" in groups:
        return "podman"
    if Path("/.dockerenv").exists() or declared == "docker" or "/docker" in groups:
        return "docker"
    if (declared or "").startswith("lxc") or "/lxc" in groups:
        return "lxc"
    return None


def probe_cpu() -> dict[str, Any]:
    fields = [line.partition(":") for line in (read_text("/proc/cpuinfo") or "").splitlines()]
    model = next((value.strip() for name, _, value in fields if name.strip() in ("model name", "Model")), None)
    return {
        "model": model or platform.processor() or None,
        "cores": probe_cpu_cores(),
        "logical": os.cpu_count(),
        "bf16": probe_cpu_bf16(),
    }


def probe_memory() -> dict[str, Any]:
    sizes, limit = memory_sizes(), memory_limit()
    total_bytes = sizes.get("MemTotal") or physical_memory_bytes()
    return {
        "total_bytes": total_bytes,
        "available_bytes": sizes.get("MemAvailable"),
        "cgroup_limit_bytes": limit.limit_bytes if limit and limit.limit_bytes < total_bytes else None,
        "cgroup_used_bytes": limit.used_bytes if limit and limit.limit_bytes < total_bytes else None,
        "swap_total_bytes": sizes.get("SwapTotal"),
        "largest": largest_processes(own_cgroup=limit is not None and limit.limit_bytes < total_bytes),
    }


def largest_processes(*, own_cgroup: bool) -> list[dict[str, Any]]:
    """Returns the processes that hold the most memory, the largest first. own_cgroup: only those that share our limit."""
    processes, own_group = [], read_text("/proc/self/cgroup")
    for name in names_in("/proc"):
        pages = (read_text(f"/proc/{name}/statm") or "").split() if name.isdigit() else []
        if len(pages) > 1 and (not own_cgroup or read_text(f"/proc/{name}/cgroup") == own_group):
            processes.append((int(pages[1]) * os.sysconf("SC_PAGE_SIZE"), int(name)))
    largest = sorted(processes, reverse=True)[:NUM_LARGEST]
    return [{"pid": pid, "name": process_name(pid) or "unknown", "rss_bytes": rss} for rss, pid in largest]


def probe_shm(path: str) -> dict[str, Any] | None:
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"x")
            file.flush()
        writable = True
    except OSError:
        writable = False
    return {
        "path": path,
        "total_bytes": status.f_blocks * status.f_frsize,
        "free_bytes": status.f_bavail * status.f_frsize,
        "writable": writable,
    }


def probe_clock_synchronized() -> bool | None:
    """Returns whether NTP or PTP keeps the kernel's clock, by adjtimex(2), which anyone may read."""
    timex = ctypes.create_string_buffer(TIMEX_BYTES)  # all zero: modes 0 changes nothing
    try:
        state: int = ctypes.CDLL(None).adjtimex(timex)
    except (OSError, AttributeError):
        return None
    if state < 0:
        return None
    status = int.from_bytes(timex.raw[TIMEX_STATUS_OFFSET : TIMEX_STATUS_OFFSET + 4], "little")
    return not status & STA_UNSYNC


def probe_python(request: Json) -> Json:
    return {
        "python": {
            "version": platform.python_version(),
            "executable": sys.executable,
            "prefix": sys.prefix,
            "venv": sys.prefix != sys.base_prefix,
            "pip": importlib.util.find_spec("pip") is not None,
        },
        "packages": probe_packages(),
    }


def probe_packages() -> dict[str, str | None]:
    """Returns the version of each package that a run may use, None where it is not installed."""
    versions: dict[str, str | None] = dict.fromkeys((*PACKAGES, *ALWAYS))
    for distribution in importlib.metadata.distributions():
        # the folder's name is enough; reading every METADATA takes a second
        path = getattr(distribution, "_path", None)
        name = path.name.rpartition(".")[0].partition("-")[0] if path is not None else distribution.metadata["Name"]
        name = re.sub(r"[-_.]+", "-", name).lower()
        if (name in versions and versions[name] is None) or (name not in versions and FAMILIES.fullmatch(name)):
            versions[name] = distribution.version
    return versions


def probe_tools(request: Json) -> Json:
    """Returns the facts of the programs, the tracker's login and the code in the current folder."""
    cuda_home = find_cuda_home()
    nvcc = shutil.which("nvcc") or (shutil.which("nvcc", path=str(cuda_home / "bin")) if cuda_home else None)
    compiler = os.environ.get("CXX") or next((name for name in COMPILERS if shutil.which(name)), None)
    programs = {
        "cxx": shutil.which(compiler) if compiler else None,
        "nvcc": nvcc,
        **{name: shutil.which(name) for name in ("cmake", "ninja", "git", "ccache")},
    }
    commands = {name: [path, "--version"] for name, path in programs.items() if path}
    if programs["git"]:
        git = [programs["git"], "--no-optional-locks"]  # so that the repository is not changed
        commands |= {
            "top": [*git, "rev-parse", "--show-toplevel"],
            "commit": [*git, "rev-parse", "HEAD"],
            "dirty": [*git, "status", "--porcelain", "--untracked-files=no"],
        }
    printed = outputs(commands)
    nvidia_smi = shutil.which("nvidia-smi")
    return {
        "tools": {
            **{name: describe(path, printed.get(name)) for name, path in programs.items()},
            "cuda_home": str(cuda_home) if cuda_home else None,
            "python_headers": Path(sysconfig.get_path("include"), "Python.h").is_file(),
            # not run: it would hang with a wedged driver
            "nvidia_smi": {"path": nvidia_smi, "version": None} if nvidia_smi else None,
            "wandb": probe_wandb(),
            "code": describe_code(printed),
        }
    }


def describe(path: str | None, printed: str | None) -> dict[str, str | None] | None:
    """Returns None where there is no such program; version is None where the program fails or prints none."""
    if path is None:
        return None
    lines = (printed or "").splitlines()
    release = next((line for line in lines if "release" in line), "")  # nvcc prints its version on a later line
    version = VERSION.search(release) or VERSION.search(re.sub(r"\([^)]*\)", "", lines[0] if lines else ""))
    return {"path": path, "version": version.group() if version else None}


def describe_code(printed: dict[str, str | None]) -> dict[str, Any]:
    top, commit, dirty = (printed.get(name) for name in ("top", "commit", "dirty"))
    return {
        "path": top or str(Path.cwd()),
        "commit": commit or None,
        "dirty": None if not commit or dirty is None else bool(dirty),
    }


def outputs(commands: dict[str, list[str]]) -> dict[str, str | None]:
    """Returns what each command prints; None for one that fails, or that is killed at the deadline."""
    started: dict[str, subprocess.Popen[str]] = {}
    for name, command in commands.items():
        try:
            started[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except OSError:
            continue  # not executable, or built for another machine
    deadline = time.monotonic() + DEADLINE_S
    printed: dict[str, str | None] = {}
    for name, process in started.items():
        try:
            text, _ = process.communicate(timeout=max(LAST_READ_S, deadline - time.monotonic()))
            printed[name] = text.strip() if process.returncode == 0 else None
        except (subprocess.TimeoutExpired, UnicodeDecodeError):
            process.kill()
            printed[name] = None
    return printed


def find_cuda_home() -> Path | None:
    """Returns the CUDA folder that extensions are built with, as torch.utils.cpp_extension finds it."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            return Path(os.environ[name])
    nvcc = shutil.which("nvcc")
    if nvcc:
        return Path(nvcc).resolve().parent.parent
    usual = Path("/usr/local/cuda")
    return usual if usual.is_dir() else None


def probe_wandb() -> dict[str, Any]:
    """Returns whether there is a key, never the key itself."""
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "")).hostname or WANDB_HOST
    return {
        "installed": importlib.util.find_spec("wandb") is not None,
        "logged_in": bool(os.environ.get("WANDB_API_KEY")) or netrc_has(host),
        "mode": os.environ.get("WANDB_MODE"),
    }


def netrc_has(host: str) -> bool | None:
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        if not path.is_file():
            return False
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError, RuntimeError):
        return None  # it exists and is not readable


FACTS = {"host": probe_host, "python": probe_python, "tools": probe_tools}

if __name__ == "__main__":
    answer(FACTS[sys.argv[1] if len(sys.argv) > 1 else "host"])
