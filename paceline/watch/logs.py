"""
The text of a log for the eye: its end, and the lines that hold a word. Both bounded: a log may have gigabytes.
"""

from pathlib import Path

from paceline.explain.reader_prefix import plain

BLOCK_BYTES = 1 << 20
LINE_CHARS = 4000  # of a longer line only the beginning is given


def read_tail(path: Path, *, max_bytes: int = 256 << 10) -> str:
    """The last whole lines, as a terminal would show them. Empty where there is no such file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            start = max(0, size - max_bytes)
            file.seek(start)
            found = file.read(max_bytes)
    except OSError:
        return ""
    if start:
        found = found[found.find(b"\n") + 1 :]
    return "\n".join(shown(line) for line in found.split(b"\n"))


def search(path: Path, text: str, *, limit: int = 200) -> list[tuple[int, str]]:
    """The last `limit` lines that hold `text`, in whatever case, with their numbers from 1; oldest first."""
    wanted, found, number = text.lower(), list[tuple[int, str]](), 0
    needle = wanted.encode()
    if not wanted:
        return []
    try:
        with path.open("rb") as file:
            rest = b""
            while chunk := file.read(BLOCK_BYTES):
                block = rest + chunk
                end = block.rfind(b"\n") + 1 or len(block) * (len(block) > BLOCK_BYTES)
                block, rest = block[:end], block[end:]
                number = add_hits(found, block, needle, number=number, limit=limit)
            add_hits(found, rest, needle, number=number, limit=limit)
    except OSError:
        return []
    return found


def add_hits(found: list[tuple[int, str]], block: bytes, needle: bytes, *, number: int, limit: int) -> int:
    """number: lines before the block. Returns the lines before the next."""
    lowered = block.decode(errors="replace").lower().encode() if not needle.isascii() else block.lower()
    if needle in lowered:
        for index, line in enumerate(block.split(b"\n")):
            if needle in line.decode(errors="replace").lower().encode():
                found.append((number + index + 1, shown(line)))
        del found[:-limit]
    return number + block.count(b"\n")


def shown(line: bytes) -> str:
    """Of a line that a progress bar has overwritten, its last state; without colours and cursor moves."""
    line = line.rstrip(b"\r").rpartition(b"\r")[2]
    return plain(line[: 4 * LINE_CHARS].decode(errors="replace"))[:LINE_CHARS]
