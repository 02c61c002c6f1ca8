"""
What earlier runs on this machine showed about memory: what fitted and how well that was planned, and what did not fit.

memory.json in the cache folder holds a record of every run and probe, which makes the next plan here more precise. Measured bytes
are a constant and a share of the planned ones: a line through the records (fit_line), drawn towards what is assumed without any, so
that a small run, which shows the constant, changes nothing about the share. Several runs may end at once: whoever adds a record
holds a lock beside the file. A damaged file is reported and ignored.

too_large.jsonl holds a line for each size that ran out of memory. No later plan chooses such a size by itself while the device has
no more memory; rows that the user sets are the user's.
"""

import json
import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.file_systems import one_writer
from paceline.plan.activations import MemorySetup
from paceline.plan.estimate import (
    CPU_HEAP_GROWTH,
    CPU_PROCESS_BYTES,
    EXPANDABLE,
    WORKSPACE_BYTES,
    Calibrate,
    Calibration,
    Range,
    arithmetic_error,
    context_bytes,
)
from paceline.plan.memory import copies_bytes, peak_phase
from paceline.plan.planner import Plan, memory_setup
from paceline.plan.precision import precision_name
from paceline.plan.shapes import RUNGS
from paceline.plan.sizing import TooLarge
from paceline.rundir import RunDir, append_json_line, read_json_lines, utc_now, write_atomic
from paceline.units import MIB, format_bytes

FILE_NAME = "memory.json"
FAMILY = "gpt"  # the kind of model that is measured; another kind would have its own records
KEEP_RECORDS = 20  # of each kind
PROBE = "probe"  # the source of a record that no run made
NOISE_MIB, NOISE_SHARE = 16.0, 0.02  # by which a process is beside the line: small ones are not quite on one
OUTLIER = 2.0  # so many deviations from the line a record counts less
FIT_ROUNDS = 8  # weights hardly change after five
MUCH_LARGER = 4  # times what any record planned: the source then says so
FAILURES_FILE = "too_large.jsonl"
# what a failure and a setup must share
SAME = (
    *("model", "device", "optimizer", "optimizer_states", "shard", "offload"),
    *("precision", "low_precision", "attention", "compiled"),
)


@dataclass(frozen=True)
class MemoryRecord:
    """The memory of one attempt or probe, on the rank that took most. Bytes that are not known are None.

    planned_bytes: the closed form's peak, without any calibration. driver_bytes: of the whole process; on a CPU its highest
    resident size. copies_bytes: what the last checkpoint's copies take; on a CPU they are in the process too.
    """

    device_name: str
    device: str
    torch: str
    compiled: bool
    attention: str
    precision: str
    family: str
    world_size: int
    planned_bytes: int
    allocated_bytes: int | None
    reserved_bytes: int | None
    driver_bytes: int | None
    copies_bytes: int
    time: str
    source: str  # "probe", or the run's name

    @property
    def kind(self) -> str:
        """The newest KEEP_RECORDS of one kind are kept."""
        how = "compiled" if self.compiled else "eager"
        ranks = "several ranks" if self.world_size > 1 else "one rank"
        return f"{self.device_name}, {self.family}, {self.precision}, {how}, {self.attention}, {ranks}"


def load_calibration(folder: Path) -> Calibrate:
    """Returns the function that make_plan calibrates with, from what was measured here. folder: paceline's cache, read once."""
    return partial(calibration_of, read_records(folder))


def calibration_of(records: Iterable[MemoryRecord], device_name: str, setup: MemorySetup) -> Calibration | None:
    """Returns what the records of this device in this mode show; None without any. Other devices do not count."""
    mode = (device_name, setup.device, setup.compiled, setup.attention, FAMILY)
    alike = [
        record
        for record in records
        if (record.device_name, record.device, record.compiled, record.attention, record.family) == mode
        and record.planned_bytes > 0
    ]
    if not alike:
        return None
    planned = peak_phase(setup).bytes
    several = setup.world_size > 1  # one rank loads no NCCL and opens no connections
    with_process = [
        record for record in alike if (record.world_size > 1) == several and record.driver_bytes is not None
    ]
    if setup.device == "cpu":
        # no allocator reports its own share there; the checkpoint's copies are in the process too, and known
        measured, allocated, process = _newest(with_process), None, None
        if measured:
            points = tuple(
                (record.planned_bytes, (record.driver_bytes or 0) - record.copies_bytes) for record in measured
            )
            copies = copies_bytes(setup)
            process = fit_line(points, CPU_PROCESS_BYTES, CPU_HEAP_GROWTH).at(planned) + Range(copies, copies, copies)
    else:
        measured, process = _newest(record for record in alike if record.allocated_bytes), None
        points = tuple((record.planned_bytes, record.allocated_bytes or 0) for record in measured)
        workspaces = Range(0, WORKSPACE_BYTES, 2 * WORKSPACE_BYTES)
        allocated = fit_line(points, workspaces, arithmetic_error(setup)).at(planned)
        figures = ((record.allocated_bytes or 0, record.driver_bytes or 0) for record in _newest(with_process))
        if overheads := tuple((size, whole - size) for size, whole in figures if size):
            context = context_bytes(setup.world_size, consumer=None)
            process = allocated + fit_line(overheads, context, EXPANDABLE).at(allocated.expected)
    return Calibration(allocated, process, _source(measured, planned)) if measured else None


