"""
Memory and CPU limits of the control groups that this process is in, versions 1 and 2 and both at once.

Groups nest and each level may limit: the smallest on the way up to what is mounted counts.
kernel.org: admin-guide/cgroup-v2, admin-guide/cgroup-v1/memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.kernel_files import read_int, read_text

NO_LIMIT_BYTES = 1 << 60  # version 1 writes "no limit" as the largest whole number of pages


@dataclass(frozen=True)
class MemoryLimit:
    limit_bytes: int
    used_bytes: int | None  # without file pages that the kernel can drop at once


def memory_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """The tightest limit; None where there is none. root: where /proc and /sys are found."""
    found = []
    for folder in _groups("memory", root):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit = read_int(folder / limit_name)
            if limit is not None and limit < NO_LIMIT_BYTES:
                found.append(MemoryLimit(limit, _used_bytes(folder, used_name)))
    return min(found, key=lambda each: each.limit_bytes, default=None)


def _used_bytes(folder: Path, used_name: str) -> int | None:
    used = read_int(folder / used_name)
    lines = (line.split() for line in (read_text(folder / "memory.stat") or "").splitlines())
    stat = {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdigit()}
    droppable = stat.get("total_inactive_file", stat.get("inactive_file", 0))
    return None if used is None else max(0, used - droppable)


def oom_kills(root: Path = Path("/")) -> int | None:
    """Processes of this one's group that the kernel has ended for want of memory, so far; None where it does not say."""
    for folder in _groups("memory", root):
        for name in ("memory.events", "memory.oom_control"):
            lines = (line.split() for line in (read_text(folder / name) or "").splitlines())
            found = [int(words[1]) for words in lines if len(words) == 2 and words[0] == "oom_kill"]
            if found:
                return found[0]
    return None


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPU seconds per second that the groups allow; None where they do not limit."""
    found = []
    for folder in _groups("cpu", root):
        quota, _, period = (read_text(folder / "cpu.max") or "").partition(" ")
        if quota.isdigit() and period.isdigit():
            found.append(int(quota) / int(period))
        v1_quota, v1_period = read_int(folder / "cpu.cfs_quota_us"), read_int(folder / "cpu.cfs_period_us")
        if v1_quota is not None and v1_quota > 0 and v1_period:
            found.append(v1_quota / v1_period)
    return min(found, default=None)


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Folders of this process's group and of those above it, as far as they are mounted here."""
    memberships = (line.split(":", 2) for line in (read_text(root / "proc/self/cgroup") or "").splitlines())
    for _, controllers, group in memberships:
        if controllers and controller not in controllers.split(","):
            continue
        for mount_root, mount_point in _mounts(controller if controllers else None, root):
            below = group.removeprefix(mount_root.rstrip("/")) if group.startswith(mount_root) else "/"
            folder = mount_point / below.strip("/")
            yield folder  # not there if the name is that of another namespace; then the mount point alone counts
            while folder != mount_point:
                folder = folder.parent
                yield folder


def _mounts(controller: str | None, root: Path) -> Iterator[tuple[str, Path]]:
    """(folder of the hierarchy, where it is mounted); controller None is version 2."""
    for line in (read_text(root / "proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if controller is None:
            matches = kind[0] == "cgroup2"
        else:
            matches = kind[0] == "cgroup" and controller in kind[-1].split(",")
        if matches:
            yield fields[3], root / fields[4].lstrip("/")
