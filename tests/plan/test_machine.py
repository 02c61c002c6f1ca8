"""Which devices are visible, and what is known of them."""

import os
import sys

import pytest

from paceline.errors import PlanError
from paceline.plan.machine import Gpu, peak_flops, probe_gpus, probe_machine, read_nvidia_smi, visible_devices

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


def test_an_empty_cuda_visible_devices_means_no_gpu():
    assert probe_gpus("") == ()


def test_the_longest_matching_name_gives_the_peak():
    assert peak_flops("NVIDIA H100 PCIe", "bf16") == 756e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "bf16") == 989e12


def test_an_unknown_card_or_precision_has_no_peak():
    assert peak_flops("NVIDIA H100 80GB HBM3", "fp32") is None
    assert peak_flops("Some Card", "bf16") is None


def test_this_machine_has_cores_and_memory():
    machine = probe_machine()
    assert machine.cpu_cores >= 1
    assert machine.memory_bytes > 1 << 28


def test_nvidia_smi_tells_what_nvml_would():
    table = (
        "GPU-11111111-0000-4000-8000-000000000000, NVIDIA H200, 143771, 9.0\n"
        "GPU-22222222-0000-4000-8000-000000000000, NVIDIA GeForce RTX 5090, [N/A], [N/A]\n"
    )
    [(uuid, h200), (_, unknown)] = read_nvidia_smi(table)
    assert (uuid[:12], h200) == ("GPU-11111111", Gpu(0, "NVIDIA H200", 143771 << 20, (9, 0)))
    assert unknown == Gpu(1, "NVIDIA GeForce RTX 5090", 0, None)


def test_without_nvml_a_program_nvidia_smi_is_asked(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU-1, NVIDIA A10, 23028, 8.6'\necho 'GPU-2, NVIDIA A10, 23028, 8.6'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as where it is not installed
    assert [gpu.name for gpu in probe_gpus(None)] == ["NVIDIA A10", "NVIDIA A10"]
    assert probe_gpus("1") == (Gpu(0, "NVIDIA A10", 23028 << 20, (8, 6)),)
    smi.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'; exit 18\n")
    with pytest.raises(PlanError, match="version mismatch"):
        probe_gpus(None)
