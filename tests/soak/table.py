"""
What came of all faults, as the tables of docs/reliability.md. Pure.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from soak.audit import Judged
from soak.faults import INTERVAL, KINDS, PHASES, RANKS

INTRO = """\
# What a run survives

Made by `make soak`: real runs of `paceline train` on 2 and 3 CPU processes, and faults that strike one rank, or what holds
the ranks, at an exact place of an exact step. After each run: its final weights and optimizer states have the bits of an
undisturbed run of as many ranks; no process is left; metrics.jsonl has every step once and in order; every checkpoint is
whole. A fault counts as recovered when its run came to its end with all of this.
"""

NOTES = f"""\
`noticed` and `next step` are seconds from the fault: medians, and the longest. `next step` is the end of the first step after
it, on a machine with other work. A stopped rank is known by its silence (`--hang-after 8`). Where the command itself is killed,
`noticed` is when its last worker had saved and ended. A full disk and a slow rank end no attempt; nor does damage done before a
checkpoint is read.

A checkpoint is saved every {INTERVAL} steps, in the background: that is what may be lost, and the steps of a save that was still
under way; where the newest is damaged, those since the one before it. Less memory here means activation checkpointing, which
changes no bit. Fewer rows at once, or fewer ranks, change the order of summation: such runs
are compared with one that began so (tests/launch/test_recovery.py).
"""


@dataclass(frozen=True)
class Result:
    judged: tuple[Judged, ...]
    problems: tuple[str, ...]
    seed: int
    num_runs: int
    seconds: float
    notes: tuple[str, ...]

    @property
    def recovered(self) -> int:
        """Faults of runs with which nothing was wrong."""
        broken = {text.split(":")[0] for text in self.problems}
        return sum(each.run not in broken for each in self.judged)


def format_page(result: Result) -> str:
    count = len(result.judged)
    right = sum(each.cause_right for each in result.judged)
    lines = [
        INTRO,
        f"{count} faults in {result.num_runs} runs, seed {result.seed}, {result.seconds / 60:.0f} minutes:"
        f" {result.recovered} recovered, cause right in {right}.",
        lost_line(result.judged),
        *result.notes,
        "",
        format_table(result),
        "",
        NOTES,
        "How many of each struck where:",
        "",
        *grid(result.judged),
        "",
        "To repeat it: `make soak`; `make soak ARGS='--seed 2 --faults 24 --only sigkill,disk'` takes others. A short form with",
        "every kind once is part of `make test`.",
    ]
    if result.problems:
        lines += ["", "What was wrong:", "", *(f"- {text}" for text in result.problems)]
    return "\n".join(lines) + "\n"


def lost_line(judged: Sequence[Judged]) -> str:
    lost = [each.lost_steps for each in judged if each.lost_steps is not None]
    more = sum(steps > INTERVAL for steps in lost)
    within = f"{len(lost) - more} cost no more than the {INTERVAL} steps from one checkpoint to the next"
    return f"Of {len(lost)} that ended an attempt, {within}."


def format_table(result: Result) -> str:
    columns = ("fault", "times", "cause right", "noticed, s", "longest", "steps lost, most", "next step, s", "longest")
    rows = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for kind, spec in KINDS.items():
        if found := [each for each in result.judged if each.fault.kind == kind]:
            rows.append(row(spec.what, found))
    return "\n".join([*rows, row("all", result.judged)])


def row(what: str, found: Sequence[Judged]) -> str:
    right = sum(each.cause_right for each in found)
    lost = [each.lost_steps for each in found if each.lost_steps is not None]
    notice = spread([each.notice_s for each in found if each.notice_s is not None])
    again = spread([each.again_s for each in found if each.again_s is not None])
    return f"| {what} | {len(found)} | {right} | {notice} | {max(lost) if lost else ''} | {again} |"


def spread(values: Sequence[float]) -> str:
    return f"{median(values):.1f} | {max(values):.1f}" if values else " | "


def grid(judged: Sequence[Judged]) -> list[str]:
    names = [*PHASES, *(f"{rank} rank" for rank in RANKS), "of 2", "of 3"]
    rows = ["| fault | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for kind, spec in KINDS.items():
        found = [each for each in judged if each.fault.kind == kind]
        count = Counter(
            [each.fault.phase for each in found]
            + [f"{each.fault.rank} rank" for each in found]
            + [f"of {each.nproc}" for each in found]
        )
        rows.append(f"| {spec.what} | " + " | ".join(str(count[name]) for name in names) + " |")
    return rows
