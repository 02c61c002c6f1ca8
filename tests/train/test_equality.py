"""The same run on any number of ranks, and a broken run that ends as an unbroken one (test_signals.py has more of those)."""

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from runs import STEPS, Workshop, events, final_bits, metrics

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def shop(tmp_path_factory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("shop"))


def test_one_rank_takes_the_same_steps_as_two_from_their_checkpoint_on(shop, unbroken):
    run = shop.copy(unbroken, "alone")
    shop.resume(run, nproc=1, device_batch_size=12, step=30)
    [resumed] = events(run, "resumed")
    assert (resumed["from_world_size"], resumed["step"]) == (2, 30)
    alone, together = metrics(run)[30:], metrics(unbroken)[30:]
    assert alone[0]["loss"] == pytest.approx(together[0]["loss"], abs=1e-5)
    for line, other in zip(alone, together, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], abs=2e-3)
        assert len(line["rank_ms"]) == 1
    assert alone[-1]["val_bpb"] == pytest.approx(together[-1]["val_bpb"], abs=2e-3)


def test_a_run_that_goes_back_to_a_step_ends_with_the_same_bits_and_keeps_the_checkpoints_after_it(shop, unbroken):
    run = shop.copy(unbroken, "back")
    places = run / "checkpoints"
    output = shop.resume(run, step=30)
    assert (
        f"going back to step 30, as --step asks; set aside in {places}: step_000040.aside (to delete: rm -r" in output
    )
    assert final_bits(run) == final_bits(unbroken)
    assert [line["loss"] for line in metrics(run)] == [line["loss"] for line in metrics(unbroken)]
    assert sorted(path.name for path in places.iterdir()) == ["step_000030", "step_000040", "step_000040.aside"]
    assert [(event["step"], event["checkpoints"]) for event in events(run, "set_aside")] == [
        (30, ["step_000040.aside"])
    ]
    assert [(event["step"], event["dropped_metrics"]) for event in events(run, "resumed")] == [(30, 10)]


@pytest.mark.soak
def test_ranks_that_train_together_take_the_same_steps_as_one_alone(shop, unbroken):
    alone, together = metrics(shop.train("world-1", nproc=1, num_steps=STEPS, device_batch_size=12)), metrics(unbroken)
    assert alone[0]["loss"] == pytest.approx(together[0]["loss"], abs=1e-5)
    for line, other in zip(alone[:8], together, strict=False):  # then a difference in the last bit has grown
        assert line["loss"] == pytest.approx(other["loss"], abs=2e-3)
    assert alone[-1]["val_bpb"] == pytest.approx(together[-1]["val_bpb"], abs=2e-3)


@pytest.mark.soak
def test_three_ranks_which_share_no_matrix_evenly_take_the_same_steps_as_one_alone(shop):
    alone, together = (metrics(shop.train(f"eight-{nproc}", nproc=nproc, num_steps=8)) for nproc in (1, 3))
    assert alone[0]["loss"] == pytest.approx(together[0]["loss"], abs=1e-5)
    assert [line["loss"] for line in alone] == pytest.approx([line["loss"] for line in together], abs=2e-3)
    assert alone[-1]["val_bpb"] == pytest.approx(together[-1]["val_bpb"], abs=2e-3)


def test_tokens_are_counted_once_over_all_ranks(unbroken):
    for line in metrics(unbroken):
        assert line["tok_per_sec"] * line["step_ms"] / 1000 == pytest.approx(768, rel=1e-3)


def test_each_rank_reports_how_long_its_own_work_took(unbroken):
    for line in metrics(unbroken):
        assert len(line["rank_ms"]) == 2
        assert 0 < line["rank_ms"][0] < line["step_ms"]


def test_every_step_is_logged_once_and_in_order(unbroken):
    assert [line["step"] for line in metrics(unbroken)] == list(range(1, STEPS + 1))


