"""
The host: system, container, CPU, memory, limits, clock; its Python and packages; programs such as compilers and git.

`python -m paceline.check.probes.host_probe [host|python|tools]`: three probes in three processes, each with its own deadline. They
read /proc and /sys without root; what a kernel or a container does not show is None. Packages are read from their metadata alone.
Every program is really run for its version, all at once.
"""

import ctypes
import importlib.metadata
import importlib.util
import math
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from paceline.check.probes.facts import Json, answer
from paceline.errors import PacelineError
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
from paceline.slurm import allocation, is_installed, read_job, read_partitions

LIMITS = {
    "nofile": resource.RLIMIT_NOFILE,
    "nproc": resource.RLIMIT_NPROC,
    "memlock": resource.RLIMIT_MEMLOCK,
    "core": resource.RLIMIT_CORE,
}
TIMEX_BYTES, TIMEX_STATUS_OFFSET, STA_UNSYNC = 256, 40, 0x40  # linux/timex.h; 256 is more than struct timex has
PACKAGES = (
    "torch", "numpy", "tokenizers", "safetensors", "triton", "accelerate", "transformers", "lightning", "pytorch-lightning",
    "datasets", "wandb", "flash-attn", "torchao", "torchtitan", "transformer-engine", "deepspeed", "xformers", "psutil",
    "nvidia-ml-py", "rich", "paceline",
)  # fmt: skip
FAMILIES = re.compile(
    r"nvidia-(nccl|cudnn|cublas|cuda-runtime|cuda-nvrtc|nvshmem)(-cu\d+)?|pytorch-triton.*", re.IGNORECASE
)
ALWAYS = ("nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
DEADLINE_S = 2.5  # for one program
VERSION = re.compile(r"\d+\.\d+[\w.]*")
COMPILERS = ("g++", "clang++", "c++")  # in the order in which torch.compile looks for them


def probe_host(request: Json) -> Json:
    version = read_text("/proc/version") or ""
    fields = [line.partition(":") for line in (read_text("/proc/cpuinfo") or "").splitlines()]
    model = next((value.strip() for name, _, value in fields if name.strip() in ("model name", "Model")), None)
    return {
        "host": {
            "name": platform.node(),
            "os": probe_os(),
            "kernel": platform.release(),
            "arch": platform.machine(),
            "container": probe_container(),
            "wsl": "microsoft" in version.lower(),
            "root": os.geteuid() == 0,
            "cpu": {
                "model": model or platform.processor() or None,
                "cores": probe_cpu_cores(),
                "logical": os.cpu_count(),
                "bf16": probe_cpu_bf16(),
            },
            "memory": probe_memory(),
            "shm": probe_shm("/dev/shm"),
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


def probe_memory() -> dict[str, Any]:
    sizes, limit = memory_sizes(), memory_limit()
    total_bytes = sizes.get("MemTotal") or physical_memory_bytes()
    limits = limit is not None and limit.limit_bytes < total_bytes
    return {
        "total_bytes": total_bytes,
        "available_bytes": sizes.get("MemAvailable"),
        "cgroup_limit_bytes": limit.limit_bytes if limit and limits else None,
        "cgroup_used_bytes": limit.used_bytes if limit and limits else None,
        "swap_total_bytes": sizes.get("SwapTotal"),
        "largest": largest_processes(own_cgroup=limits),
    }


def largest_processes(*, own_cgroup: bool) -> list[dict[str, Any]]:
    """Returns the three processes that hold the most memory, the largest first: none of the command that asks, or that started it.

    own_cgroup: only those that share our limit.
    """
    processes, own_group = [], read_text("/proc/self/cgroup")
    for name in names_in("/proc"):
        pages = (read_text(f"/proc/{name}/statm") or "").split() if name.isdigit() else []
        if len(pages) > 1 and (not own_cgroup or read_text(f"/proc/{name}/cgroup") == own_group):
            processes.append((int(pages[1]) * os.sysconf("SC_PAGE_SIZE"), int(name)))
    command, *above = ancestors(os.getpid())
    others = (
        (rss, pid)
        for rss, pid in sorted(processes, reverse=True)
        if pid not in (command, *above) and command not in ancestors(pid)
    )
    return [{"pid": pid, "name": process_name(pid) or "unknown", "rss_bytes": rss} for rss, pid in islice(others, 3)]


def ancestors(pid: int) -> list[int]:
    """Returns the ids of the processes that started this one, its parent first."""
    pids: list[int] = []
    while pid:
        # the name before the last bracket may contain spaces and brackets
        fields = (read_text(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()
        pid = int(fields[1]) if len(fields) > 1 else 0
        pids.append(pid)
    return pids


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
    programs = {
        "cxx": find_compiler(),
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
    with ThreadPoolExecutor(len(commands) + 1) as pool:
        slurm = pool.submit(probe_slurm)
        printed = dict(zip(commands, pool.map(output_of, commands.values()), strict=True))
    commit, dirty = printed.get("commit") or None, printed.get("dirty")
    nvidia_smi = shutil.which("nvidia-smi")
    return {
        "tools": {
            **{name: describe(path, printed.get(name)) for name, path in programs.items()},
            "cuda_home": str(cuda_home) if cuda_home else None,
            "python_headers": Path(sysconfig.get_path("include"), "Python.h").is_file(),
            # not run: it would hang with a wedged driver
            "nvidia_smi": {"path": nvidia_smi, "version": None} if nvidia_smi else None,
            "wandb": probe_wandb(),
            "slurm": slurm.result(),
            "code": {
                "path": printed.get("top") or str(Path.cwd()),
                "commit": commit,
                "dirty": None if commit is None or dirty is None else bool(dirty),
            },
        }
    }


def probe_slurm() -> dict[str, Any] | None:
    """Returns this process's job, or outside of one the partitions with GPUs; None where no Slurm answers."""
    if not is_installed():
        return None
    with suppress(PacelineError, KeyError, ValueError):
        place = allocation()
        if place is None:
            partitions = [p for p in read_partitions(timeout_s=DEADLINE_S) if p.gpus and p.state == "UP"]
            facts = [{"name": p.name, "nodes": p.num_nodes, "nodes_up": p.num_up} for p in partitions]
            return {"job_id": None, "seconds_left": None, "gpu_partitions": facts}
        job = read_job(place.job_id, timeout_s=DEADLINE_S)
        end = job.end if job and job.limit_s < math.inf else None
        left = None if end is None else max(0.0, end - time.time())
        requeues = bool(job and job.is_batch and job.can_requeue)
        return {"job_id": place.job_id, "seconds_left": left, "gpu_partitions": [], "requeues": requeues}
    return None


def describe(path: str | None, printed: str | None) -> dict[str, str | None] | None:
    """Returns None where there is no such program; version is None where the program fails or prints none."""
    if path is None:
        return None
    lines = (printed or "").splitlines()
    release = next((line for line in lines if "release" in line), "")  # nvcc prints its version on a later line
    version = VERSION.search(release) or VERSION.search(re.sub(r"\([^)]*\)", "", lines[0] if lines else ""))
    return {"path": path, "version": version.group() if version else None}


def output_of(command: list[str]) -> str | None:
    """Returns what the command prints; None where it fails, or is killed at the deadline."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError:
        return None  # not executable, or built for another machine
    try:
        text, _ = process.communicate(timeout=DEADLINE_S)
    except (subprocess.TimeoutExpired, UnicodeDecodeError):
        process.kill()
        return None
    return text.strip() if process.returncode == 0 else None


def find_compiler() -> str | None:
    """Returns the path of the C++ compiler that torch.compile uses."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else COMPILERS
    return next((path for name in names if (path := shutil.which(name))), None)


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
    """Returns whether there is a key, never the key itself; logged_in is None where .netrc cannot be read."""
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "")).hostname or "api.wandb.ai"
    logged_in: bool | None = bool(os.environ.get("WANDB_API_KEY"))
    try:
        if not logged_in:
            path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
            logged_in = path.is_file() and netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError, RuntimeError):
        logged_in = None
    installed = importlib.util.find_spec("wandb") is not None
    return {"installed": installed, "logged_in": logged_in, "mode": os.environ.get("WANDB_MODE")}


FACTS = {"host": probe_host, "python": probe_python, "tools": probe_tools}

if __name__ == "__main__":
    answer(FACTS[sys.argv[1] if len(sys.argv) > 1 else "host"])
