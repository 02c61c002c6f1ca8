"""
The one reader of this host: small files under /proc and /sys, control groups, and psutil's counters.

What a kernel or a container does not show is None. Control groups, versions 1 and 2 and both at once, nest and each level may
limit: the smallest limit on the way up to what is mounted counts (kernel.org: admin-guide/cgroup-v2, admin-guide/cgroup-v1/memory).
psutil is imported only by the two functions that need its counters.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.file_systems import read_mounts

NO_LIMIT_BYTES = 1 << 60  # version 1 writes "no limit" as the largest whole number of pages
NETWORK = Path("/sys/class/net")


@dataclass(frozen=True)
class MemoryLimit:
    """What a control group may use, and what it uses without the file pages that the kernel can drop at once."""

    limit_bytes: int
    used_bytes: int | None


def read_text(path: Path | str) -> str | None:
    """Returns a file's text without the last newline; None where it is missing or cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").rstrip("\n")
    except OSError:
        return None


def read_int(path: Path | str) -> int | None:
    """Returns the number that a file holds; None where it is missing or holds no number."""
    text = read_text(path)
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def names_in(folder: Path | str) -> list[str]:
    """Returns the sorted names in a folder; none where there is no such folder."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def probe_cpu_cores() -> int:
    """Returns the cores that this process may use: its affinity, then the quota of its control groups."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if (quota := cpu_quota()) is not None:
        cores = min(cores, max(1, int(quota)))
    return cores


def probe_cpu_bf16() -> bool:
    """Returns whether the CPU multiplies bf16 natively."""
    lines = (read_text("/proc/cpuinfo") or "").splitlines()
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return "avx512_bf16" in flags or "amx_bf16" in flags


def probe_memory_bytes() -> int:
    """Returns this host's memory, or what its control groups leave of it."""
    limit = memory_limit()
    return min(physical_memory_bytes(), limit.limit_bytes) if limit else physical_memory_bytes()


def physical_memory_bytes() -> int:
    """Returns this host's memory, whatever its control groups allow."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_sizes() -> dict[str, int]:
    """Returns /proc/meminfo in bytes, by its names: MemTotal, MemAvailable, SwapTotal, ..."""
    fields = (line.split() for line in (read_text("/proc/meminfo") or "").splitlines())
    return {parts[0].rstrip(":"): int(parts[1]) << 10 for parts in fields if len(parts) == 3}


def peak_resident_bytes() -> int | None:
    """Returns the largest resident size of this process so far."""
    lines = (read_text("/proc/self/status") or "").splitlines()
    fields = next((line.split() for line in lines if line.startswith("VmHWM:")), [])
    return int(fields[1]) * 1024 if len(fields) == 3 and fields[1].isdigit() else None


def process_name(pid: int) -> str | None:
    """Returns `python train.py`: the program and its script or module. The other arguments may hold a key."""
    arguments = [argument for argument in (read_text(f"/proc/{pid}/cmdline") or "").split("\0") if argument]
    if not arguments:
        return read_text(f"/proc/{pid}/comm")  # a kernel thread, or one that has just ended
    program = Path(arguments[0]).name
    if not program.startswith("python"):
        return program
    for argument, following in zip(arguments[1:], [*arguments[2:], ""], strict=True):
        if argument in ("-m", "-c"):
            return f"{program} {argument} {following}" if argument == "-m" else f"{program} -c"
        if not argument.startswith("-"):
            return f"{program} {Path(argument).name}"
    return program


def cpu_use() -> float:
    """Returns the share of all cores in use since the last call, 0 to 1; the first call only begins the count."""
    import psutil

    return float(psutil.cpu_percent()) / 100


def transfer_counters() -> dict[str, int]:
    """Returns the bytes that network and disks have moved since the boot, by those counters that this host has."""
    import psutil

    counters: dict[str, int] = {}
    with suppress(OSError, RuntimeError):
        interfaces = psutil.net_io_counters(pernic=True)
        wired = {name for name in interfaces if (NETWORK / name / "device").exists()}
        # bridges count what a card has sent a second time
        counted = [interfaces[name] for name in wired or interfaces.keys() - {"lo"}]
        counters["net_in"] = sum(interface.bytes_recv for interface in counted)
        counters["net_out"] = sum(interface.bytes_sent for interface in counted)
    with suppress(OSError, RuntimeError):
        disks = psutil.disk_io_counters()
        if disks is not None:
            counters |= {"disk_read": disks.read_bytes, "disk_write": disks.write_bytes}
    return counters


def memory_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """Returns the tightest memory limit of this process's control groups. root: where /proc and /sys are."""
    limits = []
    for folder in _groups("memory", root):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit = read_int(folder / limit_name)
            if limit is not None and limit < NO_LIMIT_BYTES:
                used, stat = read_int(folder / used_name), _fields_of(folder / "memory.stat")
                droppable = stat.get("total_inactive_file", stat.get("inactive_file", 0))
                limits.append(MemoryLimit(limit, None if used is None else max(0, used - droppable)))
    return min(limits, key=lambda limit: limit.limit_bytes, default=None)


def _fields_of(path: Path) -> dict[str, int]:
    """Returns the numbers of a file whose lines are `name number`."""
    lines = (line.split() for line in (read_text(path) or "").splitlines())
    return {parts[0]: int(parts[1]) for parts in lines if len(parts) == 2 and parts[1].isdigit()}


def oom_kills(root: Path = Path("/")) -> int | None:
    """Returns how many processes of this one's group the kernel has killed so far because memory ran out."""
    for folder in _groups("memory", root):
        for name in ("memory.events", "memory.oom_control"):
            fields = _fields_of(folder / name)
            if "oom_kill" in fields:
                return fields["oom_kill"]
    return None


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Returns the CPU seconds per second that the control groups allow; None where they do not limit."""
    quotas = []
    for folder in _groups("cpu", root):
        quota, _, period = (read_text(folder / "cpu.max") or "").partition(" ")
        if quota.isdigit() and period.isdigit():
            quotas.append(int(quota) / int(period))
        v1_quota, v1_period = read_int(folder / "cpu.cfs_quota_us"), read_int(folder / "cpu.cfs_period_us")
        if v1_quota is not None and v1_quota > 0 and v1_period:
            quotas.append(v1_quota / v1_period)
    return min(quotas, default=None)


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Yields the folders of this process's group and of those above it, as far as they are mounted here."""
    memberships = (line.split(":", 2) for line in (read_text(root / "proc/self/cgroup") or "").splitlines())
    for _, controllers, group in memberships:
        if controllers and controller not in controllers.split(","):
            continue
        for mount_root, mount_point in _mounts(controller if controllers else None, root):
            below = group.removeprefix(mount_root.rstrip("/")) if group.startswith(mount_root) else "/"
            folder = mount_point / below.strip("/")
            yield folder  # missing if the name is that of another namespace; then the mount point alone counts
            while folder != mount_point:
                folder = folder.parent
                yield folder


def _mounts(controller: str | None, root: Path) -> Iterator[tuple[str, Path]]:
    """Yields each hierarchy's folder and where it is mounted; controller None is version 2."""
    for mount in read_mounts(root):
        if controller is None:
            matches = mount.filesystem == "cgroup2"
        else:
            matches = mount.filesystem == "cgroup" and controller in mount.options
        if matches:
            yield mount.root, root / mount.point.lstrip("/")
