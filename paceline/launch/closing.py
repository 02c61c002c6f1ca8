"""
The last lines on the screen: what came of an attempt, where it lies, what to type next.
"""

import textwrap

from paceline.launch.attempts import Ending
from paceline.launch.digest import format_explained
from paceline.plan.planner import Plan
from paceline.rundir import RunDir, read_json_lines
from paceline.units import format_duration


def closing_lines(
    run: RunDir, ending: Ending, plan: Plan, *, step: int, val_bpb: float | None, seconds: float, spent: str
) -> str:
    """step, val_bpb: the last of the run. seconds: since the command began. spent: where the run's time went."""
    outcome = ending.outcome
    if outcome.state == "failed":
        return f"\ntime    {spent}\n\n{format_explained(outcome, run, ending.explanation)}"
    bpb = "n/a" if val_bpb is None else f"{val_bpb:.4f}"
    if outcome.state == "interrupted":
        saved = max((e["step"] for e in read_json_lines(run.events) if e.get("event") == "checkpoint"), default=None)
        kept = f"checkpoint at step {saved:,}" if saved else "before the first checkpoint"
        head = f"\ninterrupted after {format_duration(seconds)}, {kept}"
        return f"{head}\ntime    {spent}\nnext    paceline resume {run.path}"
    return "\n".join(
        [
            *last_sample(run, step),
            "",
            f"done    {step:,} steps in {format_duration(seconds)}, val_bpb {bpb}",
            f"time    {spent}",
            f"run     {run.path}",
            f'next    paceline sample {run.path} --prompt "..."',
            f"        paceline eval {run.path}",
            f"        paceline resume {run.path} --num-steps {2 * plan.num_steps}",
        ]
    )


def last_sample(run: RunDir, step: int) -> list[str]:
    """What the model wrote at the end, as it stands in samples/."""
    if not run.sample(step).is_file():
        return []
    text = run.sample(step).read_text(encoding="utf-8")
    shown = "".join(each if each.isprintable() or each == "\n" else " " for each in text).rstrip()
    return [
        "",
        f"sample, the first lines held-out text ({run.sample(step)}):",
        textwrap.indent(shown, "  | ", lambda _: True),
    ]