@dataclass(frozen=True)
class Line:
    """Measured MiB as constant + slope * planned MiB, with the covariance of the two."""

    constant: float
    slope: float
    covariance: tuple[float, float, float]  # of constant; of both; of slope

    def at(self, planned_bytes: float) -> Range:
        """Returns what is expected of a plan, within two standard deviations: the wider, the further it is from what was seen."""
        x = planned_bytes / MIB
        expected, (of_constant, of_both, of_slope) = self.constant + self.slope * x, self.covariance
        deviation = math.sqrt(of_constant + 2 * x * of_both + x * x * of_slope + _noise(expected) ** 2)
        return Range(max(0.0, expected - 2 * deviation), expected, expected + 2 * deviation).scaled(MIB)

    def error(self, points: Sequence[tuple[float, float]]) -> float:
        """Returns the mean deviation from the points (planned and measured MiB), as a share of each."""
        return statistics.fmean(abs((self.constant + self.slope * x) / y - 1) for x, y in points)


@lru_cache(maxsize=64)  # a plan asks for every size that it tries
def fit_line(points: tuple[tuple[int, int], ...], constant: Range, slope: Range) -> Line:
    """Returns the line through (planned, measured) bytes. constant, slope: assumed without a point, two deviations on each side.

    Points count by their distance from it (Huber's weights), so one process that grew for another reason does not turn it. Where
    the line is further from the points than the assumption is, the assumption stays.
    """
    of_constant, of_slope = ((assumed.high - assumed.low) / 4 for assumed in (constant.scaled(1 / MIB), slope))
    line = assumed = Line(constant.expected / MIB, slope.expected, (of_constant**2, 0.0, of_slope**2))
    in_mib = [(planned / MIB, measured / MIB) for planned, measured in points if measured > 0]
    if not in_mib:
        return assumed
    weights = [1.0] * len(in_mib)
    for _ in range(FIT_ROUNDS):
        # the normal equations: [[a, b], [b, c]] times constant and slope is [d, e]
        a, b, c = 1 / of_constant**2, 0.0, 1 / of_slope**2
        d, e = a * assumed.constant, c * assumed.slope
        for (x, y), weight in zip(in_mib, weights, strict=True):
            information = weight / _noise(y) ** 2
            a, b, c = a + information, b + information * x, c + information * x * x
            d, e = d + information * y, e + information * x * y
        determinant = a * c - b * b
        covariance = (c / determinant, -b / determinant, a / determinant)
        line = Line(max(0.0, (c * d - b * e) / determinant), (a * e - b * d) / determinant, covariance)
        distances = [abs(y - line.constant - line.slope * x) / _noise(y) for x, y in in_mib]
        weights = [min(1.0, OUTLIER / max(distance, OUTLIER)) for distance in distances]
    return line if line.error(in_mib) <= assumed.error(in_mib) else assumed


def _noise(size_mib: float) -> float:
    """Returns by how many MiB a process of this size may be beside the line."""
    return NOISE_MIB + NOISE_SHARE * abs(size_mib)


def _newest(records: Iterable[MemoryRecord]) -> list[MemoryRecord]:
    """Returns the newest records of runs; of probes, which read no text and write nothing, only where no run was measured.

    Those of another PyTorch than the newest's do not count.
    """
    ordered = sorted(records, key=lambda record: record.time)
    of_this_torch = [record for record in ordered if record.torch == ordered[-1].torch]
    runs = [record for record in of_this_torch if record.source != PROBE]
    return (runs or of_this_torch)[-KEEP_RECORDS:]


def _source(records: Sequence[MemoryRecord], planned: int) -> str:
    runs = f"{len(records)} runs here, the last" if len(records) > 1 else "a run here"
    largest = max(record.planned_bytes for record in records)
    smaller = f"; none was planned larger than {format_bytes(largest)}" if planned > MUCH_LARGER * largest else ""
    return f"measured in {runs} on {records[-1].time[:10]}{smaller}"


def record_of(plan: Plan, measured: Sequence[Mapping[str, Any]], *, source: str) -> MemoryRecord | None:
    """Returns the record of one attempt or probe: figure by figure the largest that its ranks measured last (train/process.py).

    None where nothing was measured that the next plan could use: a CPU process that compiled a model to time it is larger
    than one that did not, whichever it then used.
    """
    if not measured or (plan.device == "cpu" and any(rank["compile_tried"] for rank in measured)):
        return None
    setup = memory_setup(plan)
    return MemoryRecord(
        device_name=plan.device_name,
        device=plan.device,
        torch=measured[0]["torch"],
        compiled=setup.compiled,
        attention=setup.attention,
        precision=precision_name(setup.precision, setup.low_precision),
        family=FAMILY,
        world_size=plan.world_size,
        planned_bytes=peak_phase(setup).bytes,
        allocated_bytes=_largest(measured, "allocated_bytes"),
        reserved_bytes=_largest(measured, "reserved_bytes"),
        driver_bytes=_largest(measured, "driver_bytes"),
        copies_bytes=_largest(measured, "copies_bytes") or 0,
        time=measured[0]["time"],
        source=source,
    )


