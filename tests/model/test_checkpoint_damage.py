"""What a disk does to checkpoints: full and then not, gone, read-only; and folders of which parts are missing or wrong."""

import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from paceline.errors import PacelineError
from paceline.model import checkpoint, publish
from paceline.model.checkpoint import CheckpointReader, CheckpointWriter, Piece
from paceline.model.manifest import UnreadableCheckpoint, clean_leftovers, list_checkpoints, newest_good
from paceline.model.publish import NoSpace

MIB = 1 << 20


class Saver:
    """A rank's writer that goes on when the disk is full, with what it was told."""

    def __init__(self, run: Path, rank: int = 0, world_size: int = 1, *, num_floats: int = 100_000, keep_last: int = 1):
        self.told: list[NoSpace] = []
        self.saved: list[int] = []
        self.rank, self.world_size, self.num_floats = rank, world_size, num_floats
        self.writer = CheckpointWriter(
            run / "checkpoints",
            rank=rank,
            world_size=world_size,
            attempt="1",
            keep_last=keep_last,
            on_saved=lambda step, seconds, num_bytes: self.saved.append(step),
            on_no_space=self.told.append,
            whole_bytes=4 * num_floats,
            deadline_s=20.0,
        )

    def save(self, step: int) -> None:
        rows = [rank * self.num_floats // self.world_size for rank in (self.rank, self.rank + 1)]
        tensor = torch.full((rows[1] - rows[0],), float(step))
        self.writer.save(step, [Piece("x", (self.num_floats,), (rows[0], rows[1]), tensor)], {})


def fill(disk: Path, *, left: int) -> Path:
    filler = disk / "filler"
    filler.write_bytes(bytes(shutil.disk_usage(disk).free - left))
    return filler


def test_a_full_disk_ends_nothing_and_the_older_checkpoint_stands(tiny_disk):
    saver = Saver(tiny_disk)
    saver.save(10)
    saver.writer.wait()
    fill(tiny_disk, left=100_000)
    saver.save(20)
    saver.writer.wait()
    [error] = saver.told
    assert (error.step, error.needed_bytes) == (20, 400_104)  # with the header
    assert 90_000 < error.free_bytes <= 100_000
    assert error.message.startswith("no space for the checkpoint of step 20: rank 0 of 1 needs 391 KiB, ")
    assert [manifest.step for _, manifest in list_checkpoints(tiny_disk / "checkpoints")] == [10]
    assert [path.name for path in (tiny_disk / "checkpoints").iterdir()] == ["step_000010"]


def test_free_space_is_reported_and_the_next_save_succeeds(tiny_disk, monkeypatch):
    monkeypatch.setattr(checkpoint, "LOOK_S", 0.0)
    monkeypatch.setattr(checkpoint, "RETRY_S", 1e9)  # for a disk that showed room and refused
    saver = Saver(tiny_disk)
    assert not saver.writer.has_space_again()
    filler = fill(tiny_disk, left=100_000)
    saver.save(20)
    saver.writer.wait()
    assert not saver.writer.has_space_again()
    filler.unlink()
    assert saver.writer.has_space_again()
    saver.save(21)
    saver.writer.wait()
    assert (saver.saved, saver.writer.no_space) == ([21], None)
    assert not saver.writer.has_space_again()


def test_saves_become_rare_while_a_disk_shows_room_and_refuses(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "LOOK_S", 0.0)

    def refuse(save):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(checkpoint, "write_part", refuse)
    saver = Saver(tmp_path)
    for step in (20, 21, 22):
        saver.save(step)
        saver.writer.wait()
    assert [error.step for error in saver.told] == [20, 21, 22]
    assert saver.writer._retry_s == 4 * checkpoint.RETRY_S
    assert not saver.writer.has_space_again()
    saver.writer._retry_at = 0.0
    assert saver.writer.has_space_again()


def test_room_on_the_disk_of_another_host_is_seen_by_the_rank_there(tmp_path, tiny_disk, monkeypatch):
    monkeypatch.setattr(checkpoint, "LOOK_S", 0.0)
    here, there = Saver(tmp_path, 0, 2), Saver(tiny_disk, 1, 2)
    filler = fill(tiny_disk, left=10_000)
    there.save(20)
    there.writer.wait()
    folder = tmp_path / "checkpoints" / ".step_000020.1-1.tmp"
    folder.mkdir(parents=True)
    (folder / "shard_00001_of_00002.full").write_text("bob")  # as the links bring it
    here.save(20)
    here.writer.wait()
    assert (here.told[0].host, here.writer.has_space_again(), there.writer.has_space_again()) == ("bob", False, False)
    filler.unlink()
    assert (here.writer.has_space_again(), there.writer.has_space_again()) == (False, True)


@pytest.mark.parametrize("late", [0, 1])
def test_one_rank_without_space_is_reported_on_rank_0_and_stops_no_rank(tiny_disk, late):
    fill(tiny_disk, left=300_000)  # room for one half of the checkpoint
    savers = [Saver(tiny_disk, rank, 2) for rank in (0, 1)]
    for rank in (1 - late, late):
        savers[rank].save(20)
    for saver in savers:
        saver.writer.wait()
    assert savers[0].writer.no_space is not None
    assert savers[0].told[0].needed_bytes == 400_000
    assert "all together 391 KiB" in savers[0].told[0].message
    assert list_checkpoints(tiny_disk / "checkpoints") == []


@pytest.mark.parametrize("given_up", [True, False])
def test_a_part_that_vanishes_while_it_is_written_stops_its_rank_unless_rank_0_gave_up(tmp_path, monkeypatch, given_up):
    saver = Saver(tmp_path, 1, 2)

    def vanish(path: Path, content: str) -> None:
        if given_up:
            (path.parent / publish.GIVEN_UP).touch()
        raise FileNotFoundError(2, "No such file or directory", str(path))

    monkeypatch.setattr(publish, "write_atomic", vanish)
    saver.save(20)
    if given_up:
        saver.writer.wait()
        assert not list((tmp_path / "checkpoints").rglob("shard_*"))
        return
    with pytest.raises(PacelineError):
        saver.writer.wait()


def test_a_run_folder_that_is_gone_is_an_error_and_is_not_made_again(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    saver = Saver(run)
    saver.save(10)
    saver.writer.wait()
    shutil.rmtree(run)
    saver.save(20)
    with pytest.raises(PacelineError) as error:
        saver.writer.wait()
    assert error.value.message == f"{run} is gone: it existed when the run began"
    assert not run.exists()


def test_a_read_only_folder_is_an_error_even_where_a_full_disk_is_not(tiny_disk):
    if subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], capture_output=True).returncode:
        pytest.skip("may not remount here")
    saver = Saver(tiny_disk)
    saver.save(20)
    with pytest.raises(PacelineError, match="cannot write the checkpoint of step 20 .* Read-only file system"):
        saver.writer.wait()


