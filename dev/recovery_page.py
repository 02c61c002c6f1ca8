"""Prints docs/recovery.md, the rules of paceline/launch/policy.py as a page: `python dev/recovery_page.py > docs/recovery.md`."""

from collections.abc import Iterator
from textwrap import fill

from paceline.launch.policy import CRASHES, RULES, TRAINER_CRASHES, UNAVAILABLE_WAIT_S, WAITS_S

INTRO = """\
# How paceline recovers by itself

Generated from the code: `python dev/recovery_page.py > docs/recovery.md`.

When an attempt of `train`, `resume` or `run` ends before its work is done, paceline explains it (`paceline explain RUN`). The
first row that applies then decides what happens next. Explanation and decision are written to `events.jsonl` (`verdict`,
`decision`) and printed, one line each. `--no-recover` stops after the first attempt, `--max-attempts N` after the Nth. Ctrl-C ends
a wait at once.
"""

NOTES = """\
The wait is {waits} s after 0, 1, 2, 3 and more attempts in a row without progress, and at least {long:.0f} s where something is
unavailable.

The next attempt resumes from the newest intact checkpoint, so a broken run and an unbroken one end with the same weights. Two
actions change how a step is divided, `smaller` and `fewer-ranks`. They keep the rows of each step, total_batch_size and the
learning rates. `plan.json` then has the values in use, `config.toml` the requested ones. Sizes that did not fit are remembered for
this machine and model (`too_large.jsonl` in the cache folder): no later plan chooses them unless the device has more memory.

A script is started with the same arguments. It finds the number of the attempt in PACELINE_ATTEMPT, from 1, and the run folder,
a place for its own checkpoints, in PACELINE_RUN; `paceline resume` starts it again there. What its author must fix is never
retried. A crash below Python is retried once:
{crashes}.

paceline's own trainer runs no code of the user's, so it retries these once as well: {trainer}.
Where it trains on GPUs and the host ran out of memory, a smaller micro-batch would not help: the next attempt is the same.
"""


def format_docs() -> str:
    """Returns the text of docs/recovery.md."""
    return "\n".join([INTRO, *_table(), "", format_notes()])


def format_notes() -> str:
    """Returns the part of the page below the table."""
    waits = ", ".join(f"{seconds:.0f}" for seconds in WAITS_S)
    crashes = fill(", ".join(sorted(CRASHES)), width=120, break_on_hyphens=False)
    trainer = ", ".join(sorted(TRAINER_CRASHES - CRASHES))
    return NOTES.format(waits=waits, long=UNAVAILABLE_WAIT_S, crashes=crashes, trainer=trainer)


def _table() -> Iterator[str]:
    waits = {"none": "", "back-off": "0 to 60 s", "long": "30 to 60 s"}
    yield "| rule | when | what is done | wait |"
    yield "|---|---|---|---|"
    for rule in RULES:
        yield f"| {rule.id} | {rule.when} | {rule.action} | {waits[rule.wait]} |"


if __name__ == "__main__":
    print(format_docs(), end="")
