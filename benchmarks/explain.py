"""
The score of `paceline explain` on labelled logs.

    python benchmarks/explain.py --cases FILE.jsonl [--bar 92] [--only even|odd] [--disputed ID ...] [--wrong] [--json]

FILE has one object a line: id, log, cause, also, and rank where it is known. Right is the cause or one of `also`. Prints
accuracy, per cause, confusion, false alarms on healthy logs, wrong ranks, how often a given confidence was right, and MB/s.
--disputed: cases whose label is in doubt, counted apart. Exit code 1 below the bar, or with a false alarm.
"""

import argparse
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.explain.catalogue import load_catalogue
from paceline.explain.explain import explain

BINS = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@dataclass(frozen=True)
class Scored:
    """One case and what was said of it."""

    id: str
    wanted: str
    said: str
    right: bool
    confidence: float
    wrong_rank: bool | None  # None where the case names no rank, or none was given
    no_rank: bool
    seconds: float
    num_bytes: int
    summary: str


def score_cases(cases: Sequence[dict[str, Any]]) -> list[Scored]:
    load_catalogue()
    return [score(case) for case in cases]


def score(case: dict[str, Any]) -> Scored:
    log = case["log"].encode()
    started = time.perf_counter()
    said = explain([log])
    seconds = time.perf_counter() - started
    ranked = case.get("rank") is not None
    return Scored(
        id=case["id"],
        wanted=case["cause"],
        said=said.cause,
        right=said.cause in (case["cause"], *case.get("also", ())),
        confidence=said.confidence,
        wrong_rank=said.rank != case["rank"] if ranked and said.rank is not None else None,
        no_rank=ranked and said.rank is None,
        seconds=seconds,
        num_bytes=len(log),
        summary=said.summary,
    )


def totals(scored: Sequence[Scored]) -> dict[str, Any]:
    alarms = [each.id for each in scored if each.wanted == "healthy" and not each.right]
    missed = [each.id for each in scored if each.wanted != "healthy" and each.said == "healthy"]
    return {
        "cases": len(scored),
        "right": sum(each.right for each in scored),
        "accuracy": sum(each.right for each in scored) / max(1, len(scored)),
        "false_alarms": alarms,
        "called_healthy": missed,
        "unknown": sum(each.said == "unknown" for each in scored),
        "wrong_ranks": [each.id for each in scored if each.wrong_rank],
        "right_ranks": sum(each.wrong_rank is False for each in scored),
        "no_rank": sum(each.no_rank for each in scored),
        "mb_per_s": sum(each.num_bytes for each in scored) / 1e6 / max(1e-9, sum(each.seconds for each in scored)),
    }


def format_score(scored: Sequence[Scored], *, disputed: Sequence[Scored], show_wrong: bool) -> str:
    sums = totals(scored)
    lines = [
        f"{sums['right']} of {sums['cases']} right, {sums['accuracy']:.1%}; {sums['unknown']} unknown,"
        f" {len(sums['called_healthy'])} failures called healthy",
        f"false alarms on healthy logs: {len(sums['false_alarms'])} {' '.join(sums['false_alarms'])}".rstrip(),
        f"ranks: {sums['right_ranks']} right, {len(sums['wrong_ranks'])} wrong, {sums['no_rank']} not given",
        f"{sums['mb_per_s']:.1f} MB/s on excerpts",
        "",
        *format_causes(scored),
        "",
        "confusion (wanted -> said)",
        *(f"  {count:3} {wanted} -> {said}" for (wanted, said), count in confusion(scored).most_common()),
        "",
        "confidence  said  right",
        *format_calibration(scored),
    ]
    if disputed:
        lines += ["", f"label in doubt: {sum(each.right for each in disputed)} of {len(disputed)} as labelled"]
    if show_wrong:
        lines += [
            "",
            *(
                f"  {each.id} {each.wanted} -> {each.said} ({each.confidence}) {each.summary[:150]}"
                for each in scored
                if not each.right
            ),
        ]
    return "\n".join(lines)


def format_causes(scored: Sequence[Scored]) -> list[str]:
    by_cause: dict[str, list[Scored]] = defaultdict(list)
    for each in scored:
        by_cause[each.wanted].append(each)
    width = max(map(len, by_cause), default=0)
    return [
        f"{cause:<{width}}  {sum(each.right for each in found):3} of {len(found):3}"
        for cause, found in sorted(by_cause.items())
    ]


def confusion(scored: Sequence[Scored]) -> Counter[tuple[str, str]]:
    return Counter((each.wanted, each.said) for each in scored if not each.right)


def format_calibration(scored: Sequence[Scored]) -> list[str]:
    """What is said with 70 to 80 % should be right in 70 to 80 %."""
    lines = []
    for low, high in pairwise(BINS):
        found = [each for each in scored if low <= each.confidence < high]
        if found:
            lines.append(
                f"{low:.0%} to {high:.0%}".ljust(12)
                + f"{len(found):4}  {sum(each.right for each in found) / len(found):.0%}"
            )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, required=True)
    parser.add_argument("--bar", type=float, default=0.0, help="per cent that must be right")
    parser.add_argument("--only", choices=("even", "odd"), help="cases at even or odd places of the file")
    parser.add_argument("--disputed", nargs="*", default=[])
    parser.add_argument("--wrong", action="store_true", help="list what is wrong")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    cases = [json.loads(line) for line in args.cases.read_text(encoding="utf-8").splitlines() if line.strip()]
    cases = cases[{"even": 0, "odd": 1}[args.only] :: 2] if args.only else cases
    everything = score_cases(cases)
    scored = [each for each in everything if each.id not in args.disputed]
    disputed = [each for each in everything if each.id in args.disputed]
    sums = totals(scored)
    if args.json:
        print(json.dumps({**sums, "scored": [asdict(each) for each in everything]}, indent=1))
    else:
        print(format_score(scored, disputed=disputed, show_wrong=args.wrong))
    return int(100 * sums["accuracy"] < args.bar or (args.bar > 0 and bool(sums["false_alarms"])))


if __name__ == "__main__":
    sys.exit(main())
