"""What is read from NVIDIA's driver, from values that are listed here; no card is needed."""

import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from paceline.plan import nvml
from paceline.plan.nvml import DriverGpu, count_nvidia_cards, parse_nvidia_smi, process_memory, visible_devices

UUIDS = ["GPU-aaaa-1", "GPU-bbbb-2", "GPU-bbcc-3"]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [0, 1, 2]),
        ("1", [1]),
        ("2,0", [2, 0]),
        (" 0 , 1 ", [0, 1]),
        ("GPU-bbbb-2", [1]),
        ("GPU-a", [0]),
        ("GPU-bb", []),  # ambiguous, as CUDA sees it
        ("0,7,1", [0]),  # the first invalid entry hides itself and all after it
        ("-1", []),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(visible, expected):
    assert visible_devices(visible, UUIDS) == expected


def test_the_table_of_nvidia_smi_holds_what_nvml_reports():
    table = (
        "GPU-11111111-0000-4000-8000-000000000000, NVIDIA H200, 143771, 9.0\n"
        "GPU-22222222-0000-4000-8000-000000000000, NVIDIA GeForce RTX 5090, [N/A], [N/A]\n"
    )
    h200, unknown = parse_nvidia_smi(table)
    assert h200 == DriverGpu("GPU-11111111-0000-4000-8000-000000000000", "NVIDIA H200", 143771 << 20, (9, 0))
    assert (unknown.name, unknown.memory_bytes, unknown.capability) == ("NVIDIA GeForce RTX 5090", 0, None)


def test_cards_are_counted_on_the_bus_without_a_driver(tmp_path):
    for name, vendor, kind in (("0", "0x10de", "0x030000"), ("1", "0x10de", "0x040300"), ("2", "0x8086", "0x030000")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(vendor + "\n")
        (tmp_path / name / "class").write_text(kind + "\n")
    assert count_nvidia_cards(tmp_path) == 1  # the second is its sound device
    assert count_nvidia_cards(tmp_path / "none") is None


def test_every_nvml_function_that_is_called_is_one_of_the_binding():
    names = set(re.findall(r"nvml(?:Device|System|Event|Init|Shutdown)\w*", Path(nvml.__file__).read_text()))
    for running in ("nvmlDeviceGetGraphicsRunningProcesses", "nvmlDeviceGetComputeRunningProcesses"):
        names |= {f"{running}_v2", f"{running}_v3"}
    assert names - set(dir(pynvml)) == set()


def nvml_with_processes(*running: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(
        NVMLError=pynvml.NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: list(running),
    )


def test_memory_of_processes_is_what_nvml_reports(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml_with_processes(SimpleNamespace(pid=7, usedGpuMemory=5 << 20)))
    assert process_memory("GPU-1") == [(7, 5 << 20)]


def test_memory_of_processes_comes_from_nvidia_smi_where_nvml_does_not_report_it(monkeypatch, tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nprintf '7, 5\\n8, [N/A]\\n'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for nvml_module in (nvml_with_processes(SimpleNamespace(pid=7, usedGpuMemory=None)), None):
        monkeypatch.setitem(sys.modules, "pynvml", nvml_module)
        assert process_memory("GPU-1") == [(7, 5 << 20)]
    smi.write_text("#!/bin/sh\nexit 9\n")
    assert process_memory("GPU-1") == []