def _largest(measured: Iterable[Mapping[str, Any]], name: str) -> int | None:
    """Returns the largest figure; None where a rank does not have it, since that rank may be the fullest."""
    sizes = [rank[name] for rank in measured]
    return None if None in sizes else max(sizes)


def read_records(folder: Path) -> list[MemoryRecord]:
    """Returns all records; none where there is no file, or a damaged one, which is reported in a line."""
    return [record for records in _read(folder).values() for record in records]


def keep_attempt(folder: Path, run: RunDir, attempt: int) -> None:
    """Keeps what the ranks of an attempt measured last, even if it broke off; nothing where a rank never measured."""
    events = [event for event in read_json_lines(run.events) if event.get("event") == "memory"]
    last = {event["rank"]: event for event in events if event["attempt"] == attempt}
    plan = Plan.from_json(run.plan_json.read_text())  # the workers may have decided about compiling
    if len(last) == plan.world_size and (record := record_of(plan, list(last.values()), source=run.name)):
        keep_record(folder, record)


def keep_record(folder: Path, record: MemoryRecord) -> None:
    """Adds a record and drops the oldest of its kind. A folder that cannot be written is reported: nothing depends on it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with one_writer(folder / FILE_NAME):
            records = _read(folder)
            records[record.kind] = [*records.get(record.kind, []), record][-KEEP_RECORDS:]
            table = {kind: [asdict(record) for record in members] for kind, members in records.items()}
            write_atomic(folder / FILE_NAME, json.dumps({"version": 1, "records": table}, indent=1) + "\n")
    except OSError as error:
        _note(f"{folder / FILE_NAME} cannot be written ({error.strerror}): what was measured is not kept")


def _read(folder: Path) -> dict[str, list[MemoryRecord]]:
    path = folder / FILE_NAME
    try:
        table = json.loads(path.read_text(encoding="utf-8"))["records"]
        return {kind: [_record(values) for values in records] for kind, records in table.items()}
    except FileNotFoundError:
        return {}
    except OSError as error:
        _note(f"{path} cannot be read ({error.strerror}) and is ignored")
    except (ValueError, KeyError, TypeError, AttributeError):
        _note(f"{path} is damaged and ignored; the next run measures again")
    return {}


def _record(values: Mapping[str, Any]) -> MemoryRecord:
    """Returns a record, without keys of a newer version."""
    record = MemoryRecord(**{field.name: values[field.name] for field in fields(MemoryRecord)})
    sizes = (record.planned_bytes, record.copies_bytes, record.allocated_bytes or 0, record.driver_bytes or 0)
    if not all(isinstance(size, int) for size in (*sizes, record.world_size)) or not isinstance(record.time, str):
        raise ValueError(values)
    return record


@cache
def _note(text: str) -> None:
    """Prints a note once in a process: a command plans more than once."""
    print(f"note    {text}", file=sys.stderr)


def load_too_large(folder: Path) -> TooLarge:
    """Returns the function that tells make_plan what failed here. folder: paceline's cache, read once.

    Incomplete lines and those of another version are ignored: the size would fail and be kept again.
    """
    names = {field.name for field in fields(MemorySetup)}
    failures = [
        record
        for record in read_json_lines(folder / FAILURES_FILE)
        if {"device_name", "setup", "card_bytes"} <= set(record)
        and isinstance(record["setup"], dict)
        and names <= set(record["setup"])
    ]
    return lambda *needed: any(covers(failure, *needed) for failure in failures)


def covers(failure: Mapping[str, Any], device_name: str, setup: MemorySetup, card_bytes: int | None) -> bool:
    """Returns whether a setup needs at least as much as the one that failed, on a device that has no more."""
    failed, values = failure["setup"], asdict(setup)
    return (
        device_name == failure["device_name"]
        and all(values[name] == failed[name] for name in SAME)
        and all(values[name] >= failed[name] for name in ("device_batch_size", "logits_budget_bytes"))
        and values["world_size"] <= failed["world_size"]  # fewer ranks hold larger shards
        and RUNGS.index(values["activation_checkpointing"]) <= RUNGS.index(failed["activation_checkpointing"])
        and not (card_bytes and failure["card_bytes"] and card_bytes > failure["card_bytes"])
    )


def keep_too_large(folder: Path, plan: Plan, *, card_bytes: int | None, source: str) -> None:
    """Keeps a size that failed. card_bytes: what each device had then. A folder that cannot be written is reported."""
    failure = {
        "device_name": plan.device_name,
        "setup": asdict(memory_setup(plan)),
        "card_bytes": card_bytes,
        "source": source,
        "time": utc_now(),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        append_json_line(folder / FAILURES_FILE, failure)
    except OSError as error:
        _note(f"{folder / FAILURES_FILE} cannot be written ({error.strerror}): the size is not kept")
    except PacelineError as error:
        _note(f"{error.message}: the size is not kept")
