"""
What NVML says becomes facts. No card was asked for these values: they are listed here as nvml.h gives them, and where a
library is needed the stand-in of tests/nvidia takes the place of the driver's, called by the real binding.
"""

import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_driver
import pynvml
import pytest
from fake_driver import LIBRARY_MISMATCH, FakeDriver, build_driver
from probing import ask
from rows import with_rows

from paceline.check.probes import gpu_probe
from paceline.check.probes.facts import PROBES, ask_probes
from paceline.check.probes.gpu_probe import describe_gpus

GIB = 1 << 30

RTX_5090: dict[str, Any] = {
    "Name": "NVIDIA GeForce RTX 5090",
    "UUID": "GPU-aaaa",
    "CudaComputeCapability": (12, 0),
    "MemoryInfo": SimpleNamespace(total=32 * GIB, free=31 * GIB, used=GIB),
    "ComputeRunningProcesses_v3": [],
    "GraphicsRunningProcesses_v3": [SimpleNamespace(pid=os.getpid(), usedGpuMemory=None)],
    "UtilizationRates": SimpleNamespace(gpu=37, memory=5),
    "PowerUsage": 431_500,
    "EnforcedPowerLimit": 450_000,
    "PowerManagementDefaultLimit": 575_000,
    "Temperature": 84,
    "ComputeMode": 0,
    "DisplayActive": 1,
    "CurrentClocksEventReasons": 0x1 | 0x4 | 0x20 | 0x40,
    "CurrPcieLinkGeneration": 4,
    "MaxPcieLinkGeneration": 5,
    "CurrPcieLinkWidth": 4,
    "MaxPcieLinkWidth": 16,
    "P2PStatus": 0,
}
A100: dict[str, Any] = {
    "Name": b"NVIDIA A100-SXM4-80GB",
    "UUID": b"GPU-bbbb",
    "CudaComputeCapability": (8, 0),
    "MemoryInfo": SimpleNamespace(total=80 * GIB, free=80 * GIB, used=0),
    "EccMode": [1, 1],
    "TotalEccErrors": 2,
    "MigMode": [1, 1],
    "ComputeMode": 3,
    "CurrentClocksThrottleReasons": 0x80,
    "P2PStatus": 5,
    "NvLinkState": 1,
}


class ListedNvml:
    """pynvml's functions over listed values; a call that is not listed is one that the card does not support."""

    class NVMLError(Exception):
        pass

    class NVMLError_LibraryNotFound(NVMLError):
        pass

    class NVMLError_LibRmVersionMismatch(NVMLError):
        pass

    def __init__(self, cards: list[dict[str, Any]], *, init: type[NVMLError] | None = None):
        self.cards, self.init = cards, init

    def nvmlInit(self) -> None:
        if self.init:
            raise self.init("RM has detected an NVML/RM version mismatch.")

    def nvmlShutdown(self) -> None: ...
    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.133.07"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 12080

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index + 1  # a handle is never 0

    def __getattr__(self, name: str) -> Any:
        def call(handle: int, *_: Any) -> Any:
            card = self.cards[handle - 1]
            if name.removeprefix("nvmlDeviceGet") not in card:
                raise self.NVMLError("Not Supported")
            return card[name.removeprefix("nvmlDeviceGet")]

        return call


def test_the_facts_of_a_consumer_card_are_complete():
    facts = describe_gpus(ListedNvml([RTX_5090, {**RTX_5090, "UUID": "GPU-cccc"}]), visible=None, num_cards=2)
    assert (facts["driver"], facts["nvml_error"]) == ({"version": "570.133.07", "cuda": "12.8"}, None)
    (process,) = facts["gpus"][0].pop("processes")
    assert (process["pid"], process["used_bytes"]) == (os.getpid(), None)
    assert process["name"].startswith("python")
    assert facts["gpus"][0] == {
        "index": 0,
        "visible": True,
        "uuid": "GPU-aaaa",
        "name": "NVIDIA GeForce RTX 5090",
        "capability": [12, 0],
        "memory_total_bytes": 32 * GIB,
        "memory_free_bytes": 31 * GIB,
        "utilization": 0.37,
        "power_w": 431.5,
        "power_limit_w": 450.0,
        "power_limit_default_w": 575.0,
        "temperature_c": 84,
        "ecc": None,
        "ecc_errors": None,
        "compute_mode": "default",
        "mig": False,
        "display": True,
        "throttle": ["power", "thermal"],
        "pcie": {"generation": 4, "generation_max": 5, "width": 4, "width_max": 16},
        "p2p": {"1": True},
        "nvlinks": 0,
    }


def test_a_data_centre_card_has_ecc_mig_and_nvlinks():
    gpu = describe_gpus(ListedNvml([A100, A100]), visible=None, num_cards=2)["gpus"][1]
    assert (gpu["ecc"], gpu["ecc_errors"], gpu["mig"], gpu["nvlinks"]) == (True, 2, True, 18)
    assert (gpu["compute_mode"], gpu["throttle"], gpu["p2p"]) == ("exclusive", ["power_brake"], {"0": False})
    assert (gpu["name"], gpu["power_w"], gpu["processes"]) == ("NVIDIA A100-SXM4-80GB", None, None)


