"""
Evidence that no log of a rank contains: how each rank ended and how far it got by what the run recorded, samples of the hosts'
health, the curves of a run, how Slurm ended its job, and the kernel log.

health/<host>.jsonl (launch/health.py) has Xid errors, memory and disk use, and reduced clocks. The kernel log has kills and Xid
errors too, but few users may read it: if nobody can, that is no error.
"""

import io
import math
import os
import re
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.explain.curve_verdict import DIVERGED, FROM_START, CurveFinding, judge_curves
from paceline.explain.explanation import KERNEL_LOG, RECORDED, LogProgress, Record, RecordKind
from paceline.explain.log import Log
from paceline.explain.log_text import count_lines, read_chunks
from paceline.explain.reader import read_log
from paceline.explain.recorded_end import events_of, find_last
from paceline.explain.series import (
    GRADIENT,
    LOSS,
    MEMORY,
    RATE,
    STEP_TIME,
    THROUGHPUT,
    VALIDATION,
    MetricSeries,
    SeriesTable,
)
from paceline.heartbeat import read_heartbeats
from paceline.rundir import RunDir, json_records, open_file, read_end, read_json_lines
from paceline.units import format_bytes, unix_time

SAMPLE_BYTES = 256 << 10  # from the end of a file: some minutes of samples
WHOLE_BYTES = 1 << 20  # a health file up to this size is read whole
NUM_SAMPLES = 200  # of a longer one
MAX_LINE_BYTES = 16 << 10
WHOLE_METRICS = 2 << 20  # bytes: metrics up to this size are read whole
# times the validation loss of paceline's trainer before the first step; evaluations behind it
OWN_VALIDATION, WORSE, MIN_EVALUATED = ("val_bpb", "val_loss"), 1.02, 2
NUM_CHANGED = 8  # lines from where values become NaN
MAX_EVALUATIONS = 4000  # of more, some
KERNEL_LOG_BYTES = 1 << 20  # from the end of a file
XID_TEXTS = {79: ", GPU has fallen off the bus"}  # what the kernel's line says too, and a fix depends on
NEARLY_ALL = 0.95  # of memory, or of a disk
MUCH_OF_MEMORY = 0.2  # of a host's, of which other programs than the run take and free some too
KMSG = Path("/dev/kmsg")
MAX_RECORD_BYTES, MAX_OVERWRITTEN = 1 << 16, 100  # of a record; reads in a row that fail because theirs was overwritten
KERNEL_LOGS = (Path("/var/log/kern.log"), Path("/var/log/messages"), Path("/var/log/syslog"))
KILL_DELAY_S = 10.0  # by which the kernel may log a kill later than the process ends, and its clock differ

SLURM_LINE = re.compile(rb"(?:slurmstepd|srun)[-\w]*: (?!.*DUE TO JOB REQUEUE)")
# no other number, such as that of pgtables:104kB
PID = re.compile(r"(?i)(?:(?<=\bprocess )|(?<=\bpid[=:])|(?<=\w\[))\d{1,9}\b")
OOM_KILL = re.compile(r"Killed process \d+|oom-kill:")
KERNEL_ERROR = re.compile(r"Killed process|oom-kill|Out of memory|Xid|segfault at|general protection", re.IGNORECASE)

Sample = dict[str, Any]
# a field of samples, that with its limit, and what they are about
MEMORY_FIELDS = (
    ("ram_used", "ram_total", "memory of {host}"),
    ("cgroup_used", "cgroup_limit", "memory of the control group"),
)
DISK_FIELDS = (("disk_free", "disk_total", "disk of the run folder on {host}"),)


