"""Locks on open files. They hold for every host that sees the file, where its file system passes them on as NFS does."""

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from paceline.mounts import read_mounts

LOCK_WAIT_S = 60.0  # for a run: workers that lost their supervisor save and end, or are killed, within this
ATTEMPTS, RETRY_S = 3, 0.02  # rundir.is_locked holds a lock for some microseconds
NONE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # NFS 3 without its lock service, Lustre without -o flock
OF_ONE_HOST = {"nolock", "local_lock=all", "local_lock=flock", "localflock"}  # mount options of NFS and of Lustre


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


@contextlib.contextmanager
def one_writer(path: Path) -> Iterator[None]:
    """Holds a lock beside a file that several runs read, change and replace; without locks a change of the same moment is lost."""
    with path.with_name(f"{path.name}.lock").open("a") as lock:  # until it is closed
        with contextlib.suppress(NoLocks):
            try_lock(lock, wait=True)
        yield


def is_of_one_host(fd: int) -> bool:
    """Whether locks of this open file are kept from other hosts by the way its file system is mounted."""
    device = os.fstat(fd).st_dev
    requested = f"{os.major(device)}:{os.minor(device)}"
    return any(mount.device == requested and OF_ONE_HOST & mount.options for mount in read_mounts())
