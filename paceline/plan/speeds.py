"""
How fast a device does each kind of work of a training step: measured by train/measure.py, or reckoned from a data sheet; and the
file in which measurements are kept, one for each machine.

A rate is so many units a second at so many sizes; what a unit and a size are stands in RATES, and plan/step_time.py counts the
same units. Times of real steps are kept beside them: their ratio to the prediction corrects the next one.
"""

import json
import math
import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.rundir import write_atomic

FILE_NAME = "speeds.json"
KEEP_STEPS = 20  # of the last runs, for each device
# how far off seconds may be, as benchmarks/plan.py found it on a busy machine: of pieces alone, 0.78 to 1.13 of what was measured;
# corrected by a run of another config, 0.90 to 1.11; by one of the same
PIECES_SPREAD, OTHER_SPREAD, SAME_SPREAD = 0.20, 0.12, 0.05
RATES = {  # name: unit, and what its size is
    "linear": "FLOPs of a linear layer, forward and backward, by its width",
    "attention_dots": "FLOPs of q @ k and p @ v, forward and backward, by row length",
    "attention_pairs": "pairs of query and key that the softmax sees, by row length",
    "pointwise": "elements of the residual stream, each through one layer's other ops, by elements in a micro-step",
    "head": "FLOPs of lm_head, forward and backward, by width",
    "logits": "logits that become gradients, by vocabulary",
    "muon": "FLOPs of Newton-Schulz in the update of a square matrix, by its side",
    "muon_long": "the same of a matrix four times as long as its shorter side, by that",
    "adamw": "elements that AdamW updates",
    "table": "elements of an embedding's gradient, made and filled",
    "copy": "bytes read and written by a copy",
    "send": "bytes each way between two ranks at once",
}


@dataclass(frozen=True)
class Speeds:
    """rates: name, or name and precision -> points (size, units a second), by size. host: seconds of the CPU for one `layer`,
    `micro_step`, and message (`send`).

    spread: how far off a time made of these may be, as a share.
    """

    device_name: str
    threads: int
    processes: int
    rates: Mapping[str, tuple[tuple[float, float], ...]]
    host: Mapping[str, float]
    source: str
    spread: float = PIECES_SPREAD
    steps: Mapping[str, float] = field(
        default_factory=dict
    )  # a setup's key -> measured / predicted seconds of its steps

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> "Speeds":
        rates = {name: tuple((size, rate) for size, rate in points) for name, points in record["rates"].items()}
        return Speeds(**{**record, "rates": rates})

    def rate(self, name: str, precision: str | None = None, *, size: float = 1.0) -> float | None:
        """Between two points in proportion of the logarithms; beyond the ends as at the ends."""
        points = self.rates.get(f"{name} {precision}" if precision else name)
        return None if not points else interpolated(points, size)

    def ratio(self, key: str) -> tuple[float, float] | None:
        """What the predicted seconds are to be multiplied by, and how far off the result may be; None where nothing ran yet."""
        if key in self.steps:
            return self.steps[key], SAME_SPREAD
        if not self.steps:
            return None
        ratios = list(self.steps.values())
        middle = statistics.median(ratios)
        return middle, max(OTHER_SPREAD, max(abs(each / middle - 1) for each in ratios))


def interpolated(points: Sequence[tuple[float, float]], size: float) -> float:
    at = bisect_left([each for each, _ in points], size)
    if at == 0 or at == len(points):
        return points[min(at, len(points) - 1)][1]
    (low, low_rate), (high, high_rate) = points[at - 1], points[at]
    share = math.log(size / low) / math.log(high / low)
    return float(low_rate * (high_rate / low_rate) ** share)


def load_speeds(folder: Path, *, device_name: str, threads: int, processes: int) -> Speeds | None:
    """What was measured of this device under this many processes; None where nothing was."""
    kept = _read(folder).get(_key(device_name, threads, processes))
    if kept is None:
        return None
    return Speeds.from_json(kept)


def keep_speeds(folder: Path, speeds: Speeds) -> None:
    """In the place of what was measured before; ratios of steps belong to the old rates and go with them."""
    records = _read(folder)
    records[_key(speeds.device_name, speeds.threads, speeds.processes)] = asdict(speeds)
    _write(folder, records)


def remember_step(folder: Path, speeds: Speeds, *, key: str, predicted_s: float, measured_s: float) -> Speeds:
    """Keeps measured / predicted of a run's steps, predicted without such ratios, and returns the speeds with it."""
    steps = {name: ratio for name, ratio in speeds.steps.items() if name != key}
    steps[key] = measured_s / predicted_s
    changed = Speeds(**{**asdict(speeds), "rates": speeds.rates, "steps": dict(list(steps.items())[-KEEP_STEPS:])})
    keep_speeds(folder, changed)
    return changed


def _key(device_name: str, threads: int, processes: int) -> str:
    return f"{device_name}, {processes} x {threads} threads"


def _read(folder: Path) -> dict[str, Any]:
    """Nothing where the file is missing or cut off: a measurement can be made again."""
    try:
        records = json.loads((folder / FILE_NAME).read_text())
    except (OSError, ValueError):
        return {}
    return records if isinstance(records, dict) else {}


def _write(folder: Path, records: Mapping[str, Any]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / FILE_NAME, json.dumps(records, indent=1) + "\n")
    except OSError as error:
        raise PacelineError(
            f"{folder / FILE_NAME} cannot be written: {error.strerror}", fix="--cache-dir DIR in a place you can write"
        ) from error