def exit_log(events: Sequence[Mapping[str, Any]], attempt: int) -> Log:
    """How each rank of an attempt ended, in the form of a launcher's report; an end that is a consequence counts as forwarded."""
    end = find_last(events_of(events, attempt), "attempt_ended").get("state")
    records = []
    for number, event in enumerate(events, 1):
        if event.get("attempt") not in (None, attempt):
            continue
        if event.get("event") == "rank_failed":
            code, signal = event.get("exit_code"), event.get("signal")
            text = f"exitcode: {code}" if signal is None else f"terminated by signal {signal}"
            kind: RecordKind = "banner" if event.get("consequence") else "exit" if signal is None else "signal"
            records.append(Record(kind, text, number, rank=event.get("rank"), source=RECORDED))
        elif event.get("event") == "stopping" and event.get("signal") and end != "finished":  # else it came too late
            records.append(Record("signal", f"Received signal {event['signal']}", number, source=RECORDED))
    return Log(records=tuple(records))


def progress_log(run: RunDir, events: Sequence[Mapping[str, Any]]) -> Log:
    """How far each rank got, from progress/ and metrics.jsonl, and whether the run reports its end."""
    steps = {rank: heartbeat.step for rank, heartbeat in read_heartbeats(run).items()}
    progress = LogProgress(last_step=max(steps.values(), default=None))
    first = next((line for line in read_json_lines(run.metrics) if isinstance(line.get("step"), int)), None)
    if first is not None:
        last = dict(first)
        for record in json_records(read_end(run.metrics, SAMPLE_BYTES)[0].splitlines()):
            last |= record if isinstance(record.get("step"), int) else {}
        progress = LogProgress(count_lines(run.metrics), first["step"], last["step"], last.get("loss"))
    progress = replace(progress, finished=any(event.get("event") == "finished" for event in events))
    return Log(progress=progress, last_steps=steps, ranks=frozenset(steps))


def read_host_log(path: Path, host: str) -> Log:
    """What agent and engine of another host wrote, or lines of its kernel log; each record has the host."""
    source = str(path) if path.name.startswith("launch") else f"{KERNEL_LOG} of {host}"
    log = read_log(read_chunks(path), source=source)
    return replace(log, records=tuple(replace(record, host=record.host or host) for record in log.records))


def system_logs(
    samples: Mapping[str, Sequence[Sample]], events: Sequence[Mapping[str, Any]], far_hosts: Sequence[str]
) -> list[Log]:
    """The lines of this host's kernel log about an attempt's processes, and the Xid errors in the samples in the same format."""
    start, ended = find_last(events, "attempt"), find_last(events, "attempt_ended")
    pids, hosts = start.get("pids") or (), start.get("hosts") or {}

    def ranks_on(*names: str) -> dict[int, int]:
        """By process id; the same one may belong to another process on another host."""
        return {pid: r for r, pid in enumerate(pids) if not hosts or any(r in hosts.get(name, ()) for name in names)}

    near = {} if ended.get("state") == "finished" else ranks_on(*(hosts.keys() - far_hosts))
    errors = read_kernel_errors(near, since=unix_time(start.get("time")), until=unix_time(ended.get("time")))
    lines: list[tuple[str, int | None, str]] = [(line, rank, KERNEL_LOG) for rank, line in errors]
    for host, host_samples in samples.items():
        lines += [(line, rank, f"health/{host}") for line, rank in find_xids(host, host_samples, ranks_on(host))]
    return [read_log([line.encode()], rank=rank, source=source) for line, rank, source in lines]


def read_samples(path: Path, *, since: str) -> list[Sample]:
    """The samples at the end of a health file whose time is not before `since`."""
    samples = json_records(read_end(path, SAMPLE_BYTES)[0].splitlines())
    return [sample for sample in samples if isinstance(sample.get("time"), str) and sample["time"] >= since]


