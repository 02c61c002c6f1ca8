"""
The one reader of NVIDIA's driver: NVML through nvidia-ml-py, or nvidia-smi where that package is not installed.

It makes no CUDA context, so a full card answers too. A wedged driver never answers: whoever cannot wait calls this from a process
of its own, with a deadline. nvidia-ml-py is imported only when the driver is first read.
"""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from paceline.errors import PlanError
from paceline.plan.host import names_in, process_name, read_text
from paceline.units import MIB

NVIDIA_PCI_VENDOR, DISPLAY_PCI_CLASS = "0x10de", "0x03"
ABSENT = {"NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded"}  # no NVIDIA driver here
MISMATCH = "NVMLError_LibRmVersionMismatch"
NOT_SUPPORTED = "NVMLError_NotSupported"
NVIDIA_SMI_S = 20.0  # the first call after a boot loads the driver
GPU_SENSOR, CORRECTED, UNCORRECTED, SINCE_BOOT = 0, 0, 1, 0  # nvml.h
# nvmlClocksEventReason*
SLOWED = {0x04: "power", 0x08: "hardware", 0x20: "thermal", 0x40: "thermal", 0x80: "power_brake"}


class LostCards(PlanError):
    """Every card left the bus."""


@dataclass(frozen=True)
class DriverGpu:
    """A card as the driver lists it. memory_bytes is 0 and capability is None where the driver does not report them."""

    uuid: str
    name: str
    memory_bytes: int
    capability: tuple[int, int] | None
    is_split: bool = False  # by MIG: CUDA shows its parts instead
    parts: tuple["DriverGpu", ...] = ()


@dataclass(frozen=True)
class Card:
    """One card of an initialized NVML; each method returns None where the card or this driver has no answer."""

    nvml: Any  # pynvml, or its functions over listed values
    handle: Any  # None: the card left the bus

    def value(self, name: str, *arguments: Any) -> Any:
        """Returns what NVML's function of this name gives for this card."""
        return ask(self.nvml, getattr(self.nvml, name, lambda *_: None), self.handle, *arguments)

    def name(self) -> str | None:
        name: str | None = as_text(self.value("nvmlDeviceGetName"))
        return name

    def uuid(self) -> str | None:
        uuid: str | None = as_text(self.value("nvmlDeviceGetUUID"))
        return uuid

    def is_split(self) -> bool | None:
        """Returns whether MIG is on; a card without MIG answers that it is not supported."""
        mode = self.value("nvmlDeviceGetMigMode")
        return None if self.name() is None else bool(mode and mode[0])

    def parts(self) -> list["Card"]:
        """Returns the MIG devices of a card that MIG splits."""
        count = self.value("nvmlDeviceGetMaxMigDeviceCount") if self.is_split() else None
        handles = [self.value("nvmlDeviceGetMigDeviceHandleByIndex", index) for index in range(count or 0)]
        return [Card(self.nvml, handle) for handle in handles if handle is not None]

    def power_w(self) -> float | None:
        return watts(self.value("nvmlDeviceGetPowerUsage"))

    def power_limit_w(self) -> float | None:
        limit = self.value("nvmlDeviceGetEnforcedPowerLimit")
        return watts(limit or self.value("nvmlDeviceGetPowerManagementLimit"))

    def temperature_c(self) -> int | None:
        celsius: int | None = self.value("nvmlDeviceGetTemperature", GPU_SENSOR)
        return celsius

    def throttle(self) -> list[str] | None:
        """Returns why the clocks are held down now; idling and clocks that the user fixed are no fault."""
        bits = self.value("nvmlDeviceGetCurrentClocksEventReasons")
        if bits is None:
            bits = self.value("nvmlDeviceGetCurrentClocksThrottleReasons")  # its name before driver 535
        return None if bits is None else sorted({name for bit, name in SLOWED.items() if bits & bit})

    def processes(self) -> list[dict[str, Any]] | None:
        """Returns pid, name and used_bytes of all users' processes; in a container pids may be the host's, without a name here."""
        lists = []
        for function in ("nvmlDeviceGetGraphicsRunningProcesses", "nvmlDeviceGetComputeRunningProcesses"):
            running = self.value(f"{function}_v3")
            lists.append(self.value(f"{function}_v2") if running is None else running)  # no version 3 before driver 510
        if lists == [None, None]:
            return None
        used_bytes = {process.pid: process.usedGpuMemory for running in lists for process in running or ()}
        return [{"pid": pid, "name": process_name(pid), "used_bytes": used} for pid, used in sorted(used_bytes.items())]


