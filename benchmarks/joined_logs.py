"""
Files with two runs, made of labelled logs: one that failed, and one that is healthy.

Each pair is joined in both orders, with the shell's echo of a command (`set -x`) between the two and without it. The answer is
right if it is that of the last run. Where a healthy run follows a failed one, the failed one's cause is to be told beside it.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any

MAX_BYTES = 100_000  # of one log
ECHO = "+ python train.py --config next.yaml\n"
ORDERS = ("failed, healthy", "healthy, failed")


def join_pairs(cases: Sequence[Mapping[str, Any]], *, num_pairs: int, seed: int) -> list[dict[str, Any]]:
    """Cases of joined logs, four for each of the pairs, which are drawn at random; all logs are explained rightly alone."""
    draw = random.Random(seed)
    short = [case for case in cases if len(case["log"]) <= MAX_BYTES and case["cause"] != "unknown"]
    failed = [case for case in short if case["cause"] != "healthy" and "healthy" not in case.get("also", ())]
    healthy = [case for case in short if case["cause"] == "healthy"]
    if not failed or not healthy:
        return []
    pairs = [(draw.choice(failed), draw.choice(healthy)) for _ in range(num_pairs)]
    return [
        join(first, last, between=between, kind=f"{order}, {name}")
        for order, swap in zip(ORDERS, (1, -1), strict=True)
        for name, between in (("plain", ""), ("echo", ECHO))
        for first, last in (pair[::swap] for pair in pairs)
    ]


def join(first: Mapping[str, Any], last: Mapping[str, Any], *, between: str, kind: str) -> dict[str, Any]:
    """The case of a file in which one log follows another: labelled as the last one. earlier: the cause of the first one."""
    text = first["log"].rstrip("\n") + "\n" + between + last["log"]
    labels = {"cause": last["cause"], "also": list(last.get("also", ()))}
    earlier = None if first["cause"] == "healthy" else [first["cause"], *first.get("also", ())]
    return {
        "id": f"{first['id']}+{last['id']}",
        "file": kind,
        "source": kind,
        "log": text,
        "earlier": earlier,
        **labels,
    }
