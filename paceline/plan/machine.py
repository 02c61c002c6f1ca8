"""
The devices of this machine, or of one that is only thought of, with what the table of GPUs holds about them. No torch.

The driver reports name, memory and capability (plan/nvml.py); bandwidth, peaks and links are the table's. A card that is not in
the table stays usable, with `spec` None.

A bare name means the variant that has it as its name or among its aliases, the one that people mean by it: H100 and H200 are the
SXM modules, A100 the SXM one with 80 GB, RTX 3060 the one with 12 GB and RTX 3080 with 10. Where no variant is meant more than the
others (RTX 4060 Ti, V100) the bare name is an error that lists them. Laptop GPUs carry the names of desktop cards but other chips
and clocks: none is in the table.
"""

import difflib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from paceline.errors import PlanError
from paceline.plan.gpu_table import GPUS, GpuSpec
from paceline.plan.host import probe_cpu_bf16, probe_cpu_cores, probe_memory_bytes
from paceline.plan.nvml import list_gpus, visible_devices
from paceline.units import MIB

SAME_MEMORY = 0.08  # ECC on or off moves it by a sixteenth, old drivers print 2 % less; variants differ by a fifth
NOT_A_NAME = re.compile(r"nvidia|geforce|tesla|generation|edition|[^a-z0-9]")
MOST_NAMES = 8  # in an error


def find_gpu(name: str) -> GpuSpec:
    """Returns the card that a user named, in any case and spacing, with or without NVIDIA, GeForce and RTX.

    Raises PlanError for an unknown name, or one of several cards.
    """
    key = normalize(name)
    forms = (key, "rtx" + key) if key else ()
    for names in (typed_names, driver_keys, name_prefixes):
        for form in forms:
            matches = [gpu for gpu in GPUS if form in names(gpu)]
            if len(matches) == 1:
                return matches[0]
            if matches:
                raise PlanError(
                    f"{name} is the name of {len(matches)} cards: {join_names([gpu.name for gpu in matches])}",
                    fix=f'name one of them, such as "{matches[0].name}"',
                )
    raise PlanError(f"no GPU called {name} is known", fix=f"the nearest known: {join_names(nearest_names(name))}")


def spec_of(driver_name: str, memory_bytes: int) -> GpuSpec | None:
    """Returns the table's row of a card; None if its name is not in the table, or it is not sold with this much memory.

    memory_bytes: as the driver reports it, 0 if it reports none (GB10 shares the host's).
    """
    key = normalize(driver_name)
    matches = [gpu for gpu in GPUS if key in driver_keys(gpu)]
    if not memory_bytes:
        return matches[0] if len(matches) == 1 else None
    same = [gpu for gpu in matches if abs(memory_bytes / (gpu.memory_mib * MIB) - 1) <= SAME_MEMORY]
    return same[0] if len(same) == 1 else None


def peak_flops(spec: GpuSpec | None, precision: str) -> float | None:
    """Returns the dense peak of one device in FLOP/s; None where no figure with a source is known."""
    return spec.peak_flops.get(precision) if spec else None


def normalize(name: str) -> str:
    """Returns rtx4060ti for NVIDIA GeForce RTX 4060 Ti."""
    return NOT_A_NAME.sub("", name.lower())


def typed_names(gpu: GpuSpec) -> Iterator[str]:
    """Yields the names by which users know a card, normalized."""
    return (normalize(name) for name in (gpu.name, *gpu.aliases))


def driver_keys(gpu: GpuSpec) -> Iterator[str]:
    """Yields the names that drivers print for a card, normalized."""
    return (normalize(name) for name in gpu.driver_names)


def name_prefixes(gpu: GpuSpec) -> Iterator[str]:
    """Yields rtx, rtx4060, rtx4060ti, rtx4060ti16gb: each stands for the whole name if no other card's begins with it."""
    parts = gpu.name.split()
    return (normalize("".join(parts[:count])) for count in range(1, len(parts) + 1))


def nearest_names(name: str) -> list[str]:
    """Returns names with all parts of this one, else names spelt much like it, else three that people often have."""
    parts = [normalize(part) for part in name.split()]
    if matches := [gpu.name for gpu in GPUS if all(part in normalize(gpu.name) for part in parts)]:
        return matches
    names = {key: gpu.name for gpu in GPUS for key in typed_names(gpu)}
    key = normalize(name)
    near = difflib.get_close_matches("rtx" + key if key[:1].isdigit() else key, names, n=3)
    return list(dict.fromkeys(names[match] for match in near)) or ["RTX 4090", "RTX 5090", "H100 SXM"]


def join_names(names: list[str]) -> str:
    """Returns the first names, and how many more there are."""
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True)
class Gpu:
    """One visible CUDA device; index is CUDA's, after CUDA_VISIBLE_DEVICES."""

    index: int
    name: str
    memory_bytes: int
    capability: tuple[int, int] | None
    spec: GpuSpec | None = field(default=None, compare=False)  # its row of the table; None: an unknown card


@dataclass(frozen=True)
class Machine:
    """One or several equal hosts and their devices."""

    gpus: tuple[Gpu, ...]  # of one host
    cpu_cores: int
    cpu_bf16: bool  # the CPU multiplies bf16 natively
    memory_bytes: int
    hosts: int = 1  # each with the same GPUs


def probe_machine() -> Machine:
    """Probes this machine. A missing driver means no GPUs, not an error."""
    return Machine(
        gpus=probe_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")),
        cpu_cores=probe_cpu_cores(),
        cpu_bf16=probe_cpu_bf16(),
        memory_bytes=probe_memory_bytes(),
    )


def probe_gpus(visible: str | None) -> tuple[Gpu, ...]:
    """Returns the GPUs that CUDA sees. visible: the value of CUDA_VISIBLE_DEVICES, None if unset."""
    if visible is not None and not visible.strip():
        return ()
    gpus = list_gpus()
    order = [gpus[physical] for physical in visible_devices(visible, [gpu.uuid for gpu in gpus])]
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