class XidEvents:
    """Xid errors of some cards, as the driver reports them."""

    def __init__(self, nvml: Any, cards: list[Card]):
        self.nvml = nvml
        self._events: Any = None  # None where no card reports them
        if not cards:
            return
        events = ask(nvml, nvml.nvmlEventSetCreate)
        for card in cards:
            with suppress(nvml.NVMLError, AttributeError):
                nvml.nvmlDeviceRegisterEvents(card.handle, nvml.nvmlEventTypeXidCriticalError, events)
                self._events = events

    def wait(self, seconds: float) -> tuple[int, int] | None:
        """Waits until the time is up or an Xid error came; returns the card's index and the error's number."""
        if self._events is None:
            time.sleep(seconds)
            return None
        try:
            event = self.nvml.nvmlEventSetWait_v2(self._events, int(1000 * seconds) + 1)
            return self.nvml.nvmlDeviceGetIndex(event.device), int(event.eventData)
        except self.nvml.NVMLError as error:
            if not isinstance(error, self.nvml.NVMLError_Timeout):
                self._events = None
                time.sleep(seconds)
            return None


def import_nvml() -> Any:
    """Returns nvidia-ml-py's module; None where it is not installed."""
    try:
        import pynvml  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        return None
    return pynvml


def ask(nvml: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns NVML's answer; None where an argument is None, or where this card or this driver has no answer."""
    try:
        return None if None in arguments else function(*arguments)
    except (nvml.NVMLError, AttributeError):
        return None


def list_cards(nvml: Any) -> list[Card]:
    """Returns every card in the driver's order; one that left the bus has the handle None."""
    return [Card(nvml, ask(nvml, nvml.nvmlDeviceGetHandleByIndex, i)) for i in range(nvml.nvmlDeviceGetCount())]


def list_gpus() -> list[DriverGpu | None]:
    """Returns every card by the driver's index, none without a driver; one that does not answer is None, with a note.

    Raises PlanError where there is a driver that does not answer, LostCards where no card does.
    """
    nvml = import_nvml()
    if nvml is None:
        return [*parse_nvidia_smi(run_nvidia_smi("--query-gpu=uuid,name,memory.total,compute_cap"))]
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if type(error).__name__ in ABSENT:
            return []
        raise silent_driver(error) from error
    gpus: list[DriverGpu | None] = []
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                gpus.append(read_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(index)))
            except nvml.NVMLError as error:  # a card that left the bus is lost, or an unknown error
                reason = f"GPU {index} does not answer ({error})"
                print(f"note    {reason}: it is left out", file=sys.stderr)
                gpus.append(None)
    finally:
        nvml.nvmlShutdown()
    if gpus and not any(gpus):
        raise LostCards(f"no GPU of this machine answers: {reason}", fix="sudo reboot; or --device cpu")
    return gpus


