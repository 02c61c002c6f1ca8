"""
The NVIDIA cards and their driver, asked through NVML. `python -m paceline.check.gpu_probe`.

No CUDA context is made, so a full card can be asked too. A wedged driver never answers: the asker has the deadline.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.check.probe import Json, answer, process_name
from paceline.kernel_files import names_in, read_text
from paceline.plan.machine import visible_devices

NVIDIA_PCI_VENDOR, DISPLAY_PCI_CLASS = "0x10de", "0x03"
ABSENT = {"NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded"}
MISMATCH = "NVMLError_LibRmVersionMismatch"  # what nvidia-smi calls "Driver/library version mismatch"
P2P_READ, P2P_WRITE, P2P_OK = 0, 1, 0  # nvml.h; the binding's own NVML_P2P_CAPS_INDEX_READ is a tuple by mistake
COMPUTE_MODES = {0: "default", 1: "exclusive", 2: "prohibited", 3: "exclusive"}
SLOWED = {
    0x04: "power",
    0x08: "hardware",
    0x20: "thermal",
    0x40: "thermal",
    0x80: "power_brake",
}  # nvmlClocksEventReason*
MAX_NVLINKS = 18
UNCORRECTED, SINCE_BOOT, GPU_SENSOR = 1, 0, 0


def probe_gpus(request: Json) -> Json:
    num_cards = count_nvidia_cards()
    try:
        import pynvml  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        error = "the package nvidia-ml-py is not installed" if num_cards else None
        gpus: list[Any] | None = None if num_cards else []
        return {"driver": driver_of_kernel(), "nvml_error": error, "gpus": gpus, "nvidia_cards": num_cards}
    facts = describe_gpus(pynvml, visible=os.environ.get("CUDA_VISIBLE_DEVICES"), num_cards=num_cards)
    return {**facts, "driver": facts["driver"] or driver_of_kernel(), "nvidia_cards": num_cards}


def count_nvidia_cards(pci: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """Cards on the PCI bus, whether or not a driver is loaded. None where the bus is not shown (WSL, some containers)."""
    if not pci.is_dir():
        return None
    marks = [(read_text(pci / name / "vendor"), read_text(pci / name / "class") or "") for name in names_in(pci)]
    return sum(vendor == NVIDIA_PCI_VENDOR and kind.startswith(DISPLAY_PCI_CLASS) for vendor, kind in marks)


def driver_of_kernel() -> dict[str, str | None] | None:
    """The loaded kernel module's version, for when NVML does not answer."""
    version = read_text("/sys/module/nvidia/version")
    return None if version is None else {"version": version, "cuda": None}


