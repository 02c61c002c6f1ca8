"""
What this machine measured of memory: every run and probe leaves a record, and the next plan here is narrower for it.

One file for each machine, memory.json in the cache folder. Several runs may end at once: whoever adds a record holds a lock
beside the file. A file that cannot be read is named and passed over, since the next run measures again. No torch.
"""

import fcntl
import json
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from paceline.plan.activations import MemorySetup
from paceline.plan.estimate import CPU_PROCESS_BYTES, Calibrate, Calibration
from paceline.plan.memory import copies_bytes, peak_phase
from paceline.plan.planner import Plan, memory_setup
from paceline.rundir import RunDir, read_json_lines, write_atomic

FILE_NAME = "memory.json"
FAMILY = "gpt"  # the model that all of this is about: another kind would not be kept together with it
KEEP_RECORDS = 20  # of each kind
PROBE = "probe"  # source of a record that is no run's
NEWEST = 5  # of which a calibration is made


@dataclass(frozen=True)
class MemoryRecord:
    """What one attempt or probe took, on the rank that took most. Bytes that are not known are None.

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
        """Records of one kind push each other out."""
        how = "compiled" if self.compiled else "eager"
        ranks = "several ranks" if self.world_size > 1 else "one rank"
        return f"{self.device_name}, {self.family}, {self.precision}, {how}, {self.attention}, {ranks}"


def kept_calibration(folder: Path) -> Calibrate:
    """What was measured here, for make_plan. folder: paceline's cache. Reads the file once."""
    records = read_records(folder)

    def calibrate(device_name: str, setup: MemorySetup) -> Calibration | None:
        return calibration_of(records, device_name, setup)

    return calibrate


def calibration_of(records: Iterable[MemoryRecord], device_name: str, setup: MemorySetup) -> Calibration | None:
    """From the newest records of this device in this mode; None where there are none. Nothing is taken from other devices."""
    alike = [record for record in records if _is_like(record, device_name, setup)]
    if setup.device == "cpu":
        return _of_processes(alike, setup)
    measured = _newest(record for record in alike if record.allocated_bytes)
    if not measured:
        return None
    beside = [
        record.driver_bytes - record.allocated_bytes
        for record in measured
        if record.driver_bytes is not None and record.allocated_bytes is not None and _same_ranks(record, setup)
    ]
    return Calibration(
        ratio=statistics.median((record.allocated_bytes or 0) / record.planned_bytes for record in measured),
        beside_bytes=round(statistics.median(beside)) if beside else None,
        source=_source(measured),
    )


def _of_processes(alike: Iterable[MemoryRecord], setup: MemorySetup) -> Calibration | None:
    """A CPU has no allocator that tells; what the process took beyond the plan is known.

    As much of it as a process without a model has stays as it is, the rest grows with the model: malloc's holes.
    """
    measured = _newest(record for record in alike if record.driver_bytes is not None and _same_ranks(record, setup))
    if not measured:
        return None
    planned = peak_phase(setup).bytes
    beside = []
    for record in measured:
        taken = (record.driver_bytes or 0) - record.copies_bytes - record.planned_bytes
        constant = min(taken, CPU_PROCESS_BYTES.expected)
        beside.append(constant + (taken - constant) * planned / record.planned_bytes)
    return Calibration(
        ratio=1.0, beside_bytes=round(statistics.median(beside)) + copies_bytes(setup), source=_source(measured)
    )


def _is_like(record: MemoryRecord, device_name: str, setup: MemorySetup) -> bool:
    return (
        record.device_name == device_name
        and record.device == setup.device
        and record.compiled == setup.compiled
        and record.attention == setup.attention
        and record.family == FAMILY
        and record.planned_bytes > 0
    )


def _same_ranks(record: MemoryRecord, setup: MemorySetup) -> bool:
    """One rank loads no NCCL and opens no connections."""
    return (record.world_size > 1) == (setup.world_size > 1)


