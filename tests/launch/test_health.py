"""Samples of a host's health: what stands in a line, when, and that the training never waits for them.

No card was asked: the values are listed here as nvml.h gives them.
"""

import os
import re
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from paceline.launch import health
from paceline.launch.health import WHOLE_EVERY, GpuSampler, Sampler
from paceline.plan.nvml import Card
from paceline.rundir import RunDir, read_json_lines
from paceline.watch.curves import HostHealth

GIB = 1 << 30
RTX_5090: dict[str, Any] = {
    "Name": "NVIDIA GeForce RTX 5090",
    "MemoryInfo": SimpleNamespace(total=32 * GIB, used=26 * GIB),
    "UtilizationRates": SimpleNamespace(gpu=97, memory=60),
    "PowerUsage": 521_500,
    "EnforcedPowerLimit": 575_000,
    "Temperature": 71,
    "TotalEnergyConsumption": 7_000_000,
    "ClockInfo": 2460,
    "CurrentClocksEventReasons": 0x1 | 0x4,
    "CurrPcieLinkGeneration": 5,
    "CurrPcieLinkWidth": 16,
    "PcieThroughput": 1200,
    "ComputeRunningProcesses_v3": [SimpleNamespace(pid=os.getpid(), usedGpuMemory=25 * GIB)],
    "TotalEccErrors": 3,
}


class Timeout(pynvml.NVMLError):
    pass


class Driver:
    """pynvml's functions over one card; a field that is not listed is not supported."""

    NVMLError = pynvml.NVMLError
    NVMLError_Timeout = Timeout
    nvmlEventTypeXidCriticalError = 8

    def __init__(self, fields: dict[str, Any], xids: list[int] | None = None):
        self.fields, self.xids = fields, xids

    def __getattr__(self, name: str) -> Any:
        field = self.fields.get(name.removeprefix("nvmlDeviceGet"))
        if not name.startswith("nvmlDeviceGet") or field is None:
            raise AttributeError(name)
        return lambda *_: field

    def nvmlEventSetCreate(self) -> str:
        return "set"

    def nvmlDeviceRegisterEvents(self, *_: Any) -> None:
        if self.xids is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def nvmlDeviceGetIndex(self, device: int) -> int:
        return device

    def nvmlEventSetWait_v2(self, *_: Any) -> Any:
        if not self.xids:
            raise Timeout(pynvml.NVML_ERROR_TIMEOUT)
        return SimpleNamespace(device=0, eventData=self.xids.pop(0))


def gpus_of(driver: Driver) -> GpuSampler:
    return GpuSampler(driver, {0: Card(driver, "card")}, run_id="abc")


def test_a_sample_holds_every_value_of_a_card():
    (gpu,) = gpus_of(Driver(RTX_5090)).sample()
    (process,) = gpu.pop("processes")
    assert gpu == {
        "index": 0, "name": "NVIDIA GeForce RTX 5090", "used_bytes": 26 * GIB, "total_bytes": 32 * GIB, "use": 0.97,
        "memory_use": 0.6, "power_w": 521.5, "power_limit_w": 575.0, "temperature_c": 71, "sm_mhz": 2460, "memory_mhz": 2460,
        "energy_j": 0, "throttle": ["power"], "pcie": "gen 5 x16", "pcie_out_bps": 1_200_000, "pcie_in_bps": 1_200_000,
        "errors": {"ecc_corrected": 3, "ecc_uncorrected": 3},
    }  # fmt: skip
    assert (process["pid"], process["bytes"], process["ours"]) == (os.getpid(), 25 * GIB, False)


def test_energy_is_counted_from_the_start_of_the_attempt():
    driver = Driver(RTX_5090)
    sampler = gpus_of(driver)
    assert sampler.sample()[0]["energy_j"] == 0
    driver.fields = {**RTX_5090, "TotalEnergyConsumption": 7_900_400}
    assert sampler.sample()[0]["energy_j"] == 900


def test_pcie_traffic_is_the_growth_of_the_drivers_counters_where_it_has_them():
    def fields(sent, received):
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(ullVal=count)) for count in (sent, received)]

    driver = Driver({"FieldValues": fields(1000, 2000)})
    sampler = gpus_of(driver)
    assert "pcie_out_bps" not in sampler.sample()[0]
    driver.fields["FieldValues"] = fields(1000, 10**12)
    gpu = sampler.sample()[0]
    assert gpu["pcie_out_bps"] == 0
    assert gpu["pcie_in_bps"] > 10**9