def describe_gpus(nvml: Any, *, visible: str | None, num_cards: int | None) -> Json:
    """driver, nvml_error and gpus, from `nvml` with pynvml's functions. What a card does not tell is None."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        kind = type(error).__name__
        said = "Driver/library version mismatch" if kind == MISMATCH else str(error)
        absent = kind in ABSENT and not num_cards
        return {"driver": None, "nvml_error": None if absent else said, "gpus": [] if kind in ABSENT else None}
    try:
        cuda = ask(nvml, nvml.nvmlSystemGetCudaDriverVersion)
        driver = {
            "version": text(ask(nvml, nvml.nvmlSystemGetDriverVersion)),
            "cuda": None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        }
        handles = [ask(nvml, nvml.nvmlDeviceGetHandleByIndex, index) for index in range(nvml.nvmlDeviceGetCount())]
        uuids = [text(ask(nvml, nvml.nvmlDeviceGetUUID, handle)) or "" for handle in handles]
        chosen = visible_devices(visible, uuids)
        gpus = [describe_gpu(nvml, handles, index, uuid=uuid) for index, uuid in enumerate(uuids)]
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
    lost = [str(gpu["index"]) for gpu in gpus if gpu["name"] is None]
    return {
        "driver": driver,
        "nvml_error": f"GPU {', '.join(lost)} does not answer" if lost else None,
        "gpus": [{**gpu, "visible": gpu["index"] in chosen} for gpu in gpus],
    }


def ask(nvml: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """What NVML says, None where this card or this driver has no answer."""
    try:
        return None if None in arguments else function(*arguments)
    except (nvml.NVMLError, AttributeError):
        return None


def describe_gpu(nvml: Any, handles: list[Any], index: int, *, uuid: str) -> Json:
    handle = handles[index]

    def value(name: str, *arguments: Any) -> Any:
        return ask(nvml, getattr(nvml, name, lambda *_: None), handle, *arguments)

    memory, utilization = value("nvmlDeviceGetMemoryInfo"), value("nvmlDeviceGetUtilizationRates")
    capability, ecc, mig = (value(f"nvmlDeviceGet{name}") for name in ("CudaComputeCapability", "EccMode", "MigMode"))
    mode, display = value("nvmlDeviceGetComputeMode"), value("nvmlDeviceGetDisplayActive")
    return {
        "index": index,
        "uuid": uuid or None,
        "name": text(value("nvmlDeviceGetName")),
        "capability": None if capability is None else list(capability),
        "memory_total_bytes": None if memory is None else int(memory.total),
        "memory_free_bytes": None if memory is None else int(memory.free),
        "processes": processes(value),
        "utilization": None if utilization is None else utilization.gpu / 100,
        "power_w": watts(value("nvmlDeviceGetPowerUsage")),
        "power_limit_w": watts(value("nvmlDeviceGetEnforcedPowerLimit") or value("nvmlDeviceGetPowerManagementLimit")),
        "power_limit_default_w": watts(value("nvmlDeviceGetPowerManagementDefaultLimit")),
        "temperature_c": value("nvmlDeviceGetTemperature", GPU_SENSOR),
        "ecc": None if ecc is None else bool(ecc[0]),
        "ecc_errors": value("nvmlDeviceGetTotalEccErrors", UNCORRECTED, SINCE_BOOT),
        "compute_mode": COMPUTE_MODES.get(mode),
        "mig": None if value("nvmlDeviceGetName") is None else bool(mig and mig[0]),  # "not supported" is "no"
        "display": None if display is None else bool(display),
        "throttle": throttle(value),
        "pcie": {
            "generation": value("nvmlDeviceGetCurrPcieLinkGeneration"),
            "generation_max": value("nvmlDeviceGetMaxPcieLinkGeneration"),
            "width": value("nvmlDeviceGetCurrPcieLinkWidth"),
            "width_max": value("nvmlDeviceGetMaxPcieLinkWidth"),
        },
        "p2p": {str(other): p2p(nvml, handle, handles[other]) for other in range(len(handles)) if other != index},
        "nvlinks": nvlinks(nvml, handle),
    }


def text(value: str | bytes | None) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def processes(value: Callable[..., Any]) -> list[Json] | None:
    """Of all users; in a container the driver may give pids of the host, which have no name here."""
    lists = []
    for name in ("nvmlDeviceGetGraphicsRunningProcesses", "nvmlDeviceGetComputeRunningProcesses"):
        found = value(f"{name}_v3")
        lists.append(value(f"{name}_v2") if found is None else found)  # drivers before 510 have no version 3
    if lists == [None, None]:
        return None
    used_bytes = {each.pid: each.usedGpuMemory for found in lists for each in found or ()}
    return [{"pid": pid, "name": process_name(pid), "used_bytes": used} for pid, used in sorted(used_bytes.items())]


def throttle(value: Callable[..., Any]) -> list[str] | None:
    """Why the clocks are held down now; idling and clocks that the user fixed are no fault."""
    bits = value("nvmlDeviceGetCurrentClocksEventReasons")
    bits = value("nvmlDeviceGetCurrentClocksThrottleReasons") if bits is None else bits  # its name before driver 535
    return None if bits is None else sorted({name for bit, name in SLOWED.items() if bits & bit})


def p2p(nvml: Any, handle: Any, other: Any) -> bool | None:
    """Whether the driver says that each may read and write the other's memory."""
    states = [ask(nvml, nvml.nvmlDeviceGetP2PStatus, handle, other, kind) for kind in (P2P_READ, P2P_WRITE)]
    return None if None in states else states == [P2P_OK, P2P_OK]


def nvlinks(nvml: Any, handle: Any) -> int | None:
    """Links that are up; 0 where the card has none."""
    if handle is None:
        return None
    return sum(bool(ask(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link)) for link in range(MAX_NVLINKS))


if __name__ == "__main__":
    answer(probe_gpus)