def find_xids(host: str, samples: Sequence[Sample], ranks: Mapping[int, int]) -> list[tuple[str, int | None]]:
    """The last Xid error of each GPU of a host as a line of the kernel log, and the rank of the run's process there, if known."""
    xids: dict[int, int] = {}
    pids: dict[int, int] = {}
    for gpu in (gpu for line in samples for gpu in line.get("gpus", ())):
        with suppress(KeyError, TypeError, AttributeError):
            for process in gpu.get("processes", ()):
                if process.get("ours"):
                    pids[gpu["index"]] = process["pid"]
            if "xid" in gpu.get("errors", ()):
                xids[gpu["index"]] = gpu["errors"]["xid"]
    return [
        (
            f"NVRM: Xid (PCI:GPU{index}): {xid}, GPU {index} of {host}{XID_TEXTS.get(xid, '')}",
            ranks.get(pids.get(index, -1)),
        )
        for index, xid in xids.items()
    ]


def fill_texts(fields: Sequence[tuple[str, str, str]], host: str, samples: Sequence[Sample]) -> list[str]:
    """How memory or a disk filled, by the first and last value of each field, if nearly nothing was free at the last sample."""
    texts = []
    for name, total, subject in fields:
        # some fields are only in samples in which they changed
        values, totals = ([line for line in samples if isinstance(line.get(field), int)] for field in (name, total))
        if not values or not totals or not totals[-1][total]:
            continue
        size, last, is_disk = totals[-1][total], values[-1][name], name == "disk_free"
        if (last <= (1 - NEARLY_ALL) * size) if is_disk else (last >= NEARLY_ALL * size):
            words = (" free", " free") if is_disk else ("", f" of {format_bytes(size)}")
            ends = zip((values[0], values[-1]), words, strict=True)
            parts = [f"{format_bytes(line[name])}{word} at {str(line['time'])[11:19]}" for line, word in ends]  # UTC
            texts.append(f"{subject.format(host=host)}: {', '.join(parts)}, the last sample")
    return texts


def clock_texts(host: str, samples: Sequence[Sample]) -> list[str]:
    """GPUs with reduced clocks at the last sample, except for the power limit, which is usual."""
    texts = []
    for gpu in (gpu for line in samples[-1:] for gpu in line.get("gpus", ())):
        if reasons := [reason for reason in gpu.get("throttle", ()) if reason != "power"]:
            reasons += [f"{gpu['sm_mhz']} MHz"] if "sm_mhz" in gpu else []
            reasons += [f"{gpu['temperature_c']} °C"] if "temperature_c" in gpu else []
            texts.append(f"GPU {gpu.get('index')} of {host} ran at reduced clocks: {', '.join(reasons)}")
    return texts


def judge_run(run: RunDir, *, since: float = math.nan, until: float = math.nan) -> list[CurveFinding]:
    """What is wrong with the curves of a run up to a time; with memory and speed since another."""
    series = read_run_series(run, since=since, until=until)
    return judge_curves(series) or worse_than_untrained(series)


def worse_than_untrained(series: Sequence[MetricSeries]) -> list[CurveFinding]:
    """The validation loss of paceline's trainer that ends above its value before the first step, while no other one has fallen."""
    return [
        CurveFinding(DIVERGED, item, 0, f"worse than untrained {FROM_START}")
        for item in series
        if item.name in OWN_VALIDATION and item.steps[0] == 0 and len(item.values) > MIN_EVALUATED
        if item.values[-1] > WORSE * item.values[0] >= 0
        if not any(other.kind == VALIDATION and other.values[-1] < other.values[0] for other in series)
    ]


