"""What `check`, `plan`, `comm` and `train` say of cards that only a stand-in for the driver reports, with a torch without CUDA."""

import json
import os
from importlib.metadata import version

import pytest
from fake_driver import (
    FUNCTION_NOT_FOUND,
    GB10,
    GIB,
    H100,
    LIBRARY_MISMATCH,
    MIB,
    NOT_LOADED,
    RTX_4090,
    RTX_4090_48GB,
    RTX_5090,
    THERMAL,
    UNKNOWN_ERROR,
    mig_part,
    split_by_mig,
)

pytestmark = pytest.mark.dist
CPU_TORCH = pytest.mark.skipif("+cpu" not in version("torch"), reason="torch here is not the CPU build")
WHEEL = "pip install --force-reinstall torch -i https://download.pytorch.org/whl/"
LOST_NOTE = "note    GPU 0 does not answer ({}): it is left out\n"


def device_line(done) -> str:
    assert done.returncode == 0, done.stderr
    return next(line for line in done.stdout.splitlines() if line.startswith("device"))


def device_memory(done) -> str:
    return next(line for line in done.stdout.splitlines() if line.split()[:1] == ["needed"])


@pytest.mark.parametrize("count", [1, 2, 8])
def test_a_plan_without_flags_is_for_every_card(host, count):
    assert device_line(host(*[RTX_5090] * count).paceline("plan")).startswith(
        f"device  {count} x NVIDIA GeForce RTX 5090, "
    )


@pytest.mark.soak
@CPU_TORCH
def test_a_torch_without_cuda_is_the_one_thing_that_a_good_host_lacks(host):
    computer = host(RTX_5090, RTX_5090)
    done = computer.paceline("check", "--json")
    answer = json.loads(done.stdout)
    stops = [
        (finding["id"], finding["what"], finding["fix"])
        for finding in answer["findings"]
        if finding["severity"] == "stop"
    ]
    what = f"torch {version('torch')} was built without CUDA, and this host has 2 GPUs"
    assert (done.returncode, stops) == (1, [("torch-cpu-build", what, WHEEL + "cu130")])
    (facts,) = answer["facts"].values()
    assert facts["driver"] == {"version": "580.95.05", "cuda": "13.0"}
    assert [(gpu["index"], gpu["name"], gpu["capability"]) for gpu in facts["gpus"]] == [
        (0, "NVIDIA GeForce RTX 5090", [12, 0]), (1, "NVIDIA GeForce RTX 5090", [12, 0]),
    ]  # fmt: skip


@pytest.mark.soak
@CPU_TORCH
@pytest.mark.parametrize(("command", "subject"), [(["comm"], "measurement"), (["train", "--num-steps", "2"], "run")])
def test_nothing_starts_on_cards_that_torch_cannot_use(command, subject, host):
    done = host(RTX_5090, RTX_5090).paceline(*command)
    assert done.returncode == 1
    assert f"error: this {subject} would fail: torch-cpu-build\n  fix: apply the fixes above" in done.stderr
    assert f"{WHEEL}cu130" in done.stdout


@CPU_TORCH
@pytest.mark.soak
def test_what_starts_anyway_says_that_torch_has_no_cuda(host):
    computer = host(RTX_5090)
    measured = computer.paceline("plan", "--measure")
    assert measured.stderr.endswith(
        "error: this PyTorch was built without CUDA, so it cannot use the GPUs here\n"
        "  fix: paceline check prints which wheel to install; or --device cpu\n"
    )
    trained = computer.paceline("train", "--num-steps", "2", "--no-check")
    assert (
        f"error: the plan is for NVIDIA GeForce RTX 5090, but this PyTorch ({version('torch')}) cannot use CUDA here"
        in trained.stderr
    )
    assert "no further attempt: another attempt would fail the same way" in trained.stdout


