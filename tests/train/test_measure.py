"""The measurement in real processes: all rates, of a plausible order. How well plans come out of them: benchmarks/plan.py."""

import json
import subprocess
import sys

import pytest

from paceline.config import ModelConfig
from paceline.plan.speeds import RATES, Speeds
from paceline.plan.step_time import StepSetup, step_time

PROCESSES = [1, pytest.param(2, marks=[pytest.mark.dist, pytest.mark.soak])]


@pytest.mark.parametrize("processes", PROCESSES)
def test_a_measurement_is_enough_for_the_time_of_a_step(tmp_path, processes):
    out = tmp_path / "speeds.json"
    command = [sys.executable, "-m", "paceline.train.measure", "--device", "cpu", "--threads", "1", "--out", str(out)]
    subprocess.run([*command, "--processes", str(processes), "--precision", "fp32"], check=True, timeout=200)
    speeds = Speeds.from_json(json.loads(out.read_text()))
    assert (speeds.device_name, speeds.threads, speeds.processes) == ("CPU", 1, processes)
    assert {name.removesuffix(" fp32") for name in speeds.rates} == set(RATES) - ({"send"} if processes == 1 else set())
    assert all(1e5 < rate < 1e14 for points in speeds.rates.values() for _, rate in points)
    model = ModelConfig(4, 128, 2, 2, 64, 256, 4096)
    setup = StepSetup(model, "cpu", processes, "fp32", "muon", "optimizer", 8, 1, speeds=speeds)
    assert step_time(setup).seconds is not None
