"""
The places a run writes to and reads from: space, rights, file system, speed. `python -m paceline.check.storage_probe`.

Rights are found by really writing. Nothing stays behind: what is written has no name in any folder, or loses it at
once, and a missing folder is not made but judged by its nearest parent. Text that is only read is not written beside.
"""

import os
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from paceline.check.probe import Json, answer
from paceline.kernel_files import read_text

PLACE_DEADLINE_S = 3.0  # a dead network disk answers never
SPEED_DEADLINE_S = 1.5
WRITE_BYTES, WRITE_S, READ_S = 64 << 20, 0.3, 0.1
CHUNK_BYTES = 2 << 20
MIN_FREE_BYTES = 1 << 30  # less than this is not spent on a measurement
NETWORK_FILESYSTEMS = {
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "afs", "9p", "panfs", "wekafs",
    "pvfs2", "orangefs", "ocfs2", "gfs2", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.s3fs", "fuse.gcsfuse",
    "fuse.juicefs", "fuse.rclone", "fuse.goofys", "fuse.mount-s3", "fuse.blobfuse2", "fuse.alluxio-fuse", "fuse.seaweedfs",
}  # fmt: skip


def probe_storage(request: Json) -> Json:
    """Request: the paths run_dir, data, cache_dir (None: not asked for) and measure_disk."""
    paths = {
        "run_dir": request.get("run_dir"),
        "data": local_path(request.get("data")),
        "cache": request.get("cache_dir"),
        "tmp": os.environ.get("TMPDIR") or "/tmp",
    }
    places: dict[str, dict[str, Any]] = {}
    for name, path in paths.items():
        if path is not None:
            places[name] = unknown_place(path, error=f"no answer in {PLACE_DEADLINE_S:.0f} s")
    threads = [_start(places, name) for name in places]
    deadline = time.monotonic() + PLACE_DEADLINE_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if request.get("measure_disk"):
        measuring = threading.Thread(target=measure_places, args=(places,), daemon=True)
        measuring.start()
        measuring.join(SPEED_DEADLINE_S)
    hidden = ("base", "device")
    shown = {name: {key: place[key] for key in place if key not in hidden} for name, place in places.items()}
    return {"storage": {name: shown.get(name) for name in paths}}


def _start(places: dict[str, dict[str, Any]], name: str) -> threading.Thread:
    def look() -> None:
        places[name] = probe_place(Path(places[name]["path"]), write=name != "data")

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    return thread


def local_path(data: str | None) -> str | None:
    """The path in a data source; None for what is not on a disk of the user's."""
    if data is None or data == "builtin":
        return None
    if not data.startswith("hf:"):
        return data
    name = data.removeprefix("hf:")
    return name if name.startswith((".", "/", "~")) or Path(name).exists() else None


def unknown_place(path: str, *, error: str | None) -> dict[str, Any]:
    names = (
        "exists", "writable", "total_bytes", "free_bytes", "free_inodes", "filesystem", "network", "write_bytes_per_s",
        "read_bytes_per_s", "base", "device",
    )  # fmt: skip
    return {"path": str(path), **dict.fromkeys(names), "error": error}


def probe_place(path: Path, *, write: bool) -> dict[str, Any]:
    """write False: rights are asked of the system, and no file is made."""
    place = unknown_place(str(path), error=None)
    path = Path(os.path.abspath(path.expanduser()))  # noqa: PTH100 (no links followed: a broken one is to be seen)
    base, error = nearest_folder(path)
    place |= {"exists": base == path or os.path.lexists(path), "base": base}
    if error is None and base == path.parent and path.is_file():
        place["exists"] = True
        error = "Not a directory" if write else None
    space = os.statvfs(base)
    filesystem = filesystem_of(base)
    place |= {
        "device": base.stat().st_dev,
        "total_bytes": space.f_blocks * space.f_frsize,
        "free_bytes": space.f_bavail * space.f_frsize,
        "free_inodes": space.f_favail if space.f_files else None,  # btrfs and others have no such count
        "filesystem": filesystem,
        "network": None if filesystem is None else filesystem in NETWORK_FILESYSTEMS,
    }
    if error is None:
        error = write_error(base) if write else access_error(path if place["exists"] else base)
    return place | {"writable": error is None, "error": error}


