"""Which devices are visible, and what is known of them."""

import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from paceline.errors import PlanError
from paceline.plan.gpu_table import find_gpu
from paceline.plan.machine import Gpu, Machine, imagined_machine, probe_gpus, probe_machine, with_spec
from paceline.plan.planner import threads_of


class NvmlError(Exception):
    pass


def test_an_empty_cuda_visible_devices_means_no_gpu():
    assert probe_gpus("") == ()


def test_a_card_of_this_machine_gets_its_row_of_the_table():
    assert with_spec(Gpu(0, "NVIDIA H100 80GB HBM3", 81559 << 20, (9, 0))).spec is find_gpu("H100 SXM")
    assert with_spec(Gpu(0, "NVIDIA A100-SXM4-40GB", 40537 << 20, (8, 0))).spec is find_gpu("A100 SXM 40GB")


def test_an_unknown_card_keeps_what_the_driver_reports():
    card = with_spec(Gpu(0, "Some Card", 20 << 30, (8, 9)))
    assert (card.spec, card.memory_bytes, card.capability) == (None, 20 << 30, (8, 9))


def test_a_card_that_reports_no_memory_has_that_of_the_table():
    assert with_spec(Gpu(0, "NVIDIA GB10", 0, (12, 1))).memory_bytes == find_gpu("GB10").memory_mib << 20
    assert with_spec(Gpu(0, "Some Card", 0, None)).memory_bytes == 0


def test_a_machine_is_imagined_as_its_driver_would_report_it():
    spec = find_gpu("RTX 5090")
    machine = imagined_machine(spec, gpus=2, hosts=3)
    cards = tuple(Gpu(i, "NVIDIA GeForce RTX 5090", 32_607 << 20, (12, 0)) for i in range(2))
    assert machine == Machine(gpus=cards, cpu_cores=2, cpu_bf16=False, memory_bytes=0, hosts=3)
    assert [gpu.spec for gpu in machine.gpus] == [spec, spec]


def test_a_driver_without_a_memory_figure_for_a_card_is_no_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml_of_gb10())
    [gb10] = probe_gpus(None)
    assert (gb10.name, gb10.spec) == ("NVIDIA GB10", find_gpu("GB10"))


def test_a_card_that_left_the_bus_is_skipped_and_reported(monkeypatch, capsys):
    class NVMLError_GpuIsLost(NvmlError):
        pass

    def handle(index: int) -> int:
        if index == 1:
            raise NVMLError_GpuIsLost("GPU is lost")
        return index

    nvml = nvml_of_gb10()
    nvml.nvmlDeviceGetCount, nvml.nvmlDeviceGetHandleByIndex = lambda: 3, handle
    nvml.nvmlDeviceGetUUID = lambda handle: f"GPU-{handle}"
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert len(probe_gpus(None)) == 2
    assert "GPU 1 does not answer (GPU is lost): it is left out" in capsys.readouterr().err


def nvml_of_gb10() -> SimpleNamespace:
    class NVMLError_NotSupported(NvmlError):
        pass

    def raise_not_supported(_: object) -> None:
        raise NVMLError_NotSupported

    return SimpleNamespace(
        NVMLError=NvmlError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda _: "NVIDIA GB10",
        nvmlDeviceGetMemoryInfo=raise_not_supported,
        nvmlDeviceGetCudaComputeCapability=lambda _: (12, 1),
        nvmlDeviceGetUUID=lambda _: "GPU-1",
    )


def test_this_machine_has_cores_and_memory():
    machine = probe_machine()
    assert machine.cpu_cores >= 1
    assert machine.memory_bytes > 1 << 28


@pytest.mark.parametrize(("value", "threads"), [("1", 1), ("6", 6), ("0", 4), ("3,2", 3), (",2", 4), ("", 4)])
def test_ranks_have_the_threads_that_the_environment_sets(monkeypatch, value, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert threads_of(replace(probe_machine(), cpu_cores=8), world_size=2) == threads


def test_without_nvml_nvidia_smi_reports_the_gpus(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU-1, NVIDIA A10, 23028, 8.6'\necho 'GPU-2, NVIDIA A10, 23028, 8.6'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as where it is not installed
    assert [gpu.name for gpu in probe_gpus(None)] == ["NVIDIA A10", "NVIDIA A10"]
    assert probe_gpus("1") == (Gpu(0, "NVIDIA A10", 23028 << 20, (8, 6)),)
    assert probe_gpus("1")[0].spec is find_gpu("A10")
    smi.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'; exit 18\n")
    with pytest.raises(PlanError, match="version mismatch"):
        probe_gpus(None)