def test_an_xid_error_ends_the_wait_and_stands_in_the_next_sample():
    sampler = gpus_of(Driver(RTX_5090, xids=[79, 31]))
    sampler.wait(60.0)
    sampler.wait(60.0)
    sampler.wait(60.0)  # times out in the driver
    errors = sampler.sample()[0]["errors"]
    assert (errors["xid"], errors["xid_count"]) == (31, 2)


class Storm(Driver):
    """Whose Xid errors all come at once; it ends the sampler after three lines."""

    def __init__(self, path: Path, xids: list[int]):
        super().__init__({}, xids)
        self.path = path

    def nvmlEventSetWait_v2(self, events: str, wait_ms: int) -> Any:
        if len(list(read_json_lines(self.path))) == 3:
            raise SystemExit
        if not self.xids:
            time.sleep(wait_ms / 1000)
        return super().nvmlEventSetWait_v2()


def test_a_storm_of_xid_errors_is_written_soon_in_one_line_and_costs_no_other_line(tmp_path):
    run = RunDir(tmp_path)
    gpus = gpus_of(Storm(run.health(socket.gethostname()), [79] * 50))
    sampler, began = Sampler(run, gpus), time.monotonic()
    with pytest.raises(SystemExit):
        sampler.follow(0.4)
    counts = [line["gpus"][0].get("errors", {}).get("xid_count") for line in read_json_lines(sampler.path)]
    assert counts == [None, 50, None]  # as it was
    assert time.monotonic() - began < 10


def test_processes_that_ended_are_written_once_as_an_empty_list(tmp_path):
    driver = Driver(RTX_5090)
    sampler = Sampler(RunDir(tmp_path), gpus_of(driver))
    sampler.write()
    driver.fields = {**RTX_5090, "ComputeRunningProcesses_v3": []}
    for _ in range(3):
        sampler.write()
    lists = [line["gpus"][0].get("processes") for line in read_json_lines(sampler.path)]
    assert [lists[0][0]["pid"], *lists[1:]] == [os.getpid(), [], None, None]
    host = HostHealth(sampler.path)
    host.read()
    assert host.view().gpus[0].processes == []


def test_every_nvml_function_that_is_called_is_one_of_the_binding():
    source = Path(health.__file__).read_text()
    assert set(re.findall(r"nvml(?:Device|Event|System|Init)\w+", source)) - set(dir(pynvml)) == set()


def test_slow_values_stand_in_the_first_line_when_they_change_and_in_every_30th(tmp_path):
    driver = Driver(RTX_5090)
    sampler = Sampler(RunDir(tmp_path), gpus_of(driver))
    for number in range(WHOLE_EVERY + 1):
        driver.fields = {**RTX_5090, "TotalEccErrors": 3 if number < 2 else 4}
        sampler.write()
    lines = list(read_json_lines(sampler.path))
    for name, where in {"name": [0, 30], "errors": [0, 2, 30], "use": list(range(31))}.items():
        assert [number for number, line in enumerate(lines) if name in line["gpus"][0]] == where, name
    assert [number for number, line in enumerate(lines) if "ram_total" in line] == [0, 30]


def test_a_full_disk_costs_lines_and_nothing_else(tmp_path):
    run = RunDir(tmp_path / "gone")
    sampler = Sampler(run, GpuSampler(None, {}, "abc"))
    sampler.write()
    run.path.mkdir()
    sampler.write()
    sampler.write()
    first, second = read_json_lines(sampler.path)
    assert "ram_total" in first
    assert "ram_total" not in second


def test_a_sample_holds_processors_memory_and_disk_of_the_host(tmp_path):
    sampler = Sampler(RunDir(tmp_path), GpuSampler(None, {}, "abc"))
    sampler.sample_host()
    time.sleep(0.05)
    sample = sampler.sample_host()
    assert 0 <= sample["cpu"] <= 1
    assert 0 < sample["ram_used"] <= sample["ram_total"]
    assert 0 < sample["disk_free"] <= sample["disk_total"]
