"""
The devices of this machine, or of one that is only thought of, with what the table of GPUs holds about them. No torch.

The driver reports name, memory and capability (plan/nvml.py); bandwidth, peaks and links are the table's. A card that is not in
the table stays usable, with `spec` None.
"""

import os
from dataclasses import dataclass, field, replace

from paceline.errors import PlanError
from paceline.plan.gpu_table import GpuSpec, spec_of
from paceline.plan.host import probe_cpu_bf16, probe_cpu_cores, probe_memory_bytes
from paceline.plan.nvml import list_gpus, visible_devices
from paceline.units import MIB


@dataclass(frozen=True)
class Gpu:
    """One visible CUDA device; index is CUDA's, after CUDA_VISIBLE_DEVICES."""

    index: int
    name: str
    memory_bytes: int
    capability: tuple[int, int] | None
    spec: GpuSpec | None = field(default=None, compare=False)  # its row of the table; None: an unknown card


@dataclass(frozen=True)
class HostLink:
    """The slowest link between two of the hosts, as `paceline check` measured it over TCP; each way alone, the slower counts."""

    hosts: tuple[str, str]
    bytes_per_s: float
    rtt_s: float


@dataclass(frozen=True)
class Machine:
    """One or several equal hosts and their devices; of unequal ones, what the least of them has."""

    gpus: tuple[Gpu, ...]  # of one host
    cpu_cores: int
    cpu_bf16: bool  # the CPU multiplies bf16 natively
    memory_bytes: int
    hosts: int = 1  # each with the same GPUs
    names: tuple[str, ...] = ()  # of the hosts, where they are real ones
    link: HostLink | None = None  # between them; None: not measured
    # why there are no GPUs although there is a driver
    driver_error: PlanError | None = field(default=None, compare=False)


def probe_machine() -> Machine:
    """Probes this machine. A missing driver means no GPUs; one that does not answer is an error only for whoever needs it."""
    gpus: tuple[Gpu, ...] = ()
    driver_error = None
    try:
        gpus = probe_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    except PlanError as error:
        driver_error = error
    return Machine(
        gpus=gpus,
        cpu_cores=probe_cpu_cores(),
        cpu_bf16=probe_cpu_bf16(),
        memory_bytes=probe_memory_bytes(),
        driver_error=driver_error,
    )


def probe_gpus(visible: str | None) -> tuple[Gpu, ...]:
    """Returns the GPUs that CUDA sees. visible: the value of CUDA_VISIBLE_DEVICES, None if unset.

    Raises PlanError where there is a driver that does not answer.
    """
    if visible is not None and not visible.strip():
        return ()
    gpus = list_gpus()
    uuids, parts = [gpu.uuid if gpu else "" for gpu in gpus], [gpu.parts if gpu else () for gpu in gpus]
    indices = visible_devices(visible, uuids, [[part.uuid for part in of_card] for of_card in parts])
    order = [gpu for gpu in (gpus[index] for index in indices) if gpu]
    if any(gpu.is_split for gpu in order):  # CUDA shows a process one MIG device and nothing else
        entries = [entry.strip() for entry in (visible or "").split(",")]
        shown = [part for gpu in order for part in gpu.parts]
        order = ([part for part in shown if part.uuid in entries] or shown)[:1]
    return tuple(with_spec(Gpu(i, gpu.name, gpu.memory_bytes, gpu.capability)) for i, gpu in enumerate(order))


def with_spec(gpu: Gpu) -> Gpu:
    """Returns the card with its row of the table, and the row's memory where the driver reports none (GB10 shares the host's)."""
    spec = spec_of(gpu.name, gpu.memory_bytes)
    memory_bytes = gpu.memory_bytes or (spec.memory_mib * MIB if spec else 0)
    return replace(gpu, spec=spec, memory_bytes=memory_bytes)


def imagined_machine(spec: GpuSpec, *, gpus: int, hosts: int) -> Machine:
    """Returns hosts with these GPUs that need not exist. Their CPUs are not known: one core for each GPU, no bf16, memory 0."""
    cards = tuple(Gpu(i, spec.driver_names[0], spec.memory_mib * MIB, spec.capability, spec) for i in range(gpus))
    return Machine(gpus=cards, cpu_cores=gpus, cpu_bf16=False, memory_bytes=0, hosts=hosts)
