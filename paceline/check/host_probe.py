"""
The host itself: system, container, CPU, memory, shared memory, limits, clock. `python -m paceline.check.host_probe`.

Read from /proc and /sys, without root; what a kernel or a container does not show is None.
"""

import ctypes
import os
import platform
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from paceline.check.probe import Json, answer, process_name
from paceline.kernel_files import names_in, read_text
from paceline.plan.cgroup import memory_limit
from paceline.plan.machine import probe_cpu_bf16, probe_cpu_cores

SHM = "/dev/shm"
NUM_LARGEST = 3  # processes that are named where memory is short
LIMITS = {
    "nofile": resource.RLIMIT_NOFILE,
    "nproc": resource.RLIMIT_NPROC,
    "memlock": resource.RLIMIT_MEMLOCK,
    "core": resource.RLIMIT_CORE,
}
TIMEX_BYTES, TIMEX_STATUS_OFFSET, STA_UNSYNC = 256, 40, 0x40  # linux/timex.h; 256 is more than struct timex has


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
    """Which kind of container this is in, by the marks that each leaves."""
    groups = read_text("/proc/1/cgroup") or ""
    environ = (read_text("/proc/1/environ") or "").split("\0")  # root's alone
    declared = next((word.removeprefix("container=") for word in environ if word.startswith("container=")), None)
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
    lines = (line.split() for line in (read_text("/proc/meminfo") or "").splitlines())
    sizes = {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if len(words) == 3}
    limit = memory_limit()
    total_bytes = sizes.get("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "total_bytes": total_bytes,
        "available_bytes": sizes.get("MemAvailable"),
        "cgroup_limit_bytes": limit.limit_bytes if limit and limit.limit_bytes < total_bytes else None,
        "cgroup_used_bytes": limit.used_bytes if limit and limit.limit_bytes < total_bytes else None,
        "swap_total_bytes": sizes.get("SwapTotal"),
        "largest": largest_processes(own_cgroup=limit is not None and limit.limit_bytes < total_bytes),
    }


def largest_processes(*, own_cgroup: bool) -> list[dict[str, Any]]:
    """Those that hold the most memory, the largest first. own_cgroup: only those that share our limit."""
    found, ours = [], read_text("/proc/self/cgroup")
    for name in names_in("/proc"):
        pages = (read_text(f"/proc/{name}/statm") or "").split() if name.isdigit() else []
        if len(pages) > 1 and (not own_cgroup or read_text(f"/proc/{name}/cgroup") == ours):
            found.append((int(pages[1]) * os.sysconf("SC_PAGE_SIZE"), int(name)))
    largest = sorted(found, reverse=True)[:NUM_LARGEST]
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
    """Whether the kernel's clock is held by NTP or PTP: adjtimex(2), which anyone may read."""
    timex = ctypes.create_string_buffer(TIMEX_BYTES)  # all zero: modes 0 changes nothing
    try:
        state: int = ctypes.CDLL(None).adjtimex(timex)
    except (OSError, AttributeError):
        return None
    if state < 0:
        return None
    status = int.from_bytes(timex.raw[TIMEX_STATUS_OFFSET : TIMEX_STATUS_OFFSET + 4], "little")
    return not status & STA_UNSYNC


if __name__ == "__main__":
    answer(probe_host)
