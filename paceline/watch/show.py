"""
One run at length: its state, what each attempt ended of and what was decided then, where its time went. Reads files only.
"""

from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.rundir import RunDir
from paceline.watch.goodput import format_goodput, format_line
from paceline.watch.snapshot import Snapshot


def find_any_run(word: str, *, runs_dir: str = "runs") -> RunDir:
    """A training run's or a script's folder, or its name under runs/."""
    named = Path(word)
    if named.name in ("", ".."):
        named = named.resolve()  # a run is called by the name of its folder
    for path in (named, Path(runs_dir) / word):
        if (path / "config.toml").is_file():
            return RunDir(path)
    raise PacelineError(f"no run {word}: no config.toml is in it", fix="paceline runs lists them")


def story_json(snapshot: Snapshot) -> dict[str, Any]:
    """For programs: all of it; `attempts` is their number, as in the list of runs."""
    told = snapshot.to_json()
    return {**told, "attempts": len(snapshot.attempts), "each_attempt": told["attempts"]}


def format_story(snapshot: Snapshot) -> str:
    bpb = "n/a" if snapshot.val_bpb is None else f"{snapshot.val_bpb:.4f}"
    steps = f"{snapshot.step:,}" + (f"/{snapshot.num_steps:,}" if snapshot.num_steps else "")
    of_steps = f", step {steps}, val_bpb {bpb}" if snapshot.kind == "training" else ""
    lines = [f"{snapshot.name}: {snapshot.state}{of_steps}", f"run     {snapshot.path}", ""]
    for each in snapshot.attempts:
        lines.append(
            f"attempt {each.attempt}, {each.time[:19].replace('T', ' ')} UTC: {each.state or 'no end was noted'}"
        )
        if each.summary:
            lines.append(f"  {each.cause}: {each.summary}")
        if each.action:
            lines.append(f"  {each.action}: {each.why}")
    spent = snapshot.goodput
    return "\n".join([*lines, *(["", *format_goodput(spent), "", f"time    {format_line(spent)}"] if spent else [])])
