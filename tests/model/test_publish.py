import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from paceline.errors import PacelineError
from paceline.model.checkpoint import CheckpointReader, CheckpointWriter, Piece
from paceline.model.manifest import better_checkpoint, clean_leftovers, list_checkpoints, newest_good, verify
from paceline.model.publish import GIVEN_UP


def make_writer(
    directory: Path,
    rank: int = 0,
    world_size: int = 1,
    *,
    attempt: str = "1",
    keep_last: int = 3,
    deadline_s: float = 300.0,
) -> CheckpointWriter:
    return CheckpointWriter(
        directory,
        rank=rank,
        world_size=world_size,
        attempt=attempt,
        keep_last=keep_last,
        on_saved=lambda *saved: None,
        deadline_s=deadline_s,
    )


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


def rows_of(rank: int, world_size: int, value: float, num_rows: int = 8) -> list[Piece]:
    lo, hi = rank * num_rows // world_size, (rank + 1) * num_rows // world_size
    return [Piece("x", (num_rows, 4), (lo, hi), torch.full((hi - lo, 4), value))]


def test_the_newest_and_the_best_are_kept(tmp_path: Path):
    writer = make_writer(tmp_path, keep_last=2)
    for step, val_bpb in ((10, 3.0), (20, 1.0), (30, 2.0), (40, None), (50, 1.5), (60, 1.2)):
        writer.save(step, rows_of(0, 1, step), {}, val_bpb=val_bpb)
    writer.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000020", "step_000050", "step_000060"]


def test_a_limit_of_the_size_of_files_is_refused_with_the_command_that_lifts_it(tmp_path: Path):
    (tmp_path / "books" / "checkpoints").mkdir(parents=True)
    writer = make_writer(tmp_path / "books" / "checkpoints")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(PacelineError, match="File too large") as error:
            writer.save(10, rows_of(0, 1, 1.0), {})
            writer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.value.fix.startswith("ulimit -f unlimited, or ")


def test_among_equally_good_ones_the_newest_is_the_best(tmp_path: Path):
    writer = make_writer(tmp_path, keep_last=1)
    for step in (10, 20, 30):
        writer.save(step, rows_of(0, 1, step), {}, val_bpb=2.0 if step == 30 else 1.0)
    writer.wait()
    assert [manifest.step for _, manifest in list_checkpoints(tmp_path)] == [30, 20]


def test_a_checkpoint_is_better_if_val_bpb_is_clearly_higher_at_another(tmp_path: Path):
    writer = make_writer(tmp_path, keep_last=9)
    for step, val_bpb in ((10, 1.0), (20, 1.009), (30, None), (40, 1.02)):
        writer.save(step, rows_of(0, 1, step), {}, val_bpb=val_bpb)
    writer.wait()
    better = {step: better_checkpoint(tmp_path, step) for step in (10, 20, 30, 40, 50)}
    assert {step: found and found.step for step, found in better.items()} == {
        10: None,
        20: None,
        30: None,
        40: 10,
        50: None,
    }


def test_a_checkpoint_that_is_newer_than_the_newest_good_one_is_not_better(tmp_path: Path):
    writer = make_writer(tmp_path, keep_last=9)
    for step, val_bpb in ((10, 1.2), (20, 1.5), (30, 1.0)):
        writer.save(step, rows_of(0, 1, step), {}, val_bpb=val_bpb)
    writer.wait()
    better = better_checkpoint(tmp_path, 20)  # that of step 30 is damaged
    assert better and better.step == 10


def test_the_one_just_saved_is_never_pruned_for_a_newer_one(tmp_path: Path):
    for step in (60, 40):
        writer = make_writer(tmp_path, keep_last=1)
        writer.save(step, rows_of(0, 1, step), {})
        writer.wait()
    assert [manifest.step for _, manifest in list_checkpoints(tmp_path)] == [60, 40]