def test_a_card_hidden_from_cuda_is_listed_as_not_visible():
    cards = [RTX_5090, {**RTX_5090, "UUID": "GPU-cccc"}]
    assert [gpu["visible"] for gpu in describe_gpus(ListedNvml(cards), visible="1", num_cards=2)["gpus"]] == [
        False,
        True,
    ]


def test_a_card_that_fell_off_the_bus_is_reported():
    facts = describe_gpus(ListedNvml([RTX_5090, {}]), visible=None, num_cards=2)
    assert facts["nvml_error"] == "GPU 1 does not answer"
    assert (facts["gpus"][1]["name"], facts["gpus"][1]["mig"], facts["gpus"][0]["name"]) == (
        None,
        None,
        "NVIDIA GeForce RTX 5090",
    )


@with_rows(("init", "num_cards", "error", "gpus"), [
    (ListedNvml.NVMLError_LibraryNotFound, 0, None, []),
    (ListedNvml.NVMLError_LibraryNotFound, 1, "RM has detected an NVML/RM version mismatch.", []),
    # a driver that was updated without a reboot, in the words of nvidia-smi
    (ListedNvml.NVMLError_LibRmVersionMismatch, 1, "Driver/library version mismatch", None),
])  # fmt: skip
def test_no_driver_is_an_error_only_where_there_is_a_card(init, num_cards, error, gpus):
    facts = describe_gpus(ListedNvml([], init=init), visible=None, num_cards=num_cards)
    assert facts == {"driver": None, "nvml_error": error, "gpus": gpus}


def test_every_nvml_function_that_is_called_is_one_of_the_binding():
    source = Path(gpu_probe.__file__).read_text()
    called = set(re.findall(r"nvml(?:Device|System)Get\w+", source)) | {"nvmlInit", "nvmlShutdown"}
    called |= {"nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetEccMode", "nvmlDeviceGetMigMode"}
    assert called - set(dir(pynvml)) == set()


@pytest.fixture
def driver(tmp_path) -> FakeDriver:
    """A card with 24 GiB in use by this process, in a slot of four lanes."""
    used = {"MemoryInfo": f"{32 * GIB} {24 * GIB}", "ComputeRunningProcesses_v3": f"{os.getpid()} {24 * GIB}"}
    return FakeDriver(build_driver(tmp_path), tmp_path, {**fake_driver.RTX_5090, **used, "CurrPcieLinkWidth": "4"})


@pytest.mark.dist
def test_the_real_binding_reads_a_library_in_c(driver):
    facts = ask("gpu_probe", env={**driver.env, "CUDA_VISIBLE_DEVICES": "0"})
    (gpu,) = facts["gpus"]
    assert (facts["driver"], gpu["name"]) == ({"version": "580.95.05", "cuda": "13.0"}, "NVIDIA GeForce RTX 5090")
    assert (gpu["capability"], gpu["memory_free_bytes"], gpu["power_w"]) == ([12, 0], 8 * GIB, 61.5)
    assert (gpu["visible"], gpu["pcie"]["width"], gpu["pcie"]["width_max"], gpu["ecc"]) == (True, 4, 16, None)
    (process,) = gpu["processes"]
    assert (process["pid"], process["used_bytes"]) == (os.getpid(), 24 * GIB)
    assert process["name"].startswith("python")


@pytest.mark.dist
def test_a_mismatch_is_reported_through_the_real_binding(driver):
    driver.answers["Init"] = LIBRARY_MISMATCH
    driver.write()
    facts = ask("gpu_probe", env=driver.env)
    assert (facts["nvml_error"], facts["gpus"]) == ("Driver/library version mismatch", None)


@pytest.mark.dist
def test_the_probe_of_a_driver_that_never_answers_is_killed_at_the_deadline(driver, monkeypatch):
    driver.answers["Init"] = "hang"
    driver.write()
    for name in ("LD_LIBRARY_PATH", "FAKE_CARDS"):
        monkeypatch.setenv(name, driver.env[name])
    (probe,) = (replace(item, deadline_s=1.0) for item in PROBES if item.name == "gpu")
    facts = ask_probes([probe], {})
    assert facts["probes"]["gpu"]["error"].startswith("no answer in 1")
    assert facts["probes"]["gpu"]["seconds"] >= 1.0
    assert (facts["gpus"], facts["driver"], facts["nvml_error"]) == (None, None, None)


@pytest.mark.dist
def test_without_the_binding_cards_are_unknown_and_nothing_breaks(tmp_path):
    (tmp_path / "pynvml.py").write_text("raise ImportError('not here')\n")
    (tmp_path / "psutil.py").write_text("raise ImportError('not here')\n")
    num_cards = ask("gpu_probe")["nvidia_cards"]
    facts = ask("gpu_probe", env={"PYTHONPATH": str(tmp_path)})
    assert facts["gpus"] == (None if num_cards else [])
    interfaces = ask("network_probe", env={"PYTHONPATH": str(tmp_path)})["network"]["interfaces"]
    assert {item["name"]: item["addresses"] for item in interfaces}["lo"] is None
