"""
What ran out of memory here: sizes that a run could not hold, which no later plan chooses by itself while the device has no more.

One line for each in too_large.jsonl in the cache folder. Rows that the user sets are the user's. No torch.
"""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from paceline.plan.activations import MemorySetup
from paceline.plan.fit import TooLarge
from paceline.plan.planner import Plan, memory_setup
from paceline.rundir import append_json_line, read_json_lines, utc_now

FILE_NAME = "too_large.jsonl"
SAME = (
    "model",
    "device",
    "optimizer",
    "shard",
    "precision",
    "attention",
    "compiled",
)  # of a setup that it says something of


@dataclass(frozen=True)
class Failure:
    """One attempt that ran out of memory."""

    device_name: str
    setup: Mapping[str, Any]  # MemorySetup as JSON
    card_bytes: int | None  # None: not known
    source: str  # the run's name
    time: str

    def covers(self, device_name: str, setup: MemorySetup, card_bytes: int | None) -> bool:
        """Such a setup needs as much, and has no more."""
        wanted = asdict(setup)
        alike = device_name == self.device_name and all(wanted[name] == self.setup[name] for name in SAME)
        return (
            alike
            and setup.device_batch_size >= self.setup["device_batch_size"]
            and setup.logits_budget_bytes >= self.setup["logits_budget_bytes"]
            and setup.activation_checkpointing <= self.setup["activation_checkpointing"]
            and setup.world_size <= self.setup["world_size"]  # of which each holds the larger part of the states
            and not (card_bytes and self.card_bytes and card_bytes > self.card_bytes)
        )


def kept_too_large(folder: Path) -> TooLarge:
    """What failed here, for make_plan. folder: paceline's cache. Reads the file once."""
    failures = read_failures(folder)
    return lambda *asked: any(failure.covers(*asked) for failure in failures)


def read_failures(folder: Path) -> list[Failure]:
    """Lines that are not whole, or of another version, are passed over: the size would fail and be kept again."""
    names = {each.name for each in fields(Failure)}
    setup_names = {each.name for each in fields(MemorySetup)}
    return [
        Failure(**{name: record[name] for name in names})
        for record in read_json_lines(folder / FILE_NAME)
        if names <= set(record) and isinstance(record["setup"], dict) and setup_names <= set(record["setup"])
    ]


def keep_too_large(folder: Path, plan: Plan, *, card_bytes: int | None, source: str) -> None:
    """card_bytes: what each device had when it failed, be it less than planned. Where nothing can be written, a line says so."""
    failure = Failure(plan.device_name, asdict(memory_setup(plan)), card_bytes, source, utc_now())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        append_json_line(folder / FILE_NAME, asdict(failure))
    except OSError as error:
        print(
            f"note    {folder / FILE_NAME} cannot be written ({error.strerror}): the size is not kept", file=sys.stderr
        )