def test_a_full_disk_is_reported_with_numbers_and_leaves_the_older_checkpoint(tiny_disk: Path):
    directory = tiny_disk / "checkpoints"
    writer = make_writer(directory)
    writer.save(20, rows_of(0, 1, 20.0), {})
    writer.save(40, [Piece("x", (500_000,), (0, 500_000), torch.ones(500_000))], {})
    with pytest.raises(PacelineError) as error:
        writer.wait()
    assert "no space for the checkpoint of step 40: rank 0 of 1 needs 1.9 MiB, 10" in error.value.message  # 10xx KiB
    assert f" KiB free in {directory}; the checkpoints before it are untouched" in error.value.message
    assert error.value.fix == f"free some space (older checkpoints lie there too), then: paceline resume {tiny_disk}"
    assert [path.name for path in directory.iterdir()] == ["step_000020"]
    writer.save(60, rows_of(0, 1, 60.0), {})
    writer.wait()
    assert newest_good(directory, set_aside=False) == (directory / "step_000060", [])


def test_a_rank_with_a_full_disk_stops_the_others_at_once(tiny_disk: Path):
    full, fine = make_writer(tiny_disk, 1, 2), make_writer(tiny_disk, 0, 2)
    full.save(40, [Piece("x", (500_000,), (0, 500_000), torch.ones(500_000))], {})
    fine.save(40, [], {})
    with pytest.raises(PacelineError, match="rank 1 of 2 needs"):
        full.wait()
    with pytest.raises(PacelineError) as error:
        fine.wait()
    message = error.value.message  # rank 0 hears of rank 1, or meets the full disk itself
    assert message.startswith(("rank 1 of 2 could not write its part of the checkpoint of step 40", "no space for the"))
    assert message.endswith("the checkpoints before it are untouched")
    assert files_in(tiny_disk) <= {GIVEN_UP, "shard_00001_of_00002.full"}


def test_the_full_disk_of_another_host_is_reported_with_the_host(tmp_path: Path):
    folder = tmp_path / ".step_000040.1-1.tmp"
    folder.mkdir()
    (folder / "shard_00001_of_00002.full").write_text("bob")
    writer = make_writer(tmp_path, 0, 2)
    writer.save(40, rows_of(0, 2, 1.0), {})
    with pytest.raises(PacelineError) as error:
        writer.wait()
    assert error.value.message.startswith("no space for the checkpoint of step 40: rank 1 of 2 on bob has not enough")
    assert "free in" not in error.value.message and error.value.host == "bob"
    assert error.value.fix.startswith("free some space on bob (")


def test_a_folder_that_cannot_be_written_is_reported_with_the_reason(tiny_disk: Path):
    if subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], capture_output=True).returncode:
        pytest.skip("may not remount here")
    writer = make_writer(tiny_disk / "checkpoints")
    writer.save(40, rows_of(0, 1, 1.0), {})
    with pytest.raises(PacelineError) as error:
        writer.wait()
    assert error.value.message == (
        f"rank 0 of 1 cannot write the checkpoint of step 40 to {tiny_disk}/checkpoints: Read-only file system"
    )


def test_a_rank_that_never_writes_is_reported_at_the_deadline(tmp_path: Path):
    writer = make_writer(tmp_path, 0, 4, deadline_s=0.2)
    other = make_writer(tmp_path, 2, 4)
    other.save(40, rows_of(2, 4, 1.0), {})
    writer.save(40, rows_of(0, 4, 1.0), {})
    with pytest.raises(PacelineError) as error:
        writer.wait()
    assert error.value.message == (
        f"no checkpoint of step 40: after 0.2 s rank 1, 3 of 4 has not written its part to {tmp_path}"
    )
    other.wait()
    assert files_in(tmp_path) == {GIVEN_UP}


def test_a_rank_that_finishes_after_rank_0_gave_up_leaves_no_file(tmp_path: Path):
    first, late = make_writer(tmp_path, 0, 2, deadline_s=0.1), make_writer(tmp_path, 1, 2)
    first.save(40, rows_of(0, 2, 1.0), {})
    with pytest.raises(PacelineError):
        first.wait()
    late.save(40, rows_of(1, 2, 1.0), {})
    late.wait()
    assert files_in(tmp_path) == {GIVEN_UP}
    late.save(60, rows_of(1, 2, 1.0), {})
    late.wait()
    first.save(60, rows_of(0, 2, 1.0), {})
    first.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step_000060"]


