"""
How fast a device does each kind of work of a training step: measured by train/measure.py, or assumed from a data sheet.

A rate is so many units a second at so many sizes; RATES says what a unit and a size are, and plan/step_time.py counts the same
units. speeds.json in the cache folder keeps what was measured, and the ratio of real steps to their prediction, which corrects
the next prediction.

The data sheet's shares come from published runs. Products are what remains of a step once the other parts are taken off: on an H100
nanochat reaches 39.8 % (d8), 41.9 % (d12 SSSL), 46 % (d12 L), 46 % (d18) and 50 % (d24) of the dense bf16 peak. Cards with fewer
FLOPs for each byte of bandwidth come closer to theirs: d20 80 % on a 4090, 74 % on an A100, d12 84 % on a 4070 (GeForce cards also
clock above the data sheet). tests/plan/test_step_time.py holds the model against each of these.
"""

import json
import math
import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.file_systems import one_writer
from paceline.plan.algorithms import ALGORITHMS
from paceline.plan.gpu_table import GpuSpec
from paceline.rundir import write_atomic
from paceline.units import format_percent

FILE_NAME = "speeds.json"
KEEP_STEPS = 20  # of the last runs, for each device
ALIKE = 8.0  # steps at most so many times as long or as short correct a prediction
# relative errors of seconds, by benchmarks/plan.py on a busy machine: of pieces alone 0.78 to 1.13 of what was measured;
# corrected by a run of another config 0.90 to 1.11; by one of the same config less
PIECES_SPREAD, OTHER_SPREAD, SAME_SPREAD = 0.20, 0.12, 0.05
RATES = {  # name: unit, and what its size is
    "linear": "FLOPs of a linear layer, forward and backward, by its width",
    "attention_dots": "FLOPs of q @ k and p @ v, forward and backward, by row length",
    "attention_pairs": "pairs of query and key that the softmax sees, by row length",
    "pointwise": "elements of the residual stream, each through one layer's other ops, by elements in a micro-step",
    "head": "FLOPs of lm_head, forward and backward, by width",
    "logits": "logits that become gradients, by vocabulary",
    **{
        name: f"FLOPs of {row.title} in the update of a matrix {aspect} times as long as wide, by its shorter side"
        if row.whole
        else f"elements that {row.title} updates"
        for row in ALGORITHMS.values()
        for name, aspect in row.rates.items()
    },
    "table": "elements of an embedding's gradient, made and filled",
    "copy": "bytes read and written by a copy",
    "send": "bytes each way between two ranks at once",
}
MANY_FLOPS_PER_BYTE = 200  # dense bf16: H100 295, H200 206, L40S 419; A100 153, 4090 164, 5090 117
PEAK_SHARE = {  # of the dense peak, by the layer's width
    "many FLOPs per byte": ((256, 0.50), (512, 0.68), (768, 0.70), (1280, 0.71), (2048, 0.72)),
    "few FLOPs per byte": ((256, 0.75), (512, 0.88), (768, 0.93), (1280, 0.95), (2048, 0.95)),
}
# of the peak, on the pairs that are computed
ATTENTION_SHARE = {"many FLOPs per byte": 0.35, "few FLOPs per byte": 0.75}
BANDWIDTH_SHARE = 0.8
LAYER_BYTES = {"compiled": 60, "eager": 157}  # passes over the residual stream, times its element's bytes
LOGIT_BYTES = {"compiled": 16, "eager": 80}
TABLE_BYTES = 12
HOST_S = {"compiled": 150e-6, "eager": 1200e-6}  # of a layer, forward and backward
MICRO_STEP_HOST_S = 2e-3
SPREAD = {"compiled": 0.15, "eager": 0.25}
FEW_RUNS_SPREAD = 0.05  # added for cards with few published runs, which other trainers made


@dataclass(frozen=True)
class Speeds:
    """What one device does each kind of work at.

    rates: name, or name and precision -> points (size, units a second), by size. host: seconds of the CPU for one `layer`,
    `micro_step`, and message (`send`). spread: relative error of a time made of these.
    """

    device_name: str
    threads: int
    processes: int
    rates: Mapping[str, tuple[tuple[float, float], ...]]
    host: Mapping[str, float]
    source: str
    spread: float = PIECES_SPREAD
    # a setup's key -> measured / predicted seconds of its steps
    steps: Mapping[str, float] = field(default_factory=dict)
    predicted: Mapping[str, float] = field(default_factory=dict)  # a setup's key -> its predicted seconds

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> "Speeds":
        """Reads what asdict wrote."""
        rates = {name: tuple((size, rate) for size, rate in points) for name, points in record["rates"].items()}
        return Speeds(**{**record, "rates": rates})

    def rate(self, name: str, precision: str | None = None, *, size: float = 1.0) -> float | None:
        """Returns units a second at a size, interpolated on a log scale and constant beyond the ends; None if not measured."""
        points = self.rates.get(f"{name} {precision}" if precision else name)
        return None if not points else interpolate(points, size)

    def seconds(self, name: str, amount: float, precision: str | None = None, *, size: float = 1.0) -> float:
        """Returns the seconds for so many units; 0 if their rate was not measured."""
        rate = self.rate(name, precision, size=size)
        return amount / rate if rate else 0.0

    def ratio(self, key: str, *, predicted_s: float) -> tuple[float, float] | None:
        """Returns the factor for predicted seconds, and the relative error of the result; None where nothing alike ran yet.

        Steps that are much shorter show the costs of starting an op, which say nothing about long ones.
        """
        if key in self.steps:
            return self.steps[key], SAME_SPREAD
        lengths = {name: abs(math.log(self.predicted.get(name, predicted_s) / predicted_s)) for name in self.steps}
        ratios = [ratio for name, ratio in self.steps.items() if lengths[name] <= math.log(ALIKE)]
        if not ratios:
            return None
        middle = statistics.median(ratios)
        return middle, max(OTHER_SPREAD, max(abs(ratio / middle - 1) for ratio in ratios))


