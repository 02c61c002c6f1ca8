"""
The devices of this machine, or of one that is only thought of, with what the table of GPUs holds about them, and the ways of
attention that a device can take. No torch.

The driver reports name, memory and capability (plan/nvml.py); bandwidth, peaks and links are the table's. A card that is not in
the table stays usable, with `spec` None.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from paceline.config import ATTENTION, FLASH, MAX_HOSTS, Config, ModelConfig
from paceline.errors import PacelineError, PlanError, UsageError
from paceline.plan.gpu_table import COUNTED, GpuSpec, find_gpu, spec_of
from paceline.plan.host import probe_cpu_bf16, probe_cpu_cores, probe_memory_bytes
from paceline.plan.nvml import list_gpus, visible_devices
from paceline.plan.shapes import window_sizes
from paceline.units import MIB

NO_CUDA = "Torch not compiled with CUDA enabled"  # PyTorch's own words


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
    threads: int | None = None  # of each rank, where OMP_NUM_THREADS sets them; None: as many as there are cores for it
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
        threads=parse_threads(os.environ.get("OMP_NUM_THREADS")),
        driver_error=driver_error,
    )


def parse_threads(value: str | None) -> int | None:
    """Returns the number that OMP_NUM_THREADS sets, of a list for nested regions the first; None where it sets none."""
    first = (value or "").partition(",")[0]
    return int(first) or None if first.isdecimal() else None


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


def machine_of(gpu: str | None, num_gpus: int | None, hosts: Machine | int) -> Machine:
    """Returns these hosts, or as many like this one, with the named GPUs or with num_gpus of their own where that is set."""
    if gpu is not None:
        spec, count = find_gpu(gpu), hosts if isinstance(hosts, int) else hosts.hosts
        machine = imagined_machine(spec, gpus=num_gpus or 1, hosts=count)
        return machine if isinstance(hosts, int) else replace(machine, names=hosts.names, link=hosts.link)
    machine = replace(probe_machine(), hosts=hosts) if isinstance(hosts, int) else hosts
    if num_gpus is None:
        return machine
    if not machine.gpus:
        raise UsageError(f"--gpus {num_gpus}, but no GPU is here", fix=f'--gpu "RTX 5090" --gpus {num_gpus}')
    return replace(machine, gpus=tuple(replace(machine.gpus[0], index=index) for index in range(num_gpus)))


def num_hosts(config: Config) -> int:
    """Returns the number of hosts that the config gives; they need not exist."""
    count = int(config.hosts or "1")
    if not 1 <= count <= MAX_HOSTS:
        raise UsageError(f"--hosts {count} is out of range", fix=f"a number from 1 to {MAX_HOSTS:,}, or names")
    return count


@dataclass(frozen=True)
class AttentionCase:
    """All that decides which ways of attention can be taken. capability: None for a card that the driver does not describe."""

    model: ModelConfig
    device: str
    precision: str
    capability: tuple[int, int] | None = None
    deterministic: bool = False

    @property
    def has_windows(self) -> bool:
        return min(window_sizes(self.model)) < self.model.sequence_len

    @property
    def choices(self) -> tuple[str, ...]:
        """The ways that can be taken, those to be preferred first; never empty."""
        return tuple(name for name in ATTENTION if self.problem(name) is None)

    def problem(self, name: str) -> str | None:
        """Returns why a way cannot be taken, None where only a trial can tell. The limits are of torch 2.11 to 2.13."""
        if self.device == "cpu":
            return None if name == "sdpa" else "it is for GPUs"
        capability, head_dim = self.capability or (8, 0), self.model.head_dim
        if name in FLASH:
            return self._flash_problem(name, capability, head_dim)
        if name == "flex":
            if not self.has_windows:
                return "no layer has a window"
            if capability < (7, 0):
                return "Triton's kernels need compute capability 7.0"
            # 114,688 bytes of shared memory in its backward, of 101,376: pytorch issue 198224
            if capability[0] == 12 and head_dim > 128:
                return f"its backward does not fit the shared memory of compute capability 12 at head_dim {head_dim}"
        return None

    def _flash_problem(self, name: str, capability: tuple[int, int], head_dim: int) -> str | None:
        if self.precision == "fp32":
            return "flash kernels are for bf16 and fp16"
        if capability < (8, 0):
            return "flash kernels need compute capability 8.0"
        if head_dim % 8:
            return "flash kernels need a head_dim that is a multiple of 8"
        if name == "fa3":
            return None if capability == (9, 0) else "FlashAttention 3 is for compute capability 9.0"
        if name == "cudnn":
            if self.capability is None:
                return "cuDNN is for NVIDIA GPUs, which have a compute capability"
            if self.deterministic:
                return "cuDNN's backward adds in any order"
            if head_dim > 128 or self.model.sequence_len % 128:  # others are right in some versions of cuDNN alone
                return "cuDNN takes a head_dim up to 128, and rows of a multiple of 128 tokens"
        # sdp_utils.cpp: the backward for these needs more shared memory than such cards have
        if 192 < head_dim <= 224 and capability in ((8, 6), (8, 9), (12, 0), (12, 1)):
            return "its backward has no kernel for head_dim 200 to 224 on this card"
        return None

    def kernel(self, name: str) -> str:
        """Returns the kernel whose memory a way needs: flash, efficient or math; cpu. sdpa's is what PyTorch takes by itself."""
        if self.device == "cpu":
            return "cpu"
        takes_flash = not self.has_windows and self._flash_problem("flash", self.capability or (8, 0), 8) is None
        if name != "sdpa" or takes_flash:
            return "flash"
        return "efficient" if self.model.n_kv_head == self.model.n_head else "math"


def needs_no_link(compared: Sequence[str], gpus: int | None, machine: Machine) -> bool:
    """Returns whether this is one card alone in a comparison that has several cards elsewhere. gpus: of names without a number."""
    counts = (int(counted[1]) if (counted := COUNTED.fullmatch(name)) else gpus or 1 for name in compared)
    return len(machine.gpus) == machine.hosts == 1 < max(counts, default=1)


def run_module(module: str, *args: str, stdin: str = "") -> str:
    """Returns what a module of paceline prints as a process of its own; raises PacelineError where it fails."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", module, *args], input=stdin, capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = [*done.stdout.splitlines(), *done.stderr.splitlines()]
        last = next((line for line in reversed(lines) if line.strip()), "no output")
        if NO_CUDA in last:
            fix = "paceline check prints which wheel to install; or --device cpu"
            raise PacelineError("this PyTorch was built without CUDA, so it cannot use the GPUs here", fix=fix)
        raise PacelineError(f"{module} ended with {done.returncode}: {last}", fix=f"python -m {module}")
    return done.stdout
