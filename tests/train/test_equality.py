"""The same run on any number of ranks, and a broken run that ends as an unbroken one."""

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from runs import Workshop, events, final_bits, metrics

pytestmark = pytest.mark.dist
STEPS = 60


@pytest.fixture(scope="module")
def shop(tmp_path_factory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("shop"))


@pytest.fixture(scope="module")
def unbroken(shop) -> Path:
    """Two ranks, all steps, a checkpoint every 20."""
    return shop.train("unbroken", nproc=2, num_steps=STEPS, save_every=20)


def test_ranks_that_train_together_take_the_same_steps_as_one_alone(shop, unbroken):
    for nproc in (1, 3):
        run = shop.train(f"world-{nproc}", nproc=nproc, num_steps=STEPS)
        assert metrics(run)[0]["loss"] == pytest.approx(metrics(unbroken)[0]["loss"], abs=1e-5)
        assert metrics(run)[-1]["val_bpb"] == pytest.approx(metrics(unbroken)[-1]["val_bpb"], abs=2e-3)


def test_tokens_are_counted_once_over_all_ranks(unbroken):
    for line in metrics(unbroken):
        assert line["tok_per_sec"] * line["step_ms"] / 1000 == pytest.approx(768, rel=1e-3)


def test_each_rank_tells_how_long_its_own_work_took(unbroken):
    for line in metrics(unbroken):
        assert len(line["rank_ms"]) == 2
        assert 0 < line["rank_ms"][0] < line["step_ms"]


def test_every_step_is_logged_once_and_in_order(unbroken):
    assert [line["step"] for line in metrics(unbroken)] == list(range(1, STEPS + 1))


@pytest.mark.soak
def test_a_checkpoint_of_two_ranks_goes_on_at_one_and_at_three(shop, unbroken):
    for nproc in (1, 3):
        run = shop.train(f"reshard-{nproc}", nproc=2, num_steps=STEPS, save_every=20, keep_last=5)
        (run / "checkpoints" / "step_000060").rename(run / "gone")
        shop.resume(run, nproc=nproc)
        assert metrics(run)[-1]["val_bpb"] == pytest.approx(metrics(unbroken)[-1]["val_bpb"], abs=2e-3)
        assert [event["from_world_size"] for event in events(run, "resumed")] == [2]


@pytest.mark.soak
def test_a_flipped_byte_in_the_newest_checkpoint_is_found_and_the_one_before_used(shop, unbroken):
    run = shop.train("flipped", nproc=2, num_steps=STEPS, save_every=20)
    file = sorted((run / "checkpoints" / "step_000060").glob("*.safetensors"))[-1]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    output = shop.resume(run)
    assert "step_000060" in output
    assert "20 steps" in output
    assert final_bits(run) == final_bits(unbroken)


def test_a_longer_plan_extends_a_finished_run_and_says_so(shop):
    run = shop.train("extended", nproc=2, num_steps=10)
    output = shop.resume(run, num_steps=20)
    assert "length changed from 10 to 20 steps" in output
    assert [line["step"] for line in metrics(run)] == list(range(1, 21))
    assert metrics(run)[10]["lr_mult"] > metrics(run)[9]["lr_mult"]


@pytest.mark.parametrize(
    "victim",
    [
        *(pytest.param(each, marks=pytest.mark.soak) for each in ("rank 0", "agent", "save", "supervisor")),
        "rank 1",
    ],
)
def test_a_killed_run_goes_on_to_the_same_bits_as_one_never_broken(shop, unbroken, victim):
    name = f"killed-{victim.replace(' ', '-')}"
    command = shop.train_command(name, nproc=2, num_steps=STEPS, save_every=20)
    run = shop.folder / "runs" / name
    supervisor = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: len(steps_of(run)) > random.Random(victim).randrange(5, 40))
    if victim == "save":
        wait_for(lambda: any((run / "checkpoints").glob(".step_*.tmp")) or supervisor.poll() is not None)
    os.kill(pid_of(run, supervisor.pid, victim), signal.SIGKILL)
    code = supervisor.wait(120)
    if victim == "supervisor":  # all others it outlives
        assert code != 0
        shop.resume(run)
    else:
        assert code == 0
    assert final_bits(run) == final_bits(unbroken)
    assert [line["step"] for line in metrics(run)] == list(range(1, STEPS + 1))


def steps_of(run: Path) -> list[dict]:
    return metrics(run) if (run / "metrics.jsonl").exists() else []


def wait_for(condition, *, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def pid_of(run: Path, supervisor: int, victim: str) -> int:
    import psutil

    if victim == "supervisor":
        return supervisor
    if victim == "agent":
        return next(
            p.pid for p in psutil.Process(supervisor).children() if "paceline.launch.agent" in " ".join(p.cmdline())
        )
    rank = victim[-1] if victim.startswith("rank") else "0"
    return int((run / "logs" / "1" / f"{rank}.pid").read_text())
