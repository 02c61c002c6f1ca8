"""
Samples of a host's health while an attempt runs: `python -m paceline.launch.health`, which the agent starts.

The sampler is a process of its own: a wedged driver or a dead disk stops the samples and nothing else. It writes a line of
health/<host>.jsonl every few seconds. A field that this machine does not report is absent, and one that seldom changes (SLOW)
stands in the lines where it has changed, and in every WHOLE_EVERY-th. A line that the disk has no room for is left out. An Xid
error is an event of the driver: the wait between two samples is the wait for them.
"""

import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.plan.host import cpu_use, memory_limit, memory_sizes, physical_memory_bytes, transfer_counters
from paceline.plan.nvml import (
    ABSENT,
    CORRECTED,
    SINCE_BOOT,
    UNCORRECTED,
    Card,
    XidEvents,
    count_nvidia_cards,
    cuda_indices,
    import_nvml,
    list_cards,
)
from paceline.rundir import RunDir, append_event, append_sample, utc_now

SM_CLOCK, MEMORY_CLOCK = 1, 2  # nvml.h
PCIE_TX_BYTES, PCIE_RX_BYTES = 197, 198  # NVML_FI_DEV_PCIE_COUNT_*: counters, of newer drivers
THROUGHPUT_TX, THROUGHPUT_RX = 0, 1
THROUGHPUT_EVERY = 5  # samples: without the counters each question takes the driver 20 ms
WHOLE_EVERY = 30  # lines
EARLIEST = 0.25  # of the time between two lines: no line comes sooner, however many Xid errors do
SLOW = {
    "cores", "ram_total", "cgroup_limit", "disk_total", "name", "total_bytes", "power_limit_w", "pcie", "processes", "errors",
}  # fmt: skip


def open_gpus(run_id: str | None, *, on_silence: Callable[[str], object]) -> "GpuSampler":
    """Opens the driver; without one, or where it does not answer, which on_silence reports, there are no cards."""
    nvml = import_nvml()
    try:
        if nvml is None:
            raise ModuleNotFoundError("nvidia-ml-py is not installed")
        nvml.nvmlInit()
        cards = list_cards(nvml)
    except Exception as error:  # no driver, or one of another version: a sampler can fix neither
        is_absent = nvml is None or type(error).__name__ in ABSENT
        if not is_absent or count_nvidia_cards():  # neither driver nor card is what most hosts without GPUs have
            reason = f"the NVIDIA driver does not answer ({type(error).__name__}: {error})"
            on_silence(f"health samples have no GPUs: {reason}")
        return GpuSampler(None, {}, run_id)
    visible = cuda_indices(os.environ.get("CUDA_VISIBLE_DEVICES"), cards)
    return GpuSampler(nvml, {index: cards[index] for index in sorted(visible)}, run_id)


