"""
The devices here, asked of the driver, or imagined from the table of GPUs. No torch: a plan must not cost two seconds of import.

The driver tells name, memory and capability; bandwidth, peaks and links are the table's (plan/gpus.py). A card that it does
not have stays usable, with `spec` None.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType

from paceline.errors import PlanError
from paceline.plan.cgroup import cpu_quota, memory_limit
from paceline.plan.gpus import GpuSpec, spec_of
from paceline.units import MIB

NVIDIA_SMI_S = 20.0  # the first call after a boot loads the driver


@dataclass(frozen=True)
class Gpu:
    """One visible CUDA device; index is CUDA's, after CUDA_VISIBLE_DEVICES."""

    index: int
    name: str
    memory_bytes: int
    capability: tuple[int, int] | None
    spec: GpuSpec | None = field(default=None, compare=False)  # what the table knows; None: an unknown card


@dataclass(frozen=True)
class Machine:
    gpus: tuple[Gpu, ...]  # of one host
    cpu_cores: int
    cpu_bf16: bool  # the CPU multiplies bf16 natively
    memory_bytes: int
    hosts: int = 1  # each with the same GPUs


def probe_machine() -> Machine:
    """What is here now. A missing driver means no GPUs, not an error."""
    return Machine(
        gpus=probe_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")),
        cpu_cores=probe_cpu_cores(),
        cpu_bf16=probe_cpu_bf16(),
        memory_bytes=probe_memory_bytes(),
    )


def probe_gpus(visible: str | None) -> tuple[Gpu, ...]:
    """visible: the value of CUDA_VISIBLE_DEVICES, None if unset."""
    if visible is not None and not visible.strip():
        return ()
    found = gpus_of_driver()
    chosen = visible_devices(visible, [uuid for uuid, _ in found])
    return tuple(with_spec(replace(found[physical][1], index=index)) for index, physical in enumerate(chosen))


def with_spec(gpu: Gpu) -> Gpu:
    """What the table knows of this card, and its memory where the driver reports none (GB10 shares the host's)."""
    spec = spec_of(gpu.name, gpu.memory_bytes)
    memory_bytes = gpu.memory_bytes or (spec.memory_mib * MIB if spec else 0)
    return replace(gpu, spec=spec, memory_bytes=memory_bytes)


def imagined_machine(spec: GpuSpec, *, gpus: int, hosts: int) -> Machine:
    """Hosts with these GPUs that are not here. Nothing is known of their CPUs: one core for each GPU, no bf16, memory 0."""
    cards = tuple(Gpu(i, spec.driver_names[0], spec.memory_mib * MIB, spec.capability, spec) for i in range(gpus))
    return Machine(gpus=cards, cpu_cores=gpus, cpu_bf16=False, memory_bytes=0, hosts=hosts)


def gpus_of_driver() -> list[tuple[str, Gpu]]:
    """Every card with its UUID, in the driver's order; none without a driver. nvidia-smi tells where nvidia-ml-py is missing."""
    try:
        import pynvml  # type: ignore[import-untyped, unused-ignore]
    except ModuleNotFoundError:
        return gpus_of_nvidia_smi()
    try:
        pynvml.nvmlInit()
    except Exception as error:  # NVML raises its own class per cause; two of them mean "no NVIDIA driver here"
        if type(error).__name__ in {"NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded"}:
            return []
        raise driver_is_silent(error) from error
    try:
        found = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                found.append(_gpu_of_driver(pynvml, index))
            except Exception as error:  # NVML raises its own class per cause; this one is a card that left the bus
                if type(error).__name__ != "NVMLError_GpuIsLost":
                    raise
                print(f"note    GPU {index} does not answer ({error}): it is left out", file=sys.stderr)
        return found
    finally:
        pynvml.nvmlShutdown()


def _gpu_of_driver(pynvml: ModuleType, index: int) -> tuple[str, Gpu]:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    gpu = Gpu(
        index=index,
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        memory_bytes=_memory_bytes(pynvml, handle),
        capability=tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
    )
    return _text(pynvml.nvmlDeviceGetUUID(handle)), gpu


def _memory_bytes(pynvml: ModuleType, handle: object) -> int:
    """0 where the driver reports none."""
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except Exception as error:  # NVML raises its own class per cause; this one is how GB10 answers
        if type(error).__name__ == "NVMLError_NotSupported":
            return 0
        raise driver_is_silent(error) from error


def gpus_of_nvidia_smi() -> list[tuple[str, Gpu]]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=uuid,name,memory.total,compute_cap", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise driver_is_silent(error) from error
    if done.returncode:
        raise driver_is_silent((done.stdout + done.stderr).strip() or f"nvidia-smi ended with {done.returncode}")
    return read_nvidia_smi(done.stdout)


def read_nvidia_smi(table: str) -> list[tuple[str, Gpu]]:
    """`GPU-5f..., NVIDIA H200, 143771, 9.0` for each card; memory in MiB, `[N/A]` for what a driver does not tell."""
    found = []
    for index, line in enumerate(line for line in table.splitlines() if line.startswith("GPU-")):
        uuid, name, memory_mib, capability = (word.strip() for word in line.split(","))
        major, _, minor = capability.partition(".")
        known = major.isdigit() and minor.isdigit()
        memory_bytes = int(memory_mib) * MIB if memory_mib.isdigit() else 0
        found.append((uuid, Gpu(index, name, memory_bytes, (int(major), int(minor)) if known else None)))
    return found


def driver_is_silent(why: object) -> PlanError:
    return PlanError(f"the NVIDIA driver does not answer: {why}", fix="run nvidia-smi; or --device cpu")


def visible_devices(visible: str | None, uuids: list[str]) -> list[int]:
    """Physical indices in CUDA's order. As CUDA does it: the first invalid entry hides itself and all after it."""
    if visible is None:
        return list(range(len(uuids)))
    chosen: list[int] = []
    for word in (w.strip() for w in visible.split(",")):
        matches = [i for i, uuid in enumerate(uuids) if word and uuid.startswith(word)]
        if word.isdigit() and int(word) < len(uuids):
            chosen.append(int(word))
        elif len(matches) == 1:
            chosen.append(matches[0])
        else:
            break
    return chosen


def probe_cpu_cores() -> int:
    """Cores that this process may use: affinity, then the quota of its cgroups."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if (quota := cpu_quota()) is not None:
        cores = min(cores, max(1, int(quota)))
    return cores


def probe_memory_bytes() -> int:
    """Of this host, or what its control groups leave of it."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = memory_limit()
    return min(physical, limit.limit_bytes) if limit else physical


def probe_cpu_bf16() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return False
    words = next((line.split() for line in cpuinfo.read_text().splitlines() if line.startswith("flags")), [])
    return "avx512_bf16" in words or "amx_bf16" in words


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
