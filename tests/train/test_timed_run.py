"""A run whose length is a time: the number of steps is measured once, and is the run's from then on."""

import json
import re
import signal
import subprocess
import time
import tomllib

import pytest
from runs import Workshop, events, final_bits, metrics

pytestmark = pytest.mark.dist


SHORT_STEPS = {"nproc": 1, "total_batch_size": 128}


@pytest.mark.soak
def test_a_time_becomes_a_number_of_steps_that_a_resume_keeps(tmp_path):
    shop = Workshop(tmp_path)
    printed = shop.finish(shop.train_command("timed", num_steps="auto", time="1s", eval_tokens="auto", **SHORT_STEPS))
    timed = tmp_path / "runs" / "timed"
    config = tomllib.loads((timed / "config.toml").read_text())
    plan = json.loads((timed / "plan.json").read_text())
    assert "time" not in config and plan["time"] is None
    num_steps = config["num_steps"]
    assert num_steps >= 60
    assert plan["num_steps"] == metrics(timed)[-1]["step"] == num_steps
    [line] = [line for line in printed.splitlines() if line.startswith("time    1s at ")]
    assert line.partition(" a step: ")[2].startswith(f"{num_steps} steps")
    assert f"{config['eval_tokens']:,} of them in each evaluation" in printed
    assert line in [event["text"] for event in events(timed, "note")]
    assert f"step {num_steps:05d}/{num_steps:05d} | loss" in printed
    assert not list((tmp_path / "cache" / "probe").iterdir())

    refused = shop.finish(shop.command("resume", str(timed), time="8h"), code=1)
    assert f"time sets the length of a new run; timed keeps its {num_steps} steps" in refused
    fix = re.search(r"--num-steps (\d+): 8h00m are about ([\d,]+) steps of .*, from step ([\d,]+) on", refused)
    longer, more, done = (int(number.replace(",", "")) for number in fix.groups())
    assert longer == done + more and done == num_steps
    refused = shop.finish(shop.command("resume", str(timed), time="soon"), code=1)
    assert refused.splitlines() == ["error: time is 'soon', not a duration", "  fix: for example 2m, 8h or 1d12h"]


@pytest.mark.soak
def test_the_measured_number_of_steps_is_kept_by_a_repeated_run(tmp_path):
    shop = Workshop(tmp_path)
    shop.finish(shop.train_command("timed", num_steps="auto", time="1s", eval_tokens="auto", **SHORT_STEPS))
    timed = tmp_path / "runs" / "timed"
    num_steps = tomllib.loads((timed / "config.toml").read_text())["num_steps"]
    command = shop.command("train", str(timed / "config.toml"), "--no-check", name="repeated", health_every=0)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    repeated, deadline = tmp_path / "runs" / "repeated", time.monotonic() + 300
    while not (repeated / "metrics.jsonl").exists() or len(metrics(repeated)) < 5:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=300)
    shop.resume(repeated)
    assert tomllib.loads((repeated / "config.toml").read_text())["num_steps"] == num_steps
    assert final_bits(repeated) == final_bits(timed)
