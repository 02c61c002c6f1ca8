"""
What the fault loop needs from this host: a small disk, a memory limit and the list of processes; it reports what is missing.
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
    """Mounts and control groups; `close` removes them."""

    def __init__(self, folder: Path):
        self.mounted: list[Path] = []
        self.groups: list[Path] = []
        self.can_mount = os.geteuid() == 0 and self._try_mount(folder / "trial")
        self.can_limit = os.geteuid() == 0 and os.access(GROUPS, os.W_OK)

    @property
    def notes(self) -> list[str]:
        """Returns a line for each kind of fault that is done differently, or not at all."""
        notes = []
        if not self.can_limit:
            notes.append("memory runs out by a cap on the rank's address space: no control group can be made here")
        if not self.can_mount:
            notes.append("no fault of kind disk: nothing can be mounted here")
        return notes

    def _try_mount(self, folder: Path) -> bool:
        folder.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True)
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
        """Returns the command that starts `command` in a group."""
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
        """Returns the pids that were started by the run with these orders, or with orders below them, whatever their parent."""
        variable = f"SOAK_ORDERS={orders}".encode()
        pids = []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # it has just ended
                if folder.name.isdigit() and any(
                    entry == variable or entry.startswith(variable + b"/")
                    for entry in (folder / "environ").read_bytes().split(b"\0")
                ):
                    pids.append(int(folder.name))
        return pids

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