class GpuSampler:
    """The GPUs that this process sees; sample() as often as you like."""

    def __init__(self, nvml: Any, cards: dict[int, Card], run_id: str | None):
        """cards: by the driver's index. run_id None: whose processes they hold is not known."""
        self.cards = cards
        self._run_mark = f"TORCHELASTIC_RUN_ID={run_id}".encode() if run_id else None
        self._is_own: dict[int, bool | None] = {}
        self._xids: dict[int, list[int]] = {index: [] for index in cards}
        self._pcie_counts: dict[int, tuple[float, int, int]] = {}
        self._first_mj: dict[int, int] = {}
        self._samples = 0
        self._xid_events = XidEvents(nvml, list(cards.values()))

    def sample(self) -> list[dict[str, Any]]:
        """Returns the values of every card; None for what it does not report."""
        self._samples += 1
        return [self._values(index, card) for index, card in self.cards.items()]

    def wait(self, seconds: float) -> bool:
        """Waits until the time is up or an Xid error came; returns whether one came."""
        event = self._xid_events.wait(seconds)
        if event is None or event[0] not in self._xids:
            return False
        index, xid = event
        self._xids[index].append(xid)
        return True

    def _values(self, index: int, card: Card) -> dict[str, Any]:
        value, processes = card.value, card.processes()
        memory, use = value("nvmlDeviceGetMemoryInfo"), value("nvmlDeviceGetUtilizationRates")
        used_mj = value("nvmlDeviceGetTotalEnergyConsumption")
        generation, width = value("nvmlDeviceGetCurrPcieLinkGeneration"), value("nvmlDeviceGetCurrPcieLinkWidth")
        return {
            "index": index,
            "name": card.name(),
            "used_bytes": None if memory is None else int(memory.used),
            "total_bytes": None if memory is None else int(memory.total),
            "use": None if use is None else use.gpu / 100,
            "memory_use": None if use is None else use.memory / 100,
            "power_w": card.power_w(),
            "power_limit_w": card.power_limit_w(),
            # since this sampler began: the driver counts from its own start
            "energy_j": None
            if used_mj is None
            else round((used_mj - self._first_mj.setdefault(index, used_mj)) / 1000),
            "temperature_c": card.temperature_c(),
            "sm_mhz": value("nvmlDeviceGetClockInfo", SM_CLOCK),
            "memory_mhz": value("nvmlDeviceGetClockInfo", MEMORY_CLOCK),
            "throttle": card.throttle(),
            "pcie": None if width is None else f"gen {generation or '?'} x{width}",
            **self._traffic(index, card),
            "processes": None if processes is None else [self._process(process) for process in processes],
            "errors": self._errors(index, card),
        }

    def _process(self, process: dict[str, Any]) -> dict[str, Any]:
        """Returns one process of a card. ours: whether it is of this attempt; absent in containers that hide its pid."""
        pid = process["pid"]
        if self._run_mark is None:
            self._is_own[pid] = None
        elif pid not in self._is_own:
            try:
                self._is_own[pid] = self._run_mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError as error:
                self._is_own[pid] = False if isinstance(error, PermissionError) else None  # of another user; unknown
        values = {"name": process["name"], "bytes": process["used_bytes"], "ours": self._is_own[pid]}
        return {"pid": pid, **{name: value for name, value in values.items() if value is not None}}

    def _errors(self, index: int, card: Card) -> dict[str, int]:
        xids, value = self._xids[index], card.value
        counts = {
            "xid": xids[-1] if xids else None,
            "xid_count": len(xids) or None,
            "ecc_corrected": value("nvmlDeviceGetTotalEccErrors", CORRECTED, SINCE_BOOT),
            "ecc_uncorrected": value("nvmlDeviceGetTotalEccErrors", UNCORRECTED, SINCE_BOOT),
            "pcie_replays": value("nvmlDeviceGetPcieReplayCounter"),
        }
        return {name: count for name, count in counts.items() if count is not None}

    def _traffic(self, index: int, card: Card) -> dict[str, int]:
        """Returns bytes per second over PCIe, seen from the card."""
        fields = card.value("nvmlDeviceGetFieldValues", [PCIE_TX_BYTES, PCIE_RX_BYTES]) or ()
        counts = [int(field.value.ullVal) for field in fields if field.nvmlReturn == 0]
        if len(counts) == 2 and any(counts):
            now, before = time.monotonic(), self._pcie_counts.get(index)
            self._pcie_counts[index] = (now, counts[0], counts[1])
            if before is None:
                return {}
            seconds = now - before[0]
            sent, received = counts[0] - before[1], counts[1] - before[2]
            return {"pcie_out_bps": round(sent / seconds), "pcie_in_bps": round(received / seconds)}
        if self._samples % THROUGHPUT_EVERY != 1:
            return {}
        kilobytes = [card.value("nvmlDeviceGetPcieThroughput", counter) for counter in (THROUGHPUT_TX, THROUGHPUT_RX)]
        names = ("pcie_out_bps", "pcie_in_bps")
        return {name: 1000 * count for name, count in zip(names, kilobytes, strict=True) if count is not None}


