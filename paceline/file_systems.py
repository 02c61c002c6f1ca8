"""
What a file system offers: where it is mounted (proc_pid_mountinfo(5)), how much space is free, space for later, and locks on
open files.

Locks hold for every host that sees the file, where its file system passes them on as NFS does.
"""

import ctypes
import errno
import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from paceline.errors import PacelineError
from paceline.units import format_bytes

ESCAPED = re.compile(r"\\(\d{3})")  # a space, tab, newline or backslash, in octal
LOCK_WAIT_S = 60.0  # for a run: workers that lost their supervisor save and end, or are killed, within this
ATTEMPTS, RETRY_S = 3, 0.02  # rundir.is_locked holds a lock for some microseconds
FALLOC_FL_KEEP_SIZE = 1  # linux/falloc.h
NONE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # NFS 3 without its lock service, Lustre without -o flock
OF_ONE_HOST = {"nolock", "local_lock=all", "local_lock=flock", "localflock"}  # mount options of NFS and of Lustre


@dataclass(frozen=True)
class Mount:
    """One line. device: major:minor; root: the folder of the file system that is mounted; options: also the file system's own."""

    device: str
    root: str
    point: str
    filesystem: str
    options: frozenset[str]


def read_mounts(root: Path = Path("/")) -> Iterator[Mount]:
    """Yields the mounts, later ones over earlier ones; none where the kernel does not tell. root: where /proc is."""
    try:
        text = (root / "proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return
    for line in filter(None, text.split("\n")):
        left, _, right = line.partition(" - ")
        fields, (filesystem, _, own) = left.split(" "), right.split(" ", 2)
        folder, point = (ESCAPED.sub(lambda match: chr(int(match[1], 8)), field) for field in fields[3:5])
        yield Mount(fields[2], folder, point, filesystem, frozenset([*fields[5].split(","), *own.split(",")]))


def free_space(directory: Path) -> int | None:
    """Returns the free bytes for a folder that exists or will be made; None where its parent is gone too."""
    for place in (directory, directory.parent):
        with suppress(OSError):
            return shutil.disk_usage(place).free
    return None


class NoLocks(OSError):
    """The file system has no locks."""


def try_lock(
    file: int | IO[str] | IO[bytes], *, shared: bool = False, wait: bool = False, patient: bool = False
) -> bool:
    """Locks an open file until every process that has inherited it has closed it. Returns whether it is locked now.

    wait: until it is free; patient: for a moment, as another process may only look. An exclusive lock on NFS needs a file that is
    open for writing. Raises NoLocks; OSError where the server is gone.
    """
    how = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    for attempt in range(ATTEMPTS if patient else 1):
        if attempt:
            time.sleep(RETRY_S)
        try:
            fcntl.flock(file, how)
        except BlockingIOError:
            continue
        except OSError as error:
            if error.errno in NONE:
                raise NoLocks(error.errno, os.strerror(error.errno)) from None
            raise
        return True
    return False


@contextmanager
def one_writer(path: Path) -> Iterator[None]:
    """Holds a lock beside a file that several runs read, change and replace; without locks a change of the same moment is lost."""
    with path.with_name(f"{path.name}.lock").open("a") as lock:  # until it is closed
        with suppress(NoLocks):
            try_lock(lock, wait=True)
        yield


def is_of_one_host(fd: int) -> bool:
    """Whether locks of this open file are kept from other hosts by the way its file system is mounted."""
    device = os.fstat(fd).st_dev
    requested = f"{os.major(device)}:{os.minor(device)}"
    return any(mount.device == requested and OF_ONE_HOST & mount.options for mount in read_mounts())


def cannot_write(path: Path, error: OSError) -> PacelineError:
    """Returns the error of a file of prepared text that cannot be written, with its fix."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = format_bytes(shutil.disk_usage(path.parent).free)
        return PacelineError(
            f"no room to write prepared text into {path.parent}: {error.strerror} ({free} free)",
            fix="--cache-dir DIR on another disk, or free some space there: folders under it may be deleted, they are made again",
        )
    return PacelineError(
        f"cannot write prepared text into {path.parent}: {error.strerror or error}",
        fix=f"--cache-dir DIR in another place, or make {path.parent} a folder you may write to",
    )


def reserve_space(path: Path, num_bytes: int) -> None:
    """Reserves room behind the end of a file, so that its next lines fit on a full disk too, where the file system can do so."""
    with suppress(OSError, AttributeError), path.open("ab") as file:
        arguments = (ctypes.c_int64(file.tell()), ctypes.c_int64(num_bytes))
        ctypes.CDLL(None).fallocate(file.fileno(), FALLOC_FL_KEEP_SIZE, *arguments)
