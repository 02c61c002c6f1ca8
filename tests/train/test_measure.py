"""The measurement in real processes: all rates, of a plausible order. How well plans come out of them: benchmarks/plan.py."""

import json
import subprocess
import sys

import pytest

from paceline.config import ModelConfig
from paceline.plan.host import probe_cpu_bf16
from paceline.plan.speeds import RATES, Speeds
from paceline.plan.step_time import StepSetup, step_time

SMALL = """
from paceline.train import measure
measure.SIZES["cpu"] = measure.Sizes(256, (32, 64), (64,), (32, 64), 512, (32, 64), 1 << 14)
measure.SHORTEST_S, measure.TURNS = 0.001, 2
measure.main()
"""
FULL = ["-m", "paceline.train.measure"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "program, processes",
    [
        pytest.param(["-c", SMALL], 1, id="small tensors"),
        pytest.param(FULL, 1, id="one process", marks=pytest.mark.soak),
        pytest.param(FULL, 2, id="two processes", marks=[pytest.mark.dist, pytest.mark.soak]),
    ],
)
def test_a_measurement_is_enough_for_the_time_of_a_step(tmp_path, program, processes):
    out = tmp_path / "speeds.json"
    command = [sys.executable, *program, "--device", "cpu", "--threads", "1", "--out", str(out)]
    subprocess.run([*command, "--processes", str(processes), "--precision", "fp32"], check=True, timeout=600)
    speeds = Speeds.from_json(json.loads(out.read_text()))
    assert (speeds.device_name, speeds.threads, speeds.processes) == ("CPU", 1, processes)
    assert {name.removesuffix(" fp32") for name in speeds.rates} == set(RATES) - ({"send"} if processes == 1 else set())
    assert all(1e5 < rate < 1e14 for points in speeds.rates.values() for _, rate in points)
    model = ModelConfig(4, 128, 2, 2, 64, 256, 4096)
    setup = StepSetup(model, "cpu", processes, "fp32", "muon", "optimizer", 8, 1, speeds=speeds)
    assert step_time(setup).seconds is not None


@pytest.mark.soak
@pytest.mark.slow
def test_bf16_is_measured_on_a_cpu_that_multiplies_it_natively(tmp_path):
    out = tmp_path / "speeds.json"
    command = [sys.executable, "-c", SMALL, "--device", "cpu", "--threads", "1", "--out", str(out)]
    subprocess.run(command, check=True, timeout=600)
    precisions = {name.split()[-1] for name in json.loads(out.read_text())["rates"] if " " in name}
    assert precisions == ({"fp32", "bf16"} if probe_cpu_bf16() else {"fp32"})