def read_run_series(run: RunDir, *, since: float = math.nan, until: float = math.nan) -> list[MetricSeries]:
    """The curves of a run of paceline up to a time, memory and speed only since a time. NaN: no such limit is known."""
    table, attempt = SeriesTable(run.metrics.name), SeriesTable(run.metrics.name)
    steps, times = [0], [-math.inf]
    for number, record in enumerate(json_records(metric_lines(run.metrics))):
        time = unix_time(record.get("time"))
        if not time >= until:
            steps.append(table.add_record(record, number=number, time=time))
            times.append(time)
            if not time < since:
                attempt.add_record(record, number=number, time=time)
    series = [item for item in table.take_series() if item.kind in (LOSS, VALIDATION, GRADIENT, RATE)]
    series += [item for item in attempt.take_series() if item.kind in (MEMORY, THROUGHPUT, STEP_TIME)]
    for path in sorted(run.health_dir.glob("*.jsonl")):
        table = SeriesTable(f"health/{path.name}", prefix=f"{path.stem} ")
        last: dict[int, tuple[float, dict[str, Any]]] = {}  # by step
        limits: dict[str, Any] = {}
        for sample in json_records(lines_of(path)):
            limits |= {used: sample[limit] for used, limit, _ in MEMORY_FIELDS if limit in sample}
            time = unix_time(sample.get("time"))
            if not (time < since or time >= until):
                last[steps[bisect_right(times, time) - 1]] = time, memory_of(sample)
        for step, (time, memory) in last.items():
            table.add_record(memory, number=step, time=time, step=step)
        series += [item for item in table.take_series() if grows_by_much(item, limits)]
    return series


def metric_lines(path: Path) -> Iterator[bytes]:
    """The lines of metrics; of a long file some at even distances, evaluations, and those where NaN begins or ends."""
    with suppress(FileNotFoundError, NotADirectoryError), open_file(path) as file:
        distance = 1 + os.fstat(file.fileno()).st_size // WHOLE_METRICS
        num_evaluations, was_nan, changed_at, line, is_read = 0, False, 0, b"", True
        for number, line in enumerate(file):
            if (is_nan := b"NaN" in line) != was_nan:
                was_nan, changed_at = is_nan, number
            is_read = number % distance == 0 or number - changed_at < NUM_CHANGED
            if b'"val_bpb"' in line:
                num_evaluations += 1
                is_read = is_read or num_evaluations % (1 + num_evaluations // MAX_EVALUATIONS) == 0
            if is_read:
                yield line
        if not is_read:
            yield line


def lines_of(path: Path) -> list[bytes]:
    """The lines of a file, or of a long one those at even distances."""
    with suppress(OSError), open_file(path) as file:
        if (size := path.stat().st_size) <= WHOLE_BYTES:
            return file.readlines()
        lines = []
        for number in range(NUM_SAMPLES):
            file.seek(number * size // NUM_SAMPLES)
            file.readline(MAX_LINE_BYTES)
            lines.append(file.readline(MAX_LINE_BYTES))
        return lines
    return []


def grows_by_much(memory: MetricSeries, limits: Mapping[str, Any]) -> bool:
    """Whether memory grows by much of a host's, which others use too, or fills it nearly; true of all other memory."""
    name = memory.name.split()[-1]
    limit = limits.get(name)
    values = memory.finite
    if name != "ram_used" or not isinstance(limit, int) or not values:
        return True
    return max(values) - min(values) > MUCH_OF_MEMORY * limit or max(values) > NEARLY_ALL * limit


def memory_of(sample: Mapping[str, Any]) -> dict[str, Any]:
    """The used memory of a host and its GPUs in a sample of its health."""
    gpus = sample.get("gpus")
    memory = {name: sample.get(name) for name in ("ram_used", "cgroup_used")}
    return memory | {
        f"GPU {gpu.get('index')} used_bytes": gpu.get("used_bytes")
        for gpu in (gpus if isinstance(gpus, list) else ())
        if isinstance(gpu, dict)
    }


def read_kernel_errors(
    ranks: Mapping[int, int],
    *,
    since: float,
    until: float = math.inf,
    kmsg: Path = KMSG,
    files: tuple[Path, ...] = KERNEL_LOGS,
) -> list[tuple[int, str]]:
    """Lines of the kernel log about processes of the run, each with the rank; ranks maps process ids to ranks.

    Only lines between two Unix times count: later and earlier the same id may belong to another process. NaN: not known.
    """
    if not ranks:
        return []
    errors = []
    for at, line in read_kmsg(kmsg) or [line for path in files for line in read_kernel_file(path, near=since)]:
        if KERNEL_ERROR.search(line) and not (at < since - KILL_DELAY_S or at > min(time.time(), until) + KILL_DELAY_S):
            errors += [(ranks[pid], line) for pid in map(int, PID.findall(line)) if pid in ranks][:1]
    return errors


def has_oom_kill(start: float, end: float, *, kmsg: Path = KMSG) -> bool | None:
    """Whether the kernel killed a process between two Unix times because memory ran out; None if that cannot be known.

    In a container the process ids differ from the kernel's, so a kill of any process counts.
    """
    lines = read_kmsg(kmsg)
    if not lines or lines[0][0] > start:
        return None  # not readable, or older records were overwritten
    return any(start <= at <= end + KILL_DELAY_S and OOM_KILL.search(text) for at, text in lines)


def read_kmsg(path: Path) -> list[tuple[float, str]]:
    """Unix time and text of each record of /dev/kmsg.

    One read returns one record, `level,number,microseconds,flags;text`, and none after the last one. Where the next one was
    overwritten meanwhile, a read fails once and the one after it returns the oldest that is left.
    """
    booted = time.time() - time.monotonic()  # the kernel's clock stops during a suspend, as the monotonic one does
    lines: list[tuple[float, str]] = []
    with suppress(OSError), io.FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK)) as file:
        while record := read_record(file):
            head, _, text = record.decode(errors="replace").partition("\n")[0].partition(";")
            parts = head.split(",")
            if len(parts) > 2 and parts[2].isdecimal():
                lines.append((booted + int(parts[2]) / 1e6, text))
    return lines


