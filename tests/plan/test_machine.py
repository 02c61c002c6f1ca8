"""Which devices are visible, and what is known of them."""

import pytest

from paceline.plan.machine import peak_flops, probe_gpus, probe_machine, visible_devices

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
