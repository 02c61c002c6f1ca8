"""
The end of a rank's log: its last lines, the exception in them, and whether that exception ended the program although its process
lives on.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from paceline.launch.stacks import Frame, has_ended, waits_for_thread

LOG_TAIL_BYTES = 1 << 16  # a log may have grown to gigabytes
# what a healthy rank prints when it has lost a peer: words of torch.distributed, gloo and NCCL; a program has other connections too
PEER_LOST = re.compile(
    r"(Dist\w+Error: |RuntimeError: (\[[^\n\]]+\] )?)((read|write|recv|send)[^\n]{0,200}: )?"
    r"(Connection (closed|reset) by peer|Broken pipe)"
    r"|typically caused by a remote worker (crashing|hanging)|connectFullMesh failed"
    r"|ncclRemoteError|remote process exited|NCCL communicator was aborted"
    r"|(DistNetworkError|DistStoreError)(?!: The server socket has failed)"
    r"|Timed out waiting \d+ms|Some NCCL operations have failed or timed out"
    r"|Watchdog caught collective operation timeout",
    re.IGNORECASE,
)
TORCH_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # before each line of a traceback once there is a process group
# a progress bar has no newline
BEHIND_A_BAR = re.compile(r"(?<=[^\s\"'`])(?=Traceback \(most recent call last\):$)", re.MULTILINE)
TRACEBACK = re.compile(  # Python's, its group's or rich's
    r"\s*(\+ Exception Group )?Traceback \(most recent call last\):|[╭+][─-]+ Traceback \(most recent call last\) [─-]+[╮+]"
)
ERROR_START = re.compile(rf"{TRACEBACK.pattern}|\s*Fatal Python error: ")
FRAMES = (" ", "│", "╰", "|", "+")  # how the lines between a traceback's header and its exception begin
GROUP_MARGIN = "  | "
# the exceptions that Python reports and ignores
IGNORED = re.compile(
    r"^(Exception ignored (in|while)|Error in atexit)[^\n]*\n(Traceback [^\n]*\n( [^\n]*\n)*[^\n]+\n)?", re.MULTILINE
)
# what may follow the line of an exception: those in its group, the rest of a message of torch's, and warnings at the exit
BEHIND_ERROR = re.compile(
    r"\s*$|\[rank\d+\]:|  +[|+]|\[?[WE]\d{4} |\S+:\d+: (\w*Warning: |warnings\.)|  warnings\.warn\("
    r"|CUDA kernel errors might|For debugging consider|Compile with |Search for `?cuda|Device-side assert"
)


def uncaught_error(log: Path, frames: Sequence[Frame] | None, *, logs: Iterable[Path]) -> str | None:
    """Returns 'ValueError: boom', which ended a program, or a thread for which it waits, and not its process; None if unsure.

    The log must end with its traceback. Only torch's hook for uncaught exceptions prefixes one; any other may have been caught, so
    no rank may have printed a line since. frames: of the main thread; None: they are not asked. logs: of all ranks.
    """
    lines = IGNORED.sub("", "\n".join([*read_tail_with_prefixes(log), ""])).splitlines()
    texts = [TORCH_PREFIX.sub("", line) for line in lines]
    start = next((i for i in reversed(range(len(texts))) if TRACEBACK.match(texts[i])), len(texts))
    end = find_exception(texts, start)
    if end is None or PEER_LOST.search(texts[end]) or not all(map(BEHIND_ERROR.match, lines[end + 1 :])):
        return None
    is_thread = start > 0 and "Exception in thread " in lines[start - 1]
    is_hook = texts[start] != lines[start]
    is_ended = has_ended(frames) if frames else is_hook  # without stacks nothing else is certain
    is_over = frames is None or (waits_for_thread(frames) if is_thread else is_ended)
    is_newest = not any(path.exists() and path.stat().st_mtime_ns > log.stat().st_mtime_ns for path in logs)
    return texts[end].removeprefix(GROUP_MARGIN) if is_over and (is_hook or is_newest) else None


def read_log_tail(path: Path) -> list[str]:
    """Returns the last lines of a log, at most LOG_TAIL_BYTES, without torch's rank prefix; empty where there is no log."""
    return [TORCH_PREFIX.sub("", line) for line in read_tail_with_prefixes(path)]


def read_tail_with_prefixes(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return BEHIND_A_BAR.sub("\n", text).splitlines()


def exception_line(traceback: str) -> str:
    """Returns 'ValueError: boom', the first line below the frames."""
    lines = traceback.strip("\n").splitlines()
    at = find_exception(lines, 0) if TRACEBACK.match(lines[0]) else None
    return lines[at or 0].removeprefix(GROUP_MARGIN).strip()


def find_exception(lines: Sequence[str], start: int) -> int | None:
    """Returns the index of the exception of the traceback that begins at start; None where the lines end before it."""
    texts = [line.removeprefix(GROUP_MARGIN) for line in lines[start + 1 :]]
    return next((start + 1 + i for i, text in enumerate(texts) if text.strip() and not text.startswith(FRAMES)), None)