def read_record(file: io.RawIOBase) -> bytes | None:
    """Returns the next record that is left; empty or None behind the last one."""
    for _ in range(MAX_OVERWRITTEN):
        with suppress(BrokenPipeError):
            return file.read(MAX_RECORD_BYTES)
    return None


def read_kernel_file(path: Path, *, near: float) -> Iterator[tuple[float, str]]:
    """Unix time and text of each line of a system log; NaN if a line has none. near: a time within a year before them."""
    year = time.localtime(0.0 if math.isnan(near) else near).tm_year
    for line in read_end(path, KERNEL_LOG_BYTES)[0].decode(errors="replace").splitlines():
        at = unix_time(line[:11].replace(" ", "T") + line[11:].partition(" ")[0])
        for date in (f"{year} {line[:15]}", f"{year + 1} {line[:15]}"):
            with suppress(ValueError, OverflowError):
                at = at if at >= near - KILL_DELAY_S else time.mktime(time.strptime(date, "%Y %b %d %H:%M:%S"))
        yield at, line


def slurm_logs(run: RunDir, events: Sequence[Mapping[str, Any]], *, has_attempt: bool = True) -> list[Log]:
    """How Slurm says that the job ended, and the lines of its own in the log of the job's last start.

    has_attempt: the run has begun; else no other log has the reason, and all lines count.
    """
    ends = [event for event in events if event.get("event") == "slurm_job"]
    logs = [
        read_log(
            [f"JobState={event.get('state')} NodeList={event.get('nodes')}\n".encode()], source=event.get("source")
        )
        for event in ends[-1:]
        if event.get("state") not in ("COMPLETED", "FAILED")  # of FAILED the run itself knows why
    ]
    names = f"slurm-{ends[-1].get('job_id')}.log" if ends else "slurm-*.log"
    paths = sorted(run.path.glob(names), key=lambda path: path.stat().st_mtime)
    for path in paths[-1:] if ends or not has_attempt else ():
        text = read_end(path, SAMPLE_BYTES)[0].rpartition(b"\nslurm   job ")[2]
        lines = [line for line in text.splitlines(keepends=True) if SLURM_LINE.match(line) or not has_attempt]
        logs.append(read_log(lines, source=str(path)))
    return logs
