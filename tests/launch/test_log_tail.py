"""When the end of a rank's log shows that its program has ended, although its process lives."""

import os

import pytest

from paceline.launch.log_tail import uncaught_error
from paceline.launch.stacks import Frame

BOOM = 'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\nValueError: boom\n'
BY_HOOK = "".join(f"[rank1]: {line}\n" for line in [*BOOM.splitlines(), "of two lines"])
GROUP = (
    '  + Exception Group Traceback (most recent call last):\n  |   File "t.py", line 1, in <module>\n'
    "  | ExceptionGroup: two (2 sub-exceptions)\n  +-+---------------- 1 ----------------\n    | ValueError: boom\n"
    "    +---------------- 2 ----------------\n    | KeyError: 'k'\n    +------------------------------------\n"
)
RICH = "╭──── Traceback (most recent call last) ────╮\n│ t.py:1 in <module>  │\n╰─────────╯\nValueError: boom\n"
PEER = BOOM.replace("ValueError: boom", "RuntimeError: [../pair.cc:553] Connection closed by peer [127.0.0.1]:1")
IN_THREAD = f"Exception in thread Thread-1 (prefetch):\n{BOOM}"
AT_EXIT = (
    f"Exception ignored in: <function close at 0x7f>\n{BOOM}"
    "[W1129 18:11:00.1 ProcessGroupNCCL.cpp:1476] Warning: destroy_process_group() was not called\n"
    "/lib/resource_tracker.py:254: UserWarning: There appear to be 1 leaked semaphore objects\n  warnings.warn(\n"
)
THREADING = "/usr/lib/python3.12/threading.py"
SHUTDOWN = (Frame("_shutdown", THREADING, 1590),)
MAIN = Frame("<module>", "/code/train.py", 9)
IN_QUEUE = (Frame("Condition.wait", THREADING, 327), Frame("Queue.get", "/usr/lib/python3.12/queue.py", 171), MAIN)
IN_PREFETCHER = (Frame("Prefetcher.__next__", "/code/data.py", 7), MAIN)
IN_BARRIER = (Frame("barrier", "/v/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", 5356), MAIN)


@pytest.fixture
def logs(tmp_path):
    for rank in range(2):
        (tmp_path / f"{rank}.log").touch()
    return [tmp_path / f"{rank}.log" for rank in range(2)]


@pytest.mark.parametrize(("text", "frames", "error"), [
    (BOOM, SHUTDOWN, "ValueError: boom"),
    (BOOM + AT_EXIT, SHUTDOWN, "ValueError: boom"),
    (BY_HOOK + AT_EXIT, SHUTDOWN, "ValueError: boom"),
    (GROUP, SHUTDOWN, "ExceptionGroup: two (2 sub-exceptions)"),
    ("".join(f"[rank1]: {line}\n" for line in GROUP.splitlines()), SHUTDOWN, "ExceptionGroup: two (2 sub-exceptions)"),
    (RICH, SHUTDOWN, "ValueError: boom"),
    (GROUP + "step 7\n", SHUTDOWN, None),
    (RICH, (MAIN,), None),
    (BOOM, None, "ValueError: boom"),
    (BOOM + "step 7\n", SHUTDOWN, None),  # caught, and the exit hangs
    (BOOM + AT_EXIT + "step 7\n", SHUTDOWN, None),
    (AT_EXIT, SHUTDOWN, None),
    (BOOM, (), None),
    (RICH, (), None),
    (BY_HOOK, (), "ValueError: boom"),
    (BOOM, (MAIN,), None),  # caught
    (PEER, SHUTDOWN, None),
    ("step 7\n", SHUTDOWN, None),
    (IN_THREAD, SHUTDOWN, "ValueError: boom"),
    (IN_THREAD, IN_QUEUE, "ValueError: boom"),
    (IN_THREAD, IN_PREFETCHER, "ValueError: boom"),
    (f" 50%|###   | 5/10{IN_THREAD}", IN_QUEUE, "ValueError: boom"),
    (IN_THREAD + "Compile with `TORCH_USE_CUDA_DSA`\n", IN_QUEUE, "ValueError: boom"),
    (IN_THREAD, IN_BARRIER, None),  # a thread that nobody waits for
    (IN_THREAD, (), None),
    (IN_THREAD + "step 7\n", IN_QUEUE, None),
])  # fmt: skip
def test_an_exception_that_ended_a_program_and_not_its_process_is_told_from_one_that_was_survived(
    logs, text, frames, error
):
    logs[1].write_text("step 6\n" + text)
    assert uncaught_error(logs[1], frames, logs=logs) == error


@pytest.mark.parametrize(
    ("text", "frames", "error"),
    [(BOOM, SHUTDOWN, None), (IN_THREAD, IN_QUEUE, None), (BY_HOOK, SHUTDOWN, "ValueError: boom")],
)
def test_an_error_is_survived_if_another_rank_has_printed_since_unless_torch_itself_calls_it_uncaught(
    logs, text, frames, error
):
    logs[1].write_text(text)
    newer = logs[1].stat().st_mtime_ns + 10**9
    os.utime(logs[0], ns=(newer, newer))
    assert uncaught_error(logs[1], frames, logs=logs) == error
