"""
One run at length: its state, what each attempt ended of and what was decided then, where its time went. Reads files only.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.rundir import RunDir, read_json_lines
from paceline.watch.goodput import Goodput, format_goodput, format_line, goodput_of
from paceline.watch.status import RunStatus, format_steps, run_status


@dataclass(frozen=True)
class AttemptStory:
    """One attempt. What is not known is None."""

    attempt: int
    time: str
    state: str | None
    cause: str | None
    summary: str | None
    action: str | None  # decided at its end
    why: str | None


@dataclass(frozen=True)
class RunStory:
    status: RunStatus
    attempts: tuple[AttemptStory, ...]
    goodput: Goodput

    def to_json(self) -> dict[str, Any]:
        attempts = [asdict(each) for each in self.attempts]
        return {**self.status.to_json(), "each_attempt": attempts, "goodput": self.goodput.to_json()}


def find_any_run(word: str, *, runs_dir: str = "runs") -> RunDir:
    """A training run's or a script's folder, or its name under runs/."""
    for path in (Path(word), Path(runs_dir) / word):
        if (path / "config.toml").is_file():
            return RunDir(path)
    raise PacelineError(f"no run {word}: no config.toml is in it", fix="paceline runs lists them")


def tell_run(run: RunDir) -> RunStory:
    return RunStory(run_status(run), tuple(attempts_of(list(read_json_lines(run.events)))), goodput_of(run))


def attempts_of(events: Sequence[dict[str, Any]]) -> list[AttemptStory]:
    told: dict[int, dict[str, Any]] = {}
    for event in events:
        number = event.get("attempt", 0)
        if event.get("event") == "attempt":
            told[number] = {"time": event["time"], **dict.fromkeys(("state", "cause", "summary", "action", "why"))}
        elif number in told:
            names = {"attempt_ended": ("state",), "verdict": ("cause", "summary"), "decision": ("action", "why")}
            told[number] |= {name: event.get(name) for name in names.get(str(event.get("event")), ())}
    return [AttemptStory(number, **values) for number, values in told.items()]


def format_story(story: RunStory) -> str:
    status = story.status
    bpb = "n/a" if status.val_bpb is None else f"{status.val_bpb:.4f}"
    of_steps = "" if status.command else f", step {format_steps(status)}, val_bpb {bpb}"
    lines = [f"{status.name}: {status.state}{of_steps}", f"run     {status.path}", ""]
    for each in story.attempts:
        lines.append(
            f"attempt {each.attempt}, {each.time[:19].replace('T', ' ')} UTC: {each.state or 'no end was noted'}"
        )
        if each.summary:
            lines.append(f"  {each.cause}: {each.summary}")
        if each.action:
            lines.append(f"  {each.action}: {each.why}")
    return "\n".join([*lines, "", *format_goodput(story.goodput), "", f"time    {format_line(story.goodput)}"])