def cut(folder: Path) -> None:
    shard = next(folder.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])


def flip(folder: Path) -> None:
    shard = next(folder.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)


def lose_shard(folder: Path) -> None:
    next(folder.glob("*.safetensors")).unlink()


def lose_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def cut_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_bytes((folder / "manifest.json").read_bytes()[:-20])


DAMAGES = [cut, flip, lose_shard, lose_manifest, cut_manifest]


@pytest.fixture
def two_checkpoints(tmp_path) -> Path:
    saver = Saver(tmp_path, num_floats=1000, keep_last=2)
    for step in (10, 20):
        saver.save(step)
    saver.writer.wait()
    return tmp_path / "checkpoints"


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_checkpoint_falls_back_to_the_previous_one(two_checkpoints, damage):
    damage(two_checkpoints / "step_000020")
    path, notes = newest_good(two_checkpoints, set_aside=True)
    reader = CheckpointReader(path)
    assert (reader.step, float(reader.read("x")[0])) == (10, 10.0)
    assert notes[0].startswith("checkpoint step_000020 is damaged (")
    assert notes[0].endswith("going on from step_000010, 10 steps are done again")
    assert (two_checkpoints / "step_000020.damaged").is_dir()


@pytest.mark.parametrize("damage", DAMAGES)
def test_when_all_are_damaged_each_is_reported_and_none_is_changed(two_checkpoints, damage):
    for step in (10, 20):
        damage(two_checkpoints / f"step_{step:06d}")
    with pytest.raises(PacelineError) as error:
        newest_good(two_checkpoints, set_aside=True)
    assert "step_000020 is damaged" in error.value.message
    assert "step_000010 is damaged" in error.value.message
    assert error.value.fix == ("copy an intact step folder back from a backup, or train again under another --name")
    assert sorted(path.name for path in two_checkpoints.iterdir()) == ["step_000010", "step_000020"]


def test_half_a_checkpoint_of_a_killed_save_is_removed_not_read(two_checkpoints):
    shutil.copytree(two_checkpoints / "step_000020", two_checkpoints / ".step_000030.1-3.tmp")
    clean_leftovers(two_checkpoints)
    assert newest_good(two_checkpoints, set_aside=False) == (two_checkpoints / "step_000020", [])
    assert not list(two_checkpoints.glob(".step*"))


def test_a_shard_that_this_host_cannot_open_is_refused_as_on_rank_0(two_checkpoints):
    folder = two_checkpoints / "step_000020"
    [shard] = folder.glob("*.safetensors")
    reader = CheckpointReader(folder)
    shard.unlink()
    shard.symlink_to(shard)
    with pytest.raises(UnreadableCheckpoint, match="cannot be read: Too many levels") as error:
        reader.read(reader.keys()[0])
    assert f"mv {folder} {folder}.lost" in error.value.fix