def read_gpu(nvml: Any, handle: Any) -> DriverGpu:
    """Reads what a plan needs of one card or MIG device; raises NVMLError where it does not answer."""
    try:
        memory_bytes = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError as error:
        if type(error).__name__ != NOT_SUPPORTED:  # this is how GB10 answers, whose memory is the host's
            raise
        memory_bytes = 0
    card = Card(nvml, handle)
    capability = card.value("nvmlDeviceGetCudaComputeCapability")
    parts = [read_gpu(nvml, part.handle) for part in card.parts()]
    return DriverGpu(
        uuid=as_text(nvml.nvmlDeviceGetUUID(handle)),
        name=as_text(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=memory_bytes,
        capability=None if capability is None else tuple(capability),
        is_split=bool(card.is_split()),
        parts=tuple(replace(part, capability=part.capability or capability) for part in parts),
    )


def run_nvidia_smi(query: str) -> str:
    """Returns the table that nvidia-smi prints, empty where the program is not installed; raises PlanError where it fails."""
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", *query.split(), "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise silent_driver(error) from error
    if done.returncode:
        raise silent_driver((done.stdout + done.stderr).strip() or f"nvidia-smi ended with {done.returncode}")
    return done.stdout


def parse_nvidia_smi(table: str) -> list[DriverGpu]:
    """Reads `GPU-5f..., NVIDIA H200, 143771, 9.0` for each card: memory in MiB, `[N/A]` for what the driver does not report."""
    gpus = []
    for line in (line for line in table.splitlines() if line.startswith("GPU-")):
        uuid, name, memory_mib, capability = (field.strip() for field in line.split(","))
        major, _, minor = capability.partition(".")
        is_known = major.isdigit() and minor.isdigit()
        memory_bytes = int(memory_mib) * MIB if memory_mib.isdigit() else 0
        gpus.append(DriverGpu(uuid, name, memory_bytes, (int(major), int(minor)) if is_known else None))
    return gpus


def silent_driver(why: object) -> PlanError:
    """Returns the error of a driver that is there and does not answer."""
    if type(why).__name__ == MISMATCH:
        return PlanError(
            "the NVIDIA driver does not answer: Driver/library version mismatch, as after an update without a reboot",
            fix="sudo reboot; or --device cpu",
        )
    return PlanError(f"the NVIDIA driver does not answer: {why}", fix="run nvidia-smi; or --device cpu")


def process_memory(uuid: str) -> list[tuple[int, int]]:
    """Returns (pid, bytes) of the processes that compute on one card; empty where neither NVML nor nvidia-smi reports them."""
    nvml = import_nvml()
    if nvml is not None:
        with suppress(nvml.NVMLError):
            nvml.nvmlInit()
            try:
                running = nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByUUID(uuid))
            finally:
                nvml.nvmlShutdown()
            if all(process.usedGpuMemory is not None for process in running):
                return [(int(process.pid), int(process.usedGpuMemory)) for process in running]
    try:
        table = run_nvidia_smi(f"-i {uuid} --query-compute-apps=pid,used_memory")
    except PlanError:
        return []
    rows = [line.split(",") for line in table.splitlines()]
    return [(int(pid), int(mib) * MIB) for pid, mib in rows if pid.strip().isdigit() and mib.strip().isdigit()]


def visible_devices(visible: str | None, uuids: list[str], parts: Sequence[Sequence[str]] = ()) -> list[int]:
    """Returns the driver's indices in CUDA's order. visible: the value of CUDA_VISIBLE_DEVICES, None if unset.

    parts: the UUIDs of each card's MIG devices; one of them stands for its card. As CUDA reads it, the first invalid entry hides
    itself and all after it.
    """
    if visible is None:
        return list(range(len(uuids)))
    names = [(uuid, *more) for uuid, more in zip_longest(uuids, parts, fillvalue=())]
    visible_indices: list[int] = []
    for entry in (part.strip() for part in visible.split(",")):
        matches = [i for i, known in enumerate(names) if entry and any(name.startswith(entry) for name in known)]
        if entry.isdigit() and int(entry) < len(uuids):
            visible_indices.append(int(entry))
        elif len(matches) == 1:
            visible_indices.append(matches[0])
        else:
            break
    return visible_indices


def cuda_indices(visible: str | None, cards: Sequence[Card]) -> list[int]:
    """Returns visible_devices of an initialized NVML's cards; one that does not answer has no UUID."""
    parts = [[part.uuid() or "" for part in card.parts()] for card in cards]
    return visible_devices(visible, [card.uuid() or "" for card in cards], parts)


def count_nvidia_cards(pci: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """Counts the cards on the PCI bus, with or without a driver. None where the bus is not shown (WSL, some containers)."""
    if not pci.is_dir():
        return None
    devices = [(read_text(pci / name / "vendor"), read_text(pci / name / "class") or "") for name in names_in(pci)]
    return sum(vendor == NVIDIA_PCI_VENDOR and kind.startswith(DISPLAY_PCI_CLASS) for vendor, kind in devices)


def kernel_driver_version() -> str | None:
    """Returns the version of the loaded kernel module, which is there even when NVML does not answer."""
    return read_text("/sys/module/nvidia/version")


def as_text(value: Any) -> Any:
    """Decodes the bytes that older bindings return; anything else stays as it is."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def watts(milliwatts: int | None) -> float | None:
    """Returns watts for NVML's milliwatts."""
    return None if milliwatts is None else milliwatts / 1000