def interpolate(points: Sequence[tuple[float, float]], size: float) -> float:
    """Returns the rate at a size, from points in the order of their sizes."""
    at = bisect_left([point for point, _ in points], size)
    if at == 0 or at == len(points):
        return points[min(at, len(points) - 1)][1]
    (low, low_rate), (high, high_rate) = points[at - 1], points[at]
    share = math.log(size / low) / math.log(high / low)
    return float(low_rate * (high_rate / low_rate) ** share)


def load_speeds(folder: Path, *, device_name: str, threads: int, processes: int) -> Speeds | None:
    """Returns what was measured of this device under this many processes; None where nothing was."""
    record = _read(folder).get(_key(device_name, threads, processes))
    return None if record is None else Speeds.from_json(record)


def keep_speeds(folder: Path, speeds: Speeds) -> None:
    """Replaces what was measured before; ratios of steps belong to the old rates and go with them."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with one_writer(folder / FILE_NAME):
            records = _read(folder)
            records[_key(speeds.device_name, speeds.threads, speeds.processes)] = asdict(speeds)
            write_atomic(folder / FILE_NAME, json.dumps(records, indent=1) + "\n")
    except OSError as error:
        raise PacelineError(
            f"{folder / FILE_NAME} cannot be written: {error.strerror}", fix="--cache-dir DIR in a place you can write"
        ) from error


def remember_step(folder: Path, speeds: Speeds, *, key: str, predicted_s: float, measured_s: float) -> Speeds:
    """Keeps measured / predicted of a run's steps, predicted without such ratios, and returns the new speeds."""
    steps = {name: ratio for name, ratio in speeds.steps.items() if name != key}
    steps[key] = measured_s / predicted_s
    latest = dict(list(steps.items())[-KEEP_STEPS:])
    predicted = {name: seconds for name, seconds in {**speeds.predicted, key: predicted_s}.items() if name in latest}
    corrected = replace(speeds, steps=latest, predicted=predicted)
    keep_speeds(folder, corrected)
    return corrected


def _key(device_name: str, threads: int, processes: int) -> str:
    return f"{device_name}, {processes} x {threads} threads"


def _read(folder: Path) -> dict[str, Any]:
    """Returns the file's records; none where it is missing or cut off, since a measurement can be repeated."""
    try:
        records = json.loads((folder / FILE_NAME).read_text())
    except (OSError, ValueError):
        return {}
    return records if isinstance(records, dict) else {}


def assumed_speeds(spec: GpuSpec, *, precision: str, compiled: bool) -> Speeds | None:
    """Returns a card's speeds by its data sheet; None where the table has no peak for this precision."""
    peak = spec.peak_flops.get(precision)
    if peak is None:
        return None
    how = "compiled" if compiled else "eager"
    many = spec.peak_flops.get("bf16", peak) / spec.bytes_per_s > MANY_FLOPS_PER_BYTE
    kind = "many FLOPs per byte" if many else "few FLOPs per byte"
    bandwidth, element = BANDWIDTH_SHARE * spec.bytes_per_s, 4 if precision == "fp32" else 2
    shares = PEAK_SHARE[kind]
    linear = tuple((float(width), share * peak) for width, share in shares)
    update_peak = spec.peak_flops.get("bf16", spec.peak_flops.get("fp32", peak))

    def flat(rate: float) -> tuple[tuple[float, float], ...]:
        return ((1.0, rate),)

    rates = {
        f"linear {precision}": linear,
        f"attention_dots {precision}": flat(ATTENTION_SHARE[kind] * peak),
        f"pointwise {precision}": flat(bandwidth / (LAYER_BYTES[how] * element)),
        f"head {precision}": linear,
        f"logits {precision}": flat(bandwidth / LOGIT_BYTES[how]),
        **{
            name: flat(row.peak_share * update_peak if row.whole else bandwidth / row.moved_bytes)
            for row in ALGORITHMS.values()
            for name in row.rates
        },
        "table": flat(bandwidth / TABLE_BYTES),
        "copy": flat(bandwidth),
    }
    reached = f"{format_percent(shares[0][1])} to {format_percent(shares[-1][1])}"
    source = (
        f"products at {reached} of {spec.name}'s {peak / 1e12:.4g} TFLOPS by width, the rest at {format_percent(BANDWIDTH_SHARE)}"
        f" of {spec.bytes_per_s / 1e9:,.0f} GB/s: as published runs on cards with {kind}"
    )
    host = {"layer": HOST_S[how], "micro_step": MICRO_STEP_HOST_S, "update": 0.0}
    spread = SPREAD[how] + (0.0 if many else FEW_RUNS_SPREAD)
    return Speeds(spec.name, 1, 1, rates, host, source, spread=spread)


def with_fused_ops(measured: Speeds, *, precision: str) -> Speeds:
    """Returns speeds for a compiled model from those of single ops: fused ops wait for memory alone."""
    copy, element = measured.rate("copy"), 4 if precision == "fp32" else 2
    if copy is None:
        return measured
    rates = {
        **measured.rates,
        f"pointwise {precision}": ((1.0, copy / (LAYER_BYTES["compiled"] * element)),),
        f"logits {precision}": ((1.0, copy / LOGIT_BYTES["compiled"]),),
    }
    return replace(measured, rates=rates, host={**measured.host, "layer": HOST_S["compiled"]})