class Sampler:
    """Writes the lines of one host: its processors, memory, disk and network, and its GPUs."""

    def __init__(self, run: RunDir, gpus: GpuSampler, *, host: str | None = None):
        """host: what the run calls this host; None: its own name."""
        self.run, self.gpus = run, gpus
        self.path = run.health((host or socket.gethostname()).replace("/", "_"))
        self._counters: dict[str, int] = {}
        self._time = 0.0
        self._lines = 0
        self._written: dict[Any, Any] = {}  # the SLOW values that were written last, by GPU and name

    def sample_host(self) -> dict[str, Any]:
        """Returns the host's values, rates over the time since the previous sample; None for what it does not report."""
        memory, limit = memory_sizes(), memory_limit()
        total, available = memory.get("MemTotal") or physical_memory_bytes(), memory.get("MemAvailable")
        cpu = cpu_use()
        values: dict[str, Any] = {
            "cpu": round(cpu, 3) if self._time else None,
            "cores": os.cpu_count(),
            "ram_used": None if available is None else total - available,
            "ram_total": total,
            "cgroup_used": limit.used_bytes if limit else None,
            "cgroup_limit": limit.limit_bytes if limit else None,
        }
        with suppress(OSError):
            disk = shutil.disk_usage(self.run.path)
            values |= {"disk_free": disk.free, "disk_total": disk.total}
        now, counters = time.monotonic(), transfer_counters()
        seconds, before = now - self._time, self._counters
        self._time, self._counters = now, counters
        rates = {name: (counters[name] - before[name]) / seconds for name in counters if name in before}
        return values | {f"{name}_bps": round(rate) for name, rate in rates.items()}

    def follow(self, every_s: float) -> None:
        """Writes a line every every_s seconds, and one soon after an Xid error, until the process is killed."""
        due = time.monotonic()
        while True:
            self.write()
            due, earliest = max(due + every_s, time.monotonic()), time.monotonic() + EARLIEST * every_s
            while (seconds := due - time.monotonic()) > 0:
                if self.gpus.wait(seconds):
                    due = min(due, max(earliest, time.monotonic()))

    def write(self) -> None:
        """Samples once and appends the line."""
        gpus = self.gpus.sample()
        line = {"time": utc_now(), **self._without_repeats(None, self.sample_host())}
        if gpus:
            line["gpus"] = [{"index": gpu["index"], **self._without_repeats(gpu["index"], gpu)} for gpu in gpus]
        if append_sample(self.path, line):
            self._lines += 1
        else:
            self._lines, self._written = 0, {}

    def _without_repeats(self, index: int | None, values: dict[str, Any]) -> dict[str, Any]:
        """Returns the values without those of SLOW that are as they were. index: of a GPU, None for the host."""
        line = {}
        for name, value in values.items():
            # a SLOW value that became empty is written once
            if value is None or (name not in SLOW and value in ([], {})):
                continue
            if name in SLOW:
                content = json.dumps([process["pid"] for process in value] if name == "processes" else value)
                if self._written.get((index, name)) == content and self._lines % WHOLE_EVERY:
                    continue
                self._written[index, name] = content
            line[name] = value
        return line


def main() -> None:
    """Runs the sampler process until it is killed."""
    run_path, every_s, run_id, *host = sys.argv[1:]
    os.nice(10)
    os.chdir(run_path)  # it is found there where the run is renamed
    run = RunDir(Path())
    gpus = open_gpus(run_id, on_silence=lambda reason: append_event(run, "note", text=reason))
    Sampler(run, gpus, host=next(iter(host), None)).follow(float(every_s))


def live_samples(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields lines of this host as they are requested, and writes nothing. folder: on the disk to measure.

    note, in a line: why there are no GPUs although the host has cards.
    """
    notes: list[str] = []
    sampler = Sampler(RunDir(folder), open_gpus(None, on_silence=notes.append))
    while True:
        gpus = [{name: value for name, value in gpu.items() if value is not None} for gpu in sampler.gpus.sample()]
        host = {name: value for name, value in sampler.sample_host().items() if value is not None}
        yield {"time": utc_now(), **host, "gpus": gpus, **({"note": notes[0]} if notes else {})}


if __name__ == "__main__":
    main()
