"""Runs whose disk fills up, turns read-only or vanishes under them."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from runs import Workshop, events, final_bits, metrics

from paceline.model.checkpoint import RETRY_S
from paceline.rundir import RunDir, append_event, append_json_line, read_json_lines

pytestmark = pytest.mark.dist
STEPS = 150


@pytest.fixture(scope="module")
def shop(tmp_path_factory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("disk"))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB; a checkpoint of the small model takes 2."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(mounted)], capture_output=True
    ).returncode:
        pytest.skip("may not mount here")
    yield mounted
    subprocess.run(["umount", "-l", str(mounted)], check=True)


def start(shop: Workshop, disk: Path, *words: str, **keys: object) -> tuple[subprocess.Popen, Path]:
    command = [*shop.train_command("run", **{"nproc": 2, "num_steps": STEPS, "runs_dir": disk, **keys}), *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return process, disk / "run"


def wait_for(condition: Callable[[], bool], process: subprocess.Popen, timeout_s: float = 300.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def num_steps(run: Path) -> int:
    return len(list(read_json_lines(run / "metrics.jsonl")))


def fill(disk: Path, *, left: int) -> Path:
    filler = disk / "filler"
    filler.write_bytes(bytes(shutil.disk_usage(disk).free - left))
    return filler


def stand_still(run: Path, *, seconds: float) -> None:
    """So that a quick machine does no more steps until the ranks look for room again."""
    pids = events(run, "attempt")[0]["pids"]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.soak
def test_a_full_disk_costs_a_run_a_checkpoint_and_nothing_else(shop, disk):
    process, run = start(shop, disk, save_every=60)
    wait_for(lambda: num_steps(run) >= 5, process)
    filler = fill(disk, left=300_000)
    wait_for(lambda: any(e["event"] == "save_failed" for e in read_json_lines(run / "events.jsonl")), process)
    filler.unlink()
    stand_still(run, seconds=RETRY_S)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    [failed] = events(run, "save_failed")
    assert failed["step"] == 60
    assert failed["free_bytes"] < 1_000_000 < failed["needed_bytes"]
    saved = [event["step"] for event in events(run, "checkpoint")]
    assert 60 < saved[0] < 120  # as soon as there was room, not when the next one was due
    assert saved[1:] == [120, 150]
    assert [line["step"] for line in metrics(run)] == list(range(1, STEPS + 1))
    assert final_bits(run) == final_bits(shop.train("unbroken", nproc=2, num_steps=STEPS))


@pytest.mark.soak
def test_lines_of_metrics_that_found_no_space_are_written_when_there_is_some(shop, disk):
    process, run = start(shop, disk)
    wait_for(lambda: num_steps(run) >= 5, process)
    filler = fill(disk, left=0)
    wait_for(lambda: shutil.disk_usage(disk).free == 0, process)
    time.sleep(3)
    behind = num_steps(run)
    filler.unlink()
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert behind < STEPS
    assert [line["step"] for line in metrics(run)] == list(range(1, STEPS + 1))


def wait_until_the_end_finds_no_room(shop: Workshop, disk: Path, *words: str) -> tuple[subprocess.Popen, Path, Path]:
    process, run = start(shop, disk, *words, num_steps=40, save_every=10)
    wait_for(lambda: (run / "checkpoints" / "step_000010").exists(), process)
    filler = fill(disk, left=300_000)
    wait_for(
        lambda: any(e["event"] == "save_failed" and e["step"] == 40 for e in read_json_lines(run / "events.jsonl")),
        process,
    )
    return process, run, filler


@pytest.mark.soak
def test_a_run_that_cannot_save_its_end_waits_for_room_and_trains_no_step_twice(shop, disk, unbroken):
    process, run, filler = wait_until_the_end_finds_no_room(shop, disk)
    filler.unlink()
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert "free; the run waits and saves as soon as there is room" in output
    assert [event["step"] for event in events(run, "finished")] == [40]
    assert len(events(run, "attempt")) == 1
    assert final_bits(run) == final_bits(unbroken)


@pytest.mark.soak
def test_a_stop_ends_the_wait_for_room_and_the_run_resumes_when_there_is_some(shop, disk):
    process, run, filler = wait_until_the_end_finds_no_room(shop, disk)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=300)
    assert process.returncode not in (0, 130), output
    assert "error: no space for the checkpoint of step 40" in output
    assert events(run, "finished") == []
    filler.unlink()
    shop.resume(run)
    assert [line["step"] for line in metrics(run)] == list(range(1, 41))


@pytest.mark.soak
def test_a_run_folder_that_turns_read_only_stops_the_run_with_its_name(shop, disk):
    process, run = start(shop, disk)
    wait_for(lambda: num_steps(run) >= 5, process)
    subprocess.run(["mount", "--bind", str(disk), str(disk)], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", str(disk)], check=True)
    try:
        output, _ = process.communicate(timeout=300)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
    assert process.returncode == 1, output
    assert f"error: {run / 'metrics.jsonl'} cannot be written: Read-only file system" in output or (
        f"error: {run / 'events.jsonl'} cannot be written: Read-only file system" in output
    )
    assert "Traceback" not in output


@pytest.mark.soak
def test_a_training_whose_run_folder_is_renamed_goes_on_there_from_its_last_checkpoint(shop, disk):
    process, run = start(shop, disk, save_every=10)
    wait_for((run / "checkpoints" / "step_000010").exists, process)
    run.rename(renamed := disk / "elsewhere")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and f"the run folder was renamed: it is {renamed} now" in output, output
    assert [line["step"] for line in metrics(renamed)] == list(range(1, STEPS + 1))
    assert not run.exists()


@pytest.mark.soak
def test_a_run_folder_that_vanishes_stops_the_run_and_is_not_made_again(shop, disk):
    process, run = start(shop, disk)
    wait_for(lambda: num_steps(run) >= 5, process)
    (run / ".lock").unlink()  # while it is open, it shows where the folder is
    run.rename(disk / "elsewhere")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 1, output
    assert f"error: {run} is gone: it existed when the run began" in output
    assert "Traceback" not in output
    assert not run.exists()
    (disk / "elsewhere").rename(run)
    shop.resume(run)
    assert [line["step"] for line in metrics(run)] == list(range(1, STEPS + 1))


def test_an_event_that_finds_no_space_is_reported_and_written_later(disk, capsys):
    run = RunDir(disk)
    append_event(run, "note", text="x" * 4000)
    fill(disk, left=0)
    append_event(run, "note", text="y" * 4000)
    assert '"text": "yyy' in capsys.readouterr().err
    assert run.events.read_bytes().endswith(b"\n")
    (disk / "filler").unlink()
    append_event(run, "note", text="z")
    assert [event["text"][0] for event in read_json_lines(run.events)] == ["x", "y", "z"]


def test_a_line_cut_by_a_crash_does_not_swallow_the_next(tmp_path):
    path = tmp_path / "events.jsonl"
    append_json_line(path, {"n": 1})
    path.write_bytes(path.read_bytes() + b'{"n": 2')
    append_json_line(path, {"n": 3})
    assert [record["n"] for record in read_json_lines(path)] == [1, 3]


@pytest.mark.soak
def test_an_attempt_that_ended_before_its_first_checkpoint_repeats_no_line(shop):
    command = shop.train_command("no-checkpoint", nproc=2, num_steps=20)
    process = subprocess.Popen([*command, "--no-recover"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    run = shop.folder / "runs" / "no-checkpoint"
    wait_for(lambda: num_steps(run) >= 3, process)
    subprocess.run(["kill", "-9", str(events(run, "attempt")[0]["pids"][0])], check=True)
    process.communicate(timeout=300)
    shop.resume(run)
    assert [line["step"] for line in metrics(run)] == list(range(1, 21))
    [resumed] = events(run, "resumed")
    assert (resumed["step"], resumed["dropped_metrics"] >= 3) == (0, True)


@pytest.mark.soak
def test_a_run_whose_checkpoints_are_all_damaged_stops_at_once_and_changes_none(shop, unbroken):
    run = shop.copy(unbroken, "all-damaged")
    for shard in (run / "checkpoints").glob("step_*/shard_00000*"):
        shard.write_bytes(shard.read_bytes()[:-1])
    output = shop.finish(shop.resume_command(run, num_steps=50), code=1)
    assert f"error: no good checkpoint in {run / 'checkpoints'}: checkpoint step_000040 is damaged" in output
    assert "fix: copy an intact step folder back from a backup, or train again under another --name" in output
    assert len(events(run, "attempt")) == 2
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_000030", "step_000040"]