def nearest_folder(path: Path) -> tuple[Path, str | None]:
    """The folder itself or the nearest one above that is there; and what stands in the way, if not mere absence."""
    error = None
    for folder in (path, *path.parents):
        try:
            if folder.is_dir():
                return folder, error
            if folder != path and folder.exists():
                error = "Not a directory"
            elif folder.is_symlink() and not folder.exists():
                error = f"a link to {os.readlink(folder)}, which leads nowhere"  # noqa: PTH115
        except OSError as problem:
            error = problem.strerror
    return Path("/"), error


def write_error(folder: Path) -> str | None:
    try:
        fd = open_nameless(folder)
        try:
            os.write(fd, b"x" * 4096)
            os.fsync(fd)  # a full network disk says so only now
        finally:
            os.close(fd)
    except OSError as error:
        return error.strerror
    return None


def access_error(path: Path) -> str | None:
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        return "Read-only file system"
    return None if os.access(path, os.W_OK) else "Permission denied"


def open_nameless(folder: Path) -> int:
    """A new file open for reading and writing that is in no folder: even if we are killed nothing is left."""
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
    fd, name = tempfile.mkstemp(prefix=".paceline-probe-", dir=folder)
    os.unlink(name)  # noqa: PTH108
    return fd


UNSUPPORTED = {21, 22, 95}  # EISDIR, EINVAL, EOPNOTSUPP: how file systems say that they have no O_TMPFILE


def filesystem_of(path: Path) -> str | None:
    """Type of what is mounted there: the longest mount point on the way, and of equal ones the last."""
    real = os.path.realpath(path)
    best, found = "", None
    for line in (read_text("/proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        point = left.split()[4].encode().decode("unicode_escape")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, found = point, right.split()[0]
    return found


def measure_places(places: dict[str, dict[str, Any]]) -> None:
    """Each device once, by the run folder or the cache; whatever lies on the same device has the same speed."""
    speeds: dict[int, tuple[float | None, float | None]] = {}
    for name in ("run_dir", "cache"):
        place = places.get(name)
        if place and place["writable"] and place["free_bytes"] >= MIN_FREE_BYTES and place["device"] not in speeds:
            speeds[place["device"]] = measure_disk(place["base"])
            for other in places.values():
                if other["device"] == place["device"]:
                    other["write_bytes_per_s"], other["read_bytes_per_s"] = speeds[place["device"]]


def measure_disk(folder: Path) -> tuple[float | None, float | None]:
    """Bytes per second to write, each piece waited for until the disk has it, and to read back past the page cache."""
    content = random.randbytes(CHUNK_BYTES)  # some disks and file systems pack zeros
    try:
        fd = open_nameless(folder)
        try:
            started, piece, written = time.monotonic(), CHUNK_BYTES, 0
            while written < WRITE_BYTES and time.monotonic() - started < WRITE_S:
                for _ in range(piece // CHUNK_BYTES):
                    written += os.write(fd, content)
                os.fdatasync(fd)
                piece = min(2 * piece, WRITE_BYTES - written)  # waiting for each small piece would measure the waiting
            write_s = time.monotonic() - started
            return written / write_s, read_back(fd, written)
        finally:
            os.close(fd)
    except OSError:
        return None, None


def read_back(fd: int, num_bytes: int) -> float | None:
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    started, done = time.monotonic(), 0
    while done < num_bytes and time.monotonic() - started < READ_S:
        chunk = os.pread(fd, CHUNK_BYTES, done)
        if not chunk:
            return None
        done += len(chunk)
    return done / (time.monotonic() - started)


if __name__ == "__main__":
    answer(probe_storage)
