"""The file systems that this process has mounted, as Linux lists them (proc_pid_mountinfo(5)), and the space on them."""

import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ESCAPED = re.compile(r"\\(\d{3})")  # a space, tab, newline or backslash, in octal


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
