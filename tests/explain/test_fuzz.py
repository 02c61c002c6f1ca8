"""Whatever a log contains, it is explained: no exception, no hang, and only lines that exist are evidence."""

import json
import random
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.explain.explanation import format_explanation, format_markdown, to_json
from paceline.explain.run_folder import explain

CASES = Path(__file__).parents[3] / "shared" / "data" / "failure-logs" / "cases.jsonl"
PIECES = [
    "Traceback (most recent call last):", '  File "a.py", line 3, in f', "ValueError: boom", "KeyError: 'x'", "[rank1]: ",
    "[default0]:", "0: ", "step 10/100 | loss nan", "step 11/100 | loss 1.0", " 12%|█▏  | 12/100 [00:01<00:10, 1.2it/s]",
    "\r", "\n", "\n\n", "\t", "\x1b[31m", "\ufffd[0m",
    "During handling of the above exception, another exception occurred:", "exitcode  : -9 (pid: 1)",
    "Root Cause (first observed failure):", "  rank      : 99999999999999999999 (local_rank: 1)",
    "CUDA out of memory. Tried to allocate 2.00 GiB", "Signal 11 (SIGSEGV)", "Killed", "ChildFailedError:",
    "No space left on device", "world_size: 99999999999999999", "2026-13-99 25:61:61,999 ", "[Sat Nov 31 10:00:00 2026] ",
    "Rank 123456789012345678901234567890 is running collective", "loss: inf", "step: 99999999999999999999999",
    "100%|██| 5/5", "done", "(pid=1, ip=10.0.0.1) ", "Xid 79", "last enqueued work: -1", "{rank}", "[{x}]", "{", "é" * 3,
    "\x00", "'", '"', "[" * 50, "-" * 300, "\u009b31m\u202e", '{"log": "step 3 loss: nan\\n"}', '{"message": 1, "exc_info": [{}]}',
    '{"event": "x", "exception": [{"exc_type": 1, "frames": 2}], "rank": true, "level": 3}', "Error in sys.excepthook:", "assert x",
    "WorkNCCL(SeqNum=1, OpType=ALLREDUCE, Timeout(ms)=9) ran for 9 milliseconds before timing out", "grad_norm: nan loss: 0",
    "last enqueued work: 1, last completed work: -1", "host:1:2 [0] NCCL INFO comm 0x1 - Init COMPLETE", "AssertionError",
    "Rank 1 is running collective: CollectiveFingerPrint(SequenceNumber=8, OpType=X, TensorShape=[4])",
]  # fmt: skip
MUTATIONS = 3  # of each real log
HANG_S = 30  # a second is usual; a pattern whose time grows with the square of the log's length takes hours
QUICK = settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])


def assert_explained(data):
    """The log is explained in limited time, in every output format, with lines that exist."""
    started = time.process_time()  # of this process alone, so that other work on the machine does not count
    explanation = explain([data])
    assert time.process_time() - started < HANG_S
    assert explanation.cause and explanation.summary and 0 <= explanation.confidence <= 1
    assert json.loads(to_json(explanation))["cause"] == explanation.cause
    assert format_explanation(explanation).startswith(explanation.cause) and format_markdown(explanation)
    num_lines = data.count(b"\n") + 1
    assert all(1 <= item.line <= num_lines for item in (*explanation.evidence, *explanation.consequences))


@QUICK
@given(st.binary(max_size=2000))
def test_any_bytes_are_explained(data):
    explain([data])


@QUICK
@given(st.lists(st.sampled_from(PIECES), max_size=60))
def test_any_mixture_of_log_lines_is_explained(pieces):
    assert_explained("".join(pieces).encode())


@QUICK
@given(
    st.lists(st.tuples(st.sampled_from(["", "[rank0]: ", "[rank1]: ", "2: "]), st.sampled_from(PIECES)), max_size=60),
    st.integers(1, 50),
)
def test_ranks_mixed_line_by_line_and_cut_into_chunks_are_explained(lines, size):
    data = "\n".join(prefix + piece for prefix, piece in lines).encode()
    explain([data[at : at + size] for at in range(0, len(data), size)])
    assert_explained(data)


@pytest.mark.parametrize(
    "data",
    [
        b"a" * 1_000_000,
        b"\r" * 100_000,
        b"Error " * 50_000,
        b"[" * 100_000 + b"error",
        b'  File "' * 20_000,
        b"Error: " + b"x: " * 50_000,
        b"CUDA out of memory " + b"1" * 200_000,
        ("During handling of the above exception\nValueError: x\n" * 5_000).encode(),
        ("Traceback (most recent call last):\n" * 20_000).encode(),
        "".join(f"[rank{n}]: Traceback (most recent call last):\n" for n in range(20_000)).encode(),
        "".join(f"[rank{n % 999}]: ValueError: failed {n}\n" for n in range(10_000)).encode(),
        "".join(f"error {chr(97 + n % 26) * (2 * n % 999)}\n" for n in range(500)).encode(),
    ],
    ids=range(12),
)
def test_a_hostile_log_is_explained_in_limited_time(data):
    assert_explained(data)


def mutated(text, chance):
    """The log cut anywhere, shuffled between ranks, or with random bytes in it."""
    lines = text.splitlines()
    kind = chance.randrange(5)
    if kind == 0:
        return text[chance.randrange(len(text) + 1) :].encode()
    if kind == 1:
        return text[: chance.randrange(len(text) + 1)].encode()
    if kind == 2:
        ranks = [[f"[rank{rank}]: {line}" for line in lines] for rank in range(3)]
        mixed = []
        while any(ranks):
            mixed.append(chance.choice([lines for lines in ranks if lines]).pop(0))
        return "\n".join(mixed).encode()
    if kind == 3:
        data = bytearray(text.encode())
        for _ in range(len(data) // 50 + 1):
            data[chance.randrange(len(data))] = chance.randrange(256)
        return bytes(data)
    chance.shuffle(lines)
    return "\r\n".join(lines).encode("utf-16")


def test_real_logs_that_are_cut_shuffled_or_damaged_are_explained():
    if not CASES.is_file():
        pytest.skip(f"no {CASES}")
    chance = random.Random(5)
    logs = [json.loads(line)["log"] for line in CASES.read_text(encoding="utf-8").splitlines()]
    for text in logs:
        for _ in range(MUTATIONS):
            explain([mutated(text, chance)])
