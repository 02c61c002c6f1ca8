"""
NVIDIA GPUs as they are now, through NVML, for launch/health.py; none where no driver is. What a card does not tell is absent.

Xid errors come as events: the wait between two samples is the wait for them.
"""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.check.gpu_probe import GPU_SENSOR, UNCORRECTED, ask, count_nvidia_cards, processes, text, throttle, watts
from paceline.plan.machine import visible_devices

CORRECTED, SINCE_BOOT = 0, 0  # nvml.h
SM_CLOCK, MEMORY_CLOCK = 1, 2
PCIE_TX_BYTES, PCIE_RX_BYTES = 197, 198  # NVML_FI_DEV_PCIE_COUNT_*: counters, of newer drivers
THROUGHPUT_TX, THROUGHPUT_RX = 0, 1
THROUGHPUT_EVERY = 5  # samples: without the counters each question takes the driver 20 ms


class GpuSampler:
    """The GPUs that this process sees; sample() as often as you like."""

    def __init__(self, nvml: Any, handles: dict[int, Any], run_id: str):
        """handles: by the driver's index."""
        self.nvml, self.handles = nvml, handles
        self.silent: str | None = None
        self._mark = f"TORCHELASTIC_RUN_ID={run_id}".encode()
        self._ours: dict[int, bool | None] = {}
        self._xids: dict[int, list[int]] = {index: [] for index in handles}
        self._counted: dict[int, tuple[float, int, int]] = {}
        self._first_mj: dict[int, int] = {}
        self._samples = 0
        self._events = self._register()

    @staticmethod
    def open(run_id: str) -> "GpuSampler":
        """Without any GPU where there is none, or where NVML does not answer: `silent` then says why."""
        if count_nvidia_cards() == 0:
            return GpuSampler(None, {}, run_id)
        try:
            import pynvml  # type: ignore[import-untyped, unused-ignore]

            pynvml.nvmlInit()
            every = [ask(pynvml, pynvml.nvmlDeviceGetHandleByIndex, i) for i in range(pynvml.nvmlDeviceGetCount())]
        except Exception as error:  # no driver, one of another version: nothing that a sampler could mend
            sampler = GpuSampler(None, {}, run_id)
            sampler.silent = f"{type(error).__name__}: {error}"
            return sampler
        uuids = [text(ask(pynvml, pynvml.nvmlDeviceGetUUID, handle)) or "" for handle in every]
        seen = visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES"), uuids)
        return GpuSampler(pynvml, {index: every[index] for index in sorted(seen)}, run_id)

    def sample(self) -> list[dict[str, Any]]:
        self._samples += 1
        return [self._gpu(index, handle) for index, handle in self.handles.items()]

    def wait(self, seconds: float) -> bool:
        """Until the time is up, or an Xid error came; whether one came."""
        if self._events is None:
            time.sleep(seconds)
            return False
        nvml = self.nvml
        try:
            event = nvml.nvmlEventSetWait_v2(self._events, int(1000 * seconds) + 1)
            self._xids[nvml.nvmlDeviceGetIndex(event.device)].append(int(event.eventData))
            return True
        except nvml.NVMLError_Timeout:
            return False
        except (nvml.NVMLError, KeyError):
            self._events = None
            time.sleep(seconds)
            return False

    def _register(self) -> Any:
        """For Xid errors; None where no card tells of them."""
        if not self.handles:
            return None
        nvml = self.nvml
        events, told = ask(nvml, nvml.nvmlEventSetCreate), False
        for handle in self.handles.values():
            with suppress(nvml.NVMLError, AttributeError):
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
                told = True
        return events if told else None

    def _gpu(self, index: int, handle: Any) -> dict[str, Any]:
        def value(name: str, *arguments: Any) -> Any:
            return ask(self.nvml, getattr(self.nvml, name, lambda *_: None), handle, *arguments)

        running = processes(value)
        memory, use = value("nvmlDeviceGetMemoryInfo"), value("nvmlDeviceGetUtilizationRates")
        generation, width = value("nvmlDeviceGetCurrPcieLinkGeneration"), value("nvmlDeviceGetCurrPcieLinkWidth")
        limit = value("nvmlDeviceGetEnforcedPowerLimit") or value("nvmlDeviceGetPowerManagementLimit")
        return {
            "index": index,
            "name": text(value("nvmlDeviceGetName")),
            "used_bytes": None if memory is None else int(memory.used),
            "total_bytes": None if memory is None else int(memory.total),
            "use": None if use is None else use.gpu / 100,
            "memory_use": None if use is None else use.memory / 100,
            "power_w": watts(value("nvmlDeviceGetPowerUsage")),
            "power_limit_w": watts(limit),
            "energy_j": self._energy(index, value("nvmlDeviceGetTotalEnergyConsumption")),
            "temperature_c": value("nvmlDeviceGetTemperature", GPU_SENSOR),
            "sm_mhz": value("nvmlDeviceGetClockInfo", SM_CLOCK),
            "memory_mhz": value("nvmlDeviceGetClockInfo", MEMORY_CLOCK),
            "throttle": throttle(value),
            "pcie": None if width is None else f"gen {generation or '?'} x{width}",
            **self._traffic(index, value),
            "processes": None if running is None else [self._process(each) for each in running],
            "errors": self._errors(index, value),
        }

    def _process(self, found: dict[str, Any]) -> dict[str, Any]:
        """ours: of this attempt; absent where the driver gives pids that mean nothing here, as in some containers."""
        pid = found["pid"]
        if pid not in self._ours:
            self._ours[pid] = self._is_ours(pid)
        known = {"name": found["name"], "bytes": found["used_bytes"], "ours": self._ours[pid]}
        return {"pid": pid, **{name: value for name, value in known.items() if value is not None}}

    def _is_ours(self, pid: int) -> bool | None:
        try:
            return self._mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except PermissionError:
            return False  # another user's
        except OSError:
            return None

    def _errors(self, index: int, value: Any) -> dict[str, int]:
        xids = self._xids[index]
        found = {
            "xid": xids[-1] if xids else None,
            "xid_count": len(xids) or None,
            "ecc_corrected": value("nvmlDeviceGetTotalEccErrors", CORRECTED, SINCE_BOOT),
            "ecc_uncorrected": value("nvmlDeviceGetTotalEccErrors", UNCORRECTED, SINCE_BOOT),
            "pcie_replays": value("nvmlDeviceGetPcieReplayCounter"),
        }
        return {name: count for name, count in found.items() if count is not None}

    def _energy(self, index: int, millijoules: int | None) -> int | None:
        """Since this sampler began; the driver counts from its own start."""
        if millijoules is None:
            return None
        return round((millijoules - self._first_mj.setdefault(index, millijoules)) / 1000)

    def _traffic(self, index: int, value: Any) -> dict[str, int]:
        """Bytes per second over PCIe, seen from the card."""
        fields = value("nvmlDeviceGetFieldValues", [PCIE_TX_BYTES, PCIE_RX_BYTES]) or ()
        counts = [int(each.value.ullVal) for each in fields if each.nvmlReturn == 0]
        if len(counts) == 2 and any(counts):
            now, before = time.monotonic(), self._counted.get(index)
            self._counted[index] = (now, counts[0], counts[1])
            if before is None:
                return {}
            sent, came = (
                (after - earlier) / (now - before[0]) for after, earlier in zip(counts, before[1:], strict=True)
            )
            return {"pcie_out_bps": round(sent), "pcie_in_bps": round(came)}
        if self._samples % THROUGHPUT_EVERY != 1:
            return {}
        kilobytes = [value("nvmlDeviceGetPcieThroughput", counter) for counter in (THROUGHPUT_TX, THROUGHPUT_RX)]
        names = ("pcie_out_bps", "pcie_in_bps")
        return {name: 1000 * each for name, each in zip(names, kilobytes, strict=True) if each is not None}