@pytest.mark.parametrize("attempt", ["1", "2"])
def test_leftovers_of_a_killed_attempt_are_never_merged(tmp_path: Path, attempt: str):
    dead = make_writer(tmp_path, 1, 2, attempt="1")
    dead.save(40, rows_of(1, 2, 666.0), {})  # rank 0 was killed before it wrote anything
    dead.wait()
    if attempt == "1":  # another attempt has another name anyway
        clean_leftovers(tmp_path)
    writers = [make_writer(tmp_path, rank, 2, attempt=attempt) for rank in range(2)]
    writers[0].save(40, rows_of(0, 2, 1.0), {})
    time.sleep(0.2)
    assert list_checkpoints(tmp_path) == []
    writers[1].save(40, rows_of(1, 2, 1.0), {})
    for writer in writers:
        writer.wait()
    assert CheckpointReader(tmp_path / "step_000040").read("x").unique().tolist() == [1.0]


def test_a_step_saved_again_after_a_failure_uses_no_file_of_the_first_save(tmp_path: Path):
    writers = [make_writer(tmp_path, rank, 2, deadline_s=0.1) for rank in range(2)]
    writers[0].save(40, rows_of(0, 2, 1.0), {})
    with pytest.raises(PacelineError):
        writers[0].wait()
    writers[1].save(40, rows_of(1, 2, 666.0), {})  # too late: rank 0 has given up
    writers[1].wait()
    writers[1].save(40, rows_of(1, 2, 2.0), {})
    writers[0].save(40, rows_of(0, 2, 2.0), {})
    for writer in writers:
        writer.wait()
    assert CheckpointReader(tmp_path / "step_000040").read("x").unique().tolist() == [2.0]


SAVE_FOREVER = """if True:
    import itertools, os, sys, torch
    from pathlib import Path
    from paceline.model.checkpoint import CheckpointWriter, Piece

    def save_forever(rank, attempt, first_step):
        writer = CheckpointWriter(Path(sys.argv[1]), rank=rank, world_size=2, attempt=str(attempt), keep_last=2,
                                  on_saved=lambda *saved: None)
        for twice in itertools.count(2 * first_step):  # every step again, so that kills meet replacements too
            step = twice // 2
            rows = torch.full((50_000, 4), step + rank / 2)
            writer.save(step, [Piece("x", (100_000, 4), (rank * 50_000, (rank + 1) * 50_000), rows)], {"step": step})

    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:  # "attempt first_step": two ranks, forked, since importing torch takes longer than a round
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                save_forever(rank, *map(int, line.split()))
            print(pid, flush=True)
        for rank in range(2):
            os.wait()
        print("ended", flush=True)
"""


@pytest.mark.dist
def test_ranks_killed_at_any_moment_of_a_save_leave_only_whole_checkpoints(tmp_path: Path):
    chance = random.Random(0)
    host = subprocess.Popen(
        [sys.executable, "-c", SAVE_FOREVER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert host.stdin and host.stdout and host.stdout.readline() == "ready\n"
    last_step, leftovers, attempt = 0, 0, 0
    while attempt < 6 or not (last_step and leftovers):  # until kills have met saves under way, on a busy machine too
        print(attempt, last_step + 1, file=host.stdin, flush=True)
        pids = [int(host.stdout.readline()) for _ in range(2)]
        time.sleep(chance.uniform(0.02, 0.25) * (1 + attempt / 10))
        for pid in chance.sample(pids, 2):
            os.kill(pid, signal.SIGKILL)
        assert host.stdout.readline() == "ended\n"
        leftovers += any(tmp_path.glob(".*.tmp"))
        clean_leftovers(tmp_path)
        listed = list_checkpoints(tmp_path)
        assert {path for path, _ in listed} == set(tmp_path.iterdir())
        for path, manifest in listed:
            verify(path)
            step, x = manifest.step, CheckpointReader(path).read("x")
            assert (x[:50_000].unique().tolist(), x[50_000:].unique().tolist()) == ([step], [step + 0.5])
            assert torch.equal(CheckpointReader(path).read("x", 49_999, 50_001), x[49_999:50_001])  # of both files
        newest = max((manifest.step for _, manifest in listed), default=0)
        assert newest >= last_step  # what was there before the kill is there after it
        last_step, attempt = newest, attempt + 1
    host.stdin.close()
    host.wait()