@pytest.mark.soak
def test_a_checkpoint_of_two_ranks_resumes_on_one_and_on_three(shop, unbroken):
    for nproc in (1, 3):
        run = shop.train(f"reshard-{nproc}", nproc=2, num_steps=STEPS, save_every=20, keep_last=5)
        shop.resume(run, nproc=nproc, step=20)
        assert metrics(run)[-1]["val_bpb"] == pytest.approx(metrics(unbroken)[-1]["val_bpb"], abs=2e-3)
        assert [event["from_world_size"] for event in events(run, "resumed")] == [2]


@pytest.mark.soak
def test_sharded_weights_take_the_same_steps_and_resume_on_three_ranks_and_with_replicated_weights(shop, unbroken):
    run = shop.train("full", nproc=2, num_steps=STEPS, save_every=20, keep_last=5, shard="full")
    assert metrics(run)[0]["loss"] == pytest.approx(metrics(unbroken)[0]["loss"], abs=1e-5)
    assert events(run, "sample")[-1]["text"]
    for nproc, shard in ((3, "full"), (2, "optimizer")):
        resumed = shop.copy(run, f"full-{nproc}")
        shop.resume(resumed, nproc=nproc, shard=shard, step=20)
        assert metrics(resumed)[-1]["val_bpb"] == pytest.approx(metrics(unbroken)[-1]["val_bpb"], abs=2e-3)
        assert [event["from_world_size"] for event in events(resumed, "resumed")] == [2]


@pytest.mark.soak
def test_a_flipped_byte_in_the_newest_checkpoint_is_detected_and_the_previous_one_used(shop, unbroken):
    run = shop.train("flipped", nproc=2, num_steps=STEPS, save_every=20)
    file = sorted((run / "checkpoints" / "step_000040").glob("*.safetensors"))[-1]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    output = shop.resume(run)
    assert "step_000040" in output
    assert "20 steps" in output
    assert final_bits(run) == final_bits(unbroken)


@pytest.mark.soak
def test_a_longer_plan_extends_a_finished_run_and_reports_it(shop, unbroken):
    run = shop.copy(unbroken, "extended")
    output = shop.resume(run, num_steps=STEPS + 10)
    assert f"length changed from {STEPS} to {STEPS + 10} steps" in output
    assert [line["step"] for line in metrics(run)] == list(range(1, STEPS + 11))
    assert metrics(run)[STEPS]["lr_mult"] > metrics(run)[STEPS - 1]["lr_mult"]


@pytest.mark.soak
@pytest.mark.parametrize("victim", ["rank 0", "agent", "save"])  # rank 1, the supervisor: test_signals.py
def test_a_killed_run_resumes_to_the_same_bits_as_an_unbroken_one(shop, unbroken, victim):
    name = f"killed-{victim.replace(' ', '-')}"
    command = shop.train_command(name, nproc=2, num_steps=STEPS, save_every=10)
    run = shop.folder / "runs" / name
    supervisor = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: len(steps_of(run)) > random.Random(victim).randrange(5, 25))
    if victim == "save":
        wait_for(lambda: any((run / "checkpoints").glob(".step_*.tmp")) or supervisor.poll() is not None)
    os.kill(pid_of(run, supervisor.pid, victim), signal.SIGKILL)
    assert supervisor.wait(600) == 0
    assert final_bits(run) == final_bits(unbroken)
    assert [line["step"] for line in metrics(run)] == list(range(1, STEPS + 1))


def steps_of(run: Path) -> list[dict]:
    return metrics(run) if (run / "metrics.jsonl").exists() else []


def wait_for(condition, *, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def pid_of(run: Path, supervisor: int, victim: str) -> int:
    import psutil

    if victim == "agent":
        return next(
            p.pid for p in psutil.Process(supervisor).children() if "paceline.launch.agent" in " ".join(p.cmdline())
        )
    return int((run / "logs" / "1" / "0.pid").read_text())
