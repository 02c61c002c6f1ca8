"""
Small files that the kernel writes, under /proc and /sys: there or not, readable or not, a number or not.
"""

import os
from pathlib import Path


def read_text(path: Path | str) -> str | None:
    """A file's text without the last newline; None where it is not there or cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").rstrip("\n")
    except OSError:
        return None


def read_int(path: Path | str) -> int | None:
    text = read_text(path)
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def names_in(folder: Path | str) -> list[str]:
    """Sorted names in a folder; none where there is no such folder."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