def test_each_fault_of_a_card_is_reported_with_its_fix(host):
    ours = f"{os.getpid()} {20 * GIB}"
    held = {**RTX_5090, "MemoryInfo": f"{32_607 * MIB} {20 * GIB}", "ComputeRunningProcesses_v3": ours}
    hot = {**RTX_5090, "Temperature": "91", "CurrentClocksEventReasons": str(THERMAL)}
    weak = {**RTX_5090, "EnforcedPowerLimit": "400000", "TotalEccErrors": "3"}
    computer = host(RTX_5090, held, hot, weak, RTX_5090)
    computer.lose(0, UNKNOWN_ERROR)
    findings = computer.findings()
    assert findings["gpu-driver-silent"] == (
        "warn", "the GPUs cannot be queried: GPU 0 does not answer", "export CUDA_VISIBLE_DEVICES=1,2,3,4",
    )  # fmt: skip
    severity, what, fix = findings["gpu-memory-held"]
    assert what.startswith("GPU 1 (RTX 5090): 20.0 GiB of 31.8 GiB used by python")
    assert (severity, fix) == ("warn", f"kill {os.getpid()}")
    assert findings["gpu-hot"] == (
        "warn", "GPU 2 (RTX 5090) is 91 °C, throttled by thermal", "nvidia-smi -i 2 -q -d TEMPERATURE,PERFORMANCE",
    )  # fmt: skip
    assert findings["gpu-power-limited"] == (
        "note", "GPU 3 (RTX 5090) is limited to 400 W of 575 W", "sudo nvidia-smi -i 3 -pl 575",
    )  # fmt: skip
    assert findings["gpu-ecc-errors"][1] == "GPU 3 (RTX 5090) counts 3 uncorrected memory errors"
    assert "gpu-mixed" not in findings


def test_a_plan_leaves_a_lost_card_out_whether_or_not_it_is_hidden(host):
    computer = host(RTX_5090, RTX_5090, RTX_4090)
    computer.lose(0, UNKNOWN_ERROR)
    whole = computer.paceline("plan")
    computer.lose(0)
    hidden = computer.paceline("plan", CUDA_VISIBLE_DEVICES="1")
    assert device_line(whole).startswith("device  2 x NVIDIA GeForce RTX 5090, ")
    assert device_line(hidden).startswith("device  1 x NVIDIA GeForce RTX 5090, ")
    assert (whole.stderr, hidden.stderr) == (LOST_NOTE.format("Unknown Error"), LOST_NOTE.format("GPU is lost"))


@pytest.mark.soak
def test_the_fix_of_a_lost_card_ends_the_finding(host):
    computer = host(RTX_5090, RTX_5090)
    computer.lose(0)
    name, value = computer.findings()["gpu-driver-silent"][2].removeprefix("export ").split("=")
    assert not {"gpu-driver-silent", "gpu-hidden", "gpu-name-wrong"} & computer.findings(**{name: value}).keys()


def test_the_only_card_lost_is_an_error_and_no_plan_for_the_cpu(host):
    computer = host(RTX_5090)
    computer.lose(0)
    done = computer.paceline("plan")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == LOST_NOTE.format("GPU is lost") + (
        "error: no GPU of this machine answers: GPU 0 does not answer (GPU is lost)\n  fix: sudo reboot; or --device cpu\n"
    )
    assert "CPU process" in device_line(computer.paceline("plan", "--device", "cpu"))


@pytest.mark.soak
def test_a_driver_updated_without_a_reboot_is_a_finding_and_stops_only_what_needs_it(host):
    computer = host(RTX_5090)
    computer.answers["Init"] = LIBRARY_MISMATCH
    computer.write()
    finding = ("stop", "the GPUs cannot be queried: Driver/library version mismatch", "sudo reboot")
    assert computer.findings() == {"gpu-driver-silent": finding}
    refused, on_cpu = computer.paceline("plan"), computer.paceline("plan", "--device", "cpu")
    assert refused.stderr == (
        "error: the NVIDIA driver does not answer: Driver/library version mismatch, as after an update without a reboot\n"
        "  fix: sudo reboot; or --device cpu\n"
    )
    assert "CPU process" in device_line(on_cpu)


def test_a_driver_that_is_not_loaded_on_a_host_without_a_card_is_no_fault(host):
    computer = host()
    computer.answers["Init"] = NOT_LOADED
    computer.write()
    assert "CPU process" in device_line(computer.paceline("plan"))


@pytest.mark.soak
@CPU_TORCH
def test_an_old_driver_is_to_be_updated_before_any_wheel_is_installed(host):
    old = {
        **RTX_4090,
        "CurrentClocksEventReasons": FUNCTION_NOT_FOUND, "CurrentClocksThrottleReasons": str(THERMAL),
        "ComputeRunningProcesses_v3": FUNCTION_NOT_FOUND, "ComputeRunningProcesses_v2": f"1 {12 * GIB}",
        "GraphicsRunningProcesses_v3": FUNCTION_NOT_FOUND, "GraphicsRunningProcesses_v2": "",
        "MemoryInfo": f"{24_564 * MIB} {12 * GIB}",
    }  # fmt: skip
    findings = host(old, version="470.256.02", cuda=11040).findings()
    what = f"torch {version('torch')} was built without CUDA, and this host has 1 GPU"
    what += "; its driver 470.256.02 is older than all wheels need"
    fix = f"a driver 525 or later: https://www.nvidia.com/drivers, then {WHEEL}cu126"
    assert findings["torch-cpu-build"] == ("stop", what, fix)
    assert findings["gpu-hot"][1] == "GPU 0 (RTX 4090) is 41 °C, throttled by thermal"
    assert "12.0 GiB of 24.0 GiB used by" in findings["gpu-memory-held"][1]