def _newest(records: Iterable[MemoryRecord]) -> list[MemoryRecord]:
    """Of runs; of probes only where no run was measured: a probe reads no text and writes nothing."""
    found = sorted(records, key=lambda record: record.time)
    runs = [record for record in found if record.source != PROBE]
    return (runs or found)[-NEWEST:]


def _source(records: Sequence[MemoryRecord]) -> str:
    runs = f"{len(records)} runs here, the last" if len(records) > 1 else "a run here"
    return f"measured in {runs} on {records[-1].time[:10]}"


def record_of(plan: Plan, measured: Sequence[Mapping[str, Any]], *, source: str) -> MemoryRecord | None:
    """What the ranks of one attempt or probe measured last (train/footprint.py): the fullest of them, figure by figure.

    None where nothing was measured that the next plan could use: a CPU process that compiled a model to time it is larger
    than one that did not, whichever it then used.
    """
    if not measured or (plan.device == "cpu" and any(each["compile_tried"] for each in measured)):
        return None
    setup = memory_setup(plan)
    return MemoryRecord(
        device_name=plan.device_name,
        device=plan.device,
        torch=measured[0]["torch"],
        compiled=setup.compiled,
        attention=setup.attention,
        precision=setup.precision,
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
    """None where a rank does not know: it may be the fullest."""
    sizes = [each[name] for each in measured]
    return None if None in sizes else max(sizes)


def read_records(folder: Path) -> list[MemoryRecord]:
    """All of them; none where there is no file, or one that is damaged, which is named in a line."""
    return [record for records in _read(folder).values() for record in records]


def keep_attempt(folder: Path, run: RunDir, attempt: int) -> None:
    """What the ranks of an attempt measured last, also of one that was broken off; nothing where a rank never got so far."""
    events = [event for event in read_json_lines(run.events) if event.get("event") == "memory"]
    last = {event["rank"]: event for event in events if event["attempt"] == attempt}
    plan = Plan.from_json(run.plan_json.read_text())  # the workers may have decided about compiling
    if len(last) == plan.world_size and (record := record_of(plan, list(last.values()), source=run.name)):
        keep_record(folder, record)


def keep_record(folder: Path, record: MemoryRecord) -> None:
    """Adds a record; the oldest of its kind go. A folder that cannot be written is named in a line: nothing depends on it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            kept = _read(folder)
            kept[record.kind] = [*kept.get(record.kind, []), record][-KEEP_RECORDS:]
            table = {kind: [asdict(each) for each in records] for kind, records in kept.items()}
            write_atomic(folder / FILE_NAME, json.dumps({"version": 1, "records": table}, indent=1) + "\n")
    except OSError as error:
        _say(f"{folder / FILE_NAME} cannot be written ({error.strerror}): what was measured is not kept")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / f"{FILE_NAME}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read(folder: Path) -> dict[str, list[MemoryRecord]]:
    path = folder / FILE_NAME
    try:
        table = json.loads(path.read_text(encoding="utf-8"))["records"]
        return {kind: [_record(values) for values in records] for kind, records in table.items()}
    except FileNotFoundError:
        return {}
    except OSError as error:
        _say(f"{path} cannot be read ({error.strerror}) and is passed over")
    except (ValueError, KeyError, TypeError, AttributeError):
        _say(f"{path} is damaged and passed over; the next run measures anew")
    return {}


def _record(values: Mapping[str, Any]) -> MemoryRecord:
    """Keys that this version does not know are of a newer one."""
    record = MemoryRecord(**{field.name: values[field.name] for field in fields(MemoryRecord)})
    sizes = (record.planned_bytes, record.copies_bytes, record.allocated_bytes or 0, record.driver_bytes or 0)
    if not all(isinstance(size, int) for size in (*sizes, record.world_size)) or not isinstance(record.time, str):
        raise ValueError(values)
    return record


@cache
def _say(text: str) -> None:
    """Once in a process: a command plans more than once."""
    print(f"note    {text}", file=sys.stderr)
