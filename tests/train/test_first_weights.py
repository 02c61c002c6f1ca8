"""A run that starts with the weights of another one."""

import os
import signal
import subprocess
import time

import pytest
from runs import STEPS, Workshop, events, final_bits, metrics

from paceline.model.checkpoint import CheckpointReader

pytestmark = [pytest.mark.soak, pytest.mark.dist]


def test_a_run_starts_where_the_weights_of_another_one_are_with_new_states(tmp_path, unbroken):
    run = Workshop(tmp_path / "shop").train("second", nproc=1, init_from=unbroken, num_steps=2, eval_every=2)
    first, last = CheckpointReader(run / "checkpoints" / "step_000000"), unbroken / "checkpoints" / f"step_{STEPS:06d}"
    assert metrics(run)[0]["step"] == 0
    assert metrics(run)[0]["val_bpb"] == pytest.approx(CheckpointReader(last).val_bpb, abs=2e-3)
    assert first.keys() == [key for key in CheckpointReader(last).keys() if key.startswith("model.")]
    assert f'init_from = "{last}"' in (run / "config.toml").read_text()
    assert CheckpointReader(run / "checkpoints" / "step_000002").state["optimizer"] == {"step_count": 2}
    assert events(run, "resumed") == []


def test_a_killed_run_goes_on_from_the_weights_of_the_other_one(tmp_path, unbroken):
    shop = Workshop(tmp_path / "shop")
    keys = {"nproc": 2, "init_from": unbroken / "checkpoints" / f"step_{STEPS:06d}", "num_steps": 30}
    whole = shop.train("whole", **keys)
    with subprocess.Popen(shop.train_command("killed", **keys), env={**os.environ, "OMP_NUM_THREADS": "1"}) as command:
        run, deadline = shop.folder / "runs" / "killed", time.monotonic() + 300
        while not (run / "metrics.jsonl").is_file() or len(metrics(run)) < 3:
            assert command.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        command.send_signal(signal.SIGKILL)
    shop.resume(run)
    assert final_bits(run) == final_bits(whole)