def test_a_4090_with_48_gb_is_planned_with_its_memory_and_without_speeds(host):
    done = host(RTX_4090_48GB).paceline("plan")
    assert device_line(done).startswith("device  1 x NVIDIA GeForce RTX 4090, bf16")
    assert "of 48.0 GiB" in device_memory(done)
    assert "time    n/a, bf16 speed of this card is in no table and was not measured" in done.stdout


def test_a_card_that_shares_the_hosts_memory_has_that_of_the_table_or_none(host):
    assert "of 120 GiB" in device_memory(host(GB10).paceline("plan"))
    unknown = host({**GB10, "Name": "NVIDIA Thor"}).paceline("plan")
    assert device_memory(unknown).endswith("how much the device has is not known")


MIG = split_by_mig(
    H100,
    mig_part("1g.10gb", "MIG-aaaa-0000", memory_mib=9_856),
    mig_part("3g.40gb", "MIG-bbbb-0000", memory_mib=40_448),
)


@pytest.mark.parametrize(
    ("visible", "profile", "memory"),
    [({}, "1g.10gb", "9.6 GiB"), ({"CUDA_VISIBLE_DEVICES": "MIG-bbbb-0000"}, "3g.40gb", "39.5 GiB")],
)
def test_of_a_card_that_mig_splits_a_plan_takes_the_part_that_cuda_shows(host, visible, profile, memory):
    done = host(MIG).paceline("plan", **visible)
    assert device_line(done).startswith(f"device  1 x NVIDIA H100 80GB HBM3 MIG {profile}, ")
    assert f"of {memory}" in device_memory(done)


@pytest.mark.soak
def test_a_mig_device_in_cuda_visible_devices_is_a_right_name(host):
    findings = host(MIG).findings(CUDA_VISIBLE_DEVICES="MIG-bbbb-0000")
    assert not {"gpu-name-wrong", "gpu-missing", "gpu-hidden"} & findings.keys()


def test_nvidia_smi_reports_the_same_cards_where_the_binding_is_missing(host, tmp_path):
    (tmp_path / "pynvml.py").write_text("raise ImportError('not here')\n")
    computer = host(RTX_5090, RTX_5090)
    assert device_line(computer.paceline("plan", PYTHONPATH=str(tmp_path))).startswith(
        "device  2 x NVIDIA GeForce RTX 5090, "
    )
    computer.lose(1, UNKNOWN_ERROR)
    refused = computer.paceline("plan", PYTHONPATH=str(tmp_path))
    assert refused.stderr == (
        "error: the NVIDIA driver does not answer: Unable to determine the device handle for GPU1: 0000:01:00.0: Unknown Error\n"
        "  fix: run nvidia-smi; or --device cpu\n"
    )


@pytest.mark.soak
def test_libraries_of_low_precision_are_judged_by_their_metadata_on_the_card_that_is_here(host, tmp_path):
    for name, number in (("transformer_engine", "2.17.0"), ("torchao", "0.18.0")):
        folder = tmp_path / "site" / f"{name}-{number}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    site = str(tmp_path / "site")
    severity, what, fix = host(RTX_5090, RTX_5090).findings(PYTHONPATH=site)["fp4-false-support"]
    assert severity == "warn" and fix.startswith("pip install --upgrade --no-build-isolation 'transformer_engine")
    assert what.startswith("GPU 0 (RTX 5090) has compute capability 12.0: transformer-engine 2.17.0 offers NVFP4 there")
    assert not {"fp4-false-support", "mxfp8-not-on-sm120"} & host(H100).findings(PYTHONPATH=site).keys()


@pytest.mark.soak
def test_a_precision_that_the_second_card_or_the_driver_lacks_stops_a_run(host):
    findings = host(RTX_5090, RTX_4090).findings("--precision", "nvfp4")
    what = "GPU 1 (RTX 4090) has capability 8.9, nvfp4 needs 10.0"
    assert findings["precision-unsupported"] == ("stop", what, "--precision auto")
    severity, what, fix = host(RTX_5090, version="565.57").findings("--precision", "nvfp4")["precision-library-old"]
    assert (severity, what) == ("stop", "driver 565.57, nvfp4 products need 570, which came with CUDA 12.8")
    assert fix.startswith("a driver 570 or later")
    assert "precision-library-old" not in host(RTX_5090, version="565.57").findings("--precision", "nvfp4", "--emulate")
