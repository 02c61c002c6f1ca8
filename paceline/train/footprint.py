"""
How much memory this process has taken at most: what torch's allocator says, and what the driver or the kernel says.

Asked a few times in a run, between steps and never in one. What cannot be known here is None.
"""

import os
import subprocess
from contextlib import suppress
from dataclasses import replace

import torch

from paceline.kernel_files import read_text
from paceline.plan.memory import peak_phase
from paceline.plan.planner import Plan, memory_setup
from paceline.rundir import RunDir, append_event

NVIDIA_SMI_S = 10.0


class MemoryNotes:
    """Events of one rank: what it has taken so far, beside what was planned. plan/kept.py keeps the last of each attempt."""

    def __init__(self, run: RunDir, attempt: int, rank: int, device: torch.device, plan: Plan, *, compiled: bool):
        """Call it when the model is ready to train. compiled: what a trial made of a plan that had left it open."""
        self.run, self.attempt, self.rank, self.device = run, attempt, rank, device
        self.compile_tried = plan.compile is None
        self.planned_bytes = peak_phase(memory_setup(replace(plan, compile=compiled))).bytes
        self.copies_bytes = 0  # of the last checkpoint; the worker says
        if self.compile_tried:
            forget_peaks(device)

    def note(self, step: int) -> None:
        append_event(
            self.run,
            "memory",
            attempt=self.attempt,
            rank=self.rank,
            step=step,
            planned_bytes=self.planned_bytes,
            copies_bytes=self.copies_bytes,
            compile_tried=self.compile_tried,
            torch=torch.__version__,
            **footprint(self.device),
        )


def footprint(device: torch.device) -> dict[str, int | None]:
    """allocated_bytes, reserved_bytes: of torch's allocator, since its peaks were last forgotten. driver_bytes: of the process.

    On a CPU there is no such allocator, and driver_bytes is the highest resident size so far.
    """
    if device.type != "cuda":
        return {"allocated_bytes": None, "reserved_bytes": None, "driver_bytes": highest_resident_bytes()}
    reserved = int(torch.cuda.max_memory_reserved(device))
    return {
        "allocated_bytes": int(torch.cuda.max_memory_allocated(device)),
        "reserved_bytes": reserved,
        "driver_bytes": driver_bytes(device, at_least=int(torch.cuda.memory_reserved(device))),
    }


def forget_peaks(device: torch.device) -> None:
    """What a trial took is not what the training takes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def highest_resident_bytes() -> int | None:
    lines = (read_text("/proc/self/status") or "").splitlines()
    words = next((line.split() for line in lines if line.startswith("VmHWM:")), [])
    return int(words[1]) * 1024 if len(words) == 3 and words[1].isdigit() else None


def driver_bytes(device: torch.device, *, at_least: int) -> int | None:
    """What the driver counts for this process on this card, context and libraries included."""
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    processes = processes_of_nvml(uuid)
    return own_bytes(processes_of_nvidia_smi(uuid) if processes is None else processes, at_least=at_least)


def own_bytes(processes: list[tuple[int, int]], *, at_least: int) -> int | None:
    """processes: (pid, bytes) on one card. In a container the driver names pids of the host: one process alone must be this one."""
    mine = [size for pid, size in processes if pid == os.getpid()]
    if not mine and len(processes) == 1:
        mine = [processes[0][1]]
    return mine[0] if mine and mine[0] >= at_least else None


def processes_of_nvml(uuid: str) -> list[tuple[int, int]] | None:
    """None where nvidia-ml-py is not installed, or does not tell."""
    try:
        import pynvml  # type: ignore[import-untyped, unused-ignore]
    except ModuleNotFoundError:
        return None
    try:
        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            found = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
    if any(each.usedGpuMemory is None for each in found):
        return None
    return [(int(each.pid), int(each.usedGpuMemory)) for each in found]


def processes_of_nvidia_smi(uuid: str) -> list[tuple[int, int]]:
    query = ["nvidia-smi", "-i", uuid, "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(query, capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=True).stdout
        rows = [line.split(",") for line in said.splitlines()]
        return [(int(pid), int(mib) << 20) for pid, mib in rows if pid.strip().isdigit() and mib.strip().isdigit()]
    return []
