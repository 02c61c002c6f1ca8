"""
What the fault loop needs of this host: a small disk, a memory limit, and a look at all processes. Says what it cannot have.
"""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup/memory")  # version 1; under version 2 a group with processes in it may not be divided
DISK_BYTES = 24 << 20  # a checkpoint of the small model takes 2 MB
LIMIT_BYTES = 500 << 20  # of memory for each rank: enough for the next attempt
NO_LIMIT = "-1"


class Host:
    """mounts and groups are removed by `close`."""

    def __init__(self, folder: Path):
        self.mounted: list[Path] = []
        self.groups: list[Path] = []
        self.can_mount = os.geteuid() == 0 and self._try_mount(folder / "trial")
        self.can_limit = os.geteuid() == 0 and os.access(GROUPS, os.W_OK)

    @property
    def notes(self) -> list[str]:
        """One line for each thing that is done otherwise, or not at all."""
        found = []
        if not self.can_limit:
            found.append("memory runs out by a cap on the rank's address space: no control group can be made here")
        if not self.can_mount:
            found.append("no fault of kind disk: nothing can be mounted here")
        return found

    def _try_mount(self, folder: Path) -> bool:
        folder.mkdir(parents=True, exist_ok=True)
        words = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
        done = subprocess.run(words, capture_output=True)
        if done.returncode == 0:
            self.mounted.append(folder)
        return done.returncode == 0

    def small_disk(self, folder: Path) -> Path:
        folder.mkdir(parents=True)
        if self.can_mount:
            assert self._try_mount(folder), f"{folder} cannot be mounted"
        return folder

    def memory_group(self, name: str) -> Path | None:
        if not self.can_limit:
            return None
        group = GROUPS / f"paceline-soak-{os.getpid()}-{name}"
        group.mkdir()
        self.groups.append(group)
        return group

    def inside(self, group: Path | None, command: list[str]) -> list[str]:
        """The command, started in a group."""
        if group is None:
            return command
        return ["bash", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "bash", *command]

    def limit(self, group: Path | None, *, nproc: int) -> None:
        assert group is not None
        (group / "memory.limit_in_bytes").write_text(str(nproc * LIMIT_BYTES))

    def unlimit(self, group: Path | None) -> None:
        if group is not None:
            (group / "memory.limit_in_bytes").write_text(NO_LIMIT)

    def processes_of(self, orders: Path) -> list[int]:
        """All that were started by the run with these orders, or orders below, whoever their parent is by now."""
        mark = f"SOAK_ORDERS={orders}".encode()
        found = []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # it has just ended
                if folder.name.isdigit() and any(
                    word == mark or word.startswith(mark + b"/")
                    for word in (folder / "environ").read_bytes().split(b"\0")
                ):
                    found.append(int(folder.name))
        return found

    def end_all(self, orders: Path) -> None:
        for pid in self.processes_of(orders):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        for group in self.groups:
            with contextlib.suppress(OSError):
                for _ in range(50):
                    if not (group / "cgroup.procs").read_text():
                        group.rmdir()
                        break
                    time.sleep(0.02)
        for folder in self.mounted:
            subprocess.run(["umount", "-l", str(folder)], capture_output=True)
