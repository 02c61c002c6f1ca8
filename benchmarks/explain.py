"""
The score of `paceline explain` on labelled logs.

    python benchmarks/explain.py --cases FILE.jsonl [--bar 92] [--only even|odd] [--disputed ID ...] [--wrong] [--json]

FILE has one object a line: id, log, cause, also, and rank where it is known. Right is the cause or one of `also`. Prints
accuracy overall and per cause, confusion, false alarms on healthy logs, wrong ranks, accuracy by confidence, and MB/s.
--disputed: cases with a doubtful label, which are counted separately. Exit code 1 below the bar, or with a false alarm.
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
from paceline.explain.run_folder import explain

BINS = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@dataclass(frozen=True)
class Scored:
    """One case and its explanation."""

    id: str
    label: str
    cause: str
    right: bool
    confidence: float
    wrong_rank: bool | None  # None if the label or the explanation has no rank
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
    explanation = explain([log])
    seconds = time.perf_counter() - started
    has_rank = case.get("rank") is not None
    return Scored(
        id=case["id"],
        label=case["cause"],
        cause=explanation.cause,
        right=explanation.cause in (case["cause"], *case.get("also", ())),
        confidence=explanation.confidence,
        wrong_rank=explanation.rank != case["rank"] if has_rank and explanation.rank is not None else None,
        no_rank=has_rank and explanation.rank is None,
        seconds=seconds,
        num_bytes=len(log),
        summary=explanation.summary,
    )


def totals(cases: Sequence[Scored]) -> dict[str, Any]:
    alarms = [case.id for case in cases if case.label == "healthy" and not case.right]
    missed = [case.id for case in cases if case.label != "healthy" and case.cause == "healthy"]
    return {
        "cases": len(cases),
        "right": sum(case.right for case in cases),
        "accuracy": sum(case.right for case in cases) / max(1, len(cases)),
        "false_alarms": alarms,
        "called_healthy": missed,
        "unknown": sum(case.cause == "unknown" for case in cases),
        "wrong_ranks": [case.id for case in cases if case.wrong_rank],
        "right_ranks": sum(case.wrong_rank is False for case in cases),
        "no_rank": sum(case.no_rank for case in cases),
        "mb_per_s": sum(case.num_bytes for case in cases) / 1e6 / max(1e-9, sum(case.seconds for case in cases)),
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
        "confusion (label -> explanation)",
        *(f"  {count:3} {label} -> {cause}" for (label, cause), count in confusion(scored).most_common()),
        "",
        "confidence  cases  right",
        *format_calibration(scored),
    ]
    if disputed:
        lines += ["", f"disputed labels: {sum(case.right for case in disputed)} of {len(disputed)} as labelled"]
    if show_wrong:
        lines += [
            "",
            *(
                f"  {case.id} {case.label} -> {case.cause} ({case.confidence}) {case.summary[:150]}"
                for case in scored
                if not case.right
            ),
        ]
    return "\n".join(lines)


def format_causes(scored: Sequence[Scored]) -> list[str]:
    by_cause: dict[str, list[Scored]] = defaultdict(list)
    for case in scored:
        by_cause[case.label].append(case)
    width = max(map(len, by_cause), default=0)
    return [
        f"{cause:<{width}}  {sum(case.right for case in group):3} of {len(group):3}"
        for cause, group in sorted(by_cause.items())
    ]


def confusion(scored: Sequence[Scored]) -> Counter[tuple[str, str]]:
    return Counter((case.label, case.cause) for case in scored if not case.right)


def format_calibration(scored: Sequence[Scored]) -> list[str]:
    """Of the explanations with a confidence of 70 to 80 %, 70 to 80 % should be right."""
    lines = []
    for low, high in pairwise(BINS):
        group = [case for case in scored if low <= case.confidence < high]
        if group:
            lines.append(
                f"{low:.0%} to {high:.0%}".ljust(12)
                + f"{len(group):5}  {sum(case.right for case in group) / len(group):.0%}"
            )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, required=True)
    parser.add_argument("--bar", type=float, default=0.0, help="percentage that must be right")
    parser.add_argument("--only", choices=("even", "odd"), help="cases at even or odd positions in the file")
    parser.add_argument("--disputed", nargs="*", default=[])
    parser.add_argument("--wrong", action="store_true", help="list the wrong cases")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    cases = [json.loads(line) for line in args.cases.read_text(encoding="utf-8").splitlines() if line.strip()]
    cases = cases[{"even": 0, "odd": 1}[args.only] :: 2] if args.only else cases
    all_scored = score_cases(cases)
    scored = [case for case in all_scored if case.id not in args.disputed]
    disputed = [case for case in all_scored if case.id in args.disputed]
    sums = totals(scored)
    if args.json:
        print(json.dumps({**sums, "scored": [asdict(case) for case in all_scored]}, indent=1))
    else:
        print(format_score(scored, disputed=disputed, show_wrong=args.wrong))
    return int(100 * sums["accuracy"] < args.bar or (args.bar > 0 and bool(sums["false_alarms"])))


if __name__ == "__main__":
    sys.exit(main())
